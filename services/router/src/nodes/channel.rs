//! Connections to nodes.

use std::time::Duration;

use proto::v1::node_client::NodeClient;
use tonic::transport::{Channel, Endpoint};

/// A node in the same cluster answers in a millisecond, or is not there.
const CONNECT_MAX: Duration = Duration::from_secs(1);
/// A silent node is found out within these two: the lease and half a second.
const PING_INTERVAL: Duration = Duration::from_millis(500);
const PING_TIMEOUT: Duration = Duration::from_secs(2);
/// Per stream: some thousand token events. A stream that is not read stops there.
const STREAM_WINDOW_BYTES: u32 = 256 << 10;
/// Shared by all streams of a node; one that is not read must not stop the others.
const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
/// A snapshot with the most cached blocks that a directory believes, twice over.
const EVENT_BYTES_MAX: usize = 16 << 20;
/// A prompt of the longest sequences in use, a few bytes a token.
const REQUEST_BYTES_MAX: usize = 16 << 20;

/// A connection that is made when it is first used, and again whenever it broke.
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
