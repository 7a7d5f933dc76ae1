//! Weights in the safetensors files of a Hugging Face folder, single or sharded.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::{Path, PathBuf},
};

use kernels::mmap::MappedFile;
use safetensors::{SafeTensorError, SafeTensors, tensor::Metadata};

use super::{StoredTensor, io_error, read_json};
use crate::{
    config::ModelConfig, encoding::Encoding, error::ModelError, matrix::RowOrder, weight::Weight,
};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Bytes of the header length, with which every safetensors file begins.
const LENGTH_BYTES: usize = 8;
/// Older exports store the rope frequencies of every layer, which follow from the configuration.
const IGNORED_SUFFIX: &str = ".rotary_emb.inv_freq";

pub struct SafetensorsFolder {
    shards: Vec<Shard>,
    /// Index of each tensor's shard.
    shard_of: HashMap<String, usize>,
}

struct Shard {
    path: PathBuf,
    file: MappedFile,
    metadata: Metadata,
    /// Offset of the tensor data in the file, in bytes.
    data_offset: usize,
}

impl SafetensorsFolder {
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let index = folder.join(INDEX);
        let single = folder.join(SINGLE);
        if single.is_file() {
            let shard = Shard::open(single)?;
            let names = shard.metadata.offset_keys();
            let shard_of = names.into_iter().map(|name| (name, 0)).collect();
            return Ok(Self { shards: vec![shard], shard_of });
        }
        if index.is_file() {
            return Self::open_sharded(folder, &index);
        }
        Err(ModelError::NotAModel {
            path: folder.into(),
            reason: format!("the folder has neither {SINGLE} nor {INDEX}"),
        })
    }

    pub fn forget_pages(&self) {
        self.shards.iter().for_each(|shard| shard.file.forget_pages());
    }

    fn open_sharded(folder: &Path, index: &Path) -> Result<Self, ModelError> {
        let bad_index = |reason: String| ModelError::ShardIndex { path: index.into(), reason };
        let json = read_json(index)?;
        let weight_map = json.value.get("weight_map").and_then(|map| map.as_object());
        let weight_map = weight_map.ok_or_else(|| bad_index("has no object weight_map".into()))?;

        let mut names_of_file: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, file) in weight_map {
            let file = file.as_str().ok_or_else(|| {
                bad_index(format!("tensor {name:?} has file {file}; expected a string"))
            })?;
            // The index may only name files of this folder.
            if Path::new(file).file_name().is_none_or(|name| name != file) {
                return Err(bad_index(format!(
                    "tensor {name:?} has file {file:?}; expected a file name without folders"
                )));
            }
            names_of_file.entry(file).or_default().push(name);
        }

        let mut shards = Vec::new();
        let mut shard_of = HashMap::new();
        for (file, names) in names_of_file {
            let shard = Shard::open(folder.join(file))?;
            for name in names {
                if shard.metadata.info(name).is_none() {
                    return Err(bad_index(format!("tensor {name:?} is not in {file:?}")));
                }
                shard_of.insert(name.to_owned(), shards.len());
            }
            shards.push(shard);
        }
        Ok(Self { shards, shard_of })
    }

    pub fn tensor(
        &self,
        weight: Weight,
        config: &ModelConfig,
    ) -> Result<StoredTensor<'_>, ModelError> {
        let name = weight.hugging_face_name();
        match self.shard_of.get(&name) {
            Some(&shard) => self.shards[shard].tensor(name),
            None => {
                // An opened folder has at least one file; an empty index has none.
                let path = self.shards.first().map_or(Path::new(""), |shard| &shard.path);
                Err(ModelError::missing_tensor(path, name, weight, config))
            }
        }
    }

    pub fn refuse_unknown_tensors(&self, config: &ModelConfig) -> Result<(), ModelError> {
        let mut known: HashSet<String> =
            Weight::all(config).map(|weight| weight.hugging_face_name()).collect();
        // Some exports repeat a tied output.
        known.insert(Weight::Output.hugging_face_name());
        let unknown = self
            .shard_of
            .iter()
            .filter(|(name, _)| !known.contains(*name) && !name.ends_with(IGNORED_SUFFIX))
            .min();
        match unknown {
            None => Ok(()),
            Some((name, &shard)) => {
                let shard = &self.shards[shard];
                let offset = shard.range(name).map_or(0, |range| range.start as u64);
                Err(ModelError::unknown_tensor(&shard.path, name, offset, config))
            }
        }
    }
}

impl Shard {
    fn open(path: PathBuf) -> Result<Self, ModelError> {
        let file = MappedFile::open(&path).map_err(io_error(&path, "map"))?;
        match SafeTensors::read_metadata(file.bytes()) {
            Ok((header_bytes, metadata)) => {
                let data_offset = LENGTH_BYTES + header_bytes;
                Ok(Self { path, file, metadata, data_offset })
            }
            Err(source) => {
                let truncated = match source {
                    SafeTensorError::MetadataIncompleteBuffer => {
                        first_truncated(&path, file.bytes())
                    }
                    _ => None,
                };
                Err(truncated.unwrap_or(ModelError::Safetensors { path, source }))
            }
        }
    }

    /// Returns the byte range of `name` in the file.
    fn range(&self, name: &str) -> Option<std::ops::Range<usize>> {
        let (begin, end) = self.metadata.info(name)?.data_offsets;
        Some(self.data_offset + begin..self.data_offset + end)
    }

    fn tensor(&self, name: String) -> Result<StoredTensor<'_>, ModelError> {
        // Both were checked when the folder was opened.
        let info = self.metadata.info(&name).expect("the tensor is in its shard's header");
        let range = self.range(&name).expect("the tensor is in its shard's header");
        let offset = range.start as u64;
        let encoding =
            Encoding::of_safetensors(info.dtype).ok_or_else(|| ModelError::TensorKind {
                path: self.path.clone(),
                tensor: name.clone(),
                offset,
                found: format!("{:?}", info.dtype),
                supported: "F32, F16 or BF16",
            })?;
        Ok(StoredTensor {
            path: &self.path,
            name,
            offset,
            dims: info.shape.iter().map(|&dim| dim as u64).collect(),
            encoding,
            // `read_metadata` checked that the tensors cover the file exactly.
            bytes: &self.file.bytes()[range],
            order: RowOrder::Halves,
        })
    }
}

/// Returns an error for the first tensor that is not completely in the file.
fn first_truncated(path: &Path, file: &[u8]) -> Option<ModelError> {
    let (length, rest) = file.split_first_chunk::<LENGTH_BYTES>()?;
    let header_bytes = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    let metadata: Metadata = serde_json::from_slice(rest.get(..header_bytes)?).ok()?;
    let data_bytes = rest.len() - header_bytes;
    metadata.offset_keys().into_iter().find_map(|tensor| {
        let (begin, end) = metadata.info(&tensor)?.data_offsets;
        (end > data_bytes).then(|| ModelError::TensorTruncated {
            path: path.into(),
            tensor,
            offset: (LENGTH_BYTES + header_bytes + begin) as u64,
            bytes: (end - begin) as u64,
            file_bytes: file.len() as u64,
        })
    })
}
