//! A call that is one JSON object: `{"name": "f", "arguments": {}}`.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{
    CallBody, CallStep, CallableFunction, ToolCall,
    json_object::{JsonObject, JsonStep},
};

/// Keys of a call.
const KEYS: [&str; 5] = ["name", "arguments", "parameters", "type", "id"];

/// Parser of a call that is a JSON object. A list may begin before the object.
#[derive(Debug, Default)]
pub(super) struct ObjectBody {
    takes_list: bool,
    object: Option<ObjectSoFar>,
}

#[derive(Debug)]
struct ObjectSoFar {
    start: usize,
    json: JsonObject,
    /// Whether the last key was `name`.
    in_name: bool,
    /// Name of the function.
    name: Option<String>,
    /// End of the key of the arguments in the object.
    arguments_key_end: Option<usize>,
}

impl ObjectBody {
    pub(super) fn in_list() -> Self {
        Self { takes_list: true, object: None }
    }
}

impl CallBody for ObjectBody {
    fn push(&mut self, text: &str, last: char, functions: &[CallableFunction]) -> CallStep {
        let Some(ObjectSoFar { start, json, in_name, name, arguments_key_end }) = &mut self.object
        else {
            match last {
                '{' => {
                    let mut json = JsonObject::default();
                    json.feed(b'{');
                    self.object = Some(ObjectSoFar {
                        start: text.len() - 1,
                        json,
                        in_name: false,
                        name: None,
                        arguments_key_end: None,
                    });
                }
                '[' if self.takes_list => self.takes_list = false,
                _ if last.is_whitespace() => {}
                _ => return CallStep::Broken,
            }
            return CallStep::More;
        };
        let object = &text[*start..];
        match json.feed_char(last) {
            JsonStep::Broken => return CallStep::Broken,
            JsonStep::Key(from, to) => {
                let key = &object[from + 1..to - 1];
                *in_name = key == "name";
                if ["arguments", "parameters"].contains(&key) {
                    *arguments_key_end = Some(to);
                }
                if !KEYS.contains(&key) {
                    return CallStep::Broken;
                }
            }
            JsonStep::Text(from, to) if *in_name => {
                *name = serde_json::from_str::<String>(&object[from..to]).ok();
                if !name.as_ref().is_some_and(|name| is_callable(functions, name)) {
                    return CallStep::Broken;
                }
            }
            JsonStep::Complete => {
                let call = call(object).filter(|call| is_callable(functions, &call.name));
                return call.map_or(CallStep::Broken, CallStep::Call);
            }
            JsonStep::Text(..) | JsonStep::More => {}
        }
        CallStep::More
    }

    fn cut(&self, text: &str) -> Option<ToolCall> {
        let ObjectSoFar { start, name, arguments_key_end, .. } = self.object.as_ref()?;
        let text = arguments_key_end.map_or("", |end| &text[start + end..]);
        let text = text.trim_start().strip_prefix(':').unwrap_or_default().trim_start();
        // Other keys may follow the arguments.
        let whole = serde_json::Deserializer::from_str(text).into_iter::<&RawValue>().next();
        let text = whole.and_then(Result::ok).map_or(text, RawValue::get);
        let arguments = match text.as_bytes().first() {
            Some(b'"') => string_so_far(text),
            _ => text.to_owned(),
        };
        let name = name.clone()?;
        (arguments.is_empty() || arguments.starts_with('{')).then_some(ToolCall { name, arguments })
    }
}

fn is_callable(functions: &[CallableFunction], name: &str) -> bool {
    functions.iter().any(|function| function.name == name)
}

/// Parses the object as a call.
fn call(object: &str) -> Option<ToolCall> {
    #[derive(Deserialize)]
    struct CallObject<'a> {
        name: String,
        #[serde(borrow, alias = "parameters")]
        arguments: Option<&'a RawValue>,
        r#type: Option<String>,
    }
    let call: CallObject<'_> = serde_json::from_str(object).ok()?;
    if call.r#type.is_some_and(|kind| kind != "function") {
        return None;
    }
    let arguments = match call.arguments.map(RawValue::get) {
        None => "{}".to_owned(),
        Some(arguments) if arguments.starts_with('{') => arguments.to_owned(),
        // Some models encode the arguments as a JSON string.
        Some(text) => {
            let inner: String = serde_json::from_str(text).ok()?;
            let is_object = serde_json::from_str::<&RawValue>(&inner)
                .is_ok_and(|inner| inner.get().starts_with('{'));
            is_object.then_some(inner)?
        }
    };
    Some(ToolCall { name: call.name, arguments })
}

/// Decodes the beginning of a JSON string, without an escape that is incomplete.
fn string_so_far(text: &str) -> String {
    /// Bytes of the longest incomplete escape: half a surrogate pair and most of the second half.
    const ESCAPE_BYTES_MAX: usize = 11;
    let closed = |end| serde_json::from_str(&format!("{}\"", &text[..end])).ok();
    let ends = (text.len().saturating_sub(ESCAPE_BYTES_MAX)..=text.len()).rev();
    let cut = || ends.filter(|end| text.is_char_boundary(*end)).find_map(closed);
    serde_json::from_str(text).ok().or_else(cut).unwrap_or_default()
}
