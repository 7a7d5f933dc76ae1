//! The start of a node, act by act.

use std::{io, net::SocketAddr, sync::Arc, thread};

use cluster::{Epoch, NodeAddress, NodeId, NodeRecord, Role};
use config::Config;
use credentials::{Reload, ReloadTask};
use crossbeam_channel::Receiver;
use engine::{
    Scheduler, SchedulerConfig, StepLoop,
    defaults::Defaults,
    executor::{Executor, ExecutorLimits, WeightUpdate},
    tiers::TierEvent,
};
use kernels::KvArena;
use kv_transfer::{TransferConfig, Transfers, api::Event};
use membership::{
    Tls,
    etcd::{EtcdSettings, NodeEntry, Registrar, Registration},
};
use proto::{
    auth::{CallVerifier, ClusterSecret},
    v1,
};
use telemetry::{Metrics, NodeMetrics};
use tokio::net::TcpSocket;
use tokio_util::sync::CancellationToken;
use tonic_health::ServingStatus;

use super::{Addresses, Node};
use crate::{
    authentication::AuthenticateLayer,
    constraint::GRAMMAR_VERSION,
    engine_thread::{Engine, EngineThread, TierThreads},
    grammars::Grammars,
    grpc_server::{self, GrpcServer},
    identity,
    inbox::{EngineInbox, TransferEvents},
    memory_limit::MemoryShare,
    model_load::{self, Loaded},
    node_core::{NodeCore, STALL_AFTER},
    populate::PopulateThread,
    probes::Liveness,
    service::NodeService,
    settings::{self, SettingsError},
    start_error::NodeStartError,
    tiers::{OpenTiers, TierCopies, TierMetrics},
    transfer_metrics,
    weights::{
        LoadedModel, PeerCredentials, UpdateLimits, WeightActor, WeightSettings, WeightsService,
    },
};

/// Upper bound on the threads for token bitmasks. 64 bitmasks of JSON schemas take a few
/// milliseconds of CPU time, and a forward pass of 5 ms hides them on four threads.
const MASK_THREADS_MAX: usize = 8;

impl Node {
    /// Opens the model, then starts engine, transfers and servers in this order. `wrap` may wrap
    /// the executor.
    pub async fn start(
        role: Role,
        config: &Config,
        metrics: &Metrics,
        wrap: impl FnOnce(Box<dyn Executor>) -> Box<dyn Executor>,
    ) -> Result<Self, NodeStartError> {
        let (mut checked, socket) = CheckedSettings::check(role, config)?;
        let liveness = Liveness::default();
        let metrics_server = liveness.serve(&config.node, metrics).await?;
        // An etcd that starts at the same time must not delay the load by the time-out of a
        // connection.
        let load = model_load::load(role, config, checked.epoch, metrics);
        let etcd = connect_etcd(checked.etcd.take());
        let (registrar, (loaded, executor)) = tokio::try_join!(etcd, load)?;

        let engine = OpenedEngine::open(config, &loaded, wrap(executor)).await?;
        let OpenedEngine { scheduler_config, steps, weight_update, tier_copies, tier_events } =
            engine;
        let transfer_config =
            checked.transfer_config(config, &loaded, scheduler_config.transfers_max)?;
        let (transfers, events) = start_transfers(transfer_config, &loaded.arena, &steps, metrics)?;
        let record = checked.record(role, &loaded, steps.scheduler(), &transfers);

        let attempts_max = attempts_max(&scheduler_config);
        let (inbox, commands) = EngineInbox::new(attempts_max, steps.waker());
        let drafts_max = scheduler_config.limits.speculation.map_or(0, |it| it.row_drafts);
        warn_of_no_drafts(config, drafts_max);
        let node_metrics = NodeMetrics::new(metrics, &checked.served_name, drafts_max);
        let tier_copies = tier_copies.map(Arc::new);
        let tier_threads = tier_copies.clone().zip(tier_events).map(|(copies, events)| {
            let metrics = TierMetrics::register(metrics, loaded.arena.block_bytes());
            TierThreads { copies, events, metrics }
        });
        let engine = Engine::new(
            NodeCore::new(steps, &record, STALL_AFTER),
            transfers.clone(),
            commands,
            events,
            node_metrics.clone(),
            liveness.step_in_flight.clone(),
            liveness.is_paused.clone(),
        );
        let engine =
            EngineThread::start(engine.with_tiers(tier_threads)).map_err(NodeStartError::Thread)?;

        let weight_settings = checked.weight_settings(config, &loaded, weight_update, &inbox);
        let weights = WeightActor::start(weight_settings);
        let draining = CancellationToken::new();
        let attempt_limits = identity::attempt_limits(&record);
        let verifier = CallVerifier::new(&checked.secret, checked.epoch);
        let server = GrpcServer::start(
            socket,
            checked.tls.clone(),
            NodeService::new(
                role,
                attempt_limits,
                Grammars::new(loaded.path, record.vocabulary_size, node_metrics.clone()),
                loaded.adapters,
                inbox.clone(),
                checked.secret.clone(),
                draining.clone(),
            ),
            WeightsService::new(attempt_limits, weights.handle(), inbox.clone(), draining.clone()),
            AuthenticateLayer::new(verifier, node_metrics),
            attempts_max,
            record.sequence_tokens_max,
        );
        let server = server.await.map_err(not_listening(config.node.grpc))?;
        let tls = checked.tls.map(|tls| tls as Arc<dyn Reload>);
        let reload = ReloadTask::start(tls.into_iter().collect());
        let populate =
            PopulateThread::start(loaded.arena, loaded.cpus).map_err(NodeStartError::Thread)?;
        server.set_status(ServingStatus::Serving).await;
        liveness.set_ready(true);
        // Last: a router that reads the record finds a serving node.
        let registration = registrar.map(|etcd| register(etcd, config, &record, checked.grpc));
        Ok(Self {
            addresses: Addresses {
                grpc: checked.grpc,
                metrics: metrics_server.address(),
                control: record.control_endpoint.clone(),
                data: transfers.data_endpoint().to_owned(),
            },
            record,
            metrics: metrics.clone(),
            inbox,
            draining,
            liveness,
            server,
            metrics_server,
            engine,
            transfers,
            tiers: tier_copies,
            populate,
            weights,
            registration,
            reload,
            drain_timeout: config.node.drain_timeout,
        })
    }
}

/// Values of the settings of this process, checked before the model is read.
struct CheckedSettings {
    node_id: NodeId,
    epoch: Epoch,
    served_name: String,
    secret: ClusterSecret,
    tls: Option<Tls>,
    /// `None` without etcd, and once the start has taken them.
    etcd: Option<EtcdSettings>,
    grpc: SocketAddr,
}

impl CheckedSettings {
    /// Checks the settings, and reserves the gRPC port with the socket.
    fn check(role: Role, config: &Config) -> Result<(Self, TcpSocket), NodeStartError> {
        let secret = settings::secret(&config.cluster)?;
        let tls = membership::read_tls(&config.cluster).map_err(NodeStartError::Tls)?;
        let served_name = config.model.served_name()?;
        let epoch = Epoch::mint()?;
        let not_listening = not_listening(config.node.grpc);
        let socket = grpc_server::reserve(config.node.grpc).map_err(&not_listening)?;
        let grpc = socket.local_addr().map_err(not_listening)?;
        let id = config.node.id.clone();
        let id = id.unwrap_or_else(|| settings::default_node_id(role, grpc.port()));
        let node_id = NodeId::parse(&id).map_err(|source| NodeStartError::NodeId { id, source })?;
        let etcd = EtcdSettings::read(&config.cluster)?;
        Ok((Self { node_id, epoch, served_name, secret, tls, etcd, grpc }, socket))
    }

    fn transfer_config(
        &self,
        config: &Config,
        loaded: &Loaded,
        transfers_max: u32,
    ) -> Result<TransferConfig, SettingsError> {
        let limits = settings::transfer_limits(loaded.defaults.transfer_bytes, transfers_max);
        let (node_id, epoch, identity) = (&self.node_id, self.epoch, &loaded.identity);
        let tls = self.tls.clone();
        let settings = settings::transfer_config(config, node_id, epoch, identity, limits)?;
        Ok(TransferConfig { tls, ..settings })
    }

    fn weight_settings(
        &self,
        config: &Config,
        loaded: &Loaded,
        update: Option<Arc<dyn WeightUpdate>>,
        inbox: &EngineInbox,
    ) -> WeightSettings {
        WeightSettings {
            model: loaded.model.clone(),
            loaded: LoadedModel {
                path: loaded.path.clone(),
                format: settings::load_format(config.model.load_format),
                fingerprint: loaded.identity.model_fingerprint,
            },
            limits: UpdateLimits {
                cpu: loaded.cpu,
                int4_layout: loaded.int4_layout,
                host_bytes: loaded.host_bytes,
                share: MemoryShare::of_node(config.node.nodes_per_container),
            },
            update,
            inbox: inbox.clone(),
            credentials: PeerCredentials { secret: self.secret.clone(), tls: self.tls.clone() },
            folder: config.cache.clone().unwrap_or_else(|| "/tmp".into()),
        }
    }

    /// Returns the record under which routers and peers know this process.
    fn record(
        &self,
        role: Role,
        loaded: &Loaded,
        scheduler: &Scheduler,
        transfers: &Transfers,
    ) -> NodeRecord {
        let address = v1::Peer {
            node_id: self.node_id.to_string(),
            epoch: self.epoch.to_bytes().to_vec().into(),
            control_endpoint: transfers.control_endpoint().to_owned(),
            ..v1::Peer::default()
        };
        let sequence_tokens_max = scheduler.sequence_tokens_max() as u32;
        let limits = scheduler.config().limits;
        NodeRecord {
            node_id: self.node_id.clone(),
            epoch: self.epoch,
            role,
            peer_tag: self.secret.peer_tag(&address).to_vec(),
            control_endpoint: address.control_endpoint,
            model: self.served_name.clone(),
            identity: loaded.identity.clone(),
            prompt_tokens_max: identity::prompt_tokens_max(sequence_tokens_max),
            sequence_tokens_max,
            block_count: limits.blocks,
            vocabulary_size: limits.vocabulary,
            grammar_version: GRAMMAR_VERSION,
            cpu_fallback: loaded.cpu_fallback.clone(),
            pooling: loaded.pooling,
            sampling_version: loaded.sampling_version,
            adapters: loaded.adapters.listed(),
            both_roles: true,
            kv_windows: identity::kv_windows(scheduler.kv_groups()),
            state_blocks: scheduler.kv_groups().state_entries() as u32,
        }
    }
}

/// The scheduler on its device, and the KV tiers beside it. If the node does not start, the events
/// are dropped before the copies, so the threads of the tiers do not wait for them.
struct OpenedEngine {
    scheduler_config: SchedulerConfig,
    steps: StepLoop<Box<dyn Executor>>,
    weight_update: Option<Arc<dyn WeightUpdate>>,
    tier_events: Option<Receiver<TierEvent>>,
    tier_copies: Option<TierCopies>,
}

impl OpenedEngine {
    async fn open(
        config: &Config,
        loaded: &Loaded,
        executor: Box<dyn Executor>,
    ) -> Result<Self, NodeStartError> {
        let scheduler_config = scheduler_config(config, &loaded.defaults, executor.limits());
        let scheduler = Scheduler::new(scheduler_config, identity::cache_seeds(&loaded.identity))?;
        let scheduler = scheduler.with_kv_groups(executor.kv_groups());
        let (tier_copies, tier_events) =
            start_tiers(config, &loaded.arena, &*executor).await?.unzip();
        let scheduler = match &tier_copies {
            Some(copies) => scheduler.with_tiers(copies.config(), executor.now()),
            None => scheduler,
        };
        let weight_update = executor.weight_update();
        let steps = StepLoop::new(scheduler, executor);
        let steps = steps.with_mask_threads(mask_threads()).map_err(NodeStartError::Thread)?;
        Ok(Self { scheduler_config, steps, weight_update, tier_events, tier_copies })
    }
}

fn not_listening(address: SocketAddr) -> impl Fn(io::Error) -> NodeStartError {
    move |source| NodeStartError::Grpc { address, source }
}

async fn connect_etcd(settings: Option<EtcdSettings>) -> Result<Option<Registrar>, NodeStartError> {
    match settings {
        Some(settings) => Ok(Some(Registrar::connect(settings).await?)),
        None => Ok(None),
    }
}

/// Writes the node's record to etcd from now on.
fn register(
    etcd: Registrar,
    config: &Config,
    record: &NodeRecord,
    grpc: SocketAddr,
) -> Registration {
    let host = config.transfer.advertised_grpc_host(grpc.ip());
    let address = NodeAddress { role: record.role, grpc: format!("http://{host}:{}", grpc.port()) };
    let (node_id, epoch) = (record.node_id.clone(), record.epoch);
    etcd.register(NodeEntry { node_id, epoch, address })
}

/// Opens the KV tiers and starts their threads. Without settings of tiers, or without a tier that
/// works: `None`.
async fn start_tiers(
    config: &Config,
    arena: &Arc<KvArena>,
    executor: &dyn Executor,
) -> Result<Option<(TierCopies, Receiver<TierEvent>)>, NodeStartError> {
    let (config, opened_for, waker) = (config.clone(), arena.clone(), executor.waker());
    let groups = executor.kv_groups();
    let open = move || OpenTiers::open(&config, &opened_for, &groups);
    // Off the async threads: allocating a file may take seconds.
    let opened = tokio::task::spawn_blocking(open).await;
    let opened = opened.map_err(NodeStartError::Load)?;
    Ok(opened.and_then(|tiers| TierCopies::start(tiers, arena, waker)))
}

fn scheduler_config(
    config: &Config,
    defaults: &Defaults,
    limits: ExecutorLimits,
) -> SchedulerConfig {
    SchedulerConfig {
        step_tokens: defaults.step_tokens,
        chunk_tokens: defaults.chunk_tokens,
        tail_tokens: defaults.tail_tokens,
        // The measured time of a launch does not include the work of ranks.
        waits_for_kv: config.node.tp == 1,
        itl: defaults.itl,
        prefix_cache: config.node.prefix_cache,
        waiting_max: defaults.waiting_max,
        ..SchedulerConfig::new(limits)
    }
}

/// Starts the transfers. Their events wake the engine thread.
fn start_transfers<E: Executor>(
    config: TransferConfig,
    arena: &Arc<KvArena>,
    steps: &StepLoop<E>,
    metrics: &Metrics,
) -> Result<(Arc<Transfers>, Receiver<Event>), NodeStartError> {
    let (sink, events) = TransferEvents::new(config.limits.transfers_max, steps.waker());
    let transfers = Arc::new(Transfers::start(config, arena.clone(), sink)?);
    transfer_metrics::register(metrics, &transfers);
    Ok((transfers, events))
}

/// Returns the number of threads for token bitmasks: a quarter of the CPUs, because the engine
/// thread and the transfers need the others.
fn mask_threads() -> usize {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    (cpus / 4).clamp(1, MASK_THREADS_MAX)
}

/// Returns the most sequences that the scheduler may know: running, waiting, or in a transfer.
fn attempts_max(config: &SchedulerConfig) -> u32 {
    config.limits.slots.saturating_add(config.waiting_max).saturating_add(config.transfers_max)
}

/// Warns if the operator's draft tokens have no effect.
fn warn_of_no_drafts(config: &Config, drafts_max: u32) {
    if drafts_max == 0 && config.node.speculate != config::Speculate::Off {
        tracing::warn!(
            "node.speculate has no effect: the model has recurrent states, which cannot be undone"
        );
    }
}
