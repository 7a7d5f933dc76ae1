//! Features and limits of chat templates.

mod common;

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde_json::{Map, Value, json};
use text::{
    ChatTemplate, ModelText, RENDERED_BYTES_MAX, RenderRequest, TEMPLATE_FUEL, TemplateError,
};

/// Returns 26 July 2024.
fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_722_000_000)
}

fn special_tokens() -> BTreeMap<String, String> {
    BTreeMap::from([("bos_token".into(), "<s>".into()), ("eos_token".into(), "</s>".into())])
}

fn render_with(
    template: &str,
    messages: Value,
    tools: Value,
    extra: Value,
) -> Result<String, TemplateError> {
    let no_extra = Map::new();
    let request = RenderRequest {
        messages: &messages,
        tools: &tools,
        add_generation_prompt: true,
        extra: extra.as_object().unwrap_or(&no_extra),
        now: now(),
        literal: None,
    };
    ChatTemplate::new(template, special_tokens())?.render(&request)
}

fn render(template: &str) -> Result<String, TemplateError> {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    render_with(template, messages, Value::Null, Value::Null)
}

fn weather_tool() -> Value {
    json!([{"type": "function", "function": {
        "name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }}])
}

/// Header style, date, indented tools, one call per answer: like Llama 3's template.
const HEADERS: &str = r#"{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|h|>system<|/h|>\n\nToday: " + date_string + "\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|e|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|h|>tool<|/h|>\n\n' + (message.content | tojson) + '<|e|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("one call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|e|>' }}
    {%- else %}
        {{- '<|h|>' + message['role'] + '<|/h|>\n\n' + message['content'] | trim + '<|e|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|h|>assistant<|/h|>\n\n' }}
{%- endif %}
"#;

/// Tools as JSON lines, grouped tool results: like Qwen 2.5's template.
const GROUPS: &str = r#"{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
    {{- "\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"#;

#[test]
fn header_templates_render() {
    let messages = json!([
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "1", "type": "function",
             "function": {"name": "weather", "arguments": "{\"b\": 1, \"a\": \"é\"}"}},
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "{\"c\": 3}"},
    ]);
    let expected = "<s><|h|>system<|/h|>\n\nToday: 26 Jul 2024\n{\n  \"type\": \"function\",\n  \
        \"function\": {\n    \"name\": \"weather\",\n    \"parameters\": {\n      \"type\": \
        \"object\",\n      \"properties\": {\n        \"city\": {\n          \"type\": \"string\"\n        \
        }\n      }\n    }\n  }\n}Be brief.<|e|><|h|>user<|/h|>\n\nWeather?<|e|>\
        {\"name\": \"weather\", \"parameters\": {\"b\": 1, \"a\": \"é\"}}<|e|>\
        <|h|>tool<|/h|>\n\n\"{\\\"c\\\": 3}\"<|e|><|h|>assistant<|/h|>\n\n";
    assert_eq!(render_with(HEADERS, messages, weather_tool(), Value::Null).unwrap(), expected);
}

#[test]
fn large_integers_in_arguments_of_calls_keep_their_digits() {
    const INTEGER: &str = "-123456789012345678901234567890123456789012345678901234567890";
    let arguments = format!("{{\"id\": {INTEGER}, \"text\": \"{INTEGER}\"}}");
    let messages = json!([{"role": "assistant", "content": "\u{FDD1}1", "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": arguments}},
    ]}]);
    let template = "{%- set arguments = messages[0].tool_calls[0].function.arguments -%}
        {{ arguments|tojson }} {{ arguments.id }} {{ arguments }} {{ [arguments.id]|tojson }}";
    let python = format!("{{'id': {INTEGER}, 'text': '{INTEGER}'}}");
    let expected = format!("{arguments} {INTEGER} {python} [{INTEGER}]");
    let rendered = render_with(template, messages, Value::Null, Value::Null);
    assert_eq!(rendered.unwrap(), expected);
}

#[test]
fn grouping_templates_render() {
    let messages = json!([
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]);
    let expected = "<|im_start|>system\nS\n<tools>\n{\"type\": \"function\", \"function\": {\"name\": \
        \"weather\", \"parameters\": {\"type\": \"object\", \"properties\": {\"city\": {\"type\": \
        \"string\"}}}}}\n</tools><|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>user\n\
        <tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n\
        <|im_start|>assistant\n";
    assert_eq!(render_with(GROUPS, messages, weather_tool(), Value::Null).unwrap(), expected);
}

#[test]
fn extra_variables_override_those_of_the_template() {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let extra = json!({"date_string": "1 Jan 2000", "add_generation_prompt": false});
    assert_eq!(
        render_with(HEADERS, messages, Value::Null, extra).unwrap(),
        "<s><|h|>system<|/h|>\n\nToday: 1 Jan 2000\n<|e|><|h|>user<|/h|>\n\nHi<|e|>"
    );
}

#[test]
fn message_text_is_never_evaluated_as_a_template() {
    let messages = json!([{"role": "user", "content": "{{ bos_token }}{% raw %}"}]);
    assert_eq!(
        render_with("{{ messages[0].content }}", messages, Value::Null, Value::Null).unwrap(),
        "{{ bos_token }}{% raw %}"
    );
}

#[test]
fn python_methods_of_templates_are_supported() {
    for (template, expected) in [
        (
            "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n",
            "user\n",
        ),
        ("{{ ' a '.strip() }}{{ 'ab'.startswith('a') }}{{ 'a,b'.split(',')[-1] }}", "aTrueb"),
        ("{{ 'x<|y|>z'.split('<|y|>')|last }}{{ 'abc'[::-1] }}{{ 'Ab'.upper() }}", "zcbaAB"),
        (
            "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
            "role=user;content=Hi;",
        ),
        ("{{ messages[0].get('name', 'none') }}", "none"),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "013",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "1",
        ),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) }}{{ none }}{{ 1.0 }}", "[1]None1.0"),
        ("{{ tools is none }}{{ documents is none }}{{ nothing is defined }}", "TrueTrueFalse"),
        ("a{% generation %}b{%- endgeneration -%} c", "abc"),
    ] {
        assert_eq!(render(template).unwrap(), expected, "{template}");
    }
}

#[test]
fn messages_of_roles_that_the_template_does_not_name_get_a_role_that_it_knows() {
    let roles = ["developer", "system", "user", "assistant", "tool", "function", "ipython"];
    let messages: Vec<Value> =
        roles.iter().map(|role| json!({"role": role, "content": ""})).collect();
    let rendered = |template: &str| {
        render_with(template, messages.clone().into(), Value::Null, Value::Null).unwrap()
    };
    let all = "{% for m in messages %}{{ m.role }},{% endfor %}";
    assert_eq!(rendered(all), "system,system,user,assistant,tool,tool,tool,");
    let named = r#"{% if 'developer' == "function" or 'ipython' == "" %}{% endif %}"#;
    assert_eq!(
        rendered(&format!("{named}{all}")),
        "developer,system,user,assistant,tool,function,ipython,"
    );
}

#[test]
fn raise_exception_is_an_error_of_the_request() {
    let error = render("{{ raise_exception('roles must alternate') }}").unwrap_err();
    assert_eq!(error, TemplateError::Refused { reason: "roles must alternate".into() });
    assert!(error.is_requests_fault());
    // An exception inside a macro is reported, too.
    let error = render("{% macro f() %}{{ raise_exception('no') }}{% endmacro %}{{ f() }}");
    assert_eq!(error.unwrap_err(), TemplateError::Refused { reason: "no".into() });
}

#[test]
fn failure_of_a_template_that_works_is_an_error_of_the_request() {
    let template = "{% for tool in tools or [] %}{{ 'f: ' + tool.function.description }}{% endfor %}\
                    {{ messages[0].content }}";
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let error = render_with(template, messages, weather_tool(), Value::Null).unwrap_err();
    let reason = error.to_string();
    assert!(matches!(error, TemplateError::NotTaken { .. }) && error.is_requests_fault());
    assert!(reason.contains("cannot render these") && reason.contains("undefined"), "{reason}");
    // This template fails for every conversation.
    let error = render("{{ messages[5].content }}").unwrap_err();
    assert!(matches!(error, TemplateError::Failed { .. }) && !error.is_requests_fault());
}

#[test]
fn endless_templates_are_stopped() {
    let loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    let error = render(loops).unwrap_err();
    assert_eq!(error, TemplateError::OutOfFuel { limit: TEMPLATE_FUEL });
    assert!(!error.is_requests_fault());
    let in_macro = format!("{{% macro f() %}}{loops}{{% endmacro %}}{{{{ f() }}}}");
    assert_eq!(render(&in_macro), Err(TemplateError::OutOfFuel { limit: TEMPLATE_FUEL }));
    let recursion = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
    assert!(matches!(render(recursion), Err(TemplateError::Failed { .. })));
}

#[test]
fn output_beyond_the_limit_is_refused() {
    let template = "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}";
    assert_eq!(render(template), Err(TemplateError::TooLong { limit: RENDERED_BYTES_MAX }));
    let huge = "{{ 'x' * 999999999 }}";
    assert!(render(huge).is_err());
    // The text of a filter is bounded as well, also where the template does not print it.
    let mut tools = json!([vec![1; 500_000]]);
    for _ in 0..100 {
        tools = json!([tools]);
    }
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let rendered =
        render_with("{{ (tools|tojson(indent=4))|length }}", messages, tools, Value::Null);
    assert_eq!(rendered, Err(TemplateError::TooLong { limit: RENDERED_BYTES_MAX }));
}

#[test]
fn template_errors_name_the_line() {
    let error = ChatTemplate::new("a\n{% if %}", BTreeMap::new()).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("does not compile") && message.contains("line 2"), "{message}");
    let message = render("\n\n{{ messages[5].content }}").unwrap_err().to_string();
    assert!(message.contains("undefined") && message.contains("line 3"), "{message}");
    let message = render("{{ strftime_now('%Q') }}").unwrap_err().to_string();
    assert!(message.contains("strftime_now does not know %Q"), "{message}");
}

/// tokenizer.json with a single token.
const MINIMAL_TOKENIZER: &str = r#"{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "decoder": {"type": "ByteLevel"}}"#;

fn render_folder(files: &[(&str, &str)], tools: &Value) -> Result<String, TemplateError> {
    let mut all = vec![("tokenizer.json", MINIMAL_TOKENIZER)];
    all.extend(files);
    let folder = common::folder(&all);
    let model = ModelText::open(folder.path()).unwrap();
    let request = RenderRequest {
        messages: &json!([{"role": "user", "content": "Hi"}]),
        tools,
        add_generation_prompt: false,
        extra: &Map::new(),
        now: now(),
        literal: None,
    };
    model.chat_template().map_err(Clone::clone)?.render(&request)
}

#[test]
fn templates_are_found_in_every_file_of_hugging_face() {
    let (none, tools) = (&Value::Null, &weather_tool());
    let named = json!({"chat_template": [
        {"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"},
    ]})
    .to_string();
    let config = ("tokenizer_config.json", named.as_str());
    assert_eq!(render_folder(&[config], none).unwrap(), "D");
    assert_eq!(render_folder(&[config], tools).unwrap(), "T");
    let file = ("chat_template.jinja", "F");
    assert_eq!(render_folder(&[config, file], none).unwrap(), "F");
    let more = ("additional_chat_templates/tool_use.jinja", "M");
    assert_eq!(render_folder(&[file, more], tools).unwrap(), "M");
    let single =
        ("tokenizer_config.json", r#"{"chat_template": "S{{ eos_token }}", "eos_token": "a"}"#);
    assert_eq!(render_folder(&[single], none).unwrap(), "Sa");
}

#[test]
fn a_model_without_a_usable_template_still_opens() {
    assert_eq!(render_folder(&[], &Value::Null), Err(TemplateError::Missing));
    let broken = ("chat_template.jinja", "{% if %}");
    assert!(matches!(render_folder(&[broken], &Value::Null), Err(TemplateError::Syntax { .. })));
}

/// Templates, each with the text that transformers renders, or null where rendering fails. A third
/// value is Baton's text where it differs.
const TEMPLATES: &str = include_str!("fixtures/jinja.jsonl");

#[test]
fn templates_render_as_in_transformers() {
    let messages =
        json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]);
    let mut different = Vec::new();
    for line in TEMPLATES.lines() {
        let row: Vec<Option<String>> = serde_json::from_str(line).unwrap();
        let template = row[0].as_deref().unwrap();
        let found = render_with(template, messages.clone(), Value::Null, Value::Null);
        if found.as_ref().ok() != row.last().unwrap().as_ref() {
            let reason = found.as_ref().err();
            different
                .push(format!("{} {reason:?}", json!([template, row[1], found.as_ref().ok()])));
        }
    }
    assert!(different.is_empty(), "{} differ:\n{}", different.len(), different.join("\n"));
}
