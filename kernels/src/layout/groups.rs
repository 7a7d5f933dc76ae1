//! KV groups: the layers of a model whose KV covers the same tokens of a sequence.
//!
//! All groups have the same number of layers, so a block has the same bytes in every group, and one
//! pool holds the blocks of all groups. With one pool for each group, memory would be divided in
//! advance, for one sequence length. A sequence's block table has one entry per group for every 16
//! tokens: entry `index · groups + group` is block `index` of a group. Entries behind the window of
//! a group are [`NO_BLOCK`].
//!
//! A sequence of a model with recurrent layers has a state, which a step replaces by the state
//! after its tokens. The state is in blocks of the same pool, and their entries come before all
//! others in the block table. The table of a sequence without
//! tokens has no entries, not even those of the state.

use std::{
    cmp::Reverse, collections::BTreeMap, fmt, iter, mem, num::NonZeroUsize, ops::Range, sync::Arc,
};

use super::{BLOCK_TOKENS, BlockId, KvLayout, StateShape};

/// Entry of a block table that has no block, because no later token attends to its tokens.
pub const NO_BLOCK: BlockId = BlockId(u32::MAX);

/// Maximum number of groups. A model that would have more gets one group without a window, because
/// many small groups make long block tables.
pub(crate) const GROUPS_MAX: usize = 16;

/// Returns the number of blocks of each group that a prefix hit of `len` tokens covers at most: the
/// last token is computed, because its logits give the next token.
pub fn hit_blocks(len: usize) -> usize {
    len.saturating_sub(1) / BLOCK_TOKENS
}

/// Layers whose KV covers the same tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct KvGroup {
    /// Indices of the model's layers, ascending.
    layers: Vec<usize>,
    /// Tokens that a token attends to, itself included; `None`: itself and all earlier tokens.
    window: Option<NonZeroUsize>,
}

/// The KV groups of a model, at least one: groups without a window, then the others by decreasing
/// window. All groups have the same number of layers. Layers are those with attention, numbered
/// from 0: layers with linear attention have no KV but a recurrent state.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KvGroups {
    groups: Arc<[KvGroup]>,
    state: Option<StateShape>,
    /// Entries of the state in a block table.
    state_entries: usize,
}

impl KvGroups {
    /// Returns the single group of a model that keeps the KV of all tokens.
    pub fn whole(layer_count: usize) -> Self {
        Self::of([KvGroup { layers: (0..layer_count).collect(), window: None }])
    }

    /// Returns the groups of layers with these windows. The number of layers of every group is the
    /// greatest common divisor of the numbers of layers with the same window.
    pub fn of_windows(windows: &[Option<NonZeroUsize>]) -> Self {
        let mut layers: BTreeMap<_, Vec<usize>> = BTreeMap::new();
        for (layer, window) in windows.iter().enumerate() {
            // A window of one token counts as no window: otherwise a transfer might have no block.
            let window = window.filter(|window| window.get() > 1);
            let place = Reverse(window.map_or(usize::MAX, NonZeroUsize::get));
            layers.entry((place, window)).or_default().push(layer);
        }
        let size = layers.values().map(Vec::len).fold(0, greatest_common_divisor);
        if size == 0 || windows.len() / size > GROUPS_MAX {
            return Self::whole(windows.len());
        }
        let groups = layers.iter().flat_map(|(&(_, window), layers)| {
            layers.chunks(size).map(move |layers| KvGroup { layers: layers.to_vec(), window })
        });
        Self::of(groups)
    }

    fn of(groups: impl IntoIterator<Item = KvGroup>) -> Self {
        Self { groups: groups.into_iter().collect(), state: None, state_entries: 0 }
    }

    /// Returns the groups of a model whose sequences have this recurrent state. `whole` is the
    /// layout with all layers with attention.
    ///
    /// # Panics
    /// As [`StateShape::block_count`] and [`Self::with_state_entries`].
    pub fn with_state(self, state: Option<StateShape>, whole: KvLayout) -> Self {
        let entries = state.map_or(0, |state| state.block_count(self.block_layout(whole)));
        Self { state, ..self.with_state_entries(entries) }
    }

    /// Returns the groups of a model whose sequences have a state of this many blocks.
    ///
    /// # Panics
    /// When a group has a window: a hit is cut to the last cached state, and there the window may
    /// need blocks that are no longer cached.
    pub fn with_state_entries(self, state_entries: usize) -> Self {
        assert!(state_entries == 0 || !self.has_windows(), "a state beside windows");
        Self { state_entries, ..self }
    }

    /// Returns the recurrent state of a sequence, in all layers with linear attention; `None`: the
    /// model has no such layers.
    pub fn state(&self) -> Option<StateShape> {
        self.state
    }

    /// Returns the number of entries at the begin of a block table that are the state.
    pub fn state_entries(&self) -> usize {
        self.state_entries
    }

    /// Splits a block table into the entries of the state and those of the KV.
    pub fn split<'a>(&self, table: &'a [BlockId]) -> (&'a [BlockId], &'a [BlockId]) {
        table.split_at(self.state_entries.min(table.len()))
    }

    /// Returns the number of groups: the entries of a block table for every 16 tokens.
    pub fn count(&self) -> usize {
        self.groups.len()
    }

    /// Returns the tokens that a token attends to in each group, itself included, if bounded.
    pub fn windows(&self) -> impl Iterator<Item = Option<NonZeroUsize>> {
        self.groups.iter().map(|group| group.window)
    }

    /// Returns the layout of a block of one group. `whole` is the layout with all layers.
    pub fn block_layout(&self, whole: KvLayout) -> KvLayout {
        KvLayout { layer_count: self.groups[0].layers.len(), ..whole }
    }

    /// Returns each layer's group, and the layer's index in the blocks of this group.
    pub fn places(&self) -> Vec<(usize, usize)> {
        let mut places = vec![(0, 0); self.groups.iter().map(|group| group.layers.len()).sum()];
        for (number, group) in self.groups.iter().enumerate() {
            for (index, &layer) in group.layers.iter().enumerate() {
                places[layer] = (number, index);
            }
        }
        places
    }

    /// Returns whether a token of some group attends to a bounded number of tokens.
    pub fn has_windows(&self) -> bool {
        self.windows().any(|window| window.is_some())
    }

    /// Returns the index of a block in its group, and the group, of an entry of a block table.
    ///
    /// # Panics
    /// When the entry is of the state.
    pub fn place(&self, entry: usize) -> (usize, usize) {
        let entry = entry.checked_sub(self.state_entries).expect("the entry is of the KV");
        (entry / self.count(), entry % self.count())
    }

    /// Returns the entries of blocks `indices` of every group.
    pub fn entries_of(&self, indices: Range<usize>) -> Range<usize> {
        let [start, end] = [indices.start, indices.end].map(|it| it * self.count());
        self.state_entries + start..self.state_entries + end
    }

    /// Returns the tokens that a token attends to in a group, itself included, if bounded.
    pub(crate) fn window(&self, group: usize) -> Option<NonZeroUsize> {
        self.groups[group].window
    }

    /// Returns the index of a group's first block to which a token at position `computed` or later
    /// attends.
    pub fn first_needed(&self, group: usize, computed: usize) -> usize {
        let window = self.window(group).map_or(usize::MAX, NonZeroUsize::get);
        (computed + 1).saturating_sub(window) / BLOCK_TOKENS
    }

    /// Returns whether a token at position `computed` or later attends to the block in this entry
    /// of a block table.
    pub(crate) fn is_needed(&self, entry: usize, computed: usize) -> bool {
        let (index, group) = self.place(entry);
        index >= self.first_needed(group, computed)
    }

    /// Returns the entries of a block table to which a token at position `computed` or later
    /// attends, among the entries of the blocks `indices` of every group.
    pub fn needed(&self, computed: usize, indices: Range<usize>) -> impl Iterator<Item = usize> {
        let (groups, entries) = (self.clone(), self.entries_of(indices));
        entries.filter(move |entry| groups.is_needed(*entry, computed))
    }

    /// Returns the entries of the block table of a prompt of `len` tokens that a prefill node sends,
    /// among the entries of the blocks `indices` of every group. The next token or an equal prompt
    /// that begins with a hit of [`hit_blocks`] attends to these entries. The state after the prompt
    /// follows its last block.
    pub fn sent(&self, len: usize, indices: Range<usize>) -> impl Iterator<Item = usize> {
        let is_whole = indices.end >= len.div_ceil(BLOCK_TOKENS);
        let state = 0..if is_whole { self.state_entries } else { 0 };
        self.needed(hit_blocks(len) * BLOCK_TOKENS, indices).chain(state)
    }

    /// Replaces by [`NO_BLOCK`] every entry to which no token at position `computed` or later
    /// attends. Calls `removed` with each removed block.
    pub fn remove_behind(
        &self,
        table: &mut [BlockId],
        computed: usize,
        mut removed: impl FnMut(BlockId),
    ) {
        for group in 0..self.count() {
            let first = self.first_needed(group, computed).min(self.blocks(table.len()));
            // All entries before an entry without a block have no block either.
            for index in (0..first).rev() {
                let entry = self.entries_of(index..index).start + group;
                match mem::replace(&mut table[entry], NO_BLOCK) {
                    NO_BLOCK => break,
                    block => removed(block),
                }
            }
        }
    }

    /// Returns the number of table entries for `tokens` tokens.
    pub fn entries(&self, tokens: usize) -> usize {
        match tokens.div_ceil(BLOCK_TOKENS) {
            0 => 0,
            blocks => self.entries_of(0..blocks).end,
        }
    }

    /// Returns the number of blocks of each group in a block table of `entries` entries.
    pub fn blocks(&self, entries: usize) -> usize {
        entries.saturating_sub(self.state_entries) / self.count()
    }

    /// Returns the number of tokens that a block table of `entries` entries covers.
    pub fn tokens(&self, entries: usize) -> usize {
        self.blocks(entries) * BLOCK_TOKENS
    }

    /// Returns the description that nodes compare during the handshake: the block layout and,
    /// unless all layers keep the KV of all tokens, the groups' windows and layers, the recurrent
    /// state, and the blocks that a prefill node [sends](Self::sent).
    pub fn describe(&self, whole: KvLayout) -> String {
        let sent = if self.has_windows() { " sent=equal-prompt" } else { "" };
        format!("{}{self}{sent}", self.block_layout(whole))
    }
}

impl Default for KvGroups {
    /// Returns the group of a model with one layer and no window.
    fn default() -> Self {
        Self::whole(1)
    }
}

/// Formats the windows of the groups, for several groups the group of each layer (base 36), and the
/// recurrent state.
impl fmt::Display for KvGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |group: &KvGroup| group.window.map_or("all".into(), |it| it.to_string());
        match &*self.groups {
            [KvGroup { window: None, .. }] => {}
            [group] => write!(f, " window={}", name(group))?,
            groups => {
                let windows: Vec<_> = groups.iter().map(name).collect();
                let digit = |(group, _)| char::from_digit(group as u32, 36).unwrap_or('?');
                let layers: String = self.places().into_iter().map(digit).collect();
                write!(f, " windows={} groups={layers}", windows.join(","))?;
            }
        }
        self.state.map_or(Ok(()), |state| write!(f, " {state}"))
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    let steps = iter::successors(Some((a, b)), |&(a, b)| (b > 0).then(|| (b, a % b)));
    steps.last().map_or(0, |(divisor, _)| divisor)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::KvFormat;

    const WHOLE: KvLayout =
        KvLayout { layer_count: 24, kv_head_count: 8, head_dim: 64, format: KvFormat::Bf16 };

    fn windows(tokens: &[usize]) -> Vec<Option<NonZeroUsize>> {
        tokens.iter().copied().map(NonZeroUsize::new).collect()
    }

    #[test]
    fn one_group_is_described_as_before() {
        let groups = KvGroups::of_windows(&[None; 24]);
        assert_eq!(groups, KvGroups::whole(24));
        assert_eq!(groups.describe(WHOLE), WHOLE.to_string());
        assert_eq!(groups.block_layout(WHOLE), WHOLE);
    }

    #[test]
    fn groups_are_described_with_windows_and_layers() {
        let same = KvGroups::of_windows(&windows(&[4096; 24]));
        assert_eq!(same.describe(WHOLE), format!("{WHOLE} window=4096 sent=equal-prompt"));
        let alternating = KvGroups::of_windows(&windows(&[128, 0].repeat(12)));
        assert_eq!(
            alternating.describe(WHOLE),
            "layers=12 halves=kv heads=8 tokens=16 dim=64 windows=all,128 \
             groups=101010101010101010101010 sent=equal-prompt"
        );
        let five_to_one = KvGroups::of_windows(&windows(&[9, 9, 9, 9, 9, 0].repeat(4)));
        assert_eq!(five_to_one.count(), 6);
        assert!(five_to_one.describe(WHOLE).contains("windows=all,9,9,9,9,9 "));
    }

    #[test]
    fn a_recurrent_state_is_described() {
        let state = StateShape {
            layer_count: 36,
            key_heads: 16,
            value_heads: 32,
            key_dim: 128,
            value_dim: 64,
            conv_taps: 3,
        };
        let groups = KvGroups::whole(24).with_state(Some(state), WHOLE);
        let described = "state=layers:36,keys:16x128,values:32x64,taps:3";
        assert_eq!(groups.describe(WHOLE), format!("{WHOLE} {described}"));
        assert_eq!((groups.state(), groups.places().len()), (Some(state), 24));
        assert_ne!(groups, KvGroups::whole(24));
    }

    /// Two groups of gpt-oss hold the KV of a running sequence in about half the memory.
    #[test]
    fn two_groups_hold_nearly_twice_the_tokens_of_one() {
        let groups = KvGroups::of_windows(&windows(&[128, 0].repeat(12)));
        for (tokens, ratio) in [(8192, 1.9), (1024, 1.7)] {
            let held = groups.needed(tokens, 0..tokens.div_ceil(BLOCK_TOKENS) + 1).count();
            let whole = (tokens.div_ceil(BLOCK_TOKENS) + 1) * groups.count();
            assert!(whole as f64 / held as f64 >= ratio, "{whole} / {held} at {tokens}");
        }
    }

    proptest! {
        /// Every layer is in one group of its window, all groups have equal sizes, and equal lists
        /// have equal descriptions.
        #[test]
        fn groups_cover_every_layer_once(
            tokens in prop::collection::vec(prop::sample::select(vec![0, 16, 40, 128]), 1..40),
            other in prop::collection::vec(prop::sample::select(vec![0, 16, 40, 128]), 1..40),
        ) {
            let groups = KvGroups::of_windows(&windows(&tokens));
            prop_assert!((1..=GROUPS_MAX).contains(&groups.count()));
            let whole = KvLayout { layer_count: tokens.len(), ..WHOLE };
            let size = groups.block_layout(whole).layer_count;
            prop_assert_eq!(size * groups.count(), tokens.len());
            let is_whole = groups == KvGroups::whole(tokens.len());
            let mut seen = vec![false; size * groups.count()];
            for (layer, &(group, index)) in groups.places().iter().enumerate() {
                prop_assert!(index < size);
                prop_assert!(!std::mem::replace(&mut seen[group * size + index], true));
                let window = groups.groups[group].window;
                prop_assert!(is_whole || window == NonZeroUsize::new(tokens[layer]));
            }
            let others = KvGroups::of_windows(&windows(&other));
            let other_whole = KvLayout { layer_count: other.len(), ..WHOLE };
            prop_assert_eq!(
                groups.describe(whole) == others.describe(other_whole),
                groups == others
            );
            prop_assert!(groups.describe(whole).len() <= 256);
        }

        /// The needed entries are exactly those to which a later token attends. After one more
        /// computed token, no other earlier entry is needed.
        #[test]
        fn needed_entries_cover_the_windows(
            tokens in prop::collection::vec(prop::sample::select(vec![0, 1, 16, 40]), 1..6),
            computed in 0_usize..200,
        ) {
            let groups = KvGroups::of_windows(&windows(&tokens));
            let blocks = computed.div_ceil(BLOCK_TOKENS);
            let needed: Vec<_> = groups.needed(computed, 0..blocks).collect();
            for position in 0..blocks * BLOCK_TOKENS {
                for (number, group) in groups.groups.iter().enumerate() {
                    let window = group.window.map_or(usize::MAX, NonZeroUsize::get);
                    let block = position / BLOCK_TOKENS;
                    let last = (block + 1) * BLOCK_TOKENS - 1;
                    let is_read = computed < last.saturating_add(window);
                    let entry = block * groups.count() + number;
                    prop_assert_eq!(needed.contains(&entry), is_read);
                }
            }
            let later: Vec<_> = groups.needed(computed + 1, 0..blocks).collect();
            prop_assert!(later.iter().all(|entry| needed.contains(entry)));
            prop_assert_eq!(groups.tokens(groups.entries(computed)), blocks * BLOCK_TOKENS);
            // A decode node has all of them, and those of the longest hit of an equal prompt.
            let sent: Vec<_> = groups.sent(computed, 0..blocks).collect();
            let hit = hit_blocks(computed);
            let of_hit: Vec<_> = groups.needed(hit * BLOCK_TOKENS, 0..hit).collect();
            prop_assert!(needed.iter().chain(&of_hit).all(|entry| sent.contains(entry)));
            prop_assert!(sent.len() <= needed.len() + groups.count());
        }
    }
}
