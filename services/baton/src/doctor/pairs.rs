//! The transport and rate of KV between running nodes, read from their metrics.

use std::{fmt, time::Duration};

use anyhow::{Context, Result};
use serde::Serialize;
use ureq::Agent;

/// Time-out of reading the metrics of one node.
const READ_WITHIN: Duration = Duration::from_secs(5);
/// Beginning of the lines with measured rates in a node's metrics, before the labels.
const RATES: &str = "baton_kv_transfer_receive_rate_bytes_per_second{";

/// The connection by which a node last received KV from a peer.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct PairReport {
    /// Address of the receiver's metrics.
    node: String,
    peer: String,
    transport: String,
    gb_per_s: f64,
}

impl fmt::Display for PairReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, peer, transport, gb_per_s } = self;
        write!(f, "{node} receives from {peer} by {transport}, {gb_per_s:.1} GB/s")
    }
}

/// Reads the pairs of the node with metrics at `address` (`host:port`).
pub(super) fn of_node(address: &str) -> Result<Vec<PairReport>> {
    let agent: Agent = Agent::config_builder().timeout_global(Some(READ_WITHIN)).build().into();
    let url = format!("http://{address}/metrics");
    let read = || agent.get(&url).call()?.body_mut().read_to_string();
    let metrics = read().with_context(|| format!("cannot read {url}"))?;
    Ok(metrics.lines().filter_map(|line| pair(address, line)).collect())
}

/// Parses a line of a node's metrics; `None` if the line is no measured rate.
fn pair(node: &str, line: &str) -> Option<PairReport> {
    let (labels, value) = line.strip_prefix(RATES)?.rsplit_once("} ")?;
    let label = |name: &str| {
        let mut labels = labels.split(',').filter_map(|label| label.split_once('='));
        labels.find(|(key, _)| *key == name).map(|(_, value)| value.trim_matches('"').to_owned())
    };
    let rate: f64 = value.parse().ok()?;
    let (peer, transport) = (label("peer")?, label("path")?);
    Some(PairReport { node: node.to_owned(), peer, transport, gb_per_s: rate / 1e9 })
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpListener,
        thread,
    };

    use super::*;

    #[test]
    fn pairs_are_read_from_the_metrics_of_a_node() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            let count = stream.read(&mut request).unwrap();
            assert!(request[..count].starts_with(b"GET /metrics "));
            let body = "# HELP baton_kv_transfer_receive_rate_bytes_per_second Rate\n\
                        baton_kv_transfer_receive_rate_bytes_per_second{path=\"nccl\",peer=\"prefill-1\"} 24500000000\n\
                        baton_kv_transfer_peers{path=\"nccl\"} 1\n";
            write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len())
        });
        let pairs = of_node(&address).unwrap();
        server.join().unwrap().unwrap();
        let shown: Vec<String> = pairs.iter().map(PairReport::to_string).collect();
        assert_eq!(shown, [format!("{address} receives from prefill-1 by nccl, 24.5 GB/s")]);
    }

    #[test]
    fn unreachable_node_is_named() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let error = of_node(&free.to_string()).unwrap_err().to_string();
        assert_eq!(error, format!("cannot read http://{free}/metrics"));
    }
}
