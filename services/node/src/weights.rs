//! Live weight updates of this node: the gRPC service `baton.v1.Weights`.
//!
//! `actor` owns the state machine of the crate `weight-transfer` and carries out its actions, and
//! `calls` has the calls to the actor. `copy` copies files of weights between nodes. `peers` calls
//! other nodes of an update. `receive` opens, checks and prepares new weights. `trainer` receives
//! weights from a trainer's GPU instead. `standby` owns the weights that are not in use. The engine
//! thread swaps the weights at a step boundary, called through `engine`. `restore` reads the old
//! weights again after an aborted update in place.

mod actor;
mod calls;
mod copy;
mod engine;
mod peers;
mod receive;
mod restore;
mod standby;
mod trainer;

use std::{path::PathBuf, pin::Pin, time::Duration};

use ::engine::event::InFlight;
use cluster::Epoch;
use futures_util::{Stream, stream::poll_fn};
use proto::v1::{self, weights_server};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status};
use weight_transfer::{BeginError, CommitError, UpdateEnd, UpdateId, UpdateState, WeightVersion};

pub(crate) use self::{
    actor::{WeightActor, WeightSettings},
    peers::PeerCredentials,
    receive::{CpuPacking, UpdateLimits},
    restore::LoadedModel,
};
use self::{
    calls::{CheckedUpdate, Handle, WeightsCall, WeightsCallError, WeightsOrigin, WeightsStatus},
    peers::UpdatePeer,
    trainer::address::TrainerAddress,
};
use crate::{
    attempt::{self, AttemptLimits, invalid, shown, within},
    authentication::Proof,
    inbox::{EngineCommand, EngineInbox},
    node_core::Refusal,
};

const LABEL_BYTES_MAX: usize = 128;
const REASON_BYTES_MAX: usize = 512;
const PEERS_MAX: usize = 1024;
const URL_BYTES_MAX: usize = 300;
/// Maximum remaining time of an update in ms: a day.
const REMAINING_MS_MAX: u64 = 86_400_000;

/// gRPC service for the calls of coordinators and peers.
#[derive(Debug)]
pub(crate) struct WeightsService {
    limits: AttemptLimits,
    actor: Handle,
    inbox: EngineInbox,
    /// Cancelled from SIGTERM on.
    draining: CancellationToken,
}

impl WeightsService {
    pub(crate) fn new(
        limits: AttemptLimits,
        actor: Handle,
        inbox: EngineInbox,
        draining: CancellationToken,
    ) -> Self {
        Self { limits, actor, inbox, draining }
    }

    async fn answer(&self, call: WeightsCall) -> Result<Response<v1::WeightsStatus>, Status> {
        let weights = self.actor.call(call).await?;
        Ok(Response::new(status(weights)))
    }
}

#[tonic::async_trait]
impl weights_server::Weights for WeightsService {
    type PullStream = Pin<Box<dyn Stream<Item = Result<v1::WeightsPart, Status>> + Send>>;

    async fn pull(
        &self,
        request: Request<v1::PullWeightsRequest>,
    ) -> Result<Response<Self::PullStream>, Status> {
        let proof = request.extensions().get().cloned();
        let v1::PullWeightsRequest { node_epoch, weight_version } = request.into_inner();
        attempt::check_epoch(&node_epoch, &self.limits)?;
        let mut parts = self.actor.copy(WeightVersion(weight_version)).await?;
        let parts: Self::PullStream = Box::pin(poll_fn(move |context| parts.poll_recv(context)));
        Ok(Proof::add(proof, Response::new(parts)))
    }

    async fn begin(
        &self,
        request: Request<v1::BeginWeightsRequest>,
    ) -> Result<Response<v1::WeightsStatus>, Status> {
        let begin = checked_begin(request.into_inner(), &self.limits)?;
        if self.draining.is_cancelled() {
            return Err(Refusal::Draining.into());
        }
        self.answer(WeightsCall::Begin(begin)).await
    }

    async fn commit(
        &self,
        request: Request<v1::CommitWeightsRequest>,
    ) -> Result<Response<v1::WeightsStatus>, Status> {
        let v1::CommitWeightsRequest { node_epoch, update_id, weight_version } =
            request.into_inner();
        attempt::check_epoch(&node_epoch, &self.limits)?;
        let (id, version) = (update(&update_id)?, WeightVersion(weight_version));
        self.answer(WeightsCall::Commit { id, version }).await
    }

    async fn abort(
        &self,
        request: Request<v1::AbortWeightsRequest>,
    ) -> Result<Response<v1::WeightsStatus>, Status> {
        let v1::AbortWeightsRequest { node_epoch, update_id, reason } = request.into_inner();
        attempt::check_epoch(&node_epoch, &self.limits)?;
        let reason = one_line(&reason);
        self.answer(WeightsCall::Abort { id: update(&update_id)?, reason }).await
    }

    async fn pause(
        &self,
        request: Request<v1::PauseWeightsRequest>,
    ) -> Result<Response<v1::WeightsStatus>, Status> {
        let v1::PauseWeightsRequest { node_epoch, in_flight, remaining_ms } = request.into_inner();
        attempt::check_epoch(&node_epoch, &self.limits)?;
        within("remaining_ms", remaining_ms, 1, REMAINING_MS_MAX)?;
        let (in_flight, waits) = of_requests_in_flight(checked_in_flight(in_flight)?);
        let at_most = Duration::from_millis(remaining_ms);
        let pause = |_permit| EngineCommand::Pause { in_flight, waits, at_most, _permit };
        self.inbox.send_for_router(pause)?;
        self.answer(WeightsCall::Status { coordinated: None, asked: None }).await
    }

    async fn resume(
        &self,
        request: Request<v1::ResumeWeightsRequest>,
    ) -> Result<Response<v1::WeightsStatus>, Status> {
        attempt::check_epoch(&request.into_inner().node_epoch, &self.limits)?;
        self.inbox.send_for_router(|_permit| EngineCommand::Resume { _permit })?;
        self.answer(WeightsCall::Status { coordinated: None, asked: None }).await
    }

    async fn status(
        &self,
        request: Request<v1::WeightsStatusRequest>,
    ) -> Result<Response<v1::WeightsStatus>, Status> {
        let proof = request.extensions().get().cloned();
        let v1::WeightsStatusRequest { node_epoch, update_id, asked_update_id } =
            request.into_inner();
        attempt::check_epoch(&node_epoch, &self.limits)?;
        let coordinated = optional_update("update_id", &update_id)?;
        let asked = optional_update("asked_update_id", &asked_update_id)?;
        let answer = self.answer(WeightsCall::Status { coordinated, asked }).await?;
        Ok(Proof::add(proof, answer))
    }
}

fn update(bytes: &[u8]) -> Result<UpdateId, Refusal> {
    attempt::id("update_id", bytes).map(UpdateId)
}

fn optional_update(field: &str, bytes: &[u8]) -> Result<Option<UpdateId>, Refusal> {
    if bytes.is_empty() { Ok(None) } else { attempt::id(field, bytes).map(UpdateId).map(Some) }
}

/// Returns a caller's text as one bounded line.
fn one_line(text: &str) -> String {
    let mut line = text.replace(char::is_control, " ");
    line.truncate(line.floor_char_boundary(REASON_BYTES_MAX));
    line
}

fn checked_begin(
    request: v1::BeginWeightsRequest,
    limits: &AttemptLimits,
) -> Result<CheckedUpdate, Refusal> {
    attempt::check_epoch(&request.node_epoch, limits)?;
    let label = request.label;
    if label.len() > LABEL_BYTES_MAX || label.chars().any(char::is_control) {
        let expected = format!("at most {LABEL_BYTES_MAX} bytes without control characters");
        return Err(invalid("label", shown(&label), expected));
    }
    within("remaining_ms", request.remaining_ms, 1, REMAINING_MS_MAX)?;
    if request.peers.len() > PEERS_MAX {
        let expected = format!("at most {PEERS_MAX}");
        return Err(invalid("peers", request.peers.len(), expected));
    }
    let peers = request.peers.into_iter().map(|peer| checked_peer("peers", peer));
    let peers = peers.collect::<Result<_, Refusal>>()?;
    let origin = match request.from {
        None => {
            let path = PathBuf::from(&request.path);
            let transport = v1::WeightsTransport::try_from(request.transport);
            match (transport, path.is_absolute()) {
                (Ok(v1::WeightsTransport::Files), true) => WeightsOrigin::Path(path),
                (Ok(v1::WeightsTransport::Ipc), true) => {
                    WeightsOrigin::Trainer(TrainerAddress::Ipc(path))
                }
                (Ok(v1::WeightsTransport::Nccl), _) => {
                    WeightsOrigin::Trainer(TrainerAddress::nccl(&request.path).ok_or_else(
                        || invalid("path", shown(&request.path), "host:port/token of a trainer"),
                    )?)
                }
                (Ok(_), false) => {
                    return Err(invalid("path", shown(&request.path), "an absolute path"));
                }
                (Err(_), _) => return Err(invalid("transport", request.transport, "0 to 2")),
            }
        }
        Some(v1::WeightsSource { peer, weight_version }) => WeightsOrigin::Peer {
            peer: checked_peer("from.peer", peer.unwrap_or_default())?,
            version: WeightVersion(weight_version),
        },
    };
    Ok(CheckedUpdate {
        in_flight: checked_in_flight(request.in_flight)?,
        id: update(&request.update_id)?,
        label,
        origin,
        remaining: Duration::from_millis(request.remaining_ms),
        peers,
    })
}

fn checked_in_flight(value: i32) -> Result<v1::InFlight, Refusal> {
    v1::InFlight::try_from(value).map_err(|_| invalid("in_flight", value, "0 to 3".to_owned()))
}

/// Returns the treatment of running sequences, and whether they may finish first.
fn of_requests_in_flight(in_flight: v1::InFlight) -> (InFlight, bool) {
    match in_flight {
        v1::InFlight::Recompute => (InFlight::Recompute, false),
        v1::InFlight::KeepKv => (InFlight::KeepKv, false),
        v1::InFlight::Wait => (InFlight::Recompute, true),
        v1::InFlight::Abort => (InFlight::Abort, false),
    }
}

fn checked_peer(field: &str, peer: v1::WeightsPeer) -> Result<UpdatePeer, Refusal> {
    let epoch = Epoch(attempt::id(&format!("{field}.epoch"), &peer.epoch)?);
    if peer.grpc.len() > URL_BYTES_MAX {
        let expected = format!("at most {URL_BYTES_MAX} bytes");
        return Err(invalid(&format!("{field}.grpc"), shown(&peer.grpc), expected));
    }
    Ok(UpdatePeer { epoch, grpc: peer.grpc })
}

impl From<WeightsCallError> for Status {
    /// Maps errors as `weights.proto` documents.
    fn from(error: WeightsCallError) -> Self {
        let code = match &error {
            WeightsCallError::Unsupported => Code::Unimplemented,
            WeightsCallError::Commit(CommitError::Unknown { .. })
            | WeightsCallError::NoSource { .. } => Code::NotFound,
            // FAILED_PRECONDITION means another process.
            WeightsCallError::Begin(_) | WeightsCallError::Commit(_) => Code::Aborted,
            WeightsCallError::Busy => Code::ResourceExhausted,
            WeightsCallError::Stopped => Code::Unavailable,
        };
        let running = match &error {
            WeightsCallError::Begin(BeginError::Running { running, .. }) => {
                running.0.to_be_bytes().to_vec()
            }
            _ => Vec::new(),
        };
        Self::with_details(code, error.to_string(), running.into())
    }
}

fn status(weights: WeightsStatus) -> v1::WeightsStatus {
    let WeightsStatus { version, label, report, paused } = weights;
    let update = report.map(|report| {
        use v1::UpdateState as State;
        let (state, version, reason) = match report.state {
            UpdateState::Receiving => (State::Receiving, None, String::new()),
            UpdateState::Prepared(version) => (State::Prepared, Some(version), String::new()),
            UpdateState::Installing(version) => (State::Installing, Some(version), String::new()),
            UpdateState::Ended(UpdateEnd::Committed(version)) => {
                (State::Committed, Some(version), String::new())
            }
            UpdateState::Ended(UpdateEnd::Aborted { reason }) => (State::Aborted, None, reason),
        };
        v1::UpdateStatus {
            update_id: report.id.0.to_be_bytes().to_vec().into(),
            state: state.into(),
            weight_version: version.map_or(0, |version| version.0),
            reason,
            paused_us: paused
                .filter(|(committed, _)| *committed == report.id)
                .map_or(0, |(_, paused)| paused.as_micros() as u64),
        }
    });
    v1::WeightsStatus { weight_version: version.0, label, update }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: AttemptLimits = AttemptLimits {
        epoch: Epoch(7),
        vocabulary_size: 100,
        prompt_tokens_max: 31,
        sequence_tokens_max: 32,
        pooling: true,
    };

    fn request() -> v1::BeginWeightsRequest {
        v1::BeginWeightsRequest {
            node_epoch: LIMITS.epoch.to_bytes().to_vec().into(),
            update_id: vec![1; 16].into(),
            label: "step 100".into(),
            path: "/models/new".into(),
            remaining_ms: 1000,
            peers: Vec::new(),
            from: None,
            in_flight: v1::InFlight::Wait.into(),
            transport: v1::WeightsTransport::Files.into(),
        }
    }

    #[test]
    fn every_field_of_begin_is_checked() {
        assert_eq!(checked_begin(request(), &LIMITS).unwrap().label, "step 100");
        type Change = fn(&mut v1::BeginWeightsRequest);
        let changes: [(Change, &str); 10] = [
            (|it| it.transport = 7, "invalid transport: 7; expected 0 to 2"),
            (|it| it.transport = 2, "invalid path: \"/models/new\"; expected host:port/token"),
            (|it| it.in_flight = 9, "invalid in_flight: 9; expected 0 to 3"),
            (|it| it.node_epoch = vec![9; 16].into(), "node_epoch = "),
            (|it| it.update_id = vec![1; 15].into(), "invalid update_id: 15 bytes; expected 16"),
            (|it| it.label = "a\nb".into(), "invalid label"),
            (
                |it| it.path = "models/new".into(),
                "invalid path: \"models/new\"; expected an absolute",
            ),
            (
                |it| it.from = Some(v1::WeightsSource::default()),
                "invalid from.peer.epoch: 0 bytes; expected 16",
            ),
            (|it| it.remaining_ms = 0, "invalid remaining_ms: 0; expected 1 to"),
            (
                |it| {
                    let peer = v1::WeightsPeer { epoch: vec![].into(), grpc: "http://a:1".into() };
                    it.peers = vec![peer];
                },
                "invalid peers.epoch: 0 bytes",
            ),
        ];
        for (change, words) in changes {
            let mut request = request();
            change(&mut request);
            let error = checked_begin(request, &LIMITS).unwrap_err().to_string();
            assert!(error.starts_with(words), "{error:?} lacks {words:?}");
        }
    }
}
