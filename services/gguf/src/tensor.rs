//! The tensor directory's entries and the kinds of element block they may hold.

use std::fmt;

/// How a tensor's elements are stored. Kinds that cannot be decoded keep their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorKind {
    F32,
    F16,
    /// Blocks of 32: f16 scale, f16 minimum, 32 unsigned nibbles (low ones first).
    Q4_1,
    /// Blocks of 32: f16 scale, 32 signed bytes.
    Q8_0,
    Bf16,
    Other(u32),
}

/// The kinds whose layout is known here.
pub const SUPPORTED_KINDS: [TensorKind; 5] =
    [TensorKind::F32, TensorKind::F16, TensorKind::Bf16, TensorKind::Q4_1, TensorKind::Q8_0];

impl TensorKind {
    /// From the number in the file.
    pub fn from_number(number: u32) -> Self {
        match number {
            0 => TensorKind::F32,
            1 => TensorKind::F16,
            3 => TensorKind::Q4_1,
            8 => TensorKind::Q8_0,
            30 => TensorKind::Bf16,
            other => TensorKind::Other(other),
        }
    }

    /// The number in the file.
    pub fn number(self) -> u32 {
        match self {
            TensorKind::F32 => 0,
            TensorKind::F16 => 1,
            TensorKind::Q4_1 => 3,
            TensorKind::Q8_0 => 8,
            TensorKind::Bf16 => 30,
            TensorKind::Other(number) => number,
        }
    }

    /// Elements and bytes of one block; `None` for a kind that is not supported.
    pub fn block(self) -> Option<KindBlock> {
        let (elements, bytes) = match self {
            TensorKind::F32 => (1, 4),
            TensorKind::F16 | TensorKind::Bf16 => (1, 2),
            TensorKind::Q4_1 => (32, 2 + 2 + 16),
            TensorKind::Q8_0 => (32, 2 + 32),
            TensorKind::Other(_) => return None,
        };
        Some(KindBlock { elements, bytes })
    }

    /// For messages: `F32, F16, BF16, Q4_1, Q8_0`.
    pub fn supported_names() -> String {
        SUPPORTED_KINDS.map(|kind| kind.to_string()).join(", ")
    }
}

/// The smallest unit a kind is stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KindBlock {
    pub elements: u64,
    pub bytes: u64,
}

impl fmt::Display for TensorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Names of kinds that are only reported, so that a message says more than a number.
        let other = match self {
            TensorKind::F32 => return f.write_str("F32"),
            TensorKind::F16 => return f.write_str("F16"),
            TensorKind::Bf16 => return f.write_str("BF16"),
            TensorKind::Q4_1 => return f.write_str("Q4_1"),
            TensorKind::Q8_0 => return f.write_str("Q8_0"),
            TensorKind::Other(number) => *number,
        };
        let name = match other {
            2 => "Q4_0",
            6 => "Q5_0",
            7 => "Q5_1",
            9 => "Q8_1",
            10 => "Q2_K",
            11 => "Q3_K",
            12 => "Q4_K",
            13 => "Q5_K",
            14 => "Q6_K",
            15 => "Q8_K",
            16 => "IQ2_XXS",
            17 => "IQ2_XS",
            18 => "IQ3_XXS",
            19 => "IQ1_S",
            20 => "IQ4_NL",
            21 => "IQ3_S",
            22 => "IQ2_S",
            23 => "IQ4_XS",
            24 => "I8",
            25 => "I16",
            26 => "I32",
            27 => "I64",
            28 => "F64",
            29 => "IQ1_M",
            34 => "TQ1_0",
            35 => "TQ2_0",
            39 => "MXFP4",
            _ => return write!(f, "number {other}"),
        };
        write!(f, "{name} (number {other})")
    }
}

/// One entry of the tensor directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    /// The fastest-varying dimension first: a matrix `[out][in]` is `[in, out]` here.
    pub dims: Vec<u64>,
    pub kind: TensorKind,
    /// From the file's start.
    pub offset: u64,
    /// `None` when the kind is not supported, so that its size is unknown.
    pub bytes: Option<u64>,
}

impl TensorInfo {
    pub fn elements(&self) -> u64 {
        // Checked against overflow when the header was read.
        self.dims.iter().product()
    }
}
