//! Whole clusters give the reference's tokens, however the work is spread.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use integration_tests::{
    client::{Client, DEADLINE, greedy_body},
    cluster::{Cluster, ClusterSpec},
    golden::{GoldenRun, golden},
};
use serde_json::{Value, json};

async fn client(spec: ClusterSpec) -> Result<(Cluster, Client)> {
    let cluster = Cluster::start(spec).await?;
    let client = Client::new(cluster.http());
    Ok((cluster, client))
}

/// All runs one after another.
async fn check_each(client: &Client) -> Result<()> {
    for run in golden().runs {
        check(client, &run).await?;
    }
    Ok(())
}

async fn check(client: &Client, run: &GoldenRun) -> Result<()> {
    let found = client.greedy(&run.prompt_ids, run.output_ids.len()).await?;
    assert_eq!(found, run.output_ids, "{}", run.name);
    Ok(())
}

/// The output's token ids, and the last event, which has usage and figures.
async fn answer_of(
    client: &Client,
    prompt_ids: &[u32],
    tokens: usize,
) -> Result<(Vec<u32>, Value)> {
    let mut stream = client
        .stream_with(
            "/v1/completions",
            &greedy_body(prompt_ids, tokens),
            &[("x-baton-figures", "1")],
        )
        .await?;
    let events = stream.all().await?;
    let last = events
        .iter()
        .filter(|event| !event.is_done())
        .map(integration_tests::client::Event::json)
        .rfind(|event| !event["usage"].is_null())
        .expect("usage was asked for");
    Ok((events.iter().flat_map(|event| event.token_ids()).collect(), last))
}

#[tokio::test]
async fn one_prefill_and_one_decode_node() -> Result<()> {
    let (cluster, client) = client(ClusterSpec::smollm2()).await?;
    check_each(&client).await?;
    // The answer really crossed: the decode node received KV.
    let metrics = Client::new(format!("http://{}", cluster.decode[0].ready.metrics));
    let text = String::from_utf8(metrics.get("/metrics").await?.body.to_vec())?;
    let received = metric_sum(&text, "baton_kv_transfer_bytes_total");
    assert!(received > 0.0, "no KV was received:\n{text}");
    cluster.stop()
}

fn metric_sum(text: &str, name: &str) -> f64 {
    text.lines()
        .filter(|line| line.starts_with(name))
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

#[tokio::test]
async fn text_and_token_prompts_give_the_reference_text() -> Result<()> {
    let (cluster, client) = client(ClusterSpec::smollm2()).await?;
    for run in golden().runs {
        let body = json!({"prompt": run.prompt, "max_tokens": run.output_ids.len(),
            "temperature": 0, "ignore_eos": true, "skip_special_tokens": false});
        let answer = client.post("/v1/completions", &body).await?;
        assert_eq!(answer.status, 200, "{:?}", answer.json());
        assert_eq!(answer.json()["choices"][0]["text"], run.output_text, "{}", run.name);
        assert_eq!(answer.json()["usage"]["prompt_tokens"], run.prompt_ids.len());
    }
    cluster.stop()
}

#[tokio::test]
async fn prefill_in_chunks_of_16() -> Result<()> {
    let spec = ClusterSpec::smollm2().set_prefill("BATON_NODE_CHUNK_TOKENS", 16);
    let (cluster, client) = client(spec).await?;
    check_each(&client).await?;
    cluster.stop()
}

#[tokio::test]
async fn all_prompts_at_once() -> Result<()> {
    let (cluster, client) = client(ClusterSpec::smollm2()).await?;
    let runs = golden().runs;
    let answers = futures_util::future::join_all(
        runs.iter().map(|run| client.greedy(&run.prompt_ids, run.output_ids.len())),
    );
    for (run, found) in runs.iter().zip(answers.await) {
        assert_eq!(found?, run.output_ids, "{}", run.name);
    }
    cluster.stop()
}

/// The longest prompt of the reference, so that there is something to hit.
fn longest() -> GoldenRun {
    golden().runs.into_iter().max_by_key(|run| run.prompt_ids.len()).expect("there are runs")
}

/// Half of the prompt first, then the whole: something is found, and the rest still travels.
async fn check_prefix_hits(spec: ClusterSpec, name: &str) -> Result<()> {
    let (cluster, client) = client(spec).await?;
    let run = longest();
    client.greedy(&run.prompt_ids[..run.prompt_ids.len() / 2], 2).await?;
    let (found, last) = answer_of(&client, &run.prompt_ids, run.output_ids.len()).await?;
    assert_eq!(found, run.output_ids, "hits on {name}");
    let cached = last["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    assert!(cached > 0, "hits on {name}: {last}");
    assert!(last["baton"]["kv_bytes"].as_u64().unwrap_or(0) > 0, "hits on {name}: {last}");
    cluster.stop()
}

#[tokio::test]
async fn prefix_hits_on_the_prefill_node() -> Result<()> {
    let spec = ClusterSpec::smollm2().set_decode("BATON_NODE_PREFIX_CACHE", false);
    check_prefix_hits(spec, "the prefill node").await
}

#[tokio::test]
async fn prefix_hits_on_the_decode_node() -> Result<()> {
    let spec = ClusterSpec::smollm2().set_prefill("BATON_NODE_PREFIX_CACHE", false);
    check_prefix_hits(spec, "the decode node").await
}

#[tokio::test]
async fn prefix_hits_on_both() -> Result<()> {
    check_prefix_hits(ClusterSpec::smollm2(), "both").await
}

#[tokio::test]
async fn a_prompt_that_the_decode_node_knows_needs_no_prefill_node() -> Result<()> {
    let (cluster, client) = client(ClusterSpec::smollm2()).await?;
    let run = longest();
    for round in 0..2 {
        let (found, last) = answer_of(&client, &run.prompt_ids, run.output_ids.len()).await?;
        assert_eq!(found, run.output_ids, "round {round}");
        let moved = last["baton"]["kv_bytes"].as_u64().unwrap_or(0);
        assert_eq!(moved > 0, round == 0, "round {round}: {last}");
    }
    cluster.stop()
}

#[tokio::test]
async fn three_prefill_and_two_decode_nodes() -> Result<()> {
    let (cluster, client) = client(ClusterSpec::smollm2().nodes(3, 2)).await?;
    let runs = golden().runs;
    for _ in 0..2 {
        let answers = futures_util::future::join_all(
            runs.iter().map(|run| client.greedy(&run.prompt_ids, run.output_ids.len())),
        );
        for (run, found) in runs.iter().zip(answers.await) {
            assert_eq!(found?, run.output_ids, "{}", run.name);
        }
    }
    cluster.stop()
}

#[tokio::test]
async fn a_forced_retry_at_token_0_1_and_20() -> Result<()> {
    let run = longest();
    for kill_after in [0, 1, 20] {
        let (mut cluster, client) = client(ClusterSpec::smollm2().nodes(1, 2)).await?;
        let mut stream = client
            .stream_with(
                "/v1/completions",
                &greedy_body(&run.prompt_ids, run.output_ids.len()),
                &[("x-baton-figures", "1")],
            )
            .await?;
        let mut found = Vec::new();
        let mut attempts = 0;
        let mut killed = false;
        while let Some(event) = stream.next().await? {
            found.extend(event.token_ids());
            if !killed && found.len() > kill_after {
                killed = true;
                let serving = serving_decode_node(&cluster).await?;
                cluster.decode[serving].kill();
            }
            if !event.is_done()
                && let Some(count) = event.json()["baton"]["attempts"].as_u64()
            {
                attempts = count;
            }
        }
        assert_eq!(found, run.output_ids, "killed after token {kill_after}");
        assert!(attempts >= 2, "killed after token {kill_after}: {attempts} attempts");
    }
    Ok(())
}

/// Index of the decode node that runs something.
async fn serving_decode_node(cluster: &Cluster) -> Result<usize> {
    let deadline = Instant::now() + DEADLINE;
    while Instant::now() < deadline {
        for (index, node) in cluster.decode.iter().enumerate() {
            let metrics = Client::new(format!("http://{}", node.ready.metrics));
            let text = String::from_utf8(metrics.get("/metrics").await?.body.to_vec())?;
            if metric_sum(&text, "vllm:num_requests_running") > 0.0
                || metric_sum(&text, "vllm:num_requests_waiting") > 0.0
            {
                return Ok(index);
            }
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    bail!("no decode node runs anything")
}
