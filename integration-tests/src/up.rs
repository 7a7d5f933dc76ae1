//! `baton up` and the processes that it starts.

use std::{
    collections::BTreeMap,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use test_harness::KilledOnDrop;

use crate::{
    client::Client,
    cluster::bin_dir,
    lines::Lines,
    processes::{arguments, children, signal},
};

const DEADLINE: Duration = Duration::from_secs(60);

/// A running `baton up`. Dropping it kills it and its children.
pub struct Up {
    pub child: KilledOnDrop,
    pub lines: Lines,
    /// Folder of temporary files, which a `baton up` that is killed leaves behind.
    pub folder: Option<TempDir>,
}

impl Up {
    pub fn start(args: &[&str], settings: &BTreeMap<String, String>) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let child = Command::new(bin_dir().join("baton"))
            .arg("up")
            .args(args)
            .envs(settings)
            .env("TMPDIR", folder.path())
            // GPU tests set this variable for themselves; nodes choose their own value.
            .env_remove("CUDA_DEVICE_MAX_CONNECTIONS")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot run baton")?;
        let mut child = KilledOnDrop(child);
        let lines = Lines::of(child.stderr.take().expect("stderr is piped"));
        Ok(Self { child, lines, folder: Some(folder) })
    }

    /// Waits until the cluster is ready and returns a client of the router.
    pub fn client(&mut self) -> Result<Client> {
        let ready = self.lines.wait_for("baton: ready")?;
        let http =
            ready.split_whitespace().find(|word| word.starts_with("http://")).context("no URL")?;
        Ok(Client::new(http.trim_end_matches("/v1").to_owned()))
    }

    pub fn children(&self) -> Vec<u32> {
        children(self.child.id())
    }

    /// Returns the running child that has this argument, such as a node id.
    pub fn child_with(&self, argument: &str) -> Option<u32> {
        let is_it = |id: &u32| arguments(*id).iter().any(|word| word == argument);
        self.children().into_iter().find(is_it)
    }

    /// Stops `baton up` and returns the last lines of its output.
    pub fn last_lines(&mut self) -> String {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let lines = self.lines.all();
        lines[lines.len().saturating_sub(60)..].join("\n")
    }

    pub fn interrupt(&self) {
        signal(self.child.id(), "INT");
    }

    pub fn wait(&mut self) -> Result<Option<i32>> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status.code());
            }
            ensure!(Instant::now() < deadline, "baton up has not ended");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
