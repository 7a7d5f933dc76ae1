//! A prefill node full of finished work against decode nodes full of reservations.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use kv_transfer::api::{Event, TransferId};

use crate::world::{CALM, Journey, Step, World};

const SENDER: usize = 0;

/// The node's rule that makes it safe: blocks for a prefill are taken only when its `RESERVE` is
/// here, so finished work always has somewhere to go.
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

/// Each pool holds two prompts; 60 are asked for at once, by the decode nodes in one order and of
/// the prefill node in the opposite one.
#[test]
fn full_pools_on_both_sides_empty_each_other() {
    for seed in 0..20 {
        let mut world = World::new(seed, 3, 8, CALM);
        world.computes = false;
        let start = world.start();
        let journeys: Vec<Journey> = (0..60)
            .map(|id| Journey {
                transfer: TransferId(id + 1),
                sender: SENDER,
                receiver: 1 + (id % 2) as usize,
                block_count: 4,
                cached: 0,
                deadline: Duration::from_secs(60),
            })
            .collect();
        for journey in journeys.iter().rev() {
            world.journey(journey.clone(), None, Some(start));
        }
        let mut unreserved: VecDeque<Journey> = journeys.iter().cloned().collect();
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
        for journey in &journeys {
            for node in [journey.sender, journey.receiver] {
                let end = world.end_of(node, journey.transfer);
                assert!(end.is_some_and(|(_, well)| well), "seed {seed}: {journey:?} at {node}");
            }
        }
    }
}

/// First come, first served, at each decode node.
fn reserve(world: &mut World, unreserved: &mut VecDeque<Journey>) {
    let mut is_full = [false; 3];
    let waiting = std::mem::take(unreserved);
    for journey in waiting {
        let receiver = journey.receiver;
        let blocks = if is_full[receiver] {
            None
        } else {
            world.nodes[receiver].take(journey.transfer, journey.block_count)
        };
        match blocks {
            Some(blocks) => {
                let command = world.receive_command(&journey, blocks);
                world.at(world.now(), receiver, Step::Command(command));
            }
            None => {
                is_full[receiver] = true;
                unreserved.push_back(journey);
            }
        }
    }
}
