//! Configurations of both formats: valid ones, rejected ones and the error messages.

mod common;

use std::{fs, num::NonZeroUsize};

use common::Entry;
use model::{
    AttentionSpec, Checkpoint, Family, LoadFormat, Mixer, ModelConfig, ModelError, RopeScaling,
};
use serde_json::{Value, json};

/// Opens the tiny model's configuration with some keys changed; null removes a key.
fn open(changes: Value) -> Result<ModelConfig, ModelError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    let mut config: Value =
        serde_json::from_slice(&fs::read(common::fixture("tiny_llama3/config.json")).unwrap())
            .unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    fs::write(&path, config.to_string()).unwrap();
    let checkpoint = Checkpoint::open(&path, LoadFormat::Dummy { seed: 0 })?;
    Ok(checkpoint.config().clone())
}

fn refusal(changes: Value) -> String {
    let message = open(changes).unwrap_err().to_string();
    // Every message names the file first; each test has its own folder.
    let (_, message) = message.split_once("config.json: ").expect("names the file");
    message.to_owned()
}

#[test]
fn a_hugging_face_configuration_is_read() {
    let config = open(json!({})).unwrap();
    assert_eq!(config.hidden_size, 32);
    assert_eq!(config.ffn_size, 64);
    assert_eq!(config.layer_count, 3);
    assert_eq!((config.query_head_count, config.kv_head_count, config.head_dim), (4, 2, 16));
    assert_eq!((config.vocab_size, config.context_tokens), (96, 256));
    assert_eq!((config.rms_eps, config.rope_theta), (1e-5, 10000.0));
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_frequency_factor: 1.0,
        high_frequency_factor: 4.0,
        original_context_tokens: 64.0,
    };
    assert_eq!(config.rope_scaling, scaling);
    assert!(!config.tied_output);
    assert_eq!((config.bos_token_id, config.eos_token_ids.as_slice()), (Some(1), &[2, 3][..]));
    assert_eq!(config.attention_scale(), 0.25);
    let layer = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 64 + 2 * 32;
    assert_eq!(config.parameter_count(), 2 * 96 * 32 + 3 * layer + 32);
}

#[test]
fn first_difference_of_two_configurations_is_named() {
    let config = open(json!({})).unwrap();
    assert_eq!(config.difference(&config), None);
    type Change = fn(&mut ModelConfig);
    let changes: [(&str, Change); 20] = [
        ("family", |it| it.family = Family::named("qwen3").unwrap()),
        ("hidden_size", |it| it.hidden_size += 1),
        ("layer_count", |it| it.layer_count += 1),
        ("query_head_count", |it| it.query_head_count += 1),
        ("kv_head_count", |it| it.kv_head_count += 1),
        ("head_dim", |it| it.head_dim += 1),
        ("rotary_dim", |it| it.rotary_dim += 1),
        ("ffn_size", |it| it.ffn_size += 1),
        ("vocab_size", |it| it.vocab_size += 1),
        ("context_tokens", |it| it.context_tokens += 1),
        ("rms_eps", |it| it.rms_eps *= 2.0),
        ("query_pre_attn_scalar", |it| it.query_pre_attn_scalar *= 2.0),
        ("rope_theta", |it| it.rope_theta *= 2.0),
        ("window_rope_theta", |it| it.window_rope_theta = Some(1e4)),
        ("rope_scaling", |it| it.rope_scaling = RopeScaling::None),
        ("rope_attention_factor", |it| it.rope_attention_factor = 1.5),
        ("layers", |it| {
            let attention = it.layers[2].attention().unwrap();
            let window = Some(NonZeroUsize::MIN);
            it.layers[2].mixer = Mixer::Attention(AttentionSpec { window, ..attention });
        }),
        ("tied_output", |it| it.tied_output = true),
        ("bos_token_id", |it| it.bos_token_id = None),
        ("eos_token_ids", |it| it.eos_token_ids.clear()),
    ];
    for (field, change) in changes {
        let mut other = config.clone();
        change(&mut other);
        let found = config.difference(&other).map(|(field, ..)| field);
        assert_eq!(found, Some(field));
    }
    let other = ModelConfig { vocab_size: 97, rope_theta: 5e5, ..config.clone() };
    let named = ("vocab_size", "96".to_owned(), "97".to_owned());
    assert_eq!(config.difference(&other), Some(named));
}

#[test]
fn absent_keys_have_the_defaults_of_transformers() {
    let config = open(json!({
        "head_dim": null, "num_key_value_heads": null, "rope_theta": null, "rope_scaling": null,
        "rms_norm_eps": null, "tie_word_embeddings": null, "max_position_embeddings": null,
        "eos_token_id": null, "bos_token_id": null, "hidden_act": null, "architectures": null,
    }))
    .unwrap();
    assert_eq!((config.head_dim, config.kv_head_count), (8, 4));
    assert_eq!((config.rope_theta, config.rms_eps), (10000.0, 1e-6));
    assert_eq!((config.rope_scaling, config.context_tokens), (RopeScaling::None, 2048));
    assert!(!config.tied_output && config.eos_token_ids.is_empty());
    assert_eq!(config.bos_token_id, None);
}

#[test]
fn absent_keys_have_the_defaults_of_each_architecture() {
    let open = |class: &str, changes: Value| {
        let mut config: Value =
            serde_json::from_slice(&fs::read(common::fixture("tiny_llama3/config.json")).unwrap())
                .unwrap();
        for key in ["head_dim", "num_key_value_heads", "max_position_embeddings"] {
            config.as_object_mut().unwrap().remove(key);
        }
        config["architectures"] = json!([class]);
        config["num_attention_heads"] = json!(32);
        config["hidden_size"] = json!(128);
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        fs::write(&path, config.to_string()).unwrap();
        Checkpoint::open(&path, LoadFormat::Dummy { seed: 0 }).map(|it| it.config().clone())
    };
    let shape =
        |config: ModelConfig| (config.kv_head_count, config.head_dim, config.context_tokens);
    assert_eq!(shape(open("LlamaForCausalLM", json!({})).unwrap()), (32, 4, 2048));
    assert_eq!(shape(open("MistralForCausalLM", json!({})).unwrap()), (8, 4, 131_072));
    assert_eq!(shape(open("Qwen2ForCausalLM", json!({})).unwrap()), (32, 4, 32_768));
    assert_eq!(shape(open("Qwen3ForCausalLM", json!({})).unwrap()), (32, 128, 32_768));

    let without = json!({"rope_theta": null, "rope_scaling": null, "rms_norm_eps": null, "tie_word_embeddings": null});
    for (class, theta, eps, is_tied) in [
        ("MistralForCausalLM", 1e4, 1e-6, false),
        ("MixtralForCausalLM", 1e6, 1e-5, false),
        ("OlmoeForCausalLM", 1e4, 1e-5, false),
        ("Glm4MoeForCausalLM", 1e4, 1e-5, false),
        ("MiniMaxM2ForCausalLM", 5e6, 1e-6, false),
        ("Ernie4_5_MoeForCausalLM", 5e5, 1e-5, true),
    ] {
        let config = open(class, without.clone()).unwrap();
        let found = (config.rope_theta, config.rms_eps, config.tied_output);
        assert_eq!(found, (theta, eps, is_tied), "{class}");
    }
    let refused = |key: &str, value: Value| {
        open("Ernie4_5_MoeForCausalLM", json!({key: value})).unwrap_err().to_string()
    };
    assert!(
        refused("use_bias", json!(true)).ends_with("unsupported use_bias: true; expected false")
    );
    let message = refused("moe_norm_min", json!(0.5));
    assert!(message.ends_with("unsupported moe_norm_min: 0.5; expected 1e-12"), "{message}");

    let window = |class: &str, changes: Value| {
        let config = open(class, changes).unwrap();
        let windows = config.layers.iter().map(|layer| layer.window().map_or(0, NonZeroUsize::get));
        <[usize; 3]>::try_from(windows.collect::<Vec<_>>()).unwrap()
    };
    // An absent key means the default, null means none.
    assert_eq!(window("MistralForCausalLM", json!({})), [4096; 3]);
    assert_eq!(window("MistralForCausalLM", json!({"sliding_window": null})), [0; 3]);
    assert_eq!(window("LlamaForCausalLM", json!({"sliding_window": 5})), [0; 3]);
    assert_eq!(window("Qwen2ForCausalLM", json!({"sliding_window": 5})), [0; 3]);
    let on = json!({"use_sliding_window": true, "sliding_window": 5, "max_window_layers": 2});
    assert_eq!(window("Qwen2ForCausalLM", on), [0, 0, 5]);
    let all_full = json!({"use_sliding_window": true, "max_window_layers": 3});
    assert_eq!(window("Qwen3ForCausalLM", all_full), [0; 3]);
    let types = json!({"use_sliding_window": true, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]});
    assert_eq!(window("Qwen3ForCausalLM", types), [5, 0, 5]);

    let refusal = |changes| open("Qwen3ForCausalLM", changes).unwrap_err().to_string();
    let few = json!({"use_sliding_window": true, "layer_types": ["sliding_attention"]});
    let message = refusal(few);
    assert!(message.ends_with("number of layer types is 1; expected 3 (one for each layer)"));
    let chunked = json!({"use_sliding_window": true, "layer_types": ["chunked_attention"]});
    let message = refusal(chunked);
    assert!(
        message.contains("key \"layer_types\": unknown variant `chunked_attention`"),
        "{message}"
    );
}

/// The keys are those of the hub's models of 4B and 27B, and of a model of transformers 5.
#[test]
fn gemma3_is_read_alone_and_in_a_multimodal_model() {
    let read = |config: &Value| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        fs::write(&path, config.to_string()).unwrap();
        Checkpoint::open(&path, LoadFormat::Dummy { seed: 0 }).map(|it| it.config().clone())
    };
    let multimodal = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 12,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024
        }
    });
    let config = read(&multimodal).unwrap();
    let heads = (config.query_head_count, config.kv_head_count, config.head_dim);
    assert_eq!((heads, config.vocab_size), ((8, 4, 256), 262_208));
    assert_eq!((config.rope_theta, config.window_rope_theta), (1e6, Some(1e4)));
    assert_eq!(config.rope_scaling, RopeScaling::Linear { factor: 8.0 });
    assert_eq!((config.attention_scale(), config.embedding_scale()), (1.0 / 16.0, 50.5));
    assert_eq!((config.tied_output, config.eos_token_ids), (true, vec![1, 106]));
    let has_window = config.layers.iter().map(|layer| layer.window().is_some());
    assert_eq!(has_window.collect::<Vec<_>>(), [[true; 5].as_slice(), &[false]].concat().repeat(2));

    let alone = json!({
        "architectures": ["Gemma3ForCausalLM"], "hidden_size": 5376, "intermediate_size": 21504,
        "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000, "factor": 4}
        }
    });
    let with = |key: &str, value: Value| {
        let mut config = alone.clone();
        config[key] = value;
        read(&config)
    };
    let config = read(&alone).unwrap();
    assert_eq!((config.rope_theta, config.window_rope_theta), (1e3, Some(500.0)));
    assert_eq!(config.rope_scaling, RopeScaling::Linear { factor: 4.0 });
    assert_eq!(config.attention_scale(), 1.0 / 168.0_f32.sqrt());
    let old = json!({"rope_type": "linear", "factor": 4});
    assert_eq!(with("rope_parameters", old).unwrap().window_rope_theta, Some(1e4));

    let yarn = json!({"full_attention": {"rope_type": "yarn", "factor": 4}});
    let scaled = json!({"sliding_attention": {"rope_type": "linear", "factor": 4}});
    for (key, value, message) in [
        (
            "attn_logit_softcapping",
            json!(50.0),
            "unsupported attn_logit_softcapping: 50; expected null",
        ),
        (
            "final_logit_softcapping",
            json!(30),
            "unsupported final_logit_softcapping: 30; expected null",
        ),
        (
            "sliding_window",
            json!(0),
            "unsupported sliding_window: none; expected a number of tokens",
        ),
        (
            "use_bidirectional_attention",
            json!(true),
            "use_bidirectional_attention: true; expected false",
        ),
        ("hidden_activation", json!("gelu"), "\"gelu\"; expected \"gelu_pytorch_tanh\""),
        (
            "rope_parameters",
            scaled,
            "sliding_attention.rope_type: \"linear\"; expected \"default\"",
        ),
        ("rope_parameters", yarn, "expected 1 if layers with a window have another RoPE"),
        ("query_pre_attn_scalar", json!(0), "query_pre_attn_scalar is 0; expected 1 to 1024"),
        ("rope_local_base_freq", json!(0), "rope theta of windows is 0; expected 1 to 1e12"),
    ] {
        let mut config = alone.clone();
        if key == "rope_local_base_freq" {
            config["rope_parameters"] = Value::Null;
        }
        config[key] = value;
        let error = read(&config).unwrap_err().to_string();
        assert!(error.ends_with(message), "{error}");
    }
    let mut incomplete = multimodal;
    incomplete["text_config"]["hidden_size"] = Value::Null;
    let error = read(&incomplete).unwrap_err().to_string();
    assert!(error.ends_with("key \"text_config.hidden_size\": is missing"), "{error}");
}

#[test]
fn rope_is_read_in_old_and_new_spelling() {
    let linear = RopeScaling::Linear { factor: 2.5 };
    let old = open(json!({"rope_scaling": {"type": "linear", "factor": 2.5}})).unwrap();
    assert_eq!((old.rope_theta, old.rope_scaling), (10000.0, linear.clone()));
    let new = open(json!({
        "rope_theta": null, "rope_scaling": null,
        "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500000}
    }))
    .unwrap();
    assert_eq!((new.rope_theta, new.rope_scaling), (500_000.0, linear));
    let plain = open(json!({"rope_scaling": {"rope_type": "default"}})).unwrap();
    assert_eq!(plain.rope_scaling, RopeScaling::None);
}

#[test]
fn generation_config_adds_end_tokens() {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(common::fixture("tiny_llama3/config.json"), folder.path().join("config.json"))
        .unwrap();
    fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": [3, 9]}"#).unwrap();
    let checkpoint = Checkpoint::open(folder.path(), LoadFormat::Dummy { seed: 0 }).unwrap();
    assert_eq!(checkpoint.config().eos_token_ids, [2, 3, 9]);
}

#[test]
fn configurations_that_transformers_loads_are_read() {
    let plain = open(json!({})).unwrap();
    for changes in [
        json!({"vocab_size": 96.0, "hidden_size": 32.0, "num_hidden_layers": 3.0}),
        json!({"max_position_embeddings": plain.context_tokens as f64, "rope_theta": 10_000}),
        json!({"eos_token_id": [2.0, 3.0], "bos_token_id": 1.0}),
        json!({"eos_token_id": [2, null, 3, -1], "bos_token_id": [1]}),
        json!({"architectures": "LlamaForCausalLM", "hidden_act": "swish"}),
        json!({"architectures": [], "model_type": "llama"}),
        json!({"architectures": ["Custom", "LlamaForCausalLM"], "sliding_window": "unknown"}),
    ] {
        let read = open(changes.clone()).unwrap_or_else(|error| panic!("{changes}: {error}"));
        assert_eq!(read.difference(&plain), None, "{changes}");
    }
    let none = open(json!({"eos_token_id": -1, "bos_token_id": -1})).unwrap();
    assert_eq!((none.bos_token_id, none.eos_token_ids), (None, vec![]));
    assert_eq!(
        refusal(json!({"hidden_size": 32.5})),
        "key \"hidden_size\": invalid type: floating point `32.5`, expected usize"
    );
}

#[test]
fn unsupported_features_are_rejected_by_name() {
    assert_eq!(
        refusal(json!({"rope_scaling": {"rope_type": "axial", "factor": 4.0}})),
        "unsupported rope_scaling.rope_type: \"axial\"; expected \"default\", \"linear\", \
         \"dynamic\", \"yarn\", \"longrope\" or \"llama3\""
    );
    let cases = [
        (
            json!({"architectures": ["GemmaForCausalLM"]}),
            "unsupported architecture \"GemmaForCausalLM\"; expected one of \
             \"Ernie4_5_MoeForCausalLM\", \"Gemma3ForCausalLM\", \"Gemma3ForConditionalGeneration\", \
             \"Glm4MoeForCausalLM\", \"GptOssForCausalLM\", \"LlamaForCausalLM\", \
             \"MiniMaxM2ForCausalLM\", \"MistralForCausalLM\", \"MixtralForCausalLM\", \"OlmoeForCausalLM\", \
             \"Qwen2ForCausalLM\", \"Qwen2MoeForCausalLM\", \"Qwen3ForCausalLM\", \
             \"Qwen3_5ForCausalLM\", \"Qwen3_5ForConditionalGeneration\", \"Qwen3_5MoeForCausalLM\", \
             \"Qwen3_5MoeForConditionalGeneration\", \"Qwen3MoeForCausalLM\", \"Qwen3NextForCausalLM\"",
        ),
        (
            json!({"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "fp8"}}),
            "unsupported quantization_config.quant_method: \"fp8\"; expected \"mxfp4\"",
        ),
        (json!({"hidden_act": "gelu"}), "unsupported hidden_act: \"gelu\"; expected \"silu\""),
        (
            json!({"architectures": ["Qwen3ForCausalLM"], "attention_bias": true}),
            "unsupported attention_bias: true; expected false",
        ),
        (
            json!({"rope_parameters": {"partial_rotary_factor": 0.5}}),
            "unsupported rope_parameters.partial_rotary_factor: 0.5; expected 1",
        ),
        (json!({"attention_bias": true}), "unsupported attention_bias: true; expected false"),
        (
            json!({"quantization_config": {"quant_method": "modelopt"}}),
            "unsupported quantization_config.quant_method: \"modelopt\"; expected \"fp8\", \"gptq\", \"awq\", \
             \"compressed-tensors\" with FP8 or INT4 weights, no quantization_config, or a GGUF file",
        ),
    ];
    for (changes, message) in cases {
        assert_eq!(refusal(changes), message);
    }
}

#[test]
fn invalid_values_are_rejected_with_key_value_and_range() {
    let cases = [
        (json!({"hidden_size": null}), "key \"hidden_size\": is missing"),
        (
            json!({"hidden_size": "big"}),
            "key \"hidden_size\": invalid type: string \"big\", expected usize",
        ),
        (
            json!({"num_hidden_layers": -3}),
            "key \"num_hidden_layers\": invalid value: integer `-3`, expected usize",
        ),
        (json!({"num_hidden_layers": 0}), "layer count is 0; expected 1 to 4096"),
        (
            json!({"vocab_size": 1e18 as u64}),
            "vocabulary size is 1000000000000000000; expected 1 to 4194304",
        ),
        (
            json!({"num_key_value_heads": 3}),
            "KV head count is 3; expected a divisor of the 4 attention heads",
        ),
        (
            json!({"num_attention_heads": 5, "head_dim": null}),
            "num_attention_heads is 5; expected a divisor of the hidden size 32",
        ),
        (
            json!({"num_attention_heads": 0, "head_dim": null}),
            "num_attention_heads is 0; expected a divisor of the hidden size 32",
        ),
        (json!({"head_dim": 7}), "head dimension is 7; expected an even number"),
        (json!({"rms_norm_eps": 3.0}), "RMS norm epsilon is 3; expected 0 to 0.1"),
        (json!({"rope_theta": 0}), "rope theta is 0; expected 1 to 1e12"),
        (
            json!({"eos_token_id": 96}),
            "bos or eos token id is 96; expected less than the vocabulary size 96",
        ),
        (
            json!({"rope_scaling": {"rope_type": "linear"}}),
            "key \"rope_scaling.factor\": is missing",
        ),
        (
            json!({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}),
            "rope scaling factor is 0; expected 1 to 1e6",
        ),
        (
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4,
                "high_freq_factor": 4, "original_max_position_embeddings": 8192}}),
            "rope scaling is low 4, high 4; expected low frequency factor > 0, \
             high above it, up to 1e6",
        ),
        (
            json!({"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 1}}),
            "rope scaling is beta_slow 1, beta_fast 1; expected beta_slow > 0, beta_fast above it, up to 1e6",
        ),
        (
            json!({"rope_scaling": {"rope_type": "yarn", "factor": 4, "rope_theta": 1}}),
            "rope theta is 1; expected above 1 with YaRN, up to 1e12",
        ),
        (
            json!({"rope_scaling": {"rope_type": "yarn", "factor": 4, "attention_factor": 0}}),
            "rope attention factor is 0; expected 0.1 to 10",
        ),
        (
            json!({"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 0}}),
            "rope scaling's original context is 0; expected 1 to 67108864",
        ),
        (
            json!({"rope_scaling": {"rope_type": "dynamic"}}),
            "key \"rope_scaling.factor\": is missing",
        ),
        (
            json!({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}),
            "number of rope divisors is 1; expected 8 (half the rotary dimension)",
        ),
        (
            json!({"architectures": ["Glm4MoeForCausalLM"], "head_dim": 16,
                "rope_scaling": {"rope_type": "yarn", "factor": 4}}),
            "rope attention factor is 1.1386294; expected 1 with partial RoPE",
        ),
    ];
    for (changes, message) in cases {
        assert_eq!(refusal(changes), message);
    }
}

/// Opens a GGUF file of the tiny model without rope scaling and with some entries changed.
fn open_gguf(changes: &[(&str, Option<Entry<'_>>)]) -> Result<ModelConfig, ModelError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    let config =
        ModelConfig { rope_scaling: RopeScaling::None, ..common::tiny_llama3().config().clone() };
    fs::write(&path, common::gguf_with(&config, &[], changes)).unwrap();
    // Other tests check weights; here the file has none.
    let checkpoint = Checkpoint::open(&path, LoadFormat::Dummy { seed: 0 })?;
    Ok(checkpoint.config().clone())
}

#[test]
fn a_gguf_configuration_is_read() {
    let config = open_gguf(&[
        ("tokenizer.ggml.bos_token_id", Some(Entry::U32(1))),
        ("tokenizer.ggml.eos_token_id", Some(Entry::U32(2))),
        ("tokenizer.ggml.eot_token_id", Some(Entry::U32(9))),
        ("llama.rope.scaling.type", Some(Entry::Text("linear"))),
        ("llama.rope.scaling.factor", Some(Entry::F32(2.5))),
    ])
    .unwrap();
    let expected = ModelConfig {
        rope_scaling: RopeScaling::Linear { factor: 2.5 },
        // Without an output tensor the output is the embedding.
        tied_output: true,
        bos_token_id: Some(1),
        eos_token_ids: vec![2, 9],
        ..common::tiny_llama3().config().clone()
    };
    assert_eq!(config, expected);
}

#[test]
fn token_ids_of_minus_one_in_gguf_files_are_absent() {
    let none = Some(Entry::U32(u32::MAX));
    let config = open_gguf(&[
        ("tokenizer.ggml.bos_token_id", none),
        ("tokenizer.ggml.eos_token_id", Some(Entry::U32(2))),
        ("tokenizer.ggml.eot_token_id", none),
    ])
    .unwrap();
    assert_eq!((config.bos_token_id, config.eos_token_ids), (None, vec![2]));
}

#[test]
fn absent_gguf_keys_have_the_formats_defaults() {
    let config = open_gguf(&[
        ("llama.attention.key_length", None),
        ("llama.attention.head_count_kv", None),
        ("llama.rope.freq_base", None),
    ])
    .unwrap();
    assert_eq!((config.head_dim, config.kv_head_count), (8, 4));
    assert_eq!((config.rope_theta, config.rope_scaling), (10000.0, RopeScaling::None));
}

#[test]
fn invalid_gguf_configurations_are_rejected_by_key() {
    let cases = [
        (
            ("llama.rope.scaling.type", Some(Entry::Text("yarn"))),
            "unsupported llama.rope.scaling.type: \"yarn\"; \
             expected \"none\" or \"linear\"",
        ),
        (
            ("general.architecture", Some(Entry::Text("gemma3"))),
            "unsupported architecture \"gemma3\"; expected one of \"llama\", \"qwen2\", \"qwen2moe\", \
             \"qwen3\", \"qwen3moe\"",
        ),
        (
            ("llama.expert_count", Some(Entry::U32(8))),
            "metadata key \"llama.expert_used_count\" is missing; expected u64",
        ),
        (
            ("llama.rope.dimension_count", Some(Entry::U32(8))),
            "unsupported llama.rope.dimension_count: 8; \
             expected the head dimension",
        ),
        (
            ("llama.block_count", None),
            "metadata key \"llama.block_count\" is missing; expected u64",
        ),
        (
            ("llama.block_count", Some(Entry::Text("many"))),
            "metadata key \"llama.block_count\" is string; expected u64",
        ),
        (
            ("llama.attention.head_count_kv", Some(Entry::U32(3))),
            "KV head count is 3; expected a divisor of the 4 attention heads",
        ),
        (
            ("llama.vocab_size", None),
            "metadata key \"tokenizer.ggml.tokens\" is missing; expected array of string",
        ),
    ];
    for (change, message) in cases {
        let error = open_gguf(&[change]).unwrap_err().to_string();
        let (_, found) = error.split_once("tiny.gguf: ").expect("names the file");
        assert_eq!(found, message);
    }
}

#[test]
fn files_without_a_configuration_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    let open = || Checkpoint::open(&path, LoadFormat::Dummy { seed: 0 }).map(drop);
    let missing = open().unwrap_err();
    assert!(matches!(missing, ModelError::Io { action: "open", .. }));
    // The message has the cause, so a printed chain of errors must not have it again.
    assert!(missing.to_string().contains("No such file"), "{missing}");
    assert!(std::error::Error::source(&missing).is_none());
    fs::write(&path, "{\"hidden_size\": 3").unwrap();
    assert!(matches!(open(), Err(ModelError::Json { .. })));
    fs::write(&path, "[1]").unwrap();
    assert!(matches!(open(), Err(ModelError::NotAModel { .. })));
    fs::write(&path, "[".repeat(100_000)).unwrap();
    assert!(matches!(open(), Err(ModelError::Json { .. })));
    fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
    assert!(matches!(open(), Err(ModelError::FileTooLarge { .. })));
}

#[test]
fn frequencies_equal_those_of_transformers() {
    let reference = common::reference();
    let base = open(json!({})).unwrap();
    for case in reference["rope"].as_array().unwrap() {
        let number = |value: &Value| value.as_f64().unwrap() as f32;
        let scaling = &case["scaling"];
        let rope_scaling = match scaling["rope_type"].as_str() {
            None => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor: number(&scaling["factor"]) },
            Some(_) => RopeScaling::Llama3 {
                factor: number(&scaling["factor"]),
                low_frequency_factor: number(&scaling["low_freq_factor"]),
                high_frequency_factor: number(&scaling["high_freq_factor"]),
                original_context_tokens: number(&scaling["original_max_position_embeddings"]),
            },
        };
        let config = ModelConfig {
            rotary_dim: case["head_dim"].as_u64().unwrap() as usize,
            rope_theta: number(&case["theta"]),
            rope_scaling,
            ..base.clone()
        };
        let frequencies = config.rope_frequencies();
        let expected = case["frequencies"].as_array().unwrap();
        assert_eq!(frequencies.len(), expected.len());
        for (pair, (&found, expected)) in frequencies.iter().zip(expected).enumerate() {
            let expected = number(expected);
            // Powers differ by one ulp between libraries; interpolation may double the
            // difference.
            let ulps = found.to_bits().abs_diff(expected.to_bits());
            assert!(ulps <= 2, "{}: pair {pair} is {found}, expected {expected}", case["name"]);
        }
    }
}

#[test]
fn scaled_frequencies_and_attention_factors_equal_those_of_transformers() {
    let cases = fs::read(common::fixture("rope.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_slice(&cases).unwrap();
    assert_eq!(cases.len(), 9);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let config = open(case["config"].clone()).unwrap();
        let number = |value: &Value| value.as_f64().unwrap() as f32;
        let factor = number(&case["attention_factor"]);
        assert!((config.rope_attention_factor / factor - 1.0).abs() < 1e-6, "{name}");
        let scale = factor * factor / (config.head_dim as f32).sqrt();
        assert!((config.attention_scale() / scale - 1.0).abs() < 1e-6, "{name}");
        let expected = case["frequencies"].as_array().unwrap();
        assert_eq!(config.rope_frequencies().len(), expected.len(), "{name}");
        for (pair, found) in config.rope_frequencies().into_iter().enumerate() {
            let expected = number(&expected[pair]);
            let difference = (found / expected - 1.0).abs();
            assert!(difference < 1e-6, "{name}: pair {pair} is {found}, expected {expected}");
        }
        assert_eq!(config.context_tokens as u64, case["context_tokens"], "{name}");
    }
}

#[test]
fn llama3_scaling_follows_the_formula_by_hand() {
    // theta 10000 and dimension 16: frequencies 10^(-i/2), wavelengths 2 pi 10^(i/2).
    let frequencies = open(json!({})).unwrap().rope_frequencies();
    // Wavelength 6.28 < 64 / 4: kept. 198.7 > 64 / 1: divided by 8.
    assert_eq!(frequencies[0], 1.0);
    assert!((frequencies[3] - 0.031_622_776 / 8.0).abs() < 1e-9);
    // Wavelength 19.869177 lies between: smooth = (64 / 19.869177 - 1) / 3 = 0.7403567, so
    // 0.2596433 * 0.31622777 / 8 + 0.7403567 * 0.31622777 = 0.2443846.
    assert!((frequencies[1] - 0.244_384_6).abs() < 1e-6, "{}", frequencies[1]);
}

#[test]
fn base_class_has_no_output_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let open = |class: &str| {
        let text =
            fs::read_to_string(common::fixture("architectures/mistral/config.json")).unwrap();
        let path = folder.path().join("config.json");
        fs::write(&path, text.replace("MistralForCausalLM", class)).unwrap();
        Checkpoint::open(path, LoadFormat::Dummy { seed: 1 }).map(|it| it.config().clone())
    };
    let [whole, base] = ["MistralForCausalLM", "MistralModel"].map(|class| open(class).unwrap());
    assert_eq!([whole.tied_output, base.tied_output], [false, true]);
    assert_eq!(whole.family, base.family);
    for class in ["MistralForSequenceClassification", "Mistral", "Model"] {
        let refused = open(class).unwrap_err().to_string();
        assert!(refused.contains(class), "{refused}");
    }
}
