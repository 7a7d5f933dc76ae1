//! Measures the cost of grammars with a model's vocabulary: `grammar_cost MODEL`, where MODEL is a
//! `.gguf` file or a folder.

use std::time::{Duration, Instant};

use grammar::{
    Alternative, CallSyntax, CallableTool, Compiler, FreeText, Grammar, Token, ToolCalls,
};
use text::TokenTable;

const PERSON: &str = r##"{"type":"object","properties":{"name":{"type":"string"},"age":{"type":
"integer","minimum":0,"maximum":150},"mail":{"type":"string","format":"email"},"tags":{"type":
"array","items":{"enum":["a","b","c"]},"maxItems":5},"address":{"$ref":"#/$defs/address"}},
"required":["name","age","tags","address"],"additionalProperties":false,"$defs":{"address":{"type":
"object","properties":{"street":{"type":"string","maxLength":40},"zip":{"type":"string","pattern":
"^[0-9]{5}$"}},"required":["street","zip"],"additionalProperties":false}}}"##;

fn main() {
    let path = std::env::args().nth(1).expect("grammar_cost MODEL");
    let before = resident_kib();
    let started = Instant::now();
    let table = TokenTable::open(path).expect("a model");
    let read = started.elapsed();
    let started = Instant::now();
    let compiler = compiler(&table);
    let built = started.elapsed();
    drop(table);
    let after = resident_kib();
    println!(
        "vocabulary read in {read:?}, trie built in {built:?}, {} KiB more resident",
        after - before
    );
    let answers = [
        (
            Grammar::json_object(),
            r#"{"name": "Ada Lovelace", "born": 1815, "list": [1, 2.5e3, null, true, {"a": "\n"}]}"#,
        ),
        (
            Grammar::JsonSchema(PERSON.into()),
            r#"{"name":"Grace Hopper","age":85,"mail":"g@example.com","tags":["a","b"],"address":{"street":"12 Long Street, Somewhere","zip":"12345"}}"#,
        ),
        (
            Grammar::Regex(r"[0-9]{3}-[0-9]{3}-[0-9]{4}( ext\. \d{1,5})?".into()),
            "415-555-2671 ext. 1234",
        ),
        (Grammar::Regex(r"(yes|no|maybe)".into()), "maybe"),
        (calls(Alternative::Nothing), CALL),
        (
            calls(Alternative::Text(FreeText { tag: "<tool_call>".into(), never_begins: None })),
            "I look for that, one moment please: a < b.\n<tool_call>\n{\"name\": \"add_person\", \"arguments\": {\"name\":\"Grace\",\"age\":85,\"tags\":[],\"address\":{\"street\":\"12 Long Street\",\"zip\":\"12345\"}}}\n</tool_call>",
        ),
    ];
    for (grammar, answer) in answers {
        let (mut compile, mut masks, mut accepts) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..50 {
            let started = Instant::now();
            let mut matcher = compiler.compile(&grammar).expect("a grammar");
            compile.push(started.elapsed());
            for byte in answer.bytes() {
                let started = Instant::now();
                matcher.allowed().expect("a mask");
                masks.push(started.elapsed());
                let started = Instant::now();
                matcher.accept(BYTES.with(|ids| ids.borrow()[byte as usize])).expect("matches");
                accepts.push(started.elapsed());
            }
        }
        print!("{:.60}: ", format!("{grammar:?}"));
        for (what, times) in [("compile", compile), ("mask", masks), ("accept", accepts)] {
            let [p50, p99, max] = percentiles(times);
            print!(" {what} p50 {p50:?} p99 {p99:?} max {max:?};");
        }
        println!();
    }
    for expression in
        ["(.{0,300}){3}z", "(?:a?){5000}a{5000}", "(a|b)*a(a|b){300}", r"(\w{1,100}){1,100}"]
    {
        let (masks, ended) = wander(&compiler, expression);
        let (count, all) = (masks.len(), masks.iter().sum::<Duration>());
        let [p50, p99, max] = percentiles(masks);
        println!(
            "{expression}: {count} masks p50 {p50:?} p99 {p99:?} max {max:?}, together {all:?}; {ended}"
        );
    }
    println!("{} KiB more resident at the end", resident_kib() - before);
}

/// Generates random allowed tokens of an expensive expression. Returns the time of each bitmask and
/// how the output ended.
fn wander(compiler: &Compiler, expression: &str) -> (Vec<Duration>, String) {
    let mut matcher = compiler.compile(&Grammar::Regex(expression.into())).expect("a grammar");
    let mut masks = Vec::new();
    let mut random = 7_u64;
    for _ in 0..1000 {
        let started = Instant::now();
        let allowed = matcher.allowed();
        masks.push(started.elapsed());
        let allowed = match allowed {
            Ok(allowed) => allowed,
            Err(error) => return (masks, error.to_string()),
        };
        let tokens = 0..32 * allowed.len() as u32;
        let tokens: Vec<u32> =
            tokens.filter(|id| allowed[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        if tokens.is_empty() {
            return (masks, "complete".to_owned());
        }
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        if let Err(error) = matcher.accept(tokens[(random >> 33) as usize % tokens.len()]) {
            return (masks, error.to_string());
        }
    }
    (masks, "goes on".to_owned())
}

const CALL: &str = "<tool_call>\n{\"name\": \"add_person\", \"arguments\": {\"name\":\"Grace\",\"age\":85,\"tags\":[],\"address\":{\"street\":\"12 Long Street\",\"zip\":\"12345\"}}}\n</tool_call>";

/// Returns a grammar of ten functions, as Hermes and Qwen write them.
fn calls(alternative: Alternative) -> Grammar {
    let tool = |name: String| CallableTool { name, arguments: Some(PERSON.to_owned()) };
    let others = (0..9).map(|index| tool(format!("function_{index}")));
    Grammar::ToolCalls(ToolCalls {
        syntax: CallSyntax {
            before_name: "<tool_call>\n{\"name\": ".into(),
            before_arguments: ", \"arguments\": ".into(),
            after_arguments: "}\n</tool_call>".into(),
            between: "\n".into(),
            ..Default::default()
        },
        tools: others.chain([tool("add_person".into())]).collect(),
        several: true,
        alternative,
    })
}

thread_local! {
    /// The token of each byte.
    static BYTES: std::cell::RefCell<Vec<u32>> = const { std::cell::RefCell::new(Vec::new()) };
}

fn compiler(table: &TokenTable) -> Compiler {
    let mut ids = vec![0; 256];
    let tokens = (0..table.size()).map(|id| match table.bytes(id) {
        Some(bytes) if !table.is_special(id) => {
            if let [byte] = bytes {
                ids[*byte as usize] = id;
            }
            Token::Text(bytes)
        }
        _ => Token::Silent,
    });
    let compiler = Compiler::new(tokens);
    BYTES.with(|bytes| *bytes.borrow_mut() = ids);
    compiler
}

fn percentiles(mut times: Vec<Duration>) -> [Duration; 3] {
    times.sort_unstable();
    [times[times.len() / 2], times[times.len() * 99 / 100], times[times.len() - 1]]
}

fn resident_kib() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or("0");
    line.trim().trim_end_matches(" kB").parse().unwrap_or(0)
}
