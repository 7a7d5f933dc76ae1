//! Follows the records of a cluster's nodes in etcd. Pure: takes events of etcd and `now`, returns
//! calls.
//!
//! Life of a follower:
//! 1. *Disconnected*: waits with back-off before the next read.
//! 2. *Reading*: requests all records at one revision and a watch from the next revision on.
//! 3. *Following* the watch. After a silence the follower requests a progress notification, because
//!    neither a hung etcd nor a dead connection ends a watch.
//! 4. Disconnected again when the watch ends, is cancelled, finds its revision compacted, or stays
//!    silent. The next read shows the changes since then.
//!
//! The list of members changes only with a read or a watch event. A deleted record is published
//! like any other change; the directory probes the node before it drops the node.

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

use cluster::Members;

use super::entry::NodeEntry;
use crate::retry::RetryBackoff;

/// Maximum number of records; further records are ignored.
pub const RECORDS_MAX: usize = 4096;
/// Time-out of a read: connect, authenticate, two round trips and a few pages.
const READ_WITHIN: Duration = Duration::from_secs(5);
/// Silence after which the follower requests a progress notification. Also prevents etcd from
/// closing the connection: etcd closes idle connections that ping more often than every 5 s.
const SILENCE_MAX: Duration = Duration::from_secs(2);
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// Minimum duration of a watch that resets the back-off.
const STABLE_AFTER: Duration = Duration::from_secs(2);
/// Maximum number of bytes kept of a key. Keys of nodes are shorter.
const KEY_BYTES_MAX: usize = 256;
/// Maximum number of characters that a report shows of a foreign key.
const SHOWN_CHARS_MAX: usize = 100;
/// Maximum number of ignored records that a report names.
pub const IGNORED_SHOWN_MAX: usize = 3;
/// Minimum time between two reports of ignored records.
const IGNORED_INTERVAL: Duration = Duration::from_secs(10);

/// A record in etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdRecord {
    pub key: Vec<u8>,
    pub value: Vec<u8>,
    /// Revision that wrote the record.
    pub modified: i64,
}

/// The records at one revision.
#[derive(Clone, Debug)]
pub struct Records {
    /// All records, or the first ones in the order of their keys and at least one more than
    /// [`RECORDS_MAX`].
    pub records: Vec<EtcdRecord>,
    /// Number of all records.
    pub found: usize,
}

/// An event of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordChange {
    Written(EtcdRecord),
    Removed { key: Vec<u8>, modified: i64 },
}

#[derive(Clone, Debug)]
pub enum FollowerInput {
    /// The records were read, and a watch from the next revision is open.
    Read(Records),
    /// A message of the watch; without changes it is a progress notification.
    Changed { changes: Vec<RecordChange> },
    /// The read failed, or the watch ended.
    Failed { reason: String },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FollowerAction {
    /// Read all records and open a watch from the next revision on.
    Read { within: Duration },
    /// Request a progress notification over the watch.
    AskProgress,
    /// Drop the watch and its connection.
    Disconnect,
    /// Replace the list of members.
    Publish(Members),
    /// Log this event.
    Report(FollowerReport),
}

/// An event to log once, with its log message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FollowerReport {
    #[error("following etcd: {nodes} nodes are registered")]
    Following { nodes: usize },
    #[error("etcd is unreachable: {reason}; keeping the last known members")]
    Unreachable { reason: String },
    /// Records since the last report of this kind. `first` are key and reason of at most
    /// [`IGNORED_SHOWN_MAX`] of them.
    #[error("ignoring records in etcd that are not nodes: {count}, first {first:?}")]
    Ignored { count: usize, first: Vec<String> },
    /// Reported once until a read finds fewer.
    #[error("too many records in etcd: {found}; ignoring all beyond {RECORDS_MAX}")]
    TooMany { found: usize },
}

enum FollowerState {
    Disconnected { retry_at: Instant },
    Reading,
    Following { since: Instant, last_message: Instant, asked: Option<Instant> },
}

/// The result of parsing a record.
struct ParsedRecord {
    modified: i64,
    /// `None`: the record is ignored and was reported.
    entry: Option<NodeEntry>,
}

pub struct Follower {
    /// Key prefix without a trailing slash.
    prefix: String,
    state: FollowerState,
    known: BTreeMap<Vec<u8>, ParsedRecord>,
    too_many: bool,
    /// Ignored records that are not reported yet.
    ignored_count: usize,
    ignored_first: Vec<String>,
    ignored_reported: Option<Instant>,
    published: Option<Members>,
    retry: RetryBackoff,
}

impl Follower {
    /// Creates a follower whose first read is due at once.
    pub fn new(now: Instant, prefix: &str, seed: u64) -> Self {
        Self {
            prefix: prefix.to_owned(),
            state: FollowerState::Disconnected { retry_at: now },
            known: BTreeMap::new(),
            too_many: false,
            ignored_count: 0,
            ignored_first: Vec::new(),
            ignored_reported: None,
            published: None,
            retry: RetryBackoff::new(seed),
        }
    }

    pub fn handle(
        &mut self,
        now: Instant,
        input: FollowerInput,
        actions: &mut Vec<FollowerAction>,
    ) {
        match input {
            FollowerInput::Read(records) => {
                if let FollowerState::Reading = self.state {
                    self.read(now, records, actions);
                }
            }
            FollowerInput::Changed { changes } => self.changed(now, changes, actions),
            FollowerInput::Failed { reason } => match self.state {
                FollowerState::Reading | FollowerState::Following { .. } => {
                    self.failed(now, reason, actions)
                }
                FollowerState::Disconnected { .. } => {}
            },
        }
        self.report_ignored(now, actions);
        assert!(self.known.len() <= RECORDS_MAX);
    }

    /// Returns the time of the next call of [`Self::on_deadline`]; `None` while a read is in
    /// flight.
    pub fn next_deadline(&self) -> Option<Instant> {
        match self.state {
            FollowerState::Disconnected { retry_at } => Some(retry_at),
            FollowerState::Reading => None,
            FollowerState::Following { asked: Some(asked), .. } => Some(asked + ANSWER_WITHIN),
            FollowerState::Following { asked: None, last_message, .. } => {
                Some(last_message + SILENCE_MAX)
            }
        }
    }

    pub fn on_deadline(&mut self, now: Instant, actions: &mut Vec<FollowerAction>) {
        if self.next_deadline().is_none_or(|deadline| deadline > now) {
            return;
        }
        self.report_ignored(now, actions);
        match &mut self.state {
            FollowerState::Disconnected { .. } => {
                self.state = FollowerState::Reading;
                actions.push(FollowerAction::Read { within: READ_WITHIN });
            }
            FollowerState::Following { asked: asked @ None, .. } => {
                *asked = Some(now);
                actions.push(FollowerAction::AskProgress);
            }
            FollowerState::Following { .. } => {
                let reason = format!("no answer within {ANSWER_WITHIN:?}");
                self.failed(now, reason, actions);
            }
            FollowerState::Reading => {}
        }
    }

    fn read(&mut self, now: Instant, read: Records, actions: &mut Vec<FollowerAction>) {
        let before = std::mem::take(&mut self.known);
        let Records { records, found } = read;
        self.too_many &= found > RECORDS_MAX;
        if found > RECORDS_MAX {
            self.report_too_many(found, actions);
        }
        for record in records {
            self.apply(record, &before, actions);
        }
        let first = self.published.is_none();
        self.publish(actions);
        self.state = FollowerState::Following { since: now, last_message: now, asked: None };
        if self.retry.succeeded() || first {
            let nodes = self.known.values().filter(|known| known.entry.is_some()).count();
            actions.push(FollowerAction::Report(FollowerReport::Following { nodes }));
        }
    }

    fn changed(
        &mut self,
        now: Instant,
        changes: Vec<RecordChange>,
        actions: &mut Vec<FollowerAction>,
    ) {
        let FollowerState::Following { since, last_message, asked } = &mut self.state else {
            return;
        };
        (*last_message, *asked) = (now, None);
        if now.saturating_duration_since(*since) >= STABLE_AFTER {
            self.retry.stable();
        }
        for change in changes {
            match change {
                RecordChange::Written(record) => self.apply(record, &BTreeMap::new(), actions),
                RecordChange::Removed { key, modified } => {
                    let key = shortened(&key);
                    if self.known.get(key).is_some_and(|known| known.modified <= modified) {
                        self.known.remove(key);
                    }
                }
            }
        }
        self.publish(actions);
    }

    /// Parses a record. A record that `before` ignored already is not reported again.
    fn apply(
        &mut self,
        record: EtcdRecord,
        before: &BTreeMap<Vec<u8>, ParsedRecord>,
        actions: &mut Vec<FollowerAction>,
    ) {
        let EtcdRecord { key, value, modified } = record;
        let short = shortened(&key);
        if self.known.get(short).is_some_and(|known| known.modified >= modified) {
            return;
        }
        if self.known.len() == RECORDS_MAX && !self.known.contains_key(short) {
            return self.report_too_many(RECORDS_MAX + 1, actions);
        }
        let entry = match NodeEntry::parse(&self.prefix, &key, &value) {
            Ok(entry) => Some(entry),
            Err(error) => {
                let again = before
                    .get(short)
                    .is_some_and(|known| known.entry.is_none() && known.modified == modified);
                if !again {
                    self.ignored_count += 1;
                    if self.ignored_first.len() < IGNORED_SHOWN_MAX {
                        let text = String::from_utf8_lossy(short);
                        let key: String = text.escape_debug().take(SHOWN_CHARS_MAX).collect();
                        self.ignored_first.push(format!("{key}: {error}"));
                    }
                }
                None
            }
        };
        self.known.insert(short.to_vec(), ParsedRecord { modified, entry });
    }

    fn report_too_many(&mut self, found: usize, actions: &mut Vec<FollowerAction>) {
        if !std::mem::replace(&mut self.too_many, true) {
            actions.push(FollowerAction::Report(FollowerReport::TooMany { found }));
        }
    }

    /// Reports ignored records, at most once per interval: there may be thousands.
    fn report_ignored(&mut self, now: Instant, actions: &mut Vec<FollowerAction>) {
        let is_recent = |at| now.saturating_duration_since(at) < IGNORED_INTERVAL;
        if self.ignored_count == 0 || self.ignored_reported.is_some_and(is_recent) {
            return;
        }
        self.ignored_reported = Some(now);
        let count = std::mem::take(&mut self.ignored_count);
        let first = std::mem::take(&mut self.ignored_first);
        actions.push(FollowerAction::Report(FollowerReport::Ignored { count, first }));
    }

    fn publish(&mut self, actions: &mut Vec<FollowerAction>) {
        let members = self.members();
        if self.published.as_ref() != Some(&members) {
            self.published = Some(members.clone());
            actions.push(FollowerAction::Publish(members));
        }
    }

    /// Returns one process for each address: the process that registered last. Earlier ones are
    /// dead.
    fn members(&self) -> Members {
        let mut newest: HashMap<&str, (i64, &NodeEntry)> = HashMap::new();
        for known in self.known.values() {
            let Some(entry) = &known.entry else { continue };
            let slot = newest.entry(&entry.address.grpc).or_insert((known.modified, entry));
            if slot.0 < known.modified {
                *slot = (known.modified, entry);
            }
        }
        newest.into_values().map(|(_, it)| (it.address.clone(), Some(it.epoch))).collect()
    }

    fn failed(&mut self, now: Instant, reason: String, actions: &mut Vec<FollowerAction>) {
        actions.push(FollowerAction::Disconnect);
        self.state = FollowerState::Disconnected { retry_at: now + self.retry.delay() };
        if self.retry.is_news(&reason) {
            actions.push(FollowerAction::Report(FollowerReport::Unreachable { reason }));
        }
    }
}

fn shortened(key: &[u8]) -> &[u8] {
    &key[..key.len().min(KEY_BYTES_MAX)]
}
