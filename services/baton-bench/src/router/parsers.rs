//! CPU time of the router for a token of a synthetic answer: with a reasoning and a tool parser,
//! and without both.
//!
//! Both routers get the same requests and tokens. The router without parsers leaves reasoning in
//! the content, and its requests have the `tool_choice` `none`.

use std::{ffi::OsString, fs, time::Duration};

use anyhow::{Result, ensure};
use baton::bench::stats::median;
use serde::Serialize;
use serde_json::{Value, json};
use text::{ModelText, SpecialTokens, Tokenizer};

use super::{HttpRequest, MeasuredRouter, RouterArgs, TICK_US};

/// Least CPU time of a measurement, in ticks of the clock: a tick is then 5 %.
const TICKS_MIN: f64 = 20.0;

/// Presents tools and renders messages as chat templates of Qwen do.
const TEMPLATE: &str = "{%- if tools %}{{- tools | tojson }}{%- endif %}
    {%- for message in messages %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endfor %}
    {{- '<|im_start|>assistant\\n' }}";

/// Text of the answers, with characters that begin tags and calls.
const PROSE: &str = "Paris has been the capital of France since the end of the 10th century. \
    For a table of n < 100 rows the loop `for i in 0..n { sum += row[i]; }` is fast enough; with \
    more rows, sort them first:\n\n1. Read each line, and split it at \" | \".\n2. Keep the rows \
    whose value is > 0, and count the others.\n\n";

/// Formats of a model, and the text around [`PROSE`] in its answers.
struct ModelFormats {
    reasoning: &'static str,
    tools: &'static str,
    answers: [SyntheticAnswer; 3],
}

/// An answer that is `before`, prose, and `after`.
struct SyntheticAnswer {
    name: &'static str,
    before: &'static str,
    after: &'static str,
    /// Whether the prose is part of a JSON string.
    is_json: bool,
    /// Field that chunks have only if a parser ran; `None` if the answer is content.
    parsed: Option<&'static str>,
}

const FORMATS: [ModelFormats; 2] = [
    ModelFormats {
        reasoning: "think",
        tools: "hermes",
        answers: [
            SyntheticAnswer {
                name: "content",
                before: "",
                after: "",
                is_json: false,
                parsed: None,
            },
            SyntheticAnswer {
                name: "reasoning",
                before: "<think>\n",
                after: "\n</think>\n\nParis.",
                is_json: false,
                parsed: Some("\"reasoning_content\":"),
            },
            SyntheticAnswer {
                name: "call",
                before: "<tool_call>\n{\"name\": \"write\", \"arguments\": {\"text\": \"",
                after: "\"}}\n</tool_call>",
                is_json: true,
                parsed: Some("\"tool_calls\":"),
            },
        ],
    },
    ModelFormats {
        reasoning: "harmony",
        tools: "harmony",
        answers: [
            SyntheticAnswer {
                name: "content",
                before: "<|channel|>final<|message|>",
                after: "",
                is_json: false,
                parsed: None,
            },
            SyntheticAnswer {
                name: "reasoning",
                before: "<|channel|>analysis<|message|>",
                after: "<|end|><|start|>assistant<|channel|>final<|message|>Paris.",
                is_json: false,
                parsed: Some("\"reasoning_content\":"),
            },
            SyntheticAnswer {
                name: "call",
                before: "<|channel|>commentary to=functions.write <|constrain|>json<|message|>\
                         {\"text\": \"",
                after: "\"}",
                is_json: true,
                parsed: Some("\"tool_calls\":"),
            },
        ],
    },
];

/// Medians of the rounds.
#[derive(Serialize)]
struct ParserReport {
    reasoning_format: &'static str,
    tool_format: &'static str,
    answer: &'static str,
    /// CPU time of the router for a token without parsers.
    without_us: f64,
    /// CPU time of the router for a token with both parsers.
    with_us: f64,
    ratio: f64,
}

pub(super) fn run(args: &RouterArgs) -> Result<()> {
    let text = ModelText::open(&args.model)?;
    let folder = tempfile::tempdir()?;
    let template = folder.path().join("chat_template.jinja");
    fs::write(&template, TEMPLATE)?;
    let router = |reasoning: &str, tools: &str| {
        let router = MeasuredRouter::start(
            args,
            &[
                ("BATON_MODEL_CHAT_TEMPLATE", template.clone().into_os_string()),
                ("BATON_MODEL_REASONING_FORMAT", OsString::from(reasoning)),
                ("BATON_MODEL_TOOL_FORMAT", OsString::from(tools)),
            ],
        )?;
        router.node.step(Duration::from_millis(args.step_ms));
        anyhow::Ok(router)
    };
    let mut reports = Vec::new();
    for ModelFormats { reasoning, tools, answers } in FORMATS {
        let without = router("none", tools)?;
        let with = router(reasoning, tools)?;
        for answer in answers {
            let tokens = answer.tokens(text.tokenizer(), args.tokens)?;
            let count = tokens.len() as u32;
            let measure = |router: &MeasuredRouter, tool_choice, is_parsed: bool| {
                router.node.answer_with(tokens.clone().into());
                let measured = router.measure(args.streams, 1, &request(count, tool_choice))?;
                if let Some(field) = answer.parsed {
                    let has_field = measured.stream.contains(field);
                    ensure!(has_field == is_parsed, "{field} in {}: {has_field}", measured.stream);
                }
                ensure!(
                    measured.cpu_us >= TICKS_MIN * TICK_US,
                    "{} µs of CPU time are too few to compare; expected more --streams or --tokens",
                    measured.cpu_us
                );
                Ok(measured.cpu_us / f64::from(args.streams * count))
            };
            let (mut without_us, mut with_us) = (Vec::new(), Vec::new());
            for _ in 0..args.rounds {
                without_us.push(measure(&without, "none", false)?);
                with_us.push(measure(&with, "auto", true)?);
            }
            let (without_us, with_us) = (median(&without_us), median(&with_us));
            reports.push(ParserReport {
                reasoning_format: reasoning,
                tool_format: tools,
                answer: answer.name,
                without_us,
                with_us,
                ratio: with_us / without_us,
            });
        }
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&reports)?);
        return Ok(());
    }
    let RouterArgs { streams, tokens, step_ms, rounds, .. } = args;
    println!(
        "CPU time of the router for a token (µs): {streams} streams with up to {tokens} tokens at {step_ms} ms a step, \
         medians of {rounds} rounds"
    );
    println!("  reasoning  tools    answer     without    with   ratio");
    for report in reports {
        let ParserReport { reasoning_format, tool_format, answer, without_us, with_us, ratio } =
            report;
        println!(
            "  {reasoning_format:9}  {tool_format:7}  {answer:9}  {without_us:7.1} {with_us:7.1}  {ratio:6.2}"
        );
    }
    Ok(())
}

/// Returns a request whose tools are offered with this `tool_choice`.
fn request(tokens: u32, tool_choice: &str) -> HttpRequest {
    let parameters: Value = json!({"type": "object", "properties": {"text": {"type": "string"}}});
    let function = json!({"name": "write", "parameters": parameters});
    let tools = json!([{"type": "function", "function": function}]);
    HttpRequest::chat_with(tokens, json!({"tools": tools, "tool_choice": tool_choice}))
}

impl SyntheticAnswer {
    /// Returns the tokens of the answer: at most `count`, with the prose as often as it fits.
    fn tokens(&self, tokenizer: &Tokenizer, count: u32) -> Result<Vec<u32>> {
        let prose = match self.is_json {
            true => json!(PROSE).to_string().trim_matches('"').to_owned(),
            false => PROSE.to_owned(),
        };
        let encode = |text: &str| tokenizer.encode(text, SpecialTokens::Parse);
        let (before, prose, after) = (encode(self.before)?, encode(&prose)?, encode(self.after)?);
        let around = before.len() + after.len();
        let repeats = (count as usize).saturating_sub(around) / prose.len();
        let count_min = around + prose.len();
        ensure!(repeats > 0, "invalid --tokens: {count}; expected at least {count_min}");
        Ok([before, prose.repeat(repeats), after].concat())
    }
}
