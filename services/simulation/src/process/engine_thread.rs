//! The engine thread of a process: the shipped node core, and what its outputs cause.

use std::time::Duration;

use engine::{Turn, executor::ExecutorError};
use node::node_core::{CloseReason, Metric, Output as CoreOutput};

use super::{Output, Process};

impl Process {
    /// Runs the core until it waits for an input, a step or a deadline.
    pub(super) fn run_engine(&mut self, outputs: &mut Vec<Output>) {
        loop {
            self.carry_out(outputs);
            match self.core.step(Duration::ZERO) {
                Ok(Turn::Idle) => break,
                Ok(Turn::Pending) if !self.core.has_actions() => break,
                Ok(Turn::Pending | Turn::Stepped) => self.check(),
                Err(error) => return self.engine_failed(&error, outputs),
            }
        }
        self.carry_out(outputs);
        self.core.handle_deadline(self.now);
        self.carry_out(outputs);
        self.check();
        self.check_reserved();
        if self.is_checked && self.load().blocks_kept > 0 {
            self.coverage.count("blocks kept");
        }
        if self.is_draining && self.core.is_empty() {
            outputs.push(Output::Drained);
        }
    }

    /// Ends every attempt of a process whose executor failed.
    fn engine_failed(&mut self, error: &ExecutorError, outputs: &mut Vec<Output>) {
        self.core.handle_close(&CloseReason::EngineFailed { reason: error.to_string() });
        self.carry_out(outputs);
        outputs.push(Output::EngineFailed);
    }

    /// Carries out the outputs of the core.
    fn carry_out(&mut self, outputs: &mut Vec<Output>) {
        while let Some(output) = self.core.poll_output() {
            match output {
                CoreOutput::Reply { call, reply } => self.reply(call, reply, outputs),
                CoreOutput::Forgotten { call } => {
                    self.calls.remove(&call.number);
                }
                CoreOutput::Transfer { call, command } => {
                    self.command_transfers(call, command, outputs);
                }
                CoreOutput::Observe { observer, event } => {
                    if let Some(&stream) = self.observers.get(&observer) {
                        outputs.push(Output::Observed { stream, event: Some(event) });
                    }
                }
                CoreOutput::ObserveStalled { observer } => {
                    if let Some(stream) = self.observers.remove(&observer) {
                        outputs.push(Output::Observed { stream, event: None });
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
                    self.weights.changed(self.now, &mut self.core, outputs);
                }
                CoreOutput::Metric(_)
                | CoreOutput::Stage { .. }
                | CoreOutput::PauseChanged { .. }
                | CoreOutput::Recovered => {}
            }
        }
    }
}
