//! Reads the value of each setting from the source of highest precedence.

use std::vec;

use toml::de::DeValue;

use crate::{
    error::{Problem, Source},
    file::{File, show},
    input::LoadInput,
    section::Setting,
    value::Value,
};

/// Value of one setting and its source. A secret's value is `(hidden)` or `unset`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Explained {
    pub setting: Setting,
    pub value: String,
    pub source: Source,
}

/// Reader of setting values by precedence, which collects problems and warnings.
pub(crate) struct Reader<'a> {
    file: &'a File<'a>,
    input: &'a LoadInput,
    /// Settings of the current section that are not read yet.
    settings: vec::IntoIter<Setting>,
    pub(crate) problems: Vec<Problem>,
    pub(crate) explained: Vec<Explained>,
    pub(crate) warnings: Vec<String>,
}

/// A value before it is parsed.
enum Written<'a> {
    Toml(&'a DeValue<'a>),
    Text(&'a str),
}

impl<'a> Reader<'a> {
    /// Returns a reader that adds to `problems`.
    pub(crate) fn new(file: &'a File<'a>, input: &'a LoadInput, problems: Vec<Problem>) -> Self {
        let settings = Vec::new().into_iter();
        Self { file, input, settings, problems, explained: Vec::new(), warnings: Vec::new() }
    }

    /// Begins a section; `next` then reads its settings in this order.
    pub(crate) fn begin(&mut self, settings: Vec<Setting>) {
        self.settings = settings.into_iter();
    }

    /// Returns the next setting's value of highest precedence. The function is small because the
    /// compiler instantiates it for each type of value; `choose` does the work.
    pub(crate) fn next<T: Value>(&mut self, default: T, accepts: &dyn Fn(&T) -> bool) -> T {
        let setting = self.settings.next().expect("as many settings as fields");
        let mut chosen = default;
        let source = self.choose(&setting, &mut |written| {
            let read = match written {
                Written::Toml(value) => T::from_toml(value),
                Written::Text(text) => T::from_text(text),
            };
            read.filter(accepts).map(|value| chosen = value).is_some()
        });
        self.explained.push(Explained { setting, value: chosen.show(), source });
        chosen
    }

    /// Passes every written value to `take` in rising precedence and returns the source of the last
    /// valid one. Values of lower precedence must be valid too: a later change could uncover them.
    /// In each source the setting's former name has lower precedence than its name.
    fn choose(&mut self, setting: &Setting, take: &mut dyn FnMut(&Written<'_>) -> bool) -> Source {
        let names: Vec<Setting> = setting.former().into_iter().chain([setting.clone()]).collect();
        let mut written = Vec::new();
        for named in &names {
            if let Some((value, source)) = self.file.get(named) {
                written.push((named, Written::Toml(value), source));
            }
        }
        for named in &names {
            let name = named.env();
            if let Some(text) = self.input.environment.get(&name) {
                written.push((named, Written::Text(text), Source::Environment { name }));
            }
        }
        for named in &names {
            if let Some(text) = self.input.flags.get(&named.key()) {
                written.push((named, Written::Text(text), Source::Flag { name: named.flag() }));
            }
        }
        let mut chosen = Source::Default;
        for (named, value, source) in written {
            if named.key() != setting.key() {
                let (old, new) = (named.key(), setting.key());
                self.warnings.push(format!("{old} ({source}) is deprecated: it is now {new}"));
            }
            if take(&value) {
                chosen = source;
                continue;
            }
            let text = match value {
                Written::Toml(value) => show(value),
                Written::Text(text) => format!("{text:?}"),
            };
            self.problems.push(Problem::BadValue {
                key: setting.key(),
                value: if setting.secret { "(hidden)".into() } else { shorten(text) },
                allowed: setting.allowed.clone(),
                source_: source,
            });
        }
        chosen
    }
}

/// Truncates an invalid value for an error message.
fn shorten(mut text: String) -> String {
    if text.chars().count() > 120 {
        text = text.chars().take(117).collect();
        text.push_str("...");
    }
    text
}
