//! Processes: children, signals and their end. The start time identifies a process, because the
//! system reuses process ids.

use std::{
    fs,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

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
        let Stat { state, started, .. } = stat_of(id)?;
        (state != 'Z').then_some(Self { id, started })
    }

    pub fn is_running(self) -> bool {
        Self::running(self.id) == Some(self)
    }

    /// Returns the running children of this process, in the order of their ids.
    pub fn children(self) -> Vec<Self> {
        children(self.id).into_iter().filter_map(Self::running).collect()
    }

    pub fn signal(self, name: &str) {
        assert!(self.is_running(), "{self:?} is not running");
        signal(self.id, name);
    }
}

/// Fields of `/proc/PID/stat` (see proc(5)).
#[derive(Debug, PartialEq)]
struct Stat {
    state: char,
    parent: u32,
    started: u64,
}

/// Returns fields 3, 4 and 22.
fn parse_stat(stat: &str) -> Option<Stat> {
    // The name is in brackets and may contain any character.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?.chars().next()?;
    let parent = fields.next()?.parse().ok()?;
    Some(Stat { state, parent, started: fields.nth(22 - 5)?.parse().ok()? })
}

fn stat_of(id: u32) -> Option<Stat> {
    parse_stat(&fs::read_to_string(format!("/proc/{id}/stat")).ok()?)
}

/// Returns the ids of the running children of a process, in order.
pub fn children(parent: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").expect("processes are listed").flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_child =
        |id: &u32| stat_of(*id).is_some_and(|stat| stat.parent == parent && stat.state != 'Z');
    let mut found: Vec<u32> = ids.filter(is_child).collect();
    found.sort_unstable();
    found
}

/// Returns the program and its arguments. Empty if the process has ended.
pub fn arguments(id: u32) -> Vec<String> {
    let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
    let words = line.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// Sends a signal such as `KILL` to a process of the test.
pub fn signal(id: u32, name: &str) {
    let status = Command::new("kill").args([format!("-{name}"), id.to_string()]).status();
    assert!(status.is_ok_and(|status| status.success()), "cannot signal {id}");
}

/// Waits until no process of the list is running.
pub fn wait_gone(processes: &[Process]) -> Result<()> {
    let deadline = Instant::now() + DEADLINE;
    while let Some(left) = processes.iter().find(|process| process.is_running()) {
        ensure!(Instant::now() < deadline, "{left:?} is still running after {DEADLINE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_names_with_brackets_are_parsed() {
        let fields: Vec<String> = (4..=52).map(|field| field.to_string()).collect();
        let stat = parse_stat(&format!("17 (a) S 1 (b) R {}\n", fields.join(" ")));
        assert_eq!(stat, Some(Stat { state: 'R', parent: 4, started: 22 }));
        assert_eq!(parse_stat("17 (a) R 4 5"), None);
    }

    #[test]
    fn reused_process_id_is_another_process() {
        let own = Process::running(std::process::id()).unwrap();
        let before = Process { started: own.started - 1, ..own };
        assert!(own.is_running() && !before.is_running() && own != before);
        wait_gone(&[before]).unwrap();
    }

    #[test]
    fn ended_child_is_not_running_before_it_is_reaped() {
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
}
