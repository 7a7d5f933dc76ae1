//! Functions that an answer may call, and the types of their parameters.

use serde_json::{Map, Value};

/// Maximum depth of references and alternatives to which the types of a schema are read.
const DEPTH_MAX: usize = 8;
/// Maximum number of a function's schemas that are read for the types of its parameters. Further
/// schemas count as schemas that allow any type.
const SCHEMAS_MAX: usize = 10_000;

/// A function that an answer may call.
#[derive(Clone, Debug)]
pub struct CallableFunction {
    pub name: String,
    types: Vec<(String, JsonTypes)>,
}

impl CallableFunction {
    /// `parameters` is the JSON schema of the arguments.
    pub fn new(name: impl Into<String>, parameters: Option<&Map<String, Value>>) -> Self {
        let properties = parameters.and_then(|root| Some((root, root.get("properties")?)));
        let mut left = SCHEMAS_MAX;
        let mut types = Vec::new();
        if let Some((root, Value::Object(properties))) = properties {
            for (key, schema) in properties {
                types.push((key.clone(), JsonTypes::allowed_by(schema, root, 0, &mut left)));
            }
        }
        Self { name: name.into(), types }
    }

    /// Returns the types of a parameter.
    pub(super) fn types(&self, parameter: &str) -> JsonTypes {
        let found = self.types.iter().find(|(name, _)| name == parameter);
        found.map_or(JsonTypes::ANY, |(_, types)| *types)
    }
}

/// A set of JSON types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct JsonTypes(u8);

impl JsonTypes {
    pub(super) const ANY: Self = Self(u8::MAX);
    pub(super) const STRING: Self = Self(1);

    fn named(name: &str) -> Self {
        match name {
            "string" => Self::STRING,
            "integer" => Self(2),
            "number" => Self(2 | 4),
            "boolean" => Self(8),
            "null" => Self(16),
            "array" => Self(32),
            "object" => Self(64),
            _ => Self::ANY,
        }
    }

    pub(super) fn of(value: &Value) -> Self {
        Self::named(match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(number) if number.is_f64() => return Self(4),
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        })
    }

    /// Returns whether the sets overlap.
    pub(super) fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    fn union(all: impl Iterator<Item = Self>) -> Self {
        Self(all.fold(0, |bits, types| bits | types.0))
    }

    /// Returns the types that a schema allows, as far as its keywords name types. Visits at most
    /// `left` schemas, because references may repeat.
    fn allowed_by(
        schema: &Value,
        root: &Map<String, Value>,
        depth: usize,
        left: &mut usize,
    ) -> Self {
        let Value::Object(schema) = schema else { return Self::ANY };
        if depth > DEPTH_MAX || *left == 0 {
            return Self::ANY;
        }
        *left -= 1;
        let mut inner = |schema: &Value| Self::allowed_by(schema, root, depth + 1, left);
        let mut types = Self::ANY;
        for (keyword, value) in schema {
            let allowed = match (keyword.as_str(), value) {
                ("type", Value::String(name)) => Self::named(name),
                ("type", Value::Array(names)) => {
                    Self::union(names.iter().filter_map(Value::as_str).map(Self::named))
                }
                ("const", value) => Self::of(value),
                ("enum", Value::Array(values)) => Self::union(values.iter().map(Self::of)),
                ("anyOf" | "oneOf", Value::Array(all)) => Self::union(all.iter().map(&mut inner)),
                ("allOf", Value::Array(all)) => {
                    Self(all.iter().map(&mut inner).fold(u8::MAX, |bits, types| bits & types.0))
                }
                ("$ref", Value::String(path)) => {
                    let target = path.strip_prefix("#/").and_then(|path| {
                        let (first, rest) = path.split_once('/')?;
                        root.get(first)?.get(rest)
                    });
                    target.map_or(Self::ANY, &mut inner)
                }
                _ => Self::ANY,
            };
            types = Self(types.0 & allowed.0);
        }
        types
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_schema_of_many_references_is_read_in_bounded_time() {
        let again = json!({"$ref": "#/$defs/A"});
        let schema = json!({
            "properties": {"x": again, "s": {"type": "string"}},
            "$defs": {"A": {"anyOf": vec![again.clone(); 1000]}},
        });
        let function = CallableFunction::new("f", schema.as_object());
        assert_eq!(function.types("x"), JsonTypes::ANY);
    }
}
