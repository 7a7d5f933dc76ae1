//! Zeroed memory aligned for vector loads. Large buffers are in huge pages.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    marker::PhantomData,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    slice,
    sync::Arc,
};

use bytemuck::Pod;
use memmap2::MmapMut;

/// Size of a cache line and of a 512-bit vector, in bytes.
const LINE: usize = 64;
/// Bytes that a slab allocates from the system at a time.
const SLAB_BYTES: usize = 32 << 20;
/// Size of a huge page in bytes. Every step streams all weights from memory, and a TLB entry per 4
/// KiB would cost a good part of the bandwidth.
const HUGE_PAGE: usize = 2 << 20;

/// Zeroed boxed slice of plain numbers, aligned to at least 64 bytes.
pub(crate) struct Aligned<T: Pod> {
    start: NonNull<T>,
    length: usize,
    memory: AlignedMemory,
    _owns: PhantomData<T>,
}

/// Memory that holds the numbers.
enum AlignedMemory {
    Nothing,
    Heap(Layout),
    /// Range of a mapping. Ranges of different values do not overlap.
    Map {
        _owner: Arc<MmapMut>,
    },
}

// SAFETY: owns its memory like a Box<[T]>.
unsafe impl<T: Pod + Send> Send for Aligned<T> {}
// SAFETY: `&Aligned` gives out only `&[T]`, like a `&Box<[T]>`.
unsafe impl<T: Pod + Sync> Sync for Aligned<T> {}

impl<T: Pod> Aligned<T> {
    /// Allocates zeroed numbers. Aborts when the system has no memory, as a `Vec` does.
    pub(super) fn zeroed(length: usize) -> Self {
        let bytes = length.checked_mul(size_of::<T>()).expect("a buffer fits the address space");
        let layout = Layout::from_size_align(bytes, LINE).expect("a buffer fits the address space");
        let (start, memory) = if bytes == 0 {
            (NonNull::dangling(), AlignedMemory::Nothing)
        } else if let Some(pages) =
            (bytes >= 2 * HUGE_PAGE).then(|| HugePages::map(bytes)).flatten()
        {
            (pages.start.cast(), AlignedMemory::Map { _owner: pages.map })
        } else {
            // SAFETY: the size is not 0.
            let raw = unsafe { alloc_zeroed(layout) };
            let Some(start) = NonNull::new(raw) else { handle_alloc_error(layout) };
            (start.cast(), AlignedMemory::Heap(layout))
        };
        Self { start, length, memory, _owns: PhantomData }
    }
}

/// Huge pages that many matrices share, so that no matrix wastes the rest of its last page.
#[derive(Default)]
pub(crate) struct Slab {
    rest: Option<HugePages>,
}

impl Slab {
    /// Allocates zeroed numbers like [`Aligned::zeroed`]. A mapping of the slab is freed when its
    /// last buffer is dropped.
    pub(super) fn zeroed<T: Pod>(&mut self, length: usize) -> Aligned<T> {
        let bytes = length.checked_mul(size_of::<T>()).expect("a buffer fits the address space");
        // A buffer of at least a quarter slab has its own huge pages.
        if bytes == 0 || bytes >= SLAB_BYTES / 4 {
            return Aligned::zeroed(length);
        }
        if self.rest.as_ref().is_none_or(|rest| rest.length < bytes) {
            self.rest = HugePages::map(SLAB_BYTES);
        }
        match self.rest.as_mut().map(|rest| rest.take(bytes)) {
            Some(HugePages { map, start, .. }) => Aligned {
                start: start.cast(),
                length,
                memory: AlignedMemory::Map { _owner: map },
                _owns: PhantomData,
            },
            None => Aligned::zeroed(length),
        }
    }
}

/// Range of a zeroed mapping, handed out once. Uses huge pages where the system has them.
struct HugePages {
    map: Arc<MmapMut>,
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: `start` points into `map`, and the range belongs to this value alone.
unsafe impl Send for HugePages {}

impl HugePages {
    fn map(bytes: usize) -> Option<Self> {
        let mut map = MmapMut::map_anon(bytes.checked_add(HUGE_PAGE)?).ok()?;
        // A refusal only costs speed.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let raw = map.as_mut_ptr();
        let skip = raw.align_offset(HUGE_PAGE);
        assert!(skip <= HUGE_PAGE, "the next huge page begins inside the first {HUGE_PAGE} bytes");
        // SAFETY: `skip` is inside the mapping, which has HUGE_PAGE bytes more than asked for.
        let start = NonNull::new(unsafe { raw.add(skip) })?;
        Some(Self { map: Arc::new(map), start, length: bytes })
    }

    /// Splits the first bytes off the range, rounded up to whole cache lines.
    fn take(&mut self, bytes: usize) -> Self {
        assert!(bytes <= self.length, "the range has as much left");
        let taken = Self { map: Arc::clone(&self.map), start: self.start, length: bytes };
        let used = bytes.next_multiple_of(LINE).min(self.length);
        // SAFETY: at most at the end of the range.
        self.start = unsafe { self.start.add(used) };
        self.length -= used;
        taken
    }
}

impl<T: Pod> Deref for Aligned<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `length` elements were allocated and zeroed, and zero is a value of every Pod.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl<T: Pod> DerefMut for Aligned<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: `length` elements were allocated and zeroed, and `&mut self` borrows them alone.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl<T: Pod> Drop for Aligned<T> {
    fn drop(&mut self) {
        if let AlignedMemory::Heap(layout) = self.memory {
            // SAFETY: allocated by `zeroed` with this layout.
            unsafe { dealloc(self.start.as_ptr().cast(), layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_and_aligned_at_every_size() {
        for length in [0, 1, 15, 4096, (1 << 20) + 1, 3 << 20] {
            let mut memory = Aligned::<f32>::zeroed(length);
            assert_eq!(memory.len(), length);
            assert!(length == 0 || (memory.as_ptr() as usize).is_multiple_of(LINE));
            assert!(memory.iter().all(|&value| value == 0.0));
            memory.fill(1.0);
        }
    }

    #[test]
    fn buffers_of_a_slab_do_not_overlap_and_outlive_it() {
        let mut slab = Slab::default();
        let lengths = [1, 0, 17, 1 << 18, 3 << 20, 5 << 18, 1 << 22, 1000, 2 << 20];
        let mut buffers: Vec<Aligned<u32>> =
            (0..40).map(|i| slab.zeroed(lengths[i % lengths.len()])).collect();
        drop(slab);
        for (number, buffer) in (1..).zip(&mut buffers) {
            assert!(buffer.is_empty() || (buffer.as_ptr() as usize).is_multiple_of(LINE));
            assert!(buffer.iter().all(|&word| word == 0));
            buffer.fill(number);
        }
        for (number, buffer) in (1..).zip(&buffers) {
            assert!(buffer.iter().all(|&word| word == number));
        }
    }
}
