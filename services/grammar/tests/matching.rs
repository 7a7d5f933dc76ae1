//! Matchers accept exactly the tokens that they allow, at any point of an answer.

use std::sync::LazyLock;

use grammar::{Compiler, Grammar, GrammarError, OutputMatcher, Token};
use proptest::prelude::*;
use serde_json::{Value, json};

/// The 256 bytes, multi-byte tokens that split JSON at arbitrary positions, and silent tokens.
static TOKENS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let words = [
        "{\"", "\":", "\": ", "\",", "\"}", "},", "tr", "true", "als", "null", "12", "123", "-1",
        "0.", "e5", "  ", "\n  ", "\n\n", "[]", "{}", "[[", "é", "日本", "\\n", "\\u00", "name",
        "na", "me\":", "\"a", "ab", "abc", "yes", "no", "ye", " ", "a\"", "],", "]}",
    ];
    let mut tokens: Vec<Vec<u8>> = (0..=255_u8).map(|byte| vec![byte]).collect();
    tokens.extend(words.iter().map(|word| word.as_bytes().to_vec()));
    // Silent tokens, and the halves of a character.
    tokens.extend([vec![], "é".as_bytes()[..1].to_vec(), vec![0xe6, 0x97], vec![]]);
    tokens
});

static COMPILER: LazyLock<Compiler> = LazyLock::new(|| {
    Compiler::new(TOKENS.iter().map(|bytes| match bytes.is_empty() {
        true => Token::Silent,
        false => Token::Text(bytes),
    }))
});

fn compile(grammar: &Grammar) -> OutputMatcher {
    COMPILER.compile(grammar).unwrap_or_else(|error| panic!("{grammar:?} {error}"))
}

fn schema(schema: Value) -> Grammar {
    Grammar::JsonSchema(schema.to_string())
}

fn regex(regex: &str) -> Grammar {
    Grammar::Regex(regex.to_owned())
}

fn allowed(matcher: &mut OutputMatcher) -> Vec<u32> {
    let words = matcher.allowed().unwrap();
    assert_eq!(words.len(), TOKENS.len().div_ceil(32));
    (0..TOKENS.len() as u32).filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
}

/// Returns whether the grammar accepts `text` byte by byte and allows the end after it.
fn matches(grammar: &Grammar, text: &str) -> bool {
    let mut matcher = compile(grammar);
    let taken = text.bytes().all(|byte| matcher.accept(u32::from(byte)).is_ok());
    taken && matcher.may_end().unwrap()
}

#[test]
fn forced_text_is_given_as_the_longest_tokens_and_changes_no_bitmask() {
    let token =
        |text: &str| TOKENS.iter().position(|token| token == text.as_bytes()).unwrap() as u32;
    let mut matcher = compile(&regex("(x|y)name\": (yes|no)"));
    assert!(matcher.forced().is_empty(), "two tokens are allowed");
    matcher.accept(token("x")).unwrap();
    let before = allowed(&mut matcher);
    let forced = matcher.forced();
    assert_eq!(forced, ["name", "\": "].map(token));
    assert_eq!(allowed(&mut matcher), before);
    assert!(before.contains(&token("na")), "the model may take other tokens");
    // A copy goes ahead, and the original stays.
    let mut ahead = matcher.clone();
    for token in forced {
        ahead.accept(token).unwrap();
    }
    assert_eq!(allowed(&mut ahead), ["n", "y", "yes", "no", "ye"].map(token));
    assert_eq!(allowed(&mut matcher), before);
}

/// SentencePiece vocabularies have byte tokens as well as character tokens with equal bytes.
#[test]
fn tokens_of_equal_bytes_are_allowed_alike() {
    let space = TOKENS.iter().rposition(|token| token == b" ").unwrap() as u32;
    assert!(space > 0xff, "one more than the byte");
    let mut matcher = compile(&regex("a b"));
    matcher.accept(u32::from(b'a')).unwrap();
    assert_eq!(allowed(&mut matcher), [u32::from(b' '), space]);
    for id in [u32::from(b' '), space] {
        let mut matcher = matcher.clone();
        matcher.accept(id).unwrap();
        assert_eq!(allowed(&mut matcher), [u32::from(b'b')]);
    }
}

#[test]
fn a_regex_matches_the_whole_answer_and_reports_completion() {
    for (expression, whole, others) in [
        ("yes|no", vec!["yes", "no"], vec!["", "y", "yesno", " yes", "YES"]),
        (r"[0-9]{2,4}", vec!["12", "1234"], vec!["1", "12345", "12a"]),
        ("(é|日)+", vec!["é", "日é"], vec!["e", ""]),
        (r"a/b\\c", vec![r"a/b\c"], vec!["a/b"]),
        (r"(?i)ok\.?", vec!["OK", "ok."], vec!["okk"]),
        (r"\d+\s\w*", vec!["7 ", "7 x_"], vec!["7"]),
    ] {
        let grammar = regex(expression);
        for text in whole {
            assert!(matches(&grammar, text), "{expression} {text}");
        }
        for text in others {
            assert!(!matches(&grammar, text), "{expression} {text:?}");
        }
    }
    let mut matcher = compile(&regex("[0-9]{2,4}"));
    let ends: Vec<(bool, bool)> = (0..4)
        .map(|_| {
            matcher.accept(u32::from(b'7')).unwrap();
            (matcher.may_end().unwrap(), matcher.is_complete())
        })
        .collect();
    assert_eq!(ends, [(false, false), (true, false), (true, false), (true, true)]);
    assert!(allowed(&mut matcher).is_empty());
    assert!(matcher.accept(u32::from(b'7')).is_err());
}

#[test]
fn json_object_grammar_accepts_exactly_json_objects() {
    let grammar = Grammar::json_object();
    for text in ["{}", r#"{"a": [1, -2.5e-3, null, {"b": "é \" x"}], "": false}"#, "{\n}"] {
        assert!(matches(&grammar, text), "{text}");
    }
    for text in ["", "[]", "1", "{", "{}}", "{} {}", r#"{"a"}"#, r#"{"a": 01}"#, r#"{a: 1}"#] {
        assert!(!matches(&grammar, text), "{text}");
    }
}

#[test]
fn white_space_between_tokens_of_json_has_a_bound() {
    let grammar = schema(json!({"type": "array", "items": {"type": "integer"}}));
    let spaced = |count: usize| format!("[{0}1{0},{0}2{0}]", " \n".repeat(count / 2));
    assert!(matches(&grammar, &spaced(40)));
    assert!(!matches(&grammar, &spaced(42)));
}

#[test]
fn properties_come_in_the_order_of_the_schema() {
    let grammar = Grammar::JsonSchema(
        r#"{"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "integer"}},
            "required": ["a", "z"], "additionalProperties": false}"#
            .into(),
    );
    assert!(matches(&grammar, r#"{"z": 1, "a": 2}"#));
    assert!(!matches(&grammar, r#"{"a": 2, "z": 1}"#));
}

#[test]
fn unknown_format_of_a_string_is_an_annotation() {
    for grammar in [
        schema(json!({"type": "string", "format": "binary"})),
        schema(json!({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "format": "byte"}}})),
        schema(json!({"$ref": "#/components/schemas/A", "components": {"schemas": {
            "A": {"type": "string", "format": "binary"},
        }}})),
    ] {
        assert!(matches(&grammar, r#""x""#));
        assert!(!matches(&grammar, "1"));
    }
    assert!(!matches(&schema(json!({"type": "string", "format": "date"})), r#""x""#));
    // Names of properties and values are no keywords.
    for grammar in [
        schema(json!({"type": "object", "properties": {"format": {"const": "binary"}},
            "required": ["format"], "additionalProperties": false})),
        schema(json!({"const": {"format": "binary"}})),
    ] {
        assert!(matches(&grammar, r#"{"format": "binary"}"#));
        assert!(!matches(&grammar, "{}"));
    }
}

/// Pydantic lists a tag as required only if it has no default.
#[test]
fn tag_of_a_tagged_union_is_required() {
    let animal = |kind: &str, property: &str| {
        json!({"type": "object", "required": [property], "properties": {
            "kind": {"const": kind, "default": kind, "type": "string"},
            property: {"type": "boolean"},
        }})
    };
    let grammar = schema(json!({
        "$defs": {"Cat": animal("cat", "purr"), "Dog": animal("dog", "bark")},
        "type": "object",
        "properties": {"pet": {
            "discriminator": {"propertyName": "kind",
                "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        }},
        "required": ["pet"],
    }));
    for text in
        [r#"{"pet": {"kind": "dog", "bark": true}}"#, r#"{"pet": {"kind": "cat", "purr": true}}"#]
    {
        assert!(matches(&grammar, text), "{text}");
    }
    for text in [r#"{"pet": {"bark": true}}"#, r#"{"pet": {"kind": "cat", "bark": true}}"#] {
        assert!(!matches(&grammar, text), "{text}");
    }
}

#[test]
fn tag_of_composed_alternatives_is_required() {
    let animal = |kind: &str| {
        json!({"allOf": [
            {"$ref": "#/$defs/Base"},
            {"type": "object", "properties": {"kind": {"const": kind}}},
        ]})
    };
    let grammar = schema(json!({
        "$defs": {
            "Base": {"type": "object", "properties": {"name": {"type": "string"}}},
            "Cat": animal("cat"),
            "Dog": animal("dog"),
        },
        "discriminator": {"propertyName": "kind"},
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    }));
    for text in [r#"{"name": "x", "kind": "dog"}"#, r#"{"kind": "cat"}"#] {
        assert!(matches(&grammar, text), "{text}");
    }
    for text in [r#"{"name": "x"}"#, "{}", r#"{"kind": "cow"}"#] {
        assert!(!matches(&grammar, text), "{text}");
    }
}

#[test]
fn reference_may_lead_into_a_tagged_union() {
    let animal = |kind: &str| json!({"type": "object", "properties": {"kind": {"const": kind}}});
    let grammar = schema(json!({
        "type": "object",
        "properties": {
            "pet": {
                "oneOf": [animal("cat"), animal("dog")],
                "discriminator": {"propertyName": "kind"},
            },
            "other": {"$ref": "#/properties/pet/oneOf/0"},
        },
        "required": ["pet", "other"],
    }));
    assert!(matches(&grammar, r#"{"pet": {"kind": "dog"}, "other": {"kind": "cat"}}"#));
    for text in [
        r#"{"pet": {"kind": "dog"}, "other": {"kind": "dog"}}"#,
        r#"{"pet": {}, "other": {"kind": "cat"}}"#,
    ] {
        assert!(!matches(&grammar, text), "{text}");
    }
}

#[test]
fn only_references_decide_whether_a_tagged_union_stays_in_one_of() {
    let animal = |kind: &str| json!({"type": "object", "properties": {"kind": {"const": kind}}});
    let escaped = json!({
        "type": "object",
        "properties": {
            "pet": {"oneOf": [animal("cat"), animal("dog")], "discriminator": {"propertyName": "kind"}},
            "other": {"$ref": "#/properties/pet/oneOf/0"},
        },
    });
    let numbered = |kind: u32| json!({"type": "object", "properties": {"kind": {"const": kind}}});
    let described = json!({
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        "discriminator": {"propertyName": "kind"},
        "description": "one of anyOf/oneOf/allOf",
        "$defs": {"A": numbered(0), "B": numbered(1)},
    });
    for text in [escaped.to_string().replace('/', r"\/"), described.to_string()] {
        let checked = Compiler::for_bytes().check(&Grammar::JsonSchema(text.clone()));
        assert!(checked.is_ok(), "{text}: {checked:?}");
    }
}

/// Returns a tagged union of these definitions, as Pydantic writes it.
fn tagged_union(definitions: &[String]) -> Value {
    let alternatives: Vec<Value> =
        definitions.iter().map(|name| json!({"$ref": format!("#/$defs/{name}")})).collect();
    json!({"discriminator": {"propertyName": "kind"}, "oneOf": alternatives})
}

#[test]
fn tagged_union_may_be_recursive() {
    let node = tagged_union(&["Branch", "Leaf"].map(str::to_owned));
    let mut grammar = json!({"$defs": {
        "Branch": {"type": "object", "required": ["children"], "properties": {
            "kind": {"const": "branch", "default": "branch", "type": "string"},
            "children": {"type": "array", "items": node},
        }},
        "Leaf": {"type": "object", "properties": {
            "kind": {"const": "leaf", "default": "leaf", "type": "string"},
        }},
    }});
    grammar["$ref"] = json!("#/$defs/Branch");
    let grammar = schema(grammar);
    for text in [
        r#"{"kind": "branch", "children": [{"kind": "leaf"}]}"#,
        r#"{"kind": "branch", "children": [{"kind": "branch", "children": []}]}"#,
    ] {
        assert!(matches(&grammar, text), "{text}");
    }
    for text in [r#"{"kind": "branch", "children": [{}]}"#, r#"{"kind": "leaf"}"#] {
        assert!(!matches(&grammar, text), "{text}");
    }
}

#[test]
fn integer_tags_distinguish_the_alternatives_of_a_tagged_union() {
    let version = |number: u32, property: &str| {
        json!({"type": "object", "required": [property], "properties": {
            "kind": {"const": number, "type": "integer"},
            property: {"type": "boolean"},
        }})
    };
    let mut grammar = tagged_union(&["One", "Two"].map(str::to_owned));
    grammar["$defs"] = json!({"One": version(1, "a"), "Two": version(2, "b")});
    let grammar = schema(grammar);
    for text in [r#"{"kind": 1, "a": true}"#, r#"{"kind": 2, "b": true}"#] {
        assert!(matches(&grammar, text), "{text}");
    }
    for text in [r#"{"kind": 1, "b": true}"#, r#"{"kind": 3, "a": true}"#, r#"{"a": true}"#] {
        assert!(!matches(&grammar, text), "{text}");
    }
}

/// Each level doubles the paths through the schema, but not the definitions.
#[test]
fn alternatives_of_a_tagged_union_are_compiled_once_each() {
    const LEVELS: usize = 16;
    let names = |level: usize| ["A", "B"].map(|kind| format!("{kind}{level}"));
    let mut definitions = serde_json::Map::new();
    for level in 0..LEVELS {
        for name in names(level) {
            let next = match level + 1 {
                LEVELS => json!({"type": "null"}),
                next => tagged_union(&names(next)),
            };
            let definition = json!({"type": "object", "required": ["next"], "properties": {
                "kind": {"const": name, "default": name, "type": "string"}, "next": next,
            }});
            definitions.insert(name, definition);
        }
    }
    let mut grammar = tagged_union(&names(0));
    grammar["$defs"] = Value::Object(definitions);
    let grammar = schema(grammar);
    let value = |kind: &str| {
        (0..LEVELS).rev().fold("null".to_owned(), |next, level| {
            format!(r#"{{"kind": "{kind}{level}", "next": {next}}}"#)
        })
    };
    assert!(matches(&grammar, &value("A")) && matches(&grammar, &value("B")));
    assert!(!matches(&grammar, &value("C")));
}

#[test]
fn unsupported_grammars_are_rejected_with_the_reason() {
    let said = |grammar: Grammar| match COMPILER.compile(&grammar) {
        Err(error @ GrammarError::Unsupported { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    for (grammar, words) in [
        (schema(json!({"not": {"minLength": 3}})), "keyword not"),
        (schema(json!({"type": "weird"})), "weird"),
        (schema(json!({"$ref": "#/$defs/nothing"})), "nothing"),
        (schema(json!({"$ref": "https://example.com/x.json"})), "another document"),
        (schema(json!({"type": "integer", "minimum": 5, "maximum": 4})), "no output matches it"),
        (schema(json!({"type": "string", "pattern": "(?<=a)b"})), "look"),
        (
            schema(json!({"oneOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}},
                {"type": "object", "properties": {"b": {"type": "integer"}}},
            ]})),
            "alternatives that may overlap; expected anyOf",
        ),
    ] {
        let message = said(grammar);
        assert!(message.contains(words), "{message} has no {words:?}");
        assert!(message.len() < 320 && !message.contains('\n'), "{message}");
    }
    // The client may not set the compiler's own options.
    let sly = schema(json!({"x-guidance": {"lenient": true}, "dependentSchemas": {}}));
    assert!(said(sly).contains("dependentSchemas"));
}

/// Deep, wide and recursive schemas within the bounds either compile or are rejected, even on a
/// small thread stack.
#[test]
fn schemas_at_the_bounds_neither_overflow_nor_hang() {
    let deep =
        |wrap: &dyn Fn(Value) -> Value| (0..14).fold(json!({"type": "null"}), |s, _| wrap(s));
    let many = |count: usize| (0..count).map(|i| json!({"const": format!("value {i}")}));
    let grammars = [
        schema(deep(&|inner| json!({"type": "array", "items": inner}))),
        schema(deep(&|inner| json!({"anyOf": [inner, {"type": "string"}]}))),
        schema(deep(&|inner| json!({"allOf": [inner]}))),
        schema(json!({"$ref": "#"})),
        schema(json!({"type": "array", "items": {"$ref": "#"}})),
        schema(
            json!({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}),
        ),
        schema(json!({"anyOf": many(1500).collect::<Vec<_>>()})),
        schema(json!({"enum": (0..4000).collect::<Vec<_>>()})),
        schema(json!({"type": "string", "maxLength": 1_000_000})),
        schema(json!({"type": "array", "items": {"type": "integer"}, "minItems": 100_000})),
        schema(
            json!({"allOf": (0..12).map(|i| json!({"anyOf": [{"multipleOf": i + 2}, {"minimum": i}]})).collect::<Vec<_>>()}),
        ),
        regex(&format!("{}a{}", "(".repeat(60), "?)*".repeat(60))),
        regex(&"(a|aa)*".repeat(1000)),
        regex(&"[a-z]{0,50}".repeat(200)),
        regex("(a{1000}){1000}"),
        regex("(((((x{50}){50}){50}){50}){50})"),
        regex("(x+x+)+y"),
    ];
    let work = move || {
        for grammar in &grammars {
            if let Ok(mut matcher) = COMPILER.compile(grammar) {
                // The mask is bounded too, possibly by an error.
                let _ = matcher.allowed();
            }
        }
    };
    std::thread::Builder::new().stack_size(2 << 20).spawn(work).unwrap().join().unwrap();
}

fn grammars() -> impl Strategy<Value = Grammar> {
    prop_oneof![
        Just(Grammar::json_object()),
        Just(schema(
            json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 5},
            "n": {"type": ["integer", "null"], "minimum": -20, "maximum": 1234}}, "required": ["name"],
            "additionalProperties": false})
        )),
        Just(schema(json!({"type": "array", "items": {"enum": ["abc", "é", true, null, 12]}}))),
        Just(schema(json!({"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items":
            {"$ref": "#/$defs/t"}, "maxItems": 3}}}))),
        Just(regex("(yes|no)+")),
        Just(regex("[a-c]{1,3}(日本|é)?( [0-9]{2})*")),
        Just(regex(r"(\w+\s?){1,4}\.")),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Tokens are allowed if and only if they are accepted. A copy that replays the output has the
    /// same masks. An answer that may end matches byte by byte.
    #[test]
    fn any_sequence_of_allowed_tokens_matches_the_grammar(
        grammar in grammars(),
        picks in prop::collection::vec(any::<prop::sample::Index>(), 1..25),
    ) {
        let mut matcher = compile(&grammar);
        let (mut output, mut text) = (Vec::new(), Vec::new());
        for pick in picks {
            let allowed_now = allowed(&mut matcher);
            let others = (0..TOKENS.len() as u32).filter(|token| !allowed_now.contains(token));
            for token in others {
                // Rejected tokens leave the state unchanged.
                prop_assert!(matcher.accept(token).is_err(), "{} after {:?}", token, text);
            }
            for &token in allowed_now.iter().step_by(allowed_now.len() / 4 + 1) {
                prop_assert!(matcher.clone().accept(token).is_ok(), "{} after {:?}", token, text);
            }
            if allowed_now.is_empty() {
                prop_assert!(matcher.is_complete());
                break;
            }
            let token = *pick.get(&allowed_now);
            matcher.accept(token).unwrap();
            output.push(token);
            text.extend_from_slice(&TOKENS[token as usize]);
            let mut resumed = compile(&grammar);
            output.iter().for_each(|token| resumed.accept(*token).unwrap());
            prop_assert_eq!(resumed.is_complete(), matcher.is_complete());
            prop_assert_eq!(allowed(&mut resumed), allowed(&mut matcher));
            if matcher.may_end().unwrap() {
                let text = String::from_utf8(text.clone()).expect("whole characters");
                prop_assert!(matches(&grammar, &text), "{}", text);
                if let Grammar::JsonSchema(_) = grammar {
                    prop_assert!(serde_json::from_str::<Value>(&text).is_ok(), "{}", text);
                }
            }
        }
    }
}

#[test]
fn choice_accepts_exactly_its_texts() {
    let grammar = Grammar::choice(["a.b", "a", "(yes|no)", ""]);
    for (text, is_matched) in
        [("a.b", true), ("a", true), ("(yes|no)", true), ("", true), ("axb", false), ("yes", false)]
    {
        assert_eq!(matches(&grammar, text), is_matched, "{text:?}");
    }
}

#[test]
fn lark_grammar_is_followed() {
    let lark = "start: sum\nsum: product (\"+\" product)*\nproduct: /[0-9]+/ | \"(\" sum \")\"";
    let grammar = Grammar::ContextFree(lark.to_owned());
    for (text, is_matched) in [
        ("12+(3+(4))", true),
        ("1", true),
        ("1+", false),
        ("(1", false),
        ("1)", false),
        ("", false),
    ] {
        assert_eq!(matches(&grammar, text), is_matched, "{text:?}");
    }
}

#[test]
fn gbnf_accepts_what_its_rules_accept() {
    let cases: &[(&str, &[&str], &[&str])] = &[
        ("root ::= [a-z]* \"ab\"", &["ab", "abab", "xab"], &["", "aba", "abx"]),
        ("root ::= \"a\"{2,3} \"-\"? .", &["aa-x", "aaa\n", "aaé"], &["a-x", "aaaa-xx", "aa"]),
        (
            "root ::= [^\"\\x00-\\x1f] | \"\\u00e9t\\U0001F600\"",
            &["x", "ét😀"],
            &["\"", "\n", "é😀"],
        ),
        (
            "# nested lists\nroot ::= list\nlist ::= \"[\" ws (item (\",\" ws item)*)? \"]\" ws\n\
             item ::= number | list\nnumber ::= \"-\"? [0-9]+ ws\nws ::= [ \\t\\n]*\n",
            &["[]", "[ 1, [2 ,-3], [[]]]", "[1]\n"],
            &["[", "[1,]", "[1 2]", "1", "[-]"],
        ),
        ("root ::= \"x\" root | \"\"", &["", "x", "xxx"], &["y", "xy"]),
        ("root ::= a-b\na-b ::= \"1\" |\n  \"2\"", &["1", "2"], &["12", ""]),
    ];
    for (text, accepted, rejected) in cases {
        let grammar = Grammar::ContextFree((*text).to_owned());
        for text in *accepted {
            assert!(matches(&grammar, text), "{grammar:?} {text:?}");
        }
        for text in *rejected {
            assert!(!matches(&grammar, text), "{grammar:?} {text:?}");
        }
    }
}
