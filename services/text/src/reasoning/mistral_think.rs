//! `[THINK]...[/THINK]` before the answer.

use super::{ReasoningFormat, ReasoningSyntax};

pub(super) const FORMAT: ReasoningFormat = ReasoningFormat {
    name: "mistral_think",
    models: "Magistral, Ministral 3 Reasoning",
    open: "[THINK]",
    close: "[/THINK]",
    before_answer: "",
    never_within: &[],
    in_template: "[/THINK]",
    tags: &["[THINK]", "[/THINK]"],
    syntax: ReasoningSyntax::Tags,
};
