//! Runs the protocol: sockets, threads and the clock.
//!
//! * The driver thread owns the protocol core.
//! * The listener thread receives the control messages of all pairs, verifies them and passes them
//!   to the driver.
//! * Each pair has a sender thread with its own socket. Data connections have their own threads.
//!
//! Threads communicate over bounded channels. Only data threads block on a full channel. The
//! listener drops the control message, the driver closes the pair, and the node gets
//! [`Overloaded`].

mod driver;
mod listener;
mod outbound;
mod sockets;

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, atomic::AtomicU64},
    time::{Duration, Instant},
};

use crossbeam_channel::{Sender, TrySendError, bounded};
use kernels::{KvArena, peer::PeerChannels};

use crate::{
    api::{Command, Event, Peer},
    config::{TCP_CONNECTIONS_MAX, TransferLimits},
    control::{Keys, Sealer},
    data::{self, DataConnections, StagingPool},
    driver::{EventSink, Input, TransferDriver},
    metrics::{Metrics, MetricsReader, TransferMetrics},
    protocol::{Core, Local},
    resolve::Resolver,
    threads::{Threads, locked},
    transfer_config::{TransferConfig, TransportConfig},
    transfer_kind::{self, TransferKind, TransportChoice},
    transport::TransportEvent,
};
use driver::{DriverThread, Inputs};
use listener::Listener;
use outbound::{OutboundContext, OutboundQueues};

/// Verified control messages queued for the driver. More are dropped, and their senders retransmit
/// them.
const CONTROL_QUEUE_MAX: usize = 4096;
/// Events of data threads queued for the driver; the threads block while the queue is full.
const DATA_EVENTS_MAX: usize = 4096;
/// Time-out of a shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);
/// Additional time for the driver to react to the shutdown.
const SHUTDOWN_SLACK: Duration = Duration::from_millis(500);

impl EventSink for Sender<Event> {
    fn offer(&mut self, event: Event) -> Result<(), Event> {
        match self.try_send(event) {
            Err(TrySendError::Full(event)) => Err(event),
            // The node is shutting down.
            Ok(()) | Err(TrySendError::Disconnected(_)) => Ok(()),
        }
    }
}

/// The command was rejected. Half of the queue is reserved for transfers that have started, so a
/// node that rejects a `Receive` or `Send` still accepts the other commands.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("cannot queue a transfer command: {queued} commands are already queued")]
pub struct Overloaded {
    pub queued: usize,
}

/// Reason why the transfers could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("invalid {field} {value:?}; expected {allowed}")]
    Config { field: &'static str, value: String, allowed: String },
    #[error("cannot listen for control messages on {address}: {reason}")]
    ControlBind { address: SocketAddr, reason: String },
    #[error("cannot listen for KV on {address}: {source}")]
    DataBind { address: SocketAddr, source: io::Error },
    #[error("cannot start thread {name}: {source}")]
    Thread { name: String, source: io::Error },
}

/// These threads were still running at the deadline and were left behind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot stop all transfer threads in time: {} still running", threads.join(", "))]
pub struct ShutdownError {
    pub threads: Vec<String>,
}

/// All transfers of one node. Dropping the value calls [`Transfers::shutdown`].
pub struct Transfers {
    control_endpoint: String,
    data_endpoint: String,
    commands: Sender<Command>,
    limits: TransferLimits,
    metrics: Arc<Metrics>,
    running: Mutex<Option<Running>>,
    unfinished: Arc<Mutex<Vec<String>>>,
}

/// Everything that a shutdown stops.
struct Running {
    listener: Listener,
    driver: Threads,
    /// Dropping the sender stops the driver.
    stop: Sender<()>,
}

impl Transfers {
    /// Binds both listeners and starts the threads.
    pub fn start(
        config: TransferConfig,
        arena: Arc<KvArena>,
        events: impl EventSink,
    ) -> Result<Self, StartError> {
        check(&config)?;
        let limits = config.limits;
        let block_bytes = arena.block_bytes();
        let shared = SharedParts {
            keys: Keys::derive(&config.secret),
            resolver: Resolver::system(),
            metrics: Arc::default(),
        };
        let channels = arena.peer_channels();
        let offers = offers(&config, &arena, channels.as_deref());
        let (data_sender, data) = bounded(DATA_EVENTS_MAX);
        let connections =
            shared.data_connections(&config, arena, channels, &offers, data_sender)?;
        let data_endpoint = endpoint(&config.advertise_host, connections.address().port());
        let context = zmq::Context::new();
        let (control_sender, messages) = bounded(CONTROL_QUEUE_MAX);
        let listener = shared.listener(&context, &config, control_sender)?;
        let control_endpoint = endpoint(&config.advertise_host, listener.port);
        let (failure_sender, failures) = bounded(limits.pairs_max);
        let source = Peer { node_id: config.node_id, epoch: config.epoch };
        let links = shared.outbound_queues(context, source, failure_sender);
        let core = Core::new(
            Instant::now(),
            Local {
                epoch: config.epoch,
                identity: config.identity,
                control_endpoint: control_endpoint.clone(),
                data_endpoint: data_endpoint.clone(),
                transports: offers,
                integrity: vec![INTEGRITY.to_owned()],
                block_bytes,
                limits,
            },
        );
        let (command_sender, commands) = bounded(limits.commands_max);
        let (stop, stopped) = bounded(0);
        let unfinished = Arc::default();
        let metrics = shared.metrics;
        let driver = DriverThread {
            driver: TransferDriver::new(core, connections, links),
            metrics: Arc::clone(&metrics),
            sink: events,
            inputs: Inputs { commands, messages, data, failures, stop: stopped },
            unfinished: Arc::clone(&unfinished),
            connecting: Vec::new(),
        };
        let threads = Threads::default();
        let name = "kv-driver";
        threads
            .spawn(name, move || driver.run(SHUTDOWN_TIMEOUT))
            .map_err(|source| StartError::Thread { name: name.to_owned(), source })?;
        Ok(Self {
            control_endpoint,
            data_endpoint,
            commands: command_sender,
            limits,
            metrics,
            running: Mutex::new(Some(Running { listener, driver: threads, stop })),
            unfinished,
        })
    }

    /// Queues a command for the driver. Never blocks.
    pub fn command(&self, command: Command) -> Result<(), Overloaded> {
        let queued = self.commands.len();
        if queued >= self.limits.queued_max(&command) {
            return Err(Overloaded { queued });
        }
        self.commands.try_send(command).map_err(|_| Overloaded { queued })
    }

    /// Returns `tcp://host:port` for the node's record: the advertised host and the bound port.
    pub fn control_endpoint(&self) -> &str {
        &self.control_endpoint
    }

    /// Returns the endpoint for KV. Peers learn it in the handshake.
    pub fn data_endpoint(&self) -> &str {
        &self.data_endpoint
    }

    /// Returns counters since the start and current gauges; after a shutdown, the last values.
    /// Never blocks.
    pub fn metrics(&self) -> TransferMetrics {
        self.metrics.read()
    }

    /// Returns a reader that does not keep the transfers alive.
    pub fn metrics_reader(&self) -> MetricsReader {
        MetricsReader(Arc::downgrade(&self.metrics))
    }

    /// Aborts all transfers (each still gets its final event), closes every socket and joins every
    /// thread. Takes at most 3.5 s. A second call does nothing.
    pub fn shutdown(&self) -> Result<(), ShutdownError> {
        let running = locked(&self.running).take();
        let Some(Running { listener, driver, stop }) = running else { return Ok(()) };
        drop(stop);
        let deadline = Instant::now() + SHUTDOWN_TIMEOUT + SHUTDOWN_SLACK;
        let mut threads = driver.join_all(deadline);
        threads.append(&mut locked(&self.unfinished));
        threads.extend(listener.shutdown(deadline));
        if threads.is_empty() { Ok(()) } else { Err(ShutdownError { threads }) }
    }
}

/// Parts that the threads of the transfers have in common.
struct SharedParts {
    keys: Keys,
    resolver: Resolver,
    metrics: Arc<Metrics>,
}

impl SharedParts {
    /// Binds the listener for KV.
    fn data_connections(
        &self,
        config: &TransferConfig,
        arena: Arc<KvArena>,
        channels: Option<Arc<dyn PeerChannels>>,
        offers: &[String],
        events: Sender<TransportEvent>,
    ) -> Result<DataConnections, StartError> {
        let shared = data::Shared {
            me: config.epoch,
            keys: self.keys.clone(),
            events,
            resolver: self.resolver.clone(),
            metrics: Arc::clone(&self.metrics),
            connections: AtomicU64::new(0),
            memory: arena.peer_memory(),
            channels,
            offered: offers.iter().filter_map(|offer| TransferKind::from_offer(offer)).collect(),
            transport: config.transport,
            staging: StagingPool::new(&arena),
            tls: config.tls.clone(),
        };
        // A replaced group of connections may still be closing.
        let connections_max = 2 * config.limits.pairs_max * TCP_CONNECTIONS_MAX;
        DataConnections::start(shared, config.data_bind, arena, connections_max)
            .map_err(|source| StartError::DataBind { address: config.data_bind, source })
    }

    /// Binds the listener for control messages.
    fn listener(
        &self,
        context: &zmq::Context,
        config: &TransferConfig,
        messages: Sender<Input>,
    ) -> Result<Listener, StartError> {
        let (keys, metrics) = (self.keys.clone(), Arc::clone(&self.metrics));
        Listener::start(context, config.control_bind, keys, config.epoch, messages, metrics)
    }

    fn outbound_queues(
        &self,
        context: zmq::Context,
        source: Peer,
        failures: Sender<Input>,
    ) -> OutboundQueues {
        OutboundQueues {
            context: OutboundContext {
                context,
                sealer: Sealer::new(self.keys.clone(), source),
                resolver: self.resolver.clone(),
                metrics: Arc::clone(&self.metrics),
                failures,
                monitors: Arc::default(),
            },
            queues: BTreeMap::new(),
            senders: Threads::default(),
        }
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        if let Err(error) = self.shutdown() {
            tracing::error!(%error, "transfers did not shut down cleanly");
        }
    }
}

/// Returns the entries of `HELLO` for the supported transports that the configuration allows.
fn offers(
    config: &TransferConfig,
    arena: &KvArena,
    channels: Option<&dyn PeerChannels>,
) -> Vec<String> {
    let mut can = Vec::new();
    if arena.peer_memory().is_some() {
        can.push(TransferKind::Ipc);
    }
    if let Some(channels) = channels {
        // Loading NCCL is slow. If it is the only choice, load it before the first request.
        let opened = match config.transport.choice {
            TransportChoice::Only(TransferKind::Nccl) => channels.open().inspect(|()| {
                if let Err(reason) = channels.prepare() {
                    tracing::warn!(
                        reason,
                        "cannot load NCCL in advance; retrying with the first peer"
                    );
                }
            }),
            TransportChoice::Auto | TransportChoice::Only(_) => Ok(()),
        };
        match opened {
            Ok(()) => can.push(TransferKind::Nccl),
            Err(reason) => {
                tracing::warn!(transport = "nccl", reason, "transport unavailable; using tcp")
            }
        }
    }
    let TransportConfig { choice, has_rdma, .. } = config.transport;
    let nccl_between_hosts = choice.offers_nccl_between_hosts(has_rdma, config.tls.is_some());
    transfer_kind::offers(choice, nccl_between_hosts, &can, config.host.as_deref())
}

/// Name of the integrity method: xxh3-64 over the bytes of a chunk for `tcp`, the digest of its
/// blocks (`kernels::digest`) for `ipc` and `nccl`. A different computation needs a different name.
const INTEGRITY: &str = "xxh3+digest1";

fn endpoint(host: &str, port: u16) -> String {
    // An IPv6 address needs brackets.
    if host.contains(':') && !host.starts_with('[') {
        format!("tcp://[{host}]:{port}")
    } else {
        format!("tcp://{host}:{port}")
    }
}

/// Rejects values that peers would reject, naming the field.
fn check(config: &TransferConfig) -> Result<(), StartError> {
    /// Maximum length of names in control messages, less the bytes of `tcp://` and a port.
    const NAME_BYTES_MAX: usize = 200;
    /// Maximum length of a text of the identity: the limit of control messages.
    const IDENTITY_BYTES_MAX: usize = 256;
    let names = [
        ("node_id", &config.node_id, NAME_BYTES_MAX),
        ("advertise_host", &config.advertise_host, NAME_BYTES_MAX),
        ("identity.kv_layout", &config.identity.kv_layout, IDENTITY_BYTES_MAX),
        ("identity.dtype", &config.identity.dtype, IDENTITY_BYTES_MAX),
    ];
    for (field, name, bytes_max) in names {
        if name.is_empty() || name.len() > bytes_max {
            let allowed = format!("1 to {bytes_max} bytes");
            return Err(StartError::Config { field, value: name.clone(), allowed });
        }
    }
    let limits = config.limits;
    let counts = [
        ("limits.transfers_max", limits.transfers_max, 1..=32_768),
        ("limits.pairs_max", limits.pairs_max, 1..=4_096),
        ("limits.early_max", limits.early_max, 0..=32_768),
        ("limits.tombstones_max", limits.tombstones_max, 1..=1 << 20),
        ("limits.chunk_bytes_max", limits.chunk_bytes_max, 1..=256 << 20),
        ("limits.commands_max", limits.commands_max, 2..=1 << 20),
    ];
    for (field, value, allowed) in counts {
        if !allowed.contains(&value) {
            let allowed = format!("{} to {}", allowed.start(), allowed.end());
            return Err(StartError::Config { field, value: value.to_string(), allowed });
        }
    }
    Ok(())
}
