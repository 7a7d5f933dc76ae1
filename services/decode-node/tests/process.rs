//! The decode node's binary: arguments, ready file, probes, signals, exit codes.

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use proto::{
    auth::{CallSigner, ClusterSecret},
    ids::Epoch,
    v1::{self, node_client::NodeClient},
};
use test_harness::{KilledOnDrop, output_within};

const TIMEOUT: Duration = Duration::from_secs(30);
const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// Returns a folder with only the configuration of a model whose answers take seconds.
fn model() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512,
        "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "vocab_size": 96, "tie_word_embeddings": false, "torch_dtype": "float32"
    }"#;
    fs::write(folder.path().join("config.json"), config).unwrap();
    folder
}

/// Returns a command that starts the node with valid settings; `more` are further flags.
fn command(model: &tempfile::TempDir, more: &[&str]) -> Command {
    let mut command = bare(more);
    command
        .env("BATON_MODEL_PATH", model.path())
        .env("BATON_MODEL_LOAD_FORMAT", "dummy")
        .env("BATON_NODE_GRPC", "127.0.0.1:0")
        .env("BATON_NODE_KV_MEMORY", "16MiB")
        .env("BATON_CLUSTER_SECRET", SECRET);
    command
}

fn bare(more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton-decode-node"));
    command.args(more).env_clear().stdin(Stdio::null());
    command
}

/// Runs a command that must exit by itself. Returns its exit code and its standard error.
fn ended(mut command: Command) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = output_within(&mut command, TIMEOUT);
    (status.code(), String::from_utf8(stderr).unwrap())
}

/// A ready node. Dropping it kills the process.
struct Running {
    child: KilledOnDrop,
    ready: serde_json::Value,
    _folder: tempfile::TempDir,
}

impl Running {
    fn start(model: &tempfile::TempDir, more: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file: PathBuf = folder.path().join("ready.json");
        let mut command = command(model, more);
        let child = command.arg("--ready-file").arg(&file).stderr(Stdio::piped()).spawn();
        let mut child = KilledOnDrop(child.unwrap());
        let deadline = Instant::now() + TIMEOUT;
        let ready = loop {
            if let Ok(text) = fs::read_to_string(&file) {
                break serde_json::from_str(&text).expect("the file is whole when it is there");
            }
            assert_eq!(child.try_wait().unwrap(), None, "the node ended early");
            assert!(Instant::now() < deadline, "the node was not ready in time");
            std::thread::sleep(Duration::from_millis(5));
        };
        Self { child, ready, _folder: folder }
    }

    fn address(&self, name: &str) -> &str {
        self.ready[name].as_str().unwrap()
    }

    fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.child.id().to_string()]).status();
        assert!(status.unwrap().success());
    }

    fn wait(&mut self) -> Option<i32> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "the node did not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns the standard error of a node that has ended.
    fn log(&mut self) -> String {
        let mut text = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        text
    }

    fn http(&self, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address("metrics")).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: node\r\nconnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
        (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
    }
}

#[test]
fn node_writes_its_ready_file_answers_probes_and_exits_on_either_signal() {
    let model = model();
    for signal in ["-TERM", "-INT"] {
        let mut node = Running::start(&model, &[]);
        assert_eq!(node.ready["ready"], true);
        assert!(node.address("control").starts_with("tcp://127.0.0.1:"));
        assert!(node.address("data").starts_with("tcp://127.0.0.1:"));
        TcpStream::connect(node.address("grpc")).unwrap();
        assert_eq!(node.http("/live").0, 200);
        assert_eq!(node.http("/ready").0, 200);
        // The request may arrive before the node's first load report.
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let (status, metrics) = node.http("/metrics");
            assert_eq!(status, 200);
            let names = ["baton_kv_blocks{", "baton_kv_transfer_active"];
            if names.iter().all(|name| metrics.contains(name)) {
                break;
            }
            assert!(Instant::now() < deadline, "one of {names:?} is missing in\n{metrics}");
            std::thread::sleep(Duration::from_millis(5));
        }
        node.signal(signal);
        assert_eq!(node.wait(), Some(0));
        let log = node.log();
        let ready = log.lines().filter(|line| line.contains("node is ready")).count();
        assert_eq!(ready, 1, "{log}");
        assert!(log.contains(node.address("grpc")), "{log}");
    }
}

#[test]
fn usage_errors_exit_with_2_and_name_the_argument() {
    let model = model();
    let cases: [(Command, &[&str]); 8] = [
        (command(&model, &["--node-id", "a b"]), &["node.id", "a b"]),
        (command(&model, &["--cluster-secret", "short"]), &["cluster.secret", "16"]),
        (bare(&[]), &["model.path", "BATON_MODEL_PATH"]),
        (command(&model, &["--no-such-flag"]), &["--no-such-flag"]),
        (command(&model, &["--node-slots", "many"]), &["node.slots", "many"]),
        (
            command(&model, &["--node-slots", "1000", "--node-step-tokens", "512"]),
            &["node.slots", "node.step_tokens"],
        ),
        (
            {
                let mut command = command(&model, &[]);
                command.env("BATON_NODE_SLOT", "4");
                command
            },
            &["BATON_NODE_SLOT", "BATON_NODE_SLOTS"],
        ),
        (
            {
                let mut command = command(&model, &[]);
                command.env_remove("BATON_CLUSTER_SECRET");
                command
            },
            &["cluster.secret"],
        ),
    ];
    for (command, words) in cases {
        let (code, said) = ended(command);
        assert_eq!(code, Some(2), "{said}");
        for word in words {
            assert!(said.contains(word), "{said:?} does not say {word:?}");
        }
    }
}

#[test]
fn start_failures_exit_with_1_and_one_line() {
    let model = model();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let cases: [(&[&str], &[&str]); 8] = [
        (&["--model-path", "/no/such/model"], &["/no/such/model"]),
        (&["--model-load-format", "auto"], &["safetensors"]),
        (&["--node-grpc", &taken], &["node.grpc", &taken, "in use"]),
        (&["--node-metrics", &taken], &["node.metrics", &taken, "in use"]),
        (&["--transfer-control", &taken], &["control messages", &taken]),
        (&["--transfer-data", &taken], &["KV", &taken, "in use"]),
        (&["--node-sequence-tokens-max", "9999"], &["node.sequence_tokens_max", "4096"]),
        (
            // One thread cannot read 100 MB of weights in 1 ms.
            &["--node-itl-max", "1ms", "--node-threads", "1", "--model-dtype", "f32"],
            &["node.itl_max = 1ms: a step that decodes one row takes ", "expected at least "],
        ),
    ];
    for (flags, words) in cases {
        let (code, said) = ended(command(&model, flags));
        let errors: Vec<&str> = said.lines().filter(|line| !line.contains("INFO")).collect();
        assert_eq!(code, Some(1), "{flags:?}: {said}");
        assert_eq!(errors.len(), 1, "{flags:?}: {said}");
        for word in words {
            assert!(errors[0].contains(word), "{flags:?}: {said:?} does not say {word:?}");
        }
    }
}

#[test]
fn node_logs_derived_settings_with_their_reasons_in_one_line() {
    let model = model();
    let flags = ["--node-slots", "16", "--node-itl-max", "10s", "--node-step-tokens", "auto"];
    let mut node = Running::start(&model, &flags);
    node.signal("-TERM");
    assert_eq!(node.wait(), Some(0));
    let log = node.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("that are auto")).collect();
    let [line] = lines[..] else { panic!("{log}") };
    for words in [
        "node.step_tokens = 512 (512 tokens keep a CPU's matrix units busy",
        "node.chunk_tokens = 256 (two prompts share a step of a CPU)",
        "node.slots = 16 (set)",
        "node.waiting_max = 64 (4 full batches)",
        "node.itl_max = 10000ms (set)",
        "transfer.chunk_bytes = 4MiB (2 ms at 2 GB/s",
    ] {
        assert!(line.contains(words), "{words:?} is not in {line}");
    }
}

/// Starts a long answer and waits for its first event.
async fn begin_long_answer(node: &Running) -> tonic::Streaming<v1::DecodeEvent> {
    let endpoint = format!("http://{}", node.address("grpc"));
    let channel = tonic::transport::Channel::from_shared(endpoint).unwrap().connect_lazy();
    let signer = CallSigner::new(&ClusterSecret::new(SECRET).unwrap()).unwrap();
    let mut observer = NodeClient::with_interceptor(channel.clone(), signer.clone());
    let mut observe = observer.observe(v1::ObserveRequest {}).await.unwrap().into_inner();
    let Some(v1::observe_event::Event::Snapshot(snapshot)) =
        observe.message().await.unwrap().unwrap().event
    else {
        panic!("no snapshot");
    };
    let node_epoch = snapshot.record.unwrap().epoch;
    let signer = signer.to(Epoch::from_bytes(&node_epoch).unwrap());
    let mut client = NodeClient::with_interceptor(channel, signer);
    let attempt = v1::Attempt {
        request_id: vec![1; 16].into(),
        transfer_id: vec![2; 16].into(),
        tokens: vec![5; 20],
        prompt_len: 20,
        sampling: Some(v1::Sampling {
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_tokens: 400,
            ignore_stop_tokens: true,
            ..Default::default()
        }),
        remaining_ms: 60_000,
        node_epoch,
        weight_version: 1,
        grammar: None,
        ..Default::default()
    };
    let request = v1::DecodeRequest { attempt: Some(attempt), prefill: None };
    let mut stream = client.decode(request).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    stream
}

#[tokio::test]
async fn terminated_node_finishes_its_requests() {
    let model = model();
    let mut node = Running::start(&model, &[]);
    let mut stream = begin_long_answer(&node).await;
    node.signal("-TERM");
    let mut finished = false;
    while let Some(event) = stream.message().await.unwrap() {
        finished |= matches!(event.event, Some(v1::decode_event::Event::Finished(_)));
    }
    assert!(finished);
    let waited = tokio::task::spawn_blocking(move || node.wait());
    assert_eq!(waited.await.unwrap(), Some(0));
}

#[tokio::test]
async fn second_signal_stops_a_draining_node_at_once() {
    let model = model();
    let mut node = Running::start(&model, &[]);
    let mut stream = begin_long_answer(&node).await;
    node.signal("-TERM");
    // A draining node fails its readiness probe and continues its requests.
    let deadline = Instant::now() + TIMEOUT;
    while node.http("/ready").0 == 200 {
        assert!(Instant::now() < deadline);
    }
    assert!(stream.message().await.unwrap().is_some());
    node.signal("-TERM");
    let (node, code) = tokio::task::spawn_blocking(move || {
        let code = node.wait();
        (node, code)
    })
    .await
    .unwrap();
    // Exit code 0 is for a node whose requests have finished.
    assert_eq!(code, Some(1));
    drop(node);
}
