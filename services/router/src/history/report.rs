//! The report of one request, as JSON.

use std::{
    borrow::Cow,
    time::{Duration, UNIX_EPOCH},
};

use cluster::{ConsideredOption, IneligibleNode};
use proto::v1::StageTimes;
use serde::Serialize;

use super::{AttemptEntry, Considered, RequestEntry};
use router_core::{AttemptStats, NodeStats};

use crate::record::milliseconds;

/// The router's knowledge of one request. An absent number is unknown.
#[derive(Debug, Serialize)]
pub(crate) struct RequestReport {
    pub request_id: String,
    pub label: Option<String>,
    pub trace_id: Option<String>,
    pub api: Cow<'static, str>,
    pub model: String,
    /// Arrival in milliseconds since 1970.
    pub received_unix_ms: u64,
    /// Outcome of the request; `running` until its end.
    pub end: Cow<'static, str>,
    pub error: Option<String>,
    /// Reason why the last pick found no node.
    pub waits_for: Option<String>,
    pub choices: u32,
    pub prompt_tokens: u32,
    pub completion_tokens: Option<u32>,
    pub ttft_ms: Option<f64>,
    /// Time until the end, or until now.
    pub duration_ms: f64,
    /// The answer that `stages` describes: the answer that ended last.
    pub choice: u32,
    pub stages: Vec<StageReport>,
    /// Time of the request outside its stages, mostly RPCs between router and nodes.
    pub unaccounted_ms: f64,
    pub attempts: Vec<AttemptReport>,
    pub attempts_left_out: u32,
}

/// One stage of a request.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct StageReport {
    pub stage: &'static str,
    /// Number of the attempt.
    pub attempt: Option<u32>,
    /// The node that measured the stage; otherwise the router did.
    pub node: Option<String>,
    pub ms: Option<f64>,
    /// The stage runs at the same time as others, so that its time does not add up.
    pub overlaps: bool,
}

#[derive(Debug, Serialize)]
pub(crate) struct AttemptReport {
    pub choice: u32,
    pub number: u32,
    /// Whether the KV of a prefill node was used.
    pub disaggregated: bool,
    pub reason: String,
    /// Reason why the pick before this one found no node.
    pub waited_for: Option<String>,
    pub predicted_ttft_ms: Option<f64>,
    /// From the pick to the first token.
    pub ttft_ms: Option<f64>,
    pub hand_over_ms: Option<f64>,
    pub nodes: Vec<NodeReport>,
    /// Outcome of the attempt; `running` until its end.
    pub outcome: Cow<'static, str>,
    pub failure: Option<String>,
    pub kv_bytes: u64,
    pub transfer_ms: Option<f64>,
    /// Part of the predicted time to first token that all options share.
    pub overhead_ms: f64,
    /// The chosen option, then the other options, lowest predicted cost first.
    pub options: Vec<OptionReport>,
    pub options_left_out: usize,
    pub ineligible: Vec<IneligibleReport>,
    pub ineligible_left_out: usize,
}

/// A node of an attempt.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct NodeReport {
    pub role: &'static str,
    pub node: String,
    /// Prompt tokens that the router expected to be cached on the node.
    pub cached_expected: u32,
    /// Cached prompt tokens that the node found.
    pub cached_found: Option<u32>,
}

/// An option (a choice of nodes) and the terms of its predicted cost.
#[derive(Debug, Serialize)]
pub(crate) struct OptionReport {
    pub prefill_node: Option<String>,
    pub decode_node: String,
    /// Absent without measurements.
    #[serde(flatten)]
    pub prediction: Option<PredictionReport>,
}

#[derive(Debug, Serialize)]
pub(crate) struct PredictionReport {
    pub cost_ms: f64,
    pub queue_ms: f64,
    pub prompt_ms: f64,
    pub blocks_ms: f64,
    pub gap_ms: f64,
    pub slowdown_ms: f64,
    pub decode_ms: f64,
    pub evict_ms: f64,
    pub exceeds_itl_max: bool,
}

#[derive(Debug, Serialize)]
pub(crate) struct IneligibleReport {
    pub node: String,
    pub role: &'static str,
    pub reason: String,
}

impl RequestReport {
    /// `now`: time since the start of the history.
    pub(crate) fn new(entry: &RequestEntry, now: Duration) -> Self {
        let age = now.saturating_sub(entry.received);
        let end = entry.end.as_ref();
        let duration = end.map_or(age, |end| end.at);
        let ended_at =
            |attempt: &&AttemptEntry| attempt.end.as_ref().map_or(duration, |end| end.at);
        let choice = entry.attempts.iter().max_by_key(ended_at).map_or(0, |last| last.choice);
        let stages = stages(entry, choice, duration);
        let accounted_ms: f64 =
            stages.iter().filter(|stage| !stage.overlaps).filter_map(|stage| stage.ms).sum();
        Self {
            request_id: entry.request_id.to_string(),
            label: entry.label.clone(),
            trace_id: entry.trace_id.map(|id| format!("{id:032x}")),
            api: entry.api.clone(),
            model: entry.model.to_string(),
            received_unix_ms: entry
                .received_at
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_millis() as u64),
            end: end.map_or("running".into(), |end| end.reason.clone()),
            error: end.and_then(|end| end.error.clone()),
            waits_for: entry.waits_for.as_ref().map(ToString::to_string),
            choices: entry.choices,
            prompt_tokens: entry.prompt_tokens,
            completion_tokens: end.map(|end| end.completion_tokens),
            ttft_ms: first_token(entry).map(milliseconds),
            duration_ms: milliseconds(duration),
            choice,
            unaccounted_ms: rounded((milliseconds(duration) - accounted_ms).max(0.0)),
            stages,
            attempts: entry.attempts.iter().map(AttemptReport::new).collect(),
            attempts_left_out: entry.attempts_left_out,
        }
    }
}

/// Returns the time until the first token; unknown if an attempt beyond the entry's bound sent it
/// and the request is still running.
fn first_token(entry: &RequestEntry) -> Option<Duration> {
    match &entry.end {
        Some(end) => end.first_token,
        None if entry.attempts_left_out > 0 => None,
        None => entry.attempts.iter().filter_map(|attempt| attempt.first_token).min(),
    }
}

/// Returns the stages of one answer in their order. Stages that do not overlap follow one another.
fn stages(entry: &RequestEntry, choice: u32, duration: Duration) -> Vec<StageReport> {
    let at_router = |stage, attempt, time: Duration| StageReport {
        stage,
        attempt,
        node: None,
        ms: Some(milliseconds(time)),
        overlaps: false,
    };
    let read = entry.read.unwrap_or(duration);
    let mut all = vec![at_router("read", None, read)];
    if entry.read.is_none() {
        return all;
    }
    let prepared = entry.prepared.unwrap_or(duration);
    all.push(at_router("text", None, prepared.saturating_sub(read)));
    let mut last = prepared;
    let mut wait = if entry.attempts_left_out > 0 { "earlier attempts" } else { "wait" };
    for attempt in entry.attempts.iter().filter(|attempt| attempt.choice == choice) {
        let number = Some(attempt.number);
        all.push(at_router(wait, number, attempt.picked.saturating_sub(last)));
        wait = "wait";
        last = attempt.end.as_ref().map_or(duration, |end| end.at);
        let Some(first_token) = attempt.first_token else {
            let stage = if attempt.end.is_some() { "until failure" } else { "until now" };
            all.push(at_router(stage, number, last.saturating_sub(attempt.picked)));
            continue;
        };
        all.extend(until_first_token(attempt, first_token.saturating_sub(attempt.picked)));
        let hand_over = attempt.hand_over.unwrap_or_default();
        if attempt.is_disaggregated() {
            all.push(at_router("hand-over", number, hand_over));
        }
        let decode = last.saturating_sub(first_token).saturating_sub(hand_over);
        all.push(at_router("decode", number, decode));
    }
    // After the last attempt the client reads the rest of its answer.
    let rest = match entry.attempts.is_empty() {
        true => "wait",
        false => "delivery",
    };
    if entry.prepared.is_some() && duration > last {
        all.push(at_router(rest, None, duration - last));
    }
    all
}

/// Returns the stages from the pick to the first token, which the nodes measured. `ttft` replaces
/// the stages that an older node did not report.
fn until_first_token(attempt: &AttemptEntry, ttft: Duration) -> Vec<StageReport> {
    let stats = attempt.end.as_ref().map(|end| end.stats).unwrap_or_default();
    let chosen = &attempt.considered.options[0];
    let decode_node = chosen.decode.to_string();
    let is_disaggregated = attempt.is_disaggregated();
    let (first, node) = match (&chosen.prefill, is_disaggregated) {
        (Some(prefill), true) => (stats.prefill, prefill.to_string()),
        _ => (stats.decode, decode_node.clone()),
    };
    let of = |node: NodeStats, time: fn(&StageTimes) -> Option<u64>| {
        node.stages.as_ref().and_then(time).map(|us| us as f64 / 1e3)
    };
    let stage = |stage, node: &str, ms, overlaps| StageReport {
        stage,
        attempt: Some(attempt.number),
        node: Some(node.to_owned()),
        ms,
        overlaps,
    };
    // A decode node that needs no KV of its prefill node reports its wait for blocks as
    // `reserve_us`.
    let queue_ms = of(first, |times| times.queue_us.or(times.reserve_us));
    let prefill_ms = of(first, |times| times.prefill_us);
    let mut all =
        vec![stage("queue", &node, queue_ms, false), stage("prefill", &node, prefill_ms, false)];
    if queue_ms.is_none() || prefill_ms.is_none() {
        let rest_ms = milliseconds(ttft) - queue_ms.unwrap_or(0.0) - prefill_ms.unwrap_or(0.0);
        let ms = Some(rounded(rest_ms.max(0.0)));
        all.push(StageReport { node: None, ..stage("until first token", "", ms, false) });
    }
    if is_disaggregated {
        let reserve_ms = of(stats.decode, |times| times.reserve_us);
        all.insert(0, stage("reserve", &decode_node, reserve_ms, true));
        all.push(stage("transfer", &decode_node, transfer_ms(&stats), true));
    }
    all
}

fn transfer_ms(stats: &AttemptStats) -> Option<f64> {
    (stats.kv_bytes > 0).then(|| stats.transfer_us as f64 / 1e3)
}

impl AttemptEntry {
    /// Returns whether the KV of a prefill node was used.
    fn is_disaggregated(&self) -> bool {
        let needs_none = self.end.as_ref().is_some_and(|end| end.stats.local_prefill);
        self.considered.options[0].prefill.is_some() && !needs_none
    }
}

impl AttemptReport {
    fn new(attempt: &AttemptEntry) -> Self {
        let Considered { placement, options, options_left_out, ineligible, .. } =
            &attempt.considered;
        let (end, chosen) = (attempt.end.as_ref(), &options[0]);
        let disaggregated = attempt.is_disaggregated();
        let reason = match chosen.prefill.is_some() && !disaggregated {
            true => "the decode node has all but the last tokens of the prompt cached".into(),
            false => placement.to_string(),
        };
        let found =
            |of: fn(&AttemptStats) -> NodeStats| end.and_then(|end| of(&end.stats).cached_tokens);
        let (prefill_expected, decode_expected) = attempt.cached_expected;
        let prefill = chosen.prefill.as_ref().map(|node| NodeReport {
            role: "prefill",
            node: node.to_string(),
            cached_expected: prefill_expected.unwrap_or(0),
            cached_found: found(|stats| stats.prefill),
        });
        let decode = NodeReport {
            role: "decode",
            node: chosen.decode.to_string(),
            cached_expected: decode_expected,
            cached_found: found(|stats| stats.decode),
        };
        Self {
            choice: attempt.choice,
            number: attempt.number,
            disaggregated,
            reason,
            waited_for: attempt.waited_for.as_ref().map(ToString::to_string),
            predicted_ttft_ms: attempt.predicted_ttft.map(milliseconds),
            ttft_ms: attempt
                .first_token
                .map(|first_token| milliseconds(first_token.saturating_sub(attempt.picked))),
            hand_over_ms: attempt.hand_over.map(milliseconds),
            nodes: prefill.into_iter().chain([decode]).collect(),
            outcome: end.map_or("running".into(), |end| end.outcome.clone()),
            failure: end.and_then(|end| end.failure.clone()),
            kv_bytes: end.map_or(0, |end| end.stats.kv_bytes),
            transfer_ms: end.and_then(|end| transfer_ms(&end.stats)),
            overhead_ms: rounded(attempt.considered.overhead_ms),
            options: options.iter().map(OptionReport::new).collect(),
            options_left_out: *options_left_out,
            ineligible: ineligible.iter().map(IneligibleReport::new).collect(),
            ineligible_left_out: attempt.considered.ineligible_left_out,
        }
    }
}

impl OptionReport {
    fn new(option: &ConsideredOption) -> Self {
        let prediction = option.prediction.map(|terms| PredictionReport {
            cost_ms: rounded(terms.cost_ms()),
            queue_ms: rounded(terms.queue_ms),
            prompt_ms: rounded(terms.prompt_ms),
            blocks_ms: rounded(terms.blocks_ms),
            gap_ms: rounded(terms.transfer_gap_ms),
            slowdown_ms: rounded(terms.slowdown_ms),
            decode_ms: rounded(terms.decode_ms),
            evict_ms: rounded(terms.evict_ms),
            exceeds_itl_max: terms.exceeds_itl_max,
        });
        Self {
            prefill_node: option.prefill.as_ref().map(ToString::to_string),
            decode_node: option.decode.to_string(),
            prediction,
        }
    }
}

impl IneligibleReport {
    fn new(node: &IneligibleNode) -> Self {
        Self { node: node.node.clone(), role: node.role.as_str(), reason: node.reason.clone() }
    }
}

fn rounded(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}
