//! `baton`: the operator's command. This file only parses the command line.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use baton::{
    bench, check, doctor, explain, keys, model_store, node, replay, sim, top, up, weights,
};
use clap::{Parser, Subcommand};

/// Operator's command for Baton clusters.
#[derive(Parser)]
#[command(name = "baton", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Subcommand)]
enum CliCommand {
    /// Starts a router, prefill nodes and decode nodes on this machine, and restarts those that
    /// die.
    Up(up::UpArgs),
    /// Sends one request over HTTP and one over gRPC to a running cluster, and reads its metrics.
    Check(check::CheckArgs),
    /// Measures one engine or a running server.
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Fetches and lists models.
    #[command(subcommand)]
    Model(model_store::ModelCommand),
    /// Lists, drains and undrains the nodes of a cluster, and resets their prefix caches.
    #[command(subcommand)]
    Node(node::NodeCommand),
    /// Updates the weights of the nodes without a restart.
    #[command(subcommand)]
    Weights(weights::WeightsCommand),
    /// Creates API keys for clients of a router and for operators.
    #[command(subcommand)]
    Keys(keys::KeysCommand),
    /// Reports GPUs, driver and libraries of this machine, missing parts and their remedies.
    Doctor(doctor::DoctorArgs),
    /// Explains a request: its nodes and why, the time of each stage, and what failed.
    Explain(explain::ExplainArgs),
    /// Shows nodes, requests and weight updates of a router, as the console of `router.admin` does.
    Top(top::TopArgs),
    /// Replays recorded requests on a simulated cluster of up to 1,000 nodes.
    Replay(replay::ReplayArgs),
    /// Simulates two nodes with and without disaggregation, and prints when disaggregation wins, as
    /// a Markdown page.
    BreakEven(replay::break_even::BreakEvenArgs),
    /// Explores faults: runs a simulated cluster with random faults for each seed, and prints the
    /// events of a failure.
    Sim(sim::SimArgs),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        CliCommand::Up(args) => up::run(args),
        CliCommand::Check(args) => check::run(args),
        CliCommand::Bench(command) => bench::run(command),
        CliCommand::Keys(command) => keys::run(command),
        CliCommand::Model(command) => model_store::run(command),
        CliCommand::Node(command) => node::run(command),
        CliCommand::Weights(command) => weights::run(command),
        CliCommand::Doctor(args) => doctor::run(args),
        CliCommand::Explain(args) => explain::run(args),
        CliCommand::Top(args) => top::run(args),
        CliCommand::Replay(args) => replay::run(args),
        CliCommand::BreakEven(args) => replay::break_even::run(args),
        CliCommand::Sim(args) => sim::run(args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("baton: {error:#}");
            ExitCode::FAILURE
        }
    }
}
