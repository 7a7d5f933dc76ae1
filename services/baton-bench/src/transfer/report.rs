//! What was measured, as a table and as JSON.

use std::fmt;

use serde::Serialize;

use super::{
    Gather,
    beside::{Pace, Paces},
};
use baton::bench::stats::Percentiles;

/// What was measured of one setting.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What really carried.
    pub transport: String,
    pub blocks: u32,
    pub chunk_blocks: u32,
    pub mib: f64,
    /// Of one transfer alone, in microseconds, from the reservation to the last block.
    pub alone_us: Percentiles,
    /// At its median.
    pub alone_gb_per_s: f64,
    /// Of several that go on together.
    pub together_gb_per_s: f64,
    pub first_contact_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beside: Option<BesideRow>,
}

/// What transfers and forwards on the same GPUs do to each other.
#[derive(Clone, Debug, Serialize)]
pub struct BesideRow {
    /// Of one transfer.
    pub transfer_us: Percentiles,
    /// Over the windows with transfers.
    pub gb_per_s: f64,
    /// The sender's.
    pub prompts: Paces,
    /// The receiver's.
    pub decoding: Paces,
}

#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub block_bytes: usize,
    pub in_flight: u32,
    /// What brought scattered blocks together wherever nccl carried; between GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gather: Option<Gather>,
    /// Between the two GPUs.
    pub plain_copies: Vec<PlainCopy>,
    pub rows: Vec<Row>,
}

/// 256 MiB, cut into pieces.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PlainCopy {
    pub piece_bytes: usize,
    /// Pieces that are copied in no order.
    pub together: usize,
    pub gb_per_s: f64,
    /// Of 4 KiB, until the host has seen their end.
    pub latency_us: f64,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for PlainCopy { piece_bytes, together, gb_per_s, latency_us } in &self.plain_copies {
            writeln!(
                f,
                "plain copy of 256 MiB in pieces of {:.1} MiB, {together} together: {gb_per_s:.0} GB/s; \
                 of 4 KiB: {latency_us:.1} us",
                *piece_bytes as f64 / f64::from(1 << 20)
            )?;
        }
        write!(f, "blocks of {} bytes, {} transfers together", self.block_bytes, self.in_flight)?;
        let gathering = match self.gather {
            Some(Gather::Kernel) => "; for nccl a kernel brings scattered blocks together",
            Some(Gather::Copies) => "; for nccl copies bring scattered blocks together",
            None => "",
        };
        writeln!(f, "{gathering}")?;
        writeln!(
            f,
            "{:<9} {:>7} {:>7} {:>8} {:>10} {:>10} {:>10} {:>14} {:>13}",
            "transport",
            "blocks",
            "chunk",
            "MiB",
            "p50 us",
            "p99 us",
            "GB/s",
            "together GB/s",
            "first ms"
        )?;
        for row in &self.rows {
            writeln!(
                f,
                "{:<9} {:>7} {:>7} {:>8.1} {:>10.0} {:>10.0} {:>10.1} {:>14.1} {:>13.1}",
                row.transport,
                row.blocks,
                row.chunk_blocks,
                row.mib,
                row.alone_us.p50,
                row.alone_us.p99,
                row.alone_gb_per_s,
                row.together_gb_per_s,
                row.first_contact_ms
            )?;
        }
        for row in &self.rows {
            let Some(BesideRow { transfer_us, gb_per_s, prompts, decoding }) = &row.beside else {
                continue;
            };
            writeln!(
                f,
                "\n{}, {} blocks by {}, beside forwards: {:.2} GB/s, a transfer p50 {:.2} ms, p99 {:.2} ms",
                row.transport,
                row.blocks,
                row.chunk_blocks,
                gb_per_s,
                transfer_us.p50 / 1e3,
                transfer_us.p99 / 1e3
            )?;
            for (what, Paces { quiet, busy }) in [("prompts", prompts), ("decoding", decoding)] {
                let columns = |pace: &Pace| {
                    let Percentiles { mean, p50, p90, p99, .. } = pace.step_ms;
                    [mean, p50, p90, p99, pace.tokens_per_s]
                };
                let (quiet, busy) = (columns(quiet), columns(busy));
                let mut ratios = quiet.iter().zip(busy).map(|(quiet, busy)| busy / quiet);
                let ratios: [f64; 5] = std::array::from_fn(|_| ratios.next().unwrap_or_default());
                for (how, columns) in [("alone", quiet), ("beside", busy), ("ratio", ratios)] {
                    let [mean, p50, p90, p99, rate] = columns;
                    let digits = if how == "ratio" { 3 } else { 1 };
                    writeln!(
                        f,
                        "{what:<9} {how:<7} step ms: mean {mean:8.3}  p50 {p50:8.3}  p90 {p90:8.3}  p99 {p99:8.3}  \
                         tokens/s {rate:10.digits$}"
                    )?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_gathered_is_said_in_the_table_and_in_json() {
        for (gather, words, value) in [
            (Some(Gather::Kernel), "for nccl a kernel brings", Some("kernel")),
            (Some(Gather::Copies), "for nccl copies bring", Some("copies")),
            (None, "2 transfers together\n", None),
        ] {
            let (plain_copies, rows) = (Vec::new(), Vec::new());
            let report = Report { block_bytes: 4096, in_flight: 2, gather, plain_copies, rows };
            let table = report.to_string();
            assert!(table.contains(words), "{table}");
            let json = serde_json::to_value(&report).unwrap();
            assert_eq!(json.get("gather").and_then(|gather| gather.as_str()), value);
        }
    }
}
