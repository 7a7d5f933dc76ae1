#!/usr/bin/env python3
"""Writes the chart's Grafana dashboards. `make docs` runs it. Argument: the folder to write to."""

import json
import pathlib
import sys

# Label matchers of all metrics, and of metrics with a model label.
ALL = 'namespace=~"$namespace", release=~"$release"'
OF_MODEL = f'{ALL}, gen_ai_request_model=~"$model"'
TTFT, DURATION = "gen_ai_server_time_to_first_token_seconds", "gen_ai_server_request_duration_seconds"


def rate(metric, by="", where="", labels=OF_MODEL):
    """Rate of a counter. Every series of a counter exists as 0 from the start."""
    where = f", {where}" if where else ""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{labels}{where}}}[$__rate_interval]))"


def or_zero(query):
    """A histogram exists from its first event on. Until then the query is 0."""
    return f"({query}) or on() vector(0)"


def total(metric, by="", where="", labels=OF_MODEL, function="sum"):
    where = f", {where}" if where else ""
    return f"{function} by ({by}) ({metric}{{{labels}{where}}})" if by else f"{function}({metric}{{{labels}{where}}})"


def quantiles(metric, where="", labels=OF_MODEL):
    """Median, 95th and 99th percentile of a histogram."""
    where = f", {where}" if where else ""
    buckets = f"sum by (le) (rate({metric}_bucket{{{labels}{where}}}[$__rate_interval]))"
    return [(f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)]


def mean(metric, by, where="", labels=OF_MODEL):
    where = f", {where}" if where else ""
    sums = [f"sum by ({by}) (rate({metric}_{part}{{{labels}{where}}}[$__rate_interval]))" for part in ("sum", "count")]
    return " / ".join(sums)


def ratio(over, under, where="", labels=OF_MODEL, may_be_zero=False):
    where = f", {where}" if where else ""
    one, other = (f"sum(rate({metric}{{{labels}{where}}}[$__rate_interval]))" for metric in (over, under))
    return f"{one} / clamp_min({other}, 1e-9)" if may_be_zero else f"{one} / {other}"


FAILED_ATTEMPT = 'outcome=~"prefill_lost|decode_lost|transfer_failed|mismatch|internal"'
FAILED = 'finished_reason=~"failed|deadline|overloaded"'
NODE = 'job="baton/baton-{}-node"'.format


def pool(role):
    """Panels that both pools have."""
    job = NODE(role)
    return [
        ("Sequences", "short", [(total("baton_sequences", "state", job), "{{state}}")]),
        ("KV blocks", "short", [(total("baton_kv_blocks", "state", job), "{{state}}")]),
        ("KV cache usage by node", "percentunit", [(total("baton_kv_cache_usage", "instance", job), "{{instance}}")]),
        ("Tokens in steps", "tokens/s", [(rate("baton_step_tokens_total", "instance", job), "{{instance}}")]),
        ("Time in the node's queue", "s", quantiles("baton_sequence_queue_time_seconds", job)),
        ("Busy time of the device", "percentunit", [(rate("baton_step_duration_seconds_sum", "instance", job), "{{instance}}")]),
        ("Finished sequences", "per second", [(rate("baton_sequences_finished_total", "outcome", job), "{{outcome}}")]),
        ("Blocks kept for the next turn", "short", [(total("baton_kv_blocks_kept", "instance", job), "{{instance}}")]),
        ("Preemptions", "per second", [(rate("baton_preemptions_total", "instance", job), "{{instance}}")]),
    ]


GOOD, BAD, LATE = "green", "red", "orange"
FIRING = f'ALERTS{{{ALL}, alertname=~"Baton.+", alertstate="firing"}}'


def stat(title, unit, query, legend, *steps):
    """A panel with the last value of each series. The steps are colours, each with the value from which it holds."""
    return title, unit, [(query, legend)], {"type": "stat", "size": (6, 4), "steps": steps}


def seen_today(query, metric, where):
    """A query with 0 for each release whose metric has ended within a day."""
    ended = f"0 * max by (namespace, release) (last_over_time({metric}{{{ALL}, {where}}}[1d]))"
    return f"({query}) or {ended}"


ROUTERS = f"count by (namespace, release) (baton_draining{{{ALL}, {NODE('router').replace('-node', '')}}})"
UP = f'max by (namespace, release, gen_ai_request_model) (baton_nodes{{{OF_MODEL}, health="up", role="ROLE"}})'
# Answers to an on-call's first questions: is the cluster down, who suffers, which part is it, and since when.
OVERVIEW = [
    stat("Routers", "short", seen_today(ROUTERS, "baton_draining", 'job="baton/baton-router"'), "{{namespace}}/{{release}}", (BAD, None), (GOOD, 1)),
    stat("Decode nodes up", "short", UP.replace("ROLE", "decode"), "{{release}} {{gen_ai_request_model}}", (BAD, None), (GOOD, 1)),
    stat("Prefill nodes up", "short", UP.replace("ROLE", "prefill"), "{{release}} {{gen_ai_request_model}}", (LATE, None), (GOOD, 1)),
    stat("Nodes excluded, suspect or down", "short",
        f'max(baton_nodes_excluded{{{ALL}}}) + max(sum by (instance) (baton_nodes{{{ALL}, health=~"suspect|down"}}))', "nodes", (GOOD, None), (LATE, 1)),
    stat("Requests that fail", "percentunit",
        f'{rate("baton_requests_finished_total", "release", FAILED)} / clamp_min({rate("baton_requests_finished_total", "release")}, 1e-9)',
        "{{release}}", (GOOD, None), (LATE, 0.001), (BAD, 0.01)),
    stat("Time to first token, p95", "s",
        f"histogram_quantile(0.95, sum by (release, gen_ai_request_model, le) (rate({TTFT}_bucket{{{OF_MODEL}}}[$__rate_interval])))",
        "{{release}} {{gen_ai_request_model}}", (GOOD, None), (LATE, 2), (BAD, 5)),
    stat("Waiting requests", "short", total("baton_requests", "release, gen_ai_request_model", 'state="waiting"'),
        "{{release}} {{gen_ai_request_model}}", (GOOD, None), (LATE, 10)),
    stat("Nodes with other weights", "short", total("baton_weights_nodes_behind", "release, gen_ai_request_model", function="max"),
        "{{release}} {{gen_ai_request_model}}", (GOOD, None), (LATE, 1)),
    ("Firing alerts, and for how long", "s", [(f"(time() - ALERTS_FOR_STATE{{{ALL}, alertname=~\"Baton.+\"}}) and ignoring(alertstate) {FIRING}", "")],
        {"type": "table", "size": (24, 6)}),
]

# Metrics without a panel, each with the reason.
WITHOUT_PANEL = {
    "target_info": "labels of other metrics",
    "gen_ai_client_token_usage": "sizes of single requests, for capacity planning; the panel Tokens has the sums",
}

# Dashboards by name: title, and a list of panels (title, unit, queries with their legends, and how the panel differs from a graph).
DASHBOARDS = {
    "cluster": ("Baton: cluster", [
        *OVERVIEW,
        ("Nodes", "short", [(
            f"max by (role, health) ({total('baton_nodes', 'instance, role, health', labels=ALL)})", "{{role}} {{health}}")]),
        ("Finished requests", "per second", [(rate("baton_requests_finished_total", "finished_reason"), "{{finished_reason}}")]),
        ("Failed and rejected requests", "per second", [(rate("baton_requests_finished_total", "", FAILED), "failed, late or rejected")]),
        ("Time to first token", "s", quantiles(TTFT)),
        ("Time per output token", "s", quantiles("gen_ai_server_time_per_output_token_seconds")),
        ("Duration of requests", "s", quantiles(DURATION)),
        ("Tokens", "tokens/s", [(rate("baton_tokens_total", "gen_ai_token_type"), "{{gen_ai_token_type}}")]),
        ("In-flight requests", "short", [(total("baton_requests", "state"), "{{state}}")]),
        ("KV cache usage", "percentunit", [(total("baton_kv_cache_usage", "job", function="avg"), "{{job}}")]),
    ]),
    "stages": ("Baton: stages of a request", [
        ("Mean time of each stage", "s", [
            (or_zero(mean("baton_request_queue_time_seconds", "job")), "wait in the router"),
            (mean("baton_sequence_queue_time_seconds", "job"), "queue of {{job}}"),
            (mean("baton_sequence_prefill_time_seconds", "job"), "prefill by {{job}}"),
            (mean("baton_kv_transfer_duration_seconds", "job"), "transfer, seen by {{job}}"),
            (mean("baton_hand_over_gap_seconds", "job"), "from token 0 to token 1"),
        ]),
        ("Time to first token", "s", quantiles(TTFT)),
        ("Prefill on prefill nodes", "s", quantiles("baton_sequence_prefill_time_seconds", NODE("prefill"))),
        ("From token 0 to token 1", "s", quantiles("baton_hand_over_gap_seconds")),
        ("Inter-token latency", "s", quantiles("baton_inter_token_latency_seconds")),
        ("Error of the predicted time to first token", "percentunit",
            [(or_zero(mean("baton_time_to_first_token_prediction_error", "job")), "mean")]),
    ]),
    "prefill": ("Baton: prefill nodes", [
        ("Pending prompt tokens", "short", [(total("baton_pending_prompt_tokens", "instance", NODE("prefill")), "{{instance}}")]),
        ("Seconds of pending prompts", "s", [(
            f"{total('baton_pending_prompt_tokens', '', NODE('prefill'))} * sum(rate(baton_step_duration_seconds_sum{{{OF_MODEL}, {NODE('prefill')}}}[$__rate_interval]))"
            f" / clamp_min(sum(rate(baton_step_tokens_total{{{OF_MODEL}, {NODE('prefill')}}}[$__rate_interval])), 1)", "all nodes")]),
        ("Prefix cache hits", "percentunit", [(ratio("baton_prefix_cache_hits_total", "baton_prefix_cache_queries_total", NODE("prefill")), "of prompt tokens")]),
        *pool("prefill"),
    ]),
    "decode": ("Baton: decode nodes", [
        ("Rows in a step", "short", [(ratio("baton_step_rows_total", "baton_steps_total", NODE("decode")), "mean")]),
        ("Prefix cache hits", "percentunit", [(ratio("baton_prefix_cache_hits_total", "baton_prefix_cache_queries_total", NODE("decode")), "of prompt tokens")]),
        ("Accepted draft tokens", "per second", [(rate("baton_speculation_accepted_total"), "accepted"), (rate("baton_speculation_drafted_total"), "proposed")]),
        ("Accepted draft tokens by position", "per second", [(rate("baton_speculation_accepted_at_total", "position"), "{{position}}")]),
        ("Rows with draft tokens", "percentunit", [(ratio("baton_speculation_rows_total", "baton_step_rows_total", NODE("decode")), "of all rows")]),
        ("Token bitmask of a grammar", "s", quantiles("baton_grammar_mask_duration_seconds")),
        ("Compilation of a grammar", "s", quantiles("baton_grammar_compile_duration_seconds")),
        *pool("decode"),
    ]),
    "transfer": ("Baton: KV transfer", [
        ("Throughput", "Bps", [(rate("baton_kv_transfer_bytes_total", "job", 'job=~"baton/.*-node"'), "{{job}}")]),
        ("Duration", "s", quantiles("baton_kv_transfer_duration_seconds", NODE("decode"))),
        ("Transfers", "per second", [(rate("baton_kv_transfers_total", "side, outcome"), "{{side}} {{outcome}}")]),
        ("Transfers in progress", "short", [(total("baton_kv_transfer_active", "instance", labels=ALL), "{{instance}}")]),
        ("Lowest receive rate of a pair", "Bps", [(total("baton_kv_transfer_receive_rate_bytes_per_second", "path", labels=ALL, function="min"), "{{path}}")]),
        ("Connected nodes by transport", "short", [(total("baton_kv_transfer_peers", "path", labels=ALL), "{{path}}")]),
        ("Fallbacks to another transport", "per second", [(rate("baton_kv_transfer_fallbacks_total", "wanted", labels=ALL), "{{wanted}}")]),
        ("Chunks", "per second", [(rate("baton_kv_transfer_chunks_total", "direction", labels=ALL), "{{direction}}")]),
        ("Control messages", "per second", [(rate("baton_kv_transfer_control_messages_total", "direction", labels=ALL), "{{direction}}")]),
        ("Rejected messages", "per second", [(rate("baton_kv_transfer_refused_total", "reason", labels=ALL), "{{reason}}")]),
    ]),
    "router": ("Baton: router", [
        ("In-flight requests by router", "short", [(total("baton_requests", "instance, state"), "{{instance}} {{state}}")]),
        ("Finished requests by router", "per second", [(rate("baton_requests_finished_total", "instance"), "{{instance}}")]),
        ("Attempts", "per second", [(rate("baton_attempts_total", "outcome"), "{{outcome}}")]),
        ("Failed attempts", "percentunit", [(
            f"{rate('baton_attempts_total', where=FAILED_ATTEMPT)}"
            f" / clamp_min(sum(rate(baton_attempts_total{{{OF_MODEL}}}[$__rate_interval])), 1e-9)", "of all")]),
        ("Waiting requests", "short", [(total("baton_requests", where='state="waiting"'), "waiting")]),
        ("Predicted wait for busy nodes", "s", [(f"max by (role) (baton_queue_predicted_time_seconds{{{OF_MODEL}}})", "{{role}}")]),
        ("Cached blocks known to routers", "short", [(total("baton_nodes_cached_blocks", "role", labels=ALL, function="max"), "{{role}}")]),
        ("Wait in the router", "s", quantiles("baton_request_queue_time_seconds")),
        ("Refused requests", "per second", [(rate("baton_requests_refused_total", "reason"), "{{reason}}")]),
        ("Where prompts are prefilled, and why", "per second", [(rate("baton_picks_total", "decision, reason"), "{{decision}} {{reason}}")]),
        ("Sequences that left draining nodes with their KV", "per second", [(rate("baton_moved_sequences_total"), "moved")]),
        ("Tokens of moved sequences", "tokens/s", [(rate("baton_moved_tokens_total", "kv"), "KV {{kv}}")]),
        ("Attempts on nodes", "per second", [(rate("baton_node_attempts_total", "role, outcome"), "{{role}} {{outcome}}")]),
        ("Excluded nodes", "short", [(total("baton_nodes_excluded", "role", labels=ALL, function="max"), "{{role}}")]),
        ("Exclusions of nodes", "per second", [(rate("baton_nodes_exclusions_total", "role, reason", labels=ALL), "{{role}} {{reason}}")]),
        ("Source of members answers", "bool", [(total("baton_membership_connected", "instance, backend", labels=ALL, function="min"), "{{instance}} {{backend}}")]),
        ("Nodes by router", "short", [(total("baton_nodes", "instance, role", 'health="up"', labels=ALL), "{{instance}} {{role}}")]),
    ]),
    "keys": ("Baton: API keys", [
        ("Requests", "per second", [(rate("baton_api_key_requests_total", "key", labels=ALL), "{{key}}")]),
        ("Tokens", "tokens/s", [(rate("baton_api_key_tokens_total", "key, gen_ai_token_type", labels=ALL), "{{key}} {{gen_ai_token_type}}")]),
        ("Rejected by a limit of the key", "per second", [(rate("baton_api_key_limited_total", "key, limit", labels=ALL), "{{key}} {{limit}}")]),
        ("Waiting requests", "short", [(total("baton_api_key_waiting", "key", labels=ALL), "{{key}}")]),
        ("Wait in the router", "s", [(or_zero(mean("baton_api_key_queue_time_seconds", "key", labels=ALL)), "{{key}}")]),
        ("Requests without a valid key", "per second", [(rate("baton_api_key_rejected_total", "reason", labels=ALL), "{{reason}}")]),
    ]),
    "tiers": ("Baton: KV tiers", [
        ("Blocks", "short", [(total("baton_tier_blocks", "instance, tier", labels=ALL), "{{instance}} {{tier}}")]),
        ("Used slots", "percentunit", [(f"{total('baton_tier_blocks', 'instance, tier', labels=ALL)} / {total('baton_tier_slots', 'instance, tier', labels=ALL)}", "{{instance}} {{tier}}")]),
        ("Blocks loaded, and computed because that is faster", "per second", [
            (rate("baton_tier_hits_total", "tier", labels=ALL), "{{tier}} loaded"),
            (rate("baton_tier_loads_refused_total", "tier", labels=ALL), "{{tier}} computed"),
        ]),
        ("Bytes loaded and saved", "Bps", [
            (rate("baton_tier_loaded_bytes_total", "tier", labels=ALL), "{{tier}} loaded"),
            (rate("baton_tier_saved_bytes_total", "tier", labels=ALL), "{{tier}} saved"),
        ]),
        ("Age of the oldest queued save", "s", [(total("baton_tier_queue_age_seconds", "instance, tier", labels=ALL, function="max"), "{{instance}} {{tier}}")]),
        ("Saves that did not happen", "per second", [
            (rate("baton_tier_saves_dropped_total", "tier", labels=ALL), "{{tier}} dropped"),
            (rate("baton_tier_saves_cancelled_total", "tier", labels=ALL), "{{tier}} cancelled"),
            (rate("baton_tier_saves_failed_total", "tier", labels=ALL), "{{tier}} failed"),
        ]),
        ("Damaged blocks", "per second", [(rate("baton_tier_damaged_total", "instance, tier", labels=ALL), "{{instance}} {{tier}}")]),
    ]),
    "weights": ("Baton: weight updates", [
        ("Phase of the running update", "bool", [(total("baton_weights_phase", "phase", function="max"), "{{phase}}")]),
        ("Different weights", "short", [(total("baton_weights_versions", "gen_ai_request_model", function="max"), "{{gen_ai_request_model}}")]),
        ("Nodes with other weights than most", "short", [(total("baton_weights_nodes_behind", "instance", function="max"), "seen by {{instance}}")]),
        ("Ended updates", "per second", [(rate("baton_weights_updates_total", "kind, outcome"), "{{kind}} {{outcome}}")]),
        ("Duration of an update", "s", quantiles("baton_weights_update_duration_seconds")),
        ("Pause of a node", "s", quantiles("baton_weights_pause_seconds")),
    ]),
    "processes": ("Baton: processes", [
        ("CPU", "cores", [(rate("process_cpu_time_seconds_total", "instance", labels=ALL), "{{instance}}")]),
        ("Resident memory", "bytes", [(total("process_memory_usage_bytes", "instance", labels=ALL), "{{instance}}")]),
        ("Open files and sockets", "short", [(total("process_open_file_descriptor_count", "instance", labels=ALL), "{{instance}}")]),
        ("Draining", "bool", [(total("baton_draining", "instance", labels=ALL), "{{instance}}")]),
        ("Load time of the model", "s", [(total("baton_model_load_duration_seconds", "instance", labels=ALL), "{{instance}}")]),
        ("Hung steps", "bool", [(total("baton_step_hung", "instance", labels=ALL), "{{instance}}")]),
        ("Calls rejected by nodes", "per second", [(rate("baton_node_calls_rejected_total", "reason"), "{{reason}}")]),
        ("Dropped spans and log lines", "per second", [
            (rate("baton_telemetry_spans_dropped_total", "instance", labels=ALL), "{{instance}} spans"),
            (rate("baton_telemetry_log_lines_dropped_total", "instance", labels=ALL), "{{instance}} log lines"),
        ]),
    ]),
    "steps": ("Baton: steps", [
        ("Steps", "per second", [(rate("baton_steps_total", "instance"), "{{instance}}")]),
        ("Duration of a step", "s", quantiles("baton_step_duration_seconds")),
        ("Mean duration by node", "s", [(mean("baton_step_duration_seconds", "instance"), "{{instance}}")]),
        ("Host time of a step by phase", "s", [(mean("baton_step_host_duration_seconds", "phase"), "{{phase}}")]),
        ("Steps by launch mode", "per second", [(rate("baton_step_dispatches_total", "mode"), "{{mode}}")]),
        ("Tokens in a step", "short", [(ratio("baton_step_tokens_total", "baton_steps_total"), "mean")]),
        ("Distinct experts of a step", "short", [(ratio("baton_experts_distinct_total", "baton_experts_layers_total", may_be_zero=True), "mean over layers")]),
        ("Imbalance of experts between ranks", "percentunit", [(ratio("baton_experts_rows_max_total", "baton_experts_rows_total", may_be_zero=True), "fullest rank of the mean")]),
        ("Padding rows", "percentunit", [(ratio("baton_step_padding_rows_total", "baton_step_rows_total"), "of all rows")]),
    ]),
}  # fmt: skip


def panel(number, place, title, unit, queries, more):
    source = {"type": "prometheus", "uid": "${datasource}"}
    defaults = {"unit": unit, "min": 0}
    options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    kind = more.get("type", "timeseries")
    if kind == "stat":
        defaults["thresholds"] = {"mode": "absolute", "steps": [{"color": color, "value": value} for color, value in more["steps"]]}
        options = {"colorMode": "background", "reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name"}
    if kind == "table":
        options = {"showHeader": True}
    instant = {"instant": True, "format": "table"} if kind == "table" else {}
    return {
        "id": number,
        "title": title,
        "type": kind,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(65 + index), "datasource": source, "expr": query, "legendFormat": legend, **instant}
            for index, (query, legend) in enumerate(queries)
        ],
    }


def arranged(panels):
    """The panels in rows of 24 columns. Panels of one row have the same height."""
    left = top = height = 0
    for number, (title, unit, queries, *more) in enumerate(panels, 1):
        more = more[0] if more else {}
        width, tall = more.get("size", (8, 8))
        if left + width > 24 or tall != height:
            left, top, height = 0, top + height, tall
        yield panel(number, {"h": tall, "w": width, "x": left, "y": top}, title, unit, queries, more)
        left += width


def variable(name, metric, label):
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": f"label_values({metric}, {label})", "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        # Also matches metrics without the label: outside of Kubernetes they have none.
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard(name, title, panels):
    variables = [
        {"name": "datasource", "label": "datasource", "type": "datasource", "query": "prometheus"},
        variable("namespace", "baton_nodes", "namespace"),
        variable("release", "baton_nodes", "release"),
        variable("model", "baton_requests_finished_total", "gen_ai_request_model"),
    ]
    return {
        "uid": f"baton-{name}",
        "title": title,
        "tags": ["baton"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["baton"], "title": "Baton", "asDropdown": True}],
        "templating": {"list": variables},
        "panels": list(arranged(panels)),
    }


def main(folder):
    for name, (title, panels) in DASHBOARDS.items():
        (folder / f"baton-{name}.json").write_text(json.dumps(dashboard(name, title, panels), indent=1) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
