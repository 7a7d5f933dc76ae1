//! `[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "..."}]`, a list of objects after one tag.

use super::{PLAIN, ToolFormat, ToolSyntax, mistral};

pub(super) const FORMAT: ToolFormat = ToolFormat {
    name: "mistral_list",
    models: "Mistral 7B 0.3, Nemo, Small up to 3.1",
    form: r#"`[TOOL_CALLS][{"name": "f", "arguments": {}}]`"#,
    is_asked_by: |template, _| template.contains("[TOOL_CALLS]"),
    syntax: ToolSyntax {
        begin: "[TOOL_CALLS][",
        before_name: "{\"name\": ",
        quotes_name: true,
        before_arguments: ", \"arguments\": ",
        after_arguments: "}",
        between: ", ",
        end: "]",
        tag: "[TOOL_CALLS]",
        ..PLAIN
    },
    ..mistral::FORMAT
};
