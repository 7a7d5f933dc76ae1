//! Weight uploads to the GPU: several threads read weights into pinned memory, while earlier
//! weights are copied.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use super::{
    buffer::CudaMatrix,
    context::{Context, Event, HostToDevice, Stream},
    error::CudaError,
    memory::{CopyInFlight, PinnedMemory, Range},
};
use crate::{
    backend::RowSource,
    cpu::threads::ThreadPool,
    fp8::{self, BlockScales},
    int4,
    layout::Dtype,
    mxfp4,
};

/// Pinned buffers. One is filled while others are copied; more than two absorb jitter of either
/// side.
const BUFFERS: usize = 4;
/// Bytes of each buffer.
const BUFFER_BYTES: usize = 16 << 20;
/// Bytes that a thread reads at once: few enough to stay in its cache until they are checked.
const PIECE_BYTES: usize = 256 << 10;
/// Maximum reader threads, enough to saturate host memory.
const READERS_MAX: usize = 32;

/// Buffers and threads of loading.
pub(super) struct Uploads {
    context: Arc<Context>,
    stream: Stream<HostToDevice>,
    buffers: Buffers<(PinnedMemory<u8>, Event), CopyInFlight<u8>>,
    readers: ThreadPool,
}

/// Buffers that are free or in flight. The buffer of a failed copy is lost, and a new one replaces
/// it.
struct Buffers<B, C> {
    free: Vec<B>,
    in_flight: VecDeque<C>,
}

impl<B, C> Buffers<B, C> {
    /// Returns a free buffer, a new one while fewer than [`BUFFERS`] exist, or waits for the oldest
    /// copy.
    fn take<E>(
        &mut self,
        new: impl FnOnce() -> Result<B, E>,
        finish: impl FnOnce(C) -> Result<B, E>,
    ) -> Result<B, E> {
        match self.free.pop() {
            Some(buffer) => Ok(buffer),
            None if self.in_flight.len() < BUFFERS => new(),
            None => finish(self.in_flight.pop_front().expect("there are copies in flight")),
        }
    }

    /// Waits for all copies in flight, and returns the first error.
    fn finish<E>(&mut self, finish: impl Fn(C) -> Result<B, E>) -> Result<(), E> {
        let mut outcome = Ok(());
        for copy in self.in_flight.drain(..) {
            match finish(copy) {
                Ok(buffer) => self.free.push(buffer),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome
    }
}

fn new_buffer(context: &Arc<Context>) -> Result<(PinnedMemory<u8>, Event), CudaError> {
    let pinned = PinnedMemory::zeroed(context, "the weights' uploads", BUFFER_BYTES)?;
    Ok((pinned, Event::new(context)?))
}

/// Use of the machine's CPUs by uploads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReaderShare {
    /// Nothing else runs: weights are loaded at the start.
    All,
    /// Other threads compute digests of the weights and run steps. Readers wait for each other
    /// after every buffer, so one reader without a CPU delays all of them.
    Half,
}

impl Uploads {
    pub(super) fn new(context: &Arc<Context>, share: ReaderShare) -> Result<Self, CudaError> {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let threads = match share {
            ReaderShare::All => cpus,
            ReaderShare::Half => cpus / 2,
        };
        let threads = threads.clamp(1, READERS_MAX);
        let readers = ThreadPool::new(threads, "baton-load")
            .map_err(|error| CudaError::NoThreads { reason: error.to_string() })?;
        let free = (0..BUFFERS).map(|_| new_buffer(context)).collect::<Result<_, CudaError>>()?;
        Ok(Self {
            context: Arc::clone(context),
            stream: Stream::new(context)?,
            buffers: Buffers { free, in_flight: VecDeque::with_capacity(BUFFERS) },
            readers,
        })
    }

    /// Waits for the copies in flight.
    pub(super) fn finish(&mut self) -> Result<(), CudaError> {
        self.buffers.finish(CopyInFlight::finish)
    }

    /// Enqueues a copy of `bytes`.
    pub(super) fn bytes(&mut self, bytes: &[u8], to: &Range) -> Result<(), CudaError> {
        for (index, piece) in bytes.chunks(BUFFER_BYTES).enumerate() {
            let (mut pinned, done) = self.buffer()?;
            pinned[..piece.len()].copy_from_slice(piece);
            let copy = pinned.upload(piece.len(), to, index * BUFFER_BYTES, &self.stream, done)?;
            self.buffers.in_flight.push_back(copy);
        }
        Ok(())
    }

    fn buffer(&mut self) -> Result<(PinnedMemory<u8>, Event), CudaError> {
        self.buffers.take(|| new_buffer(&self.context), CopyInFlight::finish)
    }

    /// Reads a matrix into its place and enqueues the copies. The last copies may be in flight on
    /// return.
    pub(super) fn matrix(
        &mut self,
        source: &dyn RowSource,
        to: &CudaMatrix,
    ) -> Result<(), CudaError> {
        match (&to.scales, to.int4_block) {
            (None, None) if to.is_mxfp4 => {
                let parts = source.mxfp4_parts().expect("the matrix was placed in MXFP4");
                let pack = |tile, out: &mut [u8]| mxfp4::pack_tile(source, parts, tile, out);
                self.tiles(source, mxfp4::tile_bytes(to.cols), &to.data, pack)
            }
            (None, Some(block)) => {
                let groups = source.int4_groups().expect("the matrix was placed in INT4");
                let pack =
                    |unit, out: &mut [u8]| int4::pack_unit(source, (&groups, block), unit, out);
                self.tiles(source, int4::unit_bytes(to.cols, block), &to.data, pack)
            }
            (None, None) => self.rows(source, to.dtype, &to.data),
            (Some(scales), _) => self.fp8_rows(source, &to.data, scales),
        }
    }

    /// Packs a matrix in tiles of `tile_bytes` bytes.
    fn tiles(
        &mut self,
        source: &dyn RowSource,
        tile_bytes: usize,
        to: &Range,
        pack: impl Fn(usize, &mut [u8]) + Sync,
    ) -> Result<(), CudaError> {
        if tile_bytes > BUFFER_BYTES {
            return Err(too_wide(source));
        }
        let step = BUFFER_BYTES / tile_bytes * tile_bytes;
        for begin in (0..to.bytes()).step_by(step) {
            let bytes = step.min(to.bytes() - begin);
            let (mut pinned, done) = self.buffer()?;
            self.readers.for_each_piece(&mut pinned[..bytes], tile_bytes, |_, piece, out| {
                pack(begin / tile_bytes + piece, out);
            });
            let copy = pinned.upload(bytes, to, begin, &self.stream, done)?;
            self.buffers.in_flight.push_back(copy);
        }
        Ok(())
    }

    /// Reads a matrix in FP8. Quantizes rows that are not stored in FP8 with a scale for each row.
    fn fp8_rows(
        &mut self,
        source: &dyn RowSource,
        to: &Range,
        to_scales: &Range,
    ) -> Result<(), CudaError> {
        let (rows, cols) = (source.rows(), source.cols());
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        let is_stored = |parts: &Vec<BlockScales>| parts.iter().all(|part| part.is_per_row(cols));
        let stored = source.fp8_scales().filter(is_stored);
        let scales: Vec<AtomicU32> = match &stored {
            Some(parts) => {
                let rows =
                    parts.iter().flat_map(|part| (0..part.rows()).map(|row| part.at(row, 0)));
                rows.map(|scale| AtomicU32::new(scale.to_bits())).collect()
            }
            None => (0..rows).map(|_| AtomicU32::new(0)).collect(),
        };
        let (step, piece_rows) = ((BUFFER_BYTES / cols).max(1), (PIECE_BYTES / cols).max(1));
        for first in (0..rows).step_by(step) {
            let bytes = step.min(rows - first) * cols;
            let (mut pinned, done) = self.buffer()?;
            self.readers.for_each_piece(
                &mut pinned[..bytes],
                piece_rows * cols,
                |_, piece, out| {
                    let first = first + piece * piece_rows;
                    match stored {
                        Some(_) => source.read_fp8(first, out),
                        None => quantize_rows(source, first, out, &scales[first..]),
                    }
                },
            );
            let copy = pinned.upload(bytes, to, first * cols, &self.stream, done)?;
            self.buffers.in_flight.push_back(copy);
        }
        let scales: Vec<u32> = scales.into_iter().map(AtomicU32::into_inner).collect();
        self.bytes(bytemuck::cast_slice(&scales), to_scales)
    }

    /// Reads a matrix and enqueues its copies. The last copies may be in flight on return.
    fn rows(&mut self, source: &dyn RowSource, dtype: Dtype, to: &Range) -> Result<(), CudaError> {
        let (rows, row_bytes) = (source.rows(), source.cols() * dtype.bytes());
        if row_bytes == 0 {
            return Ok(());
        }
        if row_bytes > BUFFER_BYTES {
            return Err(too_wide(source));
        }
        let step = BUFFER_BYTES / row_bytes;
        for first in (0..rows).step_by(step) {
            let bytes = step.min(rows - first) * row_bytes;
            let (mut pinned, done) = self.buffer()?;
            read(&mut self.readers, source, first, dtype, &mut pinned[..bytes]);
            let copy = pinned.upload(bytes, to, first * row_bytes, &self.stream, done)?;
            self.buffers.in_flight.push_back(copy);
        }
        Ok(())
    }
}

fn too_wide(source: &dyn RowSource) -> CudaError {
    CudaError::Unsupported {
        what: "the width of a weight matrix",
        value: source.cols().to_string(),
        allowed: "up to 4,194,304, and up to 493,440 in MXFP4",
    }
}

/// Fills `out` with rows from `first` on in FP8, and `scales` with the bits of their scales. The
/// largest magnitude of a row becomes the greatest number.
fn quantize_rows(source: &dyn RowSource, first: usize, out: &mut [u8], scales: &[AtomicU32]) {
    let mut values = vec![0.0; source.cols()];
    for ((row, out), scale_bits) in out.chunks_exact_mut(source.cols()).enumerate().zip(scales) {
        source.read_values(first + row, &mut values);
        let most = values.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        // A row of tiny values keeps a normal scale, so that its reciprocal is finite.
        let scale = if most > 0.0 { (most / fp8::E4M3_MAX).max(f32::MIN_POSITIVE) } else { 1.0 };
        scale_bits.store(scale.to_bits(), Ordering::Relaxed);
        for (out, value) in out.iter_mut().zip(&values) {
            *out = fp8::encode(value / scale);
        }
    }
}

/// Reads rows from `first` on into the GPU's format, with all threads.
fn read(
    readers: &mut ThreadPool,
    source: &dyn RowSource,
    first: usize,
    dtype: Dtype,
    out: &mut [u8],
) {
    let row_bytes = source.cols() * dtype.bytes();
    let piece_rows = (PIECE_BYTES / row_bytes).max(1);
    readers.for_each_piece(out, piece_rows * row_bytes, |_, piece, out| {
        source.read_rows(first + piece * piece_rows, dtype, out);
    });
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn buffers_of_failed_copies_are_replaced() {
        /// A copy of a buffer, and whether it fails.
        type Copy = (u32, bool);
        let finish = |(buffer, fails): Copy| if fails { Err(buffer) } else { Ok(buffer) };
        let mut made = BUFFERS as u32;
        let mut buffers = Buffers { free: (0..made).collect(), in_flight: VecDeque::new() };
        for round in 0..3 * BUFFERS {
            let mut failed = 0;
            for number in 0..2 * BUFFERS {
                let new = || {
                    made += 1;
                    Ok(made)
                };
                match buffers.take(new, finish) {
                    Ok(buffer) => buffers.in_flight.push_back((buffer, (number + round) % 3 == 0)),
                    Err(_) => failed += 1,
                }
                assert!(buffers.free.len() + buffers.in_flight.len() <= BUFFERS);
            }
            let in_flight: Vec<Copy> = buffers.in_flight.iter().copied().collect();
            let first = in_flight.iter().find(|(_, fails)| *fails).map(|(buffer, _)| *buffer);
            assert_eq!(buffers.finish(finish), first.map_or(Ok(()), Err));
            assert!(buffers.in_flight.is_empty() && failed > 0);
        }
        assert!(made > BUFFERS as u32);
    }

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

    #[test]
    fn quantized_rows_use_the_whole_range_of_fp8() {
        let mut out = vec![0; 3 * 1025];
        let scales: Vec<AtomicU32> = (0..3).map(|_| AtomicU32::new(0)).collect();
        quantize_rows(&Counted, 1, &mut out, &scales);
        for (row, numbers) in out.chunks(1025).enumerate() {
            let scale = f32::from_bits(scales[row].load(Ordering::Relaxed));
            for (col, &bits) in numbers.iter().enumerate() {
                let (want, found) = (((1 + row) * 3 + col % 7) as f32, fp8::decode(bits) * scale);
                assert!((found - want).abs() <= want / 16.0, "{found} {want}");
            }
            assert!(numbers.contains(&0x7e), "the largest number is 448");
        }
    }

    /// Rows of small whole numbers, most of which bf16 represents exactly.
    #[test]
    fn uploaded_rows_equal_the_source_for_any_thread_count() {
        for (dtype, first, rows) in
            [(Dtype::F32, 0, 700), (Dtype::Bf16, 3, 697), (Dtype::F32, 9, 1)]
        {
            for threads in [1, 3, 16] {
                let mut readers = ThreadPool::new(threads, "test").unwrap();
                let mut out = vec![0; rows * 1025 * dtype.bytes()];
                read(&mut readers, &Counted, first, dtype, &mut out);
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
