//! A prefill engine and a decode engine with an in-memory transfer between them, and the router's
//! part.
//!
//! Reservations, blocks and completions wait in queues until they are delivered, all at once or a
//! random part at a time.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use engine::{
    LoopOutcome, StepLoop,
    event::{Action, FinishReason, Input, NewSequence, SequenceFailure, SequenceId, SequenceKind},
    executor::{Executor, sim::SimArena},
};
use kernels::{BlockId, KvArena, sampling::SampledToken};

/// Copier of one block's contents from the prefill node's memory to the decode node's memory.
pub(crate) trait BlockCopy {
    fn copy(&self, from: BlockId, to: BlockId);
}

impl BlockCopy for (SimArena, SimArena) {
    fn copy(&self, from: BlockId, to: BlockId) {
        self.1.write(to, self.0.read(from));
    }
}

impl BlockCopy for (Arc<KvArena>, Arc<KvArena>) {
    fn copy(&self, from: BlockId, to: BlockId) {
        let from = self.0.read(from).expect("a block that was handed over is readable");
        let mut to = self.1.write(to).expect("a reserved block is writable");
        let mut bytes = vec![0; from.byte_count()];
        from.copy_to_host(&mut bytes).expect("a block's bytes");
        to.copy_from_host(&bytes).expect("equal layouts");
    }
}

/// Output of one request as the router sees it.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub tokens: Vec<SampledToken>,
    pub finish: Option<FinishReason>,
    pub failure: Option<SequenceFailure>,
    pub cached_at_prefill: u32,
    pub cached_at_decode: u32,
    pub blocks_moved: u32,
    pub left: bool,
}

impl Answer {
    pub(crate) fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }

    pub(crate) fn ended(&self) -> bool {
        self.finish.is_some() || self.failure.is_some() || self.left
    }
}

/// One transfer between the nodes, as its two ends see it.
struct Wire {
    first_block: u32,
    targets: Vec<BlockId>,
    ready_told: bool,
    /// Blocks written at the sender and not copied yet.
    to_copy: Vec<(u32, BlockId)>,
    copied: usize,
    token_0: Option<(u32, SampledToken)>,
    all_written: bool,
}

pub(crate) struct Pair<E> {
    pub prefill: StepLoop<E>,
    pub decode: StepLoop<E>,
    copy: Box<dyn BlockCopy>,
    pub answers: HashMap<SequenceId, Answer>,
    given: HashMap<SequenceId, u32>,
    wires: BTreeMap<SequenceId, Wire>,
    /// Transfers of the sender that have no receiver's reservation yet.
    expected: BTreeMap<SequenceId, ()>,
    /// Whether both schedulers are checked after every event.
    pub check: bool,
}

impl<E: Executor> Pair<E> {
    pub(crate) fn new(
        prefill: StepLoop<E>,
        decode: StepLoop<E>,
        copy: impl BlockCopy + 'static,
    ) -> Self {
        Self {
            prefill,
            decode,
            copy: Box::new(copy),
            answers: HashMap::new(),
            given: HashMap::new(),
            wires: BTreeMap::new(),
            expected: BTreeMap::new(),
            check: true,
        }
    }

    /// Submits an attempt to both nodes.
    pub(crate) fn submit(&mut self, new: NewSequence) {
        let id = new.id;
        self.answers.insert(id, Answer::default());
        self.given.insert(id, new.tokens.len() as u32 - new.prompt_len);
        self.expected.insert(id, ());
        self.tell_prefill(Input::Arrived(NewSequence { kind: SequenceKind::Send, ..new.clone() }));
        self.tell_decode(Input::Arrived(NewSequence { kind: SequenceKind::Receive, ..new }));
    }

    /// Submits an attempt to the decode node alone.
    pub(crate) fn submit_alone(&mut self, new: NewSequence) {
        let id = new.id;
        self.answers.insert(id, Answer::default());
        self.given.insert(id, new.tokens.len() as u32 - new.prompt_len);
        self.tell_decode(Input::Arrived(NewSequence { kind: SequenceKind::Compute, ..new }));
    }

    /// Cancels a request, as a client that disconnects.
    pub(crate) fn cancel(&mut self, id: SequenceId) {
        self.answers.get_mut(&id).expect("a known request").left = true;
        self.tell_prefill(Input::Abort { id });
        self.tell_decode(Input::Abort { id });
    }

    /// Runs one step at each node; returns true when neither had work.
    pub(crate) fn turn(&mut self) -> bool {
        self.turn_prefill() & self.turn_decode()
    }

    pub(crate) fn turn_prefill(&mut self) -> bool {
        let mut actions = Vec::new();
        let turn = self.prefill.turn(Duration::from_secs(60), &mut actions);
        let turn = turn.expect("every plan is sound");
        actions.into_iter().for_each(|action| self.prefill_says(action));
        turn == LoopOutcome::Idle
    }

    pub(crate) fn turn_decode(&mut self) -> bool {
        let mut actions = Vec::new();
        let turn = self.decode.turn(Duration::from_secs(60), &mut actions);
        let turn = turn.expect("every plan is sound");
        actions.into_iter().for_each(|action| self.decode_says(action));
        turn == LoopOutcome::Idle
    }

    /// Delivers the pending messages that `chosen` selects; returns true when there were any.
    pub(crate) fn deliver(&mut self, mut chosen: impl FnMut() -> bool) -> bool {
        let mut any = false;
        for id in self.wires.keys().copied().collect::<Vec<_>>() {
            if chosen() {
                any |= self.deliver_ready(id);
            }
            if chosen() {
                any |= self.deliver_block(id);
            }
            if chosen() {
                any |= self.complete(id);
            }
        }
        any
    }

    /// Runs until every request has ended and both nodes are idle.
    pub(crate) fn run(&mut self) {
        for _ in 0..1_000_000 {
            let moved = self.deliver(|| true);
            if self.turn() && !moved {
                let open: Vec<_> =
                    self.answers.iter().filter(|(_, answer)| !answer.ended()).collect();
                assert!(open.is_empty(), "no progress is possible; open requests: {open:?}");
                return;
            }
        }
        panic!("the pair runs without end");
    }

    /// Runs 60 rounds, each with a random part of the messages and random nodes, and then until
    /// every request has ended. `cancels`: the requests, and the round in which the client of a
    /// request disconnects.
    pub(crate) fn run_randomly(&mut self, cancels: &[(SequenceId, Option<usize>)], mut luck: u64) {
        let mut next = || {
            luck = luck
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            luck >> 33
        };
        for round in 0..60 {
            for &(id, cancelled) in cancels {
                if cancelled == Some(round) && !self.answers[&id].ended() {
                    self.cancel(id);
                }
            }
            self.deliver(|| next() % 3 == 0);
            if next() % 2 == 0 {
                self.turn_prefill();
            }
            if next() % 2 == 0 {
                self.turn_decode();
            }
        }
        self.run();
    }

    pub(crate) fn assert_all_returned(&self) {
        for node in [&self.prefill, &self.decode] {
            let load = node.scheduler().load();
            assert_eq!((load.blocks_held, load.blocks_reserved), (0, 0));
            assert!(node.scheduler().is_idle());
        }
    }

    fn deliver_ready(&mut self, id: SequenceId) -> bool {
        let Some(wire) = self.wires.get_mut(&id).filter(|wire| !wire.ready_told) else {
            return false;
        };
        wire.ready_told = true;
        let (first_block, block_count) = (wire.first_block, wire.targets.len() as u32);
        self.tell_prefill(Input::TransferReady { id, first_block, block_count });
        true
    }

    fn deliver_block(&mut self, id: SequenceId) -> bool {
        let Some(wire) = self.wires.get_mut(&id) else { return false };
        if wire.to_copy.is_empty() {
            return false;
        }
        let (index, from) = wire.to_copy.remove(0);
        self.copy.copy(from, wire.targets[(index - wire.first_block) as usize]);
        wire.copied += 1;
        true
    }

    fn complete(&mut self, id: SequenceId) -> bool {
        let Some(wire) = self.wires.get(&id) else { return false };
        if !wire.all_written || wire.copied < wire.targets.len() {
            return false;
        }
        let wire = self.wires.remove(&id).expect("looked up just now");
        self.expected.remove(&id);
        let (first_index, token) = wire.token_0.expect("token 0 came before the end");
        self.answers.get_mut(&id).expect("known").blocks_moved = wire.targets.len() as u32;
        self.tell_decode(Input::KvArrived { id, first_index, token });
        self.tell_prefill(Input::TransferEnded { id });
        true
    }

    /// Ends a transfer that either side aborted on both sides.
    fn end_transfer(&mut self, id: SequenceId) {
        let reserved = self.wires.remove(&id).is_some();
        if self.expected.remove(&id).is_some() {
            self.tell_prefill(Input::TransferEnded { id });
        }
        if reserved {
            self.tell_decode(Input::TransferEnded { id });
        }
    }

    fn tell_prefill(&mut self, input: Input) {
        let mut actions = Vec::new();
        self.prefill.handle(input, &mut actions);
        if self.check {
            self.prefill.scheduler().check();
        }
        actions.into_iter().for_each(|action| self.prefill_says(action));
    }

    fn tell_decode(&mut self, input: Input) {
        let mut actions = Vec::new();
        self.decode.handle(input, &mut actions);
        if self.check {
            self.decode.scheduler().check();
        }
        actions.into_iter().for_each(|action| self.decode_says(action));
    }

    fn prefill_says(&mut self, action: Action) {
        match action {
            Action::KvWritten { id, first_block, blocks } => {
                let wire = self.wires.get_mut(&id).expect("reserved before it was written");
                wire.to_copy.extend((first_block..).zip(blocks));
            }
            Action::Tokens { id, first_index, tokens, cached_tokens, .. } => {
                let [token] = tokens.as_slice() else { panic!("a sender brings one token") };
                if let Some(wire) = self.wires.get_mut(&id) {
                    wire.token_0 = Some((first_index, token.clone()));
                }
                self.answer(id).cached_at_prefill = cached_tokens;
                self.emit(id, first_index, tokens);
            }
            Action::Finished { id, reason } => match reason {
                None => {
                    if let Some(wire) = self.wires.get_mut(&id) {
                        wire.all_written = true;
                    }
                }
                Some(_) => {
                    self.answer(id).finish = reason;
                    self.tell_decode(Input::Abort { id });
                }
            },
            Action::Failed { id, failure } => {
                let answer = self.answer(id);
                if !answer.ended() {
                    answer.failure = Some(failure);
                    self.tell_decode(Input::Abort { id });
                }
            }
            Action::AbortTransfer { id, .. } => self.end_transfer(id),
            action => panic!("a sender says {action:?}"),
        }
    }

    fn decode_says(&mut self, action: Action) {
        match action {
            Action::Reserve { id, first_block, blocks, .. } => {
                let wire = Wire {
                    first_block,
                    targets: blocks,
                    ready_told: false,
                    to_copy: Vec::new(),
                    copied: 0,
                    token_0: None,
                    all_written: false,
                };
                self.wires.insert(id, wire);
            }
            Action::Admitted { id, cached_tokens, local_prefill } => {
                self.answer(id).cached_at_decode = cached_tokens;
                if local_prefill && self.expected.contains_key(&id) {
                    self.tell_prefill(Input::Abort { id });
                }
            }
            Action::Tokens { id, first_index, tokens, .. } => self.emit(id, first_index, tokens),
            Action::Finished { id, reason } => {
                assert!(reason.is_some());
                self.answer(id).finish = reason;
            }
            Action::Failed { id, failure } => {
                let answer = self.answer(id);
                if !answer.ended() {
                    answer.failure = Some(failure);
                    self.tell_prefill(Input::Abort { id });
                }
            }
            Action::AbortTransfer { id, .. } => self.end_transfer(id),
            action => panic!("a receiver says {action:?}"),
        }
    }

    fn answer(&mut self, id: SequenceId) -> &mut Answer {
        self.answers.get_mut(&id).expect("actions name known requests")
    }

    /// Appends tokens to the router's list: each index once; a repeated index must have an equal
    /// token.
    fn emit(&mut self, id: SequenceId, first_index: u32, tokens: Vec<SampledToken>) {
        let given = self.given[&id];
        let answer = self.answer(id);
        assert!(!answer.left, "{id:?} speaks after it was cancelled");
        for (index, token) in (first_index - given..).zip(tokens) {
            match answer.tokens.get(index as usize) {
                Some(known) => assert_eq!(*known, token, "{id:?} repeats index {index}"),
                None => {
                    assert_eq!(answer.tokens.len(), index as usize, "{id:?} skips an index");
                    answer.tokens.push(token);
                }
            }
        }
    }
}
