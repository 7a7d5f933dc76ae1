//! A request in flight: its answers as events, from a task that ends with its reader.
//!
//! Every request has a task of its own, which generates all of its answers. Events leave through a bounded
//! queue. Dropping the [`RunningRequest`] ends the task, which drops the node streams: a client that
//! leaves cancels its request this way.

use std::{sync::Arc, time::Duration};

use proto::v1::{FinishReason, Token};
use tokio::{task::JoinHandle, time::Instant};

use crate::{
    admission::Full,
    event_queue::{NotTaken, Receiver, Sender, event_queue},
    request::field_error::FieldError,
    request_core::HandOverStats,
};

/// An event of one of the request's answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Tokens(AnswerTokens),
    Finished(AnswerEnd),
}

/// Emitted tokens, and the text that they complete.
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerTokens {
    /// Index of the answer among the answers of the request.
    pub choice: u32,
    /// Index of the first token in the whole answer.
    pub first_index: u32,
    pub tokens: Vec<Token>,
    /// Empty while a character, or a possible stop string, is incomplete.
    pub text: String,
}

/// The end of a complete answer.
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerEnd {
    pub choice: u32,
    pub reason: FinishReason,
    /// The stop token or stop string of the client that ended the answer.
    pub stopped_by: Option<StoppedBy>,
    /// The rest of the text, which was held back.
    pub text: String,
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    /// Prompt tokens found in a prefix cache.
    pub cached_tokens: u32,
    pub hand_over: HandOverStats,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoppedBy {
    Token(u32),
    Text(String),
}

/// Why a request is rejected or fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    #[error("{0}")]
    Field(#[from] FieldError),
    #[error("the model {model:?} does not exist; served: {}", served.join(", "))]
    UnknownModel { model: String, served: Vec<String> },
    #[error("{0}")]
    Full(#[from] Full),
    #[error("all nodes are busy, for {} ms now", waited.as_millis())]
    Busy { waited: Duration },
    #[error("no decode node was available for {} ms", waited.as_millis())]
    NoDecodeNode { waited: Duration },
    #[error(
        "{field} cannot be served now: no decode node of the model says that it holds answers to such a \
         grammar; nodes of an older release do not"
    )]
    NoGrammar { field: &'static str },
    #[error("{attempts} attempts in a row failed; the last: {last}")]
    AttemptsSpent { attempts: u32, last: String },
    /// A node can never serve the request.
    #[error("a node refused the request: {reason}")]
    Refused { reason: String },
    #[error("the request did not complete within its {} ms", timeout.as_millis())]
    Deadline { timeout: Duration },
    #[error("a node contradicted an emitted token: {reason}")]
    Contradiction { reason: String },
    #[error("the client did not read its stream for {} ms", waited.as_millis())]
    SlowClient { waited: Duration },
    #[error("the client left")]
    ClientGone,
    /// The prompt or the messages cannot be rendered or tokenized.
    #[error("{reason}")]
    Text {
        /// The invalid field, if one is known.
        field: Option<&'static str>,
        reason: String,
    },
    #[error("the router stopped before the request was complete")]
    Stopped,
    #[error("the router failed: {reason}")]
    Internal { reason: String },
}

/// Sends the events of a request. Bounded: a client that does not read blocks its own request.
#[derive(Debug)]
pub struct EventSender {
    events: Sender<Event>,
    /// How long the client may read nothing while events are queued.
    wait_max: Duration,
}

impl EventSender {
    pub async fn send(&self, event: Event) -> Result<(), RequestError> {
        self.events.send(event, self.wait_max).await.map_err(|why| self.error(why))
    }

    /// Drops the events that the client did not read.
    pub fn discard(&self) {
        self.events.discard();
    }

    /// Blocks until the client has read every event.
    pub async fn read_out(&self) -> Result<(), RequestError> {
        self.events.read_out(self.wait_max).await.map_err(|why| self.error(why))
    }

    fn error(&self, why: NotTaken) -> RequestError {
        match why {
            NotTaken::Slow => RequestError::SlowClient { waited: self.wait_max },
            NotTaken::Gone => RequestError::ClientGone,
        }
    }
}

/// A running request, for the reader of its answers.
#[derive(Debug)]
pub struct RunningRequest {
    /// The tokenized prompts. The prompt of choice `i` is prompt `i / choices`.
    pub prompts: Vec<Arc<[u32]>>,
    events: Receiver<Event>,
    task: Option<JoinHandle<Result<(), RequestError>>>,
}

impl RunningRequest {
    /// Starts `work`, which sends the request's events and returns when all answers are complete.
    pub fn start<F>(
        prompts: Vec<Arc<[u32]>>,
        events_max: usize,
        wait_max: Duration,
        work: impl FnOnce(EventSender) -> F,
    ) -> Self
    where
        F: Future<Output = Result<(), RequestError>> + Send + 'static,
    {
        let (sender, events) = event_queue(events_max);
        let task = tokio::spawn(work(EventSender { events: sender, wait_max }));
        Self { prompts, events, task: Some(task) }
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

/// The deadline of a request, and its time-out for error messages.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    pub at: Instant,
    pub timeout: Duration,
}

impl Deadline {
    pub fn after(timeout: Duration) -> Self {
        Self { at: Instant::now() + timeout, timeout }
    }

    /// Returns the remaining time in milliseconds; 0 after the deadline.
    pub fn remaining_ms(&self) -> u64 {
        self.at.saturating_duration_since(Instant::now()).as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(choice: u32) -> Event {
        Event::Tokens(AnswerTokens { choice, first_index: 0, tokens: vec![], text: "t".into() })
    }

    #[tokio::test]
    async fn events_come_in_order_and_then_the_end() {
        let mut running =
            RunningRequest::start(vec![], 1, Duration::from_secs(5), |events| async move {
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
        let wait_max = Duration::from_millis(20);
        let mut running = RunningRequest::start(vec![], 1, wait_max, |events| async move {
            loop {
                events.send(tokens(0)).await?;
            }
        });
        tokio::time::sleep(wait_max * 4).await;
        assert_eq!(running.next().await, Some(Ok(tokens(0))));
        assert_eq!(running.next().await, Some(Err(RequestError::SlowClient { waited: wait_max })));
    }

    #[tokio::test]
    async fn dropping_the_reader_ends_the_work() {
        let (alive, ended) = tokio::sync::oneshot::channel::<()>();
        let running = RunningRequest::start(vec![], 1, Duration::from_secs(5), |_| async move {
            let _alive = alive;
            std::future::pending().await
        });
        drop(running);
        assert!(ended.await.is_err());
    }

    #[tokio::test]
    async fn a_panic_inside_is_an_error_of_this_request_alone() {
        let mut running =
            RunningRequest::start(vec![], 1, Duration::from_secs(5), |_| async move {
                panic!("a bug");
            });
        assert!(matches!(running.next().await, Some(Err(RequestError::Internal { .. }))));
    }
}
