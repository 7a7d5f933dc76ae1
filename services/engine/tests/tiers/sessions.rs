//! Conversations: the order of their turns, and KV that is kept for the next turn.

use engine::event::SessionHint;

use super::*;

#[test]
fn later_turn_keeps_the_place_of_its_conversation() {
    let order = |sessions, is_cancelled| {
        let limits = unbounded_waits(limits(1, 64, 40, 1));
        let mut node = Node::with_tiers(limits, TierConfig { sessions, ..config(40) });
        node.arrive(new(1, COMPUTE, 1, 70));
        node.arrive(new(2, COMPUTE, 2, 40));
        while !node.finished(SequenceId(1)) {
            node.turn();
        }
        // The second turn of the first conversation arrives after another prompt.
        node.arrive(new(3, COMPUTE, 3, 40));
        node.arrive(new(4, COMPUTE, 1, 100));
        let mut second = SequenceId(4);
        if is_cancelled {
            node.abort(second);
            second = SequenceId(5);
            node.arrive(new(5, COMPUTE, 1, 100));
        }
        while !node.finished(SequenceId(3)) && !node.finished(second) {
            node.turn();
        }
        let is_first = node.finished(second);
        run(&mut node);
        node.assert_all_returned();
        is_first
    };
    for is_cancelled in [false, true] {
        assert!(order(true, is_cancelled));
        assert!(!order(false, is_cancelled));
    }
}

#[test]
fn parallel_turns_of_a_session_do_not_starve_another_request() {
    let limits = unbounded_waits(limits(1, 64, 40, 1));
    let mut node = Node::with_tiers(limits, TierConfig { sessions: true, ..config(40) });
    let session = SessionHint { session: Some(7), keep: None };
    let turn = |id| NewSequence { session, ..new(id, COMPUTE, id as u32, 40) };
    let mut open = vec![1, 2];
    open.iter().for_each(|&id| node.arrive(turn(id)));
    let other = SequenceId(100);
    node.arrive(new(other.0, COMPUTE, 100, 40));
    let mut next = 3;
    while !node.finished(other) {
        node.turn();
        // Two turns of the session are always open.
        for id in &mut open {
            if node.finished(SequenceId(*id)) {
                node.arrive(turn(next));
                *id = next;
                next += 1;
            }
        }
        assert!(next <= 8, "five later turns have passed the request");
    }
    run(&mut node);
    node.assert_all_returned();
}

/// Plays six turns of a conversation. Between two turns come prompts that never return, more than
/// the memory holds. Returns the tokens that each turn computes.
fn computed_by_turns(sessions: bool, hint: SessionHint) -> Vec<u32> {
    // A host tier without slots saves nothing.
    let tiers = TierConfig { host: true, sessions, ..config(0) };
    let mut node = node(64, tiers);
    let mut id = 0;
    let mut compute = |node: &mut Node, new: NewSequence| {
        id += 1;
        let cache_salt = if new.tokens.len() == 90 { id.to_string() } else { String::new() };
        node.arrive(NewSequence { id: SequenceId(id), cache_salt, ..new });
        run(node)
    };
    let turns = (0..6).map(|turn| {
        let prompt = NewSequence { session: hint, ..new(0, COMPUTE, 1, 80 + 16 * turn) };
        let computed = compute(&mut node, prompt);
        (0..14).for_each(|_| assert_eq!(compute(&mut node, new(0, COMPUTE, 2, 90)), 90));
        computed
    });
    let turns = turns.collect();
    node.assert_all_returned();
    turns
}

#[test]
fn kv_of_a_conversation_that_returns_outlives_prompts_that_do_not() {
    let unnamed = SessionHint::default();
    let named = SessionHint { session: Some(7), keep: None };
    assert_eq!(computed_by_turns(false, unnamed), [80, 96, 112, 128, 144, 160]);
    // The first gap is not known.
    for learned in [unnamed, named] {
        assert_eq!(computed_by_turns(true, learned), [80, 96, 16, 16, 16, 16]);
    }
    let keep = |seconds| SessionHint { keep: Some(Duration::from_secs(seconds)), ..named };
    assert_eq!(computed_by_turns(true, keep(600)), [80, 16, 16, 16, 16, 16]);
    assert_eq!(computed_by_turns(true, keep(0)), [80, 96, 112, 128, 144, 160]);
}

#[test]
fn admission_takes_kept_blocks_at_once() {
    let mut node = node(15, TierConfig { host: true, sessions: true, ..config(0) });
    let keep = Some(Duration::from_secs(600));
    let kept = |id| {
        let session = SessionHint { session: Some(id), keep };
        NewSequence { session, ..new(id, COMPUTE, id as u32, 90) }
    };
    for id in 1..=3 {
        node.arrive(kept(id));
        assert_eq!(run(&mut node), 90);
    }
    assert_eq!(compute(&mut node, 4, 4, 150), 150, "ten blocks of fifteen kept ones");
    assert_eq!(compute(&mut node, 5, 1, 91), 11, "the oldest conversation is evicted last");
    assert_eq!(compute(&mut node, 6, 3, 91), 91, "the youngest conversation is evicted first");
    assert_eq!(compute(&mut node, 7, 5, 230), 230, "every block");
    node.assert_all_returned();
}

#[test]
fn common_prefix_of_a_kept_conversation_outlives_other_conversations() {
    let mut node = node(15, TierConfig { host: true, sessions: true, ..config(0) });
    let turn = |id, len, seconds| {
        let keep = Some(Duration::from_secs(seconds));
        NewSequence { session: SessionHint { session: Some(id), keep }, ..new(id, COMPUTE, 1, len) }
    };
    node.arrive(turn(1, 90, 600));
    run(&mut node);
    // A conversation with the same prefix ends, and its KV is not kept.
    node.arrive(turn(2, 70, 0));
    assert_eq!(run(&mut node), 6);
    compute(&mut node, 3, 4, 150);
    compute(&mut node, 4, 5, 90);
    assert_eq!(compute(&mut node, 5, 1, 91), 11, "its five full blocks are kept");
    node.assert_all_returned();
}

#[test]
fn last_turn_of_a_conversation_with_a_new_place_ends_the_keep_time() {
    for is_retried in [false, true] {
        let mut node = node(15, TierConfig { host: true, sessions: true, ..config(0) });
        let turn = |id, seconds| {
            let keep = Some(Duration::from_secs(seconds));
            let session = SessionHint { session: Some(7), keep };
            NewSequence { session, ..new(id, COMPUTE, 1, 90) }
        };
        node.arrive(turn(1, 600));
        run(&mut node);
        assert_eq!(node.engine.scheduler().load().blocks_kept, 5);
        // A conversation loses its place after 300 s.
        node.advance(Duration::from_secs(301));
        if is_retried {
            node.arrive(turn(2, 0));
            node.abort(SequenceId(2));
        }
        node.arrive(turn(3, 0));
        assert_eq!(run(&mut node), 10, "the KV was kept for this turn");
        assert_eq!(node.engine.scheduler().load().blocks_kept, 0, "no turn follows");
        node.assert_all_returned();
    }
}

#[test]
fn kv_of_earlier_weights_is_not_kept_for_the_next_turn() {
    let mut node = node(15, TierConfig { host: true, sessions: true, ..config(0) });
    let session = SessionHint { session: Some(7), keep: Some(Duration::from_secs(600)) };
    let turn = new(1, COMPUTE, 1, 90);
    node.arrive(NewSequence { session, max_tokens: 50, ignore_stop_tokens: true, ..turn });
    change_weights_after_output(&mut node, SequenceId(1), InFlight::KeepKv);
    run(&mut node);
    assert!(node.finished(SequenceId(1)));
    assert_eq!(node.engine.scheduler().preemptions(), 0, "the turn ends on its old KV");
    assert_eq!(node.engine.scheduler().load().blocks_kept, 0);
    node.assert_all_returned();
}

#[test]
fn last_turn_of_a_conversation_ends_the_keep_time_of_blocks_beyond_a_branch() {
    let mut node = node(15, TierConfig { host: true, sessions: true, ..config(0) });
    let turn = |id, len, seconds| {
        let keep = Some(Duration::from_secs(seconds));
        let session = SessionHint { session: Some(7), keep };
        NewSequence { session, ..new(id, COMPUTE, 1, len) }
    };
    node.arrive(turn(1, 90, 600));
    run(&mut node);
    // A conversation loses its place after 300 s.
    node.advance(Duration::from_secs(301));
    node.arrive(turn(2, 40, 0));
    run(&mut node);
    assert_eq!(node.engine.scheduler().load().blocks_kept, 3, "this turn held two of five");
    node.arrive(turn(3, 90, 0));
    run(&mut node);
    assert_eq!(node.engine.scheduler().load().blocks_kept, 0, "no turn follows");
    node.assert_all_returned();
}

#[test]
fn cancelled_turn_with_output_is_kept_like_a_finished_turn() {
    let mut node = node(15, TierConfig { host: true, sessions: true, ..config(0) });
    let session = SessionHint { session: Some(7), keep: Some(Duration::from_secs(600)) };
    let turn = new(1, COMPUTE, 1, 90);
    node.arrive(NewSequence { session, max_tokens: 50, ignore_stop_tokens: true, ..turn });
    while node.received(SequenceId(1)) == 0 {
        node.turn();
    }
    node.abort(SequenceId(1));
    run(&mut node);
    assert_eq!(node.engine.scheduler().load().blocks_kept, 5);
    compute(&mut node, 2, 4, 150);
    compute(&mut node, 3, 5, 90);
    assert_eq!(compute(&mut node, 4, 1, 91), 11, "the next turn");
    node.assert_all_returned();
}
