//! `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}`. The parser in
//! `reasoning/harmony.rs` rewrites other headers of calls to this form.

use super::{PLAIN, ToolFormat, ToolSyntax, named::NamedBody};

const ARGUMENTS: &str = " <|constrain|>json<|message|>";

pub(super) const FORMAT: ToolFormat = ToolFormat {
    name: "harmony",
    models: "gpt-oss",
    form: "`<\\|channel\\|>commentary to=functions.f <\\|constrain\\|>json<\\|message\\|>{}<\\|call\\|>`",
    is_asked_by: |template, _| template.contains("<|channel|>commentary"),
    opening: &["<|channel|>commentary to="],
    bare: None,
    separator: None,
    closing: &["<|call|>"],
    inner: &["<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|end|>"],
    body: || {
        Box::new(NamedBody::new(ARGUMENTS, |name| name.strip_prefix("functions.").unwrap_or(name)))
    },
    syntax: ToolSyntax {
        before_name: "<|channel|>commentary to=functions.",
        before_arguments: ARGUMENTS,
        tag: "<|channel|>commentary to=",
        ..PLAIN
    },
};
