//! Connections to nodes.

use std::time::Duration;

use proto::v1::node_client::NodeClient;
use tonic::transport::{Channel, Endpoint};

/// A node in the same cluster accepts a connection within milliseconds.
const CONNECT_MAX: Duration = Duration::from_secs(1);
/// A silent node is detected within interval plus time-out: the lease and half a second.
const PING_INTERVAL: Duration = Duration::from_millis(500);
const PING_TIMEOUT: Duration = Duration::from_secs(2);
/// Flow-control window of one stream: some thousand token events.
const STREAM_WINDOW_BYTES: u32 = 256 << 10;
/// Flow-control window of all streams of a node: an unread stream must not block the others.
const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
/// Twice the size of a snapshot with the maximum of cached blocks that a directory accepts.
const EVENT_BYTES_MAX: usize = 16 << 20;
/// Size of the longest prompts in use, at a few bytes per token.
const REQUEST_BYTES_MAX: usize = 16 << 20;

/// Opens a connection on first use, and again whenever it broke.
pub fn open(url: &str) -> Result<Channel, tonic::transport::Error> {
    let endpoint = Endpoint::from_shared(url.to_owned())?
        .connect_timeout(CONNECT_MAX)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
    Ok(endpoint.connect_lazy())
}

pub fn client(channel: Channel) -> NodeClient<Channel> {
    NodeClient::new(channel)
        .max_decoding_message_size(EVENT_BYTES_MAX)
        .max_encoding_message_size(REQUEST_BYTES_MAX)
}
