//! `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>` in a section
//! of calls.

use super::{PLAIN, ToolFormat, ToolSyntax, named::NamedBody};

const ARGUMENTS: &str = "<|tool_call_argument_begin|>";

pub(super) const FORMAT: ToolFormat = ToolFormat {
    name: "kimi_k2",
    models: "Kimi K2",
    form: "`<\\|tool_calls_section_begin\\|><\\|tool_call_begin\\|>functions.f:0<\\|tool_call_argument_begin\\|>{}<\\|tool_call_end\\|>`",
    is_asked_by: |template, _| template.contains(ARGUMENTS),
    opening: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    bare: None,
    separator: None,
    closing: &["<|tool_call_end|>", "<|tool_calls_section_end|>"],
    inner: &[ARGUMENTS],
    body: || Box::new(NamedBody::new(ARGUMENTS, name_in)),
    syntax: ToolSyntax {
        begin: "<|tool_calls_section_begin|>",
        before_name: "<|tool_call_begin|>functions.",
        // The model numbers its calls here. Baton does not read the number.
        before_arguments: ":0<|tool_call_argument_begin|>",
        after_arguments: "<|tool_call_end|>",
        end: "<|tool_calls_section_end|>",
        tag: "<|tool_calls_section_begin|>",
        ..PLAIN
    },
};

/// Returns the name in an id such as `functions.f:0`.
fn name_in(id: &str) -> &str {
    let id = id.trim();
    let id = id.strip_prefix("functions.").unwrap_or(id);
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    id.rsplit_once(':').map_or(id, |(name, count)| if is_number(count) { name } else { id })
}
