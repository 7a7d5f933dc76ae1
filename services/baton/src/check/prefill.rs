//! Checks that prefill nodes prefill the prompts of a model.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};

use crate::http_client::HttpClient;

/// Maximum number of prompts. The router may choose a decode node that it predicts to be faster, so
/// one prompt that a decode node prefilled is no failure.
const PROMPTS_MAX: u32 = 8;
/// Numbers in a prompt: several KV blocks, so that the KV is worth a transfer.
const PROMPT_NUMBERS: usize = 64;
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// Sends prompts until a prefill node has prefilled one and its KV was transferred. Prints both
/// nodes.
pub(super) async fn run(client: &HttpClient, url: &str, model: &str) -> Result<()> {
    for _ in 0..PROMPTS_MAX {
        let stats = tokio::time::timeout(ANSWER_WITHIN, answer(client, url, model))
            .await
            .map_err(|_| anyhow!("{model}: no answer within {ANSWER_WITHIN:?}"))?
            .with_context(|| format!("{model}: no answer"))?;
        if let (Some(prefill), Some(decode)) =
            (stats["prefill_node"].as_str(), stats["decode_node"].as_str())
            && stats["kv_bytes"].as_u64().is_some_and(|bytes| bytes > 0)
        {
            println!("{model}: prefilled by {prefill}, decoded by {decode}");
            return Ok(());
        }
    }
    bail!(
        "{model}: decode nodes prefilled {PROMPTS_MAX} of {PROMPTS_MAX} prompts; expected a prefill node: \
         `baton node list` shows the nodes, `baton explain --slow {PROMPTS_MAX}` the reasons"
    )
}

/// Returns the statistics of an answer to a prompt that no node has cached.
async fn answer(client: &HttpClient, url: &str, model: &str) -> Result<Value> {
    let mut numbers = [0; PROMPT_NUMBERS];
    getrandom::fill(&mut numbers).map_err(|error| anyhow!("no random numbers: {error}"))?;
    let prompt: String = numbers.iter().map(|number| format!(" {number}")).collect();
    let body = json!({"model": model, "prompt": prompt, "max_tokens": 4, "ignore_eos": true, "stream": true});
    let mut stats = Value::Null;
    let on_event = |event: &str| {
        let event: Value = serde_json::from_str(event).unwrap_or_default();
        if let Some(message) = event["error"]["message"].as_str() {
            bail!("{message}");
        }
        if event["baton"].is_object() {
            stats = event["baton"].clone();
        }
        Ok(())
    };
    let url = format!("{url}/v1/completions");
    client.post_for_events(&url, &[("x-baton-stats", "1")], &body, on_event).await?;
    Ok(stats)
}
