//! The backend for NVIDIA's GPUs, behind a face without `unsafe`.
//!
//! Nothing of CUDA is linked: the driver, cuBLASLt and our own kernels are opened when
//! [`Driver::open`] and what follows are called, and where one is missing that is an error which
//! says what to do. So one binary serves machines with and without a GPU.
//!
//! * [`Driver`] finds [`Device`]s; [`Context`] makes one ready; [`Stream`]s and [`Event`]s
//!   order its work.
//! * [`DeviceMemory`] is taken once at start and cut into [`Range`]s; [`Pinned`] is host memory that
//!   copies use.
//! * [`Nccl`] makes [`Communicator`]s between GPUs of several processes.
//!   A [`Group`] sums what they have in each other's memory, without it.
//! * [`KernelLibrary`] holds our own kernels, [`Products`] are matrix products.
//! * [`CudaBackend`] runs forwards; [`DeviceKv`] holds their KV, a [`DeviceBatch`] the running batch,
//!   of which a [`CudaStep`] is prepared and a [`CudaFrame`] brings the tokens back.

mod attention;
mod backend;
mod batch;
mod buffer;
mod captured;
mod channel;
mod clock;
mod collective;
mod context;
mod copies;
mod digest;
mod driver;
mod driver_calls;
mod error;
#[allow(dead_code)] // The whole header, called or not.
mod ffi;
mod graph;
mod ipc;
mod kv;
mod library;
mod links;
mod memory;
mod moves;
mod nccl;
mod plan;
mod probe;
mod process;
mod product;
mod roof;
mod sample;
mod skinny;
mod staging;
mod step;
mod stream_progress;
mod tune;
mod upload;

pub use attention::AttentionKind;
pub use backend::{CudaBackend, CudaOptions};
pub use batch::{BatchLimits, CudaFrame, DeviceBatch, Finished, Output, StepInput};
pub use buffer::{CudaBuffer, CudaMatrix, CudaVector};
pub use channel::{NcclChannels, PeerExchange, nccl_link_bytes, nccl_reserved_sms};
pub use clock::DeviceClock;
pub use collective::{Group, GroupArena, GroupHandle, SumNorm, SumRows, SumWay};
pub use context::{Compute, Context, DeviceToHost, Event, HostToDevice, Role, Stream};
pub use driver::{CUDA_NEEDED, Device, Driver, Link, has_cublaslt, has_nccl};
pub use error::{CudaError, CudaVersion};
pub use graph::Graph;
pub use ipc::{IpcMemory, PeerToDevice};
pub use kv::{DeviceKv, RankedKv};
pub use library::{KernelLibrary, TimeRange};
pub use links::{CopySubmission, LinkRate, pull_rate};
pub use memory::{ALIGNMENT, DeviceMemory, InFlight, Pinned, Range};
pub use nccl::{
    Communicator, CommunicatorOptions, Move, NCCL_ENVIRONMENT, Nccl, NcclError, NcclVersion, Piece,
    UniqueId, set_nccl_environment,
};
pub use plan::{Admission, Extension, StepRows};
pub use probe::Delays;
pub use product::{Product, Products, WORKSPACE_BYTES};
pub use sample::SampleOutcome;
pub use step::CudaStep;
pub use tune::{Tuned, TunedTime, Tuning, row_steps};
