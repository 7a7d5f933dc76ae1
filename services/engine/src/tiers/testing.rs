//! Tiers for the unit tests of this module.

use std::time::{Duration, Instant};

use super::{TierAdmission, TierConfig, TierStores};

/// Returns the tiers of a node with a disk of this many slots and without host memory.
pub(super) fn with_disk(disk_slots: u32) -> TierStores {
    let config = TierConfig {
        admission: TierAdmission::Always,
        host: false,
        disk_slots,
        sessions: false,
        load_timeout: Duration::from_secs(1),
    };
    TierStores::new(config, 4, Instant::now())
}
