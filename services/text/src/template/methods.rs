//! Methods of Python's strings and lists that minijinja lacks, or has with fewer arguments.

use minijinja::{
    Error, State, Value,
    value::{Kwargs, Tuple, ValueKind, from_args},
};
use minijinja_contrib::pycompat;

use super::python::{failed, padding};

/// Calls a method of Python's strings, lists and mappings.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let positional = positional(name, args)?;
    let args = positional.as_deref().unwrap_or(args);
    let own = match (value.as_str(), value.kind()) {
        (Some(text), _) => match (name, args) {
            (_, [_, _, ..]) if SEARCHES.contains(&name) => Some(search(state, text, name, args)?),
            _ => string_method(text, name, args)?,
        },
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

/// Methods with the arguments `start` and `end`: the part of the text that they search.
const SEARCHES: [&str; 7] = ["startswith", "endswith", "find", "rfind", "index", "rindex", "count"];

/// Calls a method of [`SEARCHES`] on a part of the text.
fn search(
    state: &mut State<'_, '_>,
    text: &str,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let (what, start, end): (Value, Option<i64>, Option<i64>) = from_args(args)?;
    let length = text.chars().count();
    let position = |at: i64| match usize::try_from(at) {
        Ok(at) => at.min(length),
        Err(_) => length.saturating_add_signed(at as isize),
    };
    let start = position(start.unwrap_or(0));
    let end = end.map_or(length, position);
    let part: String = text.chars().skip(start).take(end.saturating_sub(start)).collect();
    let found = method(state, &Value::from(part), name, &[what])?;
    // Positions count from the beginning of the whole text; -1 is no position.
    match (name, i64::try_from(found.clone())) {
        ("find" | "rfind" | "index" | "rindex", Ok(at @ 0..)) => Ok(Value::from(at + start as i64)),
        _ => Ok(found),
    }
}

/// Calls a method of strings; returns `None` for methods that minijinja has.
fn string_method(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let affix = || from_args::<(&str,)>(args).map(|(affix,)| affix);
    let characters = |at: Option<usize>| {
        let at = at.ok_or_else(|| failed("substring not found".to_owned()))?;
        Ok::<_, Error>(Value::from(text[..at].chars().count()))
    };
    let all = |is: fn(char) -> bool| -> Result<Value, Error> {
        let () = from_args(args)?;
        Ok(Value::from(!text.is_empty() && text.chars().all(is)))
    };
    let changed = |change: fn(&str) -> String| -> Result<Value, Error> {
        let () = from_args(args)?;
        Ok(Value::from(change(text)))
    };
    Ok(Some(match name {
        "rsplit" => rsplit(text, args)?,
        "splitlines" => {
            let (keeps_ends,): (Option<bool>,) = from_args(args)?;
            Value::from_iter(lines(text, keeps_ends.unwrap_or(false)))
        }
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
        "title" => changed(title)?,
        "swapcase" => changed(swapcase)?,
        "casefold" => changed(|text| text.to_lowercase().replace('ß', "ss"))?,
        "isdigit" | "isdecimal" => all(|c| c.is_ascii_digit())?,
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
        "center" => {
            let (width, fill): (usize, Option<&str>) = from_args(args)?;
            let fill: Vec<char> = padding(text, width, fill.unwrap_or(" "))?.chars().collect();
            // As in Python, the left side of an odd padding is longer if the width is odd.
            let left = fill.len() / 2 + (fill.len() & width & 1);
            let side = |part: &[char]| part.iter().collect::<String>();
            Value::from(format!("{}{text}{}", side(&fill[..left]), side(&fill[left..])))
        }
        _ => return Ok(None),
    }))
}

fn tuple(parts: [&str; 3]) -> Value {
    Value::from(Tuple::from(parts.map(Value::from)))
}

/// Changes the case of each letter: a letter after another letter is small.
fn title(text: &str) -> String {
    let mut is_within = false;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match is_within {
            true => out.extend(c.to_lowercase()),
            false => out.extend(c.to_uppercase()),
        }
        is_within = c.is_alphabetic();
    }
    out
}

fn swapcase(text: &str) -> String {
    let swapped = |c: char| -> String {
        if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
    };
    text.chars().map(swapped).collect()
}

/// Splits a text at the line ends that Python's `splitlines` knows.
pub(super) fn lines(text: &str, keeps_ends: bool) -> Vec<&str> {
    let is_end = |c: char| matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(is_end) {
        let end = &rest[at..];
        let end_bytes =
            if end.starts_with("\r\n") { 2 } else { end.chars().next().map_or(0, char::len_utf8) };
        lines.push(&rest[..if keeps_ends { at + end_bytes } else { at }]);
        rest = &rest[at + end_bytes..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
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
