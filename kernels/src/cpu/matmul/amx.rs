//! GEMM on AMX tiles: one instruction accumulates 16 × 16 dot products over 32 bf16 inputs.
//!
//! A *pair* is a 32-bit word with an even input and the next odd input. Panels already have the
//! layout of B tiles: a row of a B tile is 16 of the 32 words that a panel has for one pair of
//! inputs. The rows of `x` are packed into A tiles of 16 rows × 32 inputs. A pass multiplies up to
//! 32 rows with one panel, or up to 16 rows with two panels. It uses two panels where it can,
//! because two memory streams are faster than one.
//!
//! The inputs are accumulated in order and separately for each row, so a row's result does not
//! depend on the batch. Within a step of 32 inputs, AMX sums the even and the odd inputs separately
//! and flushes denormals, so the result differs from the reference by rounding. `avx512.rs` adds in
//! the same order for a single row.

use std::arch::{asm, x86_64::__cpuid_count};

use super::{
    super::{
        aligned::Aligned,
        disjoint_slice::DisjointSlice,
        isa::{Level, per_level},
    },
    CpuMatrix, TileOutput, grid,
    pack::{INPUTS_STEP, PANEL},
};
use crate::{cpu::threads::ThreadPool, layout::to_bf16_bits};

/// Rows of a tile.
const TILE_ROWS: usize = 16;
/// Maximum rows of one pass: two A tiles.
const PASS_ROWS: usize = 2 * TILE_ROWS;
/// Words of an A tile: 16 rows of 16 pairs.
const TILE_WORDS: usize = TILE_ROWS * INPUTS_STEP / 2;
/// Bytes of panels that a task multiplies with all rows before it takes the next panels. They stay
/// in the core's L2 cache meanwhile.
const CACHED_WEIGHTS_BYTES: usize = 768 << 10;

/// Requests AMX permission from the system and returns whether the processor and the system support
/// AMX for bf16. The permission is for the whole process. With it, the system reserves 8 KiB for
/// each thread that uses tiles.
pub(in crate::cpu) fn request() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    let has_features = __cpuid_count(7, 0).edx & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE;
    has_features && request_permission()
}

#[cfg(target_os = "linux")]
fn request_permission() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: the call changes only this process's permission; an old kernel refuses it.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn request_permission() -> bool {
    false
}

/// Rows of `x` in A tiles: `[tile][step][row][pair]`, where a step is 32 inputs. The last tile may
/// have fewer than 16 rows; the words of its other rows are stale and never loaded.
pub(super) struct RowTiles {
    words: Aligned<u32>,
}

impl Default for RowTiles {
    fn default() -> Self {
        Self { words: Aligned::zeroed(0) }
    }
}

impl RowTiles {
    fn pack(&mut self, level: Level, pool: &mut ThreadPool, x: &[f32], k: usize) {
        let (rows, steps) = (x.len() / k, k.div_ceil(INPUTS_STEP));
        let tile_words = steps * TILE_WORDS;
        let words = rows.div_ceil(TILE_ROWS) * tile_words;
        if self.words.len() < words {
            self.words = Aligned::zeroed(words.next_power_of_two());
        }
        let pack_tile = |tile: usize, out: &mut [u32]| {
            pack_tile_rows(level, &x[tile * TILE_ROWS * k..], k, out);
        };
        let tiles = &mut self.words[..words];
        if x.len() < 1 << 15 {
            for (tile, out) in tiles.chunks_exact_mut(tile_words).enumerate() {
                pack_tile(tile, out);
            }
        } else {
            pool.for_each_piece(tiles, tile_words, |_, tile, out| pack_tile(tile, out));
        }
    }
}

per_level! {
    /// Packs up to 16 rows of `x` as the steps of one tile.
    fn pack_tile_rows(x: &[f32], k: usize, out: &mut [u32]) {
        for (row, x) in x.chunks_exact(k).take(TILE_ROWS).enumerate() {
            for (step, x) in x.chunks(INPUTS_STEP).enumerate() {
                let start = step * TILE_WORDS + row * INPUTS_STEP / 2;
                pack_inputs(x, &mut out[start..][..INPUTS_STEP / 2]);
            }
        }
    }
}

/// Packs up to 32 inputs as 16 pairs, padded with zeros.
#[inline(always)]
fn pack_inputs(x: &[f32], out: &mut [u32]) {
    let mut inputs = [0.0; INPUTS_STEP];
    inputs[..x.len()].copy_from_slice(x);
    for (out, [even, odd]) in out.iter_mut().zip(inputs.as_chunks::<2>().0) {
        *out = u32::from(to_bf16_bits(*even)) | u32::from(to_bf16_bits(*odd)) << 16;
    }
}

/// Computes `out = x · wᵀ` for bf16 weights and at least one row.
///
/// # Safety
/// [`request`] returned true in this process.
pub(super) unsafe fn matmul(
    level: Level,
    pool: &mut ThreadPool,
    tiles: &mut RowTiles,
    x: &[f32],
    w: &CpuMatrix,
    out: &mut [f32],
) {
    let (n, k, rows) = (w.rows(), w.cols(), x.len() / w.cols());
    tiles.pack(level, pool, x, k);
    let (tiles, steps) = (&*tiles, k.div_ceil(INPUTS_STEP));
    let passes = rows.div_ceil(PASS_ROWS);
    let panel_words = w.panel_words();
    let cached_panels = (CACHED_WEIGHTS_BYTES / (panel_words * size_of::<u32>())).max(1);
    let grid = grid(pool, w, 1);
    let sums = DisjointSlice::new(out);
    pool.run(grid.task_count(), &|_, task| {
        let mut shapes = TileShapes::none();
        let (_, panels) = grid.part(task);
        for first in panels.clone().step_by(cached_panels) {
            let end = panels.end.min(first + cached_panels);
            w.with_panels(level, first, end - first, |words| {
                for pass_index in 0..passes {
                    let first_row = pass_index * PASS_ROWS;
                    let pass_rows = PASS_ROWS.min(rows - first_row);
                    // SAFETY: [`request`] returned true (`# Safety`). A pass has 1 to `PASS_ROWS`
                    // rows.
                    unsafe { shapes.set(pass_rows) };
                    let a = &tiles.words[2 * pass_index * steps * TILE_WORDS..];
                    let panels_max = if pass_rows > TILE_ROWS { 1 } else { 2 };
                    let mut panel = first;
                    while panel < end {
                        let panel_count = panels_max.min(end - panel);
                        let columns = (panel_count * PANEL).min(n - panel * PANEL);
                        let start = first_row * n + panel * PANEL;
                        let length = (pass_rows - 1) * n + columns;
                        let target = TileOutput { start: sums.range_ptr(start, length), stride: n };
                        let b =
                            &words[(panel - first) * panel_words..][..panel_count * panel_words];
                        let pass = TilePass { steps, a, b, rows: pass_rows, panel_count };
                        // SAFETY: the tiles are shaped for `pass_rows` rows. The target is inside
                        // the output, and no other task has these rows and panels.
                        unsafe { pass.run(columns, &target) };
                        panel += panel_count;
                    }
                }
            });
        }
    });
}

/// Shapes of this thread's tile registers. Dropping the shapes releases the registers, and context
/// switches of the thread save no tiles any more.
struct TileShapes {
    /// Rows of the passes for which the tiles are shaped; 0 before the first pass.
    rows: usize,
}

/// Operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    column_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileShapes {
    fn none() -> Self {
        Self { rows: 0 }
    }

    /// Shapes the tiles for passes of `rows` rows:
    /// - Up to 16 rows: tiles 0 to 3 are accumulators, 4 is A, 5 and 6 are B.
    /// - More rows: for the first 16 rows tiles 0 and 1 are accumulators and 4 is A. For the other
    ///   rows tiles 2 and 3 are accumulators and 5 is A. Tiles 6 and 7 are B.
    ///
    /// # Safety
    /// [`request`] returned true in this process; `rows` is 1 to 32.
    unsafe fn set(&mut self, rows: usize) {
        if self.rows == rows {
            return;
        }
        let rows_of = match rows.checked_sub(TILE_ROWS) {
            None | Some(0) => [rows, rows, rows, rows, rows, 16, 16, 16],
            Some(rest) => [16, 16, rest, rest, 16, rest, 16, 16],
        };
        let mut configuration = Configuration {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            column_bytes: [0; 16],
            rows: [0; 16],
        };
        for (tile, rows) in rows_of.into_iter().enumerate() {
            configuration.column_bytes[tile] = 64;
            configuration.rows[tile] = rows as u8;
        }
        // SAFETY: the shapes are valid for palette 1; nothing but tile registers changes.
        unsafe {
            asm!(
                "ldtilecfg [{}]",
                in(reg) &raw const configuration,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags, readonly),
            );
        }
        self.rows = rows;
    }
}

impl Drop for TileShapes {
    fn drop(&mut self) {
        if self.rows != 0 {
            // SAFETY: tiles were configured, so the machine has them.
            unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
        }
    }
}

/// A pass: up to 32 rows times one panel, or up to 16 rows times two panels.
struct TilePass<'a> {
    /// Steps of 32 inputs.
    steps: usize,
    /// A tiles of the rows. Tiles of later rows may follow.
    a: &'a [u32],
    /// The panels.
    b: &'a [u32],
    rows: usize,
    panel_count: usize,
}

impl TilePass<'_> {
    /// Computes the first `columns` columns of the pass into `target`.
    ///
    /// # Safety
    /// This thread's tiles are shaped for `self.rows` rows. `target` may be written in `self.rows`
    /// rows of `columns` elements.
    unsafe fn run(&self, columns: usize, target: &TileOutput) {
        let width = self.panel_count * PANEL;
        assert!(self.a.len() >= self.rows.div_ceil(TILE_ROWS) * self.steps * TILE_WORDS);
        assert_eq!(self.b.len(), self.panel_count * self.steps * PANEL * TILE_ROWS);
        if columns == width {
            // SAFETY: the asserts checked the lengths. The target is whole panels wide.
            return unsafe { self.multiply(target) };
        }
        // The last panel is partial, but a tile store always writes 16 columns: use a buffer.
        let mut buffer = [0.0_f32; PASS_ROWS * PANEL];
        let whole = TileOutput { start: buffer.as_mut_ptr(), stride: width };
        // SAFETY: the asserts checked the lengths. The buffer has 32 rows of one panel, or 16 rows
        // of two panels.
        unsafe { self.multiply(&whole) };
        for (row, sums) in buffer.chunks_exact(width).take(self.rows).enumerate() {
            // SAFETY: the target has these columns, and the buffer does not overlap the target.
            unsafe { sums.as_ptr().copy_to_nonoverlapping(target.at(row, 0), columns) };
        }
    }

    /// Calls the kernel for this number of A tiles and panels.
    ///
    /// # Safety
    /// As [`Self::run`]. Besides, the target is whole panels wide, and `a` and `b` have the lengths
    /// that `run` checks.
    unsafe fn multiply(&self, target: &TileOutput) {
        // SAFETY: the lengths and the target's width are as required (`# Safety`). Each kernel gets
        // the numbers of rows and panels that it requires.
        unsafe {
            match (self.rows > TILE_ROWS, self.panel_count) {
                (true, _) => self.two_tiles_one_panel(target),
                (false, 1) => self.one_tile_one_panel(target),
                (false, _) => self.one_tile_two_panels(target),
            }
        }
    }

    /// Multiplies two A tiles with one panel.
    ///
    /// # Safety
    /// As [`Self::multiply`], for more than 16 rows and one panel.
    unsafe fn two_tiles_one_panel(&self, target: &TileOutput) {
        // SAFETY: each of the `steps` steps reads 1 KiB of each A tile and 2 KiB of the panel. The
        // stores write 128 bytes in each of the pass's rows. Nothing else changes.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{a} + {stride_a}*1]",
                "tileloadd tmm6, [{b} + {stride_b}*1]",
                "tileloadd tmm5, [{a2} + {stride_a}*1]",
                "tileloadd tmm7, [{b} + {stride_b}*1 + 64]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, 1024",
                "add {a2}, 1024",
                "add {b}, 2048",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{c} + {stride_c}*1], tmm0",
                "tilestored [{c} + {stride_c}*1 + 64], tmm1",
                "tilestored [{c2} + {stride_c}*1], tmm2",
                "tilestored [{c2} + {stride_c}*1 + 64], tmm3",
                a = inout(reg) self.a.as_ptr() => _,
                a2 = inout(reg) self.a.as_ptr().add(self.steps * TILE_WORDS) => _,
                b = inout(reg) self.b.as_ptr() => _,
                steps = inout(reg) self.steps => _,
                c = in(reg) target.start,
                c2 = in(reg) target.at(TILE_ROWS, 0),
                stride_a = in(reg) 64_usize,
                stride_b = in(reg) 128_usize,
                stride_c = in(reg) target.stride * size_of::<f32>(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    /// Multiplies one A tile with two panels.
    ///
    /// # Safety
    /// As [`Self::multiply`], for up to 16 rows and two panels.
    unsafe fn one_tile_two_panels(&self, target: &TileOutput) {
        // SAFETY: each of the `steps` steps reads 1 KiB of the A tile and 2 KiB of each panel. The
        // stores write 256 bytes in each of the pass's rows. Nothing else changes.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{a} + {stride_a}*1]",
                "tileloadd tmm5, [{b} + {stride_b}*1]",
                "tileloadd tmm6, [{b2} + {stride_b}*1]",
                "tdpbf16ps tmm0, tmm4, tmm5",
                "tdpbf16ps tmm2, tmm4, tmm6",
                "tileloadd tmm5, [{b} + {stride_b}*1 + 64]",
                "tileloadd tmm6, [{b2} + {stride_b}*1 + 64]",
                "tdpbf16ps tmm1, tmm4, tmm5",
                "tdpbf16ps tmm3, tmm4, tmm6",
                "add {a}, 1024",
                "add {b}, 2048",
                "add {b2}, 2048",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{c} + {stride_c}*1], tmm0",
                "tilestored [{c} + {stride_c}*1 + 64], tmm1",
                "tilestored [{c} + {stride_c}*1 + 128], tmm2",
                "tilestored [{c} + {stride_c}*1 + 192], tmm3",
                a = inout(reg) self.a.as_ptr() => _,
                b = inout(reg) self.b.as_ptr() => _,
                b2 = inout(reg) self.b.as_ptr().add(self.steps * PANEL * TILE_ROWS) => _,
                steps = inout(reg) self.steps => _,
                c = in(reg) target.start,
                stride_a = in(reg) 64_usize,
                stride_b = in(reg) 128_usize,
                stride_c = in(reg) target.stride * size_of::<f32>(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _,
                options(nostack),
            );
        }
    }

    /// Multiplies one A tile with one panel.
    ///
    /// # Safety
    /// As [`Self::multiply`], for up to 16 rows and one panel.
    unsafe fn one_tile_one_panel(&self, target: &TileOutput) {
        // SAFETY: each of the `steps` steps reads 1 KiB of the A tile and 2 KiB of the panel. The
        // stores write 128 bytes in each of the pass's rows. Nothing else changes.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "2:",
                "tileloadd tmm4, [{a} + {stride_a}*1]",
                "tileloadd tmm5, [{b} + {stride_b}*1]",
                "tileloadd tmm6, [{b} + {stride_b}*1 + 64]",
                "tdpbf16ps tmm0, tmm4, tmm5",
                "tdpbf16ps tmm1, tmm4, tmm6",
                "add {a}, 1024",
                "add {b}, 2048",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{c} + {stride_c}*1], tmm0",
                "tilestored [{c} + {stride_c}*1 + 64], tmm1",
                a = inout(reg) self.a.as_ptr() => _,
                b = inout(reg) self.b.as_ptr() => _,
                steps = inout(reg) self.steps => _,
                c = in(reg) target.start,
                stride_a = in(reg) 64_usize,
                stride_b = in(reg) 128_usize,
                stride_c = in(reg) target.stride * size_of::<f32>(),
                out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
                options(nostack),
            );
        }
    }
}
