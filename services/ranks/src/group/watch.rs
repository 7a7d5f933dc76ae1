//! Processes of the ranks: their start, heartbeats and end, and the first failure of the group.

use std::{
    io,
    process::{Command, ExitStatus},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, bounded};
use kernels::shared::Atomics;

use super::failure::{RankFailure, RankName};
use crate::{process::ProcessHandle, rank::HEARTBEAT, rank_spec::RankSpec, ring::Bell};

/// Interval of the heartbeat check.
const WATCH_EVERY: Duration = Duration::from_millis(100);

/// State shared by the threads of a group.
#[derive(Debug)]
pub(super) struct GroupWatch {
    /// The first failure.
    pub failure: OnceLock<RankFailure>,
    /// Whether the group is stopping: then an exit of a process is not a failure.
    pub stopping: AtomicBool,
    /// Process id and handle of each rank; `None` before its start and after its end.
    pub processes: Mutex<Vec<Option<(u32, ProcessHandle)>>>,
    /// Bells that a failure rings: the bell of results, and the bell of free plan slots.
    pub bells: [Bell; 2],
}

impl GroupWatch {
    pub(super) fn fail(&self, failure: RankFailure) {
        if self.stopping.load(Ordering::Acquire) || self.failure.set(failure).is_err() {
            return;
        }
        self.kill_all();
        self.bells.iter().for_each(Bell::ring);
    }

    /// Returns whether the ranks no longer answer.
    pub(super) fn is_over(&self) -> bool {
        self.has_failed() || self.stopping.load(Ordering::Acquire)
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    pub(super) fn kill_all(&self) {
        lock(&self.processes).iter().flatten().for_each(|(_, process)| process.kill());
    }

    /// Starts the thread that starts the process of a rank and waits for its end.
    pub(super) fn keep(
        self: &Arc<Self>,
        spec: RankSpec,
        command: Arc<impl Fn(&RankSpec) -> Command + Send + Sync + 'static>,
    ) -> io::Result<JoinHandle<()>> {
        let watch = self.clone();
        let rank = spec.rank as usize;
        // Dropped once the process runs or has failed to start.
        let (starting, started) = bounded::<()>(0);
        let keep = move || {
            let name = RankName { rank: spec.rank, of: spec.of };
            let failed = |reason| watch.fail(RankFailure::Start { name, reason });
            let mut child = match command(&spec).spawn() {
                Ok(child) => child,
                Err(error) => return failed(error.to_string()),
            };
            match ProcessHandle::of_child(child.id()) {
                Ok(process) => lock(&watch.processes)[rank] = Some((child.id(), process)),
                Err(error) => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return failed(format!("cannot open a handle of its process: {error}"));
                }
            }
            drop(starting);
            // The group may have failed before the process was registered.
            if watch.has_failed() {
                watch.kill_all();
            }
            let ended = child.wait();
            lock(&watch.processes)[rank] = None;
            let how = match ended {
                Ok(status) => described(status),
                Err(error) => format!("cannot read its exit status: {error}"),
            };
            watch.fail(RankFailure::Ended { name, how });
        };
        let thread = thread::Builder::new().name(format!("baton-keeper-{rank}"));
        let keeper = thread.spawn(keep)?;
        let _ = started.recv();
        Ok(keeper)
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The values are replaced as a whole, so a panic leaves none half written.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn described(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;

    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("killed by signal {signal}"),
        (None, Some(0)) => "with exit code 0 and no message".to_owned(),
        (None, code) => {
            let code = code.map_or_else(|| "?".to_owned(), |code| code.to_string());
            format!("exit code {code}; see its log lines")
        }
    }
}

/// Watches the heartbeats until the group is dropped or a rank is silent.
pub(super) fn watch_heartbeats(
    watch: &GroupWatch,
    heartbeats: Vec<Atomics<AtomicU64>>,
    silence_max: Duration,
    stopped: &Receiver<()>,
) {
    let of = heartbeats.len() as u32;
    let mut seen: Vec<(u64, Duration)> = vec![(0, Duration::ZERO); heartbeats.len()];
    let mut last = Instant::now();
    while stopped.recv_timeout(WATCH_EVERY).is_err_and(|error| error.is_timeout()) {
        // Bounded, because this process itself may have been suspended meanwhile.
        let passed = last.elapsed().min(WATCH_EVERY + HEARTBEAT);
        last = Instant::now();
        for ((rank, heartbeat), (beats, silence)) in (0..).zip(&heartbeats).zip(&mut seen) {
            let now = heartbeat[0].load(Ordering::Relaxed);
            // A rank without a first beat is starting, which has its own deadline.
            if now != std::mem::replace(beats, now) || now == 0 {
                *silence = Duration::ZERO;
                continue;
            }
            *silence += passed;
            if *silence > silence_max {
                let name = RankName { rank, of };
                return watch.fail(RankFailure::Silent { name, silence: *silence });
            }
        }
    }
}
