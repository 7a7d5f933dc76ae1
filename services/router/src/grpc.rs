//! The gRPC API: `baton.v1.Inference`, health and reflection.

mod arrived;
mod health;
mod inference;
mod options;
mod prompt;
mod tools;

use std::sync::Arc;

use axum::{
    body::Body,
    extract::State,
    middleware::{self, Next},
    response::Response,
};
use http::Request;
use proto::v1::inference_server::{self, InferenceServer};
use tonic::{Status, metadata::MetadataValue, service::Routes};
use tonic_health::{
    pb::health_server::{self, HealthServer},
    server::HealthService,
};
use tonic_reflection::pb::{v1, v1alpha};
use tower::util::MapRequestLayer;

use crate::{
    front::Front,
    keys::{ApiKeys, Caller},
    request::error::{ErrorStatus, RequestError},
};
use arrived::BoundedBody;
pub(crate) use health::serve_health;
use inference::InferenceService;

/// Returns the routes of every gRPC service of the router. Fails when the compiled-in descriptors
/// are invalid.
pub(crate) fn routes(
    front: Arc<Front>,
    health: HealthServer<HealthService>,
) -> Result<axum::Router, tonic_reflection::server::Error> {
    let body_bytes_max =
        usize::try_from(front.settings.router.body_bytes_max.bytes()).unwrap_or(usize::MAX);
    // The descriptors also have the services of nodes, which the router does not serve.
    let reflection = |own_name| {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name(inference_server::SERVICE_NAME)
            .with_service_name(health_server::SERVICE_NAME)
            .with_service_name(own_name)
    };
    let budget = front.bodies.clone();
    let counted = middleware::from_fn_with_state(front.clone(), arrived::count);
    let keys = front.keys.clone();
    let inference = InferenceServer::new(InferenceService::new(front))
        .max_decoding_message_size(body_bytes_max);
    let routes = Routes::new(inference)
        .add_service(health)
        .add_service(reflection(v1::server_reflection_server::SERVICE_NAME).build_v1()?)
        // The version of reflection that older clients use.
        .add_service(reflection(v1alpha::server_reflection_server::SERVICE_NAME).build_v1alpha()?);
    let bounded = MapRequestLayer::new(move |request: Request<Body>| {
        let caller: Caller = request.extensions().get().cloned().unwrap_or_default();
        let arrived = request.extensions().get().cloned();
        request.map(|body| Body::new(BoundedBody::new(body, &budget, caller, arrived)))
    });
    let routes = routes.prepare().into_axum_router().layer(bounded).layer(counted);
    Ok(match keys {
        // Before the record: clients without a key leave no entry in the history.
        Some(keys) => routes.layer(middleware::from_fn_with_state(keys, authenticate)),
        None => routes,
    })
}

/// Rejects requests without a valid key. A health check needs none, but a watch, which never ends,
/// does.
async fn authenticate(
    State(keys): State<Arc<ApiKeys>>,
    mut request: Request<Body>,
    next: Next,
) -> Response {
    if request.uri().path() == "/grpc.health.v1.Health/Check" {
        return next.run(request).await;
    }
    match keys.authenticate(&mut request) {
        Ok(()) => next.run(request).await,
        Err(error) => status(error).into_http(),
    }
}

/// Converts an error of a request into a gRPC status.
pub(crate) fn status(error: RequestError) -> Status {
    let ErrorStatus { grpc, retry_after_s, .. } = error.status();
    let mut status = Status::new(grpc, error.to_string());
    if let Some(seconds) = retry_after_s {
        status.metadata_mut().insert("retry-after", MetadataValue::from(seconds));
    }
    status
}
