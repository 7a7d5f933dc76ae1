//! `baton sim`: explores faults in the simulation of a cluster.

use anyhow::{Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use simulation::Coverage;

#[derive(Args, Clone)]
pub struct SimArgs {
    /// Number of seeds. Each seed is one scenario: nodes, network, requests and faults.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    seeds: u64,
    /// First seed; the seeds count up from it.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=1 << 60))]
    first: u64,
    /// Run this seed alone and print its scenario and every event.
    #[arg(long, conflicts_with_all = ["seeds", "first"])]
    seed: Option<u64>,
}

pub fn run(args: SimArgs) -> Result<()> {
    run_with(args, |seed, is_traced| simulation::run(seed, is_traced).coverage)
}

/// Runs the seeds with `run`, whose second argument is whether it prints the scenario and every
/// event.
fn run_with(args: SimArgs, run: fn(u64, bool) -> Coverage) -> Result<()> {
    if let Some(seed) = args.seed {
        // A failure panics after its events.
        print!("{}", run(seed, true));
        return Ok(());
    }
    let bar = ProgressBar::new(args.seeds).with_style(
        ProgressStyle::with_template("{pos}/{len} seeds {wide_bar} {elapsed}")
            .expect("the template is constant"),
    );
    let seeds = args.first..args.first + args.seeds;
    let explored = simulation::explore_with(|seed| run(seed, false), seeds, |_| bar.inc(1));
    bar.finish_and_clear();
    match explored {
        Ok(coverage) => {
            println!("{} seeds, no failure; states that they reached:", args.seeds);
            print!("{coverage}");
            Ok(())
        }
        Err(failure) => {
            let (seed, message) = (failure.seed, failure.message);
            eprintln!("seed {seed} failed: {message}\n\nscenario and events of seed {seed}:");
            // Runs the same events again, and prints them until the same panic.
            let again = std::panic::catch_unwind(|| run(seed, true));
            match again {
                Ok(_) => bail!("seed {seed} failed once and then passed: {message}"),
                Err(_) => bail!("seed {seed} failed: {message}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    thread_local! {
        static RUNS: RefCell<Vec<(u64, bool)>> = const { RefCell::new(Vec::new()) };
    }

    fn count(seed: u64, is_traced: bool) {
        RUNS.with_borrow_mut(|runs| runs.push((seed, is_traced)));
    }

    /// Returns the error of exploring the seeds from 3 on, and the runs.
    fn explore(run: fn(u64, bool) -> Coverage) -> (String, Vec<(u64, bool)>) {
        let error = run_with(SimArgs { seeds: 10, first: 3, seed: None }, run).unwrap_err();
        (format!("{error:#}"), RUNS.take())
    }

    #[test]
    fn failing_seed_is_named_and_run_again_with_its_events() {
        let (error, runs) = explore(|seed, is_traced| {
            count(seed, is_traced);
            assert_ne!(seed, 5, "a planted failure");
            Coverage::default()
        });
        assert!(error.starts_with("seed 5 failed: "), "{error}");
        assert!(error.contains("a planted failure"), "{error}");
        assert_eq!(runs, [(3, false), (4, false), (5, false), (5, true)]);
    }

    #[test]
    fn seed_that_passes_the_second_time_is_named() {
        let (error, runs) = explore(|seed, is_traced| {
            count(seed, is_traced);
            assert!(is_traced, "a planted failure");
            Coverage::default()
        });
        assert!(error.starts_with("seed 3 failed once and then passed: "), "{error}");
        assert_eq!(runs, [(3, false), (3, true)]);
    }
}
