//! While KV is saved to host memory and loaded from it, the engine thread of a node makes no driver
//! call that can wait.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;
use integration_tests::cluster::ClusterSpec;

use super::{Fixture, lacks, run_on, tiers};

/// Source of a library that writes driver calls to a file.
const SOURCE: &str = include_str!("driver_calls.c");
/// Functions that the library logs although they never wait.
const ENQUEUING: [&str; 2] = ["cuEventRecord", "cuGraphLaunch"];
const ENGINE_THREAD: &str = "baton-engine";

/// Compiles the library, which will write to `log`. Skips the running test without a C compiler.
fn compile(folder: &Path, log: &Path) -> PathBuf {
    let (source, library) = (folder.join("driver_calls.c"), folder.join("driver_calls.so"));
    fs::write(&source, SOURCE).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1"]).arg(format!("-DLOG=\"{}\"", log.display()));
    compiler.arg(&source).arg("-o").arg(&library).arg("-ldl");
    let Ok(compiled) = compiler.output() else { lacks(1, "needs a C compiler: cc") };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    library
}

async fn check_driver_calls(fixture: &Fixture) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let log = folder.path().join("calls");
    let library = compile(folder.path(), &log);
    let settings = |spec: ClusterSpec| {
        let spec = ClusterSpec { dtype: "bf16", ..spec };
        let spec = spec.set_decode("LD_PRELOAD", library.display());
        spec.set_decode(tiers::HOST_MEMORY, "256MiB")
    };
    let cluster = tiers::start(fixture, &[0], settings).await?;
    let started = fs::read_to_string(&log)?.len();
    tiers::restored_equals_resident(&cluster, fixture).await?;
    let written = fs::read_to_string(&log)?;
    let calls = written[started..].lines().filter_map(|line| line.rsplit_once(' '));
    let (enqueuing, waiting): (Vec<_>, Vec<_>) =
        calls.partition(|(_, function)| ENQUEUING.contains(function));
    // Otherwise the library would not see the calls of this thread, or no call that can wait.
    assert!(enqueuing.iter().any(|(thread, _)| *thread == ENGINE_THREAD), "{enqueuing:?}");
    assert!(waiting.iter().any(|(thread, _)| *thread != ENGINE_THREAD), "{waiting:?}");
    let of_engine: Vec<_> = waiting.iter().filter(|(thread, _)| *thread == ENGINE_THREAD).collect();
    assert!(of_engine.is_empty(), "calls of the engine thread that can wait: {of_engine:?}");
    cluster.stop()
}

pub(crate) fn engine_thread_never_waits_for_the_driver_during_saves_and_loads() {
    run_on(1, async |fixture| {
        fixture.require_gpus();
        check_driver_calls(&fixture).await
    });
}
