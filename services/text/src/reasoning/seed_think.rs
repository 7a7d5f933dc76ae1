//! `<seed:think>...</seed:think>` before the answer.

use super::ReasoningFormat;

pub(super) const FORMAT: ReasoningFormat = ReasoningFormat {
    name: "seed_think",
    models: "Seed-OSS",
    open: "<seed:think>",
    close: "</seed:think>",
};
