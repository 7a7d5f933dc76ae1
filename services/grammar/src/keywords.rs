//! Keywords that llguidance lacks, rewritten to keywords that it has.
//!
//! A rewritten schema matches the same values. Exceptions: numeric bounds that no `f64` represents
//! move inwards, and keys of a pattern that matches only a few names come in one order. A keyword
//! that cannot be rewritten is an error: llguidance would reject it, or ignore it in older drafts.

use regex_syntax::{
    ParserBuilder,
    hir::{self, Hir, HirKind, literal::Extractor},
};
use serde_json::{Map, Number, Value, json};

use crate::error::{GrammarError, unsupported};

type Keywords = Map<String, Value>;

/// Keywords without effect on the values that a schema matches, which llguidance ignores beside
/// others.
pub(crate) const ANNOTATIONS: [&str; 15] = [
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "default",
    "definitions",
    "description",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
];

/// Keywords of JSON Schema that neither llguidance nor [`rewrite`] implements.
const UNSUPPORTED: [&str; 8] = [
    "$dynamicRef",
    "$recursiveRef",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
];

/// All values of `type` that do not overlap, as llguidance knows them.
const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];

/// Maximum number of names that a key of `patternProperties` is replaced by.
const NAMES_MAX: usize = 32;

/// Maximum number of optional properties beside `minProperties` and additional properties.
const AT_LEAST_ONE_MAX: usize = 32;

/// Largest number below 2^63 that an `f64` represents. llguidance computes bounds of numbers in 64
/// bits.
const BOUND_MAX: f64 = 9_223_372_036_854_774_784.0;

/// Numbers up to this one are exact as `f64`.
const EXACT_MAX: f64 = 9_007_199_254_740_992.0;

/// Rewrites the keywords of one schema. Its subschemas are rewritten apart.
pub(crate) fn rewrite(keywords: &mut Keywords) -> Result<(), GrammarError> {
    for keyword in ["const", "enum"] {
        keywords.get(keyword).map_or(Ok(()), |values| check_exact(keyword, values))?;
    }
    rewrite_bounds(keywords)?;
    rewrite_pattern(keywords);
    rewrite_date(keywords);
    rewrite_property_names(keywords)?;
    rewrite_pattern_properties(keywords);
    rewrite_property_counts(keywords);
    rewrite_unique_items(keywords)?;
    rewrite_contains(keywords)?;
    if let Some(forbidden) = keywords.shift_remove("not") {
        rewrite_not(keywords, &forbidden)?;
    }
    rewrite_condition(keywords)?;
    match UNSUPPORTED.iter().find(|&&keyword| keywords.contains_key(keyword)) {
        Some(keyword) => Err(unsupported(&format!("keyword {keyword}"))),
        None => Ok(()),
    }
}

/// Adds a schema that values must match, too.
fn require(keywords: &mut Keywords, schema: Value) {
    // llguidance rejects another value of `allOf`.
    if let Value::Array(all) = keywords.entry("allOf").or_insert_with(|| json!([])) {
        all.push(schema);
    }
}

/// Returns whether the keyword has no effect on the values that a schema matches.
fn is_annotation(keyword: &str) -> bool {
    keyword == "deprecated" || ANNOTATIONS.contains(&keyword)
}

/// Returns whether the schema matches every value.
fn is_any(schema: &Value) -> bool {
    match schema {
        Value::Bool(any) => *any,
        Value::Object(keywords) => keywords.keys().all(|keyword| is_annotation(keyword)),
        _ => false,
    }
}

/// Returns the schema's keywords without annotations.
fn constraints(schema: &Value) -> Vec<(&str, &Value)> {
    let keywords = schema.as_object().into_iter().flatten();
    keywords
        .map(|(keyword, value)| (keyword.as_str(), value))
        .filter(|(keyword, _)| !is_annotation(keyword))
        .collect()
}

/// Returns the values of `const` or `enum`.
fn listed<'a>(keyword: &str, value: &'a Value) -> Option<&'a [Value]> {
    match (keyword, value) {
        ("const", value) => Some(std::slice::from_ref(value)),
        ("enum", Value::Array(values)) => Some(values),
        _ => None,
    }
}

fn listed_in(schema: &Value) -> Option<&[Value]> {
    ["const", "enum"].iter().find_map(|keyword| listed(keyword, schema.get(keyword)?))
}

/// Returns whether the list has the value. 1 and 1.0 are one value.
fn contains(values: &[Value], value: &Value) -> bool {
    values.iter().any(|other| match (other, value) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (a, b) => a == b,
    })
}

fn names(value: Option<&Value>) -> Vec<&str> {
    value.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect()
}

/// Rejects values with numbers that llguidance would change.
fn check_exact(keyword: &str, value: &Value) -> Result<(), GrammarError> {
    match value {
        Value::Number(number) => {
            let float = number.as_f64().unwrap_or(f64::INFINITY);
            let is_exact = match exact_integer(number) {
                Some(exact) => float as i128 == exact,
                // A longer integer is already rounded.
                None => float.fract() != 0.0 || float.abs() <= EXACT_MAX,
            };
            if is_exact {
                return Ok(());
            }
            let reason = format!(
                "the number {number} in {keyword}; expected at most 2^53, which a 64-bit float represents"
            );
            Err(unsupported(&reason))
        }
        Value::Array(values) => values.iter().try_for_each(|value| check_exact(keyword, value)),
        Value::Object(members) => {
            members.values().try_for_each(|value| check_exact(keyword, value))
        }
        _ => Ok(()),
    }
}

fn exact_integer(number: &Number) -> Option<i128> {
    number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from))
}

/// Moves bounds that no `f64` represents inwards. A bound may move only so that fewer values match.
fn rewrite_bounds(keywords: &mut Keywords) -> Result<(), GrammarError> {
    for (keyword, is_lower) in [
        ("minimum", true),
        ("exclusiveMinimum", true),
        ("maximum", false),
        ("exclusiveMaximum", false),
    ] {
        let Some(Value::Number(bound)) = keywords.get_mut(keyword) else { continue };
        let Some(mut float) = bound.as_f64() else { continue };
        match exact_integer(bound) {
            Some(exact) if is_lower && (float as i128) < exact => float = float.next_up(),
            Some(exact) if !is_lower && (float as i128) > exact => float = float.next_down(),
            _ => {}
        }
        let is_beyond = if is_lower { float > BOUND_MAX } else { float < -BOUND_MAX };
        if is_beyond {
            return Err(unsupported(&format!("{keyword} {bound}; expected less than 2^63")));
        }
        float = float.clamp(-BOUND_MAX, BOUND_MAX);
        if float.abs() > EXACT_MAX {
            *bound = Number::from_f64(float).expect("a clamped number is finite");
        }
    }
    Ok(())
}

/// Turns look-ahead at the start of `pattern` into patterns of their own.
fn rewrite_pattern(keywords: &mut Keywords) {
    let Some(pattern) = keywords.get("pattern").and_then(Value::as_str) else { return };
    let is_one_sequence = find_outside_of_groups(pattern, b'|').is_none();
    let Some(mut rest) = pattern.strip_prefix('^').filter(|_| is_one_sequence) else { return };
    let mut ahead = Vec::new();
    while let Some(group) = rest.strip_prefix("(?=") {
        let Some(end) = find_outside_of_groups(group, b')') else { return };
        ahead.push(json!({"pattern": format!("^(?:{})", &group[..end])}));
        rest = &group[end + 1..];
    }
    if ahead.is_empty() {
        return;
    }
    let rest = Value::from(format!("^{rest}"));
    keywords.insert("pattern".to_owned(), rest);
    let is_string = keywords.get("type").is_some_and(|kind| kind == "string");
    for mut part in ahead {
        if is_string {
            part["type"] = json!("string");
        }
        require(keywords, part);
    }
}

/// Returns the position of a byte outside of groups, classes and escapes.
fn find_outside_of_groups(expression: &str, wanted: u8) -> Option<usize> {
    let (mut depth, mut in_class, mut is_escaped) = (0_u32, false, false);
    for (at, byte) in expression.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b']' => in_class = false,
            b'[' => in_class = true,
            _ if in_class => {}
            _ if depth == 0 && byte == wanted => return Some(at),
            b'(' => depth += 1,
            b')' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    None
}

/// Replaces the formats that allow 29 February in every year by patterns.
fn rewrite_date(keywords: &mut Keywords) {
    const DATE: &str = "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])\
         |(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))\
         |(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)";
    const TIME: &str = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
    let pattern = match keywords.get("format").and_then(Value::as_str) {
        Some("date") => format!("^{DATE}$"),
        Some("date-time") => format!("^{DATE}[tT]{TIME}$"),
        _ => return,
    };
    keywords.shift_remove("format");
    match keywords.contains_key("pattern") {
        true => require(keywords, json!({"pattern": pattern})),
        false => _ = keywords.insert("pattern".to_owned(), pattern.into()),
    }
}

/// Turns `propertyNames` into an object that allows only these names.
fn rewrite_property_names(keywords: &mut Keywords) -> Result<(), GrammarError> {
    let Some(allowed) = keywords.shift_remove("propertyNames") else { return Ok(()) };
    let is_string = |kind: &Value| match kind {
        Value::Array(kinds) => kinds.contains(&json!("string")),
        kind => kind == "string",
    };
    let rest: Vec<_> = constraints(&allowed)
        .into_iter()
        .filter(|(keyword, value)| *keyword != "type" || !is_string(value))
        .collect();
    let length = |name: &str| {
        rest.iter().find(|(keyword, _)| *keyword == name).map(|(_, value)| value.to_string())
    };
    let names = match rest[..] {
        _ if allowed == false => json!({"maxProperties": 0}),
        _ if allowed == true => return Ok(()),
        [] => return Ok(()),
        [("pattern", pattern)] => {
            let pattern = pattern.as_str().unwrap_or_default();
            json!({"patternProperties": {pattern: true}, "additionalProperties": false})
        }
        [("minLength" | "maxLength", _)]
        | [("minLength", _), ("maxLength", _)]
        | [("maxLength", _), ("minLength", _)] => {
            let (min, max) = (length("minLength"), length("maxLength"));
            let pattern = format!(
                "^(?s:.{{{},{}}})$",
                min.unwrap_or_else(|| "0".to_owned()),
                max.unwrap_or_default()
            );
            json!({"patternProperties": {pattern: true}, "additionalProperties": false})
        }
        [(keyword, values)] if listed(keyword, values).is_some() => {
            let names = listed(keyword, values).into_iter().flatten().filter_map(Value::as_str);
            let properties: Keywords =
                names.map(|name| (name.to_owned(), Value::Bool(true))).collect();
            json!({"properties": properties, "additionalProperties": false})
        }
        _ => {
            return Err(unsupported(
                "keyword propertyNames, except with pattern, enum, const, minLength or maxLength",
            ));
        }
    };
    let mut names = names;
    if keywords.get("type").is_some_and(|kind| kind == "object") {
        names["type"] = json!("object");
    }
    require(keywords, names);
    Ok(())
}

/// Turns patterns that match only a few names into properties, which an output has at most once.
fn rewrite_pattern_properties(keywords: &mut Keywords) {
    let Some(Value::Object(patterns)) = keywords.get("patternProperties") else { return };
    // A copied schema has no patterns, so copies do not multiply.
    let is_copied = |names: &Vec<String>, schema: &Value| {
        names.len() < 2 || !schema.to_string().contains("patternProperties")
    };
    let few: Vec<(String, Vec<String>)> = patterns
        .iter()
        .filter_map(|(pattern, schema)| {
            Some((
                pattern.clone(),
                names_of_pattern(pattern).filter(|names| is_copied(names, schema))?,
            ))
        })
        .collect();
    for (pattern, names) in few {
        let Some(Value::Object(patterns)) = keywords.get_mut("patternProperties") else { return };
        let Some(schema) = patterns.shift_remove(&pattern) else { continue };
        let properties = keywords.entry("properties").or_insert_with(|| json!({}));
        for name in names {
            let Value::Object(properties) = properties else { return };
            match properties.get_mut(&name) {
                Some(own) if is_any(own) => *own = schema.clone(),
                Some(own) if !is_any(&schema) => *own = json!({"allOf": [own.take(), schema]}),
                Some(_) => {}
                None => _ = properties.insert(name, schema.clone()),
            }
        }
    }
    if keywords.get("patternProperties").and_then(Value::as_object).is_some_and(Map::is_empty) {
        keywords.shift_remove("patternProperties");
    }
}

/// Returns the names that an anchored pattern matches, if they are few.
fn names_of_pattern(pattern: &str) -> Option<Vec<String>> {
    // Without Unicode, no class is expensive to parse.
    let mut parser = ParserBuilder::new().unicode(false).utf8(false).build();
    let parsed = parser.parse(pattern).ok()?;
    let HirKind::Concat(parts) = parsed.kind() else { return None };
    let (first, last) = (parts.first()?, parts.last()?);
    let is =
        |part: &Hir, look: hir::Look| matches!(part.kind(), HirKind::Look(found) if *found == look);
    if parts.len() < 2 || !is(first, hir::Look::Start) || !is(last, hir::Look::End) {
        return None;
    }
    let inner = Hir::concat(parts[1..parts.len() - 1].to_vec());
    if !inner.properties().look_set().is_empty() {
        return None;
    }
    let mut extractor = Extractor::new();
    extractor
        .limit_class(NAMES_MAX)
        .limit_repeat(NAMES_MAX)
        .limit_literal_len(256)
        .limit_total(NAMES_MAX);
    let names = extractor.extract(&inner);
    let literals = names.literals().filter(|_| names.is_exact())?;
    literals.iter().map(|literal| String::from_utf8(literal.as_bytes().to_vec()).ok()).collect()
}

/// Removes counts of properties that hold anyway, and turns "at least one" into alternatives.
fn rewrite_property_counts(keywords: &mut Keywords) {
    let required = names(keywords.get("required"));
    let properties = keywords.get("properties").and_then(Value::as_object).into_iter().flatten();
    let properties: Vec<String> = properties
        .filter(|(_, schema)| **schema != Value::Bool(false))
        .map(|(name, _)| name.clone())
        .collect();
    let optional: Vec<String> =
        properties.iter().filter(|name| !required.contains(&name.as_str())).cloned().collect();
    let has_others = keywords.get("additionalProperties") != Some(&Value::Bool(false))
        || keywords.contains_key("patternProperties");
    let required_count = required.len();
    let count = |name: &str| keywords.get(name).and_then(Value::as_u64);
    let (least, most) = (count("minProperties"), count("maxProperties"));
    if most.is_some_and(|most| !has_others && properties.len() as u64 <= most) {
        keywords.shift_remove("maxProperties");
    }
    if least.is_some_and(|least| least <= required_count as u64) {
        keywords.shift_remove("minProperties");
    } else if least == Some(1) && has_others && (1..=AT_LEAST_ONE_MAX).contains(&optional.len()) {
        keywords.shift_remove("minProperties");
        let none: Keywords =
            optional.iter().map(|name| (name.clone(), Value::Bool(false))).collect();
        let others = json!({"properties": none, "minProperties": 1});
        let one = optional.iter().map(|name| json!({"required": [name]}));
        let mut alternatives: Vec<Value> = one.chain([others]).collect();
        if let Some(kind) = keywords.get("type") {
            alternatives.iter_mut().for_each(|schema| schema["type"] = kind.clone());
        }
        require(keywords, json!({"anyOf": alternatives}));
    }
}

fn rewrite_unique_items(keywords: &mut Keywords) -> Result<(), GrammarError> {
    match keywords.shift_remove("uniqueItems") {
        None | Some(Value::Bool(false)) => Ok(()),
        Some(_)
            if keywords.get("maxItems").and_then(Value::as_u64).is_some_and(|most| most <= 1) =>
        {
            Ok(())
        }
        Some(_) => Err(unsupported(
            "keyword uniqueItems: a grammar cannot compare items; expected maxItems of at most 1 beside it",
        )),
    }
}

/// Turns `contains` into a number of items where each item matches it.
fn rewrite_contains(keywords: &mut Keywords) -> Result<(), GrammarError> {
    let (least, most) =
        (keywords.shift_remove("minContains"), keywords.shift_remove("maxContains"));
    let Some(contained) = keywords.shift_remove("contains") else { return Ok(()) };
    let least = least.map_or(Some(1), |least| least.as_u64());
    let is_every_item = is_any(&contained)
        || !keywords.contains_key("prefixItems") && keywords.get("items") == Some(&contained);
    match (least, &most) {
        (Some(0), None) => {}
        (Some(least), _) if is_every_item => {
            let own = |keyword: &str| keywords.get(keyword).and_then(Value::as_u64);
            let (min, max) = (own("minItems"), own("maxItems"));
            let most = most.and_then(|most| most.as_u64());
            keywords.insert("minItems".to_owned(), min.unwrap_or(0).max(least).into());
            if let Some(max) = [max, most].into_iter().flatten().min() {
                keywords.insert("maxItems".to_owned(), max.into());
            }
        }
        _ => return Err(unsupported("keyword contains, except where every item matches it")),
    }
    Ok(())
}

/// Adds what remains without the values that match `forbidden`.
fn rewrite_not(keywords: &mut Keywords, forbidden: &Value) -> Result<(), GrammarError> {
    if *forbidden == false {
        return Ok(());
    }
    if is_any(forbidden) {
        require(keywords, Value::Bool(false));
        return Ok(());
    }
    match constraints(forbidden)[..] {
        [("not", schema)] => require(keywords, schema.clone()),
        [("anyOf", Value::Array(all))] => {
            return all.iter().try_for_each(|schema| rewrite_not(keywords, schema));
        }
        [("required", Value::Array(names))] if names.len() == 1 && names[0].is_string() => {
            let name = names[0].as_str().unwrap_or_default();
            require(keywords, json!({"properties": {name: false}}));
        }
        [("type", kinds)] => {
            let kinds = match kinds {
                Value::Array(kinds) => kinds.as_slice(),
                kind => std::slice::from_ref(kind),
            };
            let own = match keywords.get("type") {
                Some(Value::Array(own)) => own.clone(),
                Some(own) => vec![own.clone()],
                None => TYPES.map(Value::from).to_vec(),
            };
            if kinds.contains(&json!("integer"))
                && own.contains(&json!("number"))
                && !kinds.contains(&json!("number"))
            {
                return Err(unsupported("keyword not with type integer beside numbers"));
            }
            // Every integer is a number.
            let is_forbidden = |own: &Value| {
                kinds.contains(own) || (own == "integer" && kinds.contains(&json!("number")))
            };
            let left: Vec<Value> = own.into_iter().filter(|kind| !is_forbidden(kind)).collect();
            match left.is_empty() {
                true => require(keywords, Value::Bool(false)),
                false => _ = keywords.insert("type".to_owned(), left.into()),
            }
        }
        [(keyword, values)] if listed(keyword, values).is_some() => {
            let own = match keywords.get("type") {
                Some(kind) if kind == "boolean" => Some(vec![json!(true), json!(false)]),
                _ => None,
            };
            let own = listed_in(&Value::Object(keywords.clone())).map(<[Value]>::to_vec).or(own);
            let Some(own) = own else {
                return Err(unsupported(
                    "keyword not with const or enum, except beside const, enum or type boolean",
                ));
            };
            let forbidden = listed(keyword, values).unwrap_or_default();
            let left: Vec<Value> =
                own.into_iter().filter(|value| !contains(forbidden, value)).collect();
            keywords.shift_remove("const");
            keywords.insert("enum".to_owned(), left.into());
        }
        _ => {
            return Err(unsupported(
                "keyword not, except with type, const, enum or one required property",
            ));
        }
    }
    Ok(())
}

/// Turns `if`, `then` and `else` into alternatives where the condition compares a property that has
/// an `enum`.
fn rewrite_condition(keywords: &mut Keywords) -> Result<(), GrammarError> {
    let (then, otherwise) = (keywords.shift_remove("then"), keywords.shift_remove("else"));
    let Some(condition) = keywords.shift_remove("if") else { return Ok(()) };
    if then.is_none() && otherwise.is_none() {
        return Ok(());
    }
    let (then, otherwise) =
        (then.unwrap_or(Value::Bool(true)), otherwise.unwrap_or(Value::Bool(true)));
    if is_any(&condition) {
        require(keywords, then);
        return Ok(());
    }
    if condition == false {
        require(keywords, otherwise);
        return Ok(());
    }
    let negated = negated_condition(keywords, &condition).ok_or_else(|| {
        unsupported("keyword if, except with one property whose const or enum is compared with an enum of the schema")
    })?;
    require(
        keywords,
        json!({"anyOf": [{"allOf": [condition, then]}, {"allOf": [negated, otherwise]}]}),
    );
    Ok(())
}

/// Returns a schema of the objects that do not match the condition.
fn negated_condition(keywords: &Keywords, condition: &Value) -> Option<Value> {
    let condition = constraints(condition);
    let [(name, tested)] = condition
        .iter()
        .find(|(keyword, _)| *keyword == "properties")?
        .1
        .as_object()?
        .iter()
        .collect::<Vec<_>>()[..]
    else {
        return None;
    };
    let is_known = |(keyword, value): &(&str, &Value)| match *keyword {
        "properties" => true,
        "type" => *value == "object",
        "required" => names(Some(value)) == [name],
        _ => false,
    };
    let is_object = keywords.get("type").is_some_and(|kind| kind == "object");
    if !is_object || !condition.iter().all(is_known) {
        return None;
    }
    let [(keyword, values)] = constraints(tested)[..] else { return None };
    let tested = listed(keyword, values)?;
    let own = listed_in(keywords.get("properties")?.get(name)?)?;
    let left: Vec<&Value> = own.iter().filter(|value| !contains(tested, value)).collect();
    let mut negated = json!({"type": "object", "properties": {name: {"enum": left}}});
    if !condition.iter().any(|(keyword, _)| *keyword == "required") {
        // An object without the property matches the condition.
        negated["required"] = json!([name]);
    }
    Some(negated)
}
