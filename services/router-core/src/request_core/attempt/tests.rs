use proptest::prelude::*;
use proto::v1::{
    DecodeFinished, DecodeTokens, Delivered, Failure, FailureKind, PromptLogprobs, Reserved,
};

use super::*;

fn token(id: u32) -> Token {
    Token { id, ..Default::default() }
}

fn reserved(local_prefill: bool) -> Option<DecodeEvent> {
    Some(DecodeEvent::Reserved(Reserved { cached_tokens: 0, local_prefill }))
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

/// The action that follows [`delivered`].
const DELIVERED: AttemptAction = AttemptAction::Delivered { elapsed: Duration::from_micros(2) };

fn emit(by: AttemptSide, first_index: u32, ids: &[u32]) -> AttemptAction {
    AttemptAction::Emit { by, first_index, tokens: ids.iter().map(|&id| token(id)).collect() }
}

#[test]
fn tokens_of_the_decode_node_wait_for_the_logprobs_of_the_prompt() {
    let scored = || {
        let mut event = first(0, 5, None);
        if let Some(PrefillEvent::Token(PrefillToken { token: Some(token), .. })) = &mut event {
            token.prompt = Some(PromptLogprobs::default());
        }
        event
    };
    let begin = || {
        let mut emitted = EmittedTokens::new(16, 1000);
        let mut attempt = AttemptState::new(0, true).awaiting_prompt(true);
        attempt.on_decode_event(reserved(false), &mut emitted);
        // Only the prefill node knows the log-probabilities.
        for event in [tokens(0, &[5]), tokens(1, &[6]), finished()] {
            assert_eq!(attempt.on_decode_event(event, &mut emitted), vec![]);
        }
        assert_eq!(attempt.awaits(), AttemptSide::Prefill);
        (attempt, emitted)
    };
    let (mut attempt, mut emitted) = begin();
    let next = attempt.on_prefill_event(scored(), &mut emitted);
    let [AttemptAction::Emit { by: AttemptSide::Prefill, tokens, .. }, rest @ ..] = &next[..]
    else {
        panic!("{next:?}");
    };
    assert!(tokens[0].prompt.is_some());
    let end = AttemptAction::Finish(FinishReason::Length);
    assert_eq!(rest, [emit(AttemptSide::Decode, 1, &[6]), end]);

    let (mut attempt, _) = begin();
    let next = attempt.on_prefill_end(lost(AttemptSide::Prefill));
    assert!(matches!(next[..], [AttemptAction::Fail(_)]), "{next:?}");
    let (mut attempt, mut emitted) = begin();
    // A node that does not know the field breaks the protocol.
    let next = attempt.on_prefill_event(first(0, 5, None), &mut emitted);
    assert!(matches!(next[..], [AttemptAction::Fail(_)]), "{next:?}");
    assert_eq!(emitted.next_index(), 0, "the next attempt emits token 0");
}

fn lost(side: AttemptSide) -> AttemptFailure {
    AttemptFailure::stream_end(side, None)
}

fn causes(next: &[AttemptAction]) -> Vec<FailureCause> {
    let cause = |next: &AttemptAction| match next {
        AttemptAction::Fail(failure) => Some(failure.cause),
        _ => None,
    };
    next.iter().filter_map(cause).collect()
}

fn pair() -> (AttemptState, EmittedTokens) {
    (AttemptState::new(0, true), EmittedTokens::new(16, 1000))
}

#[test]
fn weight_update_ends_a_continued_answer_and_no_new_one() {
    let aborted = || {
        let reason = FinishReason::Abort.into();
        Some(DecodeEvent::Finished(DecodeFinished { reason, ..Default::default() }))
    };
    let on_aborted = |first_index: u32| {
        let mut emitted = EmittedTokens::new(16, 1000);
        AttemptState::new(first_index, false).on_decode_event(aborted(), &mut emitted)
    };
    assert_eq!(on_aborted(50), [AttemptAction::Finish(FinishReason::Abort)]);
    assert_eq!(causes(&on_aborted(0)), [FailureCause::Violation]);
}

#[test]
fn token_0_waits_for_the_reservation_and_is_emitted_once() {
    let (mut attempt, mut emitted) = pair();
    assert_eq!(attempt.on_prefill_event(first(0, 5, None), &mut emitted), []);
    assert_eq!(
        attempt.on_decode_event(reserved(false), &mut emitted),
        [AttemptAction::Admitted, emit(AttemptSide::Prefill, 0, &[5])]
    );
    assert_eq!(attempt.on_prefill_event(delivered(), &mut emitted), [DELIVERED]);
    assert_eq!(
        attempt.on_decode_event(tokens(0, &[5, 6]), &mut emitted),
        [emit(AttemptSide::Decode, 1, &[6])]
    );
    assert_eq!(
        attempt.on_decode_event(finished(), &mut emitted),
        [AttemptAction::Finish(FinishReason::Length)]
    );
    let cached = |cached_tokens| NodeStats { cached_tokens: Some(cached_tokens), stages: None };
    let stats = AttemptStats {
        cached_tokens: 16,
        kv_bytes: 9,
        transfer_us: 3,
        local_prefill: false,
        prefill: cached(16),
        decode: cached(0),
        ..AttemptStats::default()
    };
    assert_eq!(attempt.stats(), stats);
}

#[test]
fn token_0_of_the_decode_node_may_arrive_first() {
    let (mut attempt, mut emitted) = pair();
    attempt.on_decode_event(reserved(false), &mut emitted);
    assert_eq!(
        attempt.on_decode_event(tokens(0, &[5]), &mut emitted),
        [emit(AttemptSide::Decode, 0, &[5])]
    );
    assert_eq!(attempt.on_prefill_event(first(0, 5, None), &mut emitted), []);
}

#[test]
fn delivered_before_reserved_does_not_end_the_attempt() {
    let (mut attempt, mut emitted) = pair();
    attempt.on_prefill_event(first(0, 5, None), &mut emitted);
    assert_eq!(attempt.on_prefill_event(delivered(), &mut emitted), [DELIVERED]);
    assert!(!attempt.expects_prefill());
    assert_eq!(attempt.on_prefill_end(lost(AttemptSide::Prefill)), []);
    assert_eq!(
        attempt.on_decode_event(reserved(false), &mut emitted),
        [AttemptAction::Admitted, emit(AttemptSide::Prefill, 0, &[5])]
    );
}

#[test]
fn a_decode_node_alone_samples_token_0() {
    let (mut attempt, mut emitted) = pair();
    attempt.on_prefill_event(first(0, 5, None), &mut emitted);
    assert_eq!(
        attempt.on_decode_event(reserved(true), &mut emitted),
        [AttemptAction::Admitted, AttemptAction::DropPrefill]
    );
    assert!(!attempt.expects_prefill());
    assert_eq!(attempt.on_prefill_end(lost(AttemptSide::Prefill)), []);
    assert_eq!(
        attempt.on_decode_event(tokens(0, &[6]), &mut emitted),
        [emit(AttemptSide::Decode, 0, &[6])]
    );
}

#[test]
fn a_token_0_that_ends_the_answer_needs_no_decode_node() {
    let (mut attempt, mut emitted) = pair();
    assert_eq!(
        attempt.on_prefill_event(first(0, 5, Some(FinishReason::Stop)), &mut emitted),
        [emit(AttemptSide::Prefill, 0, &[5]), AttemptAction::Finish(FinishReason::Stop)]
    );
}

#[test]
fn a_prefill_node_lost_before_the_kv_is_there_ends_the_attempt() {
    let (mut attempt, mut emitted) = pair();
    attempt.on_decode_event(reserved(false), &mut emitted);
    attempt.on_prefill_event(first(0, 5, None), &mut emitted);
    assert_eq!(causes(&attempt.on_prefill_end(lost(AttemptSide::Prefill))), [FailureCause::Lost]);
}

#[test]
fn a_prefill_node_lost_after_the_kv_is_there_does_not_matter() {
    let (mut attempt, mut emitted) = pair();
    attempt.on_decode_event(reserved(false), &mut emitted);
    attempt.on_prefill_event(first(0, 5, None), &mut emitted);
    attempt.on_decode_event(tokens(0, &[5]), &mut emitted);
    assert_eq!(attempt.on_prefill_end(lost(AttemptSide::Prefill)), []);
    assert!(!attempt.expects_prefill());
}

#[test]
fn a_later_attempt_starts_where_the_earlier_one_stopped() {
    let mut emitted = EmittedTokens::new(16, 1000);
    emitted.accept(0, vec![token(5), token(6)]).unwrap();
    let mut attempt = AttemptState::new(2, false);
    assert_eq!(attempt.on_decode_event(reserved(true), &mut emitted), [AttemptAction::Admitted]);
    assert_eq!(
        attempt.on_decode_event(tokens(2, &[7]), &mut emitted),
        [emit(AttemptSide::Decode, 2, &[7])]
    );
}

#[test]
fn events_in_an_invalid_order_are_a_violation() {
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
            last = attempt.on_decode_event(event.clone(), &mut emitted);
        }
        assert_eq!(causes(&last), [FailureCause::Violation], "{events:?}");
    }
    for events in [vec![first(1, 5, None)], vec![first(0, 5, None); 2], vec![delivered()]] {
        let (mut attempt, mut emitted) = pair();
        let mut last = vec![];
        for event in events.clone() {
            last = attempt.on_prefill_event(event, &mut emitted);
        }
        assert_eq!(causes(&last), [FailureCause::Violation], "{events:?}");
    }
}

#[test]
fn another_token_0_from_the_decode_node_is_a_contradiction() {
    let (mut attempt, mut emitted) = pair();
    attempt.on_decode_event(reserved(false), &mut emitted);
    attempt.on_prefill_event(first(0, 5, None), &mut emitted);
    let next = attempt.on_decode_event(tokens(0, &[6]), &mut emitted);
    assert_eq!(causes(&next), [FailureCause::Contradiction]);
    assert_eq!(emitted.ids(), [5]);
}

#[test]
fn a_reported_failure_keeps_its_kind() {
    for (kind, cause) in [
        (FailureKind::Busy, FailureCause::Busy),
        (FailureKind::Mismatch, FailureCause::Mismatch),
        (FailureKind::Internal, FailureCause::Internal),
    ] {
        let (mut attempt, mut emitted) = pair();
        let next = attempt.on_decode_event(failed(kind), &mut emitted);
        assert_eq!(causes(&next), [cause]);
    }
    // After token 0 the request is known to continue.
    let (mut attempt, mut emitted) = pair();
    attempt.on_prefill_event(first(0, 5, None), &mut emitted);
    let next = attempt.on_decode_event(failed(FailureKind::TransferFailed), &mut emitted);
    assert_eq!(causes(&next), [FailureCause::TransferFailed]);
}

#[test]
fn a_failed_transfer_waits_for_token_0() {
    let transfer_failed = || {
        let (mut attempt, mut emitted) = pair();
        attempt.on_decode_event(reserved(false), &mut emitted);
        let next = attempt.on_decode_event(failed(FailureKind::TransferFailed), &mut emitted);
        assert_eq!(next, []);
        assert!(!attempt.expects_decode() && attempt.expects_prefill());
        (attempt, emitted)
    };
    let (mut attempt, mut emitted) = transfer_failed();
    assert_eq!(
        attempt.on_prefill_event(first(0, 5, Some(FinishReason::Stop)), &mut emitted),
        [emit(AttemptSide::Prefill, 0, &[5]), AttemptAction::Finish(FinishReason::Stop)]
    );
    // A token 0 that does not end the request is emitted, then the transfer has failed.
    let (mut attempt, mut emitted) = transfer_failed();
    let next = attempt.on_prefill_event(first(0, 5, None), &mut emitted);
    assert_eq!(next[0], emit(AttemptSide::Prefill, 0, &[5]));
    assert_eq!(causes(&next), [FailureCause::TransferFailed]);
    // The transfer has also failed when the prefill node is lost or late.
    let (mut attempt, _) = transfer_failed();
    let next = attempt.on_prefill_end(lost(AttemptSide::Prefill));
    assert_eq!(causes(&next), [FailureCause::TransferFailed]);
    let (mut attempt, _) = transfer_failed();
    assert_eq!(causes(&attempt.on_token_0_late()), [FailureCause::TransferFailed]);
}

proptest! {
    /// For every order of the two streams token 0 is emitted once, after Reserved, and the
    /// answer is the same.
    #[test]
    fn any_interleaving_emits_the_same_answer(order in Just(
        vec![true, true, true, true, false, false]).prop_shuffle())
    {
        let (mut attempt, mut emitted) = pair();
        let mut decode =
            [reserved(false), tokens(0, &[5]), tokens(1, &[6, 7]), finished()].into_iter();
        let mut prefill = [first(0, 5, None), delivered()].into_iter();
        let (mut emitted_ids, mut ended, mut has_reserved) = (vec![], false, false);
        for from_decode in order {
            let next = if from_decode {
                attempt.on_decode_event(decode.next().unwrap(), &mut emitted)
            } else {
                attempt.on_prefill_event(prefill.next().unwrap(), &mut emitted)
            };
            for next in next {
                match next {
                    AttemptAction::Admitted => has_reserved = true,
                    AttemptAction::Emit { first_index, tokens, .. } => {
                        prop_assert!(has_reserved && !ended);
                        prop_assert_eq!(first_index as usize, emitted_ids.len());
                        emitted_ids.extend(tokens.iter().map(|token| token.id));
                    }
                    AttemptAction::Finish(_) => ended = true,
                    AttemptAction::Delivered { .. } => {}
                    other => prop_assert!(false, "{:?}", other),
                }
            }
        }
        prop_assert!(ended);
        prop_assert_eq!(emitted_ids, vec![5, 6, 7]);
    }
}
