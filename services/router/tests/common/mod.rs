//! A router in front of scripted nodes, and a client.

#![allow(dead_code, reason = "each test binary uses its part")]

pub mod client;
pub mod node;

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use cluster::StaticMembership;
use config::LogFormat;
use proto::v1::Role;
use router::{FrontSettings, ModelSource, RouterSettings, RunningRouter};
use serde_json::{Value, json};
use telemetry::{LogSink, Resource, Telemetry, TelemetryConfig};
use text::{ModelText, ModelTextOptions, SpecialTokens};

use client::{Client, DEADLINE, eventually};
use node::{MODEL, ScriptedNode};

pub struct Cluster {
    pub router: RunningRouter,
    pub client: Client,
    pub prefill: Vec<ScriptedNode>,
    pub decode: Vec<ScriptedNode>,
    telemetry: Telemetry,
}

pub fn settings() -> RouterSettings {
    RouterSettings {
        http: "127.0.0.1:0".parse().unwrap(),
        grpc: "127.0.0.1:0".parse().unwrap(),
        drain_timeout: Duration::from_secs(10),
        open_files_max: 1024,
        front: FrontSettings::new(&config::Router::default()),
    }
}

pub fn model_path() -> PathBuf {
    let path = match std::env::var_os("BATON_TEST_MODEL") {
        Some(path) => PathBuf::from(path),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("../../models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"),
    };
    assert!(path.exists(), "{} is missing: run `make model`", path.display());
    path
}

/// The tokenizer and chat template of the model that `make model` fetches.
pub fn model_text() -> Arc<ModelText> {
    static TEXT: OnceLock<Arc<ModelText>> = OnceLock::new();
    let open = || Arc::new(ModelText::open(model_path()).unwrap());
    TEXT.get_or_init(open).clone()
}

pub fn encode(text: &str) -> Vec<u32> {
    model_text().tokenizer().encode(text, SpecialTokens::Parse).unwrap()
}

impl Cluster {
    /// So many nodes of each role, all answering with `answer`.
    pub async fn start(prefill: usize, decode: usize, answer: &str) -> Self {
        Self::start_with(settings(), prefill, decode, answer).await
    }

    pub async fn start_with(
        settings: RouterSettings,
        prefill: usize,
        decode: usize,
        answer: &str,
    ) -> Self {
        let (prefill, decode) = Self::nodes(prefill, decode, answer);
        Self::start_over(settings, prefill, decode).await
    }

    /// The nodes alone. What they report before a router starts it knows from the first request on.
    pub fn nodes(
        prefill: usize,
        decode: usize,
        answer: &str,
    ) -> (Vec<ScriptedNode>, Vec<ScriptedNode>) {
        let nodes = |role, name, count| -> Vec<ScriptedNode> {
            (0..count).map(|index| ScriptedNode::start(role, &format!("{name}-{index}"))).collect()
        };
        let prefill = nodes(Role::Prefill, "prefill", prefill);
        let decode = nodes(Role::Decode, "decode", decode);
        let tokens = encode(answer);
        for node in prefill.iter().chain(&decode) {
            node.answer_with(&tokens);
        }
        (prefill, decode)
    }

    /// A router over these nodes, all of which it has seen when this returns.
    pub async fn start_over(
        settings: RouterSettings,
        prefill: Vec<ScriptedNode>,
        decode: Vec<ScriptedNode>,
    ) -> Self {
        Self::start_models(settings, &[MODEL], prefill, decode).await
    }

    /// The same for a router that serves these models, the first by default.
    pub async fn start_models(
        settings: RouterSettings,
        names: &[&str],
        prefill: Vec<ScriptedNode>,
        decode: Vec<ScriptedNode>,
    ) -> Self {
        let source = |name: &&str| ModelSource { name: (*name).to_owned(), text: model_text() };
        let models = names.iter().map(source).collect();
        Self::start_sources(settings, models, prefill, decode).await
    }

    /// One decode node that answers with `answer`, for a model with this chat template.
    pub async fn start_with_template(template: &str, answer: &str) -> Self {
        let options =
            ModelTextOptions { chat_template: Some(template.to_owned()), tool_format: None };
        let text = Arc::new(ModelText::open_with(model_path(), options).unwrap());
        let decode = ScriptedNode::start(Role::Decode, "decode-0");
        decode.answer_with(&encode(answer));
        let model = ModelSource { name: MODEL.to_owned(), text };
        Self::start_sources(settings(), vec![model], vec![], vec![decode]).await
    }

    /// The same for models with texts of their own.
    pub async fn start_sources(
        settings: RouterSettings,
        models: Vec<ModelSource>,
        prefill: Vec<ScriptedNode>,
        decode: Vec<ScriptedNode>,
    ) -> Self {
        let cluster = Self::begin(settings, models, prefill, decode);
        let (prefill, decode) = (cluster.prefill.len(), cluster.decode.len());
        cluster.wait_nodes(prefill, decode).await;
        cluster
    }

    /// The same, without waiting for anything.
    pub fn begin(
        settings: RouterSettings,
        models: Vec<ModelSource>,
        prefill: Vec<ScriptedNode>,
        decode: Vec<ScriptedNode>,
    ) -> Self {
        let urls = |nodes: &[ScriptedNode]| nodes.iter().map(|node| node.url()).collect::<Vec<_>>();
        let members = StaticMembership::new(urls(&prefill), urls(&decode)).unwrap();
        let telemetry = Telemetry::start(
            &TelemetryConfig {
                log: "off".into(),
                log_format: LogFormat::Json,
                otlp: None,
                log_sink: LogSink::Stderr,
            },
            Resource { service: "baton-router".into(), instance: "test".into() },
        )
        .unwrap();
        let metrics = telemetry.metrics();
        let router = router::start(settings, models, Box::new(members), metrics).unwrap();
        let client = Client::new(format!("http://{}", router.http));
        Self { router, client, prefill, decode, telemetry }
    }

    pub async fn wait_nodes(&self, prefill: usize, decode: usize) {
        eventually(&format!("{prefill} prefill and {decode} decode nodes"), async || {
            let answer = self.client.get("/health").await;
            let health = answer.json();
            health["prefill_nodes"] == prefill
                && health["decode_nodes"] == decode
                && (answer.status == 200 || decode == 0)
        })
        .await;
    }

    /// Subscriber that sends spans and logs to the cluster's telemetry.
    pub fn dispatch(&self) -> tracing::Dispatch {
        self.telemetry.dispatch()
    }

    /// How long after `since` every node's stream of this call was dropped.
    pub async fn dropped_after(&self, call: usize, since: Instant) -> Duration {
        let mut after = Duration::ZERO;
        for node in self.prefill.iter().chain(&self.decode) {
            let left = async || node.calls().get(call).and_then(|call| *call.left.lock().unwrap());
            eventually("the call is dropped", async || left().await.is_some()).await;
            let at = left().await.expect("it was dropped");
            after = after.max(at.saturating_duration_since(since));
        }
        after
    }

    /// How many requests ended so.
    pub async fn finished(&self, end: &str) -> f64 {
        let label = format!("finished_reason=\"{end}\"");
        self.metric("baton_requests_finished_total", &[&label]).await
    }

    /// The sum of a metric's samples whose line holds all of `labels`.
    pub async fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let text = String::from_utf8(self.client.get("/metrics").await.body.to_vec()).unwrap();
        text.lines()
            .filter(|line| {
                line.starts_with(name) && labels.iter().all(|label| line.contains(label))
            })
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }
}

/// A connection to the router's gRPC port.
pub async fn grpc_channel(cluster: &Cluster) -> tonic::transport::Channel {
    let url = format!("http://{}", cluster.router.grpc);
    tonic::transport::Channel::from_shared(url).unwrap().connect().await.unwrap()
}

/// The remains of a disconnected client must be released within a second. Nothing in the router waits here, so that one
/// of a few tries is that fast even where other processes have the machine; a timer that some code
/// waits for would slow down all of them.
pub async fn one_within_a_second(mut one_try: impl AsyncFnMut() -> Duration) {
    let mut took = Vec::new();
    while took.len() < 5 {
        let after = one_try().await;
        assert!(after < DEADLINE, "{after:?}");
        if after < Duration::from_secs(1) {
            return;
        }
        took.push(after);
    }
    panic!("no try was over within a second: {took:?}");
}

/// A long completion for this model, with further fields.
pub fn completion_of(model: &Value, fields: Value) -> Value {
    let mut body = json!({"model": model, "prompt": long_prompt(), "max_tokens": 50});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// A prompt long enough to be worth a transfer, as token ids.
pub fn long_prompt() -> Vec<u32> {
    (0..100).map(|index| 1000 + index).collect()
}
