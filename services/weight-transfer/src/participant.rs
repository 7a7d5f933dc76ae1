//! State machine of a node that takes part in updates.
//!
//! `Serving → Receiving → Prepared → Installing → Serving`. An abort leads back to `Serving` from
//! `Receiving` and `Prepared`. `Installing` begins with the decision to commit and cannot be
//! aborted: if the node cannot switch to the new weights, it has missed the update and catches up.
//! Every method may be called again with the same arguments: messages are lost and repeated.
//!
//! A node remembers how its last updates ended and answers by the id of the update. So a prepared
//! node that has lost its coordinator learns of a peer's commit although the peer takes part in a
//! later update. The node then commits, too, even if the peer already serves the weights of a later
//! update: a decided update is never aborted. Until then the node is busy, so it prepares no other
//! update beside the prepared one. Afterwards it is a node that has missed the later update. It
//! serves alone, because nodes of different versions are never paired, and catches up.

use std::{
    collections::VecDeque,
    fmt,
    time::{Duration, Instant},
};

use crate::WeightVersion;

/// Time without a call of the coordinator after which a prepared node asks its peers for the
/// outcome.
const SILENCE_MAX: Duration = Duration::from_secs(2);
/// Time between two rounds of questions to the peers.
const ASK_INTERVAL: Duration = Duration::from_secs(1);
/// Number of ended updates that a node remembers.
const ENDS_MAX: usize = 16;

/// Id of one update, chosen by its coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UpdateId(pub u128);

impl UpdateId {
    /// Bit that is set in the id of every catch-up.
    const CATCH_UP: u128 = 1 << 127;

    /// Returns the id of an operator's update from random bits.
    pub fn of_operator(bits: u128) -> Self {
        Self(bits & !Self::CATCH_UP)
    }

    /// Returns the id of a catch-up, an update of one node that missed an operator's update, from
    /// random bits.
    pub fn of_catch_up(bits: u128) -> Self {
        Self(bits | Self::CATCH_UP)
    }

    fn is_catch_up(self) -> bool {
        self.0 & Self::CATCH_UP != 0
    }
}

impl fmt::Display for UpdateId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// An update that a coordinator begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proposal {
    pub id: UpdateId,
    /// When the update is aborted unless it is committed.
    pub deadline: Instant,
}

/// State of an update at a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UpdateState {
    /// The node obtains the weights.
    Receiving,
    /// The node has weights of this version, which are not in use yet.
    Prepared(WeightVersion),
    /// The update is committed. The node switches to the new weights at the next step boundary.
    Installing(WeightVersion),
    Ended(UpdateEnd),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UpdateEnd {
    Committed(WeightVersion),
    Aborted { reason: String },
}

/// The update that a node runs, or the last one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpdateReport {
    pub id: UpdateId,
    pub state: UpdateState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParticipantPhase {
    Serving,
    Receiving(ReceivingUpdate),
    Prepared(ReceivingUpdate, WeightVersion),
    Installing(ReceivingUpdate, WeightVersion),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivingUpdate {
    id: UpdateId,
    deadline: Instant,
    /// Time at which to ask the peers unless the coordinator calls earlier.
    ask_at: Instant,
}

/// Event for a participant that is not a call of a coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParticipantInput {
    /// [`ParticipantAction::Receive`] ended: the weights with this version are prepared, or the
    /// reason why not.
    Received { id: UpdateId, outcome: Result<WeightVersion, String> },
    /// [`ParticipantAction::Install`] ended.
    Installed { id: UpdateId },
    /// [`ParticipantAction::Install`] failed: the new weights are not in use, for this reason.
    InstallFailed { id: UpdateId, reason: String },
    /// A peer has committed the update with this version.
    PeerCommitted { id: UpdateId, version: WeightVersion },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParticipantAction {
    /// Obtain the weights and answer [`ParticipantInput::Received`].
    Receive { id: UpdateId },
    /// Stop receiving, and free the prepared weights.
    Discard { id: UpdateId },
    /// Switch to the new weights at a step boundary and answer [`ParticipantInput::Installed`] or
    /// [`ParticipantInput::InstallFailed`].
    Install { id: UpdateId, version: WeightVersion },
    /// Ask the peers whether they have committed the update.
    AskPeers { id: UpdateId },
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BeginError {
    #[error("cannot begin update {id}: update {running} runs; expected one update at a time")]
    Running { id: UpdateId, running: UpdateId },
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    #[error("cannot commit update {id}: this node does not know it; expected {known}")]
    Unknown { id: UpdateId, known: String },
    #[error("cannot commit update {id}: it is being received; expected a prepared update")]
    Receiving { id: UpdateId },
    #[error("cannot commit update {id}: it was aborted: {reason}")]
    Aborted { id: UpdateId, reason: String },
    #[error("cannot commit update {id} with weight_version {named}: this node has prepared {own}")]
    OtherVersion { id: UpdateId, named: WeightVersion, own: WeightVersion },
}

#[derive(Debug)]
pub struct Participant {
    phase: ParticipantPhase,
    /// The updates that ended, the last one at the back.
    ends: VecDeque<(UpdateId, UpdateEnd)>,
    actions: VecDeque<ParticipantAction>,
}

impl Default for Participant {
    fn default() -> Self {
        Self { phase: ParticipantPhase::Serving, ends: VecDeque::new(), actions: VecDeque::new() }
    }
}

impl Participant {
    pub fn phase(&self) -> ParticipantPhase {
        self.phase
    }

    /// Returns the running update, or the last one.
    pub fn report(&self) -> Option<UpdateReport> {
        let report = |running: ReceivingUpdate, state| Some(UpdateReport { id: running.id, state });
        match self.phase {
            ParticipantPhase::Serving => {
                let (id, end) = self.ends.back().cloned()?;
                Some(UpdateReport { id, state: UpdateState::Ended(end) })
            }
            ParticipantPhase::Receiving(running) => report(running, UpdateState::Receiving),
            ParticipantPhase::Prepared(running, version) => {
                report(running, UpdateState::Prepared(version))
            }
            ParticipantPhase::Installing(running, version) => {
                report(running, UpdateState::Installing(version))
            }
        }
    }

    /// Returns the state of an update that runs or is remembered.
    pub fn state_of(&self, id: UpdateId) -> Option<UpdateState> {
        let running = self.report().filter(|report| report.id == id).map(|report| report.state);
        running.or_else(|| self.end_of(id).cloned().map(UpdateState::Ended))
    }

    /// Begins to receive an update. Returns whether the update is new. A repeated call changes
    /// nothing; [`state_of`](Self::state_of) has the state of the update. An operator's update
    /// aborts a catch-up that is not committed: no other node takes part in the catch-up.
    pub fn begin(&mut self, now: Instant, proposal: Proposal) -> Result<bool, BeginError> {
        let id = proposal.id;
        if self.state_of(id).is_some() {
            return Ok(false);
        }
        match self.running() {
            Some(running)
                if running.id.is_catch_up()
                    && !id.is_catch_up()
                    && !matches!(self.phase, ParticipantPhase::Installing(..)) =>
            {
                self.abort(running.id, "an operator began another update");
                self.begin(now, proposal)
            }
            Some(running) => Err(BeginError::Running { id, running: running.id }),
            None => {
                let ask_at = now + SILENCE_MAX;
                self.phase = ParticipantPhase::Receiving(ReceivingUpdate {
                    id,
                    deadline: proposal.deadline,
                    ask_at,
                });
                self.actions.push_back(ParticipantAction::Receive { id });
                Ok(true)
            }
        }
    }

    /// Records that the coordinator of this update has called.
    pub fn heard(&mut self, now: Instant, id: UpdateId) {
        if let Some(running) = self.running_mut().filter(|running| running.id == id) {
            running.ask_at = now + SILENCE_MAX;
        }
    }

    /// Commits the update. Returns `Ok` if the update is already committed.
    pub fn commit(&mut self, id: UpdateId, named: WeightVersion) -> Result<(), CommitError> {
        match self.phase {
            ParticipantPhase::Receiving(running) if running.id == id => {
                Err(CommitError::Receiving { id })
            }
            ParticipantPhase::Prepared(running, own)
            | ParticipantPhase::Installing(running, own)
                if running.id == id && own != named =>
            {
                Err(CommitError::OtherVersion { id, named, own })
            }
            ParticipantPhase::Prepared(running, version) if running.id == id => {
                self.phase = ParticipantPhase::Installing(running, version);
                self.actions.push_back(ParticipantAction::Install { id, version });
                Ok(())
            }
            ParticipantPhase::Installing(running, _) if running.id == id => Ok(()),
            _ => match self.end_of(id) {
                Some(UpdateEnd::Committed(own)) if *own == named => Ok(()),
                Some(UpdateEnd::Committed(own)) => {
                    Err(CommitError::OtherVersion { id, named, own: *own })
                }
                Some(UpdateEnd::Aborted { reason }) => {
                    Err(CommitError::Aborted { id, reason: reason.clone() })
                }
                None => Err(CommitError::Unknown { id, known: self.known() }),
            },
        }
    }

    /// Aborts the update unless it is committed. Ignores an unknown id.
    pub fn abort(&mut self, id: UpdateId, reason: &str) {
        match self.phase {
            ParticipantPhase::Receiving(running) | ParticipantPhase::Prepared(running, _)
                if running.id == id =>
            {
                self.actions.push_back(ParticipantAction::Discard { id });
                self.end(id, UpdateEnd::Aborted { reason: reason.to_owned() });
            }
            _ => {}
        }
    }

    pub fn handle(&mut self, input: ParticipantInput) {
        match (input, self.phase) {
            (ParticipantInput::Received { id, outcome }, ParticipantPhase::Receiving(running))
                if running.id == id =>
            {
                match outcome {
                    Ok(version) => self.phase = ParticipantPhase::Prepared(running, version),
                    Err(reason) => self.abort(id, &reason),
                }
            }
            (
                ParticipantInput::Installed { id },
                ParticipantPhase::Installing(running, version),
            ) if running.id == id => {
                // The replaced weights.
                self.actions.push_back(ParticipantAction::Discard { id });
                self.end(id, UpdateEnd::Committed(version));
            }
            (
                ParticipantInput::InstallFailed { id, reason },
                ParticipantPhase::Installing(running, _),
            ) if running.id == id => {
                self.actions.push_back(ParticipantAction::Discard { id });
                self.end(id, UpdateEnd::Aborted { reason });
            }
            (ParticipantInput::PeerCommitted { id, version }, ParticipantPhase::Prepared(..)) => {
                // A peer cannot have committed another version of the update.
                let _ = self.commit(id, version);
            }
            _ => {}
        }
    }

    /// Returns when to call [`Self::on_deadline`].
    pub fn next_deadline(&self) -> Option<Instant> {
        match self.phase {
            ParticipantPhase::Receiving(running) => Some(running.deadline),
            ParticipantPhase::Prepared(running, _) => Some(running.deadline.min(running.ask_at)),
            ParticipantPhase::Serving | ParticipantPhase::Installing(..) => None,
        }
    }

    pub fn on_deadline(&mut self, now: Instant) {
        let Some(running) = self.running() else { return };
        if now >= running.deadline {
            return self.abort(running.id, "its deadline passed without a commit");
        }
        if let ParticipantPhase::Prepared(running, _) = &mut self.phase
            && now >= running.ask_at
        {
            running.ask_at = now + ASK_INTERVAL;
            let id = running.id;
            self.actions.push_back(ParticipantAction::AskPeers { id });
        }
    }

    pub fn poll_action(&mut self) -> Option<ParticipantAction> {
        self.actions.pop_front()
    }

    fn running(&self) -> Option<ReceivingUpdate> {
        match self.phase {
            ParticipantPhase::Serving => None,
            ParticipantPhase::Receiving(running)
            | ParticipantPhase::Prepared(running, _)
            | ParticipantPhase::Installing(running, _) => Some(running),
        }
    }

    fn running_mut(&mut self) -> Option<&mut ReceivingUpdate> {
        match &mut self.phase {
            ParticipantPhase::Serving => None,
            ParticipantPhase::Receiving(running)
            | ParticipantPhase::Prepared(running, _)
            | ParticipantPhase::Installing(running, _) => Some(running),
        }
    }

    fn end_of(&self, id: UpdateId) -> Option<&UpdateEnd> {
        self.ends.iter().find(|(ended, _)| *ended == id).map(|(_, end)| end)
    }

    fn end(&mut self, id: UpdateId, end: UpdateEnd) {
        self.phase = ParticipantPhase::Serving;
        if self.ends.len() == ENDS_MAX {
            // Peers ask for commits, so failed attempts of later updates displace at most one.
            let is_aborted = |end: &UpdateEnd| matches!(end, UpdateEnd::Aborted { .. });
            let displaced = self.ends.iter().position(|(_, end)| is_aborted(end)).unwrap_or(0);
            self.ends.remove(displaced);
        }
        self.ends.push_back((id, end));
    }

    fn known(&self) -> String {
        match self.report() {
            Some(report) => report.id.to_string(),
            None => "an update that was begun".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: UpdateId = UpdateId(7);
    const NEW: WeightVersion = WeightVersion(70);

    struct Node {
        participant: Participant,
        now: Instant,
    }

    impl Node {
        /// Returns a node that has prepared the update.
        fn prepared() -> Self {
            let mut node = Self { participant: Participant::default(), now: Instant::now() };
            node.prepare(ID);
            assert_eq!(node.actions(), [ParticipantAction::Receive { id: ID }]);
            node
        }

        /// Returns a node that has committed the update.
        fn committed() -> Self {
            let mut node = Self { participant: Participant::default(), now: Instant::now() };
            node.commit(ID);
            node.actions();
            node
        }

        fn prepare(&mut self, id: UpdateId) {
            let deadline = self.now + Duration::from_secs(60);
            self.participant.begin(self.now, Proposal { id, deadline }).unwrap();
            self.participant.handle(ParticipantInput::Received { id, outcome: Ok(NEW) });
        }

        fn commit(&mut self, id: UpdateId) {
            self.prepare(id);
            self.participant.commit(id, NEW).unwrap();
            self.participant.handle(ParticipantInput::Installed { id });
        }

        fn actions(&mut self) -> Vec<ParticipantAction> {
            std::iter::from_fn(|| self.participant.poll_action()).collect()
        }

        fn state(&self) -> UpdateState {
            self.participant.report().unwrap().state
        }
    }

    #[test]
    fn commit_is_idempotent_and_names_the_prepared_version() {
        let mut node = Node::prepared();
        let other = node.participant.commit(ID, WeightVersion(71)).unwrap_err();
        assert!(other.to_string().contains("this node has prepared"), "{other}");
        for _ in 0..2 {
            node.participant.commit(ID, NEW).unwrap();
        }
        assert_eq!(node.actions(), [ParticipantAction::Install { id: ID, version: NEW }]);
        node.participant.abort(ID, "too late");
        assert_eq!(node.state(), UpdateState::Installing(NEW));
        node.participant.handle(ParticipantInput::Installed { id: ID });
        assert_eq!(node.actions(), [ParticipantAction::Discard { id: ID }]);
        node.participant.commit(ID, NEW).unwrap();
        assert_eq!(node.actions(), []);
        assert_eq!(node.state(), UpdateState::Ended(UpdateEnd::Committed(NEW)));
    }

    #[test]
    fn node_that_cannot_switch_to_the_new_weights_misses_the_update() {
        let mut node = Node::prepared();
        let reason = "a change is pending".to_owned();
        let failed = |id| ParticipantInput::InstallFailed { id, reason: reason.clone() };
        node.participant.handle(failed(ID));
        assert_eq!(node.state(), UpdateState::Prepared(NEW), "the commit comes first");
        node.participant.commit(ID, NEW).unwrap();
        assert_eq!(node.actions(), [ParticipantAction::Install { id: ID, version: NEW }]);
        node.participant.handle(failed(UpdateId(8)));
        assert_eq!(node.state(), UpdateState::Installing(NEW));
        node.participant.handle(failed(ID));
        assert_eq!(node.actions(), [ParticipantAction::Discard { id: ID }]);
        assert_eq!(node.state(), UpdateState::Ended(UpdateEnd::Aborted { reason: reason.clone() }));
        let error = node.participant.commit(ID, NEW).unwrap_err();
        assert_eq!(error, CommitError::Aborted { id: ID, reason });
        let deadline = node.now + Duration::from_secs(60);
        let next = Proposal { id: UpdateId(8), deadline };
        assert!(node.participant.begin(node.now, next).unwrap());
    }

    #[test]
    fn commit_of_an_unknown_or_aborted_update_is_rejected() {
        let mut fresh = Participant::default();
        assert!(matches!(fresh.commit(ID, NEW), Err(CommitError::Unknown { .. })));
        let mut node = Node::prepared();
        assert!(matches!(
            node.participant.commit(UpdateId(8), NEW),
            Err(CommitError::Unknown { known, .. }) if known == ID.to_string()
        ));
        node.participant.abort(ID, "the trainer left");
        assert_eq!(node.actions(), [ParticipantAction::Discard { id: ID }]);
        let error = node.participant.commit(ID, NEW).unwrap_err();
        assert!(error.to_string().contains("the trainer left"), "{error}");
    }

    #[test]
    fn a_second_update_is_rejected_while_one_runs() {
        let mut node = Node::prepared();
        let deadline = node.now + Duration::from_secs(60);
        let other = Proposal { id: UpdateId(8), deadline };
        let error = node.participant.begin(node.now, other).unwrap_err();
        assert_eq!(error, BeginError::Running { id: UpdateId(8), running: ID });
        assert!(!node.participant.begin(node.now, Proposal { id: ID, deadline }).unwrap());
        node.participant.abort(ID, "");
        assert!(node.participant.begin(node.now, other).unwrap());
    }

    #[test]
    fn update_of_an_operator_replaces_a_catch_up_that_is_not_committed() {
        let catch_up = UpdateId::of_catch_up(7);
        let mut node = Node { participant: Participant::default(), now: Instant::now() };
        let deadline = node.now + Duration::from_secs(60);
        let proposal = |id| Proposal { id, deadline };
        assert!(node.participant.begin(node.now, proposal(catch_up)).unwrap());
        node.participant.handle(ParticipantInput::Received { id: catch_up, outcome: Ok(NEW) });
        assert_eq!(node.actions(), [ParticipantAction::Receive { id: catch_up }]);
        let other = UpdateId::of_catch_up(8);
        assert!(node.participant.begin(node.now, proposal(other)).is_err());

        let id = UpdateId::of_operator(8);
        assert!(node.participant.begin(node.now, proposal(id)).unwrap());
        let replaced =
            [ParticipantAction::Discard { id: catch_up }, ParticipantAction::Receive { id }];
        assert_eq!(node.actions(), replaced);
        let report = UpdateReport { id, state: UpdateState::Receiving };
        assert_eq!(node.participant.report(), Some(report));
        assert!(matches!(
            node.participant.commit(catch_up, NEW),
            Err(CommitError::Aborted { id, .. }) if id == catch_up
        ));
        assert!(!node.participant.begin(node.now, proposal(catch_up)).unwrap());

        node.participant.abort(id, "");
        assert!(node.participant.begin(node.now, proposal(other)).unwrap());
        node.participant.handle(ParticipantInput::Received { id: other, outcome: Ok(NEW) });
        node.participant.commit(other, NEW).unwrap();
        let id = UpdateId::of_operator(9);
        let error = node.participant.begin(node.now, proposal(id)).unwrap_err();
        assert_eq!(error, BeginError::Running { id, running: other });
    }

    #[test]
    fn repeated_begin_of_an_aborted_update_shows_why_it_was_aborted() {
        let mut node = Node::prepared();
        node.participant.abort(ID, "wrong shape");
        node.actions();
        let deadline = node.now + Duration::from_secs(60);
        assert!(!node.participant.begin(node.now, Proposal { id: ID, deadline }).unwrap());
        assert_eq!(node.actions(), []);
        let reason = "wrong shape".to_owned();
        assert_eq!(node.state(), UpdateState::Ended(UpdateEnd::Aborted { reason }));
    }

    #[test]
    fn committed_update_stays_committed_after_later_updates() {
        let mut node = Node::committed();
        let committed = Some(UpdateState::Ended(UpdateEnd::Committed(NEW)));
        for (id, is_running) in [(8, true), (8, false), (9, true), (9, false)] {
            let deadline = node.now + Duration::from_secs(60);
            let later = Proposal { id: UpdateId(id), deadline };
            node.participant.begin(node.now, later).unwrap();
            if !is_running {
                node.participant.abort(later.id, "");
            }
            node.actions();
            assert!(!node.participant.begin(node.now, Proposal { id: ID, deadline }).unwrap());
            node.participant.commit(ID, NEW).unwrap();
            assert!(matches!(
                node.participant.commit(ID, WeightVersion(71)),
                Err(CommitError::OtherVersion { own: NEW, .. })
            ));
            node.participant.abort(ID, "too late");
            assert_eq!(node.participant.state_of(ID), committed);
            assert_eq!(node.actions(), []);
            assert_eq!(node.participant.report().unwrap().id, later.id);
        }
    }

    #[test]
    fn remembered_ends_are_bounded_and_keep_commits_longer_than_aborts() {
        let mut node = Node::committed();
        let deadline = node.now + Duration::from_secs(60);
        let mut ids = (8..).map(UpdateId);
        for id in ids.by_ref().take(2 * ENDS_MAX) {
            node.participant.begin(node.now, Proposal { id, deadline }).unwrap();
            node.participant.abort(id, "");
            assert_eq!(node.participant.report().unwrap().id, id);
            assert!(node.participant.ends.len() <= ENDS_MAX);
        }
        let committed = UpdateState::Ended(UpdateEnd::Committed(NEW));
        assert_eq!(node.participant.state_of(ID), Some(committed));
        for id in ids.take(ENDS_MAX) {
            node.commit(id);
            assert!(node.participant.ends.len() <= ENDS_MAX);
        }
        assert_eq!(node.participant.state_of(ID), None);
    }

    #[test]
    fn prepared_node_without_a_coordinator_asks_its_peers_until_its_deadline() {
        let mut node = Node::prepared();
        node.now += Duration::from_secs(1);
        node.participant.heard(node.now, ID);
        let mut asked = 0;
        while let Some(deadline) = node.participant.next_deadline() {
            node.now = deadline;
            node.participant.on_deadline(deadline);
            let actions = node.actions();
            asked += actions
                .iter()
                .filter(|it| matches!(it, ParticipantAction::AskPeers { .. }))
                .count();
        }
        assert_eq!(asked, 57);
        let UpdateState::Ended(UpdateEnd::Aborted { reason }) = node.state() else { panic!() };
        assert!(reason.contains("deadline"), "{reason}");

        let mut node = Node::prepared();
        node.participant.handle(ParticipantInput::PeerCommitted { id: ID, version: NEW });
        assert_eq!(node.actions(), [ParticipantAction::Install { id: ID, version: NEW }]);
    }

    #[test]
    fn late_outcome_of_an_aborted_update_is_ignored() {
        let mut participant = Participant::default();
        let (now, id) = (Instant::now(), ID);
        let deadline = now + Duration::from_secs(60);
        participant.begin(now, Proposal { id, deadline }).unwrap();
        participant.abort(id, "");
        let next = UpdateId(8);
        participant.begin(now, Proposal { id: next, deadline }).unwrap();
        participant.handle(ParticipantInput::Received { id, outcome: Ok(NEW) });
        assert_eq!(participant.report().unwrap().state, UpdateState::Receiving);
    }
}
