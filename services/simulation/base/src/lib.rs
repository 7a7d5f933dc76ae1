//! Foundations of every simulation: seeded random numbers, a virtual clock and a network with faults.
//!
//! Nothing here knows what is simulated: events, endpoints and data are the caller's types. The
//! simulation of a cluster (crate `simulation`) and that of the transfer protocol (tests of crate
//! `kv-transfer`) share it.

#![forbid(unsafe_code)]

mod clock;
mod network;
mod random;

pub use clock::{Clock, Due};
pub use network::{ConnectionId, Network, NetworkFaults};
pub use random::{Random, mix};
