//! Receives weights from a trainer on the same host, whose GPU memory the node reads (CUDA IPC).
//!
//! 1. The node connects to the trainer's Unix socket. The trainer declares its tensors and its chunk buffers: one line of
//!    JSON.
//! 2. Both cut the tensors into chunks, in the declared order. The node requests chunk n by its number (8 bytes, little
//!    endian). The trainer packs the chunk into buffer n modulo the number of buffers, and answers with the chunk's number and
//!    bytes (16 bytes).
//! 3. The node copies chunk n while the trainer packs the next ones. The node requests a chunk once its buffer is free.
//! 4. The node closes the connection when it reads the trainer's memory no more. Until then the trainer keeps the memory. If
//!    the trainer closes the connection before, the update is aborted.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use engine::executor::{DeclaredTensor, TensorPiece, WeightUpdate};
use kernels::cuda::{ExportedMemory, HANDLE_BYTES};
use model::ModelConfig;
use serde::Deserialize;
use tokio::runtime;
use tokio_util::sync::CancellationToken;
use weight_transfer::{Chunk, Plan, Tensor, WeightVersion};

use super::receive::ReceiveError;

/// Time-out of the connection and of the declaration, before which a trainer may prepare its buffers.
const DECLARATION_MAX: Duration = Duration::from_secs(10);
/// Time-out of a chunk. A trainer packs a chunk in less than a millisecond, and a node in place serves nothing meanwhile.
const CHUNK_MAX: Duration = Duration::from_secs(2);
/// Interval of looks at the cancellation while the node waits for the trainer.
const LOOK: Duration = Duration::from_millis(20);
const DECLARATION_BYTES_MAX: usize = 16 << 20;
const BUFFERS_MAX: usize = 16;
const CHUNK_BYTES_MAX: u64 = 8 << 30;

/// Reason why a trainer's weights did not arrive.
#[derive(Debug, thiserror::Error)]
pub(super) enum TrainerError {
    #[error(
        "cannot connect to the trainer at {}: {cause}; expected the Unix socket of a trainer on this host",
        socket.display()
    )]
    Connect { socket: PathBuf, cause: String },
    #[error("cannot read the trainer's declaration: {reason}")]
    Declaration { reason: String },
    #[error("the trainer closed the connection before the update was prepared")]
    Closed,
    #[error("cannot receive from the trainer: no answer within {0:?}")]
    Silent(Duration),
    #[error("cannot receive from the trainer: {0}")]
    Io(io::Error),
    #[error(
        "the trainer packed {found_bytes} bytes as chunk {found}; expected {bytes} bytes as chunk {index}"
    )]
    Chunk { found: u64, found_bytes: u64, index: u64, bytes: u64 },
}

/// The trainer's first message.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Declaration {
    /// Bytes of every chunk but the last.
    chunk_bytes: u64,
    buffers: Vec<BufferDeclaration>,
    tensors: Vec<TensorDeclaration>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BufferDeclaration {
    /// UUID of the GPU.
    gpu: String,
    /// CUDA IPC handle in hexadecimal digits.
    handle: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TensorDeclaration {
    name: String,
    dtype: String,
    shape: Vec<u64>,
}

/// Prepares the weights of the trainer at `socket` beside those in use, or in their place after `release`. Blocks. Stops early
/// once `cancelled` is cancelled.
pub(super) fn receive(
    socket: &Path,
    model: &ModelConfig,
    update: &dyn WeightUpdate,
    release: &dyn Fn() -> Result<(), ReceiveError>,
    cancelled: &CancellationToken,
) -> Result<WeightVersion, ReceiveError> {
    let began = Instant::now();
    let mut trainer = Trainer::connect(socket, cancelled)?;
    let declaration = trainer.declaration()?;
    let buffers = checked_buffers(&declaration)?;
    let (buffer_count, chunk_bytes) = (buffers.len(), declaration.chunk_bytes);
    let tensors: Vec<_> = declaration.tensors.into_iter().map(DeclaredTensor::from).collect();
    let mut receiver = update.receive(model, &tensors, &buffers)?;
    let plan = plan(&tensors, chunk_bytes)?;
    if update.is_in_place() {
        release()?;
    }
    let mapped = began.elapsed();
    let chunks = plan.chunks();
    for index in 0..buffer_count.min(chunks.len()) {
        trainer.request(index)?;
    }
    for (index, chunk) in chunks.iter().enumerate() {
        trainer.packed(index, chunk.bytes)?;
        receiver.scatter(index % buffer_count, &pieces(chunk))?;
        // The copies before are probably over when the copies of this chunk begin.
        let Some(oldest) = (index + 1).checked_sub(buffer_count) else { continue };
        receiver.wait(oldest % buffer_count)?;
        if oldest + buffer_count < chunks.len() {
            trainer.request(oldest + buffer_count)?;
        }
    }
    let digests = receiver.finish()?;
    trainer.check_connected()?;
    let tensors = plan.tensors().iter().zip(digests);
    let used = tensors.filter_map(|(tensor, digest)| Some((tensor.clone(), digest.digest?)));
    let version = WeightVersion::of_tensors(&mut used.collect::<Vec<_>>());
    tracing::info!(
        bytes = plan.bytes(),
        chunks = chunks.len(),
        buffers = buffer_count,
        mapped_ms = mapped.as_secs_f64() * 1e3,
        received_ms = began.elapsed().as_secs_f64() * 1e3,
        "received weights from a trainer"
    );
    Ok(version)
}

impl From<TensorDeclaration> for DeclaredTensor {
    fn from(TensorDeclaration { name, dtype, shape }: TensorDeclaration) -> Self {
        Self { name, dtype, shape }
    }
}

fn checked_buffers(declaration: &Declaration) -> Result<Vec<ExportedMemory>, TrainerError> {
    let invalid = |reason: String| TrainerError::Declaration { reason };
    let bytes = declaration.chunk_bytes;
    if !(1..=CHUNK_BYTES_MAX).contains(&bytes) {
        return Err(invalid(format!("chunk_bytes is {bytes}; expected 1 to {CHUNK_BYTES_MAX}")));
    }
    let count = declaration.buffers.len();
    if !(1..=BUFFERS_MAX).contains(&count) {
        return Err(invalid(format!("{count} buffers; expected 1 to {BUFFERS_MAX}")));
    }
    let buffer = |buffer: &BufferDeclaration| {
        let handle = handle(&buffer.handle).ok_or_else(|| {
            let digits = 2 * HANDLE_BYTES;
            let shown: String = buffer.handle.chars().take(40).collect();
            invalid(format!("handle is {shown:?}; expected {digits} hexadecimal digits"))
        })?;
        Ok(ExportedMemory { uuid: buffer.gpu.clone(), handle, offset: 0, bytes })
    };
    declaration.buffers.iter().map(buffer).collect()
}

fn handle(text: &str) -> Option<[u8; HANDLE_BYTES]> {
    let mut handle = [0; HANDLE_BYTES];
    let digits = text.as_bytes();
    if digits.len() != 2 * HANDLE_BYTES || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    for (byte, pair) in handle.iter_mut().zip(digits.as_chunks::<2>().0) {
        *byte = u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(handle)
}

/// Cuts tensors whose types and shapes were checked.
fn plan(tensors: &[DeclaredTensor], chunk_bytes: u64) -> Result<Plan, ReceiveError> {
    let tensor = |tensor: &DeclaredTensor| Tensor {
        name: tensor.name.clone(),
        dtype: tensor.dtype.clone(),
        shape: tensor.shape.clone(),
        bytes: tensor.bytes().unwrap_or(0),
    };
    Ok(Plan::new(tensors.iter().map(tensor).collect(), chunk_bytes)?)
}

fn pieces(chunk: &Chunk) -> Vec<TensorPiece> {
    let mut at = 0;
    let piece = |piece: &weight_transfer::Piece| {
        let range = piece.range.start as usize..piece.range.end as usize;
        let begin = at;
        at += range.len();
        TensorPiece { tensor: piece.tensor, range, at: begin }
    };
    chunk.pieces.iter().map(piece).collect()
}

/// Connection to a trainer.
struct Trainer<'a> {
    stream: UnixStream,
    cancelled: &'a CancellationToken,
}

impl<'a> Trainer<'a> {
    fn connect(socket: &Path, cancelled: &'a CancellationToken) -> Result<Self, ReceiveError> {
        let failed = |cause: String| TrainerError::Connect { socket: socket.to_owned(), cause };
        // The queue of a trainer that accepts no more may be full.
        let connect =
            tokio::time::timeout(DECLARATION_MAX, tokio::net::UnixStream::connect(socket));
        let connect = cancelled.run_until_cancelled(connect);
        let stream = match runtime::Handle::current().block_on(connect) {
            None => return Err(ReceiveError::Cancelled),
            Some(Err(_)) => return Err(TrainerError::Silent(DECLARATION_MAX).into()),
            Some(Ok(stream)) => stream.and_then(tokio::net::UnixStream::into_std),
        };
        let prepared = stream.and_then(|stream| {
            stream.set_nonblocking(false)?;
            stream.set_read_timeout(Some(LOOK))?;
            // The trainer reads every request at once.
            stream.set_write_timeout(Some(CHUNK_MAX))?;
            Ok(stream)
        });
        let stream = prepared.map_err(|error| failed(error.to_string()))?;
        Ok(Self { stream, cancelled })
    }

    fn declaration(&mut self) -> Result<Declaration, ReceiveError> {
        let until = Instant::now() + DECLARATION_MAX;
        let invalid = |reason: String| TrainerError::Declaration { reason };
        let (mut line, mut part) = (Vec::new(), vec![0; 64 << 10]);
        while line.last() != Some(&b'\n') {
            let count = self.read(&mut part, until, DECLARATION_MAX)?;
            line.extend_from_slice(&part[..count]);
            if line.len() > DECLARATION_BYTES_MAX {
                let reason = format!("it exceeds {DECLARATION_BYTES_MAX} bytes");
                return Err(invalid(reason).into());
            }
        }
        let declaration = serde_json::from_slice(&line);
        Ok(declaration.map_err(|error| invalid(error.to_string()))?)
    }

    fn request(&mut self, chunk: usize) -> Result<(), ReceiveError> {
        let request = (chunk as u64).to_le_bytes();
        self.stream.write_all(&request).map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                TrainerError::Closed.into()
            }
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                TrainerError::Silent(CHUNK_MAX).into()
            }
            _ => TrainerError::Io(error).into(),
        })
    }

    /// Waits until the trainer has packed this chunk.
    fn packed(&mut self, index: usize, bytes: u64) -> Result<(), ReceiveError> {
        let until = Instant::now() + CHUNK_MAX;
        let (mut answer, mut end) = ([0; 16], 0);
        while end < answer.len() {
            end += self.read(&mut answer[end..], until, CHUNK_MAX)?;
        }
        let ([found, found_bytes], index) = ([0, 8].map(|at| u64_at(&answer, at)), index as u64);
        if (found, found_bytes) != (index, bytes) {
            return Err(TrainerError::Chunk { found, found_bytes, index, bytes }.into());
        }
        Ok(())
    }

    /// Reads at least one byte.
    fn read(
        &mut self,
        out: &mut [u8],
        until: Instant,
        at_most: Duration,
    ) -> Result<usize, ReceiveError> {
        loop {
            if self.cancelled.is_cancelled() {
                return Err(ReceiveError::Cancelled);
            }
            match self.stream.read(out) {
                Ok(0) => return Err(TrainerError::Closed.into()),
                Ok(count) => return Ok(count),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock
                    | io::ErrorKind::TimedOut
                    | io::ErrorKind::Interrupted => {
                        if Instant::now() > until {
                            return Err(TrainerError::Silent(at_most).into());
                        }
                    }
                    io::ErrorKind::ConnectionReset => return Err(TrainerError::Closed.into()),
                    _ => return Err(TrainerError::Io(error).into()),
                },
            }
        }
    }

    /// Fails if the trainer has closed the connection: it may have ended and freed its memory before the copies.
    fn check_connected(&mut self) -> Result<(), ReceiveError> {
        self.stream.set_nonblocking(true).map_err(TrainerError::Io)?;
        match self.stream.read(&mut [0]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(TrainerError::Io(error).into()),
            Ok(_) => Err(TrainerError::Closed.into()),
        }
    }
}

fn u64_at(bytes: &[u8; 16], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

#[cfg(test)]
mod tests;
