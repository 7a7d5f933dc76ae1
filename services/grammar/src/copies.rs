//! Bound on the copies that llguidance makes of schemas.
//!
//! A `$ref` alone stays a reference. But llguidance copies the referenced schema where it
//! intersects the schema with another one: with keywords beside `$ref`, or with another part of
//! `allOf`. The copy includes the copies inside, so copies may multiply from definition to
//! definition. Schemas without references are copied, too: one part of an intersection for each
//! alternative of another part, `patternProperties` and `additionalProperties` for each property,
//! and `items` for each item of `prefixItems`. llguidance bounds its intersections, but not the
//! size of copies.
//!
//! [`copied_subschemas`] computes the size without a copy. It may count too many: if parts of an
//! intersection have a common property with a reference, or schemas for other names or items, it
//! counts the references in all of their properties as copied.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

use crate::{
    keywords::ANNOTATIONS,
    references::{children, referenced},
};

/// Keywords that llguidance intersects with the others.
const COMBINING: [&str; 6] = ["$ref", "allOf", "anyOf", "oneOf", "enum", "const"];

/// Subschemas that the comparison of two patterns counts as. llguidance compares all pairs of
/// patterns of an object, and of each intersection of objects, in 7 µs to 0.4 ms each; a copied
/// subschema takes 30 µs.
const PATTERN_PAIR_WEIGHT: usize = 2;

/// Values and references that are visited to find out what intersections copy: 10 ms.
const VISITS_MAX: usize = 100_000;

/// Returns the number of pairs of different patterns that llguidance may compare: the pairs of each
/// object. If it intersects schemas, it may merge objects. Then each object counts [all
/// pairs](pattern_pairs).
pub(crate) fn compared_pattern_pairs(root: &Value) -> usize {
    let (mut objects, mut pairs_in_objects, mut may_merge) = (0, 0, false);
    let mut to_visit = vec![root];
    while let Some(value) = to_visit.pop() {
        may_merge |= intersects(value);
        let patterns = pattern_count(value);
        objects += usize::from(patterns > 0);
        pairs_in_objects += pairs(patterns);
        to_visit.extend(children(value));
    }
    if may_merge { objects * pattern_pairs(root) } else { pairs_in_objects }
}

/// Returns the number of `patternProperties` directly in a schema.
fn pattern_count(schema: &Value) -> usize {
    schema.get("patternProperties").and_then(Value::as_object).map_or(0, Map::len)
}

/// Returns the number of pairs of different patterns in all `patternProperties`: objects that
/// llguidance merges have no more.
fn pattern_pairs(root: &Value) -> usize {
    let mut patterns = HashSet::new();
    let mut to_visit = vec![root];
    while let Some(value) = to_visit.pop() {
        if let Some(all) = value.get("patternProperties").and_then(Value::as_object) {
            patterns.extend(all.keys());
        }
        to_visit.extend(children(value));
    }
    pairs(patterns.len())
}

fn pairs(count: usize) -> usize {
    count * count.saturating_sub(1) / 2
}

/// Returns the number of subschemas in all copies.
pub(crate) fn copied_subschemas(root: &Value) -> usize {
    let mut sizes = SchemaSizes {
        root,
        subschema_count: subschemas_in(root),
        visits_left: VISITS_MAX,
        definitions: HashMap::new(),
        pattern_pairs: pattern_pairs(root),
        of_references: HashMap::new(),
    };
    let mut copied = 0_usize;
    let mut to_visit = vec![root];
    while let Some(value) = to_visit.pop() {
        if intersects(value) {
            let originals = if has_reference(value) { 0 } else { values_in(value) };
            let size = sizes.of(value, CopiedReferences::None).total();
            copied = copied.saturating_add(size.saturating_sub(originals));
        }
        to_visit.extend(children(value));
    }
    copied
}

/// References that an intersection copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum CopiedReferences {
    None,
    /// References that are parts of the intersection.
    Parts,
    /// References in properties and items of the parts, too.
    All,
}

/// Size of a schema with its copies.
#[derive(Clone, Copy, Debug)]
struct SchemaSize {
    /// Alternatives of `anyOf`, `oneOf` and `enum`.
    alternatives: usize,
    /// Subschemas in properties and items of all alternatives.
    nested: usize,
    /// Properties and `prefixItems` of all alternatives.
    names: usize,
    /// Subschemas that apply to other names of all alternatives: patterns, additional properties
    /// and items.
    unnamed: usize,
    /// Objects with `patternProperties`, in all alternatives and their subschemas.
    with_patterns: usize,
    /// Objects with `patternProperties` of several parts of an intersection.
    merged_patterns: usize,
    /// Alternatives with a copied reference that leads back to itself, or the most of a property or
    /// item.
    recursive: usize,
    /// Levels of properties and items.
    depth: usize,
}

impl SchemaSize {
    const ONE: Self = Self {
        alternatives: 1,
        nested: 0,
        names: 0,
        unnamed: 0,
        with_patterns: 0,
        merged_patterns: 0,
        recursive: 0,
        depth: 0,
    };

    fn total(self) -> usize {
        self.alternatives.saturating_add(self.nested)
    }

    /// Returns the size of the alternatives of both.
    fn or(self, other: Self) -> Self {
        Self {
            alternatives: self.alternatives.saturating_add(other.alternatives),
            nested: self.nested.saturating_add(other.nested),
            names: self.names.saturating_add(other.names),
            unnamed: self.unnamed.saturating_add(other.unnamed),
            with_patterns: self.with_patterns.saturating_add(other.with_patterns),
            merged_patterns: self.merged_patterns.saturating_add(other.merged_patterns),
            recursive: self.recursive.saturating_add(other.recursive),
            depth: self.depth.max(other.depth),
        }
    }

    /// Returns the size of this many equal alternatives.
    fn times(self, count: usize) -> Self {
        Self {
            alternatives: self.alternatives.saturating_mul(count),
            nested: self.nested.saturating_mul(count),
            names: self.names.saturating_mul(count),
            unnamed: self.unnamed.saturating_mul(count),
            with_patterns: self.with_patterns.saturating_mul(count),
            merged_patterns: self.merged_patterns.saturating_mul(count),
            recursive: self.recursive.saturating_mul(count),
            depth: self.depth,
        }
    }

    /// Returns the size of an intersection: each alternative is intersected with each one of
    /// `other`.
    fn intersected(self, other: Self) -> Self {
        let of_both = |part: fn(&Self) -> usize| {
            let of_self = part(&self).saturating_mul(other.alternatives);
            of_self.saturating_add(part(&other).saturating_mul(self.alternatives))
        };
        // Patterns may be merged if both have some.
        let merged = match self.with_patterns.min(other.with_patterns) {
            0 => 0,
            _ => {
                let of_self = self.with_patterns.saturating_mul(other.alternatives);
                of_self.min(other.with_patterns.saturating_mul(self.alternatives))
            }
        };
        // Subschemas for unnamed properties and items of one schema are copied for each name of the
        // other one.
        let for_names = self.names.saturating_mul(other.unnamed);
        let for_names = for_names.saturating_add(other.names.saturating_mul(self.unnamed));
        Self {
            alternatives: self.alternatives.saturating_mul(other.alternatives),
            nested: of_both(|size| size.nested).saturating_add(for_names),
            names: of_both(|size| size.names),
            unnamed: of_both(|size| size.unnamed),
            with_patterns: of_both(|size| size.with_patterns),
            merged_patterns: of_both(|size| size.merged_patterns).saturating_add(merged),
            recursive: of_both(|size| size.recursive),
            depth: self.depth.max(other.depth),
        }
    }
}

/// A part of a schema that llguidance intersects with the other parts.
#[derive(Clone, Copy)]
enum SchemaPart<'a> {
    Reference(&'a str),
    /// An element of `allOf`.
    Schema(&'a Value),
    /// `anyOf` or `oneOf`.
    Union(&'a [Value]),
    /// Values of `enum`.
    Values(&'a [Value]),
    /// All other keywords.
    Keywords(&'a Map<String, Value>),
}

impl<'a> SchemaPart<'a> {
    fn of(keywords: &'a Map<String, Value>) -> Vec<Self> {
        let mut parts = Vec::new();
        let mut has_other_keywords = false;
        for (keyword, value) in keywords {
            match (keyword.as_str(), value) {
                ("$ref", Value::String(reference)) => parts.push(Self::Reference(reference)),
                ("allOf", Value::Array(all)) => parts.extend(all.iter().map(Self::Schema)),
                ("anyOf" | "oneOf", Value::Array(all)) => parts.push(Self::Union(all)),
                ("enum", Value::Array(all)) => parts.push(Self::Values(all)),
                ("const", value) => parts.push(Self::Values(std::slice::from_ref(value))),
                (keyword, _) => has_other_keywords |= !ANNOTATIONS.contains(&keyword),
            }
        }
        if has_other_keywords {
            parts.push(Self::Keywords(keywords));
        }
        parts
    }

    /// Returns the reference of a part that is nothing else.
    fn reference(self) -> Option<&'a str> {
        match self {
            Self::Reference(reference) => Some(reference),
            Self::Schema(Value::Object(keywords)) if keywords.len() == 1 => {
                keywords.get("$ref")?.as_str()
            }
            _ => None,
        }
    }
}

/// Sizes of schemas in a document.
struct SchemaSizes<'a> {
    root: &'a Value,
    /// Number of subschemas in the document.
    subschema_count: usize,
    /// Values that [`SchemaSizes::may_copy_nested`] and [`SchemaSizes::reached`] may still visit.
    visits_left: usize,
    /// Size of each definition, and the references in it.
    definitions: HashMap<&'a str, (usize, Vec<&'a str>)>,
    /// Number of pairs of patterns in the document.
    pattern_pairs: usize,
    /// `None` while the size is computed.
    of_references: HashMap<(&'a str, CopiedReferences), Option<SchemaSize>>,
}

impl<'a> SchemaSizes<'a> {
    fn of(&mut self, schema: &'a Value, copied: CopiedReferences) -> SchemaSize {
        let Value::Object(keywords) = schema else { return SchemaSize::ONE };
        let parts = SchemaPart::of(keywords);
        match parts[..] {
            [] => return SchemaSize::ONE,
            [part] => return self.of_part(part, copied),
            _ => {}
        }
        let copied = copied.max(CopiedReferences::Parts);
        let mut sizes = self.of_parts(&parts, copied);
        if copied == CopiedReferences::Parts
            && sizes.iter().filter(|size| size.nested > 0).count() > 1
            && self.may_copy_nested(&parts)
        {
            sizes = self.of_parts(&parts, CopiedReferences::All);
        }
        let mut references = Vec::new();
        for (part, size) in parts.iter().zip(&mut sizes) {
            // Two copies of one object are merged into one.
            if let Some(reference) = part.reference() {
                if references.contains(&reference) {
                    size.nested = 0;
                }
                references.push(reference);
            }
        }
        // A recursive part is copied along all subschemas of the other parts, which are finite:
        // llguidance rejects intersections of recursive parts only.
        let (mut along, mut recursive, mut depth) = (1_usize, 1_usize, 0);
        for size in &sizes {
            if size.recursive == 0 {
                along = along.saturating_mul(size.total());
                depth = depth.max(size.depth);
            } else {
                recursive = recursive.saturating_mul(size.recursive);
            }
        }
        // Its alternatives multiply from level to level.
        let levels = depth.saturating_sub(1).min(64) as u32;
        along = along.saturating_mul(recursive.saturating_pow(levels));
        let mut whole = sizes.iter().copied().fold(SchemaSize::ONE, SchemaSize::intersected);
        let compared = whole.merged_patterns.saturating_mul(self.pattern_pairs);
        let compared = compared.saturating_mul(PATTERN_PAIR_WEIGHT);
        whole = SchemaSize {
            nested: whole.nested.saturating_add(compared),
            merged_patterns: 0,
            ..whole
        };
        if whole.recursive > 0 {
            whole.nested = whole.nested.max(along.saturating_mul(self.reached(&parts)));
        }
        whole
    }

    /// Returns whether an intersection of these parts may copy references in their properties and
    /// items: if two parts have a property of the same name and one of them has a reference in it,
    /// or if a part has a schema for other names or for items. After [`VISITS_MAX`] it may.
    fn may_copy_nested(&mut self, parts: &[SchemaPart<'a>]) -> bool {
        let mut properties = HashMap::<&str, Vec<(usize, &Value)>>::new();
        for (index, part) in parts.iter().enumerate() {
            let (mut to_visit, mut seen) = (vec![*part], HashSet::new());
            while let Some(part) = to_visit.pop()
                && self.visits_left > 0
            {
                self.visits_left -= 1;
                match part {
                    SchemaPart::Reference(reference) => {
                        if seen.insert(reference) {
                            to_visit
                                .extend(referenced(self.root, reference).map(SchemaPart::Schema));
                        }
                    }
                    SchemaPart::Schema(Value::Object(keywords)) => {
                        self.visits_left = self.visits_left.saturating_sub(keywords.len());
                        to_visit.extend(SchemaPart::of(keywords));
                    }
                    SchemaPart::Schema(_) => {}
                    SchemaPart::Union(all) => to_visit.extend(all.iter().map(SchemaPart::Schema)),
                    SchemaPart::Values(all) => {
                        if all.iter().any(|value| children(value).next().is_some()) {
                            return true;
                        }
                    }
                    SchemaPart::Keywords(keywords) => {
                        let own = keywords.get("properties").and_then(Value::as_object);
                        let own_count = own.map_or(0, Map::len);
                        if nested(keywords).len() > own_count {
                            return true;
                        }
                        self.visits_left = self.visits_left.saturating_sub(own_count);
                        for (name, schema) in own.into_iter().flatten() {
                            properties.entry(name).or_default().push((index, schema));
                        }
                    }
                }
            }
        }
        let mut references = Vec::new();
        for schemas in properties.values() {
            if schemas.iter().any(|(index, _)| *index != schemas[0].0) {
                schemas.iter().for_each(|(_, schema)| self.add_references(schema, &mut references));
            }
        }
        !references.is_empty() || self.visits_left == 0
    }

    /// Returns the number of subschemas in the definitions to which references in these parts lead.
    /// After [`VISITS_MAX`] it is the number in the document.
    fn reached(&mut self, parts: &[SchemaPart<'a>]) -> usize {
        let mut references = Vec::new();
        for part in parts {
            match *part {
                SchemaPart::Reference(reference) => references.push(reference),
                SchemaPart::Schema(schema) => self.add_references(schema, &mut references),
                SchemaPart::Union(all) => {
                    all.iter().for_each(|schema| self.add_references(schema, &mut references));
                }
                SchemaPart::Values(_) => {}
                SchemaPart::Keywords(keywords) => {
                    for (schema, _) in nested(keywords) {
                        self.add_references(schema, &mut references);
                    }
                }
            }
        }
        let (mut seen, mut count) = (HashSet::new(), 0_usize);
        while let Some(reference) = references.pop()
            && self.visits_left > 0
        {
            self.visits_left -= 1;
            if !seen.insert(reference) {
                continue;
            }
            if !self.definitions.contains_key(reference) {
                let mut inside = Vec::new();
                let size = referenced(self.root, reference).map_or(0, |schema| {
                    self.add_references(schema, &mut inside);
                    1 + subschemas_in(schema)
                });
                self.definitions.insert(reference, (size, inside));
            }
            let (size, inside) = &self.definitions[reference];
            count = count.saturating_add(*size);
            references.extend(inside);
        }
        if self.visits_left == 0 { self.subschema_count } else { count.min(self.subschema_count) }
    }

    /// Adds the references in a schema, until no visits are left.
    fn add_references(&mut self, schema: &'a Value, references: &mut Vec<&'a str>) {
        let mut to_visit = vec![schema];
        while let Some(value) = to_visit.pop()
            && self.visits_left > 0
        {
            self.visits_left -= 1;
            references.extend(value.get("$ref").and_then(Value::as_str));
            to_visit.extend(children(value));
        }
    }

    fn of_parts(&mut self, parts: &[SchemaPart<'a>], copied: CopiedReferences) -> Vec<SchemaSize> {
        parts.iter().map(|part| self.of_part(*part, copied)).collect()
    }

    fn of_part(&mut self, part: SchemaPart<'a>, copied: CopiedReferences) -> SchemaSize {
        match part {
            SchemaPart::Reference(_) if copied == CopiedReferences::None => SchemaSize::ONE,
            SchemaPart::Reference(reference) => self.of_reference(reference, copied),
            SchemaPart::Schema(schema) => self.of(schema, copied),
            SchemaPart::Values(all) => SchemaSize {
                alternatives: all.len().max(1),
                nested: all.iter().map(|value| values_in(value) - 1).sum(),
                names: all.iter().map(|value| children(value).count()).sum(),
                depth: all.iter().map(levels_in).max().unwrap_or(0),
                ..SchemaSize::ONE
            },
            SchemaPart::Union(all) => {
                let mut union = SchemaSize { alternatives: 0, ..SchemaSize::ONE };
                for schema in all {
                    union = union.or(self.of(schema, copied));
                }
                SchemaSize { alternatives: union.alternatives.max(1), ..union }
            }
            SchemaPart::Keywords(keywords) => {
                let copies_nested =
                    copied == CopiedReferences::All || intersects_properties(keywords);
                let copied =
                    if copies_nested { CopiedReferences::All } else { CopiedReferences::None };
                let mut size = SchemaSize::ONE;
                for (schema, is_named) in nested(keywords) {
                    let size_of_one = self.of(schema, copied);
                    let total = size_of_one.total();
                    size.recursive = size.recursive.max(size_of_one.recursive);
                    size.depth = size.depth.max(1 + size_of_one.depth);
                    size.nested = size.nested.saturating_add(total);
                    size.with_patterns =
                        size.with_patterns.saturating_add(size_of_one.with_patterns);
                    match is_named {
                        true => size.names += 1,
                        false => size.unnamed = size.unnamed.saturating_add(total),
                    }
                }
                if intersects_properties(keywords) {
                    size.nested =
                        size.nested.saturating_add(size.names.saturating_mul(size.unnamed));
                }
                // llguidance copies the unnamed subschemas of other parts for each pattern.
                let patterns = keywords.get("patternProperties").and_then(Value::as_object);
                if let Some(patterns) = patterns.filter(|patterns| !patterns.is_empty()) {
                    size.names = size.names.saturating_add(patterns.len());
                    let pairs = pairs(patterns.len()).saturating_mul(PATTERN_PAIR_WEIGHT);
                    size.nested = size.nested.saturating_add(pairs);
                    size.with_patterns = size.with_patterns.saturating_add(1);
                }
                size.times(alternatives_of_types(keywords))
            }
        }
    }

    fn of_reference(&mut self, reference: &'a str, copied: CopiedReferences) -> SchemaSize {
        let key = (reference, copied);
        if let Some(size) = self.of_references.get(&key) {
            return size.unwrap_or(SchemaSize {
                recursive: usize::from(copied == CopiedReferences::All),
                ..SchemaSize::ONE
            });
        }
        self.of_references.insert(key, None);
        let size = match referenced(self.root, reference) {
            Some(schema) => self.of(schema, copied),
            None => SchemaSize::ONE,
        };
        self.of_references.insert(key, Some(size));
        size
    }
}

/// Returns whether llguidance intersects parts of this schema.
fn intersects(schema: &Value) -> bool {
    let Value::Object(keywords) = schema else { return false };
    SchemaPart::of(keywords).len() > 1
        || intersects_properties(keywords)
        || alternatives_of_types(keywords) > 1
}

/// Returns the number of alternatives that the keywords outside of [`COMBINING`] allow for one
/// type. llguidance makes an alternative for each entry of `type`, even if it repeats another one.
/// It intersects alternatives of all entries for the keywords before, between and after those of
/// [`COMBINING`].
fn alternatives_of_types(keywords: &Map<String, Value>) -> usize {
    let mut counts = HashMap::new();
    for name in keywords.get("type").and_then(Value::as_array).into_iter().flatten() {
        *counts.entry(name.as_str()).or_insert(0_usize) += 1;
    }
    let repeated = counts.into_values().max().unwrap_or(1);
    let combining = keywords.keys().filter(|keyword| COMBINING.contains(&keyword.as_str())).count();
    repeated.saturating_pow(1 + combining as u32)
}

/// Returns whether llguidance intersects properties with pattern properties.
fn intersects_properties(keywords: &Map<String, Value>) -> bool {
    keywords.contains_key("properties") && keywords.contains_key("patternProperties")
}

pub(crate) fn has_reference(value: &Value) -> bool {
    value.get("$ref").is_some() || children(value).any(has_reference)
}

/// Returns the number of values in a value, itself included.
fn values_in(value: &Value) -> usize {
    1 + children(value).map(values_in).sum::<usize>()
}

/// Returns the number of levels below a value.
fn levels_in(value: &Value) -> usize {
    children(value).map(|child| 1 + levels_in(child)).max().unwrap_or(0)
}

/// Returns the number of subschemas and values in a schema.
fn subschemas_in(schema: &Value) -> usize {
    let of_member = |(keyword, value): (&String, &Value)| match keyword.as_str() {
        "const" | "enum" => values_in(value),
        _ => usize::from(value.is_object()) + subschemas_in(value),
    };
    match schema {
        Value::Array(all) => all.iter().map(|one| 1 + subschemas_in(one)).sum(),
        Value::Object(keywords) => keywords.iter().map(of_member).sum(),
        _ => 0,
    }
}

/// Returns the schemas of properties and items, each with whether its property or item is named.
fn nested(keywords: &Map<String, Value>) -> Vec<(&Value, bool)> {
    let mut all = Vec::new();
    for (keyword, value) in keywords {
        match (keyword.as_str(), value) {
            ("properties", Value::Object(schemas)) => {
                all.extend(schemas.values().map(|schema| (schema, true)));
            }
            ("patternProperties", Value::Object(schemas)) => {
                all.extend(schemas.values().map(|schema| (schema, false)));
            }
            ("items" | "prefixItems", Value::Array(schemas)) => {
                all.extend(schemas.iter().map(|schema| (schema, true)));
            }
            ("items" | "additionalItems" | "additionalProperties", Value::Object(_)) => {
                all.push((value, false));
            }
            _ => {}
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns the copies in a schema with a definition `A` of two properties, one of which refers
    /// to `B`.
    fn copies(schema: Value) -> usize {
        let text = json!({"type": "string"});
        copied_subschemas(&json!({"properties": {"it": schema}, "$defs": {
            "A": {"type": "object", "properties": {"a": text, "b": {"$ref": "#/$defs/B"}}},
            "B": {"type": "object", "properties": {"a": text, "b": text, "c": text}},
            "Many": {"anyOf": [text, text, text]},
        }}))
    }

    #[test]
    fn references_that_stay_references_are_no_copies() {
        let a = json!({"$ref": "#/$defs/A"});
        for schema in [
            a.clone(),
            json!({"$ref": "#/$defs/A", "description": "it", "default": {"a": "x"}}),
            json!({"allOf": [a], "title": "It"}),
            json!({"anyOf": [a, {"type": "null"}], "default": null}),
            json!({"type": "array", "items": a}),
            json!({"type": "object", "allOf": [{"required": ["a"]}]}),
        ] {
            assert_eq!(copies(schema.clone()), 0, "{schema}");
        }
    }

    #[test]
    fn intersected_references_are_copies_of_their_schemas() {
        let (a, b) = (json!({"$ref": "#/$defs/A"}), json!({"$ref": "#/$defs/B"}));
        for (schema, count) in [
            (json!({"$ref": "#/$defs/A", "required": ["a"]}), 3),
            (json!({"allOf": [a, {"required": ["a"]}]}), 3),
            (json!({"type": "object", "anyOf": [a, b]}), 7),
            (json!({"allOf": [b, b]}), 4),
            (json!({"allOf": [b, {"$ref": "#/$defs/Many"}]}), 12),
            // `B` in `A` stays a reference.
            (json!({"allOf": [a, {"properties": {"c": {"type": "null"}}}]}), 4),
            // The property `b` of `A` is intersected, so `B` is copied, too.
            (json!({"allOf": [a, {"properties": {"b": {"type": "null"}}}]}), 7),
            (json!({"allOf": [a, {"additionalProperties": {"type": "null"}}]}), 9),
            (json!({"properties": {"a": b}, "patternProperties": {"^a": {"type": "null"}}}), 7),
        ] {
            assert_eq!(copies(schema.clone()), count, "{schema}");
        }
    }
}
