//! Updates by one router: from a path, a peer or a trainer, in place, of ranks, and of nodes that
//! restart.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use integration_tests::{
    client::{Client, Event, greedy_body},
    cluster::{Cluster, ClusterSpec, bin_dir, smollm2},
    command::output,
    golden::{golden, longest, run_named},
};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::UnixListener};
use weight_transfer::{Plan, Tensor};

use crate::{
    COMMITTED_WITHIN, STREAMED, TOKENS, admin, committed, labelled_tokens, name_model, report,
    trained, update, update_by, wait_phase, wait_version,
};

/// Returns the greedy tokens of a cluster that serves these weights from its start.
pub(crate) async fn expected(path: &Path, spec: ClusterSpec) -> Result<Vec<Vec<u32>>> {
    let spec = ClusterSpec { model: path.to_owned(), ..spec };
    let (cluster, client) = Cluster::start_with_client(name_model(spec)).await?;
    let tokens = all_tokens(&client).await?;
    cluster.stop()?;
    Ok(tokens)
}

pub(crate) async fn all_tokens(client: &Client) -> Result<Vec<Vec<u32>>> {
    let runs = golden().runs;
    try_join_all(runs.iter().map(|run| client.greedy(&run.prompt_ids, TOKENS))).await
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

/// Waits until every node has the file open, so that it reads or is about to read the file.
async fn wait_opened(cluster: &Cluster, file: &Path) -> Result<()> {
    let deadline = Instant::now() + COMMITTED_WITHIN;
    for node in cluster.prefill.iter().chain(&cluster.decode) {
        let has_file = || {
            let files = std::fs::read_dir(format!("/proc/{}/fd", node.id()));
            let mut files = files.into_iter().flatten().flatten();
            files.any(|open| std::fs::read_link(open.path()).is_ok_and(|path| path == file))
        };
        while !has_file() {
            ensure!(Instant::now() < deadline, "the node does not open the file: {}", node.log());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    Ok(())
}

#[tokio::test]
async fn weights_truncated_while_nodes_read_them_abort_the_update_and_end_no_node() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let spec = name_model(ClusterSpec::smollm2().nodes(1, 1));
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let old_tokens = all_tokens(&client).await?;
    let new = trained(folder.path(), "new", 0x11);
    let file = new.join("model.gguf").canonicalize()?;
    let bytes = std::fs::metadata(&file)?.len();

    let truncate = async {
        wait_opened(&cluster, &file).await?;
        std::fs::File::options().write(true).open(&file)?.set_len(bytes / 2)?;
        anyhow::Ok(())
    };
    let (report, truncated) = tokio::join!(update(&cluster, &new), truncate);
    truncated?;
    let report = report?;
    assert_eq!(report["update"]["phase"], "aborted", "{report}");
    let reason = report["update"]["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("model.gguf"), "{report}");
    wait_version(&cluster, &json!("loaded")).await?;
    assert_eq!(all_tokens(&client).await?, old_tokens);
    cluster.stop()
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

    // An operator aborts a prepared update: the nodes return to the weights of the last commit. A
    // stream that is open meanwhile loses no token.
    let prompt = run_named("code").prompt_ids.clone();
    let whole = client.greedy(&prompt, STREAMED).await?;
    let mut stream = client.stream("/v1/completions", &greedy_body(&prompt, STREAMED)).await?;
    let mut events = vec![stream.next().await?.context("the first token")?];
    let admin = admin(&cluster);
    let begun = admin.post("/v1/weights/begin", &json!({"path": smollm2()})).await?.json();
    let id = begun["update"]["id"].as_str().context("an id")?.to_owned();
    wait_phase(&admin, "prepared").await?;
    admin.post(&format!("/v1/weights/{id}/abort"), &json!({})).await?;
    // The nodes restore the weights themselves, or the router sees first that they need an update.
    let deadline = Instant::now() + COMMITTED_WITHIN;
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

/// A node of three ranks changes its weights beside a node without ranks: each rank packs its part,
/// from a path or from files of the other node, and all ranks commit at one step.
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

/// The nodes have separate caches, and only the seed reads the path: the others copy its files,
/// also after the path is gone.
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
    let tensor =
        Tensor { name: "t".to_owned(), dtype: "BF16".to_owned(), shape: vec![4], bytes: 8 };
    let plan = format!("{:032x}", Plan::new(vec![tensor], 8)?.trainer_hash());
    let trainer = tokio::spawn(async move {
        let declaration = json!({
            "chunk_bytes": 8, "plan": plan,
            "mapped": [{"gpu": "GPU-1", "handle": "00".repeat(64)}],
            "tensors": [{"name": "t", "dtype": "BF16", "shape": [4]}]
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
    wait_phase(&admin, "prepared").await?;
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
    wait_phase(&admin, "aborted").await?;

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
