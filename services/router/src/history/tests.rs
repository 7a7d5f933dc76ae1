use cluster::{ConsideredOption, NodeId, Placement, predict::Prediction};
use proto::v1::StageTimes;

use super::*;
use router_core::NodeStats;

/// Times since the start of the history.
const RECEIVED: Duration = Duration::from_secs(60);
const NOW: Duration = Duration::from_secs(120);

pub(super) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(super) fn entry(id: u128) -> RequestEntry {
    RequestEntry {
        request_id: RequestId(id),
        label: None,
        trace_id: None,
        api: "chat".into(),
        model: "ours".into(),
        received: RECEIVED,
        received_at: SystemTime::UNIX_EPOCH + ms(5),
        read: Some(ms(1)),
        prepared: Some(ms(3)),
        choices: 1,
        prompt_tokens: 40,
        attempts: Vec::new(),
        attempts_left_out: 0,
        waits_for: None,
        end: None,
    }
}

pub(super) fn end(at: Duration, is_complete: bool) -> RequestEntryEnd {
    RequestEntryEnd {
        at,
        reason: if is_complete { "stop".into() } else { "internal".into() },
        is_complete,
        error: (!is_complete).then(|| "a bug".to_owned()),
        first_token: Some(ms(20)),
        completion_tokens: 8,
    }
}

/// Returns an attempt that was picked after 5 ms and sent its first token after 20 ms.
pub(super) fn attempt(prefill: bool) -> AttemptEntry {
    let prediction = Prediction {
        queue_ms: 1.0,
        prompt_ms: 9.0,
        blocks_ms: 0.0,
        transfer_gap_ms: 2.0,
        slowdown_ms: 0.5,
        decode_ms: 30.0,
        evict_ms: 0.25,
        exceeds_itl_max: false,
    };
    let option = ConsideredOption {
        decode: NodeId::parse("decode-0").unwrap(),
        prefill: prefill.then(|| NodeId::parse("prefill-0").unwrap()),
        prediction: Some(prediction),
    };
    AttemptEntry {
        choice: 0,
        number: 1,
        picked: ms(5),
        waited_for: None,
        considered: Considered {
            placement: Placement::Always,
            options: vec![option],
            options_left_out: 0,
            ineligible: Vec::new(),
            ineligible_left_out: 0,
            overhead_ms: 0.5,
        },
        predicted_ttft: Some(ms(10)),
        cached_expected: (prefill.then_some(16), 0),
        first_token: Some(ms(20)),
        hand_over: prefill.then(|| ms(4)),
        end: None,
    }
}

fn node(queue_us: Option<u64>, reserve_us: Option<u64>, prefill_us: Option<u64>) -> NodeStats {
    let stages = Some(StageTimes { queue_us, reserve_us, prefill_us });
    NodeStats { cached_tokens: Some(0), stages }
}

fn ended(attempt: AttemptEntry, prefill: NodeStats, decode: NodeStats) -> AttemptEntry {
    let local_prefill = attempt.considered.options[0].prefill.is_none();
    let kv_bytes = if local_prefill { 0 } else { 4096 };
    let stats = AttemptStats {
        cached_tokens: 0,
        kv_bytes,
        transfer_us: 700,
        local_prefill,
        prefill,
        decode,
        ..AttemptStats::default()
    };
    let end = AttemptEntryEnd { at: ms(50), outcome: "complete".into(), failure: None, stats };
    AttemptEntry { end: Some(end), ..attempt }
}

fn begin(history: &SharedHistory, entry: RequestEntry) {
    history.lock().begin(entry.request_id, Arc::new(Mutex::new(entry)));
}

fn add(history: &SharedHistory, entry: RequestEntry) {
    let id = entry.request_id;
    begin(history, entry);
    history.lock().end(id);
}

fn ids(history: &SharedHistory, query: Query) -> Vec<u128> {
    let found = history.find(NOW, &query);
    found.requests.iter().map(|entry| entry.request_id.0).collect()
}

#[test]
fn requests_are_found_by_request_id_response_id_label_and_trace_id() {
    let history = SharedHistory::new(Instant::now());
    add(&history, RequestEntry { label: Some("mine".into()), ..entry(1) });
    add(&history, RequestEntry { trace_id: Some(0xabc), ..entry(2) });
    let later = RECEIVED + ms(1);
    begin(&history, RequestEntry { label: Some("mine".into()), received: later, ..entry(3) });
    let by = |key: &str| ids(&history, Query::Id(key.into()));
    assert_eq!(by(&RequestId(1).to_string()), [1]);
    for prefix in ["chatcmpl-", "cmpl-", "resp_", "msg_"] {
        assert_eq!(by(&format!("{prefix}{}", RequestId(3))), [3]);
    }
    assert_eq!(by(&format!("{:032x}", 0xabc)), [2]);
    assert_eq!(by("mine"), [3, 1], "the newest first");
    assert_eq!(by("1"), [] as [u128; 0]);
    assert_eq!(by("yours"), [] as [u128; 0]);
}

#[test]
fn slow_recent_and_failed_requests_are_selected() {
    let history = SharedHistory::new(Instant::now());
    for (id, duration, is_complete) in [(1, 30, true), (2, 10, false), (3, 20, true)] {
        let end = Some(end(Duration::from_secs(duration), is_complete));
        add(&history, RequestEntry { end, ..entry(id) });
    }
    let received = NOW - Duration::from_secs(25);
    begin(&history, RequestEntry { received, ..entry(4) });
    assert_eq!(ids(&history, Query::Slow(3)), [1, 4, 3]);
    assert_eq!(ids(&history, Query::Recent(2))[0], 4, "the newest first");
    assert_eq!(ids(&history, Query::Recent(9)).len(), 4);
    assert_eq!(ids(&history, Query::Failed), [2]);
    let oldest = Some(NOW - RECEIVED);
    assert_eq!(
        history.find(NOW, &Query::Failed).kept,
        HistorySize { running: 1, ended: 3, oldest }
    );
}

#[test]
fn end_of_an_unknown_request_has_no_effect() {
    let history = SharedHistory::new(Instant::now());
    begin(&history, entry(1));
    history.lock().end(RequestId(2));
    let kept = history.find(NOW, &Query::Failed).kept;
    assert_eq!((kept.running, kept.ended, kept.oldest), (1, 0, None));
}

#[test]
fn messages_are_bounded() {
    assert_eq!(bounded("short".into()), "short");
    let long = bounded("ü".repeat(1000));
    assert!(long.len() <= MESSAGE_BYTES_MAX + '…'.len_utf8() && long.ends_with('…'));
}

/// Returns the stages as name, milliseconds and whether the stage overlaps.
fn stages(report: &RequestReport) -> Vec<(&'static str, Option<f64>, bool)> {
    report.stages.iter().map(|stage| (stage.stage, stage.ms, stage.overlaps)).collect()
}

fn report(attempts: Vec<AttemptEntry>) -> RequestReport {
    let entry = RequestEntry { attempts, end: Some(end(ms(52), true)), ..entry(7) };
    RequestReport::new(&entry, entry.received)
}

#[test]
fn stages_of_a_disaggregated_request_add_up_to_its_duration() {
    let prefill = node(Some(2000), None, Some(12_000));
    let decode = node(None, Some(1500), None);
    let report = report(vec![ended(attempt(true), prefill, decode)]);
    let expected = [
        ("read", Some(1.0), false),
        ("text", Some(2.0), false),
        ("wait", Some(2.0), false),
        ("reserve", Some(1.5), true),
        ("queue", Some(2.0), false),
        ("prefill", Some(12.0), false),
        ("transfer", Some(0.7), true),
        ("hand-over", Some(4.0), false),
        ("decode", Some(26.0), false),
        ("delivery", Some(2.0), false),
    ];
    assert_eq!(stages(&report), expected);
    // The calls took the rest of the 15 ms until the first token.
    assert_eq!((report.duration_ms, report.unaccounted_ms), (52.0, 1.0));
    let attempt = &report.attempts[0];
    assert!(attempt.disaggregated && attempt.reason == "router.disaggregate is always");
    assert_eq!((attempt.predicted_ttft_ms, attempt.ttft_ms), (Some(10.0), Some(15.0)));
    let nodes: Vec<_> = attempt
        .nodes
        .iter()
        .map(|node| (node.node.as_str(), node.cached_expected, node.cached_found))
        .collect();
    assert_eq!(nodes, [("prefill-0", 16, Some(0)), ("decode-0", 0, Some(0))]);
    assert_eq!(attempt.options[0].prediction.as_ref().unwrap().cost_ms, 42.75);
}

#[test]
fn stage_times_of_an_older_node_are_unknown_and_not_zero() {
    let unknown = NodeStats { cached_tokens: Some(0), stages: None };
    let report = report(vec![ended(attempt(false), NodeStats::default(), unknown)]);
    let stages = stages(&report);
    assert_eq!(stages[3], ("queue", None, false));
    assert_eq!(stages[4], ("prefill", None, false));
    assert_eq!(stages[5], ("until first token", Some(15.0), false));
    assert_eq!(report.unaccounted_ms, 0.0);
    let json = serde_json::to_value(&report).unwrap();
    assert!(json["stages"][3]["ms"].is_null() && json["attempts"][0]["transfer_ms"].is_null());
}

#[test]
fn failed_attempt_is_followed_by_a_local_one() {
    let failure = Some("decode node: connection lost: why".to_owned());
    let lost = AttemptEntryEnd {
        at: ms(8),
        outcome: "decode_lost".into(),
        failure,
        stats: AttemptStats::default(),
    };
    let first = AttemptEntry { first_token: None, hand_over: None, ..attempt(true) };
    let first = AttemptEntry { end: Some(lost), ..first };
    let second = AttemptEntry { number: 2, picked: ms(10), ..attempt(false) };
    let second = ended(second, NodeStats::default(), node(Some(1000), None, Some(8000)));
    let report = report(vec![first, second]);
    let shown = stages(&report);
    assert_eq!(shown[3], ("until failure", Some(3.0), false));
    assert_eq!(
        shown[4..7],
        [("wait", Some(2.0), false), ("queue", Some(1.0), false), ("prefill", Some(8.0), false),]
    );
    assert_eq!((report.stages[3].attempt, report.stages[4].attempt), (Some(1), Some(2)));
    assert_eq!(report.unaccounted_ms, 1.0);
    assert_eq!(report.attempts[0].failure.as_deref(), Some("decode node: connection lost: why"));
    assert!(!report.attempts[1].disaggregated);
}

#[test]
fn decode_node_that_needs_no_kv_reports_a_local_prefill() {
    let decode = node(None, Some(1000), Some(9000));
    let mut attempt = ended(attempt(true), NodeStats::default(), decode);
    attempt.hand_over = None;
    attempt.end.as_mut().unwrap().stats.local_prefill = true;
    let report = report(vec![attempt]);
    assert_eq!(stages(&report)[3..5], [("queue", Some(1.0), false), ("prefill", Some(9.0), false)]);
    let reason = &report.attempts[0].reason;
    assert!(!report.attempts[0].disaggregated && reason.contains("cached"), "{reason}");
}

#[test]
fn running_request_has_its_stages_until_now() {
    let mut waits = entry(7);
    let role = cluster::Role::Decode;
    waits.waits_for = Some(NoNode::NoneUp { role, listed: 2 });
    let report = RequestReport::new(&waits, waits.received + ms(100));
    assert_eq!((&*report.end, report.duration_ms), ("running", 100.0));
    assert_eq!(stages(&report)[2], ("wait", Some(97.0), false));
    assert_eq!(report.waits_for.as_deref(), Some("none of 2 decode nodes is up"));
}

#[test]
fn running_request_has_the_time_to_its_first_token() {
    let first = AttemptEntry { first_token: Some(ms(20)), ..attempt(true) };
    let second = AttemptEntry { number: 2, first_token: Some(ms(70)), ..attempt(false) };
    let waits = AttemptEntry { first_token: None, ..attempt(true) };
    let ttft_ms = |attempts: Vec<AttemptEntry>, attempts_left_out: u32| {
        let streams = RequestEntry { attempts, attempts_left_out, ..entry(7) };
        RequestReport::new(&streams, streams.received + ms(100)).ttft_ms
    };
    assert_eq!(ttft_ms(vec![first.clone(), second.clone()], 0), Some(20.0));
    assert_eq!(ttft_ms(vec![waits], 0), None);
    assert_eq!(ttft_ms(vec![first, second], 1), None);
}
