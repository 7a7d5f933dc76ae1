//! Transfers over real sockets on loopback.

mod hostile;
mod journeys;
mod node;
mod process;
mod stopped;
