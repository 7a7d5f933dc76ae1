//! One node process: the shipped node core and transfer protocol, and the queues between them.
//!
//! [`Process::handle`] takes one input and returns the outputs that follow. The [event
//! loop](crate::event_loop) delivers them.

mod calls;
mod checks;
mod engine_thread;
mod tiers;
mod transfer_thread;

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
    time::{Duration, Instant},
};

use cluster::{ModelIdentity, NodeId, NodeRecord};
use engine::{
    Scheduler, StepLoop,
    event::Load,
    tiers::{Tier, TierEvent},
};
use kernels::{KvFormat, KvLayout, WeightFormat};
use kv_transfer::{
    TransferLimits,
    api::{Command, Epoch, Peer, TransferId},
    driver::{Input as TransferInput, TransferDriver},
    protocol::{Core, Local},
    transport::TransportEvent,
};
use node::{
    attempt::{AttemptLimits, SAMPLING_VERSION},
    constraint::GRAMMAR_VERSION,
    identity,
    node_core::{CallId, CloseReason, NodeCore, ObserverId, STALL_AFTER},
};
use simulation_base::Random;
use transfer_thread::EventQueue;

use crate::{
    calls::CallKey,
    coverage::Coverage,
    device::Device,
    nodes::{Connection, Stream},
    process_io::{Input, Output, ProcessState, TransferHold},
    scenario::{BLOCK_BYTES, ModelPlan, NodePlan, VOCABULARY},
    tiers::{TierCopies, TierPlan},
    transport::{SimLinks, SimTransport},
    weights::NodeWeights,
};

/// A layout with the bytes of the `sim` executor's KV: 8 per token.
const KV_LAYOUT: KvLayout =
    KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 1, format: KvFormat::F32 };

/// Time until the transfer thread offers an event again after a full queue.
pub(crate) const OFFER_AGAIN: Duration = Duration::from_millis(5);

pub(crate) struct Process {
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
    /// Commands for the transfer thread: the number in transit or arrived, and the arrived
    /// commands.
    commands: usize,
    arrived_commands: VecDeque<Command>,
    transfer_limits: TransferLimits,
    events: EventQueue,
    /// Whether a command waits in the core because the transfer queue is full.
    is_command_waiting: bool,
    is_draining: bool,
    is_checked: bool,
    /// Whether KV has arrived while no step was in flight, and no output has followed.
    has_kv_arrived: bool,
    now: Instant,
    /// Outputs of the input in progress.
    outputs: Vec<Output>,
}

struct OpenCall {
    connection: Connection,
    key: CallKey,
    call: CallId,
}

/// Returns the record of the process on this host.
fn record(
    (host, plan): (usize, &NodePlan),
    model: &ModelPlan,
    (identity, epoch): (&ModelIdentity, Epoch),
    block_count: u32,
) -> NodeRecord {
    let sequence_tokens_max = plan.longest_sequence();
    NodeRecord {
        node_id: NodeId::parse(&name_of(host, plan)).expect("a plain name"),
        epoch,
        role: plan.role,
        control_endpoint: control_endpoint(host),
        model: model.name.to_string(),
        identity: identity.clone(),
        prompt_tokens_max: identity::prompt_tokens_max(sequence_tokens_max),
        sequence_tokens_max,
        block_count,
        vocabulary_size: VOCABULARY,
        grammar_version: GRAMMAR_VERSION,
        cpu_fallback: None,
        peer_tag: vec![1; 32],
        pooling: false,
        sampling_version: SAMPLING_VERSION,
        adapters: Vec::new(),
        both_roles: true,
        kv_windows: identity::kv_windows(&model.kv_groups),
        state_blocks: model.kv_groups.state_entries() as u32,
    }
}

fn name_of(host: usize, plan: &NodePlan) -> String {
    format!("{}-{host}", plan.role)
}

impl Process {
    pub(crate) fn start(
        host: usize,
        plan: &NodePlan,
        model: &ModelPlan,
        is_checked: bool,
        epoch: Epoch,
        now: Instant,
    ) -> Self {
        let name = name_of(host, plan);
        let (tokens_max, groups) = (plan.longest_sequence(), &model.kv_groups);
        let scheduler_config = plan.scheduler_of(groups);
        let limits = scheduler_config.limits;
        let tier_plan = plan.tiers.filter(|_| groups.state_entries() == 0);
        let (fingerprint, format) = (model.fingerprint, WeightFormat::F32);
        let identity = identity::model_identity(fingerprint, format, KV_LAYOUT, groups);
        assert_eq!(KV_LAYOUT.block_bytes(), BLOCK_BYTES);
        let record = record((host, plan), model, (&identity, epoch), limits.blocks);
        let seeds = identity::cache_seeds(&identity);
        let scheduler = Scheduler::new(scheduler_config, seeds)
            .expect("the plan is consistent")
            .with_kv_groups(groups.clone());
        assert_eq!(scheduler.sequence_tokens_max(), tokens_max as usize);
        let random = Random::new(epoch.0 as u64);
        let device = Device::new(limits, groups, plan.step_cost, is_checked, random, now);
        let arena = device.arena();
        let tiers = tier_plan.zip(arena.clone());
        let tiers = tiers.map(|(tiers, arena)| TierCopies::new(tiers, arena));
        let scheduler = match tier_plan {
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
        if let Some(TierPlan { host_slots: slots, .. }) = tier_plan {
            core.handle_tier_event(TierEvent::Grown { tier: Tier::Host, slots }, now);
        }
        Self {
            core,
            tiers,
            transfers: TransferDriver::new(
                Core::new(now, local),
                SimTransport::new(name.clone(), arena, groups.clone()),
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
            has_kv_arrived: false,
            now,
            outputs: Vec::new(),
        }
    }

    pub(crate) fn source(&self) -> Peer {
        Peer { node_id: self.name.clone(), epoch: self.epoch }
    }

    /// Returns the time of all steps of the device.
    pub(crate) fn device_busy(&self) -> Duration {
        self.core.executor().busy()
    }

    pub(crate) fn load(&self) -> Load {
        self.core.scheduler().load()
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.is_draining
    }

    /// Returns when [`Input::Deadline`] is due if no other input comes first.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let device = self.core.executor().next_due();
        let transfers = self.transfers.next_deadline(self.now);
        let offer = (!self.transfers.takes_commands()).then(|| self.now + OFFER_AGAIN);
        let copies = self.tiers.as_ref().and_then(TierCopies::next_due);
        let weights = self.weights.next_deadline();
        let deadlines = [self.core.next_deadline(), device, transfers, offer, copies, weights];
        deadlines.into_iter().flatten().min()
    }

    pub(crate) fn handle(&mut self, now: Instant, input: Input) -> Vec<Output> {
        self.take(now, input);
        mem::take(&mut self.outputs)
    }

    fn take(&mut self, now: Instant, input: Input) {
        self.now = now;
        self.core.executor_mut().set_now(now);
        self.finish_copies();
        match input {
            Input::Call { connection, key, call } => self.call(connection, key, *call),
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
            Input::Transfer(event) => self.transfer_event(event),
            Input::Drain { grace } => {
                self.is_draining = true;
                self.core.handle_draining(true, Some(grace), now);
            }
            Input::Weights(input) => {
                let (core, outputs) = (&mut self.core, &mut self.outputs);
                self.weights.handle(now, input, self.is_draining, core, outputs);
            }
            Input::EndAll => self.core.handle_close(&CloseReason::DrainTimeout),
            Input::RankLost => self.core.executor_mut().lose_rank(),
            Input::Command(command) => {
                self.arrived_commands.push_back(command);
                return self.run_transfers(None);
            }
            Input::ControlMessage(from, message) => {
                return self.run_transfers(Some(TransferInput::Control { from, message }));
            }
            Input::Data(event) => {
                let input = TransferInput::Transport(TransportEvent::Data(event));
                return self.run_transfers(Some(input));
            }
            Input::PeerFailed { peer, reason } => {
                let input = TransferInput::PeerFailed { peer, reason: reason.to_owned() };
                return self.run_transfers(Some(input));
            }
            Input::Closed { peer, connection, reason } => {
                let reason = reason.to_owned();
                let event = TransportEvent::Closed { peer, connection, reason };
                return self.run_transfers(Some(TransferInput::Transport(event)));
            }
            Input::Deadline => {
                self.weights.on_deadline(now, &mut self.core, &mut self.outputs);
                self.transfers.handle_deadline(now);
                self.run_transfers(None);
            }
        }
        self.run_engine();
    }
}

pub(crate) fn control_endpoint(host: usize) -> String {
    format!("tcp://127.0.0.1:{}", 10_000 + host)
}
