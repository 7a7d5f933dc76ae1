//! Writes small GGUF files: a Llama of one layer with weights and tokens of a few kilobytes.

const HIDDEN: u64 = 32;
/// A block of the largest quantization type, so that a row of this width can have any type.
const FFN: u64 = 256;
const VOCABULARY: u64 = 8;
/// GGUF type number of F32.
const F32: u32 = 0;
const ALIGNMENT: usize = 32;

enum Value<'a> {
    U32(u32),
    F32(f32),
    Text(&'a str),
    Texts(&'a [&'a str]),
    I32s(&'a [i32]),
    F32s(&'a [f32]),
}

const TOKENS: [&str; VOCABULARY as usize] = ["a", "b", "c", "ab", "Ġ", "Ġa", "<s>", "</s>"];

/// Writes a model whose matrix `ffn_down` has this type and repeats `content`. All other weights
/// are F32 zeros.
pub(crate) fn with_blocks(kind: u32, block: (u64, u64), content: &[u8]) -> Vec<u8> {
    let entries = [
        ("general.architecture", Value::Text("llama")),
        ("llama.embedding_length", Value::U32(HIDDEN as u32)),
        ("llama.block_count", Value::U32(1)),
        ("llama.attention.head_count", Value::U32(2)),
        ("llama.attention.head_count_kv", Value::U32(1)),
        ("llama.attention.key_length", Value::U32(16)),
        ("llama.feed_forward_length", Value::U32(FFN as u32)),
        ("llama.context_length", Value::U32(64)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("llama.rope.freq_base", Value::F32(1e4)),
        ("tokenizer.ggml.model", Value::Text("gpt2")),
        ("tokenizer.ggml.pre", Value::Text("gpt-2")),
        ("tokenizer.ggml.tokens", Value::Texts(&TOKENS)),
        ("tokenizer.ggml.token_type", Value::I32s(&[1, 1, 1, 1, 1, 1, 3, 3])),
        ("tokenizer.ggml.merges", Value::Texts(&["a b", "Ġ a"])),
        ("tokenizer.ggml.bos_token_id", Value::U32(6)),
        ("tokenizer.ggml.eos_token_id", Value::U32(7)),
        (
            "tokenizer.chat_template",
            Value::Text("{% for m in messages %}{{ m.content }}{% endfor %}"),
        ),
    ];
    let (elements, bytes) = block;
    let quantised_bytes = (HIDDEN * FFN / elements * bytes) as usize;
    let quantised = content.iter().copied().chain([0]).cycle().take(quantised_bytes).collect();
    let zeros = |elements: u64| vec![0; 4 * elements as usize];
    let matrix = |name: &str, columns: u64, rows: u64| {
        (name.to_owned(), vec![columns, rows], F32, zeros(columns * rows))
    };
    let vector = |name: &str| (name.to_owned(), vec![HIDDEN], F32, zeros(HIDDEN));
    let tensors = [
        matrix("token_embd.weight", HIDDEN, VOCABULARY),
        vector("output_norm.weight"),
        vector("blk.0.attn_norm.weight"),
        matrix("blk.0.attn_q.weight", HIDDEN, 32),
        matrix("blk.0.attn_k.weight", HIDDEN, 16),
        matrix("blk.0.attn_v.weight", HIDDEN, 16),
        matrix("blk.0.attn_output.weight", 32, HIDDEN),
        vector("blk.0.ffn_norm.weight"),
        matrix("blk.0.ffn_gate.weight", HIDDEN, FFN),
        matrix("blk.0.ffn_up.weight", HIDDEN, FFN),
        ("blk.0.ffn_down.weight".to_owned(), vec![FFN, HIDDEN], kind, quantised),
    ];
    write(&entries, &tensors)
}

/// Writes the tokenizer of a SentencePiece model, with every type of token and without weights.
pub(crate) fn with_pieces() -> Vec<u8> {
    const TOKENS: [&str; 14] = [
        "<unk>", "<s>", "</s>", "<0x0A>", "<0xC3>", "<0xA9>", "▁", "a", "b", "▁a", "ab", "▁▁",
        "<tool>", "[PAD]",
    ];
    const TYPES: [i32; TOKENS.len()] = [2, 3, 3, 6, 6, 6, 1, 1, 1, 1, 5, 1, 4, 5];
    let scores: Vec<f32> = (0..TOKENS.len()).map(|id| -(id as f32)).collect();
    let entries = [
        ("general.architecture", Value::Text("llama")),
        ("tokenizer.ggml.model", Value::Text("llama")),
        ("tokenizer.ggml.tokens", Value::Texts(&TOKENS)),
        ("tokenizer.ggml.scores", Value::F32s(&scores)),
        ("tokenizer.ggml.token_type", Value::I32s(&TYPES)),
        ("tokenizer.ggml.bos_token_id", Value::U32(1)),
        ("tokenizer.ggml.eos_token_id", Value::U32(2)),
        ("tokenizer.ggml.unknown_token_id", Value::U32(0)),
        (
            "tokenizer.chat_template",
            Value::Text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"),
        ),
    ];
    write(&entries, &[])
}

fn write(entries: &[(&str, Value<'_>)], tensors: &[(String, Vec<u64>, u32, Vec<u8>)]) -> Vec<u8> {
    let mut file = b"GGUF".to_vec();
    file.extend(3u32.to_le_bytes());
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend((entries.len() as u64).to_le_bytes());
    for (key, value) in entries {
        text(&mut file, key);
        put(&mut file, value);
    }
    let mut offset = 0;
    for (name, dims, kind, bytes) in tensors {
        text(&mut file, name);
        file.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| file.extend(dim.to_le_bytes()));
        file.extend(kind.to_le_bytes());
        file.extend((offset as u64).to_le_bytes());
        offset += bytes.len().next_multiple_of(ALIGNMENT);
    }
    for bytes in [&Vec::new()].into_iter().chain(tensors.iter().map(|(_, _, _, bytes)| bytes)) {
        file.extend(bytes);
        file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
    }
    file
}

fn put(file: &mut Vec<u8>, value: &Value<'_>) {
    let array = |file: &mut Vec<u8>, kind: u32, count: usize| {
        file.extend(9u32.to_le_bytes());
        file.extend(kind.to_le_bytes());
        file.extend((count as u64).to_le_bytes());
    };
    match value {
        Value::U32(value) => {
            file.extend(4u32.to_le_bytes());
            file.extend(value.to_le_bytes());
        }
        Value::F32(value) => {
            file.extend(6u32.to_le_bytes());
            file.extend(value.to_le_bytes());
        }
        Value::Text(value) => {
            file.extend(8u32.to_le_bytes());
            text(file, value);
        }
        Value::Texts(values) => {
            array(file, 8, values.len());
            values.iter().for_each(|value| text(file, value));
        }
        Value::F32s(values) => {
            array(file, 6, values.len());
            values.iter().for_each(|value| file.extend(value.to_le_bytes()));
        }
        Value::I32s(values) => {
            array(file, 5, values.len());
            values.iter().for_each(|value| file.extend(value.to_le_bytes()));
        }
    }
}

fn text(file: &mut Vec<u8>, text: &str) {
    file.extend((text.len() as u64).to_le_bytes());
    file.extend(text.as_bytes());
}
