//! `baton up`: a whole cluster on this machine, as child processes that are looked after.
//!
//! Order of a start: nodes first, each on a port of its choice; when all are ready the router, with
//! their addresses. Order of a stop: the router first, so that no request meets a missing node.

mod backoff;
mod child;
#[allow(unsafe_code)]
mod process;
mod sample;

use std::{
    ffi::OsString,
    io::Write,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{Args, ValueEnum};
use config::{Config, LoadInput, Source};
use serde_json::Value;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

use self::{
    child::{ChildSpec, ChildState, Ready, supervise},
    process::{die_with_parent, send_terminate},
};
use crate::{http_client::HttpClient, model_store};

/// A start that takes longer is a failure; loading is bound by the disk.
const READY_WITHIN: Duration = Duration::from_secs(120);
/// From SIGTERM to SIGKILL: requests in flight may end.
const STOP_WITHIN: Duration = Duration::from_secs(30);
const NODES_MAX: u32 = 64;
/// Served when neither flag nor configuration names a model.
const DEFAULT_MODEL: &str = "smollm2-135m";

#[derive(Args)]
pub struct UpArgs {
    /// Model to serve: a GGUF file, a Hugging Face folder, or a name `baton model list` prints.
    /// [default: the configuration's, else smollm2-135m]
    #[arg(long)]
    model: Option<String>,
    /// Prefill nodes. With 0 the decode nodes read the prompts themselves.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=i64::from(NODES_MAX)))]
    prefill: u32,
    /// Decode nodes.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(NODES_MAX)))]
    decode: u32,
    /// Where the OpenAI HTTP API listens. [default: the configuration's, else 127.0.0.1:8000]
    #[arg(long)]
    http: Option<SocketAddr>,
    /// Where the gRPC API listens. [default: the configuration's, else 127.0.0.1:8001]
    #[arg(long)]
    grpc: Option<SocketAddr>,
    /// Element type of weights and KV. [default: the configuration's, else bf16]
    #[arg(long)]
    dtype: Option<DtypeArg>,
    /// `dummy`: random weights; the model then needs no weights, but the router its tokenizer.
    /// [default: the configuration's, else auto]
    #[arg(long)]
    load_format: Option<LoadFormatArg>,
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
}

#[derive(Clone, Copy, ValueEnum)]
enum LoadFormatArg {
    Auto,
    Dummy,
}

/// Prints a line; a closed terminal is no reason to stop serving.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
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
    // One thread: children are tied to the life of the thread that spawns them.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(up(args))
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

async fn up(args: UpArgs) -> Result<()> {
    let started = Instant::now();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut cluster = Cluster::default();
    let outcome = tokio::select! {
        outcome = serve(&args, started, &mut cluster) => outcome,
        _ = interrupt.recv() => Ok(()),
        _ = terminate.recv() => Ok(()),
    };
    if cluster.nodes.is_empty() {
        return outcome;
    }
    say("baton: stopping (once more to stop at once)");
    tokio::select! {
        () = cluster.stop() => outcome,
        // Leaving drops the children, which kills them.
        _ = interrupt.recv() => Err(anyhow!("stopped at once; requests in flight were cut")),
        _ = terminate.recv() => Err(anyhow!("stopped at once; requests in flight were cut")),
    }
}

/// Starts everything and serves until the caller drops this future; returns early with `--once`.
async fn serve(args: &UpArgs, started: Instant, cluster: &mut Cluster) -> Result<()> {
    let common = Common::new(args)?;
    for (role, count) in [("prefill", args.prefill), ("decode", args.decode)] {
        for index in 0..count {
            cluster.nodes.push(Supervised::start(common.node(role, index)));
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
    say(&format!(
        "baton: ready after {:.2} s: OpenAI API http://{}/v1  gRPC {}  metrics http://{}/metrics",
        started.elapsed().as_secs_f64(),
        ready.http,
        ready.grpc,
        ready.http
    ));
    if args.sample {
        sample::run(&ready.http).await.context("the sample answer failed")?;
        if args.once {
            return Ok(());
        }
        say("baton: serving; Ctrl-C stops");
    }
    std::future::pending().await
}

/// The router is up before it has seen its nodes; users want all of them.
async fn wait_healthy(http: &str, prefill: u32, decode: u32) -> Result<()> {
    let client = HttpClient::new(Duration::from_secs(1));
    let deadline = Instant::now() + READY_WITHIN;
    loop {
        if let Ok((_, body)) = client.get(&format!("http://{http}/health")).await {
            let health: Value = serde_json::from_slice(&body).unwrap_or_default();
            if health["prefill_nodes"] == prefill && health["decode_nodes"] == decode {
                return Ok(());
            }
        }
        ensure!(
            Instant::now() < deadline,
            "the router did not see {prefill} prefill and {decode} decode nodes within {} s",
            READY_WITHIN.as_secs()
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// What all children share.
struct Common {
    bin_dir: PathBuf,
    envs: Vec<(String, String)>,
    config: Option<PathBuf>,
    /// Removed when the cluster is gone.
    ready_dir: tempfile::TempDir,
}

impl Common {
    fn new(args: &UpArgs) -> Result<Self> {
        // Read as the services will read it, to find mistakes once and before anything starts.
        let environment = std::env::vars().filter(|(name, _)| name.starts_with("BATON_")).collect();
        let file = args.config.clone();
        let config = Config::load(LoadInput { file, environment, ..LoadInput::default() })?;
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
        let mut envs = Vec::new();
        let mut set = |name: &str, value: String| envs.push((name.to_owned(), value));
        let asked = match (&args.model, &config.model.path) {
            (Some(model), _) => Some(model.as_str()),
            (None, None) => Some(DEFAULT_MODEL),
            (None, Some(_)) => None,
        };
        if let Some(asked) = asked {
            let path = model_store::resolve(&args.models_dir, asked)?;
            set("BATON_MODEL_PATH", path.display().to_string());
            // Clients ask for a fetched model by the name that it was fetched by.
            if model_store::is_known(asked) && config.model.name.is_none() {
                set("BATON_MODEL_NAME", asked.to_owned());
            }
        }
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
        if config.source_of("telemetry.log_format") == Source::Default {
            // Lines pass through our pipe, so the services cannot see that a person reads them.
            set("BATON_TELEMETRY_LOG_FORMAT", "pretty".to_owned());
        }
        let ready_dir = tempfile::tempdir().context("no temporary folder")?;
        Ok(Self { bin_dir, envs, config: args.config.clone(), ready_dir })
    }

    fn spec(&self, name: String, program: &str, mut args: Vec<OsString>) -> ChildSpec {
        if let Some(config) = &self.config {
            args.extend(["--config".into(), config.into()]);
        }
        ChildSpec {
            ready_file: self.ready_dir.path().join(format!("{name}.json")),
            name,
            program: self.bin_dir.join(program),
            args,
            envs: self.envs.clone(),
            sticky: |_| Vec::new(),
            ready_within: READY_WITHIN,
            stop_within: STOP_WITHIN,
        }
    }

    fn node(&self, role: &str, index: u32) -> ChildSpec {
        let name = format!("{role}-{index}");
        let args = flags(&[
            ("--node-id", &name),
            ("--transfer-notice", "127.0.0.1:0"),
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
            ]
            .concat(),
            ..self.spec(name, &format!("baton-{role}-node"), args)
        }
    }

    fn router(&self, args: &UpArgs, prefill: &[String], decode: &[String]) -> ChildSpec {
        let address =
            |address: Option<SocketAddr>| address.map(|it| it.to_string()).unwrap_or_default();
        let flags = flags(&[
            ("--router-http", &address(args.http)),
            ("--router-grpc", &address(args.grpc)),
            ("--cluster-prefill", &prefill.join(",")),
            ("--cluster-decode", &decode.join(",")),
        ]);
        self.spec("router".to_owned(), "baton-router", flags)
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
