//! Decode nodes killed under load.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use integration_tests::cluster::{Cluster, ClusterSpec};

use crate::load::{Reference, Report};

const KILLS: usize = 20;
/// Tokens of all streams before a kill, fewer than one answer has.
const TOKENS_BEFORE: usize = 24;
/// Time in which a client of 1P1D sends further requests.
const CLIENTS_START_FOR: Duration = Duration::from_secs(5);

pub(crate) async fn one_decode_node_killed_twenty_times() -> Result<()> {
    decode_node_killed(24).await
}

pub(crate) async fn hundred_streams_while_a_decode_node_is_killed_twenty_times() -> Result<()> {
    decode_node_killed(100).await
}

/// Runs this many streams on two pairs and kills one decode node, twenty times.
async fn decode_node_killed(streams: usize) -> Result<()> {
    let spec = ClusterSpec::smollm2().nodes(2, 2).set("BATON_NODE_KV_MEMORY", "768MiB");
    let (mut cluster, client) = Cluster::start_with_client(spec).await?;
    let reference = Reference::new();
    Report::print_head();
    let fault_free = reference.streams(&client, streams, async { Ok(()) }).await?;
    fault_free.print("none");
    let mut all = Report::default();
    for kill in 0..KILLS {
        let victim = kill % 2;
        let node = &mut cluster.decode[victim];
        let fault = async {
            reference.further_tokens(TOKENS_BEFORE).await?;
            node.kill();
            Ok(())
        };
        all.merge(reference.streams(&client, streams, fault).await?);
        cluster.restart_decode(victim)?;
        cluster.wait_nodes(2, 2).await?;
    }
    all.print(&format!("D killed {KILLS} times"));
    all.ensure_whole()?;
    cluster.stop()
}

pub(crate) async fn requests_finish_when_the_only_decode_node_is_back() -> Result<()> {
    only_decode_node_killed(8, 1).await
}

pub(crate) async fn only_decode_node_killed_five_times() -> Result<()> {
    only_decode_node_killed(24, 5).await
}

/// Runs this many clients on 1P1D, and kills and restarts the decode node this many times.
async fn only_decode_node_killed(clients: usize, kills: usize) -> Result<()> {
    let spec = ClusterSpec::smollm2().nodes(1, 1).set("BATON_NODE_KV_MEMORY", "768MiB");
    let (mut cluster, client) = Cluster::start_with_client(spec).await?;
    let reference = Arc::new(Reference::new());
    let mut all = Report::default();
    for _ in 0..kills {
        let until = Instant::now() + CLIENTS_START_FOR;
        let mut requests = tokio::task::JoinSet::new();
        for first in 0..clients {
            requests.spawn(reference.clone().requests(client.clone(), first, until));
        }
        reference.further_tokens(TOKENS_BEFORE).await?;
        cluster.restart_decode(0)?;
        while let Some(report) = requests.join_next().await {
            all.merge(report?);
        }
        cluster.wait_nodes(1, 1).await?;
    }
    Report::print_head();
    all.print(&format!("1P1D: D killed {kills} times"));
    ensure!(all.streams >= clients * kills, "only {} requests", all.streams);
    all.ensure_whole()?;
    cluster.stop()
}

/// Environment variable: seconds in which nodes are killed one after another. A slow machine needs
/// more seconds to reach [`KILLS_MIN`].
const SECONDS: &str = "BATON_FAULTS_SECONDS";
const SECONDS_DEFAULT: u64 = 40;
/// Minimum number of kills in a valid run.
const KILLS_MIN: usize = 13;

/// Kills a node of either role every 2 to 3 s for 40 s, and restarts it at once.
pub(crate) async fn nodes_killed_every_few_seconds() -> Result<()> {
    let spec = ClusterSpec::smollm2()
        .nodes(2, 2)
        .set("BATON_NODE_KV_MEMORY", "512MiB")
        .set("BATON_ROUTER_TIMEOUT", "120s");
    let (mut cluster, client) = Cluster::start_with_client(spec).await?;
    let reference = Arc::new(Reference::new());
    let seconds = std::env::var(SECONDS).map_or(SECONDS_DEFAULT, |seconds| {
        seconds.parse().unwrap_or_else(|_| panic!("invalid {SECONDS}: {seconds}; expected seconds"))
    });
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut requests = tokio::task::JoinSet::new();
    for first in 0..32 {
        requests.spawn(reference.clone().requests(client.clone(), first, until));
    }
    let mut kills = 0;
    while Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(1500)).await;
        // The restart is part of the interval between two kills: a node loads for about a second.
        let victim = kills / 2 % 2;
        match kills % 2 {
            0 => cluster.restart_decode(victim)?,
            _ => cluster.restart_prefill(victim)?,
        }
        kills += 1;
    }
    let mut all = Report::default();
    while let Some(report) = requests.join_next().await {
        all.merge(report?);
    }
    Report::print_head();
    all.print(&format!("{kills} kills of nodes in {seconds} s"));
    all.ensure_whole()?;
    ensure!(
        kills >= KILLS_MIN,
        "only {kills} kills of nodes; expected at least {KILLS_MIN}, so set {SECONDS} above {seconds}"
    );
    cluster.wait_nodes(2, 2).await?;
    cluster.stop()
}
