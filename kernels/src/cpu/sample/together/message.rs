//! What ranks tell each other of their parts of a row: words, as one rank writes them and all read them.

use std::iter;

use super::super::{draw, keep, look_over, run_totals};
use crate::cpu::isa::Level;

/// A rank's greatest logit of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Greatest {
    pub token: u32,
    pub logit: f32,
    /// The first that is NaN or +∞.
    pub bad: Option<(u32, f32)>,
}

impl Greatest {
    pub const WORDS: usize = 4;

    /// Of the tokens from `first` on.
    pub fn of(level: Level, first: u32, logits: &[f32]) -> Self {
        let (logit, is_bad) = look_over(level, logits);
        let find = |is_it: &dyn Fn(f32) -> bool| {
            let found = logits.iter().position(|&value| is_it(value))?;
            Some((first + found as u32, logits[found]))
        };
        let bad = is_bad.then(|| find(&|value| value.is_nan() || value == f32::INFINITY)).flatten();
        let token = find(&|value| value == logit).map_or(first, |(token, _)| token);
        Self { token, logit, bad }
    }

    pub fn words(self) -> [u32; Self::WORDS] {
        let (bad_token, bad) = self.bad.unwrap_or((u32::MAX, 0.0));
        [self.token, self.logit.to_bits(), bad_token, bad.to_bits()]
    }

    pub fn read(words: &[u32]) -> Self {
        let [token, logit, bad_token, bad] = words[..] else { unreachable!("as many as written") };
        let bad = (bad_token != u32::MAX).then_some((bad_token, f32::from_bits(bad)));
        Self { token, logit: f32::from_bits(logit), bad }
    }
}

/// Raw and adjusted, and the raw logit of the token that is best after adjusting.
pub(super) const BEST_WORDS: usize = 2 * Greatest::WORDS + 1;

/// A message being read.
pub(super) struct Words<'a>(pub &'a [u32]);

impl<'a> Words<'a> {
    pub fn take(&mut self, count: usize) -> &'a [u32] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    /// Tokens with their logits, in the room of so many.
    pub fn tokens(&mut self, count: usize) -> Vec<(u32, f32)> {
        let words = self.take(2 * count).as_chunks::<2>().0.iter();
        let tokens = words.map(|&[id, logit]| (id, f32::from_bits(logit)));
        tokens.filter(|&(id, _)| id != u32::MAX).collect()
    }
}

/// Who arrives first of the rank's tokens, with its raw logit.
pub(super) fn tell_winner(winner: draw::Winner, logit: f32, message: &mut Vec<u32>) {
    let arrival = winner.arrival.to_bits();
    message.extend([arrival as u32, (arrival >> 32) as u32, winner.token, logit.to_bits()]);
}

/// Who arrives first of all ranks' tokens.
pub(super) fn take_winner(parts: &mut [Words<'_>]) -> Option<(u32, f32)> {
    let mut winner = draw::Winner::NOBODY;
    let mut logit = 0.0;
    for part in parts {
        let [low, high, token, bits] = part.take(4)[..] else { unreachable!("four words") };
        let before = winner;
        winner.meet(token, f64::from_bits(u64::from(high) << 32 | u64::from(low)));
        if winner != before {
            logit = f32::from_bits(bits);
        }
    }
    (winner != draw::Winner::NOBODY).then_some((winner.token, logit))
}

/// The sums of the rank's runs, as many as any rank has: one that is missing adds nothing.
pub(super) fn tell_total(
    level: Level,
    weights: &[f32],
    floor: f32,
    runs_max: usize,
    message: &mut Vec<u32>,
) {
    let totals = run_totals(level, weights, floor);
    let missing = runs_max - totals.len();
    message.extend(totals.into_iter().map(f32::to_bits));
    message.extend(iter::repeat_n(0, missing));
}

/// The sum over the whole row, added up as `total` does.
pub(super) fn take_total(parts: &mut [Words<'_>], runs_max: usize) -> f64 {
    let runs = parts.iter_mut().flat_map(|part| part.take(runs_max));
    runs.fold(0.0, |total, &run| total + f64::from(f32::from_bits(run)))
}

/// So many of the rank's tokens with their raw logits; where it has fewer, the room of the others.
pub(super) fn tell_tokens(
    count: usize,
    tokens: impl Iterator<Item = (u32, f32)>,
    message: &mut Vec<u32>,
) {
    let nobody = iter::repeat((u32::MAX, 0.0));
    let tokens = tokens.chain(nobody).take(count);
    message.extend(tokens.flat_map(|(id, logit)| [id, logit.to_bits()]));
}

/// The most likely of the rank's tokens: how many, whether that is all, then each with its weight and
/// its raw logit, in the room of `told_max`.
pub(super) fn tell_likely(
    level: Level,
    weights: &[f32],
    min_p: f32,
    told_max: usize,
    first: u32,
    raw: &[f32],
    message: &mut Vec<u32>,
) {
    let mut likely = Vec::new();
    let mut is_all = false;
    for cut in keep::CUTS {
        let cut = cut.max(min_p);
        keep::gather(level, weights, cut, &mut likely);
        is_all = cut <= min_p && likely.len() <= told_max;
        if likely.len() >= told_max || cut <= min_p {
            break;
        }
    }
    if likely.len() > told_max {
        likely.select_nth_unstable(told_max - 1);
        likely.truncate(told_max);
    }
    likely.sort_unstable();
    message.push(likely.len() as u32 | u32::from(is_all) << 31);
    for &token in &likely {
        let (id, weight) = (keep::id(token), keep::weight(token));
        message.extend([first + id, weight.to_bits(), raw[id as usize].to_bits()]);
    }
    message.extend(iter::repeat_n(0, 3 * (told_max - likely.len())));
}

/// What a rank has told of its tokens.
pub(super) struct Told {
    pub is_all: bool,
    /// Most likely first, with their raw logits.
    pub tokens: Vec<(keep::Ranked, f32)>,
}

impl Told {
    pub fn read(part: &mut Words<'_>, told_max: usize) -> Self {
        let count = part.take(1)[0];
        let words = part.take(3 * told_max);
        let count_told = (count & (u32::MAX >> 1)) as usize;
        let tokens =
            words.as_chunks::<3>().0.iter().take(count_told).map(|&[id, weight, logit]| {
                (keep::ranked(id, f32::from_bits(weight)), f32::from_bits(logit))
            });
        Self { is_all: count >> 31 == 1, tokens: tokens.collect() }
    }

    pub fn logit_of(&self, id: u32) -> Option<f32> {
        self.tokens.iter().find(|(token, _)| keep::id(*token) == id).map(|(_, logit)| *logit)
    }
}
