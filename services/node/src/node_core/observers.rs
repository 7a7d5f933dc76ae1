//! State that routers observe: a snapshot, then numbered deltas of load and prefix cache.

use std::time::{Duration, Instant};

use bytes::Bytes;
use cluster::{
    Adapter, NodeRecord,
    predict::{StepFit, StepLimits, Work},
};
use engine::{
    StepLoop, StepRecord,
    event::{BlockHash, CacheChange, Load, SequenceId},
    executor::Executor,
    tiers::Tier,
};
use proto::v1::{self, observe_event::Event};

use super::output::{Metric, NodeOutput, ObserverId, Outputs};

/// Shortest time between two deltas: routers choose nodes by them and need no exact counts.
pub(crate) const INTERVAL: Duration = Duration::from_millis(50);
/// Maximum number of hashes in an event: 256 KiB, far below gRPC's message limit of 4 MiB.
const HASHES_PER_EVENT_MAX: usize = 16_384;

/// Maximum number of a tier's hashes in a snapshot: 16 events, which fit into an observer's queue
/// and take milliseconds to encode. The snapshot has the most recently used blocks.
const TIER_HASHES_MAX: usize = 16 * HASHES_PER_EVENT_MAX;

/// The observers, and the state that they were last sent.
pub(super) struct LoadObservers {
    record: v1::NodeRecord,
    observers: Vec<Observer>,
    sent: v1::NodeLoad,
    sent_at: Option<Instant>,
    /// Sequences that arrived since the last delta.
    arrived: Vec<SequenceId>,
    /// Whether the scheduler's state may differ from `sent`.
    is_changed: bool,
    is_draining: bool,
    pause: v1::PauseState,
    /// When the drain ends the sequences in flight.
    drains_until: Option<Instant>,
    step_fit: StepFit,
    /// When the last step was collected.
    collected_at: Option<Instant>,
}

struct Observer {
    id: ObserverId,
    /// Number of the observer's next event.
    next: u64,
}

impl LoadObservers {
    pub(super) fn new(record: &NodeRecord) -> Self {
        Self {
            record: record.into(),
            observers: Vec::new(),
            sent: v1::NodeLoad::default(),
            sent_at: None,
            arrived: Vec::new(),
            is_changed: true,
            is_draining: false,
            pause: v1::PauseState::None,
            drains_until: None,
            step_fit: StepFit::default(),
            collected_at: None,
        }
    }

    pub(super) fn mark_changed(&mut self) {
        self.is_changed = true;
    }

    /// Names the sequence in the next delta, whose load includes it. Routers then no longer count
    /// it as unseen.
    pub(super) fn arrived(&mut self, id: SequenceId) {
        self.arrived.push(id);
    }

    /// Adds a step to the fit of step times. The step's time starts when the previous step was
    /// collected, so it includes the host's work between steps: clients wait for that, too. A wait
    /// for token bitmasks is not part of the step's time, because it does not depend on the step's
    /// work.
    pub(super) fn add_step(&mut self, step: &StepRecord) {
        let work = Work {
            prefill_tokens: step.work.prefill_tokens.into(),
            prefill_pairs: step.work.prefill_pairs as f64,
            decode_rows: step.work.decode_rows.into(),
            context_tokens: step.work.context_tokens as f64,
        };
        let end = step.collect.begin;
        let begin = self
            .collected_at
            .replace(end)
            .map_or(step.launch.begin, |before| before.max(step.launch.begin));
        let time = end.saturating_duration_since(begin).saturating_sub(step.mask_wait());
        self.step_fit.add(&work, time);
        self.is_changed = true;
    }

    /// Returns when the next delta is due; `None` when nothing has changed.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        self.is_changed.then(|| self.sent_at.map_or(now, |sent_at| sent_at + INTERVAL))
    }

    /// Sends `draining` at once.
    pub(super) fn set_draining<E: Executor>(
        &mut self,
        is_draining: bool,
        until: Option<Instant>,
        now: Instant,
        steps: &mut StepLoop<E>,
        outputs: &mut Outputs,
    ) {
        (self.is_draining, self.drains_until) = (is_draining, until);
        self.publish(now, steps, outputs);
    }

    /// Sends the state of a pause at once.
    pub(super) fn set_pause<E: Executor>(
        &mut self,
        pause: v1::PauseState,
        now: Instant,
        steps: &mut StepLoop<E>,
        outputs: &mut Outputs,
    ) {
        self.pause = pause;
        self.publish(now, steps, outputs);
    }

    /// Sends the last state under the old weights, then the change. Later snapshots name the new
    /// weights.
    pub(super) fn change_weights<E: Executor>(
        &mut self,
        changed: v1::WeightsChanged,
        now: Instant,
        steps: &mut StepLoop<E>,
        outputs: &mut Outputs,
    ) {
        self.publish(now, steps, outputs);
        if let Some(identity) = &mut self.record.identity {
            identity.weight_version = changed.weight_version;
        }
        let delta = v1::NodeDelta { weights: Some(changed), ..Default::default() };
        self.send(&delta, outputs);
        // A node without weights counts as draining.
        self.publish(now, steps, outputs);
    }

    /// Sends the adapters at once. Later snapshots have them.
    pub(super) fn change_adapters(&mut self, adapters: &[Adapter], outputs: &mut Outputs) {
        self.record.adapters = adapters.iter().map(Into::into).collect();
        let changed = v1::AdaptersChanged { adapters: self.record.adapters.clone() };
        self.send(&v1::NodeDelta { adapters: Some(changed), ..Default::default() }, outputs);
    }

    /// Returns whether the node has valid weights.
    fn has_weights(&self) -> bool {
        self.record.identity.as_ref().is_none_or(|identity| identity.weight_version != 0)
    }

    /// Ends every observer's stream: for routers a stalled node is down until a probe succeeds.
    pub(super) fn stall(&mut self, outputs: &mut Outputs) {
        let stalled = self.observers.drain(..);
        outputs
            .extend(stalled.map(|observer| NodeOutput::ObserveStalled { observer: observer.id }));
    }

    /// Sends a snapshot to a new observer. The next delta does not repeat the snapshot.
    pub(super) fn add<E: Executor>(
        &mut self,
        id: ObserverId,
        now: Instant,
        steps: &mut StepLoop<E>,
        outputs: &mut Outputs,
    ) {
        self.publish(now, steps, outputs);
        let hashes = steps.scheduler().cached_hashes();
        let mut chunks = hashes.chunks(HASHES_PER_EVENT_MAX);
        let snapshot = v1::NodeSnapshot {
            record: Some(self.record.clone()),
            load: Some(self.sent),
            cached_blocks: wire_hashes(chunks.next().unwrap_or_default()),
            tiers: Vec::new(),
        };
        let mut observer = Observer { id, next: 0 };
        outputs.push_back(observer.event(Event::Snapshot(snapshot)));
        for chunk in chunks {
            let cached = wire_hashes(chunk);
            let delta = v1::NodeDelta { cached, ..Default::default() };
            outputs.push_back(observer.event(Event::Delta(delta)));
        }
        for tier in Tier::ALL {
            let stored = steps.scheduler().tier_hashes(tier, TIER_HASHES_MAX);
            for delta in tier_deltas(tier, &stored, &[]) {
                outputs.push_back(observer.event(Event::Delta(delta)));
            }
        }
        self.observers.push(observer);
    }

    pub(super) fn remove(&mut self, id: ObserverId) {
        self.observers.retain(|observer| observer.id != id);
    }

    /// Sends a delta if one is due.
    pub(super) fn publish_if_due<E: Executor>(
        &mut self,
        now: Instant,
        steps: &mut StepLoop<E>,
        outputs: &mut Outputs,
    ) {
        if self.due(now).is_some_and(|due| due <= now) {
            self.publish(now, steps, outputs);
        }
    }

    fn publish<E: Executor>(
        &mut self,
        now: Instant,
        steps: &mut StepLoop<E>,
        outputs: &mut Outputs,
    ) {
        self.is_changed = false;
        self.sent_at = Some(now);
        let step_age = steps.step_age().unwrap_or_default();
        let scheduler = steps.scheduler_mut();
        let load = scheduler.load();
        outputs.push_back(NodeOutput::Metric(Metric::Load(load)));
        for tier in Tier::ALL {
            let stats = scheduler.tier_stats(tier).map(|stats| Metric::Tier(tier, stats));
            outputs.extend(stats.map(NodeOutput::Metric));
        }
        let config = scheduler.config();
        let step_tokens = config.step_tokens;
        let chunk_tokens = config.chunk_tokens.min(step_tokens);
        let (slots, itl_max) = (config.limits.slots, config.itl.map(|itl| itl.max));
        let limits = StepLimits { slots, step_tokens, chunk_tokens, itl_max };
        let costs = self.step_fit.report(limits);
        let block_ns = |tier| {
            let time = scheduler.tier_stats(tier).and_then(|stats| stats.block_time);
            time.map_or(0, |time| time.as_nanos() as u64)
        };
        let load = v1::NodeLoad {
            draining: self.is_draining || !self.has_weights(),
            // 0 would mean no limit.
            drain_ms: self.drains_until.map_or(0, |until| {
                (until.saturating_duration_since(now).as_millis() as u64).max(1)
            }),
            pause: self.pause.into(),
            host_block_ns: block_ns(Tier::Host),
            disk_block_ns: block_ns(Tier::Disk),
            step_costs: Some(costs),
            step_age_us: step_age.as_micros() as u64,
            ..wire_load(&load)
        };
        let (cached, evicted) = split(scheduler.take_cache_changes());
        for tier in Tier::ALL {
            let (stored, lost) = split(scheduler.take_tier_changes(tier));
            for delta in tier_deltas(tier, &stored, &lost) {
                self.send(&delta, outputs);
            }
        }
        let arrived = std::mem::take(&mut self.arrived);
        if load == self.sent && arrived.is_empty() && cached.is_empty() && evicted.is_empty() {
            return;
        }
        self.sent = load;
        // A router applies `cached` before `evicted`, so each hash must be in only one of the
        // lists.
        let count = cached.len().max(evicted.len()).div_ceil(HASHES_PER_EVENT_MAX).max(1);
        for index in 0..count {
            let delta = v1::NodeDelta {
                load: (index == 0).then_some(load),
                cached: wire_hashes(chunk(&cached, index)),
                evicted: wire_hashes(chunk(&evicted, index)),
                arrived: if index == 0 { wire_ids(&arrived) } else { Vec::new() },
                ..Default::default()
            };
            self.send(&delta, outputs);
        }
    }

    /// Sends a change of the node to all observers.
    fn send(&mut self, delta: &v1::NodeDelta, outputs: &mut Outputs) {
        let events = self.observers.iter_mut();
        outputs.extend(events.map(|observer| observer.event(Event::Delta(delta.clone()))));
    }
}

impl Observer {
    fn event(&mut self, event: Event) -> NodeOutput {
        let event = v1::ObserveEvent { sequence: self.next, event: Some(event) };
        self.next += 1;
        NodeOutput::Observe { observer: self.id, event }
    }
}

fn wire_load(load: &Load) -> v1::NodeLoad {
    v1::NodeLoad {
        running: load.running,
        waiting: load.waiting,
        pending_prompt_tokens: load.pending_prompt_tokens,
        blocks_free: load.blocks_free,
        blocks_cached: load.blocks_cached,
        blocks_held: load.blocks_held,
        blocks_reserved: load.blocks_reserved,
        pending_prompt_pairs: load.pending_prompt_pairs,
        context_tokens: load.context_tokens,
        prefilling: load.prefilling,
        ..v1::NodeLoad::default()
    }
}

/// Returns the added and the evicted blocks.
fn split(changes: Vec<CacheChange>) -> (Vec<BlockHash>, Vec<BlockHash>) {
    let (mut added, mut evicted) = (Vec::new(), Vec::new());
    for change in changes {
        match change {
            CacheChange::Added(hash) => added.push(hash),
            CacheChange::Evicted(hash) => evicted.push(hash),
        }
    }
    (added, evicted)
}

/// Returns the deltas that report a tier's changes.
fn tier_deltas(
    tier: Tier,
    stored: &[BlockHash],
    lost: &[BlockHash],
) -> impl Iterator<Item = v1::NodeDelta> {
    let count = stored.len().max(lost.len()).div_ceil(HASHES_PER_EVENT_MAX);
    (0..count).map(move |index| {
        let blocks = v1::TierBlocks {
            tier: match tier {
                Tier::Host => v1::KvTier::Host,
                Tier::Disk => v1::KvTier::Disk,
            }
            .into(),
            stored: wire_hashes(chunk(stored, index)),
            lost: wire_hashes(chunk(lost, index)),
        };
        v1::NodeDelta { tiers: vec![blocks], ..v1::NodeDelta::default() }
    })
}

fn chunk(hashes: &[BlockHash], index: usize) -> &[BlockHash] {
    hashes.chunks(HASHES_PER_EVENT_MAX).nth(index).unwrap_or_default()
}

/// Encodes sequence ids as transfer ids, which are equal.
fn wire_ids(arrived: &[SequenceId]) -> Vec<Bytes> {
    arrived.iter().map(|id| Bytes::copy_from_slice(&id.0.to_be_bytes())).collect()
}

/// Encodes each hash as 16 bytes, most significant first, in one allocation.
fn wire_hashes(hashes: &[BlockHash]) -> Vec<Bytes> {
    let all: Bytes =
        hashes.iter().flat_map(|hash| hash.0.to_be_bytes()).collect::<Vec<u8>>().into();
    (0..hashes.len()).map(|index| all.slice(index * 16..index * 16 + 16)).collect()
}

#[cfg(test)]
mod tests {
    use engine::{
        StepKind, StepWork,
        plan::{Dispatch, Span},
    };

    use super::*;

    #[test]
    fn wait_for_token_bitmasks_is_no_step_time() {
        let start = Instant::now();
        let costs_with_wait = |wait_ms: u64| {
            let mut observers = LoadObservers::new(&crate::testing::record());
            for step_id in 0..20 {
                let begin = start + Duration::from_millis(100 * step_id);
                let end = begin + Duration::from_millis(5 + wait_ms);
                let span = |begin, end| Span { begin, end };
                observers.add_step(&StepRecord {
                    step_id,
                    rows: 1,
                    tokens: 1,
                    sampled: 1,
                    kind: StepKind::Decode,
                    work: StepWork { decode_rows: 1, context_tokens: 9, ..StepWork::default() },
                    dispatch: Dispatch::Eager,
                    uploaded_bytes: 0,
                    experts: Default::default(),
                    busy: Duration::from_millis(5),
                    plan: span(begin, begin),
                    launch: span(begin, begin),
                    collect: span(end, end),
                    device: Some(span(begin, end)),
                    results_at: Some(end),
                });
            }
            let limits = StepLimits { slots: 8, step_tokens: 64, chunk_tokens: 64, itl_max: None };
            observers.step_fit.report(limits).decode.expect("enough decode steps")
        };
        assert_eq!(costs_with_wait(30), costs_with_wait(0));
    }

    #[test]
    fn hashes_are_sixteen_bytes_each_and_chunks_are_bounded() {
        let hashes: Vec<BlockHash> = (0..HASHES_PER_EVENT_MAX as u128 + 5).map(BlockHash).collect();
        assert_eq!(chunk(&hashes, 0).len(), HASHES_PER_EVENT_MAX);
        assert_eq!(chunk(&hashes, 1).len(), 5);
        assert!(chunk(&hashes, 2).is_empty());
        let wire = wire_hashes(&hashes[..3]);
        assert_eq!(wire[2][..], 2u128.to_be_bytes());
        assert_eq!(wire.len(), 3);
    }
}
