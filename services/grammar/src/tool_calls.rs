//! The grammar of outputs with tool calls.

use std::fmt::Write as _;

use llguidance::{
    api::{GrammarWithLexer, TopLevelGrammar},
    regex_to_lark,
};
use regex_syntax::escape;

use crate::{
    arguments::{ArgumentSchema, Arguments, ParameterSyntax, literal, quoted},
    error::{GrammarError, unsupported},
    limits::{LITERAL_BYTES_MAX, NAME_BYTES_MAX, TOOLS_BYTES_MAX, TOOLS_MAX, TOOLS_PARTS_FACTOR},
    source::{Grammar, SchemaParts, check_regex, lark_expression, parsed_schema},
};

/// Any JSON object.
const ANY_ARGUMENTS: &str = r#"{"type":"object"}"#;

/// Tool calls, and the output that is allowed instead.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ToolCalls {
    pub syntax: CallSyntax,
    /// Tools that the output may call; at least one.
    pub tools: Vec<CallableTool>,
    /// Whether the output may have more than one call.
    pub several: bool,
    pub alternative: Alternative,
}

/// Syntax of calls: `begin CALL between CALL end`, where a call is `before_name NAME
/// before_arguments ARGUMENTS after_arguments`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CallSyntax {
    pub begin: String,
    pub before_name: String,
    /// Whether the name is not a JSON string.
    pub bare_name: bool,
    pub before_arguments: String,
    /// Syntax of the arguments; `None` for a JSON object.
    pub parameters: Option<ParameterSyntax>,
    pub after_arguments: String,
    /// Text between two calls.
    pub between: String,
    pub end: String,
}

impl CallSyntax {
    fn literals(&self) -> impl Iterator<Item = &str> {
        let parameters = self.parameters.iter().flat_map(ParameterSyntax::literals);
        let names = [&self.begin, &self.before_name, &self.before_arguments];
        names
            .into_iter()
            .chain([&self.after_arguments, &self.between, &self.end])
            .map(String::as_str)
            .chain(parameters)
    }

    /// Returns the text before the first name.
    fn opening(&self) -> String {
        self.begin.clone() + &self.before_name
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CallableTool {
    pub name: String,
    /// The JSON schema of the arguments; `None` allows any object.
    pub arguments: Option<String>,
}

/// Output that is allowed instead of tool calls.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Alternative {
    /// Nothing: the output must call a tool.
    Nothing,
    /// Text, and calls where [`FreeText`] allows them.
    Text(FreeText),
    /// Output that matches another grammar.
    Answer {
        /// A schema or an expression, not [`ToolCalls`].
        grammar: Box<Grammar>,
        /// The literal that starts a call in text. Output of a regular expression must not contain
        /// it, unless it is empty. JSON output may contain it.
        tag: String,
    },
}

/// Text outside calls.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FreeText {
    /// The literal after which a call starts. If the text before the first name starts with it,
    /// text may stand between calls. Otherwise the tag precedes only the first call, and output of
    /// calls alone needs no tag.
    pub tag: String,
    /// Text must not start with a match of this expression: the start of output of calls alone.
    pub never_begins: Option<String>,
}

impl ToolCalls {
    /// Returns the grammar for llguidance. `before_answer`: text before an answer without calls.
    pub(crate) fn parsed_after(
        &self,
        before_answer: &str,
    ) -> Result<TopLevelGrammar, GrammarError> {
        self.check()?;
        let mut parts = SchemaParts::default();
        let mut schemas = Vec::new();
        let lark = self.lark(before_answer, &mut schemas)?;
        let mut grammars = vec![GrammarWithLexer::from_lark(lark)];
        for ArgumentSchema { tool, rule, text } in schemas {
            let (schema, its_parts) = parsed_schema(&text).map_err(|error| error.in_tool(tool))?;
            parts += its_parts;
            parts.check(TOOLS_PARTS_FACTOR)?;
            grammars.push(GrammarWithLexer {
                name: Some(rule),
                ..GrammarWithLexer::from_json_schema(schema)
            });
        }
        if let Alternative::Answer { grammar, tag } = &self.alternative {
            let answer = match &**grammar {
                Grammar::JsonSchema(text) => {
                    let (schema, its_parts) = parsed_schema(text)?;
                    parts += its_parts;
                    GrammarWithLexer::from_json_schema(schema)
                }
                Grammar::Regex(text) => {
                    check_regex(text)?;
                    GrammarWithLexer::from_lark(without_tag(text, tag))
                }
                Grammar::ContextFree(_)
                | Grammar::ToolCalls(_)
                | Grammar::AfterReasoning { .. } => {
                    let reason =
                        "the alternative to tool calls is neither a schema nor an expression";
                    return Err(unsupported(reason));
                }
            };
            grammars.push(GrammarWithLexer { name: Some("answer".to_owned()), ..answer });
        }
        parts.check(TOOLS_PARTS_FACTOR)?;
        Ok(TopLevelGrammar { grammars, max_tokens: None })
    }

    /// Returns whether a call or its tag may contain this text outside of its arguments.
    pub fn writes(&self, text: &[u8]) -> bool {
        let tag = match &self.alternative {
            Alternative::Text(free_text) => free_text.tag.as_str(),
            Alternative::Nothing | Alternative::Answer { .. } => "",
        };
        // A name of a structural tag is text of the client, which may have or complete a tag.
        let CallSyntax { before_name, before_arguments, .. } = &self.syntax;
        let writes_in_name = |CallableTool { name, .. }: &CallableTool| {
            has_text(&format!("{before_name}{name}{before_arguments}"), text)
        };
        self.syntax.literals().chain([tag]).any(|literal| has_text(literal, text))
            || self.tools.iter().any(writes_in_name)
    }

    pub(crate) fn bytes(&self) -> usize {
        let tool_bytes =
            |tool: &CallableTool| tool.name.len() + tool.arguments.as_ref().map_or(0, String::len);
        let answer_bytes = match &self.alternative {
            Alternative::Answer { grammar, .. } => grammar.bytes(),
            Alternative::Nothing | Alternative::Text(_) => 0,
        };
        self.tools.iter().map(tool_bytes).sum::<usize>() + answer_bytes
    }

    /// Returns the index and the arguments grammar of each tool that has a schema.
    pub(crate) fn arguments_alone(&self) -> impl Iterator<Item = (usize, Grammar)> {
        let schemas = self.tools.iter().enumerate();
        schemas
            .filter_map(|(index, tool)| Some((index, Grammar::JsonSchema(tool.arguments.clone()?))))
    }

    fn check(&self) -> Result<(), GrammarError> {
        let count = self.tools.len();
        if count == 0 || count > TOOLS_MAX {
            return Err(GrammarError::ToolCount { count, max: TOOLS_MAX });
        }
        let bytes = self.bytes();
        if bytes > TOOLS_BYTES_MAX {
            return Err(GrammarError::ToolsTooLong { bytes, max: TOOLS_BYTES_MAX });
        }
        for (index, tool) in self.tools.iter().enumerate() {
            let bytes = tool.name.len();
            if bytes == 0 || bytes > NAME_BYTES_MAX {
                return Err(GrammarError::Name { bytes, max: NAME_BYTES_MAX }.in_tool(index));
            }
        }
        let mut parts: Vec<&str> = self.syntax.literals().collect();
        match &self.alternative {
            Alternative::Nothing => {}
            Alternative::Text(free_text) => {
                parts.push(&free_text.tag);
                if free_text.tag.is_empty() {
                    return Err(unsupported("the tag of calls is empty"));
                }
                free_text.never_begins.as_deref().map_or(Ok(()), check_regex)?;
            }
            Alternative::Answer { tag, .. } => parts.push(tag),
        }
        if parts.iter().any(|part| part.len() > LITERAL_BYTES_MAX) {
            return Err(unsupported("the text around calls is too long"));
        }
        Ok(())
    }

    /// Returns the grammar in llguidance's dialect of Lark, and appends the schemas that it uses.
    /// Tool names are quoted and schemas are separate grammars, so a client cannot add rules.
    fn lark(
        &self,
        before_answer: &str,
        schemas: &mut Vec<ArgumentSchema>,
    ) -> Result<String, GrammarError> {
        let syntax = &self.syntax;
        let more = match self.several {
            true => format!("({}call)*", literal(&syntax.between)),
            false => String::new(),
        };
        let after = literal(&syntax.after_arguments);
        let calls = format!("calls: first_call {more} {}", literal(&syntax.end));
        let first_call = format!("first_call: first_function {after}");
        let call = format!("call: {}function_call", literal(&syntax.before_name));
        let function_call = format!("function_call: function {after}");
        let (mut functions, mut first_functions) = (Vec::new(), Vec::new());
        let mut rules = String::new();
        for (index, tool) in self.tools.iter().enumerate() {
            let name = match syntax.bare_name {
                true => tool.name.clone(),
                false => serde_json::Value::from(tool.name.as_str()).to_string(),
            };
            let arguments = match &syntax.parameters {
                Some(parameters) => {
                    let arguments = Arguments { parameters, tool: index };
                    arguments.lark(tool.arguments.as_deref(), schemas, &mut rules)?
                }
                None => {
                    let rule = format!("arguments_{index}");
                    let text = tool.arguments.as_deref().unwrap_or(ANY_ARGUMENTS).to_owned();
                    schemas.push(ArgumentSchema { tool: index, rule: rule.clone(), text });
                    format!("@{rule}")
                }
            };
            // The text after the name is in the same lexeme, so no lexeme is a prefix of another.
            let name = format!("{name}{}", syntax.before_arguments);
            functions.push(format!("{} {arguments}", quoted(&name)));
            // The text that free text must not begin with is one lexeme, too: the lexer takes the
            // longest lexeme.
            first_functions.push(format!("{} {arguments}", quoted(&(syntax.opening() + &name))));
        }
        if let Some(end) = syntax.parameters.as_ref().and_then(|it| it.text_end.as_ref()) {
            let text = regex_to_lark(&format!(r"(.|\n)*{}", escape(end)), "");
            rules += &format!("TEXT_VALUE: /{text}/\ntext_value[lazy]: TEXT_VALUE\n");
        }
        let function = format!("function: {}", functions.join("\n | "));
        let first_function = format!("first_function: {}", first_functions.join("\n | "));
        let rules = [first_call, call, function_call, function, first_function, rules];
        let mut lark = calls + "\n" + &rules.join("\n");
        let start = match &self.alternative {
            Alternative::Nothing => "start: calls".to_owned(),
            Alternative::Answer { .. } => {
                format!("start: calls | {}@answer", literal(before_answer))
            }
            Alternative::Text(free_text) => self.free_text(free_text, &mut lark)?,
        };
        write!(lark, "\n{start}\n").expect("writing to a String cannot fail");
        Ok(lark)
    }

    /// Returns the start rule of an output that may be text, and appends the rules that it uses.
    fn free_text(&self, free_text: &FreeText, lark: &mut String) -> Result<String, GrammarError> {
        let tag = escape(&free_text.tag);
        let any = r"(.|\n)*";
        let begins = match &free_text.never_begins {
            None => String::new(),
            Some(expression) => {
                format!(" & ~/{}/", lark_expression(&format!("({expression}){any}")))
            }
        };
        let with_tag = regex_to_lark(&format!("{any}{tag}{any}"), "");
        let up_to_tag = regex_to_lark(&format!("{any}{tag}"), "");
        let rules = format!(
            "\nTEXT: /{any}/ & ~/{with_tag}/{begins}\n\
             TEXT_AND_TAG: /{up_to_tag}/{begins}\n\
             tagged[lazy]: TEXT_AND_TAG\n"
        );
        lark.push_str(&rules);
        let syntax = &self.syntax;
        match syntax.opening().strip_prefix(&free_text.tag) {
            // The tag starts a call: text may stand between calls.
            Some(rest) => {
                let (rest, end) = (literal(rest), literal(&syntax.end));
                let calls = match (syntax.begin.is_empty(), self.several) {
                    (false, true) => {
                        format!("function_call ({}call)* {end}", literal(&syntax.between))
                    }
                    _ => format!("function_call {end}"),
                };
                lark.push_str(&format!("tagged_call: tagged {rest}{calls}"));
                Ok(match self.several {
                    true => "start: tagged_call* TEXT",
                    false => "start: tagged_call | TEXT",
                }
                .to_owned())
            }
            None => Ok("start: calls | tagged calls | TEXT".to_owned()),
        }
    }
}

/// Returns whether a literal contains this text.
pub(crate) fn has_text(literal: &str, text: &[u8]) -> bool {
    literal.as_bytes().windows(text.len().max(1)).any(|part| part == text)
}

/// Returns the Lark grammar of text that matches the expression and does not contain the tag: the
/// tag would start a call that no schema constrains.
fn without_tag(expression: &str, tag: &str) -> String {
    let expression = lark_expression(expression);
    if tag.is_empty() {
        return format!("start: /{expression}/\n");
    }
    let with_tag = regex_to_lark(&format!(r"(.|\n)*{}(.|\n)*", escape(tag)), "");
    format!("start: ANSWER\nANSWER: /{expression}/ & ~/{with_tag}/\n")
}
