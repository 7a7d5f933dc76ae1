//! Which models there are kernels for on a GPU, checked before weights are read.

use kernels::{
    KvFormat, Shard, WeightFormat,
    backend::{HeadShape, NormSpan},
    cuda::{
        AttentionKind, CudaError, CudaOptions, DELTA_DIM_MAX, DELTA_DIM_UNIT, EXPERT_GROUPS_MAX,
        EXPERTS_CHOSEN_MAX, EXPERTS_MAX, supports_fp8_kv,
    },
    mxfp4::GROUP as MXFP4_GROUP,
};
use model::Checkpoint;

use super::CudaExecutorError;

/// Checks that there are kernels on GPUs for matrices in INT4, if the model has such matrices.
fn check_int4(checkpoint: &Checkpoint, compute: u32) -> Result<(), CudaExecutorError> {
    let (what, value, allowed) = if !checkpoint.has_int4() {
        return Ok(());
    } else if checkpoint.config().experts().is_some() {
        let what = "the format of the matrices of a model with experts";
        (what, "INT4".to_owned(), "F32, F16, BF16, FP8 or MXFP4 on GPUs, or node.device = \"cpu\"")
    } else if compute != 90 {
        let what = "the compute capability of a GPU for matrices in INT4";
        (what, format!("{}.{}", compute / 10, compute % 10), "9.0, or node.device = \"cpu\"")
    } else {
        return Ok(());
    };
    Err(CudaError::Unsupported { what, value, allowed }.into())
}

/// Checks that there are kernels on a GPU of this compute capability for linear attention, if the
/// model has such layers.
fn check_delta(checkpoint: &Checkpoint, compute: u32) -> Result<(), CudaExecutorError> {
    let Some(state) = checkpoint.config().state_shape() else { return Ok(()) };
    let has_kernel = |dim: &usize| dim.is_multiple_of(DELTA_DIM_UNIT) && *dim <= DELTA_DIM_MAX;
    let dims = [state.key_dim, state.value_dim];
    let (what, value, allowed) = if compute != 90 {
        let what = "the compute capability of a GPU for linear attention";
        (what, format!("{}.{}", compute / 10, compute % 10), "9.0, or node.device = \"cpu\"")
    } else if let Some(dim) = dims.iter().find(|dim| !has_kernel(dim)) {
        let what = "a head size of linear attention";
        (what, dim.to_string(), "multiples of 4 up to 256 on GPUs, or node.device = \"cpu\"")
    } else {
        return Ok(());
    };
    Err(CudaError::Unsupported { what, value, allowed }.into())
}

/// Checks that there are kernels for the model on a GPU of this compute capability, with these
/// formats of weights and KV.
pub fn check_model(
    checkpoint: &Checkpoint,
    shard: Shard,
    (options, compute): (&CudaOptions, u32),
) -> Result<(), CudaExecutorError> {
    let (config, weights) = (checkpoint.config(), options.weights);
    config.check_shard(shard)?;
    check_int4(checkpoint, compute)?;
    check_delta(checkpoint, compute)?;
    check_kv_format(config.head_shape_of(shard), options, compute)?;
    if let Some(experts) = config.experts() {
        let unsupported = |what, value: String, allowed| {
            Err(CudaError::Unsupported { what, value, allowed }.into())
        };
        if compute != 90 {
            let what = "the compute capability of a GPU for experts";
            return unsupported(what, format!("{}.{}", compute / 10, compute % 10), "9.0");
        }
        if !matches!(weights, WeightFormat::Bf16 | WeightFormat::Fp8) {
            let what = "the weight format of a model with experts";
            return unsupported(what, weights.to_string(), "bf16 or fp8 on GPUs");
        }
        if experts.choice.groups > EXPERT_GROUPS_MAX {
            let what = "the number of groups of experts";
            return unsupported(what, experts.choice.groups.to_string(), "up to 32");
        }
        if experts.count > EXPERTS_MAX {
            return unsupported("the number of experts", experts.count.to_string(), "up to 512");
        }
        if experts.choice.count > EXPERTS_CHOSEN_MAX {
            let what = "the number of experts per token";
            return unsupported(what, experts.choice.count.to_string(), "up to 32");
        }
        if shard.has_whole_experts() {
            return unsupported("node.expert_parallel", "true".to_owned(), "false on GPUs");
        }
        let (unit, allowed) = match weights {
            _ if config.has_mxfp4_experts() => (MXFP4_GROUP, "multiples of 32 in MXFP4"),
            WeightFormat::Fp8 => (16, "multiples of 16 in fp8"),
            _ => (8, "multiples of 8"),
        };
        let shared = experts.shared.map_or(0, |shared| shared.size);
        for (what, size) in [
            ("the hidden size of a model with experts", config.hidden_size),
            ("a rank's feed-forward size of experts", shard.part(experts.size).len()),
            ("a rank's feed-forward size of the shared expert", shard.part(shared).len()),
        ] {
            if !size.is_multiple_of(unit) {
                return unsupported(what, size.to_string(), allowed);
            }
        }
    }
    if config.qk_norm() == Some(NormSpan::Projection) && !shard.is_whole() {
        let (what, value) = ("the model's family", config.family.name().to_owned());
        let allowed = "a family with norms of single heads, node.tp = 1, or node.device = \"cpu\"";
        return Err(CudaError::Unsupported { what, value, allowed }.into());
    }
    if !config.rotary_dim.is_multiple_of(8) {
        let (what, value) = ("the model's rotary dimension", config.rotary_dim.to_string());
        let allowed = "multiples of 8";
        return Err(CudaError::Unsupported { what, value, allowed }.into());
    }
    // The FP8 kernels quantize whole rows in units of 16 elements.
    let (hidden_unit, hidden_allowed) = match weights {
        WeightFormat::Fp8 => (16, "multiples of 16 in fp8"),
        _ => (8, "multiples of 8"),
    };
    for (what, value, unit, allowed) in [
        ("the model's hidden size", config.hidden_size, hidden_unit, hidden_allowed),
        ("a rank's feed-forward size", config.ffn_size_of(shard), 8, "multiples of 8"),
        ("the model's head size", config.head_dim, 8, "multiples of 8"),
    ] {
        if !value.is_multiple_of(unit) {
            let value = value.to_string();
            return Err(CudaError::Unsupported { what, value, allowed }.into());
        }
    }
    if config.head_dim > 256 {
        let (what, value) = ("the model's head size", config.head_dim.to_string());
        return Err(CudaError::Unsupported { what, value, allowed: "up to 256" }.into());
    }
    Ok(())
}

/// Checks that there are kernels for the format of KV.
fn check_kv_format(
    heads: HeadShape,
    options: &CudaOptions,
    compute: u32,
) -> Result<(), CudaExecutorError> {
    let (what, value, allowed) = if !options.kv.fits(options.weights.dtype()) {
        let what = "model.kv_dtype";
        (what, format!("{} with model.dtype = \"{}\"", options.kv, options.weights), "auto")
    } else if options.kv != KvFormat::Fp8 {
        return Ok(());
    } else if compute < 90 {
        let what = "the compute capability of a GPU with model.kv_dtype = \"fp8\"";
        (what, format!("{}.{}", compute / 10, compute % 10), "9.0 or later")
    } else if options.attention != AttentionKind::Auto {
        let what = "the attention kernel with model.kv_dtype = \"fp8\"";
        (what, format!("{:?}", options.attention).to_lowercase(), "auto")
    } else if !supports_fp8_kv(heads) {
        let HeadShape { query_heads, kv_heads, head_dim } = heads;
        let what = "the model's attention with model.kv_dtype = \"fp8\"";
        let value = format!("{query_heads} query heads and {kv_heads} KV heads of {head_dim}");
        (what, value, "heads of 64, 128 or 256, and up to 16 query heads for each KV head")
    } else {
        return Ok(());
    };
    Err(CudaError::Unsupported { what, value, allowed }.into())
}

#[cfg(test)]
mod tests {
    use model::{LoadFormat, Weight, WeightShape};
    use serde_json::json;

    use super::*;
    use crate::defaults::ModelSizes;

    /// Returns why a model of this configuration is refused; empty if it is not.
    fn refusal(config: &serde_json::Value, (weights, compute): (WeightFormat, u32)) -> String {
        refusal_with(config, CudaOptions::new(weights), compute)
    }

    fn refusal_with(config: &serde_json::Value, options: CudaOptions, compute: u32) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        std::fs::write(&path, config.to_string()).unwrap();
        let checkpoint = Checkpoint::open(&path, LoadFormat::Dummy { seed: 1 }).unwrap();
        let checked = check_model(&checkpoint, Shard::WHOLE, (&options, compute));
        checked.err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn experts_without_kernels_are_refused() {
        let config = |experts: u32, chosen: u32| {
            json!({
                "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "vocab_size": 200, "num_experts": experts, "num_experts_per_tok": chosen
            })
        };
        assert_eq!(refusal(&config(512, 32), (WeightFormat::Bf16, 90)), "");
        for (experts, chosen, weights, compute, expected) in [
            (8, 2, WeightFormat::F32, 90, "with experts is f32; expected bf16 or fp8 on GPUs"),
            (513, 2, WeightFormat::Bf16, 90, "the number of experts is 513; expected up to 512"),
            (64, 33, WeightFormat::Bf16, 90, "experts per token is 33; expected up to 32"),
            (8, 2, WeightFormat::Bf16, 89, "of a GPU for experts is 8.9; expected 9.0"),
        ] {
            let error = refusal(&config(experts, chosen), (weights, compute));
            assert!(error.ends_with(expected), "{error}");
        }
    }

    #[test]
    fn linear_attention_without_kernels_is_refused() {
        let config = |key_dim: u32| {
            json!({
                "architectures": ["Qwen3NextForCausalLM"], "hidden_size": 64,
                "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 200,
                "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                "linear_key_head_dim": key_dim, "linear_value_head_dim": 64,
                "linear_conv_kernel_dim": 4, "num_experts": 8, "num_experts_per_tok": 2
            })
        };
        assert_eq!(refusal(&config(64), (WeightFormat::Bf16, 90)), "");
        assert_eq!(refusal(&config(64), (WeightFormat::Fp8, 90)), "");
        let error = refusal(&config(64), (WeightFormat::Bf16, 89));
        assert!(error.contains("GPU for linear attention is 8.9; expected 9.0, or"), "{error}");
        for dim in [6, 260] {
            let error = refusal(&config(dim), (WeightFormat::Bf16, 90));
            let expected = format!("linear attention is {dim}; expected multiples of 4 up to 256");
            assert!(error.contains(&expected), "{error}");
        }
    }

    #[test]
    fn kv_in_fp8_without_kernels_is_refused() {
        let config = |heads: u32, head_dim: u32| {
            json!({
                "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
                "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": 1,
                "head_dim": head_dim, "vocab_size": 200
            })
        };
        let refusal = |heads, head_dim, weights, compute| {
            let options = CudaOptions { kv: KvFormat::Fp8, ..CudaOptions::new(weights) };
            refusal_with(&config(heads, head_dim), options, compute)
        };
        assert_eq!(refusal(16, 64, WeightFormat::Bf16, 90), "");
        assert_eq!(refusal(1, 256, WeightFormat::Fp8, 90), "");
        for (heads, head_dim, weights, compute, expected) in [
            (4, 64, WeightFormat::F32, 90, "fp8 with model.dtype = \"f32\"; expected auto"),
            (4, 64, WeightFormat::Bf16, 89, "\"fp8\" is 8.9; expected 9.0 or later"),
            (17, 64, WeightFormat::Bf16, 90, "17 query heads and 1 KV heads of 64; expected heads"),
            (4, 96, WeightFormat::Bf16, 90, "4 query heads and 1 KV heads of 96; expected heads"),
        ] {
            let error = refusal(heads, head_dim, weights, compute);
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn hidden_size_that_fp8_cannot_quantize_is_refused() {
        let config = |hidden: u32| {
            json!({
                "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": 96,
                "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
                "head_dim": 64, "vocab_size": 200
            })
        };
        assert_eq!(refusal(&config(72), (WeightFormat::Bf16, 90)), "");
        assert_eq!(refusal(&config(80), (WeightFormat::Fp8, 90)), "");
        let error = refusal(&config(72), (WeightFormat::Fp8, 90));
        assert!(error.ends_with("hidden size is 72; expected multiples of 16 in fp8"), "{error}");
    }

    /// Writes a model whose matrices of layers are in INT4, with zeros as numbers.
    fn write_int4(folder: &std::path::Path) -> Checkpoint {
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
            "vocab_size": 200
        });
        let write = |config: &serde_json::Value| {
            std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        };
        write(&config);
        let plain = Checkpoint::open(folder, LoadFormat::Dummy { seed: 1 }).unwrap();
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        let mut add = |name: String, dtype: &str, shape: &[usize], bytes: Vec<u8>| {
            let begin = data.len();
            data.extend(bytes);
            let entry =
                json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]});
            header.insert(name, entry);
        };
        for weight in Weight::all(plain.config()) {
            let name = weight.hugging_face_name(plain.config());
            match (weight, weight.shape(plain.config())) {
                (Weight::Layer(..), WeightShape::Matrix { rows, cols }) => {
                    let tensor = |suffix| format!("{name}_{suffix}");
                    add(tensor("packed"), "I32", &[rows, cols / 8], vec![0; rows * cols / 2]);
                    let groups = cols / 32;
                    add(tensor("scale"), "BF16", &[rows, groups], vec![0; rows * groups * 2]);
                    let shape = [rows, cols].map(|len| (len as i64).to_le_bytes());
                    add(tensor("shape"), "I64", &[2], shape.concat());
                }
                (_, shape) => {
                    let shape: Vec<usize> = shape.dims().iter().map(|dim| *dim as usize).collect();
                    add(name, "BF16", &shape, vec![0; shape.iter().product::<usize>() * 2]);
                }
            }
        }
        let header = serde_json::to_vec(&header).unwrap();
        let length = (header.len() as u64).to_le_bytes();
        let file = [&length[..], &header, &data].concat();
        std::fs::write(folder.join("model.safetensors"), file).unwrap();
        config["quantization_config"] = json!({
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int",
                "strategy": "group", "group_size": 32, "symmetric": true}}}
        });
        write(&config);
        Checkpoint::open(folder, LoadFormat::Auto).unwrap()
    }

    #[test]
    fn matrices_in_int4_stay_packed_with_weights_in_bf16() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = write_int4(folder.path());
        for format in [WeightFormat::Bf16, WeightFormat::Fp8, WeightFormat::F32] {
            let options = CudaOptions::new(format);
            check_model(&checkpoint, Shard::WHOLE, (&options, 90)).unwrap();
        }
        let bytes = |weights: WeightFormat, is_gpu| {
            let formats = (weights, weights.kv_format());
            ModelSizes::of(&checkpoint, Shard::WHOLE, formats, is_gpu).weights
        };
        let elements = 2 * (4 * 64 * 64 + 3 * 64 * 128);
        let packed = |weights: WeightFormat, is_gpu| {
            let plain = weights.bytes(checkpoint.config().parameter_count());
            plain - bytes(weights, is_gpu)
        };
        let of_cpu = elements * 2 - elements / 2 - elements / 32 * 5;
        assert_eq!(packed(WeightFormat::Bf16, false), of_cpu);
        // Rows of 64 columns take a chunk of 128, with 512 bytes of numbers and 128 of scales. The
        // largest matrix, gate and up, is widened.
        let chunks = 2 * (4 * 8 + 2 * 16 + 8) * (512 + 128);
        let widened = 2 * 128 * 64 * 2;
        assert_eq!(packed(WeightFormat::Bf16, true), elements * 2 - chunks - widened);
        assert_eq!(packed(WeightFormat::F32, true), 0);
    }

    #[test]
    fn matrices_in_int4_without_kernels_are_refused() {
        let config = |architecture: &str| {
            json!({
                "architectures": [architecture], "hidden_size": 64, "intermediate_size": 96,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "vocab_size": 200, "num_experts": 8, "num_experts_per_tok": 2,
                "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32,
                    "version": "gemm", "zero_point": true}
            })
        };
        let dense = config("LlamaForCausalLM");
        assert_eq!(refusal(&dense, (WeightFormat::Bf16, 90)), "");
        let error = refusal(&dense, (WeightFormat::Bf16, 89));
        let expected =
            "of a GPU for matrices in INT4 is 8.9; expected 9.0, or node.device = \"cpu\"";
        assert!(error.ends_with(expected), "{error}");
        let error = refusal(&config("Qwen3MoeForCausalLM"), (WeightFormat::Bf16, 90));
        let expected = "the matrices of a model with experts is INT4; expected F32, F16, BF16, FP8 \
                        or MXFP4 on GPUs, or node.device = \"cpu\"";
        assert!(error.ends_with(expected), "{error}");
    }
}
