//! `[THINK]...[/THINK]` before the answer.

use super::ReasoningFormat;

pub(super) const FORMAT: ReasoningFormat = ReasoningFormat {
    name: "mistral_think",
    models: "Magistral, Ministral 3 Reasoning",
    open: "[THINK]",
    close: "[/THINK]",
};
