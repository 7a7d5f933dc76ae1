//! Fingerprint that two nodes compare to check that they hold the same model.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::{
    checkpoint::StoredTensor,
    config::{ModelConfig, RopeScaling, SlidingWindow},
};

/// Bytes that a thread hashes at a time: small against a large tensor, so that all threads have work. Part of the
/// fingerprint's definition.
const CHUNK_BYTES: usize = 4 << 20;

/// Returns the xxh3-128 hash of the configuration, the seed of dummy weights, and each tensor's name, encoding,
/// dimensions and the xxh3-128 hashes of all chunks of its bytes. Up to `threads` threads hash the chunks.
pub fn of(
    config: &ModelConfig,
    dummy_seed: Option<u64>,
    directory: &[StoredTensor<'_>],
    threads: usize,
) -> u128 {
    let chunks: Vec<&[u8]> =
        directory.iter().flat_map(|tensor| tensor.bytes.chunks(CHUNK_BYTES)).collect();
    let mut hashes = hash_chunks(&chunks, threads).into_iter();
    let mut hash = Hash(Xxh3::new());
    // Changes whenever the meaning of the following bytes changes.
    hash.bytes(b"baton model 3");
    hash.config(config);
    hash.numbers(&[dummy_seed.is_some().into(), dummy_seed.unwrap_or(0)]);
    for tensor in directory {
        hash.bytes(tensor.name.as_bytes());
        hash.bytes(tensor.encoding.name().as_bytes());
        hash.numbers(&tensor.dims);
        hash.numbers(&[tensor.bytes.len() as u64]);
        for chunk in hashes.by_ref().take(tensor.bytes.len().div_ceil(CHUNK_BYTES)) {
            hash.0.update(&chunk.to_le_bytes());
        }
    }
    hash.0.digest128()
}

/// Returns the hash of each chunk, in order.
fn hash_chunks(chunks: &[&[u8]], threads: usize) -> Vec<u128> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut hashes = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(chunk) = chunks.get(index) else { return hashes };
            hashes.push((index, xxh3_128(chunk)));
        }
    };
    let mut all = vec![0; chunks.len()];
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads.min(chunks.len())).map(|_| scope.spawn(work)).collect();
        let mut hashes = work();
        for other in others {
            hashes.extend(other.join().expect("hashing does not panic"));
        }
        for (index, hash) in hashes {
            all[index] = hash;
        }
    });
    all
}

struct Hash(Xxh3);

impl Hash {
    /// Hashes the length first, so that neighbouring fields cannot be confused.
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    fn numbers(&mut self, numbers: &[u64]) {
        self.0.update(&(numbers.len() as u64).to_le_bytes());
        for number in numbers {
            self.0.update(&number.to_le_bytes());
        }
    }

    fn floats(&mut self, floats: &[f32]) {
        self.0.update(&(floats.len() as u64).to_le_bytes());
        for float in floats {
            self.0.update(&float.to_bits().to_le_bytes());
        }
    }

    fn config(&mut self, config: &ModelConfig) {
        // Destructured, so that a new field cannot be forgotten here.
        let ModelConfig {
            architecture,
            hidden_size,
            layer_count,
            query_head_count,
            kv_head_count,
            head_dim,
            ffn_size,
            vocab_size,
            context_tokens,
            rms_eps,
            rope_theta,
            rope_scaling,
            sliding_window,
            tied_output,
            bos_token_id,
            eos_token_ids,
        } = config;
        self.bytes(architecture.name().as_bytes());
        let sizes = [
            hidden_size,
            layer_count,
            query_head_count,
            kv_head_count,
            head_dim,
            ffn_size,
            vocab_size,
            context_tokens,
        ];
        self.numbers(&sizes.map(|&size| size as u64));
        self.floats(&[*rms_eps, *rope_theta]);
        match rope_scaling {
            RopeScaling::None => self.bytes(b"none"),
            RopeScaling::Linear { factor } => {
                self.bytes(b"linear");
                self.floats(&[*factor]);
            }
            RopeScaling::Llama3 {
                factor,
                low_frequency_factor,
                high_frequency_factor,
                original_context_tokens,
            } => {
                self.bytes(b"llama3");
                self.floats(&[
                    *factor,
                    *low_frequency_factor,
                    *high_frequency_factor,
                    *original_context_tokens,
                ]);
            }
            RopeScaling::Divisors(divisors) => {
                self.bytes(b"divisors");
                self.floats(divisors);
            }
        }
        match sliding_window {
            None => self.bytes(b"full"),
            Some(SlidingWindow { tokens, layers }) => {
                self.bytes(b"window");
                self.numbers(&[tokens.get() as u64]);
                self.numbers(&layers.iter().map(|&layer| layer.into()).collect::<Vec<_>>());
            }
        }
        self.numbers(&[(*tied_output).into()]);
        self.numbers(&bos_token_id.iter().map(|&id| id.into()).collect::<Vec<_>>());
        self.numbers(&eos_token_ids.iter().map(|&id| id.into()).collect::<Vec<_>>());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_of_chunks_do_not_depend_on_the_number_of_threads() {
        let bytes: Vec<u8> = (0..100_000_u32).map(|index| (index * 7 / 3) as u8).collect();
        let mut chunks: Vec<&[u8]> = bytes.chunks(1000).collect();
        let hashes = hash_chunks(&chunks, 1);
        for threads in [2, 3, 8, 200] {
            assert_eq!(hash_chunks(&chunks, threads), hashes, "{threads} threads");
        }
        assert!(hash_chunks(&[], 4).is_empty());
        chunks.swap(0, 99);
        assert_ne!(hash_chunks(&chunks, 3), hashes);
    }
}
