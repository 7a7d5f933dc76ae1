//! A fault of the GPU in the middle of serving. It ends the context of the whole process, so this
//! program runs again for it.

use std::{
    env,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use engine::{
    event::{Action, Input},
    executor::ExecutorError,
};
use kernels::{
    WeightFormat,
    cuda::{Compute, CudaOptions, Stream},
    sampling::Sampling,
};

use super::{
    bench::{Gpu, gpu},
    executor::{config, on_gpu, sequence},
    model::checkpoint,
};

const NAME: &str = "gpu::fault::a_fault_in_the_middle_stops_the_executor_and_says_which";
const TOLD: &str = "BATON_TEST_FAULT";
const PATIENCE: Duration = Duration::from_secs(120);

#[test]
fn a_fault_in_the_middle_stops_the_executor_and_says_which() {
    let Some(gpu) = gpu() else { return };
    if env::var_os(TOLD).is_some() {
        return serve_until_the_fault(&gpu);
    }
    let program = env::current_exe().unwrap();
    let mut child = Command::new(program)
        .args(["--exact", NAME, "--nocapture"])
        .env(TOLD, "1")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("the process with the fault does not end");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert!(status.success(), "{status}");
}

fn serve_until_the_fault(gpu: &Gpu) {
    let checkpoint = checkpoint("LlamaForCausalLM", "llama");
    let config = config(&checkpoint, 8, 200, 2);
    let options = CudaOptions::new(WeightFormat::Bf16);
    let (mut engine, arena) = on_gpu(gpu, &checkpoint, options, config, |_| ());
    let mut actions = Vec::new();
    for id in 0..4 {
        let new = sequence(id, vec![3, 1, 4, 1, 5], 500, Sampling::greedy());
        engine.handle(Input::Arrived(new), &mut actions);
    }
    let deadline = Instant::now() + PATIENCE;
    while !actions.iter().any(|action| matches!(action, Action::Tokens { .. })) {
        engine.turn(Duration::from_secs(20), &mut actions).unwrap();
        assert!(Instant::now() < deadline, "no token");
    }
    let elsewhere = Stream::<Compute>::new(&gpu.context).unwrap();
    gpu.library.fault(&elsewhere).unwrap();
    let error = loop {
        if let Err(error) = engine.turn(Duration::from_secs(20), &mut actions) {
            break error;
        }
        assert!(Instant::now() < deadline, "the fault is not noticed");
    };
    eprintln!("the executor: {error}");
    let ExecutorError::Stopped { reason } = &error else { panic!("{error}") };
    assert!(reason.contains("illegal memory access"), "{reason}");
    // What is left of it goes without another word.
    drop((engine, arena));
}
