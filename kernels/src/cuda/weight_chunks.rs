//! Copies weights out of chunk buffers on a GPU into packed weights. The buffers are memory of a
//! trainer's process (CUDA IPC), or memory of this process that a trainer's broadcasts fill (NCCL).
//!
//! The copy engines move the bytes from another GPU. While the next chunks arrive, a kernel on
//! another stream digests each complete weight and counts its elements that are not finite. Vectors
//! are packed in f32, so their bytes go to the host, which converts them.
//!
//! # Deadlock of two communicators
//!
//! Broadcasts and KV transfers by NCCL use the same GPU through different communicators, and their
//! kernels may be launched in another order on another GPU. They could deadlock only if, on both
//! GPUs, a kernel that waits for its peer prevented the kernel of the other communicator from
//! starting. This does not happen, for two reasons:
//!
//! - Each communicator has its own stream and hardware queue (while fewer than
//!   `CUDA_DEVICE_MAX_CONNECTIONS` streams wait).
//! - Both kernels fit on the GPU: a broadcast takes at most 64 SMs and a KV transfer at most
//!   `transfer.nccl_max_ctas`. Other kernels end by themselves.
//!
//! A trainer is not a rank of communicators for KV. If kernels do block each other, for example
//! because of many pairs, the time-out of a chunk or a transfer aborts one of them.

use std::{
    mem,
    sync::{MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use cudarc::driver::sys;

use super::{
    context::{DeviceToHost, Event, Stream, StreamRole},
    copies::UnorderedCopies,
    digest::{SUMS, WeightDigests},
    error::{CudaError, Named},
    export::ExportedMemory,
    ipc::PeerToDevice,
    memory::{DeviceMemory, PinnedMemory, Range},
    moves::copy_rows,
    nccl::{Communicator, CommunicatorOptions, Nccl, NcclError, Piece, UniqueId},
    packer::CudaPacker,
};
use crate::{digest::WeightRuns, peer::WaitLimit};

/// Streams of NCCL's broadcasts.
#[derive(Debug)]
pub enum Broadcast {}

impl StreamRole for Broadcast {}

/// Buffers of chunks.
#[derive(Clone, Copy)]
pub enum ChunkSource<'a> {
    /// Memory of a trainer's process.
    Mapped(&'a [ExportedMemory]),
    /// The first buffers of the packer, which broadcasts of rank 0 fill.
    Broadcast {
        group: NcclGroup,
        /// UUID of the GPU of rank 0.
        trainer_gpu: &'a str,
        buffers: usize,
        chunk_bytes: u64,
        /// When to stop waiting for the other ranks.
        limit: WaitLimit<'a>,
    },
}

/// A communicator of a trainer, rank 0, and the GPUs of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclGroup {
    pub id: UniqueId,
    pub rank: u32,
    pub ranks: u32,
    /// Largest number of CTAs of a broadcast; `None`: NCCL decides.
    pub ctas_max: Option<u32>,
}

/// Bytes of the first broadcast, or those of a chunk if fewer.
const CONNECT_BYTES: usize = 1 << 20;
/// Time-out of the abort of a communicator, and of the copies after it. Aborts took 0.4 to 0.7 s
/// with a dead peer.
const ABORT_MAX: Duration = Duration::from_secs(10);
/// Time of busy polling before the first pause. A chunk takes less than a millisecond, and a thread
/// sleeps longer than [`PAUSE`].
const SPIN: Duration = Duration::from_millis(2);
/// Pause between later polls.
const PAUSE: Duration = Duration::from_micros(100);

/// A copy of rows of bytes from a chunk to packed weights or host memory. All sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowCopy {
    pub from: usize,
    pub from_pitch: usize,
    pub to: usize,
    pub to_pitch: usize,
    pub width: usize,
    pub height: usize,
}

impl RowCopy {
    fn is_contiguous(&self) -> bool {
        self.height == 1 || self.width == self.from_pitch && self.width == self.to_pitch
    }

    fn bytes(&self) -> usize {
        self.width * self.height
    }
}

/// Work of a chunk: copies, and parts of weights that are complete.
#[derive(Clone, Debug, Default)]
pub struct ChunkWork {
    /// Copies into the packed weights.
    pub to_device: Vec<RowCopy>,
    /// Copies of contiguous bytes into host memory.
    pub to_host: Vec<RowCopy>,
    /// Complete parts: index of the digest, offset in the packed weights, and the place in the
    /// whole weight.
    pub complete: Vec<(usize, usize, WeightRuns)>,
}

/// Host and device buffers that all updates of a node reuse.
#[derive(Debug)]
pub(super) struct ChunkStaging {
    host: PinnedMemory<u8>,
    /// Device memory of the digests.
    sums: Range,
    downloaded: Option<(PinnedMemory<u64>, Event)>,
}

/// Results of all chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopiedWeights {
    /// The bytes that were copied to the host.
    pub host: Vec<u8>,
    /// For each part the digest, and the number of elements that are infinite or NaN.
    pub digests: Vec<(u64, u64)>,
}

/// The copies of one update.
pub struct ChunkCopies<'a> {
    packer: &'a CudaPacker,
    weight_digests: WeightDigests,
    copies: Stream<PeerToDevice>,
    checks: Stream<DeviceToHost>,
    /// Recorded after the copies out of each buffer.
    copied: Vec<Event>,
    digest_count: usize,
    staging: MutexGuard<'a, Option<ChunkStaging>>,
    /// Whether no work is in flight.
    is_finished: bool,
    broadcasts: Option<Broadcasts>,
    /// Whether the buffers are memory of this GPU.
    is_local: bool,
    // Unmapped after the streams' work has completed: see `drop`.
    buffers: Vec<Range>,
}

/// A communicator, and its work.
pub(super) struct Broadcasts {
    group: NcclGroup,
    communicator: Communicator,
    stream: Stream<Broadcast>,
    /// Recorded after the broadcast into each buffer.
    filled: Vec<Event>,
}

impl CudaPacker {
    /// Maps the buffers of a trainer, or joins its communicator. `host_bytes`: bytes of vectors.
    /// `digest_count`: parts of weights to digest.
    pub fn copy_chunks(
        &self,
        source: ChunkSource<'_>,
        host_bytes: usize,
        digest_count: usize,
    ) -> Result<ChunkCopies<'_>, String> {
        let named = |error: NcclError| error.to_string();
        let buffers = match source {
            ChunkSource::Mapped(buffers) => {
                let map = |buffer: &ExportedMemory| {
                    buffer.map(self.context(), "a trainer's chunk buffer")
                };
                buffers.iter().map(map).collect::<Result<Vec<_>, String>>()?
            }
            ChunkSource::Broadcast { trainer_gpu, buffers, chunk_bytes, .. } => {
                self.own_buffers(trainer_gpu, buffers, chunk_bytes)?
            }
        };
        let is_local = match source {
            ChunkSource::Mapped(buffers) => {
                buffers.iter().all(|buffer| buffer.uuid == self.context().device().uuid)
            }
            ChunkSource::Broadcast { .. } => true,
        };
        let copies = ChunkCopies::new(self, (buffers, is_local), host_bytes, digest_count);
        let mut copies = copies.map_err(|error| error.to_string())?;
        if let ChunkSource::Broadcast { group, limit, .. } = source {
            let kept = self.exchange_kept(None).filter(|kept| kept.group == group);
            let is_new = kept.is_none();
            let broadcasts = match kept {
                Some(kept) => kept.with_events(&copies),
                None => Broadcasts::new(&copies, group, limit),
            };
            copies.broadcasts = Some(broadcasts.map_err(named)?);
            if is_new {
                copies.connect(limit).map_err(named)?;
            }
        }
        Ok(copies)
    }

    /// Returns buffers for the broadcasts of a trainer.
    fn own_buffers(
        &self,
        trainer_gpu: &str,
        buffers: usize,
        chunk_bytes: u64,
    ) -> Result<Vec<Range>, String> {
        let (own, uuid) = (self.chunk_buffers(), &self.context().device().uuid);
        if trainer_gpu == uuid {
            return Err(format!(
                "the trainer computes on GPU {uuid}, as this node does, and NCCL allows one rank on a GPU; expected \
                 transport ipc"
            ));
        }
        if buffers > own.len() {
            let most = own.len();
            return Err(format!(
                "the trainer uses {buffers} buffers; expected at most {most} (weights.buffers)"
            ));
        }
        let most = own[0].bytes() as u64;
        if chunk_bytes > most {
            return Err(format!(
                "the trainer's chunks have {chunk_bytes} bytes; expected at most {most} (weights.chunk_bytes)"
            ));
        }
        Ok(own[..buffers].iter().map(|buffer| buffer.slice(0, chunk_bytes as usize)).collect())
    }
}

impl Broadcasts {
    fn new(
        copies: &ChunkCopies<'_>,
        group: NcclGroup,
        limit: WaitLimit<'_>,
    ) -> Result<Self, NcclError> {
        let context = copies.packer.context();
        let NcclGroup { id, rank, ranks, ctas_max } = group;
        let options =
            CommunicatorOptions { rank, ranks, id, ctas: ctas_max.map(|ctas_max| (1, ctas_max)) };
        let made = Self {
            group,
            filled: Vec::new(),
            stream: Stream::new(context)?,
            communicator: Communicator::new(&Nccl::open(None)?, context, options, limit)?,
        };
        made.with_events(copies)
    }

    /// Makes an event for each buffer of an update.
    fn with_events(self, copies: &ChunkCopies<'_>) -> Result<Self, NcclError> {
        let filled = copies.buffers.iter().map(|_| Event::new(copies.packer.context()));
        Ok(Self { filled: filled.collect::<Result<_, _>>()?, ..self })
    }
}

impl<'a> ChunkCopies<'a> {
    fn new(
        packer: &'a CudaPacker,
        (buffers, is_local): (Vec<Range>, bool),
        host_bytes: usize,
        digest_count: usize,
    ) -> Result<Self, CudaError> {
        let context = packer.context();
        let mut staging = packer.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |it: &&ChunkStaging| {
            it.host.len() >= host_bytes && it.sums.bytes() >= digest_count * SUMS * size_of::<u64>()
        };
        if staging.as_ref().filter(fits).is_none_or(|it| it.downloaded.is_none()) {
            let sums = (digest_count * SUMS).max(1);
            let memory = DeviceMemory::new(context, "digests of weights", sums * size_of::<u64>())?;
            *staging = Some(ChunkStaging {
                host: PinnedMemory::zeroed(context, "the vectors of an update", host_bytes)?,
                sums: memory.cut(sums * size_of::<u64>())?,
                downloaded: Some((
                    PinnedMemory::zeroed(context, "the digests of weights", sums)?,
                    Event::new(context)?,
                )),
            });
        }
        Ok(Self {
            packer,
            weight_digests: WeightDigests::new(packer.library())?,
            copies: Stream::new(context)?,
            checks: Stream::relaxed(context)?,
            copied: buffers.iter().map(|_| Event::new(context)).collect::<Result<_, _>>()?,
            digest_count,
            staging,
            is_finished: false,
            broadcasts: None,
            is_local,
            buffers,
        })
    }

    /// Receives the first broadcast, which carries no weights. It connects the ranks, which takes
    /// 0.15 s.
    fn connect(&mut self, limit: WaitLimit<'_>) -> Result<(), NcclError> {
        self.fill(0, CONNECT_BYTES.min(self.buffers[0].bytes()), limit)?;
        let filled = self.broadcasts.as_ref().map(|broadcasts| &broadcasts.filled[0]);
        Ok(filled.map_or(Ok(()), |filled| wait(filled, limit))?)
    }

    /// Enqueues the broadcast of the next chunk into a buffer, after the copies out of the buffer.
    /// The next [`scatter`](Self::scatter) of the buffer waits for the chunk. Mapped buffers are
    /// filled already.
    pub fn fill(
        &mut self,
        buffer: usize,
        bytes: usize,
        limit: WaitLimit<'_>,
    ) -> Result<(), NcclError> {
        let Some(broadcasts) = &mut self.broadcasts else { return Ok(()) };
        let Broadcasts { communicator, stream, filled, .. } = broadcasts;
        self.packer.context().bind()?;
        stream.wait(&self.copied[buffer])?;
        communicator.broadcast(Piece::new(&self.buffers[buffer], 0, bytes), 0, stream, limit)?;
        filled[buffer].record(stream)?;
        Ok(self.copies.wait(&filled[buffer])?)
    }

    /// Enqueues the copies out of a buffer, and the digests of complete parts.
    ///
    /// # Panics
    /// When a copy exceeds the buffer or the packed weights, which is a bug of the caller.
    pub fn scatter(&mut self, buffer: usize, work: &ChunkWork) -> Result<(), CudaError> {
        self.packer.context().bind()?;
        let (from, to) = (&self.buffers[buffer], self.packer.everything());
        let mut copies = UnorderedCopies::default();
        for row in &work.to_device {
            let rows = row.height.saturating_sub(1);
            let source = from.part(row.from, rows * row.from_pitch + row.width);
            let place = to.part(row.to, rows * row.to_pitch + row.width);
            if row.is_contiguous() {
                copies.add(place, source, row.bytes());
                continue;
            }
            let (source, place) = ((source, row.from_pitch, 0), (place, row.to_pitch, 0));
            // SAFETY: the rows are inside the buffer and the packed weights, as just checked.
            // Nothing else writes the packed weights: the packer prepares one update at a time, and
            // `drop` waits for the copies.
            unsafe { copy_rows(source, place, row.width, row.height, &self.copies) }?;
        }
        // SAFETY: the copies are inside the buffer and the packed weights, as `part` has checked.
        // Nothing else writes the packed weights: the packer prepares one update at a time, and
        // `drop` waits for the copies.
        unsafe {
            match self.is_local {
                // Within a GPU its SMs copy several times as fast as its copy engines.
                true => copies.enqueue_one_by_one(&self.copies),
                false => copies.put(&self.copies),
            }
        }?;
        let host = &mut self.staging.as_mut().ok_or(CudaError::EarlierCallFailed)?.host;
        for row in &work.to_host {
            let source = from.part(row.from, row.bytes());
            let place = host[row.to..row.to + row.bytes()].as_mut_ptr();
            // SAFETY: source and place were just checked. The memory is pinned, and the host reads
            // it after the copies.
            unsafe { sys::cuMemcpyAsync(place as u64, source, row.bytes(), self.copies.raw()) }
                .named("cuMemcpyAsync")?;
        }
        self.copied[buffer].record(&self.copies)?;
        if !work.complete.is_empty() {
            self.checks.wait(&self.copied[buffer])?;
        }
        work.complete.iter().try_for_each(|part| self.digest(&to, part))
    }

    fn digest(
        &self,
        weights: &Range,
        (index, offset, runs): &(usize, usize, WeightRuns),
    ) -> Result<(), CudaError> {
        let staging = self.staging.as_ref().ok_or(CudaError::EarlierCallFailed)?;
        let part = (weights, *offset, runs);
        self.weight_digests.enqueue(
            self.packer.dtype(),
            part,
            (&staging.sums, *index),
            &self.checks,
        )
    }

    /// Waits until the copies out of a buffer have completed.
    pub fn wait(&self, buffer: usize, limit: WaitLimit<'_>) -> Result<(), CudaError> {
        wait(&self.copied[buffer], limit)
    }

    /// Waits for all copies and digests.
    pub fn finish(&mut self, limit: WaitLimit<'_>) -> Result<CopiedWeights, CudaError> {
        self.packer.context().bind()?;
        self.copied.iter().try_for_each(|copied| wait(copied, limit))?;
        let staging = self.staging.as_mut().ok_or(CudaError::EarlierCallFailed)?;
        let (sums, done) = staging.downloaded.take().ok_or(CudaError::EarlierCallFailed)?;
        let count = self.digest_count * SUMS;
        let copy = sums.download(count, &staging.sums, 0, &self.checks, done)?;
        if let Err(error) = wait(copy.event(), limit) {
            // Dropping the copy would wait without a deadline.
            mem::forget(copy);
            return Err(error);
        }
        let (sums, done) = copy.finish()?;
        let digests = sums[..count].as_chunks::<SUMS>().0.iter().map(|sums| (sums[0], sums[1]));
        let digests = digests.collect();
        staging.downloaded = Some((sums, done));
        self.is_finished = true;
        Ok(CopiedWeights { host: staging.host.to_vec(), digests })
    }
}

impl Drop for ChunkCopies<'_> {
    fn drop(&mut self) {
        // A broadcast without its trainer ends only by an abort.
        let broadcasts = self.broadcasts.take();
        if self.is_finished {
            drop(self.packer.exchange_kept(broadcasts));
            return;
        }
        let aborted = broadcasts.map(|it| it.communicator.abort(ABORT_MAX));
        let is_aborted = !matches!(aborted, Some(Err(NcclError::AbortStuck { .. })));
        // After this function no copy may write the weights or read an unmapped buffer.
        let is_idle = is_aborted && drain(&self.copies).is_ok() && drain(&self.checks).is_ok();
        if !is_idle {
            // Copies are still in flight, so the trainer's buffers stay mapped and all other
            // buffers stay allocated.
            self.packer.mark_stuck();
            mem::forget(mem::take(&mut self.buffers));
        }
    }
}

/// Waits for all work of a stream, at most [`ABORT_MAX`].
fn drain<R: StreamRole>(stream: &Stream<R>) -> Result<(), CudaError> {
    let end = Event::new(stream.context())?;
    end.record(stream)?;
    wait(&end, WaitLimit { deadline: Instant::now() + ABORT_MAX, cancelled: &|| false })
}

/// Waits for an event.
fn wait(event: &Event, limit: WaitLimit<'_>) -> Result<(), CudaError> {
    let began = Instant::now();
    while !event.is_done()? {
        if Instant::now() > limit.deadline || (limit.cancelled)() {
            return Err(CudaError::CopyStuck { waited: began.elapsed() });
        }
        match began.elapsed() < SPIN {
            true => thread::yield_now(),
            false => thread::sleep(PAUSE),
        }
    }
    Ok(())
}
