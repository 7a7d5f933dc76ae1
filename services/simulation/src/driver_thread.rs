//! The driver thread of a node's transfers: the real protocol core, and the simulated transport.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use engine::executor::sim::SimArena;
use kv_transfer::{
    api::{Command, Epoch, TransferId},
    control::{ControlMessage, Source},
    protocol::{Action, Core, DataEvent, Local},
};

use crate::{process::Output, transport::SimTransport};

pub struct DriverThread {
    pub core: Core,
    pub transport: SimTransport,
    /// Peers that may connect for data.
    admitted: BTreeSet<Epoch>,
    /// How often connections with each peer were closed here: reports of the ones before are of the
    /// past.
    closings: BTreeMap<Epoch, u64>,
}

impl DriverThread {
    pub fn start(local: Local, arena: SimArena) -> Self {
        Self {
            transport: SimTransport::new(local.node_id.clone(), arena),
            core: Core::new(local),
            admitted: BTreeSet::new(),
            closings: BTreeMap::new(),
        }
    }

    /// Whether the peer may connect for data.
    pub fn admits(&self, peer: Epoch) -> bool {
        self.admitted.contains(&peer)
    }

    pub fn closings(&self, peer: Epoch) -> u64 {
        self.closings.get(&peer).copied().unwrap_or(0)
    }

    /// The KV that the transfer must bring or take.
    pub fn expect_prompt(&mut self, transfer: TransferId, prompt: Vec<u64>) {
        self.transport.expect_prompt(transfer, prompt);
    }

    pub fn on_command(&mut self, now: Instant, command: Command, outputs: &mut Vec<Output>) {
        self.transport.on_command(&command);
        self.core.handle_command(now, command);
        self.act(outputs);
    }

    pub fn on_control(
        &mut self,
        now: Instant,
        from: &Source,
        message: ControlMessage,
        outputs: &mut Vec<Output>,
    ) {
        self.core.handle_control(now, from, message);
        self.act(outputs);
    }

    pub fn on_data(&mut self, now: Instant, event: DataEvent, outputs: &mut Vec<Output>) {
        self.core.handle_data(now, event);
        self.act(outputs);
    }

    pub fn on_peer_failed(
        &mut self,
        now: Instant,
        peer: Epoch,
        reason: &str,
        outputs: &mut Vec<Output>,
    ) {
        self.core.handle_peer_failed(now, peer, reason);
        self.act(outputs);
    }

    /// A data connection has ended: news, unless it was closed here meanwhile.
    pub fn on_closed(
        &mut self,
        now: Instant,
        peer: Epoch,
        closings: u64,
        reason: &str,
        outputs: &mut Vec<Output>,
    ) {
        if closings == self.closings(peer) {
            let reason = reason.to_owned();
            self.on_data(now, DataEvent::Closed { peer, reason }, outputs);
        }
    }

    pub fn wake(&mut self, now: Instant, outputs: &mut Vec<Output>) {
        if self.core.next_deadline(now).is_some_and(|at| at <= now) {
            self.core.on_deadline(now);
            self.act(outputs);
        }
    }

    /// Ends what is under way, as a shutdown does.
    pub fn stop(&mut self, now: Instant, outputs: &mut Vec<Output>) {
        self.core.abort_all(now, "the node stops");
        self.act(outputs);
    }

    fn act(&mut self, outputs: &mut Vec<Output>) {
        while let Some(action) = self.core.poll_action() {
            match action {
                Action::Connect { peer } => {
                    self.admitted.insert(peer.epoch);
                }
                Action::Disconnect { peer } => {
                    self.admitted.remove(&peer);
                    self.close_data(peer, outputs);
                }
                Action::CloseData { peer } => self.close_data(peer, outputs),
                Action::SendControl { peer, message } => {
                    outputs.push(Output::ControlMessage { to: peer, message });
                }
                Action::OpenData { peer, .. } => outputs.push(Output::OpenData { to: peer }),
                Action::PostReceive { transfer, chunk, blocks, .. } => {
                    self.transport.post(transfer, chunk, blocks);
                }
                Action::SendChunk { peer, transfer, chunk, blocks } => {
                    self.transport.send(peer, transfer, chunk, blocks);
                    outputs.push(Output::SendChunk { transfer, chunk });
                }
                Action::CancelReceive { transfer, .. } => {
                    self.transport.cancel_receive(transfer);
                    outputs.push(Output::Release { is_receive: true, transfer });
                }
                Action::CancelSend { transfer, .. } => {
                    self.transport.cancel_send(transfer);
                    outputs.push(Output::Release { is_receive: false, transfer });
                }
                Action::Emit(event) => {
                    self.transport.on_event(&event);
                    outputs.push(Output::ToEngine(event));
                }
            }
        }
    }

    fn close_data(&mut self, peer: Epoch, outputs: &mut Vec<Output>) {
        *self.closings.entry(peer).or_default() += 1;
        outputs.push(Output::CloseData { peer });
    }

    /// Nothing may be left of any transfer.
    pub fn check_idle(&self, name: &str) {
        assert_eq!(self.core.active_count(), 0, "{name}: transfers are active");
        let (transfers, early, _) = self.core.table_sizes();
        assert_eq!((transfers, early), (0, 0), "{name}: transfers are known");
        self.transport.check_idle();
    }
}
