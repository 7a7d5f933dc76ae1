//! Moves KV blocks from the node that computed them to the node that will use them.
//!
//! Knows block ids and the arena's guards, nothing of models or schedules.
//!
//! * [`api`] is what a node sees: commands in, events out.
//! * [`protocol`] decides: pure state machines of the two sides of a transfer and of a pair of nodes;
//!   events and `now` in, actions out; no socket, clock, thread.
//! * [`driver`] performs the protocol's actions on a transport and on queues of control messages.
//! * [`control`] seals and opens the messages that cross (tag, replay window, bounds).
//! * [`shell`] runs the protocol: a listener thread, one sender thread per peer, the driver thread.
//! * [`transport`] is the seam to what carries the bytes; [`data`] does so, by the [`transport`] that
//!   two nodes agree on.
//! * [`resolve`] finds where a peer is, within a deadline.

#![forbid(unsafe_code)]

pub mod api;
pub mod config;
pub mod control;
pub mod data;
pub mod driver;
pub mod metrics;
pub mod protocol;
pub mod resolve;
pub mod shell;
mod threads;
pub mod transfer_kind;
pub mod transport;

pub use config::{
    CONNECT_TIMEOUT, ClusterSecret, PRECONNECTED_PAIRS_MAX, SecretTooShort, TransferConfig,
    TransferLimits, TransportConfig,
};
pub use metrics::{MetricsReader, PeerMetrics, TransferMetrics};
pub use shell::{EventSink, Overloaded, ShutdownError, StartError, Transfers};
pub use transfer_kind::{TransferKind, TransportChoice};
