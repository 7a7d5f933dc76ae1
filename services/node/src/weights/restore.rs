//! Restores the weights of a node whose update in place was aborted.

use std::{path::PathBuf, sync::Arc};

use engine::{event::InFlight, executor::WeightUpdate};
use model::{Checkpoint, LoadFormat, ModelConfig};
use tokio::runtime;
use tokio_util::sync::CancellationToken;
use weight_transfer::WeightVersion;

use super::{
    copy::WeightFiles,
    engine::change_weights,
    receive::{UpdateLimits, receive},
    standby::CANCELLED,
};
use crate::inbox::EngineInbox;

/// The model that the node loaded at its start.
#[derive(Clone, Debug)]
pub(crate) struct LoadedModel {
    pub path: PathBuf,
    pub format: LoadFormat,
    pub fingerprint: u128,
}

/// The weights of a node before it lost them.
#[derive(Clone, Debug)]
pub(super) enum LostWeights {
    Loaded(LoadedModel),
    Updated { version: WeightVersion, label: String, source: Arc<WeightFiles> },
}

/// Reads the weights again, checks that they are the same, and uses them. Blocks. Fails once
/// `cancelled` is cancelled.
pub(super) fn restore(
    lost: LostWeights,
    (model, limits): (&ModelConfig, UpdateLimits),
    update: &dyn WeightUpdate,
    inbox: &EngineInbox,
    cancelled: &CancellationToken,
) -> Result<WeightVersion, String> {
    let (version, label) = match lost {
        LostWeights::Loaded(loaded) => {
            let checkpoint = Checkpoint::open(&loaded.path, loaded.format);
            let is_cancelled = cancelled.clone();
            let checkpoint = checkpoint
                .map_err(|error| error.to_string())?
                .cancelled_by(move || is_cancelled.is_cancelled());
            let fingerprint = checkpoint.model_fingerprint();
            if fingerprint.map_err(|error| error.to_string())? != loaded.fingerprint {
                let path = loaded.path.display();
                return Err(format!("the model at {path} is not the one of the node's start"));
            }
            let prepared = update.prepare(&loaded.path, &checkpoint);
            prepared.map_err(|error| error.to_string())?;
            checkpoint.check_unchanged().map_err(|error| error.to_string())?;
            (WeightVersion::LOADED, String::new())
        }
        LostWeights::Updated { version, label, source } => {
            let received = receive(&source.path, (model, limits), update, &|| Ok(()), cancelled);
            let found = received.map_err(|error| error.to_string())?;
            if found != version {
                let path = source.path.display();
                return Err(format!("weight_version of {path} is {found}; expected {version}"));
            }
            (version, label)
        }
    };
    let change = change_weights(inbox, version, &label, InFlight::Recompute, false);
    let changed = match cancelled.is_cancelled() {
        true => return Err(CANCELLED.to_owned()),
        // The engine thread answers at the next step boundary, and no step runs.
        false => runtime::Handle::current().block_on(change),
    };
    changed.map(|_| version).map_err(|error| error.to_string())
}
