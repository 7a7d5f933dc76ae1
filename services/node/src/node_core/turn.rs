//! The order in which a shell runs a [`NodeCore`]: the engine thread and the simulation share it.

use std::time::{Duration, Instant};

use engine::{
    LoopOutcome,
    executor::{Executor, ExecutorError},
};

use super::{CloseReason, NodeCore, NodeOutput};

/// The I/O around a core: the engine thread, or a simulated process.
pub trait NodeShell {
    type Executor: Executor;

    fn core(&mut self) -> &mut NodeCore<Self::Executor>;

    fn now(&self) -> Instant;

    /// Returns how long the shell may wait when the next deadline of the core is `due`.
    fn wait_max(&self, due: Option<Instant>) -> Duration;

    /// Carries out one output. It may give the core an input that the output's doc names.
    fn carry_out(&mut self, output: NodeOutput);

    /// Ends a sequence of outputs: the core has no further one.
    fn flush(&mut self) {}

    /// Called before the core calls the executor, which may block.
    fn device_call_begins(&mut self) {}

    /// Called after the executor has returned.
    fn device_call_ends(&mut self) {}
}

/// Runs the core once, after its inputs. [`LoopOutcome::Idle`]: wait for an input, at most until
/// [`NodeCore::next_deadline`]. After an error the executor is unusable: [`close`] the core.
pub fn take_turn(shell: &mut impl NodeShell) -> Result<LoopOutcome, ExecutorError> {
    call_device(shell, NodeCore::launch_arrived_kv)?;
    carry_out_all(shell);
    let due = shell.core().next_deadline();
    let timeout = shell.wait_max(due);
    let turn = call_device(shell, |core| core.step(timeout))?;
    carry_out_all(shell);
    let now = shell.now();
    shell.core().handle_deadline(now);
    carry_out_all(shell);
    Ok(turn)
}

/// Fails every attempt, rejects new calls and carries out the outputs. Tokens of earlier steps
/// still reach their callers.
pub fn close(shell: &mut impl NodeShell, reason: &CloseReason) {
    shell.core().handle_close(reason);
    carry_out_all(shell);
}

fn carry_out_all(shell: &mut impl NodeShell) {
    while let Some(output) = shell.core().poll_output() {
        shell.carry_out(output);
    }
    shell.flush();
}

fn call_device<S: NodeShell, T>(
    shell: &mut S,
    call: impl FnOnce(&mut NodeCore<S::Executor>) -> Result<T, ExecutorError>,
) -> Result<T, ExecutorError> {
    shell.device_call_begins();
    let returned = call(shell.core());
    shell.device_call_ends();
    returned
}
