//! Measuring: an engine alone, or any server that speaks the OpenAI API.

mod collectives;
mod engine;
mod ring;
mod serve;
mod speculate;
mod stats;
mod steps;
mod trace;
mod transfer;
mod tune;

use std::{fs::File, path::Path};

use anyhow::{Context, Result};
use clap::Subcommand;

#[derive(Subcommand)]
pub enum BenchCommand {
    /// Sums over the GPUs of this host, ours and NCCL's; a process for each, no model.
    Collectives(collectives::CollectivesArgs),
    /// Prefill and decode speed of the engine in this process; no network.
    Engine(engine::EngineArgs),
    /// How long a plan takes from a node to the last of its ranks; several processes, no model.
    Ring(ring::RingArgs),
    /// Load and latency of a running server, ours or another.
    Serve(serve::ServeArgs),
    /// What guessing tokens ahead is worth on a prompt that the answer repeats; no network.
    Speculate(speculate::SpeculateArgs),
    /// How fast KV moves from one GPU to another, beside plain copies; two processes, no model.
    Transfer(transfer::TransferArgs),
}

pub fn run(command: BenchCommand) -> Result<()> {
    match command {
        BenchCommand::Collectives(args) => collectives::run(args),
        BenchCommand::Engine(args) => engine::run(args),
        BenchCommand::Ring(args) => ring::run(args),
        BenchCommand::Serve(args) => serve::run(args),
        BenchCommand::Speculate(args) => speculate::run(args),
        BenchCommand::Transfer(args) => transfer::run(args),
    }
}

/// The file that a flag names. Opened before anything is measured: a wrong path shall not cost
/// minutes.
fn output_file(flag: &str, path: Option<&Path>) -> Result<Option<File>> {
    let create =
        |path: &Path| File::create(path).with_context(|| format!("{flag} {}", path.display()));
    path.map(create).transpose()
}
