//! Decides whether a node may serve an attempt of a request, and names the reason if no node may.

use std::{
    cmp::Reverse,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{
    Health,
    breaker::BreakerReason,
    member::{Member, NodeReports},
    milliseconds,
    requirements::NodeRequirements,
};
use crate::{ModelIdentity, NodeRecord, Role};

/// Reason why the directory picked no node. Each node has a reason of its own; this is the reason
/// of the node that is closest to being eligible (`nearness`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum NoNode {
    #[error("no {role} node is listed")]
    NoneListed { role: Role },
    #[error("no {role} node that is up serves the model")]
    OtherModel { role: Role },
    #[error("none of {listed} {role} nodes is up")]
    NoneUp { role: Role, listed: usize },
    #[error("every {role} node that is up is draining")]
    Draining { role: Role },
    #[error("no {role} node has the same model, weights and KV layout")]
    NoneFits { role: Role },
    #[error("no {role} node supports grammars of version {version}")]
    NoGrammar { role: Role, version: u32 },
    #[error("no {role} node returns pooled values")]
    NoPooling { role: Role },
    #[error("no {role} node supports sampling of version {version}")]
    NoSampling { role: Role, version: u32 },
    #[error("no {role} node has the adapter")]
    NoAdapter { role: Role },
    #[error("{tokens} tokens are more than the {tokens_max} that any {role} node takes")]
    TooLong { role: Role, tokens: u32, tokens_max: u32 },
    #[error("every {role} node has failed this request already")]
    Excluded { role: Role },
    #[error("the circuit breaker of every {role} node is open: {reason}")]
    Broken { role: Role, reason: BreakerReason, retry_after: Duration },
    #[error("every {role} node is busy, for another {retry_after:?}")]
    Busy {
        role: Role,
        retry_after: Duration,
        /// Whether another node could start the attempt now. The attempt still waits for the busy
        /// node, because the other node would prefill far more tokens.
        by_choice: bool,
    },
}

impl NoNode {
    /// Returns the reason as a text about one node. `Display` speaks of all nodes of the role.
    pub fn of_one_node(&self) -> String {
        match self {
            Self::NoneListed { .. } => "not listed".into(),
            Self::OtherModel { .. } => "serves another model".into(),
            Self::NoneUp { .. } => "not up".into(),
            Self::Draining { .. } => "draining".into(),
            Self::NoneFits { .. } => "other model, weights or KV layout".into(),
            Self::NoGrammar { version, .. } => format!("no grammars of version {version}"),
            Self::NoPooling { .. } => "no pooled values".into(),
            Self::NoSampling { version, .. } => format!("no sampling of version {version}"),
            Self::NoAdapter { .. } => "lacks the adapter".into(),
            Self::TooLong { tokens, tokens_max, .. } => {
                format!("{tokens} tokens, at most {tokens_max} allowed")
            }
            Self::Excluded { .. } => "failed this request before".into(),
            Self::Broken { reason, retry_after: Duration::ZERO, .. } => {
                format!("circuit breaker half-open: {reason}; another request probes the node")
            }
            Self::Broken { reason, retry_after, .. } => {
                let left_ms = milliseconds(*retry_after);
                format!("circuit breaker open for another {left_ms:.0} ms: {reason}")
            }
            Self::Busy { retry_after, .. } => {
                format!("busy for another {:.0} ms", milliseconds(*retry_after))
            }
        }
    }

    /// Returns a sort key of the reason: the greatest key is that of the node closest to being
    /// eligible. Among equal reasons, the node with the earlier retry or the larger limit is
    /// closer. `fits`: the node's last record fits the request. Such a node may serve the request
    /// once it is up and not draining, so it is closer than any node that does not fit.
    pub(super) fn nearness(&self, fits: bool) -> (u8, Reverse<Duration>, u32) {
        let (mut retry_after, mut tokens_max) = (Duration::ZERO, 0);
        // Up to 6 the node does not fit, from 7 on it does.
        let rank = match self {
            Self::NoneListed { .. } => 0,
            Self::OtherModel { .. } => 1,
            Self::NoneUp { .. } => 2 + 5 * u8::from(fits),
            Self::Draining { .. } => 3 + 5 * u8::from(fits),
            Self::NoneFits { .. } => 4,
            Self::NoGrammar { .. }
            | Self::NoPooling { .. }
            | Self::NoAdapter { .. }
            | Self::NoSampling { .. } => 5,
            Self::TooLong { tokens_max: limit, .. } => {
                tokens_max = *limit;
                6
            }
            Self::Excluded { .. } => 9,
            Self::Broken { retry_after: pause, .. } => {
                retry_after = *pause;
                10
            }
            Self::Busy { retry_after: pause, .. } => {
                retry_after = *pause;
                11
            }
        };
        (rank, Reverse(retry_after), tokens_max)
    }
}

/// Returns the last report of the node if the node is eligible, else the reason why it is not.
/// Returns `Err(None)` if the node is not up. `misfit`: the result of [`misfit`] for the node.
pub(super) fn eligible<'a>(
    now: Instant,
    role: Role,
    member: &'a Member,
    misfit: Option<NoNode>,
    requirements: &NodeRequirements<'_>,
) -> Result<&'a NodeReports, Option<NoNode>> {
    if matches!(misfit, Some(NoNode::OtherModel { .. })) {
        return Err(misfit);
    }
    let Some(seen) = member.serving() else {
        let draining = member.health == Health::Up;
        return Err(draining.then_some(NoNode::Draining { role }));
    };
    if misfit.is_some() {
        return Err(misfit);
    }
    let exclude = match role {
        Role::Prefill => requirements.exclude_prefill,
        Role::Decode => requirements.exclude_decode,
    };
    if exclude.contains(&seen.record.epoch) {
        return Err(Some(NoNode::Excluded { role }));
    }
    if let Some(until) = member.busy_until.filter(|until| *until > now) {
        return Err(Some(NoNode::Busy { role, retry_after: until - now, by_choice: false }));
    }
    match member.breaker.refuses(now) {
        Some((reason, retry_after)) => Err(Some(NoNode::Broken { role, reason, retry_after })),
        None => Ok(seen),
    }
}

/// Returns the reason why a node with this record cannot serve the request even when it is up and
/// idle; `None` if the node fits.
pub(super) fn misfit(
    role: Role,
    record: &NodeRecord,
    requirements: &NodeRequirements<'_>,
) -> Option<NoNode> {
    if requirements.model != record.model {
        return Some(NoNode::OtherModel { role });
    }
    // Applies to decode nodes only. A prefill node must fit its decode node instead, which is
    // checked when the two are paired.
    let identity = requirements.identity.filter(|_| role == Role::Decode);
    let fits = |identity: &ModelIdentity| match requirements.any_weights {
        true => record.identity.fits_but_weights(identity),
        false => record.identity.fits(identity),
    };
    if identity.is_some_and(|identity| !fits(identity)) {
        return Some(NoNode::NoneFits { role });
    }
    if requirements.grammar_version > record.grammar_version {
        return Some(NoNode::NoGrammar { role, version: requirements.grammar_version });
    }
    if requirements.pooling && !record.pooling {
        return Some(NoNode::NoPooling { role });
    }
    if requirements.sampling_version > record.sampling_version {
        return Some(NoNode::NoSampling { role, version: requirements.sampling_version });
    }
    let has = |hash| record.adapters.iter().any(|adapter| adapter.content_hash == hash);
    if requirements.adapter.is_some_and(|hash| !has(hash)) {
        return Some(NoNode::NoAdapter { role });
    }
    let sequence_max = record.sequence_tokens_max;
    // A decode node must have room for the prompt and the whole answer: it would truncate a longer
    // answer. A prefill node generates one token.
    let answer_tokens = match role {
        Role::Prefill => 1,
        Role::Decode => requirements.new_tokens_max.max(1),
    };
    let lengths = [
        (requirements.prompt_tokens, record.prompt_tokens_max),
        (requirements.tokens.saturating_add(answer_tokens), sequence_max),
    ];
    let (tokens, tokens_max) = lengths.into_iter().find(|(tokens, limit)| tokens > limit)?;
    Some(NoNode::TooLong { role, tokens, tokens_max })
}
