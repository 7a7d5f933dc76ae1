//! Structured output of a real model through whole clusters: answers match a schema or a regular
//! expression.

use anyhow::{Context, Result, bail, ensure};
use futures_util::future::{join, try_join_all};
use integration_tests::{
    client::{Client, greedy_body},
    cluster::{Cluster, ClusterSpec, busy_node},
    golden::whole_golden,
};
use proto::v1::{
    FinishReason, GenerateOptions, GenerateRequest, Grammar, generate_request::Prompt,
    generate_response::Event, grammar::Kind, inference_client::InferenceClient,
};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const QUESTION: &str = "Describe Ada, a friend from Paris, as JSON.";

/// Returns a schema with bounded strings, lists and numbers, so that every answer ends.
fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "bc", "déf"]}, "maxItems": 3},
            "home": {"$ref": "#/$defs/home"},
        },
        "required": ["name", "age", "tags", "home"],
        "additionalProperties": false,
        "$defs": {"home": {
            "type": "object",
            "properties": {
                "open": {"type": "boolean"},
                "floor": {"type": ["integer", "null"], "minimum": -9, "maximum": 99},
            },
            "required": ["open", "floor"],
            "additionalProperties": false,
        }},
    })
}

/// Validates the keywords that these tests use.
fn validate(root: &Value, schema: &Value, value: &Value) -> Result<()> {
    for (keyword, rule) in schema.as_object().context("a schema is an object")? {
        let most = rule.as_u64().unwrap_or(0) as usize;
        let holds = match (keyword.as_str(), value) {
            ("type", _) => match rule.as_array() {
                Some(kinds) => kinds.iter().any(|kind| is_of(kind, value)),
                None => is_of(rule, value),
            },
            ("enum", _) => rule.as_array().context("a list")?.contains(value),
            ("minimum", Value::Number(number)) => number.as_f64() >= rule.as_f64(),
            ("maximum", Value::Number(number)) => number.as_f64() <= rule.as_f64(),
            ("maxLength", Value::String(text)) => text.chars().count() <= most,
            ("maxItems", Value::Array(items)) => items.len() <= most,
            ("items", Value::Array(items)) => {
                items.iter().all(|item| validate(root, rule, item).is_ok())
            }
            ("required", Value::Object(object)) => {
                let mut names = rule.as_array().context("a list")?.iter();
                names.all(|name| object.contains_key(name.as_str().unwrap_or_default()))
            }
            // Objects reject additional properties.
            ("properties", Value::Object(object)) => object.iter().all(|(name, value)| {
                rule.get(name).is_some_and(|schema| validate(root, schema, value).is_ok())
            }),
            ("$ref", _) => {
                let path = rule.as_str().unwrap_or_default().trim_start_matches('#');
                validate(root, root.pointer(path).context("a definition")?, value).is_ok()
            }
            ("additionalProperties" | "$defs", _) => true,
            ("minimum" | "maximum" | "maxLength" | "maxItems" | "items", _) => true,
            ("required" | "properties", _) => true,
            (other, _) => bail!("the keyword {other} is not known here"),
        };
        ensure!(holds, "{value} is not as {keyword} {rule} says");
    }
    Ok(())
}

fn is_of(kind: &Value, value: &Value) -> bool {
    match kind.as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("boolean") => value.is_boolean(),
        Some("null") => value.is_null(),
        _ => false,
    }
}

fn response_format(schema: Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}})
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn chat(question: &str, more: Value) -> Value {
    let messages = json!([{"role": "user", "content": question}]);
    with(json!({"messages": messages, "max_tokens": 200, "temperature": 0}), more)
}

/// Returns the text and the finish reason.
async fn ask(client: &Client, body: &Value, stream: bool) -> Result<(String, String)> {
    let body = with(body.clone(), json!({"stream": stream}));
    let text_of = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    if !stream {
        let answer = client.post(CHAT, &body).await?;
        ensure!(answer.status == 200, "{}", answer.json());
        let choice = &answer.json()["choices"][0];
        return Ok((text_of(&choice["message"]["content"]), text_of(&choice["finish_reason"])));
    }
    let (mut text, mut reason) = (String::new(), String::new());
    for event in client.stream(CHAT, &body).await?.all().await? {
        if !event.is_done() {
            let event = event.json();
            ensure!(event["error"].is_null(), "{event}");
            text += &text_of(&event["choices"][0]["delta"]["content"]);
            reason += &text_of(&event["choices"][0]["finish_reason"]);
        }
    }
    Ok((text, reason))
}

#[tokio::test]
async fn answers_match_their_schema_or_expression_streamed_and_whole() -> Result<()> {
    let (cluster, client) = Cluster::start_with_client(ClusterSpec::whole_smollm2()).await?;
    let number = json!({"type": "integer", "minimum": 1, "maximum": 999});
    let schemas = [
        person(),
        json!({"type": "array", "items": number, "maxItems": 4}),
        json!({"enum": ["Paris", "London", 7, null]}),
        person()["$defs"]["home"].clone(),
    ];
    for schema in schemas {
        for (temperature, stream) in [(0.0, false), (0.0, true), (1.5, true), (1.5, false)] {
            let format = response_format(schema.clone());
            let more = json!({"response_format": format, "temperature": temperature, "seed": 5});
            let (text, reason) = ask(&client, &chat(QUESTION, more), stream).await?;
            assert_eq!(reason, "stop", "{text}");
            let value: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
            validate(&schema, &schema, &value)?;
        }
    }
    let regex = "\\+[0-9]{2} [0-9]{3}-[0-9]{4}( ext\\. [0-9])?";
    for stream in [false, true] {
        let (text, reason) =
            ask(&client, &chat("Call me.", json!({"regex": regex})), stream).await?;
        assert_eq!(reason, "stop");
        let shape: String =
            text.chars().map(|char| if char.is_ascii_digit() { '9' } else { char }).collect();
        assert!(["+99 999-9999", "+99 999-9999 ext. 9"].contains(&shape.as_str()), "{text}");
    }
    // The answer is a single token, so the prefill node finishes the request.
    let long = format!("{} Yes or no?", "It may rain. ".repeat(20));
    let (text, reason) = ask(&client, &chat(&long, json!({"regex": "yes|no"})), true).await?;
    assert!(["yes", "no"].contains(&text.as_str()) && reason == "stop", "{text} {reason}");
    let object = json!({"response_format": {"type": "json_object"}, "max_tokens": 120});
    let (text, reason) = ask(&client, &chat("Give me a JSON object.", object), true).await?;
    match reason.as_str() {
        "stop" => assert!(serde_json::from_str::<Value>(&text)?.is_object(), "{text}"),
        _ => assert!(text.starts_with('{'), "{text}"),
    }
    cluster.stop()
}

#[tokio::test]
async fn max_tokens_stop_strings_and_ignore_eos_combine_with_a_schema() -> Result<()> {
    let (cluster, client) = Cluster::start_with_client(ClusterSpec::whole_smollm2()).await?;
    let whole = chat(QUESTION, json!({"response_format": response_format(person())}));
    let (text, _) = ask(&client, &whole, false).await?;
    // With a smaller `max_tokens` the answer is a prefix of the full answer.
    let short = with(whole.clone(), json!({"max_tokens": 7}));
    let (cut, reason) = ask(&client, &short, true).await?;
    assert_eq!(reason, "length");
    assert!(text.starts_with(&cut) && !cut.is_empty(), "{cut} of {text}");
    // A stop string ends the answer early.
    let stopping = with(whole.clone(), json!({"stop": "\"age\""}));
    let (stopped, reason) = ask(&client, &stopping, true).await?;
    assert_eq!(reason, "stop");
    assert_eq!(stopped, text[..text.find("\"age\"").context("the text has an age")?]);
    // Neither option continues a complete answer.
    for more in [json!({"min_tokens": 150}), json!({"ignore_eos": true})] {
        let (same, reason) = ask(&client, &with(whole.clone(), more.clone()), false).await?;
        assert_eq!((&same, reason.as_str()), (&text, "stop"), "{more}");
    }
    // An allowed end of sequence is ignored.
    let endless = chat("Count.", json!({"regex": "[0-9]{1,30}", "ignore_eos": true}));
    assert_eq!(ask(&client, &endless, false).await?.0.len(), 30);
    // Penalties and sampling stay within the schema, and log-probabilities belong to the sampled
    // tokens.
    let drawn = json!({"logprobs": true, "top_logprobs": 2, "temperature": 0.8, "top_k": 5,
        "top_p": 0.9, "frequency_penalty": 1.5, "presence_penalty": 1.0, "n": 3, "seed": 11,
        "max_tokens": 400});
    let answer = client.post(CHAT, &with(whole, drawn)).await?;
    assert_eq!(answer.status, 200, "{}", answer.json());
    for choice in answer.json()["choices"].as_array().context("choices")? {
        let text = choice["message"]["content"].as_str().context("a text")?;
        let value = serde_json::from_str(text).with_context(|| text.to_owned())?;
        validate(&person(), &person(), &value)?;
        let logprobs = choice["logprobs"]["content"].as_array().context("logprobs")?;
        let tokens = logprobs.iter().map(|entry| entry["token"].as_str().unwrap_or_default());
        assert!(tokens.collect::<String>().starts_with('{'));
    }
    cluster.stop()
}

/// Returns a request with a long prompt, so that its KV is transferred.
fn long_body(more: Value) -> Value {
    let format = response_format(person());
    let asked = json!({"response_format": format, "ignore_eos": false});
    with(with(greedy_body(&whole_golden().longest().prompt_ids, 120), asked), more)
}

#[tokio::test]
async fn forced_retry_resumes_inside_the_grammar() -> Result<()> {
    let mut whole = None;
    for kill_after in [None, Some(0), Some(1), Some(9)] {
        let (mut cluster, client) =
            Cluster::start_with_client(ClusterSpec::whole_smollm2().nodes(1, 2)).await?;
        let headers = [("x-baton-stats", "1")];
        let mut stream =
            client.stream_with("/v1/completions", &long_body(json!({})), &headers).await?;
        let (mut found, mut attempts, mut kv_bytes, mut killed) = (Vec::new(), 0, 0, false);
        while let Some(event) = stream.next().await? {
            found.extend(event.token_ids());
            if !killed && kill_after.is_some_and(|count| found.len() > count) {
                killed = true;
                let serving = busy_node(&cluster.decode).await?;
                cluster.decode[serving].kill();
            }
            if !event.is_done() {
                let event = event.json();
                assert!(event["error"].is_null(), "{event}");
                attempts = event["baton"]["attempts"].as_u64().unwrap_or(attempts);
                kv_bytes = event["baton"]["kv_bytes"].as_u64().unwrap_or(kv_bytes);
            }
        }
        // A killed node may have been receiving KV; the next decode node may prefill the prompt
        // itself.
        assert!(kv_bytes > 0 || kill_after.is_some(), "no KV was transferred");
        let expected = whole.get_or_insert_with(|| found.clone());
        assert_eq!(&found, expected, "killed after {kill_after:?}");
        assert!(found.len() > 15, "{found:?}");
        assert!(attempts > u64::from(kill_after.is_some()), "{kill_after:?}: {attempts}");
    }
    Ok(())
}

#[tokio::test]
async fn mixed_batch_matches_single_requests_with_and_without_speculative_decoding() -> Result<()> {
    let mut first = None;
    for speculate in ["off", "ngram"] {
        let spec = ClusterSpec::whole_smollm2().set("BATON_NODE_SPECULATE", speculate);
        let (cluster, client) = Cluster::start_with_client(spec).await?;
        let constrained = async |salt: &str| {
            let body = long_body(json!({"cache_salt": salt}));
            client.stream("/v1/completions", &body).await?.token_ids().await
        };
        let alone = constrained("alone").await?;
        assert_eq!(first.get_or_insert_with(|| alone.clone()), &alone, "{speculate}");
        let runs = whole_golden().runs;
        let plain = runs.iter().map(|run| client.greedy(&run.prompt_ids, run.output_ids.len()));
        let beside = ["x", "y", "z"].into_iter().map(constrained);
        let (plain, beside) = join(try_join_all(plain), try_join_all(beside)).await;
        for (run, found) in runs.iter().zip(plain?) {
            assert_eq!(found, run.output_ids, "{} beside grammars, {speculate}", run.name);
        }
        assert!(beside?.iter().all(|found| *found == alone), "{speculate}");
        cluster.stop()?;
    }
    Ok(())
}

#[tokio::test]
async fn hostile_grammars_are_rejected_with_their_field_and_disturb_no_request() -> Result<()> {
    let (cluster, client) = Cluster::start_with_client(ClusterSpec::whole_smollm2()).await?;
    let nested = (0..60).fold(json!(true), |inner, _| json!({"type": "array", "items": inner}));
    let names = (0..3000).map(|index| (format!("key_{index:020}"), json!({"type": "string"})));
    let wide: Value = names.collect();
    let schema = "response_format.json_schema.schema";
    let no = "is not supported";
    let cases = [
        (schema, response_format(nested), "nests 60 deep; allowed: at most 32"),
        (schema, response_format(json!({"enum": ["x".repeat(70_000)]})), "at most 65536"),
        (schema, response_format(json!({"type": "object", "properties": wide})), "at most 65536"),
        (schema, response_format(json!({"type": "strange"})), no),
        (schema, response_format(json!({"$ref": "https://example.com/schema"})), no),
        (schema, response_format(json!({"$ref": "#/$defs/missing"})), no),
        (schema, response_format(json!({"type": "string", "pattern": "a(b"})), no),
        (schema, response_format(json!({"type": "object", "uniqueKeys": 7, "not": {}})), no),
        (schema, response_format(json!(7)), "is not an object"),
        ("regex", json!("a".repeat(20_000)), "at most 16384"),
        ("regex", json!(format!("{}x{}", "(".repeat(300), ")".repeat(300))), "nest"),
        ("regex", json!("[z-a]"), "invalid character class range"),
        ("regex", json!("(?=x)y"), "look-around"),
    ];
    for (field, value, words) in cases {
        let name = field.split('.').next().unwrap_or(field);
        let answer = client.post(CHAT, &chat("Hi.", json!({name: value}))).await?;
        let error = &answer.json()["error"];
        assert_eq!(answer.status, 400, "{field} {words}: {}", answer.json());
        assert_eq!(error["param"], field, "{error}");
        let message = error["message"].as_str().context("a message")?;
        assert!(message.starts_with(field) && message.contains(words), "{message}");
        assert!(message.len() < 400, "{message}");
    }
    // Expensive grammars end with an answer or with one typed error, and do not disturb other
    // requests.
    let kinds = (0..150).map(
        |index| json!({"type": "object", "properties": {format!("k{index}"): {"type": "string"}}}),
    );
    let any = json!({"type": "array", "items": {"anyOf": kinds.collect::<Vec<_>>()}});
    let costly = [
        json!({"regex": "((a|b|c|d|e)*(a|b|c|d|e)*){0,20}x"}),
        json!({"regex": "(.{0,300}){3}z"}),
        json!({"regex": "(a{1000}){1000}"}),
        json!({"response_format": response_format(any)}),
    ];
    let run = whole_golden().longest();
    for body in costly {
        let body = chat("Hi.", with(body, json!({"max_tokens": 20})));
        let neighbour = client.greedy(&run.prompt_ids, run.output_ids.len());
        let (answer, found) = join(client.post(CHAT, &body), neighbour).await;
        assert_eq!(found?, run.output_ids);
        let answer = answer?;
        assert!([200, 400].contains(&answer.status.as_u16()), "{}", answer.json());
    }
    let (text, _) = ask(&client, &chat("Yes or no?", json!({"regex": "yes|no"})), false).await?;
    assert!(["yes", "no"].contains(&text.as_str()));
    cluster.stop()
}

#[tokio::test]
async fn grpc_accepts_a_grammar() -> Result<()> {
    let cluster = Cluster::start(ClusterSpec::whole_smollm2()).await?;
    let mut client = InferenceClient::connect(cluster.grpc()).await?;
    let request = |kind| {
        let options = GenerateOptions {
            max_tokens: Some(60),
            temperature: Some(0.0),
            grammar: Some(Grammar { kind, thought: None }),
            ..Default::default()
        };
        let prompt = Some(Prompt::Text("The answer:".into()));
        GenerateRequest { prompt, options: Some(options), ..Default::default() }
    };
    let schema = r#"{"type":"array","items":{"type":"integer","maximum":99},"maxItems":3}"#;
    let kind = Some(Kind::JsonSchema(schema.into()));
    let mut events = client.generate(request(kind)).await?.into_inner();
    let mut text = String::new();
    while let Some(response) = events.message().await? {
        match response.event.context("an event")? {
            Event::Tokens(tokens) => text += &tokens.text,
            Event::Finished(finished) => {
                text += &finished.text;
                assert_eq!(finished.reason(), FinishReason::Stop);
            }
        }
    }
    let numbers: Vec<i64> = serde_json::from_str(&text).with_context(|| text.clone())?;
    assert!(numbers.len() <= 3 && numbers.iter().all(|number| *number <= 99), "{text}");
    for (kind, words) in [
        (Some(Kind::Regex("a(".into())), "options.grammar.regex is not a regular expression"),
        (Some(Kind::JsonSchema("{".into())), "options.grammar.json_schema is not a JSON schema"),
        (None, "options.grammar has no kind"),
    ] {
        let status = client.generate(request(kind)).await.expect_err(words);
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert!(status.message().contains(words), "{}", status.message());
    }
    cluster.stop()
}
