//! Reference outputs: greedy tokens of a f32 oracle for SmolLM2-135M-Instruct.

use serde::Deserialize;

#[derive(Debug, Deserialize)]
pub struct Golden {
    pub runs: Vec<GoldenRun>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct GoldenRun {
    pub name: String,
    pub prompt: String,
    pub prompt_ids: Vec<u32>,
    pub output_ids: Vec<u32>,
    pub output_text: String,
}

pub fn golden() -> Golden {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/smollm2_greedy.json");
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}"))
}
