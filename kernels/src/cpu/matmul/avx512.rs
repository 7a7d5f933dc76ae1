//! Tiles for AVX-512: up to 24 vectors of sums in registers.
//!
//! bf16 weights are widened in registers (a shift and a mask give the even and the odd input) and
//! multiplied in f32. On Intel's cores that is faster than `vdpbf16ps`, which issues every other
//! cycle: 16 products a cycle against 32 of the two FMA units (measured on a Xeon with AMX,
//! 60 and 120 G multiply-adds/s per core). It is also exact, where `vdpbf16ps` flushes denormals.

use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_prefetch, _mm512_and_si512, _mm512_castsi512_ps, _mm512_fmadd_ps,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_storeu_ps, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_slli_epi32,
};

use super::{Target, Tile, pack::PanelRange};
use crate::cpu::{arithmetic::LANES, matmul::pack::PANEL};

/// Most rows of a block: 12 rows of a panel are 24 vectors of sums.
pub(super) const BLOCK_ROWS_MAX: usize = 12;

/// How far ahead weights are fetched when few rows make memory the limit.
const PREFETCH_BYTES: usize = 2048;

/// Panels that one tile takes for blocks of so many rows.
pub(super) fn panels_for(rows: usize) -> usize {
    match rows {
        0..=3 => 4,
        4 => 3,
        5..=6 => 2,
        _ => 1,
    }
}

/// Multiplies one row block with 1 to [`panels_for`] panels.
///
/// # Safety
/// The machine has AVX-512F. `target` may be written in every row of the block, `tile.columns`
/// elements each.
pub(super) unsafe fn tile(tile: &Tile<'_>, target: &Target, panel_count: usize) {
    assert_eq!(tile.x.len(), tile.row_count * tile.k, "a block is [k][rows]");
    let groups = match tile.panels {
        PanelRange::F32(panels) => panels.len() == panel_count * tile.k * PANEL,
        PanelRange::Bf16(panels) => panels.len() == panel_count * tile.k.div_ceil(2) * PANEL,
    };
    assert!(groups, "panels are [k][32] or [k / 2][32]");
    macro_rules! choose {
        ($(($m:literal, $p:literal)),+) => {
            match (tile.row_count, panel_count) {
                // SAFETY: the lengths were checked above for this many rows and panels; the rest
                // is the caller's promise.
                $(($m, $p) => unsafe { sums::<$m, $p>(tile, target) },)+
                (rows, panels) => unreachable!("no tile of {rows} rows and {panels} panels"),
            }
        };
    }
    choose!(
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 1),
        (5, 1),
        (6, 1),
        (7, 1),
        (8, 1),
        (9, 1),
        (10, 1),
        (11, 1),
        (12, 1),
        (1, 2),
        (2, 2),
        (3, 2),
        (4, 2),
        (5, 2),
        (6, 2),
        (1, 3),
        (2, 3),
        (3, 3),
        (4, 3),
        (1, 4),
        (2, 4),
        (3, 4)
    );
}

/// Sums of `M` rows and `P` panels.
type Sums<const M: usize, const P: usize> = [[[__m512; 2]; P]; M];

/// # Safety
/// `tile.x` is `[k][M]`, its panels are `P`, and as [`tile`].
#[target_feature(enable = "avx512f")]
unsafe fn sums<const M: usize, const P: usize>(tile: &Tile<'_>, target: &Target) {
    let mut sums: Sums<M, P> = [[[_mm512_setzero_ps(); 2]; P]; M];
    let x = tile.x.as_ptr();
    match tile.panels {
        PanelRange::F32(panels) => {
            for k in 0..tile.k {
                for p in 0..P {
                    // SAFETY: group `k` of panel `p` and row `k` of the block are inside, as the
                    // caller promises; a prefetch may point anywhere.
                    unsafe {
                        let group = panels.as_ptr().add((p * tile.k + k) * PANEL);
                        prefetch::<M>(group.cast());
                        let weights = [_mm512_loadu_ps(group), _mm512_loadu_ps(group.add(LANES))];
                        add_products(&mut sums, p, x.add(k * M), weights);
                    }
                }
            }
        }
        PanelRange::Bf16(panels) => {
            let groups = tile.k.div_ceil(2);
            let odd = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
            for pair in 0..groups {
                for p in 0..P {
                    // SAFETY: as above; the second input of the last pair is there when `k` is even.
                    unsafe {
                        let group = panels.as_ptr().add((p * groups + pair) * PANEL);
                        prefetch::<M>(group.cast());
                        let words = [
                            _mm512_loadu_si512(group.cast()),
                            _mm512_loadu_si512(group.add(LANES).cast()),
                        ];
                        let x = x.add(pair * 2 * M);
                        let weights =
                            words.map(|words| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)));
                        add_products(&mut sums, p, x, weights);
                        if pair * 2 + 1 < tile.k {
                            let weights = words
                                .map(|words| _mm512_castsi512_ps(_mm512_and_si512(words, odd)));
                            add_products(&mut sums, p, x.add(M), weights);
                        }
                    }
                }
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        for (vector, sums) in sums.as_flattened().iter().enumerate() {
            let first = vector * LANES;
            let columns = LANES.min(tile.columns.saturating_sub(first));
            let mask = ((1_u32 << columns) - 1) as u16;
            // SAFETY: the columns that the mask lets through are in the target; the address is
            // computed without a claim that it is inside when there is none.
            unsafe { _mm512_mask_storeu_ps(target.at(row, first), mask, *sums) };
        }
    }
}

/// Adds one input's products, every row with the weights of panel `p`.
///
/// # Safety
/// `x` points to `M` elements.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add_products<const M: usize, const P: usize>(
    sums: &mut Sums<M, P>,
    p: usize,
    x: *const f32,
    weights: [__m512; 2],
) {
    for (m, sums) in sums.iter_mut().enumerate() {
        // SAFETY: `m` is below `M`.
        let x = _mm512_set1_ps(unsafe { *x.add(m) });
        for (sum, weights) in sums[p].iter_mut().zip(weights) {
            *sum = _mm512_fmadd_ps(x, weights, *sum);
        }
    }
}

/// Fetches the two lines that are read a little later. Many rows keep the core busy for longer
/// than the hardware's own prefetch needs.
#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch<const M: usize>(group: *const u8) {
    if M <= 8 {
        _mm_prefetch::<_MM_HINT_T0>(group.wrapping_add(PREFETCH_BYTES).cast());
        _mm_prefetch::<_MM_HINT_T0>(group.wrapping_add(PREFETCH_BYTES + 64).cast());
    }
}
