//! The ids of recent attempts: a second call with a known id is rejected.

use std::collections::{HashSet, VecDeque};

use engine::event::SequenceId;

/// A few minutes of calls on a busy node.
const KNOWN_MAX: usize = 4096;

/// The last [`KNOWN_MAX`] ids.
#[derive(Debug, Default)]
pub(crate) struct KnownIds {
    ids: HashSet<SequenceId>,
    oldest_first: VecDeque<SequenceId>,
}

impl KnownIds {
    pub fn contains(&self, id: SequenceId) -> bool {
        self.ids.contains(&id)
    }

    pub fn insert(&mut self, id: SequenceId) {
        if !self.ids.insert(id) {
            return;
        }
        self.oldest_first.push_back(id);
        if self.oldest_first.len() > KNOWN_MAX
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.ids.remove(&oldest);
        }
        debug_assert_eq!(self.ids.len(), self.oldest_first.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_id_is_forgotten_first() {
        let mut known = KnownIds::default();
        for id in 0..KNOWN_MAX as u128 + 1 {
            known.insert(SequenceId(id));
            known.insert(SequenceId(id));
        }
        assert!(!known.contains(SequenceId(0)));
        assert!(known.contains(SequenceId(1)) && known.contains(SequenceId(KNOWN_MAX as u128)));
        assert_eq!(known.oldest_first.len(), KNOWN_MAX);
    }
}
