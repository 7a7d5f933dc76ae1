//! `[TOOL_CALLS]f[ARGS]{}`, one after another. An id may stand before the arguments, and the second
//! tag may be absent. The parser also reads the list of older models.

use super::{
    CallBody, CallStep, CallableFunction, PLAIN, ToolCall, ToolFormat, ToolSyntax,
    named::NamedBody, object::ObjectBody,
};

const CALL_ID: &str = "[CALL_ID]";
const ARGUMENTS: &str = "[ARGS]";

pub(super) const FORMAT: ToolFormat = ToolFormat {
    name: "mistral",
    models: "Mistral Small 3.2, Magistral, Devstral, Ministral 3",
    form: "`[TOOL_CALLS]f[ARGS]{}`",
    is_asked_by: |template, _| template.contains("[TOOL_CALLS]") && template.contains(ARGUMENTS),
    opening: &["[TOOL_CALLS]"],
    bare: None,
    separator: Some(','),
    closing: &["]"],
    inner: &[CALL_ID, ARGUMENTS],
    body: || Box::new(MistralBody(None)),
    syntax: ToolSyntax {
        before_name: "[TOOL_CALLS]",
        before_arguments: ARGUMENTS,
        tag: "[TOOL_CALLS]",
        ..PLAIN
    },
};

/// Parser of both forms: the first character tells them apart.
#[derive(Debug)]
struct MistralBody(Option<Box<dyn CallBody>>);

impl CallBody for MistralBody {
    fn push(&mut self, text: &str, last: char, functions: &[CallableFunction]) -> CallStep {
        if last.is_whitespace() && self.0.is_none() {
            return CallStep::More;
        }
        let body = self.0.get_or_insert_with(|| match last {
            '[' | '{' => Box::new(ObjectBody::in_list()),
            _ => Box::new(NamedBody::new(ARGUMENTS, |header| {
                header.split(CALL_ID).next().unwrap_or(header)
            })),
        });
        body.push(text, last, functions)
    }

    fn cut(&self, text: &str) -> Option<ToolCall> {
        self.0.as_ref()?.cut(text)
    }
}
