//! Connections of HTTP and gRPC clients: limits, deadlines and shutdown.

mod connection;
mod limits;
mod request_body;
mod server;
mod tls;

pub(crate) use connection::ConnectionState;
pub(crate) use limits::{client_slots, operator_slots};
pub(crate) use server::{Port, PortLimits, Protocol, Shutdown, bind, serve};
pub(crate) use tls::{Tls, read_tls};
