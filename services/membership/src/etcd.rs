//! Members that register in etcd.
//!
//! * A node holds a [`Registration`]: etcd keeps the node's [`NodeEntry`] while the node renews its
//!   lease. The node deletes the entry when it leaves.
//! * A router holds a [`Membership`](crate::Membership), which follows all entries of the cluster.
//!
//! [`registrant`] and [`follower`] are pure and tested by proptest; `register`, `follow` and
//! `session` do the I/O. During an etcd outage routers keep their members and nodes continue to
//! serve: etcd provides addresses, not health.
//!
//! The module has no elections, no locks, no configuration in etcd, and reads CA certificates only
//! from PEM files.

use std::pin::Pin;

pub mod follower;
pub mod registrant;

mod entry;
mod follow;
mod register;
mod session;
mod settings;

pub use entry::{EntryError, NodeEntry};
pub use register::{Registrar, Registration};
pub use settings::{EtcdError, EtcdSettings};

/// Returns a random seed that spreads the calls of processes with the same start time.
fn seed() -> Result<u64, EtcdError> {
    getrandom::u64().map_err(|error| EtcdError::NoRandomness { reason: error.to_string() })
}

/// A call to etcd in flight. Dropping it drops its connection.
type InFlight<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Waits for the outcome of the call. Never returns while no call is in flight.
async fn outcome<T>(call: &mut Option<InFlight<T>>) -> T {
    match call {
        Some(call) => call.await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(deadline: Option<std::time::Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
