//! The lines that `baton top` shows for the answers of the admin API.

use std::time::{Duration, Instant};

use anyhow::{Error, Result};
use serde_json::Value;
use time::OffsetDateTime;

use crate::table::{aligned, printable};

/// Answers of the admin API at one time.
pub(super) struct Answers {
    pub nodes: Value,
    pub requests: Value,
    pub weights: Value,
}

/// A title and a table, all of it printable.
pub(super) struct Section {
    title: String,
    /// The head and the rows; empty without rows.
    table: Vec<String>,
}

impl Section {
    fn new<const N: usize>(title: &str, head: [&str; N], rows: &[[String; N]]) -> Self {
        let table = if rows.is_empty() { Vec::new() } else { aligned(head, rows) };
        Self { title: printable(title), table }
    }

    fn line_count(&self) -> usize {
        1 + self.table.len()
    }

    /// Returns at most `lines_max` lines; the last one tells the number of rows that have no line.
    fn lines(&self, lines_max: usize) -> Vec<String> {
        let lines = std::iter::once(&self.title).chain(&self.table);
        let left_out = self.line_count().saturating_sub(lines_max);
        if left_out == 0 || lines_max < 2 {
            return lines.take(lines_max).cloned().collect();
        }
        let mut shown: Vec<String> = lines.take(lines_max - 1).cloned().collect();
        // The head of the table is no row.
        shown.push(format!("… {} more", (left_out + 1).min(self.table.len() - 1)));
        shown
    }
}

/// The last answers, and why there are no newer ones.
pub(super) struct View {
    title: String,
    sections: Vec<Section>,
    /// When the sections were read; `None` before the first answers.
    read_at: Option<Instant>,
    /// The error of the last read, and since when reads fail.
    failure: Option<(String, Instant)>,
}

impl View {
    pub(super) fn new(address: &str, interval: Duration) -> Self {
        let title = format!("baton top of {address}, every {interval:?}. Key: q quits");
        Self { title: printable(&title), sections: Vec::new(), read_at: None, failure: None }
    }

    /// `now`: time of the answers.
    pub(super) fn update(&mut self, answers: Result<Answers>, now: Instant) {
        match answers {
            Ok(answers) => {
                self.sections = sections(&answers);
                (self.read_at, self.failure) = (Some(now), None);
            }
            Err(error) => {
                let since = self.failure.take().map_or(now, |(_, since)| since);
                self.failure = Some((one_line(&error), since));
            }
        }
    }

    /// Returns at most `lines_max` lines.
    pub(super) fn lines(&self, lines_max: usize, now: Instant) -> Vec<String> {
        let age = |at: Instant| now.saturating_duration_since(at).as_secs();
        let state = match (&self.failure, self.read_at) {
            (None, None) => "reading".to_owned(),
            (None, Some(_)) => String::new(),
            (Some((error, since)), None) => format!("no answer for {} s: {error}", age(*since)),
            (Some((error, since)), Some(read_at)) => {
                format!("no answer for {} s, data of {} s ago: {error}", age(*since), age(read_at))
            }
        };
        let mut lines = vec![self.title.clone(), state];
        lines.extend(fit(&self.sections, lines_max.saturating_sub(lines.len())));
        lines.truncate(lines_max);
        lines
    }
}

/// Returns the error as a line that starts with the cause, because a terminal may cut its end.
fn one_line(error: &Error) -> String {
    let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
    let causes: Vec<&str> = causes.iter().rev().flat_map(|cause| cause.lines()).collect();
    printable(&causes.join("; "))
}

/// Returns at most `lines_max` lines of the sections. Sections that need less than an equal part
/// leave the rest to the others.
pub(super) fn fit(sections: &[Section], lines_max: usize) -> Vec<String> {
    let mut by_size: Vec<usize> = (0..sections.len()).collect();
    by_size.sort_by_key(|index| sections[*index].line_count());
    // An empty line lies between two sections.
    let mut left = lines_max.saturating_sub(sections.len().saturating_sub(1));
    let mut parts = vec![0; sections.len()];
    for (done, index) in by_size.iter().enumerate() {
        parts[*index] = sections[*index].line_count().min(left / (sections.len() - done));
        left -= parts[*index];
    }
    let mut lines = Vec::new();
    for (section, part) in sections.iter().zip(parts) {
        if !lines.is_empty() {
            lines.push(String::new());
        }
        lines.extend(section.lines(part));
    }
    lines.truncate(lines_max);
    lines
}

pub(super) fn sections(answers: &Answers) -> Vec<Section> {
    vec![
        nodes(&answers.nodes),
        links(&answers.nodes),
        requests(&answers.requests),
        weights(&answers.weights),
    ]
}

fn nodes(answer: &Value) -> Section {
    let nodes = items(&answer["nodes"]);
    let sum = |field: &str| nodes.iter().map(|node| count(&node[field])).sum::<u64>();
    let serving = nodes.iter().filter(|node| state(node).0 == "up" && drain(node) == "-");
    let title = format!(
        "Nodes: {} of {} serve, {} running and {} waiting sequences",
        serving.count(),
        nodes.len(),
        sum("running"),
        sum("waiting"),
    );
    let rows = nodes.iter().map(|node| {
        let blocks = count(&node["blocks"]);
        let cached = count(&node["blocks_cached"]);
        let in_use = blocks.saturating_sub(count(&node["blocks_free"])).saturating_sub(cached);
        let role = shown(&node["role"]);
        let (state, reason) = state(node);
        [
            node_name(node),
            if node["both_roles"] == true { format!("{role}, fluid") } else { role },
            state,
            drain(node).to_owned(),
            shown(&node["running"]),
            shown(&node["waiting"]),
            share(in_use, blocks),
            share(cached, blocks),
            shown(&node["prefilling"]),
            shown(&node["pending_prompt_tokens"]),
            shown(&node["in_flight"]),
            shown(&node["model"]),
            reason,
        ]
    });
    let head = [
        "NODE",
        "ROLE",
        "STATE",
        "DRAIN",
        "RUNNING",
        "WAITING",
        "KV IN USE",
        "KV CACHED",
        "PREFILLING",
        "PENDING TOKENS",
        "FROM ROUTER",
        "MODEL",
        "REASON",
    ];
    Section::new(&title, head, &rows.collect::<Vec<_>>())
}

/// Returns the state of a node, and the reason if it does not serve.
fn state(node: &Value) -> (String, String) {
    let health = shown(&node["health"]);
    if health != "up" {
        return (health, shown(&node["reason"]));
    }
    match (node["excluded"].as_str(), node["pause"].as_str()) {
        (Some(reason), _) => ("excluded".to_owned(), reason.to_owned()),
        (None, Some(pause)) => (pause.to_owned(), String::new()),
        (None, None) => (health, String::new()),
    }
}

/// Returns the drain of a node: it is drained when it has no sequence left.
fn drain(node: &Value) -> &'static str {
    let left = ["running", "waiting", "in_flight"].map(|field| count(&node[field]));
    match node["draining"].as_bool() {
        Some(true) if left == [0, 0, 0] => "drained",
        Some(true) => "draining",
        Some(false) | None => "-",
    }
}

fn links(answer: &Value) -> Section {
    let links = items(&answer["links"]);
    let title = match count(&answer["links_left_out"]) {
        _ if links.is_empty() => "Links: no transfer of KV was measured yet".to_owned(),
        0 => format!("Links: {} measured", links.len()),
        left_out => format!(
            "Links: {} measured, of which {} follow: excluded ones first, then the slowest",
            links.len() as u64 + left_out,
            links.len(),
        ),
    };
    let name = |url: &Value| {
        let node = items(&answer["nodes"]).iter().find(|node| node["grpc"] == *url);
        node.map_or_else(|| shown(url), node_name)
    };
    let rows = links.iter().map(|link| {
        let is_excluded = link["excluded"] == true;
        [
            name(&link["prefill"]),
            name(&link["decode"]),
            // µs per token equal ms per 1,000 tokens.
            duration(&link["token_us"]),
            if is_excluded { "excluded: transfers failed" } else { "in use" }.to_owned(),
        ]
    });
    let head = ["PREFILL NODE", "DECODE NODE", "TRANSFER OF 1000 TOKENS", "STATE"];
    Section::new(&title, head, &rows.collect::<Vec<_>>())
}

fn requests(answer: &Value) -> Section {
    let oldest = answer["oldest_s"].as_f64();
    let oldest = oldest.map(|oldest| format!(", the oldest from {oldest:.0} s ago"));
    let title = format!(
        "Requests: this router keeps its {} running ones and the last {} that ended{}",
        count(&answer["running"]),
        count(&answer["ended"]),
        oldest.unwrap_or_default(),
    );
    let rows = items(&answer["requests"]).iter().map(|request| {
        let waits_for = request["waits_for"].as_str();
        let end = match request["end"].as_str() {
            Some("running") if waits_for.is_some() => "waiting".to_owned(),
            _ => shown(&request["end"]),
        };
        let reason = request["error"].as_str().or(waits_for.filter(|_| end == "waiting"));
        [
            time_of_day(&request["received_unix_ms"]),
            end,
            shown(&request["prompt_tokens"]),
            shown(&request["completion_tokens"]),
            duration(&request["ttft_ms"]),
            duration(&request["duration_ms"]),
            request["label"].as_str().map_or_else(|| shown(&request["request_id"]), str::to_owned),
            shown(&request["model"]),
            shown(&request["api"]),
            reason.unwrap_or_default().to_owned(),
        ]
    });
    let head = [
        "RECEIVED",
        "STATE",
        "PROMPT TOKENS",
        "OUTPUT TOKENS",
        "FIRST TOKEN",
        "DURATION",
        "REQUEST",
        "MODEL",
        "API",
        "REASON",
    ];
    Section::new(&title, head, &rows.collect::<Vec<_>>())
}

fn weights(answer: &Value) -> Section {
    let update = &answer["update"];
    let mut title = "Weights: no update ran since this router started".to_owned();
    if !update.is_null() {
        let label = update["label"].as_str().filter(|label| !label.is_empty());
        title = format!(
            "Weights: update {} of {}: {}",
            label.map_or_else(|| shown(&update["id"]), str::to_owned),
            shown(&update["model"]),
            shown(&update["phase"]),
        );
        for field in ["reason", "path"] {
            if let Some(text) = update[field].as_str() {
                title.push_str(&format!("; {field}: {text}"));
            }
        }
        let missed: Vec<String> = items(&update["missed"]).iter().map(shown).collect();
        if !missed.is_empty() {
            title.push_str(&format!("; catching up: {}", missed.join(", ")));
        }
    }
    let rows = items(&answer["nodes"]).iter().map(|node| {
        let participant = items(&update["nodes"]).iter().find(|it| it["node"] == node["node"]);
        let participant = participant.unwrap_or(&Value::Null);
        let state = match node["pause"].as_str() {
            Some(pause) => pause,
            None if node["catches_up"] == true => "catching up",
            None => "serves",
        };
        [
            shown(&node["node"]),
            shown(&node["role"]),
            state.to_owned(),
            shown(&participant["state"]),
            duration(&participant["paused_ms"]),
            shown(&node["weight_version"]),
            shown(&node["model"]),
        ]
    });
    let head = ["NODE", "ROLE", "STATE", "IN THE UPDATE", "PAUSED", "WEIGHT VERSION", "MODEL"];
    Section::new(&title, head, &rows.collect::<Vec<_>>())
}

fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn count(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Returns the id of a node, or its URL until it has reported its record.
fn node_name(node: &Value) -> String {
    shown(if node["node"].is_null() { &node["grpc"] } else { &node["node"] })
}

fn share(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".to_owned(),
        _ => format!("{:.0}% of {whole}", 100.0 * part as f64 / whole as f64),
    }
}

/// Formats milliseconds.
fn duration(ms: &Value) -> String {
    match ms.as_f64() {
        None => "-".to_owned(),
        Some(ms @ 10_000.0..) => format!("{:.1} s", ms / 1e3),
        Some(ms @ 10.0..) => format!("{ms:.0} ms"),
        Some(ms) => format!("{ms:.2} ms"),
    }
}

/// Formats milliseconds since 1970 as a time of day in UTC.
fn time_of_day(unix_ms: &Value) -> String {
    let seconds = i64::try_from(count(unix_ms) / 1000).ok();
    match seconds.and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok()) {
        Some(at) => format!("{:02}:{:02}:{:02}Z", at.hour(), at.minute(), at.second()),
        None => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;
    use serde_json::json;

    use super::*;

    fn node(name: &str, changes: &Value) -> Value {
        let mut node = json!({"node": name, "role": "decode", "grpc": format!("http://{name}:1"),
            "health": "up", "reason": "", "draining": false, "excluded": null, "pause": null,
            "both_roles": false, "model": "m", "running": 0, "prefilling": 0, "waiting": 0,
            "pending_prompt_tokens": 0, "in_flight": 0, "blocks": 200, "blocks_free": 150,
            "blocks_cached": 30});
        for (field, value) in changes.as_object().unwrap() {
            node[field] = value.clone();
        }
        node
    }

    fn answers(nodes: &[Value]) -> Answers {
        Answers {
            nodes: json!({"nodes": nodes, "links": [], "links_left_out": 0}),
            requests: json!({"requests": [], "running": 0, "ended": 0, "oldest_s": null}),
            weights: json!({"update": null, "nodes": []}),
        }
    }

    /// Returns the words of a line that two spaces separate.
    fn cells(line: &str) -> Vec<&str> {
        line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()
    }

    #[test]
    fn nodes_have_load_kv_memory_and_drain_state() {
        let nodes = [
            node(
                "a",
                &json!({"running": 3, "waiting": 1, "in_flight": 2, "role": "prefill", "both_roles": true}),
            ),
            node("b", &json!({"draining": true, "running": 2})),
            node("c", &json!({"draining": true, "pause": "paused"})),
            node("d", &json!({"health": "down", "reason": "no answer", "blocks": 0})),
            node("e", &json!({"excluded": "attempts failed", "pause": "paused"})),
        ];
        let section = &sections(&answers(&nodes))[0];
        assert_eq!(section.title, "Nodes: 1 of 5 serve, 5 running and 1 waiting sequences");
        let rows: Vec<Vec<&str>> = section.table[1..].iter().map(|line| cells(line)).collect();
        let start = ["a", "prefill, fluid", "up", "-", "3", "1", "10% of 200", "15% of 200"];
        assert_eq!(rows[0][..8], start);
        assert_eq!(rows[1][2..5], ["up", "draining", "2"]);
        assert_eq!(rows[2][2..4], ["paused", "drained"]);
        assert_eq!((rows[3][2], rows[3][6], *rows[3].last().unwrap()), ("down", "-", "no answer"));
        assert_eq!((rows[4][2], *rows[4].last().unwrap()), ("excluded", "attempts failed"));
    }

    #[test]
    fn links_requests_and_weights_are_listed() {
        let mut answers = answers(&[node("p", &json!({})), node("d", &json!({}))]);
        answers.nodes["links"] = json!([
            {"prefill": "http://p:1", "decode": "http://d:1", "token_us": 12.34, "excluded": false},
            {"prefill": "http://gone:1", "decode": "http://d:1", "token_us": null, "excluded": true},
        ]);
        let request = json!({"request_id": "0123", "label": null, "api": "chat", "model": "m",
            "received_unix_ms": 1_000_000_123_456_u64, "end": "stop", "error": null, "waits_for": "no node is up",
            "prompt_tokens": 5, "completion_tokens": 7, "ttft_ms": 1.234, "duration_ms": 12_345.6});
        let mut waiting = request.clone();
        (waiting["end"], waiting["label"]) = (json!("running"), json!("job"));
        (waiting["ttft_ms"], waiting["completion_tokens"]) = (Value::Null, Value::Null);
        answers.requests =
            json!({"requests": [request, waiting], "running": 1, "ended": 9, "oldest_s": 61.2});
        answers.weights = json!({
            "update": {"id": "u1", "label": "step 7", "path": "/w", "model": "m", "phase": "aborted",
                "reason": "d is gone", "missed": ["d"],
                "nodes": [{"node": "p", "state": "committed", "paused_ms": 15.5}]},
            "nodes": [{"node": "p", "role": "prefill", "model": "m", "weight_version": "v1"},
                {"node": "d", "role": "decode", "model": "m", "weight_version": "v0", "catches_up": true}],
        });
        let [_, links, requests, weights] = &sections(&answers)[..] else { panic!() };
        assert_eq!(links.title, "Links: 2 measured");
        assert_eq!(cells(&links.table[1]), ["p", "d", "12 ms", "in use"]);
        assert_eq!(
            cells(&links.table[2]),
            ["http://gone:1", "d", "-", "excluded: transfers failed"]
        );
        assert!(
            requests
                .title
                .ends_with("1 running ones and the last 9 that ended, the oldest from 61 s ago")
        );
        assert_eq!(
            cells(&requests.table[1]),
            ["01:48:43Z", "stop", "5", "7", "1.23 ms", "12.3 s", "0123", "m", "chat"]
        );
        assert_eq!(
            cells(&requests.table[2]),
            ["01:48:43Z", "waiting", "5", "-", "-", "12.3 s", "job", "m", "chat", "no node is up"]
        );
        let title =
            "Weights: update step 7 of m: aborted; reason: d is gone; path: /w; catching up: d";
        assert_eq!(weights.title, title);
        assert_eq!(cells(&weights.table[1])[2..5], ["serves", "committed", "16 ms"]);
        assert_eq!(cells(&weights.table[2])[2..6], ["catching up", "-", "-", "v0"]);
    }

    #[test]
    fn names_from_the_network_cannot_control_the_terminal() {
        let hostile = "\x1b[2J\x07\n\u{9b}1m\u{202e}";
        let mut answers = answers(&[node(
            hostile,
            &json!({"model": hostile, "reason": hostile, "health": hostile}),
        )]);
        answers.requests["requests"] =
            json!([{"label": hostile, "end": hostile, "error": hostile}]);
        answers.weights = json!({"update": {"label": hostile, "phase": hostile, "missed": [hostile]},
            "nodes": [{"node": hostile, "weight_version": hostile}]});
        let mut view = View::new(hostile, Duration::from_secs(2));
        let now = Instant::now();
        view.update(Ok(answers), now);
        view.update(Err(anyhow!("{hostile}")), now);
        let lines = view.lines(usize::MAX, now);
        assert!(lines.len() > 10, "{lines:#?}");
        let is_hostile = |c: char| c.is_control() || c == '\u{202e}';
        assert!(!lines.iter().any(|line| line.contains(is_hostile)), "{lines:#?}");
    }

    #[test]
    fn router_that_is_away_is_said_in_one_line_until_it_is_back() {
        let mut view = View::new("http://r", Duration::from_secs(2));
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(view.lines(24, start)[1], "reading");
        view.update(Err(anyhow!("refused")), at(1));
        assert_eq!(view.lines(24, at(3))[1], "no answer for 2 s: refused");
        view.update(Ok(answers(&[node("a", &json!({}))])), at(4));
        assert_eq!(view.lines(24, at(4))[1], "");
        view.update(Err(anyhow!("time-out")), at(9));
        view.update(Err(anyhow!("first\nsecond")), at(11));
        let lines = view.lines(24, at(12));
        assert_eq!(lines[1], "no answer for 3 s, data of 8 s ago: first; second");
        assert_eq!(cells(&lines[4])[0], "a");
        view.update(Ok(answers(&[])), at(13));
        assert_eq!(view.lines(24, at(13))[1], "");
    }

    #[test]
    fn sections_share_the_lines_of_a_small_terminal() {
        let section = |rows: usize| {
            let rows: Vec<[String; 1]> = (0..rows).map(|row| [row.to_string()]).collect();
            Section::new("t", ["H"], &rows)
        };
        let all = [section(9), section(0), section(2)];
        assert_eq!(fit(&all, usize::MAX).len(), 11 + 1 + 1 + 1 + 4);
        assert_eq!(
            fit(&all, 12),
            ["t", "H", "0", "1", "… 7 more", "", "t", "", "t", "H", "0", "1"]
        );
        for lines_max in 0..25 {
            assert!(fit(&all, lines_max).len() <= lines_max);
        }
        assert_eq!(section(9).lines(2), ["t", "… 9 more"]);
        let view = View::new("http://r", Duration::from_secs(2));
        assert_eq!(view.lines(1, Instant::now()).len(), 1);
    }
}
