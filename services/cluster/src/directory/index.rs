//! Deadlines and cached blocks of all members, so that handling an event of one node does not visit
//! the other nodes.

use std::{
    collections::{BTreeSet, HashMap},
    time::Instant,
};

use super::{Directory, Member, NodeKey, Role};

/// State of a member that the directory looks up after every event of any node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Indexed {
    deadline: Option<Instant>,
    role: Role,
    /// Known cached blocks, if the node can be picked.
    cached_blocks: usize,
}

impl Indexed {
    fn of(member: &Member) -> Self {
        Self {
            deadline: member.deadline(),
            role: member.address.role,
            cached_blocks: member.serving().map_or(0, |seen| seen.cached.len()),
        }
    }
}

#[derive(Default)]
pub(super) struct Index {
    members: HashMap<NodeKey, Indexed>,
    deadlines: BTreeSet<(Instant, NodeKey)>,
    cached_blocks: HashMap<Role, usize>,
}

impl Index {
    fn set(&mut self, key: NodeKey, to: Option<Indexed>) {
        let from = match to {
            Some(to) => self.members.insert(key, to),
            None => self.members.remove(&key),
        };
        if from == to {
            return;
        }
        if let Some(Indexed { deadline, role, cached_blocks }) = from {
            deadline.map(|at| self.deadlines.remove(&(at, key)));
            *self.cached_blocks.entry(role).or_default() -= cached_blocks;
        }
        if let Some(Indexed { deadline, role, cached_blocks }) = to {
            self.deadlines.extend(deadline.map(|at| (at, key)));
            *self.cached_blocks.entry(role).or_default() += cached_blocks;
        }
    }
}

impl Directory {
    /// Returns the time of the next call of [`Directory::on_deadline`].
    pub fn next_deadline(&self) -> Option<Instant> {
        self.index.deadlines.first().map(|(at, _)| *at)
    }

    /// Returns the members whose deadline has passed.
    pub(super) fn due(&self, now: Instant) -> Vec<NodeKey> {
        let due = self.index.deadlines.iter().take_while(|(at, _)| *at <= now);
        due.map(|(_, key)| *key).collect()
    }

    /// Returns the number of known cached blocks on this role's nodes that can be picked.
    pub fn cached_blocks(&self, role: Role) -> usize {
        self.index.cached_blocks.get(&role).copied().unwrap_or(0)
    }

    /// Updates the index after a change of the member.
    pub(super) fn reindex(&mut self, key: NodeKey) {
        let indexed = self.members.get(&key).map(Indexed::of);
        self.index.set(key, indexed);
    }

    /// Returns whether the index has the current state of the member.
    pub(super) fn is_indexed(&self, key: NodeKey, member: &Member) -> bool {
        self.index.members.get(&key) == Some(&Indexed::of(member))
    }
}
