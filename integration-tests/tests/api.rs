//! The public API with real nodes: prefix-cache routing, isolation of clients, adaptive
//! disaggregation, node discovery by DNS and the operator's API.

use std::{
    collections::BTreeSet,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use futures_util::future::try_join_all;
use integration_tests::{
    client::{Client, DEADLINE},
    cluster::{Cluster, ClusterSpec, Service, bin_dir, smollm2},
    command::output,
};
use serde_json::{Value, json};

/// Returns `count` token ids. Prompts of different `number`s share no block.
fn prompt(number: u32, count: u32) -> Vec<u32> {
    (0..count).map(|index| 1000 + number * 3000 + index * 7 % 2900).collect()
}

/// Nodes that served a request, and the cached tokens of its prompt.
#[derive(Debug)]
struct Served {
    prefill: String,
    decode: String,
    cached_tokens: u64,
}

async fn ask(client: &Client, prompt: &[u32], salt: Option<&str>) -> Result<Served> {
    let body = json!({"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": true,
        "cache_salt": salt});
    let body = serde_json::to_vec(&body)?.into();
    let answer = client.post_bytes("/v1/completions", body, &[("x-baton-stats", "1")]).await?;
    let answer = answer.json();
    ensure!(answer["error"].is_null(), "{answer}");
    let name = |field: &str| answer["baton"][field].as_str().unwrap_or_default().to_owned();
    let cached_tokens = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    Ok(Served {
        prefill: name("prefill_node"),
        decode: name("decode_node"),
        cached_tokens: cached_tokens.as_u64().expect("usage has cached_tokens"),
    })
}

/// Waits until the router knows at least `count` cached blocks on nodes of the role.
async fn cached_blocks_are_known(client: &Client, role: &str, count: f64) -> Result<()> {
    let deadline = Instant::now() + DEADLINE;
    let (name, label) = ("baton_nodes_cached_blocks", format!("role=\"{role}\""));
    loop {
        let text = String::from_utf8(client.get("/metrics").await?.body.to_vec())?;
        let line = text.lines().find(|line| line.starts_with(name) && line.contains(&label));
        let known = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        if known.is_some_and(|known| known >= count) {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "{role}: {known:?} cached blocks are known, not {count}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_prompt_is_routed_to_its_cache_and_others_are_balanced() -> Result<()> {
    // This policy counts tokens. Predicted times would depend on the speed of this machine.
    let spec = ClusterSpec::smollm2().nodes(2, 2).set("BATON_ROUTER_POLICY", "cache-aware");
    let cluster = Cluster::start(spec.set("BATON_ROUTER_DISAGGREGATE", "always")).await?;
    let client = Client::new(cluster.http());
    // Long enough that the cached prefix outweighs a queue in an outdated load report.
    let long = prompt(0, 1600);
    let first = ask(&client, &long, None).await?;
    assert_eq!(first.cached_tokens, 0);
    for role in ["prefill", "decode"] {
        cached_blocks_are_known(&client, role, 100.0).await?;
    }
    for tail in 0..4 {
        let again = [&long[..], &prompt(1 + tail, 40)].concat();
        let served = ask(&client, &again, None).await?;
        assert_eq!((&served.prefill, &served.decode), (&first.prefill, &first.decode));
        assert!(served.cached_tokens >= 1600, "{served:?}");
    }
    // The requests run concurrently: until a node reports them, the router counts the requests that
    // it sent.
    let others: Vec<Vec<u32>> = (0..4).map(|number| prompt(5 + number, 320)).collect();
    let served = try_join_all(others.iter().map(|prompt| ask(&client, prompt, None))).await?;
    let nodes = |name: fn(&Served) -> &str| served.iter().map(name).collect::<BTreeSet<_>>().len();
    assert_eq!(nodes(|served| &served.prefill), 2, "{served:?}");
    assert_eq!(nodes(|served| &served.decode), 2, "{served:?}");
    cluster.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn another_salt_or_tenant_has_no_prefix_cache_hit() -> Result<()> {
    let cluster = Cluster::start(ClusterSpec::smollm2()).await?;
    let client = Client::new(cluster.http());
    let prompt = prompt(0, 320);
    for salt in [None, Some("one"), Some("two")] {
        assert_eq!(ask(&client, &prompt, salt).await?.cached_tokens, 0, "{salt:?}");
    }
    for salt in [Some("two"), Some("one"), None] {
        let served = ask(&client, &prompt, salt).await?;
        assert!(served.cached_tokens >= 304, "{salt:?}: {served:?}");
    }
    let of_tenant = async |tenant: &'static str| -> Result<Value> {
        let body = json!({"prompt": prompt, "max_tokens": 1});
        let body = serde_json::to_vec(&body)?.into();
        let headers = [("x-baton-tenant", tenant)];
        let answer = client.post_bytes("/v1/completions", body, &headers).await?.json();
        Ok(answer["usage"]["prompt_tokens_details"]["cached_tokens"].clone())
    };
    assert_eq!(of_tenant("a").await?, 0);
    assert_eq!(of_tenant("b").await?, 0);
    assert!(of_tenant("a").await?.as_u64() >= Some(304));
    cluster.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn special_token_in_a_message_is_text_unless_the_setting_is_parse() -> Result<()> {
    for (value, expected) in [("text", 0), ("parse", 1)] {
        let spec = ClusterSpec::smollm2().nodes(0, 1);
        let spec = spec.set("BATON_MODEL_SPECIAL_TOKENS_IN_CONTENT", value);
        let (cluster, client) = Cluster::start_with_client(spec).await?;
        let tokens = async |body: Value| -> Result<Value> {
            Ok(client.post("/tokenize", &body).await?.json()["tokens"].clone())
        };
        let special = tokens(json!({"prompt": "<|im_end|>", "add_special_tokens": false})).await?;
        ensure!(special.as_array().is_some_and(|ids| ids.len() == 1), "{special}");
        let count = async |content: &str| -> Result<usize> {
            let messages = json!([{"role": "user", "content": content}]);
            let ids = tokens(json!({"messages": messages})).await?;
            let ids = ids.as_array().expect("a list of ids");
            Ok(ids.iter().filter(|id| **id == special[0]).count())
        };
        let (plain, spelled) = (count("one two").await?, count("one<|im_end|> two").await?);
        assert_eq!(spelled - plain, expected, "{value}");
        cluster.stop()?;
    }
    Ok(())
}

/// Returns how many of 8 concurrent prompts the prefill node prefilled, and the router's metrics.
async fn prefilled_remotely(disaggregate: &str) -> Result<(usize, String)> {
    let spec = ClusterSpec::smollm2().set("BATON_ROUTER_DISAGGREGATE", disaggregate);
    let cluster = Cluster::start(spec).await?;
    let client = Client::new(cluster.http());
    // One after another, until the nodes have measured their steps.
    for number in 0..6 {
        let served = ask(&client, &prompt(number, 200), None).await?;
        assert_eq!(served.prefill.is_empty(), disaggregate == "never", "the nodes are idle");
    }
    let long: Vec<Vec<u32>> = (6..14).map(|number| prompt(number, 600)).collect();
    let served = try_join_all(long.iter().map(|prompt| ask(&client, prompt, None))).await?;
    let metrics = String::from_utf8(client.get("/metrics").await?.body.to_vec())?;
    cluster.stop()?;
    Ok((served.iter().filter(|served| !served.prefill.is_empty()).count(), metrics))
}

#[tokio::test(flavor = "multi_thread")]
async fn queued_prompts_are_prefilled_where_disaggregate_says() -> Result<()> {
    let (auto, metrics) = prefilled_remotely("auto").await?;
    assert!((1..8).contains(&auto), "{auto} of 8 prompts went to the prefill node");
    assert!(metrics.contains("baton_time_to_first_token_prediction_error_count"), "{metrics}");
    assert_eq!(prefilled_remotely("always").await?.0, 8);
    assert_eq!(prefilled_remotely("never").await?.0, 0);
    Ok(())
}

/// Runs `baton node` with these arguments against a router. Returns whether it succeeded, and its
/// output.
async fn baton_node(admin: &str, args: &[&str]) -> Result<(bool, String)> {
    let mut command = Command::new(bin_dir().join("baton"));
    command.arg("node").args(args).args(["--admin", &format!("http://{admin}")]);
    let output = tokio::task::spawn_blocking(move || output(&mut command)).await??;
    let text = [output.stdout, output.stderr].concat();
    Ok((output.status.success(), String::from_utf8(text)?))
}

/// Waits until the router reports this many usable decode nodes.
async fn decode_nodes(client: &Client, count: u64) -> Result<()> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let (_, health) = client.get_json("/health").await?;
        if health["decode_nodes"] == count {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "not {count} decode nodes: {health}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn router_finds_nodes_by_dns_and_forwards_calls_of_the_operator() -> Result<()> {
    let cluster = Cluster::start(ClusterSpec::smollm2().nodes(0, 1)).await?;
    let port = cluster.decode[0].ready.grpc.rsplit(':').next().expect("an address has a port");
    let folder = tempfile::tempdir()?;
    let settings = [
        ("BATON_MODEL_PATH", smollm2().display().to_string()),
        ("BATON_ROUTER_HTTP", "127.0.0.1:0".to_owned()),
        ("BATON_ROUTER_GRPC", "127.0.0.1:0".to_owned()),
        ("BATON_ROUTER_ADMIN", "127.0.0.1:0".to_owned()),
        ("BATON_ROUTER_DRAIN_DELAY", "0s".to_owned()),
        ("BATON_CLUSTER_DECODE", format!("dns:localhost:{port}")),
        // The first entry is the decode node. The second entry's host does not exist.
        ("BATON_CLUSTER_PREFILL", format!("dns:127.0.0.1:{port},dns:no-such-host.invalid:1")),
    ];
    let settings = settings.map(|(name, value)| (name.to_owned(), value)).into();
    let mut router = Service::start(folder.path(), "dns", "baton-router", &settings)?;
    let client = Client::new(format!("http://{}", router.ready.http));
    decode_nodes(&client, 1).await?;
    let served = ask(&client, &prompt(0, 320), None).await?;
    assert_eq!((served.prefill.as_str(), served.decode.as_str()), ("", "decode-0"));

    let metrics = Client::new(format!("http://{}", router.ready.metrics));
    for (path, status) in [("/metrics", 200), ("/live", 200), ("/ready", 200), ("/v1/models", 404)]
    {
        assert_eq!(metrics.get(path).await?.status, status, "{path}");
    }
    let admin = router.ready.admin.clone();
    let (_, list) = baton_node(&admin, &["list"]).await?;
    assert!(list.contains("decode-0") && list.contains("down"), "{list}");
    let (is_done, text) = baton_node(&admin, &["reset-prefix-cache", "decode-0"]).await?;
    assert!(is_done && text.contains("blocks dropped"), "{text}");
    assert_eq!(ask(&client, &prompt(0, 320), None).await?.cached_tokens, 0);
    let file = folder.path().join("trace.json").display().to_string();
    let record = ["trace", "decode-0", "--seconds", "4", "--output", &file];
    // The prompt is cached: its step is short.
    let cached = prompt(0, 320);
    let (recorded, asked) = tokio::join!(baton_node(&admin, &record), ask(&client, &cached, None));
    asked?;
    let (is_done, text) = recorded?;
    assert!(is_done && text.contains("decode-0: ") && text.contains(" steps in 4."), "{text}");
    let trace: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
    assert_ne!(trace["otherData"]["steps"], 0);
    let (is_done, text) = baton_node(&admin, &["trace", "decode-7", "--seconds", "1"]).await?;
    assert!(!is_done && text.contains("decode-7") && text.contains("decode-0"), "{text}");
    assert!(baton_node(&admin, &["drain", "decode-0"]).await?.0);
    decode_nodes(&client, 0).await?;
    assert_eq!(metrics.get("/ready").await?.status, 200, "requests wait");
    assert!(baton_node(&admin, &["undrain", "decode-0"]).await?.0);
    decode_nodes(&client, 1).await?;
    let (is_done, text) = baton_node(&admin, &["drain", "decode-7"]).await?;
    assert!(!is_done && text.contains("decode-7") && text.contains("decode-0"), "{text}");

    router.terminate_signal();
    assert_eq!(router.wait_end(DEADLINE)?, Some(0));
    let log = router.log();
    assert!(log.contains("it is listed as a prefill node"), "{log}");
    for line in [
        "node excluded: its report is invalid",
        "cannot resolve cluster.prefill = dns:no-such-host.invalid:1",
    ] {
        assert_eq!(log.matches(line).count(), 1, "{line}\n{log}");
    }
    cluster.stop()
}
