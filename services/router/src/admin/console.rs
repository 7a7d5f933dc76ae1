//! The console: a web page for operators over the routes of `router.admin`. The page loads nothing
//! from other hosts and has no inline code, so that the browser can refuse both.

use axum::{Router, response::IntoResponse, routing::get};
use http::header;

/// Lets the browser load only the files below, run only their code, and call only this port.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
    img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
    require-trusted-types-for 'script'; trusted-types 'none'";

/// Path, media type and text of each file.
const FILES: [(&str, &str, &str); 4] = [
    ("/", "text/html; charset=utf-8", include_str!("console/console.html")),
    ("/console.css", "text/css; charset=utf-8", include_str!("console/console.css")),
    ("/console.js", "text/javascript; charset=utf-8", include_str!("console/console.js")),
    ("/console.svg", "image/svg+xml", include_str!("console/console.svg")),
];

pub(super) fn routes() -> Router {
    FILES.into_iter().fold(Router::new(), |routes, (path, media_type, text)| {
        let headers = [
            (header::CONTENT_TYPE, media_type),
            (header::CONTENT_SECURITY_POLICY, POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            // A new release of the router brings a new page.
            (header::CACHE_CONTROL, "no-cache"),
        ];
        routes.route(path, get(async move || (headers, text).into_response()))
    })
}
