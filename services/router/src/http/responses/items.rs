//! Items of a response's input: their check, their ids, and their conversion into messages for the
//! chat template.

use serde_json::{Map, Value, json};

use crate::request::error::{FieldError, invalid_value};

const INPUT: &str = "input";
const INPUT_ALLOWED: &str = "a string, or a list of items";
const TYPES_ALLOWED: &str = "message, function_call, function_call_output or reasoning";
const PARTS_ALLOWED: &str = "a string, or a list of parts, each with type input_text and a text";
/// Begins the `encrypted_content` of reasoning; its text follows.
pub(super) const REASONING_PREFIX: &str = "baton-thought:";

/// Returns the items of `input`, each with type and id. `id` is the request's id.
pub(super) fn input_items(input: Value, id: &str) -> Result<Vec<Value>, FieldError> {
    let items = match input {
        Value::String(text) => {
            vec![json!({"role": "user", "content": [{"type": "input_text", "text": text}]})]
        }
        Value::Array(items) if !items.is_empty() => items,
        Value::Array(_) => {
            return Err(FieldError::new(INPUT, "is empty; allowed: at least one item"));
        }
        other => return Err(invalid_value(INPUT, &other.to_string(), INPUT_ALLOWED)),
    };
    items.into_iter().enumerate().map(|(index, item)| with_type_and_id(item, index, id)).collect()
}

fn with_type_and_id(item: Value, index: usize, id: &str) -> Result<Value, FieldError> {
    let field = format!("{INPUT}[{index}]");
    let Value::Object(mut item) = item else {
        return Err(invalid_value(&field, &item.to_string(), "an object"));
    };
    if !item.contains_key("type") && item.contains_key("role") {
        item.insert("type".to_owned(), "message".into());
    }
    let prefix = match item.get("type").and_then(Value::as_str) {
        Some("message") => {
            if let Some(Value::String(text)) = item.get("content") {
                let is_answer = item.get("role").is_some_and(|role| role == "assistant");
                let kind = if is_answer { "output_text" } else { "input_text" };
                let part = json!([{"type": kind, "text": text}]);
                item.insert("content".to_owned(), part);
            }
            "msg"
        }
        Some("function_call") => "fc",
        Some("function_call_output") => "fco",
        Some("reasoning") => "rs",
        Some("item_reference") => {
            let problem = "is \"item_reference\"; the router resolves no references; allowed: the item itself, or \
                           previous_response_id";
            return Err(FieldError::new(format!("{field}.type"), problem));
        }
        _ => {
            let kind = item.get("type").unwrap_or(&Value::Null).to_string();
            return Err(invalid_value(&format!("{field}.type"), &kind, TYPES_ALLOWED));
        }
    };
    if !item.get("id").is_some_and(Value::is_string) {
        item.insert("id".to_owned(), format!("{prefix}_{id}_in{index}").into());
    }
    Ok(Value::Object(item))
}

/// Messages for the chat template.
#[derive(Default)]
pub(super) struct Transcript {
    messages: Vec<Map<String, Value>>,
    /// Whether the last message is of the assistant and takes further parts of its turn.
    is_answer_open: bool,
}

impl Transcript {
    /// Returns a transcript that begins with instructions.
    pub(super) fn new(instructions: Option<&str>) -> Self {
        let mut transcript = Self::default();
        if let Some(text) = instructions {
            transcript.message("system", text.into());
        }
        transcript
    }

    pub(super) fn into_messages(self) -> Value {
        self.messages.into_iter().map(Value::Object).collect()
    }

    /// Appends an item of [`input_items`], or of the output of an earlier response. `field` is its
    /// name in errors.
    pub(super) fn push(&mut self, item: &Value, field: &str) -> Result<(), FieldError> {
        match item["type"].as_str().unwrap_or_default() {
            "function_call" => {
                let name = string(item, field, "name")?;
                let arguments = string(item, field, "arguments")?;
                let id = string(item, field, "call_id")?;
                let call = json!({"id": id, "type": "function",
                    "function": {"name": name, "arguments": arguments}});
                let calls = self.answer().entry("tool_calls").or_insert_with(|| json!([]));
                calls.as_array_mut().into_iter().for_each(|calls| calls.push(call.clone()));
            }
            "function_call_output" => {
                let id = string(item, field, "call_id")?;
                let content = content(&item["output"], &format!("{field}.output"))?;
                let message = self.message("tool", content);
                message.insert("tool_call_id".to_owned(), id.into());
            }
            "reasoning" => {
                if let Some(text) = reasoning(item, field)? {
                    // Reasoning begins a turn of the assistant.
                    self.is_answer_open = false;
                    self.answer().insert("reasoning_content".to_owned(), text.into());
                }
            }
            _ => self.push_message(item, field)?,
        }
        Ok(())
    }

    fn push_message(&mut self, item: &Value, field: &str) -> Result<(), FieldError> {
        let text = content(&item["content"], &format!("{field}.content"))?;
        match item["role"].as_str() {
            Some("assistant") => {
                let is_new = self.messages.last().is_some_and(|last| {
                    last.get("content").is_some_and(|content| !content.is_null())
                        || last.contains_key("tool_calls")
                });
                self.is_answer_open &= !is_new;
                self.answer().insert("content".to_owned(), text);
            }
            // Many chat templates take one system message only, at the beginning.
            Some("system" | "developer")
                if let [only] = &mut self.messages[..]
                    && only["role"] == "system"
                    && let (Some(before), Some(text)) =
                        (only["content"].as_str(), text.as_str()) =>
            {
                let joined = format!("{before}\n\n{text}");
                only.insert("content".to_owned(), joined.into());
            }
            Some("developer") if self.messages.is_empty() => drop(self.message("system", text)),
            Some(role @ ("user" | "system" | "developer")) => drop(self.message(role, text)),
            _ => {
                let allowed = "user, assistant, system or developer";
                return Err(invalid_value(
                    &format!("{field}.role"),
                    &item["role"].to_string(),
                    allowed,
                ));
            }
        }
        Ok(())
    }

    fn message(&mut self, role: &str, content: Value) -> &mut Map<String, Value> {
        self.is_answer_open = role == "assistant";
        let message = [("role", role.into()), ("content", content)];
        self.messages
            .push(message.map(|(name, value)| (name.to_owned(), value)).into_iter().collect());
        self.messages.last_mut().expect("a message was appended")
    }

    /// Returns the message of the assistant's current turn.
    fn answer(&mut self) -> &mut Map<String, Value> {
        match self.is_answer_open {
            true => self.messages.last_mut().expect("an open answer is the last message"),
            false => self.message("assistant", Value::Null),
        }
    }
}

fn string<'a>(item: &'a Value, field: &str, name: &str) -> Result<&'a str, FieldError> {
    let value = &item[name];
    value.as_str().ok_or_else(|| {
        let field = format!("{field}.{name}");
        match value.is_null() {
            true => FieldError::new(field, "is missing; allowed: a string"),
            false => invalid_value(&field, &value.to_string(), "a string"),
        }
    })
}

/// Returns the text of a message or of a call's output. Refuses images and files by name.
fn content(value: &Value, field: &str) -> Result<Value, FieldError> {
    let invalid = |value: &Value| invalid_value(field, &value.to_string(), PARTS_ALLOWED);
    let parts = match value {
        Value::String(_) => return Ok(value.clone()),
        Value::Array(parts) => parts,
        Value::Null => {
            let problem = format!("is missing; allowed: {PARTS_ALLOWED}");
            return Err(FieldError::new(field, problem));
        }
        other => return Err(invalid(other)),
    };
    let part = |(index, part): (usize, &Value)| {
        let text = match part["type"].as_str() {
            Some("input_text" | "output_text" | "text") => &part["text"],
            Some("refusal") => &part["refusal"],
            Some(kind @ ("input_image" | "input_file" | "input_audio")) => {
                let problem = format!("is {kind:?}, which is not supported; allowed: input_text");
                return Err(FieldError::new(format!("{field}[{index}].type"), problem));
            }
            _ => return Err(invalid(value)),
        };
        match text.is_string() {
            true => Ok(json!({"type": "text", "text": text})),
            false => {
                let field = format!("{field}[{index}].text");
                Err(invalid_value(&field, &text.to_string(), "a string"))
            }
        }
    };
    let parts = parts.iter().enumerate().map(part).collect::<Result<Vec<_>, _>>()?;
    Ok(match &parts[..] {
        [only] => only["text"].clone(),
        _ => parts.into(),
    })
}

/// Returns the text of a reasoning item; `None` if the item has a summary only.
fn reasoning(item: &Value, field: &str) -> Result<Option<String>, FieldError> {
    let parts = item["content"].as_array().map_or(&[][..], Vec::as_slice);
    let text: String = parts.iter().filter_map(|part| part["text"].as_str()).collect();
    if !text.is_empty() {
        return Ok(Some(text));
    }
    match &item["encrypted_content"] {
        Value::Null => Ok(None),
        Value::String(text) if let Some(text) = text.strip_prefix(REASONING_PREFIX) => {
            Ok(Some(text.to_owned()))
        }
        other => {
            let field = format!("{field}.encrypted_content");
            Err(invalid_value(&field, &other.to_string(), "a value from this API"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(instructions: Option<&str>, input: Value) -> Result<Value, String> {
        let read = || {
            let mut transcript = Transcript::new(instructions);
            for (index, item) in input_items(input, "7")?.iter().enumerate() {
                transcript.push(item, &format!("input[{index}]"))?;
            }
            Ok(transcript.into_messages())
        };
        read().map_err(|error: FieldError| error.to_string())
    }

    #[test]
    fn a_string_is_a_message_of_the_user() {
        let expected = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi"},
        ]);
        assert_eq!(messages(Some("Be brief."), json!("hi")), Ok(expected));
        let items = input_items(json!("hi"), "7").unwrap();
        let item = json!({"type": "message", "id": "msg_7_in0", "role": "user",
            "content": [{"type": "input_text", "text": "hi"}]});
        assert_eq!(items, [item]);
    }

    #[test]
    fn a_turn_of_the_assistant_is_one_message() {
        let call = |id: &str| json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"});
        let input = json!([
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "id": "msg_1",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
            call("c1"),
            call("c2"),
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {"type": "function_call_output", "call_id": "c2", "output":
                [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            call("c3"),
            {"role": "assistant", "content": "one"},
            {"role": "assistant", "content": "two"},
        ]);
        let called = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
        let expected = json!([
            {"role": "user", "content": "hi"},
            {"role": "assistant", "reasoning_content": "hm", "content": "I look.",
                "tool_calls": [called("c1"), called("c2")]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "tool", "tool_call_id": "c2",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "tool_calls": [called("c3")]},
            {"role": "assistant", "content": "one"},
            {"role": "assistant", "content": "two"},
        ]);
        assert_eq!(messages(None, input), Ok(expected));
    }

    #[test]
    fn leading_instructions_are_one_system_message() {
        let input = json!([
            {"role": "developer", "content": "Rules."},
            {"role": "user", "content": "hi"},
            {"role": "developer", "content": "More."},
        ]);
        let expected = json!([
            {"role": "system", "content": "You code.\n\nRules."},
            {"role": "user", "content": "hi"},
            {"role": "developer", "content": "More."},
        ]);
        assert_eq!(messages(Some("You code."), input), Ok(expected));
    }

    #[test]
    fn reasoning_returns_in_its_encrypted_content() {
        let reasoning = |content: &str| {
            json!([{"role": "user", "content": "hi"},
                {"type": "reasoning", "summary": [], "encrypted_content": content}])
        };
        let read = messages(None, reasoning("baton-thought:hm")).unwrap();
        assert_eq!(read[1]["reasoning_content"], "hm");
        let error = messages(None, reasoning("gAAAA")).unwrap_err();
        assert_eq!(
            error,
            "input[1].encrypted_content is \"gAAAA\"; allowed: a value from this API"
        );
    }

    #[test]
    fn invalid_items_are_rejected_with_their_field() {
        for (input, words) in [
            (json!(7), "input is 7; allowed: a string, or a list of items"),
            (json!([]), "input is empty"),
            (json!([7]), "input[0] is 7; allowed: an object"),
            (
                json!([{"type": "web_search_call"}]),
                "input[0].type is \"web_search_call\"; allowed: message",
            ),
            (
                json!([{"type": "item_reference", "id": "x"}]),
                "input[0].type is \"item_reference\"; the router",
            ),
            (json!([{"role": "tool", "content": ""}]), "input[0].role is \"tool\"; allowed: user"),
            (json!([{"role": "user"}]), "input[0].content is missing"),
            (
                json!([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
                "input[0].content[0].type is \"input_image\", which is not supported",
            ),
            (
                json!([{"role": "user", "content": [{"type": "input_text", "text": 1}]}]),
                "input[0].content[0].text is 1; allowed: a string",
            ),
            (json!([{"type": "function_call", "name": "f"}]), "input[0].arguments is missing"),
            (
                json!([{"type": "function_call_output", "call_id": "c"}]),
                "input[0].output is missing",
            ),
        ] {
            let error = messages(None, input.clone()).unwrap_err();
            assert!(error.starts_with(words), "{input}: {error}");
        }
    }
}
