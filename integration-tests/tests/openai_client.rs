//! The unmodified OpenAI Python client works, streaming and non-streaming.

use std::process::Command;

use anyhow::Result;
use integration_tests::{
    cluster::{Cluster, ClusterSpec},
    command::output,
};

#[tokio::test(flavor = "multi_thread")]
async fn the_openai_python_client_works_unmodified() -> Result<()> {
    run(ClusterSpec::smollm2(), "openai_client.py").await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_openai_python_client_may_offer_tools() -> Result<()> {
    // The model's own template does not render tools.
    let template = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tool_template.jinja");
    let spec = ClusterSpec::smollm2().set("BATON_MODEL_CHAT_TEMPLATE", template);
    run(spec, "openai_tools.py").await
}

/// Runs a script of this folder against a cluster. The script must end with "ok".
async fn run(spec: ClusterSpec, script: &str) -> Result<()> {
    let cluster = Cluster::start(spec).await?;
    let script = format!("{}/tests/{script}", env!("CARGO_MANIFEST_DIR"));
    let url = cluster.http();
    let output =
        tokio::task::spawn_blocking(move || output(Command::new("python3").args([script, url])))
            .await??;
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    assert!(
        output.status.success() && said.trim_end().ends_with("ok"),
        "{said}{}\n(`make test` installs the client; alone: PYTHONPATH=target/python)",
        String::from_utf8_lossy(&output.stderr)
    );
    cluster.stop()
}
