//! Seeds of the cluster simulation.
//!
//! * `baton sim --seed 17` runs one seed and prints its events.
//! * `BATON_SIM_SEEDS=10000` runs that many seeds, from `BATON_SIM_FIRST` (0) on.

use std::process::Command;

use anyhow::Result;
use integration_tests::{cluster::bin_dir, command::output};
use simulation::{SeedFailure, explore, run};

/// Seeds of an ordinary test run.
const SEEDS: u64 = 3000;

/// The ordinary seeds reach each of these at least once.
const REACHED: [&str; 70] = [
    "KV kept",
    "arrived",
    "arrived KV launched at once",
    "attempt busy",
    "attempt deadline",
    "attempt draining",
    "attempt internal",
    "attempt lost",
    "attempt other weights",
    "attempt stale",
    "attempt transfer failed",
    "attempt weights changed",
    "blocks kept",
    "blocks recovered",
    "breaker of a node opened",
    "breaker of a pair opened",
    "busy",
    "chunks corrupted",
    "client left",
    "commits learned from a peer",
    "commits lost",
    "commits missed",
    "complete",
    "complete after a retry",
    "control messages resent",
    "coordinators lost",
    "data connections closed",
    "deadline",
    "delivered",
    "drained in time",
    "drains",
    "ended by an update",
    "engines failed",
    "etcd outages",
    "kills",
    "must complete",
    "no decode node",
    "nodes caught up",
    "nodes lost in an update",
    "partitions",
    "paused",
    "pauses",
    "peers asked",
    "predicted hand-over",
    "predicted local prefill",
    "preemptions",
    "saves cancelled for an admission",
    "saves to tiers",
    "loads from tiers",
    "ranks lost",
    "receive failed",
    "refused",
    "refused, in flight",
    "refused, waiting",
    "reserved",
    "reserved, local prefill",
    "router connections closed",
    "router restarts",
    "send failed",
    "slow node excluded",
    "structured output migrated",
    "token 0 finished",
    "transfer queue full",
    "turns",
    "updates aborted",
    "updates committed",
    "weights changed",
    "weights lost",
    "weights not received",
    "weights restored",
];

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("invalid {name}: {value}; expected a number")))
}

#[test]
fn seeds_lose_no_token_and_no_block() {
    let first = number("BATON_SIM_FIRST").unwrap_or(0);
    let count = number("BATON_SIM_SEEDS").unwrap_or(SEEDS);
    let explored = explore(first..first + count, |_| ());
    let coverage = explored.unwrap_or_else(|SeedFailure { seed, message }| {
        panic!("seed {seed} failed: {message}");
    });
    eprint!("{coverage}");
    if (first, count) == (0, SEEDS) {
        let missing: Vec<_> = REACHED.iter().filter(|state| coverage.get(state) == 0).collect();
        assert!(missing.is_empty(), "no seed reached: {missing:?}");
    }
}

#[test]
fn baton_sim_prints_scenario_events_and_states_of_a_seed() -> Result<()> {
    let output = output(Command::new(bin_dir().join("baton")).args(["sim", "--seed", "17"]))?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.starts_with("Scenario {"), "{said:.1000}");
    let events = said.lines().filter(|line| line.contains(" ms Input {")).count();
    assert!(events > 10, "{events} events: {said:.1000}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("processes"));
    Ok(())
}

/// Seeds that found a bug, each with the bug.
const REGRESSIONS: [(u64, &str); 4] = [
    (6496, "fluid nodes that prefilled for each other waited for each other's KV memory"),
    (12185, "a complete constrained answer could not be continued where stop tokens are ignored"),
    (20391, "a complete constrained answer could not be continued where stop tokens are ignored"),
    (25396, "a complete constrained answer could not be continued where stop tokens are ignored"),
];

#[test]
fn seeds_that_found_a_bug_pass() {
    for (seed, bug) in REGRESSIONS {
        eprintln!("seed {seed}: {bug}");
        run(seed, false);
    }
}

#[test]
fn a_seed_gives_an_equal_run_every_time() {
    for seed in 0..10 {
        assert_eq!(run(seed, false), run(seed, false), "seed {seed}");
    }
}
