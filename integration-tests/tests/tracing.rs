//! One request is one trace: router, prefill node, transfer and decode node, each span under its
//! parent, as an OTLP collector receives it. The standard `OTEL_*` variables set up the export.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    process::{Command, ExitCode},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use integration_tests::{
    client::{Client, DEADLINE, greedy_body, salted_body},
    cluster::{Cluster, ClusterSpec, SECRET, bin_dir},
    command::output,
    golden::{golden, longest},
};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{KeyValue, any_value::Value},
    trace::v1::{Span, span::SpanKind},
};
use proto::v1::{
    GenerateOptions, GenerateRequest, Grammar, generate_request::Prompt, generate_response::Event,
    grammar::Kind, inference_client::InferenceClient,
};
use serde_json::json;
use tokio::task::JoinHandle;
use tonic::{Request, Response, Status, transport::server::TcpIncoming};

fn main() -> ExitCode {
    test_harness::main(
        &[],
        test_harness::multi_thread_tests![
            a_request_is_one_trace_from_router_to_decode_node,
            load_from_a_tier_is_a_span_of_its_request,
            no_log_span_metric_or_error_contains_a_key_a_prompt_or_an_answer,
            explain_asks_every_router_behind_a_name,
        ],
    )
}

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CALLER: &str = "b7ad6b7169203331";

/// Collector that stores every span with its service name.
#[derive(Clone, Default)]
struct Collector {
    spans: Arc<Mutex<Vec<(String, Span)>>>,
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut spans = self.spans.lock().expect("the lock is not poisoned");
        if request.metadata().get("x-tenant").is_none_or(|tenant| tenant != "one") {
            return Err(Status::unauthenticated(
                "expected the header of OTEL_EXPORTER_OTLP_HEADERS",
            ));
        }
        for resource in request.into_inner().resource_spans {
            let attributes = resource.resource.unwrap_or_default().attributes;
            if text(&attributes, "k8s.pod.name") != Some("pod-0") {
                return Err(Status::invalid_argument(format!("attributes {attributes:?}")));
            }
            let service = text(&attributes, "service.name").unwrap_or_default();
            let service = service.trim_start_matches("baton-").to_owned();
            for scope in resource.scope_spans {
                spans.extend(scope.spans.into_iter().map(|span| (service.clone(), span)));
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn value<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a Value> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    found.value.as_ref()?.value.as_ref()
}

/// Returns the text of an attribute.
fn text<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a str> {
    match value(attributes, key)? {
        Value::StringValue(text) => Some(text),
        _ => None,
    }
}

/// Returns the integer of an attribute.
fn integer(attributes: &[KeyValue], key: &str) -> Option<i64> {
    match value(attributes, key)? {
        Value::IntValue(integer) => Some(*integer),
        _ => None,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

// The collector must respond while the test waits for processes to end.
type CollectorServer = JoinHandle<Result<(), tonic::transport::Error>>;

/// Starts a collector of spans. Returns the collector, its address and its task.
fn start_collector() -> Result<(Collector, SocketAddr, CollectorServer)> {
    let collector = Collector::default();
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse()?)?;
    let address = incoming.local_addr()?;
    let service = TraceServiceServer::new(collector.clone());
    let server = tonic::transport::Server::builder().add_service(service);
    Ok((collector, address, tokio::spawn(server.serve_with_incoming(incoming))))
}

async fn a_request_is_one_trace_from_router_to_decode_node() -> Result<()> {
    let (collector, address, server) = start_collector()?;
    let spec = ClusterSpec::smollm2()
        .set("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", format!("http://{address}"))
        .set("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=one")
        .set("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=pod-0")
        .set("BATON_TELEMETRY_LOG_FORMAT", "json");
    let cluster = Cluster::start(spec).await?;
    let client = Client::new(cluster.http());
    let run = golden().runs.into_iter().max_by_key(|run| run.prompt_ids.len()).expect("runs");
    let traceparent = format!("00-{TRACE}-{CALLER}-01");
    let found = client
        .stream_with(
            "/v1/completions",
            &greedy_body(&run.prompt_ids, 8),
            &[("traceparent", &traceparent)],
        )
        .await?
        .token_ids()
        .await?;
    assert_eq!(found, run.output_ids[..8]);
    let deadline = Instant::now() + Duration::from_secs(10);
    let ended = loop {
        let log = cluster.router.log();
        if let Some(line) = log.lines().find(|line| line.contains("request ended")) {
            break line.to_owned();
        }
        ensure!(Instant::now() < deadline, "the log has no end of the request:\n{log}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(ended.contains(&format!(r#""trace_id":"{TRACE}""#)), "{ended}");
    // Shutdown flushes the remaining spans.
    cluster.stop()?;

    // Both sides of a transfer have a span with that name.
    let wanted = [
        ("router", "request"),
        ("router", "attempt"),
        ("prefill-node", "queue"),
        ("prefill-node", "prefill"),
        ("prefill-node", "transfer"),
        ("decode-node", "reserve"),
        ("decode-node", "transfer"),
        ("decode-node", "decode"),
    ];
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let spans: Vec<(String, Span)> = collector
            .spans
            .lock()
            .expect("the lock is not poisoned")
            .iter()
            .filter(|(_, span)| hex(&span.trace_id) == TRACE)
            .cloned()
            .collect();
        let names: BTreeSet<(&str, &str)> =
            spans.iter().map(|(service, span)| (service.as_str(), span.name.as_str())).collect();
        if wanted.iter().all(|name| names.contains(name)) {
            check_tree(&spans);
            check_kinds(&spans);
            check_transfer(&spans);
            break;
        }
        if Instant::now() >= deadline {
            let seen = collector.spans.lock().expect("the lock is not poisoned").clone();
            let seen: Vec<String> = seen
                .iter()
                .map(|(service, span)| format!("{service} {} {}", hex(&span.trace_id), span.name))
                .collect();
            bail!("received {names:?} of {wanted:?}; all spans:\n{}", seen.join("\n"));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    server.abort();
    Ok(())
}

async fn load_from_a_tier_is_a_span_of_its_request() -> Result<()> {
    let (collector, address, server) = start_collector()?;
    let folder = tempfile::tempdir()?;
    let spec = ClusterSpec::smollm2()
        .nodes(0, 1)
        .set("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", format!("http://{address}"))
        .set("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=one")
        .set("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=pod-0")
        // KV memory for little more than one prompt.
        .set_decode("BATON_NODE_BLOCKS", 64)
        .set_decode("BATON_TIER_DISK_PATH", folder.path().join("kv").display())
        .set_decode("BATON_TIER_DISK_SIZE", "256MiB")
        .set_decode("BATON_TIER_ADMISSION", "always");
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let run = longest();
    // The last token of the prompt is computed.
    let blocks = (run.prompt_ids.len() - 1) / 16;
    client.complete(&greedy_body(&run.prompt_ids, 2)).await?;
    cluster.decode[0].wait_metric("baton_tier_blocks", blocks as f64).await?;
    for salt in ["one", "two"] {
        client.complete(&salted_body(&run.prompt_ids, 2, salt)).await?;
    }
    let traceparent = format!("00-{TRACE}-{CALLER}-01");
    let headers = [("traceparent", traceparent.as_str())];
    let body = greedy_body(&run.prompt_ids, 8);
    let mut answer = client.stream_with("/v1/completions", &body, &headers).await?;
    assert_eq!(answer.token_ids().await?, run.output_ids[..8]);
    // Shutdown flushes the remaining spans.
    cluster.stop()?;

    let wanted = [("router", "request"), ("router", "attempt"), ("decode-node", "load")];
    let deadline = Instant::now() + DEADLINE;
    loop {
        let mut spans = collector.spans.lock().expect("the lock is not poisoned").clone();
        spans.retain(|(_, span)| hex(&span.trace_id) == TRACE);
        let find = |(service, name): (&str, &str)| {
            spans.iter().find(|(of, span)| of == service && span.name == name)
        };
        if let [Some(request), Some(attempt), Some(load)] = wanted.map(find) {
            assert_eq!(hex(&request.1.parent_span_id), CALLER);
            assert_eq!(attempt.1.parent_span_id, request.1.span_id);
            assert_eq!(load.1.parent_span_id, attempt.1.span_id);
            let tokens = 16 * blocks as i64;
            assert_eq!(integer(&load.1.attributes, "loaded_tokens"), Some(tokens));
            break;
        }
        ensure!(Instant::now() < deadline, "expected {wanted:?}: {spans:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    server.abort();
    Ok(())
}

const PROMPT: &str = "the planted prompt 5d1c";
const ANSWER: &str = "planted answer";
const UNKNOWN_KEY: &str = "planted-key-77e0";

/// Makes a key by `baton keys new`, and writes its entry to the file.
fn new_key(file: &std::path::Path) -> Result<String> {
    let mut baton = Command::new(bin_dir().join("baton"));
    let made = output(baton.args(["keys", "new", "team-a"]))?;
    ensure!(made.status.success(), "{made:?}");
    std::fs::write(file, &made.stdout)?;
    let shown = String::from_utf8(made.stderr)?;
    let key = shown.split_whitespace().last().unwrap_or_default().to_owned();
    ensure!(key.starts_with("baton-") && key.len() == 70, "{shown}");
    ensure!(!String::from_utf8(made.stdout)?.contains(&key), "the entry holds the key");
    Ok(key)
}

/// Sends requests with planted texts, valid and invalid ones, and returns the bodies of the errors.
async fn send_planted(client: &Client, key: &str) -> Result<Vec<String>> {
    let authorization = format!("Bearer {key}");
    let post = async |path: &str, authorization: &str, body: serde_json::Value| {
        let headers = [("authorization", authorization)];
        client.post_bytes(path, body.to_string().into(), &headers).await
    };
    let answered = post(
        "/v1/chat/completions",
        &authorization,
        json!({
            "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 32, "regex": ANSWER,
            "temperature": 0,
        }),
    )
    .await?;
    ensure!(answered.json()["choices"][0]["message"]["content"] == ANSWER, "{answered:?}");
    let tokenized = post("/tokenize", &authorization, json!({"prompt": PROMPT})).await?;
    ensure!(tokenized.status == 200, "{tokenized:?}");
    let mut errors = Vec::new();
    let messages = json!([{"role": "user", "content": "x"}]);
    for (path, body, status) in [
        ("/v1/completions", json!({"prompt": {"text": PROMPT}}), 400),
        ("/v1/completions", json!({"prompt": [1, PROMPT]}), 400),
        ("/v1/completions", json!({"prompt": PROMPT, "max_tokens": -2}), 400),
        ("/v1/completions", json!({"prompt": PROMPT, "model": "other"}), 404),
        ("/v1/completions", json!({"prompt": PROMPT.repeat(4000)}), 400),
        ("/v1/completions", json!(PROMPT), 400),
        ("/v1/completions", json!({"prompt": "x", "suffix": PROMPT}), 400),
        ("/v1/completions", json!({"prompt": "x", "guided_grammar": PROMPT}), 400),
        ("/v1/completions", json!({"prompt": "x", "stop": {"text": PROMPT}}), 400),
        ("/v1/completions", json!({"prompt": "x", "response_format": {"type": PROMPT}}), 400),
        ("/v1/completions", json!({"prompt": "x", "guided_json": json!(PROMPT).to_string()}), 400),
        ("/v1/chat/completions", json!({"messages": PROMPT}), 400),
        ("/v1/chat/completions", json!({"messages": [PROMPT]}), 400),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": {"a": PROMPT}}]}),
            400,
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": [{"type": PROMPT}]}]}),
            400,
        ),
        ("/v1/chat/completions", json!({"messages": messages, "documents": [PROMPT]}), 400),
        ("/v1/chat/completions", json!({"messages": messages, "tools": PROMPT}), 400),
        (
            "/v1/chat/completions",
            json!({"messages": messages, "tools": [{"type": "function", "function": PROMPT}]}),
            400,
        ),
        ("/v1/chat/completions", json!({"messages": messages, "tool_choice": PROMPT}), 400),
    ] {
        let refused = post(path, &authorization, body.clone()).await?;
        ensure!(refused.status == status, "{body}: {refused:?}");
        errors.push(String::from_utf8(refused.body.to_vec())?);
    }
    let unknown = format!("Bearer {UNKNOWN_KEY}");
    let refused = post("/v1/completions", &unknown, json!({"prompt": PROMPT})).await?;
    ensure!(refused.status == 401, "{refused:?}");
    errors.push(String::from_utf8(refused.body.to_vec())?);
    Ok(errors)
}

/// Sends requests with planted texts for a stream, a tool call and an answer by gRPC, and returns
/// the error of an invalid request by gRPC.
async fn send_planted_by_stream_tool_call_and_grpc(cluster: &Cluster, key: &str) -> Result<String> {
    let client = Client::new(cluster.http());
    let authorization = format!("Bearer {key}");
    let headers = [("authorization", authorization.as_str())];
    let body = json!({"prompt": PROMPT, "max_tokens": 32, "regex": ANSWER, "temperature": 0,
        "stream": true});
    let events = client.stream_with("/v1/completions", &body, &headers).await?.all().await?;
    let answered = events.iter().filter(|event| !event.is_done());
    let answered = answered
        .map(|event| event.json()["choices"][0]["text"].as_str().unwrap_or_default().to_owned());
    ensure!(answered.collect::<String>() == ANSWER, "{events:?}");

    let parameters = json!({"type": "object", "properties": {"a": {"const": ANSWER}},
        "required": ["a"], "additionalProperties": false});
    let function = json!({"name": "f", "description": PROMPT, "parameters": parameters});
    let body = json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 200,
        "temperature": 0, "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}}});
    let answered =
        client.post_bytes("/v1/chat/completions", body.to_string().into(), &headers).await?;
    let message = answered.json()["choices"][0]["message"].clone();
    let arguments = message["tool_calls"][0]["function"]["arguments"].as_str();
    let arguments = arguments.unwrap_or_default();
    ensure!(arguments.contains(ANSWER), "{answered:?}");

    let mut client = InferenceClient::connect(cluster.grpc()).await?;
    let request = |prompt: String| -> Result<Request<GenerateRequest>> {
        let options = GenerateOptions {
            max_tokens: Some(32),
            temperature: Some(0.0),
            grammar: Some(Grammar { kind: Some(Kind::Regex(ANSWER.into())), thought: None }),
            ..Default::default()
        };
        let mut request = Request::new(GenerateRequest {
            prompt: Some(Prompt::Text(prompt)),
            options: Some(options),
            ..Default::default()
        });
        request.metadata_mut().insert("authorization", authorization.parse()?);
        Ok(request)
    };
    let mut events = client.generate(request(PROMPT.to_owned())?).await?.into_inner();
    let mut answered = String::new();
    while let Some(response) = events.message().await? {
        match response.event.context("an event")? {
            Event::Tokens(tokens) => answered += &tokens.text,
            Event::Finished(finished) => answered += &finished.text,
        }
    }
    ensure!(answered == ANSWER, "{answered}");
    let refused = client.generate(request(PROMPT.repeat(4000))?).await;
    let status = refused.err().context("the prompt is too long")?;
    ensure!(status.code() == tonic::Code::InvalidArgument, "{status:?}");
    Ok(status.message().to_owned())
}

async fn no_log_span_metric_or_error_contains_a_key_a_prompt_or_an_answer() -> Result<()> {
    let template = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tool_template.jinja");
    for format in ["json", "pretty"] {
        let (collector, address, server) = start_collector()?;
        let folder = tempfile::tempdir()?;
        let keys = folder.path().join("keys.toml");
        let key = new_key(&keys)?;
        let spec = ClusterSpec::smollm2()
            .set("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", format!("http://{address}"))
            .set("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=one")
            .set("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=pod-0")
            .set("BATON_TELEMETRY_LOG", "debug")
            .set("BATON_TELEMETRY_LOG_FORMAT", format)
            .set("BATON_MODEL_CHAT_TEMPLATE", template)
            .set("BATON_ROUTER_KEYS", keys.display());
        let mut cluster = Cluster::start(spec).await?;
        let mut errors = send_planted(&Client::new(cluster.http()), &key).await?;
        errors.push(send_planted_by_stream_tool_call_and_grpc(&cluster, &key).await?);
        let mut texts: Vec<(String, String)> =
            errors.into_iter().map(|body| ("error".to_owned(), body)).collect();
        let admin = Client::new(format!("http://{}", cluster.router.ready.admin));
        for query in ["slow=100", "failed"] {
            let explained = admin.get(&format!("/v1/explain?{query}")).await?;
            texts.push((query.to_owned(), String::from_utf8(explained.body.to_vec())?));
        }
        for service in cluster.all() {
            let metrics = Client::new(format!("http://{}", service.ready.metrics));
            let body = metrics.get("/metrics").await?.body;
            texts.push((format!("metrics of {}", service.name), String::from_utf8(body.to_vec())?));
        }
        // Shutdown flushes logs and spans.
        for service in cluster.all() {
            service.terminate_signal();
        }
        for service in cluster.all() {
            service.wait_end(Duration::from_secs(20))?;
            texts.push((format!("log of {}", service.name), service.log()));
        }
        server.abort();
        let spans = collector.spans.lock().expect("the lock is not poisoned").clone();
        ensure!(spans.iter().any(|(_, span)| span.name == "request"), "no spans");
        texts.push(("spans".to_owned(), format!("{spans:?}")));
        let (_, log) = texts.iter().find(|(name, _)| name == "log of router").expect("listed");
        ensure!(log.contains("team-a"), "log lines of requests name the key:\n{log}");
        for (name, text) in &texts {
            for planted in [&key, PROMPT, ANSWER, UNKNOWN_KEY, SECRET] {
                let line = text.lines().find(|line| line.contains(planted));
                ensure!(line.is_none(), "{format}: {name} contains {planted}: {line:?}");
            }
        }
    }
    Ok(())
}

/// Checks that a call has a client's span and a server's span, and that the request has the GenAI
/// names.
fn check_kinds(spans: &[(String, Span)]) {
    for (service, name, kind) in [
        ("router", "request", SpanKind::Server),
        ("router", "attempt", SpanKind::Client),
        ("prefill-node", "prefill", SpanKind::Server),
        ("decode-node", "transfer", SpanKind::Client),
        ("prefill-node", "transfer", SpanKind::Server),
        ("decode-node", "decode", SpanKind::Server),
    ] {
        let found = spans.iter().find(|(of, span)| of == service && span.name == name);
        assert_eq!(found.map(|(_, span)| span.kind()), Some(kind), "{service} {name}");
    }
    let request = spans.iter().find(|(_, span)| span.name == "request").expect("a request");
    let attributes = &request.1.attributes;
    assert_eq!(text(attributes, "gen_ai.operation.name"), Some("text_completion"));
    assert_eq!(text(attributes, "gen_ai.provider.name"), Some("baton"));
    assert_eq!(integer(attributes, "gen_ai.usage.output_tokens"), Some(8));
    let ended = request.1.events.iter().find(|event| event.name == "request ended");
    let ended = &ended.expect("the end of the request").attributes;
    assert_eq!(integer(ended, "completion_tokens"), Some(8));
    assert!(matches!(value(ended, "duration_ms"), Some(Value::DoubleValue(_))), "{ended:?}");
    for (service, span) in spans {
        let events = span.events.iter().flat_map(|event| &event.attributes);
        for attribute in span.attributes.iter().chain(events) {
            let shown = text(std::slice::from_ref(attribute), &attribute.key);
            let is_number = shown.is_some_and(|text| text.parse::<f64>().is_ok());
            let is_id = attribute.key.ends_with("_id");
            assert!(is_id || !is_number, "{service} {}: {attribute:?} is text", span.name);
        }
    }
}

/// Checks that the sender's transfer span is a child of the receiver's: `RESERVE` carries the
/// parent over ZeroMQ.
fn check_transfer(spans: &[(String, Span)]) {
    let transfer_of = |wanted: &str| {
        let mut found = spans
            .iter()
            .filter(|(service, span)| service == wanted && span.name == "transfer")
            .map(|(_, span)| span);
        let first = found.next().expect("the span has arrived");
        assert!(found.next().is_none(), "{wanted}: one request has one transfer");
        first
    };
    let (sent, received) = (transfer_of("prefill-node"), transfer_of("decode-node"));
    for span in [sent, received] {
        for key in ["bytes", "chunks"] {
            assert!(integer(&span.attributes, key) > Some(0), "{key}: {:?}", span.attributes);
        }
    }
    let names: BTreeMap<String, String> = spans
        .iter()
        .map(|(service, span)| (hex(&span.span_id), format!("{service} {}", span.name)))
        .collect();
    assert_eq!(
        hex(&sent.parent_span_id),
        hex(&received.span_id),
        "the sender's transfer has the parent {:?}",
        names.get(&hex(&sent.parent_span_id))
    );
}

/// Checks that every span descends from the caller's span.
fn check_tree(spans: &[(String, Span)]) {
    let parents: BTreeMap<String, String> =
        spans.iter().map(|(_, span)| (hex(&span.span_id), hex(&span.parent_span_id))).collect();
    for (service, span) in spans {
        let mut at = hex(&span.span_id);
        for _ in 0..=parents.len() {
            if at == CALLER {
                break;
            }
            at = parents
                .get(&at)
                .unwrap_or_else(|| panic!("{service} {}: parent {at} is unknown", span.name))
                .clone();
        }
        assert_eq!(at, CALLER, "{service} {} has no parent", span.name);
    }
    let services: BTreeSet<&str> = spans.iter().map(|(service, _)| service.as_str()).collect();
    assert!(services.len() >= 3, "{services:?}");
}

/// A name of two addresses, as behind a headless Service: in a mount namespace whose /etc/hosts has
/// the name.
async fn explain_asks_every_router_behind_a_name() -> Result<()> {
    let private = |hosts: &str| {
        let mut command = Command::new("unshare");
        let script = "mount --bind \"$0\" /etc/hosts && exec \"$@\"";
        command.args(["--mount", "sh", "-c", script, hosts]);
        command
    };
    if !private("/etc/hosts").arg("true").output().is_ok_and(|output| output.status.success()) {
        test_harness::skip("a private /etc/hosts needs root");
    }
    let (cluster, first) = Cluster::start_with_client(ClusterSpec::smollm2()).await?;
    let (_, port) = cluster.router.ready.admin.rsplit_once(':').context("a port")?;
    let mut router = cluster.start_router("second", &format!("127.0.0.2:{port}"))?;
    let second = Client::new(format!("http://{}", router.ready.http));
    for (client, label) in [(&first, "by-first"), (&second, "by-second")] {
        let body = json!({"prompt": "Hi", "max_tokens": 1}).to_string();
        let label = [("x-request-id", label)];
        let answer = client.post_bytes("/v1/completions", body.into(), &label).await?;
        assert_eq!(answer.status, 200);
    }

    let folder = tempfile::tempdir()?;
    let hosts = folder.path().join("hosts").display().to_string();
    std::fs::write(&hosts, "127.0.0.1 routers\n127.0.0.2 routers\n")?;
    let url = format!("http://routers:{port}");
    let explain = |args: &[&str]| {
        let mut command = private(&hosts);
        command.arg(bin_dir().join("baton")).args(["explain", "--url", &url]).args(args);
        output(&mut command)
    };
    let slow = explain(&["--slow", "10", "--json"])?;
    let slow: Vec<serde_json::Value> = serde_json::from_slice(&slow.stdout)?;
    let labels: BTreeSet<_> = slow.iter().filter_map(|it| it["label"].as_str()).collect();
    assert_eq!(labels, BTreeSet::from(["by-first", "by-second"]));
    let one = explain(&["by-second"])?;
    assert_eq!(one.status.code(), Some(0));
    assert!(String::from_utf8(one.stdout)?.contains("label by-second"));

    router.terminate_signal();
    router.wait_end(Duration::from_secs(30))?;
    let partial = explain(&["--slow", "10"])?;
    let said = String::from_utf8(partial.stderr)?;
    assert_eq!(partial.status.code(), Some(1), "{said}");
    assert!(said.contains("127.0.0.2") && said.contains("1 of the routers"), "{said}");
    cluster.stop()
}
