//! Interface to weights that arrive in chunks from a trainer's GPU.

use std::ops::Range;

use kernels::peer::WaitLimit;
use serde::{Deserialize, Serialize};

use super::PrepareError;

/// Copies the chunks of one update. Dropping it waits for the copies and unmaps the buffers.
pub trait ChunkReceiver {
    /// Lets a broadcast fill a buffer with the next chunk. Does nothing for mapped buffers.
    fn fill(
        &mut self,
        buffer: usize,
        bytes: usize,
        limit: WaitLimit<'_>,
    ) -> Result<(), PrepareError>;

    /// Enqueues the copies of a chunk's pieces. Pieces of a tensor come in order, and the last one
    /// ends the tensor.
    fn scatter(&mut self, buffer: usize, pieces: &[TensorPiece]) -> Result<(), PrepareError>;

    /// Waits until the copies out of this buffer have completed, so that it can be overwritten.
    fn wait(&mut self, buffer: usize, limit: WaitLimit<'_>) -> Result<(), PrepareError>;

    /// Waits for all copies, and rejects values that are not finite.
    fn finish(&mut self, limit: WaitLimit<'_>) -> Result<ReceivedWeights, PrepareError>;
}

/// Weights, or a rank's part of them, that have arrived.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceivedWeights {
    /// For each declared tensor the digest of the bytes that arrived; `None`: the model does not
    /// use the tensor.
    pub digests: Vec<Option<TensorDigest>>,
    /// Bytes that were copied out of chunks; with several ranks, the maximum over the ranks.
    pub bytes: u64,
}

/// Digest of a tensor, or of a rank's part of the tensor. The digests of the parts add up to the
/// tensor's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorDigest {
    pub value: u64,
    /// Whether all bytes of the tensor arrived.
    pub is_whole: bool,
}

/// A tensor that a trainer declares.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeclaredTensor {
    /// Name in Hugging Face's checkpoints.
    pub name: String,
    /// BF16 or F32.
    pub dtype: String,
    /// Dimensions, slowest first.
    pub shape: Vec<u64>,
}

impl DeclaredTensor {
    /// Returns the bytes; `None` for an unknown element type or too many elements.
    pub fn bytes(&self) -> Option<u64> {
        let element = match self.dtype.as_str() {
            "BF16" => 2u64,
            "F32" => 4,
            _ => return None,
        };
        self.shape.iter().try_fold(element, |bytes, &dim| bytes.checked_mul(dim))
    }
}

/// A range of a tensor's bytes in a chunk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorPiece {
    /// Index of the tensor.
    pub tensor: usize,
    pub range: Range<usize>,
    /// Offset in the chunk, in bytes.
    pub at: usize,
}

/// Reason why a trainer's tensors cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeclaredError {
    #[error(
        "cannot use the trainer's weights: tensor {name:?} occurs twice; expected each name once"
    )]
    Twice { name: String },
    #[error(
        "cannot use the trainer's weights: tensor {name:?} is missing; expected it with shape {shape:?}"
    )]
    Missing { name: String, shape: Vec<u64> },
    #[error(
        "cannot use the trainer's weights: tensor {name:?} is not part of the {architecture} architecture"
    )]
    Unknown { name: String, architecture: &'static str },
    #[error(
        "cannot use the trainer's weights: tensor {name:?} has shape {found:?}; expected {expected:?}"
    )]
    Shape { name: String, found: Vec<u64>, expected: Vec<u64> },
    #[error(
        "cannot use the trainer's weights: tensor {name:?} has dtype {found}; expected {expected}, as in the node's memory"
    )]
    Dtype { name: String, found: String, expected: &'static str },
    #[error(
        "cannot use the trainer's weights: {count} elements of tensor {name:?} are infinite or NaN; expected finite values"
    )]
    NotFinite { name: String, count: u64 },
}
