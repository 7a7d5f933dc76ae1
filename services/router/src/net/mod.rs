//! Connections of clients: accepted, bounded, watched and owned here, for HTTP and gRPC alike.

mod connection;
mod server;

pub use server::{Protocol, bind, serve};
