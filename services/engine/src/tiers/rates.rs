//! Measured times of loads and of prefill, and the choice between them.

use std::time::{Duration, Instant};

use kernels::BLOCK_TOKENS;

/// Minimum number of prefill tokens in a measured step. In a smaller step the fixed time dominates.
const PREFILL_TOKENS_MIN: u32 = 4 * BLOCK_TOKENS as u32;
/// Time after which a refused load measures its tier again. The tier may have become faster.
const PROBE_AFTER: Duration = Duration::from_secs(10);
/// Blocks of a load that only measures its tier.
const PROBE_BLOCKS: usize = 2;

/// Time of loads from one tier.
#[derive(Debug, Default)]
pub(super) struct LoadRate {
    /// Time of one block; `None` before the first load.
    block: Option<Duration>,
    /// When the last load ended.
    measured_at: Option<Instant>,
    /// Blocks of the loads in flight.
    pub pending: u32,
}

impl LoadRate {
    /// Adds a load of `blocks` blocks that took `took`.
    pub(super) fn add(&mut self, now: Instant, blocks: u32, took: Duration) {
        if let Some(block) = took.checked_div(blocks) {
            mix(&mut self.block, block);
            self.measured_at = Some(now);
        }
    }

    /// Returns the time of one block; `None` before the first load.
    pub(super) fn block_time(&self) -> Option<Duration> {
        self.block
    }

    /// Returns the predicted time until `blocks` further blocks are loaded.
    pub(super) fn time(&self, blocks: u32) -> Duration {
        // Assume 0 before the first load, which measures the time.
        self.block.unwrap_or_default() * (self.pending + blocks)
    }

    fn is_outdated(&self, now: Instant) -> bool {
        let measured = self.measured_at.map(|at| now.saturating_duration_since(at));
        self.pending == 0 && measured.is_none_or(|age| age >= PROBE_AFTER)
    }
}

/// Time of prefill.
#[derive(Debug, Default)]
pub(super) struct PrefillRate {
    token: Option<Duration>,
}

impl PrefillRate {
    /// Adds a step that computed `tokens` prefill tokens.
    pub(super) fn add(&mut self, tokens: u32, busy: Duration) {
        if tokens >= PREFILL_TOKENS_MIN {
            mix(&mut self.token, busy / tokens);
        }
    }

    /// Returns the time to compute `blocks` blocks; `None` before the first prefill.
    pub(super) fn time(&self, blocks: usize) -> Option<Duration> {
        self.token.map(|token| token * (blocks * BLOCK_TOKENS) as u32)
    }
}

/// Choice between loading and computing consecutive blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LoadChoice {
    /// Leading blocks to load.
    pub blocks: usize,
    /// Whether a load of the run was refused because computing is predicted to be faster.
    pub is_refused: bool,
}

/// Chooses how many leading blocks of `run` to load: the number that saves the most time. `run` has
/// the index of each block's tier in `rates`. Tiers load in parallel, and the load must end within
/// `most`.
pub(super) fn choose(
    now: Instant,
    run: &[usize],
    rates: &[LoadRate],
    prefill: &PrefillRate,
    most: Duration,
) -> LoadChoice {
    let mut counts = vec![0; rates.len()];
    let (mut in_time, mut load) = (0, Duration::ZERO);
    let (mut best, mut saved_max) = (0, Duration::ZERO);
    for &tier in run {
        counts[tier] += 1;
        load = load.max(rates[tier].time(counts[tier]));
        if load > most {
            break;
        }
        in_time += 1;
        // Before the first prefill, assume that every load saves time.
        match prefill.time(in_time).map(|compute| compute.saturating_sub(load)) {
            Some(saved) if saved <= saved_max => {}
            saved => (best, saved_max) = (in_time, saved.unwrap_or_default()),
        }
    }
    if best > 0 {
        return LoadChoice { blocks: best, is_refused: best < in_time };
    }
    LoadChoice { blocks: probe(now, run, rates), is_refused: true }
}

/// Returns how many leading blocks of a refused `run` to load, only to measure the tier of the
/// first block.
pub(super) fn probe(now: Instant, run: &[usize], rates: &[LoadRate]) -> usize {
    let probes = run.first().is_some_and(|&tier| rates[tier].is_outdated(now));
    if probes { run.len().min(PROBE_BLOCKS) } else { 0 }
}

/// Returns the predicted time to load all blocks of `run`.
pub(super) fn load_time(run: &[usize], rates: &[LoadRate]) -> Duration {
    let count = |tier| run.iter().filter(|of| **of == tier).count() as u32;
    let time = |(tier, rate): (usize, &LoadRate)| match count(tier) {
        0 => Duration::ZERO,
        blocks => rate.time(blocks),
    };
    rates.iter().enumerate().map(time).max().unwrap_or_default()
}

/// Adds a load of `read` blocks from each tier, fastest tier first, which took `took`. The tiers
/// loaded in parallel, so the time counts for the slowest of them, unless the other tiers may have
/// dominated it.
pub(super) fn measure<const TIERS: usize>(
    now: Instant,
    rates: &mut [LoadRate; TIERS],
    read: [u32; TIERS],
    took: Duration,
) {
    let Some(slowest) = read.iter().rposition(|&blocks| blocks > 0) else { return };
    let times =
        rates.iter().zip(read).map(|(rate, blocks)| rate.block.unwrap_or_default() * blocks);
    let others = times.take(slowest).max().unwrap_or_default();
    if took >= 2 * others {
        rates[slowest].add(now, read[slowest], took);
    }
}

/// Adds the newest value to an exponential moving average, with weight 1/4.
fn mix(mean: &mut Option<Duration>, newest: Duration) {
    *mean = Some(mean.map_or(newest, |mean| (3 * mean + newest) / 4));
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// Rates of two tiers whose blocks take these milliseconds, and of prefill.
    fn rates(now: Instant, block_ms: [u64; 2], token_us: u64) -> ([LoadRate; 2], PrefillRate) {
        let tiers = block_ms.map(|ms| {
            let mut rate = LoadRate::default();
            rate.add(now, 10, Duration::from_millis(10 * ms));
            rate
        });
        let mut prefill = PrefillRate::default();
        prefill.add(1000, Duration::from_micros(1000 * token_us));
        (tiers, prefill)
    }

    fn blocks(now: Instant, run: &[usize], rates: &([LoadRate; 2], PrefillRate)) -> usize {
        choose(now, run, &rates.0, &rates.1, LONG).blocks
    }

    #[test]
    fn load_starts_only_when_it_is_predicted_to_be_faster_than_prefill() {
        let now = Instant::now();
        // A block takes 16 × 100 µs to compute.
        assert_eq!(blocks(now, &[0; 50], &rates(now, [1, 9], 100)), 50);
        assert_eq!(blocks(now, &[0; 50], &rates(now, [2, 9], 100)), 0);
        let mut busy = rates(now, [1, 9], 100);
        busy.0[0].pending = 40;
        assert_eq!(blocks(now, &[0; 50], &busy), 0, "other loads come first");
        let unknown = ([LoadRate::default(), LoadRate::default()], PrefillRate::default());
        assert_eq!(blocks(now, &[0; 50], &unknown), 50, "nothing is measured yet");
        assert_eq!(blocks(now, &[], &unknown), 0);
    }

    #[test]
    fn slower_of_two_tiers_decides() {
        let now = Instant::now();
        let rates = rates(now, [1, 4], 100);
        assert_eq!(blocks(now, &[0, 0, 0, 1], &rates), 4, "4 ms instead of 6.4 ms");
        assert_eq!(blocks(now, &[0, 0, 1, 1], &rates), 2, "8 ms instead of 6.4 ms");
        let choice = choose(now, &[0, 0, 1, 1], &rates.0, &rates.1, LONG);
        assert_eq!(choice, LoadChoice { blocks: 2, is_refused: true }, "2 ms instead of 3.2 ms");
        assert_eq!(blocks(now, &[1, 0, 0, 0], &rates), 4, "4 ms instead of 6.4 ms");
    }

    #[test]
    fn load_from_two_tiers_measures_the_slower_one() {
        let now = Instant::now();
        let (mut tiers, _) = rates(now, [1, 8], 100);
        measure(now, &mut tiers, [10, 2], Duration::from_millis(40));
        let block_ms = |tier: &LoadRate| tier.block.unwrap().as_millis();
        assert_eq!(tiers.each_ref().map(block_ms), [1, (3 * 8 + 20) / 4]);
        // The blocks of the faster tier alone take this long.
        measure(now, &mut tiers, [20, 1], Duration::from_millis(25));
        assert_eq!(tiers.each_ref().map(block_ms), [1, 11]);
        measure(now, &mut tiers, [10, 0], Duration::from_millis(50));
        assert_eq!(tiers.each_ref().map(block_ms), [2, 11]);
        measure(now, &mut tiers, [0, 0], Duration::from_secs(1));
        assert_eq!(tiers.each_ref().map(block_ms), [2, 11]);
    }

    #[test]
    fn load_is_cut_to_the_blocks_that_arrive_in_time() {
        let now = Instant::now();
        let (mut tiers, prefill) = rates(now, [1, 9], 100);
        tiers[0].pending = 5;
        let within = |ms| choose(now, &[0; 50], &tiers, &prefill, Duration::from_millis(ms));
        assert_eq!(within(25), LoadChoice { blocks: 20, is_refused: false });
        assert_eq!(within(5), LoadChoice { blocks: 0, is_refused: true });
    }

    #[test]
    fn slow_tier_is_measured_again_after_a_while() {
        let now = Instant::now();
        let mut rates = rates(now, [50, 50], 100);
        let later = now + PROBE_AFTER;
        assert_eq!(blocks(later, &[0; 50], &rates), PROBE_BLOCKS);
        rates.0[0].pending = 1;
        assert_eq!(blocks(later, &[0; 50], &rates), 0, "one load measures");
        rates.0[0].pending = 0;
        for _ in 0..20 {
            rates.0[0].add(later, 2, Duration::from_millis(1));
        }
        assert_eq!(blocks(later, &[0; 50], &rates), 50);
    }

    #[test]
    fn short_steps_do_not_count_as_prefill() {
        let now = Instant::now();
        let mut rates = rates(now, [1, 9], 100);
        rates.1.add(PREFILL_TOKENS_MIN - 1, Duration::from_nanos(1));
        assert_eq!(blocks(now, &[0; 50], &rates), 50);
    }
}
