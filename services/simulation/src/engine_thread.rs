//! The engine thread of a node: the real step loop, and the journey that joins it to callers and
//! transfers, in the order of `services/node/src/engine_thread.rs`.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use cluster::{NodeRecord, StreamId};
use engine::{
    Scheduler, StepLoop, Turn,
    event::{Action, Input, SequenceId},
    executor::sim::SimArena,
};
use kernels::BlockId;
use kv_transfer::api::{self as transfer, Command, Epoch, TransferId};
use proto::v1::FailureKind;

use crate::{
    device::Device,
    journey::{Failed, Journey, Said},
    observers::Observers,
    process::{Call, Output, SEEDS},
    scenario::NodePlan,
};

/// How soon a command is offered again to transfers that had no room.
const RETRY_AFTER: Duration = Duration::from_millis(2);

/// Since when a transfer with whom has blocks of the scheduler.
#[derive(Clone, Debug)]
pub struct TransferHold {
    pub peer: Epoch,
    pub since: Instant,
    /// Reserved for an incoming transfer.
    reserved: Vec<BlockId>,
}

pub struct EngineThread {
    name: String,
    block_count: u32,
    steps: StepLoop<Device>,
    journey: Journey,
    observers: Observers,
    /// Calls that may still be cancelled, with the connection they came by.
    calls: BTreeMap<TransferId, u64>,
    /// Known peers of attempts.
    peers: BTreeMap<TransferId, Epoch>,
    holds: BTreeMap<TransferId, TransferHold>,
    actions: Vec<Action>,
    /// Commands under way to the driver, and their most.
    commands: usize,
    commands_max: usize,
    is_full: bool,
    is_draining: bool,
    now: Instant,
}

impl EngineThread {
    pub fn start(plan: &NodePlan, record: &NodeRecord, now: Instant) -> Self {
        let device = Device::new(plan.scheduler.limits, plan.pace, now);
        let scheduler = Scheduler::new(plan.scheduler, SEEDS).expect("the plan is consistent");
        assert_eq!(scheduler.sequence_tokens_max(), plan.longest_sequence() as usize);
        Self {
            name: record.node_id.to_string(),
            block_count: record.block_count,
            steps: StepLoop::new(scheduler, device),
            journey: Journey::default(),
            observers: Observers::new(record),
            calls: BTreeMap::new(),
            peers: BTreeMap::new(),
            holds: BTreeMap::new(),
            actions: Vec::new(),
            commands: 0,
            commands_max: plan.transfers.commands_max,
            is_full: false,
            is_draining: false,
            now,
        }
    }

    pub fn arena(&self) -> SimArena {
        self.steps.executor().arena()
    }

    pub fn scheduler(&self) -> &Scheduler {
        self.steps.scheduler()
    }

    pub fn is_draining(&self) -> bool {
        self.is_draining
    }

    pub fn next_wake(&self) -> Option<Instant> {
        let retry = self.is_full.then(|| self.now + RETRY_AFTER);
        let device = self.steps.executor().next_due();
        let wakes = [self.steps.next_deadline(), device, self.observers.due(), retry];
        wakes.into_iter().flatten().min()
    }

    pub fn set_now(&mut self, now: Instant) {
        self.now = now;
        self.steps.executor_mut().set_now(now);
    }

    // What happens. `run` follows each of these.

    /// As `services/node` checks a call before it reaches the engine.
    pub fn on_call(&mut self, call: Call, own: Epoch, outputs: &mut Vec<Output>) {
        let Call { connection, epoch, remaining, mut begun } = call;
        let id = TransferId(begun.sequence.id.0);
        if self.is_draining {
            let said = Said::failed(FailureKind::Draining, "this node drains");
            return outputs.push(Output::Say(id, said));
        }
        if epoch != own {
            let message = format!("this process is {own}");
            return outputs.push(Output::Say(id, Said::Failed { kind: Failed::Stale, message }));
        }
        begun.sequence.deadline = self.now + remaining;
        if let Some(peer) = &begun.peer {
            self.peers.insert(id, peer.epoch);
        }
        self.calls.insert(id, connection);
        self.journey.begin(begun);
    }

    pub fn cancel(&mut self, transfer: TransferId) {
        if self.calls.remove(&transfer).is_some() {
            self.journey.cancel(SequenceId(transfer.0));
        }
    }

    pub fn calls_cut(&mut self, connection: u64) {
        let cut = self.calls.iter().filter(|(_, by)| **by == connection);
        for transfer in cut.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.cancel(transfer);
        }
        self.observers.cut(connection);
    }

    pub fn observe(&mut self, connection: u64, stream: StreamId, outputs: &mut Vec<Output>) {
        self.observers.add(self.now, connection, stream, self.steps.scheduler_mut(), outputs);
    }

    pub fn stop_observing(&mut self, stream: StreamId) {
        self.observers.remove(stream);
    }

    pub fn on_transfer_event(&mut self, event: transfer::Event) {
        self.journey.on_transfer_event(event);
    }

    /// The driver has taken one from the queue.
    pub fn command_taken(&mut self) {
        self.commands -= 1;
    }

    pub fn drain(&mut self, outputs: &mut Vec<Output>) {
        self.is_draining = true;
        self.observers.drain(self.now, self.steps.scheduler_mut(), outputs);
    }

    pub fn end_all(&mut self) {
        self.journey.end_all();
    }

    // What follows.

    /// Turns the step loop until there is nothing to do but wait.
    pub fn run(&mut self, outputs: &mut Vec<Output>) {
        loop {
            self.settle(outputs);
            let turn = self.steps.turn(Duration::ZERO, &mut self.actions);
            let turn = turn.expect("every plan fits what the device holds");
            self.check();
            if turn == Turn::Stepped {
                self.observers.mark_changed();
            } else if self.actions.is_empty() {
                break;
            }
        }
        // With all actions handed on, what is reserved is reserved by transfers that were told.
        let reserved: usize = self.holds.values().map(|hold| hold.reserved.len()).sum();
        assert_eq!(self.scheduler().load().blocks_reserved as usize, reserved, "{}", self.name);
        self.observers.publish_if_due(self.now, self.steps.scheduler_mut(), outputs);
        if self.is_draining && self.journey.is_empty() {
            outputs.push(Output::Drained);
        }
    }

    /// Carries words between scheduler, callers and transfers until nobody has anything to say.
    fn settle(&mut self, outputs: &mut Vec<Output>) {
        loop {
            self.hand_on_actions();
            if let Some(input) = self.journey.next_input() {
                self.hand_in(input, outputs);
            } else if !self.command_transfers(outputs) {
                break;
            }
        }
        while let Some((id, said)) = self.journey.next_said() {
            outputs.push(Output::Say(id, said));
        }
    }

    fn hand_in(&mut self, input: Input, outputs: &mut Vec<Output>) {
        let (mut arrived, mut returned) = (None, None);
        match &input {
            Input::Arrived(sequence) => arrived = Some(sequence.id),
            Input::TransferReady { id, .. } => self.begin_hold(*id, Vec::new()),
            Input::KvArrived { id, .. } | Input::TransferEnded { id, .. } => {
                let id = TransferId(id.0);
                returned = self.holds.remove(&id).map(|hold| (id, hold));
            }
            Input::Abort { .. } => {}
        }
        self.observers.mark_changed();
        self.steps.handle(input, &mut self.actions);
        if let Some((transfer, hold)) = returned {
            outputs.push(Output::Returned { transfer, hold });
        }
        self.hand_on_actions();
        self.check();
        if let Some(id) = arrived {
            self.journey.taken(id, self.now);
        }
    }

    fn hand_on_actions(&mut self) {
        for action in std::mem::take(&mut self.actions) {
            if let Action::Reserve { id, blocks, .. } = &action {
                self.begin_hold(*id, blocks.clone());
            }
            self.journey.on_action(action, self.now);
        }
    }

    fn begin_hold(&mut self, id: SequenceId, reserved: Vec<BlockId>) {
        let id = TransferId(id.0);
        if let Some(peer) = self.peers.get(&id) {
            let hold = TransferHold { peer: *peer, since: self.now, reserved };
            self.holds.insert(id, hold);
        }
    }

    /// True when there is something new for the scheduler.
    fn command_transfers(&mut self, outputs: &mut Vec<Output>) -> bool {
        self.is_full = false;
        while let Some(command) = self.journey.next_command() {
            let begins = match &command {
                Command::Receive { transfer, .. } | Command::Expect { transfer, .. } => {
                    Some(*transfer)
                }
                Command::Written { .. }
                | Command::Finish { .. }
                | Command::Abort { .. }
                | Command::Connect { .. }
                | Command::WeightsChanged { .. } => None,
            };
            // Half of the queue is kept for transfers that have begun.
            let most = if begins.is_some() { self.commands_max / 2 } else { self.commands_max };
            if self.commands < most {
                self.commands += 1;
                outputs.push(Output::ToDriver(command));
                continue;
            }
            match begins {
                Some(transfer) => {
                    self.journey.transfer_refused(transfer);
                    return true;
                }
                None => {
                    self.journey.put_back(command);
                    self.is_full = true;
                    return false;
                }
            }
        }
        false
    }

    /// What must hold after every input and every step.
    fn check(&self) {
        self.scheduler().check();
        let load = self.scheduler().load();
        let total = load.blocks_free + load.blocks_cached + load.blocks_held + load.blocks_reserved;
        assert_eq!(total, self.block_count, "{}: the counts add up", self.name);
    }

    /// Nothing may be left of any request.
    pub fn check_idle(&self) {
        let (name, load) = (&self.name, self.scheduler().load());
        assert!(self.scheduler().is_idle(), "{name}: the scheduler knows something, {load:?}");
        assert_eq!((load.blocks_held, load.blocks_reserved), (0, 0), "{name}: {load:?}");
        assert!(self.journey.is_empty(), "{name}: attempts are still in work");
        assert!(self.holds.is_empty(), "{name}: {:?}", self.holds);
        assert_eq!(self.commands, 0, "{name}: commands wait");
    }
}
