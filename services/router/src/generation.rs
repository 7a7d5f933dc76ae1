//! One request in work: its answers as events, from a task that ends with its reader.
//!
//! Every request has a task of its own, which owns the journeys of all its answers. Events leave
//! through a bounded queue. Dropping the [`Running`] request ends the task, which drops the node
//! streams: that is how a client that leaves cancels its request.

use std::time::Duration;

use proto::v1::{FinishReason, Token};
use tokio::{task::JoinHandle, time::Instant};

use crate::{
    admission::Full,
    event_queue::{NotTaken, Receiver, Sender, event_queue},
    request::field_error::FieldError,
};

/// What happens to the answers of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Tokens(AnswerTokens),
    Finished(AnswerEnd),
}

/// Tokens that were shown, and the text that became certain with them.
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerTokens {
    /// Which answer of the request.
    pub choice: u32,
    /// Index of the first token in the whole answer.
    pub first_index: u32,
    pub tokens: Vec<Token>,
    /// May be empty: a character, or what may be a stop string, is not complete.
    pub text: String,
}

/// An answer is complete.
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerEnd {
    pub choice: u32,
    pub reason: FinishReason,
    /// The client's own stop token or stop string, where one ended the answer.
    pub stopped_by: Option<StoppedBy>,
    /// The rest of the text, where some had been held back.
    pub text: String,
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    /// Prompt tokens that were in a prefix cache.
    pub cached_tokens: u32,
    pub hand_over: HandOverFigures,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoppedBy {
    Token(u32),
    Text(String),
}

/// What moved for one answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HandOverFigures {
    /// Over all attempts.
    pub kv_bytes: u64,
    /// Of the last transfer.
    pub transfer_us: u64,
    pub attempts: u32,
    /// Of the last attempt.
    pub prefill_node: Option<String>,
    pub decode_node: Option<String>,
}

/// Why a request is refused, or ends without an answer.
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
    #[error("there is no decode node to serve the request, for {} ms now", waited.as_millis())]
    NoDecodeNode { waited: Duration },
    #[error(
        "{field} cannot be served now: no decode node of the model says that it holds answers to such a \
         grammar; nodes of an older release do not"
    )]
    NoGrammar { field: &'static str },
    #[error("{attempts} attempts failed; the last: {last}")]
    AttemptsSpent { attempts: u32, last: String },
    /// A node found that it can never serve this.
    #[error("a node refused the request: {reason}")]
    Refused { reason: String },
    #[error("the request did not complete within its {} ms", timeout.as_millis())]
    Deadline { timeout: Duration },
    #[error("a node contradicted what was shown: {reason}")]
    Contradiction { reason: String },
    #[error("the client did not read its stream for {} ms", waited.as_millis())]
    SlowClient { waited: Duration },
    #[error("the client left")]
    ClientGone,
    /// The prompt or the messages cannot be rendered or tokenised.
    #[error("{reason}")]
    Text {
        /// The field that is to blame, if one is.
        field: Option<&'static str>,
        reason: String,
    },
    #[error("the router stopped before the request was complete")]
    Stopped,
    #[error("the router failed: {reason}")]
    Internal { reason: String },
}

/// Where a request's events go. Bounded: a client that does not read holds up its own request.
#[derive(Debug)]
pub struct EventSender {
    events: Sender<Event>,
    /// How long the client may read nothing while events wait for it.
    wait_max: Duration,
}

impl EventSender {
    pub async fn send(&self, event: Event) -> Result<(), RequestError> {
        self.events.send(event, self.wait_max).await.map_err(|why| self.error(why))
    }

    /// What the client did not read takes no room any more.
    pub fn discard(&self) {
        self.events.discard();
    }

    /// Until the client has read everything.
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

/// A request in work, for the one who reads its answers.
#[derive(Debug)]
pub struct Running {
    events: Receiver<Event>,
    task: Option<JoinHandle<Result<(), RequestError>>>,
}

impl Running {
    /// Starts `work`, which sends the request's events and returns when all answers are complete.
    pub fn start<F>(
        events_max: usize,
        wait_max: Duration,
        work: impl FnOnce(EventSender) -> F,
    ) -> Self
    where
        F: Future<Output = Result<(), RequestError>> + Send + 'static,
    {
        let (sender, events) = event_queue(events_max);
        let task = tokio::spawn(work(EventSender { events: sender, wait_max }));
        Self { events, task: Some(task) }
    }

    /// The next event; at the end `None`, or the one error that the request ended with. Dropping
    /// the future loses nothing.
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

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// When a request must be over, and how long it was given, for the error that says so.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    pub at: Instant,
    pub timeout: Duration,
}

impl Deadline {
    pub fn after(timeout: Duration) -> Self {
        Self { at: Instant::now() + timeout, timeout }
    }

    /// What is left, in whole milliseconds; 0 when it passed.
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
        let mut running = Running::start(1, Duration::from_secs(5), |events| async move {
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
        let mut running = Running::start(1, wait_max, |events| async move {
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
        let running = Running::start(1, Duration::from_secs(5), |_| async move {
            let _alive = alive;
            std::future::pending().await
        });
        drop(running);
        assert!(ended.await.is_err());
    }

    #[tokio::test]
    async fn a_panic_inside_is_an_error_of_this_request_alone() {
        let mut running = Running::start(1, Duration::from_secs(5), |_| async move {
            panic!("a defect");
        });
        assert!(matches!(running.next().await, Some(Err(RequestError::Internal { .. }))));
    }
}
