//! A prefill node whose blocks hold finished prompts, and decode nodes whose blocks are reserved.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use kv_transfer::api::{Event, TransferId};

use crate::world::{CALM, Step, TransferPlan, World};

const SENDER: usize = 0;

/// The node's rule that prevents a deadlock: a prefill takes blocks only after its `RESERVE` has
/// arrived, so every finished prompt has a receiver.
struct Prefills {
    waiting: VecDeque<TransferId>,
    events_seen: usize,
}

impl Prefills {
    fn step(&mut self, world: &mut World) {
        let ready: Vec<TransferId> = world.nodes[SENDER].events[self.events_seen..]
            .iter()
            .filter_map(|(_, event)| match event {
                Event::Ready { transfer, .. } => Some(*transfer),
                _ => None,
            })
            .collect();
        self.events_seen = world.nodes[SENDER].events.len();
        self.waiting.extend(ready);
        while let Some(transfer) = self.waiting.front().copied() {
            if !world.start_computing(transfer) {
                break;
            }
            self.waiting.pop_front();
        }
    }
}

/// Each pool holds two prompts. 60 prompts arrive at once, at the decode nodes in one order and at
/// the prefill node in the opposite order.
#[test]
fn full_block_pools_on_both_sides_do_not_deadlock() {
    for seed in 0..20 {
        let mut world = World::new(seed, 3, 8, CALM);
        world.computes = false;
        let start = world.start();
        let plans: Vec<TransferPlan> = (0..60)
            .map(|id| TransferPlan {
                transfer: TransferId(id + 1),
                sender: SENDER,
                receiver: 1 + (id % 2) as usize,
                block_count: 4,
                cached: 0,
                deadline: Duration::from_secs(60),
            })
            .collect();
        for plan in plans.iter().rev() {
            world.plan(plan.clone(), None, Some(start));
        }
        let mut unreserved: VecDeque<TransferPlan> = plans.iter().cloned().collect();
        let mut prefills = Prefills { waiting: VecDeque::new(), events_seen: 0 };
        let mut fullest = (usize::MAX, usize::MAX);
        while world.now() < start + Duration::from_secs(30) {
            reserve(&mut world, &mut unreserved);
            prefills.step(&mut world);
            let next: Instant = world.now() + Duration::from_millis(1);
            world.run_until(next);
            fullest.0 = fullest.0.min(world.nodes[SENDER].free_count());
            fullest.1 = fullest.1.min(world.nodes[1].free_count());
        }
        assert_eq!(fullest, (0, 0), "seed {seed}: both sides were full");
        for plan in &plans {
            for node in [plan.sender, plan.receiver] {
                let end = world.end_of(node, plan.transfer);
                assert!(
                    end.is_some_and(|(_, succeeded)| succeeded),
                    "seed {seed}: {plan:?} at {node}"
                );
            }
        }
    }
}

/// Reserves blocks at each decode node, first come, first served.
fn reserve(world: &mut World, unreserved: &mut VecDeque<TransferPlan>) {
    let mut is_full = [false; 3];
    let waiting = std::mem::take(unreserved);
    for plan in waiting {
        let receiver = plan.receiver;
        let blocks = if is_full[receiver] {
            None
        } else {
            world.nodes[receiver].take(plan.transfer, plan.block_count)
        };
        match blocks {
            Some(blocks) => {
                let command = world.receive_command(&plan, blocks);
                world.at(world.now(), receiver, Step::Command(command));
            }
            None => {
                is_full[receiver] = true;
                unreserved.push_back(plan);
            }
        }
    }
}
