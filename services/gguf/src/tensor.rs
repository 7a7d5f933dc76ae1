//! Entries of the tensor directory, and the kinds of element blocks.

use std::fmt;

/// Storage kind of a tensor's elements. An unsupported kind keeps its number.
///
/// Crate `model` documents the contents of each kind's blocks, where it decodes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorKind {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
    Other(u32),
}

/// Supported kind and its number in files.
struct Known {
    kind: TensorKind,
    number: u32,
    name: &'static str,
    block: KindBlock,
}

const fn known(
    kind: TensorKind,
    number: u32,
    name: &'static str,
    elements: u64,
    bytes: u64,
) -> Known {
    Known { kind, number, name, block: KindBlock { elements, bytes } }
}

static KNOWN: [Known; 11] = [
    known(TensorKind::F32, 0, "F32", 1, 4),
    known(TensorKind::F16, 1, "F16", 1, 2),
    known(TensorKind::Bf16, 30, "BF16", 1, 2),
    known(TensorKind::Q4_0, 2, "Q4_0", 32, 2 + 16),
    known(TensorKind::Q4_1, 3, "Q4_1", 32, 2 + 2 + 16),
    known(TensorKind::Q5_0, 6, "Q5_0", 32, 2 + 4 + 16),
    known(TensorKind::Q5_1, 7, "Q5_1", 32, 2 + 2 + 4 + 16),
    known(TensorKind::Q8_0, 8, "Q8_0", 32, 2 + 32),
    known(TensorKind::Q4K, 12, "Q4_K", 256, 2 + 2 + 12 + 128),
    known(TensorKind::Q5K, 13, "Q5_K", 256, 2 + 2 + 12 + 32 + 128),
    known(TensorKind::Q6K, 14, "Q6_K", 256, 128 + 64 + 16 + 2),
];

impl TensorKind {
    /// Returns the kind with this number.
    pub fn from_number(number: u32) -> Self {
        let known = KNOWN.iter().find(|known| known.number == number);
        known.map_or(TensorKind::Other(number), |known| known.kind)
    }

    /// Returns the number in the file.
    pub fn number(self) -> u32 {
        match self {
            TensorKind::Other(number) => number,
            kind => kind.known().expect("all but `Other` are known").number,
        }
    }

    /// Returns elements and bytes of one block; `None` for an unsupported kind.
    pub fn block(self) -> Option<KindBlock> {
        self.known().map(|known| known.block)
    }

    /// Returns the name for messages; `None` for an unsupported kind.
    pub fn name(self) -> Option<&'static str> {
        self.known().map(|known| known.name)
    }

    /// Returns the supported kinds.
    pub fn supported() -> impl Iterator<Item = TensorKind> {
        KNOWN.iter().map(|known| known.kind)
    }

    /// Returns the supported names for messages: `F32, F16, BF16, …`.
    pub fn supported_names() -> String {
        KNOWN.iter().map(|known| known.name).collect::<Vec<_>>().join(", ")
    }

    fn known(self) -> Option<&'static Known> {
        KNOWN.iter().find(|known| known.kind == self)
    }
}

/// Smallest storage unit of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KindBlock {
    pub elements: u64,
    pub bytes: u64,
}

impl fmt::Display for TensorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = self.name() {
            return f.write_str(name);
        }
        let other = self.number();
        // Names of unsupported kinds, so that a message has more than a number.
        let name = match other {
            9 => "Q8_1",
            10 => "Q2_K",
            11 => "Q3_K",
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
            40 => "NVFP4",
            41 => "Q1_0",
            _ => return write!(f, "number {other}"),
        };
        write!(f, "{name} (number {other})")
    }
}

/// Entry of the tensor directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    /// Dimensions, fastest-varying first: a matrix `[out][in]` is `[in, out]` here.
    pub dims: Vec<u64>,
    pub kind: TensorKind,
    /// Offset from the start of the file, in bytes.
    pub offset: u64,
    /// Size in bytes; `None` when the kind is not supported.
    pub bytes: Option<u64>,
}

impl TensorInfo {
    pub fn elements(&self) -> u64 {
        // Checked against overflow when the header was read.
        self.dims.iter().product()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_numbers_and_names_match() {
        for kind in TensorKind::supported() {
            assert_eq!(TensorKind::from_number(kind.number()), kind);
            assert!(kind.block().is_some());
        }
        for number in (0..64).chain([u32::MAX]) {
            let kind = TensorKind::from_number(number);
            assert_eq!(kind.number(), number);
            let is_supported = TensorKind::supported().any(|supported| supported == kind);
            assert_eq!(kind.block().is_some(), is_supported, "{kind}");
        }
        assert_eq!(TensorKind::Q4K.to_string(), "Q4_K");
        assert_eq!(TensorKind::from_number(10).to_string(), "Q2_K (number 10)");
        assert_eq!(TensorKind::from_number(77).to_string(), "number 77");
    }
}
