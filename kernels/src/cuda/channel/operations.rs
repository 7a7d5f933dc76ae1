//! One end of a channel: operations in flight on the streams of its links.

use std::{
    collections::VecDeque,
    mem,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use super::{
    super::{context::Context, nccl::NcclError, staging::operations, stream_progress::StreamMark},
    link::{Communicators, NcclLink},
    locked, message_of,
    watchdog::{OldestOperation, Watchdog},
};
use crate::{
    arena::{BlockRead, BlockWrite, RemoteBlocks},
    layout::BlockId,
    peer::{PeerChannel, TransferInFlight},
};

/// One end of a channel.
pub(super) struct NcclChannel {
    shared: Arc<ChannelControl>,
    _watch: Watchdog,
}

/// Sizes by which a chunk is cut into operations, in blocks.
pub(super) struct OperationSizes {
    /// Blocks that fit into a slot.
    pub slot_blocks: usize,
    /// Runs of at least this many contiguous blocks are sent without staging.
    pub direct_min: usize,
}

impl NcclChannel {
    pub(super) fn new(
        links: Vec<NcclLink>,
        cuts: OperationSizes,
        blocks: Arc<dyn RemoteBlocks>,
    ) -> Result<Self, String> {
        let communicators = links.iter().map(|link| Arc::clone(link.communicators())).collect();
        let contexts = links.iter().map(|link| Arc::clone(link.context())).collect();
        let probed_rate = links.iter().map(NcclLink::probed_rate).sum();
        let shared = Arc::new(ChannelControl {
            links: Mutex::new(Some(links)),
            communicators,
            contexts,
            in_flight: Mutex::default(),
            aborting: Mutex::default(),
            aborted: AtomicBool::new(false),
            reason: OnceLock::new(),
            stuck: AtomicBool::new(false),
            probed_rate,
            cuts,
            blocks,
        });
        Ok(Self { _watch: Watchdog::start(&shared)?, shared })
    }

    fn start<B: Send + 'static>(
        &self,
        runs: &[u32],
        blocks: Vec<B>,
        block: fn(&B) -> BlockId,
    ) -> Result<Box<dyn TransferInFlight<B>>, String> {
        let ids: Vec<BlockId> = blocks.iter().map(block).collect();
        self.shared.check(runs, &ids)?;
        let shared = Arc::clone(&self.shared);
        let mut in_flight = OperationInFlight { marks: None, blocks: Some(blocks), shared };
        in_flight.marks = Some(self.shared.launch(runs, &ids)?);
        Ok(Box::new(in_flight))
    }
}

/// Operations in order of their launch; finished ones are removed lazily.
#[derive(Default)]
struct Operations {
    /// `None` until the operation is launched completely.
    in_flight: VecDeque<Option<Marks>>,
    /// Number of the first operation in the queue.
    first: u64,
}

impl Operations {
    fn oldest(&mut self) -> Option<OldestOperation> {
        let has_ended = |marks: &Option<Marks>| {
            marks.as_ref().is_some_and(|marks| marks.iter().all(StreamMark::is_reached))
        };
        while self.in_flight.front().is_some_and(has_ended) {
            self.in_flight.pop_front();
            self.first += 1;
        }
        let oldest = self.in_flight.front();
        oldest.map(|marks| OldestOperation { number: self.first, is_launched: marks.is_some() })
    }

    fn begin(&mut self) -> u64 {
        self.oldest();
        self.in_flight.push_back(None);
        self.first + self.in_flight.len() as u64 - 1
    }

    fn launched(&mut self, number: u64, marks: &Marks) {
        if let Some(place) = self.in_flight.get_mut((number - self.first) as usize) {
            *place = Some(marks.clone());
        }
    }
}

/// Marks after an operation on each link.
pub(super) type Marks = Vec<StreamMark>;

pub(super) struct ChannelControl {
    /// Held while an operation is launched. `None` after an abort.
    links: Mutex<Option<Vec<NcclLink>>>,
    communicators: Vec<Arc<Communicators>>,
    /// Contexts of the GPUs that the links use.
    contexts: Vec<Arc<Context>>,
    in_flight: Mutex<Operations>,
    /// Held during an abort, so that a second abort waits.
    aborting: Mutex<()>,
    /// Whether an abort has started. A mark that is reached after that does not prove a transfer.
    aborted: AtomicBool,
    /// Reason why the watchdog aborted the channel, if it did.
    reason: OnceLock<&'static str>,
    /// Whether an abort hung.
    stuck: AtomicBool,
    /// Sum of the probed rates of all links, in bytes/s.
    probed_rate: u64,
    cuts: OperationSizes,
    blocks: Arc<dyn RemoteBlocks>,
}

impl ChannelControl {
    /// Checks that `runs` describe the blocks.
    fn check(&self, runs: &[u32], ids: &[BlockId]) -> Result<(), String> {
        let mut rest = ids;
        for run in runs {
            let (blocks, after) = rest
                .split_at_checked(*run as usize)
                .filter(|(blocks, _)| !blocks.is_empty())
                .ok_or("invalid runs: they do not cover the blocks")?;
            if !blocks.windows(2).all(|two| two[0].0.checked_add(1) == Some(two[1].0)) {
                return Err("invalid runs: blocks of one run are not contiguous".to_owned());
            }
            rest = after;
        }
        if rest.is_empty() {
            Ok(())
        } else {
            Err("invalid runs: they cover fewer blocks than given".to_owned())
        }
    }

    /// Launches the transfer of a chunk and marks its end.
    fn launch(&self, runs: &[u32], ids: &[BlockId]) -> Result<Marks, String> {
        let number = locked(&self.in_flight).begin();
        let launched = match locked(&self.links).as_mut() {
            None => Err(self.why_aborted()),
            Some(links) => self.launch_on(links, runs, ids).map_err(message_of),
        };
        if let Ok(marks) = &launched {
            locked(&self.in_flight).launched(number, marks);
        }
        launched.map_err(|reason| match self.abort() {
            // A part may already be in the streams: only an abort guarantees that nothing moves.
            Ok(()) => reason,
            Err(stuck) => format!("{reason}; {stuck}"),
        })
    }

    fn launch_on(
        &self,
        links: &mut [NcclLink],
        runs: &[u32],
        ids: &[BlockId],
    ) -> Result<Marks, NcclError> {
        for operation in operations(runs, self.cuts.slot_blocks, self.cuts.direct_min) {
            let ids = &ids[operation.blocks];
            for link in &mut *links {
                // SAFETY: the blocks are borrowed until all marks are reached, or the abort has
                // returned.
                unsafe { link.launch(ids, operation.is_staged) }?;
            }
        }
        let mut marks = Vec::new();
        for link in links {
            marks.extend(link.mark()?);
        }
        Ok(marks)
    }

    /// Returns the oldest operation in flight.
    pub(super) fn oldest(&self) -> Option<OldestOperation> {
        locked(&self.in_flight).oldest()
    }

    /// Returns whether a thread is blocked in the driver of one of the links' GPUs.
    pub(super) fn is_driver_blocked(&self) -> bool {
        let now = Instant::now();
        self.contexts.iter().any(|context| context.calls().any_is_overdue(now))
    }

    /// Aborts the channel and keeps the reason for callers that wait for an operation.
    pub(super) fn abort_because(&self, reason: &'static str) -> Result<(), String> {
        if !self.aborted.load(Ordering::SeqCst) {
            // Only the watchdog sets it, once.
            let _ = self.reason.set(reason);
        }
        self.abort()
    }

    fn why_aborted(&self) -> String {
        (*self.reason.get().unwrap_or(&"the channel was aborted")).to_owned()
    }

    fn abort(&self) -> Result<(), String> {
        let _aborting = locked(&self.aborting);
        // Set first: aborting the kernels makes their marks reached.
        self.aborted.store(true, Ordering::SeqCst);
        // Aborts the communicators first and without the lock on the links: its holder may be
        // blocked in the driver, and the driver on these communicators.
        let ended = Communicators::abort_all(&self.communicators);
        if let Some(mut links) = locked(&self.links).take()
            && let Err(reason) = NcclLink::drain_all(&mut links, ended)
        {
            self.stuck.store(true, Ordering::Release);
            return Err(reason);
        }
        // After an abort that hung nothing guarantees that the transfers have ended.
        match self.stuck.load(Ordering::Acquire) {
            true => Err("an earlier abort hung".to_owned()),
            false => Ok(()),
        }
    }
}

impl Drop for ChannelControl {
    fn drop(&mut self) {
        // No caller is left to report an error to.
        let _ = self.abort();
    }
}

impl PeerChannel for NcclChannel {
    fn send(
        &self,
        runs: &[u32],
        blocks: Vec<BlockRead>,
    ) -> Result<Box<dyn TransferInFlight<BlockRead>>, String> {
        assert!(
            blocks.iter().all(|block| block.lies_in(&*self.shared.blocks)),
            "only our blocks are sent"
        );
        self.start(runs, blocks, BlockRead::block)
    }

    fn receive(
        &self,
        runs: &[u32],
        blocks: Vec<BlockWrite>,
    ) -> Result<Box<dyn TransferInFlight<BlockWrite>>, String> {
        let ours = |block: &BlockWrite| block.lies_in(&*self.shared.blocks);
        assert!(blocks.iter().all(ours), "only our blocks are received into");
        self.start(runs, blocks, BlockWrite::block)
    }

    fn probed_rate(&self) -> u64 {
        self.shared.probed_rate
    }

    fn abort(&self) -> Result<(), String> {
        self.shared.abort()
    }
}

/// A launched operation and the blocks that it reads or writes.
struct OperationInFlight<B> {
    /// `None` if the launch failed.
    marks: Option<Marks>,
    blocks: Option<Vec<B>>,
    shared: Arc<ChannelControl>,
}

impl<B: Send + 'static> TransferInFlight<B> for OperationInFlight<B> {
    fn is_done(&mut self) -> Result<bool, String> {
        let done = self.marks.iter().flatten().all(StreamMark::is_reached);
        // Checked after the marks: an abort sets the flag before it makes marks reached.
        match self.shared.aborted.load(Ordering::SeqCst) {
            true => Err(self.shared.why_aborted()),
            false => Ok(done),
        }
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<B>, String> {
        if !self.is_done()? {
            return Err("the operation is in flight".to_owned());
        }
        Ok(self.blocks.take().unwrap_or_default())
    }
}

impl<B> Drop for OperationInFlight<B> {
    fn drop(&mut self) {
        let Some(blocks) = self.blocks.take() else { return };
        let has_ended = match &self.marks {
            Some(marks) => marks.iter().all(StreamMark::is_reached) || self.shared.abort().is_ok(),
            // The launch failed, which aborted the channel.
            None => self.shared.abort().is_ok(),
        };
        if !has_ended {
            // Something may still move the blocks, so they are leaked.
            mem::forget(blocks);
        }
    }
}
