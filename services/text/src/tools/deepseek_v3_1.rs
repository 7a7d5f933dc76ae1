//! Calls of DeepSeek V3.1, without V3's `function` before the name:
//! `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>`.

use super::{PLAIN, ToolFormat, ToolSyntax, named::NamedBody};

const SEPARATOR: &str = "<｜tool▁sep｜>";

pub(super) const FORMAT: ToolFormat = ToolFormat {
    name: "deepseek_v3_1",
    models: "DeepSeek V3.1",
    form: "`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>`",
    is_asked_by: |template, _| template.contains(SEPARATOR),
    opening: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    bare: None,
    separator: None,
    closing: &["<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
    inner: &[SEPARATOR],
    body: || Box::new(NamedBody::new(SEPARATOR, |header| header)),
    syntax: ToolSyntax {
        begin: "<｜tool▁calls▁begin｜>",
        before_name: "<｜tool▁call▁begin｜>",
        before_arguments: SEPARATOR,
        after_arguments: "<｜tool▁call▁end｜>",
        end: "<｜tool▁calls▁end｜>",
        tag: "<｜tool▁calls▁begin｜>",
        ..PLAIN
    },
};
