//! Prompts of the chat templates of published models, compared with those of transformers.
//!
//! `deploy/fetch-tokenizers.sh`, which `make test` runs, puts the templates into
//! target/tokenizers/llama.cpp/templates. `fixtures/model_templates.py` writes the hashes.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    time::{Duration, UNIX_EPOCH},
};

use serde::Deserialize;
use serde_json::{Map, Value};
use text::{ChatTemplate, RenderRequest, TemplateError};

/// Hash of each template's prompt of each conversation; null where the template refuses it.
const HASHES: &str = include_str!("fixtures/model_templates.json");
const CONVERSATIONS: &str = include_str!("fixtures/conversations.json");

#[derive(Deserialize)]
struct Conversation {
    messages: Value,
    #[serde(default)]
    tools: Value,
    #[serde(default = "yes")]
    add_generation_prompt: bool,
    #[serde(flatten)]
    variables: Map<String, Value>,
}

fn yes() -> bool {
    true
}

impl Conversation {
    /// Renders the conversation in the form of OpenAI's API: arguments are JSON text.
    fn render(&self, template: &ChatTemplate) -> Result<String, TemplateError> {
        let mut messages = self.messages.clone();
        for message in messages.as_array_mut().unwrap() {
            let Some(calls) = message.get_mut("tool_calls") else { continue };
            for call in calls.as_array_mut().unwrap() {
                let arguments = &mut call["function"]["arguments"];
                *arguments = arguments.to_string().into();
            }
        }
        template.render(&RenderRequest {
            messages: &messages,
            tools: &self.tools,
            add_generation_prompt: self.add_generation_prompt,
            extra: &self.variables,
            now: UNIX_EPOCH + Duration::from_secs(1_722_000_000),
            literal: None,
        })
    }
}

/// Returns the FNV-1a hash of 64 bits.
fn fnv(text: &str) -> String {
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    format!("{hash:016x}")
}

#[test]
fn prompts_of_published_models_equal_those_of_transformers() {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let folder = target.join("tokenizers/llama.cpp/templates");
    let complete = folder.is_dir();
    assert!(complete, "{} is missing; run deploy/fetch-tokenizers.sh", folder.display());
    let special = ["bos_token", "eos_token"].map(str::to_owned).into_iter();
    let special: BTreeMap<String, String> =
        special.zip(["<s>", "</s>"].map(str::to_owned)).collect();
    let conversations: BTreeMap<String, Conversation> =
        serde_json::from_str(CONVERSATIONS).unwrap();
    let hashes: BTreeMap<String, BTreeMap<String, Option<String>>> =
        serde_json::from_str(HASHES).unwrap();
    let mut different = Vec::new();
    for (name, hashes) in &hashes {
        let source = fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        let template = match ChatTemplate::new(&source, special.clone()) {
            Ok(template) => template,
            Err(error) => {
                different.push(format!("{name}: {error}"));
                continue;
            }
        };
        for (conversation, expected) in hashes {
            let rendered = conversations[conversation].render(&template);
            if rendered.as_deref().ok().map(fnv) != *expected {
                different.push(format!("{name}, {conversation}: {rendered:?}, not {expected:?}"));
            }
        }
    }
    assert!(different.is_empty(), "{} differ:\n{}", different.len(), different.join("\n"));
}
