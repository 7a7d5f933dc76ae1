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
fn nodes_advertise_the_address_on_which_they_listen() {
    let folder = tempfile::tempdir().unwrap();
    write_script(folder.path(), "baton-prefill-node", "exec sleep 600");
    let say = "echo \"advertises $BATON_TRANSFER_ADVERTISE, listens $*\"; exit 3";
    write_script(folder.path(), "baton-decode-node", say);
    write_script(folder.path(), "baton-router", "exit 0");
    let mut up = Command::new(env!("CARGO_BIN_EXE_baton"));
    up.args(["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--bin-dir"])
        .arg(folder.path())
        .arg("--model")
        // The scripts do not read the model.
        .arg(folder.path().join("baton-decode-node"))
        .env("BATON_TRANSFER_ADVERTISE", "192.0.2.1")
        .stdin(Stdio::null());
    let output = up.output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("advertises 127.0.0.1, listens"), "{error}");
    assert!(error.contains("--transfer-data 127.0.0.1:0"), "{error}");
}

#[test]
fn chat_template_of_the_flag_reaches_the_services() {
    let folder = tempfile::tempdir().unwrap();
    write_script(folder.path(), "baton-prefill-node", "exec sleep 600");
    let say = "echo \"renders $BATON_MODEL_CHAT_TEMPLATE\"; exit 3";
    write_script(folder.path(), "baton-decode-node", say);
    write_script(folder.path(), "baton-router", "exit 0");
    let mut up = Command::new(env!("CARGO_BIN_EXE_baton"));
    up.args(["up", "--chat-template", "/chat.jinja", "--http", "127.0.0.1:0"])
        .args(["--grpc", "127.0.0.1:0", "--bin-dir"])
        .arg(folder.path())
        .arg("--model")
        // The scripts do not read the model.
        .arg(folder.path().join("baton-decode-node"))
        .env("BATON_MODEL_CHAT_TEMPLATE", "/other.jinja")
        .stdin(Stdio::null());
    let output = up.output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("renders /chat.jinja"), "{error}");
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

#[test]
fn overlapping_ports_of_the_nodes_of_one_host_are_rejected_before_a_start() {
    let folder = tempfile::tempdir().unwrap();
    write_script(folder.path(), "baton-prefill-node", "exit 3");
    write_script(folder.path(), "baton-decode-node", "exit 3");
    let start = |args: &[&str], data: &str| {
        let mut up = Command::new(env!("CARGO_BIN_EXE_baton"));
        up.args(["up", "--no-router"]).args(args).arg("--bin-dir").arg(folder.path());
        // The scripts do not read the model.
        up.arg("--model").arg(folder.path().join("baton-decode-node")).stdin(Stdio::null());
        up.env("BATON_CLUSTER_SECRET", "c".repeat(64))
            .env("BATON_NODE_GRPC", "127.0.0.1:50061")
            .env("BATON_TRANSFER_CONTROL", "127.0.0.1:50065")
            .env("BATON_TRANSFER_DATA", data)
            .env("BATON_TRANSFER_ADVERTISE", "127.0.0.1");
        let output = up.output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let two = ["--prefill", "1", "--decode", "1"];
    let with_health = [&two[..], &["--health", "127.0.0.1:50066"]].concat();
    for (args, data, words) in [
        (&two[..], "127.0.0.1:50066", ["transfer.control = 127.0.0.1:50065", "transfer.data = "]),
        (
            &two[..],
            "0.0.0.0:50062",
            ["node.grpc = 127.0.0.1:50061", "transfer.data = 0.0.0.0:50062"],
        ),
        (
            &with_health[..],
            "127.0.0.1:0",
            ["transfer.control = 127.0.0.1:50065", "--health = 127.0.0.1:50066"],
        ),
    ] {
        let error = start(args, data);
        assert!(words.iter().all(|word| error.contains(word)), "{args:?} {data}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    // One node has no next port, ports of other hosts are free, and a distance of two fits two
    // nodes.
    let one = ["--prefill", "0", "--decode", "1"];
    for (args, data) in [
        (&one[..], "127.0.0.1:50066"),
        (&two[..], "127.0.0.2:50066"),
        (&two[..], "127.0.0.1:50067"),
    ] {
        let error = start(args, data);
        assert!(error.contains("exited with exit status: 3"), "{args:?} {data}: {error}");
    }
}
