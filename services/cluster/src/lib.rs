//! Node records and health, and the selection of a node for each request. Pure: no I/O, no clock,
//! no task.
//!
//! * [`Epoch`] and [`NodeId`] name a process and a node.
//! * [`NodeRecord`], [`ModelIdentity`] and [`Load`] are a node's validated reports about itself.
//!   All data of a peer passes through their conversions.
//! * [`Directory`] is the pure core: a router's view of all nodes with health, load and cached
//!   prefixes, and the node selection. It takes events and `now`, returns actions, and has no
//!   socket, clock or task.
//! * [`predict`] fits the step times of nodes and predicts the waiting time of clients from them.
//! * [`PrefixKeys`] are the cache keys of a prompt's blocks, by which the router knows the cached
//!   blocks of each node.
//!
//! The router opens the `Observe` streams that a [`Directory`] requests and passes their events to
//! the directory. Crate `membership` has the sources of addresses.

#![forbid(unsafe_code)]

mod address;
pub mod backoff;
pub mod directory;
pub mod predict;
mod prefix;
mod record;

pub use address::{MemberChange, Members, NodeAddress};
pub use directory::{
    AssignmentId, BreakerChange, BreakerReason, Considered, ConsideredOption, Directory,
    DirectoryAction, DirectoryInput, Drain, Failed, Health, IneligibleNode, Link, Member, NoNode,
    NodeChoice, NodeKey, NodeRequirements, Picked, Placement, RequiredCapacity, Selection,
    StreamId,
};
pub use prefix::{CacheIdentity, PrefixKeys};
pub use proto::ids::{Epoch, EpochError, ModelIdentity, NodeId, NodeIdError};
/// Load of a node. A load that the node cannot have excludes the node.
pub use proto::v1::NodeLoad as Load;
pub use record::{
    ADAPTER_NAME_ALLOWED, Adapter, NodeRecord, RecordError, Role, TEXT_BYTES_MAX, is_adapter_name,
    parse_url,
};
