//! Lists every value with its source.

use std::fmt;

use crate::{
    error::Source,
    load::{Config, Section},
    section::Setting,
};

/// Value of one setting and its source. A secret's value is `(hidden)` or `unset`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explained {
    pub setting: Setting,
    pub value: String,
    pub source: Source,
}

/// Table of values and sources for `--explain-config`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    pub values: Vec<Explained>,
}

impl Config {
    /// Returns every value of `sections` in the order of the schema.
    pub fn explain(&self, sections: &[Section]) -> Explanation {
        let named = |value: &&Explained| {
            sections.iter().any(|section| section.name() == value.setting.section)
        };
        Explanation { values: self.explained.iter().filter(named).cloned().collect() }
    }

    /// Returns the source of the value of `key` (`node.slots`).
    pub fn source_of(&self, key: &str) -> Source {
        let explained = self.explained.iter().find(|value| value.setting.key() == key);
        explained.map_or(Source::Default, |value| value.source.clone())
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = self.values.iter().map(|value| value.setting.key().chars().count()).max();
        let values = self.values.iter().map(|value| value.value.chars().count().min(40)).max();
        let (keys, values) = (keys.unwrap_or(0), values.unwrap_or(0));
        self.values.iter().try_for_each(|Explained { setting, value, source }| {
            writeln!(f, "{:keys$}  {value:values$}  {source}", setting.key())
        })
    }
}
