//! Required and strict tool calls: the constraints that nodes receive, over HTTP and gRPC.

mod common;

use common::{Cluster, client::text_of, encode, grpc_channel, model_text, node::END, settings};
use proto::v1::{
    CallableFunction, ChatMessage, ChatRequest, Conversation, FinishReason, GenerateOptions,
    Grammar, Role, Tool, ToolCall, ToolCalls, ToolChoice, ToolChoiceMode, generate_response::Event,
    grammar::Kind, inference_client::InferenceClient, tool_calls::Alternative, tool_choice::Choice,
};
use serde_json::{Value, json};
use tonic::Code;

use crate::common::node::ScriptedNode;

const HERMES: &str = r#"{%- for tool in tools or [] %}{{- tool | tojson + '<tool_call>\n' }}{%- endfor %}
{%- for message in messages %}{{- message.role + ':' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{- '[' + call.id + call.function.name + ']' }}{%- endfor %}
{{- message.tool_call_id or '' }}{{- '\n' }}{%- endfor %}"#;

const LLAMA: &str = r#"{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{{- '{"name": function name, "parameters": dictionary}<|python_tag|>' }}
{%- for message in messages %}{{- message.content }}{%- endfor %}"#;

const WEATHER: &str =
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Köln\"}}\n</tool_call>";
const PATH: &str = "/v1/chat/completions";

fn city() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
}

fn function(name: &str, more: Value) -> Value {
    let mut function = json!({"name": name});
    function.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({"type": "function", "function": function})
}

fn chat(more: Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "Weather in Cologne?"}],
        "tools": [function("weather", json!({"parameters": city()})), function("clock", json!({}))],
        "max_tokens": 200,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn named(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name}})
}

/// Returns the tool-call constraint of the node's last request.
fn told(cluster: &Cluster) -> Option<ToolCalls> {
    match cluster.decode[0].calls().last().unwrap().attempt.grammar.clone()?.kind? {
        Kind::ToolCalls(calls) => Some(calls),
        other => panic!("{other:?}"),
    }
}

fn names(calls: &ToolCalls) -> Vec<&str> {
    calls.functions.iter().map(|function| function.name.as_str()).collect()
}

fn schema(function: &CallableFunction) -> Value {
    serde_json::from_str(function.arguments_schema.as_deref().unwrap_or("null")).unwrap()
}

#[tokio::test]
async fn required_call_constrains_the_answer() {
    let cluster = Cluster::start_with_template(HERMES, WEATHER).await;
    for (more, functions, several, reason) in [
        (json!({"tool_choice": "required"}), vec!["weather", "clock"], true, "tool_calls"),
        (
            json!({"tool_choice": "required", "parallel_tool_calls": false}),
            vec!["weather", "clock"],
            false,
            "tool_calls",
        ),
        // OpenAI and vLLM report the finish reason stop for a named function.
        (json!({"tool_choice": named("weather")}), vec!["weather"], false, "stop"),
    ] {
        let whole = cluster.client.post(PATH, &chat(more.clone())).await.json();
        let calls = told(&cluster).unwrap();
        assert_eq!((names(&calls), calls.several), (functions, several), "{more}");
        assert_eq!(calls.alternative, None);
        assert_eq!(calls.before_name, "<tool_call>\n{\"name\": ");
        assert_eq!(schema(&calls.functions[0]), city());
        if let Some(clock) = calls.functions.get(1) {
            let nothing =
                json!({"type": "object", "properties": {}, "additionalProperties": false});
            assert_eq!(schema(clock), nothing);
        }
        let choice = &whole["choices"][0];
        assert_eq!(choice["finish_reason"], reason, "{whole}");
        assert_eq!(choice["message"]["content"], json!(null));
        let function = &choice["message"]["tool_calls"][0]["function"];
        assert_eq!(*function, json!({"name": "weather", "arguments": "{\"city\": \"Köln\"}"}));

        let mut streamed = chat(more);
        streamed["stream"] = true.into();
        let chunks = cluster.client.stream(PATH, &streamed).await.chunks().await;
        assert_eq!(text_of(&chunks, 0), "");
        let parts: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]).collect();
        let calls = parts.iter().filter_map(|part| part["delta"]["tool_calls"].as_array());
        let functions: Vec<&Value> = calls.flatten().map(|call| &call["function"]).collect();
        assert_eq!((functions.len(), &functions[0]["name"]), (2, &json!("weather")));
        assert_eq!(functions[1]["arguments"], function["arguments"]);
        assert_eq!(parts.last().unwrap()["finish_reason"], reason);
    }
}

#[tokio::test]
async fn strict_function_is_constrained_with_automatic_tool_choice() {
    let cluster = Cluster::start_with_template(HERMES, WEATHER).await;
    let tools = json!([
        function("weather", json!({"parameters": city(), "strict": true})),
        function("clock", json!({"parameters": city(), "strict": false}))
    ]);
    let answer = cluster.client.post(PATH, &chat(json!({"tools": tools}))).await.json();
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls", "{answer}");
    let calls = told(&cluster).unwrap();
    assert_eq!((names(&calls), calls.several), (vec!["weather", "clock"], true));
    let Some(Alternative::Text(free_text)) = &calls.alternative else { panic!("{calls:?}") };
    assert_eq!((free_text.mark.as_str(), &free_text.never_begins), ("<tool_call>", &None));
    assert_eq!(schema(&calls.functions[0]), city());
    assert_eq!(calls.functions[1].arguments_schema, None);
    // Without `tool_choice` calls are not constrained; with `tool_choice` none no function is
    // strict.
    for more in [json!({}), json!({"tools": tools, "tool_choice": "none"})] {
        assert_eq!(cluster.client.post(PATH, &chat(more)).await.status, 200);
        assert_eq!(told(&cluster), None);
    }
}

#[tokio::test]
async fn response_format_applies_to_answers_without_calls() {
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": city()}});
    let cluster = Cluster::start_with_template(HERMES, "{\"city\": \"Bonn\"}").await;
    let body = chat(json!({"response_format": format}));
    let answer = cluster.client.post(PATH, &body).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "{\"city\": \"Bonn\"}", "{answer}");
    let calls = told(&cluster).unwrap();
    let Some(Alternative::JsonSchema(text)) = &calls.alternative else { panic!("{calls:?}") };
    assert_eq!(serde_json::from_str::<Value>(text).unwrap(), city());
    assert_eq!(calls.mark, "<tool_call>");
    assert!(calls.functions.iter().all(|function| function.arguments_schema.is_none()));
    // A required call leaves no content for the response format, which is still validated.
    let demanded = chat(json!({"response_format": format, "tool_choice": "required"}));
    assert_eq!(cluster.client.post(PATH, &demanded).await.status, 200);
    assert_eq!(told(&cluster).unwrap().alternative, None);
    let wrong = chat(json!({"regex": "a(", "tool_choice": "required"}));
    let answer = cluster.client.post(PATH, &wrong).await;
    assert_eq!((answer.status.as_u16(), &answer.error()["param"]), (400, &json!("regex")));

    let cluster = Cluster::start_with_template(LLAMA, "{}").await;
    let answer = cluster.client.post(PATH, &body).await;
    let param = &answer.error()["param"];
    assert_eq!((answer.status.as_u16(), param), (400, &json!("response_format")));
    assert!(answer.message().contains("another tool_choice than auto"), "{answer:?}");
    let body = chat(json!({"tool_choice": named("clock")}));
    assert_eq!(cluster.client.post(PATH, &body).await.status, 200);
    assert_eq!(told(&cluster).unwrap().before_name, "{\"name\": ");
}

#[tokio::test]
async fn structural_tag_constrains_the_answer_after_its_trigger() {
    let said = "Let me see. <function=weather>{\"city\": \"Bonn\"}</function>";
    let cluster = Cluster::start_with_template(HERMES, said).await;
    let structure = |schema: Value| json!({"begin": "<function=weather>", "schema": schema, "end": "</function>"});
    let body = |schema: Value| {
        let format = json!({"type": "structural_tag", "triggers": ["<function="],
            "structures": [structure(schema)]});
        chat(json!({"tools": null, "response_format": format}))
    };
    let answer = cluster.client.post(PATH, &body(city())).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], said, "{answer}");
    let calls = told(&cluster).unwrap();
    assert_eq!((names(&calls), calls.several), (vec!["weather>"], true));
    assert_eq!((calls.before_name.as_str(), calls.bare_name), ("<function=", true));
    assert_eq!(calls.after_arguments, "</function>");
    let Some(Alternative::Text(text)) = &calls.alternative else { panic!("{calls:?}") };
    assert_eq!(text.mark, "<function=");
    assert_eq!(schema(&calls.functions[0]), city());

    let answer = cluster.client.post(PATH, &body(json!({"type": "strange"}))).await;
    let param = &answer.error()["param"];
    assert_eq!(
        (answer.status.as_u16(), param),
        (400, &json!("response_format.structures[0].schema"))
    );
    assert!(answer.message().contains("is not supported"), "{answer:?}");
    let mut with_tools = body(city());
    with_tools["tools"] = json!([function("clock", json!({}))]);
    let answer = cluster.client.post(PATH, &with_tools).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.error()["param"]),
        (400, &json!("response_format"))
    );
    assert!(answer.message().contains("is given together with tools"), "{answer:?}");
}

/// Checks that valid tools are accepted and invalid ones are rejected.
#[tokio::test]
async fn invalid_response_format_is_rejected_with_its_field() {
    let cluster = Cluster::start_with_template(HERMES, WEATHER).await;
    let deep = (0..60).fold(json!(true), |inner, _| json!({"type": "array", "items": inner}));
    let format = |schema: Value| {
        let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
        json!({"response_format": format})
    };
    let field = "response_format.json_schema.schema";
    for (more, param) in [
        (format(json!({"type": "x"})), field),
        (format(deep), field),
        (json!({"regex": "a("}), "regex"),
    ] {
        let with = |tools: bool| {
            let mut body = chat(more.clone());
            if !tools {
                body.as_object_mut().unwrap().remove("tools");
            }
            body
        };
        for tools in [false, true] {
            let answer = cluster.client.post(PATH, &with(tools)).await;
            let told = &answer.error()["param"];
            assert_eq!((answer.status.as_u16(), told), (400, &json!(param)), "{answer:?}");
        }
    }
    assert!(cluster.decode[0].calls().is_empty());
}

#[tokio::test]
async fn unsupported_schemas_are_rejected_with_their_function() {
    let cluster = Cluster::start_with_template(HERMES, WEATHER).await;
    let deep = (0..60).fold(json!(true), |inner, _| json!({"type": "array", "items": inner}));
    let deep = json!({"type": "object", "properties": {"a": deep}});
    let field = "tools[1].function.parameters";
    let huge = json!({"type": "object", "properties": {"a": {"enum": ["x".repeat(70_000)]}}});
    for (parameters, param, words) in [
        (deep, field, "of the function \"f\" nests 62 deep; allowed: at most 32"),
        (huge, field, "of the function \"f\" has 700"),
        (json!({"$ref": "https://example.com/s"}), field, "of the function \"f\" is not supported"),
        (
            json!({"properties": {"a": {"type": "x"}}}),
            field,
            "of the function \"f\" is not supported",
        ),
        (
            json!({"type": "string"}),
            "tools[1].function.parameters.type",
            "of the function \"f\" is \"string\"; allowed: object",
        ),
    ] {
        let tools = |strict: bool| {
            let f = function("f", json!({"parameters": parameters, "strict": strict}));
            json!([function("clock", json!({})), f])
        };
        for more in [
            json!({"tools": tools(false), "tool_choice": "required"}),
            json!({"tools": tools(false), "tool_choice": named("f")}),
            json!({"tools": tools(true)}),
        ] {
            let answer = cluster.client.post(PATH, &chat(more)).await;
            assert_eq!(answer.status, 400, "{answer:?}");
            assert_eq!(answer.error()["param"], param, "{answer:?}");
            assert!(answer.message().contains(words), "{answer:?}");
        }
        // This schema is not enforced, only rendered into the template.
        if parameters.to_string().len() < 2000 {
            let answer = cluster.client.post(PATH, &chat(json!({"tools": tools(false)}))).await;
            assert_eq!(answer.status, 200, "{answer:?}");
        }
    }
    assert_eq!(cluster.decode[0].calls().len(), 4);
}

/// Returns a router with a decode node and a prefill node that announce these grammar versions.
async fn announcing(prefill: Option<u32>, decode: u32) -> Cluster {
    let node = |role, name: &str, version| {
        let node = ScriptedNode::start(role, name);
        node.answer_with(&encode("yes"));
        node.announce_grammars(version);
        node
    };
    let prefill = prefill.map(|version| node(Role::Prefill, "prefill-0", version));
    let decode = vec![node(Role::Decode, "decode-0", decode)];
    Cluster::start_over(settings(), prefill.into_iter().collect(), decode).await
}

#[tokio::test]
async fn nodes_receive_no_grammar_version_that_they_do_not_announce() {
    let long = json!({"prompt": "It may rain. ".repeat(40), "max_tokens": 5});
    let with = |regex: bool| {
        let mut body = long.clone();
        if regex {
            body["regex"] = "yes|no".into();
        }
        body
    };
    // An older release would ignore the constraint.
    let cluster = announcing(None, 0).await;
    let answer = cluster.client.post("/v1/completions", &with(true)).await;
    let code = &answer.error()["code"];
    assert_eq!((answer.status.as_u16(), code), (501, &json!("grammar_not_supported")));
    assert_eq!(answer.error()["param"], "regex");
    assert!(cluster.decode[0].calls().is_empty());
    let mut client = InferenceClient::new(grpc_channel(&cluster).await);
    let grammar = Some(Grammar { kind: Some(Kind::Regex("yes|no".into())), thought: None });
    let options = Some(GenerateOptions { grammar, ..Default::default() });
    let request = ChatRequest { options, ..grpc_chat() };
    let status = client.chat(request).await.err().unwrap();
    assert_eq!(status.code(), Code::Unimplemented, "{status:?}");
    assert_eq!(cluster.client.post("/v1/completions", &with(false)).await.status, 200);

    // Only the newer of two nodes receives the request.
    let cluster = announcing(Some(0), 2).await;
    assert_eq!(cluster.client.post("/v1/completions", &with(true)).await.status, 200);
    assert!(cluster.prefill[0].calls().is_empty());
    assert!(cluster.decode[0].calls()[0].attempt.grammar.is_some());
    assert_eq!(cluster.client.post("/v1/completions", &with(false)).await.status, 200);
    assert_eq!(cluster.prefill[0].calls().len(), 1);
}

#[tokio::test]
async fn nodes_without_tool_call_support_receive_no_tool_calls() {
    let cluster = {
        let node = ScriptedNode::start(Role::Decode, "decode-0");
        node.answer_with(&encode(WEATHER));
        node.announce_grammars(1);
        let options =
            text::ModelTextOptions { chat_template: Some(HERMES.to_owned()), ..Default::default() };
        let text = text::ModelText::open_with(common::model_path(), options).unwrap();
        let model = router::ModelSource { name: common::node::MODEL.to_owned(), text: text.into() };
        Cluster::start_sources(settings(), vec![model], vec![], vec![node]).await
    };
    let answer = cluster.client.post(PATH, &chat(json!({"tool_choice": "required"}))).await;
    assert_eq!((answer.status.as_u16(), &answer.error()["param"]), (501, &json!("tools")));
    assert!(cluster.decode[0].calls().is_empty());
    let object = json!({"tools": [], "response_format": {"type": "json_object"}});
    assert_eq!(cluster.client.post(PATH, &chat(object)).await.status, 200);
}

fn grpc_tool(name: &str, parameters: &str, strict: bool) -> Tool {
    let parameters_json = parameters.to_owned();
    Tool { name: name.into(), description: "Tells.".into(), parameters_json, strict }
}

fn grpc_chat() -> ChatRequest {
    let message = |role: &str, content: &str| ChatMessage {
        role: role.into(),
        content: content.into(),
        ..Default::default()
    };
    let messages = vec![message("user", "Weather?")];
    let conversation = Some(Conversation { messages, ..Default::default() });
    ChatRequest { conversation, ..Default::default() }
}

fn choice(choice: Choice) -> Option<ToolChoice> {
    Some(ToolChoice { choice: Some(choice) })
}

/// Returns text, calls and finish reason.
async fn grpc_answer(
    cluster: &Cluster,
    request: ChatRequest,
) -> Result<(String, Vec<ToolCall>, FinishReason), tonic::Status> {
    let mut client = InferenceClient::new(grpc_channel(cluster).await);
    let mut events = client.chat(request).await?.into_inner();
    let (mut text, mut calls, mut reason) = (String::new(), Vec::new(), FinishReason::Unspecified);
    while let Some(response) = events.message().await? {
        match response.event.unwrap() {
            Event::Tokens(tokens) => {
                text += &tokens.text;
                calls.extend(tokens.tool_calls);
            }
            Event::Finished(finished) => {
                reason = finished.reason();
                text += &finished.text;
                calls.extend(finished.tool_calls);
            }
        }
    }
    Ok((text, calls, reason))
}

#[tokio::test]
async fn grpc_tools_and_calls_match_http() {
    let written = format!("I look.\n{WEATHER}\n{WEATHER}");
    let cluster = Cluster::start_with_template(HERMES, &written).await;
    let tools =
        vec![grpc_tool("weather", &city().to_string(), false), grpc_tool("clock", "", false)];
    let with = |tool_choice| ChatRequest { tools: tools.clone(), tool_choice, ..grpc_chat() };
    let (text, calls, reason) = grpc_answer(&cluster, with(None)).await.unwrap();
    assert_eq!((text.as_str(), reason), ("I look.", FinishReason::ToolCalls));
    assert_eq!(calls.iter().map(|call| call.index).collect::<Vec<_>>(), [0, 1]);
    assert_ne!(calls[0].id, calls[1].id);
    for call in &calls {
        assert_eq!(
            (call.name.as_str(), call.arguments_json.as_str()),
            ("weather", "{\"city\": \"Köln\"}")
        );
    }
    assert_eq!(told(&cluster), None);
    // The prompt equals the one over HTTP.
    let prompt = |cluster: &Cluster| {
        let calls = cluster.decode[0].calls();
        model_text().tokenizer().decode(&calls.last().unwrap().attempt.tokens, false)
    };
    let over_grpc = prompt(&cluster);
    let http = json!({"messages": [{"role": "user", "content": "Weather?"}], "tools": [
        function("weather", json!({"description": "Tells.", "parameters": city()})),
        function("clock", json!({"description": "Tells."}))]});
    assert_eq!(cluster.client.post(PATH, &http).await.status, 200);
    assert_eq!(over_grpc, prompt(&cluster));
    assert!(over_grpc.contains("\"clock\""), "{over_grpc}");

    let required = choice(Choice::Mode(ToolChoiceMode::Required.into()));
    let one = ChatRequest { parallel_tool_calls: Some(false), ..with(required) };
    let (_, calls, reason) = grpc_answer(&cluster, one).await.unwrap();
    assert_eq!((calls.len(), reason), (1, FinishReason::ToolCalls));
    let calls = told(&cluster).unwrap();
    assert_eq!((names(&calls), calls.several), (vec!["weather", "clock"], false));
    let named = choice(Choice::Function("clock".into()));
    grpc_answer(&cluster, with(named)).await.unwrap();
    assert_eq!(names(&told(&cluster).unwrap()), ["clock"]);
    let none = choice(Choice::Mode(ToolChoiceMode::None.into()));
    let (text, calls, reason) = grpc_answer(&cluster, with(none)).await.unwrap();
    assert_eq!((text, calls, reason), (written, vec![], FinishReason::Stop));
    assert!(!prompt(&cluster).contains("clock"));
}

#[tokio::test]
async fn grpc_conversations_hold_calls_and_their_results() {
    let cluster = Cluster::start_with_template(HERMES, "Rain.").await;
    let call = ToolCall {
        index: 0,
        id: "c1".into(),
        name: "weather".into(),
        arguments_json: "{\"city\": \"Köln\"}".into(),
    };
    let message = |role: &str, content: &str| ChatMessage {
        role: role.into(),
        content: content.into(),
        ..Default::default()
    };
    let messages = vec![
        ChatMessage { tool_calls: vec![call], ..message("assistant", "") },
        ChatMessage { tool_call_id: "c1".into(), ..message("tool", "wet") },
    ];
    let conversation = Some(Conversation { messages, ..Default::default() });
    let request = ChatRequest { conversation, ..grpc_chat() };
    grpc_answer(&cluster, request).await.unwrap();
    let prompt = &cluster.decode[0].calls()[0].attempt.tokens;
    let shown = model_text().tokenizer().decode(prompt, false);
    assert_eq!(shown, "assistant:[c1weather]\ntool:wetc1\n");
    assert!(!prompt.contains(&END));
}

#[tokio::test]
async fn grpc_rejects_invalid_tools_and_tool_choices_by_field() {
    let cluster = Cluster::start_with_template(HERMES, WEATHER).await;
    let tools = || vec![grpc_tool("f", "{}", false)];
    let with = |tools, tool_choice| ChatRequest { tools, tool_choice, ..grpc_chat() };
    let required = || choice(Choice::Mode(ToolChoiceMode::Required.into()));
    let tokens_only = GenerateOptions { tokens_only: true, ..Default::default() };
    let bad_call = ToolCall { arguments_json: "7".into(), ..Default::default() };
    let messages = vec![ChatMessage { tool_calls: vec![bad_call], ..Default::default() }];
    let calls_grammar =
        Grammar { kind: Some(Kind::ToolCalls(ToolCalls::default())), thought: None };
    let with_grammar = GenerateOptions { grammar: Some(calls_grammar), ..Default::default() };
    for (request, words) in [
        (with(vec![grpc_tool("", "", false)], None), "tools[0].name is \"\"; allowed: 1 to 256"),
        (with(vec![grpc_tool("f", "[]", false)], None), "tools[0].parameters_json is invalid: "),
        (
            with(vec![grpc_tool("f", "{\"type\":\"x\"}", true)], None),
            "tools[0].parameters_json.type of the function \"f\" is \"x\"; allowed: object",
        ),
        (
            with(
                vec![grpc_tool("f", "{\"properties\":{\"a\":{\"type\":\"x\"}}}", false)],
                required(),
            ),
            "tools[0].parameters_json of the function \"f\" is not supported",
        ),
        (with(vec![grpc_tool("f", "", false); 129], None), "tools has 129 tools; allowed"),
        (with(vec![], required()), "tool_choice demands a call"),
        (with(tools(), choice(Choice::Function("g".into()))), "tool_choice is \"g\"; allowed"),
        (with(tools(), choice(Choice::Mode(9))), "tool_choice.mode is 9; allowed"),
        (with(tools(), Some(ToolChoice { choice: None })), "tool_choice is empty; allowed"),
        (ChatRequest { options: Some(tokens_only), ..with(tools(), None) }, "options.tokens_only"),
        (
            ChatRequest { options: Some(with_grammar), ..grpc_chat() },
            "options.grammar.kind is tool",
        ),
        (
            ChatRequest {
                conversation: Some(Conversation { messages, ..Default::default() }),
                ..grpc_chat()
            },
            "conversation.messages[0].tool_calls[0].arguments_json is invalid: ",
        ),
    ] {
        let status = grpc_answer(&cluster, request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert!(status.message().starts_with(words), "{}", status.message());
    }
    assert!(cluster.decode[0].calls().is_empty());
}
