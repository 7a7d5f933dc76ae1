//! Destinations of a trainer's tensors in the packed weights, and the copies from a chunk to them.
//!
//! A matrix is a range of the packed weights in their element type. Vectors are packed in f32, so
//! their bytes go to host memory, which converts them. A rank has only its part of the rows or
//! columns.

use std::{collections::HashMap, ops::Range};

use kernels::{
    Dtype, Shard,
    cuda::{ChunkWork, CopiedWeights, RowCopy},
    digest::{WeightRuns, of_weight},
};
use model::{ModelConfig, PackedPart, Weight, packing_order};

use crate::executor::{DeclaredError, DeclaredTensor, TensorDigest, TensorPiece};

/// Destinations of all tensors of an update.
#[derive(Debug)]
pub(super) struct Scatter {
    tensors: Vec<PlacedTensor>,
    vectors: Vec<Vector>,
    host_bytes: usize,
    digest_count: usize,
}

#[derive(Debug)]
struct PlacedTensor {
    name: String,
    bytes: usize,
    /// `None`: a repeated tied output, which is not used.
    destination: Option<Destination>,
}

/// A part of a tensor, and its destination. All sizes are in bytes.
#[derive(Debug)]
struct Destination {
    rows: Range<usize>,
    cols: Range<usize>,
    /// Bytes of a row of the whole tensor.
    row_bytes: usize,
    to: usize,
    memory: Memory,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    /// The packed weights. `digest`: the index of the digest.
    Device {
        digest: usize,
    },
    Host,
}

/// A packed vector: elements of tensors, one after the other.
#[derive(Debug)]
struct Vector {
    to: usize,
    parts: Vec<VectorPart>,
}

#[derive(Debug)]
struct VectorPart {
    /// Index of the tensor.
    tensor: usize,
    dtype: Dtype,
    /// Number that is added to the elements.
    offset: f32,
}

impl Scatter {
    /// Checks the tensors of a trainer and assigns their destinations. `place` returns the offset
    /// of the next bytes of packed weights.
    pub(super) fn new<E: From<DeclaredError>>(
        config: &ModelConfig,
        shard: Shard,
        dtype: Dtype,
        declared: &[DeclaredTensor],
        mut place: impl FnMut(usize) -> Result<usize, E>,
    ) -> Result<Self, E> {
        let known = check(config, dtype, declared)?;
        let mut tensors: Vec<PlacedTensor> = declared.iter().map(PlacedTensor::new).collect();
        let (mut vectors, mut host_bytes, mut digest_count) = (Vec::new(), 0, 0);
        for packed in packing_order(config, shard) {
            if packed.is_vector {
                let mut vector = Vector { to: place(packed.elements() * 4)?, parts: Vec::new() };
                for part in &packed.parts {
                    let weight = part.weight;
                    let index = known[&weight];
                    let stored = dtype_of(&declared[index]).expect("the types were checked");
                    let part = Destination::new(part, stored, host_bytes, Memory::Host);
                    host_bytes += part.runs().bytes();
                    let offset = config.vector_offset(weight);
                    vector.parts.push(VectorPart { tensor: index, dtype: stored, offset });
                    tensors[index].destination = Some(part);
                }
                vectors.push(vector);
                continue;
            }
            let mut to = place(packed.elements() * dtype.bytes())?;
            for part in &packed.parts {
                let tensor = &mut tensors[known[&part.weight]];
                let memory = Memory::Device { digest: digest_count };
                let part = Destination::new(part, dtype, to, memory);
                digest_count += 1;
                to += part.runs().bytes();
                tensor.destination = Some(part);
            }
        }
        Ok(Self { tensors, vectors, host_bytes, digest_count })
    }

    /// Returns the bytes of vectors that go to the host.
    pub(super) fn host_bytes(&self) -> usize {
        self.host_bytes
    }

    pub(super) fn digest_count(&self) -> usize {
        self.digest_count
    }

    /// Returns the bytes that are copied out of all chunks.
    pub(super) fn bytes(&self) -> u64 {
        let parts = self.tensors.iter().filter_map(|tensor| tensor.destination.as_ref());
        parts.map(|part| part.runs().bytes() as u64).sum()
    }

    /// Returns the copies of the pieces of a chunk, and the parts that are then complete.
    pub(super) fn work(&self, pieces: &[TensorPiece]) -> ChunkWork {
        let mut work = ChunkWork::default();
        for piece in pieces {
            let tensor = &self.tensors[piece.tensor];
            let Some(destination) = &tensor.destination else { continue };
            match destination.memory {
                Memory::Host => destination.copies(piece, &mut work.to_host),
                Memory::Device { digest } => {
                    destination.copies(piece, &mut work.to_device);
                    if piece.range.end == tensor.bytes {
                        work.complete.push((digest, destination.to, destination.runs()));
                    }
                }
            }
        }
        work
    }

    /// Checks that all elements are finite, calls `upload` with each packed vector and its offset,
    /// and returns the digest of every tensor or of this rank's part of it. The digests of the
    /// parts add up to the digest of the tensor.
    pub(super) fn finish<E: From<DeclaredError>>(
        &self,
        copied: &CopiedWeights,
        mut upload: impl FnMut(&[f32], usize) -> Result<(), E>,
    ) -> Result<Vec<Option<TensorDigest>>, E> {
        let not_finite = |tensor: &PlacedTensor, count| {
            E::from(DeclaredError::NotFinite { name: tensor.name.clone(), count })
        };
        for vector in &self.vectors {
            let mut values = Vec::new();
            for VectorPart { tensor, dtype, offset } in &vector.parts {
                let tensor = &self.tensors[*tensor];
                let part = tensor.destination.as_ref().expect("a part of a vector is copied");
                let part = widened(part.host(&copied.host), *dtype);
                let count = part.iter().filter(|value| !value.is_finite()).count() as u64;
                if count > 0 {
                    return Err(not_finite(tensor, count));
                }
                values.extend(part.into_iter().map(|value| value + offset));
            }
            upload(&values, vector.to)?;
        }
        let digest = |tensor: &PlacedTensor| {
            let Some(part) = &tensor.destination else {
                return Ok(None);
            };
            let runs = part.runs();
            let (value, count) = match part.memory {
                Memory::Device { digest } => copied.digests[digest],
                Memory::Host => (of_weight(&runs, part.host(&copied.host)), 0),
            };
            match count {
                0 => Ok(Some(TensorDigest { value, is_whole: runs.bytes() == tensor.bytes })),
                count => Err(not_finite(tensor, count)),
            }
        };
        self.tensors.iter().map(digest).collect()
    }
}

impl PlacedTensor {
    fn new(tensor: &DeclaredTensor) -> Self {
        Self {
            name: tensor.name.clone(),
            bytes: tensor.bytes().expect("the shapes were checked") as usize,
            destination: None,
        }
    }
}

impl Destination {
    fn new(part: &PackedPart, dtype: Dtype, to: usize, memory: Memory) -> Self {
        let bytes = |elements: usize| elements * dtype.bytes();
        Self {
            rows: part.rows.clone(),
            cols: bytes(part.cols.start)..bytes(part.cols.end),
            row_bytes: bytes(part.stored_cols),
            to,
            memory,
        }
    }

    fn has_whole_rows(&self) -> bool {
        self.cols.len() == self.row_bytes
    }

    fn runs(&self) -> WeightRuns {
        let first = self.rows.start * self.row_bytes + self.cols.start;
        match self.has_whole_rows() {
            true => {
                let bytes = self.rows.len() * self.row_bytes;
                WeightRuns { runs: 1, run_bytes: bytes, run_stride: bytes, first }
            }
            false => WeightRuns {
                runs: self.rows.len(),
                run_bytes: self.cols.len(),
                run_stride: self.row_bytes,
                first,
            },
        }
    }

    /// Returns the part's bytes in host memory.
    fn host<'a>(&self, host: &'a [u8]) -> &'a [u8] {
        &host[self.to..self.to + self.runs().bytes()]
    }

    /// Adds the copies of the piece's bytes that belong to this part.
    fn copies(&self, piece: &TensorPiece, copies: &mut Vec<RowCopy>) {
        let row_bytes = self.row_bytes;
        let begin = piece.range.start.max(self.rows.start * row_bytes);
        let end = piece.range.end.min(self.rows.end * row_bytes);
        if begin >= end {
            return;
        }
        let from = |byte: usize| piece.at + byte - piece.range.start;
        if self.has_whole_rows() {
            let width = end - begin;
            let to = self.to + begin - self.rows.start * row_bytes;
            let (from, from_pitch, to_pitch, height) = (from(begin), width, width, 1);
            return copies.push(RowCopy { from, from_pitch, to, to_pitch, width, height });
        }
        // A piece may begin and end inside of a row.
        let mut copy = |first: usize, cols: Range<usize>, height: usize| {
            let cols = cols.start.max(self.cols.start)..cols.end.min(self.cols.end);
            if cols.start < cols.end && height > 0 {
                copies.push(RowCopy {
                    from: from(first * row_bytes + cols.start),
                    from_pitch: row_bytes,
                    to: self.to
                        + (first - self.rows.start) * self.cols.len()
                        + (cols.start - self.cols.start),
                    to_pitch: self.cols.len(),
                    width: cols.len(),
                    height,
                });
            }
        };
        let (first, last) = (begin.div_ceil(row_bytes), end / row_bytes);
        if first > last {
            return copy(last, begin % row_bytes..end % row_bytes, 1);
        }
        if !begin.is_multiple_of(row_bytes) {
            copy(first - 1, begin % row_bytes..row_bytes, 1);
        }
        copy(first, 0..row_bytes, last - first);
        if !end.is_multiple_of(row_bytes) {
            copy(last, 0..end % row_bytes, 1);
        }
    }
}

/// Checks names, element types and shapes. Returns the index of each weight's tensor.
fn check(
    config: &ModelConfig,
    dtype: Dtype,
    declared: &[DeclaredTensor],
) -> Result<HashMap<Weight, usize>, DeclaredError> {
    let mut names = HashMap::new();
    for (index, tensor) in declared.iter().enumerate() {
        if names.insert(tensor.name.as_str(), index).is_some() {
            return Err(DeclaredError::Twice { name: tensor.name.clone() });
        }
    }
    // Some trainers repeat a tied output.
    let repeated = config.tied_output.then_some(Weight::Output);
    let mut known = HashMap::new();
    for weight in Weight::all(config).chain(repeated) {
        let (name, shape) = (weight.hugging_face_name(config), weight.shape(config).dims());
        let Some(index) = names.remove(name.as_str()) else {
            if Some(weight) == repeated {
                continue;
            }
            return Err(DeclaredError::Missing { name, shape });
        };
        let tensor = &declared[index];
        if tensor.shape != shape {
            let found = tensor.shape.clone();
            return Err(DeclaredError::Shape { name, found, expected: shape });
        }
        let is_vector = shape.len() == 1;
        if dtype_of(tensor).is_none_or(|found| !is_vector && found != dtype) {
            let expected = match is_vector {
                true => "BF16 or F32",
                false => name_of(dtype),
            };
            return Err(DeclaredError::Dtype { name, found: tensor.dtype.clone(), expected });
        }
        known.insert(weight, index);
    }
    let architecture = config.family.name();
    match names.into_values().min() {
        None => Ok(known),
        Some(index) => {
            Err(DeclaredError::Unknown { name: declared[index].name.clone(), architecture })
        }
    }
}

fn name_of(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "F32",
        Dtype::Bf16 => "BF16",
    }
}

fn dtype_of(tensor: &DeclaredTensor) -> Option<Dtype> {
    [Dtype::F32, Dtype::Bf16].into_iter().find(|dtype| name_of(*dtype) == tensor.dtype)
}

fn widened(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    match dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        Dtype::Bf16 => {
            let bits = bytes.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes));
            bits.map(|bits| f32::from_bits(u32::from(bits) << 16)).collect()
        }
    }
}

#[cfg(test)]
mod tests;
