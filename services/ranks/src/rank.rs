//! A rank process.
//!
//! The main thread drives the executor. A second thread reads plans, so that the next step is
//! launched while a step computes. A third thread writes the heartbeat, and a fourth one prepares
//! new weights.

use std::{
    collections::VecDeque,
    io,
    panic::{self, AssertUnwindSafe},
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded};
use engine::{
    executor::{CollectWaker, Executor, ExecutorError, panic_message},
    plan::{StepId, StepPlan, StepResult},
};
use tracing::debug;

use crate::{
    codec::{
        self, DecodeError, Failure, RankAnswer, RankOrder, StepAnswer, WeightChange, WireResult,
    },
    process::{self, SharedClock},
    rank_spec::RankSpec,
    region::{GroupRegion, JoinError, build},
    ring::{RingError, RingReader, RingWriter},
    weight_work,
};

/// Interval of heartbeats.
pub(crate) const HEARTBEAT: Duration = Duration::from_millis(50);
/// Time to spin for a plan before sleeping. A step takes far longer, so spinning only helps if the
/// next plan follows at once.
const SPIN: Duration = Duration::from_micros(10);
/// Maximum length of one wait. A time-out does not end the process: the node stops it, or the
/// kernel kills it when the node dies.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(1);

/// Reason why a rank process ends before the node stops it.
#[derive(Debug, thiserror::Error)]
pub enum RankError {
    #[error("the node that started the rank has ended: {0}")]
    Parent(io::Error),
    #[error(transparent)]
    Join(#[from] JoinError),
    #[error("ring: {0}")]
    Ring(#[from] RingError),
    #[error("cannot decode a message of the node: {0}")]
    Order(#[from] DecodeError),
    #[error("invalid message order: expected one start message, before all plans")]
    NoStart,
    #[error("step {step_id}: wrong hash of the plans: one is missing, repeated or corrupt")]
    State { step_id: StepId },
    #[error(
        "cannot change the weights: wrong hash of the plans; a plan is missing, repeated or corrupt"
    )]
    Weights,
    #[error("preparing weights: {0}")]
    WeightPanic(String),
    #[error("cannot start: {0}")]
    Executor(String),
    #[error(transparent)]
    Device(#[from] ExecutorError),
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}

/// Runs a rank until the node stops it: joins the group, makes the executor from the node's start
/// message, and runs steps. The process dies with the node. `make` returns the executor and a
/// message of up to a few KB for the node.
pub fn run_rank<E: Executor>(
    spec: &RankSpec,
    make: impl FnOnce(&[u8]) -> Result<(E, Vec<u8>), String>,
) -> Result<(), RankError> {
    process::ignore_stop_signals();
    process::die_with_parent(spec.region.owner).map_err(RankError::Parent)?;
    process::set_name(&format!("baton-rank-{}", spec.rank));
    let region = GroupRegion::open(spec, build())?;
    let rank = spec.rank as usize;
    start_heartbeat(&region, rank)?;
    let mut orders = RingReader::new(region.plans(), rank);
    let mut answers = RingWriter::new(region.results(rank));
    let start_message = loop {
        let Some(message) = orders.read(WAIT_MAX, Duration::ZERO)? else { continue };
        match codec::decode_order(message, &mut codec::PlanHistory::default())? {
            RankOrder::Start(message) => break message,
            RankOrder::Stop => return Ok(()),
            RankOrder::Plan { .. } | RankOrder::Masks { .. } | RankOrder::Weights { .. } => {
                return Err(RankError::NoStart);
            }
        }
    };
    let outcome = match make(&start_message) {
        Ok((executor, ready_message)) => {
            debug!(rank, of = spec.of, "the rank is ready");
            let rank = Rank {
                executor,
                answers: &mut answers,
                sends_results: rank == 0,
                clock: SharedClock::new(),
                in_flight: VecDeque::new(),
                awaiting: None,
                tokens: 0,
            };
            let weights = (
                RingReader::new(region.weight_orders(), spec.rank as usize),
                RingWriter::new(region.weight_answers(spec.rank as usize)),
            );
            rank.run(orders, weights, ready_message)
        }
        Err(reason) => Err(RankError::Executor(reason)),
    };
    if let Err(error) = &outcome {
        let failure = match error {
            RankError::Device(error) => Failure::from(error),
            other => Failure::Stopped { reason: other.to_string() },
        };
        // The node detects the end of this process; the message carries the reason.
        let _ = send(&mut answers, &RankAnswer::Failed(failure));
    }
    outcome
}

fn start_heartbeat(region: &GroupRegion, rank: usize) -> Result<(), RankError> {
    let heartbeat = region.heartbeat(rank);
    // The node checks the heartbeat from its first beat on.
    heartbeat[0].fetch_add(1, Ordering::Relaxed);
    let beat = move || loop {
        thread::sleep(HEARTBEAT);
        heartbeat[0].fetch_add(1, Ordering::Relaxed);
    };
    let thread = thread::Builder::new().name("baton-heartbeat".to_owned()).spawn(beat);
    thread.map(drop).map_err(RankError::Thread)
}

fn send(answers: &mut RingWriter, answer: &RankAnswer) -> Result<(), RingError> {
    let message = codec::encode_answer(answer);
    // No deadline: the node reads answers as long as it lives, and the rank dies with the node.
    answers.write(&message, Duration::MAX, || false)
}

/// Message of the thread that reads plans.
type ReadOrder = Result<RankOrder, RankError>;

struct Rank<'a, E> {
    executor: E,
    answers: &'a mut RingWriter,
    /// Whether this rank sends results. Only one rank does; all ranks send hashes.
    sends_results: bool,
    clock: SharedClock,
    /// Steps in flight: id and state hash.
    in_flight: VecDeque<(StepId, u64)>,
    /// The step launched last, until its token bitmasks arrive, and whether the node knows that
    /// they are due.
    awaiting: Option<(StepId, bool)>,
    tokens: u64,
}

impl<E: Executor> Rank<'_, E> {
    fn run(
        mut self,
        orders: RingReader,
        (weight_orders, weight_answers): (RingReader, RingWriter),
        ready_message: Vec<u8>,
    ) -> Result<(), RankError> {
        let limits = self.executor.limits();
        let update = self.executor.weight_update();
        let updates_in_place = update.as_ref().map(|update| update.is_in_place());
        send(self.answers, &RankAnswer::Ready { limits, updates_in_place, ready_message })?;
        let depth = limits.depth as usize;
        // Each plan may be followed by its bitmasks.
        let (planned, plans) = bounded(2 * depth + 1);
        let waker = self.executor.waker();
        if let Some(update) = update {
            let (planned, waker) = (planned.clone(), waker.clone());
            let carry_out = move || {
                let carry_out = || weight_work::carry_out(weight_orders, weight_answers, &*update);
                // Catch a panic: the node would otherwise wait for an answer of this thread.
                let error = panic::catch_unwind(AssertUnwindSafe(carry_out))
                    .unwrap_or_else(|panic| RankError::WeightPanic(panic_message(&*panic)));
                // The main thread has ended, or ends the process now.
                let _ = planned.send(Err(error));
                waker.wake();
            };
            let thread = thread::Builder::new().name("baton-weights".to_owned());
            thread.spawn(carry_out).map_err(RankError::Thread)?;
        }
        thread::Builder::new()
            .name("baton-plans".to_owned())
            .spawn(move || read_orders(orders, &planned, &waker))
            .map_err(RankError::Thread)?;
        let mut stopping = false;
        loop {
            while !stopping && (self.in_flight.len() < depth || self.awaiting.is_some()) {
                let Some(order) = self.next_order(&plans)? else { break };
                match order {
                    RankOrder::Plan { plan, state, .. } => self.launch(plan, state)?,
                    RankOrder::Masks { step_id, masks, .. } => {
                        self.awaiting = None;
                        self.executor.supply(step_id, masks)?;
                    }
                    RankOrder::Weights { change, state, .. } => {
                        debug_assert!(self.in_flight.is_empty(), "weights change between steps");
                        match change {
                            WeightChange::Release => self.executor.release_weights()?,
                            WeightChange::Commit => self.executor.commit_weights()?,
                        }
                        send(self.answers, &RankAnswer::WeightsChanged { state })?;
                    }
                    RankOrder::Stop => stopping = true,
                    RankOrder::Start(_) => return Err(RankError::NoStart),
                }
            }
            if self.in_flight.is_empty() {
                if stopping {
                    return Ok(());
                }
            } else if let Some(result) = self.executor.collect(WAIT_MAX)? {
                self.answer(result)?;
            }
            self.report_due_masks()?;
        }
    }

    /// Tells the node once when the step launched last waits for its token bitmasks only.
    fn report_due_masks(&mut self) -> Result<(), RankError> {
        let is_due = self.sends_results && self.executor.masks_are_due();
        if let Some((step_id, is_told @ false)) = &mut self.awaiting
            && is_due
        {
            *is_told = true;
            send(self.answers, &RankAnswer::MasksDue { step_id: *step_id })?;
        }
        Ok(())
    }

    /// Returns the next order. Waits for it when no step is in flight.
    fn next_order(&self, plans: &Receiver<ReadOrder>) -> Result<Option<RankOrder>, RankError> {
        let order = if self.in_flight.is_empty() {
            plans.recv().map_err(|_| TryRecvError::Disconnected)
        } else {
            plans.try_recv()
        };
        match order {
            Ok(order) => order.map(Some),
            Err(TryRecvError::Empty) => Ok(None),
            // The reader ends after it has passed on Stop or an error.
            Err(TryRecvError::Disconnected) => Ok(Some(RankOrder::Stop)),
        }
    }

    fn launch(&mut self, plan: StepPlan, state: u64) -> Result<(), RankError> {
        let step_id = plan.step_id;
        self.awaiting = plan.awaits_masks.then_some((step_id, false));
        self.executor.launch(plan)?;
        self.in_flight.push_back((step_id, state));
        Ok(())
    }

    fn answer(&mut self, result: StepResult) -> Result<(), RankError> {
        let (step_id, state) = self.in_flight.pop_front().expect("a result belongs to a step");
        debug_assert_eq!(step_id, result.step_id, "results come in order");
        self.tokens = codec::hash_tokens(self.tokens, &result.rows);
        let result = self.sends_results.then(|| {
            let nanos = |at: Instant| self.clock.nanos(at);
            let run = result.run;
            WireResult {
                rows: result.rows,
                busy_nanos: result.busy.as_nanos() as u64,
                dispatch: run.dispatch,
                uploaded_bytes: run.uploaded_bytes,
                experts: run.experts,
                device_nanos: run.device.map(|span| (nanos(span.begin), nanos(span.end))),
                results_nanos: run.results_at.map(nanos),
            }
        });
        let answer = StepAnswer { step_id, state, tokens: self.tokens, result };
        Ok(send(self.answers, &RankAnswer::Step(answer))?)
    }
}

/// Reads orders and passes them on until Stop or an error, which it passes on as well.
fn read_orders(mut orders: RingReader, planned: &Sender<ReadOrder>, waker: &CollectWaker) {
    let mut history = codec::PlanHistory::default();
    loop {
        let order = match orders.read(WAIT_MAX, SPIN) {
            Ok(None) => continue,
            Ok(Some(message)) => checked_order(message, &mut history),
            Err(error) => Err(error.into()),
        };
        let is_last = !matches!(
            order,
            Ok(RankOrder::Plan { .. } | RankOrder::Masks { .. } | RankOrder::Weights { .. })
        );
        if planned.send(order).is_err() || is_last {
            waker.wake();
            return;
        }
        waker.wake();
    }
}

fn checked_order(message: &[u8], history: &mut codec::PlanHistory) -> Result<RankOrder, RankError> {
    let order = codec::decode_order(message, history)?;
    match &order {
        RankOrder::Plan { plan, state, found } if state != found => {
            Err(RankError::State { step_id: plan.step_id })
        }
        RankOrder::Masks { step_id, state, found, .. } if state != found => {
            Err(RankError::State { step_id: *step_id })
        }
        RankOrder::Weights { state, found, .. } if state != found => Err(RankError::Weights),
        _ => Ok(order),
    }
}
