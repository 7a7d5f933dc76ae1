//! Names each node its peers for KV transfers (the RPC `Meet`), so that connections between GPUs
//! are set up before a request needs them.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use cluster::{Epoch, NodeRecord, Role};
use proto::v1::{MeetRequest, Peer};
use tonic::Request;

use super::Nodes;
use router_core::peer;

/// Interval of rounds. Nodes close the connection of a pair that is idle for a minute.
const EVERY: Duration = Duration::from_secs(20);
/// Delay of a round after a change, so that one round covers nodes that come up at about the same
/// time.
pub(super) const SETTLES_IN: Duration = Duration::from_millis(100);
/// Maximum delay of a round, while further nodes come up.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(1);
/// Maximum number of peers that a node connects to in advance; other pairs connect at their first
/// request. A node stops earlier when its bound on pairs that use GPU memory or half of its pair
/// table is reached.
const PEERS_MAX: usize = 16;
/// Maximum time from the first change since the last round to the end of the round, and so the
/// maximum time for which a starting router is not ready.
const SETUP_MAX: Duration = Duration::from_secs(2);
/// Minimum duration of a round that begins late.
const SETUP_MIN: Duration = Duration::from_millis(500);

/// Schedule of the rounds that send every node its peers: soon after nodes came up, and
/// periodically.
#[derive(Clone, Copy, Debug)]
pub(super) struct SetupRounds {
    next: Instant,
    /// Time of the first change since the last round.
    since: Option<Instant>,
}

impl SetupRounds {
    pub(super) fn new(now: Instant) -> Self {
        Self { next: now + EVERY, since: None }
    }

    /// Handles a change of a node; other changes may follow soon.
    pub(super) fn on_change(&mut self, now: Instant, settles_in: Duration) {
        let since = *self.since.get_or_insert(now);
        self.next = (now + settles_in).min(since + WAIT_MAX);
    }

    pub(super) fn next(&self) -> Instant {
        self.next
    }

    /// Returns the deadline of the round.
    pub(super) fn on_start(&mut self, now: Instant) -> Instant {
        let since = std::mem::replace(self, Self::new(now)).since.unwrap_or(now);
        (since + SETUP_MAX).max(now + SETUP_MIN)
    }
}

/// Held by the calls of the first round: the router is ready when all of these calls have ended.
pub(super) struct FirstRound(Nodes);

impl FirstRound {
    pub(super) fn new(nodes: Nodes) -> Arc<Self> {
        Arc::new(Self(nodes))
    }
}

impl Drop for FirstRound {
    fn drop(&mut self) {
        self.0.0.connected.store(true, Ordering::Release);
        self.0.changed();
    }
}

/// A Meet call to one node, with the node's peers.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MeetCall {
    url: String,
    epoch: Epoch,
    request: MeetRequest,
}

/// A node that is up.
#[derive(Clone)]
pub(super) struct MeetingNode {
    pub url: String,
    /// The roles whose calls it takes.
    pub takes: Vec<Role>,
    pub record: NodeRecord,
}

/// Returns the Meet calls that pair prefill and decode nodes of equal identity. Both nodes of a
/// pair receive each other. Each prefill node starts with a different decode node, so that every
/// node finds a peer even if nodes allow few pairs. A node that takes both roles meets all nodes.
pub(super) fn connect_calls(serving: &[MeetingNode]) -> Vec<MeetCall> {
    let fits = |one: &NodeRecord, other: &NodeRecord| {
        one.model == other.model && one.identity == other.identity
    };
    let of_role = |role| -> Vec<usize> {
        (0..serving.len()).filter(|index| serving[*index].takes.contains(&role)).collect()
    };
    let (prefills, decodes) = (of_role(Role::Prefill), of_role(Role::Decode));
    let mut peers: Vec<Vec<Peer>> = vec![Vec::new(); serving.len()];
    for offset in 0..decodes.len() {
        for (place, one) in prefills.iter().enumerate() {
            let other = decodes[(place + offset) % decodes.len()];
            let has_room = peers[*one].len() < PEERS_MAX && peers[other].len() < PEERS_MAX;
            let (record, found) = (&serving[*one].record, &serving[other].record);
            let is_new = *one != other && !peers[*one].contains(&peer(found));
            if has_room && is_new && fits(record, found) {
                peers[*one].push(peer(found));
                peers[other].push(peer(record));
            }
        }
    }
    let call = |(node, peers): (&MeetingNode, Vec<Peer>)| {
        let node_epoch = node.record.epoch.to_bytes().to_vec().into();
        let sends = node.takes.contains(&Role::Prefill);
        let request = MeetRequest { node_epoch, peers, sends };
        (!request.peers.is_empty()).then(|| MeetCall {
            url: node.url.clone(),
            epoch: node.record.epoch,
            request,
        })
    };
    serving.iter().zip(peers).filter_map(call).collect()
}

/// Calls Meet. The node answers once its connections are set up. If a node does not answer (for
/// example a node of an older release), its pairs connect at their first request.
pub(super) async fn meet(
    nodes: Nodes,
    call: MeetCall,
    deadline: Instant,
    _first: Option<Arc<FirstRound>>,
) {
    let MeetCall { url, epoch, request } = call;
    let Some(channel) = nodes.channel(&url) else { return };
    let mut request = Request::new(request);
    request.set_timeout(deadline.saturating_duration_since(Instant::now()));
    let mut client = channel.client(epoch);
    match tokio::time::timeout_at(deadline.into(), client.meet(request)).await {
        Ok(Ok(_)) => {}
        Ok(Err(status)) => tracing::debug!(node = url, %status, "a node rejected connection setup"),
        Err(_) => tracing::debug!(node = url, "connection setup timed out"),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn node(url: &str, role: Role, epoch: u128, fingerprint: u128) -> MeetingNode {
        let record = NodeRecord::try_from(record(url, role, epoch, fingerprint)).unwrap();
        MeetingNode { url: url.to_owned(), takes: vec![role], record }
    }

    pub(crate) fn record(
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
            control_endpoint: format!("tcp://127.0.0.1:{epoch}"),
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
            peer_tag: vec![1; 32].into(),
            pooling: false,
            sampling_version: 0,
            adapters: Vec::new(),
            both_roles: false,
            kv_windows: Vec::new(),
            state_blocks: 0,
        }
    }

    #[test]
    fn nodes_of_both_roles_are_paired_where_their_kv_fits() {
        let serving = [
            node("p1", Role::Prefill, 1, 7),
            node("p2", Role::Prefill, 2, 8),
            node("d1", Role::Decode, 3, 7),
            node("d2", Role::Decode, 4, 7),
            node("d3", Role::Decode, 5, 9),
        ];
        let met: Vec<(String, u128, Vec<String>)> = connect_calls(&serving)
            .into_iter()
            .map(|MeetCall { url, epoch, request }| {
                assert_eq!(Epoch::from_bytes(&request.node_epoch), Ok(epoch));
                let ids = request.peers.into_iter().map(|peer| peer.node_id).collect();
                (url, u128::from_be_bytes(epoch.to_bytes()), ids)
            })
            .collect();
        let of = |url: &str, epoch, ids: &[&str]| {
            (url.to_owned(), epoch, ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(met, [of("p1", 1, &["d1", "d2"]), of("d1", 3, &["p1"]), of("d2", 4, &["p1"])]);
    }

    #[test]
    fn nodes_that_take_both_roles_meet_each_other_once_and_send() {
        let both = |url, role, epoch| MeetingNode {
            takes: Role::ALL.to_vec(),
            ..node(url, role, epoch, 7)
        };
        let old = node("old", Role::Decode, 3, 7);
        let calls = connect_calls(&[both("p", Role::Prefill, 1), both("d", Role::Decode, 2), old]);
        let met = calls.into_iter().map(|MeetCall { url, request, .. }| {
            let mut ids: Vec<_> = request.peers.into_iter().map(|peer| peer.node_id).collect();
            ids.sort();
            (url, ids, request.sends)
        });
        let of = |url: &str, ids: &[&str], sends| {
            (url.to_owned(), ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>(), sends)
        };
        let expected = [
            of("p", &["d", "old"], true),
            of("d", &["old", "p"], true),
            of("old", &["d", "p"], false),
        ];
        assert_eq!(met.collect::<Vec<_>>(), expected);
    }

    /// Lets nodes come up at these times, until only the periodic round is due. Returns the number
    /// of Meet calls, and the time of each round.
    fn come_up(start: Instant, ups: &[Duration]) -> (usize, Vec<Duration>) {
        let mut rounds = SetupRounds::new(start);
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
                    calls += connect_calls(&serving).len();
                    began.push(now - start);
                    let over = rounds.on_start(now);
                    assert!(over > now && over <= now + SETUP_MAX);
                    assert_eq!(rounds.next(), now + EVERY);
                }
            }
        }
    }

    #[test]
    fn nodes_that_come_up_together_share_one_round() {
        let start = Instant::now();
        // Each within the delay of the previous one.
        let ups: Vec<_> = (1..=12).map(|count| SETTLES_IN * count / 2).collect();
        let (calls, began) = come_up(start, &ups);
        assert_eq!((calls, began), (12, vec![ups[11] + SETTLES_IN]));
        // Further nodes keep coming up: the first round does not wait for all of them.
        let ups: Vec<_> = (1..=40).map(|count| SETTLES_IN * count / 2).collect();
        let (_, began) = come_up(start, &ups);
        assert_eq!(began[0], ups[0] + WAIT_MAX);
        assert_eq!(began.len(), 2);
        assert!(began[1] > ups[39], "{began:?}");
        // Far apart: one round each.
        let ups: Vec<_> = (1..=3).map(|count| WAIT_MAX * count).collect();
        let (calls, began) = come_up(start, &ups);
        assert_eq!(began, ups.iter().map(|up| *up + SETTLES_IN).collect::<Vec<_>>());
        assert_eq!(calls, 2 + 3, "the first node had no peer");
    }

    #[test]
    fn nodes_with_room_for_few_peers_agree_on_the_pairs() {
        const ROOM: usize = 4;
        for count in [6, 16, 20] {
            let prefill = (1..=count).map(|epoch| node("p", Role::Prefill, epoch, 7));
            let decode = (1..=count).map(|epoch| node("d", Role::Decode, 1000 + epoch, 7));
            let calls = connect_calls(&prefill.chain(decode).collect::<Vec<_>>());
            let pairs: BTreeSet<(Vec<u8>, Vec<u8>)> = calls
                .iter()
                .flat_map(|MeetCall { request, .. }| {
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
    fn no_node_receives_more_than_the_maximum_of_peers() {
        for (prefills, decodes) in [(1, 98), (98, 1), (40, 50)] {
            let prefill = (1..=prefills).map(|epoch| node("p", Role::Prefill, epoch, 7));
            let decode = (1..=decodes).map(|epoch| node("d", Role::Decode, 1000 + epoch, 7));
            let calls = connect_calls(&prefill.chain(decode).collect::<Vec<_>>());
            let told = calls.iter().map(|it| it.request.peers.len());
            assert_eq!(told.max(), Some(PEERS_MAX));
            // Both nodes of a pair receive each other.
            let pairs: BTreeSet<(Vec<u8>, Vec<u8>)> = calls
                .iter()
                .flat_map(|MeetCall { request, .. }| {
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
