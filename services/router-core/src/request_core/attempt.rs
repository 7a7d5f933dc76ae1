//! One attempt as a state machine: the events that its nodes may send, in which order, and the
//! actions that follow.
//!
//! Life of the decode side: `Opening` → (Reserved) → `Reserved` → (token 0 repeated) → `Decoding` →
//! finished or failed. Life of the prefill side: `Prefilling` → (token 0) → `HoldingToken` until
//! the decode node reported `Reserved` → `Transferring` → (Delivered) → `Ended`. The prefill side
//! is `Ended` from the start when the attempt has no prefill node, and as soon as the decode node
//! reports that it needs none.
//!
//! The client receives token 0 only once the decode node holds a reservation, so a request that the
//! decode node refuses has emitted nothing. A token 0 that ends the request needs no decode node.
//! Once the decode node sends tokens, it has the KV, and a failure of the prefill node no longer
//! matters. If the transfer fails before token 0 arrives, the cause may be that token 0 ends the
//! request: the attempt then waits for token 0, at most [`TOKEN_0_MAX`].

use std::time::Duration;

use proto::v1::{
    FinishReason, PrefillToken, Reserved, StageTimes, Token, decode_event::Event as DecodeEvent,
    prefill_event::Event as PrefillEvent,
};
use serde::{Deserialize, Serialize};

use super::{
    emitted::EmittedTokens,
    failure::{AttemptFailure, AttemptSide, FailureCause},
};

/// Maximum time that a complete answer waits for the decode node's last event, which only adds
/// statistics.
pub(super) const LAST_EVENT_MAX: Duration = Duration::from_millis(200);
/// Maximum time that a failed transfer waits for the prefill node's token 0, which may end the
/// answer. Waiting longer would only delay the next attempt.
pub(super) const TOKEN_0_MAX: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(super) struct AttemptState {
    /// Index of the attempt's first token.
    first_index: u32,
    decode: Decode,
    prefill: Prefill,
    /// Whether the prefill node reported `Delivered`, the last event of its stream.
    delivered: bool,
    /// Failure of the decode node's transfer, while token 0 is awaited.
    transfer_failed: Option<AttemptFailure>,
    /// Whether token 0 has the log-probabilities of the prompt. Only the node that prefills sends
    /// them.
    awaits_prompt: bool,
    /// Tokens of a sequence that moves with its KV to the decode node; 0 otherwise.
    moves_tokens: u32,
    /// Events of the decode node that wait for the prefill node's token 0, which has the
    /// log-probabilities. Bounded by the tokens of the answer.
    held: Vec<DecodeEvent>,
    stats: AttemptStats,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decode {
    Opening,
    Reserved,
    Decoding,
}

#[derive(Debug, PartialEq)]
enum Prefill {
    Prefilling,
    /// Token 0 arrived; `Reserved` is awaited.
    HoldingToken(Token),
    /// Token 0 was emitted.
    Transferring,
    /// The attempt has no prefill node, no longer needs it, or has lost it.
    Ended,
}

/// Statistics of one attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttemptStats {
    /// Tokens of the attempt found in a prefix cache, the larger of the two nodes' hits.
    pub cached_tokens: u32,
    /// Bytes of KV transferred from the prefill node to the decode node.
    pub kv_bytes: u64,
    /// Time from the reservation until the KV was visible, in microseconds.
    pub transfer_us: u64,
    /// Whether the decode node prefilled the prompt itself.
    pub local_prefill: bool,
    /// Tokens of a sequence that moved with its KV to the decode node; 0 otherwise.
    pub moved_tokens: u32,
    pub prefill: NodeStats,
    pub decode: NodeStats,
    /// Tokens that the decode node sent after its first event, and the time that the router waited
    /// for them.
    pub decoded_tokens: u32,
    pub decode_wait: Duration,
}

/// Statistics that one node reported about an attempt; `None` is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStats {
    /// Tokens of the attempt found in the node's prefix cache.
    pub cached_tokens: Option<u32>,
    pub stages: Option<StageTimes>,
}

/// An action that follows an event.
#[derive(Debug, PartialEq)]
pub(super) enum AttemptAction {
    /// Emit these new tokens. `first_index`: index of the first. `by`: the node that sampled them.
    Emit { by: AttemptSide, first_index: u32, tokens: Vec<Token> },
    /// The decode node holds a reservation, so it has admitted the request.
    Admitted,
    /// The KV was transferred. `elapsed`: from the first chunk sent to the last one acknowledged.
    Delivered { elapsed: Duration },
    /// The decode node needs no prefill node: drop the stream of the prefill node.
    DropPrefill,
    /// The answer is complete.
    Finish(FinishReason),
    /// The attempt failed.
    Fail(AttemptFailure),
}

impl AttemptState {
    /// `first_index`: number of tokens that earlier attempts emitted.
    pub(super) fn new(first_index: u32, with_prefill: bool) -> Self {
        Self {
            first_index,
            decode: Decode::Opening,
            prefill: if with_prefill { Prefill::Prefilling } else { Prefill::Ended },
            delivered: false,
            transfer_failed: None,
            awaits_prompt: false,
            moves_tokens: 0,
            held: Vec::new(),
            stats: AttemptStats::default(),
        }
    }

    /// Sets whether token 0 must have the log-probabilities of the prompt.
    pub(super) fn awaiting_prompt(self, awaits_prompt: bool) -> Self {
        Self { awaits_prompt, ..self }
    }

    /// Sets the number of tokens of a sequence that moves with its KV; 0 if it does not.
    pub(super) fn moving(self, moves_tokens: u32) -> Self {
        Self { moves_tokens, ..self }
    }

    /// Returns the number of tokens that earlier attempts emitted.
    pub(super) fn first_index(&self) -> u32 {
        self.first_index
    }

    pub(super) fn stats(&self) -> AttemptStats {
        self.stats
    }

    /// Handles the stage times in an event of the node on this side.
    pub(super) fn on_stages(&mut self, side: AttemptSide, stages: Option<StageTimes>) {
        let node = match side {
            AttemptSide::Prefill => &mut self.stats.prefill,
            AttemptSide::Decode => &mut self.stats.decode,
        };
        node.stages = stages.or(node.stages);
    }

    /// Adds the time that the router waited for the tokens of this event of the decode node.
    pub(super) fn on_decode_wait(&mut self, event: Option<&DecodeEvent>, waited: Duration) {
        if let (Some(DecodeEvent::Tokens(event)), Decode::Decoding) = (event, self.decode) {
            self.stats.decoded_tokens += event.tokens.len() as u32;
            self.stats.decode_wait += waited;
        }
    }

    /// Handles an event of the decode node; `None` for an event of unknown type.
    pub(super) fn on_decode_event(
        &mut self,
        event: Option<DecodeEvent>,
        emitted: &mut EmittedTokens,
    ) -> Vec<AttemptAction> {
        let violation = |what: &str| {
            vec![AttemptAction::Fail(AttemptFailure::violation(AttemptSide::Decode, what))]
        };
        if self.holds(event.as_ref()) {
            self.held.extend(event);
            return vec![];
        }
        match (event, self.decode) {
            (Some(DecodeEvent::Reserved(reserved)), Decode::Opening) => {
                self.on_reserved(&reserved, emitted)
            }
            (Some(DecodeEvent::Reserved(_)), Decode::Reserved | Decode::Decoding) => {
                violation("it reported Reserved twice")
            }
            (Some(DecodeEvent::Tokens(_)), Decode::Opening) => {
                violation("tokens came before Reserved")
            }
            (Some(DecodeEvent::Tokens(event)), Decode::Reserved)
                if event.first_index != self.first_index =>
            {
                violation(&format!(
                    "its first token has index {}, not {}",
                    event.first_index, self.first_index
                ))
            }
            (Some(DecodeEvent::Tokens(event)), Decode::Reserved | Decode::Decoding) => {
                debug_assert!(
                    !matches!(self.prefill, Prefill::HoldingToken(_)),
                    "Reserved ends it"
                );
                self.decode = Decode::Decoding;
                self.stats.moved_tokens = self.moves_tokens;
                self.emit(AttemptSide::Decode, event.first_index, event.tokens, emitted)
            }
            // A weight update ended an answer that earlier attempts had started.
            (Some(DecodeEvent::Finished(event)), Decode::Opening | Decode::Reserved)
                if event.reason() == FinishReason::Abort && self.first_index > 0 =>
            {
                vec![AttemptAction::Finish(FinishReason::Abort)]
            }
            (Some(DecodeEvent::Finished(_)), Decode::Opening | Decode::Reserved) => {
                violation("it finished without a token")
            }
            (Some(DecodeEvent::Finished(event)), Decode::Decoding) => {
                if event.received_bytes > 0 {
                    self.stats.kv_bytes = event.received_bytes;
                    self.stats.transfer_us = event.transfer_us;
                }
                match event.reason() {
                    FinishReason::Unspecified | FinishReason::ToolCalls => {
                        violation("it finished without a reason")
                    }
                    reason => vec![AttemptAction::Finish(reason)],
                }
            }
            (Some(DecodeEvent::Failure(failure)), decode) => {
                let failure = AttemptFailure::reported(AttemptSide::Decode, failure);
                let awaits_token_0 =
                    self.prefill == Prefill::Prefilling && decode != Decode::Decoding;
                if failure.cause == FailureCause::TransferFailed && awaits_token_0 {
                    self.transfer_failed = Some(failure);
                    return vec![];
                }
                vec![AttemptAction::Fail(failure)]
            }
            (None, _) => violation("an event has no known content"),
        }
    }

    fn on_reserved(
        &mut self,
        reserved: &Reserved,
        emitted: &mut EmittedTokens,
    ) -> Vec<AttemptAction> {
        self.decode = Decode::Reserved;
        self.saw_cached(reserved.cached_tokens);
        self.stats.decode.cached_tokens = Some(reserved.cached_tokens);
        self.stats.local_prefill = reserved.local_prefill;
        if reserved.local_prefill {
            // The decode node had the KV already, so no KV moves.
            self.moves_tokens = 0;
        }
        let mut next = vec![AttemptAction::Admitted];
        match std::mem::replace(&mut self.prefill, Prefill::Ended) {
            Prefill::Ended => {}
            // The decode node samples token 0 itself. The prefill node's token 0 was not
            // emitted.
            Prefill::Prefilling | Prefill::HoldingToken(_) | Prefill::Transferring
                if reserved.local_prefill =>
            {
                next.push(AttemptAction::DropPrefill);
            }
            Prefill::HoldingToken(token) => {
                self.prefill = Prefill::Transferring;
                let tokens = vec![token];
                next.extend(self.emit(AttemptSide::Prefill, self.first_index, tokens, emitted));
            }
            awaited @ (Prefill::Prefilling | Prefill::Transferring) => self.prefill = awaited,
        }
        next
    }

    /// Returns whether an event of the decode node waits for the log-probabilities of the prompt.
    fn holds(&self, event: Option<&DecodeEvent>) -> bool {
        self.awaits_prompt
            && self.prefill == Prefill::Prefilling
            && self.decode == Decode::Reserved
            && matches!(event, Some(DecodeEvent::Tokens(_) | DecodeEvent::Finished(_)))
    }

    /// Handles an event of the prefill node; `None` for an event of unknown type.
    pub(super) fn on_prefill_event(
        &mut self,
        event: Option<PrefillEvent>,
        emitted: &mut EmittedTokens,
    ) -> Vec<AttemptAction> {
        match event {
            Some(PrefillEvent::Token(token)) => self.prefill_token(token, emitted),
            Some(PrefillEvent::Delivered(delivered)) => match self.prefill {
                Prefill::HoldingToken(_) | Prefill::Transferring => {
                    // The last event of the decode node replaces these statistics.
                    self.stats.kv_bytes = delivered.bytes;
                    self.stats.transfer_us = delivered.transfer_us;
                    self.delivered = true;
                    let elapsed = Duration::from_micros(delivered.transfer_us);
                    vec![AttemptAction::Delivered { elapsed }]
                }
                Prefill::Prefilling => self.on_prefill_end(AttemptFailure::violation(
                    AttemptSide::Prefill,
                    "it delivered without a token",
                )),
                Prefill::Ended => vec![],
            },
            Some(PrefillEvent::Failure(failure)) => {
                self.on_prefill_end(AttemptFailure::reported(AttemptSide::Prefill, failure))
            }
            None => self.on_prefill_end(AttemptFailure::violation(
                AttemptSide::Prefill,
                "an event has no known content",
            )),
        }
    }

    fn prefill_token(
        &mut self,
        event: PrefillToken,
        emitted: &mut EmittedTokens,
    ) -> Vec<AttemptAction> {
        let finish = event.finish.map(|_| event.finish());
        let violation = |what: String| AttemptFailure::violation(AttemptSide::Prefill, what);
        let failure = match (&self.prefill, event.token) {
            (Prefill::Ended, _) => return vec![],
            (Prefill::Prefilling, Some(token)) if event.first_index == self.first_index => {
                self.saw_cached(event.cached_tokens);
                self.stats.prefill.cached_tokens = Some(event.cached_tokens);
                return match (finish, self.decode) {
                    (Some(FinishReason::Unspecified | FinishReason::ToolCalls), _) => {
                        self.on_prefill_end(violation("it finished without a reason".into()))
                    }
                    (Some(reason), _) => {
                        self.prefill = Prefill::Ended;
                        let mut next =
                            self.emit(AttemptSide::Prefill, self.first_index, vec![token], emitted);
                        if !matches!(next.last(), Some(AttemptAction::Fail(_))) {
                            next.push(AttemptAction::Finish(reason));
                        }
                        next
                    }
                    // The request continues: the transfer failed for another reason.
                    (None, Decode::Opening) if self.transfer_failed.is_some() => {
                        self.on_token_0_late()
                    }
                    (None, Decode::Opening) => {
                        self.prefill = Prefill::HoldingToken(token);
                        vec![]
                    }
                    (None, Decode::Reserved | Decode::Decoding) => {
                        self.prefill = Prefill::Transferring;
                        let mut next =
                            self.emit(AttemptSide::Prefill, self.first_index, vec![token], emitted);
                        next.extend(self.on_token_0_late());
                        for event in std::mem::take(&mut self.held) {
                            if !matches!(next.last(), Some(AttemptAction::Fail(_))) {
                                next.extend(self.on_decode_event(Some(event), emitted));
                            }
                        }
                        next
                    }
                };
            }
            (Prefill::Prefilling, Some(_)) => violation(format!(
                "its token has index {}, not {}",
                event.first_index, self.first_index
            )),
            (Prefill::Prefilling, None) => violation("its token event has no token".into()),
            (Prefill::HoldingToken(_) | Prefill::Transferring, _) => {
                violation("it sent two tokens".into())
            }
        };
        self.on_prefill_end(failure)
    }

    /// Handles the end of the prefill node's stream.
    pub(super) fn on_prefill_end(&mut self, failure: AttemptFailure) -> Vec<AttemptAction> {
        if self.transfer_failed.is_some() {
            return self.on_token_0_late();
        }
        if self.expects_prefill() && self.decode != Decode::Decoding {
            // The decode node would report this too, but only when its lease ends.
            return vec![AttemptAction::Fail(failure)];
        }
        if self.expects_prefill() {
            self.prefill = Prefill::Ended;
        }
        vec![]
    }

    /// Ends the wait of a failed transfer for token 0. Does nothing when no transfer failed.
    pub(super) fn on_token_0_late(&mut self) -> Vec<AttemptAction> {
        self.transfer_failed.take().map(AttemptAction::Fail).into_iter().collect()
    }

    /// Returns the side whose next event the attempt needs.
    pub(super) fn awaits(&self) -> AttemptSide {
        match (self.decode, &self.prefill) {
            (Decode::Reserved, Prefill::Prefilling) => AttemptSide::Prefill,
            _ if self.transfer_failed.is_some() => AttemptSide::Prefill,
            _ => AttemptSide::Decode,
        }
    }

    /// Returns whether the decode node sent a token: its sequence is in the running batch.
    pub(super) fn is_decoding(&self) -> bool {
        self.decode == Decode::Decoding
    }

    /// Returns whether the decode node may still send an event.
    pub(super) fn expects_decode(&self) -> bool {
        let has_finished = matches!(self.held.last(), Some(DecodeEvent::Finished(_)));
        !self.awaits_late_token_0() && !has_finished
    }

    /// Returns whether the transfer has failed, and token 0 may still arrive.
    pub(super) fn awaits_late_token_0(&self) -> bool {
        self.transfer_failed.is_some()
    }

    /// Returns whether an event of the prefill node can still matter.
    pub(super) fn expects_prefill(&self) -> bool {
        self.prefill != Prefill::Ended && !self.delivered
    }

    fn emit(
        &self,
        side: AttemptSide,
        first_index: u32,
        tokens: Vec<Token>,
        emitted: &mut EmittedTokens,
    ) -> Vec<AttemptAction> {
        let lacks_prompt = tokens.first().is_some_and(|token| token.prompt.is_none());
        if self.awaits_prompt && emitted.next_index() == 0 && lacks_prompt {
            let what = "its first token has no log-probabilities of the prompt";
            return vec![AttemptAction::Fail(AttemptFailure::violation(side, what))];
        }
        match emitted.accept(first_index, tokens) {
            Ok((_, new)) if new.is_empty() => vec![],
            Ok((first_index, tokens)) => {
                vec![AttemptAction::Emit { by: side, first_index, tokens }]
            }
            Err(error) => vec![AttemptAction::Fail(AttemptFailure::emission(side, &error))],
        }
    }

    fn saw_cached(&mut self, cached_tokens: u32) {
        self.stats.cached_tokens = self.stats.cached_tokens.max(cached_tokens);
    }
}

#[cfg(test)]
mod tests;
