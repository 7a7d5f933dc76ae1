//! The answers of a router's requests: tokens for the clients, and the ends.

use std::time::{Duration, Instant};

use proto::v1;
use router::request_core::Side;

use super::{Answer, End, Router};
use crate::{nodes::Assigned, stats::ServedRequest};

impl Router {
    /// Gives tokens of the answer to the client.
    pub(super) fn emit(&mut self, now: Instant, id: usize, first_index: u32, tokens: &[v1::Token]) {
        let answer = self.answers.get_mut(&id).expect("requests are kept");
        if first_index == 0
            && let Some((decode, _)) = &answer.nodes
        {
            self.nodes.first_token(now, decode);
            answer.first_emitted_at = Some(now);
            if self.stats.is_none() {
                let pick = self.picks.iter_mut().rfind(|pick| pick.request == id);
                let pick = pick.expect("tokens come from an attempt");
                pick.ttft = answer.picked_at.map(|at| now - at);
                self.first_tokens.insert(id, now - answer.arrived_at);
            }
        }
        if let Some(charge) = &mut answer.charge {
            charge.emitted(now, tokens.len() as u32);
        }
        let gap = answer.emitted_at.replace(now).map(|at| now - at);
        let stop = answer.client.receive(first_index, tokens);
        match answer.stalls(first_index, tokens.len() as u32) {
            Some(time) => {
                answer.stalled = Some((now + time, stop));
                answer.core.handle_client_stalled();
            }
            None => answer.core.handle_emitted(now, stop),
        }
        if let (Some(stats), Some(gap)) = (&mut self.stats, gap) {
            stats.inter_token.add(gap);
        }
        let gap = gap.unwrap_or_default();
        answer.pause = answer.pause.max(gap);
        self.longest_gap = self.longest_gap.max(gap);
        if first_index > 1 {
            self.longest_decode_gap = self.longest_decode_gap.max(gap);
            #[cfg(test)]
            self.decode_gaps.push((id, gap));
        }
    }

    /// Records a complete request of a replay.
    pub(super) fn count_request(&mut self, now: Instant, id: usize) {
        let (Some(stats), Some(answer)) = (&mut self.stats, self.answers.get(&id)) else { return };
        stats.requests.push(ServedRequest {
            request: id,
            prompt_tokens: answer.core.wanted().prompt_tokens,
            cached_tokens: answer.cached_tokens.unwrap_or(0),
            output_tokens: answer.core.emitted().len() as u32,
            ttft: answer.first_emitted_at.map_or(Duration::ZERO, |at| at - answer.arrived_at),
            duration: now - answer.arrived_at,
            longest_gap: answer.pause,
            attempts: answer.attempts,
        });
    }

    /// Ends the request, and removes it from the queue and the deadlines.
    pub(super) fn end(&mut self, now: Instant, id: usize, end: End) {
        let answer = self.answers.get_mut(&id).expect("requests are kept");
        assert!(answer.end.is_none(), "request {id} ends twice");
        assert!(now <= answer.deadline, "request {id} ends after its deadline");
        let last_block = answer.core.last_block().filter(|_| end == End::Complete);
        let sessions = self.sessions.get_mut(&answer.model).expect("the turn has arrived");
        sessions.ended(&answer.turn, last_block);
        let attempts = answer.attempts;
        answer.end = Some(end.clone());
        self.open.remove(&id);
        self.set_due(id);
        self.coverage.count_end(&end, attempts);
        self.leave_queue(id);
        if let Some(stats) = &mut self.stats {
            stats.failed += u64::from(matches!(end, End::Failed(_) | End::Refused));
            stats.last_end = Some(now);
            self.answers.remove(&id);
        }
    }
}

impl Answer {
    /// Returns how long the client reads nothing after these tokens.
    fn stalls(&self, first_index: u32, count: u32) -> Option<Duration> {
        let (after, time) = self.plan.stalls?;
        (first_index..first_index + count).contains(&after).then_some(time)
    }

    pub(super) fn node(&self, side: Side) -> Option<&Assigned> {
        match (side, self.nodes.as_ref()?) {
            (Side::Decode, (decode, _)) => Some(decode),
            (Side::Prefill, (_, prefill)) => prefill.as_ref(),
        }
    }
}
