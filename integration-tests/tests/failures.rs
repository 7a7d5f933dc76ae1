//! What happens to requests when processes die, stop, drain or are overloaded.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use integration_tests::{
    client::{Client, DEADLINE, greedy_body},
    cluster::{Cluster, ClusterSpec},
    golden::{GoldenRun, golden},
};
use serde_json::json;

/// A request ends within this after the process that worked on it was killed.
const RECOVERY_MAX: Duration = Duration::from_secs(3);
/// A silent peer is given up after it.
const LEASE: Duration = Duration::from_secs(2);

fn long_run() -> GoldenRun {
    golden().runs.into_iter().max_by_key(|run| run.prompt_ids.len()).expect("there are runs")
}

#[tokio::test]
async fn a_killed_decode_node_costs_no_token() -> Result<()> {
    let (mut cluster, client) = start(ClusterSpec::smollm2().nodes(1, 2)).await?;
    let runs = golden().runs;
    // One request per decode node, so that one of them is hit and the other is not.
    let mut streams = Vec::new();
    for run in &runs[..2] {
        streams.push(client.stream("/v1/completions", &greedy_body(&run.prompt_ids, 48)).await?);
    }
    let mut found = vec![Vec::new(), Vec::new()];
    for (stream, found) in streams.iter_mut().zip(&mut found) {
        while found.len() < 3 {
            found.extend(stream.next().await?.expect("the stream goes on").token_ids());
        }
    }
    cluster.decode[0].kill();
    let killed = Instant::now();
    let mut longest_gap = Duration::ZERO;
    for ((stream, found), run) in streams.iter_mut().zip(&mut found).zip(&runs) {
        let mut last = Instant::now().max(killed);
        while let Some(event) = stream.next().await? {
            longest_gap = longest_gap.max(last.elapsed());
            last = Instant::now();
            found.extend(event.token_ids());
        }
        assert_eq!(*found, run.output_ids, "{}", run.name);
    }
    ensure!(longest_gap < RECOVERY_MAX, "a stream paused for {longest_gap:?}");
    println!("longest pause after the kill: {longest_gap:?}");
    // The cluster serves on with the node that is left, and with the node when it is back.
    cluster.wait_nodes(1, 1).await?;
    assert_eq!(client.greedy(&runs[2].prompt_ids, 8).await?, runs[2].output_ids[..8]);
    cluster.restart_decode(0)?;
    cluster.wait_nodes(1, 2).await?;
    cluster.stop()
}

#[tokio::test]
async fn a_killed_prefill_node_in_mid_prompt_is_replaced() -> Result<()> {
    // Small chunks make the prompt's computation long enough to be met in its middle; bf16 leaves
    // time to do it again within the bound.
    let mut spec = ClusterSpec::smollm2().nodes(2, 2).set("BATON_NODE_CHUNK_TOKENS", 32);
    spec.dtype = "bf16";
    let (mut cluster, client) = start(spec).await?;
    let runs = golden().runs;
    let (run, other) = (long_run(), &runs[0]);
    let mut salted = greedy_body(&run.prompt_ids, 16);
    salted["cache_salt"] = json!("found nowhere else");
    let expected = client.stream("/v1/completions", &salted).await?.token_ids().await?;
    let expected_elsewhere = client.greedy(&other.prompt_ids, 48).await?;
    // Prefilled already, so that only its decode node works on it.
    let mut elsewhere =
        client.stream("/v1/completions", &greedy_body(&other.prompt_ids, 48)).await?;
    let first = elsewhere.next().await?.expect("the stream goes on").token_ids();

    let asked = tokio::spawn({
        let (client, body) = (client.clone(), greedy_body(&run.prompt_ids, 16));
        async move {
            let figures = [("x-baton-figures", "1")];
            client.stream_with("/v1/completions", &body, &figures).await?.all().await
        }
    });
    let busy = busy_prefill_node(&cluster).await?;
    cluster.prefill[busy].kill();
    let killed = Instant::now();
    let events = asked.await??;
    let first_after = events.first().expect("there are events").after;
    println!("killed, complete {:?} later; first token after {first_after:?}", killed.elapsed());
    ensure!(killed.elapsed() < RECOVERY_MAX, "complete {:?} after the kill", killed.elapsed());
    let found: Vec<u32> = events.iter().flat_map(|event| event.token_ids()).collect();
    assert_eq!(found, expected);
    let attempts = events
        .iter()
        .filter(|event| !event.is_done())
        .find_map(|event| event.json()["baton"]["attempts"].as_u64());
    assert!(attempts >= Some(2), "{attempts:?} attempts: the kill came too late to matter");
    let mut found = first;
    found.extend(elsewhere.token_ids().await?);
    assert_eq!(found, expected_elsewhere, "a request elsewhere was disturbed");

    // Without any prefill node the cluster is degraded but serves: decode nodes read prompts.
    cluster.prefill[1 - busy].kill();
    cluster.wait_nodes(0, 2).await?;
    let (status, health) = client.get_json("/health").await?;
    assert_eq!((status.as_u16(), health["degraded"].as_bool()), (200, Some(true)), "{health}");
    assert_eq!(client.greedy(&other.prompt_ids, 48).await?, expected_elsewhere);
    Ok(())
}

/// Index of the prefill node that runs something.
async fn busy_prefill_node(cluster: &Cluster) -> Result<usize> {
    let deadline = Instant::now() + DEADLINE;
    while Instant::now() < deadline {
        for (index, node) in cluster.prefill.iter().enumerate() {
            let metrics = Client::new(format!("http://{}", node.ready.metrics));
            let text = String::from_utf8(metrics.get("/metrics").await?.body.to_vec())?;
            let running = text
                .lines()
                .filter(|line| line.starts_with("vllm:num_requests_running{"))
                .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
            if running.sum::<f64>() > 0.0 {
                return Ok(index);
            }
        }
    }
    bail!("no prefill node runs anything")
}

#[tokio::test]
async fn without_any_decode_node_requests_end_with_one_typed_error() -> Result<()> {
    let (mut cluster, client) = start(ClusterSpec::smollm2()).await?;
    let run = long_run();
    let mut stream = client.stream("/v1/completions", &greedy_body(&run.prompt_ids, 48)).await?;
    let mut tokens = 0;
    while tokens < 3 {
        tokens += stream.next().await?.expect("the stream goes on").token_ids().len();
    }
    cluster.decode[0].kill();
    let killed = Instant::now();
    let mut errors = Vec::new();
    while let Some(event) = stream.next().await? {
        if !event.is_done() && !event.json()["error"].is_null() {
            errors.push(event.json()["error"].clone());
        }
    }
    assert_eq!(errors.len(), 1, "{errors:?}");
    ensure!(killed.elapsed() < RECOVERY_MAX, "the error came after {:?}", killed.elapsed());
    cluster.wait_nodes(1, 0).await?;
    let (status, _) = client.get_json("/health").await?;
    assert_eq!(status, 503);
    let answer =
        client.post("/v1/completions", &json!({"prompt": "hello", "max_tokens": 4})).await?;
    assert_eq!(answer.status, 503, "{:?}", answer.json());
    assert!(answer.headers.contains_key("retry-after"));
    Ok(())
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_blocks_within_a_second() -> Result<()> {
    let (cluster, client) = start(ClusterSpec::smollm2()).await?;
    let run = long_run();
    let mut stream = client.stream("/v1/completions", &greedy_body(&run.prompt_ids, 2000)).await?;
    let mut tokens = 0;
    while tokens < 3 {
        tokens += stream.next().await?.expect("the stream goes on").token_ids().len();
    }
    assert!(held_blocks(&cluster).await? > 0.0);
    drop(stream);
    let left = Instant::now();
    while held_blocks(&cluster).await? > 0.0 {
        ensure!(left.elapsed() < Duration::from_secs(1), "blocks are held after a second");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    println!("blocks free {:?} after the client left", left.elapsed());
    cluster.stop()
}

/// Blocks in use on all nodes, by their own metrics.
async fn held_blocks(cluster: &Cluster) -> Result<f64> {
    let mut held = 0.0;
    for node in cluster.prefill.iter().chain(&cluster.decode) {
        let metrics = Client::new(format!("http://{}", node.ready.metrics));
        let text = String::from_utf8(metrics.get("/metrics").await?.body.to_vec())?;
        held += text
            .lines()
            .filter(|line| line.starts_with("baton_kv_blocks{"))
            .filter(|line| line.contains("state=\"held\"") || line.contains("state=\"reserved\""))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum::<f64>();
    }
    Ok(held)
}

#[tokio::test]
async fn a_draining_node_finishes_its_work() -> Result<()> {
    let (mut cluster, client) = start(ClusterSpec::smollm2().nodes(1, 2)).await?;
    let runs = golden().runs;
    let mut streams = Vec::new();
    for run in &runs[..2] {
        streams.push(client.stream("/v1/completions", &greedy_body(&run.prompt_ids, 48)).await?);
    }
    let mut found = vec![Vec::new(), Vec::new()];
    for (stream, found) in streams.iter_mut().zip(&mut found) {
        while found.is_empty() {
            found.extend(stream.next().await?.expect("the stream goes on").token_ids());
        }
    }
    cluster.decode[0].terminate_signal();
    for ((stream, found), run) in streams.iter_mut().zip(&mut found).zip(&runs) {
        found.extend(stream.token_ids().await?);
        assert_eq!(*found, run.output_ids, "{}", run.name);
    }
    assert_eq!(cluster.decode[0].wait_end(Duration::from_secs(10))?, Some(0));
    assert_eq!(client.greedy(&runs[2].prompt_ids, 8).await?, runs[2].output_ids[..8]);
    Ok(())
}

#[tokio::test]
async fn a_frozen_prefill_node_delays_its_requests_by_no_more_than_the_lease() -> Result<()> {
    let (cluster, client) = start(ClusterSpec::smollm2().nodes(1, 1)).await?;
    let run = long_run();
    let asked = Instant::now();
    let expected = client.greedy(&run.prompt_ids, 8).await?;
    let unfrozen = asked.elapsed();
    cluster.prefill[0].stop_signal();
    let frozen = Instant::now();
    let mut body = greedy_body(&run.prompt_ids, 8);
    body["cache_salt"] = json!("other");
    let found = client.stream("/v1/completions", &body).await?.token_ids().await?;
    assert_eq!(found, expected);
    println!("complete {:?} after the freeze", frozen.elapsed());
    // The decode node then reads the prompt itself, on a machine that both share.
    let allowed = 2 * unfrozen + LEASE + Duration::from_millis(500);
    ensure!(frozen.elapsed() < allowed, "took {:?}, allowed {allowed:?}", frozen.elapsed());
    cluster.prefill[0].continue_signal();
    cluster.wait_nodes(1, 1).await?;
    cluster.stop()
}

#[tokio::test]
async fn overload_is_answered_not_queued_without_end() -> Result<()> {
    let spec = ClusterSpec::smollm2()
        .set("BATON_ROUTER_REQUESTS_MAX", 8)
        .set("BATON_ROUTER_WAITING_MAX", 4);
    let (cluster, client) = start(spec).await?;
    let run = long_run();
    let answers = futures_util::future::join_all((0..32).map(|_| {
        let (client, prompt) = (client.clone(), run.prompt_ids.clone());
        async move {
            client
                .post(
                    "/v1/completions",
                    &json!({"prompt": prompt, "max_tokens": 16,
                    "temperature": 0, "ignore_eos": true}),
                )
                .await
        }
    }))
    .await;
    let (mut complete, mut refused) = (0, 0);
    for answer in answers {
        let answer = answer?;
        match answer.status.as_u16() {
            200 => complete += 1,
            429 | 503 => {
                refused += 1;
                assert!(answer.headers.contains_key("retry-after"));
            }
            other => panic!("{other}: {:?}", answer.json()),
        }
    }
    assert!(complete >= 8 && refused > 0, "{complete} complete, {refused} refused");
    cluster.stop()
}

async fn start(spec: ClusterSpec) -> Result<(Cluster, Client)> {
    let cluster = Cluster::start(spec).await?;
    let client = Client::new(cluster.http());
    Ok((cluster, client))
}
