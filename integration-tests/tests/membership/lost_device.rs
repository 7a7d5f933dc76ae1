//! A node loses its device: each running request fails once with a typed error, the node removes
//! its record, and the process exits so that its supervisor restarts it.
//!
//! The node runs in a helper process.

use std::{
    collections::BTreeMap,
    env,
    fs::{self, File},
    path::PathBuf,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use config::{Config, LoadInput};
use engine::{
    executor::{CollectWaker, Executor, ExecutorError, ExecutorLimits},
    plan::{RowMask, StepId, StepPlan, StepResult},
};
use integration_tests::{
    cluster::{Ready, SECRET, decode_request, node_client},
    etcd::Etcd,
};
use proto::v1::{self, FailureKind, decode_event::Event, observe_event::Event as Observed};
use test_harness::KilledOnDrop;
use tonic::{Code, Streaming};

use crate::{DEADLINE, PREFIX};

/// Name of the helper that runs [`run_node`].
pub(crate) const NODE_HELPER: &str = "node";
/// Environment variable with the folder through which the test and the helper exchange files.
const FOLDER: &str = "BATON_TEST_FOLDER";
const REASON: &str = "an illegal memory access was encountered";
/// Number of step results that the device returns before it hangs.
const RESULTS: u32 = 5;

/// Executor that returns [`RESULTS`] step results, then hangs, and fails once the file `lost`
/// exists.
struct LostDevice {
    device: Box<dyn Executor>,
    results: u32,
    lost: PathBuf,
}

impl Executor for LostDevice {
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
        if self.results < RESULTS {
            let result = self.device.collect(timeout)?;
            self.results += u32::from(result.is_some());
            return Ok(result);
        }
        if self.lost.exists() {
            return Err(ExecutorError::Stopped { reason: REASON.to_owned() });
        }
        std::thread::sleep(timeout.min(Duration::from_millis(5)));
        Ok(None)
    }

    fn limits(&self) -> ExecutorLimits {
        self.device.limits()
    }

    fn waker(&self) -> CollectWaker {
        self.device.waker()
    }
}

/// Runs a node until its device is lost, and exits with the node's exit code.
pub(crate) fn run_node() {
    let folder = PathBuf::from(env::var_os(FOLDER).expect("the test names a folder"));
    let settings = fs::read(folder.join("settings")).expect("the test has written the settings");
    let flags = serde_json::from_slice(&settings).expect("the settings are JSON");
    let config =
        Config::load(LoadInput { flags, ..LoadInput::default() }).expect("the settings are valid");
    let lost = folder.join("lost");
    let ready = folder.join("ready");
    let code =
        node::run_on(node::Role::Decode, &config, Some(&ready), Instant::now(), move |device| {
            Box::new(LostDevice { device, results: 0, lost })
        });
    std::process::exit(code.into());
}

/// The helper process. Dropping it kills the process.
struct NodeProcess {
    child: KilledOnDrop,
    folder: tempfile::TempDir,
}

impl NodeProcess {
    fn start(etcd: &Etcd) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let model = folder.path().join("config.json");
        let config = r#"{
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
            "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu",
            "max_position_embeddings": 256, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "vocab_size": 96, "tie_word_embeddings": false, "torch_dtype": "float32"
        }"#;
        fs::write(&model, config)?;
        let settings = BTreeMap::from([
            ("model.path", folder.path().display().to_string()),
            ("model.load_format", "dummy".to_owned()),
            ("model.dtype", "f32".to_owned()),
            ("node.grpc", "127.0.0.1:0".to_owned()),
            ("node.metrics", "127.0.0.1:0".to_owned()),
            ("node.threads", "1".to_owned()),
            ("node.device", "cpu".to_owned()),
            ("node.blocks", "64".to_owned()),
            // Two requests run, and the others wait.
            ("node.slots", "2".to_owned()),
            ("transfer.control", "127.0.0.1:0".to_owned()),
            ("transfer.data", "127.0.0.1:0".to_owned()),
            ("cluster.secret", SECRET.to_owned()),
            ("cluster.etcd", etcd.url()),
            ("cluster.etcd_prefix", PREFIX.to_owned()),
            // Far longer than the test: only the node can remove its record in time.
            ("cluster.etcd_ttl", "600s".to_owned()),
        ]);
        fs::write(folder.path().join("settings"), serde_json::to_vec(&settings)?)?;
        let child = test_harness::helper(NODE_HELPER)
            .env(FOLDER, folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(folder.path().join("log"))?)
            .spawn()?;
        Ok(Self { child: KilledOnDrop(child), folder })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    async fn ready(&mut self) -> Result<Ready> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Ok(text) = fs::read(self.path("ready")) {
                return Ok(serde_json::from_slice(&text)?);
            }
            ensure!(self.child.try_wait()?.is_none(), "the node exited early:\n{}", self.log());
            ensure!(Instant::now() < deadline, "the node was not ready in time:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn exit_code(&mut self) -> Result<Option<i32>> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status.code());
            }
            ensure!(Instant::now() < deadline, "the node still runs:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn within<T>(what: &str, wait: impl Future<Output = T>) -> Result<T> {
    tokio::time::timeout(DEADLINE, wait).await.with_context(|| format!("{what} takes too long"))
}

/// Returns all events of the stream. Fails if the stream ends with an error status.
async fn all_events(mut stream: Streaming<v1::DecodeEvent>) -> Result<Vec<Event>> {
    let mut events = Vec::new();
    while let Some(event) = within("an event", stream.message()).await?? {
        events.push(event.event.context("an event is empty")?);
    }
    Ok(events)
}

pub(crate) async fn lost_device_fails_each_request_once_removes_the_record_and_exits() -> Result<()>
{
    let etcd = Etcd::start()?;
    let mut node = NodeProcess::start(&etcd)?;
    let ready = node.ready().await?;
    etcd.wait_leases(PREFIX, |keys| keys.len() == 1).await?;
    let mut observer = node_client(&ready.grpc, None)?;
    let mut observed = observer.observe(v1::ObserveRequest {}).await?.into_inner();
    let first = within("a snapshot", observed.message()).await??.context("the stream ended")?;
    let Some(Observed::Snapshot(v1::NodeSnapshot { record: Some(record), .. })) = first.event
    else {
        anyhow::bail!("no snapshot: {first:?}")
    };

    let mut client = node_client(&ready.grpc, Some(&record.epoch))?;
    let mut streams = Vec::new();
    for index in 0..4 {
        let stream = client.decode(decode_request(index, &record.epoch, 100));
        streams.push(within("a stream", stream).await??.into_inner());
    }
    // The device hangs already or will hang soon. Now it is lost.
    File::create(node.path("lost"))?;
    let mut began = 0;
    for stream in streams {
        let events = all_events(stream).await?;
        let Some((Event::Failure(failure), before)) = events.split_last() else {
            anyhow::bail!("no failure at the end of {events:?}")
        };
        assert_eq!(failure.kind(), FailureKind::Internal, "{failure:?}");
        assert!(failure.message.contains(REASON), "{failure:?}");
        let is_end = |event: &Event| matches!(event, Event::Failure(_) | Event::Finished(_));
        assert!(!before.iter().any(is_end), "the stream has two final events: {events:?}");
        began += usize::from(before.iter().any(|event| matches!(event, Event::Tokens(_))));
    }
    assert!(began > 0, "no request had tokens before the device was lost");
    let end = loop {
        match within("the end of the Observe stream", observed.message()).await? {
            Ok(event) => assert!(event.is_some(), "the stream ended without an error status"),
            Err(status) => break status,
        }
    };
    assert_eq!(end.code(), Code::Unavailable, "{end}");
    etcd.wait_leases(PREFIX, <[_]>::is_empty).await?;
    assert_eq!(node.exit_code().await?, Some(1), "{}", node.log());
    assert!(node.log().contains(REASON), "{}", node.log());
    Ok(())
}
