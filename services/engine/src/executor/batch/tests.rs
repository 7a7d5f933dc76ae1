use super::*;
use crate::executor::Speculation;

const LIMITS: ExecutorLimits = ExecutorLimits {
    slots: 2,
    step_tokens: 8,
    sequence_tokens: 64,
    blocks: 4,
    depth: 2,
    vocabulary: 100,
    speculation: Some(Speculation {
        row_drafts: 4,
        step_tokens: 8,
        ngram_min: 1,
        ngram_max: 1,
        uniform: false,
    }),
};

fn admitted(tokens: usize, computed: u32) -> AdmittedRow {
    AdmittedRow {
        slot: Slot(0),
        generation: 3,
        tokens: (0..tokens as u32).collect(),
        prompt_len: tokens as u32,
        computed,
        blocks: vec![BlockId(1)],
        sampling: Sampling::greedy(),
        constrained: false,
        adapter: None,
    }
}

fn row(token_count: u32, samples: bool) -> RowPlan {
    RowPlan { slot: Slot(0), generation: 3, token_count, samples, drafts_max: 0 }
}

fn plan(admitted: Vec<AdmittedRow>, rows: Vec<RowPlan>) -> StepPlan {
    StepPlan { step_id: 5, admitted, rows, ..StepPlan::default() }
}

fn apply(batch: &mut Batch, plan: &StepPlan) -> Result<Vec<ScheduledRow>, ExecutorError> {
    batch.apply(plan, |_| None, |_, _| panic!("no drafts are planned"))
}

fn token(id: u32) -> Result<SampledToken, RowFailure> {
    Ok(SampledToken { id, logprobs: None, pooled: None })
}

fn ids(result: &RowResult) -> Vec<u32> {
    result.tokens.iter().map(|token| token.id).collect()
}

/// Returns a step of a row with six tokens and at most two draft tokens after them.
fn drafting(drafts: &[u32]) -> (Batch, ScheduledRow) {
    let mut batch = Batch::new(LIMITS);
    let plan = StepPlan {
        drafts_max: 2,
        ..plan(vec![admitted(6, 0)], vec![RowPlan { drafts_max: 8, ..row(6, true) }])
    };
    let scheduled = batch.apply(
        &plan,
        |_| None,
        |_, most| {
            assert_eq!(most, 2, "the step's bound is below the row's");
            drafts.to_vec()
        },
    );
    let scheduled = scheduled.expect("fits")[0];
    assert_eq!(scheduled.token_count, 6 + drafts.len());
    assert_eq!(scheduled.sampled_lengths(), 6..7 + drafts.len());
    (batch, scheduled)
}

#[test]
fn draft_tokens_are_accepted_up_to_the_first_wrong_one_and_one_token_follows() {
    let draws = [
        (vec![50, 51], [60, 61, 62], vec![60]),
        (vec![50, 51], [50, 61, 62], vec![50, 61]),
        (vec![50, 51], [50, 51, 62], vec![50, 51, 62]),
        (vec![50], [50, 61, 62], vec![50, 61]),
        (vec![], [60, 61, 62], vec![60]),
    ];
    for (drafts, answers, kept) in draws {
        let (mut batch, scheduled) = drafting(&drafts);
        let result = batch.sampled(&scheduled, answers.map(token));
        assert_eq!((ids(&result), result.drafted), (kept.clone(), drafts.len() as u32));
        let occupant = batch.row(Slot(0));
        assert_eq!(occupant.tokens[6..], kept);
        assert_eq!(
            occupant.position,
            6 + kept.len() - 1,
            "the KV of the last token is not computed"
        );
        // The next step continues after the kept tokens.
        let next = apply(&mut batch, &plan(vec![], vec![row(1, true)])).expect("fits");
        assert_eq!((next[0].start, next[0].token_count), (6 + kept.len() - 1, 1));
    }
}

#[test]
fn a_failure_after_accepted_drafts_recurs_and_one_after_a_rejected_draft_does_not() {
    let nonsense = || Err(RowFailure::Logits { reason: "NaN".into() });
    let (mut batch, scheduled) = drafting(&[50, 51]);
    let result = batch.sampled(&scheduled, [token(50), nonsense(), token(1)]);
    assert_eq!((ids(&result), result.failure), (vec![50], None));
    let next = apply(&mut batch, &plan(vec![], vec![row(1, true)])).expect("fits");
    assert_eq!(next[0].start, 6, "the draft is computed again, as the last known token");
    let result = batch.sampled(&next[0], [nonsense()]);
    assert!(result.failure.is_some());

    let (mut batch, scheduled) = drafting(&[50, 51]);
    let result = batch.sampled(&scheduled, [token(60), nonsense(), nonsense()]);
    assert_eq!((ids(&result), result.failure), (vec![60], None));
}

#[test]
fn positions_advance_and_sampled_tokens_are_inputs_of_the_next_step() {
    let mut batch = Batch::new(LIMITS);
    let first = apply(&mut batch, &plan(vec![admitted(6, 0)], vec![row(4, false)])).expect("fits");
    assert_eq!((first[0].start, first[0].end()), (0, 4));
    let sampling = apply(&mut batch, &plan(vec![], vec![row(2, true)])).expect("fits");
    batch.sampled(&sampling[0], [token(42)]);
    let third = apply(&mut batch, &plan(vec![], vec![row(1, true)])).expect("fits");
    assert_eq!((third[0].start, third[0].token_count), (6, 1));
    assert_eq!(batch.row(Slot(0)).tokens[6], 42);
}

#[test]
fn a_plan_that_contradicts_the_batch_is_rejected_with_the_reason() {
    let contradictions = [
        (plan(vec![admitted(6, 6)], vec![row(1, true)]), "6 of them computed"),
        (plan(vec![admitted(6, 0)], vec![row(6, false)]), "must sample after its last token"),
        (plan(vec![admitted(6, 0)], vec![row(7, true)]), "tokens 0..7 of 6"),
        (plan(vec![admitted(6, 0)], vec![row(9, true)]), "1 rows with 9 tokens"),
        (plan(vec![admitted(6, 0)], vec![]), "0 rows"),
        (plan(vec![admitted(20, 15)], vec![row(5, true)]), "position 20 with 1 blocks"),
        (plan(vec![admitted(200, 0)], vec![row(5, false)]), "200 tokens (at most 64)"),
        (plan(vec![], vec![row(1, true)]), "planned but empty"),
        (
            StepPlan { drafts_max: 3, ..plan(vec![admitted(6, 0)], vec![row(6, true)]) },
            "6 tokens and 3 draft tokens",
        ),
        (
            plan(vec![admitted(6, 0)], vec![RowPlan { drafts_max: 1, ..row(5, false) }]),
            "does not sample",
        ),
        (
            plan(vec![admitted(6, 0)], vec![RowPlan { drafts_max: 11, ..row(6, true) }]),
            "position 17 with 1 blocks",
        ),
        (plan(vec![admitted(6, 0), admitted(6, 0)], vec![row(1, false)]), "occupied"),
        (plan(vec![admitted(6, 0)], vec![row(1, false); 2]), "planned twice"),
        (
            StepPlan {
                extended: vec![(Slot(0), vec![BlockId(2)]); 2],
                ..plan(vec![admitted(6, 0)], vec![row(1, false)])
            },
            "extended twice",
        ),
        (
            StepPlan { released: vec![Slot(1)], ..plan(vec![], vec![row(1, true)]) },
            "slot 1 is released but empty",
        ),
        (
            StepPlan {
                extended: vec![(Slot(0), vec![BlockId(4)])],
                ..plan(vec![admitted(6, 0)], vec![row(1, false)])
            },
            "invalid block 4; expected less than 4",
        ),
    ];
    for (plan, reason) in contradictions {
        let error = apply(&mut Batch::new(LIMITS), &plan).expect_err(reason).to_string();
        assert!(error.contains(reason), "{error}");
        assert!(error.contains("step 5"), "{error}");
    }
}

#[test]
fn a_failed_row_takes_no_part_until_it_is_released() {
    let mut batch = Batch::new(LIMITS);
    let first = apply(&mut batch, &plan(vec![admitted(6, 0)], vec![row(6, true)])).expect("fits");
    let failure = RowFailure::Sampling { reason: "all masked".into() };
    let result = batch.sampled(&first[0], [Err(failure.clone())]);
    assert_eq!(result.failure, Some(failure.clone()));
    // The next step was launched before the failure was known.
    let second = apply(&mut batch, &plan(vec![], vec![row(1, true)])).expect("is skipped");
    assert_eq!((second[0].token_count, second[0].samples), (0, false));
    assert_eq!(batch.unsampled(&second[0]).failure, Some(failure));
    let again =
        StepPlan { released: vec![Slot(0)], ..plan(vec![admitted(6, 0)], vec![row(6, true)]) };
    assert_eq!(apply(&mut batch, &again).expect("fits")[0].token_count, 6);
}

#[test]
fn a_constrained_row_samples_with_its_bitmask_only() {
    let constrained = || AdmittedRow { constrained: true, ..admitted(6, 0) };
    let mask = |slot, length| {
        let allowed = Arc::new(TokenMask::new(vec![1], LIMITS.vocabulary));
        RowMask { slot: Slot(slot), length, allowed }
    };
    let whole = StepPlan { awaits_masks: true, ..plan(vec![constrained()], vec![row(6, true)]) };
    let supplied = |masks| {
        let mut batch = Batch::new(LIMITS);
        let mut scheduled = apply(&mut batch, &whole).expect("fits");
        batch.supply(&mut scheduled, masks)?;
        let row = batch.row(Slot(0));
        Ok::<_, String>((!row.allowed.is_empty(), row.position, scheduled[0].is_late))
    };
    assert_eq!(supplied(vec![mask(0, 6)]), Ok((true, 6, false)));
    assert_eq!(supplied(vec![]), Ok((false, 5, true)));
    for masks in [vec![mask(0, 5)], vec![mask(1, 6)], vec![mask(0, 6), mask(0, 6)]] {
        assert!(supplied(masks).is_err());
    }
    let unannounced = StepPlan { awaits_masks: false, ..whole.clone() };
    let error = apply(&mut Batch::new(LIMITS), &unannounced).expect_err("no masks will come");
    assert!(error.to_string().contains("awaits no bitmasks"), "{error}");
    // A row does not sample before its last known token.
    let chunk = plan(vec![constrained()], vec![row(4, false)]);
    assert_eq!(apply(&mut Batch::new(LIMITS), &chunk).expect("fits")[0].token_count, 4);
}

#[test]
fn a_constrained_row_verifies_the_draft_tokens_of_the_plan_up_to_its_last_bitmask() {
    let planned = |known: Vec<u32>| StepPlan {
        awaits_masks: true,
        drafts_max: 2,
        drafts: vec![(Slot(0), known)],
        ..plan(
            vec![AdmittedRow { constrained: true, ..admitted(6, 0) }],
            vec![RowPlan { drafts_max: 2, ..row(6, true) }],
        )
    };
    let mask = |length| {
        let allowed = Arc::new(TokenMask::new(vec![u32::MAX; 4], LIMITS.vocabulary));
        RowMask { slot: Slot(0), length, allowed }
    };
    // The model agrees with both draft tokens.
    let answers = [7, 8, 9].map(|id| Ok(SampledToken { id, logprobs: None, pooled: None }));
    for (masks, tokens) in [(3, 3), (2, 2), (1, 1), (0, 0)] {
        let mut batch = Batch::new(LIMITS);
        let mut scheduled = apply(&mut batch, &planned(vec![7, 8])).expect("fits");
        assert_eq!((scheduled[0].token_count, scheduled[0].draft_count), (8, 2));
        batch.supply(&mut scheduled, (6..6 + masks).map(mask).collect()).expect("in order");
        assert_eq!(scheduled[0].is_late, masks == 0);
        if masks > 0 {
            let result = batch.sampled(&scheduled[0], answers.clone());
            assert_eq!((result.tokens.len(), result.drafted), (tokens, 2));
        }
        let row = batch.row(Slot(0));
        let position = if masks == 0 { 5 } else { 5 + tokens };
        assert_eq!((row.tokens.len(), row.position), (6 + tokens, position), "{masks} masks");
    }
    let mut batch = Batch::new(LIMITS);
    let mut scheduled = apply(&mut batch, &planned(vec![7, 8])).expect("fits");
    let error = batch.supply(&mut scheduled, vec![mask(6), mask(8)]).expect_err("has a gap");
    assert_eq!(error, "slot 0 has 7 tokens, but a bitmask for 8");
    let of = |known| StepPlan { drafts: known, ..planned(vec![]) };
    for (plan, reason) in [
        (of(vec![(Slot(0), vec![7, 8, 9])]), "has 3 draft tokens; expected at most 2"),
        (of(vec![(Slot(0), vec![7])]), "slot 0 has 1 draft tokens in the plan; expected 2"),
        (of(vec![(Slot(0), vec![7, 100])]), "draft token 100, outside the vocabulary"),
        (of(vec![]), "slot 0 has 0 draft tokens in the plan; expected 2"),
    ] {
        let error = apply(&mut Batch::new(LIMITS), &plan).expect_err(reason).to_string();
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn a_row_of_an_earlier_occupant_is_rejected() {
    let mut batch = Batch::new(LIMITS);
    apply(&mut batch, &plan(vec![admitted(6, 0)], vec![row(1, false)])).expect("fits");
    let stale = RowPlan { generation: 2, ..row(1, false) };
    assert!(apply(&mut batch, &plan(vec![], vec![stale])).is_err());
}
