//! Tokenizer and chat template in a GGUF file.

mod pieces;

use std::path::Path;

use gguf::{GgufError, Header, Metadata, Split};
use tokenizers::AddedToken;

use super::{TemplateSources, TokenizerSource, VocabularyOrigin, pre_tokenizer::PreTokenizerKind};
use crate::{
    byte_pair::BytePairOptions,
    decoding::Decoding,
    error::{LoadError, VocabularyError},
    packed::PackedStrings,
    pooled_model::NotPooled,
    sampling_defaults::{SamplingDefaults, UncheckedDefaults},
    tokenizer::{TokenizerParts, WordModelParts},
};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const EMBEDDING: &str = "token_embd.weight";
const CHAT_TEMPLATE: &str = "tokenizer.chat_template";

const BOS_KEY: &str = "tokenizer.ggml.bos_token_id";
const EOS_KEY: &str = "tokenizer.ggml.eos_token_id";
const UNKNOWN_KEY: &str = "tokenizer.ggml.unknown_token_id";
const PADDING_KEY: &str = "tokenizer.ggml.padding_token_id";

/// Keys of single tokens, and their names in chat templates.
const NAMED_TOKENS: [(&str, &str); 4] = [
    (BOS_KEY, "bos_token"),
    (EOS_KEY, "eos_token"),
    (UNKNOWN_KEY, "unk_token"),
    (PADDING_KEY, "pad_token"),
];
/// Keys of further tokens that end generation: end of turn, end of message.
const MORE_EOS: [&str; 2] = ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];
/// Control tokens that end generation, as in llama.cpp, also if no key has their id: most files
/// have the key of EOS only.
const EOS_NAMES: [&str; 4] = ["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>"];

const SUPPORTED_MODELS: &str = "gpt2 (byte-level BPE), llama (SentencePiece BPE)";

/// Values of `tokenizer.ggml.token_type`.
mod token_type {
    pub(super) const UNKNOWN: i32 = 2;
    pub(super) const CONTROL: i32 = 3;
    pub(super) const USER_DEFINED: i32 = 4;
    pub(super) const UNUSED: i32 = 5;
    pub(super) const BYTE: i32 = 6;
    pub(super) const LAST: i32 = BYTE;
}

/// Reads the header of the file at `path` and no tensors.
pub(crate) fn read(path: &Path) -> Result<TokenizerSource, LoadError> {
    let gguf = |cause| LoadError::Gguf { path: path.into(), cause };
    let header = Header::read_from(path).map_err(gguf)?;
    // Only the first part of a split model has the tokenizer. Reject the other parts.
    Split::of_first(path, &header).map_err(gguf)?;
    let file = GgufVocabulary { path, metadata: &header.metadata };
    file.check_embedding(&header)?;
    Ok(TokenizerSource {
        pooled: Err(NotPooled::Gguf),
        generates: true,
        parts: file.parts()?,
        templates: file.templates()?,
        sampling_defaults: file.sampling_defaults()?,
        origin: VocabularyOrigin { file: path.into(), keys: [TOKENS, MERGES] },
    })
}

struct GgufVocabulary<'a> {
    path: &'a Path,
    metadata: &'a Metadata,
}

/// Kind of the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum VocabularyKind {
    /// Bytes in GPT-2's alphabet, with merges.
    ByteLevel(PreTokenizerKind),
    /// SentencePiece's vocabulary, with scores.
    Pieces,
}

impl GgufVocabulary<'_> {
    fn kind(&self) -> Result<VocabularyKind, LoadError> {
        match self.require(MODEL)? {
            "gpt2" => {}
            "llama" => return Ok(VocabularyKind::Pieces),
            model => return Err(self.unsupported(MODEL, model, SUPPORTED_MODELS)),
        }
        // Files without this key are older, and usually have GPT-2's pre-tokenizer.
        let pre: &str = self.get(PRE)?.unwrap_or("default");
        PreTokenizerKind::of_name(pre)
            .map(VocabularyKind::ByteLevel)
            .ok_or_else(|| self.unsupported(PRE, pre, &PreTokenizerKind::supported_names()))
    }

    fn parts(&self) -> Result<TokenizerParts, LoadError> {
        let kind = self.kind()?;
        let tokens: &[String] = self.require(TOKENS)?;
        let types = self.types(tokens)?;
        let mut strings = PackedStrings::default();
        if !tokens.iter().all(|token| strings.push(token)) {
            return Err(self.vocabulary(TOKENS, VocabularyError::TooLarge));
        }
        let eos_id = self.named_token(EOS_KEY, tokens)?;
        let mut parts = TokenizerParts {
            strings,
            ids: (0..u32::try_from(tokens.len()).unwrap_or(u32::MAX)).collect(),
            bos_id: self.named_token(BOS_KEY, tokens)?,
            eos_ids: eos_id.into_iter().collect(),
            ..TokenizerParts::default()
        };
        for key in MORE_EOS {
            parts.eos_ids.extend(self.token_id(key, tokens)?);
        }
        let named = (0..).zip(tokens).filter(|(_, token)| EOS_NAMES.contains(&token.as_str()));
        let is_control = |id: &u32| {
            types.is_some_and(|types| types.get(*id as usize) == Some(&token_type::CONTROL))
        };
        parts.eos_ids.extend(named.map(|(id, _)| id).filter(is_control));
        classify(tokens, types, self.token_id(PADDING_KEY, tokens)?, &mut parts);
        let adds_bos = match kind {
            VocabularyKind::ByteLevel(kind) => {
                let whole_words_first = kind.whole_words_first;
                parts.model = WordModelParts::BytePair {
                    merges: self.merges()?,
                    options: BytePairOptions { whole_words_first, ..BytePairOptions::default() },
                };
                parts.normalizer = kind.normalizer();
                parts.pre_tokenizer = Some(kind.pre_tokenizer());
                parts.decoding = Decoding::ByteLevel;
                kind.adds_bos
            }
            VocabularyKind::Pieces => {
                self.pieces(tokens, types, &mut parts)?;
                true
            }
        };
        if self.get("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos) {
            parts.prompt_prefix.extend(parts.bos_id);
        }
        if self.get("tokenizer.ggml.add_eos_token")?.unwrap_or(false) {
            parts.prompt_suffix.extend(eos_id);
        }
        Ok(parts)
    }

    /// Returns the type of each token, if the file has types.
    fn types(&self, tokens: &[String]) -> Result<Option<&[i32]>, LoadError> {
        let Some(types) = self.get::<&[i32]>(TOKEN_TYPES)? else { return Ok(None) };
        if types.len() != tokens.len() {
            let problem = format!("has {} entries, {TOKENS} has {}", types.len(), tokens.len());
            return Err(self.invalid(TOKEN_TYPES, problem));
        }
        let last = token_type::LAST;
        match types.iter().enumerate().find(|(_, kind)| !(0..=last).contains(*kind)) {
            Some((id, kind)) => {
                let problem = format!("entry {id} is {kind}; expected 0 to {last}");
                Err(self.invalid(TOKEN_TYPES, problem))
            }
            None => Ok(Some(types)),
        }
    }

    /// Checks that every token has a row in the model's embedding. Further rows are padding.
    fn check_embedding(&self, header: &Header) -> Result<(), LoadError> {
        let tokens: &[String] = self.require(TOKENS)?;
        // A vocabulary-only file, or the first part of a split model, may have no embedding.
        let Some(embedding) = header.tensor(EMBEDDING) else { return Ok(()) };
        match embedding.dims.get(1) {
            Some(&rows) if rows < tokens.len() as u64 => {
                let problem = format!(
                    "has {} tokens, but {EMBEDDING} has {rows} rows: they are of different models",
                    tokens.len()
                );
                Err(self.invalid(TOKENS, problem))
            }
            _ => Ok(()),
        }
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
            if let Some(id) = self.named_token(key, tokens)? {
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
            top_k: (TOP_K, self.get::<i64>(TOP_K)?.map(|top_k| top_k as f64)),
            top_p: number("general.sampling.top_p")?,
            min_p: number("general.sampling.min_p")?,
            repetition_penalty: number("general.sampling.penalty_repeat")?,
        };
        Ok(unchecked.check(self.path))
    }

    /// Returns the id at `key`, or SentencePiece's default ids of BOS and EOS when the file has
    /// none.
    fn named_token(&self, key: &'static str, tokens: &[String]) -> Result<Option<u32>, LoadError> {
        let usual = match key {
            BOS_KEY => pieces::BOS_ID,
            EOS_KEY => pieces::EOS_ID,
            _ => return self.token_id(key, tokens),
        };
        if self.metadata.value(key).is_some() || self.kind()? != VocabularyKind::Pieces {
            return self.token_id(key, tokens);
        }
        let types = self.types(tokens)?.unwrap_or_default();
        let is_control = types.get(usual as usize) == Some(&token_type::CONTROL);
        Ok(is_control.then_some(usual))
    }

    /// Returns the id at `key`, which must be in the vocabulary. Some writers store −1 in 32 bits
    /// for "none".
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
        self.metadata.get(key).map_err(|cause| self.gguf(cause))
    }

    fn require<'a, T: gguf::FromValue<'a>>(&'a self, key: &str) -> Result<T, LoadError> {
        self.metadata.require(key).map_err(|cause| self.gguf(cause))
    }

    fn gguf(&self, cause: GgufError) -> LoadError {
        LoadError::Gguf { path: self.path.into(), cause }
    }

    fn unsupported(&self, key: &str, found: &str, supported: &str) -> LoadError {
        LoadError::unsupported(self.path, key, found.to_owned(), supported)
    }

    fn invalid(&self, key: &str, problem: String) -> LoadError {
        LoadError::invalid(self.path, key, problem)
    }

    fn vocabulary(&self, key: &'static str, cause: VocabularyError) -> LoadError {
        LoadError::Vocabulary { path: self.path.into(), key, cause }
    }
}

/// Adds special and user-defined tokens to `parts.added`, and unused tokens to `parts.silent`.
fn classify(
    tokens: &[String],
    types: Option<&[i32]>,
    pad_id: Option<u32>,
    parts: &mut TokenizerParts,
) {
    let Some(types) = types else {
        for id in parts.bos_id.iter().chain(&parts.eos_ids).chain(&pad_id) {
            parts.added.push((*id, special_token(&tokens[*id as usize], true)));
        }
        return;
    };
    for (id, (token, &kind)) in (0..).zip(tokens.iter().zip(types)) {
        match kind {
            token_type::UNKNOWN | token_type::CONTROL => {
                parts.added.push((id, special_token(token, true)));
            }
            token_type::USER_DEFINED => parts.added.push((id, special_token(token, false))),
            token_type::UNUSED => parts.silent.push(id),
            _ => {}
        }
    }
}

/// Splits merge `index` into its two tokens.
pub(super) fn split_merge(index: usize, merge: &str) -> Result<(&str, &str), VocabularyError> {
    merge
        .split_once(' ')
        .filter(|(left, right)| !left.is_empty() && !right.is_empty() && !right.contains(' '))
        .ok_or_else(|| VocabularyError::MalformedMerge { index, found: merge.to_owned() })
}

fn special_token(content: &str, special: bool) -> AddedToken {
    AddedToken::from(content, special).normalized(false)
}
