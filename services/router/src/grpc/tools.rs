//! Tools of a gRPC request, and tool calls of its answers.

use proto::v1::{self, ToolChoiceMode, tool_choice::Choice};
use serde_json::{Map, Value, json};

use crate::request::{
    answer_reader::AnswerPiece,
    error::{FieldError, invalid_value, parse_json},
    tools::{
        OfferedFunction, OfferedTools, RequestedToolChoice, TOOL_CHOICE, check_count, check_name,
    },
};

/// Returns the tools that the answer may call, if any.
pub(super) fn read(
    tools: Vec<v1::Tool>,
    choice: Option<v1::ToolChoice>,
    parallel: Option<bool>,
) -> Result<Option<OfferedTools>, FieldError> {
    check_count(tools.len())?;
    let (mut definitions, mut functions) = (Vec::new(), Vec::new());
    for (index, tool) in tools.into_iter().enumerate() {
        let (definition, function) = offered(index, tool)?;
        definitions.push(definition);
        functions.push(function);
    }
    let allowed = "a mode, or the name of a function in tools";
    let choice = match choice.map(|choice| choice.choice) {
        None => RequestedToolChoice::Auto,
        Some(Some(Choice::Function(name))) => RequestedToolChoice::Named(name),
        Some(Some(Choice::Mode(mode))) => match ToolChoiceMode::try_from(mode) {
            Ok(ToolChoiceMode::Auto) => RequestedToolChoice::Auto,
            Ok(ToolChoiceMode::Required) => RequestedToolChoice::Required,
            Ok(ToolChoiceMode::None) => return Ok(None),
            Ok(ToolChoiceMode::Unspecified) | Err(_) => {
                let allowed = "1 (auto), 2 (none), 3 (required)";
                return Err(invalid_value("tool_choice.mode", &mode.to_string(), allowed));
            }
        },
        Some(None) => {
            return Err(FieldError::new(TOOL_CHOICE, format!("is empty; allowed: {allowed}")));
        }
    };
    OfferedTools::new(definitions.into(), functions, choice, parallel.unwrap_or(true))
}

/// Returns a tool in the form that templates expect, with its name and parameters.
fn offered(index: usize, tool: v1::Tool) -> Result<(Value, OfferedFunction), FieldError> {
    let v1::Tool { name, description, parameters_json, strict } = tool;
    check_name(&format!("tools[{index}].name"), &name)?;
    let field = format!("tools[{index}].parameters_json");
    let parameters: Option<Map<String, Value>> = match parameters_json.as_str() {
        "" => None,
        text => Some(parse_json(text).map_err(|error| {
            let allowed = "a JSON schema of an object, or nothing";
            FieldError::new(&field, format!("is invalid: {error}; allowed: {allowed}"))
        })?),
    };
    let mut function = json!({"name": name});
    if !description.is_empty() {
        function["description"] = description.into();
    }
    if let Some(parameters) = &parameters {
        function["parameters"] = parameters.clone().into();
    }
    let definition = json!({"type": "function", "function": function});
    Ok((definition, OfferedFunction { name, parameters, field, strict }))
}

/// Pieces of an answer in the form of gRPC.
#[derive(Default)]
pub(super) struct WirePieces {
    pub reasoning: String,
    pub text: String,
    pub tool_calls: Vec<v1::ToolCall>,
}

/// Returns the pieces in the form of gRPC.
pub(super) fn to_wire(pieces: Vec<AnswerPiece>) -> WirePieces {
    let mut wire = WirePieces::default();
    for piece in pieces {
        match piece {
            AnswerPiece::Reasoning(reasoning) => wire.reasoning.push_str(&reasoning),
            AnswerPiece::Content(content) => wire.text.push_str(&content),
            AnswerPiece::Call { index, id, call } => wire.tool_calls.push(v1::ToolCall {
                index,
                id,
                name: call.name,
                arguments_json: call.arguments,
            }),
        }
    }
    wire
}
