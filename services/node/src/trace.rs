//! The trace that the engine thread records for an operator: steps, transfers, weight updates, and
//! the copies of the KV tiers. A node records one trace at a time. Without a trace each call of the
//! [`Recorder`] is one comparison.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use engine::{
    StepRecord,
    plan::Span,
    tiers::{LoadJob, SaveJob, Tier, TierEvent},
    trace::{Trace, TraceSpan},
};
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::node_core::{AttemptStage, CallId, StageChange};

/// Maximum duration of a trace in seconds.
pub(crate) const SECONDS_MAX: u32 = 60;
/// Steps and spans of one trace. A step has at most 800 bytes of JSON, so a trace fits into the
/// reply of 16 MiB.
const RECORDS_MAX: usize = 20_000;

const LOADS: &str = "load";
const TRANSFERS: &str = "transfer";
const WEIGHTS: &str = "weight update";

/// An operator's request for a trace.
#[derive(Debug)]
pub(crate) struct StepTraceRequest {
    pub time: Duration,
    /// Receives the trace. It ends early when the receiver is dropped.
    pub recorded: oneshot::Sender<Trace>,
    /// Held while the trace is recorded.
    pub permit: OwnedSemaphorePermit,
}

/// Records nothing between two traces.
#[derive(Debug, Default)]
pub(crate) struct Recorder(Option<Recording>);

#[derive(Debug)]
struct Recording {
    since: Instant,
    until: Instant,
    trace: Trace,
    /// Spans that have begun, by track and id.
    open: HashMap<(&'static str, u64), (Instant, Value)>,
    weight_updates: u64,
    request: StepTraceRequest,
}

impl Recorder {
    pub(crate) fn start(&mut self, request: StepTraceRequest) {
        let since = Instant::now();
        let (trace, open) = Default::default();
        let until = since + request.time;
        self.0 = Some(Recording { since, until, trace, open, weight_updates: 0, request });
    }

    /// Returns when [`finish_if_due`](Self::finish_if_due) is due at the latest.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.0.as_ref().map(|recording| recording.until)
    }

    /// Replies with the trace when its time is over or it is full. Drops it when its receiver was
    /// dropped.
    pub(crate) fn finish_if_due(&mut self) {
        if let Some(recording) = self.0.take_if(|it| it.is_over()) {
            recording.finish();
        }
    }

    pub(crate) fn add_step(&mut self, step: &StepRecord) {
        if let Some(recording) = self.recording() {
            recording.trace.steps.push(*step);
        }
    }

    pub(crate) fn save_began(&mut self, save: &SaveJob) {
        if let Some(recording) = self.recording() {
            recording.begin(save_track(save.tier), save.job.0, json!({ "slot": save.slot }));
        }
    }

    pub(crate) fn load_began(&mut self, load: &LoadJob) {
        if let Some(recording) = self.recording() {
            recording.begin(LOADS, load.job.0, json!({ "blocks": load.blocks.len() }));
        }
    }

    pub(crate) fn tier_event(&mut self, event: &TierEvent) {
        let Some(recording) = &mut self.0 else { return };
        match event {
            TierEvent::Saved { job } => recording.end_save(job.0, json!({})),
            TierEvent::SaveFailed { job } => recording.end_save(job.0, json!({ "failed": true })),
            TierEvent::Loaded { job, intact, took } => {
                let args = json!({ "intact": intact, "elapsed_us": took.as_micros() as u64 });
                recording.end(LOADS, job.0, args);
            }
            TierEvent::Copied { .. } | TierEvent::Grown { .. } | TierEvent::Recovered { .. } => {}
        }
    }

    pub(crate) fn stage(&mut self, call: CallId, change: &StageChange) {
        match change {
            StageChange::Began(AttemptStage::Transfer) => {
                if let Some(recording) = self.recording() {
                    recording.begin(TRANSFERS, call.number, json!({}));
                }
            }
            StageChange::Ended { stage: AttemptStage::Transfer, attributes } => {
                if let Some(recording) = &mut self.0 {
                    let sent = attributes.transferred.as_ref();
                    let args = json!({
                        "bytes": sent.map(|stats| stats.bytes),
                        "chunks": sent.map(|stats| stats.chunks),
                        "elapsed_us": sent.map(|stats| stats.elapsed.as_micros() as u64),
                        "error": attributes.error,
                    });
                    recording.end(TRANSFERS, call.number, args);
                }
            }
            StageChange::Failed { error } => {
                if let Some(recording) = &mut self.0 {
                    recording.end(TRANSFERS, call.number, json!({ "error": error }));
                }
            }
            StageChange::Began(_)
            | StageChange::Ended { .. }
            | StageChange::TransferParent { .. } => {}
        }
    }

    /// `paused`: time until now for which no step ran.
    pub(crate) fn weights_changed(&mut self, paused: Duration) {
        if let Some(recording) = self.recording() {
            let end = Instant::now();
            let begin = end.checked_sub(paused).unwrap_or(end).max(recording.since);
            let id = recording.weight_updates;
            recording.weight_updates += 1;
            recording.add(WEIGHTS, id, Span { begin, end }, json!({}));
        }
    }

    /// Returns the recording if it is not full.
    fn recording(&mut self) -> Option<&mut Recording> {
        self.0.as_mut().filter(|recording| !recording.is_full())
    }
}

fn save_track(tier: Tier) -> &'static str {
    match tier {
        Tier::Host => "save to host",
        Tier::Disk => "save to disk",
    }
}

impl Recording {
    fn is_full(&self) -> bool {
        self.trace.steps.len() + self.trace.spans.len() + self.open.len() >= RECORDS_MAX
    }

    fn is_over(&self) -> bool {
        self.until <= Instant::now() || self.is_full() || self.request.recorded.is_closed()
    }

    fn begin(&mut self, track: &'static str, id: u64, args: Value) {
        self.open.insert((track, id), (Instant::now(), args));
    }

    /// Ends a span that began during the recording.
    fn end(&mut self, track: &'static str, id: u64, mut end_args: Value) {
        let Some((begin, mut args)) = self.open.remove(&(track, id)) else { return };
        if let (Value::Object(args), Value::Object(more)) = (&mut args, &mut end_args) {
            args.append(more);
        }
        self.add(track, id, Span { begin, end: Instant::now() }, args);
    }

    fn end_save(&mut self, job: u64, args: Value) {
        let is_open = |tier: &Tier| self.open.contains_key(&(save_track(*tier), job));
        if let Some(tier) = Tier::ALL.into_iter().find(is_open) {
            self.end(save_track(tier), job, args);
        }
    }

    fn add(&mut self, track: &'static str, id: u64, span: Span, args: Value) {
        self.trace.spans.push(TraceSpan { track, name: track.into(), id, span, args });
    }

    fn finish(mut self) {
        let is_full = self.is_full();
        let open: Vec<(&'static str, u64)> = self.open.keys().copied().collect();
        for (track, id) in open {
            self.end(track, id, json!({ "unfinished": true }));
        }
        let Self { since, mut trace, request: StepTraceRequest { recorded, permit, .. }, .. } =
            self;
        trace.about = json!({
            "seconds": since.elapsed().as_secs_f64(),
            "steps": trace.steps.len(),
            "is_full": is_full,
        });
        // The next trace may follow the reply at once.
        drop(permit);
        // The caller may have stopped waiting.
        let _ = recorded.send(trace);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use engine::{
        StepKind, StepWork,
        event::{BlockHash, SequenceId},
        plan::Dispatch,
        tiers::{BlockContents, JobId, SaveSource},
    };
    use kernels::{BLOCK_TOKENS, BlockId};
    use tokio::sync::Semaphore;

    use super::*;
    use crate::node_core::StageAttributes;

    const REPLY_BYTES_MAX: usize = 16 << 20;

    fn start() -> (Recorder, oneshot::Receiver<Trace>, Arc<Semaphore>) {
        let permits = Arc::new(Semaphore::new(1));
        let (recorded, received) = oneshot::channel();
        let permit = permits.clone().try_acquire_owned().unwrap();
        let mut recorder = Recorder::default();
        recorder.start(StepTraceRequest { time: Duration::from_secs(60), recorded, permit });
        (recorder, received, permits)
    }

    fn step() -> StepRecord {
        let begin = Instant::now() + Duration::from_nanos(1);
        let span = Span { begin, end: begin + Duration::from_nanos(59_876_543_211) };
        StepRecord {
            step_id: u64::MAX,
            rows: u32::MAX,
            tokens: u32::MAX,
            sampled: u32::MAX,
            kind: StepKind::Prefill,
            work: StepWork::default(),
            dispatch: Dispatch::Fallback,
            uploaded_bytes: u64::MAX,
            experts: Default::default(),
            busy: Duration::ZERO,
            plan: span,
            launch: span,
            collect: span,
            device: Some(span),
            results_at: Some(begin),
        }
    }

    fn save(job: u64, tier: Tier) -> SaveJob {
        let (key, parent) = (BlockHash(1), BlockHash(2));
        let contents = BlockContents { key, parent, tokens: [0; BLOCK_TOKENS], group: 0 };
        SaveJob { job: JobId(job), tier, slot: 5, source: SaveSource::Block(BlockId(0)), contents }
    }

    #[test]
    fn full_trace_ends_early_and_fits_into_a_reply() {
        let (mut recorder, mut received, permits) = start();
        for number in 0..RECORDS_MAX {
            recorder.finish_if_due();
            assert!(received.try_recv().is_err(), "{number} records");
            recorder.add_step(&step());
        }
        recorder.add_step(&step());
        recorder.save_began(&save(1, Tier::Host));
        recorder.finish_if_due();
        let trace = received.try_recv().unwrap();
        assert_eq!((trace.steps.len(), trace.spans.len()), (RECORDS_MAX, 0));
        assert_eq!(trace.about["is_full"], true);
        assert_eq!((recorder.deadline(), permits.available_permits()), (None, 1));
        let mut written = Vec::new();
        trace.write(&mut written).unwrap();
        assert!(written.len() < REPLY_BYTES_MAX, "{} bytes", written.len());
    }

    #[test]
    fn saves_loads_transfers_and_weight_updates_become_spans() {
        let (mut recorder, mut received, _permits) = start();
        let call = CallId { sequence: SequenceId(1), number: 3 };
        recorder.tier_event(&TierEvent::Saved { job: JobId(9) });
        recorder.save_began(&save(1, Tier::Host));
        recorder.save_began(&save(2, Tier::Disk));
        recorder.load_began(&LoadJob { job: JobId(4), id: SequenceId(1), blocks: Vec::new() });
        recorder.stage(call, &StageChange::Began(AttemptStage::Queue));
        recorder.stage(call, &StageChange::Began(AttemptStage::Transfer));
        recorder.tier_event(&TierEvent::Copied { job: JobId(1) });
        recorder.tier_event(&TierEvent::Saved { job: JobId(1) });
        recorder.tier_event(&TierEvent::SaveFailed { job: JobId(2) });
        let took = Duration::from_micros(70);
        recorder.tier_event(&TierEvent::Loaded { job: JobId(4), intact: 0, took });
        let attributes = StageAttributes { error: Some("cut".into()), ..Default::default() };
        recorder.stage(call, &StageChange::Ended { stage: AttemptStage::Transfer, attributes });
        recorder.weights_changed(Duration::from_secs(3600));
        recorder.save_began(&save(5, Tier::Host));
        let recording = recorder.0.as_mut().unwrap();
        recording.until = recording.since;
        recorder.finish_if_due();
        let trace = received.try_recv().unwrap();
        let found = |track, id| -> Option<&Value> {
            let is_it = |it: &&TraceSpan| (it.track, it.id) == (track, id);
            trace.spans.iter().find(is_it).map(|it| &it.args)
        };
        assert_eq!(found("save to host", 1), Some(&json!({"slot": 5})));
        assert_eq!(found("save to disk", 2), Some(&json!({"slot": 5, "failed": true})));
        let loaded = json!({"blocks": 0, "intact": 0, "elapsed_us": 70});
        assert_eq!(found(LOADS, 4), Some(&loaded));
        assert_eq!(found(TRANSFERS, 3).unwrap()["error"], "cut");
        assert_eq!(found("save to host", 5), Some(&json!({"slot": 5, "unfinished": true})));
        let began = trace.spans.iter().map(|span| span.span.begin).min();
        assert!(found(WEIGHTS, 0).is_some() && trace.spans.len() == 6);
        let age = began.unwrap().elapsed();
        assert!(age < Duration::from_secs(3000), "spans begin with the recording, {age:?}");
    }

    #[test]
    fn caller_that_leaves_ends_the_trace() {
        let (mut recorder, received, permits) = start();
        recorder.finish_if_due();
        assert!(recorder.deadline().is_some());
        drop(received);
        recorder.finish_if_due();
        assert_eq!((recorder.deadline(), permits.available_permits()), (None, 1));
    }
}
