//! The ZeroMQ sockets, with all bounds set.
//!
//! libzmq bounds the size of a frame but not the number of frames per message, and it accepts
//! frames from every client. The listener therefore uses ZeroMQ's PLAIN mechanism and admits only
//! clients that know the cluster secret ([`ZapAuth`]), each by a credential that is valid for one
//! connection. PLAIN only prevents other clients from filling this process's memory. An
//! authentication tag (MAC) in each message authenticates the message. The `zmq` crate builds
//! libzmq without CURVE.

use std::net::SocketAddr;

use proto::auth::ReplayGuard;

use crate::{
    api::Epoch,
    control::{CONTROL_BYTES_MAX, Credential, Keys},
};

/// Maximum number of messages that libzmq queues per direction.
const HIGH_WATER: i32 = 1024;
/// Time-out of the ZMTP handshake.
const HANDSHAKE_MS: i32 = 5_000;
const RECONNECT_MS: i32 = 50;
const RECONNECT_MS_MAX: i32 = 2_000;
const SEND_MS: i32 = 100;
/// Linger time for the last control messages of a closed pair.
const LINGER_MS: i32 = 100;

const ZAP_ENDPOINT: &str = "inproc://zeromq.zap.01";

/// Maximum number of parts kept of a received message. A valid message has three: the routing id
/// that the socket adds, and two frames.
const PARTS_MAX: usize = 4;

/// Binds the ROUTER socket, which only receives. Returns the socket and its port.
pub(super) fn listener(
    context: &zmq::Context,
    bind: SocketAddr,
) -> zmq::Result<(zmq::Socket, u16)> {
    let socket = context.socket(zmq::ROUTER)?;
    set_limits(&socket)?;
    socket.set_linger(0)?;
    socket.set_ipv6(bind.is_ipv6())?;
    // If two clients use one routing id, the first stays connected. Baton's DEALERs set no routing
    // id, so libzmq assigns unique ones.
    socket.set_router_handover(false)?;
    socket.set_plain_server(true)?;
    socket.set_zap_domain("baton")?;
    let port = if bind.port() == 0 { "*".to_owned() } else { bind.port().to_string() };
    let host = if bind.is_ipv6() { format!("[{}]", bind.ip()) } else { bind.ip().to_string() };
    socket.bind(&format!("tcp://{host}:{port}"))?;
    let endpoint = socket.get_last_endpoint()?.unwrap_or_default();
    let port = endpoint.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or(0);
    Ok((socket, port))
}

/// Creates a DEALER socket for one connection with this credential. It only sends, and it queues
/// nothing while the peer is unreachable.
pub(super) fn outbound(
    context: &zmq::Context,
    credential: &Credential,
    address: SocketAddr,
) -> zmq::Result<zmq::Socket> {
    let socket = context.socket(zmq::DEALER)?;
    set_limits(&socket)?;
    socket.set_linger(LINGER_MS)?;
    socket.set_ipv6(address.is_ipv6())?;
    socket.set_immediate(true)?;
    socket.set_reconnect_ivl(RECONNECT_MS)?;
    socket.set_reconnect_ivl_max(RECONNECT_MS_MAX)?;
    socket.set_sndtimeo(SEND_MS)?;
    socket.set_plain_username(Some(&credential.user))?;
    socket.set_plain_password(Some(&credential.password))?;
    Ok(socket)
}

fn set_limits(socket: &zmq::Socket) -> zmq::Result<()> {
    socket.set_maxmsgsize(CONTROL_BYTES_MAX as i64)?;
    socket.set_rcvhwm(HIGH_WATER)?;
    socket.set_sndhwm(HIGH_WATER)?;
    socket.set_handshake_ivl(HANDSHAKE_MS)
}

/// Receives one message without blocking. Returns its first parts and its number of parts, or
/// `None` if no message is queued.
pub(super) fn receive(socket: &zmq::Socket) -> zmq::Result<Option<(Vec<zmq::Message>, usize)>> {
    let (mut parts, mut count) = (Vec::with_capacity(PARTS_MAX), 0);
    loop {
        let part = match socket.recv_msg(zmq::DONTWAIT) {
            Ok(part) => part,
            Err(zmq::Error::EAGAIN) => return Ok(None),
            Err(error) => return Err(error),
        };
        let more = part.get_more();
        count += 1;
        if parts.len() < PARTS_MAX {
            parts.push(part);
        }
        if !more {
            return Ok(Some((parts, count)));
        }
    }
}

/// Authenticator that decides which connections libzmq accepts (ZAP, RFC 27).
pub(super) struct ZapAuth {
    pub socket: zmq::Socket,
    keys: Keys,
    me: Epoch,
    /// Credentials that were presented before.
    replay: ReplayGuard,
}

impl ZapAuth {
    /// Binds the ZAP socket. Must precede the listener's bind.
    pub(super) fn open(context: &zmq::Context, keys: Keys, me: Epoch) -> zmq::Result<Self> {
        let socket = context.socket(zmq::REP)?;
        socket.set_linger(0)?;
        socket.bind(ZAP_ENDPOINT)?;
        Ok(Self { socket, keys, me, replay: ReplayGuard::default() })
    }

    /// Answers one request and returns whether the client was admitted. Returns `None` if no
    /// request is queued.
    pub(super) fn answer(&mut self) -> zmq::Result<Option<bool>> {
        let request = match self.socket.recv_multipart(zmq::DONTWAIT) {
            Ok(request) => request,
            Err(zmq::Error::EAGAIN) => return Ok(None),
            Err(error) => return Err(error),
        };
        // version, request id, domain, address, routing id, mechanism, user, password
        let (id, admitted) = match request.as_slice() {
            [_, id, _, _, _, mechanism, user, password] => {
                let credential = self.keys.check_credential(self.me, user, password);
                let is_new =
                    credential.is_some_and(|(from, sequence)| self.replay.admit(from.0, sequence));
                (id.as_slice(), mechanism == b"PLAIN" && is_new)
            }
            [_, id, ..] => (id.as_slice(), false),
            _ => (&[][..], false),
        };
        let (status, text) = if admitted { ("200", "OK") } else { ("400", "unknown secret") };
        let reply: [&[u8]; 6] = [b"1.0", id, status.as_bytes(), text.as_bytes(), b"", b""];
        self.socket.send_multipart(reply, 0)?;
        Ok(Some(admitted))
    }
}
