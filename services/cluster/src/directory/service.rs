//! The router's measurements of the nodes' service: they open and close the circuit breakers of
//! nodes and pairs.

use std::time::{Duration, Instant};

use super::{
    AssignmentId, Directory, NodeKey,
    breaker::{Breaker, BreakerReason, FAILURES_MAX},
    member::Member,
    transfers::transfer_mean,
};
use crate::{NodeAddress, Role};

/// A node is slow if its inter-token latency or transfer time is this many times the median of its
/// pool, and exceeds the median by one of the limits below. Clients do not perceive a smaller
/// difference.
const SLOW_FACTOR: f64 = 3.0;
const SLOW_ITL_MS: f64 = 10.0;
/// 20 ms for a prompt of 1,000 tokens.
const SLOW_TRANSFER_TOKEN_MS: f64 = 0.02;
/// Minimum number of nodes in a pool: fewer have no meaningful median.
const POOL_MIN: usize = 3;
/// At most 1/3 of the nodes of a pool are excluded as slow: the others must carry their load.
const SLOW_ONE_IN: usize = 3;
/// Minimum number of attempts in the mean inter-token latency of a node.
const ITL_ATTEMPTS_MIN: u32 = 4;
/// Minimum number of decoded tokens in the mean inter-token latency of an attempt.
const ITL_TOKENS_MIN: u32 = 8;
/// Weight of an attempt in the moving average of a node's inter-token latency.
const ITL_SHARE: f64 = 1.0 / 8.0;

/// A failed attempt, by the nodes that may be at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    Node(AssignmentId),
    /// The KV was not transferred: the node at fault, or the link, is unknown.
    Transfer {
        prefill: AssignmentId,
        decode: AssignmentId,
    },
}

/// A breaker that opened or closed: log and count it.
#[derive(Clone, Debug, PartialEq)]
pub struct BreakerChange {
    pub address: NodeAddress,
    /// The other node, if the breaker is the one of a pair.
    pub partner: Option<NodeAddress>,
    /// `None`: the breaker closed.
    pub opened: Option<BreakerReason>,
    pub detail: String,
}

/// A prefill node and a decode node with a measured KV transfer or an open circuit breaker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link<'a> {
    pub prefill: &'a NodeAddress,
    pub decode: &'a NodeAddress,
    /// Transfer time of the KV of a token, in milliseconds; `None` without a completed transfer.
    pub token_ms: Option<f64>,
    /// Whether the circuit breaker of the pair is open or half-open.
    pub is_excluded: bool,
}

/// Whether a pair is excluded, its transfer time, and the pair.
type RankedLink = (bool, Option<f64>, (NodeKey, NodeKey));

/// A measure that finds slow nodes.
struct Measure {
    name: &'static str,
    /// A slow node exceeds the median of its pool by more than this.
    excess_min_ms: f64,
    of: fn(&Latency) -> Option<f64>,
}

const ITL: Measure =
    Measure { name: "inter-token latency", excess_min_ms: SLOW_ITL_MS, of: Latency::itl };
const TRANSFER: Measure = Measure {
    name: "transfer time of a token",
    excess_min_ms: SLOW_TRANSFER_TOKEN_MS,
    of: |latency| latency.transfer_ms,
};

/// Latency of a node, as this router measures it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Latency {
    /// Moving average of the inter-token latency.
    itl_ms: f64,
    attempts: u32,
    /// Transfer time of a token over the node's fast links.
    transfer_ms: Option<f64>,
    /// Name of the measure that last excluded the node. The exclusion ends when a probe is not slow
    /// by this measure.
    slow_by: Option<&'static str>,
}

impl Latency {
    fn add_itl(&mut self, itl_ms: f64) {
        let share = if self.attempts == 0 { 1.0 } else { ITL_SHARE };
        self.itl_ms += (itl_ms - self.itl_ms) * share;
        self.attempts = self.attempts.saturating_add(1);
    }

    fn itl(&self) -> Option<f64> {
        (self.attempts >= ITL_ATTEMPTS_MIN).then_some(self.itl_ms)
    }
}

impl Directory {
    /// Takes the changes of breakers since the last call.
    pub fn take_breaker_changes(&mut self) -> Vec<BreakerChange> {
        std::mem::take(&mut self.breaker_changes)
    }

    /// Returns the number of nodes of this role whose breaker is open or half-open.
    pub fn excluded(&self, role: Role) -> usize {
        let members = self.members.values().filter(|member| member.address.role == role);
        members.filter(|member| member.breaker.reason().is_some()).count()
    }

    /// Returns at most `most` of the links that the router has measured, or that a circuit breaker
    /// excludes, and the number of all of them. The excluded links come first, then the slowest.
    /// Selects the links before it looks up addresses: 1,000 nodes have 250,000 pairs.
    pub fn links(&self, most: usize) -> (Vec<Link<'_>>, usize) {
        let is_open = |breaker: &Breaker| breaker.reason().is_some();
        let measured = self.transfers.pairs().map(|(pair, token_ms)| {
            let is_excluded = self.pair_breakers.get(&pair).is_some_and(is_open);
            (is_excluded, Some(token_ms), pair)
        });
        let unmeasured = self.pair_breakers.iter().filter(|(pair, breaker)| {
            is_open(breaker) && self.transfers.measured(**pair).is_none()
        });
        let unmeasured = unmeasured.map(|(pair, _)| (true, None, *pair));
        let mut all: Vec<RankedLink> = measured.chain(unmeasured).collect();
        let count = all.len();
        let order = |a: &RankedLink, b: &RankedLink| {
            let [of_a, of_b] = [a, b].map(|link| link.1.unwrap_or_default());
            b.0.cmp(&a.0).then(of_b.total_cmp(&of_a)).then(a.2.cmp(&b.2))
        };
        if most < count {
            all.select_nth_unstable_by(most, order);
            all.truncate(most);
        }
        all.sort_unstable_by(order);
        let link = move |(is_excluded, token_ms, pair): RankedLink| Link {
            prefill: &self.members[&pair.0].address,
            decode: &self.members[&pair.1].address,
            token_ms,
            is_excluded,
        };
        (all.into_iter().map(link).collect(), count)
    }

    /// Handles a failed attempt.
    pub fn failed(&mut self, now: Instant, failed: Failed) {
        match failed {
            Failed::Node(id) => self.node_failed(now, id),
            Failed::Transfer { prefill, decode } => {
                if let (Some(from), Some(to)) = (self.node_of(prefill), self.node_of(decode)) {
                    let breaker = self.pair_breakers.entry((from, to)).or_default();
                    if breaker.failed(now, prefill, &mut self.jitter) {
                        self.pair_changed((from, to), Some(BreakerReason::Failures));
                    }
                }
                self.node_failed(now, prefill);
                self.node_failed(now, decode);
            }
        }
    }

    /// Handles an attempt that its node served: a decode node sent a token, a prefill node
    /// delivered the KV.
    pub fn served(&mut self, id: AssignmentId) {
        let Some(key) = self.node_of(id) else { return };
        if self.member(key).breaker.served(id) {
            self.node_changed(key, None, "an attempt was served".into());
        }
    }

    /// Handles the tokens that an attempt decoded. `waited`: the time that the router waited for
    /// them.
    pub fn decoded(&mut self, now: Instant, id: AssignmentId, tokens: u32, waited: Duration) {
        let Some(key) = self.node_of(id).filter(|_| tokens >= ITL_TOKENS_MIN) else { return };
        let itl_ms = waited.as_secs_f64() * 1e3 / f64::from(tokens);
        let is_probe = self.member(key).breaker.is_probe(id);
        let member = self.member(key);
        if is_probe {
            // Earlier attempts do not show the node's current latency.
            (member.latency.itl_ms, member.latency.attempts) = (itl_ms, ITL_ATTEMPTS_MIN);
        } else {
            member.latency.add_itl(itl_ms);
        }
        self.judge(now, key, is_probe, &ITL);
    }

    /// Handles the end of a transfer between the nodes of an attempt, and releases the prefill node,
    /// which holds nothing of the attempt any more. `elapsed`: from the first chunk sent to the last
    /// one acknowledged.
    pub fn delivered(
        &mut self,
        now: Instant,
        prefill: AssignmentId,
        decode: AssignmentId,
        elapsed: Duration,
    ) {
        let assigned = (self.assignments.get(&prefill), self.assignments.get(&decode));
        let (Some(from), Some(to)) = assigned else { return };
        let pair = (from.node, to.node);
        let token_ms = elapsed.as_secs_f64() * 1e3 / to.uncached_tokens.max(1) as f64;
        self.transfers.add(pair, token_ms);
        if self.pair_breakers.remove(&pair).is_some_and(|breaker| breaker.reason().is_some()) {
            self.pair_changed(pair, None);
        }
        self.served(prefill);
        for (key, id) in [(pair.0, prefill), (pair.1, decode)] {
            let member = self.member(key);
            let is_probe = member.breaker.is_probe(id);
            // Earlier transfers do not show the current latency of a probed node.
            let earlier_ms = member.latency.transfer_ms.filter(|_| !is_probe);
            member.latency.transfer_ms = Some(transfer_mean(earlier_ms, token_ms));
            self.judge(now, key, is_probe, &TRANSFER);
        }
        self.release(prefill);
    }

    /// Returns whether attempts may transfer KV between two nodes.
    pub(super) fn pair_admits(&self, now: Instant, pair: (NodeKey, NodeKey)) -> bool {
        self.pair_breakers.get(&pair).is_none_or(|breaker| breaker.refuses(now).is_none())
    }

    /// Opens the breaker of a node that is far slower than the median of its pool by this measure,
    /// and closes it when a probe is not.
    fn judge(&mut self, now: Instant, key: NodeKey, is_probe: bool, measure: &Measure) {
        let member = self.member(key);
        let (excluded, slow_by) = (member.breaker.reason(), member.latency.slow_by);
        if excluded.is_some() && !(is_probe && excluded == Some(BreakerReason::Slow)) {
            return;
        }
        let Some(own_ms) = (measure.of)(&member.latency) else { return };
        // Most calls return here, without computing the median.
        if excluded.is_none() && own_ms <= measure.excess_min_ms {
            return;
        }
        let pool: Vec<&Member> = self.pool(key).collect();
        let known_ms = pool.iter().filter_map(|member| (measure.of)(&member.latency));
        let mut known_ms: Vec<f64> = known_ms.collect();
        if known_ms.is_empty() {
            return;
        }
        let middle = (known_ms.len() - 1) / 2;
        let median_ms = *known_ms.select_nth_unstable_by(middle, f64::total_cmp).1;
        let slow = pool.iter().filter(|member| {
            member.node != key && member.breaker.reason() == Some(BreakerReason::Slow)
        });
        let may_exclude = (slow.count() + 1) * SLOW_ONE_IN <= pool.len();
        let is_slow =
            own_ms > SLOW_FACTOR * median_ms && own_ms > median_ms + measure.excess_min_ms;
        let detail = || {
            let name = measure.name;
            format!("{name} {own_ms:.3} ms, median of its pool {median_ms:.3} ms")
        };
        if is_slow && may_exclude && known_ms.len() >= POOL_MIN {
            let member = self.members.get_mut(&key).expect("callers hold a key of a member");
            member.breaker.open(now, BreakerReason::Slow, &mut self.jitter);
            member.latency.slow_by = Some(measure.name);
            self.node_changed(key, Some(BreakerReason::Slow), detail());
        } else if excluded.is_some() && slow_by == Some(measure.name) {
            self.member(key).breaker.close();
            self.node_changed(key, None, detail());
        }
    }

    /// Returns the nodes that serve like this one: same role, model, weights and KV layout.
    fn pool(&self, key: NodeKey) -> impl Iterator<Item = &Member> {
        let own = self.members.get(&key).and_then(|own| Some((own.address.role, own.serving()?)));
        self.members.values().filter(move |member| {
            let Some((role, own)) = own else { return false };
            let Some(seen) = member.serving().filter(|_| member.address.role == role) else {
                return false;
            };
            seen.record.model == own.record.model && seen.record.identity.fits(&own.record.identity)
        })
    }

    fn node_failed(&mut self, now: Instant, id: AssignmentId) {
        let Some(key) = self.node_of(id) else { return };
        let member = self.members.get_mut(&key).expect("every assignment has its member");
        if member.breaker.failed(now, id, &mut self.jitter) {
            let detail = format!("{FAILURES_MAX} attempts in a row, or a probe, failed");
            self.node_changed(key, Some(BreakerReason::Failures), detail);
        }
    }

    fn node_changed(&mut self, key: NodeKey, opened: Option<BreakerReason>, detail: String) {
        let address = self.member(key).address.clone();
        self.breaker_changes.push(BreakerChange { address, partner: None, opened, detail });
    }

    fn pair_changed(&mut self, pair: (NodeKey, NodeKey), opened: Option<BreakerReason>) {
        let [address, partner] = [pair.0, pair.1].map(|key| self.member(key).address.clone());
        let detail = match opened {
            Some(_) => format!("{FAILURES_MAX} transfers in a row, or a probe, failed"),
            None => "a transfer completed".to_owned(),
        };
        let partner = Some(partner);
        self.breaker_changes.push(BreakerChange { address, partner, opened, detail });
    }

    /// Assigns an attempt to the breaker of its pair.
    pub(super) fn pair_assigned(
        &mut self,
        now: Instant,
        pair: (NodeKey, NodeKey),
        prefill: AssignmentId,
    ) {
        if let Some(breaker) = self.pair_breakers.get_mut(&pair) {
            breaker.assigned(now, prefill);
        }
    }

    /// Releases an attempt from the breakers that it may probe.
    pub(super) fn breakers_released(&mut self, key: NodeKey, id: AssignmentId) {
        let member = self.member(key);
        if member.breaker.released(id) {
            // Only a new measurement may exclude the node again.
            member.latency = Latency::default();
            self.node_changed(key, None, "probes were served, and none was measured".into());
        }
        let of_node = self.pair_breakers.range_mut((key, NodeKey(0))..=(key, NodeKey(u64::MAX)));
        of_node.for_each(|(_, breaker)| _ = breaker.released(id));
    }

    /// Drops the breakers of a dead process's pairs.
    pub(super) fn forget_pairs(&mut self, key: NodeKey) {
        let is_of = |(prefill, decode): &(NodeKey, NodeKey)| *prefill == key || *decode == key;
        self.transfers.forget(key);
        self.pair_breakers.retain(|pair, _: &mut Breaker| !is_of(pair));
    }
}
