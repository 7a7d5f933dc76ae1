//! The models that this router serves, by the names under which clients ask for them.

use std::{collections::BTreeMap, sync::Arc};

use telemetry::RouterMetrics;
use text::ModelText;

use crate::{
    admission::{WaitingPlaces, WaitingRoom},
    generation::RequestError,
    request::text_workers::{TextRoom, TextWorkers},
};

/// Characters of an unknown name that its refusal shows.
const SHOWN_CHARS_MAX: usize = 200;

/// A model's name and its text side, for starting a router with it.
#[derive(Clone)]
pub struct ModelSource {
    /// Nodes register under it.
    pub name: String,
    pub text: Arc<ModelText>,
}

/// One model.
pub struct ServedModel {
    pub name: Arc<str>,
    pub text: TextWorkers,
    pub metrics: RouterMetrics,
    /// Its own: while one model's nodes are busy, another's are not.
    pub waiting: WaitingRoom,
}

/// A model under the name that a request gave it.
#[derive(Clone)]
pub struct NamedModel {
    pub model: Arc<ServedModel>,
    /// The model's own name or an alias.
    pub name: Arc<str>,
}

/// Every model. Never empty.
pub struct Models {
    /// In the order of the configuration; the first one serves requests that name none.
    all: Vec<Arc<ServedModel>>,
    /// Own names and aliases.
    by_name: BTreeMap<Arc<str>, Arc<ServedModel>>,
}

impl Models {
    /// The first source is the default model. `aliases` are pairs of an alias and a model's name; of
    /// two things with one name the first is found. `waiting_max` bounds the answers of all models that
    /// wait for a node.
    pub fn new(
        first: ModelSource,
        others: Vec<ModelSource>,
        aliases: &[(String, String)],
        waiting_max: u32,
        metrics: &RouterMetrics,
    ) -> Self {
        let places = Arc::new(WaitingPlaces::new(waiting_max));
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
        for (alias, name) in aliases {
            if let Some(model) = by_name.get(name.as_str()).cloned() {
                by_name.entry(alias.as_str().into()).or_insert(model);
            }
        }
        Self { all, by_name }
    }

    /// The model that a request without a name gets.
    pub fn default_model(&self) -> &Arc<ServedModel> {
        &self.all[0]
    }

    pub fn all(&self) -> &[Arc<ServedModel>] {
        &self.all
    }

    /// Every name under which a model can be asked for.
    pub fn names(&self) -> impl Iterator<Item = NamedModel> {
        self.by_name
            .iter()
            .map(|(name, model)| NamedModel { model: model.clone(), name: name.clone() })
    }

    /// The model of this name; the default one for no name or an empty one.
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
