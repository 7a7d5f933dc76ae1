//! `baton-router`: reads the configuration, serves until a signal, drains, exits.

#![forbid(unsafe_code)]

use std::{
    io::Write,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::{Arg, Command};
use cluster::Role;
use config::{
    Config, ModelPath, NodeUrl, Pair, Section,
    hub::{Hub, Parts},
};
use membership::{DnsName, Membership, etcd::EtcdSettings};
use proto::auth::ClusterSecret;
use router::{ModelSource, RouterSettings, RunningRouter};
use telemetry::{MetricsServer, Resource, Telemetry, TelemetryConfig};
use text::{ModelText, ModelTextOptions, TemplateError};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Time to export the last telemetry; the collector may be unreachable.
const TELEMETRY_MAX: Duration = Duration::from_secs(2);
/// Time for scrapes in progress to finish.
const METRICS_STOP_MAX: Duration = Duration::from_millis(500);
/// Exit code for an invalid argument or setting.
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
                .help(
                    "File to write once the ports are open: one line of JSON with their addresses",
                ),
        );
    let sections = [Section::Model, Section::Router, Section::Cluster, Section::Telemetry];
    let started = match config::from_process(command, &sections) {
        Ok(started) => started,
        Err(error) => return report(&error, USAGE),
    };
    let setup = match RouterSetup::new(started.config) {
        Ok(setup) => setup,
        Err(error) => return report(&error, USAGE),
    };
    let ready_file = started.matches.get_one::<PathBuf>("ready-file").cloned();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report(&error, 1),
    };
    let code = match runtime.block_on(run(setup, ready_file.as_deref())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&format!("{error:#}"), 1),
    };
    // Dropping the runtime would wait without a bound for blocking work, such as loading a model.
    runtime.shutdown_background();
    code
}

/// Writes each line of the error to standard error.
fn report(error: &dyn std::fmt::Display, code: u8) -> ExitCode {
    for line in error.to_string().lines() {
        eprintln!("baton-router: {line}");
    }
    ExitCode::from(code)
}

/// The checked configuration.
struct RouterSetup {
    config: Config,
    /// The default model first.
    models: Vec<ModelSetup>,
    settings: RouterSettings,
    members: Members,
}

/// The configuration of one model.
struct ModelSetup {
    name: String,
    path: ModelPath,
    /// The setting that names the file, for error messages, and the file.
    chat_template: Option<(&'static str, PathBuf)>,
    tool_format: config::ToolFormatName,
    reasoning_format: config::ReasoningFormatName,
    parse_special_tokens: bool,
}

impl ModelSetup {
    /// Returns all models; the model of section `[model]` comes first.
    fn all(config: &Config) -> Result<Vec<Self>> {
        let model = &config.model;
        let parse_special_tokens =
            model.special_tokens_in_content == config::SpecialTokensInContent::Parse;
        let first = Self {
            name: model.served_name()?,
            path: model.required_path()?.to_owned(),
            chat_template: model.chat_template.clone().map(|file| ("model.chat_template", file)),
            tool_format: model.tool_format,
            reasoning_format: model.reasoning_format,
            parse_special_tokens,
        };
        let checked = "the configuration was checked when it was read";
        let router = &config.router;
        let others = router.models.iter().map(|Pair { name, value }| {
            let of = |pairs: &[Pair]| -> Option<String> {
                pairs.iter().find(|pair| &pair.name == name).map(|pair| pair.value.clone())
            };
            Self {
                name: name.clone(),
                path: ModelPath::parse(value).expect(checked),
                chat_template: of(&router.chat_templates)
                    .map(|file| ("router.chat_templates", file.into())),
                tool_format: of(&router.tool_formats)
                    .map_or(config::ToolFormatName::AUTO, |word| {
                        config::ToolFormatName::parse(&word).expect(checked)
                    }),
                reasoning_format: of(&router.reasoning_formats)
                    .map_or(config::ReasoningFormatName::AUTO, |word| {
                        config::ReasoningFormatName::parse(&word).expect(checked)
                    }),
                parse_special_tokens,
            }
        });
        Ok([first].into_iter().chain(others).collect())
    }

    fn text_options(&self) -> Result<ModelTextOptions> {
        let read = |(key, path): &(&str, PathBuf)| {
            std::fs::read_to_string(path)
                .with_context(|| format!("cannot read {key} {}", path.display()))
        };
        Ok(ModelTextOptions {
            chat_template: self.chat_template.as_ref().map(read).transpose()?,
            tool_format: self.tool_format.format(),
            reasoning_format: self.reasoning_format.choice(),
            parse_special_tokens: self.parse_special_tokens,
        })
    }
}

/// Source of the node addresses.
enum Members {
    /// A static list, and names whose addresses are members too.
    Listed(Membership, Vec<DnsName>),
    Registered(EtcdSettings),
}

impl Members {
    fn new(cluster: &config::Cluster) -> Result<Self> {
        if let Some(etcd) = EtcdSettings::read(cluster)? {
            return Ok(Self::Registered(etcd));
        }
        let mut names = Vec::new();
        let mut urls = |role, urls: &[NodeUrl]| {
            let mut listed = Vec::new();
            for url in urls {
                match url {
                    NodeUrl::Grpc(url) => listed.push(url.to_string()),
                    NodeUrl::Dns(name) => names.push(DnsName { role, authority: name.clone() }),
                }
            }
            listed
        };
        let prefill = urls(Role::Prefill, &cluster.prefill);
        let decode = urls(Role::Decode, &cluster.decode);
        Ok(Self::Listed(Membership::listed(prefill, decode)?, names))
    }

    async fn start(self) -> Result<Membership> {
        Ok(match self {
            Self::Listed(members, names) => members.resolving(names),
            Self::Registered(settings) => Membership::registered(settings).await?,
        })
    }
}

impl RouterSetup {
    fn new(config: Config) -> Result<Self> {
        let models = ModelSetup::all(&config)?;
        let open_files_max = rlimit::increase_nofile_limit(u64::MAX)
            .context("cannot raise the limit on open files")?;
        let secret = ClusterSecret::new(config.cluster.required_secret()?.reveal())?;
        let mut settings = RouterSettings::new(config.router.clone(), secret, open_files_max);
        settings.nodes.tls = membership::read_tls(&config.cluster).map_err(anyhow::Error::msg)?;
        let members = Members::new(&config.cluster)?;
        Ok(Self { config, models, settings, members })
    }
}

async fn run(setup: RouterSetup, ready_file: Option<&Path>) -> Result<()> {
    // Installed first, so that no signal is missed.
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let config = &setup.config;
    let instance = format!("router-{}", config.router.http.port());
    let resource = Resource { service: "baton-router".into(), instance };
    let telemetry = Telemetry::start(&TelemetryConfig::read(&config.telemetry)?, resource)?;
    telemetry.install()?;
    for warning in config.warnings() {
        tracing::warn!("{warning}");
    }

    let served = serve(setup, ready_file, &telemetry, &mut interrupt, &mut terminate).await;
    if let Err(error) = telemetry.shutdown(TELEMETRY_MAX).await {
        eprintln!("baton-router: {error}");
    }
    served
}

/// Loads the models' text processing, serves until a signal, and drains.
async fn serve(
    setup: RouterSetup,
    ready_file: Option<&Path>,
    telemetry: &Telemetry,
    interrupt: &mut Signal,
    terminate: &mut Signal,
) -> Result<()> {
    let RouterSetup { config, models, settings, members } = setup;
    let config::Router { drain_delay, metrics, .. } = settings.router;
    let names: Vec<String> = models.iter().map(|model| model.name.clone()).collect();
    let started = async { tokio::try_join!(members.start(), open_all(config.hub, models)) };
    let (members, models) = tokio::select! {
        started = started => started?,
        // Nothing has started that must be stopped.
        _ = interrupt.recv() => return Ok(()),
        _ = terminate.recv() => return Ok(()),
    };
    let router = router::start(settings, models, members, telemetry.metrics())?;
    let metrics = MetricsServer::start(metrics, telemetry.metrics(), router.probes());
    let metrics = metrics.await.context("router.metrics")?;
    tracing::info!(
        http = %router.http, grpc = %router.grpc, metrics = %metrics.address(),
        admin = %router.admin, ?names,
        "serving"
    );
    if let Some(path) = ready_file {
        write_ready_file(path, &router, metrics.address())?;
    }
    // SIGINT comes from a user at a terminal, where no load balancer needs the delay.
    let delay = tokio::select! {
        _ = interrupt.recv() => Duration::ZERO,
        _ = terminate.recv() => drain_delay,
    };
    let cut = router.cut();
    let drained = async {
        router.leave(delay).await;
        router.shutdown().await
    };
    tokio::pin!(drained);
    tokio::select! {
        drained = &mut drained => drained?,
        // A second signal ends the requests in flight at once.
        _ = interrupt.recv() => { cut.cancel(); drained.await? }
        _ = terminate.recv() => { cut.cancel(); drained.await? }
    }
    metrics.shutdown(METRICS_STOP_MAX).await?;
    tracing::info!("stopped");
    Ok(())
}

/// Loads the text processing of all models, off the async threads.
async fn open_all(hub: Hub, models: Vec<ModelSetup>) -> Result<Vec<ModelSource>> {
    // Templates are read before a download that may take hours.
    let with_options = models.into_iter().map(|model| Ok((model.text_options()?, model)));
    let mut opened = Vec::new();
    for (options, model) in with_options.collect::<Result<Vec<_>>>()? {
        let path = hub.obtain(&model.path, Parts::Text).await?;
        let open = move || ModelText::open_with(path, options);
        let text = tokio::task::spawn_blocking(open).await??;
        // The template of a reranker renders pairs of texts.
        let is_chat = text.generates() && text.pooled().is_err();
        let template = text.chat_template().map_err(Clone::clone);
        let usable = template.and_then(|it| if is_chat { it.check() } else { Ok(()) });
        match (usable, &model.chat_template) {
            (Err(error), Some((key, file))) => bail!("{key} {}: {error}", file.display()),
            (Err(error), None) if is_chat && error != TemplateError::Missing => bail!(
                "cannot serve {}: {error}; set model.chat_template, or router.chat_templates, to \
                 another template",
                model.name
            ),
            _ => {}
        }
        opened.push(ModelSource { name: model.name, text: Arc::new(text) });
    }
    Ok(opened)
}

/// Writes the ready file atomically: readers poll for it.
fn write_ready_file(path: &Path, router: &RunningRouter, metrics: SocketAddr) -> Result<()> {
    let line = serde_json::json!({
        "ready": true,
        "http": router.http.to_string(),
        "grpc": router.grpc.to_string(),
        "metrics": metrics.to_string(),
        "admin": router.admin.to_string(),
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
