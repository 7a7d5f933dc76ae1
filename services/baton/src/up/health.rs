//! Health of all nodes together, for the probes of a pod that runs `baton up --no-router`.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
use axum::{Router, http::StatusCode, routing::get};
use futures_util::future::join_all;
use telemetry::MetricsServer;
use tokio::{sync::watch, time::timeout};

use super::child::ChildState;
use crate::{connector::Connector, http_client::HttpClient};

/// Time-out of a connection to a node of this host.
const CONNECT_WITHIN: Duration = Duration::from_secs(1);
/// Time-out of a node's answer. Shorter than the 5 s of the chart's probes, so that their output
/// names the node.
const ANSWER_WITHIN: Duration = Duration::from_secs(3);

/// A node's name and state.
type Node = (String, watch::Receiver<ChildState>);

/// Server of `/ready` and `/live`.
pub(super) struct HealthServer {
    ready: Arc<AtomicBool>,
    server: MetricsServer,
}

impl HealthServer {
    pub(super) async fn start(address: SocketAddr, nodes: Vec<Node>) -> Result<Self> {
        let ready = Arc::new(AtomicBool::new(false));
        let (is_ready, nodes) = (ready.clone(), Arc::new(nodes));
        let ready_now = async move || match is_ready.load(Ordering::Acquire) {
            true => (StatusCode::OK, "ready\n"),
            false => (StatusCode::SERVICE_UNAVAILABLE, "not ready\n"),
        };
        let live_now = move || live(nodes.clone());
        let routes = Router::new().route("/ready", get(ready_now)).route("/live", get(live_now));
        Ok(Self { ready, server: MetricsServer::start_routes(address, routes).await? })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Sets the answer of `/ready`: true from the start of all nodes until shutdown. A node that
    /// restarts does not change the answer, because routers stop using this node by themselves and
    /// the other nodes still serve.
    pub(super) fn set_ready(&self, ready: bool) {
        self.ready.store(ready, Ordering::Release);
    }
}

/// Queries `/live` of each node that is up, to detect hung nodes. Dead nodes do not count: they are
/// restarted.
async fn live(nodes: Arc<Vec<Node>>) -> (StatusCode, String) {
    let client = HttpClient::new(Connector::new(CONNECT_WITHIN));
    let problems = join_all(nodes.iter().map(|node| problem(&client, node))).await;
    match problems.into_iter().flatten().next() {
        Some(problem) => (StatusCode::SERVICE_UNAVAILABLE, problem),
        None => (StatusCode::OK, "live\n".to_owned()),
    }
}

/// Returns why a node that is up is not live.
async fn problem(client: &HttpClient, (name, state): &Node) -> Option<String> {
    let ChildState::Ready(addresses) = state.borrow().clone() else { return None };
    let url = format!("http://{}/live", addresses.metrics);
    let problem = match timeout(ANSWER_WITHIN, client.get(&url)).await {
        Ok(Ok((StatusCode::OK, _))) => return None,
        Ok(Ok((_, text))) => String::from_utf8_lossy(&text).into_owned(),
        Ok(Err(error)) => format!("{error:#}\n"),
        Err(_) => format!("no answer within {ANSWER_WITHIN:?}\n"),
    };
    Some(format!("{name}: {problem}"))
}

#[cfg(test)]
mod tests {
    use super::{super::child::ReadyFile, *};

    async fn node(status: StatusCode, text: &'static str) -> (MetricsServer, ChildState) {
        let routes = Router::new().route("/live", get(async move || (status, text)));
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let server = MetricsServer::start_routes(any, routes).await.unwrap();
        let metrics = server.address().to_string();
        let ready =
            ReadyFile { grpc: String::new(), http: String::new(), metrics, admin: String::new() };
        (server, ChildState::Ready(ready))
    }

    #[tokio::test]
    async fn every_silent_node_is_asked_at_the_same_time() {
        let silent = || {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let metrics = listener.local_addr().unwrap().to_string();
            let ready = ReadyFile {
                grpc: String::new(),
                http: String::new(),
                metrics,
                admin: String::new(),
            };
            (listener, watch::channel(ChildState::Ready(ready)).1)
        };
        let (silent, nodes): (Vec<_>, Vec<_>) = (0..4)
            .map(|index| (format!("decode-{index}"), silent()))
            .map(|(name, (listener, state))| (listener, (name, state)))
            .unzip();
        // All four together, and not one after the other.
        let answer = timeout(2 * ANSWER_WITHIN, live(Arc::new(nodes))).await.unwrap();
        let problem = "decode-0: no answer within 3s\n".to_owned();
        assert_eq!(answer, (StatusCode::SERVICE_UNAVAILABLE, problem));
        drop(silent);
    }

    #[tokio::test]
    async fn a_hung_node_fails_liveness_and_a_restarting_one_does_not() {
        let (_one, live) = node(StatusCode::OK, "live").await;
        let (_other, hung) = node(StatusCode::SERVICE_UNAVAILABLE, "hung: a step").await;
        let (sender, state) = watch::channel(hung);
        let nodes =
            vec![("prefill-0".to_owned(), watch::channel(live).1), ("decode-0".to_owned(), state)];
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let health = HealthServer::start(any, nodes).await.unwrap();
        let client = HttpClient::new(Connector::new(CONNECT_WITHIN));
        let ask = async |path: &str| {
            let url = format!("http://{}{path}", health.address());
            let (status, text) = client.get(&url).await.unwrap();
            (status.as_u16(), String::from_utf8(text.to_vec()).unwrap())
        };
        assert_eq!(ask("/live").await, (503, "decode-0: hung: a step".to_owned()));
        sender.send_replace(ChildState::Starting);
        assert_eq!(ask("/live").await, (200, "live\n".to_owned()));

        assert_eq!(ask("/ready").await.0, 503);
        health.set_ready(true);
        assert_eq!(ask("/ready").await.0, 200);
        health.set_ready(false);
        assert_eq!(ask("/ready").await.0, 503);
    }
}
