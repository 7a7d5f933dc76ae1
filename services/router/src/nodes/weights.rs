//! Calls of weight updates to nodes.

use std::time::Duration;

use cluster::{Epoch, Member, NodeRecord};
use proto::{
    ids::bits,
    v1::{self, weights_client::WeightsClient},
};
use tonic::{Code, Response, Status};
use weight_transfer::{
    CoordinatorCall, NodeReply, UpdateEnd, UpdateId, UpdateState, WeightVersion,
};

use super::Nodes;

/// Deadline of a call. The node answers at once, because the work of an update runs in the
/// background.
const CALL_MAX: Duration = Duration::from_secs(2);

/// A node that serves a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WeightNode {
    pub id: String,
    pub role: &'static str,
    pub epoch: Epoch,
    pub grpc: String,
    pub model: String,
    pub version: WeightVersion,
    pub pause: v1::PauseState,
}

/// An update as the router sends it to every node.
#[derive(Clone, Debug)]
pub(crate) struct UpdateRequest {
    pub id: UpdateId,
    pub label: String,
    pub path: String,
    pub in_flight: v1::InFlight,
    pub transport: v1::WeightsTransport,
}

/// The node from which another node copies the weights.
#[derive(Clone, Debug)]
pub(crate) struct CopyFrom {
    pub node: WeightNode,
    pub version: WeightVersion,
}

/// Answer of a node: the reply for the coordinator, and the pause of the node's last commit.
#[derive(Clone, Debug)]
pub(crate) struct WeightsAnswer {
    pub reply: NodeReply,
    pub paused: Duration,
}

impl Nodes {
    /// Returns the nodes that take part in an update of the weights, in the order of joining.
    pub(crate) fn weight_nodes(&self) -> Vec<WeightNode> {
        let node = |(member, record): (&Member, &NodeRecord)| WeightNode {
            id: record.node_id.to_string(),
            role: member.address.role.as_str(),
            epoch: record.epoch,
            grpc: member.address.grpc.clone(),
            model: record.model.clone(),
            version: WeightVersion(record.identity.weight_version),
            pause: member.load().pause(),
        };
        self.0.router.with(|core| core.weight_nodes().map(node).collect())
    }

    /// Pauses a node, or resumes it if `pause` is `None`. `pause`: the treatment of running
    /// sequences, and the maximum time.
    pub(crate) async fn call_pause(
        &self,
        node: &WeightNode,
        pause: Option<(v1::InFlight, Duration)>,
    ) -> Result<(), String> {
        let channel = self.channel(&node.grpc);
        let channel = channel.ok_or("the router has no connection to it")?;
        let signer = channel.signer.to(node.epoch);
        let mut client = WeightsClient::with_interceptor(channel.channel.clone(), signer);
        let node_epoch = node.epoch.to_bytes().to_vec().into();
        let answer = tokio::time::timeout(CALL_MAX, async {
            match pause {
                Some((in_flight, at_most)) => {
                    let (in_flight, remaining_ms) = (in_flight.into(), at_most.as_millis() as u64);
                    let request = v1::PauseWeightsRequest { node_epoch, in_flight, remaining_ms };
                    client.pause(request).await
                }
                None => client.resume(v1::ResumeWeightsRequest { node_epoch }).await,
            }
        });
        match answer.await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(status)) if status.code() == Code::Unimplemented => {
                Err("it is of an older release without pauses".to_owned())
            }
            Ok(Err(status)) => Err(status.message().to_owned()),
            Err(_) => Err(format!("no answer within {CALL_MAX:?}")),
        }
    }

    /// Makes a call, except `Begin`, of an update that this router may not have begun.
    pub(crate) async fn call_by_id(
        &self,
        node: &WeightNode,
        id: UpdateId,
        call: CoordinatorCall,
    ) -> NodeReply {
        let update = UpdateRequest {
            id,
            label: String::new(),
            path: String::new(),
            in_flight: v1::InFlight::default(),
            transport: v1::WeightsTransport::default(),
        };
        self.call_weights(node, &[], &update, None, call, Duration::ZERO).await.reply
    }

    /// Makes one call of an update. `remaining`: time until the node aborts the update by itself;
    /// zero if another router coordinates the update.
    pub(crate) async fn call_weights(
        &self,
        node: &WeightNode,
        peers: &[WeightNode],
        update: &UpdateRequest,
        from: Option<&CopyFrom>,
        call: CoordinatorCall,
        remaining: Duration,
    ) -> WeightsAnswer {
        let answer = tokio::time::timeout(CALL_MAX, async {
            let no_connection = || Status::unavailable("the router has no connection to it");
            let channel = self.channel(&node.grpc).ok_or_else(no_connection)?;
            let signer = channel.signer.to(node.epoch);
            let mut client = WeightsClient::with_interceptor(channel.channel.clone(), signer);
            let node_epoch = node.epoch.to_bytes().to_vec().into();
            let update_id = update.id.0.to_be_bytes().to_vec().into();
            match call {
                CoordinatorCall::Begin => {
                    let others = peers.iter().filter(|peer| peer.epoch != node.epoch);
                    let from = from.map(|from| v1::WeightsSource {
                        peer: Some(peer(&from.node)),
                        weight_version: from.version.0,
                    });
                    let request = v1::BeginWeightsRequest {
                        node_epoch,
                        update_id,
                        label: update.label.clone(),
                        path: update.path.clone(),
                        from,
                        remaining_ms: remaining.as_millis() as u64,
                        peers: others.map(peer).collect(),
                        in_flight: update.in_flight.into(),
                        transport: update.transport.into(),
                    };
                    client.begin(request).await
                }
                CoordinatorCall::Status => {
                    // While the coordinator of the named update calls, a prepared node does not ask
                    // its peers.
                    let is_coordinator = !remaining.is_zero();
                    let (update_id, asked_update_id) = match is_coordinator {
                        true => (update_id, Default::default()),
                        false => (Default::default(), update_id),
                    };
                    let request =
                        v1::WeightsStatusRequest { node_epoch, update_id, asked_update_id };
                    client.status(request).await
                }
                CoordinatorCall::Commit { version } => {
                    let weight_version = version.0;
                    let request =
                        v1::CommitWeightsRequest { node_epoch, update_id, weight_version };
                    client.commit(request).await
                }
                CoordinatorCall::Abort => {
                    let reason = "the router aborted the update".to_owned();
                    client.abort(v1::AbortWeightsRequest { node_epoch, update_id, reason }).await
                }
            }
        });
        match answer.await {
            Ok(Ok(status)) => answered(update.id, status),
            Ok(Err(status)) => WeightsAnswer { reply: failed(&status), paused: Duration::ZERO },
            Err(_) => {
                let reason = format!("no answer within {CALL_MAX:?}");
                let reply = NodeReply::Unreachable { reason };
                WeightsAnswer { reply, paused: Duration::ZERO }
            }
        }
    }
}

fn peer(node: &WeightNode) -> v1::WeightsPeer {
    v1::WeightsPeer { epoch: node.epoch.to_bytes().to_vec().into(), grpc: node.grpc.clone() }
}

fn answered(id: UpdateId, status: Response<v1::WeightsStatus>) -> WeightsAnswer {
    let update = status.into_inner().update;
    let Some(update) = update.filter(|update| bits(&update.update_id) == Some(id.0)) else {
        return WeightsAnswer { reply: NodeReply::State(None), paused: Duration::ZERO };
    };
    let paused = Duration::from_micros(update.paused_us);
    let version = WeightVersion(update.weight_version);
    let state = match update.state() {
        v1::UpdateState::Receiving => UpdateState::Receiving,
        v1::UpdateState::Prepared => UpdateState::Prepared(version),
        v1::UpdateState::Installing => UpdateState::Installing(version),
        v1::UpdateState::Committed => UpdateState::Ended(UpdateEnd::Committed(version)),
        v1::UpdateState::Aborted => {
            UpdateState::Ended(UpdateEnd::Aborted { reason: update.reason })
        }
        v1::UpdateState::Unspecified => {
            let reason = "the node reports an unknown state".to_owned();
            return WeightsAnswer { reply: NodeReply::Unreachable { reason }, paused };
        }
    };
    WeightsAnswer { reply: NodeReply::State(Some(state)), paused }
}

fn failed(status: &Status) -> NodeReply {
    let reason = status.message().to_owned();
    if let (Code::Aborted, Some(running)) = (status.code(), bits(status.details())) {
        return NodeReply::Busy { running: UpdateId(running) };
    }
    match status.code() {
        Code::Unimplemented if reason.is_empty() => {
            NodeReply::Rejected { reason: "it is of an older release without live updates".into() }
        }
        Code::Unimplemented
        | Code::InvalidArgument
        | Code::Aborted
        | Code::NotFound
        | Code::Unauthenticated => NodeReply::Rejected { reason },
        // The call names the epoch, so another process at this address rejects it.
        Code::FailedPrecondition => NodeReply::Gone { reason },
        _ => NodeReply::Unreachable { reason },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_process_and_a_rejected_call_are_told_apart() {
        let reply = |code| failed(&Status::new(code, "why"));
        let reason = "why".to_owned();
        let gone = NodeReply::Gone { reason: reason.clone() };
        assert_eq!(reply(Code::FailedPrecondition), gone);
        for code in [Code::Aborted, Code::Unauthenticated, Code::NotFound] {
            assert_eq!(reply(code), NodeReply::Rejected { reason: reason.clone() });
        }
        let details = UpdateId(7).0.to_be_bytes().to_vec().into();
        let busy = failed(&Status::with_details(Code::Aborted, "why", details));
        assert_eq!(busy, NodeReply::Busy { running: UpdateId(7) });
        for code in [Code::Unavailable, Code::ResourceExhausted] {
            assert_eq!(reply(code), NodeReply::Unreachable { reason: reason.clone() });
        }
    }
}
