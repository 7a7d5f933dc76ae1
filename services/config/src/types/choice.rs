//! Settings with a fixed set of allowed words.

use crate::value::values;

/// Declares an enum with one configuration word per variant.
macro_rules! choice {
    (
        $(#[$about:meta])+
        pub enum $Name:ident { $( $(#[$what:meta])+ $Variant:ident = $word:literal, )+ }
    ) => {
        $(#[$about])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $Name { $( $(#[$what])+ $Variant, )+ }

        impl $Name {
            /// All words, in the order of declaration.
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

        values! {
            $Name: "WORD", alternatives($Name::WORDS), Self::parse, serde_json::json!({"enum": $Name::WORDS});
        }
    };
}

/// Joins words as `a, b or c`.
pub(super) fn alternatives(words: &[&str]) -> String {
    let (last, first) = words.split_last().expect("every choice has words");
    format!("{} or {last}", first.join(", "))
}

choice! {
    /// Number format of weights and activations.
    pub enum Dtype {
        /// 32 bits. Results do not depend on batching and chunking.
        F32 = "f32",
        /// 16 bits with the range of f32: half the memory and bandwidth.
        Bf16 = "bf16",
        /// Weights in 8 bits, KV in bf16: fastest where the bandwidth for weights limits a step.
        Q8 = "q8",
        /// Weights of layers in FP8 (e4m3) with a scale for each row, KV in bf16: half the memory
        /// and bandwidth of bf16 weights. GPUs from Hopper on.
        Fp8 = "fp8",
    }
}

choice! {
    /// Number format of KV.
    pub enum KvDtype {
        /// f32 with weights in f32, else bf16.
        Auto = "auto",
        /// 16 bits with the range of f32.
        Bf16 = "bf16",
        /// FP8 (e4m3) with a scale for each token and head: twice the tokens in the same memory.
        Fp8 = "fp8",
    }
}

choice! {
    /// Source of the weights.
    pub enum LoadFormat {
        /// Files at `model.path`, in the format found there.
        Auto = "auto",
        /// Seeded random numbers in the shapes of a config.json, for measurements without weights.
        Dummy = "dummy",
    }
}

choice! {
    /// Treatment of special tokens that a client spells in a message.
    pub enum SpecialTokensInContent {
        /// They stay text.
        Text = "text",
        /// They become special tokens.
        Parse = "parse",
    }
}

choice! {
    /// Device of the forward pass.
    pub enum Device {
        /// A usable GPU, otherwise the CPU.
        Auto = "auto",
        /// The CPU.
        Cpu = "cpu",
        /// An NVIDIA GPU.
        Cuda = "cuda",
    }
}

choice! {
    /// Place of new weights during an update.
    pub enum WeightPlace {
        /// On CPUs, host memory that is allocated during the update. GPUs reserve nothing and
        /// reject updates.
        Auto = "auto",
        /// A second copy on the device. GPUs reserve its memory at start.
        Shadow = "shadow",
        /// The place of the weights in use. The node serves nothing while it receives weights.
        InPlace = "in_place",
    }
}

choice! {
    /// Instruction set of the CPU kernels.
    pub enum Isa {
        /// The fastest instruction set of the machine.
        Auto = "auto",
        /// AMX tiles for GEMMs (Linux on Intel), AVX-512 otherwise.
        Amx = "amx",
        /// AVX-512 with bf16 dot products.
        Avx512Bf16 = "avx512-bf16",
        /// AVX-512.
        Avx512 = "avx512",
        /// AVX2 with FMA.
        Avx2 = "avx2",
        /// The baseline of the build target.
        Portable = "portable",
        /// Plain loops that define the result of every operation; slow.
        Reference = "reference",
    }
}

choice! {
    /// Source of draft tokens for speculative decoding.
    pub enum Speculate {
        /// No speculative decoding.
        Off = "off",
        /// Tokens that followed an earlier occurrence of the last tokens in the sequence.
        Ngram = "ngram",
    }
}

choice! {
    /// Rule by which a node saves KV blocks to its tiers.
    pub enum TierAdmission {
        /// Blocks that occur in a second request, and blocks of a prompt that begins with a hit.
        SecondTouch = "second_touch",
        /// Every full block.
        Always = "always",
    }
}

choice! {
    /// Selection of the node that prefills a prompt.
    pub enum Disaggregate {
        /// The prefill node or the decode node, whichever costs clients less time.
        Auto = "auto",
        /// The prefill node, while one takes the request.
        Always = "always",
        /// The decode node.
        Never = "never",
    }
}

choice! {
    /// Meaning of the nodes' roles.
    pub enum Roles {
        /// Prefill nodes prefill, decode nodes decode.
        Fixed = "fixed",
        /// Every node prefills and decodes, as predicted.
        Fluid = "fluid",
    }
}

choice! {
    /// Choice among the nodes of a role.
    pub enum NodePolicy {
        /// Lowest predicted waiting time of clients, from measured step and transfer times.
        Predicted = "predicted",
        /// Least work in prompt tokens; tokens in the node's prefix cache do not count.
        CacheAware = "cache-aware",
        /// Fewest running and waiting requests.
        LeastLoad = "least-load",
        /// Each node in turn.
        RoundRobin = "round-robin",
    }
}

choice! {
    /// Transport of KV between two nodes.
    pub enum Transport {
        /// The fastest transport that both nodes support.
        Auto = "auto",
        /// TCP through host memory.
        Tcp = "tcp",
        /// Copy engines of the receiving GPU; both GPUs are on one host.
        Ipc = "ipc",
        /// NCCL send and receive kernels.
        Nccl = "nccl",
    }
}

choice! {
    /// Format of log lines.
    pub enum LogFormat {
        /// Pretty on a terminal, JSON otherwise.
        Auto = "auto",
        /// Readable text.
        Pretty = "pretty",
        /// One JSON object per line, for log collectors.
        Json = "json",
    }
}
