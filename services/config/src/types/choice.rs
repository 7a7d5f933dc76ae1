//! Settings with a few allowed words.

/// Declares an enum whose variants are words of the configuration.
macro_rules! choice {
    (
        $(#[$about:meta])+
        pub enum $Name:ident { $( $(#[$what:meta])+ $Variant:ident = $word:literal, )+ }
    ) => {
        $(#[$about])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $Name { $( $(#[$what])+ $Variant, )+ }

        impl $Name {
            /// The words, in the order of their declaration.
            pub const WORDS: &'static [&'static str] = &[$($word),+];

            pub fn parse(text: &str) -> Option<Self> {
                match text.trim() {
                    $( $word => Some(Self::$Variant), )+
                    _ => None,
                }
            }

            pub fn as_str(self) -> &'static str {
                match self { $( Self::$Variant => $word, )+ }
            }
        }

        impl std::fmt::Display for $Name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

choice! {
    /// The number format of weights, activations and KV.
    pub enum Dtype {
        /// 32 bits: the reference, invariant to batching and chunking.
        F32 = "f32",
        /// 16 bits with the range of f32: half the memory, the fast path.
        Bf16 = "bf16",
    }
}

choice! {
    /// Where weights come from.
    pub enum LoadFormat {
        /// From `model.path`, in the format found there.
        Auto = "auto",
        /// Seeded random numbers in the shapes of a config.json: speed without weights.
        Dummy = "dummy",
    }
}

choice! {
    /// How the members of a cluster are known.
    pub enum ClusterKind {
        /// They are listed in the configuration.
        Static = "static",
    }
}

choice! {
    /// What a log line looks like.
    pub enum LogFormat {
        /// Pretty on a terminal, JSON otherwise.
        Auto = "auto",
        /// For people.
        Pretty = "pretty",
        /// One JSON object a line, for collectors.
        Json = "json",
    }
}
