//! Hand-overs between a prefill node P and a decode node D. The tests call both as a router does.

mod common;
#[path = "common/process.rs"]
mod process;

use std::time::{Duration, Instant};

use common::*;
use config::Flags;
use kv_transfer::config::LEASE;
use node::Role;
use process::NodeProcess;
use proto::v1::{self, FailureKind, FinishReason};
use test_harness::assert_median;
use tonic::Code;

/// Maximum time until a node has failed the attempts of a lost peer and their blocks are free.
const LOST_WITHIN: Duration = Duration::from_millis(500).saturating_add(LEASE);
/// Time-out for a node that was stopped: it reconnects once it has detected its lost connections.
const RECONNECTED_WITHIN: Duration = Duration::from_secs(10);

/// A pair of nodes with the dummy model.
struct Pair {
    p: TestNode,
    d: TestNode,
    model: tempfile::TempDir,
}

impl Pair {
    async fn start(p_settings: &[(&str, &str)], d_settings: &[(&str, &str)]) -> Self {
        let model = dummy_model();
        let p = TestNode::start(Role::Prefill, dummy_settings(model.path(), p_settings)).await;
        let d = TestNode::start(Role::Decode, dummy_settings(model.path(), d_settings)).await;
        Self { p, d, model }
    }

    async fn hand_over(&self, attempt: &v1::Attempt) -> (Prefilled, Decoded) {
        hand_over(&self.p.side(), &self.d.side(), attempt).await
    }

    /// Returns the tokens that D generates alone and without its prefix cache.
    async fn local_prefill(&self, tokens: &[u32], max_tokens: u32) -> Vec<u32> {
        let attempt = v1::Attempt { cache_salt: "alone".into(), ..attempt(tokens, max_tokens) };
        self.d.side().local_prefill(&attempt).await.ids
    }

    /// Waits until both nodes have every block back.
    async fn assert_free(&self) {
        self.p.side().observe().await.until(is_free).await;
        self.d.side().observe().await.until(is_free).await;
    }

    async fn stop(self) {
        self.assert_free().await;
        tokio::join!(self.p.stop(), self.d.stop());
    }
}

async fn handed_over_answer_equals_one_of_a_single_node() {
    let pair = Pair::start(&[], &[]).await;
    // Lengths below, at and above the limits of blocks, chunks and steps.
    for (seed, length) in [17, 31, 32, 33, 63, 64, 65, 130, 500].into_iter().enumerate() {
        let prompt = dummy_prompt(length, seed as u32);
        let (prefilled, decoded) = pair.hand_over(&attempt(&prompt, 20)).await;
        assert_eq!(decoded.ids, pair.local_prefill(&prompt, 20).await, "{length} tokens");
        assert_eq!(decoded.reserved, Some(v1::Reserved { cached_tokens: 0, local_prefill: false }));
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

/// Alternate layers have a window of 40 tokens, so prompts are up to twelve windows long.
async fn windowed_model_is_handed_over_as_on_one_node() {
    let model = windowed_model(40);
    let settings = |blocks| dummy_settings(model.path(), &[("node.blocks", blocks)]);
    let p = TestNode::start(Role::Prefill, settings("128")).await;
    let d = TestNode::start(Role::Decode, settings("70")).await;
    let identity = d.node.record().identity.clone();
    assert_eq!(
        identity.kv_layout,
        "layers=2 halves=kv heads=2 tokens=16 dim=16 windows=all,40 groups=1010 sent=equal-prompt"
    );
    let block_bytes = 2 * 2 * 2 * 16 * 16 * 4;
    for (seed, length) in [17, 40, 64, 130, 500].into_iter().enumerate() {
        let prompt = dummy_prompt(length, seed as u32);
        let attempted = attempt(&prompt, 60);
        let (_, decoded) = hand_over(&p.side(), &d.side(), &attempted).await;
        let alone = v1::Attempt { cache_salt: "alone".into(), ..attempt(&prompt, 60) };
        assert_eq!(decoded.ids, d.side().local_prefill(&alone).await.ids, "{length} tokens");
        // All blocks of one group, and of the other those in the window of the first token that an
        // equal prompt computes after its cached blocks.
        let blocks = length.div_ceil(16);
        let cached = (length - 1_usize) / 16 * 16;
        let behind = (cached + 1).saturating_sub(40) / 16;
        let sent = decoded.finished.expect("it ended").received_bytes;
        assert_eq!(sent, ((2 * blocks - behind) * block_bytes) as u64);
    }
    let other = windowed_model(24);
    let odd = TestNode::start(Role::Prefill, dummy_settings(other.path(), &[])).await;
    let (prefilled, _) = hand_over(&odd.side(), &d.side(), &attempt(&dummy_prompt(80, 1), 5)).await;
    let failure = prefilled.failure.expect("the windows differ");
    for word in ["kv_layout", "windows=all,24", "windows=all,40"] {
        assert!(failure.message.contains(word), "{} lacks {word}", failure.message);
    }
    for node in [p, d, odd] {
        node.side().observe().await.until(is_free).await;
        node.stop().await;
    }
}

async fn prompt_logprobs_come_from_the_node_that_prefills() {
    let pair = Pair::start(&[], &[]).await;
    let scored = |tokens: &[u32]| {
        let mut attempt = attempt(tokens, 4);
        attempt.sampling.as_mut().unwrap().prompt_logprobs = Some(2);
        attempt
    };
    // The last prompts are those before them: both caches have their blocks, which give no
    // log-probabilities.
    for (seed, length) in [(0, 40), (1, 200), (0, 40), (1, 200)] {
        let prompt = dummy_prompt(length, seed);
        let (prefilled, decoded) = pair.hand_over(&scored(&prompt)).await;
        assert_eq!(decoded.reserved, Some(v1::Reserved { cached_tokens: 0, local_prefill: false }));
        let found = prefilled.token.unwrap().token.unwrap().prompt.unwrap().tokens;
        assert_eq!(found.len(), length - 1);
        assert!(found.iter().all(|token| token.top.len() == 2 && token.rank >= Some(1)));
        let alone = v1::Attempt { cache_salt: "alone".into(), ..scored(&prompt) };
        let alone = pair.d.side().local_prefill(&alone).await;
        assert_eq!((alone.ids, alone.prompt.unwrap().tokens), (decoded.ids, found));
        assert_eq!(decoded.prompt, None, "the decode node computes none");
    }
    pair.stop().await;
}

async fn concurrent_hand_overs_do_not_mix() {
    // With fewer slots than requests, the decode node rejects those that wait for half a second.
    let pair = Pair::start(&[], &[("node.slots", "12")]).await;
    let prompts: Vec<Vec<u32>> =
        (0..12).map(|seed| dummy_prompt(20 + 13 * seed, seed as u32)).collect();
    let attempts: Vec<v1::Attempt> = prompts.iter().map(|prompt| attempt(prompt, 15)).collect();
    let together = attempts.iter().map(|attempt| pair.hand_over(attempt));
    let together = futures_util::future::join_all(together).await;
    for ((prefilled, decoded), prompt) in together.into_iter().zip(&prompts) {
        assert_eq!(decoded.failure, None);
        assert_eq!(prefilled.failure, None);
        assert_eq!(decoded.ids, pair.local_prefill(prompt, 15).await);
    }
    pair.stop().await;
}

async fn later_attempt_continues_after_the_emitted_tokens() {
    let pair = Pair::start(&[], &[]).await;
    let prompt = dummy_prompt(50, 1);
    let whole = pair.local_prefill(&prompt, 20).await;
    let mut later = attempt(&[&prompt[..], &whole[..8]].concat(), 20);
    later.prompt_len = 50;
    let (prefilled, decoded) = pair.hand_over(&later).await;
    assert_eq!(prefilled.token.unwrap().first_index, 8);
    assert_eq!(decoded.first_index, Some(8));
    assert_eq!(decoded.ids, whole[8..]);
    pair.stop().await;
}

async fn sampled_answers_with_logprobs_are_handed_over() {
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
    let alone = pair.d.side().local_prefill(&sampled("alone")).await;
    assert_eq!(decoded.ids, alone.ids);
    let logprobs = prefilled.token.unwrap().token.unwrap().logprobs.unwrap();
    assert_eq!(logprobs.top.len(), 3);
    pair.stop().await;
}

async fn prefix_cached_at_d_is_not_sent_and_at_p_not_computed() {
    let pair = Pair::start(&[], &[]).await;
    let prompt = dummy_prompt(100, 1);
    let (first, whole) = pair.hand_over(&attempt(&prompt, 10)).await;
    // Both nodes have cached the first 96 tokens now. The last block of the prompt is not full.
    let longer = dummy_prompt(150, 1);
    assert_eq!(longer[..100], prompt[..]);
    let (second, decoded) = pair.hand_over(&attempt(&longer, 10)).await;
    assert_eq!(decoded.ids, pair.local_prefill(&longer, 10).await);
    assert_eq!(decoded.reserved.unwrap().cached_tokens, 96);
    assert_eq!(second.token.unwrap().cached_tokens, 96);
    let (sent_first, sent_second) =
        (first.delivered.unwrap().bytes, second.delivered.unwrap().bytes);
    // The first transfer had seven blocks, the second one the last four of ten.
    assert_eq!(sent_first / 7, sent_second / 4);
    assert_eq!(whole.failure, None);
    pair.stop().await;
}

async fn uncached_rest_below_one_block_needs_no_peer() {
    let pair = Pair::start(&[], &[]).await;
    let prompt = dummy_prompt(60, 1);
    pair.hand_over(&attempt(&prompt, 10)).await;
    // D has cached 48 of 60 tokens, so 12 tokens are uncached: less than a block.
    let again = attempt(&prompt, 10);
    let stream = pair.d.side().try_decode(&again, Some(pair.p.peer.clone())).await.unwrap();
    let decoded = Decoded::of(stream).await;
    assert_eq!(decoded.reserved, Some(v1::Reserved { cached_tokens: 48, local_prefill: true }));
    assert_eq!(decoded.ids, pair.local_prefill(&prompt, 10).await);
    pair.stop().await;
}

async fn token_0_can_end_the_request_at_the_prefill_node() {
    let pair = Pair::start(&[], &[]).await;
    let prompt = dummy_prompt(80, 1);
    let one = attempt(&prompt, 1);
    let stream = pair.d.side().try_decode(&one, Some(pair.p.peer.clone())).await.unwrap();
    let prefilled =
        Prefilled::of(pair.p.side().try_prefill(&one, pair.d.peer.clone()).await.unwrap()).await;
    let token = prefilled.token.unwrap();
    assert_eq!(token.finish, Some(FinishReason::Length.into()));
    assert_eq!((prefilled.delivered, prefilled.failure), (None, None));
    // The answer is complete: a router cancels the call of D.
    drop(stream);
    pair.assert_free().await;
    assert_eq!(pair.local_prefill(&prompt, 1).await, [token.token.unwrap().id]);
    pair.stop().await;
}

async fn prefill_and_decode_calls_may_arrive_in_any_order() {
    let pair = Pair::start(&[], &[]).await;
    let (p, d) = (pair.p.side(), pair.d.side());
    let prompt = dummy_prompt(80, 5);
    let expected = pair.local_prefill(&prompt, 6).await;
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

async fn a_cancel_at_any_moment_frees_both_sides_within_a_second() {
    let pair = Pair::start(&[], &[]).await;
    let (p, d) = (pair.p.side(), pair.d.side());
    // Connects the two nodes first, so that the cancels arrive during transfers.
    pair.hand_over(&attempt(&dummy_prompt(40, 1), 2)).await;
    let mut took = Vec::new();
    for delay_us in [0, 200, 1_000, 3_000, 10_000, 30_000, 100_000] {
        let attempt = attempt(&dummy_prompt(900, delay_us), 1000);
        let decode = d.try_decode(&attempt, Some(p.peer.clone())).await.unwrap();
        let prefill = p.try_prefill(&attempt, d.peer.clone()).await.unwrap();
        tokio::time::sleep(Duration::from_micros(delay_us.into())).await;
        let left = Instant::now();
        drop((decode, prefill));
        pair.assert_free().await;
        took.push(left.elapsed());
    }
    assert_median("both nodes free after a cancel", &took, Duration::from_secs(1));
    pair.stop().await;
}

async fn decode_or_prefill_call_alone_fails_with_a_typed_error() {
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

/// Each node reports in one line that the peer does not fit: both fingerprints, and both values of
/// each field that differs.
async fn mismatched_nodes_reject_each_other_and_keep_serving() {
    let pair = Pair::start(&[], &[]).await;
    let (p, d) = (pair.p.side(), pair.d.side());
    let (other, deeper) = (other_model(), deeper_model());
    for (role, model, dtype, values) in [
        (Role::Decode, pair.model.path(), "bf16", &["dtype", "\"f32\"", "\"bf16\""][..]),
        (Role::Prefill, pair.model.path(), "bf16", &["dtype", "\"f32\"", "\"bf16\""]),
        (Role::Decode, deeper.path(), "f32", &["kv_layout", "layers=2", "layers=3"]),
        (Role::Prefill, deeper.path(), "f32", &["kv_layout", "layers=2", "layers=3"]),
        (Role::Prefill, other.path(), "f32", &["model_fingerprint"]),
    ] {
        let odd = TestNode::start(role, dummy_settings(model, &[("model.dtype", dtype)])).await;
        let mut words: Vec<String> = values.iter().map(|value| (*value).to_owned()).collect();
        words.extend([&odd, &pair.p].map(|node| {
            let record = node.node.record();
            format!("{:032x}", record.identity.model_fingerprint)
        }));
        let (here, there) = match role {
            Role::Decode => (p.clone(), odd.side()),
            Role::Prefill => (odd.side(), d.clone()),
        };
        let misfit = attempt(&dummy_prompt(80, 1), 5);
        let fits = v1::Attempt { cache_salt: format!("{words:?}"), ..misfit.clone() };
        let fits = v1::Attempt { transfer_id: fresh_id(), ..fits };
        // The matching pair serves meanwhile.
        let ((prefilled, decoded), (_, served)) =
            tokio::join!(hand_over(&here, &there, &misfit), pair.hand_over(&fits));
        assert_eq!((served.failure, served.ids.len()), (None, 5));
        for failure in [prefilled.failure, decoded.failure] {
            let failure = failure.expect("both calls fail");
            assert_eq!(failure.kind(), FailureKind::Mismatch, "{failure:?}");
            assert_eq!(failure.message.lines().count(), 1, "{}", failure.message);
            for word in &words {
                assert!(failure.message.contains(word), "{} lacks {word}", failure.message);
            }
        }
        assert!(prefilled.token.is_none() && decoded.ids.is_empty(), "no node computed a token");
        // The mismatched node still serves requests alone, and the other nodes serve each other.
        if role == Role::Decode {
            let alone = odd.side().local_prefill(&attempt(&dummy_prompt(80, 2), 5)).await;
            assert_eq!(alone.ids.len(), 5);
        }
        odd.side().observe().await.until(is_free).await;
        odd.stop().await;
        let (_, served) = pair.hand_over(&attempt(&dummy_prompt(90, 3), 5)).await;
        assert_eq!(served.failure, None);
    }
    pair.stop().await;
}

async fn duplicate_attempt_is_rejected_on_both_nodes() {
    let pair = Pair::start(&[], &[]).await;
    let again = attempt(&dummy_prompt(80, 1), 5);
    let (_, decoded) = pair.hand_over(&again).await;
    assert_eq!(decoded.failure, None);
    let (p, d) = (pair.p.side(), pair.d.side());
    refused(p.try_prefill(&again, d.peer.clone()).await, Code::AlreadyExists);
    refused(d.try_decode(&again, Some(p.peer.clone())).await, Code::AlreadyExists);
    pair.stop().await;
}

/// Runs [`hand_over`], but returns a typed failure as an error. Each node is called after its own
/// delay.
async fn try_hand_over(
    (prefill, prefill_after): (&Side, Duration),
    (decode, decode_after): (&Side, Duration),
    attempt: &v1::Attempt,
) -> Result<Vec<u32>, String> {
    let prefilled = async {
        tokio::time::sleep(prefill_after).await;
        let stream = prefill.try_prefill(attempt, decode.peer.clone()).await;
        Ok::<_, tonic::Status>(Prefilled::of(stream?).await)
    };
    let decoded = async {
        tokio::time::sleep(decode_after).await;
        let stream = decode.try_decode(attempt, Some(prefill.peer.clone())).await;
        Ok::<_, tonic::Status>(Decoded::of(stream?).await)
    };
    let (prefilled, decoded) = tokio::join!(prefilled, decoded);
    let refusal = |status: tonic::Status| {
        assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
        status.to_string()
    };
    let (_, decoded) = (prefilled.map_err(refusal)?, decoded.map_err(refusal)?);
    let Some(failure) = decoded.failure else { return Ok(decoded.ids) };
    assert!(decoded.ids.is_empty(), "nothing is decoded from an incomplete transfer");
    let typed = [FailureKind::Busy, FailureKind::TransferFailed];
    assert!(typed.contains(&failure.kind()), "{failure:?}");
    Err(failure.message)
}

/// Returns whether the blocks that are not held leave no room for another prompt of [`FULL_PROMPT`]
/// tokens.
fn is_full(load: &v1::NodeLoad) -> bool {
    load.blocks_free + load.blocks_cached < FULL_PROMPT.div_ceil(16) as u32
}

const FULL_BLOCKS: &str = "72";
/// Length of a prompt; two such prompts fit into the blocks of a node.
const FULL_PROMPT: usize = 500;

/// P's blocks hold finished prompts for another decode node, which is frozen. D's blocks are
/// reserved for prompts that P has not computed yet. No deadlock follows, and each request gets its
/// answer.
async fn full_decode_node_does_not_block_a_full_prefill_node() {
    let small = [("node.blocks", FULL_BLOCKS)];
    let pair = Pair::start(&small, &small).await;
    let flags: Flags = dummy_settings(pair.model.path(), &small);
    let other = NodeProcess::start(Role::Decode, &flags).await;
    let (p, d) = (pair.p.side(), pair.d.side());
    let deadline = Instant::now() + TIMEOUT;
    let mut were_full = false;
    for round in 0.. {
        let salted = |seed| v1::Attempt {
            cache_salt: format!("round {round}"),
            ..attempt(&dummy_prompt(FULL_PROMPT, seed), 10)
        };
        fill_with_finished_work(&p, &other, &[salted(20), salted(21)]).await;
        // D gets the calls in this order, P in the opposite order.
        let attempts: Vec<v1::Attempt> = (0..8).map(salted).collect();
        let answers = (0u32..).zip(&attempts).map(|(place, attempt)| {
            let (p, d, mut attempt) = (&p, &d, attempt.clone());
            async move {
                let turn = Duration::from_millis(5);
                let (mut p_after, mut d_after) = (turn * (7 - place), turn * place);
                loop {
                    // Starts new attempts with new ids until one succeeds, as a router does.
                    match try_hand_over((p, p_after), (d, d_after), &attempt).await {
                        Ok(ids) => return ids,
                        Err(reason) => assert!(Instant::now() < deadline, "{reason}"),
                    }
                    attempt.transfer_id = fresh_id();
                    (p_after, d_after) = (turn, turn);
                }
            }
        });
        let (mut p_load, mut d_load) = (p.observe().await, d.observe().await);
        let watch = async {
            loop {
                tokio::select! {
                    event = p_load.event() => event.map(drop).unwrap(),
                    event = d_load.event() => event.map(drop).unwrap(),
                }
                if let (Some(p), Some(d)) = (&p_load.load, &d_load.load) {
                    were_full |= is_full(p) && is_full(d) && d.blocks_reserved > 0;
                }
            }
        };
        let answers = tokio::select! {
            answers = futures_util::future::join_all(answers) => answers,
            () = watch => unreachable!("it has no end"),
        };
        for (ids, attempt) in answers.iter().zip(&attempts) {
            assert_eq!(*ids, pair.local_prefill(&attempt.tokens, 10).await);
        }
        pair.assert_free().await;
        other.thaw();
        if were_full {
            break;
        }
        // On a slow machine P may free its blocks before D has reserved any.
        assert!(Instant::now() < deadline, "the two were never full at the same time");
        // The next round needs all blocks of the other decode node, which frees them only now.
        other.side.observe().await.until(is_free).await;
    }
    drop(other);
    pair.stop().await;
}

/// Fills P with finished prompts for a frozen decode node. P holds them until the lease ends.
async fn fill_with_finished_work(p: &Side, other: &NodeProcess, attempts: &[v1::Attempt]) {
    let deadline = Instant::now() + TIMEOUT;
    let mut load = p.observe().await;
    // Time for the RESERVEs to reach P before the other decode node is frozen.
    let mut pause = Duration::from_millis(20);
    loop {
        assert!(Instant::now() < deadline, "P was never full of finished work");
        let mut streams = Vec::new();
        for attempt in attempts {
            let attempt = &v1::Attempt { transfer_id: fresh_id(), ..attempt.clone() };
            let mut decode = other.side.try_decode(attempt, Some(p.peer.clone())).await.unwrap();
            let reserved = next(&mut decode).await.unwrap().expect("an event");
            let kind = reserved.event.expect("no event is empty");
            assert!(matches!(kind, v1::decode_event::Event::Reserved(_)), "{kind:?}");
            streams.push((decode, attempt.clone()));
        }
        tokio::time::sleep(pause).await;
        other.freeze();
        let mut prefilled = Vec::new();
        for (_, attempt) in &streams {
            let stream = p.try_prefill(attempt, other.side.peer.clone()).await.unwrap();
            prefilled.push(Prefilled::of(stream));
        }
        let mut given_up = Box::pin(futures_util::future::join_all(prefilled));
        let full = tokio::select! {
            _ = load.until(is_full) => true,
            _ = &mut given_up => false,
        };
        if full {
            // P ends the streams when the lease ends.
            tokio::spawn(given_up);
            return;
        }
        // The other node was frozen before P had the RESERVEs, or P took longer than the lease.
        pause = (pause * 2).min(Duration::from_millis(500));
        other.thaw();
        drop(streams);
        other.side.observe().await.until(is_free).await;
    }
}

/// A node in this process and its peer in a helper process.
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
        let there = NodeProcess::start(there, &flags).await;
        let split = Self { here: TestNode::start(here, flags).await, there, _model: model };
        // Connects the two nodes.
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

async fn killed_prefill_node_fails_its_attempts_and_frees_their_blocks() {
    let mut split = Split::start(Role::Decode).await;
    let d = split.here.side();
    // P is frozen, so the transfer is certainly in progress when P dies.
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
    // D still serves alone.
    assert_eq!(
        d.local_prefill(&v1::Attempt { transfer_id: fresh_id(), ..attempt }).await.ids.len(),
        50
    );
    split.here.stop().await;
}

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
    // After the thaw P serves again, once P has detected its lost connections.
    split.there.thaw();
    let thawed = Instant::now();
    loop {
        let again = common::attempt(&dummy_prompt(300, 2), 5);
        let failure = hand_over(&split.there.side, &d, &again).await.1.failure;
        let Some(failure) = failure else { break };
        assert_eq!(failure.kind(), FailureKind::TransferFailed);
        assert!(thawed.elapsed() < RECONNECTED_WITHIN, "{failure:?}");
    }
    split.here.stop().await;
}

async fn killed_decode_node_releases_the_blocks_of_the_prefill_node() {
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

fn main() -> std::process::ExitCode {
    let tests = test_harness::async_tests![
        handed_over_answer_equals_one_of_a_single_node,
        windowed_model_is_handed_over_as_on_one_node,
        prompt_logprobs_come_from_the_node_that_prefills,
        concurrent_hand_overs_do_not_mix,
        later_attempt_continues_after_the_emitted_tokens,
        sampled_answers_with_logprobs_are_handed_over,
        prefix_cached_at_d_is_not_sent_and_at_p_not_computed,
        uncached_rest_below_one_block_needs_no_peer,
        token_0_can_end_the_request_at_the_prefill_node,
        prefill_and_decode_calls_may_arrive_in_any_order,
        a_cancel_at_any_moment_frees_both_sides_within_a_second,
        decode_or_prefill_call_alone_fails_with_a_typed_error,
        mismatched_nodes_reject_each_other_and_keep_serving,
        duplicate_attempt_is_rejected_on_both_nodes,
        full_decode_node_does_not_block_a_full_prefill_node,
        killed_prefill_node_fails_its_attempts_and_frees_their_blocks,
        a_frozen_prefill_node_is_reported_within_the_lease,
        killed_decode_node_releases_the_blocks_of_the_prefill_node,
    ];
    test_harness::main(&[(process::NODE_HELPER, process::run_node)], tests)
}
