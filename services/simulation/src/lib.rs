//! Simulates a whole cluster in one thread, in virtual time, from a seed.
//!
//! The simulation runs the shipped cores: on each node `NodeCore` with the `sim` executor and
//! `TransferDriver` with the transfer protocol, on each router `RouterCore` and an `AnswerCore` for
//! each request. `Coordinator` and `Participant` update the weights. Routers and nodes exchange the
//! shipped gRPC messages, and nodes check them as the service does. Network, clock, threads, etcd
//! and faults are simulated: messages are lost, delayed, duplicated and reordered, chunks are
//! corrupted, processes are killed, paused and drained, ranks die, nodes are partitioned, etcd is
//! unreachable, routers restart, clients disconnect. Weight updates run meanwhile, and their
//! trainers die.
//!
//! After every event the simulation asserts the invariants of the process concerned. It compares
//! every token with the expected answer, and the KV that a step reads with that of the weights in
//! use. No two nodes use different bytes of weights under one version. At the end every request has
//! ended once and no resource of any request is left.
//!
//! [`run`] is one run. A failing run panics; its seed gives the same run again. [`explore`] runs
//! many seeds.
//!
//! [`replay()`] runs recorded requests on up to a thousand nodes. Steps and transfers take the time
//! of a cost model. For speed, a replay keeps no KV and checks tokens and invariants at the end
//! only.

#![forbid(unsafe_code)]

mod answer;
#[cfg(test)]
mod bounds;
mod calls;
mod checks;
mod coverage;
mod data_connections;
mod device;
mod etcd;
mod event_loop;
mod events;
mod faults;
mod grammars;
mod link_ends;
mod membership;
#[cfg(test)]
mod misbehaving;
#[cfg(test)]
mod moves;
mod nodes;
mod outages;
#[cfg(test)]
mod overload;
#[cfg(test)]
mod planted;
mod process;
mod process_io;
#[cfg(test)]
mod recovery;
mod replay;
mod router;
mod router_connections;
mod scenario;
#[cfg(test)]
mod selection;
mod stats;
mod tiers;
mod transport;
mod updates;
mod weights;

pub use coverage::Coverage;
pub use device::StepCost;
pub use replay::{Progress, ReplayConfig, ReplayOutcome, TraceRequest, replay};
pub use router::Pick;
pub use scenario::LinkCost;
pub use stats::{Histogram, ServedRequest};

use std::{ops::Range, panic, time::Duration};

use event_loop::Simulation;
use scenario::Scenario;

/// Result of a run without a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub coverage: Coverage,
    /// Longest time between two tokens of a request.
    pub longest_gap: Duration,
    /// Longest time between two tokens of a request, without the gap after token 0 (the possible
    /// hand-over).
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

/// A seed whose run violated an invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeedFailure {
    pub seed: u64,
    pub message: String,
}

/// Runs the scenarios of these seeds until one fails. `progress` is called after each seed.
pub fn explore(seeds: Range<u64>, progress: impl FnMut(u64)) -> Result<Coverage, SeedFailure> {
    explore_with(|seed| run(seed, false).coverage, seeds, progress)
}

/// Runs these seeds with `run` until one panics. `progress` is called after each seed.
pub fn explore_with(
    run: impl Fn(u64) -> Coverage + panic::RefUnwindSafe,
    seeds: Range<u64>,
    mut progress: impl FnMut(u64),
) -> Result<Coverage, SeedFailure> {
    let mut coverage = Coverage::default();
    for seed in seeds {
        let ran = panic::catch_unwind(|| run(seed));
        coverage.merge(&ran.map_err(|panic| {
            let message = engine::executor::panic_message(&*panic);
            SeedFailure { seed, message }
        })?);
        progress(seed);
    }
    Ok(coverage)
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
            eprintln!(
                "simulation: seed {seed} failed; `baton sim --seed {seed}` prints its events"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exploration_ends_at_the_first_seed_that_fails() {
        let run = |seed| {
            assert_ne!(seed, 5, "a planted failure");
            let mut coverage = Coverage::default();
            coverage.count("runs");
            coverage
        };
        let mut seen = Vec::new();
        let failure = explore_with(run, 2..9, |seed| seen.push(seed)).unwrap_err();
        assert_eq!((failure.seed, seen), (5, vec![2, 3, 4]));
        assert!(failure.message.contains("a planted failure"), "{}", failure.message);
        assert_eq!(explore_with(run, 6..9, |_| ()).unwrap().get("runs"), 3);
    }
}
