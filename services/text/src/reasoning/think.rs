//! `<think>...</think>` before the answer: Qwen 3, DeepSeek R1 and V3.1, GLM 4.5, Kimi K2 Thinking, MiniMax M2.

use super::ReasoningFormat;

pub(super) const FORMAT: ReasoningFormat =
    ReasoningFormat { name: "think", open: "<think>", close: "</think>" };
