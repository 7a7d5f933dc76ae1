//! The engine thread of a process: the shipped loop of a node, and what the outputs of its core
//! cause.

use std::{
    mem,
    time::{Duration, Instant},
};

use engine::{LoopOutcome, executor::ExecutorError};
use node::node_core::{self, CloseReason, Metric, NodeCore, NodeOutput as CoreOutput, NodeShell};

use super::Process;
use crate::{device::Device, process_io::Output};

impl Process {
    /// Lets the core take turns until it waits for an input, a step or a deadline.
    pub(super) fn run_engine(&mut self) {
        loop {
            match node_core::take_turn(self) {
                Ok(LoopOutcome::Stepped) => self.check(),
                Ok(LoopOutcome::Idle | LoopOutcome::Pending) => break,
                Err(error) => return self.engine_failed(&error),
            }
        }
        self.check();
        self.check_reserved();
        if self.is_checked && self.load().blocks_kept > 0 {
            self.coverage.count("blocks kept");
        }
        if self.is_draining && self.core.is_empty() {
            self.outputs.push(Output::Drained);
        }
    }

    /// Ends every attempt of a process whose executor failed.
    fn engine_failed(&mut self, error: &ExecutorError) {
        node_core::close(self, &CloseReason::EngineFailed { reason: error.to_string() });
        self.outputs.push(Output::EngineFailed);
    }
}

impl NodeShell for Process {
    type Executor = Device;

    fn core(&mut self) -> &mut NodeCore<Device> {
        &mut self.core
    }

    fn now(&self) -> Instant {
        self.now
    }

    /// The clock does not move meanwhile.
    fn wait_max(&self, _due: Option<Instant>) -> Duration {
        Duration::ZERO
    }

    fn carry_out(&mut self, output: CoreOutput) {
        if mem::take(&mut self.has_kv_arrived) && self.core.step_age().is_some() {
            self.coverage.count("arrived KV launched at once");
        }
        match output {
            CoreOutput::Reply { call, reply } => self.reply(call, reply),
            CoreOutput::Forgotten { call } => {
                self.calls.remove(&call.number);
            }
            CoreOutput::Transfer { call, command } => self.command_transfers(call, command),
            CoreOutput::Observe { observer, event } => {
                if let Some(&stream) = self.observers.get(&observer) {
                    self.outputs.push(Output::Observed { stream, event: Some(event) });
                }
            }
            CoreOutput::ObserveStalled { observer } => {
                if let Some(stream) = self.observers.remove(&observer) {
                    self.outputs.push(Output::Observed { stream, event: None });
                }
            }
            CoreOutput::Metric(Metric::Preempted(count)) => {
                self.coverage.add("preemptions", count);
            }
            CoreOutput::Stalled { .. } => self.coverage.count("stalls"),
            CoreOutput::Save(job) => {
                if let Some(tiers) = &mut self.tiers {
                    tiers.save(self.now, job);
                }
            }
            CoreOutput::CancelSaves { last } => {
                self.coverage.count("saves cancelled for an admission");
                if let Some(tiers) = &mut self.tiers {
                    tiers.cancel_saves(self.now, last);
                }
            }
            CoreOutput::Load(job) => {
                if let Some(tiers) = &mut self.tiers {
                    tiers.load(self.now, job);
                }
            }
            CoreOutput::WeightsReleased => self.weights.released(self.now),
            CoreOutput::WeightsChanged { .. } => {
                self.weights.changed(self.now, &mut self.core, &mut self.outputs);
            }
            CoreOutput::Metric(_)
            | CoreOutput::Stage { .. }
            | CoreOutput::PauseChanged { .. }
            | CoreOutput::Recovered => {}
        }
    }
}
