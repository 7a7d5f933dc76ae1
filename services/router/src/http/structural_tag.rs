//! Structural tags of vLLM and SGLang: free text, and JSON that follows a schema after a trigger.
//!
//! One trigger begins all structures, and one text ends them. This is the grammar of tool calls in
//! free text.

use grammar::{
    Alternative, CallSyntax, CallableTool, FreeText, Grammar, ToolCalls,
    limits::{LITERAL_BYTES_MAX, NAME_BYTES_MAX, TOOLS_MAX},
};
use serde::Deserialize;
use serde_json::{json, value::RawValue};

use super::grammar_fields::object;
use crate::request::{
    error::{FieldError, invalid_value},
    options::{RequestedGrammar, SchemaField},
};

/// Type of the object.
pub(super) const STRUCTURAL_TAG: &str = "structural_tag";

const ALLOWED: &str = "structures and triggers, or a format with type triggered_tags";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StructuralTag<'a> {
    #[serde(rename = "type")]
    _type: String,
    #[serde(borrow)]
    structures: Option<Vec<Structure<'a>>>,
    triggers: Option<Vec<String>>,
    #[serde(borrow)]
    format: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Structure<'a> {
    begin: String,
    #[serde(borrow)]
    schema: &'a RawValue,
    end: String,
}

/// xgrammar's form.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TriggeredTags<'a> {
    #[serde(rename = "type")]
    _type: String,
    triggers: Vec<String>,
    #[serde(borrow)]
    tags: Vec<Tag<'a>>,
    #[serde(default)]
    at_least_one: bool,
    #[serde(default)]
    stop_after_first: bool,
    #[serde(default)]
    excludes: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tag<'a> {
    r#type: Option<String>,
    begin: String,
    #[serde(borrow)]
    content: &'a RawValue,
    end: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Content<'a> {
    #[serde(rename = "type")]
    _type: String,
    #[serde(borrow)]
    json_schema: &'a RawValue,
    style: Option<String>,
    #[serde(default)]
    any_order: bool,
}

/// The structures of either form.
struct Structures<'a> {
    triggers: Vec<String>,
    /// Each structure with its field.
    all: Vec<(String, Structure<'a>)>,
    /// Whether text and structures may follow a structure.
    several: bool,
}

/// Reads the structural tag of a field.
pub(super) fn structural_tag(
    field: &'static str,
    text: &str,
) -> Result<RequestedGrammar, FieldError> {
    let tag: StructuralTag<'_> = typed(field, text, STRUCTURAL_TAG)?;
    let Structures { triggers, all, several } = match (tag.structures, tag.triggers, tag.format) {
        (Some(structures), Some(triggers), None) => {
            let all = (0..)
                .zip(structures)
                .map(|(index, structure)| (format!("{field}.structures[{index}]"), structure));
            Structures { triggers, all: all.collect(), several: true }
        }
        (None, None, Some(format)) => triggered_tags(&format!("{field}.format"), format)?,
        _ => {
            let problem = format!("has neither or both of {ALLOWED}; allowed: one of them");
            return Err(FieldError::new(field, problem));
        }
    };
    let invalid = |problem: String| Err(FieldError::new(field, problem));
    let [trigger] = match <[String; 1]>::try_from(triggers) {
        Ok(trigger) => trigger,
        Err(triggers) => {
            return invalid(format!("has {} triggers; allowed: one", triggers.len()));
        }
    };
    if trigger.is_empty() {
        return invalid("has an empty trigger; allowed: at least one character".to_owned());
    }
    let (count, Some((_, Structure { end, .. }))) = (all.len(), all.first()) else {
        return invalid(format!("has no structure; allowed: 1 to {TOOLS_MAX}"));
    };
    if count > TOOLS_MAX {
        return invalid(format!("has {count} structures; allowed: 1 to {TOOLS_MAX}"));
    }
    let end = end.clone();
    if trigger.len().max(end.len()) > LITERAL_BYTES_MAX {
        return invalid(format!(
            "has a trigger or an end of more than {LITERAL_BYTES_MAX} bytes; allowed: at most these"
        ));
    }
    let (mut tools, mut schemas) = (Vec::with_capacity(count), Vec::with_capacity(count));
    for (place, structure) in all {
        let schema = structure.schema.get().to_owned();
        let name = rest_of_begin(&place, &structure, &trigger)?;
        if structure.end != end {
            let allowed = "the end of the first structure";
            return Err(invalid_text(&format!("{place}.end"), &structure.end, allowed));
        }
        tools.push(CallableTool { name, arguments: Some(schema) });
        schemas.push(SchemaField { field: format!("{place}.schema"), owner: None });
    }
    let syntax = CallSyntax {
        before_name: trigger.clone(),
        bare_name: true,
        after_arguments: end,
        ..CallSyntax::default()
    };
    let alternative = Alternative::Text(FreeText { tag: trigger, never_begins: None });
    let calls = ToolCalls { syntax, tools, several, alternative };
    Ok(RequestedGrammar { schemas, ..RequestedGrammar::new(field, Grammar::ToolCalls(calls)) })
}

/// Returns the text between the trigger and the JSON of a structure: the name of a call.
fn rest_of_begin(
    place: &str,
    structure: &Structure<'_>,
    trigger: &str,
) -> Result<String, FieldError> {
    let (begin, field) = (&structure.begin, format!("{place}.begin"));
    match begin.strip_prefix(trigger).filter(|rest| !rest.is_empty()) {
        Some(rest) if rest.len() > NAME_BYTES_MAX => {
            let bytes = rest.len();
            let problem =
                format!("has {bytes} bytes after the trigger; allowed: at most {NAME_BYTES_MAX}");
            Err(FieldError::new(field, problem))
        }
        Some(rest) => Ok(rest.to_owned()),
        None => Err(invalid_text(&field, begin, "the trigger and further text")),
    }
}

/// Reads a `format` of type `triggered_tags`.
fn triggered_tags<'a>(field: &str, raw: &'a RawValue) -> Result<Structures<'a>, FieldError> {
    let format: TriggeredTags<'a> = typed(field, raw.get(), "triggered_tags")?;
    if format.at_least_one || !format.excludes.is_empty() {
        let problem = "has at_least_one or excludes; allowed: neither of them";
        return Err(FieldError::new(field, problem));
    }
    let mut all = Vec::with_capacity(format.tags.len());
    for (index, Tag { r#type, begin, content, end }) in format.tags.into_iter().enumerate() {
        let place = format!("{field}.tags[{index}]");
        if let Some(other) = r#type.filter(|name| name != "tag") {
            return Err(invalid_text(&format!("{place}.type"), &other, "tag"));
        }
        let of_content = format!("{place}.content");
        let Content { json_schema, style, any_order, .. } =
            typed(&of_content, content.get(), "json_schema")?;
        if let Some(other) = style.filter(|style| style != "json") {
            return Err(invalid_text(&format!("{of_content}.style"), &other, "json"));
        }
        if any_order {
            return Err(invalid_value(&format!("{of_content}.any_order"), "true", "false"));
        }
        all.push((place, Structure { begin, schema: json_schema, end }));
    }
    Ok(Structures { triggers: format.triggers, all, several: !format.stop_after_first })
}

/// Parses an object of this type. The type is read first, because other types have other fields.
fn typed<'a, T: Deserialize<'a>>(
    field: &str,
    text: &'a str,
    expected: &str,
) -> Result<T, FieldError> {
    #[derive(Deserialize)]
    struct Typed {
        r#type: String,
    }
    let allowed = format!("an object with type {expected}");
    let Typed { r#type } = object(field, text, &allowed)?;
    if r#type != expected {
        return Err(invalid_text(&format!("{field}.type"), &r#type, expected));
    }
    object(field, text, &allowed)
}

fn invalid_text(field: &str, value: &str, allowed: &str) -> FieldError {
    invalid_value(field, &json!(value).to_string(), allowed)
}
