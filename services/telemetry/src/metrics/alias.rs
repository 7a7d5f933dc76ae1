//! Aliases of metrics: vLLM's names, so that its dashboards and autoscalers work unchanged, and former names of
//! Baton, which are kept for one release.
//!
//! Aliases exist in the Prometheus text only; OTLP has each metric once.

use prometheus::proto::{LabelPair, Metric, MetricFamily};

/// A metric family under a second name.
struct Alias {
    ours: &'static str,
    theirs: &'static str,
    part: Part,
}

/// Metrics of the family that the alias repeats.
#[derive(Clone, Copy)]
enum Part {
    All,
    /// Metrics with this label value; the alias drops the label.
    Only(&'static str, &'static str),
    /// Metrics whose label has one of these values.
    Among(&'static str, &'static [&'static str]),
}

const fn whole(ours: &'static str, theirs: &'static str) -> Alias {
    Alias { ours, theirs, part: Part::All }
}

const fn part(
    ours: &'static str,
    theirs: &'static str,
    label: &'static str,
    value: &'static str,
) -> Alias {
    Alias { ours, theirs, part: Part::Only(label, value) }
}

const ALIASES: [Alias; 26] = [
    // Router.
    whole("gen_ai_server_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    whole("gen_ai_server_time_per_output_token_seconds", "vllm:time_per_output_token_seconds"),
    whole(
        "gen_ai_server_time_per_output_token_seconds",
        "vllm:request_time_per_output_token_seconds",
    ),
    whole("baton_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"),
    whole("gen_ai_server_request_duration_seconds", "vllm:e2e_request_latency_seconds"),
    Alias {
        ours: "baton_requests_finished_total",
        theirs: "vllm:request_success_total",
        part: Part::Among("finished_reason", &["stop", "length"]),
    },
    part("baton_tokens_total", "vllm:prompt_tokens_total", "gen_ai_token_type", "input"),
    part("baton_tokens_total", "vllm:generation_tokens_total", "gen_ai_token_type", "output"),
    part("gen_ai_client_token_usage", "vllm:request_prompt_tokens", "gen_ai_token_type", "input"),
    part(
        "gen_ai_client_token_usage",
        "vllm:request_generation_tokens",
        "gen_ai_token_type",
        "output",
    ),
    part("baton_requests", "vllm:num_requests_running", "state", "running"),
    part("baton_requests", "vllm:num_requests_waiting", "state", "waiting"),
    whole("baton_request_queue_time_seconds", "vllm:request_queue_time_seconds"),
    // Node.
    part("baton_sequences", "vllm:num_requests_running", "state", "running"),
    part("baton_sequences", "vllm:num_requests_waiting", "state", "waiting"),
    whole("baton_kv_transfer_control_messages_total", "baton_kv_transfer_notices_total"),
    whole("baton_kv_cache_usage", "vllm:kv_cache_usage_perc"),
    whole("baton_prefix_cache_queries_total", "vllm:prefix_cache_queries_total"),
    whole("baton_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"),
    whole("baton_preemptions_total", "vllm:num_preemptions_total"),
    whole("baton_speculation_rows_total", "vllm:spec_decode_num_drafts_total"),
    whole("baton_speculation_drafted_total", "vllm:spec_decode_num_draft_tokens_total"),
    whole("baton_speculation_accepted_total", "vllm:spec_decode_num_accepted_tokens_total"),
    whole(
        "baton_speculation_accepted_at_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ),
    whole("baton_sequence_queue_time_seconds", "vllm:request_queue_time_seconds"),
    whole("baton_sequence_prefill_time_seconds", "vllm:request_prefill_time_seconds"),
];

/// Appends the aliases of every family in the list.
pub(super) fn add(families: &mut Vec<MetricFamily>) {
    let mut added = Vec::new();
    for alias in &ALIASES {
        let Some(ours) = families.iter().find(|family| family.name() == alias.ours) else {
            continue;
        };
        let metrics: Vec<Metric> =
            ours.get_metric().iter().filter_map(|metric| renamed(metric, alias)).collect();
        if metrics.is_empty() {
            continue;
        }
        let mut theirs = ours.clone();
        theirs.set_name(alias.theirs.into());
        theirs.set_help(format!("{} (alias of {})", ours.help(), ours.name()));
        theirs.set_metric(metrics);
        added.push(theirs);
    }
    families.append(&mut added);
}

/// Returns the metric with vLLM's label names; `None` when the alias leaves it out.
fn renamed(metric: &Metric, alias: &Alias) -> Option<Metric> {
    let value_of = |label: &str| {
        metric.get_label().iter().find(|pair| pair.name() == label).map(LabelPair::value)
    };
    let (belongs, left_out) = match alias.part {
        Part::All => (true, None),
        Part::Only(label, value) => (value_of(label) == Some(value), Some(label)),
        Part::Among(label, values) => (value_of(label).is_some_and(|v| values.contains(&v)), None),
    };
    if !belongs {
        return None;
    }
    let mut metric = metric.clone();
    let labels = metric
        .take_label()
        .into_iter()
        .filter(|pair| Some(pair.name()) != left_out)
        .map(|mut pair: LabelPair| {
            if pair.name() == "gen_ai_request_model" {
                pair.set_name("model_name".into());
            }
            pair
        })
        .collect();
    metric.set_label(labels);
    Some(metric)
}
