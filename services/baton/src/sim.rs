//! `baton sim`: explores faults in the simulation of a cluster.

use anyhow::{Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

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
    if let Some(seed) = args.seed {
        // A failure panics after its events.
        print!("{}", simulation::run(seed, true).coverage);
        return Ok(());
    }
    let bar = ProgressBar::new(args.seeds).with_style(
        ProgressStyle::with_template("{pos}/{len} seeds {wide_bar} {elapsed}")
            .expect("the template is constant"),
    );
    let seeds = args.first..args.first + args.seeds;
    let explored = simulation::explore(seeds, |_| bar.inc(1));
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
            let again = std::panic::catch_unwind(|| simulation::run(seed, true));
            match again {
                Ok(_) => bail!("seed {seed} failed once and then passed: {message}"),
                Err(_) => bail!("seed {seed} failed: {message}"),
            }
        }
    }
}
