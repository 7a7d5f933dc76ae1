//! Fork-join thread pool for the operations of one backend.
//!
//! One forward pass of a small model has about two hundred parallel regions of tens of microseconds
//! each, so entering and leaving a region must cost about one microsecond. Life of a region:
//! 1. The caller writes the job, opens it in `state`, and wakes sleeping workers.
//! 2. A worker *enters* by counting itself in `state`, which succeeds only while the job is open.
//! 3. All threads inside, including the caller, claim task numbers until none is left.
//! 4. The caller closes the job and waits for the workers inside. It does not wait for a worker
//!    that was never scheduled: on a busy machine the caller does the work alone.
//!
//! Between regions a worker spins for some tens of microseconds and then parks, so that an idle
//! pool uses no CPU time.

use std::{
    any::Any,
    cell::UnsafeCell,
    hint, io,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle, Thread},
    time::{Duration, Instant},
};

use super::{affinity, disjoint_slice::DisjointSlice};

/// Time for which a thread spins before it parks. It is longer than the serial code between two
/// regions of a forward pass, and short enough to be negligible when several processes share the
/// cores.
const SPIN: Duration = Duration::from_micros(30);

/// Bits 0 to 15 of `PoolControl::state`: number of workers inside the job.
const INSIDE: u64 = (1 << 16) - 1;
/// Bit 16: whether workers may enter the job.
const OPEN: u64 = 1 << 16;
/// Lowest of the bits 17 to 63, which hold the serial number of the job, from 1 on.
const JOB_ONE: u64 = 1 << 17;

/// Minimum elements of a task. A cheap operation on fewer elements takes less time than waking a
/// thread.
const TASK_ELEMENTS_MIN: usize = 8192;

/// Maximum threads of one pool.
pub const THREADS_MAX: usize = 1024;

/// Job of one region: `run(thread, task)` for every task below `tasks`.
#[derive(Clone, Copy)]
struct RegionJob {
    run: *const (dyn Fn(usize, usize) + Sync),
    tasks: usize,
}

struct PoolControl {
    state: AtomicU64,
    /// The next task to claim.
    next: AtomicUsize,
    /// Written by the caller while the job is closed and no worker is inside; read by workers
    /// inside.
    job: UnsafeCell<Option<RegionJob>>,
    /// Per worker: true from just before it parks until it is woken.
    parked: Box<[AtomicBool]>,
    /// The caller's thread while it is parked. The last worker that leaves wakes it.
    waiting: Mutex<Option<Thread>>,
    is_waiting: AtomicBool,
    /// The first panic of the region.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
}

// SAFETY: `job` is the only part that is not Sync by itself. It is written only while no worker is
// inside and none can enter (`state` says closed and 0 inside), and read only between entering and
// leaving; both edges are acquire/release operations on `state`. The closure it points to is Sync.
unsafe impl Sync for PoolControl {}
// SAFETY: the closure that `job` points to is Sync, so any thread may call it. The pointer is
// dangling outside a region, where nothing reads it.
unsafe impl Send for PoolControl {}

/// Pool of `threads - 1` named workers in addition to the calling thread. Dropping it stops and
/// joins them.
pub struct ThreadPool {
    shared: Arc<PoolControl>,
    workers: Vec<JoinHandle<()>>,
}

impl ThreadPool {
    /// Creates a pool of `threads` threads, including the caller; the number is clamped to 1 to
    /// [`THREADS_MAX`]. Workers are named `NAME-1`, `NAME-2`, …
    pub fn new(threads: usize, name: &str) -> io::Result<Self> {
        Self::on(threads, name, &[])
    }

    /// Creates a pool whose worker `NAME-i` is pinned to `cpus[i]`. `cpus[0]` is for the caller,
    /// which this function does not pin. With an empty list no worker is pinned.
    pub fn on(threads: usize, name: &str, cpus: &[u32]) -> io::Result<Self> {
        let worker_count = threads.clamp(1, THREADS_MAX) - 1;
        let shared = Arc::new(PoolControl {
            state: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            parked: (0..worker_count).map(|_| AtomicBool::new(false)).collect(),
            waiting: Mutex::new(None),
            is_waiting: AtomicBool::new(false),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
        });
        // Built in place: when a later spawn fails, dropping the pool joins the earlier workers.
        let mut pool = Self { shared, workers: Vec::with_capacity(worker_count) };
        let (pinned, outcomes) = mpsc::channel();
        for worker in 0..worker_count {
            let (shared, pinned) = (Arc::clone(&pool.shared), pinned.clone());
            let own = cpus.get(worker + 1).copied();
            let handle =
                thread::Builder::new().name(format!("{name}-{}", worker + 1)).spawn(move || {
                    let _ = pinned.send(own.map_or(Ok(()), |cpu| affinity::pin(&[cpu])));
                    drop(pinned);
                    shared.work(worker);
                })?;
            pool.workers.push(handle);
        }
        drop(pinned);
        // Each worker reports whether it could be pinned before it takes work.
        outcomes.iter().collect::<io::Result<()>>()?;
        Ok(pool)
    }

    /// Returns the number of threads that run tasks, including the caller.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(thread, number)` for every number below `tasks`, each once, in any order and on
    /// any thread; returns when all are done. `thread` is below [`Self::threads`] and identifies
    /// the thread that runs the task. A panic in a task resumes in the caller after the other
    /// threads have stopped.
    pub fn run(&mut self, tasks: usize, task: &(dyn Fn(usize, usize) + Sync)) {
        if tasks <= 1 || self.workers.is_empty() {
            for number in 0..tasks {
                task(0, number);
            }
            return;
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime is changed. Only workers inside the job use the pointer, and
        // this function does not return or unwind before it has closed the job and the last worker
        // has left.
        let run = unsafe {
            std::mem::transmute::<
                *const (dyn Fn(usize, usize) + Sync + '_),
                *const (dyn Fn(usize, usize) + Sync + 'static),
            >(task)
        };
        // SAFETY: the previous region was closed and all workers had left before its `run`
        // returned, and `&mut self` excludes another region.
        unsafe { *shared.job.get() = Some(RegionJob { run, tasks }) };
        shared.next.store(0, Ordering::Relaxed);
        let closed = shared.state.load(Ordering::Relaxed);
        debug_assert_eq!(closed & (OPEN | INSIDE), 0, "the last region is over");
        // Sequentially consistent with `parked`: either the worker sees the job before it sleeps,
        // or the caller sees that the worker sleeps.
        shared.state.store(closed.wrapping_add(JOB_ONE) | OPEN, Ordering::SeqCst);
        for (parked, worker) in shared.parked.iter().zip(&self.workers).take(tasks - 1) {
            if parked.load(Ordering::SeqCst) && parked.swap(false, Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        shared.claim_tasks(0, tasks, task);
        shared.close_and_wait();
        let panicked = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(payload) = panicked {
            resume_unwind(payload);
        }
    }

    /// Returns the number of rows per task for `rows` rows of `width` elements: about two tasks per
    /// thread, and at least `TASK_ELEMENTS_MIN` elements per task.
    pub fn rows_per_task(&self, rows: usize, width: usize) -> usize {
        let worth = TASK_ELEMENTS_MIN.div_ceil(width.max(1));
        rows.div_ceil(2 * self.threads()).max(worth)
    }

    /// Splits `data` into pieces of `piece_len` (the last may be shorter) and calls `task(thread,
    /// piece number, piece)` for each.
    pub fn for_each_piece<T: Send>(
        &mut self,
        data: &mut [T],
        piece_len: usize,
        task: impl Fn(usize, usize, &mut [T]) + Sync,
    ) {
        assert!(piece_len > 0, "piece_len must be positive");
        let length = data.len();
        let parts = DisjointSlice::new(data);
        self.run(length.div_ceil(piece_len), &|thread, number| {
            let start = number * piece_len;
            // SAFETY: each number is claimed once, and pieces of different numbers are
            // disjoint.
            let piece = unsafe { parts.slice(start, piece_len.min(length - start)) };
            task(thread, number, piece);
        });
    }
}

impl PoolControl {
    /// Runs a worker's loop.
    fn work(&self, worker: usize) {
        let mut last_seen = 0;
        while let Some(number) = self.enter(worker, last_seen) {
            // SAFETY: this thread is inside: the job was written before it was opened, and does
            // not change before this thread leaves.
            let job = unsafe { (*self.job.get()).expect("an open job is written") };
            // SAFETY: the caller keeps the closure alive until all workers inside have left.
            let run = unsafe { &*job.run };
            self.claim_tasks(worker + 1, job.tasks, run);
            self.leave();
            last_seen = number;
        }
    }

    /// Waits for an open job that this worker has not seen, and enters it. Returns `None` when the
    /// pool stops.
    fn enter(&self, worker: usize, last_seen: u64) -> Option<u64> {
        let mut spinning_since = Instant::now();
        loop {
            for _ in 0..32 {
                if let Some(number) = self.try_enter(last_seen) {
                    return Some(number);
                }
                hint::spin_loop();
            }
            if self.stop.load(Ordering::Acquire) {
                return None;
            }
            if spinning_since.elapsed() < SPIN {
                continue;
            }
            let parked = &self.parked[worker];
            parked.store(true, Ordering::SeqCst);
            // The caller may have opened a job or stopped the pool before it saw `parked`: check
            // again.
            let state = self.state.load(Ordering::SeqCst);
            let is_new = state & OPEN != 0 && state / JOB_ONE != last_seen;
            if !is_new && !self.stop.load(Ordering::SeqCst) {
                thread::park();
            }
            parked.store(false, Ordering::SeqCst);
            spinning_since = Instant::now();
        }
    }

    fn try_enter(&self, last_seen: u64) -> Option<u64> {
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            let number = state / JOB_ONE;
            if state & OPEN == 0 || number == last_seen {
                return None;
            }
            match self.state.compare_exchange_weak(
                state,
                state + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(number),
                Err(now) => state = now,
            }
        }
    }

    fn leave(&self) {
        let before = self.state.fetch_sub(1, Ordering::SeqCst);
        let is_last = before & INSIDE == 1 && before & OPEN == 0;
        if is_last && self.is_waiting.load(Ordering::SeqCst) {
            // Do not take the entry: a late worker may find the entry of the next region here. A
            // spurious wake-up is harmless, but the last worker of that region needs the entry.
            let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(caller) = &*waiting {
                caller.unpark();
            }
        }
    }

    fn claim_tasks(&self, thread: usize, tasks: usize, run: &(dyn Fn(usize, usize) + Sync)) {
        let result = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let number = self.next.fetch_add(1, Ordering::Relaxed);
                if number >= tasks {
                    break;
                }
                run(thread, number);
            }
        }));
        if let Err(payload) = result {
            // After a panic no thread claims another task of this job.
            self.next.store(tasks, Ordering::Relaxed);
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
        }
    }

    fn close_and_wait(&self) {
        let mut inside = self.state.fetch_and(!OPEN, Ordering::SeqCst) & INSIDE;
        let waiting_since = Instant::now();
        while inside != 0 && waiting_since.elapsed() < SPIN {
            for _ in 0..32 {
                inside = self.state.load(Ordering::Acquire) & INSIDE;
                if inside == 0 {
                    return;
                }
                hint::spin_loop();
            }
        }
        if inside == 0 {
            return;
        }
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current());
        self.is_waiting.store(true, Ordering::SeqCst);
        while self.state.load(Ordering::SeqCst) & INSIDE != 0 {
            // The last worker unparks this thread. Tasks do not block, so the wait is bounded.
            thread::park();
        }
        self.is_waiting.store(false, Ordering::SeqCst);
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches panics of its tasks, so joining cannot fail.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_task_runs_exactly_once() {
        for threads in [0, 1, 2, 3, 8] {
            let mut pool = ThreadPool::new(threads, "test").unwrap();
            for tasks in [0, 1, 2, 3, 7, 100] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &|thread, number| {
                    assert!(thread < threads.max(1));
                    counts[number].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn each_worker_runs_on_its_own_cpu_and_a_missing_cpu_is_an_error() {
        // Descending, to check that the order matters.
        let mut cpus = affinity::allowed().unwrap();
        cpus.reverse();
        // A machine may have more CPUs than a pool may have threads.
        cpus.truncate(8);
        let caller = affinity::confine(&cpus[..1]).unwrap();
        let mut pool = ThreadPool::on(cpus.len(), "pinned", &cpus).unwrap();
        let found = Mutex::new(vec![None; cpus.len()]);
        // There are as many concurrent tasks as threads, so each thread takes one.
        let arrived = std::sync::Barrier::new(cpus.len());
        pool.run(cpus.len(), &|thread, _| {
            found.lock().unwrap()[thread] = Some(affinity::allowed().unwrap());
            arrived.wait();
        });
        drop(caller);
        let found = found.into_inner().unwrap();
        for (thread, cpu) in cpus.iter().enumerate() {
            assert_eq!(found[thread], Some(vec![*cpu]), "thread {thread} of {cpus:?}");
        }
        let beyond = affinity::CPUS_MAX - 1;
        assert!(ThreadPool::on(2, "pinned", &[cpus[0], beyond]).is_err());
    }

    #[test]
    fn many_small_regions_see_each_others_writes() {
        let mut pool = ThreadPool::new(4, "test").unwrap();
        let mut data = vec![0_u64; 64];
        for round in 0..5_000_u64 {
            pool.for_each_piece(&mut data, 5, |_, _, piece| {
                for value in piece {
                    assert_eq!(*value, round);
                    *value += 1;
                }
            });
        }
        assert!(data.iter().all(|&value| value == 5_000));
    }

    #[test]
    fn regions_work_after_the_workers_went_to_sleep() {
        let mut pool = ThreadPool::new(2, "test").unwrap();
        for _ in 0..50 {
            // Wait until the worker has parked, so that the next region must wake it.
            let deadline = Instant::now() + Duration::from_secs(5);
            while !pool.shared.parked[0].load(Ordering::SeqCst) {
                assert!(Instant::now() < deadline, "the idle worker did not park");
                thread::yield_now();
            }
            // The caller cannot finish before the worker has taken a task.
            let threads = Mutex::new(HashSet::new());
            pool.run(2, &|thread, _| {
                threads.lock().unwrap().insert(thread);
                let deadline = Instant::now() + Duration::from_secs(5);
                while threads.lock().unwrap().len() < 2 {
                    assert!(Instant::now() < deadline, "a thread took no task");
                    thread::yield_now();
                }
            });
        }
    }

    #[test]
    fn a_panic_in_a_task_resumes_in_the_caller_and_the_pool_survives() {
        let mut pool = ThreadPool::new(3, "test").unwrap();
        for bad in 0..20 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(20, &|_, number| assert!(number != bad, "task {number} failed"));
            }));
            let payload = result.unwrap_err();
            let message = payload.downcast_ref::<String>().unwrap();
            assert_eq!(message, &format!("task {bad} failed"));
            let done = AtomicUsize::new(0);
            pool.run(10, &|_, _| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.load(Ordering::Relaxed), 10);
        }
    }

    #[test]
    fn dropping_the_pool_joins_its_workers() {
        let pool = ThreadPool::new(4, "test").unwrap();
        let shared = Arc::downgrade(&pool.shared);
        drop(pool);
        assert!(shared.upgrade().is_none(), "no worker holds the pool's state any more");
    }

    #[test]
    fn a_thread_number_is_used_by_one_thread_at_a_time() {
        let mut pool = ThreadPool::new(4, "test").unwrap();
        let busy: Vec<Mutex<()>> = (0..4).map(|_| Mutex::new(())).collect();
        for _ in 0..500 {
            pool.run(16, &|thread, _| {
                let _alone = busy[thread].try_lock().expect("no other task has this thread number");
            });
        }
    }
}
