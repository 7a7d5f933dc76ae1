//! `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, with a line for each
//! tag and value.

use super::{
    PLAIN, ParameterSyntax, ToolFormat, ToolSyntax,
    parameters::{ParameterBody, ParameterTags},
};

static TAGS: ParameterTags = ParameterTags {
    name_end: ">",
    key: "<parameter=",
    key_end: ">",
    value: "",
    value_end: "</parameter>",
    padding: "\n",
    ends: &["</function>", "</tool_call>"],
};

pub(super) const FORMAT: ToolFormat = ToolFormat {
    name: "qwen3_coder",
    models: "Qwen 3 Coder, Qwen 3.5, Nemotron 3 Nano",
    form: "`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`",
    is_asked_by: |template, _| {
        ["<tool_call>", "<function=", "<parameter="].iter().all(|tag| template.contains(tag))
    },
    // Some answers lack the first tag.
    opening: &["<tool_call>", "<function="],
    bare: None,
    separator: None,
    closing: &["</function>", "</tool_call>"],
    inner: &[],
    body: || Box::new(ParameterBody::new(&TAGS)),
    syntax: ToolSyntax {
        before_name: "<tool_call>\n<function=",
        before_arguments: ">\n",
        parameters: Some(ParameterSyntax {
            before_name: "<parameter=",
            before_value: ">\n",
            after_value: "\n</parameter>",
            between: "\n",
            text_end: Some("</parameter>"),
        }),
        after_arguments: "\n</function>\n</tool_call>",
        between: "\n",
        tag: "<tool_call>",
        ..PLAIN
    },
};
