//! The sentence-transformers files of a folder.
//!
//! `modules.json` lists the modules after the transformer: `Pooling` and `Normalize` make an
//! embedding model, `LogitScore` makes a reranker. `config_sentence_transformers.json` has the
//! prompts, `config.json` the dimensions to which embeddings may be cut.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use super::{CONFIG_BYTES_MAX, read_json};
use crate::{
    error::LoadError,
    pooled_model::{Dimensions, EmbeddingModel, NotPooled, PooledModel, RerankerModel},
};

const MODULES_FILE: &str = "modules.json";
const PROMPTS_FILE: &str = "config_sentence_transformers.json";

#[derive(Deserialize)]
struct ModuleEntry {
    path: PathBuf,
    r#type: String,
}

#[derive(Default, Deserialize)]
struct PromptsFile {
    prompts: Option<BTreeMap<String, String>>,
    default_prompt_name: Option<String>,
}

#[derive(Default, Deserialize)]
struct DimensionsFile {
    is_matryoshka: Option<bool>,
    matryoshka_dimensions: Option<Vec<u32>>,
    hidden_size: Option<u32>,
}

#[derive(Deserialize)]
struct LogitScoreFile {
    true_token_id: u32,
    false_token_id: Option<u32>,
}

/// Reads the files of `folder`. The inner error tells why the model returns no pooled values; it
/// may still generate text. The outer error is a file that is not JSON of the expected form.
pub(super) fn read(folder: &Path) -> Result<Result<PooledModel, NotPooled>, LoadError> {
    let Some(modules) = json::<Vec<ModuleEntry>>(folder, MODULES_FILE)? else {
        return Ok(Err(NotPooled::NoModules));
    };
    let prompts = json(folder, PROMPTS_FILE)?;
    let PromptsFile { prompts, default_prompt_name } = prompts.unwrap_or_default();
    let prompts = prompts.unwrap_or_default();
    if let Some(name) = default_prompt_name.as_ref().filter(|name| !prompts.contains_key(*name)) {
        let (found, expected) = (name.clone(), "a key of prompts");
        return Ok(Err(unsupported(PROMPTS_FILE, "default_prompt_name", found, expected)));
    }
    let (mut normalize, mut pools, mut score) = (false, false, None);
    for ModuleEntry { path, r#type } in modules {
        let file = path.join("config.json").to_string_lossy().into_owned();
        match r#type.rsplit('.').next().unwrap_or_default() {
            "Transformer" => {}
            "Pooling" => {
                if let Err(refused) = check_pooling(folder, file)? {
                    return Ok(Err(refused));
                }
                pools = true;
            }
            "Normalize" => normalize = true,
            "LogitScore" => match json::<LogitScoreFile>(folder, &file)? {
                Some(tokens) => score = Some((file, tokens)),
                None => {
                    let expected = "the id of a token";
                    return Ok(Err(unsupported(&file, "true_token_id", String::new(), expected)));
                }
            },
            _ => {
                let expected = "Transformer, Pooling, Normalize or LogitScore";
                return Ok(Err(unsupported(MODULES_FILE, "type", r#type, expected)));
            }
        }
    }
    Ok(match score {
        Some((_, LogitScoreFile { true_token_id, false_token_id: Some(false_token) })) => {
            let instruction = default_prompt_name.and_then(|name| prompts.get(&name).cloned());
            let true_token = true_token_id;
            Ok(PooledModel::Reranker(RerankerModel { true_token, false_token, instruction }))
        }
        Some((file, _)) => {
            Err(unsupported(&file, "false_token_id", "null".into(), "the id of a token"))
        }
        None if !pools => {
            let found = "a list without pooling".to_owned();
            Err(unsupported(MODULES_FILE, "type", found, "Pooling or LogitScore"))
        }
        None => Ok(PooledModel::Embedding(EmbeddingModel {
            normalize,
            prompts,
            default_prompt: default_prompt_name,
            dimensions: dimensions(json(folder, "config.json")?.unwrap_or_default()),
        })),
    })
}

/// Checks that pooling of the last token is the only mode.
fn check_pooling(folder: &Path, file: String) -> Result<Result<(), NotPooled>, LoadError> {
    let expected = "pooling_mode_lasttoken as the only mode";
    let config = json::<BTreeMap<String, Value>>(folder, &file)?.unwrap_or_default();
    let mode = |(key, value): (&String, &Value)| match (key.as_str(), value) {
        // Since sentence-transformers 5.4 one key names the mode.
        ("pooling_mode", Value::String(mode)) => Some(format!("pooling_mode_{mode}")),
        (key, Value::Bool(true)) if key.starts_with("pooling_mode_") => Some(key.to_owned()),
        _ => None,
    };
    let modes: Vec<String> = config.iter().filter_map(mode).collect();
    Ok(match modes.iter().all(|mode| mode == "pooling_mode_lasttoken") && !modes.is_empty() {
        true => Ok(()),
        false => Err(unsupported(&file, "pooling mode", modes.join(", "), expected)),
    })
}

fn dimensions(file: DimensionsFile) -> Dimensions {
    match (file.matryoshka_dimensions, file.hidden_size) {
        (Some(listed), _) => Dimensions::Listed(listed),
        (None, Some(size)) if file.is_matryoshka == Some(true) => Dimensions::UpTo(size),
        (None, _) => Dimensions::Whole,
    }
}

fn unsupported(file: &str, key: &'static str, found: String, expected: &'static str) -> NotPooled {
    let found = if found.is_empty() { "missing".to_owned() } else { found };
    NotPooled::Unsupported { file: file.to_owned(), key, found, expected }
}

fn json<T: DeserializeOwned>(folder: &Path, file: &str) -> Result<Option<T>, LoadError> {
    read_json(&folder.join(file), CONFIG_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const POOLING: &str = "1_Pooling/config.json";

    fn read_files(files: &[(&str, Value)]) -> Result<PooledModel, NotPooled> {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content.to_string()).unwrap();
        }
        read(folder.path()).unwrap()
    }

    fn modules(types: &[&str]) -> (&'static str, Value) {
        let entry = |(index, name): (usize, &&str)| {
            let path = if index == 0 { String::new() } else { format!("{index}_{name}") };
            json!({"idx": index, "name": index.to_string(), "path": path,
                "type": format!("sentence_transformers.models.{name}")})
        };
        (MODULES_FILE, types.iter().enumerate().map(entry).collect())
    }

    #[test]
    fn embedding_model_is_described_by_its_files() {
        let last = json!({"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true});
        let prompts = json!({"prompts": {"query": "Instruct: find\nQuery:"},
            "default_prompt_name": null});
        let files = [
            modules(&["Transformer", "Pooling", "Normalize"]),
            (POOLING, last),
            ("config_sentence_transformers.json", prompts),
            ("config.json", json!({"matryoshka_dimensions": [8, 16]})),
        ];
        let Ok(PooledModel::Embedding(model)) = read_files(&files) else { panic!() };
        assert!(model.normalize);
        assert_eq!(model.prompts["query"], "Instruct: find\nQuery:");
        assert_eq!(model.dimensions, Dimensions::Listed(vec![8, 16]));
        let mut newer = vec![
            modules(&["Transformer", "Pooling"]),
            (POOLING, json!({"pooling_mode": "lasttoken"})),
        ];
        for (config, dimensions) in [
            (json!({"hidden_size": 32}), Dimensions::Whole),
            (json!({"hidden_size": 32, "is_matryoshka": true}), Dimensions::UpTo(32)),
        ] {
            newer.push(("config.json", config));
            let Ok(PooledModel::Embedding(model)) = read_files(&newer) else { panic!() };
            assert_eq!((model.normalize, model.dimensions), (false, dimensions));
        }
    }

    #[test]
    fn reranker_is_described_by_its_files() {
        let score = json!({"true_token_id": 7, "false_token_id": 3});
        let files = [modules(&["Transformer", "LogitScore"]), ("1_LogitScore/config.json", score)];
        let model = RerankerModel { true_token: 7, false_token: 3, instruction: None };
        assert_eq!(read_files(&files), Ok(PooledModel::Reranker(model)));
    }

    #[test]
    fn other_models_are_refused_with_file_and_value() {
        let refused = |files: &[(&str, Value)]| read_files(files).unwrap_err().to_string();
        assert!(refused(&[]).contains("no modules.json"));
        let pooling = modules(&["Transformer", "Pooling"]);
        let mean = json!({"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": false});
        assert_eq!(
            refused(&[pooling.clone(), (POOLING, mean)]),
            "1_Pooling/config.json: pooling mode is pooling_mode_mean_tokens; \
             expected pooling_mode_lasttoken as the only mode"
        );
        assert!(refused(&[pooling]).contains("pooling mode is missing"));
        let dense = refused(&[modules(&["Transformer", "Dense"])]);
        assert!(dense.starts_with("modules.json: type is sentence_transformers.models.Dense;"));
        let one = json!({"true_token_id": 7, "false_token_id": null});
        let files = [modules(&["Transformer", "LogitScore"]), ("1_LogitScore/config.json", one)];
        assert!(refused(&files).contains("false_token_id is null"));
        assert!(refused(&[modules(&["Transformer"])]).contains("expected Pooling or LogitScore"));
    }
}
