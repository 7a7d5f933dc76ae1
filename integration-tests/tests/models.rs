//! Two models of different shape in one cluster. The router selects nodes by the request's model
//! name.

#[allow(dead_code)]
#[path = "hugging_face/folder.rs"]
mod folder;

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use integration_tests::{
    client::{Client, Completion, greedy_body},
    cluster::{Cluster, ClusterSpec, SECRET, Service, smollm2},
    golden::{GoldenRun, longest},
};
use serde_json::{Value, json};

const LARGE: &str = "smollm2";
const TINY: &str = "tiny";
const TOKENS: usize = 12;
const DEADLINE: Duration = Duration::from_secs(60);

/// A prefill and a decode node.
struct Nodes {
    prefill: Service,
    decode: Service,
}

impl Nodes {
    fn start(folder: &Path, name: &str, model: &Path, load_format: &str) -> Result<Self> {
        let prefill = start(folder, "prefill", name, model, load_format)?;
        Ok(Self { prefill, decode: start(folder, "decode", name, model, load_format)? })
    }

    fn kill(&mut self) {
        self.prefill.kill();
        self.decode.kill();
    }
}

/// Starts a node of the model.
fn start(
    folder: &Path,
    role: &str,
    name: &str,
    model: &Path,
    load_format: &str,
) -> Result<Service> {
    let settings = settings(&[
        ("BATON_MODEL_PATH", &model.display().to_string()),
        ("BATON_MODEL_NAME", name),
        ("BATON_MODEL_DTYPE", "f32"),
        ("BATON_MODEL_LOAD_FORMAT", load_format),
        ("BATON_NODE_ID", &format!("{role}-{name}")),
        ("BATON_NODE_GRPC", "127.0.0.1:0"),
        ("BATON_NODE_KV_MEMORY", "64MiB"),
        ("BATON_CLUSTER_SECRET", SECRET),
    ]);
    Service::start(folder, &format!("{role}-{name}"), &format!("baton-{role}-node"), &settings)
}

fn settings(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[tokio::test]
async fn each_model_has_its_own_template_and_tool_format() -> Result<()> {
    let folder = tempfile::tempdir()?;
    folder::write_tiny_config(folder.path(), 256)?;
    folder::write_tokenizer(&smollm2(), folder.path())?;
    // This template renders tools, but does not request a format of calls.
    let template = folder.path().join("tools.jinja");
    let text = "{{ tools | tojson }}{% for message in messages %}{{ message.content }}{% endfor %}";
    std::fs::write(&template, text)?;
    let names = ["own", "shown", "told"];
    let node = |name: &&str| start(folder.path(), "decode", name, folder.path(), "dummy");
    let nodes = names.iter().map(node).collect::<Result<Vec<Service>>>()?;
    let urls: Vec<&str> = nodes.iter().map(|node| node.ready.grpc.as_str()).collect();
    let model = folder.path().display().to_string();
    let template = template.display().to_string();
    let router = Service::start(
        folder.path(),
        "router",
        "baton-router",
        &settings(&[
            ("BATON_MODEL_PATH", &model),
            ("BATON_MODEL_NAME", "own"),
            ("BATON_ROUTER_MODELS", &format!("shown={model},told={model}")),
            ("BATON_ROUTER_CHAT_TEMPLATES", &format!("shown={template},told={template}")),
            ("BATON_ROUTER_TOOL_FORMATS", "told=hermes"),
            ("BATON_ROUTER_HTTP", "127.0.0.1:0"),
            ("BATON_ROUTER_GRPC", "127.0.0.1:0"),
            ("BATON_ROUTER_ADMIN", "127.0.0.1:0"),
            ("BATON_CLUSTER_DECODE", &urls.join(",")),
        ]),
    )?;
    let client = Client::new(format!("http://{}", router.ready.http));
    for name in names {
        wait_nodes(&client, name, [0, 1]).await?;
    }
    let ask = async |name: &str| -> Result<_> {
        let body = json!({"model": name, "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 4, "tools": [{"type": "function", "function": {"name": "f"}}]});
        client.post("/v1/chat/completions", &body).await
    };
    for name in ["own", "shown"] {
        let refused = ask(name).await?;
        assert_eq!(refused.status, 400, "{name}: {}", refused.json());
        assert_eq!(refused.json()["error"]["param"], "tools", "{name}: {}", refused.json());
    }
    let told = ask("told").await?;
    assert_eq!(told.status, 200, "{}", told.json());

    let mut prompts = Vec::new();
    for name in ["own", "told"] {
        let body = json!({"model": name, "messages": [{"role": "user", "content": "Hello"}]});
        let tokens = client.post("/tokenize", &body).await?.json()["tokens"].clone();
        let body = json!({"model": name, "tokens": tokens});
        prompts.push(client.post("/detokenize", &body).await?.json()["prompt"].clone());
    }
    assert!(
        prompts[0].as_str().is_some_and(|text| text.contains("<|im_start|>user")),
        "{prompts:?}"
    );
    assert!(prompts[1].as_str().is_some_and(|text| text.ends_with("Hello")), "{prompts:?}");
    Ok(())
}

/// Returns the tiny model's answer from a cluster without other models.
async fn tiny_alone(model: &Path, prompt_ids: &[u32]) -> Result<Vec<u32>> {
    let spec = ClusterSpec {
        model: model.to_owned(),
        load_format: "dummy",
        ..ClusterSpec::smollm2().nodes(0, 1)
    };
    let cluster = Cluster::start(spec).await?;
    let found = Client::new(cluster.http()).greedy(prompt_ids, TOKENS).await?;
    cluster.stop()?;
    Ok(found)
}

async fn ask(client: &Client, name: Option<&str>, run: &GoldenRun) -> Result<Completion> {
    let mut body = greedy_body(&run.prompt_ids, TOKENS);
    if let Some(name) = name {
        body["model"] = json!(name);
    }
    client.complete(&body).await
}

/// Returns the numbers of prefill and decode nodes of the model in the router's `/health`.
async fn nodes_of(client: &Client, name: &str) -> Result<[u64; 2]> {
    let (_, health) = client.get_json("/health").await?;
    let models = health["models"].as_array().with_context(|| format!("no models: {health}"))?;
    let model =
        models.iter().find(|model| model["name"] == name).context("the model is not listed")?;
    Ok(["prefill_nodes", "decode_nodes"].map(|count| model[count].as_u64().unwrap_or(u64::MAX)))
}

async fn wait_nodes(client: &Client, name: &str, wanted: [u64; 2]) -> Result<()> {
    let deadline = Instant::now() + DEADLINE;
    while nodes_of(client, name).await? != wanted {
        ensure!(Instant::now() < deadline, "{name}: {:?}", nodes_of(client, name).await?);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// A prefill node of one rank sends its KV to a decode node whose ranks have whole experts.
#[tokio::test]
async fn ranks_with_whole_experts_answer_as_one_rank() -> Result<()> {
    let model = tempfile::tempdir()?;
    // Two ranks do not divide the width of an expert.
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 21, "vocab_size": 49_152, "max_position_embeddings": 256,
        "tie_word_embeddings": true, "eos_token_id": 2
    });
    fs::write(model.path().join("config.json"), config.to_string())?;
    folder::write_tokenizer(&smollm2(), model.path())?;
    let prompt: Vec<u32> = (0..50).map(|at| (at * at * 31 + at) % 49_152).collect();
    let expected = tiny_alone(model.path(), &prompt).await?;

    let spec = ClusterSpec {
        model: model.path().to_owned(),
        load_format: "dummy",
        ..ClusterSpec::of(1, 1).set("BATON_NODE_DEVICE", "cpu").set_decode("BATON_NODE_TP", 2)
    };
    let cluster = Cluster::start(spec).await?;
    let client = Client::new(cluster.http());
    assert_eq!(client.greedy(&prompt, TOKENS).await?, expected);
    let decode = &cluster.decode[0];
    assert!(decode.metric("baton_kv_transfer_bytes_total").await? > 0.0);
    let metric = async |name: &str| decode.metric(&format!("baton_experts_{name}_total")).await;
    let (layers, distinct) = (metric("layers").await?, metric("distinct").await?);
    // A decode step of one row uses three experts in each layer.
    assert!(layers >= 2.0 * (TOKENS - 1) as f64 && distinct >= 3.0 * layers, "{layers} {distinct}");
    let (rows, rows_max) = (metric("rows").await?, metric("rows_max").await?);
    // Three rows are never divided evenly over two ranks.
    assert!(rows < rows_max && rows_max <= 2.0 * rows, "{rows} {rows_max}");
    cluster.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_model_name_is_served_by_its_nodes_and_a_dead_model_disturbs_no_other() -> Result<()> {
    let model = tempfile::tempdir()?;
    folder::write_tiny_config(model.path(), 256)?;
    folder::write_tokenizer(&smollm2(), model.path())?;
    let mut run = longest();
    // Several blocks, so that KV is transferred, and within the tiny model's context.
    run.prompt_ids.truncate(100);
    let expected_tiny = tiny_alone(model.path(), &run.prompt_ids).await?;

    let logs = tempfile::tempdir()?;
    let large = Nodes::start(logs.path(), LARGE, &smollm2(), "auto")?;
    let mut tiny = Nodes::start(logs.path(), TINY, model.path(), "dummy")?;
    let both =
        |large: &Service, tiny: &Service| format!("{},{}", large.ready.grpc, tiny.ready.grpc);
    let router = Service::start(
        logs.path(),
        "router",
        "baton-router",
        &settings(&[
            ("BATON_MODEL_PATH", &smollm2().display().to_string()),
            ("BATON_MODEL_NAME", LARGE),
            ("BATON_ROUTER_MODELS", &format!("{TINY}={}", model.path().display())),
            ("BATON_ROUTER_ALIASES", &format!("small={TINY}")),
            ("BATON_ROUTER_HTTP", "127.0.0.1:0"),
            ("BATON_ROUTER_GRPC", "127.0.0.1:0"),
            ("BATON_ROUTER_ADMIN", "127.0.0.1:0"),
            // Requests for a model without nodes wait until their deadline.
            ("BATON_ROUTER_TIMEOUT", "30s"),
            ("BATON_CLUSTER_PREFILL", &both(&large.prefill, &tiny.prefill)),
            ("BATON_CLUSTER_DECODE", &both(&large.decode, &tiny.decode)),
        ]),
    )?;
    let client = Client::new(format!("http://{}", router.ready.http));
    for name in [LARGE, TINY] {
        wait_nodes(&client, name, [1, 1]).await?;
    }

    // Requests without a model name get the first model's answer.
    let expected_large = ask(&client, None, &run).await?.token_ids;
    assert_ne!(expected_large, expected_tiny);
    for round in 0..2 {
        for (name, asked, expected) in [
            (LARGE, LARGE, &expected_large),
            (TINY, TINY, &expected_tiny),
            (TINY, "small", &expected_tiny),
        ] {
            let answer = ask(&client, Some(asked), &run).await?;
            assert_eq!(&answer.token_ids, expected, "{asked} in round {round}");
            assert_eq!(answer.decode_node, format!("decode-{name}"), "{answer:?}");
        }
    }
    // Each model's prefill node has sent KV to its own decode node.
    for node in [&large.decode, &tiny.decode] {
        assert!(node.metric("baton_kv_transfer_bytes_total").await? > 0.0, "{}", node.name);
    }
    // The golden outputs are those of the first model.
    let golden = longest();
    let found = ask(&client, Some(LARGE), &golden).await?.token_ids;
    assert_eq!(found, golden.output_ids[..TOKENS]);

    let (_, models) = client.get_json("/v1/models").await?;
    let cards = models["data"].as_array().context("no list")?;
    let ids: Vec<&Value> = cards.iter().map(|card| &card["id"]).collect();
    assert_eq!(ids, ["small", LARGE, TINY], "{models}");

    let named = |name: &str| json!({"model": name, "prompt": run.prompt_ids, "max_tokens": 2});
    let refused = client.post("/v1/completions", &named("nobody")).await?;
    assert_eq!(refused.status, 404, "{}", refused.json());
    let message = refused.json()["error"]["message"].to_string();
    for name in ["nobody", LARGE, TINY, "small"] {
        assert!(message.contains(name), "{name} is not in {message}");
    }

    // One model's nodes are killed while requests for the other model run. No answer of the other
    // model changes.
    let load = async {
        for _ in 0..8 {
            let answer = ask(&client, Some(LARGE), &run).await?;
            ensure!(answer.token_ids == expected_large, "{answer:?}");
            ensure!(answer.decode_node == format!("decode-{LARGE}"), "{answer:?}");
        }
        Ok(())
    };
    let death = async {
        tiny.kill();
        wait_nodes(&client, TINY, [0, 0]).await
    };
    tokio::try_join!(load, death)?;
    let refused = client.post("/v1/completions", &named(TINY)).await?;
    assert_eq!(refused.status, 503, "{}", refused.json());
    assert_eq!(refused.json()["error"]["code"], "no_decode_node");
    let (status, health) = client.get_json("/health").await?;
    assert_eq!((status.as_u16(), &health["degraded"]), (200, &json!(true)), "{health}");
    assert_eq!(ask(&client, Some(LARGE), &run).await?.token_ids, expected_large);
    assert_eq!(nodes_of(&client, LARGE).await?, [1, 1]);
    Ok(())
}
