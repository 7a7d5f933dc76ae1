//! The ZeroMQ sockets, with every bound set.
//!
//! libzmq limits the size of a frame but not the number of frames in a message, and it takes frames
//! from whoever greets it. So the listener lets nobody in who does not know the cluster secret:
//! ZeroMQ's PLAIN mechanism, answered by the listener thread itself ([`ZapAuth`]). What keeps strangers
//! from filling our memory is the door; what proves who said what are the tags inside.

use std::net::SocketAddr;

use crate::{
    api::Epoch,
    control::{CONTROL_BYTES_MAX, Keys},
};

/// Messages that libzmq holds in either direction.
const HIGH_WATER: i32 = 1024;
/// A connection that has not greeted by then is dropped.
const HANDSHAKE_MS: i32 = 5_000;
const RECONNECT_MS: i32 = 50;
const RECONNECT_MS_MAX: i32 = 2_000;
const SEND_MS: i32 = 100;
/// So long may the last control messages of a closed pair take to leave.
const LINGER_MS: i32 = 100;

const DOOR: &str = "inproc://zeromq.zap.01";
const USER: &str = "baton";

/// What received messages consist of: the routing id that the socket adds, then the frames.
/// Frames beyond these are dropped unread, and the message is refused.
const PARTS_MAX: usize = 4;

/// The bound ROUTER and the endpoint it really has. It only receives.
pub fn listener(context: &zmq::Context, bind: SocketAddr) -> zmq::Result<(zmq::Socket, u16)> {
    let socket = context.socket(zmq::ROUTER)?;
    bound(&socket)?;
    socket.set_linger(0)?;
    socket.set_ipv6(bind.is_ipv6())?;
    // Two that call themselves the same: the first stays. Our own DEALERs let libzmq number them.
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

/// A DEALER to the listener of process `to`. It only sends, and queues for nobody who is not there.
pub fn outbound(
    context: &zmq::Context,
    keys: &Keys,
    to: Epoch,
    address: SocketAddr,
) -> zmq::Result<zmq::Socket> {
    let socket = context.socket(zmq::DEALER)?;
    bound(&socket)?;
    socket.set_linger(LINGER_MS)?;
    socket.set_ipv6(address.is_ipv6())?;
    socket.set_immediate(true)?;
    socket.set_reconnect_ivl(RECONNECT_MS)?;
    socket.set_reconnect_ivl_max(RECONNECT_MS_MAX)?;
    socket.set_sndtimeo(SEND_MS)?;
    socket.set_plain_username(Some(USER))?;
    socket.set_plain_password(Some(&keys.zap_password(to)))?;
    Ok(socket)
}

fn bound(socket: &zmq::Socket) -> zmq::Result<()> {
    socket.set_maxmsgsize(CONTROL_BYTES_MAX as i64)?;
    socket.set_rcvhwm(HIGH_WATER)?;
    socket.set_sndhwm(HIGH_WATER)?;
    socket.set_handshake_ivl(HANDSHAKE_MS)
}

/// One message, without waiting: its first parts and how many it had. `None` when there is none.
pub fn receive(socket: &zmq::Socket) -> zmq::Result<Option<(Vec<zmq::Message>, usize)>> {
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

/// Answers libzmq's question whether a connection may come in (ZAP, RFC 27).
pub struct ZapAuth {
    socket: zmq::Socket,
    keys: Keys,
    me: Epoch,
}

impl ZapAuth {
    /// Must be there before the listener is bound.
    pub fn open(context: &zmq::Context, keys: Keys, me: Epoch) -> zmq::Result<Self> {
        let socket = context.socket(zmq::REP)?;
        socket.set_linger(0)?;
        socket.bind(DOOR)?;
        Ok(Self { socket, keys, me })
    }

    pub fn socket(&self) -> &zmq::Socket {
        &self.socket
    }

    /// Answers one question; true when someone was let in, `None` when nobody asks.
    pub fn answer(&self) -> zmq::Result<Option<bool>> {
        let request = match self.socket.recv_multipart(zmq::DONTWAIT) {
            Ok(request) => request,
            Err(zmq::Error::EAGAIN) => return Ok(None),
            Err(error) => return Err(error),
        };
        // version, request id, domain, address, routing id, mechanism, user, password
        let (id, admitted) = match request.as_slice() {
            [_, id, _, _, _, mechanism, user, password] => {
                let known = mechanism == b"PLAIN"
                    && user == USER.as_bytes()
                    && self.keys.check_zap_password(self.me, password);
                (id.as_slice(), known)
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
