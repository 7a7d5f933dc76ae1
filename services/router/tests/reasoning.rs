//! The reasoning of a model: separated from the answer, counted, with tools.

mod common;

use common::{Cluster, client::text_of, encode};
use proto::v1::Thought;
use serde_json::{Value, json};

const PATH: &str = "/v1/chat/completions";

/// Returns a template in the style of Qwen 3, which removes earlier reasoning. `opening` begins the
/// answer.
fn template(opening: &str) -> String {
    let messages = "{%- if tools %}{{- '<tool_call>' + (tools | tojson) }}{%- endif %}
        {%- for message in messages %}
            {{- '<|im_start|>' + message.role + '\\n' + message.content.split('</think>')[-1] + '<|im_end|>\\n' }}
        {%- endfor %}";
    let answer =
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' + OPENING }}{%- endif %}";
    messages.to_owned() + &answer.replace("OPENING", &json!(opening).to_string())
}

fn chat(extra: Value) -> Value {
    let tool = json!({"type": "function", "function": {"name": "clock"}});
    let mut body = json!({
        "messages": [{"role": "user", "content": "What time is it?"}],
        "tools": [tool],
        "max_tokens": 200,
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// Returns reasoning, content, the number of calls and the number of reasoning tokens of an answer.
async fn parts_of(
    cluster: &Cluster,
    mut body: Value,
    stream: bool,
) -> (String, String, usize, u64) {
    let reasoning_tokens =
        |usage: &Value| usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    let text = |part: &Value| part["reasoning_content"].as_str().unwrap_or_default().to_owned();
    if stream {
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
        let chunks = cluster.client.stream(PATH, &body).await.chunks().await;
        let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
        let deltas: Vec<&Value> = choices.map(|choice| &choice["delta"]).collect();
        assert!(deltas.iter().all(|delta| delta["reasoning"] == delta["reasoning_content"]));
        let reasoning = deltas.iter().map(|delta| text(delta)).collect();
        let calls = deltas.iter().filter(|delta| delta["tool_calls"][0]["id"].is_string()).count();
        let usage = &chunks.last().unwrap()["usage"];
        return (reasoning, text_of(&chunks, 0), calls, reasoning_tokens(usage));
    }
    let answer = cluster.client.post(PATH, &body).await.json();
    let message = &answer["choices"][0]["message"];
    assert_eq!(message.get("reasoning"), message.get("reasoning_content"));
    let calls = message["tool_calls"].as_array().map_or(0, Vec::len);
    let content = message["content"].as_str().unwrap_or_default().to_owned();
    (text(message), content, calls, reasoning_tokens(&answer["usage"]))
}

#[tokio::test]
async fn usage_of_every_chunk_counts_reasoning_tokens_up_to_the_last_one() {
    let cluster =
        Cluster::start_with_template(&template("<think>\n"), "Hm.</think>\n\nNoon.").await;
    let body = chat(json!({"stream": true, "stream_options": {"continuous_usage_stats": true}}));
    let chunks = cluster.client.stream(PATH, &body).await.chunks().await;
    let counts: Vec<u64> = chunks
        .iter()
        .map(|chunk| &chunk["usage"]["completion_tokens_details"]["reasoning_tokens"])
        .map(|count| count.as_u64().unwrap())
        .collect();
    let expected = encode("Hm.</think>").len() as u64;
    assert!(counts.is_sorted() && counts.last() == Some(&expected), "{counts:?} {expected}");
}

#[tokio::test]
async fn reasoning_is_separated_from_content_and_calls() {
    let reasoning = "\nThe user\nasks.\n</think>";
    let rest = "\n\nI look.\n<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call>";
    // A prompt may end with the opening tag. Otherwise the model writes the tag, or answers at
    // once.
    for (opening, written, reasoning) in [
        ("<think>\n", reasoning.to_owned(), "The user\nasks."),
        ("", format!("<think>{reasoning}"), "The user\nasks."),
        ("<think>\n\n</think>\n\n", String::new(), ""),
    ] {
        let cluster =
            Cluster::start_with_template(&template(opening), &(written.clone() + rest)).await;
        for stream in [false, true] {
            let (its_reasoning, content, calls, tokens) =
                parts_of(&cluster, chat(json!({})), stream).await;
            assert_eq!((its_reasoning.as_str(), calls), (reasoning, 1), "{opening}");
            assert_eq!(content.trim_start(), "I look.", "{opening}");
            let expected = encode(&written).len() as u64;
            assert!(tokens.abs_diff(expected) <= u64::from(expected > 0), "{tokens} {expected}");
        }
    }
}

#[tokio::test]
async fn reasoning_that_is_cut_stays_reasoning() {
    let cluster =
        Cluster::start_with_template(&template("<think>\n"), "It asks </think>Noon.").await;
    let body = chat(json!({"max_tokens": encode("It asks").len(), "tools": null}));
    for stream in [false, true] {
        let expected = ("It asks".to_owned(), String::new(), 0, encode("It asks").len() as u64);
        assert_eq!(parts_of(&cluster, body.clone(), stream).await, expected);
    }
}

#[tokio::test]
async fn model_without_reasoning_reports_none() {
    let cluster = Cluster::start(0, 1, "<think>a</think>b").await;
    let answer = cluster.client.post(PATH, &chat(json!({"tools": null}))).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "<think>a</think>b", "{answer}");
    assert_eq!(answer["usage"].get("completion_tokens_details"), None);
}

#[tokio::test]
async fn grammar_begins_after_the_reasoning() {
    let tag = |open: Option<&str>| {
        Some(Thought {
            open: open.map(str::to_owned),
            close: "</think>".to_owned(),
            before_answer: String::new(),
            never_within: vec![],
        })
    };
    for (opening, thought) in
        [("<think>\n", tag(None)), ("", tag(Some("<think>"))), ("<think>\n\n</think>\n\n", None)]
    {
        let cluster = Cluster::start_with_template(&template(opening), "So.</think>{}").await;
        for extra in [
            json!({"tools": null, "response_format": {"type": "json_object"}}),
            json!({"tool_choice": "required"}),
        ] {
            assert_eq!(cluster.client.post(PATH, &chat(extra)).await.status, 200);
        }
        let grammars: Vec<_> =
            cluster.decode[0].calls().iter().map(|call| call.attempt.grammar.clone()).collect();
        assert!(grammars.iter().all(|it| it.as_ref().unwrap().thought == thought), "{grammars:?}");
    }
    let cluster = Cluster::start_with_template(&template("<think>\n"), "So.</think>{}").await;
    let body = json!({"tools": null, "response_format": {"type": "json_object"}});
    for stream in [false, true] {
        let (reasoning, content, ..) = parts_of(&cluster, chat(body.clone()), stream).await;
        assert_eq!((reasoning.as_str(), content.as_str()), ("So.", "{}"));
    }
}

/// A template in the style of gpt-oss.
const HARMONY: &str = "{%- if tools %}<|channel|>commentary{{ tools | tojson }}{%- endif %}
    {%- for message in messages %}
        {%- if message.thinking %}{{ '<|channel|>analysis<|message|>' + message.thinking }}{%- endif %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endfor %}<|start|>assistant";

#[tokio::test]
async fn answers_in_harmony_are_read_whatever_their_headers() {
    let cluster = Cluster::start_with_template(HARMONY, "").await;
    let path =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../text/tests/formats/reasoning_harmony.jsonl");
    let outputs = std::fs::read_to_string(path).unwrap();
    let outputs: Vec<Value> =
        outputs.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let after_start = |output: &&Value| output["prompt"].as_str().unwrap().ends_with("assistant");
    for output in outputs.iter().filter(after_start) {
        cluster.decode[0].answer_with(&encode(output["text"].as_str().unwrap()));
        for stream in [false, true] {
            let body = chat(json!({"tools": null, "max_tokens": 1000}));
            let (reasoning, content, calls, _) = parts_of(&cluster, body, stream).await;
            assert_eq!(json!([reasoning, content]), json!([output["reasoning"], output["rest"]]));
            assert_eq!(calls, 0);
        }
    }
}

#[tokio::test]
async fn calls_in_harmony_are_calls_beside_reasoning_and_content() {
    let reasoning = "<|channel|>analysis<|message|>The clock.<|end|>";
    let rest = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant \
                to=functions.clock<|channel|>commentary json<|message|>{}<|call|>";
    let cluster = Cluster::start_with_template(HARMONY, &(reasoning.to_owned() + rest)).await;
    for stream in [false, true] {
        let (its_reasoning, content, calls, tokens) =
            parts_of(&cluster, chat(json!({})), stream).await;
        assert_eq!((&*its_reasoning, &*content, calls), ("The clock.", "I look.", 1));
        let expected = encode(reasoning).len() as u64;
        assert!(tokens.abs_diff(expected) <= 1, "{tokens} {expected}");
    }
    let thought = Some(Thought {
        open: Some("<|channel|>analysis<|message|>".to_owned()),
        close: "<|end|><|start|>assistant".to_owned(),
        before_answer: "<|channel|>final<|message|>".to_owned(),
        never_within: ["<|channel|>", "<|start|>", "<|end|>"].map(str::to_owned).to_vec(),
    });
    for extra in [
        json!({"tools": null, "response_format": {"type": "json_object"}}),
        json!({"response_format": {"type": "json_object"}}),
        json!({"tool_choice": "required"}),
    ] {
        assert_eq!(cluster.client.post(PATH, &chat(extra)).await.status, 200);
        let calls = cluster.decode[0].calls();
        let grammar = calls.last().unwrap().attempt.grammar.as_ref().unwrap();
        assert_eq!(grammar.thought, thought, "{grammar:?}");
    }
}

#[tokio::test]
async fn template_that_reads_thinking_gets_the_earlier_reasoning() {
    let cluster = Cluster::start_with_template(HARMONY, "Hi").await;
    let call = json!({"type": "function", "function": {"name": "clock", "arguments": "{}"}});
    let messages = json!([
        {"role": "assistant", "content": "Yes", "reasoning_content": "So"},
        {"role": "assistant", "content": "I look.", "reasoning": "A clock.", "tool_calls": [call]},
        {"role": "tool", "content": "noon"},
    ]);
    let body = chat(json!({"messages": messages, "tools": null}));
    assert_eq!(cluster.client.post(PATH, &body).await.status, 200);
    let prompt = &cluster.decode[0].calls()[0].attempt.tokens;
    let prompt = common::model_text().tokenizer().decode(prompt, false);
    let expected = "<|channel|>analysis<|message|>So<|start|>assistant<|message|>Yes<|end|>\
                    <|channel|>analysis<|message|>A clock.\nI look.<|start|>assistant<|message|>\
                    <|end|><|start|>tool<|message|>noon<|end|><|start|>assistant";
    assert_eq!(prompt, expected);
}

#[tokio::test]
async fn effort_and_earlier_reasoning_reach_the_template() {
    let template = "{% for message in messages %}{{ message.role }}:{{ message.reasoning_content }}|\
                    {{ message.content }};{% endfor %}{{ reasoning_effort }},{{ enable_thinking }}</think>";
    let cluster = Cluster::start_with_template(template, "Hi").await;
    let answered = |name: &str| json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", name: "So"}]);
    let body = |extra: Value| {
        let mut body = chat(json!({"tools": null, "messages": answered("reasoning")}));
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let prompts = [
        (json!({}), ","),
        (json!({"messages": answered("reasoning_content")}), ","),
        (json!({"reasoning_effort": "high"}), "high,"),
        (json!({"reasoning_effort": "none"}), "none,false"),
        (
            json!({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}}),
            "none,true",
        ),
    ];
    for (index, (extra, end)) in prompts.into_iter().enumerate() {
        let answer = cluster.client.post(PATH, &body(extra)).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let prompt = &cluster.decode[0].calls()[index].attempt.tokens;
        let prompt = common::model_text().tokenizer().decode(prompt, false);
        assert_eq!(prompt.to_lowercase(), format!("user:|hi;assistant:so|yes;{end}</think>"));
    }
    for (extra, param) in [
        (json!({"reasoning_effort": "extreme"}), "reasoning_effort"),
        (json!({"messages": [{"role": "assistant", "content": "", "reasoning": 7}]}), "messages"),
    ] {
        let answer = cluster.client.post(PATH, &body(extra)).await;
        assert_eq!((answer.status.as_u16(), &answer.error()["param"]), (400, &json!(param)));
    }
}
