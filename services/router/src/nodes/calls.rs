//! Connections to nodes, and the Decode and Prefill calls of an attempt.

use std::{pin::Pin, time::Duration};

use proto::v1::{
    DecodeEvent, DecodeRequest, PrefillEvent, PrefillRequest, node_client::NodeClient,
};
use telemetry::propagation;
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Channel, Endpoint},
};
use tracing::Span;

use super::Assigned;

/// Connect time-out. A node of the cluster accepts a connection within milliseconds.
const CONNECT_MAX: Duration = Duration::from_secs(1);
/// Interval of pings. A silent node is detected within interval plus time-out: the lease plus 0.5 s.
const PING_INTERVAL: Duration = Duration::from_millis(500);
const PING_TIMEOUT: Duration = Duration::from_secs(2);
/// Flow-control window of one stream: a few thousand token events.
const STREAM_WINDOW_BYTES: u32 = 256 << 10;
/// Flow-control window of all streams of a node: an unread stream must not block the others.
const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
/// Maximum size of a received message: twice that of a snapshot with the maximum number of cached blocks.
const EVENT_BYTES_MAX: usize = 16 << 20;
/// Maximum size of a sent message, for the longest prompts at a few bytes per token.
const REQUEST_BYTES_MAX: usize = 16 << 20;

/// Returns a channel that connects at first use and reconnects after failures.
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

/// A call of an attempt. Dropping it cancels the call and releases the node.
pub struct NodeCall<E> {
    pub node: Assigned,
    stream: CallStream<E>,
}

type Opening<E> = Pin<Box<dyn Future<Output = Result<Response<Streaming<E>>, Status>> + Send>>;

/// The server stream of a call: opening and reading it are one wait.
enum CallStream<E> {
    Opening(Opening<E>),
    Open(Streaming<E>),
}

impl NodeCall<DecodeEvent> {
    pub fn decode(node: Assigned, request: DecodeRequest, span: &Span) -> Self {
        let (mut client, request) = (client(node.channel.clone()), traced(span, request));
        let call = async move { client.decode(request).await };
        Self { node, stream: CallStream::Opening(Box::pin(call)) }
    }
}

impl NodeCall<PrefillEvent> {
    pub fn prefill(node: Assigned, request: PrefillRequest, span: &Span) -> Self {
        let (mut client, request) = (client(node.channel.clone()), traced(span, request));
        let call = async move { client.prefill(request).await };
        Self { node, stream: CallStream::Opening(Box::pin(call)) }
    }
}

fn traced<M>(span: &Span, message: M) -> Request<M> {
    let mut request = Request::new(message);
    propagation::inject_grpc(span, request.metadata_mut());
    request
}

/// Returns the call's next message; `None` when the node ended the stream. Blocks forever without a call.
/// Cancel-safe.
pub async fn next_message<E>(call: &mut Option<&mut NodeCall<E>>) -> Result<Option<E>, Status> {
    let Some(NodeCall { node, stream }) = call else { return std::future::pending().await };
    if let CallStream::Opening(opening) = stream {
        *stream = CallStream::Open(opening.await?.into_inner());
    }
    let CallStream::Open(events) = stream else { unreachable!("the stream was opened above") };
    let message = events.message().await?;
    if message.is_some() {
        node.answered();
    }
    Ok(message)
}
