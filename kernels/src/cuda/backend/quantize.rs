//! Rows quantized to FP8, the inputs of FP8 GEMMs.

use std::cell::Cell;

use super::{CudaBackend, wide};
use crate::{
    cuda::{
        buffer::{CudaBuffer, CudaVector, DeferredNorm, QuantizedAs},
        ffi::{self, Address},
        library::KernelLibrary,
        memory::Range,
    },
    layout::{Dtype, WeightFormat},
};

/// Maximum number of rows whose elements are quantized to two parts, FP8 numbers whose sum keeps
/// the precision of bf16.
const SPLIT_ROWS_MAX: usize = 32;
/// Maximum number of quantized rows that are always written in bf16 too. More rows are written in
/// bf16 only for the router of experts and for adapters.
const MIRRORED_ROWS_MAX: usize = 256;
/// Minimum number of FP8 rows for which there is memory: two parts of each of [`SPLIT_ROWS_MAX`]
/// rows.
pub(super) const QUANTIZED_ROWS_MIN: usize = 2 * SPLIT_ROWS_MAX;

/// Quantized input of a GEMM in FP8, which the next quantization overwrites.
pub(in crate::cuda) struct QuantizedRows {
    /// FP8 `[rows][width]`, or two parts of each row.
    pub data: Range,
    /// f32 `[rows]`.
    pub scales: Range,
    /// Number of quantizations so far.
    pub turn: Cell<u64>,
}

/// Addresses of the FP8 copy of a buffer's rows, for the kernel that writes the rows.
pub(in crate::cuda) struct QuantizedOutput {
    pub data: Address,
    pub scales: Address,
    pub parts: usize,
}

/// Source of rows that are quantized.
#[derive(Clone, Copy)]
enum Source<'a> {
    Rows(&'a CudaBuffer),
    /// Rows whose deferred norm is computed first.
    Deferred(DeferredNorm),
    /// The RMS norm of the residual stream, after the addition of `delta`.
    Norm {
        residual: &'a CudaBuffer,
        delta: Option<&'a CudaBuffer>,
        norm: (&'a CudaVector, f32),
    },
    /// SiLU(gate)·up.
    Gated(&'a CudaBuffer),
}

impl CudaBackend {
    /// Returns the number of FP8 parts of each input of GEMMs with this many rows, or `None` if the
    /// inputs stay in bf16.
    pub(in crate::cuda) fn parts_of(&self, rows: usize) -> Option<usize> {
        let is_quantized = self.options.weights == WeightFormat::Fp8 && self.options.fused;
        is_quantized.then_some(if rows <= SPLIT_ROWS_MAX { 2 } else { 1 })
    }

    /// Returns rows of `x` in FP8. Quantizes the rows, unless the kernel that produced them already
    /// did.
    pub(in crate::cuda) fn quantized(
        &self,
        rows: usize,
        x: &CudaBuffer,
        parts: usize,
    ) -> &QuantizedRows {
        let to = self.quantized.as_ref().expect("placed with the weights");
        let produced = |it: QuantizedAs| (it.turn, it.parts) == (to.turn.get(), parts);
        if x.quantized.get().is_some_and(produced) {
            return to;
        }
        assert!(x.is_mirrored(), "quantized rows were overwritten before they were used");
        if let Some(norm) = x.pending.take() {
            let turn = self.quantize(rows, Source::Deferred(norm), x.width, Some(x), parts);
            x.quantized.set(Some(QuantizedAs { turn, parts, is_mirrored: true }));
        } else {
            self.quantize(rows, Source::Rows(x), x.width, None, parts);
        }
        to
    }

    /// Computes the RMS norm of the residual stream, after the addition of `delta`, in bf16 and in
    /// the format of the GEMMs. Returns false when nothing was launched.
    pub(in crate::cuda) fn quantize_norm(
        &self,
        rows: usize,
        (residual, delta): (&CudaBuffer, Option<&CudaBuffer>),
        norm: (&CudaVector, f32),
        out: &CudaBuffer,
    ) -> bool {
        wide(residual);
        let source = Source::Norm { residual, delta, norm };
        let is_mirrored = rows <= MIRRORED_ROWS_MAX || self.has_experts.get();
        if !self.quantize_into(rows, source, out, is_mirrored) {
            return false;
        }
        if !is_mirrored {
            let (residual, (norm, eps)) = (residual.data.address(), norm);
            let norm = norm.data.address();
            out.pending.set(Some(DeferredNorm { count: 0, eps, residual, norm }));
        }
        true
    }

    /// Computes SiLU(gate)·up in bf16 and in the format of the GEMMs. Returns false when nothing
    /// was launched.
    pub(super) fn quantize_gated(
        &self,
        rows: usize,
        gate_up: &CudaBuffer,
        out: &CudaBuffer,
    ) -> bool {
        let is_mirrored = rows <= MIRRORED_ROWS_MAX || self.has_adapters.get();
        self.quantize_into(rows, Source::Gated(gate_up), out, is_mirrored)
    }

    /// Returns the number of FP8 parts of each element, or `None` if rows of `out` cannot be
    /// quantized.
    fn fitting_parts(&self, rows: usize, out: &CudaBuffer) -> Option<usize> {
        // Only matrices whose columns are a multiple of 16 are stored in FP8. The GEMM of another
        // matrix needs the rows in bf16.
        let is_fitting = out.stride == out.width && out.width.is_multiple_of(16);
        self.parts_of(rows).filter(|_| out.dtype == Dtype::Bf16 && is_fitting)
    }

    /// Reserves the FP8 copy of the rows of `out` for the kernel that writes `out` next. Returns
    /// `None` if they are in bf16 only.
    pub(in crate::cuda) fn quantized_output(
        &self,
        rows: usize,
        out: &CudaBuffer,
    ) -> Option<QuantizedOutput> {
        let parts = self.fitting_parts(rows, out)?;
        let (data, scales, turn) = self.begin_quantization(rows, out.width, parts);
        out.quantized.set(Some(QuantizedAs { turn, parts, is_mirrored: true }));
        Some(QuantizedOutput { data, scales, parts })
    }

    /// Begins a quantization. Returns the addresses of FP8 rows and of their scales, and the turn.
    fn begin_quantization(
        &self,
        rows: usize,
        width: usize,
        parts: usize,
    ) -> (Address, Address, u64) {
        let to = self.quantized.as_ref().expect("placed with the weights");
        let stored = if parts == 2 { rows.next_multiple_of(8) * parts } else { rows };
        to.turn.set(to.turn.get() + 1);
        let scales = to.scales.part(0, rows * size_of::<f32>());
        (to.data.part(0, stored * width), scales, to.turn.get())
    }

    fn quantize_into(
        &self,
        rows: usize,
        source: Source<'_>,
        out: &CudaBuffer,
        is_mirrored: bool,
    ) -> bool {
        let Some(parts) = self.fitting_parts(rows, out) else { return false };
        out.forget();
        let mirror = is_mirrored.then_some(out);
        let turn = self.quantize(rows, source, out.width, mirror, parts);
        let is_mirrored = is_mirrored || matches!(source, Source::Norm { .. });
        out.quantized.set(Some(QuantizedAs { turn, parts, is_mirrored }));
        true
    }

    /// Quantizes rows, and writes them to `mirror` in bf16. Returns the number of quantizations so
    /// far, this one included.
    fn quantize(
        &self,
        rows: usize,
        source: Source<'_>,
        width: usize,
        mirror: Option<&CudaBuffer>,
        parts: usize,
    ) -> u64 {
        let (out, scales, turn) = self.begin_quantization(rows, width, parts);
        let mut args = ffi::QuantizeArgs {
            mirror: mirror.map_or(0, |mirror| mirror.data.part(0, mirror.bytes(rows))),
            out,
            scales,
            rows: rows as i32,
            width: width as i32,
            parts: parts as i32,
            ..ffi::QuantizeArgs::default()
        };
        match source {
            Source::Rows(x) => {
                assert_eq!(x.width, width, "quantize: widths differ");
                args.source = ffi::QUANTIZE_ROWS;
                (args.x, args.x_stride) = x.rows_of(rows);
            }
            Source::Deferred(DeferredNorm { eps, residual, norm, .. }) => {
                args.source = ffi::QUANTIZE_NORM;
                (args.residual, args.norm, args.eps) = (residual, norm, eps);
            }
            Source::Gated(x) => {
                assert_eq!(x.width, 2 * width, "quantize: gate and up have the output's width");
                args.source = ffi::QUANTIZE_SILU;
                (args.x, args.x_stride) = x.rows_of(rows);
            }
            Source::Norm { residual, delta, norm: (norm, eps) } => {
                assert!(residual.width == width && norm.len == width, "quantize: widths differ");
                args.source = ffi::QUANTIZE_NORM;
                args.residual = residual.rows_of(rows).0;
                if let Some(delta) = delta {
                    assert_eq!(delta.width, width, "quantize: widths differ");
                    (args.x, args.x_stride) = delta.rows_of(rows);
                }
                (args.norm, args.eps) = (norm.data.address(), eps);
            }
        }
        self.run(|library, stream| {
            // SAFETY: all ranges have the rows and widths checked above. The ranges of a deferred
            // norm have the rows and the width of the buffer. Two parts of up to 32 rows fit
            // `QUANTIZED_ROWS_MIN` rows.
            unsafe { launch!(library, stream, baton_quantize(&args)) }
        });
        turn
    }
}
