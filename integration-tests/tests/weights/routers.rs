//! Updates by several routers, of routers that end, and beside a node that catches up.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use integration_tests::{
    cluster::{Cluster, ClusterSpec, SECRET, Service, node_client},
    golden::run_named,
};
use proto::{
    auth::{CallSigner, ClusterSecret},
    ids::Epoch,
    v1::{self, observe_event::Event as Observed, weights_client::WeightsClient},
};
use serde_json::{Value, json};
use tonic::{Code, transport::Channel};

use crate::{
    COMMITTED_WITHIN, TOKENS, admin, admin_of, committed, name_model, report, trained, update_with,
    wait_phase, wait_report, wait_version,
};

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
    let updated = update_with(&admin, &paths[1], disk).await?;
    assert_eq!(updated["update"]["phase"], "committed", "{updated}");
    let version = updated["update"]["weight_version"].clone();
    assert_ne!(version, first);
    wait_version(&cluster, &version).await?;
    let deadline = Instant::now() + Duration::from_secs(5);
    while Instant::now() < deadline {
        let report = report(&cluster).await?;
        let nodes = report["nodes"].as_array().context("nodes")?;
        assert!(nodes.iter().all(|node| node["weight_version"] == version), "{report}");
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

/// The router dies after one of two nodes has committed, and this node begins another update. An
/// abort at another router changes nothing.
#[tokio::test]
async fn prepared_node_without_a_router_commits_as_its_peer_did() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let new = trained(folder.path(), "new", 0x11);
    let other = trained(folder.path(), "other", 0x22);
    let (cluster, _) =
        Cluster::start_with_client(name_model(ClusterSpec::smollm2().nodes(0, 2))).await?;
    let mut second = cluster.start_router("second", "127.0.0.1:0")?;
    let admin = admin_of(&second);
    wait_report(&admin, |report| report["nodes"].as_array().map(Vec::len) == Some(2)).await?;
    admin.post("/v1/weights/begin", &json!({"path": new})).await?;
    let report = wait_phase(&admin, "prepared").await?;
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
    let commit =
        v1::CommitWeightsRequest { node_epoch: node_epoch.clone(), update_id, weight_version };
    let mut client = WeightsClient::with_interceptor(channel, signer);
    client.commit(commit).await?;
    let begin = v1::BeginWeightsRequest {
        node_epoch,
        update_id: 7u128.to_be_bytes().to_vec().into(),
        path: other.to_str().context("a path in UTF-8")?.to_owned(),
        remaining_ms: 60_000,
        ..Default::default()
    };
    let deadline = Instant::now() + COMMITTED_WITHIN;
    while let Err(status) = client.begin(begin.clone()).await {
        // The node changes its weights at the end of a step.
        ensure!(status.code() == Code::Aborted && Instant::now() < deadline, "{status}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let abort = format!("/v1/weights/{shown_id}/abort");
    let aborted = admin_of(&cluster.router).post(&abort, &json!({})).await?;
    assert_eq!(aborted.status, 409, "{}", String::from_utf8_lossy(&aborted.body));
    // The other node asks this node for the outcome.
    wait_version(&cluster, &version).await?;
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
    wait_report(&admins[1], |report| report["nodes"].as_array().map(Vec::len) == Some(2)).await?;
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
    let has_nodes = |report: &Value| report["nodes"].as_array().is_some_and(|it| !it.is_empty());
    wait_report(&admin, has_nodes).await?;
    let begun = admin.post("/v1/weights/begin", &json!({"path": path})).await?.json();
    let id = begun["update"]["id"].as_str().context("an id")?.to_owned();
    wait_phase(&admin, "prepared").await?;
    Ok(id)
}

/// Nodes in place serve nothing until an update ends. A router that stops aborts its update, and
/// another router aborts the update of a router that was killed.
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
