//! A grammar that an answer must match, as a client asked for it.

use grammar::Grammar;
use proto::v1;

/// A grammar and the field that it stood in.
#[derive(Clone, Debug, PartialEq)]
pub struct AskedGrammar {
    /// For refusals: the field as the client wrote it.
    pub field: &'static str,
    pub grammar: Grammar,
}

impl AskedGrammar {
    pub fn new(field: &'static str, grammar: Grammar) -> Self {
        Self { field, grammar }
    }

    /// As nodes are told it.
    pub fn for_nodes(self) -> v1::Grammar {
        let kind = match self.grammar {
            Grammar::JsonSchema(text) => v1::grammar::Kind::JsonSchema(text),
            Grammar::Regex(text) => v1::grammar::Kind::Regex(text),
        };
        v1::Grammar { kind: Some(kind) }
    }
}
