//! Grammar fields of a request: OpenAI's `response_format`, and the names of SGLang and vLLM for a regular
//! expression and a schema. A request has at most one of these fields.

use grammar::Grammar;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::fields::Fields;
use crate::request::{
    asked_grammar::AskedGrammar,
    error::{FieldError, refused},
};

const FORMAT: &str = "response_format";
const FORMAT_ALLOWED: &str = "an object with type text, json_object or json_schema";
const SCHEMA: &str = "response_format.json_schema.schema";
const OUTPUTS: &str = "structured_outputs";
const OUTPUTS_ALLOWED: &str = "an object with json, regex or json_object";

pub fn grammar(fields: &Fields<'_>) -> Result<Option<AskedGrammar>, FieldError> {
    let all = [
        response_format(fields)?,
        regex(fields, "regex")?,
        regex(fields, "guided_regex")?,
        guided_json(fields)?,
        structured_outputs(fields)?,
    ];
    let mut asked = all.into_iter().flatten();
    let first = asked.next();
    match (&first, asked.next()) {
        (Some(first), Some(second)) => Err(FieldError::new(
            second.field,
            format!("is given together with {}; allowed: one of them", first.field),
        )),
        _ => Ok(first),
    }
}

fn response_format(fields: &Fields<'_>) -> Result<Option<AskedGrammar>, FieldError> {
    #[derive(Deserialize)]
    struct Format<'a> {
        r#type: String,
        #[serde(borrow)]
        json_schema: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Named<'a> {
        #[serde(borrow)]
        schema: Option<&'a RawValue>,
    }
    let Some(text) = fields.raw(FORMAT) else { return Ok(None) };
    let format: Format<'_> = object(text).ok_or_else(|| refused(FORMAT, text, FORMAT_ALLOWED))?;
    let grammar = match format.r#type.as_str() {
        "text" => return Ok(None),
        "json_object" => return Ok(Some(AskedGrammar::new(FORMAT, Grammar::json_object()))),
        "json_schema" => {
            let missing = || {
                FieldError::new(SCHEMA, "is missing; allowed: a JSON schema with type json_schema")
            };
            let named = format.json_schema.ok_or_else(missing)?.get();
            let named: Named<'_> = object(named).ok_or_else(|| {
                refused("response_format.json_schema", named, "an object with name and schema")
            })?;
            Grammar::JsonSchema(named.schema.ok_or_else(missing)?.get().to_owned())
        }
        _ => return Err(refused(FORMAT, text, FORMAT_ALLOWED)),
    };
    Ok(Some(AskedGrammar::new(SCHEMA, grammar)))
}

fn regex(fields: &Fields<'_>, name: &'static str) -> Result<Option<AskedGrammar>, FieldError> {
    let regex = fields.string(name)?;
    Ok(regex.map(|regex| AskedGrammar::new(name, Grammar::Regex(regex))))
}

fn guided_json(fields: &Fields<'_>) -> Result<Option<AskedGrammar>, FieldError> {
    const NAME: &str = "guided_json";
    let Some(text) = fields.raw(NAME) else { return Ok(None) };
    Ok(Some(AskedGrammar::new(NAME, schema_or_its_text(NAME, text)?)))
}

fn structured_outputs(fields: &Fields<'_>) -> Result<Option<AskedGrammar>, FieldError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Outputs<'a> {
        #[serde(borrow, default)]
        json: Option<&'a RawValue>,
        #[serde(default)]
        regex: Option<String>,
        #[serde(default)]
        json_object: Option<bool>,
    }
    let Some(text) = fields.raw(OUTPUTS) else { return Ok(None) };
    let other = || refused(OUTPUTS, text, OUTPUTS_ALLOWED);
    let outputs: Outputs<'_> = object(text).ok_or_else(other)?;
    let grammar = match (outputs.json, outputs.regex, outputs.json_object.unwrap_or(false)) {
        (None, None, false) => return Ok(None),
        (Some(json), None, false) => schema_or_its_text(OUTPUTS, json.get())?,
        (None, Some(regex), false) => Grammar::Regex(regex),
        (None, None, true) => Grammar::json_object(),
        _ => return Err(other()),
    };
    Ok(Some(AskedGrammar::new(OUTPUTS, grammar)))
}

/// Parses a JSON object. The check is needed because serde also reads an array as a struct.
fn object<'a, T: Deserialize<'a>>(text: &'a str) -> Option<T> {
    text.starts_with('{').then(|| serde_json::from_str(text).ok())?
}

/// Reads a schema given as JSON or as a string with JSON.
fn schema_or_its_text(name: &str, text: &str) -> Result<Grammar, FieldError> {
    let schema = match text.starts_with('"') {
        true => serde_json::from_str(text)
            .map_err(|_| refused(name, text, "a JSON schema, or its text"))?,
        false => text.to_owned(),
    };
    Ok(Grammar::JsonSchema(schema))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(body: &str) -> Result<Option<AskedGrammar>, String> {
        grammar(&Fields::parse(body.as_bytes()).unwrap()).map_err(|error| error.to_string())
    }

    fn found(body: &str) -> (&'static str, Grammar) {
        let AskedGrammar { field, grammar, .. } = asked(body).unwrap().unwrap();
        (field, grammar)
    }

    #[test]
    fn every_name_for_a_grammar_is_known() {
        let schema = || Grammar::JsonSchema(r#"{"type": "integer"}"#.into());
        let regex = || Grammar::Regex(r"\d+".into());
        let cases = [
            (
                r#"{"response_format": {"type": "json_object"}}"#,
                ("response_format", Grammar::json_object()),
            ),
            (
                r#"{"response_format": {"type": "json_schema", "json_schema":
                    {"name": "n", "strict": true, "schema": {"type": "integer"}}}}"#,
                ("response_format.json_schema.schema", schema()),
            ),
            (r#"{"regex": "\\d+"}"#, ("regex", regex())),
            (r#"{"guided_regex": "\\d+"}"#, ("guided_regex", regex())),
            (r#"{"guided_json": {"type": "integer"}}"#, ("guided_json", schema())),
            (r#"{"guided_json": "{\"type\": \"integer\"}"}"#, ("guided_json", schema())),
            (
                r#"{"structured_outputs": {"json": {"type": "integer"}}}"#,
                ("structured_outputs", schema()),
            ),
            (r#"{"structured_outputs": {"regex": "\\d+"}}"#, ("structured_outputs", regex())),
            (
                r#"{"structured_outputs": {"json_object": true}}"#,
                ("structured_outputs", Grammar::json_object()),
            ),
        ];
        for (body, expected) in cases {
            assert_eq!(found(body), expected, "{body}");
        }
        for body in [
            "{}",
            r#"{"response_format": {"type": "text"}, "regex": null}"#,
            r#"{"structured_outputs": {}}"#,
        ] {
            assert_eq!(asked(body), Ok(None), "{body}");
        }
    }

    #[test]
    fn a_schema_keeps_the_clients_order_of_properties() {
        let body = r#"{"response_format": {"type": "json_schema", "json_schema":
            {"schema": {"properties": {"z": {}, "a": {}}}}}}"#;
        let Grammar::JsonSchema(schema) = found(body).1 else { panic!("a schema") };
        assert_eq!(schema, r#"{"properties": {"z": {}, "a": {}}}"#);
    }

    #[test]
    fn what_is_no_grammar_or_two_of_them_is_refused_by_name() {
        for (body, said) in [
            (
                r#"{"response_format": {"type": "yaml"}}"#,
                r#"response_format is {"type": "yaml"}; allowed: an object with type text, json_object or json_schema"#,
            ),
            (r#"{"response_format": ["text", null]}"#, "response_format is [\"text\", null]"),
            (
                r#"{"response_format": {"type": "json_schema", "json_schema": [{}]}}"#,
                "response_format.json_schema is [{}]; allowed: an object",
            ),
            (r#"{"structured_outputs": [null, null]}"#, "structured_outputs is [null, null]"),
            (r#"{"response_format": "json"}"#, "response_format is \"json\"; allowed: an object"),
            (
                r#"{"response_format": {"type": "json_schema"}}"#,
                "response_format.json_schema.schema is missing; allowed: a JSON schema",
            ),
            (
                r#"{"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}"#,
                "response_format.json_schema.schema is missing",
            ),
            (
                r#"{"response_format": {"type": "json_schema", "json_schema": 7}}"#,
                "response_format.json_schema is 7; allowed: an object with name and schema",
            ),
            (r#"{"regex": 7}"#, "regex is 7; allowed: a string"),
            (
                r#"{"structured_outputs": {"choice": ["a"]}}"#,
                "structured_outputs is {\"choice\": [\"a\"]}; allowed: an object with json, regex",
            ),
            (
                r#"{"structured_outputs": {"regex": "a", "json_object": true}}"#,
                "structured_outputs is",
            ),
            (
                r#"{"regex": "a", "response_format": {"type": "json_object"}}"#,
                "regex is given together with response_format; allowed: one of them",
            ),
        ] {
            let error = asked(body).unwrap_err();
            assert!(error.starts_with(said), "{error}");
        }
    }
}
