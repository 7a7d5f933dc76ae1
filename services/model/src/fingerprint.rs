//! Fingerprint that two nodes compare to check that they hold the same model.

use std::{
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    thread,
};

use kernels::backend::{GatedActivation, NormSpan};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::{
    checkpoint::{file::TensorBytes, stored::StoredTensor},
    config::ModelConfig,
    families::Family,
    layer::{AttentionSpec, DeltaSpec, ExpertSpec, FeedForward, LayerSpec, SharedExpertSpec},
    rope::RopeScaling,
};

/// Bytes that a thread reads and hashes at a time: small enough for the CPU's cache, and against a
/// large tensor, so that all threads have work.
const BATCH_BYTES: usize = 256 << 10;

/// Returns the xxh3-128 hash of the configuration, the seed of dummy weights, and each tensor's
/// name, encoding, dimensions and [`RowHashes`]. `known` has the hashes of tensors that were hashed
/// before, in the order of `directory`. Up to `threads` threads hash the other tensors.
pub(crate) fn of(
    config: &ModelConfig,
    dummy_seed: Option<u64>,
    directory: &[StoredTensor<'_>],
    known: &[Option<u128>],
    threads: usize,
) -> u128 {
    let others = directory.iter().zip(known).filter(|(_, known)| known.is_none());
    let others: Vec<Rows<'_>> = others.map(|(tensor, _)| Rows::of(tensor)).collect();
    let mut others = hash_rows(&others, threads).into_iter();
    let mut hash = Hash(Xxh3::new());
    // Changes whenever the meaning of the following bytes changes.
    hash.bytes(b"baton model 4");
    hash.config(config);
    hash.numbers(&[dummy_seed.is_some().into(), dummy_seed.unwrap_or(0)]);
    for (tensor, known) in directory.iter().zip(known) {
        hash.bytes(tensor.name.as_bytes());
        hash.bytes(tensor.encoding.name().as_bytes());
        hash.numbers(&tensor.dims);
        hash.numbers(&[tensor.bytes.len() as u64]);
        let rows = known.or_else(|| others.next()).expect("the other tensors were hashed");
        hash.0.update(&rows.to_le_bytes());
    }
    hash.0.digest128()
}

/// The xxh3-128 hashes of a tensor's rows. Each is computed by the thread that reads the row, while
/// the row is in the CPU's cache, so rows may come in any order, and more than once.
#[derive(Debug)]
pub(crate) struct RowHashes(Box<[[AtomicU64; 2]]>);

impl RowHashes {
    pub(crate) fn new(rows: usize) -> Self {
        Self((0..rows).map(|_| [AtomicU64::new(0), AtomicU64::new(0)]).collect())
    }

    /// Hashes a row of the file.
    pub(crate) fn add(&self, row: usize, bytes: &[u8]) {
        let hash = xxh3_128(bytes);
        let [low, high] = &self.0[row];
        low.store(hash as u64, Ordering::Relaxed);
        high.store((hash >> 64) as u64, Ordering::Relaxed);
    }

    /// Returns the hash of the row hashes; `None` if a row was not read.
    pub(crate) fn finish_read(self) -> Option<u128> {
        let is_read = |[low, high]: &[AtomicU64; 2]| {
            low.load(Ordering::Relaxed) != 0 || high.load(Ordering::Relaxed) != 0
        };
        self.0.iter().all(is_read).then(|| self.finish())
    }

    /// Returns the hash of the row hashes.
    fn finish(self) -> u128 {
        let mut hash = Xxh3::new();
        for half in self.0.into_iter().flatten() {
            hash.update(&half.into_inner().to_le_bytes());
        }
        hash.digest128()
    }
}

/// The rows of a tensor as the file stores them.
struct Rows<'a> {
    bytes: TensorBytes<'a>,
    row_count: usize,
}

impl<'a> Rows<'a> {
    /// A vector is one row. An expert is one row of a tensor of all experts: hashes of the rows of
    /// all experts would take more than a gigabyte in the largest models.
    fn of(tensor: &StoredTensor<'a>) -> Self {
        let row_count = if tensor.dims.len() > 1 { tensor.dims[0] } else { 1 };
        Self { bytes: tensor.bytes, row_count: row_count as usize }
    }

    fn batches<'h>(&self, hashes: &'h RowHashes) -> impl Iterator<Item = RowBatch<'h>>
    where
        'a: 'h,
    {
        let tensor = self.bytes;
        let row_bytes = (tensor.len() / self.row_count.max(1)).max(1);
        let batch_bytes = (BATCH_BYTES / row_bytes).max(1) * row_bytes;
        (0..tensor.len()).step_by(batch_bytes).map(move |begin| RowBatch {
            hashes,
            tensor,
            row_bytes,
            begin,
            bytes: batch_bytes.min(tensor.len() - begin),
        })
    }
}

/// Consecutive rows of a tensor that one thread hashes.
struct RowBatch<'a> {
    hashes: &'a RowHashes,
    tensor: TensorBytes<'a>,
    row_bytes: usize,
    /// Offset of the first row in the tensor, in bytes.
    begin: usize,
    bytes: usize,
}

impl RowBatch<'_> {
    fn hash(&self, buffer: &mut Vec<u8>) {
        buffer.resize(self.bytes, 0);
        self.tensor.read(self.begin, buffer);
        let first = self.begin / self.row_bytes;
        for (row, bytes) in buffer.chunks(self.row_bytes).enumerate() {
            self.hashes.add(first + row, bytes);
        }
    }
}

/// Returns the hash of the rows of each tensor, in order.
fn hash_rows(tensors: &[Rows<'_>], threads: usize) -> Vec<u128> {
    let hashes: Vec<RowHashes> =
        tensors.iter().map(|tensor| RowHashes::new(tensor.row_count)).collect();
    let batches: Vec<RowBatch<'_>> =
        tensors.iter().zip(&hashes).flat_map(|(tensor, hashes)| tensor.batches(hashes)).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut buffer = Vec::new();
        while let Some(batch) = batches.get(next.fetch_add(1, Ordering::Relaxed)) {
            batch.hash(&mut buffer);
        }
    };
    thread::scope(|scope| {
        (1..threads.min(batches.len())).for_each(|_| _ = scope.spawn(work));
        work();
    });
    drop(batches);
    hashes.into_iter().map(RowHashes::finish).collect()
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
            family,
            hidden_size,
            layer_count,
            query_head_count,
            kv_head_count,
            head_dim,
            rotary_dim,
            ffn_size,
            vocab_size,
            context_tokens,
            rms_eps,
            query_pre_attn_scalar,
            rope_theta,
            window_rope_theta,
            rope_scaling,
            rope_attention_factor,
            layers,
            tied_output,
            bos_token_id,
            eos_token_ids,
        } = config;
        self.bytes(family.name().as_bytes());
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
        self.rope_scaling(rope_scaling);
        if *rope_attention_factor != 1.0 {
            self.bytes(b"attention factor");
            self.floats(&[*rope_attention_factor]);
        }
        if *query_pre_attn_scalar != *head_dim as f32 {
            self.bytes(b"query_pre_attn_scalar");
            self.floats(&[*query_pre_attn_scalar]);
        }
        if let Some(theta) = window_rope_theta {
            self.bytes(b"rope theta of windows");
            self.floats(&[*theta]);
        }
        if rotary_dim != head_dim {
            self.bytes(b"rotary");
            self.numbers(&[*rotary_dim as u64]);
        }
        self.attention(family, layers);
        self.windows(layers);
        self.linear_attention(config);
        self.experts(config);
        self.numbers(&[(*tied_output).into()]);
        self.numbers(&bos_token_id.iter().map(|&id| id.into()).collect::<Vec<_>>());
        self.numbers(&eos_token_ids.iter().map(|&id| id.into()).collect::<Vec<_>>());
    }

    fn rope_scaling(&mut self, scaling: &RopeScaling) {
        match scaling {
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
            RopeScaling::Yarn {
                factor,
                fast_rotations,
                slow_rotations,
                original_context_tokens,
                has_whole_bounds,
            } => {
                self.bytes(b"yarn");
                self.floats(&[*factor, *fast_rotations, *slow_rotations, *original_context_tokens]);
                self.numbers(&[(*has_whole_bounds).into()]);
            }
            RopeScaling::Divisors(divisors) => {
                self.bytes(b"divisors");
                self.floats(divisors);
            }
        }
    }

    /// Adds the attention where it differs from that of the family.
    fn attention(&mut self, family: &Family, layers: &[LayerSpec]) {
        let layer = layers.iter().find(|layer| layer.attention().is_some());
        let layer = layer.map(|layer| layer.with_window(None));
        if let Some(AttentionSpec { has_bias, qk_norm, .. }) = layer.and_then(|it| it.attention())
            && layer.map(|layer| layer.mixer) != Some(family.layer().mixer)
        {
            self.bytes(b"attention");
            let norm = match qk_norm {
                None => 0,
                Some(NormSpan::Head) => 1,
                Some(NormSpan::Projection) => 2,
            };
            self.numbers(&[has_bias.into(), norm]);
        }
    }

    fn windows(&mut self, layers: &[LayerSpec]) {
        let windows = layers.iter().map(|layer| layer.window().map_or(0, |it| it.get() as u64));
        match windows.clone().max() {
            None | Some(0) => self.bytes(b"full"),
            Some(widest) => {
                self.bytes(b"window");
                self.numbers(&[widest]);
                let other = |window| if window == 0 { 0 } else { window + 1 };
                let window = |window| if window == widest { 1 } else { other(window) };
                self.numbers(&windows.map(window).collect::<Vec<_>>());
            }
        }
    }

    /// Adds the linear attention, and which layers have it, if there are any.
    fn linear_attention(&mut self, config: &ModelConfig) {
        if let Some(delta) = config.linear_attention() {
            let DeltaSpec { key_heads, value_heads, key_dim, value_dim, conv_size } = delta;
            self.bytes(b"gated delta");
            let sizes = [key_heads, value_heads, key_dim, value_dim, conv_size];
            self.numbers(&sizes.map(|size| size as u64));
            let is_linear = |layer: &LayerSpec| layer.linear_attention().is_some().into();
            self.numbers(&config.layers.iter().map(is_linear).collect::<Vec<_>>());
        }
    }

    /// Adds the experts, if there are any. The family determines the rest of their description.
    fn experts(&mut self, config: &ModelConfig) {
        let is_expert = |layer: &LayerSpec| matches!(layer.feed_forward, FeedForward::Experts(_));
        if let Some(ExpertSpec { count, size, choice, activation, shared, .. }) = config.experts() {
            self.bytes(b"experts");
            let numbers = [count, size, choice.count, choice.is_normalized.into()];
            self.numbers(&numbers.map(|number| number as u64));
            if choice.groups > 1 || choice.scale != 1.0 {
                self.numbers(&[choice.groups, choice.groups_chosen].map(|number| number as u64));
                self.floats(&[choice.scale]);
            }
            if let GatedActivation::ClampedSwiGlu { alpha, limit } = activation {
                self.bytes(b"clamped");
                self.floats(&[alpha, limit]);
            }
            if let Some(SharedExpertSpec { size, has_router: _ }) = shared {
                self.bytes(b"shared");
                self.numbers(&[size as u64]);
            }
            let is_expert = config.layers.iter().map(|layer| is_expert(layer).into());
            self.numbers(&is_expert.collect::<Vec<_>>());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::file::CheckpointFile;

    #[test]
    fn hash_of_rows_does_not_depend_on_threads_or_on_the_order_of_reading() {
        let bytes: Vec<u8> = (0..10_000_000_u32).map(|index| (index * 7 / 3) as u8).collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tensors");
        std::fs::write(&path, &bytes).unwrap();
        let file = CheckpointFile::open(&path).unwrap();
        let tensors = || {
            let cut = |range, row_count| Rows { bytes: TensorBytes::new(&file, range), row_count };
            vec![cut(0..9_000_000, 1000), cut(0..9_000_000, 3), cut(1..10_000_000, 1), cut(0..0, 1)]
        };
        let hashes = hash_rows(&tensors(), 1);
        for threads in [2, 3, 8] {
            assert_eq!(hash_rows(&tensors(), threads), hashes, "{threads} threads");
        }
        assert_ne!(hashes[0], hashes[1]);
        assert!(hash_rows(&[], 4).is_empty());

        let rows: Vec<&[u8]> = bytes[..9_000_000].chunks(3_000_000).collect();
        let read = RowHashes::new(3);
        for row in [2, 0, 0, 1] {
            read.add(row, rows[row]);
        }
        assert_eq!(read.finish_read(), Some(hashes[1]));
    }

    #[test]
    fn rows_that_were_not_read_have_no_hash() {
        let read = RowHashes::new(3);
        read.add(0, b"first");
        read.add(2, b"last");
        assert_eq!(read.finish_read(), None);
    }
}
