//! Seeds of the corpus: one valid input of each kind, and inputs that once caused a bug.

use bytes::Bytes;
use cluster::{Epoch, NodeId};
use gguf::TensorKind;
use kv_transfer::{api::TransferId, testing::frame};
use prost::Message;
use proto::v1::{self, control_message};
use serde_json::json;

use super::{gguf_file, targets::TOKENIZER};

const CONFIGURATION: &str = r#"
[model]
path = "hf:acme/tiny@v1"
dtype = "bf16"

[router]
http = "127.0.0.1:8000"
timeout = "90s"
models = ["second=models/second.gguf"]
chat_templates = ["second=second.jinja"]
tool_formats = ["second=hermes"]
aliases = ["other=second"]

[node]
kv_memory = "1GiB"
slots = 64
cpus = "0-3,8"

[transfer]
secret = "00112233445566778899aabbccddeeff"

[cluster]
prefill = ["http://127.0.0.1:50061"]
decode = ["127.0.0.1:50062"]
"#;

/// Returns target, name and bytes of every seed.
pub(crate) fn all() -> Vec<(&'static str, String, Vec<u8>)> {
    let mut seeds = Vec::new();
    let mut add = |target, name: &str, bytes: Vec<u8>| seeds.push((target, name.to_owned(), bytes));
    for (index, kind) in TensorKind::supported().enumerate() {
        let block = kind.block().expect("the kind is supported");
        let name = kind.to_string().to_lowercase();
        let content: Vec<u8> = (0..block.bytes).map(|at| (at * 37 + 11) as u8).collect();
        if name == "q4_k" {
            let file =
                gguf_file::with_blocks(kind.number(), (block.elements, block.bytes), &content);
            add("gguf", "llama", file);
        }
        add("gguf_blocks", &name, [vec![index as u8], content].concat());
    }
    add("gguf", "pieces", gguf_file::with_pieces());
    add("gguf", "empty", b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0".to_vec());
    add("safetensors", "llama", safetensors());
    add("safetensors", "empty", b"\x02\0\0\0\0\0\0\0{}".to_vec());
    let index = json!({"metadata": {"total_size": 0}, "weight_map": {
        "model.embed_tokens.weight": "shard.safetensors", "model.norm.weight": "shard.safetensors"}});
    add("shard_index", "two", index.to_string().into());
    for (name, config) in configurations() {
        add("config_json", name, config.to_string().into());
    }
    add("tokenizer_json", "bytes", TOKENIZER.into());
    let configured = json!({"bos_token": "<s>", "eos_token": {"content": "</s>"},
        "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
        "added_tokens_decoder": {"4": {"content": "<s>", "special": true}}, "eos_token_id": [3],
        "temperature": 0.5, "top_k": 10, "top_p": 0.9});
    add("tokenizer_config", "all", configured.to_string().into());
    let templates = [
        ("loop", "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}"),
        ("macros", "{% macro f(x) %}{{ x | upper }}{% endmacro %}{{ f(messages[0]['content']) }}"),
        ("torn", "{%}{% generation %}{{ messages[0].content }}{% endgeneration %}{%"),
        ("strings", "{{ range(100) | join(',') | replace('1', 'ab') | upper }}"),
    ];
    for (name, template) in templates {
        add("chat_template", name, template.into());
    }
    for (name, body) in control_messages() {
        add("control_message", name, envelope(body).encode_to_vec());
    }
    let header = frame::Header { transfer: TransferId(7 << 100), chunk: 3, payload_bytes: 4 << 20 };
    add("data_frame", "chunk", header.to_bytes().to_vec());
    for (name, body) in bodies() {
        add("http_body", name, body.to_string().into());
    }
    add("config_toml", "cluster", CONFIGURATION.into());
    add("node_record", "decode", node_record().encode_to_vec());
    add("etcd_entry", "decode", etcd_entry().into());
    seeds
}

/// Returns all-zero weights for the target's configuration.
fn safetensors() -> Vec<u8> {
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let shapes = [
        ("model.embed_tokens.weight".to_owned(), vec![8, 32]),
        ("model.norm.weight".to_owned(), vec![32]),
        (layer("input_layernorm"), vec![32]),
        (layer("self_attn.q_proj"), vec![32, 32]),
        (layer("self_attn.k_proj"), vec![16, 32]),
        (layer("self_attn.v_proj"), vec![16, 32]),
        (layer("self_attn.o_proj"), vec![32, 32]),
        (layer("post_attention_layernorm"), vec![32]),
        (layer("mlp.gate_proj"), vec![64, 32]),
        (layer("mlp.up_proj"), vec![64, 32]),
        (layer("mlp.down_proj"), vec![32, 64]),
    ];
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in shapes {
        let begin = end;
        end += 2 * shape.iter().product::<usize>();
        let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]});
        header.insert(name, entry);
    }
    let header = serde_json::to_vec(&header).expect("names and numbers are JSON");
    [(header.len() as u64).to_le_bytes().to_vec(), header, vec![0; end]].concat()
}

fn configurations() -> [(&'static str, serde_json::Value); 2] {
    let llama = json!({"model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 96, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": [2, 3]});
    let mut large = llama.clone();
    large["vocab_size"] = json!(4_000_000_000_u64);
    large["num_hidden_layers"] = json!(1_000_000);
    [("llama", llama), ("large", large)]
}

fn control_messages() -> [(&'static str, control_message::Body); 3] {
    let id = Bytes::from_static(&[5; 16]);
    let chunk = v1::Chunk { transfer_id: id.clone(), ..Default::default() };
    let reserve = v1::Reserve {
        transfer_id: id.clone(),
        model_fingerprint: Bytes::from_static(&[1; 16]),
        ..Default::default()
    };
    let ack = v1::Ack { transfer_id: id };
    [
        ("chunk", control_message::Body::Chunk(chunk)),
        ("reserve", control_message::Body::Reserve(reserve)),
        ("ack", control_message::Body::Ack(ack)),
    ]
}

fn envelope(body: control_message::Body) -> v1::ControlMessage {
    v1::ControlMessage {
        protocol: kv_transfer::control::PROTOCOL_MIN,
        from_node: "prefill-0".to_owned(),
        traceparent: String::new(),
        body: Some(body),
    }
}

fn bodies() -> [(&'static str, serde_json::Value); 3] {
    let chat = json!({"model": "tiny", "messages": [{"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 5,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -1, "n": 2, "stop": ["a", "b"],
        "stream": true, "stream_options": {"include_usage": true}, "logprobs": true,
        "top_logprobs": 3, "response_format": {"type": "text"}, "presence_penalty": -2.0,
        "stop_token_ids": [1, 2], "chat_template_kwargs": {"thinking": true}, "cache_salt": "s"});
    let texts = json!({"prompt": ["one", "two"], "max_tokens": 1, "logprobs": 0, "echo": false});
    let ids = json!({"prompt": [[1, 2, 3], [4]], "ignore_eos": true, "min_tokens": 1});
    [("chat", chat), ("texts", texts), ("ids", ids)]
}

fn node_record() -> v1::NodeRecord {
    v1::NodeRecord {
        node_id: "decode-0".to_owned(),
        epoch: Bytes::from_static(&[3; 16]),
        role: v1::Role::Decode.into(),
        control_endpoint: "tcp://127.0.0.1:7000".to_owned(),
        model: "tiny".to_owned(),
        identity: Some(v1::ModelIdentity {
            model_fingerprint: Bytes::from_static(&[1; 16]),
            weight_version: 1,
            kv_layout: "block-layer".to_owned(),
            block_size: 16,
            dtype: "bf16".to_owned(),
            tp: 1,
            protocol_min: 1,
            protocol_max: 1,
        }),
        prompt_tokens_max: 100,
        sequence_tokens_max: 128,
        block_count: 64,
        vocabulary_size: 96,
        grammar_version: 2,
        cpu_fallback: String::new(),
        peer_tag: Bytes::from_static(&[1; 32]),
        pooling: false,
        adapters: Vec::new(),
        both_roles: false,
        kv_windows: vec![0, 128],
        state_blocks: 5,
        sampling_version: 0,
    }
}

fn etcd_entry() -> String {
    let node = NodeId::parse("decode-0").expect("the name is valid");
    let epoch = Epoch::from_bytes(&[7; 16]).expect("16 bytes are an epoch");
    let value = json!({"version": 1, "node_id": node.as_str(), "epoch": epoch.to_string(),
        "role": "decode", "grpc": "http://127.0.0.1:50061"});
    format!("/baton/nodes/{}/{epoch}\n{value}", node.as_str())
}
