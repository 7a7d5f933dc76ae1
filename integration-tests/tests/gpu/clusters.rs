//! Clusters of the real binaries on GPUs. They generate the tokens of a single GPU with every
//! placement of nodes and ranks and with every transport. [`disturbed`] kills and drains their
//! processes, [`tiers`] evicts their KV, [`adapters`] loads LoRA adapters, and [`driver_calls`]
//! observes their calls of the driver.
//!
//! `BATON_TEST_BINARIES` names the folder of the binaries. With `BATON_TEST_CLUSTERS=cpu` fewer
//! nodes and ranks run, on CPUs, for machines without GPUs.

pub(crate) mod adapters;
pub(crate) mod disturbed;
pub(crate) mod driver_calls;
pub(crate) mod tiers;

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    future::Future,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use integration_tests::{
    client::{self, Client, salted_body},
    cluster::{BINARIES, Cluster, ClusterSpec},
};
use kernels::cuda::Driver;
use serde_json::{Value, json};
use tempfile::TempDir;
use test_harness::skip;
use tokio::time::timeout;

use super::bench::{lacks, require_gpus};

/// Environment variable; the value `cpu` selects clusters on CPUs.
const CLUSTERS: &str = "BATON_TEST_CLUSTERS";
const DEADLINE: Duration = Duration::from_secs(60);
/// Deadline of a whole test, which may start several clusters.
const TEST_DEADLINE: Duration = Duration::from_secs(20 * 60);
/// Smallest logit margin of a certain token. A smaller margin may vanish when a sum has another
/// order.
const CERTAIN_MARGIN: f32 = 1e-3;
/// At most one request in this many may diverge at an uncertain token. With more, the test would
/// compare too few tokens.
const REQUESTS_PER_DIVERGENCE: usize = 4;

/// Devices of the nodes.
#[derive(Clone, Debug)]
pub(crate) enum Devices {
    /// GPUs, by UUID.
    Gpus(Vec<String>),
    Cpus,
}

/// Returns the devices of the cluster tests, for one test at a time. Skips the running test if it
/// cannot run here.
pub(crate) fn place(gpus: usize) -> (Devices, MutexGuard<'static, ()>) {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if env::var_os(CLUSTERS).is_some_and(|place| place == "cpu") {
        return (Devices::Cpus, alone);
    }
    if env::var_os(BINARIES).is_none() {
        lacks(gpus, &format!("{BINARIES} does not name the folder of the binaries"));
    }
    require_gpus(gpus);
    let devices =
        Driver::open().and_then(|driver| driver.devices()).expect("the GPUs found before");
    (Devices::Gpus(devices.into_iter().map(|device| device.uuid).collect()), alone)
}

struct Request {
    prompt: Vec<u32>,
    tokens: usize,
}

/// Tokens of a single node, and the logit margin of each token over the second-best one.
struct Wanted {
    tokens: Vec<u32>,
    margins: Vec<f32>,
}

impl Wanted {
    /// Returns the answer to a completion request for `tokens` tokens.
    async fn of(client: &Client, mut body: Value, tokens: usize) -> Result<Self> {
        body["logprobs"] = json!(2);
        let mut wanted = Self { tokens: Vec::new(), margins: Vec::new() };
        for event in client.stream("/v1/completions", &body).await?.all().await? {
            wanted.tokens.extend(event.token_ids());
            if !event.is_done() {
                wanted.margins.extend(margins(&event.json()));
            }
        }
        ensure!(wanted.tokens.len() == tokens, "{} tokens", wanted.tokens.len());
        ensure!(wanted.margins.len() == tokens, "{} margins", wanted.margins.len());
        Ok(wanted)
    }
}

/// A model, requests and the expected answers.
struct Fixture {
    place: Devices,
    model: TempDir,
    requests: Vec<Request>,
    wanted: &'static [Wanted],
}

impl Fixture {
    fn new(place: Devices) -> Result<Self> {
        static WANTED: OnceLock<Vec<Wanted>> = OnceLock::new();
        let model = tempfile::tempdir()?;
        write_model(model.path(), matches!(place, Devices::Cpus))?;
        let requests = requests(&place);
        let mut fixture = Self { place, model, requests, wanted: &[] };
        fixture.wanted = match WANTED.get() {
            Some(wanted) => wanted,
            None => {
                let wanted = runtime().block_on(async {
                    let wanted = timeout(TEST_DEADLINE, fixture.single_node_answers()).await;
                    wanted.with_context(|| {
                        format!("the single node has not answered within {TEST_DEADLINE:?}")
                    })?
                })?;
                WANTED.get_or_init(|| wanted)
            }
        };
        Ok(fixture)
    }

    /// Skips the running test if nodes run on CPUs: other tests cover the same clusters there.
    fn require_gpus(&self) {
        if let Devices::Cpus = self.place {
            skip("BATON_TEST_CLUSTERS=cpu: other tests cover this cluster on CPUs");
        }
    }

    fn gpus(&self) -> usize {
        match &self.place {
            Devices::Gpus(gpus) => gpus.len(),
            Devices::Cpus => 0,
        }
    }

    /// Returns the settings of every process.
    fn settings(&self) -> BTreeMap<String, String> {
        let (device, blocks) = match self.place {
            Devices::Gpus(_) => ("cuda", 2000),
            Devices::Cpus => ("cpu", 256),
        };
        let mut settings: BTreeMap<String, String> = [
            ("BATON_NODE_DEVICE", device),
            ("BATON_NODE_BLOCKS", &blocks.to_string()),
            ("BATON_NODE_SLOTS", "16"),
            ("BATON_NODE_STEP_TOKENS", "1024"),
            ("BATON_NODE_CHUNK_TOKENS", "256"),
            // GEMM tuning may select another algorithm in each process, and with it another
            // summation order.
            ("BATON_NODE_GPU_TUNE", "0s"),
            ("BATON_TRANSFER_VERIFY", "true"),
            // Small chunks, so that every transfer has many.
            ("BATON_TRANSFER_CHUNK_BYTES", "1MiB"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        if let Ok(kernels) = env::var("BATON_TEST_KERNELS") {
            settings.insert("BATON_NODE_KERNELS".to_owned(), kernels);
        }
        settings
    }

    fn spec(&self, shape: &Shape) -> ClusterSpec {
        let mut spec = ClusterSpec {
            model: self.model.path().to_owned(),
            load_format: "dummy",
            settings: self.settings(),
            ..ClusterSpec::of(shape.prefill.len(), shape.decode.len())
        };
        for (nodes, settings) in [
            (&shape.prefill, &mut spec.prefill_settings),
            (&shape.decode, &mut spec.decode_settings),
        ] {
            if let Some(ranks) = nodes.first() {
                settings.insert("BATON_NODE_TP".to_owned(), ranks.len().to_string());
            }
        }
        if let Devices::Gpus(uuids) = &self.place {
            let nodes = shape.prefill.iter().chain(&shape.decode);
            let named = |ranks: &Vec<usize>| ranks.iter().map(|gpu| uuids[*gpu].clone()).collect();
            spec.gpus = nodes.map(named).collect();
        }
        if let Some(transport) = shape.transport {
            spec = spec.set("BATON_TRANSFER_TRANSPORT", transport);
            if transport == "nccl" {
                // The nodes' settings differ: both sides of a pair use the smaller number.
                let (name, sender) = ("BATON_TRANSFER_NCCL_MAX_CTAS", "8");
                spec.prefill_settings.insert(name.to_owned(), sender.to_owned());
            }
        }
        spec
    }

    /// Returns the tokens of every request from one decode node, one request at a time.
    async fn single_node_answers(&self) -> Result<Vec<Wanted>> {
        let shape = Shape { decode: vec![vec![0]], ..Shape::default() };
        let cluster = Cluster::start(self.spec(&shape)).await?;
        let client = Client::new(cluster.http());
        let mut all = Vec::new();
        for request in &self.requests {
            let body = salted_body(&request.prompt, request.tokens, "alone");
            all.push(Wanted::of(&client, body, request.tokens).await?);
        }
        // Otherwise a test could not detect the KV of another request.
        let distinct: BTreeSet<&[u32]> = all.iter().map(|wanted| &wanted.tokens[..8]).collect();
        ensure!(
            distinct.len() == all.len(),
            "{} distinct answers of {}",
            distinct.len(),
            all.len()
        );
        cluster.stop()?;
        Ok(all)
    }

    /// Returns whether all tokens match, or `false` if they diverge at an uncertain token. Any
    /// other difference is an error.
    fn compare(&self, index: usize, found: &[u32], what: &str) -> Result<bool> {
        let wanted = &self.wanted[index];
        let differs = |(found, wanted): (&u32, &u32)| found != wanted;
        let Some(at) = found.iter().zip(&wanted.tokens).position(differs) else { return Ok(true) };
        let (margin, found, wanted) = (wanted.margins[at], found[at], wanted.tokens[at]);
        println!(
            "{what}: request {index}, token {at} is {found}; a single node generates {wanted}, \
             with a margin of {margin}"
        );
        ensure!(
            margin < CERTAIN_MARGIN,
            "{what}: request {index}: token {at} is {found}, not {wanted}"
        );
        Ok(false)
    }
}

/// Returns each token's logit margin over the second-best one.
fn margins(event: &Value) -> Vec<f32> {
    let tops = event["choices"][0]["logprobs"]["top_logprobs"].as_array();
    let margin = |top: &Value| {
        let values = top.as_object().into_iter().flat_map(|top| top.values());
        let mut values: Vec<f32> = values.map(|value| value.as_f64().unwrap() as f32).collect();
        values.sort_by(|one, other| other.total_cmp(one));
        // Two tokens with the same text share a map entry: such a token counts as certain.
        values.get(1).map_or(f32::MAX, |second| values[0] - second)
    };
    tops.into_iter().flatten().map(margin).collect()
}

const VOCABULARY: usize = 13_000;

/// Writes a model with four KV heads, a vocabulary that is split unevenly over ranks, and a
/// byte-level tokenizer.
fn write_model(folder: &Path, is_small: bool) -> Result<()> {
    let (layers, hidden, head_dim) = if is_small { (2, 128, 32) } else { (6, 512, 64) };
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": head_dim,
        "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu",
        "bos_token_id": VOCABULARY - 2, "eos_token_id": VOCABULARY - 1
    });
    fs::write(folder.join("config.json"), config.to_string())?;
    // Byte-level BPE writes printable bytes as themselves and maps all others to code points from
    // 256 on.
    let printable = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255) && *byte != 173;
    let mut others = 256..;
    let letters: Vec<String> = (0..256_u32)
        .map(|byte| if printable(&byte) { byte } else { others.next().unwrap() })
        .map(|letter| char::from_u32(letter).unwrap().to_string())
        .collect();
    let pairs = letters.iter().flat_map(|left| letters.iter().map(move |right| (left, right)));
    // Tokens of plain text come first.
    let (plain, rest): (Vec<_>, Vec<_>) =
        pairs.partition(|(left, right)| left.is_ascii() && right.is_ascii());
    let merges: Vec<_> = plain.into_iter().chain(rest).take(VOCABULARY - 2 - 256).collect();
    let words = letters.iter().cloned();
    let words = words.chain(merges.iter().map(|(left, right)| format!("{left}{right}")));
    let special = ["<|begin|>", "<|end|>"].map(str::to_owned);
    let vocabulary: serde_json::Map<String, Value> =
        words.chain(special.clone()).enumerate().map(|(id, word)| (word, id.into())).collect();
    ensure!(vocabulary.len() == VOCABULARY, "{} words", vocabulary.len());
    let added = |(index, word): (usize, &String)| {
        json!({"id": VOCABULARY - 2 + index, "content": word, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false, "special": true})
    };
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": true});
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": special.iter().enumerate().map(added).collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": level,
        "post_processor": null,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    });
    Ok(fs::write(folder.join("tokenizer.json"), tokenizer.to_string())?)
}

/// Returns requests with prompts and answers of mixed length.
fn requests(place: &Devices) -> Vec<Request> {
    let lengths: &[(usize, usize)] = match place {
        Devices::Gpus(_) => &[
            (3, 48),
            (1990, 32),
            (17, 160),
            (700, 24),
            (260, 96),
            (1333, 40),
            (64, 24),
            (33, 200),
            (1024, 32),
            (129, 64),
        ],
        Devices::Cpus => &[(3, 12), (290, 16), (17, 40), (160, 8), (64, 20), (33, 12)],
    };
    let request = |(index, (length, tokens)): (usize, &(usize, usize))| {
        let word = |at: usize| (at * 311 + index * 101 + at / 7) % (VOCABULARY - 2);
        Request { prompt: (0..*length).map(|at| word(at) as u32).collect(), tokens: *tokens }
    };
    lengths.iter().enumerate().map(request).collect()
}

/// Outcome of a request.
enum End {
    Complete,
    /// The request failed with this error code.
    Failed(String),
}

struct Answer {
    tokens: Vec<u32>,
    end: End,
    kv_bytes: u64,
}

/// Returns the outcome of a request: complete, or failed with an error code. Fails on any other
/// response and on a time-out.
async fn ask(client: &Client, request: &Request, salt: &str) -> Result<Answer> {
    let answer = timeout(client::DEADLINE, answer(client, request, salt)).await;
    answer.with_context(|| format!("salt {salt}: not finished after {:?}", client::DEADLINE))?
}

async fn answer(client: &Client, request: &Request, salt: &str) -> Result<Answer> {
    let body = salted_body(&request.prompt, request.tokens, salt);
    let code = |error: &Value| -> Result<String> {
        Ok(error["code"].as_str().with_context(|| format!("no code: {error}"))?.to_owned())
    };
    let (mut tokens, mut end, mut kv_bytes) = (Vec::new(), None, 0);
    let headers = [("x-baton-stats", "1")];
    let mut stream = match client.try_stream("/v1/completions", &body, &headers).await? {
        Ok(stream) => stream,
        Err(refused) => {
            let end = End::Failed(code(&refused.json()["error"])?);
            return Ok(Answer { tokens, end, kv_bytes });
        }
    };
    while let Some(event) = stream.next().await? {
        ensure!(end.is_none(), "{event:?} after the final event");
        if event.is_done() {
            end = Some(End::Complete);
            continue;
        }
        let value = event.json();
        if !value["error"].is_null() {
            end = Some(End::Failed(code(&value["error"])?));
            continue;
        }
        tokens.extend(event.token_ids());
        kv_bytes = value["baton"]["kv_bytes"].as_u64().unwrap_or(kv_bytes);
    }
    let end = end.context("the stream has no final event")?;
    if let End::Complete = end {
        ensure!(tokens.len() == request.tokens, "the answer has {} tokens", tokens.len());
    }
    Ok(Answer { tokens, end, kv_bytes })
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(4).enable_all().build().unwrap()
}

/// Runs a cluster test on at least `gpus` GPUs.
fn run_on<T: Future<Output = Result<()>>>(gpus: usize, test: impl FnOnce(Arc<Fixture>) -> T) {
    let (place, _alone) = place(gpus);
    let outcome = Fixture::new(place).and_then(|fixture| {
        runtime().block_on(async {
            let outcome = timeout(TEST_DEADLINE, test(Arc::new(fixture))).await;
            outcome.with_context(|| format!("the test has not finished after {TEST_DEADLINE:?}"))?
        })
    });
    outcome.unwrap_or_else(|error| panic!("{error:#}"));
}

/// GPUs of each node's ranks.
#[derive(Clone, Debug, Default)]
struct Shape {
    prefill: Vec<Vec<usize>>,
    decode: Vec<Vec<usize>>,
    /// Value of the transport setting; `None` leaves the choice to the nodes.
    transport: Option<&'static str>,
    /// Transport that the nodes are expected to use.
    path: &'static str,
}

impl Shape {
    fn new(prefill: &[&[usize]], decode: &[&[usize]], path: &'static str) -> Self {
        let nodes = |nodes: &[&[usize]]| nodes.iter().map(|ranks| ranks.to_vec()).collect();
        Self { prefill: nodes(prefill), decode: nodes(decode), transport: None, path }
    }

    fn by(self, transport: &'static str) -> Self {
        Self { transport: Some(transport), path: transport, ..self }
    }

    fn describe(&self) -> String {
        let Self { prefill, decode, transport, path } = self;
        let transport = transport.unwrap_or("auto");
        format!("prefill on {prefill:?}, decode on {decode:?}, {transport}: {path}")
    }
}

fn assert_few_diverged(diverged: usize, complete: usize) {
    assert!(
        diverged * REQUESTS_PER_DIVERGENCE <= complete,
        "{diverged} of {complete} requests diverge at an uncertain token; expected at most one in \
         {REQUESTS_PER_DIVERGENCE}"
    );
}

/// Sends all requests at once, twice, and compares the answers with a single node's.
async fn check_cluster(fixture: &Fixture, shape: Shape) -> Result<()> {
    let begun = Instant::now();
    let what = shape.describe();
    let cluster = Cluster::start(fixture.spec(&shape)).await.with_context(|| what.clone())?;
    let ready = begun.elapsed();
    let client = Client::new(cluster.http());
    let (mut kv_bytes, mut diverged) = (0, 0);
    for salt in ["first", "second"] {
        let answers = fixture.requests.iter().map(|request| ask(&client, request, salt));
        // A panic prints the captured output of the nodes.
        let answers = try_join_all(answers).await;
        let answers = answers.unwrap_or_else(|error| panic!("{what}: {error:#}"));
        for (index, answer) in answers.iter().enumerate() {
            if let End::Failed(code) = &answer.end {
                panic!("{what}: request {index} failed with {code}");
            }
            let compared = fixture.compare(index, &answer.tokens, &what);
            diverged += usize::from(!compared.unwrap_or_else(|error| panic!("{error}")));
            kv_bytes += answer.kv_bytes;
        }
    }
    assert_few_diverged(diverged, 2 * fixture.requests.len());
    let mut paths = Vec::new();
    for node in &cluster.decode {
        let metrics = Client::new(format!("http://{}", node.ready.metrics));
        let seen = metrics.get("/metrics").await?.body;
        let seen = String::from_utf8_lossy(&seen);
        let own = seen.lines().filter(|line| line.starts_with("baton_kv_transfer_peers{"));
        paths.extend(own.map(str::to_owned));
        let fallbacks = metrics.metric("baton_kv_transfer_fallbacks_total", "").await?;
        assert_eq!(fallbacks, 0.0, "{what}: {}", node.name);
    }
    let path = format!("path=\"{}\"", shape.path);
    assert!(!paths.is_empty(), "{what}: no decode node reports a peer");
    assert!(paths.iter().all(|line| line.contains(&path)), "{what}: {paths:?}");
    assert!(kv_bytes > 0, "{what}: no KV was transferred");
    cluster.stop().with_context(|| what.clone())?;
    println!(
        "{what}: {} requests, {diverged} diverged at an uncertain token, {:.1} MB of KV; ready after \
         {:.1} s, {:.1} s in total",
        2 * fixture.requests.len(),
        kv_bytes as f64 / 1e6,
        ready.as_secs_f64(),
        begun.elapsed().as_secs_f64()
    );
    Ok(())
}

async fn check_clusters(fixture: &Fixture, shapes: Vec<Shape>) -> Result<()> {
    for shape in shapes {
        check_cluster(fixture, shape).await?;
    }
    Ok(())
}

pub(crate) fn prefill_and_decode_on_one_gpu_match_a_single_node() {
    run_on(1, async |fixture| {
        fixture.require_gpus();
        check_cluster(&fixture, Shape::new(&[&[0]], &[&[0]], "ipc")).await
    });
}

pub(crate) fn prefill_and_decode_on_two_gpus_match_by_every_transport() {
    run_on(2, async |fixture| {
        fixture.require_gpus();
        let pair = Shape::new(&[&[0]], &[&[1]], "");
        check_clusters(&fixture, ["ipc", "nccl", "tcp"].map(|by| pair.clone().by(by)).into()).await
    });
}

pub(crate) fn tp_nodes_on_two_gpus_match_a_single_node() {
    run_on(2, async |fixture| {
        let shape = |prefill, decode| Shape::new(&[prefill], &[decode], "ipc");
        let shapes = match fixture.place {
            Devices::Cpus => vec![Shape { path: "tcp", ..shape(&[0, 1], &[0, 1]) }],
            Devices::Gpus(_) => {
                vec![shape(&[0], &[0, 1]), shape(&[0, 1], &[1]), shape(&[0, 1], &[0, 1])]
            }
        };
        check_clusters(&fixture, shapes).await
    });
}

pub(crate) fn two_prefill_and_two_decode_nodes_match_a_single_node() {
    run_on(2, async |fixture| {
        let shape = match fixture.gpus() {
            // The other tests cover this cluster on CPUs.
            0 => return Ok(()),
            1..4 => Shape::new(&[&[0], &[1]], &[&[0], &[1]], "ipc"),
            _ => Shape::new(&[&[0], &[1]], &[&[2], &[3]], "ipc"),
        };
        check_cluster(&fixture, shape).await
    });
}

pub(crate) fn tp_nodes_on_four_gpus_match_a_single_node() {
    run_on(4, async |fixture| {
        fixture.require_gpus();
        let shapes = vec![
            Shape::new(&[&[0, 1]], &[&[2, 3]], "ipc"),
            Shape::new(&[&[0, 1, 2, 3]], &[&[0, 1, 2, 3]], "ipc"),
            Shape::new(&[&[0, 1]], &[&[0, 1, 2, 3]], "ipc"),
            Shape::new(&[&[0, 1, 2, 3]], &[&[3]], "ipc"),
        ];
        check_clusters(&fixture, shapes).await
    });
}
