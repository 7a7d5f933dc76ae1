//! No accepted grammar reaches a state in which no token is allowed and the output is not whole.

use std::sync::LazyLock;

use grammar::{
    Alternative, CallSyntax, CallableTool, Compiler, FreeText, Grammar, OutputMatcher, Token,
    ToolCalls,
};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

static COMPILER: LazyLock<Compiler> = LazyLock::new(Compiler::for_bytes);

/// Compiler whose tokens are the bytes and pieces of JSON that cross its lexemes.
static COMPILER_OF_WORDS: LazyLock<Compiler> = LazyLock::new(|| {
    let bytes: Vec<u8> = (0..=u8::MAX).collect();
    let words =
        ["{\"a", "\":", ",\"", "\"}", "},", "[1", "],", "12", "null", "true}", "\"ab\"", "a\",\"b"];
    let tokens = bytes.chunks(1).chain(words.iter().map(|word| word.as_bytes()));
    Compiler::new(tokens.map(Token::Text))
});

fn schema(schema: Value) -> Grammar {
    Grammar::JsonSchema(schema.to_string())
}

fn rejection(grammar: &Grammar) -> String {
    COMPILER.check(grammar).expect_err(&format!("{grammar:?}")).to_string()
}

fn allowed(matcher: &mut OutputMatcher) -> Vec<u32> {
    let words = matcher.allowed().unwrap_or_else(|error| panic!("{error}"));
    (0..32 * words.len() as u32)
        .filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1)
        .collect()
}

/// Returns whether the grammar accepts `text` byte by byte and allows the end after it.
fn matches(grammar: &Grammar, text: &str) -> bool {
    let mut matcher =
        COMPILER.compile(grammar).unwrap_or_else(|error| panic!("{grammar:?} {error}"));
    let taken = text.bytes().all(|byte| matcher.accept(u32::from(byte)).is_ok());
    taken && matcher.may_end().unwrap()
}

/// Walks along tokens that `pick` chooses, for at most `steps`. Panics at a dead end.
fn walk(
    matcher: &mut OutputMatcher,
    steps: usize,
    mut pick: impl FnMut(usize) -> usize,
) -> Vec<u32> {
    let mut output = Vec::new();
    while output.len() < steps && !matcher.is_complete() {
        let tokens = allowed(matcher);
        if tokens.is_empty() {
            assert!(matcher.is_complete(), "dead end after {output:?}");
            break;
        }
        let token = tokens[pick(tokens.len())];
        matcher.accept(token).unwrap_or_else(|error| panic!("{error} after {output:?}"));
        output.push(token);
    }
    output
}

#[test]
fn pattern_whose_keys_are_properties_is_no_dead_end() {
    let digit = json!({"type": "integer", "minimum": 0, "maximum": 9});
    for (patterns, additional) in [
        (json!({"^a$": {"type": "integer"}}), json!(false)),
        (json!({"^a$|^a$|^aa$": {"type": "integer"}, "^b$": false}), json!(false)),
        // The pattern takes every name, so no additional property has one.
        (json!({"": {"type": "integer"}}), json!({"type": "string"})),
    ] {
        let grammar = schema(json!({
            "type": "object", "properties": {"a": digit, "aa": false}, "required": ["a"],
            "patternProperties": patterns, "additionalProperties": additional,
        }));
        assert!(matches(&grammar, r#"{"a":1}"#), "{grammar:?}");
        let mut matcher = COMPILER.compile(&grammar).unwrap();
        r#"{"a":1"#.bytes().for_each(|byte| matcher.accept(byte.into()).unwrap());
        let next: Vec<u8> = allowed(&mut matcher).iter().map(|&token| token as u8).collect();
        let takes_another = additional != json!(false);
        assert_eq!(next.contains(&b','), takes_another, "{grammar:?}");
        walk(&mut matcher, 60, |count| count - 1);
    }
}

#[test]
fn alternatives_that_no_output_matches_are_never_begun() {
    let endless = json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/endless"}}, "required": ["a"]});
    let no_integer = json!({"type": "integer", "minimum": 1, "maximum": 9, "multipleOf": 20});
    let grammar = schema(json!({
        "anyOf": [
            {"$ref": "#/$defs/endless"},
            {"type": "array", "items": {"$ref": "#/$defs/endless"}, "minItems": 1},
            {"type": "array", "prefixItems": [no_integer], "minItems": 1},
            {"type": "string", "const": "whole"},
        ],
        "$defs": {"endless": endless},
    }));
    assert!(matches(&grammar, r#""whole""#));
    let mut matcher = COMPILER.compile(&grammar).unwrap();
    assert_eq!(allowed(&mut matcher), [u32::from(b'"')]);
    // A list may stay empty, and a property may be left out.
    let grammar = schema(json!({
        "type": "object", "additionalProperties": false, "required": ["list"],
        "properties": {
            "list": {"type": "array", "items": {"$ref": "#/$defs/endless"}},
            "other": {"$ref": "#/$defs/endless"},
        },
        "$defs": {"endless": endless},
    }));
    assert!(matches(&grammar, r#"{"list":[]}"#));
    for text in [r#"{"list":[{"#, r#"{"list":[],"#] {
        let mut matcher = COMPILER.compile(&grammar).unwrap();
        let taken = text.bytes().all(|byte| matcher.accept(byte.into()).is_ok());
        assert!(!taken, "{text}");
    }
}

#[test]
fn grammars_that_no_whole_output_matches_are_rejected() {
    for grammar in [
        schema(json!({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})),
        schema(json!({"$ref": "#"})),
        schema(json!({"type": "array", "items": {"$ref": "#"}, "minItems": 1})),
        schema(json!({"type": "integer", "minimum": 1, "maximum": 9, "multipleOf": 20})),
        schema(json!({"type": "object", "patternProperties": {"^a$": false}, "required": ["a"]})),
    ] {
        let error = rejection(&grammar);
        assert!(error.starts_with("is not supported: "), "{error}");
    }
}

#[test]
fn calls_of_functions_and_answers_have_no_dead_ends() {
    let tag = "<call>".to_owned();
    let syntax = CallSyntax {
        before_name: "<call>{\"name\": ".into(),
        before_arguments: ", \"arguments\": ".into(),
        after_arguments: "}</call>".into(),
        between: "\n".into(),
        ..Default::default()
    };
    let taken = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
        "patternProperties": {"^a$": {}}, "additionalProperties": false});
    let tools = vec![CallableTool { name: "f".into(), arguments: Some(taken.to_string()) }];
    // Every text that matches the expression contains the tag.
    let answer = Box::new(Grammar::Regex("x<call>y*".into()));
    for alternative in [
        Alternative::Nothing,
        Alternative::Answer { grammar: answer, tag: tag.clone() },
        Alternative::Text(FreeText { tag, never_begins: Some("[a-z]".into()) }),
    ] {
        let calls =
            ToolCalls { syntax: syntax.clone(), tools: tools.clone(), several: true, alternative };
        let grammar = Grammar::ToolCalls(calls);
        for seed in 0..20 {
            let mut state = seed;
            walk(&mut COMPILER.compile(&grammar).unwrap(), 200, |count| {
                state = state * 31 % 1009 + 7;
                state % count
            });
        }
    }
}

/// Returns schemas of any shape. Many of them match nothing, or only in part.
fn schemas() -> impl Strategy<Value = Value> {
    let name = || prop::sample::select(vec!["a", "b", "ab", "c"]);
    let pattern = || prop::sample::select(vec!["^a$", "^a", "b$", "^[ab]+$", "", "^(a|b)$", "c"]);
    let number = || -3..12_i64;
    let leaf = prop_oneof![
        Just(json!(true)),
        Just(json!(false)),
        Just(json!({})),
        Just(json!({"$ref": "#"})),
        prop::sample::select(vec!["#/$defs/x", "#/$defs/y"]).prop_map(|to| json!({"$ref": to})),
        prop::sample::select(vec!["string", "integer", "null", "boolean", "object", "array"])
            .prop_map(|kind| json!({"type": kind})),
        (number(), number(), 1..30_i64).prop_map(|(minimum, maximum, multiple)| {
            json!({"type": "integer", "minimum": minimum, "maximum": maximum, "multipleOf": multiple})
        }),
        (pattern(), 0..4_usize, 0..4_usize).prop_map(|(pattern, min, max)| {
            json!({"type": "string", "pattern": pattern, "minLength": min, "maxLength": max})
        }),
        prop::collection::vec(prop_oneof![Just(json!(1)), Just(json!("a")), Just(json!(null))], 1..3)
            .prop_map(|values| json!({"enum": values})),
    ];
    let inner = leaf.prop_recursive(3, 24, 4, move |schema| {
        let map = |names: BoxedStrategy<&'static str>, schema: BoxedStrategy<Value>| {
            prop::collection::vec((names, schema), 0..3).prop_map(|all| {
                Value::Object(
                    all.into_iter()
                        .map(|(name, schema)| (name.to_owned(), schema))
                        .collect::<Map<_, _>>(),
                )
            })
        };
        let object = (
            map(name().boxed(), schema.clone().boxed()),
            prop::option::of(map(pattern().boxed(), schema.clone().boxed())),
            prop::option::of(schema.clone()),
            prop::collection::vec(name(), 0..3),
            prop::option::of(0..3_u32),
        )
            .prop_map(|(properties, patterns, additional, required, least)| {
                let mut object =
                    json!({"type": "object", "properties": properties, "required": required});
                let more = [
                    ("patternProperties", patterns),
                    ("additionalProperties", additional),
                    ("minProperties", least.map(Value::from)),
                ];
                for (keyword, value) in more {
                    if let Some(value) = value {
                        object[keyword] = value;
                    }
                }
                object
            });
        let list = (
            prop::option::of(schema.clone()),
            prop::collection::vec(schema.clone(), 0..3),
            0..3_u32,
            prop::option::of(0..4_u32),
        )
            .prop_map(|(items, first, min, max)| {
                let mut list = json!({"type": "array", "prefixItems": first, "minItems": min});
                if let Some(items) = items {
                    list["items"] = items;
                }
                if let Some(max) = max {
                    list["maxItems"] = json!(max);
                }
                list
            });
        prop_oneof![
            3 => object,
            2 => list,
            1 => prop::collection::vec(schema.clone(), 1..3).prop_map(|all| json!({"anyOf": all})),
            1 => prop::collection::vec(schema, 1..3).prop_map(|all| json!({"allOf": all})),
        ]
    });
    (inner.clone(), inner.clone(), inner).prop_map(|(root, x, y)| match root {
        Value::Object(mut root) => {
            root.insert("$defs".to_owned(), json!({"x": x, "y": y}));
            Value::Object(root)
        }
        root => root,
    })
}

fn regexes() -> impl Strategy<Value = String> {
    let leaf =
        prop::sample::select(vec!["a", "b", "[a-c]", r"\d", ".", "é", "(?:)", r"[^\s\S]", "[^é]"]);
    leaf.prop_map(str::to_owned).prop_recursive(4, 16, 3, |inner| {
        prop_oneof![
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("{a}{b}")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("(?:{a}|{b})")),
            (inner, prop::sample::select(vec!["*", "+", "?", "{2}", "{0,3}"]))
                .prop_map(|(a, times)| format!("(?:{a}){times}")),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn any_walk_through_an_accepted_grammar_can_go_on(
        grammar in prop_oneof![
            4 => schemas().prop_map(schema),
            1 => regexes().prop_map(Grammar::Regex),
        ],
        picks in prop::collection::vec(any::<prop::sample::Index>(), 40),
        takes_words in any::<bool>(),
    ) {
        // A node accepts what the router accepts.
        if COMPILER.check(&grammar).is_err() {
            return Ok(());
        }
        let compiler = if takes_words { &COMPILER_OF_WORDS } else { &COMPILER };
        let mut matcher = compiler.compile(&grammar).unwrap_or_else(|error| panic!("{error}"));
        let mut picks = picks.iter();
        walk(&mut matcher, 40, |count| picks.next().map_or(0, |pick| pick.index(count)));
    }
}
