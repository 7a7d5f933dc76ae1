//! Mixtures of experts: names and routing, compared with dense models of the same arithmetic.

mod common;

use std::{fs, path::Path};

use common::{Element, Entry, Tensor, sequence::Runner};
use kernels::{Dtype, backend::ExpertScore, cpu::Isa};
use model::{Checkpoint, ExpertWeight, FeedForward, LayerWeight, LoadFormat, Weight};
use serde_json::{Value, json};

fn config(class: &str, name: &str, changes: &Value) -> Value {
    let mut config = json!({
        "architectures": [class], "model_type": name,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 211, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu"
    });
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    config
}

fn open(folder: &Path, config: &Value, format: LoadFormat) -> Result<Checkpoint, String> {
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    Checkpoint::open(folder, format).map_err(|error| error.to_string())
}

/// Classes and names of a family with experts and of the family without.
struct Families {
    dense: (&'static str, &'static str),
    experts: (&'static str, &'static str),
    /// Prefix of the names of a layer's experts, and the names of gate, up and down.
    prefix: &'static str,
    names: [&'static str; 3],
}

const QWEN3: Families = Families {
    dense: ("Qwen3ForCausalLM", "qwen3"),
    experts: ("Qwen3MoeForCausalLM", "qwen3_moe"),
    prefix: "mlp",
    names: ["gate_proj", "up_proj", "down_proj"],
};
const MISTRAL: Families = Families {
    dense: ("MistralForCausalLM", "mistral"),
    experts: ("MixtralForCausalLM", "mixtral"),
    prefix: "block_sparse_moe",
    names: ["w1", "w3", "w2"],
};

fn dense(families: &Families) -> Checkpoint {
    let folder = tempfile::tempdir().unwrap();
    let (class, name) = families.dense;
    let config = config(class, name, &json!({"sliding_window": null}));
    open(folder.path(), &config, LoadFormat::Dummy { seed: 5 }).unwrap()
}

fn experts_config((class, name): (&str, &str), changes: &Value) -> Value {
    let mut experts = json!({
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 96,
        "norm_topk_prob": true, "mlp_only_layers": [], "decoder_sparse_step": 1
    });
    experts.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    config(class, name, &experts)
}

fn dummy(changes: &Value) -> Result<Checkpoint, String> {
    let folder = tempfile::tempdir().unwrap();
    open(folder.path(), &experts_config(QWEN3.experts, changes), LoadFormat::Dummy { seed: 5 })
}

/// Writes the model of `changes`. Its tensors have the values of the dense model, those of expert E
/// the values that `expert` returns for those of the dense network, and the router those that
/// `router` returns for its own.
fn mixture(
    families: &Families,
    changes: &Value,
    router: impl Fn(&mut [f32]),
    expert: impl Fn(u32, ExpertWeight, &mut [f32]),
) -> Checkpoint {
    let config = experts_config(families.experts, changes);
    let folder = tempfile::tempdir().unwrap();
    let own = open(folder.path(), &config, LoadFormat::Dummy { seed: 5 }).unwrap();
    let dense = dense(families);
    let name = |weight: Weight| match weight {
        Weight::Layer(layer, LayerWeight::Expert(index, part)) => {
            let (prefix, name) = (families.prefix, families.names[part as usize]);
            format!("model.layers.{layer}.{prefix}.experts.{index}.{name}.weight")
        }
        Weight::Layer(layer, LayerWeight::Router) => {
            format!("model.layers.{layer}.{}.gate.weight", families.prefix)
        }
        _ => weight.hugging_face_name(own.config()),
    };
    let tensor = |weight: Weight| {
        let values = match weight {
            Weight::Layer(layer, LayerWeight::Expert(index, part)) => {
                let same = match part {
                    ExpertWeight::Gate => LayerWeight::Gate,
                    ExpertWeight::Up => LayerWeight::Up,
                    ExpertWeight::Down => LayerWeight::Down,
                };
                let mut values = common::elements(&dense, Weight::Layer(layer, same));
                expert(index, part, &mut values);
                values
            }
            Weight::Layer(_, LayerWeight::Router) => {
                let mut values = common::elements(&own, weight);
                router(&mut values);
                values
            }
            _ => common::elements(&dense, weight),
        };
        Tensor {
            name: name(weight),
            dims: weight.shape(own.config()).dims(),
            element: Element::F32,
            bytes: Element::F32.encode(&values),
        }
    };
    let tensors: Vec<Tensor> = Weight::all(own.config()).map(tensor).collect();
    common::write_folder(folder.path(), &tensors, 1);
    open(folder.path(), &config, LoadFormat::Auto).unwrap()
}

fn logits(checkpoint: &Checkpoint) -> Vec<Vec<f32>> {
    let mut runner = Runner::new(checkpoint, Dtype::F32, Isa::Auto, 64);
    let tokens: Vec<u32> = (0..29).map(|at| (at * at * 7 + at) % 211).collect();
    let mut sequence = runner.sequence(tokens.len());
    runner.forward(&mut [(&mut sequence, &tokens, tokens.len() as u32)])
}

fn worst(found: &[Vec<f32>], expected: &[Vec<f32>]) -> f32 {
    let pairs = found.iter().flatten().zip(expected.iter().flatten());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The weights of the chosen experts add up to 1, so equal experts are the dense network.
#[test]
fn equal_experts_have_the_logits_of_the_dense_network() {
    let expected = logits(&dense(&QWEN3));
    for changes in [
        json!({}),
        json!({"num_experts": null, "num_local_experts": 5, "num_experts_per_tok": 1}),
        // All experts: their probabilities add up to 1.
        json!({"norm_topk_prob": false, "num_experts_per_tok": 6}),
        json!({"mlp_only_layers": [1]}),
        json!({"decoder_sparse_step": 2}),
    ] {
        let found = logits(&mixture(&QWEN3, &changes, |_| (), |_, _, _| ()));
        assert!(worst(&found, &expected) < 1e-4, "{changes}: {}", worst(&found, &expected));
    }
    let other = logits(&mixture(&QWEN3, &json!({"norm_topk_prob": false}), |_| (), |_, _, _| ()));
    assert!(worst(&other, &expected) > 0.01);
}

#[test]
fn mixtral_has_the_logits_of_mistral_with_equal_experts() {
    let expected = logits(&dense(&MISTRAL));
    for changes in [json!({}), json!({"num_local_experts": 3, "num_experts_per_tok": 1})] {
        let mixtral = mixture(&MISTRAL, &changes, |_| (), |_, _, _| ());
        let experts = mixtral.config().experts().unwrap();
        assert!(experts.choice.is_normalized && experts.size == 96);
        let found = logits(&mixtral);
        assert!(worst(&found, &expected) < 1e-4, "{changes}: {}", worst(&found, &expected));
    }
    let other = mixture(&MISTRAL, &json!({"sliding_window": 4}), |_| (), |_, _, _| ());
    assert!(worst(&logits(&other), &expected) > 0.01);
}

/// A router of zeros gives equal probabilities, so the first experts are chosen.
#[test]
fn ties_choose_the_first_experts() {
    let expected = logits(&dense(&QWEN3));
    let zero = |router: &mut [f32]| router.fill(0.0);
    let only_first = |index: u32, _: ExpertWeight, values: &mut [f32]| {
        if index >= 3 {
            values.reverse();
        }
    };
    let found = logits(&mixture(&QWEN3, &json!({}), zero, only_first));
    assert!(worst(&found, &expected) < 1e-4);
    let four = logits(&mixture(&QWEN3, &json!({"num_experts_per_tok": 4}), zero, only_first));
    assert!(worst(&four, &expected) > 0.01);
    // Half of the output of expert 0, whose down matrix is twice as large, and half of expert 1,
    // which gives zeros.
    let halves = |index: u32, part: ExpertWeight, values: &mut [f32]| {
        if part == ExpertWeight::Down {
            values.iter_mut().for_each(|value| *value *= if index == 0 { 2.0 } else { 0.0 });
        }
    };
    let found = logits(&mixture(&QWEN3, &json!({"num_experts_per_tok": 2}), zero, halves));
    assert!(worst(&found, &expected) < 1e-4);
}

#[test]
fn chunks_and_single_tokens_change_no_bit_of_a_mixture() {
    let checkpoint = dummy(&json!({"num_experts": 16})).unwrap();
    let tokens: Vec<u32> = (0..40).map(|at| (at * at * 5 + at) % 211).collect();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let mut runner = Runner::new(&checkpoint, dtype, Isa::Auto, 64);
        let mut sequence = runner.sequence(tokens.len());
        let whole = runner.prefill(&mut sequence, &tokens, 64);
        for chunk in [1, 7, 16] {
            let mut sequence = runner.sequence(tokens.len());
            assert_eq!(runner.prefill(&mut sequence, &tokens, chunk), whole, "{dtype}, {chunk}");
        }
    }
}

#[test]
fn experts_of_a_configuration_are_read() {
    let experts = dummy(&json!({})).unwrap().config().experts().unwrap();
    assert_eq!((experts.count, experts.size, experts.choice.count), (6, 96, 3));
    assert!(experts.choice.is_normalized);
    let absent = ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"];
    let absent: serde_json::Map<String, Value> =
        absent.iter().map(|key| ((*key).to_owned(), Value::Null)).collect();
    let experts = dummy(&Value::Object(absent)).unwrap().config().experts().unwrap();
    assert_eq!((experts.count, experts.size, experts.choice.count), (128, 768, 8));
    assert!(!experts.choice.is_normalized);

    let is_dense = |changes: Value| -> Vec<bool> {
        let layers = dummy(&changes).unwrap().config().layers.clone();
        layers
            .into_iter()
            .map(|layer| matches!(layer.feed_forward, FeedForward::Gated(_)))
            .collect()
    };
    assert_eq!(is_dense(json!({})), [false, false]);
    assert_eq!(is_dense(json!({"mlp_only_layers": [0]})), [true, false]);
    assert_eq!(is_dense(json!({"decoder_sparse_step": 2})), [true, false]);
    assert_eq!(is_dense(json!({"num_experts": 0})), [true, true]);
}

#[test]
fn invalid_experts_are_refused_by_name() {
    for (changes, message) in [
        (json!({"num_experts_per_tok": 7}), "number of experts per token is 7; expected 1 to 6"),
        (json!({"num_experts_per_tok": 0}), "number of experts per token is 0; expected 1 to 6"),
        (json!({"num_experts": 100_000}), "number of experts is 100000; expected 1 to 4096"),
        (
            json!({"num_experts": 4096, "num_hidden_layers": 17}),
            "number of experts is 4096 in each of 17 layers; expected 1 to 65536 in all layers",
        ),
        (
            json!({"moe_intermediate_size": 0}),
            "feed-forward size of experts is 0; expected 1 to 1048576",
        ),
        (
            json!({"use_sliding_window": true}),
            "unsupported use_sliding_window: true; expected false",
        ),
    ] {
        let error = dummy(&changes).unwrap_err();
        assert!(error.ends_with(message), "{error}");
    }
    // A missing expert is named.
    let folder = tempfile::tempdir().unwrap();
    let own = dummy(&json!({})).unwrap();
    let tensors = common::hugging_face_tensors(&own, Element::F32);
    let missing = "model.layers.1.mlp.experts.4.up_proj.weight";
    let tensors: Vec<Tensor> = tensors.into_iter().filter(|it| it.name != missing).collect();
    common::write_folder(folder.path(), &tensors, 1);
    let error = open(folder.path(), &experts_config(QWEN3.experts, &json!({})), LoadFormat::Auto)
        .unwrap_err();
    assert!(
        error.ends_with(&format!("{missing:?} is missing; expected shape [96, 64]")),
        "{error}"
    );
}

/// Keys as in the files of the hub: GLM-4.5-Air's, with the sizes of the tiny model.
fn glm(changes: &Value) -> Result<Checkpoint, String> {
    let mut keys = json!({
        "attention_bias": true, "first_k_dense_replace": 1, "moe_intermediate_size": 24,
        "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 2, "norm_topk_prob": true,
        "num_experts_per_tok": 2, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": false
    });
    keys.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    let folder = tempfile::tempdir().unwrap();
    let config = config("Glm4MoeForCausalLM", "glm4_moe", &keys);
    open(folder.path(), &config, LoadFormat::Dummy { seed: 5 })
}

fn minimax(changes: &Value) -> Result<Checkpoint, String> {
    let mut keys = json!({
        "attn_type_list": [1, 1], "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8,
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "use_qk_norm": true,
        "use_routing_bias": true
    });
    keys.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    let folder = tempfile::tempdir().unwrap();
    let config = config("MiniMaxM2ForCausalLM", "minimax_m2", &keys);
    open(folder.path(), &config, LoadFormat::Dummy { seed: 5 })
}

#[test]
fn configurations_of_the_hub_describe_routing_and_rotary_part() {
    let checkpoint = glm(&json!({})).unwrap();
    let config = checkpoint.config();
    let experts = config.experts().unwrap();
    assert_eq!(experts.choice.score, ExpertScore::Sigmoid);
    assert_eq!((config.rotary_dim, experts.size, experts.shared.unwrap().size), (8, 24, 48));
    assert!(experts.has_bias && experts.choice.is_normalized);
    assert!(matches!(config.layers[0].feed_forward, FeedForward::Gated(_)));
    let whole = glm(&json!({"partial_rotary_factor": 1.0})).unwrap();
    assert_eq!(whole.config().rotary_dim, 16);
    let absent = glm(&json!({"partial_rotary_factor": null})).unwrap();
    assert_eq!(absent.config().rotary_dim, 8);
    let fingerprint = |checkpoint: &Checkpoint| checkpoint.model_fingerprint().unwrap();
    let own = fingerprint(&checkpoint);
    assert_eq!(fingerprint(&absent), own);
    for other in [
        json!({"partial_rotary_factor": 1.0}),
        json!({"use_qk_norm": true}),
        json!({"attention_bias": false}),
        json!({"routed_scaling_factor": 1.5}),
        json!({"n_group": 2}),
        json!({"n_shared_experts": 1}),
    ] {
        assert_ne!(fingerprint(&glm(&other).unwrap()), own, "{other}");
    }

    let checkpoint = minimax(&json!({})).unwrap();
    assert_eq!(
        (checkpoint.config().rotary_dim, checkpoint.config().experts().unwrap().size),
        (8, 96)
    );
}

#[test]
fn routing_variants_that_are_not_built_are_refused() {
    for (changes, message) in [
        (
            json!({"n_group": 3}),
            "number of groups of experts is 3; expected a divisor of the 8 experts",
        ),
        (
            json!({"n_group": 8}),
            "number of groups of experts is 8; expected a divisor of the 8 experts",
        ),
        (
            json!({"n_group": 4, "topk_group": 5}),
            "number of groups of experts per token is 5; expected 1 to 4",
        ),
        (
            json!({"n_group": 4, "num_experts_per_tok": 3}),
            "number of experts per token is 3; expected 1 to the 2 experts of its groups",
        ),
        (
            json!({"routed_scaling_factor": 0.0}),
            "scaling factor of experts is 0; expected above 0, up to 1000",
        ),
        (
            json!({"n_shared_experts": 0}),
            "feed-forward size of the shared expert is 0; expected 1 to 1048576",
        ),
        (
            json!({"partial_rotary_factor": 0.2}),
            "rotary dimension is 3; expected an even number from 2",
        ),
        (
            json!({"partial_rotary_factor": 1.5}),
            "rotary dimension is 24; expected an even number from 2 to the head dimension 16",
        ),
    ] {
        let Err(error) = glm(&changes) else { panic!("{changes} is accepted") };
        assert!(error.contains(message), "{error}");
    }
    for (changes, message) in [
        (
            json!({"scoring_func": "softmax"}),
            "unsupported scoring_func: \"softmax\"; expected \"sigmoid\"",
        ),
        (
            json!({"shared_intermediate_size": 64}),
            "unsupported shared_intermediate_size: 64; expected 0",
        ),
        (
            json!({"attn_type_list": [1, 0]}),
            "unsupported attn_type_list: 0; expected 1 for each layer",
        ),
    ] {
        let error = minimax(&changes).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let clipped = config("OlmoeForCausalLM", "olmoe", &json!({"clip_qkv": 8.0}));
    let error = open(folder.path(), &clipped, LoadFormat::Dummy { seed: 5 }).unwrap_err();
    assert!(error.ends_with("unsupported clip_qkv: 8; expected null"), "{error}");
    let partial = config("LlamaForCausalLM", "llama", &json!({"partial_rotary_factor": 0.5}));
    let error = open(folder.path(), &partial, LoadFormat::Dummy { seed: 5 }).unwrap_err();
    assert!(error.ends_with("unsupported partial_rotary_factor: 0.5; expected 1"), "{error}");
}

#[test]
fn layers_of_multi_token_prediction_are_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let own = glm(&json!({})).unwrap();
    let mut tensors = common::hugging_face_tensors(&own, Element::F32);
    let mut write = |name: &str| {
        let extra =
            Tensor { name: name.into(), dims: vec![1], element: Element::F32, bytes: vec![0; 4] };
        tensors.push(extra);
        common::write_folder(folder.path(), &tensors, 1);
        let keys = json!({
            "attention_bias": true, "first_k_dense_replace": 1, "moe_intermediate_size": 24,
            "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2
        });
        let config = config("Glm4MoeForCausalLM", "glm4_moe", &keys);
        open(folder.path(), &config, LoadFormat::Auto)
    };
    let opened = write("model.layers.2.eh_proj.weight").unwrap();
    assert_eq!(logits(&opened), logits(&own));
    let error = write("model.layers.1.eh_proj.weight").unwrap_err();
    assert!(error.contains("model.layers.1.eh_proj.weight"), "{error}");
}

/// Returns the GGUF file of the tiny Mixtral with the tensors that `change` leaves.
fn mixtral_gguf(change: impl Fn(&mut Vec<Tensor>)) -> Result<Checkpoint, String> {
    let changes = json!({"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": null});
    let folder = tempfile::tempdir().unwrap();
    let config = config("MixtralForCausalLM", "mixtral", &changes);
    let own = open(folder.path(), &config, LoadFormat::Dummy { seed: 5 }).unwrap();
    let mut tensors: Vec<Tensor> = Vec::new();
    for tensor in common::gguf_tensors(&own, Element::F32) {
        // One tensor has the matrices of all experts.
        match tensors.iter_mut().find(|known| known.name == tensor.name) {
            Some(known) if known.dims.len() == 2 => {
                known.dims.insert(0, 2);
                known.bytes.extend(tensor.bytes);
            }
            Some(known) => {
                known.dims[0] += 1;
                known.bytes.extend(tensor.bytes);
            }
            None => tensors.push(tensor),
        }
    }
    change(&mut tensors);
    let entries = [
        ("llama.expert_count", Some(Entry::U32(3))),
        ("llama.expert_used_count", Some(Entry::U32(2))),
    ];
    let path = folder.path().join("mixtral.gguf");
    fs::write(&path, common::gguf_with(own.config(), &tensors, &entries)).unwrap();
    let opened = Checkpoint::open(&path, LoadFormat::Auto).map_err(|error| error.to_string())?;
    assert_eq!(logits(&opened), logits(&own));
    Ok(opened)
}

#[test]
fn stacked_experts_of_gguf_files_are_read_by_expert() {
    let opened = mixtral_gguf(|_| ()).unwrap();
    let names: Vec<String> =
        opened.stored_weights().unwrap().into_iter().map(|weight| weight.name).collect();
    assert!(names.contains(&"blk.1.ffn_up_exps.weight[2]".to_owned()), "{names:?}");
    let mut known = names.clone();
    known.sort();
    known.dedup();
    assert_eq!(known.len(), names.len());

    let cut = |tensors: &mut Vec<Tensor>| {
        let tensor = tensors.iter_mut().find(|it| it.name == "blk.0.ffn_down_exps.weight").unwrap();
        tensor.dims[0] = 2;
        tensor.bytes.truncate(tensor.bytes.len() / 3 * 2);
    };
    let error = mixtral_gguf(cut).unwrap_err();
    assert!(error.contains("\"blk.0.ffn_down_exps.weight\""), "{error}");
    assert!(error.contains("[2, 64, 96]; expected [3, 64, 96]"), "{error}");
    let error =
        mixtral_gguf(|tensors| tensors.retain(|it| !it.name.contains("gate_exps"))).unwrap_err();
    assert!(error.contains("\"blk.0.ffn_gate_exps.weight\" is missing"), "{error}");
}
