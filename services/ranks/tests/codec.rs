//! Round trips of plans and answers, rejection of malformed bytes, and bounds on sizes.

use std::sync::Arc;

use engine::{
    executor::{ExecutorLimits, Speculation},
    plan::{AdmittedRow, Dispatch, RowFailure, RowMask, RowPlan, RowResult, Slot, StepPlan},
};
use kernels::{
    BlockId,
    backend::ExpertLoad,
    sampling::{Pooling, SampledToken, Sampling, TokenLogprobs, TokenMask},
};
use proptest::{collection::vec, option, prelude::*};
use ranks::codec::{
    DecodeError, Failure, PlanHistory, RankAnswer, RankOrder, StepAnswer, WireResult,
    decode_answer, decode_order, encode_answer, encode_masks, encode_plan, encode_start,
    encode_stop,
};

fn sampling() -> impl Strategy<Value = Sampling> {
    let reals = (0.0..2.0_f32, 0.1..1.0_f32, 0.0..1.0_f32, 0.5..2.0_f32, -2.0..2.0_f32);
    let rest = (any::<u32>(), any::<u64>(), vec(any::<u32>(), 0..5), any::<u32>());
    let pooling =
        prop_oneof![Just(Pooling::Hidden), vec(any::<u32>(), 1..4).prop_map(Pooling::Logits),];
    let counts = (option::of(0..20_u32), option::of(0..20_u32), option::of(pooling));
    let logit_bias = vec((any::<u32>(), -100.0..100.0_f32), 0..4);
    let lists = (logit_bias, vec(any::<u32>(), 0..4), vec(vec(any::<u32>(), 1..4), 0..4));
    (reals, rest, counts, lists).prop_map(|(reals, rest, counts, lists)| Sampling {
        temperature: reals.0,
        top_k: rest.0,
        top_p: reals.1,
        min_p: reals.2,
        seed: rest.1,
        repetition_penalty: reals.3,
        presence_penalty: reals.4,
        frequency_penalty: -reals.4,
        stop_token_ids: rest.2,
        min_tokens: rest.3,
        logprobs: counts.0,
        prompt_logprobs: counts.1,
        pooling: counts.2,
        logit_bias: lists.0,
        allowed_token_ids: lists.1,
        bad_words: lists.2,
    })
}

fn blocks() -> impl Strategy<Value = Vec<BlockId>> {
    vec(any::<u32>().prop_map(BlockId), 0..20)
}

fn admitted() -> impl Strategy<Value = AdmittedRow> {
    let numbers = (any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>(), any::<bool>());
    (numbers, vec(any::<u32>(), 0..300), blocks(), sampling()).prop_map(
        |(numbers, tokens, blocks, sampling)| AdmittedRow {
            slot: Slot(numbers.0),
            generation: numbers.1,
            tokens,
            prompt_len: numbers.2,
            computed: numbers.3,
            blocks,
            sampling,
            constrained: numbers.4,
            adapter: None,
        },
    )
}

fn row() -> impl Strategy<Value = RowPlan> {
    let numbers = (any::<u32>(), any::<u32>(), 0..1_u32 << 24, any::<bool>(), 0..128_u32);
    numbers.prop_map(|(slot, generation, token_count, samples, drafts_max)| RowPlan {
        slot: Slot(slot),
        generation,
        token_count,
        samples,
        drafts_max,
    })
}

fn mask() -> impl Strategy<Value = RowMask> {
    (any::<u32>(), any::<u32>(), vec(any::<u32>(), 0..40)).prop_map(|(slot, length, words)| {
        let vocabulary = words.len() as u32 * 32;
        RowMask { slot: Slot(slot), length, allowed: Arc::new(TokenMask::new(words, vocabulary)) }
    })
}

fn plan() -> impl Strategy<Value = StepPlan> {
    let lists = (
        vec(any::<u32>().prop_map(Slot), 0..5),
        vec(admitted(), 0..3),
        vec((any::<u32>().prop_map(Slot), blocks()), 0..5),
        vec(row(), 0..20),
        any::<bool>(),
        vec((any::<u32>().prop_map(Slot), vec(any::<u32>(), 0..9)), 0..3),
        vec(any::<(u32, u32)>().prop_map(|(from, to)| (BlockId(from), BlockId(to))), 0..5),
    );
    (any::<u64>(), any::<u32>(), lists).prop_map(|(step_id, drafts_max, lists)| StepPlan {
        step_id,
        released: lists.0,
        admitted: lists.1,
        extended: lists.2,
        rows: lists.3,
        awaits_masks: lists.4,
        drafts: lists.5,
        copies: lists.6,
        drafts_max,
    })
}

fn failure() -> impl Strategy<Value = RowFailure> {
    prop_oneof![
        ".{0,20}".prop_map(|reason| RowFailure::Sampling { reason }),
        ".{0,20}".prop_map(|reason| RowFailure::Logits { reason }),
    ]
}

fn logprobs() -> impl Strategy<Value = TokenLogprobs> {
    let top = vec((any::<u32>(), -50.0..0.0_f32), 0..6);
    (-50.0..0.0_f32, top, option::of(any::<u32>())).prop_map(|(chosen, top, rank)| TokenLogprobs {
        chosen,
        top,
        rank,
    })
}

fn token() -> impl Strategy<Value = SampledToken> {
    let pooled = vec(-9.0..9.0_f32, 0..6).prop_map(Vec::into_boxed_slice);
    (any::<u32>(), option::of(logprobs()), option::of(pooled))
        .prop_map(|(id, logprobs, pooled)| SampledToken { id, logprobs, pooled })
}

fn answer() -> impl Strategy<Value = RankAnswer> {
    let numbers = (any::<u32>(), any::<u32>(), any::<u32>());
    let row = (numbers, vec(token(), 0..4), vec(logprobs(), 0..4), option::of(failure())).prop_map(
        |((slot, generation, drafted), tokens, prompt_logprobs, failure)| RowResult {
            slot: Slot(slot),
            generation,
            tokens,
            prompt_logprobs,
            drafted,
            failure,
        },
    );
    let dispatch = prop_oneof![
        Just(Dispatch::Eager),
        any::<u32>().prop_map(|rows| Dispatch::Graph { rows }),
        Just(Dispatch::Fallback),
    ];
    let result = (
        vec(row, 0..20),
        any::<u64>(),
        dispatch,
        any::<u64>(),
        option::of(any::<(u64, u64)>()),
        option::of(any::<u64>()),
    )
        .prop_map(|it| WireResult {
            rows: it.0,
            busy_nanos: it.1,
            dispatch: it.2,
            uploaded_bytes: it.3,
            experts: ExpertLoad { layers: it.1, distinct: it.3, ..ExpertLoad::default() },
            device_nanos: it.4,
            results_nanos: it.5,
        });
    let speculation = any::<([u32; 4], bool)>().prop_map(|(it, uniform)| Speculation {
        row_drafts: it[0],
        step_tokens: it[1],
        ngram_min: it[2],
        ngram_max: it[3],
        uniform,
    });
    prop_oneof![
        (
            any::<[u32; 6]>(),
            option::of(speculation),
            vec(any::<u8>(), 0..40),
            any::<Option<bool>>()
        )
            .prop_map(|(it, speculation, ready_message, updates_in_place)| {
                let limits = ExecutorLimits {
                    slots: it[0],
                    step_tokens: it[1],
                    sequence_tokens: it[2],
                    blocks: it[3],
                    depth: it[4],
                    vocabulary: it[5],
                    speculation,
                };
                RankAnswer::Ready { limits, updates_in_place, ready_message }
            }),
        (any::<[u64; 3]>(), option::of(result)).prop_map(|(it, result)| {
            RankAnswer::Step(StepAnswer { step_id: it[0], state: it[1], tokens: it[2], result })
        }),
        any::<u64>().prop_map(|step_id| RankAnswer::MasksDue { step_id }),
        any::<u64>().prop_map(|state| RankAnswer::WeightsChanged { state }),
        ".{0,40}".prop_map(|reason| RankAnswer::Failed(Failure::Stopped { reason })),
        (any::<u64>(), ".{0,40}")
            .prop_map(|(step_id, reason)| RankAnswer::Failed(Failure::BadPlan { step_id, reason })),
    ]
}

/// Decodes `bytes` as the first message of a group.
fn decoded(bytes: &[u8]) -> Result<RankOrder, DecodeError> {
    decode_order(bytes, &mut PlanHistory::default())
}

proptest! {
    #[test]
    fn plan_round_trip_preserves_plan_and_hash(plans in vec((plan(), any::<bool>()), 1..5)) {
        let (mut writer, mut reader) = (PlanHistory::default(), PlanHistory::default());
        let (mut bytes, mut rows) = (vec![7; 3], Vec::new());
        for (mut plan, repeats) in plans {
            if repeats {
                plan.rows.clone_from(&rows);
            }
            rows.clone_from(&plan.rows);
            let before = reader.clone();
            encode_plan(&plan, &mut writer, &mut bytes);
            let state = writer.state();
            let order = decode_order(&bytes, &mut reader).unwrap();
            prop_assert_eq!(order, RankOrder::Plan { plan, state, found: state });
            prop_assert_eq!(&reader, &writer);
            // A plan that is read twice or after another history has another hash.
            for mut other in [reader.clone(), PlanHistory::default()] {
                if other != before {
                    let Ok(RankOrder::Plan { found, .. }) = decode_order(&bytes, &mut other) else {
                        panic!("a plan decodes after any history")
                    };
                    prop_assert_ne!(found, state);
                }
            }
        }
    }

    #[test]
    fn masks_round_trip_preserves_masks_and_hash(
        plan in plan(),
        masks in vec(mask(), 0..3),
        step_id in any::<u64>(),
    ) {
        let (mut writer, mut reader) = (PlanHistory::default(), PlanHistory::default());
        let mut bytes = Vec::new();
        encode_plan(&plan, &mut writer, &mut bytes);
        prop_assert!(decode_order(&bytes, &mut reader).is_ok());
        encode_masks(step_id, &masks, &mut writer, &mut bytes);
        let state = writer.state();
        let order = decode_order(&bytes, &mut reader).unwrap();
        prop_assert_eq!(order, RankOrder::Masks { step_id, masks, state, found: state });
        prop_assert_eq!(&reader, &writer);
        let Ok(RankOrder::Masks { found, .. }) = decoded(&bytes) else {
            panic!("masks decode after any history")
        };
        prop_assert_ne!(found, state);
    }

    #[test]
    fn answer_round_trip_preserves_answer(answer in answer()) {
        prop_assert_eq!(decode_answer(&encode_answer(&answer)).unwrap(), answer);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..300)) {
        let _ = (decoded(&bytes), decode_answer(&bytes));
    }

    #[test]
    fn truncated_or_extended_messages_are_rejected_and_changed_bytes_never_panic(
        plan in plan(),
        answer in answer(),
        cut in any::<prop::sample::Index>(),
        change in 1..=u8::MAX,
    ) {
        let mut order = Vec::new();
        let mut history = PlanHistory::default();
        encode_plan(&plan, &mut history, &mut order);
        let state = history.state();
        let answer = encode_answer(&answer);
        for (bytes, decode) in [
            (order, (|bytes| decoded(bytes).map(drop)) as fn(&[u8]) -> Result<(), _>),
            (answer, |bytes| decode_answer(bytes).map(drop)),
        ] {
            let at = cut.index(bytes.len());
            prop_assert!(decode(&bytes[..at]).is_err());
            prop_assert!(decode(&[&bytes[..], &[0]].concat()).is_err());
            let mut changed = bytes.clone();
            changed[at] ^= change;
            let _ = decode(&changed);
            if let Ok(RankOrder::Plan { state: stated, found, .. }) = decoded(&changed) {
                prop_assert!(stated != found || stated == state);
            }
        }
    }
}

#[test]
fn start_and_stop_round_trip_and_an_unknown_kind_is_rejected() {
    assert_eq!(decoded(&encode_start(b"told")), Ok(RankOrder::Start(b"told".to_vec())));
    assert_eq!(decoded(&encode_stop()), Ok(RankOrder::Stop));
    let error = decoded(&[9]).unwrap_err();
    assert_eq!(error, DecodeError::Kind { kind: 9 });
    assert_eq!(error.to_string(), "unknown message kind: 9");
    let end = DecodeError::Malformed(postcard::Error::DeserializeUnexpectedEnd);
    assert_eq!(decoded(&[]), Err(end));
    assert_eq!(decoded(&[2, 0]), Err(DecodeError::TrailingBytes { bytes: 1 }));
}

#[test]
fn length_prefix_beyond_the_message_is_rejected_without_allocating_it() {
    // Kind, hash, step_id and drafts_max.
    let head = [&[1], &[0; 8][..], &[0, 0]].concat();
    let many = [0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
    // The lists in the order of the message: drafts, rows, released, admitted, extended. Each case
    // gives the bytes between the head and its list.
    let before: [&[u8]; 5] = [&[], &[0, 0, 1], &[0; 3], &[0; 4], &[0; 5]];
    for (list, before) in before.iter().enumerate() {
        let bytes = [&head, *before, &many].concat();
        let end = DecodeError::Malformed(postcard::Error::DeserializeUnexpectedEnd);
        assert_eq!(decoded(&bytes), Err(end), "list {list}");
    }
}

#[test]
fn mask_of_partial_words_is_rejected() {
    // One mask of slot 0 and length 0 with three bytes.
    let bytes = [&[3], &[0; 8][..], &[0, 1, 0, 0, 3, 7, 7, 7]].concat();
    assert!(matches!(decoded(&bytes), Err(DecodeError::Malformed(_))));
}

#[test]
fn decode_step_of_256_rows_takes_at_most_300_bytes_with_the_rows_of_the_step_before() {
    let rows = (0..256).map(|slot| RowPlan {
        slot: Slot(slot),
        generation: 1_000 + slot,
        token_count: 1,
        samples: true,
        drafts_max: 0,
    });
    let plan = StepPlan {
        step_id: 1 << 40,
        rows: rows.collect(),
        // One row of sixteen begins a block.
        extended: (0..16).map(|slot| (Slot(slot), vec![BlockId(70_000 + slot)])).collect(),
        ..StepPlan::default()
    };
    let mut bytes = Vec::new();
    let mut history = PlanHistory::default();
    encode_plan(&plan, &mut history, &mut bytes);
    assert!(bytes.len() <= 4_200, "{}", bytes.len());
    encode_plan(&plan, &mut history, &mut bytes);
    assert!(bytes.len() <= 300, "repeated rows: {}", bytes.len());
    // Every row begins a block.
    let extended = (0..256).map(|slot| (Slot(slot), vec![BlockId(slot)])).collect();
    encode_plan(&StepPlan { extended, ..plan }, &mut PlanHistory::default(), &mut bytes);
    assert!(bytes.len() <= 2 * 4_200, "{}", bytes.len());
}
