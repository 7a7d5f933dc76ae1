//! Sampling by the ranks of a group. Each rank computes the logits of its own tokens; the ranks
//! gather them, and each rank samples every row of the whole vocabulary, so all ranks choose the
//! token that one rank alone chooses.

use std::{ops::Range, sync::PoisonError};

use super::{
    super::{CpuBackend, buffer::CpuBuffer, collective::CpuGroupError},
    SampleError, SampleRow, sample_rows,
};
use crate::sampling::SampledToken;

/// Rows gathered at a time. The rows of 16 threads take 10 MiB for 152,000 tokens.
const ROWS_AT_ONCE: usize = 16;

impl CpuBackend {
    /// Samples as [`Self::sample`] does, in a group with the logits of all ranks: `logits` has the
    /// [tokens](Shard::tokens) of this rank.
    pub fn sample_gathered(
        &mut self,
        logits: &CpuBuffer,
        vocabulary: usize,
        rows: &[SampleRow<'_>],
    ) -> Result<Vec<Result<SampledToken, SampleError>>, CpuGroupError> {
        let Some(group) = self.group.as_mut().filter(|group| !group.shard().is_whole()) else {
            return Ok(self.sample(logits, rows));
        };
        if let Some(fault) = group.fault() {
            return Err(fault.clone());
        }
        let pool = self.pool.get_mut().unwrap_or_else(PoisonError::into_inner);
        let (level, draws, whole) = (self.level, &self.draws, &mut self.gathered);
        let shard = group.shard();
        let own = shard.tokens(vocabulary);
        assert_eq!(logits.width(), own.len(), "a row has the tokens of the rank");
        let ranges: Vec<Range<usize>> = shard.all().map(|shard| shard.tokens(vocabulary)).collect();
        let mut tokens = Vec::with_capacity(rows.len());
        for (chunk, rows) in rows.chunks(ROWS_AT_ONCE).enumerate() {
            whole.resize(rows.len() * vocabulary, 0.0);
            for (row, whole) in whole.chunks_exact_mut(vocabulary).enumerate() {
                group.all_gather_ranges(logits.row(chunk * ROWS_AT_ONCE + row), &ranges, whole)?;
            }
            let row = |row: usize| &whole[row * vocabulary..][..vocabulary];
            tokens.extend(sample_rows(level, pool, draws, row, rows));
        }
        Ok(tokens)
    }
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use proptest::prelude::*;

    use super::*;
    use crate::{
        backend::Backend,
        cpu::{
            CpuGroup, CpuOptions, Isa, sample,
            testing::{numbers, region},
        },
        layout::WeightFormat,
        sampling::{Sampling, TokenMask},
        shard::Shard,
    };

    type Outcome = Result<SampledToken, SampleError>;

    /// Returns the tokens that each of `of` ranks samples from rows of whole logits.
    fn on_ranks(of: usize, logits: &[Vec<f32>], rows: &[SampleRow<'_>]) -> Vec<Vec<Outcome>> {
        let vocabulary = logits[0].len();
        let region = region(CpuGroup::region_bytes(of));
        let run = |shard: Shard| {
            let options = CpuOptions { weights: WeightFormat::F32, threads: 2, isa: Isa::Auto };
            let group = CpuGroup::new(&region, 0, shard, Duration::from_secs(60));
            let mut backend = CpuBackend::new(options).unwrap().in_group(group);
            let own = shard.tokens(vocabulary);
            let mut buffer = backend.buffer(rows.len(), own.len());
            let parts = buffer.rows_mut(rows.len()).chunks_exact_mut(own.len());
            parts.zip(logits).for_each(|(part, row)| part.copy_from_slice(&row[own.clone()]));
            backend.sample_gathered(&buffer, vocabulary, rows).unwrap()
        };
        thread::scope(|scope| {
            let ranks: Vec<_> = Shard::new(0, of)
                .unwrap()
                .all()
                .map(|shard| scope.spawn(move || run(shard)))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Compares by `Debug`: it prints floats exactly, and NaN equals NaN.
    fn assert_ranks_agree_with_one(of: usize, logits: &[Vec<f32>], rows: &[SampleRow<'_>]) {
        let expected: Vec<Outcome> =
            logits.iter().zip(rows).map(|(logits, row)| sample(logits, row)).collect();
        for (rank, found) in on_ranks(of, logits, rows).into_iter().enumerate() {
            assert_eq!(format!("{found:?}"), format!("{expected:?}"), "rank {rank} of {of}");
        }
    }

    #[test]
    fn more_rows_than_fit_one_chunk_and_shards_of_unequal_length_sample_as_one_rank() {
        // Shards of 300,001 tokens take several pieces of the collective, and not equally many.
        for (of, vocabulary, count) in [(2, 300_001, 3), (3, 49_152, 40), (4, 97, 17), (3, 3, 5)] {
            let logits: Vec<_> = (0..count).map(|seed| numbers(seed, vocabulary)).collect();
            let words = (0..).map(|i| 0x9e37_79b9_u32.rotate_left(i));
            let words = words.take(vocabulary.div_ceil(32)).collect();
            let mask = TokenMask::new(words, vocabulary as u32);
            let sampling = |seed| Sampling {
                temperature: (seed % 3) as f32,
                top_k: [0, 20][seed as usize % 2],
                top_p: [1.0, 0.9][seed as usize / 2 % 2],
                repetition_penalty: 1.3,
                logprobs: Some(5),
                seed,
                ..Sampling::greedy()
            };
            let samplings: Vec<_> = (0..u64::from(count)).map(sampling).collect();
            let tokens: Vec<u32> = (0..40).map(|i| i * 257 % 9000).collect();
            let row = |(number, sampling)| {
                let allowed = (number % 4 == 3).then_some(&mask);
                SampleRow {
                    sampling,
                    tokens: &tokens,
                    prompt_len: 33,
                    allowed,
                    scored: (number % 5 == 4).then_some(7 % vocabulary as u32),
                }
            };
            let rows: Vec<_> = samplings.iter().enumerate().map(row).collect();
            assert_ranks_agree_with_one(of, &logits, &rows);
        }
    }

    #[test]
    fn bad_logits_and_parameters_are_the_errors_of_one_rank() {
        let greedy = Sampling::greedy();
        let bad = Sampling { top_p: 7.0, ..Sampling::greedy() };
        let nothing = TokenMask::new(vec![], 2000);
        let (tokens, allowed, scored) = (&[800][..], None, None);
        let row = SampleRow { sampling: &greedy, tokens, prompt_len: 0, allowed, scored };
        let mut logits = vec![numbers(1, 2000); 6];
        (logits[0][3], logits[1][1_999]) = (f32::NAN, f32::INFINITY);
        logits[2].fill(f32::NEG_INFINITY);
        let rows = [
            row,
            row,
            row,
            SampleRow { sampling: &bad, ..row },
            SampleRow { prompt_len: 2, ..row },
            SampleRow { allowed: Some(&nothing), ..row },
        ];
        assert_ranks_agree_with_one(2, &logits, &rows);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 30, ..ProptestConfig::default() })]

        #[test]
        fn any_sampling_over_any_ranks_is_that_of_one_rank(
            of in 1..=4_usize,
            vocabulary in prop_oneof![4..200_usize, 32_769..60_000_usize],
            seed in any::<u32>(),
            temperature in prop_oneof![Just(0.0_f32), Just(0.7), Just(1.5)],
            top_k in prop_oneof![Just(0_u32), 1..12_u32],
            top_p in prop_oneof![Just(1.0_f32), 0.05..1.0_f32],
            min_p in prop_oneof![Just(0.0_f32), 0.0..0.3_f32],
            logprobs in prop_oneof![Just(None), Just(Some(7))],
        ) {
            let seed_wide = u64::from(seed);
            let sampling =
                Sampling { temperature, top_k, top_p, min_p, logprobs, seed: seed_wide, ..Sampling::greedy() };
            let (tokens, allowed, scored) = (&[1, 2][..], None, None);
            let row = SampleRow { sampling: &sampling, tokens, prompt_len: 1, allowed, scored };
            // Rounded, so that equal logits abound.
            let logits: Vec<f32> =
                numbers(seed, vocabulary).iter().map(|x| (x * 64.0).round() / 4.0).collect();
            assert_ranks_agree_with_one(of, &[logits], &[row]);
        }
    }
}
