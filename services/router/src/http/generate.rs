//! `POST /v1/chat/completions` and `POST /v1/completions`: reads the request, starts it, sends the reply.

use std::{sync::Arc, time::SystemTime};

use axum::{
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, Request, StatusCode};
use telemetry::metrics::{Operation, RequestEnd};
use tracing::Instrument;

use super::{
    choices::{Api, TokenView},
    error::ApiError,
    fields::Fields,
    reply::Reply,
    request_context::{RequestContext, X_REQUEST_ID, read_body},
    request_fields::{Delivery, named_model, read_chat, read_completion},
};
use crate::{
    front::Front,
    front::NamedModel,
    record::RequestRecord,
    request_driver::{self, GenerationFields, ParsedRequest},
};

pub async fn chat_completions(State(front): State<Arc<Front>>, request: Request<Body>) -> Response {
    handle(front, request, Api::Chat).await
}

pub async fn completions(State(front): State<Arc<Front>>, request: Request<Body>) -> Response {
    handle(front, request, Api::Text).await
}

async fn handle(front: Arc<Front>, request: Request<Body>, api: Api) -> Response {
    let (parts, body) = request.into_parts();
    let context = match RequestContext::new(&parts.headers, operation(api).as_str()) {
        Ok(context) => context,
        Err(error) => return ApiError::from(error).into_response(),
    };
    let mut record = RequestRecord::new(
        front.models.default_model(),
        operation(api),
        context.request_id,
        context.label.clone(),
        parts.extensions.get().cloned().unwrap_or_default(),
    );
    record.set_span(context.span.clone());
    let answered = answer(&front, &context, &parts.headers, body, api, record)
        .instrument(context.span.clone())
        .await;
    let mut response = answered.unwrap_or_else(IntoResponse::into_response);
    response.headers_mut().insert(X_REQUEST_ID, context.echo());
    response
}

fn operation(api: Api) -> Operation {
    match api {
        Api::Chat => Operation::Chat,
        Api::Text => Operation::TextCompletion,
    }
}

/// Handles a request: reads the body, parses the fields, starts the generation, sends the reply.
async fn answer(
    front: &Arc<Front>,
    context: &RequestContext,
    headers: &HeaderMap,
    body: Body,
    api: Api,
    mut record: RequestRecord,
) -> Result<Response, ApiError> {
    let read = async {
        let body = read_body(front, headers, body).await?;
        let fields = Fields::parse(&body)?;
        let named = named_model(&fields, front)?;
        // The metrics count a rejected request for its model too.
        record.set_model(&named.model);
        let (fields, delivery) = match api {
            Api::Chat => read_chat(&fields)?,
            Api::Text => read_completion(&fields)?,
        };
        let parsed = ParsedRequest {
            request_id: context.request_id,
            tenant: context.tenant.clone()?,
            model: named.model.clone(),
            fields,
            timeout: front.settings.router.timeout,
            with_text: true,
        };
        Ok((parsed, named, delivery))
    };
    let (parsed, named, delivery) = match read.await {
        Ok(read) => read,
        Err(error) => {
            let error: ApiError = error;
            let end = match error.status {
                StatusCode::TOO_MANY_REQUESTS => RequestEnd::Overloaded,
                _ => RequestEnd::Invalid,
            };
            record.rejected(end, &error.content.message);
            return Err(error);
        }
    };
    let reply = reply(front, context, api, &parsed.fields, &named, delivery);
    let running = request_driver::start(front, parsed, record, context.span.clone()).await?;
    Ok(match delivery.stream {
        true => reply.stream(running).await?,
        false => reply.whole(running).await?,
    })
}

fn reply(
    front: &Front,
    context: &RequestContext,
    api: Api,
    fields: &GenerationFields,
    named: &NamedModel,
    delivery: Delivery,
) -> Reply {
    let prefix = match api {
        Api::Chat => "chatcmpl",
        Api::Text => "cmpl",
    };
    let fingerprint = front.nodes.serving(&named.model.name).model_fingerprint;
    Reply {
        id: format!("{prefix}-{}", context.request_id),
        created: SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs()),
        model: named.name.clone(),
        system_fingerprint: format!("fp_{:010x}", fingerprint >> 88),
        view: TokenView {
            tokenizer: named.model.text.tokenizer().clone(),
            api,
            logprobs: fields.options.logprobs,
            token_ids: delivery.token_ids,
        },
        delivery,
        wants_figures: context.wants_figures,
        choices_per_prompt: fields.choices,
        keep_alive: front.settings.keep_alive,
    }
}
