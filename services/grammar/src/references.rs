//! References of a schema, and how deep llguidance nests the schemas to which they lead.
//!
//! llguidance compiles the target of each different reference once, inside the schema that has the
//! reference. References overlap: one may lead into the target of another, and an index of a list
//! may be written in several ways (`0`, `00`, `+0`). So the same text may nest in itself many
//! times.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

/// Returns the levels of objects in the schemas to which references lead, once for each different
/// reference. llguidance and [`copied_subschemas`](crate::copies::copied_subschemas) recurse into
/// no more.
pub(crate) fn referenced_levels(root: &Value) -> usize {
    let (mut levels_of, mut seen) = (HashMap::new(), HashSet::new());
    let mut levels = 0;
    let mut rest = vec![root];
    while let Some(value) = rest.pop() {
        if let Some(reference) = value.get("$ref").and_then(Value::as_str)
            && seen.insert(reference)
            && let Some(schema) = referenced(root, reference)
        {
            let levels_of_schema = levels_of.entry(std::ptr::from_ref(schema));
            levels += *levels_of_schema.or_insert_with(|| object_levels(schema));
        }
        rest.extend(children(value));
    }
    levels
}

/// Returns the number of nested objects, the value itself included.
fn object_levels(value: &Value) -> usize {
    usize::from(value.is_object()) + children(value).map(object_levels).max().unwrap_or(0)
}

/// Returns the schema that llguidance finds under a reference.
pub(crate) fn referenced<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    if matches!(reference, "#" | "#/") {
        return Some(root);
    }
    reference.strip_prefix("#/")?.split('/').try_fold(root, |value, segment| match value {
        Value::Array(all) => all.get(segment.parse::<usize>().ok()?),
        value => value.get(segment),
    })
}

/// Returns the values directly inside a value.
pub(crate) fn children(value: &Value) -> impl Iterator<Item = &Value> {
    let properties = value.as_object().into_iter().flat_map(|keywords| keywords.values());
    value.as_array().into_iter().flatten().chain(properties)
}
