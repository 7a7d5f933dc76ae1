use std::{sync::Arc, time::Duration};

use engine::{event::NewSequence, executor::CollectWaker};
use futures_util::{FutureExt, StreamExt};
use kernels::{BlockId, sampling::Sampling};
use tokio::sync::Semaphore;

use super::*;
use crate::{
    attempt::Attempt,
    inbox::{Command, CommandReceiver, CommandSender},
    stream::{AttemptStream, Heard, attempt_stream},
    testing,
};

const ID: SequenceId = SequenceId(0xabc);
const TRANSFER: TransferId = TransferId(0xabc);
const FIGURES: TransferStats =
    TransferStats { bytes: 4096, chunks: 1, elapsed: Duration::from_micros(750) };

/// A journey, and the other ends of its callers.
struct Scene {
    journey: Journey,
    cancels: CommandSender,
    cancelled: CommandReceiver,
    places: Arc<Semaphore>,
    now: Instant,
}

/// One caller's end.
struct Caller {
    stream: AttemptStream,
    verdict: oneshot::Receiver<Result<(), Refusal>>,
}

impl Scene {
    fn new() -> Self {
        let (cancels, cancelled) = CommandSender::new(16, CollectWaker::default());
        Self {
            journey: Journey::new(testing::metrics()),
            cancels,
            cancelled,
            places: Arc::new(Semaphore::new(4)),
            now: Instant::now(),
        }
    }

    fn begin(&mut self, kind: SequenceKind) -> Caller {
        let sequence = NewSequence {
            id: ID,
            kind,
            tokens: vec![1, 2, 3],
            prompt_len: 3,
            sampling: Sampling::greedy(),
            max_tokens: 4,
            ignore_stop_tokens: false,
            cache_salt: String::new(),
            constraint: None,
            deadline: self.now + Duration::from_secs(10),
        };
        let peer = PeerAddress {
            node_id: "peer".into(),
            epoch: transfer::Epoch(9),
            control_endpoint: "tcp://127.0.0.1:9".into(),
        };
        let attempt = Attempt {
            request_id: 1,
            sequence,
            grammar: None,
            peer: (kind != SequenceKind::Compute).then_some(peer),
            traceparent: String::new(),
        };
        let place = Arc::new(self.places.clone().try_acquire_owned().unwrap());
        let (events, stream) = attempt_stream(ID, self.cancels.clone(), place.clone());
        let (verdict, answer) = oneshot::channel();
        self.journey.begin(Arrival { attempt, events, verdict, place }, self.now);
        Caller { stream, verdict: answer }
    }

    /// The scheduler took the arrival.
    fn taken(&mut self, kind: SequenceKind) -> Caller {
        let mut caller = self.begin(kind);
        assert!(matches!(self.input(), Input::Arrived(sequence) if sequence.id == ID));
        self.journey.taken(ID, self.now);
        assert_eq!(caller.verdict.try_recv().unwrap(), Ok(()));
        caller
    }

    fn act(&mut self, action: Action) {
        self.journey.on_action(action, self.now);
    }

    fn hear(&mut self, event: transfer::Event) {
        self.journey.on_transfer_event(event, self.now);
    }

    fn input(&mut self) -> Input {
        self.journey.next_input().expect("an input for the scheduler")
    }

    fn command(&mut self) -> transfer::Command {
        self.journey.next_command().expect("a command for the transfers")
    }

    /// Nothing is left to hand on.
    fn assert_quiet(&mut self) {
        assert_eq!(self.journey.next_input(), None);
        assert!(self.journey.next_command().is_none());
    }

    /// The engine's record is gone; `streams` callers still hold a place.
    fn assert_forgotten(&mut self, streams: usize) {
        assert!(self.journey.in_work.is_empty());
        assert_eq!(self.places.available_permits(), 4 - streams);
    }

    fn cancel(&mut self) {
        let Ok(Command::Cancel { id, place }) = self.cancelled.try_recv() else {
            panic!("the stream was not cancelled");
        };
        self.journey.cancel(id, &place);
    }
}

impl Caller {
    /// What is there to hear now.
    fn heard(&mut self) -> Vec<Heard> {
        std::iter::from_fn(|| self.stream.next().now_or_never().flatten()).collect()
    }

    fn failure(&mut self) -> (FailureKind, String) {
        match self.heard().pop() {
            Some(Heard::End(AttemptEnd::Failed { kind, message })) => (kind, message),
            other => panic!("no failure: {other:?}"),
        }
    }
}

fn token(id: u32) -> SampledToken {
    SampledToken { id, logprobs: None }
}

fn tokens(first_index: u32, ids: &[u32]) -> Action {
    let tokens = ids.iter().map(|&id| token(id)).collect();
    Action::Tokens { id: ID, first_index, tokens, cached_tokens: 0 }
}

fn told(first_index: u32, ids: &[u32], finish: Option<FinishReason>) -> Heard {
    let tokens = ids.iter().map(|&id| token(id)).collect();
    Heard::Event(AttemptEvent::Tokens { first_index, tokens, cached_tokens: 0, finish })
}

#[test]
fn a_prefill_goes_from_expectation_to_delivery() {
    let mut scene = Scene::new();
    let mut caller = scene.taken(SequenceKind::Send);
    assert!(matches!(scene.command(), transfer::Command::Expect { transfer: TRANSFER, .. }));

    scene.hear(transfer::Event::Ready {
        transfer: TRANSFER,
        first_block: 2,
        block_count: 3,
        traceparent: String::new(),
    });
    assert_eq!(scene.input(), Input::TransferReady { id: ID, first_block: 2 });

    scene.act(Action::KvWritten { id: ID, first_block: 2, blocks: vec![BlockId(7)] });
    assert!(matches!(scene.command(), transfer::Command::Written { first_block: 2, .. }));

    scene.act(tokens(0, &[42]));
    assert!(caller.heard().is_empty(), "whether it is the last is not known yet");
    scene.act(Action::Finished { id: ID, reason: None });
    assert_eq!(caller.heard(), [told(0, &[42], None)]);
    assert!(matches!(scene.command(), transfer::Command::Finish { first_index: 0, .. }));

    scene.hear(transfer::Event::Delivered { transfer: TRANSFER, stats: FIGURES });
    assert_eq!(scene.input(), Input::TransferEnded { id: ID, delivered: true });
    assert_eq!(caller.heard(), [Heard::End(AttemptEnd::Delivered(FIGURES))]);
    scene.assert_quiet();
    scene.assert_forgotten(1);
}

#[test]
fn a_decode_goes_from_reservation_to_its_last_token() {
    let mut scene = Scene::new();
    let mut caller = scene.taken(SequenceKind::Receive);
    scene.act(Action::Reserve { id: ID, first_block: 1, blocks: vec![BlockId(3)] });
    scene.act(Action::Admitted { id: ID, cached_tokens: 16, alone: false });
    assert!(matches!(
        scene.command(),
        transfer::Command::Receive { transfer: TRANSFER, first_block: 1, .. }
    ));
    let reserved = AttemptEvent::Reserved { cached_tokens: 16, alone: false };
    assert_eq!(caller.heard(), [Heard::Event(reserved)]);

    scene.hear(transfer::Event::Arrived {
        transfer: TRANSFER,
        first_index: 0,
        token: token(42),
        stats: FIGURES,
    });
    let arrived = Input::KvArrived { id: ID, first_index: 0, token: token(42) };
    assert_eq!(scene.input(), arrived);
    scene.act(tokens(0, &[42]));
    scene.act(tokens(1, &[43, 44]));
    scene.act(Action::Finished { id: ID, reason: Some(FinishReason::Length) });
    let end = AttemptEnd::Finished { reason: FinishReason::Length, received: FIGURES };
    assert_eq!(caller.heard(), [told(0, &[42], None), told(1, &[43, 44], None), Heard::End(end)]);
    scene.assert_quiet();
    scene.assert_forgotten(1);
}

#[test]
fn a_token_0_that_ends_the_request_ends_the_transfer() {
    let mut scene = Scene::new();
    let mut caller = scene.taken(SequenceKind::Send);
    scene.command();
    scene.act(tokens(0, &[2]));
    scene.act(Action::AbortTransfer { id: ID, reason: "not needed".into() });
    scene.act(Action::Finished { id: ID, reason: Some(FinishReason::Stop) });
    assert!(matches!(scene.command(), transfer::Command::Abort { .. }));
    let heard = [told(0, &[2], Some(FinishReason::Stop)), Heard::End(AttemptEnd::Complete)];
    assert_eq!(caller.heard(), heard);

    let failure = TransferFailure::Aborted { reason: "not needed".into() };
    scene.hear(transfer::Event::SendFailed { transfer: TRANSFER, failure });
    assert_eq!(scene.input(), Input::TransferEnded { id: ID, delivered: false });
    scene.assert_quiet();
    scene.assert_forgotten(1);
}

#[test]
fn a_cancelled_decode_keeps_its_place_until_no_write_can_land() {
    let mut scene = Scene::new();
    let caller = scene.taken(SequenceKind::Receive);
    scene.act(Action::Reserve { id: ID, first_block: 0, blocks: vec![BlockId(3)] });
    scene.command();
    drop(caller);
    scene.cancel();
    assert_eq!(scene.input(), Input::Abort { id: ID });
    scene.act(Action::AbortTransfer { id: ID, reason: "cancelled".into() });
    assert!(matches!(scene.command(), transfer::Command::Abort { .. }));
    assert_eq!(scene.places.available_permits(), 3);

    let failure = TransferFailure::Aborted { reason: "cancelled".into() };
    scene.hear(transfer::Event::ReceiveFailed { transfer: TRANSFER, failure });
    assert_eq!(scene.input(), Input::TransferEnded { id: ID, delivered: false });
    scene.assert_quiet();
    scene.assert_forgotten(0);
}

#[test]
fn an_arrival_that_overtakes_its_abort_still_ends_the_transfer() {
    let mut scene = Scene::new();
    let caller = scene.taken(SequenceKind::Receive);
    scene.act(Action::Reserve { id: ID, first_block: 0, blocks: vec![BlockId(3)] });
    scene.command();
    drop(caller);
    scene.cancel();
    scene.input();
    scene.act(Action::AbortTransfer { id: ID, reason: "cancelled".into() });
    scene.command();
    scene.hear(transfer::Event::Arrived {
        transfer: TRANSFER,
        first_index: 0,
        token: token(1),
        stats: FIGURES,
    });
    assert!(matches!(scene.input(), Input::KvArrived { id: ID, .. }));
    scene.assert_quiet();
    scene.assert_forgotten(0);
}

#[test]
fn a_second_start_is_refused_and_its_end_does_not_end_the_first() {
    let mut scene = Scene::new();
    let first = scene.taken(SequenceKind::Compute);
    let mut second = scene.begin(SequenceKind::Compute);
    let verdict = second.verdict.try_recv().unwrap();
    assert_eq!(verdict, Err(Refusal::Duplicate { id: ID.0 }));
    drop(second);
    scene.cancel();
    scene.assert_quiet();
    assert_eq!(scene.journey.in_work.len(), 1);
    drop(first);
    scene.cancel();
    assert_eq!(scene.input(), Input::Abort { id: ID });
    scene.assert_forgotten(0);
}

#[test]
fn an_id_that_was_here_is_still_known() {
    let mut scene = Scene::new();
    drop(scene.taken(SequenceKind::Compute));
    scene.cancel();
    let mut again = scene.begin(SequenceKind::Compute);
    assert_eq!(again.verdict.try_recv().unwrap(), Err(Refusal::Duplicate { id: ID.0 }));
}

#[test]
fn what_the_scheduler_refuses_at_once_is_a_refusal() {
    let busy = SequenceFailure::Busy { reason: "full".into() };
    let invalid = SequenceFailure::Invalid { reason: "too long".into() };
    for (failure, refusal) in [
        (busy, Refusal::Busy { reason: "full".into() }),
        (invalid, Refusal::Invalid { reason: "too long".into() }),
    ] {
        let mut scene = Scene::new();
        let mut caller = scene.begin(SequenceKind::Send);
        scene.input();
        scene.act(Action::Failed { id: ID, failure });
        scene.journey.taken(ID, scene.now);
        assert_eq!(caller.verdict.try_recv().unwrap(), Err(refusal));
        scene.assert_quiet();
        scene.assert_forgotten(1);
    }
}

#[test]
fn what_fails_later_is_the_last_event() {
    let mut scene = Scene::new();
    let mut caller = scene.taken(SequenceKind::Receive);
    scene.act(Action::Failed { id: ID, failure: SequenceFailure::Deadline });
    assert_eq!(caller.failure().0, FailureKind::Deadline);
    scene.assert_forgotten(1);
}

#[test]
fn full_transfers_are_a_busy_node() {
    let mut scene = Scene::new();
    let mut caller = scene.taken(SequenceKind::Receive);
    scene.act(Action::Reserve { id: ID, first_block: 0, blocks: vec![BlockId(3)] });
    scene.command();
    scene.journey.transfer_refused(TRANSFER, "the transfer queue is full".into());
    assert_eq!(scene.input(), Input::Abort { id: ID });
    assert_eq!(caller.failure(), (FailureKind::Busy, "the transfer queue is full".into()));
    // Told whether or not the scheduler answers the abort: it answers only the first one.
    assert_eq!(scene.input(), Input::TransferEnded { id: ID, delivered: false });
    scene.act(Action::AbortTransfer { id: ID, reason: "cancelled".into() });
    assert_eq!(scene.input(), Input::TransferEnded { id: ID, delivered: false });
    scene.assert_quiet();
    scene.assert_forgotten(1);
}

#[test]
fn a_failed_transfer_says_why() {
    let lost = TransferFailure::PeerLost { peer: "p".into(), reason: "it is silent".into() };
    let refused =
        TransferFailure::Refused { peer: "p".into(), reason: "model aa against bb".into() };
    let changed = TransferFailure::WeightsChanged { from: 1, to: 2 };
    for (failure, kind, words) in [
        (changed, FailureKind::Mismatch, "weight_version changed from 1 to 2"),
        (lost, FailureKind::TransferFailed, "it is silent"),
        (refused, FailureKind::Mismatch, "model aa against bb"),
    ] {
        let mut scene = Scene::new();
        let mut caller = scene.taken(SequenceKind::Receive);
        scene.act(Action::Reserve { id: ID, first_block: 0, blocks: vec![BlockId(3)] });
        scene.command();
        scene.hear(transfer::Event::ReceiveFailed { transfer: TRANSFER, failure });
        let (found, message) = caller.failure();
        assert!(found == kind && message.contains(words), "{found:?} {message}");
        assert_eq!(scene.input(), Input::TransferEnded { id: ID, delivered: false });
        // The scheduler's own word comes too late to matter.
        scene.act(Action::Failed { id: ID, failure: SequenceFailure::TransferFailed });
        scene.assert_quiet();
        scene.assert_forgotten(1);
    }
}

#[test]
fn a_reader_that_is_too_slow_is_ended_alone() {
    let mut scene = Scene::new();
    let mut caller = scene.taken(SequenceKind::Compute);
    let mut index = 0;
    while scene.journey.in_work.contains_key(&ID) {
        scene.act(tokens(index, &[1]));
        index += 1;
        assert!(index < 100_000, "the queue has no bound");
    }
    assert_eq!(scene.input(), Input::Abort { id: ID });
    assert_eq!(caller.failure().0, FailureKind::SlowReader);
    scene.assert_quiet();
    scene.assert_forgotten(1);
}

#[test]
fn at_the_end_of_the_drain_everything_ends_and_nothing_begins() {
    let mut scene = Scene::new();
    let mut caller = scene.taken(SequenceKind::Send);
    scene.command();
    scene.journey.end_all("the node stops");
    assert_eq!(scene.input(), Input::Abort { id: ID });
    assert_eq!(caller.failure(), (FailureKind::Draining, "the node stops".into()));
    assert_eq!(scene.journey.in_work.len(), 1, "its transfer is still under way");
    let mut late = scene.begin(SequenceKind::Send);
    assert_eq!(late.verdict.try_recv().unwrap(), Err(Refusal::Draining));
}

#[test]
fn a_sequence_without_its_token_is_a_defect_that_ends_it_alone() {
    let mut scene = Scene::new();
    let mut caller = scene.taken(SequenceKind::Send);
    scene.command();
    scene.act(Action::Finished { id: ID, reason: None });
    assert_eq!(caller.failure().0, FailureKind::Internal);
    assert_eq!(scene.input(), Input::Abort { id: ID });
}
