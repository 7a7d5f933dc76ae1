//! The trainer's first message.

use engine::executor::{DeclaredTensor, TensorPiece};
use kernels::{
    cuda::{ChunkSource, ExportedMemory, HANDLE_BYTES, NcclGroup, UniqueId},
    peer::WaitLimit,
};
use serde::Deserialize;
use weight_transfer::{Plan, Tensor, WeightChunk};

use super::address::{TrainerAddress, TrainerError};
use crate::weights::receive::ReceiveError;

const BUFFERS_MAX: usize = 16;
const CHUNK_BYTES_MAX: u64 = 8 << 30;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Declaration {
    /// Bytes of every chunk but the last.
    chunk_bytes: u64,
    tensors: Vec<TensorDeclaration>,
    /// Hash of the trainer's plan in hexadecimal digits.
    plan: String,
    /// With `ipc`.
    #[serde(default)]
    mapped: Vec<BufferDeclaration>,
    /// With `nccl`.
    broadcast: Option<BroadcastDeclaration>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BufferDeclaration {
    /// UUID of the GPU.
    gpu: String,
    /// CUDA IPC handle in hexadecimal digits.
    handle: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BroadcastDeclaration {
    /// UUID of the trainer's GPU.
    gpu: String,
    /// Id of the communicator in hexadecimal digits.
    id: String,
    rank: u32,
    ranks: u32,
    /// Buffers that each node uses.
    buffers: usize,
    max_ctas: Option<u32>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct TensorDeclaration {
    name: String,
    dtype: String,
    shape: Vec<u64>,
}

/// Buffers whose values were checked.
pub(super) enum TrainerBuffers {
    Mapped(Vec<ExportedMemory>),
    Broadcast { group: NcclGroup, gpu: String, buffers: usize, chunk_bytes: u64 },
}

impl TrainerBuffers {
    pub(super) fn chunk_source<'a>(&'a self, limit: WaitLimit<'a>) -> ChunkSource<'a> {
        match self {
            Self::Mapped(buffers) => ChunkSource::Mapped(buffers),
            Self::Broadcast { group, gpu, buffers, chunk_bytes } => ChunkSource::Broadcast {
                group: *group,
                trainer_gpu: gpu,
                buffers: *buffers,
                chunk_bytes: *chunk_bytes,
                limit,
            },
        }
    }
}

impl Declaration {
    /// Checks the buffers or the communicator.
    pub(super) fn source(&self, address: &TrainerAddress) -> Result<TrainerBuffers, TrainerError> {
        let bytes = self.chunk_bytes;
        if !(1..=CHUNK_BYTES_MAX).contains(&bytes) {
            return Err(invalid(format!(
                "chunk_bytes is {bytes}; expected 1 to {CHUNK_BYTES_MAX}"
            )));
        }
        match (address, &self.broadcast) {
            (TrainerAddress::Ipc(_), None) => self.mapped().map(TrainerBuffers::Mapped),
            (TrainerAddress::Ipc(_), Some(_)) => {
                Err(invalid("it has the field broadcast; expected mapped".to_owned()))
            }
            (TrainerAddress::Nccl { .. }, None) => {
                Err(invalid("missing field broadcast".to_owned()))
            }
            (TrainerAddress::Nccl { .. }, Some(broadcast)) => self.broadcast(broadcast),
        }
    }

    fn mapped(&self) -> Result<Vec<ExportedMemory>, TrainerError> {
        let count = self.mapped.len();
        check_count(count)?;
        let buffer = |buffer: &BufferDeclaration| {
            let handle = bytes_of::<HANDLE_BYTES>("handle", &buffer.handle)?;
            let (uuid, bytes) = (buffer.gpu.clone(), self.chunk_bytes);
            Ok(ExportedMemory { uuid, handle, offset: 0, bytes })
        };
        self.mapped.iter().map(buffer).collect()
    }

    fn broadcast(&self, broadcast: &BroadcastDeclaration) -> Result<TrainerBuffers, TrainerError> {
        let BroadcastDeclaration { gpu, id, rank, ranks, buffers, max_ctas } = broadcast;
        check_count(*buffers)?;
        if *rank == 0 || rank >= ranks {
            return Err(invalid(format!("rank is {rank} of {ranks}; expected 1 to ranks - 1")));
        }
        let id = UniqueId(bytes_of("id", id)?);
        let group = NcclGroup { id, rank: *rank, ranks: *ranks, ctas_max: *max_ctas };
        let (gpu, chunk_bytes) = (gpu.clone(), self.chunk_bytes);
        Ok(TrainerBuffers::Broadcast { group, gpu, buffers: *buffers, chunk_bytes })
    }

    pub(super) fn tensors(&self) -> Vec<DeclaredTensor> {
        let tensor =
            |TensorDeclaration { name, dtype, shape }| DeclaredTensor { name, dtype, shape };
        self.tensors.iter().cloned().map(tensor).collect()
    }

    /// Cuts the tensors into chunks. Fails if the trainer has cut them in another way.
    pub(super) fn plan(&self, tensors: &[DeclaredTensor]) -> Result<Plan, ReceiveError> {
        let tensors = tensors.iter().map(tensor_of).collect::<Result<_, _>>()?;
        let plan = Plan::new(tensors, self.chunk_bytes)?;
        let found = u128::from_be_bytes(bytes_of("plan", &self.plan)?);
        let expected = plan.trainer_hash();
        match found == expected {
            true => Ok(plan),
            false => Err(TrainerError::Plan { found, expected }.into()),
        }
    }
}

fn tensor_of(declared: &DeclaredTensor) -> Result<Tensor, TrainerError> {
    let bytes = declared.bytes();
    let DeclaredTensor { name, dtype, shape } = declared.clone();
    match bytes {
        Some(bytes) => Ok(Tensor { name, dtype, shape, bytes }),
        None => Err(invalid(format!(
            "tensor {name:?} has dtype {dtype} and shape {shape:?}; expected BF16 or F32 and at most {} bytes",
            u64::MAX
        ))),
    }
}

fn invalid(reason: String) -> TrainerError {
    TrainerError::Declaration { reason }
}

fn check_count(count: usize) -> Result<(), TrainerError> {
    match (1..=BUFFERS_MAX).contains(&count) {
        true => Ok(()),
        false => Err(invalid(format!("{count} buffers; expected 1 to {BUFFERS_MAX}"))),
    }
}

fn bytes_of<const N: usize>(field: &str, text: &str) -> Result<[u8; N], TrainerError> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N || !digits.iter().all(u8::is_ascii_hexdigit) {
        let shown: String = text.chars().take(40).collect();
        let expected = 2 * N;
        return Err(invalid(format!(
            "{field} is {shown:?}; expected {expected} hexadecimal digits"
        )));
    }
    let value = |digit: u8| (digit as char).to_digit(16).unwrap_or(0) as u8;
    let pairs = digits.as_chunks::<2>().0;
    Ok(std::array::from_fn(|at| value(pairs[at][0]) << 4 | value(pairs[at][1])))
}

/// Returns the pieces of a chunk, one after the other.
pub(super) fn pieces(chunk: &WeightChunk) -> Vec<TensorPiece> {
    let mut at = 0;
    let piece = |piece: &weight_transfer::TensorRange| {
        let range = piece.range.start as usize..piece.range.end as usize;
        let begin = at;
        at += range.len();
        TensorPiece { tensor: piece.tensor, range, at: begin }
    };
    chunk.pieces.iter().map(piece).collect()
}
