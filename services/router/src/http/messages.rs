//! `POST /v1/messages` and `POST /v1/messages/count_tokens`, as in Anthropic's API.
//!
//! A request becomes a conversation for the chat template ([`conversation`]) and the fields of any
//! other generation ([`request`]). The pieces of its answer become content blocks ([`blocks`]),
//! which are sent whole or as events ([`reply`]).

mod blocks;
mod conversation;
mod error;
mod reply;
mod request;

use std::sync::Arc;

use axum::{
    Json,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, HeaderName, Request};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use telemetry::metrics::Operation;

pub(super) use self::{
    blocks::BlockEvent,
    error::{MessagesError, with_format},
    reply::{MessageBody, MessageEvent},
    request::{MESSAGES_UNSUPPORTED, OWN_FIELDS, read_counted, read_messages},
};
use self::{
    reply::{MessageProgress, MessageStream, WholeMessage},
    request::MessageFields,
};
use super::{
    caller_of,
    error::ApiError,
    fields::RequestFields,
    generate::{GenerationApi, ReplyWriter, StartedReply, answer_request},
    read_body,
    request_fields::named_model,
};
use crate::{
    front::{Front, ServedModel},
    request::{
        error::{FieldError, invalid_value},
        tokenization,
    },
    request_driver::GenerationFields,
};

const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");
/// Versions of the API with the events of this module. The fields that the second version has
/// removed are options of Baton.
const VERSIONS: [&str; 2] = ["2023-06-01", "2026-10-21"];

pub(super) async fn messages(State(front): State<Arc<Front>>, request: Request<Body>) -> Response {
    match check_version(request.headers()) {
        Ok(()) => answer_request(front, request, MessagesApi).await,
        Err(error) => ApiError::from(error).into_response(),
    }
}

#[derive(Serialize, JsonSchema)]
pub(super) struct CountedTokens {
    /// Tokens of system prompt, tools and messages.
    input_tokens: usize,
}

pub(super) async fn count_tokens(
    State(front): State<Arc<Front>>,
    request: Request<Body>,
) -> Response {
    let counted = async {
        let (parts, body) = request.into_parts();
        check_version(&parts.headers)?;
        let caller = caller_of(&parts.extensions);
        let body = read_body(&front, &parts.headers, body, &caller).await?;
        let fields = RequestFields::parse(&body)?;
        let model = named_model(&fields, &front, &caller)?.model;
        let source = read_counted(&fields)?;
        let tokens = tokenization::tokenize(&front, &caller, &model, source).await?;
        Ok(Json(CountedTokens { input_tokens: tokens.len() }))
    };
    counted.await.map_err(|error: ApiError| error).into_response()
}

/// Checks the version that the client speaks.
fn check_version(headers: &HeaderMap) -> Result<(), FieldError> {
    match headers.get(ANTHROPIC_VERSION) {
        Some(version) if !VERSIONS.iter().any(|known| version == known) => {
            let found = String::from_utf8_lossy(version.as_bytes());
            Err(invalid_value(ANTHROPIC_VERSION.as_str(), &found, &VERSIONS.join(" or ")))
        }
        _ => Ok(()),
    }
}

struct MessagesApi;

impl GenerationApi for MessagesApi {
    type ReplyFields = MessageFields;
    type Stream = MessageStream;
    type Whole = WholeMessage;

    fn operation(&self) -> Operation {
        Operation::Chat
    }

    fn read(
        &self,
        fields: &RequestFields<'_>,
        _model: &ServedModel,
    ) -> Result<(GenerationFields, MessageFields), ApiError> {
        Ok(read_messages(fields)?)
    }

    fn writer(
        &self,
        fields: MessageFields,
        started: StartedReply,
    ) -> ReplyWriter<MessageStream, WholeMessage> {
        let progress = MessageProgress::new(fields, started);
        match fields.is_streamed {
            true => ReplyWriter::Stream(MessageStream::new(progress)),
            false => ReplyWriter::Whole(WholeMessage::new(progress)),
        }
    }

    fn refusal(&self, error: ApiError) -> Response {
        error.into_response()
    }
}

/// Returns the members of an object of the field.
fn object<'a>(field: &str, value: &'a Value) -> Result<&'a Map<String, Value>, FieldError> {
    value.as_object().ok_or_else(|| invalid_value(field, &value.to_string(), "an object"))
}
