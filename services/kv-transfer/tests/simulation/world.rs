//! Several transfer cores, a network with faults, and the blocks of each node.
//!
//! Asserts that no block is read or written for a transfer after the end of that transfer, that
//! `Arrived` blocks hold the sender's KV for the receiver's weights, and that no transfer ends
//! twice.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use kernels::{BlockId, sampling::SampledToken};
use kv_transfer::{
    TransferLimits,
    api::{Command, Epoch, Event, Peer, PeerAddress, TransferId},
    config::LEASE,
    control::{Body, ControlMessage},
    protocol::{Action, DataEvent},
};
use simulation_base::{Clock, ConnectionId, Due, Network, NetworkFaults, Random};

use crate::node::{BLANK, Node, ProcessState};

pub(crate) const BLOCK_BYTES: usize = 1000;
pub(crate) const TOKEN: u32 = 77;

/// A network without faults.
pub(crate) const CALM: NetworkFaults = NetworkFaults {
    delay_min: Duration::ZERO,
    loss: 0,
    duplication: 0,
    lateness: 0,
    corruption: 0,
    delay_max: Duration::from_millis(2),
};

/// A transfer of one prompt from `sender` to `receiver`.
#[derive(Clone, Debug)]
pub(crate) struct TransferPlan {
    pub transfer: TransferId,
    pub sender: usize,
    pub receiver: usize,
    /// Blocks of the prompt. The receiver has the first `cached` blocks.
    pub block_count: u32,
    pub cached: u32,
    pub deadline: Duration,
}

impl TransferPlan {
    /// Returns a transfer of three blocks, none of which the receiver has.
    pub(crate) fn of_three_blocks(transfer: TransferId, sender: usize, receiver: usize) -> Self {
        let deadline = Duration::from_secs(5);
        Self { transfer, sender, receiver, block_count: 3, cached: 0, deadline }
    }
}

/// An input of a node.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Command(Command),
    ControlMessage(Peer, ControlMessage),
    /// The data connection with `peer` has ended.
    Closed {
        peer: usize,
        closings: u64,
    },
    /// The data connection to `peer` is open.
    Opened {
        peer: usize,
    },
    /// A chunk is sent.
    SendChunk {
        transfer: TransferId,
        chunk: u32,
    },
    /// The transport has read the last byte of a chunk.
    ChunkRead {
        transfer: TransferId,
        chunk: u32,
        integrity: u64,
    },
    /// The first and the last bytes of a chunk arrive.
    ChunkBegins {
        from: usize,
        connection: ConnectionId,
        transfer: TransferId,
        chunk: u32,
        contents: Vec<u64>,
    },
    ChunkEnds {
        from: usize,
        connection: ConnectionId,
        transfer: TransferId,
        chunk: u32,
        contents: Vec<u64>,
    },
    Release {
        transfer: TransferId,
    },
    /// The sending node has computed up to this block of the prompt.
    Compute {
        transfer: TransferId,
        end: u32,
    },
}

pub(crate) struct World {
    clock: Clock<(usize, Step)>,
    pub network: Network<usize>,
    pub nodes: Vec<Node>,
    pub random: Random,
    /// Longest time until a transport releases the blocks of a cancelled transfer.
    pub release_delay_max: Duration,
    pub plans: BTreeMap<TransferId, TransferPlan>,
    /// Blocks that the sender of each transfer holds, in the order of the prompt.
    held: BTreeMap<TransferId, Vec<BlockId>>,
    pub computes: bool,
    /// Transfers whose `ACK` had a trace context.
    traced_acks: BTreeSet<TransferId>,
}

impl World {
    pub(crate) fn new(
        seed: u64,
        node_count: usize,
        block_count: u32,
        faults: NetworkFaults,
    ) -> Self {
        let limits = TransferLimits {
            // Three blocks per chunk.
            chunk_bytes_max: 3 * BLOCK_BYTES,
            ..TransferLimits::default()
        };
        Self::with_limits(seed, node_count, block_count, faults, limits)
    }

    pub(crate) fn with_limits(
        seed: u64,
        node_count: usize,
        block_count: u32,
        faults: NetworkFaults,
        limits: TransferLimits,
    ) -> Self {
        let mut random = Random::new(seed);
        let nodes = (0..node_count).map(|index| Node::new(index, block_count, limits)).collect();
        Self {
            clock: Clock::default(),
            network: Network::new(faults, random.fork()),
            nodes,
            random,
            release_delay_max: Duration::from_millis(1),
            plans: BTreeMap::new(),
            held: BTreeMap::new(),
            computes: true,
            traced_acks: BTreeSet::new(),
        }
    }

    pub(crate) fn at(&mut self, at: Instant, node: usize, step: Step) {
        self.clock.at(at, (node, step));
    }

    fn soon(&mut self, node: usize, step: Step) {
        let delay = self.network.delay();
        self.clock.after(delay, (node, step));
    }

    fn index_of(&self, epoch: Epoch) -> usize {
        self.nodes.iter().position(|node| node.epoch == epoch).expect("cores speak to nodes")
    }

    pub(crate) fn address(&self, node: usize) -> PeerAddress {
        let node = &self.nodes[node];
        PeerAddress {
            node_id: node.name.clone(),
            epoch: node.epoch,
            control_endpoint: format!("tcp://{}:1", node.name),
        }
    }

    /// Gives both nodes their commands at these times; `None`: the node never gets the command.
    pub(crate) fn plan(
        &mut self,
        plan: TransferPlan,
        receive: Option<Instant>,
        expect: Option<Instant>,
    ) {
        if let Some(at) = receive {
            let blocks = self.nodes[plan.receiver]
                .take(plan.transfer, plan.block_count - plan.cached)
                .expect("the receiver has blocks");
            let command = self.receive_command(&plan, blocks);
            self.at(at, plan.receiver, Step::Command(command));
        }
        if let Some(at) = expect {
            let command = self.expect_command(&plan);
            self.at(at, plan.sender, Step::Command(command));
        }
        self.plans.insert(plan.transfer, plan);
    }

    pub(crate) fn receive_command(&self, plan: &TransferPlan, blocks: Vec<BlockId>) -> Command {
        Command::Receive {
            transfer: plan.transfer,
            peer: self.address(plan.sender),
            prompt_hash: plan.transfer.0,
            first_block: plan.cached,
            blocks,
            answer_timeout: LEASE,
            deadline: plan.deadline,
            traceparent: format!("receive-{}", plan.transfer),
        }
    }

    pub(crate) fn expect_command(&self, plan: &TransferPlan) -> Command {
        Command::Send {
            transfer: plan.transfer,
            peer: self.address(plan.receiver),
            prompt_hash: plan.transfer.0,
            deadline: plan.deadline,
            traceparent: format!("expect-{}", plan.transfer),
        }
    }

    /// Returns the KV of a block that a sender with these weights computes.
    fn content(transfer: TransferId, block: u32, weight_version: u64) -> u64 {
        let seed = transfer.0 as u64 ^ (u64::from(block) << 32) ^ weight_version.rotate_right(8);
        Random::new(seed).next() | 1
    }

    pub(crate) fn kill(&mut self, node: usize, resets_connections: bool) {
        self.nodes[node].state = ProcessState::Dead;
        let peers = self.network.disconnect_all(node);
        for peer in peers.into_iter().filter(|_| resets_connections) {
            self.report_closed(peer, node);
        }
    }

    pub(crate) fn pause(&mut self, node: usize) {
        if self.nodes[node].state == ProcessState::Running {
            self.nodes[node].state = ProcessState::Paused;
        }
    }

    pub(crate) fn resume(&mut self, node: usize) {
        if self.nodes[node].state != ProcessState::Paused {
            return;
        }
        self.nodes[node].state = ProcessState::Running;
        for step in std::mem::take(&mut self.nodes[node].inbox) {
            self.handle(node, step);
        }
    }

    pub(crate) fn now(&self) -> Instant {
        self.clock.now()
    }

    pub(crate) fn start(&self) -> Instant {
        self.clock.start()
    }

    /// Runs until `end`, jumping from one event or deadline to the next.
    pub(crate) fn run_until(&mut self, end: Instant) {
        loop {
            let now = self.now();
            let running = self
                .nodes
                .iter()
                .enumerate()
                .filter(|(_, node)| node.state == ProcessState::Running);
            let deadlines =
                running.filter_map(|(index, node)| Some((node.core.next_deadline(now)?, index)));
            let deadline = deadlines.min();
            match self.clock.advance(deadline.map(|(at, _)| at), end) {
                Some(Due::Event((node, step))) => self.handle(node, step),
                Some(Due::Deadline) => {
                    let (_, node) = deadline.expect("the clock moved to this deadline");
                    let now = self.now();
                    self.nodes[node].core.on_deadline(now);
                    self.act(node);
                }
                None => return,
            }
        }
    }

    fn handle(&mut self, index: usize, step: Step) {
        let now = self.now();
        let node = &mut self.nodes[index];
        match node.state {
            ProcessState::Dead => return,
            ProcessState::Paused => return node.inbox.push(step),
            ProcessState::Running => {}
        }
        match step {
            Step::Command(command) => {
                if let Command::Receive { transfer, .. } | Command::Send { transfer, .. } = &command
                {
                    node.begun.entry(*transfer).or_insert(now);
                }
                if let Command::Abort { transfer, .. } = &command {
                    node.aborted.entry(*transfer).or_insert(now);
                }
                node.core.handle_command(now, command);
            }
            Step::ControlMessage(from, message) => node.core.handle_control(now, &from, message),
            Step::Closed { peer, closings } => {
                if node.closings.get(&peer).copied().unwrap_or(0) == closings {
                    let (peer, reason) = (self.nodes[peer].epoch, "connection closed".to_owned());
                    self.nodes[index].core.handle_peer_failed(now, peer, &reason);
                }
            }
            Step::Opened { peer } => {
                if self.nodes[peer].state == ProcessState::Dead
                    || !self.nodes[peer].admitted.contains(&index)
                {
                    self.report_closed(index, peer);
                } else {
                    self.network.connect(index, peer);
                }
            }
            Step::SendChunk { transfer, chunk } => self.send_chunk(index, transfer, chunk),
            Step::ChunkRead { transfer, chunk, integrity } => {
                self.chunk_read(index, transfer, chunk, integrity);
            }
            Step::ChunkBegins { from, connection, transfer, chunk, contents } => {
                self.chunk_begins(index, from, connection, transfer, chunk, contents);
            }
            Step::ChunkEnds { from, connection, transfer, chunk, contents } => {
                self.chunk_ends(index, from, connection, transfer, chunk, contents);
            }
            Step::Release { transfer } => {
                node.writing.retain(|(id, _), _| *id != transfer);
                node.core.handle_data(now, DataEvent::Released { transfer });
            }
            Step::Compute { transfer, end } => self.compute(index, transfer, end),
        }
        self.act(index);
    }

    fn send_chunk(&mut self, index: usize, transfer: TransferId, chunk: u32) {
        let node = &self.nodes[index];
        let Some((peer, blocks)) = node.sending.get(&(transfer, chunk)) else { return };
        let to = self.index_of(*peer);
        let Some(connection) = self.network.connection(index, to) else {
            // The connection is not open yet.
            return self.at(
                self.now() + Duration::from_millis(3),
                index,
                Step::SendChunk { transfer, chunk },
            );
        };
        let contents = node.read(transfer, blocks);
        let integrity = digest(&contents);
        let mut travelling = contents;
        self.network.corrupt(&mut travelling[0]);
        // Some transports read the blocks for a while.
        if self.random.chance(50) {
            self.soon(index, Step::ChunkRead { transfer, chunk, integrity });
        } else {
            self.chunk_read(index, transfer, chunk, integrity);
        }
        let land =
            Step::ChunkBegins { from: index, connection, transfer, chunk, contents: travelling };
        self.soon(to, land);
    }

    fn chunk_read(&mut self, index: usize, transfer: TransferId, chunk: u32, integrity: u64) {
        let node = &mut self.nodes[index];
        // The transfer may have been cancelled meanwhile.
        let Some((_, blocks)) = node.sending.remove(&(transfer, chunk)) else { return };
        assert_eq!(digest(&node.read(transfer, &blocks)), integrity, "{transfer}: chunk {chunk}");
        node.core.handle_data(self.clock.now(), DataEvent::Sent { transfer, chunk, integrity });
    }

    /// Returns whether bytes of this data connection arrive.
    fn reaches(&self, connection: ConnectionId, from: usize, to: usize) -> bool {
        self.network.connection(from, to) == Some(connection) && !self.network.is_cut(from, to)
    }

    fn chunk_begins(
        &mut self,
        index: usize,
        from: usize,
        connection: ConnectionId,
        transfer: TransferId,
        chunk: u32,
        contents: Vec<u64>,
    ) {
        if !self.reaches(connection, from, index) {
            return;
        }
        let Some(blocks) = self.nodes[index].posted.remove(&(transfer, chunk)) else { return };
        let half = blocks.len() / 2;
        self.nodes[index].write(transfer, &blocks[..half], &contents[..half]);
        self.nodes[index].writing.insert((transfer, chunk), blocks);
        self.soon(index, Step::ChunkEnds { from, connection, transfer, chunk, contents });
    }

    fn chunk_ends(
        &mut self,
        index: usize,
        from: usize,
        connection: ConnectionId,
        transfer: TransferId,
        chunk: u32,
        contents: Vec<u64>,
    ) {
        if !self.reaches(connection, from, index) {
            return;
        }
        let node = &mut self.nodes[index];
        let Some(blocks) = node.writing.remove(&(transfer, chunk)) else { return };
        node.write(transfer, &blocks, &contents);
        let integrity = digest(&contents);
        node.core.handle_data(self.clock.now(), DataEvent::Received { transfer, chunk, integrity });
    }

    /// Computes blocks of the prompt in order, then finishes.
    fn compute(&mut self, index: usize, transfer: TransferId, end: u32) {
        if self.nodes[index].ended.contains_key(&transfer) {
            return;
        }
        let plan = self.plans[&transfer].clone();
        let blocks = self.held[&transfer].clone();
        let begin = blocks
            .iter()
            .position(|block| self.nodes[index].memory[block.index()] == BLANK)
            .unwrap_or(blocks.len()) as u32;
        let weight_version = self.nodes[index].weight_version;
        for block in begin..end {
            self.nodes[index].memory[blocks[block as usize].index()] =
                Self::content(transfer, block, weight_version);
        }
        let written = Command::Written {
            transfer,
            first_block: begin,
            blocks: blocks[begin as usize..end as usize].to_vec(),
        };
        self.nodes[index].core.handle_command(self.clock.now(), written);
        if end == plan.block_count {
            let token = SampledToken { id: TOKEN, logprobs: None, pooled: None };
            let finish = Command::Finish { transfer, first_index: 5, token };
            self.nodes[index].core.handle_command(self.clock.now(), finish);
        } else {
            let rest = u64::from(plan.block_count - end);
            let end = end + 1 + self.random.below(rest) as u32;
            let pause = self.random.up_to(Duration::from_millis(40));
            self.at(self.now() + pause, index, Step::Compute { transfer, end });
        }
    }

    /// Starts the prefill. Returns false when the sender has too few free blocks.
    pub(crate) fn start_computing(&mut self, transfer: TransferId) -> bool {
        let plan = self.plans[&transfer].clone();
        let Some(blocks) = self.nodes[plan.sender].take(transfer, plan.block_count) else {
            return false;
        };
        for block in &blocks {
            self.nodes[plan.sender].memory[block.index()] = BLANK;
        }
        self.held.insert(transfer, blocks);
        let end = 1 + self.random.below(u64::from(plan.block_count)) as u32;
        let pause = self.random.up_to(Duration::from_millis(40));
        self.at(self.now() + pause, plan.sender, Step::Compute { transfer, end });
        true
    }

    fn act(&mut self, index: usize) {
        while let Some(action) = self.nodes[index].core.poll_action() {
            match action {
                Action::Connect { peer } => {
                    let peer = self.index_of(peer.epoch);
                    self.nodes[index].admitted.insert(peer);
                }
                Action::CloseData { peer } => self.disconnect(index, peer),
                Action::Disconnect { peer } => {
                    self.disconnect(index, peer);
                    let peer = self.index_of(peer);
                    self.nodes[index].admitted.remove(&peer);
                }
                Action::SendControl { peer, message } => self.send_control(index, peer, message),
                Action::OpenData { peer, .. } => {
                    let peer = self.index_of(peer);
                    if self.nodes[peer].state == ProcessState::Dead {
                        self.report_closed(index, peer);
                    } else {
                        self.soon(index, Step::Opened { peer });
                    }
                }
                Action::PostReceive { transfer, chunk, blocks, .. } => {
                    let node = &mut self.nodes[index];
                    for block in &blocks {
                        assert_eq!(node.owners.get(block), Some(&transfer), "not reserved");
                    }
                    let before = node.posted.insert((transfer, chunk), blocks);
                    assert_eq!(before, None, "posted twice");
                }
                Action::SendChunk { peer, transfer, chunk, blocks } => {
                    let before =
                        self.nodes[index].sending.insert((transfer, chunk), (peer, blocks));
                    assert_eq!(before, None, "sent twice");
                    self.soon(index, Step::SendChunk { transfer, chunk });
                }
                Action::Cancel { transfer, .. } => {
                    // A chunk that has begun to arrive continues until the release.
                    self.nodes[index].posted.retain(|(id, _), _| *id != transfer);
                    self.nodes[index].sending.retain(|(id, _), _| *id != transfer);
                    self.release(index, transfer);
                }
                Action::Emit(event) => self.emitted(index, event),
            }
        }
    }

    fn release(&mut self, index: usize, transfer: TransferId) {
        let delay = self.random.up_to(self.release_delay_max);
        self.at(self.now() + delay, index, Step::Release { transfer });
    }

    fn disconnect(&mut self, index: usize, peer: Epoch) {
        let other = self.index_of(peer);
        *self.nodes[index].closings.entry(other).or_default() += 1;
        if self.network.disconnect(index, other) && !self.network.is_cut(index, other) {
            self.report_closed(other, index);
        }
    }

    fn report_closed(&mut self, to: usize, peer: usize) {
        let closings = self.nodes[to].closings.get(&peer).copied().unwrap_or(0);
        self.soon(to, Step::Closed { peer, closings });
    }

    fn send_control(&mut self, index: usize, peer: Epoch, message: ControlMessage) {
        match &message.body {
            Body::Reserve(_) | Body::Done(_) => {
                assert_ne!(message.traceparent, "", "{:?} starts or ends work", message.body);
            }
            // A repeated CHUNK has no trace context for its answer.
            Body::Ack { transfer } if !message.traceparent.is_empty() => {
                self.traced_acks.insert(*transfer);
            }
            _ => {}
        }
        let to = self.index_of(peer);
        let node = &self.nodes[index];
        let from = Peer { node_id: node.name.clone(), epoch: node.epoch };
        for delay in self.network.datagram(index, to) {
            self.clock.after(delay, (to, Step::ControlMessage(from.clone(), message.clone())));
        }
    }

    fn emitted(&mut self, index: usize, event: Event) {
        let now = self.now();
        self.nodes[index].events.push((now, event.clone()));
        match event {
            Event::Ready { transfer, first_block, block_count, traceparent } => {
                let plan = &self.plans[&transfer];
                assert_eq!(
                    (first_block, block_count),
                    (plan.cached, plan.block_count - plan.cached)
                );
                assert_eq!(traceparent, format!("receive-{transfer}"));
                if self.computes {
                    assert!(self.start_computing(transfer), "the sender has blocks");
                }
            }
            Event::Arrived { transfer, first_index, token, stats } => {
                assert_eq!((first_index, token.id), (5, TOKEN));
                let plan = self.plans[&transfer].clone();
                let node = &self.nodes[index];
                // The blocks in the order of the prompt.
                let written: Vec<u64> =
                    node.taken[&transfer].iter().map(|block| node.memory[block.index()]).collect();
                let expected: Vec<u64> = (plan.cached..plan.block_count)
                    .map(|block| Self::content(transfer, block, node.weight_version))
                    .collect();
                assert_eq!(written, expected, "arrived blocks hold something else");
                assert_eq!(stats.bytes, (expected.len() * BLOCK_BYTES) as u64);
                self.ended(index, transfer, true);
            }
            Event::Delivered { transfer, .. } => {
                assert!(self.traced_acks.contains(&transfer), "the ACK of {transfer} has no trace");
                self.ended(index, transfer, true);
            }
            Event::ReceiveFailed { transfer, .. } | Event::SendFailed { transfer, .. } => {
                self.ended(index, transfer, false);
            }
        }
    }

    fn ended(&mut self, index: usize, transfer: TransferId, succeeded: bool) {
        let (now, node) = (self.now(), &mut self.nodes[index]);
        assert!(node.begun.contains_key(&transfer), "{transfer} ended at {} unbegun", node.name);
        let before = node.ended.insert(transfer, (now, succeeded));
        assert_eq!(before, None, "{transfer} ended twice at {}", node.name);
        node.free_blocks(transfer);
    }

    /// Returns whether the node holds blocks of the transfer: a sender from `Ready` on, a receiver
    /// from the start.
    pub(crate) fn has_held_blocks(&self, node: usize, transfer: TransferId) -> bool {
        let is_ready = |(_, event): &(Instant, Event)| matches!(event, Event::Ready { transfer: id, .. } if *id == transfer);
        let node_state = &self.nodes[node];
        node_state.begun.contains_key(&transfer)
            && (self.plans[&transfer].receiver == node || node_state.events.iter().any(is_ready))
    }

    /// Returns whether a data connection from the first node to the second is open.
    pub(crate) fn is_connected(&self, from: usize, to: usize) -> bool {
        self.network.connection(from, to).is_some()
    }

    /// Returns the number of events scheduled so far.
    pub(crate) fn steps(&self) -> u64 {
        self.clock.scheduled()
    }

    pub(crate) fn end_of(&self, node: usize, transfer: TransferId) -> Option<(Instant, bool)> {
        self.nodes[node].ended.get(&transfer).copied()
    }
}

fn digest(contents: &[u64]) -> u64 {
    contents.iter().fold(0, |sum, content| Random::new(sum ^ content).next())
}
