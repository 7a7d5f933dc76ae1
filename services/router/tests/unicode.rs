//! Unusual characters, from the client's JSON to the nodes and back.

mod common;

use common::{Cluster, client::text_of, encode, model_text};
use serde_json::{Value, json};

/// Combining accents, an emoji of several code points, right-to-left text, NUL, a byte order mark,
/// the last code point.
const TEXTS: [&str; 8] = [
    "cafe\u{301} \u{301}",
    "👩\u{200d}👩\u{200d}👧 🏳\u{fe0f}\u{200d}🌈 👍🏽",
    "אמר: \u{200f}שלום!\u{200e} \u{202e}abc\u{202c}",
    "a\0b\0",
    "\u{feff}text\u{feff}",
    "\u{10ffff}\u{fffd}\u{e000}",
    "नमस्ते ไทย ㄱㅏ 각",
    "a\u{2028}b\u{85}c\r\nd",
];

fn user(content: &str) -> Value {
    json!({"messages": [{"role": "user", "content": content}], "max_tokens": 100})
}

#[tokio::test]
async fn every_text_round_trips_unchanged() {
    let cluster = Cluster::start(0, 1, "").await;
    let model = model_text();
    for text in TEXTS {
        cluster.decode[0].answer_with(&encode(text));
        let whole = cluster.client.post("/v1/chat/completions", &user(text)).await.json();
        assert_eq!(whole["choices"][0]["message"]["content"], text, "{whole}");
        let prompt = cluster.decode[0].calls().last().unwrap().attempt.tokens.clone();
        let prompt = model.tokenizer().decode(&prompt, false);
        assert!(prompt.contains(&format!("<|im_start|>user\n{text}<|im_end|>")), "{prompt:?}");

        let mut body = user(text);
        body["stream"] = true.into();
        let chunks = cluster.client.stream("/v1/chat/completions", &body).await.chunks().await;
        assert_eq!(text_of(&chunks, 0), text);

        // The same text in escapes only, including surrogate pairs.
        let escaped: String = text.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect();
        let body = format!(r#"{{"prompt": "{escaped}"}}"#).into_bytes();
        let answer = cluster.client.post_bytes("/tokenize", body.leak()).await.json();
        assert_eq!(answer["tokens"], json!(encode(text)), "{text:?}");
    }
}

#[tokio::test]
async fn text_offsets_of_logprobs_count_a_character_of_several_tokens_once() {
    let cluster = Cluster::start(0, 1, "👩a").await;
    assert!(encode("👩").len() > 1);
    let body = json!({"prompt": "hi", "max_tokens": 20, "logprobs": 1});
    let answer = cluster.client.post("/v1/completions", &body).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "👩a", "{answer}");
    let logprobs = &choice["logprobs"];
    let tokens = logprobs["tokens"].as_array().unwrap();
    let index = tokens.iter().position(|token| token == "a").unwrap();
    assert_eq!(logprobs["text_offset"][index], 1, "{logprobs}");
}

#[tokio::test]
async fn unicode_stop_strings_end_an_answer() {
    let cluster = Cluster::start(0, 1, "").await;
    for text in TEXTS {
        let (at, stop) = text.char_indices().nth(text.chars().count() / 2).unwrap();
        let stop = stop.to_string();
        let expected = &text[..text.find(&stop).unwrap_or(at)];
        cluster.decode[0].answer_with(&encode(text));
        let mut body = user("hi");
        body["stop"] = json!(stop);
        let whole = cluster.client.post("/v1/chat/completions", &body).await.json();
        let choice = &whole["choices"][0];
        assert_eq!(choice["message"]["content"], expected, "{text:?} {stop:?}");
        assert_eq!(choice["stop_reason"], stop);
        body["stream"] = true.into();
        let chunks = cluster.client.stream("/v1/chat/completions", &body).await.chunks().await;
        assert_eq!(text_of(&chunks, 0), expected);
    }
}

#[tokio::test]
async fn lone_surrogate_is_rejected_in_every_field() {
    let cluster = Cluster::start(0, 1, "Hi").await;
    const CHAT: &str = "/v1/chat/completions";
    const TEXT: &str = "/v1/completions";
    for (path, body, param) in [
        (TEXT, &br#"{"prompt": "a\ud800"}"#[..], json!("prompt")),
        (TEXT, br#"{"prompt": ["a", "\udc00b"]}"#, json!("prompt")),
        (TEXT, br#"{"prompt": "a", "stop": "\ud83d"}"#, json!("stop")),
        (TEXT, br#"{"prompt": "a", "model": "\ud83dx"}"#, json!("model")),
        (
            CHAT,
            br#"{"messages": [{"role": "user", "content": "\ud800\ud800"}]}"#,
            json!("messages"),
        ),
        // An unknown field, but its name is invalid text.
        (TEXT, br#"{"prompt": "a", "\ud800": 1}"#, json!(null)),
        // Only one byte order mark may precede the JSON.
        (TEXT, b"\xef\xbb\xbf\xef\xbb\xbf{\"prompt\": \"a\"}", json!(null)),
    ] {
        let answer = cluster.client.post_bytes(path, body).await;
        let shown = String::from_utf8_lossy(body);
        assert_eq!((answer.status.as_u16(), &answer.error()["param"]), (400, &param), "{shown}");
    }
    assert!(cluster.decode[0].calls().is_empty());
    let marked = b"\xef\xbb\xbf{\"prompt\": \"a\"}";
    assert_eq!(cluster.client.post_bytes(TEXT, marked).await.status, 200);
    // An unknown field's value is not decoded.
    let answer = cluster.client.post_bytes(TEXT, br#"{"prompt": "a", "other": "\ud800"}"#).await;
    assert_eq!(answer.status, 200);
}
