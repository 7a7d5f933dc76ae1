//! Supervisor of one child process: starts, watches, restarts and stops it, and prints its log
//! lines.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader},
    process::{Child, Command},
    sync::watch,
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use super::{backoff::Backoff, console::Console};

/// Polling interval of a ready file.
const READY_POLL: Duration = Duration::from_millis(5);
/// Time between two lines about a child that is not ready yet.
const LOADING_LINE_EVERY: Duration = Duration::from_secs(30);
/// Time-out for the last lines of an exited child. A process that it started keeps the pipes open.
const LAST_LINES_MAX: Duration = Duration::from_secs(2);
/// Maximum length of a printed line in bytes; a longer line is split.
const LINE_BYTES_MAX: u64 = 16 << 10;

/// A program to run, and the name that prefixes its log lines.
pub(super) struct ChildSpec {
    pub name: String,
    pub console: Console,
    pub program: PathBuf,
    pub args: Vec<OsString>,
    pub envs: Vec<(String, String)>,
    /// Returns arguments that keep the addresses of the first start across restarts.
    pub sticky: fn(&ReadyFile) -> Vec<OsString>,
    pub ready_file: PathBuf,
    /// Time-out of a start.
    pub ready_within: Duration,
    /// Grace period from SIGTERM to SIGKILL.
    pub stop_within: Duration,
}

/// Addresses that a service writes to its ready file.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct ReadyFile {
    #[serde(default)]
    pub grpc: String,
    #[serde(default)]
    pub http: String,
    #[serde(default)]
    pub metrics: String,
    #[serde(default)]
    pub admin: String,
}

/// A child's state, published by its supervisor.
#[derive(Clone, Debug)]
pub(super) enum ChildState {
    Starting,
    Ready(ReadyFile),
    /// The first start failed; there is no restart.
    Failed(String),
    Stopped,
}

/// Runs the child until `stop`. Restarts it with back-off if it dies after it was ready once.
pub(super) async fn supervise(
    spec: ChildSpec,
    stop: CancellationToken,
    state: watch::Sender<ChildState>,
) {
    let mut backoff = Backoff::default();
    let mut known: Option<ReadyFile> = None;
    loop {
        let exit = match start(&spec, known.as_ref()) {
            Ok(running) => run_until_exit(&spec, running, &stop, &state, &mut known).await,
            Err(error) => Err(error),
        };
        if stop.is_cancelled() {
            state.send_replace(ChildState::Stopped);
            return;
        }
        let (reason, served) = match exit {
            Ok(Exit { status, served }) => (format!("exited with {status}"), served),
            Err(error) => (format!("{error:#}"), Duration::ZERO),
        };
        if known.is_none() {
            state.send_replace(ChildState::Failed(reason));
            return;
        }
        let delay = backoff.delay(served);
        let when = match delay {
            Duration::ZERO => "now".to_owned(),
            delay => format!("in {} ms", delay.as_millis()),
        };
        spec.console.say(&format!("baton: {} {reason}; restarting {when}", spec.name));
        state.send_replace(ChildState::Starting);
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = stop.cancelled() => {
                state.send_replace(ChildState::Stopped);
                return;
            }
        }
    }
}

struct RunningChild {
    child: Child,
    /// Tasks that print the child's lines until its pipes close.
    lines: JoinSet<()>,
}

fn start(spec: &ChildSpec, known: Option<&ReadyFile>) -> Result<RunningChild> {
    let _ = std::fs::remove_file(&spec.ready_file);
    let mut command = Command::new(&spec.program);
    command
        .args(&spec.args)
        .args(known.map(spec.sticky).unwrap_or_default())
        .arg("--ready-file")
        .arg(&spec.ready_file)
        .envs(spec.envs.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // Keep Ctrl-C from the child: this process decides the order of shutdown.
        .process_group(0)
        .kill_on_drop(true);
    super::die_with_parent(&mut command);
    let mut child = command.spawn().with_context(|| {
        format!("cannot start {}: cannot run {}", spec.name, spec.program.display())
    })?;
    let mut lines = JoinSet::new();
    let (console, name) = (&spec.console, &spec.name);
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    lines.spawn(print_lines(console.clone(), name.clone(), stdout.expect("stdout is piped")));
    lines.spawn(print_lines(console.clone(), name.clone(), stderr.expect("stderr is piped")));
    Ok(RunningChild { child, lines })
}

/// Exit of a child process.
struct Exit {
    status: ExitStatus,
    /// Time from ready to exit.
    served: Duration,
}

/// Publishes when the child is ready, and waits until the child has exited and its last log lines
/// are printed. Terminates the child on `stop`, or if it is not ready in time.
async fn run_until_exit(
    spec: &ChildSpec,
    mut running: RunningChild,
    stop: &CancellationToken,
    state: &watch::Sender<ChildState>,
    known: &mut Option<ReadyFile>,
) -> Result<Exit> {
    let started = Instant::now();
    let mut next_line = LOADING_LINE_EVERY;
    let mut ready_at = None;
    let status = loop {
        tokio::select! {
            status = running.child.wait() => break status?,
            () = stop.cancelled() => break terminate(&mut running.child, spec).await?,
            () = tokio::time::sleep(READY_POLL), if ready_at.is_none() => {
                if let Some(ready) = read_ready(&spec.ready_file)? {
                    ready_at = Some(Instant::now());
                    *known = Some(ready.clone());
                    state.send_replace(ChildState::Ready(ready));
                } else if started.elapsed() > spec.ready_within {
                    terminate(&mut running.child, spec).await?;
                    bail!("was not ready within {} s", spec.ready_within.as_secs());
                } else if started.elapsed() > next_line {
                    let seconds = next_line.as_secs();
                    spec.console.say(&format!(
                        "baton: {} has been loading for {seconds} s",
                        spec.name
                    ));
                    next_line += LOADING_LINE_EVERY;
                }
            }
        }
    };
    let served = ready_at.map_or(Duration::ZERO, |at| at.elapsed());
    let printed = async { while running.lines.join_next().await.is_some() {} };
    // Dropping the tasks closes the pipes.
    let _ = tokio::time::timeout(LAST_LINES_MAX, printed).await;
    Ok(Exit { status, served })
}

async fn terminate(child: &mut Child, spec: &ChildSpec) -> Result<ExitStatus> {
    let Some(id) = child.id() else { return Ok(child.wait().await?) };
    super::send_terminate(id);
    match tokio::time::timeout(spec.stop_within, child.wait()).await {
        Ok(status) => Ok(status?),
        Err(_) => {
            spec.console.say(&format!(
                "baton: {} did not stop within {:?}; killing it",
                spec.name, spec.stop_within
            ));
            child.kill().await?;
            Ok(child.wait().await?)
        }
    }
}

fn read_ready(path: &Path) -> Result<Option<ReadyFile>> {
    match std::fs::read(path) {
        // Services rename the file into place, so an existing file is complete.
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| anyhow!("cannot read ready file {}: {error}", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(anyhow!("cannot read ready file {}: {error}", path.display())),
    }
}

/// Prints lines on the console, each with the child's name: as a prefix, or as a field of a JSON
/// line, which stays JSON for a log collector.
async fn print_lines(console: Console, name: String, stream: impl AsyncRead + Unpin) {
    let prefix = super::coloured(&name);
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                let line = String::from_utf8_lossy(&line);
                let line = line.trim_end();
                console.say(&match line.strip_prefix("{\"") {
                    Some(fields) => format!("{{\"process\":\"{name}\",\"{fields}"),
                    None => format!("{prefix} {line}"),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn exit_is_noticed_while_another_process_holds_the_pipes() {
        let folder = tempfile::tempdir().unwrap();
        let spec = ChildSpec {
            name: "child".to_owned(),
            console: Console::start().unwrap().0,
            program: "/bin/sh".into(),
            args: ["-c", "sleep 15 & exit 7"].map(OsString::from).to_vec(),
            envs: Vec::new(),
            sticky: |_| Vec::new(),
            ready_file: folder.path().join("ready"),
            ready_within: Duration::from_secs(60),
            stop_within: Duration::from_secs(1),
        };
        let running = start(&spec, None).unwrap();
        let (stop, state) = (CancellationToken::new(), watch::Sender::new(ChildState::Starting));
        let mut known = None;
        let exit = run_until_exit(&spec, running, &stop, &state, &mut known);
        let exit = tokio::time::timeout(Duration::from_secs(10), exit).await;
        let exit = exit.expect("the exit is noticed").unwrap();
        assert_eq!(exit.status.code(), Some(7));
    }
}
