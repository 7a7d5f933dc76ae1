//! The stages of one attempt at this node, each a span under the caller's own.

use telemetry::propagation;
use tracing::{Span, field::Empty, info_span};

use crate::attempt::Attempt;

/// What an attempt goes through, by DESIGN's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// From arrival until the scheduler may run it: there is room, and on a prefill node the
    /// receiver's reservation is here.
    Queue,
    /// From there until the first token.
    Prefill,
    /// Decode node with a peer: from arrival until blocks are reserved.
    Reserve,
    /// From the reservation (decode) or the first written chunk (prefill) until all has arrived.
    Transfer,
    /// From the first token at hand until the last.
    Decode,
}

const STAGE_COUNT: usize = Stage::Decode as usize + 1;

/// The open spans of one attempt. Dropping it closes them.
#[derive(Debug)]
pub(crate) struct Stages {
    traceparent: String,
    request_id: u128,
    transfer_id: u128,
    /// On a prefill node the transfer belongs to the receiver's; empty until that is known.
    transfer_parent: String,
    open: [Option<Span>; STAGE_COUNT],
}

impl Stages {
    pub fn new(attempt: &Attempt) -> Self {
        Self {
            traceparent: attempt.traceparent.clone(),
            request_id: attempt.request_id,
            transfer_id: attempt.id().0,
            transfer_parent: String::new(),
            open: [const { None }; STAGE_COUNT],
        }
    }

    pub fn request_id(&self) -> u128 {
        self.request_id
    }

    /// The receiver's span, under which [`Stage::Transfer`] will open.
    pub fn set_transfer_parent(&mut self, traceparent: String) {
        self.transfer_parent = traceparent;
    }

    /// Opens a stage. Does nothing when it is open.
    pub fn begin(&mut self, stage: Stage) {
        if self.open[stage as usize].is_some() {
            return;
        }
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

    /// True when the stage was open.
    pub fn end(&mut self, stage: Stage) -> bool {
        self.open[stage as usize].take().is_some()
    }

    /// The open span of a stage, to record in; a disabled one when it is closed.
    pub fn span(&self, stage: Stage) -> Span {
        self.open[stage as usize].clone().unwrap_or_else(Span::none)
    }

    /// The trace context of an open stage, for a peer; else the caller's own.
    pub fn traceparent(&self, stage: Stage) -> String {
        match &self.open[stage as usize] {
            Some(span) => match propagation::traceparent(span) {
                text if text.is_empty() => self.traceparent.clone(),
                text => text,
            },
            None => self.traceparent.clone(),
        }
    }

    /// Notes why the attempt ended on every open stage, and closes them.
    pub fn fail(&mut self, message: &str) {
        for span in self.open.iter_mut().filter_map(Option::take) {
            span.record("error", message);
        }
    }
}
