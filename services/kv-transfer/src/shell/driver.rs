//! The driver thread: owns the protocol core, the clock, the transport and the outbound queues.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, never, select};

use super::outbound::OutboundQueues;
use crate::{
    api::{Command, ConnectGuard, Epoch},
    config::CONNECT_TIMEOUT,
    driver::{EventSink, Input, TransferDriver},
    metrics::Metrics,
    threads::locked,
    transport::{Transport, TransportEvent},
};

/// Longest sleep; bounds the effect of a wrong deadline.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// Poll interval while a connect guard is held.
const CONNECTING_POLL: Duration = Duration::from_millis(5);
/// Connect guards held at a time. Further ones are dropped at once.
const CONNECTING_MAX: usize = 256;
/// Interval at which a rejected event is offered again.
const OFFER_RETRY: Duration = Duration::from_millis(5);
/// Inputs handled before deadlines are checked. A process that was suspended must first handle
/// queued heartbeats, or it would drop live peers.
const BATCH: usize = 256;
/// Time for transfers to finish when the node stops.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);

/// Inputs of the driver. It stops when `stop` or `messages` is disconnected.
pub(super) struct Inputs {
    pub commands: Receiver<Command>,
    /// Verified control messages.
    pub messages: Receiver<Input>,
    pub data: Receiver<TransportEvent>,
    /// Unreachable peers.
    pub failures: Receiver<Input>,
    pub stop: Receiver<()>,
}

/// A thread that runs the [`TransferDriver`] with a clock and bounded queues.
pub(super) struct DriverThread<T, S> {
    pub driver: TransferDriver<T, OutboundQueues>,
    pub metrics: Arc<Metrics>,
    pub sink: S,
    pub inputs: Inputs,
    /// Set when the driver has stopped: threads still running.
    pub unfinished: Arc<Mutex<Vec<String>>>,
    /// Connect guards by peer, with their time-out.
    pub connecting: Vec<(Epoch, Instant, ConnectGuard)>,
}

impl<T: Transport, S: EventSink> DriverThread<T, S> {
    /// Runs until `stop` or the listener ends. Then aborts all transfers, shuts down the transport
    /// within `shutdown_max`, and drops the sink.
    pub(super) fn run(mut self, shutdown_max: Duration) {
        let reason = loop {
            if let Some(reason) = self.drive(SLEEP_MAX) {
                break reason;
            }
        };
        let stopped = Instant::now();
        self.driver.abort_all(stopped, reason);
        self.offer_events();
        while self.driver.core.active_count() > 0 && stopped.elapsed() < ABORT_TIMEOUT {
            self.inputs.stop = never();
            self.drive(OFFER_RETRY);
        }
        self.metrics.publish(&self.driver.core);
        // Dropping the queues lets the last control messages leave and stops their threads.
        self.driver.links.queues.clear();
        let deadline = stopped + shutdown_max;
        let Self { driver, inputs, unfinished, .. } = self;
        let TransferDriver { mut transport, links, .. } = driver;
        // Data threads that block on this channel must see it disconnected.
        drop(inputs);
        let mut threads = transport.shutdown(deadline);
        threads.extend(links.senders.join_all(deadline));
        *locked(&unfinished) = threads;
    }

    /// Handles queued inputs and due deadlines, and executes the resulting actions. Returns the
    /// reason if the driver must stop.
    fn drive(&mut self, sleep_max: Duration) -> Option<&'static str> {
        let mut now = Instant::now();
        let mut sleep = self
            .driver
            .next_deadline(now)
            .map_or(sleep_max, |at| at.saturating_duration_since(now).min(sleep_max));
        if !self.driver.takes_commands() {
            sleep = sleep.min(OFFER_RETRY);
        }
        if !self.connecting.is_empty() {
            sleep = sleep.min(CONNECTING_POLL);
        }
        for _ in 0..BATCH {
            let input = match self.next_input(sleep) {
                Ok(input) => input,
                Err(reason) => return Some(reason),
            };
            now = Instant::now();
            sleep = Duration::ZERO;
            let Some(input) = input else { break };
            self.guard_connecting(now, &input);
            self.driver.handle(now, input);
            self.offer_events();
        }
        self.driver.handle_deadline(now);
        let core = &self.driver.core;
        self.connecting.retain(|(peer, until, _)| {
            now < *until && core.is_connecting(now, *peer) && !self.metrics.is_connected(*peer)
        });
        self.metrics.publish(&self.driver.core);
        self.driver.offer_events(&mut self.sink);
        None
    }

    /// Keeps the guard of a caller that waits for a connection.
    fn guard_connecting(&mut self, now: Instant, input: &Input) {
        if let Input::Command(Command::Connect { peer, guard: Some(guard), .. }) = input
            && self.connecting.len() < CONNECTING_MAX
        {
            self.connecting.push((peer.epoch, now + CONNECT_TIMEOUT, Arc::clone(guard)));
        }
    }

    /// Waits for the next input; returns `None` after `sleep`. Fails with the reason if the driver
    /// must stop.
    fn next_input(&mut self, sleep: Duration) -> Result<Option<Input>, &'static str> {
        let closed = never();
        let commands = if self.driver.takes_commands() { &self.inputs.commands } else { &closed };
        select! {
            recv(self.inputs.messages) -> message => match message {
                Ok(message) => Ok(Some(message)),
                Err(_) => {
                    // Without a listener every transfer would fail while the node looks healthy.
                    tracing::error!("stopping transfers: the control listener has stopped");
                    self.inputs.messages = never();
                    Err("the control listener has stopped")
                }
            },
            recv(self.inputs.data) -> event => Ok(event.ok().map(Input::Transport)),
            recv(self.inputs.failures) -> failure => Ok(failure.ok()),
            recv(commands) -> command => Ok(command.ok().map(Input::Command)),
            recv(self.inputs.stop) -> _ => Err("the node is shutting down"),
            default(sleep) => Ok(None),
        }
    }

    /// Offers events to the node. The metrics are published before, so the node finds an event
    /// counted when it handles the event.
    fn offer_events(&mut self) {
        if !self.driver.takes_commands() {
            self.metrics.publish(&self.driver.core);
            self.driver.offer_events(&mut self.sink);
        }
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::{RecvTimeoutError, unbounded};
    use kernels::{KvArena, KvFormat, KvLayout};

    use super::super::{SHUTDOWN_TIMEOUT, Transfers};
    use crate::{
        ClusterSecret, TransferConfig, TransferLimits, TransportConfig,
        api::{Epoch, Identity},
        control::{PROTOCOL_MAX, PROTOCOL_MIN},
    };
    use std::time::Instant;

    #[test]
    fn transfers_stop_with_their_listener() {
        let layout =
            KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 16, format: KvFormat::F32 };
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
            host: None,
            tls: None,
        };
        let (sink, events) = unbounded();
        let transfers = Transfers::start(config, KvArena::host(layout, 1).unwrap(), sink).unwrap();

        let deadline = Instant::now() + 2 * SHUTDOWN_TIMEOUT;
        let stuck = {
            let running = transfers.running.lock().unwrap();
            running.as_ref().unwrap().listener.shutdown(deadline)
        };
        assert!(stuck.is_empty(), "{stuck:?}");
        // The disconnected channel tells the node that no event will follow.
        assert_eq!(events.recv_deadline(deadline), Err(RecvTimeoutError::Disconnected));
        transfers.shutdown().unwrap();
    }
}
