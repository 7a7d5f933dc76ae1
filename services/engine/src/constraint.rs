//! Grammar-constrained decoding, as the scheduler sees it.
//!
//! The token bitmask of a position depends on the previous token, which the host reads while the
//! next forward pass already runs. So a constrained row takes part in every forward pass, and only
//! the step's sampling waits for the bitmasks:
//!
//! 1. The scheduler collects a step and gives each sampled token to its [`Constraint`].
//! 2. Worker threads run the [`MaskJob`]s of the constrained rows.
//! 3. The step loop supplies the step in flight with the bitmasks, and the device samples.
//!
//! With speculative decoding a job also finds draft tokens of its row and computes the bitmask
//! after each. The grammar forces some draft tokens, and n-grams propose others. A later step
//! verifies them. While a step is in flight, the first draft token predicts the token that the step
//! samples.
//!
//! A row whose bitmask is late does not sample in this step. It computes its last token again in a
//! later step, when its bitmask is computed, so its output is the same. Late bitmasks delay no
//! other row: sampling starts when the forward pass has finished.
//!
//! The caller that creates a constraint compiles the grammar and computes the first bitmask. A
//! constraint fails closed: the scheduler ends a sequence whose constraint fails, and an executor
//! never samples a constrained row without a bitmask.

use std::{
    collections::VecDeque,
    fmt::Debug,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

use kernels::sampling::TokenMask;

use crate::{
    event::SequenceId,
    executor::{Speculation, ngram, panic_message},
};

/// Matcher of one answer.
pub trait Matcher: Debug + Send {
    /// Consumes the sampled token. The scheduler calls it between steps, so it must take
    /// microseconds only.
    fn accept(&mut self, token: u32) -> Result<(), ConstraintFailure>;

    /// Computes the bitmask of the next token, on a worker thread. It includes the stop tokens if
    /// the answer may end here.
    fn allowed(&mut self) -> Result<TokenMask, ConstraintFailure>;

    /// Returns whether no token can follow, so that the answer ends without a stop token.
    fn is_complete(&self) -> bool;

    /// Returns tokens for the text that the grammar forces next. They become draft tokens, so the
    /// model may sample other tokens for this text.
    fn forced(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Returns a copy, which a worker thread advances along draft tokens.
    fn boxed_clone(&self) -> Box<dyn Matcher>;
}

/// Time-out of the compilation of a grammar, including the wait for its start. Both nodes of a pair
/// compile the grammar.
pub const COMPILE_TIMEOUT: Duration = Duration::from_secs(10);

/// Reason why a constrained sequence has no next token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintFailure {
    /// The grammar exceeds its time or memory bound, here and on every other node.
    #[error("{reason}")]
    TooComplex { reason: String },
    /// The grammar does not allow the sampled token, or the matcher panicked: a bug.
    #[error("{reason}")]
    Broken { reason: String },
}

impl Clone for Box<dyn Matcher> {
    fn clone(&self) -> Self {
        self.boxed_clone()
    }
}

/// Grammar of a new sequence: a matcher and the bitmask of the next token.
#[derive(Clone, Debug)]
pub struct Constraint {
    matcher: Box<dyn Matcher>,
    allowed: Arc<TokenMask>,
}

impl Constraint {
    /// Creates a constraint. `matcher` must have consumed the output so far.
    pub fn new(mut matcher: Box<dyn Matcher>) -> Result<Self, ConstraintFailure> {
        let allowed = Arc::new(matcher.allowed()?);
        Ok(Self { matcher, allowed })
    }

    /// Returns the bitmask of the next token.
    pub fn allowed(&self) -> &Arc<TokenMask> {
        &self.allowed
    }

    pub fn into_matcher(self) -> Box<dyn Matcher> {
        self.matcher
    }
}

/// Compares the bitmask of the next token only: matchers cannot be compared.
impl PartialEq for Constraint {
    fn eq(&self, other: &Self) -> bool {
        self.allowed == other.allowed
    }
}

/// Grammar of a sequence in the scheduler. Not `Clone`: a copy made while a [`MaskJob`] owns the
/// matcher would never get a bitmask.
#[derive(Debug)]
pub(crate) struct ActiveConstraint {
    /// `None` while a job owns the matcher.
    matcher: Option<Box<dyn Matcher>>,
    ahead: MasksAhead,
    /// Number of the last job. An earlier job belongs to an earlier sequence with the same id.
    job: u64,
    /// Time that the last job took.
    job_time: Duration,
    /// Tokens of the sequence at the last search for draft tokens. Empty while a job owns them.
    history: Vec<u32>,
}

impl From<Constraint> for ActiveConstraint {
    fn from(new: Constraint) -> Self {
        let ahead = MasksAhead { masks: [new.allowed].into(), drafts: VecDeque::new() };
        let (matcher, job_time) = (Some(new.matcher), Duration::ZERO);
        Self { matcher, ahead, job: 0, job_time, history: Vec::new() }
    }
}

impl ActiveConstraint {
    /// Returns the bitmask of the next token, once it is computed.
    pub(crate) fn allowed(&self) -> Option<&Arc<TokenMask>> {
        self.ahead.masks.front()
    }

    /// Returns the next draft tokens without the first `skipped`.
    pub(crate) fn drafts(&self, skipped: usize) -> impl ExactSizeIterator<Item = u32> {
        self.ahead.drafts.iter().copied().skip(skipped)
    }

    /// Returns the bitmasks of the next token and of the tokens after each of `drafts`, as far as
    /// they are computed.
    pub(crate) fn masks_along(&self, drafts: &[u32]) -> impl Iterator<Item = &Arc<TokenMask>> {
        let known = self.ahead.drafts.iter().zip(drafts).take_while(|(a, b)| a == b).count();
        self.ahead.masks.iter().take(1 + known)
    }

    /// Consumes the sampled token and returns whether it completes the answer.
    pub(crate) fn accept(&mut self, token: u32) -> Result<bool, ConstraintFailure> {
        self.ahead.advance(token);
        let missing =
            || ConstraintFailure::Broken { reason: "a token came before its bitmask".into() };
        let matcher = self.matcher.as_mut().ok_or_else(missing)?;
        matcher.accept(token)?;
        Ok(matcher.is_complete())
    }

    /// Returns the computation of the next bitmask, numbered `job`, unless the bitmask is known or
    /// being computed. `tokens`: tokens of the sequence. Copies only those that the last search for
    /// draft tokens did not have.
    pub(crate) fn mask_job(
        &mut self,
        id: SequenceId,
        job: u64,
        tokens: &[u32],
        drafting: impl FnOnce() -> Option<Drafting>,
    ) -> Option<MaskJob> {
        if self.allowed().is_some() {
            return None;
        }
        let matcher = self.matcher.take()?;
        self.job = job;
        let drafting = drafting();
        if drafting.is_some() {
            self.history.extend_from_slice(&tokens[self.history.len()..]);
        }
        let history = std::mem::take(&mut self.history);
        Some(MaskJob { id, job, matcher, history, drafting, expected_time: self.job_time })
    }

    /// Takes the result of the last job. Ignores results of earlier jobs.
    pub(crate) fn take_mask(&mut self, computed: ComputedMask) -> Result<(), ConstraintFailure> {
        if computed.job == self.job && self.matcher.is_none() {
            self.job_time = computed.time;
            let MaskOutcome { matcher, history, ahead } = computed.outcome?;
            (self.matcher, self.history, self.ahead) = (Some(matcher), history, ahead);
        }
        Ok(())
    }
}

/// Bitmasks and draft tokens of the next positions. Empty once the sequence has accepted the last
/// of these tokens, until the next job ends.
#[derive(Debug, Default)]
struct MasksAhead {
    /// Bitmasks of the next token and of the token after each draft token.
    masks: VecDeque<Arc<TokenMask>>,
    drafts: VecDeque<u32>,
}

impl MasksAhead {
    fn advance(&mut self, token: u32) {
        if self.drafts.pop_front() == Some(token) {
            self.masks.pop_front();
        } else {
            *self = Self::default();
        }
    }
}

/// Limits of the search for draft tokens.
#[derive(Debug)]
pub(crate) struct Drafting {
    /// Maximum number of draft tokens.
    pub drafts_max: usize,
    /// Maximum number of draft tokens that no grammar forces.
    pub ngram_drafts_max: usize,
    pub rules: Speculation,
}

/// Computation of the next bitmask, and of draft tokens. Owns the matcher and the history until the
/// bitmask is computed.
#[derive(Debug)]
pub struct MaskJob {
    id: SequenceId,
    job: u64,
    matcher: Box<dyn Matcher>,
    /// With `drafting`, all tokens of the sequence.
    history: Vec<u32>,
    drafting: Option<Drafting>,
    /// Time that the previous job of the sequence took; zero for the first job.
    expected_time: Duration,
}

impl MaskJob {
    #[cfg(test)]
    pub(crate) fn new(
        id: SequenceId,
        job: u64,
        matcher: Box<dyn Matcher>,
        expected_time: Duration,
    ) -> Self {
        Self { id, job, matcher, history: Vec::new(), drafting: None, expected_time }
    }

    pub(crate) fn expected_time(&self) -> Duration {
        self.expected_time
    }

    /// Computes the bitmask, and looks for draft tokens for at most `drafting_max` from its start.
    /// A panic of the matcher fails this sequence only.
    pub fn run(mut self, drafting_max: Duration) -> ComputedMask {
        let (started, id, job) = (Instant::now(), self.id, self.job);
        let outcome = catch_unwind(AssertUnwindSafe(|| self.compute(started, drafting_max)));
        let outcome = outcome.unwrap_or_else(|panic| {
            Err(ConstraintFailure::Broken { reason: panic_message(panic.as_ref()) })
        });
        let outcome = outcome.map(|ahead| {
            let Self { matcher, history, .. } = self;
            MaskOutcome { matcher, history, ahead }
        });
        ComputedMask { id, job, outcome, time: started.elapsed() }
    }

    fn compute(
        &mut self,
        started: Instant,
        drafting_max: Duration,
    ) -> Result<MasksAhead, ConstraintFailure> {
        let mut allowed = Arc::new(self.matcher.allowed()?);
        let mut ahead =
            MasksAhead { masks: [Arc::clone(&allowed)].into(), drafts: VecDeque::new() };
        let Some(Drafting { drafts_max, ngram_drafts_max, rules }) = self.drafting.take() else {
            return Ok(ahead);
        };
        let token_count = self.history.len();
        // An error along the draft tokens does not fail the answer: the model may sample other
        // tokens.
        let mut matcher = self.matcher.boxed_clone();
        let mut proposed = VecDeque::from(matcher.forced());
        let mut proposes_ngrams = true;
        while ahead.drafts.len() < drafts_max && started.elapsed() < drafting_max {
            let Some(token) = proposed.pop_front() else {
                if !std::mem::take(&mut proposes_ngrams) {
                    break;
                }
                proposed = ngram::draft(&self.history, ngram_drafts_max, &rules).into();
                continue;
            };
            if !allowed.allows(token) || matcher.accept(token).is_err() || matcher.is_complete() {
                break;
            }
            let Ok(mask) = matcher.allowed() else { break };
            allowed = Arc::new(mask);
            ahead.masks.push_back(Arc::clone(&allowed));
            ahead.drafts.push_back(token);
            self.history.push(token);
        }
        self.history.truncate(token_count);
        Ok(ahead)
    }
}

/// Parts of a successful [`MaskJob`] that return to its sequence.
#[derive(Debug)]
struct MaskOutcome {
    matcher: Box<dyn Matcher>,
    history: Vec<u32>,
    ahead: MasksAhead,
}

/// The result of a [`MaskJob`].
#[derive(Debug)]
pub struct ComputedMask {
    pub id: SequenceId,
    job: u64,
    outcome: Result<MaskOutcome, ConstraintFailure>,
    time: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A matcher that allows the tokens 0 to 31 everywhere.
    #[derive(Debug)]
    struct AllowsAll;

    impl Matcher for AllowsAll {
        fn accept(&mut self, _: u32) -> Result<(), ConstraintFailure> {
            Ok(())
        }

        fn allowed(&mut self) -> Result<TokenMask, ConstraintFailure> {
            Ok(TokenMask::new(vec![u32::MAX], 32))
        }

        fn is_complete(&self) -> bool {
            false
        }

        fn boxed_clone(&self) -> Box<dyn Matcher> {
            Box::new(Self)
        }
    }

    #[test]
    fn job_copies_only_tokens_that_the_job_before_did_not_have() {
        let rules = Speculation {
            row_drafts: 8,
            step_tokens: 64,
            ngram_min: 1,
            ngram_max: 3,
            uniform: false,
        };
        let drafting = || Some(Drafting { drafts_max: 4, ngram_drafts_max: 4, rules });
        let mut constraint = ActiveConstraint::from(Constraint::new(Box::new(AllowsAll)).unwrap());
        let mut next_job = |job: u64, token: u32, tokens: &[u32]| {
            // No draft token predicts the token, so the next bitmask is not computed yet.
            constraint.accept(token).unwrap();
            let job = constraint.mask_job(SequenceId(1), job, tokens, drafting).unwrap();
            let history = job.history.clone();
            constraint.take_mask(job.run(Duration::MAX)).unwrap();
            assert_eq!(constraint.history, history, "draft tokens are not kept");
            history
        };
        assert_eq!(next_job(1, 2, &[1, 2, 1, 2]), [1, 2, 1, 2]);
        // Other values of the known tokens show that the job does not copy them.
        assert_eq!(next_job(2, 31, &[0, 0, 0, 0, 31]), [1, 2, 1, 2, 31]);
    }
}
