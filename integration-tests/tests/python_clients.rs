//! The unmodified Python clients of OpenAI and Anthropic work, streaming and non-streaming.

use std::process::Command;

use anyhow::Result;
use integration_tests::{
    cluster::{Cluster, ClusterSpec},
    command::output,
};

#[tokio::test(flavor = "multi_thread")]
async fn the_openai_python_client_works_unmodified() -> Result<()> {
    run(ClusterSpec::whole_smollm2(), "tests/openai_client.py").await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_openai_python_client_may_offer_tools() -> Result<()> {
    run(with_tools(), "tests/openai_tools.py").await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_anthropic_python_client_works_unmodified() -> Result<()> {
    run(with_tools(), "clients/anthropic_client.py").await
}

/// Returns a cluster whose chat template renders tools. The model's own template does not.
fn with_tools() -> ClusterSpec {
    let template = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tool_template.jinja");
    ClusterSpec::whole_smollm2().set("BATON_MODEL_CHAT_TEMPLATE", template)
}

/// Runs a script of this crate against a cluster. The script must end with "ok".
async fn run(spec: ClusterSpec, script: &str) -> Result<()> {
    let cluster = Cluster::start(spec).await?;
    let script = format!("{}/{script}", env!("CARGO_MANIFEST_DIR"));
    let url = cluster.http();
    let output =
        tokio::task::spawn_blocking(move || output(Command::new("python3").args([script, url])))
            .await??;
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    assert!(
        output.status.success() && said.trim_end().ends_with("ok"),
        "{said}{}\n(`make test` installs the clients; alone: PYTHONPATH=target/site-packages)",
        String::from_utf8_lossy(&output.stderr)
    );
    cluster.stop()
}
