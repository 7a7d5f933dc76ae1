//! Performs the actions of the protocol core, without clock, socket or thread.
//!
//! A [`TransferDriver`] joins the core to its two seams: [`Transport`] moves the blocks, and
//! [`ControlLinks`] carries the control messages. Inputs and `now` go in, events for the node come
//! out. The driver thread (`shell`) runs it over sockets, and the simulation runs it over a
//! simulated network.
//!
//! Rules of the driver:
//! * A peer whose queue of control messages is full, or cannot be opened, has failed.
//! * A chunk that the transport rejects fails its transfer.
//! * The end of a connection that was closed or replaced meanwhile is ignored.
//! * While the node does not take its events, the driver takes none of its commands.

use std::{collections::VecDeque, time::Instant};

use crate::{
    api::{Command, Epoch, Event, Peer, PeerAddress, TransferId},
    control::ControlMessage,
    protocol::{Action, Core, DataEvent},
    transfer_kind::TransferKind,
    transport::{ChunkId, DataError, Released, Transport, TransportEvent},
};

/// The outbound queues of control messages, one per peer.
pub trait ControlLinks {
    /// Opens the queue to this peer.
    fn open(&mut self, peer: &PeerAddress) -> Result<(), String>;

    /// Queues a message. Drops it if the peer has no open queue; fails if the queue is full.
    fn send(&mut self, peer: Epoch, message: ControlMessage) -> Result<(), String>;

    /// Closes the queue. Messages in the queue may still be sent.
    fn close(&mut self, peer: Epoch);
}

/// Consumer of events. Called on the driver thread; must not block.
pub trait EventSink: Send + 'static {
    /// Takes the event, or returns it if the sink is full. The driver offers it again, in order,
    /// and accepts no commands meanwhile, so a blocked sink leads to
    /// [`Overloaded`](crate::Overloaded).
    fn offer(&mut self, event: Event) -> Result<(), Event>;
}

/// A function that always accepts, such as one that sends to an unbounded channel.
impl<F: FnMut(Event) + Send + 'static> EventSink for F {
    fn offer(&mut self, event: Event) -> Result<(), Event> {
        self(event);
        Ok(())
    }
}

#[derive(Clone, Debug)]
pub enum Input {
    /// A command of the node.
    Command(Command),
    /// A verified control message.
    Control { from: Peer, message: Box<ControlMessage> },
    /// An event of the transport.
    Transport(TransportEvent),
    /// The peer cannot be reached.
    PeerFailed { peer: Epoch, reason: String },
}

pub struct TransferDriver<T, C> {
    pub core: Core,
    pub transport: T,
    pub links: C,
    /// Events that the node has not taken yet.
    events: VecDeque<Event>,
}

impl<T: Transport, C: ControlLinks> TransferDriver<T, C> {
    pub fn new(core: Core, transport: T, links: C) -> Self {
        Self { core, transport, links, events: VecDeque::new() }
    }

    pub fn handle(&mut self, now: Instant, input: Input) {
        match input {
            Input::Command(command) => self.core.handle_command(now, command),
            Input::Control { from, message } => self.core.handle_control(now, &from, *message),
            Input::Transport(TransportEvent::Data(event)) => self.core.handle_data(now, event),
            Input::Transport(TransportEvent::Closed { peer, connection, reason }) => {
                if self.transport.is_present(peer, connection) {
                    self.core.handle_peer_failed(now, peer, &reason);
                }
            }
            Input::PeerFailed { peer, reason } => self.core.handle_peer_failed(now, peer, &reason),
        }
        self.act(now);
    }

    /// Handles due deadlines. Must be called at [`next_deadline`](Self::next_deadline).
    pub fn handle_deadline(&mut self, now: Instant) {
        if self.core.next_deadline(now).is_some_and(|at| at <= now) {
            self.core.on_deadline(now);
            self.act(now);
        }
    }

    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        self.core.next_deadline(now)
    }

    /// Aborts every transfer. Each of them still gets its final event.
    pub fn abort_all(&mut self, now: Instant, reason: &str) {
        self.core.abort_all(now, reason);
        self.act(now);
    }

    /// Offers events to the node, in order, until its queue is full.
    pub fn offer_events(&mut self, sink: &mut impl EventSink) {
        while let Some(event) = self.events.pop_front() {
            if let Err(event) = sink.offer(event) {
                return self.events.push_front(event);
            }
        }
    }

    /// Returns the events that the node has not taken yet.
    pub fn events(&self) -> impl Iterator<Item = &Event> {
        self.events.iter()
    }

    /// Returns whether [`Input::Command`] may be handled now.
    pub fn takes_commands(&self) -> bool {
        self.events.is_empty()
    }

    fn act(&mut self, now: Instant) {
        while let Some(action) = self.core.poll_action() {
            match action {
                Action::Connect { peer } => {
                    self.transport.admit(peer.epoch);
                    let opened = self.links.open(&peer);
                    self.fail_peer(now, peer.epoch, opened);
                }
                Action::Disconnect { peer } => {
                    self.links.close(peer);
                    self.transport.dismiss(peer);
                }
                Action::SendControl { peer, message } => {
                    let sent = self.links.send(peer, message);
                    self.fail_peer(now, peer, sent);
                }
                Action::CloseData { peer } => {
                    self.transport.dismiss(peer);
                    self.transport.admit(peer);
                }
                Action::OpenData { peer, endpoint, transports } => {
                    // The peers agree on transports that this node has offered.
                    let kinds = transports.iter().filter_map(|name| TransferKind::from_offer(name));
                    let mut kinds: Vec<_> = kinds.collect();
                    // Two peers on one host may agree on `nccl` twice: within the host and between
                    // hosts.
                    kinds.dedup();
                    self.transport.open(peer, &endpoint, kinds);
                }
                Action::PostReceive { peer, transfer, chunk, blocks } => {
                    let chunk = ChunkId { transfer, index: chunk };
                    let posted = self.transport.post(peer, chunk, &blocks);
                    self.fail_transfer(now, transfer, posted);
                }
                Action::SendChunk { peer, transfer, chunk, blocks } => {
                    let chunk = ChunkId { transfer, index: chunk };
                    let sent = self.transport.send(peer, chunk, &blocks);
                    self.fail_transfer(now, transfer, sent);
                }
                Action::Cancel { peer, transfer } => {
                    if self.transport.cancel(peer, transfer) == Released::Now {
                        self.core.handle_data(now, DataEvent::Released { transfer });
                    }
                }
                Action::Emit(event) => self.events.push_back(event),
            }
        }
    }

    fn fail_transfer(&mut self, now: Instant, id: TransferId, result: Result<(), DataError>) {
        if let Err(error) = result {
            let event = DataEvent::Failed { transfer: id, reason: error.to_string() };
            self.core.handle_data(now, event);
        }
    }

    fn fail_peer(&mut self, now: Instant, peer: Epoch, result: Result<(), String>) {
        if let Err(reason) = result {
            self.core.handle_peer_failed(now, peer, &reason);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kernels::BlockId;

    use super::*;
    use crate::{
        api::{TransferFailure, TransferId},
        protocol::test_local,
        transport::DataError,
    };

    /// Transport that accepts everything and moves nothing.
    struct IdleTransport;

    impl Transport for IdleTransport {
        fn admit(&mut self, _: Epoch) {}
        fn open(&mut self, _: Epoch, _: &str, _: Vec<TransferKind>) {}
        fn send(&mut self, _: Epoch, _: ChunkId, _: &[BlockId]) -> Result<(), DataError> {
            Ok(())
        }
        fn post(&mut self, _: Epoch, _: ChunkId, _: &[BlockId]) -> Result<(), DataError> {
            Ok(())
        }
        fn cancel(&mut self, _: Epoch, _: TransferId) -> Released {
            Released::Now
        }
        fn dismiss(&mut self, _: Epoch) {}
        fn is_present(&self, _: Epoch, _: u64) -> bool {
            true
        }
        fn shutdown(&mut self, _: Instant) -> Vec<String> {
            Vec::new()
        }
    }

    /// Queues that are full from the start.
    struct FullLinks;

    impl ControlLinks for FullLinks {
        fn open(&mut self, _: &PeerAddress) -> Result<(), String> {
            Ok(())
        }
        fn send(&mut self, _: Epoch, _: ControlMessage) -> Result<(), String> {
            Err("the queue is full".to_owned())
        }
        fn close(&mut self, _: Epoch) {}
    }

    fn driver() -> TransferDriver<IdleTransport, FullLinks> {
        TransferDriver::new(Core::new(Instant::now(), test_local()), IdleTransport, FullLinks)
    }

    fn expect(transfer: u128) -> Input {
        Input::Command(Command::Send {
            transfer: TransferId(transfer),
            peer: PeerAddress {
                node_id: "peer".to_owned(),
                epoch: Epoch(2),
                control_endpoint: "tcp://peer:1".to_owned(),
            },
            prompt_hash: 0,
            deadline: Duration::from_secs(5),
            traceparent: String::new(),
        })
    }

    #[test]
    fn full_control_queue_fails_the_peer_and_its_transfer() {
        let (mut driver, now) = (driver(), Instant::now());
        driver.handle(now, expect(1));
        let events: Vec<&Event> = driver.events().collect();
        let [Event::SendFailed { transfer: TransferId(1), failure }] = events[..] else {
            panic!("{events:?}");
        };
        let TransferFailure::PeerLost { reason, .. } = failure else { panic!("{failure}") };
        assert!(reason.contains("the queue is full"), "{reason}");
    }

    #[test]
    fn commands_wait_while_the_node_takes_no_event() {
        struct Sink {
            is_full: bool,
        }
        impl EventSink for Sink {
            fn offer(&mut self, event: Event) -> Result<(), Event> {
                if self.is_full { Err(event) } else { Ok(()) }
            }
        }
        let (mut driver, now) = (driver(), Instant::now());
        assert!(driver.takes_commands());
        driver.handle(now, expect(1));
        let mut sink = Sink { is_full: true };
        driver.offer_events(&mut sink);
        assert!(!driver.takes_commands());
        sink.is_full = false;
        driver.offer_events(&mut sink);
        assert!(driver.takes_commands());
    }
}
