//! The keys of a JSON file of a Hugging Face folder.

use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::ModelError;

/// Parsed JSON file and its path.
pub(crate) struct JsonFile {
    pub path: PathBuf,
    pub value: Value,
}

impl JsonFile {
    pub(super) fn fields(&self) -> Result<Fields<'_>, ModelError> {
        let object = self.value.as_object().ok_or_else(|| ModelError::NotAModel {
            path: self.path.clone(),
            reason: "its JSON is not an object".into(),
        })?;
        Ok(Fields { path: &self.path, object, parent: None })
    }
}

/// Keys of one object, with errors that name file and key.
pub(crate) struct Fields<'a> {
    pub(super) path: &'a Path,
    pub(super) object: &'a Map<String, Value>,
    /// Key of the object in its parent.
    pub(super) parent: Option<&'static str>,
}

impl Fields<'_> {
    /// Returns the value of `key`. A null counts as absent.
    pub(crate) fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, ModelError> {
        match self.object.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(whole(value))
                .map(Some)
                .map_err(|error| self.bad(key, error.to_string())),
        }
    }

    /// Returns the value of `key` or a default. Unlike in [`get`](Self::get), a null is not absent.
    pub(super) fn get_or<T: DeserializeOwned>(
        &self,
        key: &str,
        absent: Option<T>,
    ) -> Result<Option<T>, ModelError> {
        if self.object.contains_key(key) { self.get(key) } else { Ok(absent) }
    }

    /// Returns the size of the sliding window in tokens; `None`: 0 or null.
    pub(crate) fn sliding_window(&self) -> Result<Option<NonZeroUsize>, ModelError> {
        const TOKENS_DEFAULT: usize = 4096;
        let tokens = self.get_or::<usize>("sliding_window", Some(TOKENS_DEFAULT))?;
        Ok(tokens.and_then(NonZeroUsize::new))
    }

    pub(crate) fn require<T: DeserializeOwned>(&self, key: &str) -> Result<T, ModelError> {
        self.get(key)?.ok_or_else(|| self.bad(key, "is missing".into()))
    }

    /// Returns the value of `key` or a default; without a default, the key is required.
    pub(super) fn require_or<T: DeserializeOwned>(
        &self,
        key: &str,
        absent: Option<T>,
    ) -> Result<T, ModelError> {
        match absent {
            None => self.require(key),
            Some(absent) => Ok(self.get(key)?.unwrap_or(absent)),
        }
    }

    /// Rejects a word that is not one of `words`.
    pub(crate) fn check_word(
        &self,
        key: &str,
        words: &[&str],
        supported: &'static str,
    ) -> Result<(), ModelError> {
        match self.get::<String>(key)? {
            Some(word) if !words.contains(&word.as_str()) => {
                Err(self.unsupported(key, format!("{word:?}"), supported))
            }
            _ => Ok(()),
        }
    }

    /// Returns the ids of a key that holds one id, a list, or nothing. A null or negative id means
    /// none.
    pub(super) fn token_ids(&self, key: &str) -> Result<Vec<u32>, ModelError> {
        let ids = match self.object.get(key) {
            Some(Value::Array(ids)) => ids.as_slice(),
            Some(id) => std::slice::from_ref(id),
            None => &[],
        };
        let is_absent = |id: &Value| id.is_null() || id.as_f64().is_some_and(|id| id < 0.0);
        let id = |id| serde_json::from_value(whole(id));
        let ids = ids.iter().filter(|id| !is_absent(id)).map(id);
        ids.collect::<Result<_, _>>().map_err(|error| self.bad(key, error.to_string()))
    }

    /// Reads the part of a head that is rotated. Rejects a part if only whole heads may be rotated.
    pub(super) fn rotary_factor(&self, may_be_part: bool) -> Result<Option<f64>, ModelError> {
        const KEY: &str = "partial_rotary_factor";
        match self.get::<f64>(KEY)? {
            Some(factor) if factor != 1.0 && !may_be_part => {
                Err(self.unsupported(KEY, factor.to_string(), "1"))
            }
            factor => Ok(factor),
        }
    }

    fn full_key(&self, key: &str) -> String {
        match self.parent {
            Some(parent) => format!("{parent}.{key}"),
            None => key.into(),
        }
    }

    pub(crate) fn bad(&self, key: &str, reason: String) -> ModelError {
        ModelError::ConfigKey { path: self.path.into(), key: self.full_key(key), reason }
    }

    pub(crate) fn unsupported(
        &self,
        key: &str,
        found: String,
        supported: &'static str,
    ) -> ModelError {
        let key = self.full_key(key);
        ModelError::Unsupported { path: self.path.into(), key, found, supported }
    }
}

/// Returns a whole number as an integer: some tools write integers as floats.
fn whole(value: &Value) -> Value {
    /// Up to here a float has every whole number.
    const MAX: f64 = (1_u64 << 53) as f64;
    match value.as_f64() {
        Some(number) if value.is_f64() && number.fract() == 0.0 && number.abs() <= MAX => {
            (number as i64).into()
        }
        _ => value.clone(),
    }
}
