//! `baton-router`: reads the configuration, serves until a signal, drains, exits.

#![forbid(unsafe_code)]

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::{Arg, Command};
use cluster::{
    Membership, StaticMembership,
    etcd::{EtcdMembership, EtcdSettings},
};
use config::{
    Config, ModelPath, Section,
    hub::{Hub, Parts},
};
use router::{FrontSettings, ModelSource, RouterSettings, RunningRouter};
use telemetry::{Resource, Telemetry, TelemetryConfig};
use text::{ModelText, ModelTextOptions, ToolFormat};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// What is not exported by then is lost; the collector may be away.
const TELEMETRY_MAX: Duration = Duration::from_secs(2);
/// Exit code for a wrong argument or setting, as of a wrong flag.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let command = Command::new("baton-router")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Serves the OpenAI API and gRPC in front of Baton's prefill and decode nodes")
        .arg(
            Arg::new("ready-file")
                .long("ready-file")
                .value_name("FILE")
                .value_parser(clap::value_parser!(PathBuf))
                .help("Written once the ports are open: a line of JSON with their addresses"),
        );
    let sections = [Section::Model, Section::Router, Section::Cluster, Section::Telemetry];
    let started = match config::from_process(command, &sections) {
        Ok(started) => started,
        Err(error) => return complain(&error, USAGE),
    };
    let setup = match Setup::new(started.config) {
        Ok(setup) => setup,
        Err(error) => return complain(&error, USAGE),
    };
    let ready_file = started.matches.get_one::<PathBuf>("ready-file").cloned();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return complain(&error, 1),
    };
    let code = match runtime.block_on(run(setup, ready_file.as_deref())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => complain(&format!("{error:#}"), 1),
    };
    // Dropping it would wait without limit for blocking work, such as a model that is being read.
    runtime.shutdown_background();
    code
}

/// One line a problem, on standard error.
fn complain(error: &dyn std::fmt::Display, code: u8) -> ExitCode {
    for line in error.to_string().lines() {
        eprintln!("baton-router: {line}");
    }
    ExitCode::from(code)
}

/// What the configuration says, checked before anything starts.
struct Setup {
    config: Config,
    /// Names and paths, the default model first.
    models: Vec<(String, ModelPath)>,
    settings: RouterSettings,
    members: Members,
}

/// Where the nodes are known from.
enum Members {
    Listed(StaticMembership),
    Registered(EtcdSettings),
}

impl Members {
    fn new(cluster: &config::Cluster) -> Result<Self> {
        if let Some(etcd) = EtcdSettings::read(cluster)? {
            return Ok(Self::Registered(etcd));
        }
        let urls = |urls: &[config::GrpcUrl]| -> Vec<String> {
            urls.iter().map(|url| url.as_str().to_owned()).collect()
        };
        Ok(Self::Listed(StaticMembership::new(urls(&cluster.prefill), urls(&cluster.decode))?))
    }

    async fn start(self) -> Result<Box<dyn Membership>> {
        Ok(match self {
            Self::Listed(members) => Box::new(members),
            Self::Registered(settings) => Box::new(EtcdMembership::start(settings).await?),
        })
    }
}

impl Setup {
    fn new(config: Config) -> Result<Self> {
        let first = (config.model.served_name()?, config.model.required_path()?.to_owned());
        let others = config.router.models.iter().map(|pair| {
            let path = ModelPath::parse(&pair.value);
            (pair.name.clone(), path.expect("the configuration was checked when it was read"))
        });
        let models = [first].into_iter().chain(others).collect();
        let settings = RouterSettings {
            http: config.router.http,
            grpc: config.router.grpc,
            drain_timeout: config.router.drain_timeout,
            front: FrontSettings::new(&config.router),
        };
        let members = Members::new(&config.cluster)?;
        Ok(Self { config, models, settings, members })
    }
}

async fn run(setup: Setup, ready_file: Option<&Path>) -> Result<()> {
    // Before anything that takes time, so that no signal is missed.
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let config = &setup.config;
    let instance = config
        .telemetry
        .instance
        .clone()
        .unwrap_or_else(|| format!("router-{}", config.router.http.port()));
    let resource = Resource { service: "baton-router".into(), instance };
    let telemetry = Telemetry::start(&TelemetryConfig::from(&config.telemetry), resource)?;
    telemetry.install()?;

    let served = serve(setup, ready_file, &telemetry, &mut interrupt, &mut terminate).await;
    if let Err(error) = telemetry.shutdown(TELEMETRY_MAX).await {
        eprintln!("baton-router: {error}");
    }
    served
}

/// From the models' text sides to the last request.
async fn serve(
    setup: Setup,
    ready_file: Option<&Path>,
    telemetry: &Telemetry,
    interrupt: &mut Signal,
    terminate: &mut Signal,
) -> Result<()> {
    let Setup { config, models, settings, members } = setup;
    let names: Vec<String> = models.iter().map(|(name, _)| name.clone()).collect();
    let started = async {
        let opened = open_all(config.hub, models, text_options(&config.model)?);
        Ok::<_, anyhow::Error>(tokio::try_join!(members.start(), opened)?)
    };
    let (members, models) = tokio::select! {
        started = started => started?,
        // Nothing was begun that would have to end.
        _ = interrupt.recv() => return Ok(()),
        _ = terminate.recv() => return Ok(()),
    };
    let router = router::start(settings, models, members, telemetry.metrics())?;
    tracing::info!(http = %router.http, grpc = %router.grpc, ?names, "serving");
    if let Some(path) = ready_file {
        write_ready_file(path, &router)?;
    }
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    let cut = router.cut();
    let drained = router.shutdown();
    tokio::pin!(drained);
    tokio::select! {
        drained = &mut drained => drained?,
        // Asked twice: who is still in work gets its error now.
        _ = interrupt.recv() => { cut.cancel(); drained.await? }
        _ = terminate.recv() => { cut.cancel(); drained.await? }
    }
    tracing::info!("stopped");
    Ok(())
}

/// The text sides of all models, opened off the async threads. `options` are the first one's.
async fn open_all(
    hub: Hub,
    models: Vec<(String, ModelPath)>,
    mut options: ModelTextOptions,
) -> Result<Vec<ModelSource>> {
    let mut opened = Vec::new();
    for (name, path) in models {
        let path = hub.obtain(&path, Parts::Text).await?;
        let options = std::mem::take(&mut options);
        let is_replaced = options.chat_template.is_some();
        let open = move || ModelText::open_with(path, options);
        let text = tokio::task::spawn_blocking(open).await??;
        if let (true, Err(error)) = (is_replaced, text.chat_template()) {
            bail!("model.chat_template: {error}");
        }
        opened.push(ModelSource { name, text: Arc::new(text) });
    }
    Ok(opened)
}

fn text_options(settings: &config::Model) -> Result<ModelTextOptions> {
    let read = |path: &PathBuf| {
        std::fs::read_to_string(path)
            .with_context(|| format!("cannot read model.chat_template {}", path.display()))
    };
    Ok(ModelTextOptions {
        chat_template: settings.chat_template.as_ref().map(read).transpose()?,
        tool_format: match settings.tool_format {
            config::ToolFormat::Auto => None,
            config::ToolFormat::Hermes => Some(ToolFormat::Hermes),
            config::ToolFormat::Llama3 => Some(ToolFormat::Llama3),
        },
    })
}

/// Whole or not at all: readers poll for the file.
fn write_ready_file(path: &Path, router: &RunningRouter) -> Result<()> {
    let line = serde_json::json!({
        "ready": true,
        "http": router.http.to_string(),
        "grpc": router.grpc.to_string(),
    });
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let name = path.file_name().context("--ready-file names no file")?;
    let mut partial = name.to_owned();
    partial.push(".partial");
    let partial = folder.unwrap_or(Path::new(".")).join(partial);
    let write = || -> std::io::Result<()> {
        let mut file = std::fs::File::create(&partial)?;
        writeln!(file, "{line}")?;
        file.sync_all()?;
        std::fs::rename(&partial, path)
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}
