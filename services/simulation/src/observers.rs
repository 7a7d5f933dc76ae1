//! What a simulated node tells routers of itself, as `services/node/src/observe.rs` does.

use std::time::{Duration, Instant};

use bytes::Bytes;
use cluster::{NodeRecord, StreamId};
use engine::{
    Scheduler,
    event::{BlockHash, CacheChange},
};
use proto::v1::{self, observe_event::Event};

use crate::process::Output;

const INTERVAL: Duration = Duration::from_millis(50);

pub struct Observers {
    record: v1::NodeRecord,
    streams: Vec<Observer>,
    told: v1::NodeLoad,
    told_at: Option<Instant>,
    changed: bool,
    is_draining: bool,
}

struct Observer {
    connection: u64,
    stream: StreamId,
    next: u64,
}

impl Observers {
    pub fn new(record: &NodeRecord) -> Self {
        Self {
            record: record.into(),
            streams: Vec::new(),
            told: v1::NodeLoad::default(),
            told_at: None,
            changed: false,
            is_draining: false,
        }
    }

    pub fn mark_changed(&mut self) {
        self.changed = true;
    }

    pub fn due(&self) -> Option<Instant> {
        self.told_at.filter(|_| self.changed).map(|told_at| told_at + INTERVAL)
    }

    pub fn add(
        &mut self,
        now: Instant,
        connection: u64,
        stream: StreamId,
        scheduler: &mut Scheduler,
        outputs: &mut Vec<Output>,
    ) {
        self.publish(now, scheduler, outputs);
        let snapshot = v1::NodeSnapshot {
            record: Some(self.record.clone()),
            load: Some(self.told),
            cached_blocks: wire(&scheduler.cached_hashes()),
        };
        let mut observer = Observer { connection, stream, next: 0 };
        observer.tell(Event::Snapshot(snapshot), outputs);
        self.streams.push(observer);
    }

    pub fn remove(&mut self, stream: StreamId) {
        self.streams.retain(|observer| observer.stream != stream);
    }

    /// The router's connection ended.
    pub fn cut(&mut self, connection: u64) {
        self.streams.retain(|observer| observer.connection != connection);
    }

    pub fn drain(&mut self, now: Instant, scheduler: &mut Scheduler, outputs: &mut Vec<Output>) {
        self.is_draining = true;
        self.publish(now, scheduler, outputs);
    }

    pub fn publish_if_due(
        &mut self,
        now: Instant,
        scheduler: &mut Scheduler,
        outputs: &mut Vec<Output>,
    ) {
        if self.changed && self.told_at.is_none_or(|told_at| now >= told_at + INTERVAL) {
            self.publish(now, scheduler, outputs);
        }
    }

    fn publish(&mut self, now: Instant, scheduler: &mut Scheduler, outputs: &mut Vec<Output>) {
        self.changed = false;
        self.told_at = Some(now);
        let load = scheduler.load();
        let load = v1::NodeLoad {
            running: load.running,
            waiting: load.waiting,
            pending_prompt_tokens: load.pending_prompt_tokens,
            blocks_free: load.blocks_free,
            blocks_cached: load.blocks_cached,
            blocks_held: load.blocks_held,
            blocks_reserved: load.blocks_reserved,
            draining: self.is_draining,
        };
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
        let delta =
            v1::NodeDelta { load: Some(load), cached: wire(&cached), evicted: wire(&evicted) };
        for observer in &mut self.streams {
            observer.tell(Event::Delta(delta.clone()), outputs);
        }
    }
}

impl Observer {
    fn tell(&mut self, event: Event, outputs: &mut Vec<Output>) {
        let event = v1::ObserveEvent { sequence: self.next, event: Some(event) };
        self.next += 1;
        let (connection, stream) = (self.connection, self.stream);
        outputs.push(Output::Observed { connection, stream, event });
    }
}

fn wire(hashes: &[BlockHash]) -> Vec<Bytes> {
    hashes.iter().map(|hash| Bytes::copy_from_slice(&hash.0.to_be_bytes())).collect()
}
