//! Filters and tests that behave as in Jinja2 where minijinja's differ or are missing.

use minijinja::{
    Environment, Error, ErrorKind, State, Value, filters,
    value::{Kwargs, Rest, StringInput, ValueKind, ValueOrKwargs},
};
use minijinja_contrib::filters as contrib;

use super::methods::{lines, method};

pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(method);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_test("callable", is_callable);
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
    environment.add_filter("indent", indent);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    for name in ["e", "escape", "forceescape"] {
        environment.add_filter(name, escape);
    }
    environment.add_filter("center", center);
    environment.add_filter("wordcount", word_count);
    environment.add_filter("striptags", contrib::striptags);
    environment.add_filter("sort", sort);
    environment.add_filter("dictsort", dictsort);
    environment.add_filter("unique", unique);
    environment.add_filter("truncate", truncate);
}

/// Arguments of a filter after its value.
pub(super) type Arguments = Rest<ValueOrKwargs>;

/// Returns a filter's arguments as named ones; `names` are those of its positions.
pub(super) fn named(names: &[&str], args: Arguments) -> Result<Kwargs, Error> {
    let mut args = args.into_values();
    let named = args.pop_if(|last| last.is_kwargs()).map(Kwargs::try_from).transpose()?;
    if args.len() > names.len() {
        return Err(ErrorKind::TooManyArguments.into());
    }
    let mut all: Vec<(&str, Value)> = names.iter().copied().zip(args).collect();
    for name in named.iter().flat_map(Kwargs::args) {
        let value = named.as_ref().map(|named| named.get(name)).transpose()?;
        all.extend(value.map(|value| (name, value)));
    }
    Ok(all.into_iter().collect())
}

/// Returns whether the value can be iterated over. Null cannot, an undefined value can.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Returns whether the value has a length and items, as strings and mappings have in Python. A
/// slice of a list is an iterable in minijinja.
fn is_sequence(value: &Value) -> bool {
    use ValueKind::{Iterable, Map, Seq, String};
    value.is_undefined() || matches!(value.kind(), Seq | Iterable | Map | String)
}

fn is_callable(value: &Value) -> bool {
    // An undefined value can be called in Jinja2, which then fails.
    value.is_undefined() || value.kind() == ValueKind::Plain
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

// minijinja's versions of the next filters take no argument by its position.

fn sort(state: &State<'_, '_>, value: Value, args: Arguments) -> Result<Value, Error> {
    filters::sort(state, value, named(&["reverse", "case_sensitive", "attribute"], args)?)
}

fn dictsort(value: &Value, args: Arguments) -> Result<Value, Error> {
    filters::dictsort(value, named(&["case_sensitive", "by", "reverse"], args)?)
}

fn unique(state: &State<'_, '_>, value: Value, args: Arguments) -> Result<Value, Error> {
    filters::unique(state, value, named(&["case_sensitive", "attribute"], args)?)
}

fn truncate(state: &mut State<'_, '_>, value: &Value, args: Arguments) -> Result<Value, Error> {
    contrib::truncate(state, value, named(&["length", "killwords", "end", "leeway"], args)?)
}

/// Implements `value|indent(width=4, first=false, blank=false)`.
fn indent(value: StringInput<'_>, args: Arguments) -> Result<String, Error> {
    let named = named(&["width", "first", "blank"], args)?;
    let indentation = match named.get::<Option<Value>>("width")? {
        None => padding("", 4, " ")?,
        Some(width) => match width.as_str() {
            Some(text) => text.to_owned(),
            None => padding("", usize::try_from(width)?, " ")?,
        },
    };
    let is_first_indented = named.get::<Option<bool>>("first")?.unwrap_or(false);
    let are_blank_indented = named.get::<Option<bool>>("blank")?.unwrap_or(false);
    named.assert_all_used()?;
    // A text that ends with a line end has a blank line after it.
    let text = format!("{}\n", value.as_str());
    let mut out = String::new();
    for (index, line) in lines(&text, false).into_iter().enumerate() {
        let is_indented = match index {
            0 => is_first_indented,
            _ => are_blank_indented || !line.is_empty(),
        };
        out.push_str(if index > 0 { "\n" } else { "" });
        out.push_str(if is_indented { &indentation } else { "" });
        out.push_str(line);
    }
    Ok(out)
}

/// Implements `value|int(default=0, base=10)`: the default where the value is no number.
fn int(state: &State<'_, '_>, value: &Value, args: Arguments) -> Result<Value, Error> {
    let named = named(&["default", "base"], args)?;
    let default: Option<Value> = named.get("default")?;
    let base = named.get("base")?;
    named.assert_all_used()?;
    let trimmed = value.as_str().map(|text| Value::from(text.trim()));
    let default = default.unwrap_or_else(|| Value::from(0));
    let value = trimmed.as_ref().unwrap_or(value);
    filters::int(state, value, Some(default), base, Kwargs::from_iter([("", Value::UNDEFINED); 0]))
}

/// Implements `value|float(default=0.0)`: the default where the value is no number.
fn float(state: &State<'_, '_>, value: &Value, args: Arguments) -> Result<Value, Error> {
    let named = named(&["default"], args)?;
    let default: Option<Value> = named.get("default")?;
    named.assert_all_used()?;
    let default = default.unwrap_or_else(|| Value::from(0.0));
    filters::float(state, value, Some(default), Kwargs::from_iter([("", Value::UNDEFINED); 0]))
}

/// Escapes a text for HTML.
fn escape(value: StringInput<'_>) -> String {
    let text = value.as_str().replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&#34;").replace('\'', "&#39;")
}

/// Implements `value|center(width=80)`.
fn center(state: &mut State<'_, '_>, value: &Value, width: Option<usize>) -> Result<Value, Error> {
    method(state, &Value::from(value.to_string()), "center", &[width.unwrap_or(80).into()])
}

/// Counts the words of a text.
fn word_count(value: StringInput<'_>) -> usize {
    let words = value.as_str().split(|c: char| !c.is_alphanumeric() && c != '_');
    words.filter(|word| !word.is_empty()).count()
}

/// Returns what a text lacks to have `width` characters.
pub(super) fn padding(text: &str, width: usize, fill: &str) -> Result<String, Error> {
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

pub(super) fn failed(reason: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}
