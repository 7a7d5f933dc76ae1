//! Tests of several processes, a GPU each: this program runs again for every rank.

use std::{
    env,
    io::{BufRead, BufReader, Write, stdin},
    process::{Child, Command, Stdio},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use kernels::cuda::{Context, Driver, KernelLibrary, NCCL_ENVIRONMENT};

use super::bench::{gpu, require_gpus};

const TOLD: &str = "BATON_TEST_RANK";
const PATIENCE: Duration = Duration::from_secs(180);
/// In front of what a rank says to all, and of its wish to die by SIGKILL.
const SAYS: &str = "@all ";
const DIES: &str = "@kill";

/// This process among its test's.
pub struct Rank {
    pub rank: usize,
    pub ranks: usize,
    pub context: Arc<Context>,
    pub library: Arc<KernelLibrary>,
}

impl Rank {
    /// What every rank said, in their order, once all have.
    pub fn exchange(&self, bytes: &[u8]) -> Vec<Vec<u8>> {
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        println!("\n{SAYS}{hex}-");
        let mut line = String::new();
        stdin().read_line(&mut line).unwrap();
        let said: Vec<Vec<u8>> = line.split_whitespace().map(from_hex).collect();
        assert_eq!(said.len(), self.ranks, "another rank has ended");
        said
    }

    /// Until all are here.
    pub fn meet(&self) {
        self.exchange(&[]);
    }

    pub fn die(&self) -> ! {
        println!("\n{DIES}");
        loop {
            thread::park();
        }
    }
}

/// Ends with a sign, for nothing at all would not be seen.
fn from_hex(text: &str) -> Vec<u8> {
    let digits = text.trim_end_matches('-').as_bytes();
    let byte = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

/// Runs `test` of this module's sibling in as many processes, when there are as many GPUs. All end
/// well but those that wished to die.
pub fn on_ranks(name: &str, ranks: usize, test: impl FnOnce(Rank)) {
    on_ranks_for(name, ranks, Duration::ZERO, test);
}

/// The same for a test that takes so much longer than others.
pub fn on_ranks_for(name: &str, ranks: usize, longer: Duration, test: impl FnOnce(Rank)) {
    if let Some(told) = env::var_os(TOLD) {
        let rank: usize = told.to_str().unwrap().parse().unwrap();
        let driver = Driver::open().unwrap();
        let device = driver.devices().unwrap()[rank].clone();
        let path = env::var_os("BATON_TEST_KERNELS").map(Into::<std::path::PathBuf>::into);
        let library = Arc::new(KernelLibrary::open(path.as_deref()).unwrap());
        let context = Context::new(driver, device).unwrap();
        library.initialise(&context).unwrap();
        return test(Rank { rank, ranks, context, library });
    }
    // Held: one test at a time.
    require_gpus(ranks);
    let _alone = gpu();
    let mut family = Family::start(name, ranks);
    family.serve(PATIENCE + longer);
}

/// The processes of a test; those that are left at its end are killed.
struct Family {
    children: Vec<Child>,
    lines: mpsc::Receiver<(usize, Option<String>)>,
}

impl Family {
    fn start(name: &str, ranks: usize) -> Self {
        let (sender, lines) = mpsc::channel();
        let mut children = Vec::new();
        for rank in 0..ranks {
            let mut child = Command::new(env::current_exe().unwrap())
                .args(["--exact", &format!("gpu::{name}"), "--nocapture"])
                .env(TOLD, rank.to_string())
                .env(NCCL_ENVIRONMENT.0, NCCL_ENVIRONMENT.1)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let output = BufReader::new(child.stdout.take().unwrap());
            let sender = sender.clone();
            // Ends with the child.
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

    fn serve(&mut self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let count = self.children.len();
        let (mut said, mut ended, mut killed) =
            (vec![None; count], vec![false; count], vec![false; count]);
        while ended.contains(&false) {
            let left = deadline.saturating_duration_since(Instant::now());
            let (rank, line) = self.lines.recv_timeout(left).expect("all ranks end in time");
            match line.as_deref().map(str::trim) {
                None => ended[rank] = true,
                Some(DIES) => {
                    killed[rank] = true;
                    self.children[rank].kill().unwrap();
                }
                Some(line) => match line.strip_prefix(SAYS) {
                    Some(words) => said[rank] = Some(words.to_owned()),
                    None if line.is_empty() => {}
                    None => println!("rank {rank}: {line}"),
                },
            }
            // One that has ended says nothing more, and whoever waits for it shall fail.
            let is_said = said.iter().zip(&ended).all(|(said, ended)| said.is_some() || *ended);
            if is_said && said.iter().any(Option::is_some) {
                let words: Vec<String> = said.iter_mut().filter_map(Option::take).collect();
                for child in &mut self.children {
                    // One that has just died reads nothing.
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

impl Drop for Family {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
