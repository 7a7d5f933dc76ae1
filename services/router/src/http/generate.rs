//! `POST /v1/chat/completions` and `POST /v1/completions`: read, start, reply.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use axum::{
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, Request};
use serde_json::{Map, Value};
use telemetry::metrics::Operation;
use tracing::Instrument;

use super::{
    choices::{Api, TokenView},
    common_fields::{self, Delivery},
    error::ApiError,
    fields::Fields,
    prompt_field::{Prompt, prompts},
    reply::Reply,
    request_context::{RequestContext, X_REQUEST_ID, read_body},
};
use crate::{
    front::Front,
    journey::{self, Asked},
    record::RequestRecord,
    request::{
        field_error::{FieldError, refused},
        ids::RequestId,
        options::{COMPLETION_TOKENS_DEFAULT, DefaultLength, LOGPROBS, TOKENS},
        text_workers::{ChatSource, PromptSource},
    },
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
    let answered =
        answer(&front, &context, &parts.headers, body, api).instrument(context.span.clone()).await;
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

/// The request's path through this file: body, fields, journey, reply.
async fn answer(
    front: &Arc<Front>,
    context: &RequestContext,
    headers: &HeaderMap,
    body: Body,
    api: Api,
) -> Result<Response, ApiError> {
    let record = RequestRecord::new(
        &front.metrics,
        operation(api),
        context.request_id,
        context.label.clone(),
    );
    let timeout = front.settings.timeout;
    let read = async {
        let body = read_body(headers, body, front.settings.body_bytes_max).await?;
        let fields = Fields::parse(&body)?;
        let (asked, delivery) = match api {
            Api::Chat => chat_fields(&fields, context.request_id, timeout)?,
            Api::Text => completion_fields(&fields, context.request_id, timeout)?,
        };
        Ok((asked, delivery))
    };
    let (asked, delivery) = match read.await {
        Ok(read) => read,
        Err(error) => {
            let error: ApiError = error;
            record.refused(&error.content.message);
            return Err(error);
        }
    };
    let reply = reply(front, context, api, &asked, delivery);
    let started = journey::start(front, asked, record, context.span.clone()).await?;
    Ok(match delivery.stream {
        true => reply.stream(started).await?,
        false => reply.whole(started).await?,
    })
}

fn reply(
    front: &Front,
    context: &RequestContext,
    api: Api,
    asked: &Asked,
    delivery: Delivery,
) -> Reply {
    let prefix = match api {
        Api::Chat => "chatcmpl",
        Api::Text => "cmpl",
    };
    let fingerprint = front.nodes.serving().model_fingerprint;
    Reply {
        id: format!("{prefix}-{}", context.request_id),
        created: SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs()),
        model: front.settings.model.clone(),
        system_fingerprint: format!("fp_{:010x}", fingerprint >> 88),
        view: TokenView {
            tokenizer: front.text.tokenizer().clone(),
            api,
            logprobs: asked.options.logprobs,
            token_ids: delivery.token_ids,
        },
        delivery,
        wants_figures: context.wants_figures,
        choices_per_prompt: asked.choices,
        keep_alive: front.settings.keep_alive,
    }
}

fn chat_fields(
    fields: &Fields<'_>,
    request_id: RequestId,
    timeout: Duration,
) -> Result<(Asked, Delivery), FieldError> {
    common_fields::check_unsupported(fields)?;
    for (name, neutral) in
        [("functions", &["[]"][..]), ("audio", &[]), ("chat_template", &[]), ("documents", &["[]"])]
    {
        fields.unsupported(name, neutral)?;
    }
    // What tools are there is of no use to a model that may not call them.
    if fields.raw("tool_choice") != Some("\"none\"") {
        fields.unsupported("tools", &["[]"])?;
    }
    fields.unsupported("modalities", &["[\"text\"]"])?;

    let mut options = common_fields::options(fields)?;
    let max_tokens = fields.count("max_tokens", TOKENS)?;
    let max_completion_tokens = fields.count("max_completion_tokens", TOKENS)?;
    options.max_tokens = max_completion_tokens.or(max_tokens);
    let max_tokens_name = match max_completion_tokens {
        Some(_) => "max_completion_tokens",
        None => "max_tokens",
    };
    let wants_logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    let top_logprobs = fields.count("top_logprobs", LOGPROBS)?;
    if let Some(count @ 1..) = top_logprobs.filter(|_| !wants_logprobs) {
        let problem = format!("is {count}; allowed: only with logprobs true");
        return Err(FieldError::new("top_logprobs", problem));
    }
    options.logprobs = wants_logprobs.then(|| top_logprobs.unwrap_or(0));

    let asked = Asked {
        request_id,
        model: common_fields::model(fields)?,
        prompts: vec![PromptSource::Chat(chat_source(fields)?)],
        choices: common_fields::choices(fields)?,
        options,
        default_length: DefaultLength::Rest,
        max_tokens_name,
        timeout,
        with_text: true,
    };
    Ok((asked, common_fields::delivery(fields)?))
}

fn chat_source(fields: &Fields<'_>) -> Result<ChatSource, FieldError> {
    let allowed = "a list of messages, each with role and content";
    let Some(text) = fields.raw("messages") else {
        return Err(FieldError::new("messages", format!("is missing; allowed: {allowed}")));
    };
    let messages: Value =
        serde_json::from_str(text).map_err(|_| refused("messages", text, allowed))?;
    match messages.as_array() {
        Some(messages) if !messages.is_empty() => {}
        Some(_) => return Err(FieldError::new("messages", "is empty; allowed: at least one")),
        None => return Err(refused("messages", text, allowed)),
    }
    let continue_final_message = fields.boolean("continue_final_message")?.unwrap_or(false);
    let add_generation_prompt = fields.boolean("add_generation_prompt")?;
    if continue_final_message && add_generation_prompt == Some(true) {
        return Err(FieldError::new(
            "continue_final_message",
            "is true; allowed: only with add_generation_prompt false or left out",
        ));
    }
    fields.unsupported("add_special_tokens", &["false"])?;
    Ok(ChatSource {
        messages,
        add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
        template_kwargs: template_kwargs(fields)?,
        bytes: text.len() + fields.raw("chat_template_kwargs").map_or(0, str::len),
    })
}

/// Variables that the template has from the router or the model. Another value would make a prompt
/// of something else than was checked.
const TEMPLATE_VARIABLES_RESERVED: [&str; 15] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "strftime_now",
    "raise_exception",
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
];

fn template_kwargs(fields: &Fields<'_>) -> Result<Map<String, Value>, FieldError> {
    const NAME: &str = "chat_template_kwargs";
    let variables: Map<String, Value> =
        fields.value(NAME, "an object of template variables")?.unwrap_or_default();
    match TEMPLATE_VARIABLES_RESERVED.iter().find(|&&name| variables.contains_key(name)) {
        Some(name) => Err(FieldError::new(
            format!("{NAME}.{name}"),
            "is set by the router; allowed: only the template's own variables",
        )),
        None => Ok(variables),
    }
}

fn completion_fields(
    fields: &Fields<'_>,
    request_id: RequestId,
    timeout: Duration,
) -> Result<(Asked, Delivery), FieldError> {
    common_fields::check_unsupported(fields)?;
    fields.unsupported("suffix", &["\"\""])?;
    let add_special_tokens = fields.boolean("add_special_tokens")?.unwrap_or(true);
    let prompts = prompts(fields)?;
    let source = |prompt| match prompt {
        Prompt::Tokens(tokens) => PromptSource::Tokens(tokens),
        Prompt::Text(text) => PromptSource::Text { text, add_special_tokens },
    };
    let mut options = common_fields::options(fields)?;
    options.max_tokens = fields.count("max_tokens", TOKENS)?;
    options.logprobs = fields.count("logprobs", LOGPROBS)?;
    let asked = Asked {
        request_id,
        model: common_fields::model(fields)?,
        prompts: prompts.into_iter().map(source).collect(),
        choices: common_fields::choices(fields)?,
        options,
        default_length: DefaultLength::Tokens(COMPLETION_TOKENS_DEFAULT),
        max_tokens_name: "max_tokens",
        timeout,
        with_text: true,
    };
    Ok((asked, common_fields::delivery(fields)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chats_template_variables_count_as_its_bytes() {
        let long = "x".repeat(5000);
        let messages = r#"[{"role":"user","content":"hi"}]"#;
        let body =
            format!(r#"{{"messages":{messages},"chat_template_kwargs":{{"system":"{long}"}}}}"#);
        let chat = chat_source(&Fields::parse(body.as_bytes()).unwrap()).unwrap();
        assert_eq!(chat.bytes, messages.len() + r#"{"system":""}"#.len() + 5000);
    }
}
