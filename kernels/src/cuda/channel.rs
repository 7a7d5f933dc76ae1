//! KV blocks by NCCL, between this process's GPU and that of another.
//!
//! Kernels of both ends meet: each operation is put into the streams of both, and occupies a few
//! multiprocessors until the other end's is there. So each end puts its own only when it is known that the
//! other one does, too. An end that waits in vain is ended by an abort, and by nothing else: until then
//! the blocks of the operation are not given back.
//!
//! Blocks that lie scattered go through slots of staging memory, which an abort drains: its copies write
//! blocks as well.
//!
//! A node has its blocks in one part for each of its ranks, each with the rank's heads on a GPU of its own.
//! Of every two parts, one at either end, that have heads in common there is a [`Link`], and an operation is
//! over when it is on all of them. A node without ranks has one part.

mod invitation;
mod link;

use std::{
    collections::VecDeque,
    mem,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use self::{
    invitation::{Answer, COMMUNICATORS_MAX, Invitation, Multiprocessors},
    link::{Communicators, Gpu, Half, Link},
};
use super::{
    context::{Context, Role},
    ipc::shared_heads,
    kv::DeviceKv,
    moves::{Rows, Way},
    nccl::{Communicator, CommunicatorOptions, Nccl, NcclError, NcclVersion},
    staging::stretches,
    tally::Mark,
};
use crate::{
    arena::{BlockRead, BlockWrite, RemoteBlocks},
    layout::{BlockId, KvLayout},
    peer::{End, Moving, Patience, PeerChannel, PeerChannels},
};

/// KV from or to another GPU, by kernels.
#[derive(Debug)]
pub enum PeerExchange {}

impl Role for PeerExchange {}

/// Of a slot, or one block where that is more. An operation costs the host 100 to 150 us, in which the way
/// between two GPUs takes 32 to 50 MiB: shorter ones leave it idle.
const SLOT_BYTES: usize = 64 << 20;
/// One is copied to or from while another is sent or received.
const SLOTS: usize = 3;
/// Runs of so many bytes are sent as they lie.
const DIRECT_BYTES: usize = 8 << 20;

/// Communicators of a link, which take turns: while the kernel of one begins or ends, that of another
/// has the way between the GPUs to itself (341 GB/s; 311 with one).
const LANES: usize = 2;
/// Of the multiprocessors that a communicator is made for, NCCL takes half for an operation between two
/// ranks, and more only if that has more than so many bytes for each of those.
const PART_IN_USE: usize = 2;
const PART_BYTES: usize = 16 << 20;
const COMMUNICATOR_BLOCKS_MAX: usize = 64;

/// A channel of so few multiprocessors leaves the others to forwards: its receiver brings blocks to their places
/// by the copy engines, which keep pace with it. Forwards can do without so many: of 132 an 8B model's decoding
/// step takes no longer on 128, but an eighth on 124.
const ASIDE_MAX: u32 = 4;

/// To load what NCCL runs on a GPU, which took 0.4 s.
const PREPARE_MAX: Duration = Duration::from_secs(10);

/// Left to a communicator for each block of a kernel that it is made for: GPUs' free bytes told of 4 MiB and more.
const COMMUNICATOR_BYTES: u64 = 6 << 20;

/// What a pair of nodes takes of each GPU for `nccl` with so many multiprocessors: slots, and about what NCCL
/// takes for itself. Of nodes with ranks, where both have as many.
pub fn nccl_link_bytes(multiprocessors: u32) -> u64 {
    let share = Share::of(multiprocessors, 1, (1, 1), LANES);
    let blocks = LANES as u64 * u64::from(share.communicator_blocks());
    (SLOTS * SLOT_BYTES) as u64 + blocks * COMMUNICATOR_BYTES
}

/// How many multiprocessors forwards leave to a pair of nodes without ranks where so many are set: as many as it really
/// takes, or none where those are too many to be left.
pub fn nccl_spare(set: u32) -> u32 {
    let taken = Share::of(set, 1, (1, 1), LANES).of_a_gpu();
    if taken <= ASIDE_MAX { taken } else { 0 }
}

/// Makes channels for one arena's blocks.
pub struct NcclChannels {
    /// Whose parts these are: whole blocks.
    blocks: Arc<dyn RemoteBlocks>,
    /// In order of rank.
    parts: Vec<(Arc<DeviceKv>, Arc<Gpu>)>,
    /// Opened when it is first needed.
    nccl: Mutex<Option<Arc<Nccl>>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn words(error: impl ToString) -> String {
    error.to_string()
}

/// Two parts that have heads in common, by rank, and which bytes of their blocks those are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pair {
    from: (usize, Rows),
    to: (usize, Rows),
}

impl Pair {
    fn own(&self, end: End) -> (usize, Rows) {
        match end {
            End::Sender => self.from,
            End::Receiver => self.to,
        }
    }
}

/// In the same order at both ends.
fn pairs(layout: KvLayout, from_of: usize, to_of: usize) -> Vec<Pair> {
    let all = (0..from_of).flat_map(|from| (0..to_of).map(move |to| (from, to)));
    let pair = |(from, to)| {
        let strides = shared_heads(layout, (from, from_of), (to, to_of))?;
        let rows =
            |(pitch, first)| Rows { pitch, first, width: strides.bytes, count: strides.runs };
        Some(Pair { from: (from, rows(strides.from)), to: (to, rows(strides.to)) })
    };
    all.filter_map(pair).collect()
}

/// What a link moves of a block; the most, where links differ.
fn moved_bytes(pairs: &[Pair]) -> usize {
    pairs.iter().map(|pair| pair.from.1.bytes()).max().unwrap_or(1).max(1)
}

/// What of a GPU's multiprocessors each communicator of a channel takes.
#[derive(Clone, Copy, Debug)]
struct Share {
    in_use: usize,
    /// Communicators of the GPU that has most.
    communicators: usize,
}

impl Share {
    /// Of so many together, or one each: the same at both ends.
    fn of(all: u32, pairs: usize, parts: (usize, usize), lanes: usize) -> Self {
        let communicators = (lanes * pairs.div_ceil(parts.0.min(parts.1).max(1))).max(1);
        Self { in_use: (all as usize / communicators).max(1), communicators }
    }

    /// What each is made for, so few that the longest operation takes no more than its share.
    fn communicator_blocks(self) -> u32 {
        let takes_all = self.in_use * PART_BYTES < SLOT_BYTES;
        let blocks = if takes_all { self.in_use } else { PART_IN_USE * self.in_use };
        blocks.min(COMMUNICATOR_BLOCKS_MAX) as u32
    }

    fn of_a_gpu(self) -> u32 {
        (self.in_use * self.communicators) as u32
    }
}

impl NcclChannels {
    /// Of blocks whose heads lie in these parts, in order of rank; of a rank alone, or a node without
    /// ranks, in one.
    pub(super) fn new(blocks: Arc<dyn RemoteBlocks>, parts: Vec<Arc<DeviceKv>>) -> Self {
        let parts = parts.into_iter().map(|part| (part, Arc::default())).collect();
        Self { blocks, parts, nccl: Mutex::default() }
    }

    fn opened(&self) -> Result<Arc<Nccl>, String> {
        let mut opened = locked(&self.nccl);
        if let Some(nccl) = &*opened {
            return Ok(Arc::clone(nccl));
        }
        Ok(Arc::clone(opened.insert(Nccl::open(None).map_err(words)?)))
    }

    fn uuids(&self) -> Vec<String> {
        self.parts.iter().map(|(part, _)| part.context().device().uuid.clone()).collect()
    }

    /// Of a sender with so many parts, and a receiver with so many.
    fn pairs(&self, from_of: usize, to_of: usize) -> Result<Vec<Pair>, String> {
        let layout = self.blocks.layout();
        for parts in [from_of, to_of] {
            if !layout.kv_head_count.is_multiple_of(parts) {
                let heads = layout.kv_head_count;
                return Err(format!("{parts} ranks cannot have equal parts of {heads} heads"));
            }
        }
        Ok(pairs(layout, from_of, to_of))
    }

    fn checked(&self, invitation: &Invitation, nccl: &Nccl) -> Result<(), String> {
        let (theirs, ours) = (NcclVersion(invitation.version), nccl.version());
        if theirs != ours {
            return Err(format!(
                "its NCCL is {theirs}; allowed is {ours}, as here ({})",
                nccl.path().display()
            ));
        }
        let block_bytes = self.blocks.layout().block_bytes();
        let compared = [
            ("blocks have", invitation.block_bytes, block_bytes),
            ("slots have", invitation.slot_bytes, SLOT_BYTES),
            ("runs that are sent as they lie have at least", invitation.direct_bytes, DIRECT_BYTES),
        ];
        for (says, theirs, ours) in compared {
            if theirs != ours as u64 {
                return Err(format!("its {says} {theirs} bytes; allowed are {ours}, as here"));
            }
        }
        Ok(())
    }

    /// Joins all links at the same time: each takes a while.
    fn joined(
        &self,
        pairs: &[Pair],
        options: &[Vec<CommunicatorOptions>],
        end: End,
        scatter: Way,
        patience: Patience<'_>,
    ) -> Result<Vec<Link>, String> {
        let nccl = self.opened()?;
        let failed = AtomicBool::new(false);
        let given_up = || failed.load(Ordering::Relaxed) || (patience.given_up)();
        let patience = Patience { deadline: patience.deadline, given_up: &given_up };
        thread::scope(|scope| {
            let join = |pair: &Pair, options| {
                let (rank, rows) = pair.own(end);
                let (kv, gpu) = &self.parts[rank];
                let half = Half { kv: Arc::clone(kv), gpu: Arc::clone(gpu), rows, end, scatter };
                let (nccl, failed) = (&nccl, &failed);
                move || {
                    let link = Link::join(half, nccl, options, patience);
                    failed.fetch_or(link.is_err(), Ordering::Relaxed);
                    link
                }
            };
            let threads = pairs.iter().zip(options).map(|(pair, options)| {
                let named = thread::Builder::new().name("nccl-join".to_owned());
                let spawned = named.spawn_scoped(scope, join(pair, options));
                failed.fetch_or(spawned.is_err(), Ordering::Relaxed);
                spawned.map_err(words)
            });
            let threads: Vec<_> = threads.collect();
            let links = threads.into_iter().map(|thread| {
                let joined = thread?.join();
                joined.unwrap_or_else(|_| Err("a thread that joined panicked".to_owned()))
            });
            // All of them have come to an end; those that were made are aborted where one was not.
            let links: Vec<Result<Link, String>> = links.collect();
            links.into_iter().collect()
        })
    }
}

fn rank(end: End) -> u32 {
    match end {
        End::Sender => 0,
        End::Receiver => 1,
    }
}

impl PeerChannels for NcclChannels {
    fn open(&self) -> Result<(), String> {
        self.opened().map(drop)
    }

    fn prepare(&self) -> Result<(), String> {
        let nccl = self.opened()?;
        let deadline = Instant::now() + PREPARE_MAX;
        thread::scope(|scope| {
            let load = |(part, _): &(Arc<DeviceKv>, _)| {
                let (nccl, context) = (&nccl, Arc::clone(part.context()));
                let load = move || Communicator::load_kernels(nccl, &context, deadline);
                let named = thread::Builder::new().name("nccl-prepare".to_owned());
                named.spawn_scoped(scope, load).map_err(words)
            };
            // All begin before the first is waited for, and all end.
            let threads: Vec<_> = self.parts.iter().map(load).collect();
            let loaded = threads.into_iter().map(|thread| {
                let loaded = thread?.join();
                loaded.map_err(|_| "a thread that prepared panicked".to_owned())?.map_err(words)
            });
            let loaded: Vec<Result<(), String>> = loaded.collect();
            loaded.into_iter().collect()
        })
    }

    fn invite(&self, multiprocessors: Option<u32>) -> Result<Vec<u8>, String> {
        let nccl = self.opened()?;
        let invitation = Invitation {
            version: nccl.version().0,
            block_bytes: self.blocks.layout().block_bytes() as u64,
            slot_bytes: SLOT_BYTES as u64,
            direct_bytes: DIRECT_BYTES as u64,
            lanes: LANES,
            multiprocessors: Multiprocessors(multiprocessors),
            uuids: self.uuids(),
        };
        Ok(invitation.to_bytes())
    }

    fn accept(&self, invitation: &[u8], multiprocessors: Option<u32>) -> Result<Vec<u8>, String> {
        let nccl = self.opened()?;
        let invitation = Invitation::from_bytes(invitation)?;
        self.checked(&invitation, &nccl)?;
        let uuids = self.uuids();
        let pairs = self.pairs(invitation.uuids.len(), uuids.len())?;
        for Pair { from: (from, _), to: (to, _) } in &pairs {
            if invitation.uuids[*from] == uuids[*to] {
                return Err(format!(
                    "its rank {from} and our rank {to} are on one GPU, {}; allowed are two, for NCCL joins \
                     no two ends on one",
                    uuids[*to]
                ));
            }
        }
        let communicators = pairs.len() * invitation.lanes;
        if communicators > COMMUNICATORS_MAX {
            return Err(format!(
                "{} of its ranks and {} of ours want {communicators} communicators; allowed are \
                 {COMMUNICATORS_MAX}",
                invitation.uuids.len(),
                uuids.len()
            ));
        }
        let ids = (0..communicators).map(|_| nccl.unique_id()).collect::<Result<Vec<_>, _>>();
        let multiprocessors = Multiprocessors(multiprocessors);
        Ok(Answer { multiprocessors, uuids, ids: ids.map_err(words)? }.to_bytes())
    }

    fn join(
        &self,
        (invitation, answer): (&[u8], &[u8]),
        end: End,
        patience: Patience<'_>,
    ) -> Result<Arc<dyn PeerChannel>, String> {
        let invitation = Invitation::from_bytes(invitation)?;
        let (from_of, lanes) = (invitation.uuids.len(), invitation.lanes);
        let pairs_to = |to_of| self.pairs(from_of, to_of);
        let ids = |to_of| pairs_to(to_of).map_or(0, |pairs| lanes * pairs.len());
        let answer = Answer::from_bytes(answer, ids)?;
        let to_of = answer.uuids.len();
        let pairs = pairs_to(to_of)?;
        let own = if end == End::Sender { from_of } else { to_of };
        assert_eq!(own, self.parts.len(), "this end has its own parts");
        let multiprocessors = invitation.multiprocessors.with(answer.multiprocessors);
        let share = |all| Share::of(all, pairs.len(), (from_of, to_of), lanes);
        let share = multiprocessors.map(share);
        let blocks = share.map(|share| (share.communicator_blocks(), share.communicator_blocks()));
        let options = |id: &_| CommunicatorOptions { rank: rank(end), ranks: 2, id: *id, blocks };
        let options = answer.ids.chunks(lanes).map(|ids| ids.iter().map(options).collect());
        let options: Vec<Vec<_>> = options.collect();
        if pairs.len() * lanes > COMMUNICATORS_MAX {
            return Err(format!(
                "its {to_of} ranks and our {from_of} want {} communicators; allowed are {COMMUNICATORS_MAX}",
                pairs.len() * lanes
            ));
        }
        let is_aside = share.is_some_and(|share| share.of_a_gpu() <= ASIDE_MAX);
        let scatter = if is_aside { Way::ScatterAside } else { Way::Scatter };
        let links = self.joined(&pairs, &options, end, scatter, patience)?;
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
            slot_blocks: (SLOT_BYTES / moved_bytes(&pairs)).max(1),
            direct_min: DIRECT_BYTES.div_ceil(moved_bytes(&pairs)),
            blocks: Arc::clone(&self.blocks),
        });
        Ok(Arc::new(NcclChannel { _watch: Watch::start(&shared)?, shared }))
    }
}

/// One end of a channel.
struct NcclChannel {
    shared: Arc<Shared>,
    _watch: Watch,
}

/// From one look of a channel's watch at it to the next. Time is counted in looks: what this process, or the machine, was
/// stopped for counts as one.
const LOOK: Duration = Duration::from_millis(50);
/// For so many looks the oldest operation of a channel may stay the oldest: 2.5 s. Whoever waits for it gives up sooner.
const STUCK_LOOKS: u32 = 50;
/// The same while somebody is held up who wants something of the driver. Operations take milliseconds.
const HOLDS_UP_LOOKS: u32 = 4;
/// The same of what is not in its streams yet, or not all of it: most likely it is held up itself.
const HELD_UP_LOOKS: u32 = 20;

/// A thread that ends a channel on which nothing goes on, and calls no driver before: that one may wait for the
/// end of this channel, beside the end of another one, and let no other thread know. Then other pairs, and forwards,
/// wait as well, so this channel ends much sooner.
struct Watch {
    /// Dropped to end the thread.
    over: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    fn start(shared: &Arc<Shared>) -> Result<Self, String> {
        let (over, ended) = mpsc::channel();
        let shared = Arc::downgrade(shared);
        let named = thread::Builder::new().name("nccl-watch".to_owned());
        let thread = named.spawn(move || watch(&shared, &ended)).map_err(words)?;
        Ok(Self { over: Some(over), thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.over.take());
        if let Some(thread) = self.thread.take() {
            // It says nothing that anybody waits for.
            let _ = thread.join();
        }
    }
}

fn watch(shared: &Weak<Shared>, ended: &mpsc::Receiver<()>) {
    let mut stay = Stay::default();
    while ended.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
        let Some(shared) = shared.upgrade() else { return };
        let oldest = locked(&shared.under_way).oldest();
        let is_held_up = || shared.contexts.iter().any(|context| context.calls().any_is_late());
        if let Some(reason) = stay.is_too_long(oldest, is_held_up) {
            // Whoever waits for it hears of it by that.
            let _ = shared.abort_because(reason);
            return;
        }
    }
}

/// The operation that has waited longest on a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Oldest {
    number: u64,
    /// All of it is in its streams. Before it may wait for the driver, as others do.
    is_put: bool,
}

/// How many looks ago the oldest operation was first seen as that.
#[derive(Default)]
struct Stay {
    oldest: Option<Oldest>,
    looks: u32,
    /// Since it was put.
    looks_put: u32,
}

impl Stay {
    /// After one look more; why, where it has.
    fn is_too_long(
        &mut self,
        oldest: Option<Oldest>,
        is_held_up: impl Fn() -> bool,
    ) -> Option<&'static str> {
        let number = |oldest: Option<Oldest>| oldest.map(|oldest| oldest.number);
        let is_same = number(oldest) == number(self.oldest);
        self.looks = if is_same { self.looks.saturating_add(1) } else { 0 };
        self.looks_put = if oldest == self.oldest { self.looks_put.saturating_add(1) } else { 0 };
        self.oldest = oldest;
        let oldest = oldest?;
        let holds_up = match oldest.is_put {
            true => self.looks_put >= HOLDS_UP_LOOKS,
            false => self.looks >= HELD_UP_LOOKS,
        };
        if holds_up && is_held_up() {
            return Some(
                "the channel was aborted: an operation did not end, and others waited for the GPU",
            );
        }
        (self.looks >= STUCK_LOOKS).then_some("the channel was aborted: an operation did not end")
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
type Marks = Vec<Mark>;

struct Shared {
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
    /// Why, where nobody else can say.
    reason: OnceLock<&'static str>,
    /// An abort did not come back.
    stuck: AtomicBool,
    slot_blocks: usize,
    direct_min: usize,
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
        for stretch in stretches(runs, self.slot_blocks, self.direct_min) {
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

    fn abort_because(&self, reason: &'static str) -> Result<(), String> {
        // The first one counts.
        let _ = self.reason.set(reason);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Dtype;

    #[test]
    fn heads_go_between_the_parts_that_have_them_and_all_of_them_do() {
        let layout = KvLayout { layer_count: 3, kv_head_count: 8, head_dim: 2, dtype: Dtype::Bf16 };
        let block_bytes = layout.block_bytes();
        let of = |from, to| -> Vec<(usize, usize)> {
            pairs(layout, from, to).iter().map(|pair| (pair.from.0, pair.to.0)).collect()
        };
        assert_eq!(of(1, 1), [(0, 0)]);
        assert_eq!(of(2, 2), [(0, 0), (1, 1)]);
        assert_eq!(of(1, 2), [(0, 0), (0, 1)]);
        assert_eq!(of(4, 2), [(0, 0), (1, 0), (2, 1), (3, 1)]);
        for (from, to) in [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1), (4, 4), (8, 2)] {
            let pairs = pairs(layout, from, to);
            assert_eq!(pairs.len(), from.max(to));
            assert_eq!(moved_bytes(&pairs), block_bytes / from.max(to));
            for pair in &pairs {
                for (end, parts) in [(End::Sender, from), (End::Receiver, to)] {
                    let (_, rows) = pair.own(end);
                    assert_eq!(rows.block_bytes(), block_bytes / parts);
                    assert_eq!(rows.bytes(), block_bytes / from.max(to));
                    assert_eq!(rows.are_whole(), parts == from.max(to));
                }
            }
        }
    }

    /// How many looks it takes until an operation is ended.
    fn looks_until_the_end(is_put: impl Fn(u32) -> bool, is_held_up: bool) -> u32 {
        let mut stay = Stay::default();
        let oldest = |look| Some(Oldest { number: 7, is_put: is_put(look) });
        (0..1000).find(|look| stay.is_too_long(oldest(*look), || is_held_up).is_some()).unwrap()
    }

    #[test]
    fn an_operation_that_stays_is_ended_sooner_when_others_are_held_up() {
        assert_eq!(looks_until_the_end(|_| true, false), STUCK_LOOKS);
        assert_eq!(looks_until_the_end(|_| false, false), STUCK_LOOKS);
        assert_eq!(looks_until_the_end(|_| true, true), HOLDS_UP_LOOKS);
        assert_eq!(looks_until_the_end(|_| false, true), HELD_UP_LOOKS);
        assert_eq!(looks_until_the_end(|look| look >= 10, true), 10 + HOLDS_UP_LOOKS);
        // That it was put at last makes it no younger.
        assert_eq!(looks_until_the_end(|look| look >= 30, false), STUCK_LOOKS);
    }

    #[test]
    fn operations_that_end_are_not_ended() {
        let mut stay = Stay::default();
        for look in 0..1000 {
            // Another one at every third look, and none at times.
            let oldest = Oldest { number: look / 3, is_put: true };
            let oldest = (look % 7 > 0).then_some(oldest);
            assert_eq!(stay.is_too_long(oldest, || true), None, "{look}");
        }
    }

    #[test]
    fn links_of_a_gpu_have_its_multiprocessors_together() {
        for (all, pairs, parts, lanes, blocks) in [
            (8, 1, (1, 1), 1, 16),
            (8, 1, (1, 1), 2, 8),
            // An operation of 64 MiB takes all that there are.
            (4, 1, (1, 1), 2, 2),
            (7, 1, (1, 1), 2, 3),
            (8, 2, (2, 2), 1, 16),
            (8, 2, (1, 2), 1, 8),
            (8, 4, (4, 2), 1, 8),
            (1, 8, (8, 1), 2, 1),
            (64, 1, (1, 1), 1, 64),
        ] {
            let share = Share::of(all, pairs, parts, lanes);
            assert_eq!(share.communicator_blocks(), blocks, "{all} {parts:?}");
        }
        assert_eq!([1, 2, 3, 4, 5, 6, 8, 16].map(nccl_spare), [2, 2, 2, 4, 4, 0, 0, 0]);
    }
}
