//! All-reduces of a rank's partial sums over its group.

use super::{CudaBackend, wide};
use crate::{
    backend::Backend,
    cuda::{
        buffer::{CudaBuffer, CudaVector},
        collective::{AllReduceNorm, AllReduceShape, CudaGroup},
        error::CudaError,
    },
};

impl CudaBackend {
    /// Launches in-place all-reduces of the first rows of `x`.
    pub(super) fn all_reduce_rows(
        &self,
        group: &CudaGroup,
        rows: usize,
        x: &CudaBuffer,
    ) -> Result<(), CudaError> {
        let row_bytes = x.stride * x.dtype.bytes();
        // The arenas hold this many rows at a time.
        let rows_most = group.message_bytes() / row_bytes;
        if rows_most == 0 && rows > 0 {
            let (wanted, left) = (row_bytes as u64, group.message_bytes() as u64);
            return Err(CudaError::RangeFull { what: "the all-reduce of a row", wanted, left });
        }
        (0..rows).step_by(rows_most.max(1)).try_for_each(|first| {
            let rows = rows_most.min(rows - first);
            let shape = AllReduceShape { dtype: x.dtype, rows, width: x.stride };
            let (at, is_dependent) = (first * row_bytes, self.options.dependent_launch);
            group.all_reduce_at(shape, (&x.data, at), is_dependent, &self.compute)
        })
    }

    /// Launches an all-reduce of `delta`, the residual add and the RMS norm, fused into one kernel
    /// where possible.
    pub(super) fn all_reduce_onto_residual(
        &mut self,
        rows: usize,
        delta: &mut CudaBuffer,
        residual: &mut CudaBuffer,
        (norm, eps): (&CudaVector, f32),
        out: &mut CudaBuffer,
    ) {
        let width = norm.len;
        let group = self.group.as_ref().expect("only a rank of a group has partial sums");
        let shape = AllReduceShape { dtype: delta.dtype, rows, width };
        let is_packed =
            [&*delta, &*residual, &*out].iter().all(|b| (b.width, b.stride) == (width, width));
        if !is_packed || !group.fuses_norm(shape) {
            self.all_reduce(rows, delta);
            return self.add_rms_norm(rows, residual, delta, norm, eps, out);
        }
        wide(residual);
        assert_eq!(delta.dtype, out.dtype, "types of addend and output differ");
        assert!(
            [&*delta, &*residual, &*out].iter().all(|buffer| rows <= buffer.rows_max),
            "a buffer has fewer than {rows} rows"
        );
        out.forget();
        if self.is_faulty() {
            return;
        }
        let norm = AllReduceNorm { residual: &residual.data, weight: &norm.data, eps };
        let is_dependent = self.options.dependent_launch;
        let stream = &self.compute;
        let outcome =
            group.all_reduce_norm(shape, &delta.data, norm, &out.data, is_dependent, stream);
        self.note(outcome);
    }
}
