//! The file of API keys. Error messages contain no value of the file except names and numbers,
//! because an operator may have pasted a key into the wrong field.

use std::{collections::BTreeSet, ops::RangeInclusive};

use telemetry::metrics::KEYS_MAX;
use toml::{Table, Value};

use super::limits::KeyLimits;

const NAME_CHARS_MAX: usize = 64;
const NAME_ALLOWED: &str = "1 to 64 letters, digits, '.', '_' and '-'";
const FIELDS: &str = "name, sha256, models, priority, weight, requests_per_minute, tokens_per_minute, streams_max, \
                      cache_group or gateway";
/// Largest `priority` and `weight`. Larger ratios of weights would starve the lighter key.
const PRIORITY_MAX: u32 = 9;
const WEIGHT_MAX: u32 = 100;

/// One `[[key]]` of the file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct KeyEntry {
    pub name: String,
    /// SHA-256 hash of the key's text.
    pub sha256: [u8; 32],
    /// Names and aliases of models; `None` is all models.
    pub models: Option<Vec<String>>,
    /// Keys of a higher priority come first; unset is 0.
    pub priority: Option<u32>,
    /// Share relative to other keys; unset is 1.
    pub weight: Option<u32>,
    pub limits: KeyLimits,
    /// Keys of one group share cached KV; `None`: the key shares cached KV with no other key.
    pub cache_group: Option<String>,
    /// Whether requests of the key name their tenants.
    pub gateway: bool,
}

/// Reads all entries; names and hashes are unique.
pub(super) fn parse(bytes: &[u8]) -> Result<Vec<KeyEntry>, String> {
    let text = std::str::from_utf8(bytes).map_err(|_| "not UTF-8; expected TOML".to_owned())?;
    let file: Table = text.parse().map_err(|error: toml::de::Error| {
        // The error's own text quotes the line.
        let before = error.span().and_then(|span| text.as_bytes().get(..span.start));
        let line = 1 + before.map_or(0, |text| text.iter().filter(|byte| **byte == b'\n').count());
        format!("line {line}: {}; expected TOML", error.message())
    })?;
    if let Some(other) = file.keys().find(|name| *name != "key") {
        return Err(format!("unknown section {}; expected [[key]]", shown(other)));
    }
    let entries = match file.get("key") {
        Some(Value::Array(entries)) if !entries.is_empty() => entries,
        _ => return Err("no keys; expected at least one [[key]]".to_owned()),
    };
    if entries.len() > KEYS_MAX {
        return Err(format!("{} keys; expected at most {KEYS_MAX}", entries.len()));
    }
    let (mut names, mut hashes) = (BTreeSet::new(), BTreeSet::new());
    let read = |(index, value): (usize, &Value)| {
        let entry = value
            .as_table()
            .ok_or_else(|| "not a table; expected [[key]]".to_owned())
            .and_then(read_entry)
            .map_err(|problem| {
                let name = value.get("name").and_then(Value::as_str).filter(|name| is_name(name));
                let number = || format!("number {}", index + 1);
                format!("key {}: {problem}", name.map_or_else(number, str::to_owned))
            })?;
        if !names.insert(entry.name.clone()) {
            return Err(format!("two keys have the name {}; expected unique names", entry.name));
        }
        if !hashes.insert(entry.sha256) {
            return Err(format!("key {}: another key has the same sha256", entry.name));
        }
        Ok(entry)
    };
    entries.iter().enumerate().map(read).collect()
}

fn read_entry(entry: &Table) -> Result<KeyEntry, String> {
    let known = |name: &str| FIELDS.split([',', ' ']).any(|field| field == name && name != "or");
    if let Some(other) = entry.keys().find(|name| !known(name)) {
        return Err(format!("unknown field {}; expected {FIELDS}", shown(other)));
    }
    let name = entry.get("name").and_then(Value::as_str).filter(|name| is_name(name));
    let sha256 = entry.get("sha256").and_then(Value::as_str).and_then(read_hash);
    let number = |field: &str, range: RangeInclusive<u32>| match entry.get(field) {
        None => Ok(None),
        Some(Value::Integer(number)) => match u32::try_from(*number) {
            Ok(number) if range.contains(&number) => Ok(Some(number)),
            _ => {
                let (min, max) = range.into_inner();
                Err(format!("invalid {field}: {number}; expected {min} to {max}"))
            }
        },
        Some(_) => Err(format!("invalid {field}; expected a whole number")),
    };
    let limit = |field: &str| number(field, 1..=u32::MAX);
    let models = match entry.get("models") {
        None => None,
        Some(models) => {
            let names = models.as_array().filter(|names| !names.is_empty());
            let names = names.and_then(|names| {
                names.iter().map(|name| name.as_str().map(str::to_owned)).collect::<Option<_>>()
            });
            Some(names.ok_or("invalid models; expected a list of at least one name of a model")?)
        }
    };
    let cache_group = match entry.get("cache_group") {
        None => None,
        Some(group) => {
            let group = group.as_str().filter(|group| is_name(group));
            Some(group.ok_or_else(|| format!("invalid cache_group; expected {NAME_ALLOWED}"))?)
        }
    };
    let gateway = match entry.get("gateway") {
        None => false,
        Some(gateway) => gateway.as_bool().ok_or("invalid gateway; expected true or false")?,
    };
    Ok(KeyEntry {
        name: name
            .ok_or_else(|| format!("name is missing or invalid; expected {NAME_ALLOWED}"))?
            .to_owned(),
        sha256: sha256
            .ok_or("sha256 is missing or invalid; expected 64 hexadecimal digits, as `baton keys new` prints them")?,
        models,
        priority: number("priority", 0..=PRIORITY_MAX)?,
        weight: number("weight", 1..=WEIGHT_MAX)?,
        limits: KeyLimits {
            requests_per_minute: limit("requests_per_minute")?,
            tokens_per_minute: limit("tokens_per_minute")?,
            streams_max: limit("streams_max")?,
        },
        cache_group: cache_group.map(str::to_owned),
        gateway,
    })
}

/// Returns whether the text is a valid name: it becomes the value of a label.
fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=NAME_CHARS_MAX).contains(&name.len()) && name.bytes().all(plain)
}

/// Returns the name of a field or section; `(hidden)` if it looks like a key.
fn shown(name: &str) -> &str {
    if name.len() <= 24 && is_name(name) { name } else { "(hidden)" }
}

fn read_hash(text: &str) -> Option<[u8; 32]> {
    let mut hash = [0; 32];
    if text.len() != 2 * hash.len() || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    for (byte, digits) in hash.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    #[test]
    fn every_field_is_read() {
        let text = format!(
            "[[key]]\nname = \"team-a\"\nsha256 = \"{HASH}\"\nmodels = [\"one\"]\n\
             priority = 2\nweight = 3\nrequests_per_minute = 60\ntokens_per_minute = 1000\nstreams_max = 4\n\
             cache_group = \"team\"\ngateway = true\n\
             [[key]]\nname = \"b\"\nsha256 = \"{}\"\n",
            HASH.replace("00", "FF")
        );
        let entries = parse(text.as_bytes()).unwrap();
        let limits = KeyLimits {
            requests_per_minute: Some(60),
            tokens_per_minute: Some(1000),
            streams_max: Some(4),
        };
        assert_eq!((entries[0].name.as_str(), entries[0].limits), ("team-a", limits));
        assert_eq!(entries[0].models, Some(vec!["one".to_owned()]));
        assert_eq!((entries[0].priority, entries[0].weight), (Some(2), Some(3)));
        assert_eq!((entries[1].priority, entries[1].weight), (None, None));
        assert_eq!((entries[0].cache_group.as_deref(), entries[0].gateway), (Some("team"), true));
        assert_eq!((entries[1].cache_group.as_deref(), entries[1].gateway), (None, false));
        assert_eq!(entries[0].sha256[..3], [0, 0x11, 0x22]);
        assert_eq!((entries[1].limits, entries[1].sha256[0]), (KeyLimits::default(), 0xff));
    }

    #[test]
    fn invalid_file_is_rejected_with_key_and_field_and_without_its_values() {
        let key = "baton-0123456789abcdef0123456789abcdef";
        let entry = |fields: &str| format!("[[key]]\nname = \"a\"\nsha256 = \"{HASH}\"\n{fields}");
        for (text, expected) in [
            (String::new(), "no keys; expected at least one [[key]]"),
            ("[[keys]]".into(), "unknown section keys; expected [[key]]"),
            ("[[key]]\n".repeat(10_001), "10001 keys; expected at most 10000"),
            ("key = 1".into(), "no keys"),
            ("key = [1]".into(), "key number 1: not a table"),
            (format!("\n\n{key}"), "line 3: "),
            (format!("[[key]]\nsha256 = \"{HASH}\""), "key number 1: name is missing or invalid"),
            (format!("[[key]]\nname = \"a b\"\nsha256 = \"{HASH}\""), "key number 1: name is"),
            ("[[key]]\nname = \"a\"".into(), "key a: sha256 is missing or invalid"),
            (format!("[[key]]\nname = \"a\"\nsha256 = \"{key}\""), "key a: sha256 is"),
            (entry(&format!("key = \"{key}\"")), "key a: unknown field key; expected name, sha256"),
            (entry(&format!("{key} = 1")), "key a: unknown field (hidden)"),
            (entry("streams_max = 0"), "key a: invalid streams_max: 0; expected 1 to 4294967295"),
            (
                entry("tokens_per_minute = 4294967296"),
                "key a: invalid tokens_per_minute: 4294967296",
            ),
            (
                entry(&format!("requests_per_minute = \"{key}\"")),
                "key a: invalid requests_per_minute; ",
            ),
            (entry("priority = 10"), "key a: invalid priority: 10; expected 0 to 9"),
            (entry("weight = 0"), "key a: invalid weight: 0; expected 1 to 100"),
            (entry("models = []"), "key a: invalid models; expected a list"),
            (entry("models = [1]"), "key a: invalid models"),
            (
                entry("cache_group = \"a/b\""),
                "key a: invalid cache_group; expected 1 to 64 letters",
            ),
            (entry("cache_group = 1"), "key a: invalid cache_group"),
            (entry("gateway = \"yes\""), "key a: invalid gateway; expected true or false"),
            (entry("") + &entry(""), "two keys have the name a"),
            (entry("") + &entry("").replace("\"a\"", "\"b\""), "key b: another key has the same"),
        ] {
            let error = parse(text.as_bytes()).unwrap_err();
            assert!(error.contains(expected), "{text}\n{error}");
            assert!(!error.contains(key) && !error.contains(HASH), "{error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
        assert!(parse(&[0xff]).unwrap_err().contains("not UTF-8"));
    }
}
