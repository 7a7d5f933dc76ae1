//! A node as a process: arguments, signals, exit codes.

use std::{
    io,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use clap::{Arg, Command};
use cluster::{NodeId, Role};
use config::{Config, Device, Transport, WeightPlace};
use engine::executor::Executor;
use kernels::cuda::{NcclError, set_nccl_environment};
use ranks::RankSpec;
use telemetry::{Metrics, Otlp, Resource, Telemetry, TelemetryConfig, TelemetryError};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{error, info, warn};

use crate::{
    node::{Addresses, Node},
    settings::{SECTIONS, default_node_id},
    tensor_parallel,
};

const READY_FILE_FLAG: &str = "ready-file";
const TELEMETRY_STOP_WITHIN: Duration = Duration::from_secs(2);
/// Number of async threads, which serve the streams. The engine and the device have their own
/// threads.
const ASYNC_THREADS: usize = 2;

/// Exit code of usage and configuration errors; all other errors exit with 1.
const USAGE: u8 = 2;

/// Runs a node process: reads arguments and environment, serves until SIGTERM or SIGINT, and
/// drains. A second signal ends the process at once.
pub fn run(role: Role) -> ExitCode {
    let started = Instant::now();
    let name = program_name(role);
    let parsed = match config::from_process(command(role), SECTIONS) {
        Ok(parsed) => parsed,
        Err(error) => return complain(name, &error, USAGE).into(),
    };
    if let Some(spec) = parsed.matches.get_one::<RankSpec>(RankSpec::FLAG) {
        return run_rank(role, spec, &parsed.config).into();
    }
    if let Err(error) = rlimit::increase_nofile_limit(u64::MAX) {
        return complain(name, &format!("cannot raise the limit on open files: {error}"), 1).into();
    }
    if let Err(error) = prepare_nccl(&parsed.config) {
        return complain(name, &error, 1).into();
    }
    let ready_file = parsed.matches.get_one::<PathBuf>(READY_FILE_FLAG);
    run_on(role, &parsed.config, ready_file.map(PathBuf::as_path), started, |device| device).into()
}

/// Sets NCCL's environment when KV or new weights may come by nccl. Call it before the first thread
/// starts.
fn prepare_nccl(config: &Config) -> Result<(), NcclError> {
    let may_carry = matches!(config.transfer.transport, Transport::Auto | Transport::Nccl);
    let may_broadcast = config.weights.place != WeightPlace::Auto;
    if config.node.device == Device::Cpu || !(may_carry || may_broadcast) {
        return Ok(());
    }
    set_nccl_environment(config.transfer.transport == Transport::Nccl)
}

/// Runs a rank process, which serves no calls and exports no telemetry except its log.
fn run_rank(role: Role, spec: &RankSpec, config: &Config) -> u8 {
    let name = program_name(role);
    let settings = TelemetryConfig::read(&config.telemetry)
        .map(|settings| TelemetryConfig { otlp: Otlp::default(), ..settings });
    let telemetry = match settings.and_then(|settings| start_telemetry(role, config, &settings)) {
        Ok(telemetry) => telemetry,
        Err(error) => return complain(name, &error, 1),
    };
    let outcome = tensor_parallel::run(spec, config);
    if let Err(error) = &outcome {
        error!("rank {} of {}: {error}", spec.rank, spec.of);
    }
    // Flushes the last log line.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    if let Ok(runtime) = runtime {
        let _ = runtime.block_on(telemetry.shutdown(TELEMETRY_STOP_WITHIN));
    }
    u8::from(outcome.is_err())
}

/// Runs a node with these settings and returns the exit code. `wrap` may wrap the executor of the
/// device that the settings name.
pub fn run_on(
    role: Role,
    config: &Config,
    ready_file: Option<&Path>,
    started: Instant,
    wrap: impl FnOnce(Box<dyn Executor>) -> Box<dyn Executor>,
) -> u8 {
    let name = program_name(role);
    if let Err(error) = check(config) {
        return complain(name, &error, USAGE);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(ASYNC_THREADS)
        .thread_name("baton-async")
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return complain(name, &error, 1),
    };
    let serve = serve_with_telemetry(role, config, ready_file, started, wrap);
    let code = runtime.block_on(serve);
    // A drop would wait without limit for blocking work, such as a load interrupted by a signal.
    runtime.shutdown_background();
    // An interrupted load also holds memory that it shares with ranks.
    kernels::shared::unlink_all();
    code
}

/// Checks required settings and the node id before anything starts: these are usage errors.
fn check(config: &Config) -> Result<()> {
    config.model.required_path()?;
    config.cluster.required_secret()?;
    if let Some(id) = &config.node.id {
        NodeId::parse(id).map_err(|error| anyhow!("node.id = {id:?}: {error}"))?;
    }
    Ok(())
}

/// Prints one line per problem to stderr and returns the exit code.
fn complain(name: &str, error: &dyn std::fmt::Display, code: u8) -> u8 {
    for line in error.to_string().lines() {
        eprintln!("{name}: {line}");
    }
    code
}

fn program_name(role: Role) -> &'static str {
    match role {
        Role::Prefill => "baton-prefill-node",
        Role::Decode => "baton-decode-node",
    }
}

fn command(role: Role) -> Command {
    let about = match role {
        Role::Prefill => "Prefills prompts and sends their KV to decode nodes",
        Role::Decode => {
            "Receives KV and decodes; prefills prompts itself when it has no prefill node"
        }
    };
    let ready_file = Arg::new(READY_FILE_FLAG)
        .long(READY_FILE_FLAG)
        .value_name("PATH")
        .value_parser(clap::value_parser!(PathBuf))
        .help("Where to write a line of JSON with this node's addresses once it is ready");
    let rank = Arg::new(RankSpec::FLAG)
        .long(RankSpec::FLAG)
        .value_parser(|text: &str| text.parse::<RankSpec>())
        // Nodes pass it to their ranks; operators set node.tp.
        .hide(true);
    let command = Command::new(program_name(role)).version(env!("CARGO_PKG_VERSION"));
    command.about(about).arg(ready_file).arg(rank)
}

async fn serve_with_telemetry(
    role: Role,
    config: &Config,
    ready_file: Option<&Path>,
    started: Instant,
    wrap: impl FnOnce(Box<dyn Executor>) -> Box<dyn Executor>,
) -> u8 {
    let name = program_name(role);
    let settings = TelemetryConfig::read(&config.telemetry);
    let telemetry = match settings.and_then(|settings| start_telemetry(role, config, &settings)) {
        Ok(telemetry) => telemetry,
        Err(error) => return complain(name, &error, 1),
    };
    for warning in config.warnings() {
        warn!("{warning}");
    }
    let metrics = telemetry.metrics();
    let code = match serve(role, config, &metrics, ready_file, started, wrap).await {
        Ok(()) => 0,
        Err(error) => {
            error!("{error:#}");
            1
        }
    };
    if let Err(error) = telemetry.shutdown(TELEMETRY_STOP_WITHIN).await {
        eprintln!("{name}: {error}");
    }
    code
}

/// Installs telemetry. The default name of the instance is the node's id, else role and configured
/// port.
fn start_telemetry(
    role: Role,
    config: &Config,
    settings: &TelemetryConfig,
) -> Result<Telemetry, TelemetryError> {
    let id = config.node.id.clone();
    let instance = id.unwrap_or_else(|| default_node_id(role, config.node.grpc.port()));
    let resource = Resource { service: program_name(role).to_owned(), instance };
    let telemetry = Telemetry::start(settings, resource)?;
    telemetry.install()?;
    Ok(telemetry)
}

/// Starts the node, serves until a signal or a failure, and drains.
async fn serve(
    role: Role,
    config: &Config,
    metrics: &Metrics,
    ready_file: Option<&Path>,
    started: Instant,
    wrap: impl FnOnce(Box<dyn Executor>) -> Box<dyn Executor>,
) -> Result<()> {
    let listen = |kind| signal(kind).context("cannot listen for signals");
    let mut signals = [listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?];
    let mut node = tokio::select! {
        // The message includes the causes.
        node = Node::start(role, config, metrics, wrap) => node.map_err(|error| anyhow!("{error}"))?,
        // No request is in flight yet.
        () = stopped(&mut signals) => return Ok(()),
    };
    let addresses = node.addresses();
    info!(
        grpc = %addresses.grpc,
        metrics = %addresses.metrics,
        control = %addresses.control,
        data = %addresses.data,
        node_id = %node.record().node_id,
        epoch = %node.record().epoch,
        seconds = format_args!("{:.3}", started.elapsed().as_secs_f64()),
        "{role} node is ready"
    );
    if let Some(path) = ready_file {
        write_ready_file(path, addresses)
            .with_context(|| format!("cannot write the ready file {}", path.display()))?;
    }
    let failed = tokio::select! {
        () = stopped(&mut signals) => None,
        what = node.failed() => Some(what),
    };
    if let Some(what) = &failed {
        error!("{what}; the node stops");
    }
    tokio::select! {
        drained = node.drain() => drained.map_err(|error| anyhow!("{error}"))?,
        () = stopped(&mut signals) => bail!("stopped at once by a second signal; in-flight requests were cancelled"),
    }
    match failed {
        Some(what) => bail!("{what}"),
        None => {
            info!("stopped");
            Ok(())
        }
    }
}

/// Waits for SIGTERM or SIGINT.
async fn stopped(signals: &mut [Signal; 2]) {
    let [terminate, interrupt] = signals;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

/// Writes the file atomically.
fn write_ready_file(path: &Path, addresses: &Addresses) -> io::Result<()> {
    let Addresses { grpc, metrics, control, data } = addresses;
    let ready = serde_json::json!({
        "ready": true,
        "grpc": grpc.to_string(),
        "metrics": metrics.to_string(),
        "control": control,
        "data": data,
    });
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(format!(".{}", std::process::id()));
    std::fs::write(&unfinished, format!("{ready}\n"))?;
    std::fs::rename(&unfinished, path)
}
