//! Measures a GPU's peak read bandwidth with a kernel that only reads.

use super::{
    backend::CudaBackend, context::Event, error::CudaError, library::KernelLibrary,
    memory::DeviceMemory,
};

/// Smallest range to measure, much larger than any cache.
const BYTES_MIN: u64 = 4 << 30;
const BYTES_MAX: u64 = 8 << 30;
const TRIES: usize = 6;

impl CudaBackend {
    /// Measures the peak read bandwidth in GB/s, the best of six runs. Returns `None` when less
    /// than 8 GiB are free. Benchmarks call it before they load weights.
    pub fn measure_read_gb_per_s(&self) -> Result<Option<f64>, CudaError> {
        let context = self.context();
        // Half of the free memory: other processes may be starting.
        let bytes = (context.free_bytes()? / 2).min(BYTES_MAX) & !0xff;
        if bytes < BYTES_MIN {
            return Ok(None);
        }
        let memory = DeviceMemory::new(context, "the read stream", bytes as usize + 256)?;
        let (from, sink) = (memory.cut(bytes as usize)?, memory.cut(4)?);
        let stream = self.compute();
        from.fill(0x5a, stream)?;
        let (begin, end) = (Event::timed(context)?, Event::timed(context)?);
        let mut best: f64 = 0.0;
        for _ in 0..TRIES {
            begin.record(stream)?;
            // SAFETY: the range has `bytes` bytes, and `memory` outlives the wait below.
            unsafe {
                let (from, sink) = (from.address(), sink.address());
                launch!(self.library(), stream, baton_read_stream(from, bytes, sink))
            }?;
            end.record(stream)?;
            end.synchronize()?;
            let seconds = f64::from(end.milliseconds_since(&begin)?) / 1e3;
            best = best.max(bytes as f64 / 1e9 / seconds);
        }
        Ok(Some(best))
    }
}
