//! The results, as a table and as JSON.

use std::fmt;

use serde::Serialize;

use super::{
    Gather,
    forward_load::{ComputeStats, WindowStats},
};
use baton::bench::stats::Percentiles;

/// Result of one setting.
#[derive(Clone, Debug, Serialize)]
pub(super) struct SettingResult {
    /// Transport in use.
    pub transport: String,
    pub blocks: u32,
    pub chunk_blocks: u32,
    pub mib: f64,
    /// Duration of one transfer at a time in µs, from the reservation to the last block.
    pub alone_us: Percentiles,
    /// Throughput at the median of `alone_us`.
    pub alone_gb_per_s: f64,
    /// Throughput of concurrent transfers.
    pub together_gb_per_s: f64,
    pub first_contact_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interference: Option<InterferenceRow>,
}

/// Interference of transfers and forward passes on the same GPUs.
#[derive(Clone, Debug, Serialize)]
pub(super) struct InterferenceRow {
    /// Duration of one transfer in µs.
    pub transfer_us: Percentiles,
    /// Throughput over the windows with transfers.
    pub gb_per_s: f64,
    /// Prefill steps of the sender.
    pub prompts: WindowStats,
    /// Decode steps of the receiver.
    pub decoding: WindowStats,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct TransferReport {
    pub block_bytes: usize,
    pub in_flight: u32,
    /// Gather of scattered blocks for nccl; `None` in host memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gather: Option<Gather>,
    /// Plain copies between the two GPUs.
    pub plain_copies: Vec<PlainCopy>,
    /// Plain copies through as many loopback TCP connections as tcp uses; `None` if tcp is not
    /// measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loopback_gb_per_s: Option<f64>,
    pub rows: Vec<SettingResult>,
}

/// A copy of 256 MiB in pieces.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct PlainCopy {
    pub piece_bytes: usize,
    /// Pieces copied concurrently.
    pub together: usize,
    pub gb_per_s: f64,
    /// Latency of 4 KiB until the host sees the completion.
    pub latency_us: f64,
}

impl fmt::Display for TransferReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for PlainCopy { piece_bytes, together, gb_per_s, latency_us } in &self.plain_copies {
            writeln!(
                f,
                "plain copy of 256 MiB in pieces of {:.1} MiB, {together} together: {gb_per_s:.0} GB/s; \
                 of 4 KiB: {latency_us:.1} us",
                *piece_bytes as f64 / f64::from(1 << 20)
            )?;
        }
        if let Some(gb_per_s) = self.loopback_gb_per_s {
            writeln!(f, "plain copies through loopback TCP connections: {gb_per_s:.1} GB/s")?;
        }
        write!(f, "blocks of {} bytes, {} transfers together", self.block_bytes, self.in_flight)?;
        let gathering = match self.gather {
            Some(Gather::Kernel) => "; nccl: a kernel gathers scattered blocks",
            Some(Gather::Copies) => "; nccl: copies gather scattered blocks",
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
            let Some(InterferenceRow { transfer_us, gb_per_s, prompts, decoding }) =
                &row.interference
            else {
                continue;
            };
            writeln!(
                f,
                "\n{}, {} blocks by {}, during forward passes: {:.2} GB/s, a transfer p50 {:.2} ms, p99 {:.2} ms",
                row.transport,
                row.blocks,
                row.chunk_blocks,
                gb_per_s,
                transfer_us.p50 / 1e3,
                transfer_us.p99 / 1e3
            )?;
            for (what, WindowStats { quiet, busy }) in [("prefill", prompts), ("decode", decoding)]
            {
                let columns = |stats: &ComputeStats| {
                    let Percentiles { mean, p50, p90, p99, .. } = stats.step_ms;
                    [mean, p50, p90, p99, stats.tokens_per_s]
                };
                let (quiet, busy) = (columns(quiet), columns(busy));
                let mut ratios = quiet.iter().zip(busy).map(|(quiet, busy)| busy / quiet);
                let ratios: [f64; 5] = std::array::from_fn(|_| ratios.next().unwrap_or_default());
                for (how, columns) in [("alone", quiet), ("loaded", busy), ("ratio", ratios)] {
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
    fn table_and_json_name_the_gather() {
        for (gather, words, value) in [
            (Some(Gather::Kernel), "nccl: a kernel gathers", Some("kernel")),
            (Some(Gather::Copies), "nccl: copies gather", Some("copies")),
            (None, "2 transfers together\n", None),
        ] {
            let (plain_copies, rows) = (Vec::new(), Vec::new());
            let report = TransferReport {
                block_bytes: 4096,
                in_flight: 2,
                gather,
                plain_copies,
                loopback_gb_per_s: None,
                rows,
            };
            let table = report.to_string();
            assert!(table.contains(words), "{table}");
            let json = serde_json::to_value(&report).unwrap();
            assert_eq!(json.get("gather").and_then(|gather| gather.as_str()), value);
        }
    }
}
