//! Copies weights out of chunk buffers on a GPU into packed weights. The buffers are memory of a trainer's process.
//!
//! The copy engines move the bytes. A kernel on another stream digests each complete weight, and counts its elements that
//! are not finite, while the next chunks arrive. Vectors are packed in f32, so their bytes go to the host, which converts
//! them.

use std::{
    sync::{MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use cudarc::driver::sys;

use super::{
    attention::dtype_code,
    context::{DeviceToHost, Event, Stream},
    copies::Copies,
    error::{CudaError, Named},
    ffi::DigestWeight,
    ipc::{ExportedMemory, PeerToDevice},
    memory::{DeviceMemory, Pinned, Range},
    moves::copy_rows,
    packer::CudaPacker,
};
use crate::digest::WeightRuns;

/// Deadline of the copies of a chunk. A chunk takes milliseconds.
const COPIES_MAX: Duration = Duration::from_secs(2);
/// Pause between polls for the end of copies.
const PAUSE: Duration = Duration::from_micros(20);
/// Numbers that the kernel writes for a part of a weight: the digest, and the elements that are not finite.
const SUMS: usize = 2;

/// Rows of bytes in a chunk, and their place. All sizes are in bytes.
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

/// What follows from a chunk: copies, and parts of weights that are complete.
#[derive(Clone, Debug, Default)]
pub struct ChunkWork {
    /// Copies into the packed weights.
    pub to_device: Vec<RowCopy>,
    /// Copies of contiguous bytes into host memory.
    pub to_host: Vec<RowCopy>,
    /// Complete parts: index of the digest, offset in the packed weights, and the place in the whole weight.
    pub complete: Vec<(usize, usize, WeightRuns)>,
}

/// Buffers of a node's updates, which are kept.
#[derive(Debug)]
pub(super) struct ChunkStaging {
    host: Pinned<u8>,
    /// Device memory of the digests.
    sums: Range,
    downloaded: Option<(Pinned<u64>, Event)>,
}

/// What the weights' bytes are, once all chunks have been copied.
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
    digest_weight: DigestWeight,
    copies: Stream<PeerToDevice>,
    checks: Stream<DeviceToHost>,
    /// Recorded after the copies out of each buffer.
    copied: Vec<Event>,
    digest_count: usize,
    staging: MutexGuard<'a, Option<ChunkStaging>>,
    // Unmapped after the streams' work has completed: see `drop`.
    buffers: Vec<Range>,
}

impl CudaPacker {
    /// Maps the buffers of a trainer. `host_bytes`: bytes of vectors. `digest_count`: parts of weights to digest.
    pub fn copy_chunks(
        &self,
        buffers: &[ExportedMemory],
        host_bytes: usize,
        digest_count: usize,
    ) -> Result<ChunkCopies<'_>, String> {
        let map = |buffer: &ExportedMemory| buffer.map(self.context(), "a trainer's chunk buffer");
        let buffers = buffers.iter().map(map).collect::<Result<Vec<_>, String>>()?;
        let copies = ChunkCopies::new(self, buffers, host_bytes, digest_count);
        copies.map_err(|error| error.to_string())
    }
}

impl<'a> ChunkCopies<'a> {
    fn new(
        packer: &'a CudaPacker,
        buffers: Vec<Range>,
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
                host: Pinned::zeroed(context, "the vectors of an update", host_bytes)?,
                sums: memory.cut(sums * size_of::<u64>())?,
                downloaded: Some((
                    Pinned::zeroed(context, "the digests of weights", sums)?,
                    Event::new(context)?,
                )),
            });
        }
        Ok(Self {
            packer,
            digest_weight: packer.library().digest_weight()?,
            copies: Stream::new(context)?,
            checks: Stream::relaxed(context)?,
            copied: buffers.iter().map(|_| Event::new(context)).collect::<Result<_, _>>()?,
            digest_count,
            staging,
            buffers,
        })
    }

    /// Enqueues the copies out of a buffer, and the digests of complete parts.
    ///
    /// # Panics
    /// When a copy exceeds the buffer or the packed weights, which is a bug of the caller.
    pub fn scatter(&mut self, buffer: usize, work: &ChunkWork) -> Result<(), CudaError> {
        self.packer.context().bind()?;
        let (from, to) = (&self.buffers[buffer], self.packer.everything());
        let mut copies = Copies::default();
        for row in &work.to_device {
            let rows = row.height.saturating_sub(1);
            let source = from.part(row.from, rows * row.from_pitch + row.width);
            let place = to.part(row.to, rows * row.to_pitch + row.width);
            if row.is_contiguous() {
                copies.add(place, source, row.bytes());
                continue;
            }
            let (source, place) = ((source, row.from_pitch, 0), (place, row.to_pitch, 0));
            // SAFETY: the rows are inside the buffer and the packed weights, as just checked. Nothing else writes the
            // packed weights: the packer prepares one update at a time, and `drop` waits for the copies.
            unsafe { copy_rows(source, place, row.width, row.height, &self.copies) }?;
        }
        // SAFETY: as above.
        unsafe { copies.put(&self.copies) }?;
        let host = &mut self.staging.as_mut().ok_or(CudaError::EarlierCallFailed)?.host;
        for row in &work.to_host {
            let source = from.part(row.from, row.bytes());
            let place = host[row.to..row.to + row.bytes()].as_mut_ptr();
            // SAFETY: source and place were just checked. The memory is pinned, and the host reads it after the copies.
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
        let bytes = SUMS * size_of::<u64>();
        // SAFETY: part and sums are inside their memory. The part's copies have completed before on this stream.
        let code = unsafe {
            (self.digest_weight)(
                dtype_code(self.packer.dtype()),
                weights.part(*offset, runs.bytes()),
                runs.runs as i64,
                runs.run_bytes as i64,
                runs.run_stride as i64,
                runs.first as i64,
                staging.sums.part(index * bytes, bytes),
                self.checks.raw().cast(),
            )
        };
        self.packer.library().check("baton_digest_weight", code)
    }

    /// Waits until the copies out of a buffer have completed.
    pub fn wait(&self, buffer: usize) -> Result<(), CudaError> {
        wait(&self.copied[buffer])
    }

    /// Waits for all copies and digests.
    pub fn finish(mut self) -> Result<CopiedWeights, CudaError> {
        self.packer.context().bind()?;
        self.copied.iter().try_for_each(wait)?;
        let staging = self.staging.as_mut().ok_or(CudaError::EarlierCallFailed)?;
        let (sums, done) = staging.downloaded.take().ok_or(CudaError::EarlierCallFailed)?;
        let count = self.digest_count * SUMS;
        let copy = sums.download(count, &staging.sums, 0, &self.checks, done)?;
        wait(copy.event())?;
        let (sums, done) = copy.finish()?;
        let digests = sums[..count].as_chunks::<SUMS>().0.iter().map(|sums| (sums[0], sums[1]));
        let digests = digests.collect();
        staging.downloaded = Some((sums, done));
        Ok(CopiedWeights { host: staging.host.to_vec(), digests })
    }
}

impl Drop for ChunkCopies<'_> {
    fn drop(&mut self) {
        // Nothing may write the weights, or read an unmapped buffer, later. After an error that ended the context nothing
        // does.
        let _ = self.copies.synchronize();
        let _ = self.checks.synchronize();
    }
}

/// Waits for an event with a deadline.
fn wait(event: &Event) -> Result<(), CudaError> {
    let until = Instant::now() + COPIES_MAX;
    while !event.is_done()? {
        if Instant::now() > until {
            return Err(CudaError::CopyStuck { waited: COPIES_MAX });
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}
