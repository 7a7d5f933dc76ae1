//! The inputs and outputs of a node process.

use std::time::{Duration, Instant};

use kernels::BlockId;
use kv_transfer::{
    api::{self as transfer, Command, Epoch, Peer, TransferId},
    control::ControlMessage,
    protocol::DataEvent,
};
use proto::v1;
use weight_transfer::{NodeReply, UpdateId, WeightVersion};

use crate::{
    calls::{CallKey, NodeCall, NodeMessage},
    nodes::{Connection, Stream},
    updates::coordinators::UpdateCall,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessState {
    Running,
    Paused,
    Dead,
}

/// An input of a process.
#[derive(Clone, Debug)]
pub(crate) enum Input {
    // For the engine thread.
    Call {
        connection: Connection,
        key: CallKey,
        call: Box<NodeCall>,
    },
    /// The router dropped a call.
    Cancel(CallKey),
    /// A router's connection ended.
    ConnectionEnded(Connection),
    Observe(Stream),
    StopObserving(Stream),
    Transfer(transfer::Event),
    Drain {
        grace: Duration,
    },
    /// For the node's part in updates of the weights.
    Weights(WeightsInput),
    /// The drain timeout is over.
    EndAll,
    /// A rank process died, so the executor fails.
    RankLost,
    // For the transfer thread.
    Command(Command),
    ControlMessage(Peer, Box<ControlMessage>),
    Data(DataEvent),
    PeerFailed {
        peer: Epoch,
        reason: &'static str,
    },
    /// A data connection with the peer ended.
    Closed {
        peer: Epoch,
        connection: u64,
        reason: &'static str,
    },
    /// A deadline has passed.
    Deadline,
}

/// An output of a process, in order.
#[derive(Debug)]
pub(crate) enum Output {
    Message {
        connection: Connection,
        key: CallKey,
        message: NodeMessage,
    },
    /// `None`: the node ended the stream.
    Observed {
        stream: Stream,
        event: Option<v1::ObserveEvent>,
    },
    /// From the engine thread to the transfer thread.
    Command(Command),
    /// The transfer core has received every block of this transfer.
    Arrived(TransferId),
    /// From the transfer thread to the engine thread.
    TransferEvent(transfer::Event),
    ControlMessage {
        to: Epoch,
        message: ControlMessage,
    },
    OpenData {
        to: Epoch,
    },
    /// Both data connections with the peer are closed.
    CloseData {
        peer: Epoch,
    },
    SendChunk {
        transfer: TransferId,
        chunk: u32,
    },
    Release {
        transfer: TransferId,
    },
    /// The scheduler owns the blocks of a transfer again.
    HoldEnded {
        transfer: TransferId,
        hold: TransferHold,
    },
    /// From the node's part in updates of the weights.
    Weights(WeightsOutput),
    /// The draining node has no attempt left.
    Drained,
    /// The executor failed, so the process exits.
    EngineFailed,
}

/// A message for the node's part in updates.
#[derive(Clone, Debug)]
pub(crate) enum WeightsInput {
    Call(Box<UpdateCall>),
    /// A prepared peer asks whether this node has committed the update.
    Question {
        id: UpdateId,
        from: Epoch,
    },
    PeerCommitted {
        id: UpdateId,
        version: WeightVersion,
    },
}

/// A message of the node's part in updates.
#[derive(Debug)]
pub(crate) enum WeightsOutput {
    /// The answer to the coordinator's call of node `node`.
    Reply {
        id: UpdateId,
        node: usize,
        reply: NodeReply,
    },
    Question {
        to: Epoch,
        id: UpdateId,
    },
    Committed {
        to: Epoch,
        id: UpdateId,
        version: WeightVersion,
    },
}

/// Blocks of the scheduler that a transfer holds.
#[derive(Clone, Debug)]
pub(crate) struct TransferHold {
    pub peer: Epoch,
    pub since: Instant,
    /// Blocks that are reserved for an incoming transfer.
    pub reserved: Vec<BlockId>,
}
