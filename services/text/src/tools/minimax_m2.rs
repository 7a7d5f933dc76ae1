//! `<invoke name="f"><parameter name="a">1</parameter></invoke>` in a section of calls.

use super::{
    PLAIN, ParameterSyntax, ToolFormat, ToolSyntax,
    parameters::{ParameterBody, ParameterTags},
};

const SECTION: &str = "<minimax:tool_call>";

static TAGS: ParameterTags = ParameterTags {
    name_end: "\">",
    key: "<parameter name=\"",
    key_end: "\">",
    value: "",
    value_end: "</parameter>",
    padding: "",
    ends: &["</invoke>"],
};

pub(super) const FORMAT: ToolFormat = ToolFormat {
    name: "minimax_m2",
    models: "MiniMax M2",
    form: r#"`<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>`"#,
    is_asked_by: |template, _| template.contains(SECTION),
    opening: &[SECTION, "<invoke name=\""],
    bare: None,
    separator: None,
    closing: &["</minimax:tool_call>"],
    inner: &[],
    body: || Box::new(ParameterBody::new(&TAGS)),
    syntax: ToolSyntax {
        begin: "<minimax:tool_call>\n",
        before_name: "<invoke name=\"",
        before_arguments: "\">\n",
        parameters: Some(ParameterSyntax {
            before_name: "<parameter name=\"",
            before_value: "\">",
            after_value: "</parameter>",
            between: "\n",
            text_end: Some("</parameter>"),
        }),
        after_arguments: "\n</invoke>\n",
        end: "</minimax:tool_call>",
        tag: SECTION,
        ..PLAIN
    },
};
