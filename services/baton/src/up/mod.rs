//! `baton up`: a whole cluster on this machine, as child processes that are looked after.
//!
//! Order of a start: nodes first, each on a port of its choice; when all are ready the router, with
//! their addresses. Order of a stop: the router first, so that no request meets a missing node.

mod backoff;
mod child;
mod console;
mod gpus;
#[allow(unsafe_code)]
mod process;
mod sample;

use std::{
    ffi::OsString,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{Args, ValueEnum};
use config::{Config, LoadInput, ModelPath, Source, hub::Parts};
use serde_json::Value;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

use self::{
    child::{ChildSpec, ChildState, Ready, supervise},
    console::Console,
    process::{die_with_parent, send_terminate},
};
use crate::{http_client::HttpClient, hub, model_store};

/// A start that takes longer is a failure; loading is bound by the disk.
const READY_WITHIN: Duration = Duration::from_secs(120);
/// From SIGTERM to SIGKILL: requests in flight may end.
const STOP_WITHIN: Duration = Duration::from_secs(30);
const NODES_MAX: u32 = 64;
/// Part of every Hugging Face folder; a GGUF file has its tokenizer inside.
const TOKENIZER_FILE: &str = "tokenizer.json";
/// Served when neither flag nor configuration names a model.
const DEFAULT_MODEL: &str = "smollm2-135m";

#[derive(Args)]
pub struct UpArgs {
    /// Model to serve: a GGUF file, a Hugging Face folder, a name `baton model list` prints, or
    /// hf:ORG/NAME[@REVISION][/FILE.gguf], which is fetched if it is not in the cache.
    /// [default: the configuration's, else smollm2-135m]
    #[arg(long)]
    model: Option<String>,
    /// Prefill nodes. With 0 the decode nodes read the prompts themselves.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=i64::from(NODES_MAX)))]
    prefill: u32,
    /// Decode nodes.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(NODES_MAX)))]
    decode: u32,
    /// GPUs, by index (0,1), range (0-3) or UUID: one for each node, or each rank of each node, prefill nodes
    /// first; or those of one node, which all share. [default: the configuration's, else the first, which all
    /// share]
    #[arg(long)]
    gpus: Option<String>,
    /// Where the OpenAI HTTP API listens. [default: the configuration's, else 127.0.0.1:8000]
    #[arg(long)]
    http: Option<SocketAddr>,
    /// Where the gRPC API listens. [default: the configuration's, else 127.0.0.1:8001]
    #[arg(long)]
    grpc: Option<SocketAddr>,
    /// Number format of weights; KV is f32 with f32, else bf16. [default: the configuration's, else bf16]
    #[arg(long)]
    dtype: Option<DtypeArg>,
    /// Ranks of each node: processes that share the model, each with its part of every layer; a divisor
    /// of the model's KV heads. [default: the configuration's, else 1]
    #[arg(long)]
    tp: Option<u32>,
    /// `dummy`: random weights; a folder with config.json and tokenizer.json is then enough.
    /// [default: the configuration's, else auto]
    #[arg(long)]
    load_format: Option<LoadFormatArg>,
    /// Etcd endpoints, separated by commas: nodes register there and the router follows them, so that
    /// further nodes may join. [default: the configuration's, else a list of the nodes started here]
    #[arg(long, value_name = "URL")]
    etcd: Option<String>,
    /// Configuration file for all services; the environment (BATON_*) and the flags here win over
    /// it. Addresses of nodes and the list of them are `up`'s own.
    #[arg(long, env = "BATON_CONFIG")]
    config: Option<PathBuf>,
    /// Folder with the models that were fetched by name.
    #[arg(long, env = "BATON_MODELS_DIR", default_value = "models")]
    models_dir: PathBuf,
    /// Folder with the service binaries; by default where `baton` itself lies.
    #[arg(long)]
    bin_dir: Option<PathBuf>,
    /// Ask a sample question when ready and print the answer as it streams.
    #[arg(long)]
    sample: bool,
    /// Stop after the sample answer.
    #[arg(long, requires = "sample")]
    once: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum DtypeArg {
    F32,
    Bf16,
    Q8,
}

#[derive(Clone, Copy, ValueEnum)]
enum LoadFormatArg {
    Auto,
    Dummy,
}

/// A child's name in a colour of its own, when somebody looks.
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
    // Before signals are caught, so that Ctrl-C ends a long download.
    let model = find_model(&args, &config)?;
    // One thread: children are tied to the life of the thread that spawns them.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(up(args, config, model))
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
            .map_err(|_| anyhow!("{} is not looked after any more", self.name))?;
        match &*state {
            ChildState::Ready(ready) => Ok(ready.clone()),
            ChildState::Failed(reason) => bail!("{} {reason}; its lines above say why", self.name),
            ChildState::Starting | ChildState::Stopped => bail!("{} was stopped", self.name),
        }
    }
}

/// Everything that was started, in the order of starting.
#[derive(Default)]
struct Cluster {
    nodes: Vec<Supervised>,
    router: Option<Supervised>,
}

impl Cluster {
    async fn stop(self) {
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

/// As the services will read it, to find mistakes once and before anything starts.
fn configuration(args: &UpArgs) -> Result<Config> {
    let environment = config::environment_of(std::env::vars_os())?;
    let etcd = args.etcd.iter().map(|etcd| ("cluster.etcd".to_owned(), etcd.clone()));
    let tp = args.tp.iter().map(|tp| ("node.tp".to_owned(), tp.to_string()));
    let flags = etcd.chain(tp).collect();
    let config = Config::load(LoadInput { file: args.config.clone(), environment, flags })?;
    // All nodes have the same settings, and a CPU that two of them want helps neither.
    let nodes = args.prefill + args.decode;
    for (key, is_set) in [
        ("node.cpus", config.node.cpus.is_some()),
        ("node.numa_node", config.node.numa_node.is_some()),
    ] {
        ensure!(
            !is_set || nodes == 1,
            "{key} ({}) would tie the threads of all {nodes} nodes to the same CPUs; leave it out, or \
             start each node by itself with CPUs of its own",
            config.source_of(key),
        );
    }
    Ok(config)
}

/// The model that is served.
struct FoundModel {
    /// On this machine.
    path: PathBuf,
    /// What the services must be told beyond their configuration.
    envs: Vec<(String, String)>,
}

/// Finds the model, and fetches it where it is the hub's and not here.
fn find_model(args: &UpArgs, config: &Config) -> Result<FoundModel> {
    let mut envs = Vec::new();
    let asked = match (&args.model, &config.model.path) {
        (None, Some(path)) => {
            let path = match path {
                ModelPath::Local(path) => path.clone(),
                ModelPath::Hub(model) => hub::obtain(model, Parts::All)?,
            };
            return Ok(FoundModel { path, envs });
        }
        (asked, _) => asked.as_deref().unwrap_or(DEFAULT_MODEL),
    };
    let path = model_store::resolve(&args.models_dir, asked)?;
    // By its name services find a model of the hub themselves, and name it to clients.
    let told = match model_store::hub_model(asked)? {
        Some(model) => model.to_string(),
        None => path.display().to_string(),
    };
    envs.push(("BATON_MODEL_PATH".to_owned(), told));
    // Clients ask for a fetched model by the name that it was fetched by.
    if model_store::is_known(asked) && config.model.name.is_none() {
        envs.push(("BATON_MODEL_NAME".to_owned(), asked.to_owned()));
    }
    Ok(FoundModel { path, envs })
}

async fn up(args: UpArgs, config: Config, model: FoundModel) -> Result<()> {
    let (console, last_lines) = Console::start()?;
    let outcome = serve_until_told(args, config, model, console).await;
    last_lines.wait();
    outcome
}

async fn serve_until_told(
    args: UpArgs,
    config: Config,
    model: FoundModel,
    console: Console,
) -> Result<()> {
    let started = Instant::now();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut cluster = Cluster::default();
    let outcome = tokio::select! {
        outcome = serve(&args, (&config, model), started, &console, &mut cluster) => outcome,
        _ = interrupt.recv() => Ok(()),
        _ = terminate.recv() => Ok(()),
    };
    if cluster.nodes.is_empty() {
        return outcome;
    }
    console.say("baton: stopping (once more to stop at once)");
    tokio::select! {
        () = cluster.stop() => outcome,
        // Leaving drops the children, which kills them.
        _ = interrupt.recv() => Err(anyhow!("stopped at once; requests in flight were cut")),
        _ = terminate.recv() => Err(anyhow!("stopped at once; requests in flight were cut")),
    }
}

/// Starts everything and serves until the caller drops this future; returns early with `--once`.
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
            let gpus = common.gpus.get(cluster.nodes.len());
            cluster.nodes.push(Supervised::start(common.node(role, index, gpus)));
        }
    }
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    for node in &mut cluster.nodes {
        let url = format!("http://{}", node.ready().await?.grpc);
        if node.name.starts_with("prefill") { prefill.push(url) } else { decode.push(url) }
    }
    let router = cluster.router.insert(Supervised::start(common.router(args, &prefill, &decode)));
    let ready = router.ready().await?;
    wait_healthy(&ready.http, args.prefill, args.decode).await?;
    console.say(&format!(
        "baton: ready after {:.2} s: OpenAI API http://{}/v1  gRPC {}  metrics http://{}/metrics",
        started.elapsed().as_secs_f64(),
        ready.http,
        ready.grpc,
        ready.http
    ));
    if args.sample {
        let held = console.hold();
        sample::run(&ready.http).await.context("the sample answer failed")?;
        drop(held);
        if args.once {
            return Ok(());
        }
        console.say("baton: serving; Ctrl-C stops");
    }
    std::future::pending().await
}

/// The router is up before it has seen its nodes; users want all of them.
async fn wait_healthy(http: &str, prefill: u32, decode: u32) -> Result<()> {
    let client = HttpClient::new(Duration::from_secs(1));
    let deadline = Instant::now() + READY_WITHIN;
    loop {
        if let Ok((status, body)) = client.get(&format!("http://{http}/health")).await {
            let health: Value = serde_json::from_slice(&body).unwrap_or_default();
            // In etcd there may be more than ours.
            let sees = |key: &str, count: u32| health[key].as_u64() >= Some(count.into());
            // And those have met.
            let sees_all = sees("prefill_nodes", prefill) && sees("decode_nodes", decode);
            if sees_all && status.is_success() {
                return Ok(());
            }
        }
        ensure!(
            Instant::now() < deadline,
            "the router was not ready with {prefill} prefill and {decode} decode nodes within {} s",
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
    config: Option<PathBuf>,
    /// Nodes register themselves; the router is given no list.
    etcd: bool,
    /// Removed when the cluster is gone.
    ready_dir: tempfile::TempDir,
}

impl Common {
    fn new(args: &UpArgs, config: &Config, model: FoundModel, console: &Console) -> Result<Self> {
        let bin_dir = match &args.bin_dir {
            Some(folder) => folder.clone(),
            None => std::env::current_exe()?
                .parent()
                .ok_or_else(|| anyhow!("baton lies in no folder"))?
                .to_owned(),
        };
        for program in ["baton-router", "baton-prefill-node", "baton-decode-node"] {
            let path = bin_dir.join(program);
            ensure!(
                path.exists(),
                "{} is missing: build it (cargo build --release) or name its folder with --bin-dir",
                path.display()
            );
        }
        for (name, given, configured) in
            [("http", args.http, config.router.http), ("grpc", args.grpc, config.router.grpc)]
        {
            // Found now rather than after every node has loaded.
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
        if let Some(etcd) = &args.etcd {
            set("BATON_CLUSTER_ETCD", etcd.clone());
        }
        if let Some(tp) = args.tp {
            set("BATON_NODE_TP", tp.to_string());
        }
        // Only the router would miss it, once every node has loaded.
        ensure!(
            !model.is_dir()
                || model.join(TOKENIZER_FILE).exists()
                || gguf::file_of_folder(&model).is_some(),
            "{} has no {TOKENIZER_FILE}, which the router needs",
            model.display()
        );
        for (name, value) in [
            ("BATON_MODEL_DTYPE", args.dtype.and_then(|dtype| dtype.to_possible_value())),
            ("BATON_MODEL_LOAD_FORMAT", args.load_format.and_then(|it| it.to_possible_value())),
        ] {
            if let Some(value) = value {
                set(name, value.get_name().to_owned());
            }
        }
        if config.transfer.secret.is_none() && config.transfer.secret_file.is_none() {
            // A secret of this run's own.
            let mut secret = [0; 32];
            getrandom::fill(&mut secret).map_err(|error| anyhow!("no random numbers: {error}"))?;
            let secret = secret.iter().map(|byte| format!("{byte:02x}")).collect();
            set("BATON_TRANSFER_SECRET", secret);
        }
        if config.source_of("node.gpu_memory_percent") == Source::Default {
            // Nodes of one GPU load at the same time.
            let together = if gpus.is_empty() { nodes } else { gpus::most_shared(&gpus) };
            let share = config.node.gpu_memory_percent / together.max(1);
            set("BATON_NODE_GPU_MEMORY_PERCENT", share.max(1).to_string());
        }
        if config.source_of("telemetry.log_format") == Source::Default {
            // Lines pass through our pipe, so the services cannot see that a person reads them.
            set("BATON_TELEMETRY_LOG_FORMAT", "pretty".to_owned());
        }
        let ready_dir = tempfile::tempdir().context("no temporary folder")?;
        let etcd = !config.cluster.etcd.is_empty();
        let (console, config) = (console.clone(), args.config.clone());
        Ok(Self { console, bin_dir, envs, gpus, config, etcd, ready_dir })
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
            stop_within: STOP_WITHIN,
        }
    }

    fn node(&self, role: &str, index: u32, gpus: Option<&Vec<String>>) -> ChildSpec {
        let name = format!("{role}-{index}");
        let on_gpu = gpus.map(|gpus| {
            // Who names a GPU wants it.
            [("BATON_NODE_GPU", gpus.join(",")), ("BATON_NODE_DEVICE", "cuda".to_owned())]
                .map(|(name, value)| (name.to_owned(), value))
        });
        let args = flags(&[
            ("--node-id", &name),
            ("--transfer-control", "127.0.0.1:0"),
            ("--transfer-data", "127.0.0.1:0"),
        ]);
        ChildSpec {
            // The router knows a node by its address, so a restart must come back to it.
            sticky: |ready| {
                flags(&[("--node-grpc", &ready.grpc), ("--node-metrics", &ready.metrics)])
            },
            envs: [
                self.envs.clone(),
                vec![
                    ("BATON_NODE_GRPC".to_owned(), "127.0.0.1:0".to_owned()),
                    ("BATON_NODE_METRICS".to_owned(), "127.0.0.1:0".to_owned()),
                ],
                on_gpu.into_iter().flatten().collect(),
            ]
            .concat(),
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
        for (name, address) in [("BATON_ROUTER_HTTP", args.http), ("BATON_ROUTER_GRPC", args.grpc)]
        {
            router.envs.extend(address.map(|address| (name.to_owned(), address.to_string())));
        }
        // Clients know it by its address, so a restart must come back to it.
        router.sticky =
            |ready| flags(&[("--router-http", &ready.http), ("--router-grpc", &ready.grpc)]);
        router
    }
}

/// Flags with their values; a flag with an empty value is left out.
fn flags(pairs: &[(&str, &str)]) -> Vec<OsString> {
    pairs
        .iter()
        .filter(|(_, value)| !value.is_empty())
        .flat_map(|(flag, value)| [OsString::from(flag), OsString::from(value)])
        .collect()
}
