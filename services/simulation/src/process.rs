//! One node process: the shipped node core and transfer protocol, and the queues between them.
//!
//! [`Process::handle`] takes one input and returns the outputs that follow. The
//! [event loop](crate::event_loop) delivers them.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use cluster::{NodeId, NodeRecord, Role};
use engine::{
    Scheduler, StepLoop, Turn,
    event::Load,
    executor::ExecutorError,
    tiers::{Tier, TierEvent},
};
use kernels::{BlockId, Dtype, KvLayout, WeightFormat};
use kv_transfer::{
    EventSink, TransferLimits,
    api::{self as transfer, Command, Epoch, Peer, TransferId},
    control::ControlMessage,
    driver::{Input as TransferInput, TransferDriver},
    protocol::{Core, DataEvent, Local},
    transport::TransportEvent,
};
use node::{
    attempt::{AttemptLimits, NewAttempt},
    constraint::GRAMMAR_VERSION,
    identity,
    node_core::{
        Call, CallId, CloseReason, Metric, NodeCore, ObserverId, Output as CoreOutput, Reply,
        STALL_AFTER,
    },
    wire,
};
use proto::v1;
use router::request_core::Side;
use simulation_base::Random;

use crate::{
    coverage::Coverage,
    device::Device,
    grammars,
    nodes::{Connection, Stream},
    router::{CallKey, NodeCall, NodeMessage},
    scenario::{BLOCK_BYTES, ModelPlan, NodePlan, VOCABULARY},
    tiers::{Disk, TierCopies, TierPlan},
    transport::{SimLinks, SimTransport},
    weights::{NodeWeights, WeightsInput, WeightsOutput},
};

/// A layout with the bytes of the `sim` executor's KV: 8 per token.
const KV_LAYOUT: KvLayout =
    KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 1, dtype: Dtype::F32 };

/// Time until the transfer thread offers an event again after a full queue.
pub const OFFER_AGAIN: Duration = Duration::from_millis(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessState {
    Running,
    Paused,
    Dead,
}

/// An input of a process.
#[derive(Clone, Debug)]
pub enum Input {
    // For the engine thread.
    Call {
        connection: Connection,
        key: CallKey,
        call: Box<NodeCall>,
    },
    /// The router dropped a call.
    Cancel(CallKey),
    /// A router's connection ended.
    ConnectionEnded(Connection),
    Observe(Stream),
    StopObserving(Stream),
    Transfer(transfer::Event),
    Drain {
        grace: Duration,
    },
    /// For the node's part in updates of the weights.
    Weights(WeightsInput),
    /// The drain timeout is over.
    EndAll,
    /// A rank process died, so the executor fails.
    RankLost,
    // For the transfer thread.
    Command(Command),
    ControlMessage(Peer, Box<ControlMessage>),
    Data(DataEvent),
    PeerFailed {
        peer: Epoch,
        reason: &'static str,
    },
    /// A data connection with the peer ended.
    Closed {
        peer: Epoch,
        connection: u64,
        reason: &'static str,
    },
    /// A deadline has passed.
    Deadline,
}

/// An output of a process, in order.
#[derive(Debug)]
pub enum Output {
    Message {
        connection: Connection,
        key: CallKey,
        message: NodeMessage,
    },
    /// `None`: the node ended the stream.
    Observed {
        stream: Stream,
        event: Option<v1::ObserveEvent>,
    },
    /// From the engine thread to the transfer thread.
    Command(Command),
    /// The transfer core has received every block of this transfer.
    Arrived(TransferId),
    /// From the transfer thread to the engine thread.
    TransferEvent(transfer::Event),
    ControlMessage {
        to: Epoch,
        message: ControlMessage,
    },
    OpenData {
        to: Epoch,
    },
    /// Both data connections with the peer are closed.
    CloseData {
        peer: Epoch,
    },
    SendChunk {
        transfer: TransferId,
        chunk: u32,
    },
    Release {
        transfer: TransferId,
    },
    /// The scheduler owns the blocks of a transfer again.
    HoldEnded {
        transfer: TransferId,
        hold: TransferHold,
    },
    /// From the node's part in updates of the weights.
    Weights(WeightsOutput),
    /// The draining node has no attempt left.
    Drained,
    /// The executor failed, so the process exits.
    EngineFailed,
}

/// Blocks of the scheduler that a transfer holds.
#[derive(Clone, Debug)]
pub struct TransferHold {
    pub peer: Epoch,
    pub since: Instant,
    /// Blocks that are reserved for an incoming transfer.
    reserved: Vec<BlockId>,
}

pub struct Process {
    pub name: String,
    pub host: usize,
    pub epoch: Epoch,
    pub record: NodeRecord,
    pub state: ProcessState,
    /// Inputs that arrived while the process was paused.
    pub backlog: Vec<Input>,
    /// Start and end of each pause.
    pub pauses: Vec<(Instant, Option<Instant>)>,
    pub transfers: TransferDriver<SimTransport, SimLinks>,
    pub coverage: Coverage,
    pub weights: NodeWeights,
    core: NodeCore<Device>,
    tiers: Option<TierCopies>,
    limits: AttemptLimits,
    calls: BTreeMap<u64, OpenCall>,
    calls_begun: u64,
    observers: BTreeMap<ObserverId, Stream>,
    observers_begun: u64,
    /// Peers of attempts, by transfer.
    peers: BTreeMap<TransferId, Epoch>,
    holds: BTreeMap<TransferId, TransferHold>,
    /// Commands for the transfer thread: the number in transit or arrived, and the arrived commands.
    commands: usize,
    arrived_commands: VecDeque<Command>,
    transfer_limits: TransferLimits,
    events: EventQueue,
    /// Whether a command waits in the core because the transfer queue is full.
    is_command_waiting: bool,
    is_draining: bool,
    is_checked: bool,
    now: Instant,
}

struct OpenCall {
    connection: Connection,
    key: CallKey,
    call: CallId,
}

impl Process {
    pub fn start(
        host: usize,
        plan: &NodePlan,
        model: &ModelPlan,
        is_checked: bool,
        epoch: Epoch,
        now: Instant,
    ) -> Self {
        let name = format!("{}-{host}", plan.role);
        let tokens_max = plan.longest_sequence();
        let identity = identity::model_identity(model.fingerprint, WeightFormat::F32, KV_LAYOUT);
        assert_eq!(KV_LAYOUT.block_bytes(), BLOCK_BYTES);
        let record = NodeRecord {
            node_id: NodeId::parse(&name).expect("a plain name"),
            epoch,
            role: plan.role,
            control_endpoint: control_endpoint(host),
            model: model.name.to_string(),
            identity: identity.clone(),
            prompt_tokens_max: identity::prompt_tokens_max(tokens_max),
            sequence_tokens_max: tokens_max,
            block_count: plan.scheduler.limits.blocks,
            vocabulary_size: VOCABULARY,
            grammar_version: GRAMMAR_VERSION,
            cpu_fallback: None,
            peer_tag: vec![1; 32],
        };
        let seeds = identity::cache_seeds(&identity);
        let scheduler = Scheduler::new(plan.scheduler, seeds).expect("the plan is consistent");
        assert_eq!(scheduler.sequence_tokens_max(), tokens_max as usize);
        let random = Random::new(epoch.0 as u64);
        let device = Device::new(plan.scheduler.limits, plan.step_cost, is_checked, random, now);
        let arena = device.arena();
        let tiers = plan.tiers.zip(arena.clone());
        let tiers = tiers.map(|(tiers, arena)| TierCopies::new(tiers, arena));
        let scheduler = match plan.tiers {
            Some(tiers) => scheduler.with_tiers(tiers.config, now),
            None => scheduler,
        };
        let local = Local {
            epoch,
            identity,
            control_endpoint: control_endpoint(host),
            data_endpoint: format!("tcp://host-{host}:2"),
            transports: vec!["tcp".to_owned()],
            integrity: vec!["xxh3+digest1".to_owned()],
            block_bytes: BLOCK_BYTES,
            limits: plan.transfers,
        };
        let limits = identity::attempt_limits(&record);
        let mut core = NodeCore::new(StepLoop::new(scheduler, device), &record, STALL_AFTER);
        if let Some(TierPlan { host_slots: slots, .. }) = plan.tiers {
            core.handle_tier_event(TierEvent::Grown { tier: Tier::Host, slots }, now);
        }
        Self {
            core,
            tiers,
            transfers: TransferDriver::new(
                Core::new(now, local),
                SimTransport::new(name.clone(), arena),
                SimLinks::default(),
            ),
            name,
            host,
            epoch,
            record,
            state: ProcessState::Running,
            backlog: Vec::new(),
            pauses: Vec::new(),
            coverage: Coverage::default(),
            weights: NodeWeights::new(epoch),
            limits,
            calls: BTreeMap::new(),
            calls_begun: 0,
            observers: BTreeMap::new(),
            observers_begun: 0,
            peers: BTreeMap::new(),
            holds: BTreeMap::new(),
            commands: 0,
            arrived_commands: VecDeque::new(),
            transfer_limits: plan.transfers,
            events: EventQueue::new(plan.transfer_events_max),
            is_command_waiting: false,
            is_draining: false,
            is_checked,
            now,
        }
    }

    /// Takes the blocks on the disk of the KV tier. The process has ended.
    pub fn take_disk(&mut self) -> Disk {
        self.tiers.as_mut().map(TierCopies::take_disk).unwrap_or_default()
    }

    /// Finds the blocks that an earlier process has left on the disk of the KV tier.
    pub fn recover_disk(&mut self, disk: Disk) {
        let Some(tiers) = &mut self.tiers else { return };
        let blocks: Vec<_> =
            disk.iter().map(|(&slot, (contents, _))| (slot, contents.key)).collect();
        self.coverage.add("blocks recovered", blocks.len() as u64);
        tiers.put_disk(disk);
        let tier = Tier::Disk;
        for (blocks, is_complete) in [(blocks, false), (Vec::new(), true)] {
            let recovered = TierEvent::Recovered { tier, blocks, is_complete };
            self.core.handle_tier_event(recovered, self.now);
        }
    }

    pub fn source(&self) -> Peer {
        Peer { node_id: self.name.clone(), epoch: self.epoch }
    }

    /// Returns the time of all steps of the device.
    pub fn device_busy(&self) -> Duration {
        self.core.executor().busy()
    }

    pub fn load(&self) -> Load {
        self.core.scheduler().load()
    }

    pub fn is_draining(&self) -> bool {
        self.is_draining
    }

    /// Returns when [`Input::Deadline`] is due if no other input comes first.
    pub fn next_deadline(&self) -> Option<Instant> {
        let device = self.core.executor().next_due();
        let transfers = self.transfers.next_deadline(self.now);
        let offer = (!self.transfers.takes_commands()).then(|| self.now + OFFER_AGAIN);
        let copies = self.tiers.as_ref().and_then(TierCopies::next_due);
        let weights = self.weights.next_deadline();
        let deadlines = [self.core.next_deadline(), device, transfers, offer, copies, weights];
        deadlines.into_iter().flatten().min()
    }

    pub fn handle(&mut self, now: Instant, input: Input, outputs: &mut Vec<Output>) {
        self.now = now;
        self.core.executor_mut().set_now(now);
        self.finish_copies();
        match input {
            Input::Call { connection, key, call } => self.call(connection, key, *call, outputs),
            Input::Cancel(key) => {
                let call = self.calls.values().find(|open| open.key == key);
                if let Some(call) = call.map(|open| open.call) {
                    self.core.handle_cancel(call);
                }
            }
            Input::ConnectionEnded(connection) => {
                for open in self.calls.values().filter(|open| open.connection == connection) {
                    self.core.handle_cancel(open.call);
                }
                let ended = self.observers.extract_if(.., |_, at| at.connection == connection);
                for (observer, _) in ended {
                    self.core.handle_observe_ended(observer);
                }
            }
            Input::Observe(stream) => {
                self.observers_begun += 1;
                let observer = ObserverId(self.observers_begun);
                self.observers.insert(observer, stream);
                self.core.handle_observe(observer, now);
            }
            Input::StopObserving(stream) => {
                let ended = self.observers.extract_if(.., |_, at| *at == stream);
                for (observer, _) in ended {
                    self.core.handle_observe_ended(observer);
                }
            }
            Input::Transfer(event) => {
                self.events.in_flight -= 1;
                self.transfer_event(event, outputs);
            }
            Input::Drain { grace } => {
                self.is_draining = true;
                self.core.handle_draining(true, Some(grace), now);
            }
            Input::Weights(input) => {
                self.weights.handle(now, input, self.is_draining, &mut self.core, outputs);
            }
            Input::EndAll => self.core.handle_close(&CloseReason::DrainTimeout),
            Input::RankLost => self.core.executor_mut().lose_rank(),
            Input::Command(command) => {
                self.arrived_commands.push_back(command);
                return self.run_transfers(None, outputs);
            }
            Input::ControlMessage(from, message) => {
                return self.run_transfers(Some(TransferInput::Control { from, message }), outputs);
            }
            Input::Data(event) => {
                let input = TransferInput::Transport(TransportEvent::Data(event));
                return self.run_transfers(Some(input), outputs);
            }
            Input::PeerFailed { peer, reason } => {
                let input = TransferInput::PeerFailed { peer, reason: reason.to_owned() };
                return self.run_transfers(Some(input), outputs);
            }
            Input::Closed { peer, connection, reason } => {
                let reason = reason.to_owned();
                let event = TransportEvent::Closed { peer, connection, reason };
                return self.run_transfers(Some(TransferInput::Transport(event)), outputs);
            }
            Input::Deadline => {
                self.weights.on_deadline(now, &mut self.core, outputs);
                self.transfers.handle_deadline(now);
                self.run_transfers(None, outputs);
            }
        }
        self.run_engine(outputs);
    }

    /// Checks the call as the gRPC service does, then gives it to the core.
    fn call(
        &mut self,
        connection: Connection,
        key: CallKey,
        call: NodeCall,
        outputs: &mut Vec<Output>,
    ) {
        let traceparent = String::new();
        let (role, attempt) = match call {
            NodeCall::Prefill(request) => {
                let attempt = NewAttempt::send(request, traceparent, &self.limits, self.now);
                (Role::Prefill, attempt)
            }
            NodeCall::Decode(request) => {
                let attempt =
                    NewAttempt::receive_or_compute(request, traceparent, &self.limits, self.now);
                (Role::Decode, attempt)
            }
        };
        assert_eq!(self.record.role, role, "the router called a node of another role");
        let constrained = attempt.and_then(|mut attempt| {
            if let Some(grammar) = attempt.grammar.take() {
                grammars::constrain(&mut attempt.sequence, &grammar)?;
            }
            Ok(attempt)
        });
        let attempt = match constrained {
            Ok(attempt) => attempt,
            Err(refusal) => {
                let message = NodeMessage::Rejected(refusal.into());
                return outputs.push(Output::Message { connection, key, message });
            }
        };
        self.calls_begun += 1;
        let number = self.calls_begun;
        let call = Call {
            number,
            weight_version: attempt.weight_version,
            prompt_hash: attempt.prompt_hash(),
            peer: attempt.peer,
            sequence: attempt.sequence,
        };
        self.transfers.transport.expect_prompt(
            key.transfer,
            &call.sequence.tokens,
            call.weight_version,
        );
        if let Some(peer) = &call.peer {
            self.peers.insert(key.transfer, peer.epoch);
        }
        self.calls.insert(number, OpenCall { connection, key, call: call.id() });
        self.core.handle_call(call, self.now);
    }

    fn transfer_event(&mut self, event: transfer::Event, outputs: &mut Vec<Output>) {
        let ended = match &event {
            transfer::Event::Ready { transfer, .. } => {
                self.begin_hold(*transfer, Vec::new());
                None
            }
            transfer::Event::Arrived { transfer, .. }
            | transfer::Event::ReceiveFailed { transfer, .. }
            | transfer::Event::Delivered { transfer, .. }
            | transfer::Event::SendFailed { transfer, .. } => Some(*transfer),
        };
        self.core.handle_transfer_event(event, self.now);
        if let Some(transfer) = ended
            && let Some(hold) = self.holds.remove(&transfer)
        {
            outputs.push(Output::HoldEnded { transfer, hold });
        }
    }

    fn begin_hold(&mut self, transfer: TransferId, reserved: Vec<BlockId>) {
        if let Some(peer) = self.peers.get(&transfer) {
            let hold = TransferHold { peer: *peer, since: self.now, reserved };
            self.holds.insert(transfer, hold);
        }
    }

    /// Runs the transfer thread: the input, then queued commands while it takes commands.
    fn run_transfers(&mut self, input: Option<TransferInput>, outputs: &mut Vec<Output>) {
        if let Some(input) = input {
            self.transfers.handle(self.now, input);
        }
        self.follow_transfers(outputs);
        while self.transfers.takes_commands()
            && let Some(command) = self.arrived_commands.pop_front()
        {
            self.commands -= 1;
            self.transfers.transport.on_command(&command);
            self.transfers.handle(self.now, TransferInput::Command(command));
            self.follow_transfers(outputs);
        }
    }

    fn follow_transfers(&mut self, outputs: &mut Vec<Output>) {
        outputs.append(&mut self.transfers.links.outputs);
        outputs.append(&mut self.transfers.transport.outputs);
        for event in self.transfers.events() {
            if let transfer::Event::Arrived { transfer, .. } = event {
                outputs.push(Output::Arrived(*transfer));
            }
        }
        self.transfers.offer_events(&mut self.events);
        for event in self.events.accepted.drain(..) {
            self.transfers.transport.on_event(&event);
            outputs.push(Output::TransferEvent(event));
        }
    }

    /// Aborts every transfer, as a process does before it exits.
    pub fn stop(&mut self, now: Instant, outputs: &mut Vec<Output>) {
        self.transfers.abort_all(now, "the node stops");
        self.follow_transfers(outputs);
    }

    /// Gives the core the results of the copies that are due.
    fn finish_copies(&mut self) {
        let Some(tiers) = &mut self.tiers else { return };
        while let Some(event) = tiers.take_due(self.now) {
            match &event {
                TierEvent::Loaded { .. } => self.coverage.count("loads from tiers"),
                TierEvent::Saved { .. } => self.coverage.count("saves to tiers"),
                _ => {}
            }
            self.core.handle_tier_event(event, self.now);
        }
    }

    /// Runs the core until it waits for an input, a step or a deadline.
    fn run_engine(&mut self, outputs: &mut Vec<Output>) {
        loop {
            self.carry_out(outputs);
            match self.core.step(Duration::ZERO) {
                Ok(Turn::Idle) => break,
                Ok(Turn::Pending) if !self.core.has_actions() => break,
                Ok(Turn::Pending | Turn::Stepped) => self.check(),
                Err(error) => return self.engine_failed(&error, outputs),
            }
        }
        self.carry_out(outputs);
        self.core.handle_deadline(self.now);
        self.carry_out(outputs);
        self.check();
        self.check_reserved();
        if self.is_checked && self.load().blocks_kept > 0 {
            self.coverage.count("blocks kept");
        }
        if self.is_draining && self.core.is_empty() {
            outputs.push(Output::Drained);
        }
    }

    fn engine_failed(&mut self, error: &ExecutorError, outputs: &mut Vec<Output>) {
        self.core.handle_close(&CloseReason::EngineFailed { reason: error.to_string() });
        self.carry_out(outputs);
        outputs.push(Output::EngineFailed);
    }

    fn carry_out(&mut self, outputs: &mut Vec<Output>) {
        while let Some(output) = self.core.poll_output() {
            match output {
                CoreOutput::Reply { call, reply } => self.reply(call, reply, outputs),
                CoreOutput::Forgotten { call } => {
                    self.calls.remove(&call.number);
                }
                CoreOutput::Transfer { call, command } => {
                    self.command_transfers(call, command, outputs);
                }
                CoreOutput::Observe { observer, event } => {
                    if let Some(&stream) = self.observers.get(&observer) {
                        outputs.push(Output::Observed { stream, event: Some(event) });
                    }
                }
                CoreOutput::ObserveStalled { observer } => {
                    if let Some(stream) = self.observers.remove(&observer) {
                        outputs.push(Output::Observed { stream, event: None });
                    }
                }
                CoreOutput::Metric(Metric::Preempted(count)) => {
                    self.coverage.add("preemptions", count);
                }
                CoreOutput::Stalled { .. } => self.coverage.count("stalls"),
                CoreOutput::Save(job) => {
                    if let Some(tiers) = &mut self.tiers {
                        tiers.save(self.now, job);
                    }
                }
                CoreOutput::CancelSaves { last } => {
                    self.coverage.count("saves cancelled for an admission");
                    if let Some(tiers) = &mut self.tiers {
                        tiers.cancel_saves(self.now, last);
                    }
                }
                CoreOutput::Load(job) => {
                    if let Some(tiers) = &mut self.tiers {
                        tiers.load(self.now, job);
                    }
                }
                CoreOutput::WeightsReleased => self.weights.released(self.now),
                CoreOutput::WeightsChanged { .. } => {
                    self.weights.changed(self.now, &mut self.core, outputs);
                }
                CoreOutput::Metric(_)
                | CoreOutput::Stage { .. }
                | CoreOutput::PauseChanged { .. }
                | CoreOutput::Recovered => {}
            }
        }
    }

    /// Sends a reply as the gRPC service does.
    fn reply(&mut self, call: CallId, reply: Reply, outputs: &mut Vec<Output>) {
        let Some(open) = self.calls.get(&call.number) else { return };
        let (connection, key) = (open.connection, open.key);
        let mut send = |message| outputs.push(Output::Message { connection, key, message });
        if let Reply::Rejected(refusal) = reply {
            return send(NodeMessage::Rejected(refusal.into()));
        }
        if reply == Reply::Accepted {
            return send(NodeMessage::Accepted);
        }
        let is_last = reply.is_last();
        let message = match key.side {
            Side::Prefill => wire::prefill_event(reply).map(NodeMessage::Prefill),
            Side::Decode => wire::decode_event(reply).map(NodeMessage::Decode),
        };
        message.into_iter().for_each(&mut send);
        if is_last {
            send(NodeMessage::End);
        }
    }

    fn command_transfers(
        &mut self,
        call: Option<CallId>,
        command: Command,
        outputs: &mut Vec<Output>,
    ) {
        self.is_command_waiting = false;
        if self.commands >= self.transfer_limits.queued_max(&command) {
            self.coverage.count("transfer queue full");
            let reason = "the transfer queue is full".to_owned();
            self.is_command_waiting =
                self.core.handle_transfer_queue_full(call, command, reason, self.now);
            return;
        }
        if let Command::Receive { transfer, blocks, .. } = &command {
            self.begin_hold(*transfer, blocks.clone());
        }
        self.commands += 1;
        outputs.push(Output::Command(command));
    }

    /// Checks the scheduler after every step.
    fn check(&self) {
        if !self.is_checked {
            return;
        }
        self.core.scheduler().check();
        let load = self.load();
        let total = load.blocks_free + load.blocks_cached + load.blocks_held + load.blocks_reserved;
        assert_eq!(total, self.record.block_count, "{}: the counts add up", self.name);
    }

    /// Checks that every reserved block belongs to a transfer or to a load from a tier.
    fn check_reserved(&self) {
        if self.is_checked && !self.is_command_waiting {
            let reserved: usize = self.holds.values().map(|hold| hold.reserved.len()).sum();
            // A load also reserves the blocks behind its own: its sequence will compute them.
            let is_loading = self.tiers.as_ref().is_some_and(TierCopies::is_loading);
            let found = self.load().blocks_reserved as usize;
            assert!(found == reserved || is_loading && found > reserved, "{}: {found}", self.name);
        }
    }

    /// Checks that no resource of any request or transfer is left.
    pub fn check_idle(&self) {
        let (name, load) = (&self.name, self.load());
        assert!(self.core.scheduler().is_idle(), "{name}: the scheduler is not idle, {load:?}");
        assert_eq!((load.blocks_held, load.blocks_reserved), (0, 0), "{name}: {load:?}");
        assert!(self.core.is_empty(), "{name}: attempts are in flight");
        assert!(self.calls.is_empty(), "{name}: calls are open");
        assert!(self.holds.is_empty(), "{name}: {:?}", self.holds);
        assert_eq!(self.commands, 0, "{name}: commands are queued");
        assert_eq!(self.transfers.core.active_count(), 0, "{name}: transfers are active");
        let (transfers, early, _) = self.transfers.core.table_sizes();
        assert_eq!((transfers, early), (0, 0), "{name}: transfers are known");
        self.transfers.transport.check_idle();
        self.weights.check_idle(name);
    }
}

pub fn control_endpoint(host: usize) -> String {
    format!("tcp://127.0.0.1:{}", 10_000 + host)
}

/// The queue of events from the transfer thread to the engine thread.
struct EventQueue {
    accepted: Vec<transfer::Event>,
    in_flight: usize,
    max: usize,
}

impl EventQueue {
    fn new(max: usize) -> Self {
        Self { accepted: Vec::new(), in_flight: 0, max }
    }
}

impl EventSink for EventQueue {
    fn offer(&mut self, event: transfer::Event) -> Result<(), transfer::Event> {
        if self.in_flight == self.max {
            return Err(event);
        }
        self.in_flight += 1;
        self.accepted.push(event);
        Ok(())
    }
}
