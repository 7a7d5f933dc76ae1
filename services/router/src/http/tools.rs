//! Tools: what a request offers, and the calls in its answers.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value};
use text::{ToolCall, ToolFormat, ToolParser, ToolPiece};

use super::fields::Fields;
use crate::request::field_error::{FieldError, refused, shown};

/// As OpenAI has it.
pub const TOOLS_MAX: usize = 128;
/// Four times OpenAI's bound: names made of a server's and a tool's are longer.
pub const NAME_BYTES_MAX: usize = 256;

/// Tools that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct OfferedTools {
    /// As the client sent them, for the template.
    pub definitions: Value,
    pub names: Arc<[String]>,
    /// More than one call an answer.
    pub parallel: bool,
}

/// The tools that the answer may call, if any.
pub fn read(fields: &Fields<'_>) -> Result<Option<OfferedTools>, FieldError> {
    let offered = offered(fields)?;
    let may_call = may_call(fields)?;
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    Ok(offered.filter(|_| may_call).map(|offered| OfferedTools { parallel, ..offered }))
}

fn may_call(fields: &Fields<'_>) -> Result<bool, FieldError> {
    let name = "tool_choice";
    let allowed = "auto or none";
    let Some(choice) = fields.value::<Value>(name, allowed)? else { return Ok(true) };
    match &choice {
        Value::String(choice) if choice == "auto" => Ok(true),
        Value::String(choice) if choice == "none" => Ok(false),
        Value::String(word) if word != "required" => {
            Err(refused(name, &choice.to_string(), allowed))
        }
        Value::String(_) | Value::Object(_) => {
            let problem = "it demands a call, which nothing holds the model to";
            let choice = choice.to_string();
            let problem = format!("is {}; {problem}; allowed: {allowed}", shown(&choice));
            Err(FieldError::new(name, problem))
        }
        _ => Err(refused(name, &choice.to_string(), allowed)),
    }
}

#[derive(Deserialize)]
struct Tool {
    r#type: String,
    function: Function,
}

#[derive(Deserialize)]
struct Function {
    name: String,
    #[serde(rename = "description")]
    _description: Option<String>,
    #[serde(rename = "parameters")]
    _parameters: Option<Map<String, Value>>,
    strict: Option<bool>,
}

/// The tools, `None` for none.
fn offered(fields: &Fields<'_>) -> Result<Option<OfferedTools>, FieldError> {
    let allowed = "a list of tools, each with type function and a function with a name";
    let Some(text) = fields.raw("tools") else { return Ok(None) };
    let definitions: Value =
        serde_json::from_str(text).map_err(|_| refused("tools", text, allowed))?;
    let list = definitions.as_array().ok_or_else(|| refused("tools", text, allowed))?;
    if list.is_empty() {
        return Ok(None);
    }
    if list.len() > TOOLS_MAX {
        let problem = format!("has {} tools; allowed: at most {TOOLS_MAX}", list.len());
        return Err(FieldError::new("tools", problem));
    }
    let name = |(index, tool): (usize, &Value)| {
        let field = format!("tools[{index}]");
        // serde takes an array for a structure, too.
        if tool.is_array() || tool["function"].is_array() {
            return Err(refused(&field, &tool.to_string(), allowed));
        }
        let read = Tool::deserialize(tool).map_err(|error| {
            FieldError::new(&field, format!("is no tool: {error}; allowed: {allowed}"))
        })?;
        let Function { name, strict, .. } = read.function;
        if read.r#type != "function" {
            return Err(refused(&format!("{field}.type"), &tool["type"].to_string(), "function"));
        }
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            let allowed = format!("1 to {NAME_BYTES_MAX} bytes");
            let given = tool["function"]["name"].to_string();
            return Err(refused(&format!("{field}.function.name"), &given, &allowed));
        }
        if strict == Some(true) {
            let problem = "is true; nothing holds the arguments to their schema; allowed: false";
            return Err(FieldError::new(format!("{field}.function.strict"), problem));
        }
        Ok(name)
    };
    let names: Vec<String> = list.iter().enumerate().map(name).collect::<Result<_, _>>()?;
    Ok(Some(OfferedTools { definitions, names: names.into(), parallel: true }))
}

/// How calls in the answers of a request are read.
#[derive(Clone)]
pub struct CallReading {
    pub format: ToolFormat,
    pub names: Arc<[String]>,
    pub parallel: bool,
    /// What the ids of calls have in common.
    pub id: String,
}

/// A part of an answer.
#[derive(Debug, PartialEq)]
pub enum AnswerPiece {
    Content(String),
    Call { index: u32, id: String, call: ToolCall },
}

/// Reads the calls in one answer.
pub struct CallReader {
    parser: ToolParser,
    parallel: bool,
    id: String,
    pub calls: u32,
}

impl CallReader {
    pub fn new(reading: &CallReading, choice: u32) -> Self {
        Self {
            parser: ToolParser::new(reading.format, reading.names.clone()),
            parallel: reading.parallel,
            id: format!("{}_{choice}", reading.id),
            calls: 0,
        }
    }

    pub fn push(&mut self, text: &str) -> Vec<AnswerPiece> {
        let mut pieces = Vec::new();
        self.parser.push(text, &mut pieces);
        self.numbered(pieces)
    }

    /// The rest, and whether the answer ends with calls.
    pub fn finish(mut self, text: &str) -> (Vec<AnswerPiece>, Calls) {
        let mut pieces = Vec::new();
        self.parser.push(text, &mut pieces);
        self.parser.clone().finish(&mut pieces);
        let pieces = self.numbered(pieces);
        let calls = match (self.calls, self.parallel) {
            (0, _) => Calls::None,
            (_, true) => Calls::Some,
            (_, false) => Calls::OnlyOne,
        };
        (pieces, calls)
    }

    /// Where only one call is wanted the answer ends with it.
    fn numbered(&mut self, pieces: Vec<ToolPiece>) -> Vec<AnswerPiece> {
        let mut numbered = Vec::with_capacity(pieces.len());
        for piece in pieces {
            if self.calls > 0 && !self.parallel {
                break;
            }
            numbered.push(match piece {
                ToolPiece::Content(text) => AnswerPiece::Content(text),
                ToolPiece::Call(call) => {
                    let index = self.calls;
                    self.calls += 1;
                    AnswerPiece::Call { index, id: format!("{}_{index}", self.id), call }
                }
            });
        }
        numbered
    }
}

/// What calls an answer has, as far as its end depends on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    None,
    Some,
    /// More were not wanted: the answer ends with the first.
    OnlyOne,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read_body(body: Value) -> Result<Option<OfferedTools>, String> {
        let body = body.to_string();
        read(&Fields::parse(body.as_bytes()).unwrap()).map_err(|error| error.to_string())
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name}})
    }

    #[test]
    fn tools_are_offered_unless_none_may_be_called() {
        let tools = json!([tool("f"), tool("g")]);
        let offered = read_body(json!({"tools": tools})).unwrap().unwrap();
        assert_eq!((&offered.definitions, offered.parallel), (&tools, true));
        assert_eq!(*offered.names, ["f", "g"]);
        let one = json!({"tools": tools, "tool_choice": "auto", "parallel_tool_calls": false});
        assert!(!read_body(one).unwrap().unwrap().parallel);
        for body in [
            json!({"tools": tools, "tool_choice": "none"}),
            json!({"tools": [], "tool_choice": "auto"}),
            json!({"tools": null}),
            json!({"parallel_tool_calls": true}),
        ] {
            assert_eq!(read_body(body), Ok(None));
        }
    }

    #[test]
    fn what_cannot_be_held_to_is_refused_by_name() {
        let named = json!({"type": "function", "function": {"name": "f"}});
        for (body, words) in [
            (json!({"tool_choice": "required"}), "tool_choice is \"required\"; it demands a call"),
            (json!({"tool_choice": named}), "it demands a call"),
            (json!({"tool_choice": "any"}), "tool_choice is \"any\"; allowed: auto or none"),
            (json!({"tools": {}}), "tools is {}"),
            (
                json!({"tools": [{"type": "function"}]}),
                "tools[0] is no tool: missing field `function`",
            ),
            (json!({"tools": [["function", tool("f")]]}), "tools[0] is [\"function\",{"),
            (json!({"tools": [tool("f"), tool("")]}), "tools[1].function.name is \"\""),
            (json!({"tools": vec![tool("f"); 129]}), "has 129 tools; allowed: at most 128"),
            (
                json!({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}),
                "tools[0].type is \"retrieval\"; allowed: function",
            ),
            (
                json!({"tools": [{"type": "function", "function": {"name": "f", "strict": true}}]}),
                "tools[0].function.strict is true",
            ),
            (json!({"parallel_tool_calls": 1}), "parallel_tool_calls is 1"),
        ] {
            let said = read_body(body).unwrap_err();
            assert!(said.contains(words), "{said}");
        }
    }

    #[test]
    fn where_one_call_is_wanted_the_answer_ends_with_it() {
        let text = "a <tool_call>{\"name\": \"f\"}</tool_call> b <tool_call>{\"name\": \"f\"}</tool_call> c";
        let read = |parallel| {
            let names = Arc::new(["f".to_owned()]);
            let id = "call_1".to_owned();
            let reading = CallReading { format: ToolFormat::Hermes, names, parallel, id };
            let mut reader = CallReader::new(&reading, 2);
            let mut pieces = reader.push(&text[..40]);
            let (rest, calls) = reader.finish(&text[40..]);
            pieces.extend(rest);
            (pieces, calls)
        };
        let content = |text: &str| AnswerPiece::Content(text.into());
        let call = |index| AnswerPiece::Call {
            index,
            id: format!("call_1_2_{index}"),
            call: ToolCall { name: "f".into(), arguments: "{}".into() },
        };
        assert_eq!(read(false), (vec![content("a"), call(0)], Calls::OnlyOne));
        let all = vec![content("a"), call(0), content(" b"), call(1), content(" c")];
        assert_eq!(read(true), (all, Calls::Some));
    }
}
