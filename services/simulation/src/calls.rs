//! The calls of attempts between routers and nodes.

use kv_transfer::api::Epoch;
use proto::{
    ids::TransferId,
    v1::{DecodeEvent, DecodeRequest, PrefillEvent, PrefillRequest},
};
use router_core::AttemptSide;
use tonic::Status;
use weight_transfer::WeightVersion;

/// Id of one call of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CallKey {
    pub transfer: TransferId,
    pub side: AttemptSide,
}

/// A call on its way to a node.
#[derive(Clone, Debug)]
pub(crate) enum NodeCall {
    Prefill(PrefillRequest),
    Decode(DecodeRequest),
}

/// A message of a call on its way to the router.
#[derive(Clone, Debug)]
pub(crate) enum NodeMessage {
    Decode(DecodeEvent),
    Prefill(PrefillEvent),
    /// The node accepted the call: its stream is open.
    Accepted,
    /// The call was rejected.
    Rejected(Status),
    /// The node ended the stream.
    End,
}

/// A node that takes part in an update of the weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpdatedNode {
    pub host: usize,
    pub epoch: Epoch,
    pub version: WeightVersion,
}
