//! `<seed:think>...</seed:think>` before the answer.

use super::{ReasoningFormat, ReasoningSyntax};

pub(super) const FORMAT: ReasoningFormat = ReasoningFormat {
    name: "seed_think",
    models: "Seed-OSS",
    open: "<seed:think>",
    close: "</seed:think>",
    before_answer: "",
    never_within: &[],
    in_template: "</seed:think>",
    tags: &["<seed:think>", "</seed:think>"],
    syntax: ReasoningSyntax::Tags,
};
