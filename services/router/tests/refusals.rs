//! Each kind of invalid request is rejected with a specific error, in OpenAI's error object.

mod common;

use std::{io::Write, time::Duration};

use common::{
    Cluster,
    client::{Answer, DEADLINE, eventually},
    long_prompt,
    node::{Behaviour, VOCABULARY},
    settings,
};
use flate2::{Compression, write::GzEncoder};
use http::Method;
use http_body_util::BodyExt;
use proto::v1::FailureKind;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const ANSWER: &str = " fine";
const PATHS: [&str; 2] = ["/v1/completions", "/v1/chat/completions"];

/// Returns a valid request for either path.
fn good(path: &str) -> Value {
    if path.contains("chat") {
        json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3})
    } else {
        json!({"prompt": "hello", "max_tokens": 3})
    }
}

/// Asserts that the error object is complete, names the field, and that its message contains the
/// words.
fn check(answer: &Answer, status: u16, param: Option<&str>, words: &[&str]) {
    let error = answer.error();
    assert_eq!(answer.status, status, "{error}");
    assert_eq!(error["param"], json!(param), "{error}");
    assert!(error["type"].is_string() && error["code"].is_string(), "{error}");
    assert!(answer.headers.contains_key("x-request-id"));
    for word in words {
        assert!(answer.message().contains(word), "{error} lacks {word:?}");
    }
}

#[tokio::test]
async fn invalid_field_is_rejected_with_its_value_and_the_allowed_ones() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    for (field, value, words) in [
        ("max_tokens", json!(-2), &["-2", "1 to 2147483647"][..]),
        ("max_tokens", json!(0), &["is 0"]),
        ("max_tokens", json!("many"), &["\"many\""]),
        ("max_tokens", json!(1e30), &["1e+30", "whole number"]),
        ("max_tokens", json!(2.5), &["2.5"]),
        ("max_tokens", json!(100_000), &["100000", "2048", "at most"]),
        ("min_tokens", json!(4), &["at most max_tokens, 3"]),
        ("min_tokens", json!(-4), &["-4"]),
        ("temperature", json!(-0.5), &["-0.5", "0 to 2"]),
        ("temperature", json!(9), &["9"]),
        ("temperature", json!("hot"), &["\"hot\""]),
        ("temperature", json!([1]), &["[1]"]),
        ("top_p", json!(1.5), &["1.5"]),
        ("top_p", json!(0), &["is 0"]),
        ("min_p", json!(2), &["0 to 1"]),
        ("top_k", json!(-7), &["-7"]),
        ("top_k", json!(1.5), &["1.5"]),
        ("presence_penalty", json!(99), &["-2 to 2"]),
        ("frequency_penalty", json!(-99), &["-99"]),
        ("repetition_penalty", json!(0), &["is 0"]),
        ("n", json!(0), &["1 to 128"]),
        ("n", json!(100_000), &["100000"]),
        ("best_of", json!(3), &["n, which is 1"]),
        ("seed", json!("x"), &["\"x\""]),
        ("seed", json!(1e300), &["1e+300"]),
        ("stop", json!([1, 2]), &["[1,2]"]),
        ("stop", json!(vec!["x"; 10_000]), &["10000 strings", "at most 32"]),
        ("stop", json!("y".repeat(100_000)), &["100000 bytes"]),
        ("stop", json!([""]), &["empty"]),
        ("stop_token_ids", json!("2"), &["list of token ids"]),
        ("stop_token_ids", json!([-1]), &["[-1]"]),
        ("stop_token_ids", json!([VOCABULARY]), &["49152"]),
        ("stop_token_ids", json!(vec![1; 1000]), &["1000 ids"]),
        ("logprobs", json!("all"), &["\"all\""]),
        ("stream", json!("yes"), &["true or false"]),
        ("stream_options", json!({"include_usage": true}), &["only with stream"]),
        ("ignore_eos", json!(1), &["true or false"]),
        ("return_token_ids", json!("x"), &["true or false"]),
        ("cache_salt", json!("s".repeat(300)), &["300 bytes"]),
        ("model", json!(7), &["a string"]),
        ("logit_bias", json!([5]), &["an object from token ids to numbers"]),
        ("logit_bias", json!({"five": 1}), &["key", "token ids"]),
        ("logit_bias", json!({"5": 1, "05": 2}), &["the token 5 twice"]),
        ("logit_bias", json!({"5": 101}), &["has 101", "-100 to 100"]),
        ("logit_bias", json!({"49152": 1}), &["49152", "ids below 49152"]),
        ("allowed_token_ids", json!("5"), &["a list of token ids"]),
        ("allowed_token_ids", json!([VOCABULARY]), &["49152", "ids below 49152"]),
        ("allowed_token_ids", json!(vec![1; 20_000]), &["20000 ids", "at most 16384"]),
        ("bad_words", json!("x"), &["a list of texts"]),
        ("bad_words", json!([" "]), &["an empty text"]),
        ("bad_words", json!(["x".repeat(5000)]), &["5000 bytes", "at most 4096"]),
        ("truncate_prompt_tokens", json!(0), &["is 0", "-1, or a whole number from 1"]),
        ("truncate_prompt_tokens", json!(-2), &["is -2"]),
        ("priority", json!("high"), &["a whole number"]),
        ("prompt_logprobs", json!(21), &["0 to 20"]),
        ("response_format", json!({"type": "yaml"}), &["json_schema"]),
        ("regex", json!("a(b"), &["unclosed group at byte 1"]),
        ("guided_regex", json!(7), &["a string"]),
        ("structured_outputs", json!({"choices": ["a"]}), &["json_object"]),
        ("guided_choice", json!([]), &["at least one text"]),
        ("guided_grammar", json!("root ::= [a"), &["is not a grammar: expected ] in line 1"]),
        ("guided_grammar", json!("start: @x"), &["@ is not allowed outside of literals"]),
    ] {
        for path in PATHS {
            let mut body = good(path);
            body[field] = value.clone();
            let answer = cluster.client.post(path, &body).await;
            check(&answer, 400, Some(field), words);
            assert!(answer.message().starts_with(field), "{}", answer.message());
        }
    }
    // No node received a request.
    assert!(cluster.decode[0].calls().is_empty() && cluster.prefill[0].calls().is_empty());
    for path in PATHS {
        assert_eq!(cluster.client.post(path, &good(path)).await.status, 200);
    }
}

#[tokio::test]
async fn unservable_prompts_are_rejected_with_the_reason() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let long: Vec<u32> = vec![5; 9000];
    let text = "word ".repeat(100_000);
    for (prompt, words) in [
        (json!(null), &["missing"][..]),
        (json!(""), &["empty"]),
        (json!([]), &["empty"]),
        (json!([""]), &["empty"]),
        (json!([[]]), &["empty"]),
        (json!(long), &["9000", "at most 2047"]),
        (json!(text), &["at most 2047"]),
        (json!([1, VOCABULARY]), &["49152 at index 1"]),
        (json!([-1]), &["-1"]),
        (json!({"a": 1}), &["an object", "token ids"]),
        (json!(3.5), &["3.5"]),
        (json!([1, "a"]), &["string, expected a token id"]),
        (json!(vec!["a"; 1000]), &["1000 prompts", "at most 128"]),
    ] {
        let answer = cluster.client.post("/v1/completions", &json!({"prompt": prompt})).await;
        check(&answer, 400, Some("prompt"), words);
    }
    for (messages, words) in [
        (json!(null), &["missing"][..]),
        (json!([]), &["empty"]),
        (json!("hi"), &["list of messages"]),
        (json!({"role": "user"}), &["list of messages"]),
    ] {
        let answer =
            cluster.client.post("/v1/chat/completions", &json!({"messages": messages})).await;
        check(&answer, 400, Some("messages"), words);
    }
    for (message, words) in [
        (json!("hi"), &["messages[0]"][..]),
        (json!({"content": "hi"}), &["messages[0].role", "missing"]),
        (json!({"role": 5, "content": "hi"}), &["role"]),
        (json!({"role": "user", "content": 7}), &["content"]),
        (
            json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
            &["image_url"],
        ),
    ] {
        let answer =
            cluster.client.post("/v1/chat/completions", &json!({"messages": [message]})).await;
        check(&answer, 400, Some("messages"), words);
    }
    let long_chat = json!({"messages": [{"role": "user", "content": text}]});
    let answer = cluster.client.post("/v1/chat/completions", &long_chat).await;
    check(&answer, 400, Some("messages"), &["at most 2047"]);
    for (field, value) in [
        ("tools", json!([{"type": "function", "function": {"name": "f"}}])),
        ("chat_template", json!("{{ 1 }}")),
        ("top_logprobs", json!(5)),
        ("chat_template_kwargs", json!([1])),
        ("modalities", json!(["audio"])),
    ] {
        let mut body = good("/v1/chat/completions");
        body[field] = value;
        let answer = cluster.client.post("/v1/chat/completions", &body).await;
        check(&answer, 400, Some(field), &[field]);
    }
}

#[tokio::test]
async fn reserved_template_variables_are_rejected_by_name() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    for name in ["messages", "tools", "documents", "add_generation_prompt", "bos_token"] {
        let mut body = good("/v1/chat/completions");
        body["chat_template_kwargs"] = json!({"enable_thinking": false, name: "mine"});
        let answer = cluster.client.post("/v1/chat/completions", &body).await;
        let param = format!("chat_template_kwargs.{name}");
        check(&answer, 400, Some(&param), &[&param, "allowed"]);
    }
    assert!(cluster.decode[0].calls().is_empty());
    let mut body = good("/v1/chat/completions");
    body["chat_template_kwargs"] = json!({"enable_thinking": false});
    assert_eq!(cluster.client.post("/v1/chat/completions", &body).await.status, 200);
}

#[tokio::test]
async fn invalid_bodies_are_rejected_with_the_position() {
    let mut settings = settings();
    settings.router.body_bytes_max = config::ByteSize::mib(1);
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    for path in PATHS {
        for (body, words) in [
            (&b"{\"prompt\": \"hi\""[..], "line 1, column 15"),
            (b"{\"prompt\":\n tru}", "line 2"),
            (b"[]", "JSON"),
            (b"\"text\"", "JSON"),
            (b"{\"prompt\": \"\xff\xfe\"}", "UTF-8: invalid byte at offset 12"),
            (b"", "empty"),
            (b"{\"prompt\": \"hi\"} trailing", "JSON"),
            (b"\x00\x01\x02", "JSON"),
        ] {
            let answer = cluster.client.post_bytes(path, body).await;
            check(&answer, 400, None, &[words]);
            assert_eq!(answer.error()["type"], "invalid_request_error");
        }
        let deep = format!("{{\"prompt\": {}1{}}}", "[".repeat(5000), "]".repeat(5000));
        let answer = cluster.client.send(Method::POST, path, &[], deep).await;
        assert_eq!(answer.status(), 400);
        let big = vec![b' '; 3 << 20];
        let answer = cluster.client.send(Method::POST, path, &[], big).await;
        assert_eq!(answer.status(), 413);
    }
    let answer = cluster.client.get("/v1/nothing").await;
    assert_eq!((answer.status.as_u16(), answer.message().contains("/v1/nothing")), (404, true));
    let answer = cluster.client.get("/v1/completions").await;
    assert_eq!((answer.status.as_u16(), answer.message().contains("POST")), (405, true));
    assert_eq!(answer.headers["allow"], "POST");
}

#[tokio::test]
async fn invalid_parts_of_a_body_are_rejected_with_their_path_and_cause() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let deep = format!("{}{}", "[".repeat(130), "]".repeat(130));
    let message = |content: &str| {
        format!(r#"{{"messages": [{{"role": "user", "content": {content}}}], "max_tokens": 2}}"#)
    };
    let with =
        |field: &str| format!(r#"{{"messages": [{{"role": "user", "content": "x"}}], {field}}}"#);
    let long = "x".repeat(2000);
    for (body, param, words) in [
        (
            message(r#""cut emoji \ud83d here""#),
            "messages",
            &["messages[0].content", "hex escape"][..],
        ),
        (message(r#""\udc00""#), "messages", &["messages[0].content", "surrogate"]),
        (message(&deep), "messages", &["messages[0].content[0]", "127 levels"]),
        (with(&format!(r#""tools": {deep}"#)), "tools", &["tools[0]", "127 levels"]),
        (with(r#""stop": "\ud83d""#), "stop", &["hex escape"]),
        (
            with(&format!(r#""stop": ["{long}", 1]"#)),
            "stop",
            &["stop[1]", "integer `1`", "a list of strings"],
        ),
        (
            with(&format!(
                r#""stream": true, "stream_options": {{"x": "{long}", "include_usage": 1}}"#
            )),
            "stream_options",
            &["stream_options.include_usage", "integer `1`"],
        ),
        (
            with(&format!(r#""response_format": {{"type": "yaml", "json_schema": "{long}"}}"#)),
            "response_format",
            &["type that is \"yaml\""],
        ),
        (
            with(&format!(r#""response_format": {{"typ": "text", "json_schema": "{long}"}}"#)),
            "response_format",
            &["missing field `type`"],
        ),
        (
            with(&format!(r#""structured_outputs": {{"regex": "{long}", "choices": []}}"#)),
            "structured_outputs",
            &["unknown field `choices`"],
        ),
    ] {
        let answer = cluster.client.post_bytes(PATHS[1], body).await;
        check(&answer, 400, Some(param), words);
        assert!(answer.message().len() < 500, "{}", answer.message());
    }
    let prompts = format!(r#"{{"prompt": ["{long}", "\ud83d"]}}"#);
    let answer = cluster.client.post_bytes(PATHS[0], prompts).await;
    check(&answer, 400, Some("prompt"), &["prompt[1]", "hex escape"]);
}

#[tokio::test]
async fn an_unknown_model_is_not_found() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    for path in PATHS {
        let mut body = good(path);
        body["model"] = json!("nobody");
        let answer = cluster.client.post(path, &body).await;
        check(&answer, 404, Some("model"), &["nobody", "scripted"]);
        assert_eq!(answer.error()["code"], "model_not_found");
        body["model"] = json!("scripted");
        assert_eq!(cluster.client.post(path, &body).await.status, 200);
    }
}

#[tokio::test]
async fn excess_requests_are_rejected_with_retry_after() {
    let mut settings = settings();
    settings.router.requests_max = 2;
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::HangAfter(1));
    let body = json!({"prompt": long_prompt(), "max_tokens": 50, "stream": true});
    let mut streams = Vec::new();
    for _ in 0..2 {
        streams.push(cluster.client.stream("/v1/completions", &body).await);
    }
    let answer = cluster.client.post("/v1/completions", &body).await;
    check(&answer, 503, None, &["2 requests"]);
    assert_eq!(answer.error()["code"], "overloaded");
    assert_eq!(answer.headers["retry-after"], "1");
    // A request for more choices than `requests_max` is invalid, not an overload.
    let answer = cluster.client.post("/v1/completions", &json!({"prompt": "a", "n": 3})).await;
    check(&answer, 400, Some("n"), &["at most 2"]);
    drop(streams);
    cluster.decode[0].behave(Behaviour::Serve);
    common::client::eventually("no request is running", async || {
        cluster.client.get("/health").await.json()["requests_running"] == 0
    })
    .await;
    let body = json!({"prompt": long_prompt(), "max_tokens": 5});
    assert_eq!(cluster.client.post("/v1/completions", &body).await.status, 200);
}

#[tokio::test]
async fn requests_without_a_decode_node_get_retry_after_at_their_deadline() {
    let mut settings = settings();
    settings.router.timeout = Duration::from_secs(2);
    let mut cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    cluster.decode[0].kill();
    cluster.wait_nodes(1, 0).await;
    let answer = cluster.client.post("/v1/completions", &good("/v1/completions")).await;
    check(&answer, 503, None, &["no decode node"]);
    assert!(answer.headers.contains_key("retry-after"));
}

#[tokio::test]
async fn a_request_that_takes_too_long_ends_with_one_error() {
    let mut settings = settings();
    // Enough time to reach the nodes on a busy machine.
    settings.router.timeout = Duration::from_secs(2);
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::HangAfter(0));
    cluster.prefill[0].behave(Behaviour::HangAfter(0));
    let body = json!({"prompt": long_prompt(), "max_tokens": 5});
    let answer = cluster.client.post("/v1/completions", &body).await;
    check(&answer, 504, None, &["2000 ms"]);
    let remaining = cluster.decode[0].calls()[0].attempt.remaining_ms;
    assert!((1..=2000).contains(&remaining), "{remaining}");

    // In a stream the error is the last event.
    cluster.decode[0].behave(Behaviour::HangAfter(1));
    cluster.prefill[0].behave(Behaviour::Serve);
    let body = json!({"prompt": long_prompt(), "max_tokens": 5, "stream": true});
    let events = cluster.client.stream("/v1/completions", &body).await.all().await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "deadline_exceeded", "{events:?}");
    assert!(events.len() >= 2 && !events.contains(&"[DONE]".to_owned()));
}

#[tokio::test]
async fn deadline_of_the_header_is_checked_and_applied() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::HangAfter(0));
    let body = json!({"prompt": long_prompt(), "max_tokens": 5});
    let ask = async |value: &str| {
        let headers = [("x-baton-deadline-ms", value)];
        cluster.client.post_with("/v1/completions", &headers, &body).await
    };
    for value in ["0", "-1", "soon", "3600001", "1.5"] {
        let param = Some("x-baton-deadline-ms");
        check(&ask(value).await, 400, param, &[value, "1 to 3600000"]);
    }
    check(&ask("700").await, 504, None, &["700 ms"]);
    assert!(cluster.decode[0].calls()[0].attempt.remaining_ms <= 700);
}

#[tokio::test]
async fn session_of_the_headers_is_checked_and_reaches_nodes() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let body = json!({"prompt": long_prompt(), "max_tokens": 2});
    let ask = async |name: &str, value: &str| {
        cluster.client.post_with("/v1/completions", &[(name, value)], &body).await
    };
    let long = "s".repeat(257);
    let refused = ask("x-baton-session", &long).await;
    check(&refused, 400, Some("x-baton-session"), &["257 bytes", "at most 256"]);
    for value in ["-1", "soon", "600001", "1.5", ""] {
        let refused = ask("x-baton-keep-ms", value).await;
        check(&refused, 400, Some("x-baton-keep-ms"), &[value, "0 to 600000"]);
    }
    assert_eq!(cluster.decode[0].calls().len(), 0);
    for (name, value) in
        [("x-baton-session", &long[..256]), ("x-baton-keep-ms", "600000"), ("x-request-id", "a")]
    {
        assert_eq!(ask(name, value).await.status.as_u16(), 200);
    }
    let calls = cluster.decode[0].calls().into_iter();
    let sessions: Vec<_> = calls.map(|it| (it.attempt.session, it.attempt.keep_ms)).collect();
    let none = String::new();
    assert_eq!(sessions, [(long[..256].into(), None), (none.clone(), Some(600_000)), (none, None)]);
}

#[tokio::test]
async fn oversized_session_header_is_rejected_and_router_keeps_serving() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let mut stream = TcpStream::connect(cluster.router.http).await.unwrap();
    let head =
        "POST /v1/completions HTTP/1.1\r\nhost: baton\r\ncontent-length: 0\r\nx-baton-session: ";
    let (mut read, mut write) = stream.split();
    let (mut answer, request) = (Vec::new(), format!("{head}{}\r\n\r\n", "s".repeat(4 << 20)));
    // The router closes the connection before it has read everything, so either end may fail.
    let _ = tokio::join!(write.write_all(request.as_bytes()), read.read_to_end(&mut answer));
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431 "), "{answer}");
    let body = json!({"prompt": long_prompt(), "max_tokens": 2});
    assert_eq!(cluster.client.post("/v1/completions", &body).await.status.as_u16(), 200);
    assert_eq!(cluster.decode[0].calls().len(), 1);
}

#[tokio::test]
async fn request_beyond_node_limits_is_a_client_error() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::Refuse(tonic::Code::InvalidArgument, "tokens = 9: no"));
    let body = json!({"prompt": long_prompt()});
    let answer = cluster.client.post("/v1/completions", &body).await;
    check(&answer, 400, None, &["tokens = 9: no"]);
    cluster.decode[0].behave(Behaviour::FailAfter(0, FailureKind::Invalid));
    let answer = cluster.client.post("/v1/completions", &body).await;
    check(&answer, 400, None, &["FAILURE_KIND_INVALID"]);
    assert_eq!(cluster.decode[0].calls().len(), 2);
}

#[tokio::test]
async fn incomplete_bodies_use_bounded_memory() {
    let mut settings = settings();
    settings.bodies_bytes_max = 64 << 10;
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    let mut padded = good("/v1/completions").to_string();
    padded.push_str(&" ".repeat(32 << 10));
    let post = async || {
        let path = "/v1/completions";
        cluster.client.send(Method::POST, path, &[], padded.clone()).await
    };
    assert_eq!(post().await.status(), 200);

    // Sends half of a body and keeps the connection open.
    let mut half = TcpStream::connect(cluster.router.http).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n\
                content-length: 100000\r\n\r\n";
    half.write_all(head.as_bytes()).await.unwrap();
    half.write_all(&[b' '; 50_000]).await.unwrap();
    eventually("memory for bodies is full", async || post().await.status() == 503).await;
    let refused = post().await;
    assert_eq!(refused.status(), 503);
    assert_eq!(refused.headers()["retry-after"], "1");
    let overloaded = &["finished_reason=\"overloaded\""];
    assert!(cluster.metric("baton_requests_finished_total", overloaded).await >= 1.0);
    // Requests within the limit are still served.
    let answer = cluster.client.post("/v1/completions", &good("/v1/completions")).await;
    assert_eq!(answer.status, 200);

    drop(half);
    eventually("memory for bodies is free", async || post().await.status() == 200).await;
}

#[tokio::test]
async fn client_that_expects_100_continue_sends_no_body_that_is_too_large() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let body = good("/v1/chat/completions").to_string();
    let ask = async |length: usize| {
        let mut client = TcpStream::connect(cluster.router.http).await.unwrap();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
        );
        client.write_all(head.as_bytes()).await.unwrap();
        let mut answer = vec![0; "HTTP/1.1 100 Continue\r\n\r\n".len()];
        client.read_exact(&mut answer).await.unwrap();
        if answer.starts_with(b"HTTP/1.1 100") {
            client.write_all(body.as_bytes()).await.unwrap();
        }
        // Ends when the router closes the connection: it does not wait for the body.
        let read = tokio::time::timeout(DEADLINE, client.read_to_end(&mut answer)).await;
        read.unwrap().unwrap();
        String::from_utf8(answer).unwrap()
    };
    let refused = ask(52_428_800).await;
    assert!(refused.starts_with("HTTP/1.1 413 "), "{refused}");
    assert!(refused.contains(r#""code":"body_too_large""#), "{refused}");
    let served = ask(body.len()).await;
    assert!(served.starts_with("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK"), "{served}");
}

/// Compresses a body with gzip.
fn gzip(body: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(body).unwrap();
    encoder.finish().unwrap()
}

#[tokio::test]
async fn gzip_bodies_are_read_within_the_limits_of_their_content() {
    let mut settings = settings();
    settings.router.body_bytes_max = config::ByteSize::mib(1);
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    let post = async |path: &str, encoding: &str, body: Vec<u8>| {
        let headers = [("content-encoding", encoding)];
        let response = cluster.client.send(Method::POST, path, &headers, body).await;
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    };
    let mut padded = good(PATHS[0]).to_string().into_bytes();
    padded.resize(1 << 20, b' ');
    for path in PATHS {
        let body = gzip(good(path).to_string().as_bytes());
        for encoding in ["gzip", "GZIP", "x-gzip"] {
            assert_eq!(post(path, encoding, body.clone()).await.0, 200, "{path} {encoding}");
        }
    }
    // A body of 1 MiB, also in two members.
    let members = [gzip(&padded[..1000]), gzip(&padded[1000..])].concat();
    for body in [gzip(&padded), members] {
        assert!(body.len() < 4096, "{} bytes", body.len());
        assert_eq!(post(PATHS[0], "gzip", body).await.0, 200);
    }
    padded.push(b' ');
    let bomb = gzip(&vec![b' '; 64 << 20]);
    assert!(bomb.len() < 100_000, "{} bytes", bomb.len());
    for body in [gzip(&padded), bomb] {
        let (status, said) = post(PATHS[0], "gzip", body).await;
        assert_eq!(status, 413, "{said}");
        assert!(said.contains("larger than the limit of 1048576 bytes"), "{said}");
    }
    let whole = gzip(good(PATHS[0]).to_string().as_bytes());
    for body in [b"{}".to_vec(), whole[..whole.len() - 9].to_vec(), vec![]] {
        let (status, said) = post(PATHS[0], "gzip", body).await;
        assert_eq!(status, 400, "{said}");
    }
}

#[tokio::test]
async fn body_in_another_encoding_is_rejected_with_the_header_and_its_value() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    for path in ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"] {
        for (encoding, status) in [("zstd", 415), ("br, gzip", 415), ("identity", 200)] {
            let body = match path {
                "/tokenize" => json!({"prompt": "hello"}),
                "/detokenize" => json!({"tokens": [1]}),
                path => good(path),
            };
            let headers = [("content-encoding", encoding)];
            let answer = cluster.client.post_with(path, &headers, &body).await;
            assert_eq!(answer.status, status, "{path} {encoding}");
            if status == 415 {
                let words = ["content-encoding", encoding, "allowed: gzip, identity"];
                check(&answer, status, None, &words);
            }
        }
    }
}

/// A web page can post text and forms to a router on loopback without a CORS preflight.
#[tokio::test]
async fn body_with_another_content_type_than_json_is_rejected() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    for path in PATHS {
        for content_type in ["text/html", "text/plain", "application/x-www-form-urlencoded", ""] {
            let headers = [("content-type", content_type)];
            let answer = cluster.client.post_with(path, &headers, &good(path)).await;
            let words = ["content-type", content_type, "allowed: application/json"];
            check(&answer, 415, None, &words);
        }
        for content_type in ["application/json; charset=utf-8", "application/problem+json"] {
            let headers = [("content-type", content_type)];
            assert_eq!(cluster.client.post_with(path, &headers, &good(path)).await.status, 200);
        }
    }
    assert_eq!(cluster.decode[0].calls().len(), 4, "rejected requests do not reach nodes");
}
