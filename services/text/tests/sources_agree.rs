//! A model's GGUF file and its Hugging Face folder give the same tokenizer, and both behave like
//! the `tokenizers` crate with the same tokenizer.json.

mod common;

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::json;
use text::{ModelText, RenderRequest, SpecialTokens};
use tokenizers::{
    AddedToken, PreTokenizerWrapper, Tokenizer,
    models::bpe::{BPE, Vocab},
    pre_tokenizers::{byte_level::ByteLevel, digits::Digits, sequence::Sequence},
};

struct Sources {
    gguf: ModelText,
    hugging_face: ModelText,
    reference: Tokenizer,
}

/// SmolLM2 from three sources; the `tokenizers` crate wrote tokenizer.json.
static SMOLLM2: LazyLock<Sources> = LazyLock::new(|| {
    let path = common::model_path();
    let header = gguf::Header::read_from(&path).unwrap();
    let tokens: &[String] = header.metadata.require("tokenizer.ggml.tokens").unwrap();
    let merges: &[String] = header.metadata.require("tokenizer.ggml.merges").unwrap();
    let types: &[i32] = header.metadata.require("tokenizer.ggml.token_type").unwrap();
    let template: &str = header.metadata.require("tokenizer.chat_template").unwrap();

    let mut vocab = Vocab::default();
    vocab.extend(tokens.iter().cloned().zip(0..));
    let merges = merges.iter().map(|merge| merge.split_once(' ').unwrap());
    let merges = merges.map(|(left, right)| (left.to_owned(), right.to_owned())).collect();
    let bpe = BPE::builder().vocab_and_merges(vocab, merges).build().unwrap();
    let mut reference = Tokenizer::new(bpe);
    let split: Vec<PreTokenizerWrapper> =
        vec![Digits::new(true).into(), ByteLevel::new(false, true, true).into()];
    reference.with_pre_tokenizer(Some(Sequence::new(split)));
    reference.with_decoder(Some(ByteLevel::new(true, true, true)));
    let special = tokens.iter().zip(types).filter(|(_, kind)| **kind == 3);
    let special: Vec<AddedToken> =
        special.map(|(token, _)| AddedToken::from(token.as_str(), true)).collect();
    reference.add_special_tokens(special).unwrap();

    let folder = common::folder(&[
        ("tokenizer.json", &reference.to_string(false).unwrap()),
        (
            "tokenizer_config.json",
            &json!({
                "bos_token": "<|im_start|>",
                "eos_token": {"content": "<|im_end|>", "special": true},
                "pad_token": "<|im_end|>",
                "unk_token": "<|endoftext|>",
                "chat_template": template,
            })
            .to_string(),
        ),
        ("generation_config.json", r#"{"eos_token_id": 2}"#),
    ]);
    Sources {
        gguf: ModelText::open(&path).unwrap(),
        hugging_face: ModelText::open(folder.path()).unwrap(),
        reference,
    }
});

fn assert_all_agree(text: &str) {
    let trio = &*SMOLLM2;
    let reference = trio.reference.encode_fast(text, true).unwrap().get_ids().to_vec();
    for model in [&trio.gguf, &trio.hugging_face] {
        let ids = model.tokenizer().encode_prompt(text, SpecialTokens::Parse).unwrap();
        assert_eq!(ids, reference, "{text:?}");
        for skip_special in [false, true] {
            let expected = trio.reference.decode(&ids, skip_special).unwrap();
            assert_eq!(model.tokenizer().decode(&ids, skip_special), expected);
        }
    }
}

#[test]
fn texts_of_all_kinds_have_equal_ids_in_both_tokenizers() {
    for text in [
        "",
        " ",
        "Hello, world! I'll count: 1234567890.",
        "  indented\n\n\n\tcode = {'a': [1, 2]}  \r\n",
        "日本語とعربيと한국어 👍🏽 e\u{301} \u{fb01}",
        "<|im_start|>user\nhi<|im_end|><|endoftext|>",
        "\u{0}\u{7f}\u{a0}\u{2028}\u{fffd}",
    ] {
        assert_all_agree(text);
    }
    assert_all_agree(&"a".repeat(10_000));
    assert_all_agree(&" ".repeat(10_000));
    assert_all_agree(&"\n x".repeat(3_000));
}

#[test]
fn ids_and_templates_are_equal_in_both_formats() {
    let (gguf, hugging_face) = (&SMOLLM2.gguf, &SMOLLM2.hugging_face);
    let (ours, theirs) = (gguf.tokenizer(), hugging_face.tokenizer());
    assert_eq!(ours.eos_ids(), theirs.eos_ids());
    assert_eq!(ours.bos_id(), theirs.bos_id());
    assert_eq!(ours.vocabulary_size(), theirs.vocabulary_size());
    for id in 0..=ours.vocabulary_size() {
        assert_eq!(ours.token_bytes(id), theirs.token_bytes(id));
        assert_eq!(ours.is_special(id), theirs.is_special(id));
    }
    let request = RenderRequest {
        messages: &json!([{"role": "user", "content": "Hi"}]),
        tools: &serde_json::Value::Null,
        add_generation_prompt: true,
        extra: &serde_json::Map::new(),
        now: std::time::UNIX_EPOCH,
        literal: None,
    };
    let rendered = |model: &ModelText| model.chat_template().unwrap().render(&request).unwrap();
    assert_eq!(rendered(gguf), rendered(hugging_face));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn any_text_has_equal_ids_in_both_tokenizers_and_round_trips(
        text in prop_oneof![
            "\\PC{0,60}",
            "[ \n\t\ra-zA-Z0-9'.,é日👍]{0,80}",
            any::<String>(),
        ],
    ) {
        assert_all_agree(&text);
        let tokenizer = SMOLLM2.gguf.tokenizer();
        let ids = tokenizer.encode(&text, SpecialTokens::AsText).unwrap();
        prop_assert!(tokenizer.tokens_at_least(&text) <= ids.len());
        prop_assert_eq!(tokenizer.decode(&ids, true), text);
    }
}

/// Returns a SentencePiece-like vocabulary: `▁` for spaces, bytes for unknown characters, BOS
/// before prompts.
fn pieces_json() -> String {
    let mut tokens = vec!["<unk>".to_owned(), "<s>".to_owned(), "</s>".to_owned()];
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(["▁", "a", "b", "c", "é", "▁a", "ab", "▁ab", "▁▁"].map(str::to_owned));
    common::pieces_json(&tokens, json!(["▁ a", "a b", "▁a b", "▁ ▁"])).to_string()
}

#[test]
fn sentence_piece_matches_the_tokenizers_crate() {
    let reference = Tokenizer::from_bytes(pieces_json()).unwrap();
    let folder = common::folder(&[("tokenizer.json", &pieces_json())]);
    let model = ModelText::open(folder.path()).unwrap();
    let tokenizer = model.tokenizer();
    for text in ["", "ab", " ab  a", "abé 👍 ca", "</s>ab", "日本"] {
        let expected = reference.encode(text, true).unwrap().get_ids().to_vec();
        let ids = tokenizer.encode_prompt(text, SpecialTokens::Parse).unwrap();
        assert_eq!(ids, expected, "{text:?}");
        for skip_special in [false, true] {
            let expected = reference.decode(&ids, skip_special).unwrap();
            assert_eq!(tokenizer.decode(&ids, skip_special), expected, "{text:?}");
        }
    }
}

#[test]
fn a_token_table_equals_its_tokenizer() {
    let path = common::model_path();
    let table = text::TokenTable::open(&path).unwrap();
    let tokenizer = SMOLLM2.gguf.tokenizer();
    assert_eq!(table.size(), tokenizer.vocabulary_size());
    for id in 0..=table.size() {
        assert_eq!(table.bytes(id), tokenizer.token_bytes(id), "{id}");
        assert_eq!(table.is_special(id), tokenizer.is_special(id), "{id}");
    }
}
