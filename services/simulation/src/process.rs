//! One node process: its engine thread, the driver thread of its transfers, and who it is.
//!
//! Steps in, consequences out. The threads are those of `services/node` and of `services/kv-transfer`'s
//! shell, without their queues and waits; the [event loop](crate::event_loop) carries words between them.

use std::time::{Duration, Instant};

use cluster::{ModelIdentity, NodeId, NodeRecord, StreamId};
use engine::{CacheSeeds, event::Load, executor::sim::fingerprints};
use kv_transfer::{
    api::{self as transfer, Command, Epoch, Identity, TransferId},
    control::{self, ControlMessage, Source},
    protocol::{DataEvent, Local},
};
use proto::v1;

use crate::{
    driver_thread::DriverThread,
    engine_thread::{EngineThread, TransferHold},
    journey::{Begun, Said},
    scenario::{BLOCK_BYTES, NodePlan, VOCABULARY},
};

pub const SEEDS: CacheSeeds = CacheSeeds { model_fingerprint: 0xfeed, weight_version: 1 };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessState {
    Running,
    Paused,
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
    ControlMessage(Source, Box<ControlMessage>),
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
pub enum Output {
    Say(TransferId, Said),
    Observed {
        connection: u64,
        stream: StreamId,
        event: v1::ObserveEvent,
    },
    /// From the engine thread to the driver thread, and back.
    ToDriver(Command),
    ToEngine(transfer::Event),
    ControlMessage {
        to: Epoch,
        message: ControlMessage,
    },
    OpenData {
        to: Epoch,
    },
    /// Both data connections with the peer end.
    CloseData {
        peer: Epoch,
    },
    SendChunk {
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
        hold: TransferHold,
    },
    /// Drained: nothing is in work any more.
    Drained,
}

pub struct Process {
    pub name: String,
    pub host: usize,
    pub epoch: Epoch,
    pub record: NodeRecord,
    pub state: ProcessState,
    /// What came while the process was paused.
    pub backlog: Vec<Step>,
    /// When it was paused, and until when.
    pub pauses: Vec<(Instant, Option<Instant>)>,
    pub engine: EngineThread,
    pub driver: DriverThread,
    now: Instant,
}

impl Process {
    pub fn start(host: usize, plan: &NodePlan, epoch: Epoch, now: Instant) -> Self {
        let name = format!("{}-{host}", plan.role);
        let tokens_max = plan.longest_sequence();
        let record = NodeRecord {
            node_id: NodeId::parse(&name).expect("a plain name"),
            epoch,
            role: plan.role,
            notice_endpoint: control_endpoint(host),
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
            control_endpoint: control_endpoint(host),
            data_endpoint: format!("tcp://host-{host}:2"),
            transports: vec!["tcp".to_owned()],
            integrity: vec!["xxh3+digest1".to_owned()],
            block_bytes: BLOCK_BYTES,
            limits: plan.transfers,
        };
        let engine = EngineThread::start(plan, &record, now);
        let driver = DriverThread::start(local, engine.arena());
        Self {
            name,
            host,
            epoch,
            record,
            state: ProcessState::Running,
            backlog: Vec::new(),
            pauses: Vec::new(),
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

    pub fn handle(&mut self, now: Instant, step: Step, outputs: &mut Vec<Output>) {
        self.now = now;
        let (engine, driver) = (&mut self.engine, &mut self.driver);
        engine.set_now(now);
        match step {
            Step::Call(call) => {
                let sequence = &call.begun.sequence;
                driver.expect_prompt(TransferId(sequence.id.0), fingerprints(&sequence.tokens));
                engine.on_call(*call, self.epoch, outputs);
            }
            Step::Cancel(transfer) => engine.cancel(transfer),
            Step::CallsCut { connection } => engine.calls_cut(connection),
            Step::Observe { connection, stream } => engine.observe(connection, stream, outputs),
            Step::StopObserving(stream) => engine.stop_observing(stream),
            Step::Transfer(event) => engine.on_transfer_event(event),
            Step::Drain => engine.drain(outputs),
            Step::EndAll => engine.end_all(),
            Step::Command(command) => {
                engine.command_taken();
                return driver.on_command(now, command, outputs);
            }
            Step::ControlMessage(from, message) => {
                return driver.on_control(now, &from, *message, outputs);
            }
            Step::Data(event) => return driver.on_data(now, event, outputs),
            Step::PeerFailed { peer, reason } => {
                return driver.on_peer_failed(now, peer, reason, outputs);
            }
            Step::Closed { peer, closings, reason } => {
                return driver.on_closed(now, peer, closings, reason, outputs);
            }
            Step::Wake => driver.wake(now, outputs),
        }
        engine.run(outputs);
    }

    /// Nothing may be left of any request or transfer.
    pub fn check_idle(&self) {
        self.engine.check_idle();
        self.driver.check_idle(&self.name);
    }
}

pub fn control_endpoint(host: usize) -> String {
    format!("tcp://host-{host}:1")
}

fn identity() -> Identity {
    Identity {
        model_fingerprint: SEEDS.model_fingerprint,
        weight_version: SEEDS.weight_version,
        kv_layout: "simulated".to_owned(),
        block_size: kernels::BLOCK_TOKENS as u32,
        dtype: "u64".to_owned(),
        tp: 1,
        protocol_min: control::PROTOCOL_MIN,
        protocol_max: control::PROTOCOL_MAX,
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
