//! Dependencies follow deny.toml, which cargo-deny checks.

use std::{path::Path, process::Command};

use anyhow::{Result, ensure};
use integration_tests::{cluster::bin_dir, command::output};

fn cargo_deny(args: &[&str]) -> Command {
    let program = bin_dir().join("../site-packages/bin/cargo-deny");
    assert!(program.exists(), "{} is missing: run `make test`", program.display());
    let mut command = Command::new(program);
    command.args(args).current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    command
}

fn check(checks: &[&str]) -> Result<()> {
    let output = output(&mut cargo_deny(&[&["--locked", "check"], checks].concat()))?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

fn licences_bans_and_sources_are_allowed() -> Result<()> {
    check(&["licenses", "bans", "sources"])
}

fn no_dependency_has_an_advisory() -> Result<()> {
    let fetched = output(&mut cargo_deny(&["fetch", "db"]))?;
    if !fetched.status.success() {
        let reason = String::from_utf8_lossy(&fetched.stderr);
        let last = reason.trim().lines().last().unwrap_or_default();
        test_harness::skip(format!("the database of advisories cannot be fetched: {last}"));
    }
    check(&["advisories"])
}

fn main() -> std::process::ExitCode {
    test_harness::main(
        &[],
        test_harness::tests![licences_bans_and_sources_are_allowed, no_dependency_has_an_advisory],
    )
}
