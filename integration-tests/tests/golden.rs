//! Whole clusters generate the golden tokens in every configuration: of all layers of SmolLM2 in
//! every number format, and of eight of them in every composition.

use std::collections::BTreeSet;

use anyhow::Result;
use integration_tests::{
    client::{Client, greedy_body, salted_body},
    cluster::{Cluster, ClusterSpec, busy_node},
    golden::{GoldenRun, golden, longest, whole_golden},
};
use serde_json::json;

async fn client(spec: ClusterSpec) -> Result<(Cluster, Client)> {
    let cluster = Cluster::start(spec).await?;
    let client = Client::new(cluster.http());
    Ok((cluster, client))
}

/// Checks runs one after the other.
async fn check_each(client: &Client, runs: Vec<GoldenRun>) -> Result<()> {
    for run in runs {
        check(client, &run).await?;
    }
    Ok(())
}

async fn check(client: &Client, run: &GoldenRun) -> Result<()> {
    let found = client.greedy(&run.prompt_ids, run.output_ids.len()).await?;
    assert_eq!(found, run.output_ids, "{}", run.name);
    Ok(())
}

#[tokio::test]
async fn one_prefill_and_one_decode_node() -> Result<()> {
    let (cluster, client) = client(ClusterSpec::whole_smollm2()).await?;
    check_each(&client, whole_golden().runs).await?;
    // The decode node must have received KV.
    let received = cluster.decode[0].metric("baton_kv_transfer_bytes_total").await?;
    assert!(received > 0.0, "no KV was received");
    cluster.stop()
}

/// Bound of the logit error of bf16.
const CERTAIN_MARGIN: f32 = 0.15;
/// Minimum number of certain tokens at the start of each golden output, so that the test compares
/// something.
const CERTAIN_TOKENS_MIN: usize = 6;
const BLOCK_TOKENS: u64 = 16;
/// Layers of the whole and of the cut model.
const LAYERS: [u64; 2] = [30, 8];

/// Returns the bytes of a block in bf16: K and V of 3 heads of 64 elements in each layer.
const fn bf16_block_bytes(layers: u64) -> u64 {
    BLOCK_TOKENS * 2 * layers * 3 * 64 * 2
}

#[tokio::test]
async fn bf16_matches_up_to_the_first_uncertain_token() -> Result<()> {
    let (cluster, client) =
        client(ClusterSpec { dtype: "bf16", ..ClusterSpec::whole_smollm2() }).await?;
    for run in whole_golden().runs {
        let sure = run.margins.iter().take_while(|margin| **margin >= CERTAIN_MARGIN).count();
        assert!(sure >= CERTAIN_TOKENS_MIN, "{}: only {sure} tokens are certain", run.name);
        let answer = client.complete(&greedy_body(&run.prompt_ids, run.output_ids.len())).await?;
        assert_eq!(answer.token_ids[..sure], run.output_ids[..sure], "{}", run.name);
        assert_eq!(answer.token_ids.len(), run.output_ids.len(), "{}", run.name);
        if run.name == whole_golden().longest().name {
            let blocks = (run.prompt_ids.len() as u64).div_ceil(BLOCK_TOKENS);
            assert_eq!(answer.kv_bytes, blocks * bf16_block_bytes(LAYERS[0]), "{answer:?}");
        }
    }
    cluster.stop()
}

/// Bound of the logit error of 8-bit weights.
const Q8_CERTAIN_MARGIN: f32 = 1.0;

/// Returns the outputs of one node that computes all requests.
async fn of_one_node(spec: ClusterSpec, runs: &[GoldenRun]) -> Result<Vec<Vec<u32>>> {
    let (alone, engine) = client(spec.nodes(0, 1)).await?;
    let mut outputs = Vec::new();
    for run in runs {
        outputs.push(engine.greedy(&run.prompt_ids, run.output_ids.len()).await?);
    }
    alone.stop()?;
    Ok(outputs)
}

#[tokio::test]
async fn q8_cluster_matches_a_single_engine() -> Result<()> {
    let runs = whole_golden().runs;
    let spec = || ClusterSpec { dtype: "q8", ..ClusterSpec::whole_smollm2() };
    let expected = of_one_node(spec(), &runs).await?;
    let (cluster, client) = client(spec().nodes(1, 1)).await?;
    for (run, expected) in runs.iter().zip(&expected) {
        let answer = client.complete(&greedy_body(&run.prompt_ids, run.output_ids.len())).await?;
        assert_eq!(&answer.token_ids, expected, "{}", run.name);
        let sure = run.margins.iter().take_while(|margin| **margin >= Q8_CERTAIN_MARGIN).count();
        assert_eq!(answer.token_ids[..sure], run.output_ids[..sure], "{}", run.name);
        if run.name == whole_golden().longest().name {
            // KV is bf16, and all blocks were transferred.
            let blocks = (run.prompt_ids.len() as u64).div_ceil(BLOCK_TOKENS);
            assert_eq!(answer.kv_bytes, blocks * bf16_block_bytes(LAYERS[0]), "{answer:?}");
        }
    }
    for node in cluster.prefill.iter().chain(&cluster.decode) {
        node.wait_logged(&["dtype=q8"]).await?;
    }
    cluster.stop()
}

#[tokio::test]
async fn cluster_with_kv_in_fp8_matches_a_single_engine() -> Result<()> {
    let runs = golden().runs;
    let spec = || {
        let spec = ClusterSpec { dtype: "bf16", ..ClusterSpec::smollm2() };
        spec.set("BATON_MODEL_KV_DTYPE", "fp8").set_prefill("BATON_NODE_CHUNK_TOKENS", 48)
    };
    let expected = of_one_node(spec(), &runs).await?;
    let (cluster, client) = client(spec().nodes(1, 1)).await?;
    for (run, expected) in runs.iter().zip(&expected) {
        let answer = client.complete(&greedy_body(&run.prompt_ids, run.output_ids.len())).await?;
        assert_eq!(&answer.token_ids, expected, "{}", run.name);
        if run.name == golden().longest().name {
            // A token of a head has 64 elements and a scale, one byte each.
            let blocks = (run.prompt_ids.len() as u64).div_ceil(BLOCK_TOKENS);
            let block_bytes = BLOCK_TOKENS * 2 * LAYERS[1] * 3 * (64 + 1);
            assert_eq!(answer.kv_bytes, blocks * block_bytes, "{answer:?}");
        }
    }
    cluster.stop()
}

#[tokio::test]
async fn text_and_token_prompts_give_the_reference_text() -> Result<()> {
    let (cluster, client) = client(ClusterSpec::whole_smollm2()).await?;
    for run in whole_golden().runs {
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
async fn chunked_prefill_of_16_gives_the_golden_tokens() -> Result<()> {
    let spec = ClusterSpec::smollm2().set_prefill("BATON_NODE_CHUNK_TOKENS", 16);
    let (cluster, client) = client(spec).await?;
    check_each(&client, golden().runs).await?;
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

/// Sends the first half of the prompt, then the whole prompt. The named nodes find the first half
/// in their caches, and only blocks missing on the decode node are transferred.
async fn check_prefix_hits(spec: ClusterSpec, on_prefill: bool, on_decode: bool) -> Result<()> {
    let (cluster, client) = client(spec).await?;
    let run = longest();
    let half = run.prompt_ids.len() / 2 / BLOCK_TOKENS as usize * BLOCK_TOKENS as usize;
    // One token more than the cached blocks, because a cache hit leaves one token to compute.
    client.greedy(&run.prompt_ids[..half + 1], 2).await?;
    let hits = "baton_prefix_cache_hits_total";
    let before = [cluster.prefill[0].metric(hits).await?, cluster.decode[0].metric(hits).await?];
    let answer = client.complete(&greedy_body(&run.prompt_ids, run.output_ids.len())).await?;
    assert_eq!(answer.token_ids, run.output_ids, "{answer:?}");
    assert_eq!((answer.cached_tokens, answer.attempts), (half as u64, 1), "{answer:?}");
    // Blocks cached on the decode node are not transferred.
    let found = if on_decode { half as u64 / BLOCK_TOKENS } else { 0 };
    let crossed = (run.prompt_ids.len() as u64).div_ceil(BLOCK_TOKENS) - found;
    assert_eq!(answer.kv_bytes, crossed * 2 * bf16_block_bytes(LAYERS[1]), "{answer:?}");
    // Each node counts its own cache hits.
    for (node, before, hit) in
        [(&cluster.prefill[0], before[0], on_prefill), (&cluster.decode[0], before[1], on_decode)]
    {
        let found = node.metric(hits).await? - before;
        assert_eq!(found, if hit { half as f64 } else { 0.0 }, "{}", node.name);
    }
    cluster.stop()
}

#[tokio::test]
async fn prefix_hits_on_the_prefill_node() -> Result<()> {
    let spec = ClusterSpec::smollm2().set_decode("BATON_NODE_PREFIX_CACHE", false);
    check_prefix_hits(spec, true, false).await
}

#[tokio::test]
async fn prefix_hits_on_the_decode_node() -> Result<()> {
    let spec = ClusterSpec::smollm2().set_prefill("BATON_NODE_PREFIX_CACHE", false);
    check_prefix_hits(spec, false, true).await
}

#[tokio::test]
async fn prefix_hits_on_both() -> Result<()> {
    check_prefix_hits(ClusterSpec::smollm2(), true, true).await
}

#[tokio::test]
async fn prompt_cached_on_the_decode_node_needs_no_prefill_node() -> Result<()> {
    let (cluster, client) = client(ClusterSpec::smollm2()).await?;
    let run = longest();
    for round in 0..2 {
        let answer = client.complete(&greedy_body(&run.prompt_ids, run.output_ids.len())).await?;
        assert_eq!(answer.token_ids, run.output_ids, "round {round}");
        assert_eq!(answer.kv_bytes > 0, round == 0, "round {round}: {answer:?}");
    }
    cluster.stop()
}

#[tokio::test]
async fn three_prefill_and_two_decode_nodes() -> Result<()> {
    let (cluster, client) = client(ClusterSpec::smollm2().nodes(3, 2)).await?;
    // Only prompts that are long enough for a hand-over.
    let runs: Vec<GoldenRun> =
        golden().runs.into_iter().filter(|run| run.prompt_ids.len() > 16).collect();
    let (mut prefill, mut decode) = (BTreeSet::new(), BTreeSet::new());
    for round in 0..2 {
        let salt = format!("round {round}");
        let bodies = runs.iter().map(|run| salted_body(&run.prompt_ids, 48, &salt));
        let answers = bodies.map(async |body| client.complete(&body).await);
        let answers = futures_util::future::try_join_all(answers).await?;
        for (run, answer) in runs.iter().zip(answers) {
            assert_eq!(answer.token_ids, run.output_ids, "{}", run.name);
            assert!(answer.kv_bytes > 0, "{}: {answer:?}", run.name);
            prefill.insert(answer.prefill_node);
            decode.insert(answer.decode_node);
        }
    }
    assert!(prefill.len() > 1 && decode.len() > 1, "served by {prefill:?} and {decode:?}");
    cluster.stop()
}

#[tokio::test]
async fn forced_retry_at_token_0_1_and_20_loses_no_token() -> Result<()> {
    let run = longest();
    for kill_after in [0, 1, 20] {
        let (mut cluster, client) = client(ClusterSpec::smollm2().nodes(1, 2)).await?;
        let mut stream = client
            .stream_with(
                "/v1/completions",
                &greedy_body(&run.prompt_ids, run.output_ids.len()),
                &[("x-baton-stats", "1")],
            )
            .await?;
        let mut found = Vec::new();
        let mut attempts = 0;
        let mut killed = false;
        while let Some(event) = stream.next().await? {
            found.extend(event.token_ids());
            if !killed && found.len() > kill_after {
                killed = true;
                let serving = busy_node(&cluster.decode).await?;
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
