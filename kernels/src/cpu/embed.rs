//! Token embedding: looks up a row of the embedding table for each token.

use super::{matmul::CpuMatrix, threads::ThreadPool};
use crate::shard::Shard;

/// Writes the embedding of every token, times `scale`, to a row of `out`. With tensor parallelism,
/// the table has only the rows of this rank's tokens, and `out` gets zeros for the tokens of other
/// ranks. `vocabulary` is the number of tokens of the model.
///
/// # Panics
/// When a token is not below `vocabulary`, which admission rejects.
pub(crate) fn embed(
    pool: &mut ThreadPool,
    (table, scale): (&CpuMatrix, f32),
    shard: Shard,
    vocabulary: usize,
    tokens: &[u32],
    out: &mut [f32],
) {
    let (rank_tokens, width) = (shard.tokens(vocabulary), table.cols());
    assert_eq!(table.rows(), rank_tokens.len(), "the table has a row for each token of the rank");
    let task_rows = pool.rows_per_task(tokens.len(), width);
    pool.for_each_piece(out, task_rows * width, |_, task, piece| {
        let tokens = &tokens[task * task_rows..];
        for (out, &token) in piece.chunks_exact_mut(width).zip(tokens) {
            let token = token as usize;
            assert!(
                token < vocabulary,
                "token {token} must be below the vocabulary size {vocabulary}"
            );
            match rank_tokens.contains(&token) {
                true => {
                    table.copy_row(token - rank_tokens.start, out);
                    out.iter_mut().for_each(|value| *value *= scale);
                }
                false => out.fill(0.0),
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cpu::{
            aligned::Slab,
            matmul::{pack, testing::Plain},
            testing::numbers,
        },
        layout::WeightFormat,
    };

    #[test]
    fn every_token_gets_its_embedding() {
        for threads in [1, 2] {
            let mut pool = ThreadPool::new(threads, "test").unwrap();
            let source = Plain { rows: 77, cols: 33, values: numbers(1, 77 * 33) };
            for format in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Q8] {
                let table = pack(&mut pool, &mut Slab::default(), format, &source);
                for count in [0, 1, 40, 1000] {
                    let tokens: Vec<u32> = (0..count).map(|i| i * 31 % 77).collect();
                    let mut out = vec![f32::NAN; tokens.len() * 33];
                    embed(&mut pool, (&table, 0.5), Shard::WHOLE, 77, &tokens, &mut out);
                    for (out, &token) in out.chunks_exact(33).zip(&tokens) {
                        let mut want = [f32::NAN; 33];
                        table.copy_row(token as usize, &mut want);
                        assert_eq!(out, want.map(|value| value * 0.5));
                    }
                }
            }
        }
    }

    #[test]
    fn a_rank_has_zeros_for_tokens_of_other_ranks() {
        let mut pool = ThreadPool::new(2, "test").unwrap();
        let values = numbers(1, 77 * 33);
        let tokens: Vec<u32> = (0..100).map(|i| i * 31 % 77).collect();
        for format in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Q8] {
            let mut looked_up = |shard: Shard| {
                let own = shard.tokens(77);
                let values = values[own.start * 33..own.end * 33].to_vec();
                let source = Plain { rows: own.len(), cols: 33, values };
                let table = pack(&mut pool, &mut Slab::default(), format, &source);
                let mut out = vec![f32::NAN; tokens.len() * 33];
                embed(&mut pool, (&table, 1.0), shard, 77, &tokens, &mut out);
                out
            };
            let whole = looked_up(Shard::WHOLE);
            for of in [2, 3, 4] {
                for shard in Shard::new(0, of).unwrap().all() {
                    let (own, part) = (shard.tokens(77), looked_up(shard));
                    let rows = part.chunks_exact(33).zip(whole.chunks_exact(33));
                    for ((found, row), &token) in rows.zip(&tokens) {
                        let zeros = [0.0; 33];
                        let want = if own.contains(&(token as usize)) { row } else { &zeros };
                        assert_eq!(found, want, "{format}, {shard}, token {token}");
                    }
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "token 77 must be below the vocabulary size 77")]
    fn a_token_outside_the_vocabulary_panics() {
        let mut pool = ThreadPool::new(1, "test").unwrap();
        let table = pack(
            &mut pool,
            &mut Slab::default(),
            WeightFormat::F32,
            &Plain { rows: 77, cols: 2, values: numbers(1, 154) },
        );
        embed(&mut pool, (&table, 1.0), Shard::WHOLE, 77, &[77], &mut [0.0; 2]);
    }
}
