//! Real nodes on loopback, and a caller that acts as a router.
#![allow(dead_code, reason = "no test file uses all of it")]

use std::{
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use config::{Config, Flags, LoadInput};
use node::{Node, NodeStartError, Role};
use proto::{
    auth::{CallSigner, ClusterSecret},
    ids::Epoch,
    v1::{self, decode_event, node_client::NodeClient, observe_event, prefill_event},
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use telemetry::{LogSink, Resource, Telemetry, TelemetryConfig};
use tempfile::TempDir;
use tonic::{
    Code, Status, Streaming,
    service::interceptor::InterceptedService,
    transport::{Certificate, Channel, ClientTlsConfig, Identity},
};

/// Time-out of every wait in these tests.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
const SECRET: &str = "0123456789abcdef0123456789abcdef";
/// Context length of the dummy models.
pub(crate) const DUMMY_CONTEXT: u32 = 4096;
pub(crate) const DUMMY_VOCABULARY: u32 = 96;

/// Returns a folder with the configuration of a small model with dummy weights. It generates about
/// ten thousand tokens a second.
pub(crate) fn dummy_model() -> TempDir {
    model_of(32, 2)
}

/// Returns another model with a different fingerprint.
pub(crate) fn other_model() -> TempDir {
    model_of(64, 2)
}

/// Returns [`dummy_model`] with one more layer.
pub(crate) fn deeper_model() -> TempDir {
    model_of(32, 3)
}

/// Returns a model whose answers take seconds, so that tests can disturb them.
pub(crate) fn slow_model() -> TempDir {
    model_of(512, 8)
}

/// Returns a model whose layers alternately have a window of `window` tokens and none.
pub(crate) fn windowed_model(window: u32) -> TempDir {
    let folder = model_of(32, 4);
    let path = folder.path().join("config.json");
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["architectures"] = serde_json::json!(["Qwen2ForCausalLM"]);
    config["model_type"] = serde_json::json!("qwen2");
    config["use_sliding_window"] = serde_json::json!(true);
    config["sliding_window"] = serde_json::json!(window);
    let kinds = ["sliding_attention", "full_attention"].repeat(2);
    config["layer_types"] = serde_json::json!(kinds);
    std::fs::write(path, config.to_string()).unwrap();
    folder
}

fn model_of(hidden_size: u32, layers: u32) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let ffn_size = 4 * hidden_size;
    let config = format!(
        r#"{{
            "architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "hidden_size": {hidden_size}, "intermediate_size": {ffn_size},
            "num_hidden_layers": {layers}, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": {DUMMY_CONTEXT},
            "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "vocab_size": {DUMMY_VOCABULARY},
            "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": [2],
            "torch_dtype": "float32"
        }}"#
    );
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    folder
}

/// Returns settings of a node on loopback with free ports, in f32.
pub(crate) fn settings(model: &Path, load_format: &str, more: &[(&str, &str)]) -> Flags {
    let mut flags: Flags = [
        ("model.path", model.to_str().unwrap()),
        ("model.name", "test-model"),
        ("model.dtype", "f32"),
        ("model.load_format", load_format),
        ("node.grpc", "127.0.0.1:0"),
        ("node.threads", "1"),
        ("node.kv_memory", "64MiB"),
        ("cluster.secret", SECRET),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .collect();
    for (key, value) in more {
        flags.insert((*key).to_owned(), (*value).to_owned());
    }
    flags
}

/// Returns settings of a dummy model's node with few slots and small steps, so that requests need
/// several batches and chunks.
pub(crate) fn dummy_settings(model: &Path, more: &[(&str, &str)]) -> Flags {
    let mut all = vec![
        ("node.blocks", "128"),
        ("node.slots", "4"),
        ("node.step_tokens", "64"),
        ("node.chunk_tokens", "32"),
    ];
    all.extend_from_slice(more);
    settings(model, "dummy", &all)
}

/// A node in this process.
pub(crate) struct TestNode {
    pub node: Node,
    pub peer: v1::Peer,
    pub client: Caller,
    epoch: bytes::Bytes,
    pub telemetry: Telemetry,
}

impl TestNode {
    pub(crate) async fn start(role: Role, flags: Flags) -> Self {
        Self::try_start(role, flags).await.unwrap_or_else(|error| panic!("{error}"))
    }

    pub(crate) async fn try_start(role: Role, flags: Flags) -> Result<Self, NodeStartError> {
        let telemetry = Telemetry::start(
            &TelemetryConfig {
                log: "off".into(),
                log_sink: LogSink::Memory(Arc::new(Mutex::new(Vec::new()))),
                ..TelemetryConfig::default()
            },
            Resource { service: "test".into(), instance: "test".into() },
        )
        .unwrap();
        let tls = client_tls(&flags);
        let config = Config::load(LoadInput { flags, ..Default::default() })
            .unwrap_or_else(|error| panic!("{error}"));
        let node = Node::start(role, &config, &telemetry.metrics(), |device| device).await?;
        let record = node.record();
        let address = node.addresses().grpc.to_string();
        let client = connect_with(&address, record.epoch, tls).await.unwrap();
        let epoch: bytes::Bytes = record.epoch.to_bytes().to_vec().into();
        let peer = v1::Peer {
            node_id: record.node_id.to_string(),
            epoch: epoch.clone(),
            control_endpoint: record.control_endpoint.clone(),
            tag: record.peer_tag.clone().into(),
        };
        Ok(Self { node, peer, client, epoch, telemetry })
    }

    pub(crate) fn side(&self) -> Side {
        Side { peer: self.peer.clone(), client: self.client.clone() }
    }

    /// Stops the node in order and asserts that nothing is left running.
    pub(crate) async fn stop(self) {
        drop(self.client);
        tokio::time::timeout(TIMEOUT, self.node.drain()).await.expect("in time").expect("in order");
    }
}

/// The node, as a router knows it.
#[derive(Clone)]
pub(crate) struct Side {
    pub peer: v1::Peer,
    pub client: Caller,
}

/// Client with the cluster secret.
pub(crate) type Caller = NodeClient<InterceptedService<Channel, CallSigner>>;

/// Returns the peer with the tag of a member.
pub(crate) fn tagged(peer: v1::Peer) -> v1::Peer {
    let tag = ClusterSecret::new(SECRET).unwrap().peer_tag(&peer);
    v1::Peer { tag: tag.to_vec().into(), ..peer }
}

pub(crate) fn signer() -> CallSigner {
    CallSigner::new(&ClusterSecret::new(SECRET).unwrap()).unwrap()
}

pub(crate) async fn connect(address: &str, node: Epoch) -> Caller {
    connect_with(address, node, None).await.unwrap()
}

/// Connects with certificates, if there are any. With certificates the client demands a server that
/// offers HTTP/2 by ALPN.
pub(crate) async fn connect_with(
    address: &str,
    node: Epoch,
    tls: Option<ClientTlsConfig>,
) -> Result<Caller, tonic::transport::Error> {
    let endpoint = match tls {
        Some(tls) => Channel::from_shared(format!("https://{address}")).unwrap().tls_config(tls)?,
        None => Channel::from_shared(format!("http://{address}")).unwrap(),
    };
    Ok(NodeClient::with_interceptor(endpoint.connect().await?, signer().to(node)))
}

/// Returns settings with certificates in this folder.
pub(crate) fn with_tls(mut flags: Flags, folder: &Path) -> Flags {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let cert = CertificateParams::new(["baton".to_owned()]).unwrap();
    let cert = cert.signed_by(&key, &authority).unwrap();
    let files = [("cert", cert.pem()), ("key", key.serialize_pem()), ("ca", authority.pem())];
    for (name, pem) in files {
        let path = folder.join(name);
        std::fs::write(&path, pem).unwrap();
        flags.insert(format!("cluster.tls_{name}"), path.display().to_string());
    }
    flags
}

/// Returns the certificates of a client of the node with these settings, if the node has
/// certificates.
pub(crate) fn client_tls(flags: &Flags) -> Option<ClientTlsConfig> {
    let pem = |setting: &str| Some(std::fs::read_to_string(flags.get(setting)?).unwrap());
    let identity = Identity::from_pem(pem("cluster.tls_cert")?, pem("cluster.tls_key")?);
    let authority = Certificate::from_pem(pem("cluster.tls_ca")?);
    Some(ClientTlsConfig::new().domain_name("baton").ca_certificate(authority).identity(identity))
}

/// Returns 16 bytes that are unique in this process.
pub(crate) fn fresh_id() -> bytes::Bytes {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut id = [0; 16];
    id[..8].copy_from_slice(&u64::from(std::process::id()).to_be_bytes());
    id[8..].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes());
    id.to_vec().into()
}

/// Returns `count` tokens of the dummy vocabulary, different for each `seed`.
pub(crate) fn dummy_prompt(count: usize, seed: u32) -> Vec<u32> {
    (0..count as u32).map(|index| 3 + (index * 7 + seed * 31 + index * index) % 90).collect()
}

/// Returns a greedy attempt of `max_tokens` without stop tokens.
pub(crate) fn attempt(tokens: &[u32], max_tokens: u32) -> v1::Attempt {
    v1::Attempt {
        request_id: fresh_id(),
        transfer_id: fresh_id(),
        tokens: tokens.to_vec(),
        prompt_len: tokens.len() as u32,
        sampling: Some(v1::Sampling {
            temperature: 0.0,
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_tokens,
            ignore_stop_tokens: true,
            ..Default::default()
        }),
        remaining_ms: 600_000,
        cache_salt: String::new(),
        session: String::new(),
        keep_ms: None,
        node_epoch: bytes::Bytes::new(),
        weight_version: 1,
        grammar: None,
        adapter: bytes::Bytes::new(),
    }
}

impl Side {
    /// Returns `attempt` addressed to this node.
    pub(crate) fn addressed(&self, attempt: &v1::Attempt) -> v1::Attempt {
        v1::Attempt { node_epoch: self.peer.epoch.clone(), ..attempt.clone() }
    }

    pub(crate) async fn try_decode(
        &self,
        attempt: &v1::Attempt,
        prefill: Option<v1::Peer>,
    ) -> Result<Streaming<v1::DecodeEvent>, Status> {
        let request = v1::DecodeRequest { attempt: Some(self.addressed(attempt)), prefill };
        let mut client = self.client.clone();
        let answer = client.decode(request);
        Ok(tokio::time::timeout(TIMEOUT, answer).await.expect("in time")?.into_inner())
    }

    pub(crate) async fn try_prefill(
        &self,
        attempt: &v1::Attempt,
        decode: v1::Peer,
    ) -> Result<Streaming<v1::PrefillEvent>, Status> {
        let request =
            v1::PrefillRequest { attempt: Some(self.addressed(attempt)), decode: Some(decode) };
        let mut client = self.client.clone();
        let answer = client.prefill(request);
        Ok(tokio::time::timeout(TIMEOUT, answer).await.expect("in time")?.into_inner())
    }

    pub(crate) async fn local_prefill(&self, attempt: &v1::Attempt) -> Decoded {
        Decoded::of(self.try_decode(attempt, None).await.expect("the node takes it")).await
    }

    pub(crate) async fn observe(&self) -> Observer {
        let stream = self.client.clone().observe(v1::ObserveRequest {}).await.unwrap();
        Observer { stream: stream.into_inner(), next: 0, load: None }
    }
}

/// A complete `Decode` stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Decoded {
    pub ids: Vec<u32>,
    pub first_index: Option<u32>,
    pub reserved: Option<v1::Reserved>,
    pub finished: Option<v1::DecodeFinished>,
    pub failure: Option<v1::Failure>,
    pub prompt: Option<v1::PromptLogprobs>,
}

impl Decoded {
    pub(crate) async fn of(mut stream: Streaming<v1::DecodeEvent>) -> Self {
        let mut decoded = Self::default();
        while let Some(event) = next(&mut stream).await.expect("the stream is whole") {
            decoded.take(event);
        }
        decoded
    }

    pub(crate) fn take(&mut self, event: v1::DecodeEvent) {
        assert!(self.finished.is_none() && self.failure.is_none(), "nothing follows the end");
        match event.event.expect("no event is empty") {
            decode_event::Event::Reserved(reserved) => {
                assert!(self.reserved.is_none() && self.ids.is_empty(), "once, before any token");
                self.reserved = Some(reserved);
            }
            decode_event::Event::Tokens(tokens) => {
                let first = *self.first_index.get_or_insert(tokens.first_index);
                assert_eq!(tokens.first_index, first + self.ids.len() as u32, "no gap");
                assert!(!tokens.tokens.is_empty());
                if self.ids.is_empty() {
                    self.prompt.clone_from(&tokens.tokens[0].prompt);
                }
                self.ids.extend(tokens.tokens.iter().map(|token| token.id));
            }
            decode_event::Event::Finished(finished) => self.finished = Some(finished),
            decode_event::Event::Failure(failure) => self.failure = Some(failure),
        }
    }
}

/// A complete `Prefill` stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Prefilled {
    pub token: Option<v1::PrefillToken>,
    pub delivered: Option<v1::Delivered>,
    pub failure: Option<v1::Failure>,
}

impl Prefilled {
    pub(crate) async fn of(mut stream: Streaming<v1::PrefillEvent>) -> Self {
        let mut prefilled = Self::default();
        while let Some(event) = next(&mut stream).await.expect("the stream is whole") {
            match event.event.expect("no event is empty") {
                prefill_event::Event::Token(token) => prefilled.token = Some(token),
                prefill_event::Event::Delivered(figures) => prefilled.delivered = Some(figures),
                prefill_event::Event::Failure(failure) => prefilled.failure = Some(failure),
            }
        }
        prefilled
    }
}

/// Makes the two calls of one attempt as a router does: concurrently, with one transfer id.
pub(crate) async fn hand_over(
    prefill: &Side,
    decode: &Side,
    attempt: &v1::Attempt,
) -> (Prefilled, Decoded) {
    let prefilled = async {
        let stream = prefill.try_prefill(attempt, decode.peer.clone()).await;
        Prefilled::of(stream.expect("P takes it")).await
    };
    let decoded = async {
        let stream = decode.try_decode(attempt, Some(prefill.peer.clone())).await;
        Decoded::of(stream.expect("D takes it")).await
    };
    tokio::join!(prefilled, decoded)
}

/// Returns the next event, or `None` at the end, within the time-out.
pub(crate) async fn next<T>(stream: &mut Streaming<T>) -> Result<Option<T>, Status> {
    tokio::time::timeout(TIMEOUT, stream.message()).await.expect("an event in time")
}

/// An `Observe` stream. Checks the event numbers.
pub(crate) struct Observer {
    stream: Streaming<v1::ObserveEvent>,
    next: u64,
    pub load: Option<v1::NodeLoad>,
}

impl Observer {
    pub(crate) async fn event(&mut self) -> Result<observe_event::Event, Status> {
        let event = next(&mut self.stream).await?.expect("the stream ends with an error only");
        assert_eq!(event.sequence, self.next, "no gap");
        self.next += 1;
        let event = event.event.expect("no event is empty");
        match &event {
            observe_event::Event::Snapshot(snapshot) => self.load = snapshot.load,
            observe_event::Event::Delta(delta) => self.load = delta.load.or(self.load),
        }
        Ok(event)
    }

    /// Reads until the load satisfies the condition. Returns the time taken.
    pub(crate) async fn until(&mut self, wanted: impl Fn(&v1::NodeLoad) -> bool) -> Duration {
        let started = Instant::now();
        while !self.load.as_ref().is_some_and(&wanted) {
            self.event().await.expect("the node is there");
        }
        started.elapsed()
    }
}

/// Returns whether no sequence and no transfer owns a block.
pub(crate) fn is_free(load: &v1::NodeLoad) -> bool {
    load.running == 0 && load.waiting == 0 && load.blocks_held == 0 && load.blocks_reserved == 0
}

/// Returns the message of a call that must be rejected with this code.
pub(crate) fn refused<T>(answer: Result<T, Status>, code: Code) -> String {
    let status = answer.err().expect("the call is refused");
    assert_eq!(status.code(), code, "{status}");
    status.message().to_owned()
}
