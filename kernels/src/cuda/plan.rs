//! Encodes a step's plan for the device: 32-bit words after a header (`baton_plan_header`).

use super::ffi::{
    PlanAdmission, PlanHeader, PlanRun, PlanSequence, RunTarget, SlotSampling, SlotState,
};
use crate::{layout::BlockId, sampling::Sampling};

/// A sequence that is admitted to a slot.
#[derive(Clone, Copy, Debug)]
pub struct Admission<'a> {
    pub slot: u32,
    /// Known token ids, each below the vocabulary size.
    pub tokens: &'a [u32],
    pub prompt_len: u32,
    /// Tokens whose KV is already in `blocks`.
    pub position: u32,
    pub blocks: &'a [BlockId],
    pub sampling: &'a Sampling,
    /// Slot of the sequence's adapter.
    pub adapter: Option<u32>,
}

/// Blocks appended to a slot's block table.
#[derive(Clone, Copy, Debug)]
pub struct Extension<'a> {
    pub slot: u32,
    /// Number of blocks in the table so far.
    pub first: u32,
    pub blocks: &'a [BlockId],
}

/// Draft tokens that a slot verifies, behind its tokens.
#[derive(Clone, Copy, Debug)]
pub struct KnownDrafts<'a> {
    pub slot: u32,
    /// Number of tokens of the slot.
    pub length: u32,
    pub tokens: &'a [u32],
}

/// One sequence of a step: `rows` tokens from the slot's position on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRows {
    pub slot: u32,
    /// Position of the slot, equal to the device's copy.
    pub position: u32,
    pub rows: u32,
    /// Number of rows that sample a token: the last ones.
    pub samples: u32,
}

impl StepRows {
    /// A padding row that belongs to no slot.
    pub(super) const FILLING: Self = Self { slot: u32::MAX, position: 0, rows: 1, samples: 1 };
}

const HEADER_WORDS: usize = size_of::<PlanHeader>() / 4;
const SEQUENCE_WORDS: usize = size_of::<PlanSequence>() / 4;
const ADMISSION_WORDS: usize = size_of::<PlanAdmission>() / 4;
const RUN_WORDS: usize = size_of::<PlanRun>() / 4;

/// Bit that marks the last token of a bad word.
const LAST_OF_WORD: u32 = 1 << 31;

/// Returns the minimum words of a plan for `slots` slots.
pub(super) fn words_min(slots: usize) -> usize {
    // Per slot, four runs of one word each: tokens, blocks, stop tokens and rules.
    HEADER_WORDS + slots * (SEQUENCE_WORDS + ADMISSION_WORDS + 4 * (RUN_WORDS + 1)) + 8
}

/// Words to be written to a slot's row in one of the pool's arrays.
struct SlotWrite {
    target: RunTarget,
    slot: u32,
    /// First place. Entries of a recurrent state are before the first block of a block table.
    first: i32,
    words: Vec<u32>,
}

/// Encodes the plans of one step, to be applied in order. The last plan has the sequences; the
/// earlier plans hold the writes that did not fit into `words_max` words. The first `state_entries`
/// blocks of a table are a recurrent state.
pub(super) fn encode(
    step_id: u32,
    admissions: &[Admission<'_>],
    extensions: &[Extension<'_>],
    drafts: &[KnownDrafts<'_>],
    sequences: &[StepRows],
    (words_max, vocabulary, state_entries): (usize, u32, usize),
) -> Vec<Vec<u32>> {
    let all_rules = admissions.iter().map(|it| Rules::new(it.sampling, vocabulary));
    let rules: Vec<Rules> = all_rules.collect();
    let admitted = admissions.iter().zip(&rules).map(|(new, rules)| admission(new, rules));
    let admitted: Vec<PlanAdmission> = admitted.collect();
    let fixed =
        HEADER_WORDS + sequences.len() * SEQUENCE_WORDS + admitted.len() * ADMISSION_WORDS + 4;
    let mut plans = Vec::new();
    let mut runs = Vec::new();
    let mut left = words_max.saturating_sub(fixed);
    let state_entries = state_entries as i32;
    for write in writes(admissions.iter().zip(rules), extensions, drafts, state_entries) {
        let (mut first, mut words) = (write.first, &write.words[..]);
        while !words.is_empty() {
            if left <= RUN_WORDS {
                plans.push(plan(step_id, &[], &[], &[], &std::mem::take(&mut runs)));
                left = words_max - fixed;
                assert!(left > RUN_WORDS, "{words_max} words hold a plan of these slots");
            }
            let (now, rest) = words.split_at(words.len().min(left - RUN_WORDS));
            left -= RUN_WORDS + now.len();
            runs.push(SlotWrite { words: now.to_vec(), first, ..write });
            (first, words) = (first + now.len() as i32, rest);
        }
    }
    plans.push(plan(step_id, sequences, drafts, &admitted, &runs));
    plans
}

fn admission(admission: &Admission<'_>, rules: &Rules) -> PlanAdmission {
    let Sampling { logprobs, prompt_logprobs, stop_token_ids, min_tokens, .. } = admission.sampling;
    let sampling = admission.sampling;
    // Stop tokens are only needed for masking them before `min_tokens`.
    let stops = if *min_tokens > 0 { stop_token_ids.len() } else { 0 };
    PlanAdmission {
        slot: admission.slot as i32,
        adapter: admission.adapter.map_or(-1, |slot| slot as i32),
        reserved: [0; 2],
        state: SlotState {
            position: admission.position as i32,
            length: admission.tokens.len() as i32,
            ..SlotState::default()
        },
        sampling: SlotSampling {
            seed: sampling.seed,
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            top_k: sampling.top_k,
            min_tokens: sampling.min_tokens,
            stop_count: stops as i32,
            logprobs: logprobs.map_or(-1, |count| count as i32),
            prompt_len: admission.prompt_len as i32,
            bias_count: rules.bias_count as u16,
            is_listed: rules.is_listed.into(),
            bad_count: rules.bad_count as i32,
            prompt_logprobs: prompt_logprobs.map_or(0, |count| 1 + count as i32),
        },
    }
}

/// A slot's row of rules: biases, bad words, and the bitmask of the only allowed tokens.
struct Rules {
    bias_count: usize,
    bad_count: usize,
    is_listed: bool,
    words: Vec<u32>,
}

impl Rules {
    fn new(sampling: &Sampling, vocabulary: u32) -> Self {
        let biases = sampling.logit_bias.iter();
        let mut words: Vec<u32> =
            biases.flat_map(|(token, bias)| [*token, bias.to_bits()]).collect();
        let bias_count = words.len() / 2;
        for word in &sampling.bad_words {
            // The output cannot contain a word with a token outside of the vocabulary.
            if word.iter().all(|token| *token < vocabulary)
                && let Some((last, begin)) = word.split_last()
            {
                words.extend(begin);
                words.push(last | LAST_OF_WORD);
            }
        }
        let bad_count = words.len() - 2 * bias_count;
        let is_listed = !sampling.allowed_token_ids.is_empty();
        if is_listed {
            let mut mask = vec![0; vocabulary.div_ceil(32) as usize];
            for token in &sampling.allowed_token_ids {
                if let Some(word) = mask.get_mut(*token as usize / 32) {
                    *word |= 1 << (token % 32);
                }
            }
            words.extend(mask);
        }
        Self { bias_count, bad_count, is_listed, words }
    }
}

fn writes<'a>(
    admissions: impl Iterator<Item = (&'a Admission<'a>, Rules)> + 'a,
    extensions: &'a [Extension<'_>],
    drafts: &'a [KnownDrafts<'_>],
    state_entries: i32,
) -> impl Iterator<Item = SlotWrite> + 'a {
    let ids = |blocks: &[BlockId]| blocks.iter().map(|block| block.0).collect();
    let admitted = admissions.flat_map(move |(admission, rules)| {
        let stops = match admission.sampling.min_tokens {
            0 => Vec::new(),
            _ => admission.sampling.stop_token_ids.clone(),
        };
        [
            (RunTarget::Tokens, 0, admission.tokens.to_vec()),
            (RunTarget::Blocks, -state_entries, ids(admission.blocks)),
            (RunTarget::Stops, 0, stops),
            (RunTarget::Rules, 0, rules.words),
        ]
        .map(|(target, first, words)| SlotWrite {
            target,
            slot: admission.slot,
            first,
            words,
        })
    });
    let extended = extensions.iter().map(move |extension| SlotWrite {
        target: RunTarget::Blocks,
        slot: extension.slot,
        first: extension.first as i32 - state_entries,
        words: ids(extension.blocks),
    });
    let drafted = drafts.iter().map(|drafts| SlotWrite {
        target: RunTarget::Tokens,
        slot: drafts.slot,
        first: drafts.length as i32,
        words: drafts.tokens.to_vec(),
    });
    admitted.chain(extended).chain(drafted)
}

fn plan(
    step_id: u32,
    sequences: &[StepRows],
    drafts: &[KnownDrafts<'_>],
    admissions: &[PlanAdmission],
    runs: &[SlotWrite],
) -> Vec<u32> {
    let sequences_at = HEADER_WORDS;
    let admissions_at = (sequences_at + sequences.len() * SEQUENCE_WORDS).next_multiple_of(4);
    let runs_at = admissions_at + admissions.len() * ADMISSION_WORDS;
    let mut at = runs_at + runs.len() * RUN_WORDS;
    let word_count = at + runs.iter().map(|run| run.words.len()).sum::<usize>();
    let mut words = vec![0; word_count];
    let header = PlanHeader {
        word_count: word_count as u32,
        sequence_count: sequences.len() as u32,
        row_count: sequences.iter().map(|sequence| sequence.rows).sum(),
        sample_count: sequences.iter().map(|sequence| sequence.samples).sum(),
        admission_count: admissions.len() as u32,
        run_count: runs.len() as u32,
        sequences_at: sequences_at as u32,
        admissions_at: admissions_at as u32,
        runs_at: runs_at as u32,
        step_id,
        reserved: [0; 6],
    };
    put(&mut words[..HEADER_WORDS], &header);
    for (words, sequence) in words[sequences_at..].chunks_mut(SEQUENCE_WORDS).zip(sequences) {
        let StepRows { slot, rows, samples, .. } = *sequence;
        let (row_count, sample_count) = (rows as i32, samples as i32);
        let known = drafts.iter().find(|drafts| drafts.slot == slot);
        let drafts = known.map_or(0, |drafts| drafts.tokens.len() as i32);
        put(words, &PlanSequence { slot: slot as i32, row_count, sample_count, drafts });
    }
    for (words, admission) in words[admissions_at..].chunks_mut(ADMISSION_WORDS).zip(admissions) {
        put(words, admission);
    }
    for (index, run) in runs.iter().enumerate() {
        let count = run.words.len();
        words[at..at + count].copy_from_slice(&run.words);
        let header = PlanRun {
            target: run.target as i32,
            slot: run.slot as i32,
            first: run.first,
            count: count as i32,
            at: at as u32,
        };
        put(&mut words[runs_at + index * RUN_WORDS..][..RUN_WORDS], &header);
        at += count;
    }
    words
}

fn put<T: bytemuck::NoUninit>(words: &mut [u32], value: &T) {
    let bytes = bytemuck::bytes_of(value);
    bytemuck::cast_slice_mut::<u32, u8>(words)[..bytes.len()].copy_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes plans as the device does, into (target, slot, place, word).
    fn applied(plans: &[Vec<u32>]) -> Vec<(i32, i32, i32, u32)> {
        let mut writes = Vec::new();
        for plan in plans {
            assert_eq!(plan[0] as usize, plan.len());
            let (count, at) = (plan[5] as usize, plan[8] as usize);
            for run in plan[at..at + count * RUN_WORDS].chunks(RUN_WORDS) {
                let words = &plan[run[4] as usize..][..run[3] as usize];
                writes.extend(
                    words
                        .iter()
                        .zip(run[2] as i32..)
                        .map(|(&word, place)| (run[0] as i32, run[1] as i32, place, word)),
                );
            }
        }
        writes
    }

    #[test]
    fn plan_encodes_sequences_admissions_and_writes() {
        let blocks = [BlockId(7), BlockId(9)];
        let sampling = Sampling {
            seed: 1 << 40,
            min_tokens: 2,
            stop_token_ids: vec![5, 6],
            logprobs: Some(3),
            prompt_logprobs: Some(0),
            logit_bias: vec![(7, -1.0)],
            bad_words: vec![vec![8, 9], vec![41, 1], vec![3]],
            allowed_token_ids: vec![1, 33, 77],
            ..Sampling::greedy()
        };
        let admission = Admission {
            slot: 3,
            tokens: &[11, 12, 13],
            prompt_len: 2,
            position: 1,
            blocks: &blocks,
            sampling: &sampling,
            adapter: Some(5),
        };
        let extension = Extension { slot: 1, first: 4, blocks: &blocks[..1] };
        let sequences = [
            StepRows { slot: 3, position: 1, rows: 2, samples: 1 },
            StepRows { slot: 1, position: 64, rows: 3, samples: 3 },
        ];
        let drafts = KnownDrafts { slot: 1, length: 65, tokens: &[21, 22] };
        let plans = encode(42, &[admission], &[extension], &[drafts], &sequences, (1000, 40, 0));
        let [plan] = &plans[..] else { panic!("{} plans", plans.len()) };
        assert_eq!(plan[..10], [plan.len() as u32, 2, 5, 4, 1, 6, 16, 24, 48, 42]);
        assert_eq!(plan[16..24], [3, 2, 1, 0, 1, 3, 3, 2]);
        let occupant: PlanAdmission =
            bytemuck::pod_read_unaligned(bytemuck::cast_slice(&plan[24..48]));
        assert_eq!((occupant.slot, occupant.state.position, occupant.state.length), (3, 1, 3));
        assert_eq!(occupant.adapter, 5);
        assert_eq!((occupant.sampling.seed, occupant.sampling.logprobs), (1 << 40, 3));
        assert_eq!((occupant.sampling.stop_count, occupant.sampling.prompt_len), (2, 2));
        let SlotSampling { bias_count, bad_count, is_listed, prompt_logprobs, .. } =
            occupant.sampling;
        assert_eq!((bias_count, bad_count, is_listed, prompt_logprobs), (1, 3, 1, 1));
        let tokens = [(0, 3, 0, 11), (0, 3, 1, 12), (0, 3, 2, 13)];
        let lists = [(1, 3, 0, 7), (1, 3, 1, 9), (2, 3, 0, 5), (2, 3, 1, 6)];
        let words = [7, (-1_f32).to_bits(), 8, 9 | LAST_OF_WORD, 3 | LAST_OF_WORD, 2, 2];
        let rules = (0..).zip(words).map(|(place, word)| (3, 3, place, word));
        let rest: Vec<_> = lists.into_iter().chain(rules).chain([(1, 1, 4, 7)]).collect();
        let drafts = [(0, 1, 65, 21), (0, 1, 66, 22)];
        assert_eq!(applied(&plans), [&tokens[..], &rest[..], &drafts[..]].concat());
    }

    #[test]
    fn entries_of_a_state_are_before_the_first_block() {
        let blocks = [3, 4, 5, 6].map(BlockId);
        let sampling = Sampling::greedy();
        let admission = Admission {
            slot: 2,
            tokens: &[],
            prompt_len: 0,
            position: 0,
            blocks: &blocks,
            sampling: &sampling,
            adapter: None,
        };
        let extension = Extension { slot: 2, first: 4, blocks: &blocks[..1] };
        let plans = encode(1, &[admission], &[extension], &[], &[], (1000, 40, 3));
        let places: Vec<_> = applied(&plans).into_iter().map(|(.., at, id)| (at, id)).collect();
        assert_eq!(places, [(-3, 3), (-2, 4), (-1, 5), (0, 6), (1, 3)]);
    }

    #[test]
    fn oversized_plan_is_split_before_the_sequences() {
        let tokens: Vec<u32> = (0..1000).collect();
        let blocks: Vec<BlockId> = (0..63).map(BlockId).collect();
        let sampling = Sampling::greedy();
        let (prompt_len, position) = (1000, 0);
        let occupant = Admission {
            slot: 0,
            tokens: &tokens,
            prompt_len,
            position,
            blocks: &blocks,
            sampling: &sampling,
            adapter: None,
        };
        let occupants = [occupant, Admission { slot: 1, ..occupant }];
        let sequences = [StepRows { slot: 1, position: 0, rows: 8, samples: 0 }];
        let whole = applied(&encode(1, &occupants, &[], &[], &sequences, (1 << 20, 40, 0)));
        assert_eq!(whole.len(), 2 * 1063);
        for words_max in [words_min(2), 200, 777] {
            let plans = encode(1, &occupants, &[], &[], &sequences, (words_max, 40, 0));
            assert!(plans.len() > 1 && plans.iter().all(|plan| plan.len() <= words_max));
            assert_eq!(applied(&plans), whole);
            let (last, before) = plans.split_last().unwrap();
            assert_eq!(last[1..5], [1, 8, 0, 2]);
            assert!(before.iter().all(|plan| plan[1..5] == [0; 4]));
        }
    }
}
