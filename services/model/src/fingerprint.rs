//! Fingerprint that two nodes compare to check that they hold the same model.

use xxhash_rust::xxh3::Xxh3;

use crate::{
    checkpoint::StoredTensor,
    config::{ModelConfig, RopeScaling, SlidingWindow},
};

/// Number of windows of each tensor that are hashed. Fine-tuned models differ nearly everywhere, so a few
/// windows of every tensor distinguish them, and even the largest file opens quickly.
const WINDOWS: usize = 4;
const WINDOW_BYTES: usize = 256;

/// Returns the xxh3-128 hash of the configuration, the seed of dummy weights, and each tensor's name,
/// encoding, dimensions and sampled bytes.
pub fn of(config: &ModelConfig, dummy_seed: Option<u64>, directory: &[StoredTensor<'_>]) -> u128 {
    let mut hash = Hash(Xxh3::new());
    // Changes whenever the meaning of the following bytes changes.
    hash.bytes(b"baton model 2");
    hash.config(config);
    hash.numbers(&[dummy_seed.is_some().into(), dummy_seed.unwrap_or(0)]);
    for tensor in directory {
        hash.bytes(tensor.name.as_bytes());
        hash.bytes(tensor.encoding.name().as_bytes());
        hash.numbers(&tensor.dims);
        hash.sample(tensor.bytes);
    }
    hash.0.digest128()
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

    /// Hashes a few evenly spaced windows, including the first and last bytes.
    fn sample(&mut self, bytes: &[u8]) {
        if bytes.len() <= WINDOWS * WINDOW_BYTES {
            return self.bytes(bytes);
        }
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        let last = bytes.len() - WINDOW_BYTES;
        for window in 0..WINDOWS {
            let begin = (last as u128 * window as u128 / (WINDOWS - 1) as u128) as usize;
            self.0.update(&bytes[begin..begin + WINDOW_BYTES]);
        }
    }
}
