//! One attempt as a state machine: what its nodes may say, in which order, and what follows.
//!
//! Life of the decode side: `Opening` → (Reserved) → `Reserved` → (token 0 repeated) → `Writing` →
//! finished or failed. Life of the prefill side: `Reading` → (token 0) → `Waiting` until the decode
//! node reported `Reserved` → `Sending` → (Delivered) → `Ended`; `Ended` from the start when the
//! decode node works alone, and at once when it says that it does.
//!
//! Token 0 is shown only once the decode node holds a reservation: a request that is then refused
//! has shown nothing. A token 0 that ends the request needs no decode node. Once the decode node
//! writes, the KV is there, and what becomes of the prefill node no longer matters. A transfer that
//! fails before token 0 is here may have failed because token 0 ends the request: the prefill node
//! is heard first, for as long as the caller waits.
//!
//! Nothing here reads a socket or a clock.

use std::time::Duration;

use proto::v1::{
    FinishReason, PrefillToken, Token, decode_event::Event as DecodeEvent,
    prefill_event::Event as PrefillEvent,
};

use super::{
    emitted::EmittedTokens,
    failure::{AttemptFailure, Cause, Side},
};

/// How long a complete answer waits for the node's last event, which only adds figures.
pub const LAST_EVENT_MAX: Duration = Duration::from_millis(200);
/// How long a failed transfer waits for the prefill node's token 0, which may be all there is to
/// send. Not longer: the other attempt could have begun.
pub const TOKEN_0_MAX: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub struct Attempt {
    /// Index of the attempt's first token.
    first_index: u32,
    decode: Decode,
    prefill: Prefill,
    /// The prefill node has nothing more to say.
    delivered: bool,
    /// The decode node's transfer failed while token 0 is awaited.
    transfer_failed: Option<AttemptFailure>,
    figures: Figures,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decode {
    Opening,
    Reserved,
    Writing,
}

#[derive(Debug, PartialEq)]
enum Prefill {
    Reading,
    /// Token 0 is here; `Reserved` is awaited.
    Waiting(Token),
    /// Token 0 is shown.
    Sending,
    /// There is none, it is not needed, or it is gone.
    Ended,
}

/// What an attempt moved and found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Prompt tokens found in a prefix cache, the larger of the two nodes' hits.
    pub cached_tokens: u32,
    /// KV that crossed from the prefill to the decode node.
    pub kv_bytes: u64,
    /// From the reservation to the KV being visible.
    pub transfer_us: u64,
}

/// What is to be done, in this order.
#[derive(Debug, PartialEq)]
pub enum Next {
    /// Show these tokens, which are new; `first_index` is the index of the first, `by` who made them.
    Show { by: Side, first_index: u32, tokens: Vec<Token> },
    /// The decode node has its reservation: the attempt is under way.
    Admitted,
    /// The decode node needs no prefill node: drop its stream.
    DropPrefill,
    /// The answer is complete.
    Finish(FinishReason),
    /// The attempt is over.
    Fail(AttemptFailure),
}

impl Attempt {
    /// `first_index`: how many tokens earlier attempts have shown.
    pub fn new(first_index: u32, with_prefill: bool) -> Self {
        Self {
            first_index,
            decode: Decode::Opening,
            prefill: if with_prefill { Prefill::Reading } else { Prefill::Ended },
            delivered: false,
            transfer_failed: None,
            figures: Figures::default(),
        }
    }

    pub fn figures(&self) -> Figures {
        self.figures
    }

    /// The decode node said `event`, or nothing that is known.
    pub fn decode_said(
        &mut self,
        event: Option<DecodeEvent>,
        emitted: &mut EmittedTokens,
    ) -> Vec<Next> {
        let violation =
            |what: &str| vec![Next::Fail(AttemptFailure::violation(Side::Decode, what))];
        match (event, self.decode) {
            (Some(DecodeEvent::Reserved(reserved)), Decode::Opening) => {
                self.decode = Decode::Reserved;
                self.saw_cached(reserved.cached_tokens);
                let mut next = vec![Next::Admitted];
                match std::mem::replace(&mut self.prefill, Prefill::Ended) {
                    Prefill::Ended => {}
                    // The node samples token 0 itself; the other's, never shown, is forgotten.
                    Prefill::Reading | Prefill::Waiting(_) | Prefill::Sending if reserved.alone => {
                        next.push(Next::DropPrefill);
                    }
                    Prefill::Waiting(token) => {
                        self.prefill = Prefill::Sending;
                        let tokens = vec![token];
                        next.extend(self.show(Side::Prefill, self.first_index, tokens, emitted));
                    }
                    awaited @ (Prefill::Reading | Prefill::Sending) => self.prefill = awaited,
                }
                next
            }
            (Some(DecodeEvent::Reserved(_)), Decode::Reserved | Decode::Writing) => {
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
            (Some(DecodeEvent::Tokens(event)), Decode::Reserved | Decode::Writing) => {
                debug_assert!(!matches!(self.prefill, Prefill::Waiting(_)), "Reserved ends it");
                self.decode = Decode::Writing;
                self.show(Side::Decode, event.first_index, event.tokens, emitted)
            }
            (Some(DecodeEvent::Finished(_)), Decode::Opening | Decode::Reserved) => {
                violation("it finished without a token")
            }
            (Some(DecodeEvent::Finished(event)), Decode::Writing) => {
                if event.received_bytes > 0 {
                    self.figures.kv_bytes = event.received_bytes;
                    self.figures.transfer_us = event.transfer_us;
                }
                match event.reason() {
                    FinishReason::Unspecified | FinishReason::ToolCalls => {
                        violation("it finished without a reason")
                    }
                    reason => vec![Next::Finish(reason)],
                }
            }
            (Some(DecodeEvent::Failure(failure)), decode) => {
                let failure = AttemptFailure::reported(Side::Decode, failure);
                let awaits_token_0 = self.prefill == Prefill::Reading && decode != Decode::Writing;
                if failure.cause == Cause::TransferFailed && awaits_token_0 {
                    self.transfer_failed = Some(failure);
                    return vec![];
                }
                vec![Next::Fail(failure)]
            }
            (None, _) => violation("an event has no known content"),
        }
    }

    /// The prefill node said `event`, or nothing that is known.
    pub fn prefill_said(
        &mut self,
        event: Option<PrefillEvent>,
        emitted: &mut EmittedTokens,
    ) -> Vec<Next> {
        match event {
            Some(PrefillEvent::Token(token)) => self.prefill_token(token, emitted),
            Some(PrefillEvent::Delivered(delivered)) => match self.prefill {
                Prefill::Waiting(_) | Prefill::Sending => {
                    // The decode node's own figures replace these when it finishes.
                    self.figures.kv_bytes = delivered.bytes;
                    self.figures.transfer_us = delivered.transfer_us;
                    self.delivered = true;
                    vec![]
                }
                Prefill::Reading => self.prefill_failed(AttemptFailure::violation(
                    Side::Prefill,
                    "it delivered without a token",
                )),
                Prefill::Ended => vec![],
            },
            Some(PrefillEvent::Failure(failure)) => {
                self.prefill_failed(AttemptFailure::reported(Side::Prefill, failure))
            }
            None => self.prefill_failed(AttemptFailure::violation(
                Side::Prefill,
                "an event has no known content",
            )),
        }
    }

    fn prefill_token(&mut self, event: PrefillToken, emitted: &mut EmittedTokens) -> Vec<Next> {
        let finish = event.finish.map(|_| event.finish());
        let violation = |what: String| AttemptFailure::violation(Side::Prefill, what);
        let failure = match (&self.prefill, event.token) {
            (Prefill::Ended, _) => return vec![],
            (Prefill::Reading, Some(token)) if event.first_index == self.first_index => {
                self.saw_cached(event.cached_tokens);
                return match (finish, self.decode) {
                    (Some(FinishReason::Unspecified | FinishReason::ToolCalls), _) => {
                        self.prefill_failed(violation("it finished without a reason".into()))
                    }
                    (Some(reason), _) => {
                        self.prefill = Prefill::Ended;
                        let mut next =
                            self.show(Side::Prefill, self.first_index, vec![token], emitted);
                        if !matches!(next.last(), Some(Next::Fail(_))) {
                            next.push(Next::Finish(reason));
                        }
                        next
                    }
                    // It was the transfer that failed, not the request that ended.
                    (None, Decode::Opening) if self.transfer_failed.is_some() => {
                        self.token_0_is_late()
                    }
                    (None, Decode::Opening) => {
                        self.prefill = Prefill::Waiting(token);
                        vec![]
                    }
                    (None, Decode::Reserved | Decode::Writing) => {
                        self.prefill = Prefill::Sending;
                        let mut next =
                            self.show(Side::Prefill, self.first_index, vec![token], emitted);
                        next.extend(self.token_0_is_late());
                        next
                    }
                };
            }
            (Prefill::Reading, Some(_)) => violation(format!(
                "its token has index {}, not {}",
                event.first_index, self.first_index
            )),
            (Prefill::Reading, None) => violation("its token event has no token".into()),
            (Prefill::Waiting(_) | Prefill::Sending, _) => violation("it sent two tokens".into()),
        };
        self.prefill_failed(failure)
    }

    /// The decode node's stream broke or ended.
    pub fn decode_failed(&mut self, failure: AttemptFailure) -> Vec<Next> {
        vec![Next::Fail(failure)]
    }

    /// The prefill node's stream broke or ended.
    pub fn prefill_failed(&mut self, failure: AttemptFailure) -> Vec<Next> {
        if self.transfer_failed.is_some() {
            return self.token_0_is_late();
        }
        if self.expects_prefill() && self.decode != Decode::Writing {
            // The decode node would find out too, but only when its lease ends.
            return vec![Next::Fail(failure)];
        }
        if self.expects_prefill() {
            self.prefill = Prefill::Ended;
        }
        vec![]
    }

    /// A failed transfer waits no longer for token 0. Nothing follows when none has failed.
    pub fn token_0_is_late(&mut self) -> Vec<Next> {
        self.transfer_failed.take().map(Next::Fail).into_iter().collect()
    }

    /// Whose turn it is to say something.
    pub fn awaits(&self) -> Side {
        match (self.decode, &self.prefill) {
            (Decode::Reserved, Prefill::Reading) => Side::Prefill,
            _ if self.transfer_failed.is_some() => Side::Prefill,
            _ => Side::Decode,
        }
    }

    /// The decode node has a place in its batch and the whole context: no more waiting for others.
    pub fn is_writing(&self) -> bool {
        self.decode == Decode::Writing
    }

    /// Whether the decode node may still say something.
    pub fn expects_decode(&self) -> bool {
        self.transfer_failed.is_none()
    }

    /// Whether the prefill node's stream is still worth reading.
    pub fn expects_prefill(&self) -> bool {
        self.prefill != Prefill::Ended && !self.delivered
    }

    fn show(
        &self,
        side: Side,
        first_index: u32,
        tokens: Vec<Token>,
        emitted: &mut EmittedTokens,
    ) -> Vec<Next> {
        match emitted.accept(first_index, tokens) {
            Ok((_, new)) if new.is_empty() => vec![],
            Ok((first_index, tokens)) => vec![Next::Show { by: side, first_index, tokens }],
            Err(error) => vec![Next::Fail(AttemptFailure::emission(side, &error))],
        }
    }

    fn saw_cached(&mut self, cached_tokens: u32) {
        self.figures.cached_tokens = self.figures.cached_tokens.max(cached_tokens);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proto::v1::{DecodeFinished, DecodeTokens, Delivered, Failure, FailureKind, Reserved};

    use super::*;
    fn token(id: u32) -> Token {
        Token { id, logprobs: None }
    }

    fn reserved(alone: bool) -> Option<DecodeEvent> {
        Some(DecodeEvent::Reserved(Reserved { cached_tokens: 0, alone }))
    }

    fn tokens(first_index: u32, ids: &[u32]) -> Option<DecodeEvent> {
        let tokens = ids.iter().map(|&id| token(id)).collect();
        Some(DecodeEvent::Tokens(DecodeTokens { first_index, tokens }))
    }

    fn finished() -> Option<DecodeEvent> {
        let reason = FinishReason::Length.into();
        Some(DecodeEvent::Finished(DecodeFinished { reason, received_bytes: 9, transfer_us: 3 }))
    }

    fn failed(kind: FailureKind) -> Option<DecodeEvent> {
        Some(DecodeEvent::Failure(Failure { kind: kind.into(), message: "2 of 4 chunks".into() }))
    }

    fn first(first_index: u32, id: u32, finish: Option<FinishReason>) -> Option<PrefillEvent> {
        Some(PrefillEvent::Token(PrefillToken {
            first_index,
            token: Some(token(id)),
            finish: finish.map(Into::into),
            cached_tokens: 16,
        }))
    }

    fn delivered() -> Option<PrefillEvent> {
        Some(PrefillEvent::Delivered(Delivered { bytes: 7, chunks: 1, transfer_us: 2 }))
    }

    fn show(by: Side, first_index: u32, ids: &[u32]) -> Next {
        Next::Show { by, first_index, tokens: ids.iter().map(|&id| token(id)).collect() }
    }

    fn lost(side: Side) -> AttemptFailure {
        AttemptFailure::cut(side)
    }

    fn causes(next: &[Next]) -> Vec<Cause> {
        let cause = |next: &Next| match next {
            Next::Fail(failure) => Some(failure.cause),
            _ => None,
        };
        next.iter().filter_map(cause).collect()
    }

    fn pair() -> (Attempt, EmittedTokens) {
        (Attempt::new(0, true), EmittedTokens::new(16, 1000))
    }

    #[test]
    fn token_0_waits_for_the_reservation_and_is_shown_once() {
        let (mut attempt, mut emitted) = pair();
        assert_eq!(attempt.prefill_said(first(0, 5, None), &mut emitted), []);
        assert_eq!(
            attempt.decode_said(reserved(false), &mut emitted),
            [Next::Admitted, show(Side::Prefill, 0, &[5])]
        );
        assert_eq!(attempt.prefill_said(delivered(), &mut emitted), []);
        assert_eq!(
            attempt.decode_said(tokens(0, &[5, 6]), &mut emitted),
            [show(Side::Decode, 1, &[6])]
        );
        assert_eq!(
            attempt.decode_said(finished(), &mut emitted),
            [Next::Finish(FinishReason::Length)]
        );
        let figures = Figures { cached_tokens: 16, kv_bytes: 9, transfer_us: 3 };
        assert_eq!(attempt.figures(), figures);
    }

    #[test]
    fn the_decode_node_may_be_first_with_token_0() {
        let (mut attempt, mut emitted) = pair();
        attempt.decode_said(reserved(false), &mut emitted);
        assert_eq!(
            attempt.decode_said(tokens(0, &[5]), &mut emitted),
            [show(Side::Decode, 0, &[5])]
        );
        assert_eq!(attempt.prefill_said(first(0, 5, None), &mut emitted), []);
    }

    #[test]
    fn delivered_before_reserved_is_heard_does_not_end_the_attempt() {
        let (mut attempt, mut emitted) = pair();
        attempt.prefill_said(first(0, 5, None), &mut emitted);
        assert_eq!(attempt.prefill_said(delivered(), &mut emitted), []);
        assert!(!attempt.expects_prefill());
        assert_eq!(attempt.prefill_failed(lost(Side::Prefill)), []);
        assert_eq!(
            attempt.decode_said(reserved(false), &mut emitted),
            [Next::Admitted, show(Side::Prefill, 0, &[5])]
        );
    }

    #[test]
    fn a_decode_node_that_works_alone_makes_token_0_itself() {
        let (mut attempt, mut emitted) = pair();
        attempt.prefill_said(first(0, 5, None), &mut emitted);
        assert_eq!(
            attempt.decode_said(reserved(true), &mut emitted),
            [Next::Admitted, Next::DropPrefill]
        );
        assert!(!attempt.expects_prefill());
        assert_eq!(attempt.prefill_failed(lost(Side::Prefill)), []);
        assert_eq!(
            attempt.decode_said(tokens(0, &[6]), &mut emitted),
            [show(Side::Decode, 0, &[6])]
        );
    }

    #[test]
    fn a_token_0_that_ends_the_answer_needs_no_decode_node() {
        let (mut attempt, mut emitted) = pair();
        assert_eq!(
            attempt.prefill_said(first(0, 5, Some(FinishReason::Stop)), &mut emitted),
            [show(Side::Prefill, 0, &[5]), Next::Finish(FinishReason::Stop)]
        );
    }

    #[test]
    fn a_prefill_node_lost_before_the_kv_is_there_ends_the_attempt() {
        let (mut attempt, mut emitted) = pair();
        attempt.decode_said(reserved(false), &mut emitted);
        attempt.prefill_said(first(0, 5, None), &mut emitted);
        assert_eq!(causes(&attempt.prefill_failed(lost(Side::Prefill))), [Cause::Lost]);
    }

    #[test]
    fn a_prefill_node_lost_after_the_kv_is_there_does_not_matter() {
        let (mut attempt, mut emitted) = pair();
        attempt.decode_said(reserved(false), &mut emitted);
        attempt.prefill_said(first(0, 5, None), &mut emitted);
        attempt.decode_said(tokens(0, &[5]), &mut emitted);
        assert_eq!(attempt.prefill_failed(lost(Side::Prefill)), []);
        assert!(!attempt.expects_prefill());
    }

    #[test]
    fn a_later_attempt_starts_where_the_earlier_one_stopped() {
        let mut emitted = EmittedTokens::new(16, 1000);
        emitted.accept(0, vec![token(5), token(6)]).unwrap();
        let mut attempt = Attempt::new(2, false);
        assert_eq!(attempt.decode_said(reserved(true), &mut emitted), [Next::Admitted]);
        assert_eq!(
            attempt.decode_said(tokens(2, &[7]), &mut emitted),
            [show(Side::Decode, 2, &[7])]
        );
    }

    #[test]
    fn what_the_protocol_does_not_allow_is_a_violation() {
        let late_reserved = [reserved(false), reserved(false)];
        let early_token = [tokens(0, &[1])];
        let early_finish = [reserved(false), finished()];
        let wrong_start = [reserved(false), tokens(1, &[1])];
        let gap = [reserved(false), tokens(0, &[1]), tokens(2, &[1])];
        let unknown = [None];
        let cases: [&[Option<DecodeEvent>]; 6] =
            [&late_reserved, &early_token, &early_finish, &wrong_start, &gap, &unknown];
        for events in cases {
            let (mut attempt, mut emitted) = pair();
            let mut last = vec![];
            for event in events {
                last = attempt.decode_said(event.clone(), &mut emitted);
            }
            assert_eq!(causes(&last), [Cause::Violation], "{events:?}");
        }
        for events in [vec![first(1, 5, None)], vec![first(0, 5, None); 2], vec![delivered()]] {
            let (mut attempt, mut emitted) = pair();
            let mut last = vec![];
            for event in events.clone() {
                last = attempt.prefill_said(event, &mut emitted);
            }
            assert_eq!(causes(&last), [Cause::Violation], "{events:?}");
        }
    }

    #[test]
    fn another_token_0_from_the_decode_node_is_a_contradiction() {
        let (mut attempt, mut emitted) = pair();
        attempt.decode_said(reserved(false), &mut emitted);
        attempt.prefill_said(first(0, 5, None), &mut emitted);
        let next = attempt.decode_said(tokens(0, &[6]), &mut emitted);
        assert_eq!(causes(&next), [Cause::Contradiction]);
        assert_eq!(emitted.ids(), [5]);
    }

    #[test]
    fn a_reported_failure_keeps_its_kind() {
        for (kind, cause) in [
            (FailureKind::Busy, Cause::Busy),
            (FailureKind::Mismatch, Cause::Mismatch),
            (FailureKind::Internal, Cause::Internal),
        ] {
            let (mut attempt, mut emitted) = pair();
            let next = attempt.decode_said(failed(kind), &mut emitted);
            assert_eq!(causes(&next), [cause]);
        }
        // With token 0 here it is known that the request goes on.
        let (mut attempt, mut emitted) = pair();
        attempt.prefill_said(first(0, 5, None), &mut emitted);
        let next = attempt.decode_said(failed(FailureKind::TransferFailed), &mut emitted);
        assert_eq!(causes(&next), [Cause::TransferFailed]);
    }

    #[test]
    fn a_failed_transfer_hears_token_0_first() {
        let transfer_failed = || {
            let (mut attempt, mut emitted) = pair();
            attempt.decode_said(reserved(false), &mut emitted);
            let next = attempt.decode_said(failed(FailureKind::TransferFailed), &mut emitted);
            assert_eq!(next, []);
            assert!(!attempt.expects_decode() && attempt.expects_prefill());
            (attempt, emitted)
        };
        let (mut attempt, mut emitted) = transfer_failed();
        assert_eq!(
            attempt.prefill_said(first(0, 5, Some(FinishReason::Stop)), &mut emitted),
            [show(Side::Prefill, 0, &[5]), Next::Finish(FinishReason::Stop)]
        );
        // One that does not end the request is kept, and the transfer has failed.
        let (mut attempt, mut emitted) = transfer_failed();
        let next = attempt.prefill_said(first(0, 5, None), &mut emitted);
        assert_eq!(next[0], show(Side::Prefill, 0, &[5]));
        assert_eq!(causes(&next), [Cause::TransferFailed]);
        // So it has when the prefill node is lost or takes too long.
        let (mut attempt, _) = transfer_failed();
        let next = attempt.prefill_failed(lost(Side::Prefill));
        assert_eq!(causes(&next), [Cause::TransferFailed]);
        let (mut attempt, _) = transfer_failed();
        assert_eq!(causes(&attempt.token_0_is_late()), [Cause::TransferFailed]);
    }

    proptest! {
        /// The two streams may overtake each other in any way: token 0 is shown once, after
        /// Reserved, and the answer is the same.
        #[test]
        fn any_interleaving_shows_the_same_answer(order in Just(
            vec![true, true, true, true, false, false]).prop_shuffle())
        {
            let (mut attempt, mut emitted) = pair();
            let mut decode =
                [reserved(false), tokens(0, &[5]), tokens(1, &[6, 7]), finished()].into_iter();
            let mut prefill = [first(0, 5, None), delivered()].into_iter();
            let (mut shown, mut ended, mut has_reserved) = (vec![], false, false);
            for from_decode in order {
                let next = if from_decode {
                    attempt.decode_said(decode.next().unwrap(), &mut emitted)
                } else {
                    attempt.prefill_said(prefill.next().unwrap(), &mut emitted)
                };
                for next in next {
                    match next {
                        Next::Admitted => has_reserved = true,
                        Next::Show { first_index, tokens, .. } => {
                            prop_assert!(has_reserved && !ended);
                            prop_assert_eq!(first_index as usize, shown.len());
                            shown.extend(tokens.iter().map(|token| token.id));
                        }
                        Next::Finish(_) => ended = true,
                        other => prop_assert!(false, "{:?}", other),
                    }
                }
            }
            prop_assert!(ended);
            prop_assert_eq!(shown, vec![5, 6, 7]);
        }
    }
}
