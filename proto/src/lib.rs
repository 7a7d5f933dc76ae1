//! Messages and services between clients, routers and nodes, generated from the `.proto` files in
//! the folder of this crate.
//!
//! Ids are 16 raw bytes on the wire. A deadline is the remaining time in milliseconds.

#![forbid(unsafe_code)]

pub mod auth;
pub mod cache_keys;
pub mod ids;
mod timed_body;

pub use timed_body::TimedBody;

/// Messages and services of package `baton.v1`.
pub mod v1 {
    #![allow(clippy::all, missing_docs)]
    tonic::include_proto!("baton.v1");
}

/// The compiled file descriptor set, as gRPC reflection serves it.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
