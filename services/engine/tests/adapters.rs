//! LoRA adapters on the CPU executor: steps of several adapters, the prefix cache, hand-over
//! between two nodes, and preemption.

mod common;

use std::{sync::Arc, time::Instant};

use common::{
    cpu::{CpuEngine, engine, limits_of, pair, run, tiny_model},
    sequence, unbounded_waits,
};
use engine::{
    adapter::LoadedAdapter,
    event::{NewSequence, SequenceId, SequenceKind},
    executor::Executor,
};
use test_harness::adapter::{self, ModelShape};

const SHAPE: ModelShape = ModelShape { layers: 2, hidden: 32, queries: 32, keys: 16, ffn: 64 };

/// Loads two adapters into an engine.
fn load(engine: &mut CpuEngine) -> [Arc<LoadedAdapter>; 2] {
    let slots = engine.executor_mut().adapter_slots().unwrap();
    [(0, 3), (5, 4)].map(|(slot, seed)| {
        let folder = tempfile::tempdir().unwrap();
        adapter::write(folder.path(), SHAPE, 4, seed, 0.5).unwrap();
        let adapter = slots.open(folder.path(), 8).unwrap();
        let content_hash = adapter.content_hash();
        slots.set(slot, Some(adapter)).unwrap();
        Arc::new(LoadedAdapter { slot, content_hash })
    })
}

fn request(id: u128, adapter: Option<&Arc<LoadedAdapter>>, max_tokens: u32) -> NewSequence {
    let tokens = (0..50).map(|index| (index * 7 + index / 3) % 96).collect();
    NewSequence {
        adapter: adapter.cloned(),
        max_tokens,
        ignore_stop_tokens: true,
        ..sequence(id, SequenceKind::Compute, tokens, Instant::now())
    }
}

/// Returns a request of the base model and one of each adapter.
fn requests(adapters: &[Arc<LoadedAdapter>; 2], max_tokens: u32) -> [NewSequence; 3] {
    let [a, b] = adapters;
    [(1, None), (2, Some(a)), (3, Some(b))].map(|(id, adapter)| request(id, adapter, max_tokens))
}

/// Returns the tokens of each request alone, each in an engine of its own.
fn alone(max_tokens: u32) -> [Vec<u32>; 3] {
    [0, 1, 2].map(|index| {
        let model = tiny_model();
        let limits = limits_of(&model, 1, 512, 40, 1);
        let (mut engine, _) = engine(&model, unbounded_waits(limits), 1);
        let adapters = load(&mut engine);
        let new = requests(&adapters, max_tokens)[index].clone();
        let id = new.id;
        run(&mut engine, vec![new])[&id].ids()
    })
}

#[test]
fn two_adapters_and_the_base_in_one_batch_equal_each_alone_and_share_no_kv() {
    let alone = alone(30);
    assert!(alone[0] != alone[1] && alone[1] != alone[2] && alone[0] != alone[2], "{alone:?}");
    let model = tiny_model();
    let limits = limits_of(&model, 4, 24, 60, 2);
    let (mut engine, _) = engine(&model, unbounded_waits(limits), 1);
    let adapters = load(&mut engine);
    let all = requests(&adapters, 30);
    let outcomes = run(&mut engine, all.to_vec());
    for (new, alone) in all.iter().zip(&alone) {
        let outcome = &outcomes[&new.id];
        assert_eq!((&outcome.ids(), outcome.cached_tokens), (alone, 0));
    }
    // Each finds its own KV.
    for (new, alone) in all.iter().zip(&alone) {
        let again = NewSequence { id: SequenceId(new.id.0 + 10), ..new.clone() };
        let outcome = run(&mut engine, vec![again.clone()]).remove(&again.id).unwrap();
        assert_eq!((&outcome.ids(), outcome.cached_tokens), (alone, 48));
    }
    // No sequence uses the adapters any more.
    drop(all);
    assert!(adapters.iter().all(|adapter| Arc::strong_count(adapter) == 1));
}

#[test]
fn handed_over_and_preempted_sequences_of_adapters_equal_each_alone() {
    let alone = alone(60);
    let model = tiny_model();
    // The blocks of two sequences and a half.
    let limits = limits_of(&model, 4, 64, 17, 2);
    let mut pair = pair(&model, unbounded_waits(limits));
    let adapters = [load(&mut pair.prefill), load(&mut pair.decode)];
    assert_eq!(adapters[0], adapters[1]);
    let all = requests(&adapters[0], 60);
    all.iter().for_each(|new| pair.submit(new.clone()));
    pair.run();
    for (new, alone) in all.iter().zip(&alone) {
        let answer = &pair.answers[&new.id];
        assert_eq!((&answer.ids(), answer.cached_at_decode), (alone, 0));
        assert!(answer.blocks_moved > 0);
    }
    assert!(pair.decode.scheduler().preemptions() > 0, "no sequence was preempted");
    pair.assert_all_returned();
}
