//! Opens the safetensors files of a Hugging Face folder, single or sharded.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use kernels::mmap::MappedFile;
use safetensors::{SafeTensorError, SafeTensors, tensor::Metadata};

use super::{
    io_error, read_json,
    stored::{Entry, Format, StoredWeights},
};
use crate::{encoding::Encoding, error::ModelError};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Bytes of the header length, with which every safetensors file begins.
const LENGTH_BYTES: usize = 8;

pub fn open(folder: &Path) -> Result<StoredWeights, ModelError> {
    let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
    let mut weights = StoredWeights::new(Format::Safetensors);
    if single.is_file() {
        add_shard(&mut weights, single, None)?;
    } else if index.is_file() {
        add_shards(&mut weights, folder, &index)?;
    } else {
        let reason = format!("the folder has neither {SINGLE} nor {INDEX}");
        return Err(ModelError::NotAModel { path: folder.into(), reason });
    }
    Ok(weights)
}

/// Adds the shards that the index names, with the tensors that the index assigns to each.
fn add_shards(weights: &mut StoredWeights, folder: &Path, index: &Path) -> Result<(), ModelError> {
    let bad_index = |reason: String| ModelError::ShardIndex { path: index.into(), reason };
    let json = read_json(index)?;
    let weight_map = json.value.get("weight_map").and_then(|map| map.as_object());
    let weight_map = weight_map.ok_or_else(|| bad_index("has no object weight_map".into()))?;

    let mut names_of_file: BTreeMap<&str, Vec<String>> = BTreeMap::new();
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
        names_of_file.entry(file).or_default().push(name.clone());
    }
    for (file, names) in names_of_file {
        let missing = add_shard(weights, folder.join(file), Some(names))?;
        if let Some(name) = missing {
            return Err(bad_index(format!("tensor {name:?} is not in {file:?}")));
        }
    }
    Ok(())
}

/// Adds a file and its tensors, or the tensors with these names. Returns a name that the file lacks.
fn add_shard(
    weights: &mut StoredWeights,
    path: PathBuf,
    names: Option<Vec<String>>,
) -> Result<Option<String>, ModelError> {
    let mapped = MappedFile::open(&path).map_err(io_error(&path, "map"))?;
    let (header_bytes, metadata) =
        SafeTensors::read_metadata(mapped.bytes()).map_err(|source| {
            let truncated = match source {
                SafeTensorError::MetadataIncompleteBuffer => first_truncated(&path, mapped.bytes()),
                _ => None,
            };
            truncated.unwrap_or(ModelError::Safetensors { path: path.clone(), source })
        })?;
    let file = weights.add_file(path, mapped);
    for name in names.unwrap_or_else(|| metadata.offset_keys()) {
        let Some(info) = metadata.info(&name) else { return Ok(Some(name)) };
        // `read_metadata` checked that the tensors cover the file exactly.
        let (begin, end) = info.data_offsets;
        let data_offset = LENGTH_BYTES + header_bytes;
        let entry = Entry {
            file,
            range: data_offset + begin..data_offset + end,
            dims: info.shape.iter().map(|&dim| dim as u64).collect(),
            encoding: Encoding::of_safetensors(info.dtype)
                .ok_or_else(|| format!("{:?}", info.dtype)),
        };
        weights.add_tensor(name, entry);
    }
    Ok(None)
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
