//! Selection of a model's files.

use anyhow::{Result, bail, ensure};
use config::{HubModel, hub::Parts, parts_of};

const REQUIRED: [&str; 2] = ["config.json", "tokenizer.json"];
/// Files that are fetched if the model has them.
const OPTIONAL: [&str; 5] = [
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
];
const WEIGHTS: &str = "model.safetensors";
const WEIGHTS_INDEX: &str = "model.safetensors.index.json";
/// Maximum number of GGUF files that an error lists.
const LISTED_MAX: usize = 20;

/// Selects the files to fetch from `all` files of the model, weights last.
pub(super) fn needed(model: &HubModel, parts: Parts, all: &[String]) -> Result<Vec<String>> {
    let has = |name: &str| all.iter().any(|other| other == name);
    if let Some(file) = &model.file {
        let files = parts_of(file);
        if let Some(missing) = files.iter().find(|part| !has(part)) {
            bail!("the model has no file {missing}; {}", gguf_files(all));
        }
        return Ok(files);
    }
    for name in REQUIRED {
        ensure!(has(name), "the model has no {name}, which is required; {}", gguf_files(all));
    }
    let mut files: Vec<String> = REQUIRED.map(str::to_owned).into();
    files.extend(OPTIONAL.into_iter().filter(|name| has(name)).map(str::to_owned));
    if parts == Parts::Text {
        return Ok(files);
    }
    if has(WEIGHTS) {
        files.push(WEIGHTS.to_owned());
        return Ok(files);
    }
    let shards: Vec<&String> = all.iter().filter(|name| is_shard(name)).collect();
    ensure!(
        has(WEIGHTS_INDEX) && !shards.is_empty(),
        "the model has neither {WEIGHTS} nor {WEIGHTS_INDEX} with its parts; {}",
        gguf_files(all)
    );
    files.push(WEIGHTS_INDEX.to_owned());
    files.extend(shards.into_iter().cloned());
    Ok(files)
}

/// Returns whether a file is a part of the weights, such as `model-00001-of-00003.safetensors`. The
/// name must not escape the folder.
fn is_shard(name: &str) -> bool {
    name.starts_with("model-")
        && name.ends_with(".safetensors")
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

fn gguf_files(all: &[String]) -> String {
    let files: Vec<&str> =
        all.iter().map(String::as_str).filter(|n| n.ends_with(".gguf")).collect();
    match files.len() {
        0 => "the model has no GGUF files either".to_owned(),
        count => {
            let more = if count > LISTED_MAX { ", ..." } else { "" };
            let listed = files[..count.min(LISTED_MAX)].join(", ");
            format!("add one of its GGUF files to the name as /FILE: {listed}{more}")
        }
    }
}

#[cfg(test)]
mod tests {
    use config::ModelPath;

    use super::*;

    fn hub(text: &str) -> HubModel {
        match ModelPath::parse(text) {
            Some(ModelPath::Hub(model)) => model,
            other => panic!("{text}: {other:?}"),
        }
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn only_required_files_are_selected() {
        let all = names(&[
            "README.md",
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "model-../../x.safetensors",
            "onnx/model.onnx",
            "original/consolidated.00.pth",
            "pytorch_model.bin",
            "tokenizer.json",
            "tokenizer_config.json",
        ]);
        let model = hub("hf:acme/tiny");
        let text = ["config.json", "tokenizer.json", "tokenizer_config.json"];
        assert_eq!(needed(&model, Parts::Text, &all).unwrap(), text);
        let weights = [
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ];
        let both: Vec<&str> = text.into_iter().chain(weights).collect();
        assert_eq!(needed(&model, Parts::All, &all).unwrap(), both);
    }

    #[test]
    fn gguf_file_selects_its_parts_only() {
        let all =
            names(&["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "n.gguf", "config.json"]);
        let split = hub("hf:acme/tiny/m-00001-of-00002.gguf");
        assert_eq!(needed(&split, Parts::Text, &all).unwrap(), all[..2]);
        assert_eq!(needed(&hub("hf:acme/tiny/n.gguf"), Parts::All, &all).unwrap(), all[2..3]);
    }

    #[test]
    fn missing_file_error_lists_gguf_files() {
        let all = names(&["q4.gguf", "q8.gguf"]);
        for model in ["hf:acme/tiny", "hf:acme/tiny/q5.gguf"] {
            let error = needed(&hub(model), Parts::All, &all).unwrap_err().to_string();
            assert!(error.contains("q4.gguf, q8.gguf"), "{error}");
        }
        let all = names(&["config.json", "tokenizer.json", "pytorch_model.bin"]);
        let error = needed(&hub("hf:acme/tiny"), Parts::All, &all).unwrap_err().to_string();
        assert!(error.contains("model.safetensors"), "{error}");
    }
}
