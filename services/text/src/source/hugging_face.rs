//! The tokenizer and chat template of a Hugging Face folder.
//!
//! `tokenizer.json` says how text is split. What stands around it is spread over
//! `tokenizer_config.json`, `special_tokens_map.json` (names of special tokens),
//! `generation_config.json`, `config.json` (tokens that end an answer) and `chat_template.jinja`.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper};

use super::{
    Source, TemplateSources,
    decoder::{self, decoding_of},
    frame::{self, FrameError, PromptFrame},
    packed_json::{PackedMerges, PackedVocabulary},
};
use crate::{byte_pair::BytePairOptions, error::LoadError, tokenizer::TokenizerParts};

pub(crate) const TOKENIZER_FILE: &str = "tokenizer.json";
/// Where tokens and merges are, for errors found while they are put together.
pub(crate) const KEYS: [&str; 2] = ["model.vocab", "model.merges"];
/// The largest in use has 33 MB.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// Names under which configurations give single special tokens.
const NAMED_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Reads the text files of `folder`; no weight is touched.
pub(crate) fn read(folder: &Path) -> Result<Source, LoadError> {
    let path = folder.join(TOKENIZER_FILE);
    let file: TokenizerFile = read_json(&path, TOKENIZER_BYTES_MAX)?
        .ok_or_else(|| LoadError::NotAModel { path: folder.into() })?;
    let mut parts = parts_of(file, &path)?;

    let config_path = folder.join("tokenizer_config.json");
    let config: TokenizerConfig = read_json(&config_path, CONFIG_BYTES_MAX)?.unwrap_or_default();
    let map: SpecialTokensMap =
        read_json(&folder.join("special_tokens_map.json"), CONFIG_BYTES_MAX)?.unwrap_or_default();
    add_configured_tokens(&config, &config_path, &mut parts)?;

    let mut templates = TemplateSources::default();
    for name in NAMED_TOKENS {
        if let Some(token) = config.named.token(name).or_else(|| map.0.token(name)) {
            templates.special_tokens.insert(name.to_owned(), token.to_owned());
        }
    }
    let id_of = |name: &str| id_of_token(&parts, templates.special_tokens.get(name)?);
    let (bos_id, eos_id, pad_id) = (id_of("bos_token"), id_of("eos_token"), id_of("pad_token"));
    parts.bos_id = bos_id;
    parts.pad_id = pad_id;
    parts.eos_ids.extend(eos_id);
    let generation: Option<ModelConfig> =
        read_json(&folder.join("generation_config.json"), CONFIG_BYTES_MAX)?;
    let ends = match generation.and_then(|config| config.eos_token_id) {
        Some(ends) => Some(ends),
        None => read_json::<ModelConfig>(&folder.join("config.json"), CONFIG_BYTES_MAX)?
            .and_then(|config| config.eos_token_id),
    };
    match ends {
        Some(OneOrMany::One(id)) => parts.eos_ids.push(id),
        Some(OneOrMany::Many(ids)) => parts.eos_ids.extend(ids),
        None => {}
    }

    match config.chat_template {
        Some(ChatTemplates::One(template)) => templates.insert("default", template),
        Some(ChatTemplates::Named(list)) => {
            list.into_iter().for_each(|named| templates.insert(&named.name, named.template));
        }
        None => {}
    }
    // A file of its own is what newer writers leave, and what counts when there are both.
    if let Some(template) = read_text(&folder.join("chat_template.jinja"), CONFIG_BYTES_MAX)? {
        templates.insert("default", template);
    }
    let more = folder.join("additional_chat_templates").join("tool_use.jinja");
    if let Some(template) = read_text(&more, CONFIG_BYTES_MAX)? {
        templates.insert("tool_use", template);
    }
    Ok(Source { parts, templates })
}

/// The file's text; `None` when there is no such file.
fn read_text(path: &Path, bytes_max: u64) -> Result<Option<String>, LoadError> {
    let io = |source| LoadError::Io { path: path.into(), source };
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io(error)),
    };
    let bytes = file.metadata().map_err(io)?.len();
    if bytes > bytes_max {
        return Err(LoadError::FileTooLarge { path: path.into(), bytes, limit: bytes_max });
    }
    let mut text = String::with_capacity(bytes as usize + 1);
    file.by_ref().take(bytes_max).read_to_string(&mut text).map_err(io)?;
    Ok(Some(text))
}

fn read_json<T: DeserializeOwned>(path: &Path, bytes_max: u64) -> Result<Option<T>, LoadError> {
    let Some(text) = read_text(path, bytes_max)? else { return Ok(None) };
    let parsed = serde_json::from_str(&text);
    parsed.map(Some).map_err(|source| LoadError::Json { path: path.into(), source })
}

#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    added_tokens: Vec<AddedTokenEntry>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    model: ModelEntry,
}

#[derive(Deserialize)]
struct AddedTokenEntry {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

#[derive(Deserialize)]
struct ModelEntry {
    /// Absent in old files, which are all of one kind.
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    vocab: PackedVocabulary,
    #[serde(default)]
    merges: PackedMerges,
    unk_token: Option<String>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    dropout: Option<f64>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

fn parts_of(file: TokenizerFile, path: &Path) -> Result<TokenizerParts, LoadError> {
    let unsupported = |key: &str, found: String, supported: &str| LoadError::Unsupported {
        path: path.into(),
        key: key.to_owned(),
        found,
        supported: supported.to_owned(),
    };
    let invalid = |key: &str, problem: String| LoadError::Invalid {
        path: path.into(),
        key: key.to_owned(),
        problem,
    };

    let model = file.model;
    if let Some(kind) = model.kind.filter(|kind| kind != "BPE") {
        return Err(unsupported("model.type", kind, "BPE"));
    }
    for (key, affix) in [
        ("model.continuing_subword_prefix", model.continuing_subword_prefix),
        ("model.end_of_word_suffix", model.end_of_word_suffix),
    ] {
        if let Some(affix) = affix.filter(|affix| !affix.is_empty()) {
            return Err(unsupported(key, affix, "none"));
        }
    }
    if let Some(dropout) = model.dropout.filter(|dropout| *dropout != 0.0) {
        return Err(unsupported("model.dropout", dropout.to_string(), "none"));
    }

    let normalizer: Option<NormalizerWrapper> = serde_json::from_value(file.normalizer)
        .map_err(|error| invalid("normalizer", error.to_string()))?;
    let pre_tokenizer: Option<PreTokenizerWrapper> = serde_json::from_value(file.pre_tokenizer)
        .map_err(|error| invalid("pre_tokenizer", error.to_string()))?;
    let frame =
        PromptFrame::of_post_processor(&file.post_processor).map_err(|error| match error {
            FrameError::UnsupportedType(found) => {
                unsupported("post_processor.type", found, frame::SUPPORTED_TYPES)
            }
            FrameError::Malformed(problem) => invalid("post_processor", problem),
        })?;
    let decoding = decoding_of(&file.decoder)
        .map_err(|found| unsupported("decoder", found, decoder::SUPPORTED))?;

    Ok(TokenizerParts {
        strings: model.vocab.strings,
        ids: model.vocab.ids,
        merges: model.merges.0,
        options: BytePairOptions {
            unknown_token: model.unk_token,
            fuse_unknown: model.fuse_unk,
            byte_fallback: model.byte_fallback,
            whole_words_first: model.ignore_merges,
        },
        added: file.added_tokens.into_iter().map(|entry| (entry.id, entry.token)).collect(),
        normalizer,
        pre_tokenizer,
        decoding: Some(decoding),
        prompt_prefix: frame.prefix,
        prompt_suffix: frame.suffix,
        ..TokenizerParts::default()
    })
}

/// `tokenizer_config.json`, as far as it matters here.
#[derive(Default, Deserialize)]
struct TokenizerConfig {
    #[serde(flatten)]
    named: NamedTokens,
    chat_template: Option<ChatTemplates>,
    #[serde(default)]
    added_tokens_decoder: std::collections::BTreeMap<u32, AddedTokenConfig>,
}

#[derive(Default, Deserialize)]
struct SpecialTokensMap(NamedTokens);

#[derive(Default, Deserialize)]
struct NamedTokens {
    bos_token: Option<NamedToken>,
    eos_token: Option<NamedToken>,
    unk_token: Option<NamedToken>,
    sep_token: Option<NamedToken>,
    pad_token: Option<NamedToken>,
    cls_token: Option<NamedToken>,
    mask_token: Option<NamedToken>,
}

impl NamedTokens {
    fn token(&self, name: &str) -> Option<&str> {
        let token = match name {
            "bos_token" => &self.bos_token,
            "eos_token" => &self.eos_token,
            "unk_token" => &self.unk_token,
            "sep_token" => &self.sep_token,
            "pad_token" => &self.pad_token,
            "cls_token" => &self.cls_token,
            "mask_token" => &self.mask_token,
            _ => return None,
        };
        token.as_ref().map(|token| match token {
            NamedToken::Plain(content) | NamedToken::Full { content } => content.as_str(),
        })
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum NamedToken {
    Plain(String),
    Full { content: String },
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ChatTemplates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

#[derive(Deserialize)]
struct AddedTokenConfig {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

/// `generation_config.json` and `config.json`, as far as they matter here.
#[derive(Deserialize)]
struct ModelConfig {
    eos_token_id: Option<OneOrMany>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

/// Adds those tokens of `added_tokens_decoder` that tokenizer.json does not have.
fn add_configured_tokens(
    config: &TokenizerConfig,
    path: &Path,
    parts: &mut TokenizerParts,
) -> Result<(), LoadError> {
    for (&id, entry) in &config.added_tokens_decoder {
        if parts.added.iter().any(|(_, token)| token.content == entry.content) {
            continue;
        }
        if let Some((_, taken)) = parts.added.iter().find(|(other, _)| *other == id) {
            let problem = format!(
                "gives id {id} to {:?}, which {TOKENIZER_FILE} gives to {:?}",
                entry.content, taken.content
            );
            let key = "added_tokens_decoder".to_owned();
            return Err(LoadError::Invalid { path: PathBuf::from(path), key, problem });
        }
        let token = AddedToken::from(entry.content.as_str(), entry.special)
            .single_word(entry.single_word)
            .lstrip(entry.lstrip)
            .rstrip(entry.rstrip)
            .normalized(entry.normalized);
        parts.added.push((id, token));
    }
    Ok(())
}

/// The id of a token named in a configuration.
fn id_of_token(parts: &TokenizerParts, token: &str) -> Option<u32> {
    (0..parts.strings.len())
        .find(|at| parts.strings.get(*at) == token)
        .map(|at| parts.ids[at])
        .or_else(|| Some(parts.added.iter().find(|(_, added)| added.content == token)?.0))
}
