//! `baton-bench`: benchmarks for developers of the engine, the ranks, the transports and the
//! router.
//!
//! Operators use `baton bench`, which shares the engine benchmark and the statistics with this
//! program. `baton-bench` is not shipped.

#![forbid(unsafe_code)]

mod admission;
mod certificates;
mod collectives;
mod engine;
mod pick;
mod ring;
mod router;
mod speculate;
mod transfer;

use std::process::ExitCode;

use clap::Parser;

/// Benchmarks for developers of Baton.
#[derive(Parser)]
#[command(name = "baton-bench", version, arg_required_else_help = true)]
enum BenchCli {
    /// Time of the scheduler for a turn of a long cached conversation and for a prefill step, with
    /// and without KV tiers; no model.
    Admission(admission::AdmissionArgs),
    /// Writes the certificate of a CA and a certificate for measurements with TLS.
    Certificates(certificates::CertificatesArgs),
    /// All-reduce latency over the GPUs of this host, Baton's kernels and NCCL; one process for
    /// each GPU.
    Collectives(collectives::CollectivesArgs),
    /// Prefill and decode throughput of one engine, as `baton bench engine`, with one part of it
    /// changed.
    Engine(engine::EngineVariantArgs),
    /// Time in which a router chooses the nodes of an attempt; no network.
    Pick(pick::PickArgs),
    /// Time for a step plan from the node to the last of its ranks; several processes, no model.
    Ring(ring::RingArgs),
    /// CPU time of the router per request and per streamed token; no model computes.
    Router(router::RouterArgs),
    /// Throughput with speculative decoding on a prompt that the answer repeats; no network.
    Speculate(speculate::SpeculateArgs),
    /// KV transfer throughput between two GPUs by each transport, compared with plain copies; two
    /// processes.
    Transfer(transfer::TransferArgs),
}

fn main() -> ExitCode {
    let outcome = match BenchCli::parse() {
        BenchCli::Admission(args) => admission::run(args),
        BenchCli::Certificates(args) => certificates::run(args),
        BenchCli::Collectives(args) => collectives::run(args),
        BenchCli::Engine(args) => engine::run(args),
        BenchCli::Pick(args) => pick::run(args),
        BenchCli::Ring(args) => ring::run(args),
        BenchCli::Router(args) => router::run(args),
        BenchCli::Speculate(args) => speculate::run(args),
        BenchCli::Transfer(args) => transfer::run(args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("baton-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
