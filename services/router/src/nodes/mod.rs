//! The nodes as this router sees them: a directory, kept up to date by one task, and connections.

mod channel;
mod introductions;
mod watch;

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use cluster::{
    CacheIdentity, Directory, Epoch, Health, Input, Membership, NoNode, NodeChoice, NodeRecord,
    Role, Wanted,
};
use proto::v1::node_client::NodeClient;
use telemetry::RouterMetrics;
use tokio::sync::{mpsc, watch as latest};
use tonic::transport::Channel;

use crate::request::{
    ids::{NoRandomness, mint_seed},
    options::ModelLimits,
};
pub use introductions::peer;
pub use watch::{NodeWatch, Served};

/// Nodes that `/health` names because they compute on the CPU unexpectedly.
const CPU_FALLBACKS_MAX: usize = 16;
/// Events of all nodes between two looks of the task; streams wait when it is full.
const INPUTS_MAX: usize = 1024;
/// Old and new weights while nodes are replaced, and some room; nodes of others are picked by load.
const CACHE_IDENTITIES_MAX: usize = 4;

/// Picks nodes and connects to them. Cheap to clone.
#[derive(Clone)]
pub struct Nodes(Arc<Shared>);

struct Shared {
    directory: Mutex<Directory>,
    /// By URL.
    channels: Mutex<HashMap<String, Channel>>,
    inputs: mpsc::Sender<Input>,
    /// Counts changes of health, and the end of the first introductions.
    changes: latest::Sender<u64>,
    introduced: AtomicBool,
    /// Limits of each model when a decode node of it last served, by model name.
    last_limits: Mutex<HashMap<String, ModelLimits>>,
    metrics: RouterMetrics,
}

/// What is served of a model now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Serving {
    pub prefill_nodes: usize,
    pub decode_nodes: usize,
    /// What every decode node can take; `None` without any.
    pub limits: Option<ModelLimits>,
    /// Of the decode node that was listed first.
    pub model_fingerprint: u128,
}

impl Nodes {
    /// Starts watching the members, of which those that serve one of `served` are used.
    ///
    /// # Errors
    /// When the system gives no random numbers.
    pub fn watch(
        membership: &dyn Membership,
        served: Arc<[Served]>,
        metrics: RouterMetrics,
    ) -> Result<(Self, NodeWatch), NoRandomness> {
        let (inputs, received) = mpsc::channel(INPUTS_MAX);
        // Spreads the probes of several routers.
        let seed = mint_seed()?;
        let nodes = Self(Arc::new(Shared {
            directory: Mutex::new(Directory::new(seed)),
            channels: Mutex::new(HashMap::new()),
            inputs,
            changes: latest::Sender::new(0),
            introduced: AtomicBool::new(false),
            last_limits: Mutex::default(),
            metrics,
        }));
        let watch = NodeWatch::start(nodes.clone(), membership.watch(), received, served);
        Ok((nodes, watch))
    }

    /// Chooses a node and counts the attempt there until the result is dropped.
    pub fn pick(&self, wanted: &Wanted<'_>) -> Result<Assigned, NoNode> {
        let choice = self.directory().pick(Instant::now(), wanted)?;
        match self.channel(&choice.address.grpc) {
            Ok(channel) => Ok(Assigned { nodes: self.clone(), choice, channel }),
            // Cannot happen to a node that was observed over the same URL.
            Err(error) => {
                tracing::error!(%error, url = choice.address.grpc, "not a URL");
                self.directory().release(choice.assignment);
                Err(NoNode::NoneUp { role: wanted.role, listed: 1 })
            }
        }
    }

    /// What there is of this model.
    pub fn serving(&self, model: &str) -> Serving {
        let directory = self.directory();
        let of_role = |role| directory.serving(role).filter(|record| record.model == model);
        let records: Vec<&NodeRecord> = of_role(Role::Decode).collect();
        let least = |of: fn(&NodeRecord) -> u32| records.iter().map(|record| of(record)).min();
        let limits = || {
            Some(ModelLimits {
                prompt_tokens_max: least(|record| record.prompt_tokens_max)?,
                sequence_tokens_max: least(|record| record.sequence_tokens_max)?,
                vocabulary_size: least(|record| record.vocabulary_size)?,
            })
        };
        Serving {
            prefill_nodes: of_role(Role::Prefill).count(),
            decode_nodes: records.len(),
            limits: limits(),
            model_fingerprint: records
                .first()
                .map_or(0, |record| record.identity.model_fingerprint),
        }
    }

    /// Returns the limits of this model, now or when a decode node last served it; `None` if none ever did.
    pub fn last_limits(&self, model: &str) -> Option<ModelLimits> {
        self.serving(model).limits.or_else(|| self.limits_memory().get(model).cloned())
    }

    fn remember_limits(&self) {
        let directory = self.directory();
        let models: BTreeSet<String> =
            directory.serving(Role::Decode).map(|record| record.model.clone()).collect();
        drop(directory);
        for model in models {
            if let Some(limits) = self.serving(&model).limits {
                self.limits_memory().insert(model, limits);
            }
        }
    }

    fn limits_memory(&self) -> MutexGuard<'_, HashMap<String, ModelLimits>> {
        self.0.last_limits.lock().unwrap_or_else(|error| error.into_inner())
    }

    /// Returns the nodes that compute on the CPU although their host has a GPU, with the reason: at most
    /// [`CPU_FALLBACKS_MAX`].
    pub fn cpu_fallbacks(&self) -> Vec<(String, String)> {
        let directory = self.directory();
        let records = Role::ALL.into_iter().flat_map(|role| directory.serving(role));
        let reasons = records
            .filter_map(|record| Some((record.node_id.to_string(), record.cpu_fallback.clone()?)));
        reasons.take(CPU_FALLBACKS_MAX).collect()
    }

    /// Newest version of grammars that a decode node of this model holds answers to; `None` where no
    /// such node serves now, which says nothing of those that will.
    pub fn grammar_version(&self, model: &str) -> Option<u32> {
        let directory = self.directory();
        let records = directory.serving(Role::Decode).filter(|record| record.model == model);
        records.map(|record| record.grammar_version).max()
    }

    /// What the keys of cached blocks depend on, for every kind of node of this model that can be
    /// picked now.
    pub fn cache_identities(&self, model: &str) -> Vec<CacheIdentity> {
        let directory = self.directory();
        let mut identities = Vec::new();
        let records = Role::ALL.into_iter().flat_map(|role| directory.serving(role));
        for record in records.filter(|record| record.model == model) {
            let identity = CacheIdentity::of(&record.identity);
            if !identities.contains(&identity) && identities.len() < CACHE_IDENTITIES_MAX {
                identities.push(identity);
            }
        }
        identities
    }

    /// Changes whenever a node's health does, or [`Self::are_introduced`].
    pub fn changes(&self) -> latest::Receiver<u64> {
        self.0.changes.subscribe()
    }

    /// Whether the nodes that were there first have met, as far as they will: from then on always.
    pub fn are_introduced(&self) -> bool {
        self.0.introduced.load(Ordering::Acquire)
    }

    fn changed(&self) {
        self.remember_limits();
        self.0.changes.send_modify(|count| *count += 1);
    }

    fn channel(&self, url: &str) -> Result<Channel, tonic::transport::Error> {
        let mut channels = self.0.channels.lock().unwrap_or_else(|error| error.into_inner());
        if let Some(channel) = channels.get(url) {
            return Ok(channel.clone());
        }
        let channel = channel::open(url)?;
        channels.insert(url.to_owned(), channel.clone());
        Ok(channel)
    }

    fn forget_channel(&self, url: &str) {
        self.0.channels.lock().unwrap_or_else(|error| error.into_inner()).remove(url);
    }

    /// Held for a few microseconds, never over an await.
    fn directory(&self) -> MutexGuard<'_, Directory> {
        self.0.directory.lock().unwrap_or_else(|error| error.into_inner())
    }

    fn count_nodes(&self) {
        let directory = self.directory();
        for role in Role::ALL {
            for health in Health::ALL {
                let count = directory.count(role, health);
                self.0.metrics.set_nodes(role.as_str(), health.as_str(), count);
            }
        }
        drop(directory);
        self.count_cached_blocks();
    }

    fn count_cached_blocks(&self) {
        let directory = self.directory();
        for role in Role::ALL {
            self.0.metrics.set_cached_blocks(role.as_str(), directory.cached_blocks(role));
        }
    }
}

/// A node that an attempt uses. Dropping it gives the assignment back.
pub struct Assigned {
    nodes: Nodes,
    choice: NodeChoice,
    channel: Channel,
}

impl Assigned {
    pub fn record(&self) -> &Arc<NodeRecord> {
        &self.choice.record
    }

    pub fn epoch(&self) -> Epoch {
        self.choice.record.epoch
    }

    pub fn client(&self) -> NodeClient<Channel> {
        channel::client(self.channel.clone())
    }

    /// The node took the attempt.
    pub fn answered(&self) {
        self.nodes.directory().answered(self.choice.assignment);
    }

    /// When the node last told a change of its load or cache.
    pub fn changed_at(&self) -> Option<Instant> {
        self.nodes.directory().changed_at(self.choice.assignment)
    }

    /// The node refused the attempt as busy.
    pub fn busy(&self, retry_after: Option<Duration>) {
        self.nodes.directory().busy(Instant::now(), self.choice.assignment, retry_after);
    }

    /// The connection broke, or another process is there: have it probed.
    pub fn lost(&self, reason: String) {
        // Full only when the task has much to do; then it hears of it by the node's own stream.
        let _ = self.nodes.0.inputs.try_send(Input::CallLost { epoch: self.epoch(), reason });
    }
}

impl Drop for Assigned {
    fn drop(&mut self) {
        self.nodes.directory().release(self.choice.assignment);
    }
}

#[cfg(test)]
mod tests {
    use config::LogFormat;
    use telemetry::{LogSink, Resource, Telemetry, TelemetryConfig};

    use super::*;

    pub(super) fn metrics() -> RouterMetrics {
        let config = TelemetryConfig {
            log: "off".into(),
            log_format: LogFormat::Json,
            otlp: None,
            log_sink: LogSink::Stderr,
        };
        let resource = Resource { service: "baton-router".into(), instance: "test".into() };
        let telemetry = Telemetry::start(&config, resource).unwrap();
        RouterMetrics::new(&telemetry.metrics(), "ours")
    }

    /// A node that went is no node of an older release.
    #[tokio::test]
    async fn where_no_node_serves_nothing_is_known_of_grammars() {
        let none: [&str; 0] = [];
        let members = cluster::StaticMembership::new(none, none).unwrap();
        let served = Arc::new([Served { model: "ours".into(), vocabulary_size: 10 }]);
        let (nodes, _watch) = Nodes::watch(&members, served, metrics()).unwrap();
        assert_eq!(nodes.serving("ours").limits, None);
        assert_eq!(nodes.grammar_version("ours"), None);
    }
}
