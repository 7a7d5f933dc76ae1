//! Addition of one vector to every row.

use super::{
    isa::{Level, per_level},
    threads::ThreadPool,
};

/// Computes `x[row] += bias`; `x` is `[rows][bias.len()]`. Bit-equal to [`reference::add_bias`] at
/// every level.
pub(crate) fn add_bias(level: Level, pool: &mut ThreadPool, bias: &[f32], x: &mut [f32]) {
    if level == Level::Reference || x.is_empty() {
        return reference::add_bias(bias, x);
    }
    let task_rows = pool.rows_per_task(x.len() / bias.len(), bias.len());
    pool.for_each_piece(x, task_rows * bias.len(), |_, _, rows| add_to_rows(level, bias, rows));
}

per_level! {
    fn add_to_rows(bias: &[f32], rows: &mut [f32]) {
        for row in rows.chunks_exact_mut(bias.len()) {
            for (x, &bias) in row.iter_mut().zip(bias) {
                *x += bias;
            }
        }
    }
}

pub(crate) mod reference {
    pub(crate) fn add_bias(bias: &[f32], x: &mut [f32]) {
        for (index, x) in x.iter_mut().enumerate() {
            *x += bias[index % bias.len()];
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::testing::{bits, levels, numbers};

    proptest! {
        #[test]
        fn any_shape_agrees_with_the_reference(
            rows in 0_usize..40, width in 1_usize..1600, threads in 1_usize..4
        ) {
            let mut pool = ThreadPool::new(threads, "test").unwrap();
            let (bias, x) = (numbers(1, width), numbers(2, rows * width));
            let mut want = x.clone();
            reference::add_bias(&bias, &mut want);
            for level in levels() {
                let mut got = x.clone();
                add_bias(level, &mut pool, &bias, &mut got);
                prop_assert_eq!(bits(&got), bits(&want), "{}", level.name());
            }
        }
    }
}
