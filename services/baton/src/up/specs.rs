//! The children of `baton up`: their programs, arguments and environment variables.

use std::{
    ffi::OsString,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, anyhow, ensure};
use config::{Config, Source};

use super::{FoundModel, READY_WITHIN, UpArgs, child::ChildSpec, console::Console, gpus};

/// Time that a service has beyond its drain settings from SIGTERM to SIGKILL. A router needs up to
/// 8.5 s. The pod of a group has 10 s, so that no service outlives `baton up`.
const STOP_MARGIN: Duration = Duration::from_secs(9);
/// Time for the requests in flight of a router, unless router.drain_timeout is set.
const UP_DRAIN_MAX: Duration = Duration::from_secs(20);
/// Tokenizer of a Hugging Face folder. A GGUF file contains its tokenizer.
const TOKENIZER_FILE: &str = "tokenizer.json";

/// Settings that all children share.
pub(super) struct ChildSettings {
    console: Console,
    bin_dir: PathBuf,
    envs: Vec<(String, String)>,
    /// GPUs of each node's ranks, prefill nodes first; empty where nodes choose their GPUs.
    gpus: Vec<Vec<String>>,
    /// Prefix of the nodes' ids.
    id: Option<String>,
    addresses: NodeAddresses,
    /// Beginning of the path of each node's disk tier.
    disk_path: Option<PathBuf>,
    /// Grace periods of a node and of the router.
    node_stop_within: Duration,
    router_stop_within: Duration,
    config: Option<PathBuf>,
    /// Nodes register in etcd; the router gets no list.
    etcd: bool,
    /// Folder of the ready files; deleted when the cluster has stopped.
    ready_dir: tempfile::TempDir,
}

impl ChildSettings {
    pub(super) fn new(
        args: &UpArgs,
        config: &Config,
        model: FoundModel,
        console: &Console,
    ) -> Result<Self> {
        let bin_dir = bin_dir(args)?;
        let moves_admin = moves_admin(args.http.unwrap_or(config.router.http), config);
        if !args.no_router {
            check_router_ports(args, config, moves_admin)?;
        }
        let nodes = args.prefill + args.decode;
        let gpus = match &args.gpus {
            Some(list) => gpus::of_nodes(list, nodes, config.node.tp)?,
            None => Vec::new(),
        };
        let FoundModel { path: model, mut envs } = model;
        let mut set = |name: &str, value: String| envs.push((name.to_owned(), value));
        if !args.no_router {
            check_tokenizer(&model)?;
        }
        for (name, value) in [
            ("BATON_CLUSTER_ETCD", args.etcd.clone()),
            (
                "BATON_MODEL_CHAT_TEMPLATE",
                args.chat_template.as_ref().map(|it| it.display().to_string()),
            ),
            ("BATON_NODE_TP", args.tp.map(|tp| tp.to_string())),
            ("BATON_MODEL_DTYPE", args.dtype.clone()),
            ("BATON_MODEL_LOAD_FORMAT", args.load_format.clone()),
        ] {
            if let Some(value) = value {
                set(name, value);
            }
        }
        if config.cluster.secret.is_none() && config.cluster.secret_file.is_none() {
            // Generate a secret for this cluster.
            let mut secret = [0; 32];
            getrandom::fill(&mut secret)
                .map_err(|error| anyhow!("cannot generate a secret: {error}"))?;
            let secret = secret.iter().map(|byte| format!("{byte:02x}")).collect();
            set("BATON_CLUSTER_SECRET", secret);
        }
        if !args.no_router {
            // The nodes listen on the loopback address only, also if the configuration file sets
            // another address to advertise.
            set("BATON_TRANSFER_ADVERTISE", "127.0.0.1".to_owned());
        }
        if config.source_of("node.gpu_memory_percent") == Source::Default {
            // Divide the GPU's memory among the nodes that share the GPU.
            let together = if gpus.is_empty() { nodes } else { gpus::most_shared(&gpus) };
            let share = config.node.gpu_memory_percent / together.max(1);
            set("BATON_NODE_GPU_MEMORY_PERCENT", share.max(1).to_string());
        }
        if config.source_of("node.nodes_per_container") == Source::Default {
            set("BATON_NODE_NODES_PER_CONTAINER", nodes.to_string());
        }
        if moves_admin {
            set("BATON_ROUTER_ADMIN", "127.0.0.1:0".to_owned());
        }
        let drain_delay = match config.source_of("router.drain_delay") {
            Source::Default => {
                // No load balancer sends requests to this router.
                set("BATON_ROUTER_DRAIN_DELAY", "0s".to_owned());
                Duration::ZERO
            }
            _ => config.router.drain_delay,
        };
        let drain_max = match config.source_of("router.drain_timeout") {
            Source::Default => {
                // A person waits at the terminal.
                set("BATON_ROUTER_DRAIN_TIMEOUT", format!("{}s", UP_DRAIN_MAX.as_secs()));
                UP_DRAIN_MAX
            }
            _ => config.router.drain_max(),
        };
        if config.source_of("telemetry.log_format") == Source::Default {
            // The services write to a pipe and would choose json.
            set("BATON_TELEMETRY_LOG_FORMAT", "pretty".to_owned());
        }
        let ready_dir = tempfile::tempdir().context("cannot create a temporary folder")?;
        let etcd = !config.cluster.etcd.is_empty();
        Ok(Self {
            console: console.clone(),
            bin_dir,
            envs,
            gpus,
            id: config.node.id.clone(),
            addresses: NodeAddresses::new(args, config)?,
            disk_path: config.tier.disk_path.clone(),
            node_stop_within: config.node.drain_timeout + STOP_MARGIN,
            // A router accepts requests for up to twice its delay.
            router_stop_within: 2 * drain_delay + drain_max + STOP_MARGIN,
            config: args.config.clone(),
            etcd,
            ready_dir,
        })
    }

    fn spec(&self, name: String, program: &str, mut args: Vec<OsString>) -> ChildSpec {
        if let Some(config) = &self.config {
            args.extend(["--config".into(), config.into()]);
        }
        ChildSpec {
            ready_file: self.ready_dir.path().join(format!("{name}.json")),
            name,
            console: self.console.clone(),
            program: self.bin_dir.join(program),
            args,
            envs: self.envs.clone(),
            sticky: |_| Vec::new(),
            ready_within: READY_WITHIN,
            stop_within: self.node_stop_within,
        }
    }

    /// Returns the node of this role and index; `number` counts the nodes of both roles.
    pub(super) fn node(&self, role: &str, index: u32, number: usize) -> ChildSpec {
        let name = format!("{role}-{index}");
        let id = self.id.as_ref().map_or_else(|| name.clone(), |host| format!("{host}-{name}"));
        let mut envs = self.envs.clone();
        if let Some(gpus) = self.gpus.get(number) {
            // With --gpus a node must not fall back to the CPU.
            envs.push(("BATON_NODE_GPU".to_owned(), gpus.join(",")));
            envs.push(("BATON_NODE_DEVICE".to_owned(), "cuda".to_owned()));
        }
        let [grpc, metrics, control, data] = self.addresses.of(number);
        envs.push(("BATON_NODE_GRPC".to_owned(), grpc));
        envs.push(("BATON_NODE_METRICS".to_owned(), metrics));
        let disk_path = self.disk_path.as_ref();
        let disk_path = disk_path.map_or_else(String::new, |it| format!("{}-{name}", it.display()));
        let args = flags(&[
            ("--node-id", &id),
            ("--transfer-control", &control),
            ("--transfer-data", &data),
            ("--tier-disk-path", &disk_path),
        ]);
        ChildSpec {
            // The router identifies a node by its address, so a restarted node must keep it.
            sticky: |ready| {
                flags(&[("--node-grpc", &ready.grpc), ("--node-metrics", &ready.metrics)])
            },
            envs,
            ..self.spec(name, &format!("baton-{role}-node"), args)
        }
    }

    pub(super) fn router(&self, args: &UpArgs, prefill: &[String], decode: &[String]) -> ChildSpec {
        let listed = |urls: &[String]| if self.etcd { String::new() } else { urls.join(",") };
        let nodes = flags(&[
            ("--cluster-prefill", &listed(prefill)),
            ("--cluster-decode", &listed(decode)),
        ]);
        let mut router = self.spec("router".to_owned(), "baton-router", nodes);
        router.stop_within = self.router_stop_within;
        for (name, address) in [("BATON_ROUTER_HTTP", args.http), ("BATON_ROUTER_GRPC", args.grpc)]
        {
            router.envs.extend(address.map(|address| (name.to_owned(), address.to_string())));
        }
        // Clients know the router's addresses, so a restarted router must keep them.
        router.sticky = |ready| {
            flags(&[
                ("--router-http", &ready.http),
                ("--router-grpc", &ready.grpc),
                ("--router-metrics", &ready.metrics),
                ("--router-admin", &ready.admin),
            ])
        };
        router
    }
}

/// Addresses of the first node: gRPC, metrics, control messages and KV. A node takes these ports
/// plus its number; port 0 is a free port.
struct NodeAddresses([SocketAddr; 4]);

impl NodeAddresses {
    fn new(args: &UpArgs, config: &Config) -> Result<Self> {
        if !args.no_router {
            return Ok(Self([SocketAddr::from(([127, 0, 0, 1], 0)); 4]));
        }
        let addresses = [
            ("node.grpc", config.node.grpc),
            ("node.metrics", config.node.metrics),
            ("transfer.control", config.transfer.control),
            ("transfer.data", config.transfer.data),
        ];
        let last = (1 << 16) - args.prefill - args.decode;
        for (key, address) in addresses {
            ensure!(
                u32::from(address.port()) <= last,
                "invalid {key}: {address}; expected a port of at most {last}, because each node takes the next port"
            );
        }
        let nodes = args.prefill + args.decode;
        let health = args.health.map(|address| ("--health", address, 1));
        let ranges =
            addresses.map(|(key, address)| (key, address, nodes)).into_iter().chain(health);
        let ranges: Vec<(&str, SocketAddr, u32)> = ranges.collect();
        for (index, &(key, address, count)) in ranges.iter().enumerate() {
            for &(other_key, other, other_count) in &ranges[..index] {
                let (port, other_port) = (u32::from(address.port()), u32::from(other.port()));
                let overlaps = port < other_port + other_count && other_port < port + count;
                // A node whose port is taken would fail only after it has loaded.
                ensure!(
                    port == 0 || other_port == 0 || !is_same_host(address, other) || !overlaps,
                    "cannot start the nodes: the ports of {other_key} = {other} and {key} = {address} overlap, \
                     because each node takes the next port; expected ports that differ by at least {nodes}"
                );
            }
        }
        Ok(Self(addresses.map(|(_, address)| address)))
    }

    fn of(&self, number: usize) -> [String; 4] {
        self.0.map(|mut address| {
            if address.port() != 0 {
                address.set_port(address.port() + number as u16);
            }
            address.to_string()
        })
    }
}

/// Returns whether listeners on both addresses would compete for equal ports.
fn is_same_host(one: SocketAddr, other: SocketAddr) -> bool {
    one.ip() == other.ip() || one.ip().is_unspecified() || other.ip().is_unspecified()
}

/// Returns the folder of the services' programs, which must be there.
fn bin_dir(args: &UpArgs) -> Result<PathBuf> {
    let bin_dir = match &args.bin_dir {
        Some(folder) => folder.clone(),
        None => std::env::current_exe()?
            .parent()
            .ok_or_else(|| anyhow!("cannot find the folder of baton"))?
            .to_owned(),
    };
    let nodes_only = ["baton-prefill-node", "baton-decode-node"];
    let router = (!args.no_router).then_some("baton-router");
    for program in nodes_only.into_iter().chain(router) {
        let path = bin_dir.join(program);
        ensure!(
            path.exists(),
            "{} is missing: build it (cargo build --release), or set --bin-dir to its folder",
            path.display()
        );
    }
    Ok(bin_dir)
}

/// Checks that the model has the tokenizer that the router needs: fails now rather than after all
/// nodes have loaded.
fn check_tokenizer(model: &Path) -> Result<()> {
    let has_gguf_file = || {
        let file = gguf::model_file_in(model);
        file.with_context(|| format!("cannot read {}", model.display()))
    };
    ensure!(
        !model.is_dir() || model.join(TOKENIZER_FILE).exists() || has_gguf_file()?.is_some(),
        "cannot serve {}: it has no {TOKENIZER_FILE}, which the router needs",
        model.display()
    );
    Ok(())
}

/// Checks that the router can listen on its ports: fails now rather than after all nodes have
/// loaded.
fn check_router_ports(args: &UpArgs, config: &Config, moves_admin: bool) -> Result<()> {
    let http = args.http.unwrap_or(config.router.http);
    let grpc = args.grpc.unwrap_or(config.router.grpc);
    let admin = (!moves_admin).then_some(("router.admin", config.router.admin));
    for (name, address) in [("--http", http), ("--grpc", grpc)].into_iter().chain(admin) {
        TcpListener::bind(address)
            .with_context(|| format!("cannot listen on {address} ({name})"))?;
    }
    Ok(())
}

/// Returns whether the operator's API moves to a free port: clusters on one machine have different
/// HTTP ports, and need different admin ports. With the configured HTTP port the operator's
/// commands find the API at its default address.
fn moves_admin(http: SocketAddr, config: &Config) -> bool {
    http.port() != config.router.http.port() && config.source_of("router.admin") == Source::Default
}

/// Returns flags with their values, without flags whose value is empty.
fn flags(pairs: &[(&str, &str)]) -> Vec<OsString> {
    pairs
        .iter()
        .filter(|(_, value)| !value.is_empty())
        .flat_map(|(flag, value)| [OsString::from(flag), OsString::from(value)])
        .collect()
}

#[cfg(test)]
mod tests {
    use config::LoadInput;

    use super::*;

    #[test]
    fn admin_port_moves_only_with_the_http_port() {
        let config = |settings: &[(&str, &str)]| {
            let owned = |&(key, value): &(&str, &str)| (key.to_owned(), value.to_owned());
            let flags = settings.iter().map(owned).collect();
            Config::load(LoadInput { flags, ..LoadInput::default() }).unwrap()
        };
        let default = config(&[]);
        assert!(!moves_admin(default.router.http, &default));
        for (http, moves) in [
            ("127.0.0.1:8000", false),
            ("0.0.0.0:8000", false),
            ("127.0.0.1:9000", true),
            ("127.0.0.1:0", true),
        ] {
            assert_eq!(moves_admin(http.parse().unwrap(), &default), moves, "{http}");
        }
        let set = config(&[("router.admin", "127.0.0.1:9002")]);
        assert!(!moves_admin("127.0.0.1:9000".parse().unwrap(), &set));
        let other = config(&[("router.http", "127.0.0.1:9000")]);
        assert!(!moves_admin("127.0.0.1:9000".parse().unwrap(), &other));
    }
}
