//! The weight updates that a seed determines.

use std::time::Duration;

use engine::event::InFlight;
use simulation_base::Random;

use crate::scenario::{Fault, Severity};

/// An update that an operator begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpdatePlan {
    pub router: usize,
    pub model: usize,
    /// Value of each byte of the weights.
    pub weights: u8,
    /// Treatment of running sequences.
    pub in_flight: InFlight,
    /// Whether running sequences finish before the change.
    pub waits: bool,
    /// Whether the other nodes begin only when one node is prepared.
    pub has_seed: bool,
    pub decision: Decision,
    pub timeout: Duration,
    /// Longest time in which a node receives the weights.
    pub receive_max: Duration,
    /// Chance in percent that a node overwrites the weights in use.
    pub in_place_percent: u64,
    /// Chance in percent that a node receives other bytes.
    pub damage_percent: u64,
    pub trainer_dies_after: Option<Duration>,
    /// Number of calls that begin or commit the update after which the coordinator's router dies.
    pub router_dies_after: Option<u32>,
}

/// The operator's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    CommitAtOnce,
    Commit { after: Duration },
    Abort { after: Duration },
}

/// Returns the updates of a seed. If every request must complete, every node receives the commit,
/// and no request ends early.
pub(crate) fn of_seed(
    seed: u64,
    severity: Severity,
    (router_count, model_count): (u64, u64),
    fault_count: u64,
) -> Vec<(Duration, Fault)> {
    let mut random = Random::new(seed ^ 0x7765_6967_6874_7321);
    let is_severe = match severity {
        Severity::Severe => true,
        // No fault makes a node start with old weights.
        Severity::Mild if fault_count == 0 => false,
        Severity::Mild | Severity::PrefillOnly => return Vec::new(),
    };
    let modes = [
        (InFlight::Recompute, false),
        (InFlight::KeepKv, false),
        (InFlight::Recompute, true),
        (InFlight::Abort, false),
    ];
    let mut updates = Vec::new();
    for number in 0..random.below(6).saturating_sub(3) {
        let at = random.millis(0..=4000);
        let (in_flight, waits) = random.pick(&modes[..if is_severe { 4 } else { 3 }]);
        let after = random.millis(0..=1500);
        let decision = match random.below(if is_severe { 6 } else { 5 }) {
            0..=2 => Decision::CommitAtOnce,
            3 | 4 => Decision::Commit { after },
            _ => Decision::Abort { after },
        };
        let receive_max = random.millis(1..=800);
        let mut when_severe = |percent| is_severe && random.chance(percent);
        let (is_short, trainer_dies) = (when_severe(20), when_severe(20));
        let (router_dies, in_place) = (when_severe(35), when_severe(50));
        let plan = UpdatePlan {
            router: random.below(router_count) as usize,
            model: random.below(model_count) as usize,
            weights: 7 + number as u8,
            in_flight,
            waits,
            has_seed: random.chance(25),
            decision,
            timeout: Duration::from_millis(if is_short { 600 } else { 5000 }),
            receive_max,
            in_place_percent: if in_place { 50 } else { 0 },
            damage_percent: if is_severe { 2 } else { 0 },
            trainer_dies_after: trainer_dies.then(|| random.up_to(receive_max)),
            router_dies_after: router_dies.then(|| random.within(1..=12)),
        };
        updates.push((at, Fault::UpdateWeights(plan)));
    }
    updates
}
