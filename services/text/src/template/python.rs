//! Filters, tests and methods that behave as in Jinja2 and Python where minijinja's differ or are
//! missing.

use minijinja::{
    Environment, Error, ErrorKind, State, Value, filters,
    value::{Kwargs, StringInput, Tuple, ValueKind, from_args},
};
use minijinja_contrib::pycompat;
use regex::{Captures, Regex};

pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(method);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    for name in ["length", "count"] {
        environment.add_filter(name, length);
    }
    environment.add_filter("first", first);
    environment.add_filter("last", last);
    environment.add_filter("items", items);
    for name in ["default", "d"] {
        environment.add_filter(name, default);
    }
    environment.add_filter("replace", replace);
}

/// Returns whether the value can be iterated over. Null cannot, an undefined value can.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Returns whether the value has a length and items, as strings and mappings have in Python.
fn is_sequence(value: &Value) -> bool {
    value.is_undefined()
        || matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
}

fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { filters::length(value) }
}

/// Returns the first item; undefined for an undefined value.
fn first(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() { Ok(Value::UNDEFINED) } else { filters::first(value) }
}

/// Returns the last item; undefined for an undefined value.
fn last(value: Value) -> Result<Value, Error> {
    if value.is_undefined() { Ok(Value::UNDEFINED) } else { filters::last(value) }
}

/// Returns the pairs of a mapping; none for an undefined value.
fn items(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() { Ok(Value::from_iter([(); 0])) } else { filters::items(value) }
}

/// Implements `value|default(default_value='', boolean=false)`.
fn default(
    value: &Value,
    other: Option<Value>,
    boolean: Option<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let other = other.map_or_else(|| named.get("default_value"), |other| Ok(Some(other)))?;
    let boolean = boolean.map_or_else(|| named.get("boolean"), |boolean| Ok(Some(boolean)))?;
    named.assert_all_used()?;
    let is_absent = value.is_undefined()
        || boolean.is_some_and(|boolean: Value| boolean.is_true()) && !value.is_true();
    Ok(if is_absent { other.unwrap_or_else(|| Value::from("")) } else { value.clone() })
}

/// Implements `value|replace(old, new, count=None)`.
fn replace(
    value: StringInput<'_>,
    old: StringInput<'_>,
    new: StringInput<'_>,
    count: Option<i64>,
    named: Kwargs,
) -> Result<String, Error> {
    let count = count.map_or_else(|| named.get::<Option<i64>>("count"), |count| Ok(Some(count)))?;
    named.assert_all_used()?;
    let (text, old, new) = (value.as_str(), old.as_str(), new.as_str());
    Ok(match count.and_then(|count| usize::try_from(count).ok()) {
        Some(count) => text.replacen(old, new, count),
        None => text.replace(old, new),
    })
}

/// Calls a method of Python's strings, lists and mappings.
fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let positional = positional(name, args)?;
    let args = positional.as_deref().unwrap_or(args);
    let own = match (value.as_str(), value.kind()) {
        (Some(text), _) => string_method(text, name, args)?,
        (None, ValueKind::Map | ValueKind::Seq) if name == "copy" => {
            let () = from_args(args)?;
            Some(value.clone())
        }
        (None, ValueKind::Seq) if name == "index" => {
            let (item,): (&Value,) = from_args(args)?;
            let index = value.try_iter()?.position(|other| other == *item);
            Some(
                index
                    .map(Value::from)
                    .ok_or_else(|| failed(format!("{item} is not in the list")))?,
            )
        }
        _ => None,
    };
    own.map_or_else(|| pycompat::unknown_method_callback(state, value, name, args), Ok)
}

/// Returns the arguments of a method with its named arguments in their positions; `None` without
/// named ones.
fn positional(method: &str, args: &[Value]) -> Result<Option<Vec<Value>>, Error> {
    let names: &[&str] = match method {
        "split" | "rsplit" => &["sep", "maxsplit"],
        "splitlines" => &["keepends"],
        _ => return Ok(None),
    };
    let Some((last, args)) = args.split_last().filter(|(last, _)| last.is_kwargs()) else {
        return Ok(None);
    };
    let named = Kwargs::try_from(last.clone())?;
    let mut positional = args.to_vec();
    for name in &names[args.len().min(names.len())..] {
        positional.push(named.get::<Option<Value>>(name)?.unwrap_or_else(|| Value::from(())));
    }
    named.assert_all_used()?;
    Ok(Some(positional))
}

/// Calls a method of strings that minijinja lacks; returns `None` for other methods.
fn string_method(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let affix = || from_args::<(&str,)>(args).map(|(affix,)| affix);
    let characters = |at: Option<usize>| {
        let at = at.ok_or_else(|| failed("substring not found".to_owned()))?;
        Ok::<_, Error>(Value::from(text[..at].chars().count()))
    };
    Ok(Some(match name {
        "rsplit" => rsplit(text, args)?,
        "partition" => {
            let separator = affix()?;
            let (before, after) = text.split_once(separator).unwrap_or((text, ""));
            let found = if text.contains(separator) { separator } else { "" };
            tuple([before, found, after])
        }
        "rpartition" => {
            let separator = affix()?;
            let (before, after) = text.rsplit_once(separator).unwrap_or(("", text));
            let found = if text.contains(separator) { separator } else { "" };
            tuple([before, found, after])
        }
        "removeprefix" => Value::from(text.strip_prefix(affix()?).unwrap_or(text)),
        "removesuffix" => Value::from(text.strip_suffix(affix()?).unwrap_or(text)),
        "index" => characters(text.find(affix()?))?,
        "rindex" => characters(text.rfind(affix()?))?,
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            let zeros = padding(text, width, "0")?;
            Value::from(format!("{sign}{zeros}{digits}"))
        }
        "ljust" | "rjust" => {
            let (width, fill): (usize, Option<&str>) = from_args(args)?;
            let fill = padding(text, width, fill.unwrap_or(" "))?;
            let (left, right) = if name == "ljust" { (text, &*fill) } else { (&*fill, text) };
            Value::from(format!("{left}{right}"))
        }
        _ => return Ok(None),
    }))
}

fn tuple(parts: [&str; 3]) -> Value {
    Value::from(Tuple::from(parts.map(Value::from)))
}

/// Returns what a text lacks to have `width` characters.
fn padding(text: &str, width: usize, fill: &str) -> Result<String, Error> {
    /// Columns of a padded text. A template must not allocate memory without steps.
    const WIDTH_MAX: usize = 10_000;
    if width > WIDTH_MAX {
        return Err(failed(format!("the width {width} is above {WIDTH_MAX}")));
    }
    if fill.chars().count() != 1 {
        return Err(failed("the fill is not one character".to_owned()));
    }
    Ok(fill.repeat(width.saturating_sub(text.chars().count())))
}

/// Implements `text.rsplit(sep=None, maxsplit=-1)`.
fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, limit): (Option<&str>, Option<i64>) = from_args(args)?;
    let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = match separator {
        Some("") => return Err(failed("empty separator".to_owned())),
        Some(separator) => text.rsplitn(limit.saturating_add(1), separator).collect(),
        None => {
            let (mut parts, mut rest) = (Vec::new(), text.trim_end());
            while !rest.is_empty() {
                let space = rest.rfind(char::is_whitespace).filter(|_| parts.len() < limit);
                let word_at =
                    space.map_or(0, |at| at + rest[at..].chars().next().map_or(0, char::len_utf8));
                parts.push(&rest[word_at..]);
                rest = rest[..word_at].trim_end();
            }
            parts
        }
    };
    parts.reverse();
    Ok(Value::from_iter(parts))
}

fn failed(reason: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// Replaces `'...' % value`, which minijinja does not know, by the filter `format`, within tags.
pub(super) fn with_percent_as_filter(source: &str) -> String {
    const STRING: &str = r#"'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*""#;
    const NAME: &str = "[A-Za-z_][A-Za-z_0-9]*";
    const SPACE: &str = r"[ \t\r\n]*";
    const GROUP: &str = r"\((?:[^()]|\([^()]*\))*\)";
    let tag = Regex::new(r"(?s)\{\{.*?\}\}|\{%.*?%\}").expect("the expression is constant");
    // A name with its attributes, items and calls, or a literal; and filters.
    let value = format!(
        r"(?:{NAME}(?:\.{NAME}|\[[^\]]*\]|{GROUP})*|[0-9][0-9.]*|{STRING}|\[[^\]]*\]|\{{[^}}]*\}})(?:{SPACE}\|{SPACE}{NAME}(?:{GROUP})?)*"
    );
    let operation = format!(r"(?s)({STRING}){SPACE}%{SPACE}(?:({GROUP})|({value}))");
    let operation = Regex::new(&operation).expect("the expression is constant");
    let replaced = tag.replace_all(source, |tag: &Captures<'_>| {
        let replaced = operation.replace_all(&tag[0], |found: &Captures<'_>| {
            let argument = |value: &str| format!("({}|format({value}))", &found[1]);
            match (found.get(2), found.get(3)) {
                (Some(tuple), _) => format!("({}|format{})", &found[1], tuple.as_str()),
                (None, value) => argument(value.map_or("", |value| value.as_str())),
            }
        });
        replaced.into_owned()
    });
    replaced.into_owned()
}
