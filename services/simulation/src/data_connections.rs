//! Messages between the nodes: control messages, and chunks on data connections.

use std::time::{Duration, Instant};

use kv_transfer::{
    api::{Epoch, TransferId},
    config::LEASE,
    control::ControlMessage,
    protocol::DataEvent,
};
use simulation_base::ConnectionId;

use crate::{
    event_loop::Simulation,
    events::SimEvent,
    process_io::{Input, ProcessState},
    transport::ChunkData,
};

/// Time until a chunk that cannot leave or arrive yet is tried again.
const RETRY_AFTER: Duration = Duration::from_millis(3);
/// Time between two attempts to connect.
const CONNECT_RETRY: Duration = Duration::from_millis(50);

impl Simulation {
    pub(crate) fn send_control(&mut self, from: usize, to: Epoch, message: ControlMessage) {
        let process = self.by_epoch[&to];
        let source = self.processes[from].source();
        for delay in self.network.datagram(from, process) {
            let input = Input::ControlMessage(source.clone(), Box::new(message.clone()));
            self.clock.after(delay, SimEvent::Input { process, input });
        }
    }

    pub(crate) fn open_data(&mut self, from: usize, to: Epoch) {
        let closings = self.processes[from].transfers.transport.connection(to);
        let to = self.by_epoch[&to];
        let give_up = self.clock.now() + LEASE;
        let event = SimEvent::Connect { from, to, closings, give_up };
        match self.scenario.links {
            Some(links) => self.clock.after(links.connect, event),
            None => self.send(event),
        }
    }

    /// Opens the data connection. Retries across a partition for one lease.
    pub(crate) fn connect(&mut self, from: usize, to: usize, closings: u64, give_up: Instant) {
        let (client, server) = (&self.processes[from], &self.processes[to]);
        if client.state == ProcessState::Dead
            || client.transfers.transport.connection(server.epoch) != closings
        {
            return;
        }
        if self.network.is_cut(from, to) {
            if self.clock.now() < give_up {
                let event = SimEvent::Connect { from, to, closings, give_up };
                return self.clock.after(CONNECT_RETRY, event);
            }
            self.report_closed(from, to, "connection timed out");
        } else if server.state == ProcessState::Dead
            || !server.transfers.transport.admits(client.epoch)
        {
            self.report_closed(from, to, "connection refused");
        } else {
            self.network.connect(from, to);
        }
    }

    /// Tells `process` that its data connection with `peer` has ended.
    pub(crate) fn report_closed(&mut self, process: usize, peer: usize, reason: &'static str) {
        let peer = self.processes[peer].epoch;
        let connection = self.processes[process].transfers.transport.connection(peer);
        let input = Input::Closed { peer, connection, reason };
        self.send(SimEvent::Input { process, input });
    }

    /// Closes both directions. The peer learns of it unless the two are partitioned.
    pub(crate) fn close_data(&mut self, process: usize, peer: Epoch) {
        let peer = self.by_epoch[&peer];
        if self.network.disconnect(process, peer) && !self.network.is_cut(process, peer) {
            self.report_closed(peer, process, "connection closed");
        }
    }

    pub(crate) fn send_chunk(&mut self, process: usize, transfer: TransferId, chunk: u32) {
        let node = &self.processes[process];
        let Some(peer) = node.transfers.transport.destination(transfer, chunk) else { return };
        let to = self.by_epoch[&peer];
        let connection = self.network.connection(process, to);
        let (Some(connection), ProcessState::Running) = (connection, node.state) else {
            if node.state != ProcessState::Dead {
                let event = SimEvent::SendChunk { process, transfer, chunk };
                self.clock.after(RETRY_AFTER, event);
            }
            return;
        };
        if self.random.chance(self.scenario.read_failure) {
            let reason = "the block cannot be read".to_owned();
            return self.input(process, Input::Data(DataEvent::Failed { transfer, reason }));
        }
        let (mut data, sent) =
            self.processes[process].transfers.transport.send_chunk(transfer, chunk);
        if let Some(links) = self.scenario.links {
            let bytes = data.block_count as u64 * links.block_bytes;
            let time = Duration::from_secs_f64(bytes as f64 / links.bytes_per_s);
            let sent_at = self.link_ends.transfer(self.clock.now(), (process, to), time);
            self.clock.at(sent_at, SimEvent::Input { process, input: Input::Data(sent) });
            let event = SimEvent::ChunkBegins { from: process, to, connection, data };
            return self.clock.at(sent_at + links.latency, event);
        }
        if let Some(block) = data.contents.first_mut()
            && self.network.corrupt(&mut block[0])
        {
            self.coverage.count("chunks corrupted");
        }
        self.input(process, Input::Data(sent));
        self.send(SimEvent::ChunkBegins { from: process, to, connection, data });
    }

    /// Handles the first bytes of a chunk.
    pub(crate) fn chunk_begins(
        &mut self,
        from: usize,
        to: usize,
        connection: ConnectionId,
        data: ChunkData,
    ) {
        let event = SimEvent::ChunkBegins { from, to, connection, data };
        let Some(SimEvent::ChunkBegins { data, .. }) = self.pass(from, to, connection, event)
        else {
            return;
        };
        if self.processes[to].transfers.transport.chunk_begins(&data) {
            self.send(SimEvent::ChunkEnds { from, to, connection, data });
        }
    }

    /// Handles the last bytes of a chunk.
    pub(crate) fn chunk_ends(
        &mut self,
        from: usize,
        to: usize,
        connection: ConnectionId,
        data: ChunkData,
    ) {
        let event = SimEvent::ChunkEnds { from, to, connection, data };
        let Some(SimEvent::ChunkEnds { data, .. }) = self.pass(from, to, connection, event) else {
            return;
        };
        if let Some(received) = self.processes[to].transfers.transport.chunk_ends(&data) {
            self.input(to, Input::Data(received));
        }
    }

    /// Returns the event if its data passes now. A connection loses no data while it is open: data
    /// for a paused process waits in its socket, and data across a partition is retransmitted.
    fn pass(
        &mut self,
        from: usize,
        to: usize,
        connection: ConnectionId,
        event: SimEvent,
    ) -> Option<SimEvent> {
        let is_open = self.network.connection(from, to) == Some(connection);
        let state = self.processes[to].state;
        if !is_open || state == ProcessState::Dead {
            return None;
        }
        if state == ProcessState::Paused || self.network.is_cut(from, to) {
            self.clock.after(RETRY_AFTER, event);
            return None;
        }
        Some(event)
    }
}
