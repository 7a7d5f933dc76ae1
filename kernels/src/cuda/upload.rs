//! Weight uploads to the GPU: several threads read weights into pinned memory, while earlier weights are
//! copied.

use std::{collections::VecDeque, sync::Arc, thread};

use super::{
    context::{Context, Event, HostToDevice, Stream},
    error::CudaError,
    memory::{CopyInFlight, PinnedMemory, Range},
};
use crate::{backend::RowSource, cpu::threads::ThreadPool, layout::Dtype};

/// Pinned buffers. One is filled while others are copied; more than two absorb jitter of either side.
const BUFFERS: usize = 4;
/// Bytes of each buffer.
const BUFFER_BYTES: usize = 16 << 20;
/// Bytes that a thread reads at once, which fit into its cache until they are checked.
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

/// Buffers that are free or in flight. The buffer of a failed copy is lost, and a new one replaces it.
struct Buffers<B, C> {
    free: Vec<B>,
    in_flight: VecDeque<C>,
}

impl<B, C> Buffers<B, C> {
    /// Returns a free buffer, a new one while fewer than [`BUFFERS`] exist, or waits for the oldest copy.
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
    /// Other threads compute digests of the weights and run steps. Readers wait for each other after every buffer, so
    /// one reader without a CPU delays all of them.
    Half,
}

impl Uploads {
    pub fn new(context: &Arc<Context>, share: ReaderShare) -> Result<Self, CudaError> {
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
    pub fn finish(&mut self) -> Result<(), CudaError> {
        self.buffers.finish(CopyInFlight::finish)
    }

    /// Enqueues a copy of `bytes`.
    pub fn bytes(&mut self, bytes: &[u8], to: &Range) -> Result<(), CudaError> {
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

    /// Reads a matrix and enqueues its copies. The last copies may be in flight on return.
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
        if row_bytes > BUFFER_BYTES {
            return Err(CudaError::Unsupported {
                what: "the width of a weight matrix",
                value: source.cols().to_string(),
                allowed: "up to 4,194,304",
            });
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
