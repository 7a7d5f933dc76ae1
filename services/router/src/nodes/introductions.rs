//! Tells nodes with which others they will exchange KV, so that what two GPUs need for that is made before
//! a request waits for it.

use std::time::Duration;

use cluster::{NodeRecord, Role};
use proto::v1::{MeetRequest, Peer};
use tonic::Request;

use super::{Nodes, channel};

/// Nodes let go of a pair that is idle for a minute.
pub const EVERY: Duration = Duration::from_secs(20);
/// With whom a node is brought together at most; with others its first request makes the pair. Few beside
/// the pairs that a node may have, 64 unless set otherwise: each introduction is a greeting, which finds
/// room at the greeted node even if another pair has to go for it.
const PEERS_MAX: usize = 16;
/// Nobody waits for it.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// One node, and whom it is to meet.
#[derive(Clone, Debug, PartialEq)]
pub struct Introduction {
    url: String,
    request: MeetRequest,
}

/// Prefill nodes are told of decode nodes that their KV fits, and the other way round: of each other, so that
/// neither has more to do with it than the other.
pub fn introductions(serving: &[(String, Role, NodeRecord)]) -> Vec<Introduction> {
    let fits = |one: &NodeRecord, other: &NodeRecord| {
        one.model == other.model && one.identity == other.identity
    };
    let mut peers: Vec<Vec<Peer>> = vec![Vec::new(); serving.len()];
    for (index, (_, role, record)) in serving.iter().enumerate() {
        for (later, (_, other, found)) in serving.iter().enumerate().skip(index + 1) {
            let has_room = peers[index].len() < PEERS_MAX && peers[later].len() < PEERS_MAX;
            if has_room && other != role && fits(record, found) {
                peers[index].push(peer(found));
                peers[later].push(peer(record));
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

/// A node that does not answer, or is of a release that has not heard of this, costs nothing: its first
/// request makes the pair.
pub async fn introduce(nodes: Nodes, introduction: Introduction) {
    let Introduction { url, request } = introduction;
    let Ok(channel) = nodes.channel(&url) else { return };
    let mut request = Request::new(request);
    request.set_timeout(ANSWER_MAX);
    let mut client = channel::client(channel);
    match tokio::time::timeout(ANSWER_MAX, client.meet(request)).await {
        Ok(Ok(_)) => {}
        Ok(Err(status)) => tracing::debug!(node = url, %status, "a node was not introduced"),
        Err(_) => tracing::debug!(node = url, "a node was not introduced in time"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use cluster::Epoch;

    use super::*;

    fn node(url: &str, role: Role, epoch: u128, fingerprint: u128) -> (String, Role, NodeRecord) {
        let wire = proto::v1::NodeRecord {
            node_id: url.into(),
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
        };
        (url.to_owned(), role, NodeRecord::try_from(wire).unwrap())
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
