//! `baton-bench engine`: the benchmark of `baton bench engine` with parts of the engine switched
//! off or replaced.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use baton::bench::engine::{self, EngineArgs, EngineVariant};
use clap::{ArgAction::Set, Args};
use kernels::{
    cpu::Isa,
    cuda::{AttentionKind, CudaOptions},
};

#[derive(Args)]
pub(crate) struct EngineVariantArgs {
    #[command(flatten)]
    engine: EngineArgs,
    /// CPU instruction set [default: the fastest that the machine has].
    #[arg(long, default_value = "auto", value_parser = parse_isa)]
    isa: Isa,
    /// GPU attention kernels: auto, flash (FlashInfer for every shape) or plain (one kernel for
    /// every shape).
    #[arg(long, default_value = "auto", value_parser = parse_attention)]
    attention: AttentionKind,
    /// CUDA graphs for decode steps: on or off.
    #[arg(long, default_value = "on", value_parser = parse_switch, action = Set)]
    graphs: bool,
    /// Fused epilogues in skinny GEMMs: on or off.
    #[arg(long, default_value = "on", value_parser = parse_switch, action = Set)]
    fused: bool,
    /// Programmatic dependent launch of GPU kernels: on or off.
    #[arg(long, default_value = "on", value_parser = parse_switch, action = Set)]
    dependent_launch: bool,
    /// SMs that decode steps leave free, as a node reserves them for NCCL.
    #[arg(long, default_value_t = 0)]
    reserved_sms: u32,
    /// Busy-polling of the scheduling thread while a GPU step runs: on or off.
    #[arg(long, default_value = "on", value_parser = parse_switch, action = Set)]
    poll: bool,
    /// Seconds to search for the fastest cuBLASLt algorithms; 0: no search.
    #[arg(long, default_value_t = EngineVariant::default().tune_s, value_parser = clap::value_parser!(u64).range(0..=600))]
    tune: u64,
    /// Folder that keeps the algorithms found [default: baton in XDG_CACHE_HOME, else in .cache in
    /// HOME].
    #[arg(long)]
    tune_dir: Option<PathBuf>,
    /// Steps in flight.
    #[arg(long, default_value_t = EngineVariant::default().depth, value_parser = clap::value_parser!(u32).range(1..=8))]
    depth: u32,
    /// Peak bandwidth of the GPU's memory in GB/s [default: measured at the start].
    #[arg(long, value_name = "GB_PER_S")]
    peak_gb_per_s: Option<f64>,
}

fn parse_attention(text: &str) -> Result<AttentionKind, String> {
    match text {
        "auto" => Ok(AttentionKind::Auto),
        "flash" => Ok(AttentionKind::Flash),
        "plain" => Ok(AttentionKind::Plain),
        _ => Err("expected auto, flash or plain".to_owned()),
    }
}

fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("expected on or off".to_owned()),
    }
}

fn parse_isa(text: &str) -> Result<Isa, String> {
    let names = || Isa::ALL.map(Isa::name).join(", ");
    Isa::of_name(text).ok_or_else(|| format!("expected one of {}", names()))
}

pub(crate) fn run(args: EngineVariantArgs) -> Result<()> {
    engine::run(args.with_variant()?)
}

impl EngineVariantArgs {
    fn with_variant(self) -> Result<EngineArgs> {
        let peak_gb_per_s = self.peak_gb_per_s;
        ensure!(
            peak_gb_per_s.is_none_or(|peak| peak.is_finite() && peak > 0.0),
            "invalid --peak-gb-per-s: {}; expected more than 0",
            peak_gb_per_s.unwrap_or_default()
        );
        let mut args = self.engine;
        args.variant = EngineVariant {
            isa: self.isa,
            cuda: CudaOptions {
                attention: self.attention,
                graphs: self.graphs,
                fused: self.fused,
                dependent_launch: self.dependent_launch,
                reserved_sms: self.reserved_sms,
                ..EngineVariant::default().cuda
            },
            poll: self.poll,
            tune_s: self.tune,
            tune_dir: self.tune_dir,
            depth: self.depth,
            peak_gb_per_s,
        };
        Ok(args)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: EngineVariantArgs,
    }

    fn variant(flags: &[&str]) -> Result<EngineVariant> {
        let line = Line::try_parse_from([&["engine"], flags].concat())?;
        Ok(line.args.with_variant()?.variant)
    }

    #[test]
    fn engine_without_flags_measures_the_engine_of_baton_bench() {
        assert_eq!(variant(&[]).unwrap(), EngineVariant::default());
    }

    #[test]
    fn flags_change_one_part_of_the_engine() {
        let variant = variant(&["--graphs", "off", "--depth", "1"]).unwrap();
        let default = EngineVariant::default();
        let cuda = CudaOptions { graphs: false, ..default.cuda };
        let expected = EngineVariant { cuda, depth: 1, ..default };
        assert_eq!(variant, expected);
    }

    #[test]
    fn invalid_values_are_rejected_with_what_is_allowed() {
        for (flags, reason) in [
            (["--graphs", "no"], "expected on or off"),
            (["--isa", "sse"], "expected one of auto"),
            (["--peak-gb-per-s", "0"], "invalid --peak-gb-per-s: 0; expected more than 0"),
        ] {
            let error = variant(&flags).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
