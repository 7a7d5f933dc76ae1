//! The events of a run, in any order.

use proptest::prelude::*;

/// An event. Its indices choose among the existing items, modulo their number.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// `lower`: with a lower id than every earlier update, otherwise with a higher one. `seed`: the
    /// node from which the others copy.
    Begin {
        commits_at_once: bool,
        lower: bool,
        seed: Option<usize>,
    },
    CatchUp(usize),
    Commit(usize),
    AbortUpdate(usize),
    CoordinatorDies(usize),
    NodeDies(usize),
    /// The trainer of an update that a node receives.
    TrainerDies(usize),
    Restore(usize),
    Partition(usize),
    Heal(usize),
    Call(usize),
    DeliverCall {
        index: usize,
        keep: bool,
    },
    DeliverReply {
        index: usize,
        keep: bool,
    },
    LoseCall(usize),
    Receive {
        index: usize,
        damaged: bool,
    },
    FailReceive(usize),
    Advance(u64),
}

/// Returns random events. Messages are more frequent than faults.
pub(crate) fn event() -> impl Strategy<Value = Event> {
    let index = any::<usize>;
    prop_oneof![
        2 => (any::<bool>(), any::<bool>(), prop::option::of(index()))
            .prop_map(|(commits_at_once, lower, seed)| Event::Begin { commits_at_once, lower, seed }),
        1 => index().prop_map(Event::CatchUp),
        1 => index().prop_map(Event::Commit),
        1 => index().prop_map(Event::AbortUpdate),
        1 => index().prop_map(Event::CoordinatorDies),
        1 => index().prop_map(Event::NodeDies),
        1 => index().prop_map(Event::TrainerDies),
        2 => index().prop_map(Event::Restore),
        1 => index().prop_map(Event::Partition),
        2 => index().prop_map(Event::Heal),
        12 => index().prop_map(Event::Call),
        12 => (index(), any::<bool>()).prop_map(|(index, keep)| Event::DeliverCall { index, keep }),
        12 => (index(), any::<bool>()).prop_map(|(index, keep)| Event::DeliverReply { index, keep }),
        2 => index().prop_map(Event::LoseCall),
        8 => (index(), prop::bool::weighted(0.05))
            .prop_map(|(index, damaged)| Event::Receive { index, damaged }),
        1 => index().prop_map(Event::FailReceive),
        4 => (1u64..4000).prop_map(Event::Advance),
    ]
}
