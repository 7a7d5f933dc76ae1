//! Clusters that serve Hugging Face folders: with real weights, and with dummy weights that need no
//! weight files.

mod folder;

use std::{
    collections::BTreeSet,
    path::Path,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context, Result, ensure};
use integration_tests::{
    client::{Client, salted_body},
    cluster::{Cluster, ClusterSpec, SECRET, bin_dir, smollm2, whole_smollm2},
    command::output,
    golden::{golden, longest, whole_golden},
};
use serde_json::{Value, json};

#[tokio::test]
async fn one_safetensors_file_gives_the_reference_tokens() -> Result<()> {
    check_golden(1).await
}

#[tokio::test]
async fn safetensors_in_shards_give_the_reference_tokens() -> Result<()> {
    check_golden(3).await
}

/// Compares answers with the reference. Prompts of token ids test the weights, text prompts also
/// test tokenizer.json.
async fn check_golden(shards: usize) -> Result<()> {
    let folder = tempfile::tempdir()?;
    folder::write(&whole_smollm2(), folder.path(), shards)?;
    let spec = ClusterSpec { model: folder.path().to_owned(), ..ClusterSpec::smollm2() };
    let cluster = Cluster::start(spec).await?;
    let client = Client::new(cluster.http());
    for name in ["code", "chat_template"] {
        let run =
            whole_golden().runs.into_iter().find(|run| run.name == name).expect("it is there");
        let found = client.greedy(&run.prompt_ids, run.output_ids.len()).await?;
        assert_eq!(found, run.output_ids, "{name}");
        let body = json!({"prompt": run.prompt, "max_tokens": run.output_ids.len(),
            "temperature": 0, "ignore_eos": true, "skip_special_tokens": false});
        let answer = client.post("/v1/completions", &body).await?.json();
        assert_eq!(answer["usage"]["prompt_tokens"], run.prompt_ids.len(), "{answer}");
        assert_eq!(answer["choices"][0]["text"], run.output_text, "{name}");
    }
    // Uses the chat template of tokenizer_config.json and the EOS token of config.json.
    let question = "What is the capital of France? Answer in one sentence.";
    let body = json!({"messages": [{"role": "user", "content": question}], "temperature": 0});
    let answer = client.post("/v1/chat/completions", &body).await?.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["content"], "The capital of France is Paris.", "{answer}");
    assert_eq!(choice["finish_reason"], "stop", "{answer}");
    cluster.stop()
}

/// The client for trainers pushes weights to two nodes under load, and unusable weights with their
/// reasons. No request fails, and the answers have tokens of both weights.
#[tokio::test]
async fn trainer_updates_two_nodes_with_the_python_client() -> Result<()> {
    let (base, updates) = (tempfile::tempdir()?, tempfile::tempdir()?);
    folder::write(&smollm2(), base.path(), 1)?;
    let spec = ClusterSpec { model: base.path().to_owned(), ..ClusterSpec::smollm2() };
    let spec = spec.set("BATON_MODEL_NAME", "smollm2").set("BATON_NODE_DEVICE", "cpu");
    let cluster = Cluster::start(spec.clone()).await?;
    let client = Client::new(cluster.http());
    let run = golden().runs.into_iter().find(|run| run.name == "code").expect("it is there");
    let before = client.greedy(&run.prompt_ids, 20).await?;
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut trainer = Command::new("python3");
    trainer
        .arg(tests.join("tests/hugging_face/trainer.py"))
        .arg(tests.join("../services/weight-transfer/client"));
    trainer
        .arg(format!("http://{}", cluster.router.ready.admin))
        .arg(base.path())
        .arg(updates.path());
    let has_ended = AtomicBool::new(false);
    let training = async {
        let trained = tokio::task::spawn_blocking(move || output(&mut trainer)).await;
        has_ended.store(true, Ordering::Relaxed);
        trained
    };
    let (trained, load) = tokio::join!(training, weights_of_answers(&client, &has_ended));
    let trained = trained??;
    let stderr = String::from_utf8_lossy(&trained.stderr);
    assert!(trained.status.success(), "{stderr}");
    let report: Value = serde_json::from_slice(&trained.stdout)?;
    assert_eq!(report["phase"], "committed");
    let version = report["weight_version"].as_str().context("a version")?.to_owned();
    assert_eq!(load?, BTreeSet::from(["loaded".to_owned(), version]));
    let after = client.greedy(&run.prompt_ids, 20).await?;
    assert_ne!(after, before);
    cluster.stop()?;

    let path = report["path"].as_str().expect("a path");
    folder::write_tokenizer(&smollm2(), Path::new(path))?;
    let spec = ClusterSpec { model: path.into(), ..spec };
    let cluster = Cluster::start(spec).await?;
    let started = Client::new(cluster.http()).greedy(&run.prompt_ids, 20).await?;
    assert_eq!(after, started, "as nodes that start with the weights");
    cluster.stop()
}

/// Sends one request after another until the trainer has ended. Returns the weight versions of
/// their tokens.
async fn weights_of_answers(client: &Client, has_ended: &AtomicBool) -> Result<BTreeSet<String>> {
    const ANSWER: usize = 40;
    let run = golden().runs.into_iter().find(|run| run.name == "code").expect("it is there");
    let (mut versions, mut answers) = (BTreeSet::new(), 0);
    while !has_ended.load(Ordering::Relaxed) {
        let mut body = salted_body(&run.prompt_ids, ANSWER, &answers.to_string());
        body["return_weight_version"] = json!(true);
        body["stream"] = json!(false);
        body["stream_options"] = Value::Null;
        let answer = client.post("/v1/completions", &body).await?;
        ensure!(answer.status == 200, "{}", String::from_utf8_lossy(&answer.body));
        let choice = answer.json()["choices"][0].clone();
        let labels = choice["weight_versions"].as_array().context("versions")?;
        ensure!(labels.len() == ANSWER, "{choice}");
        versions.extend(labels.iter().filter_map(Value::as_str).map(str::to_owned));
        answers += 1;
    }
    Ok(versions)
}

#[tokio::test]
async fn dummy_weights_need_no_more_than_config_and_tokenizer() -> Result<()> {
    let folder = tempfile::tempdir()?;
    folder::write_tiny_config(folder.path(), 256)?;
    folder::write_tokenizer(&smollm2(), folder.path())?;
    let spec = ClusterSpec {
        model: folder.path().to_owned(),
        load_format: "dummy",
        ..ClusterSpec::smollm2()
    };
    let prompt: Vec<u32> = (100..160).collect();
    let mut answers = Vec::new();
    for (prefill, decode) in [(1, 1), (0, 1)] {
        let cluster = Cluster::start(spec.clone().nodes(prefill, decode)).await?;
        let client = Client::new(cluster.http());
        answers.push(client.greedy(&prompt, 20).await?);
        let body = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5,
            "ignore_eos": true});
        let answer = client.post("/v1/chat/completions", &body).await?.json();
        assert_eq!(answer["usage"]["completion_tokens"], 5, "{answer}");
        cluster.stop()?;
    }
    // All nodes have equal dummy weights, so a decode node can continue a request of a prefill
    // node.
    assert_eq!(answers[0], answers[1]);
    assert_eq!(answers[0].len(), 20);
    Ok(())
}

/// Layers with linear attention: a prefill node sends the recurrent state, also to a node with
/// another number of ranks, and a further turn begins with a cached state.
#[tokio::test]
async fn hybrid_model_gives_equal_tokens_on_every_layout_of_nodes() -> Result<()> {
    let folder = tempfile::tempdir()?;
    folder::write_hybrid(&smollm2(), folder.path())?;
    let spec = ClusterSpec {
        model: folder.path().to_owned(),
        load_format: "dummy",
        ..ClusterSpec::smollm2()
    };
    let spec = spec.set("BATON_NODE_DEVICE", "cpu").set("BATON_MODEL_DTYPE", "f32");
    let prompt: Vec<u32> = (100..200).collect();
    let mut answers = Vec::new();
    for (prefill, ranks) in [(0, 1), (1, 1), (1, 2)] {
        let spec = spec.clone().nodes(prefill, 1).set_decode("BATON_NODE_TP", ranks);
        let (cluster, client) = Cluster::start_with_client(spec).await?;
        let first = client.greedy(&prompt, 40).await?;
        let turn = [prompt.clone(), first.clone(), (300..320).collect()].concat();
        let next = client.greedy(&turn, 20).await?;
        let body = json!({"prompt": turn, "max_tokens": 30, "regex": "[a-c]{8}[0-9]{4}"});
        let answer = client.post("/v1/completions", &body).await?.json();
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        assert_eq!(cached, Some(144), "{answer}");
        let text = answer["choices"][0]["text"].as_str().unwrap_or_default();
        let (letters, digits) = text.split_at_checked(8).context("twelve characters")?;
        assert!(letters.bytes().all(|byte| b"abc".contains(&byte)), "{answer}");
        assert!(digits.len() == 4 && digits.bytes().all(|it| it.is_ascii_digit()), "{answer}");
        answers.push((first, next));
        cluster.stop()?;
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    Ok(())
}

/// A small gpt-oss with random weights and the real model's chat template. Biases make the tokens
/// likely that end its reasoning, and the grammar of the required call does the rest.
#[tokio::test]
async fn gpt_oss_calls_a_tool_after_its_reasoning() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let target = bin_dir();
    let templates = target.parent().expect("it is a folder").join("tokenizers/llama.cpp/templates");
    let template = std::fs::read_to_string(templates.join("openai-gpt-oss-120b.jinja"))
        .context("deploy/fetch-tokenizers.sh fetches the templates")?;
    folder::write_gpt_oss(&smollm2(), folder.path(), &template)?;
    let spec = ClusterSpec {
        model: folder.path().to_owned(),
        load_format: "dummy",
        ..ClusterSpec::smollm2()
    };
    let (cluster, client) = Cluster::start_with_client(spec.nodes(1, 1)).await?;
    let mut bias = serde_json::Map::new();
    for tag in ["<|channel|>", "<|start|>", "<|end|>"] {
        let index = folder::HARMONY.iter().position(|it| *it == tag).expect("it is a tag");
        bias.insert((folder::HARMONY_FIRST + index).to_string(), 10.into());
    }
    for word in ["analysis", "assistant"] {
        let body = json!({"prompt": word, "add_special_tokens": false});
        let answer = client.post("/tokenize", &body).await?.json();
        bias.insert(answer["tokens"][0].to_string(), 10.into());
    }
    let parameters = json!({"type": "object", "properties": {"city": {"enum": ["Paris"]}},
        "required": ["city"], "additionalProperties": false});
    let function = json!({"name": "weather", "description": "Returns the weather.",
        "parameters": parameters});
    let tools = json!([{"type": "function", "function": function}]);
    let question = json!({"role": "user", "content": "What is the weather in Paris?"});
    let mut body = json!({"messages": [question], "tools": tools, "tool_choice": "required",
        "parallel_tool_calls": false, "reasoning_effort": "low", "seed": 4, "temperature": 1,
        "max_tokens": 4000, "logit_bias": bias, "stop": ["commentary"]});
    let answer = client.post("/v1/chat/completions", &body).await?.json();
    let (choice, message) = (&answer["choices"][0], &answer["choices"][0]["message"]);
    assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
    let call = &message["tool_calls"][0]["function"];
    assert_eq!(call["name"], "weather", "{answer}");
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap_or_default())?;
    assert_eq!(arguments, json!({"city": "Paris"}));
    let reasoning = message["reasoning_content"].as_str().unwrap_or_default();
    assert!(!reasoning.is_empty() && !message.to_string().contains("<|"), "{answer}");

    // The next turn has the reasoning, the call and its result.
    let id = &message["tool_calls"][0]["id"];
    let result = json!({"role": "tool", "tool_call_id": id, "content": "Sunny."});
    body["messages"] = json!([question, message, result]);
    body["tool_choice"] = "none".into();
    body["max_tokens"] = 1.into();
    let next = client.post("/v1/chat/completions", &body).await?.json();
    assert_eq!(next["usage"]["completion_tokens"], 1, "{next}");
    cluster.stop()
}

/// Two KV groups: every second layer attends to 128 tokens.
#[tokio::test]
async fn evicted_kv_of_gpt_oss_comes_back_from_the_disk() -> Result<()> {
    let folder = tempfile::tempdir()?;
    folder::write_gpt_oss(&smollm2(), folder.path(), "{{ messages[0]['content'] }}")?;
    let spec = ClusterSpec {
        model: folder.path().to_owned(),
        load_format: "dummy",
        ..ClusterSpec::smollm2()
    };
    // KV memory for little more than the prompt in both groups.
    let spec = spec
        .set_decode("BATON_NODE_BLOCKS", 100)
        .set_decode("BATON_TIER_DISK_PATH", folder.path().join("kv").display())
        .set_decode("BATON_TIER_DISK_SIZE", "64MiB")
        .set_decode("BATON_TIER_ADMISSION", "always");
    let (cluster, client) = Cluster::start_with_client(spec.nodes(0, 1)).await?;
    let prompt = longest().prompt_ids;
    let blocks = (prompt.len() - 1) / 16;
    // The window of the token after them.
    let window_blocks = blocks - (16 * blocks + 1 - 128) / 16;
    let answer = async || {
        let body = json!({"prompt": prompt, "max_tokens": 8, "temperature": 0.0, "logprobs": 5,
            "ignore_eos": true});
        let answer = client.post("/v1/completions", &body).await?.json();
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        anyhow::Ok((cached.unwrap_or(0), answer["choices"][0]["logprobs"].clone()))
    };
    let (_, computed) = answer().await?;
    let node = &cluster.decode[0];
    node.wait_metric("baton_tier_blocks", (blocks + window_blocks) as f64).await?;
    for salt in ["one", "two"] {
        client.complete(&salted_body(&prompt, 2, salt)).await?;
    }
    let (cached, restored) = answer().await?;
    assert_eq!((cached, restored), (16 * blocks as u64, computed));
    let hits = (blocks + window_blocks) as f64;
    node.wait_metric("baton_tier_hits_total", hits).await?;
    assert_eq!(node.metric("baton_tier_hits_total").await?, hits);
    cluster.stop()
}

#[tokio::test]
async fn missing_tokenizer_file_is_reported() -> Result<()> {
    let folder = tempfile::tempdir()?;
    folder::write_tiny_config(folder.path(), 256)?;
    let path = folder.path().display().to_string();
    let said_by = |program: &str, args: &[&str]| -> Result<(Option<i32>, String)> {
        let output = output(Command::new(bin_dir().join(program)).args(args))?;
        Ok((output.status.code(), String::from_utf8(output.stderr)?))
    };
    let router = ["--model-path", &path, "--cluster-secret", SECRET];
    let (code, said) = said_by("baton-router", &router)?;
    assert_eq!((code, said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains(&path) && said.contains("tokenizer.json"), "{said}");

    let up = ["up", "--model", &path, "--load-format", "dummy"];
    let addresses = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
    let (code, said) = said_by("baton", &[&up[..], &addresses].concat())?;
    // The error comes before any node starts.
    assert_eq!((code, said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains(&path) && said.contains("tokenizer.json"), "{said}");
    Ok(())
}
