//! The thread behind an executor, and the channels to it.

use std::{
    io,
    thread::{self, JoinHandle},
    time::Duration,
};

use crossbeam_channel::{Receiver, RecvError, Sender, bounded, select};

use super::{CollectWaker, ExecutorError, panic_message};

/// A named thread that turns jobs into results, in order. It ends after the first error. Both
/// channels have room for every step in flight, so neither side ever blocks on a send. Dropping the
/// worker joins the thread.
#[derive(Debug)]
pub(super) struct Worker<J, R, E> {
    /// `None` once the worker is closed.
    jobs: Option<Sender<J>>,
    results: Receiver<Result<R, E>>,
    waker: CollectWaker,
    woken: Receiver<()>,
    /// `None` once the thread was joined.
    thread: Option<JoinHandle<()>>,
}

impl<J: Send + 'static, R: Send + 'static, E: Into<ExecutorError> + Send + 'static>
    Worker<J, R, E>
{
    pub(super) fn start(
        name: &str,
        depth: u32,
        mut work: impl FnMut(J) -> Result<R, E> + Send + 'static,
    ) -> io::Result<Self> {
        let (jobs, queued) = bounded(depth as usize);
        let (answers, results) = bounded(depth as usize);
        let run = move || {
            for job in queued {
                let answer = work(job);
                let has_failed = answer.is_err();
                // The channel is closed while the executor is dropped.
                if answers.send(answer).is_err() || has_failed {
                    break;
                }
            }
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(run)?;
        let (waker, woken) = CollectWaker::new();
        Ok(Self { jobs: Some(jobs), results, waker, woken, thread: Some(thread) })
    }

    pub(super) fn waker(&self) -> CollectWaker {
        self.waker.clone()
    }

    /// Returns whether [`receive`](Self::receive) would return at once.
    pub(super) fn is_ready(&self) -> bool {
        !self.results.is_empty() || !self.woken.is_empty()
    }

    pub(super) fn send(&mut self, job: J) -> Result<(), ExecutorError> {
        let is_sent = self.jobs.as_ref().is_some_and(|jobs| jobs.try_send(job).is_ok());
        // The channel has room for every step in flight, so a failed send means that the thread
        // ended.
        if is_sent { Ok(()) } else { Err(self.ended()) }
    }

    /// Waits for the oldest result. Returns `None` after `timeout` or a wake-up.
    pub(super) fn receive(&mut self, timeout: Duration) -> Result<Option<R>, ExecutorError> {
        let answer = match self.results.try_recv() {
            Ok(answer) => Ok(answer),
            Err(_) => select! {
                recv(self.results) -> answer => answer,
                recv(self.woken) -> _ => return Ok(None),
                default(timeout) => return Ok(None),
            },
        };
        match answer {
            Ok(answer) => answer.map(Some).map_err(Into::into),
            Err(RecvError) => Err(self.ended()),
        }
    }

    /// Returns why the thread ended: the error of an earlier job, or its panic.
    fn ended(&mut self) -> ExecutorError {
        if let Some(error) = self.results.try_iter().find_map(Result::err) {
            return error.into();
        }
        let reason = match self.thread.take().map(JoinHandle::join) {
            Some(Err(panic)) => panic_message(panic.as_ref()),
            Some(Ok(())) | None => "the thread ended".to_owned(),
        };
        ExecutorError::Stopped { reason }
    }
}

impl<J, R, E> Worker<J, R, E> {
    /// Ends and joins the thread.
    pub(super) fn close(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take()
            && let Err(panic) = thread.join()
        {
            tracing::error!(
                reason = panic_message(panic.as_ref()),
                "an executor's thread panicked"
            );
        }
    }
}

impl<J, R, E> Drop for Worker<J, R, E> {
    fn drop(&mut self) {
        self.close();
    }
}
