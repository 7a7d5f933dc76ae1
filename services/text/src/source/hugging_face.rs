//! Tokenizer and chat template of a Hugging Face folder.
//!
//! `tokenizer.json` defines how text is split. Other files complete it: `tokenizer_config.json`,
//! `special_tokens_map.json` (names of special tokens), `generation_config.json` (sampling defaults
//! and end-of-sequence tokens), `config.json` (end-of-sequence tokens too) and
//! `chat_template.jinja`.

mod configs;
mod sentence_transformers;
mod tokenizer_file;

use std::{fs::File, io::Read, path::Path};

use serde::de::DeserializeOwned;
use tokenizers::AddedToken;

use self::{
    configs::{
        ChatTemplates, GenerationConfig, ModelConfigFile, NamedTokens, OneOrMany, TokenizerConfig,
    },
    tokenizer_file::{TokenizerFile, parts_of},
};
use super::{TemplateSources, TokenizerSource, VocabularyOrigin};
use crate::{error::LoadError, sampling_defaults::SamplingDefaults, tokenizer::TokenizerParts};

const TOKENIZER_FILE: &str = "tokenizer.json";
/// Maximum bytes of tokenizer.json. The largest in use has 33 MB.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// Reads the text files of `folder` and no weights.
pub(crate) fn read(folder: &Path) -> Result<TokenizerSource, LoadError> {
    let path = folder.join(TOKENIZER_FILE);
    let file: TokenizerFile = read_json(&path, TOKENIZER_BYTES_MAX)?
        .ok_or_else(|| LoadError::NotAModel { path: folder.into() })?;
    let mut parts = parts_of(file, &path)?;

    let config_path = folder.join("tokenizer_config.json");
    let config: TokenizerConfig = read_json(&config_path, CONFIG_BYTES_MAX)?.unwrap_or_default();
    let map: NamedTokens =
        read_json(&folder.join("special_tokens_map.json"), CONFIG_BYTES_MAX)?.unwrap_or_default();
    add_configured_tokens(&config, &config_path, &mut parts)?;
    mark_special(&config.named, &map, &mut parts);

    let mut templates = TemplateSources::default();
    // The tokens of tokenizer_config.json precede those of special_tokens_map.json.
    for (key, token) in map.single().chain(config.named.single()) {
        templates.special_tokens.insert(key.to_owned(), token.to_owned());
    }
    let id_of = |name: &str| id_of_token(&parts, templates.special_tokens.get(name)?);
    let (bos_id, eos_id) = (id_of("bos_token"), id_of("eos_token"));
    if config.add_bos_token.is_some() || config.add_eos_token.is_some() {
        // As in transformers 5, this setting replaces the post-processor.
        let wanted = |flag: Option<bool>, id: Option<u32>| id.filter(|_| flag == Some(true));
        parts.prompt_prefix = wanted(config.add_bos_token, bos_id).into_iter().collect();
        parts.prompt_suffix = wanted(config.add_eos_token, eos_id).into_iter().collect();
    }
    parts.bos_id = bos_id;
    parts.eos_ids.extend(eos_id);
    let model_path = folder.join("config.json");
    let model: Option<ModelConfigFile> = read_json(&model_path, CONFIG_BYTES_MAX)?;
    if let Some(size) = model.as_ref().and_then(|model| model.vocab_size) {
        check_embedding(&parts, size as u64, &model_path)?;
    }
    let generates = model.as_ref().is_none_or(ModelConfigFile::has_lm_head);
    let (sampling_defaults, ends) = generation(folder, model, &model_path)?;
    parts.eos_ids.extend(ends);
    add_templates(folder, config.chat_template, &mut templates)?;
    let origin = VocabularyOrigin { file: path, keys: ["model.vocab", "model.merges"] };
    let pooled = sentence_transformers::read(folder)?;
    Ok(TokenizerSource { parts, templates, sampling_defaults, pooled, generates, origin })
}

/// Checks that every id of the tokenizer is a row of the model's embedding. Further rows are
/// padding.
fn check_embedding(parts: &TokenizerParts, rows: u64, path: &Path) -> Result<(), LoadError> {
    let added = parts.added.iter().map(|(id, _)| id);
    match parts.ids.iter().chain(added).max() {
        Some(&largest) if u64::from(largest) >= rows => {
            let problem = format!(
                "is {rows}, but {TOKENIZER_FILE} has token id {largest}: they are of different models"
            );
            Err(LoadError::invalid(path, "vocab_size", problem))
        }
        _ => Ok(()),
    }
}

/// Reads `generation_config.json`, and the end-of-sequence tokens from it or from `config.json`.
fn generation(
    folder: &Path,
    model: Option<ModelConfigFile>,
    model_path: &Path,
) -> Result<(SamplingDefaults, Vec<u32>), LoadError> {
    let path = folder.join("generation_config.json");
    let generation: GenerationConfig = read_json(&path, CONFIG_BYTES_MAX)?.unwrap_or_default();
    let defaults = generation.sampling_defaults(&path);
    let (ends, path) = match generation.eos_token_id {
        Some(ends) => (Some(ends), path.as_path()),
        None => (model.and_then(|model| model.eos_token_id), model_path),
    };
    let ends = ends.map_or(Ok(Vec::new()), OneOrMany::ids);
    Ok((defaults, ends.map_err(|problem| LoadError::invalid(path, "eos_token_id", problem))?))
}

/// Adds the templates of `tokenizer_config.json`, and those of separate files, which newer tools
/// write and which take precedence.
fn add_templates(
    folder: &Path,
    configured: Option<ChatTemplates>,
    templates: &mut TemplateSources,
) -> Result<(), LoadError> {
    match configured {
        Some(ChatTemplates::One(template)) => templates.insert("default", template),
        Some(ChatTemplates::Named(list)) => {
            list.into_iter().for_each(|named| templates.insert(&named.name, named.template));
        }
        None => {}
    }
    let files = [
        ("default", folder.join("chat_template.jinja")),
        ("tool_use", folder.join("additional_chat_templates").join("tool_use.jinja")),
    ];
    for (name, path) in files {
        if let Some(template) = read_text(&path, CONFIG_BYTES_MAX)? {
            templates.insert(name, template);
        }
    }
    Ok(())
}

/// Returns the file's text; `None` when there is no such file.
fn read_text(path: &Path, bytes_max: u64) -> Result<Option<String>, LoadError> {
    let io = |cause| LoadError::Io { path: path.into(), cause };
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io(error)),
    };
    // Checked before the file is opened: opening a FIFO blocks.
    if !metadata.is_file() {
        let kind = std::io::ErrorKind::InvalidInput;
        return Err(io(std::io::Error::new(kind, "not a regular file")));
    }
    let mut file = File::open(path).map_err(io)?;
    let bytes = metadata.len();
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
    parsed.map(Some).map_err(|cause| LoadError::Json { path: path.into(), cause })
}

/// Adds the tokens of `added_tokens_decoder` that are missing in tokenizer.json.
fn add_configured_tokens(
    config: &TokenizerConfig,
    path: &Path,
    parts: &mut TokenizerParts,
) -> Result<(), LoadError> {
    for (&id, entry) in config.added_tokens_decoder.iter().flatten() {
        if parts.added.iter().any(|(_, token)| token.content == entry.content) {
            continue;
        }
        if let Some((_, taken)) = parts.added.iter().find(|(other, _)| *other == id) {
            let problem = format!(
                "gives id {id} to {:?}, which {TOKENIZER_FILE} gives to {:?}",
                entry.content, taken.content
            );
            return Err(LoadError::invalid(path, "added_tokens_decoder", problem));
        }
        parts.added.push((id, entry.token()));
    }
    Ok(())
}

/// Marks tokens that a configuration names as special, even if tokenizer.json does not.
fn mark_special(config: &NamedTokens, map: &NamedTokens, parts: &mut TokenizerParts) {
    for name in config.all().chain(map.all()) {
        if let Some((_, token)) = parts.added.iter_mut().find(|(_, token)| token.content == name) {
            token.special = true;
        } else if let Some(id) = id_of_token(parts, name) {
            parts.added.push((id, AddedToken::from(name, true).normalized(false)));
        }
    }
}

/// Returns the id of a token that a configuration names.
fn id_of_token(parts: &TokenizerParts, token: &str) -> Option<u32> {
    (0..parts.strings.len())
        .find(|at| parts.strings.get(*at) == token)
        .map(|at| parts.ids[at])
        .or_else(|| Some(parts.added.iter().find(|(_, added)| added.content == token)?.0))
}
