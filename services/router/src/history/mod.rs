//! Accounts (records for `baton explain`) of running and recent requests. Pure: the caller passes the time.
//!
//! An account holds times, nodes, predictions and causes, but no text and no token ids. [`History`] keeps every
//! running request, and the last ended requests within [`ENDED_MAX`] and [`ENDED_BYTES_MAX`]. The owner of a request
//! writes its [`Account`]; [`Report`] is the account as JSON for operators.

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
/// Maximum size of the accounts of ended requests.
const ENDED_BYTES_MAX: usize = 16 << 20;
/// Maximum number of attempts in one account. A request that emits tokens may have any number of attempts.
const ATTEMPTS_MAX: usize = 32;
/// Maximum size of an error message in an account.
const MESSAGE_BYTES_MAX: usize = 512;
/// Maximum number of requests that one query returns.
const FOUND_MAX: usize = 100;

/// The account of one request. Times are measured from `received`.
#[derive(Clone, Debug)]
pub struct Account {
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
    pub attempts: Vec<AttemptAccount>,
    /// Number of attempts that the account leaves out.
    pub attempts_left_out: u32,
    /// Reason why the last pick found no node; `None` once a pick found one.
    pub waits_for: Option<NoNode>,
    pub end: Option<RequestEndAccount>,
}

/// The end of a request.
#[derive(Clone, Debug)]
pub struct RequestEndAccount {
    pub at: Duration,
    /// Outcome of the request, as in its log line.
    pub reason: &'static str,
    pub is_complete: bool,
    pub error: Option<String>,
    pub first_token: Option<Duration>,
    pub completion_tokens: u32,
}

/// The account of one attempt.
#[derive(Clone, Debug)]
pub struct AttemptAccount {
    pub choice: u32,
    pub number: u32,
    pub picked: Duration,
    /// Reason why the pick before this one found no node.
    pub waited_for: Option<NoNode>,
    pub considered: Considered,
    /// Predicted time from the pick to the first token.
    pub predicted_ttft: Option<Duration>,
    /// Tokens that the router believed to be cached on the prefill and the decode node.
    pub cached_believed: (Option<u32>, u32),
    pub first_token: Option<Duration>,
    /// Time from token 0 to the decode node's first token.
    pub hand_over: Option<Duration>,
    pub end: Option<AttemptEndAccount>,
}

/// The end of an attempt.
#[derive(Clone, Debug)]
pub struct AttemptEndAccount {
    pub at: Duration,
    pub outcome: &'static str,
    pub failure: Option<String>,
    pub stats: AttemptStats,
}

impl Account {
    /// Adds an attempt. An attempt that exceeds the bound replaces the oldest one.
    pub fn picked(&mut self, attempt: AttemptAccount) {
        if self.attempts.len() == ATTEMPTS_MAX {
            self.attempts.remove(0);
            self.attempts_left_out += 1;
        }
        self.attempts.push(attempt);
    }

    /// Returns the open attempt of a choice.
    pub fn open_attempt(&mut self, choice: u32) -> Option<&mut AttemptAccount> {
        let is_open =
            |attempt: &&mut AttemptAccount| attempt.choice == choice && attempt.end.is_none();
        self.attempts.iter_mut().rev().find(is_open)
    }

    /// Returns the size of the account in memory.
    fn bytes(&self) -> usize {
        let text = |text: &Option<String>| text.as_ref().map_or(0, String::capacity);
        let of_attempt = |attempt: &AttemptAccount| {
            let Considered { options, ineligible, .. } = &attempt.considered;
            let names = |node: &IneligibleNode| node.node.capacity() + node.reason.capacity();
            size_of::<AttemptAccount>()
                + options.capacity() * size_of::<ConsideredOption>()
                + ineligible.capacity() * size_of::<IneligibleNode>()
                + ineligible.iter().map(names).sum::<usize>()
                + attempt.end.as_ref().map_or(0, |end| text(&end.failure))
        };
        size_of::<Mutex<Self>>()
            + text(&self.label)
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

/// An account that the request's owner writes and queries read.
pub type SharedAccount = Arc<Mutex<Account>>;

/// Locks an account, never across an await.
pub fn lock(account: &SharedAccount) -> MutexGuard<'_, Account> {
    account.lock().unwrap_or_else(PoisonError::into_inner)
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

/// The accounts that a history holds.
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
    running: HashMap<u128, SharedAccount>,
    /// The oldest first, with the size of each account.
    ended: VecDeque<(SharedAccount, usize)>,
    ended_bytes: usize,
}

impl History {
    /// Adds a running request.
    pub fn begin(&mut self, request_id: RequestId, account: SharedAccount) {
        self.running.insert(request_id.0, account);
    }

    /// Handles the end of a request, whose account is complete. Returns the accounts that exceed the bounds, so that
    /// the caller drops them without holding the history's lock.
    pub fn end(&mut self, request_id: RequestId) -> Vec<SharedAccount> {
        let Some(account) = self.running.remove(&request_id.0) else { return Vec::new() };
        let bytes = lock(&account).bytes();
        self.ended.push_back((account, bytes));
        self.ended_bytes += bytes;
        let mut dropped = Vec::new();
        while self.ended.len() > ENDED_MAX || self.ended_bytes > ENDED_BYTES_MAX {
            let Some((account, bytes)) = self.ended.pop_front() else { break };
            self.ended_bytes -= bytes;
            dropped.push(account);
        }
        dropped
    }

    pub fn kept(&self, now: Instant) -> Kept {
        let age = |(account, _): &(SharedAccount, usize)| {
            now.saturating_duration_since(lock(account).received)
        };
        Kept {
            running: self.running.len(),
            ended: self.ended.len(),
            oldest: self.ended.front().map(age),
        }
    }

    /// Returns the requests of a query, at most [`FOUND_MAX`]: the slowest first, otherwise the newest first.
    pub fn find(&self, now: Instant, query: Query<'_>) -> Vec<SharedAccount> {
        let mut all: Vec<(Duration, &SharedAccount)> = self
            .running
            .values()
            .chain(self.ended.iter().map(|(account, _)| account))
            .filter(|account| matches(&lock(account), query))
            .map(|account| {
                let account_locked = lock(account);
                let age = now.saturating_duration_since(account_locked.received);
                let order = match query {
                    Query::Slow(_) => account_locked.end.as_ref().map_or(age, |end| end.at),
                    Query::Id(_) | Query::Failed => age,
                };
                (order, account)
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
        all.into_iter().take(count_max).map(|(_, account)| account.clone()).collect()
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

fn matches(account: &Account, query: Query<'_>) -> bool {
    match query {
        Query::Slow(_) => true,
        Query::Failed => account.end.as_ref().is_some_and(|end| !end.is_complete),
        Query::Id(key) => {
            // The id of an OpenAI response is the request id with a prefix.
            let id = key.strip_prefix("chatcmpl-").or_else(|| key.strip_prefix("cmpl-"));
            let is_hex = |id: u128, key: &str| {
                key.len() == 32 && u128::from_str_radix(key, 16).is_ok_and(|key| key == id)
            };
            account.label.as_deref() == Some(key)
                || is_hex(account.request_id.0, id.unwrap_or(key))
                || account.trace_id.is_some_and(|trace_id| is_hex(trace_id, key))
        }
    }
}

#[cfg(test)]
mod tests;
