//! What routers see of this node: a snapshot, then numbered changes.
//!
//! The engine thread owns the list of observers, so that snapshots and changes come in one order.
//! It never waits for one: an observer whose queue is full is told so and ended, and the router
//! begins again with a fresh snapshot.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use bytes::Bytes;
use cluster::NodeRecord;
use engine::{
    Scheduler,
    event::{BlockHash, CacheChange},
};
use futures_util::Stream;
use proto::v1;
use telemetry::{NodeMetrics, metrics::LoadStats};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tonic::Status;

/// Routers at a time.
pub(crate) const OBSERVERS_MAX: usize = 32;
/// Changes are told no more often: routers choose by them, they do not count with them.
const INTERVAL: Duration = Duration::from_millis(50);
/// More than ten seconds of changes.
const EVENTS_MAX: usize = 256;
/// 256 KiB of hashes, far below the 4 MiB that a gRPC message may have.
const HASHES_PER_EVENT_MAX: usize = 16_384;

/// Why an observer's stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ObserveEnd {
    Lagged,
    Stalled,
    Stopped,
}

/// The engine's end of one observer.
#[derive(Debug)]
pub(crate) struct ObserverEnds {
    events: mpsc::Sender<v1::ObserveEvent>,
    end: oneshot::Sender<ObserveEnd>,
    /// Number of the next event.
    next: u64,
}

/// The router's end. Ends with an error; there is no other way.
#[derive(Debug)]
pub(crate) struct ObserveStream {
    events: mpsc::Receiver<v1::ObserveEvent>,
    /// `None` once the end was told.
    end: Option<oneshot::Receiver<ObserveEnd>>,
    _place: OwnedSemaphorePermit,
}

pub(crate) fn observer(place: OwnedSemaphorePermit) -> (ObserverEnds, ObserveStream) {
    let (events, events_heard) = mpsc::channel(EVENTS_MAX);
    let (end, end_heard) = oneshot::channel();
    let stream = ObserveStream { events: events_heard, end: Some(end_heard), _place: place };
    (ObserverEnds { events, end, next: 0 }, stream)
}

impl Stream for ObserveStream {
    type Item = Result<v1::ObserveEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(end) = &mut this.end else { return Poll::Ready(None) };
        if let Some(event) = ready!(this.events.poll_recv(context)) {
            return Poll::Ready(Some(Ok(event)));
        }
        let end = ready!(Pin::new(end).poll(context)).unwrap_or(ObserveEnd::Stopped);
        this.end = None;
        Poll::Ready(Some(Err(match end {
            ObserveEnd::Lagged => {
                Status::aborted("this observer fell behind; observe again for a fresh snapshot")
            }
            ObserveEnd::Stalled => {
                Status::unavailable("no step of this node ends; observe again until one does")
            }
            ObserveEnd::Stopped => Status::unavailable("the node stopped"),
        })))
    }
}

/// Every observer, and what they were last told.
pub(crate) struct Observers {
    record: v1::NodeRecord,
    observers: Vec<ObserverEnds>,
    told: v1::NodeLoad,
    told_at: Option<Instant>,
    /// Something happened since.
    changed: bool,
    draining: bool,
    stalled: bool,
    metrics: NodeMetrics,
}

impl Observers {
    pub fn new(record: &NodeRecord, metrics: NodeMetrics) -> Self {
        Self {
            record: record.into(),
            observers: Vec::new(),
            told: v1::NodeLoad::default(),
            told_at: None,
            changed: true,
            draining: false,
            stalled: false,
            metrics,
        }
    }

    /// The scheduler's state may differ from what was told.
    pub fn mark_changed(&mut self) {
        self.changed = true;
    }

    /// From now on the load says that this node drains; told at once.
    pub fn drain(&mut self, now: Instant, scheduler: &mut Scheduler) {
        self.draining = true;
        self.publish(now, scheduler);
    }

    /// Whether the device's work stands still. Who observes is told so and ended, who asks meanwhile,
    /// too: for routers the node is down until its probe succeeds.
    pub fn set_stalled(&mut self, stalled: bool) {
        self.stalled = stalled;
        if stalled {
            self.observers.drain(..).for_each(|observer| observer.end(ObserveEnd::Stalled));
        }
    }

    pub fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// When there is something to tell; `None` when nothing has changed.
    pub fn due(&self) -> Option<Instant> {
        self.changed.then_some(())?;
        Some(self.told_at.map_or_else(Instant::now, |told_at| told_at + INTERVAL))
    }

    /// Tells what changed, unless that was done a moment ago.
    pub fn publish_if_due(&mut self, now: Instant, scheduler: &mut Scheduler) {
        if self.changed && self.told_at.is_none_or(|told_at| now >= told_at + INTERVAL) {
            self.publish(now, scheduler);
        }
    }

    /// A new observer begins with a snapshot; what it says is not repeated by the next change.
    pub fn add(&mut self, mut observer: ObserverEnds, now: Instant, scheduler: &mut Scheduler) {
        if self.stalled {
            return observer.end(ObserveEnd::Stalled);
        }
        self.publish(now, scheduler);
        // On an idle node nothing else notices those that left.
        self.observers.retain(|observer| !observer.events.is_closed());
        let hashes = scheduler.cached_hashes();
        let mut parts = hashes.chunks(HASHES_PER_EVENT_MAX);
        let snapshot = v1::NodeSnapshot {
            record: Some(self.record.clone()),
            load: Some(self.told),
            cached_blocks: wire_hashes(parts.next().unwrap_or_default()),
        };
        let mut taken = observer.tell(v1::observe_event::Event::Snapshot(snapshot));
        for part in parts {
            let cached = wire_hashes(part);
            let delta = v1::NodeDelta { cached, ..Default::default() };
            taken = taken && observer.tell(v1::observe_event::Event::Delta(delta));
        }
        if taken {
            self.observers.push(observer);
        } else {
            observer.end(ObserveEnd::Lagged);
        }
    }

    fn publish(&mut self, now: Instant, scheduler: &mut Scheduler) {
        self.changed = false;
        self.told_at = Some(now);
        let load = self.load(scheduler);
        let (mut cached, mut evicted) = (Vec::new(), Vec::new());
        for change in scheduler.take_cache_changes() {
            match change {
                CacheChange::Added(hash) => cached.push(hash),
                CacheChange::Evicted(hash) => evicted.push(hash),
            }
        }
        if load == self.told && cached.is_empty() && evicted.is_empty() {
            return;
        }
        self.told = load;
        // Taken together in one order by every reader: first what came, then what went. A key is in
        // one of the two lists only.
        let parts = cached.len().max(evicted.len()).div_ceil(HASHES_PER_EVENT_MAX).max(1);
        for part in 0..parts {
            let delta = v1::NodeDelta {
                load: (part == 0).then_some(load),
                cached: wire_hashes(part_of(&cached, part)),
                evicted: wire_hashes(part_of(&evicted, part)),
            };
            self.tell_all(&delta);
        }
    }

    fn tell_all(&mut self, delta: &v1::NodeDelta) {
        let observers = std::mem::take(&mut self.observers);
        for mut observer in observers {
            if observer.tell(v1::observe_event::Event::Delta(delta.clone())) {
                self.observers.push(observer);
            } else {
                observer.end(ObserveEnd::Lagged);
            }
        }
    }

    fn load(&self, scheduler: &Scheduler) -> v1::NodeLoad {
        let load = scheduler.load();
        self.metrics.set_load(&LoadStats {
            running: load.running,
            waiting: load.waiting,
            pending_prompt_tokens: load.pending_prompt_tokens,
            blocks_free: load.blocks_free,
            blocks_cached: load.blocks_cached,
            blocks_held: load.blocks_held,
            blocks_reserved: load.blocks_reserved,
        });
        v1::NodeLoad {
            running: load.running,
            waiting: load.waiting,
            pending_prompt_tokens: load.pending_prompt_tokens,
            blocks_free: load.blocks_free,
            blocks_cached: load.blocks_cached,
            blocks_held: load.blocks_held,
            blocks_reserved: load.blocks_reserved,
            draining: self.draining,
        }
    }
}

impl ObserverEnds {
    /// False when the queue is full or the observer left.
    fn tell(&mut self, event: v1::observe_event::Event) -> bool {
        let event = v1::ObserveEvent { sequence: self.next, event: Some(event) };
        self.next += 1;
        match self.events.try_send(event) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Full(_) | mpsc::error::TrySendError::Closed(_)) => false,
        }
    }

    fn end(self, end: ObserveEnd) {
        // The observer may have left.
        let _ = self.end.send(end);
    }
}

fn part_of(hashes: &[BlockHash], part: usize) -> &[BlockHash] {
    let start = (part * HASHES_PER_EVENT_MAX).min(hashes.len());
    let end = (start + HASHES_PER_EVENT_MAX).min(hashes.len());
    &hashes[start..end]
}

/// 16 bytes each, most significant first, all in one allocation.
fn wire_hashes(hashes: &[BlockHash]) -> Vec<Bytes> {
    let all: Bytes =
        hashes.iter().flat_map(|hash| hash.0.to_be_bytes()).collect::<Vec<u8>>().into();
    (0..hashes.len()).map(|index| all.slice(index * 16..index * 16 + 16)).collect()
}

/// Places for observers.
pub(crate) fn places() -> Arc<tokio::sync::Semaphore> {
    Arc::new(tokio::sync::Semaphore::new(OBSERVERS_MAX))
}

#[cfg(test)]
mod tests {
    use engine::{
        CacheSeeds, SchedulerConfig,
        event::{Input, NewSequence, SequenceId, SequenceKind},
        executor::ExecutorLimits,
    };
    use futures_util::{FutureExt, StreamExt};
    use kernels::sampling::Sampling;
    use tonic::Code;
    use v1::observe_event::Event;

    use super::*;
    use crate::testing;

    fn scheduler() -> Scheduler {
        let limits = ExecutorLimits {
            slots: 4,
            step_tokens: 64,
            sequence_tokens: 64,
            blocks: 16,
            depth: 2,
            vocabulary: 10,
            speculation: None,
        };
        let seeds = CacheSeeds { model_fingerprint: 1, weight_version: 1 };
        Scheduler::new(SchedulerConfig::new(limits), seeds).unwrap()
    }

    /// One more sequence waits, so that there is something to tell.
    fn arrive(scheduler: &mut Scheduler, id: u128, now: Instant) {
        let sequence = NewSequence {
            id: SequenceId(id),
            kind: SequenceKind::Compute,
            tokens: vec![1; 20],
            prompt_len: 20,
            sampling: Sampling::greedy(),
            max_tokens: 5,
            ignore_stop_tokens: true,
            cache_salt: String::new(),
            constraint: None,
            deadline: now + Duration::from_secs(600),
        };
        scheduler.handle(now, Input::Arrived(sequence), &mut Vec::new());
    }

    fn observers() -> Observers {
        Observers::new(&testing::record(), testing::metrics())
    }

    fn add(observers: &mut Observers, now: Instant, scheduler: &mut Scheduler) -> ObserveStream {
        let (ends, stream) = observer(places().try_acquire_owned().unwrap());
        observers.add(ends, now, scheduler);
        stream
    }

    fn heard(stream: &mut ObserveStream) -> Option<Result<v1::ObserveEvent, Status>> {
        stream.next().now_or_never().flatten()
    }

    #[test]
    fn changes_follow_the_snapshot_in_order_and_not_too_often() {
        let (mut observers, mut scheduler) = (observers(), scheduler());
        let mut now = Instant::now();
        let mut stream = add(&mut observers, now, &mut scheduler);
        let event = heard(&mut stream).unwrap().unwrap();
        assert_eq!(event.sequence, 0);
        assert!(matches!(event.event, Some(Event::Snapshot(_))));

        // Two changes at once are one event, and it waits for its time.
        for id in [1, 2] {
            arrive(&mut scheduler, id, now);
            observers.mark_changed();
            observers.publish_if_due(now, &mut scheduler);
        }
        assert!(heard(&mut stream).is_none());
        assert_eq!(observers.due(), Some(now + INTERVAL));
        now += INTERVAL;
        observers.publish_if_due(now, &mut scheduler);
        let event = heard(&mut stream).unwrap().unwrap();
        let Some(Event::Delta(delta)) = event.event else { panic!("a change") };
        assert_eq!((event.sequence, delta.load.unwrap().waiting), (1, 2));

        // What did not change is not told.
        assert_eq!(observers.due(), None);
        observers.mark_changed();
        observers.publish_if_due(now + INTERVAL, &mut scheduler);
        assert!(heard(&mut stream).is_none());

        // A drain is told at once.
        observers.drain(now + INTERVAL, &mut scheduler);
        let event = heard(&mut stream).unwrap().unwrap();
        let Some(Event::Delta(delta)) = event.event else { panic!("a change") };
        assert!(event.sequence == 2 && delta.load.unwrap().draining);
    }

    #[test]
    fn a_laggard_is_ended_and_the_others_go_on() {
        let (mut observers, mut scheduler) = (observers(), scheduler());
        let mut now = Instant::now();
        let mut laggard = add(&mut observers, now, &mut scheduler);
        let mut reader = add(&mut observers, now, &mut scheduler);
        for round in 0..EVENTS_MAX as u128 {
            arrive(&mut scheduler, round % 2, now);
            scheduler.handle(
                now,
                Input::Abort { id: SequenceId((round + 1) % 2) },
                &mut Vec::new(),
            );
            // The count of waiting sequences may stand still; the drain flag alternates.
            observers.draining = round % 2 == 0;
            now += INTERVAL;
            observers.mark_changed();
            observers.publish_if_due(now, &mut scheduler);
            while heard(&mut reader).is_some() {}
        }
        assert_eq!(observers.observers.len(), 1);
        let events: Vec<_> = std::iter::from_fn(|| heard(&mut laggard)).collect();
        assert_eq!(events.len(), EVENTS_MAX + 1);
        for (index, event) in events[..EVENTS_MAX].iter().enumerate() {
            assert_eq!(event.as_ref().unwrap().sequence, index as u64);
        }
        assert_eq!(events[EVENTS_MAX].as_ref().unwrap_err().code(), Code::Aborted);
    }

    #[test]
    fn an_observer_that_leaves_is_forgotten_and_a_stop_is_told() {
        let (mut observers, mut scheduler) = (observers(), scheduler());
        let now = Instant::now();
        drop(add(&mut observers, now, &mut scheduler));
        let mut stream = add(&mut observers, now, &mut scheduler);
        observers.drain(now, &mut scheduler);
        assert_eq!(observers.observers.len(), 1);
        drop(observers);
        let events: Vec<_> = std::iter::from_fn(|| heard(&mut stream)).collect();
        assert_eq!(events.len(), 3);
        assert_eq!(events[2].as_ref().unwrap_err().code(), Code::Unavailable);
    }

    #[test]
    fn hashes_are_sixteen_bytes_each_and_parts_are_bounded() {
        let hashes: Vec<BlockHash> = (0..HASHES_PER_EVENT_MAX as u128 + 5).map(BlockHash).collect();
        assert_eq!(part_of(&hashes, 0).len(), HASHES_PER_EVENT_MAX);
        assert_eq!(part_of(&hashes, 1).len(), 5);
        assert!(part_of(&hashes, 2).is_empty());
        let wire = wire_hashes(&hashes[..3]);
        assert_eq!(wire[2][..], 2u128.to_be_bytes());
        assert_eq!(wire.len(), 3);
    }
}
