//! Connections to nodes.
//!
//! A channel has one connection and never opens another one: the proof of the node at the start of
//! its `Observe` stream holds for every call of the channel. So no call reaches another process
//! that took over the address.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http::Uri;
use hyper_util::rt::TokioIo;
use membership::{NodeStream, Tls};
use proto::{
    auth::{CallSigner, ClusterSecret, InvalidProof, OBSERVE},
    ids::{Epoch, NoRandomness},
    v1::{ObserveEvent, ObserveRequest, node_client::NodeClient},
};
use tonic::{
    Request, Status, Streaming,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};

/// Connect time-out. A node of the cluster accepts a connection within milliseconds.
const CONNECT_MAX: Duration = Duration::from_secs(1);
/// Interval of pings. A silent node is detected within interval plus time-out: the lease plus 0.5
/// s.
const PING_INTERVAL: Duration = Duration::from_millis(500);
const PING_TIMEOUT: Duration = Duration::from_secs(2);
/// Flow-control window of one stream: a few thousand token events.
const STREAM_WINDOW_BYTES: u32 = 256 << 10;
/// Flow-control window of all streams of a node: an unread stream must not block the others.
const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
/// Maximum size of a received message. The largest one is a trace of a node's steps.
const EVENT_BYTES_MAX: usize = 16 << 20;
/// Maximum size of a sent message, for the longest prompts at a few bytes per token.
const REQUEST_BYTES_MAX: usize = 16 << 20;

/// Credentials of the router's calls to nodes.
#[derive(Clone)]
pub struct NodeCredentials {
    /// Authenticates the calls.
    pub secret: ClusterSecret,
    /// Encrypts the connections, if the cluster has certificates.
    pub tls: Option<Tls>,
}

impl std::fmt::Debug for NodeCredentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NodeCredentials(..)")
    }
}

/// Client of one node. It adds a token to each call.
pub(super) type Client = NodeClient<InterceptedService<Channel, CallSigner>>;

/// Connection to one node.
#[derive(Clone)]
pub(super) struct NodeChannel {
    pub channel: Channel,
    pub signer: CallSigner,
}

/// Reason why a node cannot be observed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ObserveError {
    #[error(transparent)]
    Url(#[from] tonic::transport::Error),
    #[error(transparent)]
    NoRandomness(#[from] NoRandomness),
    #[error(transparent)]
    Call(#[from] Status),
    #[error(transparent)]
    Proof(#[from] InvalidProof),
}

/// The `Observe` stream of a node that has proved its knowledge of the secret.
pub(super) struct ObservedNode {
    pub channel: NodeChannel,
    pub node: Epoch,
    pub events: Streaming<ObserveEvent>,
}

impl NodeChannel {
    /// Opens a connection and an `Observe` stream, and checks the node's proof.
    pub(super) async fn observe(
        url: &str,
        NodeCredentials { secret, tls }: &NodeCredentials,
    ) -> Result<ObservedNode, ObserveError> {
        let endpoint = Endpoint::from_shared(url.to_owned())?
            .connect_timeout(CONNECT_MAX)
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
        let (is_used, tls) = (Arc::new(AtomicBool::new(false)), tls.clone());
        let connect = move |url: Uri| connect_once(url, is_used.clone(), tls.clone());
        let channel = endpoint.connect_with_connector_lazy(tower::service_fn(connect));
        let signer = CallSigner::new(secret)?;
        let mut request = Request::new(ObserveRequest {});
        let proof = signer.sign_with_proof(OBSERVE, request.metadata_mut());
        let mut client =
            NodeClient::new(channel.clone()).max_decoding_message_size(EVENT_BYTES_MAX);
        let response = client.observe(request).await?;
        let node = proof.check(response.metadata())?;
        let channel = Self { channel, signer };
        Ok(ObservedNode { channel, node, events: response.into_inner() })
    }

    /// Returns a client whose calls address this process.
    pub(super) fn client(&self, node: Epoch) -> Client {
        NodeClient::with_interceptor(self.channel.clone(), self.signer.to(node))
            .max_decoding_message_size(EVENT_BYTES_MAX)
            .max_encoding_message_size(REQUEST_BYTES_MAX)
    }
}

async fn connect_once(
    url: Uri,
    is_used: Arc<AtomicBool>,
    tls: Option<Tls>,
) -> io::Result<TokioIo<NodeStream>> {
    if is_used.swap(true, Ordering::Relaxed) {
        return Err(io::Error::new(io::ErrorKind::NotConnected, "the connection was lost"));
    }
    membership::connect(&url, tls.as_ref()).await.map(TokioIo::new)
}
