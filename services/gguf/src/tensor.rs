//! Tensor infos of a GGUF file, and the ggml types of tensors.

use std::fmt;

/// The ggml type of a tensor's elements. `Other` holds the number of an unsupported type.
///
/// Crate `model` decodes the blocks and documents their layout.
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

/// A supported type and its number in GGUF files.
struct Known {
    kind: TensorKind,
    number: u32,
    block: KindBlock,
}

const fn known(kind: TensorKind, number: u32, elements: u64, bytes: u64) -> Known {
    Known { kind, number, block: KindBlock { elements, bytes } }
}

static KNOWN: [Known; 11] = [
    known(TensorKind::F32, 0, 1, 4),
    known(TensorKind::F16, 1, 1, 2),
    known(TensorKind::Bf16, 30, 1, 2),
    known(TensorKind::Q4_0, 2, 32, 2 + 16),
    known(TensorKind::Q4_1, 3, 32, 2 + 2 + 16),
    known(TensorKind::Q5_0, 6, 32, 2 + 4 + 16),
    known(TensorKind::Q5_1, 7, 32, 2 + 2 + 4 + 16),
    known(TensorKind::Q8_0, 8, 32, 2 + 32),
    known(TensorKind::Q4K, 12, 256, 2 + 2 + 12 + 128),
    known(TensorKind::Q5K, 13, 256, 2 + 2 + 12 + 32 + 128),
    known(TensorKind::Q6K, 14, 256, 128 + 64 + 16 + 2),
];

/// Names of all kinds by number, for messages. An unused number has an empty name.
static NAMES: [&str; 42] = [
    "F32", "F16", "Q4_0", "Q4_1", "", "", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K",
    "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S",
    "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "",
    "", "", "MXFP4", "NVFP4", "Q1_0",
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

    /// Returns the size of one block; `None` for an unsupported kind.
    pub fn block(self) -> Option<KindBlock> {
        self.known().map(|known| known.block)
    }

    /// Returns the name for messages; `None` for an unsupported kind.
    pub fn name(self) -> Option<&'static str> {
        self.known().map(|known| NAMES[known.number as usize])
    }

    /// Returns the supported kinds.
    pub fn supported() -> impl Iterator<Item = TensorKind> {
        KNOWN.iter().map(|known| known.kind)
    }

    /// Returns the supported names for messages: `F32, F16, BF16, …`.
    pub fn supported_names() -> String {
        Self::supported().filter_map(Self::name).collect::<Vec<_>>().join(", ")
    }

    fn known(self) -> Option<&'static Known> {
        KNOWN.iter().find(|known| known.kind == self)
    }
}

/// Elements and bytes of one block, the smallest storage unit of a kind.
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
        let number = self.number();
        match NAMES.get(number as usize) {
            None | Some(&"") => write!(f, "number {number}"),
            Some(name) => write!(f, "{name} (number {number})"),
        }
    }
}

/// Name, shape, type and position of one tensor.
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
