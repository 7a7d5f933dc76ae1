//! The spans of one attempt's stages, each a child of the caller's span.

use telemetry::propagation;
use tracing::{Span, field::Empty, info_span};

use crate::node_core::{Stage, StageAttributes, StageChange};

/// The open spans of one attempt. Dropping it closes them.
#[derive(Debug)]
pub(crate) struct Stages {
    traceparent: String,
    request_id: u128,
    transfer_id: u128,
    /// The receiver's trace context on a prefill node; empty until the `RESERVE` brings it.
    transfer_parent: String,
    open: [Option<Span>; Stage::COUNT],
}

impl Stages {
    pub fn new(traceparent: String, request_id: u128, transfer_id: u128) -> Self {
        Self {
            traceparent,
            request_id,
            transfer_id,
            transfer_parent: String::new(),
            open: [const { None }; Stage::COUNT],
        }
    }

    pub fn handle(&mut self, change: StageChange) {
        match change {
            StageChange::Began(stage) => self.begin(stage),
            StageChange::Ended { stage, attributes } => self.end(stage, &attributes),
            StageChange::Failed { error } => {
                for span in self.open.iter_mut().filter_map(Option::take) {
                    span.record("error", error.as_str());
                }
            }
            StageChange::TransferParent { traceparent } => self.transfer_parent = traceparent,
        }
    }

    fn begin(&mut self, stage: Stage) {
        macro_rules! stage_span {
            ($name:literal) => {
                info_span!(
                    parent: None,
                    $name,
                    request_id = %format_args!("{:032x}", self.request_id),
                    transfer_id = %format_args!("{:032x}", self.transfer_id),
                    cached_tokens = Empty,
                    bytes = Empty,
                    chunks = Empty,
                    error = Empty,
                )
            };
        }
        let span = match stage {
            Stage::Queue => stage_span!("queue"),
            Stage::Prefill => stage_span!("prefill"),
            Stage::Reserve => stage_span!("reserve"),
            Stage::Transfer => stage_span!("transfer"),
            Stage::Decode => stage_span!("decode"),
        };
        let parent = match stage {
            Stage::Transfer if !self.transfer_parent.is_empty() => &self.transfer_parent,
            _ => &self.traceparent,
        };
        propagation::set_parent(&span, parent);
        self.open[stage as usize] = Some(span);
    }

    fn end(&mut self, stage: Stage, attributes: &StageAttributes) {
        let Some(span) = self.open[stage as usize].take() else { return };
        if let Some(cached_tokens) = attributes.cached_tokens {
            span.record("cached_tokens", cached_tokens);
        }
        if let Some(error) = &attributes.error {
            span.record("error", error.as_str());
        }
        if let Some(stats) = &attributes.transferred {
            span.record("bytes", stats.bytes);
            span.record("chunks", stats.chunks);
        }
    }

    /// Returns the trace context of an open stage, for a peer; else the caller's own.
    pub fn traceparent(&self, stage: Stage) -> String {
        let span = self.open[stage as usize].as_ref();
        let own = span.map(propagation::traceparent).filter(|text| !text.is_empty());
        own.unwrap_or_else(|| self.traceparent.clone())
    }
}
