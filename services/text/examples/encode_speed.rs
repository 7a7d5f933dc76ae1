//! Measures the cost of a tokenizer: `cargo run --release -p text --example encode_speed -- MODEL
//! TEXT_FILE`.
//!
//! Prints the time and memory of opening, then the throughput of five encodings and of detokenizing the
//! result, on one thread.

use std::{path::PathBuf, sync::Arc, time::Instant};

use text::{Detokenizer, DetokenizerOptions, ModelText, SpecialTokens};

fn main() {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(model), Some(file)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: encode_speed MODEL TEXT_FILE");
        std::process::exit(2);
    };
    let before_kb = resident_kb();
    let start = Instant::now();
    let model = ModelText::open(&model).expect("the model opens");
    let open_ms = start.elapsed().as_secs_f64() * 1e3;
    println!("open: {open_ms:.0} ms, {} kB resident", resident_kb().saturating_sub(before_kb));

    let text = std::fs::read_to_string(&file).expect("the file is UTF-8");
    let tokenizer = model.tokenizer();
    let mut ids = Vec::new();
    for _ in 0..5 {
        let start = Instant::now();
        ids = tokenizer.encode(&text, SpecialTokens::Parse).expect("the text encodes");
        report("encode", text.len(), ids.len(), start);
    }
    let options = DetokenizerOptions { skip_special: false, continues: true };
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), options);
    let start = Instant::now();
    let bytes: usize = ids.iter().map(|id| detokenizer.push(*id).len()).sum();
    report("detokenize", bytes, ids.len(), start);
}

fn report(what: &str, bytes: usize, tokens: usize, start: Instant) {
    let seconds = start.elapsed().as_secs_f64();
    let (rate, milliseconds) = (tokens as f64 / seconds, seconds * 1e3);
    println!("{what}: {bytes} bytes, {tokens} tokens, {milliseconds:.1} ms, {rate:.0} tokens/s");
}

/// Returns the resident set size of this process in KiB; 0 where /proc does not exist.
fn resident_kb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse().ok()).unwrap_or(0)
}
