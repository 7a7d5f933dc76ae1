//! A cluster of real processes on loopback.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::File,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use proto::{
    auth::{CallSigner, ClusterSecret},
    ids::Epoch,
    v1::{self, node_client::NodeClient},
};
use serde::Deserialize;
use tonic::{service::interceptor::InterceptedService, transport::Channel};

use crate::{
    client::{Client, DEADLINE},
    cut_model::cut_model,
};

const READY_WITHIN: Duration = Duration::from_secs(60);
const STOP_WITHIN: Duration = Duration::from_secs(20);
pub const SECRET: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

/// Returns a client of a node's gRPC with [`SECRET`], for the process with this epoch. Without an
/// epoch, it can only observe.
pub fn node_client(
    grpc: &str,
    epoch: Option<&[u8]>,
) -> Result<NodeClient<InterceptedService<Channel, CallSigner>>> {
    let channel = Channel::from_shared(format!("http://{grpc}"))?.connect_lazy();
    let mut signer = CallSigner::new(&ClusterSecret::new(SECRET)?)?;
    if let Some(epoch) = epoch {
        signer = signer.to(Epoch::from_bytes(epoch)?);
    }
    Ok(NodeClient::with_interceptor(channel, signer))
}

/// Returns the `index`th request of a test: a decode node with this epoch prefills its 20 tokens,
/// whose ids are at most 92.
pub fn decode_request(index: u8, epoch: &Bytes, max_tokens: u32) -> v1::DecodeRequest {
    let tokens: Vec<u32> = (0..20).map(|i| 3 + (i * 7 + u32::from(index)) % 90).collect();
    let attempt = v1::Attempt {
        request_id: vec![index + 1; 16].into(),
        transfer_id: vec![index + 101; 16].into(),
        prompt_len: tokens.len() as u32,
        tokens,
        sampling: Some(v1::Sampling {
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_tokens,
            ignore_stop_tokens: true,
            ..Default::default()
        }),
        remaining_ms: 600_000,
        node_epoch: epoch.clone(),
        weight_version: 1,
        ..Default::default()
    };
    v1::DecodeRequest { attempt: Some(attempt), prefill: None }
}

/// Description of a cluster. Settings are environment variables, as an operator would set them.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    pub prefill: usize,
    pub decode: usize,
    pub dtype: &'static str,
    pub model: PathBuf,
    pub load_format: &'static str,
    /// Settings of all processes.
    pub settings: BTreeMap<String, String>,
    /// Settings of the prefill nodes only and of the decode nodes only.
    pub prefill_settings: BTreeMap<String, String>,
    pub decode_settings: BTreeMap<String, String>,
    /// GPU UUIDs of each node's ranks, prefill nodes first. If empty, nodes choose.
    pub gpus: Vec<Vec<String>>,
}

impl ClusterSpec {
    /// Returns one prefill and one decode node with the cut model in f32.
    pub fn smollm2() -> Self {
        Self { model: smollm2(), ..Self::of(1, 1) }
    }

    /// Returns one prefill and one decode node with all layers of SmolLM2 in f32.
    pub fn whole_smollm2() -> Self {
        Self { model: whole_smollm2(), ..Self::of(1, 1) }
    }

    /// Returns a cluster of this many prefill and decode nodes in f32. The caller sets the model.
    /// Prefill nodes prefill every prompt, so that each test of a transfer has one.
    pub fn of(prefill: usize, decode: usize) -> Self {
        Self {
            prefill,
            decode,
            dtype: "f32",
            model: PathBuf::new(),
            load_format: "auto",
            settings: BTreeMap::from([("BATON_ROUTER_DISAGGREGATE".into(), "always".into())]),
            prefill_settings: BTreeMap::new(),
            decode_settings: BTreeMap::new(),
            gpus: Vec::new(),
        }
    }

    pub fn nodes(mut self, prefill: usize, decode: usize) -> Self {
        (self.prefill, self.decode) = (prefill, decode);
        self
    }

    pub fn set(mut self, name: &str, value: impl ToString) -> Self {
        self.settings.insert(name.to_owned(), value.to_string());
        self
    }

    pub fn set_prefill(mut self, name: &str, value: impl ToString) -> Self {
        self.prefill_settings.insert(name.to_owned(), value.to_string());
        self
    }

    pub fn set_decode(mut self, name: &str, value: impl ToString) -> Self {
        self.decode_settings.insert(name.to_owned(), value.to_string());
        self
    }
}

/// Returns the path of SmolLM2 with eight of its 30 layers, with which most tests compute.
pub fn smollm2() -> PathBuf {
    cut_model(&whole_smollm2(), &bin_dir())
}

/// Returns the path of the model file that `make model` downloads.
pub fn whole_smollm2() -> PathBuf {
    let path = match std::env::var_os("BATON_TEST_MODEL") {
        Some(path) => PathBuf::from(path),
        None => Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"),
    };
    assert!(path.exists(), "{} is missing: run `make model`", path.display());
    path
}

/// Environment variable: folder of the service binaries, if they are not next to the test binary.
pub const BINARIES: &str = "BATON_TEST_BINARIES";

/// Returns the folder of the service binaries: the one that `BATON_TEST_BINARIES` names, otherwise
/// the test binary's build folder.
pub fn bin_dir() -> PathBuf {
    if let Some(folder) = std::env::var_os(BINARIES) {
        return folder.into();
    }
    let test = std::env::current_exe().expect("a running test has a path");
    let folder = test.parent().and_then(Path::parent).expect("tests lie in target/PROFILE/deps");
    folder.to_owned()
}

/// Contents of a service's ready file.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Ready {
    #[serde(default)]
    pub http: String,
    #[serde(default)]
    pub grpc: String,
    #[serde(default)]
    pub metrics: String,
    #[serde(default)]
    pub admin: String,
    #[serde(default)]
    pub control: String,
    #[serde(default)]
    pub data: String,
}

/// One service process. Dropping it kills the process.
pub struct Service {
    pub name: String,
    pub ready: Ready,
    child: Child,
    log: PathBuf,
}

impl Service {
    /// Starts a binary and waits until it has written its ready file.
    pub fn start(
        folder: &Path,
        name: &str,
        program: &str,
        settings: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let mut service = Self::spawn(folder, name, program, settings)?;
        service.wait_ready(folder)?;
        Ok(service)
    }

    fn spawn(
        folder: &Path,
        name: &str,
        program: &str,
        settings: &BTreeMap<String, String>,
    ) -> Result<Self> {
        Self::spawn_by(&[], folder, name, program, settings)
    }

    /// Starts a binary through the command `wrapper`, which must replace itself by the binary, such
    /// as `ip netns exec`.
    pub fn spawn_by(
        wrapper: &[&str],
        folder: &Path,
        name: &str,
        program: &str,
        settings: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let program = bin_dir().join(program);
        ensure!(
            program.exists(),
            "{} is missing: run `cargo build --workspace --bins`",
            program.display()
        );
        let log = folder.join(format!("{name}.log"));
        let ready_file = folder.join(format!("{name}.ready"));
        let _ = std::fs::remove_file(&ready_file);
        let command = wrapper.iter().map(OsStr::new).chain([program.as_os_str()]);
        let mut command = command.collect::<Vec<_>>().into_iter();
        let child = Command::new(command.next().expect("the program at least"))
            .args(command)
            .arg("--ready-file")
            .arg(&ready_file)
            .env("BATON_TELEMETRY_LOG_FORMAT", "pretty")
            .env("BATON_CLUSTER_SECRET", SECRET)
            .envs(settings)
            .stdin(Stdio::null())
            .stdout(File::create(&log)?)
            .stderr(File::options().append(true).open(&log)?)
            .spawn()
            .with_context(|| format!("cannot run {}", program.display()))?;
        Ok(Self { name: name.to_owned(), ready: Ready::default(), child, log })
    }

    /// Waits until a started process has written its ready file.
    pub fn wait_ready(&mut self, folder: &Path) -> Result<()> {
        let ready_file = folder.join(format!("{}.ready", self.name));
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            if let Ok(bytes) = std::fs::read(&ready_file) {
                self.ready = serde_json::from_slice(&bytes)
                    .with_context(|| format!("ready file of {}", self.name))?;
                return Ok(());
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended ({status}) before it was ready:\n{}", self.name, self.log_tail());
            }
            ensure!(
                Instant::now() < deadline,
                "{} was not ready in time:\n{}",
                self.name,
                self.log_tail()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns a metric of the node, summed over its labels.
    pub async fn metric(&self, name: &str) -> Result<f64> {
        Client::new(format!("http://{}", self.ready.metrics)).metric(name, "").await
    }

    /// Waits until a metric of the node, summed over its labels, has at least this value. A node
    /// sets its gauges and the counters of its KV tiers every 50 ms.
    pub async fn wait_metric(&self, name: &str, least: f64) -> Result<()> {
        let deadline = Instant::now() + DEADLINE;
        while self.metric(name).await? < least {
            ensure!(Instant::now() < deadline, "{name} never is {least}:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    /// Returns whether the node has a running or waiting sequence.
    pub async fn is_busy(&self) -> Result<bool> {
        let running = self.metric("vllm:num_requests_running").await?;
        Ok(running + self.metric("vllm:num_requests_waiting").await? > 0.0)
    }

    fn signal(&self, signal: i32) {
        // The process is a child that has not been reaped, so its id is not reused.
        let id = self.child.id().to_string();
        let status = Command::new("kill").args([format!("-{signal}"), id]).status();
        assert!(status.is_ok_and(|status| status.success()), "cannot signal {}", self.name);
    }

    /// Sends SIGKILL and waits until the process has ended.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub fn stop_signal(&self) {
        self.signal(libc::SIGSTOP);
    }

    pub fn continue_signal(&self) {
        self.signal(libc::SIGCONT);
    }

    pub fn terminate_signal(&self) {
        self.signal(libc::SIGTERM);
    }

    /// Waits for the process to end. Returns the exit code, or `None` if a signal ended the
    /// process.
    pub fn wait_end(&mut self, within: Duration) -> Result<Option<i32>> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status.code());
            }
            ensure!(Instant::now() < deadline, "{} still runs:\n{}", self.name, self.log_tail());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    pub fn log(&self) -> String {
        std::fs::read(&self.log)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Waits until the log has a line with all these words. A thread of the service writes its log.
    pub async fn wait_logged(&self, words: &[&str]) -> Result<()> {
        let deadline = Instant::now() + DEADLINE;
        while !self.log().lines().any(|line| words.iter().all(|word| line.contains(word))) {
            ensure!(Instant::now() < deadline, "no line with {words:?}:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- {} ---\n{}", self.name, self.log_tail());
        }
    }
}

/// Waits until one of the nodes has work and returns its index.
pub async fn busy_node(nodes: &[Service]) -> Result<usize> {
    let deadline = Instant::now() + DEADLINE;
    while Instant::now() < deadline {
        for (index, node) in nodes.iter().enumerate() {
            if node.is_busy().await? {
                return Ok(index);
            }
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    bail!("none of {} nodes has work", nodes.len())
}

/// Router and nodes. Dropping it kills them.
pub struct Cluster {
    pub router: Service,
    pub prefill: Vec<Service>,
    pub decode: Vec<Service>,
    spec: ClusterSpec,
    folder: tempfile::TempDir,
}

impl Cluster {
    /// Starts a cluster. Returns it with a client of its router.
    pub async fn start_with_client(spec: ClusterSpec) -> Result<(Self, Client)> {
        let cluster = Self::start(spec).await?;
        let client = Client::new(cluster.http());
        Ok((cluster, client))
    }

    /// Starts nodes and router, and waits until the router's `/health` reports every node.
    pub async fn start(spec: ClusterSpec) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut prefill = Vec::new();
        let mut decode = Vec::new();
        for index in 0..spec.prefill {
            prefill.push(spawn_node(&spec, folder.path(), "prefill", index, "127.0.0.1:0")?);
        }
        for index in 0..spec.decode {
            decode.push(spawn_node(&spec, folder.path(), "decode", index, "127.0.0.1:0")?);
        }
        for node in prefill.iter_mut().chain(&mut decode) {
            node.wait_ready(folder.path())?;
        }
        let settings = router_settings(&spec, &prefill, &decode);
        let router = Service::start(folder.path(), "router", "baton-router", &settings)?;
        let cluster = Self { router, prefill, decode, spec, folder };
        cluster.wait_nodes(cluster.spec.prefill, cluster.spec.decode).await?;
        Ok(cluster)
    }

    /// Starts another router of the same nodes, whose admin port has this address.
    pub fn start_router(&self, name: &str, admin: &str) -> Result<Service> {
        let mut settings = router_settings(&self.spec, &self.prefill, &self.decode);
        settings.insert("BATON_ROUTER_ADMIN".to_owned(), admin.to_owned());
        Service::start(self.folder.path(), name, "baton-router", &settings)
    }

    pub fn http(&self) -> String {
        format!("http://{}", self.router.ready.http)
    }

    pub fn grpc(&self) -> String {
        format!("http://{}", self.router.ready.grpc)
    }

    /// Waits until the router's `/health` reports these numbers of serving nodes, and status 200
    /// unless `decode` is 0.
    pub async fn wait_nodes(&self, prefill: usize, decode: usize) -> Result<()> {
        // Fluid nodes count in both roles.
        let is_fluid = self.spec.settings.get("BATON_ROUTER_ROLES").is_some_and(|it| it == "fluid");
        let all = prefill + decode;
        let (prefill, decode) = if is_fluid { (all, all) } else { (prefill, decode) };
        let client = Client::new(self.http());
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            let health = client.get_json("/health").await;
            if let Ok((status, health)) = &health
                && (*status == 200 || decode == 0)
                && health["prefill_nodes"].as_u64() == Some(prefill as u64)
                && health["decode_nodes"].as_u64() == Some(decode as u64)
            {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "the router does not see {prefill} prefill and {decode} decode nodes: {health:?}\n{}",
                self.router.log_tail()
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Starts one more decode node. The router must discover it.
    pub fn add_decode(&mut self) -> Result<()> {
        let index = self.decode.len();
        let mut node = spawn_node(&self.spec, self.folder.path(), "decode", index, "127.0.0.1:0")?;
        node.wait_ready(self.folder.path())?;
        self.decode.push(node);
        Ok(())
    }

    /// Starts one more prefill node. The router must discover it.
    pub fn add_prefill(&mut self) -> Result<()> {
        let index = self.prefill.len();
        let mut node = spawn_node(&self.spec, self.folder.path(), "prefill", index, "127.0.0.1:0")?;
        node.wait_ready(self.folder.path())?;
        self.prefill.push(node);
        Ok(())
    }

    /// Restarts a decode node at its old address.
    pub fn restart_decode(&mut self, index: usize) -> Result<()> {
        restart(&self.spec, self.folder.path(), "decode", index, &mut self.decode[index])
    }

    /// As [`Self::restart_decode`], for a prefill node.
    pub fn restart_prefill(&mut self, index: usize) -> Result<()> {
        restart(&self.spec, self.folder.path(), "prefill", index, &mut self.prefill[index])
    }

    pub fn all(&mut self) -> impl Iterator<Item = &mut Service> {
        self.prefill.iter_mut().chain(&mut self.decode).chain([&mut self.router])
    }

    /// Sends SIGTERM to all processes, the router first. Every process must exit with code 0.
    pub fn stop(mut self) -> Result<()> {
        self.router.terminate_signal();
        let mut codes = vec![(self.router.name.clone(), self.router.wait_end(STOP_WITHIN)?)];
        for node in self.prefill.iter().chain(&self.decode) {
            node.terminate_signal();
        }
        for node in self.prefill.iter_mut().chain(&mut self.decode) {
            codes.push((node.name.clone(), node.wait_end(STOP_WITHIN)?));
        }
        for (name, code) in codes {
            ensure!(code == Some(0), "{name} ended with {code:?}");
        }
        Ok(())
    }
}

fn restart(
    spec: &ClusterSpec,
    folder: &Path,
    role: &str,
    index: usize,
    node: &mut Service,
) -> Result<()> {
    let address = node.ready.grpc.clone();
    node.kill();
    *node = spawn_node(spec, folder, role, index, &address)?;
    node.wait_ready(folder)
}

fn router_settings(
    spec: &ClusterSpec,
    prefill: &[Service],
    decode: &[Service],
) -> BTreeMap<String, String> {
    let urls = |nodes: &[Service]| {
        let urls: Vec<String> =
            nodes.iter().map(|node| format!("http://{}", node.ready.grpc)).collect();
        urls.join(",")
    };
    let mut settings = common_settings(spec);
    settings.insert("BATON_ROUTER_HTTP".to_owned(), "127.0.0.1:0".to_owned());
    settings.insert("BATON_ROUTER_GRPC".to_owned(), "127.0.0.1:0".to_owned());
    settings.insert("BATON_ROUTER_ADMIN".to_owned(), "127.0.0.1:0".to_owned());
    // No load balancer sends requests to a router that stops.
    settings.entry("BATON_ROUTER_DRAIN_DELAY".to_owned()).or_insert("0s".to_owned());
    if !settings.contains_key("BATON_CLUSTER_ETCD") {
        if spec.prefill > 0 {
            settings.insert("BATON_CLUSTER_PREFILL".to_owned(), urls(prefill));
        }
        settings.insert("BATON_CLUSTER_DECODE".to_owned(), urls(decode));
    }
    settings
}

fn common_settings(spec: &ClusterSpec) -> BTreeMap<String, String> {
    let mut settings = spec.settings.clone();
    for (name, value) in [
        ("BATON_MODEL_PATH", spec.model.display().to_string()),
        ("BATON_MODEL_DTYPE", spec.dtype.to_owned()),
        ("BATON_MODEL_LOAD_FORMAT", spec.load_format.to_owned()),
        ("BATON_CLUSTER_SECRET", SECRET.to_owned()),
    ] {
        settings.entry(name.to_owned()).or_insert(value);
    }
    settings
}

fn spawn_node(
    spec: &ClusterSpec,
    folder: &Path,
    role: &str,
    index: usize,
    grpc: &str,
) -> Result<Service> {
    let name = format!("{role}-{index}");
    let mut settings = common_settings(spec);
    let own = if role == "prefill" { &spec.prefill_settings } else { &spec.decode_settings };
    settings.extend(own.clone());
    let before = if role == "prefill" { 0 } else { spec.prefill };
    if let Some(gpus) = spec.gpus.get(before + index) {
        settings.insert("BATON_NODE_GPU".to_owned(), gpus.join(","));
    }
    for (setting, value) in [
        ("BATON_NODE_ID", name.as_str()),
        ("BATON_NODE_GRPC", grpc),
        ("BATON_NODE_METRICS", "127.0.0.1:0"),
        ("BATON_TRANSFER_CONTROL", "127.0.0.1:0"),
        ("BATON_TRANSFER_DATA", "127.0.0.1:0"),
    ] {
        settings.entry(setting.to_owned()).or_insert_with(|| value.to_owned());
    }
    Service::spawn(folder, &name, &format!("baton-{role}-node"), &settings)
}
