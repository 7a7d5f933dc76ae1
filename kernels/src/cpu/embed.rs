//! Looking tokens up in the embedding table.

use super::{matmul::CpuMatrix, threads::ThreadPool};

/// Rows whose copying is worth another thread.
const ROWS_PER_TASK: usize = 8;

/// `out[row] = table[tokens[row]]`. Panics when an id is not below the table's rows.
pub(crate) fn embed(pool: &mut ThreadPool, table: &CpuMatrix, tokens: &[u32], out: &mut [f32]) {
    let width = table.cols();
    pool.for_each_piece(out, ROWS_PER_TASK * width, |_, task, piece| {
        let tokens = &tokens[task * ROWS_PER_TASK..];
        for (out, &token) in piece.chunks_exact_mut(width).zip(tokens) {
            assert!((token as usize) < table.rows(), "token {token} is in the vocabulary");
            table.copy_row(token as usize, out);
        }
    });
}
