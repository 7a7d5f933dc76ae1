//! One end of a channel: operations put into its links' streams, until they are over or it is aborted.

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
    super::{context::Context, nccl::NcclError, staging::stretches, tally::Mark},
    link::{Communicators, Link},
    locked,
    watch::{Oldest, Watch},
    words,
};
use crate::{
    arena::{BlockRead, BlockWrite, RemoteBlocks},
    layout::BlockId,
    peer::{Moving, PeerChannel},
};

/// One end of a channel.
pub(super) struct NcclChannel {
    shared: Arc<Shared>,
    _watch: Watch,
}

/// How a chunk is cut up, in blocks.
pub(super) struct Cuts {
    /// What a slot takes.
    pub slot_blocks: usize,
    /// Runs of so many are sent as they lie.
    pub direct_min: usize,
}

impl NcclChannel {
    pub fn new(
        links: Vec<Link>,
        cuts: Cuts,
        blocks: Arc<dyn RemoteBlocks>,
    ) -> Result<Self, String> {
        let communicators = links.iter().map(|link| Arc::clone(link.communicators())).collect();
        let contexts = links.iter().map(|link| Arc::clone(link.context())).collect();
        let shared = Arc::new(Shared {
            links: Mutex::new(Some(links)),
            communicators,
            contexts,
            under_way: Mutex::default(),
            ending: Mutex::default(),
            aborted: AtomicBool::new(false),
            reason: OnceLock::new(),
            stuck: AtomicBool::new(false),
            cuts,
            blocks,
        });
        Ok(Self { _watch: Watch::start(&shared)?, shared })
    }
}

/// Operations in order, those that are over forgotten now and then.
#[derive(Default)]
struct Operations {
    /// Marks are there once it was put.
    under_way: VecDeque<Option<Marks>>,
    /// Of the first.
    first: u64,
}

impl Operations {
    fn oldest(&mut self) -> Option<Oldest> {
        let is_over = |marks: &Option<Marks>| {
            marks.as_ref().is_some_and(|marks| marks.iter().all(Mark::is_reached))
        };
        while self.under_way.front().is_some_and(is_over) {
            self.under_way.pop_front();
            self.first += 1;
        }
        let oldest = self.under_way.front();
        oldest.map(|marks| Oldest { number: self.first, is_put: marks.is_some() })
    }

    fn begin(&mut self) -> u64 {
        self.oldest();
        self.under_way.push_back(None);
        self.first + self.under_way.len() as u64 - 1
    }

    fn put(&mut self, number: u64, marks: &Marks) {
        if let Some(place) = self.under_way.get_mut((number - self.first) as usize) {
            *place = Some(marks.clone());
        }
    }
}

/// Of each link.
pub(super) type Marks = Vec<Mark>;

pub(super) struct Shared {
    /// Held by whoever puts something into their streams. `None` once it was aborted.
    links: Mutex<Option<Vec<Link>>>,
    communicators: Vec<Arc<Communicators>>,
    /// Of the GPUs on which the links' ends are.
    contexts: Vec<Arc<Context>>,
    under_way: Mutex<Operations>,
    /// Held by an abort: another one waits for it.
    ending: Mutex<()>,
    /// An abort was begun: marks that are done from then on say nothing about what was transferred.
    aborted: AtomicBool,
    /// Why, where the watch did it.
    reason: OnceLock<&'static str>,
    /// An abort did not come back.
    stuck: AtomicBool,
    cuts: Cuts,
    blocks: Arc<dyn RemoteBlocks>,
}

impl Shared {
    /// Whether the runs are those of our blocks.
    fn check(&self, runs: &[u32], ids: &[BlockId]) -> Result<(), String> {
        let mut rest = ids;
        for run in runs {
            let (blocks, after) = rest
                .split_at_checked(*run as usize)
                .filter(|(blocks, _)| !blocks.is_empty())
                .ok_or("the runs are not those of the blocks")?;
            if !blocks.windows(2).all(|two| two[0].0.checked_add(1) == Some(two[1].0)) {
                return Err("blocks of one run do not lie together".to_owned());
            }
            rest = after;
        }
        if rest.is_empty() { Ok(()) } else { Err("blocks are left over".to_owned()) }
    }

    /// Puts a chunk into the streams, and marks behind it.
    fn put(&self, runs: &[u32], ids: &[BlockId]) -> Result<Marks, String> {
        let number = locked(&self.under_way).begin();
        let put = match locked(&self.links).as_mut() {
            None => Err(self.why_aborted()),
            Some(links) => self.put_into(links, runs, ids).map_err(words),
        };
        if let Ok(marks) = &put {
            locked(&self.under_way).put(number, marks);
        }
        put.map_err(|reason| match self.abort() {
            // Part of it may be in the stream: only an abort says that nothing moves.
            Ok(()) => reason,
            Err(stuck) => format!("{reason}; {stuck}"),
        })
    }

    fn put_into(
        &self,
        links: &mut [Link],
        runs: &[u32],
        ids: &[BlockId],
    ) -> Result<Marks, NcclError> {
        for stretch in stretches(runs, self.cuts.slot_blocks, self.cuts.direct_min) {
            let ids = &ids[stretch.blocks];
            for link in &mut *links {
                // SAFETY: the blocks are borrowed until all marks are seen, or the abort has returned.
                unsafe { link.put(ids, stretch.is_staged) }?;
            }
        }
        let mut marks = Vec::new();
        for link in links {
            marks.extend(link.mark()?);
        }
        Ok(marks)
    }

    /// The operation that has waited longest.
    pub fn oldest(&self) -> Option<Oldest> {
        locked(&self.under_way).oldest()
    }

    /// Whether somebody waits for the driver of a GPU on which one of the links' ends is.
    pub fn is_anyone_held_up(&self) -> bool {
        let now = Instant::now();
        self.contexts.iter().any(|context| context.calls().any_is_late(now))
    }

    /// Says why to whoever waits, unless it was aborted before.
    pub fn abort_because(&self, reason: &'static str) -> Result<(), String> {
        if !self.aborted.load(Ordering::SeqCst) {
            // Set once, by the watch alone.
            let _ = self.reason.set(reason);
        }
        self.abort()
    }

    fn why_aborted(&self) -> String {
        (*self.reason.get().unwrap_or(&"the channel was aborted")).to_owned()
    }

    fn abort(&self) -> Result<(), String> {
        let _ending = locked(&self.ending);
        // Before it ends the kernels, whose marks are reached then.
        self.aborted.store(true, Ordering::SeqCst);
        // These first, and without the links: whoever has those may be waiting for the driver, and the driver
        // for the end of these.
        let ended = Communicators::end_all(&self.communicators);
        if let Some(mut links) = locked(&self.links).take()
            && let Err(reason) = Link::clear_all(&mut links, ended)
        {
            self.stuck.store(true, Ordering::Release);
            return Err(reason);
        }
        // Once it was stuck nothing says any more that it is over.
        match self.stuck.load(Ordering::Acquire) {
            true => Err("an abort before did not come back".to_owned()),
            false => Ok(()),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Nobody is left to be told.
        let _ = self.abort();
    }
}

impl PeerChannel for NcclChannel {
    fn send(
        &self,
        runs: &[u32],
        blocks: Vec<BlockRead>,
    ) -> Result<Box<dyn Moving<BlockRead>>, String> {
        assert!(
            blocks.iter().all(|block| block.lies_in(&*self.shared.blocks)),
            "own blocks are sent"
        );
        let ids: Vec<BlockId> = blocks.iter().map(BlockRead::block).collect();
        self.shared.check(runs, &ids)?;
        let under_way = UnderWay::new(&self.shared, blocks);
        under_way.marked(self.shared.put(runs, &ids))
    }

    fn receive(
        &self,
        runs: &[u32],
        blocks: Vec<BlockWrite>,
    ) -> Result<Box<dyn Moving<BlockWrite>>, String> {
        let ours = |block: &BlockWrite| block.lies_in(&*self.shared.blocks);
        assert!(blocks.iter().all(ours), "only own blocks are written");
        let ids: Vec<BlockId> = blocks.iter().map(BlockWrite::block).collect();
        self.shared.check(runs, &ids)?;
        let under_way = UnderWay::new(&self.shared, blocks);
        under_way.marked(self.shared.put(runs, &ids))
    }

    fn abort(&self) -> Result<(), String> {
        self.shared.abort()
    }
}

/// An operation in the stream, and the blocks that it reads or writes.
struct UnderWay<B> {
    /// `None` while there are none, and once they were given back.
    marks: Option<Marks>,
    blocks: Option<Vec<B>>,
    shared: Arc<Shared>,
}

impl<B: Send + 'static> UnderWay<B> {
    fn new(shared: &Arc<Shared>, blocks: Vec<B>) -> Self {
        Self { marks: None, blocks: Some(blocks), shared: Arc::clone(shared) }
    }

    fn marked(mut self, marks: Result<Marks, String>) -> Result<Box<dyn Moving<B>>, String> {
        self.marks = Some(marks?);
        Ok(Box::new(self))
    }
}

impl<B: Send + 'static> Moving<B> for UnderWay<B> {
    fn is_done(&mut self) -> Result<bool, String> {
        let done = self.marks.iter().flatten().all(Mark::is_reached);
        // After the marks: what an abort has ended looks done, and an abort is known before that.
        match self.shared.aborted.load(Ordering::SeqCst) {
            true => Err(self.shared.why_aborted()),
            false => Ok(done),
        }
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<B>, String> {
        if !self.is_done()? {
            return Err("it is under way".to_owned());
        }
        Ok(self.blocks.take().unwrap_or_default())
    }
}

impl<B> Drop for UnderWay<B> {
    fn drop(&mut self) {
        let Some(blocks) = self.blocks.take() else { return };
        let is_over = match &self.marks {
            Some(marks) => marks.iter().all(Mark::is_reached) || self.shared.abort().is_ok(),
            // It could not be put, and was aborted for that.
            None => self.shared.abort().is_ok(),
        };
        if !is_over {
            // Something may still move them: they are never anyone's again.
            mem::forget(blocks);
        }
    }
}
