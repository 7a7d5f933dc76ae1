//! The network interfaces of the nodes, which send and receive one chunk after the other.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

/// Times at which the network interface of each process has sent and received all chunks.
#[derive(Default)]
pub(crate) struct LinkEnds {
    sent: HashMap<usize, Instant>,
    received: HashMap<usize, Instant>,
}

impl LinkEnds {
    /// Returns the time at which a chunk is sent. `time`: duration without other chunks. Chunks of
    /// a node are sent one after the other.
    pub(crate) fn transfer(
        &mut self,
        now: Instant,
        (from, to): (usize, usize),
        time: Duration,
    ) -> Instant {
        let sent = self.sent.entry(from).or_insert(now);
        let received = self.received.entry(to).or_insert(now);
        let end = now.max(*sent).max(*received) + time;
        (*sent, *received) = (end, end);
        end
    }
}
