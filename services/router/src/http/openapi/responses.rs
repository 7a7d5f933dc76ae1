//! Schemas of the response bodies, derived from the types that the router serializes.

use schemars::{JsonSchema, Schema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};

use crate::http::{
    info::{Health, RouterVersion},
    messages::{BlockEvent, CountedTokens, MessageBody, MessageEvent, MessagesError},
    pooling::{EmbeddingList, RankedList, ScoreList},
    responses::object::{DeletedResponse, InputItems, ResponseEvent, ResponseObject},
    wire::{
        ChatChoice, ChatChunkChoice, Completion, Detokenized, ErrorBody, ModelList, TextChoice,
        Tokenized,
    },
};

/// Returns the schemas of all response bodies by their name in the OpenAPI document.
pub(super) fn schemas() -> Map<String, Value> {
    let settings = SchemaSettings::draft2020_12().for_serialize().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let mut generator = settings.into_generator();
    let chunks = [
        ("ChatCompletionChunk", chunk::<ChatChunkChoice>(&mut generator, "chat.completion.chunk")),
        ("CompletionChunk", chunk::<TextChoice<'_>>(&mut generator, "text_completion")),
    ];
    let completions = [
        ("ChatCompletion", chunk::<ChatChoice>(&mut generator, "chat.completion")),
        ("Completion", chunk::<TextChoice<'_>>(&mut generator, "text_completion")),
    ];
    let completions = completions.map(|(name, schema)| (name, with_required_usage(schema)));
    // Each call adds the type's schema to the definitions. The returned reference is not needed.
    generator.subschema_for::<ErrorBody>();
    generator.subschema_for::<Health<'_>>();
    generator.subschema_for::<RouterVersion>();
    generator.subschema_for::<ModelList>();
    generator.subschema_for::<MessageBody<'_>>();
    generator.subschema_for::<BlockEvent>();
    generator.subschema_for::<MessageEvent<'_>>();
    generator.subschema_for::<MessagesError<'_>>();
    generator.subschema_for::<CountedTokens>();
    generator.subschema_for::<ResponseObject>();
    generator.subschema_for::<ResponseEvent<'_>>();
    generator.subschema_for::<InputItems>();
    generator.subschema_for::<DeletedResponse>();
    generator.subschema_for::<EmbeddingList<'_>>();
    generator.subschema_for::<RankedList<'_>>();
    generator.subschema_for::<ScoreList<'_>>();
    generator.subschema_for::<Tokenized>();
    generator.subschema_for::<Detokenized>();
    let mut schemas = generator.take_definitions(true);
    let responses = completions.into_iter().chain(chunks);
    schemas.extend(responses.map(|(name, schema)| (name.to_owned(), schema.to_value())));
    schemas.values_mut().for_each(close);
    schemas
}

/// Returns the schema of a chunk of a stream, whose usage is absent, `null` or an object.
fn chunk<C: JsonSchema>(generator: &mut SchemaGenerator, object: &str) -> Schema {
    let mut schema = Completion::<'_, C>::json_schema(generator);
    if let Some(properties) = schema.get_mut("properties") {
        properties["object"] = json!({"const": object});
    }
    schema
}

/// Turns the schema of a chunk into the schema of a complete response, which always has a usage
/// object.
fn with_required_usage(mut schema: Schema) -> Schema {
    if let Some(Value::Array(required)) = schema.get_mut("required") {
        required.push("usage".into());
    }
    if let Some(properties) = schema.get_mut("properties") {
        remove_null(&mut properties["usage"]);
    }
    schema
}

/// Forbids additional properties, and `null` for properties that the router omits instead.
fn close(schema: &mut Value) {
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) else {
        return;
    };
    for (name, property) in properties {
        // Only the usage of a chunk may be `null`.
        if name == "usage" || required.iter().any(|required| required == name) {
            continue;
        }
        remove_null(property);
    }
    // The alternatives of an enum have properties of their own.
    let closing = match schema.get("oneOf") {
        Some(_) => "unevaluatedProperties",
        None => "additionalProperties",
    };
    schema[closing] = false.into();
}

/// Removes `null` from the values that a property's schema allows.
fn remove_null(property: &mut Value) {
    if let Some(Value::Array(types)) = property.get_mut("type") {
        types.retain(|name| name != "null");
    }
    if let Some(Value::Array(alternatives)) = property.get_mut("anyOf") {
        alternatives.retain(|alternative| alternative["type"] != "null");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_an_object_in_complete_responses_and_may_be_null_or_absent_in_chunks() {
        let schemas = schemas();
        let requires_usage =
            |name: &str| schemas[name]["required"].as_array().unwrap().contains(&json!("usage"));
        assert!(requires_usage("ChatCompletion") && requires_usage("Completion"));
        assert!(!requires_usage("ChatCompletionChunk") && !requires_usage("CompletionChunk"));
        let usage = json!({"anyOf": [{"$ref": "#/components/schemas/Usage"}, {"type": "null"}]});
        let usage_of = |name: &str| schemas[name]["properties"]["usage"]["anyOf"].clone();
        assert_eq!(usage_of("CompletionChunk"), usage["anyOf"]);
        assert_eq!(usage_of("ChatCompletionChunk"), usage["anyOf"]);
        assert_eq!(usage_of("Completion"), json!([usage["anyOf"][0]]));
        assert_eq!(usage_of("ChatCompletion"), json!([usage["anyOf"][0]]));
        assert_eq!(schemas["Completion"]["properties"]["object"]["const"], "text_completion");
    }

    #[test]
    fn omitted_properties_are_never_null_and_objects_are_closed() {
        let schemas = schemas();
        let choice = &schemas["ChatChoice"];
        assert_eq!(choice["properties"]["token_ids"]["type"], json!(["array"]));
        assert_eq!(choice["properties"]["stop_reason"]["anyOf"][1], json!({"type": "null"}));
        for (name, schema) in schemas.iter().filter(|(_, schema)| schema["type"] == "object") {
            let is_closed = |key: &str| schema[key] == false;
            let is_flat = schema.get("oneOf").is_none();
            assert_eq!(is_closed("additionalProperties"), is_flat, "{name}");
            assert_eq!(is_closed("unevaluatedProperties"), !is_flat, "{name}");
        }
    }
}
