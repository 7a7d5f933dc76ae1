//! Runs requests: the async shell around the request core.
//!
//! A request passes these stages:
//! 1. [`ParsedRequest`]: `http` or `grpc` parsed and checked its fields.
//! 2. [`PreparedRequest`](prepare::PreparedRequest): it is admitted and tokenized, with one
//!    [`AnswerSpec`](crate::request_core::AnswerSpec) for each choice.
//! 3. [`RunningRequest`]: one task runs an [`AnswerDriver`] for each answer, until all are finished or one
//!    fails. The driver performs the outputs of its [`RequestCore`](crate::request_core::RequestCore).

mod answer_driver;
mod answer_text;
mod events;
mod prepare;

use std::sync::Arc;

use futures_util::future::try_join_all;
use tokio::{task::JoinHandle, time::Instant};
use tracing::{Instrument, Span};

use crate::{
    front::Front,
    record::RequestRecord,
    request::{
        error::RequestError,
        tools::{CallReader, CallReading},
    },
    request_core::AnswerSpec,
    wake::when_woken,
};
use answer_driver::AnswerDriver;
pub use events::{AnswerEnd, AnswerTokens, Event, StoppedBy};
use events::{EventReceiver, EventSender, event_queue};
pub use prepare::{Deadline, GenerationFields, ParsedRequest};
use prepare::{PreparedRequest, prepare};

/// A running request, for the writer of its response. Dropping it ends the task, which drops the node
/// streams: a client that leaves cancels its request this way.
#[derive(Debug)]
pub struct RunningRequest {
    /// The tokenized prompts. The prompt of choice `i` is prompt `i / choices`.
    pub prompts: Vec<Arc<[u32]>>,
    /// Settings for parsing tool calls; `None` without tools.
    calls: Option<CallReading>,
    events: EventReceiver,
    task: Option<JoinHandle<Result<(), RequestError>>>,
}

/// Prepares the request and starts its task inside `span`.
pub async fn start(
    front: &Arc<Front>,
    parsed: ParsedRequest,
    mut record: RequestRecord,
    span: Span,
) -> Result<RunningRequest, RequestError> {
    record.set_model(&parsed.model);
    let choices = parsed.fields.choices as usize;
    match prepare(front, parsed, &record).instrument(span.clone()).await {
        Ok((request, answers)) => {
            let prompts = answers.iter().step_by(choices).map(|answer| answer.prompt.clone());
            let prompts = prompts.collect();
            let settings = &front.settings.router;
            let events_max = settings.slow_client_events as usize;
            let (sender, events) = event_queue(events_max, settings.slow_client_timeout);
            let calls = request.calls.clone();
            // Entering the span at each token would cost more than the token's text.
            let run = run(front.clone(), request, answers, sender, record);
            Ok(RunningRequest { prompts, calls, events, task: Some(tokio::spawn(run)) })
        }
        Err(error) => {
            record.failed(&error);
            Err(error)
        }
    }
}

/// Runs all answers of a request concurrently. The first that fails ends the others.
async fn run(
    front: Arc<Front>,
    request: PreparedRequest,
    answers: Vec<AnswerSpec>,
    events: EventSender,
    record: RequestRecord,
) -> Result<(), RequestError> {
    let driver = |(choice, answer)| {
        AnswerDriver::new(&front, &request, choice, answer, &events, &record).run()
    };
    let all = try_join_all((0..).zip(answers).map(driver));
    let ended = tokio::select! {
        biased;
        ended = all => ended.map(drop),
        () = when_woken(front.cut.cancelled()) => Err(RequestError::Stopped),
    };
    if let Err(error) = &ended {
        record.failed(error);
    }
    // Events that wait for the client take memory, so the request stays in flight until they are read.
    // A client that reads slowly has until the deadline, and once more the time-out of one event.
    let read_by =
        request.deadline.at.max(Instant::now()) + front.settings.router.slow_client_timeout;
    let read = tokio::select! {
        read = events.read_out() => read,
        () = front.cut.cancelled() => Err(RequestError::Stopped),
        () = tokio::time::sleep_until(read_by) => {
            Err(RequestError::Deadline { timeout: request.deadline.timeout })
        }
    };
    if read.is_err() {
        events.discard();
    }
    if let (Ok(()), Err(error)) = (&ended, &read) {
        record.failed(error);
    }
    ended.and(read)
}

impl RunningRequest {
    /// Returns the parser of the calls in this answer; `None` without tools.
    pub fn call_reader(&self, choice: u32) -> Option<CallReader> {
        self.calls.as_ref().map(|reading| CallReader::new(reading, choice))
    }

    /// Returns the next event if one is queued.
    pub fn next_queued(&mut self) -> Option<Event> {
        self.events.recv_queued()
    }

    /// Returns the next event; at the end `None`, or the one error that the request failed with.
    /// Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<Event, RequestError>> {
        if let Some(event) = self.events.recv().await {
            return Some(Ok(event));
        }
        let ended = self.task.as_mut()?.await;
        self.task = None;
        match ended {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(Err(error)),
            Err(error) => Some(Err(RequestError::Internal { reason: error.to_string() })),
        }
    }
}

impl Drop for RunningRequest {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn start<F>(work: impl FnOnce(EventSender) -> F) -> RunningRequest
    where
        F: Future<Output = Result<(), RequestError>> + Send + 'static,
    {
        let (sender, events) = event_queue(1, WAIT_MAX);
        RunningRequest {
            prompts: vec![],
            calls: None,
            events,
            task: Some(tokio::spawn(work(sender))),
        }
    }

    const WAIT_MAX: Duration = Duration::from_millis(20);

    fn tokens(choice: u32) -> Event {
        Event::Tokens(AnswerTokens { choice, first_index: 0, tokens: vec![], text: "t".into() })
    }

    #[tokio::test(start_paused = true)]
    async fn events_come_in_order_and_then_the_end() {
        let mut running = start(|events| async move {
            for choice in 0..5 {
                events.send(tokens(choice)).await?;
            }
            Err(RequestError::Stopped)
        });
        for choice in 0..5 {
            assert_eq!(running.next().await, Some(Ok(tokens(choice))));
        }
        assert_eq!(running.next().await, Some(Err(RequestError::Stopped)));
        assert_eq!(running.next().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_does_not_read_ends_its_own_request() {
        let mut running = start(|events| async move {
            loop {
                events.send(tokens(0)).await?;
            }
        });
        tokio::time::sleep(WAIT_MAX * 4).await;
        assert_eq!(running.next().await, Some(Ok(tokens(0))));
        assert_eq!(running.next().await, Some(Err(RequestError::SlowClient { waited: WAIT_MAX })));
    }

    #[tokio::test]
    async fn dropping_the_reader_ends_the_work() {
        let (alive, ended) = tokio::sync::oneshot::channel::<()>();
        let running = start(|_| async move {
            let _alive = alive;
            std::future::pending().await
        });
        drop(running);
        assert!(ended.await.is_err());
    }

    #[tokio::test]
    async fn a_panic_inside_is_an_error_of_this_request_alone() {
        let mut running = start(|_| async move { panic!("a bug") });
        assert!(matches!(running.next().await, Some(Err(RequestError::Internal { .. }))));
    }
}
