//! Splits the file descriptors of the process between the ports of clients.

use listener::SlotLimits;

/// Descriptors kept for listeners, connections to nodes, `router.admin`, telemetry and logs.
const DESCRIPTORS_KEPT: u64 = 128;
/// Number of ports: HTTP and gRPC.
const PORTS: u64 = 2;
/// Maximum number of ordinary connections per port. A connection takes about 20 KiB.
const CONNECTIONS_MAX: u64 = 4096;
/// Maximum number of reserved connections per port, and of closing ones.
const RESERVED_MAX: u64 = 64;
/// Divisor: reserved and closing connections each take at most this fraction of a port's
/// descriptors.
const RESERVED_FRACTION: u64 = 16;

/// Returns the limits of each port under this limit on open files. A low limit is logged.
/// `authenticates`: whether clients need a key.
pub(crate) fn client_slots(open_files_max: u64, authenticates: bool) -> SlotLimits {
    let limits = split(open_files_max, authenticates);
    if (limits.ordinary_max as u64) < CONNECTIONS_MAX {
        tracing::warn!(
            open_files_max,
            connections_max = limits.ordinary_max,
            default = CONNECTIONS_MAX,
            "the limit on open files bounds the connections on each port; raise it with ulimit -Hn"
        );
    }
    limits
}

/// Returns the limits of `router.admin`, whose descriptors are among [`DESCRIPTORS_KEPT`].
pub(crate) fn operator_slots(authenticates: bool) -> SlotLimits {
    SlotLimits { ordinary_max: 32, reserved_max: 4, closing_max: 4, authenticates }
}

fn split(open_files_max: u64, authenticates: bool) -> SlotLimits {
    let per_port = open_files_max.saturating_sub(DESCRIPTORS_KEPT) / PORTS;
    let reserved = (per_port / RESERVED_FRACTION).clamp(1, RESERVED_MAX);
    let ordinary = per_port.saturating_sub(2 * reserved).clamp(1, CONNECTIONS_MAX);
    let reserved_max = reserved as usize;
    let ordinary_max = ordinary as usize;
    SlotLimits { ordinary_max, reserved_max, closing_max: reserved_max, authenticates }
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
            let limits = split(open_files_max, false);
            let split = (limits.ordinary_max, limits.reserved_max, limits.closing_max);
            assert_eq!(split, (ordinary_max, reserved_max, reserved_max), "{open_files_max}");
        }
    }
}
