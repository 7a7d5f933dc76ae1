//! Transfers over real sockets on loopback.

mod carriers;
mod hostile;
mod journeys;
mod mismatch;
mod node;
mod process;
mod stopped;
