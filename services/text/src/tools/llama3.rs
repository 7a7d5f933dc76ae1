//! `{"name": "f", "parameters": {}}` as the whole answer, several separated by `;`; or the same
//! after `<|python_tag|>`, also after text.

use super::{PLAIN, ToolFormat, ToolSyntax, object::ObjectBody};

const PYTHON_TAG: &str = "<|python_tag|>";

pub(super) const FORMAT: ToolFormat = ToolFormat {
    name: "llama3",
    models: "Llama 3.1 to 3.3",
    form: r#"`{"name": "f", "parameters": {}}` as the answer, several separated by `;`, or after `<\|python_tag\|>`"#,
    is_asked_by: |template, tokenizer| {
        let has_tag = template.contains(PYTHON_TAG) || tokenizer.token_id(PYTHON_TAG).is_some();
        has_tag && template.contains("\"parameters\": ")
    },
    opening: &[PYTHON_TAG],
    bare: Some('{'),
    separator: Some(';'),
    closing: &[],
    inner: &[],
    body: || Box::new(ObjectBody::default()),
    syntax: ToolSyntax {
        before_name: "{\"name\": ",
        quotes_name: true,
        before_arguments: ", \"parameters\": ",
        after_arguments: "}",
        between: "; ",
        tag: PYTHON_TAG,
        // Starts of calls that the parser accepts and this syntax does not produce.
        never_begins: Some(r#"\s*\{\s*"(name|parameters|arguments|type|id)""#),
        ..PLAIN
    },
};
