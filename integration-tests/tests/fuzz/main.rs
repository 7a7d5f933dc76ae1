//! Decoders of untrusted bytes. A committed corpus and its mutations must decode without a panic
//! and within limits of memory and time.
//!
//! `BATON_WRITE_CORPUS=1` rewrites the seeds. `integration-tests/fuzz` continues with libFuzzer
//! from the same corpus.

#[allow(unsafe_code, reason = "neither an allocator nor a thread's clock can be had without")]
mod counting;
mod gguf_file;
mod mutate;
mod seeds;
mod targets;

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    time::Duration,
};

use self::{
    mutate::{Random, mutate},
    targets::{TARGETS, Target},
};

/// Mutations of each seed.
const MUTATIONS: u64 = 100;
const RANDOM_SEED: u64 = 20_261_121;
/// Memory limit beyond the input: parsers, file buffers, a rendered template, the vocabulary's
/// tables.
const BYTES_MAX: usize = 64 << 20;
/// CPU time limit, far beyond any input's need in a debug build.
const TIME_MAX: Duration = Duration::from_secs(10);

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join("fuzz").join("corpus").join(target)
}

/// Returns the seeds of a target with their names, in a fixed order.
fn read_corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let mut seeds = Vec::new();
    for entry in fs::read_dir(corpus(target)).expect("every target has a corpus") {
        let path = entry.expect("the corpus is readable").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        seeds.push((name, fs::read(&path).expect("the corpus is readable")));
    }
    seeds.sort();
    seeds
}

/// Runs one input. Saves an input that exceeds a limit in `folder`.
fn check(folder: &Path, target: &str, run: Target, what: &str, input: &[u8]) {
    let began = counting::computed();
    let measured = counting::most_bytes(|| catch_unwind(AssertUnwindSafe(|| run(input))));
    let (outcome, bytes) = measured;
    let took = counting::computed() - began;
    let problem = if outcome.is_err() {
        "it panicked".to_owned()
    } else if bytes > BYTES_MAX + 16 * input.len() {
        format!("it held {bytes} bytes")
    } else if took > TIME_MAX {
        format!("it took {took:?}")
    } else {
        return;
    };
    let kept = folder.join(format!("baton-fuzz-{target}-{}", std::process::id()));
    fs::write(&kept, input).expect("a temporary file can be written");
    panic!("{target}, {what}: {problem}; the input is {}", kept.display());
}

fn replay(target: &str) {
    let (_, run) =
        TARGETS.into_iter().find(|(name, _)| *name == target).expect("the fuzz target is listed");
    let seeds = read_corpus(target);
    assert!(!seeds.is_empty(), "{target} has no seeds");
    let mut random = Random::new(RANDOM_SEED);
    let folder = std::env::temp_dir();
    for (at, (name, seed)) in seeds.iter().enumerate() {
        check(&folder, target, run, name, seed);
        let (_, other) = &seeds[(at + 1) % seeds.len()];
        for number in 0..MUTATIONS {
            let input = mutate(&mut random, seed, other);
            check(&folder, target, run, &format!("mutation {number} of {name}"), &input);
        }
    }
}

/// Defines a test for each target, and a test that fails if a target has no test.
macro_rules! replays {
    ($($test:ident: $target:literal;)+) => {
        $( #[test] fn $test() { replay($target); } )+

        #[test]
        fn every_fuzz_target_replays_its_corpus() {
            let replayed = [$($target),+];
            assert!(TARGETS.iter().all(|(name, _)| replayed.contains(name)));
            assert_eq!(replayed.len(), TARGETS.len());
        }
    };
}

replays! {
    gguf_files_are_read_or_refused: "gguf";
    quantised_blocks_of_any_bytes_are_numbers: "gguf_blocks";
    safetensors_are_read_or_refused: "safetensors";
    indices_of_shards_are_read_or_refused: "shard_index";
    configurations_of_models_are_read_or_refused: "config_json";
    tokenizers_are_read_or_refused: "tokenizer_json";
    settings_of_tokenizers_are_read_or_refused: "tokenizer_config";
    chat_templates_are_rendered_or_refused: "chat_template";
    control_messages_are_decoded_or_rejected: "control_message";
    headers_of_chunks_are_read_or_refused: "data_frame";
    bodies_of_requests_are_read_or_refused: "http_body";
    configurations_of_services_are_read_or_refused: "config_toml";
    records_of_nodes_are_read_or_refused: "node_record";
    entries_in_etcd_are_read_or_refused: "etcd_entry";
}

#[test]
fn committed_corpus_matches_its_generator() {
    let write = std::env::var_os("BATON_WRITE_CORPUS").is_some();
    for (target, name, seed) in seeds::all() {
        let path = corpus(target).join(name);
        if write {
            fs::create_dir_all(corpus(target)).expect("the corpus can be written");
            fs::write(&path, &seed).expect("the corpus can be written");
        }
        let found = fs::read(&path).unwrap_or_default();
        assert!(found == seed, "{} is out of date: run with BATON_WRITE_CORPUS=1", path.display());
    }
}

/// Tests the limits themselves with a decoder that exceeds them.
#[test]
fn large_allocation_and_panic_are_detected() {
    let (_, bytes) = counting::most_bytes(|| drop(std::hint::black_box(vec![1u8; 3 << 20])));
    assert!((3 << 20..4 << 20).contains(&bytes), "{bytes}");
    let hungry = |_: &[u8]| drop(std::hint::black_box(vec![1u8; BYTES_MAX + (1 << 20)]));
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let seen = catch_unwind(|| check(folder.path(), "bounds", hungry, "an allocation", &[]));
    let said = *seen.unwrap_err().downcast::<String>().expect("the panic has a message");
    assert!(said.contains("it held"), "{said}");
    let panics = |_: &[u8]| panic!("as a broken decoder does");
    let seen = catch_unwind(|| check(folder.path(), "bounds", panics, "a panic", &[]));
    let said = *seen.unwrap_err().downcast::<String>().expect("the panic has a message");
    assert!(said.contains("it panicked"), "{said}");
}
