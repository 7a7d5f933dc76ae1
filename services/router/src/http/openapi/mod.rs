//! `/openapi.json`: the HTTP API in OpenAPI 3.1, for client generators and for tests.
//!
//! Written by hand, with the limits that requests are checked against. Tests hold it to the truth:
//! here, that it has exactly the routes that are served and the fields that are read; against a
//! whole cluster, that answers are as described whatever is sent.

mod requests;
mod responses;

use serde_json::{Map, Value, json};

/// The whole description.
pub fn document() -> Value {
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "OpenAI's API for text and chat, with vLLM's additions. Fields that are \
                not described are ignored. A refusal names the field, its value and what is allowed.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths(),
        "components": {"schemas": schemas()},
    })
}

fn paths() -> Value {
    let post = |id: &str, about: &str, request: &str, answers: Value| {
        let mut parameters = vec![label_header()];
        if id.starts_with("create") {
            parameters.extend([figures_header(), tenant_header()]);
        }
        let content = json!({"schema": reference(request), "example": requests::example(request)});
        let body = json!({"required": true, "content": {"application/json": content}});
        json!({"post": {
            "operationId": id, "summary": about, "parameters": parameters, "requestBody": body,
            "responses": answers,
        }})
    };
    let get = |id: &str, about: &str, parameters: Value, answers: Value| {
        json!({"get": {
            "operationId": id, "summary": about, "parameters": parameters, "responses": answers,
        }})
    };
    let label = || json!([label_header()]);
    let generated = |whole: &str, chunk: &str| {
        let mut ok = json_answer("The answer, whole or as a stream.", whole);
        // What one event is: this version of OpenAPI has no other place for it.
        let content = json!({"anyOf": [reference(chunk), reference("Error")]});
        ok["content"]["text/event-stream"] = json!({"schema": {
            "type": "object",
            "required": ["data"],
            "properties": {"data": {"anyOf": [
                {"const": "[DONE]"},
                {"type": "string", "contentMediaType": "application/json", "contentSchema": content},
            ]}},
            "description": "An event. A stream that ends well ends with `[DONE]`; one that fails, with \
                an Error.",
        }});
        with_errors(ok, &[400, 404, 408, 413, 429, 500, 501, 502, 503, 504])
    };
    let text_errors = &[400, 404, 408, 413, 429, 500, 503, 504];
    let id = json!({
        "name": "id", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1},
        "description": "The name of a model, or an alias. It may hold slashes.",
    });
    let no_node = json_answer(
        "No decode node serves, the first nodes have still to meet, or the router drains.",
        "Health",
    );
    let text = |about: &str| {
        json!({"description": about, "headers": label_answered(),
            "content": {"text/plain": {"schema": {"type": "string"}}}})
    };
    let object = json!({"description": "This description.", "headers": label_answered(),
        "content": {"application/json": {"schema": {"type": "object"}}}});
    json!({
        "/v1/chat/completions": post(
            "createChatCompletion",
            "Answers a conversation",
            "ChatCompletionRequest",
            generated("ChatCompletion", "ChatCompletionChunk"),
        ),
        "/v1/completions": post(
            "createCompletion",
            "Goes on with a text",
            "CompletionRequest",
            generated("Completion", "CompletionChunk"),
        ),
        "/tokenize": post(
            "tokenize",
            "The token ids of a text or conversation",
            "TokenizeRequest",
            with_errors(json_answer("The token ids.", "Tokenized"), text_errors),
        ),
        "/detokenize": post(
            "detokenize",
            "The text of token ids",
            "DetokenizeRequest",
            with_errors(json_answer("The text.", "Detokenized"), text_errors),
        ),
        "/v1/models": get(
            "listModels",
            "Every name under which a model can be asked for",
            label(),
            with_errors(json_answer("The models.", "ModelList"), &[]),
        ),
        "/v1/models/{id}": get(
            "getModel",
            "One model",
            json!([label_header(), id]),
            with_errors(json_answer("The model.", "Model"), &[404]),
        ),
        "/health": get("health", "Whether requests can be served", label(), json!({
            "200": json_answer("They can.", "Health"),
            "503": no_node,
        })),
        "/live": get("live", "Whether the process works", label(), json!({"200": text("It does.")})),
        "/metrics": get("metrics", "Figures for Prometheus", label(), json!({"200": text("The figures.")})),
        "/openapi.json": get("openapi", "This description", label(), json!({"200": object})),
    })
}

fn schemas() -> Value {
    let mut all = Map::new();
    all.extend(requests::schemas());
    all.extend(responses::schemas());
    Value::Object(all)
}

fn reference(schema: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{schema}")})
}

fn json_answer(about: &str, schema: &str) -> Value {
    json!({"description": about, "headers": label_answered(),
        "content": {"application/json": {"schema": reference(schema)}}})
}

fn with_errors(ok: Value, statuses: &[u16]) -> Value {
    let mut answers = Map::from_iter([("200".to_owned(), ok)]);
    for &status in statuses {
        let about = match status {
            400 => "The body or a field is wrong.",
            404 => "There is no such model.",
            408 => "The client did not send or did not read.",
            413 => "The body is too large.",
            429 => "The router has as much to do as it takes.",
            501 => "The nodes are of a release that holds no answer to such a grammar.",
            502 => "Every attempt failed.",
            503 => "All nodes are busy, none is there, or the router stops.",
            504 => "The request's time is over.",
            _ => "A defect.",
        };
        let mut answer = json_answer(about, "Error");
        if matches!(status, 429 | 503) {
            answer["headers"]["retry-after"] =
                json!({"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}});
        }
        answers.insert(status.to_string(), answer);
    }
    Value::Object(answers)
}

fn label_header() -> Value {
    json!({"name": "x-request-id", "in": "header", "schema": {"type": "string"},
        "description": "The client's own name for the request; up to 128 visible characters of it are \
            echoed."})
}

fn label_answered() -> Value {
    json!({"x-request-id": {"description": "The client's name for the request, or one of ours.",
        "schema": {"type": "string"}, "required": true}})
}

fn figures_header() -> Value {
    json!({"name": "x-baton-figures", "in": "header", "schema": {"type": "string"},
        "description": "With `1` the answer has `baton`: what moved between which nodes."})
}

fn tenant_header() -> Value {
    json!({"name": "x-baton-tenant", "in": "header",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"},
        "description": "Set by a gateway: only requests of one tenant find each other's prompts cached."})
}
