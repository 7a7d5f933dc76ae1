//! One node process: its engine thread, the driver thread of its transfers, and who it is.
//!
//! Steps in, consequences out. The threads are those of `services/node` and of `services/kv-transfer`'s
//! shell, without their queues and waits; the [`world`](crate::world) carries words between them.

use std::time::{Duration, Instant};

use cluster::{ModelIdentity, NodeId, NodeRecord, StreamId};
use engine::{CacheSeeds, event::Load, executor::sim::fingerprints};
use kv_transfer::{
    api::{self as transfer, Command, Epoch, Identity, TransferId},
    notice::{self, Notice, Source},
    protocol::{DataEvent, Local},
};
use proto::v1;

use crate::{
    driver_thread::DriverThread,
    engine_thread::{EngineThread, Tenure},
    journey::{Begun, Said},
    scenario::{BLOCK_BYTES, NodePlan, VOCABULARY},
};

pub const SEEDS: CacheSeeds = CacheSeeds { model_fingerprint: 0xfeed, weight_version: 1 };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    Running,
    Frozen,
    Dead,
}

/// A call of the router on its way to a node.
#[derive(Clone, Debug)]
pub struct Call {
    /// The router's connection that carries it.
    pub connection: u64,
    /// The process that the router means.
    pub epoch: Epoch,
    pub remaining: Duration,
    pub begun: Begun,
}

/// Something that happens at a process.
#[derive(Clone, Debug)]
pub enum Step {
    // At the engine thread.
    Call(Box<Call>),
    /// The router dropped a call.
    Cancel(TransferId),
    /// The router's connection ended.
    CallsCut {
        connection: u64,
    },
    Observe {
        connection: u64,
        stream: StreamId,
    },
    StopObserving(StreamId),
    Transfer(transfer::Event),
    Drain,
    /// The time to drain is over.
    EndAll,
    // At the driver thread.
    Command(Command),
    Notice(Source, Box<Notice>),
    Data(DataEvent),
    PeerFailed {
        peer: Epoch,
        reason: &'static str,
    },
    /// A data connection with the peer ended, when this process had closed so many with it.
    Closed {
        peer: Epoch,
        closings: u64,
        reason: &'static str,
    },
    /// Some deadline of either has come.
    Wake,
}

/// What follows, in order.
#[derive(Debug)]
pub enum Out {
    Say(TransferId, Said),
    Observed {
        connection: u64,
        stream: StreamId,
        event: v1::ObserveEvent,
    },
    /// From the engine thread to the driver thread, and back.
    ToDriver(Command),
    ToEngine(transfer::Event),
    Notice {
        to: Epoch,
        notice: Notice,
    },
    OpenData {
        to: Epoch,
    },
    /// Both data connections with the peer end.
    CloseData {
        peer: Epoch,
    },
    Depart {
        transfer: TransferId,
        chunk: u32,
    },
    Release {
        is_receive: bool,
        transfer: TransferId,
    },
    /// The scheduler has its blocks back.
    Returned {
        transfer: TransferId,
        tenure: Tenure,
    },
    /// Drained: nothing is in work any more.
    Drained,
}

pub struct Process {
    pub name: String,
    pub place: usize,
    pub epoch: Epoch,
    pub record: NodeRecord,
    pub life: Life,
    /// What came while the process was frozen.
    pub backlog: Vec<Step>,
    /// When it was frozen, and until when.
    pub freezes: Vec<(Instant, Option<Instant>)>,
    pub engine: EngineThread,
    pub driver: DriverThread,
    now: Instant,
}

impl Process {
    pub fn start(place: usize, plan: &NodePlan, epoch: Epoch, now: Instant) -> Self {
        let name = format!("{}-{place}", plan.role);
        let tokens_max = plan.longest_sequence();
        let record = NodeRecord {
            node_id: NodeId::parse(&name).expect("a plain name"),
            epoch: epoch,
            role: plan.role,
            notice_endpoint: notice_endpoint(place),
            model: "simulated".to_owned(),
            identity: model_identity(&identity()),
            prompt_tokens_max: tokens_max - 1,
            sequence_tokens_max: tokens_max,
            block_count: plan.scheduler.limits.blocks,
            vocabulary_size: VOCABULARY,
            // No request here asks for a form.
            grammar_version: 0,
        };
        let local = Local {
            node_id: name.clone(),
            epoch,
            identity: identity(),
            notice_endpoint: notice_endpoint(place),
            data_endpoint: format!("tcp://place-{place}:2"),
            transports: vec!["tcp".to_owned()],
            integrity: vec!["xxh3+digest1".to_owned()],
            block_bytes: BLOCK_BYTES,
            limits: plan.transfers,
        };
        let engine = EngineThread::start(plan, &record, now);
        let driver = DriverThread::start(local, engine.arena());
        Self {
            name,
            place,
            epoch,
            record,
            life: Life::Running,
            backlog: Vec::new(),
            freezes: Vec::new(),
            engine,
            driver,
            now,
        }
    }

    pub fn source(&self) -> Source {
        Source { node_id: self.name.clone(), epoch: self.epoch }
    }

    pub fn load(&self) -> Load {
        self.engine.scheduler().load()
    }

    /// When to wake it if nothing happens first.
    pub fn next_wake(&self) -> Option<Instant> {
        let driver = self.driver.core.next_deadline(self.now);
        [self.engine.next_wake(), driver].into_iter().flatten().min()
    }

    pub fn happen(&mut self, now: Instant, step: Step, outs: &mut Vec<Out>) {
        self.now = now;
        let (engine, driver) = (&mut self.engine, &mut self.driver);
        engine.set_now(now);
        match step {
            Step::Call(call) => {
                let sequence = &call.begun.sequence;
                driver.expect_prompt(TransferId(sequence.id.0), fingerprints(&sequence.tokens));
                engine.on_call(*call, self.epoch, outs);
            }
            Step::Cancel(transfer) => engine.cancel(transfer),
            Step::CallsCut { connection } => engine.calls_cut(connection),
            Step::Observe { connection, stream } => engine.observe(connection, stream, outs),
            Step::StopObserving(stream) => engine.stop_observing(stream),
            Step::Transfer(event) => engine.on_transfer_event(event),
            Step::Drain => engine.drain(outs),
            Step::EndAll => engine.end_all(),
            Step::Command(command) => {
                engine.command_taken();
                return driver.on_command(now, command, outs);
            }
            Step::Notice(from, notice) => return driver.on_notice(now, &from, *notice, outs),
            Step::Data(event) => return driver.on_data(now, event, outs),
            Step::PeerFailed { peer, reason } => {
                return driver.on_peer_failed(now, peer, reason, outs);
            }
            Step::Closed { peer, closings, reason } => {
                return driver.on_closed(now, peer, closings, reason, outs);
            }
            Step::Wake => driver.wake(now, outs),
        }
        engine.run(outs);
    }

    /// Nothing may be left of any request or transfer.
    pub fn check_quiet(&self) {
        self.engine.check_quiet();
        self.driver.check_quiet(&self.name);
    }
}

pub fn notice_endpoint(place: usize) -> String {
    format!("tcp://place-{place}:1")
}

fn identity() -> Identity {
    Identity {
        model_fingerprint: SEEDS.model_fingerprint,
        weight_version: SEEDS.weight_version,
        kv_layout: "simulated".to_owned(),
        block_size: kernels::BLOCK_TOKENS as u32,
        dtype: "u64".to_owned(),
        tp: 1,
        protocol_min: notice::PROTOCOL_MIN,
        protocol_max: notice::PROTOCOL_MAX,
    }
}

fn model_identity(identity: &Identity) -> ModelIdentity {
    ModelIdentity {
        model_fingerprint: identity.model_fingerprint,
        weight_version: identity.weight_version,
        kv_layout: identity.kv_layout.clone(),
        block_size: identity.block_size,
        dtype: identity.dtype.clone(),
        tp: identity.tp,
        protocol_min: identity.protocol_min,
        protocol_max: identity.protocol_max,
    }
}
