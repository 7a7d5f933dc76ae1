//! The weights that the nodes of each model should have, and the nodes that lack them.
//!
//! A router brings nodes up to date with the update that it committed last. It updates a node only
//! if the node has the weights of its start, weights that this router has replaced, or none. If a
//! process that had the update's weights reports other weights, another router has updated the
//! process. Then this router no longer updates nodes of the model, so it never replaces newer
//! weights by older ones.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use cluster::Epoch;
use proto::v1::InFlight;
use weight_transfer::WeightVersion;

use crate::nodes::{CopyFrom, WeightNode};

/// Time after a failed catch-up until the next one of the node.
const RETRY_AFTER: Duration = Duration::from_secs(30);
/// Replaced versions of a model that are remembered. A node with an older one is not updated.
const REPLACED_MAX: usize = 64;

/// The weights that every node of a model should have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TargetWeights {
    pub label: String,
    pub path: String,
    pub version: WeightVersion,
    /// The operator's time-out of the update, which suits the size of the weights.
    pub timeout: Duration,
    /// The operator's choice for requests in flight.
    pub in_flight: InFlight,
}

/// A node that needs the weights of its model's last update.
#[derive(Clone, Debug)]
pub(super) struct CatchUp {
    pub model: Arc<str>,
    pub node: WeightNode,
    pub target: TargetWeights,
    /// The node copies from this one; `None`: it reads the path.
    pub from: Option<CopyFrom>,
}

/// The targets of all models.
#[derive(Default)]
pub(super) struct Targets(HashMap<Arc<str>, ModelTarget>);

struct ModelTarget {
    /// `None` after an update that no node can catch up with.
    target: Option<TargetWeights>,
    replaced: VecDeque<WeightVersion>,
    /// Processes that were seen with the target's weights.
    had: HashSet<Epoch>,
    failed: HashMap<Epoch, Failures>,
}

#[derive(Clone, Copy)]
struct Failures {
    count: usize,
    retry_at: Instant,
}

impl Targets {
    /// Records a committed update. `replaced`: the versions that its nodes had before.
    pub(super) fn committed(
        &mut self,
        model: Arc<str>,
        target: TargetWeights,
        replaced: impl Iterator<Item = WeightVersion>,
    ) {
        self.replace(model, Some(target), replaced);
    }

    /// Forgets the model's target after a committed update that no node can catch up with.
    /// Remembers the replaced versions for the next update.
    pub(super) fn forget(
        &mut self,
        model: Arc<str>,
        replaced: impl Iterator<Item = WeightVersion>,
    ) {
        self.replace(model, None, replaced);
    }

    fn replace(
        &mut self,
        model: Arc<str>,
        target: Option<TargetWeights>,
        replaced: impl Iterator<Item = WeightVersion>,
    ) {
        let before = self.0.remove(&model);
        let (mut known, last) = match before {
            Some(before) => (before.replaced, before.target.map(|target| target.version)),
            None => (VecDeque::new(), None),
        };
        for version in replaced.chain(last) {
            known.retain(|it| *it != version);
            known.push_back(version);
        }
        known.retain(|version| target.as_ref().is_none_or(|target| *version != target.version));
        known.drain(..known.len().saturating_sub(REPLACED_MAX));
        let (had, failed) = (HashSet::new(), HashMap::new());
        self.0.insert(model, ModelTarget { target, replaced: known, had, failed });
    }

    /// Records that a node did not catch up.
    pub(super) fn failed(&mut self, now: Instant, model: &str, node: Epoch) {
        if let Some(target) = self.0.get_mut(model) {
            let failures =
                target.failed.entry(node).or_insert(Failures { count: 0, retry_at: now });
            failures.count += 1;
            failures.retry_at = now + RETRY_AFTER;
        }
    }

    /// Returns the catch-ups of free nodes that are due. `nodes`: all nodes with their current
    /// weights.
    pub(super) fn catch_ups(
        &mut self,
        now: Instant,
        nodes: &[WeightNode],
        is_free: impl Fn(&WeightNode) -> bool,
    ) -> Vec<CatchUp> {
        self.0.retain(|model, target| {
            let mut of_model = nodes.iter().filter(|node| *node.model == **model);
            let other = of_model.find(|node| is_free(node) && target.was_replaced_at(node));
            if let Some(node) = other {
                tracing::info!(
                    node = node.id, weight_version = %node.version,
                    "another router updated the nodes: this router leaves catch-ups to it"
                );
            }
            other.is_none()
        });
        let due = self.0.iter_mut().flat_map(|(model, target)| {
            let of_model = nodes.iter().filter(|node| *node.model == **model);
            target.catch_ups(now, model, of_model.collect(), &is_free)
        });
        due.collect()
    }
}

impl ModelTarget {
    fn was_replaced_at(&self, node: &WeightNode) -> bool {
        let Some(target) = &self.target else { return false };
        let has_others = node.version != target.version && node.version != WeightVersion::NONE;
        has_others && self.had.contains(&node.epoch)
    }

    fn catch_ups(
        &mut self,
        now: Instant,
        model: &Arc<str>,
        nodes: Vec<&WeightNode>,
        is_free: impl Fn(&WeightNode) -> bool,
    ) -> Vec<CatchUp> {
        let Some(target) = self.target.clone() else { return Vec::new() };
        let version = target.version;
        let (current, others): (Vec<&WeightNode>, Vec<_>) =
            nodes.into_iter().partition(|node| node.version == version);
        self.had = current.iter().map(|node| node.epoch).collect();
        let is_behind = |node: &WeightNode| {
            matches!(node.version, WeightVersion::LOADED | WeightVersion::NONE)
                || self.replaced.contains(&node.version)
        };
        let behind: Vec<_> = others.into_iter().filter(|node| is_behind(node)).collect();
        self.failed.retain(|epoch, _| behind.iter().any(|node| node.epoch == *epoch));
        let catch_up = |(index, node): (usize, &WeightNode)| {
            let failures = self.failed.get(&node.epoch);
            if !is_free(node) || failures.is_some_and(|failures| failures.retry_at > now) {
                return None;
            }
            // A node that has the weights has them even if the path is gone. Several nodes copy
            // from different ones.
            let count = failures.map_or(0, |failures| failures.count);
            let peer = current.get((index + count / 2) % current.len().max(1));
            let peer = peer.filter(|_| count.is_multiple_of(2));
            let from = peer.map(|peer| CopyFrom { node: WeightNode::clone(peer), version });
            let (model, target) = (model.clone(), target.clone());
            Some(CatchUp { model, node: node.clone(), target, from })
        };
        behind.into_iter().enumerate().filter_map(catch_up).collect()
    }
}

#[cfg(test)]
mod tests {
    use proto::v1::PauseState;

    use super::*;

    const OLD: WeightVersion = WeightVersion(70);
    const NEW: WeightVersion = WeightVersion(71);

    fn target(version: WeightVersion) -> TargetWeights {
        let timeout = Duration::from_secs(300);
        let in_flight = InFlight::Wait;
        TargetWeights { label: String::new(), path: "/new".into(), version, timeout, in_flight }
    }

    fn node(model: &str, epoch: u128, version: WeightVersion) -> WeightNode {
        WeightNode {
            id: format!("{model}-{epoch}"),
            role: "decode",
            epoch: Epoch(epoch),
            grpc: String::new(),
            model: model.to_owned(),
            version,
            pause: PauseState::None,
        }
    }

    /// Returns a router's targets after it replaced these versions.
    fn pushed(version: WeightVersion, replaced: &[WeightVersion]) -> Targets {
        let mut targets = Targets::default();
        targets.committed("m".into(), target(version), replaced.iter().copied());
        targets
    }

    /// Returns the ids of the nodes that catch up and of the nodes from which they copy.
    fn due(targets: &mut Targets, now: Instant, nodes: &[WeightNode]) -> Vec<(String, String)> {
        let name = |it: CatchUp| (it.node.id, it.from.map_or("path".into(), |it| it.node.id));
        let mut due: Vec<_> =
            targets.catch_ups(now, nodes, |_| true).into_iter().map(name).collect();
        due.sort();
        due
    }

    fn names(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(node, from)| ((*node).to_owned(), (*from).to_owned())).collect()
    }

    #[test]
    fn nodes_of_each_model_catch_up_with_its_own_update() {
        let now = Instant::now();
        let mut targets = pushed(NEW, &[WeightVersion::LOADED]);
        let loaded = WeightVersion::LOADED;
        let nodes =
            [node("m", 1, NEW), node("m", 2, loaded), node("other", 3, loaded), node("x", 4, OLD)];
        assert_eq!(due(&mut targets, now, &nodes), names(&[("m-2", "m-1")]));
        targets.committed("other".into(), target(OLD), [loaded].into_iter());
        assert_eq!(due(&mut targets, now, &nodes), names(&[("m-2", "m-1"), ("other-3", "path")]));
        // The weights of an update from a trainer's GPU are in no file.
        targets.forget("m".into(), [].into_iter());
        assert_eq!(due(&mut targets, now, &nodes), names(&[("other-3", "path")]));
    }

    #[test]
    fn node_that_missed_updates_catches_up_although_one_of_them_was_in_no_file() {
        let now = Instant::now();
        let mut targets = pushed(OLD, &[WeightVersion::LOADED]);
        let of_a_trainer = WeightVersion(80);
        targets.forget("m".into(), [OLD].into_iter());
        let nodes = [node("m", 1, of_a_trainer), node("m", 2, OLD)];
        assert_eq!(due(&mut targets, now, &nodes), []);
        targets.committed("m".into(), target(NEW), [of_a_trainer].into_iter());
        let nodes = [node("m", 1, NEW), node("m", 2, OLD), node("m", 3, of_a_trainer)];
        assert_eq!(due(&mut targets, now, &nodes), names(&[("m-2", "m-1"), ("m-3", "m-1")]));
    }

    #[test]
    fn weights_of_another_router_are_never_replaced() {
        let now = Instant::now();
        let loaded = WeightVersion::LOADED;
        // Both routers see what the other one pushes.
        let mut first = pushed(OLD, &[loaded]);
        assert_eq!(due(&mut first, now, &[node("m", 1, OLD), node("m", 2, OLD)]), []);
        let mut second = pushed(NEW, &[OLD]);
        let nodes = [node("m", 1, NEW), node("m", 2, NEW), node("m", 3, loaded)];
        assert_eq!(due(&mut first, now, &nodes), []);
        assert_eq!(due(&mut second, now, &nodes), names(&[("m-3", "m-1")]));
        // The first one pushes the older weights again: the second one has replaced them, but not
        // these.
        first.committed("m".into(), target(OLD), [NEW, loaded].into_iter());
        let back = [node("m", 1, OLD), node("m", 2, OLD), node("m", 4, loaded)];
        assert_eq!(due(&mut second, now, &back), []);
        assert_eq!(due(&mut first, now, &back), names(&[("m-4", "m-1")]));
        // Weights that this router has never replaced.
        let unknown = node("m", 5, WeightVersion(99));
        assert_eq!(due(&mut first, now, &[unknown]), []);
    }

    #[test]
    fn failed_node_is_tried_again_later_from_another_place_and_does_not_stop_others() {
        let mut now = Instant::now();
        let mut targets = pushed(NEW, &[OLD]);
        let nodes = [node("m", 1, NEW), node("m", 2, NEW), node("m", 3, OLD), node("m", 4, OLD)];
        let mut places = Vec::new();
        for _ in 0..4 {
            let all = due(&mut targets, now, &nodes);
            assert_eq!(all.len(), 2, "{all:?}");
            places.push(all[0].1.clone());
            targets.failed(now, "m", Epoch(3));
            let rest = due(&mut targets, now, &nodes);
            assert_eq!(rest, names(&[("m-4", "m-2")]));
            now += RETRY_AFTER;
        }
        assert_eq!(places, ["m-1", "path", "m-2", "path"]);
        assert_eq!(targets.catch_ups(now, &nodes, |_| true)[0].target.timeout, target(NEW).timeout);
        assert!(targets.catch_ups(now, &nodes, |_| false).is_empty());
    }

    #[test]
    fn node_that_lost_its_weights_catches_up() {
        let mut targets = pushed(NEW, &[OLD]);
        let now = Instant::now();
        assert_eq!(due(&mut targets, now, &[node("m", 1, NEW), node("m", 2, NEW)]), []);
        let lost = [node("m", 1, WeightVersion::NONE), node("m", 2, NEW)];
        assert_eq!(due(&mut targets, now, &lost), names(&[("m-1", "m-2")]));
    }

    #[test]
    fn replaced_versions_are_bounded() {
        let mut targets = pushed(WeightVersion(100), &[]);
        for version in 101..300 {
            targets.committed("m".into(), target(WeightVersion(version)), [].into_iter());
        }
        assert_eq!(targets.0["m"].replaced.len(), REPLACED_MAX);
        assert!(due(&mut targets, Instant::now(), &[node("m", 1, WeightVersion(100))]).is_empty());
        assert_eq!(due(&mut targets, Instant::now(), &[node("m", 1, WeightVersion(298))]).len(), 1);
    }
}
