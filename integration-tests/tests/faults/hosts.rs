//! A cluster whose processes run on hosts of the network, with its members in etcd.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use integration_tests::{
    client::Client,
    cluster::{SECRET, Service, smollm2},
    etcd::Etcd,
};

use crate::network::{Drops, address, namespace_of, set_drops};

/// Hosts of Baton's router and of etcd; nodes have the hosts before.
pub(crate) const ROUTER: usize = 6;
pub(crate) const ETCD: usize = 7;

const READY_WITHIN: Duration = Duration::from_secs(90);

pub(crate) struct HostCluster {
    pub etcd: Etcd,
    pub router: Service,
    pub prefill: Vec<Service>,
    pub decode: Vec<Service>,
    pub client: Client,
    _folder: tempfile::TempDir,
}

/// Returns the host of a prefill node.
pub(crate) fn prefill_host(index: usize) -> usize {
    index
}

/// Returns the host of a decode node.
pub(crate) fn decode_host(index: usize) -> usize {
    3 + index
}

impl HostCluster {
    pub(crate) async fn start(prefill_nodes: usize, decode_nodes: usize) -> Result<Self> {
        set_drops(&[])?;
        let folder = tempfile::tempdir()?;
        let etcd = Etcd::start_in(&namespace_of(ETCD), &address(ETCD))?;
        let spawn = |host: usize, name: &str, program: &str, own: &[(&str, String)]| {
            let common = [
                ("BATON_MODEL_PATH", smollm2().display().to_string()),
                ("BATON_MODEL_DTYPE", "f32".to_owned()),
                ("BATON_CLUSTER_SECRET", SECRET.to_owned()),
                ("BATON_CLUSTER_ETCD", etcd.url()),
                ("BATON_CLUSTER_ETCD_TTL", "5s".to_owned()),
            ];
            let settings = common.iter().chain(own);
            let settings: BTreeMap<String, String> =
                settings.map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
            let namespace = namespace_of(host);
            let wrapper = ["ip", "netns", "exec", &namespace];
            Service::spawn_by(&wrapper, folder.path(), name, program, &settings)
        };
        let nodes =
            |role: &str, count: usize, host_of: fn(usize) -> usize| -> Result<Vec<Service>> {
                let node = |index: usize| {
                    let host = host_of(index);
                    let at = |port: u16| format!("{}:{port}", address(host));
                    let own = [
                        ("BATON_NODE_ID", format!("{role}-{index}")),
                        ("BATON_NODE_GRPC", at(7000)),
                        ("BATON_NODE_METRICS", at(7001)),
                        ("BATON_TRANSFER_CONTROL", at(7002)),
                        ("BATON_TRANSFER_DATA", at(7003)),
                        ("BATON_NODE_KV_MEMORY", "512MiB".to_owned()),
                    ];
                    spawn(host, &format!("{role}-{index}"), &format!("baton-{role}-node"), &own)
                };
                (0..count).map(node).collect()
            };
        let mut prefill = nodes("prefill", prefill_nodes, prefill_host)?;
        let mut decode = nodes("decode", decode_nodes, decode_host)?;
        let at = |port: u16| format!("{}:{port}", address(ROUTER));
        let own = [
            ("BATON_ROUTER_HTTP", at(8000)),
            ("BATON_ROUTER_GRPC", at(8001)),
            ("BATON_ROUTER_ADMIN", "127.0.0.1:0".to_owned()),
            ("BATON_ROUTER_DRAIN_DELAY", "0s".to_owned()),
            // Every prompt is handed over, so that each fault meets a transfer.
            ("BATON_ROUTER_DISAGGREGATE", "always".to_owned()),
        ];
        let mut router = spawn(ROUTER, "router", "baton-router", &own)?;
        for service in prefill.iter_mut().chain(&mut decode).chain([&mut router]) {
            service.wait_ready(folder.path())?;
        }
        let client = Client::new(format!("http://{}", at(8000)));
        let cluster = Self { etcd, router, prefill, decode, client, _folder: folder };
        cluster.wait_all().await?;
        Ok(cluster)
    }

    /// Waits until the router sees every node. Returns the time that it took.
    pub(crate) async fn wait_all(&self) -> Result<Duration> {
        let begun = Instant::now();
        loop {
            let health = self.client.get_json("/health").await;
            if let Ok((status, health)) = &health
                && *status == 200
                && health["prefill_nodes"] == self.prefill.len()
                && health["decode_nodes"] == self.decode.len()
            {
                return Ok(begun.elapsed());
            }
            ensure!(begun.elapsed() < READY_WITHIN, "the cluster is not whole: {health:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Cuts the link from one host to another.
pub(crate) fn cut(from: usize, to: usize) -> Drops {
    Drops { from, to, percent: 100 }
}
