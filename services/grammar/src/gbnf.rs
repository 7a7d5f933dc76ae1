//! Translates GBNF, the grammar notation of llama.cpp, to Lark.
//!
//! The lexer of a Lark grammar takes the longest lexeme and never reconsiders, while GBNF has no
//! lexer. So every rule and every part of a rule that does not recurse becomes one lexeme: a
//! regular expression, which matches exactly what the rule matches. Only rules that recurse become
//! rules of Lark.

use std::{collections::HashMap, fmt::Write as _, iter::Peekable, str::CharIndices};

/// Nesting depth of groups.
const DEPTH_MAX: usize = 24;
/// Upper bound of `{n}`. Larger counts exceed the compiler's bounds.
const REPEATS_MAX: u32 = 10_000;

/// Returns whether the text is GBNF rather than Lark: `::=` defines a rule of GBNF only.
pub(crate) fn is_gbnf(text: &str) -> bool {
    text.contains("::=")
}

/// Returns the Lark grammar of a GBNF grammar, or why there is none.
pub(crate) fn to_lark(text: &str) -> Result<String, String> {
    let rules = Parser::new(text).rules()?;
    let root = rules.index.get("root").copied().filter(|root| rules.bodies[*root].is_some());
    let root = root.ok_or("the rule root is missing")?;
    let mut bodies = Vec::with_capacity(rules.bodies.len());
    for (name, body) in rules.names.iter().zip(rules.bodies) {
        bodies.push(body.ok_or_else(|| format!("the rule {name} is missing"))?);
    }
    let is_regular = regular_rules(&bodies);
    let mut writer = LarkWriter { is_regular: &is_regular, lark: String::new(), terminals: 0 };
    for (index, body) in bodies.iter().enumerate() {
        let text = match is_regular[index] {
            true => format!("R{index}: {}\n", writer.terminal(body)),
            false => format!("r{index}: {}\n", writer.rule(body)),
        };
        writer.lark.push_str(&text);
    }
    let letter = if is_regular[root] { 'R' } else { 'r' };
    Ok(format!("start: {letter}{root}\n{}", writer.lark))
}

#[derive(Debug)]
enum Expression {
    /// A regular expression of characters.
    Characters(String),
    /// Index of a rule.
    Rule(usize),
    Sequence(Vec<Expression>),
    Choice(Vec<Expression>),
    /// Minimum and maximum number of repetitions.
    Repeated(Box<Expression>, u32, Option<u32>),
}

impl Expression {
    /// Returns whether the expression refers to no rule that recurses.
    fn is_regular(&self, rules: &[bool]) -> bool {
        match self {
            Self::Characters(_) => true,
            Self::Rule(index) => rules[*index],
            Self::Sequence(parts) | Self::Choice(parts) => {
                parts.iter().all(|part| part.is_regular(rules))
            }
            Self::Repeated(part, ..) => part.is_regular(rules),
        }
    }
}

/// Returns for each rule whether it neither recurses nor refers to a rule that does.
fn regular_rules(bodies: &[Expression]) -> Vec<bool> {
    let mut is_regular = vec![false; bodies.len()];
    loop {
        let found = (0..bodies.len())
            .filter(|&rule| !is_regular[rule] && bodies[rule].is_regular(&is_regular))
            .collect::<Vec<_>>();
        if found.is_empty() {
            return is_regular;
        }
        found.into_iter().for_each(|rule| is_regular[rule] = true);
    }
}

struct LarkWriter<'a> {
    is_regular: &'a [bool],
    lark: String,
    terminals: usize,
}

impl LarkWriter<'_> {
    /// Returns the body of a rule. Its regular parts become terminals.
    fn rule(&mut self, expression: &Expression) -> String {
        if expression.is_regular(self.is_regular) {
            return self.named_terminal(std::slice::from_ref(expression));
        }
        match expression {
            Expression::Characters(_) => unreachable!("characters are regular"),
            Expression::Rule(index) => format!("r{index}"),
            Expression::Sequence(parts) => {
                let mut text = Vec::new();
                // Neighbours that are regular become one lexeme.
                let is_regular = |part: &Expression| part.is_regular(self.is_regular);
                let runs: Vec<_> = parts.chunk_by(|a, b| is_regular(a) && is_regular(b)).collect();
                for run in runs {
                    text.push(match run {
                        [one] => self.rule(one),
                        all => self.named_terminal(all),
                    });
                }
                format!("({})", text.join(" "))
            }
            Expression::Choice(parts) => {
                let parts: Vec<_> = parts.iter().map(|part| self.rule(part)).collect();
                format!("({})", parts.join(" | "))
            }
            Expression::Repeated(part, min, max) => repeated(&self.rule(part), *min, *max),
        }
    }

    /// Defines a terminal for a sequence and returns its name.
    fn named_terminal(&mut self, sequence: &[Expression]) -> String {
        let name = format!("T{}", self.terminals);
        self.terminals += 1;
        let parts: Vec<_> = sequence.iter().map(|part| self.terminal(part)).collect();
        writeln!(self.lark, "{name}: {}", parts.join(" "))
            .expect("writing to a String cannot fail");
        name
    }

    fn terminal(&self, expression: &Expression) -> String {
        let all = |parts: &[Expression], between: &str| {
            let parts: Vec<_> = parts.iter().map(|part| self.terminal(part)).collect();
            format!("({})", parts.join(between))
        };
        match expression {
            Expression::Characters(regex) => format!("/{regex}/"),
            Expression::Rule(index) => format!("R{index}"),
            Expression::Sequence(parts) if parts.is_empty() => "\"\"".to_owned(),
            Expression::Sequence(parts) => all(parts, " "),
            Expression::Choice(parts) => all(parts, " | "),
            Expression::Repeated(part, min, max) => repeated(&self.terminal(part), *min, *max),
        }
    }
}

fn repeated(text: &str, min: u32, max: Option<u32>) -> String {
    match (min, max) {
        (0, None) => format!("({text})*"),
        (1, None) => format!("({text})+"),
        (0, Some(0)) => "\"\"".to_owned(),
        (min, None) => format!("({text}){{{min},}}"),
        (min, Some(max)) => format!("({text}){{{min},{max}}}"),
    }
}

#[derive(Default)]
struct Rules {
    names: Vec<String>,
    /// The rule with each name.
    index: HashMap<String, usize>,
    /// `None`: the rule is referred to and not yet defined.
    bodies: Vec<Option<Expression>>,
}

struct Parser<'a> {
    text: &'a str,
    chars: Peekable<CharIndices<'a>>,
    rules: Rules,
}

impl<'a> Parser<'a> {
    fn new(text: &'a str) -> Self {
        Self { text, chars: text.char_indices().peekable(), rules: Rules::default() }
    }

    fn rules(mut self) -> Result<Rules, String> {
        self.skip_space();
        while self.peek().is_some() {
            let name = self.name().ok_or_else(|| self.expected("the name of a rule"))?;
            self.skip_space();
            if !self.take_text("::=") {
                return Err(self.expected("::="));
            }
            let rule = self.rule(name);
            let body = self.choice(0)?;
            if self.rules.bodies[rule].replace(body).is_some() {
                return Err(format!("the rule {name} is defined twice"));
            }
        }
        Ok(self.rules)
    }

    fn choice(&mut self, depth: usize) -> Result<Expression, String> {
        if depth > DEPTH_MAX {
            return Err(format!("groups nest more than {DEPTH_MAX} deep"));
        }
        let mut parts = vec![self.sequence(depth)?];
        while self.take('|') {
            parts.push(self.sequence(depth)?);
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Expression::Choice(parts) })
    }

    fn sequence(&mut self, depth: usize) -> Result<Expression, String> {
        let mut parts = Vec::new();
        loop {
            self.skip_space();
            let part = match self.peek() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.chars.next();
                    Expression::Characters(r"(.|\n)".to_owned())
                }
                Some('(') => {
                    self.chars.next();
                    let inner = self.choice(depth + 1)?;
                    if !self.take(')') {
                        return Err(self.expected("\")\""));
                    }
                    inner
                }
                Some(c) if is_name(c) && !self.defines_rule() => {
                    let name = self.name().expect("a name begins here");
                    Expression::Rule(self.rule(name))
                }
                Some(c) if !is_name(c) && !"|)".contains(c) => {
                    return Err(self.expected("a text, a class of characters, a group or a rule"));
                }
                _ => break,
            };
            let part = self.repetitions(part)?;
            parts.push(part);
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Expression::Sequence(parts) })
    }

    fn repetitions(&mut self, part: Expression) -> Result<Expression, String> {
        let (min, max) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => return self.counted(part),
            _ => return Ok(part),
        };
        self.chars.next();
        self.repetitions(Expression::Repeated(Box::new(part), min, max))
    }

    fn counted(&mut self, part: Expression) -> Result<Expression, String> {
        self.chars.next();
        let min = self.number()?.ok_or_else(|| self.expected("a number"))?;
        let max = if self.take(',') { self.number()? } else { Some(min) };
        if !self.take('}') {
            return Err(self.expected("\"}\""));
        }
        if max.is_some_and(|max| max < min) {
            return Err(format!("{} ends a repetition of at least {min}", max.unwrap_or(0)));
        }
        Ok(Expression::Repeated(Box::new(part), min, max))
    }

    fn number(&mut self) -> Result<Option<u32>, String> {
        self.skip_space();
        let mut number = None;
        while let Some(digit) = self.peek().and_then(|c| c.to_digit(10)) {
            self.chars.next();
            let next = number.unwrap_or(0) * 10 + digit;
            if next > REPEATS_MAX {
                return Err(format!("a repetition has more than {REPEATS_MAX} parts"));
            }
            number = Some(next);
        }
        Ok(number)
    }

    fn literal(&mut self) -> Result<Expression, String> {
        self.chars.next();
        let mut regex = String::new();
        loop {
            match self.chars.next() {
                Some((_, '"')) => break,
                Some((_, '\\')) => push_character(&mut regex, self.escaped()?),
                Some((_, c)) => push_character(&mut regex, c),
                None => return Err(self.expected("\"")),
            }
        }
        Ok(match regex.is_empty() {
            true => Expression::Sequence(Vec::new()),
            false => Expression::Characters(regex),
        })
    }

    fn class(&mut self) -> Result<Expression, String> {
        self.chars.next();
        let mut regex = "[".to_owned();
        if self.peek() == Some('^') {
            self.chars.next();
            regex.push('^');
        }
        let empty = regex.len();
        loop {
            match self.class_character()? {
                None if regex.len() == empty => return Err("a class has no characters".to_owned()),
                None => break,
                Some(first) => {
                    push_character(&mut regex, first);
                    let after = self.text.get(self.offset() + 1..).unwrap_or_default();
                    // A hyphen before the bracket is a character.
                    if self.peek() == Some('-') && !after.starts_with(']') {
                        self.chars.next();
                        let last = self.class_character()?.unwrap_or(first);
                        if last < first {
                            return Err(format!("the range {first}-{last} is empty"));
                        }
                        regex.push('-');
                        push_character(&mut regex, last);
                    }
                }
            }
        }
        regex.push(']');
        Ok(Expression::Characters(regex))
    }

    /// Returns the next character of a class; `None` at its end.
    fn class_character(&mut self) -> Result<Option<char>, String> {
        match self.chars.next() {
            Some((_, ']')) => Ok(None),
            Some((_, '\\')) => self.escaped().map(Some),
            Some((_, c)) => Ok(Some(c)),
            None => Err(self.expected("]")),
        }
    }

    /// Returns the character after a backslash.
    fn escaped(&mut self) -> Result<char, String> {
        let Some((_, c)) = self.chars.next() else { return Err(self.expected("a character")) };
        let digits = match c {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            '"' | '\\' | '[' | ']' | '-' | '^' | '/' => return Ok(c),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            other => return Err(format!("the escape \\{other} is unknown")),
        };
        let start = self.offset();
        let hex = self.text.get(start..start + digits).unwrap_or_default();
        let code = u32::from_str_radix(hex, 16).ok().and_then(char::from_u32);
        let code = code.ok_or_else(|| format!("the escape \\{c} has no {digits} hex digits"))?;
        self.skip(digits);
        Ok(code)
    }

    /// Returns whether a name and `::=` begin here.
    fn defines_rule(&self) -> bool {
        let rest = &self.text[self.offset()..];
        rest.trim_start_matches(is_name).trim_start().starts_with("::=")
    }

    fn name(&mut self) -> Option<&'a str> {
        let start = self.offset();
        while self.peek().is_some_and(is_name) {
            self.chars.next();
        }
        Some(&self.text[start..self.offset()]).filter(|name| !name.is_empty())
    }

    /// Returns the index of the rule with this name.
    fn rule(&mut self, name: &str) -> usize {
        let rules = &mut self.rules;
        *rules.index.entry(name.to_owned()).or_insert_with(|| {
            rules.names.push(name.to_owned());
            rules.bodies.push(None);
            rules.names.len() - 1
        })
    }

    /// Skips white space and comments.
    fn skip_space(&mut self) {
        while let Some(c) = self.peek() {
            match c {
                '#' => while self.chars.next_if(|(_, c)| *c != '\n').is_some() {},
                c if c.is_whitespace() => self.skip(1),
                _ => break,
            }
        }
    }

    fn take(&mut self, c: char) -> bool {
        self.skip_space();
        self.chars.next_if(|(_, next)| *next == c).is_some()
    }

    fn take_text(&mut self, text: &str) -> bool {
        let is_next = self.text[self.offset()..].starts_with(text);
        if is_next {
            self.skip(text.len());
        }
        is_next
    }

    /// Skips ASCII characters.
    fn skip(&mut self, count: usize) {
        self.chars.nth(count - 1);
    }

    fn peek(&mut self) -> Option<char> {
        self.chars.peek().map(|(_, c)| *c)
    }

    fn offset(&self) -> usize {
        self.chars.clone().peek().map_or(self.text.len(), |(at, _)| *at)
    }

    fn expected(&self, what: &str) -> String {
        let line = 1 + self.text[..self.offset()].matches('\n').count();
        format!("expected {what} in line {line}")
    }
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

/// Appends a character to a regular expression or to a class of one.
fn push_character(regex: &mut String, c: char) {
    match c.is_ascii_alphanumeric() {
        true => regex.push(c),
        false => {
            write!(regex, r"\x{{{:x}}}", u32::from(c)).expect("writing to a String cannot fail")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_that_do_not_recurse_become_terminals() {
        let lark = to_lark("root ::= \"a\" [0-9]+ # digits\n  tail?\ntail ::= \"-\" | .").unwrap();
        assert_eq!(
            lark,
            "start: R0\nR0: (/a/ (/[0-9]/)+ (R1){0,1})\nR1: (/\\x{2d}/ | /(.|\\n)/)\n"
        );
        let lark = to_lark("root ::= \"[\" ws root* \"]\"\nws ::= [ \\n]*").unwrap();
        assert_eq!(
            lark,
            "start: r0\nT0: /\\x{5b}/ R1\nT1: /\\x{5d}/\nr0: (T0 (r0)* T1)\n\
             R1: (/[\\x{20}\\x{a}]/)*\n"
        );
    }

    #[test]
    fn invalid_gbnf_is_rejected_with_the_cause() {
        for (text, cause) in [
            ("rule ::= \"a\"", "the rule root is missing"),
            ("root ::= other", "the rule other is missing"),
            ("root ::= \"a\"\nroot ::= \"b\"", "the rule root is defined twice"),
            ("root ::= \"a\" )", "expected the name of a rule in line 1"),
            ("root ::= (\"a\"\n", "expected \")\" in line 2"),
            ("root ::= \"a", "expected \" in line 1"),
            ("root ::= []", "a class has no characters"),
            ("root ::= [z-a]", "the range z-a is empty"),
            ("root ::= \"\\q\"", "the escape \\q is unknown"),
            ("root ::= \"\\xZ1\"", "the escape \\x has no 2 hex digits"),
            ("root ::= \"a\"{3,2}", "2 ends a repetition of at least 3"),
            ("root ::= \"a\"{99999}", "a repetition has more than 10000 parts"),
            ("root ::= $", "expected a text, a class of characters, a group or a rule in line 1"),
        ] {
            assert_eq!(to_lark(text).unwrap_err(), cause, "{text}");
        }
        let deep = format!("root ::= {}\"a\"{}", "(".repeat(99), ")".repeat(99));
        assert_eq!(to_lark(&deep).unwrap_err(), "groups nest more than 24 deep");
    }
}
