//! Progress of a stream that the host reads without calling the driver.
//!
//! A call that frees memory, such as destroying a communicator, holds the context's lock until the
//! whole GPU is idle. Querying an event takes the same lock. A thread that waits for an operation
//! that may hang therefore polls host memory that the stream writes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use cudarc::driver::sys;

use super::{
    context::{Context, Event, Stream, StreamRole},
    error::{CudaError, Named},
    memory::PinnedMemory,
};

/// Time after which a wait sleeps between its polls. The digests of a batch of blocks, or the copy
/// of two blocks of 2 MiB, take less.
const SPIN: Duration = Duration::from_micros(100);
/// Pause between polls.
const PAUSE: Duration = Duration::from_micros(20);
/// Number of pauses between two queries of the event. Only a query shows that the context has
/// failed, in which case no mark is ever reached.
const PAUSES_PER_QUERY: u32 = 1000;

/// A counter in host memory that one stream increments.
#[derive(Debug)]
pub(super) struct StreamProgress {
    reached: Arc<ReachedNumber>,
    marks: u64,
}

#[derive(Debug)]
struct ReachedNumber(PinnedMemory<u64>);

impl ReachedNumber {
    fn number(&self) -> u64 {
        // SAFETY: the number lives as long as this value, is aligned, and is accessed only by
        // atomics and by the GPU.
        unsafe { AtomicU64::from_ptr(self.0.base()) }.load(Ordering::Acquire)
    }
}

/// A position in the stream of a [`StreamProgress`].
#[derive(Clone, Debug)]
pub(super) struct StreamMark {
    reached: Arc<ReachedNumber>,
    number: u64,
}

impl StreamProgress {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let reached =
            Arc::new(ReachedNumber(PinnedMemory::zeroed(context, "the progress of a stream", 1)?));
        Ok(Self { reached, marks: 0 })
    }

    /// Marks the end of all work in the stream so far. Every call must pass the same stream, or
    /// another stream once the work of the earlier stream is complete.
    pub(super) fn mark<R: StreamRole>(
        &mut self,
        stream: &Stream<R>,
    ) -> Result<StreamMark, CudaError> {
        self.marks += 1;
        let (number, address) = (self.marks, self.reached.0.base() as sys::CUdeviceptr);
        let barrier = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: pinned memory has one address for host and GPU. The owner of stream and counter
        // keeps both until the work is complete. The barrier makes the work's writes visible before
        // the number.
        unsafe { sys::cuStreamWriteValue64_v2(stream.raw(), address, number, barrier) }
            .named("cuStreamWriteValue64")?;
        Ok(StreamMark { reached: Arc::clone(&self.reached), number })
    }
}

impl StreamMark {
    /// Returns whether the marked work is complete.
    pub(super) fn is_reached(&self) -> bool {
        self.reached.number() >= self.number
    }

    /// Waits until the marked work is complete. `done`: an event recorded just before the mark.
    /// After an error of the context no work is in flight. There is no deadline. Most polls make no
    /// driver call, because another thread's call may hold the context's lock.
    pub(super) fn wait(&self, done: &Event) -> Result<(), CudaError> {
        let began = Instant::now();
        let mut pauses: u32 = 0;
        while !self.is_reached() {
            if began.elapsed() < SPIN {
                thread::yield_now();
                continue;
            }
            thread::sleep(PAUSE);
            pauses += 1;
            if pauses.is_multiple_of(PAUSES_PER_QUERY) {
                done.is_done()?;
            }
        }
        Ok(())
    }
}
