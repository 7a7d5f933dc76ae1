//! The request core in virtual time, with scripted nodes.

use cluster::{NodeId, Role};
use proto::{
    ids::RequestId,
    v1::{
        DecodeFinished, DecodeTokens, Failure, FailureKind, Grammar, PrefillToken, Reserved, Token,
        decode_event::Event, grammar, prefill_event,
    },
};

use super::*;
use crate::fair_queue::ChargeEnd;

const MAX_TOKENS: u32 = 100;
const TIMEOUT: Duration = Duration::from_secs(600);
const POLICY: RecoveryPolicy = RecoveryPolicy {
    attempts_max: 4,
    busy_timeout: Duration::from_secs(30),
    idle_timeout: Duration::from_secs(60),
};
const NONE_UP: NoNode = NoNode::NoneUp { role: Role::Decode, listed: 1 };
const BUSY: NoNode =
    NoNode::Busy { role: Role::Decode, retry_after: Duration::from_millis(100), by_choice: false };

/// A core and its owner: virtual time, and the outputs that the core waits for.
struct Owner {
    core: RequestCore,
    start: Instant,
    now: Instant,
    /// Number of attempts, from which the epochs of the picked nodes derive.
    picked: u128,
    /// Tokens that the client received.
    received: Vec<u32>,
}

fn node(role: Role, number: u128) -> Arc<NodeRecord> {
    Arc::new(NodeRecord {
        node_id: NodeId::parse(&format!("{}-0", role.as_str())).unwrap(),
        epoch: Epoch(number),
        role,
        control_endpoint: "tcp://127.0.0.1:9".into(),
        model: "model".into(),
        identity: ModelIdentity {
            model_fingerprint: 7,
            weight_version: 1,
            kv_layout: "layout".into(),
            block_size: 16,
            dtype: "f32".into(),
            tp: 1,
            protocol_min: 1,
            protocol_max: 1,
        },
        prompt_tokens_max: 1000,
        sequence_tokens_max: 1001,
        block_count: 100,
        vocabulary_size: 1000,
        grammar_version: 0,
        cpu_fallback: None,
        peer_tag: vec![1; 32],
        pooling: false,
        sampling_version: 0,
        both_roles: false,
        kv_windows: vec![0],
        state_blocks: 0,
        adapters: Vec::new(),
    })
}

fn lost() -> AttemptFailure {
    AttemptFailure::stream_end(AttemptSide::Decode, None)
}

fn token(id: u32) -> Token {
    Token { id, ..Default::default() }
}

impl Owner {
    fn new() -> Self {
        let now = Instant::now();
        let spec = AnswerSpec {
            request_id: RequestId(1),
            model: "model".into(),
            adapter: None,
            prompt: [7; 64].into(),
            prefix: Arc::default(),
            sampling: Sampling { max_tokens: MAX_TOKENS, ..Sampling::default() },
            grammar: None,
            grammar_version: 0,
            cache_salt: "".into(),
            session: RequestSession::default(),
            priority: 0,
            vocabulary_size: 1000,
            deadline: now + TIMEOUT,
            is_further: false,
        };
        let core = RequestCore::new(spec, POLICY);
        Self { core, start: now, now, picked: 0, received: Vec::new() }
    }

    /// Creates a request whose first pick is awaited.
    fn started() -> Self {
        let mut owner = Self::new();
        owner.core.start(owner.now, false);
        assert_eq!(owner.outputs(), [RequestOutput::Pick]);
        owner
    }

    /// Returns the next output. Reports about the decode node are left out.
    fn output(&mut self) -> Option<RequestOutput> {
        std::iter::from_fn(|| self.core.poll_output())
            .find(|output| *output != RequestOutput::Served)
    }

    /// Returns all outputs. Tokens are delivered at once.
    fn outputs(&mut self) -> Vec<RequestOutput> {
        let mut outputs = Vec::new();
        while let Some(output) = self.output() {
            if let RequestOutput::Emit { first_index, tokens, .. } = &output {
                assert_eq!(*first_index as usize, self.received.len());
                self.received.extend(tokens.iter().map(|token| token.id));
                self.core.handle_emitted(self.now, None);
            } else {
                outputs.push(output);
            }
        }
        outputs
    }

    fn no_node(&mut self, reason: &NoNode) -> Vec<RequestOutput> {
        self.core.handle_no_node(self.now, reason);
        self.outputs()
    }

    /// Begins an attempt on a decode node, and on a prefill node if `with_prefill`.
    fn picked(&mut self, with_prefill: bool) {
        self.picked += 1;
        let prefill = with_prefill.then(|| node(Role::Prefill, 1000 + self.picked));
        let (transfer_id, decode) = (TransferId(self.picked), node(Role::Decode, self.picked));
        let calls = self.core.handle_picked(self.now, transfer_id, decode, prefill);
        let attempt = calls.decode.attempt.unwrap();
        assert_eq!(attempt.transfer_id[..], transfer_id.to_bytes());
        assert_eq!(attempt.tokens, [&[7; 64][..], &self.received].concat());
        assert_eq!(calls.prefill.is_some(), with_prefill);
        assert_eq!(self.outputs(), []);
    }

    fn decode_sends(&mut self, event: Event) -> Vec<RequestOutput> {
        self.core
            .handle_decode(self.now, Ok(Some(DecodeEvent { event: Some(event), stages: None })));
        self.outputs()
    }

    fn reserved(&mut self) -> Vec<RequestOutput> {
        self.decode_sends(Event::Reserved(Reserved { cached_tokens: 0, local_prefill: false }))
    }

    /// Sends the next `count` tokens of the decode node. Token `i` has id `i`.
    fn tokens(&mut self, count: u32) -> Vec<RequestOutput> {
        let first_index = self.received.len() as u32;
        let tokens = (first_index..first_index + count).map(token).collect();
        self.decode_sends(Event::Tokens(DecodeTokens { first_index, tokens }))
    }

    /// Ends the stream of the decode node.
    fn loses_decode(&mut self) -> Vec<RequestOutput> {
        self.core.handle_decode(self.now, Ok(None));
        self.outputs()
    }

    /// Advances virtual time to the core's next deadline.
    fn deadline(&mut self) -> Vec<RequestOutput> {
        self.now = self.core.next_deadline().expect("a deadline");
        self.core.handle_deadline(self.now, |_| None);
        self.outputs()
    }

    fn elapsed(&self) -> Duration {
        self.now - self.start
    }

    /// Lets every pick find no decode node for `absent`.
    fn stays_absent(&mut self, absent: Duration) {
        let until = self.now + absent;
        assert_eq!(self.no_node(&NONE_UP), [RequestOutput::WaitForNode]);
        while self.core.next_deadline().unwrap() < until {
            assert_eq!(self.deadline(), [RequestOutput::Pick]);
            assert_eq!(self.no_node(&NONE_UP), [RequestOutput::WaitForNode]);
        }
        self.now = until;
        self.core.handle_nodes_changed();
        assert_eq!(self.outputs(), [RequestOutput::Pick]);
    }

    fn finishes(&mut self) {
        self.tokens(MAX_TOKENS - self.received.len() as u32);
        let reason = FinishReason::Length.into();
        let event = DecodeFinished { reason, received_bytes: 0, transfer_us: 0 };
        let outputs = self.decode_sends(Event::Finished(event));
        assert!(matches!(
            outputs[..],
            [
                RequestOutput::EndAttempt(EndedAttempt { outcome: AttemptOutcome::Complete, .. }),
                RequestOutput::Finish(_)
            ]
        ));
        assert_eq!(self.received, (0..MAX_TOKENS).collect::<Vec<_>>());
        assert!(self.core.has_ended() && self.core.next_deadline().is_none());
    }
}

fn gave_up(outputs: &[RequestOutput]) -> &GiveUp {
    match outputs.last() {
        Some(RequestOutput::Fail(reason)) => reason,
        _ => panic!("{outputs:?}"),
    }
}

#[test]
fn a_new_request_waits_for_a_node_within_its_deadline() {
    let mut owner = Owner::started();
    owner.stays_absent(Duration::from_secs(5));
    owner.picked(true);
    assert_eq!(owner.reserved(), [RequestOutput::StopWaiting]);
    owner.finishes();
}

#[test]
fn the_error_at_the_deadline_says_that_no_decode_node_was_available() {
    let mut owner = Owner::started();
    let mut outputs = owner.no_node(&NONE_UP);
    let mut picks = 0;
    while !owner.core.has_ended() {
        outputs = owner.deadline();
        if outputs == [RequestOutput::Pick] {
            picks += 1;
            outputs = owner.no_node(&NONE_UP);
        }
    }
    assert_eq!(owner.elapsed(), TIMEOUT);
    let (waited, reason) = (TIMEOUT, NONE_UP);
    assert_eq!(outputs, [RequestOutput::Fail(GiveUp::NoDecodeNode { waited, reason })]);
    // Picking backs off to once a second.
    assert!(picks < 700, "{picks} picks");
}

#[test]
fn a_running_request_survives_the_absence_of_all_decode_nodes() {
    let mut owner = Owner::started();
    owner.picked(false);
    owner.reserved();
    owner.tokens(3);
    let decode = NodeStats { cached_tokens: Some(0), stages: None };
    let stats = AttemptStats { decode, ..AttemptStats::default() };
    let ended = EndedAttempt { outcome: AttemptOutcome::Failed(lost()), stats };
    assert_eq!(owner.loses_decode(), [RequestOutput::EndAttempt(ended), RequestOutput::Pick]);
    owner.stays_absent(Duration::from_secs(5));
    let requirements = owner.core.requirements();
    assert_eq!((requirements.tokens, requirements.new_tokens_max), (67, 97));
    // Only the model that began the answer may continue it.
    assert!(requirements.identity.is_some() && requirements.exclude_decode.is_empty());
    owner.picked(false);
    owner.reserved();
    owner.finishes();
}

/// Without this a weight update between two attempts would leave the request without a node.
#[test]
fn a_running_request_continues_with_other_weights_if_no_node_has_its_own() {
    let mut owner = Owner::started();
    owner.picked(false);
    owner.reserved();
    owner.tokens(3);
    owner.loses_decode();
    assert!(!owner.core.requirements().any_weights);
    let unfit = NoNode::NoneFits { role: Role::Decode };
    assert_eq!(owner.no_node(&unfit), [RequestOutput::Pick]);
    assert!(owner.core.requirements().any_weights);
    // Nodes of another model do not fit either.
    assert_eq!(owner.no_node(&unfit), [RequestOutput::WaitForNode]);
    owner.core.handle_nodes_changed();
    assert_eq!(owner.outputs(), [RequestOutput::Pick]);
    owner.picked(false);
    owner.reserved();
    owner.finishes();
}

#[test]
fn a_request_completes_while_its_nodes_are_killed_every_three_seconds() {
    let mut owner = Owner::started();
    for killed in 1..MAX_TOKENS {
        owner.picked(true);
        owner.reserved();
        owner.tokens(1);
        owner.now += Duration::from_secs(3);
        let outputs = owner.loses_decode();
        assert_eq!(outputs[1..], [RequestOutput::Pick], "after {killed} kills");
        owner.stays_absent(Duration::from_millis(500));
    }
    owner.picked(true);
    owner.reserved();
    owner.finishes();
}

#[test]
fn attempts_without_a_token_are_bounded() {
    let mut owner = Owner::started();
    for number in 1..=4 {
        assert_eq!(owner.core.requirements().local_prefill, number == 4);
        owner.picked(number < 4);
        let outputs = owner.loses_decode();
        match number {
            1 => assert_eq!(outputs[1..], [RequestOutput::Pick]),
            2 | 3 => {
                assert!(matches!(outputs[..], [RequestOutput::EndAttempt(_)]));
                owner.core.handle_nodes_changed();
                assert_eq!(owner.outputs(), []);
                assert_eq!(owner.deadline(), [RequestOutput::Pick]);
            }
            _ => {
                let spent = GiveUp::AttemptsSpent { attempts: 4, last: lost() };
                assert_eq!(*gave_up(&outputs), spent);
            }
        }
    }
    // 100 ms after the second attempt, 200 ms after the third.
    assert_eq!(owner.elapsed(), Duration::from_millis(300));
}

#[test]
fn waiting_for_a_busy_cluster_is_bounded_and_in_turns() {
    let mut owner = Owner::started();
    assert_eq!(owner.no_node(&BUSY), [RequestOutput::WaitForTurn]);
    assert!(owner.core.expects_turn());
    owner.now += Duration::from_secs(1);
    owner.core.handle_turn();
    assert_eq!(owner.outputs(), [RequestOutput::Pick]);
    assert_eq!(owner.no_node(&BUSY), [RequestOutput::WaitForTurn]);
    let end = loop {
        let outputs = owner.deadline();
        if outputs != [RequestOutput::RetryPassed] {
            break outputs;
        }
        owner.core.handle_turn();
        assert_eq!(owner.outputs(), [RequestOutput::Pick]);
        assert_eq!(owner.no_node(&BUSY), [RequestOutput::WaitForTurn]);
    };
    assert_eq!(*gave_up(&end), GiveUp::Busy { waited: POLICY.busy_timeout });
    assert_eq!(owner.elapsed(), POLICY.busy_timeout);
    assert!(owner.core.has_ended());

    // The same bound holds for a request that never gets its turn.
    let mut owner = Owner::new();
    owner.core.start(owner.now, true);
    assert_eq!(owner.outputs(), [RequestOutput::WaitForTurn]);
    let waited = POLICY.busy_timeout;
    assert_eq!(owner.deadline(), [RequestOutput::Fail(GiveUp::Busy { waited })]);
}

#[test]
fn late_turn_tells_the_limit_that_the_request_exceeds() {
    let (waited, service_time) = (Duration::from_secs(11), Duration::from_secs(590));
    let late_after = |limit: StartLimit, waited: Duration| {
        let mut owner = Owner::new();
        owner.core.start(owner.now, true);
        assert_eq!(owner.outputs(), [RequestOutput::WaitForTurn]);
        owner.now += waited;
        owner.core.handle_late_turn(owner.now, limit);
        gave_up(&owner.outputs()).clone()
    };
    let by_deadline = |time_left: Duration| StartLimit::Deadline { time_left, service_time };
    let limit = by_deadline(TIMEOUT - waited);
    let late = TooLate { wait: Duration::ZERO, waited, limit, is_over_share: false };
    assert_eq!(late.excess(), Duration::from_secs(1));
    assert_eq!(
        late.to_string(),
        "the request cannot complete before its deadline in 589000 ms: it has waited 11000 ms for a node and would \
         take up to 590000 ms; expected a later deadline, a shorter prompt or fewer output tokens"
    );
    assert_eq!(late_after(by_deadline(TIMEOUT), waited), GiveUp::Late(late));
    assert_eq!(late_after(StartLimit::Wait(waited), waited), GiveUp::Busy { waited });
    assert_eq!(late_after(by_deadline(TIMEOUT), TIMEOUT), GiveUp::Deadline);
}

#[test]
fn a_begun_answer_waits_for_busy_nodes_until_its_deadline() {
    let mut owner = Owner::started();
    owner.picked(false);
    owner.reserved();
    owner.tokens(1);
    assert_eq!(owner.loses_decode()[1..], [RequestOutput::Pick]);
    assert_eq!(owner.no_node(&BUSY), [RequestOutput::WaitForTurn]);
    let end = loop {
        let outputs = owner.deadline();
        if outputs != [RequestOutput::RetryPassed] {
            break outputs;
        }
        owner.core.handle_turn();
        assert_eq!(owner.outputs(), [RequestOutput::Pick]);
        assert_eq!(owner.no_node(&BUSY), [RequestOutput::WaitForTurn]);
    };
    assert_eq!(end, [RequestOutput::Fail(GiveUp::Deadline)]);
    assert_eq!(owner.elapsed(), TIMEOUT);
}

#[test]
fn a_further_answer_of_a_request_waits_like_one_that_has_begun() {
    let mut owner = Owner::new();
    let spec = AnswerSpec { is_further: true, ..owner.core.spec };
    owner.core = RequestCore::new(spec, POLICY);
    owner.core.start(owner.now, true);
    assert_eq!(owner.outputs(), [RequestOutput::WaitForTurn]);
    assert_eq!(owner.core.requirements().capacity, RequiredCapacity::Start { headroom: false });
    assert_eq!(owner.deadline(), [RequestOutput::Fail(GiveUp::Deadline)]);
    assert_eq!(owner.elapsed(), TIMEOUT);
}

#[test]
fn a_begun_answer_waits_for_a_node_that_fits_until_its_deadline() {
    let role = Role::Decode;
    for reason in [
        NoNode::NoneFits { role },
        NoNode::NoGrammar { role, version: 1 },
        NoNode::TooLong { role, tokens: 65, tokens_max: 64 },
    ] {
        let mut owner = Owner::started();
        owner.picked(false);
        owner.reserved();
        owner.tokens(1);
        owner.loses_decode();
        let end = loop {
            let mut outputs = owner.no_node(&reason);
            // Nodes of other weights would fit, too.
            if outputs == [RequestOutput::Pick] {
                outputs = owner.no_node(&reason);
            }
            assert_eq!(outputs, [RequestOutput::WaitForNode], "{reason}");
            outputs = owner.deadline();
            if outputs != [RequestOutput::Pick] {
                break outputs;
            }
        };
        assert_eq!(end, [RequestOutput::Fail(GiveUp::NoDecodeNode { waited: TIMEOUT, reason })]);
    }
}

#[test]
fn a_request_without_any_node_releases_its_turn() {
    let mut owner = Owner::started();
    owner.no_node(&BUSY);
    owner.core.handle_turn();
    assert_eq!(owner.outputs(), [RequestOutput::Pick]);
    assert_eq!(owner.no_node(&NONE_UP), [RequestOutput::WaitForNode]);
    owner.core.handle_nodes_changed();
    assert_eq!(owner.outputs(), [RequestOutput::Pick]);
    assert_eq!(owner.no_node(&BUSY), [RequestOutput::WaitForTurn]);
}

#[test]
fn a_silent_node_fails_the_attempt_unless_it_reports_work() {
    let mut owner = Owner::started();
    owner.picked(true);
    owner.reserved();
    // Token 0 is awaited: the report of the prefill node counts.
    owner.now += POLICY.idle_timeout;
    let report = owner.now - Duration::from_secs(1);
    owner.core.handle_deadline(owner.now, |side| (side == AttemptSide::Prefill).then_some(report));
    assert_eq!(owner.outputs(), []);
    assert_eq!(owner.core.next_deadline(), Some(report + POLICY.idle_timeout));
    let outputs = owner.deadline();
    let [RequestOutput::EndAttempt(EndedAttempt { outcome, .. }), RequestOutput::Pick] =
        &outputs[..]
    else {
        panic!("{outputs:?}");
    };
    let silent = AttemptFailure::silent(AttemptSide::Prefill, POLICY.idle_timeout);
    assert_eq!(*outcome, AttemptOutcome::Failed(silent));

    // Once the decode node sends tokens, only a token ends its silence.
    owner.picked(false);
    owner.reserved();
    owner.tokens(1);
    owner.now += POLICY.idle_timeout;
    let now = owner.now;
    owner.core.handle_deadline(now, |_| Some(now));
    assert_eq!(owner.outputs()[1..], [RequestOutput::Pick]);
}

#[test]
fn a_complete_answer_finishes_without_the_last_event() {
    for is_lost in [false, true] {
        let mut owner = Owner::started();
        owner.picked(false);
        owner.reserved();
        assert_eq!(owner.tokens(MAX_TOKENS), []);
        let outputs = if is_lost { owner.loses_decode() } else { owner.deadline() };
        assert_eq!(owner.elapsed(), if is_lost { Duration::ZERO } else { LAST_EVENT_MAX });
        let [_, RequestOutput::Finish(finished)] = &outputs[..] else { panic!("{outputs:?}") };
        assert_eq!(finished.reason, FinishReason::Length);
    }
}

#[test]
fn a_failed_transfer_waits_for_token_0_for_a_bounded_time() {
    let mut owner = Owner::started();
    owner.picked(true);
    let failure = Failure { kind: FailureKind::TransferFailed.into(), message: "lost".into() };
    assert_eq!(owner.decode_sends(Event::Failure(failure)), []);
    assert!(!owner.core.expects_decode() && owner.core.expects_prefill());
    assert_eq!(owner.deadline()[1..], [RequestOutput::Pick]);
    assert_eq!(owner.elapsed(), TOKEN_0_MAX);
}

#[test]
fn a_complete_stop_string_drops_the_calls_and_whatever_follows() {
    let mut owner = Owner::started();
    owner.picked(true);
    owner.reserved();
    let event = PrefillToken {
        first_index: 0,
        token: Some(token(0)),
        finish: Some(FinishReason::Length.into()),
        cached_tokens: 0,
    };
    let event = PrefillEvent { event: Some(prefill_event::Event::Token(event)), stages: None };
    owner.core.handle_prefill(owner.now, Ok(Some(event)));
    assert!(matches!(owner.output(), Some(RequestOutput::Emit { first_index: 0, .. })));
    // Nothing follows before the tokens are delivered.
    assert_eq!(owner.output(), None);
    owner.core.handle_emitted(owner.now, Some(StopCause::Text));
    let outputs = owner.outputs();
    let [RequestOutput::EndAttempt(_), RequestOutput::Finish(finished)] = &outputs[..] else {
        panic!("{outputs:?}");
    };
    assert_eq!(finished.reason, FinishReason::Stop);
}

#[test]
fn a_client_that_does_not_read_holds_no_node_and_continues_at_its_next_read() {
    let mut owner = Owner::started();
    owner.picked(true);
    owner.reserved();
    owner.tokens(2);
    let event = DecodeTokens { first_index: 2, tokens: vec![token(2)] };
    let event = DecodeEvent { event: Some(Event::Tokens(event)), stages: None };
    owner.core.handle_decode(owner.now, Ok(Some(event)));
    assert!(matches!(owner.core.poll_output(), Some(RequestOutput::Emit { .. })));
    owner.core.handle_client_stalled();
    let outputs = owner.outputs();
    let [RequestOutput::EndAttempt(ended)] = &outputs[..] else { panic!("{outputs:?}") };
    assert_eq!(ended.outcome, AttemptOutcome::Paused);
    assert!(!owner.core.expects_decode() && !owner.core.expects_prefill());
    assert_eq!(owner.core.next_deadline(), Some(owner.start + TIMEOUT));
    owner.now += Duration::from_secs(20);
    owner.received.push(2);
    owner.core.handle_emitted(owner.now, None);
    assert_eq!(owner.outputs(), [RequestOutput::WaitForTurn]);
    assert_eq!(owner.core.next_deadline(), Some(owner.start + TIMEOUT));
    // The next attempt must be able to start, as that of a new request.
    assert_eq!(owner.core.requirements().capacity, RequiredCapacity::Start { headroom: false });
    owner.core.handle_turn();
    assert_eq!(owner.outputs(), [RequestOutput::Pick]);
    owner.picked(false);
    assert_eq!(owner.reserved(), [RequestOutput::StopWaiting]);
    owner.tokens(MAX_TOKENS - 3);
    assert_eq!(owner.core.emitted().len() as u32, MAX_TOKENS);
    // After the last token the nodes hold nothing.
    owner.core.handle_client_stalled();
    assert!(owner.core.expects_decode());
}

#[test]
fn a_started_answer_needs_no_room_unless_its_client_paused_it() {
    let mut owner = Owner::started();
    assert_eq!(owner.core.requirements().capacity, RequiredCapacity::Start { headroom: false });
    owner.picked(false);
    owner.reserved();
    owner.tokens(1);
    owner.loses_decode();
    assert_eq!(owner.core.requirements().capacity, RequiredCapacity::Any);
}

#[test]
fn an_answer_whose_node_finds_a_slow_reader_waits_for_its_turn_and_continues() {
    let mut owner = Owner::started();
    let slow = || {
        let (kind, message) = (FailureKind::SlowReader.into(), "its queue is full".into());
        Event::Failure(Failure { kind, message })
    };
    for attempt in 1..POLICY.attempts_max {
        owner.picked(false);
        owner.reserved();
        if attempt == 1 {
            owner.tokens(3);
        }
        let outputs = owner.decode_sends(slow());
        assert!(
            matches!(outputs[..], [RequestOutput::EndAttempt(_), RequestOutput::WaitForTurn]),
            "{outputs:?}"
        );
        let RequiredCapacity::Start { .. } = owner.core.requirements().capacity else {
            panic!("it comes before requests that wait");
        };
        assert!(owner.core.requirements().exclude_decode.is_empty());
        owner.core.handle_turn();
        assert_eq!(owner.outputs(), [RequestOutput::Pick]);
    }
    owner.picked(false);
    owner.reserved();
    assert!(matches!(gave_up(&owner.decode_sends(slow())), GiveUp::AttemptsSpent { .. }));
}

#[test]
fn reading_time_of_a_client_does_not_count_as_node_silence() {
    let mut owner = Owner::started();
    owner.picked(false);
    owner.reserved();
    let event = DecodeTokens { first_index: 0, tokens: vec![token(0)] };
    let event = DecodeEvent { event: Some(Event::Tokens(event)), stages: None };
    owner.core.handle_decode(owner.now, Ok(Some(event)));
    assert!(matches!(owner.output(), Some(RequestOutput::Emit { .. })));
    assert_eq!(owner.core.next_deadline(), Some(owner.start + TIMEOUT));
    owner.now += 2 * POLICY.idle_timeout;
    owner.core.handle_emitted(owner.now, None);
    owner.core.handle_drain_check(owner.now, None);
    owner.now += POLICY.idle_timeout - Duration::from_millis(1);
    owner.core.handle_deadline(owner.now, |_| None);
    assert_eq!(owner.outputs(), []);
    owner.now += Duration::from_millis(1);
    owner.core.handle_deadline(owner.now, |_| None);
    assert_eq!(owner.outputs().len(), 2, "the attempt ends, and another one begins");
}

#[test]
fn the_deadline_ends_the_open_attempt() {
    let mut owner = Owner::started();
    owner.picked(false);
    owner.reserved();
    owner.now = owner.start + TIMEOUT;
    owner.core.handle_deadline(owner.now, |_| None);
    let outputs = owner.outputs();
    let cancelled = AttemptOutcome::Cancelled;
    assert!(matches!(&outputs[0], RequestOutput::EndAttempt(ended) if ended.outcome == cancelled));
    assert_eq!(*gave_up(&outputs), GiveUp::Deadline);
}

#[test]
fn a_client_that_leaves_cancels_the_attempt() {
    let mut owner = Owner::started();
    owner.picked(false);
    owner.core.handle_client_left();
    let outputs = owner.outputs();
    let [RequestOutput::EndAttempt(ended)] = &outputs[..] else { panic!("{outputs:?}") };
    assert_eq!(ended.outcome, AttemptOutcome::Cancelled);
    assert!(owner.core.has_ended());
}

#[test]
fn a_complete_structured_answer_finishes_although_its_last_event_is_lost() {
    for side in [AttemptSide::Decode, AttemptSide::Prefill] {
        let mut owner = Owner::new();
        let kind = Some(grammar::Kind::Regex("abc".into()));
        owner.core.spec.grammar = Some(Arc::new(Grammar { kind, thought: None }));
        owner.core.start(owner.now, false);
        owner.outputs();
        owner.picked(false);
        owner.reserved();
        owner.tokens(3);
        owner.loses_decode();
        // The grammar allows no further token, so the node refuses to continue the answer.
        owner.picked(true);
        let message = "the answer is complete".to_owned();
        let code = GrpcCode::NOT_FOUND;
        let complete = CallError { code, is_broken: false, message };
        match side {
            AttemptSide::Decode => owner.core.handle_decode(owner.now, Err(complete)),
            AttemptSide::Prefill => owner.core.handle_prefill(owner.now, Err(complete)),
        }
        let outputs = owner.outputs();
        let [RequestOutput::EndAttempt(ended), RequestOutput::Finish(finished)] = &outputs[..]
        else {
            panic!("{outputs:?}");
        };
        assert_eq!(finished.reason, FinishReason::Stop);
        assert_eq!(owner.received, [0, 1, 2]);
        // The attempt is no answer without tokens for the flow's mean output length.
        assert_eq!(ended.outcome.charged_end(), ChargeEnd::Refused);
    }
}

#[test]
fn a_call_that_a_node_could_not_read_in_time_is_retried_until_the_deadline() {
    let message = "the body did not arrive".to_owned();
    let code = GrpcCode::DEADLINE_EXCEEDED;
    let unread = CallError { code, is_broken: false, message };
    let mut owner = Owner::started();
    owner.picked(false);
    owner.core.handle_decode(owner.now, Err(unread.clone()));
    assert!(matches!(owner.outputs()[..], [RequestOutput::EndAttempt(_), RequestOutput::Pick]));
    owner.picked(false);
    owner.now += TIMEOUT - Duration::from_millis(1);
    owner.core.handle_decode(owner.now, Err(unread));
    assert!(matches!(gave_up(&owner.outputs()), GiveUp::Final(_)));
}

#[test]
fn an_answer_that_a_weight_update_ends_does_not_count_as_complete() {
    for tokens_of_attempt in [0, 2] {
        let mut owner = Owner::started();
        owner.picked(false);
        owner.reserved();
        owner.tokens(3);
        owner.loses_decode();
        owner.picked(false);
        owner.reserved();
        if tokens_of_attempt > 0 {
            owner.tokens(tokens_of_attempt);
        }
        let reason = FinishReason::Abort.into();
        let event = DecodeFinished { reason, ..DecodeFinished::default() };
        let outputs = owner.decode_sends(Event::Finished(event));
        let [RequestOutput::EndAttempt(ended), RequestOutput::Finish(finished)] = &outputs[..]
        else {
            panic!("{outputs:?}");
        };
        assert_eq!(finished.reason, FinishReason::Abort);
        // The flow's mean output length counts complete answers only.
        assert_eq!(ended.outcome.charged_end(), ChargeEnd::Cut);
    }
}

/// Decodes this many tokens, 100 ms apart, on a node that prefilled the prompt.
fn decoding(tokens: u32) -> Owner {
    let mut owner = Owner::started();
    owner.picked(false);
    owner.decode_sends(Event::Reserved(Reserved { cached_tokens: 0, local_prefill: true }));
    for first_index in 0..tokens {
        owner.now += Duration::from_millis(100);
        owner.decode_sends(Event::Tokens(DecodeTokens { first_index, tokens: vec![token(5)] }));
    }
    owner
}

#[test]
fn answer_does_not_migrate_at_the_deadline_of_its_request() {
    let mut owner = decoding(20);
    owner.core.handle_drain_check(owner.now, drain(Duration::from_secs(5)));
    assert_eq!(owner.outputs(), []);
    owner.now = owner.start + TIMEOUT;
    if owner.core.drain_check_is_due(owner.now) {
        owner.core.handle_drain_check(owner.now, drain(Duration::from_millis(1)));
    }
    owner.core.handle_deadline(owner.now, |_| None);
    let outputs = owner.outputs();
    assert!(!outputs.contains(&RequestOutput::Pick), "{outputs:?}");
    assert_eq!(*gave_up(&outputs), GiveUp::Deadline);
}

/// Returns a drain with this grace period, of a node that cannot send KV.
fn drain(grace: Duration) -> Option<Drain> {
    Some(Drain { grace: Some(grace), sends_kv: false })
}

/// Checks for a drain as often as it is due during the rest of the grace period. Returns the
/// outputs of a migration.
fn drains(owner: &mut Owner, mut grace: Duration) -> Vec<RequestOutput> {
    while !grace.is_zero() {
        let due = owner.core.next_deadline().unwrap();
        grace = grace.saturating_sub(due.saturating_duration_since(owner.now));
        owner.now = owner.now.max(due);
        if owner.core.drain_check_is_due(owner.now) {
            owner.core.handle_drain_check(owner.now, drain(grace));
        }
        let outputs = owner.outputs();
        if !outputs.is_empty() {
            return outputs;
        }
    }
    Vec::new()
}

#[test]
fn answer_that_outlasts_the_drain_of_its_node_migrates_without_spending_the_budget() {
    // 80 tokens are left, which take 8 s.
    let mut owner = decoding(20);
    for migration in 0..2 * POLICY.attempts_max {
        let outputs = drains(&mut owner, Duration::from_secs(5));
        let [RequestOutput::EndAttempt(ended), RequestOutput::Pick] = &outputs[..] else {
            panic!("{outputs:?}")
        };
        let AttemptOutcome::Failed(failure) = &ended.outcome else { panic!("{ended:?}") };
        assert_eq!((failure.cause, failure.blame()), (FailureCause::Migrated, None), "{migration}");
        owner.picked(false);
        owner.decode_sends(Event::Reserved(Reserved { cached_tokens: 0, local_prefill: true }));
        for _ in 0..DRAIN_TOKENS_MIN + 1 {
            owner.now += Duration::from_secs(1);
            let first_index = owner.received.len() as u32;
            let tokens = DecodeTokens { first_index, tokens: vec![token(5)] };
            owner.decode_sends(Event::Tokens(tokens));
        }
    }
}

#[test]
fn answer_that_ends_within_the_drain_stays_on_its_node() {
    let mut owner = decoding(20);
    owner.core.handle_drain_check(owner.now, drain(Duration::from_secs(9)));
    assert_eq!(owner.outputs(), []);
    // The rest of the answer cannot be predicted from a few tokens.
    assert_eq!(drains(&mut decoding(DRAIN_TOKENS_MIN), Duration::from_secs(2)), []);
    // Without a limit, or without another node.
    let mut owner = decoding(20);
    owner.now += DRAIN_CHECK;
    owner.core.handle_drain_check(owner.now, None);
    assert_eq!(owner.outputs(), []);
}

#[test]
fn answer_moves_from_a_draining_node_that_sends_kv_and_then_is_an_ordinary_attempt() {
    for (grace, local_prefill) in [(None, false), (Some(Duration::from_secs(60)), true)] {
        // 80 tokens are left, which take 8 s.
        let mut owner = decoding(20);
        let from = Epoch(owner.picked);
        owner.core.handle_drain_check(owner.now, Some(Drain { grace, sends_kv: true }));
        let outputs = owner.outputs();
        assert!(matches!(outputs[..], [RequestOutput::EndAttempt(_), RequestOutput::Pick]));
        assert!(owner.core.moves());
        assert_eq!(owner.core.requirements().moves_from, Some(from));
        let (transfer_id, decode) = (TransferId(100), node(Role::Decode, 100));
        let sender = node(Role::Decode, from.0);
        owner.core.handle_picked(owner.now, transfer_id, decode, Some(sender));
        assert!(!owner.core.moves());
        let reserved = Reserved { cached_tokens: 0, local_prefill };
        let dropped = owner.decode_sends(Event::Reserved(reserved));
        assert_eq!(dropped.contains(&RequestOutput::DropPrefillCall), local_prefill);
        let first_index = owner.received.len() as u32;
        owner.decode_sends(Event::Tokens(DecodeTokens { first_index, tokens: vec![token(5)] }));
        let ended = owner.loses_decode();
        let RequestOutput::EndAttempt(ended) = &ended[0] else { panic!("{ended:?}") };
        // A decode node that prefills has the KV already.
        assert_eq!(ended.stats.moved_tokens, if local_prefill { 0 } else { 84 });
        assert_eq!(owner.core.requirements().moves_from, None);
    }
}

#[test]
fn answer_that_ends_soon_does_not_move() {
    let mut owner = decoding(MAX_TOKENS - 5);
    owner.core.handle_drain_check(owner.now, Some(Drain { grace: None, sends_kv: true }));
    assert_eq!(owner.outputs(), []);
}

#[test]
fn answers_migrate_at_different_times_in_the_first_half_of_the_drain() {
    let grace = Duration::from_secs(4);
    let left = |id: u128| {
        let mut owner = decoding(20);
        owner.core.spec.request_id = RequestId(id);
        let start = owner.now;
        assert!(!drains(&mut owner, grace).is_empty());
        owner.now - start
    };
    let times = [0, 128, 255].map(left);
    assert!(times.is_sorted() && times[0] < times[2], "{times:?}");
    assert!(times[2] <= grace / 2 + DRAIN_CHECK, "{times:?}");
}
