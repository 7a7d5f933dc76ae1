//! The GPU's memory, taken once, and host memory that it copies from and to by itself.
//!
//! A [`DeviceMemory`] is one allocation; [`Range`]s are cut from it and last as long as anyone holds
//! one. Rust never reads through a device address: copies and kernels do, checked against the range.

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
    context::{Context, DeviceToHost, Event, HostToDevice, Role, Stream},
    driver_calls::FREE_USUAL,
    error::{CudaError, Named},
};

/// Every range starts at a multiple of this, as vector loads and matrix products like it.
pub const ALIGNMENT: usize = 256;

/// One allocation of device memory, this process's or another's that is mapped here.
#[derive(Debug)]
struct Allocation {
    base: sys::CUdeviceptr,
    /// Of this process; none of another's.
    own_bytes: u64,
    is_mapped: bool,
    context: Arc<Context>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.context.count_given_back(self.own_bytes);
        // Kernels that still use it are waited for by the driver.
        // After a fault that ended the context all of this fails, and the memory is gone with it.
        let _call = self.context.calls().begin(FREE_USUAL);
        let _ = self.context.bind();
        if self.is_mapped {
            // SAFETY: mapped once in `Range::mapped`, let go once here.
            let _ = unsafe { sys::cuIpcCloseMemHandle(self.base) };
        } else {
            // SAFETY: allocated once in `DeviceMemory::new`, freed once here.
            let _ = unsafe { result::free_sync(self.base) };
        }
    }
}

/// One range of the GPU's memory from which smaller ones are cut, front to back, until it is full.
#[derive(Debug)]
pub struct DeviceMemory {
    /// For errors.
    what: &'static str,
    /// `None`: nothing is there, and what would be cut is only counted.
    allocation: Option<Arc<Allocation>>,
    bytes: usize,
    used: AtomicUsize,
}

impl DeviceMemory {
    /// Counts what is cut from it, to know how much to take: its ranges have no memory.
    pub fn counting(what: &'static str) -> Self {
        Self { what, allocation: None, bytes: usize::MAX, used: AtomicUsize::new(0) }
    }

    /// Takes `bytes` bytes, not zeroed.
    pub fn new(
        context: &Arc<Context>,
        what: &'static str,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        context.bind()?;
        // What is cut is filled up, the whole of it too; and no driver gives 0 bytes.
        let bytes = bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(bytes).max(ALIGNMENT);
        // Of the plain allocator, not of a pool: other processes can be let in on it.
        // SAFETY: nothing is read or written.
        let base = unsafe { result::malloc_sync(bytes) }.map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let free = context.free_bytes().unwrap_or(0);
                CudaError::OutOfMemory { what, wanted: bytes as u64, free }
            }
            _ => CudaError::driver("cuMemAlloc", error),
        })?;
        context.count_taken(bytes as u64);
        let (own_bytes, context) = (bytes as u64, Arc::clone(context));
        let allocation = Allocation { base, own_bytes, is_mapped: false, context };
        let allocation = Some(Arc::new(allocation));
        Ok(Self { what, allocation, bytes, used: AtomicUsize::new(0) })
    }

    /// Bytes cut so far, filling included.
    pub fn used_bytes(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// All that was cut so far, once more.
    pub(super) fn everything(&self) -> Range {
        let base = self.allocation.as_ref().map_or(0, |allocation| allocation.base);
        Range { base, bytes: self.used_bytes(), allocation: self.allocation.clone() }
    }

    /// The next `bytes` bytes.
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

/// Device memory of its holder, as long as it lives.
#[derive(Debug)]
pub struct Range {
    base: sys::CUdeviceptr,
    bytes: usize,
    /// `None` when it was only counted.
    allocation: Option<Arc<Allocation>>,
}

impl Range {
    /// `bytes` bytes at `offset` of an allocation that another process has let this one in on by its
    /// handle. They last as long as that process keeps them, or as the driver keeps them for us.
    pub(super) fn mapped(
        context: &Arc<Context>,
        what: &'static str,
        handle: sys::CUipcMemHandle,
        (offset, bytes): (u64, u64),
    ) -> Result<Self, CudaError> {
        context.bind()?;
        let mut base = 0;
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: one address is written; the driver refuses handles that it did not make, and those
        // whose memory is gone.
        unsafe { sys::cuIpcOpenMemHandle_v2(&mut base, handle, flags) }
            .named("cuIpcOpenMemHandle")?;
        let context = Arc::clone(context);
        let allocation = Arc::new(Allocation { base, own_bytes: 0, is_mapped: true, context });
        let (mut start, mut mapped) = (0, 0);
        // SAFETY: the address was mapped just now; two numbers are written.
        unsafe { sys::cuMemGetAddressRange_v2(&mut start, &mut mapped, base) }
            .named("cuMemGetAddressRange")?;
        // What the other process says of its memory is not believed beyond what is mapped.
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

    /// Where it begins, for kernels and copies.
    ///
    /// # Panics
    /// When it was only counted: a defect.
    pub(super) fn address(&self) -> sys::CUdeviceptr {
        assert!(self.allocation.is_some(), "a range that was only counted is not used");
        self.base
    }

    /// The address of `bytes` bytes at `offset`.
    pub(super) fn part(&self, offset: usize, bytes: usize) -> sys::CUdeviceptr {
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(fits, "{bytes} bytes at {offset} are within the {} there are", self.bytes);
        self.address() + offset as u64
    }

    /// Sets every byte, in the stream's order.
    pub fn fill<R: Role>(&self, byte: u8, stream: &Stream<R>) -> Result<(), CudaError> {
        // SAFETY: the range is ours, and lives while it is held; freeing waits for the work.
        unsafe { result::memset_d8_async(self.address(), byte, self.bytes, stream.raw()) }
            .named("cuMemsetD8Async")
    }

    /// Copies `bytes` bytes from another range, in the stream's order.
    pub(super) fn copy<R: Role>(
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

    /// Copies from host memory and waits for it. For start and tests only.
    pub fn write<T: Pod>(&self, offset: usize, values: &[T]) -> Result<(), CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let address = self.part(offset, bytes.len());
        if bytes.is_empty() {
            return Ok(());
        }
        self.wait_here()?;
        // SAFETY: the bytes are inside the range, and the call returns when they are read.
        unsafe { result::memcpy_htod_sync(address, bytes) }.named("cuMemcpyHtoD")?;
        // More than a little goes through memory of the driver's, and may be read before it is there; and
        // our streams do not wait for the one of this copy.
        // SAFETY: every context has this stream.
        unsafe { result::stream::synchronize(ptr::null_mut()) }.named("cuStreamSynchronize")
    }

    /// Copies to host memory and waits for it. For start and tests only: what streams are still
    /// writing is not waited for.
    pub fn read<T: Pod>(&self, offset: usize, values: &mut [T]) -> Result<(), CudaError> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        let address = self.part(offset, bytes.len());
        if bytes.is_empty() {
            return Ok(());
        }
        self.wait_here()?;
        // SAFETY: the bytes are inside the range, and the call returns when they are written.
        unsafe { result::memcpy_dtoh_sync(bytes, address) }.named("cuMemcpyDtoH")
    }

    fn wait_here(&self) -> Result<(), CudaError> {
        let allocation = self.allocation.as_ref().expect("`part` has found it allocated");
        allocation.context.count_wait();
        allocation.context.bind()
    }
}

/// Host memory that stays where it is, so that the GPU copies from and to it without help. While it
/// does, the memory is an [`InFlight`] and out of reach.
#[derive(Debug)]
pub struct Pinned<T: Pod> {
    base: *mut T,
    len: usize,
    context: Arc<Context>,
}

// SAFETY: it owns its memory, as a `Box<[T]>` does.
unsafe impl<T: Pod + Send> Send for Pinned<T> {}
// SAFETY: as above.
unsafe impl<T: Pod + Sync> Sync for Pinned<T> {}

impl<T: Pod> Pinned<T> {
    /// Zeroed. Cached by the host as all memory is: write-combined memory is slow to read.
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
        assert!(base.is_aligned(), "pinned memory starts at a page");
        // SAFETY: so many bytes were given just now, and nobody else has them.
        unsafe { base.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { base, len, context: Arc::clone(context) })
    }

    /// Where it begins, for kernels and libraries that fill it.
    pub(super) fn base(&self) -> *mut T {
        self.base
    }

    /// Copies the first `len` elements to `offset` bytes into `to`, in the stream's order.
    pub fn upload(
        self,
        len: usize,
        to: &Range,
        offset: usize,
        stream: &Stream<HostToDevice>,
        done: Event,
    ) -> Result<InFlight<T>, CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(&self[..len]);
        let address = to.part(offset, bytes.len());
        if !bytes.is_empty() {
            // SAFETY: the bytes are inside the range; the host's stay where they are and are
            // neither changed nor freed until `done`, which `InFlight` sees to.
            unsafe { result::memcpy_htod_async(address, bytes, stream.raw()) }
                .named("cuMemcpyHtoDAsync")?;
        }
        InFlight::until(self, done, stream)
    }

    /// Copies `len` elements from `offset` bytes into `from`, in the stream's order.
    pub fn download(
        mut self,
        len: usize,
        from: &Range,
        offset: usize,
        stream: &Stream<DeviceToHost>,
        done: Event,
    ) -> Result<InFlight<T>, CudaError> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self[..len]);
        let address = from.part(offset, bytes.len());
        if !bytes.is_empty() {
            // SAFETY: as in `upload`, and nobody reads the host's bytes before `done`.
            unsafe { result::memcpy_dtoh_async(bytes, address, stream.raw()) }
                .named("cuMemcpyDtoHAsync")?;
        }
        InFlight::until(self, done, stream)
    }
}

impl<T: Pod> Deref for Pinned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements were allocated and written at `base`, which this value owns, and
        // the GPU does not write them: it does so to an `InFlight` only.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }
}

impl<T: Pod> DerefMut for Pinned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `&mut self` makes it the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }
}

impl<T: Pod> Drop for Pinned<T> {
    fn drop(&mut self) {
        // As with device memory.
        let _call = self.context.calls().begin(FREE_USUAL);
        let _ = self.context.bind();
        // SAFETY: allocated once, freed once, and no copy is under way.
        let _ = unsafe { result::free_host(self.base.cast()) };
    }
}

/// Pinned memory that a copy reads or writes.
#[derive(Debug)]
pub struct InFlight<T: Pod> {
    /// `None` once it was taken back.
    copy: Option<(Pinned<T>, Event)>,
}

impl<T: Pod> InFlight<T> {
    fn until<R: Role>(
        pinned: Pinned<T>,
        done: Event,
        stream: &Stream<R>,
    ) -> Result<Self, CudaError> {
        let recorded = done.record(stream);
        let in_flight = Self { copy: Some((pinned, done)) };
        if let Err(error) = recorded {
            // Without a mark only the whole stream can be waited for.
            let _ = stream.synchronize();
            return Err(error);
        }
        Ok(in_flight)
    }

    /// True when the copy is over, and [`Self::finish`] does not wait.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.event().is_done()
    }

    /// Stands for the end of the copy.
    pub fn event(&self) -> &Event {
        &self.copy.as_ref().expect("it is taken by `finish` alone").1
    }

    /// Waits for the copy, and gives memory and event back.
    pub fn finish(mut self) -> Result<(Pinned<T>, Event), CudaError> {
        // One that is over costs no blocking call.
        if !self.is_done()? {
            self.event().synchronize()?;
        }
        Ok(self.copy.take().expect("it is taken once"))
    }
}

impl<T: Pod> Drop for InFlight<T> {
    fn drop(&mut self) {
        if let Some((_, done)) = &self.copy {
            // The GPU may not write into memory that was freed. After a fault it writes no more.
            let _ = done.synchronize();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counting_takes_what_cutting_would_with_its_filling() {
        let memory = DeviceMemory::counting("the weights");
        for (bytes, used) in [(1, 256), (256, 512), (257, 1024), (0, 1024)] {
            let range = memory.cut(bytes).unwrap();
            assert_eq!((range.bytes(), memory.used_bytes()), (bytes, used));
        }
        let error = memory.cut(usize::MAX - 300).unwrap_err();
        assert!(error.to_string().starts_with("the weights wants"), "{error}");
        assert_eq!(memory.used_bytes(), 1024);
    }

    #[test]
    #[should_panic(expected = "only counted")]
    fn a_counted_range_is_not_used() {
        DeviceMemory::counting("the weights").cut(16).unwrap().part(0, 16);
    }
}
