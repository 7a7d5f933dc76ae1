//! How a section of the schema is declared: each setting once.

use std::fmt::Write;

use crate::load::Reader;

/// One setting, as it is named, described and checked everywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    pub section: &'static str,
    pub name: &'static str,
    /// The doc comment of the field, one entry a line.
    pub help: &'static [&'static str],
    /// Why the default is what it is.
    pub why: &'static str,
    pub default: String,
    /// What may be written, as the end of the sentence "allowed: ...".
    pub allowed: String,
    /// Stands for the value in help texts.
    pub placeholder: &'static str,
    /// The value is never shown.
    pub secret: bool,
}

impl Setting {
    /// `node.step_tokens`.
    pub fn key(&self) -> String {
        format!("{}.{}", self.section, self.name)
    }

    /// `node-step-tokens`, without the dashes in front.
    pub fn flag(&self) -> String {
        self.key().replace(['.', '_'], "-")
    }

    /// `BATON_NODE_STEP_TOKENS`.
    pub fn env(&self) -> String {
        format!("BATON_{}", self.key().replace('.', "_").to_uppercase())
    }

    /// What it is, in one paragraph.
    pub fn summary(&self) -> String {
        self.help.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
    }

    /// What it is, its default and the reason, what is allowed, and its other names.
    pub fn explanation(&self) -> String {
        let mut text = self.summary();
        let _ = write!(text, "\nDefault: {}. {}", self.default, self.why);
        let _ = write!(text, "\nAllowed: {}.", self.allowed);
        let _ = write!(text, "\nFile: {}. Environment: {}.", self.key(), self.env());
        text
    }
}

/// What the declaration of a section provides.
pub(crate) trait Declared: Sized {
    const NAME: &'static str;
    /// The section's doc comment, one entry a line.
    const ABOUT: &'static [&'static str];
    fn settings() -> Vec<Setting>;
    /// Takes every value of the section from the reader, which notes what is wrong.
    fn read(reader: &mut Reader<'_>) -> Self;
}

/// Declares a section: a struct, its keys, flags, variables, help texts, defaults and limits.
///
/// `field: Type = default, "reason for the default", low..=high;` (the limits may be absent).
macro_rules! section {
    (
        $(#[doc = $about:literal])+
        pub struct $Section:ident = $name:literal {
            $(
                $(#[doc = $help:literal])+
                $field:ident: $T:ty = $default:expr, $why:literal $(, $range:expr)?;
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
                        help: &[$($help),+],
                        why: $why,
                        default: default.show(),
                        allowed: $crate::section::section!(@allowed $T $(, $range)?),
                        placeholder: <$T as $crate::value::Value>::PLACEHOLDER,
                        secret: <$T as $crate::value::Value>::SECRET,
                    }
                }),+]
            }

            fn read(reader: &mut $crate::load::Reader<'_>) -> Self {
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
    (@allowed $T:ty) => { <$T as $crate::value::Value>::allowed() };
    (@allowed $T:ty, $range:expr) => {
        <$T as $crate::value::Ranged>::allowed_within(&$range)
    };
    (@accepts $T:ty) => { |_: &$T| true };
    (@accepts $T:ty, $range:expr) => {
        |value: &$T| $crate::value::Ranged::within(value, &$range)
    };
}

pub(crate) use section;
