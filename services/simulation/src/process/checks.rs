//! Invariants of one process.

use super::Process;
use crate::tiers::TierCopies;

impl Process {
    /// Checks the scheduler after every step.
    pub(super) fn check(&self) {
        if !self.is_checked {
            return;
        }
        self.core.scheduler().check();
        let load = self.load();
        let total = load.blocks_free + load.blocks_cached + load.blocks_held + load.blocks_reserved;
        assert_eq!(total, self.record.block_count, "{}: the counts add up", self.name);
    }

    /// Checks that every reserved block belongs to a transfer or to a load from a tier.
    pub(super) fn check_reserved(&self) {
        if self.is_checked && !self.is_command_waiting {
            let reserved: usize = self.holds.values().map(|hold| hold.reserved.len()).sum();
            // A load also reserves the blocks behind its own: its sequence will compute them.
            let is_loading = self.tiers.as_ref().is_some_and(TierCopies::is_loading);
            let found = self.load().blocks_reserved as usize;
            assert!(found == reserved || is_loading && found > reserved, "{}: {found}", self.name);
        }
    }

    /// Checks that no resource of any request or transfer is left.
    pub(crate) fn check_idle(&self) {
        let (name, load) = (&self.name, self.load());
        assert!(self.core.scheduler().is_idle(), "{name}: the scheduler is not idle, {load:?}");
        assert_eq!((load.blocks_held, load.blocks_reserved), (0, 0), "{name}: {load:?}");
        assert!(self.core.is_empty(), "{name}: attempts are in flight");
        assert!(self.calls.is_empty(), "{name}: calls are open");
        assert!(self.holds.is_empty(), "{name}: {:?}", self.holds);
        assert_eq!(self.commands, 0, "{name}: commands are queued");
        assert_eq!(self.transfers.core.active_count(), 0, "{name}: transfers are active");
        let (transfers, early, _) = self.transfers.core.table_sizes();
        assert_eq!((transfers, early), (0, 0), "{name}: transfers are known");
        self.transfers.transport.check_idle();
        self.weights.check_idle(name);
    }
}
