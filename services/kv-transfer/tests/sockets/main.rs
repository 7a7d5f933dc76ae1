//! Transfers over real sockets on loopback.

mod hostile;
mod mismatch;
mod node;
mod process;
mod stopped;
mod transfers;
mod transports;
