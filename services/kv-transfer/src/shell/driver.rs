//! The driver thread: owns the protocol, the clock, the transport and the ways out.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, never, select};

use super::{
    EventSink,
    outbound::{Outbound, Postbox},
};
use crate::{
    api::{Command, ConnectGuard, Epoch, Event},
    config::CONNECT_TIMEOUT,
    control::VerifiedMessage,
    metrics::MetricsStore,
    protocol::{Action, Core, DataEvent},
    threads::Threads,
    transfer_kind::TransferKind,
    transport::{Released, Transport, TransportEvent},
};

/// The longest sleep, so that no error in a deadline is for ever.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// How soon it is seen that two nodes have met.
const CONNECTING_POLL: Duration = Duration::from_millis(5);
/// Meetings that somebody waits for: further ones are answered at once.
const CONNECTING_MAX: usize = 256;
/// How soon an event that found no room is offered again.
const OFFER_AGAIN: Duration = Duration::from_millis(5);
/// Inputs taken before deadlines are looked at. A process that slept takes first what came while it
/// did, so that it does not give up peers whose heartbeats are waiting.
const BATCH: usize = 256;
/// How long transfers may take to end when the node stops.
const FAREWELL: Duration = Duration::from_secs(1);

/// Where the driver's inputs come from. The end of `stop` ends it, as does that of `control messages`.
pub struct Inputs {
    pub commands: Receiver<Command>,
    pub messages: Receiver<VerifiedMessage>,
    pub data: Receiver<TransportEvent>,
    pub failures: Receiver<(Epoch, String)>,
    pub stop: Receiver<()>,
}

pub struct Driver<S> {
    pub core: Core,
    pub transport: Box<dyn Transport>,
    pub metrics: Arc<MetricsStore>,
    pub postbox: Postbox,
    pub sink: S,
    pub inputs: Inputs,
    /// The threads that would not end, when the driver has.
    pub unfinished: Arc<Mutex<Vec<String>>>,
    pub outbound: BTreeMap<Epoch, Outbound>,
    pub senders: Threads,
    /// Events that found no room.
    pub waiting: VecDeque<Event>,
    /// With whom, and for how long at most.
    pub connecting: Vec<(Epoch, Instant, ConnectGuard)>,
}

enum Input {
    Command(Command),
    ControlMessage(Box<VerifiedMessage>),
    Data(TransportEvent),
    Failure(Epoch, String),
    ListenerEnded,
    Stop,
    Nothing,
}

impl<S: EventSink> Driver<S> {
    /// Until `stop` or the listener ends; then everything under way is ended too, and the sink is
    /// dropped. `shutdown_max` bounds that.
    pub fn run(mut self, shutdown_max: Duration) {
        let reason = loop {
            if let Turned::Stopped { reason } = self.turn(SLEEP_MAX) {
                break reason;
            }
        };
        let stopped = Instant::now();
        self.core.abort_all(stopped, reason);
        self.act();
        while self.core.active_count() > 0 && stopped.elapsed() < FAREWELL {
            self.inputs.stop = never();
            self.turn(OFFER_AGAIN);
        }
        self.metrics.publish(&self.core);
        // Dropping the queues lets the last control messages leave and ends their threads.
        self.outbound.clear();
        let deadline = stopped + shutdown_max;
        let Self { mut transport, senders, inputs, unfinished, .. } = self;
        // Data threads that wait for room in this channel must find out that nobody listens.
        drop(inputs);
        let mut threads = transport.shutdown(deadline);
        threads.extend(senders.join_all(deadline));
        *unfinished.lock().unwrap_or_else(PoisonError::into_inner) = threads;
    }

    /// Takes what has come, does what is due, and what follows from both.
    fn turn(&mut self, sleep_max: Duration) -> Turned {
        let mut now = Instant::now();
        let mut sleep = self
            .core
            .next_deadline(now)
            .map_or(sleep_max, |at| at.saturating_duration_since(now).min(sleep_max));
        if !self.waiting.is_empty() {
            sleep = sleep.min(OFFER_AGAIN);
        }
        if !self.connecting.is_empty() {
            sleep = sleep.min(CONNECTING_POLL);
        }
        for _ in 0..BATCH {
            let input = self.next_input(sleep);
            now = Instant::now();
            sleep = Duration::ZERO;
            match input {
                Input::Command(command) => {
                    if let Command::Connect { peer, guard: Some(guard), .. } = &command
                        && self.connecting.len() < CONNECTING_MAX
                    {
                        self.connecting.push((
                            peer.epoch,
                            now + CONNECT_TIMEOUT,
                            Arc::clone(guard),
                        ));
                    }
                    self.core.handle_command(now, command);
                }
                Input::ControlMessage(opened) => {
                    self.core.handle_control(now, &opened.from, opened.message);
                }
                Input::Data(TransportEvent::Data(event)) => self.core.handle_data(now, event),
                Input::Data(TransportEvent::Closed { peer, connection, reason }) => {
                    if self.transport.is_present(peer, connection) {
                        self.core.handle_data(now, DataEvent::Closed { peer, reason });
                    }
                }
                Input::Failure(peer, reason) => self.core.handle_peer_failed(now, peer, &reason),
                Input::ListenerEnded => {
                    // Deaf to its peers the node would fail every transfer and still look whole.
                    tracing::error!("transfers end: nothing listens for messages any more");
                    self.inputs.messages = never();
                    return Turned::Stopped { reason: "the message listener has ended" };
                }
                Input::Stop => return Turned::Stopped { reason: "the node stops" },
                Input::Nothing => break,
            }
            self.act();
        }
        if self.core.next_deadline(now).is_some_and(|at| at <= now) {
            self.core.on_deadline(now);
            self.act();
        }
        self.connecting.retain(|(peer, until, _)| {
            now < *until
                && self.core.is_connecting(now, *peer)
                && !self.metrics.data.is_connected(*peer)
        });
        self.metrics.publish(&self.core);
        self.offer();
        Turned::Running
    }

    fn next_input(&self, sleep: Duration) -> Input {
        let closed = never();
        // While the node does not take its events it gets no more of them.
        let commands = if self.waiting.is_empty() { &self.inputs.commands } else { &closed };
        select! {
            recv(self.inputs.messages) -> message => {
                message.map_or(Input::ListenerEnded, |opened| Input::ControlMessage(Box::new(opened)))
            }
            recv(self.inputs.data) -> event => event.map_or(Input::Nothing, Input::Data),
            recv(self.inputs.failures) -> failure => {
                failure.map_or(Input::Nothing, |(peer, reason)| Input::Failure(peer, reason))
            }
            recv(commands) -> command => command.map_or(Input::Nothing, Input::Command),
            recv(self.inputs.stop) -> _ => Input::Stop,
            default(sleep) => Input::Nothing,
        }
    }

    fn act(&mut self) {
        while let Some(action) = self.core.poll_action() {
            let now = Instant::now();
            match action {
                Action::Connect { peer } => {
                    self.transport.admit(peer.epoch);
                    match Outbound::start(&self.postbox, &peer, &self.senders) {
                        Ok(outbound) => {
                            self.outbound.insert(peer.epoch, outbound);
                        }
                        Err(error) => {
                            let reason = format!("no thread for its messages: {error}");
                            self.core.handle_peer_failed(now, peer.epoch, &reason);
                        }
                    }
                }
                Action::Disconnect { peer } => {
                    self.outbound.remove(&peer);
                    self.transport.dismiss(peer);
                }
                Action::SendControl { peer, message } => {
                    if let Some(outbound) = self.outbound.get(&peer)
                        && let Err(error) = outbound.send(message)
                    {
                        self.core.handle_peer_failed(now, peer, &error.to_string());
                    }
                }
                Action::CloseData { peer } => self.transport.close(peer),
                Action::OpenData { peer, endpoint, transports } => {
                    // Only what we offered is agreed on.
                    let kinds = transports.iter().filter_map(|name| TransferKind::offered(name));
                    self.transport.open(peer, &endpoint, kinds.collect());
                }
                Action::PostReceive { peer, transfer, chunk, blocks } => {
                    if let Err(error) = self.transport.post(peer, transfer, chunk, &blocks) {
                        let reason = error.to_string();
                        self.core.handle_data(now, DataEvent::Failed { transfer, reason });
                    }
                }
                Action::SendChunk { peer, transfer, chunk, blocks } => {
                    if let Err(error) = self.transport.send(peer, transfer, chunk, &blocks) {
                        let reason = error.to_string();
                        self.core.handle_data(now, DataEvent::Failed { transfer, reason });
                    }
                }
                Action::CancelReceive { peer, transfer } => {
                    if self.transport.cancel_receive(peer, transfer) == Released::Now {
                        self.core.handle_data(now, DataEvent::ReceiveReleased { transfer });
                    }
                }
                Action::CancelSend { peer, transfer } => {
                    if self.transport.cancel_send(peer, transfer) == Released::Now {
                        self.core.handle_data(now, DataEvent::SendReleased { transfer });
                    }
                }
                Action::Emit(event) => {
                    // Whoever acts on the event finds it counted.
                    self.metrics.publish(&self.core);
                    self.waiting.push_back(event);
                    self.offer();
                }
            }
        }
    }

    fn offer(&mut self) {
        while let Some(event) = self.waiting.pop_front() {
            if let Err(event) = self.sink.offer(event) {
                self.waiting.push_front(event);
                break;
            }
        }
    }
}

enum Turned {
    Running,
    Stopped { reason: &'static str },
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::{RecvTimeoutError, unbounded};
    use kernels::{Dtype, KvArena, KvLayout};

    use super::super::{SHUTDOWN_MAX, Transfers};
    use crate::{
        ClusterSecret, TransferConfig, TransferLimits, TransportConfig,
        api::{Epoch, Identity},
        control::{PROTOCOL_MAX, PROTOCOL_MIN},
    };
    use std::time::Instant;

    #[test]
    fn transfers_end_with_their_listener() {
        let layout = KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 16, dtype: Dtype::F32 };
        let config = TransferConfig {
            node_id: "node".to_owned(),
            epoch: Epoch(1),
            identity: Identity {
                model_fingerprint: 1,
                weight_version: 1,
                kv_layout: layout.to_string(),
                block_size: 16,
                dtype: "f32".to_owned(),
                tp: 1,
                protocol_min: PROTOCOL_MIN,
                protocol_max: PROTOCOL_MAX,
            },
            secret: ClusterSecret::new("the secret of this test").unwrap(),
            control_bind: "127.0.0.1:0".parse().unwrap(),
            data_bind: "127.0.0.1:0".parse().unwrap(),
            advertise_host: "127.0.0.1".to_owned(),
            limits: TransferLimits::default(),
            transport: TransportConfig::default(),
        };
        let (sink, events) = unbounded();
        let transfers = Transfers::start(config, KvArena::host(layout, 1).unwrap(), sink).unwrap();

        let deadline = Instant::now() + 2 * SHUTDOWN_MAX;
        let stuck = {
            let running = transfers.running.lock().unwrap();
            running.as_ref().unwrap().listener.shutdown(deadline)
        };
        assert!(stuck.is_empty(), "{stuck:?}");
        // Whoever waits for events learns that none will come.
        assert_eq!(events.recv_deadline(deadline), Err(RecvTimeoutError::Disconnected));
        transfers.shutdown().unwrap();
    }
}
