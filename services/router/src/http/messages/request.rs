//! Fields of a request to `/v1/messages`: Anthropic's own, and Baton's for sampling and structured
//! output.

use grammar::Grammar;
use serde_json::{Map, Value, json};
use text::StopStrings;

use super::{conversation::Conversation, object};
use crate::{
    http::{
        fields::RequestFields,
        foreign_fields::read_with_foreign_fields,
        request_fields::{Unsupported, check_unsupported, options, template_variables},
    },
    request::{
        error::{FieldError, invalid_value, parse_field},
        options::{DefaultLength, RequestedGrammar, TOKENS},
        text_workers::{ChatSource, PromptSource},
        tools::{
            OfferedFunction, OfferedTools, RequestedToolChoice, TOOL_CHOICE, TOOLS, check_count,
            check_name,
        },
    },
    request_driver::{GenerationFields, stop_refused},
};

const MAX_TOKENS: &str = "max_tokens";
const STOP_SEQUENCES: &str = "stop_sequences";
const THINKING: &str = "thinking";
const THINKING_ALLOWED: &str = "an object with type adaptive, enabled, between_tools or disabled";
const SCHEMA: &str = "output_config.format.schema";
/// Smallest budget of thinking in tokens, as in Anthropic's API.
const BUDGET_TOKENS_MIN: u64 = 1024;

/// Unsupported fields of Anthropic's API that would change the answer, or where it is computed.
pub(in crate::http) const MESSAGES_UNSUPPORTED: [Unsupported; 7] = [
    ("echo", &["false"]),
    ("prompt_logprobs", &[]),
    ("container", &[]),
    ("inference_geo", &[]),
    ("mcp_servers", &["[]"]),
    ("speed", &["\"standard\""]),
    // The router drops no blocks of a conversation.
    (
        "context_management",
        &[
            "{}",
            r#"{"edits":[]}"#,
            r#"{"edits":[{"type":"clear_thinking_20251015","keep":"all"}]}"#,
        ],
    ),
];

/// Fields of other servers that are Anthropic's as well.
pub(in crate::http) const OWN_FIELDS: [&str; 1] = [STOP_SEQUENCES];

/// Fields of a body that decide how the reply is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::http) struct MessageFields {
    pub is_streamed: bool,
    /// Maximum number of generated tokens that the client set.
    pub max_tokens: u32,
    /// Whether the text of thinking is sent.
    pub shows_thinking: bool,
}

/// Reads the fields of `/v1/messages`.
pub(in crate::http) fn read_messages(
    fields: &RequestFields<'_>,
) -> Result<(GenerationFields, MessageFields), FieldError> {
    read_with_foreign_fields(fields, &OWN_FIELDS, read_own_messages)
}

fn read_own_messages(
    fields: &RequestFields<'_>,
) -> Result<(GenerationFields, MessageFields), FieldError> {
    check_unsupported(fields, &MESSAGES_UNSUPPORTED)?;
    check_ignored(fields)?;
    let Some(max_tokens) = fields.count(MAX_TOKENS, TOKENS)? else {
        let problem = format!("is missing; allowed: a whole number from 1 to {}", TOKENS.end());
        return Err(FieldError::new(MAX_TOKENS, problem));
    };
    let mut options = options(fields)?;
    let stops: Option<Vec<String>> = fields.value(STOP_SEQUENCES, "a list of strings")?;
    let stops = stops.unwrap_or_default();
    StopStrings::new(&stops, false).map_err(|error| stop_refused(STOP_SEQUENCES, &error))?;
    options.stop.extend(stops);
    let output = OutputConfig::read(fields)?;
    if let (Some(format), Some(other)) = (&output.format, &options.grammar) {
        let problem = format!("is given together with {}; allowed: one of them", other.field);
        return Err(FieldError::new(format.field, problem));
    }
    options.grammar = options.grammar.or(output.format.clone());
    let thinking = Thinking::read(fields, Some(max_tokens))?;
    let reply = MessageFields {
        is_streamed: fields.boolean("stream")?.unwrap_or(false),
        max_tokens,
        shows_thinking: thinking.is_shown,
    };
    let tools = tools(fields)?;
    let chat = chat_source(fields, tools.as_ref(), &output, thinking)?;
    let parsed = GenerationFields {
        prompt_only: false,
        prompts: vec![PromptSource::Chat(chat)],
        choices: 1,
        options,
        // A limit beyond the rest of the context is no error: the answer may end earlier.
        default_length: DefaultLength::Tokens(max_tokens),
        max_tokens_name: MAX_TOKENS,
        tools,
    };
    Ok((parsed, reply))
}

/// Reads the fields of `/v1/messages/count_tokens`.
pub(in crate::http) fn read_counted(
    fields: &RequestFields<'_>,
) -> Result<PromptSource, FieldError> {
    read_with_foreign_fields(fields, &OWN_FIELDS, |fields| {
        check_unsupported(fields, &MESSAGES_UNSUPPORTED)?;
        let output = OutputConfig::read(fields)?;
        let thinking = Thinking::read(fields, None)?;
        let tools = tools(fields)?;
        chat_source(fields, tools.as_ref(), &output, thinking).map(PromptSource::Chat)
    })
}

/// Checks the fields that have no effect on the answer.
fn check_ignored(fields: &RequestFields<'_>) -> Result<(), FieldError> {
    match fields.raw("service_tier") {
        None | Some(r#""auto""# | r#""standard_only""#) => {}
        Some(other) => return Err(invalid_value("service_tier", other, "auto or standard_only")),
    }
    fields.value::<Map<String, Value>>("metadata", "an object").map(drop)
}

fn chat_source(
    fields: &RequestFields<'_>,
    tools: Option<&OfferedTools>,
    output: &OutputConfig,
    thinking: Thinking,
) -> Result<ChatSource, FieldError> {
    let Conversation { messages, continues, bytes } = Conversation::read(fields)?;
    let mut template_kwargs = template_variables(fields)?;
    let mut set = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            template_kwargs.entry(name).or_insert(value);
        }
    };
    set("enable_thinking", thinking.is_enabled.map(Value::Bool));
    set("reasoning_effort", output.effort.map(Value::from));
    let further = [fields.raw("chat_template_kwargs"), fields.raw(TOOLS)];
    Ok(ChatSource {
        field: "messages",
        messages,
        tools: tools.map_or(Value::Null, |tools| tools.definitions.clone()),
        add_generation_prompt: !continues,
        continue_final_message: continues,
        template_kwargs,
        bytes: bytes + further.into_iter().flatten().map(str::len).sum::<usize>(),
    })
}

/// The field `thinking`.
#[derive(Clone, Copy, Debug)]
struct Thinking {
    /// `None` leaves the choice to the chat template.
    is_enabled: Option<bool>,
    is_shown: bool,
}

impl Thinking {
    fn read(fields: &RequestFields<'_>, max_tokens: Option<u32>) -> Result<Self, FieldError> {
        let thinking: Option<Value> = fields.value(THINKING, THINKING_ALLOWED)?;
        let Some(thinking) = thinking else {
            return Ok(Self { is_enabled: None, is_shown: true });
        };
        let get = |name| thinking.get(name).unwrap_or(&Value::Null);
        let is_enabled = match get("type").as_str() {
            // The model decides whether it thinks, as far as its template lets it.
            Some("adaptive" | "between_tools") => true,
            Some("enabled") => {
                let budget = get("budget_tokens");
                let below = max_tokens.map_or(u64::MAX, u64::from);
                let in_range = |tokens: &u64| (BUDGET_TOKENS_MIN..below).contains(tokens);
                if budget.as_u64().filter(in_range).is_none() {
                    let field = "thinking.budget_tokens";
                    let allowed =
                        format!("a whole number from {BUDGET_TOKENS_MIN}, below max_tokens");
                    return Err(invalid_value(field, &budget.to_string(), &allowed));
                }
                true
            }
            Some("disabled") => false,
            _ => return Err(invalid_value(THINKING, &thinking.to_string(), THINKING_ALLOWED)),
        };
        let is_shown = match get("display") {
            Value::Null => true,
            Value::String(word) if word == "summarized" => true,
            Value::String(word) if word == "omitted" => false,
            other => {
                let allowed = "summarized or omitted";
                return Err(invalid_value("thinking.display", &other.to_string(), allowed));
            }
        };
        Ok(Self { is_enabled: Some(is_enabled), is_shown })
    }
}

/// The field `output_config`.
struct OutputConfig {
    /// Value of the template variable `reasoning_effort`.
    effort: Option<&'static str>,
    format: Option<RequestedGrammar>,
}

impl OutputConfig {
    fn read(fields: &RequestFields<'_>) -> Result<Self, FieldError> {
        const NAME: &str = "output_config";
        const FORMAT: &str = "output_config.format";
        let allowed = "an object with effort and format";
        let config: Map<String, Value> = fields.value(NAME, allowed)?.unwrap_or_default();
        let effort = match config.get("effort").unwrap_or(&Value::Null) {
            Value::Null => None,
            Value::String(word) if word == "low" => Some("low"),
            Value::String(word) if word == "medium" => Some("medium"),
            // Templates know no higher effort.
            Value::String(word) if ["high", "xhigh", "max"].contains(&word.as_str()) => {
                Some("high")
            }
            other => {
                let allowed = "low, medium, high, xhigh or max";
                return Err(invalid_value("output_config.effort", &other.to_string(), allowed));
            }
        };
        let format = config.get("format").filter(|format| !format.is_null());
        let schema = format.map(|format| {
            let format = object(FORMAT, format)?;
            let kind = format.get("type").unwrap_or(&Value::Null);
            if kind != "json_schema" {
                let field = "output_config.format.type";
                return Err(invalid_value(field, &kind.to_string(), "json_schema"));
            }
            let schema = format.get("schema").unwrap_or(&Value::Null);
            object(SCHEMA, schema)?;
            Ok(RequestedGrammar::new(SCHEMA, Grammar::JsonSchema(schema.to_string())))
        });
        Ok(Self { effort, format: schema.transpose()? })
    }
}

/// Reads the tools that the model may call, if any.
fn tools(fields: &RequestFields<'_>) -> Result<Option<OfferedTools>, FieldError> {
    let list: Vec<Value> = fields.value(TOOLS, "a list of tools")?.unwrap_or_default();
    check_count(list.len())?;
    let mut definitions = Vec::with_capacity(list.len());
    let mut functions = Vec::with_capacity(list.len());
    for (index, tool) in list.iter().enumerate() {
        let field = format!("{TOOLS}[{index}]");
        let (definition, function) = offered(&field, object(&field, tool)?)?;
        definitions.push(definition);
        functions.push(function);
    }
    match tool_choice(fields)? {
        Some((choice, parallel)) => {
            OfferedTools::new(definitions.into(), functions, choice, parallel)
        }
        None => Ok(None),
    }
}

/// Returns a tool as chat templates expect it, and its function.
fn offered(field: &str, tool: &Map<String, Value>) -> Result<(Value, OfferedFunction), FieldError> {
    let get = |name| tool.get(name).filter(|value| !value.is_null());
    let refused = |name: &str, value: &Value, allowed: &str| {
        invalid_value(&format!("{field}.{name}"), &value.to_string(), allowed)
    };
    match get("type") {
        None => {}
        Some(kind) if kind == "custom" => {}
        Some(other) => return Err(refused("type", other, "custom")),
    }
    // Fields that change what the model sees.
    for (name, neutral) in [
        ("defer_loading", json!(false)),
        ("input_examples", json!([])),
        ("allowed_callers", json!(["direct"])),
    ] {
        if let Some(value) = get(name).filter(|value| **value != neutral) {
            return Err(refused(name, value, &format!("{neutral}, or no {name}")));
        }
    }
    let Some(Value::String(name)) = get("name") else {
        return Err(refused("name", tool.get("name").unwrap_or(&Value::Null), "a string"));
    };
    check_name(&format!("{field}.name"), name)?;
    let schema_field = format!("{field}.input_schema");
    let parameters = object(&schema_field, tool.get("input_schema").unwrap_or(&Value::Null))?;
    let strict = match get("strict") {
        None => false,
        Some(Value::Bool(strict)) => *strict,
        Some(other) => return Err(refused("strict", other, "true or false")),
    };
    let mut function = Map::new();
    function.insert("name".to_owned(), name.as_str().into());
    match get("description") {
        None => {}
        Some(text @ Value::String(_)) => {
            function.insert("description".to_owned(), text.clone());
        }
        Some(other) => return Err(refused("description", other, "a string")),
    }
    function.insert("parameters".to_owned(), parameters.clone().into());
    let definition = json!({"type": "function", "function": function});
    let function = OfferedFunction {
        name: name.clone(),
        parameters: Some(parameters.clone()),
        field: schema_field,
        strict,
    };
    Ok((definition, function))
}

/// Reads `tool_choice`: the choice, and whether an answer may have several calls. `None` if the
/// model may call no tool.
fn tool_choice(
    fields: &RequestFields<'_>,
) -> Result<Option<(RequestedToolChoice, bool)>, FieldError> {
    let allowed = "an object with type auto, any, tool (with a name) or none";
    let Some(text) = fields.raw(TOOL_CHOICE) else {
        return Ok(Some((RequestedToolChoice::Auto, true)));
    };
    let object: Map<String, Value> = parse_field(TOOL_CHOICE, text, allowed)?;
    let word = |name| object.get(name).and_then(Value::as_str);
    let choice = match (word("type"), word("name")) {
        (Some("auto"), _) => RequestedToolChoice::Auto,
        (Some("any"), _) => RequestedToolChoice::Required,
        (Some("tool"), Some(name)) => RequestedToolChoice::Named(name.to_owned()),
        (Some("none"), _) => return Ok(None),
        _ => return Err(invalid_value(TOOL_CHOICE, text, allowed)),
    };
    let is_single = match object.get("disable_parallel_tool_use").unwrap_or(&Value::Null) {
        Value::Null => false,
        Value::Bool(is_single) => *is_single,
        other => {
            let field = "tool_choice.disable_parallel_tool_use";
            return Err(invalid_value(field, &other.to_string(), "true or false"));
        }
    };
    Ok(Some((choice, !is_single)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fields: Value) -> Result<(GenerationFields, MessageFields), String> {
        let mut body = json!({"max_tokens": 2000, "messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let body = body.to_string();
        let fields = RequestFields::parse(body.as_bytes()).unwrap();
        read_messages(&fields).map_err(|error| error.to_string())
    }

    fn chat(fields: Value) -> ChatSource {
        match read(fields).unwrap().0.prompts.remove(0) {
            PromptSource::Chat(chat) => chat,
            other => panic!("{other:?}"),
        }
    }

    fn tool(name: &str) -> Value {
        json!({"name": name, "description": "d", "input_schema": {"type": "object"}})
    }

    #[test]
    fn fields_of_both_apis_reach_the_options() {
        let (parsed, reply) = read(json!({
            "stop_sequences": ["a"], "stop": "b", "temperature": 0.5, "top_k": 7, "seed": 3,
            "stream": true, "metadata": {"user_id": "u"}, "service_tier": "auto",
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        }))
        .unwrap();
        let options = parsed.options;
        assert_eq!((options.stop, options.top_k), (vec!["b".to_owned(), "a".to_owned()], Some(7)));
        assert_eq!((options.temperature, options.seed), (Some(0.5), Some(3)));
        let schema = Grammar::JsonSchema(r#"{"type":"object"}"#.to_owned());
        assert_eq!(options.grammar, Some(RequestedGrammar::new(SCHEMA, schema)));
        // The rest of the context may be less.
        assert_eq!(
            (options.max_tokens, parsed.default_length),
            (None, DefaultLength::Tokens(2000))
        );
        let expected = MessageFields { is_streamed: true, max_tokens: 2000, shows_thinking: true };
        assert_eq!(reply, expected);
    }

    #[test]
    fn thinking_and_effort_become_template_variables() {
        for (fields, enabled, effort, is_shown) in [
            (json!({}), None, None, true),
            (json!({"thinking": {"type": "disabled"}}), Some(false), None, true),
            (
                json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}),
                Some(true),
                None,
                true,
            ),
            (
                json!({"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "max"}}),
                Some(true),
                Some("high"),
                false,
            ),
        ] {
            let variables = chat(fields.clone()).template_kwargs;
            let found = (variables.get("enable_thinking"), variables.get("reasoning_effort"));
            let expected = (enabled.map(Value::Bool), effort.map(Value::from));
            assert_eq!(found, (expected.0.as_ref(), expected.1.as_ref()), "{fields}");
            assert_eq!(read(fields).unwrap().1.shows_thinking, is_shown);
        }
        let own = json!({"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": false}});
        assert_eq!(chat(own).template_kwargs["enable_thinking"], false);
    }

    #[test]
    fn tools_become_functions_unless_none_may_be_called() {
        let tools = json!([tool("f"), tool("g")]);
        let offered =
            |choice: Value| read(json!({"tools": tools, "tool_choice": choice})).unwrap().0.tools;
        let function = |name| {
            let function =
                json!({"name": name, "description": "d", "parameters": {"type": "object"}});
            json!({"type": "function", "function": function})
        };
        for (choice, expected, parallel) in [
            (json!(null), RequestedToolChoice::Auto, true),
            (json!({"type": "auto"}), RequestedToolChoice::Auto, true),
            (json!({"type": "any"}), RequestedToolChoice::Required, true),
            (
                json!({"type": "tool", "name": "g", "disable_parallel_tool_use": true}),
                RequestedToolChoice::Named("g".to_owned()),
                false,
            ),
        ] {
            let tools = offered(choice).unwrap();
            assert_eq!((tools.choice, tools.parallel), (expected, parallel));
            assert_eq!(tools.definitions, json!([function("f"), function("g")]));
        }
        assert_eq!(offered(json!({"type": "none"})), None);
        assert_eq!(chat(json!({"tools": tools})).tools, json!([function("f"), function("g")]));
    }

    #[test]
    fn invalid_fields_are_rejected_by_name() {
        let with = |name: &str, value: Value| {
            let mut tool = tool("f");
            tool[name] = value;
            json!({"tools": [tool]})
        };
        for (fields, said) in [
            (json!({"max_tokens": null}), "max_tokens is missing; allowed: a whole number from 1"),
            (json!({"max_tokens": 0}), "max_tokens is 0; allowed: a whole number from 1"),
            (json!({"stop_sequences": "a"}), "stop_sequences is \"a\"; allowed: a list of strings"),
            (json!({"stop_sequences": [""]}), "stop_sequences [0] is empty"),
            (json!({"container": "c"}), "container is not supported; leave it out"),
            (json!({"mcp_servers": [{}]}), "mcp_servers is not supported"),
            (json!({"prompt_logprobs": 1}), "prompt_logprobs is not supported"),
            (
                json!({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
                "context_management is not supported",
            ),
            (json!({"metadata": "u"}), "metadata is \"u\"; allowed: an object"),
            (json!({"service_tier": "batch"}), "service_tier is \"batch\"; allowed: auto or"),
            (
                json!({"thinking": {"type": "on"}}),
                "thinking is {\"type\":\"on\"}; allowed: an object",
            ),
            (
                json!({"thinking": {"type": "enabled", "budget_tokens": 2000}}),
                "thinking.budget_tokens is 2000; allowed: a whole number from 1024, below max_tokens",
            ),
            (
                json!({"thinking": {"type": "adaptive", "display": "full"}}),
                "thinking.display is \"full\"; allowed: summarized or omitted",
            ),
            (json!({"output_config": {"effort": 1}}), "output_config.effort is 1; allowed: low, "),
            (
                json!({"output_config": {"format": {"type": "text"}}}),
                "output_config.format.type is \"text\"; allowed: json_schema",
            ),
            (
                json!({"output_config": {"format": {"type": "json_schema", "schema": []}}}),
                "output_config.format.schema is []; allowed: an object",
            ),
            (
                json!({"regex": "a", "output_config": {"format": {"type": "json_schema", "schema": {}}}}),
                "output_config.format.schema is given together with regex; allowed: one of them",
            ),
            (
                with("type", json!("web_search_20250305")),
                "tools[0].type is \"web_search_20250305\"; allowed: custom",
            ),
            (with("name", json!(1)), "tools[0].name is 1; allowed: a string"),
            (with("name", json!("")), "tools[0].name is \"\"; allowed: 1 to"),
            (with("description", json!(1)), "tools[0].description is 1; allowed: a string"),
            (
                with("input_schema", json!(null)),
                "tools[0].input_schema is null; allowed: an object",
            ),
            (with("strict", json!(1)), "tools[0].strict is 1; allowed: true or false"),
            (
                with("defer_loading", json!(true)),
                "tools[0].defer_loading is true; allowed: false, or no defer_loading",
            ),
            (
                json!({"tool_choice": {"type": "any"}}),
                "tool_choice demands a call; allowed: only with tools",
            ),
            (
                json!({"tool_choice": {"type": "tool"}}),
                "tool_choice is {\"type\":\"tool\"}; allowed",
            ),
            (json!({"tool_choice": "auto"}), "tool_choice is \"auto\"; allowed: an object with"),
            (
                json!({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}),
                "tool_choice.disable_parallel_tool_use is 1; allowed: true or false",
            ),
        ] {
            let error = read(fields).map(|_| ()).unwrap_err();
            assert!(error.starts_with(said), "{error}");
        }
    }
}
