//! A slice that several threads write to in disjoint parts.

use std::marker::PhantomData;

/// Exclusively borrowed slice that hands out disjoint parts.
pub(crate) struct DisjointSlice<'a, T> {
    start: *mut T,
    length: usize,
    _borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: disjoint parts of a `&mut [T]` may be used on several threads when T is Send. The callers
// of `slice` promise that the parts are disjoint.
unsafe impl<T: Send> Sync for DisjointSlice<'_, T> {}
// SAFETY: the value is a `&mut [T]` in parts, which may move to another thread when T is Send.
unsafe impl<T: Send> Send for DisjointSlice<'_, T> {}

impl<'a, T> DisjointSlice<'a, T> {
    pub(super) fn new(whole: &'a mut [T]) -> Self {
        Self { start: whole.as_mut_ptr(), length: whole.len(), _borrow: PhantomData }
    }

    /// Returns elements `start..start + length`. Panics when the range is out of bounds.
    ///
    /// # Safety
    /// Slices that are alive at the same time must not overlap.
    #[allow(clippy::mut_from_ref)] // `self` holds the exclusive borrow; see `# Safety`.
    pub(super) unsafe fn slice(&self, start: usize, length: usize) -> &mut [T] {
        // SAFETY: `range_ptr` has checked that the elements are inside the borrowed slice. No slice
        // that is alive overlaps them (`# Safety`).
        unsafe { std::slice::from_raw_parts_mut(self.range_ptr(start, length), length) }
    }

    /// Returns the address of element `start`. Panics when `start..start + length` is out of
    /// bounds.
    pub(super) fn range_ptr(&self, start: usize, length: usize) -> *mut T {
        assert!(start <= self.length && length <= self.length - start, "the part is out of bounds");
        self.start.wrapping_add(start)
    }
}
