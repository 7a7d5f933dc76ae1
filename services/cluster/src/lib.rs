//! Cluster membership, node records and health, and the selection of a node for each request.
//!
//! * [`Epoch`] and [`NodeId`] name a process and a node.
//! * [`NodeRecord`], [`ModelIdentity`] and [`Load`] are what a node says about itself, checked:
//!   everything that comes from a peer enters through their conversions.
//! * [`Directory`] is the pure core: a router's view of all nodes, with health, load and cached
//!   prefixes, and the choice among them. Events and `now` in, actions out; no socket, clock or task.
//! * [`PrefixKeys`] are what nodes cache a prompt's blocks under, for knowing who has them.
//! * [`membership`] is where addresses come from: a static list, or [`etcd`], where nodes register.
//!
//! Left out: the calls themselves. The router opens the `Observe` streams that a [`Directory`] asks
//! for and feeds it what they bring.

#![forbid(unsafe_code)]

mod backoff;
pub mod directory;
pub mod etcd;
pub mod membership;
mod node_id;
mod prefix;
mod record;

pub use directory::{
    Action, AssignmentId, Directory, Health, Input, NoNode, NodeChoice, NodeKey, NodeView,
    StreamId, Wanted,
};
pub use membership::{
    MemberChange, MemberList, MemberWatch, Members, Membership, MembershipError, NodeAddress,
    StaticMembership,
};
pub use node_id::{NodeId, NodeIdError};
pub use prefix::{CacheIdentity, PrefixKeys};
pub use proto::ids::{Epoch, EpochError};
pub use record::{Load, ModelIdentity, NodeRecord, RecordError, Role, TEXT_BYTES_MAX};
