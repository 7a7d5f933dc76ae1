//! How far a stream has come, seen by the host without the driver.
//!
//! What frees memory, as the end of a communicator does, holds the context's lock until the whole GPU is idle,
//! and an event is looked at under that lock. So whoever waits for something that may never be over, and is to
//! end it then, looks at memory instead: the stream writes there.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use cudarc::driver::sys;

use super::{
    context::{Context, Role, Stream},
    error::{CudaError, Named},
    memory::Pinned,
};

/// A number in host memory that one stream at a time raises by one.
#[derive(Debug)]
pub(super) struct Tally {
    reached: Arc<Reached>,
    marks: u64,
}

#[derive(Debug)]
struct Reached(Pinned<u64>);

impl Reached {
    fn number(&self) -> u64 {
        // SAFETY: the number lives as long as this value, is aligned, and is read and written by atomics and
        // by the GPU alone.
        unsafe { AtomicU64::from_ptr(self.0.base()) }.load(Ordering::Acquire)
    }
}

/// A place in the stream of a [`Tally`].
#[derive(Clone, Debug)]
pub(super) struct Mark {
    reached: Arc<Reached>,
    number: u64,
}

impl Tally {
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let reached = Arc::new(Reached(Pinned::zeroed(context, "how far a stream has come", 1)?));
        Ok(Self { reached, marks: 0 })
    }

    /// Stands for all work put into the stream so far: the same one at each call, or another once that one's work is
    /// done.
    pub fn mark<R: Role>(&mut self, stream: &Stream<R>) -> Result<Mark, CudaError> {
        self.marks += 1;
        let (number, address) = (self.marks, self.reached.0.base() as sys::CUdeviceptr);
        let barrier = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: pinned memory has one address for host and GPU, and outlives the stream's work: whoever
        // holds both sees to that, as to what that work moves. What the work has written is there before
        // the number is.
        unsafe { sys::cuStreamWriteValue64_v2(stream.raw(), address, number, barrier) }
            .named("cuStreamWriteValue64")?;
        Ok(Mark { reached: Arc::clone(&self.reached), number })
    }
}

impl Mark {
    /// Whether that work is done.
    pub fn is_reached(&self) -> bool {
        self.reached.number() >= self.number
    }
}
