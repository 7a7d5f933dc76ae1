//! The engine with several ranks. Each rank is a process of this program with a GPU of its own.

use std::time::Instant;

use ::ranks::{GroupSettings, RankGroup, RankSpec, run_rank};
use anyhow::{Context as _, Result, anyhow, ensure};
use engine::executor::{
    ExecutorLimits,
    cuda::{CudaExecutor, CudaModel, CudaRank},
};
use kernels::{
    KvArena, Shard,
    cuda::{DeviceKv, Driver},
    shared::{RegionName, SharedRegion, sweep},
};
use model::Checkpoint;

use super::{EngineArgs, LoadedExecutor, StartPart, limits, load_bar, open_gpu, show};
use crate::{bench::tune, model_store};

/// Purpose in the name of the ranks' shared-memory region.
const PURPOSE: &str = "bench_kv";

/// Returns the UUID of each rank's GPU.
fn gpus(args: &EngineArgs) -> Result<Vec<String>> {
    let ranks = args.tp as usize;
    let names: Vec<String> = match &args.gpu {
        Some(gpus) => gpus.split(',').map(|gpu| gpu.trim().to_owned()).collect(),
        None => (0..ranks).map(|index| index.to_string()).collect(),
    };
    let given = names.len();
    ensure!(
        given == ranks,
        "invalid --gpu: {given} GPUs for --tp {ranks}; expected one for each rank"
    );
    let driver = Driver::open()?;
    let uuid = |name: &String| Ok(driver.device_named(name)?.uuid);
    let uuids = names.iter().map(uuid).collect::<Result<Vec<_>>>()?;
    for (index, uuid) in uuids.iter().enumerate() {
        let is_new = !uuids[..index].contains(uuid);
        ensure!(is_new, "invalid --gpu: {uuid} twice; expected another GPU for each rank");
    }
    Ok(uuids)
}

/// Starts the ranks and waits until they have loaded the model.
pub(super) fn start(args: &EngineArgs, checkpoint: &Checkpoint) -> Result<LoadedExecutor> {
    let shard = Shard::new(0, args.tp as usize).context("invalid --tp: too many ranks")?;
    checkpoint.config().check_shard(shard)?;
    let gpus = gpus(args)?;
    let begun = Instant::now();
    let (isa, peak_gb_per_s) = {
        let backend = open_gpu(args, Some(&gpus[0]))?;
        let peak = args
            .variant
            .peak_gb_per_s
            .map_or_else(|| backend.measure_read_gb_per_s(), |it| Ok(Some(it)))?;
        (format!("{} × {}", args.tp, backend.context().device().name), peak)
    };
    let bandwidth = StartPart::new("bandwidth", begun.elapsed());
    let begun = Instant::now();
    let mut epoch = [0; 16];
    getrandom::fill(&mut epoch).map_err(|error| anyhow!("no random numbers: {error}"))?;
    let epoch = u128::from_le_bytes(epoch);
    let name = RegionName::own(epoch, PURPOSE);
    sweep();
    let region = SharedRegion::create(&name, CudaRank::region_bytes(args.tp as usize))?;
    let region_name = name.file_name().into_bytes();
    let kv_groups = checkpoint.config().kv_groups(args.kv_format());
    let settings = GroupSettings { kv_groups, ..GroupSettings::new(epoch, args.tp, region_name) };
    let mut group = RankGroup::start(settings, RankSpec::command)?;
    region.unlink();
    group.set_polling(args.variant.poll);
    let parts = vec![bandwidth, StartPart::new("ranks", begun.elapsed())];
    let executor = Box::new(group);
    Ok(LoadedExecutor { executor, isa, read_stream: None, peak_gb_per_s, parts, tuned: Vec::new() })
}

/// Runs one rank until the group stops.
pub(super) fn run(args: &EngineArgs, spec: &RankSpec) -> Result<()> {
    run_rank(spec, |region_name| {
        let rank = opened(spec, region_name).map_err(|error| format!("{error:#}"))?;
        let executor = rank.start(|rank| load(args, spec, rank));
        Ok((executor.map_err(|error| format!("{error:#}"))?, Vec::new()))
    })?;
    Ok(())
}

fn opened(spec: &RankSpec, region_name: &[u8]) -> Result<CudaRank> {
    let name = str::from_utf8(region_name).ok().and_then(RegionName::parse);
    let name = name.context("malformed start message of the rank")?;
    let shard = Shard::new(spec.rank as usize, spec.of as usize).context("invalid rank")?;
    Ok(CudaRank::open(&name, shard)?)
}

fn load(args: &EngineArgs, spec: &RankSpec, rank: &mut CudaRank) -> Result<CudaExecutor> {
    let path = model_store::resolve(&args.models_dir, &args.model)?;
    let checkpoint = Checkpoint::open(&path, args.load_format)?;
    let limits: ExecutorLimits = limits(args, checkpoint.config())?;
    let gpu = &gpus(args)?[spec.rank as usize];
    let backend = rank.join(open_gpu(args, Some(gpu))?)?;
    let context = backend.context().clone();
    let bar = (spec.rank == 0).then(load_bar);
    let mut model = CudaModel::load(&checkpoint, backend, &limits, &mut |progress| {
        bar.iter().for_each(|bar| show(bar, progress));
    })?;
    bar.iter().for_each(indicatif::ProgressBar::finish_and_clear);
    // All ranks have the same GEMM shapes and tune at the same time.
    tune::tune(&mut model, &limits, &args.variant)?;
    let layout = checkpoint.config().block_layout(args.kv_format());
    let layout = layout.with_heads(layout.kv_head_count / spec.of as usize);
    let kv = DeviceKv::new(&context, layout, limits.blocks)?;
    let arena = KvArena::remote(kv.clone())?;
    // After tuning, because an all-reduce has a time-out.
    rank.least(limits.blocks)?;
    let mut executor = CudaExecutor::start(model, kv, &arena, limits)?;
    executor.set_polling(args.variant.poll);
    Ok(executor)
}
