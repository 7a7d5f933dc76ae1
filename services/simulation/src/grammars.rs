//! Structured output: the vocabulary of the simulated models, and the grammars that requests ask
//! for.

use std::sync::{Arc, LazyLock};

use engine::event::NewSequence;
use grammar::{Compiler, Grammar, Token};
use node::{constraint::GrammarVocabulary, node_core::Refusal};
use simulation_base::Random;

use crate::scenario::VOCABULARY;

/// The text of each token. Tokens 3 and 4 are stop tokens and have no text.
const CHARACTERS: &str = "abc\0\0defghijklrstuvwxy01234567[]{},:\"";

static TEXT: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let mut tokens: Vec<Vec<u8>> = CHARACTERS.bytes().map(|byte| vec![byte]).collect();
    tokens.extend([b"true".to_vec(), b"false".to_vec(), b"ab".to_vec()]);
    assert_eq!(tokens.len(), VOCABULARY as usize);
    tokens
});

static SHARED: LazyLock<GrammarVocabulary> = LazyLock::new(|| {
    let compiler = Compiler::new(TEXT.iter().map(|text| match &text[..] {
        [0] => Token::Silent,
        text => Token::Text(text),
    }));
    GrammarVocabulary::new(compiler, Vec::new(), VOCABULARY)
});

pub(crate) fn pick(random: &mut Random) -> Grammar {
    let text = |text: &str| text.to_owned();
    random.pick(&[
        Grammar::Regex(text("[ab]{3,12}c")),
        Grammar::Regex(text("(x|de)+[0-7]{1,3}")),
        Grammar::Regex(text("([0-7]{2},){2,5}x?")),
        Grammar::JsonSchema(text(
            r#"{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 6}"#,
        )),
        Grammar::JsonSchema(text(r#"{"enum": ["abc", "a", "abde"]}"#)),
    ])
}

/// Constrains the sequence as a node does.
pub(crate) fn constrain(sequence: &mut NewSequence, grammar: &Grammar) -> Result<(), Refusal> {
    SHARED.constrain(sequence, grammar, Arc::new(|_, _| {}))
}
