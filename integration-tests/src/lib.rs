//! What the tests of whole clusters share: real processes on loopback, a client, golden outputs.
//!
//! [`cluster`] starts the service binaries that lie beside the test binary, on ports of their own
//! choice, and ends them by id. [`client`] is a plain HTTP client that keeps every event with the
//! time it came. [`up`] is a cluster as a user starts it. [`processes`] looks at processes by number.
//! [`command`] runs what ends by itself. [`lines`] reads what a process says. [`etcd`] runs a real etcd.
//! [`golden`] reads the reference outputs.

#![forbid(unsafe_code)]

pub mod client;
pub mod cluster;
pub mod command;
pub mod etcd;
pub mod golden;
pub mod lines;
pub mod processes;
pub mod up;
