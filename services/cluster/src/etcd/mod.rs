//! Members that register in etcd.
//!
//! * A node holds a [`Registration`]: its [`NodeEntry`] stands in etcd for as long as the node renews
//!   its lease, and is taken away when it leaves.
//! * A router holds an [`EtcdMembership`], which follows all entries of the cluster.
//!
//! The decisions are pure ([`registrant`], [`follower`]: proptest drives them); `register`, `follow`
//! and `session` do the I/O. While etcd is away nothing is forgotten on either side, and everything
//! goes on: etcd is asked who is there, never whether somebody is well.
//!
//! Left out: elections, locks, configuration in etcd, and TLS with other than a PEM authority.

pub mod follower;
pub mod registrant;

mod entry;
mod follow;
mod register;
mod retry;
mod session;
mod settings;

pub use entry::{EntryError, NodeEntry};
pub use follow::EtcdMembership;
pub use register::{Registrar, Registration};
pub use settings::{EtcdError, EtcdSettings};

/// Spreads the calls of processes that began together.
fn seed() -> Result<u64, EtcdError> {
    getrandom::u64().map_err(|error| EtcdError::NoRandomness { reason: error.to_string() })
}

async fn sleep_until(deadline: Option<std::time::Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
