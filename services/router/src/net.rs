//! Connections of HTTP and gRPC clients: limits, deadlines and shutdown.

mod connection;
mod limits;
mod request_body;
mod server;
mod tls;

pub use connection::ConnectionState;
pub use limits::{client_slots, operator_slots};
pub use server::{Port, PortLimits, Protocol, Shutdown, bind, serve};
pub use tls::{Tls, read_tls};
