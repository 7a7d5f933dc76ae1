//! Bandwidth of plain copies from one GPU's memory to another's: the limit of KV transfer.

use std::{
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    context::{Context, Event, Stream},
    copies::UnorderedCopies,
    error::CudaError,
    ipc::PeerToDevice,
    memory::DeviceMemory,
};

const TRIES: usize = 6;
const SMALL_BYTES: usize = 4096;
const SMALL_TRIES: usize = 50;
/// Time-out, far longer than the slowest link needs.
const COPY_MAX: Duration = Duration::from_secs(30);

/// Rate of copies from one GPU to another, or within one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkRate {
    /// Best of a few runs.
    pub gb_per_s: f64,
    /// Median latency of a small copy, until the host sees its end.
    pub latency: Duration,
}

/// Submission mode of pieces to the copy engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopySubmission {
    /// One copy per piece.
    Single,
    /// Batches of this many pieces.
    Batch { pieces: usize },
}

/// Measures the rate at which one GPU's copy engines copy `bytes` bytes, cut into pieces, out of
/// another GPU's memory.
pub fn pull_rate(
    from: &Arc<Context>,
    to: &Arc<Context>,
    bytes: usize,
    piece_bytes: usize,
    submission: CopySubmission,
) -> Result<LinkRate, CudaError> {
    assert!(bytes >= SMALL_BYTES && piece_bytes > 0, "there is something to copy");
    const STREAMS: usize = 2;
    let source = DeviceMemory::new(from, "the source of a copy", bytes)?;
    let source = source.cut(bytes)?;
    let target = DeviceMemory::new(to, "the target of a copy", bytes)?;
    let target = target.cut(bytes)?;
    let filler: Stream<PeerToDevice> = Stream::new(from)?;
    source.fill(0x5a, &filler)?;
    filler.synchronize()?;
    to.reach(from)?;
    let streams: Vec<Stream<PeerToDevice>> =
        (0..STREAMS).map(|_| Stream::new(to)).collect::<Result<_, _>>()?;
    let ends = (0..STREAMS).map(|_| Event::new(to)).collect::<Result<Vec<_>, _>>()?;
    let run = |bytes: usize, piece_bytes: usize| {
        let begin = Instant::now();
        let pieces: Vec<usize> = (0..bytes).step_by(piece_bytes).collect();
        let at_once = match submission {
            CopySubmission::Single => 1,
            CopySubmission::Batch { pieces } => pieces.max(1),
        };
        for (index, pieces) in pieces.chunks(at_once).enumerate() {
            let mut copies = UnorderedCopies::default();
            for offset in pieces {
                let length = (bytes - offset).min(piece_bytes);
                copies.add(target.part(*offset, length), source.part(*offset, length), length);
            }
            // SAFETY: all parts are inside their ranges, which live until the wait below.
            unsafe { copies.put(&streams[index % STREAMS]) }?;
        }
        for (stream, end) in streams.iter().zip(&ends) {
            end.record(stream)?;
        }
        for end in &ends {
            while !end.is_done()? {
                if begin.elapsed() > COPY_MAX {
                    return Err(CudaError::CopyStuck { waited: COPY_MAX });
                }
                std::hint::spin_loop();
            }
        }
        Ok(begin.elapsed())
    };
    let measured = (|| {
        run(bytes, piece_bytes)?;
        let mut best = Duration::MAX;
        for _ in 0..TRIES {
            best = best.min(run(bytes, piece_bytes)?);
        }
        let mut small = (0..SMALL_TRIES)
            .map(|_| run(SMALL_BYTES, SMALL_BYTES))
            .collect::<Result<Vec<_>, CudaError>>()?;
        small.sort_unstable();
        Ok(LinkRate {
            gb_per_s: bytes as f64 / 1e9 / best.as_secs_f64(),
            latency: small[SMALL_TRIES / 2],
        })
    })();
    if let Err(CudaError::CopyStuck { .. }) = measured {
        // Leaked: freeing them would wait for the stuck copies.
        mem::forget((source, target, streams, ends));
        return measured;
    }
    // The ranges outlive the copies, also when a copy could not be launched.
    for stream in &streams {
        stream.synchronize()?;
    }
    measured
}
