//! Header, metadata and tensor directory of one file.

use std::{
    collections::HashSet,
    fs::File,
    io::{self, BufReader, Read},
    path::Path,
};

use crate::{
    error::GgufError,
    metadata::Metadata,
    reader::HeaderReader,
    tensor::{TensorInfo, TensorKind},
    value::{Array, Value},
};

/// Maximum bytes of a header. The parsed header takes a few times this size at worst (a String for
/// every empty string). The largest vocabularies in use need about 20 MB.
pub const HEADER_BYTES_MAX: u64 = 64 << 20;

const ALIGNMENT_DEFAULT: u64 = 32;
const DIMENSIONS_MAX: usize = 4;
/// Maximum nesting of arrays. The format allows nesting, but no known file uses it.
const ARRAY_DEPTH_MAX: usize = 4;
/// Maximum preallocated items; vectors grow beyond this only by items that were read.
const PREALLOCATED_ITEMS_MAX: u64 = 1024;

/// Value types that are not scalars.
const STRING: u32 = 8;
const ARRAY: u32 = 9;

// Minimum bytes of one item in the file. A count that cannot fit the rest of the file is rejected.
const STRING_BYTES_MIN: u64 = 8;
const ARRAY_BYTES_MIN: u64 = 4 + 8;
const ENTRY_BYTES_MIN: u64 = STRING_BYTES_MIN + 4 + 1;
const TENSOR_BYTES_MIN: u64 = STRING_BYTES_MIN + 4 + 8 + 4 + 8;

/// Contents of a GGUF file without the tensors' data.
///
/// For every tensor: its name is unique, its element count does not overflow, its offset is
/// aligned, and its bytes (if its kind is supported) are within the file.
#[derive(Clone, Debug)]
pub struct Header {
    pub version: u32,
    pub metadata: Metadata,
    /// Alignment of tensor offsets from `data_offset`, in bytes.
    pub alignment: u64,
    /// Offset of the tensor data from the start of the file, in bytes.
    pub data_offset: u64,
    tensors: Vec<TensorInfo>,
}

impl Header {
    /// Parses the header at the start of `file`, which must be the whole file.
    pub fn parse(file: &[u8]) -> Result<Self, GgufError> {
        // Lengths are checked before a slice is read, so reading cannot end early.
        read_header(Path::new("(memory)"), file, file.len() as u64)
    }

    /// Reads only the header of the file at `path`.
    pub fn read_from(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        let path = path.as_ref();
        let io_error = |action: &'static str| {
            move |cause: io::Error| GgufError::Io { path: path.into(), action, cause }
        };
        // Checked before the file is opened: opening a FIFO blocks.
        if !std::fs::metadata(path).map_err(io_error("open"))?.is_file() {
            let cause = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
            return Err(io_error("read")(cause));
        }
        let file = File::open(path).map_err(io_error("open"))?;
        let file_bytes = file.metadata().map_err(io_error("stat"))?.len();
        Self::read(path, &file, file_bytes)
    }

    /// Reads only the header of an open file of `file_bytes` bytes. `path` is for errors.
    pub fn read(path: &Path, file: &File, file_bytes: u64) -> Result<Self, GgufError> {
        read_header(path, BufReader::with_capacity(256 << 10, file), file_bytes)
    }

    /// Returns the tensor directory in the file's order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Returns the tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}

fn read_header(path: &Path, mut file: impl Read, file_bytes: u64) -> Result<Header, GgufError> {
    let mut reader = HeaderReader::new(path, &mut file, file_bytes);
    let magic = reader.array::<4>(|| "the magic number".into())?;
    if &magic != b"GGUF" {
        return Err(GgufError::NotGguf { found: magic.into() });
    }
    let version = reader.u32(|| "the version".into())?;
    match version {
        2 | 3 => {}
        // Versions are small numbers; a version that is small with its bytes swapped means big
        // endian.
        _ if version > 0xffff && version.swap_bytes() <= 0xffff => {
            return Err(GgufError::BigEndian);
        }
        _ => return Err(GgufError::Version { found: version }),
    }
    let tensor_count = reader.u64(|| "the tensor count".into())?;
    let entry_count = reader.u64(|| "the metadata count".into())?;

    let metadata = read_metadata(&mut reader, entry_count)?;
    let alignment = metadata.get::<u64>("general.alignment")?.unwrap_or(ALIGNMENT_DEFAULT);
    if !alignment.is_power_of_two() {
        return Err(GgufError::Alignment { found: alignment });
    }
    let mut tensors = read_directory(&mut reader, tensor_count)?;

    // The header fits the file, so only the alignment can make this overflow.
    let data_offset = reader
        .offset
        .checked_next_multiple_of(alignment)
        .ok_or(GgufError::Alignment { found: alignment })?;
    for tensor in &mut tensors {
        place(tensor, data_offset, alignment, reader.file_bytes)?;
    }

    let mut names = HashSet::with_capacity(tensors.len());
    if let Some(twice) = tensors.iter().find(|tensor| !names.insert(&tensor.name)) {
        return Err(GgufError::DuplicateTensor { tensor: twice.name.clone() });
    }
    Ok(Header { version, metadata, alignment, data_offset, tensors })
}

fn read_metadata(reader: &mut HeaderReader<'_>, entry_count: u64) -> Result<Metadata, GgufError> {
    reader.claim(entry_count, ENTRY_BYTES_MIN, || format!("{entry_count} metadata entries"))?;
    let mut metadata = Metadata::default();
    for index in 0..entry_count {
        let key = reader.string(|| format!("metadata key {index}"))?;
        let value_type = reader.u32(|| format!("the type of metadata key {key:?}"))?;
        let value = read_value(reader, &key, value_type)?;
        if !metadata.insert(key.clone(), value) {
            return Err(GgufError::DuplicateKey { key });
        }
    }
    Ok(metadata)
}

fn read_value(
    reader: &mut HeaderReader<'_>,
    key: &str,
    value_type: u32,
) -> Result<Value, GgufError> {
    let what = || format!("the value of metadata key {key:?}");
    match value_type {
        STRING => Ok(Value::String(reader.string(what)?)),
        ARRAY => Ok(Value::Array(read_array(reader, key, 1)?)),
        found => Value::read_scalar(reader, found, what)?
            .ok_or_else(|| GgufError::ValueType { key: key.into(), found }),
    }
}

fn read_array(reader: &mut HeaderReader<'_>, key: &str, depth: usize) -> Result<Array, GgufError> {
    if depth > ARRAY_DEPTH_MAX {
        let (key, limit) = (key.into(), ARRAY_DEPTH_MAX);
        return Err(GgufError::NestedTooDeep { key, limit });
    }
    let what = || format!("the array of metadata key {key:?}");
    let element_type = reader.u32(what)?;
    let count = reader.u64(what)?;
    match element_type {
        STRING => {
            reader.claim(count, STRING_BYTES_MIN, what)?;
            let mut strings = Vec::with_capacity(count.min(PREALLOCATED_ITEMS_MAX) as usize);
            for index in 0..count {
                strings.push(reader.string(|| format!("string {index} of metadata key {key:?}"))?);
            }
            Ok(Array::String(strings))
        }
        ARRAY => {
            reader.claim(count, ARRAY_BYTES_MIN, what)?;
            let mut arrays = Vec::with_capacity(count.min(PREALLOCATED_ITEMS_MAX) as usize);
            for _ in 0..count {
                arrays.push(read_array(reader, key, depth + 1)?);
            }
            Ok(Array::Array(arrays))
        }
        found => Array::read_scalars(reader, found, count, what)?
            .ok_or_else(|| GgufError::ValueType { key: key.into(), found }),
    }
}

/// Reads the directory. Offsets are relative to the start of the data, as in the file.
fn read_directory(
    reader: &mut HeaderReader<'_>,
    tensor_count: u64,
) -> Result<Vec<TensorInfo>, GgufError> {
    reader.claim(tensor_count, TENSOR_BYTES_MIN, || format!("{tensor_count} tensor entries"))?;
    let mut tensors = Vec::with_capacity(tensor_count.min(PREALLOCATED_ITEMS_MAX) as usize);
    for index in 0..tensor_count {
        let name = reader.string(|| format!("the name of tensor {index}"))?;
        let what = || format!("the directory entry of tensor {name:?}");
        let dimension_count = reader.u32(what)?;
        if !(1..=DIMENSIONS_MAX as u32).contains(&dimension_count) {
            let (found, max) = (dimension_count, DIMENSIONS_MAX);
            return Err(GgufError::DimensionCount { tensor: name, found, max });
        }
        let dims = reader.items(dimension_count.into(), what, u64::from_le_bytes)?;
        let kind = TensorKind::from_number(reader.u32(what)?);
        let offset = reader.u64(what)?;
        tensors.push(TensorInfo { name, dims, kind, offset, bytes: None });
    }
    Ok(tensors)
}

/// Checks the tensor's range and sets its absolute offset and its size.
fn place(
    tensor: &mut TensorInfo,
    data_offset: u64,
    alignment: u64,
    file_bytes: u64,
) -> Result<(), GgufError> {
    let bad_dimensions = |tensor: &TensorInfo, reason| GgufError::Dimensions {
        tensor: tensor.name.clone(),
        dims: tensor.dims.clone(),
        reason,
    };
    if !tensor.offset.is_multiple_of(alignment) {
        let (tensor, offset) = (tensor.name.clone(), tensor.offset);
        return Err(GgufError::TensorAlignment { tensor, offset, alignment });
    }
    if tensor.dims.contains(&0) {
        return Err(bad_dimensions(tensor, "a dimension is 0"));
    }
    let elements = tensor.dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim));
    let Some(elements) = elements else {
        return Err(bad_dimensions(tensor, "the number of elements overflows"));
    };
    if let Some(block) = tensor.kind.block() {
        if !tensor.dims[0].is_multiple_of(block.elements) {
            return Err(bad_dimensions(tensor, "the first is no multiple of the kind's block"));
        }
        let Some(bytes) = (elements / block.elements).checked_mul(block.bytes) else {
            return Err(bad_dimensions(tensor, "the number of bytes overflows"));
        };
        tensor.bytes = Some(bytes);
    }
    let bytes = tensor.bytes.unwrap_or(0);
    let begin = data_offset.checked_add(tensor.offset);
    let end = begin.and_then(|begin| begin.checked_add(bytes));
    if end.is_none_or(|end| end > file_bytes) {
        return Err(GgufError::TensorTruncated {
            tensor: tensor.name.clone(),
            offset: begin.unwrap_or(u64::MAX),
            bytes,
            file_bytes,
        });
    }
    tensor.offset += data_offset;
    Ok(())
}
