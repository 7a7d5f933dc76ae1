//! A grammar that a client requested for its answer.

use grammar::{Grammar, GrammarError, Otherwise};
use proto::v1;

use super::error::FieldError;

/// A grammar and its field in the request.
#[derive(Clone, Debug, PartialEq)]
pub struct AskedGrammar {
    /// Name of the client's field, for errors.
    pub field: &'static str,
    pub grammar: Grammar,
    /// Fields of the functions' schemas, for tool calls.
    pub functions: Vec<FunctionField>,
    /// A grammar that the client requested besides tools. It must be valid by itself, even if no answer uses it.
    pub alone: Option<Box<AskedGrammar>>,
}

/// Field of the schema of a function's arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionField {
    pub field: String,
    pub name: String,
}

impl AskedGrammar {
    pub fn new(field: &'static str, grammar: Grammar) -> Self {
        Self { field, grammar, functions: Vec::new(), alone: None }
    }

    /// Returns the grammar version that a node must support for this grammar.
    pub fn version(&self) -> u32 {
        match self.grammar {
            Grammar::JsonSchema(_) | Grammar::Regex(_) => 1,
            Grammar::ToolCalls(_) => 2,
        }
    }

    /// Converts an error of the grammar into an error of its field.
    pub fn refused(&self, error: &GrammarError) -> FieldError {
        match error {
            GrammarError::InTool { index, error } => match self.functions.get(*index) {
                Some(FunctionField { field, name }) => {
                    FieldError::new(field, format!("of the function {name:?} {error}"))
                }
                None => FieldError::new(self.field, error.to_string()),
            },
            error => FieldError::new(self.field, error.to_string()),
        }
    }

    /// Returns the grammar's form for nodes.
    pub fn for_nodes(self) -> v1::Grammar {
        let kind = match self.grammar {
            Grammar::JsonSchema(text) => v1::grammar::Kind::JsonSchema(text),
            Grammar::Regex(text) => v1::grammar::Kind::Regex(text),
            Grammar::ToolCalls(calls) => v1::grammar::Kind::ToolCalls(tool_calls(calls)),
        };
        v1::Grammar { kind: Some(kind) }
    }
}

fn tool_calls(calls: grammar::ToolCalls) -> v1::ToolCalls {
    use v1::tool_calls::Otherwise as Wire;
    let function = |tool: grammar::CallableTool| v1::CallableFunction {
        name: tool.name,
        arguments_schema: tool.arguments,
    };
    let mark = match &calls.otherwise {
        Otherwise::Answer { mark, .. } => mark.clone(),
        Otherwise::Nothing | Otherwise::Text(_) => String::new(),
    };
    v1::ToolCalls {
        before_name: calls.writing.before_name,
        before_arguments: calls.writing.before_arguments,
        behind_arguments: calls.writing.behind_arguments,
        between: calls.writing.between,
        functions: calls.tools.into_iter().map(function).collect(),
        several: calls.several,
        otherwise: match calls.otherwise {
            Otherwise::Nothing => None,
            Otherwise::Text(prose) => {
                let (mark, never_begins) = (prose.mark, prose.never_begins);
                Some(Wire::Text(v1::Prose { mark, never_begins }))
            }
            Otherwise::Answer { grammar, .. } => match *grammar {
                Grammar::JsonSchema(text) => Some(Wire::JsonSchema(text)),
                Grammar::Regex(text) => Some(Wire::Regex(text)),
                // The check of the grammar has rejected this case.
                Grammar::ToolCalls(_) => None,
            },
        },
        mark,
    }
}
