//! Reference outputs: greedy tokens of f32 oracles for SmolLM2-135M-Instruct, whole and with eight
//! of its layers.

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

impl Golden {
    /// Returns the run with the longest prompt.
    pub fn longest(self) -> GoldenRun {
        self.runs.into_iter().max_by_key(|run| run.prompt_ids.len()).expect("there are runs")
    }
}

/// Returns the golden tokens of [`crate::cluster::smollm2`].
pub fn golden() -> Golden {
    parse(include_str!("../golden/cut_smollm2_greedy.json"))
}

/// Returns the golden tokens of [`crate::cluster::whole_smollm2`].
pub fn whole_golden() -> Golden {
    parse(include_str!("../golden/smollm2_greedy.json"))
}

fn parse(text: &str) -> Golden {
    serde_json::from_str(text).expect("the golden file is valid")
}

/// Returns the run of [`golden`] with the longest prompt. It has many blocks to transfer and to
/// cache.
pub fn longest() -> GoldenRun {
    golden().longest()
}

/// Returns the run with this name.
pub fn run_named(name: &str) -> GoldenRun {
    golden().runs.into_iter().find(|run| run.name == name).unwrap_or_else(|| panic!("no {name}"))
}
