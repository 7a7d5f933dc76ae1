//! Entries (records for `baton explain`) of running and recent requests. Pure: the caller passes the time.
//!
//! An entry holds times, nodes, predictions and causes, but no text and no token ids. [`History`] keeps every
//! running request, and the last ended requests within [`ENDED_MAX`] and [`ENDED_BYTES_MAX`]. The owner of a request
//! writes its [`RequestEntry`]; [`Report`] is the entry as JSON for operators.

mod report;

use std::{
    collections::{HashMap, VecDeque},
    mem::size_of,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use cluster::{Considered, ConsideredOption, IneligibleNode, NoNode};
use proto::ids::RequestId;

use crate::request_core::AttemptStats;
pub use report::Report;

/// Maximum number of ended requests.
const ENDED_MAX: usize = 4096;
/// Maximum size of the entries of ended requests.
const ENDED_BYTES_MAX: usize = 16 << 20;
/// Maximum number of attempts in one entry. A request that emits tokens may have any number of attempts.
const ATTEMPTS_MAX: usize = 32;
/// Maximum size of an error message in an entry.
const MESSAGE_BYTES_MAX: usize = 512;
/// Maximum number of requests that one query returns.
const FOUND_MAX: usize = 100;

/// The entry of one request. Times are measured from `received`.
#[derive(Clone, Debug)]
pub struct RequestEntry {
    pub request_id: RequestId,
    /// The client's label.
    pub label: Option<String>,
    pub trace_id: Option<u128>,
    pub api: &'static str,
    pub model: Arc<str>,
    pub received: Instant,
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
#[derive(Clone, Debug)]
pub struct RequestEntryEnd {
    pub at: Duration,
    /// Outcome of the request, as in its log line.
    pub reason: &'static str,
    pub is_complete: bool,
    pub error: Option<String>,
    pub first_token: Option<Duration>,
    pub completion_tokens: u32,
}

/// The entry of one attempt.
#[derive(Clone, Debug)]
pub struct AttemptEntry {
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
#[derive(Clone, Debug)]
pub struct AttemptEntryEnd {
    pub at: Duration,
    pub outcome: &'static str,
    pub failure: Option<String>,
    pub stats: AttemptStats,
}

impl RequestEntry {
    /// Adds an attempt. An attempt that exceeds the bound replaces the oldest one.
    pub fn picked(&mut self, attempt: AttemptEntry) {
        if self.attempts.len() == ATTEMPTS_MAX {
            self.attempts.remove(0);
            self.attempts_left_out += 1;
        }
        // Most requests have one attempt, and a vector grows to four elements at first.
        self.attempts.reserve_exact(usize::from(self.attempts.is_empty()));
        self.attempts.push(attempt);
    }

    /// Returns the open attempt of a choice.
    pub fn open_attempt(&mut self, choice: u32) -> Option<&mut AttemptEntry> {
        let is_open =
            |attempt: &&mut AttemptEntry| attempt.choice == choice && attempt.end.is_none();
        self.attempts.iter_mut().rev().find(is_open)
    }

    /// Returns the size of the entry in memory.
    fn bytes(&self) -> usize {
        let text = |text: &Option<String>| text.as_ref().map_or(0, String::capacity);
        let of_attempt = |attempt: &AttemptEntry| {
            let Considered { options, ineligible, .. } = &attempt.considered;
            let names = |node: &IneligibleNode| node.node.capacity() + node.reason.capacity();
            options.capacity() * size_of::<ConsideredOption>()
                + ineligible.capacity() * size_of::<IneligibleNode>()
                + ineligible.iter().map(names).sum::<usize>()
                + attempt.end.as_ref().map_or(0, |end| text(&end.failure))
        };
        size_of::<Mutex<Self>>()
            + text(&self.label)
            + self.attempts.capacity() * size_of::<AttemptEntry>()
            + self.end.as_ref().map_or(0, |end| text(&end.error))
            + self.attempts.iter().map(of_attempt).sum::<usize>()
    }
}

/// Returns a message of bounded size.
pub fn bounded(mut message: String) -> String {
    if message.len() > MESSAGE_BYTES_MAX {
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
        message.push('…');
        message.shrink_to_fit();
    }
    message
}

/// An entry that the request's owner writes and queries read.
pub type SharedEntry = Arc<Mutex<RequestEntry>>;

/// Locks an entry, never across an await.
pub fn lock(entry: &SharedEntry) -> MutexGuard<'_, RequestEntry> {
    entry.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Selection of the requests of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Query<'a> {
    /// The requests with this request id, client label or trace id.
    Id(&'a str),
    /// The slowest requests, at most this many.
    Slow(usize),
    /// The last requests that failed.
    Failed,
}

/// The entries that a history holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    pub running: usize,
    pub ended: usize,
    /// Age of the oldest ended request, from its arrival.
    pub oldest: Option<Duration>,
}

/// The running requests, and the last ones that ended.
#[derive(Default)]
pub struct History {
    /// By request id.
    running: HashMap<u128, SharedEntry>,
    /// The oldest first, with the size of each entry.
    ended: VecDeque<(SharedEntry, usize)>,
    ended_bytes: usize,
}

impl History {
    /// Adds a running request.
    pub fn begin(&mut self, request_id: RequestId, entry: SharedEntry) {
        self.running.insert(request_id.0, entry);
    }

    /// Handles the end of a request, whose entry is complete. Returns the entries that exceed the bounds, so that
    /// the caller drops them without holding the history's lock.
    pub fn end(&mut self, request_id: RequestId) -> Vec<SharedEntry> {
        let Some(entry) = self.running.remove(&request_id.0) else { return Vec::new() };
        let bytes = lock(&entry).bytes();
        self.ended.push_back((entry, bytes));
        self.ended_bytes += bytes;
        let mut dropped = Vec::new();
        while self.ended.len() > ENDED_MAX || self.ended_bytes > ENDED_BYTES_MAX {
            let Some((entry, bytes)) = self.ended.pop_front() else { break };
            self.ended_bytes -= bytes;
            dropped.push(entry);
        }
        dropped
    }

    pub fn kept(&self, now: Instant) -> Kept {
        let age =
            |(entry, _): &(SharedEntry, usize)| now.saturating_duration_since(lock(entry).received);
        Kept {
            running: self.running.len(),
            ended: self.ended.len(),
            oldest: self.ended.front().map(age),
        }
    }

    /// Returns the requests of a query, at most [`FOUND_MAX`]: the slowest first, otherwise the newest first.
    pub fn find(&self, now: Instant, query: Query<'_>) -> Vec<SharedEntry> {
        let mut all: Vec<(Duration, &SharedEntry)> = self
            .running
            .values()
            .chain(self.ended.iter().map(|(entry, _)| entry))
            .filter(|entry| matches(&lock(entry), query))
            .map(|entry| {
                let locked = lock(entry);
                let age = now.saturating_duration_since(locked.received);
                let order = match query {
                    Query::Slow(_) => locked.end.as_ref().map_or(age, |end| end.at),
                    Query::Id(_) | Query::Failed => age,
                };
                (order, entry)
            })
            .collect();
        let count_max = match query {
            Query::Slow(count) => {
                all.sort_by_key(|(duration, _)| std::cmp::Reverse(*duration));
                count.min(FOUND_MAX)
            }
            Query::Id(_) | Query::Failed => {
                all.sort_by_key(|(age, _)| *age);
                FOUND_MAX
            }
        };
        all.into_iter().take(count_max).map(|(_, entry)| entry.clone()).collect()
    }
}

/// The history that requests and queries share.
#[derive(Clone, Default)]
pub struct SharedHistory(Arc<Mutex<History>>);

impl SharedHistory {
    /// Locks the history, never across an await.
    pub fn lock(&self) -> MutexGuard<'_, History> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn matches(entry: &RequestEntry, query: Query<'_>) -> bool {
    match query {
        Query::Slow(_) => true,
        Query::Failed => entry.end.as_ref().is_some_and(|end| !end.is_complete),
        Query::Id(key) => {
            // The id of an OpenAI response is the request id with a prefix.
            let id = key.strip_prefix("chatcmpl-").or_else(|| key.strip_prefix("cmpl-"));
            let is_hex = |id: u128, key: &str| {
                key.len() == 32 && u128::from_str_radix(key, 16).is_ok_and(|key| key == id)
            };
            entry.label.as_deref() == Some(key)
                || is_hex(entry.request_id.0, id.unwrap_or(key))
                || entry.trace_id.is_some_and(|trace_id| is_hex(trace_id, key))
        }
    }
}

#[cfg(test)]
mod tests;
