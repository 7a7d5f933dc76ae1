//! KV transfer by NCCL between this process's GPUs and those of another process.
//!
//! NCCL's send and receive kernels occupy a few SMs until the peer's kernel runs too. So an end
//! launches its kernel only when it knows that the peer launches one. Only an abort ends a kernel
//! whose peer never comes; until then the operation keeps its blocks.
//!
//! Scattered blocks go through slots of staging memory. An abort also waits for the copies between
//! slots and blocks, because they write blocks.
//!
//! A node with tensor parallelism keeps its blocks in one part per rank, each part with the rank's
//! heads on a GPU of its own. A [`NcclLink`] connects two parts, one at each end, that have KV
//! heads in common. An operation is complete when it is complete on all links. A node without ranks
//! has one part.

mod invitation;
mod link;
mod operations;
mod watchdog;

use std::{
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

use self::{
    invitation::{COMMUNICATORS_MAX, Invitation, InvitationAnswer, agreed_ctas},
    link::{LinkEnd, LinkGpu, NcclLink},
    operations::{NcclChannel, OperationSizes},
};
use super::{
    context::StreamRole,
    ipc::shared_heads,
    kv::DeviceKv,
    moves::{BlockRows, Direction},
    nccl::{Communicator, CommunicatorOptions, Nccl, NcclVersion, UniqueId},
    parallel::in_parallel,
};
use crate::{
    arena::RemoteBlocks,
    layout::KvLayout,
    peer::{ChannelEnd, PeerChannel, PeerChannels, WaitLimit},
};

/// KV from or to another GPU, by kernels.
#[derive(Debug)]
pub enum PeerExchange {}

impl StreamRole for PeerExchange {}

/// Size of a slot, or of one block where a block is larger. The host spends 100 to 150 µs on an
/// operation, and NVLink moves 32 to 50 MiB in that time: shorter operations leave the link idle.
const SLOT_BYTES: usize = 64 << 20;
/// Slots per link: one is copied to or from while another is sent or received.
const SLOTS: usize = 3;
/// Runs of at least this many contiguous bytes are sent without staging.
const DIRECT_BYTES: usize = 8 << 20;

/// Communicators per link, used in turn: while the kernel of one starts or ends, the kernel of the
/// other uses the whole link (341 GB/s with two, 311 with one).
const LANES: usize = 2;
/// NCCL uses 1/`CTA_DIVISOR` of a communicator's CTAs for an operation between two ranks, and all
/// of them only if the operation has more than `CTA_BYTES` for each CTA.
const CTA_DIVISOR: usize = 2;
const CTA_BYTES: usize = 16 << 20;
const COMMUNICATOR_CTAS_MAX: usize = 64;

/// Largest number of SMs that a node reserves for NCCL. A decode step of an 8B model is as fast on
/// 128 of 132 SMs, but an eighth slower on 124. With at most this many CTAs, the receiver scatters
/// with the copy engines, which are fast enough and use no SM.
const RESERVED_SMS_MAX: u32 = 4;

/// Time-out for loading NCCL's kernels, which took 0.4 s.
const PREPARE_MAX: Duration = Duration::from_secs(10);

/// Memory budget per CTA of a communicator. Measured: 4 MiB and more.
const COMMUNICATOR_BYTES: u64 = 6 << 20;

/// Returns the memory in bytes that a pair of nodes takes on each GPU for `nccl`: slots, and an
/// estimate of NCCL's own buffers. Holds for nodes with equal rank counts.
pub fn nccl_link_bytes(max_ctas: u32) -> u64 {
    let share = CtaShare::of(max_ctas, 1, (1, 1), LANES);
    let ctas = LANES as u64 * u64::from(share.communicator_ctas());
    (SLOTS * SLOT_BYTES) as u64 + ctas * COMMUNICATOR_BYTES
}

/// Returns the number of SMs that decode steps leave to NCCL on a node without ranks: the CTAs that
/// a pair really uses, or 0 where reserving that many would slow decode steps.
pub fn nccl_reserved_sms(max_ctas: u32) -> u32 {
    let used = CtaShare::of(max_ctas, 1, (1, 1), LANES).per_gpu();
    if used <= RESERVED_SMS_MAX { used } else { 0 }
}

/// Factory of channels for one arena's blocks.
pub struct NcclChannels {
    /// Blocks with all heads; `parts` hold the heads of each rank.
    blocks: Arc<dyn RemoteBlocks>,
    /// In order of rank.
    parts: Vec<(Arc<DeviceKv>, Arc<LinkGpu>)>,
    /// Opened on first use.
    nccl: Mutex<Option<Arc<Nccl>>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn message_of(error: impl ToString) -> String {
    error.to_string()
}

/// Two parts with KV heads in common, by rank, and the bytes of those heads in their blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PartPair {
    from: (usize, BlockRows),
    to: (usize, BlockRows),
}

impl PartPair {
    fn own(&self, end: ChannelEnd) -> (usize, BlockRows) {
        match end {
            ChannelEnd::Sender => self.from,
            ChannelEnd::Receiver => self.to,
        }
    }
}

/// Returns the pairs of parts, in the same order at both ends.
fn pairs(layout: KvLayout, from_of: usize, to_of: usize) -> Vec<PartPair> {
    let all = (0..from_of).flat_map(|from| (0..to_of).map(move |to| (from, to)));
    let pair = |(from, to)| {
        let strides = shared_heads(layout, (from, from_of), (to, to_of))?;
        let rows =
            |(pitch, first)| BlockRows { pitch, first, width: strides.bytes, count: strides.runs };
        Some(PartPair { from: (from, rows(strides.from)), to: (to, rows(strides.to)) })
    };
    all.filter_map(pair).collect()
}

/// Returns the bytes of a block that one link moves; the largest where links differ.
fn moved_bytes(pairs: &[PartPair]) -> usize {
    pairs.iter().map(|pair| pair.from.1.bytes()).max().unwrap_or(1).max(1)
}

/// The CTAs that each communicator of a channel uses on a GPU.
#[derive(Clone, Copy, Debug)]
struct CtaShare {
    in_use: usize,
    /// Communicators on the GPU that has most of them.
    communicators: usize,
}

impl CtaShare {
    /// Divides `all` CTAs among the communicators of a GPU, at least one each. Both ends get the
    /// same result.
    fn of(all: u32, pairs: usize, parts: (usize, usize), lanes: usize) -> Self {
        let communicators = (lanes * pairs.div_ceil(parts.0.min(parts.1).max(1))).max(1);
        Self { in_use: (all as usize / communicators).max(1), communicators }
    }

    /// Returns the number of CTAs to create a communicator with, so that the longest operation uses
    /// no more than its share.
    fn communicator_ctas(self) -> u32 {
        let takes_all = self.in_use * CTA_BYTES < SLOT_BYTES;
        let ctas = if takes_all { self.in_use } else { CTA_DIVISOR * self.in_use };
        ctas.min(COMMUNICATOR_CTAS_MAX) as u32
    }

    fn per_gpu(self) -> u32 {
        (self.in_use * self.communicators) as u32
    }
}

impl NcclChannels {
    /// Creates the factory. `parts` hold the heads of `blocks`, in order of rank: one part for a
    /// single rank or a node without ranks.
    pub(super) fn new(blocks: Arc<dyn RemoteBlocks>, parts: Vec<Arc<DeviceKv>>) -> Self {
        let parts = parts.into_iter().map(|part| (part, Arc::default())).collect();
        Self { blocks, parts, nccl: Mutex::default() }
    }

    fn opened(&self) -> Result<Arc<Nccl>, String> {
        let mut opened = locked(&self.nccl);
        if let Some(nccl) = &*opened {
            return Ok(Arc::clone(nccl));
        }
        Ok(Arc::clone(opened.insert(Nccl::open(None).map_err(message_of)?)))
    }

    fn uuids(&self) -> Vec<String> {
        self.parts.iter().map(|(part, _)| part.context().device().uuid.clone()).collect()
    }

    /// Returns the pairs for a sender with `from_of` parts and a receiver with `to_of` parts.
    fn pairs(&self, from_of: usize, to_of: usize) -> Result<Vec<PartPair>, String> {
        let layout = self.blocks.layout();
        for parts in [from_of, to_of] {
            if !layout.kv_head_count.is_multiple_of(parts) {
                let heads = layout.kv_head_count;
                return Err(format!(
                    "cannot divide {heads} KV heads among {parts} ranks; expected a divisor"
                ));
            }
        }
        Ok(pairs(layout, from_of, to_of))
    }

    /// Joins all links in parallel: each one takes 0.1 s. If one fails, dropping the other links
    /// aborts them.
    fn join_links(
        &self,
        pairs: &[PartPair],
        options: &[Vec<CommunicatorOptions>],
        end: ChannelEnd,
        scatter: Direction,
        limit: WaitLimit<'_>,
    ) -> Result<Vec<NcclLink>, String> {
        let nccl = self.opened()?;
        in_parallel("nccl-join", pairs.iter().zip(options), |(pair, options), has_failed| {
            let (rank, rows) = pair.own(end);
            let (kv, gpu) = &self.parts[rank];
            let own = LinkEnd { kv: Arc::clone(kv), gpu: Arc::clone(gpu), rows, end, scatter };
            let cancelled = || has_failed.load(Ordering::Relaxed) || (limit.cancelled)();
            let limit = WaitLimit { deadline: limit.deadline, cancelled: &cancelled };
            NcclLink::join(own, &nccl, options, limit)
        })
    }
}

/// Fails with the difference if the two ends would launch different operations.
fn check_compatible(
    invitation: &Invitation,
    (version, library): (NcclVersion, &Path),
    block_bytes: usize,
) -> Result<(), String> {
    let theirs = NcclVersion(invitation.version);
    if theirs != version {
        let library = library.display();
        return Err(format!("the peer has NCCL {theirs}; expected {version} as here ({library})"));
    }
    let compared = [
        ("block size", invitation.block_bytes, block_bytes),
        ("slot size", invitation.slot_bytes, SLOT_BYTES),
        ("smallest run sent without staging", invitation.direct_bytes, DIRECT_BYTES),
    ];
    for (name, theirs, ours) in compared {
        if theirs != ours as u64 {
            return Err(format!("the peer's {name} is {theirs} bytes; expected {ours} as here"));
        }
    }
    Ok(())
}

fn rank(end: ChannelEnd) -> u32 {
    match end {
        ChannelEnd::Sender => 0,
        ChannelEnd::Receiver => 1,
    }
}

impl PeerChannels for NcclChannels {
    fn open(&self) -> Result<(), String> {
        self.opened().map(drop)
    }

    fn prepare(&self) -> Result<(), String> {
        let nccl = self.opened()?;
        let deadline = Instant::now() + PREPARE_MAX;
        let loaded = in_parallel("nccl-prepare", &self.parts, |(part, _), _| {
            Communicator::load_kernels(&nccl, part.context(), deadline).map_err(message_of)
        });
        loaded.map(drop)
    }

    fn invite(&self, max_ctas: Option<u32>) -> Result<Vec<u8>, String> {
        let nccl = self.opened()?;
        let invitation = Invitation {
            version: nccl.version().0,
            block_bytes: self.blocks.layout().block_bytes() as u64,
            slot_bytes: SLOT_BYTES as u64,
            direct_bytes: DIRECT_BYTES as u64,
            lanes: LANES,
            max_ctas,
            uuids: self.uuids(),
        };
        Ok(invitation.to_bytes())
    }

    fn accept(&self, invitation: &[u8], max_ctas: Option<u32>) -> Result<Vec<u8>, String> {
        let nccl = self.opened()?;
        let invitation = Invitation::from_bytes(invitation)?;
        let block_bytes = self.blocks.layout().block_bytes();
        check_compatible(&invitation, (nccl.version(), nccl.path()), block_bytes)?;
        let uuids = self.uuids();
        let pairs = self.pairs(invitation.uuids.len(), uuids.len())?;
        for PartPair { from: (from, _), to: (to, _) } in &pairs {
            if invitation.uuids[*from] == uuids[*to] {
                return Err(format!(
                    "the peer's rank {from} and our rank {to} are on one GPU, {}; expected two GPUs, because \
                     NCCL does not connect a GPU to itself",
                    uuids[*to]
                ));
            }
        }
        let communicators = pairs.len() * invitation.lanes;
        if communicators > COMMUNICATORS_MAX {
            return Err(format!(
                "the peer's {} ranks and our {} ranks need {communicators} communicators; expected at most \
                 {COMMUNICATORS_MAX}",
                invitation.uuids.len(),
                uuids.len()
            ));
        }
        let id = |_| nccl.unique_id().map(|id| bytemuck::cast(id.0));
        let ids = (0..communicators).map(id).collect::<Result<Vec<_>, _>>();
        Ok(InvitationAnswer { max_ctas, uuids, ids: ids.map_err(message_of)? }.to_bytes())
    }

    fn join(
        &self,
        (invitation, answer): (&[u8], &[u8]),
        end: ChannelEnd,
        limit: WaitLimit<'_>,
    ) -> Result<Arc<dyn PeerChannel>, String> {
        let invitation = Invitation::from_bytes(invitation)?;
        let (from_of, lanes) = (invitation.uuids.len(), invitation.lanes);
        let pairs_to = |to_of| self.pairs(from_of, to_of);
        let ids = |to_of| pairs_to(to_of).map_or(0, |pairs| lanes * pairs.len());
        let answer = InvitationAnswer::from_bytes(answer, ids)?;
        let to_of = answer.uuids.len();
        let pairs = pairs_to(to_of)?;
        let own = if end == ChannelEnd::Sender { from_of } else { to_of };
        assert_eq!(own, self.parts.len(), "one part per own rank");
        let share = |all| CtaShare::of(all, pairs.len(), (from_of, to_of), lanes);
        let share = agreed_ctas(invitation.max_ctas, answer.max_ctas).map(share);
        let ctas = share.map(|share| (share.communicator_ctas(), share.communicator_ctas()));
        let options = |id: &_| {
            let id = UniqueId(bytemuck::cast(*id));
            CommunicatorOptions { rank: rank(end), ranks: 2, id, ctas }
        };
        let options = answer.ids.chunks(lanes).map(|ids| ids.iter().map(options).collect());
        let options: Vec<Vec<_>> = options.collect();
        if pairs.len() * lanes > COMMUNICATORS_MAX {
            return Err(format!(
                "{from_of} sending and {to_of} receiving ranks need {} communicators; expected at most \
                 {COMMUNICATORS_MAX}",
                pairs.len() * lanes
            ));
        }
        let uses_reserved_sms = share.is_some_and(|share| share.per_gpu() <= RESERVED_SMS_MAX);
        let scatter =
            if uses_reserved_sms { Direction::ScatterByCopies } else { Direction::Scatter };
        let links = self.join_links(&pairs, &options, end, scatter, limit)?;
        let cuts = OperationSizes {
            slot_blocks: (SLOT_BYTES / moved_bytes(&pairs)).max(1),
            direct_min: DIRECT_BYTES.div_ceil(moved_bytes(&pairs)),
        };
        Ok(Arc::new(NcclChannel::new(links, cuts, Arc::clone(&self.blocks))?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::KvFormat;

    #[test]
    fn pairs_cover_every_kv_head_exactly_once() {
        let layout =
            KvLayout { layer_count: 3, kv_head_count: 8, head_dim: 2, format: KvFormat::Bf16 };
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
                for (end, parts) in [(ChannelEnd::Sender, from), (ChannelEnd::Receiver, to)] {
                    let (_, rows) = pair.own(end);
                    assert_eq!(rows.block_bytes(), block_bytes / parts);
                    assert_eq!(rows.bytes(), block_bytes / from.max(to));
                    assert_eq!(rows.are_whole(), parts == from.max(to));
                }
            }
        }
    }

    #[test]
    fn peers_with_another_nccl_or_other_sizes_are_rejected() {
        let same = Invitation {
            version: 22809,
            block_bytes: 4096,
            slot_bytes: SLOT_BYTES as u64,
            direct_bytes: DIRECT_BYTES as u64,
            lanes: LANES,
            max_ctas: None,
            uuids: vec!["GPU-1".to_owned()],
        };
        let check = |invitation: &Invitation| {
            let library = Path::new("/opt/libnccl.so.2");
            check_compatible(invitation, (NcclVersion(22809), library), 4096)
        };
        assert_eq!(check(&same), Ok(()));
        let error = check(&Invitation { version: 22705, ..same.clone() }).unwrap_err();
        let words = "the peer has NCCL 2.27.5; expected 2.28.9 as here (/opt/libnccl.so.2)";
        assert_eq!(error, words);
        let error = check(&Invitation { block_bytes: 8192, ..same.clone() }).unwrap_err();
        assert_eq!(error, "the peer's block size is 8192 bytes; expected 4096 as here");
        for other in [
            Invitation { slot_bytes: 1, ..same.clone() },
            Invitation { direct_bytes: 1, ..same.clone() },
        ] {
            assert!(check(&other).is_err());
        }
    }

    #[test]
    fn links_of_a_gpu_share_its_ctas() {
        for (all, pairs, parts, lanes, ctas) in [
            (8, 1, (1, 1), 1, 16),
            (8, 1, (1, 1), 2, 8),
            // An operation of 64 MiB uses all CTAs of the communicator.
            (4, 1, (1, 1), 2, 2),
            (7, 1, (1, 1), 2, 3),
            (8, 2, (2, 2), 1, 16),
            (8, 2, (1, 2), 1, 8),
            (8, 4, (4, 2), 1, 8),
            (1, 8, (8, 1), 2, 1),
            (64, 1, (1, 1), 1, 64),
        ] {
            let share = CtaShare::of(all, pairs, parts, lanes);
            assert_eq!(share.communicator_ctas(), ctas, "{all} {parts:?}");
        }
        assert_eq!([1, 2, 3, 4, 5, 6, 8, 16].map(nccl_reserved_sms), [2, 2, 2, 4, 4, 0, 0, 0]);
    }
}
