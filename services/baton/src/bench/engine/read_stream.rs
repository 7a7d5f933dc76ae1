//! At what rate this machine's memory is read, beside which decoding on CPUs is judged.

use std::time::Instant;

use kernels::{
    Backend,
    cpu::{CpuBackend, CpuBuffer},
};

/// What the memory gives: as many bytes as the weights have, read with every thread again and again
/// as decoding does. What of it the caches hold, they hold for decoding too.
pub(super) struct ReadStream {
    /// In huge pages, as weights are.
    memory: CpuBuffer,
    threads: usize,
    pub(super) gb_per_s: Vec<f64>,
}

impl ReadStream {
    pub(super) fn new(backend: &CpuBackend, bytes: u64, threads: usize) -> Self {
        let mut memory = backend.buffer(1, (bytes as usize / size_of::<f32>()).max(1));
        // All different: a host may keep equal pages once, and would seem five times as fast.
        for (place, index) in memory.rows_mut(1).iter_mut().zip(0_u32..) {
            *place = f32::from_bits(index.wrapping_mul(0x9e37_79b9) >> 2);
        }
        Self { memory, threads, gb_per_s: Vec::new() }
    }

    /// Reads all of it a few times.
    pub(super) fn measure(&mut self) {
        let words = self.memory.rows(1);
        let share = words.len().div_ceil(self.threads);
        for _ in 0..5 {
            let started = Instant::now();
            let sum = std::thread::scope(|scope| {
                let parts: Vec<_> =
                    words.chunks(share).map(|part| scope.spawn(move || sum(part))).collect();
                parts.into_iter().fold(0_u32, |sum, part| {
                    sum.wrapping_add(part.join().expect("adding does not panic"))
                })
            });
            std::hint::black_box(sum);
            self.gb_per_s.push(size_of_val(words) as f64 / 1e9 / started.elapsed().as_secs_f64());
        }
    }
}

/// With enough independent sums that adding is never what is waited for.
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
