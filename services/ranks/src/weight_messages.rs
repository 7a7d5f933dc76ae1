//! Messages about new weights. Their rings are separate from the step plans, so ranks prepare
//! weights while steps run.
//!
//! Every rank answers every order once, in order.

use std::time::Duration;

use engine::executor::{DeclaredTensor, ReceivedWeights, TensorPiece};
use kernels::cuda::ExportedMemory;
use model::{FileIdentity, LoadFormat};
use serde::{Deserialize, Serialize};

/// Message from the node to its ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum WeightOrder {
    /// Packs the rank's part of a model.
    Prepare(ModelFiles),
    /// Checks a trainer's tensors and maps its chunk buffers.
    Receive { tensors: Vec<DeclaredTensor>, buffers: Vec<TrainerBuffer> },
    /// Copies the rank's part of a chunk.
    Scatter { buffer: usize, pieces: Vec<TensorPiece> },
    /// Waits for the copies out of a buffer. The next order ends the wait early.
    Wait { buffer: usize, within: Duration },
    /// Waits for all copies. The next order ends the wait early.
    Finish { within: Duration },
    /// Ends the copies and unmaps the trainer's buffers.
    End,
    /// Frees the weights that are not in use.
    Discard,
}

/// A model that the node has opened. The ranks open the same files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ModelFiles {
    /// The path's bytes, which need not be UTF-8.
    pub path: Vec<u8>,
    pub format: LoadFormat,
    pub files: Vec<FileIdentity>,
}

/// Serializable form of [`ExportedMemory`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TrainerBuffer {
    uuid: String,
    handle: [[u8; 32]; 2],
    offset: u64,
    bytes: u64,
}

impl From<&ExportedMemory> for TrainerBuffer {
    fn from(memory: &ExportedMemory) -> Self {
        let ExportedMemory { uuid, handle, offset, bytes } = memory.clone();
        let handle = *handle.as_chunks().0.as_array().expect("a handle has 64 bytes");
        Self { uuid, handle, offset, bytes }
    }
}

impl From<TrainerBuffer> for ExportedMemory {
    fn from(buffer: TrainerBuffer) -> Self {
        let TrainerBuffer { uuid, handle, offset, bytes } = buffer;
        let handle = std::array::from_fn(|at| handle[at / 32][at % 32]);
        Self { uuid, handle, offset, bytes }
    }
}

/// Outcome of an order: the received weights after [`WeightOrder::Finish`], or the reason why the
/// order failed.
pub(crate) type WeightAnswer = Result<Option<ReceivedWeights>, String>;
