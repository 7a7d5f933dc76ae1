//! Brings file, environment and flags together.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    vec,
};

use toml::de::DeValue;

use crate::{
    cache::cache_folder,
    error::{ConfigError, Problem, Source},
    explain::Explained,
    file::{File, FileText},
    hub::Hub,
    schema::{Cluster, Model, Node, Router, Telemetry, Transfer},
    section::{Declared, Setting},
    value::Value,
};

/// Every variable of Baton's begins with this.
const ENV_PREFIX: &str = "BATON_";

/// Variables as a map; only those that begin with `BATON_` and those of [`Hub`] and [`cache_folder`] are looked at.
pub type Environment = BTreeMap<String, String>;

/// Values of flags by key (`node.slots`), as they were typed.
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
        /// The names of the sections, for saying which of them a service uses.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Section { $( $(#[doc = $about])+ $Name, )+ }

        impl Section {
            pub const ALL: &'static [Section] = &[$(Section::$Name),+];

            pub fn name(self) -> &'static str {
                match self { $( Self::$Name => $Name::NAME, )+ }
            }

            /// What the section is for, in one paragraph.
            pub fn about(self) -> String {
                let lines = match self { $( Self::$Name => $Name::ABOUT, )+ };
                lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
            }

            /// Its settings, in the order of their declaration.
            pub fn settings(self) -> Vec<Setting> {
                match self { $( Self::$Name => $Name::settings(), )+ }
            }
        }

        /// Every setting of every service, checked. [`Default`] is what no file, variable or flag gives.
        #[derive(Clone, Debug, Default)]
        pub struct Config {
            $( $(#[doc = $about])+ pub $field: $Name, )+
            /// Where models of the hub lie.
            pub hub: Hub,
            /// Where programs keep what they can make again, if anywhere.
            pub cache: Option<PathBuf>,
            pub(crate) explained: Vec<Explained>,
        }

        impl Config {
            fn read(reader: &mut Reader<'_>) -> Self {
                Self { $( $field: $Name::read(reader), )+ hub: Hub::default(), cache: None, explained: Vec::new() }
            }
        }
    };
}

sections! {
    /// Which model is served.
    Model model;
    /// The router.
    Router router;
    /// A prefill or decode node.
    Node node;
    /// How KV travels.
    Transfer transfer;
    /// Which nodes the router knows.
    Cluster cluster;
    /// Logs, traces, metrics.
    Telemetry telemetry;
}

impl Config {
    /// Reads, merges and checks everything; all problems come back together.
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
        };
        let mut config = Self::read(&mut reader);
        let Reader { mut problems, explained, .. } = reader;
        config.explained = explained;
        config.hub = Hub::new(&input.environment);
        config.cache = cache_folder(&input.environment);
        // Values that were refused stand at their defaults now; combining them would mislead.
        if problems.is_empty() {
            config.fit_defaults();
            config.check_combinations(&mut problems);
        }
        if problems.is_empty() { Ok(config) } else { Err(ConfigError { problems }) }
    }
}

pub(crate) fn all_settings() -> Vec<Setting> {
    Section::ALL.iter().flat_map(|section| section.settings()).collect()
}

/// Hands out values by precedence and notes what is wrong with them.
pub(crate) struct Reader<'a> {
    file: &'a File<'a>,
    input: &'a LoadInput,
    /// Those of the section that is being read, from the next one on.
    settings: vec::IntoIter<Setting>,
    problems: Vec<Problem>,
    explained: Vec<Explained>,
}

/// A value as somebody wrote it.
enum Written<'a> {
    Toml(&'a DeValue<'a>),
    Text(&'a str),
}

impl Reader<'_> {
    /// Values of a section are asked for next, in the order of its settings.
    pub(crate) fn begin(&mut self, settings: Vec<Setting>) {
        self.settings = settings.into_iter();
    }

    /// The next setting's value of highest precedence. Small, as there is one of it for every type of value:
    /// the work is done below, once.
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

    /// Has every value that was written taken, in the order of precedence, and returns where the last that is
    /// allowed came from. One of lower precedence must be allowed too: it would come to light at the next
    /// change.
    fn choose(&mut self, setting: &Setting, take: &mut dyn FnMut(&Written<'_>) -> bool) -> Source {
        let mut written = Vec::new();
        if let Some((value, source)) = self.file.get(setting) {
            written.push((Written::Toml(value), source));
        }
        let name = setting.env();
        if let Some(text) = self.input.environment.get(&name) {
            written.push((Written::Text(text), Source::Environment { name }));
        }
        if let Some(text) = self.input.flags.get(&setting.key()) {
            written.push((Written::Text(text), Source::Flag { name: setting.flag() }));
        }
        let mut chosen = Source::Default;
        for (value, source) in written {
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

/// Enough of a wrong value to recognise it.
fn shorten(mut text: String) -> String {
    if text.chars().count() > 120 {
        text = text.chars().take(117).collect();
        text.push_str("...");
    }
    text
}

/// A variable that begins like one of ours but is none would be a setting silently lost.
fn refuse_unknown_variables(
    environment: &Environment,
    settings: &[Setting],
    problems: &mut Vec<Problem>,
) {
    let known: BTreeSet<String> = settings.iter().map(Setting::env).collect();
    for name in environment.keys() {
        if !name.starts_with(ENV_PREFIX) || known.contains(name) || is_service_link(name) {
            continue;
        }
        let nearest = nearest(name, known.iter().map(String::as_str));
        let in_a_section = Section::ALL.iter().any(|section| {
            name.starts_with(&format!("{ENV_PREFIX}{}_", section.name().to_uppercase()))
        });
        // Other variables of Baton's (where tests find their model, say) are none of our business,
        // unless they look like a slip of the finger.
        if in_a_section || strsim::damerau_levenshtein(name, nearest) <= 2 {
            problems.push(Problem::UnknownKey {
                key: name.clone(),
                nearest: nearest.into(),
                source_: Source::Environment { name: name.clone() },
            });
        }
    }
}

/// Kubernetes gives every pod such variables for a service named `baton-router` or the like.
fn is_service_link(name: &str) -> bool {
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.ends_with("_PORT")
        || name.split("_PORT_").skip(1).any(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// The candidate with the fewest edits; the first of equals.
pub(crate) fn nearest<'a>(text: &str, candidates: impl Iterator<Item = &'a str>) -> &'a str {
    candidates
        .min_by_key(|candidate| strsim::damerau_levenshtein(text, candidate))
        .expect("the schema has sections and settings")
}
