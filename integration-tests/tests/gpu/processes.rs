//! Processes that tests start and kill. The start time identifies a process, because the system
//! reuses process ids.

use std::{
    fs,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use integration_tests::processes;

/// Time limit for the end of killed processes and of their children.
const DEADLINE: Duration = Duration::from_secs(60);

/// Identity of one process, even if the system reuses its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    pub id: u32,
    /// Start time in clock ticks since boot.
    started: u64,
}

impl Process {
    /// Returns the running process with this id.
    pub fn running(id: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        let (state, started) = state_and_start(&stat)?;
        (state != "Z").then_some(Self { id, started })
    }

    pub fn is_running(self) -> bool {
        Self::running(self.id) == Some(self)
    }

    /// Returns the running children of this process.
    pub fn children(self) -> Vec<Self> {
        processes::children(self.id).into_iter().filter_map(Self::running).collect()
    }

    pub fn signal(self, name: &str) {
        assert!(self.is_running(), "{self:?} is not running");
        processes::signal(self.id, name);
    }
}

/// Returns fields 3 and 22 of `/proc/PID/stat` (see proc(5)).
fn state_and_start(stat: &str) -> Option<(&str, u64)> {
    // The name is in brackets and may contain any character.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?;
    Some((state, fields.nth(22 - 4)?.parse().ok()?))
}

/// Waits until no process of the list is running.
pub fn wait_gone(processes: &[Process]) -> Result<()> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let left: Vec<&Process> = processes.iter().filter(|process| process.is_running()).collect();
        if left.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{left:?} still running after {DEADLINE:?}");
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
