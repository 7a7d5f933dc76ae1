//! Populates the KV arena's memory in the background while the node serves.
//!
//! Without this, the first use of each page of a block takes a page fault, in a transfer or a
//! forward pass that a client waits for. Populating a gibibyte can take seconds, so the node is
//! ready before all pages are populated. A thread populates the arena in pieces and sleeps after
//! each piece.

use std::{
    io,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use kernels::{KvArena, cpu::affinity};
use tracing::{debug, warn};

/// Size of a piece in bytes. It is small, because stopping the thread waits for the current piece.
const PIECE_BYTES: usize = 8 << 20;
/// Sleep after a piece, as a multiple of the time that the piece took. The sleep leaves CPU time to
/// other pods of the machine, which serve during a rollout. For a small model, populating takes
/// more CPU time than all other work at the start of a node.
const SLEEP_FACTOR: u32 = 4;

/// Handle of the thread that populates the arena. Drop stops and joins the thread.
#[derive(Debug)]
pub(crate) struct PopulateThread {
    /// Dropped to stop the thread; nothing is sent.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl PopulateThread {
    /// Starts the thread on `cpus`, so that the memory is on the NUMA node of these CPUs. With an
    /// empty list the thread runs on any CPU.
    pub(crate) fn start(arena: Arc<KvArena>, cpus: Vec<u32>) -> io::Result<Self> {
        let (stop, stopped) = bounded::<()>(0);
        let thread = thread::Builder::new().name("baton-populate".to_owned()).spawn(move || {
            let confined = (!cpus.is_empty()).then(|| affinity::confine(&cpus));
            if let Some(Err(error)) = &confined {
                warn!(%error, "the KV arena may be on another NUMA node");
            }
            populate(&arena, |duration| {
                matches!(stopped.recv_timeout(duration), Err(RecvTimeoutError::Timeout))
            });
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for PopulateThread {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            warn!("the thread that populates the KV arena panicked");
        }
    }
}

/// Populates the arena piece by piece. `sleep` sleeps for the given time and returns whether to
/// continue.
fn populate(arena: &KvArena, sleep: impl Fn(Duration) -> bool) {
    let began = Instant::now();
    let piece_blocks = u32::try_from(PIECE_BYTES / arena.block_bytes()).unwrap_or(u32::MAX).max(1);
    let mut first = 0;
    while first < arena.block_count() {
        let count = piece_blocks.min(arena.block_count() - first);
        let piece_began = Instant::now();
        match arena.populate(first, count) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => {
                let bytes = arena.block_count() as u64 * arena.block_bytes() as u64;
                warn!(
                    "cannot populate the KV arena: this machine does not have the {bytes} bytes of node.kv_memory"
                );
                return;
            }
            // Linux before 5.14 cannot populate pages. Each page then faults at its first use.
            Err(error) => return debug!(%error, "the KV arena is not populated"),
        }
        first += count;
        if !sleep(SLEEP_FACTOR * piece_began.elapsed()) {
            return;
        }
    }
    debug!(seconds = began.elapsed().as_secs_f64(), "the KV arena is populated");
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use kernels::{KvFormat, KvLayout};

    use super::*;

    fn arena(blocks: u32) -> Arc<KvArena> {
        // 1 MiB a block.
        let layout =
            KvLayout { layer_count: 8, kv_head_count: 16, head_dim: 64, format: KvFormat::F32 };
        KvArena::host(layout, blocks).unwrap()
    }

    #[test]
    fn populate_covers_the_arena_with_a_short_last_piece() {
        let pieces = Cell::new(0);
        populate(&arena(19), |_| {
            pieces.set(pieces.get() + 1);
            true
        });
        assert_eq!(pieces.get(), 3);
    }

    #[test]
    fn dropping_populate_stops_it() {
        let arena = arena(4096);
        let populate = PopulateThread::start(arena.clone(), Vec::new()).unwrap();
        drop(populate);
        assert_eq!(Arc::strong_count(&arena), 1, "the thread has ended");
    }
}
