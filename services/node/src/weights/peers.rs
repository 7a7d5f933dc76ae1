//! Calls to the other nodes of an update. An answer counts only with a proof that the peer knows
//! the cluster secret.

use cluster::Epoch;
use http::Uri;
use hyper_util::rt::TokioIo;
use membership::Tls;
use proto::{
    auth::{CallSigner, ClusterSecret, WEIGHTS_PULL, WEIGHTS_STATUS},
    v1::{self, weights_client::WeightsClient},
};
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Channel, Endpoint},
};
use weight_transfer::{UpdateId, WeightVersion};

/// Another node of the update.
#[derive(Clone, Debug)]
pub(super) struct UpdatePeer {
    pub epoch: Epoch,
    pub grpc: String,
}

/// Authenticates and encrypts calls to peers.
#[derive(Clone)]
pub(crate) struct PeerCredentials {
    pub secret: ClusterSecret,
    /// `None`: the cluster has no certificates.
    pub tls: Option<Tls>,
}

impl PeerCredentials {
    /// Returns the version with which the peer has committed the update, if it has.
    pub(super) async fn committed_by(
        &self,
        peer: &UpdatePeer,
        id: UpdateId,
    ) -> Result<Option<WeightVersion>, String> {
        let node_epoch = peer.epoch.to_bytes().to_vec().into();
        let asked_update_id = id.0.to_be_bytes().to_vec().into();
        let request =
            v1::WeightsStatusRequest { node_epoch, asked_update_id, ..Default::default() };
        let status = self
            .call(peer, WEIGHTS_STATUS, request, async |client, request| {
                client.status(request).await
            })
            .await?;
        let update = status.update.filter(|update| *update.update_id == id.0.to_be_bytes());
        Ok(update.and_then(|update| match update.state() {
            v1::UpdateState::Committed | v1::UpdateState::Installing => {
                Some(WeightVersion(update.weight_version))
            }
            _ => None,
        }))
    }

    /// Asks the peer for its files of weights of this version.
    pub(super) async fn pull(
        &self,
        peer: &UpdatePeer,
        version: WeightVersion,
    ) -> Result<Streaming<v1::WeightsPart>, String> {
        let node_epoch = peer.epoch.to_bytes().to_vec().into();
        let request = v1::PullWeightsRequest { node_epoch, weight_version: version.0 };
        self.call(peer, WEIGHTS_PULL, request, async |client, request| client.pull(request).await)
            .await
    }

    /// Connects to the peer, makes a call of `path`, and checks the proof in the response.
    async fn call<Q, A>(
        &self,
        peer: &UpdatePeer,
        path: &str,
        request: Q,
        call: impl AsyncFnOnce(&mut WeightsClient<Channel>, Request<Q>) -> Result<Response<A>, Status>,
    ) -> Result<A, String> {
        let endpoint = Endpoint::from_shared(peer.grpc.clone());
        let endpoint = endpoint.map_err(|error| error.to_string())?;
        let signer = CallSigner::new(&self.secret).map_err(|error| error.to_string())?;
        let tls = self.tls.clone();
        let connect = move |url: Uri| {
            let tls = tls.clone();
            async move { membership::connect(&url, tls.as_ref()).await.map(TokioIo::new) }
        };
        let channel = endpoint.connect_with_connector(tower::service_fn(connect)).await;
        let channel = channel.map_err(|error| error.to_string())?;
        let mut request = Request::new(request);
        let proof = signer.to(peer.epoch).sign_with_proof(path, request.metadata_mut());
        let response = call(&mut WeightsClient::new(channel), request).await;
        let response = response.map_err(|status| status.message().to_owned())?;
        let proved = proof.check(response.metadata()).map_err(|error| error.to_string())?;
        match proved == peer.epoch {
            true => Ok(response.into_inner()),
            false => {
                Err(format!("the process at the address is {proved}; expected {}", peer.epoch))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use proto::{
        auth::{CallVerifier, PROOF_KEY, TOKEN_KEY},
        v1::weights_server::{Weights, WeightsServer},
    };
    use tokio::net::TcpListener;
    use tonic::transport::Server;

    use super::*;
    use crate::connection;

    const PEER: Epoch = Epoch(7);
    const ID: UpdateId = UpdateId(8);
    const NEW: WeightVersion = WeightVersion(70);
    const SECRET: &str = "the secret of the cluster";

    /// A process that says that it has committed the update, and proves what it can.
    struct Committed(Option<CallVerifier>);

    impl Committed {
        fn prove<T>(&self, metadata: &tonic::metadata::MetadataMap, answer: T) -> Response<T> {
            let token = metadata.get_bin(TOKEN_KEY).unwrap().to_bytes().unwrap();
            let mut response = Response::new(answer);
            if let Some(verifier) = &self.0 {
                response.metadata_mut().insert_bin(PROOF_KEY, verifier.proof(&token));
            }
            response
        }
    }

    #[tonic::async_trait]
    impl Weights for Committed {
        type PullStream = stream::Empty<Result<v1::WeightsPart, Status>>;

        async fn begin(
            &self,
            _: Request<v1::BeginWeightsRequest>,
        ) -> Result<Response<v1::WeightsStatus>, Status> {
            Err(Status::unimplemented("the test begins no update"))
        }

        async fn commit(
            &self,
            _: Request<v1::CommitWeightsRequest>,
        ) -> Result<Response<v1::WeightsStatus>, Status> {
            Err(Status::unimplemented("the test commits no update"))
        }

        async fn abort(
            &self,
            _: Request<v1::AbortWeightsRequest>,
        ) -> Result<Response<v1::WeightsStatus>, Status> {
            Err(Status::unimplemented("the test aborts no update"))
        }

        async fn pause(
            &self,
            _: Request<v1::PauseWeightsRequest>,
        ) -> Result<Response<v1::WeightsStatus>, Status> {
            Err(Status::unimplemented("the test pauses nothing"))
        }

        async fn resume(
            &self,
            _: Request<v1::ResumeWeightsRequest>,
        ) -> Result<Response<v1::WeightsStatus>, Status> {
            Err(Status::unimplemented("the test resumes nothing"))
        }

        async fn status(
            &self,
            request: Request<v1::WeightsStatusRequest>,
        ) -> Result<Response<v1::WeightsStatus>, Status> {
            assert_eq!(*request.get_ref().asked_update_id, ID.0.to_be_bytes());
            let update = Some(v1::UpdateStatus {
                update_id: ID.0.to_be_bytes().to_vec().into(),
                state: v1::UpdateState::Committed.into(),
                weight_version: NEW.0,
                ..Default::default()
            });
            let status = v1::WeightsStatus { update, ..Default::default() };
            Ok(self.prove(request.metadata(), status))
        }

        async fn pull(
            &self,
            request: Request<v1::PullWeightsRequest>,
        ) -> Result<Response<Self::PullStream>, Status> {
            Ok(self.prove(request.metadata(), stream::empty()))
        }
    }

    #[tokio::test]
    async fn peer_without_a_proof_of_the_secret_is_not_believed() {
        let secret = |text: &str| ClusterSecret::new(text).unwrap();
        let verifier = |text, epoch| Some(CallVerifier::new(&secret(text), epoch));
        let credentials = PeerCredentials { secret: secret(SECRET), tls: None };
        for (verifier, expected) in [
            (verifier(SECRET, PEER), Ok(Some(NEW))),
            (None, Err("has not proved")),
            (verifier("the secret of another cluster", PEER), Err("another cluster.secret")),
            (verifier(SECRET, Epoch(9)), Err("expected 0000")),
        ] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let grpc = format!("http://{}", listener.local_addr().unwrap());
            let server = Server::builder().add_service(WeightsServer::new(Committed(verifier)));
            let incoming = connection::incoming(listener, None);
            let serving = tokio::spawn(server.serve_with_incoming(incoming));
            let peer = UpdatePeer { epoch: PEER, grpc };
            let outcome = credentials.committed_by(&peer, ID).await;
            let pulled = credentials.pull(&peer, NEW).await.map(drop);
            match expected {
                Ok(version) => {
                    assert_eq!(outcome, Ok(version));
                    assert_eq!(pulled, Ok(()));
                }
                Err(words) => {
                    for error in [outcome.unwrap_err(), pulled.unwrap_err()] {
                        assert!(error.contains(words), "{error}");
                    }
                }
            }
            serving.abort();
        }
    }
}
