//! The TOML file, parsed with positions so that an error names the line.

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

use toml::de::{DeTable, DeValue};

use crate::{
    error::{ConfigError, Problem, Source},
    section::Setting,
};

/// Maximum size in bytes. A file with all settings and comments takes about 10 KiB.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A file's text before it is parsed; empty without a file.
#[derive(Default)]
pub(crate) struct FileText {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

impl FileText {
    pub(crate) fn read(path: &Path) -> Result<Self, ConfigError> {
        let unreadable = |reason: io::Error| Problem::FileUnreadable { path: path.into(), reason };
        let mut text = String::new();
        // Limit the bytes read instead of the file's size: the file may be a pipe.
        let mut limited = fs::File::open(path).map_err(unreadable)?.take(FILE_BYTES_MAX + 1);
        limited.read_to_string(&mut text).map_err(unreadable)?;
        if text.len() as u64 > FILE_BYTES_MAX {
            let bytes_max = FILE_BYTES_MAX;
            return Err(Problem::FileTooLarge { path: path.into(), bytes_max }.into());
        }
        Ok(Self { path: path.into(), text })
    }
}

/// A parsed file.
pub(crate) struct File<'a> {
    source: &'a FileText,
    table: DeTable<'a>,
}

impl<'a> File<'a> {
    pub(crate) fn parse(source: &'a FileText) -> Result<Self, ConfigError> {
        match DeTable::parse(&source.text) {
            Ok(table) => Ok(Self { source, table: table.into_inner() }),
            // The parser's full error text quotes the line, which may contain a secret.
            Err(error) => {
                let line = error.span().map_or(1, |span| line_of(&source.text, span.start));
                let reason = error.message().to_owned();
                Err(Problem::FileNotToml { path: source.path.clone(), line, reason }.into())
            }
        }
    }

    pub(crate) fn get(&self, setting: &Setting) -> Option<(&DeValue<'a>, Source)> {
        let section = self.table.get(setting.section)?.get_ref().as_table()?;
        let (key, value) = section.get_key_value(setting.name)?;
        Some((value.get_ref(), self.source(key.span().start)))
    }

    /// Reports every section and key that is not in the schema.
    pub(crate) fn refuse_unknown(&self, settings: &[Setting], problems: &mut Vec<Problem>) {
        for (name, value) in &self.table {
            let source_ = self.source(name.span().start);
            let section_name = name.get_ref().as_ref();
            let known = settings.iter().any(|setting| setting.section == section_name);
            match value.get_ref().as_table() {
                Some(keys) if known => {
                    for key in keys.keys() {
                        let name = key.get_ref().as_ref();
                        let is_named = |setting: &Setting| {
                            setting.section == section_name && setting.name == name
                        };
                        let is_known = |setting: &Setting| {
                            is_named(setting) || setting.former().as_ref().is_some_and(is_named)
                        };
                        if !settings.iter().any(is_known) {
                            problems.push(Problem::UnknownKey {
                                key: format!("{section_name}.{name}"),
                                nearest: nearest_key(Some(section_name), name, settings),
                                source_: self.source(key.span().start),
                            });
                        }
                    }
                }
                Some(_) => problems.push(Problem::UnknownSection {
                    section: section_name.into(),
                    nearest: nearest(section_name, settings.iter().map(|it| it.section)).into(),
                    source_,
                }),
                // A key before the first section, or a value with a section's name.
                None => problems.push(Problem::UnknownKey {
                    key: section_name.into(),
                    nearest: nearest_key(None, section_name, settings),
                    source_,
                }),
            }
        }
    }

    fn source(&self, byte: usize) -> Source {
        Source::File { path: self.source.path.clone(), line: line_of(&self.source.text, byte) }
    }
}

/// Returns the nearest valid key. The same name in another section precedes similar names in this
/// section.
fn nearest_key(section: Option<&str>, name: &str, settings: &[Setting]) -> String {
    let misplaced = settings.iter().find(|setting| setting.name == name);
    let in_reach = |setting: &&Setting| section.is_none_or(|section| setting.section == section);
    misplaced
        .or_else(|| {
            settings
                .iter()
                .filter(in_reach)
                .min_by_key(|setting| strsim::damerau_levenshtein(name, setting.name))
        })
        .map(Setting::key)
        .expect("every section has settings")
}

/// Returns the candidate with the smallest edit distance, or the first of several.
pub(crate) fn nearest<'a>(text: &str, candidates: impl Iterator<Item = &'a str>) -> &'a str {
    candidates
        .min_by_key(|candidate| strsim::damerau_levenshtein(text, candidate))
        .expect("the schema has sections and settings")
}

fn line_of(text: &str, byte: usize) -> usize {
    1 + text.as_bytes()[..byte.min(text.len())].iter().filter(|byte| **byte == b'\n').count()
}

/// Returns the text of a value for an error message.
pub(crate) fn show(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("{text:?}"),
        DeValue::Integer(number) => number.to_string(),
        DeValue::Float(number) => number.to_string(),
        DeValue::Boolean(yes) => yes.to_string(),
        DeValue::Datetime(moment) => moment.to_string(),
        DeValue::Array(entries) => {
            let entries: Vec<_> = entries.iter().map(|entry| show(entry.get_ref())).collect();
            format!("[{}]", entries.join(", "))
        }
        DeValue::Table(_) => "a table".into(),
    }
}
