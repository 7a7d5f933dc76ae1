//! The tokenizer and chat template inside a GGUF file.

use std::path::Path;

use gguf::{Header, Metadata, Split};
use tokenizers::AddedToken;

use super::{Source, TemplateSources, pre_tokenizer::PreTokenizerKind};
use crate::{
    byte_pair::BytePairOptions,
    decoding::Decoding,
    error::{LoadError, VocabularyError},
    packed::PackedStrings,
    sampling_defaults::{SamplingDefaults, UncheckedDefaults},
    tokenizer::TokenizerParts,
};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const CHAT_TEMPLATE: &str = "tokenizer.chat_template";

/// Keys of single tokens, and the names that chat templates know them by.
const NAMED_TOKENS: [(&str, &str); 4] = [
    ("tokenizer.ggml.bos_token_id", "bos_token"),
    ("tokenizer.ggml.eos_token_id", "eos_token"),
    ("tokenizer.ggml.unknown_token_id", "unk_token"),
    ("tokenizer.ggml.padding_token_id", "pad_token"),
];
/// Keys of further tokens that end an answer: end of turn, end of message.
const MORE_EOS: [&str; 2] = ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// Where tokens and merges are, for errors found while they are put together.
pub(crate) const KEYS: [&str; 2] = [TOKENS, MERGES];

/// The values of `tokenizer.ggml.token_type`.
mod token_type {
    pub const UNKNOWN: i32 = 2;
    pub const CONTROL: i32 = 3;
    pub const USER_DEFINED: i32 = 4;
    pub const UNUSED: i32 = 5;
    pub const LAST: i32 = 6;
}

/// Reads the header of the file at `path`; no tensor is touched.
pub(crate) fn read(path: &Path) -> Result<Source, LoadError> {
    let gguf = |source| LoadError::Gguf { path: path.into(), source };
    let header = Header::read_from(path).map_err(gguf)?;
    // Of a split model the first part has the tokenizer; the others say which that is.
    Split::of_first(path, &header).map_err(gguf)?;
    let file = File { path, metadata: &header.metadata };
    Ok(Source {
        parts: file.parts()?,
        templates: file.templates()?,
        sampling_defaults: file.sampling_defaults()?,
    })
}

struct File<'a> {
    path: &'a Path,
    metadata: &'a Metadata,
}

impl File<'_> {
    fn parts(&self) -> Result<TokenizerParts, LoadError> {
        let model: &str = self.require(MODEL)?;
        if model != "gpt2" {
            return Err(self.unsupported(MODEL, model, "gpt2 (byte-level BPE)".into()));
        }
        // Files older than the key are GPT-2's kind more often than any other.
        let pre: &str = self.get(PRE)?.unwrap_or("default");
        let kind = PreTokenizerKind::of_name(pre)
            .ok_or_else(|| self.unsupported(PRE, pre, PreTokenizerKind::supported_names()))?;

        let tokens: &[String] = self.require(TOKENS)?;
        let mut strings = PackedStrings::default();
        if !tokens.iter().all(|token| strings.push(token)) {
            return Err(self.vocabulary(TOKENS, VocabularyError::TooLarge));
        }
        let ids = (0..u32::try_from(tokens.len()).unwrap_or(u32::MAX)).collect();
        let mut parts = TokenizerParts {
            strings,
            ids,
            merges: self.merges()?,
            options: BytePairOptions {
                whole_words_first: kind.whole_words_first,
                ..BytePairOptions::default()
            },
            normalizer: kind.normalizer(),
            pre_tokenizer: Some(kind.pre_tokenizer()),
            decoding: Some(Decoding::ByteLevel),
            bos_id: self.token_id(NAMED_TOKENS[0].0, tokens)?,
            pad_id: self.token_id(NAMED_TOKENS[3].0, tokens)?,
            ..TokenizerParts::default()
        };
        for key in [NAMED_TOKENS[1].0].iter().chain(&MORE_EOS) {
            parts.eos_ids.extend(self.token_id(key, tokens)?);
        }
        self.classify(tokens, &mut parts)?;

        if self.get("tokenizer.ggml.add_bos_token")?.unwrap_or(kind.adds_bos) {
            parts.prompt_prefix.extend(parts.bos_id);
        }
        if self.get("tokenizer.ggml.add_eos_token")?.unwrap_or(false) {
            parts.prompt_suffix.extend(self.token_id(NAMED_TOKENS[1].0, tokens)?);
        }
        Ok(parts)
    }

    /// Sorts tokens by their type: special, recognised before splitting, placeholders, ordinary.
    fn classify(&self, tokens: &[String], parts: &mut TokenizerParts) -> Result<(), LoadError> {
        let Some(types) = self.get::<&[i32]>(TOKEN_TYPES)? else {
            for id in parts.bos_id.iter().chain(&parts.eos_ids).chain(&parts.pad_id) {
                parts.added.push((*id, special_token(&tokens[*id as usize], true)));
            }
            return Ok(());
        };
        if types.len() != tokens.len() {
            let problem = format!("has {} entries, {TOKENS} has {}", types.len(), tokens.len());
            return Err(self.invalid(TOKEN_TYPES, problem));
        }
        for (id, (token, &kind)) in (0..).zip(tokens.iter().zip(types)) {
            match kind {
                token_type::UNKNOWN | token_type::CONTROL => {
                    parts.added.push((id, special_token(token, true)));
                }
                token_type::USER_DEFINED => parts.added.push((id, special_token(token, false))),
                token_type::UNUSED => parts.silent.push(id),
                0..=token_type::LAST => {}
                _ => {
                    let last = token_type::LAST;
                    let problem = format!("entry {id} is {kind}; types are 0 to {last}");
                    return Err(self.invalid(TOKEN_TYPES, problem));
                }
            }
        }
        Ok(())
    }

    fn merges(&self) -> Result<PackedStrings, LoadError> {
        let merges: &[String] = self.require(MERGES)?;
        let mut pairs = PackedStrings::default();
        for (index, merge) in merges.iter().enumerate() {
            let (left, right) =
                split_merge(index, merge).map_err(|e| self.vocabulary(MERGES, e))?;
            if !(pairs.push(left) && pairs.push(right)) {
                return Err(self.vocabulary(MERGES, VocabularyError::TooLarge));
            }
        }
        Ok(pairs)
    }

    fn templates(&self) -> Result<TemplateSources, LoadError> {
        let mut templates = TemplateSources::default();
        if let Some(template) = self.get::<&str>(CHAT_TEMPLATE)? {
            templates.insert("default", template.to_owned());
        }
        if let Some(template) = self.get::<&str>("tokenizer.chat_template.tool_use")? {
            templates.insert("tool_use", template.to_owned());
        }
        let tokens: &[String] = self.require(TOKENS)?;
        for (key, name) in NAMED_TOKENS {
            if let Some(id) = self.token_id(key, tokens)? {
                templates.special_tokens.insert(name.to_owned(), tokens[id as usize].clone());
            }
        }
        Ok(templates)
    }

    fn sampling_defaults(&self) -> Result<SamplingDefaults, LoadError> {
        let number = |key| Ok::<_, LoadError>((key, self.get::<f64>(key)?));
        const TOP_K: &str = "general.sampling.top_k";
        let unchecked = UncheckedDefaults {
            temperature: number("general.sampling.temp")?,
            top_k: (TOP_K, self.get(TOP_K)?),
            top_p: number("general.sampling.top_p")?,
            min_p: number("general.sampling.min_p")?,
            repetition_penalty: number("general.sampling.penalty_repeat")?,
        };
        unchecked.check().map_err(|(key, problem)| self.invalid(key, problem))
    }

    /// The id at `key`, which is one of the vocabulary. −1 in 32 bits is how some writers say "none".
    fn token_id(&self, key: &'static str, tokens: &[String]) -> Result<Option<u32>, LoadError> {
        match self.get::<u64>(key)? {
            None => Ok(None),
            Some(id) if id == u64::from(u32::MAX) => Ok(None),
            Some(id) if id < tokens.len() as u64 => Ok(Some(id as u32)),
            Some(id) => {
                let size = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
                let name = "the id";
                Err(self.vocabulary(key, VocabularyError::NoSuchId { name, id, size }))
            }
        }
    }

    fn get<'a, T: gguf::FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, LoadError> {
        self.metadata.get(key).map_err(|source| LoadError::Gguf { path: self.path.into(), source })
    }

    fn require<'a, T: gguf::FromValue<'a>>(&'a self, key: &str) -> Result<T, LoadError> {
        self.metadata
            .require(key)
            .map_err(|source| LoadError::Gguf { path: self.path.into(), source })
    }

    fn unsupported(&self, key: &str, found: &str, supported: String) -> LoadError {
        let (path, found) = (self.path.into(), found.to_owned());
        LoadError::Unsupported { path, key: key.to_owned(), found, supported }
    }

    fn invalid(&self, key: &str, problem: String) -> LoadError {
        LoadError::Invalid { path: self.path.into(), key: key.to_owned(), problem }
    }

    fn vocabulary(&self, key: &'static str, source: VocabularyError) -> LoadError {
        LoadError::Vocabulary { path: self.path.into(), key, source }
    }
}

/// The two tokens of merge `index`.
pub(super) fn split_merge(index: usize, merge: &str) -> Result<(&str, &str), VocabularyError> {
    merge
        .split_once(' ')
        .filter(|(left, right)| !left.is_empty() && !right.is_empty() && !right.contains(' '))
        .ok_or_else(|| VocabularyError::MalformedMerge { index, found: merge.to_owned() })
}

fn special_token(content: &str, special: bool) -> AddedToken {
    AddedToken::from(content, special).normalized(false)
}
