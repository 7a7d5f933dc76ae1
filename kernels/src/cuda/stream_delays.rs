//! Random delays of streams, for tests.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use super::{
    context::{Stream, StreamRole},
    error::CudaError,
    library::KernelLibrary,
};

/// Source of random delays between the work of streams, so that missing waits become visible.
#[derive(Debug)]
pub struct StreamDelays {
    library: Arc<KernelLibrary>,
    longest: Duration,
    state: AtomicU64,
}

impl StreamDelays {
    /// Creates delays of up to `longest`, seeded with `seed`.
    pub fn new(library: Arc<KernelLibrary>, longest: Duration, seed: u64) -> Self {
        Self { library, longest, state: AtomicU64::new(seed) }
    }

    /// Enqueues a delay, every other time.
    pub(super) fn pass<R: StreamRole>(&self, stream: &Stream<R>) -> Result<(), CudaError> {
        let count = self.state.fetch_add(1, Ordering::Relaxed);
        let random = (count ^ 0x9e37_79b9).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32;
        if random & 1 == 0 {
            return Ok(());
        }
        let nanoseconds = self.longest.as_nanos() as u64 * (random >> 1) / (1 << 31);
        // SAFETY: the stream is alive, and no memory is accessed.
        unsafe { launch!(&self.library, stream, baton_delay(nanoseconds as i64)) }
    }
}
