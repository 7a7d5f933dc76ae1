//! Embedding lookup.

use super::{matmul::CpuMatrix, threads::ThreadPool};

/// Computes `out[row] = table[tokens[row]]`. Panics when an id is not below the table's rows.
pub(crate) fn embed(pool: &mut ThreadPool, table: &CpuMatrix, tokens: &[u32], out: &mut [f32]) {
    let width = table.cols();
    let task_rows = pool.rows_per_task(tokens.len(), width);
    pool.for_each_piece(out, task_rows * width, |_, task, piece| {
        let tokens = &tokens[task * task_rows..];
        for (out, &token) in piece.chunks_exact_mut(width).zip(tokens) {
            assert!((token as usize) < table.rows(), "token {token} is outside the vocabulary");
            table.copy_row(token as usize, out);
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
    fn every_token_gets_its_row() {
        for threads in [1, 2] {
            let mut pool = ThreadPool::new(threads, "test").unwrap();
            let source = Plain { rows: 77, cols: 33, values: numbers(1, 77 * 33) };
            for format in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Q8] {
                let table = pack(&mut pool, &mut Slab::default(), format, &source);
                for count in [0, 1, 40, 1000] {
                    let tokens: Vec<u32> = (0..count).map(|i| i * 31 % 77).collect();
                    let mut out = vec![f32::NAN; tokens.len() * 33];
                    embed(&mut pool, &table, &tokens, &mut out);
                    for (out, &token) in out.chunks_exact(33).zip(&tokens) {
                        let mut want = [f32::NAN; 33];
                        table.copy_row(token as usize, &mut want);
                        assert_eq!(out, want);
                    }
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "token 77 is outside the vocabulary")]
    fn a_token_beyond_the_table_panics() {
        let mut pool = ThreadPool::new(1, "test").unwrap();
        let table = pack(
            &mut pool,
            &mut Slab::default(),
            WeightFormat::F32,
            &Plain { rows: 77, cols: 2, values: numbers(1, 154) },
        );
        embed(&mut pool, &table, &[77], &mut [0.0; 2]);
    }
}
