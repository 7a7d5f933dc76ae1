//! A router in front of scripted nodes, and a client.

#![allow(dead_code, reason = "each test binary uses its part")]

pub mod client;
pub mod node;

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};

use cluster::StaticMembership;
use config::LogFormat;
use proto::v1::Role;
use router::{FrontSettings, RouterSettings, RunningRouter};
use telemetry::{LogSink, Resource, Telemetry, TelemetryConfig};
use text::{ModelText, SpecialTokens};

use client::{Client, eventually};
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
        front: FrontSettings::new(&config::Router::default(), MODEL.into()),
    }
}

/// The tokenizer and chat template of the model that `make model` fetches.
pub fn model_text() -> Arc<ModelText> {
    static TEXT: OnceLock<Arc<ModelText>> = OnceLock::new();
    let open = || {
        let path = match std::env::var_os("BATON_TEST_MODEL") {
            Some(path) => PathBuf::from(path),
            None => PathBuf::from(env!("CARGO_MANIFEST_DIR"))
                .join("../../models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"),
        };
        assert!(path.exists(), "{} is missing: run `make model`", path.display());
        Arc::new(ModelText::open(path).unwrap())
    };
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
        let nodes = |role, name, count| -> Vec<ScriptedNode> {
            (0..count).map(|index| ScriptedNode::start(role, &format!("{name}-{index}"))).collect()
        };
        let prefill = nodes(Role::Prefill, "prefill", prefill);
        let decode = nodes(Role::Decode, "decode", decode);
        let tokens = encode(answer);
        for node in prefill.iter().chain(&decode) {
            node.answer_with(&tokens);
        }
        Self::start_over(settings, prefill, decode).await
    }

    /// A router over these nodes, all of which it has seen when this returns.
    pub async fn start_over(
        settings: RouterSettings,
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
        let router = router::start(settings, model_text(), Box::new(members), metrics).unwrap();
        let client = Client::new(format!("http://{}", router.http));
        let cluster = Self { router, client, prefill, decode, telemetry };
        let (prefill, decode) = (cluster.prefill.len(), cluster.decode.len());
        cluster.wait_nodes(prefill, decode).await;
        cluster
    }

    pub async fn wait_nodes(&self, prefill: usize, decode: usize) {
        eventually(&format!("{prefill} prefill and {decode} decode nodes"), async || {
            let health = self.client.get("/health").await.json();
            health["prefill_nodes"] == prefill && health["decode_nodes"] == decode
        })
        .await;
    }

    /// What is told while this is the thread's subscriber goes to the cluster's telemetry.
    pub fn dispatch(&self) -> tracing::Dispatch {
        self.telemetry.dispatch()
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

/// A prompt long enough to be worth a transfer, as token ids.
pub fn long_prompt() -> Vec<u32> {
    (0..100).map(|index| 1000 + index).collect()
}
