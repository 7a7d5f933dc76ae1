//! `baton doctor` on whatever machine the tests run on; most have no GPU.

use std::{
    fs,
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
        "prefill    node.itl_max = off (node.chunk_tokens bounds ",
        "decode     node.itl_max = off (node.chunk_tokens bounds ",
    ] {
        assert!(text.lines().any(|line| line.starts_with(begin)), "{begin:?} is not in\n{text}");
    }
}

#[test]
fn doctor_names_a_model_that_it_cannot_read() {
    let output = doctor(&["--model", "/no/such/model"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("cannot read the model /no/such/model"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

fn fixture(name: &str) -> String {
    let folder = "../model/tests/fixtures/architectures";
    format!("{}/{folder}/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Returns the lines about the model of a machine whose GPUs cannot be used.
fn model_lines(model: &str, args: &[&str]) -> Vec<String> {
    let args = [&["--model", model, "--kernels", "/no/such/kernels.so"], args].concat();
    let output = doctor(&args);
    let text = String::from_utf8(output.stdout).unwrap();
    let is_about = |line: &&str| {
        ["model ", "matrices ", "computes ", "fault "].iter().any(|start| line.starts_with(start))
    };
    text.lines().filter(is_about).map(str::to_owned).collect()
}

#[test]
fn doctor_names_formats_and_code_path_of_a_model_before_its_weights_are_read() {
    let lines = model_lines(&fixture("qwen3_moe_fp8"), &["--dtype", "fp8"]);
    assert_eq!(
        lines[..3],
        [
            "model      qwen3_moe, 131552 parameters, node.tp may be 1, 2",
            // Embedding, output and two routers.
            "matrices   4 in BF16",
            "matrices   32 in F8_E4M3 with a scale for each 128x128 block",
        ]
    );
    let (begin, end) = lines[3].split_once(") for ").expect("the instruction set is named");
    assert!(begin.starts_with("computes   CPU kernels ("), "{begin}");
    assert_eq!(
        end,
        "bf16, one expert after the other; converted to bf16 while the node loads: F8_E4M3 with a scale for each 128x128 block"
    );
    let rows = model_lines(&fixture("qwen2_moe_fp8"), &[]);
    assert!(
        rows.contains(&"matrices   50 in F8_E4M3 with a scale for each row".to_owned()),
        "{rows:?}"
    );
    let lines = model_lines(&fixture("llama3/model.gguf"), &["--dtype", "q8"]);
    assert!(lines[0].starts_with("model      llama, "), "{lines:?}");
    assert!(lines[2].ends_with(" for q8; converted to q8 while the node loads: BF16"), "{lines:?}");
    // Only a configuration.
    let lines = model_lines(&fixture("llama3/config.json"), &[]);
    assert!(lines.len() == 2 && lines[1].ends_with(" for bf16"), "{lines:?}");
}

#[test]
fn doctor_gives_the_reason_why_a_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let copy =
        |name: &str| fs::copy(fixture(name), folder.path().join(name.split_once('/').unwrap().1));
    copy("qwen3_moe_fp8/config.json").unwrap();
    // The weights of another model.
    copy("qwen3_moe/model.safetensors").unwrap();
    let model = folder.path().to_str().unwrap();
    let output = doctor(&["--model", model, "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let refused = report["model"]["refused"].as_str().unwrap();
    assert!(refused.contains("model.safetensors: tensor \"model.layers.0."), "{report}");
    assert_eq!(report["model"]["computed_by"], Value::Null);
    let faults = report["faults"].as_array().unwrap();
    assert!(faults.contains(&format!("the model is refused: {refused}").into()), "{report}");

    let config = fs::read_to_string(fixture("llama3/config.json")).unwrap();
    let config = config.replace("LlamaForCausalLM", "GemmaForCausalLM");
    fs::write(folder.path().join("config.json"), config).unwrap();
    let output = doctor(&["--model", model]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(
        error.contains("unsupported architecture \"GemmaForCausalLM\"; expected one of"),
        "{error}"
    );
}
