//! Checks every field of a router's call.
//!
//! Each refusal names the field, its value and the expected values.

use std::{
    fmt,
    time::{Duration, Instant},
};

use cluster::NodeId;
use engine::event::{NewSequence, SequenceId, SequenceKind, SessionHint};
use grammar::{
    Alternative, CallSyntax, CallableTool, FreeText, Grammar, ParameterSyntax, ReasoningTags,
    ToolCalls,
};
use kernels::sampling::{
    LISTED_TOKENS_MAX, LOGIT_BIAS_MAX, LOGIT_BIASES_MAX, POOLED_LOGITS_MAX, Pooling,
    STOP_TOKENS_MAX, Sampling,
};
use kv_transfer::api::{Epoch, PeerAddress};
use proto::{ids::bits, v1};
use xxhash_rust::xxh3::xxh3_128;

use crate::node_core::Refusal;

/// Maximum remaining time of an attempt in ms: a day. A router's own limit is lower.
const REMAINING_MS_MAX: u64 = 86_400_000;
const CACHE_SALT_BYTES_MAX: usize = 256;
const SESSION_BYTES_MAX: usize = 256;
/// Maximum time for which a client may ask to keep KV: ten minutes. KV is evicted earlier when its
/// memory is needed.
const KEEP_MS_MAX: u64 = 600_000;
const ENDPOINT_BYTES_MAX: usize = 262;
const LOGPROBS_MAX: u32 = 20;
/// Maximum log-probabilities of a prompt: those of its tokens, and the best ones in the place of
/// each. They take about 12 bytes each in the message of token 0.
const PROMPT_LOGPROBS_MAX: u64 = 1 << 18;
/// Version of [`v1::Sampling`] that nodes support, as announced in their records.
pub const SAMPLING_VERSION: u32 = 1;
/// Upper bound of temperature and repetition penalty, far above useful values.
const SAMPLING_MAGNITUDE_MAX: f32 = 100.0;
/// Maximum absolute value of a penalty, as in OpenAI's API.
const PENALTY_MAX: f32 = 2.0;

/// Bounds of the attempts at this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttemptLimits {
    pub epoch: Epoch,
    pub vocabulary_size: u32,
    pub prompt_tokens_max: u32,
    pub sequence_tokens_max: u32,
    /// Whether the executor returns pooled values.
    pub pooling: bool,
}

/// One attempt at a request, with checked fields.
#[derive(Clone, Debug)]
pub struct NewAttempt {
    pub request_id: u128,
    /// The weights that the router expects. The engine thread compares them with the weights in
    /// use.
    pub weight_version: u64,
    /// Sequence for the scheduler, without the constraint that is compiled from `grammar` later.
    pub sequence: NewSequence,
    /// Content hash of the adapter; `None`: the base model.
    pub adapter: Option<u128>,
    /// The grammar of structured output.
    pub grammar: Option<Grammar>,
    /// The other end of the transfer; `None`: this node prefills and decodes.
    pub peer: Option<PeerAddress>,
    /// The caller's W3C trace context; empty when there is none.
    pub traceparent: String,
}

impl NewAttempt {
    /// Checks a `Prefill` call.
    pub fn send(
        request: v1::PrefillRequest,
        traceparent: String,
        limits: &AttemptLimits,
        now: Instant,
    ) -> Result<Self, Refusal> {
        let peer = request.decode.ok_or_else(|| missing("decode"))?;
        let peer = checked_peer(peer, "decode", limits)?;
        let mut attempt =
            Self::checked(request.attempt, SequenceKind::Send, traceparent, limits, now)?;
        attempt.peer = Some(peer);
        Ok(attempt)
    }

    /// Checks a `Decode` call.
    pub fn receive_or_compute(
        request: v1::DecodeRequest,
        traceparent: String,
        limits: &AttemptLimits,
        now: Instant,
    ) -> Result<Self, Refusal> {
        let peer = request.prefill.map(|peer| checked_peer(peer, "prefill", limits)).transpose()?;
        let kind = if peer.is_some() { SequenceKind::Receive } else { SequenceKind::Compute };
        let mut attempt = Self::checked(request.attempt, kind, traceparent, limits, now)?;
        attempt.peer = peer;
        Ok(attempt)
    }

    /// Returns the id that engine and transfers share.
    pub fn id(&self) -> SequenceId {
        self.sequence.id
    }

    /// Returns the xxh3-128 hash of the token ids and of the adapter's content hash, which both ends
    /// of a transfer compare.
    pub fn prompt_hash(&self) -> u128 {
        let adapter = self.adapter.map(u128::to_le_bytes);
        let tokens = self.sequence.tokens.iter().flat_map(|token| token.to_le_bytes());
        let bytes: Vec<u8> = adapter.into_iter().flatten().chain(tokens).collect();
        xxh3_128(&bytes)
    }

    fn checked(
        attempt: Option<v1::Attempt>,
        kind: SequenceKind,
        traceparent: String,
        limits: &AttemptLimits,
        now: Instant,
    ) -> Result<Self, Refusal> {
        let attempt = attempt.ok_or_else(|| missing("attempt"))?;
        let request_id = id("attempt.request_id", &attempt.request_id)?;
        let transfer_id = id("attempt.transfer_id", &attempt.transfer_id)?;
        let named = Epoch(id("attempt.node_epoch", &attempt.node_epoch)?);
        if named != limits.epoch {
            return Err(Refusal::OtherEpoch { named, own: limits.epoch });
        }
        check_tokens(&attempt, limits)?;
        let remaining_ms = attempt.remaining_ms;
        if remaining_ms == 0 {
            return Err(Refusal::Deadline);
        }
        within("attempt.remaining_ms", remaining_ms, 1, REMAINING_MS_MAX)?;
        let salt_bytes = attempt.cache_salt.len();
        if salt_bytes > CACHE_SALT_BYTES_MAX {
            let expected = format!("at most {CACHE_SALT_BYTES_MAX} bytes");
            return Err(invalid("attempt.cache_salt", format!("{salt_bytes} bytes"), expected));
        }
        let session = session_hint(&attempt)?;
        let adapter = match attempt.adapter.is_empty() {
            true => None,
            false => Some(id("attempt.adapter", &attempt.adapter)?),
        };
        let wire = attempt.sampling.ok_or_else(|| missing("attempt.sampling"))?;
        let (max_tokens, ignore_stop_tokens) = (wire.max_tokens, wire.ignore_stop_tokens);
        let emitted = attempt.tokens.len() as u32 - attempt.prompt_len;
        if max_tokens <= emitted {
            let expected = format!("more than the {emitted} emitted tokens");
            return Err(invalid("attempt.sampling.max_tokens", max_tokens, expected));
        }
        let sampling = checked_sampling(wire, limits)?;
        if let Some(count) = sampling.prompt_logprobs {
            let field = "attempt.sampling.prompt_logprobs";
            within(field, u64::from(count), 0, u64::from(LOGPROBS_MAX))?;
            let per_prompt = u64::from(attempt.prompt_len) * u64::from(1 + count);
            if per_prompt > PROMPT_LOGPROBS_MAX {
                let expected = format!("at most {PROMPT_LOGPROBS_MAX} in all");
                return Err(invalid(field, format!("{per_prompt} in all"), expected));
            }
        }
        let grammar = attempt.grammar.map(checked_grammar).transpose()?;
        Ok(Self {
            request_id,
            weight_version: attempt.weight_version,
            sequence: NewSequence {
                id: SequenceId(transfer_id),
                kind,
                tokens: attempt.tokens,
                prompt_len: attempt.prompt_len,
                sampling,
                max_tokens,
                ignore_stop_tokens,
                cache_salt: attempt.cache_salt,
                adapter: None,
                session,
                constraint: None,
                deadline: now + Duration::from_millis(remaining_ms),
            },
            adapter,
            grammar,
            peer: None,
            traceparent,
        })
    }
}

/// Returns the client's hints about the conversation. Sessions of different salts have different
/// numbers.
fn session_hint(attempt: &v1::Attempt) -> Result<SessionHint, Refusal> {
    let session = attempt.session.as_bytes();
    if session.len() > SESSION_BYTES_MAX {
        let expected = format!("at most {SESSION_BYTES_MAX} bytes");
        return Err(invalid("attempt.session", format!("{} bytes", session.len()), expected));
    }
    let keep_ms = attempt.keep_ms;
    keep_ms.map_or(Ok(()), |ms| within("attempt.keep_ms", ms, 0, KEEP_MS_MAX))?;
    let salt = attempt.cache_salt.as_bytes();
    let number = || xxh3_128(&[&salt.len().to_le_bytes(), salt, session].concat());
    Ok(SessionHint {
        session: (!session.is_empty()).then(number),
        keep: keep_ms.map(Duration::from_millis),
    })
}

/// Checks that the grammar has a kind. The compiler checks its text.
fn checked_grammar(wire: v1::Grammar) -> Result<Grammar, Refusal> {
    let grammar = match wire.kind.ok_or_else(|| missing("attempt.grammar.kind"))? {
        v1::grammar::Kind::JsonSchema(text) => Grammar::JsonSchema(text),
        v1::grammar::Kind::Regex(text) => Grammar::Regex(text),
        v1::grammar::Kind::ContextFree(text) => Grammar::ContextFree(text),
        v1::grammar::Kind::ToolCalls(calls) => Grammar::ToolCalls(tool_calls(calls)),
    };
    Ok(match wire.thought {
        None => grammar,
        Some(v1::Thought { open, close, before_answer, never_within }) => Grammar::AfterReasoning {
            tags: ReasoningTags { open, close, before_answer, never_within },
            grammar: Box::new(grammar),
        },
    })
}

/// Converts tool calls. The compiler checks their number and schemas.
fn tool_calls(wire: v1::ToolCalls) -> ToolCalls {
    use v1::tool_calls::Alternative as Wire;
    let tool = |function: v1::CallableFunction| CallableTool {
        name: function.name,
        arguments: function.arguments_schema,
    };
    let tag = wire.mark;
    let answer = |grammar| Alternative::Answer { grammar: Box::new(grammar), tag };
    ToolCalls {
        syntax: CallSyntax {
            before_name: wire.before_name,
            before_arguments: wire.before_arguments,
            after_arguments: wire.after_arguments,
            between: wire.between,
            begin: wire.begin,
            end: wire.end,
            bare_name: wire.bare_name,
            parameters: wire.parameters.map(|syntax| ParameterSyntax {
                before_name: syntax.before_name,
                before_value: syntax.before_value,
                after_value: syntax.after_value,
                between: syntax.between,
                text_end: syntax.text_end,
            }),
        },
        tools: wire.functions.into_iter().map(tool).collect(),
        several: wire.several,
        alternative: match wire.alternative {
            None => Alternative::Nothing,
            Some(Wire::Text(v1::FreeText { mark: tag, never_begins })) => {
                Alternative::Text(FreeText { tag, never_begins })
            }
            Some(Wire::JsonSchema(text)) => answer(Grammar::JsonSchema(text)),
            Some(Wire::Regex(text)) => answer(Grammar::Regex(text)),
        },
    }
}

fn check_tokens(attempt: &v1::Attempt, limits: &AttemptLimits) -> Result<(), Refusal> {
    let count = attempt.tokens.len() as u64;
    if count == 0 {
        return Err(invalid("attempt.tokens", "empty", "at least one token"));
    }
    // At least one position is left for a sampled token.
    let count_max = u64::from(limits.sequence_tokens_max.saturating_sub(1));
    if count > count_max {
        let expected = format!("at most {count_max} on this node");
        return Err(invalid("attempt.tokens", format!("{count} tokens"), expected));
    }
    let prompt_max = count.min(u64::from(limits.prompt_tokens_max));
    within("attempt.prompt_len", u64::from(attempt.prompt_len), 1, prompt_max)?;
    if let Some((index, token)) = outside_vocabulary(&attempt.tokens, limits) {
        let expected = format!("less than {} (vocabulary)", limits.vocabulary_size);
        return Err(invalid("attempt.tokens", format!("{token} at index {index}"), expected));
    }
    Ok(())
}

/// Returns the first token that the model does not know, with its index.
fn outside_vocabulary(tokens: &[u32], limits: &AttemptLimits) -> Option<(usize, u32)> {
    let index = tokens.iter().position(|token| *token >= limits.vocabulary_size)?;
    Some((index, tokens[index]))
}

fn checked_sampling(wire: v1::Sampling, limits: &AttemptLimits) -> Result<Sampling, Refusal> {
    const POSITIVE: f32 = f32::MIN_POSITIVE;
    for (field, value, min, max) in [
        ("temperature", wire.temperature, 0.0, SAMPLING_MAGNITUDE_MAX),
        ("top_p", wire.top_p, POSITIVE, 1.0),
        ("min_p", wire.min_p, 0.0, 1.0),
        ("repetition_penalty", wire.repetition_penalty, POSITIVE, SAMPLING_MAGNITUDE_MAX),
        ("presence_penalty", wire.presence_penalty, -PENALTY_MAX, PENALTY_MAX),
        ("frequency_penalty", wire.frequency_penalty, -PENALTY_MAX, PENALTY_MAX),
    ] {
        // No range contains NaN or an infinity.
        if !(min..=max).contains(&value) {
            let expected = match min {
                POSITIVE => format!("above 0 and at most {max}"),
                _ => format!("{min} to {max}"),
            };
            return Err(invalid(&format!("attempt.sampling.{field}"), value, expected));
        }
    }
    let (min, max) = (wire.min_tokens, wire.max_tokens);
    within("attempt.sampling.min_tokens", u64::from(min), 0, u64::from(max))?;
    if let Some(count) = wire.logprobs {
        within("attempt.sampling.logprobs", u64::from(count), 0, u64::from(LOGPROBS_MAX))?;
    }
    let stop_count = wire.stop_token_ids.len();
    if stop_count > STOP_TOKENS_MAX {
        let expected = format!("at most {STOP_TOKENS_MAX}");
        return Err(invalid(
            "attempt.sampling.stop_token_ids",
            format!("{stop_count} ids"),
            expected,
        ));
    }
    if let Some((_, token)) = outside_vocabulary(&wire.stop_token_ids, limits) {
        let expected = format!("less than {} (vocabulary)", limits.vocabulary_size);
        return Err(invalid("attempt.sampling.stop_token_ids", token, expected));
    }
    let pooling = wire.pooling.map(|pooling| checked_pooling(pooling, limits)).transpose()?;
    Ok(Sampling {
        temperature: wire.temperature,
        top_k: wire.top_k,
        top_p: wire.top_p,
        min_p: wire.min_p,
        seed: wire.seed,
        repetition_penalty: wire.repetition_penalty,
        presence_penalty: wire.presence_penalty,
        frequency_penalty: wire.frequency_penalty,
        stop_token_ids: wire.stop_token_ids,
        min_tokens: wire.min_tokens,
        logprobs: wire.logprobs,
        pooling,
        prompt_logprobs: wire.prompt_logprobs,
        logit_bias: checked_bias(&wire.logit_bias, limits)?,
        allowed_token_ids: checked_tokens("allowed_token_ids", wire.allowed_token_ids, limits)?,
        bad_words: checked_words(wire.bad_words, limits)?,
    })
}

/// Checks a list of tokens of the sampling parameters.
fn checked_tokens(
    name: &str,
    tokens: Vec<u32>,
    limits: &AttemptLimits,
) -> Result<Vec<u32>, Refusal> {
    let field = format!("attempt.sampling.{name}");
    if tokens.len() > LISTED_TOKENS_MAX {
        let expected = format!("at most {LISTED_TOKENS_MAX}");
        return Err(invalid(&field, format!("{} ids", tokens.len()), expected));
    }
    if let Some((_, token)) = outside_vocabulary(&tokens, limits) {
        let expected = format!("less than {} (vocabulary)", limits.vocabulary_size);
        return Err(invalid(&field, token, expected));
    }
    Ok(tokens)
}

fn checked_words(
    words: Vec<v1::TokenIds>,
    limits: &AttemptLimits,
) -> Result<Vec<Vec<u32>>, Refusal> {
    const NAME: &str = "bad_words";
    let words: Vec<Vec<u32>> = words.into_iter().map(|word| word.ids).collect();
    if words.iter().any(Vec::is_empty) {
        return Err(invalid(&format!("attempt.sampling.{NAME}"), "an empty word", "tokens"));
    }
    checked_tokens(NAME, words.concat(), limits)?;
    Ok(words)
}

fn checked_pooling(wire: v1::Pooling, limits: &AttemptLimits) -> Result<Pooling, Refusal> {
    let field = "attempt.sampling.pooling";
    if !limits.pooling {
        return Err(invalid(field, "present", "absent on a node with several ranks"));
    }
    let tokens = wire.logits;
    if tokens.len() > POOLED_LOGITS_MAX {
        let expected = format!("at most {POOLED_LOGITS_MAX}");
        return Err(invalid(&format!("{field}.logits"), format!("{} ids", tokens.len()), expected));
    }
    if let Some((_, token)) = outside_vocabulary(&tokens, limits) {
        let expected = format!("less than {} (vocabulary)", limits.vocabulary_size);
        return Err(invalid(&format!("{field}.logits"), token, expected));
    }
    Ok(match tokens.is_empty() {
        true => Pooling::Hidden,
        false => Pooling::Logits(tokens),
    })
}

fn checked_bias(
    biases: &[v1::TokenBias],
    limits: &AttemptLimits,
) -> Result<Vec<(u32, f32)>, Refusal> {
    const FIELD: &str = "attempt.sampling.logit_bias";
    if biases.len() > LOGIT_BIASES_MAX {
        let expected = format!("at most {LOGIT_BIASES_MAX}");
        return Err(invalid(FIELD, format!("{} tokens", biases.len()), expected));
    }
    let checked = |one: &v1::TokenBias| {
        if one.id >= limits.vocabulary_size {
            let expected = format!("less than {} (vocabulary)", limits.vocabulary_size);
            return Err(invalid(FIELD, one.id, expected));
        }
        // The range does not contain NaN.
        match (-LOGIT_BIAS_MAX..=LOGIT_BIAS_MAX).contains(&one.bias) {
            true => Ok((one.id, one.bias)),
            false => {
                Err(invalid(FIELD, one.bias, format!("-{LOGIT_BIAS_MAX} to {LOGIT_BIAS_MAX}")))
            }
        }
    };
    let checked = biases.iter().map(checked).collect::<Result<Vec<_>, _>>()?;
    let mut ids: Vec<u32> = checked.iter().map(|(id, _)| *id).collect();
    ids.sort_unstable();
    match ids.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(invalid(FIELD, format!("token {} twice", pair[0]), "each token once")),
        None => Ok(checked),
    }
}

/// Peers of one `Meet` call beyond this number are ignored.
const MEET_PEERS_MAX: usize = 64;

/// Checks a `Meet` call and returns the peers to connect to.
pub(crate) fn meet_peers(
    request: v1::MeetRequest,
    limits: &AttemptLimits,
) -> Result<Vec<PeerAddress>, Refusal> {
    check_epoch(&request.node_epoch, limits)?;
    let peers = request.peers.into_iter().take(MEET_PEERS_MAX);
    peers.map(|peer| checked_peer(peer, "peers", limits)).collect()
}

/// Rejects a call that is meant for another process at this address.
pub(crate) fn check_epoch(node_epoch: &[u8], limits: &AttemptLimits) -> Result<(), Refusal> {
    let named = Epoch(id("node_epoch", node_epoch)?);
    match named == limits.epoch {
        true => Ok(()),
        false => Err(Refusal::OtherEpoch { named, own: limits.epoch }),
    }
}

/// Checks a peer in the field `within` of a call.
fn checked_peer(
    peer: v1::Peer,
    within: &str,
    limits: &AttemptLimits,
) -> Result<PeerAddress, Refusal> {
    let field = |name: &str| format!("{within}.{name}");
    NodeId::parse(&peer.node_id).map_err(|_| {
        let expected = "1 to 64 ASCII letters, digits, '.', '_' and '-', first a letter or digit";
        invalid(&field("node_id"), shown(&peer.node_id), expected)
    })?;
    let epoch = Epoch(id(&field("epoch"), &peer.epoch)?);
    if epoch == limits.epoch {
        let expected = "the epoch of another process";
        return Err(invalid(&field("epoch"), epoch, expected));
    }
    let endpoint = &peer.control_endpoint;
    if endpoint.len() > ENDPOINT_BYTES_MAX || !is_tcp_endpoint(endpoint) {
        let expected = "tcp://host:port";
        return Err(invalid(&field("control_endpoint"), shown(endpoint), expected));
    }
    Ok(PeerAddress { node_id: peer.node_id, epoch, control_endpoint: peer.control_endpoint })
}

fn is_tcp_endpoint(text: &str) -> bool {
    let Some((host, port)) = text.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':'))
    else {
        return false;
    };
    // ZeroMQ can bind wildcards and interface names, but cannot connect to them.
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-:[]".contains(c);
    let port_is_one = port.parse::<u16>().is_ok_and(|port| port > 0);
    !host.is_empty() && host.chars().all(plain) && port_is_one
}

pub(crate) fn invalid(
    field: &str,
    value: impl fmt::Display,
    expected: impl Into<String>,
) -> Refusal {
    Refusal::Field { field: field.to_owned(), value: value.to_string(), expected: expected.into() }
}

fn missing(field: &str) -> Refusal {
    invalid(field, "absent", "a value")
}

/// Reads the 16 bytes of an id.
pub(crate) fn id(field: &str, bytes: &[u8]) -> Result<u128, Refusal> {
    let wrong = || invalid(field, format!("{} bytes", bytes.len()), "16 bytes");
    bits(bytes).ok_or_else(wrong)
}

pub(crate) fn within(field: &str, value: u64, min: u64, max: u64) -> Result<(), Refusal> {
    match (min..=max).contains(&value) {
        true => Ok(()),
        false => Err(invalid(field, value, format!("{min} to {max}"))),
    }
}

/// Quotes the first 80 characters of a caller's text on one line.
pub(crate) fn shown(text: &str) -> String {
    let start: String = text.chars().take(80).collect();
    let more = if start.len() < text.len() { "..." } else { "" };
    format!("{start:?}{more}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: AttemptLimits = AttemptLimits {
        epoch: Epoch(7),
        vocabulary_size: 100,
        prompt_tokens_max: 31,
        sequence_tokens_max: 32,
        pooling: true,
    };

    fn bytes(value: u128) -> bytes::Bytes {
        bytes::Bytes::copy_from_slice(&value.to_be_bytes())
    }

    #[test]
    fn peers_of_meet_are_validated_like_peers_of_attempts() {
        let peer = |epoch: u128, endpoint: &str| v1::Peer {
            node_id: "decode-1".into(),
            epoch: bytes(epoch),
            control_endpoint: endpoint.into(),
            ..v1::Peer::default()
        };
        let met = |node_epoch: u128, peers| {
            let request = v1::MeetRequest { node_epoch: bytes(node_epoch), peers, sends: false };
            meet_peers(request, &LIMITS).map_err(|refusal| refusal.to_string())
        };
        let good = || peer(9, "tcp://127.0.0.1:5555");
        let found = met(7, vec![good()]).unwrap();
        assert_eq!((found.len(), found[0].epoch), (1, Epoch(9)));
        assert_eq!(met(7, vec![good(); 100]).unwrap().len(), MEET_PEERS_MAX);
        for (peers, named) in [
            (vec![peer(7, "tcp://127.0.0.1:5555")], "peers.epoch"),
            (vec![good(), peer(9, "udp://127.0.0.1:5555")], "peers.control_endpoint"),
        ] {
            let refused = met(7, peers).unwrap_err();
            assert!(refused.contains(named), "{refused}");
        }
        assert!(met(8, vec![good()]).unwrap_err().contains("node_epoch"));
    }

    fn good() -> v1::PrefillRequest {
        v1::PrefillRequest {
            attempt: Some(v1::Attempt {
                request_id: bytes(1),
                transfer_id: bytes(2),
                tokens: vec![5, 6, 7, 8],
                prompt_len: 3,
                sampling: Some(v1::Sampling {
                    top_p: 1.0,
                    repetition_penalty: 1.0,
                    max_tokens: 8,
                    ..Default::default()
                }),
                remaining_ms: 1000,
                cache_salt: String::new(),
                session: String::new(),
                keep_ms: None,
                node_epoch: bytes(7),
                weight_version: 1,
                grammar: None,
                adapter: bytes::Bytes::new(),
            }),
            decode: Some(v1::Peer {
                node_id: "decode-0".into(),
                epoch: bytes(9),
                control_endpoint: "tcp://127.0.0.1:5555".into(),
                ..v1::Peer::default()
            }),
        }
    }

    fn check(request: v1::PrefillRequest) -> Result<NewAttempt, Refusal> {
        NewAttempt::send(request, String::new(), &LIMITS, Instant::now())
    }

    #[test]
    fn valid_attempt_is_accepted_unchanged() {
        let attempt = check(good()).unwrap();
        assert_eq!(attempt.request_id, 1);
        assert_eq!(attempt.id(), SequenceId(2));
        assert_eq!(attempt.sequence.kind, SequenceKind::Send);
        assert_eq!(attempt.sequence.tokens, [5, 6, 7, 8]);
    }

    #[test]
    fn prompt_hash_depends_only_on_tokens_and_adapter() {
        let hash = check(good()).unwrap().prompt_hash();
        let mut other = good();
        other.attempt.as_mut().unwrap().remaining_ms = 2000;
        assert_eq!(check(other.clone()).unwrap().prompt_hash(), hash);
        other.attempt.as_mut().unwrap().tokens[0] = 6;
        assert_ne!(check(other).unwrap().prompt_hash(), hash);
        let mut other = good();
        other.attempt.as_mut().unwrap().adapter = vec![9; 16].into();
        assert_ne!(check(other).unwrap().prompt_hash(), hash);
    }

    #[test]
    fn refusal_of_an_invalid_field_names_the_field() {
        type Spoil = fn(&mut v1::PrefillRequest, &mut v1::Attempt, &mut v1::Sampling);
        let cases: &[(&str, Spoil)] = &[
            ("attempt.request_id: 3 bytes", |_, a, _| a.request_id = vec![1, 2, 3].into()),
            ("attempt.adapter: 3 bytes", |_, a, _| a.adapter = vec![1, 2, 3].into()),
            ("attempt.transfer_id: 0 bytes", |_, a, _| a.transfer_id = vec![].into()),
            ("attempt.node_epoch: 17 bytes", |_, a, _| a.node_epoch = vec![0; 17].into()),
            ("node_epoch = ", |_, a, _| a.node_epoch = bytes(8)),
            ("attempt.tokens: empty", |_, a, _| a.tokens.clear()),
            ("attempt.tokens: 32 tokens", |_, a, _| a.tokens = vec![1; 32]),
            ("attempt.tokens: 100 at index 1", |_, a, _| a.tokens[1] = 100),
            ("attempt.prompt_len: 0", |_, a, _| a.prompt_len = 0),
            ("attempt.prompt_len: 5", |_, a, _| a.prompt_len = 5),
            ("deadline passed", |_, a, _| a.remaining_ms = 0),
            ("attempt.remaining_ms: 18446744073709551615", |_, a, _| a.remaining_ms = u64::MAX),
            ("attempt.cache_salt: 300 bytes", |_, a, _| a.cache_salt = "x".repeat(300)),
            ("attempt.session: 257 bytes; expected at most 256 bytes", |_, a, _| {
                a.session = "x".repeat(257);
            }),
            ("attempt.keep_ms: 600001", |_, a, _| a.keep_ms = Some(600_001)),
            ("attempt.sampling.max_tokens: 1", |_, _, s| s.max_tokens = 1),
            ("attempt.sampling.max_tokens: 0", |_, _, s| s.max_tokens = 0),
            ("attempt.sampling.min_tokens: 9", |_, _, s| s.min_tokens = 9),
            ("attempt.sampling.temperature: NaN", |_, _, s| s.temperature = f32::NAN),
            ("attempt.sampling.temperature: -1", |_, _, s| s.temperature = -1.0),
            ("attempt.sampling.top_p: 0", |_, _, s| s.top_p = 0.0),
            ("attempt.sampling.min_p: 2", |_, _, s| s.min_p = 2.0),
            ("attempt.sampling.repetition_penalty: 0", |_, _, s| s.repetition_penalty = 0.0),
            ("attempt.sampling.frequency_penalty: -50; expected -2 to 2", |_, _, s| {
                s.frequency_penalty = -50.0;
            }),
            ("attempt.sampling.presence_penalty: inf", |_, _, s| {
                s.presence_penalty = f32::INFINITY;
            }),
            ("attempt.sampling.frequency_penalty: -101", |_, _, s| {
                s.frequency_penalty = -101.0;
            }),
            ("attempt.sampling.logprobs: 21", |_, _, s| s.logprobs = Some(21)),
            ("attempt.sampling.prompt_logprobs: 21", |_, _, s| s.prompt_logprobs = Some(21)),
            ("attempt.sampling.logit_bias: 100; expected less than 100", |_, _, s| {
                s.logit_bias = vec![v1::TokenBias { id: 100, bias: 1.0 }];
            }),
            ("attempt.sampling.logit_bias: token 1 twice; expected each token once", |_, _, s| {
                s.logit_bias = vec![v1::TokenBias { id: 1, bias: 1.0 }; 2];
            }),
            ("attempt.sampling.logit_bias: 100.5; expected -100 to 100", |_, _, s| {
                s.logit_bias = vec![v1::TokenBias { id: 1, bias: 100.5 }];
            }),
            ("attempt.sampling.allowed_token_ids: 16385 ids; expected at most 16384", |_, _, s| {
                s.allowed_token_ids = vec![1; 16_385];
            }),
            ("attempt.sampling.bad_words: 100; expected less than 100", |_, _, s| {
                s.bad_words = vec![v1::TokenIds { ids: vec![1, 100] }];
            }),
            ("attempt.sampling.bad_words: an empty word", |_, _, s| {
                s.bad_words = vec![v1::TokenIds::default()];
            }),
            ("attempt.sampling.stop_token_ids: 2000 ids", |_, _, s| {
                s.stop_token_ids = vec![1; 2000];
            }),
            ("attempt.sampling.stop_token_ids: 100", |_, _, s| s.stop_token_ids = vec![100]),
            ("attempt.sampling.pooling.logits: 17 ids; expected at most 16", |_, _, s| {
                s.pooling = Some(v1::Pooling { logits: vec![1; 17] });
            }),
            ("attempt.sampling.pooling.logits: 100; expected less than 100", |_, _, s| {
                s.pooling = Some(v1::Pooling { logits: vec![1, 100] });
            }),
            ("decode: absent", |r, _, _| r.decode = None),
            ("decode.node_id: \"\"", |r, _, _| r.decode.as_mut().unwrap().node_id.clear()),
            ("decode.node_id: \"a b\"", |r, _, _| {
                r.decode.as_mut().unwrap().node_id = "a b".into();
            }),
            ("decode.epoch: 1 bytes", |r, _, _| {
                r.decode.as_mut().unwrap().epoch = vec![1].into();
            }),
            ("decode.epoch: 00000000000000000000000000000007", |r, _, _| {
                r.decode.as_mut().unwrap().epoch = bytes(7);
            }),
            ("attempt.grammar.kind: absent", |_, a, _| {
                a.grammar = Some(v1::Grammar::default());
            }),
            ("decode.control_endpoint: \"ipc:///tmp/x\"", |r, _, _| {
                r.decode.as_mut().unwrap().control_endpoint = "ipc:///tmp/x".into();
            }),
            ("decode.control_endpoint: \"tcp://*:5\"", |r, _, _| {
                r.decode.as_mut().unwrap().control_endpoint = "tcp://*:5".into();
            }),
            ("decode.control_endpoint: \"tcp://h:0\"", |r, _, _| {
                r.decode.as_mut().unwrap().control_endpoint = "tcp://h:0".into();
            }),
        ];
        for (message, spoil) in cases {
            let mut request = good();
            let mut attempt = request.attempt.take().unwrap();
            let mut sampling = attempt.sampling.take().unwrap();
            spoil(&mut request, &mut attempt, &mut sampling);
            attempt.sampling = Some(sampling);
            request.attempt = Some(attempt);
            let refusal = check(request).expect_err(message).to_string();
            assert!(refusal.contains(message), "{refusal:?} does not say {message:?}");
        }
    }

    #[test]
    fn node_that_returns_no_pooled_values_refuses_them() {
        let limits = AttemptLimits { pooling: false, ..LIMITS };
        let mut request = good();
        let sampling = request.attempt.as_mut().unwrap().sampling.as_mut().unwrap();
        sampling.pooling = Some(v1::Pooling::default());
        let request = v1::DecodeRequest { attempt: request.attempt, prefill: None };
        let check = |limits| {
            let now = Instant::now();
            NewAttempt::receive_or_compute(request.clone(), String::new(), limits, now)
        };
        let pooling = check(&LIMITS).unwrap().sequence.sampling.pooling;
        assert_eq!(pooling, Some(Pooling::Hidden));
        assert_eq!(
            check(&limits).unwrap_err().to_string(),
            "invalid attempt.sampling.pooling: present; expected absent on a node with several ranks"
        );
    }

    #[test]
    fn refusal_of_a_missing_message_names_the_field() {
        for (message, request) in [
            ("attempt: absent", v1::PrefillRequest { attempt: None, ..good() }),
            ("attempt.sampling: absent", {
                let mut request = good();
                request.attempt.as_mut().unwrap().sampling = None;
                request
            }),
        ] {
            assert!(check(request).unwrap_err().to_string().contains(message));
        }
    }
}
