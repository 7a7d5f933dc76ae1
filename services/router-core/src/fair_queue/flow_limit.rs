//! A bound that flows share. Pure.

use std::collections::HashMap;

use super::{Flow, FlowName};

/// 1/8 of the places is left to flows within their share.
const HEADROOM: u32 = 8;

/// Bound on the requests of all flows. A flow of a key or tenant that has taken its share leaves an
/// eighth of the places to other flows. Callers without key and tenant are indistinguishable and
/// may take every place.
#[derive(Debug)]
pub struct FlowLimit {
    max: u32,
    total: u32,
    taken: HashMap<FlowName, TakenSlots>,
}

#[derive(Clone, Copy, Debug)]
struct TakenSlots {
    count: u32,
    weight: u32,
}

/// Reason why no place was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitReached {
    /// Every place is taken.
    All,
    /// The flow has its share.
    Share,
}

impl FlowLimit {
    pub fn new(max: u32) -> Self {
        Self { max, total: 0, taken: HashMap::new() }
    }

    pub fn max(&self) -> u32 {
        self.max
    }

    /// Returns the number of places that the flow can have when no other flow has any.
    pub fn max_of(&self, flow: &Flow) -> u32 {
        match flow.name {
            FlowName::Shared => self.max,
            _ => self.open_max(),
        }
    }

    /// Returns the number of places without the headroom.
    fn open_max(&self) -> u32 {
        self.max - self.max / HEADROOM
    }

    /// Returns the number of taken places.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Takes all of these places, or none.
    pub fn take(&mut self, flow: &Flow, count: u32) -> Result<(), LimitReached> {
        let total = self.total.saturating_add(count);
        if total > self.max {
            return Err(LimitReached::All);
        }
        let own = self.taken.get(&flow.name).map_or(0, |taken| taken.count);
        if total > self.open_max()
            && flow.name != FlowName::Shared
            && own + count > self.share(flow)
        {
            return Err(LimitReached::Share);
        }
        self.add(flow, count);
        Ok(())
    }

    /// Takes these places even beyond the bound.
    pub fn add(&mut self, flow: &Flow, count: u32) {
        self.total = self.total.saturating_add(count);
        let taken = TakenSlots { count: 0, weight: flow.weight };
        let taken = self.taken.entry(flow.name.clone()).or_insert(taken);
        (taken.count, taken.weight) = (taken.count.saturating_add(count), flow.weight);
    }

    pub fn release(&mut self, flow: &FlowName, count: u32) {
        self.total -= count;
        let taken = self.taken.get_mut(flow).expect("the places were taken");
        taken.count -= count;
        if taken.count == 0 {
            self.taken.remove(flow);
        }
    }

    /// Returns the flow's share: its number of places when all present flows take their shares and
    /// leave the headroom.
    fn share(&self, flow: &Flow) -> u32 {
        let others = self.taken.iter().filter(|(name, _)| **name != flow.name);
        let weights: u64 = others.map(|(_, taken)| u64::from(taken.weight)).sum();
        let own = u64::from(flow.weight);
        (u64::from(self.open_max()) * own / (own + weights).max(1)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str, weight: u32) -> Flow {
        Flow { weight, ..Flow::new(FlowName::Key(name.into())) }
    }

    fn take_all(limit: &mut FlowLimit, flow: &Flow) -> (u32, LimitReached) {
        let mut count = 0;
        loop {
            match limit.take(flow, 1) {
                Ok(()) => count += 1,
                Err(reached) => return (count, reached),
            }
        }
    }

    #[test]
    fn flows_that_flood_leave_places_to_a_flow_within_its_share() {
        let mut limit = FlowLimit::new(64);
        let (a, b, c) = (key("a", 1), key("b", 1), key("c", 2));
        assert_eq!(take_all(&mut limit, &a), (56, LimitReached::Share));
        assert_eq!(take_all(&mut limit, &b), (8, LimitReached::All));
        limit.release(&b.name, 8);
        limit.release(&a.name, 56);
        assert!(limit.taken.is_empty() && limit.total == 0);
        // Two flooding flows together leave the eighth to a third one.
        for _ in 0..28 {
            limit.take(&a, 1).unwrap();
            limit.take(&b, 1).unwrap();
        }
        for flow in [&a, &b] {
            assert_eq!(limit.take(flow, 5).unwrap_err(), LimitReached::Share);
        }
        assert_eq!(take_all(&mut limit, &c), (8, LimitReached::All));
        limit.add(&a, 1);
        limit.release(&a.name, 1);
    }

    #[test]
    fn flow_alone_may_take_at_once_what_it_can_have() {
        for flow in [key("a", 1), key("b", 7), Flow::new(FlowName::Shared)] {
            for max in [1, 7, 8, 64] {
                let mut limit = FlowLimit::new(max);
                let most = limit.max_of(&flow);
                limit.take(&flow, most + 1).unwrap_err();
                limit.take(&flow, most).unwrap();
            }
        }
    }

    #[test]
    fn callers_that_cannot_be_told_apart_may_take_every_place() {
        let mut limit = FlowLimit::new(8);
        let shared = Flow::new(FlowName::Shared);
        assert_eq!(limit.take(&shared, 9).unwrap_err(), LimitReached::All);
        assert_eq!(take_all(&mut limit, &shared), (8, LimitReached::All));
    }
}
