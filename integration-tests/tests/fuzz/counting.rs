//! Resource use of a thread: an allocator that counts each thread's bytes, and CPU time.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    time::Duration,
};

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

thread_local! {
    // Constant initial value and no destructor: access allocates nothing.
    static HELD: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

fn add(bytes: isize) {
    // An ending thread frees memory after its thread-local cells are gone.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = MOST.try_with(|most| most.set(most.get().max(held.get())));
    });
}

/// Returns the result, and the peak of bytes that this thread allocated in addition.
pub(crate) fn most_bytes<T>(act: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.get();
    MOST.set(before);
    let result = act();
    (result, usize::try_from(MOST.get() - before).unwrap_or(0))
}

/// Returns this thread's CPU time. Other load on the machine does not count.
pub(crate) fn computed() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists on every Linux, and the pointer is to a live value of its type.
    let outcome = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(outcome, 0, "the thread's clock can be read");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

// SAFETY: every call goes to the system's allocator with the arguments it came with.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: the caller keeps the promises of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: the caller keeps the promises of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        add(bytes as isize - layout.size() as isize);
        // SAFETY: the caller keeps the promises of `realloc`.
        unsafe { System.realloc(pointer, layout, bytes) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        add(-(layout.size() as isize));
        // SAFETY: `alloc`, `alloc_zeroed` or `realloc` got the pointer from the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}
