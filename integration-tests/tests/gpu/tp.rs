//! Tensor-parallel nodes with a process and a GPU for each rank. They generate the tokens of one
//! GPU, and their KV moves between any rank counts.

use std::{
    collections::HashMap,
    env, fs,
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use engine::{
    CacheSeeds, Scheduler, SchedulerConfig, StepLoop,
    event::{Action, Input, NewSequence, SequenceId},
    executor::{
        Executor, ExecutorLimits,
        cuda::{CudaExecutor, CudaModel, CudaRank},
        sim::{CostModel, SimExecutor},
    },
};
use kernels::{
    BlockId, KvArena, KvLayout, Shard, WeightFormat,
    arena::BlockWrite,
    cpu::CpuGroup,
    cuda::{
        Context, CudaBackend, CudaOptions, DeviceKv, Driver, IpcMemory, KernelLibrary, RankedKv,
    },
    peer::PeerMemory,
    sampling::Sampling,
    shared::{RegionName, SharedRegion},
};
use model::{Checkpoint, LoadFormat};
use ranks::{GroupSettings, RankGroup, RankSpec, run_rank};

use super::{
    bench::{Gpu, gpu, require_gpus},
    executor::{Outcome, on_gpu, run_arriving, sequence},
    weights::Place,
};

const RANK_SPEC: &str = "BATON_TEST_RANK_SPEC";
/// Environment variable: folder of a rank's model. Without it, the weights are random.
const RANK_MODEL: &str = "BATON_TEST_RANK_MODEL";
const TIMEOUT: Duration = Duration::from_secs(120);
const BLOCKS: u32 = 400;

/// Task of a rank process.
#[derive(Clone, Copy, Debug, PartialEq)]
enum RankTask {
    /// Only allocates KV memory.
    Kv,
    Model {
        weights: WeightFormat,
        graphs: bool,
    },
    /// A model in f32 with CUDA graphs, whose output is its embedding.
    TiedModel,
    /// A model in f32 with CUDA graphs, whose first and last layers have linear attention.
    HybridModel,
    /// A model in bf16 with CUDA graphs, whose weights can be updated.
    Updatable(Place),
}

impl RankTask {
    const ALL: [Self; 9] = [
        Self::Kv,
        Self::Model { weights: WeightFormat::F32, graphs: true },
        Self::Model { weights: WeightFormat::F32, graphs: false },
        Self::Model { weights: WeightFormat::Bf16, graphs: true },
        Self::Model { weights: WeightFormat::Bf16, graphs: false },
        Self::TiedModel,
        Self::HybridModel,
        Self::Updatable(Place::Shadow),
        Self::Updatable(Place::InPlace),
    ];

    fn place(self) -> usize {
        Self::ALL.iter().position(|part| *part == self).unwrap()
    }

    fn options(self) -> CudaOptions {
        match self {
            Self::Model { weights, graphs } => options(weights, graphs),
            Self::TiedModel | Self::HybridModel => options(WeightFormat::F32, true),
            Self::Kv | Self::Updatable(_) => options(WeightFormat::Bf16, true),
        }
    }

    /// Returns the model with random weights.
    fn model(self) -> Checkpoint {
        let folder = tempfile::tempdir().unwrap();
        match self {
            Self::HybridModel => write_hybrid_config(folder.path()),
            _ => write_config(folder.path(), self == Self::TiedModel),
        }
        Checkpoint::open(folder.path(), LoadFormat::Dummy { seed: 11 }).unwrap()
    }
}

fn options(weights: WeightFormat, graphs: bool) -> CudaOptions {
    CudaOptions { graphs, ..CudaOptions::new(weights) }
}

/// Writes the configuration of a model with four KV heads and a vocabulary that is split unevenly
/// over ranks. `is_tied`: the model's output is its embedding.
pub(crate) fn write_config(folder: &Path, is_tied: bool) {
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "vocab_size": 13_000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": is_tied, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

/// Writes the configuration of a model with the sizes of [`write_config`] and linear attention.
fn write_hybrid_config(folder: &Path) {
    let config = serde_json::json!({
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "vocab_size": 13_000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

pub(crate) fn limits(checkpoint: &Checkpoint) -> ExecutorLimits {
    ExecutorLimits {
        slots: 8,
        // Allows steps of all sizes.
        step_tokens: 2500,
        sequence_tokens: 2600,
        blocks: BLOCKS,
        depth: 2,
        vocabulary: checkpoint.config().vocab_size as u32,
        speculation: None,
    }
}

fn layout(checkpoint: &Checkpoint, part: RankTask) -> KvLayout {
    checkpoint.config().block_layout(part.options().kv)
}

pub(crate) const RANK_HELPER: &str = "tp-rank";

/// Runs a rank in a process of its own.
pub(crate) fn run_rank_process() {
    let spec = env::var(RANK_SPEC).expect("the test sets it");
    let spec: RankSpec = spec.parse().unwrap();
    let outcome = run_rank(&spec, |told| {
        let words: Vec<&str> = str::from_utf8(told).unwrap().split(' ').collect();
        let [region, numbers @ ..] = &words[..] else { panic!("{words:?}") };
        let mut numbers = numbers.iter().map(|number| number.parse::<usize>().unwrap());
        let mut number = || numbers.next().unwrap();
        let part = RankTask::ALL[number()];
        let [blocks, layer_count, kv_head_count, head_dim] = [(); 4].map(|()| number());
        let gpu = numbers.nth(spec.rank as usize).unwrap();
        let driver = Driver::open().unwrap();
        let device = driver.devices().unwrap()[gpu].clone();
        let context = Context::new(driver, device).unwrap();
        let checkpoint = match env::var_os(RANK_MODEL) {
            Some(folder) => Checkpoint::open(folder, LoadFormat::Auto).unwrap(),
            None => part.model(),
        };
        let format = layout(&checkpoint, part).format;
        let layout = KvLayout { layer_count, kv_head_count, head_dim, format };
        let limits = limits(&checkpoint);
        let own = layout.with_heads(layout.kv_head_count / spec.of as usize);
        let (executor, kv): (Box<dyn Executor>, _) = match part {
            RankTask::Kv => {
                let kv = DeviceKv::new(&context, own, blocks as u32).unwrap();
                // The memory must live as long as the process.
                std::mem::forget(kv.clone());
                (Box::new(SimExecutor::new(limits, CostModel::default(), Instant::now())), kv)
            }
            RankTask::Model { .. }
            | RankTask::TiedModel
            | RankTask::HybridModel
            | RankTask::Updatable(_) => {
                let path = env::var_os("BATON_TEST_KERNELS").map(std::path::PathBuf::from);
                let library = Arc::new(KernelLibrary::open(path.as_deref()).unwrap());
                let backend = CudaBackend::new(&context, library, part.options());
                let mut rank = CudaRank::new(exchange(region, &spec));
                let backend = rank.join(backend.unwrap()).map_err(|error| error.to_string())?;
                let mut model =
                    CudaModel::load(&checkpoint, backend, &limits, &mut |_| ()).unwrap();
                if let RankTask::Updatable(place) = part {
                    place.allow_updates(&mut model);
                }
                let kv = DeviceKv::new(&context, own, BLOCKS).unwrap();
                let arena = KvArena::remote(kv.clone()).unwrap();
                assert_eq!(rank.least(100 - spec.rank).unwrap(), 101 - spec.of);
                let executor = CudaExecutor::start(model, kv.clone(), &arena, limits);
                (Box::new(executor.map_err(|error| error.to_string())?), kv)
            }
        };
        Ok((executor, IpcMemory::new(kv).export()?))
    });
    if let Err(error) = &outcome {
        eprintln!("rank {}: {error}", spec.rank);
    }
    std::process::exit(i32::from(outcome.is_err()));
}

fn exchange(region: &str, spec: &RankSpec) -> CpuGroup {
    let (rank, of) = (spec.rank as usize, spec.of as usize);
    let name = RegionName::parse(region).unwrap();
    let region = SharedRegion::open(&name, CpuGroup::region_bytes(of)).unwrap();
    CpuGroup::new(&region, 0, Shard::new(rank, of).unwrap(), TIMEOUT)
}

fn epoch() -> u128 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(1);
    u128::from(std::process::id()) << 64 | u128::from(NEXT.fetch_add(1, Ordering::Relaxed))
}

fn group(ranks: u32, part: RankTask) -> RankGroup {
    let gpus: Vec<usize> = (0..ranks as usize).collect();
    group_on(&gpus, part, layout(&part.model(), part), BLOCKS, None)
}

/// Returns two ranks that load the model in `folder`, and whose weights can be updated.
pub(crate) fn updatable_group(folder: &Path, place: Place) -> RankGroup {
    let part = RankTask::Updatable(place);
    group_on(&[0, 1], part, layout(&part.model(), part), BLOCKS, Some(folder))
}

/// Returns ranks that only allocate KV memory, one on each of these GPUs.
pub(crate) fn kv_group(gpus: &[usize], layout: KvLayout, blocks: u32) -> RankGroup {
    group_on(gpus, RankTask::Kv, layout, blocks, None)
}

fn group_on(
    gpus: &[usize],
    part: RankTask,
    layout: KvLayout,
    blocks: u32,
    model: Option<&Path>,
) -> RankGroup {
    let ranks = gpus.len() as u32;
    let epoch = epoch();
    let name = RegionName::own(epoch, "test_kv");
    let region = SharedRegion::create(&name, CpuGroup::region_bytes(ranks as usize)).unwrap();
    let KvLayout { layer_count, kv_head_count, head_dim, .. } = layout;
    let gpus: Vec<String> = gpus.iter().map(usize::to_string).collect();
    let told = format!(
        "{} {} {blocks} {layer_count} {kv_head_count} {head_dim} {}",
        name.file_name(),
        part.place(),
        gpus.join(" ")
    );
    let settings = GroupSettings {
        start_within: TIMEOUT,
        ..GroupSettings::new(epoch, ranks, told.into_bytes())
    };
    let model = model.map(Path::to_owned);
    let command = move |spec: &RankSpec| {
        let mut command = test_harness::helper(RANK_HELPER);
        command.env(RANK_SPEC, spec.to_string()).stdin(Stdio::null()).stdout(Stdio::null());
        if let Some(folder) = &model {
            command.env(RANK_MODEL, folder);
        }
        command
    };
    let group = RankGroup::start(settings, command).unwrap();
    region.unlink();
    group
}

/// Opens the first GPU. Skips the running test unless there is a GPU for each rank.
pub(crate) fn gpus(ranks: u32) -> Gpu {
    require_gpus(ranks as usize);
    gpu()
}

pub(crate) fn step_loop<E: Executor>(executor: E) -> StepLoop<E> {
    let seeds = CacheSeeds { model_fingerprint: 0x5eed, weight_version: 1 };
    let config = SchedulerConfig { waiting_max: 1000, ..SchedulerConfig::new(executor.limits()) };
    let scheduler = Scheduler::new(config, seeds).unwrap();
    StepLoop::new(scheduler.with_kv_groups(executor.kv_groups()), executor)
}

/// Returns greedy requests with log-probabilities, which show the margins, and sampled ones, which
/// show that all ranks draw alike.
pub(crate) fn requests() -> Vec<NewSequence> {
    let request = |id: u128| {
        let length =
            if id % 5 == 2 { 1500 + 300 * id as u32 / 5 } else { 1 + id as u32 * 37 % 110 };
        let tokens = (0..length).map(|at| (at * 311 + id as u32 * 101 + at / 7) % 13_000).collect();
        let greedy = Sampling { logprobs: Some(2), ..Sampling::greedy() };
        let sampling = match id % 4 {
            3 => Sampling { temperature: 0.8, top_k: 50, top_p: 0.9, seed: id as u64, ..greedy },
            _ => greedy,
        };
        let sequence = sequence(id, tokens, 24 + (id * 13 % 30) as u32, sampling);
        NewSequence { ignore_stop_tokens: true, ..sequence }
    };
    (0..12).map(request).collect()
}

pub(crate) type Outcomes = HashMap<SequenceId, Outcome>;

fn run<E: Executor>(engine: &mut StepLoop<E>) -> Outcomes {
    run_arriving(engine, requests(), 2, &HashMap::new())
}

/// Smallest logit margin of a certain token. Sums in another order differ by less.
const CERTAIN_MARGIN: f32 = 1e-3;

/// Asserts that greedy tokens are equal up to an uncertain one.
fn compare(found: &Outcomes, wanted: &Outcomes, what: &str) {
    let mut compared = 0;
    for (id, wanted) in wanted {
        let found = &found[id];
        assert!(!found.is_failed && !wanted.is_failed, "{what}: sequence {} failed", id.0);
        assert_eq!(found.tokens.len(), wanted.tokens.len(), "{what}: sequence {}", id.0);
        if id.0 % 4 == 3 {
            continue;
        }
        for (at, (found, wanted)) in found.tokens.iter().zip(&wanted.tokens).enumerate() {
            let top = &wanted.logprobs.as_ref().unwrap().top;
            if top[0].1 - top[1].1 < CERTAIN_MARGIN {
                break;
            }
            assert_eq!(found.id, wanted.id, "{what}: sequence {}, token {at}", id.0);
            compared += 1;
        }
    }
    assert!(compared > 100, "{what}: only {compared} tokens compared");
}

fn same(found: &Outcomes, wanted: &Outcomes, what: &str) {
    for (id, wanted) in wanted {
        assert_eq!(found[id].ids(), wanted.ids(), "{what}: sequence {}", id.0);
    }
}

/// Asserts that most greedy sequences begin with the same token. In bf16, sums in another order
/// change some tokens.
fn begin_alike(found: &Outcomes, wanted: &Outcomes, what: &str) {
    let greedy: Vec<_> = wanted.iter().filter(|(id, _)| id.0 % 4 != 3).collect();
    let is_alike = |id: &SequenceId, wanted: &Outcome| found[id].ids()[0] == wanted.ids()[0];
    let alike = greedy.iter().filter(|(id, wanted)| is_alike(id, wanted)).count();
    assert!(2 * alike > greedy.len(), "{what}: {alike} of {} begin alike", greedy.len());
}

/// Returns the outcomes of one GPU.
fn on_one_gpu(gpu: &Gpu, part: RankTask) -> Outcomes {
    let checkpoint = part.model();
    let config = SchedulerConfig { waiting_max: 1000, ..SchedulerConfig::new(limits(&checkpoint)) };
    let (mut one, _arena) = on_gpu(gpu, &checkpoint, part.options(), config, |_| ());
    run(&mut one)
}

/// Compares the tokens of `ranks` ranks with one GPU's. The group itself checks in every step that
/// all ranks sampled the same tokens.
fn check_tokens_of(ranks: u32) {
    let gpu = gpus(ranks);
    let task = |weights, graphs| RankTask::Model { weights, graphs };
    let run_group = |part| run(&mut step_loop(group(ranks, part)));
    let what = format!("{ranks} ranks");
    let recorded_task = task(WeightFormat::F32, true);
    let wanted = on_one_gpu(&gpu, recorded_task);
    let recorded = {
        let mut engine = step_loop(group(ranks, recorded_task));
        let first = run(&mut engine);
        // Repeats the requests with a filled prefix cache.
        compare(&run(&mut engine), &wanted, &format!("{what}, again"));
        first
    };
    compare(&recorded, &wanted, &what);
    same(&run_group(task(WeightFormat::F32, false)), &recorded, &format!("{what}, eager"));
    let tied = RankTask::TiedModel;
    compare(&run_group(tied), &on_one_gpu(&gpu, tied), &format!("{what}, tied"));
    let hybrid = RankTask::HybridModel;
    let (mut engine, wanted) = (step_loop(group(ranks, hybrid)), on_one_gpu(&gpu, hybrid));
    for time in ["first", "again"] {
        compare(&run(&mut engine), &wanted, &format!("{what}, linear attention, {time}"));
    }
    drop(engine);
    let [recorded_task, eager_task] = [true, false].map(|graphs| task(WeightFormat::Bf16, graphs));
    let what = format!("{what}, bf16");
    let recorded = run_group(recorded_task);
    begin_alike(&recorded, &on_one_gpu(&gpu, recorded_task), &what);
    same(&run_group(eager_task), &recorded, &what);
}

pub(crate) fn two_ranks_generate_the_tokens_of_one() {
    check_tokens_of(2);
}

pub(crate) fn four_ranks_generate_the_tokens_of_one() {
    check_tokens_of(4);
}

pub(crate) fn killed_rank_ends_its_group_and_the_next_group_serves() {
    let _gpu = gpus(2);
    let part = RankTask::Model { weights: WeightFormat::F32, graphs: true };
    let group_of_two = group(2, part);
    let victim = group_of_two.process_ids()[1];
    let mut engine = step_loop(group_of_two);
    let mut actions = Vec::new();
    for request in requests() {
        engine.handle(Input::Arrived(request), &mut actions);
    }
    let has_tokens =
        |actions: &[Action]| actions.iter().any(|action| matches!(action, Action::Tokens { .. }));
    let until = Instant::now() + TIMEOUT;
    while !has_tokens(&actions) {
        engine.turn(TIMEOUT, &mut actions).unwrap();
        assert!(Instant::now() < until, "time-out: no first token");
    }
    assert!(Command::new("kill").args(["-9", &victim.to_string()]).status().unwrap().success());
    let killed = Instant::now();
    let error = loop {
        match engine.turn(TIMEOUT, &mut actions) {
            Ok(_) => assert!(killed.elapsed() < TIMEOUT, "the group still runs without a rank"),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("rank 1 of 2 ended: killed by signal 9"), "{error}");
    drop(engine);
    assert!(killed.elapsed() < Duration::from_secs(20), "{:?}", killed.elapsed());
    let outcomes = run(&mut step_loop(group(2, part)));
    assert!(outcomes.values().all(|outcome| !outcome.is_failed));
}

fn pattern(layout: KvLayout, block: u32, seed: u32) -> Vec<u8> {
    let mut state = (block + 1).wrapping_mul(2_654_435_761) ^ seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..layout.block_bytes()).map(|_| next()).collect()
}

/// The test plays both nodes, with access to the KV of each node's ranks.
pub(crate) fn kv_moves_between_any_two_rank_counts() {
    let gpu = gpus(1);
    let found = gpu.context.driver().devices().unwrap().len() as u32;
    let layout = layout(&RankTask::Kv.model(), RankTask::Kv);
    let counts: Vec<u32> = [1, 2, 4].into_iter().filter(|ranks| *ranks <= found).collect();
    for from in &counts {
        for to in &counts {
            let what = format!("{from} to {to}");
            let groups = [from, to].map(|ranks| group(*ranks, RankTask::Kv));
            let [sends, receives] = [0, 1].map(|at: usize| {
                let kv = RankedKv::imported(layout, &groups[at].ready_messages()).unwrap();
                KvArena::remote(kv).unwrap()
            });
            for block in 0..64 {
                let bytes = pattern(layout, block, *from);
                sends.write(BlockId(block)).unwrap().copy_from_host(&bytes).unwrap();
                let mut back = vec![0; bytes.len()];
                sends.read(BlockId(block)).unwrap().copy_to_host(&mut back).unwrap();
                assert!(back == bytes, "{what}: block {block} on the sender");
            }
            let export = sends.peer_memory().unwrap().export().unwrap();
            let mut peer = receives.peer_memory().unwrap().import(&export).unwrap();
            // Contiguous runs, single blocks and other destinations.
            let pairs: Vec<(u32, u32)> = (0..20)
                .map(|i| (i, i + 7))
                .chain((0..5).map(|i| (40 + 3 * i, 60 - 2 * i)))
                .collect();
            let from_blocks: Vec<BlockId> = pairs.iter().map(|pair| BlockId(pair.0)).collect();
            let to_blocks: Vec<BlockWrite> =
                pairs.iter().map(|pair| receives.write(BlockId(pair.1)).unwrap()).collect();
            let mut moving = peer.pull(&from_blocks, to_blocks).unwrap();
            let until = Instant::now() + TIMEOUT;
            while !moving.is_done().unwrap() {
                assert!(Instant::now() < until, "{what}: the copies have not finished");
            }
            drop(moving.finish().unwrap());
            for block in 0..64 {
                let mut found = vec![0; layout.block_bytes()];
                receives.read(BlockId(block)).unwrap().copy_to_host(&mut found).unwrap();
                let source = pairs.iter().find(|pair| pair.1 == block);
                let wanted = source
                    .map_or_else(|| vec![0; found.len()], |pair| pattern(layout, pair.0, *from));
                assert!(found == wanted, "{what}: block {block}");
            }
            drop(peer);
            drop((sends, receives));
            drop(groups);
        }
    }
}
