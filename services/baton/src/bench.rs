//! Benchmarks for operators: one engine alone, or any server with the OpenAI API.

pub mod engine;
pub mod serve;
pub mod stats;
mod steps;
mod tune;

use std::{fs::File, path::Path};

use anyhow::{Context, Result};
use clap::Subcommand;

#[derive(Subcommand)]
pub enum BenchCommand {
    /// Prefill and decode throughput of the engine in this process; no network.
    Engine(engine::EngineArgs),
    /// Latency and throughput of a running server, Baton or another.
    Serve(serve::ServeArgs),
}

pub fn run(command: BenchCommand) -> Result<()> {
    match command {
        BenchCommand::Engine(args) => engine::run(args),
        BenchCommand::Serve(args) => serve::run(args),
    }
}

/// Creates the file that a flag names. Called before the measurement, so that an invalid path does
/// not cost minutes.
pub fn output_file(flag: &str, path: Option<&Path>) -> Result<Option<File>> {
    let create =
        |path: &Path| File::create(path).with_context(|| format!("{flag} {}", path.display()));
    path.map(create).transpose()
}
