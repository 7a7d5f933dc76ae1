//! Node failures: the client receives each token once, or one typed error.

mod common;

use std::time::{Duration, Instant};

use common::{
    Cluster,
    client::{eventually, ids_of, text_of},
    completion_of, encode, long_prompt,
    node::{Behaviour, END, ScriptedNode},
    settings,
};
use proto::v1::{
    DecodeTokens, FailureKind, NodeLoad, PrefillToken, Reserved, Role, Token, decode_event,
    prefill_event,
};
use serde_json::{Value, json};
use tonic::Code;

/// Time limit of the detection: the lease of 2 s plus a margin for a shared machine, but less than
/// the request's time-out.
const DETECTED_WITHIN: Duration = Duration::from_secs(10);
const ANSWER: &str = " one two three four five six seven eight nine ten";

fn streamed() -> Value {
    json!({"prompt": long_prompt(), "max_tokens": 100, "stream": true, "return_token_ids": true})
}

fn expected() -> Vec<u32> {
    let mut ids = encode(ANSWER);
    ids.push(END);
    ids
}

/// Asserts that the whole answer arrives with each token once. Returns the statistics.
async fn complete(cluster: &Cluster) -> Value {
    let headers = [("x-baton-stats", "1")];
    let chunks =
        cluster.client.stream_with("/v1/completions", &headers, &streamed()).await.chunks().await;
    assert_eq!(ids_of(&chunks, 0), expected());
    assert_eq!(text_of(&chunks, 0), ANSWER);
    chunks.last().unwrap()["baton"].clone()
}

#[tokio::test]
async fn a_prefill_node_that_fails_is_replaced_by_another() {
    for behaviour in [
        Behaviour::Refuse(Code::ResourceExhausted, "queue full"),
        Behaviour::Refuse(Code::Unavailable, "draining"),
        Behaviour::Refuse(Code::FailedPrecondition, "another epoch"),
        Behaviour::Refuse(Code::AlreadyExists, "known"),
        Behaviour::Refuse(Code::Internal, "a bug"),
        Behaviour::FailAfter(0, FailureKind::Busy),
        Behaviour::FailAfter(0, FailureKind::Draining),
        Behaviour::FailAfter(1, FailureKind::TransferFailed),
        Behaviour::FailAfter(1, FailureKind::Mismatch),
        Behaviour::FailAfter(0, FailureKind::Internal),
        Behaviour::CutAfter(0),
        Behaviour::CutAfter(1),
    ] {
        let (prefill, decode) = Cluster::nodes(2, 1, ANSWER);
        prefill[0].behave(behaviour.clone());
        decode[0].behave(Behaviour::NoKvFrom("prefill-0"));
        // The router selects the other node only if it must.
        let load = NodeLoad { waiting: 1000, pending_prompt_tokens: 5000, ..Default::default() };
        prefill[1].report(load);
        let cluster = Cluster::start_over(settings(), prefill, decode).await;
        let stats = complete(&cluster).await;
        // A busy rejection is not an attempt, and a repeated id does not count against its node.
        match &behaviour {
            Behaviour::Refuse(Code::AlreadyExists, _) => assert_eq!(stats["attempts"], 4),
            Behaviour::Refuse(Code::ResourceExhausted, _)
            | Behaviour::FailAfter(_, FailureKind::Busy) => assert_eq!(stats["attempts"], 1),
            _ => assert_eq!(stats["attempts"], 2, "{behaviour:?}"),
        }
        match &behaviour {
            Behaviour::Refuse(Code::AlreadyExists, _) => {}
            _ => assert_eq!(stats["prefill_node"], "prefill-1", "{behaviour:?}"),
        }
        let (prefill_calls, decode_calls) = (cluster.prefill[0].calls(), cluster.decode[0].calls());
        let first = &prefill_calls[0].attempt;
        // Calls may reach the node in another order.
        let second = decode_calls
            .iter()
            .map(|call| &call.attempt)
            .find(|attempt| attempt.transfer_id != first.transfer_id)
            .expect("every attempt has a transfer id of its own");
        assert_eq!(first.request_id, second.request_id);
        assert_eq!(first.prompt_len, second.prompt_len);
    }
}

#[tokio::test]
async fn a_decode_node_that_fails_is_replaced_over_prompt_and_emitted_tokens() {
    for (behaviour, shown) in [
        (Behaviour::Refuse(Code::ResourceExhausted, "queue full"), 0),
        (Behaviour::Refuse(Code::Unavailable, "draining"), 0),
        (Behaviour::Refuse(Code::FailedPrecondition, "another epoch"), 0),
        (Behaviour::FailAfter(0, FailureKind::TransferFailed), 0),
        (Behaviour::FailAfter(3, FailureKind::Internal), 3),
        (Behaviour::FailAfter(1, FailureKind::Draining), 1),
        (Behaviour::FailAfter(5, FailureKind::Busy), 5),
        (Behaviour::CutAfter(4), 4),
    ] {
        let cluster = Cluster::start(1, 2, ANSWER).await;
        // The first selected node fails and the other serves.
        let first_calls = || cluster.decode.iter().map(|node| node.calls()).collect::<Vec<_>>();
        for node in &cluster.decode {
            node.behave_in_turn(vec![behaviour.clone(), Behaviour::Serve]);
        }
        let body = streamed();
        let stream = cluster.client.stream("/v1/completions", &body);
        let (mut stream, ()) = tokio::join!(stream, async {
            eventually("the first call", async || {
                first_calls().iter().any(|calls| !calls.is_empty())
            })
            .await;
            for node in cluster.decode.iter().filter(|node| node.calls().is_empty()) {
                node.behave(Behaviour::Serve);
            }
        });
        let chunks = stream.chunks().await;
        assert_eq!(ids_of(&chunks, 0), expected(), "{behaviour:?}");
        let mut attempts: Vec<_> =
            first_calls().into_iter().flatten().map(|call| call.attempt).collect();
        attempts.sort_by_key(|attempt| attempt.tokens.len());
        let last = attempts.last().unwrap();
        assert!(attempts.len() >= 2, "{behaviour:?}");
        assert_eq!(last.prompt_len, 100);
        // The prompt contains at least the node's own tokens. Token 0 may come from the prefill
        // node.
        assert!(last.tokens.len() >= 100 + shown, "{behaviour:?}: {}", last.tokens.len());
        assert_eq!(last.tokens[100..], expected()[..last.tokens.len() - 100]);
    }
}

#[tokio::test]
async fn nodes_receive_their_peers_before_any_request() {
    let cluster = Cluster::start(1, 2, ANSWER).await;
    let met = |node: &ScriptedNode| node.met().into_iter().collect::<Vec<_>>();
    eventually("each node knows the nodes of the other role", async || {
        met(&cluster.prefill[0]) == ["decode-0", "decode-1"]
            && cluster.decode.iter().all(|node| met(node) == ["prefill-0"])
    })
    .await;
    assert!(cluster.prefill[0].calls().is_empty());
}

#[tokio::test]
async fn killed_decode_node_loses_no_token_and_little_time() {
    let mut cluster = Cluster::start(1, 2, ANSWER).await;
    for node in &cluster.decode {
        node.set_token_time(Duration::from_millis(30));
    }
    let mut stream = cluster.client.stream("/v1/completions", &streamed()).await;
    let mut ids = Vec::new();
    let mut killed = None;
    while let Some(event) = stream.next().await {
        if event == "[DONE]" {
            break;
        }
        let chunk: Value = serde_json::from_str(&event).unwrap();
        assert!(chunk["error"].is_null(), "{chunk}");
        ids.extend(ids_of(&[chunk], 0));
        if ids.len() == 3 {
            let busy = cluster.decode.iter().position(|node| !node.calls().is_empty()).unwrap();
            cluster.decode[busy].kill();
            killed = Some(Instant::now());
        }
    }
    assert_eq!(ids, expected());
    assert!(killed.unwrap().elapsed() < DETECTED_WITHIN);
    cluster.wait_nodes(1, 1).await;
}

#[tokio::test]
async fn killed_prefill_node_is_detected_at_once() {
    let mut cluster = Cluster::start(1, 1, ANSWER).await;
    cluster.prefill[0].behave(Behaviour::HangAfter(1));
    cluster.decode[0].behave_in_turn(vec![Behaviour::HangAfter(0), Behaviour::Serve]);
    let mut stream = cluster.client.stream("/v1/completions", &streamed()).await;
    // The client has token 0, and the KV never arrives.
    let first: Value = serde_json::from_str(&stream.next().await.unwrap()).unwrap();
    assert_eq!(ids_of(std::slice::from_ref(&first), 0), expected()[..1]);
    cluster.prefill[0].kill();
    let killed = Instant::now();
    let chunks = stream.chunks().await;
    assert_eq!([ids_of(&[first], 0), ids_of(&chunks, 0)].concat(), expected());
    assert!(killed.elapsed() < DETECTED_WITHIN, "{:?}", killed.elapsed());
    // The decode node prefilled the prompt and token 0 itself.
    let calls = cluster.decode[0].calls();
    assert_eq!((calls.len(), calls[1].with_peer, calls[1].attempt.tokens.len()), (2, false, 101));
    assert_eq!(cluster.metric("baton_attempts_total", &["prefill_lost"]).await, 1.0);
}

#[tokio::test]
async fn stopped_decode_node_is_lost_within_the_lease_and_half_a_second() {
    let cluster = Cluster::start(1, 2, ANSWER).await;
    for node in &cluster.decode {
        node.behave_in_turn(vec![Behaviour::HangAfter(2), Behaviour::Serve]);
    }
    let mut stream = cluster.client.stream("/v1/completions", &streamed()).await;
    let mut ids = Vec::new();
    while ids.len() < 2 {
        let chunk: Value = serde_json::from_str(&stream.next().await.unwrap()).unwrap();
        ids.extend(ids_of(&[chunk], 0));
    }
    let (frozen, other): (Vec<_>, Vec<_>) =
        cluster.decode.iter().partition(|node| !node.calls().is_empty());
    other[0].behave(Behaviour::Serve);
    frozen[0].freeze(Duration::from_secs(8));
    let since = Instant::now();
    ids.extend(ids_of(&stream.chunks().await, 0));
    assert_eq!(ids, expected());
    let took = since.elapsed();
    assert!(took > Duration::from_secs(1) && took < DETECTED_WITHIN, "{took:?}");
    // The router sends no request to the silent node.
    complete(&cluster).await;
    assert_eq!(frozen[0].calls().len(), 1);
}

/// Starts a cluster with a short limit for silent nodes.
async fn short_silence_limit(prefill: usize, decode: usize) -> Cluster {
    let mut settings = settings();
    settings.router.idle_timeout = IDLE;
    Cluster::start_with(settings, prefill, decode, ANSWER).await
}

/// Limit for silent nodes: far more than a pause of a busy machine between two reports.
const IDLE: Duration = Duration::from_secs(2);

#[tokio::test]
async fn silent_node_with_an_open_connection_counts_as_lost() {
    for silent_after in [0, 3] {
        let cluster = short_silence_limit(1, 2).await;
        let calls = || cluster.decode.iter().map(|node| node.calls().len()).collect::<Vec<_>>();
        // Applies to both nodes, because either may be selected.
        for node in &cluster.decode {
            node.behave_in_turn(vec![Behaviour::HangAfter(silent_after), Behaviour::Serve]);
        }
        let mut stream = cluster.client.stream("/v1/completions", &streamed()).await;
        eventually("an attempt", async || calls().iter().sum::<usize>() == 1).await;
        let silent = calls().iter().position(|count| *count == 1).unwrap();
        cluster.decode[1 - silent].behave(Behaviour::Serve);
        assert_eq!(ids_of(&stream.chunks().await, 0), expected());
        assert_eq!(calls(), [1, 1], "after {silent_after}");
        assert_eq!(cluster.metric("baton_attempts_total", &["decode_lost"]).await, 1.0);
    }
}

#[tokio::test]
async fn a_silent_prefill_node_counts_as_lost() {
    let cluster = short_silence_limit(1, 1).await;
    cluster.prefill[0].behave(Behaviour::HangAfter(0));
    cluster.decode[0].behave(Behaviour::NoKvFrom("prefill-0"));
    let stats = complete(&cluster).await;
    assert_eq!((&stats["attempts"], &stats["prefill_node"]), (&json!(2), &json!(null)));
    assert_eq!(cluster.metric("baton_attempts_total", &["prefill_lost"]).await, 1.0);
}

#[tokio::test]
async fn long_prefill_is_no_failure_while_its_node_reports_progress() {
    let cluster = short_silence_limit(1, 1).await;
    cluster.prefill[0].behave(Behaviour::HangAfter(0));
    cluster.decode[0].behave(Behaviour::NoKvFrom("prefill-0"));
    let request = async { complete(&cluster).await };
    let reports = async {
        let since = Instant::now();
        eventually("the prompt is being prefilled", async || {
            !cluster.prefill[0].calls().is_empty()
        })
        .await;
        let mut left = 1_000_000;
        while since.elapsed() < 4 * IDLE {
            // Progress of the other node does not count.
            cluster.decode[0].report(NodeLoad { running: left as u32, ..Default::default() });
            let waiting = left as u32;
            let load = NodeLoad { waiting, pending_prompt_tokens: left, ..Default::default() };
            cluster.prefill[0].report(load);
            left -= 1;
            tokio::time::sleep(IDLE / 10).await;
        }
        // The first attempt is still running. The prefill node then stops reporting.
        assert_eq!(cluster.decode[0].calls().len(), 1);
        let mut free = 0;
        eventually("a second attempt", async || {
            free += 1;
            cluster.decode[0].report(NodeLoad { context_tokens: free, ..Default::default() });
            cluster.decode[0].calls().len() == 2
        })
        .await;
    };
    let (stats, ()) = tokio::join!(request, reports);
    assert_eq!((&stats["attempts"], &stats["prefill_node"]), (&json!(2), &json!(null)));
}

#[tokio::test]
async fn stream_without_a_decode_node_gets_one_error_event_at_its_deadline() {
    let mut settings = settings();
    settings.router.timeout = Duration::from_secs(4);
    let mut cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::HangAfter(2));
    let mut stream = cluster.client.stream("/v1/completions", &streamed()).await;
    stream.next().await.unwrap();
    cluster.decode[0].kill();
    let killed = Instant::now();
    let events = stream.all().await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "no_decode_node", "{last}");
    let message = last["error"]["message"].as_str().unwrap();
    assert!(message.contains("no decode node was available"), "{message}");
    assert_eq!(events.iter().filter(|event| event.contains("\"error\"")).count(), 1);
    assert!(killed.elapsed() < DETECTED_WITHIN, "{:?}", killed.elapsed());
}

#[tokio::test]
async fn decode_node_restarted_before_the_deadline_takes_the_request_over() {
    let mut cluster = Cluster::start(1, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::HangAfter(3));
    let mut stream = cluster.client.stream("/v1/completions", &streamed()).await;
    let mut ids = Vec::new();
    while ids.len() < 3 {
        let chunk: Value = serde_json::from_str(&stream.next().await.unwrap()).unwrap();
        ids.extend(ids_of(&[chunk], 0));
    }
    let address = cluster.decode[0].address;
    cluster.decode[0].kill();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let reborn = ScriptedNode::start_at(Role::Decode, "decode-0", address, 7);
    reborn.answer_with(&encode(ANSWER));
    ids.extend(ids_of(&stream.chunks().await, 0));
    assert_eq!(ids, expected());
    assert_eq!(reborn.calls()[0].attempt.tokens.len(), 103);
}

/// Starts another process at the address of a killed decode node.
fn restart_decode(cluster: &mut Cluster, index: usize) {
    let node = &cluster.decode[index];
    let name = format!("decode-{index}");
    let restarted = ScriptedNode::start_at(Role::Decode, &name, node.address, 7);
    restarted.answer_with(&encode(ANSWER));
    cluster.decode[index] = restarted;
}

#[tokio::test]
async fn while_all_decode_nodes_restart_new_and_running_requests_wait_and_complete() {
    let mut cluster = Cluster::start(1, 2, ANSWER).await;
    for node in &cluster.decode {
        node.behave(Behaviour::HangAfter(3));
    }
    let (mut running, mut fingerprint) = (Vec::new(), Value::Null);
    for _ in 0..4 {
        let mut stream = cluster.client.stream("/v1/completions", &streamed()).await;
        let first: Value = serde_json::from_str(&stream.next().await.unwrap()).unwrap();
        fingerprint = first["system_fingerprint"].clone();
        running.push((stream, ids_of(&[first], 0)));
    }
    let lengths = async |cluster: &Cluster| {
        let models = cluster.client.get("/v1/models").await.json();
        let tokenize = json!({"prompt": "x"});
        let tokenized = cluster.client.post("/tokenize", &tokenize).await.json();
        [models["data"][0]["max_model_len"].clone(), tokenized["max_model_len"].clone()]
    };
    let lengths_before = lengths(&cluster).await;
    cluster.decode.iter_mut().for_each(ScriptedNode::kill);
    cluster.wait_nodes(1, 0).await;
    let ask = |client: common::client::Client| async move {
        client.post("/v1/completions", &completion_of(&json!(null), json!({}))).await
    };
    let new: Vec<_> = (0..4).map(|_| tokio::spawn(ask(cluster.client.clone()))).collect();
    eventually("all wait", async || {
        cluster.metric("baton_requests", &["state=\"waiting\""]).await == 8.0
    })
    .await;
    assert_eq!(cluster.client.get("/health").await.status, 503);
    assert_eq!(lengths(&cluster).await, lengths_before);
    // Longer than any probe interval of the directory.
    tokio::time::sleep(Duration::from_secs(3)).await;
    restart_decode(&mut cluster, 0);
    restart_decode(&mut cluster, 1);
    for answer in new {
        let answer = answer.await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.message());
        assert_eq!(answer.json()["choices"][0]["text"], ANSWER);
        assert_eq!(answer.json()["system_fingerprint"], fingerprint);
    }
    for (mut stream, mut ids) in running {
        ids.extend(ids_of(&stream.chunks().await, 0));
        assert_eq!(ids, expected());
    }
    eventually("no request waits", async || {
        cluster.metric("baton_requests", &["state=\"waiting\""]).await == 0.0
    })
    .await;
}

#[tokio::test]
async fn a_request_whose_nodes_are_killed_more_often_than_its_budget_completes() {
    const KILLS: usize = 6;
    let mut cluster = Cluster::start(1, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::HangAfter(1));
    let headers = [("x-baton-stats", "1")];
    let mut stream = cluster.client.stream_with("/v1/completions", &headers, &streamed()).await;
    let mut ids = Vec::new();
    for kills in 1..=KILLS {
        while ids.len() < kills {
            let chunk: Value = serde_json::from_str(&stream.next().await.unwrap()).unwrap();
            assert!(chunk["error"].is_null(), "{chunk}");
            ids.extend(ids_of(&[chunk], 0));
        }
        cluster.decode[0].kill();
        restart_decode(&mut cluster, 0);
        if kills < KILLS {
            cluster.decode[0].behave(Behaviour::HangAfter(1));
        }
    }
    let chunks = stream.chunks().await;
    ids.extend(ids_of(&chunks, 0));
    assert_eq!(ids, expected());
    let attempts = chunks.last().unwrap()["baton"]["attempts"].as_u64().unwrap();
    assert!(attempts > KILLS as u64, "{attempts} attempts");
}

#[tokio::test]
async fn a_model_that_no_node_has_served_is_rejected_at_once() {
    let source = router::ModelSource { name: "scripted".into(), text: common::model_text() };
    let cluster = Cluster::begin(settings(), vec![source], vec![], vec![]);
    let body = completion_of(&json!(null), json!({}));
    let answer = cluster.client.post("/v1/completions", &body).await;
    assert_eq!((answer.status.as_u16(), &answer.error()["code"]), (503, &json!("no_decode_node")));
    assert!(answer.headers.contains_key("retry-after"));
}

#[tokio::test]
async fn attempts_without_a_token_are_bounded() {
    // Without a prefill node, whose token 0 would renew the budget.
    let cluster = Cluster::start(0, 2, ANSWER).await;
    for node in &cluster.decode {
        node.behave(Behaviour::FailAfter(0, FailureKind::Internal));
    }
    let body = json!({"prompt": long_prompt(), "max_tokens": 5});
    let answer = cluster.client.post("/v1/completions", &body).await;
    assert_eq!(answer.status, 502, "{}", answer.message());
    assert_eq!(answer.error()["code"], "attempts_spent");
    assert!(answer.message().contains("8 attempts"), "{}", answer.message());
    let calls: usize = cluster.decode.iter().map(|node| node.calls().len()).sum();
    assert_eq!(calls, 8);
}

#[tokio::test]
async fn repeated_transfer_failures_fall_back_to_a_decode_node_alone() {
    let cluster = Cluster::start(2, 1, ANSWER).await;
    let failing = Behaviour::FailAfter(0, FailureKind::TransferFailed);
    cluster.decode[0].behave_in_turn(vec![failing.clone(), failing, Behaviour::Serve]);
    let stats = complete(&cluster).await;
    assert_eq!((&stats["attempts"], &stats["prefill_node"]), (&json!(3), &json!(null)));
    let with_peer: Vec<bool> =
        cluster.decode[0].calls().iter().map(|call| call.with_peer).collect();
    assert_eq!(with_peer, [true, true, false]);
    // Each prefill node was tried once.
    assert!(cluster.prefill.iter().all(|node| node.calls().len() == 1));
}

#[tokio::test]
async fn request_waits_for_busy_nodes() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::Refuse(Code::ResourceExhausted, "queue full"));
    let request = tokio::spawn({
        let client = cluster.client.clone();
        async move {
            let headers = [("x-baton-stats", "1")];
            client.stream_with("/v1/completions", &headers, &streamed()).await.chunks().await
        }
    });
    let node = &cluster.decode[0];
    eventually("several tries", async || node.calls().len() >= 3).await;
    // Waits until the request is between two tries.
    let waiting = async || cluster.metric("baton_requests", &["state=\"waiting\""]).await;
    eventually("the request waits", async || waiting().await == 1.0).await;
    assert_eq!(cluster.metric("baton_requests", &["state=\"running\""]).await, 0.0);
    node.behave(Behaviour::Serve);
    let chunks = request.await.unwrap();
    assert_eq!(ids_of(&chunks, 0), expected());
    assert_eq!(chunks.last().unwrap()["baton"]["attempts"], 1);
    eventually("the request does not wait", async || waiting().await == 0.0).await;
}

#[tokio::test]
async fn waiting_for_busy_nodes_is_bounded_in_time_and_number() {
    let mut settings = settings();
    // All four requests are waiting before the first times out.
    settings.router.waiting_timeout = Duration::from_secs(3);
    settings.router.waiting_max = 2;
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::Refuse(Code::ResourceExhausted, "queue full"));
    let body = json!({"prompt": long_prompt(), "max_tokens": 5});
    let answers = futures_util::future::join_all(
        (0..4).map(|_| cluster.client.post("/v1/completions", &body)),
    )
    .await;
    let mut statuses: Vec<u16> = answers.iter().map(|answer| answer.status.as_u16()).collect();
    statuses.sort_unstable();
    assert_eq!(statuses, [503; 4]);
    assert!(answers.iter().all(|answer| answer.headers.contains_key("retry-after")));
    assert!(answers.iter().all(|answer| answer.error()["code"] == "overloaded"));
}

/// No request waits for a prefill node: neither the request that finds all prefill nodes full, nor
/// the next one, which does not try them during their back-off.
#[tokio::test]
async fn decode_node_prefills_if_all_prefill_nodes_are_full() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    cluster.prefill[0].behave(Behaviour::Refuse(Code::ResourceExhausted, "queue full"));
    cluster.decode[0].behave(Behaviour::NoKvFrom("prefill-0"));
    for _ in 0..2 {
        let stats = complete(&cluster).await;
        assert_eq!((&stats["prefill_node"], &stats["attempts"]), (&json!(null), &json!(1)));
    }
    let waited = cluster.metric("baton_requests", &["state=\"waiting\""]).await;
    assert_eq!(waited, 0.0);
    // Calls of one connection may be received in any order.
    let local_prefill = cluster.decode[0].calls().iter().filter(|call| !call.with_peer).count();
    assert_eq!(local_prefill, 2);
    assert!(!cluster.prefill[0].calls().is_empty(), "the prefill node was asked");
    // The router uses the prefill node again as soon as it has capacity.
    for node in [&cluster.prefill[0], &cluster.decode[0]] {
        node.behave(Behaviour::Serve);
    }
    eventually("the prefill node is back in use", async || {
        complete(&cluster).await["prefill_node"] == "prefill-0"
    })
    .await;
}

/// At the decode node's own limit the request waits, and then uses both nodes.
#[tokio::test]
async fn request_waits_if_nodes_of_both_roles_are_full() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let full = Behaviour::Refuse(Code::ResourceExhausted, "queue full");
    for node in [&cluster.prefill[0], &cluster.decode[0]] {
        node.behave(full.clone());
    }
    let asked = tokio::spawn({
        let client = cluster.client.clone();
        let body = json!({"prompt": long_prompt(), "max_tokens": 5});
        async move { client.post("/v1/completions", &body).await }
    });
    eventually("the request waits", async || {
        cluster.metric("baton_requests", &["state=\"waiting\""]).await == 1.0
    })
    .await;
    assert!(!asked.is_finished());
    for node in [&cluster.prefill[0], &cluster.decode[0]] {
        node.behave(Behaviour::Serve);
    }
    assert_eq!(asked.await.unwrap().status, 200);
}

#[tokio::test]
async fn only_equal_models_are_paired() {
    let prefill =
        vec![ScriptedNode::start_at(Role::Prefill, "prefill-0", "127.0.0.1:0".parse().unwrap(), 9)];
    let decode = vec![ScriptedNode::start(Role::Decode, "decode-0")];
    decode[0].answer_with(&encode(ANSWER));
    let cluster = Cluster::start_over(settings(), prefill, decode).await;
    let stats = complete(&cluster).await;
    assert_eq!(stats["prefill_node"], json!(null));
    assert!(cluster.prefill[0].calls().is_empty());
}

/// Streams from nodes that send exactly these events. Returns the events that the client received.
async fn scripted(
    prefill: Vec<prefill_event::Event>,
    decode: Vec<decode_event::Event>,
) -> Vec<String> {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    cluster.prefill[0].behave_in_turn(vec![Behaviour::PrefillEvents(prefill), Behaviour::Serve]);
    cluster.decode[0].behave_in_turn(vec![Behaviour::DecodeEvents(decode), Behaviour::Serve]);
    cluster.client.stream("/v1/completions", &streamed()).await.all().await
}

fn token(id: u32) -> Token {
    Token { id, ..Default::default() }
}

fn decode_tokens(first_index: u32, ids: &[u32]) -> decode_event::Event {
    let tokens = ids.iter().map(|&id| token(id)).collect();
    decode_event::Event::Tokens(DecodeTokens { first_index, tokens })
}

fn reserved() -> decode_event::Event {
    decode_event::Event::Reserved(Reserved { cached_tokens: 0, local_prefill: false })
}

fn first_token(id: u32) -> prefill_event::Event {
    prefill_event::Event::Token(PrefillToken {
        first_index: 0,
        token: Some(token(id)),
        finish: None,
        cached_tokens: 0,
    })
}

#[tokio::test]
async fn contradicting_tokens_fail_the_request_with_one_typed_error() {
    let ids = expected();
    let events =
        scripted(vec![first_token(ids[0])], vec![reserved(), decode_tokens(0, &[ids[0] + 1])])
            .await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "contradiction", "{events:?}");
    assert_eq!(last["error"]["type"], "server_error");
}

#[tokio::test]
async fn protocol_violation_uses_an_attempt_and_loses_no_token() {
    let ids = expected();
    for decode in [
        vec![decode_tokens(0, &ids[..1])],
        vec![reserved(), reserved()],
        vec![reserved(), decode_tokens(0, &ids[..2]), decode_tokens(3, &ids[3..4])],
        vec![reserved(), decode_tokens(5, &ids[..1])],
        vec![reserved(), decode_tokens(0, &[])],
        vec![reserved(), decode_tokens(0, &[u32::MAX])],
        vec![reserved(), decode_tokens(u32::MAX, &ids[..3])],
    ] {
        let mut events = scripted(vec![], decode.clone()).await;
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{decode:?}");
        let chunks: Vec<Value> =
            events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
        assert_eq!(ids_of(&chunks, 0), ids, "{decode:?}");
    }
}

#[tokio::test]
async fn repeated_tokens_are_sent_to_the_client_once() {
    let ids = expected();
    let mut decode = vec![reserved()];
    for end in 1..=ids.len() {
        // Repeats all tokens so far.
        decode.push(decode_tokens(0, &ids[..end]));
    }
    decode.push(decode_event::Event::Finished(proto::v1::DecodeFinished {
        reason: proto::v1::FinishReason::Stop.into(),
        received_bytes: 1,
        transfer_us: 1,
    }));
    let mut events = scripted(vec![first_token(ids[0])], decode).await;
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    let chunks: Vec<Value> =
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(ids_of(&chunks, 0), ids);
}

#[tokio::test]
async fn complete_answer_needs_no_final_event() {
    // Every token has arrived when the node disconnects or falls silent.
    for behaviour in [Behaviour::CutAfter(7), Behaviour::HangAfter(7)] {
        let cluster = Cluster::start(1, 1, ANSWER).await;
        cluster.decode[0].behave(behaviour);
        let body = json!({"prompt": long_prompt(), "max_tokens": 7});
        let answer = cluster.client.post("/v1/completions", &body).await.json();
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
        assert_eq!(answer["usage"]["completion_tokens"], 7);
        assert_eq!(cluster.decode[0].calls().len(), 1);
    }
}

#[tokio::test]
async fn requests_go_to_the_least_loaded_nodes() {
    let (prefill, decode) = Cluster::nodes(2, 2, ANSWER);
    let load = NodeLoad {
        running: 50,
        waiting: 50,
        pending_prompt_tokens: 100_000,
        blocks_free: 1000,
        ..Default::default()
    };
    prefill[0].report(load);
    decode[1].report(load);
    let cluster = Cluster::start_over(settings(), prefill, decode).await;
    for _ in 0..3 {
        complete(&cluster).await;
    }
    assert_eq!((cluster.prefill[0].calls().len(), cluster.prefill[1].calls().len()), (0, 3));
    assert_eq!((cluster.decode[0].calls().len(), cluster.decode[1].calls().len()), (3, 0));
    // A draining node receives no request, even without load.
    cluster.decode[0].report(NodeLoad { draining: true, ..Default::default() });
    cluster.wait_nodes(2, 1).await;
    complete(&cluster).await;
    assert_eq!(cluster.decode[1].calls().len(), 1);
}

#[tokio::test]
async fn gap_in_node_events_restarts_the_observation() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let node = &cluster.decode[0];
    assert_eq!(node.observed(), 1);
    node.report(NodeLoad { running: 1, ..Default::default() });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(node.observed(), 1);
    node.report_with_a_gap(NodeLoad { running: 2, ..Default::default() });
    eventually("the node is observed again", async || node.observed() == 2).await;
    cluster.wait_nodes(1, 1).await;
    complete(&cluster).await;
}

#[tokio::test]
async fn failed_matcher_of_a_grammar_is_an_internal_error_without_a_retry() {
    let cluster = Cluster::start(0, 2, ANSWER).await;
    for node in &cluster.decode {
        node.behave(Behaviour::Refuse(Code::DataLoss, "the matcher failed"));
    }
    let body = json!({"prompt": long_prompt(), "max_tokens": 5});
    let answer = cluster.client.post("/v1/completions", &body).await;
    assert_eq!((answer.status.as_u16(), &answer.error()["code"]), (500, &json!("internal")));
    let calls: usize = cluster.decode.iter().map(|node| node.calls().len()).sum();
    assert_eq!(calls, 1);
}
