//! Threads that compute token bitmasks while the device runs a forward pass.

use std::{
    io,
    thread::{self, JoinHandle},
};

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::{
    constraint::{ComputedMask, MaskJob},
    executor::CollectWaker,
};

/// Maximum number of queued jobs. Further jobs run on the engine thread.
const WAITING_MAX: usize = 4096;

/// Runs [`MaskJob`]s on worker threads. Without threads, [`submit`](Self::submit) runs them. Dropping it
/// joins the threads.
#[derive(Debug, Default)]
pub(crate) struct MaskWorkers {
    /// Results of jobs that ran on the engine thread.
    computed: Vec<ComputedMask>,
    pool: Option<Pool>,
    /// Submitted jobs whose result was not polled yet.
    pending: usize,
}

#[derive(Debug)]
struct Pool {
    /// `None` once the pool is dropped.
    jobs: Option<Sender<MaskJob>>,
    results: Receiver<ComputedMask>,
    threads: Vec<JoinHandle<()>>,
}

impl MaskWorkers {
    /// Starts `threads` threads. A thread that has emptied the queue calls `waker`, so that the engine
    /// thread wakes about once for each batch.
    pub fn start(threads: usize, waker: &CollectWaker) -> io::Result<Self> {
        let (jobs, waiting) = bounded::<MaskJob>(WAITING_MAX);
        let (done, results) = bounded(WAITING_MAX + threads);
        let spawn = |index| {
            let (waiting, done, waker) = (waiting.clone(), done.clone(), waker.clone());
            let work = move || {
                for job in &waiting {
                    if done.send(job.run()).is_err() {
                        break;
                    }
                    if waiting.is_empty() {
                        waker.wake();
                    }
                }
            };
            thread::Builder::new().name(format!("baton-mask-{index}")).spawn(work)
        };
        let threads = (0..threads).map(spawn).collect::<io::Result<_>>()?;
        let pool = Some(Pool { jobs: Some(jobs), results, threads });
        Ok(Self { pool, ..Self::default() })
    }

    pub fn submit(&mut self, job: MaskJob) {
        self.pending += 1;
        let job = match self.pool.as_ref().and_then(|pool| pool.jobs.as_ref()) {
            None => job,
            Some(jobs) => {
                let Err(rejected) = jobs.try_send(job) else { return };
                rejected.into_inner()
            }
        };
        self.computed.push(job.run());
    }

    /// Returns the next result, if there is one.
    pub fn poll(&mut self) -> Option<ComputedMask> {
        let pool = self.pool.as_ref();
        let computed = self.computed.pop().or_else(|| pool?.results.try_recv().ok())?;
        self.pending -= 1;
        Some(computed)
    }

    /// Returns whether a job's result was not polled yet.
    pub fn is_busy(&self) -> bool {
        self.pending > 0
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A job catches its panics.
            let _ = thread.join();
        }
    }
}
