//! Processes by id: children, signals and their end.

use std::{
    fs,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

const DEADLINE: Duration = Duration::from_secs(60);

/// Returns state and parent of a process, or `None` if it does not exist.
fn state_of(id: u32) -> Option<(char, u32)> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name is in brackets and may contain any character.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// Returns the ids of the running children of a process, in order.
pub fn children(parent: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").expect("processes are listed").flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_child = |id: &u32| {
        state_of(*id).is_some_and(|(state, started_by)| started_by == parent && state != 'Z')
    };
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
pub fn wait_gone(ids: &[u32]) -> Result<()> {
    let deadline = Instant::now() + DEADLINE;
    while ids.iter().any(|id| state_of(*id).is_some_and(|(state, _)| state != 'Z')) {
        ensure!(Instant::now() < deadline, "processes of {ids:?} are still running");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
