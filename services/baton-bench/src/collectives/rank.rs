//! One rank of the benchmark. All ranks run the same code, each on its own GPU.

use std::{
    io::{BufRead, Write, stdin, stdout},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kernels::{
    Dtype,
    cuda::{
        AllReduceAlgorithm, AllReduceShape, Communicator, CommunicatorOptions, Compute, Context,
        CudaError, CudaGroup, DeviceMemory, Driver, Event, Graph, GroupArena, GroupHandle,
        KernelLibrary, Nccl, NcclError, Piece, Range, Stream, UniqueId,
    },
};

use super::{AllReduceLatency, BROADCAST, CollectivesArgs, FOUND, RANK_TIMEOUT};
use baton::bench::stats::median;

/// Time-out of a kernel that waits for the other ranks.
const KERNEL_TIMEOUT: Duration = Duration::from_secs(20);
/// Replays of a CUDA graph between two events.
const REPLAYS: u32 = 5;

pub(super) fn run(args: &CollectivesArgs, rank: usize) -> Result<()> {
    let bench = RankBench::start(args, rank)?;
    let mut nccl = bench.nccl(args)?;
    for size in &args.sizes {
        let row = bench.row(*size as usize * 1024, nccl.as_mut())?;
        if rank == 0 {
            say(&format!("{FOUND} {}", serde_json::to_string(&row)?))?;
        }
    }
    bench.group.check()?;
    drop(nccl);
    bench.exchange("-")?;
    if rank == 0 {
        say("end")?;
    }
    Ok(())
}

fn say(line: &str) -> Result<()> {
    let mut out = stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// Sends a message to all ranks and returns the messages of all ranks by rank.
fn exchange(ranks: usize, words: &str) -> Result<Vec<String>> {
    say(&format!("{BROADCAST} {words}"))?;
    let mut line = String::new();
    stdin().lock().read_line(&mut line)?;
    let said: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    ensure!(said.len() == ranks, "another rank exited");
    Ok(said)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Result<Vec<u8>> {
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| Ok(u8::from_str_radix(str::from_utf8(pair)?, 16)?)).collect()
}

struct RankBench {
    calls: u32,
    rounds: u32,
    ranks: usize,
    /// Group of the all-reduce over `x`.
    group: CudaGroup,
    x: Range,
    stream: Stream<Compute>,
    begin: Event,
    end: Event,
    context: Arc<Context>,
}

impl RankBench {
    fn start(args: &CollectivesArgs, rank: usize) -> Result<Self> {
        let ranks = args.gpus.len();
        let driver = Driver::open()?;
        let name = args.gpus.get(rank).context("there is no GPU for this rank")?;
        let context = Context::new(driver, driver.device_named(name)?)?;
        let library = Arc::new(KernelLibrary::open(args.kernels.path().as_deref())?);
        library.initialise(&context)?;
        let most = args.sizes.iter().max().copied().unwrap_or(1) as usize * 1024;
        // The one-shot algorithm keeps the message of every rank.
        let arena = GroupArena::new(&context, &library, (rank, ranks), most * ranks / 2)?;
        let said = exchange(ranks, &hex(&arena.handle().to_bytes()))?;
        let handles = said
            .iter()
            .map(|said| GroupHandle::from_bytes(&from_hex(said)?).context("malformed group handle"))
            .collect::<Result<Vec<_>>>()?;
        let group = CudaGroup::new(arena, &handles, KERNEL_TIMEOUT)?;
        exchange(ranks, "-")?;
        let x = DeviceMemory::new(&context, "the message", most)?.cut(most)?;
        let stream = Stream::new(&context)?;
        x.fill(0, &stream)?;
        stream.synchronize()?;
        let (begin, end) = (Event::timed(&context)?, Event::timed(&context)?);
        let (calls, rounds) = (args.calls, args.rounds);
        Ok(Self { calls, rounds, ranks, group, x, stream, begin, end, context })
    }

    fn exchange(&self, words: &str) -> Result<Vec<String>> {
        exchange(self.ranks, words)
    }

    /// Creates a NCCL communicator; `None` unless all ranks find NCCL.
    fn nccl(&self, args: &CollectivesArgs) -> Result<Option<Communicator>> {
        let rank = self.group.rank();
        let opened = Nccl::open(args.nccl.as_deref());
        let id = opened.as_ref().map_err(Clone::clone).and_then(|nccl| nccl.unique_id());
        let said = self.exchange(&id.as_ref().map_or("-".to_owned(), |id| hex(&id.0)))?;
        if said.iter().any(|said| said == "-") {
            if rank == 0 {
                let why =
                    id.err().map_or("not on every rank".to_owned(), |error| error.to_string());
                say(&format!("fault {why}"))?;
            }
            return Ok(None);
        }
        let id = from_hex(&said[0])?.try_into().ok().context("a NCCL id has 128 bytes")?;
        let (rank, ranks) = (rank as u32, self.ranks as u32);
        let options = CommunicatorOptions { rank, ranks, id: UniqueId(id), ctas: None };
        let deadline = Instant::now() + RANK_TIMEOUT;
        Ok(Some(Communicator::new(&opened?, &self.context, options, deadline)?))
    }

    fn row(&self, bytes: usize, nccl: Option<&mut Communicator>) -> Result<AllReduceLatency> {
        let shape =
            AllReduceShape { dtype: Dtype::Bf16, rows: 1, width: bytes / Dtype::Bf16.bytes() };
        let ours =
            |way| move || self.group.all_reduce(shape, &self.x, &self.x, way, true, &self.stream);
        let mut row = AllReduceLatency {
            bytes,
            one_shot_graph_us: Some(self.graph_us(ours(AllReduceAlgorithm::OneShot))?),
            two_shot_graph_us: Some(self.graph_us(ours(AllReduceAlgorithm::TwoShot))?),
            graph_us: self.graph_us(ours(AllReduceAlgorithm::Auto))?,
            eager_us: self.eager_us(ours(AllReduceAlgorithm::Auto))?,
            ..AllReduceLatency::default()
        };
        if let Some(communicator) = nccl {
            let piece = Piece::new(&self.x, 0, bytes);
            let mut theirs = || {
                let (dtype, deadline) = (Dtype::Bf16, Instant::now() + RANK_TIMEOUT);
                let outcome = communicator.all_reduce(piece, piece, dtype, &self.stream, deadline);
                outcome.map(drop).map_err(|error| match error {
                    NcclError::Cuda(error) => error,
                    error => {
                        let (call, reason) = ("ncclAllReduce", error.to_string());
                        CudaError::Call { call, code: 0, reason }
                    }
                })
            };
            row.nccl_eager_us = Some(self.eager_us(&mut theirs)?);
            row.nccl_graph_us = Some(self.graph_us(&mut theirs)?);
        }
        Ok(row)
    }

    /// Returns the µs of one call in a CUDA graph. Calls once before the capture, because first
    /// calls initialize.
    fn graph_us(&self, mut call: impl FnMut() -> Result<(), CudaError>) -> Result<f64> {
        call()?;
        self.stream.synchronize()?;
        let mut graph = Graph::capture(&self.stream, || (0..self.calls).try_for_each(|_| call()))?;
        graph.launch(&self.stream)?;
        self.timed(self.calls * REPLAYS, || {
            (0..REPLAYS).try_for_each(|_| graph.launch(&self.stream))
        })
    }

    fn eager_us(&self, mut call: impl FnMut() -> Result<(), CudaError>) -> Result<f64> {
        call()?;
        self.timed(self.calls, || (0..self.calls).try_for_each(|_| call()))
    }

    /// Returns the µs of one of `count` calls that `put` enqueues on the stream.
    fn timed(&self, count: u32, mut put: impl FnMut() -> Result<(), CudaError>) -> Result<f64> {
        let mut times = Vec::new();
        for _ in 0..self.rounds {
            self.stream.synchronize()?;
            self.begin.record(&self.stream)?;
            put()?;
            self.end.record(&self.stream)?;
            self.end.synchronize()?;
            let ms = self.end.milliseconds_since(&self.begin)?;
            times.push(f64::from(ms) * 1e3 / f64::from(count));
        }
        Ok(median(&times))
    }
}
