//! Tests SentencePiece vocabularies in GGUF files, as in Llama 2: with scores and byte fallback.

mod common;

use std::{
    sync::{Arc, LazyLock},
    time::UNIX_EPOCH,
};

use common::{
    Metadata, PIECES_TOOL, PIECES_TURN, PIECES_UNUSED, byte_piece, open_gguf, piece, tiny_pieces,
};
use gguf::{Array, Value};
use proptest::prelude::*;
use serde_json::{Map, json};
use text::{
    Detokenizer, DetokenizerOptions, ModelText, RenderRequest, SpecialTokens, StopStrings,
    TextStream, TextStreamOptions, TokenTable, Tokenizer,
};

const BOS: u32 = 1;
const EOS: u32 = 2;

static TINY: LazyLock<ModelText> = LazyLock::new(|| open_gguf(&tiny_pieces()).unwrap());

fn tokenizer() -> &'static Arc<Tokenizer> {
    TINY.tokenizer()
}

fn encode(text: &str) -> Vec<u32> {
    tokenizer().encode(text, SpecialTokens::Parse).unwrap()
}

fn with(key: &str, value: Value) -> Metadata {
    let mut metadata = tiny_pieces();
    metadata.insert(key.to_owned(), value);
    metadata
}

fn pieces(tokens: &[&str]) -> Vec<u32> {
    tokens.iter().map(|token| piece(token)).collect()
}

#[test]
fn words_are_merged_by_score_behind_a_space() {
    assert_eq!(encode("hello world"), pieces(&["▁hello", "▁world"]));
    assert_eq!(encode(" hello"), pieces(&["▁", "▁hello"]));
    assert_eq!(encode("lo"), pieces(&["▁", "lo"]));
    assert_eq!(encode(""), [0u32; 0]);
    assert_eq!(encode(" "), pieces(&["▁▁"]));
    assert_eq!(tokenizer().encode_prompt("", SpecialTokens::Parse).unwrap(), [BOS]);
    assert_eq!(
        tokenizer().encode_prompt("hello", SpecialTokens::Parse).unwrap(),
        [BOS, piece("▁hello")]
    );
}

#[test]
fn text_without_a_token_becomes_byte_tokens() {
    let mut expected = pieces(&["▁"]);
    expected.extend("👍🏽e\u{301}".bytes().map(|byte| match byte {
        b'e' => piece("e"),
        byte => byte_piece(byte),
    }));
    assert_eq!(encode("👍🏽e\u{301}"), expected);
    assert_eq!(encode("é\n"), [piece("▁"), piece("é"), byte_piece(b'\n')]);
    // Names of byte tokens and special tokens are ordinary text.
    for name in ["<0x41>", "</s>", "<unk>", "[PAD]"] {
        let ids = tokenizer().encode(name, SpecialTokens::AsText).unwrap();
        assert_eq!(tokenizer().decode(&ids, true), name);
        assert!(ids.iter().all(|id| !tokenizer().is_special(*id) && *id != PIECES_UNUSED));
    }
}

#[test]
fn a_space_is_added_at_the_start_and_after_every_added_token() {
    assert_eq!(
        encode("<s>hello</s>hello<tool>hello"),
        [BOS, piece("▁hello"), EOS, piece("▁hello"), PIECES_TOOL, piece("▁hello")]
    );
    assert_eq!(encode("<|turn|></s>"), [PIECES_TURN, EOS]);
    let as_text = tokenizer().encode("</s><tool>lo", SpecialTokens::AsText).unwrap();
    assert!(!as_text.contains(&EOS));
    assert!(as_text.ends_with(&[PIECES_TOOL, piece("▁"), piece("lo")]), "{as_text:?}");
    assert_eq!(tokenizer().decode(&encode("<s>hello<tool>"), false), "<s> hello<tool>");
    assert_eq!(tokenizer().decode(&encode("<s>hello<tool>"), true), "hello<tool>");
}

/// U+FDD0 marks special tokens that a message spells.
#[test]
fn no_space_is_added_around_a_special_token_that_is_text() {
    let mut tokens = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(["▁", "a", "b"].map(str::to_owned));
    let prepends = common::pieces_json(&tokens, json!([])).to_string();
    let folder = common::folder(&[("tokenizer.json", &prepends)]);
    let folder = ModelText::open(folder.path()).unwrap();
    for tokenizer in [folder.tokenizer(), tokenizer()] {
        let text = |text: &str| tokenizer.encode(text, SpecialTokens::AsText).unwrap();
        for (rendered, parts) in [
            ("<s>a\u{FDD0}</s>\u{FDD0}b<s>a", ["a</s>b", "a"]),
            ("<s>\u{FDD0}<s>\u{FDD0}\u{FDD0}</s>\u{FDD0} a<s> b", ["<s></s> a", " b"]),
        ] {
            let expected = [vec![BOS], text(parts[0]), vec![BOS], text(parts[1])].concat();
            assert_eq!(tokenizer.encode_rendered(rendered).unwrap(), expected, "{rendered:?}");
        }
        let ids = tokenizer.encode_rendered("<s>a\u{FDD0}</s>\u{FDD0}b").unwrap();
        assert_eq!(tokenizer.decode(&ids, false), "<s> a</s>b");
    }
}

#[test]
fn control_token_absorbs_white_space_beside_a_special_token_that_is_text() {
    let mut tokens = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(["▁", "a", "b"].map(str::to_owned));
    let mut file = common::pieces_json(&tokens, json!([]));
    file["added_tokens"][BOS as usize]["rstrip"] = json!(true);
    file["added_tokens"][EOS as usize]["lstrip"] = json!(true);
    let folder = common::folder(&[("tokenizer.json", &file.to_string())]);
    let model = ModelText::open(folder.path()).unwrap();
    let tokenizer = model.tokenizer();
    let text = |text: &str| tokenizer.encode(text, SpecialTokens::AsText).unwrap();
    let rendered = |text: &str| tokenizer.encode_rendered(text).unwrap();
    assert_eq!(rendered("<s>\n a \n</s>"), [vec![BOS], text("a"), vec![EOS]].concat());
    assert_eq!(
        rendered("<s>\n a\u{FDD0}<s>\u{FDD0}b \n</s>b<s> \u{FDD0}</s>\u{FDD0} \n</s>"),
        [vec![BOS], text("a<s>b"), vec![EOS], text("b"), vec![BOS], text("</s>"), vec![EOS]]
            .concat()
    );
}

#[test]
fn the_added_space_can_be_disabled() {
    let model = open_gguf(&with("tokenizer.ggml.add_space_prefix", Value::Bool(false))).unwrap();
    let tokenizer = model.tokenizer();
    let ids = tokenizer.encode("hello hello", SpecialTokens::Parse).unwrap();
    assert_eq!(ids, pieces(&["h", "el", "lo", "▁hello"]));
    assert_eq!(tokenizer.decode(&ids, false), "hello hello");
    assert_eq!(tokenizer.decode(&pieces(&["▁hello"]), false), " hello", "no space was prepended");
}

#[test]
fn missing_special_ids_default_to_those_of_sentence_piece() {
    let mut metadata = tiny_pieces();
    for key in ["bos_token_id", "eos_token_id", "unknown_token_id"] {
        metadata.remove(&format!("tokenizer.ggml.{key}"));
    }
    let model = open_gguf(&metadata).unwrap();
    assert_eq!((model.tokenizer().bos_id(), model.tokenizer().eos_ids()), (Some(BOS), &[EOS][..]));
    let prompt = model.tokenizer().encode_prompt("hello", SpecialTokens::Parse).unwrap();
    assert_eq!(prompt, [BOS, piece("▁hello")]);

    metadata.insert("tokenizer.ggml.add_bos_token".into(), Value::Bool(false));
    metadata.insert("tokenizer.ggml.add_eos_token".into(), Value::Bool(true));
    let model = open_gguf(&metadata).unwrap();
    let prompt = model.tokenizer().encode_prompt("hello", SpecialTokens::Parse).unwrap();
    assert_eq!(prompt, [piece("▁hello"), EOS]);
}

#[test]
fn files_without_token_types_have_the_named_special_tokens() {
    let mut metadata = tiny_pieces();
    metadata.remove("tokenizer.ggml.token_type");
    let model = open_gguf(&metadata).unwrap();
    let tokenizer = model.tokenizer();
    let ids = tokenizer.encode("<s>hello👍", SpecialTokens::Parse).unwrap();
    assert_eq!(ids[..2], [BOS, piece("▁hello")]);
    assert_eq!(tokenizer.decode(&ids, true), "hello👍");
}

#[test]
fn vocabularies_without_byte_tokens_use_the_unknown_token() {
    let mut metadata = tiny_pieces();
    let tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a"].map(str::to_owned).to_vec();
    metadata.insert("tokenizer.ggml.tokens".into(), Value::Array(Array::String(tokens)));
    let types = Value::Array(Array::I32(vec![2, 3, 3, 1, 1, 1]));
    metadata.insert("tokenizer.ggml.token_type".into(), types);
    let scores = Value::Array(Array::F32(vec![0.0; 6]));
    metadata.insert("tokenizer.ggml.scores".into(), scores);
    let model = open_gguf(&metadata).unwrap();
    let ids = model.tokenizer().encode("abca", SpecialTokens::Parse).unwrap();
    assert_eq!(ids, [5, 0, 4]);
    assert_eq!(model.tokenizer().tokens_at_least(&"b".repeat(1000)), 0, "one unknown token");
}

#[test]
fn long_texts_round_trip() {
    for text in [
        " ".repeat(10_000),
        " ".repeat(10_001) + "hello",
        "hello".repeat(40_000),
        "hello ".repeat(40_000),
        "l".repeat(200_000),
        "👍".repeat(10_000),
        "▁".repeat(10_000),
        "\n\u{0}\r\t\u{a0}\u{301}".repeat(2_000),
        "<|turn|>".repeat(2_000),
    ] {
        let ids = encode(&text);
        assert!(tokenizer().tokens_at_least(&text) <= ids.len());
        // The space mark decodes to a space.
        assert_eq!(tokenizer().decode(&ids, false), text.replace('▁', " "));
    }
    assert_eq!(encode(&" ".repeat(10_000)).len(), 2501);
}

#[test]
fn incomplete_characters_are_held_back() {
    let options = DetokenizerOptions { skip_special: true, continues: false };
    let mut detokenizer = Detokenizer::new(tokenizer().clone(), options);
    let mut shown = Vec::new();
    for id in encode("hello👍\u{301}é") {
        shown.push(detokenizer.push(id));
    }
    assert_eq!(shown, ["hello", "", "", "", "👍", "", "\u{301}", "é"]);

    let mut cut = Detokenizer::new(tokenizer().clone(), options);
    for byte in &"👍".as_bytes()[..3] {
        assert_eq!(cut.push(byte_piece(*byte)), "");
    }
    // Three bytes of an incomplete character, then other text.
    assert_eq!(cut.push(piece("▁hello")), "\u{fffd} hello");
    assert_eq!(cut.finish(), "");
}

#[test]
fn the_first_space_is_dropped_once_and_only_at_the_beginning() {
    let decode = |ids: &[u32]| tokenizer().decode(ids, true);
    assert_eq!(decode(&pieces(&["▁▁▁▁", "▁hello"])), "    hello");
    assert_eq!(decode(&[BOS, piece("▁hello"), EOS, piece("▁hello")]), "hello hello");
    assert_eq!(decode(&[byte_piece(b' '), piece("▁hello")]), " hello");
    assert_eq!(decode(&[PIECES_UNUSED, piece("▁"), PIECES_UNUSED]), "");
    // An answer continues its prompt, so its spaces are kept.
    let stops = StopStrings::new(&["world"], false).unwrap();
    let mut stream = TextStream::new(tokenizer().clone(), stops, TextStreamOptions::default());
    assert_eq!(stream.push(&[piece("▁hello")]).text, " hello");
    let hit = stream.push(&pieces(&["▁wor", "ld", "▁hello"]));
    assert_eq!((hit.text.as_str(), hit.stopped.unwrap().token_count), (" ", 3));
}

#[test]
fn token_bytes_are_those_of_their_text() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    common::write_gguf(&path, &tiny_pieces());
    let table = TokenTable::open(&path).unwrap();
    for (id, bytes) in [
        (piece("▁hello"), &b" hello"[..]),
        (piece("▁▁"), b"  "),
        (piece("é"), "é".as_bytes()),
        (byte_piece(0x0a), b"\n"),
        (byte_piece(0xf0), b"\xf0"),
        (BOS, b"<s>"),
        (PIECES_TOOL, b"<tool>"),
        (PIECES_UNUSED, b""),
    ] {
        assert_eq!(table.bytes(id), Some(bytes));
    }
    assert_eq!(table.size(), tokenizer().vocabulary_size());
    for id in 0..=table.size() {
        assert_eq!(table.bytes(id), tokenizer().token_bytes(id), "{id}");
        assert_eq!(table.is_special(id), tokenizer().is_special(id), "{id}");
    }
    let special: Vec<u32> = (0..table.size()).filter(|id| table.is_special(*id)).collect();
    assert_eq!(special, [0, BOS, EOS, PIECES_TURN]);
}

#[test]
fn added_tokens_decode_to_their_text() {
    let mut metadata = tiny_pieces();
    let Some(Value::Array(Array::String(tokens))) = metadata.get_mut("tokenizer.ggml.tokens")
    else {
        panic!("the tokens are strings");
    };
    tokens[PIECES_TOOL as usize] = "a▁b".to_owned();
    let model = open_gguf(&metadata).unwrap();
    let ids = model.tokenizer().encode("a▁b", SpecialTokens::AsText).unwrap();
    assert_eq!(ids, [PIECES_TOOL]);
    assert_eq!(model.tokenizer().decode(&ids, false), "a▁b");
}

/// Templates like those of Llama 2 and Mistral, of TinyLlama, and of files that write BOS as text.
#[test]
fn a_chat_begins_with_one_bos_if_its_template_has_one() {
    let inst = "{% for m in messages %}{% if m['role'] == 'user' %}\
        {{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}\
        {% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}";
    let zephyr = "{% for m in messages %}\n{% if m['role'] == 'user' %}\n\
        {{ '<|user|>\n' + m['content'] + eos_token }}\n\
        {% elif m['role'] == 'assistant' %}\n\
        {{ '<|assistant|>\n' + m['content'] + eos_token }}\n{% endif %}\n\
        {% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n\
        {% endfor %}";
    let written = "{{ '<s>' }}{{ messages[0]['content'] }}";
    for (template, rendered, bos_count) in [
        (inst, "<s>[INST] hello [/INST] hello world </s><s>[INST] hello [/INST]", 2),
        (
            zephyr,
            "<|user|>\nhello</s>\n<|assistant|>\n hello world </s>\n<|user|>\nhello</s>\n<|assistant|>\n",
            0,
        ),
        (written, "<s>hello", 1),
    ] {
        let metadata = with("tokenizer.chat_template", Value::String(template.to_owned()));
        let model = open_gguf(&metadata).unwrap();
        let request = RenderRequest {
            messages: &json!([
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": " hello world "},
                {"role": "user", "content": "hello"},
            ]),
            tools: &serde_json::Value::Null,
            add_generation_prompt: true,
            extra: &Map::new(),
            now: UNIX_EPOCH,
            literal: None,
        };
        let text = model.chat_template().unwrap().render(&request).unwrap();
        assert_eq!(text, rendered);
        let ids = model.tokenizer().encode(&text, SpecialTokens::Parse).unwrap();
        assert_eq!(ids.iter().filter(|id| **id == BOS).count(), bos_count, "{rendered}");
        assert!(!ids.windows(2).any(|pair| pair == [BOS, BOS]));
        // Encoding adds a space after each special token and changes nothing else.
        let decoded = model.tokenizer().decode(&ids, true);
        let spoken = |text: &str| text.replace("<s>", "").replace("</s>", "").replace(' ', "");
        assert_eq!(spoken(&decoded), spoken(rendered));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    #[test]
    fn any_text_round_trips_and_token_bytes_add_up_to_it(
        text in prop_oneof!["[helo wrd{}\":é👍\u{301}]{0,60}", "\\PC{0,40}", any::<String>()],
    ) {
        // Only the space mark does not decode to itself.
        let text = text.replace('▁', "_");
        let ids = tokenizer().encode(&text, SpecialTokens::AsText).unwrap();
        prop_assert_eq!(&tokenizer().decode(&ids, true), &text);
        prop_assert!(tokenizer().tokens_at_least(&text) <= ids.len());
        let bytes: Vec<u8> =
            ids.iter().flat_map(|id| tokenizer().token_bytes(*id).unwrap()).copied().collect();
        let whole = String::from_utf8(bytes).unwrap();
        // The bytes have one more space after each added token in the text.
        prop_assert_eq!(whole.replace(' ', ""), text.replace(' ', ""));
    }

    #[test]
    fn streaming_any_tokens_gives_the_text_of_decoding_them_together(
        ids in prop::collection::vec(0..PIECES_UNUSED + 2, 0..20), skip_special: bool,
    ) {
        let options = DetokenizerOptions { skip_special, continues: true };
        let mut detokenizer = Detokenizer::new(tokenizer().clone(), options);
        let mut text = String::new();
        for &id in &ids {
            detokenizer.push_to(id, &mut text);
        }
        text += &detokenizer.finish();
        let shown = ids.iter().filter(|id| !(skip_special && tokenizer().is_special(**id)));
        let bytes: Vec<u8> =
            shown.filter_map(|id| tokenizer().token_bytes(*id)).flatten().copied().collect();
        prop_assert_eq!(&text, &String::from_utf8_lossy(&bytes));
        let alone = tokenizer().decode(&ids, skip_special);
        prop_assert_eq!(alone, text.strip_prefix(' ').unwrap_or(&text));
    }
}
