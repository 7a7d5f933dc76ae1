//! GPU memory, allocated once, and pinned host memory for asynchronous copies.
//!
//! A [`DeviceMemory`] is one allocation. [`Range`]s are cut from it and keep it alive. Only copies
//! and kernels use device addresses; Rust code never dereferences them.

use std::{
    ops::{Deref, DerefMut},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytemuck::Pod;
use cudarc::driver::{result, sys};

use super::{
    context::{Context, DeviceToHost, Event, HostToDevice, Stream, StreamRole},
    driver_calls::FREE_USUAL,
    error::{CudaError, Named},
};

/// Alignment of every range in bytes, for vector loads and GEMMs.
pub const ALIGNMENT: usize = 256;

/// One allocation of device memory, owned by this process or mapped from another process.
#[derive(Debug)]
struct Allocation {
    base: sys::CUdeviceptr,
    /// Bytes allocated by this process; 0 for mapped memory.
    own_bytes: u64,
    is_mapped: bool,
    context: Arc<Context>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.context.count_freed(self.own_bytes);
        // The driver waits for kernels that still use the memory.
        // After an error that ended the context these calls fail, and the memory is already freed.
        let _call = self.context.calls().begin(FREE_USUAL);
        let _ = self.context.bind();
        if self.is_mapped {
            // SAFETY: the memory was mapped once in `Range::mapped` and is unmapped once.
            let _ = unsafe { sys::cuIpcCloseMemHandle(self.base) };
        } else {
            // SAFETY: the memory was allocated once in `DeviceMemory::new` and is freed once.
            let _ = unsafe { result::free_sync(self.base) };
        }
    }
}

/// One allocation of GPU memory, from which ranges are cut front to back.
#[derive(Debug)]
pub struct DeviceMemory {
    /// Name of the memory in errors.
    what: &'static str,
    /// `None`: no memory is allocated, and cut bytes are only counted.
    allocation: Option<Arc<Allocation>>,
    bytes: usize,
    used: AtomicUsize,
}

impl DeviceMemory {
    /// Creates a counter of the bytes that ranges would take. Nothing is allocated.
    pub fn counting(what: &'static str) -> Self {
        Self { what, allocation: None, bytes: usize::MAX, used: AtomicUsize::new(0) }
    }

    /// Allocates `bytes` bytes without zeroing them.
    pub fn new(
        context: &Arc<Context>,
        what: &'static str,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        context.bind()?;
        // Ranges are rounded up to the alignment, so the allocation is too. The driver rejects 0
        // bytes.
        let bytes = bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(bytes).max(ALIGNMENT);
        // Other processes can map memory from `cuMemAlloc`, but not memory from a pool.
        // SAFETY: nothing is read or written.
        let base = unsafe { result::malloc_sync(bytes) }.map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let free = context.free_bytes().unwrap_or(0);
                CudaError::OutOfMemory { what, wanted: bytes as u64, free }
            }
            _ => CudaError::driver("cuMemAlloc", error),
        })?;
        context.count_allocated(bytes as u64);
        let (own_bytes, context) = (bytes as u64, Arc::clone(context));
        let allocation = Allocation { base, own_bytes, is_mapped: false, context };
        let allocation = Some(Arc::new(allocation));
        Ok(Self { what, allocation, bytes, used: AtomicUsize::new(0) })
    }

    /// Returns the same memory, to cut ranges from its front again.
    pub(super) fn alias(&self, what: &'static str) -> Self {
        let (allocation, used) = (self.allocation.clone(), AtomicUsize::new(0));
        Self { what, allocation, bytes: self.bytes, used }
    }

    /// Returns the bytes cut so far, including alignment.
    pub fn used_bytes(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Returns one range that covers all ranges cut so far.
    pub(super) fn everything(&self) -> Range {
        let base = self.allocation.as_ref().map_or(0, |allocation| allocation.base);
        Range { base, bytes: self.used_bytes(), allocation: self.allocation.clone() }
    }

    /// Cuts the next ranges from the front again. Earlier ranges name the same memory.
    pub(super) fn reset(&self) {
        self.used.store(0, Ordering::Relaxed);
    }

    /// Cuts the next `bytes` bytes.
    pub fn cut(&self, bytes: usize) -> Result<Range, CudaError> {
        let padded = bytes.checked_next_multiple_of(ALIGNMENT);
        let cut = |used: usize| used.checked_add(padded?).filter(|end| *end <= self.bytes);
        let start =
            self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, cut).map_err(|used| {
                CudaError::RangeFull {
                    what: self.what,
                    wanted: bytes as u64,
                    left: (self.bytes - used) as u64,
                }
            })?;
        let allocation = self.allocation.clone();
        let base = allocation.as_ref().map_or(0, |allocation| allocation.base);
        Ok(Range { base: base + start as u64, bytes, allocation })
    }
}

/// A range of device memory. It keeps its allocation alive.
#[derive(Debug)]
pub struct Range {
    base: sys::CUdeviceptr,
    bytes: usize,
    /// `None` when the range was only counted.
    allocation: Option<Arc<Allocation>>,
}

impl Range {
    /// Maps `bytes` bytes at `offset` of an allocation that another process exported as `handle`.
    /// The mapping lasts until that process frees the memory or this range is dropped.
    pub(super) fn mapped(
        context: &Arc<Context>,
        what: &'static str,
        handle: sys::CUipcMemHandle,
        (offset, bytes): (u64, u64),
    ) -> Result<Self, CudaError> {
        context.bind()?;
        let mut base = 0;
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: one address is written; the driver rejects handles that it did not create or
        // whose memory was freed.
        unsafe { sys::cuIpcOpenMemHandle_v2(&mut base, handle, flags) }
            .named("cuIpcOpenMemHandle")?;
        let context = Arc::clone(context);
        let allocation = Arc::new(Allocation { base, own_bytes: 0, is_mapped: true, context });
        let (mut start, mut mapped) = (0, 0);
        // SAFETY: the address was just mapped; two numbers are written.
        unsafe { sys::cuMemGetAddressRange_v2(&mut start, &mut mapped, base) }
            .named("cuMemGetAddressRange")?;
        // The other process may have stated a range that exceeds its allocation.
        let left = (mapped as u64).saturating_sub(base - start).checked_sub(offset);
        if left.is_none_or(|left| bytes > left) {
            let (wanted, left) = (bytes, left.unwrap_or(0));
            return Err(CudaError::RangeFull { what, wanted, left });
        }
        Ok(Self { base: base + offset, bytes: bytes as usize, allocation: Some(allocation) })
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns `bytes` bytes at `offset` as a range of its own.
    pub(super) fn slice(&self, offset: usize, bytes: usize) -> Self {
        Self { base: self.part(offset, bytes), bytes, allocation: self.allocation.clone() }
    }

    /// Returns the start address, for kernels and copies.
    ///
    /// # Panics
    /// When the range was only counted, which is a bug.
    pub(super) fn address(&self) -> sys::CUdeviceptr {
        assert!(self.allocation.is_some(), "cannot use a range that was only counted");
        self.base
    }

    /// Returns the address of `bytes` bytes at `offset`.
    pub(super) fn part(&self, offset: usize, bytes: usize) -> sys::CUdeviceptr {
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(fits, "{bytes} bytes at {offset} exceed the range of {} bytes", self.bytes);
        self.address() + offset as u64
    }

    /// Enqueues a memset of every byte.
    pub fn fill<R: StreamRole>(&self, byte: u8, stream: &Stream<R>) -> Result<(), CudaError> {
        if self.bytes == 0 {
            return Ok(());
        }
        // SAFETY: the range keeps its allocation alive, and freeing the allocation waits for this
        // memset.
        unsafe { result::memset_d8_async(self.address(), byte, self.bytes, stream.raw()) }
            .named("cuMemsetD8Async")
    }

    /// Enqueues a copy of `bytes` bytes from another range.
    pub(super) fn copy<R: StreamRole>(
        &self,
        offset: usize,
        from: &Range,
        from_offset: usize,
        bytes: usize,
        stream: &Stream<R>,
    ) -> Result<(), CudaError> {
        let (to, from) = (self.part(offset, bytes), from.part(from_offset, bytes));
        // SAFETY: both parts are inside their ranges, which do not overlap.
        unsafe { result::memcpy_dtod_async(to, from, bytes, stream.raw()) }
            .named("cuMemcpyDtoDAsync")
    }

    /// Copies from host memory and waits for the copy. For start-up, adapters and tests only.
    pub fn write<T: Pod>(&self, offset: usize, values: &[T]) -> Result<(), CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let address = self.part(offset, bytes.len());
        if bytes.is_empty() {
            return Ok(());
        }
        self.begin_blocking_copy()?;
        // SAFETY: the bytes are inside the range, and were read when the call returns.
        unsafe { result::memcpy_htod_sync(address, bytes) }.named("cuMemcpyHtoD")?;
        // The call may return before the device has the bytes, because the driver stages larger
        // copies. Wait for the default stream, which runs the copy: Baton's streams do not wait for
        // it.
        // SAFETY: every context has a default stream.
        unsafe { result::stream::synchronize(ptr::null_mut()) }.named("cuStreamSynchronize")
    }

    /// Copies to host memory and waits for the copy, but not for other streams that may still write
    /// the range. For start-up and tests only.
    pub fn read<T: Pod>(&self, offset: usize, values: &mut [T]) -> Result<(), CudaError> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        let address = self.part(offset, bytes.len());
        if bytes.is_empty() {
            return Ok(());
        }
        self.begin_blocking_copy()?;
        // SAFETY: the bytes are inside the range, and were written when the call returns.
        unsafe { result::memcpy_dtoh_sync(bytes, address) }.named("cuMemcpyDtoH")
    }

    fn begin_blocking_copy(&self) -> Result<(), CudaError> {
        let allocation = self.allocation.as_ref().expect("`part` has checked the allocation");
        allocation.context.count_wait();
        allocation.context.bind()
    }
}

/// Pinned (page-locked) host memory for asynchronous copies. During a copy the memory is a
/// [`CopyInFlight`] and inaccessible.
#[derive(Debug)]
pub struct PinnedMemory<T: Pod> {
    base: *mut T,
    len: usize,
    context: Arc<Context>,
}

// SAFETY: the value owns its memory, as a `Box<[T]>` does.
unsafe impl<T: Pod + Send> Send for PinnedMemory<T> {}
// SAFETY: `&PinnedMemory` gives out only `&[T]`, as `&Box<[T]>` does.
unsafe impl<T: Pod + Sync> Sync for PinnedMemory<T> {}

impl<T: Pod> PinnedMemory<T> {
    /// Allocates zeroed memory. It is not write-combined, which the host would read slowly.
    pub fn zeroed(
        context: &Arc<Context>,
        what: &'static str,
        len: usize,
    ) -> Result<Self, CudaError> {
        context.bind()?;
        let refused = |_| {
            let wanted = (len as u64).saturating_mul(size_of::<T>() as u64);
            CudaError::OutOfPinnedMemory { what, wanted }
        };
        let bytes = len.checked_mul(size_of::<T>()).ok_or(()).map_err(refused)?.max(1);
        // SAFETY: nothing is read or written yet.
        let base = unsafe { result::malloc_host(bytes, 0) }.map_err(|_| refused(()))?.cast::<T>();
        assert!(base.is_aligned(), "pinned memory is page-aligned");
        // SAFETY: `bytes` bytes were just allocated, and nothing else uses them.
        unsafe { base.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { base, len, context: Arc::clone(context) })
    }

    /// Returns the start address, for kernels and libraries that fill the memory.
    pub(super) fn base(&self) -> *mut T {
        self.base
    }

    /// Enqueues a copy of the first `len` elements to `offset` bytes into `to`.
    pub fn upload(
        self,
        len: usize,
        to: &Range,
        offset: usize,
        stream: &Stream<HostToDevice>,
        done: Event,
    ) -> Result<CopyInFlight<T>, CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(&self[..len]);
        let address = to.part(offset, bytes.len());
        if !bytes.is_empty() {
            // SAFETY: the bytes are inside the range. `CopyInFlight` keeps the host memory
            // allocated and unchanged until `done`.
            unsafe { result::memcpy_htod_async(address, bytes, stream.raw()) }
                .named("cuMemcpyHtoDAsync")?;
        }
        CopyInFlight::until(self, done, stream)
    }

    /// Enqueues a copy of `len` elements from `offset` bytes into `from`.
    pub fn download(
        mut self,
        len: usize,
        from: &Range,
        offset: usize,
        stream: &Stream<DeviceToHost>,
        done: Event,
    ) -> Result<CopyInFlight<T>, CudaError> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self[..len]);
        let address = from.part(offset, bytes.len());
        if !bytes.is_empty() {
            // SAFETY: the bytes are inside the range. `CopyInFlight` keeps the host memory
            // allocated until `done`, and nothing reads it before.
            unsafe { result::memcpy_dtoh_async(bytes, address, stream.raw()) }
                .named("cuMemcpyDtoHAsync")?;
        }
        CopyInFlight::until(self, done, stream)
    }
}

impl<T: Pod> Deref for PinnedMemory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: this value owns `len` initialized elements at `base`, and the GPU only writes
        // memory that is a `CopyInFlight`.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }
}

impl<T: Pod> DerefMut for PinnedMemory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: this value owns `len` initialized elements at `base`, the GPU only writes memory
        // that is a `CopyInFlight`, and `&mut self` makes this the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }
}

impl<T: Pod> Drop for PinnedMemory<T> {
    fn drop(&mut self) {
        // As with device memory, freeing may block.
        let _call = self.context.calls().begin(FREE_USUAL);
        let _ = self.context.bind();
        // SAFETY: the memory was allocated once, is freed once, and no copy is in flight.
        let _ = unsafe { result::free_host(self.base.cast()) };
    }
}

/// Pinned memory that an asynchronous copy reads or writes.
#[derive(Debug)]
pub struct CopyInFlight<T: Pod> {
    /// `None` after [`Self::finish`].
    copy: Option<(PinnedMemory<T>, Event)>,
}

impl<T: Pod> CopyInFlight<T> {
    fn until<R: StreamRole>(
        pinned: PinnedMemory<T>,
        done: Event,
        stream: &Stream<R>,
    ) -> Result<Self, CudaError> {
        let recorded = done.record(stream);
        let in_flight = Self { copy: Some((pinned, done)) };
        if let Err(error) = recorded {
            // Without the event, wait for the whole stream.
            let _ = stream.synchronize();
            return Err(error);
        }
        Ok(in_flight)
    }

    /// Returns whether the copy has completed, so that [`Self::finish`] does not block.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.event().is_done()
    }

    /// Returns the event that completes with the copy.
    pub fn event(&self) -> &Event {
        &self.copy.as_ref().expect("only `finish` takes the copy").1
    }

    /// Waits for the copy and returns memory and event.
    pub fn finish(mut self) -> Result<(PinnedMemory<T>, Event), CudaError> {
        // A completed copy needs no blocking call.
        if !self.is_done()? {
            self.event().synchronize()?;
        }
        Ok(self.copy.take().expect("the copy is taken once"))
    }
}

impl<T: Pod> Drop for CopyInFlight<T> {
    fn drop(&mut self) {
        if let Some((_, done)) = &self.copy {
            // The GPU must not access freed memory. After an error it no longer accesses it.
            let _ = done.synchronize();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counted_bytes_include_alignment() {
        let memory = DeviceMemory::counting("the weights");
        for (bytes, used) in [(1, 256), (256, 512), (257, 1024), (0, 1024)] {
            let range = memory.cut(bytes).unwrap();
            assert_eq!((range.bytes(), memory.used_bytes()), (bytes, used));
        }
        let error = memory.cut(usize::MAX - 300).unwrap_err();
        assert!(error.to_string().contains("reserve memory for the weights"), "{error}");
        assert_eq!(memory.used_bytes(), 1024);
    }

    #[test]
    #[should_panic(expected = "only counted")]
    fn counted_range_has_no_address() {
        DeviceMemory::counting("the weights").cut(16).unwrap().part(0, 16);
    }
}
