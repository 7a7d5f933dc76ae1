//! The ranks of a node as one executor, in the node process.
//!
//! For each rank a thread starts the process and waits for its end. (The kernel kills the process
//! when the thread that started it ends, so the thread must stay.) Another thread watches the
//! heartbeats, because a process that is stopped or hung does not end. The first failure is
//! recorded; it kills all ranks and wakes all waiting threads. A group fails once and as a whole.

mod failure;
mod watch;
mod weights;

use std::{
    collections::VecDeque,
    io,
    process::Command,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crossbeam_channel::{Sender, bounded};
use engine::{
    executor::{CollectWaker, Executor, ExecutorError, ExecutorLimits, WeightUpdate, poll},
    plan::{RowMask, Span, StepId, StepPlan, StepResult, StepRun},
};
use kernels::{KvGroups, shared::RegionName};
use tracing::warn;

pub use self::failure::{GroupError, RankFailure};
use self::{
    failure::RankName,
    watch::{GroupWatch, lock, watch_heartbeats},
    weights::{RankedUpdate, WeightsLink},
};
use crate::{
    codec::{self, Failure, RankAnswer, StepAnswer, WeightChange, WireResult},
    process::SharedClock,
    rank_spec::RankSpec,
    region::{GroupRegion, PURPOSE, build},
    ring::{Bell, RingReader, RingWriter},
};

/// Longest sleep at a time.
const SLEEP_MAX: Duration = Duration::from_millis(500);
/// Time for killed processes to end.
const GONE_WITHIN: Duration = Duration::from_secs(2);

/// Settings of a group.
#[derive(Clone, Debug)]
pub struct GroupSettings {
    /// Epoch of the node.
    pub epoch: u128,
    /// Distinguishes the groups of one process.
    pub number: u32,
    pub ranks: u32,
    /// KV groups of the block tables.
    pub kv_groups: KvGroups,
    /// Start message, passed to the `make` of every rank.
    pub start_message: Vec<u8>,
    /// Time for all ranks to become ready.
    pub start_within: Duration,
    /// Time without a heartbeat after which a rank counts as dead.
    pub silence_max: Duration,
    /// Time that a rank may leave plans unread.
    pub unread_max: Duration,
    /// Time from the stop message to SIGKILL.
    pub stop_within: Duration,
}

impl GroupSettings {
    pub fn new(epoch: u128, ranks: u32, start_message: Vec<u8>) -> Self {
        Self {
            epoch,
            number: 0,
            ranks,
            kv_groups: KvGroups::default(),
            start_message,
            // Loading weights is bound by the disk.
            start_within: Duration::from_secs(1800),
            silence_max: Duration::from_secs(5),
            unread_max: Duration::from_secs(5),
            stop_within: Duration::from_secs(5),
        }
    }
}

/// The node's side of one rank.
#[derive(Debug)]
struct GroupRank {
    results: RingReader,
    /// Answers that are not compared with those of the other ranks yet.
    answers: VecDeque<StepAnswer>,
    /// The last step whose token bitmasks the rank reported as due.
    masks_due: Option<StepId>,
    limits: Option<ExecutorLimits>,
    updates_in_place: Option<bool>,
    ready_message: Vec<u8>,
    /// Running hash of the plans at the last change of the weights.
    weights_changed: Option<u64>,
    /// Thread that waits for the process.
    keeper: Option<JoinHandle<()>>,
}

/// The executor of a node with ranks. Dropping it ends the ranks.
#[derive(Debug)]
pub struct RankGroup {
    watch: Arc<GroupWatch>,
    /// `None` until all ranks are ready.
    limits: Option<ExecutorLimits>,
    /// `None`: the weights cannot change.
    weight_update: Option<Arc<RankedUpdate>>,
    plans: RingWriter,
    members: Vec<GroupRank>,
    results_bell: Bell,
    /// Steps in flight with the state hash of each.
    in_flight: VecDeque<(StepId, u64)>,
    /// The step launched last, until its token bitmasks are supplied.
    awaiting: Option<StepId>,
    history: codec::PlanHistory,
    /// Reused by every plan.
    message: Vec<u8>,
    clock: SharedClock,
    waker: CollectWaker,
    woken: Arc<AtomicBool>,
    polls: bool,
    settings: GroupSettings,
    /// Heartbeat thread. Dropping the sender ends it.
    watching: Option<(Sender<()>, JoinHandle<()>)>,
}

impl RankGroup {
    /// Starts a process for each rank with `command` and waits until all ranks are ready. Does not
    /// remove the regions of dead processes (`kernels::shared::sweep` does).
    ///
    /// # Errors
    /// When shared memory is missing, or a rank does not become ready. All processes are killed
    /// then.
    pub fn start(
        settings: GroupSettings,
        command: impl Fn(&RankSpec) -> Command + Send + Sync + 'static,
    ) -> Result<Self, GroupError> {
        let purpose = match settings.number {
            0 => PURPOSE.to_owned(),
            number => format!("{PURPOSE}{number}"),
        };
        let name = RegionName::own(settings.epoch, purpose);
        let of = settings.ranks;
        let spec = |rank| RankSpec { region: name.clone(), rank, of };
        let region = GroupRegion::create(&spec(0), build())?;
        let mut group = Self::new(settings, &region);
        // Written before the first rank reads.
        let start_message = codec::encode_start(&group.settings.start_message);
        group
            .plans
            .write(&start_message, group.settings.unread_max, || false)
            .map_err(RankFailure::from)?;
        let command = Arc::new(command);
        for rank in 0..of {
            let keeper = group.watch.keep(spec(rank), command.clone())?;
            group.members[rank as usize].keeper = Some(keeper);
        }
        group.start_watch(&region)?;
        group.wait_ready()?;
        if let Some(is_in_place) = group.members[0].updates_in_place {
            let (watch, unread_max) = (group.watch.clone(), group.settings.unread_max);
            let link = WeightsLink::new(&region, watch, of as usize, unread_max);
            group.weight_update = Some(RankedUpdate::new(link, is_in_place));
        }
        region.unlink();
        Ok(group)
    }

    /// Returns the process ids of the living ranks.
    pub fn process_ids(&self) -> Vec<u32> {
        lock(&self.watch.processes).iter().flatten().map(|(id, _)| *id).collect()
    }

    /// Returns the bytes that each rank sent when it became ready.
    pub fn ready_messages(&self) -> Vec<Vec<u8>> {
        self.members.iter().map(|member| member.ready_message.clone()).collect()
    }

    /// Sets whether `collect` polls for results. By default it sleeps.
    pub fn set_polling(&mut self, polls: bool) {
        self.polls = polls;
    }

    fn new(settings: GroupSettings, region: &GroupRegion) -> Self {
        let results_bell = region.results_bell();
        let member = |rank| GroupRank {
            results: RingReader::new(region.results(rank), 0),
            answers: VecDeque::new(),
            masks_due: None,
            limits: None,
            updates_in_place: None,
            ready_message: Vec::new(),
            weights_changed: None,
            keeper: None,
        };
        let ranks = settings.ranks as usize;
        let watch = GroupWatch {
            failure: OnceLock::new(),
            stopping: AtomicBool::new(false),
            processes: Mutex::new((0..ranks).map(|_| None).collect()),
            bells: [results_bell.clone(), region.free_plan_slot()],
        };
        let woken = Arc::new(AtomicBool::new(false));
        let waker = {
            let (woken, bell) = (woken.clone(), results_bell.clone());
            CollectWaker::by(move || {
                woken.store(true, Ordering::Release);
                bell.ring();
            })
        };
        Self {
            watch: Arc::new(watch),
            limits: None,
            weight_update: None,
            plans: RingWriter::new(region.plans()),
            members: (0..ranks).map(member).collect(),
            results_bell,
            in_flight: VecDeque::new(),
            awaiting: None,
            history: codec::PlanHistory::default(),
            message: Vec::new(),
            clock: SharedClock::new(),
            waker,
            woken,
            polls: false,
            settings,
            watching: None,
        }
    }

    fn start_watch(&mut self, region: &GroupRegion) -> io::Result<()> {
        let (stop, stopped) = bounded(0);
        let heartbeats = (0..self.members.len()).map(|rank| region.heartbeat(rank)).collect();
        let (watch, silence_max) = (self.watch.clone(), self.settings.silence_max);
        let thread = thread::Builder::new()
            .name("baton-ranks".to_owned())
            .spawn(move || watch_heartbeats(&watch, heartbeats, silence_max, &stopped))?;
        self.watching = Some((stop, thread));
        Ok(())
    }

    fn wait_ready(&mut self) -> Result<(), GroupError> {
        let deadline = Instant::now() + self.settings.start_within;
        loop {
            self.take_answers()?;
            let missing = self.members.iter().position(|member| member.limits.is_none());
            let Some(rank) = missing else { break };
            if let Some(failure) = self.failure() {
                return Err(failure.into());
            }
            let now = Instant::now();
            if now >= deadline {
                let within = self.settings.start_within;
                let failure = RankFailure::NotReady { name: self.name(rank), within };
                return Err(self.fail(failure).into());
            }
            self.results_bell.wait(SLEEP_MAX.min(deadline - now), || self.has_news());
        }
        let mut limits = self.members.iter().filter_map(|member| member.limits);
        let first = limits.next().expect("there is a rank");
        for (rank, other) in (1..).zip(limits) {
            if other != first {
                return Err(self.fail(RankFailure::Limits { first, rank, other }).into());
            }
        }
        self.limits = Some(first);
        Ok(())
    }

    fn name(&self, rank: usize) -> RankName {
        RankName { rank: rank as u32, of: self.settings.ranks }
    }

    /// Returns whether a result, a wake-up or a failure is pending.
    fn has_news(&self) -> bool {
        self.members.iter().any(|member| member.results.has_news())
            || self.woken.load(Ordering::Acquire)
            || self.watch.has_failed()
    }

    /// Takes the answers of the ranks without waiting.
    fn take_answers(&mut self) -> Result<(), RankFailure> {
        let (answers_max, of) = (self.in_flight.len(), self.settings.ranks);
        let mut reported = Vec::new();
        for (rank, member) in (0..).zip(&mut self.members) {
            let name = RankName { rank, of };
            if let Err(failure) = member.take_answers(name, answers_max) {
                reported.push((name, failure));
            }
        }
        let Some((_, first_reported)) = reported.first() else { return Ok(()) };
        self.watch.fail(first_reported.clone());
        // Returns the first failure. But if that failure is only the end of a process, the last
        // message of this rank, or of a rank that rejected a plan, has the cause.
        let first = self.watch.failure.get().cloned();
        let Some(RankFailure::Ended { name: ended, .. }) = first else {
            return Err(first.unwrap_or_else(|| first_reported.clone()));
        };
        let more = reported.iter().find(|(name, failure)| {
            *name == ended || matches!(failure, RankFailure::BadPlan { .. })
        });
        Err(more.map(|(_, failure)| failure.clone()).or(first).expect("one was found"))
    }

    /// Returns why the group failed, if it failed.
    fn failure(&mut self) -> Option<RankFailure> {
        let failure = self.watch.failure.get()?.clone();
        // A rank that has exited may have sent the reason.
        Some(self.take_answers().err().unwrap_or(failure))
    }

    /// Returns the result of the oldest step once every rank has answered.
    fn agreed(&mut self) -> Result<Option<StepResult>, RankFailure> {
        if self.members.iter().any(|member| member.answers.is_empty()) {
            return Ok(None);
        }
        let mut answers: Vec<StepAnswer> =
            self.members.iter_mut().filter_map(|member| member.answers.pop_front()).collect();
        let Some((step_id, state)) = self.in_flight.pop_front() else {
            return Err(self.name(0).sent(format!("a result of step {}", answers[0].step_id)));
        };
        let differing = |differs: &dyn Fn(&StepAnswer) -> bool| {
            let ranks = (0..).zip(&answers).filter(|(_, answer)| differs(answer));
            ranks.map(|(rank, _)| rank).collect::<Vec<u32>>()
        };
        let tokens = answers[0].tokens;
        for (what, ranks) in [
            ("the steps", differing(&|answer| answer.step_id != step_id)),
            ("the plans", differing(&|answer| answer.state != state)),
            ("the tokens", differing(&|answer| answer.tokens != tokens)),
        ] {
            if !ranks.is_empty() {
                return Err(RankFailure::Differ { step_id, what, ranks });
            }
        }
        let Some(result) = answers[0].result.take() else {
            return Err(self.name(0).sent(format!("no result of step {step_id}")));
        };
        Ok(Some(self.to_step_result(step_id, result)))
    }

    /// Converts a result to this process: its times become `Instant`s.
    fn to_step_result(&self, step_id: StepId, result: WireResult) -> StepResult {
        let instant = |nanos| self.clock.instant(nanos);
        let device = result.device_nanos.map(|(begin, end)| {
            let begin = instant(begin);
            Span { begin, end: instant(end).max(begin) }
        });
        StepResult {
            step_id,
            rows: result.rows,
            busy: Duration::from_nanos(result.busy_nanos),
            run: StepRun {
                dispatch: result.dispatch,
                uploaded_bytes: result.uploaded_bytes,
                experts: result.experts,
                device,
                results_at: result.results_nanos.map(instant),
                collected_at: Some(Instant::now()),
            },
        }
    }

    fn fail(&self, failure: RankFailure) -> RankFailure {
        self.watch.fail(failure.clone());
        failure
    }

    fn stopped(&self, failure: RankFailure) -> ExecutorError {
        match self.fail(failure) {
            RankFailure::BadPlan { step_id, reason, .. } => {
                ExecutorError::BadPlan { step_id, reason }
            }
            failure => ExecutorError::Stopped { reason: failure.to_string() },
        }
    }
}

impl GroupRank {
    /// Takes the answers of this rank. At most `answers_max` may wait: one for each step in flight.
    fn take_answers(&mut self, name: RankName, answers_max: usize) -> Result<(), RankFailure> {
        while let Some(message) = self.results.poll()? {
            let answer =
                codec::decode_answer(message).map_err(|error| name.sent(error.to_string()))?;
            match answer {
                RankAnswer::Ready { limits, updates_in_place, ready_message }
                    if self.limits.is_none() =>
                {
                    (self.limits, self.ready_message) = (Some(limits), ready_message);
                    self.updates_in_place = updates_in_place;
                }
                RankAnswer::Ready { .. } => return Err(name.sent("a second ready message")),
                RankAnswer::Step(answer) if self.answers.len() < answers_max => {
                    self.answers.push_back(answer);
                }
                RankAnswer::MasksDue { step_id } => self.masks_due = Some(step_id),
                RankAnswer::WeightsChanged { state } => self.weights_changed = Some(state),
                RankAnswer::Step(answer) => {
                    return Err(name.sent(format!("a result of step {}", answer.step_id)));
                }
                RankAnswer::Failed(Failure::Stopped { reason }) => {
                    return Err(RankFailure::Reported { name, reason });
                }
                RankAnswer::Failed(Failure::BadPlan { step_id, reason }) => {
                    return Err(RankFailure::BadPlan { name, step_id, reason });
                }
            }
        }
        Ok(())
    }
}

impl Executor for RankGroup {
    fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        self.check()?;
        let step_id = plan.step_id;
        let depth = self.limits().depth as usize;
        if self.in_flight.len() == depth {
            let reason = format!("{depth} steps are in flight already");
            return Err(ExecutorError::BadPlan { step_id, reason });
        }
        codec::encode_plan(&plan, &mut self.history, &mut self.message);
        self.write_message()?;
        self.awaiting = plan.awaits_masks.then_some(step_id);
        self.in_flight.push_back((step_id, self.history.state()));
        Ok(())
    }

    fn supply(&mut self, step_id: StepId, masks: Vec<RowMask>) -> Result<(), ExecutorError> {
        if self.awaiting.take() != Some(step_id) {
            let reason = "the step awaits no bitmasks".to_owned();
            return Err(ExecutorError::BadPlan { step_id, reason });
        }
        codec::encode_masks(step_id, &masks, &mut self.history, &mut self.message);
        self.write_message()
    }

    fn masks_are_due(&self) -> bool {
        self.awaiting.is_some() && self.members[0].masks_due == self.awaiting
    }

    fn collect(&mut self, timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
        let began = Instant::now();
        loop {
            let agreed = self.take_answers().and_then(|()| self.agreed());
            if let Some(result) = agreed.map_err(|failure| self.stopped(failure))? {
                return Ok(Some(result));
            }
            self.check()?;
            if self.masks_are_due() {
                return Ok(None);
            }
            if self.polls && !self.in_flight.is_empty() {
                poll(began, timeout, || self.has_news());
            }
            let left = timeout.saturating_sub(began.elapsed());
            if self.woken.swap(false, Ordering::AcqRel) || left.is_zero() {
                return Ok(None);
            }
            if self.polls && self.has_news() {
                continue;
            }
            self.results_bell.wait(left.min(SLEEP_MAX), || self.has_news());
        }
    }

    fn limits(&self) -> ExecutorLimits {
        self.limits.expect("a group that has started knows its limits")
    }

    fn kv_groups(&self) -> KvGroups {
        self.settings.kv_groups.clone()
    }

    fn waker(&self) -> CollectWaker {
        self.waker.clone()
    }

    fn weight_update(&self) -> Option<Arc<dyn WeightUpdate>> {
        self.weight_update.clone().map(|update| update as Arc<dyn WeightUpdate>)
    }

    fn release_weights(&mut self) -> Result<(), ExecutorError> {
        self.change_weights(WeightChange::Release)
    }

    fn commit_weights(&mut self) -> Result<(), ExecutorError> {
        self.change_weights(WeightChange::Commit)
    }

    fn check(&mut self) -> Result<(), ExecutorError> {
        self.failure().map_or(Ok(()), |failure| Err(self.stopped(failure)))
    }
}

impl Drop for RankGroup {
    fn drop(&mut self) {
        let has_failed = self.watch.has_failed();
        self.watch.stopping.store(true, Ordering::Release);
        if !has_failed {
            // A rank that does not read it is killed below.
            let _ = self.plans.write(&codec::encode_stop(), self.settings.stop_within, || false);
        }
        if let Some((stop, thread)) = self.watching.take() {
            drop(stop);
            let _ = thread.join();
        }
        let within = if has_failed { Duration::ZERO } else { self.settings.stop_within };
        if !self.join_keepers(within) {
            self.watch.kill_all();
            if !self.join_keepers(GONE_WITHIN) {
                warn!("rank processes still run after SIGKILL");
            }
        }
    }
}

impl RankGroup {
    fn write_message(&mut self) -> Result<(), ExecutorError> {
        let watch = &self.watch;
        let has_failed = || watch.has_failed();
        if let Err(error) = self.plans.write(&self.message, self.settings.unread_max, has_failed) {
            let failure = self.failure().unwrap_or(error.into());
            return Err(self.stopped(failure));
        }
        Ok(())
    }

    /// Waits until all processes have ended; returns false after `within`.
    fn join_keepers(&mut self, within: Duration) -> bool {
        let deadline = Instant::now() + within;
        loop {
            let keepers = || self.members.iter().filter_map(|member| member.keeper.as_ref());
            if keepers().all(JoinHandle::is_finished) {
                for keeper in self.members.iter_mut().filter_map(|member| member.keeper.take()) {
                    let _ = keeper.join();
                }
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            thread::sleep(Duration::from_millis(2));
        }
    }
}
