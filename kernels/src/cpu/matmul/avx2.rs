//! GEMM tiles for AVX2 with FMA: up to 12 vectors of accumulators in registers. bf16 weights are
//! widened (a shift and a mask give the even and the odd input) and multiplied in f32, which is
//! exact.
//!
//! Each accumulator is one chain of FMAs, so a single row needs many columns side by side to keep
//! both FMA units busy.

use std::arch::x86_64::{
    __m256, __m256i, _MM_HINT_T0, _mm_prefetch, _mm256_and_si256, _mm256_castsi256_ps,
    _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_setzero_ps, _mm256_slli_epi32, _mm256_storeu_ps,
};

use super::{MatmulTile, TileOutput, pack::PANEL, rows::RowFormat};

/// Maximum rows of a block: 6 rows of half a panel are 12 vectors of accumulators.
pub(super) const BLOCK_ROWS_MAX: usize = 6;
/// Prefetch distance of weights in bytes, for the few rows at which GEMMs are memory-bound.
const PREFETCH_BYTES: usize = 2048;
/// Lanes of a vector, and vectors of a panel.
const LANES: usize = 8;
const VECTORS: usize = PANEL / LANES;

/// Returns the panels of one tile for blocks of `rows` rows.
pub(super) fn panels_for(rows: usize, _software_prefetch: bool) -> usize {
    if rows == 1 { 2 } else { 1 }
}

/// Multiplies one row block with 1 to [`panels_for`] panels.
///
/// # Safety
/// The machine has AVX2 and FMA. `target` may be written in every row of the block, `tile.columns`
/// elements each.
pub(super) unsafe fn tile(tile: &MatmulTile<'_>, target: &TileOutput, panel_count: usize) {
    assert_eq!(tile.x.len(), tile.row_count * tile.k, "a block is [k][rows]");
    // SAFETY: `WeightPanels::new` checks the weights' lengths. The machine has AVX2 and FMA, and
    // the target may be written in the tile's rows and columns (`# Safety`).
    unsafe {
        if tile.format == RowFormat::F32 {
            let panels: &[f32] = bytemuck::cast_slice(tile.panels);
            with_rows(tile, target, WeightPanels::new(panels, panel_count, tile.k));
        } else {
            let groups = tile.k.div_ceil(2);
            with_rows(tile, target, WeightPanels::new(tile.panels, panel_count, groups));
        }
    }
}

/// Adjacent panels.
#[derive(Clone, Copy)]
struct WeightPanels<'a, T> {
    panels: &'a [T],
    count: usize,
}

impl<'a, T> WeightPanels<'a, T> {
    fn new(panels: &'a [T], count: usize, groups: usize) -> Self {
        assert!(count > 0 && panels.len() / count >= groups * PANEL, "a panel has all groups");
        Self { panels, count }
    }

    /// Returns vector `vector` of group `group`, counted through the panels; vector 0 is in the
    /// first panel.
    ///
    /// # Safety
    /// The group is below the count passed to [`Self::new`], and the vector is in one of the
    /// panels.
    #[inline(always)]
    unsafe fn vector(self, group: usize, vector: usize) -> *const T {
        let panel_len = self.panels.len() / self.count;
        let (panel, vector) = (vector / VECTORS, vector % VECTORS);
        // SAFETY: the group is below the count that `new` has checked, and the vector is in one of
        // the panels (`# Safety`).
        unsafe { self.panels.as_ptr().add(panel * panel_len + group * PANEL + vector * LANES) }
    }
}

/// Conversion of panel elements to f32.
trait Element: Copy {
    /// Inputs per group.
    const INPUTS: usize;

    /// Loads input `input` of the group of eight elements at `from`.
    ///
    /// # Safety
    /// `from` points to eight elements.
    unsafe fn load(from: *const Self, input: usize) -> __m256;
}

impl Element for f32 {
    const INPUTS: usize = 1;

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn load(from: *const f32, _input: usize) -> __m256 {
        // SAFETY: `from` points to eight elements (`# Safety`).
        unsafe { _mm256_loadu_ps(from) }
    }
}

/// Two bf16, the even input in the lower half.
impl Element for u32 {
    const INPUTS: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn load(from: *const u32, input: usize) -> __m256 {
        // SAFETY: `from` points to eight elements (`# Safety`).
        let words: __m256i = unsafe { _mm256_loadu_si256(from.cast()) };
        _mm256_castsi256_ps(if input == 0 {
            _mm256_slli_epi32::<16>(words)
        } else {
            _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()))
        })
    }
}

/// Dispatches to the number of rows.
///
/// # Safety
/// As [`tile`]; `weights` are the tile's.
#[target_feature(enable = "avx2,fma")]
unsafe fn with_rows<T: Element>(
    tile: &MatmulTile<'_>,
    target: &TileOutput,
    weights: WeightPanels<'_, T>,
) {
    // SAFETY: the weights are the tile's, the block has the matched number of rows, and the target
    // may be written in the tile's rows and columns (`# Safety`).
    unsafe {
        match (tile.row_count, weights.count) {
            (1, 1) => parts::<1, 4, T>(tile, target, weights),
            (1, 2) => parts::<1, 8, T>(tile, target, weights),
            (2, 1) => parts::<2, 4, T>(tile, target, weights),
            (3, 1) => parts::<3, 4, T>(tile, target, weights),
            (4, 1) => parts::<4, 2, T>(tile, target, weights),
            (5, 1) => parts::<5, 2, T>(tile, target, weights),
            (6, 1) => parts::<6, 2, T>(tile, target, weights),
            (rows, panels) => unreachable!("no tile of {rows} rows and {panels} panels"),
        }
    }
}

/// Computes all columns, `V` vectors at a time.
///
/// # Safety
/// As [`with_rows`], for `M` rows.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn parts<const M: usize, const V: usize, T: Element>(
    tile: &MatmulTile<'_>,
    target: &TileOutput,
    weights: WeightPanels<'_, T>,
) {
    for first in (0..weights.count * VECTORS).step_by(V) {
        if first * LANES >= tile.columns {
            break;
        }
        // SAFETY: `V` divides the vectors, so all `V` from `first` on exist. The target may be
        // written in `M` rows, `tile.columns` elements each (`# Safety`).
        unsafe {
            let sums = sums::<M, V, T>(tile, weights, first);
            store(&sums, tile, target, first * LANES);
        }
    }
}

/// Computes `V` vectors of columns from `first` on.
///
/// # Safety
/// As [`parts`]; the weights have these vectors.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn sums<const M: usize, const V: usize, T: Element>(
    tile: &MatmulTile<'_>,
    weights: WeightPanels<'_, T>,
    first: usize,
) -> [[__m256; V]; M] {
    let mut sums = [[_mm256_setzero_ps(); V]; M];
    let groups = tile.k / T::INPUTS;
    for group in 0..groups {
        // SAFETY: whole groups are inside the panels and the block.
        unsafe {
            prefetch::<M, V, T>(weights, group, first);
            // Inlined by hand: this is the hot loop, and the compiler would turn code shared
            // with the last group below into a call.
            for input in 0..T::INPUTS {
                let x = tile.x.as_ptr().add((group * T::INPUTS + input) * M);
                let mut loaded = [_mm256_setzero_ps(); V];
                for (v, loaded) in loaded.iter_mut().enumerate() {
                    *loaded = T::load(weights.vector(group, first + v), input);
                }
                for (m, sums) in sums.iter_mut().enumerate() {
                    let x = _mm256_set1_ps(f32::from_bits(*x.add(m)));
                    for (sum, weights) in sums.iter_mut().zip(loaded) {
                        *sum = _mm256_fmadd_ps(x, weights, *sum);
                    }
                }
            }
        }
    }
    match tile.k % T::INPUTS {
        0 => sums,
        // SAFETY: the block has the even input of the last group.
        _ => unsafe { last_input(sums, tile, weights, first) },
    }
}

/// Accumulates the last input, the even one of a group.
///
/// # Safety
/// As [`sums`].
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
unsafe fn last_input<const M: usize, const V: usize, T: Element>(
    mut sums: [[__m256; V]; M],
    tile: &MatmulTile<'_>,
    weights: WeightPanels<'_, T>,
    first: usize,
) -> [[__m256; V]; M] {
    let last = tile.k - 1;
    for v in 0..V {
        // SAFETY: the weights have `V` vectors from `first` on, and the last group has an even
        // input (`# Safety`).
        let weights = unsafe { T::load(weights.vector(last / T::INPUTS, first + v), 0) };
        for (m, sums) in sums.iter_mut().enumerate() {
            let x = _mm256_set1_ps(f32::from_bits(tile.x[last * M + m]));
            sums[v] = _mm256_fmadd_ps(x, weights, sums[v]);
        }
    }
    sums
}

/// Prefetches weights for few rows.
///
/// # Safety
/// As [`sums`].
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn prefetch<const M: usize, const V: usize, T: Element>(
    weights: WeightPanels<'_, T>,
    group: usize,
    first: usize,
) {
    if M <= 3 {
        for vector in (0..V).step_by(2) {
            // SAFETY: the weights have `V` vectors from `first` on (`# Safety`). Only the
            // prefetched address may be outside.
            let here = unsafe { weights.vector(group, first + vector) };
            _mm_prefetch::<_MM_HINT_T0>(here.cast::<i8>().wrapping_add(PREFETCH_BYTES));
        }
    }
}

/// Writes the accumulators to the target.
///
/// # Safety
/// `target` may be written in `M` rows, `tile.columns` elements each; `first` is one of them.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn store<const M: usize, const V: usize>(
    sums: &[[__m256; V]; M],
    tile: &MatmulTile<'_>,
    target: &TileOutput,
    first: usize,
) {
    let columns = tile.columns - first;
    for (row, sums) in sums.iter().enumerate() {
        for (vector, sums) in sums.iter().enumerate() {
            let to = target.at(row, first + vector * LANES);
            let columns = columns.saturating_sub(vector * LANES).min(LANES);
            // SAFETY: the target has these columns.
            unsafe {
                if columns == LANES {
                    _mm256_storeu_ps(to, *sums);
                } else {
                    let mut plain = [0.0_f32; LANES];
                    _mm256_storeu_ps(plain.as_mut_ptr(), *sums);
                    plain.as_ptr().copy_to_nonoverlapping(to, columns);
                }
            }
        }
    }
}
