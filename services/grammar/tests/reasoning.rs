//! Reasoning before the output of a grammar.

use grammar::{
    Alternative, CallSyntax, CallableTool, Compiler, FreeText, Grammar, ReasoningTags, ToolCalls,
};

fn accepts(grammar: &Grammar, text: &str) -> bool {
    let mut matcher = Compiler::for_bytes().compile(grammar).unwrap();
    let accepted = text.bytes().all(|byte| matcher.accept(u32::from(byte)).is_ok());
    accepted && matcher.may_end().unwrap()
}

fn after_reasoning(open: Option<&str>, grammar: Grammar) -> Grammar {
    let tags = ReasoningTags {
        open: open.map(str::to_owned),
        close: "</think>".to_owned(),
        before_answer: String::new(),
        never_within: vec![],
    };
    Grammar::AfterReasoning { tags, grammar: Box::new(grammar) }
}

/// Calls of a function `f`, or text.
fn calls_or_text() -> Grammar {
    Grammar::ToolCalls(ToolCalls {
        syntax: CallSyntax {
            before_name: "<call>{\"name\": ".into(),
            before_arguments: ", \"arguments\": ".into(),
            after_arguments: "}</call>".into(),
            ..CallSyntax::default()
        },
        tools: vec![CallableTool { name: "f".into(), arguments: None }],
        several: true,
        alternative: Alternative::Text(FreeText { tag: "<call>".into(), never_begins: None }),
    })
}

#[test]
fn output_of_the_grammar_begins_after_the_reasoning() {
    let grammars = [
        (Grammar::json_object(), "{\"a\": 1}", "x"),
        (Grammar::Regex("yes|no".into()), "yes", "maybe"),
        (Grammar::ContextFree("start: \"a\" \"b\"".into()), "ab", "ba"),
        (calls_or_text(), "<call>{\"name\": \"f\", \"arguments\": {}}</call>", "<call>x"),
        (calls_or_text(), "Hello <b>.", "a <call>"),
    ];
    for (grammar, valid, invalid) in grammars {
        let inside = after_reasoning(None, grammar.clone());
        for reasoning in ["", "So {x} </thin>\n", "\n\n é"] {
            for space in ["", "\n", "\n\n"] {
                let text = |answer: &str| format!("{reasoning}</think>{space}{answer}");
                assert!(accepts(&inside, &text(valid)), "{:?}", text(valid));
                assert!(!accepts(&inside, &text(invalid)), "{:?}", text(invalid));
            }
        }
        assert!(!accepts(&inside, valid), "{valid}");
        let before = after_reasoning(Some("<think>"), grammar);
        assert!(accepts(&before, valid), "{valid}");
        assert!(accepts(&before, &format!("<think>\nSo.\n</think>\n\n{valid}")), "{valid}");
        assert!(!accepts(&before, &format!("<think>So.</think>{invalid}")), "{invalid}");
        assert!(!accepts(&before, invalid), "{invalid}");
    }
}

#[test]
fn answers_and_calls_begin_after_the_reasoning_of_messages() {
    const OPEN: &str = "<|channel|>analysis<|message|>";
    const CLOSE: &str = "<|end|><|start|>assistant";
    const FINAL: &str = "<|channel|>final<|message|>";
    const CALL: &str = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}";
    let tags = |open: Option<&str>| ReasoningTags {
        open: open.map(str::to_owned),
        close: CLOSE.to_owned(),
        before_answer: FINAL.to_owned(),
        never_within: ["<|channel|>", "<|start|>", "<|end|>"].map(str::to_owned).to_vec(),
    };
    let after = |open, grammar: &Grammar| Grammar::AfterReasoning {
        tags: tags(open),
        grammar: Box::new(grammar.clone()),
    };
    let calls = |alternative| {
        Grammar::ToolCalls(ToolCalls {
            syntax: CallSyntax {
                before_name: "<|channel|>commentary to=functions.".into(),
                bare_name: true,
                before_arguments: " <|constrain|>json<|message|>".into(),
                ..CallSyntax::default()
            },
            tools: vec![CallableTool { name: "f".into(), arguments: None }],
            several: false,
            alternative,
        })
    };
    let tag = "<|channel|>commentary to=".to_owned();
    let text = FreeText { tag: tag.clone(), never_begins: None };
    let answer = Alternative::Answer { grammar: Box::new(Grammar::json_object()), tag };
    let object = format!("{FINAL}{{\"a\": 1}}");
    let words = format!("{FINAL}Hello");
    for (grammar, valid, invalid) in [
        (Grammar::json_object(), vec![&*object], vec!["{\"a\": 1}", CALL, &*words]),
        (Grammar::Regex("Hello".into()), vec![&*words], vec!["Hello", CALL, &*object]),
        (calls(Alternative::Nothing), vec![CALL], vec![&*object, &*words]),
        (calls(answer), vec![CALL, &*object], vec!["{\"a\": 1}", &*words]),
        (calls(Alternative::Text(text)), vec![CALL, &*object, &*words], vec![]),
    ] {
        for answer in valid {
            let reasoned = format!("So.{CLOSE}{answer}");
            assert!(accepts(&after(Some(OPEN), &grammar), answer), "{answer}");
            assert!(accepts(&after(Some(OPEN), &grammar), &(OPEN.to_owned() + &reasoned)));
            assert!(accepts(&after(None, &grammar), &reasoned), "{reasoned}");
        }
        for answer in invalid {
            assert!(!accepts(&after(Some(OPEN), &grammar), answer), "{grammar:?} {answer}");
            let reasoned = format!("{OPEN}So.{CLOSE}{answer}");
            assert!(!accepts(&after(Some(OPEN), &grammar), &reasoned), "{grammar:?} {answer}");
        }
        // Clients would see the rest as content.
        for end in [FINAL, "<|end|>", "<|end|><|channel|>", "<|start|>assistant"] {
            let mut matcher = Compiler::for_bytes().compile(&after(None, &grammar)).unwrap();
            let text = format!("So.{end} And");
            let accepted = text.bytes().all(|byte| matcher.accept(u32::from(byte)).is_ok());
            assert!(!accepted, "{grammar:?} {text}");
        }
    }
}
