//! The KV tiers of a whole node, as its metrics and its observers report them.

use engine::{
    event::BlockHash,
    tiers::{RecoveredBlock, SaveJob, Tier, TierAdmission, TierConfig, TierEvent, TierStats},
};

use super::*;

const TIERS: TierConfig = TierConfig {
    admission: TierAdmission::Always,
    host: true,
    disk_slots: 8,
    sessions: false,
    load_timeout: Duration::from_secs(4),
};

/// Computes a prompt that shares no block with the prompts of other ids.
fn compute(node: &mut Node, id: u128, tokens: u32) -> Vec<NodeOutput> {
    let mut call = call(id, id as u64, SequenceKind::Compute, node.now);
    call.sequence.tokens = vec![1; tokens as usize];
    call.sequence.prompt_len = tokens;
    call.sequence.max_tokens = 1;
    call.sequence.cache_salt = id.to_string();
    node.core.handle_call(call, node.now);
    node.run()
}

/// Ends the saves in `outputs`, and the saves that follow. Returns the tier and the key of each.
fn end_saves(node: &mut Node, mut outputs: Vec<NodeOutput>) -> Vec<(Tier, BlockHash)> {
    let mut saved = Vec::new();
    loop {
        let save = |output: &NodeOutput| match output {
            NodeOutput::Save(save) => Some(*save),
            _ => None,
        };
        let saves: Vec<SaveJob> = outputs.iter().filter_map(save).collect();
        if saves.is_empty() {
            return saved;
        }
        for SaveJob { job, tier, contents, .. } in saves {
            saved.push((tier, contents.key));
            node.core.handle_tier_event(TierEvent::Saved { job }, node.now);
        }
        outputs = node.outputs();
    }
}

/// Returns the statistics of the disk tier that the next report has.
fn disk_stats(node: &mut Node) -> TierStats {
    node.advance(observers::INTERVAL);
    let stats = |output| match output {
        NodeOutput::Metric(Metric::Tier(Tier::Disk, stats)) => Some(stats),
        _ => None,
    };
    node.outputs().into_iter().filter_map(stats).next_back().expect("a report of the disk tier")
}

/// Returns the stored and the lost keys of each tier that the events report.
fn tier_changes(outputs: Vec<NodeOutput>) -> Vec<(v1::KvTier, Vec<u128>, Vec<u128>)> {
    fn keys(hashes: &[impl AsRef<[u8]>]) -> Vec<u128> {
        let key = |hash: &[u8]| u128::from_be_bytes(hash.try_into().unwrap());
        let mut keys: Vec<u128> = hashes.iter().map(|hash| key(hash.as_ref())).collect();
        keys.sort_unstable();
        keys
    }
    let mut changes = Vec::new();
    for event in observe_events(outputs) {
        if let Some(ObserveEvent::Delta(delta)) = event.event {
            let blocks = delta.tiers.iter();
            changes.extend(blocks.map(|it| (it.tier(), keys(&it.stored), keys(&it.lost))));
        }
    }
    changes
}

#[test]
fn saves_beyond_the_queue_are_dropped_and_counted() {
    const CALLS: u128 = 700;
    /// Blocks of each prompt, and saves that the core queues.
    const BLOCKS: u64 = 3;
    const QUEUED: u64 = 2048;
    let mut node = Node::with_tiers(TierConfig { host: false, disk_slots: 5000, ..TIERS });
    for id in 1..=CALLS {
        let outputs = compute(&mut node, id, 49);
        // The blocks of an earlier start are not known yet.
        assert!(!outputs.iter().any(|output| matches!(output, NodeOutput::Save(_))));
    }
    let stats = disk_stats(&mut node);
    assert_eq!(stats.dropped, CALLS as u64 * BLOCKS - QUEUED);
    assert_eq!((stats.saved, stats.cancelled), (0, 0));

    // The prefix cache holds only blocks of the last prompts, whose saves were dropped.
    let recovered = TierEvent::Recovered { tier: Tier::Disk, blocks: vec![], is_complete: true };
    node.core.handle_tier_event(recovered, node.now);
    let outputs = node.outputs();
    assert_eq!(end_saves(&mut node, outputs), []);
    assert_eq!(disk_stats(&mut node).cancelled, QUEUED);
    let outputs = compute(&mut node, CALLS + 1, 49);
    assert_eq!(end_saves(&mut node, outputs).len() as u64, BLOCKS);
    assert_eq!(disk_stats(&mut node).saved, BLOCKS);
}

#[test]
fn observers_learn_which_tier_stores_and_which_has_lost_a_block() {
    use v1::KvTier::{Disk, Host};
    let mut node = Node::with_tiers(TIERS);
    node.core.handle_observe(ObserverId(1), node.now);
    assert_eq!(tier_changes(node.outputs()), []);
    // One slot in host memory, and a block that the disk has since an earlier start.
    let grown = TierEvent::Grown { tier: Tier::Host, slots: 1 };
    let blocks = [0, 1].map(|group| {
        let key = BlockHash(5 + u128::from(group));
        RecoveredBlock { slot: 7 + u32::from(group), key, group }
    });
    let blocks = blocks.to_vec();
    let recovered = TierEvent::Recovered { tier: Tier::Disk, blocks, is_complete: true };
    for event in [grown, recovered] {
        node.core.handle_tier_event(event, node.now);
    }
    let mut keys = Vec::new();
    for id in [1, 2] {
        let outputs = compute(&mut node, id, 20);
        let saved = end_saves(&mut node, outputs);
        let [(Tier::Host, key), (Tier::Disk, on_disk)] = saved[..] else { panic!("{saved:?}") };
        assert_eq!(key, on_disk);
        keys.push(key.0);
        node.advance(observers::INTERVAL);
        let lost = keys[..keys.len() - 1].to_vec();
        let mut on_disk = vec![key.0];
        on_disk.extend((id == 1).then_some(5));
        on_disk.sort_unstable();
        let changes = [(Host, vec![key.0], lost), (Disk, on_disk, vec![])];
        assert_eq!(tier_changes(node.outputs()), changes);
    }

    node.core.handle_observe(ObserverId(2), node.now);
    let mut on_disk = vec![5, keys[0], keys[1]];
    on_disk.sort_unstable();
    let changes = [(Host, vec![keys[1]], vec![]), (Disk, on_disk, vec![])];
    assert_eq!(tier_changes(node.outputs()), changes, "the snapshot of a new observer");
}
