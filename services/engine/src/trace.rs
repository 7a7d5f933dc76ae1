//! Trace of steps and of work beside them, in the Trace Event Format: Perfetto and chrome://tracing
//! read it.

use std::{
    borrow::Cow,
    io::{self, Write},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};

use crate::{
    plan::{Dispatch, Span},
    step_record::StepRecord,
};

/// Threads from top to bottom.
const THREADS: [&str; 4] = ["plan", "launch", "collect", "device"];

/// Work other than steps. Spans of one track may overlap.
#[derive(Clone, Debug)]
pub struct TraceSpan {
    pub track: &'static str,
    pub name: Cow<'static, str>,
    /// Differs between the spans of a track.
    pub id: u64,
    pub span: Span,
    pub args: Value,
}

/// Steps and spans of one engine.
#[derive(Debug, Default)]
pub struct Trace {
    /// Steps in the order of their launch.
    pub steps: Vec<StepRecord>,
    pub spans: Vec<TraceSpan>,
    /// Facts about the whole trace.
    pub about: Value,
}

impl Trace {
    /// Writes the trace as JSON.
    pub fn write(&self, mut to: impl Write) -> io::Result<()> {
        let begins = self.steps.iter().map(|step| step.plan.begin);
        let origin = begins.chain(self.spans.iter().map(|span| span.span.begin)).min();
        let mut events = Vec::new();
        for (tid, name) in THREADS.iter().enumerate() {
            let named =
                |key, args| json!({"name": key, "ph": "M", "pid": 1, "tid": tid, "args": args});
            events.push(named("thread_name", json!({ "name": name })));
            events.push(named("thread_sort_index", json!({ "sort_index": tid })));
        }
        if let Some(origin) = origin {
            self.spans.iter().for_each(|span| add_span(&mut events, origin, span));
            add_steps(&mut events, origin, &self.steps);
        }
        let trace = json!({
            "displayTimeUnit": "ms",
            // Wall-clock time, to align the traces of several nodes.
            "originUnixUs": origin.map(unix_micros),
            "otherData": self.about,
            "traceEvents": events,
        });
        serde_json::to_writer(&mut to, &trace)?;
        to.flush()
    }
}

/// Returns the µs from `origin` to `at`.
fn micros(origin: Instant, at: Instant) -> f64 {
    at.saturating_duration_since(origin).as_nanos() as f64 / 1e3
}

/// Returns the wall-clock time of `at` in µs since 1970.
fn unix_micros(at: Instant) -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(at.elapsed()).as_nanos() as f64 / 1e3
}

/// Adds the begin and the end of a span as asynchronous events, which may overlap.
fn add_span(events: &mut Vec<Value>, origin: Instant, span: &TraceSpan) {
    let TraceSpan { track, name, id, span, args } = span;
    let event = |phase, at, args| {
        let ts = micros(origin, at);
        json!({"cat": track, "name": name, "ph": phase, "id": id, "pid": 1, "ts": ts, "args": args})
    };
    events.push(event("b", span.begin, args));
    events.push(event("e", span.end, &Value::Null));
}

/// Adds events with a duration (`X`).
fn add_steps(events: &mut Vec<Value>, origin: Instant, steps: &[StepRecord]) {
    let event = |name: &str, thread, span: Span, args| {
        let tid = THREADS.iter().position(|it| *it == thread).expect("the thread is in the list");
        let (ts, dur) = (micros(origin, span.begin), micros(span.begin, span.end));
        json!({"name": name, "ph": "X", "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args})
    };
    let mut idle_from = origin;
    for step in steps {
        let of_step = || json!({ "step": step.step_id });
        events.push(event("plan", "plan", step.plan, of_step()));
        events.push(event("launch", "launch", step.launch, of_step()));
        events.push(event("collect", "collect", step.collect, of_step()));
        let Some(Span { begin, end }) = step.device else { continue };
        // The device's clock is known to a few µs. Avoid overlapping steps in the trace.
        let device = Span { begin: begin.max(idle_from), end: end.max(idle_from) };
        idle_from = device.end;
        let kind = format!("{:?}", step.kind).to_lowercase();
        events.push(event(&kind, "device", device, step_args(step)));
    }
}

fn step_args(step: &StepRecord) -> Value {
    let (dispatch, graph_rows) = match step.dispatch {
        Dispatch::Eager => ("eager", None),
        Dispatch::Graph { rows } => ("graph", Some(rows)),
        Dispatch::Fallback => ("fallback", None),
    };
    json!({
        "step": step.step_id,
        "rows": step.rows,
        "tokens": step.tokens,
        "sampled": step.sampled,
        "dispatch": dispatch,
        "graph_rows": graph_rows,
        "padding_rows": step.padding_rows(),
        "uploaded_bytes": step.uploaded_bytes,
        "results_waited_us": step.results_at.map(|at| micros(at, step.collect.begin)),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::step_record::{StepKind, StepWork};

    #[test]
    fn steps_and_overlapping_spans_have_events_with_times_from_the_first() {
        let (origin, now) = (Instant::now(), SystemTime::now());
        let span = |begin: u64, end: u64| {
            let at = |micros| origin + Duration::from_micros(micros);
            Span { begin: at(begin), end: at(end) }
        };
        let step = |step_id, begin| StepRecord {
            step_id,
            rows: 3,
            tokens: 3,
            sampled: 3,
            kind: StepKind::Decode,
            work: StepWork::default(),
            dispatch: Dispatch::Graph { rows: 4 },
            uploaded_bytes: 0,
            experts: Default::default(),
            busy: Duration::ZERO,
            plan: span(begin, begin + 10),
            launch: span(begin + 10, begin + 30),
            collect: span(begin + 80, begin + 90),
            // The second step seems to begin before the first step ends.
            device: Some(span(begin + 20, begin + 80)),
            results_at: None,
        };
        let save = |id, begin| TraceSpan {
            track: "save to host",
            name: "save".into(),
            id,
            span: span(begin, begin + 50),
            args: json!({ "blocks": 1 }),
        };
        let trace = Trace {
            steps: vec![step(0, 100), step(1, 150)],
            spans: vec![save(7, 40), save(8, 60)],
            about: json!({ "node": "decode-0" }),
        };
        let mut written = Vec::new();
        trace.write(&mut written).unwrap();
        let written: Value = serde_json::from_slice(&written).unwrap();
        assert_eq!(written["otherData"]["node"], "decode-0");
        // The first event begins 40 µs after `origin`.
        let since = now.duration_since(UNIX_EPOCH).unwrap().as_secs_f64() + 40e-6;
        let wall_clock = written["originUnixUs"].as_f64().unwrap() / 1e6;
        assert!((wall_clock - since).abs() < 60.0, "{wall_clock} and {since}");
        let events = written["traceEvents"].as_array().unwrap();
        let of = |phase: &str, name: &str| -> Vec<&Value> {
            events.iter().filter(|it| it["ph"] == phase && it["name"] == name).collect()
        };
        let times = |events: Vec<&Value>| -> Vec<(f64, Option<f64>)> {
            events.iter().map(|it| (it["ts"].as_f64().unwrap(), it["dur"].as_f64())).collect()
        };
        assert_eq!(times(of("X", "launch")), [(70.0, Some(20.0)), (120.0, Some(20.0))]);
        assert_eq!(times(of("X", "decode")), [(80.0, Some(60.0)), (140.0, Some(50.0))]);
        assert_eq!(of("X", "decode")[1]["args"]["padding_rows"], 1);
        assert_eq!(times(of("b", "save")), [(0.0, None), (20.0, None)]);
        assert_eq!(times(of("e", "save")), [(50.0, None), (70.0, None)]);
        assert_ne!(of("b", "save")[0]["id"], of("b", "save")[1]["id"]);
        assert_eq!(of("M", "thread_name").len(), THREADS.len());
    }
}
