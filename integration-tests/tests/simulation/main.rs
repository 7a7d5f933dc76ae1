//! A whole cluster in one thread and in virtual time, without a socket, from one number.
//!
//! The real pure cores are joined: on each node the engine's scheduler and step loop over its `sim`
//! executor and the transfer protocol's core, at the router the directory of nodes. What lies
//! between them is simulated: threads, calls, notices that are lost, delayed, repeated and overtake
//! each other, data that is delayed, damaged and cut off. Nodes are killed, frozen, cut off and
//! drained, and clients leave, at moments that the seed decides.
//!
//! After every event the books of the scheduler concerned are checked. Every token is compared with
//! the oracle's as it is shown. At the end every request has ended once, and nothing of any is left.
//!
//! * `BATON_SIM_SEED=17 cargo test -p integration-tests --test simulation seeds -- --nocapture`
//!   runs one seed and prints what happens.
//! * `BATON_SIM_SEEDS=10000` runs so many, from `BATON_SIM_FIRST` (0) on.

mod attempt;
mod blows;
mod calls;
mod checks;
mod device;
mod driver_thread;
mod engine_thread;
mod journey;
mod network;
mod nodes;
mod observers;
mod process;
mod random;
mod request;
mod router;
mod scenario;
mod tally;
mod wires;
mod world;

use scenario::Scenario;
use tally::Tally;
use world::World;

/// In an ordinary test run.
const SEEDS: u64 = 3000;

/// What so many seeds must have seen, each at least once.
const REACHED: [&str; 30] = [
    "alone",
    "arrived",
    "attempt busy",
    "attempt draining",
    "attempt lost",
    "attempt stale",
    "attempt transfer failed",
    "calls cut",
    "chunks damaged",
    "complete",
    "complete after a retry",
    "cuts",
    "data connections broken",
    "deadline",
    "delivered",
    "drained in time",
    "freezes",
    "kills",
    "left",
    "must complete",
    "no decode node",
    "notices resent",
    "notices straggled",
    "preemptions",
    "receive failed",
    "reserved",
    "send failed",
    "the transfer queue is full",
    "token 0 was all",
    "token 0 was late",
];

/// Prints how to run a seed again, when it fails.
struct Running(u64);

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self(seed) = self;
            eprintln!(
                "seed {seed} failed. Alone, with all that happens: BATON_SIM_SEED={seed} \
                 cargo test -p integration-tests --test simulation seeds -- --nocapture"
            );
        }
    }
}

fn run(seed: u64, is_traced: bool) -> (Tally, u64) {
    let _running = Running(seed);
    let scenario = Scenario::new(seed);
    if is_traced {
        eprintln!("{scenario:#?}");
    }
    let mut world = World::new(seed, scenario, is_traced);
    world.run();
    world.check_quiet();
    let (mut tally, digest) = world.outcome();
    if world.scenario.temper.must_complete() {
        tally.count("must complete");
        let unfinished = ["attempts spent", "deadline", "busy", "no decode node"];
        for end in unfinished {
            assert_eq!(tally.of(end), 0, "a request did not complete: {end}");
        }
    }
    (tally, digest)
}

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value}: a number is wanted")))
}

#[test]
fn seeds_lose_no_token_and_no_block() {
    if let Some(seed) = number("BATON_SIM_SEED") {
        let (tally, _) = run(seed, true);
        return eprint!("{tally}");
    }
    let first = number("BATON_SIM_FIRST").unwrap_or(0);
    let count = number("BATON_SIM_SEEDS").unwrap_or(SEEDS);
    let mut all = Tally::default();
    for seed in first..first + count {
        all.add_all(&run(seed, false).0);
    }
    eprint!("{all}");
    if (first, count) == (0, SEEDS) {
        for what in REACHED {
            assert_ne!(all.of(what), 0, "no seed saw: {what}");
        }
    }
}

#[test]
fn a_seed_gives_the_same_run_every_time() {
    for seed in 0..10 {
        assert_eq!(run(seed, false), run(seed, false), "seed {seed}");
    }
}
