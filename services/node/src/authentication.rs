//! Admits only calls with a valid token, before any handler runs.

use std::{
    sync::Arc,
    task::{Context, Poll},
    time::SystemTime,
};

use futures_util::future::{Either, Ready, ready};
use listener::SlotHandle;
use proto::auth::{
    CallVerifier, InvalidToken, OBSERVE, PROOF_KEY, TOKEN_KEY, WEIGHTS_PULL, WEIGHTS_STATUS,
};
use telemetry::{NodeMetrics, metrics::TokenRejection};
use tonic::{
    Code, Response, Status,
    body::Body,
    metadata::{Binary, MetadataMap, MetadataValue},
};
use tower::{Layer, Service};

use crate::connection::keep_authenticated;

/// Path prefix of health checks, which need no token.
const HEALTH: &str = "/grpc.health.v1.Health/";

/// Calls whose responses have a proof, because the caller acts on the node's statements.
const PROVED: [&str; 3] = [OBSERVE, WEIGHTS_STATUS, WEIGHTS_PULL];

/// Extension of a request: the proof to return.
#[derive(Clone)]
pub(crate) struct Proof(MetadataValue<Binary>);

impl Proof {
    /// Returns the response with the request's proof, if there is one.
    pub(crate) fn add<T>(proof: Option<Self>, mut response: Response<T>) -> Response<T> {
        if let Some(Self(proof)) = proof {
            response.metadata_mut().insert_bin(PROOF_KEY, proof);
        }
        response
    }
}

/// Layer that rejects calls without a valid token, except health checks.
#[derive(Clone)]
pub(crate) struct AuthenticateLayer(Arc<CallAuthenticator>);

struct CallAuthenticator {
    verifier: CallVerifier,
    metrics: NodeMetrics,
}

impl AuthenticateLayer {
    pub(crate) fn new(verifier: CallVerifier, metrics: NodeMetrics) -> Self {
        Self(Arc::new(CallAuthenticator { verifier, metrics }))
    }
}

impl<S> Layer<S> for AuthenticateLayer {
    type Service = Authenticate<S>;

    fn layer(&self, inner: S) -> Authenticate<S> {
        Authenticate { inner, authenticator: self.0.clone() }
    }
}

#[derive(Clone)]
pub(crate) struct Authenticate<S> {
    inner: S,
    authenticator: Arc<CallAuthenticator>,
}

impl<S> Service<http::Request<Body>> for Authenticate<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Either<S::Future, Ready<Result<S::Response, S::Error>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        match self.authenticator.admit(&mut request) {
            Ok(()) => Either::Left(self.inner.call(request)),
            Err(status) => Either::Right(ready(Ok(status.into_http()))),
        }
    }
}

impl CallAuthenticator {
    fn admit(&self, request: &mut http::Request<Body>) -> Result<(), Status> {
        if request.uri().path().starts_with(HEALTH) {
            return Ok(());
        }
        let mut metadata = MetadataMap::from_headers(std::mem::take(request.headers_mut()));
        // A value that is not base64 counts as an empty token.
        let token = metadata.remove_bin(TOKEN_KEY);
        let token = token.map(|value| value.to_bytes().unwrap_or_default());
        *request.headers_mut() = metadata.into_headers();
        let path = request.uri().path();
        let verified = self.verifier.verify(SystemTime::now(), path, token.as_deref());
        verified.map_err(|error| {
            tracing::debug!(%error, path, "call rejected");
            self.metrics.call_rejected(rejection(&error));
            // The router handles another process behind an address by this code.
            let code = match error {
                InvalidToken::OtherNode { .. } => Code::FailedPrecondition,
                _ => Code::Unauthenticated,
            };
            Status::new(code, error.to_string())
        })?;
        if let Some(slot) = request.extensions().get::<SlotHandle>() {
            keep_authenticated(slot);
        }
        if PROVED.contains(&path)
            && let Some(token) = token
        {
            let proof = Proof(self.verifier.proof(&token));
            request.extensions_mut().insert(proof);
        }
        Ok(())
    }
}

fn rejection(error: &InvalidToken) -> TokenRejection {
    match error {
        InvalidToken::Missing => TokenRejection::Missing,
        InvalidToken::Malformed { .. } => TokenRejection::Malformed,
        InvalidToken::Secret => TokenRejection::Secret,
        InvalidToken::OtherNode { .. } => TokenRejection::OtherNode,
        InvalidToken::Expired { .. } => TokenRejection::Expired,
        InvalidToken::Replayed => TokenRejection::Replayed,
    }
}
