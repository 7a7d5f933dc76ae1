//! Tells nodes with which others they will exchange KV, so that what two GPUs need for that is made before
//! a request waits for it.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use cluster::{NodeRecord, Role};
use proto::v1::{MeetRequest, Peer};
use tonic::Request;

use super::{Nodes, channel};

/// Nodes let go of a pair that is idle for a minute.
const EVERY: Duration = Duration::from_secs(20);
/// Nodes that are started together come up one soon after the other.
pub const SETTLES_IN: Duration = Duration::from_millis(100);
/// A node that is up waits no longer, whatever else comes up meanwhile or is still to.
pub const WAIT_MAX: Duration = Duration::from_secs(1);
/// With whom a node is brought together at most; with others its first request makes the pair. Few beside
/// the pairs that a node may have, 64 unless set otherwise; nodes make no more of them than they have room
/// for, those first that are named first.
const PEERS_MAX: usize = 16;
/// From the first change since the round before to the last node's having met: so long a router that starts is not
/// ready.
const MET_MAX: Duration = Duration::from_secs(2);
/// What a round has in any case, when it begins late.
const MET_MIN: Duration = Duration::from_millis(500);

/// When all nodes are introduced anew: soon after some have come up, once for all of them, and otherwise
/// every now and then.
#[derive(Clone, Copy, Debug)]
pub struct Rounds {
    next: Instant,
    /// When the first node changed since the last round.
    since: Option<Instant>,
}

impl Rounds {
    pub fn new(now: Instant) -> Self {
        Self { next: now + EVERY, since: None }
    }

    /// A node has changed; others are soon to.
    pub fn on_change(&mut self, now: Instant, settles_in: Duration) {
        let since = *self.since.get_or_insert(now);
        self.next = (now + settles_in).min(since + WAIT_MAX);
    }

    pub fn next(&self) -> Instant {
        self.next
    }

    /// Returns when all of the round is over.
    pub fn on_start(&mut self, now: Instant) -> Instant {
        let since = std::mem::replace(self, Self::new(now)).since.unwrap_or(now);
        (since + MET_MAX).max(now + MET_MIN)
    }
}

/// Held by the calls of the first round: the router is not ready before all of them are over.
pub struct FirstRound(Nodes);

impl FirstRound {
    pub fn new(nodes: Nodes) -> Arc<Self> {
        Arc::new(Self(nodes))
    }
}

impl Drop for FirstRound {
    fn drop(&mut self) {
        self.0.0.introduced.store(true, Ordering::Release);
        self.0.changed();
    }
}

/// One node, and whom it is to meet.
#[derive(Clone, Debug, PartialEq)]
pub struct Introduction {
    url: String,
    request: MeetRequest,
}

/// Prefill nodes are told of decode nodes that their KV fits, and the other way round: of each other, so that
/// neither has more to do with it than the other. Each begins with another one, so that none is left over
/// where nodes have room for few.
pub fn introductions(serving: &[(String, Role, NodeRecord)]) -> Vec<Introduction> {
    let fits = |one: &NodeRecord, other: &NodeRecord| {
        one.model == other.model && one.identity == other.identity
    };
    let of_role = |role| -> Vec<usize> {
        (0..serving.len()).filter(|index| serving[*index].1 == role).collect()
    };
    let (prefills, decodes) = (of_role(Role::Prefill), of_role(Role::Decode));
    let mut peers: Vec<Vec<Peer>> = vec![Vec::new(); serving.len()];
    for offset in 0..decodes.len() {
        for (place, one) in prefills.iter().enumerate() {
            let other = decodes[(place + offset) % decodes.len()];
            let has_room = peers[*one].len() < PEERS_MAX && peers[other].len() < PEERS_MAX;
            let (record, found) = (&serving[*one].2, &serving[other].2);
            if has_room && fits(record, found) {
                peers[*one].push(peer(found));
                peers[other].push(peer(record));
            }
        }
    }
    let introduction = |((url, _, record), peers): (&(String, Role, NodeRecord), Vec<Peer>)| {
        let node_epoch = record.epoch.to_bytes().to_vec().into();
        let request = MeetRequest { node_epoch, peers };
        (!request.peers.is_empty()).then(|| Introduction { url: url.clone(), request })
    };
    serving.iter().zip(peers).filter_map(introduction).collect()
}

/// A node as its peers are told of it.
pub fn peer(record: &NodeRecord) -> Peer {
    Peer {
        node_id: record.node_id.to_string(),
        epoch: record.epoch.to_bytes().to_vec().into(),
        notice_endpoint: record.notice_endpoint.clone(),
    }
}

/// A node answers when the meetings are over. One that does not answer, or is of a release that has not heard
/// of this, costs nothing but time: its first request makes the pair.
pub async fn introduce(
    nodes: Nodes,
    introduction: Introduction,
    deadline: Instant,
    _first: Option<Arc<FirstRound>>,
) {
    let Introduction { url, request } = introduction;
    let Ok(channel) = nodes.channel(&url) else { return };
    let mut request = Request::new(request);
    request.set_timeout(deadline.saturating_duration_since(Instant::now()));
    let mut client = channel::client(channel);
    match tokio::time::timeout_at(deadline.into(), client.meet(request)).await {
        Ok(Ok(_)) => {}
        Ok(Err(status)) => tracing::debug!(node = url, %status, "a node was not introduced"),
        Err(_) => tracing::debug!(node = url, "a node was not introduced in time"),
    }
}

#[cfg(test)]
pub mod tests {
    use std::collections::BTreeSet;

    use cluster::Epoch;

    use super::*;

    fn node(url: &str, role: Role, epoch: u128, fingerprint: u128) -> (String, Role, NodeRecord) {
        let wire = record(url, role, epoch, fingerprint);
        (url.to_owned(), role, NodeRecord::try_from(wire).unwrap())
    }

    pub fn record(
        node_id: &str,
        role: Role,
        epoch: u128,
        fingerprint: u128,
    ) -> proto::v1::NodeRecord {
        proto::v1::NodeRecord {
            node_id: node_id.into(),
            epoch: epoch.to_be_bytes().to_vec().into(),
            role: match role {
                Role::Prefill => proto::v1::Role::Prefill.into(),
                Role::Decode => proto::v1::Role::Decode.into(),
            },
            notice_endpoint: format!("tcp://127.0.0.1:{epoch}"),
            model: "ours".into(),
            identity: Some(proto::v1::ModelIdentity {
                model_fingerprint: fingerprint.to_be_bytes().to_vec().into(),
                weight_version: 1,
                kv_layout: "a layout".into(),
                block_size: 16,
                dtype: "f32".into(),
                tp: 1,
                protocol_min: 1,
                protocol_max: 1,
            }),
            prompt_tokens_max: 100,
            sequence_tokens_max: 100,
            block_count: 10,
            vocabulary_size: 10,
            grammar_version: 0,
            cpu_fallback: String::new(),
        }
    }

    #[test]
    fn nodes_of_both_roles_meet_where_their_kv_fits() {
        let serving = [
            node("p1", Role::Prefill, 1, 7),
            node("p2", Role::Prefill, 2, 8),
            node("d1", Role::Decode, 3, 7),
            node("d2", Role::Decode, 4, 7),
            node("d3", Role::Decode, 5, 9),
        ];
        let met: Vec<(String, u128, Vec<String>)> = introductions(&serving)
            .into_iter()
            .map(|Introduction { url, request }| {
                let epoch = Epoch::from_bytes(&request.node_epoch).unwrap();
                let ids = request.peers.into_iter().map(|peer| peer.node_id).collect();
                (url, u128::from_be_bytes(epoch.to_bytes()), ids)
            })
            .collect();
        let of = |url: &str, epoch, ids: &[&str]| {
            (url.to_owned(), epoch, ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(met, [of("p1", 1, &["d1", "d2"]), of("d1", 3, &["p1"]), of("d2", 4, &["p1"])]);
    }

    /// Nodes come up at these moments, and time goes on until no round is due before the next that comes by
    /// itself. Returns how often `Meet` was called, and when each round began.
    fn come_up(start: Instant, ups: &[Duration]) -> (usize, Vec<Duration>) {
        let mut rounds = Rounds::new(start);
        let (mut serving, mut calls, mut began) = (Vec::new(), 0, Vec::new());
        let mut ups = ups.iter().map(|after| start + *after).peekable();
        loop {
            match ups.next_if(|up| *up < rounds.next()) {
                Some(up) => {
                    let epoch = serving.len() as u128 + 1;
                    let role = Role::ALL[serving.len() % 2];
                    serving.push(node("n", role, epoch, 7));
                    rounds.on_change(up, SETTLES_IN);
                }
                None if ups.peek().is_none() && rounds.next() >= start + EVERY => {
                    return (calls, began);
                }
                None => {
                    let now = rounds.next();
                    calls += introductions(&serving).len();
                    began.push(now - start);
                    let over = rounds.on_start(now);
                    assert!(over > now && over <= now + MET_MAX);
                    assert_eq!(rounds.next(), now + EVERY);
                }
            }
        }
    }

    #[test]
    fn nodes_that_come_up_together_are_introduced_once() {
        let start = Instant::now();
        // Each soon after the one before.
        let ups: Vec<_> = (1..=12).map(|count| SETTLES_IN * count / 2).collect();
        let (calls, began) = come_up(start, &ups);
        assert_eq!((calls, began), (12, vec![ups[11] + SETTLES_IN]));
        // Without an end: those that are up do not wait for all others.
        let ups: Vec<_> = (1..=40).map(|count| SETTLES_IN * count / 2).collect();
        let (_, began) = come_up(start, &ups);
        assert_eq!(began[0], ups[0] + WAIT_MAX);
        assert_eq!(began.len(), 2);
        assert!(began[1] > ups[39], "{began:?}");
        // Alone, one after the other.
        let ups: Vec<_> = (1..=3).map(|count| WAIT_MAX * count).collect();
        let (calls, began) = come_up(start, &ups);
        assert_eq!(began, ups.iter().map(|up| *up + SETTLES_IN).collect::<Vec<_>>());
        assert_eq!(calls, 2 + 3, "the first had nobody to meet");
    }

    #[test]
    fn nodes_with_room_for_few_agree_whom_to_take_and_none_is_left_over() {
        const ROOM: usize = 4;
        for count in [6, 16, 20] {
            let prefill = (1..=count).map(|epoch| node("p", Role::Prefill, epoch, 7));
            let decode = (1..=count).map(|epoch| node("d", Role::Decode, 1000 + epoch, 7));
            let introductions = introductions(&prefill.chain(decode).collect::<Vec<_>>());
            let pairs: BTreeSet<(Vec<u8>, Vec<u8>)> = introductions
                .iter()
                .flat_map(|Introduction { request, .. }| {
                    let epoch = request.node_epoch.to_vec();
                    let first = request.peers.iter().take(ROOM);
                    first.map(move |peer| (epoch.clone(), peer.epoch.to_vec()))
                })
                .collect();
            assert_eq!(pairs.len(), 2 * count as usize * ROOM);
            assert!(pairs.iter().all(|(one, other)| pairs.contains(&(other.clone(), one.clone()))));
        }
    }

    #[test]
    fn no_node_is_brought_together_with_more_than_a_few() {
        for (prefills, decodes) in [(1, 98), (98, 1), (40, 50)] {
            let prefill = (1..=prefills).map(|epoch| node("p", Role::Prefill, epoch, 7));
            let decode = (1..=decodes).map(|epoch| node("d", Role::Decode, 1000 + epoch, 7));
            let introductions = introductions(&prefill.chain(decode).collect::<Vec<_>>());
            let told = introductions.iter().map(|it| it.request.peers.len());
            assert_eq!(told.max(), Some(PEERS_MAX));
            // Whoever greets is greeted: what the one is told of the other, the other is told of it.
            let pairs: BTreeSet<(Vec<u8>, Vec<u8>)> = introductions
                .iter()
                .flat_map(|Introduction { request, .. }| {
                    let epoch = request.node_epoch.to_vec();
                    request.peers.iter().map(move |peer| (epoch.clone(), peer.epoch.to_vec()))
                })
                .collect();
            let mutual =
                |(one, other): &(Vec<u8>, Vec<u8>)| pairs.contains(&(other.clone(), one.clone()));
            assert!(pairs.iter().all(mutual));
        }
    }
}
