//! The OpenAI Python client works unmodified, streaming and not.

use std::process::Command;

use anyhow::{Context, Result};
use integration_tests::cluster::{Cluster, ClusterSpec};

#[tokio::test(flavor = "multi_thread")]
async fn the_openai_python_client_works_unmodified() -> Result<()> {
    let cluster = Cluster::start(ClusterSpec::smollm2()).await?;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/openai_client.py");
    let url = cluster.http();
    let output = tokio::task::spawn_blocking(move || {
        Command::new("python3").args([script, &url]).output().context("cannot run python3")
    })
    .await??;
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.trim_end().ends_with("ok"),
        "{said}{}\n(`make test` installs the client; alone: PYTHONPATH=target/python)",
        String::from_utf8_lossy(&output.stderr)
    );
    cluster.stop()
}
