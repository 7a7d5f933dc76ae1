//! `<tool_call>f`, then `<arg_key>a</arg_key>` and `<arg_value>1</arg_value>` for each parameter.

use super::{
    PLAIN, ParameterSyntax, ToolFormat, ToolSyntax,
    parameters::{ParameterBody, ParameterTags},
};

static TAGS: ParameterTags = ParameterTags {
    name_end: "\n",
    key: "<arg_key>",
    key_end: "</arg_key>",
    value: "<arg_value>",
    value_end: "</arg_value>",
    padding: "",
    ends: &["</tool_call>"],
};

pub(super) const FORMAT: ToolFormat = ToolFormat {
    name: "glm4_5",
    models: "GLM 4.5 to 4.7",
    form: "`<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`",
    is_asked_by: |template, _| template.contains("<arg_key>"),
    opening: &["<tool_call>"],
    bare: None,
    separator: None,
    closing: &[],
    inner: &["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"],
    body: || Box::new(ParameterBody::new(&TAGS)),
    syntax: ToolSyntax {
        before_name: "<tool_call>",
        before_arguments: "\n",
        parameters: Some(ParameterSyntax {
            before_name: "<arg_key>",
            before_value: "</arg_key>\n<arg_value>",
            after_value: "</arg_value>",
            between: "\n",
            text_end: Some("</arg_value>"),
        }),
        after_arguments: "\n</tool_call>",
        between: "\n",
        tag: "<tool_call>",
        ..PLAIN
    },
};
