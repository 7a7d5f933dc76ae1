//! Copies between a process and its KV tiers, and the blocks on the disk that outlive the process.

use engine::tiers::{RecoveredBlock, Tier, TierEvent};

use super::Process;
use crate::tiers::{Disk, TierCopies};

impl Process {
    /// Takes the blocks on the disk of the KV tier. The process has ended.
    pub(crate) fn take_disk(&mut self) -> Disk {
        self.tiers.as_mut().map(TierCopies::take_disk).unwrap_or_default()
    }

    /// Finds the blocks that an earlier process has left on the disk of the KV tier.
    pub(crate) fn recover_disk(&mut self, disk: Disk) {
        let Some(tiers) = &mut self.tiers else { return };
        let blocks = disk.iter().map(|(&slot, (contents, _))| {
            let (key, group) = (contents.key, contents.group);
            RecoveredBlock { slot, key, group }
        });
        let blocks: Vec<_> = blocks.collect();
        self.coverage.add("blocks recovered", blocks.len() as u64);
        tiers.put_disk(disk);
        let tier = Tier::Disk;
        for (blocks, is_complete) in [(blocks, false), (Vec::new(), true)] {
            let recovered = TierEvent::Recovered { tier, blocks, is_complete };
            self.core.handle_tier_event(recovered, self.now);
        }
    }

    /// Gives the core the results of the copies that are due.
    pub(super) fn finish_copies(&mut self) {
        let Some(tiers) = &mut self.tiers else { return };
        while let Some(event) = tiers.take_due(self.now) {
            match &event {
                TierEvent::Loaded { .. } => self.coverage.count("loads from tiers"),
                TierEvent::Saved { .. } => self.coverage.count("saves to tiers"),
                _ => {}
            }
            self.core.handle_tier_event(event, self.now);
        }
    }
}
