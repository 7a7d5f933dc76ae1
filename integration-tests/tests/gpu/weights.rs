//! Weight updates from files on executors with captured CUDA graphs. Afterwards an executor
//! generates the tokens and log-probabilities of an executor that started with the new weights, bit
//! for bit.

use std::{collections::HashMap, path::Path, thread};

use engine::{
    CacheSeeds, StepKind, StepLoop,
    event::InFlight,
    executor::{
        Executor,
        cuda::{CudaExecutor, CudaModel},
    },
    plan::Dispatch,
};
use half::bf16;
use kernels::{
    RowSource, WeightFormat,
    cuda::{CudaBackend, CudaOptions},
};
use model::{Checkpoint, LoadFormat, Weight, WeightShape};
use safetensors::tensor::{Dtype, TensorView};

use super::{
    bench::{Gpu, gpu, short},
    executor::run_arriving,
    tp::{Outcomes, gpus, limits, requests, step_loop, updatable_group, write_config},
};

/// Memory that new weights are packed into.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Place {
    /// A second copy, while steps run.
    Shadow,
    /// The weights in use, while no step runs.
    InPlace,
}

impl Place {
    /// Lets the weights of a loaded model be updated from files, which need no chunk buffers.
    pub(crate) fn allow_updates(self, model: &mut CudaModel) {
        let no_chunks = (0, 0);
        match self {
            Self::Shadow => model.allocate_shadow(no_chunks).unwrap(),
            Self::InPlace => model.update_in_place(no_chunks).unwrap(),
        }
    }
}

/// Writes a model with random weights in bf16.
fn write_model(folder: &Path, seed: u64) {
    std::fs::create_dir(folder).unwrap();
    write_config(folder, false);
    let random = Checkpoint::open(folder, LoadFormat::Dummy { seed }).unwrap();
    let config = random.config();
    let stored = |weight: Weight| {
        let shape = weight.shape(config);
        let values = match shape {
            WeightShape::Vector { .. } => random.vector(weight).unwrap(),
            WeightShape::Matrix { rows, cols } => {
                let matrix = random.matrix(weight).unwrap();
                let mut values = vec![0.0; rows * cols];
                for (row, out) in values.chunks_mut(cols).enumerate() {
                    matrix.read_row(row, out);
                }
                values
            }
        };
        let dims: Vec<usize> = shape.dims().into_iter().map(|dim| dim as usize).collect();
        let bytes: Vec<u8> =
            values.into_iter().flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect();
        (weight.hugging_face_name(config), dims, bytes)
    };
    let weights: Vec<_> = Weight::all(config).map(stored).collect();
    let tensors = weights.iter().map(|(name, dims, bytes)| {
        (name, TensorView::new(Dtype::BF16, dims.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(tensors, None, &folder.join("model.safetensors")).unwrap();
}

/// Starts an executor on one GPU with the weights in `folder`.
fn on_one_gpu(gpu: &Gpu, folder: &Path, place: Place) -> StepLoop<CudaExecutor> {
    let checkpoint = Checkpoint::open(folder, LoadFormat::Auto).unwrap();
    let limits = limits(&checkpoint);
    let options = CudaOptions::new(WeightFormat::Bf16);
    let backend = CudaBackend::new(&gpu.context, gpu.library.clone(), options).unwrap();
    let mut model = CudaModel::load(&checkpoint, backend, &limits, &mut |_| ()).unwrap();
    place.allow_updates(&mut model);
    let layout = checkpoint.config().block_layout(options.kv);
    let (kv, arena) = gpu.kv(layout, limits.blocks);
    step_loop(CudaExecutor::start(model, kv, &arena, limits).unwrap())
}

/// Answers to the same requests, and how each step was launched.
struct Run {
    outcomes: Outcomes,
    steps: Vec<(StepKind, Dispatch)>,
}

impl Run {
    /// Runs the requests. With an unused `salt` no prefix is cached, so that equal weights give
    /// equal bits.
    fn of<E: Executor>(engine: &mut StepLoop<E>, salt: &str) -> Self {
        let mut requests = requests();
        if short() {
            requests.truncate(4);
        }
        requests.iter_mut().for_each(|request| request.cache_salt = salt.to_owned());
        let outcomes = run_arriving(engine, requests, 2, &HashMap::new());
        let records = engine.take_records();
        Self { outcomes, steps: records.iter().map(|step| (step.kind, step.dispatch)).collect() }
    }

    fn assert_equals(&self, wanted: &Self, what: &str) {
        for (id, wanted) in &wanted.outcomes {
            let found = &self.outcomes[id];
            assert!(!found.is_failed && !wanted.is_failed, "{what}: sequence {} failed", id.0);
            assert_eq!(found.ids(), wanted.ids(), "{what}: sequence {}", id.0);
            assert!(found == wanted, "{what}: the log-probabilities of sequence {} differ", id.0);
        }
        assert_eq!(self.steps, wanted.steps, "{what}");
        let replays = |(kind, dispatch): &&(StepKind, Dispatch)| {
            *kind == StepKind::Decode && matches!(dispatch, Dispatch::Graph { .. })
        };
        let decodes = self.steps.iter().filter(|(kind, _)| *kind == StepKind::Decode).count();
        let replayed = self.steps.iter().filter(replays).count();
        assert!(replayed == decodes && decodes > 20, "{what}: {replayed} of {decodes} replayed");
    }
}

/// Updates the weights to those in `folder`, as a node does: steps run while a shadow is prepared,
/// and no step runs while weights are overwritten. `meanwhile` are the answers of the weights in
/// use.
fn update<E: Executor>(
    engine: &mut StepLoop<E>,
    folder: &Path,
    weight_version: u64,
    meanwhile: &Run,
) {
    let update = engine.executor().weight_update().expect("the weights can be updated");
    let prepare = || {
        let checkpoint = Checkpoint::open(folder, LoadFormat::Auto).unwrap();
        update.prepare(folder, &checkpoint).unwrap();
    };
    if update.is_in_place() {
        engine.set_held(true);
        engine.release_weights().unwrap();
        prepare();
    } else {
        thread::scope(|scope| {
            scope.spawn(prepare);
            let salt = format!("before {weight_version}");
            Run::of(engine, &salt).assert_equals(meanwhile, "while weights are prepared");
        });
        engine.set_held(true);
    }
    let seeds = CacheSeeds { model_fingerprint: 0x5eed, weight_version };
    engine.change_weights(seeds, InFlight::Recompute, &mut Vec::new()).unwrap();
    engine.set_held(false);
}

/// Updates an executor to new weights and back. Its graphs were captured with the old weights.
fn check_updates<E: Executor>(start: impl Fn(&Path) -> StepLoop<E>) {
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old", "new"].map(|name| folder.path().join(name));
    write_model(&old, 1);
    write_model(&new, 2);
    let of_new = Run::of(&mut start(&new), "");
    let mut engine = start(&old);
    let of_old = Run::of(&mut engine, "");
    for (id, outcome) in &of_old.outcomes {
        assert_ne!(outcome.ids(), of_new.outcomes[id].ids(), "sequence {}: equal answers", id.0);
    }
    // Without a salt, a cached prefix of other weights would be a hit.
    for (weight_version, weights, folder, before) in
        [(2, &of_new, &new, &of_old), (3, &of_old, &old, &of_new)]
    {
        update(&mut engine, folder, weight_version, before);
        Run::of(&mut engine, "").assert_equals(weights, &format!("version {weight_version}"));
    }
}

pub(crate) fn updated_weights_under_captured_graphs_match_a_new_executor() {
    let gpu = gpu();
    for place in [Place::Shadow, Place::InPlace] {
        check_updates(|folder| on_one_gpu(&gpu, folder, place));
    }
}

pub(crate) fn updated_weights_of_two_ranks_match_a_new_group() {
    let _gpu = gpus(2);
    for place in [Place::Shadow, Place::InPlace] {
        check_updates(|folder| step_loop(updatable_group(folder, place)));
    }
}
