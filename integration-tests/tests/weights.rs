//! Live weight updates of real nodes: answers equal those of nodes that started with the new weights, requests in
//! flight survive, and bad weights change nothing.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures_util::future::{join_all, try_join_all};
use integration_tests::{
    client::{Client, Event, greedy_body, salted_body},
    cluster::{Cluster, ClusterSpec, SECRET, Service, bin_dir, node_client, smollm2},
    command::output,
    golden::{golden, longest, run_named},
};
use proto::{
    auth::{CallSigner, ClusterSecret},
    ids::Epoch,
    v1::{self, observe_event::Event as Observed, weights_client::WeightsClient},
};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::UnixListener};
use tonic::transport::Channel;

const TOKENS: usize = 24;
/// Tokens of a stream over an update.
const STREAMED: usize = 200;
const COMMITTED_WITHIN: Duration = Duration::from_secs(240);

/// Returns a client of the router's admin API.
fn admin(cluster: &Cluster) -> Client {
    admin_of(&cluster.router)
}

fn admin_of(router: &Service) -> Client {
    Client::new(format!("http://{}", router.ready.admin))
}

/// Writes SmolLM2 with other values in some weights: a model as a trainer would write it.
fn trained(folder: &Path, name: &str, flips: u8) -> PathBuf {
    let mut file = std::fs::read(smollm2()).expect("the model can be read");
    let header = gguf::Header::parse(&file).expect("the model is a GGUF file");
    let changed: Vec<(usize, usize)> = header
        .tensors()
        .iter()
        .filter(|tensor| tensor.name.ends_with("ffn_up.weight"))
        .map(|tensor| (tensor.offset as usize, tensor.bytes.unwrap_or(0) as usize))
        .collect();
    assert!(!changed.is_empty());
    for (offset, bytes) in changed {
        // The last byte of each block of Q4_1 holds two quantized values, so every float stays finite.
        for block in file[offset..offset + bytes].chunks_exact_mut(20) {
            block[19] ^= flips;
        }
    }
    let path = folder.join(name);
    std::fs::create_dir(&path).expect("the folder is new");
    std::fs::write(path.join("model.gguf"), file).expect("the model can be written");
    path
}

/// Returns the greedy tokens of a cluster that serves these weights from its start.
async fn expected(path: &Path, spec: ClusterSpec) -> Result<Vec<Vec<u32>>> {
    let spec = ClusterSpec { model: path.to_owned(), ..spec };
    let (cluster, client) = Cluster::start_with_client(name_model(spec)).await?;
    let tokens = all_tokens(&client).await?;
    cluster.stop()?;
    Ok(tokens)
}

/// Gives models at any path one name.
fn name_model(spec: ClusterSpec) -> ClusterSpec {
    spec.set("BATON_MODEL_NAME", "smollm2").set("BATON_NODE_DEVICE", "cpu")
}

async fn all_tokens(client: &Client) -> Result<Vec<Vec<u32>>> {
    let runs = golden().runs;
    try_join_all(runs.iter().map(|run| client.greedy(&run.prompt_ids, TOKENS))).await
}

async fn report(cluster: &Cluster) -> Result<Value> {
    Ok(admin(cluster).get_json("/v1/weights").await?.1)
}

/// Begins an update and waits until it has ended. Returns its report.
async fn update(cluster: &Cluster, path: &Path) -> Result<Value> {
    update_by(cluster, path, json!({"transport": "disk"})).await
}

async fn update_by(cluster: &Cluster, path: &Path, transport: Value) -> Result<Value> {
    update_with(&admin(cluster), path, transport).await
}

async fn update_with(admin: &Client, path: &Path, transport: Value) -> Result<Value> {
    let mut body = json!({"path": path, "label": "test", "commit": true, "timeout_s": 200});
    body.as_object_mut().unwrap().extend(transport.as_object().unwrap().clone());
    let answer = admin.post("/v1/weights/begin", &body).await?;
    ensure!(answer.status == 200, "{}", String::from_utf8_lossy(&answer.body));
    let id = answer.json()["update"]["id"].clone();
    let deadline = Instant::now() + COMMITTED_WITHIN;
    loop {
        let report = admin.get_json("/v1/weights").await?.1;
        ensure!(report["update"]["id"] == id, "{report}");
        if matches!(report["update"]["phase"].as_str(), Some("committed" | "aborted")) {
            return Ok(report);
        }
        ensure!(Instant::now() < deadline, "the update has not ended: {report}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn committed(cluster: &Cluster, path: &Path) -> Result<Value> {
    let report = update(cluster, path).await?;
    ensure!(report["update"]["phase"] == "committed", "{report}");
    Ok(report)
}

/// Returns the tokens of a stream, and the weight version of each.
fn labelled_tokens(events: &[Event]) -> (Vec<u32>, Vec<Value>) {
    let events = || events.iter().filter(|event| !event.is_done());
    let labels = |event: &Event| {
        let labels = event.json()["choices"][0]["weight_versions"].clone();
        labels.as_array().cloned().unwrap_or_default()
    };
    (events().flat_map(Event::token_ids).collect(), events().flat_map(labels).collect())
}

/// Waits until every node that the router sees has this version.
async fn wait_version(cluster: &Cluster, version: &Value) -> Result<()> {
    let deadline = Instant::now() + COMMITTED_WITHIN;
    loop {
        let report = report(cluster).await?;
        let nodes = report["nodes"].as_array().context("a list of nodes")?.clone();
        if nodes.iter().all(|node| node["weight_version"] == *version) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{report}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn updated_nodes_answer_as_nodes_started_with_the_new_weights() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let new = trained(folder.path(), "new", 0x11);
    let new_tokens = expected(&new, ClusterSpec::smollm2().nodes(0, 1)).await?;

    let spec = name_model(ClusterSpec::smollm2().nodes(1, 1));
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let old_tokens = all_tokens(&client).await?;
    assert_ne!(old_tokens, new_tokens);
    let report = committed(&cluster, &new).await?;
    assert_eq!(report["update"]["missed"], json!([]));
    let version = report["update"]["weight_version"].clone();
    wait_version(&cluster, &version).await?;
    // The prompts were cached with the old weights.
    assert_eq!(all_tokens(&client).await?, new_tokens);
    let received = cluster.decode[0].metric("baton_kv_transfer_bytes_total").await?;
    assert_eq!(all_tokens(&client).await?, new_tokens, "with cached prompts");

    let back = committed(&cluster, &smollm2()).await?;
    assert_ne!(back["update"]["weight_version"], version);
    assert_eq!(all_tokens(&client).await?, old_tokens);
    let again = cluster.decode[0].metric("baton_kv_transfer_bytes_total").await?;
    assert!(again > received, "prefill and decode node are paired after an update");

    let again = committed(&cluster, &new).await?;
    assert_eq!(again["update"]["weight_version"], version, "equal bytes have one version");
    cluster.stop()
}

/// Changes a model so that its files can be opened, but a weight is not finite.
fn damaged(folder: &Path) -> PathBuf {
    let path = trained(folder, "damaged", 0);
    let file = path.join("model.gguf");
    let mut bytes = std::fs::read(&file).expect("the model was written");
    let header = gguf::Header::parse(&bytes).expect("the model is a GGUF file");
    let last = header.tensors().iter().rfind(|tensor| tensor.name.ends_with("ffn_up.weight"));
    let offset = last.expect("the model has layers").offset as usize;
    // The scale of the first block, in f16.
    bytes[offset..offset + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
    std::fs::write(&file, bytes).expect("the model can be written");
    path
}

#[tokio::test]
async fn weights_change_in_place_and_are_restored_after_an_abort() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let new = trained(folder.path(), "new", 0x11);
    let new_tokens = expected(&new, ClusterSpec::smollm2().nodes(0, 1)).await?;
    let spec = name_model(ClusterSpec::smollm2().nodes(1, 1));
    let spec = spec.set("BATON_WEIGHTS_PLACE", "in_place");
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let old_tokens = all_tokens(&client).await?;

    // The first bad weight is found after the weights in use are gone.
    let damaged = damaged(folder.path());
    let report = update(&cluster, &damaged).await?;
    assert_eq!(report["update"]["phase"], "aborted", "{report}");
    assert!(report["update"]["reason"].as_str().unwrap_or_default().contains("ffn_up"), "{report}");
    wait_version(&cluster, &json!("loaded")).await?;
    assert_eq!(all_tokens(&client).await?, old_tokens);
    cluster.decode[0].wait_logged(&["no valid weights"]).await?;

    let report = committed(&cluster, &new).await?;
    let version = report["update"]["weight_version"].clone();
    wait_version(&cluster, &version).await?;
    assert_eq!(all_tokens(&client).await?, new_tokens);

    // An operator aborts a prepared update: the nodes return to the weights of the last commit. A stream that is open
    // meanwhile loses no token.
    let prompt = run_named("code").prompt_ids.clone();
    let whole = client.greedy(&prompt, STREAMED).await?;
    let mut stream = client.stream("/v1/completions", &greedy_body(&prompt, STREAMED)).await?;
    let mut events = vec![stream.next().await?.context("the first token")?];
    let admin = admin(&cluster);
    let begun = admin.post("/v1/weights/begin", &json!({"path": smollm2()})).await?.json();
    let id = begun["update"]["id"].as_str().context("an id")?.to_owned();
    let deadline = Instant::now() + COMMITTED_WITHIN;
    while self::report(&cluster).await?["update"]["phase"] != "prepared" {
        ensure!(Instant::now() < deadline, "{}", self::report(&cluster).await?);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    admin.post(&format!("/v1/weights/{id}/abort"), &json!({})).await?;
    // The nodes restore the weights themselves, or the router sees first that they need an update.
    for node in cluster.prefill.iter().chain(&cluster.decode) {
        while node.log().matches("no valid weights").count() < 2 {
            ensure!(Instant::now() < deadline, "{}", node.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    events.extend(stream.all().await?);
    let tokens: Vec<u32> = events.iter().flat_map(Event::token_ids).collect();
    assert_eq!(tokens, whole, "the stream goes on with the restored weights");
    wait_version(&cluster, &version).await?;
    assert_eq!(all_tokens(&client).await?, new_tokens);
    committed(&cluster, &smollm2()).await?;
    assert_eq!(all_tokens(&client).await?, old_tokens);
    cluster.stop()
}

/// A node of three ranks changes its weights beside a node without ranks: each rank packs its part, from a path or from
/// files of the other node, and all ranks commit at one step.
#[tokio::test]
async fn ranks_of_a_node_change_their_weights_together() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let new = trained(folder.path(), "new", 0x11);
    let new_tokens = expected(&new, ClusterSpec::smollm2().nodes(0, 1)).await?;
    let damaged = damaged(folder.path());
    for place in ["shadow", "in_place"] {
        let spec = name_model(ClusterSpec::smollm2().nodes(1, 1));
        let spec = spec.set("BATON_NODE_BLOCKS", 256).set_decode("BATON_NODE_TP", 3);
        let (cluster, client) =
            Cluster::start_with_client(spec.set("BATON_WEIGHTS_PLACE", place)).await?;
        let old_tokens = all_tokens(&client).await?;
        let report = update(&cluster, &damaged).await?;
        assert_eq!(report["update"]["phase"], "aborted", "{report}");
        wait_version(&cluster, &json!("loaded")).await?;
        assert_eq!(all_tokens(&client).await?, old_tokens, "{place}: after an abort");

        let report = committed(&cluster, &new).await?;
        let version = report["update"]["weight_version"].clone();
        wait_version(&cluster, &version).await?;
        assert_eq!(all_tokens(&client).await?, new_tokens, "{place}");

        let by = json!({"transport": "tcp", "node": "prefill-0"});
        let report = update_by(&cluster, &smollm2(), by).await?;
        assert_eq!(report["update"]["phase"], "committed", "{report}");
        assert_eq!(all_tokens(&client).await?, old_tokens, "{place}: by tcp");
        cluster.stop()?;
    }
    Ok(())
}

/// The nodes have separate caches, and only the seed reads the path: the others copy its files, also after the path is
/// gone.
#[tokio::test]
async fn nodes_copy_weights_from_one_node_by_tcp_and_a_late_node_from_a_committed_one() -> Result<()>
{
    let folder = tempfile::tempdir()?;
    let new = trained(folder.path(), "new", 0x11);
    let spec = name_model(ClusterSpec::smollm2().nodes(1, 1));
    let (mut cluster, client) = Cluster::start_with_client(spec).await?;
    let run = run_named("code");
    let before = client.greedy(&run.prompt_ids, TOKENS).await?;
    let unknown = update_by(&cluster, &new, json!({"transport": "tcp", "node": "nobody"})).await;
    assert!(unknown.unwrap_err().to_string().contains("expected one of: "));

    let report = update_by(&cluster, &new, json!({"transport": "tcp", "node": "decode-0"})).await?;
    assert_eq!(report["update"]["phase"], "committed", "{report}");
    let version = report["update"]["weight_version"].clone();
    wait_version(&cluster, &version).await?;
    let mut body = greedy_body(&run.prompt_ids, TOKENS);
    body["return_weight_version"] = json!(true);
    let mut stream = client.stream("/v1/completions", &body).await?;
    let (after, versions) = labelled_tokens(&stream.all().await?);
    assert_ne!(after, before);
    assert_eq!(versions, vec![version.clone(); TOKENS], "every token names its weights");
    cluster.prefill[0].wait_logged(&["origin=Peer"]).await?;

    std::fs::remove_dir_all(&new)?;
    cluster.restart_decode(0)?;
    cluster.wait_nodes(1, 1).await?;
    wait_version(&cluster, &version).await?;
    assert_eq!(client.greedy(&run.prompt_ids, TOKENS).await?, after);
    cluster.stop()
}

/// Streams run while updates are committed one after the other: 8 streams and 4 updates, or 64 streams and as many updates
/// as BATON_WEIGHT_UPDATES says.
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

#[tokio::test]
async fn unusable_weights_change_nothing_and_the_reason_names_them() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (cluster, client) =
        Cluster::start_with_client(name_model(ClusterSpec::smollm2().nodes(0, 2))).await?;
    let before = client.greedy(&longest().prompt_ids, TOKENS).await?;
    let reason = async |path: &Path| -> Result<String> {
        let report = update(&cluster, path).await?;
        assert_eq!(report["update"]["phase"], "aborted", "{report}");
        Ok(report["update"]["reason"].as_str().unwrap_or_default().to_owned())
    };
    let missing = reason(&folder.path().join("nothing")).await?;
    assert!(missing.contains("nothing") && missing.contains("node decode-"), "{missing}");
    let truncated = folder.path().join("short.gguf");
    let file = std::fs::read(smollm2())?;
    std::fs::write(&truncated, &file[..file.len() / 2])?;
    let truncated = reason(&truncated).await?;
    assert!(truncated.contains("short.gguf"), "{truncated}");
    let other = folder.path().join("other.gguf");
    let (key, mut changed) = (b"llama.rope.freq_base", file);
    let at = changed.windows(key.len()).position(|bytes| bytes == key).context("the key")?;
    // The type of the value comes before the value.
    let at = at + key.len() + 4;
    changed[at..at + 4].copy_from_slice(&5e4f32.to_le_bytes());
    std::fs::write(&other, changed)?;
    let other = reason(&other).await?;
    assert!(other.contains("rope_theta is 50000.0; expected 100000.0, as in the model"), "{other}");

    let socket = folder.path().join("trainer.sock");
    let from_trainer = async || -> Result<String> {
        let report = update_by(&cluster, &socket, json!({"transport": "ipc"})).await?;
        Ok(report["update"]["reason"].as_str().unwrap_or_default().to_owned())
    };
    let absent = from_trainer().await?;
    assert!(absent.contains("cannot connect to a trainer"), "{absent}");
    let trainer = UnixListener::bind(&socket)?;
    let trainer = tokio::spawn(async move {
        let declaration = json!({
            "chunk_bytes": 1, "mapped": [{"gpu": "GPU-1", "handle": "00".repeat(64)}], "tensors": []
        });
        let mut connections = Vec::new();
        while let Ok((mut connection, _)) = trainer.accept().await {
            // A node that was told of the abort has left.
            let _ = connection.write_all(format!("{declaration}\n").as_bytes()).await;
            connections.push(connection);
        }
    });
    let on_cpus = from_trainer().await?;
    trainer.abort();
    assert!(on_cpus.contains("expected a node on a GPU"), "{on_cpus}");

    let admin = admin(&cluster);
    for (path, body, status, words) in [
        ("/v1/weights/begin", json!({"path": "models/new"}), 400, "invalid path: \"models/new\""),
        (
            "/v1/weights/begin",
            json!({"path": "/a", "transport": "nccl"}),
            400,
            "expected host:port/token of a trainer",
        ),
        (
            "/v1/weights/begin",
            json!({"path": "/a", "transport": "ipc", "node": "decode-0"}),
            400,
            "expected transport tcp with it",
        ),
        ("/v1/weights/begin", json!({"label": "x"}), 400, "missing field `path`"),
        (
            "/v1/weights/begin",
            json!({"path": "/a", "model": "other"}),
            400,
            "expected one of: smollm2",
        ),
        ("/v1/weights/begin", json!({"path": "/a", "timeout_s": 0}), 400, "expected 1 to 3600"),
        ("/v1/weights/7/commit", json!({}), 400, "expected the 32 hexadecimal digits"),
        (
            "/v1/weights/00000000000000000000000000000007/commit",
            json!({}),
            404,
            "cannot find update",
        ),
    ] {
        let answer = admin.post(path, &body).await?;
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        assert_eq!(answer.status, status, "{text}");
        assert!(text.replace("\\\"", "\"").contains(words), "{text}");
    }
    // Clients have no admin API.
    let public = client.post("/v1/weights/begin", &json!({"path": "/a"})).await?;
    assert_eq!(public.status, 404);
    assert_eq!(client.greedy(&longest().prompt_ids, TOKENS).await?, before);
    cluster.stop()
}

#[tokio::test]
async fn node_that_restarts_catches_up_and_a_prepared_update_can_be_aborted() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let new = trained(folder.path(), "new", 0x11);
    let (mut cluster, client) =
        Cluster::start_with_client(name_model(ClusterSpec::smollm2().nodes(1, 1))).await?;
    let run = run_named("code");
    let before = client.greedy(&run.prompt_ids, TOKENS).await?;

    // Two steps instead of one: the operator commits or aborts.
    let admin = admin(&cluster);
    let begun = admin.post("/v1/weights/begin", &json!({"path": new})).await?.json();
    let id = begun["update"]["id"].as_str().context("an id")?.to_owned();
    let second = admin.post("/v1/weights/begin", &json!({"path": new})).await?;
    assert_eq!(
        (second.status.as_u16(), second.json()["error"]["code"].as_str()),
        (409, Some("update_running"))
    );
    let deadline = Instant::now() + COMMITTED_WITHIN;
    while report(&cluster).await?["update"]["phase"] != "prepared" {
        ensure!(Instant::now() < deadline, "{}", report(&cluster).await?);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(client.greedy(&run.prompt_ids, TOKENS).await?, before);
    let command = |arguments: &[&str]| -> Result<String> {
        let mut command = std::process::Command::new(bin_dir().join("baton"));
        command.arg("weights").args(arguments);
        command.args(["--to", &format!("http://{}", cluster.router.ready.admin)]);
        let output = output(&mut command)?;
        ensure!(output.status.success(), "{output:?}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let text = command(&["abort", &id])?;
    assert!(text.contains(&format!("update {id}: abort")), "{text}");
    while report(&cluster).await?["update"]["phase"] != "aborted" {
        ensure!(Instant::now() < deadline, "{}", report(&cluster).await?);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }

    let text = command(&["status"])?;
    assert!(text.contains(&format!("update {id}: aborted: an operator aborted it")), "{text}");
    assert!(text.contains("decode-0 (decode): weights loaded"), "{text}");
    let text = command(&["push", new.to_str().context("UTF-8")?, "--label", "step 100"])?;
    assert!(text.contains("committed in"), "{text}");
    assert!(text.contains("step 100") && text.contains("paused"), "{text}");
    let version = report(&cluster).await?["update"]["weight_version"].clone();
    // The router also knows the update before the last one.
    let (_, first) = admin.get_json(&format!("/v1/weights?id={id}")).await?;
    assert_eq!(
        (&first["update"]["id"], &first["update"]["phase"]),
        (&json!(id), &json!("aborted"))
    );
    let repeated = admin.post(&format!("/v1/weights/{id}/abort"), &json!({})).await?;
    assert_eq!((repeated.status.as_u16(), &repeated.json()["update"]["id"]), (200, &json!(id)));
    let (_, unknown) = admin.get_json(&format!("/v1/weights?id={:032x}", 7)).await?;
    assert_eq!(unknown["update"], Value::Null);
    assert_eq!(admin.get("/v1/weights?id=7").await?.status.as_u16(), 400);
    let after = client.greedy(&run.prompt_ids, TOKENS).await?;
    assert_ne!(after, before);

    cluster.restart_decode(0)?;
    cluster.wait_nodes(1, 1).await?;
    wait_version(&cluster, &version).await?;
    assert_eq!(client.greedy(&run.prompt_ids, TOKENS).await?, after);
    let mut body = greedy_body(&longest().prompt_ids, 4);
    body["cache_salt"] = json!("paired");
    assert!(client.complete(&body).await?.kv_bytes > 0, "the pair works again");
    cluster.stop()
}

#[tokio::test]
async fn routers_do_not_replace_the_weights_of_each_other() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let paths = [trained(folder.path(), "a", 0x11), trained(folder.path(), "b", 0x22)];
    let (mut cluster, _) =
        Cluster::start_with_client(name_model(ClusterSpec::smollm2().nodes(0, 2))).await?;
    let second = cluster.start_router("second", "127.0.0.1:0")?;
    let admin = admin_of(&second);
    let first = committed(&cluster, &paths[0]).await?["update"]["weight_version"].clone();
    wait_version(&cluster, &first).await?;
    // The first router looks for nodes that missed its update every second.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let disk = json!({"transport": "disk"});
    let report = update_with(&admin, &paths[1], disk).await?;
    assert_eq!(report["update"]["phase"], "committed", "{report}");
    let version = report["update"]["weight_version"].clone();
    assert_ne!(version, first);
    wait_version(&cluster, &version).await?;
    let deadline = Instant::now() + Duration::from_secs(5);
    while Instant::now() < deadline {
        wait_version(&cluster, &version).await?;
        assert!(!cluster.router.log().contains("a node catches up"));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    cluster.restart_decode(0)?;
    cluster.wait_nodes(0, 2).await?;
    wait_version(&cluster, &version).await?;
    second.wait_logged(&["a node catches up"]).await?;
    cluster.router.wait_logged(&["another router updated the nodes"]).await?;
    cluster.stop()
}

/// Waits until the report of a router meets a condition, and returns the report.
async fn wait_report(admin: &Client, is_met: impl Fn(&Value) -> bool) -> Result<Value> {
    let deadline = Instant::now() + COMMITTED_WITHIN;
    loop {
        let report = admin.get_json("/v1/weights").await?.1;
        if is_met(&report) {
            return Ok(report);
        }
        ensure!(Instant::now() < deadline, "{report}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The router dies after one of two nodes has committed. An abort at another router changes nothing.
#[tokio::test]
async fn prepared_node_without_a_router_commits_as_its_peer_did() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let new = trained(folder.path(), "new", 0x11);
    let (cluster, _) =
        Cluster::start_with_client(name_model(ClusterSpec::smollm2().nodes(0, 2))).await?;
    let mut second = cluster.start_router("second", "127.0.0.1:0")?;
    let admin = admin_of(&second);
    wait_report(&admin, |report| report["nodes"].as_array().map(Vec::len) == Some(2)).await?;
    admin.post("/v1/weights/begin", &json!({"path": new})).await?;
    let report = wait_report(&admin, |report| report["update"]["phase"] == "prepared").await?;
    second.kill();
    let shown_id = report["update"]["id"].as_str().context("an id")?;
    let id = u128::from_str_radix(shown_id, 16)?;
    let version = report["update"]["weight_version"].clone();
    let weight_version = u64::from_str_radix(version.as_str().context("a version")?, 16)?;

    let grpc = &cluster.decode[0].ready.grpc;
    let observed = node_client(grpc, None)?.observe(v1::ObserveRequest {}).await?;
    let first = observed.into_inner().message().await?.context("a first event")?;
    let Some(Observed::Snapshot(snapshot)) = first.event else {
        anyhow::bail!("the first event is not a snapshot: {first:?}");
    };
    let node_epoch = snapshot.record.context("a record")?.epoch;
    let channel = Channel::from_shared(format!("http://{grpc}"))?.connect_lazy();
    let signer = CallSigner::new(&ClusterSecret::new(SECRET)?)?;
    let signer = signer.to(Epoch::from_bytes(&node_epoch)?);
    let update_id = id.to_be_bytes().to_vec().into();
    let commit = v1::CommitWeightsRequest { node_epoch, update_id, weight_version };
    WeightsClient::with_interceptor(channel, signer).commit(commit).await?;
    let abort = format!("/v1/weights/{shown_id}/abort");
    let aborted = admin_of(&cluster.router).post(&abort, &json!({})).await?;
    assert_eq!(aborted.status, 409, "{}", String::from_utf8_lossy(&aborted.body));
    // The other node asks this node for the outcome.
    wait_version(&cluster, &version).await?;
    cluster.stop()
}

/// Nodes keep the KV of running sequences, wait with new requests, and take up new weights meanwhile.
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
    let wait_pauses = async |pause: Value| -> Result<()> {
        let deadline = Instant::now() + COMMITTED_WITHIN;
        loop {
            let report = report(&cluster).await?;
            let nodes = report["nodes"].as_array().context("a list of nodes")?.clone();
            if nodes.iter().all(|node| node["pause"] == pause) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "not {pause}: {report}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };

    let mut stream = client.stream("/v1/completions", &greedy_body(&prompt, STREAMED)).await?;
    let mut events = vec![stream.next().await?.context("the first token")?];
    let paused = admin.post("/v1/weights/pause?mode=keep_kv&timeout_s=45", &json!({})).await?;
    assert_eq!(paused.status, 200, "{}", String::from_utf8_lossy(&paused.body));
    wait_pauses(json!("paused")).await?;
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
    let tokens: Vec<u32> = events.iter().flat_map(|event| event.token_ids()).collect();
    assert_eq!(tokens, expected, "the stream continues where it stopped");
    wait_pauses(Value::Null).await?;
    assert_eq!(ready().await?, (200, 200));

    // An update is committed during a pause, which ends by itself.
    admin.post("/v1/weights/pause?mode=wait&timeout_s=3", &json!({})).await?;
    committed(&cluster, &new).await?;
    wait_pauses(Value::Null).await?;
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
async fn of_two_routers_that_begin_at_once_at_least_one_commits() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let paths = [trained(folder.path(), "a", 0x11), trained(folder.path(), "b", 0x22)];
    let (cluster, _) =
        Cluster::start_with_client(name_model(ClusterSpec::smollm2().nodes(0, 2))).await?;
    let second = cluster.start_router("second", "127.0.0.1:0")?;
    let admins = [admin(&cluster), admin_of(&second)];
    let deadline = Instant::now() + COMMITTED_WITHIN;
    while admins[1].get_json("/v1/weights").await?.1["nodes"].as_array().map(Vec::len) != Some(2) {
        ensure!(Instant::now() < deadline, "the second router sees no nodes");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let disk = || json!({"transport": "disk"});
    let (first, second) = tokio::try_join!(
        update_with(&admins[0], &paths[0], disk()),
        update_with(&admins[1], &paths[1], disk())
    )?;
    let mut committed = Vec::new();
    for report in [first, second] {
        match report["update"]["phase"].as_str() {
            Some("committed") => committed.push(report["update"]["weight_version"].clone()),
            _ => {
                let reason = report["update"]["reason"].as_str().unwrap_or_default();
                assert!(reason.contains("expected one update at a time"), "{report}");
            }
        }
    }
    assert!(!committed.is_empty());
    let report = report(&cluster).await?;
    let nodes = report["nodes"].as_array().context("a list of nodes")?.clone();
    for node in nodes {
        wait_version(&cluster, &node["weight_version"]).await?;
        assert!(committed.contains(&node["weight_version"]), "{node}");
    }
    cluster.stop()
}

/// Begins an update at a router and waits until it is prepared. Returns its id.
async fn prepared(router: &Service, path: &Path) -> Result<String> {
    let admin = admin_of(router);
    let deadline = Instant::now() + COMMITTED_WITHIN;
    let has_nodes = |report: &Value| report["nodes"].as_array().is_some_and(|it| !it.is_empty());
    while !has_nodes(&admin.get_json("/v1/weights").await?.1) {
        ensure!(Instant::now() < deadline, "the router sees no node");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let begun = admin.post("/v1/weights/begin", &json!({"path": path})).await?.json();
    let id = begun["update"]["id"].as_str().context("an id")?.to_owned();
    loop {
        let report = admin.get_json("/v1/weights").await?.1;
        if report["update"]["phase"] == "prepared" {
            return Ok(id);
        }
        ensure!(Instant::now() < deadline, "{report}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Nodes in place serve nothing until an update ends. A router that stops aborts its update, and another router aborts the
/// update of a router that was killed.
#[tokio::test]
async fn update_of_a_router_that_ends_can_be_aborted() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let new = trained(folder.path(), "new", 0x11);
    let spec = name_model(ClusterSpec::smollm2().nodes(0, 1));
    let spec = spec.set("BATON_WEIGHTS_PLACE", "in_place");
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let prompt = run_named("code").prompt_ids.clone();
    let expected = client.greedy(&prompt, TOKENS).await?;

    let mut stopped = cluster.start_router("stopped", "127.0.0.1:0")?;
    prepared(&stopped, &new).await?;
    stopped.terminate_signal();
    assert_eq!(stopped.wait_end(COMMITTED_WITHIN)?, Some(0));
    cluster.decode[0].wait_logged(&["the weight update was aborted"]).await?;
    assert_eq!(client.greedy(&prompt, TOKENS).await?, expected);

    let mut killed = cluster.start_router("killed", "127.0.0.1:0")?;
    let id = prepared(&killed, &new).await?;
    killed.kill();
    let admin = admin(&cluster);
    for (id, status) in [(id.as_str(), 200), ("00000000000000000000000000000007", 404)] {
        let aborted = admin.post(&format!("/v1/weights/{id}/abort"), &json!({})).await?;
        assert_eq!(aborted.status, status, "{}", String::from_utf8_lossy(&aborted.body));
    }
    assert_eq!(client.greedy(&prompt, TOKENS).await?, expected);
    cluster.stop()
}

#[tokio::test]
async fn update_begins_while_a_node_catches_up() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let paths = [trained(folder.path(), "a", 0x11), trained(folder.path(), "b", 0x22)];
    let (mut cluster, _) =
        Cluster::start_with_client(name_model(ClusterSpec::smollm2().nodes(0, 2))).await?;
    committed(&cluster, &paths[0]).await?;
    cluster.restart_decode(0)?;
    let deadline = Instant::now() + COMMITTED_WITHIN;
    loop {
        let report = report(&cluster).await?;
        let nodes = report["nodes"].as_array().context("a list of nodes")?;
        if nodes.iter().any(|node| node["catches_up"] == true) {
            break;
        }
        ensure!(Instant::now() < deadline, "no node catches up: {report}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    cluster.wait_nodes(0, 2).await?;
    let report = committed(&cluster, &paths[1]).await?;
    assert_eq!(report["update"]["nodes"].as_array().map(Vec::len), Some(2), "{report}");
    wait_version(&cluster, &report["update"]["weight_version"]).await?;
    cluster.router.wait_logged(&["an operator began another update"]).await?;
    cluster.stop()
}

/// Commits a prepared update while a stream runs. Returns the tokens of the stream, the weight version of each, and the
/// finish reason.
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
    let wait_phase = async |phase: &str| -> Result<Value> {
        let deadline = Instant::now() + COMMITTED_WITHIN;
        loop {
            let report = report(cluster).await?;
            if report["update"]["phase"] == phase {
                return Ok(report["update"]["weight_version"].clone());
            }
            ensure!(Instant::now() < deadline, "not {phase}: {report}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    wait_phase("prepared").await?;
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
    let version = wait_phase("committed").await?;
    wait_version(cluster, &version).await?;
    let (tokens, versions) = labelled_tokens(&events);
    let reasons = events.iter().filter(|event| !event.is_done());
    let mut reasons = reasons.map(|event| event.json()["choices"][0]["finish_reason"].clone());
    let finish = reasons.rfind(|reason| !reason.is_null()).unwrap_or_default();
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
