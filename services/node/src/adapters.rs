//! LoRA adapters of a node: which adapter each slot of the executor holds.

use std::{fmt, path::Path, sync::Arc};

use cluster::{ADAPTER_NAME_ALLOWED, Adapter, is_adapter_name};
use config::Config;
use engine::adapter::{AdapterSlots, LoadedAdapter};
use kernels::Shard;
use model::{ModelConfig, ModelError};
use tracing::info;

use crate::node_core::Refusal;

/// Reason why the settings' adapters cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[error("model.adapters: cannot load {name}: {reason}")]
pub struct AdapterError {
    name: String,
    reason: Box<AdapterErrorReason>,
}

#[derive(Debug, thiserror::Error)]
enum AdapterErrorReason {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("the node computes on a GPU; expected node.device = cpu")]
    Gpu,
    #[error("invalid name; expected {ADAPTER_NAME_ALLOWED}")]
    Name,
    #[error("another adapter has this name; expected another name")]
    NameTaken,
}

/// Adapters of a node. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct NodeAdapters(Arc<[NamedAdapter]>);

struct NamedAdapter {
    name: String,
    loaded: Arc<LoadedAdapter>,
}

impl NodeAdapters {
    /// Loads the adapters of the settings, in their order. `slots` are those of the executor;
    /// `None`: every rank loads its own part.
    pub(crate) fn load(
        config: &Config,
        model: &ModelConfig,
        is_gpu: bool,
        slots: Option<&dyn AdapterSlots>,
    ) -> Result<Self, AdapterError> {
        let rank_max = config.model.adapter_rank_max;
        let mut loaded: Vec<NamedAdapter> = Vec::new();
        for (slot, pair) in (0..).zip(&config.model.adapters) {
            let (name, folder) = (pair.name.clone(), Path::new(&pair.value));
            let found = match slots {
                _ if is_gpu => Err(AdapterErrorReason::Gpu),
                _ if !is_adapter_name(&name) => Err(AdapterErrorReason::Name),
                _ if loaded.iter().any(|it| it.name == name) => Err(AdapterErrorReason::NameTaken),
                Some(slots) => slots.load(slot, folder, rank_max).map_err(Into::into),
                None => model::Adapter::open(folder, model, Shard::WHOLE, rank_max as usize)
                    .map(|adapter| adapter.content_hash())
                    .map_err(Into::into),
            };
            let content_hash = found
                .map_err(|reason| AdapterError { name: name.clone(), reason: reason.into() })?;
            info!(
                name,
                folder = %folder.display(),
                content_hash = format_args!("{content_hash:032x}"),
                "loaded an adapter"
            );
            let loaded_adapter = Arc::new(LoadedAdapter { slot, content_hash });
            loaded.push(NamedAdapter { name, loaded: loaded_adapter });
        }
        Ok(Self(loaded.into()))
    }

    /// Returns the adapter that an attempt names by its content hash; `None`: the base model.
    pub(crate) fn of_attempt(
        &self,
        content_hash: Option<u128>,
    ) -> Result<Option<Arc<LoadedAdapter>>, Refusal> {
        let Some(content_hash) = content_hash else { return Ok(None) };
        let found = self.0.iter().find(|adapter| adapter.loaded.content_hash == content_hash);
        match found {
            Some(adapter) => Ok(Some(adapter.loaded.clone())),
            None => Err(Refusal::OtherAdapter { content_hash }),
        }
    }

    /// Returns the adapters for the node's record.
    pub(crate) fn listed(&self) -> Vec<Adapter> {
        let adapters = self.0.iter().map(|adapter| Adapter {
            name: adapter.name.clone(),
            content_hash: adapter.loaded.content_hash,
        });
        adapters.collect()
    }
}

impl fmt::Debug for NodeAdapters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.listed()).finish()
    }
}

/// Loads a rank's part of the adapters of the settings.
pub(crate) fn load_rank(
    config: &Config,
    slots: Option<&dyn AdapterSlots>,
) -> Result<(), AdapterError> {
    let Some(slots) = slots else { return Ok(()) };
    for (slot, pair) in (0..).zip(&config.model.adapters) {
        let loaded = slots.load(slot, Path::new(&pair.value), config.model.adapter_rank_max);
        loaded.map_err(|error| {
            let reason = Box::new(error.into());
            AdapterError { name: pair.name.clone(), reason }
        })?;
    }
    Ok(())
}
