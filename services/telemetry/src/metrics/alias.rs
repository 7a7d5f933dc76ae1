//! Aliases of metrics: vLLM's names, so that its dashboards and autoscalers work unchanged, and
//! Baton's former names, which are kept for one release.
//!
//! Aliases exist in the Prometheus text only; OTLP has each metric once.

use prometheus::proto::{LabelPair, Metric, MetricFamily};

/// The metrics of a family that an alias repeats.
#[derive(Clone, Copy)]
enum Alias {
    All,
    /// Metrics whose label has one of these values. An alias for a single value drops the label.
    Only(&'static str, &'static [&'static str]),
}

/// Baton's name of a metric family, its alias, and the metrics that the alias repeats.
const ALIASES: [(&str, &str, Alias); 26] = [
    // Router.
    ("gen_ai_server_time_to_first_token_seconds", "vllm:time_to_first_token_seconds", Alias::All),
    (
        "gen_ai_server_time_per_output_token_seconds",
        "vllm:time_per_output_token_seconds",
        Alias::All,
    ),
    (
        "gen_ai_server_time_per_output_token_seconds",
        "vllm:request_time_per_output_token_seconds",
        Alias::All,
    ),
    ("baton_inter_token_latency_seconds", "vllm:inter_token_latency_seconds", Alias::All),
    ("gen_ai_server_request_duration_seconds", "vllm:e2e_request_latency_seconds", Alias::All),
    (
        "baton_requests_finished_total",
        "vllm:request_success_total",
        Alias::Only("finished_reason", &["stop", "length"]),
    ),
    (
        "baton_tokens_total",
        "vllm:prompt_tokens_total",
        Alias::Only("gen_ai_token_type", &["input"]),
    ),
    (
        "baton_tokens_total",
        "vllm:generation_tokens_total",
        Alias::Only("gen_ai_token_type", &["output"]),
    ),
    (
        "gen_ai_client_token_usage",
        "vllm:request_prompt_tokens",
        Alias::Only("gen_ai_token_type", &["input"]),
    ),
    (
        "gen_ai_client_token_usage",
        "vllm:request_generation_tokens",
        Alias::Only("gen_ai_token_type", &["output"]),
    ),
    ("baton_requests", "vllm:num_requests_running", Alias::Only("state", &["running"])),
    ("baton_requests", "vllm:num_requests_waiting", Alias::Only("state", &["waiting"])),
    ("baton_request_queue_time_seconds", "vllm:request_queue_time_seconds", Alias::All),
    // Node.
    ("baton_sequences", "vllm:num_requests_running", Alias::Only("state", &["running"])),
    ("baton_sequences", "vllm:num_requests_waiting", Alias::Only("state", &["waiting"])),
    ("baton_kv_transfer_control_messages_total", "baton_kv_transfer_notices_total", Alias::All),
    ("baton_kv_cache_usage", "vllm:kv_cache_usage_perc", Alias::All),
    ("baton_prefix_cache_queries_total", "vllm:prefix_cache_queries_total", Alias::All),
    ("baton_prefix_cache_hits_total", "vllm:prefix_cache_hits_total", Alias::All),
    ("baton_preemptions_total", "vllm:num_preemptions_total", Alias::All),
    ("baton_speculation_rows_total", "vllm:spec_decode_num_drafts_total", Alias::All),
    ("baton_speculation_drafted_total", "vllm:spec_decode_num_draft_tokens_total", Alias::All),
    ("baton_speculation_accepted_total", "vllm:spec_decode_num_accepted_tokens_total", Alias::All),
    (
        "baton_speculation_accepted_at_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        Alias::All,
    ),
    ("baton_sequence_queue_time_seconds", "vllm:request_queue_time_seconds", Alias::All),
    ("baton_sequence_prefill_time_seconds", "vllm:request_prefill_time_seconds", Alias::All),
];

/// Returns the aliases of the family with this name.
pub(super) fn of(name: String) -> impl Iterator<Item = &'static str> {
    ALIASES.iter().filter(move |(ours, ..)| *ours == name).map(|(_, alias, _)| *alias)
}

/// Returns the names of the families that have aliases.
#[cfg(test)]
pub(super) fn repeated() -> impl Iterator<Item = &'static str> {
    ALIASES.iter().map(|(ours, ..)| *ours)
}

/// Appends the aliases of every family in the list.
pub(super) fn add(families: &mut Vec<MetricFamily>) {
    let mut added = Vec::new();
    for (name, alias, part) in ALIASES {
        let Some(ours) = families.iter().find(|family| family.name() == name) else { continue };
        let metrics: Vec<Metric> =
            ours.get_metric().iter().filter_map(|metric| renamed(metric, part)).collect();
        if metrics.is_empty() {
            continue;
        }
        let mut theirs = ours.clone();
        theirs.set_name(alias.into());
        theirs.set_help(format!("{} (alias of {})", ours.help(), ours.name()));
        theirs.set_metric(metrics);
        added.push(theirs);
    }
    families.append(&mut added);
}

/// Returns the metric with vLLM's label names; `None` when the alias excludes the metric.
fn renamed(metric: &Metric, part: Alias) -> Option<Metric> {
    let value_of = |label: &str| {
        metric.get_label().iter().find(|pair| pair.name() == label).map(LabelPair::value)
    };
    let (belongs, left_out) = match part {
        Alias::All => (true, None),
        Alias::Only(label, values) => (
            value_of(label).is_some_and(|value| values.contains(&value)),
            (values.len() == 1).then_some(label),
        ),
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
