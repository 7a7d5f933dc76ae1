//! Weights in files of either format.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    path::Path,
};

use kernels::{fp8::BlockScales, int4::ColumnGroups};

use super::file::{CheckpointFile, FileIdentity, TensorBytes};
use crate::{
    config::{
        ModelConfig,
        quantization::{Int4Format, Quantization, ScaleStrategy},
    },
    encoding::{Encoding, Format},
    error::ModelError,
    layer::ExpertSpec,
    matrix::Scales,
    rope::{RowOrder, RowPart},
    weight::{ExpertWeight, LayerWeight, Weight, WeightShape},
};

/// Divisors of the rope frequencies in GGUF files, which are part of the configuration.
pub(super) const ROPE_DIVISORS: &str = "rope_freqs.weight";
/// Older exports to safetensors store the rope frequencies of every layer, which follow from the
/// configuration.
const ROPE_FREQUENCIES_SUFFIX: &str = ".rotary_emb.inv_freq";

/// The files of a model and the directory of their tensors.
pub(super) struct StoredWeights {
    pub format: Format,
    pub(super) files: Vec<CheckpointFile>,
    pub(super) tensors: HashMap<String, Entry>,
    /// Scales of FP8 matrices, by the name of the matrix.
    scales: HashMap<String, MatrixScales>,
    /// How matrices in INT4 are stored, if there may be any.
    pub(super) int4: Option<Int4Format>,
    /// Groups of the columns of every matrix in INT4, as checked when the files were opened.
    pub(super) column_groups: HashMap<Weight, ColumnGroups>,
}

struct MatrixScales {
    scales: BlockScales,
    /// Names of the tensors with the scales of the matrix and, if they are static, of its inputs.
    tensors: Vec<String>,
}

/// Suffixes of the tensor with the scales of a matrix, appended to the name of the matrix. All
/// scales multiply.
const SCALE_SUFFIXES: [&str; 2] = ["_scale_inv", "_scale"];
/// Last component of the name of the tensor with the static scale of a matrix's inputs.
const INPUT_SCALES: [&str; 2] = ["input_scale", "activation_scale"];
/// Last component of the names of matrices.
const WEIGHT: &str = "weight";
/// First components of the names of the weights of layers.
const LAYERS: &str = "model.layers.";
/// Prefix of the names of the weights of the model without its LM head.
const BASE: &str = "model.";
/// Prefix of the names of the language model's weights in multimodal models.
const LANGUAGE_MODEL: &str = "language_model.";
/// Begins of the names of weights for multi-token prediction, in ERNIE and in hybrid Qwen models.
const MTP: [&str; 2] = ["model.mtp_", "mtp."];

/// Tensor of the directory.
pub(super) struct Entry {
    /// Index of the file.
    pub file: usize,
    /// Bytes in the file; checked to be in the file.
    pub range: Range<u64>,
    /// Dimensions, slowest first.
    pub dims: Vec<u64>,
    /// Encoding, or the name of an unsupported type.
    pub encoding: Result<Encoding, String>,
}

/// Weight in a file, before its shape is checked.
pub(crate) struct StoredTensor<'a> {
    pub path: &'a Path,
    pub name: String,
    /// Offset from the start of the file, in bytes.
    pub offset: u64,
    /// Dimensions, slowest first.
    pub dims: Vec<u64>,
    pub encoding: Encoding,
    pub bytes: TensorBytes<'a>,
    pub order: RowOrder,
    /// Scales of [`Encoding::Mxfp4`], and of [`Encoding::F8E4m3`] after
    /// [`StoredWeights::read_quantization`] has found them.
    pub scales: Option<Scales<'a>>,
}

impl StoredWeights {
    pub(super) fn new(format: Format) -> Self {
        let (files, tensors, scales) = (Vec::new(), HashMap::new(), HashMap::new());
        Self { format, files, tensors, scales, int4: None, column_groups: HashMap::new() }
    }

    /// Adds a file and returns its index.
    pub(super) fn add_file(&mut self, file: CheckpointFile) -> usize {
        self.files.push(file);
        self.files.len() - 1
    }

    /// Adds a tensor. Returns false when the directory has a tensor with this name.
    pub(super) fn add_tensor(&mut self, name: String, entry: Entry) -> bool {
        self.tensors.insert(name, entry).is_none()
    }

    /// Returns the identities of the files, in the order in which they were opened.
    pub(super) fn files(&self) -> Vec<FileIdentity> {
        self.files.iter().map(CheckpointFile::identity).collect()
    }

    /// Fails if a read of one of the files failed.
    pub(super) fn check_reads(&self) -> Result<(), ModelError> {
        self.files.iter().try_for_each(CheckpointFile::check_reads)
    }

    /// Fails if a read of one of the files failed, or if one was written since it was opened.
    pub(super) fn check_unchanged(&self) -> Result<(), ModelError> {
        self.files.iter().try_for_each(CheckpointFile::check_unchanged)
    }

    pub(super) fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    fn name_of(&self, weight: Weight, config: &ModelConfig) -> String {
        match self.format {
            Format::Gguf => weight.gguf_name(),
            Format::Safetensors => match self.expert_stack(weight, config) {
                Some((name, _)) => name,
                None => self.name_in_files(weight.hugging_face_name(config)),
            },
        }
    }

    /// Returns the tensor with a projection of all experts of a layer, and the rows that a matrix
    /// has in it: gate and up `[experts][2 * size][hidden]`, down `[experts][hidden][size]`. `None`
    /// if the files have no such tensor for the weight, or its experts are in MXFP4.
    fn expert_stack(&self, weight: Weight, config: &ModelConfig) -> Option<(String, RowPart)> {
        let Weight::Layer(layer, LayerWeight::Expert(expert, of)) = weight else { return None };
        let ExpertSpec { count, size, .. } = config.experts()?;
        if self.format != Format::Safetensors || config.family.has_stacked_experts() {
            return None;
        }
        let (name, stride, first, group) = match of {
            ExpertWeight::Gate => ("gate_up", 2 * size, 0, size),
            ExpertWeight::Up => ("gate_up", 2 * size, size, size),
            ExpertWeight::Down => ("down", config.hidden_size, 0, config.hidden_size),
        };
        let name = self.name_in_files(format!("model.layers.{layer}.mlp.experts.{name}_proj"));
        let first = expert as usize * stride + first;
        let part = RowPart { first, group, stride, stored_rows: count * stride };
        self.has(&name).then_some((name, part))
    }

    pub(super) fn name_in_files(&self, name: String) -> String {
        // Embedding models are often saved as the base class, without this prefix.
        if let Some(bare) = name.strip_prefix(BASE).filter(|bare| self.has(bare)) {
            return bare.to_owned();
        }
        let of_multimodal = format!("{LANGUAGE_MODEL}{name}");
        // In Qwen's multimodal models, the prefix follows that of the base class.
        let in_base = name.strip_prefix(BASE).map(|bare| format!("{BASE}{LANGUAGE_MODEL}{bare}"));
        let names = [Some(of_multimodal), in_base].into_iter().flatten();
        names.into_iter().find(|name| self.has(name)).unwrap_or(name)
    }

    /// Returns whether the output projection is the embedding: the files have no output, or one
    /// with the bytes of the embedding. Reads both if they are equal.
    pub(super) fn output_is_embedding(&self, config: &ModelConfig) -> bool {
        if self.is_int4(Weight::Output, config) {
            return false;
        }
        let entry = |weight| self.tensors.get(&self.name_of(weight, config));
        let bytes = |entry: &Entry| TensorBytes::new(&self.files[entry.file], entry.range.clone());
        match (entry(Weight::Output), entry(Weight::Embedding)) {
            (Some(output), Some(embedding)) => {
                (&output.dims, &output.encoding) == (&embedding.dims, &embedding.encoding)
                    // The scales may differ.
                    && output.encoding != Ok(Encoding::F8E4m3)
                    && bytes(output).equals(bytes(embedding))
            }
            _ => true,
        }
    }

    pub(super) fn tensor(
        &self,
        weight: Weight,
        config: &ModelConfig,
    ) -> Result<StoredTensor<'_>, ModelError> {
        if let Some(stack) = self.stack_of(weight, config) {
            return self.of_stack(stack, weight, config);
        }
        let name = self.name_of(weight, config);
        if !self.has(&name) {
            return Err(self.missing(name, weight.shape(config).dims()));
        }
        let order = self.order_of(weight, config);
        let tensor = self.named(name, order)?;
        if let RowOrder::Part(part) = order {
            return tensor.of_part(part, weight, config);
        }
        match weight {
            Weight::Layer(_, LayerWeight::Expert(expert, _)) if self.format == Format::Gguf => {
                tensor.expert(expert, weight.shape(config), config)
            }
            // GGUF files store the one row as a vector.
            Weight::Layer(_, LayerWeight::SharedRouter) if tensor.dims.len() == 1 => {
                Ok(StoredTensor { dims: vec![1, tensor.dims[0]], ..tensor })
            }
            // ERNIE stores the vector as one row.
            Weight::Layer(_, LayerWeight::RouterBias) if matches!(tensor.dims[..], [1, _]) => {
                Ok(StoredTensor { dims: vec![tensor.dims[1]], ..tensor })
            }
            _ => Ok(tensor),
        }
    }

    /// Returns the order of the rows of a weight that has a tensor of its own.
    pub(super) fn order_of(&self, weight: Weight, config: &ModelConfig) -> RowOrder {
        if let Some(part) = self.part_of(weight, config) {
            return RowOrder::Part(part);
        }
        let is_paired = matches!(weight, Weight::Layer(_, LayerWeight::Query | LayerWeight::Key))
            && config.family.pairs_rows(self.format);
        match is_paired {
            true => RowOrder::Pairs { head_dim: config.head_dim },
            false => RowOrder::Halves,
        }
    }

    /// Returns the rows of its tensor that a weight has; `None`: all.
    pub(super) fn part_of(&self, weight: Weight, config: &ModelConfig) -> Option<RowPart> {
        match weight {
            Weight::Layer(_, LayerWeight::Expert(..)) => Some(self.expert_stack(weight, config)?.1),
            Weight::Layer(_, weight) if self.format == Format::Safetensors => {
                config.family.weight_part(weight, config)
            }
            _ => None,
        }
    }

    /// Returns the tensor that has a weight and others, as stored.
    pub(super) fn whole_tensor(
        &self,
        weight: Weight,
        config: &ModelConfig,
    ) -> Result<StoredTensor<'_>, ModelError> {
        self.named(self.name_of(weight, config), RowOrder::Halves)
    }

    pub(super) fn missing(&self, tensor: String, expected: Vec<u64>) -> ModelError {
        // An opened model has at least one file; an empty index has none.
        let path = self.files.first().map_or(Path::new(""), CheckpointFile::path);
        ModelError::MissingTensor { path: path.into(), tensor, expected }
    }

    /// Returns a tensor that the directory has.
    pub(super) fn named(
        &self,
        name: String,
        order: RowOrder,
    ) -> Result<StoredTensor<'_>, ModelError> {
        let Entry { file, range, dims, encoding } = &self.tensors[&name];
        let file = &self.files[*file];
        let (path, offset) = (file.path(), range.start);
        let encoding = match encoding {
            Ok(encoding) => *encoding,
            Err(found) => {
                let supported = match self.format {
                    Format::Gguf => format!("one of {}", gguf::TensorKind::supported_names()),
                    Format::Safetensors => "F32, F16, BF16 or F8_E4M3".into(),
                };
                let (path, found) = (path.into(), found.clone());
                return Err(ModelError::TensorType {
                    path,
                    tensor: name,
                    offset,
                    found,
                    supported,
                });
            }
        };
        let (bytes, dims) = (TensorBytes::new(file, range.clone()), dims.clone());
        let scales = self.scales.get(&name).map(|it| Scales::Fp8(&it.scales));
        Ok(StoredTensor { path, name, offset, dims, encoding, bytes, order, scales })
    }

    /// Returns a tensor that the file declares as `declared`, and whose bytes have this encoding.
    pub(super) fn raw_tensor(
        &self,
        name: String,
        declared: &str,
        encoding: Encoding,
        expected: Vec<u64>,
    ) -> Result<StoredTensor<'_>, ModelError> {
        let Some(entry) = self.tensors.get(&name) else {
            return Err(self.missing(name, expected));
        };
        let file = &self.files[entry.file];
        let tensor = StoredTensor {
            path: file.path(),
            name,
            offset: entry.range.start,
            dims: entry.dims.clone(),
            encoding,
            bytes: TensorBytes::new(file, entry.range.clone()),
            order: RowOrder::Halves,
            scales: None,
        };
        match &entry.encoding {
            Err(found) if found == declared && tensor.dims == expected => Ok(tensor),
            Err(found) if found == declared => Err(tensor.wrong_shape(expected)),
            found => Err(ModelError::TensorType {
                path: tensor.path.into(),
                tensor: tensor.name,
                offset: tensor.offset,
                found: match found {
                    Ok(encoding) => encoding.name().to_owned(),
                    Err(name) => name.clone(),
                },
                supported: match encoding.name() == declared {
                    true => declared.to_owned(),
                    false => format!("{declared} with numbers in {}", encoding.name()),
                },
            }),
        }
    }

    /// Returns a tensor of floats that has one of these shapes. Errors name the first.
    pub(super) fn float_tensor(
        &self,
        name: String,
        shapes: &[Vec<u64>],
    ) -> Result<StoredTensor<'_>, ModelError> {
        if !self.has(&name) {
            return Err(self.missing(name, shapes[0].clone()));
        }
        let tensor = self.named(name, RowOrder::Halves)?;
        if tensor.encoding == Encoding::F8E4m3 {
            return Err(tensor.wrong_type("F32, F16 or BF16".into()));
        }
        if !shapes.contains(&tensor.dims) {
            return Err(tensor.wrong_shape(shapes[0].clone()));
        }
        Ok(tensor)
    }

    /// Reads and checks the scales of all FP8 matrices, and scales and groups of all matrices in
    /// INT4.
    pub(super) fn read_quantization(
        &mut self,
        config: &ModelConfig,
        quantization: Option<Quantization>,
    ) -> Result<(), ModelError> {
        let strategy = match quantization {
            Some(Quantization::Fp8(strategy)) => Some(strategy),
            Some(Quantization::Int4(_)) | None => None,
        };
        self.check_int4(config)?;
        for weight in Weight::all(config) {
            let name = self.name_of(weight, config);
            let is_fp8 = |entry: &Entry| entry.encoding == Ok(Encoding::F8E4m3);
            if !self.tensors.get(&name).is_some_and(is_fp8) || self.scales.contains_key(&name) {
                continue;
            }
            let matrix = self.named(name.clone(), RowOrder::Halves)?;
            let shape = match (weight.shape(config), self.part_of(weight, config)) {
                (WeightShape::Matrix { cols, .. }, Some(part)) => {
                    WeightShape::Matrix { rows: part.stored_rows, cols }
                }
                (shape, _) => shape,
            };
            if weight.is_expert() && matrix.dims.len() == 3 {
                let supported = "F32, F16 or BF16; FP8 experts are one tensor each";
                return Err(matrix.wrong_type(supported.into()));
            }
            if matrix.dims != shape.dims() {
                return Err(matrix.wrong_shape(shape.dims()));
            }
            let (WeightShape::Matrix { rows, cols }, Some(strategy)) = (shape, strategy) else {
                let supported = "F32, F16 or BF16; FP8 is for matrices of a quantization_config";
                return Err(matrix.wrong_type(supported.into()));
            };
            let scales = self.matrix_scales(&matrix, [rows, cols], strategy)?;
            self.scales.insert(name, scales);
        }
        self.check_reads()
    }

    fn matrix_scales(
        &self,
        matrix: &StoredTensor<'_>,
        shape: [usize; 2],
        strategy: ScaleStrategy,
    ) -> Result<MatrixScales, ModelError> {
        let names = SCALE_SUFFIXES.map(|suffix| format!("{}{suffix}", matrix.name));
        let Some(name) = names.iter().find(|name| self.has(name)) else {
            let expected = strategy.shapes(shape).swap_remove(0);
            let [block, other] = names;
            let tensor = if strategy == ScaleStrategy::Block { block } else { other };
            return Err(ModelError::MissingTensor { path: matrix.path.into(), tensor, expected });
        };
        let values = self.scale_values(name.clone(), &strategy.shapes(shape))?;
        let scales = BlockScales::new(shape, strategy.block(shape), values);
        let mut tensors = vec![name.clone()];
        let module = matrix.name.strip_suffix(WEIGHT).unwrap_or(&matrix.name);
        let inputs = INPUT_SCALES.map(|suffix| format!("{module}{suffix}"));
        if let Some(name) = inputs.into_iter().find(|name| self.has(name)) {
            self.scale_values(name.clone(), &ScaleStrategy::Tensor.shapes(shape))?;
            tensors.push(name);
        }
        Ok(MatrixScales { scales, tensors })
    }

    /// Returns the scales of a tensor of the directory.
    fn scale_values(&self, name: String, shapes: &[Vec<u64>]) -> Result<Vec<f32>, ModelError> {
        let tensor = self.float_tensor(name, shapes)?;
        let values = tensor.values();
        match values.iter().position(|scale| !(scale.is_finite() && *scale >= 0.0)) {
            None => Ok(values),
            Some(element) => Err(ModelError::InvalidScale {
                path: tensor.path.into(),
                tensor: tensor.name,
                offset: tensor.offset,
                element,
                found: values[element],
            }),
        }
    }

    /// Returns the tensors with scales of a matrix and its inputs.
    pub(super) fn scale_tensors(&self, matrix: &str) -> Result<Vec<StoredTensor<'_>>, ModelError> {
        let names = self.scales.get(matrix).into_iter().flat_map(|it| &it.tensors);
        names.map(|name| self.named(name.clone(), RowOrder::Halves)).collect()
    }

    pub(super) fn refuse_unknown_tensors(&self, config: &ModelConfig) -> Result<(), ModelError> {
        // Some exports repeat a tied output.
        let weights = Weight::all(config).chain([Weight::Output]);
        let weights = weights.filter(|weight| !self.is_int4(*weight, config));
        let mut known: HashSet<String> =
            weights.map(|weight| self.name_of(weight, config)).collect();
        known.extend(self.names_of_int4(config));
        known.extend(self.names_of_stacks(config));
        known.extend(self.scales.values().flat_map(|it| it.tensors.iter().cloned()));
        let is_known = |name: &str| {
            known.contains(name)
                || match self.format {
                    Format::Gguf => name == ROPE_DIVISORS,
                    Format::Safetensors => {
                        name.ends_with(ROPE_FREQUENCIES_SUFFIX)
                            || is_of_mtp_layer(name, config)
                            || self.is_empty_bias(name)
                            || config.family.ignores(name)
                    }
                }
        };
        let unknown = self.tensors.iter().filter(|(name, _)| !is_known(name));
        match unknown.min_by_key(|(name, _)| *name) {
            None => Ok(()),
            Some((name, entry)) => Err(ModelError::UnknownTensor {
                path: self.files[entry.file].path().into(),
                tensor: name.clone(),
                offset: entry.range.start,
                architecture: config.family.name(),
            }),
        }
    }
}

/// Returns whether a tensor belongs to a layer for multi-token prediction, after the last layer.
fn is_of_mtp_layer(name: &str, config: &ModelConfig) -> bool {
    let index = name.strip_prefix(LAYERS).and_then(|name| name.split('.').next()?.parse().ok());
    let is_after_last = index.is_some_and(|index: usize| index >= config.layer_count);
    config.family.has_mtp_layers()
        && (is_after_last || MTP.iter().any(|begin| name.starts_with(begin)))
}

impl StoredTensor<'_> {
    /// Returns the matrix of one expert, of which a file has all in one tensor.
    fn expert(
        self,
        index: u32,
        shape: WeightShape,
        config: &ModelConfig,
    ) -> Result<Self, ModelError> {
        let count = config.experts().map_or(0, |experts| experts.count as u64);
        let expected: Vec<u64> = std::iter::once(count).chain(shape.dims()).collect();
        if self.dims != expected {
            return Err(self.wrong_shape(expected));
        }
        let bytes = self.bytes.len() / count as usize;
        let begin = index as usize * bytes;
        Ok(Self {
            name: format!("{}[{index}]", self.name),
            offset: self.offset + begin as u64,
            dims: shape.dims(),
            bytes: self.bytes.part(begin..begin + bytes),
            ..self
        })
    }

    /// Returns the rows of a tensor that belong to a weight. The vector of a convolution is stored
    /// as `[channels][1][conv_size]`.
    fn of_part(
        self,
        part: RowPart,
        weight: Weight,
        config: &ModelConfig,
    ) -> Result<Self, ModelError> {
        let rows = part.stored_rows as u64;
        let expected = match weight.shape(config) {
            WeightShape::Matrix { cols, .. } if weight.is_expert() => {
                let experts = config.experts().map_or(1, |experts| experts.count as u64);
                vec![experts, rows / experts, cols as u64]
            }
            WeightShape::Matrix { cols, .. } => vec![rows, cols as u64],
            WeightShape::Vector { .. } => {
                let size = config.linear_attention().map_or(1, |delta| delta.conv_size as u64);
                vec![rows / size, 1, size]
            }
        };
        match self.dims == expected {
            true => Ok(Self { dims: weight.shape(config).dims(), ..self }),
            false => Err(self.wrong_shape(expected)),
        }
    }

    /// Returns the name of the element type and, for FP8, of the part with a scale.
    pub(crate) fn format(&self, rows: usize, cols: usize) -> String {
        let name = self.encoding.name();
        let scales = match self.scales {
            None => return name.to_owned(),
            Some(Scales::Mxfp4(_)) => return format!("{name} with a scale for each 32 of a row"),
            Some(Scales::Fp8(scales)) => scales,
        };
        match scales.block() {
            block if block == [rows, cols] => format!("{name} with a scale for the matrix"),
            block if block == [1, cols] => format!("{name} with a scale for each row"),
            [rows, cols] => format!("{name} with a scale for each {rows}x{cols} block"),
        }
    }

    /// Returns all elements, without scales.
    pub(super) fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.dims.iter().product::<u64>() as usize];
        self.decode(&mut values);
        values
    }

    /// Decodes all elements, without scales.
    fn decode(&self, out: &mut [f32]) {
        let mut bytes = vec![0; self.bytes.len()];
        self.bytes.read(0, &mut bytes);
        self.encoding.decode_row(&bytes, out);
    }

    /// Decodes all elements of a vector; rejects non-finite ones.
    pub(crate) fn read_vector(&self, out: &mut [f32]) -> Result<(), ModelError> {
        let mut stored = vec![0.0; self.order.stored_rows(out.len())];
        self.decode(&mut stored);
        for (element, out) in out.iter_mut().enumerate() {
            *out = stored[self.order.stored_row(element)];
        }
        match out.iter().position(|value| !value.is_finite()) {
            None => Ok(()),
            Some(element) => Err(self.not_finite(self.order.stored_row(element), out[element])),
        }
    }

    pub(crate) fn wrong_shape(self, expected: Vec<u64>) -> ModelError {
        let Self { path, name: tensor, offset, dims: found, .. } = self;
        ModelError::TensorShape { path: path.into(), tensor, offset, found, expected }
    }

    pub(crate) fn wrong_type(&self, supported: String) -> ModelError {
        ModelError::TensorType {
            path: self.path.into(),
            tensor: self.name.clone(),
            offset: self.offset,
            found: self.encoding.name().into(),
            supported,
        }
    }

    pub(super) fn wrong_value(&self, found: String, expected: String) -> ModelError {
        let (path, tensor, offset) = (self.path.into(), self.name.clone(), self.offset);
        ModelError::TensorValue { path, tensor, offset, found, expected }
    }

    pub(crate) fn not_finite(&self, element: usize, found: f32) -> ModelError {
        ModelError::NotFinite {
            path: self.path.into(),
            tensor: self.name.clone(),
            offset: self.offset,
            element,
            found,
        }
    }
}
