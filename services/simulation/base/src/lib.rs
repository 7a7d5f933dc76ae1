//! Shared parts of the simulations: seeded random numbers, a virtual clock and a network with
//! faults.
//!
//! Events, endpoints and data are types of the caller. The cluster simulation (crate `simulation`)
//! and the simulation of the transfer protocol (tests of crate `kv-transfer`) use this crate.

#![forbid(unsafe_code)]

mod clock;
mod network;
mod random;

pub use clock::{Clock, Due};
pub use network::{ConnectionId, Network, NetworkFaults};
pub use random::{Random, mix};
