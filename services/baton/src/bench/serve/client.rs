//! Client that streams one request and records the arrival of its tokens.

use std::{ops::RangeInclusive, time::Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value, json};

use crate::http_client::{HttpClient, error_message};

/// The server that is measured.
#[derive(Clone)]
pub(super) struct Server {
    pub client: HttpClient,
    pub url: String,
    pub model: String,
    /// Context length, if the server reports it.
    pub sequence_tokens_max: Option<u32>,
    /// JSON schema of every answer.
    pub schema: Option<Value>,
}

/// A completed request; times in seconds since it was sent.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MeasuredRequest {
    pub prompt_tokens: usize,
    /// Prompt tokens found in a prefix cache, if the server reports them.
    pub cached_tokens: usize,
    /// Arrival of each token.
    pub token_times: Vec<f64>,
    pub end: f64,
    /// Token ids of the answer, if the server reports them.
    pub token_ids: Option<Vec<u32>>,
}

impl Server {
    /// Finds the model's name, unless one is given, and its context length.
    pub(super) async fn discover(
        client: HttpClient,
        url: &str,
        model: Option<String>,
        schema: Option<Value>,
    ) -> Result<Self> {
        let (status, body) = client.get(&format!("{url}/v1/models")).await?;
        ensure!(status.is_success(), "{url}/v1/models: {status}: {}", error_message(&body));
        let models: Value = serde_json::from_slice(&body).context("/v1/models is not JSON")?;
        let cards = models["data"].as_array().map(Vec::as_slice).unwrap_or_default();
        let card = match &model {
            Some(model) => cards.iter().find(|card| card["id"] == model.as_str()),
            None => cards.first(),
        };
        let name = card.and_then(|card| card["id"].as_str()).map(str::to_owned);
        let longest = card.and_then(|card| card["max_model_len"].as_u64());
        Ok(Self {
            client,
            url: url.to_owned(),
            // A name that is not in the list may be an alias.
            model: model.or(name).ok_or_else(|| anyhow!("{url}/v1/models names no model"))?,
            sequence_tokens_max: longest.and_then(|longest| u32::try_from(longest).ok()),
            schema,
        })
    }

    /// Requests a greedy answer of `output_tokens` tokens, ignoring EOS. An answer by a schema may
    /// be shorter. With `returns_ids` the answer has token ids. The server then also returns the
    /// prompt's ids, before the first token, which takes a while for a long prompt.
    pub(super) async fn ask(
        &self,
        prompt: &[u32],
        output_tokens: u32,
        returns_ids: bool,
    ) -> Result<MeasuredRequest> {
        let mut body = json!({
            "model": self.model, "prompt": prompt, "max_tokens": output_tokens, "stream": true,
            "ignore_eos": true, "temperature": 0.0,
            "stream_options": {"include_usage": true, "continuous_usage_stats": true},
        });
        if returns_ids {
            body["return_token_ids"] = true.into();
        }
        let mut output_min = output_tokens as usize;
        if let Some(schema) = &self.schema {
            let named = json!({"name": "answer", "schema": schema});
            body["response_format"] = json!({"type": "json_schema", "json_schema": named});
            output_min = 1;
        }
        let sent = Instant::now();
        let url = format!("{}/v1/completions", self.url);
        let mut answer =
            AnswerStream { tokens_max: output_tokens as usize, ..AnswerStream::default() };
        let on_event = |event: &str| answer.on_event(event, sent.elapsed().as_secs_f64());
        self.client.post_for_events(&url, &[], &body, on_event).await?;
        let output = output_min..=output_tokens as usize;
        answer.measured(prompt.len(), output, sent.elapsed().as_secs_f64())
    }
}

/// State of one stream.
#[derive(Default)]
struct AnswerStream {
    tokens_max: usize,
    token_times: Vec<f64>,
    token_ids: Option<Vec<u32>>,
    /// Completion tokens by the server's usage.
    counted: Option<usize>,
    cached_tokens: usize,
    is_done: bool,
}

impl AnswerStream {
    /// Records the tokens of a server-sent event that arrived at `now`, in seconds since the
    /// request was sent.
    fn on_event(&mut self, event: &str, now: f64) -> Result<()> {
        if event == "[DONE]" {
            self.is_done = true;
            return Ok(());
        }
        let event: Value = serde_json::from_str(event).context("an event is not JSON")?;
        if let Some(message) = event["error"]["message"].as_str() {
            bail!("error event: {message}");
        }
        let usage = &event["usage"];
        if let Some(counted) = usage["completion_tokens"].as_u64() {
            self.counted = Some(counted as usize);
        }
        if let Some(cached) = usage["prompt_tokens_details"]["cached_tokens"].as_u64() {
            self.cached_tokens = cached as usize;
        }
        let choice = &event["choices"][0];
        let is_chunk = choice["text"].is_string();
        if let Some(ids) = choice["token_ids"].as_array() {
            let ids = ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok());
            let known = self.token_ids.get_or_insert_default();
            known.extend(ids);
            self.token_times.resize(known.len(), now);
        } else if is_chunk && let Some(counted) = usage["completion_tokens"].as_u64() {
            self.token_times.resize((counted as usize).min(self.tokens_max), now);
        } else if is_chunk && self.token_ids.is_none() {
            // A token whose text is held back has an empty chunk, and the chunk with the finish
            // reason may have no token: the usage at the end has the exact number.
            self.token_times.push(now);
        }
        Ok(())
    }

    fn measured(
        mut self,
        prompt_tokens: usize,
        output: RangeInclusive<usize>,
        end: f64,
    ) -> Result<MeasuredRequest> {
        ensure!(self.is_done, "the stream ended without [DONE]");
        let counted = self.counted.unwrap_or(self.token_times.len());
        let (low, high) = (output.start(), output.end());
        let expected = if low == high { high.to_string() } else { format!("{low} to {high}") };
        ensure!(output.contains(&counted), "the answer has {counted} tokens; expected {expected}");
        self.token_times.truncate(counted);
        let last = *self.token_times.last().ok_or_else(|| anyhow!("no token arrived"))?;
        // A chunk may have several tokens. Missing times become the time of the last chunk.
        self.token_times.resize(counted, last);
        let token_ids = self.token_ids.filter(|ids| ids.len() == counted);
        let (cached_tokens, token_times) = (self.cached_tokens, self.token_times);
        Ok(MeasuredRequest { prompt_tokens, cached_tokens, token_times, end, token_ids })
    }
}

impl MeasuredRequest {
    pub(super) fn ttft(&self) -> f64 {
        self.token_times[0]
    }

    /// Returns the mean time per token after the first; 0 for an answer of one token.
    pub(super) fn tpot(&self) -> f64 {
        let (first, last) = (self.token_times[0], self.token_times[self.token_times.len() - 1]);
        (last - first) / (self.token_times.len() - 1).max(1) as f64
    }

    pub(super) fn gaps(&self) -> impl Iterator<Item = f64> + '_ {
        self.token_times.windows(2).map(|pair| pair[1] - pair[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(events: &[(&str, f64)], wanted: usize) -> Result<MeasuredRequest> {
        let mut answer = AnswerStream { tokens_max: wanted, ..AnswerStream::default() };
        for (event, now) in events {
            answer.on_event(event, *now)?;
        }
        answer.measured(5, wanted..=wanted, 9.0)
    }

    const USAGE_3: &str = r#"{"choices":[],"usage":{"completion_tokens":3,
        "prompt_tokens_details":{"cached_tokens":4}}}"#;

    #[test]
    fn tokens_of_one_chunk_arrive_together() {
        let two = r#"{"choices":[{"text":"ab","token_ids":[1,2]}]}"#;
        let one = r#"{"choices":[{"text":"c","token_ids":[3]}]}"#;
        let end = r#"{"choices":[{"text":"","token_ids":[],"finish_reason":"length"}]}"#;
        let measured =
            answer(&[(two, 1.0), (one, 2.0), (end, 2.5), (USAGE_3, 2.5), ("[DONE]", 3.0)], 3);
        let measured = measured.unwrap();
        assert_eq!(measured.token_times, [1.0, 1.0, 2.0]);
        assert_eq!(measured.token_ids, Some(vec![1, 2, 3]));
        assert_eq!((measured.prompt_tokens, measured.cached_tokens), (5, 4));
        assert_eq!((measured.ttft(), measured.tpot()), (1.0, 0.5));
    }

    #[test]
    fn tokens_are_counted_by_the_usage_of_each_chunk() {
        let two = r#"{"choices":[{"text":"ab"}],"usage":{"completion_tokens":2}}"#;
        let end = r#"{"choices":[{"text":"c","finish_reason":"length"}],"usage":{"completion_tokens":3}}"#;
        let usage = r#"{"choices":[],"usage":{"completion_tokens":3}}"#;
        let measured = answer(&[(two, 0.1), (end, 0.3), (usage, 0.4), ("[DONE]", 0.5)], 3).unwrap();
        assert_eq!((measured.token_times, measured.token_ids), (vec![0.1, 0.1, 0.3], None));
    }

    #[test]
    fn tokens_are_counted_by_chunks_and_usage_without_token_ids() {
        let chunk = r#"{"choices":[{"text":"x"}]}"#;
        let measured = answer(&[(chunk, 1.0), (chunk, 2.0), (USAGE_3, 2.0), ("[DONE]", 2.0)], 3);
        let measured = measured.unwrap();
        assert_eq!(measured.token_times, [1.0, 2.0, 2.0]);
        assert_eq!(measured.token_ids, None);
    }

    #[test]
    fn truncated_or_malformed_answers_are_errors() {
        let chunk = r#"{"choices":[{"text":"x"}]}"#;
        let error = r#"{"error":{"message":"no room"}}"#;
        let said = |events: &[(&str, f64)], wanted| answer(events, wanted).unwrap_err().to_string();
        assert_eq!(said(&[(chunk, 1.0)], 1), "the stream ended without [DONE]");
        assert_eq!(
            said(&[(chunk, 1.0), ("[DONE]", 1.0)], 2),
            "the answer has 1 tokens; expected 2"
        );
        assert_eq!(said(&[(chunk, 1.0), (error, 1.0)], 2), "error event: no room");
        assert_eq!(said(&[("[DONE]", 1.0)], 0), "no token arrived");
        assert_eq!(said(&[("{", 1.0)], 0), "an event is not JSON");
    }
}
