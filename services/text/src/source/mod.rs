//! Where a model's text side is read from: a GGUF file or a Hugging Face folder.

mod decoder;
mod frame;
pub(crate) mod gguf_file;
pub(crate) mod hugging_face;
mod packed_json;
mod pre_tokenizer;

use std::collections::BTreeMap;

use crate::tokenizer::TokenizerParts;

/// All that a source says.
pub(crate) struct Source {
    pub parts: TokenizerParts,
    pub templates: TemplateSources,
}

/// Chat templates as the model brings them.
#[derive(Debug, Default)]
pub(crate) struct TemplateSources {
    pub default: Option<String>,
    /// Takes the default's place when a request has tools.
    pub tool_use: Option<String>,
    /// What templates may refer to: `bos_token`, `eos_token` and the like.
    pub special_tokens: BTreeMap<String, String>,
}

impl TemplateSources {
    /// Takes one of several named templates; names that nothing asks for are dropped.
    pub fn insert(&mut self, name: &str, template: String) {
        match name {
            "default" => self.default = Some(template),
            "tool_use" => self.tool_use = Some(template),
            _ => {}
        }
    }
}
