//! Tests that a cluster's responses to generated requests conform to the OpenAPI description.

use std::{path::PathBuf, process::Command};

use anyhow::Result;
use integration_tests::{
    cluster::{Cluster, ClusterSpec, bin_dir},
    command::output,
};

/// Returns the folder of the Python packages that `make test` installs.
fn python_folder() -> PathBuf {
    let folder = bin_dir().join("../site-packages");
    assert!(folder.exists(), "{} is missing: run `make test`", folder.display());
    folder
}

/// Starts a cluster with few tokens and choices per request, because generated requests use the
/// allowed maximum.
async fn small_cluster() -> Result<Cluster> {
    let spec = ClusterSpec { dtype: "bf16", ..ClusterSpec::smollm2() }
        .set("BATON_NODE_SEQUENCE_TOKENS_MAX", 40)
        .set("BATON_ROUTER_REQUESTS_MAX", 8)
        .set("BATON_ROUTER_ALIASES", "latest=SmolLM2-135M-Instruct.Q4_1");
    Cluster::start(spec).await
}

/// Runs Python with the installed packages. Panics if it fails.
async fn python(args: Vec<String>) -> Result<()> {
    // Programs may leave files in their working folder.
    let folder = tempfile::tempdir()?;
    let run = move || {
        let mut python = Command::new("python3");
        python.args(args).current_dir(folder.path()).env("PYTHONPATH", python_folder());
        output(&mut python)
    };
    let output = tokio::task::spawn_blocking(run).await??;
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn responses_match_the_openapi_description() -> Result<()> {
    let cluster = small_cluster().await?;
    // Omits the check `positive_data_acceptance`: the description does not contain the limits of
    // the chat template and of the context length.
    let checks = "not_a_server_error,status_code_conformance,content_type_conformance,\
                  response_headers_conformance,response_schema_conformance,\
                  negative_data_rejection,unsupported_method,allow_header_conformance";
    let url = format!("{}/openapi.json", cluster.http());
    let args = ["-m", "schemathesis.cli", "run", &url, "--checks", checks].map(str::to_owned);
    let bounds = ["--max-examples=10", "--seed=7", "--request-timeout=30", "--no-color"];
    let phases = ["--phases=examples,coverage,fuzzing", "--continue-on-failure"];
    let further = bounds.into_iter().chain(phases).map(str::to_owned);
    python(args.into_iter().chain(further).collect()).await?;
    cluster.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn streamed_chunks_match_the_openapi_description() -> Result<()> {
    let cluster = small_cluster().await?;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/openapi_stream.py");
    python(vec![script.to_owned(), cluster.http()]).await?;
    cluster.stop()
}
