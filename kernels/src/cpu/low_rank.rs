//! Low-rank updates (LoRA): `out[row] += (x[row] · aᵀ) · bᵀ`, with the row's adapter.
//!
//! Every row is computed by itself in f32 and in a fixed order, so a row's result depends neither
//! on the other rows nor on their adapters.

use super::{
    arithmetic::{LANES, sum_lanes},
    isa::{Level, per_level},
    threads::ThreadPool,
};
use crate::backend::LowRankUpdate;

/// Adds to each row of `out` the updates that `updates_of` returns for the row. `x` is
/// `[rows][x_width]`, `out` is `[rows][out_width]`.
pub(crate) fn add_low_rank<'a>(
    level: Level,
    pool: &mut ThreadPool,
    updates_of: impl Fn(usize) -> &'a [LowRankUpdate] + Sync,
    (x, x_width): (&[f32], usize),
    (out, out_width): (&mut [f32], usize),
) {
    let task_rows = pool.rows_per_task(out.len() / out_width, out_width);
    pool.for_each_piece(out, task_rows * out_width, |_, task, out| {
        for (index, out) in out.chunks_exact_mut(out_width).enumerate() {
            let row = task * task_rows + index;
            for update in updates_of(row) {
                add_update(level, &x[row * x_width..][..x_width], update, out);
            }
        }
    });
}

per_level! {
    fn add_update(x: &[f32], update: &LowRankUpdate, out: &mut [f32]) {
        let out_len = update.b.len() / update.rank;
        let out = &mut out[update.first..][..out_len];
        let rows = update.a.chunks_exact(x.len()).zip(update.b.chunks_exact(out_len));
        for (a, b) in rows {
            let mut lanes = [0.0; LANES];
            let (x_vectors, x_rest) = x.as_chunks::<LANES>();
            let (a_vectors, a_rest) = a.as_chunks::<LANES>();
            for (x, a) in x_vectors.iter().zip(a_vectors) {
                for lane in 0..LANES {
                    lanes[lane] += x[lane] * a[lane];
                }
            }
            for (lane, (x, a)) in lanes.iter_mut().zip(x_rest.iter().zip(a_rest)) {
                *lane += x * a;
            }
            let shrunk = sum_lanes(lanes);
            for (out, b) in out.iter_mut().zip(b) {
                *out += shrunk * b;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{bits, levels, numbers};

    /// Returns an update of `out_len` output features from `first` on.
    fn update(rank: usize, x_width: usize, first: usize, out_len: usize) -> LowRankUpdate {
        let (a, b) = (numbers(rank as u32, rank * x_width), numbers(9, rank * out_len));
        LowRankUpdate { rank, a, b, first }
    }

    #[test]
    fn each_row_gets_the_updates_of_its_adapter() {
        const ROWS: usize = 40;
        for (x_width, out_width) in [(1, 1), (17, 35), (64, 512), (300, 7)] {
            let part = out_width / 2;
            let updates = [
                vec![],
                vec![update(3, x_width, 0, out_width)],
                vec![
                    update(1, x_width, 0, out_width - part),
                    update(8, x_width, part, out_width - part),
                ],
            ];
            let x = numbers(1, ROWS * x_width);
            let start = numbers(2, ROWS * out_width);
            let mut want: Vec<f64> = start.iter().map(|&value| f64::from(value)).collect();
            for row in 0..ROWS {
                for LowRankUpdate { rank, a, b, first } in &updates[row % 3] {
                    let out_len = b.len() / rank;
                    for r in 0..*rank {
                        let x = &x[row * x_width..][..x_width];
                        let products = x.iter().zip(&a[r * x_width..]);
                        let shrunk: f64 =
                            products.map(|(&x, &a)| f64::from(x) * f64::from(a)).sum();
                        for out in 0..out_len {
                            want[row * out_width + first + out] +=
                                shrunk * f64::from(b[r * out_len + out]);
                        }
                    }
                }
            }
            let mut first_bits = None;
            for (index, level) in levels().into_iter().enumerate() {
                let mut pool = ThreadPool::new(1 + index % 3, "test").unwrap();
                let mut got = start.clone();
                let updates_of = |row: usize| updates[row % 3].as_slice();
                let out = (got.as_mut_slice(), out_width);
                add_low_rank(level, &mut pool, updates_of, (&x, x_width), out);
                for (got, want) in got.iter().zip(&want) {
                    assert!((f64::from(*got) - want).abs() < 1e-3, "{got} {want}");
                }
                let bits = bits(&got);
                assert_eq!(first_bits.get_or_insert_with(|| bits.clone()), &bits);
            }
        }
    }
}
