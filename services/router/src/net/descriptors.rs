//! How many connections the process's file descriptors allow.

/// What the kernel says about this process; there is no such file elsewhere.
const LIMITS: &str = "/proc/self/limits";
/// Kept for what is no client: listeners, connections to nodes, telemetry, logs.
const DESCRIPTORS_KEPT: u64 = 128;
/// HTTP and gRPC.
const PORTS: u64 = 2;
/// On each port. Each takes some 20 KiB; more wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 4096;

/// Connections at once on each port: fewer than wanted where the soft limit on open files is too low,
/// which is logged.
pub fn connections_max() -> usize {
    let wanted = CONNECTIONS_MAX;
    let limits = std::fs::read_to_string(LIMITS).unwrap_or_default();
    let Some(open_files_max) = open_files_max(&limits) else { return wanted };
    let allowed = allowed(open_files_max, wanted);
    if allowed < wanted {
        tracing::warn!(
            open_files_max,
            connections_max = allowed,
            wanted,
            "the limit on open files bounds the connections on each port; raise it with ulimit -n"
        );
    }
    allowed
}

/// The soft limit, `None` where there is none.
fn open_files_max(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// One at least, so that a tight limit makes the router slow and not mute.
fn allowed(open_files_max: u64, wanted: usize) -> usize {
    let each = open_files_max.saturating_sub(DESCRIPTORS_KEPT) / PORTS;
    usize::try_from(each).unwrap_or(usize::MAX).clamp(1, wanted.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(soft: &str) -> String {
        format!(
            "Limit                     Soft Limit           Hard Limit           Units     \n\
             Max processes             511980               511980               processes \n\
             Max open files            {soft:<20} 1048576              files     \n\
             Max locked memory         8388608              8388608              bytes     \n"
        )
    }

    #[test]
    fn the_soft_limit_on_open_files_is_read() {
        assert_eq!(open_files_max(&limits("1024")), Some(1024));
        assert_eq!(open_files_max(&limits("unlimited")), None);
        assert_eq!(open_files_max(""), None);
        assert_eq!(open_files_max("Max open files"), None);
        assert_eq!(open_files_max("Max open files            -1"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_kernel_writes_what_is_read() {
        let limits = std::fs::read_to_string(LIMITS).unwrap();
        let is_unlimited = limits
            .lines()
            .any(|line| line.starts_with("Max open files  ") && line.contains("unlimited  "));
        assert!(open_files_max(&limits).is_some() || is_unlimited, "{limits}");
    }

    #[test]
    fn both_ports_and_the_rest_fit_under_the_limit() {
        for (open_files_max, allowed_each) in [
            (0, 1),
            (DESCRIPTORS_KEPT, 1),
            (DESCRIPTORS_KEPT + 4, 2),
            (1024, 448),
            (DESCRIPTORS_KEPT + 2 * 4096 - 1, 4095),
            (DESCRIPTORS_KEPT + 2 * 4096, 4096),
            (u64::MAX, 4096),
        ] {
            assert_eq!(allowed(open_files_max, 4096), allowed_each, "of {open_files_max}");
        }
    }
}
