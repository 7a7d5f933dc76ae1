//! Function calls: which output is allowed.

use grammar::{
    Alternative, CallSyntax, CallableTool, Compiler, FreeText, Grammar, GrammarError,
    OutputMatcher, Token, ToolCalls, limits::TOOLS_BYTES_MAX,
};
use serde_json::json;

const WORDS: [&str; 13] = [
    "<tool_call>",
    "</tool_call>",
    "{\"",
    "\": ",
    "name",
    "get_",
    "weather",
    "\"}",
    "}}",
    "}}\n",
    "; ",
    "Paris",
    "<|python_tag|>",
];

fn compiler() -> Compiler {
    let bytes: Vec<[u8; 1]> = (0..=255).map(|byte| [byte]).collect();
    let bytes = bytes.iter().map(|byte| Token::Text(byte));
    Compiler::new(bytes.chain(WORDS.iter().map(|word| Token::Text(word.as_bytes()))))
}

fn hermes() -> CallSyntax {
    CallSyntax {
        before_name: "<tool_call>\n{\"name\": ".into(),
        before_arguments: ", \"arguments\": ".into(),
        after_arguments: "}\n</tool_call>".into(),
        between: "\n".into(),
        ..Default::default()
    }
}

fn llama() -> CallSyntax {
    CallSyntax {
        before_name: "{\"name\": ".into(),
        before_arguments: ", \"parameters\": ".into(),
        after_arguments: "}".into(),
        between: "; ".into(),
        ..Default::default()
    }
}

fn tools() -> Vec<CallableTool> {
    let schema = json!({"type": "object", "properties": {"city": {"enum": ["Paris", "Köln"]}},
        "required": ["city"], "additionalProperties": false});
    vec![
        CallableTool { name: "get".into(), arguments: None },
        CallableTool { name: "get_weather".into(), arguments: Some(schema.to_string()) },
        CallableTool {
            name: "say \"é\\\n".into(),
            arguments: Some("{\"type\":\"object\"}".into()),
        },
    ]
}

fn calls(syntax: CallSyntax, several: bool, alternative: Alternative) -> Grammar {
    Grammar::ToolCalls(ToolCalls { syntax, tools: tools(), several, alternative })
}

fn hermes_free_text() -> Alternative {
    Alternative::Text(FreeText { tag: "<tool_call>".into(), never_begins: None })
}

fn answer(grammar: Grammar) -> Alternative {
    Alternative::Answer { grammar: Box::new(grammar), tag: "<tool_call>".into() }
}

fn llama_free_text() -> Alternative {
    let never_begins = Some(r#"\s*\{\s*"name""#.to_owned());
    Alternative::Text(FreeText { tag: "<|python_tag|>".into(), never_begins })
}

/// Feeds bytes; returns how many were accepted, and whether the answer may end there.
fn taken(matcher: &mut OutputMatcher, text: &str) -> (usize, bool) {
    for (at, byte) in text.bytes().enumerate() {
        let words = matcher.allowed().unwrap();
        let is_allowed = words[usize::from(byte) / 32] >> (byte % 32) & 1 == 1;
        assert_eq!(matcher.clone().accept(u32::from(byte)).is_ok(), is_allowed, "{at} of {text}");
        if !is_allowed {
            return (at, false);
        }
        matcher.accept(u32::from(byte)).unwrap();
    }
    (text.len(), matcher.may_end().unwrap())
}

#[track_caller]
fn check(grammar: &Grammar, whole: &[&str], beginnings: &[&str], others: &[&str]) {
    let matcher = compiler().compile(grammar).unwrap();
    for text in whole {
        assert_eq!(taken(&mut matcher.clone(), text), (text.len(), true), "{text}");
    }
    for text in beginnings {
        assert_eq!(taken(&mut matcher.clone(), text), (text.len(), false), "{text}");
    }
    for text in others {
        let (at, ends) = taken(&mut matcher.clone(), text);
        assert!(at < text.len() && !ends, "{text}: {at}");
    }
}

const PARIS: &str =
    "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>";
const GET: &str = "<tool_call>\n{\"name\": \"get\", \"arguments\": {}}\n</tool_call>";

/// The grammar of a structural tag.
#[test]
fn json_follows_the_beginning_of_a_structure_in_free_text() {
    let tool = |name: &str, schema: serde_json::Value| CallableTool {
        name: name.into(),
        arguments: Some(schema.to_string()),
    };
    let structures = |several| {
        let syntax = CallSyntax {
            before_name: "<function=".into(),
            bare_name: true,
            after_arguments: "</function>".into(),
            ..CallSyntax::default()
        };
        let tools = vec![
            tool("get>", json!({"enum": ["Paris"]})),
            tool("get_all>", json!({"type": "integer"})),
        ];
        let free_text = FreeText { tag: "<function=".into(), never_begins: None };
        let alternative = Alternative::Text(free_text);
        Grammar::ToolCalls(ToolCalls { syntax, tools, several, alternative })
    };
    let paris = "<function=get>\"Paris\"</function>";
    let two = format!("Now {paris} and <function=get_all>7</function>{paris} done <function");
    check(
        &structures(true),
        &["", "Paris", paris, &two],
        &["<function=", "a<function=get", "<function=get>\"Pa", "<function=get>\"Paris\"</"],
        &["<function=x", "a<function=get>7", "<function=get>\"Paris\" <"],
    );
    check(
        &structures(false),
        &["", "Paris", paris, &format!("Now {paris}")],
        &["a<function="],
        &[&format!("{paris}."), &two],
    );
}

#[test]
fn a_required_tool_call_allows_no_other_text() {
    let any = "<tool_call>\n{\"name\": \"get\", \"arguments\": {\"a\": [1, {\"b\": \"</tool_call>\"}]}}\n</tool_call>";
    let odd = "<tool_call>\n{\"name\": \"say \\\"é\\\\\\n\", \"arguments\": {}}\n</tool_call>";
    let koeln = PARIS.replace("Paris", "Köln");
    let other_city = PARIS.replace("Paris", "Rome");
    let two = format!("{PARIS}\n{GET}");
    let others = [
        "Sure",
        " ",
        "{",
        "<tool_call>{",
        &other_city,
        "<tool_call>\n{\"name\": \"got",
        "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {}",
        "<tool_call>\n{\"name\": \"get\", \"arguments\": 7",
        "<tool_call>\n{\"name\": \"get\", \"arguments\": {}}\n</tool_call> so",
    ];
    let one = calls(hermes(), false, Alternative::Nothing);
    check(&one, &[PARIS, GET, any, odd, &koeln], &["", "<tool_call>\n{\"na"], &others);
    check(&one, &[], &[], &[&two]);
    let several = calls(hermes(), true, Alternative::Nothing);
    let three = format!("{two}\n{any}");
    check(&several, &[PARIS, &two, &three], &["", &format!("{PARIS}\n")], &others);
    let call = "{\"name\": \"get_weather\", \"parameters\": {\"city\":\"Köln\"}}";
    let two = format!("{call}; {{\"name\": \"get\", \"parameters\": {{}}}}");
    let several = calls(llama(), true, Alternative::Nothing);
    check(&several, &[call, &two], &["", "{\"name\": \"get_w"], &["[", PARIS, "<|python_tag|>"]);
    check(&calls(llama(), false, Alternative::Nothing), &[call], &[], &[&two]);
}

#[test]
fn an_answer_with_one_call_is_complete_after_the_call() {
    let grammar = calls(hermes(), false, Alternative::Nothing);
    let mut matcher = compiler().compile(&grammar).unwrap();
    assert_eq!(taken(&mut matcher, PARIS), (PARIS.len(), true));
    assert!(matcher.is_complete());
    let mut matcher = compiler().compile(&calls(hermes(), true, Alternative::Nothing)).unwrap();
    assert_eq!(taken(&mut matcher, PARIS), (PARIS.len(), true));
    assert!(!matcher.is_complete());
}

#[test]
fn text_before_a_call_is_unconstrained() {
    let texts = ["", "Hello.\n\n<b>", "a <tool_cal", "{\"name\": 7}", "é<", "</tool_call>"];
    let with_call = format!("I look.\n{PARIS}");
    let more = format!("{with_call}\nand {GET}\n<done>");
    let broken = format!("I look.\n{}", PARIS.replace("Paris", "Rome"));
    let second = format!("{GET} {}", PARIS.replace("Paris", "Rome"));
    let several = calls(hermes(), true, hermes_free_text());
    let whole: Vec<&str> = texts.into_iter().chain([&*with_call, &more, PARIS]).collect();
    let begun = ["a <tool_call>", "<tool_call>\n{\"name\": \"get"];
    check(&several, &whole, &begun, &[&broken, &second, "<tool_call> is", "<tool_call>\n{\"x"]);
    let one = calls(hermes(), false, hermes_free_text());
    let whole: Vec<&str> = texts.into_iter().chain([&*with_call, PARIS]).collect();
    check(&one, &whole, &begun, &[&broken, &more, "<tool_call> is"]);

    let call = "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Paris\"}}";
    let wrong = call.replace("Paris", "Rome");
    let grammar = calls(llama(), true, llama_free_text());
    check(
        &grammar,
        &[
            "",
            "Hello.",
            "{\"a\": 1}",
            " {\"nam\": 1}",
            call,
            &format!("{call}; {call}"),
            &format!("<|python_tag|>{call}"),
            &format!("Sure. <|python_tag|>{call}; {call}"),
        ],
        &["{\"name\": ", "a<|python_tag|>", "<|python_tag|>"],
        &[
            &wrong,
            " {\"name\"",
            "\n{ \"name\"",
            &format!("<|python_tag|>{wrong}"),
            "<|python_tag|>brave",
            &format!("{call}; and"),
            &format!("a<|python_tag|>{call} b"),
        ],
    );
}

/// Tokens that extend beyond the tag, or begin it, are allowed only where their bytes are.
#[test]
fn a_token_is_allowed_exactly_where_its_bytes_are() {
    let texts = [format!("I look.\n{PARIS}\n{GET} x"), format!("{PARIS}\n{GET}")];
    for (text, alternative) in texts.iter().zip([hermes_free_text(), Alternative::Nothing]) {
        let grammar = calls(hermes(), true, alternative);
        let mut matcher = compiler().compile(&grammar).unwrap();
        for byte in text.bytes() {
            let words = matcher.allowed().unwrap();
            for (index, word) in WORDS.iter().enumerate() {
                let id = 256 + index;
                let mut by_bytes = matcher.clone();
                let taken = word.bytes().all(|byte| by_bytes.accept(u32::from(byte)).is_ok());
                assert_eq!(words[id / 32] >> (id % 32) & 1 == 1, taken, "{word:?} in {text:?}");
            }
            matcher.accept(u32::from(byte)).unwrap();
        }
    }
}

#[test]
fn an_answer_may_match_a_schema_instead() {
    let schema = json!({"type": "object", "properties": {"name": {"type": "integer"}},
        "required": ["name"], "additionalProperties": false});
    let schema = answer(Grammar::JsonSchema(schema.to_string()));
    check(
        &calls(hermes(), true, schema),
        &[PARIS, "{\"name\": 7}", &format!("{PARIS}\n{GET}")],
        &["", "{\"name\": 7"],
        &["7", "Sure", "{\"other\"", &format!("{PARIS}\n{{")],
    );
    let regex = answer(Grammar::Regex("yes|no".into()));
    check(&calls(hermes(), false, regex), &[PARIS, "yes", "no"], &["y"], &["yesno", "maybe"]);
}

/// The router searches a regex answer for calls too.
#[test]
fn a_call_inside_a_regex_answer_must_match_its_schema() {
    let wrong = PARIS.replace("Paris", "Rome");
    let behind = format!("I look. {wrong}");
    for expression in [r"(.|\n)*", r"[^x]*", r"<tool_call>(.|\n)*|.*\n?.*"] {
        let grammar = calls(hermes(), true, answer(Grammar::Regex(expression.into())));
        check(
            &grammar,
            &[PARIS, "", "I look.", "<tool_cal", "a / <b>", &format!("{PARIS}\n{GET}")],
            &["<tool_call>", "<tool_call>\n{\"name\": \"get_w"],
            &[&wrong, &behind, "a <tool_call>", "<tool_call>{", "<tool_call> is"],
        );
    }
    let untagged = Alternative::Answer {
        grammar: Box::new(Grammar::Regex("(.|\n)*".into())),
        tag: String::new(),
    };
    check(&calls(llama(), true, untagged), &["<tool_call> is", "{\"name\": 7"], &[], &[]);
    let inside = json!({"type": "array", "items": {"type": "string"}}).to_string();
    let json = calls(hermes(), true, answer(Grammar::JsonSchema(inside)));
    check(&json, &["[\"<tool_call> is text here\"]"], &[], &[]);
}

/// The check compiles each function alone. Otherwise the model could choose a function whose
/// arguments it can never complete.
#[test]
fn unsatisfiable_argument_schemas_are_rejected_with_their_function() {
    let short = json!({"type": "string", "pattern": "^a$", "minLength": 5});
    for (arguments, words) in [
        (json!({"$ref": "#"}), "is not supported: no output matches it"),
        (short, "is not supported: no output matches it: pattern"),
    ] {
        for alternative in [Alternative::Nothing, hermes_free_text()] {
            let mut tools = tools();
            tools[1].arguments = Some(arguments.to_string());
            let syntax = hermes();
            let calls = ToolCalls { syntax, tools, several: true, alternative };
            let error = compiler().check(&Grammar::ToolCalls(calls)).unwrap_err();
            assert!(matches!(error, GrammarError::InTool { index: 1, .. }), "{error:?}");
            let error = error.to_string();
            assert!(error.starts_with(&format!("function 1: {words}")), "{error}");
        }
    }
    for alternative in [Alternative::Nothing, hermes_free_text()] {
        assert_eq!(compiler().check(&calls(hermes(), true, alternative)), Ok(()));
    }
}

#[test]
fn invalid_argument_schemas_are_rejected_with_their_function() {
    let refused = |grammar: &Grammar| compiler().compile(grammar).unwrap_err();
    let with = |arguments: String| {
        let mut tools = tools();
        tools[1].arguments = Some(arguments);
        let alternative = Alternative::Nothing;
        Grammar::ToolCalls(ToolCalls { syntax: hermes(), tools, several: true, alternative })
    };
    let deep = format!("{}1{}", "[".repeat(60), "]".repeat(60));
    for (arguments, words) in [
        (deep, "function 1: nests 60 deep; allowed: at most 32"),
        ("{".to_owned(), "function 1: is not a JSON schema"),
        ("[]".to_owned(), "function 1: is not a JSON schema: a list is not an object"),
        (json!({"const": "x".repeat(70_000)}).to_string(), "function 1: has 700"),
        (json!({"type": "strange"}).to_string(), "function 1: is not supported"),
        (json!({"$ref": "https://example.com/x"}).to_string(), "function 1: is not supported"),
    ] {
        let error = refused(&with(arguments));
        assert!(matches!(error, GrammarError::InTool { index: 1, .. }), "{error:?}");
        assert!(error.to_string().starts_with(words), "{error}");
    }
    let one = CallableTool {
        name: "f".into(),
        arguments: Some(json!({"const": "x".repeat(60_000)}).to_string()),
    };
    let many = |count| {
        let tools = vec![one.clone(); count];
        let alternative = Alternative::Nothing;
        Grammar::ToolCalls(ToolCalls { syntax: hermes(), tools, several: true, alternative })
    };
    assert!(matches!(refused(&many(0)), GrammarError::ToolCount { count: 0, max: 128 }));
    assert!(matches!(refused(&many(129)), GrammarError::ToolCount { count: 129, .. }));
    let GrammarError::ToolsTooLong { bytes, max } = refused(&many(5)) else { panic!("long") };
    assert!(bytes > max && max == TOOLS_BYTES_MAX);
}
