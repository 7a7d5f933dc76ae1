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
        /// Weights in 8 bits, KV in bf16: where reading weights is the limit, the fastest.
        Q8 = "q8",
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
    /// Where forwards run.
    pub enum Device {
        /// On a GPU that can serve, else on the CPU.
        Auto = "auto",
        /// On the CPU.
        Cpu = "cpu",
        /// On an NVIDIA GPU.
        Cuda = "cuda",
    }
}

choice! {
    /// The instructions that forwards use.
    pub enum Isa {
        /// The fastest that the machine has.
        Auto = "auto",
        /// AMX tiles (Linux on Intel), the rest as avx512.
        Amx = "amx",
        /// AVX-512 with products of bf16 pairs.
        Avx512Bf16 = "avx512-bf16",
        /// AVX-512.
        Avx512 = "avx512",
        /// AVX2 with FMA.
        Avx2 = "avx2",
        /// What every machine of the build's target has.
        Portable = "portable",
        /// The slow loops that define every operation.
        Reference = "reference",
    }
}

choice! {
    /// How a model writes calls of tools.
    pub enum ToolFormat {
        /// As the chat template asks for them.
        Auto = "auto",
        /// JSON between `<tool_call>` and `</tool_call>`.
        Hermes = "hermes",
        /// JSON alone or behind `<|python_tag|>`.
        Llama3 = "llama3",
    }
}

choice! {
    /// Whether and how tokens are guessed ahead.
    pub enum Speculate {
        /// Every step brings one token a row.
        Off = "off",
        /// What followed the last time the sequence said the same.
        Ngram = "ngram",
    }
}

choice! {
    /// What carries KV between two nodes.
    pub enum Transport {
        /// The fastest that both can do.
        Auto = "auto",
        /// Through host memory and a socket.
        Tcp = "tcp",
        /// From GPU to GPU of one host, by the receiver's copy engines.
        Ipc = "ipc",
        /// From GPU to GPU of one host, by kernels of both.
        Nccl = "nccl",
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
