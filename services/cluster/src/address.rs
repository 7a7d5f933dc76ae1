//! The addresses of a cluster's nodes.

use std::{collections::BTreeMap, fmt};

use crate::{Epoch, Role};

/// A node's gRPC address and its listed role. The node's record confirms the role.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeAddress {
    pub role: Role,
    /// `http://host:port`.
    pub grpc: String,
}

impl fmt::Display for NodeAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} node {}", self.role, self.grpc)
    }
}

/// Listed addresses with the epoch of each process, if the source knows it.
pub type Members = BTreeMap<NodeAddress, Option<Epoch>>;

/// A difference between two lists of members. A new process at a known address yields `Left` and
/// `Joined`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberChange {
    Joined(NodeAddress),
    /// The address is no longer listed. The directory probes the node before it drops the node.
    Left(NodeAddress),
}
