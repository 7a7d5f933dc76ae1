//! `baton up`: runs a cluster on this machine as supervised child processes.
//!
//! Nodes start first, each on a free port. When all nodes are ready the router starts with their
//! addresses. On shutdown the router stops first, so no request loses its node. With `--no-router`
//! it runs the nodes of one host of a larger cluster, on configured ports.

mod backoff;
mod child;
mod console;
mod gpus;
mod health;
#[allow(unsafe_code)]
mod process;
pub(crate) mod sample;
mod specs;

use std::{
    net::SocketAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use clap::{Args, builder::PossibleValuesParser};
use config::{Config, Dtype, LoadFormat, LoadInput, ModelPath, hub::Parts};
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
    child::{ChildSpec, ChildState, ReadyFile, supervise},
    console::Console,
    health::HealthServer,
    process::{die_with_parent, send_terminate},
    specs::ChildSettings,
};
use crate::{
    client_args::ClientArgs, connector::Connector, http_client::HttpClient, hub, model_store,
};

/// Time-out of a service's start. Weights may come from a slow disk or network. A service that
/// fails exits by itself.
const READY_WITHIN: Duration = Duration::from_secs(3600);
/// Time-out for the router's connections to nodes that are ready.
const CONNECTED_WITHIN: Duration = Duration::from_secs(120);
const NODES_MAX: u32 = 64;
/// Model that is served when neither flag nor configuration names one.
const DEFAULT_MODEL: &str = "smollm2-135m";

#[derive(Args)]
pub struct UpArgs {
    /// Model: a GGUF file, a Hugging Face folder, a name that `baton model list` prints, or
    /// hf:ORG/NAME[@REVISION][/FILE.gguf], which is downloaded if the cache lacks it.
    /// [default: that of the configuration, otherwise smollm2-135m]
    #[arg(long)]
    model: Option<String>,
    /// File with a Jinja chat template that replaces the model's own template. [default: that of
    /// the configuration, otherwise the model's own]
    #[arg(long, value_name = "FILE", conflicts_with = "no_router")]
    chat_template: Option<PathBuf>,
    /// Number of prefill nodes. With 0 the decode nodes prefill the prompts.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=i64::from(NODES_MAX)))]
    prefill: u32,
    /// Number of decode nodes.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(NODES_MAX)))]
    decode: u32,
    /// GPUs by index (0,1), range (0-3) or UUID: one for each rank of each node, prefill nodes
    /// first, or the GPUs of one node, which all nodes share. [default: those of the configuration,
    /// otherwise all nodes share the first]
    #[arg(long)]
    gpus: Option<String>,
    /// Address of the OpenAI HTTP API. [default: that of the configuration, otherwise
    /// 127.0.0.1:8000]
    #[arg(long)]
    http: Option<SocketAddr>,
    /// Address of the gRPC API. [default: that of the configuration, otherwise 127.0.0.1:8001]
    #[arg(long)]
    grpc: Option<SocketAddr>,
    /// Number format of the weights; KV is f32 with f32, otherwise bf16. [default: that of the
    /// configuration, otherwise bf16]
    #[arg(long, value_parser = PossibleValuesParser::new(Dtype::WORDS))]
    dtype: Option<String>,
    /// Tensor-parallel ranks of each node; must divide the model's number of KV heads. [default:
    /// that of the configuration, otherwise 1]
    #[arg(long)]
    tp: Option<u32>,
    /// Source of the weights: auto (the model's files) or dummy (random weights; needs only
    /// config.json and tokenizer.json). [default: that of the configuration, otherwise auto]
    #[arg(long, value_parser = PossibleValuesParser::new(LoadFormat::WORDS))]
    load_format: Option<String>,
    /// Etcd endpoints, separated by commas. Nodes register in etcd, so further nodes can join.
    /// [default: those of the configuration, otherwise a static list of the nodes started here]
    #[arg(long, value_name = "URL")]
    etcd: Option<String>,
    /// Start nodes only, for one host of a cluster whose routers run elsewhere. Each node listens
    /// on the configured ports plus its number, prefill nodes first. Needs cluster.secret.
    #[arg(long, conflicts_with_all = ["http", "grpc", "sample"])]
    no_router: bool,
    /// Address of /ready (all nodes started) and /live (no node hangs) for all nodes together.
    #[arg(long, requires = "no_router", value_name = "ADDRESS")]
    health: Option<SocketAddr>,
    /// Configuration file of all services. The environment (BATON_*) and these flags override the
    /// file. `up` sets the nodes' addresses and the router's list of nodes.
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
    let config = configuration(&args, &[])?;
    // Use a single thread, because the kernel kills a child when the thread that spawned it ends.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(up(args, config));
    // A drop would wait for a download that a signal interrupted.
    runtime.shutdown_background();
    outcome
}

/// A supervised child.
struct SupervisedChild {
    name: String,
    stop: CancellationToken,
    state: watch::Receiver<ChildState>,
    task: JoinHandle<()>,
}

impl SupervisedChild {
    fn start(spec: ChildSpec) -> Self {
        let (name, stop) = (spec.name.clone(), CancellationToken::new());
        let (sender, state) = watch::channel(ChildState::Starting);
        let task = tokio::spawn(supervise(spec, stop.clone(), sender));
        Self { name, stop, state, task }
    }

    /// Waits for the first start to succeed or fail.
    async fn ready(&mut self) -> Result<ReadyFile> {
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
struct StartedCluster {
    nodes: Vec<SupervisedChild>,
    router: Option<SupervisedChild>,
    health: Option<HealthServer>,
}

impl StartedCluster {
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

/// Loads the configuration as the services will load it, to report errors once and before any
/// start. `model`: variables that tell the services about the model.
fn configuration(args: &UpArgs, model: &[(String, String)]) -> Result<Config> {
    let mut environment = config::environment_of(std::env::vars_os())?;
    environment.extend(model.iter().cloned());
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
    // Installed before the download: without a handler, the first process of a container ignores
    // signals.
    let mut signals = [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?];
    let find = move || find_model(&args, &config).map(|model| (args, model));
    let found = tokio::select! {
        found = tokio::task::spawn_blocking(find) => found.context("the search for the model panicked")?,
        () = stopped(&mut signals) => return Ok(()),
    };
    let (args, model) = found?;
    let config = configuration(&args, &model.envs)?;
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
    let mut cluster = StartedCluster::default();
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
    cluster: &mut StartedCluster,
) -> Result<()> {
    let common = ChildSettings::new(args, config, model, console)?;
    for (role, count) in [("prefill", args.prefill), ("decode", args.decode)] {
        for index in 0..count {
            let spec = common.node(role, index, cluster.nodes.len());
            cluster.nodes.push(SupervisedChild::start(spec));
        }
    }
    if let Some(address) = args.health {
        let nodes = cluster.nodes.iter().map(|node| (node.name.clone(), node.state.clone()));
        cluster.health = Some(HealthServer::start(address, nodes.collect()).await?);
    }
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    // The first node that fails ends the wait for the others, which may load for an hour.
    let addresses = try_join_all(cluster.nodes.iter_mut().map(SupervisedChild::ready)).await?;
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
    let router =
        cluster.router.insert(SupervisedChild::start(common.router(args, &prefill, &decode)));
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
fn api_client(config: &Config, ready: &ReadyFile) -> Result<(HttpClient, String)> {
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
    let deadline = Instant::now() + CONNECTED_WITHIN;
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
            CONNECTED_WITHIN.as_secs()
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: UpArgs,
    }

    #[test]
    fn start_may_take_an_hour_with_and_without_a_router() {
        let folder = tempfile::tempdir().unwrap();
        for program in ["baton-prefill-node", "baton-decode-node", "baton-router"] {
            fs::write(folder.path().join(program), "").unwrap();
        }
        let bin_dir = folder.path().to_str().unwrap();
        let console = Console::start().unwrap().0;
        for flags in [&["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"][..], &["--no-router"]] {
            let command = [&["up", "--bin-dir", bin_dir], flags].concat();
            let Command { args } = Command::try_parse_from(command).unwrap();
            let config = Config::load(LoadInput::default()).unwrap();
            let model = FoundModel { path: folder.path().join("model.gguf"), envs: Vec::new() };
            let common = ChildSettings::new(&args, &config, model, &console).unwrap();
            let node = common.node("decode", 0, 1);
            assert_eq!(node.ready_within, Duration::from_secs(3600), "{flags:?}");
        }
    }
}
