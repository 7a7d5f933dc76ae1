//! The CUDA backend for NVIDIA GPUs, behind an interface without `unsafe`.
//!
//! No CUDA library is linked. [`Driver::open`] loads the driver, and later calls load cuBLASLt,
//! NCCL and Baton's kernel library. A missing library is an error that says what to install. So the
//! same binary runs on machines with and without a GPU.
//!
//! * [`Driver`] enumerates [`Device`]s; a [`Context`] initializes one; [`Stream`]s and [`Event`]s
//!   order its work.
//! * [`DeviceMemory`] is allocated once at start and cut into [`Range`]s; [`PinnedMemory`] is
//!   page-locked host memory for copies.
//! * [`Nccl`] creates [`Communicator`]s between the GPUs of several processes. A [`CudaGroup`] runs
//!   all-reduces through peer memory, without NCCL.
//! * [`KernelLibrary`] holds Baton's own kernels; [`Gemm`] runs GEMMs on cuBLASLt.
//! * [`CudaBackend`] runs forward passes. [`DeviceKv`] holds the KV cache and [`DeviceBatch`] the
//!   running batch. A [`CudaStep`] is a prepared step; a [`CudaFrame`] returns its tokens.

/// Declares the table of a library's functions, and its `load` from an opened library.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),* $(,)?) -> $result:ty;)*) => {
        #[allow(non_snake_case)]
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// # Safety
            /// The library's functions have these signatures, and the library stays open during
            /// their calls.
            pub(super) unsafe fn load(library: &libloading::Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the function has this signature, and the library stays open during
                    // its calls (`# Safety`).
                    $($name: unsafe {
                        *library.get(concat!(stringify!($name), "\0").as_bytes())?
                    },)*
                })
            }
        }
    };
}

/// Calls a function of the kernel library with the stream as its last argument, and converts the
/// return code to a result. The call is unsafe.
macro_rules! launch {
    ($library:expr, $stream:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        let library: &KernelLibrary = $library;
        let code = (library.functions().$name)($($argument,)* $stream.raw().cast());
        library.check(stringify!($name), code)
    }};
}

mod attention;
mod backend;
mod bandwidth;
mod batch;
mod batch_memory;
mod buffer;
mod captured;
mod channel;
mod clock;
mod collective;
mod context;
mod copies;
mod delta;
mod digest;
mod driver;
mod driver_calls;
mod error;
mod experts;
mod export;
#[allow(dead_code)] // The whole header, called or not.
mod ffi;
mod gemm;
mod graph;
mod ipc;
mod kv;
mod library;
mod links;
mod low_rank;
mod memory;
mod moves;
mod nccl;
mod offload;
mod packages;
mod packer;
mod parallel;
mod plan;
mod remote_kv;
mod sample;
mod skinny;
mod staging;
mod step;
mod stream_delays;
mod stream_progress;
mod testing;
mod tune;
mod upload;
mod weight_chunks;

pub use attention::{AttentionKind, supports_fp8_kv};
pub use backend::{CudaBackend, CudaOptions};
pub use batch::{CudaFrame, DeviceBatch, DownloadBuffers, Drafts, Finished, StepInput};
pub use batch_memory::BatchLimits;
pub use buffer::{CudaBuffer, CudaMatrix, CudaVector};
pub use channel::{NcclChannels, PeerExchange, nccl_link_bytes, nccl_reserved_sms};
pub use clock::DeviceClock;
pub use collective::{
    AllReduceAlgorithm, AllReduceNorm, AllReduceShape, CudaGroup, GroupArena, GroupHandle,
};
pub use context::{Compute, Context, DeviceToHost, Event, HostToDevice, Stream, StreamRole};
pub use delta::{DELTA_DIM_MAX, DELTA_DIM_UNIT};
pub use driver::{CUDA_NEEDED, Device, Driver, Link, has_cublaslt};
pub use error::{CudaError, CudaVersion};
pub use experts::{CudaExperts, EXPERT_GROUPS_MAX, EXPERTS_CHOSEN_MAX, EXPERTS_MAX};
pub use export::{ExportedMemory, HANDLE_BYTES};
pub use gemm::{Gemm, GemmShape, WORKSPACE_BYTES};
pub use graph::Graph;
pub use ipc::{IpcMemory, PeerToDevice};
pub use kv::DeviceKv;
pub use library::{KernelLibrary, TimeRange};
pub use links::{CopySubmission, LinkRate, pull_rate};
pub use low_rank::{AdapterSizes, CudaLowRank, LowRankWriter};
pub use memory::{ALIGNMENT, CopyInFlight, DeviceMemory, PinnedMemory, Range};
pub use nccl::{
    Communicator, CommunicatorOptions, NCCL_ENVIRONMENT, Nccl, NcclError, NcclVersion, Piece,
    SendOrReceive, UniqueId, has_nccl, set_nccl_environment,
};
pub use packer::CudaPacker;
pub use plan::{Admission, Extension, KnownDrafts, StepRows};
pub use remote_kv::RankedKv;
pub use sample::SampleOutcome;
pub use step::CudaStep;
pub use stream_delays::StreamDelays;
pub use testing::weight_digest;
pub use tune::{TunedTime, TuningResult, TuningSettings, row_steps};
pub use weight_chunks::{
    Broadcast, ChunkCopies, ChunkSource, ChunkWork, CopiedWeights, NcclGroup, RowCopy,
};
