//! Results of `baton bench serve` for each offered load, as JSON and as tables.

use std::collections::BTreeMap;

use anyhow::Result;
use serde::Serialize;

use super::{
    client::{MeasuredRequest, Server},
    length::Length,
};
use crate::bench::stats::{Percentiles, median};

/// Results of one run of the command.
#[derive(Serialize)]
pub(super) struct ServeReport {
    #[serde(flatten)]
    pub server: ServerReport,
    /// Results of the servers of `--compare`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub compared: Vec<ServerReport>,
    pub workload: String,
    pub input_tokens: Length,
    pub output_tokens: Length,
    pub seed: u64,
    pub goodput_limits: Option<GoodputLimits>,
}

/// Results of one server.
#[derive(Serialize)]
pub(super) struct ServerReport {
    pub url: String,
    pub model: String,
    pub points: Vec<LoadPoint>,
}

impl ServerReport {
    pub(super) fn new(server: &Server) -> Self {
        Self { url: server.url.clone(), model: server.model.clone(), points: Vec::new() }
    }
}

impl ServeReport {
    pub(super) fn servers(&self) -> impl Iterator<Item = &ServerReport> {
        [&self.server].into_iter().chain(&self.compared)
    }

    /// Prints a table per load: p50, p99 and throughput of every server, each with its ratio to the
    /// first server's.
    pub(super) fn print_comparison(&self) {
        if self.compared.is_empty() {
            return;
        }
        for (index, baseline) in self.server.points.iter().enumerate() {
            println!("\n{}, and the ratio to {}", baseline.load.describe(), self.server.url);
            println!(
                "{:<32} {:>17} {:>17} {:>17} {:>17} {:>17}",
                "", "TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "TPOT p99, ms", "output tok/s"
            );
            for server in self.servers() {
                let columns = server.points[index].compared_values();
                let cells: String = columns
                    .iter()
                    .zip(baseline.compared_values())
                    .map(|(value, base)| format!(" {value:>10.2} {:>6.3}", value / base))
                    .collect();
                println!("{:<32}{cells}", server.url);
            }
        }
    }
}

/// Results of one server at one offered load. Latencies are those of completed requests.
#[derive(Serialize)]
pub(super) struct LoadPoint {
    pub load: OfferedLoad,
    pub conversations: usize,
    /// Conversations whose turns all completed.
    pub conversations_completed: usize,
    pub requests: usize,
    pub completed: usize,
    pub errors: BTreeMap<String, usize>,
    pub elapsed_s: f64,
    pub request_per_s: f64,
    pub output_token_per_s: f64,
    pub total_token_per_s: f64,
    /// Fraction of prompt tokens found in a prefix cache.
    pub cached_share: f64,
    /// Fraction of all requests that completed within the goodput limits.
    pub goodput_share: Option<f64>,
    /// Requests per second that completed within the goodput limits.
    pub goodput_per_s: Option<f64>,
    pub ttft_ms: Percentiles,
    pub tpot_ms: Percentiles,
    pub itl_ms: Percentiles,
    pub e2e_ms: Percentiles,
    /// Hand-over gap: the gap between a request's first two tokens, minus the median of the
    /// request's later gaps.
    pub handover_gap_ms: Percentiles,
    /// Duration of a completed conversation from its first request to its last token, in seconds,
    /// including the pauses between turns.
    pub conversation_s: Percentiles,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum OfferedLoad {
    /// Arrivals per second of a Poisson process.
    Rate(f64),
    /// Arrivals of the trace, sped up by this factor.
    RateScale(f64),
    /// Number of conversations in flight at a time.
    Concurrency(u32),
}

impl OfferedLoad {
    pub(super) fn value(self) -> f64 {
        match self {
            Self::Rate(rate) => rate,
            Self::RateScale(scale) => scale,
            Self::Concurrency(concurrency) => concurrency.into(),
        }
    }

    pub(super) fn describe(self) -> String {
        match self {
            Self::Rate(rate) => format!("{rate}/s"),
            Self::RateScale(scale) => format!("the trace {scale} times as fast"),
            Self::Concurrency(concurrency) => format!("{concurrency} at once"),
        }
    }
}

/// Latency limits in milliseconds. A request within all of them counts towards goodput.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct GoodputLimits {
    pub ttft_ms: Option<f64>,
    /// Mean time per token after the first.
    pub tpot_ms: Option<f64>,
    pub e2e_ms: Option<f64>,
}

impl GoodputLimits {
    /// Parses limits such as `ttft:500,tpot:50,e2e:10000`. Each name may occur once.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut limits = Self::default();
        for part in text.split(',') {
            let expected = "expected ttft:MS, tpot:MS and e2e:MS, separated by commas";
            let (name, value) =
                part.split_once(':').ok_or(format!("invalid limit {part:?}; {expected}"))?;
            let limit = match name {
                "ttft" => &mut limits.ttft_ms,
                "tpot" => &mut limits.tpot_ms,
                "e2e" => &mut limits.e2e_ms,
                _ => return Err(format!("unknown limit {name:?}; {expected}")),
            };
            let value = value.parse().ok().filter(|ms: &f64| ms.is_finite() && *ms > 0.0);
            let value = value
                .ok_or(format!("invalid limit {part:?}; expected milliseconds greater than 0"))?;
            if limit.replace(value).is_some() {
                return Err(format!("{name:?} is given twice"));
            }
        }
        Ok(limits)
    }

    /// Returns whether a request with these latencies, in seconds, is within the limits.
    pub fn are_met(&self, ttft: f64, tpot: f64, e2e: f64) -> bool {
        let within = |limit: Option<f64>, seconds: f64| limit.is_none_or(|ms| seconds * 1e3 <= ms);
        within(self.ttft_ms, ttft) && within(self.tpot_ms, tpot) && within(self.e2e_ms, e2e)
    }
}

/// Result of one conversation.
pub(super) struct ConversationOutcome {
    /// The completed turns.
    pub turns: Vec<MeasuredRequest>,
    /// Error of the turn that failed. The turns after it were not sent.
    pub error: Option<String>,
    pub elapsed_s: f64,
}

impl LoadPoint {
    /// Computes the results of all conversations of one load, which took `elapsed_s` together.
    pub(super) fn of(
        load: OfferedLoad,
        outcomes: &[ConversationOutcome],
        elapsed_s: f64,
        limits: Option<GoodputLimits>,
    ) -> Self {
        let mut errors = BTreeMap::new();
        for error in outcomes.iter().filter_map(|outcome| outcome.error.as_ref()) {
            *errors.entry(error.clone()).or_insert(0) += 1;
        }
        let complete: Vec<&ConversationOutcome> =
            outcomes.iter().filter(|outcome| outcome.error.is_none()).collect();
        let measured: Vec<&MeasuredRequest> =
            outcomes.iter().flat_map(|outcome| &outcome.turns).collect();
        let requests = measured.len() + errors.values().sum::<usize>();
        let good_requests = limits.map(|limits| {
            measured
                .iter()
                .filter(|measured| limits.are_met(measured.ttft(), measured.tpot(), measured.end))
                .count() as f64
        });
        let sum = |count: fn(&MeasuredRequest) -> usize| {
            measured.iter().map(|measured| count(measured)).sum::<usize>() as f64
        };
        let (prompt, cached) = (sum(|one| one.prompt_tokens), sum(|one| one.cached_tokens));
        let output = sum(|one| one.token_times.len());
        let milliseconds = |seconds: &dyn Fn(&MeasuredRequest) -> f64| {
            Percentiles::of(measured.iter().map(|one| seconds(one) * 1e3).collect())
        };
        let multi_token = measured.iter().filter(|one| one.token_times.len() > 1);
        let gaps = measured.iter().flat_map(|one| one.gaps());
        let handover_gaps = measured.iter().filter_map(|one| handover_gap_ms(one));
        Self {
            load,
            conversations: outcomes.len(),
            conversations_completed: complete.len(),
            requests,
            completed: measured.len(),
            errors,
            elapsed_s,
            request_per_s: measured.len() as f64 / elapsed_s,
            output_token_per_s: output / elapsed_s,
            total_token_per_s: (prompt + output) / elapsed_s,
            cached_share: if prompt > 0.0 { cached / prompt } else { 0.0 },
            goodput_share: good_requests.map(|good| good / requests.max(1) as f64),
            goodput_per_s: good_requests.map(|good| good / elapsed_s),
            ttft_ms: milliseconds(&MeasuredRequest::ttft),
            tpot_ms: Percentiles::of(multi_token.map(|one| one.tpot() * 1e3).collect()),
            itl_ms: Percentiles::of(gaps.map(|gap| gap * 1e3).collect()),
            e2e_ms: milliseconds(&|one| one.end),
            handover_gap_ms: Percentiles::of(handover_gaps.collect()),
            conversation_s: Percentiles::of(complete.iter().map(|one| one.elapsed_s).collect()),
        }
    }

    fn compared_values(&self) -> [f64; 5] {
        let (ttft, tpot) = (self.ttft_ms, self.tpot_ms);
        [ttft.p50, ttft.p99, tpot.p50, tpot.p99, self.output_token_per_s]
    }

    pub(super) fn print(&self) {
        println!(
            "\n{}: {} of {} requests completed in {:.2} s: {:.2} requests/s, {:.1} output tok/s, \
             {:.1} tok/s in all, {:.0} % of the prompts cached",
            self.load.describe(),
            self.completed,
            self.requests,
            self.elapsed_s,
            self.request_per_s,
            self.output_token_per_s,
            self.total_token_per_s,
            self.cached_share * 100.0,
        );
        if let (Some(share), Some(per_s)) = (self.goodput_share, self.goodput_per_s) {
            println!("goodput: {:.1} % of the requests, {per_s:.2} requests/s", share * 100.0);
        }
        for (message, count) in &self.errors {
            println!("  {count} x {message}");
        }
        println!("{:<24} {:>9} {:>9} {:>9} {:>9} {:>9}", "ms", "mean", "p50", "p90", "p99", "max");
        let mut rows = vec![
            ("time to first token", self.ttft_ms),
            ("time per later token", self.tpot_ms),
            ("inter-token latency", self.itl_ms),
            ("end to end", self.e2e_ms),
            ("hand-over gap", self.handover_gap_ms),
        ];
        if self.requests > self.conversations {
            rows.push(("conversation (s)", self.conversation_s));
        }
        for (name, row) in rows {
            println!(
                "{name:<24} {:>9.2} {:>9.2} {:>9.2} {:>9.2} {:>9.2}",
                row.mean, row.p50, row.p90, row.p99, row.max
            );
        }
    }
}

/// Returns the hand-over gap of a request with at least three gaps.
fn handover_gap_ms(measured: &MeasuredRequest) -> Option<f64> {
    let gaps: Vec<f64> = measured.gaps().map(|gap| gap * 1e3).collect();
    (gaps.len() >= 3).then(|| gaps[0] - median(&gaps[1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(token_times: &[f64]) -> MeasuredRequest {
        MeasuredRequest {
            prompt_tokens: 10,
            cached_tokens: 4,
            end: token_times[token_times.len() - 1],
            token_times: token_times.to_vec(),
            token_ids: None,
        }
    }

    #[test]
    fn invalid_limits_are_rejected_by_name() {
        let limits = GoodputLimits::parse("ttft:500,e2e:1e4").unwrap();
        assert_eq!(
            limits,
            GoodputLimits { ttft_ms: Some(500.0), tpot_ms: None, e2e_ms: Some(1e4) }
        );
        for text in ["", "ttft", "ttft:x", "ttft:-1", "itl:5", "ttft:1,ttft:2", "tpot:inf"] {
            assert!(GoodputLimits::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn failed_requests_lower_the_goodput() {
        let outcomes = [
            ConversationOutcome {
                turns: vec![measured(&[0.1, 0.2, 0.3])],
                error: None,
                elapsed_s: 0.3,
            },
            ConversationOutcome {
                turns: vec![measured(&[0.9, 1.0, 1.1])],
                error: None,
                elapsed_s: 1.1,
            },
            ConversationOutcome { turns: vec![], error: Some("503".into()), elapsed_s: 0.0 },
        ];
        let limits = GoodputLimits::parse("ttft:500,tpot:101").unwrap();
        let point = LoadPoint::of(OfferedLoad::Rate(3.0), &outcomes, 2.0, Some(limits));
        assert_eq!((point.requests, point.completed, point.conversations_completed), (3, 2, 2));
        assert_eq!(point.goodput_share, Some(1.0 / 3.0));
        assert_eq!(point.goodput_per_s, Some(0.5));
        assert_eq!(point.errors["503"], 1);
        assert_eq!(point.cached_share, 0.4);
        assert_eq!(point.output_token_per_s, 3.0);
    }

    #[test]
    fn hand_over_gap_excludes_the_median_step() {
        let gap = handover_gap_ms(&measured(&[1.0, 1.012, 1.014, 1.016, 1.018])).unwrap();
        assert!((gap - 10.0).abs() < 1e-6, "{gap}");
        assert_eq!(handover_gap_ms(&measured(&[1.0, 1.1, 1.2])), None);
    }
}
