//! `baton explain`: reports the nodes of a request with the reasons for their choice, the time of
//! each stage, and the failures. The data comes from the routers' memory, or with `--log` from a
//! router's log.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use http::{StatusCode, Uri};
use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{
    client_args::ClientArgs,
    http_client::{HttpClient, json_answer},
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Messages of the log lines that tell about a request.
const REQUEST_ENDED: &str = "request ended";
const ATTEMPT_FAILED: &str = "attempt failed";
/// Maximum number of failed requests that are listed from a log, the same as from a router.
const FAILED_MAX: usize = 100;
/// Fields of a log line that every line has.
const COMMON_FIELDS: [&str; 5] = ["timestamp", "level", "target", "message", "span"];

#[derive(Args)]
pub struct ExplainArgs {
    /// Request id, client label (`x-request-id`) or trace id.
    #[arg(required_unless_present_any = ["slow", "failed"], conflicts_with_all = ["slow", "failed"])]
    id: Option<String>,
    /// Explain the N slowest requests.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    slow: Option<u32>,
    /// Explain the last requests that failed.
    #[arg(long, conflicts_with = "slow")]
    failed: bool,
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
    /// URL of the routers' admin API (`router.admin`). The command asks all addresses of the host
    /// name.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8002")]
    url: String,
    /// Read this log of a router (JSON or text lines) in place of the routers' memory.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    #[command(flatten)]
    client: ClientArgs,
}

pub fn run(args: ExplainArgs) -> Result<()> {
    let answers = match &args.log {
        Some(file) => Answers { requests: from_log(file, &args)?, ..Answers::default() },
        None => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(from_routers(&args))?
        }
    };
    answers.problems.iter().for_each(|problem| eprintln!("baton: {problem}"));
    let found = &answers.requests;
    if args.json {
        println!("{}", serde_json::to_string_pretty(found)?);
    } else if found.is_empty() {
        println!("no request");
    }
    for (index, request) in found.iter().filter(|_| !args.json).enumerate() {
        if index > 0 {
            println!();
        }
        match args.log {
            Some(_) => print!("{}", log_text(request)),
            None => print!("{}", text(request)),
        }
    }
    ensure!(
        args.id.is_some() || answers.unreachable == 0,
        "{} of the routers did not answer, so requests may be missing",
        answers.unreachable
    );
    Ok(())
}

/// The requests that routers returned.
#[derive(Debug, Default, PartialEq)]
struct Answers {
    requests: Vec<Value>,
    /// A line for each router that has no such request or did not answer.
    problems: Vec<String>,
    /// Number of routers that did not answer.
    unreachable: usize,
}

impl Answers {
    fn add(&mut self, address: SocketAddr, answer: Result<Result<Vec<Value>, String>>) {
        match answer {
            Ok(Ok(requests)) => self.requests.extend(requests),
            Ok(Err(none)) => self.problems.push(format!("{address}: {none}")),
            Err(error) => {
                self.problems.push(format!("{address}: {error:#}"));
                self.unreachable += 1;
            }
        }
    }

    /// Sorts the requests of several routers as each router sorts its own: the slowest first,
    /// otherwise the newest first.
    fn sort(&mut self, slow: Option<u32>) {
        let field = slow.map_or("received_unix_ms", |_| "duration_ms");
        self.requests.sort_by(|a, b| number(b, field).total_cmp(&number(a, field)));
        self.requests.truncate(slow.map_or(usize::MAX, |count| count as usize));
    }
}

/// Asks every address of the URL's host, and returns the requests of all routers.
async fn from_routers(args: &ExplainArgs) -> Result<Answers> {
    let uri: Uri = args.url.parse().with_context(|| format!("invalid --url {:?}", args.url))?;
    let default_port = match uri.scheme_str() {
        Some("http") => Some(80),
        Some("https") => Some(443),
        _ => None,
    };
    let (host, default_port) = uri.host().zip(default_port).with_context(|| {
        format!("invalid --url {:?}: expected http://HOST:PORT or https://HOST:PORT", args.url)
    })?;
    let port = uri.port_u16().unwrap_or(default_port);
    let name = host.trim_matches(['[', ']']);
    let addresses = tokio::net::lookup_host((name, port)).await;
    let addresses: BTreeSet<SocketAddr> =
        addresses.with_context(|| format!("cannot resolve {host}"))?.collect();
    let path = match (&args.id, args.slow) {
        (Some(id), _) => format!("/v1/explain/{}", percent_encoded(id)),
        (None, Some(count)) => format!("/v1/explain?slow={count}"),
        (None, None) => "/v1/explain?failed".into(),
    };
    let (connector, key) = (args.client.connector(CONNECT_TIMEOUT)?, args.client.authorization()?);
    let url = format!("{}{path}", args.url.trim_end_matches('/'));
    ensure!(!addresses.is_empty(), "{host} resolves to no address");
    let mut answers = Answers::default();
    for address in &addresses {
        // The certificate names the host, so the URL keeps its name.
        let client = HttpClient::new(connector.clone().at(*address)).with_key(key.clone());
        answers.add(*address, ask(&client, &url).await);
    }
    let answered = addresses.len() - answers.unreachable;
    if answered == 0 || args.id.is_some() && answers.requests.is_empty() {
        bail!("{}", answers.problems.join("\n"));
    }
    answers.sort(args.slow);
    Ok(answers)
}

/// Returns the requests of one router, or the router's message that it has no such request.
async fn ask(client: &HttpClient, url: &str) -> Result<Result<Vec<Value>, String>> {
    let (status, body) = client.get(url).await?;
    let body = json_answer(url, &body)?;
    let message = || body["error"]["message"].as_str().unwrap_or("(no message)").to_owned();
    match status {
        StatusCode::OK => Ok(Ok(body["requests"].as_array().cloned().unwrap_or_default())),
        StatusCode::NOT_FOUND => Ok(Err(message())),
        status => bail!("{url}: {status}: {}", message()),
    }
}

fn percent_encoded(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => {
                encoded.push(byte.into())
            }
            _ => write!(encoded, "%{byte:02X}").expect("a string takes any text"),
        }
    }
    encoded
}

fn number(value: &Value, field: &str) -> f64 {
    value[field].as_f64().unwrap_or(0.0)
}

/// Formats milliseconds; an absent number is unknown.
fn ms(value: &Value) -> String {
    value.as_f64().map_or("unknown".into(), |ms| format!("{ms:.1}"))
}

/// Formats a string or a number; `None` without a value.
fn shown(value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Formats the report of one request.
fn text(request: &Value) -> String {
    let of = |field: &str| shown(&request[field]);
    let named = |name: &str, field: &str| of(field).map(|text| format!(", {name} {text}"));
    let mut lines = vec![format!(
        "request {}{}{}",
        of("request_id").unwrap_or_default(),
        named("label", "label").unwrap_or_default(),
        named("trace", "trace_id").unwrap_or_default(),
    )];
    let received_ns = i128::from(request["received_unix_ms"].as_u64().unwrap_or(0)) * 1_000_000;
    let received = OffsetDateTime::from_unix_timestamp_nanos(received_ns)
        .ok()
        .and_then(|at| at.format(&Rfc3339).ok());
    lines.push(format!(
        "  {} of model {}, received {}",
        of("api").unwrap_or_default(),
        of("model").unwrap_or_default(),
        received.unwrap_or_default(),
    ));
    lines.push(format!(
        "  {} after {} ms: {} prompt tokens, {} output tokens, first token after {} ms",
        of("end").unwrap_or_default(),
        ms(&request["duration_ms"]),
        of("prompt_tokens").unwrap_or_default(),
        of("completion_tokens").unwrap_or("unknown".into()),
        ms(&request["ttft_ms"]),
    ));
    lines.extend(of("error").map(|error| format!("  error: {error}")));
    lines.extend(of("waits_for").map(|reason| format!("  waits: {reason}")));
    if let Some(count @ 1..) = request["attempts_left_out"].as_u64() {
        lines.push(format!("  {count} earlier attempts are not kept"));
    }
    items(&request["attempts"]).iter().for_each(|attempt| attempt_lines(attempt, &mut lines));
    let choices = request["choices"].as_u64().unwrap_or(1);
    let of_choice = match choices {
        0 | 1 => String::new(),
        _ => format!(" of choice {}", of("choice").unwrap_or_default()),
    };
    lines.push(format!("  {:<20} {:>8} {:>10}", format!("stage{of_choice}"), "attempt", "ms"));
    for stage in items(&request["stages"]) {
        let name = shown(&stage["stage"]).unwrap_or_default();
        let attempt = shown(&stage["attempt"]).unwrap_or_default();
        let node = shown(&stage["node"]).map(|node| format!("  at {node}")).unwrap_or_default();
        let overlaps = match stage["overlaps"].as_bool() {
            Some(true) => ", at the same time as other stages",
            _ => "",
        };
        lines.push(format!("  {name:<20} {attempt:>8} {:>10}{node}{overlaps}", ms(&stage["ms"])));
    }
    lines.push(format!("  {:<20} {:>8} {:>10}", "unaccounted", "", ms(&request["unaccounted_ms"])));
    lines.join("\n") + "\n"
}

fn attempt_lines(attempt: &Value, lines: &mut Vec<String>) {
    let of = |field: &str| shown(&attempt[field]);
    let way = match attempt["disaggregated"].as_bool() {
        Some(true) => "disaggregated",
        _ => "local prefill",
    };
    lines.push(format!(
        "  attempt {} of choice {}: {way}: {}",
        of("number").unwrap_or_default(),
        of("choice").unwrap_or_default(),
        of("reason").unwrap_or_default(),
    ));
    lines.extend(of("waited_for").map(|reason| format!("    waited before: {reason}")));
    lines.push(format!(
        "    time to first token: predicted {} ms, measured {} ms",
        ms(&attempt["predicted_ttft_ms"]),
        ms(&attempt["ttft_ms"]),
    ));
    for node in items(&attempt["nodes"]) {
        lines.push(format!(
            "    {} node {}: {} cached tokens expected, {} found",
            shown(&node["role"]).unwrap_or_default(),
            shown(&node["node"]).unwrap_or_default(),
            shown(&node["cached_expected"]).unwrap_or_default(),
            shown(&node["cached_found"]).unwrap_or("unknown".into()),
        ));
    }
    let kv = match attempt["kv_bytes"].as_u64() {
        Some(bytes @ 1..) => {
            format!(", {bytes} bytes of KV in {} ms", ms(&attempt["transfer_ms"]))
        }
        _ => String::new(),
    };
    let failure = of("failure").map(|failure| format!(": {failure}")).unwrap_or_default();
    lines.push(format!("    {}{failure}{kv}", of("outcome").unwrap_or_default()));
    let terms = ["cost", "queue", "prompt", "blocks", "gap", "slowdown", "decode", "evict"];
    let header: String = terms.iter().map(|term| format!(" {term:>8}")).collect();
    lines.push(format!("    {:<32}{header}", "option (predicted ms)"));
    for (index, option) in items(&attempt["options"]).iter().enumerate() {
        let decode = shown(&option["decode_node"]).unwrap_or_default();
        let nodes = match shown(&option["prefill_node"]) {
            Some(prefill) => format!("{prefill} to {decode}"),
            None => decode,
        };
        let mark = if index == 0 { '*' } else { ' ' };
        let values: String = terms
            .iter()
            .map(|term| format!(" {:>8}", ms(&option[format!("{term}_ms").as_str()])))
            .collect();
        let bound = match option["exceeds_itl_max"].as_bool() {
            Some(true) => "  exceeds node.itl_max",
            _ => "",
        };
        lines.push(format!("   {mark}{nodes:<32}{values}{bound}"));
    }
    for node in items(&attempt["ineligible"]) {
        lines.push(format!(
            "    not eligible: {} node {}: {}",
            shown(&node["role"]).unwrap_or_default(),
            shown(&node["node"]).unwrap_or_default(),
            shown(&node["reason"]).unwrap_or_default(),
        ));
    }
    for (field, what) in [("options_left_out", "options"), ("ineligible_left_out", "nodes")] {
        if let Some(count @ 1..) = attempt[field].as_u64() {
            lines.push(format!("    and {count} other {what}"));
        }
    }
}

/// Returns the requests of a log, each with its line `request ended` and its lines `attempt
/// failed`.
fn from_log(file: &Path, args: &ExplainArgs) -> Result<Vec<Value>> {
    let log =
        std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let lines: Vec<Value> = log.lines().filter_map(log_line).collect();
    ensure!(
        !lines.is_empty(),
        "{} has no line \"{REQUEST_ENDED}\" and no line of JSON; expected the log of a router",
        file.display()
    );
    let found = in_log(&lines, args.id.as_deref(), args.slow);
    if let Some(id) = args.id.as_deref().filter(|_| found.is_empty()) {
        bail!(
            "no line \"{REQUEST_ENDED}\" in {} has the request id, label or trace id {id:?}",
            file.display()
        );
    }
    Ok(found)
}

/// Reads a log line of either format. Of lines of text, only those of [`REQUEST_ENDED`] and
/// [`ATTEMPT_FAILED`] are read.
fn log_line(line: &str) -> Option<Value> {
    if let Ok(line @ Value::Object(_)) = serde_json::from_str(line) {
        return Some(line);
    }
    let (message, (head, mut rest)) = [REQUEST_ENDED, ATTEMPT_FAILED]
        .into_iter()
        .find_map(|message| Some((message, line.split_once(&format!(": {message} "))?)))?;
    let timestamp =
        head.split_whitespace().find(|word| OffsetDateTime::parse(word, &Rfc3339).is_ok());
    let mut fields = json!({"timestamp": timestamp, "message": message});
    while let Some((name, value)) = rest.split_once('=') {
        let (value, after) = field_value(value);
        // A field of the event comes before a field of its spans.
        if fields[name].is_null() {
            fields[name] = value;
        }
        rest = after;
    }
    Some(fields)
}

/// Splits the value at the begin of `text` from the fields behind the value.
fn field_value(text: &str) -> (Value, &str) {
    let end = match text.strip_prefix('"') {
        Some(quoted) => {
            let mut is_escaped = false;
            let end = quoted.find(|letter| {
                let closes = letter == '"' && !is_escaped;
                is_escaped = letter == '\\' && !is_escaped;
                closes
            });
            end.map(|end| end + 2)
        }
        // A value without quotes may contain spaces. The next field begins with its name.
        None => text.match_indices(' ').map(|(at, _)| at).find(|at| {
            let name = text[at + 1..].split_once('=').map(|(name, _)| name);
            name.is_some_and(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
        }),
    };
    let (value, after) = text.split_at(end.unwrap_or(text.len()));
    // Longer digits are an id.
    let is_json = value.starts_with('"') || value.len() < 16;
    let parsed = is_json.then(|| serde_json::from_str(value).ok()).flatten();
    (parsed.unwrap_or_else(|| value.into()), after.trim_start())
}

fn in_log(lines: &[Value], id: Option<&str>, slow: Option<u32>) -> Vec<Value> {
    // The request's span has the fields that its lines lack.
    let field = |line: &Value, name: &str| {
        let found = [&line[name], &line["span"][name]].into_iter().find_map(|value| value.as_str());
        found.map(str::to_owned)
    };
    let is = |line: &&Value, message: &str| {
        line["message"].as_str().is_some_and(|found| found.starts_with(message))
    };
    let mut ended: Vec<&Value> = lines.iter().filter(|line| is(line, REQUEST_ENDED)).collect();
    match (id, slow) {
        (Some(id), _) => ended.retain(|line| {
            ["request_id", "label", "trace_id"]
                .iter()
                .any(|name| field(line, name).as_deref() == Some(id))
        }),
        (None, Some(count)) => {
            ended.sort_by(|a, b| number(b, "duration_ms").total_cmp(&number(a, "duration_ms")));
            ended.truncate(count as usize);
        }
        (None, None) => {
            ended.retain(|line| !line["error"].is_null());
            ended.reverse();
            ended.truncate(FAILED_MAX);
        }
    }
    let explained = ended.into_iter().map(|line| {
        let request_id = field(line, "request_id");
        let is_own =
            |other: &&Value| request_id.is_some() && field(other, "request_id") == request_id;
        let failed: Vec<&Value> =
            lines.iter().filter(|line| is(line, ATTEMPT_FAILED)).filter(is_own).collect();
        json!({"request_id": request_id, "ended": line, "failed_attempts": failed})
    });
    explained.collect()
}

fn log_text(request: &Value) -> String {
    let line = |line: &Value| {
        let time = shown(&line["timestamp"]).unwrap_or_default();
        let fields = line.as_object().into_iter().flatten();
        let fields = fields.filter(|(name, _)| !COMMON_FIELDS.contains(&name.as_str()));
        let fields: String = fields
            .map(|(name, value)| format!("\n    {name} {}", shown(value).unwrap_or_default()))
            .collect();
        format!("  {time} {}{fields}\n", shown(&line["message"]).unwrap_or_default())
    };
    let failed: String = items(&request["failed_attempts"]).iter().map(line).collect();
    let id = shown(&request["request_id"]).unwrap_or("unknown".into());
    format!("request {id}\n{failed}{}", line(&request["ended"]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn account_is_printed_with_unknown_times_by_name() {
        let option = |prefill: Value, cost: f64| {
            json!({"prefill_node": prefill, "decode_node": "decode-0", "cost_ms": cost,
                "queue_ms": 1.0, "prompt_ms": 2.0, "blocks_ms": 0.0, "gap_ms": 0.5, "slowdown_ms": 0.0,
                "decode_ms": 3.0, "evict_ms": 0.0, "exceeds_itl_max": prefill.is_null()})
        };
        let request = json!({
            "request_id": "00ab", "label": "mine", "trace_id": null, "api": "chat", "model": "ours",
            "received_unix_ms": 1_700_000_000_000_u64, "end": "stop", "error": null,
            "duration_ms": 52.0, "ttft_ms": 20.0, "choices": 1, "prompt_tokens": 40,
            "completion_tokens": 8, "unaccounted_ms": 1.0, "attempts_left_out": 0,
            "stages": [
                {"stage": "text", "attempt": null, "node": null, "ms": 2.0, "overlaps": false},
                {"stage": "queue", "attempt": 1, "node": "prefill-0", "ms": null, "overlaps": false},
            ],
            "attempts": [{
                "choice": 0, "number": 1, "disaggregated": true, "reason": "why", "waited_for": null,
                "predicted_ttft_ms": 10.0, "ttft_ms": 15.0, "outcome": "complete", "failure": null,
                "kv_bytes": 4096, "transfer_ms": 0.7, "options_left_out": 3, "ineligible_left_out": 0,
                "nodes": [{"role": "decode", "node": "decode-0", "cached_expected": 16,
                    "cached_found": null}],
                "options": [option(json!("prefill-0"), 6.5), option(Value::Null, 9.0)],
                "ineligible": [{"node": "prefill-1", "role": "prefill", "reason": "draining"}],
            }],
        });
        let text = text(&request);
        for line in [
            "request 00ab, label mine\n",
            "  chat of model ours, received 2023-11-14T22:13:20Z\n",
            "  stop after 52.0 ms: 40 prompt tokens, 8 output tokens, first token after 20.0 ms\n",
            "  attempt 1 of choice 0: disaggregated: why\n",
            "    decode node decode-0: 16 cached tokens expected, unknown found\n",
            "    complete, 4096 bytes of KV in 0.7 ms\n",
            "   *prefill-0 to decode-0                 6.5 ",
            "  exceeds node.itl_max\n",
            "    not eligible: prefill node prefill-1: draining\n",
            "    and 3 other options\n",
            "  queue                       1    unknown  at prefill-0\n",
            "  unaccounted                          1.0\n",
        ] {
            assert!(text.contains(line), "{line:?} is missing in\n{text}");
        }
    }

    #[test]
    fn requests_of_several_routers_are_sorted_and_unreachable_routers_are_named() {
        let request = |id: u32, received: u64, duration: f64| json!({"request_id": id, "received_unix_ms": received, "duration_ms": duration});
        let mut answers = Answers::default();
        let at = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        answers.add(at(1), Ok(Ok(vec![request(1, 30, 1.0), request(2, 10, 9.0)])));
        answers.add(at(2), Ok(Ok(vec![request(3, 20, 5.0)])));
        answers.add(at(3), Ok(Err("no request x".into())));
        answers.add(at(4), Err(anyhow::anyhow!("connection refused")));
        assert_eq!(
            answers.problems,
            ["127.0.0.1:3: no request x", "127.0.0.1:4: connection refused"]
        );
        assert_eq!(answers.unreachable, 1);
        let ids = |answers: &Answers| -> Vec<u64> {
            answers.requests.iter().filter_map(|request| request["request_id"].as_u64()).collect()
        };
        answers.sort(None);
        assert_eq!(ids(&answers), [1, 3, 2]);
        answers.sort(Some(2));
        assert_eq!(ids(&answers), [2, 3]);
    }

    #[test]
    fn log_lines_tell_how_a_request_ended_and_which_attempts_failed() {
        let ended = |id: &str, label: &str, duration_ms: f64, error: Value| {
            json!({"timestamp": "t", "level": "INFO", "message": "request ended", "error": error,
                "duration_ms": duration_ms, "span": {"name": "request", "request_id": id, "label": label}})
        };
        let failed = json!({"message": "attempt failed", "request_id": "1", "failure": "decode node: busy",
            "span": {"name": "attempt", "number": 1}});
        let lines = [
            failed,
            ended("1", "a", 5.0, Value::Null),
            ended("2", "b", 9.0, json!("a bug")),
            json!({"message": "serving"}),
        ];
        let ids = |id, slow| -> Vec<String> {
            let found = in_log(&lines, id, slow);
            found.iter().filter_map(|request| shown(&request["request_id"])).collect()
        };
        assert_eq!(
            (ids(Some("1"), None), ids(Some("b"), None)),
            (vec!["1".into()], vec!["2".into()])
        );
        assert_eq!((ids(None, Some(1)), ids(None, None)), (vec!["2".into()], vec!["2".into()]));
        assert!(ids(Some("3"), None).is_empty());
        let text = log_text(&in_log(&lines, Some("a"), None)[0]);
        // Whether serde_json keeps the order of fields depends on the other crates of a build.
        for line in ["attempt failed\n", "failure decode node: busy\n", "duration_ms 5.0\n"] {
            assert!(text.contains(line), "{line:?} is missing in\n{text}");
        }
    }

    #[test]
    fn last_failed_requests_of_a_log_come_newest_first() {
        let ended = |id: usize| json!({"message": "request ended", "request_id": id.to_string(), "error": "a bug"});
        let lines: Vec<Value> = (0..FAILED_MAX + 2).map(ended).collect();
        let found = in_log(&lines, None, None);
        let ids: Vec<String> =
            found.iter().filter_map(|request| shown(&request["request_id"])).collect();
        let newest: Vec<String> = (2..FAILED_MAX + 2).rev().map(|id| id.to_string()).collect();
        assert_eq!(ids, newest);
    }

    #[test]
    fn lines_of_text_give_the_fields_of_lines_of_json() {
        let failed = log_line(
            "router | 2026-11-23T21:31:47.5Z  WARN request:attempt: router::answer: attempt failed request_id=00ab \
             node_id=decode-0 failure=decode node: a bug (code=13) request_id=00ab label=\"a \\\"b\\\" c=d\" number=1",
        );
        assert_eq!(
            failed.unwrap(),
            json!({"timestamp": "2026-11-23T21:31:47.5Z", "message": "attempt failed", "request_id": "00ab",
                "node_id": "decode-0", "failure": "decode node: a bug (code=13)", "label": "a \"b\" c=d", "number": 1})
        );
        let ended = log_line(
            "router::record: request ended duration_ms=5.5 request_id=12345678901234567890123456789012",
        );
        assert_eq!(
            ended.unwrap(),
            json!({"timestamp": null, "message": "request ended", "duration_ms": 5.5,
                "request_id": "12345678901234567890123456789012"})
        );
        assert_eq!(log_line("2026-11-23T21:31:47.5Z  INFO router: serving http=127.0.0.1:1"), None);
    }

    #[test]
    fn labels_are_percent_encoded() {
        assert_eq!(percent_encoded("a/b c?ü-1.x_"), "a%2Fb%20c%3F%C3%BC-1.x_");
    }
}
