//! Quantization of the matrices of a Hugging Face checkpoint, from `quantization_config`.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::fields::{Fields, JsonFile};
use crate::{error::ModelError, families::Family};

const KEY: &str = "quantization_config";
/// Rows and columns of a block.
const BLOCK: [usize; 2] = [128, 128];

/// Part of an FP8 matrix that shares a scale. Matrices in other formats have no scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScaleStrategy {
    Tensor,
    /// A row.
    Channel,
    Block,
}

impl ScaleStrategy {
    /// Returns rows and columns of a block of a matrix.
    pub(crate) fn block(self, [rows, cols]: [usize; 2]) -> [usize; 2] {
        match self {
            Self::Tensor => [rows, cols],
            Self::Channel => [1, cols],
            Self::Block => BLOCK,
        }
    }

    /// Returns the shapes that the scales of a matrix may have in a file.
    pub(crate) fn shapes(self, [rows, cols]: [usize; 2]) -> Vec<Vec<u64>> {
        let blocks = |len: usize, block: usize| len.div_ceil(block) as u64;
        match self {
            Self::Tensor => vec![vec![1], vec![], vec![1, 1]],
            Self::Channel => vec![vec![rows as u64, 1], vec![rows as u64]],
            Self::Block => vec![vec![blocks(rows, BLOCK[0]), blocks(cols, BLOCK[1])]],
        }
    }
}

/// Quantization of the matrices of layers. Some may be left out of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Quantization {
    Fp8(ScaleStrategy),
    Int4(Int4Format),
}

impl Quantization {
    /// Returns how matrices in INT4 are stored, if there may be any.
    pub(crate) fn int4(self) -> Option<Int4Format> {
        match self {
            Self::Int4(format) => Some(format),
            Self::Fp8(_) => None,
        }
    }
}

/// How a checkpoint stores its matrices in INT4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Int4Format {
    pub packing: Int4Packing,
    /// Columns of a group; `None`: all columns.
    pub group_size: Option<usize>,
}

impl Int4Format {
    /// Returns the number of groups of a row.
    pub(crate) fn group_count(self, cols: usize) -> usize {
        self.group_size.map_or(1, |size| cols.div_ceil(size))
    }
}

/// Tensors of a matrix in INT4, and the order of the numbers in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Int4Packing {
    Gptq {
        /// Whether the file has the words of zero points less `0x1111_1111`.
        is_v1: bool,
        /// Whether every matrix has a list of the groups of its columns.
        desc_act: bool,
    },
    Awq,
    CompressedTensors {
        is_symmetric: bool,
    },
}

/// Returns the quantization of a checkpoint; `None`: the checkpoint is not quantized, or its family
/// describes the quantization.
pub(crate) fn quantization(
    config: &JsonFile,
    family: &Family,
) -> Result<Option<Quantization>, ModelError> {
    let Some(object) = config.fields()?.get::<Map<String, Value>>(KEY)? else { return Ok(None) };
    let fields = Fields { path: &config.path, object: &object, parent: Some(KEY) };
    let method = fields.get::<String>("quant_method")?;
    if family.has_stacked_experts() {
        // The family describes the tensors.
        return fields.check_word("quant_method", &["mxfp4"], "\"mxfp4\"").map(|()| None);
    }
    match method.as_deref() {
        Some("fp8") => fp8(&fields).map(|strategy| Some(Quantization::Fp8(strategy))),
        Some("gptq") => gptq(&fields).map(|format| Some(Quantization::Int4(format))),
        Some("awq") => awq(&fields).map(|format| Some(Quantization::Int4(format))),
        Some("compressed-tensors") => compressed_tensors(&fields).map(Some),
        _ => Err(fields.unsupported(
            "quant_method",
            method.map_or("none".into(), |method| format!("{method:?}")),
            "\"fp8\", \"gptq\", \"awq\", \"compressed-tensors\" with FP8 or INT4 weights, \
             no quantization_config, or a GGUF file",
        )),
    }
}

fn fp8(fields: &Fields<'_>) -> Result<ScaleStrategy, ModelError> {
    fields.check_word("fmt", &["e4m3", "float8_e4m3fn"], "\"e4m3\" or \"float8_e4m3fn\"")?;
    fields.check_word("activation_scheme", &["dynamic", "static"], "\"dynamic\" or \"static\"")?;
    match fields.get::<Vec<usize>>("weight_block_size")? {
        None => Ok(ScaleStrategy::Tensor),
        Some(block) if block == BLOCK => Ok(ScaleStrategy::Block),
        Some(block) => {
            Err(fields.unsupported("weight_block_size", format!("{block:?}"), "[128, 128] or null"))
        }
    }
}

fn gptq(fields: &Fields<'_>) -> Result<Int4Format, ModelError> {
    const FORMATS: [&str; 2] = ["gptq", "gptq_v2"];
    // Some versions of GPTQModel name the format by the second key.
    let key = match fields.get::<String>("checkpoint_format")? {
        Some(_) => "checkpoint_format",
        None => "format",
    };
    fields.check_word(key, &FORMATS, "\"gptq\" or \"gptq_v2\"")?;
    fields.check_word("pack_dtype", &["int32"], "\"int32\"")?;
    // Entries that begin with "-:" name matrices that are not quantized.
    let dynamic = fields.get::<Map<String, Value>>("dynamic")?.unwrap_or_default();
    if let Some(pattern) = dynamic.keys().find(|pattern| !pattern.starts_with("-:")) {
        let supported = "patterns of matrices that are not quantized (\"-:\")";
        return Err(fields.unsupported("dynamic", format!("{pattern:?}"), supported));
    }
    let packing = Int4Packing::Gptq {
        is_v1: fields.get::<String>(key)?.as_deref() != Some("gptq_v2"),
        desc_act: fields.get("desc_act")?.unwrap_or(false),
    };
    check_bits(fields)?;
    let group_size = group_size(fields, "group_size", fields.require("group_size")?)?;
    Ok(Int4Format { packing, group_size })
}

fn awq(fields: &Fields<'_>) -> Result<Int4Format, ModelError> {
    fields.check_word("version", &["gemm", "GEMM"], "\"gemm\"")?;
    if fields.get("zero_point")? == Some(false) {
        return Err(fields.unsupported("zero_point", "false".into(), "true"));
    }
    check_bits(fields)?;
    let group_size = group_size(fields, "group_size", fields.require("group_size")?)?;
    Ok(Int4Format { packing: Int4Packing::Awq, group_size })
}

fn check_bits(fields: &Fields<'_>) -> Result<(), ModelError> {
    match fields.require::<u32>("bits")? {
        4 => Ok(()),
        bits => Err(fields.unsupported("bits", bits.to_string(), "4")),
    }
}

/// Returns the columns of a group of INT4; -1 means all.
fn group_size(fields: &Fields<'_>, key: &str, size: i64) -> Result<Option<usize>, ModelError> {
    match size {
        -1 => Ok(None),
        32 | 64 | 128 => Ok(Some(size as usize)),
        _ => Err(fields.unsupported(key, size.to_string(), "32, 64, 128 or -1")),
    }
}

/// A group of matrices that are quantized alike.
#[derive(Deserialize)]
struct Group {
    weights: Option<Scheme>,
    input_activations: Option<Scheme>,
}

#[derive(Deserialize)]
struct Scheme {
    num_bits: u32,
    #[serde(rename = "type")]
    kind: String,
    strategy: Option<String>,
    group_size: Option<i64>,
    #[serde(default = "yes")]
    symmetric: bool,
    /// `[128, 128]`, or `128x128` in older files.
    block_structure: Option<Value>,
}

fn yes() -> bool {
    true
}

impl Scheme {
    fn number(&self) -> String {
        let symmetry = if self.symmetric { "symmetric" } else { "asymmetric" };
        format!("{symmetry} {} of {} bits", self.kind, self.num_bits)
    }

    fn is_fp8(&self) -> bool {
        self.num_bits == 8 && self.kind == "float" && self.symmetric
    }

    fn scale_strategy(&self) -> Option<ScaleStrategy> {
        let blocks = || {
            self.block_structure
                .iter()
                .all(|it| *it == "128x128" || *it == Value::from(BLOCK.to_vec()))
        };
        match self.strategy.as_deref() {
            Some("tensor") | None => Some(ScaleStrategy::Tensor),
            Some("channel") => Some(ScaleStrategy::Channel),
            Some("block") if blocks() => Some(ScaleStrategy::Block),
            Some(_) => None,
        }
    }
}

fn compressed_tensors(fields: &Fields<'_>) -> Result<Quantization, ModelError> {
    const PACKED: &str = "pack-quantized";
    const FORMATS: &str = "\"float-quantized\", \"naive-quantized\" or \"pack-quantized\"";
    fields.check_word("format", &["float-quantized", "naive-quantized", PACKED], FORMATS)?;
    if let Some(scheme) = fields.get::<Value>("kv_cache_scheme")? {
        let supported = "null: KV has the format of model.dtype";
        return Err(fields.unsupported("kv_cache_scheme", scheme.to_string(), supported));
    }
    let transform = fields.get::<Map<String, Value>>("transform_config")?.unwrap_or_default();
    if let Some(key) = transform.keys().next() {
        return Err(fields.unsupported("transform_config", format!("{key:?}"), "null or {}"));
    }
    let groups = fields.require::<BTreeMap<String, Group>>("config_groups")?;
    match fields.get::<String>("format")?.as_deref() {
        Some(PACKED) => packed_groups(fields, &groups).map(Quantization::Int4),
        _ => fp8_groups(fields, &groups).map(Quantization::Fp8),
    }
}

fn packed_groups(
    fields: &Fields<'_>,
    groups: &BTreeMap<String, Group>,
) -> Result<Int4Format, ModelError> {
    let mut format = None;
    for (name, group) in groups {
        let key = |key: &str| format!("config_groups.{name}.{key}");
        if let Some(scheme) = &group.input_activations {
            let supported = "null: inputs are not quantized with INT4 weights";
            return Err(fields.unsupported(&key("input_activations"), scheme.number(), supported));
        }
        let Some(weights) = &group.weights else { continue };
        if weights.num_bits != 4 || weights.kind != "int" {
            let found = weights.number();
            return Err(fields.unsupported(&key("weights"), found, "int of 4 bits"));
        }
        let size = match (weights.strategy.as_deref(), weights.group_size) {
            (Some("channel"), _) | (None, Some(-1)) => None,
            (Some("group") | None, Some(size)) => {
                group_size(fields, &key("weights.group_size"), size)?
            }
            (strategy, _) => {
                let found = format!("{:?}", strategy.unwrap_or("tensor"));
                let supported = "\"channel\", or \"group\" with a group_size";
                return Err(fields.unsupported(&key("weights.strategy"), found, supported));
            }
        };
        let packing = Int4Packing::CompressedTensors { is_symmetric: weights.symmetric };
        let found = Int4Format { packing, group_size: size };
        if format.is_some_and(|format| format != found) {
            let supported = "the same groups and symmetry in all config_groups";
            return Err(fields.unsupported(&key("weights"), weights.number(), supported));
        }
        format = Some(found);
    }
    format.ok_or_else(|| fields.bad("config_groups", "no group has weights".into()))
}

fn fp8_groups(
    fields: &Fields<'_>,
    groups: &BTreeMap<String, Group>,
) -> Result<ScaleStrategy, ModelError> {
    const NUMBERS: &str = "symmetric float of 8 bits";
    let mut strategy = None;
    for (name, group) in groups {
        let key = |key: &str| format!("config_groups.{name}.{key}");
        let schemes =
            [("weights", &group.weights), ("input_activations", &group.input_activations)];
        for (part, scheme) in schemes {
            if let Some(scheme) = scheme.as_ref().filter(|scheme| !scheme.is_fp8()) {
                return Err(fields.unsupported(&key(part), scheme.number(), NUMBERS));
            }
        }
        let Some(weights) = &group.weights else { continue };
        let found = weights.scale_strategy().filter(|it| strategy.is_none_or(|other| *it == other));
        strategy = Some(found.ok_or_else(|| {
            let found = format!("{:?}", weights.strategy.as_deref().unwrap_or("tensor"));
            let supported =
                "\"tensor\", \"channel\" or \"block\" of 128x128, the same in all groups";
            fields.unsupported(&key("weights.strategy"), found, supported)
        })?);
    }
    strategy.ok_or_else(|| fields.bad("config_groups", "no group has weights".into()))
}
