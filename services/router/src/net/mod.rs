//! Connections of HTTP and gRPC clients: accepting, limits, deadlines and shutdown.

mod connection;
mod server;
mod slots;
mod tls;

pub use connection::ConnectionState;
pub use server::{Bounds, Protocol, Shutdown, bind, serve};
pub use slots::ConnectionLimits;
pub use tls::{Tls, read_tls};
