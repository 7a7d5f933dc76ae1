//! Converts one choice's tokens to its client's text, with stop strings.

mod common;

use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use text::{
    HeaderTokens, ModelText, StopHit, StopStrings, TextDelta, TextStream, TextStreamOptions,
};

static TINY: LazyLock<ModelText> = LazyLock::new(|| common::open_gguf(&common::tiny()).unwrap());

fn stream(stops: &[&str], include_stop: bool, options: TextStreamOptions) -> TextStream {
    let stops = StopStrings::new(stops, include_stop).unwrap();
    TextStream::new(Arc::clone(TINY.tokenizer()), stops, options)
}

/// Returns one token per byte.
fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn delta(text: &str) -> TextDelta {
    TextDelta { text: text.into(), stopped: None }
}

#[test]
fn a_stop_string_names_the_token_that_completed_it() {
    let mut stream = stream(&["x", "END"], false, TextStreamOptions::default());
    assert_eq!(stream.push(&ids("one E")), delta("one "));
    let stopped = Some(StopHit { stop_index: 1, token_count: 7 });
    // Two tokens came with and after the one that completed the stop string.
    assert_eq!(stream.push(&ids("NDab")), TextDelta { text: String::new(), stopped });
    assert_eq!(stream.push(&ids("more")), TextDelta { text: String::new(), stopped });
    assert_eq!(stream.finish(), "");
}

#[test]
fn the_stop_string_is_included_on_request() {
    let mut stream = stream(&["END"], true, TextStreamOptions::default());
    assert_eq!(stream.push(&ids("aEN")), delta("aEN"), "nothing is held back");
    let stopped = Some(StopHit { stop_index: 0, token_count: 4 });
    assert_eq!(stream.push(&ids("Db")), TextDelta { text: "D".into(), stopped });
}

#[test]
fn a_stop_string_inside_a_token_cuts_the_tokens_text() {
    let mut stream = stream(&["ell"], false, TextStreamOptions::default());
    let stopped = Some(StopHit { stop_index: 0, token_count: 1 });
    assert_eq!(stream.push(&[260]), TextDelta { text: "h".into(), stopped });
}

#[test]
fn selected_special_tokens_are_shown_while_others_are_skipped() {
    let tokenizer = TINY.tokenizer();
    let [start, end] = ["<|start|>", "<|end|>"].map(|name| tokenizer.token_id(name).unwrap());
    let answer = [vec![start], ids("a"), vec![end]].concat();
    let plain = stream(&[], false, TextStreamOptions::default());
    assert_eq!(plain.clone().push(&answer), delta("a"));
    assert_eq!(plain.showing([start].into()).push(&answer), delta("<|start|>a"));
}

#[test]
fn stop_strings_are_matched_without_unicode_normalisation() {
    let text_before = |stop: &str, text: &str| {
        let mut stream = stream(&[stop], false, TextStreamOptions::default());
        let delta = stream.push(&ids(text));
        delta.text + &if delta.stopped.is_some() { String::new() } else { stream.finish() }
    };
    for (stop, text, expected) in [
        // A precomposed accented letter differs from the letter followed by the accent.
        ("é", "caf\u{65}\u{301}!", "caf\u{65}\u{301}!"),
        ("\u{65}\u{301}", "caf\u{65}\u{301}!", "caf"),
        // The accent alone matches; the letter before it stays.
        ("\u{301}", "caf\u{65}\u{301}!", "cafe"),
        // The first of several characters that are displayed as one; the joiner alone.
        ("👩", "a👩\u{200d}👧b", "a"),
        ("\u{200d}", "a👩\u{200d}👧b", "a👩"),
        ("👩\u{200d}👧", "a👩\u{200d}👦 👩\u{200d}👧", "a👩\u{200d}👦 "),
        // Right-to-left text with a direction mark.
        ("שלום", "אמר שלום", "אמר "),
        ("\u{200f}", "א\u{200f}ב", "א"),
        ("\0", "a\0b", "a"),
        ("\u{feff}", "a\u{feff}b", "a"),
        ("\u{10ffff}", "a\u{10fffe}\u{10ffff}b", "a\u{10fffe}"),
    ] {
        assert_eq!(text_before(stop, text), expected, "{stop:?} in {text:?}");
    }
}

#[test]
fn held_back_text_is_released_at_the_end() {
    let mut stream = stream(&["END"], false, TextStreamOptions::default());
    assert_eq!(stream.push(&ids("aEN")), delta("a"));
    assert_eq!(stream.push(&[0xf0]), delta(""), "half a character may follow what is held back");
    assert_eq!(stream.finish(), "EN\u{fffd}");
}

#[test]
fn special_tokens_are_skipped_unless_requested() {
    let mut hidden = stream(&[], false, TextStreamOptions::default());
    assert_eq!(hidden.push(&[0x61, common::END]), delta("a"));
    let options = TextStreamOptions { skip_special: false, ..Default::default() };
    let mut shown = stream(&["<|end|>"], false, options);
    let stopped = Some(StopHit { stop_index: 0, token_count: 2 });
    assert_eq!(shown.push(&[0x61, common::END]), TextDelta { text: "a".into(), stopped });
}

#[test]
fn stop_conditions_do_not_apply_within_min_tokens() {
    let options = TextStreamOptions { min_tokens: 3, ..Default::default() };
    let mut stream = stream(&["ab"], false, options);
    assert_eq!(stream.push(&ids("aba")), delta("ab"));
    let stopped = Some(StopHit { stop_index: 0, token_count: 4 });
    assert_eq!(stream.push(&ids("b")), TextDelta { text: String::new(), stopped });
}

#[test]
fn stop_strings_do_not_apply_within_headers() {
    let begin = [Some(common::END), None, None];
    let headers = HeaderTokens { begin, end: common::TOOL, bytes_max: 16, may_open: None };
    let text_before = |tokens: &[u32]| {
        let stream = stream(&["ab"], false, TextStreamOptions::default());
        let mut stream = stream.with_headers(Some(headers));
        let delta = stream.push(tokens);
        (delta.text, delta.stopped.map(|hit| hit.token_count))
    };
    let header = |text: &str| [&[common::END][..], &ids(text), &[common::TOOL]].concat();
    let answer = [&ids("x")[..], &header("abc"), &ids("aab")].concat();
    assert_eq!(text_before(&answer), ("xabc<tool>a".into(), Some(answer.len() as u32)));
    // No stop string begins in a header or ends behind it.
    let answer = [&ids("a")[..], &header("a"), &ids("b")].concat();
    assert_eq!(text_before(&answer), ("aa<tool>b".into(), None));
    // Text before a header is text.
    assert_eq!(text_before(&[ids("ab"), header("")].concat()), (String::new(), Some(2)));
    // A header that does not end is text after its maximum length.
    let answer = [&[common::END][..], &ids("ab"), &ids(&"x".repeat(14)), &ids("ab")].concat();
    assert_eq!(text_before(&answer).1, Some(answer.len() as u32));
}

#[test]
fn stop_strings_do_not_apply_within_a_header_that_begins_the_answer() {
    let headers = HeaderTokens {
        begin: [Some(common::END), None, None],
        end: common::TOOL,
        bytes_max: 16,
        may_open: Some(|text| "to=".starts_with(text) || text == "to=a" || text == "to=ab"),
    };
    let read = |tokens: &[u32]| {
        let stream = stream(&["ab"], false, TextStreamOptions::default());
        let mut stream = stream.with_headers(Some(headers));
        let mut text = String::new();
        let mut stopped = None;
        for token in tokens {
            let delta = stream.push(&[*token]);
            text += &delta.text;
            stopped = stopped.or(delta.stopped.map(|hit| hit.token_count));
        }
        (text + &stream.finish(), stopped)
    };
    let header = [&ids("to=ab")[..], &[common::END, common::TOOL]].concat();
    let answer = [&header[..], &ids("xab")].concat();
    assert_eq!(read(&answer), ("to=ab<tool>x".into(), Some(answer.len() as u32)));
    // Text that turns out not to be a header has its stop string, and text before it.
    assert_eq!(read(&ids("to=ab cd")), ("to=".into(), Some(6)));
    assert_eq!(read(&ids("tab")), ("t".into(), Some(3)));
    assert_eq!(read(&ids("to=ab")), ("to=ab".into(), None));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn any_batching_gives_the_text_before_the_first_stop_string(
        tokens in prop::collection::vec(
            prop_oneof![
                Just(0x61), Just(0x62), Just(0xc3), Just(0xa9), Just(0xc3),
                Just(256), Just(260), Just(common::END), Just(common::TOOL), any::<u8>().prop_map(u32::from),
            ],
            0..30,
        ),
        stops in prop::collection::vec("[abhelo]{1,3}|é|aé|<tool", 0..4),
        batch in 1usize..5,
    ) {
        let tokenizer = TINY.tokenizer();
        let stop_list = StopStrings::new(&stops, false).unwrap();
        let mut stream =
            TextStream::new(Arc::clone(tokenizer), stop_list, TextStreamOptions::default());
        let mut text = String::new();
        let mut hit = None;
        for batch in tokens.chunks(batch) {
            let delta = stream.push(batch);
            text += &delta.text;
            hit = delta.stopped;
            if hit.is_some() {
                break;
            }
        }
        text += &stream.finish();

        let whole = tokenizer.decode(&tokens, true);
        let end = |stop: &String| whole.find(stop.as_str()).map(|at| at + stop.len());
        let first = stops.iter().filter_map(end).min();
        match (first, hit) {
            (None, None) => prop_assert_eq!(text, whole),
            (Some(end), Some(hit)) => {
                let stop = &stops[hit.stop_index];
                prop_assert!(whole[..end].ends_with(stop.as_str()));
                prop_assert_eq!(&text, &whole[..end - stop.len()]);
                // The counted tokens contain the stop string, and no fewer tokens do.
                let contains = |count: usize| {
                    let text = tokenizer.decode(&tokens[..count], true);
                    stops.iter().any(|stop| text.contains(stop.as_str()))
                };
                let count = hit.token_count as usize;
                prop_assert!(contains(count) && !contains(count - 1));
            }
            other => prop_assert!(false, "{other:?}"),
        }
    }
}
