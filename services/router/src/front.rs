//! State shared by all requests: settings, models, nodes and load limits.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use proto::auth::ClusterSecret;
use telemetry::RouterMetrics;
use text::ModelText;
use tokio_util::sync::CancellationToken;

use crate::{
    admission::BodyBudget,
    history::SharedHistory,
    http::ResumableStreams,
    keys::{ApiKeys, Caller},
    nodes::{NodeCredentials, Nodes},
    request::{
        error::RequestError,
        text_workers::{TextPermits, TextWorkers},
    },
    response_store::SharedResponses,
    shared_router::SharedRouter,
};

/// Interval of SSE keep-alives: less than the idle limits of common proxies (60 s).
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Maximum bytes of all request bodies that are being read or parsed: 1024 requests of 128 KiB,
/// about 16 Ki token ids each. A growing buffer may take twice its content, so bodies take at most
/// 256 MiB.
const BODIES_BYTES_MAX: u64 = 128 << 20;

/// Time-out from a request's head to its last byte. Long enough for the largest request over a slow
/// connection.
const REQUEST_READ_MAX: Duration = Duration::from_secs(30);

/// Maximum characters of an unknown model name in an error message.
const MODEL_CHARS_MAX: usize = 200;

/// Settings of the router: the configuration's `router` section, and bounds that only tests change.
#[derive(Clone, Debug)]
pub struct RouterSettings {
    pub router: config::Router,
    pub nodes: NodeCredentials,
    /// Limit on the open files of the process.
    pub open_files_max: u64,
    /// Maximum bytes of all request bodies that are being read or parsed.
    pub bodies_bytes_max: u64,
    /// Time-out from a request's head to its last byte.
    pub request_read_max: Duration,
    /// Silence of an SSE stream after which the router sends a keep-alive comment.
    pub keep_alive: Duration,
}

impl RouterSettings {
    pub fn new(router: config::Router, secret: ClusterSecret, open_files_max: u64) -> Self {
        Self {
            nodes: NodeCredentials { secret, tls: None },
            open_files_max,
            // One body of the maximum size must fit into the share of a key, 7/8.
            bodies_bytes_max: BODIES_BYTES_MAX.max(router.body_bytes_max.bytes() / 7 * 8 + 8),
            request_read_max: REQUEST_READ_MAX,
            keep_alive: KEEP_ALIVE,
            router,
        }
    }
}

/// The state that all requests of both APIs share.
pub(crate) struct Front {
    pub settings: RouterSettings,
    pub models: Models,
    pub nodes: Nodes,
    pub bodies: BodyBudget,
    pub router: SharedRouter,
    pub history: SharedHistory,
    /// Streams that clients may resume.
    pub streams: Arc<ResumableStreams>,
    /// Responses of `/v1/responses`.
    pub responses: SharedResponses,
    /// API keys of clients, if they need one.
    pub keys: Option<Arc<ApiKeys>>,
    /// Cancelled at the begin of a shutdown: connections close after their next response.
    pub leaving: CancellationToken,
    /// Cancelled when the router becomes unready, before it rejects requests.
    pub unready: CancellationToken,
    /// Cancelled after the drain time-out. Ends the requests that are still in flight.
    pub cut: CancellationToken,
}

impl Front {
    pub(crate) fn new(
        settings: RouterSettings,
        models: Models,
        router: SharedRouter,
        nodes: Nodes,
        keys: Option<Arc<ApiKeys>>,
    ) -> Self {
        Self {
            bodies: BodyBudget::new(settings.bodies_bytes_max),
            history: SharedHistory::new(Instant::now()),
            streams: ResumableStreams::new(&settings.router),
            responses: SharedResponses::new(&settings.router),
            models,
            router,
            nodes,
            keys,
            leaving: CancellationToken::new(),
            unready: CancellationToken::new(),
            cut: CancellationToken::new(),
            settings,
        }
    }

    /// Returns whether load balancers may send requests: from the first connection to a decode node
    /// until the router is unready in its shutdown. Unlike [`Self::serves`] it does not become false
    /// when the decode nodes are lost for a while.
    pub(crate) fn is_ready(&self) -> bool {
        self.nodes.are_connected() && !self.unready.is_cancelled()
    }

    /// Returns whether the nodes are connected and at least one model has a decode node that is not
    /// paused.
    pub(crate) fn serves(&self) -> bool {
        let is_served = |name| self.nodes.serving(name).running_decode_nodes > 0;
        self.nodes.are_connected() && self.models.all().iter().any(|model| is_served(&model.name))
    }
}

impl Front {
    /// Returns the model of this name or alias, or the adapter of the name MODEL:ADAPTER. Without a
    /// name, returns the first model that the caller may use. Names that the caller may not use are
    /// unknown to the caller.
    pub(crate) fn find_model(
        &self,
        name: Option<&str>,
        caller: &Caller,
    ) -> Result<NamedModel, RequestError> {
        if let Some(found) = self.models.find(name, caller) {
            return Ok(found);
        }
        let name = name.unwrap_or_default();
        let adapted = name.rsplit_once(':').and_then(|(model, adapter)| {
            let model = self.models.by_name.get(model)?;
            let content_hash = *self.nodes.adapters(&model.name).get(adapter)?;
            NamedModel::adapter(model, (adapter, content_hash), caller)
        });
        adapted.ok_or_else(|| RequestError::UnknownModel {
            model: name.chars().take(MODEL_CHARS_MAX).collect(),
            served: self.model_names(caller).iter().map(|named| named.name.to_string()).collect(),
        })
    }

    /// Returns every name, alias and adapter that the caller may use.
    pub(crate) fn model_names(&self, caller: &Caller) -> Vec<NamedModel> {
        let adapters = self.models.all().iter().flat_map(|model| {
            let adapters = self.nodes.adapters(&model.name).into_iter();
            adapters.filter_map(|(name, hash)| NamedModel::adapter(model, (&name, hash), caller))
        });
        self.models.names(caller).chain(adapters).collect()
    }
}

/// A model's name and its text processing, for [`start`](crate::start).
#[derive(Clone)]
pub struct ModelSource {
    /// Nodes register under this name.
    pub name: String,
    pub text: Arc<ModelText>,
}

/// One served model.
pub(crate) struct ServedModel {
    pub name: Arc<str>,
    pub text: TextWorkers,
    pub metrics: RouterMetrics,
}

/// A model and the name that a request used for it.
#[derive(Clone)]
pub(crate) struct NamedModel {
    pub model: Arc<ServedModel>,
    /// The model's name or an alias; with an adapter, MODEL:ADAPTER.
    pub name: Arc<str>,
    /// Content hash of the LoRA adapter that the name has.
    pub adapter: Option<u128>,
}

/// All served models; at least one.
pub(crate) struct Models {
    /// In the order of the configuration; the first model serves requests that name no model.
    all: Vec<Arc<ServedModel>>,
    /// By name and alias.
    by_name: BTreeMap<Arc<str>, Arc<ServedModel>>,
}

impl Models {
    /// `first` is the default model. The first of several models with one name keeps the name. An
    /// alias never replaces the name of a model.
    pub(crate) fn new(
        first: ModelSource,
        others: Vec<ModelSource>,
        settings: &config::Router,
        metrics: &RouterMetrics,
    ) -> Self {
        let threads = std::thread::available_parallelism().map_or(2, usize::from);
        let permits = TextPermits::new(threads);
        let serve = |source: ModelSource| {
            Arc::new(ServedModel {
                metrics: metrics.of_model(&source.name),
                text: TextWorkers::new(source.text, permits.clone()),
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
    pub(crate) fn default_model(&self) -> &Arc<ServedModel> {
        &self.all[0]
    }

    pub(crate) fn all(&self) -> &[Arc<ServedModel>] {
        &self.all
    }

    /// Returns the name of the model for each name and alias.
    pub(crate) fn model_names(&self) -> BTreeMap<Arc<str>, Arc<str>> {
        self.by_name.iter().map(|(name, model)| (name.clone(), model.name.clone())).collect()
    }

    /// Returns every name and alias that the caller may use.
    fn names(&self, caller: &Caller) -> impl Iterator<Item = NamedModel> {
        self.by_name
            .iter()
            .filter(|(_, model)| caller.may_use(&model.name))
            .map(|(name, model)| NamedModel::base(name, model))
    }

    /// Returns the model of this name or alias; the first model that the caller may use for no name
    /// or an empty one. A model that the caller may not use is unknown to the caller.
    fn find(&self, name: Option<&str>, caller: &Caller) -> Option<NamedModel> {
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            let model = self.all.iter().find(|model| caller.may_use(&model.name))?;
            return Some(NamedModel::base(&model.name, model));
        };
        let (name, model) = self.by_name.get_key_value(name)?;
        caller.may_use(&model.name).then(|| NamedModel::base(name, model))
    }
}

impl NamedModel {
    fn base(name: &Arc<str>, model: &Arc<ServedModel>) -> Self {
        Self { model: model.clone(), name: name.clone(), adapter: None }
    }

    /// Returns the adapter of this name and content; `None` if the caller may not use the adapter.
    fn adapter(
        model: &Arc<ServedModel>,
        (adapter, content_hash): (&str, u128),
        caller: &Caller,
    ) -> Option<Self> {
        let name = format!("{}:{adapter}", model.name);
        let is_allowed = caller.may_use(&name);
        is_allowed.then(|| Self {
            model: model.clone(),
            name: name.into(),
            adapter: Some(content_hash),
        })
    }
}
