//! Parses `tokenizer.json`.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper};

use crate::{
    byte_pair::BytePairOptions,
    error::LoadError,
    source::{
        decoder::{self, decoding_of},
        frame::PromptFrame,
        packed_json::{PackedMerges, PackedVocabulary},
    },
    tokenizer::{TokenizerParts, WordModelParts},
};

#[derive(Deserialize)]
pub(super) struct TokenizerFile {
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
    /// Absent in old files, which are all BPE.
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

pub(super) fn parts_of(file: TokenizerFile, path: &Path) -> Result<TokenizerParts, LoadError> {
    let unsupported = |key, found, supported| LoadError::unsupported(path, key, found, supported);
    let invalid = |key, problem| LoadError::invalid(path, key, problem);
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
    let frame = PromptFrame::of_post_processor(&file.post_processor, path)?;
    let decoding = decoding_of(&file.decoder)
        .map_err(|found| unsupported("decoder", found, decoder::SUPPORTED))?;

    Ok(TokenizerParts {
        strings: model.vocab.strings,
        ids: model.vocab.ids,
        model: WordModelParts::BytePair {
            merges: model.merges.0,
            options: BytePairOptions {
                unknown_token: model.unk_token,
                fuse_unknown: model.fuse_unk,
                byte_fallback: model.byte_fallback,
                whole_words_first: model.ignore_merges,
            },
        },
        added: file.added_tokens.into_iter().map(|entry| (entry.id, entry.token)).collect(),
        normalizer,
        pre_tokenizer,
        decoding,
        prompt_prefix: frame.prefix,
        prompt_suffix: frame.suffix,
        ..TokenizerParts::default()
    })
}
