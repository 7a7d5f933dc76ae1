//! The grammar of arguments that are written as parameters between tags.
//!
//! A parameter whose schema allows a string is text up to the end of its value, or one of the texts
//! of its `enum`: `pattern`, `format` and lengths are not checked. Every other parameter is JSON of
//! its schema.

use serde_json::{Map, Value};

use crate::{
    copies::has_reference,
    error::GrammarError,
    limits::{SCHEMA_PROPERTIES_MAX, TOOLS_BYTES_MAX},
};

/// Keywords of the definitions to which references point.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];
/// References in a row that are followed.
const REFERENCES_MAX: usize = 8;
/// Schemas that are visited to find out whether a value may be text. The others are JSON.
const SCHEMAS_MAX: usize = 256;

/// Syntax of a parameter: `before_name NAME before_value VALUE after_value`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ParameterSyntax {
    pub before_name: String,
    pub before_value: String,
    pub after_value: String,
    /// Text between two parameters.
    pub between: String,
    /// End of a value that is text, a part of `after_value`; `None` if strings are written as in
    /// JSON.
    pub text_end: Option<String>,
}

impl ParameterSyntax {
    pub(crate) fn literals(&self) -> impl Iterator<Item = &str> {
        let texts = [&self.before_name, &self.before_value, &self.after_value, &self.between];
        texts.into_iter().chain(&self.text_end).map(String::as_str)
    }
}

/// A schema that a grammar of tool calls uses.
pub(crate) struct ArgumentSchema {
    /// Index of the tool.
    pub tool: usize,
    /// Name of the rule that matches the schema.
    pub rule: String,
    pub text: String,
}

/// The arguments of one tool.
pub(crate) struct Arguments<'a> {
    pub parameters: &'a ParameterSyntax,
    pub tool: usize,
}

/// A sequence of parameters from one on.
#[derive(Clone)]
struct Sequence {
    rule: String,
    may_be_empty: bool,
}

impl Sequence {
    fn element(sequence: Option<&Self>) -> String {
        match sequence {
            None => String::new(),
            Some(Self { rule, may_be_empty: true }) => format!("{rule}?"),
            Some(Self { rule, .. }) => rule.clone(),
        }
    }
}

impl Arguments<'_> {
    /// Returns the element of a rule that matches the arguments. Appends the schemas and the rules
    /// that it uses.
    pub(crate) fn lark(
        &self,
        schema: Option<&str>,
        schemas: &mut Vec<ArgumentSchema>,
        rules: &mut String,
    ) -> Result<String, GrammarError> {
        let index = self.tool;
        let text = schema.unwrap_or("{}");
        // The grammar of all arguments is checked with the error of the parser.
        let root: Map<String, Value> = serde_json::from_str(text).map_err(|error| {
            GrammarError::NotASchema { reason: error.to_string() }.in_tool(index)
        })?;
        let Some(Value::Object(properties)) = root.get("properties") else {
            return Ok(self.any(schemas, rules));
        };
        let (count, max) = (properties.len(), SCHEMA_PROPERTIES_MAX);
        if count > max {
            return Err(GrammarError::TooMany { what: "properties", count, max }.in_tool(index));
        }
        // Each parameter with a reference gets a copy of the definitions.
        let definitions = DEFINITIONS.into_iter().filter_map(|it| root.get(it));
        let shared = definitions.map(|it| it.to_string().len()).sum::<usize>();
        let bytes = shared * properties.values().filter(|it| has_reference(it)).count();
        if bytes > 2 * TOOLS_BYTES_MAX {
            let max = 2 * TOOLS_BYTES_MAX;
            return Err(GrammarError::ToolsTooLong { bytes, max }.in_tool(index));
        }
        let required = |name: &str| {
            root.get("required").and_then(Value::as_array).is_some_and(|required| {
                required.iter().any(|required| required.as_str() == Some(name))
            })
        };
        let between = literal(&self.parameters.between);
        // The parameters from the last to the first: after another one, and as the first one.
        let (mut rest, mut first): (Option<Sequence>, Option<Sequence>) = (None, None);
        for (position, (name, schema)) in properties.iter().enumerate().rev() {
            let value = self.value(position, schema, &root, schemas);
            let syntax = self.parameters;
            let opening = format!("{}{name}{}", syntax.before_name, syntax.before_value);
            let parameter = format!("parameter_{index}_{position}");
            rules.push_str(&format!("{parameter}: {} {value}\n", quoted(&opening)));
            let tail = Sequence::element(rest.as_ref());
            let sequence = |kind: &str, before: &str, next: Option<&Sequence>| {
                let own = format!("{before}{parameter} {tail}");
                let may_skip = !required(name);
                let skipped = next.filter(|_| may_skip).map(|next| format!(" | {}", next.rule));
                let rule = format!("{kind}_{index}_{position}");
                let text = format!("{rule}: {own}{}\n", skipped.unwrap_or_default());
                let may_be_empty = may_skip && next.is_none_or(|next| next.may_be_empty);
                (Sequence { rule, may_be_empty }, text)
            };
            let (its_first, first_text) = sequence("first", "", first.as_ref());
            let (its_rest, rest_text) = sequence("rest", &between, rest.as_ref());
            rules.push_str(&first_text);
            if position > 0 {
                rules.push_str(&rest_text);
            }
            (first, rest) = (Some(its_first), Some(its_rest));
        }
        Ok(Sequence::element(first.as_ref()))
    }

    /// Returns the element of any parameters.
    fn any(&self, schemas: &mut Vec<ArgumentSchema>, rules: &mut String) -> String {
        let (index, syntax) = (self.tool, self.parameters);
        let value = self.value(0, &Value::Bool(true), &Map::new(), schemas);
        let (before, between) = (literal(&syntax.before_name), literal(&syntax.between));
        rules.push_str(&format!(
            "ANY_NAME_{index}: /[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/\n\
             any_{index}: {before}ANY_NAME_{index} {} {value}\n\
             any_list_{index}: any_{index} ({between}any_{index})*\n",
            quoted(&syntax.before_value),
        ));
        format!("any_list_{index}?")
    }

    /// Returns the elements of a value and the text after it.
    fn value(
        &self,
        position: usize,
        schema: &Value,
        root: &Map<String, Value>,
        schemas: &mut Vec<ArgumentSchema>,
    ) -> String {
        let syntax = self.parameters;
        let after = &syntax.after_value;
        if let Some(end) = &syntax.text_end {
            let resolved = resolved(schema, root);
            if let Some(texts) = texts(resolved) {
                let choices = texts.iter().map(|text| quoted(&format!("{text}{after}")));
                return format!("({})", choices.collect::<Vec<_>>().join(" | "));
            }
            if allows_text(resolved, root, &mut { SCHEMAS_MAX }) {
                let rest = after.split_once(end.as_str()).map_or("", |(_, rest)| rest);
                return format!("text_value {}", literal(rest));
            }
        }
        let needs_definitions = has_reference(schema);
        let mut schema = match schema {
            Value::Object(schema) => schema.clone(),
            _ => Map::new(),
        };
        for definitions in DEFINITIONS.into_iter().filter(|_| needs_definitions) {
            if let Some(its) = root.get(definitions) {
                schema.entry(definitions).or_insert_with(|| its.clone());
            }
        }
        let rule = format!("value_{}_{position}", self.tool);
        let text = Value::Object(schema).to_string();
        schemas.push(ArgumentSchema { tool: self.tool, rule: rule.clone(), text });
        format!("@{rule} {}", literal(after))
    }
}

/// Returns the only texts that a schema allows, if it lists them.
fn texts(schema: &Value) -> Option<Vec<&str>> {
    let listed = match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => std::slice::from_ref(value),
        (None, Some(Value::Array(values))) if !values.is_empty() => values,
        _ => return None,
    };
    listed.iter().map(Value::as_str).collect()
}

/// Follows references to the definitions of `root`, as far as there are few.
fn resolved<'a>(mut schema: &'a Value, root: &'a Map<String, Value>) -> &'a Value {
    for _ in 0..REFERENCES_MAX {
        let path = schema.get("$ref").and_then(Value::as_str).and_then(|it| it.strip_prefix("#/"));
        let parts = path.and_then(|path| path.split_once('/'));
        let Some(target) = parts.and_then(|(first, rest)| root.get(first)?.get(rest)) else {
            break;
        };
        schema = target;
    }
    schema
}

/// Returns whether a value may be text without quotes. Visits at most `left` schemas.
fn allows_text(schema: &Value, root: &Map<String, Value>, left: &mut usize) -> bool {
    if *left == 0 {
        return false;
    }
    *left -= 1;
    let is_string = |value: &Value| value.as_str() == Some("string");
    match schema {
        Value::Bool(_) => true,
        Value::Object(schema) if schema.is_empty() => true,
        _ => {
            let kinds = schema.get("type");
            let is_text = kinds.is_some_and(|kinds| {
                is_string(kinds) || kinds.as_array().is_some_and(|all| all.iter().any(is_string))
            });
            let lists_text = schema.get("const").is_some_and(Value::is_string)
                || (schema.get("enum").and_then(Value::as_array))
                    .is_some_and(|listed| listed.iter().any(Value::is_string));
            let alternatives = ["anyOf", "oneOf", "allOf"].map(|key| schema.get(key));
            let mut alternatives = alternatives.into_iter().flatten().filter_map(Value::as_array);
            is_text
                || lists_text
                || alternatives
                    .any(|all| all.iter().any(|it| allows_text(resolved(it, root), root, left)))
        }
    }
}

/// Returns the text as an element of a rule, or nothing for no text.
pub(crate) fn literal(text: &str) -> String {
    if text.is_empty() { String::new() } else { quoted(text) + " " }
}

/// Returns a Lark string literal, which has the syntax of JSON.
pub(crate) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
