//! The part of a node in updates of the weights: the shipped `Participant`, and the work that it
//! requests.
//!
//! A node receives weights in virtual time, into a second copy or over the weights in use. The
//! weights in use change in the shipped node core.

use std::time::{Duration, Instant};

use engine::event::InFlight;
use kv_transfer::api::Epoch;
use node::node_core::NodeCore;
use simulation_base::Random;
use weight_transfer::{
    BeginError, ChunkDigest, CommitError, CoordinatorCall, NodeReply, Participant,
    ParticipantAction, ParticipantInput, ParticipantPhase, Plan, Proposal, Tensor, UpdateEnd,
    UpdateId, UpdateState, WeightVersion,
};

use crate::{
    coverage::Coverage,
    device::Device,
    process_io::{Output, WeightsInput, WeightsOutput},
    updates::{coordinators::UpdateCall, plan::UpdatePlan},
};

/// Longest time to read weights again that an aborted update has overwritten.
const RESTORE_MAX: Duration = Duration::from_millis(400);
/// Reason why the core accepts each change of the weights.
const ONE_CHANGE: &str = "updates and restorations change the weights one at a time";

/// The bytes of weights, and the version that names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Weights {
    pub version: WeightVersion,
    pub bytes: Vec<u8>,
}

impl Weights {
    /// Returns the weights that every process loads at its start.
    fn loaded() -> Self {
        Self { version: WeightVersion::LOADED, bytes: vec![0; 8] }
    }

    fn of_content(bytes: Vec<u8>) -> Self {
        let tensor = Tensor {
            name: "weights".into(),
            dtype: "U8".into(),
            shape: vec![bytes.len() as u64],
            bytes: bytes.len() as u64,
        };
        let plan = Plan::new(vec![tensor], 4).expect("the tensor is valid");
        let digests: Vec<u128> =
            bytes.chunks(4).map(|chunk| ChunkDigest::default().update(chunk).finish()).collect();
        Self { version: WeightVersion::of_content(&plan, &digests), bytes }
    }
}

pub(crate) struct NodeWeights {
    epoch: Epoch,
    participant: Participant,
    /// The weights in use, or those to restore.
    weights: Weights,
    /// Whether an update in place has overwritten the weights in use.
    is_overwritten: bool,
    /// Received weights that are not in use.
    prepared: Option<Weights>,
    running: Option<RunningUpdate>,
    restoration: Option<Restoration>,
    random: Random,
    pub coverage: Coverage,
}

struct RunningUpdate {
    /// The call that began the update.
    call: Box<UpdateCall>,
    /// Whether the core was told to release the weights in use.
    releases: bool,
    received_at: Option<Instant>,
}

/// Restoration of weights that an aborted update has overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Restoration {
    ReadUntil(Instant),
    Installing,
}

impl NodeWeights {
    pub(crate) fn new(epoch: Epoch) -> Self {
        Self {
            epoch,
            participant: Participant::default(),
            weights: Weights::loaded(),
            is_overwritten: false,
            prepared: None,
            running: None,
            restoration: None,
            random: Random::new(epoch.0 as u64 ^ 0x7765_6967_6874_7322),
            coverage: Coverage::default(),
        }
    }

    /// Returns the weights in use.
    pub(crate) fn in_use(&self) -> Option<&Weights> {
        (!self.is_overwritten).then_some(&self.weights)
    }

    /// Returns whether the node takes part in an update that has not ended.
    pub(crate) fn is_updating(&self) -> bool {
        self.participant.phase() != ParticipantPhase::Serving
    }

    pub(crate) fn check_idle(&self, name: &str) {
        assert_eq!(
            self.participant.phase(),
            ParticipantPhase::Serving,
            "{name}: an update has not ended"
        );
        assert!(self.prepared.is_none(), "{name}: weights are prepared");
        assert!(!self.is_overwritten, "{name}: no weights are in use");
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let received_at = self.running.as_ref().and_then(|running| running.received_at);
        let read_at = match self.restoration {
            Some(Restoration::ReadUntil(at)) => Some(at),
            Some(Restoration::Installing) | None => None,
        };
        [self.participant.next_deadline(), received_at, read_at].into_iter().flatten().min()
    }

    pub(crate) fn on_deadline(
        &mut self,
        now: Instant,
        core: &mut NodeCore<Device>,
        outputs: &mut Vec<Output>,
    ) {
        if self.participant.next_deadline().is_some_and(|at| at <= now) {
            self.participant.on_deadline(now);
        }
        self.end_receive(now);
        if matches!(self.restoration, Some(Restoration::ReadUntil(at)) if at <= now) {
            self.restoration = Some(Restoration::Installing);
            let version = self.weights.version.0;
            core.executor_mut().prepare_weights(version, InFlight::Recompute);
            let label = String::new();
            let begun = core.handle_change_weights(version, label, InFlight::Recompute, false, now);
            begun.expect(ONE_CHANGE);
        }
        self.act(now, core, outputs);
    }

    pub(crate) fn handle(
        &mut self,
        now: Instant,
        input: WeightsInput,
        is_draining: bool,
        core: &mut NodeCore<Device>,
        outputs: &mut Vec<Output>,
    ) {
        match input {
            WeightsInput::Call(call) => {
                let (id, node) = (call.id, call.node);
                let outcome = self.call(now, call, is_draining, core);
                let reply = match outcome {
                    Ok(()) => NodeReply::State(self.participant.state_of(id)),
                    Err(reply) => reply,
                };
                outputs.push(Output::Weights(WeightsOutput::Reply { id, node, reply }));
            }
            WeightsInput::Question { id, from } => {
                if let Some(
                    UpdateState::Installing(version)
                    | UpdateState::Ended(UpdateEnd::Committed(version)),
                ) = self.participant.state_of(id)
                {
                    let committed = WeightsOutput::Committed { to: from, id, version };
                    outputs.push(Output::Weights(committed));
                }
            }
            WeightsInput::PeerCommitted { id, version } => {
                let was_prepared =
                    matches!(self.participant.phase(), ParticipantPhase::Prepared(..));
                self.participant.handle(ParticipantInput::PeerCommitted { id, version });
                if was_prepared
                    && matches!(self.participant.phase(), ParticipantPhase::Installing(..))
                {
                    self.coverage.count("commits learned from a peer");
                }
            }
        }
        self.act(now, core, outputs);
    }

    fn call(
        &mut self,
        now: Instant,
        call: Box<UpdateCall>,
        is_draining: bool,
        core: &mut NodeCore<Device>,
    ) -> Result<(), NodeReply> {
        let (id, requested) = (call.id, call.call);
        if call.epoch != self.epoch {
            return Err(NodeReply::Gone { reason: "another process".to_owned() });
        }
        match requested {
            CoordinatorCall::Begin if is_draining => {
                return Err(NodeReply::Unreachable { reason: "the node drains".to_owned() });
            }
            CoordinatorCall::Begin => {
                let proposal = Proposal { id, deadline: now + call.remaining };
                let busy = |BeginError::Running { running, .. }| NodeReply::Busy { running };
                let is_new = self.participant.begin(now, proposal).map_err(busy)?;
                self.participant.heard(now, id);
                if is_new {
                    // An operator's update replaces a catch-up.
                    if let Some(replaced) = self.running.as_ref().map(|running| running.call.id) {
                        self.discard(now, replaced, core);
                    }
                    self.running = Some(RunningUpdate { call, releases: false, received_at: None });
                }
            }
            CoordinatorCall::Status => self.participant.heard(now, id),
            CoordinatorCall::Commit { version } => {
                self.participant.heard(now, id);
                let rejected =
                    |error: CommitError| NodeReply::Rejected { reason: error.to_string() };
                self.participant.commit(id, version).map_err(rejected)?;
            }
            CoordinatorCall::Abort => self.participant.abort(id, "the coordinator aborted it"),
        }
        Ok(())
    }

    fn act(&mut self, now: Instant, core: &mut NodeCore<Device>, outputs: &mut Vec<Output>) {
        while let Some(action) = self.participant.poll_action() {
            match action {
                ParticipantAction::Receive { .. } => self.receive(now, core),
                ParticipantAction::Discard { id } => self.discard(now, id, core),
                ParticipantAction::Install { version, .. } => self.install(now, version, core),
                ParticipantAction::AskPeers { id } => {
                    self.coverage.count("peers asked");
                    let peers = self.running.iter().flat_map(|running| &running.call.peers);
                    let ask = |to: &Epoch| WeightsOutput::Question { to: *to, id };
                    outputs.extend(peers.map(ask).map(Output::Weights));
                }
            }
        }
    }

    /// Begins to receive the weights of the running update. In place, the core first releases the
    /// weights in use.
    fn receive(&mut self, now: Instant, core: &mut NodeCore<Device>) {
        if self.restoration == Some(Restoration::Installing) {
            // The update begins when the restored weights are in use.
            return;
        }
        self.restoration = None;
        let Some(running) = &mut self.running else { return };
        let UpdatePlan { in_place_percent, waits, .. } = running.call.plan;
        if self.is_overwritten || self.random.chance(in_place_percent) {
            running.releases = true;
            core.handle_release_weights(waits, now).expect(ONE_CHANGE);
        } else {
            self.receive_from(now);
        }
    }

    /// Handles the release of the weights in use.
    pub(crate) fn released(&mut self, now: Instant) {
        self.is_overwritten = true;
        self.receive_from(now);
    }

    fn receive_from(&mut self, now: Instant) {
        let Some(running) = &mut self.running else { return };
        let (plan, trainer_dies_at) = (running.call.plan, running.call.trainer_dies_at);
        let end = now + self.random.up_to(plan.receive_max);
        // When the trainer dies, every node fails at once.
        running.received_at = Some(trainer_dies_at.map_or(end, |at| end.min(at.max(now))));
    }

    /// Ends the receive that is due.
    fn end_receive(&mut self, now: Instant) {
        let Some(running) = &mut self.running else { return };
        if running.received_at.take_if(|at| *at <= now).is_none() {
            return;
        }
        let (id, plan) = (running.call.id, running.call.plan);
        let outcome = if running.call.trainer_dies_at.is_some_and(|at| at <= now) {
            self.coverage.count("weights not received");
            Err("the trainer died".to_owned())
        } else {
            let mut bytes = vec![plan.weights; 8];
            bytes[5] ^= u8::from(self.random.chance(plan.damage_percent));
            let weights = Weights::of_content(bytes);
            let version = weights.version;
            self.prepared = Some(weights);
            Ok(version)
        };
        self.participant.handle(ParticipantInput::Received { id, outcome });
    }

    /// Ends the update unless it is committed, and restores weights that it has overwritten.
    fn discard(&mut self, now: Instant, id: UpdateId, core: &mut NodeCore<Device>) {
        let Some(running) = self.running.take_if(|running| running.call.id == id) else { return };
        self.prepared = None;
        if running.releases && core.handle_lost_weights(now) {
            self.coverage.count("weights lost");
            let read_at = now + self.random.up_to(RESTORE_MAX);
            self.restoration = Some(Restoration::ReadUntil(read_at));
        }
    }

    /// Lets the core use the prepared weights under the version that the commit names.
    fn install(&mut self, now: Instant, version: WeightVersion, core: &mut NodeCore<Device>) {
        let (Some(running), Some(prepared)) = (&self.running, &mut self.prepared) else { return };
        prepared.version = version;
        let UpdatePlan { in_flight, waits, .. } = running.call.plan;
        if in_flight == InFlight::KeepKv && core.scheduler().load().running > 0 {
            self.coverage.count("KV kept");
        }
        core.executor_mut().prepare_weights(version.0, in_flight);
        let begun = core.handle_change_weights(version.0, String::new(), in_flight, waits, now);
        begun.expect(ONE_CHANGE);
    }

    /// Handles the core's change to other weights: those of the update, or restored ones.
    pub(crate) fn changed(
        &mut self,
        now: Instant,
        core: &mut NodeCore<Device>,
        outputs: &mut Vec<Output>,
    ) {
        self.is_overwritten = false;
        if self.restoration.take_if(|it| *it == Restoration::Installing).is_some() {
            self.coverage.count("weights restored");
            return self.receive(now, core);
        }
        self.coverage.count("weights changed");
        let running = self.running.take().expect("an update changes the weights");
        self.weights = self.prepared.take().expect("the weights are prepared");
        self.participant.handle(ParticipantInput::Installed { id: running.call.id });
        self.act(now, core, outputs);
    }
}
