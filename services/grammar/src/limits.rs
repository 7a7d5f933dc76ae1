//! Bounds on the size of a grammar and on the work to compile and to match it.

use llguidance::api::ParserLimits;

/// Length of a JSON schema. The largest tool schemas in use have some ten thousand bytes.
pub const SCHEMA_BYTES_MAX: usize = 64 << 10;
/// Nesting depth of objects and lists in the text of a schema.
pub const SCHEMA_DEPTH_MAX: usize = 32;
/// JSON objects in a schema, outside of values. Each `$ref` and each level of nesting is one: a
/// chain of 3,000 compiles in 0.1 to 0.35 s.
pub const SCHEMA_OBJECTS_MAX: usize = 3000;
/// Levels of JSON objects of all schemas to which different references lead. llguidance compiles a
/// referenced schema inside the one that refers to it, so this many levels may nest. References
/// that do not overlap have at most [`SCHEMA_OBJECTS_MAX`].
pub const SCHEMA_REFERENCED_LEVELS_MAX: usize = 5000;
/// Properties and pattern properties of all objects of a schema. The time to compile an object
/// grows with the square of its properties. OpenAI's bound is 5,000.
pub const SCHEMA_PROPERTIES_MAX: usize = 1000;
/// Pairs of different patterns in each object of a schema. llguidance compares all pairs of
/// patterns of an object and of objects that it merges. So each object of a schema that combines
/// schemas counts the pairs of all patterns of the schema. 2,000 pairs (63 patterns) take 15 ms to
/// 0.9 s.
pub const SCHEMA_PATTERN_PAIRS_MAX: usize = 2000;
/// Values of all `enum`s of a schema. OpenAI has the same bound.
pub const SCHEMA_VALUES_MAX: usize = 1000;
/// Subschemas in all `anyOf`, `oneOf` and `allOf` of a schema.
pub const SCHEMA_ALTERNATIVES_MAX: usize = 500;
/// Subschemas in the copies of schemas that are combined with others. This many take 0.3 s and 50
/// MB to compile. A schema is combined if it has sibling keywords besides annotations, or is one of
/// several parts of `allOf`. It is copied for each alternative, repeated type, property and item
/// that it applies to. Two patterns that are compared count 2.
pub const SCHEMA_COPIES_MAX: usize = 10_000;
/// Values of `format` in a schema. One `uri` takes 1.5 ms to compile.
pub const SCHEMA_FORMATS_MAX: usize = 100;
/// Maximum length of a tag in bytes that is added to the required properties of each alternative of
/// a tagged union.
pub(crate) const TAG_BYTES_MAX: usize = 256;
/// Coefficient of a `multipleOf`, written as a whole number times a power of ten. The lexer has a
/// state for each remainder: 4,999 compiles in 25 ms, 9,973 in 50 to 70 ms, 131,071 in 0.9 s,
/// 9,999,991 in minutes.
pub const MULTIPLE_OF_MAX: u32 = 5_000;
/// Maximum of a `multipleOf` without its decimal point, so that ten times a remainder fits into 32
/// bits.
pub(crate) const MULTIPLE_OF_COEFFICIENT_MAX: f64 = 1e8;
/// Maximum decimal places of a `multipleOf`, so that the power of ten fits into 32 bits.
pub(crate) const MULTIPLE_OF_PLACES_MAX: u32 = 8;
/// Non-ASCII character classes like `\w` and `\p{L}` in a regular expression, or in all patterns of
/// a schema. Each takes 0.1 ms to parse.
pub const UNICODE_CLASSES_MAX: usize = 500;
/// Parsing a non-ASCII class in a case-insensitive expression takes 2 ms.
pub(crate) const CASE_INSENSITIVE_CLASS_WEIGHT: usize = 20;
/// Length of a regular expression.
pub const REGEX_BYTES_MAX: usize = 16 << 10;
/// Length of a context-free grammar.
pub const CONTEXT_FREE_BYTES_MAX: usize = 16 << 10;
/// Nesting depth of groups.
pub const REGEX_DEPTH_MAX: u32 = 64;
/// Tools of a request. OpenAI has the same bound.
pub const TOOLS_MAX: usize = 128;
/// Length of a tool's name. OpenAI's bound is 64; names that join the names of a server and a tool
/// are longer.
pub const NAME_BYTES_MAX: usize = 256;
/// Length of the names and schemas of all tools of a request, and of its response schema.
pub const TOOLS_BYTES_MAX: usize = 256 << 10;
/// All schemas of a request together may have this many times the objects, properties and other
/// parts of one schema.
pub const TOOLS_PARTS_FACTOR: usize = 4;
/// Length of each literal that the model writes around a tool call.
pub const LITERAL_BYTES_MAX: usize = 256;
/// Size of a grammar in a request to a node, protobuf framing included.
pub const WIRE_BYTES_MAX: usize =
    TOOLS_BYTES_MAX + REGEX_BYTES_MAX + 8 * LITERAL_BYTES_MAX + TOOLS_MAX * 16;

/// White space between two tokens of JSON: room for a line feed and a deep indentation. Without a
/// bound small models emit white space until `max_tokens`.
pub(crate) const JSON_WHITE_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,40}";

/// Fuel to compute the bitmasks of one output, in addition to [`MASK_WORK_PER_TOKEN`] for each
/// token: about 20 ms. A large grammar builds most lexer states during its first tokens.
pub const MASK_WORK_BASE: u64 = 500_000;
/// Fuel per token: about 0.2 ms of a worker thread, which computes bitmasks for all requests of a
/// node. A schema with 1,000 optional properties takes 3,200, strings of bounded length 600, others
/// less than 100.
pub const MASK_WORK_PER_TOKEN: u64 = 5_000;
/// Fuel that corresponds to one Earley item.
pub(crate) const ITEM_WORK: u64 = 16;

/// Fuel to build the lexer of a grammar and the transitions of its start state: 20 to 70 ms of CPU
/// time, less than 10 MB.
pub(crate) const LEXER_FUEL: u64 = 1_000_000;
/// Stack of the thread that compiles. llguidance recurses into subschemas and references:
/// [`SCHEMA_REFERENCED_LEVELS_MAX`] levels take a third of it.
pub(crate) const COMPILER_STACK_BYTES: usize = 64 << 20;
/// Fuel to compile the arguments of all tools of a request one by one.
pub(crate) const TOOLS_LEXER_FUEL: u64 = 4 * LEXER_FUEL;

/// Returns the bounds for llguidance. The defaults of llguidance allow one grammar half a gigabyte
/// of lexer states. Times are for one idle core.
pub(crate) fn parser_limits() -> ParserLimits {
    ParserLimits {
        // 1 to 2 kB each.
        max_lexer_states: 10_000,
        // Up to 5 ms; schemas in use take less than 2,000.
        step_lexer_fuel: 50_000,
        // Up to 10 ms; 1,000 optional properties take 12,000.
        step_max_items: 20_000,
        // An optional property takes four items.
        max_items_in_row: 5_000,
        initial_lexer_fuel: LEXER_FUEL,
        max_grammar_size: 100_000,
        precompute_large_lexemes: true,
        // Errors must not copy the client's grammar and output into a log.
        verbose_errors: false,
    }
}
