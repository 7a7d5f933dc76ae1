//! Trace of steps for Perfetto and chrome://tracing: work of the engine thread and of the device.

use std::{
    io::Write,
    time::{Duration, Instant},
};

use engine::{
    StepRecord,
    plan::{Dispatch, Span},
};
use serde_json::{Value, json};

/// Tracks from top to bottom.
const TRACKS: [&str; 5] = ["measurement", "plan", "launch", "collect", "device"];

/// Every step of a benchmark.
#[derive(Debug, Default)]
pub struct Trace {
    runs: Vec<(String, Vec<StepRecord>)>,
}

impl Trace {
    pub fn add(&mut self, run: String, steps: &[StepRecord]) {
        self.runs.push((run, steps.to_vec()));
    }

    pub fn write(&self, mut to: impl Write) -> serde_json::Result<()> {
        let steps = || self.runs.iter().flat_map(|(_, steps)| steps);
        let origin = steps().map(|step| step.plan.begin).min();
        let mut events = Vec::new();
        for (tid, name) in TRACKS.iter().enumerate() {
            let named =
                |key, args| json!({"name": key, "ph": "M", "pid": 1, "tid": tid, "args": args});
            events.push(named("thread_name", json!({ "name": name })));
            events.push(named("thread_sort_index", json!({ "sort_index": tid })));
        }
        if let Some(origin) = origin {
            for (name, steps) in &self.runs {
                add_run(&mut events, origin, name, steps);
            }
        }
        serde_json::to_writer(&mut to, &json!({ "displayTimeUnit": "ms", "traceEvents": events }))?;
        to.flush().map_err(serde_json::Error::io)
    }
}

/// Adds events with a duration (`X`) in the Trace Event Format; times in µs.
fn add_run(events: &mut Vec<Value>, origin: Instant, run: &str, steps: &[StepRecord]) {
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let event = |name: &str, track, span: Span, args| {
        let tid =
            TRACKS.iter().position(|other| *other == track).expect("the track is in the list");
        let (ts, dur) =
            (micros(span.begin.saturating_duration_since(origin)), micros(span.duration()));
        json!({"name": name, "ph": "X", "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args})
    };
    let [first, ..] = steps else { return };
    let end = steps.iter().map(|step| step.collect.end).max().expect("there is a step");
    let whole = Span { begin: first.plan.begin, end };
    events.push(event(run, "measurement", whole, json!({ "steps": steps.len() })));
    let mut idle_from = origin;
    for step in steps {
        let of_step = || json!({ "step": step.step_id });
        events.push(event("plan", "plan", step.plan, of_step()));
        events.push(event("launch", "launch", step.launch, of_step()));
        events.push(event("collect", "collect", step.collect, of_step()));
        let Some(Span { begin, end }) = step.device else { continue };
        // The device's clock is known to some µs: steps must not overlap in the trace.
        let device = Span { begin: begin.max(idle_from), end: end.max(idle_from) };
        idle_from = device.end;
        events.push(event(
            &format!("{:?}", step.kind).to_lowercase(),
            "device",
            device,
            step_args(step),
        ));
    }
}

fn step_args(step: &StepRecord) -> Value {
    let (dispatch, graph_rows) = match step.dispatch {
        Dispatch::Eager => ("eager", None),
        Dispatch::Graph { rows } => ("graph", Some(rows)),
        Dispatch::Fallback => ("fallback", None),
    };
    let waited = step.results_at.map(|at| step.collect.begin.saturating_duration_since(at));
    json!({
        "step": step.step_id,
        "rows": step.rows,
        "tokens": step.tokens,
        "sampled": step.sampled,
        "dispatch": dispatch,
        "graph_rows": graph_rows,
        "padding_rows": step.padding_rows(),
        "uploaded_bytes": step.uploaded_bytes,
        "results_waited_us": waited.map(|waited| waited.as_secs_f64() * 1e6),
    })
}
