//! The models that this router serves, by the names that clients use.

use std::{collections::BTreeMap, sync::Arc};

use telemetry::RouterMetrics;
use text::ModelText;

use crate::{
    admission::{WaitingPlaces, WaitingRoom},
    request::{
        error::RequestError,
        text_workers::{TextRoom, TextWorkers},
    },
};

/// Characters of an unknown name that the error message shows.
const SHOWN_CHARS_MAX: usize = 200;

/// A model's name and its text processing, for [`start`](crate::start).
#[derive(Clone)]
pub struct ModelSource {
    /// Nodes register under this name.
    pub name: String,
    pub text: Arc<ModelText>,
}

/// One served model.
pub struct ServedModel {
    pub name: Arc<str>,
    pub text: TextWorkers,
    pub metrics: RouterMetrics,
    /// One per model: while the nodes of one model are busy, the nodes of another may have room.
    pub waiting: WaitingRoom,
}

/// A model and the name that a request used for it.
#[derive(Clone)]
pub struct NamedModel {
    pub model: Arc<ServedModel>,
    /// The model's name or an alias.
    pub name: Arc<str>,
}

/// All served models; at least one.
pub struct Models {
    /// In the order of the configuration; the first model serves requests that name no model.
    all: Vec<Arc<ServedModel>>,
    /// By name and alias.
    by_name: BTreeMap<Arc<str>, Arc<ServedModel>>,
}

impl Models {
    /// `first` is the default model. The first entry of a name takes precedence.
    pub fn new(
        first: ModelSource,
        others: Vec<ModelSource>,
        settings: &config::Router,
        metrics: &RouterMetrics,
    ) -> Self {
        let places = Arc::new(WaitingPlaces::new(settings.waiting_max));
        let threads = std::thread::available_parallelism().map_or(2, usize::from);
        let room = TextRoom::new(threads);
        let serve = |source: ModelSource| {
            Arc::new(ServedModel {
                metrics: metrics.of_model(&source.name),
                text: TextWorkers::new(source.text, room.clone()),
                waiting: WaitingRoom::new(places.clone()),
                name: source.name.into(),
            })
        };
        let all: Vec<_> = [first].into_iter().chain(others).map(serve).collect();
        let mut by_name = BTreeMap::new();
        for model in &all {
            by_name.entry(model.name.clone()).or_insert_with(|| model.clone());
        }
        for alias in &settings.aliases {
            if let Some(model) = by_name.get(alias.value.as_str()).cloned() {
                by_name.entry(alias.name.as_str().into()).or_insert(model);
            }
        }
        Self { all, by_name }
    }

    /// Returns the model of requests that name no model.
    pub fn default_model(&self) -> &Arc<ServedModel> {
        &self.all[0]
    }

    pub fn all(&self) -> &[Arc<ServedModel>] {
        &self.all
    }

    /// Returns every name and alias.
    pub fn names(&self) -> impl Iterator<Item = NamedModel> {
        self.by_name
            .iter()
            .map(|(name, model)| NamedModel { model: model.clone(), name: name.clone() })
    }

    /// Returns the model of this name or alias; the default model for no name or an empty one.
    pub fn find(&self, name: Option<&str>) -> Result<NamedModel, RequestError> {
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            let model = self.default_model().clone();
            return Ok(NamedModel { name: model.name.clone(), model });
        };
        match self.by_name.get_key_value(name) {
            Some((name, model)) => Ok(NamedModel { model: model.clone(), name: name.clone() }),
            None => Err(RequestError::UnknownModel {
                model: name.chars().take(SHOWN_CHARS_MAX).collect(),
                served: self.by_name.keys().map(|name| name.to_string()).collect(),
            }),
        }
    }
}
