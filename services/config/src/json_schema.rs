//! The JSON Schema of the configuration file.

use serde_json::{Value as Json, json};

use crate::load::Section;

const ABOUT: &str = "Settings of a Baton program.";

/// Returns the JSON Schema (draft 7, which Helm reads) of a file with these sections, without
/// former names.
pub fn json_schema(sections: &[Section]) -> Json {
    let closed = |description: String, properties: serde_json::Map<String, Json>| {
        json!({
            "description": description,
            "type": "object",
            "additionalProperties": false,
            "properties": properties,
        })
    };
    let of_section = |section: &Section| {
        let settings = section.settings();
        let settings = settings.iter().map(|it| (it.name.to_owned(), it.described_schema()));
        (section.name().to_owned(), closed(section.about(), settings.collect()))
    };
    let mut schema = closed(ABOUT.to_owned(), sections.iter().map(of_section).collect());
    schema["$schema"] = "http://json-schema.org/draft-07/schema#".into();
    schema
}
