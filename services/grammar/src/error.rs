//! Errors of compiling and matching.

/// Reason why a grammar is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    #[error("has {bytes} bytes; allowed: at most {max}")]
    TooLong { bytes: usize, max: usize },
    #[error("nests {depth} deep; allowed: at most {max}")]
    TooDeep { depth: usize, max: usize },
    #[error("has {count} {what}; allowed: at most {max}")]
    TooMany { what: &'static str, count: usize, max: usize },
    #[error("has multipleOf {value}; allowed: a whole number up to {max}, times a power of ten")]
    MultipleOf { value: String, max: u32 },
    #[error(
        "has multipleOf values that may apply to one number, with a least common multiple of more \
         than {max}; allowed: up to {max}, counted in units of their last decimal place"
    )]
    CommonMultiple { max: u32 },
    #[error("is not a JSON schema: {reason}")]
    NotASchema { reason: String },
    #[error("is not a regular expression: {reason}")]
    NotARegex { reason: String },
    #[error("is not a grammar: {reason}")]
    NotAGrammar { reason: String },
    /// The grammar is well-formed, but has an unknown keyword, matches no output, or exceeds the
    /// bounds of the compiler.
    #[error("is not supported: {reason}")]
    Unsupported { reason: String },
    #[error("has {count} functions; allowed: 1 to {max}")]
    ToolCount { count: usize, max: usize },
    #[error("has {bytes} bytes in the names and schemas of its functions; allowed: at most {max}")]
    ToolsTooLong { bytes: usize, max: usize },
    #[error("has a name of {bytes} bytes; allowed: 1 to {max}")]
    Name { bytes: usize, max: usize },
    /// An error in the arguments schema of one tool.
    #[error("function {index}: {error}")]
    InTool { index: usize, error: Box<GrammarError> },
}

impl GrammarError {
    pub(crate) fn in_tool(self, index: usize) -> Self {
        Self::InTool { index, error: Box::new(self) }
    }
}

/// Reason why a matcher cannot continue.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatchError {
    /// The grammar does not allow the token.
    #[error("token {token} does not match the grammar")]
    Mismatch { token: u32 },
    /// The bitmask takes more work or memory than the bounds allow.
    #[error("the grammar is too complex: {reason}")]
    TooComplex { reason: String },
    /// A bug in the matcher.
    #[error("the grammar's matcher failed: {reason}")]
    Bug { reason: String },
}

/// Words of llguidance, and the reason that a client reads instead: llguidance names its options,
/// features and bounds.
const REASONS: [(&[&str], &str); 5] = [
    (&["oneOf constraints"], "oneOf with alternatives that may overlap; expected anyOf"),
    (&["lookaround"], "look-around inside an expression"),
    (&["Only absolute $ref"], "$ref to another document or to an anchor; expected #/ and a path"),
    (
        &["min/maxProperties only"],
        "minProperties or maxProperties beside optional properties, except minProperties 1",
    ),
    (
        &[
            "fuel exhausted",
            "too many expressions",
            "too many states",
            "schema too large",
            "stack level exceeded",
            "limit for this grammar",
            "precomputation failed",
            "Unable to determine if regex",
        ],
        "it is too complex",
    ),
];

/// Returns the error for a grammar that llguidance rejects.
pub(crate) fn unsupported(reason: &str) -> GrammarError {
    let known = || REASONS.iter().find(|(words, _)| words.iter().any(|it| reason.contains(it)));
    let reason = match reason.strip_prefix("Unsatisfiable schema: ") {
        // llguidance shows its syntax tree of the expressions.
        Some(cause) if cause.starts_with("Regex is empty") => {
            "no output matches it: pattern, format and lengths exclude each other".to_owned()
        }
        Some(cause) => format!("no output matches it: {cause}"),
        None => match known() {
            Some((_, known)) => (*known).to_owned(),
            None => reason.replace("Unimplemented keys: ", "keywords "),
        },
    };
    GrammarError::Unsupported { reason: one_line(&reason) }
}

/// Returns the first line of an llguidance message without its markup, cut to the length of a log
/// field.
pub(crate) fn one_line(message: &str) -> String {
    const BYTES_MAX: usize = 240;
    let message = message.split("\n<").next().unwrap_or(message);
    let mut line: String =
        message.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if line.len() > BYTES_MAX {
        let end = (0..=BYTES_MAX).rev().find(|&end| line.is_char_boundary(end)).unwrap_or(0);
        line.truncate(end);
        line.push('…');
    }
    line
}
