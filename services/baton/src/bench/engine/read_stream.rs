//! Read bandwidth of this machine's memory: the upper bound of decoding on CPUs.

use std::time::Instant;

use kernels::{
    Backend,
    cpu::{CpuBackend, CpuBuffer},
};

/// Benchmark that reads as many bytes as the weights have, with all threads, as decoding does. So
/// CPU caches help the benchmark as much as decoding.
pub(super) struct ReadStream {
    /// Huge pages, as for weights.
    memory: CpuBuffer,
    threads: usize,
    pub(super) gb_per_s: Vec<f64>,
}

impl ReadStream {
    pub(super) fn new(backend: &CpuBackend, bytes: u64, threads: usize) -> Self {
        let mut memory = backend.buffer(1, (bytes as usize / size_of::<f32>()).max(1));
        // All values differ, because a host may merge equal pages, which then read five times as
        // fast.
        for (place, index) in memory.rows_mut(1).iter_mut().zip(0_u32..) {
            *place = f32::from_bits(index.wrapping_mul(0x9e37_79b9) >> 2);
        }
        Self { memory, threads, gb_per_s: Vec::new() }
    }

    /// Reads the memory five times.
    pub(super) fn measure(&mut self) {
        let words = self.memory.rows(1);
        let share = words.len().div_ceil(self.threads);
        for _ in 0..5 {
            let started = Instant::now();
            let sum = std::thread::scope(|scope| {
                let parts: Vec<_> =
                    words.chunks(share).map(|part| scope.spawn(move || sum(part))).collect();
                parts.into_iter().fold(0_u32, |sum, part| {
                    sum.wrapping_add(part.join().expect("wrapping addition does not panic"))
                })
            });
            std::hint::black_box(sum);
            self.gb_per_s.push(size_of_val(words) as f64 / 1e9 / started.elapsed().as_secs_f64());
        }
    }
}

/// Adds in 64 independent sums, so that memory and not addition is the bottleneck.
fn sum(words: &[f32]) -> u32 {
    let mut sums = [0_u32; 64];
    let (chunks, rest) = words.as_chunks::<64>();
    for chunk in chunks {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(word.to_bits());
        }
    }
    rest.iter().map(|word| word.to_bits()).chain(sums).fold(0, u32::wrapping_add)
}
