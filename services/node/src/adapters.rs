//! LoRA adapters of a node: which adapter each slot of the executor holds.
//!
//! Unloading an adapter has two steps. The node rejects new attempts with the adapter at once. When
//! the last sequence with the adapter has ended, the next load or unload frees the adapter's slot.

use std::{
    fmt,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cluster::{ADAPTER_NAME_ALLOWED, Adapter, is_adapter_name};
use config::Config;
use engine::{adapter::LoadedAdapter, adapter_slots::AdapterSlots, executor::ExecutorError};
use kernels::Shard;
use model::{ModelConfig, ModelError};
use tracing::{info, warn};

use crate::{
    memory_limit::{self, HostBytes, MemoryShare},
    node_core::Refusal,
    settings::{self, SettingsError},
    start_error::NodeStartError,
};

/// Reason why an adapter cannot be loaded or unloaded.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Memory(#[from] SettingsError),
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    #[error("the node has ranks; expected node.tp = 1, or the adapter in model.adapters at start")]
    Ranks,
    #[error(
        "all {slots} slots are taken, {ending} of them until requests with unloaded adapters end; expected a \
         larger model.adapter_slots, or to unload an adapter"
    )]
    NoSlot { slots: usize, ending: usize },
    #[error("invalid name; expected {ADAPTER_NAME_ALLOWED}")]
    Name,
    #[error(
        "another adapter has this name; expected another name, or to unload that adapter first"
    )]
    NameTaken,
    #[error("the node has no such adapter; expected one of: {known}")]
    Unknown { known: String },
}

/// Adapters of a node. Clones share them. One thread at a time loads and unloads.
#[derive(Clone)]
pub(crate) struct NodeAdapters(Arc<AdaptersState>);

struct AdaptersState {
    loader: AdapterLoader,
    rank_max: u32,
    share: Option<MemoryShare>,
    /// Memory of the model without adapters.
    model_bytes: HostBytes,
    /// Locked for microseconds.
    slots: Mutex<Vec<Option<SlotAdapter>>>,
}

enum AdapterLoader {
    Executor(Arc<dyn AdapterSlots>),
    /// Every rank loads its own part at start.
    Ranks {
        model: Box<ModelConfig>,
        is_gpu: bool,
    },
}

struct SlotAdapter {
    /// `None` once the adapter was unloaded.
    name: Option<String>,
    loaded: Arc<LoadedAdapter>,
    /// Host memory of the matrices in bytes.
    bytes: u64,
}

impl SlotAdapter {
    fn is_named(&self, name: &str) -> bool {
        self.name.as_deref() == Some(name)
    }

    /// Returns the number of sequences with the adapter.
    fn sequences(&self) -> usize {
        Arc::strong_count(&self.loaded) - 1
    }
}

impl NodeAdapters {
    /// Loads the adapters of the settings, in their order. `slots` are those of the executor;
    /// `None`: every rank loads its own part.
    pub(crate) fn start(
        config: &Config,
        model: &ModelConfig,
        is_gpu: bool,
        slots: Option<Arc<dyn AdapterSlots>>,
        model_bytes: HostBytes,
    ) -> Result<Self, NodeStartError> {
        let loader = match slots {
            Some(slots) => AdapterLoader::Executor(slots),
            None => AdapterLoader::Ranks { model: Box::new(model.clone()), is_gpu },
        };
        let slot_count = settings::adapter_slots(&config.model, is_gpu);
        let adapters = Self(Arc::new(AdaptersState {
            loader,
            rank_max: config.model.adapter_rank_max,
            share: MemoryShare::of_node(config.node.nodes_per_container),
            model_bytes,
            slots: Mutex::new((0..slot_count).map(|_| None).collect()),
        }));
        for pair in &config.model.adapters {
            let taken = adapters.0.slots().iter().flatten().any(|it| it.is_named(&pair.name));
            let loaded = match taken {
                true => Err(AdapterError::NameTaken),
                false => adapters.open(&pair.name, Path::new(&pair.value)),
            };
            loaded.map_err(|error| not_loaded(&pair.name, error))?;
        }
        Ok(adapters)
    }

    /// Loads an adapter and returns its content hash. Reads files. An equal adapter of this name is
    /// no error, so that a caller can repeat a load that some nodes refused.
    pub(crate) fn load(&self, name: &str, folder: &Path) -> Result<u128, AdapterError> {
        match self.0.loader {
            AdapterLoader::Ranks { .. } => Err(AdapterError::Ranks),
            _ => self.open(name, folder),
        }
    }

    fn open(&self, name: &str, folder: &Path) -> Result<u128, AdapterError> {
        let state = &*self.0;
        if !is_adapter_name(name) {
            return Err(AdapterError::Name);
        }
        state.free_ended()?;
        let taken: u64 = state.slots().iter().flatten().map(|it| it.bytes).sum();
        let HostBytes { weights, kv } = state.model_bytes;
        let open_bytes = model::Adapter::open_bytes(folder);
        memory_limit::check(state.share, weights + taken + open_bytes, kv)?;
        // A process without a limit is killed, too, when the machine has no memory left.
        memory_limit::check_more(None, open_bytes)?;
        let adapter = match &state.loader {
            AdapterLoader::Executor(slots) => slots.open(folder, state.rank_max)?,
            AdapterLoader::Ranks { model, .. } => {
                model::Adapter::open(folder, model, Shard::WHOLE, state.rank_max as usize)?
            }
        };
        let content_hash = adapter.content_hash();
        let Some(slot) = state.free_slot(name, content_hash)? else { return Ok(content_hash) };
        let bytes = match &state.loader {
            AdapterLoader::Executor(slots) => {
                let bytes = slots.bytes(&adapter);
                slots.set(slot, Some(adapter))?;
                bytes
            }
            // The ranks have the matrices in the memory of their GPUs.
            AdapterLoader::Ranks { is_gpu: true, .. } => 0,
            AdapterLoader::Ranks { is_gpu: false, .. } => adapter.bytes(),
        };
        let loaded = Arc::new(LoadedAdapter { slot, content_hash });
        let name = name.to_owned();
        let content_hash_hex = format_args!("{content_hash:032x}");
        info!(name, folder = %folder.display(), content_hash = content_hash_hex, "loaded an adapter");
        state.slots()[slot as usize] = Some(SlotAdapter { name: Some(name), loaded, bytes });
        Ok(content_hash)
    }

    /// Makes the node reject new attempts with the adapter. Returns the number of sequences that
    /// still use the adapter.
    pub(crate) fn unload(&self, name: &str) -> Result<usize, AdapterError> {
        let state = &*self.0;
        if matches!(state.loader, AdapterLoader::Ranks { .. }) {
            return Err(AdapterError::Ranks);
        }
        let sequences = {
            let mut slots = state.slots();
            let found = slots.iter_mut().flatten().find(|it| it.is_named(name));
            found.map(|adapter| {
                adapter.name = None;
                adapter.sequences()
            })
        };
        let Some(sequences) = sequences else {
            let known: Vec<String> = self.listed().into_iter().map(|it| it.name).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            return Err(AdapterError::Unknown { known });
        };
        if let Err(error) = state.free_ended() {
            // The next load empties the slot.
            warn!(name, %error, "cannot empty the slot of an unloaded adapter");
        }
        info!(name, sequences, "unloaded an adapter");
        Ok(sequences)
    }

    /// Returns the adapter that an attempt names by its content hash; `None`: the base model.
    pub(crate) fn of_attempt(
        &self,
        content_hash: Option<u128>,
    ) -> Result<Option<Arc<LoadedAdapter>>, Refusal> {
        let Some(content_hash) = content_hash else { return Ok(None) };
        let slots = self.0.slots();
        let mut adapters = slots.iter().flatten().filter(|adapter| adapter.name.is_some());
        let found = adapters.find(|adapter| adapter.loaded.content_hash == content_hash);
        match found {
            Some(adapter) => Ok(Some(adapter.loaded.clone())),
            None => Err(Refusal::OtherAdapter { content_hash }),
        }
    }

    /// Returns the adapters for the node's record.
    pub(crate) fn listed(&self) -> Vec<Adapter> {
        let slots = self.0.slots();
        let adapters = slots.iter().flatten().filter_map(|adapter| {
            let content_hash = adapter.loaded.content_hash;
            Some(Adapter { name: adapter.name.clone()?, content_hash })
        });
        adapters.collect()
    }

    /// Returns the adapters of a node without slots.
    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Self(Arc::new(AdaptersState {
            loader: AdapterLoader::Executor(Arc::new(NoSlots)),
            rank_max: 0,
            share: None,
            model_bytes: HostBytes::default(),
            slots: Mutex::default(),
        }))
    }
}

/// Slots of a node that has none.
#[cfg(test)]
struct NoSlots;

#[cfg(test)]
impl AdapterSlots for NoSlots {
    fn open(&self, _folder: &Path, _rank_max: u32) -> Result<model::Adapter, ModelError> {
        unreachable!("tests open no adapter")
    }

    fn set(&self, _slot: u32, _adapter: Option<model::Adapter>) -> Result<(), ExecutorError> {
        unreachable!("tests open no adapter")
    }

    fn bytes(&self, _adapter: &model::Adapter) -> u64 {
        0
    }
}

impl AdaptersState {
    fn slots(&self) -> MutexGuard<'_, Vec<Option<SlotAdapter>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a free slot for an adapter; `None`: the adapter is loaded already.
    fn free_slot(&self, name: &str, content_hash: u128) -> Result<Option<u32>, AdapterError> {
        let slots = self.slots();
        if let Some(named) = slots.iter().flatten().find(|it| it.is_named(name)) {
            let is_equal = named.loaded.content_hash == content_hash;
            return if is_equal { Ok(None) } else { Err(AdapterError::NameTaken) };
        }
        let free = slots.iter().position(Option::is_none);
        free.map(|slot| Some(slot as u32)).ok_or_else(|| {
            let ending = slots.iter().flatten().filter(|it| it.name.is_none()).count();
            AdapterError::NoSlot { slots: slots.len(), ending }
        })
    }

    /// Empties the slots of unloaded adapters that no sequence uses any more.
    fn free_ended(&self) -> Result<(), ExecutorError> {
        let AdapterLoader::Executor(executor) = &self.loader else { return Ok(()) };
        let ended = |it: &SlotAdapter| it.name.is_none() && it.sequences() == 0;
        let is_ended = |slot: &Option<SlotAdapter>| slot.as_ref().is_some_and(ended);
        let found: Vec<bool> = self.slots().iter().map(is_ended).collect();
        for slot in (0..found.len()).filter(|slot| found[*slot]) {
            // `set` waits for the running step, so it runs without the lock that attempts take.
            executor.set(slot as u32, None)?;
            self.slots()[slot] = None;
        }
        Ok(())
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
) -> Result<(), NodeStartError> {
    let Some(slots) = slots else { return Ok(()) };
    for (slot, pair) in (0..).zip(&config.model.adapters) {
        let adapter = slots.open(Path::new(&pair.value), config.model.adapter_rank_max);
        let adapter = adapter.map_err(|error| not_loaded(&pair.name, error.into()))?;
        slots.set(slot, Some(adapter)).map_err(|error| not_loaded(&pair.name, error.into()))?;
    }
    Ok(())
}

fn not_loaded(name: &str, source: AdapterError) -> NodeStartError {
    NodeStartError::Adapter { name: name.to_owned(), source: Box::new(source) }
}
