//! Requests that wait for a turn in the shipped fair queue.

use std::time::Instant;

use router::fair_queue::{WaitLimits, WaitRequest};

use super::{End, Router};

impl Router {
    /// Joins the queue, or passes the turn.
    pub(super) fn queue(&mut self, now: Instant, id: usize) {
        let answer = self.answers.get_mut(&id).expect("requests are kept");
        let queue = self.waiting.entry(answer.model.clone()).or_default();
        if answer.queued.is_some() {
            let pass = std::mem::take(&mut answer.pass);
            return queue.passed(now, id, pass);
        }
        let wanted = answer.core.wanted();
        let request = WaitRequest {
            flow: answer.flow.clone(),
            prompt_tokens: wanted.tokens,
            output_tokens_max: wanted.new_tokens_max,
            limits: WaitLimits::new(wanted.room, self.policy.busy_timeout, answer.deadline),
            has_begun: !answer.core.emitted().is_empty(),
            session_since: answer.turn.since(),
        };
        match queue.join(now, id, &request) {
            Ok(limit) => answer.queued = Some(limit),
            Err(_) => self.end(now, id, End::Refused),
        }
    }

    /// Leaves the queue if the request is in it.
    pub(super) fn leave_queue(&mut self, id: usize) {
        let answer = self.answer(id);
        answer.queued = None;
        let model = answer.model.clone();
        if let Some(queue) = self.waiting.get_mut(&model) {
            queue.leave(id);
        }
    }

    /// Gives turns to requests at the heads of the queues.
    pub(super) fn give_turns(&mut self, now: Instant) {
        for model in self.waiting.keys().cloned().collect::<Vec<_>>() {
            while let Some(id) = self.waiting.get_mut(&model).and_then(|queue| queue.take_late(now))
            {
                let answer = self.answer(id);
                let limit = answer.queued.expect("a late request is in the queue");
                answer.core.handle_late_turn(now, limit);
                self.perform(now, id);
            }
            while let Some(id) = self.waiting.get_mut(&model).and_then(|queue| queue.next_turn(now))
            {
                self.coverage.count("turns");
                self.answer(id).core.handle_turn();
                self.perform(now, id);
            }
        }
    }
}
