//! Opens the safetensors files of a Hugging Face folder, single or sharded.

use std::{
    collections::BTreeMap,
    io::Read,
    path::{Path, PathBuf},
};

use safetensors::{SafeTensorError, SafeTensors, tensor::Metadata};

use super::{
    file::{CheckpointFile, io_error},
    read_json,
    stored::{Entry, StoredWeights},
};
use crate::{
    encoding::{Encoding, Format},
    error::ModelError,
};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Bytes of the header length, with which every safetensors file begins.
const LENGTH_BYTES: u64 = 8;
/// Maximum number of bytes of a header, as in crate safetensors.
const HEADER_BYTES_MAX: u64 = 100_000_000;

pub(super) fn open(folder: &Path) -> Result<StoredWeights, ModelError> {
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

/// Adds a file and its tensors, or the tensors with these names. Returns a name that the file
/// lacks.
fn add_shard(
    weights: &mut StoredWeights,
    path: PathBuf,
    names: Option<Vec<String>>,
) -> Result<Option<String>, ModelError> {
    let file = CheckpointFile::open(&path)?;
    let (data_offset, metadata) = read_header(&file)?;
    let file = weights.add_file(file);
    for name in names.unwrap_or_else(|| metadata.offset_keys()) {
        let Some(info) = metadata.info(&name) else { return Ok(Some(name)) };
        // `read_header` checked that the tensors cover the file exactly.
        let (begin, end) = info.data_offsets;
        let entry = Entry {
            file,
            range: data_offset + begin as u64..data_offset + end as u64,
            dims: info.shape.iter().map(|&dim| dim as u64).collect(),
            encoding: Encoding::of_safetensors(info.dtype)
                .ok_or_else(|| format!("{:?}", info.dtype)),
        };
        weights.add_tensor(name, entry);
    }
    Ok(None)
}

/// Returns the offset of the tensors' data in the file, and the tensors. They cover the rest of the
/// file exactly.
fn read_header(file: &CheckpointFile) -> Result<(u64, Metadata), ModelError> {
    let path = file.path();
    let invalid = |cause| ModelError::Safetensors { path: path.into(), cause };
    let read = |bytes: u64| {
        let mut prefix = Vec::new();
        let read = file.reader().take(bytes).read_to_end(&mut prefix);
        read.map_err(io_error(path, "read")).map(|_| prefix)
    };
    let mut header = read(LENGTH_BYTES)?;
    let length = header.first_chunk().map_or(0, |length| u64::from_le_bytes(*length));
    if length <= HEADER_BYTES_MAX {
        header.append(&mut read(length)?);
    }
    // The crate checks the whole file, of which only the header is in memory: a valid header lacks
    // its data.
    match SafeTensors::read_metadata(&header) {
        Ok(_) | Err(SafeTensorError::MetadataIncompleteBuffer) => {}
        Err(cause) => return Err(invalid(cause)),
    }
    let metadata: Metadata = serde_json::from_slice(&header[LENGTH_BYTES as usize..])
        .map_err(|cause| invalid(SafeTensorError::InvalidHeaderDeserialization(cause)))?;
    let data_offset = header.len() as u64;
    let data_bytes = file.bytes().saturating_sub(data_offset);
    match metadata.data_len() as u64 == data_bytes {
        true => Ok((data_offset, metadata)),
        false => Err(first_truncated(file, data_offset, &metadata)
            .unwrap_or_else(|| invalid(SafeTensorError::MetadataIncompleteBuffer))),
    }
}

/// Returns an error for the first tensor that is not completely in the file.
fn first_truncated(
    file: &CheckpointFile,
    data_offset: u64,
    metadata: &Metadata,
) -> Option<ModelError> {
    metadata.offset_keys().into_iter().find_map(|tensor| {
        let (begin, end) = metadata.info(&tensor)?.data_offsets;
        (data_offset + end as u64 > file.bytes()).then(|| ModelError::TensorTruncated {
            path: file.path().into(),
            tensor,
            offset: data_offset + begin as u64,
            bytes: (end - begin) as u64,
            file_bytes: file.bytes(),
        })
    })
}
