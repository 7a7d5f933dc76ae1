//! Runs slow driver and NCCL calls for several GPUs at the same time.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

/// Calls `work` for each item on a thread of its own. Returns the results in order, or the first
/// error after every thread has ended. `work` also gets a flag that is set once a thread has
/// failed.
pub(super) fn in_parallel<I: Send, T: Send>(
    name: &str,
    items: impl IntoIterator<Item = I>,
    work: impl Fn(I, &AtomicBool) -> Result<T, String> + Sync,
) -> Result<Vec<T>, String> {
    let (has_failed, work) = (&AtomicBool::new(false), &work);
    thread::scope(|scope| {
        let spawn = |item| {
            let run = move || {
                let result = work(item, has_failed);
                has_failed.fetch_or(result.is_err(), Ordering::Relaxed);
                result
            };
            let spawned = thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, run);
            has_failed.fetch_or(spawned.is_err(), Ordering::Relaxed);
            spawned.map_err(|error| format!("cannot start thread {name}: {error}"))
        };
        let threads: Vec<_> = items.into_iter().map(spawn).collect();
        let join = |thread: Result<thread::ScopedJoinHandle<'_, _>, String>| {
            thread?.join().unwrap_or_else(|_| Err(format!("thread {name} panicked")))
        };
        let results: Vec<Result<T, String>> = threads.into_iter().map(join).collect();
        results.into_iter().collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_their_order_and_the_first_error_is_returned() {
        let double = |item: u32, _: &AtomicBool| Ok(2 * item);
        assert_eq!(in_parallel("test", 0..3, double), Ok(vec![0, 2, 4]));
        assert_eq!(in_parallel("test", 0..0, double), Ok(vec![]));
        let odd = |item: u32, _: &AtomicBool| match item % 2 {
            0 => Ok(item),
            _ => Err(item.to_string()),
        };
        assert_eq!(in_parallel("test", 0..4, odd), Err("1".to_owned()));
    }
}
