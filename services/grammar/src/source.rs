//! Grammars as clients send them, and the checks before compiling.

use std::{convert::Infallible, fmt::Display, ops::AddAssign};

use llguidance::{
    JsonCompileOptions,
    api::{GrammarWithLexer, TopLevelGrammar},
    regex_to_lark,
};
use regex_syntax::{
    ParserBuilder,
    ast::{self, Ast, ClassPerl, ClassPerlKind, ClassSetItem},
    escape,
};
use serde_json::{Map, Number, Value};

use crate::{
    adapt::adapt,
    arguments::literal,
    context_free,
    copies::{compared_pattern_pairs, copied_subschemas},
    error::{GrammarError, one_line},
    limits::{
        CASE_INSENSITIVE_CLASS_WEIGHT, JSON_WHITE_SPACE, MULTIPLE_OF_COEFFICIENT_MAX,
        MULTIPLE_OF_MAX, MULTIPLE_OF_PLACES_MAX, REGEX_BYTES_MAX, REGEX_DEPTH_MAX,
        SCHEMA_ALTERNATIVES_MAX, SCHEMA_BYTES_MAX, SCHEMA_COPIES_MAX, SCHEMA_DEPTH_MAX,
        SCHEMA_FORMATS_MAX, SCHEMA_OBJECTS_MAX, SCHEMA_PATTERN_PAIRS_MAX, SCHEMA_PROPERTIES_MAX,
        SCHEMA_REFERENCED_LEVELS_MAX, SCHEMA_VALUES_MAX, UNICODE_CLASSES_MAX,
    },
    references::referenced_levels,
    tool_calls::{ToolCalls, has_text},
};

/// Grammar that the whole output must match.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Grammar {
    /// A JSON schema.
    JsonSchema(String),
    /// A regular expression, anchored at both ends.
    Regex(String),
    /// A context-free grammar in the notation of Lark, or in GBNF.
    ContextFree(String),
    ToolCalls(ToolCalls),
    /// Reasoning, and then another grammar.
    AfterReasoning {
        tags: ReasoningTags,
        grammar: Box<Grammar>,
    },
}

/// Tags around the reasoning before the output of a grammar.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ReasoningTags {
    /// Tag that begins the reasoning, which may be absent. `None` if the output begins within the
    /// reasoning.
    pub open: Option<String>,
    pub close: String,
    /// Text between the reasoning and output that is not a tool call.
    pub before_answer: String,
    /// Tags that the reasoning does not contain before `close`.
    pub never_within: Vec<String>,
}

impl ReasoningTags {
    /// Returns the grammar of reasoning, the text before the answer, and then the inner grammar.
    fn before(&self, grammar: &Grammar) -> Result<TopLevelGrammar, GrammarError> {
        const ANSWER: &str = "answer_after_reasoning";
        let close = escape(&self.close);
        let (begin, start) = match &self.open {
            Some(open) => (format!(r"\s*{}", escape(open)), "reasoning SPACE? ANSWER | ANSWER"),
            None => (String::new(), "reasoning SPACE? ANSWER"),
        };
        let (mut inner, before_answer) = match grammar {
            Grammar::ToolCalls(calls) => (calls.parsed_after(&self.before_answer)?, ""),
            other => (other.parsed()?, self.before_answer.as_str()),
        };
        let answer = format!("{}@{ANSWER}", literal(before_answer));
        let any = r"(.|\n)*";
        let reasoning = regex_to_lark(&format!("{begin}{any}{close}"), "");
        let never: Vec<String> = self.never_within.iter().map(|tag| escape(tag)).collect();
        let without = match never.is_empty() {
            true => String::new(),
            false => {
                let with_tag = format!("{begin}{any}({}){any}{close}", never.join("|"));
                format!(" & ~/{}/", regex_to_lark(&with_tag, ""))
            }
        };
        let lark = format!(
            "start: {}\nREASONING: /{reasoning}/{without}\nreasoning[lazy]: REASONING\n\
             SPACE: /\\n{{1,2}}/\n",
            start.replace("ANSWER", &answer)
        );
        inner.grammars[0].name = Some(ANSWER.to_owned());
        inner.grammars.insert(0, GrammarWithLexer::from_lark(lark));
        Ok(inner)
    }
}

impl Grammar {
    /// Returns the grammar of any JSON object.
    pub fn json_object() -> Self {
        Self::JsonSchema(r#"{"type":"object"}"#.to_owned())
    }

    /// Returns the grammar of exactly one of these texts.
    pub fn choice<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        let texts: Vec<_> = texts.into_iter().map(regex_syntax::escape).collect();
        Self::Regex(texts.join("|"))
    }

    /// Returns the grammar for llguidance, after all checks that are cheaper than compiling.
    pub(crate) fn parsed(&self) -> Result<TopLevelGrammar, GrammarError> {
        match self {
            Self::JsonSchema(text) => {
                let (schema, _) = parsed_schema(text)?;
                Ok(TopLevelGrammar::from_json_schema(schema))
            }
            Self::Regex(text) => {
                check_regex(text)?;
                let expression = lark_expression(text);
                Ok(TopLevelGrammar::from_lark(format!("start: /{expression}/")))
            }
            Self::ContextFree(text) => context_free::parsed(text),
            Self::ToolCalls(calls) => calls.parsed_after(""),
            Self::AfterReasoning { tags, grammar } => tags.before(grammar),
        }
    }

    /// Returns the length of the schemas, expressions and names in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::JsonSchema(text) | Self::Regex(text) | Self::ContextFree(text) => text.len(),
            Self::ToolCalls(calls) => calls.bytes(),
            Self::AfterReasoning { grammar, .. } => grammar.bytes(),
        }
    }

    /// Returns a character of an expression or a context-free grammar that a vocabulary whose
    /// tokens have only these bytes cannot write.
    pub fn unwritable(&self, bytes: &[bool; 256]) -> Option<char> {
        match self {
            Self::Regex(text) | Self::ContextFree(text) => text.chars().find(|char| {
                char.encode_utf8(&mut [0; 4]).bytes().any(|byte| !bytes[usize::from(byte)])
            }),
            // A schema's strings may be escaped.
            Self::JsonSchema(_) | Self::ToolCalls(_) => None,
            Self::AfterReasoning { grammar, .. } => grammar.unwritable(bytes),
        }
    }

    /// Returns whether one of the tags around calls or reasoning contains this text.
    pub fn writes(&self, text: &[u8]) -> bool {
        match self {
            Self::JsonSchema(_) | Self::Regex(_) | Self::ContextFree(_) => false,
            Self::ToolCalls(calls) => calls.writes(text),
            Self::AfterReasoning {
                tags: ReasoningTags { open, close, before_answer, .. },
                grammar,
            } => {
                let mut literals = open.iter().chain([close, before_answer]);
                literals.any(|it| has_text(it, text)) || grammar.writes(text)
            }
        }
    }
}

/// Parses a schema, and returns it with the compile options and the counts of its parts.
pub(crate) fn parsed_schema(text: &str) -> Result<(Value, SchemaParts), GrammarError> {
    check_length(text, SCHEMA_BYTES_MAX)?;
    let depth = depth(text);
    if depth > SCHEMA_DEPTH_MAX {
        return Err(GrammarError::TooDeep { depth, max: SCHEMA_DEPTH_MAX });
    }
    let not_a_schema = |reason: String| GrammarError::NotASchema { reason };
    let schema: Value =
        serde_json::from_str(text).map_err(|error| not_a_schema(error.to_string()))?;
    let mut schema = match schema {
        Value::Object(schema) => Value::Object(schema),
        // `true` allows any value.
        Value::Bool(true) => Value::Object(serde_json::Map::new()),
        // Do not quote the value, which may be long.
        other => return Err(not_a_schema(format!("{} is not an object", type_name(&other)))),
    };
    adapt(&mut schema)?;
    let mut parts = SchemaParts::of(&schema)?;
    parts.check(1)?;
    parts.0[PATTERN_PAIRS] = compared_pattern_pairs(&schema);
    parts.0[REFERENCED_LEVELS] = referenced_levels(&schema);
    // The count of copies recurses along the references, too.
    parts.check(1)?;
    parts.0[COPIES] = copied_subschemas(&schema);
    parts.check(1)?;
    // llguidance reads options from the schema, so this overwrites options of the client.
    let options = JsonCompileOptions {
        whitespace_pattern: Some(JSON_WHITE_SPACE.to_owned()),
        ..JsonCompileOptions::default()
    };
    options.apply_to(&mut schema);
    Ok((schema, parts))
}

/// Returns an expression in the syntax of Lark. `\d` is an ASCII digit, as in `pattern`.
pub(crate) fn lark_expression(text: &str) -> String {
    regex_to_lark(text, "d")
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(true) => "true",
        Value::Bool(false) => "false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

pub(crate) fn check_regex(text: &str) -> Result<(), GrammarError> {
    check_length(text, REGEX_BYTES_MAX)?;
    let mut parts = SchemaParts::default();
    parts.0[UNICODE_CLASSES] = unicode_classes(text);
    parts.check(1)?;
    let parsed = ParserBuilder::new().nest_limit(REGEX_DEPTH_MAX).build().parse(text);
    if let Err(error) = parsed {
        let at =
            |kind: &dyn Display, span: &ast::Span| format!("{kind} at byte {}", span.start.offset);
        let reason = match &error {
            regex_syntax::Error::Parse(error) => at(error.kind(), error.span()),
            regex_syntax::Error::Translate(error) => at(error.kind(), error.span()),
            other => one_line(&other.to_string()),
        };
        return Err(GrammarError::NotARegex { reason });
    }
    Ok(())
}

/// Parts that make a schema expensive to compile: their name in errors, and how many one schema may
/// have.
const PARTS: [(&str, usize); 9] = [
    ("properties", SCHEMA_PROPERTIES_MAX),
    ("values in enums", SCHEMA_VALUES_MAX),
    ("parts in anyOf, oneOf and allOf", SCHEMA_ALTERNATIVES_MAX),
    ("values of format", SCHEMA_FORMATS_MAX),
    ("objects", SCHEMA_OBJECTS_MAX),
    ("non-ASCII character classes (a case-insensitive one counts 20)", UNICODE_CLASSES_MAX),
    ("subschemas in copies of schemas that are combined with others", SCHEMA_COPIES_MAX),
    (
        "pairs of different patterns in one object, or in all objects if schemas are combined",
        SCHEMA_PATTERN_PAIRS_MAX,
    ),
    ("levels of schemas to which references lead", SCHEMA_REFERENCED_LEVELS_MAX),
];
const PROPERTIES: usize = 0;
const ENUM_VALUES: usize = 1;
const ALTERNATIVES: usize = 2;
const FORMATS: usize = 3;
const OBJECTS: usize = 4;
const UNICODE_CLASSES: usize = 5;
const COPIES: usize = 6;
const PATTERN_PAIRS: usize = 7;
const REFERENCED_LEVELS: usize = 8;

/// Counts of [`PARTS`] in a schema. Keywords count wherever they occur: a property may be called
/// `const`, and `$ref` may lead into a value.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SchemaParts([usize; PARTS.len()]);

impl SchemaParts {
    fn of(schema: &Value) -> Result<Self, GrammarError> {
        let mut parts = Self::default();
        let mut multiples = Vec::new();
        let mut merges_subschemas = false;
        let mut rest = vec![schema];
        while let Some(value) = rest.pop() {
            let Value::Object(object) = value else {
                rest.extend(value.as_array().into_iter().flatten());
                continue;
            };
            parts.0[OBJECTS] += 1;
            merges_subschemas |= merges(object);
            for (keyword, value) in object {
                match (keyword.as_str(), value) {
                    ("properties", Value::Object(all)) => parts.0[PROPERTIES] += all.len(),
                    ("patternProperties", Value::Object(all)) => {
                        parts.0[PROPERTIES] += all.len();
                        parts.0[UNICODE_CLASSES] +=
                            all.keys().map(|pattern| unicode_classes(pattern)).sum::<usize>();
                    }
                    ("enum", Value::Array(all)) => parts.0[ENUM_VALUES] += all.len(),
                    ("anyOf" | "oneOf" | "allOf", Value::Array(all)) => {
                        parts.0[ALTERNATIVES] += all.len();
                    }
                    ("format", Value::String(_)) => parts.0[FORMATS] += 1,
                    ("pattern", Value::String(pattern)) => {
                        parts.0[UNICODE_CLASSES] += unicode_classes(pattern);
                    }
                    ("multipleOf", Value::Number(number)) => {
                        let multiple = Multiple::of(number).ok_or_else(|| {
                            let value = number.to_string();
                            GrammarError::MultipleOf { value, max: MULTIPLE_OF_MAX }
                        })?;
                        multiples.push(multiple);
                    }
                    _ => {}
                }
                rest.push(value);
            }
        }
        if merges_subschemas && !Multiple::have_small_common_multiple(&multiples) {
            return Err(GrammarError::CommonMultiple { max: MULTIPLE_OF_MAX });
        }
        Ok(parts)
    }

    /// Rejects more than `factor` times the parts that one schema may have.
    pub(crate) fn check(self, factor: usize) -> Result<(), GrammarError> {
        for ((what, max), count) in PARTS.into_iter().zip(self.0) {
            let max = max * factor;
            if count > max {
                return Err(GrammarError::TooMany { what, count, max });
            }
        }
        Ok(())
    }
}

impl AddAssign for SchemaParts {
    fn add_assign(&mut self, other: Self) {
        self.0.iter_mut().zip(other.0).for_each(|(count, more)| *count += more);
    }
}

/// Returns whether llguidance intersects subschemas here, and with them their `multipleOf` values.
fn merges(schema: &Map<String, Value>) -> bool {
    let has = |keyword: &&str| schema.contains_key(*keyword);
    let combined = ["anyOf", "oneOf", "$ref"].iter().filter(|keyword| has(keyword)).count();
    let own = ["multipleOf", "properties", "patternProperties", "additionalProperties"];
    let lists = ["items", "prefixItems", "additionalItems"];
    schema.contains_key("allOf")
        || combined > 1
        || (combined == 1 && own.iter().chain(&lists).any(has))
}

/// `coefficient / 10^places`, as llguidance reads a `multipleOf`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Multiple {
    coefficient: u64,
    places: u32,
}

impl Multiple {
    /// Reads a number; `None` beyond the bounds.
    fn of(number: &Number) -> Option<Self> {
        let mut value = number.as_f64()?.abs();
        let mut places = 0;
        // The fewest decimal places that represent the number.
        while (value - value.round()).abs() > value * 1e-12 {
            value *= 10.0;
            places += 1;
            if places > MULTIPLE_OF_PLACES_MAX {
                return None;
            }
        }
        let mut whole = value.round();
        let coefficient = whole;
        while whole >= 10.0 && whole % 10.0 == 0.0 {
            whole /= 10.0;
        }
        let is_bounded =
            whole <= f64::from(MULTIPLE_OF_MAX) && coefficient <= MULTIPLE_OF_COEFFICIENT_MAX;
        is_bounded.then_some(Self { coefficient: coefficient as u64, places })
    }

    /// Returns whether the least common multiple is at most [`MULTIPLE_OF_MAX`]: llguidance
    /// multiplies two of its divisors in 32 bits.
    fn have_small_common_multiple(all: &[Self]) -> bool {
        let places = all.iter().map(|multiple| multiple.places).max().unwrap_or(0);
        let mut common = 1;
        for multiple in all.iter().filter(|multiple| multiple.coefficient != 0) {
            let one = multiple.coefficient * 10_u64.pow(places - multiple.places);
            common = (common / gcd(common, one)).saturating_mul(one);
            if common > u64::from(MULTIPLE_OF_MAX) {
                return false;
            }
        }
        true
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Returns how expensive the character classes beyond ASCII are, in units of one class. An
/// expression that does not parse counts nothing: the compiler rejects it.
fn unicode_classes(expression: &str) -> usize {
    let Ok(parsed) = ast::parse::Parser::new().parse(expression) else { return 0 };
    let Ok(counted) = ast::visit(&parsed, ClassCounter::default());
    match counted.is_case_insensitive {
        true => (counted.unicode + counted.negated) * CASE_INSENSITIVE_CLASS_WEIGHT,
        false => counted.unicode,
    }
}

#[derive(Default)]
struct ClassCounter {
    unicode: usize,
    negated: usize,
    is_case_insensitive: bool,
}

impl ClassCounter {
    fn count_perl(&mut self, class: &ClassPerl) {
        // `\d` and `\s` are small.
        self.unicode += usize::from(class.kind == ClassPerlKind::Word);
    }
}

impl ast::Visitor for ClassCounter {
    type Output = Self;
    type Err = Infallible;

    fn finish(self) -> Result<Self, Infallible> {
        Ok(self)
    }

    fn visit_pre(&mut self, part: &Ast) -> Result<(), Infallible> {
        match part {
            Ast::ClassUnicode(_) => self.unicode += 1,
            Ast::ClassPerl(class) => self.count_perl(class),
            Ast::ClassBracketed(class) => self.negated += usize::from(class.negated),
            Ast::Flags(flags) => self.is_case_insensitive |= sets_case_insensitive(&flags.flags),
            Ast::Group(group) => {
                self.is_case_insensitive |= group.flags().is_some_and(sets_case_insensitive);
            }
            _ => {}
        }
        Ok(())
    }

    fn visit_class_set_item_pre(&mut self, item: &ClassSetItem) -> Result<(), Infallible> {
        match item {
            ClassSetItem::Unicode(_) => self.unicode += 1,
            ClassSetItem::Perl(class) => self.count_perl(class),
            ClassSetItem::Bracketed(class) => self.negated += usize::from(class.negated),
            ClassSetItem::Range(range) => self.unicode += usize::from(!range.end.c.is_ascii()),
            _ => {}
        }
        Ok(())
    }
}

fn sets_case_insensitive(flags: &ast::Flags) -> bool {
    flags.flag_state(ast::Flag::CaseInsensitive) == Some(true)
}

fn check_length(text: &str, max: usize) -> Result<(), GrammarError> {
    let bytes = text.len();
    if bytes > max { Err(GrammarError::TooLong { bytes, max }) } else { Ok(()) }
}

/// Returns the nesting depth of objects and lists in a JSON text, without recursion. The result for
/// other text has no meaning.
fn depth(text: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let (mut in_string, mut is_escaped) = (false, false);
    for byte in text.bytes() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if in_string => is_escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'{' | b'[' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_counts_brackets_outside_of_strings() {
        assert_eq!(depth(r#"{"a": [{"b": "[[[[\"{{"}], "c": []}"#), 3);
        assert_eq!(depth("]]]["), 1);
        assert_eq!(depth(r#""\\"[["#), 2);
    }

    #[test]
    fn schemas_beyond_a_limit_are_rejected_with_the_limit() {
        let schema = |text: String| Grammar::JsonSchema(text).parsed().unwrap_err().to_string();
        let long = format!(r#"{{"const": "{}"}}"#, "x".repeat(SCHEMA_BYTES_MAX));
        assert_eq!(schema(long), "has 65549 bytes; allowed: at most 65536");
        let deep = format!("{}1{}", "[".repeat(40_000), "]".repeat(20_000));
        assert_eq!(schema(deep), "nests 40000 deep; allowed: at most 32");
        let regex = |text: String| Grammar::Regex(text).parsed().unwrap_err().to_string();
        assert_eq!(regex("a".repeat(20_000)), "has 20000 bytes; allowed: at most 16384");
        let nested = format!("{}a{}", "(".repeat(500), ")".repeat(500));
        assert!(regex(nested).contains("nest"));
    }

    #[test]
    fn schema_errors_name_their_location() {
        let said = |grammar: Grammar| grammar.parsed().unwrap_err().to_string();
        let schema = said(Grammar::JsonSchema(r#"{"type": }"#.into()));
        assert!(schema.contains("line 1 column 10"), "{schema}");
        assert!(said(Grammar::JsonSchema("7".into())).contains("a number is not an object"));
        assert!(said(Grammar::JsonSchema("false".into())).contains("false is not an object"));
        let text = said(Grammar::JsonSchema(format!("\"{}\"", "x".repeat(60_000))));
        assert_eq!(text, "is not a JSON schema: a string is not an object");
        let regex = said(Grammar::Regex("ab(c".into()));
        assert_eq!(regex, "is not a regular expression: unclosed group at byte 2");
        assert!(said(Grammar::Regex(r"a\".into())).contains("incomplete escape"));
    }
}
