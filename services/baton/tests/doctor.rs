//! `baton doctor` on whatever machine the tests run on; most have no GPU.

use std::{
    process::{Command, Output},
    time::Duration,
};

use serde_json::Value;
use test_harness::output_within;

/// Time limit, far longer than a loaded machine needs.
const WITHIN: Duration = Duration::from_secs(60);

fn doctor(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    output_within(command.arg("doctor").args(args).env_remove("BATON_NODE_KERNELS"), WITHIN)
}

#[test]
fn doctor_without_kernels_serves_on_the_cpu_and_faults_only_a_gpu_machine() {
    let output = doctor(&["--json", "--kernels", "/no/such/kernels.so"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let parts = report["libraries"].as_array().unwrap();
    let kernels = parts.iter().find(|part| part["name"] == "kernels").unwrap();
    assert_eq!(kernels["found"], false);
    assert!(kernels["reason"].as_str().unwrap().contains("/no/such/kernels.so"), "{kernels}");
    assert_eq!(report["serves_on"], "cpu", "without kernels no GPU serves: {report}");
    let has_gpu = !report["gpus"].as_array().unwrap().is_empty();
    if has_gpu {
        assert_eq!(output.status.code(), Some(1));
        assert!(!report["faults"].as_array().unwrap().is_empty());
        return;
    }
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_eq!(report["faults"], Value::Array(vec![]));
    assert_eq!(report["notes"].as_array().map(Vec::len), Some(1), "it says why: {report}");

    let output = doctor(&[]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    for begin in [
        "serves on  cpu (",
        "driver     missing",
        "kernels    missing",
        "note       ",
        "prefill    node.step_tokens = 512 (512 tokens keep ",
        "prefill    transfer.chunk_bytes = 4MiB (2 ms at ",
        "decode     node.chunk_tokens = 256 (two prompts ",
        "decode     node.slots = 64 (decode throughput ",
        "decode     node.waiting_max = 256 (4 full batches)",
        "decode     node.itl_max = off (node.chunk_tokens bounds ",
    ] {
        assert!(text.lines().any(|line| line.starts_with(begin)), "{begin:?} is not in\n{text}");
    }
    assert!(!text.contains("prefill    node.itl_max"), "a prefill node does not decode\n{text}");
}

#[test]
fn doctor_names_a_model_that_it_cannot_read() {
    let output = doctor(&["--model", "/no/such/model"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("cannot read the model /no/such/model"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}
