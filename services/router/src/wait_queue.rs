//! The answers of one model that wait for a node: the async shell around [`FairQueue`].

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use telemetry::{
    RouterMetrics,
    metrics::{InFlightRequest, KeyWaiting},
};
use tokio::sync::Notify;

use crate::{
    admission::Full,
    fair_queue::{
        self, AttemptEnd, FairQueue, Flow, FlowLimit, FlowName, LimitReached, Pass, SessionMarks,
        SessionTurn, Sessions, StartLimit, StartedPrompt, WaitLimits, WaitRequest,
    },
    lock::lock,
    request::error::{Overload, RETRY_AFTER_S},
};

/// Maximum `Retry-After` in seconds: longer predictions are unreliable.
const RETRY_AFTER_MAX_S: u32 = 60;

/// Bound on the waiting answers of all models together.
pub struct WaitLimit(Mutex<FlowLimit>);

impl WaitLimit {
    pub fn new(max: u32) -> Self {
        Self(Mutex::new(FlowLimit::new(max)))
    }
}

/// The answers of one model that wait for a node. Answers that found every node busy queue for their turn to pick
/// nodes. Answers for which no node is up wait outside the queue.
#[derive(Clone)]
pub struct WaitQueue {
    turns: Arc<Mutex<Turns>>,
    sessions: Arc<Mutex<Sessions>>,
    places: Arc<WaitLimit>,
}

#[derive(Default)]
struct Turns {
    queue: FairQueue<u64>,
    waiting: HashMap<u64, Arc<TurnSignal>>,
    next_id: u64,
}

/// Wakes one answer.
#[derive(Default)]
struct TurnSignal {
    notify: Notify,
    is_late: AtomicBool,
}

/// Turn of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Pick nodes.
    Pick,
    /// The answer could no longer start within this limit, which applied when it joined the queue.
    Late(StartLimit),
}

impl Turns {
    fn notify_next(&mut self) {
        let now = Instant::now();
        while let Some(id) = self.queue.take_late(now) {
            if let Some(answer) = self.waiting.get(&id) {
                answer.is_late.store(true, Ordering::Relaxed);
                answer.notify.notify_one();
            }
        }
        while let Some(id) = self.queue.next_turn(now) {
            if let Some(answer) = self.waiting.get(&id) {
                answer.notify.notify_one();
            }
        }
    }
}

impl WaitQueue {
    /// `places` are shared by the queues of all models.
    pub fn new(places: Arc<WaitLimit>) -> Self {
        Self { turns: Arc::default(), sessions: Arc::default(), places }
    }

    /// Records the arrival of an answer as a turn of its session. The owner calls [`Self::turn_ended`] when the answer ends.
    pub fn turn_arrived(&self, flow: &FlowName, marks: SessionMarks<'_>) -> SessionTurn {
        lock(&self.sessions).arrived(Instant::now(), flow, marks)
    }

    /// Records the end of an answer with its last full block; `None` if the answer is not complete.
    pub fn turn_ended(&self, turn: &SessionTurn, last_block: Option<u128>) {
        lock(&self.sessions).ended(turn, last_block);
    }

    /// Returns whether an answer queues for its turn: a new answer must queue, too.
    pub fn has_queue(&self) -> bool {
        !lock(&self.turns).queue.is_empty()
    }

    /// Returns whether the flow must leave the headroom of slots to others.
    pub fn leaves_headroom(&self, flow: &FlowName) -> bool {
        lock(&self.turns).queue.is_over_share(Instant::now(), flow)
    }

    /// Fails if an answer of the flow could not start in time. Called before the prompt is tokenized, because a refusal
    /// must be cheap.
    pub fn check(
        &self,
        flow: &Flow,
        output_tokens_max: u32,
        limits: WaitLimits,
    ) -> Result<(), Overload> {
        let Turns { queue, .. } = &*lock(&self.turns);
        queue
            .check(Instant::now(), flow, output_tokens_max, limits)
            .map_err(|late| overload(queue, Full::Late(late), &flow.name))
    }

    /// Returns the overload with the predicted time after which the caller may retry.
    pub fn overload(&self, full: Full, flow: &FlowName) -> Overload {
        overload(&lock(&self.turns).queue, full, flow)
    }

    /// Returns the predicted time until the queue is served, in seconds.
    pub fn retry_after_s(&self) -> u32 {
        retry_after_s(lock(&self.turns).queue.drain_time(None))
    }

    /// Takes a place among the waiting answers.
    pub fn enter(
        &self,
        request: WaitRequest,
        metrics: &RouterMetrics,
        of_key: Option<KeyWaiting>,
    ) -> Result<Waiting, Overload> {
        let mut places = lock(&self.places.0);
        let flow = &request.flow;
        match request.has_begun {
            true => places.add(flow, 1),
            false => {
                let max = places.max();
                places.take(flow, 1).map_err(|reached| {
                    let full = match reached {
                        LimitReached::All => Full::Waiting { max },
                        LimitReached::Share => Full::ShareWaiting { max },
                    };
                    self.overload(full, &flow.name)
                })?;
            }
        }
        drop(places);
        let place = Place { places: self.places.clone(), flow: flow.name.clone() };
        Ok(Waiting {
            queue: self.clone(),
            request,
            queued: None,
            _place: place,
            _counted: metrics.request_waiting(),
            _of_key: of_key,
        })
    }

    /// Charges the flow for an answer that starts on nodes, until the charge is dropped.
    pub fn start(&self, flow: &Flow, prompt: StartedPrompt, output_tokens_max: u32) -> Charge {
        let queue = &mut lock(&self.turns).queue;
        let charge = queue.start(Instant::now(), flow, prompt, output_tokens_max);
        Charge { turns: self.turns.clone(), charge, end: AttemptEnd::Cut }
    }
}

fn overload(queue: &FairQueue<u64>, full: Full, flow: &FlowName) -> Overload {
    let after = match full {
        Full::Late(late) => Some(late.excess()),
        _ if full.is_of_caller() => queue.drain_time(Some(flow)),
        _ => queue.drain_time(None),
    };
    Overload { full, retry_after_s: retry_after_s(after) }
}

fn retry_after_s(after: Option<Duration>) -> u32 {
    let seconds = after.map_or(0, |after| after.as_secs_f64().ceil() as u32);
    seconds.clamp(RETRY_AFTER_S, RETRY_AFTER_MAX_S)
}

/// A place among the waiting answers, until dropped.
pub struct Waiting {
    queue: WaitQueue,
    request: WaitRequest,
    queued: Option<Queued>,
    _place: Place,
    _counted: InFlightRequest,
    _of_key: Option<KeyWaiting>,
}

impl Waiting {
    /// Joins the queue, unless the answer could not start in time. An answer in the queue keeps its place, and its turn
    /// passes to other answers.
    pub fn queue(&mut self, pass: Pass) -> Result<(), Overload> {
        let mut turns = lock(&self.queue.turns);
        let now = Instant::now();
        if let Some(Queued { id, .. }) = self.queued {
            turns.queue.passed(now, id, pass);
        } else {
            let (id, signal) = (turns.next_id, Arc::new(TurnSignal::default()));
            let joined = turns.queue.join(now, id, &self.request);
            let flow = &self.request.flow.name;
            let limit = joined.map_err(|late| overload(&turns.queue, Full::Late(late), flow))?;
            turns.next_id += 1;
            turns.waiting.insert(id, signal.clone());
            self.queued = Some(Queued { turns: self.queue.turns.clone(), id, signal, limit });
        }
        turns.notify_next();
        Ok(())
    }

    /// Gives the next turns, because nodes may have capacity again.
    pub fn retry_passed(&self) {
        let mut turns = lock(&self.queue.turns);
        turns.queue.retry_passed();
        turns.notify_next();
    }

    /// Leaves the queue, and gives the turn to the next answer.
    pub fn leave_queue(&mut self) {
        self.queued = None;
    }

    /// Blocks until it is the turn of this answer. Blocks forever outside of the queue. Cancel-safe.
    pub async fn turn(waiting: &Option<Self>) -> Turn {
        let queued = waiting.as_ref().and_then(|waiting| waiting.queued.as_ref());
        let Some(Queued { signal, limit, .. }) = queued else {
            return std::future::pending().await;
        };
        signal.notify.notified().await;
        if signal.is_late.load(Ordering::Relaxed) { Turn::Late(*limit) } else { Turn::Pick }
    }
}

/// An answer in the queue, until dropped.
struct Queued {
    turns: Arc<Mutex<Turns>>,
    id: u64,
    signal: Arc<TurnSignal>,
    limit: StartLimit,
}

impl Drop for Queued {
    fn drop(&mut self) {
        let mut turns = lock(&self.turns);
        turns.waiting.remove(&self.id);
        turns.queue.leave(self.id);
        turns.notify_next();
    }
}

struct Place {
    places: Arc<WaitLimit>,
    flow: FlowName,
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.places.0).release(&self.flow, 1);
    }
}

/// Charge of an attempt to its flow, until dropped. Dropping it gives the next answer its turn, so the owner releases
/// the attempt's nodes first.
pub struct Charge {
    turns: Arc<Mutex<Turns>>,
    charge: fair_queue::Charge,
    end: AttemptEnd,
}

impl Charge {
    /// Counts tokens that the attempt emitted.
    pub fn emitted(&mut self, count: u32) {
        self.charge.emitted(Instant::now(), count);
    }

    /// Records how the attempt ended.
    pub fn ended(&mut self, end: AttemptEnd) {
        self.end = end;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut turns = lock(&self.turns);
        turns.queue.ended(Instant::now(), &self.charge, self.end);
        turns.queue.retry_passed();
        turns.notify_next();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::test_metrics;

    const PROMPT: StartedPrompt = StartedPrompt { tokens: 100, uncached_tokens: 100 };

    fn queue(places: u32) -> WaitQueue {
        WaitQueue::new(Arc::new(WaitLimit::new(places)))
    }

    fn request(flow: &Flow, start_in: Duration) -> WaitRequest {
        WaitRequest {
            flow: flow.clone(),
            prompt_tokens: 100,
            output_tokens_max: 1,
            limits: within(start_in),
            has_begun: false,
            session_since: None,
        }
    }

    fn waiting(queue: &WaitQueue, flow: &Flow, start_in: Duration) -> Result<Waiting, Overload> {
        let metrics = test_metrics();
        let mut waiting = queue.enter(request(flow, start_in), &metrics, None)?;
        waiting.queue(Pass::NoNode).map(|()| waiting)
    }

    /// Returns limits of an answer that must start within this time.
    fn within(wait_max: Duration) -> WaitLimits {
        WaitLimits { wait_max, deadline: Instant::now() + Duration::from_secs(600) }
    }

    const LONG: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn turn_passes_to_the_next_flow_and_returns() {
        let (queue, a, b) = (queue(8), Flow::new(FlowName::Shared), tenant("b"));
        let mut first = Some(waiting(&queue, &a, LONG).unwrap());
        assert_eq!(Waiting::turn(&first).await, Turn::Pick);
        first.as_mut().unwrap().queue(Pass::NoNode).unwrap();
        let second = Some(waiting(&queue, &b, LONG).unwrap());
        Waiting::turn(&second).await;
        let none = tokio::time::timeout(Duration::ZERO, Waiting::turn(&first)).await;
        assert!(none.is_err(), "its turn has passed");
        first.as_ref().unwrap().retry_passed();
        Waiting::turn(&first).await;
        assert!(queue.has_queue());
        drop((first, second));
        assert!(!queue.has_queue());
    }

    fn tenant(name: &str) -> Flow {
        Flow::new(FlowName::Tenant(name.into()))
    }

    #[tokio::test]
    async fn answer_that_cannot_start_in_time_is_refused_before_it_queues() {
        let (queue, flow) = (queue(8), tenant("a"));
        // One attempt runs, and attempts took a second for 102 tokens.
        let a_second_ago = Instant::now() - Duration::from_secs(1);
        let mut charge = lock(&queue.turns).queue.start(a_second_ago, &flow, PROMPT, 1);
        charge.emitted(Instant::now(), 1);
        drop(Charge { turns: queue.turns.clone(), charge, end: AttemptEnd::Complete });
        let _running = queue.start(&flow, PROMPT, 1);
        // Requests wait since then.
        let first = request(&flow, LONG);
        lock(&queue.turns).queue.join(a_second_ago, u64::MAX, &first).unwrap();
        let _waiting: Vec<_> = (0..4).map(|_| waiting(&queue, &flow, LONG).unwrap()).collect();
        let refused = waiting(&queue, &flow, Duration::from_secs(2)).err().unwrap();
        assert!(matches!(refused.full, Full::Late(_)), "{refused}");
        assert!((3..=4).contains(&refused.retry_after_s), "{refused}");
        assert!(!refused.full.is_of_caller());
        let soon = within(Duration::from_secs(2));
        assert!((3..=4).contains(&queue.check(&flow, 1, soon).unwrap_err().retry_after_s));
        queue.check(&flow, 1, within(LONG)).unwrap();
        queue.check(&tenant("b"), 1, soon).unwrap();
        // An answer takes a second, so that it must start before its deadline.
        let deadline = Instant::now() + Duration::from_millis(5500);
        let limits = WaitLimits { wait_max: LONG, deadline };
        let late = WaitRequest { limits, ..request(&flow, LONG) };
        let refused =
            queue.enter(late, &test_metrics(), None).unwrap().queue(Pass::NoNode).unwrap_err();
        assert_eq!(refused.retry_after_s, 1, "{refused}");
        // Another flow makes it the caller's own limit.
        let _other = waiting(&queue, &tenant("b"), LONG).unwrap();
        let refused = waiting(&queue, &flow, Duration::from_secs(2)).err().unwrap();
        assert!(matches!(refused.full, Full::Late(_)) && refused.full.is_of_caller(), "{refused}");
    }

    #[tokio::test]
    async fn refusal_for_a_short_deadline_tells_service_time_and_deadline() {
        let (queue, flow) = (queue(8), tenant("a"));
        // The last request took five seconds, and the queue is empty.
        let started = Instant::now() - Duration::from_secs(5);
        let mut charge = lock(&queue.turns).queue.start(started, &flow, PROMPT, 1);
        charge.emitted(Instant::now(), 1);
        drop(Charge { turns: queue.turns.clone(), charge, end: AttemptEnd::Complete });
        let deadline = Instant::now() + Duration::from_secs(2);
        let limits = WaitLimits { wait_max: LONG, deadline };
        let short = WaitRequest { limits, ..request(&flow, LONG) };
        let mut waiting = queue.enter(short, &test_metrics(), None).unwrap();
        let refused = waiting.queue(Pass::NoNode).unwrap_err();
        let Full::Late(late) = refused.full else { panic!("{refused}") };
        let StartLimit::Deadline { time_left, service_time } = late.limit else {
            panic!("{refused}");
        };
        assert!(time_left <= Duration::from_secs(2), "{refused}");
        assert!(service_time >= Duration::from_secs(5), "{refused}");
        let said = format!(
            "the request cannot complete before its deadline in {} ms: after a wait of 0 ms for a node it would take \
             up to {} ms; expected a later deadline, a shorter prompt or fewer output tokens; retry after {} s",
            time_left.as_millis(),
            service_time.as_millis(),
            refused.retry_after_s
        );
        assert_eq!(refused.to_string(), said);
        assert!(refused.retry_after_s >= 3, "{refused}");
        assert!(!queue.has_queue() && !refused.full.is_of_caller());
    }

    #[tokio::test]
    async fn places_are_bounded_and_free_when_dropped() {
        let (queue, flow) = (queue(2), Flow::new(FlowName::Shared));
        let both = [waiting(&queue, &flow, LONG).unwrap(), waiting(&queue, &flow, LONG).unwrap()];
        let refused = waiting(&queue, &flow, LONG).err().unwrap();
        assert_eq!((refused.full, refused.retry_after_s), (Full::Waiting { max: 2 }, 1));
        let begun = WaitRequest { has_begun: true, ..request(&flow, LONG) };
        let _begun = queue.enter(begun, &test_metrics(), None).unwrap();
        drop(both);
        waiting(&queue, &flow, LONG).unwrap();
    }
}
