//! Cuts the tensors of an update into chunks.

use std::{collections::HashSet, ops::Range};

use ring::digest::{Context, SHA256};
use xxhash_rust::xxh3::Xxh3;

/// A tensor of an update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub name: String,
    /// Name of the element type, as in safetensors or GGUF.
    pub dtype: String,
    /// Dimensions, slowest first.
    pub shape: Vec<u64>,
    pub bytes: u64,
}

/// Maximum bytes of a chunk of an update from files. A thread hashes a chunk in about 10 ms, the
/// time by which the last chunks delay the update. Weight versions depend on the cuts, so all nodes
/// use this size.
pub const CHUNK_BYTES: u64 = 64 << 20;

/// Maximum number of chunks of a plan, which takes about 150 bytes of memory for each.
const CHUNKS_MAX: u64 = 1 << 20;

/// Tensors and their cut into chunks. Chunks are ranges of the tensors' bytes, one tensor after the
/// other, so every byte is in exactly one chunk. Equal tensors and chunk sizes give equal plans on
/// every side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    tensors: Vec<Tensor>,
    chunk_bytes: u64,
    chunks: Vec<WeightChunk>,
}

/// Bytes that are transferred and hashed together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightChunk {
    /// Consecutive parts, at least one.
    pub pieces: Vec<TensorRange>,
    /// Sum of the pieces' bytes, at most the plan's `chunk_bytes`.
    pub bytes: u64,
}

/// Range of a tensor's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorRange {
    /// Index of the tensor in the plan.
    pub tensor: usize,
    pub range: Range<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("cannot plan an update without weights; expected at least one tensor")]
    Empty,
    #[error("cannot plan an update: tensor {name:?} occurs twice; expected each name once")]
    Duplicate { name: String },
    #[error("cannot plan an update with chunk_bytes = 0; expected at least 1")]
    ChunkBytes,
    #[error(
        "cannot plan an update of {bytes} bytes with chunk_bytes = {chunk_bytes}; expected at least {}",
        bytes.div_ceil(CHUNKS_MAX)
    )]
    TooManyChunks { chunk_bytes: u64, bytes: u64 },
    #[error("cannot plan an update of more than {} bytes", u64::MAX)]
    TooLarge,
}

impl Plan {
    /// Cuts the tensors, in this order, into chunks of at most `chunk_bytes`.
    pub fn new(tensors: Vec<Tensor>, chunk_bytes: u64) -> Result<Self, PlanError> {
        if chunk_bytes == 0 {
            return Err(PlanError::ChunkBytes);
        }
        let mut names = HashSet::new();
        if let Some(tensor) = tensors.iter().find(|tensor| !names.insert(&tensor.name)) {
            return Err(PlanError::Duplicate { name: tensor.name.clone() });
        }
        let total = tensors.iter().try_fold(0u64, |sum, tensor| sum.checked_add(tensor.bytes));
        let bytes = total.ok_or(PlanError::TooLarge)?;
        if bytes == 0 {
            return Err(PlanError::Empty);
        }
        if bytes.div_ceil(chunk_bytes) > CHUNKS_MAX {
            return Err(PlanError::TooManyChunks { chunk_bytes, bytes });
        }
        let mut chunks: Vec<WeightChunk> = Vec::new();
        for (index, tensor) in tensors.iter().enumerate() {
            let mut start = 0;
            while start < tensor.bytes {
                if chunks.last().is_none_or(|chunk| chunk.bytes == chunk_bytes) {
                    chunks.push(WeightChunk { pieces: Vec::new(), bytes: 0 });
                }
                let chunk = chunks.last_mut().expect("a chunk was pushed");
                let end = tensor.bytes.min(start + (chunk_bytes - chunk.bytes));
                chunk.bytes += end - start;
                chunk.pieces.push(TensorRange { tensor: index, range: start..end });
                start = end;
            }
        }
        Ok(Self { tensors, chunk_bytes, chunks })
    }

    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    pub fn chunks(&self) -> &[WeightChunk] {
        &self.chunks
    }

    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// Returns the bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.bytes).sum()
    }

    /// Returns the hash of names, element types, shapes and cuts, on which the version of weights
    /// from files depends.
    pub fn hash(&self) -> u128 {
        let mut hash = Xxh3::new();
        hash.update(&self.chunk_bytes.to_le_bytes());
        hash.update(&(self.tensors.len() as u64).to_le_bytes());
        self.tensors.iter().for_each(|tensor| tensor.hash_into(&mut hash));
        hash.digest128()
    }

    /// Returns the hash by which a node recognizes the same plan of a trainer: the first 128 bits
    /// of SHA-256 over a line for each tensor and one for each chunk. Python's standard library has
    /// no xxh3.
    pub fn trainer_hash(&self) -> u128 {
        let mut hash = Context::new(&SHA256);
        for Tensor { name, dtype, shape, .. } in &self.tensors {
            let dims: Vec<String> = shape.iter().map(u64::to_string).collect();
            hash.update(format!("{name}\t{dtype}\t{}\n", dims.join(",")).as_bytes());
        }
        for chunk in &self.chunks {
            let piece = |TensorRange { tensor, range }: &TensorRange| {
                format!("{tensor}:{}:{}", range.start, range.end - range.start)
            };
            let pieces: Vec<String> = chunk.pieces.iter().map(piece).collect();
            hash.update(format!("{}\n", pieces.join(" ")).as_bytes());
        }
        let hash = hash.finish();
        u128::from_be_bytes(*hash.as_ref().first_chunk().expect("SHA-256 has 32 bytes"))
    }
}

impl Tensor {
    /// Hashes name, element type, shape and size.
    pub(crate) fn hash_into(&self, hash: &mut Xxh3) {
        let Self { name, dtype, shape, bytes } = self;
        for text in [name, dtype] {
            // The length first, so that neighbouring fields cannot be confused.
            hash.update(&(text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        }
        hash.update(&(shape.len() as u64).to_le_bytes());
        shape.iter().for_each(|dim| hash.update(&dim.to_le_bytes()));
        hash.update(&bytes.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tensors(sizes: &[u64]) -> Vec<Tensor> {
        let tensor = |(index, &bytes): (usize, &u64)| Tensor {
            name: format!("tensor {index}"),
            dtype: "U8".into(),
            shape: vec![bytes],
            bytes,
        };
        sizes.iter().enumerate().map(tensor).collect()
    }

    proptest! {
        #[test]
        fn every_byte_is_in_one_chunk_and_no_chunk_exceeds_the_limit(
            sizes in prop::collection::vec(0u64..500, 1..40),
            chunk_bytes in 1u64..300,
        ) {
            prop_assume!(sizes.iter().sum::<u64>() > 0);
            let plan = Plan::new(tensors(&sizes), chunk_bytes).unwrap();
            let mut next: Vec<u64> = vec![0; sizes.len()];
            let mut last = 0;
            for (index, chunk) in plan.chunks().iter().enumerate() {
                let bytes: u64 = chunk.pieces.iter().map(|piece| piece.range.end - piece.range.start).sum();
                prop_assert_eq!(bytes, chunk.bytes);
                prop_assert!(bytes <= chunk_bytes);
                // Only the last chunk may be smaller.
                prop_assert!(bytes == chunk_bytes || index + 1 == plan.chunks().len());
                for piece in &chunk.pieces {
                    prop_assert!(piece.tensor >= last && piece.range.start < piece.range.end);
                    prop_assert_eq!(next[piece.tensor], piece.range.start);
                    (next[piece.tensor], last) = (piece.range.end, piece.tensor);
                }
            }
            prop_assert_eq!(next, sizes.clone());
            let other = Plan::new(tensors(&sizes), chunk_bytes).unwrap();
            prop_assert_eq!(plan.hash(), other.hash());
            prop_assert_eq!(plan, other);
        }
    }

    #[test]
    fn hashes_depend_on_names_types_shapes_and_cuts() {
        let hash = |change: fn(&mut Tensor), chunk_bytes| {
            let mut tensors = tensors(&[6, 4]);
            change(&mut tensors[1]);
            let plan = Plan::new(tensors, chunk_bytes).unwrap();
            [plan.hash(), plan.trainer_hash()]
        };
        let hashes = [
            hash(|_| (), 8),
            hash(|_| (), 9),
            hash(|tensor| tensor.name.push('x'), 8),
            hash(|tensor| tensor.dtype = "I8".into(), 8),
            hash(|tensor| tensor.shape = vec![2, 2], 8),
            hash(|tensor| tensor.bytes = 5, 8),
        ];
        let distinct: HashSet<u128> = hashes.into_iter().flatten().collect();
        assert_eq!(distinct.len(), 2 * hashes.len());
    }

    #[test]
    fn invalid_tensors_are_rejected() {
        let mut twice = tensors(&[1, 2]);
        twice[1].name = twice[0].name.clone();
        let name = twice[0].name.clone();
        assert_eq!(Plan::new(twice, 8), Err(PlanError::Duplicate { name }));
        assert_eq!(Plan::new(Vec::new(), 8), Err(PlanError::Empty));
        assert_eq!(Plan::new(tensors(&[0]), 8), Err(PlanError::Empty));
        assert_eq!(Plan::new(tensors(&[1]), 0), Err(PlanError::ChunkBytes));
        assert_eq!(Plan::new(tensors(&[1, u64::MAX]), 8), Err(PlanError::TooLarge));
        // 256 bytes instead of 256 MiB.
        let (chunk_bytes, bytes) = (256, 1 << 40);
        let error = Plan::new(tensors(&[bytes]), chunk_bytes).unwrap_err();
        assert_eq!(error, PlanError::TooManyChunks { chunk_bytes, bytes });
        assert!(error.to_string().ends_with("expected at least 1048576"), "{error}");
        assert!(Plan::new(tensors(&[bytes]), 256 << 20).is_ok());
    }
}
