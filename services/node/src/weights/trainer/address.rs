//! The address of a trainer, and the reasons why its weights do not arrive.

use std::{fmt, io, path::PathBuf, time::Duration};

/// Address of a trainer.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum TrainerAddress {
    /// Unix socket.
    Ipc(PathBuf),
    Nccl {
        host: String,
        /// Secret of this update, which the node sends first. Logs do not show it.
        token: String,
    },
}

impl TrainerAddress {
    /// Parses `host:port/token`.
    pub(crate) fn nccl(text: &str) -> Option<Self> {
        let (host, token) = weight_transfer::trainer_address(text)?;
        Some(Self::Nccl { host: host.to_owned(), token: token.to_owned() })
    }

    /// Returns what must listen at the address, for errors.
    fn expected(&self) -> &'static str {
        match self {
            Self::Ipc(_) => "the Unix socket of a trainer on this host",
            Self::Nccl { .. } => "a trainer that waits there",
        }
    }
}

impl fmt::Display for TrainerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ipc(socket) => socket.display().fmt(f),
            Self::Nccl { host, .. } => f.write_str(host),
        }
    }
}

impl fmt::Debug for TrainerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Reason why a trainer's weights did not arrive.
#[derive(Debug, thiserror::Error)]
pub(in crate::weights) enum TrainerError {
    #[error("cannot connect to a trainer at {address}: {cause}; expected {}", address.expected())]
    Connect { address: TrainerAddress, cause: String },
    #[error("cannot read the trainer's declaration: {reason}")]
    Declaration { reason: String },
    #[error("the trainer closed the connection before the update was prepared")]
    Closed,
    #[error("cannot receive from the trainer: no answer within {0:?}")]
    Silent(Duration),
    #[error("cannot receive from the trainer: {0}")]
    Io(io::Error),
    #[error(
        "the trainer packed {found_bytes} bytes as chunk {found}; expected {bytes} bytes as chunk {index}"
    )]
    Chunk { found: u64, found_bytes: u64, index: u64, bytes: u64 },
    #[error(
        "cannot receive from the trainer: trainer and node cut the tensors differently: the hash of the trainer's plan is {found:032x}; expected {expected:032x}"
    )]
    Plan { found: u128, expected: u128 },
    #[error(
        "cannot use the trainer's weights: tensor {name:?} arrived with digest {found:016x}; expected {expected:016x}, the trainer's digest"
    )]
    Digest { name: String, found: u64, expected: u64 },
}
