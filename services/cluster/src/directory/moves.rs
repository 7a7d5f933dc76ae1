//! Sequences that leave a draining node. A sequence moves with its KV: the draining node serves as
//! prefill node of the sequence's next attempt, because the node has cached all full blocks.

use std::time::{Duration, Instant};

use super::{
    AssignmentId, Directory, Health, Member,
    candidate::{AttemptLoad, Candidate},
    capacity,
    eligible::misfit,
    requirements::{NodeRequirements, RequiredCapacity},
};
use crate::{Epoch, Role};

/// Drain of the node that decodes a sequence. Another node can take the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drain {
    /// Time until the node aborts its sequences; `None` without a limit.
    pub grace: Option<Duration>,
    /// Whether the node can send the sequence's KV to a node with a free slot and blocks.
    pub sends_kv: bool,
}

impl Directory {
    /// Returns how the attempt's node drains; `None` if the node does not drain, or no other node
    /// can take the request.
    pub fn drain(
        &self,
        now: Instant,
        id: AssignmentId,
        requirements: &NodeRequirements<'_>,
    ) -> Option<Drain> {
        let seen = self.members.get(&self.node_of(id)?)?.seen.as_ref()?;
        if !seen.load.draining {
            return None;
        }
        let mut decode =
            self.candidates(now, Role::Decode, requirements, &[], &mut Vec::new()).ok()?;
        decode.retain(|node| node.member.breaker.refuses(now).is_none());
        if decode.is_empty() {
            return None;
        }
        let since = now.saturating_duration_since(seen.reported_at);
        let grace = Duration::from_millis(seen.load.drain_ms).saturating_sub(since);
        // On a full node the sequence would wait, while on the draining node it still runs.
        let start = RequiredCapacity::Start { headroom: false };
        let has_room = capacity::retain_free(start, &mut decode, |_| true).is_ok();
        let sender = self.sender(seen.record.epoch, requirements).filter(|_| has_room);
        let receives = |sender: &Candidate<'_>| {
            decode.iter().any(|node| self.may_pair(now, requirements, node, sender))
        };
        Some(Drain {
            grace: (seen.load.drain_ms > 0).then_some(grace),
            sends_kv: sender.as_ref().is_some_and(receives),
        })
    }

    /// Returns the node process that decodes a sequence, as prefill node of the sequence's next
    /// attempt; `None` if the node cannot send KV. A draining node is returned, too.
    pub(super) fn sender(
        &self,
        epoch: Epoch,
        requirements: &NodeRequirements<'_>,
    ) -> Option<Candidate<'_>> {
        let is_sender =
            |member: &&Member| member.health == Health::Up && member.epoch() == Some(epoch);
        let member = self.members.values().find(is_sender)?;
        let seen = member.seen.as_ref()?;
        let sends = seen.record.both_roles || seen.record.role == Role::Prefill;
        let misfit = misfit(Role::Prefill, &seen.record, requirements);
        (sends && misfit.is_none()).then(|| Candidate {
            key: member.node,
            role: Role::Prefill,
            takes_both: seen.record.both_roles,
            member,
            seen,
            need: AttemptLoad::of_sender(seen, requirements),
            state: None,
        })
    }
}
