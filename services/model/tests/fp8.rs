//! Checkpoints with FP8 matrices. Every layout of scales gives the weights, the shards and the
//! logits of the same model with dequantized weights, and invalid files are refused by name.

mod common;

use std::{cell::RefCell, fs, path::Path};

use common::{Element, Tensor, sequence::Runner};
use kernels::{Dtype, Packer, RowSource, Shard, WeightFormat, cpu::Isa, fp8};
use model::{Checkpoint, LoadFormat, TransformerWeights, Weight, WeightShape};
use serde_json::{Value, json};

/// Layout of the scales in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    Tensor,
    /// Per tensor, and the scales of inputs are static.
    StaticTensor,
    Block,
    CompressedTensor,
    CompressedChannel,
    CompressedBlock,
}

use Layout::{Block, CompressedBlock, CompressedChannel, CompressedTensor, StaticTensor};

const LAYOUTS: [Layout; 6] =
    [Layout::Tensor, StaticTensor, Block, CompressedTensor, CompressedChannel, CompressedBlock];

impl Layout {
    fn config(self) -> Value {
        let group = |strategy: &str, activations: Value| {
            json!({"quant_method": "compressed-tensors", "format": "float-quantized",
                "ignore": ["lm_head"], "kv_cache_scheme": null, "config_groups": {"group_0": {
                    "targets": ["Linear"], "output_activations": null, "input_activations": activations,
                    "weights": {"num_bits": 8, "type": "float", "strategy": strategy,
                        "symmetric": true, "dynamic": false}}}})
        };
        let token = json!({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": true});
        match self {
            Layout::Tensor => json!({"quant_method": "fp8", "activation_scheme": "dynamic"}),
            StaticTensor => json!({"quant_method": "fp8", "activation_scheme": "static",
                "ignored_layers": ["lm_head"]}),
            Block => {
                json!({"quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]})
            }
            CompressedTensor => group("tensor", Value::Null),
            CompressedChannel => group("channel", token),
            CompressedBlock => {
                let mut config = group("block", token);
                config["config_groups"]["group_0"]["weights"]["block_structure"] =
                    json!([128, 128]);
                config
            }
        }
    }

    fn block(self, rows: usize, cols: usize) -> [usize; 2] {
        match self {
            Layout::Tensor | StaticTensor | CompressedTensor => [rows, cols],
            CompressedChannel => [1, cols],
            Block | CompressedBlock => [128, 128],
        }
    }

    fn scale_dims(self, rows: usize, cols: usize) -> Vec<u64> {
        match self {
            Layout::Tensor | StaticTensor => vec![],
            CompressedTensor => vec![1],
            CompressedChannel => vec![rows as u64, 1],
            Block | CompressedBlock => vec![rows.div_ceil(128) as u64, cols.div_ceil(128) as u64],
        }
    }

    fn suffix(self) -> &'static str {
        if self == Block { "_scale_inv" } else { "_scale" }
    }

    /// Compressed-tensors writes scales in the model's element type.
    fn scale_element(self) -> Element {
        match self {
            CompressedChannel | CompressedBlock => Element::Bf16,
            _ => Element::F32,
        }
    }
}

/// Writes a configuration whose matrices are not multiples of 128 and whose shards cut blocks.
fn write_config(folder: &Path, quantization: Option<Value>) {
    let mut config = json!({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
        "hidden_size": 192, "intermediate_size": 344, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 24,
        "vocab_size": 301, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu"
    });
    if let Some(quantization) = quantization {
        config["quantization_config"] = quantization;
    }
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

fn plain() -> Checkpoint {
    let folder = tempfile::tempdir().unwrap();
    write_config(folder.path(), None);
    Checkpoint::open(folder.path(), LoadFormat::Dummy { seed: 3 }).unwrap()
}

/// Returns scale, FP8 numbers and dequantized values of a matrix.
fn quantise(
    values: &[f32],
    [rows, cols]: [usize; 2],
    layout: Layout,
    change: impl Fn(usize, f32) -> f32,
) -> (Vec<f32>, Vec<u8>, Vec<f32>) {
    let [block_rows, block_cols] = layout.block(rows, cols);
    let stride = cols.div_ceil(block_cols);
    let block_of = |at: usize| at / cols / block_rows * stride + at % cols / block_cols;
    let mut greatest = vec![0.0_f32; rows.div_ceil(block_rows) * stride];
    for (at, value) in values.iter().enumerate() {
        greatest[block_of(at)] = greatest[block_of(at)].max(value.abs());
    }
    let scale = |(index, greatest): (usize, &f32)| {
        layout.scale_element().round(change(index, greatest / fp8::E4M3_MAX))
    };
    let scales: Vec<f32> = greatest.iter().enumerate().map(scale).collect();
    let number = |(at, value): (usize, &f32)| fp8::encode(value / scales[block_of(at)].max(1e-30));
    let numbers: Vec<u8> = values.iter().enumerate().map(number).collect();
    let dequantised = numbers.iter().enumerate().map(|(at, bits)| {
        // The reference: exact in f64, rounded once.
        (f64::from(fp8::decode(*bits)) * f64::from(scales[block_of(at)])) as f32
    });
    let dequantised = dequantised.collect();
    (scales, numbers, dequantised)
}

/// Tensors of a model in FP8, and of the same model with dequantized weights.
struct Pair {
    layout: Layout,
    stored: Vec<Tensor>,
    dequantised: Vec<Tensor>,
}

impl Pair {
    /// `change` returns another scale for the block of an index.
    fn new(layout: Layout, change: impl Fn(usize, f32) -> f32 + Copy) -> Self {
        let plain = plain();
        let (mut stored, mut dequantised) = (Vec::new(), Vec::new());
        for weight in Weight::all(plain.config()) {
            let name = weight.hugging_face_name(plain.config());
            let values = common::elements(&plain, weight);
            let shape = weight.shape(plain.config());
            let dims = shape.dims();
            let tensor = |name: String, dims: Vec<u64>, element: Element, values: &[f32]| Tensor {
                name,
                dims,
                element,
                bytes: element.encode(values),
            };
            let WeightShape::Matrix { rows, cols } = shape else {
                stored.push(tensor(name.clone(), dims.clone(), Element::F32, &values));
                dequantised.push(tensor(name, dims, Element::F32, &values));
                continue;
            };
            if !matches!(weight, Weight::Layer(..)) {
                stored.push(tensor(name.clone(), dims.clone(), Element::Bf16, &values));
                dequantised.push(tensor(name, dims, Element::Bf16, &values));
                continue;
            }
            let (scales, numbers, values) = quantise(&values, [rows, cols], layout, change);
            let scale = tensor(
                format!("{name}{}", layout.suffix()),
                layout.scale_dims(rows, cols),
                layout.scale_element(),
                &scales,
            );
            // In every second matrix the scales come before the numbers.
            let numbers = Tensor {
                name: name.clone(),
                dims: dims.clone(),
                element: Element::F8E4m3,
                bytes: numbers,
            };
            let at = stored.len() - stored.len() % 2;
            stored.insert(at, scale);
            stored.push(numbers);
            if layout == StaticTensor {
                let name = name.replace("weight", "input_scale");
                stored.push(tensor(name, vec![], Element::F32, &[0.5]));
            }
            dequantised.push(tensor(name, dims, Element::F32, &values));
        }
        Self { layout, stored, dequantised }
    }

    fn open(&self) -> Checkpoint {
        let folder = tempfile::tempdir().unwrap();
        self.write(folder.path(), 1);
        Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap()
    }

    fn write(&self, folder: &Path, files: usize) {
        common::write_folder(folder, &self.stored, files);
        write_config(folder, Some(self.layout.config()));
    }

    /// Opens the model whose matrices have `element`.
    fn open_dequantised(&self, element: Element) -> Checkpoint {
        let folder = tempfile::tempdir().unwrap();
        let tensor = |tensor: &Tensor| match tensor.element == Element::F32 && tensor.dims.len() > 1
        {
            true => {
                let values: Vec<f32> =
                    tensor.bytes.as_chunks().0.iter().map(|it| f32::from_le_bytes(*it)).collect();
                Tensor { element, bytes: element.encode(&values), ..tensor.clone() }
            }
            false => tensor.clone(),
        };
        let tensors: Vec<Tensor> = self.dequantised.iter().map(tensor).collect();
        common::write_folder(folder.path(), &tensors, 1);
        write_config(folder.path(), None);
        Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap()
    }

    /// Returns the error of opening the stored model after `change`.
    fn refusal(&self, change: impl FnOnce(&mut Vec<Tensor>)) -> String {
        let folder = tempfile::tempdir().unwrap();
        let mut tensors = self.stored.clone();
        change(&mut tensors);
        common::write_folder(folder.path(), &tensors, 1);
        write_config(folder.path(), Some(self.layout.config()));
        let error = Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap_err().to_string();
        let (_, message) = error.split_once("model.safetensors: ").expect("names the file");
        message.to_owned()
    }
}

/// Packs rows as f32, and checks that the FP8 form of a matrix has the same values.
struct RowPacker {
    shard: Shard,
    rows: RefCell<Vec<Vec<f32>>>,
    fp8_matrices: RefCell<usize>,
}

impl Packer for RowPacker {
    type Matrix = ();
    type Vector = ();

    fn pack_matrix(&self, source: &dyn RowSource) {
        let mut values = vec![0.0; source.rows() * source.cols()];
        source.read_values(0, &mut values);
        let rows: Vec<&[f32]> = values.chunks(source.cols()).collect();
        if let Some(parts) = source.fp8_scales() {
            *self.fp8_matrices.borrow_mut() += 1;
            assert_eq!(parts.iter().map(fp8::BlockScales::rows).sum::<usize>(), source.rows());
            let mut numbers = vec![0; source.rows() * source.cols()];
            source.read_fp8(0, &mut numbers);
            let scales = parts.iter().flat_map(|part| (0..part.rows()).map(move |row| (part, row)));
            for ((row, numbers), (part, in_part)) in
                rows.iter().zip(numbers.chunks(source.cols())).zip(scales)
            {
                let value = |(col, bits): (usize, &u8)| fp8::decode(*bits) * part.at(in_part, col);
                let values: Vec<f32> = numbers.iter().enumerate().map(value).collect();
                let mut pairs = values.iter().zip(*row);
                assert!(pairs.all(|(a, b)| a == b || a.is_nan() && b.is_nan()));
            }
        }
        self.rows.borrow_mut().extend(rows.into_iter().map(<[f32]>::to_vec));
    }

    fn pack_vector(&self, values: &[f32]) {
        self.rows.borrow_mut().push(values.to_vec());
    }

    fn pack_shard(&self) -> Shard {
        self.shard
    }
}

/// Returns the rows of a rank, and the number of FP8 matrices.
fn pack(checkpoint: &Checkpoint, shard: Shard) -> Result<(Vec<Vec<f32>>, usize), String> {
    let packer = RowPacker { shard, rows: RefCell::default(), fp8_matrices: RefCell::new(0) };
    let packed = TransformerWeights::pack(checkpoint, &packer, &mut |_| ());
    packed.map_err(|error| error.to_string())?;
    Ok((packer.rows.into_inner(), packer.fp8_matrices.into_inner()))
}

fn packed(checkpoint: &Checkpoint, shard: Shard) -> (Vec<Vec<f32>>, usize) {
    pack(checkpoint, shard).unwrap()
}

fn logits(checkpoint: &Checkpoint, weights: impl Into<WeightFormat>) -> Vec<Vec<f32>> {
    let mut runner = Runner::new(checkpoint, weights, Isa::Auto, 64);
    let vocabulary = checkpoint.config().vocab_size as u32;
    let tokens: Vec<u32> = (0..23).map(|at| (at * at * 7 + at) % vocabulary).collect();
    let mut sequence = runner.sequence(tokens.len());
    runner.forward(&mut [(&mut sequence, &tokens, tokens.len() as u32)])
}

#[test]
fn logits_of_every_layout_equal_those_of_dequantised_weights() {
    for layout in LAYOUTS {
        let pair = Pair::new(layout, |_, scale| scale);
        let (stored, f32s) = (pair.open(), pair.open_dequantised(Element::F32));
        assert!(stored.description().ends_with("F8_E4M3"), "{}", stored.description());
        let found = logits(&stored, Dtype::F32);
        assert!(found == logits(&f32s, Dtype::F32), "{layout:?}");
        assert!(found != logits(&plain(), Dtype::F32), "{layout:?}");
        // The GPU's elements, and the elements of q8 blocks, are those of the dequantized values,
        // too.
        let bf16s = pair.open_dequantised(Element::Bf16);
        assert!(logits(&stored, Dtype::Bf16) == logits(&bf16s, Dtype::Bf16), "{layout:?}");
        assert!(logits(&stored, WeightFormat::Q8) == logits(&f32s, WeightFormat::Q8), "{layout:?}");
    }
}

#[test]
fn shards_that_cut_blocks_have_the_weights_of_dequantised_shards() {
    for layout in LAYOUTS {
        let pair = Pair::new(layout, |_, scale| scale);
        let (stored, dequantised) = (pair.open(), pair.open_dequantised(Element::F32));
        for of in [1, 2, 4] {
            for shard in Shard::new(0, of).unwrap().all() {
                let (found, fp8_matrices) = packed(&stored, shard);
                // Queries, keys and values are one matrix, gate and up are one.
                assert_eq!(fp8_matrices, 2 * 4);
                let (expected, none) = packed(&dequantised, shard);
                assert!(found == expected && none == 0, "{layout:?}, {shard}");
            }
        }
    }
}

#[test]
fn zero_tiny_and_extreme_scales_are_exact() {
    let extremes = [0.0, f32::from_bits(1), 1e-38, 1e30, 7.5e35];
    for layout in [Block, CompressedTensor, CompressedChannel] {
        let change = |index: usize, scale: f32| match index % 7 {
            extreme @ 0..5 => extremes[extreme],
            _ => scale,
        };
        let pair = Pair::new(layout, change);
        let (stored, dequantised) = (pair.open(), pair.open_dequantised(Element::F32));
        assert!(
            packed(&stored, Shard::WHOLE).0 == packed(&dequantised, Shard::WHOLE).0,
            "{layout:?}"
        );
    }
    // A product outside f32 is not a weight.
    let mut pair = Pair::new(Block, |_, _| f32::MAX);
    let numbers = pair.stored.iter_mut().find(|it| it.name.ends_with("1.mlp.down_proj.weight"));
    numbers.unwrap().bytes[5] = 0x7e;
    let error = pack(&pair.open(), Shard::WHOLE).unwrap_err();
    assert!(error.contains("1.mlp.down_proj.weight\" at file offset"), "{error}");
    assert!(error.ends_with("is corrupt: element 5 is inf; expected a finite number"), "{error}");
}

#[test]
fn scales_may_be_in_another_file() {
    let pair = Pair::new(Block, |_, scale| scale);
    let folder = tempfile::tempdir().unwrap();
    pair.write(folder.path(), 5);
    let split = Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap();
    assert_eq!(packed(&split, Shard::WHOLE), packed(&pair.open(), Shard::WHOLE));
}

#[test]
fn fingerprint_and_stored_weights_cover_numbers_and_scales() {
    let pair = Pair::new(StaticTensor, |_, scale| scale);
    let checkpoint = pair.open();
    let fingerprint = checkpoint.model_fingerprint().unwrap();
    let hashing = pair.open().hashing_packed();
    packed(&hashing, Shard::WHOLE);
    assert_eq!(hashing.model_fingerprint().unwrap(), fingerprint);
    let mut names: Vec<String> =
        checkpoint.stored_weights().unwrap().into_iter().map(|it| it.name).collect();
    names.sort();
    let mut expected: Vec<String> = pair.stored.iter().map(|it| it.name.clone()).collect();
    expected.sort();
    assert_eq!(names, expected);
    for name in ["0.mlp.up_proj.weight", "0.mlp.up_proj.weight_scale", "0.mlp.up_proj.input_scale"]
    {
        let mut stored = pair.stored.clone();
        let changed = stored.iter_mut().find(|tensor| tensor.name.ends_with(name)).unwrap();
        changed.bytes[0] ^= 1;
        let other = Pair { layout: pair.layout, stored, dequantised: Vec::new() };
        assert_ne!(other.open().model_fingerprint().unwrap(), fingerprint, "{name}");
    }
}

#[test]
fn nan_in_a_matrix_is_found_when_it_is_packed() {
    let mut pair = Pair::new(CompressedChannel, |_, scale| scale);
    let matrix = pair.stored.iter_mut().find(|it| it.name.ends_with("1.self_attn.k_proj.weight"));
    matrix.unwrap().bytes[200] = 0xff;
    let error = pack(&pair.open(), Shard::WHOLE).unwrap_err();
    assert!(error.contains("1.self_attn.k_proj.weight\" at file offset"), "{error}");
    assert!(error.ends_with("is corrupt: element 200 is NaN; expected a finite number"), "{error}");
}

#[test]
fn invalid_scales_are_refused_by_name() {
    let pair = Pair::new(Block, |_, scale| scale);
    const NAME: &str = "model.layers.1.mlp.down_proj.weight_scale_inv";
    fn scale(tensors: &mut [Tensor]) -> &mut Tensor {
        tensors.iter_mut().find(|it| it.name == NAME).unwrap()
    }
    let set = |at: usize, value: f32| {
        pair.refusal(|tensors| {
            scale(tensors).bytes[4 * at..][..4].copy_from_slice(&value.to_le_bytes())
        })
    };
    for (value, found) in [(-1.0, "-1"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let message = set(4, value);
        assert!(message.starts_with(&format!("tensor {NAME:?} at file offset ")), "{message}");
        let end = format!(
            "has scale {found} at element 4; expected a finite number that is not negative"
        );
        assert!(message.ends_with(&end), "{message}");
    }
    assert_eq!(
        pair.refusal(|tensors| tensors.retain(|it| it.name != NAME)),
        format!("tensor {NAME:?} is missing; expected shape [2, 3]")
    );
    let message = pair.refusal(|tensors| {
        let scale = scale(tensors);
        scale.dims = vec![3, 2];
    });
    assert!(message.ends_with("has shape [3, 2]; expected [2, 3]"), "{message}");
    let message = pair.refusal(|tensors| {
        let scale = scale(tensors);
        scale.element = Element::F8E4m3;
        scale.bytes.truncate(6);
    });
    assert!(
        message.ends_with("has unsupported type F8_E4M3; expected F32, F16 or BF16"),
        "{message}"
    );
    // A scale of a matrix that is not in FP8 has no meaning.
    let message = pair.refusal(|tensors| {
        let extra = Tensor { name: "lm_head.weight_scale_inv".into(), ..scale(tensors).clone() };
        tensors.push(extra);
    });
    assert!(message.contains("\"lm_head.weight_scale_inv\" at file offset"), "{message}");
    let message = pair.refusal(|tensors| {
        let norm = tensors.iter_mut().find(|it| it.name == "model.norm.weight").unwrap();
        norm.element = Element::F8E4m3;
        norm.bytes.truncate(192);
    });
    assert!(message.contains("\"model.norm.weight\""), "{message}");
    assert!(message.contains("FP8 is for matrices of a quantization_config"), "{message}");
}

/// Returns the error of a configuration with this `quantization_config`.
fn refused_config(quantization: Value) -> String {
    let folder = tempfile::tempdir().unwrap();
    write_config(folder.path(), Some(quantization));
    // No weights exist: the configuration is refused first.
    let error = Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap_err().to_string();
    let (_, message) = error.split_once("config.json: ").expect("names the file");
    message.strip_prefix("unsupported quantization_config.").unwrap_or(message).to_owned()
}

#[test]
fn unsupported_quantization_is_refused_before_weights_are_read() {
    const METHODS: &str = "expected \"fp8\", \"gptq\", \"awq\", \
        \"compressed-tensors\" with FP8 or INT4 weights, no quantization_config, or a GGUF file";
    for method in ["mxfp4", "bitsandbytes", "modelopt", "fbgemm_fp8"] {
        let message = refused_config(json!({"quant_method": method}));
        assert_eq!(message, format!("quant_method: \"{method}\"; {METHODS}"));
    }
    assert_eq!(refused_config(json!({})), format!("quant_method: none; {METHODS}"));
    let changed = |layout: Layout, pointer: &str, value: Value| {
        let mut config = layout.config();
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        config.pointer_mut(parent).unwrap()[key] = value;
        refused_config(config)
    };
    let weights = "/config_groups/group_0/weights";
    for (layout, pointer, value, message) in [
        (
            Block,
            "/weight_block_size",
            json!([64, 128]),
            "weight_block_size: [64, 128]; expected [128, 128] or null",
        ),
        (Block, "/fmt", json!("e5m2"), "fmt: \"e5m2\"; expected \"e4m3\" or \"float8_e4m3fn\""),
        (
            Block,
            "/activation_scheme",
            json!("token"),
            "activation_scheme: \"token\"; expected \"dynamic\" or \"static\"",
        ),
        (
            CompressedTensor,
            "/format",
            json!("int-quantized"),
            "format: \"int-quantized\"; \
             expected \"float-quantized\", \"naive-quantized\" or \"pack-quantized\"",
        ),
        (
            CompressedTensor,
            "/kv_cache_scheme",
            json!({"num_bits": 8}),
            "kv_cache_scheme: {\"num_bits\":8}; expected null: KV has the format of model.dtype",
        ),
    ] {
        assert_eq!(changed(layout, pointer, value), message);
    }
    let int4 = json!({"num_bits": 4, "type": "int", "strategy": "group", "symmetric": false});
    assert_eq!(
        changed(CompressedTensor, weights, int4),
        "config_groups.group_0.weights: asymmetric int of 4 bits; expected symmetric float of 8 bits"
    );
    assert_eq!(
        changed(CompressedTensor, &format!("{weights}/strategy"), json!("group")),
        "config_groups.group_0.weights.strategy: \"group\"; \
         expected \"tensor\", \"channel\" or \"block\" of 128x128, the same in all groups"
    );
    assert_eq!(
        changed(CompressedTensor, "/config_groups", json!({})),
        "key \"quantization_config.config_groups\": no group has weights"
    );
    // Without the configuration, FP8 numbers have no meaning.
    let folder = tempfile::tempdir().unwrap();
    Pair::new(Block, |_, scale| scale).write(folder.path(), 1);
    write_config(folder.path(), None);
    let error = Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap_err().to_string();
    assert!(error.contains("has unsupported type F8_E4M3; expected F32, F16 or BF16"), "{error}");
}

/// The tensors of a mixture of experts in blocks of 128x128, whose experts have 144 rows.
fn experts_in_blocks() -> Vec<Tensor> {
    let file = fs::read(common::fixture("architectures/qwen3_moe_fp8/model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let tensor = |(name, view): (String, safetensors::tensor::TensorView<'_>)| Tensor {
        name,
        dims: view.shape().iter().map(|&dim| dim as u64).collect(),
        element: match view.dtype() {
            safetensors::Dtype::F8_E4M3 => Element::F8E4m3,
            safetensors::Dtype::BF16 => Element::Bf16,
            safetensors::Dtype::F32 => Element::F32,
            other => panic!("{other:?}"),
        },
        bytes: view.data().to_vec(),
    };
    tensors.tensors().into_iter().map(tensor).collect()
}

fn write_experts(folder: &Path, tensors: &[Tensor], files: usize) {
    common::write_folder(folder, tensors, files);
    let config = common::fixture("architectures/qwen3_moe_fp8/config.json");
    fs::copy(config, folder.join("config.json")).unwrap();
}

#[test]
fn scales_of_experts_may_be_in_another_file_and_ranks_cut_their_blocks() {
    let tensors = experts_in_blocks();
    let folder = tempfile::tempdir().unwrap();
    write_experts(folder.path(), &tensors, 7);
    let split = Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap();
    let whole = common::fixture("architectures/qwen3_moe_fp8");
    let whole = Checkpoint::open(whole, LoadFormat::Auto).unwrap();
    let (rows, fp8_matrices) = packed(&split, Shard::WHOLE);
    assert_eq!((&rows, fp8_matrices), (&packed(&whole, Shard::WHOLE).0, 2 * (2 + 4 * 2)));
    for shard in Shard::new(0, 2).unwrap().all() {
        assert_eq!(packed(&split, shard).1, fp8_matrices, "{shard}");
    }
    // Without FP8 kernels, all formats of CPUs have the dequantized weights.
    assert!(logits(&split, WeightFormat::Fp8) == logits(&whole, WeightFormat::Bf16));
}

#[test]
fn invalid_experts_are_refused_by_name() {
    let refusal = |change: &dyn Fn(&mut Vec<Tensor>)| {
        let folder = tempfile::tempdir().unwrap();
        let mut tensors = experts_in_blocks();
        change(&mut tensors);
        write_experts(folder.path(), &tensors, 1);
        let error = Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap_err().to_string();
        let (_, message) = error.split_once("model.safetensors: ").expect("names the file");
        message.to_owned()
    };
    const MATRIX: &str = "model.layers.1.mlp.experts.2.up_proj.weight";
    const SCALE: &str = "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv";
    fn named<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
        tensors.iter_mut().find(|it| it.name == name).unwrap()
    }
    for (name, shape) in [(SCALE, "[2, 1]"), (MATRIX, "[144, 32]")] {
        let message = refusal(&|tensors| tensors.retain(|it| it.name != name));
        assert_eq!(message, format!("tensor {name:?} is missing; expected shape {shape}"));
    }
    let message = refusal(&|tensors| named(tensors, SCALE).dims = vec![1, 2]);
    assert!(message.starts_with(&format!("tensor {SCALE:?} at file offset ")), "{message}");
    assert!(message.ends_with("has shape [1, 2]; expected [2, 1]"), "{message}");
    let message = refusal(&|tensors| named(tensors, MATRIX).dims = vec![32, 144]);
    assert!(message.starts_with(&format!("tensor {MATRIX:?} at file offset ")), "{message}");
    assert!(message.ends_with("has shape [32, 144]; expected [144, 32]"), "{message}");
    for value in [-1.0_f32, f32::NAN, f32::INFINITY] {
        let set = |tensors: &mut Vec<Tensor>| {
            named(tensors, SCALE).bytes[4..8].copy_from_slice(&value.to_le_bytes());
        };
        let message = refusal(&set);
        assert!(message.starts_with(&format!("tensor {SCALE:?} at file offset ")), "{message}");
        let end = format!(
            "has scale {value} at element 1; expected a finite number that is not negative"
        );
        assert!(message.ends_with(&end), "{message}");
    }
    // An expert beyond the number of the configuration.
    let message = refusal(&|tensors| {
        let name = MATRIX.replace("experts.2", "experts.4");
        let extra = Tensor { name, ..named(tensors, MATRIX).clone() };
        tensors.push(extra);
    });
    assert!(message.contains("experts.4.up_proj.weight\" at file offset"), "{message}");
    assert!(message.ends_with("is not part of the qwen3_moe architecture"), "{message}");
}
