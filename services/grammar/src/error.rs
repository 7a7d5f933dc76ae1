//! Why there is no matcher, or no next token.

/// A grammar that is not taken.
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
    /// Well-formed, but not to be served: a keyword that is not known, nothing that matches, or
    /// more than the compiler's bounds.
    #[error("cannot be followed: {reason}")]
    Unsupported { reason: String },
    #[error("has {count} functions; allowed: 1 to {max}")]
    ToolCount { count: usize, max: usize },
    #[error("has {bytes} bytes in the names and schemas of its functions; allowed: at most {max}")]
    ToolsTooLong { bytes: usize, max: usize },
    #[error("has a name of {bytes} bytes; allowed: 1 to {max}")]
    Name { bytes: usize, max: usize },
    #[error("cannot be followed: {reason}")]
    Writing { reason: &'static str },
    /// In the arguments of one function.
    #[error("function {index}: {error}")]
    InTool { index: usize, error: Box<GrammarError> },
}

impl GrammarError {
    pub(crate) fn in_tool(self, index: usize) -> Self {
        Self::InTool { index, error: Box::new(self) }
    }
}

/// Why a matcher cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatchError {
    /// The token is none of those allowed.
    #[error("token {token} does not match the grammar")]
    Mismatch { token: u32 },
    /// More work or memory than the bounds allow.
    #[error("the grammar is too complex: {reason}")]
    TooComplex { reason: String },
    /// A defect of the matcher.
    #[error("the grammar's matcher failed: {reason}")]
    Defect { reason: String },
}

/// The first line of a message, without the markup that llguidance puts around its parts, and cut to
/// what fits a log or an error body.
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
