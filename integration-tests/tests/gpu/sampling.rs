//! Choosing tokens: the CPU's choices, to the tie-break and the last bit of chance.

use kernels::{
    Backend, BlockId, Dtype, KvLayout,
    cpu::{SampleError, SampleRow, sample},
    cuda::{
        Admission, AttentionKind, BatchLimits, CudaBackend, CudaBuffer, DeviceBatch, DeviceClock,
        SampleOutcome, StepInput, StepRows,
    },
    sampling::{SampledToken, Sampling, TokenMask},
};

use super::bench::{Bench, Gpu, gpu, numbers};

struct Row {
    sampling: Sampling,
    tokens: Vec<u32>,
    prompt_len: usize,
    mask: Option<TokenMask>,
}

struct Place {
    cuda: CudaBackend,
    logits: CudaBuffer,
    batch: DeviceBatch,
}

const SLOTS: u32 = 40;

fn place(gpu: &Gpu, vocabulary: u32) -> Place {
    let (cuda, logits) = gpu.backend(Dtype::F32, AttentionKind::Plain, |backend| {
        backend.wide_buffer(SLOTS as usize, vocabulary as usize)
    });
    let layout = KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 8, dtype: Dtype::F32 };
    let limits = BatchLimits {
        slots: SLOTS,
        sequence_tokens: 256,
        rows: SLOTS,
        samples: SLOTS,
        stops: 4,
        vocabulary,
        depth: 1,
    };
    let batch = DeviceBatch::new(&cuda, gpu.kv(layout, 16).0, limits).unwrap();
    Place { cuda, logits, batch }
}

/// What the GPU chooses for rows over these logits.
fn chosen(place: &mut Place, rows: &[Row], logits: &[f32]) -> Vec<SampleOutcome> {
    let Place { cuda, logits: buffer, batch } = place;
    cuda.put(buffer, logits);
    let blocks: Vec<BlockId> = (0..16).map(BlockId).collect();
    let admissions: Vec<_> = (0..)
        .zip(rows)
        .map(|(slot, row)| Admission {
            slot,
            tokens: &row.tokens,
            prompt_len: row.prompt_len as u32,
            position: row.tokens.len() as u32 - 1,
            blocks: &blocks,
            sampling: &row.sampling,
        })
        .collect();
    let mut masks = Vec::new();
    let mut sequences = Vec::new();
    for (slot, row) in (0..).zip(rows) {
        let mask = row.mask.as_ref().map(|mask| {
            masks.push(mask);
            masks.len() as u32 - 1
        });
        let position = row.tokens.len() as u32 - 1;
        sequences.push(StepRows { slot, position, rows: 1, samples: 1, mask });
    }
    let input = StepInput {
        step_id: 3,
        admissions: &admissions,
        extensions: &[],
        sequences: &sequences,
        masks: &masks,
        rows_min: 0,
    };
    let mut clock = DeviceClock::start(cuda.context(), cuda.compute()).unwrap();
    let step = batch.begin(cuda, &input).unwrap();
    batch.sample(cuda, buffer, &step, !masks.is_empty()).unwrap();
    let wants = rows.iter().map(|row| row.sampling.logprobs.is_some()).collect();
    let frame = batch.end(cuda, 3, wants).unwrap();
    let finished = frame.finish(&mut clock).unwrap();
    batch.recycle(finished.output);
    finished.outcomes
}

fn wanted(row: &Row, logits: &[f32]) -> Result<SampledToken, SampleError> {
    let row = SampleRow {
        sampling: &row.sampling,
        tokens: &row.tokens,
        prompt_len: row.prompt_len,
        allowed: row.mask.as_ref(),
    };
    sample(logits, &row)
}

#[track_caller]
fn check(place: &mut Place, rows: &[Row], logits: &[f32]) {
    let vocabulary = logits.len() / rows.len();
    for (index, outcome) in chosen(place, rows, logits).into_iter().enumerate() {
        let logits = &logits[index * vocabulary..][..vocabulary];
        let sampling = &rows[index].sampling;
        match (outcome, wanted(&rows[index], logits)) {
            (SampleOutcome::Token(found), Ok(wanted)) => {
                assert_eq!(found.id, wanted.id, "row {index}: {sampling:?}");
                let (Some(found), Some(wanted)) = (&found.logprobs, &wanted.logprobs) else {
                    assert_eq!(found.logprobs.is_some(), wanted.logprobs.is_some());
                    continue;
                };
                let near = |a: f32, b: f32| (a - b).abs() < 1e-4;
                assert!(near(found.chosen, wanted.chosen), "row {index}: {found:?} {wanted:?}");
                assert_eq!(found.top.len(), wanted.top.len(), "row {index}");
                for (found, wanted) in found.top.iter().zip(&wanted.top) {
                    assert_eq!(found.0, wanted.0, "row {index}");
                    assert!(near(found.1, wanted.1), "row {index}: {found:?} {wanted:?}");
                }
            }
            (SampleOutcome::NoCandidate, Err(SampleError::NoCandidate { .. })) => {}
            (
                SampleOutcome::BadLogit { token, .. },
                Err(SampleError::BadLogit { token: wanted, .. }),
            ) => {
                assert_eq!(token, wanted);
            }
            (found, wanted) => panic!("row {index}: {found:?}, not {wanted:?}: {sampling:?}"),
        }
    }
}

/// A row for every setting, with seeds and histories of their own.
fn rows(vocabulary: u32, round: u64) -> Vec<Row> {
    let random = Sampling { temperature: 1.0, ..Sampling::greedy() };
    let settings = [
        Sampling::greedy(),
        random.clone(),
        Sampling { temperature: 0.3, ..random.clone() },
        Sampling { temperature: 1.7, top_k: 5, ..random.clone() },
        Sampling { top_k: 1, ..random.clone() },
        Sampling { top_k: 300, ..random.clone() },
        Sampling { top_p: 0.9, ..random.clone() },
        Sampling { top_p: 0.05, ..random.clone() },
        Sampling { min_p: 0.2, ..random.clone() },
        Sampling { top_k: 40, top_p: 0.8, min_p: 0.05, ..random.clone() },
        Sampling { repetition_penalty: 1.3, ..random.clone() },
        Sampling { presence_penalty: 1.5, frequency_penalty: 0.5, ..random.clone() },
        Sampling { frequency_penalty: -1.0, ..Sampling::greedy() },
        Sampling { logprobs: Some(0), ..random.clone() },
        Sampling { logprobs: Some(20), top_p: 0.7, ..random.clone() },
        Sampling { logprobs: Some(3), ..Sampling::greedy() },
        Sampling { min_tokens: 200, stop_token_ids: vec![1, 2, 3], ..random },
    ];
    let mut rows = Vec::new();
    for (index, sampling) in settings.into_iter().enumerate() {
        for has_mask in [false, true] {
            let length = 1 + (index * 13 + round as usize * 29) % 200;
            let seed = round * 1000 + index as u64 * 2 + u64::from(has_mask);
            let tokens: Vec<u32> = (0..length as u32)
                .map(|i| (i * i * 31 + i / 3 + seed as u32) % vocabulary)
                .collect();
            let words = vocabulary.div_ceil(32);
            let mask = has_mask.then(|| {
                let words = (0..words).map(|i| (i ^ seed as u32).wrapping_mul(0x9e37_79b9));
                TokenMask::new(words.collect(), vocabulary)
            });
            let sampling = Sampling { seed: seed << 33 | seed, ..sampling.clone() };
            rows.push(Row { sampling, prompt_len: tokens.len() / 2, tokens, mask });
        }
    }
    rows
}

#[test]
fn choices_are_the_cpus() {
    let Some(gpu) = gpu() else { return };
    for vocabulary in [33, 1003, 49_152, 151_936] {
        let mut place = place(&gpu, vocabulary);
        for round in 0..4 {
            let rows = rows(vocabulary, round);
            // Few different logits in the last round: equals are decided by their ids.
            let scale = if round == 3 { 1.0 } else { 9.0 };
            let logits = numbers(round as u32 + 50, rows.len() * vocabulary as usize);
            let logits: Vec<f32> = logits
                .iter()
                .map(|logit| if round == 3 { (logit * 2.0).round() } else { logit * scale })
                .collect();
            check(&mut place, &rows, &logits);
        }
    }
}

#[test]
fn nonsense_is_found_and_named_and_stays_with_its_row() {
    let Some(gpu) = gpu() else { return };
    let vocabulary = 1003;
    let mut place = place(&gpu, vocabulary);
    let mut rows: Vec<Row> = rows(vocabulary, 1).into_iter().step_by(2).take(6).collect();
    let mut logits = numbers(1, rows.len() * vocabulary as usize);
    let at = |row: usize, token: usize| row * vocabulary as usize + token;
    logits[at(0, 1002)] = f32::NAN;
    logits[at(1, 700)] = f32::INFINITY;
    logits[at(1, 900)] = f32::NAN;
    logits[at(2, 5)] = f32::NEG_INFINITY;
    rows[3].mask = Some(TokenMask::new(vec![], vocabulary));
    check(&mut place, &rows, &logits);
}
