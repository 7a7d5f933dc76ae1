//! Calls to the actor, and what it answers.

use std::{path::PathBuf, time::Duration};

use proto::v1;
use tokio::sync::{mpsc, oneshot};
use tonic::Status;
use weight_transfer::{BeginError, CommitError, UpdateId, UpdateReport, WeightVersion};

use super::{peers::UpdatePeer, trainer::address::TrainerAddress};

/// Maximum number of queued calls of coordinators and peers.
pub(super) const CALLS_MAX: usize = 64;

/// An update whose fields are checked.
#[derive(Clone, Debug)]
pub(super) struct CheckedUpdate {
    pub id: UpdateId,
    pub label: String,
    pub origin: WeightsOrigin,
    pub remaining: Duration,
    pub peers: Vec<UpdatePeer>,
    pub in_flight: v1::InFlight,
}

/// Place of new weights.
#[derive(Clone, Debug)]
pub(super) enum WeightsOrigin {
    Path(PathBuf),
    Trainer(TrainerAddress),
    /// A node that has prepared or committed weights of this version.
    Peer {
        peer: UpdatePeer,
        version: WeightVersion,
    },
}

#[derive(Debug)]
pub(super) enum WeightsCall {
    Begin(CheckedUpdate),
    Commit {
        id: UpdateId,
        version: WeightVersion,
    },
    Abort {
        id: UpdateId,
        reason: String,
    },
    /// `coordinated`: the update whose coordinator calls. `asked`: the update that another caller
    /// asks for.
    Status {
        coordinated: Option<UpdateId>,
        asked: Option<UpdateId>,
    },
}

impl WeightsCall {
    /// Returns the update whose state the answer has; `None`: the running update, or the last one.
    pub(super) fn update(&self) -> Option<UpdateId> {
        match self {
            Self::Begin(begin) => Some(begin.id),
            Self::Commit { id, .. } | Self::Abort { id, .. } => Some(*id),
            Self::Status { coordinated, asked } => coordinated.or(*asked),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum WeightsCallError {
    #[error(
        "cannot change the weights: weights.place is auto on a GPU; expected shadow or in_place"
    )]
    Unsupported,
    #[error(transparent)]
    Begin(#[from] BeginError),
    #[error(transparent)]
    Commit(#[from] CommitError),
    #[error(
        "cannot copy weights of weight_version {version}: expected a version that this node has prepared or committed"
    )]
    NoSource { version: WeightVersion },
    #[error("busy: {CALLS_MAX} calls are queued")]
    Busy,
    #[error("the node stops")]
    Stopped,
}

/// The weights in use, and the update that the call names.
#[derive(Clone, Debug)]
pub(super) struct WeightsStatus {
    pub version: WeightVersion,
    pub label: String,
    pub report: Option<UpdateReport>,
    /// The last committed update, and the time for which no step ran during its commit.
    pub paused: Option<(UpdateId, Duration)>,
}

pub(super) type WeightsReply = oneshot::Sender<Result<WeightsStatus, WeightsCallError>>;
/// Files of weights on their way to a peer.
pub(super) type FileParts = mpsc::Receiver<Result<v1::WeightsPart, Status>>;

#[derive(Debug)]
pub(super) enum WeightsMessage {
    Call(WeightsCall, WeightsReply),
    /// A peer copies weights of this version.
    Copy(WeightVersion, oneshot::Sender<Result<FileParts, WeightsCallError>>),
}

/// Sends calls to the actor.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    pub(super) messages: mpsc::Sender<WeightsMessage>,
}

impl Handle {
    pub(super) async fn call(&self, call: WeightsCall) -> Result<WeightsStatus, WeightsCallError> {
        let (reply, answer) = oneshot::channel();
        self.send(WeightsMessage::Call(call, reply))?;
        answer.await.map_err(|_| WeightsCallError::Stopped)?
    }

    /// Returns the files of weights of this version.
    pub(super) async fn copy(&self, version: WeightVersion) -> Result<FileParts, WeightsCallError> {
        let (reply, answer) = oneshot::channel();
        self.send(WeightsMessage::Copy(version, reply))?;
        answer.await.map_err(|_| WeightsCallError::Stopped)?
    }

    fn send(&self, message: WeightsMessage) -> Result<(), WeightsCallError> {
        self.messages.try_send(message).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => WeightsCallError::Busy,
            mpsc::error::TrySendError::Closed(_) => WeightsCallError::Stopped,
        })
    }
}
