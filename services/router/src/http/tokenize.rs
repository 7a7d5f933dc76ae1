//! `POST /tokenize` and `POST /detokenize`, as in vLLM.

use std::sync::Arc;

use axum::{
    Json,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use http::Request;

use super::{
    caller_of,
    error::ApiError,
    fields::RequestFields,
    grammar_fields, read_body,
    request_fields::{chat_source, named_model},
    wire::{Detokenized, Tokenized},
};
use crate::{
    front::Front,
    request::{error::FieldError, text_workers::PromptSource, tokenization},
};

pub(super) async fn tokenize(State(front): State<Arc<Front>>, request: Request<Body>) -> Response {
    let tokenized = async {
        let (parts, body) = request.into_parts();
        let caller = caller_of(&parts.extensions);
        let body = read_body(&front, &parts.headers, body, &caller).await?;
        let fields = RequestFields::parse(&body)?;
        let model = named_model(&fields, &front, &caller)?.model;
        let source = prompt_source(&fields)?;
        let with_strings = fields.boolean("return_token_strs")?.unwrap_or(false);
        let tokens = tokenization::tokenize(&front, &caller, &model, source).await?;
        let tokenizer = model.text.tokenizer();
        let string = |id: &u32| tokenizer.token_string(*id).unwrap_or_default().to_owned();
        Ok(Json(Tokenized {
            count: tokens.len(),
            max_model_len: front.nodes.serving(&model.name).limits.map(|l| l.sequence_tokens_max),
            token_strs: with_strings.then(|| tokens.iter().map(string).collect()),
            tokens,
        }))
    };
    tokenized.await.map_err(|error: ApiError| error).into_response()
}

pub(super) async fn detokenize(
    State(front): State<Arc<Front>>,
    request: Request<Body>,
) -> Response {
    let detokenized = async {
        let (parts, body) = request.into_parts();
        let caller = caller_of(&parts.extensions);
        let body = read_body(&front, &parts.headers, body, &caller).await?;
        let fields = RequestFields::parse(&body)?;
        let model = named_model(&fields, &front, &caller)?.model;
        let tokens: Option<Vec<u32>> = fields.value("tokens", "a list of token ids")?;
        let tokens = tokens
            .ok_or_else(|| FieldError::new("tokens", "is missing; allowed: a list of token ids"))?;
        let prompt = tokenization::detokenize(&front, &caller, &model, "tokens", tokens).await?;
        Ok(Json(Detokenized { prompt }))
    };
    detokenized.await.map_err(|error: ApiError| error).into_response()
}

/// Reads a text, or a conversation that the chat template renders first.
pub(super) fn prompt_source(fields: &RequestFields<'_>) -> Result<PromptSource, FieldError> {
    let Some(text) = fields.string("prompt")? else {
        if fields.raw("messages").is_none() {
            let problem = "is missing; allowed: a text, or messages in its place";
            return Err(FieldError::new("prompt", problem));
        }
        let tools = grammar_fields::tools(fields)?;
        return chat_source(fields, tools.as_ref()).map(PromptSource::Chat);
    };
    if fields.raw("messages").is_some() {
        return Err(FieldError::new(
            "prompt",
            "is set together with messages; expected one of them",
        ));
    }
    let add_special_tokens = fields.boolean("add_special_tokens")?.unwrap_or(true);
    Ok(PromptSource::Text { text, add_special_tokens })
}
