//! Request fields that determine the answer's grammar: structured output and tools.
//!
//! The fields of structured output are OpenAI's `response_format`, and SGLang's and vLLM's fields
//! for a regular expression, a schema, a choice of texts and a context-free grammar. A request has
//! at most one of them.

use grammar::Grammar;
use serde::Deserialize;
use serde_json::{Map, Value, value::RawValue};

use super::{
    fields::RequestFields,
    structural_tag::{STRUCTURAL_TAG, structural_tag},
};
use crate::request::{
    error::{FieldError, JsonError, invalid_value, parse_field},
    options::RequestedGrammar,
    tools::{
        OfferedFunction, OfferedTools, RequestedToolChoice, TOOL_CHOICE, TOOLS, check_count,
        check_name,
    },
};

const FORMAT: &str = "response_format";
const FORMAT_ALLOWED: &str = "an object with type text, json_object, json_schema or structural_tag";
const SCHEMA: &str = "response_format.json_schema.schema";
const OUTPUTS: &str = "structured_outputs";
const OUTPUTS_TAG: &str = "structured_outputs.structural_tag";
const OUTPUTS_ALLOWED: &str =
    "an object with one of json, regex, choice, grammar, json_object and structural_tag";

/// Reads the grammar that the client requested, if any.
pub(super) fn grammar(fields: &RequestFields<'_>) -> Result<Option<RequestedGrammar>, FieldError> {
    let all = [
        response_format(fields)?,
        regex(fields, "regex")?,
        regex(fields, "guided_regex")?,
        guided_json(fields)?,
        guided_choice(fields)?,
        guided_grammar(fields)?,
        structured_outputs(fields)?,
    ];
    let mut asked = all.into_iter().flatten();
    let first = asked.next();
    match (&first, asked.next()) {
        (Some(first), Some(second)) => Err(FieldError::new(
            second.field,
            format!("is given together with {}; allowed: one of them", first.field),
        )),
        _ => Ok(first),
    }
}

fn response_format(fields: &RequestFields<'_>) -> Result<Option<RequestedGrammar>, FieldError> {
    #[derive(Deserialize)]
    #[serde(expecting = "an object")]
    struct FormatField<'a> {
        r#type: Value,
        #[serde(borrow)]
        json_schema: Option<&'a RawValue>,
        #[serde(borrow)]
        schema: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Named<'a> {
        #[serde(borrow)]
        schema: Option<&'a RawValue>,
    }
    const OF_OBJECT: &str = "response_format.schema";
    let Some(text) = fields.raw(FORMAT) else { return Ok(None) };
    let format: FormatField<'_> = object(FORMAT, text, FORMAT_ALLOWED)?;
    if format.r#type == STRUCTURAL_TAG {
        return structural_tag(FORMAT, text).map(Some);
    }
    // A schema that no type reads would be ignored.
    let misplaced = |field: &'static str, kind: &str| {
        Err(FieldError::new(field, format!("is given; allowed: only with type {kind}")))
    };
    Ok(match (format.r#type.as_str(), format.json_schema, format.schema) {
        (Some("text" | "json_object"), Some(_), _) => {
            return misplaced("response_format.json_schema", "json_schema");
        }
        (Some("text" | "json_schema"), _, Some(_)) => return misplaced(OF_OBJECT, "json_object"),
        (Some("text"), None, None) => None,
        (Some("json_object"), None, None) => {
            Some(RequestedGrammar::new(FORMAT, Grammar::json_object()))
        }
        // As in llama.cpp.
        (Some("json_object"), None, Some(schema)) => {
            let grammar = Grammar::JsonSchema(schema.get().to_owned());
            Some(RequestedGrammar::new(OF_OBJECT, grammar))
        }
        (Some("json_schema"), named, None) => {
            let missing = || {
                FieldError::new(SCHEMA, "is missing; allowed: a JSON schema with type json_schema")
            };
            let named = named.ok_or_else(missing)?.get();
            let allowed = "an object with name and schema";
            let named: Named<'_> = object("response_format.json_schema", named, allowed)?;
            let schema = named.schema.ok_or_else(missing)?.get().to_owned();
            Some(RequestedGrammar::new(SCHEMA, Grammar::JsonSchema(schema)))
        }
        _ => {
            let kind = format.r#type.to_string();
            let FieldError { problem, .. } = invalid_value(FORMAT, &kind, FORMAT_ALLOWED);
            return Err(FieldError::new(FORMAT, format!("has a type that {problem}")));
        }
    })
}

fn regex(
    fields: &RequestFields<'_>,
    name: &'static str,
) -> Result<Option<RequestedGrammar>, FieldError> {
    let regex = fields.string(name)?;
    Ok(regex.map(|regex| RequestedGrammar::new(name, Grammar::Regex(regex))))
}

fn guided_json(fields: &RequestFields<'_>) -> Result<Option<RequestedGrammar>, FieldError> {
    const NAME: &str = "guided_json";
    let Some(text) = fields.raw(NAME) else { return Ok(None) };
    let schema = schema_or_its_text(NAME, text)?;
    Ok(Some(RequestedGrammar::new(fields.clients_name(NAME), schema)))
}

fn guided_choice(fields: &RequestFields<'_>) -> Result<Option<RequestedGrammar>, FieldError> {
    const NAME: &str = "guided_choice";
    let Some(texts) = fields.value::<Vec<String>>(NAME, CHOICE_ALLOWED)? else { return Ok(None) };
    Ok(Some(RequestedGrammar::new(NAME, choice(NAME, &texts)?)))
}

const CHOICE_ALLOWED: &str = "a list of texts";

fn choice(name: &str, texts: &[String]) -> Result<Grammar, FieldError> {
    if texts.is_empty() {
        return Err(FieldError::new(name, "has no choice; allowed: at least one text"));
    }
    Ok(Grammar::choice(texts.iter().map(String::as_str)))
}

fn guided_grammar(fields: &RequestFields<'_>) -> Result<Option<RequestedGrammar>, FieldError> {
    const NAME: &str = "guided_grammar";
    let field = fields.clients_name(NAME);
    let grammar = fields.string(NAME)?.map(Grammar::ContextFree);
    Ok(grammar.map(|grammar| RequestedGrammar::new(field, grammar)))
}

fn structured_outputs(fields: &RequestFields<'_>) -> Result<Option<RequestedGrammar>, FieldError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Outputs<'a> {
        #[serde(borrow)]
        json: Option<&'a RawValue>,
        regex: Option<String>,
        choice: Option<Vec<String>>,
        grammar: Option<String>,
        json_object: Option<bool>,
        /// The text of a JSON object, as in vLLM.
        structural_tag: Option<String>,
    }
    let Some(text) = fields.raw(OUTPUTS) else { return Ok(None) };
    let outputs: Outputs<'_> = object(OUTPUTS, text, OUTPUTS_ALLOWED)?;
    let json = outputs.json.map(|json| schema_or_its_text(OUTPUTS, json.get())).transpose()?;
    let texts = outputs.choice.map(|texts| choice(OUTPUTS, &texts)).transpose()?;
    let json_object = outputs.json_object.unwrap_or(false).then(Grammar::json_object);
    let (regex, grammar) =
        (outputs.regex.map(Grammar::Regex), outputs.grammar.map(Grammar::ContextFree));
    let tag = outputs.structural_tag;
    let tag = tag.map(|text| structural_tag(OUTPUTS_TAG, text.trim())).transpose()?;
    let given = [json, regex, texts, grammar, json_object].into_iter().flatten();
    let mut given = given.map(|grammar| RequestedGrammar::new(OUTPUTS, grammar)).chain(tag);
    let first = given.next();
    if given.next().is_some() {
        let problem = "has more than one of json, regex, choice, grammar, json_object and \
                       structural_tag; allowed: one of them";
        return Err(FieldError::new(OUTPUTS, problem));
    }
    Ok(first)
}

/// Parses a JSON object. The check is needed because serde also reads an array as a struct.
pub(super) fn object<'a, T: Deserialize<'a>>(
    field: &str,
    text: &'a str,
    allowed: &str,
) -> Result<T, FieldError> {
    match text.starts_with('{') {
        true => parse_field(field, text, allowed),
        false => Err(invalid_value(field, text, allowed)),
    }
}

/// Converts a parsed value; the error tells the path to its invalid part.
fn from_value<'a, T: Deserialize<'a>>(value: &'a Value) -> Result<T, JsonError> {
    Ok(serde_path_to_error::deserialize(value)?)
}

/// Reads a schema given as JSON or as a string with JSON.
fn schema_or_its_text(name: &str, text: &str) -> Result<Grammar, FieldError> {
    let schema = match text.starts_with('"') {
        true => parse_field(name, text, "a JSON schema, or its text")?,
        false => text.to_owned(),
    };
    Ok(Grammar::JsonSchema(schema))
}

/// Reads the tools that the model may call, if any.
pub(super) fn tools(fields: &RequestFields<'_>) -> Result<Option<OfferedTools>, FieldError> {
    let offered = offered(fields)?;
    let choice = tool_choice(fields)?;
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let Some(choice) = choice else { return Ok(None) };
    let (definitions, functions) = offered.unwrap_or_default();
    OfferedTools::new(definitions, functions, choice, parallel)
}

/// Reads `tool_choice`; `None` if the model may call no tool.
fn tool_choice(fields: &RequestFields<'_>) -> Result<Option<RequestedToolChoice>, FieldError> {
    #[derive(Deserialize)]
    struct Named {
        r#type: String,
        function: Name,
    }
    #[derive(Deserialize)]
    struct Name {
        name: String,
    }
    let allowed =
        "auto, none, required, or an object with type function and a function with a name";
    let Some(choice) = fields.value::<Value>(TOOL_CHOICE, allowed)? else {
        return Ok(Some(RequestedToolChoice::Auto));
    };
    let other = || invalid_value(TOOL_CHOICE, &choice.to_string(), allowed);
    Ok(match &choice {
        Value::String(word) => match word.as_str() {
            "auto" => Some(RequestedToolChoice::Auto),
            "none" => None,
            "required" => Some(RequestedToolChoice::Required),
            _ => return Err(other()),
        },
        // serde also reads an array as a struct.
        Value::Object(object) if !object.get("function").is_some_and(Value::is_array) => {
            let Named { r#type, function } = from_value(&choice).map_err(|error| {
                let problem = format!("is invalid: {error}; allowed: {allowed}");
                FieldError::new(TOOL_CHOICE, problem)
            })?;
            if r#type != "function" {
                return Err(other());
            }
            Some(RequestedToolChoice::Named(function.name))
        }
        _ => return Err(other()),
    })
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct ToolField {
    r#type: String,
    function: ToolFunctionField,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct ToolFunctionField {
    name: String,
    #[serde(rename = "description")]
    _description: Option<String>,
    parameters: Option<Map<String, Value>>,
    strict: Option<bool>,
}

/// Returns the tools as the client sent them, and their parsed functions; `None` without tools.
fn offered(
    fields: &RequestFields<'_>,
) -> Result<Option<(Value, Vec<OfferedFunction>)>, FieldError> {
    let allowed = "a list of tools, each with type function and a function with a name";
    let Some(text) = fields.raw(TOOLS) else { return Ok(None) };
    let definitions: Value = parse_field(TOOLS, text, allowed)?;
    let list = definitions.as_array().ok_or_else(|| invalid_value(TOOLS, text, allowed))?;
    if list.is_empty() {
        return Ok(None);
    }
    check_count(list.len())?;
    let function = |(index, tool): (usize, &Value)| {
        let field = format!("tools[{index}]");
        // serde also reads an array as a struct.
        if tool.is_array() || tool["function"].is_array() {
            return Err(invalid_value(&field, &tool.to_string(), allowed));
        }
        let read: ToolField = from_value(tool).map_err(|error| {
            FieldError::new(&field, format!("is not a tool: {error}; allowed: {allowed}"))
        })?;
        let ToolFunctionField { name, strict, parameters, .. } = read.function;
        if read.r#type != "function" {
            return Err(invalid_value(
                &format!("{field}.type"),
                &tool["type"].to_string(),
                "function",
            ));
        }
        check_name(&format!("{field}.function.name"), &name)?;
        Ok(OfferedFunction {
            name,
            parameters,
            field: format!("{field}.function.parameters"),
            strict: strict.unwrap_or(false),
        })
    };
    let functions = list.iter().enumerate().map(function).collect::<Result<_, _>>()?;
    Ok(Some((definitions, functions)))
}

#[cfg(test)]
mod tests {
    use grammar::{Alternative, CallSyntax, CallableTool, FreeText, ToolCalls};
    use serde_json::json;

    use super::*;

    fn asked(body: &str) -> Result<Option<RequestedGrammar>, String> {
        grammar(&RequestFields::parse(body.as_bytes()).unwrap()).map_err(|error| error.to_string())
    }

    fn found(body: &str) -> (&'static str, Grammar) {
        let RequestedGrammar { field, grammar, .. } = asked(body).unwrap().unwrap();
        (field, grammar)
    }

    #[test]
    fn every_grammar_field_is_read() {
        let schema = || Grammar::JsonSchema(r#"{"type": "integer"}"#.into());
        let regex = || Grammar::Regex(r"\d+".into());
        let rules = || Grammar::ContextFree("start: X".into());
        let structures = |several| {
            let arguments = Some(r#"{"type": "integer"}"#.into());
            Grammar::ToolCalls(ToolCalls {
                syntax: CallSyntax {
                    before_name: "<f=".into(),
                    bare_name: true,
                    after_arguments: "</f>".into(),
                    ..CallSyntax::default()
                },
                tools: vec![CallableTool { name: "a>".into(), arguments }],
                several,
                alternative: Alternative::Text(FreeText { tag: "<f=".into(), never_begins: None }),
            })
        };
        let cases = [
            (
                r#"{"response_format": {"type": "json_object"}}"#,
                ("response_format", Grammar::json_object()),
            ),
            (
                r#"{"response_format": {"type": "json_schema", "json_schema":
                    {"name": "n", "strict": true, "schema": {"type": "integer"}}}}"#,
                ("response_format.json_schema.schema", schema()),
            ),
            (
                r#"{"response_format": {"type": "json_object", "schema": {"type": "integer"}}}"#,
                ("response_format.schema", schema()),
            ),
            (r#"{"regex": "\\d+"}"#, ("regex", regex())),
            (r#"{"guided_regex": "\\d+"}"#, ("guided_regex", regex())),
            (r#"{"guided_json": {"type": "integer"}}"#, ("guided_json", schema())),
            (r#"{"guided_json": "{\"type\": \"integer\"}"}"#, ("guided_json", schema())),
            (
                r#"{"structured_outputs": {"json": {"type": "integer"}}}"#,
                ("structured_outputs", schema()),
            ),
            (r#"{"structured_outputs": {"regex": "\\d+"}}"#, ("structured_outputs", regex())),
            (
                r#"{"guided_choice": ["a.", "b"]}"#,
                ("guided_choice", Grammar::Regex(r"a\.|b".into())),
            ),
            (
                r#"{"structured_outputs": {"choice": ["a"]}}"#,
                ("structured_outputs", Grammar::Regex("a".into())),
            ),
            (r#"{"guided_grammar": "start: X"}"#, ("guided_grammar", rules())),
            (r#"{"structured_outputs": {"grammar": "start: X"}}"#, ("structured_outputs", rules())),
            (
                r#"{"structured_outputs": {"json_object": true}}"#,
                ("structured_outputs", Grammar::json_object()),
            ),
            (
                r#"{"response_format": {"type": "structural_tag", "triggers": ["<f="], "structures":
                    [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}]}}"#,
                ("response_format", structures(true)),
            ),
            (
                r#"{"response_format": {"type": "structural_tag", "format": {"type": "triggered_tags",
                    "triggers": ["<f="], "stop_after_first": true, "tags": [{"type": "tag", "begin":
                    "<f=a>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                    "end": "</f>"}]}}}"#,
                ("response_format", structures(false)),
            ),
        ];
        for (body, expected) in cases {
            assert_eq!(found(body), expected, "{body}");
        }
        for body in [
            "{}",
            r#"{"response_format": {"type": "text"}, "regex": null}"#,
            r#"{"structured_outputs": {}}"#,
        ] {
            assert_eq!(asked(body), Ok(None), "{body}");
        }
    }

    #[test]
    fn a_schema_keeps_the_clients_order_of_properties() {
        let body = r#"{"response_format": {"type": "json_schema", "json_schema":
            {"schema": {"properties": {"z": {}, "a": {}}}}}}"#;
        let Grammar::JsonSchema(schema) = found(body).1 else { panic!("a schema") };
        assert_eq!(schema, r#"{"properties": {"z": {}, "a": {}}}"#);
    }

    #[test]
    fn invalid_or_several_grammars_are_rejected_by_field() {
        for (body, said) in [
            (
                r#"{"response_format": {"type": "yaml"}}"#,
                r#"response_format has a type that is "yaml"; allowed: an object with type text, json_object, json_schema or structural_tag"#,
            ),
            (r#"{"response_format": ["text", null]}"#, "response_format is [\"text\", null]"),
            (
                r#"{"response_format": {"type": "json_schema", "json_schema": [{}]}}"#,
                "response_format.json_schema is [{}]; allowed: an object",
            ),
            (r#"{"structured_outputs": [null, null]}"#, "structured_outputs is [null, null]"),
            (r#"{"response_format": "json"}"#, "response_format is \"json\"; allowed: an object"),
            (
                r#"{"response_format": {"type": "json_schema"}}"#,
                "response_format.json_schema.schema is missing; allowed: a JSON schema",
            ),
            (
                r#"{"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}"#,
                "response_format.json_schema.schema is missing",
            ),
            (
                r#"{"response_format": {"type": "json_schema", "json_schema": 7}}"#,
                "response_format.json_schema is 7; allowed: an object with name and schema",
            ),
            (
                r#"{"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}"#,
                "response_format.json_schema is given; allowed: only with type json_schema",
            ),
            (
                r#"{"response_format": {"type": "json_schema", "schema": {}}}"#,
                "response_format.schema is given; allowed: only with type json_object",
            ),
            (r#"{"regex": 7}"#, "regex is 7; allowed: a string"),
            (
                r#"{"structured_outputs": {"choices": ["a"]}}"#,
                "structured_outputs is {\"choices\": [\"a\"]}; allowed: an object with one of json",
            ),
            (
                r#"{"structured_outputs": {"choice": []}}"#,
                "structured_outputs has no choice; allowed: at least one text",
            ),
            (r#"{"guided_choice": "a"}"#, "guided_choice is \"a\"; allowed: a list of texts"),
            (
                r#"{"structured_outputs": {"choice": ["a"], "grammar": "b"}}"#,
                "structured_outputs has more than one of json, regex, choice",
            ),
            (
                r#"{"structured_outputs": {"regex": "a", "json_object": true}}"#,
                "structured_outputs has more than one of json, regex, choice",
            ),
            (
                r#"{"regex": "a", "response_format": {"type": "json_object"}}"#,
                "regex is given together with response_format; allowed: one of them",
            ),
        ] {
            let error = asked(body).unwrap_err();
            assert!(error.starts_with(said), "{error}");
        }
    }

    #[test]
    fn structural_tag_is_read_in_every_form() {
        let structure = json!({"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"});
        let tag = json!({"type": "structural_tag", "triggers": ["<f="], "structures": [structure]});
        let text = json!({"structured_outputs": {"structural_tag": tag.to_string()}});
        let (field, grammar) = found(&text.to_string());
        let (_, expected) = found(&json!({"response_format": tag}).to_string());
        assert_eq!((field, &grammar), (OUTPUTS_TAG, &expected));
        for (stops, several) in [(true, false), (false, true)] {
            let content = json!({"type": "json_schema", "json_schema": {"type": "integer"}});
            let tags =
                json!([{"type": "tag", "begin": "<f=a>", "content": content, "end": "</f>"}]);
            let format = json!({"type": "triggered_tags", "triggers": ["<f="], "tags": tags,
                "stop_after_first": stops});
            let format = json!({"type": "structural_tag", "format": format});
            let (_, grammar) = found(&json!({"response_format": format}).to_string());
            let (Grammar::ToolCalls(calls), Grammar::ToolCalls(expected)) = (grammar, &expected)
            else {
                panic!("calls")
            };
            assert_eq!(calls, ToolCalls { several, ..expected.clone() });
        }
    }

    #[test]
    fn invalid_structural_tags_are_rejected_by_field() {
        let structure = |begin: &str, end: &str| json!({"begin": begin, "schema": {}, "end": end});
        let tag = |triggers: &[&str], structures: Value| json!({"type": "structural_tag", "triggers": triggers, "structures": structures});
        let format = |more: Value, content: Value| {
            let mut format = json!({"type": "triggered_tags", "triggers": ["<a"], "tags":
                [{"type": "tag", "begin": "<a>", "content": content, "end": "<"}]});
            format.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({"type": "structural_tag", "format": format})
        };
        let schema = || json!({"type": "json_schema", "json_schema": {}});
        for (tag, said) in [
            (tag(&["a"], json!([])), "response_format has no structure; allowed: 1 to 128"),
            (
                tag(&["a", "b"], json!([structure("ac", "d")])),
                "response_format has 2 triggers; allowed: one",
            ),
            (
                tag(&[""], json!([structure("ac", "d")])),
                "response_format has an empty trigger; allowed: at least one character",
            ),
            (
                tag(&["a"], json!([structure("ac", "d"), structure("b", "d")])),
                "response_format.structures[1].begin is \"b\"; allowed: the trigger and further text",
            ),
            (
                tag(&["a"], json!([structure("a", "d")])),
                "response_format.structures[0].begin is \"a\"; allowed: the trigger and further text",
            ),
            (
                tag(&["a"], json!([structure("ac", "d"), structure("ab", "e")])),
                "response_format.structures[1].end is \"e\"; allowed: the end of the first structure",
            ),
            (
                tag(&["a"], json!([{"begin": "ab", "end": "c"}])),
                "response_format is {\"type\":\"structural_tag\"",
            ),
            (
                json!({"type": "structural_tag"}),
                "response_format has neither or both of structures and triggers, or a format",
            ),
            (
                json!({"type": "structural_tag", "format": {"type": "sequence", "elements": []}}),
                "response_format.format.type is \"sequence\"; allowed: triggered_tags",
            ),
            (
                format(json!({"at_least_one": true}), schema()),
                "response_format.format has at_least_one or excludes; allowed",
            ),
            (
                format(json!({}), json!({"type": "regex", "pattern": "a"})),
                "response_format.format.tags[0].content.type is \"regex\"; allowed: json_schema",
            ),
            (
                format(json!({}), json!({"type": "any_text"})),
                "response_format.format.tags[0].content.type is \"any_text\"; allowed",
            ),
            (
                tag(&["a"], json!(vec![structure("ab", "c"); 129])),
                "response_format has 129 structures; allowed: 1 to 128",
            ),
            (
                tag(&["a"], json!([structure(&"a".repeat(258), "c")])),
                "response_format.structures[0].begin has 257 bytes after the trigger; allowed: at \
                 most 256",
            ),
            (
                tag(&["a"], json!([structure("ab", &"c".repeat(257))])),
                "response_format has a trigger or an end of more than 256 bytes",
            ),
            (
                format(
                    json!({}),
                    json!({"type": "json_schema", "json_schema": {}, "style": "glm_xml"}),
                ),
                "response_format.format.tags[0].content.style is \"glm_xml\"; allowed: json",
            ),
        ] {
            let error = asked(&json!({"response_format": tag}).to_string()).unwrap_err();
            assert!(error.starts_with(said), "{error}");
        }
        let tag = tag(&["a"], json!([])).to_string();
        let error = asked(&json!({"structured_outputs": {"structural_tag": tag}}).to_string());
        let said = "structured_outputs.structural_tag has no structure; allowed: 1 to 128";
        assert_eq!(error.unwrap_err(), said);
    }

    fn tools_of(body: Value) -> Result<Option<OfferedTools>, String> {
        let body = body.to_string();
        tools(&RequestFields::parse(body.as_bytes()).unwrap()).map_err(|error| error.to_string())
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name}})
    }

    #[test]
    fn tools_are_offered_unless_none_may_be_called() {
        let tools = json!([tool("f"), tool("g")]);
        let offered = tools_of(json!({"tools": tools})).unwrap().unwrap();
        assert_eq!((&offered.definitions, offered.parallel), (&tools, true));
        let names: Vec<&str> = offered.functions.iter().map(|one| one.name.as_str()).collect();
        assert_eq!((names, offered.choice), (vec!["f", "g"], RequestedToolChoice::Auto));
        let one = json!({"tools": tools, "tool_choice": "auto", "parallel_tool_calls": false});
        assert!(!tools_of(one).unwrap().unwrap().parallel);
        let named = json!({"type": "function", "function": {"name": "g"}});
        for (choice, expected) in [
            (json!("required"), RequestedToolChoice::Required),
            (named, RequestedToolChoice::Named("g".into())),
        ] {
            let body = json!({"tools": tools, "tool_choice": choice});
            assert_eq!(tools_of(body).unwrap().unwrap().choice, expected);
        }
        let strict = json!([{"type": "function", "function": {"name": "f", "strict": true,
            "parameters": {"type": "object"}}}]);
        let offered = tools_of(json!({"tools": strict})).unwrap().unwrap();
        assert!(offered.functions[0].strict && offered.functions[0].parameters.is_some());
        for body in [
            json!({"tools": tools, "tool_choice": "none"}),
            json!({"tools": [], "tool_choice": "auto"}),
            json!({"tools": null}),
            json!({"parallel_tool_calls": true}),
        ] {
            assert_eq!(tools_of(body), Ok(None));
        }
    }

    #[test]
    fn invalid_tools_and_tool_choices_are_rejected_by_field() {
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        let with = |choice: Value| json!({"tools": [tool("f")], "tool_choice": choice});
        for (body, words) in [
            (
                json!({"tool_choice": "required"}),
                "tool_choice demands a call; allowed: only with tools",
            ),
            (json!({"tool_choice": named("f")}), "tool_choice is \"f\"; allowed: the name of a"),
            (with(named("g")), "tool_choice is \"g\"; allowed: the name of a function in tools"),
            (with(json!("any")), "tool_choice is \"any\"; allowed: auto, none, required"),
            (with(json!({"type": "function"})), "tool_choice is invalid: missing field `function`"),
            (
                with(json!({"type": "function", "function": {"name": 1}, "x": "y".repeat(99)})),
                "tool_choice is invalid: function.name: invalid type: integer `1`, expected a string",
            ),
            (with(json!({"type": "x", "function": {"name": "f"}})), "tool_choice is {\"type\":"),
            (with(json!({"type": "function", "function": ["f"]})), "tool_choice is {\"type\":"),
            (with(json!(7)), "tool_choice is 7"),
            (json!({"tools": {}}), "tools is {}"),
            (
                json!({"tools": [{"type": "function"}]}),
                "tools[0] is not a tool: missing field `function`",
            ),
            (json!({"tools": [["function", tool("f")]]}), "tools[0] is [\"function\",{"),
            (json!({"tools": [tool("f"), tool("")]}), "tools[1].function.name is \"\""),
            (json!({"tools": vec![tool("f"); 129]}), "has 129 tools; allowed: at most 128"),
            (
                json!({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}),
                "tools[0].type is \"retrieval\"; allowed: function",
            ),
            (
                json!({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}),
                "tools[0] is not a tool: function.strict: invalid type: integer `1`, expected a boolean",
            ),
            (json!({"parallel_tool_calls": 1}), "parallel_tool_calls is 1"),
            (
                json!({"tools": [{"type": "function", "function": "x".repeat(1 << 20)}]}),
                "tools[0] is not a tool: function: invalid type: string, expected an object",
            ),
        ] {
            let said = tools_of(body).unwrap_err();
            assert!(said.contains(words) && said.len() < 300, "{said}");
        }
    }
}
