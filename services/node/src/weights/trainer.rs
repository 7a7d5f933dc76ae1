//! Receives weights from a trainer's GPU: the node reads the trainer's memory (`ipc`, on one host),
//! or the trainer broadcasts to the GPUs of all nodes (`nccl`).
//!
//! 1. The node connects to the trainer. By TCP (`nccl`) the node sends the token of the trainer's
//!    address. By `nccl` the node reuses the connection of the last update if the trainer is the
//!    same.
//! 2. The trainer declares its tensors and chunk buffers, or its communicator: one line of JSON.
//!    Both ends cut the tensors into chunks, in the declared order. The declaration has a hash of
//!    the trainer's plan ([`weight_transfer::Plan::trainer_hash`]). The node compares the hash with
//!    that of its own plan.
//! 3. `ipc`: The node requests chunk n by its number (8 bytes, little endian). The trainer packs
//!    the chunk into buffer n modulo the number of buffers, and answers with the chunk's number and
//!    bytes (16 bytes). The node requests a chunk once its buffer is free. `nccl`: The first
//!    broadcast of a communicator connects the ranks and carries no weights. The node sends 8 zero
//!    bytes once it is ready to receive. Then the trainer, rank 0, broadcasts all chunks in order.
//! 4. The node copies a chunk to its place while the next ones arrive.
//! 5. The trainer sends the digest of each declared tensor (8 bytes, little endian): by `ipc` when
//!    the node requests chunk 2⁶⁴ - 1, by `nccl` after the last broadcast. The node compares them
//!    with the digests of the received tensors ([`kernels::digest::of_weight`]).
//! 6. `ipc`: The node closes the connection when it no longer uses the trainer's memory. `nccl`:
//!    The node keeps connection and communicator for the next update, until the trainer closes the
//!    connection, another trainer comes, or an update fails. If the trainer closes the connection
//!    before the update is prepared, the update is aborted.

pub(super) mod address;
mod connection;
mod declaration;
mod kept;

use std::time::{Duration, Instant};

use engine::executor::{ChunkReceiver, PrepareError, ReceivedWeights, TensorDigest, WeightUpdate};
use kernels::peer::WaitLimit;
use tokio_util::sync::CancellationToken;
use weight_transfer::{Tensor, WeightChunk, WeightVersion};

pub(super) use self::kept::KeptTrainer;
use self::{
    address::{TrainerAddress, TrainerError},
    connection::TrainerConnection,
    declaration::{Declaration, TrainerBuffers, pieces},
};
use super::receive::ReceiveError;

/// Time-out of the declaration. With `nccl` the trainer first waits for all nodes.
const DECLARATION_MAX: Duration = Duration::from_secs(60);
/// Time-out of a chunk, which takes milliseconds. A node in place serves nothing meanwhile.
const CHUNK_MAX: Duration = Duration::from_secs(2);
/// Time-out of the trainer's digests, which other kernels on its GPU may delay.
const DIGESTS_MAX: Duration = Duration::from_secs(10);
/// Number that requests the trainer's digests instead of a chunk.
const DIGESTS: u64 = u64::MAX;
/// Time-out of the first broadcast: other nodes may let sequences finish before they join.
const JOIN_MAX: Duration = Duration::from_secs(60);
/// Rate at which chunks are copied from a trainer (`ipc`) while the node serves, in bytes per
/// second. The copies raise the p99 of the inter-token latency of an 8B model on an H200 to 1.09
/// times the p99 without an update; at 330 GB/s, the rate of the copy engines, to 1.18 times
/// (docs/benchmarks/weight-updates.md).
const SERVING_RATE: f64 = 130e9;

/// Prepares the weights of a trainer beside the weights in use, or in place after `release`.
/// Blocks. Stops early once `cancelled` is cancelled.
pub(super) fn receive(
    address: &TrainerAddress,
    kept: &KeptTrainer,
    update: &dyn WeightUpdate,
    release: &dyn Fn() -> Result<(), ReceiveError>,
    is_serving: &dyn Fn() -> bool,
    cancelled: &CancellationToken,
) -> Result<WeightVersion, ReceiveError> {
    let mut connection = match kept.take(address) {
        Some(stream) => TrainerConnection::new(stream, cancelled),
        None => {
            update.leave_trainer();
            TrainerConnection::open(address, cancelled)?
        }
    };
    let outcome = receive_by(&mut connection, address, update, release, is_serving);
    match (&outcome, address) {
        (Ok(_), TrainerAddress::Nccl { .. }) => kept.put(address, connection.into_stream()),
        (Ok(_), TrainerAddress::Ipc(_)) => {}
        (Err(_), _) => update.leave_trainer(),
    }
    outcome
}

/// Receives the weights by an open connection. Unmaps the trainer's memory before it returns.
fn receive_by(
    connection: &mut TrainerConnection<'_>,
    address: &TrainerAddress,
    update: &dyn WeightUpdate,
    release: &dyn Fn() -> Result<(), ReceiveError>,
    is_serving: &dyn Fn() -> bool,
) -> Result<WeightVersion, ReceiveError> {
    let began = Instant::now();
    if let TrainerAddress::Nccl { token, .. } = address {
        connection.send(token.as_bytes())?;
    }
    let declaration: Declaration = connection.line(DECLARATION_MAX)?;
    let (source, tensors) = (declaration.source(address)?, declaration.tensors());
    // Before the node joins a communicator or releases its weights.
    let plan = declaration.plan(&tensors)?;
    let is_over = || connection.is_over();
    let limit = WaitLimit { deadline: Instant::now() + JOIN_MAX, cancelled: &is_over };
    let receiver = update.receive(&tensors, source.chunk_source(limit));
    let mut receiver = receiver.map_err(|error| ended(connection, error.into()))?;
    if update.is_in_place() {
        release()?;
    }
    // A node that has released its weights serves nothing, even if requests wait.
    let is_serving = || !update.is_in_place() && is_serving();
    let mapped = began.elapsed();
    let mut chunks = ChunkTransfer { connection, receiver: &mut *receiver, chunks: plan.chunks() };
    match &source {
        TrainerBuffers::Mapped(buffers) => chunks.request_all(buffers.len(), &is_serving)?,
        TrainerBuffers::Broadcast { buffers, .. } => chunks.receive_all(*buffers)?,
    }
    let ReceivedWeights { digests, bytes: rank_bytes } = chunks.finish(plan.tensors())?;
    tracing::info!(
        bytes = plan.bytes(),
        rank_bytes,
        chunks = plan.chunks().len(),
        mapped_ms = mapped.as_secs_f64() * 1e3,
        received_ms = began.elapsed().as_secs_f64() * 1e3,
        "received weights from a trainer"
    );
    let tensors = plan.tensors().iter().zip(digests);
    let used = tensors.filter_map(|(tensor, digest)| Some((tensor.clone(), digest?.value)));
    Ok(WeightVersion::of_tensors(&mut used.collect::<Vec<_>>()))
}

/// Returns the cause of `error`: the end of the trainer or the cancellation, if either has
/// happened.
fn ended(connection: &TrainerConnection<'_>, error: ReceiveError) -> ReceiveError {
    connection.check().err().unwrap_or(error)
}

/// Returns the delay of the next copy after a copy of `bytes` that began `elapsed` ago.
fn rest_of_copy(bytes: u64, elapsed: Duration) -> Duration {
    Duration::from_secs_f64(bytes as f64 / SERVING_RATE).saturating_sub(elapsed)
}

/// The chunks of one update in flight.
struct ChunkTransfer<'a, 'b> {
    connection: &'b mut TrainerConnection<'a>,
    receiver: &'b mut dyn ChunkReceiver,
    chunks: &'b [WeightChunk],
}

impl ChunkTransfer<'_, '_> {
    /// Requests every chunk once a buffer is free. While the node serves, copies begin at
    /// [`SERVING_RATE`].
    fn request_all(
        &mut self,
        buffers: usize,
        is_serving: &dyn Fn() -> bool,
    ) -> Result<(), ReceiveError> {
        for index in 0..buffers.min(self.chunks.len()) {
            self.request(index as u64)?;
        }
        let mut begun = Instant::now();
        for index in 0..self.chunks.len() {
            self.await_packed(index)?;
            if let Some(before) = index.checked_sub(1)
                && is_serving()
            {
                self.connection.pause(rest_of_copy(self.chunks[before].bytes, begun.elapsed()))?;
            }
            begun = Instant::now();
            self.receiver.scatter(index % buffers, &pieces(&self.chunks[index]))?;
            // Wait only now: the oldest copies are probably complete when the copies of this chunk
            // begin.
            let Some(oldest) = (index + 1).checked_sub(buffers) else { continue };
            self.wait(oldest % buffers, CHUNK_MAX)?;
            if oldest + buffers < self.chunks.len() {
                self.request((oldest + buffers) as u64)?;
            }
        }
        self.request(DIGESTS)
    }

    /// Receives every chunk by a broadcast. The trainer waits until all nodes receive.
    fn receive_all(&mut self, buffers: usize) -> Result<(), ReceiveError> {
        self.connection.send(&[0; 8])?;
        let chunks = self.chunks;
        for (index, chunk) in chunks.iter().enumerate() {
            let at_most = if index < buffers { JOIN_MAX } else { CHUNK_MAX };
            self.limited(at_most, |receiver, limit| {
                receiver.fill(index % buffers, chunk.bytes as usize, limit)
            })?;
            self.receiver.scatter(index % buffers, &pieces(chunk))?;
            if let Some(oldest) = (index + 1).checked_sub(buffers) {
                let at_most = if oldest == 0 { JOIN_MAX } else { CHUNK_MAX };
                self.wait(oldest % buffers, at_most)?;
            }
        }
        if chunks.len() < buffers {
            // No chunk was waited for yet, and the trainer may still wait for other nodes.
            self.wait(0, JOIN_MAX)?;
        }
        Ok(())
    }

    fn request(&mut self, number: u64) -> Result<(), ReceiveError> {
        self.connection.send(&number.to_le_bytes())
    }

    /// Waits until the trainer has packed a chunk.
    fn await_packed(&mut self, index: usize) -> Result<(), ReceiveError> {
        let mut answer = [0; 16];
        self.connection.receive(&mut answer, CHUNK_MAX)?;
        let [found, found_bytes] =
            [0, 8].map(|at| u64::from_le_bytes(answer[at..at + 8].try_into().expect("8 bytes")));
        let (index, bytes) = (index as u64, self.chunks[index].bytes);
        match (found, found_bytes) == (index, bytes) {
            true => Ok(()),
            false => Err(TrainerError::Chunk { found, found_bytes, index, bytes }.into()),
        }
    }

    fn wait(&mut self, buffer: usize, at_most: Duration) -> Result<(), ReceiveError> {
        self.limited(at_most, |receiver, limit| receiver.wait(buffer, limit))
    }

    /// Waits for all copies. Fails if the trainer has closed the connection before, or if the
    /// received bytes differ from the trainer's.
    fn finish(&mut self, tensors: &[Tensor]) -> Result<ReceivedWeights, ReceiveError> {
        let received = self.limited(CHUNK_MAX, |receiver, limit| receiver.finish(limit))?;
        self.connection.check()?;
        let mut digests = vec![0; tensors.len() * size_of::<u64>()];
        self.connection.receive(&mut digests, DIGESTS_MAX)?;
        let expected = digests.as_chunks().0.iter().map(|digest| u64::from_le_bytes(*digest));
        for ((tensor, found), expected) in tensors.iter().zip(&received.digests).zip(expected) {
            // A tensor that the model does not use has no digest.
            if let Some(TensorDigest { value: found, .. }) = *found
                && found != expected
            {
                let name = tensor.name.clone();
                return Err(TrainerError::Digest { name, found, expected }.into());
            }
        }
        Ok(received)
    }

    /// Runs work that ends early when the trainer closes the connection.
    fn limited<T>(
        &mut self,
        at_most: Duration,
        work: impl FnOnce(&mut dyn ChunkReceiver, WaitLimit<'_>) -> Result<T, PrepareError>,
    ) -> Result<T, ReceiveError> {
        let is_over = || self.connection.is_over();
        let limit = WaitLimit { deadline: Instant::now() + at_most, cancelled: &is_over };
        work(self.receiver, limit).map_err(|error| ended(self.connection, error.into()))
    }
}

#[cfg(test)]
mod tests;
