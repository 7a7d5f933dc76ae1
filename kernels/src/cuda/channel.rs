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
mod operations;
mod watch;

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use self::{
    invitation::{Answer, COMMUNICATORS_MAX, Invitation, Multiprocessors},
    link::{Gpu, Half, Link},
    operations::{Cuts, NcclChannel},
};
use super::{
    context::Role,
    ipc::shared_heads,
    kv::DeviceKv,
    moves::{Rows, Way},
    nccl::{Communicator, CommunicatorOptions, Nccl, NcclVersion},
};
use crate::{
    arena::RemoteBlocks,
    layout::KvLayout,
    peer::{End, Patience, PeerChannel, PeerChannels},
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
        let cuts = Cuts {
            slot_blocks: (SLOT_BYTES / moved_bytes(&pairs)).max(1),
            direct_min: DIRECT_BYTES.div_ceil(moved_bytes(&pairs)),
        };
        Ok(Arc::new(NcclChannel::new(links, cuts, Arc::clone(&self.blocks))?))
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
