//! Metadata map and its typed getters.

use std::collections::BTreeMap;

use crate::{
    error::GgufError,
    value::{Array, Value},
};

/// Keys and values, sorted by key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    entries: BTreeMap<String, Value>,
}

impl Metadata {
    /// Returns the value of `key` with the type in the file.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.entries.get(key)
    }

    /// Returns the value of `key` as `T`; `None` when the key is absent.
    ///
    /// # Errors
    /// `WrongType` or `OutOfRange` when the value cannot be converted to `T`.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, GgufError> {
        self.entries.get(key).map(|value| T::from_value(key, value)).transpose()
    }

    /// Returns the value of `key` as `T`.
    ///
    /// # Errors
    /// As [`get`](Self::get), and `MissingKey` when the key is absent.
    pub fn require<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, GgufError> {
        self.get(key)?.ok_or_else(|| GgufError::MissingKey { key: key.into(), wanted: T::WANTED })
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Inserts a value. Returns false, and keeps the first value, when the key exists already.
    pub(crate) fn insert(&mut self, key: String, value: Value) -> bool {
        match self.entries.entry(key) {
            std::collections::btree_map::Entry::Vacant(entry) => {
                entry.insert(value);
                true
            }
            std::collections::btree_map::Entry::Occupied(_) => false,
        }
    }
}

/// Type to which a metadata value can be converted.
///
/// Integers of every width and sign are accepted where the number fits, because writers use different
/// types.
pub trait FromValue<'a>: Sized {
    /// Name of the type in errors.
    const WANTED: &'static str;
    /// Converts a value.
    ///
    /// # Errors
    /// `WrongType` or `OutOfRange`, naming `key`.
    fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError>;
}

fn wrong_type<'a, T: FromValue<'a>>(key: &str, value: &Value) -> GgufError {
    GgufError::WrongType { key: key.into(), found: value.type_name(), wanted: T::WANTED }
}

macro_rules! integers {
    ($($type:ident: $wanted:literal),*) => {$(
        impl<'a> FromValue<'a> for $type {
            const WANTED: &'static str = $wanted;
            fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError> {
                let integer = value.as_integer().ok_or_else(|| wrong_type::<Self>(key, value))?;
                $type::try_from(integer).map_err(|_| GgufError::OutOfRange {
                    key: key.into(),
                    found: integer.to_string(),
                    wanted: Self::WANTED,
                })
            }
        }
    )*};
}
integers!(u32: "u32", u64: "u64", usize: "u64", i32: "i32", i64: "i64");

impl<'a> FromValue<'a> for f32 {
    const WANTED: &'static str = "f32";
    fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError> {
        match value {
            Value::F32(v) => Ok(*v),
            Value::F64(v) => Ok(*v as f32),
            _ => Err(wrong_type::<Self>(key, value)),
        }
    }
}

impl<'a> FromValue<'a> for f64 {
    const WANTED: &'static str = "f64";
    fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError> {
        match value {
            Value::F32(v) => Ok((*v).into()),
            Value::F64(v) => Ok(*v),
            _ => Err(wrong_type::<Self>(key, value)),
        }
    }
}

impl<'a> FromValue<'a> for bool {
    const WANTED: &'static str = "bool";
    fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError> {
        match value {
            Value::Bool(v) => Ok(*v),
            _ => Err(wrong_type::<Self>(key, value)),
        }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const WANTED: &'static str = "string";
    fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError> {
        match value {
            Value::String(v) => Ok(v),
            _ => Err(wrong_type::<Self>(key, value)),
        }
    }
}

impl<'a> FromValue<'a> for &'a Array {
    const WANTED: &'static str = "array";
    fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError> {
        match value {
            Value::Array(v) => Ok(v),
            _ => Err(wrong_type::<Self>(key, value)),
        }
    }
}

macro_rules! arrays {
    ($($type:ty, $variant:ident, $wanted:literal;)*) => {$(
        impl<'a> FromValue<'a> for &'a [$type] {
            const WANTED: &'static str = $wanted;
            fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError> {
                match value {
                    Value::Array(Array::$variant(v)) => Ok(v),
                    _ => Err(wrong_type::<Self>(key, value)),
                }
            }
        }
    )*};
}
arrays! {
    String, String, "array of string";
    i32, I32, "array of i32";
    u32, U32, "array of u32";
    f32, F32, "array of f32";
    u8, U8, "array of u8";
    bool, Bool, "array of bool";
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(key: &str, value: Value) -> Metadata {
        let mut metadata = Metadata::default();
        assert!(metadata.insert(key.into(), value));
        metadata
    }

    #[test]
    fn integers_of_any_width_are_accepted_where_they_fit() {
        assert_eq!(metadata("a", Value::U8(7)).require::<u32>("a").unwrap(), 7);
        assert_eq!(metadata("a", Value::I64(7)).require::<u32>("a").unwrap(), 7);
        let negative = metadata("a", Value::I32(-1));
        let error = negative.require::<u32>("a").unwrap_err();
        assert_eq!(error.to_string(), "metadata key \"a\" is -1, which does not fit u32");
    }

    #[test]
    fn wrong_types_name_key_found_and_wanted() {
        let tokens = metadata("tokens", Value::Array(Array::String(vec!["a".into(), "b".into()])));
        let error = tokens.require::<u32>("tokens").unwrap_err();
        assert_eq!(error.to_string(), "metadata key \"tokens\" is array of string[2], wanted u32");
        let error = tokens.require::<&[i32]>("tokens").unwrap_err();
        assert_eq!(
            error.to_string(),
            "metadata key \"tokens\" is array of string[2], wanted array of i32"
        );
        assert_eq!(tokens.require::<&[String]>("tokens").unwrap(), ["a", "b"]);
    }

    #[test]
    fn absent_keys_are_none_or_missing() {
        let empty = Metadata::default();
        assert_eq!(empty.get::<f32>("eps").unwrap(), None);
        let error = empty.require::<f32>("eps").unwrap_err();
        assert_eq!(error.to_string(), "metadata key \"eps\" is missing (wanted f32)");
    }
}
