//! Checkpoints with matrices in INT4. The test packs known numbers by the definition of each
//! format. Every format gives the weights, the shards and the logits of the same model with
//! dequantized weights, and invalid files are refused by name.

mod common;

use std::{cell::RefCell, collections::BTreeMap, fs, io::Write, path::Path};

use common::{
    elements,
    ranks::{group, together},
    sequence::{Runner, argmax},
};
use half::{bf16, f16};
use kernels::{Packer, RowSource, Shard, WeightFormat, cpu::Isa, int4::packed_bytes};
use model::{
    Checkpoint, Int4Sizes, LayerWeight, LoadFormat, TransformerWeights, Weight, WeightShape,
};
use proptest::prelude::*;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

/// Tensors of a file.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Packing {
    Gptq,
    GptqV2,
    Awq,
    Compressed,
}

use Packing::{Awq, Compressed, Gptq, GptqV2};

/// How a checkpoint stores its matrices.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Layout {
    packing: Packing,
    group_size: Option<usize>,
    is_symmetric: bool,
    /// Whether the columns of a group are not neighbours.
    desc_act: bool,
    /// Type of the scales.
    scales: Dtype,
}

impl Layout {
    const fn new(packing: Packing, group_size: Option<usize>, is_symmetric: bool) -> Self {
        let scales = match packing {
            Compressed => Dtype::BF16,
            _ => Dtype::F16,
        };
        Self { packing, group_size, is_symmetric, desc_act: false, scales }
    }

    const fn reordered(self) -> Self {
        Self { desc_act: true, ..self }
    }

    fn config(self) -> Value {
        let size = self.group_size.map_or(-1, |size| size as i64);
        match self.packing {
            Gptq | GptqV2 => {
                let mut config = json!({"quant_method": "gptq", "bits": 4, "group_size": size,
                    "desc_act": self.desc_act, "sym": self.is_symmetric, "lm_head": false,
                    "dynamic": {"-:.*layers\\.0\\.self_attn\\.k_proj": {}}});
                // Files of the first format do not always name it.
                if self.packing == GptqV2 {
                    config["checkpoint_format"] = json!("gptq_v2");
                }
                config
            }
            Awq => json!({"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm",
                "zero_point": true, "modules_to_not_convert": ["model.layers.0.self_attn.k_proj"]}),
            Compressed => {
                let (strategy, size) = match self.group_size {
                    Some(size) => ("group", json!(size)),
                    None => ("channel", Value::Null),
                };
                json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
                    "ignore": ["lm_head", "re:.*0.self_attn.k_proj"], "kv_cache_scheme": null,
                    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": null,
                        "weights": {"num_bits": 4, "type": "int", "symmetric": self.is_symmetric,
                            "strategy": strategy, "group_size": size, "dynamic": false,
                            "actorder": if self.desc_act { json!("group") } else { Value::Null }}}}})
            }
        }
    }

    /// Returns the group of each column.
    fn groups(self, cols: usize) -> Vec<usize> {
        let size = self.group_size.unwrap_or(cols);
        // 37 and the widths have no common divisor.
        let place = |col| if self.desc_act { col * 37 % cols } else { col };
        (0..cols).map(|col| place(col) / size).collect()
    }
}

const LAYOUTS: [Layout; 14] = [
    Layout::new(Gptq, Some(128), true),
    Layout::new(Gptq, Some(32), false).reordered(),
    Layout::new(Gptq, None, true),
    Layout { scales: Dtype::BF16, ..Layout::new(Gptq, None, false).reordered() },
    Layout::new(GptqV2, Some(64), false),
    Layout::new(GptqV2, Some(128), true).reordered(),
    Layout::new(Awq, Some(128), false),
    Layout::new(Awq, Some(32), false),
    Layout::new(Awq, None, false),
    Layout::new(Compressed, Some(128), true),
    Layout::new(Compressed, Some(32), false).reordered(),
    Layout::new(Compressed, None, true),
    Layout::new(Compressed, None, false),
    Layout { scales: Dtype::F32, ..Layout::new(Compressed, Some(64), true) },
];

/// A matrix `[rows][cols]` in INT4, before it is packed.
struct Quantised {
    rows: usize,
    cols: usize,
    /// `[rows][cols]`.
    numbers: Vec<u32>,
    group_count: usize,
    /// `[rows][groups]`.
    scales: Vec<f32>,
    zeros: Vec<u32>,
    groups: Vec<usize>,
}

impl Quantised {
    fn new(values: &[f32], [rows, cols]: [usize; 2], layout: Layout) -> Self {
        let groups = layout.groups(cols);
        let group_count = groups.iter().max().unwrap() + 1;
        let (mut scales, mut zeros) = (Vec::new(), Vec::new());
        for row in values.chunks(cols) {
            for group in 0..group_count {
                let own = || row.iter().zip(&groups).filter(|it| *it.1 == group).map(|it| *it.0);
                let (low, high) = (own().fold(0.0, f32::min), own().fold(0.0, f32::max));
                let scale = match layout.is_symmetric {
                    true => high.max(-low) / 7.0,
                    false => (high - low) / 15.0,
                };
                let scale = round(layout.scales, scale.max(1e-6));
                scales.push(scale);
                zeros.push(if layout.is_symmetric { 8 } else { (-low / scale).round() as u32 });
            }
        }
        let number = |(at, value): (usize, &f32)| {
            let group = at / cols * group_count + groups[at % cols];
            let number = (value / scales[group]).round() + zeros[group] as f32;
            number.clamp(0.0, 15.0) as u32
        };
        let numbers = values.iter().enumerate().map(number).collect();
        Self { rows, cols, numbers, group_count, scales, zeros, groups }
    }

    /// Returns the values of the numbers, exact in f64 and rounded once.
    fn dequantised(&self) -> Vec<f32> {
        let value = |(at, number): (usize, &u32)| {
            let group = at / self.cols * self.group_count + self.groups[at % self.cols];
            let number = f64::from(*number) - f64::from(self.zeros[group]);
            (number * f64::from(self.scales[group])) as f32
        };
        self.numbers.iter().enumerate().map(value).collect()
    }

    /// Adds the tensors of the matrix `{module}weight`.
    fn store(&self, module: &str, layout: Layout, tensors: &mut Tensors) {
        let Self { rows, cols, group_count, .. } = *self;
        let (numbers, zeros) = (
            |row: usize, col: usize| self.numbers[row * cols + col],
            |row: usize, group: usize| self.zeros[row * group_count + group],
        );
        let mut words = |name: &str, shape: [usize; 2], words: Vec<u32>| {
            let bytes = words.into_iter().flat_map(u32::to_le_bytes).collect();
            tensors.insert(format!("{module}{name}"), (Dtype::I32, shape.to_vec(), bytes));
        };
        match layout.packing {
            Gptq | GptqV2 => {
                let shape = [cols / 8, rows];
                words("qweight", shape, pack(shape, |[i, n], at| numbers(n, 8 * i + at)));
                let shape = [group_count, rows / 8];
                let offset = if layout.packing == Gptq { 0x1111_1111 } else { 0 };
                let zeros = pack(shape, |[group, m], at| zeros(8 * m + at, group));
                let zeros = zeros.into_iter().map(|word| word.wrapping_sub(offset)).collect();
                words("qzeros", shape, zeros);
            }
            Awq => {
                // `order_map` of the format's authors.
                const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
                let shape = [cols, rows / 8];
                words("qweight", shape, pack(shape, |[k, m], at| numbers(8 * m + ORDER[at], k)));
                let shape = [group_count, rows / 8];
                words(
                    "qzeros",
                    shape,
                    pack(shape, |[group, m], at| zeros(8 * m + ORDER[at], group)),
                );
            }
            Compressed => {
                // Numbers from -8 to 7 are stored plus 8, and numbers after the last are 0.
                let shape = [rows, cols.div_ceil(8)];
                let number = |[n, i]: [usize; 2], at: usize| {
                    if 8 * i + at < cols { numbers(n, 8 * i + at) } else { 0 }
                };
                words("weight_packed", shape, pack(shape, number));
                if !layout.is_symmetric {
                    let shape = [rows.div_ceil(8), group_count];
                    let zero = |[m, group]: [usize; 2], at: usize| {
                        if 8 * m + at < rows { zeros(8 * m + at, group) } else { 0 }
                    };
                    words("weight_zero_point", shape, pack(shape, zero));
                }
            }
        }
        self.store_others(module, layout, tensors);
    }

    /// Adds scales, groups and shape.
    fn store_others(&self, module: &str, layout: Layout, tensors: &mut Tensors) {
        let Self { rows, cols, group_count, .. } = *self;
        let is_compressed = layout.packing == Compressed;
        let mut add = |name: &str, dtype, shape: &[usize], bytes| {
            tensors.insert(format!("{module}{name}"), (dtype, shape.to_vec(), bytes));
        };
        let (name, shape) = match is_compressed {
            true => ("weight_scale", [rows, group_count]),
            false => ("scales", [group_count, rows]),
        };
        let transposed = (0..group_count)
            .flat_map(|group| (0..rows).map(move |row| self.scales[row * group_count + group]));
        let scales = if is_compressed { self.scales.clone() } else { transposed.collect() };
        add(name, layout.scales, &shape, encode(layout.scales, &scales));
        let groups = self.groups.iter().flat_map(|group| (*group as i32).to_le_bytes()).collect();
        match layout.packing {
            // GPTQ stores them always.
            Gptq | GptqV2 => add("g_idx", Dtype::I32, &[cols], groups),
            Compressed if layout.desc_act => add("weight_g_idx", Dtype::I32, &[cols], groups),
            Compressed if layout.group_size == Some(64) => {
                add("weight_g_idx", Dtype::I32, &[cols], vec![0xff; 4 * cols]);
            }
            _ => {}
        }
        if is_compressed {
            let shape = [rows, cols].iter().flat_map(|len| (*len as i64).to_le_bytes()).collect();
            add("weight_shape", Dtype::I64, &[2], shape);
        }
    }
}

/// Returns words `[height][width]` of eight numbers each, the first in the lowest bits.
fn pack([height, width]: [usize; 2], number: impl Fn([usize; 2], usize) -> u32) -> Vec<u32> {
    let places = (0..height).flat_map(|row| (0..width).map(move |col| [row, col]));
    let word = |place| (0..8).fold(0, |word, at| word | number(place, at) << (4 * at));
    places.map(word).collect()
}

fn round(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_f32(value).to_f32(),
        Dtype::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F16 => values.iter().flat_map(|it| f16::from_f32(*it).to_le_bytes()).collect(),
        Dtype::BF16 => values.iter().flat_map(|it| bf16::from_f32(*it).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|it| it.to_le_bytes()).collect(),
    }
}

fn open(folder: &Path, config: &Value, tensors: &Tensors) -> Result<Checkpoint, String> {
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    Checkpoint::open(folder, LoadFormat::Auto).map_err(|error| error.to_string())
}

/// Returns a configuration with widths that are not multiples of 128, and half of whose
/// feed-forward width cuts groups of 64.
fn llama() -> Value {
    json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 192, "intermediate_size": 320,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
        "vocab_size": 301, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu"})
}

fn qwen3() -> Value {
    let mut config = llama();
    config["architectures"] = json!(["Qwen3ForCausalLM"]);
    config["head_dim"] = json!(24);
    config
}

fn qwen3_moe() -> Value {
    let mut config = qwen3();
    config["architectures"] = json!(["Qwen3MoeForCausalLM"]);
    for (key, value) in
        [("num_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 96)]
    {
        config[key] = json!(value);
    }
    config
}

/// The tensors of a model in INT4, and of the same model with dequantized weights.
struct Pair {
    config: Value,
    layout: Layout,
    stored: Tensors,
    dequantised: Tensors,
}

impl Pair {
    fn new(config: Value, layout: Layout) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let plain = Checkpoint::open(folder.path(), LoadFormat::Dummy { seed: 3 }).unwrap();
        let (mut stored, mut dequantised) = (Tensors::new(), Tensors::new());
        for weight in Weight::all(plain.config()) {
            let (values, name) =
                (elements(&plain, weight), weight.hugging_face_name(plain.config()));
            let shape: Vec<usize> =
                weight.shape(plain.config()).dims().iter().map(|dim| *dim as usize).collect();
            // The key of layer 0 is left out. The output is quantized in one format.
            let is_quantised = match weight {
                Weight::Layer(0, LayerWeight::Key) | Weight::Embedding => false,
                Weight::Layer(_, LayerWeight::Router) | Weight::OutputNorm => false,
                Weight::Output => layout.packing == GptqV2,
                _ => shape.len() == 2,
            };
            let is_output_in_words = weight != Weight::Output || shape[0].is_multiple_of(8);
            if is_quantised && is_output_in_words {
                let matrix = Quantised::new(&values, [shape[0], shape[1]], layout);
                matrix.store(name.strip_suffix("weight").unwrap(), layout, &mut stored);
                let bytes = encode(Dtype::F32, &matrix.dequantised());
                dequantised.insert(name, (Dtype::F32, shape, bytes));
            } else {
                let tensor = (Dtype::BF16, shape, encode(Dtype::BF16, &values));
                stored.insert(name.clone(), tensor.clone());
                dequantised.insert(name, tensor);
            }
        }
        Self { config, layout, stored, dequantised }
    }

    fn quantised_config(&self) -> Value {
        let mut config = self.config.clone();
        config["quantization_config"] = self.layout.config();
        config
    }

    fn open(&self) -> Checkpoint {
        self.try_open(&self.stored).unwrap()
    }

    fn try_open(&self, tensors: &Tensors) -> Result<Checkpoint, String> {
        open(tempfile::tempdir().unwrap().path(), &self.quantised_config(), tensors)
    }

    fn open_dequantised(&self) -> Checkpoint {
        open(tempfile::tempdir().unwrap().path(), &self.config, &self.dequantised).unwrap()
    }

    /// Returns the error of opening the stored model after `change`.
    fn refusal(&self, change: impl FnOnce(&mut Tensors)) -> String {
        let mut tensors = self.stored.clone();
        change(&mut tensors);
        let error = self.try_open(&tensors).unwrap_err();
        assert_eq!(error.lines().count(), 1, "{error}");
        let (_, message) = error.split_once("model.safetensors: ").expect("names the file");
        message.to_owned()
    }
}

/// Packs rows as f32, and checks that the INT4 form of a matrix has the same values.
struct RowPacker {
    shard: Shard,
    rows: RefCell<Vec<Vec<f32>>>,
    int4_matrices: RefCell<usize>,
    /// Elements and bytes of the matrices in INT4.
    int4_sizes: RefCell<(u64, u64)>,
    /// The same on GPUs.
    gpu_sizes: RefCell<(u64, u64)>,
}

impl RowPacker {
    fn new(shard: Shard) -> Self {
        let (rows, gpu_sizes) = (RefCell::default(), RefCell::default());
        let (int4_matrices, int4_sizes) = (RefCell::default(), RefCell::default());
        Self { shard, rows, int4_matrices, int4_sizes, gpu_sizes }
    }
}

impl Packer for RowPacker {
    type Matrix = ();
    type Vector = ();

    fn pack_matrix(&self, source: &dyn RowSource) {
        let (rows, cols) = (source.rows(), source.cols());
        let mut values = vec![0.0; rows * cols];
        source.read_values(0, &mut values);
        if let Some(groups) = source.int4_groups() {
            *self.int4_matrices.borrow_mut() += 1;
            let mut numbers = vec![0; rows * cols];
            let (mut scales, mut zeros) =
                (vec![0.0; rows * groups.count()], vec![0; rows * groups.count()]);
            source.read_int4(0, &mut numbers, &mut scales, &mut zeros);
            let (elements, bytes) = &mut *self.int4_sizes.borrow_mut();
            *elements += numbers.len() as u64;
            *bytes += (rows * cols.div_ceil(2) + 4 * scales.len() + zeros.len()) as u64;
            if let Some(block) = groups.block().filter(|_| source.may_be_quantized()) {
                let (elements, bytes) = &mut *self.gpu_sizes.borrow_mut();
                *elements += numbers.len() as u64;
                *bytes += packed_bytes(rows, cols, block) as u64;
            }
            for (at, value) in values.iter().enumerate() {
                let group =
                    at / cols * groups.count() + usize::from(groups.of_columns()[at % cols]);
                let number = f32::from(numbers[at]) - f32::from(zeros[group]);
                assert_eq!(number * scales[group], *value, "element {at}");
            }
        }
        self.rows.borrow_mut().extend(values.chunks(cols).map(<[f32]>::to_vec));
    }

    fn pack_vector(&self, values: &[f32]) {
        self.rows.borrow_mut().push(values.to_vec());
    }

    fn pack_shard(&self) -> Shard {
        self.shard
    }
}

/// Returns the rows of a rank, and the number of matrices in INT4.
fn packed(checkpoint: &Checkpoint, shard: Shard) -> (Vec<Vec<f32>>, usize) {
    let packer = RowPacker::new(shard);
    TransformerWeights::pack(checkpoint, &packer, &mut |_| ()).unwrap();
    (packer.rows.into_inner(), packer.int4_matrices.into_inner())
}

const TOKENS: [u32; 19] = [1, 7, 250, 3, 99, 42, 42, 8, 300, 17, 5, 77, 120, 9, 2, 64, 31, 200, 11];

/// Returns the logits of all tokens, and the greedy tokens after them.
fn answer(runner: &mut Runner) -> (Vec<Vec<f32>>, Vec<u32>) {
    let mut sequence = runner.sequence(TOKENS.len() + 8);
    let logits = runner.forward(&mut [(&mut sequence, &TOKENS, TOKENS.len() as u32)]);
    let mut greedy = vec![argmax(logits.last().unwrap())];
    while greedy.len() < 8 {
        let last = runner.decode(&mut sequence, *greedy.last().unwrap());
        greedy.push(argmax(&last));
    }
    (logits, greedy)
}

#[test]
fn logits_and_greedy_tokens_of_every_layout_equal_those_of_dequantised_weights() {
    for (index, layout) in LAYOUTS.into_iter().enumerate() {
        for config in [llama(), qwen3()] {
            let pair = Pair::new(config, layout);
            let (stored, dequantised) = (pair.open(), pair.open_dequantised());
            for format in [WeightFormat::F32, WeightFormat::Bf16] {
                let run = |checkpoint| answer(&mut Runner::new(checkpoint, format, Isa::Auto, 64));
                assert!(run(&stored) == run(&dequantised), "{layout:?} {format}");
            }
            if index == 0 {
                let folder = tempfile::tempdir().unwrap();
                fs::write(folder.path().join("config.json"), pair.config.to_string()).unwrap();
                let plain = Checkpoint::open(folder.path(), LoadFormat::Dummy { seed: 3 }).unwrap();
                let run = |it| answer(&mut Runner::new(it, WeightFormat::F32, Isa::Auto, 64));
                assert!(run(&stored) != run(&plain), "the weights are quantized");
            }
        }
    }
}

/// A backend with 8-bit weights computes matrices in INT4 with inputs in bf16.
#[test]
fn matrices_in_int4_are_not_quantised_again() {
    let pair = Pair::new(llama(), Layout::new(GptqV2, Some(64), false));
    let mut config = pair.config.clone();
    config["vocab_size"] = json!(304);
    let pair = Pair::new(config, pair.layout);
    let mut tensors = pair.stored.clone();
    tensors.retain(|name, _| !name.contains("layers.0.self_attn.k_proj"));
    let name = "model.layers.0.self_attn.k_proj.";
    let key = &pair.dequantised[&format!("{name}weight")];
    let values: Vec<f32> =
        key.2.as_chunks().0.iter().map(|it| bf16::from_le_bytes(*it).to_f32()).collect();
    Quantised::new(&values, [96, 192], pair.layout).store(name, pair.layout, &mut tensors);
    let stored = pair.try_open(&tensors).unwrap();
    let (_, int4_matrices) = packed(&stored, Shard::WHOLE);
    assert_eq!(int4_matrices, 2 * 4 + 1, "all matrices of layers and the output");
    let run = |format| answer(&mut Runner::new(&stored, format, Isa::Auto, 64)).1;
    assert_eq!(run(WeightFormat::Q8), run(WeightFormat::Bf16));
}

#[test]
fn two_ranks_have_the_logits_of_ranks_with_dequantised_weights() {
    for layout in LAYOUTS {
        let pair = Pair::new(qwen3(), layout);
        let (stored, dequantised) = (pair.open(), pair.open_dequantised());
        let run = |checkpoint| {
            let format = WeightFormat::F32;
            let prefill = |runner: &mut Runner| {
                let mut sequence = runner.sequence(TOKENS.len());
                runner.forward(&mut [(&mut sequence, &TOKENS, TOKENS.len() as u32)])
            };
            together(checkpoint, format, group(2), "int4", prefill).0
        };
        assert!(run(&stored) == run(&dequantised), "{layout:?}");
    }
}

#[test]
fn shards_that_cut_groups_have_the_weights_of_dequantised_shards() {
    for layout in LAYOUTS {
        let pair = Pair::new(llama(), layout);
        let (stored, dequantised) = (pair.open(), pair.open_dequantised());
        for of in [1, 2, 4] {
            for shard in Shard::new(0, of).unwrap().all() {
                let (found, int4_matrices) = packed(&stored, shard);
                // Layer 0 has a key in bf16, so its queries, keys and values are dequantized.
                assert_eq!(int4_matrices, 2 * 4 - 1, "{layout:?}");
                let (expected, none) = packed(&dequantised, shard);
                assert!(found == expected && none == 0, "{layout:?}, {shard}");
            }
        }
    }
}

#[test]
fn experts_in_int4_have_the_logits_of_dequantised_weights() {
    for layout in [LAYOUTS[1], LAYOUTS[6], LAYOUTS[9]] {
        let pair = Pair::new(qwen3_moe(), layout);
        let (stored, dequantised) = (pair.open(), pair.open_dequantised());
        let run = |it| answer(&mut Runner::new(it, WeightFormat::F32, Isa::Auto, 64));
        assert!(run(&stored) == run(&dequantised), "{layout:?}");
        // Query and output of two layers, less the fused matrix with a key in bf16, and experts.
        assert_eq!(packed(&stored, Shard::WHOLE).1, 3 + 2 * 4 * 2);
    }
}

#[test]
fn sizes_and_formats_are_those_of_the_stored_matrices() {
    let pair = Pair::new(llama(), LAYOUTS[0]);
    let checkpoint = pair.open();
    let of_layer = 2 * 192 * 192 + 2 * 96 * 192 + 3 * 192 * 320;
    // Layer 0 has a key in bf16, so its query and value are dequantized.
    let elements = 2 * of_layer - (192 + 2 * 96) * 192;
    // Two groups in 192 columns, three in 320.
    let groups = 2 * ((2 * 192 + 2 * 96 + 2 * 320) * 2 + 192 * 3) - (192 + 2 * 96) * 2;
    let sizes = Int4Sizes {
        packed_elements: elements,
        packed_bytes: elements / 2 + groups * 5,
        largest_elements: 2 * 320 * 192,
        dequantized: 2,
    };
    assert_eq!(checkpoint.int4_sizes(Shard::WHOLE, false), sizes);
    // On GPUs a chunk has 8 rows and 128 columns: two chunks in 192 columns, three in 320.
    let chunks = (192 / 8) * 2 + 2 * (192 / 8 * 2 + 2 * 320 / 8 * 2 + 192 / 8 * 3) + 2 * 96 / 8 * 2;
    let packed_bytes = chunks * (512 + 32);
    assert_eq!(checkpoint.int4_sizes(Shard::WHOLE, true), Int4Sizes { packed_bytes, ..sizes });
    let formats = checkpoint.matrix_formats();
    let int4 = formats.iter().find(|it| it.name == "INT4 with a scale for each 128 of a row");
    assert_eq!(int4.unwrap().matrices, 2 * 7 - 1);
    assert_eq!(pair.open_dequantised().int4_sizes(Shard::WHOLE, false), Int4Sizes::default());
    assert!(!pair.open_dequantised().has_int4());
    assert_eq!(pair.open_dequantised().int4_layout(), 0);
    assert!(checkpoint.description().ends_with("BF16 + F16 + I32 + INT4 + INT4-1"));
}

#[test]
fn sizes_are_those_of_the_packed_matrices() {
    for layout in LAYOUTS {
        for config in [llama(), qwen3_moe()] {
            let checkpoint = Pair::new(config, layout).open();
            for shard in [1, 2, 4].into_iter().flat_map(|of| group(of).all()) {
                let packer = RowPacker::new(shard);
                TransformerWeights::pack(&checkpoint, &packer, &mut |_| ()).unwrap();
                let sizes = checkpoint.int4_sizes(shard, false);
                let found = (sizes.packed_elements, sizes.packed_bytes);
                assert_eq!(found, packer.int4_sizes.into_inner(), "{layout:?}, {shard}");
                let sizes = checkpoint.int4_sizes(shard, true);
                let found = (sizes.packed_elements, sizes.packed_bytes);
                assert_eq!(found, packer.gpu_sizes.into_inner(), "{layout:?}, {shard}, on a GPU");
            }
        }
    }
}

#[test]
fn dummy_weights_are_in_int4_where_the_configuration_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = llama();
    let open = |config: &Value| {
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        Checkpoint::open(folder.path(), LoadFormat::Dummy { seed: 3 }).unwrap()
    };
    let plain = open(&config);
    config["quantization_config"] = LAYOUTS[0].config();
    let int4 = open(&config);
    // Query, key and value are one matrix, and so are gate and up.
    assert_eq!((packed(&plain, Shard::WHOLE).1, packed(&int4, Shard::WHOLE).1), (0, 2 * 4));
    config["quantization_config"]["group_size"] = 64.into();
    let other = open(&config);
    let mut fingerprints = [&plain, &int4, &other].map(|it| it.model_fingerprint().unwrap());
    fingerprints.sort_unstable();
    assert!(fingerprints.windows(2).all(|pair| pair[0] != pair[1]), "{fingerprints:?}");
    let values = elements(&int4, Weight::Layer(1, LayerWeight::Up));
    let mean = values.iter().sum::<f32>() / values.len() as f32;
    let size = (values.iter().map(|value| value * value).sum::<f32>() / values.len() as f32).sqrt();
    assert!(mean.abs() < 0.05 * size, "{mean}");
    let wanted = 1.0 / (192.0_f32).sqrt();
    assert!((size / wanted - 1.0).abs() < 0.1, "{size}, not {wanted}");
}

/// GPTQModel subtracts from and adds to whole words, so numbers may borrow and carry.
#[test]
fn zero_points_of_the_first_format_are_words_less_a_constant() {
    const WORD: u32 = 0xeeee_ef3f;
    let values_of = |layout, word: u32| {
        let pair = Pair::new(llama(), layout);
        let mut tensors = pair.stored;
        let name = |last: &str| format!("{UP}{last}");
        // All numbers are 0 and all scales 1, so elements are zero points less.
        tensors.get_mut(&name("qweight")).unwrap().2.fill(0);
        let scales = &mut tensors.get_mut(&name("scales")).unwrap().2;
        let count = scales.len() / 2;
        *scales = encode(Dtype::F16, &vec![1.0; count]);
        tensors.get_mut(&name("qzeros")).unwrap().2[..4].copy_from_slice(&word.to_le_bytes());
        let mut config = pair.config;
        config["quantization_config"] = layout.config();
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = open(folder.path(), &config, &tensors).unwrap();
        let up = elements(&checkpoint, Weight::Layer(1, LayerWeight::Up));
        up.chunks(192).take(8).map(|row| row[0]).collect::<Vec<_>>()
    };
    let v1 = values_of(Layout::new(Gptq, Some(64), false), WORD);
    assert_eq!(v1, [0.0, -5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    let v2 = values_of(Layout::new(GptqV2, Some(64), false), 0x50);
    assert_eq!(v2, v1);
}

/// The tensors of both formats may be equal, but not their zero points.
#[test]
fn fingerprints_and_stored_weights_tell_the_formats_of_gptq_apart() {
    let pair = Pair::new(llama(), Layout::new(Gptq, Some(64), false));
    let first = pair.open();
    let mut second = pair.quantised_config();
    for key in ["checkpoint_format", "format"] {
        let mut config = second.clone();
        config["quantization_config"][key] = json!("gptq_v2");
        let other = open(tempfile::tempdir().unwrap().path(), &config, &pair.stored).unwrap();
        assert_ne!(other.model_fingerprint().unwrap(), first.model_fingerprint().unwrap());
        let encodings = |checkpoint: &Checkpoint| -> Vec<&str> {
            let stored = checkpoint.stored_weights().unwrap().into_iter();
            stored.filter(|it| it.name.ends_with("qzeros")).map(|it| it.encoding).collect()
        };
        assert_eq!(encodings(&first), ["INT4-1"; 13]);
        assert_eq!(encodings(&other), ["INT4"; 13]);
    }
    second["quantization_config"]["checkpoint_format"] = json!("gptq");
    let same = open(tempfile::tempdir().unwrap().path(), &second, &pair.stored).unwrap();
    assert_eq!(same.model_fingerprint().unwrap(), first.model_fingerprint().unwrap());
}

#[test]
fn files_that_change_after_they_were_opened_give_an_error_or_the_groups_of_the_start() {
    let pair = Pair::new(llama(), LAYOUTS[1]);
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = open(folder.path(), &pair.quantised_config(), &pair.stored).unwrap();
    let expected = packed(&checkpoint, Shard::WHOLE);
    let path = folder.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let groups = {
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let groups = tensors.tensor(&format!("{UP}g_idx")).unwrap().data().as_ptr_range();
        let offset = |at: *const u8| at as usize - bytes.as_ptr() as usize;
        offset(groups.start)..offset(groups.end)
    };
    bytes[groups].fill(0xff);
    let mut file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all(&bytes).unwrap();
    assert!(packed(&checkpoint, Shard::WHOLE) == expected);
    file.set_len(bytes.len() as u64 / 2).unwrap();
    let packer = RowPacker::new(Shard::WHOLE);
    let error = TransformerWeights::pack(&checkpoint, &packer, &mut |_| ()).err().unwrap();
    assert!(error.to_string().contains("the file changed while it was read"), "{error}");
}

#[test]
fn rows_of_more_groups_than_supported_are_refused() {
    let mut config = llama();
    let cols = 2049 * 1024;
    for (key, value) in [
        ("hidden_size", 8),
        ("head_dim", 1024),
        ("num_attention_heads", 2049),
        ("num_key_value_heads", 1),
    ] {
        config[key] = json!(value);
    }
    config["quantization_config"] = Layout::new(Gptq, Some(32), true).config();
    let numbers = (Dtype::I32, vec![cols / 8, 8], vec![0; 4 * cols]);
    let tensors = [("model.layers.0.self_attn.o_proj.qweight".to_owned(), numbers)].into();
    let error = open(tempfile::tempdir().unwrap().path(), &config, &tensors).unwrap_err();
    assert!(error.ends_with("number of groups in INT4 is 65568; expected up to 65536"), "{error}");
}

#[test]
fn fingerprint_and_stored_weights_cover_every_tensor_once() {
    for layout in [LAYOUTS[1], LAYOUTS[10]] {
        let pair = Pair::new(llama(), layout);
        let checkpoint = pair.open();
        let fingerprint = checkpoint.model_fingerprint().unwrap();
        let hashing = pair.open().hashing_packed();
        packed(&hashing, Shard::WHOLE);
        assert_eq!(hashing.model_fingerprint().unwrap(), fingerprint);
        let mut names: Vec<String> =
            checkpoint.stored_weights().unwrap().into_iter().map(|it| it.name).collect();
        names.sort();
        assert!(names.iter().eq(pair.stored.keys()), "{names:?}");
        let of_matrix = pair.stored.keys().filter(|name| name.contains("1.mlp.up_proj"));
        for name in of_matrix.filter(|name| !name.ends_with("weight_shape")) {
            let mut changed = pair.stored.clone();
            let bytes = &mut changed.get_mut(name).unwrap().2;
            match name.ends_with("g_idx") {
                true => bytes.swap(0, 4),
                false => bytes[0] ^= 1,
            }
            let other = pair.try_open(&changed).unwrap();
            assert_ne!(other.model_fingerprint().unwrap(), fingerprint, "{name}");
        }
    }
}

const UP: &str = "model.layers.1.mlp.up_proj.";

/// Returns the refusal of a tensor of a matrix after `change`.
fn refusal(
    layout: Layout,
    name: &str,
    change: impl FnOnce(&mut (Dtype, Vec<usize>, Vec<u8>)),
) -> String {
    let name = format!("{UP}{name}");
    let pair = Pair::new(llama(), layout);
    let message = pair.refusal(|tensors| change(tensors.get_mut(&name).unwrap()));
    let start = format!("tensor {name:?} at file offset ");
    let rest = message.strip_prefix(&start).unwrap_or_else(|| panic!("{message}"));
    rest.split_once(' ').unwrap().1.to_owned()
}

#[test]
fn tensors_of_other_shapes_and_types_are_refused() {
    let (gptq, awq, compressed) = (LAYOUTS[1], LAYOUTS[7], LAYOUTS[10]);
    for (layout, name, shape, expected) in [
        (gptq, "qweight", [320, 24], "[24, 320]"),
        (gptq, "qzeros", [40, 6], "[6, 40]"),
        (gptq, "scales", [320, 6], "[6, 320]"),
        (awq, "qweight", [40, 192], "[192, 40]"),
        (awq, "qzeros", [3, 80], "[6, 40]"),
        (compressed, "weight_packed", [24, 320], "[320, 24]"),
        (compressed, "weight_scale", [6, 320], "[320, 6]"),
        (compressed, "weight_zero_point", [6, 40], "[40, 6]"),
    ] {
        let message = refusal(layout, name, |tensor| tensor.1 = shape.to_vec());
        assert_eq!(message, format!("has shape {shape:?}; expected {expected}"));
    }
    let message = refusal(gptq, "g_idx", |tensor| tensor.1 = vec![96, 2]);
    assert_eq!(message, "has shape [96, 2]; expected [192]");
    let message = refusal(gptq, "qweight", |tensor| tensor.0 = Dtype::F32);
    assert_eq!(message, "has unsupported type F32; expected I32 with numbers in INT4");
    let message = refusal(compressed, "weight_g_idx", |tensor| tensor.0 = Dtype::U32);
    assert_eq!(message, "has unsupported type U32; expected I32");
    let message = refusal(awq, "scales", |tensor| {
        (tensor.0, tensor.1) = (Dtype::F8_E4M3, vec![6, 640]);
    });
    assert_eq!(message, "has unsupported type F8_E4M3; expected F32, F16 or BF16");
    // Half as many groups: the configuration has another group size than the tensors.
    let pair = Pair::new(llama(), Layout::new(Awq, Some(64), false));
    let other = Pair { layout: awq, ..pair };
    let message = other.refusal(|_| ());
    assert!(message.ends_with("has shape [3, 192]; expected [6, 192]"), "{message}");
}

#[test]
fn missing_tensors_are_refused() {
    for (layout, name, expected) in [
        (LAYOUTS[0], "qweight", "[24, 320]"),
        (LAYOUTS[0], "qzeros", "[2, 40]"),
        (LAYOUTS[0], "scales", "[2, 320]"),
        (LAYOUTS[1], "g_idx", "[192]"),
        (LAYOUTS[7], "qzeros", "[6, 40]"),
        (LAYOUTS[10], "weight_packed", "[320, 24]"),
        (LAYOUTS[10], "weight_scale", "[320, 6]"),
        (LAYOUTS[10], "weight_zero_point", "[40, 6]"),
        (LAYOUTS[10], "weight_shape", "[2]"),
    ] {
        let name = format!("{UP}{name}");
        let pair = Pair::new(llama(), layout);
        let message = pair.refusal(|tensors| _ = tensors.remove(&name));
        assert_eq!(message, format!("tensor {name:?} is missing; expected shape {expected}"));
    }
    // Groups of neighbouring columns need no list.
    let pair = Pair::new(llama(), LAYOUTS[0]);
    let mut tensors = pair.stored.clone();
    tensors.retain(|name, _| !name.ends_with("g_idx"));
    let found = packed(&pair.try_open(&tensors).unwrap(), Shard::WHOLE);
    assert!(found == packed(&pair.open(), Shard::WHOLE));
}

#[test]
fn shapes_may_be_stored_in_32_bits() {
    let pair = Pair::new(llama(), LAYOUTS[10]);
    let shape: Vec<u8> = [320_i32, 192].into_iter().flat_map(i32::to_le_bytes).collect();
    let mut tensors = pair.stored.clone();
    tensors.insert(format!("{UP}weight_shape"), (Dtype::I32, vec![2], shape));
    pair.try_open(&tensors).unwrap();
    let message = refusal(LAYOUTS[10], "weight_shape", |tensor| {
        (tensor.0, tensor.2) = (Dtype::I32, vec![0xff; 8]);
    });
    assert_eq!(message, "has [-1, -1]; expected [320, 192]");
}

#[test]
fn values_that_describe_no_matrix_are_refused() {
    let (gptq, compressed) = (LAYOUTS[1], LAYOUTS[10]);
    for (value, found) in [(f16::NAN, "NaN"), (f16::INFINITY, "inf"), (f16::NEG_INFINITY, "-inf")] {
        let message = refusal(gptq, "scales", |tensor| {
            tensor.2[14..16].copy_from_slice(&value.to_le_bytes());
        });
        let end = format!("is corrupt: element 7 is {found}; expected a finite number");
        assert_eq!(message, end);
    }
    for (value, found) in [(6_i32, "6"), (-1, "-1"), (i32::MAX, "2147483647")] {
        for (layout, name) in [(gptq, "g_idx"), (compressed, "weight_g_idx")] {
            let message = refusal(layout, name, |tensor| {
                tensor.2[8..12].copy_from_slice(&value.to_le_bytes());
            });
            assert_eq!(message, format!("has group {found} at element 2; expected 0 to 5"));
        }
    }
    // Only compressed-tensors writes -1 for groups of neighbouring columns.
    let message = refusal(gptq, "g_idx", |tensor| tensor.2.fill(0xff));
    assert_eq!(message, "has group -1 at element 0; expected 0 to 5");
    let message = refusal(compressed, "weight_shape", |tensor| tensor.2[0] = 0);
    assert_eq!(message, "has [256, 192]; expected [320, 192]");
    // A finite scale with which a number is not finite is found when the matrix is packed.
    let layout = Layout { scales: Dtype::F32, ..LAYOUTS[9] };
    let pair = Pair::new(llama(), layout);
    let mut tensors = pair.stored.clone();
    let scales = tensors.get_mut(&format!("{UP}weight_scale")).unwrap();
    scales.2[..4].copy_from_slice(&f32::MAX.to_le_bytes());
    let numbers = tensors.get_mut(&format!("{UP}weight_packed")).unwrap();
    numbers.2[0] = 0x8f;
    let checkpoint = pair.try_open(&tensors).unwrap();
    let packer = RowPacker::new(Shard::WHOLE);
    let error =
        TransformerWeights::pack(&checkpoint, &packer, &mut |_| ()).err().unwrap().to_string();
    assert!(error.contains(&format!("tensor \"{UP}weight_packed\" at file offset")), "{error}");
    assert!(error.ends_with("is corrupt: element 0 is inf; expected a finite number"), "{error}");
}

#[test]
fn tensors_without_a_matrix_are_refused() {
    let pair = Pair::new(llama(), LAYOUTS[0]);
    let weight = format!("{UP}weight");
    let message = pair.refusal(|tensors| {
        _ = tensors.insert(weight.clone(), pair.dequantised[&weight].clone());
    });
    assert!(message.starts_with(&format!("tensor {weight:?} at file offset")), "{message}");
    let message = pair.refusal(|tensors| {
        let stray = tensors[&format!("{UP}g_idx")].clone();
        _ = tensors.insert("model.layers.0.self_attn.k_proj.g_idx".to_owned(), stray);
    });
    assert!(message.contains("k_proj.g_idx\" at file offset"), "{message}");
    let message = pair.refusal(|tensors| {
        let norm = tensors.get_mut("model.norm.weight").unwrap();
        (norm.0, norm.1) = (Dtype::F8_E4M3, vec![384]);
    });
    assert!(message.contains("\"model.norm.weight\""), "{message}");
    // Words of eight rows must be whole.
    let mut config = llama();
    config["intermediate_size"] = json!(324);
    let mut pair = Pair::new(llama(), LAYOUTS[7]);
    pair.config = config;
    let message = pair.refusal(|tensors| {
        for (name, tensor) in tensors.iter_mut().filter(|it| it.0.contains("mlp.gate_proj")) {
            let rows = if name.ends_with("scales") { 324 } else { 41 };
            let height = tensor.1[0];
            let element = tensor.2.len() / tensor.1.iter().product::<usize>();
            (tensor.1, tensor.2) = (vec![height, rows], vec![0; height * rows * element]);
        }
    });
    assert_eq!(message, "height of a matrix in INT4 is 324; expected a multiple of 8");
}

#[test]
fn biases_of_zeros_are_ignored_and_others_are_refused() {
    let pair = Pair::new(llama(), LAYOUTS[0]);
    let name = format!("{UP}bias");
    let mut tensors = pair.stored.clone();
    tensors.insert(name.clone(), (Dtype::F16, vec![320], vec![0; 640]));
    let found = packed(&pair.try_open(&tensors).unwrap(), Shard::WHOLE);
    assert!(found == packed(&pair.open(), Shard::WHOLE));
    tensors.get_mut(&name).unwrap().2[639] = 0x3c;
    let error = pair.try_open(&tensors).unwrap_err();
    assert!(error.contains(&format!("tensor {name:?} at file offset")), "{error}");
    assert!(error.ends_with("is not part of the llama architecture"), "{error}");
}

#[test]
fn unsupported_configurations_are_refused_before_weights_are_read() {
    let group = "/config_groups/group_0";
    let int8 = json!({"num_bits": 8, "type": "int", "strategy": "token"});
    let changes: [(Layout, &str, Value, &str); 16] = [
        (
            LAYOUTS[0],
            "/format",
            json!("marlin"),
            "format: \"marlin\"; expected \"gptq\" or \"gptq_v2\"",
        ),
        (
            LAYOUTS[9],
            "/transform_config",
            json!({"config_groups": {"u": {"type": "hadamard"}}}),
            "transform_config: \"config_groups\"; expected null or {}",
        ),
        (LAYOUTS[0], "/bits", json!(3), "bits: 3; expected 4"),
        (LAYOUTS[0], "/bits", json!(8), "bits: 8; expected 4"),
        (LAYOUTS[0], "/group_size", json!(96), "group_size: 96; expected 32, 64, 128 or -1"),
        (LAYOUTS[0], "/group_size", json!(0), "group_size: 0; expected 32, 64, 128 or -1"),
        (
            LAYOUTS[0],
            "/checkpoint_format",
            json!("marlin"),
            "checkpoint_format: \"marlin\"; expected \"gptq\" or \"gptq_v2\"",
        ),
        (
            LAYOUTS[0],
            "/dynamic",
            json!({"+:.*up_proj": {"bits": 8}}),
            "dynamic: \"+:.*up_proj\"; expected patterns of matrices that are not quantized (\"-:\")",
        ),
        (LAYOUTS[6], "/bits", json!(8), "bits: 8; expected 4"),
        (LAYOUTS[6], "/group_size", json!(16), "group_size: 16; expected 32, 64, 128 or -1"),
        (LAYOUTS[6], "/version", json!("gemv"), "version: \"gemv\"; expected \"gemm\""),
        (LAYOUTS[6], "/zero_point", json!(false), "zero_point: false; expected true"),
        (
            LAYOUTS[9],
            "/config_groups/group_0/weights/num_bits",
            json!(8),
            "config_groups.group_0.weights: symmetric int of 8 bits; expected int of 4 bits",
        ),
        (
            LAYOUTS[9],
            "/config_groups/group_0/weights/group_size",
            json!(256),
            "config_groups.group_0.weights.group_size: 256; expected 32, 64, 128 or -1",
        ),
        (
            LAYOUTS[9],
            "/config_groups/group_0/weights/strategy",
            json!("tensor"),
            "config_groups.group_0.weights.strategy: \"tensor\"; expected \"channel\", or \"group\" with a group_size",
        ),
        (
            LAYOUTS[9],
            "/config_groups/group_0/input_activations",
            int8,
            "config_groups.group_0.input_activations: symmetric int of 8 bits; expected null: inputs are not quantized with INT4 weights",
        ),
    ];
    let refused = |quantization: Value| {
        let folder = tempfile::tempdir().unwrap();
        let mut config = llama();
        config["quantization_config"] = quantization;
        // No weights exist: the configuration is refused first.
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let error = Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap_err().to_string();
        let (_, message) = error.split_once("config.json: ").expect("names the file");
        message.strip_prefix("unsupported quantization_config.").unwrap_or(message).to_owned()
    };
    for (layout, pointer, value, message) in changes {
        let mut config = layout.config();
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        config.pointer_mut(parent).unwrap()[key] = value;
        assert_eq!(refused(config), message);
    }
    let mut config = LAYOUTS[9].config();
    let mut other = config.pointer(group).unwrap().clone();
    other["weights"]["group_size"] = json!(32);
    config["config_groups"]["group_1"] = other;
    assert_eq!(
        refused(config),
        "config_groups.group_1.weights: symmetric int of 4 bits; \
         expected the same groups and symmetry in all config_groups"
    );
    let mut config = LAYOUTS[0].config();
    config.as_object_mut().unwrap().remove("group_size");
    assert_eq!(refused(config), "key \"quantization_config.group_size\": is missing");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    /// Packing and reading give every number, with any widths and group sizes.
    #[test]
    fn matrices_of_any_shape_have_the_values_that_were_packed(
        heads in 1_usize..6,
        ffn in 1_usize..20,
        packing in prop::sample::select(vec![Gptq, GptqV2, Awq, Compressed]),
        group_size in prop::sample::select(vec![Some(32), Some(64), Some(128), None]),
        is_symmetric: bool,
        desc_act: bool,
    ) {
        let mut config = llama();
        for (key, value) in [("hidden_size", 24 * heads), ("intermediate_size", 8 * ffn),
            ("num_attention_heads", heads), ("num_key_value_heads", heads), ("num_hidden_layers", 1)]
        {
            config[key] = json!(value);
        }
        // Multiples of 37 would be in one group.
        let widths = [24 * heads, 8 * ffn];
        prop_assume!(widths.iter().all(|width| !width.is_multiple_of(37)));
        let is_symmetric = is_symmetric && packing != Awq;
        let layout = Layout::new(packing, group_size, is_symmetric);
        let layout = if desc_act && packing != Awq { layout.reordered() } else { layout };
        let pair = Pair::new(config, layout);
        let (stored, dequantised) = (pair.open(), pair.open_dequantised());
        for weight in Weight::all(stored.config()) {
            if let WeightShape::Matrix { .. } = weight.shape(stored.config()) {
                prop_assert!(elements(&stored, weight) == elements(&dequantised, weight), "{weight:?}");
            }
        }
    }
}
