//! Metrics of live weight updates, which a router records.

use std::{sync::Arc, time::Duration};

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Gauge, Histogram},
};

use super::{MetricRow, Metrics, REQUEST_SECONDS, STEP_SECONDS};

labels! {
    /// Kind of a weight update.
    enum WeightUpdateKind("kind") {
        /// An operator or a trainer began the update of all nodes.
        Operator = "operator",
        /// The router updates one node that missed an update.
        CatchUp = "catch_up",
    }
}

labels! {
    /// Outcome of a weight update.
    pub enum WeightUpdateOutcome("outcome") {
        Committed = "committed",
        Aborted = "aborted",
    }
}

labels! {
    /// Phase of a running weight update.
    pub enum WeightUpdatePhase("phase") {
        Preparing = "preparing",
        /// Every node is prepared, and the update waits for the commit.
        Prepared = "prepared",
        Committing = "committing",
        Aborting = "aborting",
    }
}

instruments! {
    struct WeightInstruments ["gen_ai.request.model"] {
        updates: Counter<u64>, (WeightUpdateKind, WeightUpdateOutcome) => "baton.weights.updates",
            "Ended weight updates, by kind and outcome; catch_up: of one node that missed an update";
        duration: Histogram<f64>, (), REQUEST_SECONDS => "baton.weights.update.duration" "s",
            "Time from the begin of an operator's weight update to its end";
        pause: Histogram<f64>, (), STEP_SECONDS => "baton.weights.pause" "s",
            "Time for which a node ran no step while it changed its weights";
        phase: Gauge<u64>, WeightUpdatePhase => "baton.weights.phase",
            "1 in the phase of the operator's running weight update, otherwise 0";
        versions: Gauge<u64>, () => "baton.weights.versions", "Different weight versions of the model's nodes";
        behind: Gauge<u64>, () => "baton.weights.nodes_behind",
            "Nodes of the model with other weights than most of its nodes";
    }
}

pub(super) fn rows() -> Vec<MetricRow> {
    WeightInstruments::rows()
}

/// The instruments of one model's weight updates. Cheap to clone.
#[derive(Clone)]
pub struct WeightMetrics(Arc<WeightInstruments>);

impl WeightMetrics {
    /// Creates the instruments for a model by its served name.
    pub fn new(metrics: &Metrics, model: &str) -> Self {
        let model = KeyValue::new("gen_ai.request.model", model.to_owned());
        Self(Arc::new(WeightInstruments::new(metrics, &[model])))
    }

    /// Records an ended update of an operator, and the pauses of the nodes that committed.
    pub fn update_ended(
        &self,
        outcome: WeightUpdateOutcome,
        took: Duration,
        pauses: impl Iterator<Item = Duration>,
    ) {
        self.0.updates.record(1, (WeightUpdateKind::Operator, outcome));
        self.0.duration.record(took.as_secs_f64(), ());
        self.record_pauses(pauses);
    }

    /// Records an ended catch-up.
    pub fn catch_up_ended(
        &self,
        outcome: WeightUpdateOutcome,
        pauses: impl Iterator<Item = Duration>,
    ) {
        self.0.updates.record(1, (WeightUpdateKind::CatchUp, outcome));
        self.record_pauses(pauses);
    }

    fn record_pauses(&self, pauses: impl Iterator<Item = Duration>) {
        pauses.for_each(|pause| self.0.pause.record(pause.as_secs_f64(), ()));
    }

    /// Sets the phase of the running update; `None`: no update runs.
    pub fn set_phase(&self, running: Option<WeightUpdatePhase>) {
        for phase in [
            WeightUpdatePhase::Preparing,
            WeightUpdatePhase::Prepared,
            WeightUpdatePhase::Committing,
            WeightUpdatePhase::Aborting,
        ] {
            self.0.phase.record(u64::from(running == Some(phase)), phase);
        }
    }

    /// Sets the number of different versions, and of nodes with other weights than most nodes.
    pub fn set_versions(&self, versions: usize, behind: usize) {
        self.0.versions.record(versions as u64, ());
        self.0.behind.record(behind as u64, ());
    }
}
