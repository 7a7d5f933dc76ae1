//! The queue of requests of one model that found every node busy.

use std::collections::VecDeque;

/// Requests that pick nodes at the same time. Few, so that busy nodes do not spend their time on
/// refusals; more than one, so that one slow node does not delay every request.
const TURNS_MAX: usize = 4;

/// Gives queued requests their turn to pick nodes, in order of arrival.
#[derive(Debug)]
pub struct TurnQueue<Id> {
    waiting: VecDeque<Id>,
    picking: Vec<Id>,
}

impl<Id> Default for TurnQueue<Id> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), picking: Vec::new() }
    }
}

impl<Id: Copy + PartialEq> TurnQueue<Id> {
    /// Whether no request waits for its turn or has it: a new request may pick at once.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.picking.is_empty()
    }

    /// Adds a request behind every other one. Does nothing if the request is in the queue.
    pub fn join(&mut self, id: Id) {
        if !self.waiting.contains(&id) && !self.picking.contains(&id) {
            self.waiting.push_back(id);
        }
    }

    /// Removes a request, and with it its turn.
    pub fn leave(&mut self, id: Id) {
        self.waiting.retain(|waiting| *waiting != id);
        self.picking.retain(|picking| *picking != id);
    }

    /// Gives a free turn to the first waiting request, which keeps the turn until it leaves.
    pub fn next_turn(&mut self) -> Option<Id> {
        if self.picking.len() >= TURNS_MAX {
            return None;
        }
        let id = self.waiting.pop_front()?;
        self.picking.push(id);
        Some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_bounded_and_given_in_order_of_arrival() {
        let mut queue = TurnQueue::default();
        assert!(queue.is_empty());
        (0..7).for_each(|id| queue.join(id));
        queue.join(0);
        let next = |queue: &mut TurnQueue<u32>| {
            std::iter::from_fn(|| queue.next_turn()).collect::<Vec<_>>()
        };
        assert_eq!(next(&mut queue), [0, 1, 2, 3]);
        queue.leave(5);
        queue.leave(2);
        queue.leave(0);
        assert_eq!(next(&mut queue), [4, 6]);
        [1, 3, 4].into_iter().for_each(|id| queue.leave(id));
        assert!(!queue.is_empty(), "request 6 has its turn");
        queue.leave(6);
        assert!(queue.is_empty());
    }
}
