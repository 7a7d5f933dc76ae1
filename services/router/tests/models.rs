//! Several models behind one router, selected by name.

mod common;

use std::{sync::Arc, time::Duration};

use common::{
    Cluster,
    client::eventually,
    completion_of, grpc_channel,
    node::{Behaviour, MODEL, ScriptedNode},
    settings,
};
use proto::v1::{
    ChatMessage, ChatRequest, Conversation, DetokenizeRequest, GenerateOptions, GenerateRequest,
    Role, Sampling, TokenIds, TokenizeRequest, generate_request, inference_client::InferenceClient,
    tokenize_request,
};
use router::{ModelSource, RouterSettings};
use serde_json::{Value, json};
use text::ModelText;
use tonic::Code;

async fn two_models() -> Cluster {
    two_models_with(settings()).await
}

/// Starts a prefill and a decode node each for `scripted` and `other`, which has the alias
/// `latest`.
async fn two_models_with(mut settings: RouterSettings) -> Cluster {
    let nodes = |role: Role, name: &str| {
        [MODEL, "other"]
            .map(|model| ScriptedNode::start_for(model, role, &format!("{name}-{model}")))
            .into()
    };
    let (prefill, decode) = (nodes(Role::Prefill, "prefill"), nodes(Role::Decode, "decode"));
    settings.router.aliases = vec![config::Pair { name: "latest".into(), value: "other".into() }];
    Cluster::start_models(settings, &[MODEL, "other"], prefill, decode).await
}

#[tokio::test]
async fn health_names_nodes_that_fell_back_to_the_cpu() {
    let (prefill, decode) = Cluster::nodes(1, 1, "yes");
    decode[0].announce_cpu_fallback("cannot load libbaton_kernels.so");
    let cluster = Cluster::start_over(settings(), prefill, decode).await;
    let health = cluster.client.get("/health").await;
    let expected = json!([{"node": "decode-0", "reason": "cannot load libbaton_kernels.so"}]);
    assert_eq!((health.status.as_u16(), &health.json()["cpu_fallbacks"]), (200, &expected));

    let cluster = Cluster::start(1, 1, "yes").await;
    let health = cluster.client.get("/health").await.json();
    assert_eq!(health.get("cpu_fallbacks"), None, "nodes on the device that was asked for");
}

#[tokio::test]
async fn a_request_is_answered_by_nodes_of_the_model_that_it_names() {
    let cluster = two_models().await;
    let asked = [("x-baton-stats", "1")];
    for (name, nodes) in [
        (json!(null), MODEL),
        (json!(""), MODEL),
        (json!(MODEL), MODEL),
        (json!("other"), "other"),
        (json!("latest"), "other"),
    ] {
        // Repeats, so that a selection by load alone would fail.
        for _ in 0..3 {
            let body = completion_of(&name, json!({"max_tokens": 3}));
            let answer = cluster.client.post_with("/v1/completions", &asked, &body).await;
            let answer = answer.json();
            assert_eq!(answer["baton"]["decode_node"], format!("decode-{nodes}"), "{answer}");
            assert_eq!(answer["baton"]["prefill_node"], format!("prefill-{nodes}"), "{answer}");
            // The response has the requested name.
            let expected = name.as_str().filter(|name| !name.is_empty()).unwrap_or(MODEL);
            assert_eq!(answer["model"], expected);
        }
    }
    for (model, count) in [(MODEL, 9.0), ("other", 6.0)] {
        let label = format!("gen_ai_request_model=\"{model}\"");
        let finished = cluster.metric("baton_requests_finished_total", &[&label]).await;
        assert_eq!(finished, count, "{model}");
    }
}

/// Returns the decode nodes of `scripted` and of `other` that are up.
async fn decode_nodes_up(cluster: &Cluster) -> [f64; 2] {
    let up = async |model: &str| {
        let model = format!("gen_ai_request_model=\"{model}\"");
        let labels = ["role=\"decode\"", "health=\"up\"", &model];
        cluster.metric("baton_nodes{", &labels).await
    };
    [up(MODEL).await, up("other").await]
}

#[tokio::test]
async fn nodes_are_counted_for_their_model() {
    let mut cluster = two_models().await;
    assert_eq!(decode_nodes_up(&cluster).await, [1.0, 1.0]);
    cluster.decode[1].kill();
    let is_down = async || decode_nodes_up(&cluster).await == [1.0, 0.0];
    eventually("the node of the other model is down", is_down).await;
}

#[tokio::test]
async fn unknown_model_is_rejected_with_the_list_of_models() {
    let cluster = two_models().await;
    let models = cluster.client.get("/v1/models").await.json();
    let names: Vec<(&str, &str)> = models["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|card| (card["id"].as_str().unwrap(), card["root"].as_str().unwrap()))
        .collect();
    assert_eq!(names, [("latest", "other"), ("other", "other"), (MODEL, MODEL)]);
    assert_eq!(cluster.client.get("/v1/models/latest").await.json(), models["data"][0]);

    let body = completion_of(&json!("nobody"), json!({}));
    for path in ["/v1/completions", "/tokenize"] {
        let answer = cluster.client.post(path, &body).await;
        assert_eq!(answer.status, 404);
        assert_eq!(answer.error()["code"], "model_not_found");
        for name in ["nobody", "latest", "other", MODEL] {
            assert!(answer.message().contains(name), "{}", answer.message());
        }
    }
}

#[tokio::test]
async fn model_without_nodes_disturbs_no_other_model() {
    let mut settings = settings();
    settings.router.timeout = Duration::from_secs(3);
    let mut cluster = two_models_with(settings).await;
    cluster.decode[1].kill();
    cluster.wait_nodes(2, 1).await;
    let health = cluster.client.get("/health").await;
    assert_eq!((health.status.as_u16(), &health.json()["degraded"]), (200, &json!(true)));
    assert_eq!(
        health.json()["models"][1],
        json!({"name": "other", "prefill_nodes": 1, "decode_nodes": 0})
    );
    let ask = async |name: &str| {
        let body = completion_of(&json!(name), json!({"max_tokens": 2}));
        cluster.client.post("/v1/completions", &body).await
    };
    let (served, failed) = tokio::join!(ask(MODEL), ask("latest"));
    assert_eq!((served.status.as_u16(), failed.status.as_u16()), (200, 503));
    assert_eq!(failed.error()["code"], "no_decode_node");
}

#[tokio::test]
async fn requests_waiting_for_one_model_do_not_delay_another() {
    const WAITING: usize = 8;
    let mut settings = settings();
    settings.router.waiting_max = WAITING as u32;
    let cluster = two_models_with(settings).await;
    let busy = Behaviour::Refuse(Code::ResourceExhausted, "queue full");
    cluster.decode[0].behave(busy.clone());
    let ask = async |name: &str| {
        // A stop token as token 0 would complete the answer without the decode node.
        let options = json!({"max_tokens": 2, "ignore_eos": true});
        let body = completion_of(&json!(name), options);
        cluster.client.post("/v1/completions", &body).await
    };
    let waiting = futures_util::future::join_all((0..WAITING).map(|_| ask(MODEL)));
    let others = async {
        let label = ["state=\"waiting\""];
        eventually("all wait", async || {
            cluster.metric("baton_requests", &label).await == WAITING as f64
        })
        .await;
        assert_eq!(ask("other").await.status, 200);
        // The limit applies to all models together.
        cluster.decode[1].behave(busy);
        let refused = ask("other").await;
        assert_eq!(refused.status, 503);
        assert!(refused.message().contains("8 requests wait"), "{}", refused.message());
        cluster.decode[0].behave(Behaviour::Serve);
    };
    let (answers, ()) = tokio::join!(waiting, others);
    assert!(answers.iter().all(|answer| answer.status == 200));
}

#[tokio::test]
async fn rejected_request_is_counted_for_its_model() {
    let cluster = two_models().await;
    let body = completion_of(&json!("latest"), json!({"max_tokens": -2}));
    assert_eq!(cluster.client.post("/v1/completions", &body).await.status, 400);
    let request = GenerateRequest { model: "latest".into(), ..Default::default() };
    let mut client = InferenceClient::new(grpc_channel(&cluster).await);
    let status = client.generate(request).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    for (model, count) in [(MODEL, 0.0), ("other", 2.0)] {
        let label = format!("gen_ai_request_model=\"{model}\"");
        let labels = [label.as_str(), "finished_reason=\"invalid\""];
        let refused = cluster.metric("baton_requests_finished_total", &labels).await;
        assert_eq!(refused, count, "{model}");
    }
}

#[tokio::test]
async fn every_api_takes_an_alias() {
    let cluster = two_models().await;
    let chat = json!({"model": "latest", "max_tokens": 2,
        "messages": [{"role": "user", "content": "hi"}]});
    for (path, body) in [
        ("/v1/completions", completion_of(&json!("latest"), json!({"max_tokens": 2}))),
        ("/v1/chat/completions", chat),
        ("/tokenize", json!({"model": "latest", "prompt": "hi"})),
        ("/detokenize", json!({"model": "latest", "tokens": [1, 2]})),
    ] {
        assert_eq!(cluster.client.post(path, &body).await.status, 200, "{path}");
    }
    assert_eq!(cluster.client.get("/v1/models/latest").await.status, 200);

    let mut client = InferenceClient::new(grpc_channel(&cluster).await);
    let model = || "latest".to_owned();
    let conversation = || Conversation {
        messages: vec![ChatMessage {
            role: "user".into(),
            content: "hi".into(),
            ..Default::default()
        }],
        ..Default::default()
    };
    let generate = GenerateRequest {
        model: model(),
        prompt: Some(generate_request::Prompt::Text("hi".into())),
        ..Default::default()
    };
    let mut answer = client.generate(generate).await.unwrap().into_inner();
    assert!(answer.message().await.unwrap().is_some());
    let chat =
        ChatRequest { model: model(), conversation: Some(conversation()), ..Default::default() };
    let mut answer = client.chat(chat).await.unwrap().into_inner();
    assert!(answer.message().await.unwrap().is_some());
    let tokenize = TokenizeRequest {
        model: model(),
        input: Some(tokenize_request::Input::Conversation(conversation())),
        ..Default::default()
    };
    let ids = client.tokenize(tokenize).await.unwrap().into_inner().ids;
    assert!(!ids.is_empty());
    let detokenize = DetokenizeRequest { model: model(), ids };
    assert!(client.detokenize(detokenize).await.unwrap().into_inner().text.contains("hi"));
    // Only nodes of the alias's model received requests.
    assert!(cluster.decode[0].calls().is_empty() && cluster.decode[1].calls().len() >= 3);
}

/// Returns a model of three tokens with this generation config.
fn small_model(generation_config: &Value) -> ModelSource {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = json!({
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "unk_token": null, "dropout": null,
            "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
    });
    for (name, json) in
        [("tokenizer.json", &tokenizer), ("generation_config.json", generation_config)]
    {
        std::fs::write(folder.path().join(name), json.to_string()).unwrap();
    }
    let text = Arc::new(ModelText::open(folder.path()).unwrap());
    ModelSource { name: MODEL.into(), text }
}

#[tokio::test]
async fn generation_config_supplies_default_sampling_options() {
    let model = small_model(&json!({"temperature": 0.25, "top_k": 7, "top_p": 0.5,
        "min_p": 0.125, "repetition_penalty": 1.5}));
    let decode = ScriptedNode::start(Role::Decode, "decode-0");
    decode.answer_with(&[0, 1]);
    let cluster = Cluster::start_sources(settings(), vec![model], vec![], vec![decode]).await;
    let last = || -> Sampling {
        cluster.decode[0].calls().last().unwrap().attempt.sampling.clone().unwrap()
    };
    let numbers = |sampling: Sampling| {
        let Sampling { temperature, top_k, top_p, min_p, repetition_penalty, .. } = sampling;
        (temperature, top_k, top_p, min_p, repetition_penalty)
    };
    let ask = async |fields: Value| {
        let mut body = json!({"prompt": [0, 1], "max_tokens": 2});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let answer = cluster.client.post("/v1/completions", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.json());
        numbers(last())
    };
    assert_eq!(ask(json!({})).await, (0.25, 7, 0.5, 0.125, 1.5));
    assert_eq!(ask(json!({"temperature": 1, "top_k": 3})).await, (1.0, 3, 0.5, 0.125, 1.5));
    let all = json!({"temperature": 0.75, "top_k": 5, "top_p": 0.25, "min_p": 0.5,
        "repetition_penalty": 2});
    assert_eq!(ask(all).await, (0.75, 5, 0.25, 0.5, 2.0));

    let mut client = InferenceClient::new(grpc_channel(&cluster).await);
    let options = GenerateOptions { max_tokens: Some(2), top_p: Some(0.75), ..Default::default() };
    let request = GenerateRequest {
        prompt: Some(generate_request::Prompt::TokenIds(TokenIds { ids: vec![0, 1] })),
        options: Some(options),
        ..Default::default()
    };
    let mut stream = client.generate(request).await.unwrap().into_inner();
    while stream.message().await.unwrap().is_some() {}
    assert_eq!(numbers(last()), (0.25, 7, 0.75, 0.125, 1.5));
}

#[tokio::test]
async fn paths_may_end_with_a_slash() {
    let cluster = two_models().await;
    for path in ["/v1/models/", "/v1/models/other/", "/health/", "/live/", "/version/", "/ping/"] {
        let answer = cluster.client.get(path).await;
        assert_eq!((answer.status.as_u16(), path), (200, path), "{answer:?}");
    }
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2});
    for path in ["/v1/chat/completions/", "/v1/messages/"] {
        assert_eq!(cluster.client.post(path, &body).await.status, 200, "{path}");
    }
    let wrong = cluster.client.get("/v1/completions/").await;
    assert_eq!((wrong.status.as_u16(), &wrong.headers["allow"]), (405, &"POST".parse().unwrap()));
    assert_eq!(cluster.client.get("/v1/completions//").await.status, 404);
}

#[tokio::test]
async fn version_and_ping_are_those_of_vllm() {
    let cluster = two_models().await;
    let version = cluster.client.get("/version").await.json();
    assert_eq!(version, json!({"version": env!("CARGO_PKG_VERSION")}));
    let health = cluster.client.get("/health").await;
    for answer in
        [cluster.client.get("/ping").await, cluster.client.post("/ping", &json!({})).await]
    {
        assert_eq!((answer.status, answer.json()), (health.status, health.json()));
    }
}

#[tokio::test]
async fn adapters_have_names_of_their_own_and_nodes_get_their_content_hash() {
    let (prefill, decode) = Cluster::nodes(1, 2, "yes");
    prefill[0].announce_adapters(&[("sql", 7)]);
    decode[0].announce_adapters(&[("sql", 7)]);
    let cluster = Cluster::start_over(settings(), prefill, decode).await;
    let name = format!("{MODEL}:sql");
    let models = cluster.client.get("/v1/models").await.json();
    assert_eq!(models["data"][1]["id"], json!(name));
    assert_eq!(models["data"][1]["parent"], json!(MODEL));
    assert_eq!(cluster.client.get(&format!("/v1/models/{name}")).await.status.as_u16(), 200);
    for _ in 0..4 {
        let body = json!({"model": name, "prompt": "hi", "max_tokens": 2});
        let answer = cluster.client.post("/v1/completions", &body).await;
        assert_eq!((answer.status.as_u16(), &answer.json()["model"]), (200, &json!(name)));
    }
    let adapters = |node: &ScriptedNode| -> Vec<Vec<u8>> {
        node.calls().iter().map(|call| call.attempt.adapter.to_vec()).collect()
    };
    assert_eq!(adapters(&cluster.decode[0]), vec![7_u128.to_be_bytes().to_vec(); 4]);
    assert_eq!(cluster.decode[1].calls().len(), 0, "the node lacks the adapter");
    let body = json!({"model": format!("{MODEL}:law"), "prompt": "hi"});
    let unknown = cluster.client.post("/v1/completions", &body).await;
    assert_eq!(unknown.status.as_u16(), 404);
    let message = unknown.json()["error"]["message"].to_string();
    assert!(message.contains(&name), "{message}");
}
