//! Waits for a word that another process changes.
//!
//! As usual with futexes, a wait may end spuriously, so the caller checks the word again. A process
//! changes the word first and wakes waiters afterwards, so a wait that begins in between sees the
//! new value and does not sleep.

use std::{sync::atomic::AtomicU32, time::Duration};

/// Sleeps while the word is `expected`, for at most `at_most`.
#[cfg(target_os = "linux")]
pub fn wait(word: &AtomicU32, expected: u32, at_most: Duration) {
    let seconds = libc::time_t::try_from(at_most.as_secs()).unwrap_or(libc::time_t::MAX);
    let nanos = at_most.subsec_nanos() as libc::c_long;
    let timeout = libc::timespec { tv_sec: seconds, tv_nsec: nanos };
    // SAFETY: the word's address is valid for the call, and the system only reads it; the time
    // outlives the call. The caller checks the word again after every wait.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            // Not FUTEX_PRIVATE: other processes map the word at other addresses.
            libc::FUTEX_WAIT,
            expected,
            &raw const timeout,
        );
    }
}

/// Wakes all processes that sleep on the word.
#[cfg(target_os = "linux")]
pub fn wake_all(word: &AtomicU32) {
    // SAFETY: the system uses the address as a key only.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, libc::c_int::MAX);
    }
}

/// Sleeps briefly, because this system has no futex.
#[cfg(not(target_os = "linux"))]
pub fn wait(word: &AtomicU32, expected: u32, at_most: Duration) {
    if word.load(std::sync::atomic::Ordering::Acquire) == expected {
        std::thread::sleep(at_most.min(Duration::from_millis(1)));
    }
}

#[cfg(not(target_os = "linux"))]
pub fn wake_all(_: &AtomicU32) {}
