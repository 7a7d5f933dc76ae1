//! Schemas that only endless answers fit: an object that needs another of its kind, and so on.
//!
//! For every part of a schema we look for the types of JSON that a value which fits it may have:
//! once of finite values alone (the least fixpoint: nothing is finite until something shows it), once
//! of endless ones, too (the greatest). A schema that has types only in the second sense asks for an
//! answer without an end. Both are upper bounds, as whatever is not understood allows everything:
//! no schema that a finite value fits is refused. What nothing fits at all is not said here.

use std::{collections::HashMap, ops::BitAnd};

use serde_json::{Map, Value};

use crate::error::{GrammarError, one_line};

/// What is said of properties that nothing is said of.
static ANYTHING: Value = Value::Bool(true);

/// Refuses a schema that no finite value fits, though endless ones would.
pub(crate) fn check_ends(root: &Value) -> Result<(), GrammarError> {
    let parts = Parts::of(root);
    let finite = parts.settled(Types::NONE);
    let any = parts.settled(Types::ALL);
    match any[ROOT].first() {
        Some(kind) if finite[ROOT] == Types::NONE => {
            Err(GrammarError::Endless { place: parts.place_of_cycle(&finite, &any, kind) })
        }
        _ => Ok(()),
    }
}

/// A set of the six types of JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Types(u8);

impl Types {
    const NONE: Self = Self(0);
    const ALL: Self = Self(0b11_1111);
    const ARRAY: Self = Self(1 << 4);
    const OBJECT: Self = Self(1 << 5);

    fn named(name: &str) -> Self {
        match name {
            "null" => Self(1),
            "boolean" => Self(1 << 1),
            "number" | "integer" => Self(1 << 2),
            "string" => Self(1 << 3),
            "array" => Self::ARRAY,
            "object" => Self::OBJECT,
            _ => Self::ALL,
        }
    }

    fn of(value: &Value) -> Self {
        Self::named(match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        })
    }

    fn any_of(all: impl Iterator<Item = Self>) -> Self {
        all.fold(Self::NONE, |all, one| Self(all.0 | one.0))
    }

    fn first(self) -> Option<Self> {
        (self != Self::NONE).then(|| Self(1 << self.0.trailing_zeros()))
    }

    fn has(self, kind: Self) -> bool {
        self & kind != Self::NONE
    }
}

impl BitAnd for Types {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

/// The index of a [`Part`].
type Index = usize;
const ROOT: Index = 0;

/// How a part is reached from the one that it was found in.
#[derive(Clone, Copy, Debug)]
enum Step<'a> {
    /// Or from the root, by what a `$ref` says.
    Reference(&'a str),
    Keyword(&'static str),
    Name(&'static str, &'a str),
    At(&'static str, usize),
}

/// What a value must be that fits one schema. Indices are of the parts it is made of.
#[derive(Debug)]
struct Part<'a> {
    /// In which it was found.
    within: Index,
    step: Step<'a>,
    own: Types,
    reference: Option<Index>,
    all_of: Vec<Index>,
    /// `anyOf` and `oneOf`.
    one_of: Vec<Vec<Index>>,
    /// What every list holds.
    items: Vec<Index>,
    /// What every object holds.
    properties: Vec<Index>,
    /// How many properties an object has at least, if it is not said of each which.
    properties_min: u64,
    /// By one name each.
    named: Vec<Index>,
    /// By any number of names.
    unnamed: Vec<Index>,
}

impl<'a> Part<'a> {
    /// Everything fits.
    fn new(within: Index, step: Step<'a>) -> Self {
        let (reference, all_of, one_of, items, properties, named, unnamed) = Default::default();
        let (own, properties_min) = (Types::ALL, 0);
        Self {
            within,
            step,
            own,
            reference,
            all_of,
            one_of,
            items,
            properties,
            properties_min,
            named,
            unnamed,
        }
    }

    fn types(&self, of: &[Types]) -> Types {
        let mut types = self.own;
        for &part in self.reference.iter().chain(&self.all_of) {
            types = types & of[part];
        }
        for parts in &self.one_of {
            types = types & Types::any_of(parts.iter().map(|&part| of[part]));
        }
        let exists = |part: &Index| of[*part] != Types::NONE;
        if !self.items.iter().all(exists) {
            types = types & Types(!Types::ARRAY.0);
        }
        let enough = self.unnamed.iter().any(exists)
            || self.named.iter().filter(|part| exists(part)).count() as u64 >= self.properties_min;
        if !enough || !self.properties.iter().all(exists) {
            types = types & Types(!Types::OBJECT.0);
        }
        types
    }

    fn all(&self) -> impl Iterator<Item = Index> {
        let Self { reference, all_of, one_of, items, properties, named, unnamed, .. } = self;
        let lists = [all_of, items, properties, named, unnamed];
        let lists = lists.into_iter().chain(one_of).flatten();
        reference.iter().chain(lists).copied()
    }
}

/// The parts of a schema that its root is made of, itself first.
struct Parts<'a> {
    parts: Vec<Part<'a>>,
    root: &'a Value,
    /// By where they lie: a part that several places refer to is one.
    indices: HashMap<*const Value, Index>,
    /// Known by index, not yet looked into.
    unread: Vec<(Index, &'a Value)>,
    /// The keywords of the newest draft count; of the others some mean nothing.
    is_current: bool,
}

impl<'a> Parts<'a> {
    fn of(root: &'a Value) -> Self {
        let draft = root.get("$schema").and_then(Value::as_str);
        let is_current = draft.is_none_or(|draft| draft.contains("2020-12"));
        let (parts, indices, unread) = Default::default();
        let mut all = Self { parts, root, indices, unread, is_current };
        all.index(ROOT, Step::Reference("#"), root);
        while let Some((index, schema)) = all.unread.pop() {
            if let Value::Object(schema) = schema {
                all.read(index, schema);
            } else if *schema == Value::Bool(false) {
                all.parts[index].own = Types::NONE;
            }
        }
        all
    }

    fn index(&mut self, within: Index, step: Step<'a>, schema: &'a Value) -> Index {
        *self.indices.entry(std::ptr::from_ref(schema)).or_insert_with(|| {
            let index = self.parts.len();
            self.parts.push(Part::new(within, step));
            self.unread.push((index, schema));
            index
        })
    }

    fn read(&mut self, index: Index, schema: &'a Map<String, Value>) {
        self.parts[index].own = self.own_types(schema);
        let target = schema.get("$ref").and_then(Value::as_str);
        if let Some((name, target)) = target.and_then(|name| Some((name, self.target(name)?))) {
            let target = self.index(index, Step::Reference(name), target);
            self.parts[index].reference = Some(target);
        }
        self.parts[index].all_of = self.list(index, "allOf", schema.get("allOf"));
        for keyword in ["anyOf", "oneOf"] {
            if schema.get(keyword).is_some_and(Value::is_array) {
                let list = self.list(index, keyword, schema.get(keyword));
                self.parts[index].one_of.push(list);
            }
        }
        self.read_items(index, schema);
        self.read_properties(index, schema);
    }

    /// By its own words, not by those of others.
    fn own_types(&self, schema: &Map<String, Value>) -> Types {
        let types = match schema.get("type") {
            Some(Value::String(name)) => Types::named(name),
            Some(Value::Array(names)) => Types::any_of(
                names.iter().map(|name| name.as_str().map_or(Types::ALL, Types::named)),
            ),
            _ => Types::ALL,
        };
        let constant = schema.get("const").filter(|_| self.is_current).map(Types::of);
        let values = schema.get("enum").and_then(Value::as_array);
        let values = values.map(|values| Types::any_of(values.iter().map(Types::of)));
        types & constant.unwrap_or(Types::ALL) & values.unwrap_or(Types::ALL)
    }

    fn read_items(&mut self, index: Index, schema: &'a Map<String, Value>) {
        let count = schema.get("minItems").and_then(Value::as_u64).unwrap_or(0);
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let additional = schema.get("additionalItems");
        let (first, rest) = match schema.get("items") {
            // As older drafts have it.
            items @ Some(Value::Array(_)) => (("items", items), ("additionalItems", additional)),
            items => {
                let is_known = self.is_current && additional.is_none();
                let first = schema.get("prefixItems").filter(|_| is_known);
                (("prefixItems", first), ("items", items))
            }
        };
        let mut items = self.list(index, first.0, first.1);
        let first_count = items.len();
        items.truncate(count);
        if let (true, Some(schema)) = (count > first_count, rest.1) {
            items.push(self.index(index, Step::Keyword(rest.0), schema));
        }
        self.parts[index].items = items;
    }

    fn read_properties(&mut self, index: Index, schema: &'a Map<String, Value>) {
        let mut table = |keyword: &'static str| -> Vec<(&'a str, Index)> {
            let all = schema.get(keyword).and_then(Value::as_object).into_iter().flatten();
            let part = |(name, schema): (&'a String, &'a Value)| {
                (name.as_str(), self.index(index, Step::Name(keyword, name), schema))
            };
            all.map(part).collect()
        };
        let named = table("properties");
        let patterns = table("patternProperties");
        let additional = schema.get("additionalProperties").unwrap_or(&ANYTHING);
        let additional = self.index(index, Step::Keyword("additionalProperties"), additional);
        let by_name: HashMap<&str, Index> = named.iter().copied().collect();
        let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
        let part = &mut self.parts[index];
        for name in required.filter_map(Value::as_str) {
            match by_name.get(name) {
                Some(&property) => part.properties.push(property),
                // By which pattern is not for us to find out.
                None if patterns.is_empty() => part.properties.push(additional),
                None => {}
            }
        }
        part.properties_min = schema.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
        part.named = named.into_iter().map(|(_, property)| property).collect();
        part.unnamed = patterns.into_iter().map(|(_, property)| property).collect();
        part.unnamed.push(additional);
    }

    fn list(
        &mut self,
        within: Index,
        keyword: &'static str,
        list: Option<&'a Value>,
    ) -> Vec<Index> {
        let all = list.and_then(Value::as_array).into_iter().flatten().enumerate();
        all.map(|(at, schema)| self.index(within, Step::At(keyword, at), schema)).collect()
    }

    /// As the compiler finds it: names are taken as they stand.
    fn target(&self, reference: &str) -> Option<&'a Value> {
        let path = reference.strip_prefix('#')?;
        if path.is_empty() || path == "/" {
            return Some(self.root);
        }
        path.strip_prefix('/')?.split('/').try_fold(self.root, |value, name| match value {
            Value::Array(all) => all.get(name.parse::<usize>().ok()?),
            value => value.get(name),
        })
    }

    /// The fixpoint of all parts' types that is reached from these.
    fn settled(&self, types: Types) -> Vec<Types> {
        let mut of = vec![types; self.parts.len()];
        let mut users = vec![Vec::new(); self.parts.len()];
        for (user, part) in self.parts.iter().enumerate() {
            part.all().for_each(|used| users[used].push(user));
        }
        let mut changed: Vec<Index> = (0..self.parts.len()).collect();
        while let Some(index) = changed.pop() {
            let types = self.parts[index].types(&of);
            if types != of[index] {
                of[index] = types;
                changed.extend(&users[index]);
            }
        }
        of
    }

    /// The last reference on the way from the root, by what is missing, to where we have been.
    fn place_of_cycle(&self, finite: &[Types], any: &[Types], kind: Types) -> String {
        let mut place = ROOT;
        let mut been = vec![false; self.parts.len()];
        // A part that would have values of this type if there were endless ones.
        let (mut at, mut kind) = (ROOT, kind);
        while !been[at] {
            been[at] = true;
            let part = &self.parts[at];
            let lacks = |part: &&Index| any[**part].has(kind) && !finite[**part].has(kind);
            let in_place = (part.all_of.iter().find(lacks)).or_else(|| {
                let lists = part.one_of.iter();
                let missing = |list: &&Vec<Index>| list.iter().all(|&one| !finite[one].has(kind));
                lists.filter(missing).flatten().find(lacks)
            });
            if let Some(&target) = part.reference.iter().find(lacks) {
                (place, at) = (at, target);
            } else if let Some(&inner) = in_place {
                at = inner;
            } else {
                let held = match kind {
                    Types::ARRAY => &part.items,
                    _ => &part.properties,
                };
                let held = held.iter().chain(&part.named).chain(&part.unnamed);
                let endless = |&part: &Index| match finite[part] {
                    Types::NONE => Some((part, any[part].first()?)),
                    _ => None,
                };
                let Some(next) = held.copied().find_map(|part| endless(&part)) else { break };
                (at, kind) = next;
            }
        }
        one_line(&self.place(place))
    }

    fn place(&self, index: Index) -> String {
        let &Part { within, step, .. } = &self.parts[index];
        let place = || self.place(within);
        match step {
            Step::Reference(name) => name.to_owned(),
            Step::Keyword(keyword) => format!("{}/{keyword}", place()),
            Step::Name(keyword, name) => format!("{}/{keyword}/{name}", place()),
            Step::At(keyword, at) => format!("{}/{keyword}/{at}", place()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn said(schema: &Value) -> Option<String> {
        check_ends(schema).err().map(|error| match error {
            GrammarError::Endless { place } => place,
            other => panic!("{other}"),
        })
    }

    /// An object that needs `key`, which is this.
    fn needs(key: &str, what: Value) -> Value {
        json!({"type": "object", "properties": {key: what}, "required": [key]})
    }

    fn reference(name: &str) -> Value {
        json!({"$ref": format!("#/$defs/{name}")})
    }

    #[test]
    fn what_holds_another_of_itself_for_ever_is_refused_with_its_place() {
        let root = || json!({"$ref": "#"});
        let three = json!({"a": needs("b", reference("b")), "b": needs("c", reference("c")),
            "c": needs("a", reference("a"))});
        let list = |keywords: Value| {
            let mut schema = json!({"type": "array", "minItems": 1});
            schema.as_object_mut().unwrap().extend(keywords.as_object().unwrap().clone());
            schema
        };
        let object = |keywords: Value| {
            let mut schema = json!({"type": "object"});
            schema.as_object_mut().unwrap().extend(keywords.as_object().unwrap().clone());
            schema
        };
        for (schema, place) in [
            (root(), "#"),
            (needs("next", root()), "#/properties/next"),
            (needs("next", json!({"allOf": [root()]})), "#/properties/next/allOf/0"),
            (needs("next", json!({"anyOf": [root(), root()]})), "#/properties/next/anyOf/0"),
            (needs("next", json!({"oneOf": [root()], "type": ["object", "null"]})), "#/properties/next/oneOf/0"),
            (needs("next", needs("a/b", root())), "#/properties/next/properties/a/b"),
            (json!({"$ref": "#/$defs/a", "$defs": three}), "#/$defs/c/properties/a"),
            (needs("x", json!({"anyOf": [reference("a"), reference("b")]}))
                .as_object().map(|schema| {
                    let mut schema = schema.clone();
                    schema.insert("$defs".into(), json!({"a": needs("b", reference("b")), "b": needs("a", reference("a"))}));
                    schema.into()
                }).unwrap(), "#/$defs/b/properties/a"),
            (list(json!({"items": root()})), "#/items"),
            (list(json!({"prefixItems": [root()]})), "#/prefixItems/0"),
            (list(json!({"items": [{"type": "null"}, root()], "minItems": 2})), "#/items/1"),
            (
                list(json!({"prefixItems": [{"type": "null"}], "items": root(), "minItems": 2})),
                "#/items",
            ),
            (object(json!({"required": ["a"], "additionalProperties": root()})), "#/additionalProperties"),
            (object(json!({"minProperties": 1, "additionalProperties": root()})), "#/additionalProperties"),
            (
                object(json!({"minProperties": 2, "additionalProperties": false,
                    "properties": {"a": {"type": "null"}, "b": root(), "c": root()}})),
                "#/properties/b",
            ),
            (
                object(json!({"minProperties": 1, "patternProperties": {"^a": root()},
                    "additionalProperties": false})),
                "#/patternProperties/^a",
            ),
            // The finite branch is excluded by the type beside it.
            (
                needs("next", json!({"type": "object", "anyOf": [{"type": "null"}, root()]})),
                "#/properties/next/anyOf/1",
            ),
            (
                needs("next", json!({"enum": [{}], "anyOf": [{"const": null}, root()]})),
                "#/properties/next/anyOf/1",
            ),
        ] {
            assert_eq!(said(&schema).as_deref(), Some(place), "{schema}");
        }
    }

    #[test]
    fn what_a_finite_value_fits_is_taken() {
        let root = || json!({"$ref": "#"});
        let nothing = || json!({"type": "null"});
        for schema in [
            json!({}),
            json!({"type": "object", "properties": {"next": root()}}),
            needs("next", json!({"anyOf": [root(), nothing()]})),
            needs("next", json!({"oneOf": [nothing(), root()]})),
            needs("next", json!({"anyOf": [root(), {"enum": [1, "a"]}]})),
            needs("next", json!({"anyOf": [root(), {"const": {"next": 7}}]})),
            needs("children", json!({"type": "array", "items": root()})),
            needs("children", json!({"type": "array", "items": root(), "minItems": 0})),
            needs("children", json!({"type": "array", "items": root(), "maxItems": 3})),
            json!({"type": "array", "minItems": 1, "prefixItems": [nothing()], "items": root()}),
            json!({"type": "array", "minItems": 1, "items": [nothing(), root()]}),
            // Neither says how long a list is.
            json!({"items": root(), "minItems": 1}),
            json!({"properties": {"next": root()}, "required": ["next"]}),
            json!({"type": ["object", "string"], "properties": {"next": root()}, "required": ["next"]}),
            json!({"type": "object", "additionalProperties": root()}),
            json!({"type": "object", "additionalProperties": root(), "minProperties": 1,
                "properties": {"a": nothing()}}),
            json!({"type": "object", "additionalProperties": root(), "required": ["ab"],
                "patternProperties": {"^a": nothing()}}),
            json!({"$ref": "#/$defs/a", "$defs": {
                "a": needs("b", reference("b")),
                "b": needs("c", json!({"anyOf": [reference("a"), reference("c")]})),
                "c": needs("d", json!({"type": "array", "items": reference("a")})),
            }}),
            // Not used, or not needed.
            json!({"type": "string", "$defs": {"a": needs("a", reference("a"))}}),
            json!({"type": "object", "properties": {"a": reference("a")},
                "$defs": {"a": needs("a", reference("a"))}}),
            json!({"anyOf": [nothing(), reference("a")], "$defs": {"a": needs("a", reference("a"))}}),
            // What others do not define, or define by words that are not known here.
            needs("next", json!({"$ref": "https://example.com/node"})),
            needs("next", json!({"$ref": "#/$defs/none"})),
            needs("next", json!({"$dynamicRef": "#"})),
            json!({"$schema": "http://json-schema.org/draft-04/schema#", "type": "array",
                "minItems": 1, "prefixItems": [root()]}),
            // Nothing at all fits: that is another mistake.
            needs("next", json!(false)),
            needs("next", json!({"allOf": [nothing(), {"type": "string"}]})),
            json!({"type": [], "$ref": "#"}),
        ] {
            assert_eq!(said(&schema), None, "{schema}");
        }
    }

    #[test]
    fn a_long_way_round_is_found_in_bounded_time() {
        let count = 1500;
        // In an order that no single pass follows.
        let next = |at: usize| (at * 7 + 1) % count;
        let short = |at: usize| json!({"$ref": format!("#/$defs/{at}")});
        let circle = |end: Option<usize>| {
            let of = |at: usize| match Some(at) == end {
                true => json!({"type": "null"}),
                false => json!({"allOf": [short(next(at))]}),
            };
            let all: Map<String, Value> = (0..count).map(|at| (at.to_string(), of(at))).collect();
            json!({"$ref": "#/$defs/0", "$defs": all})
        };
        assert!(said(&circle(None)).is_some());
        let end = (0..700).fold(0, |at, _| next(at));
        assert_eq!(said(&circle(Some(end))), None);
    }

    #[test]
    fn the_place_is_cut_to_a_line() {
        let schema = needs(&"long\n".repeat(5000), json!({"$ref": "#"}));
        let place = said(&schema).unwrap();
        assert!(place.len() < 300 && !place.contains('\n'), "{place}");
    }

    /// Schemas over three definitions, and the values up to some depth that fit them.
    fn any_schema() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            3 => (0..3_usize).prop_map(|at| reference(&at.to_string())),
            1 => prop_oneof![Just(json!({"type": "null"})), Just(json!({"const": 1})), Just(json!({"enum": [[], {}]}))],
            1 => Just(json!({"type": "object"})),
        ];
        leaf.prop_recursive(3, 12, 3, |inner| {
            let several = || prop::collection::vec(inner.clone(), 1..3);
            prop_oneof![
                3 => (inner.clone(), prop::bool::ANY, 0..3_u64).prop_map(|(a, needed, least)| json!({
                    "type": "object", "properties": {"a": a}, "minProperties": least,
                    "required": if needed { vec!["a"] } else { vec![] },
                })),
                1 => (inner.clone(), 0..2_u64).prop_map(|(a, least)| json!({
                    "type": "object", "additionalProperties": a, "minProperties": least})),
                2 => (inner.clone(), 0..2_u64).prop_map(|(a, least)| json!({
                    "type": "array", "items": a, "minItems": least})),
                1 => (several(), 0..3_u64).prop_map(|(all, least)| json!({
                    "type": "array", "prefixItems": all, "minItems": least})),
                2 => several().prop_map(|all| json!({"anyOf": all})),
                1 => several().prop_map(|all| json!({"allOf": all})),
            ]
        })
    }

    fn fits(root: &Value, schema: &Value, value: &Value, steps: usize) -> bool {
        // A circle of references that no value leaves.
        let Some(steps) = steps.checked_sub(1) else { return false };
        let fits = |schema: &Value, value: &Value| fits(root, schema, value, steps);
        let list = |keyword: &str| schema[keyword].as_array().into_iter().flatten();
        let types = match (schema["type"].as_str(), value) {
            (None, _)
            | (Some("null"), Value::Null)
            | (Some("array"), Value::Array(_))
            | (Some("object"), Value::Object(_)) => true,
            (Some(_), _) => false,
        };
        let literal = schema.get("const").is_none_or(|constant| constant == value)
            && (schema.get("enum").is_none() || list("enum").any(|one| one == value));
        let target = schema["$ref"].as_str().map(|name| root.pointer(&name[1..]).unwrap());
        let held = match value {
            Value::Array(all) => {
                let first: Vec<&Value> = list("prefixItems").collect();
                all.len() as u64 >= schema["minItems"].as_u64().unwrap_or(0)
                    && all.iter().enumerate().all(|(at, value)| match first.get(at) {
                        Some(schema) => fits(schema, value),
                        None => schema.get("items").is_none_or(|schema| fits(schema, value)),
                    })
            }
            Value::Object(all) => {
                let of = |name: &String| match &schema["properties"][name] {
                    Value::Null => schema.get("additionalProperties"),
                    schema => Some(schema),
                };
                all.len() as u64 >= schema["minProperties"].as_u64().unwrap_or(0)
                    && list("required").all(|name| all.contains_key(name.as_str().unwrap()))
                    && all.iter().all(|(name, value)| of(name).is_none_or(|of| fits(of, value)))
            }
            _ => true,
        };
        types
            && literal
            && held
            && target.is_none_or(|target| fits(target, value))
            && list("allOf").all(|schema| fits(schema, value))
            && (schema.get("anyOf").is_none() || list("anyOf").any(|schema| fits(schema, value)))
    }

    fn any_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![Just(json!(null)), Just(json!(1)), Just(json!([])), Just(json!({}))];
        leaf.prop_recursive(3, 8, 2, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
                prop::collection::btree_map("[ab]", inner, 0..3)
                    .prop_map(|all| Value::Object(all.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn no_schema_that_some_value_fits_is_refused(
            definitions in prop::collection::vec(any_schema(), 3),
            values in prop::collection::vec(any_value(), 20),
        ) {
            let definitions: Map<String, Value> = (definitions.into_iter().enumerate())
                .map(|(at, schema)| (at.to_string(), schema))
                .collect();
            let root = json!({"$ref": "#/$defs/0", "$defs": definitions});
            if let Some(place) = said(&root) {
                for value in values {
                    prop_assert!(!fits(&root, &root, &value, 20), "{place} {root} {value}");
                }
            }
        }
    }
}
