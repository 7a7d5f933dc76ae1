//! `baton-bench speculate`: decode throughput with and without speculative decoding, for an answer
//! that repeats its prompt. The benchmark runs the engine in its own process, without a network.
//!
//! The prompt asks for a change to a piece of code. Every round runs each number of draft tokens
//! once, so that changes of the machine's speed affect all of them alike. All answers must be
//! equal, except on a GPU with another weight format than f32: there rounding depends on the number
//! of rows in a GEMM, and may change a choice between nearly equal logits.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use engine::{
    CacheSeeds, Scheduler, SchedulerConfig, SpeculationStats, StepLoop,
    event::{Action, Input, NewSequence, SequenceId, SequenceKind},
    executor::{
        Executor, ExecutorLimits, Speculation,
        cpu::CpuExecutor,
        cuda::{CudaExecutor, CudaModel},
    },
};
use kernels::{
    BLOCK_TOKENS, KvArena, WeightFormat,
    cpu::{CpuBackend, CpuOptions, Isa},
    cuda::{CudaBackend, CudaOptions, DeviceKv},
    sampling::Sampling,
};
use model::{Checkpoint, LoadFormat};
use serde_json::{Map, Value, json};
use text::{ModelText, RenderRequest, SpecialTokens};

use baton::{
    bench::{engine::parse_dtype, stats::median},
    doctor::KernelsArg,
    model_store,
};

/// The default prompt. Even a model that is too small to rename the variable repeats the code.
const PROMPT: &str = r#"Rename the variable `total` to `balance` and write the whole code again, without explanation.

```python
class Account:
    def __init__(self, owner, currency):
        self.owner = owner
        self.currency = currency
        self.total = 0
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.total = self.total + amount
        self.history.append(("deposit", amount))
        return self.total

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.total:
            raise ValueError("amount is more than the total")
        self.total = self.total - amount
        self.history.append(("withdraw", amount))
        return self.total

    def describe(self):
        lines = [f"{self.owner}: {self.total} {self.currency}"]
        for kind, amount in self.history:
            lines.append(f"  {kind} of {amount} {self.currency}")
        return "\n".join(lines)
```"#;

#[derive(Args, Clone)]
pub(crate) struct SpeculateArgs {
    /// Model: a GGUF file, a Hugging Face folder, or a name that `baton model list` prints.
    #[arg(long, default_value = "smollm2-135m")]
    model: String,
    /// Folder of the models that were fetched by name.
    #[arg(long, env = "BATON_MODELS_DIR", default_value = "models")]
    models_dir: PathBuf,
    /// Weight format: f32, bf16, q8 (CPUs) or fp8 (GPUs). KV is f32 with f32, otherwise bf16.
    #[arg(long, default_value = "bf16", value_parser = parse_dtype)]
    dtype: WeightFormat,
    /// Device of the forward pass: cpu or cuda.
    #[arg(long, default_value = "cpu", value_parser = ["cpu", "cuda"])]
    device: String,
    #[command(flatten)]
    kernels: KernelsArg,
    /// Worker threads of the CPU [default: one for each core].
    #[arg(long)]
    threads: Option<usize>,
    /// File with the user's message [default: a built-in message about code].
    #[arg(long)]
    prompt_file: Option<PathBuf>,
    /// Maximum draft tokens of a row in a step: the values to compare. 0: no speculative decoding.
    #[arg(long, value_delimiter = ',', default_value = "0,4,8,12")]
    drafts: Vec<u32>,
    /// Minimum number of tokens that must repeat before draft tokens are proposed
    /// (`node.speculate_ngram_min`).
    #[arg(long, default_value_t = config::Node::default().speculate_ngram_min, value_parser = clap::value_parser!(u32).range(1..=64))]
    ngram_min: u32,
    /// Maximum number of tokens compared to select the best of several repetitions
    /// (`node.speculate_ngram_max`).
    #[arg(long, default_value_t = config::Node::default().speculate_ngram_max, value_parser = clap::value_parser!(u32).range(1..=64))]
    ngram_max: u32,
    /// Maximum tokens of a step with draft tokens (`node.speculate_step_tokens`).
    #[arg(long, default_value_t = config::Node::default().speculate_step_tokens, value_parser = clap::value_parser!(u32).range(1..=512))]
    step_tokens: u32,
    /// Sampling temperature; 0 is greedy.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Requests in one batch, each with a seed of its own.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    batch: u32,
    /// Maximum tokens of an answer.
    #[arg(long, default_value_t = 400, value_parser = clap::value_parser!(u32).range(2..=8192))]
    max_tokens: u32,
    /// Timed runs with each number of draft tokens; the throughput is their median.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Also print the answer.
    #[arg(long)]
    show: bool,
}

/// Result of one run. Only `answers` includes the time until every answer has its first token.
struct RunResult {
    tokens_per_s: f64,
    answers: Vec<Vec<u32>>,
    steps: usize,
    speculated: SpeculationStats,
}

pub(crate) fn run(args: SpeculateArgs) -> Result<()> {
    ensure!(
        args.ngram_min <= args.ngram_max,
        "invalid --ngram-min: it is greater than --ngram-max"
    );
    let path = model_store::resolve(&args.models_dir, &args.model)?;
    let text = ModelText::open(&path)?;
    let prompt = prompt(&args, &text)?;
    let mut engines = Vec::new();
    for &drafts in &args.drafts {
        engines.push((drafts, start(&args, &path, prompt.len(), drafts)?, Vec::new()));
    }
    for round in 0..=args.runs {
        for (_, engine, runs) in &mut engines {
            let answered = answer(&args, engine, &prompt, text.tokenizer().eos_ids(), round)?;
            // The first round is a warm-up: it fills the prefix cache.
            if round > 0 {
                runs.push(answered);
            }
        }
    }
    let expected = &engines[0].2[0].answers;
    if args.show {
        println!("{}", text.tokenizer().decode(&expected[0], true));
    }
    println!(
        "prompt of {} tokens, answers of {:?}",
        prompt.len(),
        expected.iter().map(Vec::len).collect::<Vec<_>>()
    );
    println!(
        "{:>6} {:>8} {:>8} {:>8} {:>7} {:>8} {:>8} {:>13} {:>9}",
        "drafts", "tok/s", "min", "max", "ratio", "steps", "drafted", "accepted", "ms/step"
    );
    let mut baseline = None;
    for (drafts, _, runs) in &engines {
        let is_exact = args.device == "cpu" || args.dtype == WeightFormat::F32;
        ensure!(
            !is_exact || runs.iter().all(|run| run.answers == *expected),
            "{drafts} draft tokens changed the answer: this is a bug; report model, format and machine"
        );
        let all: Vec<f64> = runs.iter().map(|run| run.tokens_per_s).collect();
        let tokens_per_s = median(&all);
        let baseline = *baseline.get_or_insert(tokens_per_s);
        let RunResult { steps, speculated, .. } = &runs[0];
        let tokens: usize = runs[0].answers.iter().map(Vec::len).sum();
        println!(
            "{drafts:>6} {tokens_per_s:>8.1} {:>8.1} {:>8.1} {:>7.2} {steps:>8} {:>8} {:>6} ({:>3.0} %) {:>9.2}",
            all.iter().copied().fold(f64::INFINITY, f64::min),
            all.iter().copied().fold(0.0, f64::max),
            tokens_per_s / baseline,
            speculated.drafted,
            speculated.accepted,
            100.0 * speculated.accepted as f64 / speculated.drafted.max(1) as f64,
            1e3 * tokens as f64 / tokens_per_s / *steps as f64,
        );
    }
    Ok(())
}

fn prompt(args: &SpeculateArgs, text: &ModelText) -> Result<Vec<u32>> {
    let message = match &args.prompt_file {
        Some(path) => std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?,
        None => PROMPT.to_owned(),
    };
    let rendered =
        text.chat_template().map_err(|error| anyhow!("{error}"))?.render(&RenderRequest {
            messages: &json!([{"role": "user", "content": message}]),
            tools: &Value::Null,
            add_generation_prompt: true,
            extra: &Map::new(),
            now: SystemTime::UNIX_EPOCH,
            literal: None,
        })?;
    Ok(text.tokenizer().encode(&rendered, SpecialTokens::Parse)?)
}

fn start(
    args: &SpeculateArgs,
    path: &Path,
    prompt_len: usize,
    drafts: u32,
) -> Result<StepLoop<Box<dyn Executor>>> {
    let threads = match args.threads {
        Some(threads) => threads,
        None => std::thread::available_parallelism()?.get(),
    };
    let checkpoint = Checkpoint::open(path, LoadFormat::Auto)?;
    let config = checkpoint.config();
    let sequence_tokens = prompt_len as u32 + args.max_tokens;
    ensure!(
        sequence_tokens as usize <= config.context_tokens,
        "prompt and answer have {sequence_tokens} tokens; the model has at most {}",
        config.context_tokens
    );
    ensure!(
        config.state_shape().is_none(),
        "family {}: linear attention drafts no tokens; expected a model without",
        config.family.name()
    );
    let limits = ExecutorLimits {
        slots: args.batch,
        step_tokens: 512,
        sequence_tokens,
        blocks: (args.batch + 1)
            * config
                .kv_groups(args.dtype.kv_format())
                .entries(sequence_tokens as usize + 2 * BLOCK_TOKENS) as u32,
        depth: 2,
        vocabulary: config.vocab_size as u32,
        speculation: (drafts > 0).then_some(Speculation {
            row_drafts: drafts,
            step_tokens: args.step_tokens,
            ngram_min: args.ngram_min,
            ngram_max: args.ngram_max,
            uniform: false,
        }),
    };
    let layout = config.block_layout(args.dtype.kv_format());
    let seeds =
        CacheSeeds { model_fingerprint: checkpoint.model_fingerprint()?, weight_version: 0 };
    let executor: Box<dyn Executor> = if args.device == "cuda" {
        let options = CudaOptions::new(args.dtype);
        let backend = CudaBackend::open(None, args.kernels.path().as_deref(), options)?;
        let context = Arc::clone(backend.context());
        let model = CudaModel::load(&checkpoint, backend, &limits, &mut |_| {})?;
        let kv = DeviceKv::new(&context, layout, limits.blocks)?;
        let arena = KvArena::remote(kv.clone())?;
        Box::new(CudaExecutor::start(model, kv, &arena, limits)?)
    } else {
        let backend = CpuBackend::new(CpuOptions { weights: args.dtype, threads, isa: Isa::Auto })?;
        let arena = KvArena::host(layout, limits.blocks)?;
        Box::new(CpuExecutor::start(&checkpoint, backend, arena, limits, &mut |_| {})?)
    };
    let scheduler = Scheduler::new(SchedulerConfig::new(executor.limits()), seeds)?;
    Ok(StepLoop::new(scheduler.with_kv_groups(executor.kv_groups()), executor))
}

/// Runs one batch. The result excludes the time, steps and tokens until every answer has its first
/// token.
fn answer(
    args: &SpeculateArgs,
    engine: &mut StepLoop<Box<dyn Executor>>,
    prompt: &[u32],
    stop_token_ids: &[u32],
    round: u32,
) -> Result<RunResult> {
    let mut actions = Vec::new();
    for index in 0..args.batch {
        let sampling = Sampling {
            temperature: args.temperature,
            seed: index.into(),
            stop_token_ids: stop_token_ids.to_vec(),
            ..Sampling::greedy()
        };
        let sequence = NewSequence {
            id: SequenceId((u128::from(round) << 64) | u128::from(index)),
            kind: SequenceKind::Compute,
            tokens: prompt.to_vec(),
            prompt_len: prompt.len() as u32,
            sampling,
            max_tokens: args.max_tokens,
            ignore_stop_tokens: false,
            cache_salt: String::new(),
            adapter: None,
            session: Default::default(),
            constraint: None,
            deadline: Instant::now() + Duration::from_secs(3600),
        };
        engine.handle(Input::Arrived(sequence), &mut actions);
    }
    let mut answers = vec![Vec::new(); args.batch as usize];
    let (mut finished, mut steps, mut timed_from) = (0, 0, None);
    while finished < args.batch {
        engine.turn(Duration::from_secs(60), &mut actions)?;
        steps += engine.take_records().len();
        for action in actions.drain(..) {
            match action {
                Action::Tokens { id, tokens, .. } => {
                    answers[id.0 as u32 as usize].extend(tokens.iter().map(|token| token.id));
                }
                Action::Finished { .. } => finished += 1,
                Action::Failed { failure, .. } => bail!("the request failed: {failure}"),
                _ => {}
            }
        }
        if timed_from.is_none() && answers.iter().all(|answer| !answer.is_empty()) {
            let untimed: usize = answers.iter().map(Vec::len).sum();
            steps = 0;
            engine.take_speculated();
            timed_from = Some((Instant::now(), untimed));
        }
    }
    let (began, untimed) = timed_from.context("an answer is empty")?;
    let tokens = answers.iter().map(Vec::len).sum::<usize>() - untimed;
    let tokens_per_s = tokens as f64 / began.elapsed().as_secs_f64();
    let speculated = engine.take_speculated();
    while engine.steps_in_flight() > 0 {
        engine.turn(Duration::from_secs(60), &mut actions)?;
    }
    Ok(RunResult { tokens_per_s, answers, steps, speculated })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: SpeculateArgs,
    }

    fn parsed(flags: &[&str]) -> SpeculateArgs {
        Line::try_parse_from([&["speculate"], flags].concat()).unwrap().args
    }

    #[test]
    fn default_drafts_contain_the_setting_of_a_node() {
        let (args, node) = (parsed(&[]), config::Node::default());
        assert_eq!(args.drafts, [0, 4, 8, 12], "README.md names these");
        assert!(args.drafts.contains(&node.speculate_tokens));
        assert_eq!(parsed(&["--drafts", "0,8"]).drafts, [0, 8]);
    }
}
