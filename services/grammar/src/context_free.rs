//! Context-free grammars as clients send them: in the notation of Lark, or in GBNF, which is
//! translated to Lark.

use llguidance::api::TopLevelGrammar;

use crate::{
    error::GrammarError,
    gbnf,
    limits::{CASE_INSENSITIVE_CLASS_WEIGHT, CONTEXT_FREE_BYTES_MAX, UNICODE_CLASSES_MAX},
};

/// Parts of llguidance's dialect of Lark that no grammar of a client may have: grammars within the
/// grammar, which have bounds of their own, tokens by name, and attributes that change the
/// sampling.
const UNSUPPORTED: [&str; 7] = ["%json", "%regex", "%lark", "%llguidance", "@", "<", "="];

/// Returns the grammar for llguidance, after all checks that are cheaper than compiling.
pub(crate) fn parsed(text: &str) -> Result<TopLevelGrammar, GrammarError> {
    let bytes = text.len();
    if bytes > CONTEXT_FREE_BYTES_MAX {
        return Err(GrammarError::TooLong { bytes, max: CONTEXT_FREE_BYTES_MAX });
    }
    let (count, max) = (unicode_classes(text), UNICODE_CLASSES_MAX);
    if count > max {
        let what = "character classes (in a case-insensitive grammar one counts 20)";
        return Err(GrammarError::TooMany { what, count, max });
    }
    let not_a_grammar = |reason: String| GrammarError::NotAGrammar { reason };
    if gbnf::is_gbnf(text) {
        return gbnf::to_lark(text).map(TopLevelGrammar::from_lark).map_err(not_a_grammar);
    }
    let rules = without_literals(text);
    match UNSUPPORTED.iter().find(|part| rules.contains(**part)) {
        Some(part) => Err(not_a_grammar(format!("{part} is not allowed outside of literals"))),
        None => Ok(TopLevelGrammar::from_lark(text.to_owned())),
    }
}

/// Returns an upper bound on how expensive the character classes beyond ASCII are, in units of one
/// class.
fn unicode_classes(text: &str) -> usize {
    let count = |part| text.matches(part).count();
    let classes: usize = [r"\p", r"\P", r"\w", r"\W", "[^"].into_iter().map(count).sum();
    // A flag of a literal, or of a group within a regular expression.
    let is_case_insensitive = ["\"i", "/i", "(?"].iter().any(|flag| text.contains(flag));
    if is_case_insensitive { classes * CASE_INSENSITIVE_CLASS_WEIGHT } else { classes }
}

/// Returns a Lark grammar without its comments, texts and regular expressions.
fn without_literals(text: &str) -> String {
    let mut rest = text;
    let mut rules = String::with_capacity(text.len());
    while let Some(at) = rest.find(['"', '/', '#']) {
        rules.push_str(&rest[..at]);
        let mark = rest.as_bytes()[at];
        rest = &rest[at + 1..];
        let length = match mark {
            b'#' => rest.find('\n'),
            b'/' if rest.starts_with('/') => rest.find('\n'),
            mark => literal_length(rest, mark),
        };
        rest = length.map_or("", |length| &rest[length..]);
    }
    rules + rest
}

/// Returns the length of a literal up to and including its closing mark.
fn literal_length(text: &str, mark: u8) -> Option<usize> {
    let mut is_escaped = false;
    let end = text.bytes().position(|byte| {
        let ends = byte == mark && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        ends
    });
    end.map(|end| end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_and_comments_hide_no_rule() {
        let text = "start: \"@\\\"<\" /<\\/=/ A // @\nA: \"x\" # =\n%json {}";
        assert_eq!(without_literals(text), "start:   A \nA:  \n%json {}");
        let error = parsed(text).unwrap_err().to_string();
        assert_eq!(error, "is not a grammar: %json is not allowed outside of literals");
        assert!(parsed("start: \"<\" /=/").is_ok());
    }

    #[test]
    fn grammars_beyond_a_limit_are_rejected_with_the_limit() {
        let long = format!("start: \"{}\"", "x".repeat(CONTEXT_FREE_BYTES_MAX));
        assert!(parsed(&long).unwrap_err().to_string().ends_with("allowed: at most 16384"));
        let classes = format!("start: /{}/", r"\w".repeat(600));
        assert!(parsed(&classes).unwrap_err().to_string().contains("has 600 character classes"));
        let classes = format!("start: /(?i){}/", r"\w".repeat(30));
        assert!(parsed(&classes).unwrap_err().to_string().contains("has 600 character classes"));
    }
}
