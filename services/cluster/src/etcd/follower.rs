//! Follows the records of a cluster's nodes in etcd: pure, what etcd says and `now` in, calls out.
//!
//! Life of a follower:
//! 1. *Away*: waits, with back-off, to read.
//! 2. *Reading*: asks for all records at one revision and a watch from the next one on.
//! 3. *Following* that watch. etcd is asked for a sign of life whenever it was silent for a while:
//!    neither a hung etcd nor a dead connection ends a watch by itself.
//! 4. Away again when the watch ends, is cancelled, finds its revision compacted, or stays silent.
//!    What changed meanwhile shows when the next reading is compared with what was known.
//!
//! The members stay what they were until a reading or a change says otherwise. That a record is gone
//! is published like any other change: whoever uses the members probes before believing a death.

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

use super::{entry::NodeEntry, retry::Retry};
use crate::Members;

/// More records are not believed to be nodes of one cluster.
pub const RECORDS_MAX: usize = 4096;
/// Connecting, proving who one is, two round trips and a few pages.
const READ_WITHIN: Duration = Duration::from_secs(5);
/// Also what keeps etcd from calling this client a nuisance: it closes connections that ping it more
/// often than every 5 s without asking anything.
const SILENCE_MAX: Duration = Duration::from_secs(2);
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// A watch that ended sooner has not ended the trouble before it.
const STABLE_AFTER: Duration = Duration::from_secs(2);
/// Keys of nodes are shorter; what is kept of longer ones tells them apart well enough.
const KEY_BYTES_MAX: usize = 256;
/// Characters that a report shows of a key that is not a node's.
const SHOWN_CHARS_MAX: usize = 100;
/// Records that a report of ignored records names.
pub const IGNORED_SHOWN_MAX: usize = 3;
/// Time between two reports of ignored records.
const IGNORED_INTERVAL: Duration = Duration::from_secs(10);

/// A record as it stands in etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub key: Vec<u8>,
    pub value: Vec<u8>,
    /// The revision that wrote it.
    pub modified: i64,
}

/// One event of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    Written(Record),
    Removed { key: Vec<u8>, modified: i64 },
}

#[derive(Clone, Debug)]
pub enum Input {
    /// All records at one revision; a watch from the next one is open.
    Read { records: Vec<Record> },
    /// Something came over the watch; without changes, a sign of life.
    Changed { changes: Vec<Change> },
    /// The reading failed, or the watch ended.
    Failed { reason: String },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Read all records and open a watch from the next revision on.
    Read {
        within: Duration,
    },
    /// Ask for a sign of life over the watch.
    AskProgress,
    /// Drop the watch and its connection.
    Disconnect,
    Publish(Members),
    Report(Report),
}

/// To be logged, once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    Following {
        nodes: usize,
    },
    Away {
        reason: String,
    },
    /// Records that are not nodes, since the last report of this kind.
    Ignored {
        count: usize,
        /// At most [`IGNORED_SHOWN_MAX`] of them.
        first: Vec<IgnoredRecord>,
    },
    /// More than [`RECORDS_MAX`] keys.
    TooMany,
}

/// A record that is not a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IgnoredRecord {
    pub key: String,
    pub reason: String,
}

enum State {
    Away { retry_at: Instant },
    Reading,
    Following { since: Instant, heard: Instant, asked: Option<Instant> },
}

/// The result of parsing a record.
struct Known {
    modified: i64,
    /// `None`: it was reported and is ignored.
    entry: Option<NodeEntry>,
}

pub struct Follower {
    /// Without a slash at the end.
    prefix: String,
    state: State,
    known: BTreeMap<Vec<u8>, Known>,
    too_many: bool,
    /// Ignored records that are not reported yet.
    ignored_count: usize,
    ignored_first: Vec<IgnoredRecord>,
    ignored_reported: Option<Instant>,
    published: Option<Members>,
    retry: Retry,
}

impl Follower {
    /// Due at once.
    pub fn new(now: Instant, prefix: &str, seed: u64) -> Self {
        Self {
            prefix: prefix.to_owned(),
            state: State::Away { retry_at: now },
            known: BTreeMap::new(),
            too_many: false,
            ignored_count: 0,
            ignored_first: Vec::new(),
            ignored_reported: None,
            published: None,
            retry: Retry::new(seed),
        }
    }

    pub fn handle(&mut self, now: Instant, input: Input, actions: &mut Vec<Action>) {
        match input {
            Input::Read { records } => {
                if let State::Reading = self.state {
                    self.read(now, records, actions);
                }
            }
            Input::Changed { changes } => self.changed(now, changes, actions),
            Input::Failed { reason } => match self.state {
                State::Reading | State::Following { .. } => self.failed(now, reason, actions),
                State::Away { .. } => {}
            },
        }
        self.report_ignored(now, actions);
        assert!(self.known.len() <= RECORDS_MAX);
    }

    /// When to call [`Self::on_deadline`]; `None` while a reading is out.
    pub fn next_deadline(&self) -> Option<Instant> {
        match self.state {
            State::Away { retry_at } => Some(retry_at),
            State::Reading => None,
            State::Following { asked: Some(asked), .. } => Some(asked + ANSWER_WITHIN),
            State::Following { asked: None, heard, .. } => Some(heard + SILENCE_MAX),
        }
    }

    pub fn on_deadline(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.next_deadline().is_none_or(|deadline| deadline > now) {
            return;
        }
        self.report_ignored(now, actions);
        match &mut self.state {
            State::Away { .. } => {
                self.state = State::Reading;
                actions.push(Action::Read { within: READ_WITHIN });
            }
            State::Following { asked: asked @ None, .. } => {
                *asked = Some(now);
                actions.push(Action::AskProgress);
            }
            State::Following { .. } => {
                let reason = format!("no sign of life within {ANSWER_WITHIN:?}");
                self.failed(now, reason, actions);
            }
            State::Reading => {}
        }
    }

    fn read(&mut self, now: Instant, records: Vec<Record>, actions: &mut Vec<Action>) {
        let before = std::mem::take(&mut self.known);
        self.too_many &= records.len() > RECORDS_MAX;
        for record in records {
            self.believe(record, &before, actions);
        }
        let first = self.published.is_none();
        self.publish(actions);
        self.state = State::Following { since: now, heard: now, asked: None };
        if self.retry.succeeded() || first {
            let nodes = self.known.values().filter(|known| known.entry.is_some()).count();
            actions.push(Action::Report(Report::Following { nodes }));
        }
    }

    fn changed(&mut self, now: Instant, changes: Vec<Change>, actions: &mut Vec<Action>) {
        let State::Following { since, heard, asked } = &mut self.state else { return };
        (*heard, *asked) = (now, None);
        if now.saturating_duration_since(*since) >= STABLE_AFTER {
            self.retry.stable();
        }
        for change in changes {
            match change {
                Change::Written(record) => self.believe(record, &BTreeMap::new(), actions),
                Change::Removed { key, modified } => {
                    let key = shortened(&key);
                    if self.known.get(key).is_some_and(|known| known.modified <= modified) {
                        self.known.remove(key);
                    }
                }
            }
        }
        self.publish(actions);
    }

    /// Takes a record for what it is worth; what `before` ignored already is not reported again.
    fn believe(
        &mut self,
        record: Record,
        before: &BTreeMap<Vec<u8>, Known>,
        actions: &mut Vec<Action>,
    ) {
        let Record { key, value, modified } = record;
        let short = shortened(&key);
        if self.known.get(short).is_some_and(|known| known.modified >= modified) {
            return;
        }
        if self.known.len() == RECORDS_MAX && !self.known.contains_key(short) {
            if !std::mem::replace(&mut self.too_many, true) {
                actions.push(Action::Report(Report::TooMany));
            }
            return;
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
                        let key = text.escape_debug().take(SHOWN_CHARS_MAX).collect();
                        self.ignored_first.push(IgnoredRecord { key, reason: error.to_string() });
                    }
                }
                None
            }
        };
        self.known.insert(short.to_vec(), Known { modified, entry });
    }

    /// Reports ignored records, at most once per interval: somebody may write thousands.
    fn report_ignored(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let is_recent = |at| now.saturating_duration_since(at) < IGNORED_INTERVAL;
        if self.ignored_count == 0 || self.ignored_reported.is_some_and(is_recent) {
            return;
        }
        self.ignored_reported = Some(now);
        let count = std::mem::take(&mut self.ignored_count);
        let first = std::mem::take(&mut self.ignored_first);
        actions.push(Action::Report(Report::Ignored { count, first }));
    }

    fn publish(&mut self, actions: &mut Vec<Action>) {
        let members = self.members();
        if self.published.as_ref() != Some(&members) {
            self.published = Some(members.clone());
            actions.push(Action::Publish(members));
        }
    }

    /// Returns one process for each address: the process that registered last. Earlier ones are dead.
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

    fn failed(&mut self, now: Instant, reason: String, actions: &mut Vec<Action>) {
        actions.push(Action::Disconnect);
        self.state = State::Away { retry_at: now + self.retry.delay() };
        if self.retry.is_news(&reason) {
            actions.push(Action::Report(Report::Away { reason }));
        }
    }
}

fn shortened(key: &[u8]) -> &[u8] {
    &key[..key.len().min(KEY_BYTES_MAX)]
}
