//! Conversion of a system prompt and messages into the messages that chat templates render.
//!
//! A message of Anthropic's API is a list of content blocks. Templates have a message of its own
//! for the result of each tool call, and calls and reasoning of an answer in fields beside its
//! text. Consecutive messages of one role become one message, because many templates require that
//! roles alternate.

use serde_json::{Map, Value, json};

use super::object;
use crate::{
    http::fields::RequestFields,
    request::error::{FieldError, invalid_value, parse_field},
};

const SYSTEM: &str = "system";
const MESSAGES: &str = "messages";
const CONTENT_ALLOWED: &str = "a string or a list of content blocks";
/// Beginning of a line that Claude Code puts before its system prompt. The line is dropped: it only
/// identifies the client, and it varies, so it would prevent prefix cache hits.
const CLIENT_VERSION: &str = "x-anthropic-billing-header:";

/// A conversation for a chat template.
#[derive(Debug, PartialEq)]
pub(super) struct Conversation {
    pub messages: Value,
    /// Whether the answer continues the last message.
    pub continues: bool,
    /// Length of the fields as JSON.
    pub bytes: usize,
}

impl Conversation {
    pub(super) fn read(fields: &RequestFields<'_>) -> Result<Self, FieldError> {
        let mut turns = Turns::default();
        let system = fields.raw(SYSTEM);
        if let Some(text) = system {
            let content: Value = parse_field(SYSTEM, text, CONTENT_ALLOWED)?;
            turns.add_content(Role::System, SYSTEM, &content)?;
        }
        let allowed = "a list of messages, each with role and content";
        let Some(text) = fields.raw(MESSAGES) else {
            return Err(FieldError::new(MESSAGES, format!("is missing; allowed: {allowed}")));
        };
        let messages: Vec<Value> = parse_field(MESSAGES, text, allowed)?;
        for (index, message) in messages.iter().enumerate() {
            turns.add_message(&format!("{MESSAGES}[{index}]"), message)?;
        }
        turns.add_reminders();
        let Some(last) = turns.all.last().filter(|last| last.role != Role::System) else {
            let problem = "has no message of the user or the assistant with content; allowed: at \
                           least one";
            return Err(FieldError::new(MESSAGES, problem));
        };
        let continues = last.role == Role::Assistant;
        let has_text = last.texts.last().is_some_and(|text| !text.trim().is_empty());
        if continues && (!last.calls.is_empty() || !has_text) {
            let problem = "ends with an answer that cannot be continued; allowed: a message of \
                           the user, or an answer of text alone at the end";
            return Err(FieldError::new(MESSAGES, problem));
        }
        Ok(Self {
            messages: turns.all.into_iter().map(Turn::into_message).collect(),
            continues,
            bytes: text.len() + system.map_or(0, str::len),
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    System,
    User,
    Assistant,
    Tool,
}

/// A message for the chat template.
struct Turn {
    role: Role,
    texts: Vec<String>,
    /// The reasoning before an answer.
    reasoning: String,
    calls: Vec<Value>,
    /// Id of the call whose result the message is.
    call_id: Option<String>,
}

impl Turn {
    fn new(role: Role) -> Self {
        Self { role, texts: vec![], reasoning: String::new(), calls: vec![], call_id: None }
    }

    fn into_message(self) -> Value {
        let role = match self.role {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        };
        let content: Value =
            self.texts.iter().map(|text| json!({"type": "text", "text": text})).collect();
        let mut message = Map::new();
        message.insert("role".to_owned(), role.into());
        message.insert("content".to_owned(), content);
        if !self.reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), self.reasoning.into());
        }
        if !self.calls.is_empty() {
            message.insert("tool_calls".to_owned(), self.calls.into());
        }
        if let Some(id) = self.call_id {
            message.insert("tool_call_id".to_owned(), id.into());
        }
        message.into()
    }
}

#[derive(Default)]
struct Turns {
    all: Vec<Turn>,
    /// System messages between calls and their results. They follow the results, because templates
    /// expect those directly after the calls.
    reminders: Vec<String>,
}

impl Turns {
    fn add_message(&mut self, field: &str, message: &Value) -> Result<(), FieldError> {
        let message = object(field, message)?;
        let role = match message.get("role").and_then(Value::as_str) {
            Some("user") => Role::User,
            Some("assistant") => Role::Assistant,
            Some("system") => Role::System,
            _ => {
                let found = message.get("role").unwrap_or(&Value::Null).to_string();
                let allowed = "user, assistant or system";
                return Err(invalid_value(&format!("{field}.role"), &found, allowed));
            }
        };
        let content = message.get("content").unwrap_or(&Value::Null);
        if role == Role::Assistant {
            self.add_reminders();
        }
        self.add_content(role, &format!("{field}.content"), content)?;
        if role == Role::User {
            self.add_reminders();
        }
        Ok(())
    }

    /// Adds the system messages that wait for the results of calls.
    fn add_reminders(&mut self) {
        if !self.reminders.is_empty() {
            let reminders = std::mem::take(&mut self.reminders);
            self.turn(Role::User).texts.extend(reminders);
        }
    }

    fn add_content(&mut self, role: Role, field: &str, content: &Value) -> Result<(), FieldError> {
        match content {
            Value::String(text) => self.add_text(role, text),
            Value::Array(blocks) => {
                for (index, block) in blocks.iter().enumerate() {
                    let field = format!("{field}[{index}]");
                    self.add_block(role, &field, object(&field, block)?)?;
                }
            }
            other => return Err(invalid_value(field, &other.to_string(), CONTENT_ALLOWED)),
        }
        Ok(())
    }

    fn add_block(
        &mut self,
        role: Role,
        field: &str,
        block: &Map<String, Value>,
    ) -> Result<(), FieldError> {
        match (role, block.get("type").and_then(Value::as_str)) {
            (_, Some("text")) => self.add_text(role, string(field, block, "text")?),
            (Role::Assistant, Some("thinking")) => {
                let reasoning = string(field, block, "thinking")?;
                self.turn(role).reasoning.push_str(reasoning);
            }
            // Only another server can read it.
            (Role::Assistant, Some("redacted_thinking")) => {}
            (Role::Assistant, Some("tool_use")) => {
                let (id, name) = (string(field, block, "id")?, string(field, block, "name")?);
                let input_field = format!("{field}.input");
                let input = object(&input_field, block.get("input").unwrap_or(&Value::Null))?;
                let call = json!({"id": id, "type": "function", "function": {
                    "name": name, "arguments": input,
                }});
                self.turn(role).calls.push(call);
            }
            (Role::User, Some("tool_result")) => self.add_result(field, block)?,
            (role, _) => return Err(unsupported_block(role, field, block)),
        }
        Ok(())
    }

    fn add_result(&mut self, field: &str, block: &Map<String, Value>) -> Result<(), FieldError> {
        let mut result = Turn::new(Role::Tool);
        result.call_id = Some(string(field, block, "tool_use_id")?.to_owned());
        // Templates have no field for a failure.
        match block.get("is_error") {
            None | Some(Value::Null | Value::Bool(false)) => {}
            Some(Value::Bool(true)) => result.texts.push("Error:".to_owned()),
            Some(other) => {
                let field = format!("{field}.is_error");
                return Err(invalid_value(&field, &other.to_string(), "true or false"));
            }
        }
        self.all.push(result);
        match block.get("content") {
            None | Some(Value::Null) => Ok(()),
            Some(content) => self.add_content(Role::Tool, &format!("{field}.content"), content),
        }
    }

    fn add_text(&mut self, role: Role, text: &str) {
        if role != Role::System {
            if role == Role::User {
                self.add_reminders();
            }
            self.turn(role).texts.push(text.to_owned());
        } else if self.all.iter().all(|turn| turn.role == Role::System) {
            let text = match text.starts_with(CLIENT_VERSION) {
                true => text.split_once('\n').map_or("", |(_, rest)| rest.trim_start()),
                false => text,
            };
            if !text.is_empty() {
                self.turn(role).texts.push(text.to_owned());
            }
        } else {
            // Many templates refuse or drop a system message after the first message.
            self.reminders.push(format!("<system-reminder>\n{text}\n</system-reminder>"));
            if self.all.last().is_none_or(|last| last.calls.is_empty()) {
                self.add_reminders();
            }
        }
    }

    /// Returns the last message if it has this role, otherwise a new one.
    fn turn(&mut self, role: Role) -> &mut Turn {
        if self.all.last().is_none_or(|last| last.role != role) {
            self.all.push(Turn::new(role));
        }
        self.all.last_mut().expect("a message was added")
    }
}

fn string<'a>(
    field: &str,
    block: &'a Map<String, Value>,
    name: &str,
) -> Result<&'a str, FieldError> {
    let field = || format!("{field}.{name}");
    match block.get(name) {
        Some(Value::String(text)) => Ok(text),
        None => Err(FieldError::new(field(), "is missing; allowed: a string")),
        Some(other) => Err(invalid_value(&field(), &other.to_string(), "a string")),
    }
}

fn unsupported_block(role: Role, field: &str, block: &Map<String, Value>) -> FieldError {
    let allowed = match role {
        Role::System | Role::Tool => "text",
        Role::User => "text or tool_result",
        Role::Assistant => "text, tool_use, thinking or redacted_thinking",
    };
    let kind = block.get("type").unwrap_or(&Value::Null).to_string();
    invalid_value(&format!("{field}.type"), &kind, allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &Value) -> Result<Conversation, String> {
        let body = body.to_string();
        let fields = RequestFields::parse(body.as_bytes()).unwrap();
        Conversation::read(&fields).map_err(|error| error.to_string())
    }

    fn messages(body: &Value) -> Value {
        read(body).unwrap().messages
    }

    fn text(text: &str) -> Value {
        json!({"type": "text", "text": text})
    }

    #[test]
    fn system_message_between_a_call_and_its_result_follows_the_result() {
        let call = json!({"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": {}},
        ]});
        let result = json!({"type": "tool_result", "tool_use_id": "a", "content": "rain"});
        let (hi, hurry) = (
            json!({"role": "user", "content": "hi"}),
            json!({"role": "system", "content": "Hurry."}),
        );
        let reminder = text("<system-reminder>\nHurry.\n</system-reminder>");
        let after_call = |content: Value| {
            let user = json!({"role": "user", "content": content});
            messages(&json!({"messages": [hi, call, hurry, user]})).as_array().unwrap()[2..]
                .to_vec()
        };
        let tool = json!({"role": "tool", "content": [text("rain")], "tool_call_id": "a"});
        let user = |texts: Value| json!({"role": "user", "content": texts});
        assert_eq!(after_call(json!([result])), [tool.clone(), user(json!([reminder]))]);
        let both = user(json!([reminder, text("So?")]));
        assert_eq!(after_call(json!([result, text("So?")])), [tool, both.clone()]);
        assert_eq!(after_call(json!("So?")), [both]);
        let last = messages(&json!({"messages": [hi, call, hurry]}));
        assert_eq!(last[2], user(json!([reminder])));
    }

    #[test]
    fn blocks_become_the_messages_of_a_template() {
        let body = json!({
            "system": [text("x-anthropic-billing-header: v=1"), text("Be brief.")],
            "messages": [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "I look.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "?"},
                    {"type": "text", "text": "Wait.", "cache_control": {"type": "ephemeral"}},
                    {"type": "tool_use", "id": "a", "name": "f", "input": {"city": "Köln"}},
                    {"type": "tool_use", "id": "b", "name": "g", "input": {}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": [text("rain")]},
                    {"type": "tool_result", "tool_use_id": "b", "content": "no g", "is_error": true},
                    {"type": "tool_result", "tool_use_id": "c"},
                    text("So?"),
                ]},
                {"role": "system", "content": "Hurry."},
                {"role": "user", "content": "Now."},
            ],
        });
        let call = |id: &str, name: &str, arguments: Value| {
            let function = json!({"name": name, "arguments": arguments});
            json!({"id": id, "type": "function", "function": function})
        };
        let expected = json!([
            {"role": "system", "content": [text("Be brief.")]},
            {"role": "user", "content": [text("Weather?")]},
            {
                "role": "assistant", "content": [text("Wait.")], "reasoning_content": "I look.",
                "tool_calls": [call("a", "f", json!({"city": "Köln"})), call("b", "g", json!({}))],
            },
            {"role": "tool", "content": [text("rain")], "tool_call_id": "a"},
            {"role": "tool", "content": [text("Error:"), text("no g")], "tool_call_id": "b"},
            {"role": "tool", "content": [], "tool_call_id": "c"},
            {"role": "user", "content": [
                text("So?"), text("<system-reminder>\nHurry.\n</system-reminder>"), text("Now."),
            ]},
        ]);
        assert_eq!(messages(&body), expected);
    }

    #[test]
    fn last_message_of_the_assistant_is_continued() {
        let user = json!({"role": "user", "content": "Hi"});
        let answer = |content: Value| json!({"role": "assistant", "content": content});
        assert!(!read(&json!({"messages": [user]})).unwrap().continues);
        assert!(read(&json!({"messages": [user, answer(json!("Yes,"))]})).unwrap().continues);
        let call = json!({"type": "tool_use", "id": "a", "name": "f", "input": {}});
        for content in [json!(""), json!([]), json!([call]), json!([text("I look."), call])] {
            let is_empty = content == json!([]);
            let said = read(&json!({"messages": [user, answer(content)]}));
            match is_empty {
                true => assert!(!said.unwrap().continues),
                false => {
                    let words = "messages ends with an answer that cannot be continued; allowed: ";
                    assert!(said.unwrap_err().starts_with(words));
                }
            }
        }
    }

    #[test]
    fn invalid_blocks_are_rejected_by_path() {
        let user = |block: Value| json!({"messages": [{"role": "user", "content": [block]}]});
        let answer =
            |block: Value| json!({"messages": [{"role": "assistant", "content": [block]}]});
        let image = json!({"type": "image", "source": {"type": "url", "url": "http://x/y"}});
        let result =
            |content: Value| json!({"type": "tool_result", "tool_use_id": "a", "content": content});
        for (body, said) in [
            (json!({}), "messages is missing; allowed: a list of messages, each with role and"),
            (json!({"messages": []}), "messages has no message of the user or the assistant"),
            (
                json!({"messages": [{"role": "system", "content": "x"}]}),
                "messages has no message of the user or the assistant",
            ),
            (json!({"messages": "hi"}), "messages is \"hi\"; allowed: a list of messages"),
            (json!({"messages": ["hi"]}), "messages[0] is \"hi\"; allowed: an object"),
            (
                json!({"messages": [{"role": "tool", "content": "x"}]}),
                "messages[0].role is \"tool\"; allowed: user, assistant or system",
            ),
            (
                json!({"messages": [{"role": "user"}]}),
                "messages[0].content is null; allowed: a string or a list of content blocks",
            ),
            (json!({"messages": [], "system": 7}), "system is 7; allowed: a string or a list"),
            (
                json!({"messages": [], "system": [image]}),
                "system[0].type is \"image\"; allowed: text",
            ),
            (
                user(image.clone()),
                "messages[0].content[0].type is \"image\"; allowed: text or tool_result",
            ),
            (
                user(json!({"type": "document"})),
                "messages[0].content[0].type is \"document\"; allowed: text or tool_result",
            ),
            (
                user(result(json!([image]))),
                "messages[0].content[0].content[0].type is \"image\"; allowed: text",
            ),
            (
                user(json!({"type": "tool_result"})),
                "messages[0].content[0].tool_use_id is missing; allowed: a string",
            ),
            (user(json!({"type": "text", "text": 1})), "messages[0].content[0].text is 1; allowed"),
            (
                answer(json!({"type": "tool_use", "id": "a", "name": "f", "input": "{}"})),
                "messages[0].content[0].input is a string (4 bytes); allowed: an object",
            ),
            (
                answer(json!({"type": "server_tool_use"})),
                "messages[0].content[0].type is \"server_tool_use\"; allowed: text, tool_use, ",
            ),
        ] {
            let error = read(&body).unwrap_err();
            assert!(error.starts_with(said), "{error}");
        }
    }
}
