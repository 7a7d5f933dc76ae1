//! One simulated node that checks the scheduler's guarantees after every action.
//!
//! The test plays the transfers: it writes the KV of a `Receive` into the reserved blocks, and
//! checks the blocks of a `Send` until it ends the transfer. It also plays the copies of the KV
//! tiers.

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

use engine::{
    CacheSeeds, LoopOutcome, SchedulerConfig, StepLoop,
    event::{
        Action, FinishReason, InFlight, Input, NewSequence, SequenceFailure, SequenceId,
        SequenceKind,
    },
    executor::{
        Executor,
        sim::{SimArena, SimExecutor, block_after, fingerprints},
    },
    tiers::{RecoveredBlock, Tier, TierConfig, TierEvent, TierStats},
};
use kernels::{BLOCK_TOKENS, BlockId, KvGroups, sampling::SampledToken};

use super::{SEEDS, oracle, scheduler, sim, tiers::TierCopies};

pub(crate) struct Node {
    pub engine: StepLoop<SimExecutor>,
    pub start: Instant,
    arena: SimArena,
    groups: KvGroups,
    sequences: BTreeMap<SequenceId, Tracked>,
    copies: TierCopies,
    /// Tokens that each ended load gave its sequence.
    pub loaded_tokens: Vec<u32>,
}

struct Tracked {
    new: NewSequence,
    expected: Vec<u32>,
    reason: Option<FinishReason>,
    received: Vec<u32>,
    admitted: bool,
    local_prefill: bool,
    cached_tokens: u32,
    end: Option<End>,
    transfer: Option<Transfer>,
    abort_received: bool,
    transfer_failed: bool,
}

#[derive(Clone, Debug, PartialEq)]
enum End {
    Finished,
    Failed(SequenceFailure),
    Aborted,
}

enum Transfer {
    Outgoing {
        first_block: Option<u32>,
        /// Handed-over blocks by their number.
        handed_over: BTreeMap<u32, BlockId>,
    },
    Incoming {
        first_block: u32,
        blocks: Vec<BlockId>,
    },
}

impl Node {
    pub(crate) fn new(config: SchedulerConfig) -> Self {
        Self::with_groups(config, None, KvGroups::default())
    }

    /// Returns a node with these KV groups.
    pub(crate) fn with_groups(
        config: SchedulerConfig,
        tiers: Option<TierConfig>,
        groups: KvGroups,
    ) -> Self {
        let start = Instant::now();
        let executor = sim(config.limits, start).with_kv_groups(groups.clone());
        let arena = executor.arena();
        let scheduler = scheduler(config).with_kv_groups(groups.clone());
        let scheduler = match tiers {
            Some(tiers) => scheduler.with_tiers(tiers, start),
            None => scheduler,
        };
        let engine = StepLoop::new(scheduler, executor);
        let copies = TierCopies::new(arena.clone());
        let (sequences, loaded_tokens) = (BTreeMap::new(), Vec::new());
        Self { engine, start, arena, groups, sequences, copies, loaded_tokens }
    }

    pub(crate) fn with_tiers(config: SchedulerConfig, tiers: TierConfig) -> Self {
        let mut node = Self::before_recovery(config, tiers);
        node.recover(Vec::new(), true);
        node
    }

    /// Returns a node whose disk tier has not reported the blocks of an earlier start.
    pub(crate) fn before_recovery(config: SchedulerConfig, tiers: TierConfig) -> Self {
        Self::with_groups(config, Some(tiers), KvGroups::default())
    }

    /// Reports blocks of an earlier start.
    pub(crate) fn recover(&mut self, blocks: Vec<RecoveredBlock>, is_complete: bool) {
        let tier = Tier::Disk;
        self.input(Input::Tier(TierEvent::Recovered { tier, blocks, is_complete }));
    }

    /// Gives the node the disk of a node that has stopped. Returns the blocks on the disk.
    pub(crate) fn take_disk(&mut self, stopped: &Self) -> Vec<RecoveredBlock> {
        self.copies.take_disk(&stopped.copies)
    }

    /// Changes to weights of this version.
    pub(crate) fn change_weights(&mut self, weight_version: u64, in_flight: InFlight) {
        self.engine.executor_mut().prepare_weights(weight_version, in_flight);
        let mut actions = Vec::new();
        let seeds = CacheSeeds { weight_version, ..SEEDS };
        self.engine.change_weights(seeds, in_flight, &mut actions).expect("weights are prepared");
        self.observe(actions);
    }

    /// Advances one copy of the tiers; `fails` lets the copy fail. Returns false when no copy is in
    /// flight.
    pub(crate) fn copy(&mut self, pick: usize, fails: bool) -> bool {
        let Some(event) = self.copies.advance(pick, fails) else { return false };
        self.input(Input::Tier(event));
        true
    }

    /// Finishes every copy, and those that follow.
    pub(crate) fn copy_all(&mut self) {
        while self.copy(0, false) {}
    }

    /// Sets the time that a load reports for each block.
    pub(crate) fn copies_take(&mut self, block_time: Duration) {
        self.copies.block_time = block_time;
    }

    pub(crate) fn tier_stats(&self) -> TierStats {
        self.stats_of(Tier::Disk)
    }

    pub(crate) fn stats_of(&self, tier: Tier) -> TierStats {
        self.engine.scheduler().tier_stats(tier).expect("the tier is on")
    }

    /// Reports further slots of the host tier.
    pub(crate) fn grow_host(&mut self, slots: u32) {
        self.input(Input::Tier(TierEvent::Grown { tier: Tier::Host, slots }));
    }

    pub(crate) fn ids(&self) -> Vec<SequenceId> {
        self.sequences.keys().copied().collect()
    }

    pub(crate) fn now(&self) -> Instant {
        self.engine.executor().now()
    }

    pub(crate) fn arrive(&mut self, new: NewSequence) {
        let sequence_max = match new.kind {
            SequenceKind::Send => self.engine.scheduler().config().limits.sequence_tokens as usize,
            _ => self.engine.scheduler().sequence_tokens_max(),
        };
        let (expected, reason) = oracle(&new, sequence_max);
        let transfer = (new.kind == SequenceKind::Send)
            .then(|| Transfer::Outgoing { first_block: None, handed_over: BTreeMap::new() });
        let tracked = Tracked {
            new: new.clone(),
            expected,
            reason,
            received: Vec::new(),
            admitted: false,
            local_prefill: false,
            cached_tokens: 0,
            end: None,
            transfer,
            abort_received: false,
            transfer_failed: false,
        };
        let id = new.id;
        assert!(self.sequences.insert(id, tracked).is_none(), "tests use fresh ids");
        self.input(Input::Arrived(new));
        // Rejected at once: no transfer was known.
        let tracked = self.sequences.get_mut(&id).expect("just inserted");
        if matches!(tracked.end, Some(End::Failed(_))) && !tracked.abort_received {
            tracked.transfer = None;
        }
    }

    pub(crate) fn abort(&mut self, id: SequenceId) {
        let tracked = self.sequences.get_mut(&id).expect("a known id");
        if tracked.end.is_none() {
            tracked.end = Some(End::Aborted);
        }
        self.input(Input::Abort { id });
        let tracked = &self.sequences[&id];
        let told = tracked.transfer.is_none() || tracked.abort_received;
        assert!(told, "an abort names a transfer in flight");
    }

    /// Delivers the receiver's reservation of a `Send`; ignored in other phases.
    pub(crate) fn transfer_ready(&mut self, id: SequenceId, wanted_from: u32) {
        let tracked = self.sequences.get_mut(&id).expect("a known id");
        let blocks = sent(&self.groups, tracked.new.tokens.len()).len() as u32;
        if let Some(Transfer::Outgoing { first_block: first_block @ None, .. }) =
            &mut tracked.transfer
            && tracked.end.is_none()
        {
            let wanted_from = wanted_from % blocks;
            *first_block = Some(wanted_from);
            let block_count = blocks - wanted_from;
            self.input(Input::TransferReady { id, first_block: wanted_from, block_count });
        }
    }

    /// Writes every reserved block of a `Receive`; ignored where no block is reserved.
    pub(crate) fn kv_arrives(&mut self, id: SequenceId) {
        let tracked = self.sequences.get_mut(&id).expect("a known id");
        let Some(Transfer::Incoming { first_block, blocks }) = &tracked.transfer else { return };
        let kv = fingerprints(&tracked.new.tokens);
        let entries = sent(&self.groups, tracked.new.tokens.len());
        for (block, entry) in blocks.iter().zip(&entries[*first_block as usize..]) {
            self.arena.write(*block, block_after(&self.groups, *entry, &kv));
        }
        tracked.transfer = None;
        let first_index = tracked.new.tokens.len() as u32 - tracked.new.prompt_len;
        let token = SampledToken { id: tracked.expected[0], logprobs: None, pooled: None };
        self.input(Input::KvArrived { id, first_index, token });
    }

    /// Ends the transfer: delivered if all blocks were handed over, failed otherwise. The last
    /// write of a failed transfer lands only now.
    pub(crate) fn transfer_ends(&mut self, id: SequenceId) {
        let tracked = self.sequences.get_mut(&id).expect("a known id");
        let delivered = match tracked.transfer.take() {
            None => return,
            Some(Transfer::Outgoing { .. }) => tracked.end == Some(End::Finished),
            Some(Transfer::Incoming { blocks, .. }) => {
                for block in blocks {
                    self.arena.write(block, [0xbad; BLOCK_TOKENS]);
                }
                false
            }
        };
        tracked.transfer_failed |= !delivered;
        self.input(Input::TransferEnded { id });
        let tracked = &self.sequences[&id];
        assert!(tracked.end.is_some(), "nothing waits for a transfer that ended");
    }

    /// Returns the transfers that the node was told to abort, or that have delivered all blocks.
    pub(crate) fn transfers_to_end(&self) -> Vec<SequenceId> {
        let over = |tracked: &Tracked| match tracked.transfer {
            None => false,
            Some(Transfer::Outgoing { .. }) => tracked.end.is_some(),
            Some(Transfer::Incoming { .. }) => tracked.abort_received,
        };
        self.sequences.iter().filter(|(_, tracked)| over(tracked)).map(|(&id, _)| id).collect()
    }

    pub(crate) fn receiving(&self) -> Vec<SequenceId> {
        let incoming =
            |tracked: &Tracked| matches!(tracked.transfer, Some(Transfer::Incoming { .. }));
        self.sequences.iter().filter(|(_, tracked)| incoming(tracked)).map(|(&id, _)| id).collect()
    }

    pub(crate) fn unfinished(&self) -> Vec<SequenceId> {
        let open = |tracked: &Tracked| tracked.end.is_none();
        self.sequences.iter().filter(|(_, tracked)| open(tracked)).map(|(&id, _)| id).collect()
    }

    /// Returns the number of tokens that the sequence has generated.
    pub(crate) fn received(&self, id: SequenceId) -> usize {
        self.sequences[&id].received.len()
    }

    /// Returns the number of tokens that were cached when the sequence was admitted.
    pub(crate) fn cached_tokens(&self, id: SequenceId) -> u32 {
        self.sequences[&id].cached_tokens
    }

    /// Returns the tokens that the sequence has generated.
    pub(crate) fn answer(&self, id: SequenceId) -> Vec<u32> {
        self.sequences[&id].received.clone()
    }

    pub(crate) fn finished(&self, id: SequenceId) -> bool {
        self.sequences[&id].end == Some(End::Finished)
    }

    pub(crate) fn failure(&self, id: SequenceId) -> Option<&SequenceFailure> {
        match &self.sequences[&id].end {
            Some(End::Failed(failure)) => Some(failure),
            _ => None,
        }
    }

    pub(crate) fn advance(&mut self, time: Duration) {
        self.engine.executor_mut().advance(time);
    }

    pub(crate) fn turn(&mut self) -> LoopOutcome {
        self.turn_for(Duration::from_secs(10))
    }

    pub(crate) fn turn_for(&mut self, timeout: Duration) -> LoopOutcome {
        let mut actions = Vec::new();
        let turn = self.engine.turn(timeout, &mut actions).expect("every plan is sound");
        self.observe(actions);
        turn
    }

    /// Runs turns until no progress is possible without an input.
    pub(crate) fn run(&mut self) {
        for _ in 0..100_000 {
            if self.turn() == LoopOutcome::Idle {
                return;
            }
        }
        panic!("the engine steps without end");
    }

    /// Asserts that every sequence and transfer has ended and every block was released.
    pub(crate) fn assert_all_returned(&self) {
        assert_eq!(self.unfinished(), []);
        assert!(self.engine.scheduler().is_idle(), "{:?}", self.engine.scheduler());
        let load = self.engine.scheduler().load();
        assert_eq!((load.blocks_held, load.blocks_reserved), (0, 0));
        assert_eq!((load.running, load.waiting, load.pending_prompt_tokens), (0, 0, 0));
        assert_eq!(self.engine.scheduler().next_deadline(), None);
    }

    pub(crate) fn input(&mut self, input: Input) {
        let mut actions = Vec::new();
        self.engine.handle(input, &mut actions);
        self.observe(actions);
    }

    fn observe(&mut self, actions: Vec<Action>) {
        for action in actions {
            self.observe_one(action);
        }
        self.engine.scheduler().check();
        self.check_handed_over();
    }

    fn observe_one(&mut self, action: Action) {
        let id = match &action {
            Action::Admitted { id, .. }
            | Action::Reserve { id, .. }
            | Action::KvWritten { id, .. }
            | Action::Tokens { id, .. }
            | Action::Finished { id, .. }
            | Action::Failed { id, .. }
            | Action::AbortTransfer { id, .. } => *id,
            Action::Save(_) | Action::CancelSaves { .. } | Action::Load(_) => {
                return self.copies.start(action);
            }
            Action::Loaded { tokens, .. } => return self.loaded_tokens.push(*tokens),
        };
        let tracked = self.sequences.get_mut(&id).expect("actions name known sequences");
        if let Action::AbortTransfer { .. } = action {
            assert!(tracked.transfer.is_some(), "{id:?} has no transfer");
            assert!(!std::mem::replace(&mut tracked.abort_received, true), "told once");
            return;
        }
        assert_eq!(tracked.end, None, "{id:?} has ended, then {action:?}");
        match action {
            Action::Admitted { cached_tokens, local_prefill, .. } => {
                assert!(!std::mem::replace(&mut tracked.admitted, true), "admitted once");
                assert!(cached_tokens < tracked.new.tokens.len() as u32);
                assert_ne!(tracked.new.kind, SequenceKind::Send);
                tracked.local_prefill = local_prefill;
                tracked.cached_tokens = cached_tokens;
            }
            Action::Reserve { first_block, blocks, .. } => {
                assert_eq!(tracked.new.kind, SequenceKind::Receive);
                let total = sent(&self.groups, tracked.new.tokens.len()).len();
                assert_eq!(first_block as usize + blocks.len(), total);
                tracked.transfer = Some(Transfer::Incoming { first_block, blocks });
            }
            Action::KvWritten { first_block, blocks, .. } => {
                let Some(Transfer::Outgoing { first_block: Some(wanted), handed_over }) =
                    &mut tracked.transfer
                else {
                    panic!("{id:?} hands over without a transfer");
                };
                let next = handed_over.keys().last().map_or(*wanted, |last| last + 1);
                assert_eq!(first_block, next, "each block once, without gaps");
                handed_over.extend((first_block..).zip(blocks));
            }
            Action::Tokens { first_index, tokens, .. } => {
                assert!(tracked.admitted || tracked.new.kind == SequenceKind::Send);
                let given = tracked.new.tokens.len() - tracked.new.prompt_len as usize;
                assert_eq!(first_index as usize, given + tracked.received.len());
                assert!(!tokens.is_empty());
                tracked.received.extend(tokens.iter().map(|token| token.id));
                let expected = &tracked.expected[..tracked.received.len()];
                assert_eq!(tracked.received, expected, "{id:?} is token-exact");
            }
            Action::Finished { reason, .. } => {
                assert_eq!(tracked.received, tracked.expected);
                assert_eq!(reason, tracked.reason);
                if let Some(Transfer::Outgoing { first_block: Some(first), handed_over }) =
                    &tracked.transfer
                {
                    let total = sent(&self.groups, tracked.new.tokens.len()).len() as u32;
                    let all = handed_over.len() as u32 == total - first;
                    assert!(all || tracked.abort_received, "everything is handed over, or aborted");
                    assert_eq!(tracked.abort_received, reason.is_some());
                }
                tracked.end = Some(End::Finished);
            }
            Action::Failed { failure, .. } => {
                match &failure {
                    SequenceFailure::TransferFailed => {
                        assert_ne!(tracked.new.kind, SequenceKind::Compute);
                    }
                    SequenceFailure::Deadline => {
                        assert!(tracked.new.deadline <= self.engine.executor().now());
                    }
                    SequenceFailure::Busy { .. } => assert!(tracked.received.is_empty()),
                    failure => panic!("{id:?} failed: {failure}"),
                }
                let under_way = tracked.transfer.is_some() && !tracked.transfer_failed;
                assert!(!under_way || tracked.abort_received || tracked.received.is_empty());
                tracked.end = Some(End::Failed(failure));
            }
            Action::AbortTransfer { .. }
            | Action::Save(_)
            | Action::CancelSaves { .. }
            | Action::Load(_)
            | Action::Loaded { .. } => unreachable!("handled above"),
        }
    }

    /// Checks that handed-over blocks keep their contents until their transfer ends.
    fn check_handed_over(&self) {
        let mut kv = HashMap::new();
        for (id, tracked) in &self.sequences {
            let Some(Transfer::Outgoing { handed_over, .. }) = &tracked.transfer else { continue };
            let tokens = &tracked.new.tokens;
            let kv = kv.entry(tokens).or_insert_with(|| fingerprints(tokens));
            let entries = sent(&self.groups, tokens.len());
            for (&number, &block) in handed_over {
                let entry = entries[number as usize];
                let (expected, found) =
                    (block_after(&self.groups, entry, kv), self.arena.read(block));
                let written = expected.iter().position(|kv| *kv == 0).unwrap_or(BLOCK_TOKENS);
                assert_eq!(found[..written], expected[..written], "{id:?} entry {entry}");
            }
        }
    }
}

/// Returns the entries of the block table that a transfer of a prompt of `len` tokens sends.
fn sent(groups: &KvGroups, len: usize) -> Vec<usize> {
    groups.sent(len, 0..len.div_ceil(BLOCK_TOKENS)).collect()
}
