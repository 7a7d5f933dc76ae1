//! One member: an address and the process that answers there.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use foldhash::{HashSet, HashSetExt};
use proto::{ids::TransferId, v1};

use super::{
    AssignmentId, CACHED_BLOCKS_MAX, Health, NodeKey, SILENCE_MAX, StreamId, TIER_BLOCKS_MAX,
    breaker::{Breaker, BreakerReason},
    service::Latency,
};
use crate::{
    Epoch, Load, NodeAddress, NodeRecord, RecordError,
    backoff::{Jitter, doubled},
    predict::StepCosts,
    record::{adapters, check_load, sixteen_bytes},
};

/// First delay after a failed probe; a process restarts in about this time.
const PROBE_DELAY_FIRST: Duration = Duration::from_millis(100);
/// Maximum delay between probes, and thus the maximum time to detect that a node has recovered.
const PROBE_DELAY_MAX: Duration = Duration::from_secs(2);
/// A node that was up for less than this time flaps.
const STABLE_AFTER: Duration = Duration::from_secs(2);
/// Maximum delay before the probe of a node whose report was impossible.
const REJECTED_DELAY_MAX: Duration = Duration::from_secs(16);
/// Time up after which earlier impossible reports of a node no longer count.
const REJECTIONS_COUNT_FOR: Duration = Duration::from_secs(60);
/// A load report that arrives this much later than an assignment includes the assignment: nodes
/// report changes within 50 ms.
const REPORT_LAG: Duration = Duration::from_millis(150);
/// First pause after Busy if the node names no pause: a few decode steps.
const BUSY_DELAY_FIRST: Duration = Duration::from_millis(50);
const BUSY_DELAY_MAX: Duration = Duration::from_secs(2);

/// An address, and the process that was last seen there.
#[derive(Debug)]
pub struct Member {
    pub node: NodeKey,
    pub address: NodeAddress,
    /// Whether the address is still in the membership.
    pub(super) listed: bool,
    pub health: Health,
    /// Reason for the health.
    pub reason: String,
    pub(super) stream: Option<Stream>,
    /// Time of the next probe; set exactly when `stream` is `None`.
    pub(super) retry_at: Option<Instant>,
    pub(super) up_since: Option<Instant>,
    /// Consecutive failures since the node was last stable.
    failures: u32,
    pub(super) seen: Option<NodeReports>,
    /// Time of the last reported change of load or cache.
    pub(super) changed_at: Option<Instant>,
    /// This router's attempts that the reported load cannot include yet.
    pub(super) unseen: BTreeMap<AssignmentId, UnreportedAttempt>,
    /// Sequences of other routers in the last load report.
    pub(super) other_rows: usize,
    /// Number of this router's attempts on the current process.
    pub in_flight: usize,
    /// End of the pause after Busy.
    pub busy_until: Option<Instant>,
    busy_count: u32,
    /// Impossible reports in a row.
    rejections: u32,
    pub(super) breaker: Breaker,
    pub(super) latency: Latency,
    /// Value of the directory's counter at the last pick of this node. Ties go to the least
    /// recently picked node.
    pub(super) last_picked: u64,
}

#[derive(Debug)]
pub(super) struct Stream {
    pub(super) id: StreamId,
    /// Number of the last event; `None` before the snapshot.
    pub(super) last: Option<u64>,
    /// Deadline of the snapshot. After the snapshot: time of requesting a fresh one if the node
    /// stays silent.
    pub(super) deadline: Instant,
}

/// The record, load and cached blocks that the process reported.
#[derive(Debug)]
pub(super) struct NodeReports {
    pub(super) record: Arc<NodeRecord>,
    pub(super) load: Load,
    /// `None` from a node of an older release.
    pub(super) step_costs: Option<StepCosts>,
    /// Time of the last load report.
    pub(super) reported_at: Instant,
    pub(super) cached: HashSet<u128>,
    pub(super) tiers: Tiers,
}

impl NodeReports {
    /// Returns whether the process admits nothing until a pause ends.
    pub(super) fn is_paused(&self) -> bool {
        self.load.pause() != v1::PauseState::None
    }
}

/// Blocks in a node's KV tiers.
#[derive(Debug, Default)]
pub(super) struct Tiers {
    host: HashSet<u128>,
    disk: HashSet<u128>,
}

impl Tiers {
    /// Applies reported changes. Ignores tiers of newer releases, and blocks beyond the directory's
    /// limit.
    fn apply(&mut self, changes: &[v1::TierBlocks]) -> Result<(), RecordError> {
        for change in changes {
            let blocks = match change.tier() {
                v1::KvTier::Host => &mut self.host,
                v1::KvTier::Disk => &mut self.disk,
                v1::KvTier::Unspecified => continue,
            };
            for hash in &change.lost {
                blocks.remove(&sixteen_bytes("lost", hash)?);
            }
            for hash in &change.stored {
                let hash = sixteen_bytes("stored", hash)?;
                if blocks.len() < TIER_BLOCKS_MAX {
                    blocks.insert(hash);
                }
            }
        }
        Ok(())
    }

    /// Returns the length of the prefix of `keys` that the tiers hold, and the time to load it by
    /// the node's report.
    pub(super) fn hits(&self, keys: &[u128], load: &Load) -> (usize, f64) {
        let block_ms = |key: &u128| match () {
            () if self.host.contains(key) => Some(load.host_block_ns),
            () if self.disk.contains(key) => Some(load.disk_block_ns),
            () => None,
        };
        let mut hits = (0, 0.0);
        for block_ns in keys.iter().map_while(block_ms) {
            hits = (hits.0 + 1, hits.1 + block_ns as f64 / 1e6);
        }
        hits
    }
}

/// Load that an attempt adds to a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct UnreportedAttempt {
    pub(super) prompt_tokens: u64,
    /// Cached tokens, which the prompt tokens attend to.
    pub(super) computed_tokens: u64,
    pub(super) blocks: u64,
    pub(super) since: Instant,
    pub(super) transfer_id: TransferId,
    /// Whether the node accepted the attempt.
    pub(super) accepted: bool,
}

impl Member {
    pub(super) fn new(node: NodeKey, address: NodeAddress) -> Self {
        Self {
            node,
            address,
            listed: true,
            health: Health::Unknown,
            reason: "not seen yet".into(),
            stream: None,
            retry_at: None,
            up_since: None,
            failures: 0,
            seen: None,
            changed_at: None,
            unseen: BTreeMap::new(),
            other_rows: 0,
            in_flight: 0,
            busy_until: None,
            busy_count: 0,
            rejections: 0,
            breaker: Breaker::default(),
            latency: Latency::default(),
            last_picked: 0,
        }
    }

    pub(super) fn epoch(&self) -> Option<Epoch> {
        self.seen.as_ref().map(|seen| seen.record.epoch)
    }

    pub(super) fn is_synced(&self) -> bool {
        self.stream.as_ref().is_some_and(|stream| stream.last.is_some())
    }

    /// Returns the report of a process that accepts requests.
    pub(super) fn serving(&self) -> Option<&NodeReports> {
        self.seen.as_ref().filter(|seen| self.health == Health::Up && !seen.load.draining)
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.stream.as_ref().map_or(self.retry_at, |stream| Some(stream.deadline))
    }

    /// Handles an event of the member's stream. Returns the epoch of the process after a snapshot,
    /// `None` after a delta.
    pub(super) fn observed(
        &mut self,
        now: Instant,
        event: v1::ObserveEvent,
    ) -> Result<Option<Epoch>, RecordError> {
        match event.event.ok_or(RecordError::Missing { field: "event" })? {
            v1::observe_event::Event::Snapshot(snapshot) => {
                self.snapshot(now, event.sequence, snapshot)
            }
            v1::observe_event::Event::Delta(delta) => {
                self.delta(now, event.sequence, delta).map(|()| None)
            }
        }
    }

    fn snapshot(
        &mut self,
        now: Instant,
        sequence: u64,
        snapshot: v1::NodeSnapshot,
    ) -> Result<Option<Epoch>, RecordError> {
        let Some(stream) = &mut self.stream else { return Ok(None) };
        match stream.last {
            Some(last) => return Err(RecordError::SequenceGap { last, found: sequence }),
            None if sequence != 0 => {
                return Err(RecordError::NoSnapshot { found: "a later event" });
            }
            None => {}
        }
        let record = snapshot.record.ok_or(RecordError::Missing { field: "record" })?;
        let record = NodeRecord::try_from(record)?;
        if record.role != self.address.role {
            let (found, listed) = (record.role, self.address.role);
            return Err(RecordError::OtherRole { found, listed });
        }
        let load = snapshot.load.ok_or(RecordError::Missing { field: "load" })?;
        check_load(&load, &record)?;
        let mut cached = HashSet::new();
        remember(&mut cached, &snapshot.cached_blocks, &record)?;
        (stream.last, stream.deadline) = (Some(0), now + SILENCE_MAX);
        let epoch = record.epoch;
        let step_costs = load.step_costs.map(StepCosts::from);
        let record = Arc::new(record);
        let mut tiers = Tiers::default();
        tiers.apply(&snapshot.tiers)?;
        self.seen = Some(NodeReports { record, load, step_costs, reported_at: now, cached, tiers });
        self.load_reported(now, &[]);
        Ok(Some(epoch))
    }

    fn delta(
        &mut self,
        now: Instant,
        sequence: u64,
        delta: v1::NodeDelta,
    ) -> Result<(), RecordError> {
        let no_snapshot = || RecordError::NoSnapshot { found: "a delta" };
        let (Some(stream), Some(seen)) = (&mut self.stream, &mut self.seen) else {
            return Err(no_snapshot());
        };
        let last = stream.last.ok_or_else(no_snapshot)?;
        if last.checked_add(1) != Some(sequence) {
            return Err(RecordError::SequenceGap { last, found: sequence });
        }
        (stream.last, stream.deadline) = (Some(sequence), now + SILENCE_MAX);
        self.changed_at = Some(now);
        if let Some(changed) = delta.weights {
            let mut record = NodeRecord::clone(&seen.record);
            record.identity.weight_version = changed.weight_version;
            seen.record = Arc::new(record);
            seen.cached.clear();
        }
        if let Some(changed) = delta.adapters {
            let mut record = NodeRecord::clone(&seen.record);
            record.adapters = adapters(changed.adapters)?;
            seen.record = Arc::new(record);
        }
        for hash in &delta.evicted {
            seen.cached.remove(&sixteen_bytes("evicted", hash)?);
        }
        remember(&mut seen.cached, &delta.cached, &seen.record)?;
        seen.tiers.apply(&delta.tiers)?;
        if let Some(load) = delta.load {
            check_load(&load, &seen.record)?;
            (seen.load, seen.reported_at) = (load, now);
            seen.step_costs = load.step_costs.map(StepCosts::from);
            self.load_reported(now, &delta.arrived);
        }
        Ok(())
    }

    /// Drops the unseen attempts that this load report includes. A node of an older release does
    /// not name them: its next report after the acceptance of an attempt includes the attempt.
    fn load_reported(&mut self, now: Instant, arrived: &[Bytes]) {
        let names_arrived = self.seen.as_ref().is_some_and(|seen| seen.step_costs.is_some());
        self.unseen.retain(|_, attempt| {
            let is_included = match names_arrived {
                true => arrived.iter().any(|id| **id == attempt.transfer_id.to_bytes()),
                false => attempt.accepted,
            };
            !is_included && now.saturating_duration_since(attempt.since) < REPORT_LAG
        });
        let load = self.load();
        let reported = load.running.saturating_add(load.waiting) as usize;
        let own = self.in_flight.saturating_sub(self.unseen.len());
        self.other_rows = reported.saturating_sub(own);
    }

    /// Drops the state of the old process when a new one answers at the address.
    pub(super) fn forget_process(&mut self) {
        self.unseen.clear();
        self.changed_at = None;
        self.in_flight = 0;
        self.busy_until = None;
        self.busy_count = 0;
        self.failures = 0;
        self.breaker = Breaker::default();
        self.latency = Latency::default();
    }

    /// Counts a lost stream or failed probe. Returns the delay before the next probe; zero means at
    /// once.
    pub(super) fn failed(&mut self, now: Instant, jitter: &mut Jitter) -> Duration {
        let up_for = self.up_since.take().map(|since| now.saturating_duration_since(since));
        if up_for.is_some_and(|up_for| up_for >= STABLE_AFTER) {
            self.failures = 0;
        }
        let failures = self.failures;
        self.failures = failures.saturating_add(1);
        if up_for.is_some() && failures == 0 {
            return Duration::ZERO;
        }
        jitter.spread(doubled(PROBE_DELAY_FIRST, failures.saturating_sub(1), PROBE_DELAY_MAX))
    }

    /// Returns the delay before the next probe of a node with an invalid answer.
    pub(super) fn rejected(&mut self, now: Instant, jitter: &mut Jitter) -> Duration {
        let up_for = self.up_since.take().map(|since| now.saturating_duration_since(since));
        if up_for.is_some_and(|up_for| up_for >= REJECTIONS_COUNT_FOR) {
            self.rejections = 0;
        }
        self.failures = self.failures.saturating_add(1);
        let delay = doubled(PROBE_DELAY_MAX, self.rejections, REJECTED_DELAY_MAX);
        self.rejections = self.rejections.saturating_add(1);
        jitter.spread(delay)
    }

    /// Handles Busy: no attempt goes to the node for a while.
    pub(super) fn busy(&mut self, now: Instant, jitter: &mut Jitter) {
        let pause = jitter.spread(doubled(BUSY_DELAY_FIRST, self.busy_count, BUSY_DELAY_MAX));
        self.busy_count = self.busy_count.saturating_add(1);
        self.busy_until = Some(now + pause);
    }

    /// Ends the pause after Busy: the node has accepted an attempt.
    pub(super) fn reset_busy(&mut self) {
        self.busy_count = 0;
        self.busy_until = None;
    }

    /// Returns the record of the last process seen at the address.
    pub fn record(&self) -> Option<&NodeRecord> {
        self.seen.as_ref().map(|seen| &*seen.record)
    }

    /// Returns why the circuit breaker is open or half-open; `None` while it is closed.
    pub fn excluded(&self) -> Option<BreakerReason> {
        self.breaker.reason()
    }

    pub fn load(&self) -> Load {
        self.seen.as_ref().map(|seen| seen.load).unwrap_or_default()
    }

    pub fn cached_blocks(&self) -> usize {
        self.seen.as_ref().map_or(0, |seen| seen.cached.len())
    }

    /// Returns the size of the hash set of cached blocks in bytes: 16 bytes and a control byte per
    /// bucket, at a maximum load factor of 7/8.
    pub fn cached_bytes(&self) -> usize {
        self.seen.as_ref().map_or(0, |seen| seen.cached.capacity() * 8 / 7 * 17)
    }
}

/// Adds hashes to the cached set, up to the node's number of blocks and the directory's limit.
fn remember(
    cached: &mut HashSet<u128>,
    hashes: &[impl AsRef<[u8]>],
    record: &NodeRecord,
) -> Result<(), RecordError> {
    let count_max = record.block_count as usize;
    for hash in hashes {
        let hash = sixteen_bytes("cached", hash.as_ref())?;
        if cached.len() < CACHED_BLOCKS_MAX || cached.contains(&hash) {
            cached.insert(hash);
        }
        if cached.len() > count_max {
            return Err(RecordError::TooManyCached { count: cached.len(), count_max });
        }
    }
    Ok(())
}
