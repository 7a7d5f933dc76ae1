//! `[f(a=1), g(b='x')]` as the whole answer, or between `<|python_start|>` and `<|python_end|>`.

use super::{PLAIN, ParameterSyntax, ToolFormat, ToolSyntax, python::PythonBody};

pub(super) const FORMAT: ToolFormat = ToolFormat {
    name: "pythonic",
    models: "Llama 3.2 and 4 with lists of calls, ToolACE",
    form: "`[f(a=1), g(b='x')]` as the answer, or between `<\\|python_start\\|>` and `<\\|python_end\\|>`",
    is_asked_by: |template, _| template.contains("[func_name1(params_name1="),
    opening: &["<|python_start|>"],
    bare: Some('['),
    separator: Some(','),
    closing: &["]", "<|python_end|>"],
    inner: &[],
    body: || Box::new(PythonBody::default()),
    syntax: ToolSyntax {
        begin: "[",
        before_arguments: "(",
        parameters: Some(ParameterSyntax {
            before_name: "",
            before_value: "=",
            after_value: "",
            between: ", ",
            text_end: None,
        }),
        after_arguments: ")",
        between: ", ",
        end: "]",
        tag: "<|python_start|>",
        never_begins: Some(r"\s*\[\s*[A-Za-z0-9_.\-]+\s*\("),
        ..PLAIN
    },
};
