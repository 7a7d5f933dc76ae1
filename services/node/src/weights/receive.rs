//! Opens new weights, checks them against the model in use, and prepares them.

use std::{
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use engine::executor::{PrepareError, WeightUpdate};
use model::{Checkpoint, LoadFormat, ModelConfig, ModelError, StoredWeight};
use weight_transfer::{Plan, PlanError, Tensor, WeightVersion, digest};

use crate::{memory_limit, settings::SettingsError};

/// Reason why new weights cannot be used. The weights in use are unchanged.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReceiveError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(
        "cannot use the weights of {path}: {field} is {found}; expected {wanted}, as in the model in use"
    )]
    OtherModel { path: String, field: &'static str, found: String, wanted: String },
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("cannot hold a second copy of the weights: {0}")]
    Memory(#[from] SettingsError),
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    #[error("the update was aborted")]
    Cancelled,
}

/// Prepares the weights at `path` beside those in use and returns their version. Blocks. Stops early once
/// `cancelled` is set.
pub(super) fn receive(
    path: &Path,
    chunk_bytes: u64,
    model: &ModelConfig,
    update: &dyn WeightUpdate,
    cancelled: &AtomicBool,
) -> Result<WeightVersion, ReceiveError> {
    let check = || match cancelled.load(Ordering::Acquire) {
        true => Err(ReceiveError::Cancelled),
        false => Ok(()),
    };
    check()?;
    let checkpoint = Checkpoint::open(path, LoadFormat::Auto)?;
    if let Some((field, wanted, found)) = model.difference(checkpoint.config()) {
        let path = path.display().to_string();
        return Err(ReceiveError::OtherModel { path, field, found, wanted });
    }
    let weights = checkpoint.stored_weights()?;
    memory_limit::check_more(weights.iter().map(|weight| weight.bytes.len() as u64).sum())?;
    let plan = plan(&weights, chunk_bytes)?;
    let mut digests = Vec::with_capacity(plan.chunks().len());
    for chunk in plan.chunks() {
        check()?;
        let bytes = chunk.pieces.iter().map(|piece| {
            let range = piece.range.start as usize..piece.range.end as usize;
            &weights[piece.tensor].bytes[range]
        });
        digests.push(digest(bytes));
    }
    check()?;
    update.prepare(path, &checkpoint)?;
    Ok(WeightVersion::of_content(&plan, &digests))
}

fn plan(weights: &[StoredWeight<'_>], chunk_bytes: u64) -> Result<Plan, PlanError> {
    let tensor = |weight: &StoredWeight<'_>| Tensor {
        name: weight.name.clone(),
        dtype: weight.encoding.to_owned(),
        shape: weight.dims.clone(),
        bytes: weight.bytes.len() as u64,
    };
    Plan::new(weights.iter().map(tensor).collect(), chunk_bytes)
}
