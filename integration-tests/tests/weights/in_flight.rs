//! Requests in flight during an update, and pauses without one.

use std::{
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures_util::future::join_all;
use integration_tests::{
    client::{Client, Event, greedy_body, salted_body},
    cluster::{Cluster, ClusterSpec, smollm2},
    golden::{longest, run_named},
};
use serde_json::{Value, json};

use crate::{
    STREAMED, admin, committed, labelled_tokens, name_model, trained, wait_field, wait_phase,
    wait_version,
};

/// Streams run while updates are committed one after the other: 8 streams and 4 updates, or 64
/// streams and as many updates as BATON_WEIGHT_UPDATES says.
#[tokio::test]
async fn requests_in_flight_survive_updates() -> Result<()> {
    const ANSWER: usize = 60;
    let count = std::env::var("BATON_WEIGHT_UPDATES").ok();
    let count: Option<usize> = count.map(|count| count.parse()).transpose()?;
    let (updates_max, stream_count) = count.map_or((4, 8), |count| (count, 64));
    let folder = tempfile::tempdir()?;
    let paths = [trained(folder.path(), "a", 0x11), trained(folder.path(), "b", 0x22)];
    // On a busy machine requests wait long for a slot.
    let spec =
        name_model(ClusterSpec::smollm2().nodes(1, 2)).set("BATON_ROUTER_WAITING_TIMEOUT", "10m");
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let run = run_named("code");
    let done = AtomicBool::new(false);
    let streams = (0..stream_count).map(|index| {
        let (run, client, done) = (&run, &client, &done);
        async move {
            let mut versions_of_answers = Vec::new();
            while !done.load(Ordering::Relaxed) {
                let salt = format!("{index} {}", versions_of_answers.len());
                let mut body = salted_body(&run.prompt_ids, ANSWER, &salt);
                body["return_weight_version"] = json!(true);
                body["stream"] = json!(false);
                body["stream_options"] = Value::Null;
                let answer = client.post("/v1/completions", &body).await?;
                ensure!(answer.status == 200, "{}", String::from_utf8_lossy(&answer.body));
                let choice = answer.json()["choices"][0].clone();
                let versions = choice["weight_versions"].as_array().context("versions")?.clone();
                ensure!(versions.len() == ANSWER, "{choice}");
                versions_of_answers.push(versions);
            }
            anyhow::Ok(versions_of_answers)
        }
    });
    let updates = async {
        let (mut versions, mut pauses) = (vec![json!("loaded")], Vec::new());
        let mut outcome = Ok(());
        for index in 0..updates_max {
            match committed(&cluster, &paths[index % 2]).await {
                Ok(report) => {
                    versions.push(report["update"]["weight_version"].clone());
                    let nodes = report["update"]["nodes"].as_array().cloned().unwrap_or_default();
                    pauses.extend(nodes.iter().filter_map(|node| node["paused_ms"].as_f64()));
                }
                Err(error) => outcome = Err(error),
            }
        }
        done.store(true, Ordering::Relaxed);
        outcome.map(|()| (versions, pauses))
    };
    let (answers, updated) = tokio::join!(join_all(streams), updates);
    let (known, mut pauses) = updated?;
    let mut answered = 0;
    for answers in answers {
        let answers = answers?;
        assert!(!answers.is_empty());
        answered += answers.len();
        for versions in answers {
            assert!(versions.iter().all(|version| known.contains(version)), "{versions:?}");
        }
    }
    pauses.sort_by(f64::total_cmp);
    let (median, longest) = (pauses[pauses.len() / 2], pauses[pauses.len() - 1]);
    println!(
        "{updates_max} updates, {stream_count} streams: {answered} answers, none failed; pauses {median:.1} ms in the \
         median, {longest:.1} ms at most"
    );
    cluster.stop()
}

/// Nodes keep the KV of running sequences, wait with new requests, and take up new weights
/// meanwhile.
#[tokio::test]
async fn paused_nodes_serve_nothing_until_they_resume() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let new = trained(folder.path(), "new", 0x11);
    let spec = name_model(ClusterSpec::smollm2().nodes(1, 1));
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let admin = admin(&cluster);
    let prompt = run_named("code").prompt_ids.clone();
    let expected = client.greedy(&prompt, STREAMED).await?;
    let ready = || async {
        let node = Client::new(format!("http://{}", cluster.decode[0].ready.metrics));
        let ready = node.get("/ready").await?.status.as_u16();
        let live = node.get("/live").await?.status.as_u16();
        anyhow::Ok((ready, live))
    };

    let mut stream = client.stream("/v1/completions", &greedy_body(&prompt, STREAMED)).await?;
    let mut events = vec![stream.next().await?.context("the first token")?];
    let paused = admin.post("/v1/weights/pause?mode=keep_kv&timeout_s=45", &json!({})).await?;
    assert_eq!(paused.status, 200, "{}", String::from_utf8_lossy(&paused.body));
    wait_field(&cluster, "pause", &json!("paused")).await?;
    assert_eq!(ready().await?, (503, 200));
    let resume = async {
        let begun = Instant::now();
        // A new request waits meanwhile.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let resumed = admin.post("/v1/weights/resume", &json!({})).await?;
        ensure!(resumed.status == 200, "{}", String::from_utf8_lossy(&resumed.body));
        anyhow::Ok(begun.elapsed())
    };
    let request = async {
        let begun = Instant::now();
        anyhow::Ok((client.greedy(&longest().prompt_ids, 4).await?, begun.elapsed()))
    };
    let (paused_for, (_, took)) = tokio::try_join!(resume, request)?;
    assert!(took >= Duration::from_millis(500) && paused_for <= took, "{took:?}");
    events.extend(stream.all().await?);
    let tokens: Vec<u32> = events.iter().flat_map(Event::token_ids).collect();
    assert_eq!(tokens, expected, "the stream continues where it stopped");
    wait_field(&cluster, "pause", &Value::Null).await?;
    assert_eq!(ready().await?, (200, 200));

    // An update is committed during a pause, which ends by itself.
    admin.post("/v1/weights/pause?mode=wait&timeout_s=3", &json!({})).await?;
    committed(&cluster, &new).await?;
    wait_field(&cluster, "pause", &Value::Null).await?;
    assert_ne!(client.greedy(&prompt, STREAMED).await?, expected);

    for (path, words) in [
        ("pause?mode=freeze", "unknown variant `freeze`, expected one of `recompute`, `keep_kv`"),
        ("pause?timeout_s=0", "invalid timeout_s: 0; expected 1 to 3600"),
        ("resume?model=other", "expected one of: smollm2"),
    ] {
        let answer = admin.post(&format!("/v1/weights/{path}"), &json!({})).await?;
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        assert!(answer.status == 400 && text.contains(words), "{text}");
    }
    cluster.stop()
}

#[tokio::test]
async fn pause_with_abort_ends_running_requests_and_later_requests_are_served() -> Result<()> {
    let spec = name_model(ClusterSpec::smollm2().nodes(0, 1));
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let admin = admin(&cluster);
    let prompt = run_named("code").prompt_ids.clone();
    let expected = client.greedy(&prompt, STREAMED).await?;
    let mut stream = client.stream("/v1/completions", &greedy_body(&prompt, STREAMED)).await?;
    let mut events = vec![stream.next().await?.context("the first token")?];
    let paused = admin.post("/v1/weights/pause?mode=abort&timeout_s=45", &json!({})).await?;
    assert_eq!(paused.status, 200, "{}", String::from_utf8_lossy(&paused.body));
    events.extend(stream.all().await?);
    assert_eq!(finish_reason(&events), "abort");
    let tokens: Vec<u32> = events.iter().flat_map(Event::token_ids).collect();
    assert!(!tokens.is_empty() && tokens.len() < STREAMED, "{tokens:?}");
    assert_eq!(tokens, expected[..tokens.len()]);
    wait_field(&cluster, "pause", &json!("paused")).await?;
    admin.post("/v1/weights/resume", &json!({})).await?;
    assert_eq!(client.greedy(&prompt, STREAMED).await?, expected);
    cluster.stop()
}

/// Returns the last finish reason of a stream.
fn finish_reason(events: &[Event]) -> Value {
    let events = events.iter().filter(|event| !event.is_done());
    let mut reasons = events.map(|event| event.json()["choices"][0]["finish_reason"].clone());
    reasons.rfind(|reason| !reason.is_null()).unwrap_or_default()
}

/// Commits a prepared update while a stream runs. Returns the tokens of the stream, the weight
/// version of each, and the finish reason.
async fn stream_over_update(
    cluster: &Cluster,
    client: &Client,
    path: &Path,
    in_flight: &str,
) -> Result<(Vec<u32>, Vec<Value>, Value)> {
    let admin = admin(cluster);
    let body = json!({"path": path, "in_flight": in_flight});
    let begun = admin.post("/v1/weights/begin", &body).await?;
    ensure!(begun.status == 200, "{}", String::from_utf8_lossy(&begun.body));
    let id = begun.json()["update"]["id"].as_str().context("an id")?.to_owned();
    wait_phase(&admin, "prepared").await?;
    let mut body = greedy_body(&run_named("code").prompt_ids, STREAMED);
    body["return_weight_version"] = json!(true);
    let mut stream = client.stream("/v1/completions", &body).await?;
    let mut events = Vec::new();
    // The first token of a prefill node may come before its KV.
    while events.len() < 4 {
        events.push(stream.next().await?.context("a token")?);
    }
    admin.post(&format!("/v1/weights/{id}/commit"), &json!({})).await?;
    events.extend(stream.all().await?);
    let report = wait_phase(&admin, "committed").await?;
    wait_version(cluster, &report["update"]["weight_version"]).await?;
    let (tokens, versions) = labelled_tokens(&events);
    let finish = finish_reason(&events);
    ensure!(tokens.len() == versions.len(), "{tokens:?} {versions:?}");
    Ok((tokens, versions, finish))
}

#[tokio::test]
async fn running_requests_finish_keep_their_kv_or_end_at_an_update() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let new = trained(folder.path(), "new", 0x11);
    let (cluster, client) =
        Cluster::start_with_client(name_model(ClusterSpec::smollm2().nodes(0, 1))).await?;
    let prompt = run_named("code").prompt_ids.clone();
    let old_tokens = client.greedy(&prompt, STREAMED).await?;

    let (tokens, versions, finish) = stream_over_update(&cluster, &client, &new, "wait").await?;
    assert_eq!((tokens, finish), (old_tokens.clone(), json!("length")));
    assert!(versions.iter().all(|version| *version == versions[0]), "{versions:?}");
    let new_tokens = client.greedy(&prompt, STREAMED).await?;
    assert_ne!(new_tokens, old_tokens);

    let (tokens, versions, _) =
        stream_over_update(&cluster, &client, &smollm2(), "keep_kv").await?;
    assert_eq!(tokens.len(), STREAMED);
    let before = versions.iter().take_while(|version| **version == versions[0]).count();
    assert!(before > 0 && before < STREAMED, "{versions:?}");
    assert!(versions[before..].iter().all(|version| *version == versions[before]));
    assert_eq!(tokens[..before], new_tokens[..before]);
    assert_eq!(cluster.decode[0].metric("vllm:num_preemptions_total").await?, 0.0);
    // The blocks of the prompt and of the answer were filled with other weights: nobody uses them.
    assert_eq!(client.greedy(&prompt, STREAMED).await?, old_tokens);
    let mut continued = prompt.clone();
    continued.extend(&tokens[..STREAMED - 8]);
    let answer = client.complete(&greedy_body(&continued, 4)).await?;
    let equal = tokens.iter().zip(&old_tokens).take_while(|(one, other)| one == other).count();
    assert!(equal < STREAMED - 32, "the answers do not differ early enough");
    assert!(answer.cached_tokens as usize <= prompt.len() + equal, "{answer:?}");

    let (tokens, versions, finish) = stream_over_update(&cluster, &client, &new, "abort").await?;
    assert_eq!(finish, "abort");
    assert!(!tokens.is_empty() && tokens.len() < STREAMED, "{tokens:?}");
    assert_eq!(tokens, old_tokens[..tokens.len()]);
    assert!(versions.iter().all(|version| *version == versions[0]), "{versions:?}");
    assert_eq!(client.greedy(&prompt, STREAMED).await?, new_tokens);

    let unknown = json!({"path": new, "in_flight": "freeze"});
    let unknown = admin(&cluster).post("/v1/weights/begin", &unknown).await?;
    let text = String::from_utf8_lossy(&unknown.body).into_owned();
    assert!(unknown.status == 400 && text.contains("keep_kv"), "{text}");
    cluster.stop()
}

/// As [`running_requests_finish_keep_their_kv_or_end_at_an_update`], with KV from a prefill node.
#[tokio::test]
async fn running_requests_with_transferred_kv_finish_keep_it_or_end_at_an_update() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let new = trained(folder.path(), "new", 0x11);
    let (cluster, client) =
        Cluster::start_with_client(name_model(ClusterSpec::smollm2().nodes(1, 1))).await?;
    let prompt = run_named("code").prompt_ids.clone();
    let old_tokens = client.greedy(&prompt, STREAMED).await?;
    let is_one = |versions: &[Value]| versions.iter().all(|version| *version == versions[0]);

    let (tokens, versions, finish) = stream_over_update(&cluster, &client, &new, "wait").await?;
    assert_eq!((tokens, finish), (old_tokens.clone(), json!("length")));
    assert!(is_one(&versions), "{versions:?}");
    let new_tokens = client.greedy(&prompt, STREAMED).await?;
    assert_ne!(new_tokens, old_tokens);

    let (tokens, versions, finish) =
        stream_over_update(&cluster, &client, &smollm2(), "keep_kv").await?;
    assert_eq!((tokens.len(), finish), (STREAMED, json!("length")));
    let before = versions.iter().take_while(|version| **version == versions[0]).count();
    assert!(before < STREAMED && is_one(&versions[before..]), "{versions:?}");
    assert_eq!(tokens[..before], new_tokens[..before]);
    assert_eq!(client.greedy(&prompt, STREAMED).await?, old_tokens);

    let (tokens, versions, finish) = stream_over_update(&cluster, &client, &new, "abort").await?;
    assert_eq!(finish, "abort");
    assert!(tokens.len() < STREAMED && is_one(&versions), "{versions:?}");
    assert_eq!(tokens, old_tokens[..tokens.len()]);
    assert_eq!(client.greedy(&prompt, STREAMED).await?, new_tokens);
    cluster.stop()
}
