//! `Inference/Generate`, health and reflection over gRPC.

mod common;

use std::time::{Duration, Instant};

use bytes::Bytes;
use common::{
    Cluster,
    client::{DEADLINE, eventually},
    encode, grpc_channel as channel, long_prompt, median_within_a_second, model_text,
    node::{Behaviour, END, MODEL},
    settings,
};
use futures_util::{StreamExt, stream};
use http_body_util::StreamBody;
use hyper::body::Frame;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use proto::v1::{
    ChatMessage, ChatRequest, Conversation, FinishReason, Finished, GenerateOptions,
    GenerateRequest, GenerateResponse, NodeLoad, PauseState, TokenIds, generate_request::Prompt,
    generate_response::Event, inference_client::InferenceClient,
};
use router::ModelSource;
use tonic::{Code, Status, Streaming};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

const ANSWER: &str = " Paris is the capital of France.";

fn request(options: GenerateOptions) -> GenerateRequest {
    GenerateRequest {
        model: String::new(),
        prompt: Some(Prompt::TokenIds(TokenIds { ids: long_prompt() })),
        options: Some(options),
        client_request_id: "label".into(),
    }
}

fn options() -> GenerateOptions {
    GenerateOptions { max_tokens: Some(50), ..Default::default() }
}

async fn generate(
    cluster: &Cluster,
    request: GenerateRequest,
) -> Result<Streaming<GenerateResponse>, Status> {
    let mut client = InferenceClient::new(channel(cluster).await);
    Ok(client.generate(request).await?.into_inner())
}

/// Returns the number of messages before the error that ends the stream.
async fn cut_short(mut stream: Streaming<GenerateResponse>) -> (usize, Status) {
    let mut shown = 0;
    loop {
        match stream.message().await {
            Ok(Some(_)) => shown += 1,
            Ok(None) => panic!("it must not look complete"),
            Err(status) => return (shown, status),
        }
    }
}

/// Collects a stream: token ids, text and the final message.
async fn collect(
    mut stream: Streaming<GenerateResponse>,
) -> Result<(Vec<u32>, String, Finished), Status> {
    let (mut ids, mut text, mut finished) = (Vec::new(), String::new(), None);
    while let Some(message) = stream.message().await? {
        match message.event.unwrap() {
            Event::Tokens(tokens) => {
                assert_eq!(tokens.first_index as usize, ids.len(), "each index once, in order");
                ids.extend(tokens.tokens.iter().map(|token| token.id));
                text.push_str(&tokens.text);
            }
            Event::Finished(end) => {
                assert!(finished.is_none());
                text.push_str(&end.text);
                finished = Some(end);
            }
        }
    }
    Ok((ids, text, finished.expect("a good stream ends with `finished`")))
}

fn expected() -> Vec<u32> {
    let mut ids = encode(ANSWER);
    ids.push(END);
    ids
}

#[tokio::test]
async fn tokens_and_text_are_streamed_and_end_with_finished() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let (ids, text, finished) =
        collect(generate(&cluster, request(options())).await.unwrap()).await.unwrap();
    assert_eq!((ids, text.as_str()), (expected(), ANSWER));
    assert_eq!(finished.reason(), FinishReason::Stop);
    assert_eq!(
        (finished.prompt_tokens, finished.completion_tokens, finished.cached_tokens),
        (100, expected().len() as u32, 16)
    );
    // The router tokenizes a text prompt.
    let text_prompt = GenerateRequest {
        prompt: Some(Prompt::Text("Once upon a time".into())),
        options: None,
        ..request(options())
    };
    let (ids, ..) = collect(generate(&cluster, text_prompt).await.unwrap()).await.unwrap();
    assert_eq!(ids, expected());
    let attempt = &cluster.decode[0].calls()[1].attempt;
    assert_eq!(attempt.tokens, encode("Once upon a time"));
    assert_eq!(attempt.sampling.as_ref().unwrap().max_tokens, 16);
}

#[tokio::test]
async fn tokens_only_has_no_text_but_still_stops_at_strings() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let only = GenerateOptions { tokens_only: true, ..options() };
    let (ids, text, _) =
        collect(generate(&cluster, request(only.clone())).await.unwrap()).await.unwrap();
    assert_eq!((ids, text.as_str()), (expected(), ""));
    let stop = GenerateOptions { stop: vec!["capital".into()], ..only };
    let (ids, text, finished) =
        collect(generate(&cluster, request(stop)).await.unwrap()).await.unwrap();
    assert_eq!((ids, text.as_str()), (encode(" Paris is the capital"), ""));
    assert_eq!(finished.reason(), FinishReason::Stop);
}

#[tokio::test]
async fn a_conversation_is_rendered_by_the_models_template() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let mut client = InferenceClient::new(channel(&cluster).await);
    let message = |role: &str, content: &str| ChatMessage {
        role: role.into(),
        content: content.into(),
        ..Default::default()
    };
    let request = |conversation| ChatRequest {
        conversation: Some(conversation),
        options: Some(GenerateOptions { cache_salt: "mine".into(), ..Default::default() }),
        ..Default::default()
    };
    let question = Conversation {
        messages: vec![message("user", "Capital of France?")],
        ..Default::default()
    };
    let stream = client.chat(request(question.clone())).await.unwrap().into_inner();
    let (ids, text, finished) = collect(stream).await.unwrap();
    assert_eq!((ids, text.as_str()), (expected(), ANSWER));
    let attempt = &cluster.decode[0].calls()[0].attempt;
    assert_eq!(attempt.cache_salt, "/mine");
    // The default is the rest of the context, as over HTTP.
    let rest = 2048 - finished.prompt_tokens;
    assert_eq!(attempt.sampling.as_ref().unwrap().max_tokens, rest);
    let prompt = model_text().tokenizer().decode(&attempt.tokens, false);
    assert!(prompt.contains("<|im_start|>user\nCapital of France?<|im_end|>"), "{prompt}");
    assert!(prompt.ends_with("<|im_start|>assistant\n"), "{prompt}");

    let continued = Conversation {
        messages: vec![message("user", "Capital?"), message("assistant", "It is")],
        continue_final_message: true,
        ..Default::default()
    };
    collect(client.chat(request(continued.clone())).await.unwrap().into_inner()).await.unwrap();
    let prompt = cluster.decode[0].calls()[1].attempt.tokens.clone();
    assert!(model_text().tokenizer().decode(&prompt, false).ends_with("assistant\nIt is"));

    for (conversation, field) in [
        (Conversation::default(), "conversation.messages"),
        (
            Conversation { add_generation_prompt: Some(true), ..continued },
            "conversation.continue_final_message",
        ),
        (
            Conversation { template_kwargs_json: "[1]".into(), ..question.clone() },
            "conversation.template_kwargs_json",
        ),
        (
            Conversation { template_kwargs_json: r#"{"tools": 1}"#.into(), ..question },
            "conversation.template_kwargs_json.tools",
        ),
    ] {
        let status = client.chat(request(conversation)).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains(field), "{status}");
    }
}

#[tokio::test]
async fn log_probabilities_come_with_their_tokens() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let options = GenerateOptions { logprobs: Some(2), ..options() };
    let mut stream = generate(&cluster, request(options)).await.unwrap();
    let Event::Tokens(first) = stream.message().await.unwrap().unwrap().event.unwrap() else {
        panic!("tokens come first");
    };
    let logprobs = first.tokens[0].logprobs.as_ref().unwrap();
    assert_eq!((logprobs.chosen, logprobs.top.len()), (-0.25, 2));
}

#[tokio::test]
async fn invalid_requests_have_a_status_that_names_the_field() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let with = |change: fn(&mut GenerateOptions)| {
        let mut options = options();
        change(&mut options);
        request(options)
    };
    let long = TokenIds { ids: vec![1; 5000] };
    for (request, code, word) in [
        (with(|o| o.temperature = Some(-1.0)), Code::InvalidArgument, "options.temperature"),
        (with(|o| o.temperature = Some(f32::INFINITY)), Code::InvalidArgument, "inf"),
        (with(|o| o.max_tokens = Some(0)), Code::InvalidArgument, "options.max_tokens"),
        (with(|o| o.max_tokens = Some(u32::MAX)), Code::InvalidArgument, "options.max_tokens"),
        (with(|o| o.max_tokens = Some(5000)), Code::InvalidArgument, "2048"),
        (with(|o| o.logprobs = Some(99)), Code::InvalidArgument, "options.logprobs"),
        (with(|o| o.timeout_ms = Some(0)), Code::InvalidArgument, "options.timeout_ms"),
        (with(|o| o.stop = vec![String::new()]), Code::InvalidArgument, "stop"),
        (GenerateRequest { prompt: None, ..request(options()) }, Code::InvalidArgument, "prompt"),
        (
            GenerateRequest { prompt: Some(Prompt::TokenIds(long)), ..request(options()) },
            Code::InvalidArgument,
            "5000 tokens",
        ),
        (
            GenerateRequest { prompt: Some(Prompt::Text(String::new())), ..request(options()) },
            Code::InvalidArgument,
            "empty",
        ),
        (
            GenerateRequest { model: "nobody".into(), ..request(options()) },
            Code::NotFound,
            "nobody",
        ),
    ] {
        let status = generate(&cluster, request).await.unwrap_err();
        assert_eq!(status.code(), code, "{status}");
        assert!(status.message().contains(word), "{status} lacks {word:?}");
    }
    assert!(cluster.decode[0].calls().is_empty());
}

#[tokio::test]
async fn client_deadline_is_applied() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::HangAfter(0));
    cluster.prefill[0].behave(Behaviour::HangAfter(1));
    let short = GenerateOptions { timeout_ms: Some(200), ..options() };
    let stream = generate(&cluster, request(short)).await.unwrap();
    let status = collect(stream).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    // Both the server and the client may report the deadline first; each uses gRPC's own status.
    let mut client = InferenceClient::new(channel(&cluster).await);
    let mut request = tonic::Request::new(request(options()));
    request.set_timeout(Duration::from_millis(200));
    let ended = match client.generate(request).await {
        Ok(stream) => collect(stream.into_inner()).await.unwrap_err(),
        Err(status) => status,
    };
    assert!([Code::DeadlineExceeded, Code::Cancelled].contains(&ended.code()), "{ended}");
    assert!(cluster.decode[0].calls().iter().all(|call| call.attempt.remaining_ms <= 200));
}

#[tokio::test]
async fn excessive_timeout_is_rejected_as_a_field_and_capped_as_a_deadline() {
    let mut settings = settings();
    settings.router.timeout_max = Duration::from_secs(1);
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    let long = GenerateOptions { timeout_ms: Some(1001), ..options() };
    let status = generate(&cluster, request(long)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    for words in ["options.timeout_ms is 1001", "1 to 1000"] {
        assert!(status.message().contains(words), "{status} lacks {words:?}");
    }
    let mut client = InferenceClient::new(channel(&cluster).await);
    let mut request = tonic::Request::new(request(options()));
    request.set_timeout(Duration::from_secs(3600));
    collect(client.generate(request).await.unwrap().into_inner()).await.unwrap();
    let remaining_ms = cluster.decode[0].calls()[0].attempt.remaining_ms;
    assert!((1..=1000).contains(&remaining_ms), "{remaining_ms}");
}

#[tokio::test]
async fn overload_is_resource_exhausted_with_retry_after() {
    let mut settings = settings();
    settings.router.requests_max = 1;
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::HangAfter(1));
    let mut first = generate(&cluster, request(options())).await.unwrap();
    first.message().await.unwrap();
    let status = generate(&cluster, request(options())).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(status.metadata().get("retry-after").unwrap(), "1");
}

#[tokio::test]
async fn a_client_that_leaves_cancels_both_nodes_within_a_second() {
    for tokens_before in [0, 1] {
        let cluster = Cluster::start(1, 1, ANSWER).await;
        cluster.prefill[0].behave(Behaviour::HangAfter(tokens_before));
        cluster.decode[0].behave(Behaviour::HangAfter(0));
        let mut tries = 0;
        median_within_a_second("nodes' streams dropped", async || {
            let call = tries;
            tries += 1;
            let mut stream = generate(&cluster, request(options())).await.unwrap();
            if tokens_before > 0 {
                stream.message().await.unwrap();
            }
            eventually("both nodes are asked", async || {
                let nodes = [&cluster.prefill[0], &cluster.decode[0]];
                nodes.iter().all(|node| node.calls().len() == tries)
            })
            .await;
            let left = Instant::now();
            drop(stream);
            cluster.dropped_after(call, left).await
        })
        .await;
        eventually("the request is counted as cancelled", async || {
            cluster.finished("client_gone").await == tries as f64
        })
        .await;
    }
}

/// Requests that fail before the handler are counted once, by cause.
#[tokio::test]
async fn rejected_messages_are_counted() {
    let mut settings = settings();
    settings.router.body_bytes_max = config::ByteSize::kib(20);
    settings.bodies_bytes_max = 18 << 10;
    // The limit also applies to messages that arrive complete.
    settings.request_read_max = Duration::from_secs(3);
    let cluster = Cluster::start_with(settings, 0, 1, ANSWER).await;
    let padded =
        |bytes| GenerateRequest { client_request_id: "x".repeat(bytes), ..request(options()) };
    let refused = async |bytes| generate(&cluster, padded(bytes)).await.map(|_| ()).unwrap_err();
    let counts = async || {
        let mut counts = Vec::new();
        for end in ["stop", "invalid", "overloaded", "client_gone"] {
            counts.push(cluster.finished(end).await);
        }
        counts
    };
    assert_eq!(counts().await, [0.0; 4]);

    // The first frame of this size fits into the limit.
    let status = refused(30 << 10).await;
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    assert_eq!(counts().await, [0.0, 1.0, 0.0, 0.0], "too large");

    let status = refused(19 << 10).await;
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert_eq!(counts().await, [0.0, 1.0, 1.0, 0.0], "no room");

    // An invalid message, and an announced message that never arrives.
    let broken = Bytes::from_static(&[0, 0, 0, 0, 5, 255, 255, 255, 255, 255]);
    for (body, code) in [
        (broken, Code::Internal),
        (Bytes::from_static(&[0, 0, 0, 0, 100, 7]), Code::DeadlineExceeded),
    ] {
        let before = counts().await[1];
        let client = http_2();
        let answer = client.request(unfinished(&cluster, body));
        let answer = tokio::time::timeout(DEADLINE, answer).await.unwrap().unwrap();
        let status = Status::from_header_map(answer.headers()).unwrap();
        assert_eq!(status.code(), code, "{status}");
        assert_eq!(counts().await, [0.0, before + 1.0, 1.0, 0.0], "{status}");
    }

    collect(generate(&cluster, request(options())).await.unwrap()).await.unwrap();
    eventually("the completed request is counted", async || counts().await == [1.0, 3.0, 1.0, 0.0])
        .await;
    let running = async || cluster.metric("baton_requests", &["state=\"running\""]).await;
    eventually("no request is running", async || running().await == 0.0).await;
    assert_eq!(cluster.decode[0].calls().len(), 1);
}

#[tokio::test]
async fn client_disconnected_during_its_message_is_counted() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let client = http_2();
    let stuck =
        tokio::spawn(client.request(unfinished(&cluster, Bytes::from_static(&[0, 0, 0, 0, 100]))));
    let running = async || cluster.metric("baton_requests", &["state=\"running\""]).await;
    eventually("the request is running", async || running().await == 1.0).await;
    stuck.abort();
    eventually("the request is counted", async || cluster.finished("client_gone").await == 1.0)
        .await;
    eventually("the request is finished", async || running().await == 0.0).await;
}

/// A client that does not read one stream of a connection does not delay the connection's other
/// stream.
#[tokio::test]
async fn unread_stream_disturbs_no_other_stream_of_its_connection() {
    let mut settings = settings();
    settings.router.slow_client_timeout = Duration::from_secs(1);
    settings.router.slow_client_events = 4;
    let cluster = Cluster::start_with(settings, 0, 2, &ANSWER.repeat(40)).await;
    for node in &cluster.decode {
        node.set_token_time(Duration::from_millis(5));
    }
    let channel = tonic::transport::Channel::from_shared(format!("http://{}", cluster.router.grpc))
        .unwrap()
        .initial_stream_window_size(1024)
        .connect()
        .await
        .unwrap();
    let client = InferenceClient::new(channel);
    let long = GenerateOptions { max_tokens: Some(1900), ..options() };
    let ask = async || {
        let stream = client.clone().generate(request(long.clone())).await;
        stream.unwrap().into_inner()
    };
    let (unread, read) = (ask().await, ask().await);
    let given_up = async {
        eventually("the slow client is counted", async || {
            cluster.finished("slow_client").await == 1.0
        })
        .await;
    };
    let (read, ()) = tokio::join!(collect(read), given_up);
    let (ids, text, finished) = read.expect("the other stream is undisturbed");
    assert_eq!(text, ANSWER.repeat(40));
    assert_eq!(ids.len(), finished.completion_tokens as usize);
    let (shown, status) = cut_short(unread).await;
    assert_eq!(status.code(), Code::Aborted, "{status}");
    assert!(status.message().contains("1000 ms"), "{status}");
    assert!(shown < ids.len(), "{shown} messages were kept for a client that read none");
    assert_eq!(cluster.finished("slow_client").await, 1.0);
}

#[tokio::test]
async fn slow_client_fails_without_disturbing_others() {
    let mut settings = settings();
    settings.router.slow_client_timeout = Duration::from_millis(200);
    settings.router.slow_client_events = 4;
    let cluster = Cluster::start_with(settings, 0, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::Flood);
    let everything =
        GenerateOptions { max_tokens: Some(1900), ignore_eos: Some(true), ..options() };
    let channel = tonic::transport::Channel::from_shared(format!("http://{}", cluster.router.grpc))
        .unwrap()
        .initial_stream_window_size(1024)
        .connect()
        .await
        .unwrap();
    let mut client = InferenceClient::new(channel);
    let stream = client.generate(request(everything)).await.unwrap().into_inner();
    eventually("the slow client is counted", async || {
        cluster.metric("baton_requests_finished_total", &["slow_client"]).await == 1.0
    })
    .await;
    let (_, status) = cut_short(stream).await;
    assert_eq!(status.code(), Code::Aborted, "{status}");
}

/// An unread response that fits into the queue does not block its request, but the request stays in
/// flight.
#[tokio::test]
async fn unread_answer_is_in_flight_until_its_client_counts_as_slow() {
    let mut settings = settings();
    settings.router.slow_client_timeout = Duration::from_secs(2);
    // Space for the whole response, which with log-probabilities exceeds the HTTP/2 window of a
    // client that does not read.
    settings.router.slow_client_events = 4096;
    let cluster = Cluster::start_with(settings, 0, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::Flood);
    let all = GenerateOptions {
        max_tokens: Some(1900),
        ignore_eos: Some(true),
        logprobs: Some(20),
        ..options()
    };
    let channel = tonic::transport::Channel::from_shared(format!("http://{}", cluster.router.grpc))
        .unwrap()
        .initial_stream_window_size(1024)
        .connect()
        .await
        .unwrap();
    let mut client = InferenceClient::new(channel.clone());
    let stream = client.generate(request(all.clone())).await.unwrap().into_inner();
    let node = &cluster.decode[0];
    let is_free = |call: &common::node::Call| call.left.lock().unwrap().is_some();
    eventually("the node's stream is closed", async || node.calls().first().is_some_and(is_free))
        .await;
    let running = async || cluster.metric("baton_requests", &["state=\"running\""]).await;
    eventually("the unread request is running", async || running().await == 1.0).await;
    eventually("the slow client is counted", async || {
        cluster.metric("baton_requests_finished_total", &["slow_client"]).await == 1.0
    })
    .await;
    eventually("the request is not running", async || running().await == 0.0).await;
    let (shown, status) = cut_short(stream).await;
    assert_eq!(status.code(), Code::Aborted, "{status}");
    assert!(shown < 1900, "{shown} messages were kept for a client that read none");
    // A client that reads gets everything over the same connection.
    let mut stream =
        InferenceClient::new(channel).generate(request(all)).await.unwrap().into_inner();
    let mut finished = false;
    while let Some(message) = stream.message().await.unwrap() {
        finished |= format!("{message:?}").contains("Finished");
    }
    assert!(finished);
}

#[tokio::test]
async fn health_follows_the_nodes_and_the_drain() {
    let mut cluster = Cluster::start(1, 1, ANSWER).await;
    let channel = channel(&cluster).await;
    let status = async |service: &str| {
        let mut client = HealthClient::new(channel.clone());
        let request = HealthCheckRequest { service: service.into() };
        client.check(request).await.map(|answer| answer.into_inner().status())
    };
    for service in ["", "baton.v1.Inference"] {
        eventually("serving", async || status(service).await.unwrap() == ServingStatus::Serving)
            .await;
    }
    assert_eq!(status("baton.v1.Nothing").await.unwrap_err().code(), Code::NotFound);
    cluster.decode[0].kill();
    eventually("not serving", async || status("").await.unwrap() == ServingStatus::NotServing)
        .await;
    let request = request(GenerateOptions { timeout_ms: Some(1000), ..options() });
    let stream = generate(&cluster, request).await.unwrap();
    let status = collect(stream).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.message().contains("no decode node was available"), "{status}");
}

/// The router serves requests before it reports ready.
#[tokio::test]
async fn readiness_waits_for_peer_connections_and_requests_do_not() {
    /// Longest time that readiness waits for peer connections.
    const MET_MAX: Duration = Duration::from_secs(2);
    // On a busy machine this time may be over before the first check.
    for _ in 0..10 {
        let (prefill, decode) = Cluster::nodes(1, 1, ANSWER);
        prefill[0].keep_connecting(true);
        let source = ModelSource { name: MODEL.to_owned(), text: model_text() };
        let start = Instant::now();
        let cluster = Cluster::begin(settings(), vec![source], prefill, decode);
        eventually("both nodes know their peers", async || {
            [&cluster.prefill[0], &cluster.decode[0]].iter().all(|node| !node.met().is_empty())
        })
        .await;
        let channel = channel(&cluster).await;
        let mut health = HealthClient::new(channel.clone());
        let mut by_grpc = async || {
            let request = HealthCheckRequest { service: String::new() };
            health.check(request).await.unwrap().into_inner().status()
        };
        let (answer, status) = (cluster.client.get("/health").await, by_grpc().await);
        assert_eq!(answer.json()["decode_nodes"], 1);
        let was_ready = answer.status == 200 || status == ServingStatus::Serving;
        assert!(!was_ready || start.elapsed() >= MET_MAX, "they have not met");
        collect(generate(&cluster, request(options())).await.unwrap()).await.unwrap();
        cluster.prefill[0].keep_connecting(false);
        eventually("ready", async || cluster.client.get("/health").await.status == 200).await;
        eventually("serving", async || by_grpc().await == ServingStatus::Serving).await;
        if !was_ready {
            assert_eq!(answer.json()["status"], "nodes connecting");
            return;
        }
    }
    panic!("it was ready too soon to be seen waiting");
}

#[tokio::test]
async fn missing_peer_connections_delay_readiness_only_briefly() {
    let (prefill, decode) = Cluster::nodes(1, 1, ANSWER);
    decode[0].keep_connecting(true);
    // Waits until the router is ready.
    let cluster = Cluster::start_over(settings(), prefill, decode).await;
    collect(generate(&cluster, request(options())).await.unwrap()).await.unwrap();
}

#[tokio::test]
async fn router_is_unhealthy_while_every_decode_node_is_paused() {
    let cluster = Cluster::start(1, 2, ANSWER).await;
    let channel = channel(&cluster).await;
    let admin = common::client::Client::new(format!("http://{}", cluster.router.admin));
    let is_healthy = async || {
        let answer = cluster.client.get("/health").await;
        let request = HealthCheckRequest { service: "baton.v1.Inference".into() };
        let checked = HealthClient::new(channel.clone()).check(request).await.unwrap();
        let serves = checked.into_inner().status() == ServingStatus::Serving;
        (answer.status.as_u16(), answer.json()["status"].as_str().unwrap().to_owned(), serves)
    };
    let pause = |index: usize, pause: PauseState| {
        cluster.decode[index].report(NodeLoad { pause: pause.into(), ..Default::default() });
    };
    let (ready, paused) =
        ((200, "ready".to_owned(), true), (503, "nodes paused".to_owned(), false));
    let are_paused = async |count: usize| {
        eventually(&format!("{count} nodes are paused"), async || {
            let weights = admin.get("/v1/weights").await.json();
            weights.to_string().matches("\"pause\"").count() == count
        })
        .await;
    };
    for state in [PauseState::Pausing, PauseState::Paused] {
        pause(0, state);
        are_paused(1).await;
        eventually("the other node serves", async || is_healthy().await == ready).await;
        pause(1, state);
        eventually("both are paused", async || is_healthy().await == paused).await;
        pause(0, PauseState::None);
        eventually("one node serves", async || is_healthy().await == ready).await;
        pause(1, PauseState::None);
        are_paused(0).await;
    }
}

#[tokio::test]
async fn health_reports_a_drain_at_once() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::HangAfter(1));
    let channel = channel(&cluster).await;
    let mut stream = generate(&cluster, request(options())).await.unwrap();
    stream.message().await.unwrap();
    let Cluster { router, prefill, decode, .. } = cluster;
    let cut = router.cut();
    let shutdown = tokio::spawn(router.shutdown());
    eventually("not serving", async || {
        let mut client = HealthClient::new(channel.clone());
        let request = HealthCheckRequest { service: "baton.v1.Inference".into() };
        client.check(request).await.unwrap().into_inner().status() == ServingStatus::NotServing
    })
    .await;
    // A running request continues until it finishes or is cancelled.
    assert!(!shutdown.is_finished());
    cut.cancel();
    let ended = collect(stream).await.unwrap_err();
    assert_eq!(ended.code(), Code::Unavailable, "{ended}");
    shutdown.await.unwrap().unwrap();
    drop((prefill, decode));
}

#[tokio::test]
async fn reflection_lists_the_services() {
    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let mut client = ServerReflectionClient::new(channel(&cluster).await);
    let ask = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut answers = client
        .server_reflection_info(futures_util::stream::iter([ask]))
        .await
        .unwrap()
        .into_inner();
    let answer = answers.message().await.unwrap().unwrap();
    let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else {
        panic!("no list");
    };
    let mut names: Vec<String> = list.service.into_iter().map(|service| service.name).collect();
    names.sort_unstable();
    let served =
        ["baton.v1.Inference", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"];
    assert_eq!(names, served);
}

#[tokio::test]
async fn a_request_that_is_never_complete_ends_in_time() {
    let mut settings = settings();
    settings.request_read_max = Duration::from_millis(200);
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    let client = http_2();
    // The message announces 100 bytes; one byte arrives.
    let request = unfinished(&cluster, Bytes::from_static(&[0, 0, 0, 0, 100, 7]));
    let answer = tokio::time::timeout(DEADLINE, client.request(request)).await.unwrap().unwrap();
    let status = Status::from_header_map(answer.headers()).unwrap();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    assert!(status.message().contains("200ms"), "{status}");
}

fn http_2<B: hyper::body::Body<Data: Send> + Send>() -> Client<HttpConnector, B> {
    Client::builder(TokioExecutor::new()).http2_only(true).build(HttpConnector::new())
}

/// Starts a call whose body never ends.
fn unfinished(
    cluster: &Cluster,
    beginning: Bytes,
) -> http::Request<
    impl hyper::body::Body<Data = Bytes, Error = std::io::Error> + Send + Unpin + use<>,
> {
    let beginning = stream::iter([Ok::<_, std::io::Error>(Frame::data(beginning))]);
    let body = beginning.chain(stream::pending());
    http::Request::post(format!("http://{}/baton.v1.Inference/Generate", cluster.router.grpc))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(StreamBody::new(Box::pin(body)))
        .unwrap()
}

#[tokio::test]
async fn incomplete_messages_use_bounded_memory() {
    let mut settings = settings();
    settings.bodies_bytes_max = 64 << 10;
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    let padded = GenerateRequest { client_request_id: "x".repeat(32 << 10), ..request(options()) };
    let ask = async || generate(&cluster, padded.clone()).await.map(|_| ());
    ask().await.unwrap();

    // Half of a message, without the rest.
    let mut half = vec![0; 50_000];
    half[..5].copy_from_slice(&[0, 0, 1, 0x86, 0xa0]);
    let client = http_2();
    let stuck = tokio::spawn(client.request(unfinished(&cluster, half.into())));
    eventually("memory for messages is full", async || ask().await.is_err()).await;
    let refused = ask().await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(refused.message().contains("65536 bytes"), "{refused}");
    assert_eq!(refused.metadata().get("retry-after").unwrap(), "1");
    // Requests within the limit are still served.
    generate(&cluster, request(options())).await.unwrap();

    stuck.abort();
    eventually("memory for bodies is free", async || ask().await.is_ok()).await;
}

#[tokio::test]
async fn a_tenant_named_by_metadata_has_salts_of_its_own() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let mut client = InferenceClient::new(channel(&cluster).await);
    let salted = || GenerateOptions { cache_salt: "mine".into(), ..options() };
    let generate = |tenant: &str| of_tenant(tenant, request(salted()));
    let chat = |tenant: &str| {
        let message =
            ChatMessage { role: "user".into(), content: "hello".into(), ..Default::default() };
        let conversation = Conversation { messages: vec![message], ..Default::default() };
        let (conversation, options) = (Some(conversation), Some(salted()));
        of_tenant(tenant, ChatRequest { conversation, options, ..Default::default() })
    };
    collect(client.generate(generate("team-7")).await.unwrap().into_inner()).await.unwrap();
    collect(client.chat(chat("team-7")).await.unwrap().into_inner()).await.unwrap();
    let salts: Vec<String> =
        cluster.decode[0].calls().into_iter().map(|call| call.attempt.cache_salt).collect();
    assert_eq!(salts, ["team-7/mine", "team-7/mine"]);

    for status in [
        client.generate(generate("a/b")).await.unwrap_err(),
        client.chat(chat("a/b")).await.unwrap_err(),
    ] {
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        for words in ["x-baton-tenant", "a/b"] {
            assert!(status.message().contains(words), "{status}");
        }
    }
    assert_eq!(cluster.decode[0].calls().len(), 2);
}

#[tokio::test]
async fn session_of_the_options_is_checked_and_reaches_nodes() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let session = |session: &str, keep_ms| {
        let session = session.to_owned();
        request(GenerateOptions { session, keep_ms: Some(keep_ms), ..options() })
    };
    for (options, words) in [
        (
            session(&"s".repeat(1 << 20), 0),
            "options.session has 1048576 bytes; allowed: at most 256",
        ),
        (
            session("s", 600_001),
            "options.keep_ms is 600001; allowed: a whole number from 0 to 600000",
        ),
    ] {
        let status = generate(&cluster, options).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert!(status.message().contains(words), "{status}");
    }
    collect(generate(&cluster, session("s", 5)).await.unwrap()).await.unwrap();
    let calls = cluster.decode[0].calls().into_iter();
    let sessions: Vec<_> = calls.map(|it| (it.attempt.session, it.attempt.keep_ms)).collect();
    assert_eq!(sessions, [("s".to_owned(), Some(5))]);
}

fn of_tenant<M>(tenant: &str, message: M) -> tonic::Request<M> {
    let mut request = tonic::Request::new(message);
    request.metadata_mut().insert("x-baton-tenant", tenant.parse().unwrap());
    request
}
