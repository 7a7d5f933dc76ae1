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


def ratio(over, under, where="", labels=OF_MODEL):
    where = f", {where}" if where else ""
    one, other = (f"sum(rate({metric}{{{labels}{where}}}[$__rate_interval]))" for metric in (over, under))
    return f"{one} / {other}"


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
        ("Preemptions", "per second", [(rate("baton_preemptions_total", "instance", job), "{{instance}}")]),
    ]


# Dashboards by name: title, and a list of panels (title, unit, queries with their legends).
DASHBOARDS = {
    "cluster": ("Baton: cluster", [
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
        *pool("decode"),
    ]),
    "transfer": ("Baton: KV transfer", [
        ("Throughput", "Bps", [(rate("baton_kv_transfer_bytes_total", "job", 'job=~"baton/.*-node"'), "{{job}}")]),
        ("Duration", "s", quantiles("baton_kv_transfer_duration_seconds", NODE("decode"))),
        ("Transfers", "per second", [(rate("baton_kv_transfers_total", "side, outcome"), "{{side}} {{outcome}}")]),
        ("Transfers in progress", "short", [(total("baton_kv_transfer_active", "instance", labels=ALL), "{{instance}}")]),
        ("Connected nodes by transport", "short", [(total("baton_kv_transfer_peers", "path", labels=ALL), "{{path}}")]),
        ("Fallbacks to another transport", "per second", [(rate("baton_kv_transfer_fallbacks_total", "wanted", labels=ALL), "{{wanted}}")]),
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
        ("Cached blocks known to routers", "short", [(total("baton_nodes_cached_blocks", "role", labels=ALL, function="max"), "{{role}}")]),
        ("Nodes by router", "short", [(total("baton_nodes", "instance, role", 'health="up"', labels=ALL), "{{instance}} {{role}}")]),
    ]),
    "steps": ("Baton: steps", [
        ("Steps", "per second", [(rate("baton_steps_total", "instance"), "{{instance}}")]),
        ("Duration of a step", "s", quantiles("baton_step_duration_seconds")),
        ("Mean duration by node", "s", [(mean("baton_step_duration_seconds", "instance"), "{{instance}}")]),
        ("Host time of a step by phase", "s", [(mean("baton_step_host_duration_seconds", "phase"), "{{phase}}")]),
        ("Steps by launch mode", "per second", [(rate("baton_step_dispatches_total", "mode"), "{{mode}}")]),
        ("Tokens in a step", "short", [(ratio("baton_step_tokens_total", "baton_steps_total"), "mean")]),
        ("Distinct experts of a step", "short", [(ratio("baton_experts_distinct_total", "baton_experts_layers_total"), "mean over layers")]),
        ("Imbalance of experts between ranks", "percentunit", [(ratio("baton_experts_rows_max_total", "baton_experts_rows_total"), "fullest rank of the mean")]),
        ("Padding rows", "percentunit", [(ratio("baton_step_padding_rows_total", "baton_step_rows_total"), "of all rows")]),
    ]),
}  # fmt: skip


def panel(index, title, unit, queries):
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": index + 1,
        "title": title,
        "type": "timeseries",
        "datasource": source,
        "gridPos": {"h": 8, "w": 8, "x": index % 3 * 8, "y": index // 3 * 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(65 + number), "datasource": source, "expr": query, "legendFormat": legend}
            for number, (query, legend) in enumerate(queries)
        ],
    }


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
        "panels": [panel(index, *it) for index, it in enumerate(panels)],
    }


folder = pathlib.Path(sys.argv[1])
for name, (title, panels) in DASHBOARDS.items():
    (folder / f"baton-{name}.json").write_text(json.dumps(dashboard(name, title, panels), indent=1) + "\n")
