//! Invalid files give one typed error that names file, key and what is allowed.

mod common;

use common::{Metadata, open_gguf, tiny};
use gguf::{Array, Value};
use proptest::prelude::*;
use serde_json::json;
use text::{
    LoadError, ModelText, SamplingDefaults, SpecialTokens, VOCABULARY_SIZE_MAX, VocabularyError,
};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

fn string(text: &str) -> Value {
    Value::String(text.to_owned())
}

fn strings(items: &[&str]) -> Value {
    Value::Array(Array::String(items.iter().map(|item| (*item).to_owned()).collect()))
}

fn with(key: &str, value: Value) -> Metadata {
    let mut metadata = tiny();
    metadata.insert(key.to_owned(), value);
    metadata
}

fn without(key: &str) -> Metadata {
    let mut metadata = tiny();
    metadata.remove(key);
    metadata
}

/// Returns the error's message without the file's name.
fn message(metadata: &Metadata) -> String {
    let message = open_gguf(metadata).unwrap_err().to_string();
    let (file, message) = message.split_once("model.gguf: ").expect("names the file");
    assert!(!file.is_empty() && !message.contains('\n'), "{message}");
    message.to_owned()
}

#[test]
fn a_minimal_gguf_tokenizer_works() {
    let model = open_gguf(&tiny()).unwrap();
    let tokenizer = model.tokenizer();
    let ids = tokenizer.encode("hello world<|end|><tool>", SpecialTokens::Parse).unwrap();
    assert_eq!(ids, [260, 259, 0x6f, 0x72, 0x6c, 0x64, common::END, common::TOOL]);
    assert_eq!(tokenizer.decode(&ids, false), "hello world<|end|><tool>");
    assert_eq!(tokenizer.decode(&ids, true), "hello world<tool>");
    let as_text = tokenizer.encode("<|end|><tool>", SpecialTokens::AsText).unwrap();
    assert!(!as_text.contains(&common::END) && as_text.ends_with(&[common::TOOL]));
    assert_eq!(tokenizer.encode_prompt("h", SpecialTokens::Parse).unwrap(), [0x68]);
    assert_eq!(tokenizer.eos_ids(), [common::END]);
    assert_eq!(tokenizer.tokens_at_least("hello hello"), 2);
}

#[test]
fn bos_and_eos_are_added_as_the_file_says() {
    let mut metadata = with("tokenizer.ggml.add_bos_token", Value::Bool(true));
    metadata.insert("tokenizer.ggml.add_eos_token".into(), Value::Bool(true));
    metadata.insert("tokenizer.ggml.eot_token_id".into(), Value::U64(3));
    let model = open_gguf(&metadata).unwrap();
    let ids = model.tokenizer().encode_prompt("h", SpecialTokens::Parse).unwrap();
    assert_eq!(ids, [common::START, 0x68, common::END]);
    assert_eq!(model.tokenizer().encode("h", SpecialTokens::Parse).unwrap(), [0x68]);
    assert_eq!(model.tokenizer().eos_ids(), [3, common::END]);
}

/// The header of most files has the id of one end token only.
#[test]
fn control_tokens_with_names_of_end_tokens_end_an_answer() {
    let added = common::UNUSED + 1;
    // A control token, and an ordinary token with this text.
    for (token_type, eos_ids) in [(3, vec![common::END, added]), (1, vec![common::END])] {
        let mut metadata = tiny();
        let Some(Value::Array(Array::String(tokens))) = metadata.get_mut(TOKENS) else {
            panic!("the tokens are strings");
        };
        tokens.push("<|eom_id|>".to_owned());
        let Some(Value::Array(Array::I32(types))) = metadata.get_mut(TYPES) else {
            panic!("the types are numbers");
        };
        types.push(token_type);
        assert_eq!(open_gguf(&metadata).unwrap().tokenizer().eos_ids(), eos_ids);
    }
}

#[test]
fn missing_gguf_keys_are_named() {
    for key in [TOKENS, MERGES, "tokenizer.ggml.model"] {
        let message = message(&without(key));
        assert!(message.contains(key) && message.contains("is missing"), "{message}");
    }
    assert!(open_gguf(&without(TYPES)).is_ok());
    assert!(
        open_gguf(&without("tokenizer.ggml.eos_token_id"))
            .unwrap()
            .tokenizer()
            .eos_ids()
            .is_empty()
    );
}

#[test]
fn wrong_gguf_types_are_rejected_with_the_expected_type() {
    for (key, value, wanted) in [
        (TOKENS, Value::U32(3), "array of string"),
        (TOKENS, Value::Array(Array::I32(vec![1])), "array of string"),
        (MERGES, string("a b"), "array of string"),
        (TYPES, strings(&["1"]), "array of i32"),
        ("tokenizer.ggml.model", Value::U32(1), "string"),
        ("tokenizer.ggml.pre", Value::Bool(true), "string"),
        ("tokenizer.ggml.eos_token_id", string("</s>"), "u64"),
        ("tokenizer.ggml.eos_token_id", Value::I32(-1), "u64"),
        ("tokenizer.ggml.add_bos_token", Value::U32(1), "bool"),
        ("tokenizer.chat_template", Value::U32(1), "string"),
    ] {
        let error = open_gguf(&with(key, value)).unwrap_err();
        assert!(matches!(error, LoadError::Gguf { .. }), "{error:?}");
        let message = error.to_string();
        assert!(message.contains(key) && message.contains(wanted), "{message}");
    }
}

#[test]
fn unsupported_tokenizer_kinds_are_rejected_with_the_supported_ones() {
    assert_eq!(
        message(&with("tokenizer.ggml.model", string("bert"))),
        "tokenizer.ggml.model is \"bert\"; supported: gpt2 (byte-level BPE), llama (SentencePiece BPE)"
    );
    // The same tokens are not a SentencePiece vocabulary.
    assert_eq!(
        message(&with("tokenizer.ggml.model", string("llama"))),
        "metadata key \"tokenizer.ggml.scores\" is missing; expected array of f32"
    );
    let message = message(&with("tokenizer.ggml.pre", string("gpt-5")));
    for name in ["\"gpt-5\"", "smollm", "gpt-2", "default", "llama-bpe", "qwen2"] {
        assert!(message.contains(name), "{message}");
    }
}

#[test]
fn malformed_gguf_merges_are_rejected_by_index() {
    for (merges, expected) in [
        (
            ["h e", "he"],
            "tokenizer.ggml.merges: merge 1 is \"he\"; it must be two tokens with one space between",
        ),
        (
            ["h e", "h e e"],
            "tokenizer.ggml.merges: merge 1 is \"h e e\"; it must be two tokens with one space between",
        ),
        (
            ["h e", " e"],
            "tokenizer.ggml.merges: merge 1 is \" e\"; it must be two tokens with one space between",
        ),
        (["h e", "h zz"], "tokenizer.ggml.merges: merge 1: token \"zz\" is not in the vocabulary"),
        (["h e", "h z"], "tokenizer.ggml.merges: merge 1: token \"hz\" is not in the vocabulary"),
    ] {
        assert_eq!(message(&with(MERGES, strings(&merges))), expected);
    }
}

#[test]
fn ids_beyond_the_vocabulary_are_refused() {
    for (key, id) in [
        ("tokenizer.ggml.eos_token_id", 265),
        ("tokenizer.ggml.bos_token_id", u64::from(u32::MAX) - 1),
        ("tokenizer.ggml.padding_token_id", u64::MAX),
        ("tokenizer.ggml.eot_token_id", 1 << 40),
    ] {
        let expected = format!("{key}: the id is {id}; the vocabulary has 265 tokens");
        assert_eq!(message(&with(key, Value::U64(id))), expected);
    }
    // Some writers store −1 in 32 bits for "none".
    let none = with("tokenizer.ggml.bos_token_id", Value::U32(u32::MAX));
    assert_eq!(open_gguf(&none).unwrap().tokenizer().bos_id(), None);
}

#[test]
fn token_types_must_match_the_tokens() {
    let types = |items| with(TYPES, Value::Array(Array::I32(items)));
    assert_eq!(
        message(&types(vec![1; 3])),
        "tokenizer.ggml.token_type: has 3 entries, tokenizer.ggml.tokens has 265"
    );
    assert_eq!(
        message(&types([vec![1; 264], vec![9]].concat())),
        "tokenizer.ggml.token_type: entry 264 is 9; expected 0 to 6"
    );
}

#[test]
fn sentence_piece_needs_matching_scores_types_and_bytes() {
    const SCORES: &str = "tokenizer.ggml.scores";
    let count = common::PIECES_UNUSED as usize + 1;
    let small = || Metadata::from([("tokenizer.ggml.model".to_owned(), string("llama"))]);
    let scores = |items| (SCORES, Value::Array(Array::F32(items)));
    let types = |items| (TYPES, Value::Array(Array::I32(items)));
    let with_nan = [vec![0.0; 7], vec![f32::NAN], vec![0.0; count - 8]].concat();
    type Changes<'a> = Vec<(&'a str, Value)>;
    let cases: [(Metadata, Changes<'_>, &str); 10] = [
        (
            common::tiny_pieces(),
            vec![scores(vec![0.0; 3])],
            "tokenizer.ggml.scores: has 3 entries, tokenizer.ggml.tokens has 291",
        ),
        (
            common::tiny_pieces(),
            vec![scores(vec![0.0; count + 1])],
            "tokenizer.ggml.scores: has 292 entries, tokenizer.ggml.tokens has 291",
        ),
        (
            common::tiny_pieces(),
            vec![scores(with_nan)],
            "tokenizer.ggml.scores: entry 7 is not a number",
        ),
        (
            common::tiny_pieces(),
            vec![(SCORES, strings(&["0"]))],
            "metadata key \"tokenizer.ggml.scores\" is array of string[1]; expected array of f32",
        ),
        (
            common::tiny_pieces(),
            vec![types(vec![7; count])],
            "tokenizer.ggml.token_type: entry 0 is 7; expected 0 to 6",
        ),
        (
            common::tiny_pieces(),
            vec![types(vec![6; count])],
            "tokenizer.ggml.token_type: entry 0 is 6 (a byte), but the token is \"<unk>\", not \
             <0x00> to <0xFF>",
        ),
        (
            small(),
            vec![(TOKENS, strings(&["a", "b", "", "", "a"])), scores(vec![0.0; 5])],
            "tokenizer.ggml.tokens: tokens 0 and 4 are both \"a\"",
        ),
        (
            small(),
            vec![(TOKENS, strings(&["a", "<0x00>"])), scores(vec![0.0; 2])],
            "tokenizer.ggml.tokens: there is neither a token <0x01> nor an unknown token: some texts \
             have no ids",
        ),
        (
            small(),
            vec![
                (TOKENS, strings(&["<unk>", &"a".repeat(2000)])),
                scores(vec![0.0; 2]),
                types(vec![2, 1]),
            ],
            "tokenizer.ggml.tokens: token 1 has 2000 bytes; non-control tokens have at most 1024",
        ),
        (
            small(),
            vec![(TOKENS, strings(&[])), scores(vec![])],
            "tokenizer.ggml.tokens: there are no tokens",
        ),
    ];
    for (mut metadata, changes, expected) in cases {
        metadata.extend(changes.into_iter().map(|(key, value)| (key.to_owned(), value)));
        assert_eq!(message(&metadata), expected);
    }
}

#[test]
fn a_gguf_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    for (metadata, count) in [(tiny(), 265), (common::tiny_pieces(), 291)] {
        for rows in [count, count + 64] {
            common::write_gguf_with(&path, &metadata, Some(rows));
            assert!(ModelText::open(&path).is_ok(), "{rows}");
        }
        common::write_gguf_with(&path, &metadata, Some(count - 1));
        let error = ModelText::open(&path).unwrap_err().to_string();
        let problem = format!(
            "tokenizer.ggml.tokens: has {count} tokens, but token_embd.weight has {} rows: they are \
             of different models",
            count - 1
        );
        assert!(error.ends_with(&problem), "{error}");
    }
}

#[test]
fn an_empty_vocabulary_is_rejected() {
    let mut metadata = with(TOKENS, strings(&[]));
    for key in [TYPES, "tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id"] {
        metadata.remove(key);
    }
    metadata.insert(MERGES.into(), strings(&[]));
    assert_eq!(message(&metadata), "tokenizer.ggml.tokens: there are no tokens");
}

#[test]
fn duplicate_and_empty_tokens_are_accepted() {
    let mut metadata = with(TOKENS, strings(&["a", "b", "a", ""]));
    metadata.insert(TYPES.into(), Value::Array(Array::I32(vec![1, 3, 3, 3])));
    metadata.insert(MERGES.into(), strings(&[]));
    metadata.insert("tokenizer.ggml.eos_token_id".into(), Value::U32(3));
    metadata.insert("tokenizer.ggml.bos_token_id".into(), Value::U32(1));
    let model = open_gguf(&metadata).unwrap();
    assert_eq!(model.tokenizer().token_bytes(2), Some(&b"a"[..]));
    assert_eq!(model.tokenizer().token_bytes(3), Some(&b""[..]));
}

#[test]
fn a_file_that_ends_early_is_refused_at_every_length() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut small = tiny();
    small.insert(TOKENS.into(), strings(&["a", "b", "ab"]));
    small.insert(MERGES.into(), strings(&["a b"]));
    for key in [TYPES, "tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id"] {
        small.remove(key);
    }
    common::write_gguf(&path, &small);
    assert!(ModelText::open(&path).is_ok());
    let bytes = std::fs::read(&path).unwrap();
    for length in 0..bytes.len() {
        std::fs::write(&path, &bytes[..length]).unwrap();
        assert!(ModelText::open(&path).is_err(), "{length} bytes");
    }
}

#[test]
fn paths_that_hold_no_model_are_refused() {
    let error = ModelText::open("/nowhere/model.gguf").unwrap_err();
    assert!(matches!(error, LoadError::Io { .. }), "{error:?}");
    let folder = common::folder(&[("model.bin", "x")]);
    for path in [folder.path().to_owned(), folder.path().join("model.bin")] {
        let error = ModelText::open(path).unwrap_err();
        assert!(matches!(error, LoadError::NotAModel { .. }), "{error:?}");
    }
    let folder = common::folder(&[("text.gguf", "not one")]);
    for path in [folder.path().to_owned(), folder.path().join("text.gguf")] {
        let error = ModelText::open(path).unwrap_err();
        assert!(matches!(error, LoadError::Gguf { .. }), "{error:?}");
    }
}

#[test]
fn a_folder_with_one_gguf_file_is_read_as_that_file() {
    let folder = tempfile::tempdir().unwrap();
    common::write_gguf(&folder.path().join("model.gguf"), &tiny());
    ModelText::open(folder.path()).unwrap();
    common::write_gguf(&folder.path().join("other.gguf"), &tiny());
    let error = ModelText::open(folder.path()).unwrap_err();
    assert!(matches!(error, LoadError::NotAModel { .. }), "{error:?}");
}

#[test]
fn fifos_are_refused_without_reading_them() {
    let folder = common::folder(&[]);
    let gguf = folder.path().join("model.gguf");
    let in_folder = folder.path().join("tokenizer.json");
    for fifo in [&gguf, &in_folder] {
        assert!(std::process::Command::new("mkfifo").arg(fifo).status().unwrap().success());
    }
    let (tell, told) = std::sync::mpsc::channel();
    let paths = [gguf, folder.path().to_owned()];
    std::thread::spawn(move || {
        for path in paths {
            tell.send(ModelText::open(path).unwrap_err().to_string()).unwrap();
        }
    });
    for _ in 0..2 {
        let error = told.recv_timeout(std::time::Duration::from_secs(60)).expect("opening blocks");
        assert!(error.ends_with("not a regular file"), "{error}");
    }
}

/// Returns a valid tokenizer.json with one value changed.
fn tokenizer_json(pointer: &str, value: serde_json::Value) -> String {
    let mut file = json!({
        "added_tokens": [{"id": 3, "content": "<s>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "unk_token": null, "dropout": null,
            "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
    });
    *file.pointer_mut(pointer).unwrap() = value;
    file.to_string()
}

fn open_json(text: &str, more: &[(&str, &str)]) -> Result<ModelText, LoadError> {
    let mut files = vec![("tokenizer.json", text)];
    files.extend(more);
    ModelText::open(common::folder(&files).path())
}

fn json_message(pointer: &str, value: serde_json::Value) -> String {
    let message = open_json(&tokenizer_json(pointer, value), &[]).unwrap_err().to_string();
    let (_, message) = message.split_once("tokenizer.json: ").expect("names the file");
    message.to_owned()
}

#[test]
fn a_valid_tokenizer_json_is_accepted() {
    let model = open_json(&tokenizer_json("/normalizer", json!(null)), &[]).unwrap();
    let ids = model.tokenizer().encode("ab<s>b", SpecialTokens::Parse).unwrap();
    assert_eq!(ids, [2, 3, 1]);
}

#[test]
fn malformed_tokenizer_json_is_rejected_with_the_key() {
    for (pointer, value, expected) in [
        ("/model/type", json!("Unigram"), "model.type is \"Unigram\"; supported: BPE"),
        ("/model/dropout", json!(0.1), "model.dropout is \"0.1\"; supported: none"),
        ("/model/vocab", json!({}), "model.vocab: there are no tokens"),
        (
            "/model/vocab",
            json!({"a": 0, "b": 0}),
            "model.vocab: tokens \"a\" and \"b\" have the same id 0",
        ),
        (
            "/model/unk_token",
            json!("<unk>"),
            "model.vocab: the unknown token \"<unk>\" is not in the vocabulary",
        ),
        (
            "/model/merges",
            json!(["a c"]),
            "model.merges: merge 0: token \"c\" is not in the vocabulary",
        ),
        (
            "/added_tokens/0/id",
            json!(1),
            "model.vocab: added token \"<s>\" has id 1, but \"b\" has it in the vocabulary",
        ),
        (
            "/post_processor",
            json!({"type": "Magic"}),
            "post_processor.type is \"Magic\"; supported: TemplateProcessing",
        ),
        (
            "/decoder",
            json!({"type": "WordPiece"}),
            "decoder is \"WordPiece\"; supported: ByteLevel",
        ),
        ("/decoder", json!(null), "decoder is \"null\"; supported: ByteLevel"),
        ("/pre_tokenizer", json!({"type": "Magic"}), "pre_tokenizer: "),
        (
            "/pre_tokenizer",
            json!({"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false}),
            "pre_tokenizer: ",
        ),
        ("/normalizer", json!({"type": "Magic"}), "normalizer: "),
    ] {
        let message = json_message(pointer, value);
        assert!(message.starts_with(expected), "{message}\nwanted: {expected}");
    }
    let huge = json_message("/model/vocab", json!({"a": 0, "b": 4_000_000_000u32}));
    assert_eq!(
        huge,
        format!(
            "model.vocab: token \"b\" has id 4000000000; ids are less than {VOCABULARY_SIZE_MAX}"
        )
    );
}

#[test]
fn wrong_types_in_tokenizer_json_are_located() {
    for (pointer, value) in [
        ("/model/vocab", json!({"a": -1})),
        ("/model/vocab", json!({"a": "x"})),
        ("/model/vocab", json!(7)),
        ("/model/merges", json!(["ab"])),
        ("/model/merges", json!([["a", "b", "c"]])),
        ("/model/merges", json!({})),
        ("/added_tokens/0/id", json!(-3)),
        ("/added_tokens", json!("x")),
        ("/model", json!(null)),
    ] {
        let error = open_json(&tokenizer_json(pointer, value), &[]).unwrap_err();
        assert!(matches!(error, LoadError::Json { .. }), "{error:?}");
        assert!(error.to_string().contains("line 1 column"), "{error}");
    }
    for text in ["", "{", "[]", "\u{feff}{}", &"[".repeat(100_000)] {
        assert!(matches!(open_json(text, &[]), Err(LoadError::Json { .. })));
    }
}

#[test]
fn eos_ids_come_from_all_configurations() {
    let good = tokenizer_json("/normalizer", json!(null));
    let eos =
        |more: &[(&str, &str)]| open_json(&good, more).unwrap().tokenizer().eos_ids().to_vec();
    let config = ("tokenizer_config.json", r#"{"eos_token": "b", "bos_token": null}"#);
    let many = ("generation_config.json", r#"{"eos_token_id": [3, 0, 3]}"#);
    let one = ("config.json", r#"{"eos_token_id": 2}"#);
    assert_eq!(eos(&[]), [0u32; 0]);
    assert_eq!(eos(&[config]), [1]);
    assert_eq!(eos(&[config, one]), [1, 2]);
    assert_eq!(
        eos(&[config, one, many]),
        [0, 1, 3],
        "generation_config.json goes before config.json"
    );
    assert_eq!(eos(&[("special_tokens_map.json", r#"{"eos_token": {"content": "<s>"}}"#)]), [3]);
    let beyond = ("generation_config.json", r#"{"eos_token_id": 9}"#);
    let error = open_json(&good, &[beyond]).unwrap_err();
    assert!(
        matches!(
            error,
            LoadError::Vocabulary { cause: VocabularyError::NoSuchId { id: 9, size: 4, .. }, .. }
        ),
        "{error:?}"
    );
    // Files that transformers loads.
    for (id, expected) in
        [("2.0", vec![2]), ("[2.0, null, 0]", vec![0, 2]), ("-1", vec![]), ("[-1, 1]", vec![1])]
    {
        let file = format!(r#"{{"eos_token_id": {id}}}"#);
        for name in ["generation_config.json", "config.json"] {
            assert_eq!(eos(&[(name, &file)]), expected, "{name}: {id}");
        }
    }
    for broken in [r#"{"eos_token_id": 1.5}"#, r#"{"eos_token_id": "x"}"#, "["] {
        let error = open_json(&good, &[("generation_config.json", broken)]).unwrap_err();
        assert!(error.to_string().contains("generation_config.json"), "{error}");
    }
}

#[test]
fn added_tokens_of_tokenizer_config_are_read() {
    let good = tokenizer_json("/normalizer", json!(null));
    let config = r#"{"added_tokens_decoder": {"7": {"content": "<x>", "special": true}}}"#;
    let model = open_json(&good, &[("tokenizer_config.json", config)]).unwrap();
    assert_eq!(model.tokenizer().encode("<x>", SpecialTokens::Parse).unwrap(), [7]);
    assert_eq!(model.tokenizer().vocabulary_size(), 8);
    let clash = r#"{"added_tokens_decoder": {"3": {"content": "<x>", "special": true}}}"#;
    let error = open_json(&good, &[("tokenizer_config.json", clash)]).unwrap_err();
    assert!(error.to_string().contains("added_tokens_decoder"), "{error}");
}

#[test]
fn tokens_named_by_configurations_are_special() {
    let good = tokenizer_json("/normalizer", json!(null));
    let is_special = |more: &[(&str, &str)]| {
        let model = open_json(&good, more).unwrap();
        let id = model.tokenizer().token_id("b").unwrap();
        model.tokenizer().is_special(id)
    };
    assert!(!is_special(&[]));
    for (file, text) in [
        ("tokenizer_config.json", r#"{"pad_token": "b"}"#),
        ("special_tokens_map.json", r#"{"unk_token": {"content": "b"}}"#),
        ("special_tokens_map.json", r#"{"additional_special_tokens": ["x", {"content": "b"}]}"#),
        ("tokenizer_config.json", r#"{"additional_special_tokens": ["b"]}"#),
    ] {
        assert!(is_special(&[(file, text)]), "{file}: {text}");
    }
}

#[test]
fn tokenizer_config_sets_bos_and_eos_around_a_prompt() {
    let post = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}},
    });
    let good = tokenizer_json("/post_processor", post);
    let prompt = |flags: &str| {
        let config = format!(r#"{{"bos_token": "<s>", "eos_token": "b"{flags}}}"#);
        let model = open_json(&good, &[("tokenizer_config.json", &config)]).unwrap();
        model.tokenizer().encode_prompt("a", SpecialTokens::Parse).unwrap()
    };
    assert_eq!(prompt(""), [3, 0], "the post-processor's");
    assert_eq!(prompt(r#", "add_bos_token": null"#), [3, 0]);
    assert_eq!(prompt(r#", "add_bos_token": true"#), [3, 0]);
    assert_eq!(prompt(r#", "add_bos_token": false"#), [0]);
    assert_eq!(prompt(r#", "add_bos_token": false, "add_eos_token": true"#), [0, 1]);
}

#[test]
fn generation_config_gives_the_sampling_defaults() {
    let good = tokenizer_json("/normalizer", json!(null));
    let defaults = |generation: &str| {
        open_json(&good, &[("generation_config.json", generation)])
            .map(|model| *model.sampling_defaults())
    };
    assert_eq!(defaults("{}").unwrap(), SamplingDefaults::default());
    let all = r#"{"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05,
        "repetition_penalty": 1.1, "do_sample": true, "max_new_tokens": 9}"#;
    let expected = SamplingDefaults {
        temperature: Some(0.7),
        top_k: Some(20),
        top_p: Some(0.8),
        min_p: Some(0.05),
        repetition_penalty: Some(1.1),
    };
    assert_eq!(defaults(all).unwrap(), expected);
    assert_eq!(defaults(r#"{"top_k": -1, "top_p": null}"#).unwrap().top_k, Some(0));
    let floats = r#"{"temperature": null, "top_k": 50.0, "top_p": 1, "eos_token_id": [3]}"#;
    let expected = SamplingDefaults { top_k: Some(50), top_p: Some(1.0), ..Default::default() };
    assert_eq!(defaults(floats).unwrap(), expected);

    let mut metadata = tiny();
    metadata.insert("general.sampling.temp".into(), Value::F32(0.7));
    metadata.insert("general.sampling.top_k".into(), Value::I32(20));
    let model = open_gguf(&metadata).unwrap();
    let expected =
        SamplingDefaults { temperature: Some(0.7), top_k: Some(20), ..SamplingDefaults::default() };
    assert_eq!(*model.sampling_defaults(), expected);

    // Other servers load such models.
    let some_invalid =
        r#"{"temperature": 3, "top_k": 1.5, "top_p": 0, "min_p": -1, "repetition_penalty": 1.1}"#;
    let expected = SamplingDefaults { repetition_penalty: Some(1.1), ..Default::default() };
    assert_eq!(defaults(some_invalid).unwrap(), expected);
    assert_eq!(defaults(r#"{"top_k": -2}"#).unwrap(), SamplingDefaults::default());
    metadata.insert("general.sampling.temp".into(), Value::F32(-1.0));
    let expected = SamplingDefaults { top_k: Some(20), ..SamplingDefaults::default() };
    assert_eq!(*open_gguf(&metadata).unwrap().sampling_defaults(), expected);
}

#[test]
fn a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused() {
    let good = tokenizer_json("/normalizer", json!(null));
    let with = |config: &str| open_json(&good, &[("config.json", config)]).map(drop);
    with(r#"{"vocab_size": 4}"#).unwrap();
    with(r#"{"vocab_size": 64}"#).unwrap();
    with(r#"{"vocab_size": 64.0}"#).unwrap();
    let error = with(r#"{"vocab_size": 3}"#).unwrap_err().to_string();
    let problem = "config.json: vocab_size: is 3, but tokenizer.json has token id 3: they are of \
                   different models";
    assert!(error.ends_with(problem), "{error}");
    // A token that ends an answer must exist.
    let error = with(r#"{"vocab_size": 64, "eos_token_id": 9}"#).unwrap_err().to_string();
    assert!(error.contains("is 9; the vocabulary has 4 tokens"), "{error}");
}

#[test]
fn a_later_part_of_a_split_model_names_the_first() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny-00002-of-00002.gguf");
    let mut metadata = Metadata::new();
    metadata.insert("split.no".into(), Value::U32(1));
    metadata.insert("split.count".into(), Value::U32(2));
    common::write_gguf(&path, &metadata);
    let error = ModelText::open(&path).unwrap_err().to_string();
    assert!(error.contains("open the first, \"tiny-00001-of-00002.gguf\""), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn damaged_files_never_panic(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let mut metadata = tiny();
        metadata.insert("tokenizer.ggml.pre".into(), string("llama-bpe"));
        common::write_gguf(&path, &metadata);
        common::write_gguf(&folder.path().join("pieces.gguf"), &common::tiny_pieces());
        let json = tokenizer_json("/normalizer", json!({"type": "NFC"}));
        std::fs::write(folder.path().join("tokenizer.json"), json).unwrap();
        for file in ["model.gguf", "pieces.gguf", "tokenizer.json"] {
            let file = folder.path().join(file);
            let mut bytes = std::fs::read(&file).unwrap();
            for (place, byte) in &damage {
                let place = place.index(bytes.len());
                bytes[place] = *byte;
            }
            std::fs::write(&file, bytes).unwrap();
        }
        for path in [path.as_path(), &folder.path().join("pieces.gguf"), folder.path()] {
            if let Ok(model) = ModelText::open(path) {
                let ids = model.tokenizer().encode_prompt("hello <|end|> ab\u{e9}", SpecialTokens::Parse);
                model.tokenizer().decode(&ids.unwrap(), false);
            }
        }
    }
}
