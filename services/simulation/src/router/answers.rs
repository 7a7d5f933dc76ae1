//! The answers of a router's requests: tokens for the clients, and the ends.

use std::time::{Duration, Instant};

use proto::v1::{self, FinishReason};

use super::{Answer, End, Router};
use crate::stats::ServedRequest;

impl Router {
    /// Gives tokens of the answer to the client.
    pub(super) fn emit(&mut self, now: Instant, id: usize, first_index: u32, tokens: &[v1::Token]) {
        let answer = self.answers.get_mut(&id).expect("requests are kept");
        if first_index == 0 {
            answer.first_emitted_at = Some(now);
            if self.stats.is_none() {
                let pick = self.picks.iter_mut().rfind(|pick| pick.request == id);
                let pick = pick.expect("tokens come from an attempt");
                pick.ttft = answer.picked_at.map(|at| now - at);
                self.first_tokens.insert(id, now - answer.arrived_at);
            }
        }
        answer.core.charge_tokens(now, tokens.len() as u32);
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

    /// Ends a complete request.
    pub(super) fn finish(&mut self, now: Instant, id: usize, reason: FinishReason) {
        if reason == FinishReason::Abort {
            self.coverage.count("ended by an update");
        }
        self.answer(id).client.check_complete(reason);
        self.count_request(now, id);
        self.end(now, id, End::Complete);
    }

    /// Records a complete request of a replay.
    pub(super) fn count_request(&mut self, now: Instant, id: usize) {
        let (Some(stats), Some(answer)) = (&mut self.stats, self.answers.get(&id)) else { return };
        stats.requests.push(ServedRequest {
            request: id,
            prompt_tokens: answer.core.request().requirements().prompt_tokens,
            cached_tokens: answer.cached_tokens.unwrap_or(0),
            output_tokens: answer.core.request().emitted().len() as u32,
            ttft: answer.first_emitted_at.map_or(Duration::ZERO, |at| at - answer.arrived_at),
            duration: now - answer.arrived_at,
            longest_gap: answer.pause,
            attempts: answer.attempts,
        });
    }

    /// Ends the request, and returns what it holds of the router core.
    pub(super) fn end(&mut self, now: Instant, id: usize, end: End) {
        let answer = self.answers.get_mut(&id).expect("requests are kept");
        assert!(!answer.has_ended, "request {id} ends twice");
        assert!(now <= answer.deadline, "request {id} ends after its deadline");
        answer.has_ended = true;
        answer.core.end(now, &mut self.core);
        self.core.handle_request_ended(&answer.plan.flow().name, 1);
        self.requests.remove(&answer.core.id());
        let attempts = answer.attempts;
        self.open.remove(&id);
        self.set_due(id);
        self.count_end(now, &end, attempts);
        if self.stats.is_some() {
            self.answers.remove(&id);
        }
    }

    pub(super) fn count_end(&mut self, now: Instant, end: &End, attempts: u32) {
        self.coverage.count_end(end, attempts);
        if let Some(stats) = &mut self.stats {
            stats.failed += u64::from(matches!(end, End::Failed(_) | End::Refused(_)));
            stats.last_end = Some(now);
        }
    }

    /// Updates the deadline of a request.
    pub(super) fn set_due(&mut self, id: usize) {
        let Some(answer) = self.answers.get_mut(&id) else { return };
        if let Some(at) = answer.due.take() {
            self.due.remove(&(at, id));
        }
        if !answer.has_ended {
            let reads_at = answer.stalled.map(|(at, _)| at);
            answer.due = answer.core.next_deadline().into_iter().chain(reads_at).min();
            self.due.extend(answer.due.map(|at| (at, id)));
        }
    }
}

impl Answer {
    /// Returns how long the client reads nothing after these tokens.
    fn stalls(&self, first_index: u32, count: u32) -> Option<Duration> {
        let (after, time) = self.plan.stalls?;
        (first_index..first_index + count).contains(&after).then_some(time)
    }
}
