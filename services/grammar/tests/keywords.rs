//! Keywords that the router rewrites: each schema matches exactly the values that JSON Schema says.

use std::sync::LazyLock;

use grammar::{Compiler, Grammar};
use serde_json::{Value, json};

static COMPILER: LazyLock<Compiler> = LazyLock::new(Compiler::for_bytes);

fn schema(schema: &Value) -> Grammar {
    Grammar::JsonSchema(schema.to_string())
}

/// Returns whether the schema accepts `text` byte by byte and allows the end after it.
fn matches(schema: &Value, text: &str) -> bool {
    let grammar = self::schema(schema);
    let mut matcher = COMPILER.compile(&grammar).unwrap_or_else(|error| panic!("{schema} {error}"));
    let taken = text.bytes().all(|byte| matcher.accept(u32::from(byte)).is_ok());
    taken && matcher.may_end().unwrap()
}

/// Asserts that the schema matches the first texts and none of the other ones.
fn check(schema: Value, matching: &[&str], others: &[&str]) {
    matching.iter().for_each(|text| assert!(matches(&schema, text), "{schema} {text}"));
    others.iter().for_each(|text| assert!(!matches(&schema, text), "{schema} {text}"));
}

fn rejection(schema: Value) -> String {
    COMPILER.check(&self::schema(&schema)).expect_err(&schema.to_string()).to_string()
}

#[test]
fn references_are_json_pointers_in_uris() {
    for (definitions, name, reference) in [
        ("$defs", "a/b~c", "#/$defs/a~1b~0c"),
        ("definitions", "Page<Item>", "#/definitions/Page%3CItem%3E"),
        ("$defs", "é x", "#/$defs/%C3%A9%20x"),
        // A name that is not encoded in the reference, and one that only looks encoded.
        ("$defs", "Page<Item>", "#/$defs/Page<Item>"),
        ("$defs", "a%20b", "#/$defs/a%20b"),
        ("$defs", "a~0b", "#/$defs/a~00b"),
    ] {
        let schema = json!({definitions: {name: {"const": 5}}, "type": "object",
            "properties": {"k": {"$ref": reference}}, "required": ["k"], "additionalProperties": false});
        check(schema, &[r#"{"k":5}"#], &[r#"{"k":6}"#]);
    }
    // Names of properties and values are no definitions.
    let schema = json!({"type": "object", "properties": {"a/b": {"const": {"$defs": {"a/b": 1}}}},
        "required": ["a/b"], "additionalProperties": false});
    check(schema, &[r#"{"a/b":{"$defs":{"a/b":1}}}"#], &[]);
}

#[test]
fn property_names_are_constrained() {
    let record = |names: Value| json!({"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}});
    for names in [
        json!(true),
        json!({}),
        json!({"type": "string"}),
        json!({"type": "string", "title": "Key"}),
    ] {
        check(record(names), &["{}", r#"{"x":1}"#], &[r#"{"x":"1"}"#]);
    }
    check(record(json!(false)), &["{}"], &[r#"{"x":1}"#]);
    for names in [json!({"enum": ["a", "b"]}), json!({"type": "string", "pattern": "^[ab]$"})] {
        check(record(names), &["{}", r#"{"a":1,"b":2}"#], &[r#"{"c":1}"#, r#"{"a":"x"}"#]);
    }
    check(record(json!({"maxLength": 2})), &[r#"{"ab":1}"#], &[r#"{"abc":1}"#]);
    check(
        record(json!({"minLength": 2, "maxLength": 3})),
        &[r#"{"ab":1}"#],
        &[r#"{"a":1}"#, r#"{"abcd":1}"#],
    );
    let named = json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "propertyNames": {"pattern": "^a"}});
    check(named, &[r#"{"a":1}"#], &[r#"{"b":1}"#]);
    assert!(rejection(record(json!({"format": "uuid"}))).contains("keyword propertyNames"));
}

#[test]
fn properties_are_counted() {
    let two = json!({"a": {"type": "integer"}, "b": {"type": "integer"}});
    let least = json!({"type": "object", "properties": two, "required": ["a"], "minProperties": 1});
    check(least, &[r#"{"a":1}"#], &["{}"]);
    let most = json!({"type": "object", "properties": two, "additionalProperties": false, "maxProperties": 2});
    check(most, &["{}", r#"{"a":1,"b":2}"#], &[]);
    let one = json!({"type": "object", "properties": two, "minProperties": 1});
    check(one, &[r#"{"a":1}"#, r#"{"b":1}"#, r#"{"c":1}"#, r#"{"a":1,"c":2}"#], &["{}"]);
}

#[test]
fn keys_of_a_pattern_with_few_names_do_not_repeat() {
    let schema = json!({"type": "object", "patternProperties": {"^(a|bc)$": {"type": "integer"}},
        "additionalProperties": false});
    check(schema, &["{}", r#"{"a":1,"bc":2}"#, r#"{"bc":2}"#], &[r#"{"a":1,"a":2}"#, r#"{"b":1}"#]);
    // A property must match both schemas.
    let schema = json!({"type": "object", "properties": {"a": {"minimum": 3}}, "required": ["a"],
        "patternProperties": {"^a$": {"type": "integer"}}, "additionalProperties": false});
    check(schema, &[r#"{"a":3}"#], &[r#"{"a":2}"#, r#"{"a":"x"}"#, r#"{"a":3,"a":3}"#]);
}

#[test]
fn items_that_cannot_repeat_are_unique() {
    for schema in [
        json!({"type": "array", "uniqueItems": false, "items": {"type": "integer"}}),
        json!({"type": "array", "uniqueItems": true, "maxItems": 1, "items": {"type": "integer"}}),
    ] {
        check(schema, &["[]", "[1]"], &["[true]"]);
    }
    let said =
        rejection(json!({"type": "array", "uniqueItems": true, "items": {"type": "string"}}));
    assert!(said.contains("keyword uniqueItems") && said.contains("expected maxItems"), "{said}");
}

#[test]
fn contains_counts_items_where_every_item_matches() {
    let list = |keyword: &str, schema: Value| {
        let mut list = json!({"type": "array", "items": {"type": "integer"}});
        list[keyword] = schema;
        list
    };
    check(list("contains", json!(true)), &["[1]", "[1,2]"], &["[]"]);
    let mut two = list("contains", json!({"type": "integer"}));
    (two["minContains"], two["maxContains"]) = (json!(2), json!(3));
    check(two, &["[1,2]", "[1,2,3]"], &["[1]", "[1,2,3,4]"]);
    let mut any = list("contains", json!({"const": 7}));
    any["minContains"] = json!(0);
    check(any, &["[]", "[1]"], &[]);
    assert!(rejection(list("contains", json!({"const": 7}))).contains("keyword contains"));
}

#[test]
fn negated_schemas_are_decided_where_they_can_be() {
    check(json!({"type": ["string", "null"], "not": {"type": "null"}}), &[r#""""#], &["null"]);
    check(json!({"not": {"type": ["string", "number"]}}), &["null", "[]"], &["1", r#""""#]);
    check(json!({"enum": [1, 2, "x"], "not": {"enum": [2.0, "x"]}}), &["1"], &["2", r#""x""#]);
    check(json!({"type": "boolean", "not": {"const": true}}), &["false"], &["true"]);
    check(json!({"type": "integer", "not": false}), &["1"], &["null"]);
    check(json!({"not": {"not": {"type": "integer"}}}), &["1"], &["null"]);
    let one_of_two = json!({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        "not": {"anyOf": [{"required": ["a"]}, {"required": ["c"]}]}});
    check(one_of_two, &["{}", r#"{"b":null}"#], &[r#"{"a":null}"#, r#"{"c":null}"#]);
    for schema in
        [json!({"not": {"minLength": 1}}), json!({"type": "string", "not": {"const": ""}})]
    {
        assert!(rejection(schema).contains("keyword not"));
    }
    assert!(rejection(json!({"not": {}})).starts_with("is not supported"));
}

#[test]
fn conditions_are_decided_where_they_compare_an_enum() {
    let kinds = json!({"kind": {"enum": ["a", "b"]}, "size": {"type": "integer"}});
    let conditional = |required: bool| {
        let mut condition = json!({"properties": {"kind": {"const": "a"}}});
        if required {
            condition["required"] = json!(["kind"]);
        }
        json!({"type": "object", "properties": kinds, "additionalProperties": false, "if": condition,
            "then": {"required": ["size"]}, "else": {"properties": {"size": false}}})
    };
    let both = [r#"{"kind":"a","size":1}"#, r#"{"kind":"b"}"#];
    let neither = [r#"{"kind":"a"}"#, r#"{"kind":"b","size":1}"#];
    check(conditional(true), &[both[0], both[1], "{}"], &[neither[0], neither[1], r#"{"size":1}"#]);
    // An object without the property matches the condition.
    check(
        conditional(false),
        &[both[0], both[1], r#"{"size":1}"#],
        &[neither[0], neither[1], "{}"],
    );
    check(json!({"type": "integer", "if": {"minimum": 3}}), &["1"], &["null"]);
    check(json!({"type": "integer", "then": {"minimum": 3}}), &["1"], &[]);
    check(json!({"if": true, "then": {"type": "integer"}}), &["1"], &["null"]);
    check(
        json!({"if": false, "then": {"type": "integer"}, "else": {"type": "null"}}),
        &["null"],
        &["1"],
    );
    let said = rejection(json!({"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 9}}));
    assert!(said.contains("keyword if"), "{said}");
}

#[test]
fn look_ahead_at_the_start_of_a_pattern_is_a_pattern() {
    let password = json!({"type": "string", "pattern": r"^(?=.*[A-Z)\]])(?=.*(\d|\)))[^ ]{3,5}$"});
    check(
        password,
        &[r#""aB1""#, r#"")])a""#],
        &[r#""ab1""#, r#""aB""#, r#""aBcdef1""#, r#""ABC""#],
    );
    for pattern in ["^(?!a)b", "a(?=b)", "(?=a)", "^(?=a", "(?<=a)b", "^(?=a)b|c"] {
        let said = rejection(json!({"type": "string", "pattern": pattern}));
        assert!(said.starts_with("is not supported: "), "{said}");
    }
}

#[test]
fn numbers_that_a_float_changes_are_rejected() {
    for schema in [
        r#"{"const": 18446744073709551615}"#,
        r#"{"enum": [12345678901234567890123]}"#,
        r#"{"const": {"a": [9007199254740993]}}"#,
        r#"{"type": "integer", "minimum": 1e19, "maximum": 2e19}"#,
        r#"{"type": "integer", "maximum": -1e19}"#,
    ] {
        let said = COMPILER.check(&Grammar::JsonSchema(schema.into())).unwrap_err().to_string();
        assert!(said.starts_with("is not supported: ") && said.contains("expected"), "{said}");
    }
    check(
        json!({"const": 9_007_199_254_740_992_i64}),
        &["9007199254740992"],
        &["9007199254740993"],
    );
    // Bounds move inwards.
    let least = json!({"type": "integer", "minimum": 9_007_199_254_740_993_i64});
    check(least, &["9007199254740994"], &["9007199254740992"]);
    let most = json!({"type": "integer", "maximum": 9_007_199_254_740_993_i64});
    check(most, &["9007199254740992"], &["9007199254740994"]);
    let whole = json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX});
    check(whole, &["0", "-9223372036854774784"], &["9223372036854775808", "-9223372036854775809"]);
    let unsigned = json!({"type": "integer", "minimum": 0, "maximum": u64::MAX});
    check(unsigned, &["0", "9223372036854774784"], &["-1", "18446744073709551616"]);
}

#[test]
fn day_29_of_february_exists_in_leap_years_only() {
    let date = json!({"type": "string", "format": "date"});
    check(
        date,
        &[
            r#""2024-02-29""#,
            r#""2000-02-29""#,
            r#""2023-02-28""#,
            r#""2023-12-31""#,
            r#""1904-02-29""#,
        ],
        &[
            r#""2023-02-29""#,
            r#""1900-02-29""#,
            r#""2100-02-29""#,
            r#""2024-02-30""#,
            r#""2023-04-31""#,
        ],
    );
    let time = json!({"type": "string", "format": "date-time", "pattern": "Z$"});
    check(
        time,
        &[r#""2024-02-29T12:00:00.5Z""#],
        &[r#""2023-02-29T12:00:00Z""#, r#""2024-02-29T12:00:00+01:00""#],
    );
}

#[test]
fn digit_class_of_a_regex_is_ascii() {
    let matches = |text: &str| {
        let mut matcher = COMPILER.compile(&Grammar::Regex(r"[\d.]+".into())).unwrap();
        text.bytes().all(|byte| matcher.accept(u32::from(byte)).is_ok())
    };
    assert!(matches("1.5") && !matches("٣"));
}

#[test]
fn errors_use_the_words_of_json_schema() {
    let deep = json!({"$ref": "#/definitions/a", "definitions": {"a": {"type": "weird"}}});
    for schema in [
        json!({"$ref": "other.json"}),
        json!({"$ref": "#/$defs/nothing"}),
        json!({"type": "weird"}),
        deep,
        json!({"oneOf": [{"type": "object"}, {"type": "object"}]}),
        json!({"type": "string", "pattern": "(a"}),
        json!({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "maxProperties": 1}),
        json!({"$dynamicRef": "#a"}),
        json!({"type": "integer", "multipleOf": 49_990_000}),
        json!({"type": "string", "pattern": "^a$", "minLength": 5}),
    ] {
        let said = rejection(schema.clone());
        for word in [
            "fuel",
            "lark",
            "coerce",
            "feature",
            "Unimplemented",
            "lexer",
            "expressions constructed",
            "max_size",
        ] {
            assert!(!said.contains(word), "{schema}: {said}");
        }
    }
}
