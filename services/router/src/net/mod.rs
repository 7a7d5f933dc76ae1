//! Accepts, bounds, watches and owns the connections of HTTP and gRPC clients.

mod connection;
mod descriptors;
mod requests;
mod server;
mod slots;

pub use connection::ConnectionEnd;
pub use descriptors::ConnectionLimits;
pub use server::{Bounds, Protocol, bind, serve};
