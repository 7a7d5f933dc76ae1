//! The tools that a request offers, and the grammar of its answers.
//!
//! If the model may choose and no function is strict, there is no grammar: the router parses calls
//! from free text. Otherwise a grammar constrains the answer ([`OfferedTools::grammar`]): to calls
//! only if a call is required, otherwise to text until a call begins.

pub(crate) use grammar::limits::{NAME_BYTES_MAX, TOOLS_MAX};
use grammar::{
    Alternative, CallSyntax, CallableTool, FreeText, Grammar, ParameterSyntax, ToolCalls,
};
use serde_json::{Map, Value, json};
use text::{ToolFormat, ToolSyntax};

use super::{
    error::{FieldError, invalid_value},
    options::{RequestedGrammar, SchemaField},
};

/// Tools that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OfferedTools {
    /// OpenAI's JSON of the tools, for the chat template.
    pub definitions: Value,
    pub functions: Vec<OfferedFunction>,
    pub choice: RequestedToolChoice,
    /// Whether an answer may have several calls.
    pub parallel: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OfferedFunction {
    pub name: String,
    /// JSON schema of the arguments; `None` means no arguments.
    pub parameters: Option<Map<String, Value>>,
    /// Field of the schema in the request.
    pub field: String,
    /// Whether the arguments are constrained to the schema even if no call is required.
    pub strict: bool,
}

/// Value of `tool_choice`. There is no variant for `none`: such a request offers no tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RequestedToolChoice {
    Auto,
    /// At least one call.
    Required,
    /// One call of this function.
    Named(String),
}

/// Names of the fields, for errors.
pub(crate) const TOOLS: &str = "tools";
pub(crate) const TOOL_CHOICE: &str = "tool_choice";

/// Checks the number of tools.
pub(crate) fn check_count(count: usize) -> Result<(), FieldError> {
    if count > TOOLS_MAX {
        let problem = format!("has {count} tools; allowed: at most {TOOLS_MAX}");
        return Err(FieldError::new(TOOLS, problem));
    }
    Ok(())
}

/// Checks the length of a function's name.
pub(crate) fn check_name(field: &str, name: &str) -> Result<(), FieldError> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        let allowed = format!("1 to {NAME_BYTES_MAX} bytes");
        return Err(invalid_value(field, &json!(name).to_string(), &allowed));
    }
    Ok(())
}

impl OfferedTools {
    /// Returns the offer, or `None` without tools. Rejects a `tool_choice` that names an absent
    /// function.
    pub(crate) fn new(
        definitions: Value,
        functions: Vec<OfferedFunction>,
        choice: RequestedToolChoice,
        parallel: bool,
    ) -> Result<Option<Self>, FieldError> {
        match &choice {
            RequestedToolChoice::Auto if functions.is_empty() => return Ok(None),
            RequestedToolChoice::Auto => {}
            RequestedToolChoice::Required if functions.is_empty() => {
                let problem = "demands a call; allowed: only with tools";
                return Err(FieldError::new(TOOL_CHOICE, problem));
            }
            RequestedToolChoice::Required => {}
            RequestedToolChoice::Named(name) => {
                if !functions.iter().any(|function| function.name == *name) {
                    let allowed = "the name of a function in tools";
                    return Err(invalid_value(TOOL_CHOICE, &json!(name).to_string(), allowed));
                }
            }
        }
        Ok(Some(Self { definitions, functions, choice, parallel }))
    }

    /// Returns the functions that the answer may call.
    pub(super) fn callable(&self) -> impl Iterator<Item = &OfferedFunction> {
        self.functions.iter().filter(|function| match &self.choice {
            RequestedToolChoice::Named(name) => function.name == *name,
            RequestedToolChoice::Auto | RequestedToolChoice::Required => true,
        })
    }

    /// Returns the answer's grammar; `content` is the requested grammar of the text.
    pub(crate) fn grammar(
        &self,
        format: &ToolFormat,
        content: Option<RequestedGrammar>,
    ) -> Result<Option<RequestedGrammar>, FieldError> {
        let is_strict = self.functions.iter().any(|function| function.strict);
        if self.choice == RequestedToolChoice::Auto && content.is_none() && !is_strict {
            return Ok(None);
        }
        let is_auto = self.choice == RequestedToolChoice::Auto;
        let mut tools = Vec::new();
        let mut schemas = Vec::new();
        for function in self.callable() {
            // If the model may choose, only strict functions are constrained.
            let is_held = !is_auto || function.strict;
            let arguments = is_held.then(|| arguments_schema(function)).transpose()?;
            tools.push(CallableTool { name: function.name.clone(), arguments });
            let owner = format!("the function {:?}", function.name);
            schemas.push(SchemaField { field: function.field.clone(), owner: Some(owner) });
        }
        let syntax = format.syntax;
        let begins_with_tag =
            (syntax.begin.to_owned() + syntax.before_name).starts_with(syntax.tag);
        let (alternative, alone) = match (is_auto, content) {
            // A required call leaves no text to which the format could apply.
            (false, content) => (Alternative::Nothing, content),
            (true, None) => {
                let never_begins = syntax.never_begins.map(str::to_owned);
                (Alternative::Text(FreeText { tag: syntax.tag.to_owned(), never_begins }), None)
            }
            (true, Some(content))
                if matches!(content.grammar, Grammar::ContextFree(_) | Grammar::ToolCalls(_)) =>
            {
                let problem = "is given together with tools; allowed: a schema or a regular \
                               expression, or another tool_choice than auto";
                return Err(FieldError::new(top_level(content.field), problem));
            }
            (true, Some(content)) if begins_with_tag => {
                let answer = Alternative::Answer {
                    grammar: Box::new(content.grammar.clone()),
                    tag: syntax.tag.to_owned(),
                };
                (answer, Some(content))
            }
            (true, Some(content)) => {
                let problem = "is given together with tools; this model writes calls without a \
                               tag, which cannot be told from an answer; allowed: one of them, or \
                               another tool_choice than auto";
                return Err(FieldError::new(top_level(content.field), problem));
            }
        };
        let calls = ToolCalls {
            syntax: call_syntax(&syntax),
            tools,
            several: self.parallel && !matches!(self.choice, RequestedToolChoice::Named(_)),
            alternative,
        };
        Ok(Some(RequestedGrammar {
            field: TOOLS,
            grammar: Grammar::ToolCalls(calls),
            schemas,
            alone: alone.map(Box::new),
        }))
    }
}

fn call_syntax(syntax: &ToolSyntax) -> CallSyntax {
    let parameters = syntax.parameters.map(|syntax| ParameterSyntax {
        before_name: syntax.before_name.to_owned(),
        before_value: syntax.before_value.to_owned(),
        after_value: syntax.after_value.to_owned(),
        between: syntax.between.to_owned(),
        text_end: syntax.text_end.map(str::to_owned),
    });
    CallSyntax {
        begin: syntax.begin.to_owned(),
        before_name: syntax.before_name.to_owned(),
        bare_name: !syntax.quotes_name,
        before_arguments: syntax.before_arguments.to_owned(),
        parameters,
        after_arguments: syntax.after_arguments.to_owned(),
        between: syntax.between.to_owned(),
        end: syntax.end.to_owned(),
    }
}

fn top_level(field: &'static str) -> &'static str {
    field.split('.').next().unwrap_or(field)
}

/// Returns the schema of the arguments, which must be an object.
fn arguments_schema(function: &OfferedFunction) -> Result<String, FieldError> {
    let Some(parameters) = &function.parameters else {
        return Ok(r#"{"type":"object","properties":{},"additionalProperties":false}"#.to_owned());
    };
    let object = Value::from("object");
    match parameters.get("type") {
        Some(kind) if *kind == object => {}
        Some(Value::Array(kinds)) if kinds.contains(&object) => {}
        None => {}
        Some(other) => {
            let name = &function.name;
            let field = format!("{}.type", function.field);
            let problem = invalid_value(&field, &other.to_string(), "object").problem;
            let problem = format!("of the function {name:?} {problem}");
            return Err(FieldError::new(field, problem));
        }
    }
    let mut parameters = parameters.clone();
    parameters.insert("type".to_owned(), object);
    Ok(Value::Object(parameters).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_about_a_schema_does_not_grow_with_the_schema() {
        let parameters = json!({"type": "x".repeat(1 << 20)});
        let function = OfferedFunction {
            name: "f".into(),
            parameters: parameters.as_object().cloned(),
            field: "tools[0].function.parameters".into(),
            strict: true,
        };
        let said = arguments_schema(&function).unwrap_err().to_string();
        let words = "tools[0].function.parameters.type of the function \"f\" is ";
        assert!(said.starts_with(words) && said.len() < 300, "{said}");
    }

    /// Calls that the grammar of each format accepts are calls for the format's parser.
    #[test]
    fn forced_calls_of_every_format_are_parsed() {
        let schema = json!({
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"$ref": "#/$defs/Unit"},
            },
            "required": ["city", "unit"],
            "$defs": {"Unit": {"enum": ["C", "F"]}},
        });
        let function = OfferedFunction {
            name: "weather".into(),
            parameters: schema.as_object().cloned(),
            field: "tools[0].function.parameters".into(),
            strict: true,
        };
        let functions = vec![function];
        let required = RequestedToolChoice::Required;
        let offered = |choice| {
            OfferedTools::new(json!([]), functions.clone(), choice, true).unwrap().unwrap()
        };
        for format in ToolFormat::all() {
            let ToolSyntax { begin, before_name, before_arguments, end, .. } = format.syntax;
            let call = |city: &str, days: &str, unit: &str| {
                let name = if format.syntax.quotes_name { "\"weather\"" } else { "weather" };
                let arguments = match format.syntax.parameters {
                    None => format!(r#"{{"city": "{city}", "days": {days}, "unit": "{unit}"}}"#),
                    Some(syntax) => {
                        let quote = if syntax.text_end.is_none() { "\"" } else { "" };
                        let text = |text: &str| format!("{quote}{text}{quote}");
                        let (city, unit) = (text(city), text(unit));
                        let values = [("city", city.as_str()), ("days", days), ("unit", &unit)];
                        let values = values.map(|(key, value)| {
                            let ParameterSyntax { before_name, before_value, after_value, .. } =
                                call_syntax(&format.syntax).parameters.unwrap();
                            format!("{before_name}{key}{before_value}{value}{after_value}")
                        });
                        values.join(syntax.between)
                    }
                };
                let after = format.syntax.after_arguments;
                format!("{before_name}{name}{before_arguments}{arguments}{after}")
            };
            let calls = [call("Köln", "3", "C"), call("<a> b", "-1", "F")];
            let whole = format!("{begin}{}{end}", calls.join(format.syntax.between));
            let accepts = |choice: RequestedToolChoice, text: &str| {
                let grammar = offered(choice).grammar(format, None).unwrap().unwrap().grammar;
                let mut matcher = grammar::Compiler::for_bytes().compile(&grammar).unwrap();
                let accepted = text.bytes().all(|byte| matcher.accept(u32::from(byte)).is_ok());
                accepted && matcher.may_end().unwrap()
            };
            assert!(accepts(required.clone(), &whole), "{format:?} {whole}");
            assert!(!accepts(required.clone(), "Hello"), "{format:?}");
            assert!(!accepts(required.clone(), &whole.replace("weather", "clock")), "{format:?}");
            assert!(!accepts(required.clone(), &whole.replace("-1", "one")), "{format:?}");
            assert!(!accepts(required.clone(), &whole.replace('F', "K")), "{format:?}");
            assert!(accepts(RequestedToolChoice::Auto, "Hello"), "{format:?}");
            assert!(accepts(RequestedToolChoice::Auto, &whole), "{format:?}");
            let parsed = text::CallableFunction::new("weather", schema.as_object());
            let mut parser = text::ToolParser::new(format, [parsed].into()).with_first_tag();
            let mut pieces = Vec::new();
            parser.push(&whole, &mut pieces);
            parser.finish(&mut pieces);
            let arguments = pieces.iter().map(|piece| match piece {
                text::ToolPiece::Call(call) => {
                    serde_json::from_str::<Value>(&call.arguments).unwrap()
                }
                other => panic!("{format:?}: {other:?}"),
            });
            let expected = [
                json!({"city": "Köln", "days": 3, "unit": "C"}),
                json!({"city": "<a> b", "days": -1, "unit": "F"}),
            ];
            assert_eq!(arguments.collect::<Vec<_>>(), expected, "{format:?}");
        }
    }
}
