//! Weights on their way to the GPU: decoded into pinned memory, and copied from there.

use std::{collections::VecDeque, sync::Arc, thread};

use half::bf16;

use super::{
    context::{Context, Event, HostToDevice, Stream},
    error::CudaError,
    memory::{InFlight, Pinned, Range},
};
use crate::{backend::RowSource, layout::Dtype};

/// Of each of two buffers, through which weights go to the GPU.
const STAGING_BYTES: usize = 32 << 20;
/// Threads that decode weights.
const DECODERS_MAX: usize = 16;

/// Weights on their way to the GPU: while one buffer is copied the other is filled.
pub(super) struct Uploads {
    stream: Stream<HostToDevice>,
    free: Vec<(Pinned<u8>, Event)>,
    in_flight: VecDeque<InFlight<u8>>,
    decoders: usize,
}

impl Uploads {
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let buffer = || {
            let pinned = Pinned::zeroed(context, "the weights' way", STAGING_BYTES)?;
            Ok((pinned, Event::new(context)?))
        };
        Ok(Self {
            stream: Stream::new(context)?,
            free: vec![buffer()?, buffer()?],
            in_flight: Default::default(),
            decoders: thread::available_parallelism().map_or(1, usize::from).min(DECODERS_MAX),
        })
    }

    pub fn rows(
        &mut self,
        source: &dyn RowSource,
        dtype: Dtype,
        to: &Range,
    ) -> Result<(), CudaError> {
        let (rows, row_bytes) = (source.rows(), source.cols() * dtype.bytes());
        if row_bytes == 0 {
            return Ok(());
        }
        if row_bytes > STAGING_BYTES {
            return Err(CudaError::Unsupported {
                what: "the width of a weight matrix",
                value: source.cols().to_string(),
                allowed: "up to 8,388,608",
            });
        }
        let step = STAGING_BYTES / row_bytes;
        for first in (0..rows).step_by(step) {
            let count = step.min(rows - first);
            let (mut pinned, done) = match self.free.pop() {
                Some(buffer) => buffer,
                None => self.in_flight.pop_front().expect("free or in flight").finish()?,
            };
            decode(source, first, dtype, &mut pinned[..count * row_bytes], self.decoders);
            let (bytes, offset) = (count * row_bytes, first * row_bytes);
            self.in_flight.push_back(pinned.upload(bytes, to, offset, &self.stream, done)?);
        }
        Ok(())
    }
}

/// Rows from `first` on as the GPU has them, by several threads.
fn decode(source: &dyn RowSource, first: usize, dtype: Dtype, out: &mut [u8], threads: usize) {
    let row_bytes = source.cols() * dtype.bytes();
    let rows = out.len() / row_bytes;
    // A thread costs more than a small matrix.
    let threads = threads.min(out.len() >> 18).max(1);
    let share = rows.div_ceil(threads).max(1);
    thread::scope(|scope| {
        for (part, out) in out.chunks_mut(share * row_bytes).enumerate() {
            let decode = move || {
                let mut values = vec![0.0f32; source.cols()];
                for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
                    source.read_row(first + part * share + row, &mut values);
                    match dtype {
                        Dtype::F32 => out.copy_from_slice(bytemuck::cast_slice(&values)),
                        Dtype::Bf16 => {
                            for (out, value) in out.chunks_exact_mut(2).zip(&values) {
                                out.copy_from_slice(&bf16::from_f32(*value).to_ne_bytes());
                            }
                        }
                    }
                }
            };
            if threads == 1 {
                let mut decode = decode;
                decode();
            } else {
                scope.spawn(decode);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Counted;

    impl RowSource for Counted {
        fn rows(&self) -> usize {
            700
        }

        fn cols(&self) -> usize {
            1025
        }

        fn read_row(&self, row: usize, out: &mut [f32]) {
            out.iter_mut().enumerate().for_each(|(col, out)| *out = (row * 3 + col % 7) as f32);
        }
    }

    /// Small whole numbers, so that bf16 holds most of them; the rest is rounded.
    #[test]
    fn decoded_rows_are_the_sources_whatever_the_threads() {
        for (dtype, first, rows) in
            [(Dtype::F32, 0, 700), (Dtype::Bf16, 3, 697), (Dtype::F32, 9, 1)]
        {
            for threads in [1, 3, 16] {
                let mut out = vec![0; rows * 1025 * dtype.bytes()];
                decode(&Counted, first, dtype, &mut out, threads);
                for (index, bytes) in out.chunks(dtype.bytes()).enumerate() {
                    let want = ((first + index / 1025) * 3 + index % 1025 % 7) as f32;
                    match dtype {
                        Dtype::F32 => assert_eq!(bytes, want.to_ne_bytes()),
                        Dtype::Bf16 => assert_eq!(bytes, bf16::from_f32(want).to_ne_bytes()),
                    }
                }
            }
        }
    }
}
