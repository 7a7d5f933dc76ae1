//! Sampling by the ranks of a group, each of which has the logits of its tokens alone. All of them
//! come to the same token, and it is the one that [`super::sample`] takes from the whole row.
//!
//! 1. Everybody says what its greatest logits are, raw and after penalties and masks. That decides
//!    greedy rows, and gives all others the best logit that probabilities are relative to.
//! 2. Rows that draw: without top-k and top-p, each rank says who of its tokens arrives first, for a
//!    draw needs no more than weights relative to the best. With them it tells its most likely
//!    tokens, and the sums of its runs of 1,024 tokens where a share of all is asked for: added in
//!    order, they are the sum over the row to the bit. Log-probabilities take the same sums.
//! 3. What cannot be decided so is decided from the row: its logits are gathered, and everybody
//!    samples it whole. Those are rows whose top-k or top-p reaches beyond the tokens told, or that
//!    ask for more than so many, and sums over a vocabulary too small to be cut between runs. They
//!    are counted.
//!
//! What a row sends depends on its sampling and the vocabulary alone, so everybody knows every length.
//! How it looks is [`message`]'s.

mod message;

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

use self::message::{
    BEST_WORDS, Greatest, Told, Words, take_total, take_winner, tell_likely, tell_tokens,
    tell_total, tell_winner,
};
use super::{
    super::{
        buffer::CpuBuffer,
        collective::{Group, GroupError},
        threads::ThreadPool,
    },
    GREEDY_BELOW, RUN, SampleError, SampleRow, Scratch, draw, history, keep, logprobs, sample_with,
    weigh,
};
use crate::{
    cpu::isa::Level,
    sampling::{SampledToken, Sampling, TokenLogprobs},
    shard::{Shard, cuts_between_runs},
};

/// Most tokens of one row that a rank tells.
const TOLD_MAX: usize = 256;
/// Beyond the k-th of top-k: as likely ones stay too.
const EQUALS_MAX: usize = 8;
/// Rows whose logits are gathered in one exchange.
const ROWS_GATHERED: usize = 16;

/// Who has which tokens.
struct Slices {
    shard: Shard,
    vocabulary: usize,
    own: Range<usize>,
    /// Of any rank, tokens and runs.
    tokens_max: usize,
    runs_max: usize,
}

impl Slices {
    fn new(shard: Shard, vocabulary: usize) -> Self {
        let tokens_max = shard.all().map(|shard| shard.tokens(vocabulary).len()).max().unwrap_or(0);
        let (own, runs_max) = (shard.tokens(vocabulary), tokens_max.div_ceil(RUN));
        Self { shard, vocabulary, own, tokens_max, runs_max }
    }
}

/// How a row's token is chosen once the best is known.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Choice {
    Best,
    /// Drawn from all that min-p leaves.
    Draw,
    /// Drawn from what top-k and top-p leave of those that are told, so many of each rank.
    Among {
        told_max: usize,
        top_k: usize,
    },
    /// From the whole row.
    Whole,
}

fn choice(sampling: &Sampling, slices: &Slices) -> Choice {
    let top_k = match sampling.top_k as usize {
        k if k >= slices.vocabulary => 0,
        k => k,
    };
    let choice = if sampling.temperature < GREEDY_BELOW {
        Choice::Best
    } else if top_k == 0 && sampling.top_p >= 1.0 {
        Choice::Draw
    } else if top_k == 0 {
        Choice::Among { told_max: TOLD_MAX, top_k }
    } else {
        Choice::Among { told_max: TOLD_MAX.min(top_k + EQUALS_MAX), top_k }
    };
    let adds_up = matches!(choice, Choice::Among { top_k: 0, .. }) || sampling.logprobs.is_some();
    let asks_for_many =
        top_k > TOLD_MAX || sampling.logprobs.is_some_and(|count| count as usize > TOLD_MAX);
    match adds_up && !cuts_between_runs(slices.vocabulary, slices.shard.of()) || asks_for_many {
        true => Choice::Whole,
        false => choice,
    }
}

/// What is known of a row.
struct Row<'a> {
    asked: SampleRow<'a>,
    choice: Choice,
    /// Logits with penalties and masks, of the rank's tokens; `None` where nothing changes them.
    adjusted: Option<Vec<f32>>,
    /// The greatest logit of the whole row, raw and adjusted.
    raw_best: f32,
    best: f32,
    /// The token, once it is known, and its raw logit.
    chosen: Option<(u32, f32)>,
    /// What this rank sends next.
    message: Vec<u32>,
    outcome: Option<Result<SampledToken, SampleError>>,
}

impl<'a> Row<'a> {
    fn new(asked: SampleRow<'a>, slices: &Slices) -> Self {
        let (prompt_len, tokens) = (asked.prompt_len, asked.tokens.len());
        // Everybody sees these alike.
        let refused = match asked.sampling.validate() {
            Err(error) => Some(SampleError::from(error)),
            Ok(()) if prompt_len > tokens => Some(SampleError::BadPromptLen { prompt_len, tokens }),
            Ok(()) => None,
        };
        Self {
            asked,
            choice: choice(asked.sampling, slices),
            adjusted: None,
            raw_best: 0.0,
            best: 0.0,
            chosen: None,
            message: Vec::new(),
            outcome: refused.map(Err),
        }
    }

    fn key(&self) -> draw::Key {
        let index = self.asked.tokens.len() - self.asked.prompt_len;
        draw::Key::new(self.asked.sampling.seed, index as u64)
    }

    /// The draw is still to be made, or log-probabilities are still to be told.
    fn goes_on(&self) -> bool {
        self.outcome.is_none() && self.choice != Choice::Whole
    }
}

pub(crate) fn sample_together(
    level: Level,
    pool: &mut ThreadPool,
    scratches: &[Mutex<Scratch>],
    group: &mut Group,
    logits: &CpuBuffer,
    vocabulary: usize,
    asked: &[SampleRow<'_>],
    rows_gathered: &mut u64,
) -> Result<Vec<Result<SampledToken, SampleError>>, GroupError> {
    let slices = Slices::new(group.shard(), vocabulary);
    assert_eq!(logits.width(), slices.own.len(), "a row has the rank's tokens");
    let first = slices.own.start as u32;
    let mut rows: Vec<Row<'_>> = asked.iter().map(|&asked| Row::new(asked, &slices)).collect();
    let scratch = |thread: usize| scratches[thread].lock().unwrap_or_else(PoisonError::into_inner);

    pool.for_each_piece(&mut rows, 1, |thread, number, row| {
        tell_best(level, &mut scratch(thread), first, logits.row(number), &mut row[0]);
    });
    exchange(group, &mut rows, |row, parts| row.take_best(parts, vocabulary))?;

    if rows.iter().any(Row::goes_on) {
        pool.for_each_piece(&mut rows, 1, |thread, number, row| {
            let row = &mut row[0];
            row.message.clear();
            if row.goes_on() {
                tell_choice(level, &mut scratch(thread), &slices, logits.row(number), row);
            }
        });
        exchange(group, &mut rows, |row, parts| {
            if row.goes_on() {
                row.take_choice(parts, &slices);
            }
        })?;
    }

    let left: Vec<usize> =
        (0..rows.len()).filter(|&number| rows[number].outcome.is_none()).collect();
    for numbers in left.chunks(ROWS_GATHERED) {
        *rows_gathered += numbers.len() as u64;
        let wholes = gather_rows(group, &slices, logits, numbers)?;
        let mut drawn: Vec<Option<_>> = numbers.iter().map(|_| None).collect();
        pool.for_each_piece(&mut drawn, 1, |thread, index, drawn| {
            let (whole, row) = (&wholes[index], &asked[numbers[index]]);
            drawn[0] = Some(sample_with(level, &mut scratch(thread), whole, row));
        });
        for (&number, drawn) in numbers.iter().zip(drawn) {
            rows[number].outcome = drawn;
        }
    }
    Ok(rows.into_iter().map(|row| row.outcome.expect("every row was decided")).collect())
}

/// Sends the messages of all rows and gives each row what all ranks said of it.
fn exchange(
    group: &mut Group,
    rows: &mut [Row<'_>],
    mut take: impl FnMut(&mut Row<'_>, &[&[u32]]),
) -> Result<(), GroupError> {
    let mine: Vec<u32> = rows.iter().flat_map(|row| row.message.iter().copied()).collect();
    let mut all = vec![0_u32; group.shard().of() * mine.len()];
    group.all_gather_into(bytemuck::cast_slice(&mine), bytemuck::cast_slice_mut(&mut all))?;
    let mut begin = 0;
    for row in rows {
        let end = begin + row.message.len();
        let of = group.shard().of();
        let parts: Vec<&[u32]> =
            (0..of).map(|rank| &all[rank * mine.len()..][begin..end]).collect();
        take(row, &parts);
        begin = end;
    }
    Ok(())
}

/// The whole rows of these numbers.
fn gather_rows(
    group: &mut Group,
    slices: &Slices,
    logits: &CpuBuffer,
    numbers: &[usize],
) -> Result<Vec<Vec<f32>>, GroupError> {
    let mut mine = vec![0.0_f32; numbers.len() * slices.tokens_max];
    for (part, &number) in mine.chunks_exact_mut(slices.tokens_max).zip(numbers) {
        part[..slices.own.len()].copy_from_slice(logits.row(number));
    }
    let mut all = vec![0.0_f32; group.shard().of() * mine.len()];
    group.all_gather_into(bytemuck::cast_slice(&mine), bytemuck::cast_slice_mut(&mut all))?;
    let whole = |index: usize| {
        let part = |shard: Shard| {
            let tokens = shard.tokens(slices.vocabulary).len();
            &all[shard.rank() * mine.len() + index * slices.tokens_max..][..tokens]
        };
        slices.shard.all().flat_map(part).copied().collect()
    };
    Ok((0..numbers.len()).map(whole).collect())
}

fn tell_best(level: Level, scratch: &mut Scratch, first: u32, logits: &[f32], row: &mut Row<'_>) {
    if row.outcome.is_some() {
        return;
    }
    let SampleRow { sampling, tokens, prompt_len, allowed } = row.asked;
    let (prompt, output) = tokens.split_at(prompt_len);
    let (adjusted, counts) = (&mut scratch.logits, &mut scratch.counts);
    let is_adjusted =
        history::adjust(first, sampling, prompt, output, allowed, logits, adjusted, counts);
    let raw = Greatest::of(level, first, logits);
    let best = match is_adjusted {
        Ok(true) => {
            let best = Greatest::of(level, first, adjusted);
            row.adjusted = Some(std::mem::take(adjusted));
            best
        }
        Ok(false) => raw,
        Err(error) => {
            row.outcome = Some(Err(error));
            return;
        }
    };
    row.message.extend(raw.words());
    row.message.extend(best.words());
    let raw_logit = logits.get((best.token - first) as usize).copied();
    row.message.push(raw_logit.unwrap_or(f32::NEG_INFINITY).to_bits());
}

/// Of the whole row, and whose it is; ranks come in the order of their tokens.
fn greatest_of_all(
    parts: impl Iterator<Item = Greatest>,
    vocabulary: usize,
) -> Result<(usize, Greatest), SampleError> {
    let mut whole: Option<(usize, Greatest)> = None;
    for (rank, part) in parts.enumerate() {
        if let Some((token, value)) = part.bad {
            return Err(SampleError::BadLogit { token, value });
        }
        if whole.is_none_or(|(_, best)| part.logit > best.logit) {
            whole = Some((rank, part));
        }
    }
    let whole = whole.filter(|(_, best)| best.logit != f32::NEG_INFINITY);
    whole.ok_or(SampleError::NoCandidate { vocabulary })
}

impl Row<'_> {
    fn take_best(&mut self, parts: &[&[u32]], vocabulary: usize) {
        if self.outcome.is_some() {
            return;
        }
        let raw = parts.iter().map(|part| Greatest::read(&part[..Greatest::WORDS]));
        let best = parts.iter().map(|part| Greatest::read(&part[Greatest::WORDS..BEST_WORDS - 1]));
        let found = greatest_of_all(raw, vocabulary)
            .and_then(|(_, raw)| Ok((raw, greatest_of_all(best, vocabulary)?)));
        match found {
            Err(error) => self.outcome = Some(Err(error)),
            Ok((raw, (rank, best))) => {
                (self.raw_best, self.best) = (raw.logit, best.logit);
                if self.choice == Choice::Best {
                    let raw_logit = f32::from_bits(parts[rank][BEST_WORDS - 1]);
                    self.chosen = Some((best.token, raw_logit));
                }
                self.finish_without_logprobs();
            }
        }
    }

    /// A row that asks for no more than its token is done once it is chosen.
    fn finish_without_logprobs(&mut self) {
        if let (Some((id, _)), None) = (self.chosen, self.asked.sampling.logprobs) {
            self.outcome = Some(Ok(SampledToken { id, logprobs: None }));
        }
    }

    fn take_choice(&mut self, parts: &[&[u32]], slices: &Slices) {
        let mut parts: Vec<Words<'_>> = parts.iter().map(|&words| Words(words)).collect();
        match self.choice {
            Choice::Best => {}
            Choice::Draw => self.chosen = take_winner(&mut parts),
            Choice::Among { told_max, top_k } => {
                let told: Vec<Told> =
                    parts.iter_mut().map(|part| Told::read(part, told_max)).collect();
                let whole = (top_k == 0).then(|| take_total(&mut parts, slices.runs_max));
                let key = self.key();
                self.chosen = kept(&told, top_k, self.asked.sampling.top_p, whole).map(|kept| {
                    let id = draw::among(key, &kept);
                    (id, told.iter().find_map(|told| told.logit_of(id)).expect("it was told"))
                });
            }
            Choice::Whole => unreachable!("it does not go on"),
        }
        let Some((id, logit)) = self.chosen else {
            // Too few were told: its row is gathered.
            return;
        };
        let logprobs = self.asked.sampling.logprobs.map(|count| {
            let log_total = take_total(&mut parts, slices.runs_max).ln();
            let count = count as usize;
            let best: Vec<(u32, f32)> = parts
                .iter_mut()
                .flat_map(|part| part.tokens(count.min(slices.vocabulary)))
                .collect();
            let logprob = |logit| logprobs::of_logit(logit, self.raw_best, log_total);
            let top = logprobs::best_of(best, count);
            TokenLogprobs {
                chosen: logprob(logit),
                top: top.into_iter().map(|(id, logit)| (id, logprob(logit))).collect(),
            }
        });
        self.outcome = Some(Ok(SampledToken { id, logprobs }));
    }
}

fn tell_choice(
    level: Level,
    scratch: &mut Scratch,
    slices: &Slices,
    raw: &[f32],
    row: &mut Row<'_>,
) {
    let (first, key, sampling) = (slices.own.start as u32, row.key(), row.asked.sampling);
    let logit_of = |id: u32| raw[(id - first) as usize];
    let weights = &mut scratch.probabilities;
    let message = &mut row.message;
    if row.choice != Choice::Best {
        weights.resize(raw.len(), 0.0);
        let adjusted = row.adjusted.as_deref().unwrap_or(raw);
        weigh(level, adjusted, row.best, sampling.temperature, weights);
    }
    match row.choice {
        Choice::Best => {}
        Choice::Draw => {
            let winner = if sampling.min_p <= 0.0 {
                // Beginning with a likely one is quicker; any brings the same.
                let likely = Greatest::of(level, 0, weights).token;
                draw::first_of(level, key, first, likely, weights)
            } else {
                let mut kept = Vec::new();
                keep::gather(level, weights, sampling.min_p, &mut kept);
                let kept: Vec<_> = kept
                    .into_iter()
                    .map(|token| (first + keep::id(token), keep::weight(token)))
                    .collect();
                draw::first_among(key, &kept)
            };
            let logit = match winner == draw::Winner::NOBODY {
                true => 0.0,
                false => logit_of(winner.token),
            };
            tell_winner(winner, logit, message);
        }
        Choice::Among { told_max, top_k } => {
            tell_likely(level, weights, sampling.min_p, told_max, first, raw, message);
            if top_k == 0 {
                tell_total(level, weights, sampling.min_p, slices.runs_max, message);
            }
        }
        Choice::Whole => unreachable!("it does not go on"),
    }
    if let Some(count) = sampling.logprobs {
        weights.resize(raw.len(), 0.0);
        weigh(level, raw, row.raw_best, 1.0, weights);
        tell_total(level, weights, 0.0, slices.runs_max, message);
        let wanted = (count as usize).min(slices.vocabulary);
        let best = logprobs::top_ids(raw, wanted as u32).into_iter();
        tell_tokens(wanted, best.map(|id| (first + id, raw[id as usize])), message);
    }
}

/// The tokens that top-k and top-p leave, by the rules of [`keep`]; `None` when tokens that were not
/// told might be among them. `whole` is what top-p is a share of where there is no top-k.
fn kept(told: &[Told], top_k: usize, top_p: f32, whole: Option<f64>) -> Option<Vec<(u32, f32)>> {
    let mut tokens: Vec<keep::Ranked> =
        told.iter().flat_map(|told| told.tokens.iter().map(|(token, _)| *token)).collect();
    tokens.sort_unstable();
    // Behind the last that a rank told there may be others of its tokens.
    let known_to = |told: &Told| match (told.is_all, told.tokens.last()) {
        (true, _) => keep::Ranked::MAX,
        (false, Some((last, _))) => *last,
        (false, None) => 0,
    };
    let known_to = told.iter().map(known_to).min().expect("a group has ranks");
    let is_all = known_to == keep::Ranked::MAX;
    tokens.truncate(tokens.partition_point(|token| *token <= known_to));
    if top_k > 0 {
        match tokens.get(top_k - 1).map(|last| keep::weight(*last)) {
            Some(last) => {
                let kept = tokens.partition_point(|token| keep::weight(*token) >= last);
                // As likely ones might follow.
                if kept == tokens.len() && !is_all {
                    return None;
                }
                tokens.truncate(kept);
            }
            None if is_all => {}
            None => return None,
        }
    }
    if top_p < 1.0 {
        let all = || tokens.iter().map(|&token| f64::from(keep::weight(token))).sum();
        let whole = whole.unwrap_or_else(all);
        match keep::reaching(&tokens, f64::from(top_p) * whole) {
            Some(count) => tokens.truncate(count),
            None if is_all || top_k > 0 => {}
            None => return None,
        }
    }
    (!tokens.is_empty())
        .then(|| tokens.into_iter().map(|token| (keep::id(token), keep::weight(token))).collect())
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use proptest::prelude::*;

    use super::{super::run_totals, *};
    use crate::{
        backend::Backend,
        cpu::{
            CpuBackend, CpuOptions, Isa, sample,
            testing::{bits, numbers, region},
        },
        layout::WeightFormat,
        sampling::TokenMask,
    };

    type Outcome = Result<SampledToken, SampleError>;

    /// What each rank of `of` brings for rows of whole logits, and how many it gathered.
    fn together(of: usize, rows: &[(Vec<f32>, SampleRow<'_>)]) -> Vec<(Vec<Outcome>, u64)> {
        let vocabulary = rows[0].0.len();
        let region = region(Group::region_bytes(of));
        thread::scope(|scope| {
            let ranks: Vec<_> = Shard::new(0, of)
                .unwrap()
                .all()
                .map(|shard| {
                    let region = &region;
                    scope.spawn(move || {
                        let weights = WeightFormat::F32;
                        let options = CpuOptions { weights, threads: 1, isa: Isa::Auto };
                        let group = Group::new(region, 0, shard, Duration::from_secs(60));
                        let mut backend = CpuBackend::new(options).unwrap().in_group(group);
                        let own = shard.tokens(vocabulary);
                        let mut logits = backend.buffer(rows.len(), own.len());
                        let parts = logits.rows_mut(rows.len()).chunks_exact_mut(own.len());
                        for (part, (logits, _)) in parts.zip(rows) {
                            part.copy_from_slice(&logits[own.clone()]);
                        }
                        let asked: Vec<_> = rows.iter().map(|(_, row)| *row).collect();
                        let outcomes = backend.sample_together(&logits, vocabulary, &asked);
                        (outcomes.unwrap(), backend.rows_gathered())
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// To the bit; errors too.
    fn is_same(a: &Outcome, b: &Outcome) -> bool {
        let parts = |outcome: &Outcome| match outcome {
            Ok(SampledToken { id, logprobs }) => {
                let logprobs = logprobs.as_ref().map(|TokenLogprobs { chosen, top }| {
                    let top: Vec<_> = top.iter().map(|(id, p)| (*id, p.to_bits())).collect();
                    (chosen.to_bits(), top)
                });
                Ok((*id, logprobs))
            }
            Err(SampleError::BadLogit { token, value }) => Err((*token, value.to_bits())),
            Err(error) => Err((u32::MAX, error.to_string().len() as u32)),
        };
        parts(a) == parts(b)
    }

    /// All ranks agree with each other and with the whole row.
    fn check(of: usize, rows: &[(Vec<f32>, SampleRow<'_>)]) -> u64 {
        let expected: Vec<Outcome> = rows.iter().map(|(logits, row)| sample(logits, row)).collect();
        let ranks = together(of, rows);
        for (rank, (found, gathered)) in ranks.iter().enumerate() {
            assert_eq!(*gathered, ranks[0].1);
            for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let sampling = rows[number].1.sampling;
                assert!(
                    is_same(found, expected),
                    "rank {rank} of {of}, row {number} ({sampling:?}): {found:?}, {expected:?}"
                );
            }
        }
        ranks[0].1
    }

    /// As models have them: few are likely, with some equals.
    fn model_logits(seed: u32, vocabulary: usize) -> Vec<f32> {
        let mut logits: Vec<f32> = numbers(seed, vocabulary)
            .into_iter()
            .map(|x| (x * x * x * 14.0 * 8.0).round() / 8.0)
            .collect();
        for (at, spike) in [(7, 21.0), (911, 20.5), (4000, 20.5), (8191, 19.0), (9000, 21.0)] {
            if let Some(logit) = logits.get_mut((at + seed as usize * 13) % vocabulary) {
                *logit = spike;
            }
        }
        logits
    }

    fn warm(seed: u64) -> Sampling {
        Sampling { temperature: 0.9, seed, ..Sampling::greedy() }
    }

    /// Each kind of row, in one batch: a large vocabulary, cut between runs, and small ones.
    #[test]
    fn every_rule_brings_what_the_whole_row_brings_and_mostly_without_it() {
        let samplings: Vec<Sampling> = (0..6)
            .flat_map(|seed| {
                [
                    Sampling { seed, ..Sampling::greedy() },
                    Sampling { logprobs: Some(5), ..Sampling::greedy() },
                    Sampling { repetition_penalty: 1.7, ..Sampling::greedy() },
                    warm(seed),
                    Sampling { min_p: 0.05, ..warm(seed) },
                    Sampling { top_k: 20, ..warm(seed) },
                    Sampling { top_p: 0.9, ..warm(seed) },
                    Sampling { top_p: 0.9, min_p: 0.02, logprobs: Some(0), ..warm(seed) },
                    Sampling { top_k: 50, top_p: 0.8, logprobs: Some(20), ..warm(seed) },
                    Sampling {
                        stop_token_ids: vec![7, 911, 1_000_000],
                        min_tokens: 9,
                        presence_penalty: 0.5,
                        frequency_penalty: 0.25,
                        top_k: 3,
                        ..warm(seed)
                    },
                ]
            })
            .collect();
        let tokens: Vec<u32> = (0..40).map(|i| i * 257 % 9000).collect();
        for (of, vocabulary) in [(2, 32_768), (3, 49_152), (4, 33_333), (2, 97), (4, 1000), (3, 3)]
        {
            let mask = TokenMask::new(
                (0..vocabulary as u32).map(|i| 0x9e37_79b9_u32.rotate_left(i)).collect(),
                vocabulary as u32,
            );
            let rows: Vec<_> = (0..)
                .zip(&samplings)
                .map(|(number, sampling)| {
                    let allowed = (number % 4 == 3).then_some(&mask);
                    let row = SampleRow { sampling, tokens: &tokens, prompt_len: 33, allowed };
                    (model_logits(number, vocabulary), row)
                })
                .collect();
            let gathered = check(of, &rows);
            if vocabulary > 20_000 {
                // Where a mask leaves none but many equals.
                assert!(gathered * 10 <= rows.len() as u64, "{of} ranks: {gathered}");
            }
        }
    }

    #[test]
    fn what_reaches_beyond_the_tokens_told_is_taken_from_the_row() {
        let flat: Vec<f32> = numbers(5, 40_000);
        let equal = vec![1.0; 40_000];
        let wide = Sampling { top_p: 0.99, temperature: 2.0, ..warm(3) };
        let many = Sampling { top_k: 300, ..warm(4) };
        let equals = Sampling { top_k: 5, ..warm(5) };
        let all = Sampling { top_k: 40_000, top_p: 1.0, ..warm(6) };
        let told = Sampling { logprobs: Some(300), ..Sampling::greedy() };
        let row = |sampling| SampleRow { sampling, tokens: &[1], prompt_len: 1, allowed: None };
        let rows = [
            (flat.clone(), row(&wide)),
            (flat.clone(), row(&many)),
            (equal, row(&equals)),
            // Told tokens are enough:
            (flat.clone(), row(&all)),
            (flat.clone(), row(&told)),
            (flat, row(&equals)),
        ];
        assert_eq!(check(2, &rows), 4);
        assert_eq!(check(4, &rows), 4);
    }

    #[test]
    fn nonsense_and_nothing_are_the_errors_of_the_whole_row() {
        let greedy = Sampling::greedy();
        let drawn = Sampling { logprobs: Some(2), top_k: 4, ..warm(1) };
        let bad = Sampling { top_p: 7.0, ..warm(1) };
        let beyond = Sampling { repetition_penalty: f32::MIN_POSITIVE, ..Sampling::greedy() };
        let nothing = TokenMask::new(vec![], 20_000);
        let mut rows = Vec::new();
        for sampling in [&greedy, &drawn, &bad, &beyond] {
            for (at, value) in [(3, f32::NAN), (19_999, f32::INFINITY), (9000, -f32::NAN)] {
                let mut logits = model_logits(1, 20_000);
                logits[15_000] = f32::NEG_INFINITY;
                logits[at] = value;
                let row = SampleRow { sampling, tokens: &[8000], prompt_len: 0, allowed: None };
                rows.push((logits, row));
            }
            let row = SampleRow { sampling, tokens: &[8000], prompt_len: 0, allowed: None };
            rows.push((model_logits(2, 20_000), row));
            rows.push((model_logits(2, 20_000), SampleRow { prompt_len: 2, ..row }));
            rows.push((model_logits(2, 20_000), SampleRow { allowed: Some(&nothing), ..row }));
            rows.push((vec![f32::NEG_INFINITY; 20_000], row));
        }
        check(2, &rows);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

        #[test]
        fn any_sampling_over_any_ranks_is_that_of_the_whole_row(
            of in 1..=4_usize,
            vocabulary in prop_oneof![4..200_usize, Just(32_768), 32_769..60_000_usize],
            seed in any::<u32>(),
            scale in prop_oneof![Just(0.01_f32), Just(1.0), Just(12.0)],
            temperature in prop_oneof![Just(0.0_f32), Just(0.7), Just(1.5)],
            top_k in prop_oneof![Just(0_u32), 1..12_u32, 200..300_u32],
            top_p in prop_oneof![Just(1.0_f32), 0.05..1.0_f32],
            min_p in prop_oneof![Just(0.0_f32), 0.0..0.3_f32],
            repetition_penalty in prop_oneof![Just(1.0_f32), Just(1.3)],
            logprobs in prop_oneof![Just(None), Just(Some(0)), Just(Some(7))],
            rows in 1..4_u32,
        ) {
            let sampling = Sampling {
                temperature, top_k, top_p, min_p, repetition_penalty, logprobs,
                seed: u64::from(seed), ..Sampling::greedy()
            };
            let tokens: Vec<u32> = numbers(seed, 20).iter().map(|x| x.to_bits() % 70_000).collect();
            let row = SampleRow { sampling: &sampling, tokens: &tokens, prompt_len: 11, allowed: None };
            let rows: Vec<_> = (0..rows)
                .map(|number| {
                    let logits = numbers(seed.wrapping_add(number), vocabulary);
                    // Rounded: equals abound.
                    (logits.iter().map(|x| (x * scale * 64.0).round() / 64.0).collect(), row)
                })
                .collect();
            check(of, &rows);
        }
    }

    #[test]
    fn the_sum_of_the_runs_is_the_sum() {
        let weights: Vec<f32> = numbers(1, 10_000).iter().map(|x| x.abs()).collect();
        let level = Level::find(Isa::Auto).unwrap();
        for floor in [0.0, 0.3] {
            let runs = run_totals(level, &weights, floor);
            let sum = runs.iter().fold(0.0, |sum, &run| sum + f64::from(run));
            assert_eq!(sum, super::super::total(level, &weights, floor));
            // Cut between runs, the parts have the same.
            let (a, b) = weights.split_at(3 * RUN);
            let parts = [run_totals(level, a, floor), run_totals(level, b, floor)].concat();
            assert_eq!(bits(&parts), bits(&runs));
        }
    }
}
