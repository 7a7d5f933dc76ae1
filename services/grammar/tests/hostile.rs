//! Grammars designed to be expensive. Each compiles or fails with a typed error, and the cost of
//! using a matcher is bounded.

use std::time::{Duration, Instant};

use grammar::{
    Alternative, CallSyntax, CallableTool, Compiler, Grammar, MatchError, Token, ToolCalls,
};
use serde_json::{Map, Value, json};

/// Longest check on a loaded machine. On an idle machine a check takes a hundredth of this time.
const WITHIN: Duration = Duration::from_secs(60);

fn many(count: usize, of: impl Fn(usize) -> (String, Value)) -> Value {
    (0..count).map(of).collect::<Map<_, _>>().into()
}

/// Returns a "billion laughs" schema: each definition refers to the next one ten times.
fn laughs(keyword: &str) -> Value {
    let mut definitions = many(20, |level| {
        let next = json!({"$ref": format!("#/$defs/d{}", level + 1)});
        (format!("d{level}"), json!({keyword: vec![next; 10]}))
    });
    definitions["d20"] = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    json!({"$ref": "#/$defs/d0", "$defs": definitions})
}

/// Returns a schema in which each definition refers to the next one once.
fn chain(length: usize, wrap: impl Fn(Value) -> Value) -> Value {
    let mut definitions = many(length, |level| {
        (format!("d{level}"), wrap(json!({"$ref": format!("#/$defs/d{}", level + 1)})))
    });
    definitions[format!("d{length}")] = json!({});
    json!({"$ref": "#/$defs/d0", "$defs": definitions})
}

/// Expected error of a schema that compiles.
const ACCEPTED: &str = "";

/// Asserts that each schema is accepted or rejected with an error that starts with the given text.
fn check_schemas<const N: usize>(cases: [(Value, &str); N]) {
    let compiler = Compiler::for_bytes();
    for (schema, words) in cases {
        let text = schema.to_string();
        let started = Instant::now();
        let checked = compiler.check(&Grammar::JsonSchema(text.clone()));
        assert!(started.elapsed() < WITHIN, "{text:.200}: {:?}", started.elapsed());
        match checked {
            Ok(()) => assert_eq!(words, ACCEPTED, "{text:.200}"),
            Err(error) => {
                let error = error.to_string();
                assert!(!words.is_empty() && error.starts_with(words), "{text:.200}: {error}");
                assert!(error.len() < 400, "{error}");
            }
        }
    }
    assert!(peak_mib() < 512, "{} MiB", peak_mib());
}

fn text_properties(count: usize) -> Value {
    let properties = many(count, |i| (format!("k{i}"), json!({"type": "string"})));
    json!({"type": "object", "properties": properties})
}

#[test]
fn lengths_and_counts_of_any_size_are_accepted_in_bounded_time() {
    let lists = (0..8).fold(
        json!({"type": "integer"}),
        |inner, _| json!({"type": "array", "items": inner, "minItems": 100}),
    );
    check_schemas([
        (json!({"type": "array", "minItems": 1_000_000_000}), ACCEPTED),
        (json!({"type": "array", "maxItems": 4_000_000_000_u64}), ACCEPTED),
        (lists, ACCEPTED),
        (json!({"type": "string", "maxLength": 1_000_000_000}), ACCEPTED),
        (json!({"type": "string", "minLength": 10_000_000}), ACCEPTED),
        (json!({"type": "string", "maxLength": 1e20}), "is not supported: Expected positive"),
        (json!({"type": "object", "minProperties": 1_000_000}), ACCEPTED),
        (json!({"type": "integer", "minimum": -1e300}), ACCEPTED),
        (
            json!({"type": "integer", "minimum": 1e300}),
            "is not supported: minimum 1e+300; expected",
        ),
    ]);
}

#[test]
fn schemas_over_a_limit_on_their_parts_are_rejected_with_the_limit() {
    check_schemas([
        (
            json!({"enum": (0..1001).collect::<Vec<_>>()}),
            "has 1001 values in enums; allowed: at most 1000",
        ),
        (json!({"enum": (0..1000).collect::<Vec<_>>()}), ACCEPTED),
        (text_properties(1000), ACCEPTED),
        (text_properties(1001), "has 1001 properties; allowed: at most 1000"),
        (
            json!({"anyOf": vec![json!({"type": "null"}); 501]}),
            "has 501 parts in anyOf, oneOf and allOf",
        ),
        (json!({"prefixItems": vec![json!({}); 3000]}), "has 3001 objects; allowed: at most 3000"),
        (
            json!({"type": "object", "properties": many(101, |i| {
                (format!("k{i}"), json!({"type": "string", "format": "uri"}))
            })}),
            "has 101 values of format; allowed: at most 100",
        ),
    ]);
}

#[test]
fn references_and_combined_schemas_are_checked_in_bounded_time() {
    let options = |name: &str| {
        let one = |index| json!({"type": "object", "properties": {format!("{name}{index}"): {"type": "string"}}});
        json!({"anyOf": (0..25).map(one).collect::<Vec<_>>()})
    };
    let anchor = |name: usize| json!({"$ref": format!("#{name}")});
    let cross: Vec<Value> = ["a", "b", "c", "d", "e"].into_iter().map(options).collect();
    check_schemas([
        (json!({"type": "array", "items": {"$ref": "#"}}), ACCEPTED),
        (json!({"$ref": "#"}), "is not supported: no output matches it"),
        // Every output is endless.
        (
            json!({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
            "is not supported: no output matches it",
        ),
        (
            json!({"type": "object", "properties": {"a": false}, "required": ["a"]}),
            "is not supported: no output matches it: required property 'a' is unsatisfiable",
        ),
        (json!({"$ref": "https://example.com/a"}), "is not supported: $ref to another document"),
        (json!({"$ref": "file:///etc/passwd"}), "is not supported: $ref to another document"),
        // llguidance does not know names of anchors.
        (
            json!({"allOf": [
                {"type": "array", "prefixItems": (0..2900).map(anchor).collect::<Vec<_>>()},
                {"type": "array", "items": {"minLength": 1}},
            ]}),
            "is not supported: $ref to another document",
        ),
        // Compiling this schema on a stack of 2 MiB would overflow the stack.
        (chain(1400, |next| json!({"items": next})), ACCEPTED),
        (laughs("allOf"), ACCEPTED),
        (laughs("anyOf"), ACCEPTED),
        (laughs("oneOf"), "is not supported: oneOf"),
        (json!({"allOf": cross}), "has "),
    ]);
}

/// Returns groups of references to one deep list. An index may be written in several ways, and
/// llguidance compiles the target of each reference inside the one before.
fn overlapping(groups: usize, levels: usize) -> Value {
    const INDICES: [&str; 4] = ["0", "00", "+0", "+00"];
    let reference = |group: usize, alias: usize| {
        let (first, second) = (INDICES[alias % 4], INDICES[alias / 4]);
        json!({"$ref": format!("#/$defs/{group}/{first}/{second}")})
    };
    let group = |group: usize| {
        let all = (0..16).map(|alias| reference(group, alias)).chain([reference(group + 1, 0)]);
        let last = json!({"type": "array", "prefixItems": all.collect::<Vec<_>>()});
        json!([[(0..levels).fold(last, |inner, _| json!({"type": "array", "items": inner}))]])
    };
    let definitions: Vec<Value> = (0..groups).map(group).chain([json!([[{}]])]).collect();
    json!({"$ref": "#/$defs/0/0/0", "$defs": definitions})
}

#[test]
fn references_that_overlap_are_rejected_before_they_overflow_the_stack() {
    check_schemas([
        (
            overlapping(51, 25),
            "has 22033 levels of schemas to which references lead; allowed: at most 5000",
        ),
        // Takes most of the allowed levels.
        (overlapping(11, 25), ACCEPTED),
    ]);
}

const TOO_MANY_COPIES: &str =
    " subschemas in copies of schemas that are combined with others; allowed: at most 10000";

#[test]
fn combined_schemas_are_rejected_before_their_copies_multiply() {
    let object = json!({"type": "object"});
    let large = |count: usize| {
        let items = vec![json!({"minLength": 1}); count];
        json!({"type": "object", "properties": {"x": {"type": "array", "prefixItems": items}}})
    };
    let properties = |count: usize| many(count, |index| (format!("a{index}"), object.clone()));
    let definitions = |count: usize| json!({"B": large(count)});
    let b = json!({"$ref": "#/$defs/B"});
    // `A` is recursive. It is copied along the tree of the definitions `K`.
    let recursive = |levels: usize, count: usize| {
        let of = |name: &str| json!({"$ref": format!("#/$defs/{name}")});
        let mut definitions = many(levels, |level| {
            let next = of(&format!("K{}", level + 1));
            let properties = json!({"x": next, "y": next});
            (format!("K{level}"), json!({"type": "object", "properties": properties}))
        });
        definitions[format!("K{levels}")] = json!({"type": "object"});
        let properties = json!({"x": of("A"), "y": of("A"), "p": large(count)});
        definitions["A"] = json!({"type": "object", "properties": properties});
        json!({"allOf": [of("A"), of("K0")], "$defs": definitions})
    };
    // `A` has two alternatives, which multiply along the chain of the definitions `K`.
    let branching = |levels: usize, count: usize, along: &str| {
        let of = |name: &str| json!({"$ref": format!("#/$defs/{name}")});
        let mut definitions = many(levels, |level| {
            let properties = json!({"x": of(&format!("K{}", level + 1))});
            (format!("K{level}"), json!({"type": "object", "properties": properties}))
        });
        definitions[format!("K{levels}")] = json!({"type": "object"});
        let one = json!({"type": "object", "properties": {"x": of("A"), "p": large(count)}});
        definitions["A"] = json!({"anyOf": [one, one]});
        let value = (0..levels).fold(json!({}), |inside, _| json!({"x": inside}));
        definitions["Value"] = json!({"const": value});
        json!({"allOf": [of("A"), of(along)], "$defs": definitions})
    };
    // An expression of ten operators, and one of which the left side is an expression with a name.
    let expression = {
        let any = json!({"$ref": "#/$defs/Any"});
        let operator = |index: usize| json!({"type": "object", "properties": {"kind": {"const": index.to_string()}, "left": any, "right": any}});
        let operators: Vec<Value> = (0..10).map(operator).collect();
        let named = json!({"type": "object", "properties": {"name": {"type": "string"}}});
        let left = json!({"type": "object", "properties": {"left": named}});
        json!({"allOf": [any, left], "$defs": {"Any": {"anyOf": operators}}})
    };
    let repeated = json!({"type": vec!["object"; 7]});
    let compiler = Compiler::for_bytes();
    for schema in [
        json!({"allOf": [repeated, repeated, repeated, repeated, large(1000)]}),
        json!({"type": vec!["object"; 1000], "allOf": [large(1000)]}),
        // Three groups of keywords have all types.
        json!({"type": vec!["object"; 14], "anyOf": [{}], "required": [], "allOf": [{}],
            "properties": large(10)["properties"]}),
        json!({"type": vec!["object"; 60], "properties": {"x": {"type": vec!["object"; 60],
            "properties": {"y": large(10)}}}}),
        json!({"type": "object", "properties": properties(900), "patternProperties": {"^a": large(1000)}}),
        json!({"type": "object", "properties": properties(900), "patternProperties": {"^a": b},
            "$defs": definitions(1000)}),
        json!({"allOf": [{"type": "object", "properties": properties(900)},
            {"type": "object", "additionalProperties": b}], "$defs": definitions(1000)}),
        json!({"type": "object", "properties": large(1000)["properties"],
            "anyOf": vec![object.clone(); 400]}),
        json!({"allOf": [{"type": "array", "prefixItems": vec![true; 3000]},
            {"type": "array", "items": large(1000)}]}),
        json!({"allOf": [{"const": vec![1; 3000]}, {"type": "array", "items": large(1000)}]}),
        json!({"anyOf": vec![object.clone(); 400], "const": {"a": vec![1; 3000]}}),
        recursive(11, 500),
        branching(12, 300, "K0"),
        branching(12, 300, "Value"),
    ] {
        let text = schema.to_string();
        let error = compiler.check(&Grammar::JsonSchema(text.clone())).unwrap_err().to_string();
        assert!(error.ends_with(TOO_MANY_COPIES), "{text:.200}: {error}");
    }
    let extended = json!({"allOf": [{"$ref": "#/$defs/Node"}, {"type": "object", "properties": {
        "type": {"const": "group"}, "name": {"type": "string"}}}], "$defs": {"Node": {"type": "object",
        "properties": {"type": {"type": "string"},
            "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}}}}}});
    // Each of 12 classes extends a recursive one.
    let text = json!({"type": "string"});
    let inherited = {
        let base = json!({"$ref": "#/$defs/Component"});
        let mut definitions = many(12, |class| {
            let own = many(8, |index| (format!("p{class}_{index}"), text.clone()));
            let part = json!({"type": "object", "properties": own});
            (format!("Class{class}"), json!({"allOf": [base, part]}))
        });
        definitions["Component"] = json!({"type": "object", "properties": {"type": text, "id": text,
            "children": {"type": "array", "items": base}}});
        let any = |class: usize| json!({"$ref": format!("#/$defs/Class{class}")});
        json!({"anyOf": (0..12).map(any).collect::<Vec<_>>(), "$defs": definitions})
    };
    // Classes of a syntax tree: each extends `Node` and has properties of any class.
    let tree = |classes: usize| {
        let (any, node) = (json!({"$ref": "#/$defs/Any"}), json!({"$ref": "#/$defs/Node"}));
        let mut definitions = many(classes, |class| {
            let own = json!({"type": {"const": class.to_string()}, "left": any, "right": any,
                "list": {"type": "array", "items": any}});
            (
                format!("Class{class}"),
                json!({"allOf": [node, {"type": "object", "properties": own}]}),
            )
        });
        let number = json!({"type": "integer"});
        let place = json!({"type": "object", "properties": {"line": number, "column": number}});
        let span = json!({"type": "object", "properties": {"start": place, "end": place}});
        let own = json!({"type": text, "span": span});
        definitions["Node"] = json!({"type": "object", "properties": own});
        let class = |class: usize| json!({"$ref": format!("#/$defs/Class{class}")});
        definitions["Any"] = json!({"anyOf": (0..classes).map(class).collect::<Vec<_>>()});
        json!({"$ref": "#/$defs/Any", "$defs": definitions})
    };
    let types = ["object", "array", "string", "number", "integer", "boolean", "null"];
    let any = json!({"type": types});
    check_schemas([
        (json!({"allOf": [any, any, any, any, large(1000)]}), ACCEPTED),
        (json!({"default": {"type": vec!["a"; 1000], "x": 1}}), ACCEPTED),
        (json!({"const": {"type": ["a", "a"], "x": 1}}), ACCEPTED),
        (extended, ACCEPTED),
        (inherited, ACCEPTED),
        (tree(8), ACCEPTED),
        (tree(20), ACCEPTED),
        (expression, ACCEPTED),
        (
            json!({"type": "object", "properties": properties(20), "patternProperties": {"^a": large(20)}}),
            ACCEPTED,
        ),
        (
            json!({"type": "object", "properties": large(200)["properties"],
            "anyOf": vec![object.clone(); 3]}),
            ACCEPTED,
        ),
    ]);
}

/// Returns a schema of definitions, each with two properties. `property` turns a reference to the
/// next definition into a property. `definition` builds a definition from its number and its
/// properties.
fn doubling(
    levels: usize,
    property: impl Fn(Value) -> Value,
    definition: impl Fn(usize, Value) -> Value,
) -> Value {
    let mut definitions = many(levels, |level| {
        let next = property(json!({"$ref": format!("#/$defs/d{}", level + 1)}));
        (format!("d{level}"), definition(level, json!({"a": next, "b": next})))
    });
    definitions[format!("d{levels}")] = json!({"type": "object"});
    json!({"$ref": "#/$defs/d0", "$defs": definitions})
}

fn beside(mut reference: Value, keyword: &str, value: Value) -> Value {
    reference[keyword] = value;
    reference
}

#[test]
fn references_with_sibling_keywords_are_rejected_before_their_copies_multiply() {
    let object = |_: usize, properties: Value| json!({"type": "object", "properties": properties});
    let sibling = |reference: Value| beside(reference, "required", json!([]));
    let all_of = |reference: Value| json!({"allOf": [reference, {"required": []}]});
    let same = |reference: Value| reference;
    // The other part of `allOf` has the same properties.
    let merged = |_: usize, properties: Value| {
        let any = json!({"required": []});
        json!({"allOf": [{"properties": properties}, {"properties": {"a": any, "b": any}}]})
    };
    let with_patterns = |_: usize, properties: Value| {
        json!({"type": "object", "properties": properties,
            "patternProperties": {"^[ab]$": {"required": []}}})
    };
    let compiler = Compiler::for_bytes();
    for schema in [
        doubling(17, sibling, object),
        doubling(17, all_of, object),
        doubling(17, same, merged),
        doubling(17, same, with_patterns),
        doubling(100, sibling, object),
    ] {
        let text = schema.to_string();
        let error = compiler.check(&Grammar::JsonSchema(text.clone())).unwrap_err().to_string();
        assert!(error.ends_with(TOO_MANY_COPIES), "{text:.200}: {error}");
    }
    let with_default = |reference: Value| beside(reference, "default", json!({"a": null}));
    let described = |reference: Value| beside(reference, "description", json!("the next one"));
    let wrapped =
        |reference: Value| json!({"allOf": [reference], "title": "Next", "default": null});
    let optional =
        |reference: Value| json!({"anyOf": [reference, {"type": "null"}], "default": null});
    check_schemas([
        (doubling(17, with_default, object), ACCEPTED),
        (doubling(17, described, object), ACCEPTED),
        (doubling(17, wrapped, object), ACCEPTED),
        (doubling(17, optional, object), ACCEPTED),
        (doubling(6, sibling, object), ACCEPTED),
    ]);
}

#[test]
fn patterns_are_checked_in_bounded_time() {
    // No string matches two of them.
    let disjoint = |from: usize, count: usize| {
        many(count, |i| (format!("^[ab]{{100}}a{}$", from + i), json!({"type": "string"})))
    };
    let object = |patterns: Value| json!({"type": "object", "patternProperties": patterns});
    let objects = |count: usize| vec![json!({"type": "object"}); count];
    let one_each = |count: usize| (0..count).map(|i| object(disjoint(i, 1))).collect::<Vec<_>>();
    let items = vec![json!({"minLength": 1}); 1000];
    let closed = json!({"type": "object", "additionalProperties": {"prefixItems": items}});
    let compiler = Compiler::for_bytes();
    for schema in [
        beside(object(disjoint(0, 60)), "anyOf", objects(30).into()),
        json!({"allOf": one_each(16), "anyOf": objects(20)}),
        json!({"allOf": [object(disjoint(0, 60)), closed]}),
    ] {
        let text = schema.to_string();
        let error = compiler.check(&Grammar::JsonSchema(text.clone())).unwrap_err().to_string();
        assert!(error.ends_with(TOO_MANY_COPIES), "{text:.200}: {error}");
    }
    check_schemas([
        (object(disjoint(0, 300)), "has 44850 pairs of different patterns"),
        (object(disjoint(0, 63)), ACCEPTED),
        (
            json!({"prefixItems": (0..15).map(|_| object(disjoint(0, 60))).collect::<Vec<_>>()}),
            "has 26550 pairs of different patterns",
        ),
        (json!({"allOf": one_each(64)}), "has 129024 pairs of different patterns"),
        // Patterns of two objects are compared only if the schema may merge the objects.
        (
            json!({"type": "object", "properties": {
                "a": object(disjoint(0, 25)), "b": object(disjoint(25, 25)),
            }}),
            ACCEPTED,
        ),
        (
            json!({"type": "object", "properties": {
                "a": object(disjoint(0, 25)), "b": object(disjoint(25, 25)),
                "c": {"allOf": objects(2)},
            }}),
            "has 2450 pairs of different patterns",
        ),
        (json!({"allOf": one_each(5), "anyOf": objects(3)}), ACCEPTED),
        (json!({"type": "string", "pattern": "((a{100}){100}){100}"}), ACCEPTED),
        (json!({"type": "string", "pattern": "^(a+)+$"}), ACCEPTED),
        (json!({"type": "string", "pattern": "(a|b)*a(a|b){1000}"}), ACCEPTED),
        (object(json!({"^a1.*(x|y){0,50}": {}, "^a10": {}})), "is not supported"),
        // Only `x` matches both patterns. A proof that nothing else does needs 2^1000 states.
        (
            json!({"type": "string", "allOf": [
                {"pattern": "^(x|(a|b)*a(a|b){1000}a)$"}, {"pattern": "^(x|(a|b)*b(a|b){1001})$"},
            ]}),
            ACCEPTED,
        ),
        (
            json!({"type": "string", "pattern": r"\p{L}".repeat(501)}),
            "has 501 non-ASCII character classes",
        ),
        (
            json!({"type": "string", "pattern": format!("(?i){}", r"\p{L}".repeat(26))}),
            "has 520 non-ASCII character classes",
        ),
        (
            json!({"type": "object", "patternProperties": {"[\\w--a]".repeat(501): {}}}),
            "has 501 non-ASCII character classes",
        ),
    ]);
}

#[test]
fn schemas_are_bounded_under_every_name() {
    let large = || json!({"type": "integer", "multipleOf": 9_999_991});
    for name in ["const", "default", "examples", "enum"] {
        check_schemas([
            (json!({"type": "object", "properties": {name: large()}}), "has multipleOf 9999991"),
            (
                json!({"$defs": {name: large()}, "$ref": format!("#/$defs/{name}")}),
                "has multipleOf 9999991",
            ),
            (json!({name: [large()], "$ref": format!("#/{name}/0")}), "has multipleOf 9999991"),
        ]);
    }
}

#[test]
fn multiples_are_bounded_alone_and_together() {
    check_schemas([
        (
            json!({"type": "integer", "multipleOf": 999_999_937}),
            "has multipleOf 999999937; allowed",
        ),
        (
            json!({"type": "number", "multipleOf": 4294.967295}),
            "has multipleOf 4294.967295; allowed",
        ),
        (json!({"type": "number", "multipleOf": 1e-300}), "has multipleOf 1e-300; allowed"),
        (json!({"type": "number", "multipleOf": 0.01}), ACCEPTED),
        (json!({"type": "integer", "multipleOf": 4999}), ACCEPTED),
        (json!({"type": "integer", "multipleOf": 100_000}), ACCEPTED),
        // Without the bound this schema takes 100 s of CPU time and 3 GB.
        (
            json!({"type": "integer", "multipleOf": 9_999_991}),
            "has multipleOf 9999991; allowed: a whole number up to 5000, times a power of ten",
        ),
        // The factor 4999 is within the bound, but the automaton has too many remainders.
        (
            json!({"type": "integer", "multipleOf": 49_990_000}),
            "is not supported: it is too complex",
        ),
        (json!({"type": "integer", "allOf": [{"multipleOf": 7}, {"multipleOf": 11}]}), ACCEPTED),
        (
            json!({"type": "integer", "allOf": [{"multipleOf": 4999}, {"multipleOf": 4993}]}),
            "has multipleOf values that may apply to one number, with a least common multiple of \
             more than 5000",
        ),
        (
            json!({"anyOf": [{"multipleOf": 4999}, {"type": "null"}], "multipleOf": 4993}),
            "has multipleOf values that may apply to one number",
        ),
        // Their product exceeds 64 bits.
        (
            json!({"allOf": [{"multipleOf": 49_990_000}, {"multipleOf": 0.000_049_97}]}),
            "has multipleOf values that may apply to one number",
        ),
        (
            json!({"type": "object", "properties": {"a": {"multipleOf": 997}, "b": {"multipleOf": 991}}}),
            ACCEPTED,
        ),
        (
            json!({"type": "object", "properties": many(1000, |i| {
                (format!("k{i}"), json!({"type": "integer", "multipleOf": 4999, "minimum": i}))
            })}),
            "is not supported: it is too complex",
        ),
    ]);
}

/// Returns the peak resident memory of the process in MiB.
fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    peak.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
}

/// The functions of one request share bounds that are larger than the bounds of one schema.
#[test]
fn limits_hold_for_all_functions_of_a_request_together() {
    let compiler = Compiler::for_bytes();
    let wide = text_properties(1000);
    let short = json!({"properties": many(1000, |i| (format!("{i:x}"), json!({})))});
    let values =
        json!({"type": "object", "properties": {"a": {"enum": (0..1000).collect::<Vec<_>>()}}});
    let parts = json!({"type": "object", "properties": {"a": {"anyOf": vec![json!({"type": "null"}); 500]}}});
    let calls = |schema: &Value, count: usize, alternative: Alternative| {
        let syntax = CallSyntax {
            before_name: "<call>".into(),
            before_arguments: ":".into(),
            after_arguments: "</call>".into(),
            between: "\n".into(),
            ..Default::default()
        };
        let arguments = Some(schema.to_string());
        let tool = |index| CallableTool { name: format!("f{index}"), arguments: arguments.clone() };
        let tools = (0..count).map(tool).collect();
        Grammar::ToolCalls(ToolCalls { syntax, tools, several: true, alternative })
    };
    let answer = |schema: &Value| Alternative::Answer {
        grammar: Box::new(Grammar::JsonSchema(schema.to_string())),
        tag: "<call>".into(),
    };
    for (schema, count, alternative, said) in [
        (&wide, 4, Alternative::Nothing, None),
        (&wide, 5, Alternative::Nothing, Some("has 5000 properties; allowed: at most 4000")),
        (&wide, 4, answer(&wide), Some("has 5000 properties; allowed: at most 4000")),
        (&short, 25, Alternative::Nothing, Some("has 5000 properties; allowed: at most 4000")),
        (&values, 4, Alternative::Nothing, None),
        (
            &values,
            25,
            Alternative::Nothing,
            Some("has 5000 values in enums; allowed: at most 4000"),
        ),
        (&parts, 4, Alternative::Nothing, None),
        (
            &parts,
            4,
            answer(&parts),
            Some("has 2500 parts in anyOf, oneOf and allOf; allowed: at most 2000"),
        ),
    ] {
        let started = Instant::now();
        let checked = compiler.check(&calls(schema, count, alternative));
        assert!(started.elapsed() < WITHIN, "{count}: {:?}", started.elapsed());
        assert_eq!(checked.err().map(|error| error.to_string()).as_deref(), said, "{count}");
    }
}

#[test]
fn expensive_regexes_are_checked_in_bounded_time() {
    let compiler = Compiler::for_bytes();
    for expression in [
        "((a|b|c|d|e)*(a|b|c|d|e)*){0,20}x",
        "(.{0,300}){3}z",
        "(a{1000}){1000}",
        "((a*)*)*b",
        "(a|b)*a(a|b){1000}",
        r"\p{L}{1000}",
        r"(\w{1,100}){1,100}",
        "[^a]{10000}",
        "(?:a?){5000}a{5000}",
    ] {
        let started = Instant::now();
        assert_eq!(compiler.check(&Grammar::Regex(expression.into())), Ok(()), "{expression}");
        assert!(started.elapsed() < WITHIN, "{expression}");
    }
}

/// Each token leads to a different state: the grammar has one state per string of the letters a and
/// b.
#[test]
fn a_bitmask_beyond_its_budget_is_a_typed_error() {
    let letters = |length: u32, bits: u32| -> Vec<u8> {
        (0..length).map(|at| if bits >> at & 1 == 1 { b'a' } else { b'b' }).collect()
    };
    let words: Vec<Vec<u8>> = (1..=15)
        .flat_map(|length| (0..1_u32 << length).map(move |bits| letters(length, bits)))
        .collect();
    let compiler = Compiler::new(words.iter().map(|word| Token::Text(word)));
    let costly = Grammar::Regex("(a|b)*a(a|b){300}".into());
    let mut matcher = compiler.compile(&costly).unwrap();
    let error = matcher.allowed().unwrap_err();
    assert!(matches!(error, MatchError::TooComplex { .. }), "{error:?}");
    // After the error the matcher returns no bitmask.
    assert!(matcher.allowed().is_err() && matcher.accept(0).is_err());
    // The compiler is still usable.
    let mut cheap = compiler.compile(&Grammar::Regex("(ab){1,3}".into())).unwrap();
    assert!(cheap.allowed().is_ok());
}

/// Each bitmask alone is within its bound.
#[test]
fn bitmasks_beyond_the_budget_of_an_answer_are_a_typed_error() {
    let words: Vec<String> = (1..=10).map(|length| "a".repeat(length)).collect();
    let compiler = Compiler::new(words.iter().map(|word| Token::Text(word.as_bytes())));
    let costly = Grammar::Regex("(?:a?){5000}a{5000}".into());
    let mut matcher = compiler.compile(&costly).unwrap();
    let mut taken = 0;
    let error = loop {
        match matcher.allowed() {
            Ok(_) => matcher.accept(9).unwrap(),
            Err(error) => break error,
        }
        taken += 1;
    };
    assert!(matches!(error, MatchError::TooComplex { .. }), "{error:?}");
    assert!(taken > 1 && error.to_string().contains("together"), "{taken}: {error}");
}

#[test]
fn ordinary_answers_of_any_length_stay_within_the_bitmask_budget() {
    let schema = |schema: Value| Grammar::JsonSchema(schema.to_string());
    let optional = schema(text_properties(1000));
    let bounded = schema(json!({"type": "string", "minLength": 10_000, "maxLength": 20_000}));
    let compiler = Compiler::for_bytes();
    let value = "a".repeat(800);
    let properties: Vec<String> = (0..1000).step_by(50).map(|i| format!("\"k{i}\":\"\"")).collect();
    for (grammar, answer) in [
        (&optional, format!("{{{}}}", properties.join(","))),
        (&bounded, format!("\"{value}")),
        (&Grammar::json_object(), format!("{{\"a\":\"{value}\"}}")),
        (&Grammar::Regex(r"([A-Za-z]+ ){1,100}".into()), "words and more ".repeat(20)),
    ] {
        let mut matcher = compiler.compile(grammar).unwrap();
        for (at, byte) in answer.bytes().enumerate() {
            let allowed = matcher.allowed().unwrap_or_else(|error| panic!("{at}: {error}"));
            assert!(allowed[usize::from(byte) / 32] >> (byte % 32) & 1 == 1, "{at} of {answer}");
            matcher.accept(u32::from(byte)).unwrap();
        }
    }
}

#[test]
fn context_free_grammars_of_any_cost_end_in_bounded_time() {
    let compiler = Compiler::for_bytes();
    let laughs = |define: &str| {
        let rules = (0..20).map(|level| {
            let next = format!("r{} ", level + 1).repeat(10);
            format!("r{level} {define} {next}\n")
        });
        rules.collect::<String>() + &format!("r20 {define} \"a\"\n")
    };
    for text in [
        format!("root ::= r0\n{}", laughs("::=")),
        format!("start: r0\n{}", laughs(":")),
        format!("start: T0\n{}", laughs(":").to_uppercase().replace("\"A\"", "\"a\"")),
        "root ::= (\"a\"{1,10000}){1,10000}".to_owned(),
        "root ::= (root? \"a\"{1,10000}){1,10000}".to_owned(),
        "start: (\"a\"{1,100000}){1,100000}".to_owned(),
        "start: x{1,1000000}\nx: \"a\" start?".to_owned(),
        "start: start".to_owned(),
        "start: start start | \"a\"".to_owned(),
        "root ::= root".to_owned(),
        "root ::= root root | \"\"".to_owned(),
        format!("start: {}", "(\"a\"|".repeat(3000)),
        format!("start: {}", "/a/ ".repeat(4000)),
        format!("start: {}", "/[^b]/ ".repeat(400)),
        format!("start: /(.*a){{1000}}(.*b){{1000}}/ {}", "/.*x/".repeat(50)),
        format!("root ::= {}", "\"a\" | ".repeat(2500)),
        "%ignore /.*/\nstart: \"a\" \"b\"".to_owned(),
    ] {
        let started = Instant::now();
        let checked = compiler.check(&Grammar::ContextFree(text.clone()));
        let took = started.elapsed();
        println!("{took:?} {checked:?} {text:.60}");
        assert!(took < WITHIN, "{text:.200}: {took:?}");
        if let Err(error) = checked {
            assert!(error.to_string().len() < 400, "{error}");
        }
    }
    assert!(peak_mib() < 512, "{} MiB", peak_mib());
}
