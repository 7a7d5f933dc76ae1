//! Metrics of the process, by OpenTelemetry's conventions.

use std::fs;

use super::Metrics;

/// Clock ticks a second in `/proc`, a constant of the kernel's interface.
const TICKS_PER_SECOND: f64 = 100.0;

pub(super) fn register(metrics: &Metrics) {
    metrics.observe_f64("process.cpu.time", |time| {
        let stat = fs::read_to_string("/proc/self/stat");
        if let Some(seconds) = stat.ok().and_then(cpu_seconds) {
            time.observe(seconds, &[]);
        }
    });
    metrics.observe("process.memory.usage", |memory| {
        let status = fs::read_to_string("/proc/self/status");
        if let Some(bytes) = status.ok().and_then(resident_bytes) {
            memory.observe(bytes, &[]);
        }
    });
    metrics.observe("process.open_file_descriptor.count", |count| {
        if let Ok(files) = fs::read_dir("/proc/self/fd") {
            count.observe(files.count() as u64, &[]);
        }
    });
}

/// Reads user and system time from `/proc/self/stat`: fields 14 and 15. The program's name before
/// them may have spaces.
fn cpu_seconds(stat: String) -> Option<f64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some((ticks()? + ticks()?) as f64 / TICKS_PER_SECOND)
}

/// Reads `VmRSS`, in KiB, from `/proc/self/status`.
fn resident_bytes(status: String) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_proc_are_read() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 900 0 0 0 150 25 0 0 20 0 9 0 1 2 3";
        assert_eq!(cpu_seconds(stat.into()), Some(1.75));
        assert_eq!(cpu_seconds("7 (a) S 1".into()), None);
        let status = "Name:\ta\nVmHWM:\t  20 kB\nVmRSS:\t    1024 kB\nThreads:\t9\n";
        assert_eq!(resident_bytes(status.into()), Some(1 << 20));
        assert_eq!(resident_bytes("Name:\ta\n".into()), None);
    }
}
