//! A request's journey, as DESIGN.md numbers its steps.
//!
//! [`start`] is step 1 ([`prepare`]); each answer then has a [`Journey`] of its own ([`one_answer`]),
//! which makes attempts until one completes. What events mean is decided by pure state machines
//! ([`attempt`], [`emitted`], [`recovery`]); the rest is the I/O around them.

mod answer;
pub mod attempt;
pub mod emitted;
pub mod failure;
mod node_calls;
mod one_answer;
mod prepare;
pub mod recovery;

use std::sync::Arc;

use futures_util::{StreamExt, stream::FuturesUnordered};
use tokio::time::Instant;
use tracing::{Instrument, Span};

use crate::{
    admission::Admitted,
    front::Front,
    generation::{EventSender, RequestError, Running},
    record::RequestRecord,
};
use one_answer::Journey;
pub use prepare::Asked;
use prepare::{AnswerSpec, Prepared, RequestPlan, prepare};

/// A request under way.
pub struct Started {
    pub running: Running,
    /// Of choice `i` it is prompt `i / choices`.
    pub prompts: Vec<Arc<[u32]>>,
}

/// Checks the request, tokenises it and sets it going. The request runs inside `span`.
pub async fn start(
    front: &Arc<Front>,
    asked: Asked,
    mut record: RequestRecord,
    span: Span,
) -> Result<Started, RequestError> {
    record.is_for(&asked.model);
    match prepare(front, asked, &record).instrument(span.clone()).await {
        Ok(Prepared { plan, answers, prompts, admitted }) => {
            let settings = &front.settings;
            let (events_max, wait_max) =
                (settings.slow_client_events, settings.slow_client_timeout);
            let front = front.clone();
            let running = Running::start(events_max, wait_max, |events| {
                run(front, plan, answers, events, record, admitted).instrument(span)
            });
            Ok(Started { running, prompts })
        }
        Err(error) => {
            record.failed(&error);
            Err(error)
        }
    }
}

/// All answers of a request, side by side. The first that fails ends the others.
async fn run(
    front: Arc<Front>,
    plan: RequestPlan,
    answers: Vec<AnswerSpec>,
    events: EventSender,
    record: RequestRecord,
    _admitted: Admitted,
) -> Result<(), RequestError> {
    let mut journeys: FuturesUnordered<_> = answers
        .into_iter()
        .map(|spec| Journey::new(&front, &plan, spec, &events, &record).run())
        .collect();
    let all = async {
        while let Some(ended) = journeys.next().await {
            ended?;
        }
        Ok(())
    };
    let ended = tokio::select! {
        ended = all => ended,
        () = front.cut.cancelled() => Err(RequestError::Stopped),
        () = tokio::time::sleep_until(plan.deadline.at) => {
            Err(RequestError::Deadline { timeout: plan.deadline.timeout })
        }
    };
    drop(journeys);
    if let Err(error) = &ended {
        record.failed(error);
    }
    // What waits for the client takes room: it counts as a request in work until it was read. One
    // that reads ever so slowly has the request's time, and once more what an event may wait.
    let read_by = plan.deadline.at.max(Instant::now()) + front.settings.slow_client_timeout;
    let read = tokio::select! {
        read = events.read_out() => read,
        () = front.cut.cancelled() => Err(RequestError::Stopped),
        () = tokio::time::sleep_until(read_by) => {
            Err(RequestError::Deadline { timeout: plan.deadline.timeout })
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
