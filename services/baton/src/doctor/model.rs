//! The model of `baton doctor`: its family, the formats of its matrices, and what computes with
//! them on this machine, or why a node refuses the model. No weight is read.

use std::{fmt, path::Path};

use anyhow::{Context as _, Result};
use engine::{defaults::ModelSizes, executor::cuda::check_model};
use kernels::{
    KvFormat, Shard, WeightFormat,
    cpu::{CpuBackend, CpuOptions, Isa},
    cuda::CudaOptions,
};
use model::{Adapter, Checkpoint, Int4Sizes, LoadFormat, MatrixFormat, ModelConfig, ModelError};
use serde::Serialize;

/// A model whose files or configuration could be opened.
pub(super) struct OpenedModel {
    checkpoint: Checkpoint,
    weights: WeightFormat,
    kv: KvFormat,
    /// Reason why the files of the weights are invalid.
    invalid: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct ModelReport {
    family: &'static str,
    parameters: u64,
    /// Numbers of ranks that `node.tp` may have.
    ranks: Vec<usize>,
    formats: Vec<MatrixFormat>,
    /// Kernels of the forward pass; `None`: the model is refused.
    computed_by: Option<String>,
    refused: Option<String>,
    /// Memory of LoRA adapters, or the reason why nodes refuse them.
    adapters: String,
}

impl OpenedModel {
    /// Opens a model that nodes would compute with these formats of weights and KV.
    ///
    /// # Errors
    /// When the configuration is invalid or unsupported.
    pub(super) fn open(path: &Path, number_formats: (WeightFormat, KvFormat)) -> Result<Self> {
        let (checkpoint, invalid) = match Checkpoint::open(path, LoadFormat::Auto) {
            Ok(checkpoint) => (checkpoint, None),
            Err(error) => {
                let alone = Checkpoint::open(path, LoadFormat::Dummy { seed: 0 })
                    .with_context(|| format!("cannot read the model {}", path.display()))?;
                // A configuration without weights is no fault of either.
                let is_missing = matches!(error, ModelError::NotAModel { .. });
                let invalid = (!is_missing).then(|| error.to_string());
                (alone, invalid)
            }
        };
        let (weights, kv) = number_formats;
        Ok(Self { checkpoint, weights, kv, invalid })
    }

    /// Returns the sizes of a node of one rank.
    pub(super) fn sizes(&self, is_gpu: bool) -> ModelSizes {
        ModelSizes::of(&self.checkpoint, Shard::WHOLE, (self.weights, self.kv), is_gpu)
    }

    /// Reports a node of one rank on a GPU of this compute capability, or on the CPU.
    pub(super) fn report(self, gpu_compute: Option<u32>) -> ModelReport {
        let Self { checkpoint, weights, kv, invalid } = self;
        // Without files of weights there are no formats.
        let (config, formats) = (checkpoint.config(), checkpoint.matrix_formats());
        // GPUs do not support q8: a node computes on the CPU.
        let gpu_compute = gpu_compute.filter(|_| weights != WeightFormat::Q8);
        let refused = invalid.or_else(|| {
            let options = CudaOptions { kv, ..CudaOptions::new(weights) };
            let checked = check_model(&checkpoint, Shard::WHOLE, (&options, gpu_compute?));
            checked.err().map(|error| error.to_string())
        });
        let computed_by = || match gpu_compute {
            Some(compute) => on_gpu(&checkpoint, weights, &formats, compute),
            None => on_cpu(&checkpoint, weights, &formats),
        };
        ModelReport {
            adapters: adapters(config, gpu_compute.is_some()),
            family: config.family.name(),
            parameters: config.parameter_count(),
            ranks: config.rank_counts(false).collect(),
            computed_by: refused.is_none().then(computed_by),
            formats,
            refused,
        }
    }
}

impl ModelReport {
    pub(super) fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }
}

/// Returns the memory of LoRA adapters of the model, or the reason why nodes refuse them.
fn adapters(config: &ModelConfig, is_gpu: bool) -> String {
    // GPUs store adapters in bf16.
    let divisor = if is_gpu { 2 } else { 1 };
    match Adapter::bytes_of_rank(config, 16) {
        Some(bytes) => {
            let mib = (bytes / divisor).div_ceil(1 << 20);
            format!("LoRA, {mib} MiB for rank 16 on all matrices")
        }
        None => "none: models with experts refuse LoRA adapters".to_owned(),
    }
}

fn on_cpu(checkpoint: &Checkpoint, weights: WeightFormat, formats: &[MatrixFormat]) -> String {
    let options = CpuOptions { weights, threads: 1, isa: Isa::Auto };
    let isa = CpuBackend::new(options).map_or("portable", |backend| backend.isa_name());
    let weights = match weights {
        // There are no FP8 kernels.
        WeightFormat::Fp8 => WeightFormat::Bf16,
        weights => weights,
    };
    let experts =
        if checkpoint.config().experts().is_some() { ", one expert after the other" } else { "" };
    let others = formats.iter().filter(|format| !format.name.starts_with("INT4"));
    let packed = packed_int4(checkpoint, false);
    format!("CPU kernels ({isa}) for {weights}{experts}{packed}{}", converted(weights, others))
}

/// Returns which matrices in INT4 a node keeps packed.
fn packed_int4(checkpoint: &Checkpoint, is_gpu: bool) -> String {
    match checkpoint.int4_sizes(Shard::WHOLE, is_gpu) {
        Int4Sizes { packed_elements: 0, dequantized: 0, .. } => String::new(),
        Int4Sizes { packed_elements: 0, .. } => ", matrices in INT4 are dequantized".to_owned(),
        Int4Sizes { dequantized: 0, .. } => ", matrices in INT4 stay packed".to_owned(),
        Int4Sizes { dequantized, .. } => {
            format!(", matrices in INT4 stay packed but {dequantized}, which are dequantized")
        }
    }
}

fn on_gpu(
    checkpoint: &Checkpoint,
    weights: WeightFormat,
    formats: &[MatrixFormat],
    compute: u32,
) -> String {
    let config = checkpoint.config();
    let experts = match config.experts() {
        Some(_) if config.has_mxfp4_experts() => ", grouped GEMMs for experts in MXFP4",
        Some(_) => ", grouped GEMMs for experts",
        None => "",
    };
    let gemms =
        format!("cuBLASLt and kernels for few rows (sm_{compute}), weights in {weights}{experts}");
    match weights {
        WeightFormat::Fp8 => format!(
            "{gemms}; matrices stored in FP8 with a scale for the matrix or each row are taken as they are, and others are \
             quantized while the node loads"
        ),
        _ => {
            let is_kept = |name: &str| {
                name.starts_with("MXFP4")
                    || weights == WeightFormat::Bf16 && name.starts_with("INT4")
            };
            let others = formats.iter().filter(|format| !is_kept(&format.name));
            let packed = match weights {
                WeightFormat::Bf16 => packed_int4(checkpoint, true),
                _ => String::new(),
            };
            format!("{gemms}{packed}{}", converted(weights, others))
        }
    }
}

/// Returns which formats a node converts to `weights`.
fn converted<'a>(
    weights: WeightFormat,
    formats: impl IntoIterator<Item = &'a MatrixFormat>,
) -> String {
    let others = formats.into_iter().map(|format| format.name.as_str());
    let others: Vec<&str> =
        others.filter(|name| !name.eq_ignore_ascii_case(&weights.to_string())).collect();
    match others.as_slice() {
        [] => String::new(),
        others => {
            format!("; converted to {weights} while the node loads: {}", others.join(", "))
        }
    }
}

impl fmt::Display for ModelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { family, parameters, ranks, formats, computed_by, refused: _, adapters } = self;
        let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
        let ranks = ranks.join(", ");
        writeln!(f, "model      {family}, {parameters} parameters, node.tp may be {ranks}")?;
        for MatrixFormat { name, matrices } in formats {
            writeln!(f, "matrices   {matrices} in {name}")?;
        }
        if let Some(computed_by) = computed_by {
            writeln!(f, "computes   {computed_by}")?;
        }
        writeln!(f, "adapters   {adapters}")
    }
}
