//! Result of tuning a GPU's GEMMs, by rows.

use std::{collections::BTreeMap, time::Duration};

use anyhow::Result;
use engine::executor::{ExecutorLimits, cuda::CudaModel};
use kernels::cuda::TuningSettings;
use serde::Serialize;

use super::engine::EngineVariant;

/// GEMMs of one number of rows that were timed at this start: the four of a layer, that of the
/// logits, or all five. Times are sums.
#[derive(Default, Serialize)]
pub(super) struct TunedRows {
    rows: usize,
    gemms: usize,
    /// With the algorithm that cuBLASLt's heuristic chooses.
    heuristic_ms: f64,
    tuned_ms: f64,
}

/// Tunes unless `tune_s` is 0, and prints errors.
pub(super) fn tune(
    model: &mut CudaModel,
    limits: &ExecutorLimits,
    variant: &EngineVariant,
) -> Result<Vec<TunedRows>> {
    if variant.tune_s == 0 {
        return Ok(Vec::new());
    }
    let folder = match &variant.tune_dir {
        Some(folder) => Some(folder.clone()),
        None => config::cache_folder(&config::environment_of(std::env::vars_os())?),
    };
    let tuning = TuningSettings { folder, within: Duration::from_secs(variant.tune_s) };
    let tuned = model.tune(limits, &tuning)?;
    tuned.faults.iter().for_each(|fault| eprintln!("{fault}"));
    let timed = tuned.times.len();
    if timed > 0 {
        let (known, left) = (tuned.known, tuned.left);
        eprintln!(
            "{timed} GEMMs are tuned, {known} were known, {left} are left for the next start"
        );
    }
    let mut by_rows = BTreeMap::new();
    for time in &tuned.times {
        let row: &mut TunedRows = by_rows.entry(time.shape.rows).or_default();
        row.rows = time.shape.rows;
        row.gemms += 1;
        row.heuristic_ms += time.heuristic.as_secs_f64() * 1e3;
        row.tuned_ms += time.chosen.as_secs_f64() * 1e3;
    }
    Ok(by_rows.into_values().collect())
}
