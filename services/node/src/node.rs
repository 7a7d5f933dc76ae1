//! Starts and stops a node.

mod start;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use cluster::NodeRecord;
use credentials::ReloadTask;
use kv_transfer::Transfers;
use membership::etcd::Registration;
use telemetry::{Metrics, MetricsServer};
use tokio_util::sync::CancellationToken;
use tonic_health::ServingStatus;
use tracing::{info, warn};

use crate::{
    engine_thread::{Device, EngineError, EngineThread},
    grpc_server::GrpcServer,
    inbox::{EngineCommand, EngineInbox},
    populate::PopulateThread,
    probes::Liveness,
    tiers::TierCopies,
    weights::WeightActor,
};

/// Time for attempts to end after the drain time-out: a dead peer holds blocks for one lease and
/// half a second.
const END_WITHIN: Duration = Duration::from_millis(2_500);
/// Time to delete the node's record from etcd, while in-flight requests finish.
const LEAVE_WITHIN: Duration = Duration::from_secs(3);
/// Time for callers to read the end of their streams.
const SERVER_STOP_WITHIN: Duration = Duration::from_secs(1);
/// Time for the step in flight to finish.
const ENGINE_STOP_WITHIN: Duration = Duration::from_secs(10);
/// Time for copies of the KV tiers in flight to finish.
const TIERS_STOP_WITHIN: Duration = Duration::from_secs(5);
const METRICS_STOP_WITHIN: Duration = Duration::from_millis(500);

/// Reason why a serving node failed.
#[derive(Debug, thiserror::Error)]
pub enum NodeFailure {
    #[error("the engine failed: {0}")]
    Engine(#[from] EngineError),
    #[error("still running after its deadline: {what}")]
    Deadline { what: String },
}

/// The addresses of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addresses {
    pub grpc: SocketAddr,
    pub metrics: SocketAddr,
    /// `tcp://host:port`, as peers reach it.
    pub control: String,
    /// `tcp://host:port` of the KV listener.
    pub data: String,
}

/// A serving node. [`Node::drain`] shuts it down gracefully; a drop does not.
pub struct Node {
    record: NodeRecord,
    addresses: Addresses,
    metrics: Metrics,
    inbox: EngineInbox,
    draining: CancellationToken,
    liveness: Liveness,
    server: GrpcServer,
    metrics_server: MetricsServer,
    engine: EngineThread,
    transfers: Arc<Transfers>,
    /// Copies of the KV tiers; `None` without tiers.
    tiers: Option<Arc<TierCopies>>,
    populate: PopulateThread,
    weights: WeightActor,
    /// The record in etcd; `None` without etcd.
    registration: Option<Registration>,
    /// Reads changed certificates.
    reload: ReloadTask,
    drain_timeout: Duration,
}

impl Node {
    pub fn record(&self) -> &NodeRecord {
        &self.record
    }

    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// Waits until the node has failed and returns the reason.
    pub async fn failed(&mut self) -> String {
        tokio::select! {
            () = self.engine.ended() => "the engine ended".to_owned(),
            reason = self.server.ended() => format!("the gRPC server ended: {reason}"),
        }
    }

    /// Shuts down gracefully: rejects new calls, waits for in-flight requests (at most
    /// `node.drain_timeout`), leaves the cluster, and ends every thread and task.
    pub async fn drain(self) -> Result<(), NodeFailure> {
        let Self {
            server,
            inbox,
            mut engine,
            transfers,
            tiers,
            populate,
            weights,
            metrics_server,
            registration,
            reload,
            ..
        } = self;
        // A failed engine has no attempts: callers only read the end of their streams.
        let drain_timeout = if engine.has_ended() { END_WITHIN } else { self.drain_timeout };
        let NodeRecord { role, node_id, model, .. } = &self.record;
        let name = format!("{role} node {node_id} for {model}");
        self.liveness.set_ready(false);
        self.metrics.set_draining(true);
        self.draining.cancel();
        server.set_status(ServingStatus::NotServing).await;
        info!(attempts = inbox.attempt_count(), "{name} drains");
        // Fails only when the engine thread has ended or hangs, which its join reports below.
        let _ = inbox.send(EngineCommand::Drain { grace: drain_timeout });
        let leave = async {
            if let Some(registration) = registration {
                registration.leave(LEAVE_WITHIN).await;
            }
        };
        let end_work = async {
            if tokio::time::timeout(drain_timeout, inbox.idle()).await.is_ok() {
                return;
            }
            let seconds = drain_timeout.as_secs_f64();
            warn!("{name} aborts its in-flight requests after {seconds} s");
            let _ = inbox.send(EngineCommand::EndAll);
            if tokio::time::timeout(END_WITHIN, inbox.idle()).await.is_err() {
                warn!("{name} stops although callers have not read their streams");
            }
        };
        tokio::join!(leave, end_work);
        // It holds an inbox.
        weights.shutdown().await;
        // Ends the observers' streams. The server waits for them.
        let _ = inbox.send(EngineCommand::Stop);
        drop(inbox);
        if !server.shutdown(SERVER_STOP_WITHIN).await {
            info!("{name} closed connections that were still open");
        }
        let stopped = stop_threads(engine, transfers, tiers, populate).await;
        if let Err(error) = metrics_server.shutdown(METRICS_STOP_WITHIN).await {
            warn!("{error}");
        }
        if let Err(error) = reload.shutdown().await {
            warn!("the task that reads certificates panicked: {error}");
        }
        stopped
    }
}

/// Joins the engine thread, then the other threads, then drops the device.
async fn stop_threads(
    engine: EngineThread,
    transfers: Arc<Transfers>,
    tiers: Option<Arc<TierCopies>>,
    populate: PopulateThread,
) -> Result<(), NodeFailure> {
    let joined = tokio::task::spawn_blocking(move || engine.join());
    let (engine, device) = match tokio::time::timeout(ENGINE_STOP_WITHIN, joined).await {
        Err(_) => (Err(NodeFailure::Deadline { what: "the engine thread".into() }), Device::None),
        Ok(joined) => {
            let (ended, device) = joined.expect("join catches panics and is not aborted");
            (ended.map_err(NodeFailure::from), device)
        }
    };
    // The engine thread has dropped its reference, so this joins the threads. A copy in flight may
    // take long on a broken disk.
    let copies = tokio::task::spawn_blocking(move || drop(tiers));
    let copies = tokio::time::timeout(TIERS_STOP_WITHIN, copies).await;
    let copies = copies.map_err(|_| NodeFailure::Deadline { what: "copies of KV tiers".into() });
    let shutdown = move || {
        drop(populate);
        transfers.shutdown()
    };
    let transfers = tokio::task::spawn_blocking(shutdown)
        .await
        .expect("shutdown does not panic and is not aborted")
        .map_err(|error| NodeFailure::Deadline { what: error.threads.join(", ") });
    // Transfers accessed the device's memory, so it is dropped after them.
    let closed = tokio::task::spawn_blocking(move || drop(device));
    let closed = tokio::time::timeout(ENGINE_STOP_WITHIN, closed).await;
    let closed = closed.map_err(|_| NodeFailure::Deadline { what: "the device".into() });
    engine.and(copies.map(drop)).and(transfers).and(closed.map(drop))
}
