//! Incremental text equals the text of all tokens.

mod common;

use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use text::{Detokenizer, DetokenizerOptions, ModelText, Tokenizer};

static SMOLLM2: LazyLock<ModelText> =
    LazyLock::new(|| ModelText::open(common::model_path()).unwrap());

/// Tokens that represent one byte each, which can spell any bytes.
static BYTE_TOKENS: LazyLock<Vec<u32>> = LazyLock::new(|| {
    let tokenizer = SMOLLM2.tokenizer();
    let spelled = |id: &u32| tokenizer.token_bytes(*id).is_some_and(|bytes| bytes.len() == 1);
    (0..tokenizer.vocabulary_size()).filter(spelled).collect()
});

fn options(skip_special: bool) -> DetokenizerOptions {
    DetokenizerOptions { skip_special, continues: false }
}

/// Returns `bytes` without an incomplete character at the end.
fn certain(bytes: &[u8]) -> String {
    let incomplete = (1..=3.min(bytes.len())).rev().find(|n| {
        let tail = &bytes[bytes.len() - n..];
        std::str::from_utf8(tail).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
    });
    String::from_utf8_lossy(&bytes[..bytes.len() - incomplete.unwrap_or(0)]).into_owned()
}

fn check(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip_special: bool) {
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), options(skip_special));
    let mut text = String::new();
    let mut bytes = Vec::new();
    for &id in ids {
        text += &detokenizer.push(id);
        if !(skip_special && tokenizer.is_special(id)) {
            bytes.extend_from_slice(tokenizer.token_bytes(id).unwrap_or_default());
        }
        assert_eq!(text, certain(&bytes), "all that is certain is out, and no more");
    }
    text += &detokenizer.finish();
    assert_eq!(text, String::from_utf8_lossy(&bytes));
    assert_eq!(text, tokenizer.decode(ids, skip_special));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn streaming_random_tokens_gives_the_text_of_decoding_them_together(
        ids in prop::collection::vec(0u32..49_160, 0..40), skip_special: bool,
    ) {
        check(SMOLLM2.tokenizer(), &ids, skip_special);
    }

    #[test]
    fn streaming_byte_tokens_gives_the_text_of_decoding_them_together(
        picks in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
        text in "[é日👍a]{0,8}",
        cut in 0usize..32,
    ) {
        let by_byte = |byte: u8| {
            let tokenizer = SMOLLM2.tokenizer();
            BYTE_TOKENS.iter().copied().find(|id| tokenizer.token_bytes(*id) == Some(&[byte]))
        };
        // Random bytes, then whole characters, the last of which may be incomplete.
        let spelled: Vec<u32> = text.bytes().filter_map(by_byte).collect();
        let mut ids: Vec<u32> = picks.iter().map(|pick| *pick.get(&BYTE_TOKENS)).collect();
        ids.extend(&spelled[..cut.min(spelled.len())]);
        check(SMOLLM2.tokenizer(), &ids, false);
    }
}

#[test]
fn a_character_cut_by_the_end_is_one_replacement() {
    let tiny = common::open_gguf(&common::tiny()).unwrap();
    let mut detokenizer = Detokenizer::new(Arc::clone(tiny.tokenizer()), options(true));
    let text: Vec<String> =
        [0x61, 0xf0, 0x9f, 0x91].into_iter().map(|id| detokenizer.push(id)).collect();
    assert_eq!(text, ["a", "", "", ""]);
    assert_eq!(detokenizer.finish(), "\u{fffd}");
}

#[test]
fn special_and_unused_tokens_give_no_text_between_the_bytes_of_a_character() {
    let tiny = common::open_gguf(&common::tiny()).unwrap();
    let tokenizer = tiny.tokenizer();
    let ids = [0xc3, common::END, common::UNUSED, 0xa9];
    assert_eq!(tokenizer.decode(&ids, true), "é");
    assert_eq!(tokenizer.decode(&ids, false), "\u{fffd}<|end|>\u{fffd}");
}
