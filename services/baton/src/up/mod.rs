//! `baton up`: runs a cluster on this machine as supervised child processes.
//!
//! Nodes start first, each on a free port. When all nodes are ready the router starts with their addresses. On
//! shutdown the router stops first, so no request loses its node. With `--no-router` it runs the nodes of one host of
//! a larger cluster, on configured ports.

mod backoff;
mod child;
mod console;
mod gpus;
mod health;
#[allow(unsafe_code)]
mod process;
pub(crate) mod sample;

use std::{
    ffi::OsString,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use clap::{Args, builder::PossibleValuesParser};
use config::{Config, Dtype, LoadFormat, LoadInput, ModelPath, Source, hub::Parts};
use credentials::{SettingFile, client_config_for};
use futures_util::future::try_join_all;
use serde_json::Value;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

use self::{
    child::{ChildSpec, ChildState, Ready, supervise},
    console::Console,
    health::Health,
    process::{die_with_parent, send_terminate},
};
use crate::{
    client_args::ClientArgs, connector::Connector, http_client::HttpClient, hub, model_store,
};

/// Time-out of a service's start.
const READY_WITHIN: Duration = Duration::from_secs(120);
/// Time-out of a node's start with `--no-router`: weights may come from a slow volume.
const HOST_READY_WITHIN: Duration = Duration::from_secs(3600);
/// Time that a service has beyond its drain settings from SIGTERM to SIGKILL. A router needs up to 8.5 s. The pod of a
/// group has 10 s, so that no service outlives `baton up`.
const STOP_MARGIN: Duration = Duration::from_secs(9);
const NODES_MAX: u32 = 64;
/// Tokenizer of a Hugging Face folder. A GGUF file contains its tokenizer.
const TOKENIZER_FILE: &str = "tokenizer.json";
/// Model that is served when neither flag nor configuration names one.
const DEFAULT_MODEL: &str = "smollm2-135m";

#[derive(Args)]
pub struct UpArgs {
    /// Model: a GGUF file, a Hugging Face folder, a name that `baton model list` prints, or
    /// hf:ORG/NAME[@REVISION][/FILE.gguf], which is downloaded if the cache lacks it.
    /// [default: that of the configuration, otherwise smollm2-135m]
    #[arg(long)]
    model: Option<String>,
    /// Number of prefill nodes. With 0 the decode nodes prefill the prompts.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=i64::from(NODES_MAX)))]
    prefill: u32,
    /// Number of decode nodes.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(NODES_MAX)))]
    decode: u32,
    /// GPUs by index (0,1), range (0-3) or UUID: one for each rank of each node, prefill nodes first, or the GPUs of
    /// one node, which all nodes share. [default: those of the configuration, otherwise all nodes share the first]
    #[arg(long)]
    gpus: Option<String>,
    /// Address of the OpenAI HTTP API. [default: that of the configuration, otherwise 127.0.0.1:8000]
    #[arg(long)]
    http: Option<SocketAddr>,
    /// Address of the gRPC API. [default: that of the configuration, otherwise 127.0.0.1:8001]
    #[arg(long)]
    grpc: Option<SocketAddr>,
    /// Number format of the weights; KV is f32 with f32, otherwise bf16. [default: that of the configuration,
    /// otherwise bf16]
    #[arg(long, value_parser = PossibleValuesParser::new(Dtype::WORDS))]
    dtype: Option<String>,
    /// Tensor-parallel ranks of each node; must divide the model's number of KV heads. [default: that of the
    /// configuration, otherwise 1]
    #[arg(long)]
    tp: Option<u32>,
    /// Source of the weights: auto (the model's files) or dummy (random weights; needs only config.json and
    /// tokenizer.json). [default: that of the configuration, otherwise auto]
    #[arg(long, value_parser = PossibleValuesParser::new(LoadFormat::WORDS))]
    load_format: Option<String>,
    /// Etcd endpoints, separated by commas. Nodes register in etcd, so further nodes can join. [default: those of
    /// the configuration, otherwise a static list of the nodes started here]
    #[arg(long, value_name = "URL")]
    etcd: Option<String>,
    /// Start nodes only, for one host of a cluster whose routers run elsewhere. Each node listens on the configured
    /// ports plus its number, prefill nodes first. Needs cluster.secret.
    #[arg(long, conflicts_with_all = ["http", "grpc", "sample"])]
    no_router: bool,
    /// Address of /ready (all nodes started) and /live (no node hangs) for all nodes together.
    #[arg(long, requires = "no_router", value_name = "ADDRESS")]
    health: Option<SocketAddr>,
    /// Configuration file of all services. The environment (BATON_*) and these flags override the file. `up` sets
    /// the nodes' addresses and the router's list of nodes.
    #[arg(long, env = "BATON_CONFIG")]
    config: Option<PathBuf>,
    /// Folder of the models that were fetched by name.
    #[arg(long, env = "BATON_MODELS_DIR", default_value = "models")]
    models_dir: PathBuf,
    /// Folder of the service binaries. [default: the folder of `baton`]
    #[arg(long)]
    bin_dir: Option<PathBuf>,
    /// Send a sample question when ready and print the streamed answer.
    #[arg(long)]
    sample: bool,
    /// Stop after the sample answer.
    #[arg(long, requires = "sample")]
    once: bool,
}

/// Returns a child's name as a prefix of its log lines, coloured on a terminal.
fn coloured(name: &str) -> String {
    use std::io::IsTerminal;
    if !std::io::stderr().is_terminal() {
        return format!("[{name}]");
    }
    let colour = 31 + name.bytes().map(u32::from).sum::<u32>() % 6;
    format!("\x1b[{colour}m[{name}]\x1b[0m")
}

pub fn run(args: UpArgs) -> Result<()> {
    let config = configuration(&args)?;
    // Use a single thread, because the kernel kills a child when the thread that spawned it ends.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(up(args, config));
    // A drop would wait for a download that a signal interrupted.
    runtime.shutdown_background();
    outcome
}

/// A supervised child.
struct Supervised {
    name: String,
    stop: CancellationToken,
    state: watch::Receiver<ChildState>,
    task: JoinHandle<()>,
}

impl Supervised {
    fn start(spec: ChildSpec) -> Self {
        let (name, stop) = (spec.name.clone(), CancellationToken::new());
        let (sender, state) = watch::channel(ChildState::Starting);
        let task = tokio::spawn(supervise(spec, stop.clone(), sender));
        Self { name, stop, state, task }
    }

    /// Waits for the first start to succeed or fail.
    async fn ready(&mut self) -> Result<Ready> {
        let state = self
            .state
            .wait_for(|state| !matches!(state, ChildState::Starting))
            .await
            .map_err(|_| anyhow!("the supervisor of {} panicked", self.name))?;
        match &*state {
            ChildState::Ready(ready) => Ok(ready.clone()),
            ChildState::Failed(reason) => {
                bail!("{} {reason}; its log lines above have the cause", self.name)
            }
            ChildState::Starting | ChildState::Stopped => bail!("{} was stopped", self.name),
        }
    }
}

/// All started children, in the order of their start.
#[derive(Default)]
struct Cluster {
    nodes: Vec<Supervised>,
    router: Option<Supervised>,
    health: Option<Health>,
}

impl Cluster {
    async fn stop(self) {
        if let Some(health) = &self.health {
            health.set_ready(false);
        }
        if let Some(router) = self.router {
            router.stop.cancel();
            let _ = router.task.await;
        }
        for node in &self.nodes {
            node.stop.cancel();
        }
        for node in self.nodes {
            let _ = node.task.await;
        }
    }
}

/// Loads the configuration as the services will load it, to report errors once and before any start.
fn configuration(args: &UpArgs) -> Result<Config> {
    let environment = config::environment_of(std::env::vars_os())?;
    let etcd = args.etcd.iter().map(|etcd| ("cluster.etcd".to_owned(), etcd.clone()));
    let tp = args.tp.iter().map(|tp| ("node.tp".to_owned(), tp.to_string()));
    let flags = etcd.chain(tp).collect();
    let config = Config::load(LoadInput { file: args.config.clone(), environment, flags })?;
    if args.no_router {
        // Do not generate a secret: these nodes could not connect to the nodes of other hosts.
        config.cluster.required_secret()?;
    }
    // All nodes have the same settings, so two nodes would compete for the same CPUs.
    let nodes = args.prefill + args.decode;
    for (key, is_set) in [
        ("node.cpus", config.node.cpus.is_some()),
        ("node.numa_node", config.node.numa_node.is_some()),
    ] {
        ensure!(
            !is_set || nodes == 1,
            "cannot use {key} ({}): it would pin the threads of all {nodes} nodes to the same CPUs; remove it, \
             or start the nodes one by one without `baton up`",
            config.source_of(key),
        );
    }
    Ok(config)
}

/// The served model.
struct FoundModel {
    /// Local path.
    path: PathBuf,
    /// Environment variables that tell the services about the model.
    envs: Vec<(String, String)>,
}

/// Finds the model. Downloads a hub model that the cache lacks.
fn find_model(args: &UpArgs, config: &Config) -> Result<FoundModel> {
    let mut envs = Vec::new();
    let asked = match (&args.model, &config.model.path) {
        (None, Some(path)) => {
            let path = match path {
                ModelPath::Local(path) => path.clone(),
                ModelPath::Hub(model) => hub::obtain(model, Parts::All, false)?,
            };
            return Ok(FoundModel { path, envs });
        }
        (asked, _) => asked.as_deref().unwrap_or(DEFAULT_MODEL),
    };
    let path = model_store::resolve(&args.models_dir, asked)?;
    // Services resolve a hub model by its name and serve the model under this name.
    let model_path = match model_store::hub_model(asked)? {
        Some(model) => model.to_string(),
        None => path.display().to_string(),
    };
    envs.push(("BATON_MODEL_PATH".to_owned(), model_path));
    // A model fetched by name is served under this name.
    if model_store::is_known(asked) && config.model.name.is_none() {
        envs.push(("BATON_MODEL_NAME".to_owned(), asked.to_owned()));
    }
    Ok(FoundModel { path, envs })
}

async fn up(args: UpArgs, config: Config) -> Result<()> {
    // Installed before the download: without a handler, the first process of a container ignores signals.
    let mut signals = [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?];
    let find = move || find_model(&args, &config).map(|model| (args, config, model));
    let found = tokio::select! {
        found = tokio::task::spawn_blocking(find) => found.context("the search for the model panicked")?,
        () = stopped(&mut signals) => return Ok(()),
    };
    let (args, config, model) = found?;
    let (console, last_lines) = Console::start()?;
    let outcome = serve_until_signal(args, config, model, console, signals).await;
    last_lines.wait();
    outcome
}

/// Returns at the first SIGTERM or SIGINT.
async fn stopped([terminate, interrupt]: &mut [Signal; 2]) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

async fn serve_until_signal(
    args: UpArgs,
    config: Config,
    model: FoundModel,
    console: Console,
    mut signals: [Signal; 2],
) -> Result<()> {
    let started = Instant::now();
    let mut cluster = Cluster::default();
    let outcome = tokio::select! {
        outcome = serve(&args, (&config, model), started, &console, &mut cluster) => outcome,
        () = stopped(&mut signals) => Ok(()),
    };
    if cluster.nodes.is_empty() {
        return outcome;
    }
    console.say("baton: shutting down; a second signal stops at once");
    tokio::select! {
        () = cluster.stop() => outcome,
        // Returning drops the children, which kills them.
        () = stopped(&mut signals) => {
            Err(anyhow!("stopped at once; in-flight requests were cancelled"))
        }
    }
}

/// Starts all services and serves until the caller drops this future; returns early with `--once`.
async fn serve(
    args: &UpArgs,
    (config, model): (&Config, FoundModel),
    started: Instant,
    console: &Console,
    cluster: &mut Cluster,
) -> Result<()> {
    let common = Common::new(args, config, model, console)?;
    for (role, count) in [("prefill", args.prefill), ("decode", args.decode)] {
        for index in 0..count {
            let spec = common.node(role, index, cluster.nodes.len());
            cluster.nodes.push(Supervised::start(spec));
        }
    }
    if let Some(address) = args.health {
        let nodes = cluster.nodes.iter().map(|node| (node.name.clone(), node.state.clone()));
        cluster.health = Some(Health::start(address, nodes.collect()).await?);
    }
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    // The first node that fails ends the wait for the others, which may load for an hour.
    let addresses = try_join_all(cluster.nodes.iter_mut().map(Supervised::ready)).await?;
    for (node, ready) in cluster.nodes.iter().zip(addresses) {
        let url = format!("http://{}", ready.grpc);
        if node.name.starts_with("prefill") { prefill.push(url) } else { decode.push(url) }
    }
    if args.no_router {
        let mut line = format!(
            "baton: ready after {:.2} s: prefill nodes {}  decode nodes {}",
            started.elapsed().as_secs_f64(),
            prefill.join(","),
            decode.join(",")
        );
        if let Some(health) = &cluster.health {
            health.set_ready(true);
            line += &format!("  health http://{}", health.address());
        }
        console.say(&line);
        return std::future::pending().await;
    }
    let router = cluster.router.insert(Supervised::start(common.router(args, &prefill, &decode)));
    let ready = router.ready().await?;
    let (client, url) = api_client(config, &ready)?;
    wait_healthy(&client, &url, args.prefill, args.decode).await?;
    console.say(&format!(
        "baton: ready after {:.2} s: OpenAI API {url}/v1  gRPC {}  metrics http://{}/metrics  \
         admin http://{}",
        started.elapsed().as_secs_f64(),
        ready.grpc,
        ready.metrics,
        ready.admin
    ));
    if args.sample {
        let held = console.hold();
        let client = client.with_key(ClientArgs::default().authorization()?);
        sample::run(&client, &url).await.context("the sample request failed")?;
        drop(held);
        if args.once {
            return Ok(());
        }
        console.say("baton: serving; Ctrl-C stops");
    }
    std::future::pending().await
}

/// Returns a client of the started router, and the URL of the router's HTTP API.
fn api_client(config: &Config, ready: &Ready) -> Result<(HttpClient, String)> {
    let connector = Connector::new(Duration::from_secs(1));
    let Some(cert) = &config.router.tls_cert else {
        return Ok((HttpClient::new(connector), format!("http://{}", ready.http)));
    };
    // The certificate need not name the address on which the router listens.
    let tls = client_config_for(&SettingFile::new("router.tls_cert", cert)).map_err(Error::msg)?;
    Ok((HttpClient::new(connector.with_tls(tls)), format!("https://{}", ready.http)))
}

/// Waits until the router is ready and has connected to all nodes.
async fn wait_healthy(client: &HttpClient, url: &str, prefill: u32, decode: u32) -> Result<()> {
    let deadline = Instant::now() + READY_WITHIN;
    loop {
        if let Ok((status, body)) = client.get(&format!("{url}/health")).await {
            let health: Value = serde_json::from_slice(&body).unwrap_or_default();
            // etcd may list further nodes.
            let sees = |key: &str, count: u32| health[key].as_u64() >= Some(count.into());
            // A success status means that the nodes have connected to each other.
            let sees_all = sees("prefill_nodes", prefill) && sees("decode_nodes", decode);
            if sees_all && status.is_success() {
                return Ok(());
            }
        }
        ensure!(
            Instant::now() < deadline,
            "the router did not connect to {prefill} prefill and {decode} decode nodes within {} s",
            READY_WITHIN.as_secs()
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Settings that all children share.
struct Common {
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
    ready_within: Duration,
    /// Grace periods of a node and of the router.
    node_stop_within: Duration,
    router_stop_within: Duration,
    config: Option<PathBuf>,
    /// Nodes register in etcd; the router gets no list.
    etcd: bool,
    /// Folder of the ready files; deleted when the cluster has stopped.
    ready_dir: tempfile::TempDir,
}

impl Common {
    fn new(args: &UpArgs, config: &Config, model: FoundModel, console: &Console) -> Result<Self> {
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
        let apis =
            [("http", args.http, config.router.http), ("grpc", args.grpc, config.router.grpc)];
        for (name, given, configured) in apis.into_iter().filter(|_| !args.no_router) {
            // Fail now rather than after all nodes have loaded.
            let address = given.unwrap_or(configured);
            TcpListener::bind(address)
                .with_context(|| format!("cannot listen on {address} (--{name})"))?;
        }
        let nodes = args.prefill + args.decode;
        let gpus = match &args.gpus {
            Some(list) => gpus::of_nodes(list, nodes, config.node.tp)?,
            None => Vec::new(),
        };
        let FoundModel { path: model, mut envs } = model;
        let mut set = |name: &str, value: String| envs.push((name.to_owned(), value));
        // Fail before the nodes load: only the router would report the missing tokenizer.
        ensure!(
            args.no_router
                || !model.is_dir()
                || model.join(TOKENIZER_FILE).exists()
                || gguf::file_of_folder(&model).is_some(),
            "cannot serve {}: it has no {TOKENIZER_FILE}, which the router needs",
            model.display()
        );
        for (name, value) in [
            ("BATON_CLUSTER_ETCD", args.etcd.clone()),
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
        if config.source_of("node.gpu_memory_percent") == Source::Default {
            // Divide the GPU's memory among the nodes that share the GPU.
            let together = if gpus.is_empty() { nodes } else { gpus::most_shared(&gpus) };
            let share = config.node.gpu_memory_percent / together.max(1);
            set("BATON_NODE_GPU_MEMORY_PERCENT", share.max(1).to_string());
        }
        if config.source_of("node.nodes_per_container") == Source::Default {
            set("BATON_NODE_NODES_PER_CONTAINER", nodes.to_string());
        }
        if args.http.is_some() && config.source_of("router.admin") == Source::Default {
            // Clusters on one machine have different HTTP ports, and need different admin ports.
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
            ready_within: if args.no_router { HOST_READY_WITHIN } else { READY_WITHIN },
            node_stop_within: config.node.drain_timeout + STOP_MARGIN,
            // A router accepts requests for up to twice its delay.
            router_stop_within: 2 * drain_delay + config.router.drain_timeout + STOP_MARGIN,
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
            ready_within: self.ready_within,
            stop_within: self.node_stop_within,
        }
    }

    /// Returns the node of this role and index; `number` counts the nodes of both roles.
    fn node(&self, role: &str, index: u32, number: usize) -> ChildSpec {
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

    fn router(&self, args: &UpArgs, prefill: &[String], decode: &[String]) -> ChildSpec {
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

/// Addresses of the first node: gRPC, metrics, control messages and KV. A node takes these ports plus its number; port 0
/// is a free port.
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

/// Returns flags with their values, without flags whose value is empty.
fn flags(pairs: &[(&str, &str)]) -> Vec<OsString> {
    pairs
        .iter()
        .filter(|(_, value)| !value.is_empty())
        .flat_map(|(flag, value)| [OsString::from(flag), OsString::from(value)])
        .collect()
}
