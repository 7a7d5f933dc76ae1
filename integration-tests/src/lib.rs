//! Helpers of the cluster tests: real processes on loopback, a client, golden outputs.
//!
//! [`cluster`] starts the service binaries next to the test binary on free ports and stops them by
//! process id. [`client`] is an HTTP client that records every event with its time. [`up`] runs
//! `baton up`. [`processes`] inspects processes by id. [`command`] runs programs that end by
//! themselves. [`lines`] reads the output of a process. [`etcd`] runs a real etcd. [`golden`] reads
//! the reference outputs.

#![forbid(unsafe_code)]

pub mod client;
pub mod cluster;
pub mod command;
mod cut_model;
pub mod etcd;
pub mod golden;
pub mod lines;
pub mod processes;
pub mod up;
