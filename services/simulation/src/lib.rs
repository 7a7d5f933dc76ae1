//! Simulates a whole cluster in one thread, in virtual time, from a seed.
//!
//! The simulation runs the shipped cores: on each node `NodeCore` with the `sim` executor and
//! `TransferDriver` with the transfer protocol, on each router `RequestCore` and the directory of nodes.
//! Routers and nodes exchange the shipped gRPC messages, and nodes check them as the service does.
//! Network, clock, threads, etcd and faults are simulated: messages are lost, delayed, duplicated and
//! reordered, chunks are corrupted, processes are killed, paused and drained, ranks die, nodes are
//! partitioned, etcd is unreachable, routers restart, clients disconnect.
//!
//! After every event the simulation asserts the invariants of the process concerned. It compares
//! every token with the expected answer. At the end every request has ended once and no resource of
//! any request is left.
//!
//! [`run`] is one run. A failing run panics; its seed gives the same run again.

#![forbid(unsafe_code)]

mod answer;
#[cfg(test)]
mod bounds;
mod checks;
mod coverage;
mod data_connections;
mod device;
mod event_loop;
mod faults;
mod grammars;
mod membership;
#[cfg(test)]
mod misbehaving;
mod nodes;
#[cfg(test)]
mod overload;
#[cfg(test)]
mod planted;
mod process;
#[cfg(test)]
mod recovery;
mod router;
mod router_connections;
mod scenario;
#[cfg(test)]
mod selection;
mod tiers;
mod transport;

pub use coverage::Coverage;
pub use router::Pick;

use std::time::Duration;

use event_loop::Simulation;
use scenario::Scenario;

/// Result of a run without a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub coverage: Coverage,
    /// Longest time between two tokens of a request.
    pub longest_gap: Duration,
    /// Longest time between two tokens of a request, without the gap after token 0 (the possible hand-over).
    pub longest_decode_gap: Duration,
    /// Longest time between two tokens of each request.
    pub pauses: Vec<Duration>,
    /// The attempts of all requests, by router and time.
    pub picks: Vec<Pick>,
    /// Longest time from the loss of a peer until the blocks of a transfer with the peer were free.
    pub longest_release: Duration,
    /// Hash of the event sequence: equal for equal runs.
    pub digest: u64,
}

/// Runs the scenario of a seed, and panics when an invariant does not hold. With `is_traced` every
/// event is printed to stderr.
pub fn run(seed: u64, is_traced: bool) -> Outcome {
    run_scenario(seed, Scenario::new(seed), is_traced)
}

fn run_scenario(seed: u64, scenario: Scenario, is_traced: bool) -> Outcome {
    let _seed = PrintedOnPanic(seed);
    if is_traced {
        eprintln!("{scenario:#?}");
    }
    let mut simulation = Simulation::new(seed, scenario, is_traced);
    simulation.run();
    simulation.check_idle();
    let mut outcome = simulation.outcome();
    if simulation.scenario.severity.must_complete() {
        outcome.coverage.count("must complete");
        for end in ["attempts spent", "deadline", "busy", "refused", "no decode node"] {
            assert_eq!(outcome.coverage.get(end), 0, "a request did not complete: {end}");
        }
    }
    outcome
}

struct PrintedOnPanic(u64);

impl Drop for PrintedOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self(seed) = self;
            eprintln!("simulation: seed {seed} failed; run it again with BATON_SIM_SEED={seed}");
        }
    }
}
