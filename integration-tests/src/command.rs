//! Runs programs that must end by themselves, with a time-out.

use std::{
    fs::File,
    io::{Read, Seek},
    process::{Command, ExitStatus, Output, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

/// Time-out of every program, long enough for a busy machine.
const DEADLINE: Duration = Duration::from_secs(600);

/// Returns the output of a program. Kills a program that has not ended in time, and fails.
pub fn output(command: &mut Command) -> Result<Output> {
    output_within(command, DEADLINE)
}

fn output_within(command: &mut Command, time: Duration) -> Result<Output> {
    // Files instead of pipes: a surviving grandchild that inherits a pipe would block the reader.
    let (mut stdout, mut stderr) = (tempfile::tempfile()?, tempfile::tempfile()?);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(stdout.try_clone()?)
        .stderr(stderr.try_clone()?)
        .spawn()
        .with_context(|| format!("cannot run {command:?}"))?;
    let deadline = Instant::now() + time;
    let status: Option<ExitStatus> = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            break None;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let (stdout, stderr) = (whole(&mut stdout)?, whole(&mut stderr)?);
    let Some(status) = status else {
        let said = String::from_utf8_lossy(&stderr);
        bail!("{command:?} did not end within {time:?}; it said\n{said}");
    };
    Ok(Output { status, stdout, stderr })
}

fn whole(file: &mut File) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn child_that_exits_is_reaped_and_one_that_does_not_is_killed() {
        let mut both = Command::new("sh");
        let heard = output(both.args(["-c", "echo out; echo err >&2; exit 3"])).unwrap();
        assert_eq!((heard.status.code(), &heard.stdout[..]), (Some(3), &b"out\n"[..]));
        assert_eq!(heard.stderr, b"err\n");
        let mut endless = Command::new("sh");
        endless.args(["-c", "echo begun >&2; exec sleep 600"]);
        let error = output_within(&mut endless, Duration::from_secs(1)).unwrap_err().to_string();
        assert!(error.contains("did not end within 1s"), "{error}");
    }
}
