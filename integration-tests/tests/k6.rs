//! A load generator without knowledge of Baton runs unmodified against a cluster.

use std::{path::PathBuf, process::Command};

use anyhow::Result;
use integration_tests::{
    cluster::{Cluster, ClusterSpec, bin_dir},
    command::output,
};

/// Returns the k6 that `make test` installs.
fn k6() -> PathBuf {
    let program = bin_dir().join("../site-packages/bin/k6");
    assert!(program.exists(), "{} is missing: run `make test`", program.display());
    program
}

#[tokio::test(flavor = "multi_thread")]
async fn k6_gets_an_answer_to_every_request() -> Result<()> {
    let cluster = Cluster::start(ClusterSpec::smollm2()).await?;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/k6.js");
    let url = format!("BATON_URL={}", cluster.http());
    let output = tokio::task::spawn_blocking(move || {
        let options = ["--quiet", "--no-usage-report", "--env", &url];
        output(Command::new(k6()).arg("run").args(options).arg(script))
    })
    .await??;
    let said = String::from_utf8_lossy(&output.stdout);
    // The exit status tells whether all thresholds of the script hold.
    assert!(
        output.status.success() && said.contains("iterations"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    cluster.stop()
}
