//! LoRA adapters in PEFT's format: a folder with `adapter_config.json` and
//! `adapter_model.safetensors`.
//!
//! An adapter adds `scale · B · A` to weight matrices of a dense model, where A has `r` rows. The
//! base matrices stay as they are: the forward pass adds each row's own updates, so rows of several
//! adapters and of the base model share a step.

use std::{
    path::Path,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard},
};

use kernels::{
    Backend, Shard,
    backend::{LowRankShape, LowRankUpdate},
    cpu::CpuLowRank,
};
use safetensors::{SafeTensors, tensor::TensorView};
use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

use crate::{
    checkpoint::{file::io_error, read_json},
    config::{ModelConfig, fields::JsonFile},
    encoding::Encoding,
    error::ModelError,
    weight::{LayerWeight, Weight},
};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// Prefix that PEFT puts before the names of a model's tensors.
const PREFIX: &str = "base_model.model.";
/// Maximum size of the header of the weights in bytes.
const HEADER_BYTES_MAX: u64 = 4 << 20;

/// Weights that an adapter may change, by the matrix of the forward pass that has them.
const TARGETS: PerMatrix<&[LayerWeight]> = PerMatrix {
    qkv: &[LayerWeight::Query, LayerWeight::Key, LayerWeight::Value],
    output: &[LayerWeight::AttentionOutput],
    gate_up: &[LayerWeight::Gate, LayerWeight::Up],
    down: &[LayerWeight::Down],
};
const TARGET_NAMES: [&str; 7] =
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// Keys that change the arithmetic. Each must be absent, null, false or empty.
const REFUSED: [&str; 15] = [
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
];

/// Opened adapter, or one rank's shard of it.
#[derive(Debug)]
pub struct Adapter {
    content_hash: u128,
    rank: usize,
    layers: Vec<PerMatrix<Vec<LowRankUpdate>>>,
}

/// A value for each matrix of a layer of a dense model.
#[derive(Clone, Debug, Default)]
pub struct PerMatrix<T> {
    pub qkv: T,
    pub output: T,
    pub gate_up: T,
    pub down: T,
}

/// Adapters of a model, by slot: a backend's updates of each matrix of each layer. Clones share the
/// table, so that adapters can be loaded while steps run.
#[derive(Debug)]
pub struct AdapterTable<L> {
    layers: Arc<RwLock<Vec<PerMatrix<L>>>>,
}

impl<L> Clone for AdapterTable<L> {
    fn clone(&self) -> Self {
        Self { layers: Arc::clone(&self.layers) }
    }
}

impl<T> PerMatrix<T> {
    fn try_map<U, E>(self, mut map: impl FnMut(T) -> Result<U, E>) -> Result<PerMatrix<U>, E> {
        Ok(PerMatrix {
            qkv: map(self.qkv)?,
            output: map(self.output)?,
            gate_up: map(self.gate_up)?,
            down: map(self.down)?,
        })
    }

    fn map<U>(self, mut map: impl FnMut(T) -> U) -> PerMatrix<U> {
        let Self { qkv, output, gate_up, down } = self;
        PerMatrix { qkv: map(qkv), output: map(output), gate_up: map(gate_up), down: map(down) }
    }

    /// Returns the value of each matrix.
    pub fn each(&self) -> [&T; 4] {
        [&self.qkv, &self.output, &self.gate_up, &self.down]
    }
}

impl<L> AdapterTable<L> {
    /// Creates empty slots. A model without adapters has none.
    pub(crate) fn new<B: Backend<LowRank = L>>(
        backend: &B,
        config: &ModelConfig,
        slot_count: usize,
    ) -> Self {
        let layer_count = if config.takes_adapters() { config.layer_count } else { 0 };
        let layers = (0..layer_count).map(|layer| {
            TARGETS.map(|targets| {
                let parts = targets
                    .iter()
                    .map(|&target| Weight::Layer(layer, target).part(config, backend.shard()));
                let parts: Vec<_> = parts.collect();
                let shape = LowRankShape {
                    inputs: parts[0].cols.len(),
                    ranges: parts.iter().map(|part| part.rows.len()).collect(),
                };
                backend.low_rank(slot_count, &shape)
            })
        });
        Self { layers: Arc::new(RwLock::new(layers.collect())) }
    }

    /// Returns the updates of each layer.
    pub fn read(&self) -> RwLockReadGuard<'_, Vec<PerMatrix<L>>> {
        self.layers.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AdapterTable<CpuLowRank> {
    /// Replaces the adapter in a slot; `None` empties the slot, so that its rows compute the base
    /// model. Blocks until the running forward pass ends.
    ///
    /// # Panics
    /// When there is no such slot, or the adapter is of another model.
    pub fn set(&self, slot: usize, adapter: Option<Adapter>) {
        let mut layers = self.layers.write().unwrap_or_else(PoisonError::into_inner);
        let updates = match adapter {
            Some(adapter) => adapter.layers,
            None => vec![PerMatrix::default(); layers.len()],
        };
        assert_eq!(layers.len(), updates.len(), "an adapter has the layers of its model");
        for (slots, updates) in layers.iter_mut().zip(updates) {
            slots.qkv[slot] = updates.qkv;
            slots.output[slot] = updates.output;
            slots.gate_up[slot] = updates.gate_up;
            slots.down[slot] = updates.down;
        }
    }
}

impl Adapter {
    /// Opens the adapter in `folder` for a model, and keeps the part of a rank.
    ///
    /// # Errors
    /// When a file cannot be read, the adapter needs an unsupported feature or more than `rank_max`
    /// rows of A, or a tensor does not belong to the model or has another shape.
    pub fn open(
        folder: &Path,
        config: &ModelConfig,
        shard: Shard,
        rank_max: usize,
    ) -> Result<Self, ModelError> {
        let json = read_json(&folder.join(CONFIG))?;
        let (rank, scale) = checked_config(&json, config, rank_max)?;
        let path = folder.join(WEIGHTS);
        let bytes = read_weights(&path, config, rank)?;
        let invalid = |cause| ModelError::Safetensors { path: path.clone(), cause };
        let tensors = SafeTensors::deserialize(&bytes).map_err(invalid)?;
        let mut file = AdapterFile { path: &path, bytes: &bytes, tensors: &tensors, used: 0 };
        let layers = (0..config.layer_count).map(|layer| {
            TARGETS.try_map(|targets| {
                let mut first = 0;
                let mut updates = Vec::new();
                for &target in targets {
                    let weight = Weight::Layer(layer, target);
                    if let Some((a, b)) = file.update(weight, config, shard, (rank, scale))? {
                        updates.push(LowRankUpdate { rank, a, b, first });
                    }
                    first += weight.part(config, shard).rows.len();
                }
                Ok(updates)
            })
        });
        let layers = layers.collect::<Result<Vec<_>, ModelError>>()?;
        file.check_all_used(config)?;
        let mut hash = Xxh3::new();
        hash.update(&scale.to_le_bytes());
        hash.update(&bytes);
        Ok(Self { content_hash: hash.digest128(), rank, layers })
    }

    /// Returns the maximum memory in bytes for opening the adapter in `folder`: its weight file and
    /// all elements in f32. Returns 0 if the weight file is missing.
    pub fn open_bytes(folder: &Path) -> u64 {
        std::fs::metadata(folder.join(WEIGHTS)).map_or(0, |file| 3 * file.len())
    }

    /// Returns the bytes of an adapter of this rank on all matrices. `None`: a model without
    /// adapters.
    pub fn bytes_of_rank(config: &ModelConfig, rank: usize) -> Option<u64> {
        config.takes_adapters().then(|| matrix_bytes(config, rank))
    }

    /// Returns the bytes of the matrices in memory.
    pub fn bytes(&self) -> u64 {
        let matrices = |it: &PerMatrix<Vec<LowRankUpdate>>| {
            let updates = it.each().into_iter().flatten();
            updates.map(|update| update.a.len() + update.b.len()).sum::<usize>()
        };
        4 * self.layers.iter().map(matrices).sum::<usize>() as u64
    }

    /// Returns the rank of all updates.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the updates of each matrix of each layer.
    pub fn layers(&self) -> &[PerMatrix<Vec<LowRankUpdate>>] {
        &self.layers
    }

    /// Returns the xxh3-128 hash of the scale and of the file of the weights. KV of the adapter is
    /// keyed by it.
    pub fn content_hash(&self) -> u128 {
        self.content_hash
    }
}

/// Checks the configuration, and returns the rank and the scale.
fn checked_config(
    json: &JsonFile,
    config: &ModelConfig,
    rank_max: usize,
) -> Result<(usize, f32), ModelError> {
    let key = |name: &str| json.value.get(name).filter(|value| !value.is_null());
    let unsupported = |key: &str, found: &Value, supported| {
        let found = found.to_string();
        Err(ModelError::Unsupported { path: json.path.clone(), key: key.into(), found, supported })
    };
    let bad_value = |name, found: Option<&Value>, allowed: String| {
        let found = found.map_or("absent".into(), Value::to_string);
        ModelError::ConfigValue { path: json.path.clone(), name, found, allowed }
    };
    if !config.takes_adapters() {
        let name = config.family.name().into();
        let supported = "a model without experts and linear attention";
        return unsupported("base model", &Value::String(name), supported);
    }
    let peft_type = key("peft_type").unwrap_or(&Value::Null);
    if peft_type != "LORA" {
        return unsupported("peft_type", peft_type, "\"LORA\"");
    }
    if let Some(bias) = key("bias").filter(|bias| *bias != "none") {
        return unsupported("bias", bias, "\"none\"");
    }
    for name in REFUSED {
        let is_off = |value: &Value| match value {
            Value::Bool(value) => !value,
            Value::Array(values) => values.is_empty(),
            Value::Object(values) => values.is_empty(),
            _ => false,
        };
        if let Some(value) = key(name).filter(|value| !is_off(value)) {
            return unsupported(name, value, "absent, null, false or empty");
        }
    }
    // The other initializations, such as PiSSA, change the base weights.
    let keeps_base = |value: &Value| {
        value.is_boolean() || ["gaussian", "orthogonal", "eva"].iter().any(|name| value == name)
    };
    if let Some(value) = key("init_lora_weights").filter(|value| !keeps_base(value)) {
        return unsupported("init_lora_weights", value, "an initialization that keeps the base");
    }
    for target in key("target_modules").and_then(Value::as_array).into_iter().flatten() {
        let name = target.as_str().and_then(|target| target.rsplit('.').next());
        if !name.is_some_and(|name| TARGET_NAMES.contains(&name)) {
            return unsupported("target_modules", target, "names of linear layers, such as q_proj");
        }
    }
    let rank = key("r").and_then(Value::as_u64).map(|rank| rank as usize);
    let rank = rank.filter(|rank| (1..=rank_max).contains(rank));
    let rank = rank.ok_or_else(|| {
        bad_value("r", key("r"), format!("1 to {rank_max}, the limit model.adapter_rank_max"))
    })?;
    let alpha = key("lora_alpha").and_then(Value::as_f64).filter(|alpha| alpha.is_finite());
    let alpha = alpha
        .ok_or_else(|| bad_value("lora_alpha", key("lora_alpha"), "a finite number".to_owned()))?;
    let is_stabilized = key("use_rslora").and_then(Value::as_bool).unwrap_or(false);
    let divisor = if is_stabilized { (rank as f64).sqrt() } else { rank as f64 };
    Ok((rank, (alpha / divisor) as f32))
}

/// Returns the bytes of all matrices of an adapter in f32.
fn matrix_bytes(config: &ModelConfig, rank: usize) -> u64 {
    let PerMatrix { qkv, output, gate_up, down } = TARGETS;
    let widths = [qkv, output, gate_up, down].concat().into_iter().map(|target| {
        let (rows, cols) = Weight::Layer(0, target).matrix_shape(config);
        (rows + cols) as u64
    });
    4 * widths.sum::<u64>() * (config.layer_count * rank) as u64
}

/// Reads the weights of an adapter of this rank. A larger file than its matrices in f32 need is an
/// error.
fn read_weights(path: &Path, config: &ModelConfig, rank: usize) -> Result<Vec<u8>, ModelError> {
    let metadata = std::fs::metadata(path).map_err(io_error(path, "open"))?;
    // Opening a FIFO blocks.
    if !metadata.is_file() {
        let cause = std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file");
        return Err(io_error(path, "read")(cause));
    }
    let limit = HEADER_BYTES_MAX + matrix_bytes(config, rank);
    if metadata.len() > limit {
        return Err(ModelError::FileTooLarge { path: path.into(), limit });
    }
    std::fs::read(path).map_err(io_error(path, "read"))
}

/// A and B of a weight.
type MatrixPair = (Vec<f32>, Vec<f32>);

/// Weights of an adapter.
struct AdapterFile<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    tensors: &'a SafeTensors<'a>,
    /// Number of tensors that belong to the model.
    used: usize,
}

impl AdapterFile<'_> {
    /// Returns A `[rank][in]` and B `[rank][out]` of the rank's part of a weight, B with the scale.
    /// `None`: the adapter does not change the weight.
    fn update(
        &mut self,
        weight: Weight,
        config: &ModelConfig,
        shard: Shard,
        (rank, scale): (usize, f32),
    ) -> Result<Option<MatrixPair>, ModelError> {
        let [a_name, b_name] = names(weight, config);
        let (rows, cols) = weight.matrix_shape(config);
        let [a_shape, b_shape] = [[rank, cols], [rows, rank]];
        let (a, b) = match (self.tensors.tensor(&a_name), self.tensors.tensor(&b_name)) {
            (Err(_), Err(_)) => return Ok(None),
            (Ok(a), Ok(b)) => (a, b),
            (Err(_), Ok(_)) => return Err(self.missing(a_name, a_shape)),
            (Ok(_), Err(_)) => return Err(self.missing(b_name, b_shape)),
        };
        self.used += 2;
        let part = weight.part(config, shard);
        let a = self.elements(&a_name, &a, a_shape)?;
        let b = self.elements(&b_name, &b, b_shape)?;
        let a = a.chunks_exact(cols).flat_map(|row| &row[part.cols.clone()]).copied().collect();
        Ok(Some((a, transposed(&b[part.rows.start * rank..part.rows.end * rank], rank, scale))))
    }

    /// Returns the elements of a tensor in f32.
    fn elements(
        &self,
        name: &str,
        tensor: &TensorView<'_>,
        shape: [usize; 2],
    ) -> Result<Vec<f32>, ModelError> {
        let (path, tensor_name, offset) = (self.path.into(), name.into(), self.offset(tensor));
        let dims = |shape: &[usize]| shape.iter().map(|&dim| dim as u64).collect();
        if tensor.shape() != shape {
            let (found, expected) = (dims(tensor.shape()), dims(&shape));
            let tensor = tensor_name;
            return Err(ModelError::TensorShape { path, tensor, offset, found, expected });
        }
        let encoding = Encoding::of_safetensors(tensor.dtype());
        let Some(encoding) = encoding.filter(|encoding| *encoding != Encoding::F8E4m3) else {
            let (found, supported) = (format!("{:?}", tensor.dtype()), "F32, F16 and BF16".into());
            let tensor = tensor_name;
            return Err(ModelError::TensorType { path, tensor, offset, found, supported });
        };
        let mut values = vec![0.0; shape[0] * shape[1]];
        encoding.decode_row(tensor.data(), &mut values);
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(element) => {
                let (tensor, found) = (tensor_name, values[element]);
                Err(ModelError::NotFinite { path, tensor, offset, element, found })
            }
        }
    }

    /// Fails if the adapter has no tensor, or a tensor that is not part of the model.
    fn check_all_used(&self, config: &ModelConfig) -> Result<(), ModelError> {
        if self.used == self.tensors.len() && self.used > 0 {
            return Ok(());
        }
        let weights = |layer| {
            let PerMatrix { qkv, output, gate_up, down } = TARGETS;
            let targets = [qkv, output, gate_up, down].concat();
            targets.into_iter().map(move |target| Weight::Layer(layer, target))
        };
        let known: Vec<String> =
            (0..config.layer_count).flat_map(weights).flat_map(|it| names(it, config)).collect();
        let unknown = self.tensors.iter().find(|(name, _)| !known.iter().any(|it| it == name));
        Err(match unknown {
            None => self.missing(known[0].clone(), [1, config.hidden_size]),
            Some((name, tensor)) => ModelError::UnknownTensor {
                path: self.path.into(),
                tensor: name.into(),
                offset: self.offset(&tensor),
                architecture: config.family.name(),
            },
        })
    }

    fn missing(&self, tensor: String, shape: [usize; 2]) -> ModelError {
        let expected = shape.map(|dim| dim as u64).to_vec();
        ModelError::MissingTensor { path: self.path.into(), tensor, expected }
    }

    /// Returns the offset of a tensor in the file.
    fn offset(&self, tensor: &TensorView<'_>) -> u64 {
        (tensor.data().as_ptr() as usize - self.bytes.as_ptr() as usize) as u64
    }
}

/// Returns the names of A and B of a weight.
fn names(weight: Weight, config: &ModelConfig) -> [String; 2] {
    let name = weight.hugging_face_name(config);
    let module = name.strip_suffix(".weight").unwrap_or(&name);
    ["lora_A", "lora_B"].map(|part| format!("{PREFIX}{module}.{part}.weight"))
}

/// Transposes B `[out][rank]` and multiplies it by the scale.
fn transposed(b: &[f32], rank: usize, scale: f32) -> Vec<f32> {
    let column = |r: usize| b.iter().skip(r).step_by(rank).map(move |value| value * scale);
    (0..rank).flat_map(column).collect()
}
