//! Runs the protocol: sockets, threads and the clock.
//!
//! * The driver thread owns the protocol core and everything it decides about.
//! * The listener thread receives control messages for all pairs, and only parses and hands on.
//! * Each pair has a sender thread with its own socket; its data connections have theirs.
//!
//! Between threads there are bounded channels. Who finds one full never waits: the listener drops
//! the control message, the driver gives up the pair, the node is told [`Overloaded`].

mod driver;
mod listener;
mod outbound;
pub mod sockets;

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use crossbeam_channel::{Sender, TrySendError, bounded};
use kernels::{KvArena, peer::PeerChannels};

use crate::{
    api::{Command, Event},
    config::TransferConfig,
    config::TransferLimits,
    control::{Keys, Signer, Source},
    data::DataConnections,
    driver::TransferDriver,
    metrics::{MetricsReader, MetricsStore, TransferMetrics},
    protocol::{Core, Local},
    resolve::Resolver,
    threads::Threads,
    transfer_kind::{self, TransferKind, TransportChoice},
};
use driver::{DriverThread, Inputs};
use listener::Listener;
use outbound::{OutboundQueues, Postbox};

/// VerifiedMessage control messages that wait for the driver; more are dropped and said again by their senders.
const CONTROL_QUEUE_MAX: usize = 4096;
/// Reports of data threads that wait for the driver; those threads wait when it is full.
const DATA_EVENTS_MAX: usize = 4096;
/// All of a shutdown.
const SHUTDOWN_MAX: Duration = Duration::from_secs(3);
/// What the driver may take beyond that to hear of it.
const SHUTDOWN_SLACK: Duration = Duration::from_millis(500);

/// Where events go. Called on the driver's thread and must not wait.
pub trait EventSink: Send + 'static {
    /// Takes the event, or gives it back when there is no room now: it is offered again, in order.
    /// While an event waits no command is taken, so that a stuck sink ends in [`Overloaded`].
    fn offer(&mut self, event: Event) -> Result<(), Event>;
}

impl EventSink for Sender<Event> {
    fn offer(&mut self, event: Event) -> Result<(), Event> {
        match self.try_send(event) {
            Err(TrySendError::Full(event)) => Err(event),
            // Nobody listens any more: the node is on its way out.
            Ok(()) | Err(TrySendError::Disconnected(_)) => Ok(()),
        }
    }
}

/// A function that always has room, such as one that sends into an unbounded channel.
impl<F: FnMut(Event) + Send + 'static> EventSink for F {
    fn offer(&mut self, event: Event) -> Result<(), Event> {
        self(event);
        Ok(())
    }
}

/// The command was not taken. Half of the queue is kept for transfers that have begun, so a node
/// that answers "busy" to a refused `Receive` or `Expect` finds room for the rest.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("the transfer queue is full ({queued} commands wait)")]
pub struct Overloaded {
    pub queued: usize,
}

/// Why transfers could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("{field} = {value:?}: {allowed}")]
    Config { field: &'static str, value: String, allowed: String },
    #[error("cannot listen for control messages on {address}: {reason}")]
    ControlBind { address: SocketAddr, reason: String },
    #[error("cannot listen for KV on {address}: {source}")]
    DataBind { address: SocketAddr, source: io::Error },
    #[error("cannot start thread {name}: {source}")]
    Thread { name: String, source: io::Error },
}

/// These threads did not end in time and were left behind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("still running after the deadline: {}", threads.join(", "))]
pub struct ShutdownError {
    pub threads: Vec<String>,
}

/// All transfers of one node. Dropping it shuts it down as [`Transfers::shutdown`] does.
pub struct Transfers {
    control_endpoint: String,
    data_endpoint: String,
    commands: Sender<Command>,
    limits: TransferLimits,
    metrics: Arc<MetricsStore>,
    running: Mutex<Option<Running>>,
    unfinished: Arc<Mutex<Vec<String>>>,
}

/// What a shutdown ends.
struct Running {
    listener: Listener,
    driver: Threads,
    /// Its end stops the driver.
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
        let keys = Keys::derive(&config.secret);
        let limits = config.limits;
        let (command_sender, commands) = bounded(limits.commands_max);
        let (control_sender, messages) = bounded(CONTROL_QUEUE_MAX);
        let (data_sender, data) = bounded(DATA_EVENTS_MAX);
        let (failure_sender, failures) = bounded(limits.pairs_max);
        let (stop, stopped) = bounded(0);
        let metrics = Arc::new(MetricsStore::default());
        let resolver = Resolver::system();
        let block_bytes = arena.block_bytes();
        let channels = arena.peer_channels();
        let offers = offers(&config, &arena, channels.as_deref());
        let connections = DataConnections::start(
            config.data_bind,
            config.epoch,
            keys.clone(),
            arena,
            channels,
            // While a connection is replaced the one before may still be ending.
            2 * limits.pairs_max,
            data_sender,
            resolver.clone(),
            Arc::clone(&metrics.data),
            offers.iter().filter_map(|offer| TransferKind::offered(offer)).collect(),
            config.transport,
        )
        .map_err(|source| StartError::DataBind { address: config.data_bind, source })?;
        let data_endpoint = endpoint(&config.advertise_host, connections.address().port());
        let context = zmq::Context::new();
        let listener = Listener::start(
            &context,
            config.control_bind,
            keys.clone(),
            config.epoch,
            control_sender,
            Arc::clone(&metrics.messages),
        )?;
        let control_endpoint = endpoint(&config.advertise_host, listener.port());
        let source = Source { node_id: config.node_id.clone(), epoch: config.epoch };
        let core = Core::new(Local {
            node_id: config.node_id,
            epoch: config.epoch,
            identity: config.identity,
            control_endpoint: control_endpoint.clone(),
            data_endpoint: data_endpoint.clone(),
            transports: offers,
            integrity: vec![INTEGRITY.to_owned()],
            block_bytes,
            limits,
        });
        let unfinished = Arc::default();
        let links = OutboundQueues {
            postbox: Postbox {
                context,
                signer: Signer::new(keys.clone(), source),
                keys,
                resolver,
                counters: Arc::clone(&metrics.messages),
                failures: failure_sender,
                monitors: Arc::default(),
            },
            queues: BTreeMap::new(),
            senders: Threads::default(),
        };
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
            .spawn(name, move || driver.run(SHUTDOWN_MAX))
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

    /// Hands a command to the driver. Never waits.
    pub fn command(&self, command: Command) -> Result<(), Overloaded> {
        let queued = self.commands.len();
        if queued >= self.limits.queued_max(&command) {
            return Err(Overloaded { queued });
        }
        self.commands.try_send(command).map_err(|_| Overloaded { queued })
    }

    /// `tcp://host:port` for the node's record: the advertised host and the port really bound.
    pub fn control_endpoint(&self) -> &str {
        &self.control_endpoint
    }

    /// Where peers send KV. They learn it from greetings.
    pub fn data_endpoint(&self) -> &str {
        &self.data_endpoint
    }

    /// Counters since start and what goes on now; after a shutdown, the last ones. Never waits.
    pub fn metrics(&self) -> TransferMetrics {
        self.metrics.read()
    }

    /// The same, for whoever must not keep the transfers alive.
    pub fn metrics_reader(&self) -> MetricsReader {
        self.metrics.reader()
    }

    /// Aborts what is under way (each transfer still gets its final event), closes every socket and
    /// joins every thread. Takes at most 3 s and a moment. A second call finds nothing to do.
    pub fn shutdown(&self) -> Result<(), ShutdownError> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Running { listener, driver, stop }) = running else { return Ok(()) };
        drop(stop);
        let deadline = Instant::now() + SHUTDOWN_MAX + SHUTDOWN_SLACK;
        let mut threads = driver.join_all(deadline);
        threads.append(&mut self.unfinished.lock().unwrap_or_else(PoisonError::into_inner));
        threads.extend(listener.shutdown(deadline));
        if threads.is_empty() { Ok(()) } else { Err(ShutdownError { threads }) }
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        if let Err(error) = self.shutdown() {
            tracing::error!(%error, "transfers did not end cleanly");
        }
    }
}

/// What this node can do beside `tcp`, as far as it is wanted.
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
        // Loading takes long: where nothing else will do it is not put off to the first request.
        let opened = match config.transport.choice {
            TransportChoice::Only(TransferKind::Nccl) => channels.open().inspect(|()| {
                if let Err(reason) = channels.prepare() {
                    tracing::warn!(reason, "nccl is loaded when the first peer is met");
                }
            }),
            TransportChoice::Auto | TransportChoice::Only(_) => Ok(()),
        };
        match opened {
            Ok(()) => can.push(TransferKind::Nccl),
            Err(reason) => tracing::warn!(wanted = "nccl", reason, "KV goes by tcp"),
        }
    }
    transfer_kind::offers(config.transport.choice, &can, transfer_kind::host().as_deref())
}

/// The integrity method: for a chunk by `tcp` xxh3-64 over its bytes, by `ipc` and `nccl` the digest of its
/// blocks (`kernels::digest`). Another name for whatever is computed otherwise.
const INTEGRITY: &str = "xxh3+digest1";

fn endpoint(host: &str, port: u16) -> String {
    // An IPv6 address wants brackets, unless it has them.
    if host.contains(':') && !host.starts_with('[') {
        format!("tcp://[{host}]:{port}")
    } else {
        format!("tcp://{host}:{port}")
    }
}

/// What peers would refuse is refused here, with the field's name.
fn check(config: &TransferConfig) -> Result<(), StartError> {
    /// As long as names may be in control messages, less room for `tcp://` and a port.
    const NAME_BYTES_MAX: usize = 200;
    let names = [
        ("node_id", &config.node_id),
        ("advertise_host", &config.advertise_host),
        ("identity.kv_layout", &config.identity.kv_layout),
        ("identity.dtype", &config.identity.dtype),
    ];
    for (field, name) in names {
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            let allowed = format!("1 to {NAME_BYTES_MAX} bytes");
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
