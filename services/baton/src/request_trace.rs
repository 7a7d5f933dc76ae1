//! Request traces: lengths, arrivals and shared prefixes of recorded requests.
//!
//! Two formats, told apart by the first line: the CSV of the Azure LLM inference traces
//! (`TIMESTAMP,ContextTokens,GeneratedTokens`) and the JSON lines of the Mooncake traces
//! (`timestamp`, `input_length`, `output_length`, and `hash_ids`: one id per 512 prompt tokens,
//! equal where prompts share a prefix).

use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
    ops::RangeInclusive,
    path::Path,
};

use anyhow::{Context, Result, anyhow, ensure};
use serde::Deserialize;
use time::{OffsetDateTime, PrimitiveDateTime, format_description};

use crate::bench::stats::WorkloadRng;

const CSV_HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";
/// Prompt tokens of an id in `hash_ids`.
pub(crate) const HASHED_TOKENS: usize = 512;
const TOKENS_MAX: u32 = 1_000_000;
/// Maximum time from the first request to the last.
pub(crate) const SPAN_DAYS_MAX: f64 = 366.0;
/// Maximum length of a line; the longest Mooncake lines have about 3 KB.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// A recorded request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RecordedRequest {
    /// Seconds since the first request of the trace.
    pub arrives_at: f64,
    pub input_tokens: u32,
    pub output_tokens: u32,
    pub hash_ids: Vec<u64>,
}

impl RecordedRequest {
    /// Returns the prompt. Under one seed, equal `hash_ids` give equal tokens; `rng` draws the
    /// tokens after those of the last id.
    pub(crate) fn prompt(
        &self,
        seed: u64,
        tokens: &RangeInclusive<u32>,
        rng: &mut WorkloadRng,
    ) -> Vec<u32> {
        let (low, high) = (*tokens.start(), *tokens.end());
        let wanted = self.input_tokens as usize;
        let mut prompt = Vec::with_capacity(wanted);
        for id in &self.hash_ids {
            let mut shared = WorkloadRng::new(seed ^ id.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let count = HASHED_TOKENS.min(wanted - prompt.len());
            prompt.extend((0..count).map(|_| shared.within(low, high)));
        }
        let missing = wanted - prompt.len();
        prompt.extend((0..missing).map(|_| rng.within(low, high)));
        prompt
    }
}

/// The first requests of a trace.
#[derive(Clone, Debug)]
pub(crate) struct RequestTrace {
    rows: Vec<RecordedRequest>,
    /// Requests that were left out because the model's context is shorter.
    pub too_long: usize,
}

/// A line of a Mooncake trace; `timestamp` is in milliseconds.
#[derive(Deserialize)]
struct MooncakeRow {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

impl RequestTrace {
    /// Reads the first `count` requests. Errors name file and line.
    pub(crate) fn read(path: &Path, count: u32) -> Result<Self> {
        let name = || format!("cannot read the trace {}", path.display());
        let file = File::open(path).with_context(name)?;
        Self::parse(BufReader::new(file), count).with_context(name)
    }

    fn parse(mut file: impl BufRead, count: u32) -> Result<Self> {
        let mut trace = Self { rows: Vec::new(), too_long: 0 };
        let (mut is_csv, mut first_arrival) = (false, None);
        for number in 1.. {
            if trace.rows.len() == count as usize {
                break;
            }
            let Some(line) = read_line(&mut file).with_context(|| format!("line {number}"))? else {
                break;
            };
            if number == 1 && line == CSV_HEADER {
                is_csv = true;
                continue;
            }
            if line.is_empty() {
                continue;
            }
            let row = if is_csv { azure_row(&line) } else { mooncake_row(&line) };
            let mut row = row.with_context(|| format!("line {number}"))?;
            row.arrives_at -= *first_arrival.get_or_insert(row.arrives_at);
            let previous = trace.rows.last().map_or(0.0, |row: &RecordedRequest| row.arrives_at);
            ensure!(
                row.arrives_at >= previous,
                "line {number}: the request arrives before that of an earlier line"
            );
            ensure!(
                row.arrives_at <= SPAN_DAYS_MAX * 86_400.0,
                "line {number}: the request arrives too late; expected at most {SPAN_DAYS_MAX} days after the first \
                 (Mooncake timestamps are in ms)"
            );
            trace.rows.push(row);
        }
        ensure!(!trace.rows.is_empty(), "the file has no request");
        Ok(trace)
    }

    /// Leaves out the requests that are longer than the model's context.
    pub(crate) fn fit(&mut self, sequence_tokens_max: u32) -> Result<()> {
        let all = self.rows.len();
        self.rows.retain(|row| {
            row.input_tokens.saturating_add(row.output_tokens) <= sequence_tokens_max
        });
        self.too_long = all - self.rows.len();
        let longest = sequence_tokens_max;
        ensure!(
            self.len() > 0,
            "every request of the trace is longer than the model's {longest} tokens"
        );
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns the requests in the order of their arrival.
    pub(crate) fn rows(&self) -> &[RecordedRequest] {
        &self.rows
    }

    /// Returns the mean lengths of prompts and answers in tokens.
    pub(crate) fn mean_tokens(&self) -> (f64, f64) {
        let mean = |tokens: fn(&RecordedRequest) -> u32| {
            let sum: f64 = self.rows.iter().map(|row| f64::from(tokens(row))).sum();
            sum / self.rows.len() as f64
        };
        (mean(|row| row.input_tokens), mean(|row| row.output_tokens))
    }
}

/// Returns the next line without its end; `None` at the end of the file.
fn read_line(file: &mut impl BufRead) -> Result<Option<String>> {
    let mut line = String::new();
    let bytes = file.by_ref().take(LINE_BYTES_MAX).read_line(&mut line)?;
    ensure!((bytes as u64) < LINE_BYTES_MAX, "is longer than {LINE_BYTES_MAX} bytes");
    line.truncate(line.trim_end().len());
    Ok((bytes > 0).then_some(line))
}

fn mooncake_row(line: &str) -> Result<RecordedRequest> {
    let row: MooncakeRow = serde_json::from_str(line).with_context(|| {
        format!("is neither a Mooncake request nor the CSV header {CSV_HEADER}")
    })?;
    Ok(RecordedRequest {
        arrives_at: row.timestamp / 1e3,
        input_tokens: tokens("input_length", &row.input_length.to_string())?,
        output_tokens: tokens("output_length", &row.output_length.to_string())?,
        hash_ids: row.hash_ids,
    })
}

fn azure_row(line: &str) -> Result<RecordedRequest> {
    let mut fields = line.split(',').map(str::trim);
    let mut next = || fields.next().unwrap_or_default();
    let (timestamp, input, output) = (next(), next(), next());
    Ok(RecordedRequest {
        arrives_at: seconds(timestamp).ok_or_else(|| {
            anyhow!("TIMESTAMP is {timestamp:?}; expected YYYY-MM-DD HH:MM:SS.FRACTION in UTC")
        })?,
        input_tokens: tokens("ContextTokens", input)?,
        output_tokens: tokens("GeneratedTokens", output)?,
        hash_ids: Vec::new(),
    })
}

fn tokens(field: &str, text: &str) -> Result<u32> {
    let tokens = text.parse().ok().filter(|tokens| (1..=TOKENS_MAX).contains(tokens));
    tokens.ok_or_else(|| anyhow!("{field} is {text:?}; expected 1 to {TOKENS_MAX}"))
}

/// Returns the seconds since 1970 of a time such as `2023-11-16 18:17:03.9799600` or
/// `2024-05-10 00:00:00.009930+00:00`.
fn seconds(text: &str) -> Option<f64> {
    let format = "[year]-[month]-[day] [hour]:[minute]:[second]";
    let format = format_description::parse_borrowed::<2>(format).expect("the format is constant");
    // The traces of 2024 name UTC, the traces of 2023 name no zone.
    let text = text.strip_suffix("+00:00").or_else(|| text.strip_suffix('Z')).unwrap_or(text);
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let time = PrimitiveDateTime::parse(whole, &format).ok()?.assume_utc();
    let fraction: f64 = format!("0.{fraction}").parse().ok()?;
    Some((time - OffsetDateTime::UNIX_EPOCH).as_seconds_f64() + fraction)
}

#[cfg(test)]
mod tests {
    use super::*;

    const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
        2023-11-16 23:59:59.5000000,480,10\n2023-11-17 00:00:01,3180,8\n";

    fn parse(text: &str) -> Result<RequestTrace> {
        let mut trace = RequestTrace::parse(text.as_bytes(), 100)?;
        trace.fit(8192)?;
        Ok(trace)
    }

    fn row(
        arrives_at: f64,
        input_tokens: u32,
        output_tokens: u32,
        hash_ids: &[u64],
    ) -> RecordedRequest {
        RecordedRequest { arrives_at, input_tokens, output_tokens, hash_ids: hash_ids.to_vec() }
    }

    #[test]
    fn both_formats_are_read_up_to_the_count() {
        let trace = parse(AZURE).unwrap();
        assert_eq!(trace.rows, [row(0.0, 480, 10, &[]), row(1.5, 3180, 8, &[])]);
        assert_eq!(trace.mean_tokens(), (1830.0, 9.0));
        let azure_2024 = format!(
            "{CSV_HEADER}\n2024-05-10 00:00:00.500000+00:00,2162,5\n\
             2024-05-10 00:00:01+00:00,76,15\n2024-05-10 00:00:02.25Z,80,15\n"
        );
        let rows = [row(0.0, 2162, 5, &[]), row(0.5, 76, 15, &[]), row(1.75, 80, 15, &[])];
        assert_eq!(parse(&azure_2024).unwrap().rows, rows);
        let mooncake = r#"{"timestamp": 4000, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]}
            {"timestamp": 4500, "input_length": 9000, "output_length": 5, "hash_ids": []}
            {"timestamp": 5000, "input_length": 700, "output_length": 6}"#;
        let trace = parse(mooncake).unwrap();
        assert_eq!(trace.rows, [row(0.0, 600, 5, &[7, 9]), row(1.0, 700, 6, &[])]);
        assert_eq!(trace.too_long, 1, "a prompt of 9000 tokens");
        assert_eq!(RequestTrace::parse(mooncake.as_bytes(), 1).unwrap().len(), 1);
    }

    #[test]
    fn invalid_lines_are_rejected_with_their_number() {
        let header = CSV_HEADER;
        for (text, words) in [
            (String::new(), &["the file has no request"][..]),
            (
                format!("{header}\n2023-11-16 18:17:03.97,0,10\n"),
                &["line 2", "ContextTokens is \"0\""],
            ),
            (
                format!("{header}\n2023-11-16 18:17:03.97,5\n"),
                &["line 2", "GeneratedTokens is \"\""],
            ),
            (format!("{header}\nyesterday,5,5\n"), &["line 2", "TIMESTAMP is \"yesterday\""]),
            (
                format!("{header}\n2024-05-10 00:00:00.5+02:00,5,5\n"),
                &["line 2", "00:00:00.5+02:00", "in UTC"],
            ),
            (format!("{header}\n2024-05-10 00:00:00.5e300,5,5\n"), &["line 2", "00:00:00.5e300"]),
            ("1,2,3\n".to_owned(), &["line 1", "Mooncake request", header]),
            (
                "{\"timestamp\": 0, \"input_length\": 9, \"output_length\": -1}".to_owned(),
                &["line 1", "-1"],
            ),
            (
                format!("{header}\n2023-11-16 18:17:03.97,5,5\n2023-11-16 18:17:02,5,5\n"),
                &["line 3", "before"],
            ),
            (
                "{\"timestamp\": 0, \"input_length\": 9000, \"output_length\": 1}".to_owned(),
                &["longer than the model's 8192 tokens"],
            ),
        ] {
            let error = format!("{:#}", parse(&text).unwrap_err());
            assert!(words.iter().all(|word| error.contains(word)), "{text:?}: {error}");
        }
        let long = "x".repeat(LINE_BYTES_MAX as usize + 1);
        assert!(format!("{:#}", parse(&long).unwrap_err()).contains("line 1: is longer than"));
    }

    #[test]
    fn equal_hash_ids_share_their_tokens() {
        let rows = [row(0.0, 1100, 5, &[7, 9]), row(1.0, 600, 5, &[7, 3]), row(2.0, 512, 5, &[9])];
        let prompts = |seed| {
            let mut rng = WorkloadRng::new(seed);
            rows.iter().map(|row| row.prompt(seed, &(10..=30_000), &mut rng)).collect()
        };
        let first: Vec<Vec<u32>> = prompts(1);
        assert_eq!(first.iter().map(Vec::len).collect::<Vec<_>>(), [1100, 600, 512]);
        assert_eq!(first[0][..512], first[1][..512]);
        assert_eq!(first[0][512..1024], first[2][..]);
        assert_ne!(first[0][512..600], first[1][512..]);
        assert_eq!(first, prompts(1));
        assert_ne!(first[2], prompts(2)[2]);
    }
}
