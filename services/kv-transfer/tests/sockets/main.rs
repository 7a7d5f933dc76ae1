//! Transfers over real sockets on loopback.

mod journeys;
mod node;
