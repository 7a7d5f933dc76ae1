//! Tests one decode node, which prefills prompts itself, over gRPC.

mod common;

use std::{
    path::Path,
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use common::*;
use futures_util::{StreamExt, stream};
use http_body_util::StreamBody;
use hyper::body::Frame;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use node::Role;
use proto::{
    auth::{CallSigner, ClusterSecret, OBSERVE, TOKEN_KEY},
    ids::Epoch,
    v1::{self, FailureKind, FinishReason, node_client::NodeClient, weights_client::WeightsClient},
};
use serde_json::Value;
use test_harness::assert_median;
use tonic::{
    Code, Request, Status,
    metadata::{Binary, MetadataValue},
    service::Interceptor,
};

const DECODE: &str = "/baton.v1.Node/Decode";

async fn decode_node(more: &[(&str, &str)]) -> (TestNode, Side, tempfile::TempDir) {
    decode_node_of(dummy_model(), more).await
}

/// Starts a decode node whose answers take seconds.
async fn slow_decode_node(more: &[(&str, &str)]) -> (TestNode, Side, tempfile::TempDir) {
    decode_node_of(slow_model(), more).await
}

async fn decode_node_of(
    model: tempfile::TempDir,
    more: &[(&str, &str)],
) -> (TestNode, Side, tempfile::TempDir) {
    let node = TestNode::start(Role::Decode, dummy_settings(model.path(), more)).await;
    let side = node.side();
    (node, side, model)
}

#[tokio::test]
async fn tokens_are_generated_in_index_order() {
    let (node, side, _model) = decode_node(&[]).await;
    let prompt = dummy_prompt(40, 1);
    let decoded = side.local_prefill(&attempt(&prompt, 20)).await;
    assert_eq!(decoded.ids.len(), 20);
    assert_eq!(decoded.first_index, Some(0));
    assert_eq!(decoded.reserved, Some(v1::Reserved { cached_tokens: 0, local_prefill: true }));
    let finished = decoded.finished.unwrap();
    assert_eq!(finished.reason(), FinishReason::Length);
    assert_eq!(finished.received_bytes, 0);

    // A later attempt continues after the emitted tokens and finds the prompt in the cache.
    let mut later = attempt(&[&prompt[..], &decoded.ids[..7]].concat(), 20);
    later.prompt_len = 40;
    let rest = side.local_prefill(&later).await;
    assert_eq!(rest.first_index, Some(7));
    assert_eq!(rest.ids, decoded.ids[7..]);
    assert_eq!(rest.reserved.unwrap().cached_tokens, 32);
    node.stop().await;
}

#[tokio::test]
async fn concurrent_requests_match_single_requests() {
    let (node, side, _model) = decode_node(&[]).await;
    let prompts: Vec<Vec<u32>> =
        (0..8).map(|seed| dummy_prompt(10 + 9 * seed, seed as u32)).collect();
    let mut alone = Vec::new();
    for prompt in &prompts {
        alone.push(side.local_prefill(&attempt(prompt, 12)).await.ids);
    }
    let attempts: Vec<v1::Attempt> = prompts
        .iter()
        .map(|prompt| v1::Attempt { cache_salt: "other".into(), ..attempt(prompt, 12) })
        .collect();
    let together =
        futures_util::future::join_all(attempts.iter().map(|attempt| side.local_prefill(attempt)));
    for (found, expected) in together.await.into_iter().zip(alone) {
        assert_eq!(found.ids, expected);
    }
    node.stop().await;
}

#[tokio::test]
async fn a_dropped_stream_frees_its_blocks_within_a_second() {
    let (node, side, _model) = slow_decode_node(&[]).await;
    let mut observer = side.observe().await;
    let mut took = Vec::new();
    for seed in 1..=5 {
        let prompt = dummy_prompt(100, seed);
        let mut stream = side.try_decode(&attempt(&prompt, 900), None).await.unwrap();
        let mut decoded = Decoded::default();
        while decoded.ids.len() < 3 {
            decoded.take(next(&mut stream).await.unwrap().unwrap());
        }
        observer.until(|load| load.blocks_held > 0 && load.running == 1).await;
        let left = Instant::now();
        drop(stream);
        observer.until(is_free).await;
        took.push(left.elapsed());
    }
    assert_median("blocks free after the stream was dropped", &took, Duration::from_secs(1));
    node.stop().await;
}

#[tokio::test]
async fn full_node_rejects_as_busy_until_a_request_ends() {
    let (node, side, _model) =
        slow_decode_node(&[("node.slots", "1"), ("node.waiting_max", "1"), ("node.blocks", "64")])
            .await;
    let mut observer = side.observe().await;
    let running = side.try_decode(&attempt(&dummy_prompt(30, 1), 900), None).await.unwrap();
    observer.until(|load| load.running == 1).await;
    let waiting = side.try_decode(&attempt(&dummy_prompt(30, 2), 900), None).await.unwrap();
    let third = side.try_decode(&attempt(&dummy_prompt(30, 3), 900), None).await;
    assert!(refused(third, Code::ResourceExhausted).starts_with("busy"));
    drop((running, waiting));
    observer.until(is_free).await;
    assert_eq!(side.local_prefill(&attempt(&dummy_prompt(30, 3), 5)).await.ids.len(), 5);
    node.stop().await;
}

#[tokio::test]
async fn invalid_fields_are_rejected_by_name_and_disturb_no_request() {
    let (node, side, _model) = decode_node(&[]).await;
    let good = attempt(&dummy_prompt(20, 1), 8);
    let expected = side.local_prefill(&good).await.ids;
    type Spoil = fn(&mut v1::Attempt);
    let cases: &[(Code, &str, Spoil)] = &[
        (Code::InvalidArgument, "attempt.tokens: empty", |attempt| attempt.tokens.clear()),
        (Code::InvalidArgument, "attempt.tokens: 96 at index 3", |attempt| attempt.tokens[3] = 96),
        (Code::InvalidArgument, "attempt.tokens: 2048 tokens", |attempt| {
            // 128 blocks hold exactly this many tokens.
            attempt.tokens = vec![1; 2048];
        }),
        (Code::InvalidArgument, "attempt.prompt_len: 21", |attempt| attempt.prompt_len = 21),
        (Code::InvalidArgument, "attempt.request_id: 2 bytes", |attempt| {
            attempt.request_id = vec![1, 2].into();
        }),
        (Code::InvalidArgument, "attempt.sampling: absent", |attempt| attempt.sampling = None),
        (Code::InvalidArgument, "attempt.sampling.temperature: NaN", |attempt| {
            attempt.sampling.as_mut().unwrap().temperature = f32::NAN;
        }),
        (Code::Aborted, "weight_version = 9", |attempt| attempt.weight_version = 9),
        (Code::DeadlineExceeded, "deadline passed", |attempt| attempt.remaining_ms = 0),
    ];
    for (code, words, spoil) in cases {
        let mut wrong = attempt(&dummy_prompt(20, 1), 8);
        spoil(&mut wrong);
        let message = refused(side.try_decode(&wrong, None).await, *code);
        assert!(message.contains(words), "{message:?} does not say {words:?}");
    }
    let absent = side.client.clone().decode(v1::DecodeRequest::default()).await;
    assert!(refused(absent, Code::InvalidArgument).contains("attempt: absent"));
    // The router expects an earlier process of this node.
    let stale = v1::DecodeRequest {
        attempt: Some(v1::Attempt { node_epoch: fresh_id(), ..attempt(&[1], 2) }),
        prefill: None,
    };
    let message = refused(side.client.clone().decode(stale).await, Code::FailedPrecondition);
    assert!(message.contains("node_epoch"), "{message}");
    // A node sends no KV to itself.
    let to_itself = side.try_prefill(&attempt(&[1], 2), side.peer.clone()).await;
    assert!(refused(to_itself, Code::InvalidArgument).contains("the epoch of another process"));
    // A message larger than any limit.
    let huge = attempt(&vec![u32::MAX; 200_000], 2);
    refused(side.try_decode(&huge, None).await, Code::OutOfRange);

    assert_eq!(side.local_prefill(&attempt(&dummy_prompt(20, 1), 8)).await.ids, expected);
    node.stop().await;
}

#[tokio::test]
async fn duplicate_attempt_is_rejected_as_already_existing() {
    let (node, side, _model) = decode_node(&[]).await;
    let long = attempt(&dummy_prompt(20, 1), 500);
    let mut first = side.try_decode(&long, None).await.unwrap();
    refused(side.try_decode(&long, None).await, Code::AlreadyExists);
    // The first request is not disturbed.
    let mut decoded = Decoded::default();
    while let Some(event) = next(&mut first).await.unwrap() {
        decoded.take(event);
    }
    assert_eq!(decoded.ids.len(), 500);
    refused(side.try_decode(&long, None).await, Code::AlreadyExists);
    node.stop().await;
}

#[tokio::test]
async fn deadline_cancels_only_its_own_attempt() {
    let (node, side, _model) = slow_decode_node(&[]).await;
    let mut observer = side.observe().await;
    let short = v1::Attempt { remaining_ms: 200, ..attempt(&dummy_prompt(20, 1), 1000) };
    let decoded = side.local_prefill(&short).await;
    assert_eq!(decoded.failure.unwrap().kind(), FailureKind::Deadline);
    assert!(decoded.ids.len() < 1000);
    observer.until(is_free).await;
    node.stop().await;
}

#[tokio::test]
async fn observers_see_a_snapshot_then_numbered_changes() {
    let (node, side, _model) = decode_node(&[]).await;
    side.local_prefill(&attempt(&dummy_prompt(64, 1), 2)).await;
    let mut observer = side.observe().await;
    let v1::observe_event::Event::Snapshot(snapshot) = observer.event().await.unwrap() else {
        panic!("the first event is a snapshot");
    };
    let record = cluster::NodeRecord::try_from(snapshot.record.unwrap()).expect("a valid record");
    assert_eq!(&record, node.node.record());
    assert_eq!(record.model, "test-model");
    assert_eq!((record.prompt_tokens_max, record.sequence_tokens_max), (2047, 2048));
    assert_eq!((record.block_count, record.vocabulary_size), (128, DUMMY_VOCABULARY));
    // 64 prompt tokens fill four blocks.
    assert_eq!(snapshot.cached_blocks.len(), 4);
    assert!(snapshot.cached_blocks.iter().all(|hash| hash.len() == 16));

    // Later cached blocks are reported once, as a change. Known blocks are not repeated.
    side.local_prefill(&attempt(&dummy_prompt(64, 2), 2)).await;
    let mut cached = Vec::new();
    while cached.len() < 4 {
        let v1::observe_event::Event::Delta(delta) = observer.event().await.unwrap() else {
            panic!("one snapshot only");
        };
        cached.extend(delta.cached);
        assert!(delta.evicted.is_empty());
    }
    assert!(cached.iter().all(|hash| !snapshot.cached_blocks.contains(hash)));
    observer.until(is_free).await;
    let load = observer.load.unwrap();
    let total = load.blocks_free + load.blocks_cached + load.blocks_held + load.blocks_reserved;
    assert_eq!(total, 128);
    node.stop().await;
}

#[tokio::test]
async fn draining_node_finishes_requests_and_accepts_none() {
    let (node, side, _model) = decode_node(&[]).await;
    let mut observer = side.observe().await;
    let mut stream = side.try_decode(&attempt(&dummy_prompt(20, 1), 600), None).await.unwrap();
    let mut decoded = Decoded::default();
    decoded.take(next(&mut stream).await.unwrap().unwrap());
    let address = node.node.addresses().grpc.to_string();
    let draining = tokio::spawn(node.stop());
    observer.until(|load| load.draining).await;
    let late = side.try_decode(&attempt(&dummy_prompt(20, 2), 5), None).await;
    assert!(refused(late, Code::Unavailable).contains("drains"));
    while let Some(event) = next(&mut stream).await.unwrap() {
        decoded.take(event);
    }
    assert_eq!(decoded.ids.len(), 600);
    assert!(decoded.finished.is_some());
    let end = loop {
        if let Err(status) = observer.event().await {
            break status;
        }
    };
    assert_eq!(end.code(), Code::Unavailable);
    draining.await.unwrap();
    assert!(tokio::net::TcpStream::connect(address).await.is_err(), "the port is closed");
}

#[tokio::test]
async fn operator_drains_and_undrains_a_node_and_resets_its_prefix_cache() {
    let (node, side, _model) = decode_node(&[]).await;
    let mut observer = side.observe().await;
    let prompt = || attempt(&dummy_prompt(40, 1), 5);
    side.local_prefill(&prompt()).await;
    observer.until(|load| load.blocks_cached >= 2).await;
    let node_epoch = side.peer.epoch.clone();
    let mut client = side.client.clone();
    let reset = v1::ResetPrefixCacheRequest { node_epoch: node_epoch.clone() };
    let dropped = client.reset_prefix_cache(reset.clone()).await.unwrap().into_inner().blocks;
    assert!(dropped >= 2, "{dropped}");
    observer.until(|load| load.blocks_cached == 0).await;
    assert_eq!(client.reset_prefix_cache(reset).await.unwrap().into_inner().blocks, 0);
    assert_eq!(side.local_prefill(&prompt()).await.reserved.unwrap().cached_tokens, 0);

    let set = |draining| v1::SetDrainingRequest { node_epoch: node_epoch.clone(), draining };
    client.set_draining(set(true)).await.unwrap();
    observer.until(|load| load.draining).await;
    let late = side.try_decode(&prompt(), None).await;
    assert!(refused(late, Code::Unavailable).contains("drains"));
    client.set_draining(set(false)).await.unwrap();
    observer.until(|load| !load.draining).await;
    assert_eq!(side.local_prefill(&prompt()).await.ids.len(), 5);
    let other = v1::SetDrainingRequest { node_epoch: vec![9; 16].into(), draining: true };
    assert_eq!(client.set_draining(other).await.unwrap_err().code(), Code::FailedPrecondition);
    node.stop().await;
}

#[tokio::test]
async fn operator_records_one_trace_at_a_time() {
    let (node, side, _model) = decode_node(&[]).await;
    let node_epoch = side.peer.epoch.clone();
    let record = async |seconds| {
        let request = v1::TraceRequest { node_epoch: node_epoch.clone(), seconds };
        let reply = side.client.clone().trace(request).await?;
        Ok::<Value, Status>(serde_json::from_slice(&reply.into_inner().json).unwrap())
    };
    for seconds in [0, 61] {
        let status = record(seconds).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("expected 1 to 60"), "{status}");
    }
    let other = v1::TraceRequest { node_epoch: vec![9; 16].into(), seconds: 1 };
    let status = side.client.clone().trace(other).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);

    // A caller that leaves ends its trace.
    let left = tokio::time::timeout(Duration::from_millis(100), record(60)).await;
    assert!(left.is_err(), "{left:?}");
    let deadline = Instant::now() + Duration::from_secs(30);
    while let Err(busy) = record(1).await {
        assert_eq!(busy.code(), Code::ResourceExhausted);
        assert!(busy.message().contains("records a trace already"), "{busy}");
        assert!(Instant::now() < deadline, "the trace of the caller that left goes on");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let serve = async {
        side.local_prefill(&attempt(&dummy_prompt(40, 1), 5)).await;
        assert_eq!(record(1).await.unwrap_err().code(), Code::ResourceExhausted);
    };
    let (trace, ()) = tokio::join!(record(1), serve);
    let trace = trace.unwrap();
    assert_eq!(trace["otherData"]["is_full"], false);
    assert!(trace["otherData"]["seconds"].as_f64().unwrap() >= 1.0);
    let events = trace["traceEvents"].as_array().unwrap();
    let count = |name: &str| events.iter().filter(|it| it["name"] == name).count();
    assert!(count("launch") >= 5 && count("decode") >= 4, "{trace}");
    assert_eq!(trace["otherData"]["steps"], count("launch"));
    node.stop().await;
}

#[tokio::test]
async fn drain_timeout_cancels_the_remaining_requests() {
    let (node, side, _model) = slow_decode_node(&[("node.drain_timeout", "100ms")]).await;
    let stream = side.try_decode(&attempt(&dummy_prompt(20, 1), 1000), None).await.unwrap();
    let decoded = tokio::spawn(Decoded::of(stream));
    node.stop().await;
    // The shutdown did not wait for the request.
    let decoded = decoded.await.unwrap();
    assert_eq!(decoded.failure.unwrap().kind(), FailureKind::Draining);
}

#[tokio::test]
async fn used_port_is_reported_before_the_model_is_loaded() {
    let (node, _side, model) = decode_node(&[]).await;
    let address = node.node.addresses().grpc.to_string();
    let flags = dummy_settings(model.path(), &[("node.grpc", &address)]);
    let error =
        TestNode::try_start(Role::Decode, flags).await.err().expect("the node cannot start");
    let message = error.to_string();
    assert!(message.contains("node.grpc") && message.contains(&address), "{message}");
    node.stop().await;
}

#[tokio::test]
async fn a_lost_connection_cancels_its_requests() {
    let (node, side, _model) = slow_decode_node(&[]).await;
    let relay = Relay::start(node.node.addresses().grpc).await;
    let client = connect(&relay.address.to_string(), node.node.record().epoch).await;
    let far = Side { client, ..side.clone() };
    let mut observer = side.observe().await;
    let mut stream = far.try_decode(&attempt(&dummy_prompt(20, 1), 1000), None).await.unwrap();
    next(&mut stream).await.unwrap();
    observer.until(|load| load.running == 1).await;
    // Packets are dropped, without FIN or RST.
    relay.black_hole();
    let lost = Instant::now();
    observer.until(is_free).await;
    // Keep-alive: a ping after 500 ms and 2 s for the response, with a margin for a shared machine.
    assert!(lost.elapsed() < Duration::from_secs(10), "took {:?}", lost.elapsed());
    drop(stream);
    node.stop().await;
}

/// Relay of bytes between a client and a node until `black_hole`. Keeps both connections open.
struct Relay {
    address: std::net::SocketAddr,
    black_hole: tokio_util::sync::CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Relay {
    async fn start(node: std::net::SocketAddr) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let black_hole = tokio_util::sync::CancellationToken::new();
        let hole = black_hole.clone();
        let task = tokio::spawn(async move {
            let (mut client, _) = listener.accept().await.unwrap();
            let mut node = tokio::net::TcpStream::connect(node).await.unwrap();
            tokio::select! {
                _ = tokio::io::copy_bidirectional(&mut client, &mut node) => {}
                () = hole.cancelled() => std::future::pending().await,
            }
        });
        Self { address, black_hole, task }
    }

    fn black_hole(&self) {
        self.black_hole.cancel();
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[tokio::test]
async fn slow_caller_is_cancelled_without_disturbing_others() {
    let (node, side, _model) = decode_node(&[("node.blocks", "512")]).await;
    // A small window, so that the sockets buffer little.
    let endpoint =
        tonic::transport::Channel::from_shared(format!("http://{}", node.node.addresses().grpc));
    let channel = endpoint.unwrap().initial_stream_window_size(1024).connect().await.unwrap();
    let signer = signer().to(node.node.record().epoch);
    let client = NodeClient::with_interceptor(channel, signer);
    let slow = Side { client, ..side.clone() };
    let mut long = attempt(&dummy_prompt(20, 1), 4000);
    long.sampling.as_mut().unwrap().logprobs = Some(20);
    let mut observer = side.observe().await;
    let stream = slow.try_decode(&long, None).await.unwrap();
    // Other requests are served meanwhile.
    assert_eq!(side.local_prefill(&attempt(&dummy_prompt(20, 2), 50)).await.ids.len(), 50);
    // The request was cancelled with a full event queue. Its generated tokens stay in the cache.
    observer.until(|load| is_free(load) && load.blocks_cached > 60).await;
    let decoded = Decoded::of(stream).await;
    assert_eq!(decoded.failure.unwrap().kind(), FailureKind::SlowReader);
    assert!(!decoded.ids.is_empty() && decoded.ids.len() < 4000);
    node.stop().await;
}

#[tokio::test]
async fn health_says_serving_until_the_drain() {
    use tonic_health::pb::{
        HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
    };
    let (node, side, _model) = slow_decode_node(&[]).await;
    let address = format!("http://{}", node.node.addresses().grpc);
    let endpoint = tonic::transport::Channel::from_shared(address).unwrap();
    let mut health = HealthClient::new(endpoint.connect().await.unwrap());
    for service in ["", "baton.v1.Node"] {
        let request = HealthCheckRequest { service: service.into() };
        let answer = health.check(request).await.unwrap().into_inner();
        assert_eq!(answer.status(), ServingStatus::Serving, "{service:?}");
    }
    let request = HealthCheckRequest { service: String::new() };
    let mut watch = health.watch(request).await.unwrap().into_inner();
    assert_eq!(next(&mut watch).await.unwrap().unwrap().status(), ServingStatus::Serving);
    let stream = side.try_decode(&attempt(&dummy_prompt(20, 1), 100), None).await.unwrap();
    let draining = tokio::spawn(node.stop());
    assert_eq!(next(&mut watch).await.unwrap().unwrap().status(), ServingStatus::NotServing);
    assert_eq!(Decoded::of(stream).await.ids.len(), 100);
    drop((watch, health));
    draining.await.unwrap();
}

#[tokio::test]
async fn garbage_and_silence_on_the_grpc_port_disturb_no_request() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (node, side, _model) = decode_node(&[]).await;
    let address = node.node.addresses().grpc;
    let expected = side.local_prefill(&attempt(&dummy_prompt(20, 1), 50)).await.ids;
    let mut silent = tokio::net::TcpStream::connect(address).await.unwrap();
    let noise: Vec<u8> =
        (0..100_000u32).map(|byte| (byte.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let messages: [&[u8]; 5] = [
        &noise,
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        preface,
        &[&preface[..], &[0xff; 64]].concat(),
        // A frame that announces 16 MiB.
        &[&preface[..], &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]].concat(),
    ];
    for message in messages {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        // Either side may close first.
        let _ = stream.write_all(message).await;
        let again = attempt(&dummy_prompt(20, 1), 50);
        assert_eq!(side.local_prefill(&again).await.ids, expected);
    }
    // The node sends GOAWAY and closes the connection.
    let mut said = Vec::new();
    let closed = tokio::time::timeout(Duration::from_secs(10), silent.read_to_end(&mut said)).await;
    assert!(closed.is_ok(), "a silent connection is closed");
    node.stop().await;
}

#[tokio::test]
async fn grpc_client_that_demands_alpn_calls_a_node_with_certificates() {
    let (model, folder) = (dummy_model(), tempfile::tempdir().unwrap());
    let flags = with_tls(dummy_settings(model.path(), &[]), folder.path());
    let node = TestNode::start(Role::Decode, flags).await;
    assert_eq!(node.side().local_prefill(&attempt(&dummy_prompt(20, 1), 5)).await.ids.len(), 5);
    node.stop().await;
}

#[tokio::test]
async fn a_request_that_is_never_complete_ends_in_time() {
    let (node, _side, _model) = decode_node(&[]).await;
    let client = Client::builder(TokioExecutor::new()).http2_only(true).build(HttpConnector::new());
    // The message announces 100 bytes; one byte arrives.
    let half = Frame::data(Bytes::from_static(&[0, 0, 0, 0, 100, 7]));
    let body = stream::iter([Ok::<_, std::io::Error>(half)]).chain(stream::pending());
    let address = node.node.addresses().grpc;
    let token = signer().to(node.node.record().epoch).token(SystemTime::now(), DECODE);
    let token = MetadataValue::<Binary>::from_bytes(&token);
    let request = http::Request::post(format!("http://{address}{DECODE}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header(TOKEN_KEY, token.as_encoded_bytes())
        .body(StreamBody::new(Box::pin(body)))
        .unwrap();
    let answer = tokio::time::timeout(TIMEOUT, client.request(request)).await.unwrap().unwrap();
    let status = Status::from_header_map(answer.headers()).unwrap();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    assert!(status.message().contains("did not arrive within 5s"), "{status}");
    node.stop().await;
}

/// Returns an interceptor that adds this token to each call.
fn with_token(token: &[u8]) -> impl Interceptor + Clone + use<> {
    let value = MetadataValue::<Binary>::from_bytes(token);
    move |mut request: Request<()>| {
        request.metadata_mut().insert_bin(TOKEN_KEY, value.clone());
        Ok(request)
    }
}

#[tokio::test]
async fn node_proves_to_its_observer_that_it_knows_the_secret() {
    let (node, _, _model) = decode_node(&[]).await;
    let address = format!("http://{}", node.node.addresses().grpc);
    let channel = tonic::transport::Channel::from_shared(address).unwrap().connect_lazy();
    let mut request = Request::new(v1::ObserveRequest {});
    let check = signer().sign_with_proof(OBSERVE, request.metadata_mut());
    let response = NodeClient::new(channel).observe(request).await.unwrap();
    assert_eq!(check.check(response.metadata()), Ok(node.node.record().epoch));
    drop(response);
    node.stop().await;
}

#[tokio::test]
async fn stranger_learns_and_changes_nothing() {
    let (node, side, _model) = decode_node(&[]).await;
    let address = format!("http://{}", node.node.addresses().grpc);
    let channel = tonic::transport::Channel::from_shared(address).unwrap().connect_lazy();
    let own = node.node.record().epoch;
    let secret = ClusterSecret::new("the secret of another cluster").unwrap();
    let other = CallSigner::new(&secret).unwrap();
    let mut stranger = NodeClient::new(channel.clone());
    let mut stranger_weights = WeightsClient::new(channel.clone());
    let mut impostor = NodeClient::with_interceptor(channel.clone(), other.to(own));
    let mut impostor_weights = WeightsClient::with_interceptor(channel.clone(), other.to(own));
    let node_epoch = side.peer.epoch.clone();
    let drain = v1::SetDrainingRequest { node_epoch: node_epoch.clone(), draining: true };
    let reset = v1::ResetPrefixCacheRequest { node_epoch: node_epoch.clone() };
    // A peer whose endpoint is the stranger's: the node must not connect to it.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let control_endpoint = format!("tcp://{}", listener.local_addr().unwrap());
    let peer = v1::Peer { control_endpoint, ..side.peer.clone() };
    let attempt = side.addressed(&attempt(&dummy_prompt(20, 1), 5));
    let decode = v1::DecodeRequest { attempt: Some(attempt), prefill: Some(peer.clone()) };
    let meet = v1::MeetRequest { node_epoch: node_epoch.clone(), peers: vec![peer], sends: false };
    let prefill = v1::PrefillRequest::default();
    let pause = v1::PauseWeightsRequest { node_epoch, ..Default::default() };

    // The calls that node.proto and weights.proto declare.
    let protos = ["node", "weights"].map(|name| {
        let file = format!("../../proto/baton/v1/{name}.proto");
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap()
    });
    let calls = protos.iter().flat_map(|proto| proto.lines());
    let calls = calls.filter(|line| line.trim_start().starts_with("rpc ")).count();

    macro_rules! rejected {
        ($client:ident, $weights:ident, $words:literal) => {
            let answers = [
                $client.observe(v1::ObserveRequest {}).await.err(),
                $client.prefill(prefill.clone()).await.err(),
                $client.decode(decode.clone()).await.err(),
                $client.meet(meet.clone()).await.err(),
                $client.set_draining(drain.clone()).await.err(),
                $client.reset_prefix_cache(reset.clone()).await.err(),
                $client.trace(v1::TraceRequest::default()).await.err(),
                $client.load_adapter(v1::LoadAdapterRequest::default()).await.err(),
                $client.unload_adapter(v1::UnloadAdapterRequest::default()).await.err(),
                $weights.begin(v1::BeginWeightsRequest::default()).await.err(),
                $weights.commit(v1::CommitWeightsRequest::default()).await.err(),
                $weights.abort(v1::AbortWeightsRequest::default()).await.err(),
                $weights.status(v1::WeightsStatusRequest::default()).await.err(),
                $weights.pause(pause.clone()).await.err(),
                $weights.resume(v1::ResumeWeightsRequest::default()).await.err(),
                $weights.pull(v1::PullWeightsRequest::default()).await.err(),
            ];
            // Every call of the node's services.
            assert_eq!(answers.len(), calls);
            for answer in answers {
                let status = answer.expect("the call is rejected");
                assert_eq!(status.code(), Code::Unauthenticated, "{status}");
                assert!(status.message().contains($words), "{status}");
                let epoch = own.to_string();
                assert!(!format!("{status:?}").contains(&epoch), "{status:?}");
            }
        };
    }
    rejected!(stranger, stranger_weights, "no token");
    rejected!(impostor, impostor_weights, "another cluster.secret");

    // Tokens of a router: for another process, expired, malformed, and sent twice.
    let signed = |token: &[u8]| NodeClient::with_interceptor(channel.clone(), with_token(token));
    let mut misled = NodeClient::with_interceptor(channel.clone(), signer().to(Epoch(9)));
    let message = refused(misled.decode(decode.clone()).await, Code::FailedPrecondition);
    assert!(message.contains("node_epoch") && message.contains(&own.to_string()), "{message}");
    let late = signer().to(own).token(SystemTime::now() - Duration::from_secs(3600), DECODE);
    let message = refused(signed(&late).decode(decode.clone()).await, Code::Unauthenticated);
    assert!(message.contains("expired token"), "{message}");
    let message = refused(signed(b"abc").decode(decode.clone()).await, Code::Unauthenticated);
    assert!(message.contains("3 bytes"), "{message}");
    let once = signer().to(own).token(SystemTime::now(), DECODE);
    let mut client = signed(&once);
    refused(client.decode(v1::DecodeRequest::default()).await, Code::InvalidArgument);
    let message = refused(client.decode(decode.clone()).await, Code::Unauthenticated);
    assert!(message.contains("replayed"), "{message}");

    // A token does not cover the message, so the node checks the peer too.
    let mut member = NodeClient::with_interceptor(channel.clone(), signer().to(own));
    for message in [
        refused(member.decode(decode.clone()).await, Code::InvalidArgument),
        refused(member.meet(meet.clone()).await, Code::InvalidArgument),
    ] {
        assert!(message.contains(".tag: a tag of another peer"), "{message}");
    }

    let metrics = node.telemetry.metrics().render_prometheus();
    for (reason, count) in [
        ("missing", calls),
        ("secret", calls),
        ("other_node", 1),
        ("expired", 1),
        ("malformed", 1),
        ("replayed", 1),
    ] {
        let line = metrics.lines().find(|line| {
            line.starts_with("baton_node_calls_rejected_total")
                && line.contains(&format!("reason=\"{reason}\""))
        });
        let line = line.unwrap_or_else(|| panic!("no {reason} in {metrics}"));
        assert_eq!(line.rsplit(' ').next(), Some(count.to_string().as_str()), "{line}");
    }
    // Nothing reached a handler, and the node still serves.
    let served = side.local_prefill(&common::attempt(&dummy_prompt(20, 1), 5)).await;
    assert_eq!(served.ids.len(), 5);
    let contacted = tokio::time::timeout(Duration::ZERO, listener.accept()).await;
    assert!(contacted.is_err(), "the node connected to the stranger's endpoint");
    node.stop().await;
}
