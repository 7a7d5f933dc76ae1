//! One node process: the real step loop and the real transfer core, joined as `services/node` and
//! `services/kv-transfer`'s shell join them. Steps in, consequences out; no randomness, no clock.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use cluster::{ModelIdentity, NodeId, NodeRecord, Role, StreamId};
use engine::{
    CacheSeeds, Scheduler, StepLoop, Turn,
    event::{Action, Input, SequenceId, SequenceKind},
    executor::sim::fingerprints,
};
use kernels::BlockId;
use kv_transfer::{
    api::{self as transfer, Command, Epoch, Identity, TransferId},
    notice::{self, Notice, Source},
    protocol::{Action as CoreAction, Core, DataEvent, Local},
};
use proto::v1::{self, FailureKind};

use crate::{
    device::Device,
    journey::{Begun, Failed, Journey, Said},
    observers::Observers,
    scenario::{BLOCK_BYTES, NodePlan, VOCABULARY},
    wires::Wires,
};

pub const MODEL: &str = "simulated";
const SEEDS: CacheSeeds = CacheSeeds { model_fingerprint: 0xfeed, weight_version: 1 };
/// How soon a command is offered again to transfers that had no room.
const RETRY_AFTER: Duration = Duration::from_millis(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    Running,
    Frozen { since: Instant },
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
    // At the driver thread of the transfers.
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
    /// Some deadline has come.
    Wake,
}

/// What follows, in order.
#[derive(Debug)]
pub enum Out {
    Say(TransferId, Said),
    Observed(StreamId, v1::ObserveEvent),
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

/// Since when a transfer with whom has blocks of the scheduler.
#[derive(Clone, Debug)]
pub struct Tenure {
    pub peer: Epoch,
    pub since: Instant,
    /// Reserved for an incoming transfer.
    reserved: Vec<BlockId>,
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
    pub engine: StepLoop<Device>,
    pub core: Core,
    pub wires: Wires,
    /// Peers that may connect for data, and how often connections with each were closed here:
    /// reports of the ones before are of the past.
    admitted: BTreeSet<Epoch>,
    closings: BTreeMap<Epoch, u64>,
    pub journey: Journey,
    observers: Observers,
    /// Calls that may still be cancelled, with the connection they came by.
    calls: BTreeMap<TransferId, u64>,
    tenures: BTreeMap<TransferId, Tenure>,
    /// Known peers of attempts.
    peers: BTreeMap<TransferId, Epoch>,
    actions: Vec<Action>,
    /// Commands under way to the driver, and their most.
    commands: usize,
    commands_max: usize,
    is_full: bool,
    pub is_draining: bool,
    now: Instant,
}

impl Process {
    pub fn start(place: usize, plan: &NodePlan, epoch: Epoch, now: Instant) -> Self {
        let name = format!("{}-{place}", plan.role);
        let identity = identity();
        let device = Device::new(plan.scheduler.limits, plan.pace, now);
        let wires = Wires::new(name.clone(), device.arena());
        let scheduler = Scheduler::new(plan.scheduler, SEEDS).expect("the plan is consistent");
        let tokens_max = scheduler.sequence_tokens_max() as u32;
        let record = NodeRecord {
            node_id: NodeId::parse(&name).expect("a plain name"),
            epoch: cluster::Epoch::from_bytes(&epoch.to_bytes()).expect("not zero"),
            role: plan.role,
            notice_endpoint: notice_endpoint(place),
            model: MODEL.to_owned(),
            identity: model_identity(&identity),
            prompt_tokens_max: tokens_max - 1,
            sequence_tokens_max: tokens_max,
            block_count: plan.scheduler.limits.blocks,
            vocabulary_size: VOCABULARY,
        };
        let core = Core::new(Local {
            node_id: name.clone(),
            epoch,
            identity,
            notice_endpoint: notice_endpoint(place),
            data_endpoint: format!("tcp://place-{place}:2"),
            transports: vec!["tcp".to_owned()],
            integrity: vec!["xxh3".to_owned()],
            block_bytes: BLOCK_BYTES,
            limits: plan.transfers,
        });
        Self {
            name,
            place,
            epoch,
            life: Life::Running,
            backlog: Vec::new(),
            freezes: Vec::new(),
            engine: StepLoop::new(scheduler, device),
            core,
            wires,
            admitted: BTreeSet::new(),
            closings: BTreeMap::new(),
            journey: Journey::default(),
            observers: Observers::new(&record),
            record,
            calls: BTreeMap::new(),
            tenures: BTreeMap::new(),
            peers: BTreeMap::new(),
            actions: Vec::new(),
            commands: 0,
            commands_max: plan.transfers.commands_max,
            is_full: false,
            is_draining: false,
            now,
        }
    }

    pub fn source(&self) -> Source {
        Source { node_id: self.name.clone(), epoch: self.epoch }
    }

    pub fn load(&self) -> engine::event::Load {
        self.engine.scheduler().load()
    }

    /// When to wake it if nothing happens first.
    pub fn next_wake(&self) -> Option<Instant> {
        let retry = self.is_full.then(|| self.now + RETRY_AFTER);
        let device = self.engine.executor().next_due();
        let engine = [self.engine.next_deadline(), device, self.observers.due(), retry];
        engine.into_iter().flatten().chain(self.core.next_deadline(self.now)).min()
    }

    pub fn happen(&mut self, now: Instant, step: Step, outs: &mut Vec<Out>) {
        self.now = now;
        self.engine.executor_mut().set_now(now);
        match step {
            Step::Call(call) => self.on_call(*call, outs),
            Step::Cancel(transfer) => self.cancel(transfer),
            Step::CallsCut { connection } => {
                let cut = self.calls.iter().filter(|(_, by)| **by == connection);
                for transfer in cut.map(|(id, _)| *id).collect::<Vec<_>>() {
                    self.cancel(transfer);
                }
                self.observers.cut(connection);
            }
            Step::Observe { connection, stream } => {
                let scheduler = self.engine.scheduler_mut();
                self.observers.add(now, connection, stream, scheduler, outs);
            }
            Step::StopObserving(stream) => self.observers.remove(stream),
            Step::Transfer(event) => self.journey.on_transfer_event(event),
            Step::Drain => {
                self.is_draining = true;
                self.observers.drain(now, self.engine.scheduler_mut(), outs);
            }
            Step::EndAll => self.journey.end_all(),
            Step::Command(command) => {
                self.commands -= 1;
                self.wires.on_command(&command);
                self.core.handle_command(now, command);
                return self.run_driver(outs);
            }
            Step::Notice(from, notice) => {
                self.core.handle_notice(now, &from, *notice);
                return self.run_driver(outs);
            }
            Step::Data(event) => {
                self.core.handle_data(now, event);
                return self.run_driver(outs);
            }
            Step::PeerFailed { peer, reason } => {
                self.core.handle_peer_failed(now, peer, reason);
                return self.run_driver(outs);
            }
            Step::Closed { peer, closings, reason } => {
                if closings == self.closings(peer) {
                    let reason = reason.to_owned();
                    self.core.handle_data(now, DataEvent::Closed { peer, reason });
                }
                return self.run_driver(outs);
            }
            Step::Wake => {
                if self.core.next_deadline(now).is_some_and(|at| at <= now) {
                    self.core.on_deadline(now);
                    self.run_driver(outs);
                }
            }
        }
        self.run_engine(outs);
    }

    /// Ends what the transfers have under way, as a shutdown does.
    pub fn stop_transfers(&mut self, now: Instant, outs: &mut Vec<Out>) {
        self.core.abort_all(now, "the node stops");
        self.run_driver(outs);
    }

    /// As `services/node` checks a call before it reaches the engine.
    fn on_call(&mut self, call: Call, outs: &mut Vec<Out>) {
        let Call { connection, epoch, remaining, mut begun } = call;
        let id = TransferId(begun.sequence.id.0);
        if self.is_draining {
            let said = Said::failed(FailureKind::Draining, "this node drains");
            return outs.push(Out::Say(id, said));
        }
        if epoch != self.epoch {
            let message = format!("this process is {}", self.epoch);
            return outs.push(Out::Say(id, Said::Failed { kind: Failed::Stale, message }));
        }
        begun.sequence.deadline = self.now + remaining;
        self.wires.expect_prompt(id, fingerprints(&begun.sequence.tokens));
        if let Some(peer) = &begun.peer {
            self.peers.insert(id, peer.epoch);
        }
        self.calls.insert(id, connection);
        self.journey.begin(begun);
    }

    fn cancel(&mut self, transfer: TransferId) {
        if self.calls.remove(&transfer).is_some() {
            self.journey.cancel(SequenceId(transfer.0));
        }
    }

    // The engine thread.

    fn run_engine(&mut self, outs: &mut Vec<Out>) {
        loop {
            self.settle(outs);
            let turn = self.engine.turn(Duration::ZERO, &mut self.actions);
            let turn = turn.expect("every plan fits what the device holds");
            self.check();
            let is_done = turn != Turn::Stepped && self.actions.is_empty();
            if turn == Turn::Stepped {
                self.observers.mark_changed();
            }
            if is_done {
                break;
            }
        }
        self.check_settled();
        let now = self.now;
        self.observers.publish_if_due(now, self.engine.scheduler_mut(), outs);
        if self.is_draining && self.journey.is_empty() {
            outs.push(Out::Drained);
        }
    }

    /// Carries words between scheduler, callers and transfers until nobody has anything to say.
    fn settle(&mut self, outs: &mut Vec<Out>) {
        loop {
            self.hand_on_actions();
            if let Some(input) = self.journey.next_input() {
                self.hand_in(input, outs);
            } else if !self.command_transfers(outs) {
                break;
            }
        }
        while let Some((id, said)) = self.journey.next_said() {
            outs.push(Out::Say(id, said));
        }
    }

    fn hand_in(&mut self, input: Input, outs: &mut Vec<Out>) {
        let (mut arrived, mut returned) = (None, None);
        match &input {
            Input::Arrived(sequence) => arrived = Some(sequence.id),
            Input::TransferReady { id, .. } => self.begin_tenure(*id, Vec::new()),
            Input::KvArrived { id, .. } | Input::TransferEnded { id, .. } => returned = Some(*id),
            Input::Abort { .. } => {}
        }
        self.observers.mark_changed();
        let ended = returned.and_then(|id| self.tenures.remove(&TransferId(id.0)));
        self.engine.handle(input, &mut self.actions);
        if let (Some(id), Some(tenure)) = (returned, ended) {
            outs.push(Out::Returned { transfer: TransferId(id.0), tenure });
        }
        self.hand_on_actions();
        self.check();
        if let Some(id) = arrived {
            self.journey.taken(id, self.now);
        }
    }

    fn hand_on_actions(&mut self) {
        for action in std::mem::take(&mut self.actions) {
            if let Action::Reserve { id, blocks, .. } = &action {
                self.begin_tenure(*id, blocks.clone());
            }
            self.journey.on_action(action, self.now);
        }
    }

    fn begin_tenure(&mut self, id: SequenceId, reserved: Vec<BlockId>) {
        let id = TransferId(id.0);
        if let Some(peer) = self.peers.get(&id) {
            let tenure = Tenure { peer: *peer, since: self.now, reserved };
            self.tenures.insert(id, tenure);
        }
    }

    /// True when there is something new for the scheduler.
    fn command_transfers(&mut self, outs: &mut Vec<Out>) -> bool {
        self.is_full = false;
        while let Some(command) = self.journey.next_command() {
            let begins = match &command {
                Command::Receive { transfer, .. } | Command::Expect { transfer, .. } => {
                    Some(*transfer)
                }
                Command::Written { .. } | Command::Finish { .. } | Command::Abort { .. } => None,
            };
            // Half of the queue is kept for transfers that have begun.
            let most = if begins.is_some() { self.commands_max / 2 } else { self.commands_max };
            if self.commands < most {
                self.commands += 1;
                outs.push(Out::ToDriver(command));
                continue;
            }
            match begins {
                Some(transfer) => {
                    self.journey.transfer_refused(transfer);
                    return true;
                }
                None => {
                    self.journey.put_back(command);
                    self.is_full = true;
                    return false;
                }
            }
        }
        false
    }

    /// What must hold after every input and every step.
    fn check(&self) {
        let scheduler = self.engine.scheduler();
        scheduler.check();
        let load = scheduler.load();
        let total = load.blocks_free + load.blocks_cached + load.blocks_held + load.blocks_reserved;
        assert_eq!(total, self.record.block_count, "{}: the counts add up", self.name);
    }

    /// With all actions handed on: what is reserved is reserved by transfers that are told of.
    fn check_settled(&self) {
        let reserved: usize = self.tenures.values().map(|tenure| tenure.reserved.len()).sum();
        let load = self.load();
        assert_eq!(load.blocks_reserved as usize, reserved, "{}: reservations", self.name);
    }

    /// Nothing may be left of any request or transfer.
    pub fn check_quiet(&self) {
        let (name, load) = (&self.name, self.load());
        assert!(
            self.engine.scheduler().is_idle(),
            "{name}: the scheduler knows something, {load:?}"
        );
        assert_eq!((load.blocks_held, load.blocks_reserved), (0, 0), "{name}: {load:?}");
        assert!(self.journey.is_empty(), "{name}: attempts are still in work");
        assert!(self.tenures.is_empty(), "{name}: {:?}", self.tenures);
        assert_eq!(self.core.active_count(), 0, "{name}: transfers are active");
        let (transfers, early, _) = self.core.table_sizes();
        assert_eq!((transfers, early), (0, 0), "{name}: transfers are known");
        assert_eq!(self.commands, 0, "{name}: commands wait");
        self.wires.check_quiet();
    }

    // The driver thread.

    /// Whether the peer may connect for data.
    pub fn admits(&self, peer: Epoch) -> bool {
        self.admitted.contains(&peer)
    }

    pub fn closings(&self, peer: Epoch) -> u64 {
        self.closings.get(&peer).copied().unwrap_or(0)
    }

    fn close_data(&mut self, peer: Epoch, outs: &mut Vec<Out>) {
        *self.closings.entry(peer).or_default() += 1;
        outs.push(Out::CloseData { peer });
    }

    fn run_driver(&mut self, outs: &mut Vec<Out>) {
        while let Some(action) = self.core.poll_action() {
            match action {
                CoreAction::Connect { peer } => {
                    self.admitted.insert(peer.epoch);
                }
                CoreAction::Disconnect { peer } => {
                    self.admitted.remove(&peer);
                    self.close_data(peer, outs);
                }
                CoreAction::CloseData { peer } => self.close_data(peer, outs),
                CoreAction::SendNotice { peer, notice } => {
                    outs.push(Out::Notice { to: peer, notice });
                }
                CoreAction::OpenData { peer, .. } => outs.push(Out::OpenData { to: peer }),
                CoreAction::PostReceive { transfer, chunk, blocks, .. } => {
                    self.wires.post(transfer, chunk, blocks);
                }
                CoreAction::SendChunk { peer, transfer, chunk, blocks } => {
                    self.wires.send(peer, transfer, chunk, blocks);
                    outs.push(Out::Depart { transfer, chunk });
                }
                CoreAction::CancelReceive { transfer, .. } => {
                    self.wires.cancel_receive(transfer);
                    outs.push(Out::Release { is_receive: true, transfer });
                }
                CoreAction::CancelSend { transfer, .. } => {
                    self.wires.cancel_send(transfer);
                    outs.push(Out::Release { is_receive: false, transfer });
                }
                CoreAction::Emit(event) => {
                    self.wires.on_event(&event);
                    outs.push(Out::ToEngine(event));
                }
            }
        }
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

/// What both ends of a transfer are given: any hash of the tokens will do here.
pub fn prompt_hash(tokens: &[u32]) -> u128 {
    fingerprints(tokens).last().copied().unwrap_or_default().into()
}

/// What kind of sequence a call begins.
pub fn sequence_kind(role: Role, has_peer: bool) -> SequenceKind {
    match (role, has_peer) {
        (Role::Prefill, _) => SequenceKind::Send,
        (Role::Decode, true) => SequenceKind::Receive,
        (Role::Decode, false) => SequenceKind::Compute,
    }
}
