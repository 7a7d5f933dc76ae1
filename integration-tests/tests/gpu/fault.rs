//! A GPU fault while a node serves. The executor stops, the node's requests fail one by one, and
//! the node exits. A fault ends the CUDA context of the whole process, so each test runs in a
//! process of its own.

use std::{
    collections::BTreeMap,
    env, fs,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use config::{Config, LoadInput};
use engine::{
    event::{Action, Input},
    executor::{CollectWaker, Executor, ExecutorError, ExecutorLimits},
    plan::{RowMask, StepId, StepPlan, StepResult},
};
use integration_tests::cluster::{Ready, SECRET, decode_request, node_client};
use kernels::{
    WeightFormat,
    cuda::{Compute, CudaOptions, Stream},
    sampling::Sampling,
};
use proto::v1::{self, FailureKind, decode_event::Event, observe_event::Event as Observed};

use super::{
    bench::{Gpu, gpu},
    executor::{config, on_gpu, sequence},
    model::checkpoint,
};

const TOLD: &str = "BATON_TEST_FAULT";
const TIMEOUT: Duration = Duration::from_secs(120);
/// The driver's message for the fault.
const FAULT: &str = "an illegal memory access was encountered";

/// Runs `test` in a process of its own: starts this program again, or runs `test` if this process
/// was started for it.
fn in_its_own_process(name: &str, test: impl FnOnce(&Gpu)) {
    let gpu = gpu();
    if env::var_os(TOLD).is_some() {
        return test(&gpu);
    }
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", &format!("gpu::fault::{name}"), "--nocapture"])
        .env(TOLD, "1")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + TIMEOUT;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("the process has not exited after the fault");
        }
        thread::sleep(Duration::from_millis(10));
    };
    assert!(status.success(), "{status}");
}

pub(crate) fn gpu_fault_stops_the_executor_with_its_cause() {
    in_its_own_process("gpu_fault_stops_the_executor_with_its_cause", |gpu| {
        let checkpoint = checkpoint("LlamaForCausalLM", "llama");
        let config = config(&checkpoint, 8, 200, 2);
        let options = CudaOptions::new(WeightFormat::Bf16);
        let (mut engine, arena) = on_gpu(gpu, &checkpoint, options, config, |_| ());
        let mut actions = Vec::new();
        for id in 0..4 {
            let new = sequence(id, vec![3, 1, 4, 1, 5], 500, Sampling::greedy());
            engine.handle(Input::Arrived(new), &mut actions);
        }
        let deadline = Instant::now() + TIMEOUT;
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
            assert!(Instant::now() < deadline, "the fault is not detected");
        };
        let ExecutorError::Stopped { reason } = &error else { panic!("{error}") };
        assert!(reason.contains(FAULT), "{reason}");
        // The failed context must not cause a panic on drop.
        drop((engine, arena));
    });
}

/// GPU executor of a node that causes a fault after some results.
struct Faulty {
    device: Box<dyn Executor>,
    results: u32,
    fault: Box<dyn FnMut() + Send>,
}

impl Executor for Faulty {
    fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        self.device.launch(plan)
    }

    fn supply(&mut self, step_id: StepId, masks: Vec<RowMask>) -> Result<(), ExecutorError> {
        self.device.supply(step_id, masks)
    }

    fn masks_are_due(&self) -> bool {
        self.device.masks_are_due()
    }

    fn collect(&mut self, timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
        let result = self.device.collect(timeout)?;
        self.results += u32::from(result.is_some());
        if result.is_some() && self.results == 5 {
            (self.fault)();
        }
        Ok(result)
    }

    fn limits(&self) -> ExecutorLimits {
        self.device.limits()
    }

    fn waker(&self) -> CollectWaker {
        self.device.waker()
    }
}

fn settings(folder: &Path) -> Config {
    let model = r#"{
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu",
        "max_position_embeddings": 512, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "vocab_size": 96, "tie_word_embeddings": false, "torch_dtype": "bfloat16"
    }"#;
    fs::write(folder.join("config.json"), model).unwrap();
    let kernels = env::var("BATON_TEST_KERNELS").unwrap();
    let kernels = fs::canonicalize(kernels).unwrap();
    let flags = [
        ("model.path", folder.to_str().unwrap()),
        ("model.load_format", "dummy"),
        ("model.dtype", "bf16"),
        ("node.device", "cuda"),
        ("node.kernels", kernels.to_str().unwrap()),
        ("node.grpc", "127.0.0.1:0"),
        ("node.metrics", "127.0.0.1:0"),
        ("node.gpu_tune", "0s"),
        ("node.blocks", "128"),
        // Two of the requests run and two wait.
        ("node.slots", "2"),
        ("transfer.control", "127.0.0.1:0"),
        ("transfer.data", "127.0.0.1:0"),
        ("cluster.secret", SECRET),
    ];
    let flags: BTreeMap<String, String> =
        flags.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    Config::load(LoadInput { flags, ..LoadInput::default() }).unwrap()
}

/// Returns the final event of each of four requests.
async fn final_events(ready: &Path) -> Vec<Option<Event>> {
    let ready: Ready = loop {
        if let Ok(text) = fs::read(ready) {
            break serde_json::from_slice(&text).unwrap();
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let mut observer = node_client(&ready.grpc, None).unwrap();
    let mut observed = observer.observe(v1::ObserveRequest {}).await.unwrap().into_inner();
    let Some(Observed::Snapshot(snapshot)) = observed.message().await.unwrap().unwrap().event
    else {
        panic!("the stream does not start with a snapshot")
    };
    let epoch = snapshot.record.unwrap().epoch;
    let mut client = node_client(&ready.grpc, Some(&epoch)).unwrap();
    let mut streams = Vec::new();
    for index in 0..4 {
        match client.decode(decode_request(index, &epoch, 400)).await {
            Ok(stream) => streams.push(stream.into_inner()),
            // The fault may come before the request.
            Err(status) => assert!(index > 0, "{status}"),
        }
    }
    let mut words = Vec::new();
    for mut stream in streams {
        let mut last = None;
        while let Some(event) = stream.message().await.unwrap() {
            last = event.event;
        }
        words.push(last);
    }
    words
}

pub(crate) fn gpu_fault_fails_the_nodes_requests_and_exits_with_1() {
    in_its_own_process("gpu_fault_fails_the_nodes_requests_and_exits_with_1", |gpu| {
        let folder = tempfile::tempdir().unwrap();
        let (config, ready) = (settings(folder.path()), folder.path().join("ready"));
        let (context, library) = (gpu.context.clone(), gpu.library.clone());
        let elsewhere = Stream::<Compute>::new(&context).unwrap();
        let fault = Box::new(move || {
            context.bind().unwrap();
            library.fault(&elsewhere).unwrap();
        });
        let is_ready = ready.clone();
        let node = thread::spawn(move || {
            node::run_on(node::Role::Decode, &config, Some(&is_ready), Instant::now(), |device| {
                Box::new(Faulty { device, results: 0, fault })
            })
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let words = async { tokio::time::timeout(TIMEOUT, final_events(&ready)).await };
        let words = runtime.block_on(words).unwrap();
        assert!(!words.is_empty());
        for word in words {
            let Some(Event::Failure(failure)) = word else { panic!("{word:?}") };
            assert_eq!(failure.kind(), FailureKind::Internal, "{failure:?}");
            assert!(failure.message.contains(FAULT), "{failure:?}");
        }
        assert_eq!(node.join().unwrap(), 1);
    });
}
