//! The follower of a router against a simulated etcd whose watch breaks, hangs and is compacted.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use cluster::{Epoch, Members, NodeAddress, Role};
use membership::etcd::follower::{
    EtcdRecord, Follower, FollowerAction, FollowerInput, FollowerReport, IGNORED_SHOWN_MAX,
    RECORDS_MAX, RecordChange, Records,
};
use proptest::prelude::*;

const PREFIX: &str = "/baton";
const HEALS_WITHIN: Duration = Duration::from_secs(16);

fn key(node: u8, process: u8) -> Vec<u8> {
    format!("{PREFIX}/nodes/node-{node}/{}", epoch(process)).into_bytes()
}

fn epoch(process: u8) -> Epoch {
    Epoch::from_bytes(&[process + 1; 16]).unwrap()
}

fn value(node: u8, process: u8, port: u16) -> Vec<u8> {
    let epoch = epoch(process);
    format!(
        "{{\"version\":1,\"node_id\":\"node-{node}\",\"epoch\":\"{epoch}\",\"role\":\"decode\",\
         \"grpc\":\"http://h:{port}\"}}"
    )
    .into_bytes()
}

fn address(port: u16) -> NodeAddress {
    NodeAddress { role: Role::Decode, grpc: format!("http://h:{port}") }
}

#[derive(Clone, Debug)]
enum Event {
    Write {
        node: u8,
        process: u8,
        port: u16,
    },
    /// An invalid record, under a node's key or a foreign one.
    WriteGarbage {
        node: u8,
        process: u8,
        value: Vec<u8>,
        foreign: bool,
    },
    Remove {
        node: u8,
        process: u8,
    },
    /// The watch delivers its pending events.
    Deliver,
    /// The watch ends.
    Break,
    /// etcd hangs: neither calls nor the watch return for this time.
    Hang {
        ms: u64,
    },
    /// etcd refuses connections for this time.
    Stop {
        ms: u64,
    },
    /// etcd compacts its history: a watch that is behind ends.
    Compact,
    Wait {
        ms: u64,
    },
}

struct World {
    now: Instant,
    revision: i64,
    records: BTreeMap<Vec<u8>, EtcdRecord>,
    /// Port and epoch of each valid record.
    nodes: BTreeMap<Vec<u8>, (u16, Epoch)>,
    follower: Follower,
    /// Events that the open watch has not delivered yet; `None` without a watch.
    watch: Option<VecDeque<RecordChange>>,
    /// Time-out of the read in progress.
    reading: Option<Instant>,
    asked: bool,
    hangs_until: Instant,
    stopped_until: Instant,
    published: Option<Members>,
    reports: Vec<FollowerReport>,
}

impl World {
    fn new() -> Self {
        let now = Instant::now();
        let mut world = Self {
            now,
            revision: 1,
            records: BTreeMap::new(),
            nodes: BTreeMap::new(),
            follower: Follower::new(now, PREFIX, 3),
            watch: None,
            reading: None,
            asked: false,
            hangs_until: now,
            stopped_until: now,
            published: None,
            reports: Vec::new(),
        };
        world.wait(Duration::from_millis(1));
        world
    }

    fn input(&mut self, input: FollowerInput) {
        let mut actions = Vec::new();
        self.follower.handle(self.now, input, &mut actions);
        self.perform(actions);
    }

    fn perform(&mut self, actions: Vec<FollowerAction>) {
        for action in actions {
            match action {
                FollowerAction::Read { within } => {
                    assert!(self.reading.is_none() && self.watch.is_none());
                    assert!(!within.is_zero() && within <= Duration::from_secs(5));
                    self.reading = Some(self.now + within);
                }
                FollowerAction::AskProgress => {
                    assert!(self.watch.is_some() && !self.asked, "one question at a time");
                    self.asked = true;
                }
                FollowerAction::Disconnect => (self.watch, self.asked) = (None, false),
                FollowerAction::Publish(members) => {
                    assert_ne!(self.published.as_ref(), Some(&members), "nothing changed");
                    self.published = Some(members);
                }
                FollowerAction::Report(report) => self.reports.push(report),
            }
        }
        assert_eq!(self.follower.next_deadline().is_some(), self.reading.is_none());
    }

    fn change(&mut self, change: RecordChange) {
        if let Some(watch) = &mut self.watch {
            watch.push_back(change);
        }
    }

    fn write(&mut self, key: Vec<u8>, value: Vec<u8>) {
        self.revision += 1;
        self.nodes.remove(&key);
        let record = EtcdRecord { key: key.clone(), value, modified: self.revision };
        self.records.insert(key, record.clone());
        self.change(RecordChange::Written(record));
    }

    fn remove(&mut self, key: &[u8]) {
        if self.records.remove(key).is_some() {
            self.revision += 1;
            self.change(RecordChange::Removed { key: key.to_vec(), modified: self.revision });
        }
    }

    fn fail(&mut self, reason: &str) {
        (self.watch, self.asked) = (None, false);
        self.input(FollowerInput::Failed { reason: reason.into() });
    }

    fn deliver(&mut self) {
        let Some(watch) = &mut self.watch else { return };
        if self.now < self.hangs_until || (watch.is_empty() && !self.asked) {
            return;
        }
        let changes = watch.drain(..).collect();
        self.asked = false;
        self.input(FollowerInput::Changed { changes });
    }

    fn read(&mut self, gives_up: Instant) {
        if self.now < self.stopped_until {
            self.reading = None;
            self.fail("refused");
        } else if self.now >= self.hangs_until {
            self.reading = None;
            self.watch = Some(VecDeque::new());
            let records: Vec<_> = self.records.values().cloned().collect();
            let found = records.len();
            self.input(FollowerInput::Read(Records { records, found }));
        } else if self.now >= gives_up {
            self.reading = None;
            self.fail("no answer");
        }
    }

    /// Advances the time in steps. etcd answers reads at each step; the watch delivers if `deliver`
    /// is set.
    fn wait_and(&mut self, time: Duration, deliver: bool) {
        let end = self.now + time;
        loop {
            if let Some(gives_up) = self.reading {
                self.read(gives_up);
            }
            if deliver || self.asked {
                self.deliver();
            }
            if self.now >= end {
                break;
            }
            let step = self.now + Duration::from_millis(50);
            self.now = self.follower.next_deadline().unwrap_or(step).clamp(self.now, step).min(end);
            let mut actions = Vec::new();
            self.follower.on_deadline(self.now, &mut actions);
            self.perform(actions);
            // The time advances even if the deadline has passed.
            self.now = self.now.max((self.now + Duration::from_millis(1)).min(end));
        }
    }

    fn wait(&mut self, time: Duration) {
        self.wait_and(time, true);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Write { node, process, port } => {
                self.write(key(node, process), value(node, process, port));
                self.nodes.insert(key(node, process), (port, epoch(process)));
            }
            Event::WriteGarbage { node, process, value, foreign } => {
                let mut key = key(node, process);
                if foreign {
                    key.extend([b'/'; 300]);
                    key.push(node);
                }
                self.write(key, value);
            }
            Event::Remove { node, process } => self.remove(&key(node, process)),
            Event::Deliver => self.deliver(),
            Event::Break => {
                if self.watch.is_some() {
                    self.fail("the watch ended");
                }
            }
            Event::Hang { ms } => self.hangs_until = self.now + Duration::from_millis(ms),
            Event::Stop { ms } => {
                self.stopped_until = self.now + Duration::from_millis(ms);
                if self.watch.is_some() {
                    self.fail("broken pipe");
                }
            }
            Event::Compact => {
                if self.watch.as_ref().is_some_and(|watch| !watch.is_empty()) {
                    self.fail("compacted");
                }
            }
            Event::Wait { ms } => self.wait_and(Duration::from_millis(ms), false),
        }
    }

    /// Returns the expected members, computed directly from the records.
    fn expected(&self) -> Members {
        let mut newest = BTreeMap::new();
        for (key, (port, epoch)) in &self.nodes {
            let Some(record) = self.records.get(key) else { continue };
            let found = (record.modified, *epoch);
            newest.entry(*port).and_modify(|it| *it = found.max(*it)).or_insert(found);
        }
        newest.into_iter().map(|(port, (_, epoch))| (address(port), Some(epoch))).collect()
    }

    fn count(&self, is: impl Fn(&FollowerReport) -> bool) -> usize {
        self.reports.iter().filter(|report| is(report)).count()
    }
}

fn events() -> impl Strategy<Value = Event> {
    let (node, process, port) = (0..4u8, 0..3u8, 1..4u16);
    let garbage = prop_oneof![
        Just(Vec::new()),
        prop::collection::vec(any::<u8>(), 0..40),
        Just(vec![b' '; 5000]),
        Just(value(9, 0, 1)),
    ];
    prop_oneof![
        6 => (node.clone(), process.clone(), port)
            .prop_map(|(node, process, port)| Event::Write { node, process, port }),
        2 => (node.clone(), process.clone(), garbage, any::<bool>()).prop_map(
            |(node, process, value, foreign)| Event::WriteGarbage { node, process, value, foreign }
        ),
        4 => (node, process).prop_map(|(node, process)| Event::Remove { node, process }),
        4 => Just(Event::Deliver),
        2 => Just(Event::Break),
        1 => (0..8000u64).prop_map(|ms| Event::Hang { ms }),
        1 => (0..8000u64).prop_map(|ms| Event::Stop { ms }),
        1 => Just(Event::Compact),
        4 => (0..3000u64).prop_map(|ms| Event::Wait { ms }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn members_converge_to_the_records_after_any_faults(
        history in prop::collection::vec(events(), 0..60),
    ) {
        let mut world = World::new();
        history.into_iter().for_each(|event| world.happen(event));
        world.wait(HEALS_WITHIN);
        prop_assert_eq!(world.published.clone(), Some(world.expected()));
        // Time for the summary of ignored records.
        world.wait(Duration::from_secs(12));
        // Nothing more is reported, and nothing is read again.
        let told = world.reports.len();
        world.wait(Duration::from_secs(30));
        prop_assert_eq!(world.reports.len(), told);
    }

    #[test]
    fn an_invalid_record_is_logged_once(
        garbage in prop::collection::vec(any::<u8>(), 0..40),
        breaks in prop::collection::vec(0..4000u64, 0..10),
    ) {
        let mut world = World::new();
        world.happen(Event::WriteGarbage { node: 1, process: 1, value: garbage, foreign: false });
        for ms in breaks {
            world.wait(Duration::from_millis(ms));
            world.happen(Event::Break);
        }
        world.wait(HEALS_WITHIN);
        prop_assert_eq!(world.count(|report| matches!(report, FollowerReport::Ignored { .. })), 1);
        prop_assert_eq!(world.published, Some(Members::new()));
    }
}

#[test]
fn a_node_joins_moves_to_another_process_and_leaves() {
    let mut world = World::new();
    world.happen(Event::Write { node: 1, process: 0, port: 1 });
    world.happen(Event::Deliver);
    assert_eq!(world.published, Some([(address(1), Some(epoch(0)))].into()));
    // A new process registers while the old record still exists. Then the old lease ends.
    world.happen(Event::Write { node: 1, process: 1, port: 1 });
    world.happen(Event::Deliver);
    assert_eq!(world.published, Some([(address(1), Some(epoch(1)))].into()));
    world.happen(Event::Remove { node: 1, process: 0 });
    world.happen(Event::Deliver);
    assert_eq!(world.published, Some([(address(1), Some(epoch(1)))].into()));
    world.happen(Event::Remove { node: 1, process: 1 });
    world.happen(Event::Deliver);
    assert_eq!(world.published, Some(Members::new()));
}

#[test]
fn members_stay_during_an_etcd_outage_and_catch_up_afterwards() {
    let mut world = World::new();
    for node in [1, 2] {
        world.happen(Event::Write { node, process: 0, port: u16::from(node) });
    }
    world.happen(Event::Deliver);
    let before = world.published.clone();
    world.happen(Event::Stop { ms: 20_000 });
    world.wait(Duration::from_secs(19));
    assert_eq!(world.published, before);
    assert_eq!(
        world.count(|report| matches!(report, FollowerReport::Unreachable { .. })),
        2,
        "broken, refused"
    );
    world.happen(Event::Remove { node: 1, process: 0 });
    world.wait(Duration::from_secs(4));
    assert_eq!(world.published, Some([(address(2), Some(epoch(0)))].into()));
    assert_eq!(world.reports.last(), Some(&FollowerReport::Following { nodes: 1 }));
}

#[test]
fn a_hung_etcd_is_noticed_by_its_silence() {
    let mut world = World::new();
    world.happen(Event::Hang { ms: 60_000 });
    world.wait(Duration::from_secs(5));
    assert_eq!(world.count(|report| matches!(report, FollowerReport::Unreachable { .. })), 1);
}

#[test]
fn ignored_records_are_summarised() {
    let mut world = World::new();
    for index in 0..1000 {
        world.write(format!("{PREFIX}/nodes/x/{index}").into_bytes(), Vec::new());
        world.happen(Event::Deliver);
        world.wait(Duration::from_millis(9));
    }
    world.wait(HEALS_WITHIN);
    let ignored: Vec<(usize, usize)> = world
        .reports
        .iter()
        .filter_map(|report| match report {
            FollowerReport::Ignored { count, first } => Some((*count, first.len())),
            _ => None,
        })
        .collect();
    assert_eq!(ignored, [(1, 1), (999, IGNORED_SHOWN_MAX)]);
}

#[test]
fn too_many_records_are_reported_once_with_their_number() {
    let mut world = World::new();
    for index in 0..RECORDS_MAX + 10 {
        world.write(format!("{PREFIX}/nodes/x/{index}").into_bytes(), Vec::new());
    }
    world.happen(Event::Deliver);
    world.happen(Event::Break);
    world.wait(HEALS_WITHIN);
    // The watch counts up to the first record beyond the limit; only a first read counts them all.
    let too_many = |found| FollowerReport::TooMany { found };
    assert_eq!(world.count(|report| matches!(report, FollowerReport::TooMany { .. })), 1);
    assert_eq!(world.count(|report| *report == too_many(RECORDS_MAX + 1)), 1);

    let mut world = World::new();
    world.happen(Event::Stop { ms: 1000 });
    for index in 0..RECORDS_MAX + 10 {
        world.write(format!("{PREFIX}/nodes/x/{index}").into_bytes(), Vec::new());
    }
    world.wait(HEALS_WITHIN);
    world.happen(Event::Break);
    world.wait(HEALS_WITHIN);
    assert_eq!(world.count(|report| matches!(report, FollowerReport::TooMany { .. })), 1);
    assert_eq!(world.count(|report| *report == too_many(RECORDS_MAX + 10)), 1);
}
