//! Source of all libFuzzer programs. A program has the name of its target.
#![no_main]

#[path = "../../tests/fuzz/gguf_file.rs"]
mod gguf_file;
#[path = "../../tests/fuzz/targets.rs"]
#[allow(dead_code, reason = "the replay uses more of it")]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let target = targets::TARGETS.iter().find(|(name, _)| *name == env!("CARGO_BIN_NAME"));
    let (_, run) = target.expect("programs are named after targets");
    run(data);
});
