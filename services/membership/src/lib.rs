//! Members of a cluster: where the addresses of the nodes come from, and how connections to the
//! nodes are secured.
//!
//! [`Membership`] is the source of addresses: a static list, the addresses of [`DnsName`]s, or
//! [`etcd`], where nodes register. [`Tls`] has the certificates of the cluster, and [`connect`]
//! opens connections with them.
//!
//! The crate makes no RPC to nodes and knows nothing of their health: crate `cluster` has the
//! directory of nodes.

#![forbid(unsafe_code)]

mod dns;
pub mod etcd;
mod membership;
mod retry;
mod tls;

pub use dns::DnsName;
pub use membership::{MemberList, MemberWatch, Membership, MembershipBackend, MembershipError};
pub use tls::{NodeStream, Tls, connect, read_tls};
