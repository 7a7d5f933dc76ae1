//! Declaration of a section of the schema: one line per setting yields its key, flag, variable and
//! help.

use std::fmt::Write;

use serde_json::Value as Json;

use crate::reader::Reader;

/// Description of one setting: names, help text, default and allowed values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    pub section: &'static str,
    pub name: &'static str,
    /// Name before the setting was renamed, with its section if that was another one; accepted with
    /// a warning.
    pub former_name: Option<&'static str>,
    /// Lines of the field's doc comment.
    pub help: &'static [&'static str],
    /// Reason for the default.
    pub why: &'static str,
    pub default: String,
    /// Allowed values, as the end of the sentence "allowed: ...".
    pub allowed: String,
    /// Placeholder of the value in help texts.
    pub placeholder: &'static str,
    /// Whether every output hides the value.
    pub secret: bool,
    /// JSON Schema of the value in the file, with the default.
    pub schema: Json,
}

impl Setting {
    /// Returns the key, such as `node.step_tokens`.
    pub fn key(&self) -> String {
        format!("{}.{}", self.section, self.name)
    }

    /// Returns the flag without leading dashes, such as `node-step-tokens`.
    pub fn flag(&self) -> String {
        self.key().replace(['.', '_'], "-")
    }

    /// Returns the environment variable, such as `BATON_NODE_STEP_TOKENS`.
    pub fn env(&self) -> String {
        format!("BATON_{}", self.key().replace('.', "_").to_uppercase())
    }

    /// Returns the setting under its former name.
    pub(crate) fn former(&self) -> Option<Self> {
        let former_name = self.former_name?;
        let (section, name) = former_name.split_once('.').unwrap_or((self.section, former_name));
        Some(Self { section, name, former_name: None, ..self.clone() })
    }

    /// Returns the help text as one paragraph.
    pub fn summary(&self) -> String {
        self.help.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
    }

    /// Returns the JSON Schema of the value in the file, with its description.
    pub(crate) fn described_schema(&self) -> Json {
        let mut schema = self.schema.clone();
        let Self { allowed, why, .. } = self;
        schema["description"] = format!("{} Allowed: {allowed}. {why}", self.summary()).into();
        if self.secret {
            schema["writeOnly"] = true.into();
        }
        schema
    }

    /// Returns the help text with default, reason, allowed values, key and environment variable.
    pub fn explanation(&self) -> String {
        let mut text = self.summary();
        let _ = write!(text, "\nDefault: {}. {}", self.default, self.why);
        let _ = write!(text, "\nAllowed: {}.", self.allowed);
        let _ = write!(text, "\nFile: {}. Environment: {}.", self.key(), self.env());
        text
    }
}

/// Adds the default of a setting to its JSON Schema; an unset value has none.
pub(crate) fn with_default(mut schema: Json, default: Json) -> Json {
    if !default.is_null() {
        schema["default"] = default;
    }
    schema
}

/// A declared section.
pub(crate) trait Declared: Sized {
    const NAME: &'static str;
    /// Lines of the section's doc comment.
    const ABOUT: &'static [&'static str];
    fn settings() -> Vec<Setting>;
    /// Reads all values of the section from `reader`, which collects the problems.
    fn read(reader: &mut Reader<'_>) -> Self;
}

/// Declares a section: a struct with keys, flags, variables, help texts, defaults and limits.
///
/// `field was "former_name": Type = default, "reason for the default", low..=high;`. The former
/// name and the limits are optional.
macro_rules! section {
    (
        $(#[doc = $about:literal])+
        pub struct $Section:ident = $name:literal {
            $(
                $(#[doc = $help:literal])+
                $field:ident $(was $former:literal)?: $T:ty = $default:expr, $why:literal $(, $range:expr)?;
            )+
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Debug, PartialEq)]
        pub struct $Section {
            $( $(#[doc = $help])+ pub $field: $T, )+
        }

        impl $crate::section::Declared for $Section {
            const NAME: &'static str = $name;
            const ABOUT: &'static [&'static str] = &[$($about),+];

            fn settings() -> Vec<$crate::section::Setting> {
                use $crate::value::Value as _;
                vec![$({
                    let default: $T = $default;
                    $crate::section::Setting {
                        section: $name,
                        name: stringify!($field),
                        former_name: $crate::section::section!(@former $($former)?),
                        help: &[$($help),+],
                        why: $why,
                        default: default.show(),
                        allowed: $crate::section::section!(@allowed $T $(, $range)?),
                        placeholder: <$T as $crate::value::Value>::PLACEHOLDER,
                        secret: <$T as $crate::value::Value>::SECRET,
                        schema: $crate::section::with_default(
                            $crate::section::section!(@schema $T $(, $range)?),
                            default.json(),
                        ),
                    }
                }),+]
            }

            fn read(reader: &mut $crate::reader::Reader<'_>) -> Self {
                // Fields are read in the order in which `settings` lists them.
                reader.begin(Self::settings());
                Self { $(
                    $field: {
                        let accepts = $crate::section::section!(@accepts $T $(, $range)?);
                        reader.next::<$T>($default, &accepts)
                    },
                )+ }
            }
        }

        impl Default for $Section {
            fn default() -> Self {
                Self { $( $field: $default, )+ }
            }
        }
    };
    (@former) => { None };
    (@former $former:literal) => { Some($former) };
    (@allowed $T:ty) => { <$T as $crate::value::Value>::allowed() };
    (@allowed $T:ty, $range:expr) => {
        <$T as $crate::value::Ranged>::allowed_within(&$range)
    };
    (@schema $T:ty) => { <$T as $crate::value::Value>::schema() };
    (@schema $T:ty, $range:expr) => { <$T as $crate::value::Ranged>::schema_within(&$range) };
    (@accepts $T:ty) => { |_: &$T| true };
    (@accepts $T:ty, $range:expr) => {
        |value: &$T| $crate::value::Ranged::within(value, &$range)
    };
}

pub(crate) use section;
