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
    /// Margin of the best logit over the second best, for each output token.
    #[serde(rename = "top1_top2_margin_per_step")]
    pub margins: Vec<f32>,
}

/// Reads the golden tokens from the file that `BATON_TEST_GOLDEN` names, otherwise from this crate.
pub fn golden() -> Golden {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/smollm2_greedy.json");
    let path = std::env::var("BATON_TEST_GOLDEN").unwrap_or_else(|_| own.to_owned());
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the run with the longest prompt. It has many blocks to transfer and to cache.
pub fn longest() -> GoldenRun {
    golden().runs.into_iter().max_by_key(|run| run.prompt_ids.len()).expect("there are runs")
}

/// Returns the run with this name.
pub fn run_named(name: &str) -> GoldenRun {
    golden().runs.into_iter().find(|run| run.name == name).unwrap_or_else(|| panic!("no {name}"))
}
