//! The loop around a listening socket.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    net::{TcpListener, TcpStream},
    time::sleep,
};

use crate::{
    slots::{ConnectionSlot, ConnectionSlots},
    table::SlotLimits,
};

/// Pause after a failed accept: most likely no file descriptor is free.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(50);

/// A listening socket whose connections have slots.
#[derive(Debug)]
pub struct PortListener {
    socket: TcpListener,
    slots: ConnectionSlots,
}

impl PortListener {
    pub fn new(socket: TcpListener, limits: SlotLimits) -> Self {
        Self { socket, slots: ConnectionSlots::new(limits) }
    }

    /// Waits for a connection and its slot. Connections that are not accepted yet wait in the
    /// kernel's queue.
    pub async fn accept(&self) -> (TcpStream, ConnectionSlot) {
        loop {
            match self.socket.accept().await {
                Ok((stream, peer)) => {
                    // Tokens are small and must not wait for more bytes. A closed connection fails
                    // when it is read.
                    let _ = stream.set_nodelay(true);
                    return (stream, self.slots.admit(SocketAddr::ip(&peer)).await);
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    sleep(ACCEPT_AGAIN_AFTER).await;
                }
            }
        }
    }
}
