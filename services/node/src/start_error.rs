//! Reasons why a node cannot start.

use std::{io, net::SocketAddr, time::Duration};

use cluster::{EpochError, NodeIdError};
use config::hub;
use engine::{
    SchedulerConfigError,
    executor::{ExecutorError, cpu::CpuExecutorError, cuda::CudaExecutorError},
};
use kernels::{ArenaError, cpu::CpuError, cuda::CudaError};
use membership::etcd::EtcdError;
use model::ModelError;
use telemetry::TelemetryError;
use tokio::task::JoinError;

use crate::{adapters::AdapterError, settings::SettingsError};

/// Reason why a node cannot start.
#[derive(Debug, thiserror::Error)]
pub enum NodeStartError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error("node.id = {id:?}: {source}")]
    NodeId { id: String, source: NodeIdError },
    #[error(transparent)]
    Epoch(#[from] EpochError),
    /// A file with a certificate or key is missing or invalid.
    #[error("{0}")]
    Tls(String),
    #[error("node.grpc: cannot listen on {address}: {source}")]
    Grpc { address: SocketAddr, source: io::Error },
    #[error("node.metrics: {0}")]
    Metrics(#[from] TelemetryError),
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    #[error("the model was not loaded within {} s", within.as_secs())]
    LoadTimeout { within: Duration },
    #[error(transparent)]
    Hub(#[from] hub::HubError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("model.adapters: cannot load {name}: {source}")]
    Adapter { name: String, source: Box<AdapterError> },
    #[error(transparent)]
    Arena(#[from] ArenaError),
    #[error(transparent)]
    Backend(#[from] CpuError),
    #[error(transparent)]
    Executor(#[from] CpuExecutorError),
    /// `node.device` is cuda, or a GPU was found and then failed.
    #[error("node.device: {0}")]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    CudaExecutor(#[from] CudaExecutorError),
    /// Memory that ranks share.
    #[error("node.tp: {0}")]
    Shared(#[from] kernels::shared::SharedError),
    #[error("node.tp: {0}")]
    Ranks(#[from] ranks::GroupError),
    /// Mapping the ranks' KV on GPUs failed.
    #[error("node.tp: {0}")]
    RankedKv(String),
    #[error("cannot measure step times: {0}")]
    StepTimes(#[from] ExecutorError),
    #[error(transparent)]
    Scheduler(#[from] SchedulerConfigError),
    #[error(transparent)]
    Transfers(#[from] kv_transfer::StartError),
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    #[error("cannot pin threads to the CPUs of node.cpus or node.numa_node: {0}")]
    Affinity(io::Error),
    #[error("loading the model ended early: {0}")]
    Load(JoinError),
}

impl From<config::ConfigError> for NodeStartError {
    fn from(error: config::ConfigError) -> Self {
        Self::Settings(error.into())
    }
}
