//! The driver thread: owns the protocol, the clock, the transport and the ways out.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, Sender, never, select};

use super::{
    EventSink,
    outbound::{Outbound, Postbox},
};
use crate::{
    api::{Command, Epoch, Event},
    metrics::{DataCounters, PeerMetrics, TransferMetrics},
    notice::Opened,
    protocol::{Action, Core, DataEvent},
    threads::Threads,
    transport::{Released, Report, Transport},
};

/// The longest sleep, so that no error in a deadline is for ever.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// How soon an event that found no room is offered again.
const OFFER_AGAIN: Duration = Duration::from_millis(5);
/// Inputs taken before deadlines are looked at. A process that slept takes first what came while it
/// did, so that it does not give up peers whose heartbeats are waiting.
const BATCH: usize = 256;
/// How long transfers may take to end when the node stops.
const FAREWELL: Duration = Duration::from_secs(1);

/// Where the driver's inputs come from. The end of `stop` ends it.
pub struct Inputs {
    pub commands: Receiver<Command>,
    pub notices: Receiver<Opened>,
    pub data: Receiver<Report>,
    pub failures: Receiver<(Epoch, String)>,
    pub metrics: Receiver<Sender<TransferMetrics>>,
    pub stop: Receiver<()>,
}

pub struct Driver<S> {
    pub core: Core,
    pub transport: Box<dyn Transport>,
    pub data_counters: Arc<DataCounters>,
    pub postbox: Postbox,
    pub sink: S,
    pub inputs: Inputs,
    /// The last metrics and the threads that would not end, when the driver has.
    pub outcome: Arc<Mutex<Outcome>>,
    pub outbound: BTreeMap<Epoch, Outbound>,
    pub senders: Threads,
    /// Events that found no room.
    pub waiting: VecDeque<Event>,
}

#[derive(Debug, Default)]
pub struct Outcome {
    pub metrics: TransferMetrics,
    pub unfinished: Vec<String>,
}

enum Input {
    Command(Command),
    Notice(Box<Opened>),
    Data(Report),
    Failure(Epoch, String),
    Metrics(Sender<TransferMetrics>),
    ListenerEnded,
    Stop,
    Nothing,
}

impl<S: EventSink> Driver<S> {
    /// Until `stop` ends; then everything under way is ended too. `join_by` bounds the rest.
    pub fn run(mut self, shutdown_max: Duration) {
        while !matches!(self.turn(SLEEP_MAX), Turned::Stopped) {}
        let stopped = Instant::now();
        self.core.abort_all(stopped, "the node stops");
        self.act();
        while self.core.active_count() > 0 && stopped.elapsed() < FAREWELL {
            self.inputs.stop = never();
            self.turn(OFFER_AGAIN);
        }
        let metrics = self.metrics();
        // Dropping the queues lets the last notices leave and ends their threads.
        self.outbound.clear();
        let deadline = stopped + shutdown_max;
        let Self { mut transport, senders, inputs, outcome, .. } = self;
        // Data threads that wait for room in this channel must find out that nobody listens.
        drop(inputs);
        let mut unfinished = transport.shutdown(deadline);
        unfinished.extend(senders.join_all(deadline));
        *outcome.lock().unwrap_or_else(PoisonError::into_inner) = Outcome { metrics, unfinished };
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
        for _ in 0..BATCH {
            let input = self.next_input(sleep);
            now = Instant::now();
            sleep = Duration::ZERO;
            match input {
                Input::Command(command) => self.core.handle_command(now, command),
                Input::Notice(opened) => {
                    self.core.handle_notice(now, &opened.from, opened.notice);
                }
                Input::Data(Report::Data(event)) => self.core.handle_data(now, event),
                Input::Data(Report::Ended { peer, connection, reason }) => {
                    if self.transport.is_present(peer, connection) {
                        self.core.handle_data(now, DataEvent::Closed { peer, reason });
                    }
                }
                Input::Failure(peer, reason) => self.core.handle_peer_failed(now, peer, &reason),
                Input::Metrics(reply) => {
                    // Whoever asked may have given up.
                    let _ = reply.try_send(self.metrics());
                }
                Input::ListenerEnded => {
                    // It has logged why. Peers fall silent to us, and leases end what they hold.
                    self.inputs.notices = never();
                }
                Input::Stop => return Turned::Stopped,
                Input::Nothing => break,
            }
            self.act();
        }
        if self.core.next_deadline(now).is_some_and(|at| at <= now) {
            self.core.on_deadline(now);
            self.act();
        }
        self.offer();
        Turned::Running
    }

    fn next_input(&self, sleep: Duration) -> Input {
        let closed = never();
        // While the node does not take its events it gets no more of them.
        let commands = if self.waiting.is_empty() { &self.inputs.commands } else { &closed };
        select! {
            recv(self.inputs.notices) -> notice => {
                notice.map_or(Input::ListenerEnded, |opened| Input::Notice(Box::new(opened)))
            }
            recv(self.inputs.data) -> event => event.map_or(Input::Nothing, Input::Data),
            recv(self.inputs.failures) -> failure => {
                failure.map_or(Input::Nothing, |(peer, reason)| Input::Failure(peer, reason))
            }
            recv(commands) -> command => command.map_or(Input::Nothing, Input::Command),
            recv(self.inputs.metrics) -> reply => reply.map_or(Input::Nothing, Input::Metrics),
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
                            let reason = format!("no thread for its notices: {error}");
                            self.core.handle_peer_failed(now, peer.epoch, &reason);
                        }
                    }
                }
                Action::Disconnect { peer } => {
                    self.outbound.remove(&peer);
                    self.transport.dismiss(peer);
                }
                Action::SendNotice { peer, notice } => {
                    if let Some(outbound) = self.outbound.get(&peer)
                        && let Err(error) = outbound.send(notice)
                    {
                        self.core.handle_peer_failed(now, peer, &error.to_string());
                    }
                }
                Action::CloseData { peer } => self.transport.close(peer),
                Action::OpenData { peer, endpoint } => self.transport.open(peer, &endpoint),
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

    fn metrics(&self) -> TransferMetrics {
        let counters = self.core.counters();
        let mut metrics = TransferMetrics {
            notices_resent: counters.notices_resent,
            notices_refused: counters.notices_refused.clone(),
            arrived: counters.arrived,
            receive_failed: counters.receive_failed,
            delivered: counters.delivered,
            send_failed: counters.send_failed,
            transfers_active: self.core.active_count(),
            peers: self
                .core
                .pairs()
                .map(|pair| PeerMetrics {
                    node_id: pair.peer().node_id.clone(),
                    path: pair.transport().to_owned(),
                    transfers_active: pair.transfers().len(),
                })
                .collect(),
            ..TransferMetrics::default()
        };
        self.data_counters.add_to(&mut metrics);
        self.postbox.counters.add_to(&mut metrics);
        metrics
    }
}

enum Turned {
    Running,
    Stopped,
}
