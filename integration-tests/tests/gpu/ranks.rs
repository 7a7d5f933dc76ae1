//! Tests with a process and a GPU for each rank. Each rank runs this program again.

use std::{
    env,
    io::{BufRead, BufReader, Write, stdin},
    process::{Command, Stdio},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use kernels::cuda::{Context, Driver, KernelLibrary, NCCL_ENVIRONMENT};
use test_harness::KilledOnDrop;

use super::bench::{gpu, require_gpus};

const RANK_VARIABLE: &str = "BATON_TEST_RANK";
const TIMEOUT: Duration = Duration::from_secs(180);
/// Prefixes of a rank's output lines: a payload for all ranks, and a request to be killed with
/// SIGKILL.
const PAYLOAD_PREFIX: &str = "@all ";
const KILL_REQUEST: &str = "@kill";

/// Handle of a rank in its own process.
pub(crate) struct Rank {
    pub rank: usize,
    pub ranks: usize,
    pub context: Arc<Context>,
    pub library: Arc<KernelLibrary>,
}

impl Rank {
    /// Sends `bytes` to all ranks and returns every rank's bytes in rank order.
    pub(crate) fn exchange(&self, bytes: &[u8]) -> Vec<Vec<u8>> {
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        println!("\n{PAYLOAD_PREFIX}{hex}-");
        let mut line = String::new();
        stdin().read_line(&mut line).unwrap();
        let payloads: Vec<Vec<u8>> = line.split_whitespace().map(from_hex).collect();
        assert_eq!(payloads.len(), self.ranks, "another rank has exited");
        payloads
    }

    /// Waits until all ranks call this.
    pub(crate) fn barrier(&self) {
        self.exchange(&[]);
    }

    pub(crate) fn kill_self(&self) -> ! {
        println!("\n{KILL_REQUEST}");
        loop {
            thread::park();
        }
    }
}

/// Decodes an exchanged payload. Each payload ends with a dash, so that an empty one is visible.
fn from_hex(text: &str) -> Vec<u8> {
    let digits = text.trim_end_matches('-').as_bytes();
    let byte = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

/// Runs `test` in `ranks` processes if there are as many GPUs. Every process must succeed, except
/// those that asked to be killed.
pub(crate) fn on_ranks(name: &str, ranks: usize, test: impl FnOnce(Rank)) {
    on_ranks_for(name, ranks, Duration::ZERO, test);
}

/// Runs a test that may take `longer` than other tests.
pub(crate) fn on_ranks_for(name: &str, ranks: usize, longer: Duration, test: impl FnOnce(Rank)) {
    if let Some(rank) = env::var_os(RANK_VARIABLE) {
        let rank: usize = rank.to_str().unwrap().parse().unwrap();
        let driver = Driver::open().unwrap();
        let device = driver.devices().unwrap()[rank].clone();
        let path = env::var_os("BATON_TEST_KERNELS").map(Into::<std::path::PathBuf>::into);
        let library = Arc::new(KernelLibrary::open(path.as_deref()).unwrap());
        let context = Context::new(driver, device).unwrap();
        library.initialise(&context).unwrap();
        return test(Rank { rank, ranks, context, library });
    }
    // Only one test uses the GPUs at a time.
    require_gpus(ranks);
    let _alone = gpu();
    let mut processes = RankProcesses::start(name, ranks);
    processes.serve(TIMEOUT + longer);
}

/// Processes of a test.
struct RankProcesses {
    children: Vec<KilledOnDrop>,
    lines: mpsc::Receiver<(usize, Option<String>)>,
}

impl RankProcesses {
    fn start(name: &str, ranks: usize) -> Self {
        let (sender, lines) = mpsc::channel();
        let mut children = Vec::new();
        for rank in 0..ranks {
            let child = Command::new(env::current_exe().unwrap())
                .args(["--exact", &format!("gpu::{name}"), "--nocapture"])
                .env(RANK_VARIABLE, rank.to_string())
                .env(NCCL_ENVIRONMENT.0, NCCL_ENVIRONMENT.1)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut child = KilledOnDrop(child);
            let output = BufReader::new(child.stdout.take().unwrap());
            let sender = sender.clone();
            // The thread ends with the child.
            thread::spawn(move || {
                for line in output.lines().map_while(Result::ok) {
                    let _ = sender.send((rank, Some(line)));
                }
                let _ = sender.send((rank, None));
            });
            children.push(child);
        }
        Self { children, lines }
    }

    fn serve(&mut self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let count = self.children.len();
        let (mut payloads, mut ended, mut killed) =
            (vec![None; count], vec![false; count], vec![false; count]);
        while ended.contains(&false) {
            let left = deadline.saturating_duration_since(Instant::now());
            let (rank, line) =
                self.lines.recv_timeout(left).expect("time-out: a rank has not exited");
            match line.as_deref().map(str::trim) {
                None => ended[rank] = true,
                Some(KILL_REQUEST) => {
                    killed[rank] = true;
                    self.children[rank].kill().unwrap();
                }
                Some(line) => match line.strip_prefix(PAYLOAD_PREFIX) {
                    Some(words) => payloads[rank] = Some(words.to_owned()),
                    None if line.is_empty() => {}
                    None => println!("rank {rank}: {line}"),
                },
            }
            // An ended rank counts as present: the other ranks then receive too few payloads and
            // fail.
            let is_complete =
                payloads.iter().zip(&ended).all(|(payloads, ended)| payloads.is_some() || *ended);
            if is_complete && payloads.iter().any(Option::is_some) {
                let words: Vec<String> = payloads.iter_mut().filter_map(Option::take).collect();
                for child in &mut self.children {
                    // Fails if the rank has just died.
                    let _ = writeln!(child.stdin.as_mut().unwrap(), "{}", words.join(" "));
                }
            }
        }
        for (rank, child) in self.children.iter_mut().enumerate() {
            let status = child.wait().unwrap();
            assert_eq!(status.success(), !killed[rank], "rank {rank}: {status}");
        }
    }
}
