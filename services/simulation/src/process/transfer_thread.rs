//! The transfer thread of a process, and the queues between it and the engine thread.

use std::{mem, time::Instant};

use kernels::BlockId;
use kv_transfer::{
    EventSink,
    api::{self as transfer, Command, TransferId},
    driver::Input as TransferInput,
};
use node::node_core::CallId;

use super::Process;
use crate::process_io::{Output, TransferHold};

/// The queue of events from the transfer thread to the engine thread.
pub(super) struct EventQueue {
    accepted: Vec<transfer::Event>,
    in_flight: usize,
    max: usize,
}

impl EventQueue {
    pub(super) fn new(max: usize) -> Self {
        Self { accepted: Vec::new(), in_flight: 0, max }
    }
}

impl EventSink for EventQueue {
    fn offer(&mut self, event: transfer::Event) -> Result<(), transfer::Event> {
        if self.in_flight == self.max {
            return Err(event);
        }
        self.in_flight += 1;
        self.accepted.push(event);
        Ok(())
    }
}

impl Process {
    /// Takes an event from the queue and gives it to the core. Begins or ends the hold of its
    /// transfer.
    pub(super) fn transfer_event(&mut self, event: transfer::Event) {
        self.events.in_flight -= 1;
        let ended = match &event {
            transfer::Event::Ready { transfer, .. } => {
                self.begin_hold(*transfer, Vec::new());
                None
            }
            transfer::Event::Arrived { transfer, .. }
            | transfer::Event::ReceiveFailed { transfer, .. }
            | transfer::Event::Delivered { transfer, .. }
            | transfer::Event::SendFailed { transfer, .. } => Some(*transfer),
        };
        self.has_kv_arrived =
            matches!(event, transfer::Event::Arrived { .. }) && self.core.step_age().is_none();
        self.core.handle_transfer_event(event, self.now);
        if let Some(transfer) = ended
            && let Some(hold) = self.holds.remove(&transfer)
        {
            self.outputs.push(Output::HoldEnded { transfer, hold });
        }
    }

    /// Records that a transfer of an attempt holds blocks of the scheduler.
    fn begin_hold(&mut self, transfer: TransferId, reserved: Vec<BlockId>) {
        if let Some(peer) = self.peers.get(&transfer) {
            let hold = TransferHold { peer: *peer, since: self.now, reserved };
            self.holds.insert(transfer, hold);
        }
    }

    /// Runs the transfer thread: the input, then queued commands while it takes commands.
    pub(super) fn run_transfers(&mut self, input: Option<TransferInput>) {
        if let Some(input) = input {
            self.transfers.handle(self.now, input);
        }
        self.follow_transfers();
        while self.transfers.takes_commands()
            && let Some(command) = self.arrived_commands.pop_front()
        {
            self.commands -= 1;
            self.transfers.transport.on_command(&command);
            self.transfers.handle(self.now, TransferInput::Command(command));
            self.follow_transfers();
        }
    }

    /// Takes the outputs of the transfer thread, and offers its events to the engine thread.
    fn follow_transfers(&mut self) {
        self.outputs.append(&mut self.transfers.links.outputs);
        self.outputs.append(&mut self.transfers.transport.outputs);
        for event in self.transfers.events() {
            if let transfer::Event::Arrived { transfer, .. } = event {
                self.outputs.push(Output::Arrived(*transfer));
            }
        }
        self.transfers.offer_events(&mut self.events);
        for event in self.events.accepted.drain(..) {
            self.transfers.transport.on_event(&event);
            self.outputs.push(Output::TransferEvent(event));
        }
    }

    /// Queues a command for the transfer thread, or tells the core that the queue is full.
    pub(super) fn command_transfers(&mut self, call: Option<CallId>, command: Command) {
        self.is_command_waiting = false;
        if self.commands >= self.transfer_limits.queued_max(&command) {
            self.coverage.count("transfer queue full");
            let reason = "the transfer queue is full".to_owned();
            self.is_command_waiting =
                self.core.handle_transfer_queue_full(call, command, reason, self.now);
            return;
        }
        if let Command::Receive { transfer, blocks, .. } = &command {
            self.begin_hold(*transfer, blocks.clone());
        }
        self.commands += 1;
        self.outputs.push(Output::Command(command));
    }

    /// Aborts every transfer, as a process does before it exits.
    pub(crate) fn stop(&mut self, now: Instant) -> Vec<Output> {
        self.transfers.abort_all(now, "the node stops");
        self.follow_transfers();
        mem::take(&mut self.outputs)
    }
}
