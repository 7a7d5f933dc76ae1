//! Web pages as clients (CORS): which pages of another origin a browser lets read the responses.
//!
//! `router.cors_origins` lists the origins. Without it, a page needs an API key like every client.
//! On a router without keys any page could use the models of its visitor's machine, so there only
//! pages that this machine serves are allowed.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use config::Origin;
use http::{HeaderValue, Method, StatusCode, Uri, header};

/// Time in seconds for which a browser remembers the response to a preflight request.
const PREFLIGHT_MAX_AGE_S: u32 = 600;

/// Origins whose pages may read responses.
#[derive(Clone)]
pub(super) enum AllowedOrigins {
    Any,
    Loopback,
    Listed(Arc<[Origin]>),
}

impl AllowedOrigins {
    /// Returns the origins of the setting. `needs_keys`: whether clients need API keys.
    pub(super) fn new(origins: &[Origin], needs_keys: bool) -> Self {
        match origins {
            [] if needs_keys => Self::Any,
            [] => Self::Loopback,
            listed if listed.iter().any(Origin::is_any) => Self::Any,
            listed => Self::Listed(listed.into()),
        }
    }

    fn contain(&self, origin: &HeaderValue) -> bool {
        match self {
            Self::Any => true,
            Self::Loopback => is_loopback(origin),
            Self::Listed(listed) => {
                listed.iter().any(|it| it.as_str().as_bytes() == origin.as_bytes())
            }
        }
    }
}

/// Answers preflight requests of allowed origins, and allows these origins to read the responses.
pub(super) async fn allow_pages(
    State(origins): State<AllowedOrigins>,
    request: Request,
    next: Next,
) -> Response {
    let headers = request.headers();
    let origin = headers.get(header::ORIGIN).filter(|it| origins.contain(it)).cloned();
    let Some(origin) = origin else { return next.run(request).await };
    let is_preflight = request.method() == Method::OPTIONS
        && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match is_preflight {
        true => {
            let wanted = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
            let mut response = StatusCode::NO_CONTENT.into_response();
            let allow = response.headers_mut();
            let methods = HeaderValue::from_static("GET, POST, DELETE");
            allow.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
            allow.insert(header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_MAX_AGE_S.into());
            allow.extend(wanted.map(|wanted| (header::ACCESS_CONTROL_ALLOW_HEADERS, wanted)));
            response
        }
        false => next.run(request).await,
    };
    let allow = response.headers_mut();
    allow.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    allow.append(header::VARY, HeaderValue::from_static("origin"));
    let exposed = HeaderValue::from_static("retry-after, x-request-id, request-id, x-baton-stream");
    allow.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
    response
}

/// Returns whether the origin is this machine.
fn is_loopback(origin: &HeaderValue) -> bool {
    let uri = origin.to_str().ok().and_then(|origin| origin.parse::<Uri>().ok());
    let host = uri.as_ref().and_then(Uri::host);
    host.is_some_and(|host| ["localhost", "127.0.0.1", "[::1]"].contains(&host))
}
