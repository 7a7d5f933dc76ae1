//! A prefill and a decode node, and a caller that does what a router does.

mod common;
#[path = "common/process.rs"]
mod process;

use std::time::{Duration, Instant};

use common::*;
use config::Flags;
use node::Role;
use process::NodeProcess;
use proto::v1::{self, FailureKind, FinishReason};
use tonic::Code;

/// A lost peer costs a lease of 2 s and half a second.
const LOST_WITHIN: Duration = Duration::from_secs(3);

/// A pair of nodes with the dummy model.
struct Pair {
    p: TestNode,
    d: TestNode,
    _model: tempfile::TempDir,
}

impl Pair {
    async fn start(p_settings: &[(&str, &str)], d_settings: &[(&str, &str)]) -> Self {
        let model = dummy_model();
        let p = TestNode::start(Role::Prefill, dummy_settings(model.path(), p_settings)).await;
        let d = TestNode::start(Role::Decode, dummy_settings(model.path(), d_settings)).await;
        Self { p, d, _model: model }
    }

    async fn hand_over(&self, attempt: &v1::Attempt) -> (Prefilled, Decoded) {
        hand_over(&self.p.side(), &self.d.side(), attempt).await
    }

    /// What D writes without a peer and without its cache.
    async fn alone(&self, tokens: &[u32], max_tokens: u32) -> Vec<u32> {
        let attempt = v1::Attempt { cache_salt: "alone".into(), ..attempt(tokens, max_tokens) };
        self.d.side().decode_alone(&attempt).await.ids
    }

    /// Both nodes have every block back.
    async fn assert_free(&self) {
        self.p.side().observe().await.until(is_free).await;
        self.d.side().observe().await.until(is_free).await;
    }

    async fn stop(self) {
        self.assert_free().await;
        tokio::join!(self.p.stop(), self.d.stop());
    }
}

#[tokio::test]
async fn an_answer_that_changes_hands_equals_one_that_does_not() {
    let pair = Pair::start(&[], &[]).await;
    // Below, at and above the edges of blocks, chunks and steps.
    for (seed, length) in [17, 31, 32, 33, 63, 64, 65, 130, 500].into_iter().enumerate() {
        let prompt = dummy_prompt(length, seed as u32);
        let (prefilled, decoded) = pair.hand_over(&attempt(&prompt, 20)).await;
        assert_eq!(decoded.ids, pair.alone(&prompt, 20).await, "{length} tokens");
        assert_eq!(decoded.reserved, Some(v1::Reserved { cached_tokens: 0, alone: false }));
        assert_eq!(decoded.first_index, Some(0));
        let finished = decoded.finished.unwrap();
        assert_eq!(finished.reason(), FinishReason::Length);
        let token = prefilled.token.unwrap();
        assert_eq!((token.first_index, token.token.unwrap().id), (0, decoded.ids[0]));
        assert_eq!(token.finish, None);
        let delivered = prefilled.delivered.unwrap();
        assert!(delivered.chunks > 0 && delivered.bytes > 0);
        assert_eq!(delivered.bytes, finished.received_bytes);
    }
    pair.stop().await;
}

#[tokio::test]
async fn many_hand_overs_at_once_stay_apart() {
    let pair = Pair::start(&[], &[]).await;
    let prompts: Vec<Vec<u32>> =
        (0..12).map(|seed| dummy_prompt(20 + 13 * seed, seed as u32)).collect();
    let attempts: Vec<v1::Attempt> = prompts.iter().map(|prompt| attempt(prompt, 15)).collect();
    let together = attempts.iter().map(|attempt| pair.hand_over(attempt));
    let together = futures_util::future::join_all(together).await;
    for ((prefilled, decoded), prompt) in together.into_iter().zip(&prompts) {
        assert_eq!(decoded.failure, None);
        assert_eq!(prefilled.failure, None);
        assert_eq!(decoded.ids, pair.alone(prompt, 15).await);
    }
    pair.stop().await;
}

#[tokio::test]
async fn a_later_attempt_goes_on_behind_the_emitted_tokens() {
    let pair = Pair::start(&[], &[]).await;
    let prompt = dummy_prompt(50, 1);
    let whole = pair.alone(&prompt, 20).await;
    let mut later = attempt(&[&prompt[..], &whole[..8]].concat(), 20);
    later.prompt_len = 50;
    let (prefilled, decoded) = pair.hand_over(&later).await;
    assert_eq!(prefilled.token.unwrap().first_index, 8);
    assert_eq!(decoded.first_index, Some(8));
    assert_eq!(decoded.ids, whole[8..]);
    pair.stop().await;
}

#[tokio::test]
async fn sampled_answers_with_logprobs_change_hands_too() {
    let pair = Pair::start(&[], &[]).await;
    let prompt = dummy_prompt(70, 3);
    let sampled = |salt: &str| {
        let mut attempt = v1::Attempt { cache_salt: salt.into(), ..attempt(&prompt, 24) };
        let sampling = attempt.sampling.as_mut().unwrap();
        (sampling.temperature, sampling.seed, sampling.top_p) = (0.9, 7, 0.95);
        (sampling.repetition_penalty, sampling.presence_penalty) = (1.1, 0.3);
        sampling.logprobs = Some(3);
        attempt
    };
    let (prefilled, decoded) = pair.hand_over(&sampled("")).await;
    let alone = pair.d.side().decode_alone(&sampled("alone")).await;
    assert_eq!(decoded.ids, alone.ids);
    let logprobs = prefilled.token.unwrap().token.unwrap().logprobs.unwrap();
    assert_eq!(logprobs.top.len(), 3);
    pair.stop().await;
}

#[tokio::test]
async fn prefixes_known_to_d_are_not_sent_and_those_known_to_p_not_computed() {
    let pair = Pair::start(&[], &[]).await;
    let prompt = dummy_prompt(100, 1);
    let (first, whole) = pair.hand_over(&attempt(&prompt, 10)).await;
    // Both know the first 96 tokens and more now; the last block is not full in the prompt.
    let longer = dummy_prompt(150, 1);
    assert_eq!(longer[..100], prompt[..]);
    let (second, decoded) = pair.hand_over(&attempt(&longer, 10)).await;
    assert_eq!(decoded.ids, pair.alone(&longer, 10).await);
    assert_eq!(decoded.reserved.unwrap().cached_tokens, 96);
    assert_eq!(second.token.unwrap().cached_tokens, 96);
    let (sent_first, sent_second) =
        (first.delivered.unwrap().bytes, second.delivered.unwrap().bytes);
    // Seven blocks first, the last four of ten then.
    assert_eq!(sent_first / 7, sent_second / 4);
    assert_eq!(whole.failure, None);
    pair.stop().await;
}

#[tokio::test]
async fn a_rest_below_one_block_needs_no_peer() {
    let pair = Pair::start(&[], &[]).await;
    let prompt = dummy_prompt(60, 1);
    pair.hand_over(&attempt(&prompt, 10)).await;
    // 48 of 60 are cached at D: the rest is 12.
    let again = attempt(&prompt, 10);
    let stream = pair.d.side().try_decode(&again, Some(pair.p.peer.clone())).await.unwrap();
    let decoded = Decoded::of(stream).await;
    assert_eq!(decoded.reserved, Some(v1::Reserved { cached_tokens: 48, alone: true }));
    assert_eq!(decoded.ids, pair.alone(&prompt, 10).await);
    pair.stop().await;
}

#[tokio::test]
async fn token_0_can_end_the_request_at_p() {
    let pair = Pair::start(&[], &[]).await;
    let prompt = dummy_prompt(80, 1);
    let one = attempt(&prompt, 1);
    let stream = pair.d.side().try_decode(&one, Some(pair.p.peer.clone())).await.unwrap();
    let prefilled =
        Prefilled::of(pair.p.side().try_prefill(&one, pair.d.peer.clone()).await.unwrap()).await;
    let token = prefilled.token.unwrap();
    assert_eq!(token.finish, Some(FinishReason::Length.into()));
    assert_eq!((prefilled.delivered, prefilled.failure), (None, None));
    // A router has its answer and leaves D.
    drop(stream);
    pair.assert_free().await;
    assert_eq!(pair.alone(&prompt, 1).await, [token.token.unwrap().id]);
    pair.stop().await;
}

#[tokio::test]
async fn the_two_calls_may_come_in_any_order() {
    let pair = Pair::start(&[], &[]).await;
    let (p, d) = (pair.p.side(), pair.d.side());
    let prompt = dummy_prompt(80, 5);
    let expected = pair.alone(&prompt, 6).await;
    for p_first in [true, false] {
        let attempt = v1::Attempt { cache_salt: format!("{p_first}"), ..attempt(&prompt, 6) };
        let first_call = Duration::from_millis(50);
        let prefilled = async {
            if !p_first {
                tokio::time::sleep(first_call).await;
            }
            Prefilled::of(p.try_prefill(&attempt, d.peer.clone()).await.unwrap()).await
        };
        let decoded = async {
            if p_first {
                tokio::time::sleep(first_call).await;
            }
            Decoded::of(d.try_decode(&attempt, Some(p.peer.clone())).await.unwrap()).await
        };
        let (prefilled, decoded) = tokio::join!(prefilled, decoded);
        assert_eq!(decoded.ids, expected, "prefill first: {p_first}");
        assert!(prefilled.delivered.is_some());
    }
    pair.stop().await;
}

#[tokio::test]
async fn a_cancel_at_any_moment_frees_both_sides_within_a_second() {
    let pair = Pair::start(&[], &[]).await;
    let (p, d) = (pair.p.side(), pair.d.side());
    // Connect the two first: a cancel before that waits for nobody either, but proves less.
    pair.hand_over(&attempt(&dummy_prompt(40, 1), 2)).await;
    for delay_us in [0, 200, 1_000, 3_000, 10_000, 30_000] {
        let attempt = attempt(&dummy_prompt(900, delay_us), 1000);
        let decode = d.try_decode(&attempt, Some(p.peer.clone())).await.unwrap();
        let prefill = p.try_prefill(&attempt, d.peer.clone()).await.unwrap();
        tokio::time::sleep(Duration::from_micros(delay_us.into())).await;
        let left = Instant::now();
        drop((decode, prefill));
        pair.assert_free().await;
        let took = left.elapsed();
        assert!(took < Duration::from_secs(1), "{delay_us} us: {took:?}");
    }
    pair.stop().await;
}

#[tokio::test]
async fn either_call_alone_ends_in_a_typed_failure() {
    let pair = Pair::start(&[], &[]).await;
    let (p, d) = (pair.p.side(), pair.d.side());
    let started = Instant::now();
    let lonely = attempt(&dummy_prompt(80, 1), 5);
    let prefilled = Prefilled::of(p.try_prefill(&lonely, d.peer.clone()).await.unwrap()).await;
    assert_eq!(prefilled.failure.unwrap().kind(), FailureKind::TransferFailed);
    let lonely = attempt(&dummy_prompt(80, 2), 5);
    let decoded = Decoded::of(d.try_decode(&lonely, Some(p.peer.clone())).await.unwrap()).await;
    assert_eq!(decoded.failure.unwrap().kind(), FailureKind::TransferFailed);
    assert!(decoded.ids.is_empty());
    assert!(started.elapsed() < 2 * LOST_WITHIN, "took {:?}", started.elapsed());
    pair.stop().await;
}

#[tokio::test]
async fn nodes_with_other_models_refuse_each_other_with_both_fingerprints() {
    let (model, other) = (dummy_model(), other_model());
    let p = TestNode::start(Role::Prefill, dummy_settings(other.path(), &[])).await;
    let d = TestNode::start(Role::Decode, dummy_settings(model.path(), &[])).await;
    let (prefilled, decoded) =
        hand_over(&p.side(), &d.side(), &attempt(&dummy_prompt(80, 1), 5)).await;
    let fingerprints = [p.node.record(), d.node.record()]
        .map(|record| format!("{:032x}", record.identity.model_fingerprint));
    assert_ne!(fingerprints[0], fingerprints[1]);
    let failure = decoded.failure.expect("D cannot go on");
    assert_eq!(failure.kind(), FailureKind::Mismatch);
    for fingerprint in &fingerprints {
        assert!(failure.message.contains(fingerprint), "{}", failure.message);
    }
    let failure = prefilled.failure.expect("P cannot go on");
    let allowed = [FailureKind::Mismatch, FailureKind::TransferFailed];
    assert!(allowed.contains(&failure.kind()), "{failure:?}");
    assert!(prefilled.token.is_none(), "P computed for nobody");
    // Each still serves those it fits.
    assert_eq!(d.side().decode_alone(&attempt(&dummy_prompt(80, 2), 5)).await.ids.len(), 5);
    d.side().observe().await.until(is_free).await;
    p.side().observe().await.until(is_free).await;
    tokio::join!(p.stop(), d.stop());
}

#[tokio::test]
async fn a_duplicate_attempt_already_exists_on_either_side() {
    let pair = Pair::start(&[], &[]).await;
    let again = attempt(&dummy_prompt(80, 1), 5);
    let (_, decoded) = pair.hand_over(&again).await;
    assert_eq!(decoded.failure, None);
    let (p, d) = (pair.p.side(), pair.d.side());
    refused(p.try_prefill(&again, d.peer.clone()).await, Code::AlreadyExists);
    refused(d.try_decode(&again, Some(p.peer.clone())).await, Code::AlreadyExists);
    pair.stop().await;
}

#[tokio::test]
async fn a_full_decode_node_does_not_hold_up_a_full_prefill_node() {
    // Each side has room for two of these prompts; eight come at once.
    let small = [("node.blocks", "72")];
    let pair = Pair::start(&small, &small).await;
    let attempts: Vec<v1::Attempt> =
        (0..8).map(|seed| attempt(&dummy_prompt(500, seed), 10)).collect();
    let together = attempts.iter().map(|attempt| pair.hand_over(attempt));
    let outcomes = futures_util::future::join_all(together).await;
    let mut complete = 0;
    for ((_, decoded), attempt) in outcomes.iter().zip(&attempts) {
        match &decoded.failure {
            None => {
                assert_eq!(decoded.ids, pair.alone(&attempt.tokens, 10).await);
                complete += 1;
            }
            // A router would try elsewhere.
            Some(failure) => {
                let typed = [FailureKind::Busy, FailureKind::TransferFailed];
                assert!(typed.contains(&failure.kind()), "{failure:?}");
            }
        }
    }
    assert!(complete > 0, "{outcomes:?}");
    pair.stop().await;
}

/// One side in this process, the other in one of its own.
struct Split {
    here: TestNode,
    there: NodeProcess,
    _model: tempfile::TempDir,
}

impl Split {
    async fn start(here: Role) -> Self {
        let there = if here == Role::Decode { Role::Prefill } else { Role::Decode };
        let model = dummy_model();
        let flags: Flags = dummy_settings(model.path(), &[]);
        let there = NodeProcess::start(PROCESS_TEST, there, &flags).await;
        let split = Self { here: TestNode::start(here, flags).await, there, _model: model };
        // The two know each other before anything happens to one of them.
        let warm_up = attempt(&dummy_prompt(40, 99), 2);
        let (here_side, there_side) = (split.here.side(), split.there.side.clone());
        let (p, d) = match here {
            Role::Prefill => (here_side, there_side),
            Role::Decode => (there_side, here_side),
        };
        assert_eq!(hand_over(&p, &d, &warm_up).await.1.failure, None);
        split
    }
}

const PROCESS_TEST: &str = "a_node_in_a_process_of_its_own";

/// Not a test but the node of [`Split`]; it returns at once when the tests are run.
#[tokio::test]
async fn a_node_in_a_process_of_its_own() {
    process::serve_if_told().await;
}

#[tokio::test]
async fn a_killed_prefill_node_is_reported_and_its_blocks_come_back() {
    let mut split = Split::start(Role::Decode).await;
    let d = split.here.side();
    // Frozen, so that the transfer is certainly under way when the node dies.
    split.there.freeze();
    let attempt = attempt(&dummy_prompt(300, 1), 50);
    let mut stream = d.try_decode(&attempt, Some(split.there.side.peer.clone())).await.unwrap();
    let mut decoded = Decoded::default();
    decoded.take(next(&mut stream).await.unwrap().unwrap());
    assert!(decoded.reserved.is_some());
    let killed = Instant::now();
    split.there.kill();
    while let Some(event) = next(&mut stream).await.unwrap() {
        decoded.take(event);
    }
    assert_eq!(decoded.failure.unwrap().kind(), FailureKind::TransferFailed);
    assert!(decoded.ids.is_empty(), "nothing is decoded from an incomplete transfer");
    assert!(killed.elapsed() < LOST_WITHIN, "took {:?}", killed.elapsed());
    d.observe().await.until(is_free).await;
    assert!(killed.elapsed() < LOST_WITHIN, "took {:?}", killed.elapsed());
    // D goes on alone.
    assert_eq!(
        d.decode_alone(&v1::Attempt { transfer_id: fresh_id(), ..attempt }).await.ids.len(),
        50
    );
    split.here.stop().await;
}

#[tokio::test]
async fn a_frozen_prefill_node_is_reported_within_the_lease() {
    let split = Split::start(Role::Decode).await;
    let d = split.here.side();
    split.there.freeze();
    let frozen = Instant::now();
    let attempt = attempt(&dummy_prompt(300, 1), 50);
    let stream = d.try_decode(&attempt, Some(split.there.side.peer.clone())).await.unwrap();
    let decoded = Decoded::of(stream).await;
    assert_eq!(decoded.failure.unwrap().kind(), FailureKind::TransferFailed);
    d.observe().await.until(is_free).await;
    assert!(frozen.elapsed() < LOST_WITHIN, "took {:?}", frozen.elapsed());
    // Awake again it serves, once it has noticed which of its connections are gone.
    split.there.thaw();
    let thawed = Instant::now();
    loop {
        let again = common::attempt(&dummy_prompt(300, 2), 5);
        let failure = hand_over(&split.there.side, &d, &again).await.1.failure;
        let Some(failure) = failure else { break };
        assert_eq!(failure.kind(), FailureKind::TransferFailed);
        assert!(thawed.elapsed() < LOST_WITHIN, "{failure:?}");
    }
    split.here.stop().await;
}

#[tokio::test]
async fn a_decode_node_that_is_killed_gives_the_prefill_node_its_blocks_back() {
    let mut split = Split::start(Role::Prefill).await;
    let (p, d) = (split.here.side(), split.there.side.clone());
    let attempt = attempt(&dummy_prompt(300, 1), 50);
    let mut decode = d.try_decode(&attempt, Some(p.peer.clone())).await.unwrap();
    assert!(next(&mut decode).await.unwrap().is_some(), "blocks are reserved");
    split.there.freeze();
    let prefilled =
        tokio::spawn(Prefilled::of(p.try_prefill(&attempt, d.peer.clone()).await.unwrap()));
    let killed = Instant::now();
    split.there.kill();
    let prefilled = prefilled.await.unwrap();
    assert_eq!(prefilled.failure.unwrap().kind(), FailureKind::TransferFailed);
    assert!(killed.elapsed() < LOST_WITHIN, "took {:?}", killed.elapsed());
    p.observe().await.until(is_free).await;
    assert!(killed.elapsed() < LOST_WITHIN, "took {:?}", killed.elapsed());
    split.here.stop().await;
}
