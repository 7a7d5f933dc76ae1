//! Sample request through a new cluster, with its statistics.

use std::{
    io::Write,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value, json};

use crate::http_client::HttpClient;

const QUESTION: &str = "What is the capital of France? Answer in one sentence.";
const ANSWER_TOKENS_MAX: u32 = 64;
const DEADLINE: Duration = Duration::from_secs(60);

/// Sends the question to the router at `url`, prints the streamed answer and then a line of
/// statistics. Returns the statistics.
pub(crate) async fn run(client: &HttpClient, url: &str) -> Result<Value> {
    tokio::time::timeout(DEADLINE, ask(client, url))
        .await
        .map_err(|_| anyhow!("the sample request did not finish within {} s", DEADLINE.as_secs()))?
}

async fn ask(client: &HttpClient, url: &str) -> Result<Value> {
    let body = json!({
        "messages": [{"role": "user", "content": QUESTION}],
        "stream": true, "temperature": 0.0, "max_tokens": ANSWER_TOKENS_MAX,
        "stream_options": {"include_usage": true},
    });
    print(&format!("\n> {QUESTION}\n"));
    let sent = Instant::now();
    let url = format!("{url}/v1/chat/completions");
    let (mut first, mut last) = (None, sent);
    let (mut tokens, mut stats) = (0, Value::Null);
    let on_event = |event: &str| {
        if event == "[DONE]" {
            return Ok(());
        }
        let event: Value = serde_json::from_str(event).context("invalid event: not JSON")?;
        if let Some(message) = event["error"]["message"].as_str() {
            bail!("{message}");
        }
        if let Some(text) = event["choices"][0]["delta"]["content"].as_str()
            && !text.is_empty()
        {
            first.get_or_insert_with(Instant::now);
            last = Instant::now();
            print(text);
        }
        if let Some(usage) = event["usage"]["completion_tokens"].as_u64() {
            tokens = usage;
        }
        if event["baton"].is_object() {
            stats = event["baton"].clone();
        }
        Ok(())
    };
    client.post_for_events(&url, &[("x-baton-stats", "1")], &body, on_event).await?;
    print("\n");
    let first = first.ok_or_else(|| anyhow!("the answer has no text"))?;
    ensure!(tokens > 0, "invalid usage: completion_tokens is 0");
    let decode_s = (last - first).as_secs_f64();
    let ttft_s = (first - sent).as_secs_f64();
    print(&format!("{}\n\n", line(tokens, ttft_s, decode_s, &stats)));
    Ok(stats)
}

/// Prints the text at once. Ignores errors, because serving continues without a terminal.
fn print(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let (Ok(()) | Err(_)) = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

fn line(tokens: u64, first_s: f64, decode_s: f64, stats: &Value) -> String {
    let mut line = format!("[{tokens} tokens; time to first token {:.0} ms", first_s * 1e3);
    if tokens > 1 && decode_s > 0.0 {
        line += &format!("; {:.0} tokens/s", (tokens - 1) as f64 / decode_s);
    }
    if let Some(bytes) = stats["kv_bytes"].as_u64().filter(|&bytes| bytes > 0) {
        line += &format!("; {:.1} MB of KV moved", bytes as f64 / 1e6);
        if let Some(micros) = stats["transfer_us"].as_u64() {
            line += &format!(" in {:.1} ms", micros as f64 / 1e3);
        }
    }
    if let (Some(prefill), Some(decode)) =
        (stats["prefill_node"].as_str(), stats["decode_node"].as_str())
    {
        line += &format!("; prefilled by {prefill}, decoded by {decode}");
    }
    line + "]"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_line_omits_unknown_values() {
        let stats = json!({"kv_bytes": 1_500_000, "transfer_us": 2500,
            "prefill_node": "prefill-0", "decode_node": "decode-0"});
        assert_eq!(
            line(11, 0.05, 0.1, &stats),
            "[11 tokens; time to first token 50 ms; 100 tokens/s; 1.5 MB of KV moved in 2.5 ms; \
             prefilled by prefill-0, decoded by decode-0]"
        );
        assert_eq!(line(1, 0.05, 0.0, &Value::Null), "[1 tokens; time to first token 50 ms]");
    }
}
