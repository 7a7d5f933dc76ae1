//! Opens a GGUF file, or the files of a split model.

use std::path::Path;

use gguf::{GgufError, Header, Split};

use super::{
    file::CheckpointFile,
    stored::{Entry, ROPE_DIVISORS, StoredWeights},
};
use crate::{
    config::{ModelConfig, gguf_metadata::from_gguf},
    encoding::{Encoding, Format},
    error::ModelError,
    rope::RowOrder,
    weight::Weight,
};

/// Opens the file at `path`, and the other parts when it is the first of several.
pub(super) fn open(path: &Path) -> Result<(ModelConfig, StoredWeights), ModelError> {
    let mut weights = StoredWeights::new(Format::Gguf);
    let header = add_part(&mut weights, path)?;
    if let Some(split) = Split::of_first(path, &header).map_err(gguf_error(path))? {
        let mut tensors = header.tensors().len() as u64;
        for (index, path) in split.paths.iter().enumerate().skip(1) {
            let part = add_part(&mut weights, path)?;
            split.check_part(index, &part).map_err(gguf_error(path))?;
            tensors += part.tensors().len() as u64;
        }
        split.check_tensor_count(tensors).map_err(gguf_error(path))?;
    }
    let divisors = match weights.has(ROPE_DIVISORS) {
        true => Some(rope_divisors(&weights)?),
        false => None,
    };
    let has_output = weights.has(&Weight::Output.gguf_name());
    Ok((from_gguf(path, &header, has_output, divisors)?, weights))
}

/// Adds a file and its tensors.
fn add_part(weights: &mut StoredWeights, path: &Path) -> Result<Header, ModelError> {
    let file = CheckpointFile::open(path)?;
    let header = Header::read(path, file.reader(), file.bytes()).map_err(gguf_error(path))?;
    let file = weights.add_file(file);
    for tensor in header.tensors() {
        let entry = Entry {
            file,
            // The header was checked against this file.
            range: tensor.offset..tensor.offset + tensor.bytes.unwrap_or(0),
            dims: tensor.dims.iter().rev().copied().collect(),
            encoding: Encoding::of_gguf(tensor.kind).ok_or_else(|| tensor.kind.to_string()),
        };
        if !weights.add_tensor(tensor.name.clone(), entry) {
            let tensor = tensor.name.clone();
            return Err(gguf_error(path)(GgufError::DuplicateTensor { tensor }));
        }
    }
    Ok(header)
}

fn gguf_error(path: &Path) -> impl Fn(GgufError) -> ModelError {
    move |cause| ModelError::Gguf { path: path.into(), cause }
}

fn rope_divisors(weights: &StoredWeights) -> Result<Vec<f32>, ModelError> {
    let tensor = weights.named(ROPE_DIVISORS.into(), RowOrder::Halves)?;
    if tensor.encoding != Encoding::F32 {
        return Err(tensor.wrong_type("F32".into()));
    }
    let mut values = vec![0.0; tensor.bytes.len() / 4];
    tensor.read_vector(&mut values)?;
    Ok(values)
}
