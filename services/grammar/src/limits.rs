//! What a grammar may be, and what following it may cost.

use llguidance::api::ParserLimits;

/// A JSON schema as text. The largest schemas of tools in use have some ten thousand bytes.
pub const SCHEMA_BYTES_MAX: usize = 64 << 10;
/// Objects and lists inside each other. Compiling a schema recurses.
pub const SCHEMA_DEPTH_MAX: usize = 32;
/// JSON objects in a schema, outside of values. Each `$ref` and each level of nesting is one: a chain of
/// 3,000 compiles in 0.1 to 0.35 s.
pub const SCHEMA_OBJECTS_MAX: usize = 3000;
/// Of all objects of a schema together, patterns included. Compiling one object takes time by their
/// square; OpenAI's bound is 5,000.
pub const SCHEMA_PROPERTIES_MAX: usize = 1000;
/// Values of all `enum`s of a schema together; as OpenAI has it.
pub const SCHEMA_VALUES_MAX: usize = 1000;
/// Parts of all `anyOf`, `oneOf` and `allOf` of a schema together.
pub const SCHEMA_ALTERNATIVES_MAX: usize = 500;
/// Values of `format` in a schema. One `uri` takes 1.5 ms to compile.
pub const SCHEMA_FORMATS_MAX: usize = 100;
/// Coefficient of a `multipleOf`, written as a whole number times a power of ten. The lexer has a state
/// for each remainder: 9,973 compiles in 36 ms, 131,071 in 0.9 s, 9,999,991 in minutes.
pub const MULTIPLE_OF_MAX: u32 = 10_000;
/// The same without its decimal point: ten times a remainder fits 32 bits.
pub(crate) const MULTIPLE_OF_COEFFICIENT_MAX: f64 = 1e8;
/// Decimal places of a `multipleOf`: powers of ten fit 32 bits.
pub(crate) const MULTIPLE_OF_PLACES_MAX: u32 = 8;
/// Non-ASCII character classes like `\w` and `\p{L}` in a regular expression, or in all patterns of a schema.
/// Each takes 0.1 ms to parse.
pub const UNICODE_CLASSES_MAX: usize = 500;
/// Parsing a non-ASCII class in a case-insensitive expression takes 2 ms.
pub(crate) const CASE_INSENSITIVE_CLASS_WEIGHT: usize = 20;
pub const REGEX_BYTES_MAX: usize = 16 << 10;
/// Groups inside each other.
pub const REGEX_DEPTH_MAX: u32 = 64;
/// Functions that an answer may call; as OpenAI has it.
pub const TOOLS_MAX: usize = 128;
/// Four times OpenAI's bound: names made of a server's and a tool's are longer.
pub const NAME_BYTES_MAX: usize = 256;
/// The schemas and names of all of them, and the answer's own schema.
pub const TOOLS_BYTES_MAX: usize = 256 << 10;
/// How many times the parts of one schema all schemas of a request may have together. Compiling a
/// schema takes time by its parts.
pub const TOOLS_PARTS_FACTOR: usize = 4;
/// Of each piece of text that a model writes around a call.
pub(crate) const WRITING_BYTES_MAX: usize = 256;
/// What is told to a node of one grammar, at most; framing included.
pub const WIRE_BYTES_MAX: usize =
    TOOLS_BYTES_MAX + REGEX_BYTES_MAX + 8 * WRITING_BYTES_MAX + TOOLS_MAX * 16;

/// White space between two tokens of JSON: a line's end and a deep indentation. Without a bound
/// small models indent for ever.
pub(crate) const JSON_WHITE_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,40}";

/// Work on masks that an answer may take beside [`MASK_WORK_PER_TOKEN`] of each token that it has: a
/// large grammar's states are made with its first tokens, and used by the others. About 20 ms.
pub const MASK_WORK_BESIDE: u64 = 500_000;
/// Masks are computed between two steps that other requests wait for: about 0.2 ms. A schema of 1,000
/// optional properties takes 3,200, strings of bounded length 600, the others less than 100.
pub const MASK_WORK_PER_TOKEN: u64 = 5_000;
/// What an item of the parser costs in units of the lexer's fuel.
pub(crate) const ITEM_WORK: u64 = 16;

/// Fuel to build the lexer of a grammar and the transitions of its start state: 20 to 50 ms, less than
/// 10 MB.
pub(crate) const LEXER_FUEL: u64 = 1_000_000;
/// Stack of the thread that compiles. llguidance recurses into subschemas and into what they refer to: a
/// chain of [`SCHEMA_OBJECTS_MAX`] takes a third of this.
pub(crate) const COMPILER_STACK_BYTES: usize = 64 << 20;
/// Fuel to compile the arguments of all tools of a request one by one.
pub(crate) const TOOLS_LEXER_FUEL: u64 = 4 * LEXER_FUEL;

/// Bounds of llguidance. Its own defaults allow a single grammar half a gigabyte of lexer states.
/// Speeds are of one core with nothing else to do.
pub(crate) fn parser_limits() -> ParserLimits {
    ParserLimits {
        // 1 to 2 kB each.
        max_lexer_states: 10_000,
        // Up to 5 ms; schemas in use take less than 2,000.
        step_lexer_fuel: 50_000,
        // Up to 10 ms; 1,000 optional properties take 12,000.
        step_max_items: 20_000,
        // Four of each optional property.
        max_items_in_row: 5_000,
        initial_lexer_fuel: LEXER_FUEL,
        max_grammar_size: 100_000,
        precompute_large_lexemes: true,
        // The answer and the grammar are the client's: neither belongs into a log.
        verbose_errors: false,
    }
}
