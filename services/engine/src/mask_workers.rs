//! Threads that compute token bitmasks while the device runs a forward pass.
//!
//! A bitmask takes microseconds for most grammars, and milliseconds for a grammar near its time
//! bound. Slow jobs of a few sequences must not delay the bitmasks of other sequences: the job that
//! is expected to finish first runs first, and one of several threads runs no slow job.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::{
    constraint::{ComputedMask, MaskJob},
    executor::CollectWaker,
};

/// Maximum number of queued jobs. Further jobs run on the engine thread.
const WAITING_MAX: usize = 4096;
/// Expected time from which a job is slow: a bitmask of this time is late in most decode steps.
const SLOW: Duration = Duration::from_millis(1);

/// A thread stops looking for draft tokens after this time, so that the bitmask of the next token
/// is not late.
const DRAFTING_MAX: Duration = Duration::from_micros(500);

/// Worker threads that run [`MaskJob`]s. Without threads, [`submit`](Self::submit) runs them
/// without a limit of time: the draft tokens of a simulated node do not depend on the load of the
/// machine. Dropping this value discards the queued jobs and joins the threads.
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
    shared: Arc<SharedMaskQueue>,
    results: Receiver<ComputedMask>,
    threads: Vec<JoinHandle<()>>,
}

/// State shared by the engine thread and the workers.
#[derive(Debug)]
struct SharedMaskQueue {
    queue: Mutex<MaskQueue>,
    /// Notified when a job can be taken or the queue is closed.
    changed: Condvar,
}

#[derive(Debug)]
struct MaskQueue {
    /// Fast jobs and slow jobs.
    waiting: [BinaryHeap<Reverse<QueuedMaskJob>>; 2],
    slow_running: usize,
    slow_running_max: usize,
    is_closed: bool,
}

/// A queued job. Jobs are ordered by arrival time plus expected time (shortest job first with
/// aging), so no job starves.
#[derive(Debug)]
struct QueuedMaskJob {
    due: Instant,
    job: MaskJob,
}

impl Ord for QueuedMaskJob {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.due.cmp(&other.due)
    }
}

impl PartialOrd for QueuedMaskJob {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for QueuedMaskJob {
    fn eq(&self, other: &Self) -> bool {
        self.due == other.due
    }
}

impl Eq for QueuedMaskJob {}

fn is_slow(job: &MaskJob) -> bool {
    job.expected_time() >= SLOW
}

impl MaskQueue {
    /// Takes the next job that may run now.
    fn take(&mut self) -> Option<MaskJob> {
        let is_next = |index: &usize| *index == 0 || self.slow_running < self.slow_running_max;
        let heads = (0..2).filter(is_next);
        let heads = heads.filter_map(|index| Some((self.waiting[index].peek()?.0.due, index)));
        let (_, index) = heads.min()?;
        self.slow_running += index;
        self.waiting[index].pop().map(|Reverse(waiting)| waiting.job)
    }
}

impl SharedMaskQueue {
    fn lock(&self) -> MutexGuard<'_, MaskQueue> {
        // No code that holds the lock panics half-way through a change.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the job back if the queue is full.
    fn submit(&self, job: MaskJob) -> Option<MaskJob> {
        let mut queue = self.lock();
        if queue.waiting.iter().map(BinaryHeap::len).sum::<usize>() >= WAITING_MAX {
            return Some(job);
        }
        let due = Instant::now() + job.expected_time();
        queue.waiting[usize::from(is_slow(&job))].push(Reverse(QueuedMaskJob { due, job }));
        self.changed.notify_one();
        None
    }

    /// Discards the queued jobs. The threads end after their current job.
    fn close(&self) {
        let mut queue = self.lock();
        queue.is_closed = true;
        queue.waiting.iter_mut().for_each(BinaryHeap::clear);
        self.changed.notify_all();
    }

    /// Runs jobs until the queue is closed. Calls `waker` when no job is left to take, so that the
    /// engine thread wakes about once for each batch.
    fn work(&self, done: &Sender<ComputedMask>, waker: &CollectWaker) {
        let (mut queue, mut has_results) = (self.lock(), false);
        while !queue.is_closed {
            let Some(job) = queue.take() else {
                if std::mem::take(&mut has_results) {
                    waker.wake();
                }
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(queue);
            let is_slow = is_slow(&job);
            if done.send(job.run(DRAFTING_MAX)).is_err() {
                return;
            }
            has_results = true;
            queue = self.lock();
            if is_slow {
                queue.slow_running -= 1;
                self.changed.notify_one();
            }
        }
    }
}

impl MaskWorkers {
    /// Starts `threads` threads, which call `waker` when results can be polled.
    pub(crate) fn start(threads: usize, waker: &CollectWaker) -> io::Result<Self> {
        let queue = MaskQueue {
            waiting: Default::default(),
            slow_running: 0,
            slow_running_max: threads.saturating_sub(1).max(1),
            is_closed: false,
        };
        let shared =
            Arc::new(SharedMaskQueue { queue: Mutex::new(queue), changed: Condvar::new() });
        let (done, results) = bounded(WAITING_MAX + threads);
        let mut pool = Pool { shared, results, threads: Vec::new() };
        for index in 0..threads {
            let (shared, done, waker) = (Arc::clone(&pool.shared), done.clone(), waker.clone());
            let thread = thread::Builder::new().name(format!("baton-mask-{index}"));
            pool.threads.push(thread.spawn(move || shared.work(&done, &waker))?);
        }
        Ok(Self { pool: Some(pool), ..Self::default() })
    }

    pub(crate) fn submit(&mut self, job: MaskJob) {
        self.pending += 1;
        let computed = match &self.pool {
            Some(pool) => pool.shared.submit(job).map(|rejected| rejected.run(DRAFTING_MAX)),
            None => Some(job.run(Duration::MAX)),
        };
        self.computed.extend(computed);
    }

    /// Returns the next result, if there is one.
    pub(crate) fn poll(&mut self) -> Option<ComputedMask> {
        let pool = self.pool.as_ref();
        let computed = self.computed.pop().or_else(|| pool?.results.try_recv().ok())?;
        self.pending -= 1;
        Some(computed)
    }

    /// Returns whether a job's result was not polled yet.
    pub(crate) fn is_busy(&self) -> bool {
        self.pending > 0
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.close();
        for thread in self.threads.drain(..) {
            // A job catches its panics.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::unbounded;
    use kernels::sampling::TokenMask;

    use super::*;
    use crate::{
        constraint::{ConstraintFailure, Matcher},
        event::SequenceId,
    };

    /// A matcher that reports the start of its bitmask and waits for a turn.
    #[derive(Clone, Debug)]
    struct Gated {
        started: Sender<()>,
        turns: Receiver<()>,
    }

    impl Matcher for Gated {
        fn accept(&mut self, _: u32) -> Result<(), ConstraintFailure> {
            Ok(())
        }

        fn allowed(&mut self) -> Result<TokenMask, ConstraintFailure> {
            self.started.send(()).expect("the test waits");
            self.turns.recv().expect("the test sends a turn");
            Ok(TokenMask::new(vec![1], 1))
        }

        fn is_complete(&self) -> bool {
            false
        }

        fn boxed_clone(&self) -> Box<dyn Matcher> {
            Box::new(self.clone())
        }
    }

    /// Jobs whose bitmasks wait for turns.
    struct Gate {
        matcher: Gated,
        started: Receiver<()>,
        turns: Sender<()>,
    }

    impl Gate {
        fn new() -> Self {
            let ((begun, started), (turns, waiting)) = (unbounded(), unbounded());
            Self { matcher: Gated { started: begun, turns: waiting }, started, turns }
        }

        fn job(&self, id: u128, expected_ms: u64) -> MaskJob {
            let expected = Duration::from_millis(expected_ms);
            MaskJob::new(SequenceId(id), 0, self.matcher.boxed_clone(), expected)
        }
    }

    const WITHIN: Duration = Duration::from_secs(60);

    fn result(workers: &MaskWorkers) -> SequenceId {
        let results = &workers.pool.as_ref().expect("the workers have threads").results;
        results.recv_timeout(WITHIN).expect("a job ends").id
    }

    #[test]
    fn slow_jobs_leave_a_thread_to_fast_jobs() {
        let (slow, fast) = (Gate::new(), Gate::new());
        let mut workers = MaskWorkers::start(2, &CollectWaker::default()).unwrap();
        (1..=4).for_each(|id| workers.submit(slow.job(id, 20)));
        slow.started.recv_timeout(WITHIN).expect("one slow job runs");
        workers.submit(fast.job(5, 0));
        fast.turns.send(()).unwrap();
        assert_eq!(result(&workers), SequenceId(5));
        assert!(slow.started.is_empty(), "a second slow job runs");
        (1..=4).for_each(|_| slow.turns.send(()).unwrap());
        assert_eq!((1..=4).map(|_| result(&workers).0).collect::<Vec<_>>(), [1, 2, 3, 4]);
    }

    #[test]
    fn the_job_that_is_expected_to_finish_first_runs_first() {
        let gate = Gate::new();
        let mut workers = MaskWorkers::start(1, &CollectWaker::default()).unwrap();
        workers.submit(gate.job(1, 0));
        gate.started.recv_timeout(WITHIN).expect("the thread is busy");
        // A job that expects an hour is overtaken by every job of this test.
        for (id, expected_ms) in [(2, 3_600_000), (3, 1_800_000), (4, 0)] {
            workers.submit(gate.job(id, expected_ms));
        }
        (1..=4).for_each(|_| gate.turns.send(()).unwrap());
        assert_eq!([1, 2, 3, 4].map(|_| result(&workers).0), [1, 4, 3, 2]);
    }

    #[test]
    fn queued_jobs_are_discarded_when_the_workers_end() {
        let gate = Gate::new();
        let mut workers = MaskWorkers::start(1, &CollectWaker::default()).unwrap();
        (1..=3).for_each(|id| workers.submit(gate.job(id, 0)));
        gate.started.recv_timeout(WITHIN).expect("the first job runs");
        workers.pool.as_ref().expect("the workers have a thread").shared.close();
        (1..=3).for_each(|_| gate.turns.send(()).unwrap());
        drop(workers);
        assert!(gate.started.is_empty(), "a queued job has run");
    }
}
