//! `/openapi.json`: the HTTP API in OpenAPI 3.1, for client generators and for tests.
//!
//! Response schemas are derived from the types that the router serializes. Request schemas are
//! derived from types in `requests`, with the limits that request parsing checks. Routes are listed
//! here. Unit tests compare routes and request fields with those that the router serves and reads.
//! A cluster test fuzzes requests and checks that every response matches its schema.

#[expect(dead_code, reason = "only the schemas of its types are used")]
mod messages;
#[expect(dead_code, reason = "only the schemas of its types are used")]
mod requests;
mod responses;

use serde_json::{Map, Value, json};

/// Returns the OpenAPI document.
pub(super) fn document() -> Value {
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "OpenAI's API for text and chat, with vLLM's additions, and Anthropic's API for messages. Fields that are \
                not described are ignored. An error names the field, its value and what is allowed.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths(),
        "components": {
            "schemas": schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer",
                "description": "An API key, if the router has `router.keys`."}},
        },
        "security": [{}, {"key": []}],
    })
}

/// Returns a path with a body.
fn post(id: &str, about: &str, request: &str, answers: Value) -> Value {
    let mut parameters = vec![label_header()];
    if id.starts_with("create") {
        parameters.extend([stats_header(), tenant_header(), session_header(), keep_header()]);
        parameters.push(resume_header());
    } else if ["embed", "rerank", "score"].iter().any(|pooled| id.starts_with(pooled)) {
        parameters.push(tenant_header());
    }
    let content = json!({"schema": reference(request), "example": requests::example(request)});
    let body = json!({"required": true, "content": {"application/json": content}});
    json!({"post": {
        "operationId": id, "summary": about, "parameters": parameters, "requestBody": body,
        "responses": answers,
    }})
}

/// Returns the responses of a generation, whole or as a stream of chunks.
fn generated(whole: &str, chunk: &str) -> Value {
    let mut ok = json_answer("The answer, or the stream of its chunks.", whole);
    // OpenAPI 3.1 has no other place for the schema of one event.
    let content = json!({"anyOf": [reference(chunk), reference("Error")]});
    ok["content"]["text/event-stream"] = json!({"schema": {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [
            {"const": "[DONE]"},
            {"type": "string", "contentMediaType": "application/json", "contentSchema": content},
        ]}},
        "description": "One event. A complete stream ends with `[DONE]`, a failed stream with an \
            Error.",
    }});
    with_errors(ok, &[400, 401, 404, 408, 413, 415, 429, 500, 501, 502, 503, 504])
}

/// Returns the responses of `/v1/messages`, whole or as a stream of events.
fn message_answers() -> Value {
    let mut ok = json_answer("The answer, or the stream of its events.", "MessagesReply");
    let events = ["MessageEvent", "BlockEvent", "MessagesError"].map(reference);
    ok["content"]["text/event-stream"] = json!({"schema": {
        "type": "object",
        "required": ["event", "data"],
        "properties": {
            "event": {"type": "string"},
            "data": {"type": "string", "contentMediaType": "application/json",
                "contentSchema": {"anyOf": events}},
        },
        "description": "One event; `event` repeats the type in `data`. A complete stream ends with \
            `message_stop`, a failed stream with `error`.",
    }});
    with_error_bodies(
        ok,
        &[400, 401, 404, 408, 413, 415, 429, 500, 501, 502, 503, 504],
        "MessagesError",
    )
}

/// Returns the answers of `/v1/responses`, whole or as a stream of events.
fn responded() -> Value {
    let mut ok = json_answer("The response, or the stream of its events.", "Response");
    ok["content"]["text/event-stream"] = json!({"schema": {
        "type": "object",
        "required": ["event", "data"],
        "properties": {
            "event": {"type": "string", "description": "The `type` of the data."},
            "data": {"type": "string", "contentMediaType": "application/json",
                "contentSchema": reference("ResponseEvent")},
        },
        "description": "One event. A stream ends with `response.completed`, `response.incomplete` \
            or `response.failed`.",
    }});
    with_errors(ok, &[400, 401, 404, 408, 413, 415, 429, 500, 501, 502, 503, 504])
}

/// Returns an operation without a body.
fn operation(id: &str, about: &str, parameters: Value, answers: Value) -> Value {
    json!({"operationId": id, "summary": about, "parameters": parameters, "responses": answers})
}

/// Returns the responses of a request for embeddings or scores.
fn pooled(about: &str, schema: &str) -> Value {
    let errors = [400, 401, 404, 408, 413, 415, 429, 500, 502, 503, 504];
    with_errors(json_answer(about, schema), &errors)
}

/// Statuses of the errors of requests that only the router computes.
const TEXT_ERRORS: &[u16] = &[400, 401, 404, 408, 413, 415, 429, 500, 503, 504];

fn paths() -> Value {
    let groups = [generation_paths(), response_paths(), pooling_paths(), operator_paths()];
    let paths = groups.into_iter().filter_map(|group| match group {
        Value::Object(paths) => Some(paths),
        _ => None,
    });
    Value::Object(paths.flatten().collect())
}

/// Returns a path with the operation GET.
fn get(id: &str, about: &str, parameters: Value, answers: Value) -> Value {
    json!({"get": operation(id, about, parameters, answers)})
}

fn generation_paths() -> Value {
    json!({
        "/v1/chat/completions": post(
            "createChatCompletion",
            "Generates the next message of a conversation",
            "ChatCompletionRequest",
            generated("ChatCompletion", "ChatCompletionChunk"),
        ),
        "/v1/completions": post(
            "createCompletion",
            "Continues a text",
            "CompletionRequest",
            generated("Completion", "CompletionChunk"),
        ),
        "/v1/messages": post(
            "createMessage",
            "Generates the next message of a conversation, as in Anthropic's API",
            "MessagesRequest",
            message_answers(),
        ),
        "/v1/messages/count_tokens": post(
            "countMessageTokens",
            "Counts the tokens of a conversation",
            "MessagesCountRequest",
            with_error_bodies(
                json_answer("The number of tokens.", "CountedTokens"),
                TEXT_ERRORS,
                "MessagesError",
            ),
        ),
    })
}

fn response_paths() -> Value {
    json!({
        "/v1/responses": post(
            "createResponse",
            "Generates a response to items, and stores it",
            "ResponsesRequest",
            responded(),
        ),
        "/v1/responses/{id}": {
            "get": operation(
                "getResponse",
                "Returns a stored response",
                json!([label_header(), response_id(),
                    query("stream", json!({"enum": ["true", "false"]})),
                    query("starting_after", json!({"type": "integer", "minimum": 0}))]),
                with_errors(json_answer("The response.", "Response"), &[400, 401, 404, 429]),
            ),
            "delete": operation(
                "deleteResponse",
                "Deletes a stored response",
                json!([label_header(), response_id()]),
                with_errors(
                    json_answer("The response is deleted.", "DeletedResponse"),
                    &[400, 401, 404, 429],
                ),
            ),
        },
        "/v1/responses/{id}/input_items": get(
            "listInputItems",
            "Lists the input items of a stored response, earlier turns included",
            json!([label_header(), response_id(),
                query("limit", json!({"type": "integer", "minimum": 1, "maximum": 100})),
                query("order", json!({"enum": ["asc", "desc"]})),
                query("after", json!({"type": "string"}))]),
            with_errors(json_answer("The items.", "InputItems"), &[400, 401, 404, 429]),
        ),
        "/v1/responses/{id}/cancel": {"post": operation(
            "cancelResponse",
            "Ends a response in progress",
            json!([label_header(), response_id()]),
            with_errors(json_answer("The response.", "Response"), &[400, 401, 404, 429]),
        )},
    })
}

fn pooling_paths() -> Value {
    json!({
        "/v1/embeddings": post(
            "embed",
            "Returns the embeddings of texts",
            "EmbeddingRequest",
            pooled("The embeddings.", "EmbeddingList"),
        ),
        "/v1/rerank": post(
            "rerank",
            "Orders documents by their relevance to a query",
            "RerankRequest",
            pooled("The documents, best first.", "RankedList"),
        ),
        "/rerank": post(
            "rerankWithoutVersion",
            "Same as /v1/rerank",
            "RerankRequest",
            pooled("The documents, best first.", "RankedList"),
        ),
        "/v1/score": post(
            "score",
            "Scores pairs of texts",
            "ScoreRequest",
            pooled("The scores.", "ScoreList"),
        ),
        "/score": post(
            "scoreWithoutVersion",
            "Same as /v1/score",
            "ScoreRequest",
            pooled("The scores.", "ScoreList"),
        ),
    })
}

/// Returns the paths besides those of requests to a model: tokens, streams, models and probes.
fn operator_paths() -> Value {
    let label = || json!([label_header()]);
    let id = json!({
        "name": "id", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1},
        "description": "Name or alias of a model. It may contain slashes.",
    });
    let no_node = json_answer(
        "No decode node is ready, the first nodes are still connecting, or the router drains.",
        "Health",
    );
    let text = |about: &str| {
        json!({"description": about, "headers": label_response(),
            "content": {"text/plain": {"schema": {"type": "string"}}}})
    };
    let object = json!({"description": "This description.", "headers": label_response(),
        "content": {"application/json": {"schema": {"type": "object"}}}});
    json!({
        "/v1/streams/{id}": get(
            "resumeStream",
            "Continues a stream that began with `x-baton-resume: 1`",
            json!([label_header(),
                {"name": "id", "in": "path", "required": true,
                    "schema": {"type": "string", "minLength": 1},
                    "description": "Value of the header `x-baton-stream` of the stream."},
                {"name": "last-event-id", "in": "header", "schema": {"type": "string"},
                    "description": "Id of the last event that the client has."},
                query("from", json!({"type": "integer", "minimum": 0}))]),
            with_errors(
                json!({"description": "The events that follow.", "headers": label_response(),
                    "content": {"text/event-stream": {"schema": {"type": "object"}}}}),
                &[400, 401, 404, 429],
            ),
        ),
        "/tokenize": post(
            "tokenize",
            "Tokenizes a text or a conversation",
            "TokenizeRequest",
            with_errors(json_answer("The token ids.", "Tokenized"), TEXT_ERRORS),
        ),
        "/detokenize": post(
            "detokenize",
            "Detokenizes token ids",
            "DetokenizeRequest",
            with_errors(json_answer("The text.", "Detokenized"), TEXT_ERRORS),
        ),
        "/v1/models": get(
            "listModels",
            "Lists model names and aliases",
            label(),
            with_errors(json_answer("The models.", "ModelList"), &[401, 429]),
        ),
        "/v1/models/{id}": get(
            "getModel",
            "Describes one model",
            json!([label_header(), id]),
            with_errors(json_answer("The model.", "Model"), &[401, 404, 429]),
        ),
        "/ready": get("ready", "Readiness probe", label(), json!({
            "200": text("Load balancers may send requests."),
            "503": text("No decode node has connected yet, or the router leaves."),
        })),
        "/health": get("health", "State of the cluster", label(), json!({
            "200": json_answer("Requests can be served.", "Health"),
            "503": no_node,
        })),
        "/ping": {
            "get": operation("ping", "Same as /health", label(), json!({
                "200": json_answer("Requests can be served.", "Health"), "503": no_node,
            })),
            "post": operation("pingByPost", "Same as /health", label(), json!({
                "200": json_answer("Requests can be served.", "Health"), "503": no_node,
            })),
        },
        "/version": get("version", "Version of the router", label(),
            with_errors(json_answer("The version.", "RouterVersion"), &[401, 429])),
        "/live": get("live", "Liveness probe", label(), json!({"200": text("The process runs.")})),
        "/metrics": get("metrics", "Prometheus metrics", label(), json!({"200": text("The metrics.")})),
        "/openapi.json": get("openapi", "This description", label(), json!({"200": object})),
    })
}

fn schemas() -> Value {
    let mut all = responses::schemas();
    all.extend(requests::schemas());
    Value::Object(all)
}

fn reference(schema: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{schema}")})
}

fn json_answer(about: &str, schema: &str) -> Value {
    json!({"description": about, "headers": label_response(),
        "content": {"application/json": {"schema": reference(schema)}}})
}

fn with_errors(ok: Value, statuses: &[u16]) -> Value {
    with_error_bodies(ok, statuses, "Error")
}

/// Returns the responses of a path: success, and errors with bodies of this schema.
fn with_error_bodies(ok: Value, statuses: &[u16], schema: &str) -> Value {
    let mut answers = Map::from_iter([("200".to_owned(), ok)]);
    for &status in statuses {
        let about = match status {
            400 => "The body or a field is invalid.",
            401 => "The request has no API key, or an unknown one.",
            404 => "Unknown model, or one that the API key may not use.",
            408 => "The client did not send the body or read the answer in time.",
            413 => "The body is too large.",
            415 => "The body has another encoding than gzip, or its content-type is not JSON.",
            429 => "The API key is at a limit, or the caller has its share of a busy router.",
            501 => "The nodes' release does not support this grammar.",
            502 => "Every attempt failed.",
            503 => {
                "All nodes are busy, no node is ready, or the router is at a limit or shuts down."
            }
            504 => "The request's deadline has passed.",
            _ => "A bug in Baton.",
        };
        let mut answer = json_answer(about, schema);
        if matches!(status, 429 | 503) {
            answer["headers"]["retry-after"] = json!({"description": "Seconds to wait before a retry.", "schema": {"type": "integer", "minimum": 1}});
        }
        answers.insert(status.to_string(), answer);
    }
    Value::Object(answers)
}

fn label_header() -> Value {
    json!({"name": "x-request-id", "in": "header", "schema": {"type": "string"},
        "description": "Label of the request; the answer repeats up to 128 visible characters of it."})
}

fn label_response() -> Value {
    json!({"x-request-id": {"description": "The request's label, or an id of the router.",
        "schema": {"type": "string"}, "required": true}})
}

fn response_id() -> Value {
    json!({"name": "id", "in": "path", "required": true,
        "schema": {"type": "string", "minLength": 1}, "description": "Id of a response."})
}

fn query(name: &str, schema: Value) -> Value {
    json!({"name": name, "in": "query", "schema": schema})
}

fn stats_header() -> Value {
    json!({"name": "x-baton-stats", "in": "header", "schema": {"type": "string"},
        "description": "With `1` the answer has `baton`: statistics of the hand-over."})
}

fn resume_header() -> Value {
    json!({"name": "x-baton-resume", "in": "header", "schema": {"type": "string"},
        "description": "With `1` the events of a stream have ids, and `/v1/streams/{id}` continues the stream on \
                        another connection."})
}

fn tenant_header() -> Value {
    json!({"name": "x-baton-tenant", "in": "header",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"},
        "description": "Set by a gateway: prefix caches are shared only within a tenant. Ignored if the request has an \
                        API key that is not marked as a gateway."})
}

fn session_header() -> Value {
    json!({"name": "x-baton-session", "in": "header",
        "schema": {"type": "string", "maxLength": 256},
        "description": "Id of the session (conversation) to which the request belongs. Later turns have the first \
                        turn's position in the router's queue. With KV tiers nodes keep the session's KV for the \
                        next turn."})
}

fn keep_header() -> Value {
    json!({"name": "x-baton-keep-ms", "in": "header",
        "schema": {"type": "string", "pattern": "^([0-9]{1,5}|[1-5][0-9]{5}|600000)$"},
        "description": "Milliseconds for which nodes keep the KV for the next turn. By default they learn it."})
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use telemetry::{Resource, Telemetry, TelemetryConfig};

    use super::*;
    use crate::http::{
        fields::RequestFields,
        messages::{read_counted, read_messages},
        pooling::{EmbeddingOptions, POOLING_UNSUPPORTED, RerankRequest, text_pairs},
        request_fields::{prompts, read_chat, read_completion},
        responses, table,
        tokenize::prompt_source,
    };

    #[tokio::test]
    async fn the_description_has_every_route_and_no_other() {
        let resource = Resource { service: "baton-router".into(), instance: "test".into() };
        let config = TelemetryConfig::default();
        let telemetry = Telemetry::start(&config, resource).unwrap();
        let served: BTreeSet<(String, String)> = table(telemetry.metrics(), 0)
            .into_iter()
            .flat_map(|route| {
                let path = route.path.replace("{*", "{");
                route.methods.split(", ").map(move |method| (path.clone(), method.to_lowercase()))
            })
            .collect();
        let document = document();
        let described =
            document["paths"].as_object().unwrap().iter().flat_map(|(path, methods)| {
                methods.as_object().unwrap().keys().map(|method| (path.clone(), method.clone()))
            });
        assert_eq!(described.collect::<BTreeSet<_>>(), served);
    }

    /// Asserts that the handler reads exactly the fields of the schema.
    fn is_described(schema: &str, bodies: &[&str], read: impl Fn(&RequestFields<'_>)) {
        let mut asked = BTreeSet::from(["model".to_owned()]);
        for body in bodies {
            let fields = RequestFields::parse(body.as_bytes()).unwrap();
            read(&fields);
            asked.extend(std::mem::take(&mut *fields.asked.lock().unwrap()));
        }
        let document = document();
        let described = &document["components"]["schemas"][schema]["properties"];
        let described: BTreeSet<String> = described.as_object().unwrap().keys().cloned().collect();
        assert_eq!(described, asked, "{schema}");
    }

    #[test]
    fn the_description_has_every_field_that_is_read_and_no_other() {
        let chat = r#"{"messages": [{"role": "user", "content": "hi"}]}"#;
        is_described("ChatCompletionRequest", &[chat], |fields| {
            read_chat(fields).unwrap();
        });
        is_described("CompletionRequest", &[r#"{"prompt": "hi"}"#], |fields| {
            read_completion(fields).unwrap();
        });
        let messages = r#"{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}"#;
        is_described("MessagesRequest", &[messages], |fields| {
            read_messages(fields).unwrap();
        });
        is_described("MessagesCountRequest", &[chat], |fields| {
            read_counted(fields).unwrap();
        });
        is_described("ResponsesRequest", &[r#"{"input": "hi"}"#], |fields| {
            responses::read_fields(fields).unwrap();
        });
        let refuse_others = |fields: &RequestFields<'_>| {
            POOLING_UNSUPPORTED.iter().for_each(|name| fields.unsupported(name, &[], "").unwrap());
        };
        is_described("EmbeddingRequest", &[r#"{"input": "hi"}"#], |fields| {
            refuse_others(fields);
            prompts(fields, "input").unwrap();
            EmbeddingOptions::read(fields).unwrap();
        });
        is_described("RerankRequest", &[r#"{"query": "a", "documents": ["b"]}"#], |fields| {
            refuse_others(fields);
            RerankRequest::read(fields).unwrap();
        });
        is_described("ScoreRequest", &[r#"{"text_1": "a", "text_2": "b"}"#], |fields| {
            refuse_others(fields);
            text_pairs(fields).unwrap();
        });
        is_described("TokenizeRequest", &[chat, r#"{"prompt": "hi"}"#], |fields| {
            prompt_source(fields).unwrap();
            fields.boolean("return_token_strs").unwrap();
        });
    }

    #[test]
    fn openapi_references_resolve_and_no_schema_is_unused() {
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
        let document = document();
        let mut found = BTreeSet::new();
        references(&document, &mut found);
        let schemas = document["components"]["schemas"].as_object().unwrap();
        assert_eq!(schemas.keys().cloned().collect::<BTreeSet<_>>(), found);
    }
}
