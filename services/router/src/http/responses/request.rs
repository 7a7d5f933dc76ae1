//! Fields of a request to `/v1/responses`.

use grammar::Grammar;
use serde::Deserialize;
use serde_json::{Map, Value, json, value::RawValue};

use super::object::{ReasoningEcho, RequestEcho};
use crate::{
    http::{
        fields::RequestFields,
        foreign_fields::read_with_foreign_fields,
        grammar_fields::object,
        request_fields::{Unsupported, check_unsupported, options},
    },
    request::{
        error::{FieldError, invalid_value, parse_field},
        options::{LOGPROBS, Options, RequestedGrammar, TOKENS},
        tools::{
            OfferedFunction, OfferedTools, RequestedToolChoice, TOOL_CHOICE, TOOLS, check_count,
            check_name,
        },
    },
};

const INCLUDE: &str = "include";
const FORMAT: &str = "text.format";
const FORMAT_ALLOWED: &str = "an object with type text, json_object or json_schema";
const SCHEMA: &str = "text.format.schema";
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];
const SUMMARIES: [&str; 3] = ["auto", "concise", "detailed"];
const ENCRYPTED: &str = "reasoning.encrypted_content";
const TEXT_LOGPROBS: &str = "message.output_text.logprobs";
/// Values of `include` for items that only hosted tools make, so they have no effect.
const INCLUDE_OF_HOSTED_TOOLS: [&str; 6] = [
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
];

/// Unsupported fields of OpenAI's API that would change the answer, or the way to get it.
pub(in crate::http) const RESPONSES_UNSUPPORTED: [Unsupported; 14] = [
    ("echo", &["false"]),
    ("prompt_logprobs", &[]),
    ("background", &["false"]),
    ("background_options", &["{}"]),
    ("conversation", &[]),
    ("prompt", &[]),
    ("moderation", &[]),
    ("access_programs", &["{}"]),
    ("image", &["{}"]),
    // The router drops no items of the input.
    ("context_management", &["[]"]),
    ("truncation", &["\"disabled\""]),
    ("service_tier", &["\"auto\"", "\"default\""]),
    ("n", &["1"]),
    ("max_tokens", &[]),
];

/// Fields of other servers that are OpenAI's as well.
pub(in crate::http) const OWN_FIELDS: [&str; 1] = ["max_output_tokens"];

/// Fields of a request, besides those of sampling.
#[derive(Debug)]
pub(super) struct ResponseRequest {
    pub input: Value,
    pub options: Options,
    pub tools: Option<OfferedTools>,
    /// Variables for the chat template.
    pub template_kwargs: Map<String, Value>,
    pub is_streamed: bool,
    /// Whether reasoning items have `encrypted_content`.
    pub encrypts: bool,
    /// Fields that the response repeats.
    pub echo: RequestEcho,
}

impl ResponseRequest {
    pub(super) fn read(fields: &RequestFields<'_>) -> Result<Self, FieldError> {
        read_with_foreign_fields(fields, &OWN_FIELDS, Self::read_own)
    }

    fn read_own(fields: &RequestFields<'_>) -> Result<Self, FieldError> {
        check_unsupported(fields, &RESPONSES_UNSUPPORTED)?;
        let allowed = "a string, or a list of items";
        let input = fields
            .value("input", allowed)?
            .ok_or_else(|| FieldError::new("input", format!("is missing; allowed: {allowed}")))?;
        let include = include(fields)?;
        let mut options = options(fields)?;
        options.max_tokens = fields.count("max_output_tokens", TOKENS)?;
        let (text, format) = text(fields)?;
        if let (Some(format), Some(other)) = (&format, &options.grammar) {
            let problem = format!("is given together with {}; allowed: one of them", other.field);
            return Err(FieldError::new(format.field, problem));
        }
        options.grammar = options.grammar.or(format);
        let top_logprobs = fields.count("top_logprobs", LOGPROBS)?.unwrap_or(0);
        let wants_logprobs = include.iter().any(|value| value == TEXT_LOGPROBS);
        if top_logprobs > 0 && !wants_logprobs {
            let problem = format!("is {top_logprobs}; allowed: only with include {TEXT_LOGPROBS}");
            return Err(FieldError::new("top_logprobs", problem));
        }
        options.logprobs = wants_logprobs.then_some(top_logprobs);
        let (reasoning, template_kwargs) = reasoning(fields)?;
        let parallel_tool_calls = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
        let offered = offered(fields)?;
        let (choice, tool_choice) = tool_choice(fields)?;
        let echo = RequestEcho {
            instructions: fields.string("instructions")?,
            max_output_tokens: options.max_tokens,
            max_tool_calls: fields.count("max_tool_calls", 1..=u32::MAX)?,
            metadata: fields.value("metadata", "an object")?.unwrap_or_default(),
            parallel_tool_calls,
            previous_response_id: fields.string("previous_response_id")?,
            reasoning,
            service_tier: "default",
            store: fields.boolean("store")?.unwrap_or(true),
            temperature: options.temperature,
            text,
            tool_choice,
            tools: offered.as_sent,
            top_logprobs,
            top_p: options.top_p,
            truncation: "disabled",
            user: fields.string("user")?,
        };
        let tools = match choice {
            Some(choice) => {
                let definitions = Value::Array(offered.definitions);
                OfferedTools::new(definitions, offered.functions, choice, parallel_tool_calls)?
            }
            None => None,
        };
        Ok(Self {
            input,
            options,
            tools,
            template_kwargs,
            is_streamed: fields.boolean("stream")?.unwrap_or(false),
            encrypts: include.iter().any(|value| value == ENCRYPTED),
            echo,
        })
    }
}

fn include(fields: &RequestFields<'_>) -> Result<Vec<String>, FieldError> {
    let allowed = "a list of strings";
    let include: Vec<String> = fields.value(INCLUDE, allowed)?.unwrap_or_default();
    for (index, value) in include.iter().enumerate() {
        let is_known = [ENCRYPTED, TEXT_LOGPROBS].contains(&value.as_str())
            || INCLUDE_OF_HOSTED_TOOLS.contains(&value.as_str());
        if !is_known {
            let allowed = format!("{ENCRYPTED} or {TEXT_LOGPROBS}");
            let field = format!("{INCLUDE}[{index}]");
            return Err(invalid_value(&field, &json!(value).to_string(), &allowed));
        }
    }
    Ok(include)
}

/// Reads `text`: the object that the response repeats, and the grammar of its format.
fn text(
    fields: &RequestFields<'_>,
) -> Result<(Map<String, Value>, Option<RequestedGrammar>), FieldError> {
    #[derive(Deserialize)]
    #[serde(expecting = "an object")]
    struct TextField<'a> {
        #[serde(borrow)]
        format: Option<&'a RawValue>,
        verbosity: Option<Value>,
    }
    #[derive(Deserialize)]
    #[serde(expecting = "an object")]
    struct TextFormatField<'a> {
        r#type: Value,
        #[serde(borrow)]
        schema: Option<&'a RawValue>,
    }
    let mut echo = Map::from_iter([("format".to_owned(), json!({"type": "text"}))]);
    let Some(raw) = fields.raw("text") else { return Ok((echo, None)) };
    let field: TextField<'_> = object("text", raw, "an object with format")?;
    if let Some(verbosity) = field.verbosity.filter(|value| value != "medium") {
        // A chat template has no such variable.
        return Err(invalid_value("text.verbosity", &verbosity.to_string(), "medium"));
    }
    let Some(raw) = field.format else { return Ok((echo, None)) };
    let format: TextFormatField<'_> = object(FORMAT, raw.get(), FORMAT_ALLOWED)?;
    let grammar = match (format.r#type.as_str(), format.schema) {
        (Some("text" | "json_object"), Some(_)) => {
            let problem = "is given; allowed: only with type json_schema";
            return Err(FieldError::new(SCHEMA, problem));
        }
        (Some("text"), None) => None,
        (Some("json_object"), None) => Some(RequestedGrammar::new(FORMAT, Grammar::json_object())),
        (Some("json_schema"), Some(schema)) => {
            let grammar = Grammar::JsonSchema(schema.get().to_owned());
            Some(RequestedGrammar::new(SCHEMA, grammar))
        }
        (Some("json_schema"), None) => {
            let problem = "is missing; allowed: a JSON schema with type json_schema";
            return Err(FieldError::new(SCHEMA, problem));
        }
        _ => {
            let kind = format.r#type.to_string();
            return Err(invalid_value(
                "text.format.type",
                &kind,
                "text, json_object or json_schema",
            ));
        }
    };
    echo.insert("format".to_owned(), parse_field(FORMAT, raw.get(), FORMAT_ALLOWED)?);
    Ok((echo, grammar))
}

/// Reads `reasoning`, as the response repeats it and as variables of the chat template.
fn reasoning(
    fields: &RequestFields<'_>,
) -> Result<(ReasoningEcho, Map<String, Value>), FieldError> {
    let mut variables: Map<String, Value> =
        crate::http::request_fields::template_variables(fields)?;
    let allowed = "an object with effort or summary";
    let reasoning: Map<String, Value> = fields.value("reasoning", allowed)?.unwrap_or_default();
    let word = |name: &str, words: &[&str]| {
        let value = reasoning.get(name).filter(|value| !value.is_null());
        let word = value.map(|value| {
            let word = value.as_str().filter(|word| words.contains(word));
            word.map(str::to_owned).ok_or_else(|| {
                let field = format!("reasoning.{name}");
                invalid_value(&field, &value.to_string(), &words.join(", "))
            })
        });
        word.transpose()
    };
    let effort = word("effort", &EFFORTS)?;
    let summary = word("summary", &SUMMARIES)?;
    let variable = match effort.as_deref() {
        None => None,
        Some("none") => Some(("enable_thinking", Value::Bool(false))),
        Some(effort) => Some(("reasoning_effort", effort.into())),
    };
    if let Some((name, value)) = variable {
        variables.entry(name).or_insert(value);
    }
    Ok((ReasoningEcho { effort, summary }, variables))
}

/// The tools of a request.
#[derive(Default)]
struct OfferedFunctions {
    as_sent: Vec<Value>,
    /// The tools as chat templates show them.
    definitions: Vec<Value>,
    functions: Vec<OfferedFunction>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct FunctionToolField {
    r#type: Value,
    name: Option<String>,
    description: Option<String>,
    parameters: Option<Map<String, Value>>,
    strict: Option<bool>,
}

fn offered(fields: &RequestFields<'_>) -> Result<OfferedFunctions, FieldError> {
    let allowed = "a list of tools, each with type function and a name";
    let as_sent: Vec<Value> = fields.value(TOOLS, allowed)?.unwrap_or_default();
    check_count(as_sent.len())?;
    let mut offered = OfferedFunctions::default();
    for (index, tool) in as_sent.iter().enumerate() {
        let field = format!("{TOOLS}[{index}]");
        let text = tool.to_string();
        let read: FunctionToolField = object(&field, &text, allowed)?;
        if read.r#type != "function" {
            let field = format!("{field}.type");
            return Err(invalid_value(&field, &read.r#type.to_string(), "function"));
        }
        let name = read.name.unwrap_or_default();
        check_name(&format!("{field}.name"), &name)?;
        let mut function = Map::from_iter([("name".to_owned(), name.clone().into())]);
        if let Some(description) = read.description {
            function.insert("description".to_owned(), description.into());
        }
        if let Some(parameters) = &read.parameters {
            function.insert("parameters".to_owned(), parameters.clone().into());
        }
        offered.definitions.push(json!({"type": "function", "function": function}));
        offered.functions.push(OfferedFunction {
            name,
            parameters: read.parameters,
            field: format!("{field}.parameters"),
            strict: read.strict.unwrap_or(false),
        });
    }
    offered.as_sent = as_sent;
    Ok(offered)
}

/// Reads `tool_choice`: `None` if the model may call no tool, and the value that the response
/// repeats.
fn tool_choice(
    fields: &RequestFields<'_>,
) -> Result<(Option<RequestedToolChoice>, Value), FieldError> {
    let allowed = "auto, none, required, or an object with type function and a name";
    let choice: Value = fields.value(TOOL_CHOICE, allowed)?.unwrap_or_else(|| json!("auto"));
    let requested = match &choice {
        Value::String(word) if word == "auto" => Some(RequestedToolChoice::Auto),
        Value::String(word) if word == "none" => None,
        Value::String(word) if word == "required" => Some(RequestedToolChoice::Required),
        Value::Object(object) if object.get("type").is_some_and(|kind| kind == "function") => {
            match object.get("name").and_then(Value::as_str) {
                Some(name) => Some(RequestedToolChoice::Named(name.to_owned())),
                None => {
                    let problem = "is missing; allowed: the name of a function in tools";
                    return Err(FieldError::new("tool_choice.name", problem));
                }
            }
        }
        other => return Err(invalid_value(TOOL_CHOICE, &other.to_string(), allowed)),
    };
    Ok((requested, choice))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &Value) -> Result<ResponseRequest, String> {
        let mut whole = json!({"input": "hi"});
        whole.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
        let text = whole.to_string();
        ResponseRequest::read(&RequestFields::parse(text.as_bytes()).unwrap())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn tools_are_shown_to_the_template_as_in_chats() {
        let tool = json!({"type": "function", "name": "f", "description": "d", "strict": true,
            "parameters": {"type": "object"}});
        let choice = json!({"type": "function", "name": "f"});
        let request = read(&json!({"tools": [tool], "tool_choice": choice})).unwrap();
        let tools = request.tools.unwrap();
        let function = json!({"name": "f", "description": "d", "parameters": {"type": "object"}});
        assert_eq!(tools.definitions, json!([{"type": "function", "function": function}]));
        assert!(tools.functions[0].strict);
        assert_eq!(tools.choice, RequestedToolChoice::Named("f".to_owned()));
        assert_eq!((request.echo.tools, request.echo.tool_choice), (vec![tool], choice));
    }

    #[test]
    fn a_format_is_a_grammar() {
        let schema = json!({"type": "integer"});
        let format = json!({"type": "json_schema", "name": "n", "schema": schema});
        let request = read(&json!({"text": {"format": format}})).unwrap();
        let grammar = request.options.grammar.unwrap();
        assert_eq!(grammar.grammar, Grammar::JsonSchema(schema.to_string()));
        assert_eq!(request.echo.text["format"], format);
        let plain = read(&json!({"text": {"format": {"type": "text"}}})).unwrap();
        assert!(plain.options.grammar.is_none());
    }

    #[test]
    fn effort_reaches_the_template() {
        let variables =
            |effort: &str| read(&json!({"reasoning": {"effort": effort}})).unwrap().template_kwargs;
        assert_eq!(Value::Object(variables("low")), json!({"reasoning_effort": "low"}));
        assert_eq!(Value::Object(variables("none")), json!({"enable_thinking": false}));
    }

    #[test]
    fn unsupported_and_invalid_fields_are_rejected_by_name() {
        for (body, words) in [
            (json!({"background": true}), "background is not supported"),
            (json!({"conversation": "conv_1"}), "conversation is not supported"),
            (json!({"truncation": "auto"}), "truncation is not supported"),
            (
                json!({"tools": [{"type": "web_search"}]}),
                "tools[0].type is \"web_search\"; allowed: function",
            ),
            (json!({"tools": [{"type": "function"}]}), "tools[0].name is \"\""),
            (json!({"tool_choice": "any"}), "tool_choice is \"any\"; allowed: auto"),
            (json!({"tool_choice": {"type": "function"}}), "tool_choice.name is missing"),
            (
                json!({"include": ["x"]}),
                "include[0] is \"x\"; allowed: reasoning.encrypted_content",
            ),
            (json!({"top_logprobs": 2}), "top_logprobs is 2; allowed: only with include"),
            (json!({"text": {"verbosity": "low"}}), "text.verbosity is \"low\"; allowed: medium"),
            (json!({"text": {"format": {"type": "xml"}}}), "text.format.type is \"xml\""),
            (json!({"text": {"format": {"type": "json_schema"}}}), "text.format.schema is missing"),
            (
                json!({"reasoning": {"effort": "huge"}}),
                "reasoning.effort is \"huge\"; allowed: none",
            ),
            (
                json!({"text": {"format": {"type": "json_object"}}, "regex": "a"}),
                "text.format is given together with regex",
            ),
        ] {
            let error = read(&body).unwrap_err();
            assert!(error.starts_with(words), "{body}: {error}");
        }
        let text = "{}";
        let missing = ResponseRequest::read(&RequestFields::parse(text.as_bytes()).unwrap());
        assert!(missing.unwrap_err().to_string().starts_with("input is missing"));
    }
}
