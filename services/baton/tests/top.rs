//! `baton top` against an admin API with fixed answers, in a terminal of the program `script` and
//! without a terminal.

use std::{
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::{ChildStdin, Command, Stdio},
    sync::{Arc, Mutex, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use test_harness::KilledOnDrop;

/// Time-out of every wait.
const DEADLINE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);
/// Name of a node that rings, clears the screen and starts a new line.
const HOSTILE: &str = "node\x07\x1b[2J\nname";
/// Deadline of one request of `baton top`.
const READ_WITHIN: Duration = Duration::from_secs(5);

fn answer(path: &str) -> Value {
    match path {
        "/v1/nodes" => json!({"links": [], "links_left_out": 0, "nodes": [{
            "node": HOSTILE, "role": "decode", "grpc": "http://a:1", "health": "up", "reason": "",
            "draining": true, "excluded": null, "pause": null, "both_roles": false, "model": "m",
            "running": 2, "prefilling": 1, "waiting": 0, "pending_prompt_tokens": 0, "in_flight": 2,
            "blocks": 100, "blocks_free": 40, "blocks_cached": 20}]}),
        "/v1/explain?recent=50" => {
            json!({"running": 1, "ended": 0, "oldest_s": null, "requests": [{
            "request_id": "0123456789abcdef", "label": "job-1", "model": "m", "api": "chat.completion",
            "received_unix_ms": 0, "end": "running", "error": null, "waits_for": null,
            "prompt_tokens": 5, "completion_tokens": null, "ttft_ms": null, "duration_ms": 1.5}]})
        }
        "/v1/weights" => json!({"update": null, "nodes": [
            {"node": HOSTILE, "role": "decode", "model": "m", "weight_version": "v1"}]}),
        other => panic!("unexpected path {other}"),
    }
}

/// An admin API with fixed answers.
struct Admin {
    address: SocketAddr,
    /// Dropping it stops the thread at the next connection.
    serves: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Admin {
    fn start(address: &str) -> Self {
        let listener = TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap();
        let (serves, is_serving) = mpsc::channel();
        let thread = thread::spawn(move || {
            for stream in listener.incoming() {
                if is_serving.try_recv() == Err(mpsc::TryRecvError::Disconnected) {
                    return;
                }
                // The client may have ended.
                let _ = reply(stream.unwrap());
            }
        });
        Self { address, serves, thread }
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn stop(self) {
        drop(self.serves);
        drop(TcpStream::connect(self.address).unwrap());
        self.thread.join().unwrap();
    }
}

/// Answers one request and closes the connection.
fn reply(stream: TcpStream) -> std::io::Result<()> {
    let mut reader = BufReader::new(&stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head)? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
    let body = answer(head.split(' ').nth(1).unwrap()).to_string();
    let length = body.len();
    write!(
        &stream,
        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

fn baton() -> &'static str {
    env!("CARGO_BIN_EXE_baton")
}

/// `baton top` on its own terminal of 30 lines and 250 columns.
struct Terminal {
    script: KilledOnDrop,
    keyboard: ChildStdin,
    output: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl Terminal {
    /// Writes the state of the terminal before and after the command to files in the folder.
    fn run(folder: &Path, flags: &str) -> Self {
        let folder = folder.display();
        let command = format!(
            "stty rows 30 columns 250; stty --all >{folder}/before; {} top {flags}; code=$?; \
             stty --all >{folder}/after; exit $code",
            baton()
        );
        let mut script = Command::new("script")
            .args(["--quiet", "--return", "--command", &command, "/dev/null"])
            .env("SHELL", "/bin/sh")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("script is installed (Debian: bsdutils)");
        let (keyboard, mut stdout) = (script.stdin.take().unwrap(), script.stdout.take().unwrap());
        let output = Arc::new(Mutex::new(Vec::new()));
        let written = output.clone();
        let reader = thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = stdout.read(&mut bytes) {
                written.lock().unwrap().extend(&bytes[..count]);
            }
        });
        Self { script: KilledOnDrop(script), keyboard, output, reader }
    }

    fn output(&self) -> String {
        String::from_utf8_lossy(&self.output.lock().unwrap()).into_owned()
    }

    /// Waits until the last complete frame meets the condition.
    fn wait(&self, condition: impl Fn(&str) -> bool) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let output = self.output();
            let complete = output.rsplit_once("\x1b[J").map_or("", |(frames, _)| frames);
            let frame = complete.rsplit_once("\x1b[H").map_or("", |(_, frame)| frame);
            if condition(frame) {
                return;
            }
            assert!(Instant::now() < deadline, "{output:?}");
            thread::sleep(POLL);
        }
    }

    /// Presses a key that ends the command, and returns the whole output.
    fn end(mut self, key: &[u8]) -> String {
        self.keyboard.write_all(key).unwrap();
        self.keyboard.flush().unwrap();
        let deadline = Instant::now() + DEADLINE;
        let status = loop {
            match self.script.try_wait().unwrap() {
                Some(status) => break status,
                None => thread::sleep(POLL),
            }
            assert!(Instant::now() < deadline, "{:?}", self.output());
        };
        self.reader.join().unwrap();
        let output = String::from_utf8(std::mem::take(&mut *self.output.lock().unwrap())).unwrap();
        assert!(status.success(), "{status}: {output:?}");
        output
    }
}

/// Checks that the command left the alternate screen and the modes of the terminal as before.
fn assert_restored(folder: &Path, output: &str) {
    assert!(output.starts_with("\x1b[?1049h\x1b[?25l"), "{output:?}");
    assert!(output.ends_with("\x1b[?25h\x1b[?1049l"), "{output:?}");
    let state = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    assert_eq!(state("after"), state("before"));
    assert!(state("after").contains(" icanon"), "{}", state("after"));
}

#[test]
fn top_reports_an_unreachable_router_until_it_recovers_and_restores_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let admin = Admin::start("127.0.0.1:0");
    let terminal = Terminal::run(folder.path(), &format!("--interval 1 --admin {}", admin.url()));
    terminal.wait(|frame| frame.contains("job-1") && frame.contains("draining"));
    let address = admin.address.to_string();
    admin.stop();
    // The data stay.
    terminal.wait(|frame| frame.contains("no answer for") && frame.contains("job-1"));
    let admin = Admin::start(&address);
    terminal.wait(|frame| !frame.contains("no answer for") && frame.contains("job-1"));
    // Keys without a meaning: x, and F2, whose code ends in Q.
    let output = terminal.end(b"\x1bOQxq");
    admin.stop();
    assert_restored(folder.path(), &output);
    assert!(!output.contains('\x07') && !output.contains("\x1b[2J"), "{output:?}");
    assert!(output.contains("node��[2J�name"), "{output:?}");
}

#[test]
fn control_c_ends_top_while_the_router_is_silent() {
    let folder = tempfile::tempdir().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let terminal = Terminal::run(folder.path(), &format!("--admin {url}"));
    terminal.wait(|frame| frame.contains("no answer within 5s"));
    // Three requests that timed out, and the first one of the next read.
    let _connections: Vec<_> = (0..4).map(|_| silent.accept().unwrap()).collect();
    let began = Instant::now();
    let output = terminal.end(b"\x03");
    assert!(began.elapsed() < READ_WITHIN, "{:?}", began.elapsed());
    assert_restored(folder.path(), &output);
}

#[test]
fn top_without_a_terminal_prints_one_table() {
    let admin = Admin::start("127.0.0.1:0");
    for flags in [&[][..], &["--once"], &["--interval", "1"]] {
        let mut command = Command::new(baton());
        let output = command.arg("top").args(flags).args(["--admin", &admin.url()]).output();
        let output = output.unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        let words = ["NODE", "draining", "40% of 100", "job-1", "Weights: no update", "v1"];
        let positions = words.map(|words| text.find(words));
        assert!(positions.iter().all(Option::is_some) && positions.is_sorted(), "{text}");
    }
    let url = admin.url();
    admin.stop();
    let output = Command::new(baton()).args(["top", "--once", "--admin", &url]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(error.starts_with("baton: cannot reach the router's admin API at http://"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}
