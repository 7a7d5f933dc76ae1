//! Connections of clients: accepted, bounded, watched and owned here, for HTTP and gRPC alike.

mod connection;
mod descriptors;
mod requests;
mod server;

pub use connection::ConnectionEnd;
pub use descriptors::connections_max;
pub use server::{Bounds, Protocol, bind, serve};
