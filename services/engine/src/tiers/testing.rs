//! Tiers for the unit tests of this module.

use std::time::{Duration, Instant};

use kernels::KvGroups;

use super::{TierAdmission, TierConfig, TierStores};

/// Returns the tiers of a node with a disk of this many slots and without host memory.
pub(super) fn with_disk(disk_slots: u32) -> TierStores {
    with_groups(disk_slots, KvGroups::default())
}

/// Returns such tiers for a model with these KV groups.
pub(super) fn with_groups(disk_slots: u32, groups: KvGroups) -> TierStores {
    let config = TierConfig {
        admission: TierAdmission::Always,
        host: false,
        disk_slots,
        sessions: false,
        load_timeout: Duration::from_secs(1),
    };
    TierStores::new(config, groups, 4, Instant::now())
}
