//! `/v1/responses`: creates responses, and serves, cancels and deletes the stored ones.
//!
//! A response is stored for its owner: an API key or cache group, with its tenant. To others its id
//! is unknown, as are the ids of other routers.

mod items;
pub(in crate::http) mod object;
mod reply;
mod request;

use std::{collections::HashMap, sync::Arc, time::Instant};

use axum::{
    Json,
    body::Body,
    extract::{Query, State},
    response::{IntoResponse, Response},
};
use http::{Extensions, HeaderMap, HeaderValue, Request, StatusCode};
use proto::ids::RequestId;
use serde::Serialize;
use serde_json::{
    Value, json,
    value::{RawValue, to_raw_value},
};
use telemetry::metrics::Operation;

use super::{
    PathParameter, caller_of,
    choices::{Api, TokenView},
    error::ApiError,
    fields::RequestFields,
    generate::{GenerationApi, ReplyWriter, StartedReply, TokenTotals, answer_request},
    streams::continue_stream,
};
use crate::{
    front::{Front, ServedModel},
    request::{
        error::{FieldError, RequestError, invalid_value},
        options::{DefaultLength, TENANT_HEADER},
        text_workers::{ChatSource, PromptSource},
    },
    request_driver::GenerationFields,
    response_store::StoredResponse,
};
use items::{Transcript, input_items};
use object::{DeletedResponse, InputItems, RequestEcho, ResponseObject, ResponseStatus};
use reply::{ReplyContext, ResponseBuilder, ResponseEvents, WholeResponse};
use request::ResponseRequest;
pub(super) use request::{OWN_FIELDS, RESPONSES_UNSUPPORTED};

const PREVIOUS: &str = "previous_response_id";
const ID_PREFIX: &str = "resp_";
/// Input items of a page, by default and at most.
const ITEMS_DEFAULT: usize = 20;
const ITEMS_MAX: usize = 100;
/// Maximum characters of an unknown id in an error message.
const ID_CHARS_MAX: usize = 100;

pub(super) async fn create(State(front): State<Arc<Front>>, request: Request<Body>) -> Response {
    let owner = owner(request.headers(), request.extensions());
    let api = ResponsesApi { front: front.clone(), owner };
    answer_request(front, request, api).await
}

pub(super) async fn retrieve(
    State(front): State<Arc<Front>>,
    PathParameter(id): PathParameter,
    Query(query): Query<HashMap<String, String>>,
    (extensions, headers): (Extensions, HeaderMap),
) -> Result<Response, ApiError> {
    // The numbers of the events are their sequence numbers.
    let from = match query.get("starting_after") {
        None => 0,
        Some(text) => {
            let number = text.parse::<u64>().ok().and_then(|last| last.checked_add(1));
            let allowed = "the sequence_number of an event";
            number.ok_or_else(|| invalid_value("starting_after", text, allowed))?
        }
    };
    match query.get("stream").map(String::as_str) {
        None | Some("false") => {}
        Some("true") => {
            let stream = id.strip_prefix(ID_PREFIX).unwrap_or(&id);
            return continue_stream(&front, &owner(&headers, &extensions)?, stream, from);
        }
        Some(other) => return Err(invalid_value("stream", other, "true or false").into()),
    }
    Ok(Json(find(&front, &headers, &extensions, &id)?.object).into_response())
}

pub(super) async fn delete(
    State(front): State<Arc<Front>>,
    PathParameter(id): PathParameter,
    (extensions, headers): (Extensions, HeaderMap),
) -> Result<Response, ApiError> {
    let found = find(&front, &headers, &extensions, &id)?;
    front.responses.lock().remove(&id);
    // A response in progress cannot be stored any more, so nothing else can end it.
    if let Some(running) = found.running {
        running.abort();
    }
    Ok(Json(DeletedResponse { id, object: "response.deleted", deleted: true }).into_response())
}

/// Ends the generation of a response, and returns the response as far as it is stored.
pub(super) async fn cancel(
    State(front): State<Arc<Front>>,
    PathParameter(id): PathParameter,
    (extensions, headers): (Extensions, HeaderMap),
) -> Result<Response, ApiError> {
    let found = find(&front, &headers, &extensions, &id)?;
    let mut object: Value = serde_json::from_str(found.object.get()).unwrap_or_default();
    object["status"] = json!(ResponseStatus::Cancelled);
    let cancelled = StoredResponse { object: raw(&object), running: None, ..found };
    if !front.responses.lock().end(Instant::now(), &id, cancelled) {
        let message = format!("the response {id} has ended; allowed: a response in progress");
        return Err(ApiError::invalid(StatusCode::BAD_REQUEST, "invalid_value", message));
    }
    if let Some(running) = found.running {
        running.abort();
    }
    Ok(Json(object).into_response())
}

pub(super) async fn input_items_page(
    State(front): State<Arc<Front>>,
    PathParameter(id): PathParameter,
    Query(query): Query<HashMap<String, String>>,
    (extensions, headers): (Extensions, HeaderMap),
) -> Result<Response, ApiError> {
    let found = find(&front, &headers, &extensions, &id)?;
    let limit = match query.get("limit") {
        None => ITEMS_DEFAULT,
        Some(text) => {
            let count = text.parse().ok().filter(|count| (1..=ITEMS_MAX).contains(count));
            let allowed = format!("a whole number from 1 to {ITEMS_MAX}");
            count.ok_or_else(|| invalid_value("limit", text, &allowed))?
        }
    };
    let mut items: Vec<Value> = serde_json::from_str(found.input.get()).unwrap_or_default();
    match query.get("order").map(String::as_str) {
        None | Some("desc") => items.reverse(),
        Some("asc") => {}
        Some(other) => return Err(invalid_value("order", other, "asc or desc").into()),
    }
    if let Some(after) = query.get("after") {
        let position = items.iter().position(|item| item["id"] == after.as_str());
        let last = position.ok_or_else(|| {
            invalid_value("after", after, "the id of an input item of this response")
        })?;
        items.drain(..=last);
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    let id_of = |item: Option<&Value>| item?["id"].as_str().map(str::to_owned);
    let (first_id, last_id) = (id_of(items.first()), id_of(items.last()));
    let page = InputItems { object: "list", data: items, first_id, last_id, has_more };
    Ok(Json(page).into_response())
}

/// Parses and checks the fields of a body, as far as they concern one field alone.
pub(super) fn read_fields(fields: &RequestFields<'_>) -> Result<(), FieldError> {
    let ResponseRequest { input, .. } = ResponseRequest::read(fields)?;
    let mut transcript = Transcript::new(None);
    for item in input_items(input, "")? {
        transcript.push(&item, "input")?;
    }
    Ok(())
}

/// Returns the owner of the responses that a request creates and may read.
pub(super) fn owner(headers: &HeaderMap, extensions: &Extensions) -> Result<Arc<str>, FieldError> {
    let caller = caller_of(extensions);
    let tenant = caller.tenant(headers.get(TENANT_HEADER).map(HeaderValue::as_bytes))?;
    Ok(caller.owner(tenant.as_ref()))
}

/// Returns a stored response of the caller.
fn find(
    front: &Front,
    headers: &HeaderMap,
    extensions: &Extensions,
    id: &str,
) -> Result<StoredResponse, ApiError> {
    let owner = owner(headers, extensions)?;
    let found = front.responses.lock().get(Instant::now(), &owner, id).cloned();
    found.ok_or_else(|| unknown(front, id, None))
}

fn unknown(front: &Front, id: &str, field: Option<&str>) -> ApiError {
    let id: String = id.chars().take(ID_CHARS_MAX).collect();
    let age_s = front.settings.router.responses_age_max.as_secs();
    let message = format!(
        "unknown response: {id}; allowed: an id of this router, of the same API key and tenant, stored in the last \
         {age_s} s"
    );
    let mut error = ApiError::invalid(StatusCode::NOT_FOUND, "not_found", message);
    error.content.param = field.map(str::to_owned);
    error
}

/// Converts a value whose keys are strings.
fn raw(value: &impl Serialize) -> Arc<RawValue> {
    to_raw_value(value).expect("these types have string keys").into()
}

/// The API of new responses.
struct ResponsesApi {
    front: Arc<Front>,
    /// Owner of the new response. An invalid header is reported with the other errors of the
    /// request.
    owner: Result<Arc<str>, FieldError>,
}

/// Fields of a body that decide how the reply is written and stored.
struct ResponseReplyFields {
    is_streamed: bool,
    encrypts: bool,
    logprobs: Option<u32>,
    skip_special: bool,
    echo: RequestEcho,
    owner: Arc<str>,
    /// Items of the whole input.
    input: Arc<RawValue>,
}

impl ResponsesApi {
    /// Returns the input and output items of the response that the request continues.
    fn earlier_items(&self, owner: &str, id: &str) -> Result<Vec<Value>, ApiError> {
        let store = self.front.responses.lock();
        let found = store.get(Instant::now(), owner, id).cloned();
        drop(store);
        let found = found.ok_or_else(|| unknown(&self.front, id, Some(PREVIOUS)))?;
        if found.running.is_some() {
            let problem = "is a response in progress; allowed: a response that has ended";
            return Err(FieldError::new(PREVIOUS, problem).into());
        }
        let items =
            |items: &RawValue| serde_json::from_str::<Vec<Value>>(items.get()).unwrap_or_default();
        let mut earlier = items(&found.input);
        earlier.extend(items(&found.output));
        Ok(earlier)
    }
}

impl GenerationApi for ResponsesApi {
    type ReplyFields = ResponseReplyFields;
    type Stream = ResponseEvents;
    type Whole = WholeResponse;

    fn operation(&self) -> Operation {
        Operation::Chat
    }

    fn read(
        &self,
        fields: &RequestFields<'_>,
        _model: &ServedModel,
    ) -> Result<(GenerationFields, ResponseReplyFields), ApiError> {
        let request = ResponseRequest::read(fields)?;
        let ResponseRequest { mut echo, options, .. } = request;
        let owner = self.owner.clone()?;
        let mut transcript = Transcript::new(echo.instructions.as_deref());
        let mut items = match &echo.previous_response_id {
            Some(id) => self.earlier_items(&owner, id)?,
            None => Vec::new(),
        };
        for item in &items {
            transcript.push(item, PREVIOUS)?;
        }
        let id = RequestId::mint().map_err(RequestError::from)?;
        let new = input_items(request.input, &id.to_string())?;
        for (index, item) in new.iter().enumerate() {
            transcript.push(item, &format!("input[{index}]"))?;
        }
        items.extend(new);
        let input = raw(&items);
        let bytes_max = self.front.settings.router.body_bytes_max.bytes();
        if input.get().len() as u64 > bytes_max {
            let field = echo.previous_response_id.as_ref().map_or("input", |_| PREVIOUS);
            let problem = format!(
                "gives an input of {} bytes with the earlier turns; allowed: at most {bytes_max}",
                input.get().len()
            );
            return Err(FieldError::new(field, problem).into());
        }
        echo.store &= self.front.responses.lock().is_enabled();
        let shown = ["instructions", "chat_template_kwargs", "tools"].map(|name| fields.raw(name));
        let shown = shown.into_iter().flatten().map(str::len).sum::<usize>();
        let chat = ChatSource {
            field: "input",
            messages: transcript.into_messages(),
            tools: request.tools.as_ref().map_or(Value::Null, |tools| tools.definitions.clone()),
            add_generation_prompt: true,
            continue_final_message: false,
            template_kwargs: request.template_kwargs,
            bytes: input.get().len() + shown,
        };
        let reply = ResponseReplyFields {
            is_streamed: request.is_streamed,
            encrypts: request.encrypts,
            logprobs: options.logprobs,
            skip_special: options.skip_special_tokens.unwrap_or(true),
            echo,
            owner,
            input,
        };
        let parsed = GenerationFields {
            prompt_only: false,
            prompts: vec![PromptSource::Chat(chat)],
            choices: 1,
            options,
            default_length: DefaultLength::Rest,
            max_tokens_name: "max_output_tokens",
            tools: request.tools,
        };
        Ok((parsed, reply))
    }

    fn writer(
        &self,
        fields: ResponseReplyFields,
        started: StartedReply,
    ) -> ReplyWriter<ResponseEvents, WholeResponse> {
        let object = ResponseObject {
            id: format!("{ID_PREFIX}{}", started.request_id),
            object: "response",
            created_at: started.created,
            completed_at: None,
            status: ResponseStatus::InProgress,
            background: false,
            error: None,
            incomplete_details: None,
            model: started.model.name.to_string(),
            output: Vec::new(),
            usage: None,
            baton: None,
            request: fields.echo,
        };
        let stored = KeptResponse {
            front: self.front.clone(),
            owner: fields.owner,
            id: object.id.clone(),
            input: fields.input,
            is_kept: object.request.store,
        };
        if stored.is_kept {
            let response = StoredResponse {
                object: raw(&object),
                input: stored.input.clone(),
                output: raw(&object.output),
                running: Some(started.abort),
            };
            let mut store = stored.front.responses.lock();
            store.insert(Instant::now(), &stored.owner, stored.id.clone(), response);
        }
        let context = ReplyContext {
            id: started.request_id.to_string(),
            view: TokenView {
                echo: false,
                prompt_logprobs: None,
                tokenizer: started.model.model.text.tokenizer().clone(),
                api: Api::Chat,
                logprobs: fields.logprobs,
                token_ids: false,
                weight_versions: false,
                skip_special: fields.skip_special,
            },
            encrypts: fields.encrypts,
            wants_stats: started.wants_stats,
            reader: started.readers.into_iter().next().flatten(),
            totals: TokenTotals::new(&started.prompts, 1),
        };
        let builder = ResponseBuilder::new(object, context);
        match fields.is_streamed {
            true => ReplyWriter::Stream(ResponseEvents { builder, stored, sequence_number: 0 }),
            false => ReplyWriter::Whole(WholeResponse { builder, stored }),
        }
    }

    fn refusal(&self, error: ApiError) -> Response {
        error.into_response()
    }
}

/// A response's place in the store. Dropping it removes a response that has not ended.
struct KeptResponse {
    front: Arc<Front>,
    owner: Arc<str>,
    id: String,
    input: Arc<RawValue>,
    /// Whether the client wants the response to be stored.
    is_kept: bool,
}

impl KeptResponse {
    /// Stores the response at its end, unless it was deleted. A cancelled response stays cancelled,
    /// although its last events were on their way.
    fn keep(&self, object: &ResponseObject) {
        if self.is_kept {
            let (output, input) = (raw(&object.output), self.input.clone());
            let response = StoredResponse { object: raw(object), input, output, running: None };
            let (mut store, now) = (self.front.responses.lock(), Instant::now());
            match object.status {
                ResponseStatus::Cancelled => store.update(now, &self.id, response),
                _ => store.end(now, &self.id, response),
            };
        }
    }
}

impl Drop for KeptResponse {
    fn drop(&mut self) {
        let mut store = self.front.responses.lock();
        let found = store.get(Instant::now(), &self.owner, &self.id);
        if found.is_some_and(|response| response.running.is_some()) {
            store.remove(&self.id);
        }
    }
}
