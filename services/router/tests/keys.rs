//! API keys: which requests need one, what a key may do, and its limits.

mod common;

use std::{collections::BTreeSet, fmt::Write, path::Path, time::Duration};

use common::{
    Cluster,
    client::{Answer, Client, eventually},
    grpc_channel, long_prompt,
    node::{MODEL, ScriptedNode},
    settings,
};
use proto::v1::{
    GenerateOptions, GenerateRequest, ListModelsRequest, NodeLoad, Role, StepCosts, TokenIds,
    TokenizeRequest, generate_request::Prompt, inference_client::InferenceClient,
};
use ring::digest::{SHA256, digest};
use router::RouterSettings;
use serde_json::{Value, json};
use tempfile::TempDir;
use tonic::{Code, Request, Status};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

const ANSWER: &str = " one two three";

/// Writes a file with these keys: name, key and further fields of each.
fn write_keys(path: &Path, keys: &[(&str, &str, &str)]) {
    let mut file = String::new();
    for (name, key, fields) in keys {
        let hash = digest(&SHA256, key.as_bytes());
        let hash: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        let _ = write!(file, "[[key]]\nname = \"{name}\"\nsha256 = \"{hash}\"\n{fields}\n");
    }
    std::fs::write(path, file).unwrap();
}

/// Returns settings with these keys of clients.
fn with_keys(keys: &[(&str, &str, &str)]) -> (TempDir, RouterSettings) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.toml");
    write_keys(&path, keys);
    let mut settings = settings();
    settings.router.keys = Some(path);
    (folder, settings)
}

async fn get(client: &Client, path: &str, key: &str) -> Answer {
    client.get_with(path, &[("authorization", &format!("Bearer {key}"))]).await
}

async fn post(client: &Client, path: &str, key: &str, body: &Value) -> Answer {
    client.post_with(path, &[("authorization", &format!("Bearer {key}"))], body).await
}

async fn complete(cluster: &Cluster, key: &str) -> Answer {
    let body = json!({"prompt": long_prompt(), "max_tokens": 20});
    post(&cluster.client, "/v1/completions", key, &body).await
}

fn retry_after(answer: &Answer) -> u32 {
    answer.headers["retry-after"].to_str().unwrap().parse().unwrap()
}

/// Returns a message with this key in its metadata.
fn keyed<T>(key: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    request
}

fn generate(model: &str) -> GenerateRequest {
    GenerateRequest {
        model: model.into(),
        prompt: Some(Prompt::TokenIds(TokenIds { ids: long_prompt() })),
        options: Some(GenerateOptions { max_tokens: Some(20), ..Default::default() }),
        client_request_id: String::new(),
    }
}

#[tokio::test]
async fn every_http_request_except_probes_needs_a_key() {
    let (_folder, settings) = with_keys(&[("a", "key-a", "")]);
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    for path in ["/live", "/ready", "/health"] {
        assert_eq!(cluster.client.get(path).await.status, 200, "{path}");
    }
    for path in ["/v1/models", "/v1/models/x", "/metrics", "/openapi.json", "/unknown"] {
        let answer = cluster.client.get(path).await;
        assert_eq!(answer.status, 401, "{path}");
        assert_eq!(answer.headers["www-authenticate"], "Bearer");
        assert!(answer.headers.contains_key("x-request-id"));
        let error = answer.error();
        assert_eq!(
            (&error["code"], &error["type"]),
            (&json!("invalid_api_key"), &json!("invalid_request_error"))
        );
        assert_eq!(get(&cluster.client, path, "other").await.status, 401, "{path}");
        assert_ne!(get(&cluster.client, path, "key-a").await.status, 401, "{path}");
    }
    let body = json!({"prompt": "hello"});
    for path in ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"] {
        let answer = post(&cluster.client, path, "secret-of-another", &body).await;
        assert_eq!(answer.status, 401, "{path}");
        assert!(!answer.message().contains("secret-of-another"));
    }
    // A body that does not fit into the buffers of the connection hides no error.
    let large = json!({"prompt": "x".repeat(3 << 20)});
    assert_eq!(post(&cluster.client, "/v1/completions", "other", &large).await.status, 401);
    assert!(cluster.decode[0].calls().is_empty() && cluster.prefill[0].calls().is_empty());
    assert_eq!(complete(&cluster, "key-a").await.status, 200);
    // Clients without a key leave no record.
    let admin = Client::new(format!("http://{}", cluster.router.admin));
    let requests = admin.get("/v1/explain?slow=9").await.json();
    assert_eq!(requests["requests"].as_array().unwrap().len(), 1, "{requests}");
}

/// Returns the response to a browser's preflight request.
async fn preflight(client: &Client, origin: &str) -> http::Response<hyper::body::Incoming> {
    let headers = [
        ("origin", origin),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "content-type, authorization"),
    ];
    client.send(http::Method::OPTIONS, "/v1/chat/completions", &headers, "").await
}

#[tokio::test]
async fn only_pages_of_the_listed_origins_may_read_responses() {
    let (_folder, mut keyed) = with_keys(&[("a", "alpha", "")]);
    let mut open = settings();
    for settings in [&mut keyed, &mut open] {
        settings.router.cors_origins =
            config::Origin::parse("https://a.example").into_iter().collect();
    }
    let keyed = Cluster::start_with(keyed, 0, 1, ANSWER).await;
    let open = Cluster::start_with(open, 0, 1, ANSWER).await;
    for cluster in [&keyed, &open] {
        let listed = preflight(&cluster.client, "https://a.example").await;
        assert_eq!(listed.status(), 204);
        assert_eq!(listed.headers()["access-control-allow-origin"], "https://a.example");
        for origin in ["https://b.example", "http://a.example", "http://localhost:3000"] {
            let other = preflight(&cluster.client, origin).await;
            assert!(!other.headers().contains_key("access-control-allow-origin"), "{origin}");
        }
    }
    let mut any = settings();
    any.router.cors_origins = config::Origin::parse("*").into_iter().collect();
    let any = Cluster::start_with(any, 0, 1, ANSWER).await;
    assert_eq!(preflight(&any.client, "https://b.example").await.status(), 204);
}

#[tokio::test]
async fn web_pages_may_call_the_api_with_a_key_or_from_the_routers_machine() {
    let (_folder, settings) = with_keys(&[("a", "alpha", "")]);
    let keyed = Cluster::start_with(settings, 0, 1, ANSWER).await;
    let open = Cluster::start(0, 1, ANSWER).await;
    const OWN: &str = "http://localhost:3000";
    for (cluster, key, origin) in [
        (&keyed, "alpha", "https://chat.example.com"),
        (&keyed, "alpha", OWN),
        (&open, "", OWN),
        (&open, "", "http://127.0.0.1"),
        (&open, "", "http://[::1]:8080"),
    ] {
        let response = preflight(&cluster.client, origin).await;
        let header = |name: &str| response.headers()[name].to_str().unwrap();
        assert_eq!(response.status(), 204, "{origin}");
        assert_eq!(header("access-control-allow-origin"), origin);
        assert_eq!(header("access-control-allow-methods"), "GET, POST, DELETE");
        assert_eq!(header("access-control-allow-headers"), "content-type, authorization");
        let authorization = format!("Bearer {key}");
        let headers = [("origin", origin), ("authorization", &authorization)];
        let body = json!({"prompt": long_prompt(), "max_tokens": 2});
        let answer = cluster.client.post_with("/v1/completions", &headers, &body).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(answer.headers["access-control-allow-origin"], origin);
        // A page can read errors too.
        let answer = cluster.client.get_with("/v1/models/other", &headers).await;
        assert_eq!(answer.headers["access-control-allow-origin"], origin, "{answer:?}");
    }
    let answer = keyed.client.get_with("/v1/models", &[("origin", OWN)]).await;
    assert_eq!(answer.status, 401);
    for origin in ["https://chat.example.com", "http://localhost.example.com", "null"] {
        let response = preflight(&open.client, origin).await;
        assert_eq!(response.status(), 405, "{origin}");
        assert!(!response.headers().contains_key("access-control-allow-origin"), "{origin}");
        let answer = open.client.get_with("/v1/models", &[("origin", origin)]).await;
        assert!(!answer.headers.contains_key("access-control-allow-origin"), "{origin}");
    }
}

#[tokio::test]
async fn every_grpc_call_except_a_health_check_needs_a_key() {
    let (_folder, settings) = with_keys(&[("a", "key-a", "")]);
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    let channel = grpc_channel(&cluster).await;
    let check = HealthCheckRequest { service: String::new() };
    let mut health = HealthClient::new(channel.clone());
    health.check(check.clone()).await.unwrap();
    let mut client = InferenceClient::new(channel);
    let refused: Vec<Status> = vec![
        health.watch(check).await.unwrap_err(),
        client.generate(generate("")).await.unwrap_err(),
        client.generate(keyed("other", generate(""))).await.unwrap_err(),
        client.tokenize(TokenizeRequest::default()).await.unwrap_err(),
        client.list_models(ListModelsRequest {}).await.unwrap_err(),
    ];
    for status in refused {
        assert_eq!(status.code(), Code::Unauthenticated, "{status}");
        assert!(!status.message().contains("other"), "{status}");
    }
    let mut stream = client.generate(keyed("key-a", generate(""))).await.unwrap().into_inner();
    while stream.message().await.unwrap().is_some() {}
}

#[tokio::test]
async fn key_sees_only_its_models() {
    let (_folder, mut settings) =
        with_keys(&[("all", "key-all", ""), ("two", "key-two", "models = [\"two\"]")]);
    let alias = |name: &str, value: &str| config::Pair { name: name.into(), value: value.into() };
    settings.router.aliases = vec![alias("latest", "two"), alias("first", MODEL)];
    let decode = [MODEL, "two"].map(|model| {
        let node = ScriptedNode::start_for(model, Role::Decode, &format!("decode-{model}"));
        node.answer_with(&common::encode(ANSWER));
        node
    });
    let cluster = Cluster::start_models(settings, &[MODEL, "two"], vec![], decode.into()).await;
    let names = async |key| {
        let list = get(&cluster.client, "/v1/models", key).await.json();
        let ids = list["data"].as_array().unwrap().iter().map(|card| card["id"].to_string());
        ids.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(names("key-two").await, "\"latest\" \"two\"");
    assert_eq!(names("key-all").await.split(' ').count(), 4);
    for (model, status) in [("two", 200), ("latest", 200), ("", 200), (MODEL, 404), ("first", 404)]
    {
        let body = json!({"model": model, "prompt": long_prompt(), "max_tokens": 9});
        let answer = post(&cluster.client, "/v1/completions", "key-two", &body).await;
        assert_eq!(answer.status, status, "{model}");
        match status {
            200 => assert_eq!(answer.json()["model"], if model.is_empty() { "two" } else { model }),
            _ => assert!(answer.message().ends_with("served: latest, two"), "{}", answer.message()),
        }
        let tokenize = json!({"model": model, "prompt": "x"});
        let tokenized = post(&cluster.client, "/tokenize", "key-two", &tokenize).await;
        assert_eq!(tokenized.status, status, "{model}");
    }
    assert_eq!(get(&cluster.client, &format!("/v1/models/{MODEL}"), "key-two").await.status, 404);
    let mut client = InferenceClient::new(grpc_channel(&cluster).await);
    let status = client.generate(keyed("key-two", generate(MODEL))).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    let listed = client.list_models(keyed("key-two", ListModelsRequest {})).await.unwrap();
    assert_eq!(listed.into_inner().models.len(), 2);
}

#[tokio::test]
async fn health_and_metrics_show_only_the_models_of_the_caller() {
    let (_folder, settings) = with_keys(&[
        ("all", "key-all", ""),
        ("one", "key-one", &format!("models = [\"{MODEL}\"]")),
        ("two", "key-two", "models = [\"two\"]"),
    ]);
    let decode = [MODEL, "two"].map(|model| {
        let node = ScriptedNode::start_for(model, Role::Decode, &format!("decode-{model}"));
        node.announce_cpu_fallback("no driver");
        node
    });
    let cluster = Cluster::start_models(settings, &[MODEL, "two"], vec![], decode.into()).await;
    for (key, models, metrics_of) in [
        ("key-all", &[MODEL, "two"][..], &["all", "one", "two"][..]),
        ("key-one", &[MODEL], &["one"]),
        ("key-two", &["two"], &["two"]),
        ("wrong", &[], &[]),
        ("", &[], &[]),
    ] {
        let answer = get(&cluster.client, "/health", key).await;
        assert_eq!(answer.status, 200);
        let health = answer.json();
        let shown: Vec<_> =
            health["models"].as_array().unwrap().iter().map(|it| &it["name"]).collect();
        assert_eq!(shown, models, "{health}");
        assert_eq!(health["model"].as_str(), models.first().copied());
        assert_eq!(health["decode_nodes"], 2);
        let fallbacks = health["cpu_fallbacks"].as_array().map_or(0, Vec::len);
        assert_eq!(fallbacks, models.len(), "{health}");
        if models.is_empty() {
            continue;
        }
        let answer = get(&cluster.client, "/metrics", key).await;
        let metrics = String::from_utf8(answer.body.to_vec()).unwrap();
        for model in [MODEL, "two"] {
            let is_shown = models.contains(&model);
            for label in ["gen_ai_request_model", "model_name"] {
                let label = format!("{label}=\"{model}\"");
                assert_eq!(metrics.contains(&label), is_shown, "{key} {label}");
            }
        }
        for name in ["all", "one", "two"] {
            let label = format!("key=\"{name}\"");
            assert_eq!(metrics.contains(&label), metrics_of.contains(&name), "{key} {label}");
        }
        assert!(metrics.contains("process_cpu_time_seconds_total"));
    }
}

#[tokio::test]
async fn cached_kv_is_separate_by_key_and_only_gateways_name_tenants() {
    let (_folder, settings) = with_keys(&[
        ("a", "key-a", ""),
        ("b", "key-b", ""),
        ("c", "key-c", "cache_group = \"a\""),
        ("d", "key-d", "cache_group = \"a\""),
        ("gateway", "key-gateway", "gateway = true"),
    ]);
    let cluster = Cluster::start_with(settings, 0, 1, ANSWER).await;
    let mut inference = InferenceClient::new(grpc_channel(&cluster).await);
    // Returns the salt that nodes get from this caller, over HTTP and gRPC.
    let mut salt = async |key: &str, tenant: &str, salt: &str| {
        let tenants: Vec<&str> = Some(tenant).filter(|it| !it.is_empty()).into_iter().collect();
        let authorization = format!("Bearer {key}");
        let mut headers = vec![("authorization", &authorization[..])];
        headers.extend(tenants.iter().map(|tenant| ("x-baton-tenant", *tenant)));
        let body = json!({"prompt": long_prompt(), "max_tokens": 3, "cache_salt": salt});
        let answer = cluster.client.post_with("/v1/completions", &headers, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.message());
        let mut request = generate("");
        request.options.as_mut().unwrap().cache_salt = salt.to_owned();
        let mut request = keyed(key, request);
        for tenant in &tenants {
            request.metadata_mut().insert("x-baton-tenant", tenant.parse().unwrap());
        }
        let mut stream = inference.generate(request).await.unwrap().into_inner();
        while stream.message().await.unwrap().is_some() {}
        let calls = cluster.decode[0].calls();
        let [.., http, grpc] = &calls[..] else { panic!("{calls:?}") };
        assert_eq!(http.attempt.cache_salt, grpc.attempt.cache_salt);
        http.attempt.cache_salt.clone()
    };
    let a = salt("key-a", "", "").await;
    // The key has no tenants. An invalid name is ignored too.
    for tenant in ["t", "gateway", "a/b"] {
        assert_eq!(salt("key-a", tenant, "").await, a, "{tenant}");
    }
    let team = salt("key-c", "", "").await;
    assert_eq!(salt("key-d", "t", "").await, team);
    let apart = [
        a,
        team,
        salt("key-b", "", "").await,
        salt("key-a", "", "mine").await,
        salt("key-gateway", "", "").await,
        salt("key-gateway", "t", "").await,
        salt("key-gateway", "u", "").await,
        salt("key-gateway", "t", "mine").await,
    ];
    assert_eq!(BTreeSet::from_iter(&apart).len(), apart.len(), "{apart:?}");
    // Nodes take at most 256 bytes.
    let longest = salt("key-gateway", &"t".repeat(64), &"s".repeat(128)).await;
    assert!(longest.len() <= 256, "{longest}");
    let headers = [("authorization", "Bearer key-gateway"), ("x-baton-tenant", "a/b")];
    let body = json!({"prompt": long_prompt()});
    let answer = cluster.client.post_with("/v1/completions", &headers, &body).await;
    assert_eq!((answer.status.as_u16(), &answer.error()["param"]), (400, &json!("x-baton-tenant")));
}

#[tokio::test]
async fn request_beyond_a_limit_is_rejected_and_other_keys_are_not() {
    let (_folder, settings) = with_keys(&[
        ("few", "key-few", "requests_per_minute = 2"),
        ("short", "key-short", "tokens_per_minute = 50"),
        ("free", "key-free", ""),
    ]);
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    for _ in 0..2 {
        assert_eq!(complete(&cluster, "key-few").await.status, 200);
    }
    let answer = complete(&cluster, "key-few").await;
    assert_eq!(
        (answer.status.as_u16(), &answer.error()["code"]),
        (429, &json!("rate_limit_exceeded"))
    );
    assert_eq!(answer.error()["type"], "rate_limit_error");
    assert!((1..=30).contains(&retry_after(&answer)), "{answer:?}");
    assert!(answer.message().contains("allows 2 requests per minute"), "{}", answer.message());
    let mut client = InferenceClient::new(grpc_channel(&cluster).await);
    let status = client.generate(keyed("key-few", generate(""))).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.metadata().contains_key("retry-after"));

    // A prompt of 100 tokens and its answer take more than two minutes of the limit.
    assert_eq!(complete(&cluster, "key-short").await.status, 200);
    let answer = complete(&cluster, "key-short").await;
    assert_eq!(answer.status, 429);
    assert!((55..=80).contains(&retry_after(&answer)), "{answer:?}");
    assert_eq!(complete(&cluster, "key-free").await.status, 200);

    let answer = get(&cluster.client, "/metrics", "key-free").await;
    let metrics = String::from_utf8(answer.body.to_vec()).unwrap();
    let value = |name: &str, labels: &str| {
        let series = format!("baton_api_key_{name}_total{{{labels}");
        let line = metrics.lines().find(|line| line.starts_with(&series)).unwrap_or(&series);
        line.rsplit(' ').next().unwrap().parse::<u64>().unwrap_or_else(|_| panic!("no {series}"))
    };
    assert_eq!(value("requests", "key=\"few\""), 2);
    assert_eq!(value("limited", "key=\"few\",limit=\"requests_per_minute\""), 2);
    assert_eq!(value("limited", "key=\"few\",limit=\"streams_max\""), 0);
    assert_eq!(value("tokens", "gen_ai_token_type=\"input\",key=\"few\""), 200);
    assert_eq!(value("rejected", "reason=\"missing\""), 0);
}

#[tokio::test]
async fn more_choices_than_a_key_can_ever_have_are_invalid() {
    let (_folder, mut settings) = with_keys(&[("a", "key-a", "")]);
    settings.router.requests_max = 16;
    let cluster = Cluster::start_with(settings, 0, 1, ANSWER).await;
    let choices = |n| json!({"prompt": "a", "max_tokens": 1, "n": n});
    let answer = post(&cluster.client, "/v1/completions", "key-a", &choices(15)).await;
    assert_eq!(answer.status, 400);
    assert_eq!(answer.error()["param"], "n");
    assert!(answer.message().contains("at most 14"), "{}", answer.message());
    let answer = post(&cluster.client, "/v1/completions", "key-a", &choices(14)).await;
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn streams_of_a_key_are_limited_until_they_end() {
    let (_folder, settings) = with_keys(&[("a", "key-a", "streams_max = 2")]);
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    let body = |n| json!({"prompt": long_prompt(), "max_tokens": 20, "n": n, "stream": true});
    let many = post(&cluster.client, "/v1/completions", "key-a", &body(3)).await;
    assert_eq!((many.status.as_u16(), &many.error()["param"]), (400, &json!("n")));
    let set_token_time = |token_time| {
        cluster
            .decode
            .iter()
            .chain(&cluster.prefill)
            .for_each(|node| node.set_token_time(token_time))
    };
    set_token_time(Duration::from_secs(60));
    let held = tokio::spawn({
        let client = cluster.client.clone();
        let body = body(2);
        async move { post(&client, "/v1/completions", "key-a", &body).await }
    });
    eventually("two answers run", async || cluster.decode[0].calls().len() == 2).await;
    let answer = post(&cluster.client, "/v1/completions", "key-a", &body(1)).await;
    assert_eq!((answer.status.as_u16(), retry_after(&answer)), (429, 1));
    assert!(answer.message().contains("2 streams at a time"), "{}", answer.message());
    held.abort();
    set_token_time(Duration::ZERO);
    eventually("a stream is free", async || {
        post(&cluster.client, "/v1/completions", "key-a", &body(1)).await.status == 200
    })
    .await;
}

#[tokio::test]
async fn request_of_another_key_starts_before_the_queue_of_a_flooding_key() {
    const FLOOD: usize = 12;
    let (_folder, settings) = with_keys(&[("flood", "key-flood", ""), ("good", "key-good", "")]);
    let (_, decode) = Cluster::nodes(0, 1, ANSWER);
    let limits = StepCosts { slots: 1, step_tokens: 512, chunk_tokens: 512, ..Default::default() };
    let step_costs = Some(limits);
    decode[0].report(NodeLoad { blocks_free: 1000, step_costs, ..Default::default() });
    decode[0].set_token_time(Duration::from_millis(100));
    let cluster = Cluster::start_over(settings, vec![], decode).await;
    let ask = |key: &'static str, token: u32| {
        let client = cluster.client.clone();
        let body = json!({"prompt": vec![token; 40], "max_tokens": 3, "ignore_eos": true});
        tokio::spawn(async move { post(&client, "/v1/completions", key, &body).await })
    };
    let flood: Vec<_> = (0..FLOOD).map(|_| ask("key-flood", 1000)).collect();
    let waiting = async || {
        let answer = get(&cluster.client, "/metrics", "key-good").await;
        let metrics = String::from_utf8(answer.body.to_vec()).unwrap();
        let series = "baton_api_key_waiting{key=\"flood\"";
        let line = metrics.lines().find(|line| line.starts_with(series)).unwrap_or("0");
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    // A request that starts counts as waiting until the node accepts it.
    eventually("the others wait", async || waiting().await >= (FLOOD - 2) as f64).await;
    let before = cluster.decode[0].calls().len();
    assert_eq!(ask("key-good", 2000).await.unwrap().status, 200);
    let calls = cluster.decode[0].calls();
    let position = calls.iter().position(|call| call.attempt.tokens[0] == 2000).unwrap();
    assert!(position <= before + 2, "{position} {before}");
    for answer in flood {
        assert_eq!(answer.await.unwrap().status, 200);
    }
    assert_eq!(waiting().await, 0.0);
}

#[tokio::test]
async fn later_turns_of_a_session_start_before_requests_that_arrived_after_the_session() {
    let (_, decode) = Cluster::nodes(0, 1, ANSWER);
    let limits = StepCosts { slots: 1, step_tokens: 512, chunk_tokens: 512, ..Default::default() };
    let step_costs = Some(limits);
    decode[0].report(NodeLoad { blocks_free: 1000, step_costs, ..Default::default() });
    let cluster = Cluster::start_over(settings(), vec![], decode).await;
    let ask = |session: &'static str, prompt: Vec<u32>| {
        let client = cluster.client.clone();
        let body = json!({"prompt": prompt, "max_tokens": 3, "ignore_eos": true, "stream": true});
        tokio::spawn(async move {
            client.post_with("/v1/completions", &[("x-baton-session", session)], &body).await
        })
    };
    let of_one_token = |token: u32| vec![token; 40];
    // The second session is known by its tokens.
    for (session, token) in [("named", 1000), ("", 2000)] {
        assert_eq!(ask(session, of_one_token(token)).await.unwrap().status, 200);
    }
    let node = &cluster.decode[0];
    node.set_token_time(Duration::from_secs(60));
    let held = ask("", of_one_token(3000));
    eventually("an answer runs", async || node.calls().len() == 3).await;
    let waiting = async || cluster.metric("baton_requests", &["state=\"waiting\""]).await;
    let new = [4000, 5000].map(|token| ask("", of_one_token(token)));
    eventually("new requests wait", async || waiting().await == 2.0).await;
    let continued = [of_one_token(2000), vec![9; 20]].concat();
    let turns = [ask("", continued), ask("named", of_one_token(6000))];
    eventually("later turns wait", async || waiting().await == 4.0).await;
    node.set_token_time(Duration::ZERO);
    held.abort();
    for answer in new.into_iter().chain(turns) {
        assert_eq!(answer.await.unwrap().status, 200);
    }
    let started: Vec<u32> = node.calls()[3..].iter().map(|call| call.attempt.tokens[0]).collect();
    assert_eq!(started[..2], [6000, 2000], "{started:?}");
}

#[tokio::test]
async fn changed_file_is_read_while_the_router_runs() {
    let (folder, settings) = with_keys(&[("a", "old", "")]);
    let path = folder.path().join("keys.toml");
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    assert_eq!(get(&cluster.client, "/v1/models", "old").await.status, 200);
    write_keys(&path, &[("a", "new", "")]);
    eventually("the new key is accepted", async || {
        get(&cluster.client, "/v1/models", "new").await.status == 200
    })
    .await;
    assert_eq!(get(&cluster.client, "/v1/models", "old").await.status, 401);
}

#[tokio::test]
async fn operators_need_a_key_of_their_own_file() {
    let (folder, mut settings) = with_keys(&[("client", "key-client", "")]);
    let path = folder.path().join("admin.toml");
    write_keys(&path, &[("ops", "key-ops", "")]);
    settings.router.admin_keys = Some(path);
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    let admin = Client::new(format!("http://{}", cluster.router.admin));
    assert_eq!(admin.get("/v1/nodes").await.status, 401);
    // The page of the console has no data of the cluster, and asks for the key.
    assert_eq!(admin.get("/").await.status, 200);
    assert_eq!(get(&admin, "/v1/nodes", "key-client").await.status, 401);
    assert_eq!(get(&admin, "/v1/nodes", "key-ops").await.status, 200);
    assert_eq!(get(&cluster.client, "/v1/models", "key-ops").await.status, 401);
    let drain = post(&admin, "/v1/nodes/prefill-0/drain", "key-client", &json!({})).await;
    assert_eq!(drain.status, 401);
}
