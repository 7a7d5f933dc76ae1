//! Weights in a memory-mapped GGUF file, or in the files of a split model.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
};

use gguf::{GgufError, Header, Split};
use kernels::mmap::MappedFile;

use super::{StoredTensor, io_error};
use crate::{
    config::{ModelConfig, from_gguf},
    encoding::Encoding,
    error::ModelError,
    matrix::RowOrder,
    weight::{LayerWeight, Weight},
};

/// Divisors of the rope frequencies, which are part of the configuration.
const ROPE_DIVISORS: &str = "rope_freqs.weight";

pub struct GgufFile {
    /// Files of the model; the first has the metadata and is usually the only one.
    parts: Vec<Part>,
    /// Index of each tensor's file.
    part_of: HashMap<String, usize>,
}

struct Part {
    path: PathBuf,
    file: MappedFile,
    header: Header,
}

impl Part {
    fn open(path: &Path) -> Result<Self, ModelError> {
        let file = MappedFile::open(path).map_err(io_error(path, "map"))?;
        let header = Header::parse(file.bytes()).map_err(gguf_error(path))?;
        Ok(Self { path: path.into(), file, header })
    }
}

fn gguf_error(path: &Path) -> impl Fn(GgufError) -> ModelError {
    move |source| ModelError::Gguf { path: path.into(), source }
}

impl GgufFile {
    /// Opens the file at `path`, and the other parts when it is the first of several.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let first = Part::open(path)?;
        let split = Split::of_first(path, &first.header).map_err(gguf_error(path))?;
        let mut parts = vec![first];
        if let Some(split) = &split {
            for (index, path) in split.paths().iter().enumerate().skip(1) {
                let part = Part::open(path)?;
                split.check_part(index, &part.header).map_err(gguf_error(path))?;
                parts.push(part);
            }
            let tensors = parts.iter().map(|part| part.header.tensors().len() as u64).sum();
            split.check_tensor_count(tensors).map_err(gguf_error(path))?;
        }
        let mut part_of = HashMap::new();
        for (index, part) in parts.iter().enumerate() {
            for tensor in part.header.tensors() {
                if part_of.insert(tensor.name.clone(), index).is_some() {
                    let tensor = tensor.name.clone();
                    return Err(gguf_error(&part.path)(GgufError::DuplicateTensor { tensor }));
                }
            }
        }
        Ok(Self { parts, part_of })
    }

    pub fn forget_pages(&self) {
        self.parts.iter().for_each(|part| part.file.forget_pages());
    }

    pub fn config(&self) -> Result<ModelConfig, ModelError> {
        let first = &self.parts[0];
        let divisors = match self.has(ROPE_DIVISORS) {
            true => Some(self.rope_divisors()?),
            false => None,
        };
        from_gguf(&first.path, &first.header, self.has(&Weight::Output.gguf_name()), divisors)
    }

    fn rope_divisors(&self) -> Result<Vec<f32>, ModelError> {
        let tensor = self.stored(ROPE_DIVISORS.into(), RowOrder::Halves)?;
        if tensor.encoding != Encoding::F32 {
            return Err(ModelError::TensorKind {
                path: tensor.path.into(),
                tensor: tensor.name,
                offset: tensor.offset,
                found: tensor.encoding.name().into(),
                supported: "F32",
            });
        }
        let mut values = vec![0.0; tensor.bytes.len() / 4];
        tensor.read_vector(&mut values)?;
        Ok(values)
    }

    fn has(&self, tensor: &str) -> bool {
        self.part_of.contains_key(tensor)
    }

    pub fn tensor(
        &self,
        weight: Weight,
        config: &ModelConfig,
    ) -> Result<StoredTensor<'_>, ModelError> {
        let order = match weight {
            Weight::Layer(_, LayerWeight::Query | LayerWeight::Key)
                if config.architecture.pairs_rows_in_gguf() =>
            {
                RowOrder::Pairs { head_dim: config.head_dim }
            }
            _ => RowOrder::Halves,
        };
        let name = weight.gguf_name();
        if !self.has(&name) {
            return Err(ModelError::missing_tensor(&self.parts[0].path, name, weight, config));
        }
        self.stored(name, order)
    }

    /// Returns a tensor that the directory has.
    fn stored(&self, name: String, order: RowOrder) -> Result<StoredTensor<'_>, ModelError> {
        let part = &self.parts[self.part_of[&name]];
        let gguf_error = gguf_error(&part.path);
        let (info, bytes) = part.header.require_tensor(&name).map_err(&gguf_error)?;
        let encoding = Encoding::of_gguf(info.kind).ok_or_else(|| {
            gguf_error(GgufError::UnsupportedKind {
                tensor: name.clone(),
                offset: info.offset,
                found: info.kind,
            })
        })?;
        let begin = info.offset as usize;
        Ok(StoredTensor {
            path: &part.path,
            offset: info.offset,
            dims: info.dims.iter().rev().copied().collect(),
            encoding,
            // The header was checked against this file.
            bytes: &part.file.bytes()[begin..begin + bytes as usize],
            order,
            name,
        })
    }

    pub fn refuse_unknown_tensors(&self, config: &ModelConfig) -> Result<(), ModelError> {
        let known: HashSet<String> = Weight::all(config).map(|weight| weight.gguf_name()).collect();
        for part in &self.parts {
            let unknown = part
                .header
                .tensors()
                .iter()
                .find(|tensor| tensor.name != ROPE_DIVISORS && !known.contains(&tensor.name));
            if let Some(tensor) = unknown {
                let (name, offset) = (&tensor.name, tensor.offset);
                return Err(ModelError::unknown_tensor(&part.path, name, offset, config));
            }
        }
        Ok(())
    }
}
