//! Moves KV blocks from the prefill node that computed them to the decode node that uses them.
//!
//! The crate knows block ids and the arena's guards. It knows nothing about models or scheduling.
//!
//! * [`api`]: commands from the node, events to the node.
//! * [`protocol`]: pure state machines for the two sides of a transfer and for a pair of nodes. No
//!   sockets, clocks or threads.
//! * [`driver`]: executes the protocol's actions on a transport and on queues of control messages.
//! * [`control`]: the control messages: encoding, authentication tag, replay window, size bounds.
//! * `shell`: runs the protocol on a driver thread, a listener thread and one sender thread per
//!   peer.
//! * [`transport`]: the trait that moves blocks. `data` implements it for `tcp`, `ipc` and
//!   `nccl`.
//! * `resolve`: resolves host names within a deadline.

#![forbid(unsafe_code)]

pub mod api;
pub mod config;
pub mod control;
mod data;
pub mod driver;
mod metrics;
pub mod protocol;
mod resolve;
mod shell;
mod threads;
mod transfer_config;
mod transfer_kind;
pub mod transport;

/// Parts of the wire format that fuzz targets need. Not for nodes.
pub mod testing {
    pub use crate::data::tcp::frame;
}

pub use config::{CONNECT_TIMEOUT, PRECONNECTED_PAIRS_MAX, TransferLimits};
pub use control::CONTROL_REFUSALS;
pub use driver::EventSink;
pub use metrics::{DATA_REFUSALS, MetricsReader, PeerMetrics, TransferMetrics};
pub use shell::{Overloaded, ShutdownError, StartError, Transfers};
pub use transfer_config::{
    ClusterSecret, SecretTooShort, TransferConfig, TransportConfig, has_rdma, host_id,
};
pub use transfer_kind::{TransferKind, TransportChoice};
