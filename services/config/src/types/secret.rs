//! Texts that no output may contain.

use std::fmt;

/// Declares a text whose `Debug` and `Display` are `(hidden)`.
macro_rules! hidden {
    ($(#[doc = $about:literal])+ $Name:ident) => {
        $(#[doc = $about])+
        #[derive(Clone, PartialEq, Eq)]
        pub struct $Name(String);

        impl $Name {
            pub fn new(text: impl Into<String>) -> Self {
                Self(text.into())
            }

            /// Returns the text. Only code that sends it or derives keys from it may call this
            /// function.
            pub fn reveal(&self) -> &str {
                &self.0
            }
        }

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

hidden! {
    /// A secret that all nodes of a cluster share.
    Secret
}

hidden! {
    /// A password of another server, of any length.
    Password
}
