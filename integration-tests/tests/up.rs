//! `baton up` as a user runs it.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use integration_tests::{
    client::Client,
    cluster::{bin_dir, smollm2},
};
use serde_json::json;

const DEADLINE: Duration = Duration::from_secs(60);

struct Up {
    child: Child,
    lines: mpsc::Receiver<String>,
    seen: Vec<String>,
}

impl Up {
    fn start(args: &[&str]) -> Result<Self> {
        let mut child = Command::new(bin_dir().join("baton"))
            .args(["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model"])
            .arg(smollm2())
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot run baton")?;
        let (sender, lines) = mpsc::channel();
        let stderr = child.stderr.take().expect("stderr is piped");
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, lines, seen: Vec::new() })
    }

    /// Reads on until a line holds `words`.
    fn line_with(&mut self, words: &str) -> Result<String> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self
                .lines
                .recv_timeout(left)
                .with_context(|| format!("no line with {words:?} in\n{}", self.seen.join("\n")))?;
            self.seen.push(line.clone());
            if line.contains(words) {
                return Ok(line);
            }
        }
    }

    fn interrupt(&self) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-INT", &id]).status().is_ok_and(|s| s.success()));
    }

    fn wait(&mut self) -> Result<Option<i32>> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status.code());
            }
            ensure!(Instant::now() < deadline, "baton up does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ids of processes whose parent is `parent`.
fn children_of(parent: u32) -> Vec<(u32, String)> {
    let mut children = Vec::new();
    for entry in std::fs::read_dir("/proc").expect("proc is mounted").flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{id}/stat")) else { continue };
        let Some((name, rest)) = stat.rsplit_once(')') else { continue };
        let name = name.split_once('(').map_or("", |(_, name)| name).to_owned();
        if rest.split_whitespace().nth(1) == Some(&parent.to_string()) {
            children.push((id, name));
        }
    }
    children
}

#[test]
fn once_answers_shows_figures_and_stops_cleanly() -> Result<()> {
    let mut up = Up::start(&["--sample", "--once"])?;
    let mut answer = String::new();
    up.child.stdout.take().expect("stdout is piped").read_to_string(&mut answer)?;
    assert_eq!(up.wait()?, Some(0), "{answer}");
    for words in ["Paris", "time to first token", "tokens/s", "of KV moved", "decoded by decode-0"]
    {
        assert!(answer.contains(words), "{answer:?} lacks {words:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_child_comes_back_and_an_interrupt_stops_everything() -> Result<()> {
    let mut up = Up::start(&["--decode", "2"])?;
    let ready = up.line_with("baton: ready")?;
    let http =
        ready.split_whitespace().find(|word| word.starts_with("http://")).context("no URL")?;
    let client = Client::new(http.trim_end_matches("/v1").to_owned());
    let body = json!({"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0});
    assert_eq!(client.post("/v1/completions", &body).await?.status, 200);

    let children = children_of(up.child.id());
    assert_eq!(children.len(), 4, "{children:?}");
    let (victim, _) = children
        .iter()
        .find(|(_, name)| name.starts_with("baton-decode"))
        .context("no decode node")?;
    let killed = Command::new("kill").args(["-KILL", &victim.to_string()]).status()?;
    assert!(killed.success());
    up.line_with("starting it again")?;
    assert_eq!(client.post("/v1/completions", &body).await?.status, 200);
    let deadline = Instant::now() + DEADLINE;
    loop {
        let (_, health) = client.get_json("/health").await?;
        if health["decode_nodes"] == 2 {
            break;
        }
        ensure!(Instant::now() < deadline, "the node does not come back: {health}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    let children = children_of(up.child.id());
    up.interrupt();
    assert_eq!(up.wait()?, Some(0));
    for (id, name) in children {
        assert!(!std::path::Path::new(&format!("/proc/{id}")).exists(), "{name} is left behind");
    }
    Ok(())
}

#[test]
fn killing_it_leaves_no_child_behind() -> Result<()> {
    let mut up = Up::start(&[])?;
    up.line_with("baton: ready")?;
    let children = children_of(up.child.id());
    assert_eq!(children.len(), 3);
    up.child.kill()?;
    up.child.wait()?;
    let deadline = Instant::now() + DEADLINE;
    for (id, name) in children {
        while std::path::Path::new(&format!("/proc/{id}")).exists() {
            ensure!(Instant::now() < deadline, "{name} is left behind");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}

#[test]
fn a_wrong_model_or_a_taken_port_ends_with_one_clear_line() -> Result<()> {
    let run = |args: &[&str]| -> Result<(Option<i32>, String)> {
        let output = Command::new(bin_dir().join("baton"))
            .arg("up")
            .args(args)
            .stdin(Stdio::null())
            .output()?;
        Ok((output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned()))
    };
    let (code, said) = run(&["--model", "nobody"])?;
    assert_eq!(code, Some(1));
    assert!(said.contains("nobody") && said.contains("smollm2-135m"), "{said}");

    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    let model = smollm2().display().to_string();
    let (code, said) = run(&["--model", &model, "--http", &address])?;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(&address), "{said}");
    Ok(())
}
