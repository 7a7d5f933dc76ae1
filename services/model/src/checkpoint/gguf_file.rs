//! Weights in a memory-mapped GGUF file.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

use gguf::{GgufError, Header};
use kernels::mmap::MappedFile;

use super::{StoredTensor, io_error};
use crate::{
    config::{ModelConfig, from_gguf},
    encoding::Encoding,
    error::ModelError,
    matrix::RowOrder,
    weight::{LayerWeight, Weight},
};

/// Divisors of the rope frequencies; part of the configuration.
const ROPE_DIVISORS: &str = "rope_freqs.weight";

pub struct GgufFile {
    path: PathBuf,
    file: MappedFile,
    header: Header,
}

impl GgufFile {
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let file = MappedFile::open(path).map_err(io_error(path, "map"))?;
        let header = Header::parse(file.bytes())
            .map_err(|source| ModelError::Gguf { path: path.into(), source })?;
        Ok(Self { path: path.into(), file, header })
    }

    pub fn config(&self) -> Result<ModelConfig, ModelError> {
        let divisors = match self.header.tensor(ROPE_DIVISORS) {
            None => None,
            Some(info) => {
                let tensor = self.stored(ROPE_DIVISORS.into(), RowOrder::Halves)?;
                if tensor.encoding != Encoding::F32 {
                    return Err(ModelError::TensorKind {
                        path: self.path.clone(),
                        tensor: tensor.name,
                        offset: tensor.offset,
                        found: info.kind.to_string(),
                        supported: "F32",
                    });
                }
                let mut values = vec![0.0; tensor.bytes.len() / 4];
                tensor.read_vector(&mut values)?;
                Some(values)
            }
        };
        from_gguf(&self.path, &self.header, divisors)
    }

    pub fn tensor(
        &self,
        weight: Weight,
        config: &ModelConfig,
    ) -> Result<StoredTensor<'_>, ModelError> {
        let order = match weight {
            Weight::Layer(_, LayerWeight::Query | LayerWeight::Key) => {
                RowOrder::Pairs { head_dim: config.head_dim }
            }
            _ => RowOrder::Halves,
        };
        let name = weight.gguf_name();
        if self.header.tensor(&name).is_none() {
            return Err(ModelError::MissingTensor {
                path: self.path.clone(),
                tensor: name,
                wanted: weight.shape(config).dims(),
            });
        }
        self.stored(name, order)
    }

    fn stored(&self, name: String, order: RowOrder) -> Result<StoredTensor<'_>, ModelError> {
        let gguf_error = |source| ModelError::Gguf { path: self.path.clone(), source };
        let (info, bytes) = self.header.require_tensor(&name).map_err(gguf_error)?;
        let encoding = Encoding::of_gguf(info.kind).ok_or_else(|| {
            gguf_error(GgufError::UnsupportedKind {
                tensor: name.clone(),
                offset: info.offset,
                found: info.kind,
            })
        })?;
        let begin = info.offset as usize;
        Ok(StoredTensor {
            path: &self.path,
            offset: info.offset,
            dims: info.dims.iter().rev().copied().collect(),
            encoding,
            // The header was checked against this very file.
            bytes: &self.file.bytes()[begin..begin + bytes as usize],
            order,
            name,
        })
    }

    pub fn refuse_unknown_tensors(&self, config: &ModelConfig) -> Result<(), ModelError> {
        let known: HashSet<String> = Weight::all(config).map(|weight| weight.gguf_name()).collect();
        let unknown = self
            .header
            .tensors()
            .iter()
            .find(|tensor| tensor.name != ROPE_DIVISORS && !known.contains(&tensor.name));
        match unknown {
            None => Ok(()),
            Some(tensor) => Err(ModelError::UnknownTensor {
                path: self.path.clone(),
                tensor: tensor.name.clone(),
                offset: tensor.offset,
                architecture: config.architecture.name(),
            }),
        }
    }
}
