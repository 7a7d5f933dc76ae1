//! The Helm chart: `chart.py` renders it with the oldest and the newest supported Helm,
//! `dashboards.py` asks Prometheus for the data of all panels and for the metrics that alerts
//! select. `existing_cluster.py` runs the test of an existing cluster with fake programs.

use std::process::Command;

use anyhow::Result;
use integration_tests::{
    cluster::{bin_dir, smollm2},
    command::output,
    etcd::Etcd,
};

#[test]
fn chart_renders_valid_objects_and_refuses_bad_values() -> Result<()> {
    run("chart.py", &[])
}

#[test]
fn test_in_an_existing_cluster_checks_its_arguments_and_cleans_up() -> Result<()> {
    run("existing_cluster.py", &[])
}

#[test]
fn every_panel_scaling_query_and_alert_selects_metrics_that_exist() -> Result<()> {
    let etcd = Etcd::start()?;
    run("dashboards.py", &[&etcd.url(), &smollm2().display().to_string()])
}

/// Runs a script of this folder with the folders of the tools and of Baton's programs, and further
/// arguments.
fn run(script: &str, further: &[&str]) -> Result<()> {
    let script = format!("{}/tests/{script}", env!("CARGO_MANIFEST_DIR"));
    let tools = bin_dir().with_file_name("chart");
    let output =
        output(Command::new("python3").arg(script).arg(tools).arg(bin_dir()).args(further))?;
    assert!(
        output.status.success(),
        "{}{}\n(`make test` installs the tools; alone: deploy/chart-tools.sh)",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
