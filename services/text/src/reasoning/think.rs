//! `<think>...</think>` before the answer.

use super::{ReasoningFormat, ReasoningSyntax};

pub(super) const FORMAT: ReasoningFormat = ReasoningFormat {
    name: "think",
    models: "Qwen 3, DeepSeek R1 and V3.1, GLM 4.5, Kimi K2 Thinking, MiniMax M2",
    open: "<think>",
    close: "</think>",
    before_answer: "",
    never_within: &[],
    in_template: "</think>",
    tags: &["<think>", "</think>"],
    syntax: ReasoningSyntax::Tags,
};
