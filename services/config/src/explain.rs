//! Lists every value with its source, for `--explain-config`.

use crate::{
    error::Source,
    load::{Config, Section},
    reader::Explained,
};

impl Config {
    /// Returns a table of every value of `sections` with its source, in the order of the schema.
    pub fn explain(&self, sections: &[Section]) -> String {
        let named = |value: &&Explained| {
            sections.iter().any(|section| section.name() == value.setting.section)
        };
        let rows: Vec<&Explained> = self.explained.iter().filter(named).collect();
        let keys = rows.iter().map(|row| row.setting.key().chars().count()).max().unwrap_or(0);
        let values = rows.iter().map(|row| row.value.chars().count().min(40)).max().unwrap_or(0);
        let line = |Explained { setting, value, source }: &Explained| {
            format!("{:keys$}  {value:values$}  {source}\n", setting.key())
        };
        rows.into_iter().map(line).collect()
    }

    /// Returns the source of the value of `key` (`node.slots`).
    pub fn source_of(&self, key: &str) -> Source {
        let explained = self.explained.iter().find(|value| value.setting.key() == key);
        explained.map_or(Source::Default, |value| value.source.clone())
    }
}
