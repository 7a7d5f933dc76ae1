//! `baton`: the operator's command.
//!
//! `up` runs a whole cluster on this machine, `bench` measures an engine or a server, `model` fetches
//! weights, `doctor` says what this machine has. Each lives in a module of its own; this file only reads the command line.

// Only `up::process` starts processes in a way that the standard library does not offer.
#![deny(unsafe_code)]

mod bench;
mod doctor;
mod http_client;
mod hub;
mod model_store;
mod sse;
mod staging;
mod up;

use std::process::ExitCode;

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
