//! Nodes with speculative decoding, and a caller that acts as a router.

mod common;

use common::*;
use node::Role;
use proto::v1::{self, FinishReason, decode_event};

const SPECULATE: &[(&str, &str)] =
    &[("node.speculate", "ngram"), ("node.speculate_ngram_min", "2")];

/// Returns a repetitive prompt. Small models continue the repetition.
fn repeating_prompt() -> Vec<u32> {
    (0..60).map(|index| 10 + index % 5).collect()
}

/// Returns the number of tokens of each event, and all tokens.
async fn events_of(side: &Side, attempt: &v1::Attempt) -> (Vec<usize>, Vec<v1::Token>) {
    let mut stream = side.try_decode(attempt, None).await.expect("the node accepts it");
    let (mut counts, mut tokens) = (Vec::new(), Vec::new());
    while let Some(v1::DecodeEvent { event, .. }) = next(&mut stream).await.expect("no error") {
        match event.expect("no event is empty") {
            decode_event::Event::Tokens(more) => {
                assert_eq!(more.first_index as usize, tokens.len());
                counts.push(more.tokens.len());
                tokens.extend(more.tokens);
            }
            decode_event::Event::Finished(end) => assert_eq!(end.reason(), FinishReason::Length),
            decode_event::Event::Failure(failure) => panic!("{failure:?}"),
            decode_event::Event::Reserved(_) => {}
        }
    }
    (counts, tokens)
}

#[tokio::test]
async fn speculative_decoding_sends_several_tokens_per_event_and_changes_none() {
    let model = dummy_model();
    let plain = TestNode::start(Role::Decode, dummy_settings(model.path(), &[])).await;
    let ahead = TestNode::start(Role::Decode, dummy_settings(model.path(), SPECULATE)).await;
    let mut wanted = attempt(&repeating_prompt(), 200);
    wanted.sampling.as_mut().unwrap().logprobs = Some(2);
    let (one_by_one, expected) = events_of(&plain.side(), &wanted).await;
    let (counts, tokens) = events_of(&ahead.side(), &wanted).await;
    assert_eq!(tokens, expected, "logprobs included");
    assert_eq!(one_by_one, vec![1; 200]);
    // How many drafts a step has depends on measured step times.
    assert!(counts.iter().any(|count| *count > 1), "{counts:?}");
    assert!(counts.iter().all(|count| (1..=9).contains(count)), "{counts:?}");

    let counted = || {
        let metrics = ahead.telemetry.metrics().render_prometheus();
        let value = |name: &str| -> usize {
            let line = metrics.lines().find(|line| line.starts_with(name));
            line.unwrap_or_else(|| panic!("{metrics}")).rsplit(' ').next().unwrap().parse().unwrap()
        };
        (value("vllm:spec_decode_num_accepted_tokens_total{"), value("baton_step_rows_total{"))
    };
    // Each row of a step emits one token and its accepted draft tokens. The last step is recorded
    // after its tokens are sent.
    let recorded = async {
        loop {
            let (accepted, rows) = counted();
            if accepted + rows >= 200 {
                break accepted;
            }
            tokio::task::yield_now().await;
        }
    };
    let accepted = tokio::time::timeout(TIMEOUT, recorded).await.expect("every token is counted");
    // One event may hold the tokens of several steps, and the last steps accept tokens beyond the
    // last emitted one.
    assert!(accepted <= 200 - counts.len() + 16, "{accepted} accepted, {counts:?}");
    plain.stop().await;
    ahead.stop().await;
}

#[tokio::test]
async fn speculative_decoding_works_after_a_hand_over() {
    let model = dummy_model();
    let p = TestNode::start(Role::Prefill, dummy_settings(model.path(), SPECULATE)).await;
    let d = TestNode::start(Role::Decode, dummy_settings(model.path(), SPECULATE)).await;
    let plain = TestNode::start(Role::Decode, dummy_settings(model.path(), &[])).await;
    let wanted = attempt(&repeating_prompt(), 100);
    let (prefilled, decoded) = hand_over(&p.side(), &d.side(), &wanted).await;
    assert!(prefilled.delivered.is_some());
    assert_eq!(decoded.first_index, Some(0));
    assert_eq!(decoded.ids, plain.side().local_prefill(&wanted).await.ids);
    let has_rows = |node: &TestNode| {
        let text = node.telemetry.metrics().render_prometheus();
        let rows = text.lines().find(|line| line.starts_with("baton_speculation_rows_total{"));
        !rows.expect("the series exists from the start").ends_with(" 0")
    };
    assert!(has_rows(&d) && !has_rows(&p));
    for node in [p, d, plain] {
        node.stop().await;
    }
}
