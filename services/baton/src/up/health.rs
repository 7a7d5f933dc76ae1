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
use telemetry::MetricsServer;
use tokio::sync::watch;

use super::child::ChildState;
use crate::{connector::Connector, http_client::HttpClient};

/// Time-out of a connection to a node of this host.
const CONNECT_WITHIN: Duration = Duration::from_secs(1);

/// A node's name and state.
type Node = (String, watch::Receiver<ChildState>);

/// Server of `/ready` and `/live`.
pub struct Health {
    ready: Arc<AtomicBool>,
    server: MetricsServer,
}

impl Health {
    pub async fn start(address: SocketAddr, nodes: Vec<Node>) -> Result<Self> {
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

    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Sets the answer of `/ready`: true from the start of all nodes until shutdown. A node that restarts does not
    /// change it, because routers leave this node alone by themselves and the others still serve.
    pub fn set_ready(&self, ready: bool) {
        self.ready.store(ready, Ordering::Release);
    }
}

/// Asks `/live` of each node that is up. A dead node is restarted and does not count, a hung one is not noticed
/// otherwise.
async fn live(nodes: Arc<Vec<Node>>) -> (StatusCode, String) {
    let client = HttpClient::new(Connector::new(CONNECT_WITHIN));
    for (name, state) in nodes.iter() {
        let ChildState::Ready(addresses) = state.borrow().clone() else { continue };
        let problem = match client.get(&format!("http://{}/live", addresses.metrics)).await {
            Ok((StatusCode::OK, _)) => continue,
            Ok((_, text)) => String::from_utf8_lossy(&text).into_owned(),
            Err(error) => format!("{error:#}\n"),
        };
        return (StatusCode::SERVICE_UNAVAILABLE, format!("{name}: {problem}"));
    }
    (StatusCode::OK, "live\n".to_owned())
}

#[cfg(test)]
mod tests {
    use super::{super::child::Ready, *};

    async fn node(status: StatusCode, text: &'static str) -> (MetricsServer, ChildState) {
        let routes = Router::new().route("/live", get(async move || (status, text)));
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let server = MetricsServer::start_routes(any, routes).await.unwrap();
        let metrics = server.address().to_string();
        let ready =
            Ready { grpc: String::new(), http: String::new(), metrics, admin: String::new() };
        (server, ChildState::Ready(ready))
    }

    #[tokio::test]
    async fn a_hung_node_fails_liveness_and_a_restarting_one_does_not() {
        let (_one, live) = node(StatusCode::OK, "live").await;
        let (_other, hung) = node(StatusCode::SERVICE_UNAVAILABLE, "hung: a step").await;
        let (sender, state) = watch::channel(hung);
        let nodes =
            vec![("prefill-0".to_owned(), watch::channel(live).1), ("decode-0".to_owned(), state)];
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let health = Health::start(any, nodes).await.unwrap();
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
