//! Runs one model on the CPU backend, sequence by sequence.

use std::sync::Arc;

use kernels::{
    Backend, BlockId, KvArena, KvFormat, KvGroups, Packer, Shard, WeightFormat,
    cpu::{CpuBackend, CpuGroup, CpuMatrix, CpuOptions, CpuStep, CpuVector, Isa, StepSequence},
};
use model::{Adapter, Checkpoint, Limits, Transformer, TransformerWeights};

/// Blocks of a runner's arena.
pub(crate) const BLOCKS: u32 = 512;

/// Loaded model or one rank's shard of it, the arena for its KV, and a counter that allocates
/// blocks.
pub(crate) struct Runner {
    backend: CpuBackend,
    llama: Transformer<CpuBackend>,
    arena: Arc<KvArena>,
    groups: KvGroups,
    next_block: u32,
}

/// Sequence whose KV is in the runner's arena.
pub(crate) struct Sequence {
    position: u32,
    blocks: Vec<BlockId>,
    /// Slot of the adapter.
    pub(crate) adapter: Option<u32>,
}

impl Runner {
    pub(crate) fn new(
        checkpoint: &Checkpoint,
        weights: impl Into<WeightFormat>,
        isa: Isa,
        rows_max: usize,
    ) -> Self {
        let weights = weights.into();
        Self::with_kv(checkpoint, (weights, weights.kv_format()), isa, rows_max)
    }

    pub(crate) fn with_kv(
        checkpoint: &Checkpoint,
        (weights, kv): (WeightFormat, KvFormat),
        isa: Isa,
        rows_max: usize,
    ) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
        let groups = checkpoint.config().kv_groups(kv);
        let layout = groups.block_layout(checkpoint.config().kv_layout(kv));
        let arena = KvArena::host(layout, BLOCKS * groups.count() as u32).unwrap();
        let backend = CpuBackend::new(CpuOptions { weights, threads, isa }).unwrap();
        Self::on(checkpoint, backend, arena, groups, rows_max)
    }

    /// Creates one rank of a group, with one thread. The arena has all heads, or the rank's. Its
    /// blocks have all layers.
    pub(crate) fn rank(
        checkpoint: &Checkpoint,
        weights: impl Into<WeightFormat>,
        group: CpuGroup,
        arena: Arc<KvArena>,
        rows_max: usize,
    ) -> Self {
        let options = CpuOptions { weights: weights.into(), threads: 1, isa: Isa::Auto };
        let backend = CpuBackend::new(options).unwrap().in_group(group);
        let config = checkpoint.config();
        let whole = config.kv_layout(arena.layout().format);
        let groups = KvGroups::whole(config.kv_layer_count());
        let groups = groups.with_state(config.state_shape(), whole);
        Self::on(checkpoint, backend, arena, groups, rows_max)
    }

    fn on(
        checkpoint: &Checkpoint,
        backend: CpuBackend,
        arena: Arc<KvArena>,
        groups: KvGroups,
        rows_max: usize,
    ) -> Self {
        let limits = Limits { rows_max, sampled_max: rows_max, adapter_slots: 2 };
        let llama = Transformer::load(checkpoint, &backend, limits, &mut |_| ()).unwrap();
        Self { backend, llama, arena, groups, next_block: 0 }
    }

    /// Replaces the weights with those that a packer for the backend packs.
    pub(crate) fn repack<'a, P: Packer<Matrix = CpuMatrix, Vector = CpuVector>>(
        &'a mut self,
        checkpoint: &Checkpoint,
        packer: impl FnOnce(&'a CpuBackend) -> P,
    ) {
        let packer = packer(&self.backend);
        let weights = TransformerWeights::pack(checkpoint, &packer, &mut |_| ()).unwrap();
        self.llama.replace_weights(weights);
    }

    pub(crate) fn set_adapter(&mut self, slot: usize, adapter: Option<Adapter>) {
        self.llama.adapters().set(slot, adapter);
    }

    pub(crate) fn shard(&self) -> Shard {
        self.llama.shard()
    }

    /// Allocates blocks for `tokens` tokens, and for the recurrent state.
    pub(crate) fn sequence(&mut self, tokens: usize) -> Sequence {
        let first = self.next_block;
        self.next_block += self.groups.entries(tokens) as u32;
        let blocks = (first..self.next_block).map(BlockId).collect();
        Sequence { position: 0, blocks, adapter: None }
    }

    /// Copies the KV and the recurrent state of another runner's sequence to blocks of this runner.
    pub(crate) fn receive(&mut self, sender: &Runner, sequence: &Sequence) -> Sequence {
        let tokens = self.groups.tokens(sequence.blocks.len());
        // Other ids than those of the sender.
        self.next_block += 5;
        let received = Sequence { position: sequence.position, ..self.sequence(tokens) };
        let mut bytes = vec![0; self.arena.layout().block_bytes()];
        for (from, to) in sequence.blocks.iter().zip(&received.blocks) {
            sender.arena.read(*from).unwrap().copy_to_host(&mut bytes).unwrap();
            self.arena.write(*to).unwrap().copy_from_host(&bytes).unwrap();
        }
        received
    }

    /// Frees the blocks of all sequences, and fills them with NaN.
    pub(crate) fn clear(&mut self) {
        self.next_block = 0;
        let bytes = vec![0xff; self.arena.layout().block_bytes()];
        for block in (0..self.arena.block_count()).map(BlockId) {
            self.arena.write(block).unwrap().copy_from_host(&bytes).unwrap();
        }
    }

    /// Runs one forward pass over some tokens of each sequence, and returns the logits of the last
    /// `sampled` tokens of each, concatenated.
    pub(crate) fn forward(&mut self, parts: &mut [(&mut Sequence, &[u32], u32)]) -> Vec<Vec<f32>> {
        let sequences: Vec<StepSequence<'_>> = parts
            .iter()
            .map(|(sequence, tokens, sampled)| StepSequence {
                first_position: sequence.position,
                tokens,
                blocks: &sequence.blocks,
                sampled_rows: *sampled,
                adapter: sequence.adapter,
            })
            .collect();
        let (all, shard) = (self.arena.layout().kv_head_count, self.backend.shard());
        let own = shard.part(self.llama.config().kv_head_count);
        let heads = if all == own.len() { 0..all } else { own };
        let mut step = CpuStep::of_heads(&self.arena, heads, &self.groups, &sequences).unwrap();
        let logits = self.llama.forward(&mut self.backend, &mut step);
        let rows = (0..step.sampled().len()).map(|row| logits.row(row).to_vec()).collect();
        for (sequence, tokens, _) in parts {
            sequence.position += tokens.len() as u32;
        }
        rows
    }

    /// Prefills `tokens` in chunks and returns the logits after them.
    pub(crate) fn prefill(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        chunk: usize,
    ) -> Vec<f32> {
        let mut logits = Vec::new();
        let chunks = tokens.len().div_ceil(chunk);
        for (index, chunk) in tokens.chunks(chunk).enumerate() {
            let sampled = u32::from(index + 1 == chunks);
            logits = self.forward(&mut [(sequence, chunk, sampled)]);
        }
        logits.pop().expect("the last chunk sampled")
    }

    /// Returns the logits after one more token.
    pub(crate) fn decode(&mut self, sequence: &mut Sequence, token: u32) -> Vec<f32> {
        self.forward(&mut [(sequence, &[token], 1)]).pop().expect("one row sampled")
    }
}

/// Returns the lowest id among the greatest logits.
pub(crate) fn argmax(logits: &[f32]) -> u32 {
    let best =
        (0..logits.len()).fold(0, |best, id| if logits[id] > logits[best] { id } else { best });
    best as u32
}
