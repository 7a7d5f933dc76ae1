//! Processes that tests start and kill: a number alone does not tell one, for it may be used again.

use std::{
    fs,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use integration_tests::processes;

/// Until processes that were told to end, or lost their parent, are gone.
const DEADLINE: Duration = Duration::from_secs(60);

/// One process, whichever others have had its number before or have it after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    pub id: u32,
    /// In clock ticks since the machine's start.
    started: u64,
}

impl Process {
    /// The one that has this number and runs.
    pub fn running(id: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        let (state, started) = state_and_start(&stat)?;
        (state != "Z").then_some(Self { id, started })
    }

    pub fn is_running(self) -> bool {
        Self::running(self.id) == Some(self)
    }

    /// Those that it has started and that run.
    pub fn children(self) -> Vec<Self> {
        processes::children(self.id).into_iter().filter_map(Self::running).collect()
    }

    pub fn signal(self, name: &str) {
        assert!(self.is_running(), "{self:?} has ended by itself");
        processes::signal(self.id, name);
    }
}

/// Fields 3 and 22, as proc(5) counts them.
fn state_and_start(stat: &str) -> Option<(&str, u64)> {
    // Behind the name, which is in brackets and may have any characters.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?;
    Some((state, fields.nth(22 - 4)?.parse().ok()?))
}

/// Until none of them runs any more.
pub fn wait_gone(processes: &[Process]) -> Result<()> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let left: Vec<&Process> = processes.iter().filter(|process| process.is_running()).collect();
        if left.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{left:?} still run after {DEADLINE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn process_names_with_brackets_are_parsed() {
    let fields: Vec<String> = (4..=52).map(|field| field.to_string()).collect();
    let stat = format!("17 (a) S 1 (b) R {}\n", fields.join(" "));
    assert_eq!(state_and_start(&stat), Some(("R", 22)));
    assert_eq!(state_and_start("17 (a) R 4 5"), None);
}

pub fn reused_process_id_is_another_process() {
    let own = Process::running(std::process::id()).unwrap();
    let before = Process { started: own.started - 1, ..own };
    assert!(own.is_running() && !before.is_running() && own != before);
    wait_gone(&[before]).unwrap();
}

pub fn ended_child_is_not_running_before_it_is_reaped() {
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();
    let own = Process::running(std::process::id()).unwrap();
    let process = Process::running(child.id()).unwrap();
    assert!(own.children().contains(&process));
    process.signal("KILL");
    wait_gone(&[process]).unwrap();
    assert!(!own.children().contains(&process));
    child.wait().unwrap();
    assert!(!process.is_running());
}
