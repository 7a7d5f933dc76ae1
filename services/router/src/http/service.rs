//! Routes of the HTTP API, and the handlers of small endpoints.

use std::sync::Arc;

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, Request, State},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{self, MethodRouter},
};
use bytes::Bytes;
use http::{HeaderValue, Method, StatusCode, Uri, header};
use proto::ids::RequestId;
use schemars::JsonSchema;
use serde::Serialize;
use telemetry::Metrics;

use super::{
    error::ApiError,
    generate::{chat_completions, completions},
    openapi,
    request_context::{X_REQUEST_ID, echo, label_of},
    tokenize::{detokenize, tokenize},
    wire::{ModelCard, ModelList},
};
use crate::{front::Front, models::NamedModel, nodes::Serving};

/// Returns all HTTP routes. `started` is the start of the process in seconds since 1970.
pub fn routes(front: Arc<Front>, metrics: Metrics, started: u64) -> Router {
    let mut router = Router::new();
    for Route { path, method, handler } in table(metrics, started) {
        router = router.route(path, only(method, handler));
    }
    router
        .fallback(async |uri: Uri| no_such_path(&uri))
        .layer(middleware::from_fn(with_request_id))
        .with_state(front)
}

/// A route: path, method and handler.
struct Route {
    path: &'static str,
    method: &'static str,
    handler: MethodRouter<Arc<Front>>,
}

fn table(metrics: Metrics, started: u64) -> Vec<Route> {
    let description: Bytes = openapi::document().to_string().into();
    let openapi = async move || ([(header::CONTENT_TYPE, "application/json")], description.clone());
    let get = |path, handler| Route { path, method: "GET", handler };
    let post = |path, handler| Route { path, method: "POST", handler };
    vec![
        post("/v1/chat/completions", routing::post(chat_completions)),
        post("/v1/completions", routing::post(completions)),
        post("/tokenize", routing::post(tokenize)),
        post("/detokenize", routing::post(detokenize)),
        get("/v1/models", routing::get(move |state| models(state, started))),
        // A model name may contain slashes.
        get("/v1/models/{*id}", routing::get(move |state, id| model(state, id, started))),
        get("/health", routing::get(health)),
        get("/live", routing::get(async || "live\n")),
        get("/metrics", routing::get(async move || render(&metrics))),
        get("/openapi.json", routing::get(openapi)),
    ]
}

/// Adds `x-request-id` to responses that lack it. API handlers set the header themselves.
async fn with_request_id(request: Request, next: Next) -> Response {
    let label = label_of(request.headers());
    let mut response = next.run(request).await;
    if !response.headers().contains_key(X_REQUEST_ID)
        && let Ok(request_id) = RequestId::mint()
    {
        response.headers_mut().insert(X_REQUEST_ID, echo(label.as_deref(), request_id));
    }
    response
}

fn only(allowed: &'static str, route: MethodRouter<Arc<Front>>) -> MethodRouter<Arc<Front>> {
    route.fallback(async move |method: Method| {
        let message = format!("{method} is not allowed here; allowed: {allowed}");
        let (status, code) = (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed");
        let mut response = ApiError::invalid(status, code, message).into_response();
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
        response
    })
}

fn no_such_path(uri: &Uri) -> ApiError {
    let path: String = uri.path().chars().take(200).collect();
    let message = format!("there is nothing at {path}");
    ApiError::invalid(StatusCode::NOT_FOUND, "not_found", message)
}

async fn models(State(front): State<Arc<Front>>, started: u64) -> Response {
    let data = front.models.names().map(|named| card(&front, named, started)).collect();
    Json(ModelList { object: "list", data }).into_response()
}

async fn model(State(front): State<Arc<Front>>, Path(id): Path<String>, started: u64) -> Response {
    match front.models.find(Some(&id)) {
        Ok(named) => Json(card(&front, named, started)).into_response(),
        Err(error) => ApiError::from(error).into_response(),
    }
}

fn card(front: &Front, named: NamedModel, started: u64) -> ModelCard {
    let limits = front.nodes.serving(&named.model.name).limits;
    ModelCard {
        id: named.name.to_string(),
        object: "model",
        created: started,
        owned_by: "baton",
        root: named.model.name.to_string(),
        max_model_len: limits.map(|limits| limits.sequence_tokens_max),
    }
}

/// Readiness of the router and its nodes.
#[derive(Serialize, JsonSchema)]
pub struct Health<'a> {
    #[schemars(extend("enum" = ["ready", "no decode node", "nodes meet", "stopping"]))]
    status: &'static str,
    /// At least one model has no prefill node or no decode node.
    degraded: bool,
    /// Name of the default model.
    model: &'a str,
    models: Vec<ModelHealth<'a>>,
    /// Number of prefill nodes of all models.
    prefill_nodes: usize,
    decode_nodes: usize,
    requests_in_work: u32,
    /// Nodes that compute on the CPU although their host has a GPU; absent when there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cpu_fallbacks: Vec<CpuFallback>,
}

#[derive(Serialize, JsonSchema)]
struct CpuFallback {
    node: String,
    reason: String,
}

#[derive(Serialize, JsonSchema)]
struct ModelHealth<'a> {
    name: &'a str,
    prefill_nodes: usize,
    decode_nodes: usize,
}

async fn health(State(front): State<Arc<Front>>) -> Response {
    let models: Vec<ModelHealth<'_>> = front
        .models
        .all()
        .iter()
        .map(|model| {
            let Serving { prefill_nodes, decode_nodes, .. } = front.nodes.serving(&model.name);
            ModelHealth { name: &model.name, prefill_nodes, decode_nodes }
        })
        .collect();
    let decode_nodes = models.iter().map(|model| model.decode_nodes).sum();
    let (code, status) = match (front.is_stopping(), decode_nodes) {
        (true, _) => (StatusCode::SERVICE_UNAVAILABLE, "stopping"),
        (false, 0) => (StatusCode::SERVICE_UNAVAILABLE, "no decode node"),
        (false, _) if !front.nodes.are_connected() => {
            (StatusCode::SERVICE_UNAVAILABLE, "nodes meet")
        }
        (false, _) => (StatusCode::OK, "ready"),
    };
    let health = Health {
        status,
        degraded: models.iter().any(|model| model.prefill_nodes == 0 || model.decode_nodes == 0),
        model: &front.models.default_model().name,
        prefill_nodes: models.iter().map(|model| model.prefill_nodes).sum(),
        decode_nodes,
        models,
        requests_in_work: front.admission.in_flight(),
        cpu_fallbacks: front
            .nodes
            .cpu_fallbacks()
            .into_iter()
            .map(|(node, reason)| CpuFallback { node, reason })
            .collect(),
    };
    (code, Json(health)).into_response()
}

fn render(metrics: &Metrics) -> Response<Body> {
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], metrics.render_prometheus()).into_response()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;
    use telemetry::{Resource, Telemetry, TelemetryConfig};

    use super::*;
    use crate::http::{chat_fields, completion_fields, fields::Fields, tokenize::prompt_source};

    #[tokio::test]
    async fn the_description_has_every_route_and_no_other() {
        let resource = Resource { service: "baton-router".into(), instance: "test".into() };
        let config = TelemetryConfig::from(&config::Telemetry::default());
        let telemetry = Telemetry::start(&config, resource).unwrap();
        let served: BTreeSet<(String, String)> = table(telemetry.metrics(), 0)
            .into_iter()
            .map(|route| (route.path.replace("{*", "{"), route.method.to_lowercase()))
            .collect();
        let document = openapi::document();
        let described =
            document["paths"].as_object().unwrap().iter().flat_map(|(path, methods)| {
                methods.as_object().unwrap().keys().map(|method| (path.clone(), method.clone()))
            });
        assert_eq!(described.collect::<BTreeSet<_>>(), served);
    }

    /// Asserts that the handler reads exactly the fields of the schema.
    fn is_described(schema: &str, bodies: &[&str], read: impl Fn(&Fields<'_>)) {
        let mut asked = BTreeSet::from(["model".to_owned()]);
        for body in bodies {
            let fields = Fields::parse(body.as_bytes()).unwrap();
            read(&fields);
            asked.extend(std::mem::take(&mut *fields.asked.lock().unwrap()));
        }
        let document = openapi::document();
        let described = &document["components"]["schemas"][schema]["properties"];
        let described: BTreeSet<String> = described.as_object().unwrap().keys().cloned().collect();
        assert_eq!(described, asked, "{schema}");
    }

    #[test]
    fn the_description_has_every_field_that_is_read_and_no_other() {
        let chat = r#"{"messages": [{"role": "user", "content": "hi"}]}"#;
        is_described("ChatCompletionRequest", &[chat], |fields| {
            chat_fields::read(fields).unwrap();
        });
        is_described("CompletionRequest", &[r#"{"prompt": "hi"}"#], |fields| {
            completion_fields::read(fields).unwrap();
        });
        is_described("TokenizeRequest", &[chat, r#"{"prompt": "hi"}"#], |fields| {
            prompt_source(fields).unwrap();
            fields.boolean("return_token_strs").unwrap();
        });
    }

    /// Asserts that every reference names a schema and every schema is referenced.
    #[test]
    fn the_descriptions_references_are_whole() {
        fn references(value: &Value, found: &mut BTreeSet<String>) {
            match value {
                Value::Object(object) => {
                    if let Some(Value::String(name)) = object.get("$ref") {
                        let name = name.strip_prefix("#/components/schemas/").unwrap();
                        found.insert(name.to_owned());
                    }
                    object.values().for_each(|value| references(value, found));
                }
                Value::Array(list) => list.iter().for_each(|value| references(value, found)),
                _ => {}
            }
        }
        let document = openapi::document();
        let mut found = BTreeSet::new();
        references(&document, &mut found);
        let schemas = document["components"]["schemas"].as_object().unwrap();
        assert_eq!(schemas.keys().cloned().collect::<BTreeSet<_>>(), found);
    }
}
