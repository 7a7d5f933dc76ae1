//! SmolLM2 on a GPU generates the golden tokens: one executor alone, and a whole cluster.

use std::collections::HashMap;

use anyhow::Result;
use engine::event::{NewSequence, SequenceId};
use integration_tests::{
    client::Client,
    cluster::{Cluster, ClusterSpec, whole_smollm2},
    golden::{GoldenRun, whole_golden},
};
use kernels::{
    WeightFormat,
    cuda::{AttentionKind, CudaOptions},
    sampling::Sampling,
};
use model::{Checkpoint, LoadFormat};
use test_harness::skip;

use super::{
    bench::gpu,
    clusters::{Devices, place, runtime},
    executor::{config, on_gpu, run, sequence},
};

/// The reference's margin from which rounding to bf16 cannot change the greedy token.
const CERTAIN_MARGIN: f32 = 0.15;

/// Opens SmolLM2 and reads its golden tokens. Skips the running test unless the model is named.
fn smollm2() -> (Checkpoint, Vec<GoldenRun>) {
    if std::env::var_os("BATON_TEST_MODEL").is_none() {
        skip("BATON_TEST_MODEL does not name a file");
    }
    (Checkpoint::open(whole_smollm2(), LoadFormat::Auto).unwrap(), whole_golden().runs)
}

/// Returns the run's sequence after the first `known` golden tokens.
fn golden_sequence(id: u128, run: &GoldenRun, known: usize) -> NewSequence {
    let mut tokens = run.prompt_ids.clone();
    tokens.extend_from_slice(&run.output_ids[..known]);
    let max_tokens = run.output_ids.len() as u32;
    let sequence = sequence(id, tokens, max_tokens, Sampling::greedy());
    NewSequence { prompt_len: run.prompt_ids.len() as u32, ignore_stop_tokens: true, ..sequence }
}

pub(crate) fn smollm2_generates_the_golden_tokens_in_f32() {
    let gpu = gpu();
    let (checkpoint, runs) = smollm2();
    for (depth, attention) in [(1, AttentionKind::Plain), (2, AttentionKind::Auto)] {
        let config = config(&checkpoint, 8, 400, depth);
        let options = CudaOptions { attention, ..CudaOptions::new(WeightFormat::F32) };
        let (mut engine, _) = on_gpu(&gpu, &checkpoint, options, config, |_| ());
        let sequences = runs.iter().zip(0..).map(|(run, id)| golden_sequence(id, run, 0));
        let outcomes = run(&mut engine, sequences.collect(), &HashMap::new());
        for (run, id) in runs.iter().zip(0..) {
            assert_eq!(outcomes[&SequenceId(id)].ids(), run.output_ids, "{}", run.name);
        }
    }
}

/// Each decode run starts from golden tokens and is compared up to the next uncertain position.
/// Behind that position another run starts, again from golden tokens, so every certain position is
/// compared.
pub(crate) fn smollm2_in_bf16_predicts_every_certain_golden_token() {
    let gpu = gpu();
    let (checkpoint, runs) = smollm2();
    let config = config(&checkpoint, 8, 400, 2);
    let options = CudaOptions::new(WeightFormat::Bf16);
    let (mut engine, _) = on_gpu(&gpu, &checkpoint, options, config, |_| ());
    let mut segments = Vec::new();
    for run in &runs {
        let uncertain = |position: &usize| run.margins[*position] < CERTAIN_MARGIN;
        let mut start = 0;
        for end in (0..run.margins.len()).filter(uncertain).chain([run.margins.len()]) {
            if start < end {
                segments.push((run, start, end));
            }
            start = end + 1;
        }
    }
    let sequences = segments.iter().zip(0..).map(|((run, start, _), id)| {
        let id = u128::from(id as u32);
        golden_sequence(id, run, *start)
    });
    let outcomes = run(&mut engine, sequences.collect(), &HashMap::new());
    let mut compared = 0;
    for ((run, start, end), id) in segments.iter().zip(0..) {
        let found = outcomes[&SequenceId(id)].ids();
        let (found, wanted) = (&found[..end - start], &run.output_ids[*start..*end]);
        assert_eq!(found, wanted, "{} from position {start}", run.name);
        compared += end - start;
    }
    let certain =
        runs.iter().flat_map(|run| &run.margins).filter(|margin| **margin >= CERTAIN_MARGIN);
    assert_eq!(compared, certain.count());
    assert!(compared > 0, "no golden token is certain");
}

pub(crate) fn smollm2_cluster_on_a_gpu_generates_the_golden_tokens_in_f32() {
    let (place, _alone) = place(1);
    let Devices::Gpus(uuids) = place else {
        skip("the test of golden tokens covers clusters on CPUs")
    };
    let (_, runs) = smollm2();
    let gpu = vec![uuids[0].clone()];
    let mut spec = ClusterSpec { gpus: vec![gpu.clone(), gpu], ..ClusterSpec::whole_smollm2() };
    spec = spec.set("BATON_NODE_DEVICE", "cuda").set("BATON_NODE_BLOCKS", "2000");
    if let Ok(kernels) = std::env::var("BATON_TEST_KERNELS") {
        spec = spec.set("BATON_NODE_KERNELS", &kernels);
    }
    let outcome: Result<()> = runtime().block_on(async {
        let cluster = Cluster::start(spec).await?;
        let client = Client::new(cluster.http());
        for run in &runs {
            let found = client.greedy(&run.prompt_ids, run.output_ids.len()).await?;
            assert_eq!(found, run.output_ids, "{}", run.name);
        }
        let received = cluster.decode[0].metric("baton_kv_transfer_bytes_total").await?;
        assert!(received > 0.0, "the decode node received no KV");
        cluster.stop()
    });
    outcome.unwrap_or_else(|error| panic!("{error:#}"));
}
