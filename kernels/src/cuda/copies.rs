//! Batched copies by the copy engines.
//!
//! Consecutive copies on one stream serialize, which leaves gaps between copies from GPU to GPU.
//! The copies of one `cuMemcpyBatchAsync` call are unordered and have no gaps.

use cudarc::driver::sys;

use super::{
    context::{Stream, StreamRole},
    error::{CudaError, Named},
};

/// Copies that may run in any order: no copy writes what another copy reads or writes.
#[derive(Clone, Debug, Default)]
pub(super) struct UnorderedCopies {
    to: Vec<sys::CUdeviceptr>,
    from: Vec<sys::CUdeviceptr>,
    bytes: Vec<usize>,
}

impl UnorderedCopies {
    pub(super) fn add(&mut self, to: sys::CUdeviceptr, from: sys::CUdeviceptr, bytes: usize) {
        self.to.push(to);
        self.from.push(from);
        self.bytes.push(bytes);
    }

    /// Enqueues all copies on `stream` as one batch.
    ///
    /// # Safety
    /// Every source and destination is mapped in the stream's context until the copies complete,
    /// and nothing else writes the destinations.
    pub(super) unsafe fn put<R: StreamRole>(
        &mut self,
        stream: &Stream<R>,
    ) -> Result<(), CudaError> {
        if self.bytes.len() < 2 {
            // SAFETY: every source and destination is mapped until the copies complete, and nothing
            // else writes the destinations (`# Safety`).
            return unsafe { self.enqueue_one_by_one(stream) };
        }
        let nowhere = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID,
            id: 0,
        };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: sys::CUmemcpyFlags::CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE as u32,
        };
        // SAFETY: the three lists have equal length and are read before the call returns. The
        // attributes apply to all copies. The caller guarantees the rest.
        let batch = unsafe {
            sys::cuMemcpyBatchAsync_v2(
                self.to.as_mut_ptr(),
                self.from.as_mut_ptr(),
                self.bytes.as_mut_ptr(),
                self.bytes.len(),
                &mut attributes,
                &mut 0,
                1,
                stream.raw(),
            )
        };
        match batch {
            // The batch call does not support this kind of memory: enqueue single copies, which are
            // slower.
            sys::CUresult::CUDA_ERROR_NOT_SUPPORTED | sys::CUresult::CUDA_ERROR_INVALID_VALUE => {
                // SAFETY: every source and destination is mapped until the copies complete, and
                // nothing else writes the destinations (`# Safety`).
                unsafe { self.enqueue_one_by_one(stream) }
            }
            code => code.named("cuMemcpyBatchAsync"),
        }
    }

    /// Enqueues the copies one by one, in the order in which they were added.
    ///
    /// # Safety
    /// See [`put`](Self::put).
    pub(super) unsafe fn enqueue_one_by_one<R: StreamRole>(
        &self,
        stream: &Stream<R>,
    ) -> Result<(), CudaError> {
        for ((to, from), bytes) in self.to.iter().zip(&self.from).zip(&self.bytes) {
            // SAFETY: source and destination are mapped until the copy completes, and nothing else
            // writes the destination (`# Safety`).
            unsafe { sys::cuMemcpyAsync(*to, *from, *bytes, stream.raw()) }
                .named("cuMemcpyAsync")?;
        }
        Ok(())
    }
}
