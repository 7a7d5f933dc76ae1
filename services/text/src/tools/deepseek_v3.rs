//! DeepSeek's calls with a type and a code block: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>f`, then
//! the arguments.

use super::{PLAIN, ToolFormat, ToolSyntax, named::NamedBody};

pub(super) const FORMAT: ToolFormat = ToolFormat {
    name: "deepseek_v3",
    models: "DeepSeek V3, R1",
    form: "`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f`, then `{}` in a `json` code block",
    is_asked_by: |template, _| template.contains("<｜tool▁sep｜>") && template.contains("```json"),
    opening: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    bare: None,
    separator: None,
    closing: &["```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
    inner: &["<｜tool▁sep｜>"],
    body: || {
        Box::new(NamedBody::new("```json", |header| {
            header.rsplit("<｜tool▁sep｜>").next().unwrap_or(header)
        }))
    },
    syntax: ToolSyntax {
        begin: "<｜tool▁calls▁begin｜>",
        before_name: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        before_arguments: "\n```json\n",
        after_arguments: "\n```<｜tool▁call▁end｜>",
        between: "\n",
        end: "<｜tool▁calls▁end｜>",
        tag: "<｜tool▁calls▁begin｜>",
        ..PLAIN
    },
};
