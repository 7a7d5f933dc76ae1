//! Measuring: an engine alone, or any server that speaks the OpenAI API.

mod engine;
mod serve;
mod stats;

use anyhow::Result;
use clap::Subcommand;

#[derive(Subcommand)]
pub enum BenchCommand {
    /// Prefill and decode speed of the engine in this process; no network.
    Engine(engine::EngineArgs),
    /// Load and latency of a running server, ours or another.
    Serve(serve::ServeArgs),
}

pub fn run(command: BenchCommand) -> Result<()> {
    match command {
        BenchCommand::Engine(args) => engine::run(args),
        BenchCommand::Serve(args) => serve::run(args),
    }
}
