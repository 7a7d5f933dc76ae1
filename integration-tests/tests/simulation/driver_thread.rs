//! The driver thread of a node's transfers: the real protocol core, and the simulated transport.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use engine::executor::sim::SimArena;
use kv_transfer::{
    api::{Command, Epoch, TransferId},
    notice::{Notice, Source},
    protocol::{Action, Core, DataEvent, Local},
};

use crate::{process::Out, wires::Wires};

pub struct DriverThread {
    pub core: Core,
    pub wires: Wires,
    /// Peers that may connect for data.
    admitted: BTreeSet<Epoch>,
    /// How often connections with each peer were closed here: reports of the ones before are of the
    /// past.
    closings: BTreeMap<Epoch, u64>,
}

impl DriverThread {
    pub fn start(local: Local, arena: SimArena) -> Self {
        Self {
            wires: Wires::new(local.node_id.clone(), arena),
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
        self.wires.expect_prompt(transfer, prompt);
    }

    pub fn on_command(&mut self, now: Instant, command: Command, outs: &mut Vec<Out>) {
        self.wires.on_command(&command);
        self.core.handle_command(now, command);
        self.act(outs);
    }

    pub fn on_notice(&mut self, now: Instant, from: &Source, notice: Notice, outs: &mut Vec<Out>) {
        self.core.handle_notice(now, from, notice);
        self.act(outs);
    }

    pub fn on_data(&mut self, now: Instant, event: DataEvent, outs: &mut Vec<Out>) {
        self.core.handle_data(now, event);
        self.act(outs);
    }

    pub fn on_peer_failed(&mut self, now: Instant, peer: Epoch, reason: &str, outs: &mut Vec<Out>) {
        self.core.handle_peer_failed(now, peer, reason);
        self.act(outs);
    }

    /// A data connection has ended: news, unless it was closed here meanwhile.
    pub fn on_closed(
        &mut self,
        now: Instant,
        peer: Epoch,
        closings: u64,
        reason: &str,
        outs: &mut Vec<Out>,
    ) {
        if closings == self.closings(peer) {
            let reason = reason.to_owned();
            self.on_data(now, DataEvent::Closed { peer, reason }, outs);
        }
    }

    pub fn wake(&mut self, now: Instant, outs: &mut Vec<Out>) {
        if self.core.next_deadline(now).is_some_and(|at| at <= now) {
            self.core.on_deadline(now);
            self.act(outs);
        }
    }

    /// Ends what is under way, as a shutdown does.
    pub fn stop(&mut self, now: Instant, outs: &mut Vec<Out>) {
        self.core.abort_all(now, "the node stops");
        self.act(outs);
    }

    fn act(&mut self, outs: &mut Vec<Out>) {
        while let Some(action) = self.core.poll_action() {
            match action {
                Action::Connect { peer } => {
                    self.admitted.insert(peer.epoch);
                }
                Action::Disconnect { peer } => {
                    self.admitted.remove(&peer);
                    self.close_data(peer, outs);
                }
                Action::CloseData { peer } => self.close_data(peer, outs),
                Action::SendNotice { peer, notice } => {
                    outs.push(Out::Notice { to: peer, notice });
                }
                Action::OpenData { peer, .. } => outs.push(Out::OpenData { to: peer }),
                Action::PostReceive { transfer, chunk, blocks, .. } => {
                    self.wires.post(transfer, chunk, blocks);
                }
                Action::SendChunk { peer, transfer, chunk, blocks } => {
                    self.wires.send(peer, transfer, chunk, blocks);
                    outs.push(Out::Depart { transfer, chunk });
                }
                Action::CancelReceive { transfer, .. } => {
                    self.wires.cancel_receive(transfer);
                    outs.push(Out::Release { is_receive: true, transfer });
                }
                Action::CancelSend { transfer, .. } => {
                    self.wires.cancel_send(transfer);
                    outs.push(Out::Release { is_receive: false, transfer });
                }
                Action::Emit(event) => {
                    self.wires.on_event(&event);
                    outs.push(Out::ToEngine(event));
                }
            }
        }
    }

    fn close_data(&mut self, peer: Epoch, outs: &mut Vec<Out>) {
        *self.closings.entry(peer).or_default() += 1;
        outs.push(Out::CloseData { peer });
    }

    /// Nothing may be left of any transfer.
    pub fn check_quiet(&self, name: &str) {
        assert_eq!(self.core.active_count(), 0, "{name}: transfers are active");
        let (transfers, early, _) = self.core.table_sizes();
        assert_eq!((transfers, early), (0, 0), "{name}: transfers are known");
        self.wires.check_quiet();
    }
}
