//! A grammar that an answer must match, as a client asked for it.

use grammar::{Grammar, GrammarError, Otherwise};
use proto::v1;

use super::field_error::FieldError;

/// A grammar and the field that it stood in.
#[derive(Clone, Debug, PartialEq)]
pub struct AskedGrammar {
    /// For refusals: the field as the client wrote it.
    pub field: &'static str,
    pub grammar: Grammar,
    /// Of calls: where each function's schema stood.
    pub functions: Vec<FunctionField>,
    /// Asked for, too: it must be one by itself, whether this one holds it, or nothing does.
    pub alone: Option<Box<AskedGrammar>>,
}

/// Where the schema of a function's arguments stood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionField {
    pub field: String,
    pub name: String,
}

impl AskedGrammar {
    pub fn new(field: &'static str, grammar: Grammar) -> Self {
        Self { field, grammar, functions: Vec::new(), alone: None }
    }

    /// The version of grammars that a node must know to hold an answer to this one.
    pub fn version(&self) -> u32 {
        match self.grammar {
            Grammar::JsonSchema(_) | Grammar::Regex(_) => 1,
            Grammar::ToolCalls(_) => 2,
        }
    }

    /// What is wrong with it, by its field.
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

    /// As nodes are told it.
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
                // Refused by the check of the grammar.
                Grammar::ToolCalls(_) => None,
            },
        },
        mark,
    }
}
