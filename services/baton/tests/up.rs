//! `baton up` with scripts in place of the services.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Stdio},
};

fn write_script(folder: &Path, name: &str, line: &str) {
    let path = folder.join(name);
    fs::write(&path, format!("#!/bin/sh\n{line}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn the_first_node_that_fails_ends_the_start_of_the_others() {
    let folder = tempfile::tempdir().unwrap();
    write_script(folder.path(), "baton-prefill-node", "exec sleep 600");
    write_script(folder.path(), "baton-decode-node", "exit 3");
    write_script(folder.path(), "baton-router", "exit 0");
    let model = folder.path().join("model");
    fs::create_dir(&model).unwrap();
    fs::write(model.join("tokenizer.json"), "{}").unwrap();
    let mut up = Command::new(env!("CARGO_BIN_EXE_baton"));
    up.args(["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--bin-dir"])
        .arg(folder.path())
        .arg("--model")
        .arg(&model)
        .stdin(Stdio::null());
    let output = up.output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    // The prefill node alone would end after ten minutes.
    assert!(error.contains("decode-0 exited with exit status: 3"), "{error}");
}
