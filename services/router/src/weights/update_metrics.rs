//! Metrics of the weight updates of all models.

use std::{collections::HashMap, sync::Arc, time::Instant};

use telemetry::metrics::{WeightMetrics, WeightUpdateOutcome, WeightUpdatePhase};
use weight_transfer::{CoordinatorPhase, WeightVersion};

use super::update::ModelUpdate;
use crate::nodes::WeightNode;

/// Metrics by the model's name.
pub(super) struct UpdateMetrics(pub HashMap<Arc<str>, WeightMetrics>);

impl UpdateMetrics {
    /// Records an ended update of an operator.
    pub(super) fn update_ended(&self, now: Instant, update: &ModelUpdate) {
        if let Some(metrics) = self.0.get(&update.model) {
            metrics.update_ended(outcome(update), update.age(now), update.pauses());
        }
    }

    /// Records an ended catch-up of one node.
    pub(super) fn catch_up_ended(&self, update: &ModelUpdate) {
        if let Some(metrics) = self.0.get(&update.model) {
            metrics.catch_up_ended(outcome(update), update.pauses());
        }
    }

    /// Sets the phase of the running update of an operator; `None`: no update runs.
    pub(super) fn set_phase(&self, running: Option<&ModelUpdate>) {
        for (model, metrics) in &self.0 {
            let update = running.filter(|update| update.model == *model);
            metrics.set_phase(update.map(|update| match update.phase() {
                CoordinatorPhase::Preparing => WeightUpdatePhase::Preparing,
                CoordinatorPhase::Prepared(_) => WeightUpdatePhase::Prepared,
                CoordinatorPhase::Committing(_) | CoordinatorPhase::Committed { .. } => {
                    WeightUpdatePhase::Committing
                }
                CoordinatorPhase::Aborted { .. } => WeightUpdatePhase::Aborting,
            }));
        }
    }

    /// Sets the versions of the nodes of each model.
    pub(super) fn set_versions(&self, nodes: &[WeightNode]) {
        for (model, metrics) in &self.0 {
            let of_model = nodes.iter().filter(|node| *node.model == **model);
            let (versions, behind) = spread(of_model.map(|node| node.version));
            metrics.set_versions(versions, behind);
        }
    }
}

fn outcome(update: &ModelUpdate) -> WeightUpdateOutcome {
    match update.phase() {
        CoordinatorPhase::Committed { .. } => WeightUpdateOutcome::Committed,
        _ => WeightUpdateOutcome::Aborted,
    }
}

/// Returns the number of different versions, and of nodes without the most frequent version.
fn spread(versions: impl Iterator<Item = WeightVersion>) -> (usize, usize) {
    let mut counts: HashMap<WeightVersion, usize> = HashMap::new();
    versions.for_each(|version| *counts.entry(version).or_default() += 1);
    let (total, most) = (counts.values().sum::<usize>(), counts.values().max().copied());
    (counts.len(), total - most.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_with_other_weights_than_most_are_behind() {
        let spread = |versions: &[u64]| spread(versions.iter().copied().map(WeightVersion));
        assert_eq!(spread(&[]), (0, 0));
        assert_eq!(spread(&[7, 7, 7]), (1, 0));
        assert_eq!(spread(&[7, 1, 7, 8, 7]), (3, 2));
    }
}
