//! Metrics in the Prometheus text format.

use std::time::Duration;

use telemetry::{
    NodeMetrics, RouterMetrics,
    metrics::{
        ApiKeyMetrics, AttemptEndLabel, FinishedRequest, KEYS_MAX, LoadStats, Operation,
        RequestEnd, SequenceEnd, StepDispatch, StepStats, TransferEnd, TransferSide,
    },
};

use crate::start;

/// Returns the value of the only series with this name and all `labels`.
fn value(text: &str, name: &str, labels: &[&str]) -> f64 {
    let matches = |line: &&str| {
        let (series, _) = line.rsplit_once(' ').unwrap_or_default();
        (series == name || series.starts_with(&format!("{name}{{")))
            && labels.iter().all(|label| series.contains(label))
    };
    let found: Vec<_> = text.lines().filter(matches).collect();
    assert_eq!(found.len(), 1, "{name} {labels:?}: {found:?} in\n{text}");
    found[0].rsplit_once(' ').unwrap().1.parse().unwrap()
}

#[test]
fn request_is_counted_under_baton_and_vllm_names() {
    let (telemetry, _) = start("router", None);
    let metrics = RouterMetrics::new(&telemetry.metrics(), "smollm2");
    let running = metrics.request_running();
    drop(metrics.request_waiting());
    metrics.first_token(Operation::Chat, Duration::from_millis(30));
    metrics.next_tokens(Duration::from_millis(12));
    metrics.request_ended(&FinishedRequest {
        operation: Operation::Chat,
        end: RequestEnd::Stop,
        duration: Duration::from_millis(130),
        time_to_first_token: Some(Duration::from_millis(30)),
        prompt_tokens: 100,
        completion_tokens: 11,
        cached_tokens: 64,
    });
    let text = telemetry.metrics().render_prometheus();
    let model = r#"model_name="smollm2""#;
    let ours = [r#"gen_ai_operation_name="chat""#, r#"gen_ai_request_model="smollm2""#];
    assert_eq!(value(&text, "gen_ai_server_time_to_first_token_seconds_count", &ours), 1.0);
    assert_eq!(value(&text, "vllm:time_to_first_token_seconds_count", &[model]), 1.0);
    assert_eq!(value(&text, "vllm:time_to_first_token_seconds_sum", &[model]), 0.03);
    let per_token = value(&text, "gen_ai_server_time_per_output_token_seconds_sum", &ours);
    assert!((per_token - 0.01).abs() < 1e-9, "{per_token}");
    assert_eq!(value(&text, "vllm:inter_token_latency_seconds_count", &[model]), 1.0);
    assert_eq!(value(&text, "vllm:e2e_request_latency_seconds_sum", &[model]), 0.13);
    let chat = [ours[0], model];
    assert_eq!(value(&text, "vllm:prompt_tokens_total", &chat), 100.0);
    assert_eq!(value(&text, "vllm:generation_tokens_total", &chat), 11.0);
    assert_eq!(value(&text, "vllm:request_prompt_tokens_sum", &[model]), 100.0);
    let finished = [chat[0], model, r#"finished_reason="stop""#];
    assert_eq!(value(&text, "vllm:request_success_total", &finished), 1.0);
    assert_eq!(value(&text, "vllm:num_requests_running", &[model]), 1.0);
    assert_eq!(value(&text, "vllm:num_requests_waiting", &[model]), 0.0);
    assert_eq!(value(&text, "vllm:request_queue_time_seconds_count", &[model]), 1.0);
    let cached = [chat[0], r#"gen_ai_token_type="input_cached""#];
    assert_eq!(value(&text, "baton_tokens_total", &cached), 64.0);
    assert!(text.contains(r#"target_info{service_instance_id="router-0""#), "{text}");
    drop(running);
    let text = telemetry.metrics().render_prometheus();
    assert_eq!(value(&text, "vllm:num_requests_running", &[model]), 0.0);
}

#[test]
fn failed_requests_count_by_kind_and_not_as_success() {
    let (telemetry, _) = start("router", None);
    let metrics = RouterMetrics::new(&telemetry.metrics(), "smollm2");
    metrics.request_ended(&FinishedRequest {
        operation: Operation::TextCompletion,
        end: RequestEnd::Deadline,
        duration: Duration::from_secs(1),
        time_to_first_token: None,
        prompt_tokens: 5,
        completion_tokens: 0,
        cached_tokens: 0,
    });
    let text = telemetry.metrics().render_prometheus();
    let failed = [r#"error_type="deadline""#];
    assert_eq!(value(&text, "gen_ai_server_request_duration_seconds_count", &failed), 1.0);
    for reason in [r#"finished_reason="stop""#, r#"finished_reason="length""#] {
        let labels = [reason, r#"operation_name="text_completion""#];
        assert_eq!(value(&text, "vllm:request_success_total", &labels), 0.0);
    }
    let all = [r#"finished_reason="deadline""#, r#"operation_name="text_completion""#];
    assert_eq!(value(&text, "baton_requests_finished_total", &all), 1.0);
}

#[test]
fn node_load_is_exported_under_baton_and_vllm_names() {
    let (telemetry, _) = start("decode", None);
    let metrics = NodeMetrics::new(&telemetry.metrics(), "smollm2", 4);
    metrics.set_load(&LoadStats {
        running: 3,
        waiting: 2,
        pending_prompt_tokens: 77,
        blocks_free: 40,
        blocks_cached: 20,
        blocks_kept: 7,
        blocks_held: 30,
        blocks_reserved: 10,
    });
    let step = StepStats {
        rows: 3,
        tokens: 40,
        padding_rows: 0,
        dispatch: StepDispatch::Eager,
        expert_layers: 2,
        experts_distinct: 9,
        expert_rows: 24,
        expert_rows_max: 28,
        busy: Duration::from_millis(5),
        plan: Duration::from_micros(9),
        launch: Duration::from_micros(30),
        collect: Duration::from_micros(90),
    };
    metrics.step(&step);
    let graph = StepDispatch::Graph { rows: 8 };
    metrics.step(&StepStats { tokens: 5, padding_rows: 3, dispatch: graph, ..step });
    metrics.step(&StepStats { tokens: 1, dispatch: StepDispatch::Fallback, ..step });
    metrics.prefix_lookup(100, 48);
    metrics.preempted(2);
    metrics.speculated(5, 40, 21, &[5, 4]);
    metrics.speculated(1, 2, 1, &[1]);
    metrics.queued(Duration::from_millis(1));
    metrics.prefilled(Duration::from_millis(9));
    metrics.sequence_ended(SequenceEnd::HandedOver);
    metrics.transfer_ended(
        TransferSide::Sender,
        TransferEnd::Complete,
        4096,
        Duration::from_millis(2),
    );
    metrics.transfer_ended(TransferSide::Receiver, TransferEnd::PeerLost, 100, Duration::ZERO);
    let text = telemetry.metrics().render_prometheus();
    let model = r#"model_name="smollm2""#;
    assert_eq!(value(&text, "vllm:num_requests_running", &[model]), 3.0);
    assert_eq!(value(&text, "vllm:num_requests_waiting", &[model]), 2.0);
    assert_eq!(value(&text, "vllm:kv_cache_usage_perc", &[model]), 0.4);
    assert_eq!(value(&text, "baton_kv_blocks_kept", &[r#"gen_ai_request_model="smollm2""#]), 7.0);
    assert_eq!(value(&text, "vllm:prefix_cache_queries_total", &[model]), 100.0);
    assert_eq!(value(&text, "vllm:prefix_cache_hits_total", &[model]), 48.0);
    assert_eq!(value(&text, "vllm:num_preemptions_total", &[model]), 2.0);
    assert_eq!(value(&text, "vllm:spec_decode_num_drafts_total", &[model]), 6.0);
    assert_eq!(value(&text, "vllm:spec_decode_num_draft_tokens_total", &[model]), 42.0);
    assert_eq!(value(&text, "vllm:spec_decode_num_accepted_tokens_total", &[model]), 22.0);
    let first = [model, r#"position="0""#];
    assert_eq!(value(&text, "vllm:spec_decode_num_accepted_tokens_per_pos_total", &first), 6.0);
    assert_eq!(value(&text, "baton_speculation_accepted_at_total", &[r#"position="1""#]), 4.0);
    assert_eq!(value(&text, "vllm:request_prefill_time_seconds_count", &[model]), 1.0);
    assert_eq!(value(&text, "baton_kv_blocks", &[r#"state="cached""#]), 20.0);
    assert_eq!(value(&text, "baton_step_tokens_total", &[]), 46.0);
    assert_eq!(value(&text, "baton_step_padding_rows_total", &[]), 3.0);
    for (name, sum) in [("layers", 6.0), ("distinct", 27.0), ("rows", 72.0), ("rows_max", 84.0)] {
        assert_eq!(value(&text, &format!("baton_experts_{name}_total"), &[]), sum, "{name}");
    }
    for labels in
        [&[r#"mode="eager""#][..], &[r#"mode="graph""#, r#"rows="8""#], &[r#"mode="fallback""#]]
    {
        assert_eq!(value(&text, "baton_step_dispatches_total", labels), 1.0, "{labels:?}");
    }
    for (phase, seconds) in [("plan", 27e-6), ("launch", 90e-6), ("collect", 270e-6)] {
        let phase = format!(r#"phase="{phase}""#);
        let sum = value(&text, "baton_step_host_duration_seconds_sum", &[&phase]);
        assert!((sum - seconds).abs() < 1e-9, "{phase}: {sum}");
    }
    assert_eq!(value(&text, "baton_pending_prompt_tokens", &[]), 77.0);
    let handed = [r#"outcome="handed_over""#];
    assert_eq!(value(&text, "baton_sequences_finished_total", &handed), 1.0);
    let (sender, receiver) = (r#"side="sender""#, r#"side="receiver""#);
    assert_eq!(value(&text, "baton_kv_transfer_bytes_total", &[sender]), 4096.0);
    assert_eq!(value(&text, "baton_kv_transfer_bytes_total", &[receiver]), 100.0);
    assert_eq!(value(&text, "baton_kv_transfer_duration_seconds_count", &[sender]), 1.0);
    let lost = [receiver, r#"outcome="peer_lost""#];
    assert_eq!(value(&text, "baton_kv_transfers_total", &lost), 1.0);
}

/// Returns name and labels of the series whose value is 0.
fn zeros(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| line.strip_suffix(" 0")).collect()
}

#[test]
fn every_series_of_a_router_counter_exists_for_every_model_from_the_start() {
    let (telemetry, _) = start("router", None);
    let metrics = RouterMetrics::new(&telemetry.metrics(), "one");
    metrics.of_model("two").attempt_ended(AttemptEndLabel::Busy);
    let text = telemetry.metrics().render_prometheus();
    let zeros = zeros(&text);
    let count = |name: &str, model: &str| {
        let model = format!(r#"gen_ai_request_model="{model}""#);
        zeros.iter().filter(|series| series.starts_with(name) && series.contains(&model)).count()
    };
    for (model, used) in [("one", 0), ("two", 1)] {
        assert_eq!(count("baton_attempts_total{", model), 11 - used, "{text}");
        // Five operations with eight reasons, and with three types of tokens.
        assert_eq!(count("baton_requests_finished_total{", model), 40);
        assert_eq!(count("baton_tokens_total{", model), 15);
        assert_eq!(count("baton_requests{", model), 2);
        assert_eq!(count("baton_kv_transfer_bytes_total{", model), 1);
    }
}

#[test]
fn every_series_of_a_node_counter_exists_from_the_start() {
    let (telemetry, _) = start("decode", None);
    let _metrics = NodeMetrics::new(&telemetry.metrics(), "smollm2", 3);
    let text = telemetry.metrics().render_prometheus();
    let zeros = zeros(&text);
    let count = |name: &str| zeros.iter().filter(|series| series.starts_with(name)).count();
    for (name, series) in [
        ("baton_sequences_finished_total{", 11),
        ("baton_kv_transfers_total{", 14),
        ("baton_kv_transfer_bytes_total{", 2),
        ("baton_step_dispatches_total{", 3),
        ("baton_speculation_accepted_at_total{", 3),
        ("baton_preemptions_total{", 1),
        ("baton_steps_total{", 1),
    ] {
        assert_eq!(count(name), series, "{name} in\n{text}");
    }
}

/// Scrapers require one block of `# HELP`, `# TYPE` and series per metric name.
#[test]
fn prometheus_text_has_each_family_once() {
    let (telemetry, _) = start("router", None);
    let metrics = RouterMetrics::new(&telemetry.metrics(), "smollm2");
    let _running = metrics.request_running();
    metrics.set_nodes("decode", "up", Some("smollm2"), 2);
    let text = telemetry.metrics().render_prometheus();
    let mut types: Vec<_> = text.lines().filter(|line| line.starts_with("# TYPE ")).collect();
    let count = types.len();
    types.sort_unstable();
    types.dedup();
    assert_eq!(types.len(), count, "{text}");
    assert!(text.contains("# TYPE vllm:num_requests_running gauge"), "{text}");
    assert_eq!(value(&text, "baton_nodes", &[r#"role="decode""#, r#"health="up""#]), 2.0);
}

#[test]
fn each_of_the_most_keys_has_series_of_its_own() {
    let (telemetry, _) = start("router", None);
    let metrics = ApiKeyMetrics::new(&telemetry.metrics());
    let keys: Vec<_> = (0..KEYS_MAX).map(|key| metrics.of_key(&format!("key{key}"))).collect();
    keys[KEYS_MAX - 1].request();
    let text = telemetry.metrics().render_prometheus();
    assert!(!text.contains("otel_metric_overflow"));
    let of_last = [format!(r#"key="key{}""#, KEYS_MAX - 1)];
    assert_eq!(value(&text, "baton_api_key_requests_total", &[&of_last[0]]), 1.0);
}
