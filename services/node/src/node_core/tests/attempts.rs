//! Calls and their attempts, action by action.

use std::sync::Arc;

use engine::constraint::COMPILE_TIMEOUT;
use grammar::{Compiler, Grammar, Token};
use kv_transfer::config::LEASE;

use super::*;
use crate::constraint::GrammarVocabulary;

#[test]
fn prefill_sends_token_0_and_ends_with_delivered() {
    let mut scene = Scene::accepted(SequenceKind::Send);
    assert!(matches!(scene.command(), transfer::Command::Send { transfer: TRANSFER, .. }));

    scene.now += Duration::from_millis(3);
    scene.transfer_event(transfer::Event::Ready {
        transfer: TRANSFER,
        first_block: 2,
        block_count: 3,
        traceparent: String::new(),
    });
    let ready = Input::TransferReady { id: ID, first_block: 2, block_count: 3 };
    assert_eq!(scene.input(), ready);

    scene.act(Action::KvWritten { id: ID, first_block: 2, blocks: vec![BlockId(7)] });
    assert!(matches!(scene.command(), transfer::Command::Written { first_block: 2, .. }));

    scene.now += Duration::from_millis(5);
    scene.act(tokens(0, &[42]));
    assert!(scene.replies().is_empty(), "token 0 may be the last token");
    scene.act(Action::Finished { id: ID, reason: None });
    let times = v1::StageTimes { queue_us: Some(3000), reserve_us: None, prefill_us: Some(5000) };
    assert_eq!(scene.replies(), [first_reply(&[42], None, times)]);
    assert!(matches!(scene.command(), transfer::Command::Finish { first_index: 0, .. }));

    scene.transfer_event(transfer::Event::Delivered { transfer: TRANSFER, stats: STATS });
    assert_eq!(scene.input(), Input::TransferEnded { id: ID });
    assert_eq!(scene.replies(), [Reply::Ended(AttemptEnd::Delivered(STATS))]);
    scene.assert_quiet();
    scene.assert_forgotten();
}

#[test]
fn reservation_for_a_grammar_waits_until_its_sender_has_compiled_the_grammar() {
    let texts: [&[u8]; 2] = [b"a", b"b"];
    let compiler = Compiler::new(texts.map(Token::Text));
    let vocabulary = GrammarVocabulary::new(compiler, Vec::new(), 2);
    let grammar = Grammar::Regex("ab".into());
    for (grammar, expected) in [(None, LEASE), (Some(grammar), LEASE + COMPILE_TIMEOUT)] {
        let mut scene = Scene::new();
        let mut arrival = call(ID.0, 1, SequenceKind::Receive, scene.now);
        if let Some(grammar) = &grammar {
            vocabulary.constrain(&mut arrival.sequence, grammar, Arc::new(|_, _| {})).unwrap();
        }
        scene.attempts.call(arrival, scene.now);
        scene.act(Action::Reserve {
            id: ID,
            cached_tokens: 0,
            first_block: 0,
            blocks: vec![BlockId(3)],
        });
        let transfer::Command::Receive { answer_timeout, .. } = scene.command() else {
            panic!("no reservation");
        };
        assert_eq!(answer_timeout, expected);
    }
}

#[test]
fn decode_reserves_receives_and_ends_with_finished() {
    let mut scene = Scene::accepted(SequenceKind::Receive);
    scene.now += Duration::from_millis(2);
    scene.act(Action::Reserve {
        id: ID,
        cached_tokens: 16,
        first_block: 1,
        blocks: vec![BlockId(3)],
    });
    scene.act(Action::Admitted { id: ID, cached_tokens: 16, local_prefill: false });
    assert!(matches!(
        scene.command(),
        transfer::Command::Receive { transfer: TRANSFER, first_block: 1, .. }
    ));
    let reserved = AttemptEvent::Reserved { cached_tokens: 16, local_prefill: false };
    assert_eq!(scene.replies(), [Reply::Event(reserved)]);

    scene.transfer_event(transfer::Event::Arrived {
        transfer: TRANSFER,
        first_index: 0,
        token: token(42),
        stats: STATS,
    });
    let arrived = Input::KvArrived { id: ID, first_index: 0, token: token(42) };
    assert_eq!(scene.input(), arrived);
    scene.act(tokens(0, &[42]));
    scene.act(tokens(1, &[43, 44]));
    scene.act(Action::Finished { id: ID, reason: Some(FinishReason::Length) });
    let end = AttemptEnd::Finished { reason: FinishReason::Length, received: STATS };
    let times = v1::StageTimes { queue_us: None, reserve_us: Some(2000), prefill_us: None };
    let first = first_reply(&[42], None, times);
    let expected = [first, tokens_reply(1, &[43, 44], None), Reply::Ended(end)];
    assert_eq!(scene.replies(), expected);
    scene.assert_quiet();
    scene.assert_forgotten();
}

#[test]
fn load_from_a_tier_is_a_stage_of_its_attempt() {
    let mut scene = Scene::accepted(SequenceKind::Compute);
    let stages = |scene: &mut Scene| -> Vec<StageChange> {
        let change = |output| match output {
            NodeOutput::Stage { call: CALL, change } => Some(change),
            _ => None,
        };
        scene.attempts.outputs.drain(..).filter_map(change).collect()
    };
    stages(&mut scene);
    let load = |job| Action::Load(LoadJob { job: JobId(job), id: ID, blocks: Vec::new() });
    // The sequence leaves the first load at a change of weights.
    for (job, tokens) in [(4, 0), (5, 32)] {
        scene.act(load(job));
        assert_eq!(stages(&mut scene), [StageChange::Began(AttemptStage::Load)]);
        scene.act(Action::Loaded { id: ID, tokens });
        let loaded_tokens = Some(tokens);
        let attributes = StageAttributes { loaded_tokens, ..StageAttributes::default() };
        let stage = AttemptStage::Load;
        assert_eq!(stages(&mut scene), [StageChange::Ended { stage, attributes }]);
    }
}

#[test]
fn token_0_that_ends_the_request_aborts_the_transfer() {
    let mut scene = Scene::accepted(SequenceKind::Send);
    scene.command();
    scene.act(tokens(0, &[2]));
    scene.act(Action::AbortTransfer { id: ID, reason: "not needed".into() });
    scene.act(Action::Finished { id: ID, reason: Some(FinishReason::Stop) });
    assert!(matches!(scene.command(), transfer::Command::Abort { .. }));
    let finish = Some(FinishReason::Stop);
    let first = first_reply(&[2], finish, v1::StageTimes::default());
    let expected = [first, Reply::Ended(AttemptEnd::Complete)];
    assert_eq!(scene.replies(), expected);

    let failure = TransferFailure::Aborted { reason: "not needed".into() };
    scene.transfer_event(transfer::Event::SendFailed { transfer: TRANSFER, failure });
    assert_eq!(scene.input(), Input::TransferEnded { id: ID });
    scene.assert_quiet();
    scene.assert_forgotten();
}

#[test]
fn cancelled_decode_keeps_its_record_until_its_transfer_ends() {
    let failure = TransferFailure::Aborted { reason: "cancelled".into() };
    let failed = transfer::Event::ReceiveFailed { transfer: TRANSFER, failure };
    // The KV may arrive before the transfers take the abort.
    let (first_index, token, stats) = (0, token(1), STATS);
    let arrived = transfer::Event::Arrived { transfer: TRANSFER, first_index, token, stats };
    for event in [failed, arrived] {
        let mut scene = Scene::reserved();
        scene.attempts.cancel(CALL);
        assert_eq!(scene.input(), Input::Abort { id: ID });
        scene.act(Action::AbortTransfer { id: ID, reason: "cancelled".into() });
        assert!(matches!(scene.command(), transfer::Command::Abort { .. }));
        assert!(!scene.attempts.is_empty());

        scene.transfer_event(event);
        assert!(matches!(scene.input(), Input::TransferEnded { .. } | Input::KvArrived { .. }));
        assert!(scene.replies().is_empty());
        scene.assert_quiet();
        scene.assert_forgotten();
    }
}

#[test]
fn second_call_with_a_known_id_is_rejected_and_its_cancel_changes_nothing() {
    let mut scene = Scene::accepted(SequenceKind::Compute);
    scene.call(2, SequenceKind::Compute);
    let rejected = Reply::Rejected(Refusal::Duplicate { id: ID.0 });
    assert_eq!(scene.replies(), std::slice::from_ref(&rejected));
    scene.attempts.cancel(CallId { number: 2, ..CALL });
    scene.assert_quiet();
    assert!(!scene.attempts.is_empty());
    scene.attempts.cancel(CALL);
    assert_eq!(scene.input(), Input::Abort { id: ID });
    scene.assert_forgotten();

    // The id stays known after its attempt.
    scene.call(3, SequenceKind::Compute);
    assert_eq!(scene.replies(), [rejected]);
}

#[test]
fn sequence_that_fails_on_arrival_is_rejected() {
    let busy = SequenceFailure::Busy { reason: "full".into() };
    let invalid = SequenceFailure::Invalid { reason: "too long".into() };
    for (failure, refusal) in [
        (busy, Refusal::Busy { reason: "full".into() }),
        (invalid, Refusal::Invalid { reason: "too long".into() }),
    ] {
        let mut scene = Scene::new();
        scene.call(1, SequenceKind::Send);
        scene.input();
        scene.act(Action::Failed { id: ID, failure });
        scene.attempts.scheduled(ID, scene.now);
        assert_eq!(scene.replies(), [Reply::Rejected(refusal)]);
        scene.assert_quiet();
        scene.assert_forgotten();
    }
}

#[test]
fn sequence_that_fails_later_ends_its_stream_with_the_failure() {
    let mut scene = Scene::accepted(SequenceKind::Receive);
    scene.act(Action::Failed { id: ID, failure: SequenceFailure::Deadline });
    assert_eq!(scene.failure().0, FailureKind::Deadline);
    scene.assert_forgotten();
}

#[test]
fn failed_transfer_fails_its_attempt_with_the_reason() {
    let lost = TransferFailure::PeerLost { peer: "p".into(), reason: "it is silent".into() };
    let refused =
        TransferFailure::Refused { peer: "p".into(), reason: "model aa against bb".into() };
    for (failure, kind, text) in [
        (lost, FailureKind::TransferFailed, "it is silent"),
        (refused, FailureKind::Mismatch, "model aa against bb"),
    ] {
        let mut scene = Scene::reserved();
        scene.transfer_event(transfer::Event::ReceiveFailed { transfer: TRANSFER, failure });
        let (found, message) = scene.failure();
        assert!(found == kind && message.contains(text), "{found:?} {message}");
        assert_eq!(scene.input(), Input::TransferEnded { id: ID });
        // The scheduler's own failure comes later and is ignored.
        scene.act(Action::Failed { id: ID, failure: SequenceFailure::TransferFailed });
        scene.assert_quiet();
        scene.assert_forgotten();
    }
}

/// The scheduler answers only the first abort with `AbortTransfer`, so the end of a rejected
/// transfer is reported whether or not the scheduler aborted the transfer before.
#[test]
fn full_transfer_queue_aborts_the_sequence_and_ends_its_transfer() {
    for is_aborted_before in [false, true] {
        let mut scene = Scene::accepted(SequenceKind::Receive);
        scene.act(Action::Reserve {
            id: ID,
            cached_tokens: 0,
            first_block: 0,
            blocks: vec![BlockId(3)],
        });
        let (call, command) = scene.attempts.next_command().unwrap();
        let abort = || Action::AbortTransfer { id: ID, reason: "cancelled".into() };
        if is_aborted_before {
            scene.act(abort());
        }
        let reason = "the transfer queue is full".to_owned();
        assert!(!scene.attempts.transfer_queue_full(call, command, reason.clone()));
        assert_eq!(scene.failure(), (FailureKind::Busy, reason));
        assert_eq!(scene.input(), Input::Abort { id: ID });
        assert_eq!(scene.input(), Input::TransferEnded { id: ID });
        if !is_aborted_before {
            scene.act(abort());
            assert_eq!(scene.input(), Input::TransferEnded { id: ID });
            scene.assert_quiet();
        }
        scene.assert_forgotten();
    }
}

#[test]
fn slow_reader_is_ended_alone() {
    let mut scene = Scene::accepted(SequenceKind::Compute);
    scene.act(tokens(0, &[1]));
    scene.attempts.slow_reader(CallId { number: 2, ..CALL });
    scene.assert_quiet();
    scene.attempts.slow_reader(CALL);
    assert_eq!(scene.input(), Input::Abort { id: ID });
    assert_eq!(scene.failure().0, FailureKind::SlowReader);
    scene.assert_quiet();
    scene.assert_forgotten();
}

#[test]
fn close_ends_every_attempt_and_rejects_new_calls() {
    let mut scene = Scene::accepted(SequenceKind::Send);
    scene.command();
    scene.attempts.close(&CloseReason::Stopped);
    assert_eq!(scene.input(), Input::Abort { id: ID });
    assert_eq!(scene.failure(), (FailureKind::Draining, "the node shuts down".into()));
    assert!(!scene.attempts.is_empty(), "its transfer is still active");
    scene.call(2, SequenceKind::Send);
    assert_eq!(scene.replies(), [Reply::Rejected(Refusal::Draining)]);
}

#[test]
fn draining_node_accepts_the_prefill_of_a_sequence_that_it_decodes() {
    let mut scene = Scene::accepted(SequenceKind::Compute);
    scene.attempts.set_draining(true);
    let second = |request_id, kind, now| Call { request_id, ..call(ID.0 + 1, 2, kind, now) };
    for (request_id, kind) in [(ID.0, SequenceKind::Compute), (ID.0 + 1, SequenceKind::Send)] {
        scene.attempts.call(second(request_id, kind, scene.now), scene.now);
        assert_eq!(scene.replies(), [Reply::Rejected(Refusal::Draining)]);
    }
    scene.attempts.call(second(ID.0, SequenceKind::Send, scene.now), scene.now);
    scene.attempts.scheduled(SequenceId(ID.0 + 1), scene.now);
    assert_eq!(scene.replies(), [Reply::Accepted]);
    // The node no longer decodes the sequence.
    scene.attempts.cancel(CALL);
    let third = Call { request_id: ID.0, ..call(ID.0 + 2, 3, SequenceKind::Send, scene.now) };
    scene.attempts.call(third, scene.now);
    assert_eq!(scene.replies(), [Reply::Rejected(Refusal::Draining)]);
}

/// The caller of a rejected call waits for a status, not for a stream.
#[test]
fn close_rejects_a_call_that_is_not_accepted_yet() {
    let mut scene = Scene::new();
    scene.call(1, SequenceKind::Compute);
    scene.attempts.close(&CloseReason::DrainTimeout);
    assert_eq!(scene.replies(), [Reply::Rejected(Refusal::Draining)]);
    scene.assert_forgotten();
}

#[test]
fn prefill_without_token_0_fails_as_an_internal_error() {
    let mut scene = Scene::accepted(SequenceKind::Send);
    scene.command();
    scene.act(Action::Finished { id: ID, reason: None });
    assert_eq!(scene.failure().0, FailureKind::Internal);
    assert_eq!(scene.input(), Input::Abort { id: ID });
}
