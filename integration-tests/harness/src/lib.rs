//! The `main` of test programs that Rust's built-in harness cannot serve.
//!
//! A test can find out only when it runs that this machine lacks something, for example a second
//! GPU. Such a test calls [`skip`], and the program reports the test as ignored, with the reason. A
//! test can also start this program again as a helper process ([`helper`]): a peer node, a rank.
//! Helpers are listed with the tests but are not counted as tests.
//!
//! [`KilledOnDrop`] and [`output_within`] bound the lifetime of child processes, [`noise`] returns
//! pseudo-random bytes, and [`adapter`] writes LoRA adapters. Tests of the built-in harness use
//! them too.
//!
//! ```ignore
//! fn main() -> std::process::ExitCode {
//!     let tests = test_harness::tests![transfers::first, transfers::second];
//!     test_harness::main(&[("peer", peer)], tests)
//! }
//! ```

#![forbid(unsafe_code)]

pub mod adapter;

use std::{
    env,
    fmt::Debug,
    ops::{Deref, DerefMut},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    process::{Child, Command, ExitCode, Output, Stdio},
    time::{Duration, Instant},
};

use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// Names the helper that a child process runs instead of the tests.
const HELPER: &str = "BATON_TEST_HELPER";

/// The panic payload of [`skip`].
struct Skipped(String);

/// Ends the running test and reports it as skipped.
pub fn skip(reason: impl Into<String>) -> ! {
    // Unlike `panic!`, this does not print a backtrace.
    resume_unwind(Box::new(Skipped(reason.into())))
}

/// Returns a command that runs this program's helper `name`.
pub fn helper(name: &str) -> Command {
    let program = env::current_exe().expect("the running program has a path");
    let mut command = Command::new(program);
    command.env(HELPER, name);
    command
}

/// A child process. Dropping the value kills the process and waits until it has exited.
pub struct KilledOnDrop(pub Child);

impl Deref for KilledOnDrop {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for KilledOnDrop {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the output of a process that must exit by itself. Kills the process after `time`: the
/// status is then no success.
pub fn output_within(command: &mut Command, time: Duration) -> Output {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.expect("the program starts");
    let deadline = Instant::now() + time;
    while child.try_wait().expect("the child is not reaped").is_none() {
        if Instant::now() > deadline {
            child.kill().expect("the child runs");
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().expect("the output is readable")
}

/// Returns pseudo-random bytes.
pub fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed | 1;
    (0..bytes)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .collect()
}

/// Prints the percentiles of all durations and panics if their median exceeds `bound`. A single
/// duration may exceed it, because other processes can delay any process of the test.
pub fn assert_median(what: &str, durations: &[Duration], bound: Duration) {
    let mut sorted = durations.to_vec();
    sorted.sort();
    // Nearest rank.
    let percentile = |percent: usize| sorted[(sorted.len() * percent).div_ceil(100) - 1];
    let (p50, p99) = (percentile(50), percentile(99));
    println!("{what}: p50 {p50:?}, p99 {p99:?} of {}", sorted.len());
    assert!(p50 <= bound, "{what}: the median of {durations:?} exceeds {bound:?}");
}

/// The result of a test function: nothing, or an error that fails the test.
pub trait TestResult {
    /// Panics if the test failed.
    fn check(self);
}

impl TestResult for () {
    fn check(self) {}
}

impl<E: Debug> TestResult for Result<(), E> {
    fn check(self) {
        self.unwrap_or_else(|error| panic!("{error:?}"));
    }
}

/// Runs an asynchronous test on a single-threaded runtime of its own.
pub fn block_on<T>(test: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().build().expect("a runtime starts").block_on(test)
}

/// Runs an asynchronous test on a multi-threaded runtime of its own.
pub fn block_on_threads<T>(test: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.enable_all().build().expect("a runtime starts").block_on(test)
}

/// Runs one of `helpers` if this process was started by [`helper`], otherwise the tests that the
/// command line selects.
pub fn main(helpers: &[(&str, fn())], tests: Vec<Trial>) -> ExitCode {
    if let Some(name) = env::var_os(HELPER) {
        let (_, run) = helpers.iter().find(|(known, _)| name == *known).expect("a known helper");
        run();
        return ExitCode::SUCCESS;
    }
    libtest_mimic::run(&Arguments::from_args(), tests).exit_code()
}

/// Turns a function into a test. [`tests`] is the usual caller.
pub fn test(path: &str, run: fn()) -> Trial {
    let name: String = path.split_whitespace().collect();
    Trial::ignorable_test(name.clone(), move || {
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(()) => Ok(Completion::Completed),
            Err(payload) => match payload.downcast::<Skipped>() {
                Ok(skipped) => {
                    // The quiet format prints no reasons.
                    eprintln!("skipped: {name}: {}", skipped.0);
                    Ok(Completion::ignored_with(skipped.0))
                }
                Err(payload) => Err(Failed::from(message(&*payload))),
            },
        }
    })
}

/// Returns the message of a panic. The panic hook has already printed the message and its location.
fn message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panicked".into())
}

/// Lists functions as tests. The path of a function is the name of its test.
#[macro_export]
macro_rules! tests {
    ($($path:path),* $(,)?) => {
        vec![$($crate::test(stringify!($path), || $crate::TestResult::check($path()))),*]
    };
}

/// Lists asynchronous functions as tests, each on a multi-threaded runtime.
#[macro_export]
macro_rules! multi_thread_tests {
    ($($path:path),* $(,)?) => {
        vec![$($crate::test(
            stringify!($path),
            || $crate::TestResult::check($crate::block_on_threads($path())),
        )),*]
    };
}

/// Lists asynchronous functions as tests, each on a single-threaded runtime.
#[macro_export]
macro_rules! async_tests {
    ($($path:path),* $(,)?) => {
        vec![$($crate::test(
            stringify!($path),
            || $crate::TestResult::check($crate::block_on($path())),
        )),*]
    };
}
