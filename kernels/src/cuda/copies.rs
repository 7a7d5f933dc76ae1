//! Many copies at once by the copy engines.
//!
//! One after another in a stream, copies between GPUs leave pauses: each waits for the end of the one
//! before. In a batch they are in no order, and follow one another without.

use cudarc::driver::sys;

use super::{
    context::{Role, Stream},
    error::{CudaError, Named},
};

/// Copies that may happen in any order: none writes what another reads or writes.
#[derive(Clone, Debug, Default)]
pub(super) struct Copies {
    to: Vec<sys::CUdeviceptr>,
    from: Vec<sys::CUdeviceptr>,
    bytes: Vec<usize>,
}

impl Copies {
    pub fn add(&mut self, to: sys::CUdeviceptr, from: sys::CUdeviceptr, bytes: usize) {
        self.to.push(to);
        self.from.push(from);
        self.bytes.push(bytes);
    }

    /// Puts all of them into the stream, as one piece of its work.
    ///
    /// # Safety
    /// Every range copied from and to is mapped in the stream's context until the stream's work is
    /// done, and nothing else writes those that are written.
    pub unsafe fn put<R: Role>(&mut self, stream: &Stream<R>) -> Result<(), CudaError> {
        if self.bytes.len() < 2 {
            // SAFETY: the caller's promise.
            return unsafe { self.put_one_by_one(stream) };
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
        // SAFETY: the lists are equally long and are read before the call returns; the attributes are
        // those of all copies from the first on. The rest is the caller's promise.
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
            // Memory of a kind that batches do not know: the copies are the same, and slower.
            sys::CUresult::CUDA_ERROR_NOT_SUPPORTED | sys::CUresult::CUDA_ERROR_INVALID_VALUE => {
                // SAFETY: the caller's promise.
                unsafe { self.put_one_by_one(stream) }
            }
            code => code.named("cuMemcpyBatchAsync"),
        }
    }

    /// As [`put`](Self::put), in the order in which they were added.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn put_one_by_one<R: Role>(&self, stream: &Stream<R>) -> Result<(), CudaError> {
        for ((to, from), bytes) in self.to.iter().zip(&self.from).zip(&self.bytes) {
            // SAFETY: the caller's promise.
            unsafe { sys::cuMemcpyAsync(*to, *from, *bytes, stream.raw()) }
                .named("cuMemcpyAsync")?;
        }
        Ok(())
    }
}
