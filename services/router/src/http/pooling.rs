//! `POST /v1/embeddings`, `/v1/rerank` and `/v1/score`: requests whose answers are vectors or
//! scores, one for each text.
//!
//! Each text runs as an answer of one token that carries the pooled values of its prompt. So the
//! limits, the order and the recovery of these requests are those of generation.

use std::sync::Arc;

use axum::{
    Json,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use http::Request;
use proto::v1::Pooling;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use telemetry::metrics::Operation;
use text::{Dimensions, EmbeddingModel, PooledModel, RerankerModel};

use super::{
    error::ApiError,
    fields::RequestFields,
    generate::{
        EventBuffer, GenerationApi, ReplyWriter, StartedReply, StreamWriter, WholeWriter,
        answer_request,
    },
    request_fields::{CompletionPrompt, prompts},
};
use crate::{
    front::{Front, ServedModel},
    request::{
        error::{FieldError, RequestError, invalid_value, parse_field},
        options::{DefaultLength, Options, RequestedPooling},
        text_workers::PromptSource,
    },
    request_driver::{AnswerEvent, GenerationFields},
};

/// Maximum number of texts in a request, as in OpenAI's API.
pub(super) const TEXTS_MAX: usize = 2048;

/// Maximum bytes of a text that is paired with several others, over all pairs.
const REPEATED_BYTES_MAX: usize = 32 << 20;

/// Unsupported fields of other servers that would change the values.
pub(super) const POOLING_UNSUPPORTED: [&str; 8] = [
    "truncate_prompt_tokens",
    "max_tokens_per_doc",
    "max_chunks_per_doc",
    "rank_fields",
    "normalize",
    "use_activation",
    "softmax",
    "instruction",
];

pub(super) async fn embeddings(
    State(front): State<Arc<Front>>,
    request: Request<Body>,
) -> Response {
    answer_request(front, request, PoolingApi::Embeddings).await
}

pub(super) async fn rerank(State(front): State<Arc<Front>>, request: Request<Body>) -> Response {
    answer_request(front, request, PoolingApi::Rerank).await
}

pub(super) async fn score(State(front): State<Arc<Front>>, request: Request<Body>) -> Response {
    answer_request(front, request, PoolingApi::Score).await
}

#[derive(Clone, Copy)]
enum PoolingApi {
    Embeddings,
    Rerank,
    Score,
}

/// Response to make from the values.
enum PooledReply {
    Embeddings { dimensions: Option<u32>, normalize: bool, in_base64: bool },
    Rerank { documents: Vec<String>, returns_documents: bool, count: usize },
    Scores,
}

impl GenerationApi for PoolingApi {
    type ReplyFields = PooledReply;
    type Stream = NeverStreamed;
    type Whole = PooledWriter;

    fn operation(&self) -> Operation {
        match self {
            Self::Embeddings => Operation::Embeddings,
            Self::Rerank | Self::Score => Operation::Rerank,
        }
    }

    fn read(
        &self,
        fields: &RequestFields<'_>,
        model: &ServedModel,
    ) -> Result<(GenerationFields, PooledReply), ApiError> {
        POOLING_UNSUPPORTED.iter().try_for_each(|name| fields.unsupported(name, &[], ""))?;
        let (prompts, pooling, reply) = match self {
            Self::Embeddings => read_embeddings(fields, model)?,
            Self::Rerank => read_rerank(fields, model)?,
            Self::Score => read_score(fields, model)?,
        };
        let fields = GenerationFields {
            prompt_only: false,
            prompts,
            choices: 1,
            options: Options {
                max_tokens: Some(1),
                temperature: Some(0.0),
                ignore_eos: true,
                pooling: Some(pooling),
                ..Options::default()
            },
            default_length: DefaultLength::Tokens(1),
            max_tokens_name: "max_tokens",
            tools: None,
        };
        Ok((fields, reply))
    }

    fn writer(
        &self,
        reply: PooledReply,
        started: StartedReply,
    ) -> ReplyWriter<NeverStreamed, PooledWriter> {
        let values = vec![Vec::new(); started.prompts.len()];
        ReplyWriter::Whole(PooledWriter { reply, started, values })
    }

    fn refusal(&self, error: ApiError) -> Response {
        error.into_response()
    }
}

/// Embeddings and scores have no stream.
enum NeverStreamed {}

impl StreamWriter for NeverStreamed {
    fn write(&mut self, _event: AnswerEvent, _out: &mut EventBuffer) {
        match *self {}
    }

    fn flush(&mut self, _out: &mut EventBuffer) {
        match *self {}
    }

    fn write_error(&mut self, _error: ApiError, _out: &mut EventBuffer) {
        match *self {}
    }

    fn write_last(&mut self, _out: &mut EventBuffer) {
        match *self {}
    }
}

/// Collects the values of all texts.
struct PooledWriter {
    reply: PooledReply,
    started: StartedReply,
    /// In the order of the texts.
    values: Vec<Vec<f32>>,
}

impl WholeWriter for PooledWriter {
    fn add(&mut self, event: AnswerEvent) {
        let AnswerEvent::Tokens(answer) = event else { return };
        for token in answer.tokens {
            self.values[answer.choice as usize] = token.pooled;
        }
    }

    fn into_response(self) -> Response {
        let Self { reply, started, values } = self;
        if values.iter().any(Vec::is_empty) {
            let reason = "a node returned no pooled values".to_owned();
            return ApiError::from(RequestError::Internal { reason }).into_response();
        }
        let prompt_tokens = started.prompts.iter().map(|prompt| prompt.len() as u64).sum();
        let usage = PooledUsage { prompt_tokens, total_tokens: prompt_tokens };
        let (created, model) = (started.created, &*started.model.name);
        let scores = || values.iter().map(|logits| probability(logits));
        match reply {
            PooledReply::Embeddings { dimensions, normalize, in_base64 } => {
                let vectors = values.into_iter().map(|vector| cut(vector, dimensions, normalize));
                let entry = |(index, vector): (u32, Vec<f32>)| Embedding {
                    object: "embedding",
                    index,
                    embedding: match in_base64 {
                        true => EmbeddingValues::Base64(base64(&vector)),
                        false => EmbeddingValues::Floats(vector),
                    },
                };
                let data = (0..).zip(vectors).map(entry).collect();
                Json(EmbeddingList { object: "list", model, data, usage }).into_response()
            }
            PooledReply::Scores => {
                let entry = |(index, score)| Score { object: "score", index, score };
                let data = (0..).zip(scores()).map(entry).collect();
                let id = format!("score-{}", started.request_id);
                Json(ScoreList { id, object: "list", created, model, data, usage }).into_response()
            }
            PooledReply::Rerank { documents, returns_documents, count } => {
                let mut results: Vec<RankedResult> = (0..)
                    .zip(documents.into_iter().zip(scores()))
                    .map(|(index, (text, relevance_score))| RankedResult {
                        index,
                        relevance_score,
                        document: returns_documents.then_some(RankedDocument { text }),
                    })
                    .collect();
                // Stable: documents of equal score keep their order.
                results.sort_by(|a, b| b.relevance_score.total_cmp(&a.relevance_score));
                results.truncate(count);
                let id = format!("rerank-{}", started.request_id);
                Json(RankedList { id, model, results, usage }).into_response()
            }
        }
    }
}

/// Returns the softmax of the first of two logits.
fn probability(logits: &[f32]) -> f64 {
    let [yes, no] = [0, 1].map(|index| f64::from(logits.get(index).copied().unwrap_or(f32::NAN)));
    1.0 / (1.0 + (no - yes).exp())
}

/// Cuts a vector to its first dimensions, and scales it to length 1.
fn cut(mut vector: Vec<f32>, dimensions: Option<u32>, normalize: bool) -> Vec<f32> {
    vector.truncate(dimensions.map_or(usize::MAX, |count| count as usize));
    let square: f64 = vector.iter().map(|&value| f64::from(value).powi(2)).sum();
    if normalize && square > 0.0 {
        let scale = square.sqrt().recip();
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) * scale) as f32);
    }
    vector
}

/// Encodes a vector as OpenAI's clients expect it: little-endian f32.
fn base64(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
    BASE64_STANDARD.encode(bytes)
}

/// The texts of a request, their values, and the response to make from them.
type PooledFields = (Vec<PromptSource>, RequestedPooling, PooledReply);

fn read_embeddings(
    fields: &RequestFields<'_>,
    model: &ServedModel,
) -> Result<PooledFields, FieldError> {
    let requested = EmbeddingOptions::read(fields)?;
    let inputs = prompts(fields, "input")?;
    check_count("input", inputs.len())?;
    let known = embedding_model(model)?;
    let prefix = requested.prefix(known)?;
    requested.check_dimensions(known)?;
    let add_special_tokens = requested.add_special_tokens;
    let source = |input| match input {
        CompletionPrompt::Tokens(tokens) => PromptSource::Tokens(tokens),
        CompletionPrompt::Text(text) => {
            PromptSource::Text { text: format!("{prefix}{text}"), add_special_tokens }
        }
    };
    let EmbeddingOptions { dimensions, in_base64, .. } = requested;
    let reply = PooledReply::Embeddings { dimensions, normalize: known.normalize, in_base64 };
    let pooling = RequestedPooling { field: "input", values: Pooling::default() };
    Ok((inputs.into_iter().map(source).collect(), pooling, reply))
}

/// Options of `/v1/embeddings`.
pub(super) struct EmbeddingOptions {
    dimensions: Option<u32>,
    in_base64: bool,
    prompt_name: Option<String>,
    add_special_tokens: bool,
}

impl EmbeddingOptions {
    pub(super) fn read(fields: &RequestFields<'_>) -> Result<Self, FieldError> {
        let format = fields.string("encoding_format")?;
        let in_base64 = match format.as_deref() {
            None | Some("float") => false,
            Some("base64") => true,
            Some(other) => {
                let text = json!(other).to_string();
                return Err(invalid_value("encoding_format", &text, "float or base64"));
            }
        };
        fields.string("user")?;
        Ok(Self {
            dimensions: fields.count("dimensions", 1..=u32::MAX)?,
            in_base64,
            prompt_name: fields.string("prompt_name")?,
            add_special_tokens: fields.boolean("add_special_tokens")?.unwrap_or(true),
        })
    }

    /// Returns the text that precedes each input.
    fn prefix<'a>(&self, model: &'a EmbeddingModel) -> Result<&'a str, FieldError> {
        let Some(name) = self.prompt_name.as_ref().or(model.default_prompt.as_ref()) else {
            return Ok("");
        };
        model.prompts.get(name).map(String::as_str).ok_or_else(|| {
            let names: Vec<_> = model.prompts.keys().map(String::as_str).collect();
            let allowed = match names.is_empty() {
                true => "none, because the checkpoint has no prompts".to_owned(),
                false => names.join(", "),
            };
            invalid_value("prompt_name", &json!(name).to_string(), &allowed)
        })
    }

    fn check_dimensions(&self, model: &EmbeddingModel) -> Result<(), FieldError> {
        let Some(count) = self.dimensions else { return Ok(()) };
        let allowed = match &model.dimensions {
            Dimensions::Whole => {
                "none, because the checkpoint's config.json has no is_matryoshka or \
                 matryoshka_dimensions"
                    .to_owned()
            }
            Dimensions::UpTo(max) if count <= *max => return Ok(()),
            Dimensions::UpTo(max) => format!("1 to {max}"),
            Dimensions::Listed(listed) if listed.contains(&count) => return Ok(()),
            Dimensions::Listed(listed) => {
                let listed: Vec<_> = listed.iter().map(u32::to_string).collect();
                listed.join(", ")
            }
        };
        Err(invalid_value("dimensions", &count.to_string(), &allowed))
    }
}

fn read_rerank(
    fields: &RequestFields<'_>,
    model: &ServedModel,
) -> Result<PooledFields, FieldError> {
    let RerankRequest { query, documents, top_n, returns_documents } = RerankRequest::read(fields)?;
    let reranker = reranker(model)?;
    let prompts = documents.iter().map(|document| pair(reranker, &query, document)).collect();
    let count = top_n.map_or(documents.len(), |count| count as usize);
    let reply = PooledReply::Rerank { documents, returns_documents, count };
    Ok((prompts, logits(reranker, "documents"), reply))
}

/// Fields of `/v1/rerank`.
pub(super) struct RerankRequest {
    query: String,
    documents: Vec<String>,
    top_n: Option<u32>,
    returns_documents: bool,
}

impl RerankRequest {
    pub(super) fn read(fields: &RequestFields<'_>) -> Result<Self, FieldError> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a string, or an object with text")]
        enum Document {
            Text(String),
            Object { text: String },
        }
        let missing =
            |name, allowed| FieldError::new(name, format!("is missing; allowed: {allowed}"));
        let query = fields.string("query")?.ok_or_else(|| missing("query", "a string"))?;
        let allowed = "a list of strings, or of objects with text";
        let documents: Option<Vec<Document>> = fields.value("documents", allowed)?;
        let documents = documents.ok_or_else(|| missing("documents", allowed))?;
        check_count("documents", documents.len())?;
        let text = |document| match document {
            Document::Text(text) | Document::Object { text } => text,
        };
        check_repeated("query", &query, documents.len())?;
        Ok(Self {
            query,
            documents: documents.into_iter().map(text).collect(),
            top_n: fields.count("top_n", 1..=u32::MAX)?,
            returns_documents: fields.boolean("return_documents")?.unwrap_or(false),
        })
    }
}

fn read_score(fields: &RequestFields<'_>, model: &ServedModel) -> Result<PooledFields, FieldError> {
    let reranker = reranker(model)?;
    let pairs = text_pairs(fields)?;
    let prompts = pairs.iter().map(|(query, document)| pair(reranker, query, document)).collect();
    Ok((prompts, logits(reranker, "text_2"), PooledReply::Scores))
}

/// Reads the pairs of `/v1/score`. One text is paired with each of several.
pub(super) fn text_pairs(fields: &RequestFields<'_>) -> Result<Vec<(String, String)>, FieldError> {
    let texts = |name: &'static str| {
        let allowed = "a string or a list of strings";
        match fields.raw(name) {
            None => Err(FieldError::new(name, format!("is missing; allowed: {allowed}"))),
            Some(text) if text.starts_with('"') => Ok(vec![parse_field(name, text, allowed)?]),
            Some(text) => parse_field::<Vec<String>>(name, text, allowed),
        }
    };
    let (first, second) = (texts("text_1")?, texts("text_2")?);
    check_count("text_1", first.len())?;
    check_count("text_2", second.len())?;
    if first.len() == 1 {
        check_repeated("text_1", &first[0], second.len())?;
        return Ok(second.into_iter().map(|text| (first[0].clone(), text)).collect());
    }
    if first.len() != second.len() {
        let (one, other) = (first.len(), second.len());
        let problem = format!("has {other} texts; allowed: {one}, as many as text_1 has");
        return Err(FieldError::new("text_2", problem));
    }
    Ok(first.into_iter().zip(second).collect())
}

fn check_count(field: &str, count: usize) -> Result<(), FieldError> {
    match (1..=TEXTS_MAX).contains(&count) {
        true => Ok(()),
        false => {
            let problem = format!("has {count} texts; allowed: 1 to {TEXTS_MAX}");
            Err(FieldError::new(field, problem))
        }
    }
}

/// Rejects a text of which the pairs of a request would have too many copies.
fn check_repeated(field: &str, text: &str, count: usize) -> Result<(), FieldError> {
    let bytes = text.len().saturating_mul(count);
    if bytes <= REPEATED_BYTES_MAX {
        return Ok(());
    }
    let problem = format!(
        "is paired with {count} texts, {bytes} bytes in all; allowed: at most {REPEATED_BYTES_MAX}"
    );
    Err(FieldError::new(field, problem))
}

fn embedding_model(model: &ServedModel) -> Result<&EmbeddingModel, FieldError> {
    let reason = match model.text.pooled() {
        Ok(PooledModel::Embedding(known)) => return Ok(known),
        Ok(PooledModel::Reranker(_)) => "it is a reranker; expected an embedding model".to_owned(),
        Err(reason) => reason.to_string(),
    };
    Err(FieldError::new("model", format!("{:?} returns no embeddings: {reason}", model.name)))
}

fn reranker(model: &ServedModel) -> Result<&RerankerModel, FieldError> {
    let reason = match model.text.pooled() {
        Ok(PooledModel::Reranker(known)) => return Ok(known),
        Ok(PooledModel::Embedding(_)) => "it is an embedding model; expected a reranker".to_owned(),
        Err(reason) => reason.to_string(),
    };
    Err(FieldError::new("model", format!("{:?} returns no scores: {reason}", model.name)))
}

/// Returns the prompt by which a reranker judges a document.
fn pair(reranker: &RerankerModel, query: &str, document: &str) -> PromptSource {
    let instruction = reranker.instruction.as_deref();
    let message = |role, content| json!({"role": role, "content": content});
    let messages = instruction.map(|content| message("system", content)).into_iter();
    let messages = messages.chain([message("query", query), message("document", document)]);
    let bytes = query.len() + document.len() + instruction.map_or(0, str::len);
    PromptSource::Pair { messages: messages.collect(), bytes }
}

/// Returns the logits of a pair's judgement; `field` has the documents.
fn logits(reranker: &RerankerModel, field: &'static str) -> RequestedPooling {
    let values = Pooling { logits: vec![reranker.true_token, reranker.false_token] };
    RequestedPooling { field, values }
}

#[derive(Clone, Copy, Serialize, JsonSchema)]
struct PooledUsage {
    prompt_tokens: u64,
    total_tokens: u64,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct EmbeddingList<'a> {
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    model: &'a str,
    /// One for each input, in their order.
    data: Vec<Embedding>,
    usage: PooledUsage,
}

#[derive(Serialize, JsonSchema)]
struct Embedding {
    #[schemars(extend("const" = "embedding"))]
    object: &'static str,
    index: u32,
    embedding: EmbeddingValues,
}

#[derive(Serialize, JsonSchema)]
#[schemars(inline)]
#[serde(untagged)]
enum EmbeddingValues {
    Floats(Vec<f32>),
    /// Little-endian f32 in base64.
    Base64(String),
}

#[derive(Serialize, JsonSchema)]
pub(super) struct RankedList<'a> {
    id: String,
    model: &'a str,
    /// The best documents first.
    results: Vec<RankedResult>,
    usage: PooledUsage,
}

#[derive(Serialize, JsonSchema)]
struct RankedResult {
    /// Index of the document in the request.
    index: u32,
    #[schemars(range(min = 0.0, max = 1.0))]
    relevance_score: f64,
    /// With `return_documents`.
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<RankedDocument>,
}

#[derive(Serialize, JsonSchema)]
struct RankedDocument {
    text: String,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct ScoreList<'a> {
    id: String,
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    created: u64,
    model: &'a str,
    /// One for each pair, in their order.
    data: Vec<Score>,
    usage: PooledUsage,
}

#[derive(Serialize, JsonSchema)]
struct Score {
    #[schemars(extend("const" = "score"))]
    object: &'static str,
    index: u32,
    #[schemars(range(min = 0.0, max = 1.0))]
    score: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn score_is_the_softmax_of_two_logits() {
        assert_eq!(probability(&[1.5, 1.5]), 0.5);
        let (yes, no) = (2.0_f64, -0.5_f64);
        let expected = yes.exp() / (yes.exp() + no.exp());
        assert!((probability(&[2.0, -0.5]) - expected).abs() < 1e-12);
        assert_eq!([probability(&[900.0, -900.0]), probability(&[-900.0, 900.0])], [1.0, 0.0]);
    }

    #[test]
    fn vectors_are_cut_before_they_are_normalized() {
        assert_eq!(cut(vec![3.0, 4.0, 12.0], Some(2), true), [0.6, 0.8]);
        assert_eq!(cut(vec![3.0, 4.0], None, false), [3.0, 4.0]);
        assert_eq!(cut(vec![0.0, 0.0], None, true), [0.0, 0.0]);
        assert_eq!(base64(&[1.0, -2.5]), "AACAPwAAIMA=");
    }

    #[test]
    fn one_text_is_paired_with_each_of_several() {
        let pairs = |body: &str| {
            text_pairs(&RequestFields::parse(body.as_bytes()).unwrap())
                .map_err(|error| error.to_string())
        };
        let pair = |one: &str, other: &str| (one.to_owned(), other.to_owned());
        assert_eq!(
            pairs(r#"{"text_1": "q", "text_2": ["a", "b"]}"#),
            Ok(vec![pair("q", "a"), pair("q", "b")])
        );
        assert_eq!(
            pairs(r#"{"text_1": ["p", "q"], "text_2": ["a", "b"]}"#),
            Ok(vec![pair("p", "a"), pair("q", "b")])
        );
        let unequal = pairs(r#"{"text_1": ["p", "q"], "text_2": "a"}"#).unwrap_err();
        assert_eq!(unequal, "text_2 has 1 texts; allowed: 2, as many as text_1 has");
        let none = pairs(r#"{"text_1": "q", "text_2": []}"#).unwrap_err();
        assert_eq!(none, "text_2 has 0 texts; allowed: 1 to 2048");
    }
}
