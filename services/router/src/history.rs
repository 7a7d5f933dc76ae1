//! Entries (records for `baton explain`) of running and recent requests. Pure: the caller passes
//! the time.
//!
//! An entry holds times, nodes, predictions and causes, but no text and no token ids. [`History`]
//! keeps every running request, and the last ended requests within the bounds of [`EndedEntries`].
//! The owner of a request writes its [`RequestEntry`]; [`RequestReport`] is the entry as JSON for
//! operators.

mod ended;
mod report;

use std::{
    borrow::Cow,
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant, SystemTime},
};

use cluster::{Considered, NoNode};
use proto::ids::RequestId;
use serde::{Deserialize, Serialize};

use self::ended::{CopiedEntries, EndedEntries};

use router_core::AttemptStats;

use crate::lock::lock;
pub(crate) use report::RequestReport;

/// Maximum number of attempts in one entry. A request that emits tokens may have any number of
/// attempts.
const ATTEMPTS_MAX: usize = 32;
/// Maximum size of an error message in an entry.
const MESSAGE_BYTES_MAX: usize = 512;
/// Maximum number of requests that one query returns.
const FOUND_MAX: usize = 100;

/// The entry of one request. Times are measured from `received`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RequestEntry {
    pub request_id: RequestId,
    /// The client's label.
    pub label: Option<String>,
    pub trace_id: Option<u128>,
    pub api: Cow<'static, str>,
    pub model: Arc<str>,
    /// Time from the start of the history to the request's arrival.
    pub received: Duration,
    pub received_at: SystemTime,
    /// The fields were read and checked.
    pub read: Option<Duration>,
    /// The prompt was tokenized.
    pub prepared: Option<Duration>,
    pub choices: u32,
    pub prompt_tokens: u32,
    pub attempts: Vec<AttemptEntry>,
    /// Number of attempts that the entry leaves out.
    pub attempts_left_out: u32,
    /// Reason why the last pick found no node; `None` once a pick found one.
    pub waits_for: Option<NoNode>,
    pub end: Option<RequestEntryEnd>,
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RequestEntryEnd {
    pub at: Duration,
    /// Outcome of the request, as in its log line.
    pub reason: Cow<'static, str>,
    pub is_complete: bool,
    pub error: Option<String>,
    pub first_token: Option<Duration>,
    pub completion_tokens: u32,
}

/// The entry of one attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AttemptEntry {
    pub choice: u32,
    pub number: u32,
    pub picked: Duration,
    /// Reason why the pick before this one found no node.
    pub waited_for: Option<NoNode>,
    pub considered: Considered,
    /// Predicted time from the pick to the first token.
    pub predicted_ttft: Option<Duration>,
    /// Tokens that the router expected to be cached on the prefill and the decode node.
    pub cached_expected: (Option<u32>, u32),
    pub first_token: Option<Duration>,
    /// Time from token 0 to the decode node's first token.
    pub hand_over: Option<Duration>,
    pub end: Option<AttemptEntryEnd>,
}

/// The end of an attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AttemptEntryEnd {
    pub at: Duration,
    pub outcome: Cow<'static, str>,
    pub failure: Option<String>,
    pub stats: AttemptStats,
}

impl RequestEntry {
    /// Adds an attempt. An attempt that exceeds the bound replaces the oldest one.
    pub(crate) fn picked(&mut self, attempt: AttemptEntry) {
        if self.attempts.len() == ATTEMPTS_MAX {
            self.attempts.remove(0);
            self.attempts_left_out += 1;
        }
        // Most requests have one attempt, and a vector grows to four elements at first.
        self.attempts.reserve_exact(usize::from(self.attempts.is_empty()));
        self.attempts.push(attempt);
    }

    /// Returns the open attempt of a choice.
    pub(crate) fn open_attempt(&mut self, choice: u32) -> Option<&mut AttemptEntry> {
        let is_open =
            |attempt: &&mut AttemptEntry| attempt.choice == choice && attempt.end.is_none();
        self.attempts.iter_mut().rev().find(is_open)
    }
}

/// Returns a message of bounded size.
pub(crate) fn bounded(mut message: String) -> String {
    if message.len() > MESSAGE_BYTES_MAX {
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
        message.push('…');
        message.shrink_to_fit();
    }
    message
}

/// An entry that the request's owner writes and queries read.
pub(crate) type SharedEntry = Arc<Mutex<RequestEntry>>;

/// Selection of the requests of a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Query {
    /// The requests with this request id, client label or trace id.
    Id(String),
    /// The newest requests, at most this many.
    Recent(usize),
    /// The slowest requests, at most this many.
    Slow(usize),
    /// The last requests that failed.
    Failed,
}

/// The entries that a history holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HistorySize {
    pub running: usize,
    pub ended: usize,
    /// Age of the oldest ended request, from its arrival.
    pub oldest: Option<Duration>,
}

/// The running requests, and the last ones that ended.
#[derive(Default)]
pub(crate) struct History {
    /// By request id.
    running: HashMap<u128, SharedEntry>,
    ended: EndedEntries,
}

impl History {
    /// Adds a running request.
    pub(crate) fn begin(&mut self, request_id: RequestId, entry: SharedEntry) {
        self.running.insert(request_id.0, entry);
    }

    /// Handles the end of a request, whose entry is complete.
    pub(crate) fn end(&mut self, request_id: RequestId) {
        if let Some(entry) = self.running.remove(&request_id.0) {
            self.ended.push(&lock(&entry));
        }
    }
}

/// The answer to a query.
#[derive(Debug)]
pub(crate) struct HistoryAnswer {
    /// At most [`FOUND_MAX`]: the slowest first, otherwise the newest first.
    pub requests: Vec<RequestEntry>,
    pub kept: HistorySize,
}

/// The history that requests and queries share.
#[derive(Clone)]
pub(crate) struct SharedHistory {
    start: Instant,
    history: Arc<Mutex<History>>,
}

impl SharedHistory {
    /// Creates an empty history that starts now.
    pub(crate) fn new(now: Instant) -> Self {
        Self { start: now, history: Arc::default() }
    }

    /// Returns the time since the start of the history.
    pub(crate) fn time_of(&self, instant: Instant) -> Duration {
        instant.saturating_duration_since(self.start)
    }

    /// Locks the history, never across an await.
    pub(crate) fn lock(&self) -> MutexGuard<'_, History> {
        lock(&self.history)
    }

    /// Returns the requests of a query. The query copies ended requests in small parts and decodes
    /// each part without the lock, which every request needs. Ended requests that drop out of the
    /// history meanwhile are not found.
    pub(crate) fn find(&self, now: Duration, query: &Query) -> HistoryAnswer {
        let (running, mut left) = {
            let history = self.lock();
            (history.running.values().cloned().collect::<Vec<_>>(), history.ended.numbers())
        };
        let mut kept =
            HistorySize { running: running.len(), ended: left.clone().count(), oldest: None };
        let is_wanted = |entry: &RequestEntry| matches(entry, query);
        let mut requests: Vec<RequestEntry> =
            running.iter().map(|entry| lock(entry).clone()).filter(is_wanted).collect();
        let age = |entry: &RequestEntry| now.saturating_sub(entry.received);
        let mut copied = CopiedEntries::default();
        while !left.is_empty() {
            left = self.lock().ended.copy(left, &mut copied);
            for entry in copied.iter() {
                kept.oldest.get_or_insert(age(&entry));
                requests.extend(Some(entry).filter(is_wanted));
            }
        }
        let count_max = match query {
            Query::Slow(count) => {
                let duration =
                    |entry: &RequestEntry| entry.end.as_ref().map_or(age(entry), |end| end.at);
                requests.sort_by_key(|entry| std::cmp::Reverse(duration(entry)));
                FOUND_MAX.min(*count)
            }
            Query::Recent(_) | Query::Id(_) | Query::Failed => {
                requests.sort_by_key(age);
                match query {
                    Query::Recent(count) => FOUND_MAX.min(*count),
                    _ => FOUND_MAX,
                }
            }
        };
        requests.truncate(count_max);
        HistoryAnswer { requests, kept }
    }
}

fn matches(entry: &RequestEntry, query: &Query) -> bool {
    match query {
        Query::Recent(_) | Query::Slow(_) => true,
        Query::Failed => entry.end.as_ref().is_some_and(|end| !end.is_complete),
        Query::Id(key) => {
            // The id of a reply is the request id with the prefix of its API.
            let id = ["chatcmpl-", "cmpl-", "resp_", "msg_"]
                .iter()
                .find_map(|prefix| key.strip_prefix(prefix));
            let is_hex = |id: u128, key: &str| {
                key.len() == 32 && u128::from_str_radix(key, 16).is_ok_and(|key| key == id)
            };
            entry.label.as_ref() == Some(key)
                || is_hex(entry.request_id.0, id.unwrap_or(key))
                || entry.trace_id.is_some_and(|trace_id| is_hex(trace_id, key))
        }
    }
}

#[cfg(test)]
mod tests;
