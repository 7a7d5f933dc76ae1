//! `baton-bench transfer`: KV transfer between two processes with the whole protocol; no model.
//!
//! This process is the receiver and starts a second process as the sender. The blocks of a transfer
//! are scattered over both memories. A transfer is timed from the reservation to the arrival of its
//! last block. Plain copies between the two GPUs give the peak.

mod forward_load;
mod loopback;
mod report;
mod sender;

use std::{
    collections::VecDeque,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, ValueEnum};
use kernels::{
    BLOCK_TOKENS, BlockId, KvArena, KvFormat, KvLayout,
    cuda::{
        Context, CopySubmission, DeviceKv, Driver, KernelLibrary, LinkRate, pull_rate,
        set_nccl_environment,
    },
};
use kv_transfer::{
    ClusterSecret, TransferConfig, TransferKind, TransferLimits, Transfers, TransportChoice,
    TransportConfig,
    api::{self, Epoch, Event, Identity, PeerAddress, TransferId},
    config::LEASE,
    control,
};
use serde::Serialize;

use crate::certificates::cluster_tls;

use self::{
    forward_load::{ForwardArgs, ForwardKind, ForwardLoad, Windows},
    report::{InterferenceRow, PlainCopy, SettingResult, TransferReport},
};
use baton::{
    bench::stats::{Percentiles, WorkloadRng},
    doctor::KernelsArg,
};

/// Time-out of every wait for the other process.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time-out for the start of the sender's node, which first fills its blocks: up to the memory of a
/// GPU.
const NODE_TIMEOUT: Duration = Duration::from_secs(600);
/// Prefix of the sender's lines for this process.
const ANSWER: &str = "sender: ";
/// Transfers before the measurement; the first one sets up the connections.
const WARM_UP: usize = 3;

#[derive(Args)]
pub(crate) struct TransferArgs {
    /// Transports to measure.
    #[arg(long, value_enum, default_value = "auto", value_delimiter = ',')]
    transport: Vec<TransportArg>,
    /// Index or UUID of the sender's and of the receiver's GPU [default: KV in host memory].
    #[arg(long, value_delimiter = ',', value_name = "FROM,TO")]
    gpus: Vec<String>,
    /// Blocks of one transfer.
    #[arg(long, default_value = "8,128,512", value_delimiter = ',')]
    blocks: Vec<u32>,
    /// Blocks of one chunk.
    #[arg(long, default_value = "16", value_delimiter = ',')]
    chunk_blocks: Vec<u32>,
    /// Size of a block in KiB, a multiple of 4; an 8B model has 2048 in bf16.
    #[arg(long, default_value_t = 2048)]
    block_kib: u32,
    /// Transfers measured one at a time, and then concurrently.
    #[arg(long, default_value_t = 30)]
    rounds: usize,
    /// Concurrent transfers.
    #[arg(long, default_value_t = 4)]
    in_flight: u32,
    /// Contiguous blocks instead of scattered ones.
    #[arg(long)]
    adjacent: bool,
    /// Maximum CTAs of nccl (`transfer.nccl_max_ctas`); 0: no limit.
    #[arg(long, default_value_t = 4)]
    ctas: u32,
    /// Maximum number of connections of tcp (`transfer.tcp_connections`).
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=16))]
    tcp_connections: u32,
    /// Gather of scattered blocks for nccl [default: kernel, as in nodes; copies if the kernel
    /// library is missing].
    #[arg(long, value_enum)]
    gather: Option<Gather>,
    #[command(flatten)]
    kernels: KernelsArg,
    #[command(flatten)]
    forward: ForwardArgs,
    /// Verify the hash of chunks between GPUs.
    #[arg(long)]
    verify: bool,
    /// Folder of `baton-bench certificates`: tcp speaks TLS.
    #[arg(long, value_name = "FOLDER")]
    certificates: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// This process is the sender.
    #[arg(long, hide = true)]
    sender: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TransportArg {
    Auto,
    Tcp,
    Ipc,
    Nccl,
}

impl TransportArg {
    fn choice(self) -> TransportChoice {
        match self {
            Self::Auto => TransportChoice::Auto,
            Self::Tcp => TransportChoice::Only(TransferKind::Tcp),
            Self::Ipc => TransportChoice::Only(TransferKind::Ipc),
            Self::Nccl => TransportChoice::Only(TransferKind::Nccl),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Tcp => "tcp",
            Self::Ipc => "ipc",
            Self::Nccl => "nccl",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Gather {
    /// One copy for each contiguous run of blocks.
    Copies,
    /// One kernel for all blocks; needs the kernel library.
    Kernel,
}

pub(crate) fn run(args: TransferArgs) -> Result<()> {
    check(&args)?;
    if !args.gpus.is_empty() {
        // Before the first thread, because it changes the environment; the sender does the same.
        set_nccl_environment(args.transport.contains(&TransportArg::Nccl))?;
    }
    if args.sender {
        return sender::run(&args);
    }
    let report = measure(&args)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{report}");
    }
    Ok(())
}

fn check(args: &TransferArgs) -> Result<()> {
    let allowed = |name: &str, values: &[u32], most: u32| {
        let bad = values.iter().find(|value| !(1..=most).contains(*value));
        bad.map_or(Ok(()), |value| bail!("invalid --{name}: {value}; expected 1 to {most}"))
    };
    ensure!(
        matches!(args.gpus.len(), 0 | 2),
        "invalid --gpus: {}; expected two GPUs",
        args.gpus.join(",")
    );
    allowed("blocks", &args.blocks, 100_000)?;
    allowed("chunk-blocks", &args.chunk_blocks, 100_000)?;
    allowed("in-flight", &[args.in_flight], 64)?;
    ensure!(args.ctas <= 64, "invalid --ctas: {}; expected 0 to 64", args.ctas);
    allowed("block-kib", &[args.block_kib], 256 << 10)?;
    ensure!(
        args.block_kib.is_multiple_of(4),
        "invalid --block-kib: {}; expected a multiple of 4",
        args.block_kib
    );
    ensure!(
        (1..=10_000).contains(&args.rounds),
        "invalid --rounds: {}; expected 1 to 10000",
        args.rounds
    );
    Ok(())
}

/// Returns a layout with blocks of the requested size.
fn layout(args: &TransferArgs) -> KvLayout {
    let layer_count = args.block_kib as usize / 4;
    KvLayout { layer_count, kv_head_count: 1, head_dim: 64, format: KvFormat::Bf16 }
}

/// Returns the blocks of all concurrent transfers.
fn pool_blocks(args: &TransferArgs) -> u32 {
    args.blocks.iter().max().copied().unwrap_or(1) * args.in_flight
}

fn arena(args: &TransferArgs, gpu: Option<&str>) -> Result<Arc<KvArena>> {
    Ok(arena_and_gather(args, gpu)?.0)
}

/// Creates the arena; on a GPU also returns the gather of scattered blocks for nccl.
fn arena_and_gather(
    args: &TransferArgs,
    gpu: Option<&str>,
) -> Result<(Arc<KvArena>, Option<Gather>)> {
    let (layout, blocks) = (layout(args), pool_blocks(args));
    let Some(gpu) = gpu else { return Ok((KvArena::host(layout, blocks)?, None)) };
    let driver = Driver::open()?;
    let context = Context::new(driver, driver.device_named(gpu)?)?;
    let kv = DeviceKv::new(&context, layout, blocks)?;
    let gather = match gathering(args)? {
        Some(library) => {
            kv.move_with(library)?;
            Gather::Kernel
        }
        None => Gather::Copies,
    };
    Ok((KvArena::remote(kv)?, Some(gather)))
}

/// Returns the kernel library that gathers scattered blocks; `None` if copies do.
fn gathering(args: &TransferArgs) -> Result<Option<Arc<KernelLibrary>>> {
    let library = || KernelLibrary::open(args.kernels.path().as_deref()).map(Arc::new);
    Ok(match args.gather {
        Some(Gather::Copies) => None,
        Some(Gather::Kernel) => Some(library()?),
        None => library().ok(),
    })
}

/// Returns the blocks of each concurrent transfer, the same for every round.
fn places(args: &TransferArgs, blocks: u32, seed: u64) -> Vec<Vec<BlockId>> {
    let mut ids: Vec<BlockId> = (0..pool_blocks(args)).map(BlockId).collect();
    if !args.adjacent {
        let mut random = WorkloadRng::new(seed);
        for last in (1..ids.len()).rev() {
            ids.swap(last, (random.next_u64() % (last as u64 + 1)) as usize);
        }
    }
    ids.chunks(blocks as usize).take(args.in_flight as usize).map(<[_]>::to_vec).collect()
}

/// Returns the blocks to compare: comparing all takes longer than the measurement.
fn checked(blocks: &[BlockId]) -> impl Iterator<Item = BlockId> + '_ {
    blocks.iter().copied().step_by(1 + blocks.len() / 8)
}

/// Seeds of the scattered block lists.
const SENDER_SEED: u64 = 1;
const RECEIVER_SEED: u64 = 2;

/// Returns the bytes of a block of the sender.
fn pattern(block: BlockId, bytes: usize) -> Vec<u8> {
    let mut random = WorkloadRng::new(u64::from(block.0) + 1);
    let mut pattern = Vec::with_capacity(bytes + 8);
    while pattern.len() < bytes {
        pattern.extend_from_slice(&random.next_u64().to_le_bytes());
    }
    pattern.truncate(bytes);
    pattern
}

/// One side of the transfers, for one setting.
struct TransferNode {
    transfers: Transfers,
    arena: Arc<KvArena>,
    address: PeerAddress,
}

impl TransferNode {
    fn start(
        args: &TransferArgs,
        name: &str,
        arena: &Arc<KvArena>,
        transport: TransportChoice,
        chunk_blocks: u32,
        sink: impl FnMut(Event) + Send + 'static,
    ) -> Result<Self> {
        let mut epoch = [0; 16];
        getrandom::fill(&mut epoch).context("no random numbers")?;
        let epoch = Epoch(u128::from_be_bytes(epoch));
        let loopback = "127.0.0.1:0".parse()?;
        let config = TransferConfig {
            node_id: name.to_owned(),
            epoch,
            identity: Identity {
                model_fingerprint: 1,
                weight_version: 1,
                kv_layout: arena.layout().to_string(),
                block_size: BLOCK_TOKENS as u32,
                dtype: arena.layout().format.to_string(),
                tp: 1,
                protocol_min: control::PROTOCOL_MIN,
                protocol_max: control::PROTOCOL_MAX,
            },
            secret: ClusterSecret::new("known to everybody, for a moment")?,
            control_bind: loopback,
            data_bind: loopback,
            advertise_host: "127.0.0.1".to_owned(),
            limits: TransferLimits {
                chunk_bytes_max: chunk_blocks as usize * arena.block_bytes(),
                ..TransferLimits::default()
            },
            transport: TransportConfig {
                choice: transport,
                verify: args.verify,
                nccl_max_ctas: (args.ctas > 0).then_some(args.ctas),
                tcp_connections: args.tcp_connections,
                has_rdma: kv_transfer::has_rdma(),
            },
            host: kv_transfer::host_id(),
            tls: args.certificates.as_deref().map(cluster_tls).transpose()?,
        };
        let transfers = Transfers::start(config, Arc::clone(arena), sink)?;
        let address = PeerAddress {
            node_id: name.to_owned(),
            epoch,
            control_endpoint: transfers.control_endpoint().to_owned(),
        };
        Ok(Self { transfers, arena: Arc::clone(arena), address })
    }
}

fn measure(args: &TransferArgs) -> Result<TransferReport> {
    let gpus: Vec<Option<&str>> = match &args.gpus[..] {
        [from, to] => vec![Some(from), Some(to)],
        _ => vec![None, None],
    };
    let plain_copies = match gpus[..] {
        [Some(from), Some(to)] => plain_copies(args, from, to)?,
        _ => Vec::new(),
    };
    let loopback_gb_per_s = match args.transport.contains(&TransportArg::Tcp) {
        true => Some(loopback::rate(args.tcp_connections)?),
        false => None,
    };
    // The sender has the same arguments and gathers in the same way.
    let (arena, gather) = arena_and_gather(args, gpus[1])?;
    let mut sender = Sender::start()?;
    let mut forward_load = match (&args.forward.model, gpus[1]) {
        (Some(_), Some(gpu)) => Some(ForwardLoad::start(args, gpu, ForwardKind::Decode)?),
        _ => None,
    };
    let mut rows = Vec::new();
    for &transport in &args.transport {
        for &chunk_blocks in &args.chunk_blocks {
            for &blocks in &args.blocks {
                let setting = TransferSetting { transport, blocks, chunk_blocks };
                let row = measure_one(args, &arena, &mut sender, forward_load.as_mut(), setting);
                rows.push(row.with_context(|| {
                    format!("{} of {blocks} blocks by {chunk_blocks}", transport.name())
                })?);
            }
        }
    }
    let (block_bytes, in_flight) = (arena.block_bytes(), args.in_flight);
    Ok(TransferReport { block_bytes, in_flight, gather, plain_copies, loopback_gb_per_s, rows })
}

fn plain_copies(args: &TransferArgs, from: &str, to: &str) -> Result<Vec<PlainCopy>> {
    const BYTES: usize = 256 << 20;
    let driver = Driver::open()?;
    let from = Context::new(driver, driver.device_named(from)?)?;
    let to = Context::new(driver, driver.device_named(to)?)?;
    let block_bytes = ((args.block_kib as usize) << 10).min(BYTES);
    let measured = |(piece_bytes, pieces)| {
        let together =
            if pieces > 1 { CopySubmission::Batch { pieces } } else { CopySubmission::Single };
        let LinkRate { gb_per_s, latency } = pull_rate(&from, &to, BYTES, piece_bytes, together)?;
        let latency_us = latency.as_secs_f64() * 1e6;
        Ok(PlainCopy { piece_bytes, together: pieces, gb_per_s, latency_us })
    };
    [(BYTES, 1), (block_bytes, 1), (block_bytes, 16)].into_iter().map(measured).collect()
}

/// One row of the table.
#[derive(Clone, Copy)]
struct TransferSetting {
    transport: TransportArg,
    blocks: u32,
    chunk_blocks: u32,
}

fn measure_one(
    args: &TransferArgs,
    arena: &Arc<KvArena>,
    sender: &mut Sender,
    forward_load: Option<&mut ForwardLoad>,
    TransferSetting { transport, blocks, chunk_blocks }: TransferSetting,
) -> Result<SettingResult> {
    let places = places(args, blocks, RECEIVER_SEED);
    // The blocks may hold the bytes of a previous setting.
    let zeros = vec![0; arena.block_bytes()];
    for block in places.iter().flat_map(|place| checked(place)) {
        arena.write(block)?.copy_from_host(&zeros)?;
    }
    let (sink, events) = channel();
    let node = TransferNode::start(
        args,
        "receiver",
        arena,
        transport.choice(),
        chunk_blocks,
        move |event| {
            // Fails when the receiver is dropped.
            let _ = sink.send(event);
        },
    )?;
    let peer = sender.become_node(transport, blocks, chunk_blocks, &node.address)?;
    let run = TransferRun { node: &node, peer: &peer, places: &places, events: &events };
    let mut next = 0_u128;
    let begin = Instant::now();
    run.transfer(sender, &mut next, 1, 1)?;
    let first_contact_ms = begin.elapsed().as_secs_f64() * 1e3;
    run.transfer(sender, &mut next, WARM_UP, 1)?;
    let alone = run.transfer(sender, &mut next, args.rounds, 1)?;
    let begin = Instant::now();
    run.transfer(sender, &mut next, args.rounds, args.in_flight)?;
    let together = begin.elapsed().as_secs_f64();
    let interference = forward_load
        .map(|forward_load| run.interference(args, sender, &mut next, forward_load, blocks));
    let interference = interference.transpose()?;
    run.check(args, blocks, next)?;
    let metrics = node.transfers.metrics();
    let path = metrics.peers.first().map(|peer| peer.path.clone()).unwrap_or_default();
    node.transfers.shutdown()?;
    let bytes = f64::from(blocks) * arena.block_bytes() as f64;
    let alone_us = Percentiles::of(alone.iter().map(|time| time.as_secs_f64() * 1e6).collect());
    Ok(SettingResult {
        transport: path,
        blocks,
        chunk_blocks,
        mib: bytes / f64::from(1 << 20),
        alone_us,
        alone_gb_per_s: bytes / 1e3 / alone_us.p50,
        together_gb_per_s: bytes * args.rounds as f64 / 1e9 / together,
        first_contact_ms,
        interference,
    })
}

/// The measurement of one setting.
struct TransferRun<'a> {
    node: &'a TransferNode,
    peer: &'a PeerAddress,
    places: &'a [Vec<BlockId>],
    events: &'a Receiver<Event>,
}

impl TransferRun<'_> {
    /// Runs `count` transfers, at most `together` concurrently, and returns their durations.
    fn transfer(
        &self,
        sender: &mut Sender,
        next: &mut u128,
        count: usize,
        together: u32,
    ) -> Result<Vec<Duration>> {
        let ids: Vec<TransferId> =
            (0..count as u128).map(|index| TransferId(*next + index)).collect();
        *next += count as u128;
        // The sender expects all transfers before the first begins.
        sender.expect(&ids)?;
        let mut waiting: VecDeque<TransferId> = ids.into();
        let mut going: Vec<(TransferId, Instant)> = Vec::new();
        let mut times = Vec::with_capacity(count);
        while times.len() < count {
            // Transfers may arrive in another order. The next one starts once its blocks are free.
            while going.len() < together as usize
                && let Some(index) = waiting.iter().position(|id| {
                    !going.iter().any(|(other, _)| self.place(*other) == self.place(*id))
                })
                && let Some(transfer) = waiting.remove(index)
            {
                going.push((transfer, Instant::now()));
                self.receive(transfer)?;
            }
            match self.events.recv_timeout(TIMEOUT).context("no block arrived in time")? {
                Event::Arrived { transfer, .. } => {
                    let arrived = Instant::now();
                    let index = going.iter().position(|(id, _)| *id == transfer);
                    let (_, begun) = going.swap_remove(index.context("unknown transfer")?);
                    times.push(arrived - begun);
                }
                other => bail!("a transfer failed: {other:?}"),
            }
        }
        Ok(times)
    }

    /// Runs transfers in every other time window, during forward passes on both GPUs.
    fn interference(
        &self,
        args: &TransferArgs,
        sender: &mut Sender,
        next: &mut u128,
        forward_load: &mut ForwardLoad,
        blocks: u32,
    ) -> Result<InterferenceRow> {
        let window = Duration::from_secs(args.forward.window_s);
        let every = Duration::from_millis(args.forward.every_ms);
        let mut windows = [Windows::default(), Windows::default()];
        let (mut times, mut busy_time) = (Vec::new(), Duration::ZERO);
        sender.request("forget", "forgotten")?;
        for _ in 0..args.forward.windows {
            for (kind, windows) in ["quiet", "busy"].into_iter().zip(&mut windows) {
                let begin = Instant::now();
                sender.request(&format!("begin {kind}"), "begun")?;
                windows.begin();
                match kind {
                    "quiet" => thread::sleep(window),
                    _ => {
                        while begin.elapsed() < window {
                            let begun = Instant::now();
                            times.extend(self.transfer(sender, next, 1, 1)?);
                            thread::sleep(every.saturating_sub(begun.elapsed()));
                        }
                        busy_time += begin.elapsed();
                    }
                }
                windows.end();
                sender.request(&format!("end {kind}"), "ended")?;
            }
        }
        sender.send_line("stats")?;
        let prompts = serde_json::from_str(&sender.receive_line(TIMEOUT)?)?;
        let bytes = times.len() as f64 * f64::from(blocks) * self.node.arena.block_bytes() as f64;
        let transfer_us = times.iter().map(|time| time.as_secs_f64() * 1e6).collect();
        Ok(InterferenceRow {
            transfer_us: Percentiles::of(transfer_us),
            gb_per_s: bytes / 1e9 / busy_time.as_secs_f64(),
            prompts,
            decoding: forward_load.stats(&windows)?,
        })
    }

    /// Returns the index of the blocks of a transfer, on both sides.
    fn place(&self, transfer: TransferId) -> usize {
        transfer.0 as usize % self.places.len()
    }

    fn receive(&self, transfer: TransferId) -> Result<()> {
        let place = self.place(transfer);
        Ok(self.node.transfers.command(api::Command::Receive {
            transfer,
            peer: self.peer.clone(),
            prompt_hash: transfer.0,
            first_block: 0,
            blocks: self.places[place].clone(),
            answer_timeout: LEASE,
            deadline: TIMEOUT,
            traceparent: String::new(),
        })?)
    }

    /// Compares the received bytes of the used blocks with the sender's bytes.
    fn check(&self, args: &TransferArgs, blocks: u32, transfers: u128) -> Result<()> {
        let sent = places(args, blocks, SENDER_SEED);
        let used = usize::try_from(transfers).unwrap_or(usize::MAX);
        for (from, to) in sent.iter().zip(self.places).take(used) {
            for (from, to) in checked(from).zip(checked(to)) {
                let guard = self.node.arena.read(to)?;
                let mut found = vec![0; guard.byte_count()];
                guard.copy_to_host(&mut found)?;
                ensure!(
                    found == pattern(from, found.len()),
                    "{to:?} does not hold the bytes that were sent"
                );
            }
        }
        Ok(())
    }
}

/// The sending process.
struct Sender {
    child: Child,
    stdin: ChildStdin,
    /// Its answers.
    lines: Receiver<String>,
}

impl Sender {
    /// Starts this program again with its own arguments.
    fn start() -> Result<Self> {
        let program = std::env::current_exe().context("cannot find the path of this program")?;
        let mut child = Command::new(program)
            .args(std::env::args_os().skip(1))
            .arg("--sender")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the sending process")?;
        let stdin = child.stdin.take().context("the sending process has no standard input")?;
        let stdout = BufReader::new(
            child.stdout.take().context("the sending process has no standard output")?,
        );
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                match line.strip_prefix(ANSWER) {
                    // Fails when the receiver is dropped.
                    Some(answer) => drop(sender.send(answer.to_owned())),
                    None => eprintln!("{line}"),
                }
            }
        });
        Ok(Self { child, stdin, lines })
    }

    /// Returns the next answer.
    fn receive_line(&self, timeout: Duration) -> Result<String> {
        self.lines
            .recv_timeout(timeout)
            .context("the sending process exited or did not answer in time")
    }

    fn send_line(&mut self, line: &str) -> Result<()> {
        writeln!(self.stdin, "{line}").context("the sending process exited")
    }

    /// Starts the sender's node for this setting and returns its address.
    fn become_node(
        &mut self,
        transport: TransportArg,
        blocks: u32,
        chunk_blocks: u32,
        us: &PeerAddress,
    ) -> Result<PeerAddress> {
        let (name, epoch, endpoint) = (transport.name(), us.epoch, &us.control_endpoint);
        self.send_line(&format!("node {name} {blocks} {chunk_blocks} {epoch} {endpoint}"))?;
        let line = self.receive_line(NODE_TIMEOUT)?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["node", epoch, endpoint] = words[..] else {
            bail!("malformed answer of the sending process: {line:?}")
        };
        Ok(PeerAddress {
            node_id: "sender".to_owned(),
            epoch: Epoch(u128::from_str_radix(epoch, 16)?),
            control_endpoint: endpoint.to_owned(),
        })
    }

    /// Announces transfers to the sender.
    fn expect(&mut self, transfers: &[TransferId]) -> Result<()> {
        let ids: Vec<String> = transfers.iter().map(TransferId::to_string).collect();
        self.request(&format!("expect {}", ids.join(" ")), "expected")
    }

    fn request(&mut self, line: &str, wanted: &str) -> Result<()> {
        self.send_line(line)?;
        let line = self.receive_line(TIMEOUT)?;
        ensure!(line == wanted, "the sending process answered {line:?}; expected {wanted:?}");
        Ok(())
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: TransferArgs,
    }

    fn parsed(flags: &[&str]) -> TransferArgs {
        let none = ["transfer", "--kernels", "/no/such/libbaton_kernels.so"];
        Line::try_parse_from([&none, flags].concat()).unwrap().args
    }

    #[test]
    fn missing_kernel_library_means_copies_unless_the_kernel_was_requested() {
        for flags in [&[][..], &["--gather", "copies"]] {
            assert!(gathering(&parsed(flags)).unwrap().is_none(), "{flags:?}");
        }
        let error = gathering(&parsed(&["--gather", "kernel"])).unwrap_err().to_string();
        assert!(error.contains("/no/such/libbaton_kernels.so"), "{error}");
    }

    #[test]
    fn host_memory_needs_no_gather() {
        let args = parsed(&["--block-kib", "4", "--blocks", "2"]);
        let (arena, gather) = arena_and_gather(&args, None).unwrap();
        assert_eq!((arena.block_bytes(), gather), (4 << 10, None));
    }
}
