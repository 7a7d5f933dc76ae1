//! Workload: conversations, each a list of turns, drawn from one seed.
//!
//! The prompt of a turn is the conversation so far and new tokens. Prompts are random token ids:
//! their lengths are exact, and prefix caches have hits only within a conversation.

use crate::bench::stats::WorkloadRng;

use super::length::Length;

/// Completion tokens of each turn of a tool-calling job, and the tokens that its tools return.
/// From the trace of eight-turn jobs that LMCache's report on agent workloads describes.
const AGENT_ANSWER: u32 = 20;
const AGENT_TOOL_OUTPUTS: [u32; 7] = [1640, 1510, 2455, 1335, 2730, 1930, 775];
/// Tokens of the instructions and tool descriptions at the beginning of a job.
const AGENT_INSTRUCTIONS: u32 = 512;
const AGENT_TOOL_SECONDS: f64 = 0.5;

/// One user, or one job.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Conversation {
    /// Arrival in seconds after the start, in an open loop.
    pub arrives_at: Option<f64>,
    pub turns: Vec<ConversationTurn>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct ConversationTurn {
    /// Seconds between the previous answer and this turn: the user thinks, or the tool runs.
    pub pause: f64,
    /// Tokens that this turn adds to the prompt.
    pub new_tokens: Vec<u32>,
    pub output_tokens: u32,
}

/// Distributions of the conversations.
#[derive(Clone, Debug)]
pub(super) struct WorkloadShape {
    pub input: Length,
    /// Tokens of the first turn, if they differ from those of later turns.
    pub first_input: Option<Length>,
    pub output: Length,
    pub turns: Length,
    /// Mean of the exponentially distributed pauses, in seconds.
    pub pause_mean: f64,
    pub agents: bool,
    /// Prompts have token ids from 10 to this number.
    pub vocabulary: u32,
    /// Context length, if the server reports it.
    pub sequence_tokens_max: Option<u32>,
}

impl WorkloadShape {
    /// Returns the factor that scales a tool-calling job down to the context length.
    pub(super) fn agent_scale(&self) -> f64 {
        let outputs: u32 = AGENT_TOOL_OUTPUTS.iter().sum();
        let answers = AGENT_ANSWER * (AGENT_TOOL_OUTPUTS.len() as u32 + 1);
        let longest = self.sequence_tokens_max.map_or(f64::INFINITY, f64::from);
        // Answers keep their length.
        let room = longest - f64::from(answers) - f64::from(AGENT_TOOL_OUTPUTS.len() as u32 + 1);
        (room / f64::from(outputs + AGENT_INSTRUCTIONS)).clamp(0.0, 1.0)
    }

    /// Draws `count` conversations. `rate` is the mean of arrivals per second; without it, a closed
    /// loop.
    pub(super) fn draw(
        &self,
        rng: &mut WorkloadRng,
        count: u32,
        rate: Option<f64>,
    ) -> Vec<Conversation> {
        let mut arrival = 0.0;
        let mut conversation = |_| {
            let arrives_at = rate.map(|rate| {
                arrival += rng.exponential(rate);
                arrival
            });
            let turns = if self.agents { self.job(rng) } else { self.talk(rng) };
            Conversation { arrives_at, turns }
        };
        (0..count).map(&mut conversation).collect()
    }

    /// Draws turns up to the context length.
    fn talk(&self, rng: &mut WorkloadRng) -> Vec<ConversationTurn> {
        let longest = self.sequence_tokens_max.unwrap_or(u32::MAX);
        let mut used: u32 = 0;
        let mut turns = Vec::new();
        for turn in 0..self.turns.draw(rng, 1000) {
            let input = if turn == 0 { self.first_input.unwrap_or(self.input) } else { self.input };
            let (input, output) = (input.draw(rng, longest), self.output.draw(rng, longest));
            let pause = match (turn, self.pause_mean > 0.0) {
                (0, _) | (_, false) => 0.0,
                (_, true) => rng.exponential(1.0 / self.pause_mean),
            };
            let needed = input.saturating_add(output);
            // The first turn is always sent: an error of the server is a result, too.
            if turn > 0 && used.saturating_add(needed) > longest {
                break;
            }
            used = used.saturating_add(needed);
            turns.push(self.turn(rng, pause, input, output));
        }
        turns
    }

    fn job(&self, rng: &mut WorkloadRng) -> Vec<ConversationTurn> {
        let scale = self.agent_scale();
        let scaled = |tokens: u32| ((f64::from(tokens) * scale) as u32).max(1);
        let mut turns = vec![self.turn(rng, 0.0, scaled(AGENT_INSTRUCTIONS), AGENT_ANSWER)];
        for output in AGENT_TOOL_OUTPUTS {
            turns.push(self.turn(rng, AGENT_TOOL_SECONDS, scaled(output), AGENT_ANSWER));
        }
        turns
    }

    fn turn(
        &self,
        rng: &mut WorkloadRng,
        pause: f64,
        input: u32,
        output_tokens: u32,
    ) -> ConversationTurn {
        let new_tokens = (0..input).map(|_| rng.within(10, self.vocabulary - 1)).collect();
        ConversationTurn { pause, new_tokens, output_tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixed(tokens: u32) -> Length {
        Length::Uniform { low: tokens, high: tokens }
    }

    fn shape() -> WorkloadShape {
        WorkloadShape {
            input: fixed(100),
            first_input: None,
            output: fixed(50),
            turns: fixed(1),
            pause_mean: 0.0,
            agents: false,
            vocabulary: 1000,
            sequence_tokens_max: None,
        }
    }

    fn prompt_of_last_turn(turns: &[ConversationTurn]) -> usize {
        let answers: u32 = turns[..turns.len() - 1].iter().map(|turn| turn.output_tokens).sum();
        turns.iter().map(|turn| turn.new_tokens.len()).sum::<usize>() + answers as usize
    }

    #[test]
    fn one_seed_gives_one_workload() {
        let shape =
            WorkloadShape { turns: Length::parse("1..5").unwrap(), pause_mean: 1.0, ..shape() };
        let draw = |seed| shape.draw(&mut WorkloadRng::new(seed), 20, Some(2.0));
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn conversation_ends_at_the_context_length() {
        let shape = WorkloadShape { turns: fixed(10), sequence_tokens_max: Some(500), ..shape() };
        let talk = &shape.draw(&mut WorkloadRng::new(0), 1, None)[0];
        assert_eq!(talk.turns.len(), 3);
        assert_eq!(prompt_of_last_turn(&talk.turns), 400);
        assert_eq!(talk.arrives_at, None);
    }

    #[test]
    fn first_turn_may_have_another_length() {
        let shape = WorkloadShape { turns: fixed(3), first_input: Some(fixed(400)), ..shape() };
        let talk = &shape.draw(&mut WorkloadRng::new(0), 1, None)[0];
        let lengths: Vec<usize> = talk.turns.iter().map(|turn| turn.new_tokens.len()).collect();
        assert_eq!(lengths, [400, 100, 100]);
    }

    #[test]
    fn arrivals_are_in_order_at_the_requested_rate() {
        let talks = shape().draw(&mut WorkloadRng::new(0), 4000, Some(8.0));
        let arrivals: Vec<f64> = talks.iter().filter_map(|talk| talk.arrives_at).collect();
        assert!(arrivals.is_sorted());
        let rate = 4000.0 / arrivals[3999];
        assert!((7.5..8.5).contains(&rate), "{rate}");
    }

    #[test]
    fn job_has_eight_turns_within_the_context_length() {
        let jobs = |longest| {
            let shape = WorkloadShape { agents: true, sequence_tokens_max: longest, ..shape() };
            (shape.agent_scale(), shape.draw(&mut WorkloadRng::new(0), 1, None)[0].turns.clone())
        };
        let (scale, whole) = jobs(None);
        assert_eq!((scale, whole.len()), (1.0, 8));
        assert_eq!(prompt_of_last_turn(&whole), 512 + 12_375 + 7 * 20);
        assert!(whole[0].pause == 0.0 && whole[1..].iter().all(|turn| turn.pause == 0.5));
        let (scale, scaled) = jobs(Some(2048));
        assert!(scale < 0.2 && scaled.len() == 8);
        let longest = prompt_of_last_turn(&scaled) + 20;
        assert!((2000..=2048).contains(&longest), "{longest}");
        assert_eq!(jobs(Some(100)).1.len(), 8);
    }
}
