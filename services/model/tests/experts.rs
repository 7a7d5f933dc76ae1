//! Mixtures of experts: names and routing, compared with dense models of the same arithmetic.

mod common;

use std::{fs, path::Path};

use common::{Element, Tensor, sequence::Runner};
use kernels::{Dtype, cpu::Isa};
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

/// Writes the model of `changes`. Its tensors have the values of the dense model, those of expert E the values that
/// `expert` returns for those of the dense network, and the router those that `router` returns for its own.
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
    // Half of the output of expert 0, whose down matrix is twice as large, and half of expert 1, which gives zeros.
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
        layers.into_iter().map(|layer| layer.feed_forward == FeedForward::Gated).collect()
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
