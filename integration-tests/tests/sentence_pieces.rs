//! A Llama with a SentencePiece vocabulary through a whole cluster. The test writes the model as a
//! GGUF file.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use integration_tests::{
    client::Client,
    cluster::{Cluster, ClusterSpec},
};
use serde_json::{Value, json};
use text::{ModelText, SpecialTokens, StopStrings, TextStream, TextStreamOptions};

const HIDDEN: u64 = 64;
const FFN: u64 = 256;
const KV: u64 = 32;
const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}\
    {{ '[INST] ' + m['content'] + ' [/INST]' }}{% endfor %}";
/// Tokens after `<unk>`, `<s>`, `</s>` and the bytes. Earlier tokens merge first.
const PIECES: [&str; 31] = [
    "▁t", "he", "▁the", "in", "er", "▁a", "on", "▁w", "▁wor", "ld", "▁world", "▁h", "el", "lo",
    "▁hello", "\":", "▁\"", "▁", "e", "t", "a", "o", "i", "n", "h", "l", "w", "r", "d", "é", "日",
];

/// Writer of a GGUF file.
struct Writer(Vec<u8>);

impl Writer {
    fn text(&mut self, text: &str) {
        self.0.extend((text.len() as u64).to_le_bytes());
        self.0.extend(text.as_bytes());
    }

    fn entry(&mut self, key: &str, kind: u32) {
        self.text(key);
        self.0.extend(kind.to_le_bytes());
    }

    fn array(&mut self, key: &str, kind: u32, count: usize) {
        self.entry(key, 9);
        self.0.extend(kind.to_le_bytes());
        self.0.extend((count as u64).to_le_bytes());
    }

    fn pad(&mut self) {
        self.0.resize(self.0.len().next_multiple_of(32), 0);
    }
}

/// Writes a Llama of one layer with seeded random weights.
fn write_model(path: &Path) -> Result<()> {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    let ordinary = tokens.len();
    tokens.extend(PIECES.map(str::to_owned));
    let count = tokens.len();

    let matrix = |name: &str, columns, rows| (name.to_owned(), vec![columns, rows]);
    let vector = |name: &str| (name.to_owned(), vec![HIDDEN]);
    let tensors = [
        matrix("token_embd.weight", HIDDEN, count as u64),
        vector("output_norm.weight"),
        vector("blk.0.attn_norm.weight"),
        matrix("blk.0.attn_q.weight", HIDDEN, HIDDEN),
        matrix("blk.0.attn_k.weight", HIDDEN, KV),
        matrix("blk.0.attn_v.weight", HIDDEN, KV),
        matrix("blk.0.attn_output.weight", HIDDEN, HIDDEN),
        vector("blk.0.ffn_norm.weight"),
        matrix("blk.0.ffn_gate.weight", HIDDEN, FFN),
        matrix("blk.0.ffn_up.weight", HIDDEN, FFN),
        matrix("blk.0.ffn_down.weight", FFN, HIDDEN),
    ];
    let numbers = [
        ("llama.embedding_length", HIDDEN as u32),
        ("llama.block_count", 1),
        ("llama.attention.head_count", 4),
        ("llama.attention.head_count_kv", 2),
        ("llama.feed_forward_length", FFN as u32),
        ("llama.context_length", 1024),
        ("tokenizer.ggml.bos_token_id", 1),
        ("tokenizer.ggml.eos_token_id", 2),
        ("tokenizer.ggml.unknown_token_id", 0),
    ];
    let texts = [
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "llama"),
        ("tokenizer.chat_template", TEMPLATE),
    ];
    let mut file = Writer(b"GGUF".to_vec());
    file.0.extend(3u32.to_le_bytes());
    file.0.extend((tensors.len() as u64).to_le_bytes());
    file.0.extend((numbers.len() as u64 + texts.len() as u64 + 4).to_le_bytes());
    for (key, value) in texts {
        file.entry(key, 8);
        file.text(value);
    }
    for (key, value) in numbers {
        file.entry(key, 4);
        file.0.extend(value.to_le_bytes());
    }
    file.entry("llama.attention.layer_norm_rms_epsilon", 6);
    file.0.extend(1e-5f32.to_le_bytes());
    file.array("tokenizer.ggml.tokens", 8, count);
    tokens.iter().for_each(|token| file.text(token));
    file.array("tokenizer.ggml.scores", 6, count);
    (0..count).for_each(|id| file.0.extend((-(id as f32)).to_le_bytes()));
    file.array("tokenizer.ggml.token_type", 5, count);
    for id in 0..count {
        let kind: i32 = match id {
            0 => 2,
            1 | 2 => 3,
            _ if id < ordinary => 6,
            _ => 1,
        };
        file.0.extend(kind.to_le_bytes());
    }
    let bytes = |dims: &[u64]| 4 * dims.iter().product::<u64>();
    let mut offset = 0u64;
    for (name, dims) in &tensors {
        file.text(name);
        file.0.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| file.0.extend(dim.to_le_bytes()));
        file.0.extend(0u32.to_le_bytes());
        file.0.extend(offset.to_le_bytes());
        offset += bytes(dims).next_multiple_of(32);
    }
    file.pad();
    let mut state = 20_261_121u64;
    for (_, dims) in &tensors {
        for _ in 0..dims.iter().product::<u64>() {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let random = (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
            // Vectors are norm weights.
            let value = if dims.len() == 1 { 1.0 } else { random };
            file.0.extend(value.to_le_bytes());
        }
        file.pad();
    }
    Ok(fs::write(path, file.0)?)
}

#[tokio::test]
async fn sentence_piece_answers_are_detokenized_correctly() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let model = folder.path().join("pieces.gguf");
    write_model(&model)?;
    let text = ModelText::open(&model)?;
    let tokenizer = text.tokenizer();
    let spec = ClusterSpec { model, ..ClusterSpec::smollm2() };
    let cluster = Cluster::start(spec).await?;
    let client = Client::new(cluster.http());

    // Random bytes, words and incomplete characters, streamed and non-streaming.
    let prompt = "hello the world, 日é👍";
    let ids = tokenizer.encode_prompt(prompt, SpecialTokens::Parse)?;
    for seed in 0..4 {
        let body = json!({"prompt": prompt, "max_tokens": 64, "temperature": 1, "seed": seed,
            "ignore_eos": true, "return_token_ids": true, "logprobs": 1});
        let whole = client.post("/v1/completions", &body).await?.json();
        assert_eq!(whole["usage"]["prompt_tokens"], ids.len(), "{whole}");
        let mut streamed_body = body.clone();
        streamed_body["stream"] = json!(true);
        let events = client.stream("/v1/completions", &streamed_body).await?.all().await?;
        let tokens: Vec<u32> = events.iter().flat_map(|event| event.token_ids()).collect();
        assert_eq!(tokens.len(), 64);
        let streamed: String = events
            .iter()
            .filter(|event| !event.is_done())
            .map(|event| event.json()["choices"][0]["text"].as_str().unwrap_or("").to_owned())
            .collect();
        let stops = StopStrings::new::<&str>(&[], false)?;
        let mut stream = TextStream::new(tokenizer.clone(), stops, TextStreamOptions::default());
        let expected = stream.push(&tokens).text + &stream.finish();
        assert_eq!(streamed, expected, "seed {seed}");
        assert_eq!(whole["choices"][0]["text"], expected, "seed {seed}");
        assert!(!expected.contains('▁') && !expected.contains("<0x"), "{expected:?}");
    }

    // The chat template adds one BOS and a space after it.
    let mut chat = json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 400,
        "temperature": 1, "seed": 3});
    let expected = tokenizer.encode("<s>[INST] hello [/INST]", SpecialTokens::Parse)?;
    assert_eq!(expected.iter().filter(|id| **id == 1).count(), 1);
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["hé 日", "b"],
        "properties": {"hé 日": {"type": "boolean"}, "b": {"type": "string", "maxLength": 4}}});
    for format in [
        Value::Null,
        json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}),
    ] {
        chat["response_format"] = format.clone();
        let answer = client.post("/v1/chat/completions", &chat).await?.json();
        assert_eq!(answer["usage"]["prompt_tokens"], expected.len(), "{answer}");
        if !format.is_null() {
            let choice = &answer["choices"][0];
            assert_eq!(choice["finish_reason"], "stop", "{answer}");
            let content = choice["message"]["content"].as_str().context("no content")?;
            let object: Value = serde_json::from_str(content).context(content.to_owned())?;
            assert!(object["hé 日"].is_boolean() && object["b"].is_string(), "{object}");
        }
    }
    // A response format as clients send it.
    chat["response_format"] = json!({"type": "json_object"});
    let answer = client.post("/v1/chat/completions", &chat).await?.json();
    let content = answer["choices"][0]["message"]["content"].as_str().context("no content")?;
    assert!(content.starts_with('{'), "{content}");
    cluster.stop()
}
