//! Rewrites schemas to what llguidance supports.

use std::collections::HashMap;

use percent_encoding::percent_decode_str;
use serde_json::{Map, Value};

use crate::{
    error::GrammarError,
    keywords::rewrite,
    limits::TAG_BYTES_MAX,
    references::{children, referenced},
};

/// Formats of strings that llguidance knows.
const FORMATS_KNOWN: [&str; 10] =
    ["date-time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];

/// Rewrites a schema to what llguidance supports: keywords by [`rewrite`], references by
/// [`plain_references`]. Removes unknown formats, which are annotations in JSON Schema and errors
/// in llguidance, and requires the tags of tagged unions. Only subschemas are changed, not values
/// or names of properties.
pub(crate) fn adapt(schema: &mut Value) -> Result<(), GrammarError> {
    let mut plain = HashMap::new();
    plain_references(schema, schema, &mut plain);
    let keeps_one_of = refers_into_one_of(schema);
    let mut adaptation = Adaptation { plain, tags: Vec::new(), keeps_one_of };
    adaptation.adapt_subschema(schema)?;
    for (pointer, tag) in adaptation.tags {
        if let Some(Value::Object(definition)) = schema.pointer_mut(&pointer) {
            require_tag(definition, &tag);
        }
    }
    Ok(())
}

/// Collects references in the syntax of JSON pointers in URIs, with their form for llguidance,
/// which decodes nothing.
fn plain_references(root: &Value, value: &Value, plain: &mut HashMap<String, String>) {
    if let Some(reference) = value.get("$ref").and_then(Value::as_str)
        && reference.starts_with("#/")
        && reference.contains(['~', '%'])
        && referenced(root, reference).is_none()
    {
        let decoded = percent_decode_str(reference).decode_utf8_lossy();
        let segments =
            decoded.split('/').map(|it| without_slash(&it.replace("~1", "/").replace("~0", "~")));
        plain.insert(reference.to_owned(), segments.collect::<Vec<_>>().join("/"));
    }
    children(value).for_each(|value| plain_references(root, value, plain));
}

/// Returns a name that llguidance finds. It splits references at slashes.
fn without_slash(name: &str) -> String {
    name.replace('/', "\u{2215}")
}

/// Returns whether a reference leads into `oneOf`.
fn refers_into_one_of(value: &Value) -> bool {
    match value {
        Value::Object(keywords) => {
            let reference = keywords.get("$ref").and_then(Value::as_str);
            reference.is_some_and(|reference| reference.contains("/oneOf/"))
                || keywords.values().any(refers_into_one_of)
        }
        Value::Array(all) => all.iter().any(refers_into_one_of),
        _ => false,
    }
}

struct Adaptation {
    /// References that change, with their new form.
    plain: HashMap<String, String>,
    /// References that are alternatives of tagged unions, each with the name of the tag.
    tags: Vec<(String, String)>,
    /// Whether tagged unions stay in `oneOf`, because references may lead into them.
    keeps_one_of: bool,
}

impl Adaptation {
    fn adapt_subschema(&mut self, schema: &mut Value) -> Result<(), GrammarError> {
        let Value::Object(keywords) = schema else { return Ok(()) };
        if let Some(Value::String(reference)) = keywords.get_mut("$ref")
            && let Some(plain) = self.plain.get(reference)
        {
            reference.clone_from(plain);
        }
        let format = keywords.get("format").and_then(Value::as_str);
        if format.is_some_and(|format| !FORMATS_KNOWN.contains(&format)) {
            keywords.shift_remove("format");
        }
        rewrite(keywords)?;
        self.adapt_tagged_union(keywords);
        for (keyword, value) in keywords {
            match (keyword.as_str(), value) {
                ("properties" | "patternProperties", Value::Object(schemas)) => {
                    schemas.values_mut().try_for_each(|schema| self.adapt_subschema(schema))?;
                }
                ("$defs" | "definitions", Value::Object(schemas)) => {
                    self.adapt_definitions(schemas)?;
                }
                ("anyOf" | "oneOf" | "allOf" | "prefixItems" | "items", Value::Array(schemas)) => {
                    schemas.iter_mut().try_for_each(|schema| self.adapt_subschema(schema))?;
                }
                ("items" | "additionalItems" | "additionalProperties", schema) => {
                    self.adapt_subschema(schema)?;
                }
                // OpenAPI keeps its definitions in `components.schemas`.
                ("components", Value::Object(groups)) => {
                    if let Some(Value::Object(schemas)) = groups.get_mut("schemas") {
                        self.adapt_definitions(schemas)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn adapt_definitions(&mut self, schemas: &mut Map<String, Value>) -> Result<(), GrammarError> {
        if schemas.keys().any(|name| name.contains('/')) {
            let renamed = std::mem::take(schemas).into_iter();
            *schemas = renamed.map(|(name, schema)| (without_slash(&name), schema)).collect();
        }
        schemas.values_mut().try_for_each(|schema| self.adapt_subschema(schema))
    }

    /// Requires the property that `discriminator` names in each alternative of `oneOf`. Pydantic
    /// does not list a tag with a default as required, but refuses a value without the tag. The tag
    /// distinguishes the alternatives, so `anyOf` replaces `oneOf`: llguidance compares no numbers
    /// in `oneOf`. llguidance also copies the target of a reference that has sibling keywords, so
    /// the definition requires the tag, and `discriminator` is removed.
    fn adapt_tagged_union(&mut self, schema: &mut Map<String, Value>) {
        let discriminator = schema.get("discriminator").and_then(|it| it.get("propertyName"));
        let tag = discriminator.and_then(Value::as_str).filter(|tag| tag.len() <= TAG_BYTES_MAX);
        let Some(tag) = tag.map(str::to_owned) else { return };
        let Some(Value::Array(alternatives)) = schema.get_mut("oneOf") else { return };
        for alternative in alternatives.iter_mut().filter_map(Value::as_object_mut) {
            let reference = alternative.get("$ref").and_then(Value::as_str);
            match reference.and_then(|reference| reference.strip_prefix('#')) {
                Some(pointer) => self.tags.push((pointer.to_owned(), tag.clone())),
                None => require_tag(alternative, &tag),
            }
        }
        if !self.keeps_one_of
            && !schema.contains_key("anyOf")
            && let Some(alternatives) = schema.shift_remove("oneOf")
        {
            schema.shift_remove("discriminator");
            schema.insert("anyOf".to_owned(), alternatives);
        }
    }
}

/// Requires the tag in an alternative. A nested union without properties requires its own tag.
fn require_tag(schema: &mut Map<String, Value>, tag: &str) {
    let is_union = schema.contains_key("oneOf") || schema.contains_key("anyOf");
    if is_union && !schema.contains_key("properties") {
        return;
    }
    let required = schema.entry("required").or_insert_with(|| Value::Array(Vec::new()));
    let tag = Value::from(tag);
    if let Value::Array(required) = required
        && !required.contains(&tag)
    {
        required.push(tag);
    }
}
