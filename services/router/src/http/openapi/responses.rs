//! Schemas of the response bodies, derived from the types that the router serializes.

use schemars::{JsonSchema, Schema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};

use crate::http::{
    info::Health,
    wire::{
        ChatChoice, ChatChunkChoice, Completion, Detokenized, ErrorBody, ModelList, TextChoice,
        Tokenized,
    },
};

pub fn schemas() -> Map<String, Value> {
    let settings = SchemaSettings::draft2020_12().for_serialize().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let mut generator = settings.into_generator();
    let completions = [
        ("ChatCompletion", completion::<ChatChoice>(&mut generator, "chat.completion", true)),
        (
            "ChatCompletionChunk",
            completion::<ChatChunkChoice>(&mut generator, "chat.completion.chunk", false),
        ),
        ("Completion", completion::<TextChoice<'_>>(&mut generator, "text_completion", true)),
        ("CompletionChunk", completion::<TextChoice<'_>>(&mut generator, "text_completion", false)),
    ];
    generator.subschema_for::<ErrorBody>();
    generator.subschema_for::<Health<'_>>();
    generator.subschema_for::<ModelList>();
    generator.subschema_for::<Tokenized>();
    generator.subschema_for::<Detokenized>();
    let mut schemas = generator.take_definitions(true);
    schemas.extend(completions.map(|(name, completion)| (name.to_owned(), completion.to_value())));
    schemas.values_mut().for_each(close);
    schemas
}

/// Returns the schema of a complete response, which has a usage, or of a chunk, whose usage is
/// optional.
fn completion<C: JsonSchema>(generator: &mut SchemaGenerator, object: &str, whole: bool) -> Schema {
    let mut schema = Completion::<'_, C>::json_schema(generator);
    if let Some(properties) = schema.get_mut("properties") {
        properties["object"] = json!({"const": object});
    }
    if let (true, Some(Value::Array(required))) = (whole, schema.get_mut("required")) {
        required.push("usage".into());
    }
    schema
}

/// Forbids further properties, and `null` for properties that the router omits instead.
fn close(schema: &mut Value) {
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) else {
        return;
    };
    for (name, property) in properties {
        // A chunk has no usage, `null`, or the usage.
        if name == "usage" || required.iter().any(|required| required == name) {
            continue;
        }
        if let Some(Value::Array(kinds)) = property.get_mut("type") {
            kinds.retain(|kind| kind != "null");
        }
        if let Some(Value::Array(choices)) = property.get_mut("anyOf") {
            choices.retain(|choice| choice["type"] != "null");
        }
    }
    schema["additionalProperties"] = false.into();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_required_in_answers_and_may_be_null_or_absent_in_chunks() {
        let schemas = schemas();
        let requires_usage =
            |name: &str| schemas[name]["required"].as_array().unwrap().contains(&json!("usage"));
        assert!(requires_usage("ChatCompletion") && requires_usage("Completion"));
        assert!(!requires_usage("ChatCompletionChunk") && !requires_usage("CompletionChunk"));
        let usage = json!({"anyOf": [{"$ref": "#/components/schemas/Usage"}, {"type": "null"}]});
        assert_eq!(schemas["CompletionChunk"]["properties"]["usage"]["anyOf"], usage["anyOf"]);
        assert_eq!(schemas["Completion"]["properties"]["object"]["const"], "text_completion");
    }

    #[test]
    fn omitted_properties_are_never_null_and_objects_are_closed() {
        let schemas = schemas();
        let choice = &schemas["ChatChoice"];
        assert_eq!(choice["properties"]["token_ids"]["type"], json!(["array"]));
        assert_eq!(choice["properties"]["stop_reason"]["anyOf"][1], json!({"type": "null"}));
        for (name, schema) in schemas.iter().filter(|(_, schema)| schema["type"] == "object") {
            assert_eq!(schema["additionalProperties"], false, "{name}");
        }
    }
}
