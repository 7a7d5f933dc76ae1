//! Logs and signals at a terminal. The program `script` creates the terminal.

use std::{
    io::Write,
    process::{ChildStdin, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use integration_tests::{
    cluster::{SECRET, bin_dir, whole_smollm2},
    lines::Lines,
};
use serde_json::Value;
use test_harness::KilledOnDrop;

const DEADLINE: Duration = Duration::from_secs(60);
/// Byte of Ctrl-C on a terminal.
const CONTROL_C: &[u8] = b"\x03";

/// A command on its own terminal.
struct Terminal {
    script: KilledOnDrop,
    keyboard: ChildStdin,
    screen: Lines,
}

impl Terminal {
    fn run(command: &str) -> Result<Self> {
        // Without `exec` some shells stay, receive the Ctrl-C too and report a signal.
        let command = format!("exec {command}");
        let mut script = Command::new("script")
            .args(["--quiet", "--return", "--command", &command, "/dev/null"])
            .env("SHELL", "/bin/sh")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot run script (Debian: bsdutils)")?;
        let keyboard = script.stdin.take().expect("stdin is piped");
        let screen = Lines::of(script.stdout.take().expect("stdout is piped"));
        Ok(Self { script: KilledOnDrop(script), keyboard, screen })
    }

    fn press_control_c(&mut self) -> Result<()> {
        self.keyboard.write_all(CONTROL_C)?;
        Ok(self.keyboard.flush()?)
    }

    /// Returns the whole output of a command that succeeded.
    fn end(&mut self) -> Result<&[String]> {
        let deadline = Instant::now() + DEADLINE;
        let status = loop {
            match self.script.try_wait()? {
                Some(status) => break status,
                None => std::thread::sleep(Duration::from_millis(10)),
            }
            ensure!(Instant::now() < deadline, "no end after {:#?}", self.screen.seen());
        };
        let shown = self.screen.all();
        ensure!(status.success(), "{status}: {shown:#?}");
        Ok(shown)
    }
}

fn router() -> String {
    let (program, model) = (bin_dir().join("baton-router"), whole_smollm2());
    format!(
        "{} --model-path {} --router-http 127.0.0.1:0 --router-grpc 127.0.0.1:0 --router-admin 127.0.0.1:0 \
         --cluster-secret {SECRET}",
        program.display(),
        model.display()
    )
}

fn up(flags: &str) -> String {
    let (program, model) = (bin_dir().join("baton"), whole_smollm2());
    format!(
        "{} up --model {} --http 127.0.0.1:0 --grpc 127.0.0.1:0 {flags}",
        program.display(),
        model.display()
    )
}

#[test]
fn logs_are_text_on_a_terminal_and_json_elsewhere() -> Result<()> {
    let mut terminal = Terminal::run(&router())?;
    let line = terminal.screen.wait_for("serving")?;
    assert!(line.contains("INFO") && line.contains("\x1b["), "{line:?}");
    terminal.press_control_c()?;
    let shown = terminal.end()?;
    assert!(!shown.iter().any(|line| line.starts_with('{')), "{shown:#?}");

    let command = router();
    let mut words = command.split(' ');
    let mut router = Command::new(words.next().expect("a program"))
        .args(words)
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut log = Lines::of(router.stderr.take().expect("stderr is piped"));
    let line = log.wait_for("serving");
    router.kill()?;
    router.wait()?;
    line?;
    for line in log.all() {
        let line: Value = serde_json::from_str(line).with_context(|| line.clone())?;
        assert!(line["level"].is_string() && line["message"].is_string(), "{line}");
    }
    Ok(())
}

#[test]
fn no_log_line_cuts_into_the_sample_answer() -> Result<()> {
    let command = format!("env BATON_TELEMETRY_LOG=trace {}", up("--sample --once"));
    let mut terminal = Terminal::run(&command)?;
    let shown = terminal.end()?;
    let question = shown.iter().position(|line| line.starts_with("> ")).context("no question")?;
    let (before, rest) = shown.split_at(question);
    assert_eq!(rest[1], "The capital of France is Paris.", "{rest:#?}");
    assert!(rest[2].starts_with("[8 tokens; "), "{rest:#?}");
    // Every child has printed coloured lines, and its log lines of the request follow the answer.
    for name in ["prefill-0", "decode-0", "router"] {
        let prefix = format!("m[{name}]\x1b[0m ");
        let speaks = |lines: &[String]| lines.iter().any(|line| line.contains(&prefix));
        assert!(speaks(before) && speaks(&rest[3..]), "{name} is silent");
    }
    Ok(())
}

#[test]
fn control_c_stops_the_router_first_and_then_the_nodes() -> Result<()> {
    let mut terminal = Terminal::run(&up(""))?;
    terminal.screen.wait_for("baton: ready")?;
    terminal.press_control_c()?;
    let shown = terminal.end()?;
    let position = |words: [&str; 2]| {
        let found = shown.iter().position(|line| words.iter().all(|word| line.contains(word)));
        found.with_context(|| format!("no line with {words:?} in {shown:#?}"))
    };
    let stopping = position(["baton: shutting down", ""])?;
    let router_stopped = position(["[router]", "stopped"])?;
    assert!(stopping < router_stopped, "{shown:#?}");
    for node in ["[prefill-0]", "[decode-0]"] {
        assert!(router_stopped < position([node, "drains"])?, "{shown:#?}");
        position([node, "stopped"])?;
    }
    Ok(())
}
