//! A router with scripted nodes, and a client.

#![allow(dead_code, reason = "each test binary uses its part")]

pub(crate) mod client;
pub(crate) mod node;

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use membership::Membership;
use proto::{auth::ClusterSecret, v1::Role};
use router::{ModelSource, RouterSettings, RunningRouter};
use serde_json::{Value, json};
use telemetry::{Resource, Telemetry, TelemetryConfig};
use text::{ModelText, ModelTextOptions, SpecialTokens};

use client::{Client, eventually};
use node::{MODEL, ScriptedNode};

pub(crate) const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// Template in the style of Qwen and Hermes: tools in a system message, calls between tags.
pub(crate) const HERMES: &str = r#"{%- if tools %}
    {{- '<|im_start|>system\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools>\nTo call: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"#;

/// Answer with a text and two calls in the format of [`HERMES`].
pub(crate) const TWO_CALLS: &str = "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \
    \"Köln\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call>";

pub(crate) struct Cluster {
    pub router: RunningRouter,
    pub client: Client,
    pub prefill: Vec<ScriptedNode>,
    pub decode: Vec<ScriptedNode>,
    telemetry: Telemetry,
}

pub(crate) fn settings() -> RouterSettings {
    let router = config::Router {
        http: "127.0.0.1:0".parse().unwrap(),
        grpc: "127.0.0.1:0".parse().unwrap(),
        admin: "127.0.0.1:0".parse().unwrap(),
        drain_timeout: Some(Duration::from_secs(10)),
        ..config::Router::default()
    };
    RouterSettings::new(router, ClusterSecret::new(SECRET).unwrap(), 1024)
}

pub(crate) fn model_path() -> PathBuf {
    let path = match std::env::var_os("BATON_TEST_MODEL") {
        Some(path) => PathBuf::from(path),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("../../models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"),
    };
    assert!(path.exists(), "{} is missing: run `make model`", path.display());
    path
}

/// Returns the tokenizer and chat template of the model that `make model` downloads.
pub(crate) fn model_text() -> Arc<ModelText> {
    static TEXT: OnceLock<Arc<ModelText>> = OnceLock::new();
    let open = || Arc::new(ModelText::open(model_path()).unwrap());
    TEXT.get_or_init(open).clone()
}

pub(crate) fn encode(text: &str) -> Vec<u32> {
    model_text().tokenizer().encode(text, SpecialTokens::Parse).unwrap()
}

impl Cluster {
    /// Starts a router with this many nodes of each role, all answering with `answer`.
    pub(crate) async fn start(prefill: usize, decode: usize, answer: &str) -> Self {
        Self::start_with(settings(), prefill, decode, answer).await
    }

    pub(crate) async fn start_with(
        settings: RouterSettings,
        prefill: usize,
        decode: usize,
        answer: &str,
    ) -> Self {
        let (prefill, decode) = Self::nodes(prefill, decode, answer);
        Self::start_over(settings, prefill, decode).await
    }

    /// Starts only the nodes. A router started later observes their reported loads before its first
    /// request.
    pub(crate) fn nodes(
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

    /// Starts a router over these nodes and waits until the router has observed all of them.
    pub(crate) async fn start_over(
        settings: RouterSettings,
        prefill: Vec<ScriptedNode>,
        decode: Vec<ScriptedNode>,
    ) -> Self {
        Self::start_models(settings, &[MODEL], prefill, decode).await
    }

    /// Starts a router that serves these models. The first one is the default.
    pub(crate) async fn start_models(
        settings: RouterSettings,
        names: &[&str],
        prefill: Vec<ScriptedNode>,
        decode: Vec<ScriptedNode>,
    ) -> Self {
        let source = |name: &&str| ModelSource { name: (*name).to_owned(), text: model_text() };
        let models = names.iter().map(source).collect();
        Self::start_sources(settings, models, prefill, decode).await
    }

    /// Starts a router with one decode node that answers with `answer`, for a model with this chat
    /// template.
    pub(crate) async fn start_with_template(template: &str, answer: &str) -> Self {
        let options =
            ModelTextOptions { chat_template: Some(template.to_owned()), ..Default::default() };
        let text = Arc::new(ModelText::open_with(model_path(), options).unwrap());
        let decode = ScriptedNode::start(Role::Decode, "decode-0");
        decode.answer_with(&encode(answer));
        let model = ModelSource { name: MODEL.to_owned(), text };
        Self::start_sources(settings(), vec![model], vec![], vec![decode]).await
    }

    /// Starts a router that serves these models, and waits until the router has observed all nodes.
    pub(crate) async fn start_sources(
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

    /// Starts a router without waiting for its nodes.
    pub(crate) fn begin(
        settings: RouterSettings,
        models: Vec<ModelSource>,
        prefill: Vec<ScriptedNode>,
        decode: Vec<ScriptedNode>,
    ) -> Self {
        let urls = |nodes: &[ScriptedNode]| nodes.iter().map(|node| node.url()).collect::<Vec<_>>();
        let members = Membership::listed(urls(&prefill), urls(&decode)).unwrap();
        Self::begin_with(settings, models, members, prefill, decode)
    }

    /// Starts a router over these members.
    pub(crate) fn begin_with(
        settings: RouterSettings,
        models: Vec<ModelSource>,
        members: Membership,
        prefill: Vec<ScriptedNode>,
        decode: Vec<ScriptedNode>,
    ) -> Self {
        let telemetry = Telemetry::start(
            &TelemetryConfig { log: "off".into(), ..TelemetryConfig::default() },
            Resource { service: "baton-router".into(), instance: "test".into() },
        )
        .unwrap();
        let metrics = telemetry.metrics();
        let router = router::start(settings, models, members, metrics).unwrap();
        let client = Client::new(format!("http://{}", router.http));
        Self { router, client, prefill, decode, telemetry }
    }

    pub(crate) async fn wait_nodes(&self, prefill: usize, decode: usize) {
        eventually(&format!("{prefill} prefill and {decode} decode nodes"), async || {
            let answer = self.client.get("/health").await;
            let health = answer.json();
            health["prefill_nodes"] == prefill
                && health["decode_nodes"] == decode
                && (answer.status == 200 || decode == 0)
        })
        .await;
    }

    /// Returns a tracing dispatcher that sends to the cluster's telemetry.
    pub(crate) fn dispatch(&self) -> tracing::Dispatch {
        self.telemetry.dispatch()
    }

    /// Returns the time from `since` until every node's stream of this call was dropped.
    pub(crate) async fn dropped_after(&self, call: usize, since: Instant) -> Duration {
        let mut after = Duration::ZERO;
        for node in self.prefill.iter().chain(&self.decode) {
            let left = async || node.calls().get(call).and_then(|call| *call.left.lock().unwrap());
            eventually("the call is dropped", async || left().await.is_some()).await;
            let at = left().await.expect("it was dropped");
            after = after.max(at.saturating_duration_since(since));
        }
        after
    }

    /// Returns the number of requests with this outcome.
    pub(crate) async fn finished(&self, end: &str) -> f64 {
        let label = format!("finished_reason=\"{end}\"");
        self.metric("baton_requests_finished_total", &[&label]).await
    }

    /// Returns the sum of a metric's samples whose line contains all `labels`.
    pub(crate) async fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let text = String::from_utf8(self.client.get("/metrics").await.body.to_vec()).unwrap();
        text.lines()
            .filter(|line| {
                line.starts_with(name) && labels.iter().all(|label| line.contains(label))
            })
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }
}

/// Returns a connection to the router's gRPC port.
pub(crate) async fn grpc_channel(cluster: &Cluster) -> tonic::transport::Channel {
    let url = format!("http://{}", cluster.router.grpc);
    tonic::transport::Channel::from_shared(url).unwrap().connect().await.unwrap()
}

/// Asserts that the median of five tries is at most a second.
pub(crate) async fn median_within_a_second(what: &str, mut one_try: impl AsyncFnMut() -> Duration) {
    let mut took = Vec::new();
    while took.len() < 5 {
        took.push(one_try().await);
    }
    test_harness::assert_median(what, &took, Duration::from_secs(1));
}

/// Returns a long completion for this model, with further fields.
pub(crate) fn completion_of(model: &Value, fields: Value) -> Value {
    let mut body = json!({"model": model, "prompt": long_prompt(), "max_tokens": 50});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// Returns the token ids of a prompt that is long enough for a transfer.
pub(crate) fn long_prompt() -> Vec<u32> {
    (0..100).map(|index| 1000 + index).collect()
}
