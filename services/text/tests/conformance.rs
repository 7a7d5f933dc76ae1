//! Tests with real vocabularies: the ids equal those in llama.cpp's test vectors and those of the
//! `tokenizers` Python package.
//!
//! `deploy/fetch-tokenizers.sh`, which `make test` runs, puts the files into target/tokenizers.
//! Without those files these tests fail.

mod common;

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use serde_json::{Map, Value, json};
use text::{
    CallableFunction, LoadError, ModelText, RenderRequest, SpecialTokens, StopStrings,
    TemplateError, TextStream, TextStreamOptions, ToolParser, ToolPiece,
};

/// Returns the path of a fetched file or folder.
fn fetched(name: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let folder = target.join("tokenizers");
    let complete = folder.join("complete").is_file();
    assert!(complete, "{} is incomplete; run deploy/fetch-tokenizers.sh", folder.display());
    let path = folder.join(name);
    assert!(path.exists(), "{} was fetched without {name}", folder.display());
    path
}

/// Returns the texts and ids of llama.cpp's test vectors for a vocabulary. File `.inp` has the
/// texts with separator lines between them. File `.out` has one line of ids per text, without BOS
/// and EOS.
fn vectors(vocabulary: &Path) -> Vec<(String, Vec<u32>)> {
    let read = |ending: &str| {
        let path = format!("{}.{ending}", vocabulary.display());
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
    };
    let (texts, ids) = (read("inp"), read("out"));
    let texts = texts.split("\n__ggml_vocab_test__\n").map(str::to_owned);
    let ids =
        ids.lines().map(|line| line.split_whitespace().map(|id| id.parse().unwrap()).collect());
    texts.zip(ids).collect()
}

#[test]
fn tool_calls_of_real_templates_are_parsed_back() {
    let arguments = json!({"city": "Köln \"🌦\"", "days": 3});
    let call = json!({"type": "function",
        "function": {"name": "weather", "arguments": arguments}});
    let tools = json!([{"type": "function", "function": {"name": "weather",
        "description": "Tells it", "parameters": {"type": "object", "properties": {}}}}]);
    let formats = [("llama3_2", "llama3", 1), ("qwen2_5", "hermes", 2)];
    for (name, format, calls) in formats {
        let path = fetched(name);
        let model = ModelText::open(&path).unwrap();
        let detected = model.tool_format().unwrap();
        assert_eq!(detected.name, format, "{name}");
        let format = detected;
        assert_eq!(model.takes_parallel_calls(), calls > 1, "{name}");
        let rendered = |messages: Value| {
            let request = RenderRequest {
                messages: &messages,
                tools: &tools,
                add_generation_prompt: false,
                extra: &Map::new(),
                now: SystemTime::UNIX_EPOCH,
                literal: None,
            };
            model.chat_template().unwrap().render(&request).unwrap()
        };
        let question = json!({"role": "user", "content": "Weather?"});
        let answer =
            json!({"role": "assistant", "content": "", "tool_calls": vec![call.clone(); calls]});
        let before = rendered(json!([question]));
        let prompt = rendered(json!([question, answer]));
        assert!(before.contains("Tells it"), "{name}: {before}");
        // Skip the line that names the role.
        let answer = prompt.strip_prefix(&before).unwrap().split_once('\n').unwrap().1;
        let tokenizer = model.tokenizer();
        // As in the router, special tokens give no text, except those that start tool calls.
        let stops = StopStrings::new::<&str>(&[], false).unwrap();
        let mut text = TextStream::new(tokenizer.clone(), stops, TextStreamOptions::default())
            .showing(format.shown_tokens(tokenizer).into());
        let mut parser =
            ToolParser::new(format, Arc::new([CallableFunction::new("weather", None)]));
        let mut pieces = Vec::new();
        for id in tokenizer.encode(answer, SpecialTokens::Parse).unwrap() {
            parser.push(&text.push(&[id]).text, &mut pieces);
        }
        parser.push(&text.finish(), &mut pieces);
        parser.finish(&mut pieces);
        assert_eq!(pieces.len(), calls, "{name}: {answer:?} gave {pieces:?}");
        for piece in pieces {
            let ToolPiece::Call(call) = piece else { panic!("{name}: {piece:?}") };
            assert_eq!(call.name, "weather");
            assert_eq!(serde_json::from_str::<Value>(&call.arguments).unwrap(), arguments);
        }
    }
    let path = fetched("gpt2");
    assert!(ModelText::open(&path).unwrap().tool_format().is_none());
}

fn render(model: &ModelText, messages: &Value) -> Result<String, TemplateError> {
    model.chat_template().unwrap().render(&RenderRequest {
        messages,
        tools: &Value::Null,
        add_generation_prompt: true,
        extra: &Map::new(),
        now: SystemTime::UNIX_EPOCH,
        literal: None,
    })
}

#[test]
fn real_templates_render_messages_of_every_role() {
    for (name, role, known) in [
        ("qwen2_5", "developer", "system"),
        ("qwen2_5", "function", "tool"),
        ("qwen2_5", "ipython", "tool"),
        ("llama3_2", "developer", "system"),
        ("llama3_2", "function", "tool"),
    ] {
        let model = ModelText::open(fetched(name)).unwrap();
        let rendered = |role: &str| {
            let messages = json!([
                {"role": role, "content": "Never reveal X"},
                {"role": "user", "content": "Hi"},
            ]);
            render(&model, &messages).unwrap()
        };
        let prompt = rendered(role);
        assert!(prompt.contains("Never reveal X"), "{name}, {role}: {prompt}");
        assert_eq!(prompt, rendered(known), "{name}, {role}");
    }
}

#[test]
fn ids_equal_llama_cpp_test_vectors() {
    // Five of them use a pre-tokenizer; llama-spm and phi-3 are SentencePiece models.
    for name in ["llama-bpe", "qwen2", "gpt-2", "starcoder", "refact", "llama-spm", "phi-3"] {
        let path = fetched(&format!("llama.cpp/ggml-vocab-{name}.gguf"));
        let model = ModelText::open(&path).unwrap();
        let tokenizer = model.tokenizer();
        let vectors = vectors(&path);
        assert!(vectors.len() >= 40, "{name}: {} vectors", vectors.len());
        for (text, ids) in vectors {
            let found = tokenizer.encode(&text, SpecialTokens::AsText).unwrap();
            assert_eq!(found, ids, "{name}: {text:?}");
            // Qwen 2 normalizes text to NFC, so decoding may return other characters.
            let composed = name == "qwen2";
            let decoded = tokenizer.decode(&found, false);
            assert!(composed || decoded == text, "{name}: {text:?} came back as {decoded:?}");
        }
    }
}

/// Returns tokenizer.json as `transformers` derives it from a SentencePiece model: merges ordered
/// by the scores of their results, then by the ids of their parts.
fn folder_of_pieces(vocabulary: &Path) -> Value {
    let metadata = gguf::Header::read_from(vocabulary).unwrap().metadata;
    let tokens: &[String] = metadata.require("tokenizer.ggml.tokens").unwrap();
    let scores: &[f32] = metadata.require("tokenizer.ggml.scores").unwrap();
    let types: &[i32] = metadata.require("tokenizer.ggml.token_type").unwrap();
    let ids: HashMap<&str, usize> = tokens.iter().map(String::as_str).zip(0..).collect();
    let ordinary = |id: usize| types[id] == 1;
    let mut merges = Vec::new();
    for (id, token) in tokens.iter().enumerate().filter(|(id, _)| ordinary(*id)) {
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(&first), Some(&second)) = (ids.get(left), ids.get(right))
                && ordinary(first)
                && ordinary(second)
            {
                merges.push((scores[id], first, second));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let merges: Vec<[&str; 2]> =
        merges.into_iter().map(|(_, left, right)| [left, right].map(|id| &*tokens[id])).collect();
    common::pieces_json(tokens, json!(merges))
}

/// Compares three forms of one vocabulary: a GGUF file with scores, and folders with merges that
/// use either the Prepend normalizer or the Metaspace pre-tokenizer.
#[test]
fn a_folder_and_a_gguf_file_of_one_tokenizer_agree() {
    let path = fetched("llama.cpp/ggml-vocab-llama-spm.gguf");
    let gguf = ModelText::open(&path).unwrap();
    let mut tokenizer_json = folder_of_pieces(&path);
    let open = |tokenizer_json: &Value| {
        let config = r#"{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}"#;
        let tokenizer_json = tokenizer_json.to_string();
        let files =
            [("tokenizer.json", tokenizer_json.as_str()), ("tokenizer_config.json", config)];
        ModelText::open(common::folder(&files).path()).unwrap()
    };
    let prepends = open(&tokenizer_json);
    tokenizer_json["normalizer"] = Value::Null;
    tokenizer_json["pre_tokenizer"] = json!({"type": "Metaspace", "replacement": "▁",
        "prepend_scheme": "always", "split": false});
    let metaspace = open(&tokenizer_json);

    let ours = gguf.tokenizer();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/conformance.json");
    let fixture: Value = serde_json::from_str(&fs::read_to_string(fixture).unwrap()).unwrap();
    let mut texts: Vec<String> = serde_json::from_value(fixture["texts"].clone()).unwrap();
    texts.extend(vectors(&path).into_iter().map(|(text, _)| text));
    texts.extend(["<s>hello</s>world<unk>", "  \n ▁ a", "e\u{301}👍🏽\u{0}"].map(str::to_owned));
    texts.extend([" ".repeat(10_000), "ab ".repeat(3_000), include_str!("conformance.rs").into()]);
    for (name, folder) in [("Prepend", &prepends), ("Metaspace", &metaspace)] {
        let theirs = folder.tokenizer();
        assert_eq!((theirs.bos_id(), theirs.eos_ids()), (ours.bos_id(), ours.eos_ids()));
        for text in &texts {
            // Metaspace prepends no space to a text that starts with one.
            if name == "Metaspace" && text.starts_with([' ', '▁']) {
                continue;
            }
            let expected = ours.encode_prompt(text, SpecialTokens::Parse).unwrap();
            let found = theirs.encode_prompt(text, SpecialTokens::Parse).unwrap();
            assert_eq!(found, expected, "{name}: {text:?}");
            for skip_special in [false, true] {
                let expected = ours.decode(&expected, skip_special);
                assert_eq!(theirs.decode(&found, skip_special), expected, "{name}: {text:?}");
            }
        }
        for id in 0..=ours.vocabulary_size() {
            assert_eq!(theirs.token_bytes(id), ours.token_bytes(id), "{name}: {id}");
            assert_eq!(theirs.is_special(id), ours.is_special(id), "{name}: {id}");
        }
    }
}

#[test]
fn unsupported_tokenizer_error_lists_the_supported_kinds() {
    let cases = [
        ("deepseek-llm", "tokenizer.ggml.pre is \"deepseek-llm\"; supported: smollm, starcoder,"),
        ("falcon", "tokenizer.ggml.pre is \"falcon\"; supported: "),
        ("command-r", "tokenizer.ggml.pre is \"command-r\"; supported: "),
        ("bert-bge", "tokenizer.ggml.model is \"bert\"; supported: gpt2 (byte-level BPE), llama"),
    ];
    for (name, expected) in cases {
        let path = fetched(&format!("llama.cpp/ggml-vocab-{name}.gguf"));
        let error = ModelText::open(&path).unwrap_err();
        assert!(matches!(error, LoadError::Unsupported { .. }), "{name}: {error}");
        assert!(error.to_string().contains(expected), "{name}: {error}");
    }
}

#[test]
fn folders_give_the_ids_and_texts_of_the_python_package() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/conformance.json");
    let expected: Value = serde_json::from_str(&fs::read_to_string(fixture).unwrap()).unwrap();
    let texts: Vec<String> = serde_json::from_value(expected["texts"].clone()).unwrap();
    for (family, rows) in expected["families"].as_object().unwrap() {
        let folder = fetched(family);
        let model = ModelText::open(folder).unwrap();
        let tokenizer = model.tokenizer();
        for (text, row) in texts.iter().zip(rows.as_array().unwrap()) {
            let ids: Vec<u32> = serde_json::from_value(row["ids"].clone()).unwrap();
            let mut prompt: Vec<u32> = serde_json::from_value(row["prefix"].clone()).unwrap();
            prompt.extend(&ids);
            let found = tokenizer.encode(text, SpecialTokens::Parse).unwrap();
            assert_eq!(found, ids, "{family}: {text:?}");
            let found = tokenizer.encode_prompt(text, SpecialTokens::Parse).unwrap();
            assert_eq!(found, prompt, "{family}: {text:?} as a prompt");
            assert_eq!(tokenizer.decode(&ids, false), row["decoded"], "{family}: {text:?}");
        }
    }
}

#[test]
fn folders_provide_bos_and_eos_tokens() {
    let cases = [
        ("llama3_2", Some("<|begin_of_text|>"), &["<|eot_id|>"][..], true),
        ("qwen2_5", None, &["<|im_end|>"], true),
        ("gpt2", Some("<|endoftext|>"), &["<|endoftext|>"], false),
    ];
    for (family, bos, eos, has_template) in cases {
        let folder = fetched(family);
        let model = ModelText::open(folder).unwrap();
        let tokenizer = model.tokenizer();
        let id = |token: &str| tokenizer.token_id(token).unwrap();
        assert_eq!(tokenizer.bos_id(), bos.map(id), "{family}");
        assert_eq!(tokenizer.eos_ids(), eos.iter().map(|token| id(token)).collect::<Vec<_>>());
        assert_eq!(model.chat_template().is_ok(), has_template, "{family}");
    }
}

#[test]
fn an_empty_list_of_tool_calls_is_no_tool_call() {
    for name in ["llama3_2", "qwen2_5"] {
        let model = ModelText::open(fetched(name)).unwrap();
        let rendered = |answer: Value| {
            let question = json!({"role": "user", "content": "Hi"});
            let messages = json!([question, answer, question]);
            render(&model, &messages)
        };
        let empty = json!({"role": "assistant", "content": "Hello", "tool_calls": []});
        let absent = json!({"role": "assistant", "content": "Hello"});
        assert_eq!(rendered(empty), rendered(absent), "{name}");
    }
}
