//! Splits the process's file descriptors between the ports.

/// Descriptors kept for listeners, connections to nodes, telemetry and logs.
const DESCRIPTORS_KEPT: u64 = 128;
/// Number of ports: HTTP and gRPC.
const PORTS: u64 = 2;
/// Maximum number of ordinary connections per port. A connection takes about 20 KiB.
const CONNECTIONS_MAX: u64 = 4096;
/// Maximum number of reserved connections per port, and of closing ones.
const RESERVED_MAX: u64 = 64;
/// Divisor: reserved and closing connections each take at most this fraction of a port's descriptors.
const RESERVED_FRACTION: u64 = 16;

/// Maximum numbers of open connections of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    pub ordinary_max: usize,
    /// Connections for probes while every ordinary connection has a request in progress.
    pub reserved_max: usize,
}

impl ConnectionLimits {
    /// Returns each port's limits under this limit on open files. A low limit is logged.
    pub fn new(open_files_max: u64) -> Self {
        let limits = Self::split(open_files_max);
        if (limits.ordinary_max as u64) < CONNECTIONS_MAX {
            tracing::warn!(
                open_files_max,
                connections_max = limits.ordinary_max,
                wanted = CONNECTIONS_MAX,
                "the limit on open files bounds the connections on each port; raise it with ulimit -Hn"
            );
        }
        limits
    }

    /// Computes the limits. Each kind has at least one connection, so a low limit does not make the router
    /// unreachable.
    fn split(open_files_max: u64) -> Self {
        let each = open_files_max.saturating_sub(DESCRIPTORS_KEPT) / PORTS;
        let reserved = (each / RESERVED_FRACTION).clamp(1, RESERVED_MAX);
        let ordinary = each.saturating_sub(2 * reserved).clamp(1, CONNECTIONS_MAX);
        Self { ordinary_max: ordinary as usize, reserved_max: reserved as usize }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ports_and_the_kept_descriptors_fit_under_the_limit() {
        for (open_files_max, ordinary_max, reserved_max) in [
            (0, 1, 1),
            (DESCRIPTORS_KEPT, 1, 1),
            (DESCRIPTORS_KEPT + 6, 1, 1),
            (256, 56, 4),
            (1024, 392, 28),
            (20_000, 4096, 64),
            (u64::MAX, 4096, 64),
        ] {
            let limits = ConnectionLimits::split(open_files_max);
            assert_eq!(limits, ConnectionLimits { ordinary_max, reserved_max }, "{open_files_max}");
        }
    }
}
