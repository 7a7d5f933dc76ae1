//! A call that is a name, a tag, and the arguments as a JSON object.

use super::{
    CallBody, CallStep, CallableFunction, ToolCall,
    json_object::{JsonObject, JsonStep},
};

/// Maximum size of the text before the arguments, in bytes: a name, an id and tags.
const HEADER_BYTES_MAX: usize = 1024;

/// Parser of a name and a JSON object. The name ends with `name_end`, or at the beginning of the
/// object.
#[derive(Debug)]
pub(super) struct NamedBody {
    name_end: &'static str,
    /// Returns the name of the function in the text before `name_end`.
    name_in: fn(&str) -> &str,
    name: Option<String>,
    /// The arguments, and where they start.
    arguments: Option<(usize, JsonObject)>,
}

impl NamedBody {
    pub(super) fn new(name_end: &'static str, name_in: fn(&str) -> &str) -> Self {
        Self { name_end, name_in, name: None, arguments: None }
    }
}

impl CallBody for NamedBody {
    fn push(&mut self, text: &str, last: char, functions: &[CallableFunction]) -> CallStep {
        if let (Some(name), Some((start, json))) = (&self.name, &mut self.arguments) {
            return match json.feed_char(last) {
                JsonStep::Broken => CallStep::Broken,
                JsonStep::Complete => {
                    let (name, arguments) = (name.clone(), text[*start..].to_owned());
                    CallStep::Call(ToolCall { name, arguments })
                }
                _ => CallStep::More,
            };
        }
        let header = text.strip_suffix(self.name_end).or_else(|| text.strip_suffix('{'));
        if let Some(header) = header.filter(|_| self.name.is_none()) {
            let name = (self.name_in)(header).trim();
            if !functions.iter().any(|function| function.name == name) {
                return CallStep::Broken;
            }
            self.name = Some(name.to_owned());
        }
        match last {
            '{' => {
                let mut json = JsonObject::default();
                json.feed(b'{');
                self.arguments = Some((text.len() - 1, json));
            }
            _ if header.is_some() || self.name.is_some() && last.is_whitespace() => {}
            _ if self.name.is_none() && text.len() <= HEADER_BYTES_MAX => {}
            _ => return CallStep::Broken,
        }
        CallStep::More
    }

    fn cut(&self, text: &str) -> Option<ToolCall> {
        let arguments = self.arguments.as_ref().map_or("", |(start, _)| &text[*start..]);
        Some(ToolCall { name: self.name.clone()?, arguments: arguments.to_owned() })
    }
}
