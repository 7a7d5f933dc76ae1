//! Fields of other servers. A field with exactly the meaning of one of the router's fields is read
//! as that field. Of the others, values that would change the answer are rejected.
//!
//! docs/api.md lists the table. A new field is one row.

use super::fields::RequestFields;
use crate::request::error::FieldError;

/// A field of another server.
pub(super) struct ForeignField {
    pub name: &'static str,
    /// Servers that have the field.
    pub servers: &'static str,
    pub treatment: Treatment,
}

/// Treatment of a field of another server. Values are JSON.
pub(super) enum Treatment {
    /// The field means the same as `field`. With the value `unset` it counts as absent.
    SameAs { field: &'static str, unset: Option<&'static str> },
    /// Other values than the `neutral` ones are rejected; `instead` names the field to use.
    Rejected { neutral: &'static [&'static str], instead: Option<&'static str> },
}

const fn same(
    name: &'static str,
    servers: &'static str,
    field: &'static str,
    unset: Option<&'static str>,
) -> ForeignField {
    ForeignField { name, servers, treatment: Treatment::SameAs { field, unset } }
}

const fn rejected(
    name: &'static str,
    servers: &'static str,
    neutral: &'static [&'static str],
    instead: Option<&'static str>,
) -> ForeignField {
    ForeignField { name, servers, treatment: Treatment::Rejected { neutral, instead } }
}

const TOP_LEVEL: Option<&str> = Some("the same fields beside the prompt");

pub(super) static FOREIGN_FIELDS: [ForeignField; 67] = [
    same("n_predict", "llama.cpp", "max_tokens", None),
    same("num_predict", "Ollama", "max_tokens", None),
    same("max_new_tokens", "SGLang, TGI", "max_tokens", None),
    same("max_output_tokens", "LM Studio", "max_tokens", None),
    same("stop_sequences", "Anthropic, Cohere", "stop", None),
    same("sampling_seed", "SGLang", "seed", None),
    same("json_schema", "llama.cpp, SGLang", "guided_json", None),
    same("grammar", "llama.cpp", "guided_grammar", Some("\"\"")),
    same("ebnf", "SGLang", "guided_grammar", Some("\"\"")),
    same("return_full_text", "TGI", "echo", None),
    // The window of llama.cpp's penalties has 64 tokens, and its presence penalty counts the prompt.
    rejected(
        "repeat_penalty",
        "llama.cpp, Ollama, LM Studio",
        &["1", "1.0"],
        Some("repetition_penalty"),
    ),
    rejected("repeat_last_n", "llama.cpp, Ollama", &["64", "-1"], Some("repetition_penalty")),
    rejected("samplers", "llama.cpp", &[], None),
    rejected("mirostat", "llama.cpp, Ollama", &["0"], None),
    rejected("typical_p", "llama.cpp, TGI", &["1", "1.0"], None),
    rejected("tfs_z", "Ollama", &["1", "1.0"], None),
    rejected("top_n_sigma", "llama.cpp", &["-1", "-1.0"], None),
    rejected("dynatemp_range", "llama.cpp", &["0", "0.0"], None),
    rejected("dry_multiplier", "llama.cpp", &["0", "0.0"], None),
    rejected("xtc_probability", "llama.cpp", &["0", "0.0"], None),
    rejected("n_indent", "llama.cpp", &["0"], None),
    rejected("t_max_predict_ms", "llama.cpp", &["0", "-1"], Some("max_tokens")),
    rejected("n_probs", "llama.cpp", &["0"], Some("logprobs")),
    rejected("post_sampling_probs", "llama.cpp", &["false"], None),
    rejected("return_tokens", "llama.cpp", &["false"], Some("return_token_ids")),
    rejected("lora", "llama.cpp", &["[]"], None),
    rejected("format", "Ollama", &["\"\""], Some("response_format")),
    rejected("options", "Ollama", &["{}"], TOP_LEVEL),
    rejected("template", "Ollama", &["\"\""], Some("the setting model.chat_template")),
    rejected("raw", "Ollama", &["false"], Some("/v1/completions")),
    rejected("images", "Ollama", &["[]"], None),
    rejected("lora_path", "SGLang", &[], None),
    rejected("stop_regex", "SGLang", &["\"\"", "[]"], Some("stop")),
    rejected("no_stop_trim", "SGLang", &["false"], Some("include_stop_str_in_output")),
    rejected("custom_logit_processor", "SGLang", &["\"\""], Some("logit_bias")),
    rejected("return_hidden_states", "SGLang", &["false"], None),
    rejected("session_params", "SGLang", &["{}"], Some("the header x-baton-session")),
    rejected("return_logprob", "SGLang", &["false"], Some("logprobs")),
    rejected("logprob_start_len", "SGLang", &["-1"], Some("prompt_logprobs")),
    rejected("top_logprobs_num", "SGLang", &["0"], Some("top_logprobs")),
    rejected("token_ids_logprob", "SGLang", &["[]"], None),
    rejected("input_ids", "SGLang", &[], Some("prompt of /v1/completions")),
    rejected("sampling_params", "SGLang", &["{}"], TOP_LEVEL),
    rejected("structural_tag", "SGLang, vLLM", &[], Some("response_format")),
    rejected("inputs", "TGI", &[], Some("prompt of /v1/completions")),
    rejected("parameters", "TGI", &["{}"], TOP_LEVEL),
    rejected("do_sample", "TGI", &["true"], Some("temperature 0")),
    rejected("details", "TGI", &["false"], Some("logprobs")),
    rejected("decoder_input_details", "TGI", &["false"], Some("prompt_logprobs")),
    rejected("top_n_tokens", "TGI", &["0"], Some("logprobs")),
    rejected("truncate", "TGI", &[], None),
    rejected("watermark", "TGI", &["false"], None),
    rejected("adapter_id", "TGI", &["\"\""], None),
    rejected("logits_processors", "vLLM", &["[]"], Some("logit_bias")),
    rejected("detokenize", "vLLM", &["true"], Some("return_token_ids")),
    rejected("guided_whitespace_pattern", "vLLM", &[], None),
    rejected("vllm_xargs", "vLLM", &["{}"], None),
    rejected("repetition_detection", "vLLM", &[], None),
    rejected("use_beam_search", "vLLM", &["false"], None),
    rejected("length_penalty", "vLLM", &["1", "1.0"], None),
    rejected("early_stopping", "vLLM", &["false"], None),
    rejected("logprob_token_ids", "vLLM", &["[]"], None),
    rejected("return_tokens_as_token_ids", "vLLM", &["false"], Some("return_token_ids")),
    rejected("prompt_embeds", "vLLM", &[], None),
    rejected("thinking_token_budget", "vLLM", &["-1"], None),
    rejected("banned_tokens", "TabbyAPI", &["[]"], Some("logit_bias")),
    rejected("banned_strings", "TabbyAPI", &["[]"], None),
];

/// Returns the fields of other servers in requests of an API that defines the fields `own` itself.
pub(super) fn foreign_fields(own: &[&str]) -> impl Iterator<Item = &'static ForeignField> {
    FOREIGN_FIELDS.iter().filter(move |field| !own.contains(&field.name))
}

/// Reads a request that may have fields of other servers. An error names the client's field.
pub(super) fn read_with_foreign_fields<'a, T>(
    fields: &RequestFields<'a>,
    own: &[&str],
    read: impl FnOnce(&RequestFields<'a>) -> Result<T, FieldError>,
) -> Result<T, FieldError> {
    let mut fields = fields.clone();
    for ForeignField { name, treatment, .. } in foreign_fields(own) {
        match treatment {
            Treatment::SameAs { field, unset } => fields.rename(name, field, *unset)?,
            Treatment::Rejected { neutral, instead } => {
                fields.unsupported(name, neutral, instead.unwrap_or_default())?;
            }
        }
    }
    read(&fields).map_err(|mut error| {
        error.field = fields.clients_name(&error.field).to_owned();
        error
    })
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use serde_json::{Value, json};

    use super::*;
    use crate::http::request_fields::{read_chat, read_completion};

    const HEADING: &str = "## Fields of other servers\n";

    /// Returns the table of docs/api.md.
    fn table() -> String {
        let row = |field: &ForeignField| {
            let ForeignField { name, servers, treatment } = field;
            let effect = match treatment {
                Treatment::SameAs { field, .. } => format!("same as `{field}`"),
                Treatment::Rejected { neutral, instead } => {
                    let quoted: Vec<_> = neutral.iter().map(|value| format!("`{value}`")).collect();
                    let except = match quoted.is_empty() {
                        true => String::new(),
                        false => format!(", except {}", quoted.join(", ")),
                    };
                    let instead = instead.map(|instead| format!("; use {instead}"));
                    format!("400{except}{}", instead.unwrap_or_default())
                }
            };
            format!("| `{name}` | {servers} | {effect} |\n")
        };
        let rows: String = FOREIGN_FIELDS.iter().map(row).collect();
        format!("| field | servers | effect |\n| --- | --- | --- |\n{rows}")
    }

    #[test]
    fn the_page_lists_every_field_of_another_server() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/api.md");
        let page = fs::read_to_string(&path).unwrap();
        let (before, section) = page.split_once(HEADING).unwrap();
        let (about, rest) = section.split_once("| field | servers ").unwrap();
        let (_, after) = rest.split_once("\n\n").unwrap();
        let written = format!("{before}{HEADING}{about}{}\n{after}", table());
        if std::env::var_os("BATON_WRITE_DOCS").is_some() {
            fs::write(&path, written).unwrap();
        } else {
            assert!(page == written, "docs/api.md is out of date; run `make docs`");
        }
    }

    fn read(body: &Value, is_chat: bool) -> Result<String, FieldError> {
        let body = body.to_string();
        let fields = RequestFields::parse(body.as_bytes()).unwrap();
        let read = if is_chat { read_chat(&fields) } else { read_completion(&fields) };
        read.map(|(read, delivery)| format!("{:?} {delivery:?}", read.options))
    }

    /// Returns a valid value of one of the router's fields.
    fn example(field: &str) -> Value {
        match field {
            "stop" => json!(["."]),
            "guided_json" => json!({"type": "object"}),
            "guided_grammar" => json!("root ::= \"a\""),
            "echo" => json!(true),
            _ => json!(7),
        }
    }

    #[test]
    fn fields_of_the_same_meaning_are_read_as_fields_of_the_router() {
        let body = json!({"prompt": "hi"});
        for ForeignField { name, treatment, .. } in &FOREIGN_FIELDS {
            let Treatment::SameAs { field, unset } = treatment else { continue };
            let with = |fields: &[(&str, Value)]| {
                let mut body = body.clone();
                fields.iter().for_each(|(name, value)| body[*name] = value.clone());
                read(&body, false)
            };
            let value = example(field);
            let ours = with(&[(field, value.clone())]).unwrap();
            assert_ne!(ours, with(&[]).unwrap(), "{field}");
            // The grammar keeps the name of the client's field for later errors.
            let renamed = |read: String| read.replace(&format!("{name:?}"), &format!("{field:?}"));
            for fields in
                [&[(*name, value.clone())][..], &[(name, value.clone()), (field, value.clone())]]
            {
                assert_eq!(renamed(with(fields).unwrap()), ours, "{name}");
            }
            let error = with(&[(name, json!({"a": {}})), (field, value)]).unwrap_err().to_string();
            assert_eq!(
                error,
                format!("{name} is given together with {field}; allowed: one of them")
            );
            if let Some(unset) = unset {
                let unset = serde_json::from_str(unset).unwrap();
                assert_eq!(with(&[(name, unset)]), with(&[]), "{name}");
            }
        }
        let error = read(&json!({"prompt": "hi", "n_predict": "x"}), false).unwrap_err();
        assert!(error.to_string().starts_with(r#"n_predict is "x"; allowed: "#), "{error}");
    }

    #[test]
    fn fields_of_another_meaning_are_rejected_unless_neutral() {
        let body = |is_chat| match is_chat {
            true => json!({"messages": [{"role": "user", "content": "hi"}], "unheard_of": 7}),
            false => json!({"prompt": "hi", "unheard_of": 7}),
        };
        for is_chat in [true, false] {
            let body = body(is_chat);
            let plain = read(&body, is_chat).unwrap();
            for ForeignField { name, treatment, .. } in &FOREIGN_FIELDS {
                let Treatment::Rejected { neutral, instead } = treatment else { continue };
                let with = |value: Value| {
                    let mut body = body.clone();
                    body[*name] = value;
                    read(&body, is_chat)
                };
                for value in neutral.iter().map(|text| serde_json::from_str(text).unwrap()) {
                    assert_eq!(with(value), Ok(plain.clone()), "{name}");
                }
                assert_eq!(with(Value::Null), Ok(plain.clone()), "{name}");
                let said = with(json!("another value")).unwrap_err().to_string();
                let advice = instead.map_or("leave it out".to_owned(), |it| format!("use {it}"));
                assert_eq!(said, format!("{name} is not supported; {advice}"));
            }
        }
    }
}
