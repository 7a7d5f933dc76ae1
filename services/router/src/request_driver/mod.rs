//! Runs requests: the async shell around the request core.
//!
//! A request passes these stages:
//! 1. [`ParsedRequest`]: `http` or `grpc` parsed and checked its fields.
//! 2. [`PreparedRequest`](prepare::PreparedRequest): it is admitted and tokenized, with one
//!    [`PreparedAnswer`](prepare::PreparedAnswer) for each choice.
//! 3. [`RunningRequest`]: one task runs an [`AnswerDriver`] for each answer, until all are finished or one
//!    fails. The driver performs the outputs of its [`RequestCore`](crate::request_core::RequestCore).

mod answer_driver;
mod answer_text;
mod node_calls;
mod prepare;

use std::sync::Arc;

use futures_util::{StreamExt, stream::FuturesUnordered};
use tokio::time::Instant;
use tracing::{Instrument, Span};

use crate::{
    front::Front,
    generation::{EventSender, RequestError, RunningRequest},
    record::RequestRecord,
};
use answer_driver::AnswerDriver;
pub use prepare::ParsedRequest;
use prepare::{PreparedAnswer, PreparedRequest, prepare};

/// Prepares the request and starts its task inside `span`.
pub async fn start(
    front: &Arc<Front>,
    parsed: ParsedRequest,
    mut record: RequestRecord,
    span: Span,
) -> Result<RunningRequest, RequestError> {
    record.set_model(&parsed.model);
    let choices = parsed.choices as usize;
    match prepare(front, parsed, &record).instrument(span.clone()).await {
        Ok((request, answers)) => {
            let prompts = answers.iter().step_by(choices).map(|answer| answer.prompt.clone());
            let prompts = prompts.collect();
            let settings = &front.settings;
            let (events_max, wait_max) =
                (settings.slow_client_events, settings.slow_client_timeout);
            let front = front.clone();
            Ok(RunningRequest::start(prompts, events_max, wait_max, |events| {
                run(front, request, answers, events, record).instrument(span)
            }))
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
    answers: Vec<PreparedAnswer>,
    events: EventSender,
    record: RequestRecord,
) -> Result<(), RequestError> {
    let mut drivers: FuturesUnordered<_> = answers
        .into_iter()
        .map(|answer| AnswerDriver::new(&front, &request, answer, &events, &record).run())
        .collect();
    let all = async {
        while let Some(ended) = drivers.next().await {
            ended?;
        }
        Ok(())
    };
    let ended = tokio::select! {
        ended = all => ended,
        () = front.cut.cancelled() => Err(RequestError::Stopped),
    };
    drop(drivers);
    if let Err(error) = &ended {
        record.failed(error);
    }
    // Events that wait for the client take memory, so the request stays in flight until they are read.
    // A client that reads slowly has until the deadline, and once more the time-out of one event.
    let read_by = request.deadline.at.max(Instant::now()) + front.settings.slow_client_timeout;
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
