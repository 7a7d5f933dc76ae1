//! Text that must never be shown.

use std::fmt;

/// Declares a text that is hidden wherever it is shown.
macro_rules! hidden {
    ($Name:ident) => {
        impl fmt::Debug for $Name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("(hidden)")
            }
        }

        impl fmt::Display for $Name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("(hidden)")
            }
        }
    };
}

/// A secret. `Debug` and `Display` hide it; only [`Secret::reveal`] gives it away.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The bytes themselves, for the one place that keys something with them.
    pub fn reveal(&self) -> &[u8] {
        self.0.as_bytes()
    }

    pub(crate) fn byte_count(&self) -> usize {
        self.0.len()
    }
}

hidden!(Secret);

/// A password for somebody else's server, which decides how long it must be. Hidden likewise.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(String);

impl Password {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text itself, for the one place that sends it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

hidden!(Password);
