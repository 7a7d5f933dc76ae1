//! The router's binary: exit codes and signals.

use std::{
    fs::Permissions,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use test_harness::KilledOnDrop;

const SECRET: &str = "0123456789abcdef0123456789abcdef";
/// Time-out of every wait for the process.
const DEADLINE: Duration = Duration::from_secs(60);

fn router(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton-router"));
    command.env_clear().env("BATON_CLUSTER_SECRET", SECRET);
    command.args(arguments).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Returns the output and the exit code of a process that ends by itself.
fn ended(arguments: &[&str]) -> (String, Option<i32>) {
    let mut child = router(arguments).spawn().unwrap();
    let code = wait(&mut child).code();
    (said_by(&mut child), code)
}

/// Returns the standard error of a process that has ended.
fn said_by(child: &mut Child) -> String {
    let mut said = Vec::new();
    child.stderr.take().unwrap().read_to_end(&mut said).unwrap();
    String::from_utf8_lossy(&said).into_owned()
}

fn wait(child: &mut Child) -> ExitStatus {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("the process does not end; it said\n{}", said_by(child));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn invalid_flag_or_setting_is_a_usage_error() {
    for (arguments, word) in [
        (&["--no-such-flag"][..], "no-such-flag"),
        (&[], "model.path"),
        (&["--router-http", "nowhere"], "router.http"),
    ] {
        let (said, code) = ended(arguments);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(word), "{said}");
    }
}

#[test]
fn missing_chat_template_is_reported_with_its_setting() {
    let models = ["--model-path", "/nowhere/a.gguf", "--router-models", "b=/nowhere/b.gguf"];
    for (flag, value, key) in [
        ("--model-chat-template", "/nowhere/t.jinja", "model.chat_template"),
        ("--router-chat-templates", "b=/nowhere/t.jinja", "router.chat_templates"),
    ] {
        let arguments = [&models[..], &[flag, value]].concat();
        let (said, code) = ended(&arguments);
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains(key) && said.contains("/nowhere/t.jinja"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn template_that_cannot_render_a_plain_chat_is_an_error_at_start() {
    const TOKENIZER: &str = r#"{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
        "decoder": {"type": "ByteLevel"}}"#;
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("chat_template.jinja");
    std::fs::write(folder.path().join("tokenizer.json"), TOKENIZER).unwrap();
    std::fs::write(&template, "{{ messages | nothing }}").unwrap();
    let (model, template) = (folder.path().to_str().unwrap(), template.to_str().unwrap());
    let reason = "filter nothing is unknown (line 1)";
    for (arguments, words) in [
        (&["--model-path", model][..], ["cannot serve", "set model.chat_template"]),
        (
            &["--model-path", model, "--model-chat-template", template],
            ["model.chat_template", template],
        ),
    ] {
        let (said, code) = ended(arguments);
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains(reason) && words.iter().all(|it| said.contains(it)), "{said}");
    }
}

#[test]
fn secret_file_that_every_user_can_read_is_reported_at_start() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), SECRET).unwrap();
    for (mode, warnings) in [(0o644, 1), (0o640, 0)] {
        std::fs::set_permissions(file.path(), Permissions::from_mode(mode)).unwrap();
        let mut command = router(&["--model-path", "/nowhere/model.gguf"]);
        command.env_remove("BATON_CLUSTER_SECRET").arg("--cluster-secret-file").arg(file.path());
        let mut child = command.spawn().unwrap();
        assert_eq!(wait(&mut child).code(), Some(1));
        let said = said_by(&mut child);
        let path = file.path().to_str().unwrap();
        let warns = |line: &&str| line.contains("has mode 0644") && line.contains(path);
        assert_eq!(said.lines().filter(warns).count(), warnings, "{said}");
        assert!(!said.contains(SECRET), "{said}");
    }
}

#[test]
fn missing_model_is_a_start_failure() {
    let (said, code) = ended(&["--model-path", "/nowhere/model.gguf"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("/nowhere/model.gguf"), "{said}");
}

/// Returns a GGUF file with a SentencePiece vocabulary and an embedding of this many rows.
fn gguf(tokens: &[&str], rows: u64) -> Vec<u8> {
    fn put(file: &mut Vec<u8>, text: &str) {
        file.extend((text.len() as u64).to_le_bytes());
        file.extend(text.as_bytes());
    }
    let mut file = b"GGUF".to_vec();
    file.extend(3u32.to_le_bytes());
    [1u64, 3].iter().for_each(|count| file.extend(count.to_le_bytes()));
    put(&mut file, "tokenizer.ggml.model");
    file.extend(8u32.to_le_bytes());
    put(&mut file, "llama");
    for (key, kind) in [("tokenizer.ggml.tokens", 8u32), ("tokenizer.ggml.scores", 6)] {
        put(&mut file, key);
        file.extend(9u32.to_le_bytes());
        file.extend(kind.to_le_bytes());
        file.extend((tokens.len() as u64).to_le_bytes());
        for token in tokens {
            match kind {
                8 => put(&mut file, token),
                _ => file.extend(0f32.to_le_bytes()),
            }
        }
    }
    put(&mut file, "token_embd.weight");
    file.extend(2u32.to_le_bytes());
    [1, rows].iter().for_each(|dim| file.extend(dim.to_le_bytes()));
    file.extend(0u32.to_le_bytes());
    file.extend(0u64.to_le_bytes());
    file.resize(file.len().next_multiple_of(32) + 4 * rows as usize, 0);
    file
}

#[test]
fn tokenizer_of_another_model_is_rejected_with_both_vocabulary_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    std::fs::write(&file, gguf(&["a", "b", "c", "d", "e"], 4)).unwrap();
    let tokenizer = r#"{"decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "merges": [],
        "vocab": {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}}}"#;
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer).unwrap();
    std::fs::write(folder.path().join("config.json"), r#"{"vocab_size": 4}"#).unwrap();
    for (path, words) in [
        (file.as_path(), &["model.gguf", "has 5 tokens", "has 4 rows", "different models"][..]),
        (folder.path(), &["config.json", "is 4", "token id 4", "different models"]),
    ] {
        let (said, code) = ended(&["--model-path", path.to_str().unwrap()]);
        assert_eq!(code, Some(1), "{said}");
        let errors: Vec<&str> = said.lines().filter(|line| !line.contains("INFO")).collect();
        assert_eq!(errors.len(), 1, "{said}");
        for word in words {
            assert!(errors[0].contains(word), "{said:?} does not say {word:?}");
        }
    }
}

#[test]
fn signal_stops_a_router_that_is_loading_its_model() {
    const BYTES: usize = 100 << 20;
    let folder = tempfile::tempdir().unwrap();
    // Parsing takes far longer than the delivery of a signal.
    let tokenizer = format!("{{\"added_tokens\": [], \"x\": [{}0]}}", "0,".repeat(BYTES / 2));
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer).unwrap();
    let model = folder.path().to_str().unwrap();
    let mut child = router(&["--model-path", model]).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let memory_kib = || -> Option<usize> {
        let status = std::fs::read_to_string(&status).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.split_whitespace().next()?.parse().ok()
    };
    // The router is parsing the file and already handles signals.
    let deadline = Instant::now() + DEADLINE;
    while memory_kib().is_none_or(|memory| memory < BYTES >> 10) {
        if Instant::now() > deadline || child.try_wait().unwrap().is_some() {
            let _ = child.kill();
            panic!("the router does not read its model: {}", said_by(&mut child));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert_eq!(wait(&mut child).code(), Some(0));
}

/// A serving router with limits on its open files.
struct Serving {
    child: KilledOnDrop,
    http: SocketAddr,
    folder: tempfile::TempDir,
}

impl Serving {
    fn start(ulimits: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (model, ready) = (folder.path().join("model.gguf"), folder.path().join("ready"));
        let bytes: Vec<String> = (0..=255u8).map(|byte| format!("<0x{byte:02X}>")).collect();
        let tokens: Vec<&str> = bytes.iter().map(String::as_str).collect();
        std::fs::write(&model, gguf(&tokens, 256)).unwrap();
        let child = Command::new("sh")
            .args(["-c", &format!("{ulimits} && exec \"$@\""), "sh"])
            .arg(env!("CARGO_BIN_EXE_baton-router"))
            .env("BATON_CLUSTER_SECRET", SECRET)
            .args(["--router-http", "127.0.0.1:0", "--router-grpc", "127.0.0.1:0"])
            .args(["--router-admin", "127.0.0.1:0", "--router-drain-delay", "10m"])
            .args(["--cluster-decode", "http://127.0.0.1:1", "--model-path"])
            .arg(&model)
            .arg("--ready-file")
            .arg(&ready)
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(folder.path().join("log")).unwrap())
            .spawn()
            .unwrap();
        let mut child = KilledOnDrop(child);
        let deadline = Instant::now() + DEADLINE;
        while !ready.exists() {
            assert!(child.try_wait().unwrap().is_none() && Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(5));
        }
        let ready = std::fs::read(&ready).unwrap();
        let ready: serde_json::Value = serde_json::from_slice(&ready).unwrap();
        let http = ready["http"].as_str().unwrap().parse().unwrap();
        Self { child, http, folder }
    }

    fn connect(&self, sent: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.http).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.write_all(sent).unwrap();
        stream
    }

    /// Returns the status line of a GET on a new connection.
    fn get(&self, path: &str) -> String {
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        let mut response = String::new();
        self.connect(request.as_bytes()).read_to_string(&mut response).unwrap();
        response.lines().next().unwrap_or_default().to_owned()
    }
}

#[test]
fn probes_are_answered_while_idle_connections_fill_the_port() {
    let router = Serving::start("ulimit -n 256");
    let kept_alive: Vec<TcpStream> = (0..150)
        .map(|_| {
            let mut stream = router.connect(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n");
            let mut head = [0; 12];
            stream.read_exact(&mut head).unwrap();
            assert_eq!(&head, b"HTTP/1.1 200");
            stream
        })
        .collect();
    let half_sent: Vec<TcpStream> =
        (0..150).map(|_| router.connect(b"POST /v1/completions HTTP/1.1\r\nho")).collect();
    let asked = Instant::now();
    assert_eq!(router.get("/live"), "HTTP/1.1 200 OK");
    assert_eq!(router.get("/metrics"), "HTTP/1.1 200 OK");
    assert_eq!(router.get("/health"), "HTTP/1.1 503 Service Unavailable", "there is no node");
    // The time-out of a request head is ten seconds: no probe waited for it.
    assert!(asked.elapsed() < Duration::from_secs(8), "{:?}", asked.elapsed());
    // The router closed the connection that was idle longest.
    let mut rest = String::new();
    kept_alive.into_iter().next().unwrap().read_to_string(&mut rest).unwrap();
    assert!(rest.ends_with("live\n"), "{rest}");
    drop(half_sent);
}

#[test]
fn the_soft_limit_on_open_files_is_raised_to_the_hard_one() {
    let router = Serving::start("ulimit -Sn 256 && ulimit -Hn 512");
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", router.child.id())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    assert_eq!(line.split_whitespace().collect::<Vec<_>>()[3..5], ["512", "512"]);
}

#[test]
fn terminated_router_serves_for_its_drain_delay_unless_a_second_signal_comes() {
    for (first, is_leaving) in [("-TERM", true), ("-INT", false)] {
        let mut router = Serving::start("ulimit -n 256");
        let mut kept_alive = router.connect(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n");
        let mut head = [0; 12];
        kept_alive.read_exact(&mut head).unwrap();
        let pid = router.child.id().to_string();
        let signal = |name: &str| {
            assert!(Command::new("kill").args([name, pid.as_str()]).status().unwrap().success());
        };
        signal(first);
        if is_leaving {
            let log = || std::fs::read_to_string(router.folder.path().join("log")).unwrap();
            let deadline = Instant::now() + DEADLINE;
            while !log().contains("shutting down: ready") {
                assert!(Instant::now() < deadline, "{}", log());
                std::thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(router.get("/live"), "HTTP/1.1 200 OK");
            // The client of a kept connection learns that it must open another one.
            kept_alive.write_all(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
            let mut response = String::new();
            kept_alive.read_to_string(&mut response).unwrap();
            assert!(response.contains("HTTP/1.1 200 OK"), "{response}");
            assert!(response.contains("connection: close"), "{response}");
            signal(first);
        }
        assert_eq!(wait(&mut router.child).code(), Some(0));
    }
}

#[test]
fn request_log_line_has_one_request_id_and_at_most_three_decimals() {
    let router = Serving::start("ulimit -n 256");
    let request = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
                   content-type: application/json\r\ncontent-length: 34\r\n\r\n\
                   {\"prompt\": \"hi\", \"max_tokens\": -2}";
    let mut response = String::new();
    router.connect(request.as_bytes()).read_to_string(&mut response).unwrap();
    assert!(response.starts_with("HTTP/1.1 400"), "{response}");
    let deadline = Instant::now() + DEADLINE;
    let line = loop {
        let log = std::fs::read_to_string(router.folder.path().join("log")).unwrap();
        let mut lines = log.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        if let Some(line) = lines.find(|line| line.contains("request ended")) {
            break line.to_owned();
        }
        assert!(Instant::now() < deadline, "{log}");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(line.matches("request_id").count(), 1, "{line}");
    let fields: serde_json::Value = serde_json::from_str(&line).unwrap();
    let duration = fields["duration_ms"].as_f64().unwrap().to_string();
    let decimals = duration.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    assert!(decimals <= 3, "{line}");
}
