//! The Python wheel: pip installs it into an empty environment, and `baton up` answers there. Also
//! the files of images that need no build.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use integration_tests::{
    cluster::{bin_dir, whole_smollm2},
    command::output,
};

fn run(command: &mut Command) -> Result<String> {
    let output = output(command)?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {said}{error}");
    Ok(said)
}

#[test]
fn wheel_serves_from_an_empty_environment() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/dist.sh");
    // Another target folder: the packages of the user stay.
    run(Command::new(script).env("BATON_BIN", bin_dir()).env("CARGO_TARGET_DIR", folder.path()))?;
    let packages = std::fs::read_dir(folder.path().join("dist"))?.collect::<Result<Vec<_>, _>>()?;
    let is_wheel = |path: &std::path::PathBuf| path.extension().is_some_and(|it| it == "whl");
    let wheel = packages.iter().map(std::fs::DirEntry::path).find(is_wheel).context("no wheel")?;

    let environment = folder.path().join("venv");
    run(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
    run(Command::new(environment.join("bin/pip")).args(["install", "--no-index"]).arg(wheel))?;
    let addresses = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
    let said = run(Command::new(environment.join("bin/baton"))
        .args(["up", "--sample", "--once"])
        .args(addresses)
        .arg("--model")
        .arg(whole_smollm2()))?;
    assert!(said.contains("Paris"), "{said}");
    Ok(())
}

#[test]
fn image_with_kernels_has_the_libraries_of_rdma_adapters() -> Result<()> {
    let root = tempfile::tempdir()?;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/image/rdma.sh");
    // The script fails if a library lacks one that it links.
    run(Command::new(script).arg(root.path()))?;
    let drivers = root.path().join("etc/libibverbs.d");
    ensure!(drivers.join("mlx5.driver").exists(), "libibverbs finds drivers by {drivers:?}");
    Ok(())
}
