//! For tests: streams that take their time, and a fault that ends the context.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use super::{
    context::{Role, Stream},
    error::CudaError,
    library::KernelLibrary,
};

/// Lets time pass at random between what streams do: what one of them forgets to wait for comes late.
#[derive(Debug)]
pub struct Delays {
    library: Arc<KernelLibrary>,
    longest: Duration,
    state: AtomicU64,
}

impl Delays {
    /// Of up to `longest`, by `seed`.
    pub fn new(library: Arc<KernelLibrary>, longest: Duration, seed: u64) -> Self {
        Self { library, longest, state: AtomicU64::new(seed) }
    }

    /// Every other time for a while.
    pub(super) fn pass<R: Role>(&self, stream: &Stream<R>) -> Result<(), CudaError> {
        let count = self.state.fetch_add(1, Ordering::Relaxed);
        let random = (count ^ 0x9e37_79b9).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32;
        if random & 1 == 0 {
            return Ok(());
        }
        let nanoseconds = self.longest.as_nanos() as u64 * (random >> 1) / (1 << 31);
        // SAFETY: the stream is alive, and no memory is touched.
        let code = unsafe {
            (self.library.functions().baton_delay)(nanoseconds as i64, stream.raw().cast())
        };
        self.library.check("baton_delay", code)
    }
}

impl KernelLibrary {
    /// A kernel that writes where there is no memory. From then on every call in this context fails,
    /// until the process ends.
    pub fn fault<R: Role>(&self, stream: &Stream<R>) -> Result<(), CudaError> {
        const NOWHERE: u64 = 256;
        // SAFETY: the driver gives this address to nobody; that the write fails is what is wanted.
        let code = unsafe {
            (self.functions().baton_fill_random)(0, NOWHERE, 1, 0, 1.0, stream.raw().cast())
        };
        self.check("baton_fill_random", code)
    }
}
