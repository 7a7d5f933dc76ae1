//! Accepts the connections of a port.
//!
//! [`PortListener`] gives each connection a [`ConnectionSlot`]. The slots bound the number of
//! connections and decide which connection closes for a new one: clients that have not
//! authenticated give way first. [`handshake`] performs the TLS handshake of a connection. HTTP,
//! tokens and API keys are left to the callers, which report an authenticated client by
//! [`SlotHandle::authenticate`].

#![forbid(unsafe_code)]

mod accept;
mod handshake;
mod slots;
mod table;

pub use accept::PortListener;
pub use handshake::{ClientStream, HANDSHAKE_MAX, handshake};
pub use slots::{ConnectionSlot, SlotHandle};
pub use table::{AdmissionVerdict, ConnectionClose, SlotLimits};
