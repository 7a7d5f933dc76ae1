//! Texts that no output may contain.

use std::fmt;

/// Implements `Debug` and `Display` with `(hidden)` instead of the text.
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

/// A secret. `Debug` and `Display` hide the secret; only [`Secret::reveal`] returns it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the secret's bytes. Only code that derives keys may call this function.
    pub fn reveal(&self) -> &[u8] {
        self.0.as_bytes()
    }

    pub(crate) fn byte_count(&self) -> usize {
        self.0.len()
    }
}

hidden!(Secret);

/// A password of another server, of any length. `Debug` and `Display` hide it.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(String);

impl Password {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the password. Only code that sends it may call this function.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

hidden!(Password);
