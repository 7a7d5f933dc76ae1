//! `baton.v1.Inference`: the same operations as over HTTP, with tokens and text as messages.

use std::{pin::Pin, sync::Arc};

use futures_util::Stream;
use proto::v1::{
    ChatRequest, DetokenizeRequest, DetokenizeResponse, Finished, GenerateOptions, GenerateRequest,
    GenerateResponse, GeneratedTokens, ListModelsRequest, ListModelsResponse, ModelInfo,
    TokenizeRequest, TokenizeResponse, generate_response, inference_server::Inference,
};
use telemetry::{metrics::Operation, propagation};
use tonic::{
    Extensions, Request, Response, Status,
    metadata::{MetadataMap, MetadataValue},
};
use tracing::Instrument;

use super::{
    arrived::ArrivingRequest,
    options::{options, timeout},
    prompt, status,
    tools::{self, WirePieces},
};
use crate::{
    front::Front,
    front::NamedModel,
    keys::Caller,
    record::{RequestRecord, label},
    request::{
        answer_reader::{AnswerPiece, AnswerReader, Calls},
        error::{FieldError, RequestError},
        options::{COMPLETION_TOKENS_DEFAULT, DefaultLength, TENANT_HEADER},
        text_workers::PromptSource,
        tokenization,
        tools::OfferedTools,
    },
    request_driver::{
        self, AnswerEvent, AnswerTokens, GenerationFields, ParsedRequest, RunningRequest,
    },
};

pub(super) struct InferenceService {
    front: Arc<Front>,
}

/// A Generate or Chat call.
struct GenerationCall {
    model: String,
    prompt: Result<PromptSource, FieldError>,
    options: GenerateOptions,
    tools: Option<OfferedTools>,
    default_length: DefaultLength,
    label: Option<String>,
}

type Responses = Pin<Box<dyn Stream<Item = Result<GenerateResponse, Status>> + Send>>;

impl InferenceService {
    pub(super) fn new(front: Arc<Front>) -> Self {
        Self { front }
    }

    async fn answer(
        &self,
        operation: Operation,
        metadata: &MetadataMap,
        extensions: &Extensions,
        call: GenerationCall,
    ) -> Result<Response<Responses>, Status> {
        let front = &self.front;
        let arrived = extensions.get().and_then(ArrivingRequest::read);
        let mut record = arrived.ok_or_else(|| Status::internal("the request has no record"))?;
        let request_id = record.request_id();
        let (api, label) = (operation.as_str(), call.label.clone());
        record.set_label(label.clone());
        let span = tracing::info_span!(
            "request",
            otel.kind = "server",
            %request_id,
            label = label.as_deref(),
            api
        );
        propagation::set_parent_from_grpc(&span, metadata);
        record.set_span(span.clone());
        let named = front.find_model(Some(&call.model), record.caller());
        if let Ok(named) = &named {
            // A rejected request counts for its model too.
            record.set_model(&named.model);
        }

        let tokens_only = call.options.tokens_only;
        let parsed = match read(front, &record, metadata, named, call) {
            Ok(read) => read,
            Err(error) => {
                record.failed(&error);
                return Err(status(error));
            }
        };
        let running = request_driver::start(front, parsed, record, span.clone())
            .instrument(span)
            .await
            .map_err(status)?;
        // A gRPC request has one answer.
        let reader = running.reader(0).filter(|_| !tokens_only);
        Ok(Response::new(Box::pin(responses(running, tokens_only, reader))))
    }
}

#[tonic::async_trait]
impl Inference for InferenceService {
    type GenerateStream = Responses;
    type ChatStream = Responses;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Responses>, Status> {
        let (metadata, extensions, message) = request.into_parts();
        let call = GenerationCall {
            model: message.model,
            prompt: prompt::of_generate(message.prompt),
            options: message.options.unwrap_or_default(),
            tools: None,
            default_length: DefaultLength::Tokens(COMPLETION_TOKENS_DEFAULT),
            label: label(&message.client_request_id),
        };
        self.answer(Operation::Generate, &metadata, &extensions, call).await
    }

    async fn chat(&self, request: Request<ChatRequest>) -> Result<Response<Responses>, Status> {
        let (metadata, extensions, message) = request.into_parts();
        let ChatRequest { tools, tool_choice, parallel_tool_calls, .. } = message;
        let (prompt, tools) = match tools::read(tools, tool_choice, parallel_tool_calls) {
            Ok(tools) => (prompt::of_chat(message.conversation, tools.as_ref()), tools),
            Err(error) => (Err(error), None),
        };
        let call = GenerationCall {
            model: message.model,
            prompt,
            options: message.options.unwrap_or_default(),
            tools,
            default_length: DefaultLength::Rest,
            label: label(&message.client_request_id),
        };
        self.answer(Operation::Chat, &metadata, &extensions, call).await
    }

    async fn tokenize(
        &self,
        request: Request<TokenizeRequest>,
    ) -> Result<Response<TokenizeResponse>, Status> {
        let caller = caller_of(request.extensions());
        let TokenizeRequest { model, input, add_special_tokens } = request.into_inner();
        let tokenized = async {
            let model = self.front.find_model(Some(&model), &caller)?.model;
            let source = prompt::of_tokenize(input, add_special_tokens)?;
            let ids = tokenization::tokenize(&self.front, &caller, &model, source).await?;
            let limits = self.front.nodes.serving(&model.name).limits;
            let sequence_tokens_max = limits.map_or(0, |limits| limits.sequence_tokens_max);
            Ok(Response::new(TokenizeResponse { ids, sequence_tokens_max }))
        };
        tokenized.await.map_err(status)
    }

    async fn detokenize(
        &self,
        request: Request<DetokenizeRequest>,
    ) -> Result<Response<DetokenizeResponse>, Status> {
        let caller = caller_of(request.extensions());
        let DetokenizeRequest { model, ids } = request.into_inner();
        let detokenized = async {
            let model = self.front.find_model(Some(&model), &caller)?.model;
            let text = tokenization::detokenize(&self.front, &caller, &model, "ids", ids).await?;
            Ok(Response::new(DetokenizeResponse { text }))
        };
        detokenized.await.map_err(status)
    }

    async fn list_models(
        &self,
        request: Request<ListModelsRequest>,
    ) -> Result<Response<ListModelsResponse>, Status> {
        let caller = caller_of(request.extensions());
        let info = |name: &str, root: &str| {
            let serving = self.front.nodes.serving(root);
            ModelInfo {
                name: name.to_owned(),
                root: root.to_owned(),
                prompt_tokens_max: serving.limits.map_or(0, |limits| limits.prompt_tokens_max),
                sequence_tokens_max: serving.limits.map_or(0, |limits| limits.sequence_tokens_max),
                prefill_nodes: serving.prefill_nodes as u32,
                decode_nodes: serving.decode_nodes as u32,
            }
        };
        let models = self.front.model_names(&caller).into_iter();
        let models = models.map(|named| info(&named.name, &named.model.name)).collect();
        Ok(Response::new(ListModelsResponse { models }))
    }
}

/// Returns the caller that the check of keys found.
fn caller_of(extensions: &Extensions) -> Caller {
    extensions.get().cloned().unwrap_or_default()
}

fn read(
    front: &Front,
    record: &RequestRecord,
    metadata: &MetadataMap,
    named: Result<NamedModel, RequestError>,
    call: GenerationCall,
) -> Result<ParsedRequest, RequestError> {
    let wire = call.options;
    let deadline = record.deadline(timeout(front, &wire, metadata)?);
    if wire.tokens_only && call.tools.is_some() {
        let problem = "is true; calls are made of text; allowed: false, or tool_choice none";
        return Err(FieldError::new("options.tokens_only", problem).into());
    }
    let with_text = !wire.tokens_only || !wire.stop.is_empty();
    let tenant = metadata.get(TENANT_HEADER).map(MetadataValue::as_bytes);
    let (request_id, tenant) = (record.request_id(), record.caller().tenant(tenant)?);
    let model = named?;
    let fields = GenerationFields {
        prompt_only: false,
        prompts: vec![call.prompt?],
        choices: 1,
        options: options(wire)?,
        default_length: call.default_length,
        max_tokens_name: "options.max_tokens",
        tools: call.tools,
    };
    Ok(ParsedRequest { request_id, tenant, model, fields, deadline, with_text })
}

/// Returns the responses of a running request. Dropping the stream cancels the request.
fn responses(
    running: RunningRequest,
    tokens_only: bool,
    reader: Option<AnswerReader>,
) -> impl Stream<Item = Result<GenerateResponse, Status>> {
    futures_util::stream::unfold(Some((running, reader)), move |state| async move {
        let (mut running, mut reader) = state?;
        let event = match running.next().await? {
            Ok(event) => event,
            Err(error) => return Some((Err(status(error)), None)),
        };
        let text_of = |text: String| (!tokens_only).then_some(AnswerPiece::Content(text));
        let event = match event {
            AnswerEvent::Tokens(shown) => {
                let AnswerTokens { first_index, mut tokens, prompt, text, .. } = shown;
                let mut pieces = Vec::new();
                match &mut reader {
                    Some(reader) => reader.push(&tokens, text, &mut pieces),
                    None => pieces.extend(text_of(text)),
                }
                let WirePieces { reasoning, text, tool_calls } = tools::to_wire(pieces);
                if let Some(first) = tokens.first_mut() {
                    first.prompt = prompt;
                }
                let tokens = GeneratedTokens { first_index, tokens, text, tool_calls, reasoning };
                generate_response::Event::Tokens(tokens)
            }
            AnswerEvent::Finished(end) => {
                let reasoning_tokens = reader.as_ref().and_then(AnswerReader::reasoning_tokens);
                let is_cut = end.is_cut();
                let (pieces, calls) = match reader.take() {
                    Some(reader) => reader.finish(end.text, is_cut),
                    None => (text_of(end.text).into_iter().collect(), Calls::None),
                };
                let WirePieces { reasoning, text, tool_calls } = tools::to_wire(pieces);
                generate_response::Event::Finished(Finished {
                    reason: calls.finish_reason(end.reason).into(),
                    prompt_tokens: end.prompt_tokens,
                    completion_tokens: end.completion_tokens,
                    cached_tokens: end.cached_tokens,
                    text,
                    tool_calls,
                    reasoning,
                    reasoning_tokens: reasoning_tokens.unwrap_or(0) as u32,
                })
            }
        };
        Some((Ok(GenerateResponse { event: Some(event) }), Some((running, reader))))
    })
}
