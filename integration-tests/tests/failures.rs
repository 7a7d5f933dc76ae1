//! Requests while processes are killed, stopped, drained or overloaded.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use integration_tests::{
    client::{Client, Completion, DEADLINE, EventStream, greedy_body, salted_body},
    cluster::{Cluster, ClusterSpec, SECRET, Service, busy_node, node_client, smollm2},
    golden::{GoldenRun, golden, longest, run_named},
};
use proto::v1::{
    GenerateOptions, GenerateRequest, NodeLoad, ObserveEvent, ObserveRequest, TokenIds,
    generate_request::Prompt, inference_client::InferenceClient, observe_event::Event as Observed,
};
use serde_json::json;
use test_harness::assert_median;

/// Time limit for the end of a request after a kill of its node.
const RECOVERY_MAX: Duration = Duration::from_secs(3);
/// Lease after which a silent peer counts as lost.
const LEASE: Duration = Duration::from_secs(2);

/// A streamed request with its first tokens, and its decode node.
struct Begun {
    run: GoldenRun,
    stream: EventStream,
    found: Vec<u32>,
}

impl Begun {
    async fn new(client: &Client, name: &str) -> Result<Self> {
        let run = run_named(name);
        let body = greedy_body(&run.prompt_ids, run.output_ids.len());
        let headers = [("x-baton-stats", "1")];
        let mut stream = client.stream_with("/v1/completions", &body, &headers).await?;
        let mut found = Vec::new();
        // The prefill node samples token 0, the decode node token 1.
        while found.len() < 2 {
            found.extend(stream.next().await?.expect("the stream goes on").token_ids());
        }
        Ok(Self { run, stream, found })
    }

    /// Reads to the end. The tokens must be the golden ones.
    async fn end(mut self) -> Result<Completion> {
        let rest = self.stream.completion().await?;
        self.found.extend(&rest.token_ids);
        assert_eq!(self.found, self.run.output_ids, "{}", self.run.name);
        Ok(rest)
    }
}

/// Returns one running request on each node; the first is on the node with the returned index.
async fn one_request_on_each(cluster: &Cluster, client: &Client) -> Result<(usize, Begun, Begun)> {
    let first = Begun::new(client, "chat_template").await?;
    let node = busy_node(&cluster.decode).await?;
    let second = Begun::new(client, "code").await?;
    let other = std::slice::from_ref(&cluster.decode[1 - node]);
    busy_node(other).await.context("both requests are on one node")?;
    ensure!(cluster.decode[node].is_busy().await?, "the first request is over already");
    Ok((node, first, second))
}

/// Repeats a recovery and asserts the median duration: on a shared machine a single step may take
/// seconds.
async fn median_recovery_is_in_time(
    what: &str,
    recovery: impl AsyncFn() -> Result<Duration>,
) -> Result<()> {
    let mut took = Vec::new();
    while took.len() < 3 {
        took.push(recovery().await?);
    }
    assert_median(what, &took, RECOVERY_MAX);
    Ok(())
}

#[tokio::test]
async fn killed_decode_node_loses_no_token() -> Result<()> {
    median_recovery_is_in_time("complete after the decode node was killed", decode_node_killed)
        .await
}

async fn decode_node_killed() -> Result<Duration> {
    let (mut cluster, client) =
        Cluster::start_with_client(ClusterSpec::smollm2().nodes(1, 2)).await?;
    let (victim, hit, other) = one_request_on_each(&cluster, &client).await?;
    let names = [cluster.decode[victim].name.clone(), cluster.decode[1 - victim].name.clone()];
    cluster.decode[victim].kill();
    let killed = Instant::now();
    let hit = async { hit.end().await.map(|hit| (hit, killed.elapsed())) };
    let ((hit, complete), other) = tokio::try_join!(hit, other.end())?;
    println!("paused for {:?} by the kill, complete {complete:?} after it", hit.longest_pause);
    // The killed node's request continued on the other node. The other node's request was not
    // moved.
    assert!(hit.attempts >= 2 && hit.decode_node == names[1], "{names:?}: {hit:?}");
    assert!(other.attempts == 1 && other.decode_node == names[1], "{names:?}: {other:?}");
    // The cluster serves with the remaining node, and with the restarted node afterwards.
    cluster.wait_nodes(1, 1).await?;
    let run = longest();
    assert_eq!(client.greedy(&run.prompt_ids, 8).await?, run.output_ids[..8]);
    cluster.restart_decode(victim)?;
    cluster.wait_nodes(1, 2).await?;
    cluster.stop()?;
    Ok(complete)
}

/// With fluid roles the prefill node decodes while there is no decode node, and back.
#[tokio::test]
async fn fluid_cluster_loses_no_token_with_its_only_decode_or_prefill_node() -> Result<()> {
    let spec = ClusterSpec::smollm2().set("BATON_ROUTER_ROLES", "fluid");
    let (mut cluster, client) = Cluster::start_with_client(spec).await?;
    let hit = Begun::new(&client, "chat_template").await?;
    cluster.decode[0].kill();
    assert_eq!(hit.end().await?.decode_node, cluster.prefill[0].name);
    cluster.wait_nodes(1, 0).await?;
    let run = longest();
    assert_eq!(client.greedy(&run.prompt_ids, 8).await?, run.output_ids[..8]);
    cluster.restart_decode(0)?;
    cluster.wait_nodes(1, 1).await?;
    let hit = Begun::new(&client, "code").await?;
    cluster.prefill[0].kill();
    assert_eq!(hit.end().await?.decode_node, cluster.decode[0].name);
    cluster.restart_prefill(0)?;
    cluster.stop()
}

/// The router cannot observe a node with another secret. It logs the reason and uses the other
/// nodes.
#[tokio::test]
async fn node_with_another_secret_is_named_in_the_log_and_loses_no_token() -> Result<()> {
    let cluster = Cluster::start(ClusterSpec::smollm2().nodes(0, 1)).await?;
    let folder = tempfile::tempdir()?;
    let start = |name: &str, settings: &[(&str, &str)]| {
        let settings = settings.iter().map(|(key, value)| ((*key).into(), (*value).into()));
        Service::start(folder.path(), name, &format!("baton-{name}"), &settings.collect())
    };
    let model = smollm2().display().to_string();
    let other = SECRET.chars().rev().collect::<String>();
    let prefill = start(
        "prefill-node",
        &[
            ("BATON_MODEL_PATH", &model),
            ("BATON_MODEL_DTYPE", "f32"),
            ("BATON_CLUSTER_SECRET", &other),
            ("BATON_NODE_GRPC", "127.0.0.1:0"),
            ("BATON_NODE_KV_MEMORY", "64MiB"),
        ],
    )?;
    let router = start(
        "router",
        &[
            ("BATON_MODEL_PATH", &model),
            ("BATON_ROUTER_HTTP", "127.0.0.1:0"),
            ("BATON_ROUTER_GRPC", "127.0.0.1:0"),
            ("BATON_ROUTER_ADMIN", "127.0.0.1:0"),
            ("BATON_ROUTER_DISAGGREGATE", "always"),
            ("BATON_CLUSTER_PREFILL", &prefill.ready.grpc),
            ("BATON_CLUSTER_DECODE", &cluster.decode[0].ready.grpc),
        ],
    )?;
    let client = Client::new(format!("http://{}", router.ready.http));
    let is_named = || {
        router.log().lines().any(|line| {
            line.contains(&prefill.ready.grpc) && line.contains("another cluster.secret")
        })
    };
    let deadline = Instant::now() + DEADLINE;
    while !is_named() || client.get_json("/health").await?.1["decode_nodes"] != 1 {
        ensure!(Instant::now() < deadline, "{}", router.log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for name in ["code", "long_600"] {
        let run = run_named(name);
        let answer = client.complete(&greedy_body(&run.prompt_ids, run.output_ids.len())).await?;
        assert_eq!(answer.token_ids, run.output_ids, "{name}");
        assert_eq!((answer.attempts, answer.prefill_node.as_str()), (1, ""), "{name}");
    }
    assert_eq!(client.get_json("/health").await?.1["prefill_nodes"], 0);
    cluster.stop()
}

#[tokio::test]
async fn prefill_node_killed_during_prefill_is_replaced() -> Result<()> {
    median_recovery_is_in_time("complete after the prefill node was killed", prefill_node_killed)
        .await
}

async fn prefill_node_killed() -> Result<Duration> {
    // Small chunks make prefill long enough for a kill in its middle; bf16 leaves time to repeat it
    // within the limit.
    let mut spec = ClusterSpec::smollm2().nodes(2, 2).set("BATON_NODE_CHUNK_TOKENS", 32);
    spec.dtype = "bf16";
    let (mut cluster, client) = Cluster::start_with_client(spec).await?;
    let runs = golden().runs;
    let (run, other) = (longest(), &runs[0]);
    let mut salted = greedy_body(&run.prompt_ids, 16);
    salted["cache_salt"] = json!("found nowhere else");
    let expected = client.stream("/v1/completions", &salted).await?.token_ids().await?;
    let expected_elsewhere = client.greedy(&other.prompt_ids, 48).await?;
    // This prompt is cached, so only the request's decode node works.
    let mut elsewhere =
        client.stream("/v1/completions", &greedy_body(&other.prompt_ids, 48)).await?;
    let first = elsewhere.next().await?.expect("the stream goes on").token_ids();

    let asked = tokio::spawn({
        let (client, body) = (client.clone(), greedy_body(&run.prompt_ids, 16));
        async move {
            let headers = [("x-baton-stats", "1")];
            client.stream_with("/v1/completions", &body, &headers).await?.all().await
        }
    });
    let busy = busy_node(&cluster.prefill).await?;
    cluster.prefill[busy].kill();
    let killed = Instant::now();
    let events = asked.await??;
    let first_after = events.first().expect("there are events").after;
    let complete = killed.elapsed();
    println!("killed, complete {complete:?} later; first token after {first_after:?}");
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

    // Without a prefill node the cluster is degraded: decode nodes prefill.
    cluster.prefill[1 - busy].kill();
    cluster.wait_nodes(0, 2).await?;
    let (status, health) = client.get_json("/health").await?;
    assert_eq!((status.as_u16(), health["degraded"].as_bool()), (200, Some(true)), "{health}");
    assert_eq!(client.greedy(&other.prompt_ids, 48).await?, expected_elsewhere);
    Ok(complete)
}

#[tokio::test]
async fn requests_without_a_decode_node_fail_once_at_their_deadline() -> Result<()> {
    let spec = ClusterSpec::smollm2().set("BATON_ROUTER_TIMEOUT", "15s");
    let (mut cluster, client) = Cluster::start_with_client(spec).await?;
    let run = longest();
    let mut stream = client.stream("/v1/completions", &greedy_body(&run.prompt_ids, 48)).await?;
    let mut tokens = 0;
    while tokens < 3 {
        tokens += stream.next().await?.expect("the stream goes on").token_ids().len();
    }
    cluster.decode[0].kill();
    let mut last = None;
    while let Some(event) = stream.next().await? {
        assert!(last.is_none(), "{last:?} was not the last: {event:?}");
        assert!(!event.is_done(), "a failed answer ends with [DONE]");
        last = Some(event.json()["error"].clone()).filter(|error| !error.is_null());
    }
    let error = last.context("no error")?;
    assert_eq!(error["code"], "no_decode_node", "{error}");
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
async fn disconnected_client_frees_its_blocks_within_a_second() -> Result<()> {
    let (cluster, client) = Cluster::start_with_client(ClusterSpec::smollm2()).await?;
    let run = longest();
    let mut took = Vec::new();
    while took.len() < 5 {
        let mut body = greedy_body(&run.prompt_ids, 2000);
        // Each choice has blocks of its own.
        body["n"] = json!([1, 4][took.len() % 2]);
        let mut stream = client.stream("/v1/completions", &body).await?;
        let mut tokens = 0;
        while tokens < 3 {
            tokens += stream.next().await?.expect("the stream goes on").token_ids().len();
        }
        let allocated = Instant::now();
        while held_blocks(&cluster).await? == 0.0 {
            ensure!(allocated.elapsed() < DEADLINE, "no block is allocated");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        drop(stream);
        let left = Instant::now();
        while held_blocks(&cluster).await? > 0.0 {
            ensure!(left.elapsed() < DEADLINE, "blocks are still allocated");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        took.push(left.elapsed());
    }
    assert_median("blocks free after the client left", &took, Duration::from_secs(1));
    cluster.stop()
}

/// Returns the number of used blocks on all nodes, from their metrics.
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
async fn draining_node_finishes_its_requests() -> Result<()> {
    let (mut cluster, client) =
        Cluster::start_with_client(ClusterSpec::smollm2().nodes(1, 2)).await?;
    let (leaving, first, second) = one_request_on_each(&cluster, &client).await?;
    let names = [cluster.decode[leaving].name.clone(), cluster.decode[1 - leaving].name.clone()];
    cluster.decode[leaving].terminate_signal();
    let (first, second) = tokio::try_join!(first.end(), second.end())?;
    // The first request ended soon, or it moved.
    let ends = [(1, &names[0]), (2, &names[1])];
    assert!(ends.contains(&(first.attempts, &first.decode_node)), "{first:?}");
    assert_eq!((second.attempts, &second.decode_node), (1, &names[1]), "{second:?}");
    assert_eq!(cluster.decode[leaving].wait_end(Duration::from_secs(10))?, Some(0));
    let run = longest();
    let next = client.complete(&greedy_body(&run.prompt_ids, 8)).await?;
    assert_eq!(next.token_ids, run.output_ids[..8]);
    assert_eq!(next.decode_node, names[1], "{next:?}");
    Ok(())
}

/// An answer that would outlast the drain continues on another node before the drained node aborts
/// it.
#[tokio::test]
async fn answer_longer_than_the_drain_migrates_and_loses_no_token() -> Result<()> {
    let spec = ClusterSpec::smollm2().nodes(0, 2).set("BATON_NODE_DRAIN_TIMEOUT", "2s");
    let (mut cluster, client) = Cluster::start_with_client(spec).await?;
    let body = greedy_body(&run_named("code").prompt_ids, 500);
    let expected = client.complete(&body).await?.token_ids;
    let headers = [("x-baton-stats", "1")];
    let mut stream = client.stream_with("/v1/completions", &body, &headers).await?;
    let mut found = Vec::new();
    while found.len() < 20 {
        found.extend(stream.next().await?.expect("the stream goes on").token_ids());
    }
    let leaving = busy_node(&cluster.decode).await?;
    cluster.decode[leaving].terminate_signal();
    let rest = stream.completion().await?;
    found.extend(&rest.token_ids);
    assert_eq!(found, expected);
    println!("paused for {:?}", rest.longest_pause);
    assert_eq!((rest.attempts, &rest.decode_node), (2, &cluster.decode[1 - leaving].name));
    assert_eq!(client.metric("baton_attempts_total", "outcome=\"migrated\"").await?, 1.0);
    assert_eq!(cluster.decode[leaving].wait_end(Duration::from_secs(10))?, Some(0));
    Ok(())
}

/// Recomputes less than a block of each sequence.
#[tokio::test]
async fn running_sequences_of_a_draining_node_move_with_their_kv() -> Result<()> {
    const STREAMS: usize = 8;
    const TOKENS: usize = 300;
    let (mut cluster, client) =
        Cluster::start_with_client(ClusterSpec::smollm2().nodes(0, 2)).await?;
    let prompt = &run_named("code").prompt_ids;
    let expected = client.complete(&greedy_body(prompt, TOKENS)).await?.token_ids;
    let headers = [("x-baton-stats", "1")];
    let mut streams = Vec::new();
    for index in 0..STREAMS {
        // No node has cached anything.
        let body = salted_body(prompt, TOKENS, &index.to_string());
        streams.push((client.stream_with("/v1/completions", &body, &headers).await?, Vec::new()));
    }
    for (stream, found) in &mut streams {
        while found.len() < 20 {
            found.extend(stream.next().await?.expect("the stream goes on").token_ids());
        }
    }
    let leaving = busy_node(&cluster.decode).await?;
    cluster.decode[leaving].terminate_signal();
    let drained = Instant::now();
    let ends = streams.into_iter().map(async |(mut stream, mut found)| {
        let rest = stream.completion().await?;
        found.extend(&rest.token_ids);
        anyhow::Ok((found, rest))
    });
    let (ends, exit) = tokio::join!(futures_util::future::try_join_all(ends), async {
        while cluster.decode[leaving].is_running() && drained.elapsed() < DEADLINE {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        drained.elapsed()
    });
    let mut moved = 0;
    for (found, rest) in ends? {
        assert_eq!(found, expected);
        assert!(rest.attempts <= 2, "{rest:?}");
        moved += rest.attempts - 1;
        println!("longest pause {:?}, attempts {}", rest.longest_pause, rest.attempts);
    }
    let count = async |name, label| client.metric(name, label).await;
    let recomputed = count("baton_moved_tokens_total", "kv=\"recomputed\"").await?;
    let sent = count("baton_moved_tokens_total", "kv=\"sent\"").await?;
    println!("exit {exit:?}, {moved} moved, {sent} tokens sent, {recomputed} recomputed");
    assert!(moved > 0);
    assert_eq!(count("baton_moved_sequences_total", "").await?, moved as f64);
    assert!(recomputed < 16.0 * moved as f64, "{recomputed} tokens of {moved} sequences");
    assert_eq!(cluster.decode[leaving].wait_end(Duration::from_secs(10))?, Some(0));
    Ok(())
}

#[tokio::test]
async fn stopped_prefill_node_delays_its_requests_by_at_most_the_lease() -> Result<()> {
    let (cluster, client) = Cluster::start_with_client(ClusterSpec::smollm2().nodes(1, 1)).await?;
    let run = longest();
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
    // The decode node then prefills the prompt itself, on a CPU shared by both nodes.
    let allowed = 2 * unfrozen + 3 * LEASE;
    ensure!(frozen.elapsed() < allowed, "took {:?}, allowed {allowed:?}", frozen.elapsed());
    cluster.prefill[0].continue_signal();
    cluster.wait_nodes(1, 1).await?;
    cluster.stop()
}

#[tokio::test]
async fn overload_is_rejected_and_queues_stay_bounded() -> Result<()> {
    let spec = ClusterSpec::smollm2()
        .set("BATON_ROUTER_REQUESTS_MAX", 8)
        .set("BATON_ROUTER_WAITING_MAX", 4);
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let run = longest();
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

/// Nodes have one slot and no queue. The router holds requests back until a node has room, and
/// every request completes.
#[tokio::test]
async fn requests_wait_for_a_free_slot_without_losing_a_token() -> Result<()> {
    let spec = ClusterSpec::smollm2()
        .nodes(1, 2)
        .set("BATON_NODE_SLOTS", 1)
        .set("BATON_NODE_WAITING_MAX", 0)
        .set("BATON_ROUTER_WAITING_TIMEOUT", "110s");
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let runs: Vec<GoldenRun> =
        ["code", "chat_template"].into_iter().cycle().take(6).map(run_named).collect();
    let answers = runs.iter().enumerate().map(|(index, run)| {
        let mut body = greedy_body(&run.prompt_ids, run.output_ids.len());
        // The salt prevents prefix-cache hits.
        body["cache_salt"] = json!(index.to_string());
        let client = client.clone();
        async move { client.complete(&body).await }
    });
    let answers = futures_util::future::try_join_all(answers).await?;
    for (run, answer) in runs.iter().zip(&answers) {
        assert_eq!(answer.token_ids, run.output_ids, "{}", run.name);
    }
    cluster.stop()
}

/// API of a client. Dropping the request disconnects the client.
#[derive(Clone, Copy, Debug)]
enum Api {
    Http,
    Grpc,
}

/// A client that disconnects before the first token, over HTTP or gRPC, leaves no block allocated.
#[tokio::test]
async fn client_disconnected_before_the_first_token_frees_all_blocks_within_a_second() -> Result<()>
{
    // Small chunks: a step takes less than a second, and prefill takes many steps.
    let spec = ClusterSpec::smollm2().set("BATON_NODE_CHUNK_TOKENS", 16);
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let mut loads = Vec::new();
    for node in cluster.prefill.iter().chain(&cluster.decode) {
        loads.push(Load::of(node).await?);
    }
    for way in [Api::Http, Api::Grpc] {
        let (mut tries, mut took) = (0, Vec::new());
        while took.len() < 5 {
            tries += 1;
            ensure!(tries < 20, "{way:?}: most requests were answered before they were cancelled");
            let asked = ask(&cluster, way, &format!("{way:?} {tries}")).await?;
            // The prefill node is prefilling and the decode node has reserved blocks.
            let begun = loads[0].until(|load| load.blocks_held > 0).await.is_ok()
                && loads[1].until(|load| load.blocks_reserved > 0).await.is_ok();
            let begun = begun && !asked.is_finished();
            let left = Instant::now();
            asked.abort();
            let answered = asked.await.is_ok();
            for load in &mut loads {
                load.until(|load| {
                    load.running + load.waiting + load.blocks_held + load.blocks_reserved == 0
                })
                .await?;
            }
            // The next try starts when both nodes are idle.
            if !begun || answered {
                continue;
            }
            took.push(left.elapsed());
        }
        assert_median(
            &format!("blocks free after a {way:?} client left"),
            &took,
            Duration::from_secs(1),
        );
    }
    let run = longest();
    assert_eq!(client.greedy(&run.prompt_ids, 8).await?, run.output_ids[..8]);
    cluster.stop()
}

/// Sends a long uncached prompt. The task ends with the first token; aborting the task disconnects
/// the client.
async fn ask(cluster: &Cluster, way: Api, salt: &str) -> Result<tokio::task::JoinHandle<()>> {
    let prompt = longest().prompt_ids;
    Ok(match way {
        Api::Http => {
            // A separate client: its connection closes with it.
            let client = Client::new(cluster.http());
            let body = salted_body(&prompt, 16, salt);
            tokio::spawn(async move {
                if let Ok(mut stream) = client.stream("/v1/completions", &body).await {
                    let _ = stream.next().await;
                }
            })
        }
        Api::Grpc => {
            let mut client = InferenceClient::connect(cluster.grpc()).await?;
            let request = GenerateRequest {
                model: String::new(),
                prompt: Some(Prompt::TokenIds(TokenIds { ids: prompt })),
                options: Some(GenerateOptions {
                    max_tokens: Some(16),
                    cache_salt: salt.to_owned(),
                    ..Default::default()
                }),
                client_request_id: String::new(),
            };
            tokio::spawn(async move {
                if let Ok(stream) = client.generate(request).await {
                    let _ = stream.into_inner().message().await;
                }
            })
        }
    })
}

/// Load of a node, as a router observes it.
struct Load {
    events: tonic::Streaming<ObserveEvent>,
    last: Option<NodeLoad>,
}

impl Load {
    async fn of(node: &Service) -> Result<Self> {
        let mut client = node_client(&node.ready.grpc, None)?;
        Ok(Self { events: client.observe(ObserveRequest {}).await?.into_inner(), last: None })
    }

    async fn until(&mut self, wanted: impl Fn(&NodeLoad) -> bool) -> Result<()> {
        while !self.last.as_ref().is_some_and(&wanted) {
            let event = tokio::time::timeout(DEADLINE, self.events.message()).await??;
            self.last = match event.context("the node is gone")?.event {
                Some(Observed::Snapshot(snapshot)) => snapshot.load,
                Some(Observed::Delta(delta)) => delta.load.or(self.last),
                None => self.last,
            };
        }
        Ok(())
    }
}
