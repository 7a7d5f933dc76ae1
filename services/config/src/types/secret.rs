//! Text that must never be shown.

use std::fmt;

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

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(hidden)")
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(hidden)")
    }
}
