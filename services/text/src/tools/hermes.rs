//! `<tool_call>{"name": "f", "arguments": {}}</tool_call>`, one after another, with text before,
//! between or after.

use super::{PLAIN, ToolFormat, ToolSyntax, object::ObjectBody};

pub(super) const FORMAT: ToolFormat = ToolFormat {
    name: "hermes",
    models: "Hermes, Qwen 2.5, Qwen 3",
    form: r#"`<tool_call>{"name": "f", "arguments": {}}</tool_call>`"#,
    is_asked_by: |template, _| template.contains("<tool_call>"),
    opening: &["<tool_call>"],
    bare: None,
    separator: None,
    closing: &["</tool_call>"],
    inner: &[],
    body: || Box::new(ObjectBody::default()),
    syntax: ToolSyntax {
        before_name: "<tool_call>\n{\"name\": ",
        quotes_name: true,
        before_arguments: ", \"arguments\": ",
        after_arguments: "}\n</tool_call>",
        between: "\n",
        tag: "<tool_call>",
        ..PLAIN
    },
};
