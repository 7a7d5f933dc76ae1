//! Starts and stops a node.

use std::{
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use axum::{Router, http::StatusCode, routing::get};
use cluster::{
    Epoch, EpochError, ModelIdentity, NodeAddress, NodeId, NodeIdError, NodeRecord, Role,
};
use config::{Config, hub};
use credentials::{Reload, ReloadTask};
use engine::{
    Scheduler, SchedulerConfig, SchedulerConfigError, StepLoop,
    defaults::{self, Defaults, NodeDevice, NodeTraits},
    executor::{
        Executor, ExecutorError, StepTimes, cpu::CpuExecutorError, cuda::CudaExecutorError,
    },
};
use kernels::{
    ArenaError, KvArena,
    cpu::{CpuError, affinity},
    cuda::CudaError,
};
use kv_transfer::{TransferConfig, Transfers};
use membership::etcd::{EtcdError, EtcdSettings, NodeEntry, Registrar, Registration};
use model::{Checkpoint, ModelConfig, ModelError};
use proto::{auth::CallVerifier, v1};
use telemetry::{Metrics, MetricsServer, NodeMetrics, TelemetryError};
use tokio::task::JoinError;
use tokio_util::sync::CancellationToken;
use tonic_health::ServingStatus;
use tracing::{info, warn};

use crate::{
    authentication::AuthenticateLayer,
    constraint::GRAMMAR_VERSION,
    device::{self, Chosen, ReadyGpu},
    engine_thread::{Device, Engine, EngineError, EngineThread, TierThreads},
    grammars::Grammars,
    grpc_server::{self, GrpcServer},
    hang::StepInFlight,
    identity,
    inbox::{Command, Inbox, TransferEvents},
    memory_limit::{self, HostBytes, MemoryShare},
    node_core::{NodeCore, STALL_AFTER},
    populate::Populate,
    service::NodeService,
    settings::{self, BatchSizes, SettingsError},
    tensor_parallel,
    tiers::{OpenTiers, TierCopies, TierMetrics},
    transfer_metrics,
    weights::{LoadedModel, PeerCredentials, WeightActor, WeightSettings, WeightsService},
};

/// Time for attempts to end after the drain time-out: a dead peer holds blocks for one lease and half a
/// second.
const END_WITHIN: Duration = Duration::from_millis(2_500);
/// Time to delete the node's record from etcd, while in-flight requests finish.
const LEAVE_WITHIN: Duration = Duration::from_secs(3);
/// Time for callers to read the end of their streams.
const SERVER_STOP_WITHIN: Duration = Duration::from_secs(1);
/// Time for the step in flight to finish.
const ENGINE_STOP_WITHIN: Duration = Duration::from_secs(10);
/// Time for copies of the KV tiers in flight to finish.
const TIERS_STOP_WITHIN: Duration = Duration::from_secs(5);
const METRICS_STOP_WITHIN: Duration = Duration::from_millis(500);
/// Time-out of fetching and loading the model. `/live` answers meanwhile, so no probe ends a load that hangs.
const LOAD_MAX: Duration = Duration::from_secs(3600);

/// Upper bound on the threads for token bitmasks. 64 bitmasks of JSON schemas take a few milliseconds of CPU
/// time, and a forward pass of 5 ms hides them on four threads.
const MASK_THREADS_MAX: usize = 8;

/// Reason why a node cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error("node.id = {id:?}: {source}")]
    NodeId { id: String, source: NodeIdError },
    #[error(transparent)]
    Epoch(#[from] EpochError),
    /// A file with a certificate or key is missing or invalid.
    #[error("{0}")]
    Tls(String),
    #[error("node.grpc: cannot listen on {address}: {source}")]
    Grpc { address: SocketAddr, source: io::Error },
    #[error("node.metrics: {0}")]
    Metrics(#[from] TelemetryError),
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    #[error("the model was not loaded within {} s", LOAD_MAX.as_secs())]
    LoadTimeout,
    #[error(transparent)]
    Hub(#[from] hub::HubError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Arena(#[from] ArenaError),
    #[error(transparent)]
    Backend(#[from] CpuError),
    #[error(transparent)]
    Executor(#[from] CpuExecutorError),
    /// `node.device` is cuda, or a GPU was found and then failed.
    #[error("node.device: {0}")]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    CudaExecutor(#[from] CudaExecutorError),
    /// Memory that ranks share.
    #[error("node.tp: {0}")]
    Shared(#[from] kernels::shared::SharedError),
    #[error("node.tp: {0}")]
    Ranks(#[from] ranks::GroupError),
    /// Mapping the ranks' KV on GPUs failed.
    #[error("node.tp: {0}")]
    RankedKv(String),
    #[error("cannot measure step times: {0}")]
    StepTimes(#[from] ExecutorError),
    #[error(transparent)]
    Scheduler(#[from] SchedulerConfigError),
    #[error(transparent)]
    Transfers(#[from] kv_transfer::StartError),
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    #[error("cannot pin threads to the CPUs of node.cpus or node.numa_node: {0}")]
    Affinity(io::Error),
    #[error("loading the model ended early: {0}")]
    Load(JoinError),
}

impl From<config::ConfigError> for StartError {
    fn from(error: config::ConfigError) -> Self {
        Self::Settings(error.into())
    }
}

/// Reason why a serving node failed.
#[derive(Debug, thiserror::Error)]
pub enum NodeFailure {
    #[error("the engine failed: {0}")]
    Engine(#[from] EngineError),
    #[error("still running after its deadline: {what}")]
    Deadline { what: String },
}

/// The addresses of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addresses {
    pub grpc: SocketAddr,
    pub metrics: SocketAddr,
    /// `tcp://host:port`, as peers reach it.
    pub control: String,
    /// `tcp://host:port` of the KV listener.
    pub data: String,
}

/// A serving node. [`Node::drain`] shuts it down gracefully; a drop does not.
pub struct Node {
    record: NodeRecord,
    addresses: Addresses,
    metrics: Metrics,
    inbox: Inbox,
    draining: CancellationToken,
    ready: Arc<AtomicBool>,
    server: GrpcServer,
    metrics_server: MetricsServer,
    engine: EngineThread,
    transfers: Arc<Transfers>,
    /// Copies of the KV tiers; `None` without tiers.
    tiers: Option<Arc<TierCopies>>,
    populate: Populate,
    weights: WeightActor,
    /// The record in etcd; `None` without etcd.
    registration: Option<Registration>,
    /// Reads changed certificates.
    reload: ReloadTask,
    drain_timeout: Duration,
}

impl Node {
    /// Opens the model, then starts engine, transfers and servers in this order. `wrap` may wrap the executor.
    pub async fn start(
        role: Role,
        config: &Config,
        metrics: &Metrics,
        wrap: impl FnOnce(Box<dyn Executor>) -> Box<dyn Executor>,
    ) -> Result<Self, StartError> {
        // Settings are checked before the model is read.
        let secret = settings::secret(&config.cluster)?;
        let tls = membership::read_tls(&config.cluster).map_err(StartError::Tls)?;
        let served_name = config.model.served_name()?;
        let epoch = Epoch::mint()?;
        let node = &config.node;
        let not_listening = |source| StartError::Grpc { address: node.grpc, source };
        let grpc = grpc_server::reserve(node.grpc).map_err(not_listening)?;
        let grpc_address = grpc.local_addr().map_err(not_listening)?;
        let id = node.id.clone();
        let id = id.unwrap_or_else(|| settings::default_node_id(role, grpc_address.port()));
        let node_id = NodeId::parse(&id).map_err(|source| StartError::NodeId { id, source })?;
        let etcd = EtcdSettings::read(&config.cluster)?;
        let ready = Arc::new(AtomicBool::new(false));
        let (step_in_flight, is_paused) = (Arc::<StepInFlight>::default(), Arc::default());
        metrics.set_draining(false);
        observe_hang(metrics, step_in_flight.clone(), node.hang_restart);
        let probes = probes(
            ready.clone(),
            Arc::clone(&is_paused),
            step_in_flight.clone(),
            node.hang_restart,
        );
        let metrics_server = MetricsServer::start(node.metrics, metrics.clone(), probes).await?;

        // An etcd that starts at the same time must not delay the load by the time-out of a connection.
        let connect = async {
            match etcd {
                Some(settings) => Ok(Some(Registrar::connect(settings).await?)),
                None => Ok::<_, StartError>(None),
            }
        };
        let load = async {
            let began = Instant::now();
            let loading = tokio::time::timeout(LOAD_MAX, load(role, config.clone(), epoch.0)).await;
            Ok((loading.map_err(|_| StartError::LoadTimeout)??, began.elapsed()))
        };
        let (registrar, (loaded, load_time)) = tokio::try_join!(connect, load)?;
        let Loaded {
            path,
            model,
            host_bytes,
            arena,
            identity,
            executor,
            defaults,
            cpus,
            cpu_fallback,
        } = loaded;
        let load_duration = metrics.meter().f64_gauge("baton.model.load.duration").with_unit("s");
        let load_duration =
            load_duration.with_description("Time to fetch, read and pack the model");
        load_duration.build().record(load_time.as_secs_f64(), &[]);
        let executor = wrap(executor);
        let weight_update = executor.weight_update();
        let limits = executor.limits();
        let scheduler_config = SchedulerConfig {
            step_tokens: defaults.step_tokens,
            chunk_tokens: defaults.chunk_tokens,
            tail_tokens: defaults.tail_tokens,
            // The measured time of a launch does not include the work of ranks.
            waits_for_kv: node.tp == 1,
            itl: defaults.itl,
            prefix_cache: node.prefix_cache,
            waiting_max: defaults.waiting_max,
            ..SchedulerConfig::new(limits)
        };
        let scheduler = Scheduler::new(scheduler_config, identity::cache_seeds(&identity))?;
        let tiers = open_tiers(config, &arena).await?;
        let tiers = tiers.and_then(|tiers| TierCopies::start(tiers, &arena, executor.waker()));
        let scheduler = match &tiers {
            Some((copies, _)) => scheduler.with_tiers(copies.config(), executor.now()),
            None => scheduler,
        };
        // If the node does not start, the events are dropped first, so the threads of the tiers do not wait for them.
        let (tier_copies, tier_events) = tiers.unzip();
        let sequence_tokens_max = scheduler.sequence_tokens_max() as u32;
        let steps = StepLoop::new(scheduler, executor);
        let steps = steps.with_mask_threads(mask_threads()).map_err(StartError::Thread)?;

        let transfers_max = scheduler_config.transfers_max;
        let transfer_limits = settings::transfer_limits(defaults.transfer_bytes, transfers_max);
        let transfer_config =
            settings::transfer_config(config, &node_id, epoch, &identity, transfer_limits)?;
        let transfer_config = TransferConfig { tls: tls.clone(), ..transfer_config };
        let (sink, events) =
            TransferEvents::new(transfer_config.limits.transfers_max, steps.waker());
        let transfers = Arc::new(Transfers::start(transfer_config, arena.clone(), sink)?);
        transfer_metrics::register(metrics.meter(), &transfers);
        let own_address = v1::Peer {
            node_id: node_id.to_string(),
            epoch: epoch.to_bytes().to_vec().into(),
            control_endpoint: transfers.control_endpoint().to_owned(),
            ..v1::Peer::default()
        };
        let record = NodeRecord {
            node_id,
            epoch,
            role,
            peer_tag: secret.peer_tag(&own_address).to_vec(),
            control_endpoint: own_address.control_endpoint,
            model: served_name.clone(),
            identity,
            prompt_tokens_max: identity::prompt_tokens_max(sequence_tokens_max),
            sequence_tokens_max,
            block_count: limits.blocks,
            vocabulary_size: limits.vocabulary,
            grammar_version: GRAMMAR_VERSION,
            cpu_fallback,
        };

        let attempts_max = attempts_max(&scheduler_config);
        let tier_copies = tier_copies.map(Arc::new);
        let tier_threads = tier_copies.clone().zip(tier_events).map(|(copies, events)| {
            let metrics = TierMetrics::register(metrics.meter(), arena.block_bytes());
            TierThreads { copies, events, metrics }
        });
        let (inbox, commands) = Inbox::new(attempts_max, steps.waker());
        let row_drafts_max = limits.speculation.map_or(0, |speculation| speculation.row_drafts);
        let node_metrics = NodeMetrics::new(metrics, &served_name, row_drafts_max);
        let core = NodeCore::new(steps, &record, STALL_AFTER);
        let engine = Engine::new(
            core,
            transfers.clone(),
            commands,
            events,
            node_metrics.clone(),
            step_in_flight,
            is_paused,
        )
        .with_tiers(tier_threads);
        let engine = EngineThread::start(engine).map_err(StartError::Thread)?;

        let draining = CancellationToken::new();
        let attempt_limits = identity::attempt_limits(&record);
        let verifier = CallVerifier::new(&secret, epoch);
        let authenticate = AuthenticateLayer::new(verifier, node_metrics.clone());
        let loaded = LoadedModel {
            path: path.clone(),
            format: settings::load_format(config.model.load_format),
            fingerprint: record.identity.model_fingerprint,
        };
        let grammars = Grammars::new(path, record.vocabulary_size, node_metrics);
        let inbox_of_calls = inbox.clone();
        let service = NodeService::new(
            role,
            attempt_limits,
            grammars,
            inbox_of_calls,
            secret.clone(),
            draining.clone(),
        );
        let weights = WeightActor::start(WeightSettings {
            model,
            loaded,
            host_bytes,
            share: MemoryShare::of_node(config.node.nodes_per_container),
            update: weight_update,
            inbox: inbox.clone(),
            credentials: PeerCredentials { secret, tls: tls.clone() },
            folder: config.cache.clone().unwrap_or_else(|| "/tmp".into()),
        });
        let weights_service =
            WeightsService::new(attempt_limits, weights.handle(), inbox.clone(), draining.clone());
        let server = GrpcServer::start(
            grpc,
            tls.clone(),
            service,
            weights_service,
            authenticate,
            attempts_max,
            sequence_tokens_max,
        )
        .await
        .map_err(not_listening)?;
        let reload = ReloadTask::start(tls.map(|tls| tls as Arc<dyn Reload>).into_iter().collect());
        let addresses = Addresses {
            grpc: grpc_address,
            metrics: metrics_server.address(),
            control: record.control_endpoint.clone(),
            data: transfers.data_endpoint().to_owned(),
        };
        let populate = Populate::start(arena, cpus).map_err(StartError::Thread)?;
        server.set_status(ServingStatus::Serving).await;
        ready.store(true, Ordering::Release);
        // Last: a router that reads the record finds a serving node.
        let registration = registrar.map(|registrar| {
            let host = config.transfer.advertised_grpc_host(grpc_address.ip());
            let grpc = format!("http://{host}:{}", grpc_address.port());
            let address = NodeAddress { role, grpc };
            registrar.register(NodeEntry { node_id: record.node_id.clone(), epoch, address })
        });
        Ok(Self {
            record,
            addresses,
            metrics: metrics.clone(),
            inbox,
            draining,
            ready,
            server,
            metrics_server,
            engine,
            transfers,
            tiers: tier_copies,
            populate,
            weights,
            registration,
            reload,
            drain_timeout: node.drain_timeout,
        })
    }

    pub fn record(&self) -> &NodeRecord {
        &self.record
    }

    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// Waits until the node has failed and returns the reason.
    pub async fn failed(&mut self) -> String {
        tokio::select! {
            () = self.engine.ended() => "the engine ended".to_owned(),
            reason = self.server.ended() => format!("the gRPC server ended: {reason}"),
        }
    }

    /// Shuts down gracefully: rejects new calls, waits for in-flight requests (at most
    /// `node.drain_timeout`), leaves the cluster, and ends every thread and task.
    pub async fn drain(self) -> Result<(), NodeFailure> {
        let Self {
            server,
            inbox,
            mut engine,
            transfers,
            tiers,
            populate,
            weights,
            metrics_server,
            registration,
            reload,
            ..
        } = self;
        // A failed engine has no attempts: callers only read the end of their streams.
        let drain_timeout = if engine.has_ended() { END_WITHIN } else { self.drain_timeout };
        let NodeRecord { role, node_id, model, .. } = &self.record;
        let name = format!("{role} node {node_id} for {model}");
        self.ready.store(false, Ordering::Release);
        self.metrics.set_draining(true);
        self.draining.cancel();
        server.set_status(ServingStatus::NotServing).await;
        info!(attempts = inbox.attempt_count(), "{name} drains");
        // Fails only when the engine thread has ended or hangs, which its join reports below.
        let _ = inbox.send(Command::Drain { grace: drain_timeout });
        let leave = async {
            if let Some(registration) = registration {
                registration.leave(LEAVE_WITHIN).await;
            }
        };
        let end_work = async {
            if tokio::time::timeout(drain_timeout, inbox.idle()).await.is_ok() {
                return;
            }
            let seconds = drain_timeout.as_secs_f64();
            warn!("{name} aborts its in-flight requests after {seconds} s");
            let _ = inbox.send(Command::EndAll);
            if tokio::time::timeout(END_WITHIN, inbox.idle()).await.is_err() {
                warn!("{name} stops although callers have not read their streams");
            }
        };
        tokio::join!(leave, end_work);
        // It holds an inbox.
        weights.shutdown().await;
        // Ends the observers' streams. The server waits for them.
        let _ = inbox.send(Command::Stop);
        drop(inbox);
        if !server.shutdown(SERVER_STOP_WITHIN).await {
            info!("{name} closed connections that were still open");
        }
        let stopped = stop_threads(engine, transfers, tiers, populate).await;
        if let Err(error) = metrics_server.shutdown(METRICS_STOP_WITHIN).await {
            warn!("{error}");
        }
        if let Err(error) = reload.shutdown().await {
            warn!("the task that reads certificates panicked: {error}");
        }
        stopped
    }
}

/// Joins the engine thread, then the other threads, then drops the device.
async fn stop_threads(
    engine: EngineThread,
    transfers: Arc<Transfers>,
    tiers: Option<Arc<TierCopies>>,
    populate: Populate,
) -> Result<(), NodeFailure> {
    let joined = tokio::task::spawn_blocking(move || engine.join());
    let (engine, device) = match tokio::time::timeout(ENGINE_STOP_WITHIN, joined).await {
        Err(_) => (Err(NodeFailure::Deadline { what: "the engine thread".into() }), Device::None),
        Ok(joined) => {
            let (ended, device) = joined.expect("join catches panics and is not aborted");
            (ended.map_err(NodeFailure::from), device)
        }
    };
    // The engine thread has dropped its reference, so this joins the threads. A copy in flight may take long on a broken
    // disk.
    let copies = tokio::task::spawn_blocking(move || drop(tiers));
    let copies = tokio::time::timeout(TIERS_STOP_WITHIN, copies).await;
    let copies = copies.map_err(|_| NodeFailure::Deadline { what: "copies of KV tiers".into() });
    let shutdown = move || {
        drop(populate);
        transfers.shutdown()
    };
    let transfers = tokio::task::spawn_blocking(shutdown)
        .await
        .expect("shutdown does not panic and is not aborted")
        .map_err(|error| NodeFailure::Deadline { what: error.threads.join(", ") });
    // Transfers accessed the device's memory, so it is dropped after them.
    let closed = tokio::task::spawn_blocking(move || drop(device));
    let closed = tokio::time::timeout(ENGINE_STOP_WITHIN, closed).await;
    let closed = closed.map_err(|_| NodeFailure::Deadline { what: "the device".into() });
    engine.and(copies.map(drop)).and(transfers).and(closed.map(drop))
}

/// Opens the KV tiers, off the async threads: allocating a file may take seconds.
async fn open_tiers(
    config: &Config,
    arena: &Arc<KvArena>,
) -> Result<Option<OpenTiers>, StartError> {
    let (config, arena) = (config.clone(), arena.clone());
    let opened = tokio::task::spawn_blocking(move || OpenTiers::open(&config, &arena)).await;
    opened.map_err(StartError::Load)
}

/// An opened model.
struct Loaded {
    path: PathBuf,
    model: ModelConfig,
    host_bytes: HostBytes,
    arena: Arc<KvArena>,
    identity: ModelIdentity,
    executor: Box<dyn Executor>,
    defaults: Defaults,
    /// CPUs of the compute threads; empty means any CPU.
    cpus: Vec<u32>,
    /// Reason why the CPU serves although the host has a GPU.
    cpu_fallback: Option<String>,
}

/// Opens and packs the model, off the async threads.
async fn load(role: Role, config: Config, epoch: u128) -> Result<Loaded, StartError> {
    // Checked before a download that may take hours.
    let threads = settings::threads(&config.node)?;
    let path = config.hub.obtain(config.model.required_path()?, hub::Parts::All).await?;
    tokio::task::spawn_blocking(move || load_blocking(role, &config, epoch, &path, threads))
        .await
        .map_err(StartError::Load)?
}

fn load_blocking(
    role: Role,
    config: &Config,
    epoch: u128,
    path: &Path,
    (threads, cpus): (usize, Vec<u32>),
) -> Result<Loaded, StartError> {
    // This thread packs the weights, and the compute thread inherits its CPU: pages that forward passes read are
    // first touched on that NUMA node. Rank processes would inherit the CPU too, so each pins itself.
    let own_cpu = cpus.first().filter(|_| config.node.tp == 1);
    let confined = own_cpu.map(|cpu| affinity::confine(&[*cpu])).transpose();
    let _confined = confined.map_err(StartError::Affinity)?;
    let checkpoint = Checkpoint::open(path, settings::load_format(config.model.load_format))?;
    let checkpoint = checkpoint.hashing_packed();
    let model = checkpoint.config();
    info!(
        path = %path.display(),
        format = checkpoint.description(),
        parameters = model.parameter_count(),
        layers = model.layer_count,
        vocabulary = model.vocab_size,
        context_tokens = model.context_tokens,
        "opened the model"
    );
    thread::scope(|scope| {
        // Packing hashes the weights. This process packs none for ranks, so it hashes them while the ranks load.
        let beside_ranks = (config.node.tp > 1).then(|| {
            scope.spawn(|| {
                let _confined = (!cpus.is_empty()).then(|| affinity::confine(&cpus));
                checkpoint.model_fingerprint()
            })
        });
        let fingerprint = || match beside_ranks {
            Some(fingerprint) => fingerprint.join().expect("hashing does not panic"),
            None => checkpoint.model_fingerprint(),
        };
        load_weights(role, config, epoch, path, (threads, cpus.clone()), &checkpoint, fingerprint)
    })
}

/// Packs the weights on the device that the settings name, and measures its steps.
fn load_weights(
    role: Role,
    config: &Config,
    epoch: u128,
    path: &Path,
    (threads, cpus): (usize, Vec<u32>),
    checkpoint: &Checkpoint,
    fingerprint: impl FnOnce() -> u128,
) -> Result<Loaded, StartError> {
    let started = Instant::now();
    let model = checkpoint.config();
    let weights = settings::weight_format(config.model.dtype);
    let layout = model.kv_layout(weights.kv_dtype());
    let tp = config.node.tp;
    let kv_bytes = |blocks: u32| u64::from(blocks) * layout.block_bytes() as u64;
    let share = MemoryShare::of_node(config.node.nodes_per_container);
    let traits = |device| settings::node_traits(config, role, model, device);
    let (mut executor, arena, traits, cpus, cpu_fallback): (Box<dyn Executor>, _, _, _, _) = if tp
        > 1
    {
        tensor_parallel::check(checkpoint, &config.node)?;
        let (gpus, cpu_fallback) = match device::gpus_of_ranks(config, weights)? {
            Chosen::Gpu(gpus) => (Some(gpus), None),
            Chosen::Cpu { fallback } => (None, fallback),
        };
        // This process's CUDA contexts take memory too, so they exist before the ranks measure the memory left for
        // KV.
        let contexts = gpus.as_deref().map(device::contexts).transpose()?;
        let traits = traits(match &contexts {
            Some(contexts) => device::memory(config, contexts)?,
            None => NodeDevice::Cpu,
        })?;
        let sizes = batch_sizes(&traits)?;
        if gpus.is_none() {
            let blocks = settings::block_count(&config.node, layout)?;
            memory_limit::check(share, u64::from(tp) * traits.model.weights, kv_bytes(blocks))?;
        }
        let (executor, arena) =
            tensor_parallel::start(config, epoch, path, checkpoint, gpus, sizes)?;
        (Box::new(executor), arena, traits, Vec::new(), cpu_fallback)
    } else {
        match device::gpu(config, weights)? {
            Chosen::Gpu(backend) => {
                let traits = traits(device::memory(config, [backend.context()])?)?;
                let sizes = batch_sizes(&traits)?;
                let ReadyGpu { executor, arena, .. } =
                    device::start_gpu(backend, config, checkpoint, layout, sizes, None)?;
                (Box::new(executor), arena, traits, Vec::new(), None)
            }
            Chosen::Cpu { fallback } => {
                let traits = traits(NodeDevice::Cpu)?;
                let sizes = batch_sizes(&traits)?;
                let blocks = settings::block_count(&config.node, layout)?;
                memory_limit::check(share, traits.model.weights, kv_bytes(blocks))?;
                let arena = KvArena::host(layout, blocks)?;
                let threads = (threads, &cpus[..]);
                let executor = device::start_cpu(config, checkpoint, threads, &arena, sizes, None)?;
                (Box::new(executor), arena, traits, cpus, fallback)
            }
        }
    };
    let fingerprint = fingerprint();
    info!(
        dtype = %weights,
        fingerprint = format_args!("{fingerprint:032x}"),
        ranks = tp,
        blocks = arena.block_count(),
        block_bytes = layout.block_bytes(),
        seconds = format_args!("{:.3}", started.elapsed().as_secs_f64()),
        "loaded the weights"
    );
    let times =
        traits.needs_step_times().then(|| StepTimes::measure(&mut *executor)).transpose()?;
    let defaults = defaults::derive(&traits, times.as_ref()).map_err(SettingsError::from)?;
    let reasons: Vec<String> = defaults.reasons.iter().map(ToString::to_string).collect();
    info!("derived the settings that are auto: {}", reasons.join("; "));
    let identity = identity::model_identity(fingerprint, weights, layout);
    let path = path.to_owned();
    let model = checkpoint.config().clone();
    let host_bytes = match traits.device {
        NodeDevice::Cpu => HostBytes {
            weights: u64::from(tp) * traits.model.weights,
            kv: kv_bytes(arena.block_count()),
        },
        NodeDevice::Gpu { .. } => HostBytes::default(),
    };
    Ok(Loaded { path, model, host_bytes, arena, identity, executor, defaults, cpus, cpu_fallback })
}

/// Returns the batch for which the executor allocates memory.
fn batch_sizes(traits: &NodeTraits) -> Result<BatchSizes, SettingsError> {
    Ok(BatchSizes::from(&defaults::derive(traits, None)?))
}

/// Returns the number of threads for token bitmasks: a quarter of the CPUs, because the engine thread and the
/// transfers need the others.
fn mask_threads() -> usize {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    (cpus / 4).clamp(1, MASK_THREADS_MAX)
}

/// Returns the most sequences that the scheduler may know: running, waiting, or in a transfer.
fn attempts_max(config: &SchedulerConfig) -> u32 {
    config.limits.slots.saturating_add(config.waiting_max).saturating_add(config.transfers_max)
}

/// Exports whether a step hangs, as the liveness probe reports it.
fn observe_hang(metrics: &Metrics, step_in_flight: Arc<StepInFlight>, hang_restart: Duration) {
    let hung = metrics.meter().u64_observable_gauge("baton.step.hung");
    hung.with_description("1 while a launched step has not finished within node.hang_restart")
        .with_callback(move |hung| {
            let age = step_in_flight.hung_for(Instant::now(), hang_restart);
            hung.observe(u64::from(age.is_some()), &[]);
        })
        .build();
}

/// Serves `/live` until a step hangs and `/ready` while the node accepts requests.
fn probes(
    ready: Arc<AtomicBool>,
    is_paused: Arc<AtomicBool>,
    step_in_flight: Arc<StepInFlight>,
    hang_restart: Duration,
) -> Router {
    let is_live = move || async move {
        match step_in_flight.hung_for(Instant::now(), hang_restart) {
            None => (StatusCode::OK, "live\n".to_owned()),
            Some(age) => {
                let (age, limit) = (age.as_secs(), config::format_duration(hang_restart));
                let text = format!(
                    "hung: a step has been in flight for {age} s; node.hang_restart = {limit}\n"
                );
                (StatusCode::SERVICE_UNAVAILABLE, text)
            }
        }
    };
    let is_ready = move || async move {
        match (ready.load(Ordering::Acquire), is_paused.load(Ordering::Acquire)) {
            (true, false) => (StatusCode::OK, "ready\n"),
            (true, true) => (StatusCode::SERVICE_UNAVAILABLE, "paused\n"),
            (false, _) => (StatusCode::SERVICE_UNAVAILABLE, "not ready\n"),
        }
    };
    Router::new().route("/live", get(is_live)).route("/ready", get(is_ready))
}
