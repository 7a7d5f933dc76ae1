//! Merges defaults, file, environment and flags.

use std::{collections::BTreeSet, path::PathBuf};

use crate::{
    error::{ConfigError, Problem, Source},
    file::{File, FileText, nearest},
    hub::Hub,
    input::{Environment, LoadInput, cache_folder},
    reader::{Explained, Reader},
    schema::{Cluster, Model, Node, Router, Telemetry, Tier, Transfer, Weights},
    section::{Declared, Setting},
};

/// Prefix of all variables of Baton.
const ENV_PREFIX: &str = "BATON_";

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
        let mut reader = Reader::new(&file, &input, problems);
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

    /// Returns one warning per use of a setting's former name, and per secret that crosses a
    /// network unencrypted or is in a file for every user. `main` logs the warnings once logging
    /// works.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

pub(crate) fn all_settings() -> Vec<Setting> {
    Section::ALL.iter().flat_map(|section| section.settings()).collect()
}

/// Reports unknown variables that look like a setting, so that a typing error does not go
/// unnoticed.
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
        // Variables outside the sections have other users, such as the tests; report only probable
        // typing errors.
        if in_a_section || strsim::damerau_levenshtein(name, nearest) <= 2 {
            problems.push(Problem::UnknownKey {
                key: name.clone(),
                nearest: nearest.into(),
                source_: Source::Environment { name: name.clone() },
            });
        }
    }
}

/// Returns whether Kubernetes sets a variable of this form in every pod, for a service named
/// `baton-...`.
fn is_service_link(name: &str) -> bool {
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.ends_with("_PORT")
        || name.split("_PORT_").skip(1).any(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}
