//! A prompt's sums over the ranks, under the products beside them.
//!
//! The rows of a product are cut into buckets. While the second bucket is multiplied the first is summed,
//! added to the residual stream and normed, in a stream of its own, and so on; and what multiplies those
//! rows next begins with the buckets that are there. The last buckets are small, for nothing but the next
//! product covers their sums.

use std::{
    ops::Range as Rows,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{
    attention::dtype_code,
    backend::CudaBackend,
    buffer::{CudaBuffer, CudaMatrix, CudaVector},
    context::{Compute, Context, Event, Stream},
    error::CudaError,
    product::Product,
};

/// Products of fewer rows do not fill a GPU.
const ROWS_MIN: usize = 256;
/// Rows of a bucket are a multiple of it, as products' tiles are.
const ROWS_STEP: usize = 128;
/// Of one product.
const BUCKETS_MAX: usize = 64;

/// Where sums run beside products.
#[derive(Debug)]
pub(super) struct Overlap {
    stream: Stream<Compute>,
    /// Of each bucket: its product is there, and its rows are normed.
    multiplied: Vec<Event>,
    normed: Vec<Event>,
    /// The buckets of the rows that are under way, and where they go.
    buckets: Vec<Rows<usize>>,
    to: u64,
    /// The compute stream has not waited for them.
    is_under_way: AtomicBool,
}

impl Overlap {
    /// Of a bucket, unless told otherwise: none, for the products lose more than the sums win
    /// (`kernels/cuda/collective/README.md` has the figures).
    pub const ROWS: usize = 0;

    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let events = || (0..BUCKETS_MAX).map(|_| Event::new(context)).collect::<Result<_, _>>();
        Ok(Self {
            // Its kernels are few and short, and what waits for them is long.
            stream: Stream::urgent(context)?,
            multiplied: events()?,
            normed: events()?,
            buckets: Vec::new(),
            to: 0,
            is_under_way: AtomicBool::new(false),
        })
    }

    /// Makes `compute` wait for the rows that are under way.
    pub fn finish(&self, compute: &Stream<Compute>) -> Result<(), CudaError> {
        if !self.is_under_way.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        match self.buckets.len() {
            0 => Ok(()),
            count => compute.wait(&self.normed[count - 1]),
        }
    }

    /// The buckets of what is in this buffer, when that is under way.
    fn of(&self, x: &CudaBuffer, rows: usize) -> Option<&[Rows<usize>]> {
        let is_it = self.is_under_way.load(Ordering::Relaxed) && self.to == x.data.address();
        let is_all = self.buckets.last().is_some_and(|last| last.end == rows);
        (is_it && is_all).then_some(&self.buckets)
    }
}

/// `rows` rows in buckets of `most`, the last of which are half of what is left.
pub(super) fn buckets(rows: usize, most: usize) -> Vec<Rows<usize>> {
    let mut buckets: Vec<Rows<usize>> = Vec::new();
    let most = most.max(ROWS_MIN).max(rows.div_ceil(BUCKETS_MAX / 2)).next_multiple_of(ROWS_STEP);
    let mut first = 0;
    while first < rows {
        let left = rows - first;
        let half = (left / 2).next_multiple_of(ROWS_STEP).max(ROWS_MIN);
        let taken = most.min(half);
        // What would be left is no product of its own.
        let taken = if left - taken.min(left) < ROWS_STEP { left } else { taken };
        buckets.push(first..first + taken);
        first += taken;
    }
    buckets
}

impl CudaBackend {
    /// True when the sums of so many rows go under products.
    pub(super) fn overlaps(&self, rows: usize) -> bool {
        self.overlap.is_some() && rows >= 2 * self.options().overlap_rows.max(ROWS_MIN)
    }

    /// [`Backend::project_onto_residual`](crate::Backend::project_onto_residual) of a rank, bucket by bucket.
    pub(super) fn project_in_buckets(
        &mut self,
        rows: usize,
        (x, w): (&CudaBuffer, &CudaMatrix),
        delta: &mut CudaBuffer,
        residual: &mut CudaBuffer,
        (norm, eps): (&CudaVector, f32),
        out: &mut CudaBuffer,
    ) -> Result<(), CudaError> {
        let width = norm.len;
        let is_packed =
            [&*delta, &*residual, &*out].iter().all(|b| (b.width, b.stride) == (width, width));
        assert!(is_packed, "what is summed is packed");
        assert_eq!(x.pending.get(), None, "rows that are not finished are not multiplied");
        assert_eq!(delta.dtype, out.dtype, "what is added is of the output's type");
        self.finish_overlap()?;
        let mut overlap = self.overlap.take().expect("sums of so many rows go under products");
        let buckets = buckets(rows, self.options().overlap_rows);
        let outcome = buckets.iter().enumerate().try_for_each(|(index, bucket)| {
            self.product_of_rows(bucket, (x, w), delta)?;
            overlap.multiplied[index].record(self.compute())?;
            overlap.stream.wait(&overlap.multiplied[index])?;
            // Behind a wait for another stream: no early start.
            self.sum_rows(delta, bucket.clone(), false, &overlap.stream)?;
            let part = |buffer: &CudaBuffer| {
                let at = buffer.bytes(bucket.start);
                buffer.data.part(at, buffer.bytes(bucket.end) - at)
            };
            // SAFETY: the same rows of three buffers that have them, as `part` has checked.
            let code = unsafe {
                (self.library().functions().baton_add_rms_norm)(
                    dtype_code(out.dtype),
                    part(residual),
                    part(delta),
                    norm.data.address(),
                    eps,
                    part(out),
                    0,
                    bucket.len() as i32,
                    width as i32,
                    overlap.stream.raw().cast(),
                )
            };
            self.library().check("baton_add_rms_norm", code)?;
            overlap.normed[index].record(&overlap.stream)
        });
        out.pending.set(None);
        (overlap.buckets, overlap.to) = (buckets, out.data.address());
        *overlap.is_under_way.get_mut() = outcome.is_ok();
        self.overlap = Some(overlap);
        outcome
    }

    /// A product of rows that are under way, each bucket as soon as it is there. False when they are not.
    pub(super) fn product_in_buckets(
        &mut self,
        rows: usize,
        (x, w): (&CudaBuffer, &CudaMatrix),
        out: &mut CudaBuffer,
    ) -> Result<bool, CudaError> {
        let Some(mut overlap) = self.overlap.take() else { return Ok(false) };
        let outcome = match overlap.of(x, rows).map(<[_]>::to_vec) {
            None => overlap.finish(self.compute()).map(|()| false),
            Some(buckets) => {
                *overlap.is_under_way.get_mut() = false;
                let each = buckets.iter().zip(&overlap.normed).try_for_each(|(bucket, normed)| {
                    self.compute().wait(normed)?;
                    self.product_of_rows(bucket, (x, w), out)
                });
                each.map(|()| true)
            }
        };
        self.overlap = Some(overlap);
        outcome
    }

    fn product_of_rows(
        &mut self,
        rows: &Rows<usize>,
        (x, w): (&CudaBuffer, &CudaMatrix),
        out: &CudaBuffer,
    ) -> Result<(), CudaError> {
        let product = Product {
            rows: rows.len(),
            inputs: w.cols,
            outputs: w.rows,
            from: w.dtype,
            to: out.dtype,
            x_stride: x.stride,
            out_stride: out.stride,
        };
        let section = |buffer: &CudaBuffer| {
            let at = buffer.bytes(rows.start);
            buffer.data.section(at, buffer.bytes(rows.end) - at)
        };
        self.run_product(product, &section(x), &w.data, &section(out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_all_rows_once_and_the_last_are_small() {
        for (rows, most) in
            [(512, 256), (2048, 1024), (4096, 1024), (4097, 512), (8192, 256), (65_536, 256)]
        {
            let buckets = buckets(rows, most);
            assert!(buckets.len() <= BUCKETS_MAX, "{rows} rows are {} buckets", buckets.len());
            let ends: Vec<_> = buckets.iter().map(|bucket| bucket.end).collect();
            let starts: Vec<_> = buckets.iter().map(|bucket| bucket.start).collect();
            assert_eq!((starts[0], *ends.last().unwrap()), (0, rows));
            assert_eq!(starts[1..], ends[..ends.len() - 1]);
            let last = buckets.last().unwrap();
            assert!((ROWS_STEP..=ROWS_MIN + ROWS_STEP).contains(&last.len()), "{buckets:?}");
        }
        assert_eq!(
            buckets(4096, 1024),
            [0..1024, 1024..2048, 2048..3072, 3072..3584, 3584..3840, 3840..4096]
        );
    }
}
