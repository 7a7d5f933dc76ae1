//! The nodes that an attempt may use together, and the choice among them.

use std::time::{Duration, Instant};

use config::{NodePolicy, Roles};

use super::{
    Directory, NoNode, Placement,
    candidate::Candidate,
    capacity,
    considered::ConsideredOption,
    member::Member,
    milliseconds,
    requirements::{NodeRequirements, RequiredCapacity},
};
use crate::predict::{Prediction, hand_over, local};

/// With fixed roles, a decode node prefills a prompt only if that saves this fraction of its time
/// to first token: more than the usual error of a prediction. Otherwise the choice on idle nodes
/// would change with every measurement.
const LOCAL_SAVING_MIN: f64 = 0.2;
/// Predicted times that differ by less than this fraction are equal, so that equal nodes share the
/// load.
const EQUAL_WITHIN: f64 = 0.05;
/// While the best node has a queue, another node takes a request at once only if it prefills at
/// most this many times as many tokens. Prefilling a prefix again would delay other waiting
/// requests.
const WORK_MAX: f64 = 1.5;
/// Maximum number of nodes of each role whose pairs are compared. All pairs of 1,000 nodes would
/// take milliseconds.
const PAIRED_MAX: usize = 16;

impl Directory {
    /// Returns the options under a policy: with predictions the best pairs and all decode nodes,
    /// otherwise the best pair and its decode node alone.
    pub(super) fn options<'a>(
        &self,
        now: Instant,
        policy: NodePolicy,
        requirements: &NodeRequirements<'_>,
        decode: &'a [Candidate<'a>],
        prefill: &'a [Candidate<'a>],
    ) -> Vec<NodeOption<'a>> {
        let fits = |decode: &Candidate<'_>, prefill: &&Candidate<'_>| {
            self.may_pair(now, requirements, decode, prefill)
        };
        let fitting = |decode| prefill.iter().filter(move |prefill| fits(decode, prefill));
        let option = |decode, prefill| NodeOption { decode, prefill, prediction: None };
        let mut options = Vec::new();
        if policy == NodePolicy::Predicted {
            let by_prefill =
                |node: &Candidate<'_>| node.part_ms(|state, prompt| state.prefill_part_ms(prompt));
            let by_decode = |node: &Candidate<'_>| {
                node.part_ms(|state, prompt| {
                    state.decode_part_ms(prompt, requirements.new_tokens_max)
                })
            };
            let prefill_order = order_by_part(prefill, by_prefill);
            // Exclude nodes without a partner, such as nodes of another model version, before
            // limiting the number.
            let paired = order_by_part(decode, by_decode).into_iter();
            let paired = paired.filter(|decode| fitting(decode).next().is_some());
            for decode in joined_first(paired.take(PAIRED_MAX)) {
                let fitting = prefill_order.iter().copied().filter(|prefill| fits(decode, prefill));
                let prefill = joined_first(fitting.take(PAIRED_MAX));
                options.extend(prefill.into_iter().map(|prefill| option(decode, Some(prefill))));
            }
            options.extend(decode.iter().map(|decode| option(decode, None)));
            return options;
        }
        let decode = decode.iter().min_by_key(|node| {
            let prefills = fitting(node).next().is_none();
            node.rank(policy, prefills)
        });
        let decode = decode.expect("there is a decode node");
        let prefill = fitting(decode).min_by_key(|node| node.rank(policy, true));
        options.extend(prefill.map(|prefill| option(decode, Some(prefill))));
        options.push(option(decode, None));
        options
    }

    /// Returns whether the prefill node may send the attempt's KV to the decode node.
    pub(super) fn may_pair(
        &self,
        now: Instant,
        requirements: &NodeRequirements<'_>,
        decode: &Candidate<'_>,
        prefill: &Candidate<'_>,
    ) -> bool {
        // KV of less than one block is never transferred.
        requirements.tokens >= decode.seen.record.identity.block_size
            && prefill.key != decode.key
            && prefill.fits(decode)
            && self.pair_admits(now, (prefill.key, decode.key))
    }
}

/// Nodes that may serve the attempt.
pub(super) struct NodeOption<'a> {
    pub(super) decode: &'a Candidate<'a>,
    pub(super) prefill: Option<&'a Candidate<'a>>,
    pub(super) prediction: Option<Prediction>,
}

impl NodeOption<'_> {
    pub(super) fn predict(&mut self, transfer_token_ms: f64, new_tokens_max: u32) {
        let Some((node, prompt)) = &self.decode.state else { return };
        self.prediction = Some(match self.prefill.and_then(|prefill| prefill.state.as_ref()) {
            None => local(node, prompt, new_tokens_max),
            Some(prefill) => {
                let decode = (node, prompt);
                hand_over((&prefill.0, &prefill.1), decode, transfer_token_ms, new_tokens_max)
            }
        });
    }

    /// Returns the predicted cost; 0 without a prediction.
    pub(super) fn cost_ms(&self) -> f64 {
        self.prediction.map_or(0.0, |prediction| prediction.cost_ms())
    }

    /// Returns the prompt tokens that the option computes.
    fn uncached_tokens(&self) -> f64 {
        self.prefill.unwrap_or(self.decode).need.uncached_tokens as f64
    }

    pub(super) fn considered(&self) -> ConsideredOption {
        let name = |node: &Candidate<'_>| node.seen.record.node_id.clone();
        ConsideredOption {
            decode: name(self.decode),
            prefill: self.prefill.map(name),
            prediction: self.prediction,
        }
    }

    /// Orders options of equal cost. With fixed roles a pair comes first, with fluid roles the
    /// option without a transfer.
    fn tie_rank(&self, roles: Roles) -> (bool, usize, u64, u64) {
        let of = |field: fn(&Member) -> u64| self.prefill.map_or(0, |node| field(node.member));
        let in_flight =
            self.decode.member.in_flight + of(|member| member.in_flight as u64) as usize;
        let last_picked = self.decode.member.last_picked;
        let is_second = self.prefill.is_none() == (roles == Roles::Fixed);
        (is_second, in_flight, last_picked, of(|member| member.last_picked))
    }
}

/// Orders nodes by `part`, the cost that depends on the node alone. Parts within the error of
/// predictions are equal.
fn order_by_part<'a>(
    nodes: &'a [Candidate<'a>],
    part_ms: impl Fn(&Candidate<'_>) -> f64,
) -> Vec<&'a Candidate<'a>> {
    let mut ranked: Vec<_> = nodes
        .iter()
        .map(|node| (part_ms(node), node.member.in_flight, node.member.last_picked, node))
        .collect();
    let lowest_ms = ranked.iter().map(|(ms, ..)| *ms).fold(f64::INFINITY, f64::min);
    let equal_ms = lowest_ms * (1.0 + EQUAL_WITHIN);
    ranked.iter_mut().for_each(|(ms, ..)| *ms = ms.max(equal_ms));
    ranked.sort_by(|(a_ms, a_in_flight, a_picked, _), (b_ms, b_in_flight, b_picked, _)| {
        a_ms.total_cmp(b_ms).then((a_in_flight, a_picked).cmp(&(b_in_flight, b_picked)))
    });
    ranked.into_iter().map(|(.., node)| node).collect()
}

/// Orders nodes by the time of joining.
fn joined_first<'a>(nodes: impl Iterator<Item = &'a Candidate<'a>>) -> Vec<&'a Candidate<'a>> {
    let mut nodes: Vec<_> = nodes.collect();
    nodes.sort_by_key(|node| node.key);
    nodes
}

/// Returns the option of the lowest cost. Without predictions that is the first one.
fn best<'a, 'b>(roles: Roles, options: &'b [NodeOption<'a>]) -> &'b NodeOption<'a> {
    let has_pair = options.iter().any(|option| option.prefill.is_some());
    // A pair whose prefill node decodes nothing always keeps `itl_max`.
    let keeps = |prediction: Prediction| !prediction.exceeds_itl_max;
    let has_bounded = has_pair && options.iter().any(|it| it.prediction.is_some_and(keeps));
    let costs = options.iter().filter_map(|option| {
        let prediction = option.prediction.as_ref()?;
        let (ttft_ms, decode_ms) = (prediction.ttft_ms(), prediction.decode_ms);
        let is_local = option.prefill.is_none() && has_pair;
        let must_save = is_local && roles == Roles::Fixed;
        let margin_ms = if must_save { ttft_ms * LOCAL_SAVING_MIN } else { 0.0 };
        let is_allowed = !(has_bounded && prediction.exceeds_itl_max);
        let error_ms = EQUAL_WITHIN * (ttft_ms + decode_ms / 2.0);
        is_allowed.then_some((option, prediction.cost_ms() + margin_ms, error_ms))
    });
    let costs: Vec<_> = costs.collect();
    let lowest = costs.iter().min_by(|a, b| a.1.total_cmp(&b.1));
    let Some((first, lowest_ms, error_ms)) = lowest else { return &options[0] };
    let equal = costs.iter().filter(|(_, cost_ms, _)| *cost_ms <= lowest_ms + error_ms);
    equal.map(|(option, ..)| *option).min_by_key(|option| option.tie_rank(roles)).unwrap_or(first)
}

/// Returns the option of the lowest cost. If its queue of prompts is too long, returns the cheapest
/// other option that can start and keeps `itl_max`: no node stays idle while requests wait.
///
/// A node that prefills many more tokens than the best node takes the request only after it has
/// waited as long as the costs differ. So a prefix is computed again when its node stays
/// overloaded, and the wait at most doubles the extra cost.
pub(super) fn startable<'a, 'b>(
    roles: Roles,
    capacity: RequiredCapacity,
    waited: Duration,
    options: &'b [NodeOption<'a>],
) -> Result<&'b NodeOption<'a>, NoNode> {
    let best = best(roles, options);
    let Err(mut busy) = capacity::check_prompt_queue(capacity, best) else { return Ok(best) };
    let tokens_max = WORK_MAX * best.uncached_tokens();
    let others = options.iter().filter_map(|option| {
        let prediction = option.prediction.as_ref()?;
        let can_start =
            !prediction.exceeds_itl_max && capacity::check_prompt_queue(capacity, option).is_ok();
        can_start.then_some((option, prediction.cost_ms()))
    });
    let others: Vec<_> = others.collect();
    if let NoNode::Busy { by_choice, .. } = &mut busy {
        *by_choice = !others.is_empty();
    }
    let chosen = others.into_iter().filter(|(option, cost_ms)| {
        option.uncached_tokens() <= tokens_max || milliseconds(waited) >= cost_ms - best.cost_ms()
    });
    chosen.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(option, _)| option).ok_or(busy)
}

/// Returns why the options of this decode node have no prefill node, although prefill nodes are
/// eligible.
pub(super) fn no_pair(
    decode: &Candidate<'_>,
    prefill: &[Candidate<'_>],
    requirements: &NodeRequirements<'_>,
) -> Placement {
    let block_tokens = decode.seen.record.identity.block_size;
    if requirements.tokens < block_tokens {
        return Placement::ShortPrompt { tokens: requirements.tokens, block_tokens };
    }
    match prefill.iter().any(|prefill| prefill.fits(decode)) {
        true => Placement::TransfersFail,
        false => Placement::NoPartner,
    }
}

/// Returns the lowest predicted costs with and without a prefill node.
pub(super) fn predicted(options: &[NodeOption<'_>]) -> Placement {
    let lowest = |disaggregated: bool| {
        let of_kind = options.iter().filter(|option| option.prefill.is_some() == disaggregated);
        of_kind.map(NodeOption::cost_ms).fold(f64::INFINITY, f64::min)
    };
    Placement::Predicted { disaggregated_ms: lowest(true), local_ms: lowest(false) }
}
