//! Connections of HTTP and gRPC clients: accepting, limits, deadlines and shutdown.

mod connection;
mod descriptors;
mod requests;
mod server;
mod slots;

pub use connection::ConnectionEnd;
pub use descriptors::ConnectionLimits;
pub use server::{Bounds, Protocol, bind, serve};
