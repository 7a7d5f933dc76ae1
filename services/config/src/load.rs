//! Merges defaults, file, environment and flags.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    vec,
};

use toml::de::DeValue;

use crate::{
    error::{ConfigError, Problem, Source},
    explain::Explained,
    file::{File, FileText},
    hub::Hub,
    schema::{Cluster, Model, Node, Router, Telemetry, Tier, Transfer, Weights},
    section::{Declared, Setting},
    value::Value,
};

/// Prefix of all variables of Baton.
const ENV_PREFIX: &str = "BATON_";

/// Environment variables by name. Loading reads those that begin with `BATON_` and those of [`Hub`] and
/// [`cache_folder`].
pub type Environment = BTreeMap<String, String>;

/// Variables that locate the folder of [`cache_folder`], highest precedence first.
pub(crate) const CACHE_VARIABLES: [&str; 2] = ["XDG_CACHE_HOME", "HOME"];

/// Returns the folder for data that programs can recreate: `baton` in `XDG_CACHE_HOME`, otherwise in `.cache` of the
/// home folder; `None` if neither is set.
pub fn cache_folder(environment: &Environment) -> Option<PathBuf> {
    let folder = |name: &str| {
        let path = environment.get(name).map(PathBuf::from);
        path.filter(|path| path.is_absolute())
    };
    let [cache, home] = CACHE_VARIABLES.map(folder);
    Some(cache.or_else(|| home.map(|home| home.join(".cache")))?.join("baton"))
}

/// Unparsed values of flags by key (`node.slots`).
pub type Flags = BTreeMap<String, String>;

/// The sources of settings.
#[derive(Clone, Debug, Default)]
pub struct LoadInput {
    pub file: Option<PathBuf>,
    pub environment: Environment,
    pub flags: Flags,
}

macro_rules! sections {
    ($($(#[doc = $about:literal])+ $Name:ident $field:ident;)+) => {
        /// A section of the schema. Each service names the sections that it uses.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Section { $( $(#[doc = $about])+ $Name, )+ }

        impl Section {
            pub const ALL: &'static [Section] = &[$(Section::$Name),+];

            pub fn name(self) -> &'static str {
                match self { $( Self::$Name => $Name::NAME, )+ }
            }

            /// Returns the purpose of the section in one paragraph.
            pub fn about(self) -> String {
                let lines = match self { $( Self::$Name => $Name::ABOUT, )+ };
                lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
            }

            /// Returns the settings in the order of declaration.
            pub fn settings(self) -> Vec<Setting> {
                match self { $( Self::$Name => $Name::settings(), )+ }
            }
        }

        /// All settings of all services, checked. [`Default`] has the default of every setting.
        #[derive(Clone, Debug, Default)]
        pub struct Config {
            $( $(#[doc = $about])+ pub $field: $Name, )+
            /// Local cache of the model hub.
            pub hub: Hub,
            /// Folder for data that programs can recreate, if there is one.
            pub cache: Option<PathBuf>,
            pub(crate) explained: Vec<Explained>,
            pub(crate) warnings: Vec<String>,
        }

        impl Config {
            fn read(reader: &mut Reader<'_>) -> Self {
                Self { $( $field: $Name::read(reader), )+ ..Self::default() }
            }
        }
    };
}

sections! {
    /// The served model.
    Model model;
    /// The router.
    Router router;
    /// A prefill or decode node.
    Node node;
    /// KV tiers behind the prefix cache.
    Tier tier;
    /// KV transfer between nodes.
    Transfer transfer;
    /// Live weight updates.
    Weights weights;
    /// Membership of the cluster.
    Cluster cluster;
    /// Logs, traces, metrics.
    Telemetry telemetry;
}

impl Config {
    /// Reads, merges and checks all sources. The error lists all problems.
    pub fn load(input: LoadInput) -> Result<Self, ConfigError> {
        let mut problems = Vec::new();
        let settings = all_settings();
        let text = match &input.file {
            None => FileText::default(),
            Some(path) => FileText::read(path)?,
        };
        let file = File::parse(&text)?;
        file.refuse_unknown(&settings, &mut problems);
        refuse_unknown_variables(&input.environment, &settings, &mut problems);
        let mut reader = Reader {
            file: &file,
            input: &input,
            settings: Vec::new().into_iter(),
            problems,
            explained: Vec::new(),
            warnings: Vec::new(),
        };
        let mut config = Self::read(&mut reader);
        let Reader { mut problems, explained, warnings, .. } = reader;
        config.explained = explained;
        config.warnings = warnings;
        config.hub = Hub::new(&input.environment);
        config.cache = cache_folder(&input.environment);
        // Invalid values were replaced by their defaults, so checks of combinations would mislead.
        if problems.is_empty() {
            config.check_combinations(&mut problems);
            let exposed = config.exposed_secrets();
            config.warnings.extend(exposed);
        }
        if problems.is_empty() { Ok(config) } else { Err(ConfigError { problems }) }
    }

    /// Returns one warning per use of a setting's former name, and per secret that crosses a network unencrypted or is in a
    /// file for every user. `main` logs the warnings once logging works.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

pub(crate) fn all_settings() -> Vec<Setting> {
    Section::ALL.iter().flat_map(|section| section.settings()).collect()
}

/// Reader of setting values by precedence, which collects problems and warnings.
pub(crate) struct Reader<'a> {
    file: &'a File<'a>,
    input: &'a LoadInput,
    /// Settings of the current section that are not read yet.
    settings: vec::IntoIter<Setting>,
    problems: Vec<Problem>,
    explained: Vec<Explained>,
    warnings: Vec<String>,
}

/// A value before it is parsed.
enum Written<'a> {
    Toml(&'a DeValue<'a>),
    Text(&'a str),
}

impl Reader<'_> {
    /// Begins a section; `next` then reads its settings in this order.
    pub(crate) fn begin(&mut self, settings: Vec<Setting>) {
        self.settings = settings.into_iter();
    }

    /// Returns the next setting's value of highest precedence. The function is small because the compiler
    /// instantiates it for each type of value; `choose` does the work.
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

    /// Passes every written value to `take` in rising precedence and returns the source of the last valid one.
    /// Values of lower precedence must be valid too: a later change could uncover them. In each source the
    /// setting's former name has lower precedence than its name.
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
                Written::Toml(value) => crate::file::show(value),
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

/// Reports unknown variables that look like a setting, so that a typing error does not go unnoticed.
fn refuse_unknown_variables(
    environment: &Environment,
    settings: &[Setting],
    problems: &mut Vec<Problem>,
) {
    let former = settings.iter().filter_map(Setting::former);
    let known: BTreeSet<String> =
        settings.iter().cloned().chain(former).map(|setting| setting.env()).collect();
    for name in environment.keys() {
        if !name.starts_with(ENV_PREFIX) || known.contains(name) || is_service_link(name) {
            continue;
        }
        let nearest = nearest(name, known.iter().map(String::as_str));
        let in_a_section = Section::ALL.iter().any(|section| {
            name.starts_with(&format!("{ENV_PREFIX}{}_", section.name().to_uppercase()))
        });
        // Variables outside the sections have other users, such as the tests; report only probable typing
        // errors.
        if in_a_section || strsim::damerau_levenshtein(name, nearest) <= 2 {
            problems.push(Problem::UnknownKey {
                key: name.clone(),
                nearest: nearest.into(),
                source_: Source::Environment { name: name.clone() },
            });
        }
    }
}

/// Returns whether Kubernetes sets a variable of this form in every pod, for a service named `baton-...`.
fn is_service_link(name: &str) -> bool {
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.ends_with("_PORT")
        || name.split("_PORT_").skip(1).any(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// Returns the candidate with the smallest edit distance, or the first of several.
pub(crate) fn nearest<'a>(text: &str, candidates: impl Iterator<Item = &'a str>) -> &'a str {
    candidates
        .min_by_key(|candidate| strsim::damerau_levenshtein(text, candidate))
        .expect("the schema has sections and settings")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_folder_follows_xdg_cache_home_and_home() {
        let of = |variables: &[(&str, &str)]| {
            cache_folder(&variables.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect())
        };
        let home = ("HOME", "/h");
        assert_eq!(of(&[("XDG_CACHE_HOME", "/c"), home]), Some("/c/baton".into()));
        assert_eq!(of(&[("XDG_CACHE_HOME", ""), home]), Some("/h/.cache/baton".into()));
        // A relative path would depend on the working directory.
        assert_eq!(of(&[("XDG_CACHE_HOME", "c"), home]), Some("/h/.cache/baton".into()));
        assert_eq!(of(&[]), None);
    }
}
