//! `baton`: the operator's command. This file only parses the command line.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use baton::{bench, doctor, model_store, up};
use clap::{Parser, Subcommand};

/// Runs, measures and looks after a Baton cluster.
#[derive(Parser)]
#[command(name = "baton", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Starts a router, prefill nodes and decode nodes on this machine and looks after them.
    Up(up::UpArgs),
    /// Measures an engine alone or a running server.
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Fetches and lists models.
    #[command(subcommand)]
    Model(model_store::ModelCommand),
    /// Prints what this machine has for serving, what is missing, and what to do about it.
    Doctor(doctor::DoctorArgs),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Up(args) => up::run(args),
        Command::Bench(command) => bench::run(command),
        Command::Model(command) => model_store::run(command),
        Command::Doctor(args) => doctor::run(args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("baton: {error:#}");
            ExitCode::FAILURE
        }
    }
}
