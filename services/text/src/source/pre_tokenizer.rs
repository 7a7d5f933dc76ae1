//! Pre-tokenizers that GGUF files refer to by name. The meaning of a name is a convention that the
//! file does not contain.

use tokenizers::{
    NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior,
    normalizers::NFC,
    pre_tokenizers::{
        byte_level::ByteLevel,
        digits::Digits,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

/// Regex for contractions, words, up to three digits, punctuation, line ends, spaces.
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As Llama 3, but each digit is a word.
const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Mistral's regex: words end where lower case changes to upper case.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PreTokenizerSplit {
    /// Regex that is built into the byte-level pre-tokenizer.
    Gpt2,
    /// Splits off every digit, then applies GPT-2's regex.
    DigitsThenGpt2,
    Expression(&'static str),
}

/// Meaning of one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PreTokenizerKind {
    names: &'static [&'static str],
    splitting: PreTokenizerSplit,
    /// Whether text is first normalized to Unicode's composed form (NFC).
    composes: bool,
    /// Whether a word that is itself a token becomes that token regardless of merges.
    pub whole_words_first: bool,
    /// Whether prompts begin with BOS when the file does not say.
    pub adds_bos: bool,
}

const KINDS: [PreTokenizerKind; 5] = [
    PreTokenizerKind {
        names: &["smollm", "starcoder", "refact"],
        splitting: PreTokenizerSplit::DigitsThenGpt2,
        composes: false,
        whole_words_first: false,
        adds_bos: false,
    },
    PreTokenizerKind {
        names: &["gpt-2", "default", "phi-2"],
        splitting: PreTokenizerSplit::Gpt2,
        composes: false,
        whole_words_first: false,
        adds_bos: false,
    },
    PreTokenizerKind {
        names: &["llama-bpe", "llama3", "llama-v3"],
        splitting: PreTokenizerSplit::Expression(LLAMA_3),
        composes: false,
        whole_words_first: true,
        adds_bos: true,
    },
    PreTokenizerKind {
        names: &["qwen2", "deepseek-r1-qwen"],
        splitting: PreTokenizerSplit::Expression(QWEN_2),
        composes: true,
        whole_words_first: false,
        adds_bos: false,
    },
    PreTokenizerKind {
        names: &["tekken"],
        splitting: PreTokenizerSplit::Expression(TEKKEN),
        composes: false,
        whole_words_first: true,
        adds_bos: true,
    },
];

impl PreTokenizerKind {
    pub(super) fn of_name(name: &str) -> Option<Self> {
        KINDS.into_iter().find(|kind| kind.names.contains(&name))
    }

    /// Returns all names, for the error about an unsupported name.
    pub(super) fn supported_names() -> String {
        KINDS.iter().flat_map(|kind| kind.names).copied().collect::<Vec<_>>().join(", ")
    }

    pub(super) fn normalizer(&self) -> Option<NormalizerWrapper> {
        self.composes.then(|| NFC.into())
    }

    pub(super) fn pre_tokenizer(&self) -> PreTokenizerWrapper {
        let bytes_after = |first: PreTokenizerWrapper, use_regex: bool| -> PreTokenizerWrapper {
            Sequence::new(vec![first, ByteLevel::new(false, true, use_regex).into()]).into()
        };
        match self.splitting {
            PreTokenizerSplit::Gpt2 => ByteLevel::new(false, true, true).into(),
            PreTokenizerSplit::DigitsThenGpt2 => bytes_after(Digits::new(true).into(), true),
            PreTokenizerSplit::Expression(expression) => {
                let pattern = SplitPattern::Regex(expression.to_owned());
                let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                    .expect("the expressions above are valid: a test compiles each");
                bytes_after(split.into(), false)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pre_tokenizer_name_is_unique_and_compiles() {
        let mut seen = Vec::new();
        for kind in KINDS {
            kind.pre_tokenizer();
            for name in kind.names {
                assert!(!seen.contains(name), "{name} twice");
                assert_eq!(PreTokenizerKind::of_name(name), Some(kind));
                seen.push(*name);
            }
        }
        assert_eq!(PreTokenizerKind::of_name("gpt-5"), None);
    }
}
