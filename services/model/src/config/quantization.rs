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

/// Returns how the FP8 matrices of a checkpoint are scaled; `None`: the checkpoint has no such
/// matrices.
pub(crate) fn scale_strategy(
    config: &JsonFile,
    family: &Family,
) -> Result<Option<ScaleStrategy>, ModelError> {
    let Some(object) = config.fields()?.get::<Map<String, Value>>(KEY)? else { return Ok(None) };
    let fields = Fields { path: &config.path, object: &object, parent: Some(KEY) };
    let method = fields.get::<String>("quant_method")?;
    if family.has_stacked_experts() {
        // The family describes the tensors.
        return fields.check_word("quant_method", &["mxfp4"], "\"mxfp4\"").map(|()| None);
    }
    match method.as_deref() {
        Some("fp8") => fp8(&fields).map(Some),
        Some("compressed-tensors") => compressed_tensors(&fields).map(Some),
        _ => Err(fields.unsupported(
            "quant_method",
            method.map_or("none".into(), |method| format!("{method:?}")),
            "\"fp8\", \"compressed-tensors\" with FP8 weights, no quantization_config, or a GGUF file",
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

fn compressed_tensors(fields: &Fields<'_>) -> Result<ScaleStrategy, ModelError> {
    const NUMBERS: &str = "symmetric float of 8 bits";
    const FORMATS: &str = "\"float-quantized\" or \"naive-quantized\"";
    fields.check_word("format", &["float-quantized", "naive-quantized"], FORMATS)?;
    if let Some(scheme) = fields.get::<Value>("kv_cache_scheme")? {
        let supported = "null: KV has the format of model.dtype";
        return Err(fields.unsupported("kv_cache_scheme", scheme.to_string(), supported));
    }
    let groups = fields.require::<BTreeMap<String, Group>>("config_groups")?;
    let mut strategy = None;
    for (name, group) in &groups {
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
