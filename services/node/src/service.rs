//! The gRPC service of a node: `baton.v1.Node`.
//!
//! This module checks each call, sends it to the engine thread and streams the events back. A
//! dropped call, a closed stream and a lost connection all drop the attempt's stream, which cancels
//! the attempt.

use std::{
    convert::Infallible,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use cluster::Role;
use kv_transfer::{
    CONNECT_TIMEOUT,
    api::{self as transfer, ConnectGuard},
};
use proto::{
    auth::ClusterSecret,
    v1::{self, node_server},
};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status, metadata::MetadataMap};

use crate::{
    adapters::{AdapterError, NodeAdapters},
    attempt::{self, AttemptLimits, NewAttempt},
    authentication::Proof,
    grammars::Grammars,
    inbox::{EngineCommand, EngineInbox},
    node_core::{Refusal, Reply},
    observe,
    stream::MessageStream,
    trace::{self, StepTraceRequest},
    wire,
};

/// Maximum length of a `traceparent`. Version 00 has 55 bytes; later versions may append.
const TRACEPARENT_BYTES_MAX: usize = 128;

/// gRPC service for the calls of routers.
#[derive(Debug)]
pub(crate) struct NodeService {
    role: Role,
    limits: AttemptLimits,
    grammars: Grammars,
    adapters: NodeAdapters,
    inbox: EngineInbox,
    /// Checks the tags of peers.
    secret: ClusterSecret,
    observer_permits: Arc<Semaphore>,
    /// One trace at a time.
    trace_permit: Arc<Semaphore>,
    /// One change of the adapters at a time.
    adapters_permit: Arc<Semaphore>,
    /// Cancelled from SIGTERM on.
    draining: CancellationToken,
}

impl NodeService {
    pub(crate) fn new(
        role: Role,
        limits: AttemptLimits,
        grammars: Grammars,
        adapters: NodeAdapters,
        inbox: EngineInbox,
        secret: ClusterSecret,
        draining: CancellationToken,
    ) -> Self {
        let observer_permits = observe::permits();
        let [trace_permit, adapters_permit] = [(); 2].map(|()| Arc::new(Semaphore::new(1)));
        Self {
            role,
            limits,
            grammars,
            adapters,
            inbox,
            secret,
            observer_permits,
            trace_permit,
            adapters_permit,
            draining,
        }
    }

    /// Rejects a peer in `field` that is not a member of the cluster. Needed because a call's token
    /// does not cover its message.
    fn check_member(&self, field: &str, peer: Option<&v1::Peer>) -> Result<(), Refusal> {
        match peer.is_none_or(|peer| self.secret.is_tagged(peer)) {
            true => Ok(()),
            false => Err(Refusal::Field {
                field: format!("{field}.tag"),
                value: "a tag of another peer or secret".to_owned(),
                expected: "the tag from the record of the peer".to_owned(),
            }),
        }
    }

    /// Loads or unloads an adapter on a blocking thread and tells the routers, even if the caller
    /// has cancelled the call.
    async fn change_adapters<T: Send + 'static>(
        &self,
        node_epoch: &[u8],
        change: impl FnOnce(&NodeAdapters) -> Result<T, AdapterError> + Send + 'static,
    ) -> Result<T, Status> {
        attempt::check_epoch(node_epoch, &self.limits)?;
        let permit = self.adapters_permit.clone().try_acquire_owned().map_err(|_| {
            let reason = "the node is loading or unloading another adapter; try again later";
            Refusal::Busy { reason: reason.to_owned() }
        })?;
        let (adapters, inbox) = (self.adapters.clone(), self.inbox.clone());
        let changed = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            let changed = change(&adapters);
            // Also after an error: an earlier change may have found the inbox full.
            let told = inbox
                .send_for_router(|_permit| EngineCommand::AdaptersChanged { adapters, _permit });
            let changed = changed?;
            told?;
            Ok::<T, Refusal>(changed)
        });
        let changed = changed.await.map_err(|error| Status::internal(error.to_string()))?;
        Ok(changed?)
    }

    /// Takes a `Prefill` or `Decode` call through its stages. Before them, `grpc_server` limits the
    /// connection and `authentication` checks the call's token.
    async fn attempt<R, T>(
        &self,
        (field, peer): (&'static str, Option<v1::Peer>),
        request: Request<R>,
        checked: fn(R, String, &AttemptLimits, Instant) -> Result<NewAttempt, Refusal>,
        message: fn(Reply) -> Option<T>,
    ) -> Result<Response<MessageStream<T>>, Status> {
        // 1. The peer of the transfer is a member.
        self.check_member(field, peer.as_ref())?;
        // 2. Every field is valid.
        let traceparent = traceparent(request.metadata());
        let mut attempt = checked(request.into_inner(), traceparent, &self.limits, Instant::now())?;
        attempt.sequence.adapter = self.adapters.of_attempt(attempt.adapter)?;
        // 3. The grammar is compiled.
        let attempt = self.grammars.constrained(attempt).await?;
        // 4. The engine thread gives the attempt to `NodeCore`, which accepts it. From here on
        //    `node_core::take_turn` shows the order: scheduler, device, transfers, replies.
        let replies = self.inbox.begin(attempt).await.map_err(|refusal| match refusal {
            Refusal::Stopped if self.draining.is_cancelled() => Refusal::Draining,
            refusal => refusal,
        })?;
        // 5. Each reply becomes a message. Dropping the stream cancels the attempt.
        Ok(Response::new(MessageStream { replies, message }))
    }
}

#[tonic::async_trait]
impl node_server::Node for NodeService {
    type PrefillStream = MessageStream<v1::PrefillEvent>;
    type DecodeStream = MessageStream<v1::DecodeEvent>;
    type ObserveStream = observe::ObserveStream;

    async fn prefill(
        &self,
        request: Request<v1::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let peer = ("decode", request.get_ref().decode.clone());
        let checked = NewAttempt::send;
        self.attempt(peer, request, checked, wire::prefill_event).await
    }

    async fn decode(
        &self,
        request: Request<v1::DecodeRequest>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        // `Prefill` has no such check: the engine thread accepts calls that move a sequence away.
        if self.draining.is_cancelled() {
            return Err(Refusal::Draining.into());
        }
        let peer = ("prefill", request.get_ref().prefill.clone());
        let checked = NewAttempt::receive_or_compute;
        self.attempt(peer, request, checked, wire::decode_event).await
    }

    async fn meet(
        &self,
        request: Request<v1::MeetRequest>,
    ) -> Result<Response<v1::MeetReply>, Status> {
        for peer in &request.get_ref().peers {
            self.check_member("peers", Some(peer))?;
        }
        let sends = self.role == Role::Prefill || request.get_ref().sends;
        let peers = attempt::meet_peers(request.into_inner(), &self.limits)?;
        let (guard, mut over) = mpsc::channel::<Infallible>(1);
        let guard: ConnectGuard = Arc::new(guard);
        let connect = |peer| transfer::Command::Connect { peer, sends, guard: Some(guard.clone()) };
        let commands = peers.into_iter().map(connect).collect();
        self.inbox.send_for_router(|_permit| EngineCommand::Connect { commands, _permit })?;
        drop(guard);
        // Nothing is ever sent: `recv` returns when every clone of the guard is dropped.
        tokio::select! {
            _ = over.recv() => {}
            () = self.draining.cancelled() => {}
            () = tokio::time::sleep(CONNECT_TIMEOUT) => {}
        }
        Ok(Response::new(v1::MeetReply {}))
    }

    async fn set_draining(
        &self,
        request: Request<v1::SetDrainingRequest>,
    ) -> Result<Response<v1::SetDrainingReply>, Status> {
        let v1::SetDrainingRequest { node_epoch, draining } = request.into_inner();
        attempt::check_epoch(&node_epoch, &self.limits)?;
        // After SIGTERM the drain cannot be undone.
        if self.draining.is_cancelled() {
            return Err(Refusal::Draining.into());
        }
        self.inbox.send_for_router(|_permit| EngineCommand::SetDraining { draining, _permit })?;
        tracing::info!(draining, "an operator changed whether the node accepts requests");
        Ok(Response::new(v1::SetDrainingReply { attempts: self.inbox.attempt_count() }))
    }

    async fn reset_prefix_cache(
        &self,
        request: Request<v1::ResetPrefixCacheRequest>,
    ) -> Result<Response<v1::ResetPrefixCacheReply>, Status> {
        attempt::check_epoch(&request.into_inner().node_epoch, &self.limits)?;
        let (dropped, received) = oneshot::channel();
        self.inbox
            .send_for_router(|_permit| EngineCommand::ResetPrefixCache { dropped, _permit })?;
        let blocks = received.await.map_err(|_| Refusal::Stopped)?;
        tracing::info!(blocks, "an operator reset the prefix cache");
        Ok(Response::new(v1::ResetPrefixCacheReply { blocks }))
    }

    async fn load_adapter(
        &self,
        request: Request<v1::LoadAdapterRequest>,
    ) -> Result<Response<v1::LoadAdapterReply>, Status> {
        let v1::LoadAdapterRequest { node_epoch, name, path } = request.into_inner();
        let load = move |adapters: &NodeAdapters| adapters.load(&name, Path::new(&path));
        let content_hash = self.change_adapters(&node_epoch, load).await?;
        let content_hash = content_hash.to_be_bytes().to_vec().into();
        Ok(Response::new(v1::LoadAdapterReply { content_hash }))
    }

    async fn unload_adapter(
        &self,
        request: Request<v1::UnloadAdapterRequest>,
    ) -> Result<Response<v1::UnloadAdapterReply>, Status> {
        let v1::UnloadAdapterRequest { node_epoch, name } = request.into_inner();
        let unload = move |adapters: &NodeAdapters| adapters.unload(&name);
        let attempts = self.change_adapters(&node_epoch, unload).await? as u32;
        Ok(Response::new(v1::UnloadAdapterReply { attempts }))
    }

    async fn trace(
        &self,
        request: Request<v1::TraceRequest>,
    ) -> Result<Response<v1::TraceReply>, Status> {
        let v1::TraceRequest { node_epoch, seconds } = request.into_inner();
        attempt::check_epoch(&node_epoch, &self.limits)?;
        if !(1..=trace::SECONDS_MAX).contains(&seconds) {
            return Err(Refusal::Field {
                field: "seconds".to_owned(),
                value: seconds.to_string(),
                expected: format!("1 to {}", trace::SECONDS_MAX),
            }
            .into());
        }
        let permit = self.trace_permit.clone().try_acquire_owned().map_err(|_| {
            let reason = "the node records a trace already; try again when it has ended";
            Refusal::Busy { reason: reason.to_owned() }
        })?;
        let (recorded, received) = oneshot::channel();
        let request =
            StepTraceRequest { time: Duration::from_secs(seconds.into()), recorded, permit };
        self.inbox.send_for_router(|_permit| EngineCommand::Trace { request, _permit })?;
        tracing::info!(seconds, "an operator records a trace");
        let trace = tokio::select! {
            trace = received => trace.map_err(|_| Refusal::Stopped)?,
            () = self.draining.cancelled() => return Err(Refusal::Draining.into()),
        };
        // Thousands of steps take milliseconds.
        let written = tokio::task::spawn_blocking(move || {
            let mut json = Vec::new();
            trace.write(&mut json).map(|()| json)
        });
        let written = written.await.map_err(|error| Status::internal(error.to_string()))?;
        let json = written.map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(v1::TraceReply { json: json.into() }))
    }

    async fn observe(
        &self,
        request: Request<v1::ObserveRequest>,
    ) -> Result<Response<Self::ObserveStream>, Status> {
        let place = self.observer_permits.clone().try_acquire_owned().map_err(|_| {
            let reason =
                format!("{} routers observe this node, its maximum", observe::OBSERVERS_MAX);
            Refusal::Busy { reason }
        })?;
        let (observer, stream) = observe::observer(place);
        self.inbox.send_for_router(|_permit| EngineCommand::Observe { observer, _permit })?;
        Ok(Proof::add(request.extensions().get().cloned(), Response::new(stream)))
    }
}

impl From<AdapterError> for Refusal {
    fn from(error: AdapterError) -> Self {
        let reason = error.to_string();
        match error {
            AdapterError::NoSlot { .. } | AdapterError::Memory(_) => Self::Busy { reason },
            AdapterError::Executor(_) => Self::Internal { reason },
            _ => Self::Invalid { reason },
        }
    }
}

impl From<Refusal> for Status {
    /// Maps refusals as `node.proto` documents.
    fn from(refusal: Refusal) -> Self {
        let code = match &refusal {
            Refusal::Field { .. } | Refusal::Invalid { .. } => Code::InvalidArgument,
            Refusal::AnswerComplete => Code::NotFound,
            Refusal::Busy { .. } => Code::ResourceExhausted,
            Refusal::Draining => Code::Unavailable,
            Refusal::Duplicate { .. } => Code::AlreadyExists,
            Refusal::OtherEpoch { .. } => Code::FailedPrecondition,
            Refusal::OtherWeights { .. }
            | Refusal::OtherAdapter { .. }
            | Refusal::WeightsChanged => Code::Aborted,
            Refusal::MatcherFailed { .. } => Code::DataLoss,
            Refusal::NoGrammar { .. } => Code::Unimplemented,
            Refusal::Deadline => Code::DeadlineExceeded,
            Refusal::Internal { .. } | Refusal::Stopped => Code::Internal,
        };
        Self::new(code, refusal.to_string())
    }
}

/// Returns the caller's trace context, unparsed; empty when the call has none.
fn traceparent(metadata: &MetadataMap) -> String {
    metadata
        .get("traceparent")
        .and_then(|value| value.to_str().ok())
        .filter(|text| text.len() <= TRACEPARENT_BYTES_MAX)
        .unwrap_or_default()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        task::{Context, Poll, Waker},
    };

    use engine::executor::CollectWaker;
    use kv_transfer::api::Epoch;

    use super::*;
    use crate::testing;

    const LIMITS: AttemptLimits = AttemptLimits {
        epoch: Epoch(7),
        vocabulary_size: 100,
        prompt_tokens_max: 31,
        sequence_tokens_max: 32,
        pooling: true,
    };

    /// Tokio's paused clock advances only while every task waits.
    #[tokio::test(start_paused = true)]
    async fn meet_returns_when_every_guard_is_dropped_or_the_node_drains_or_the_time_out_passes() {
        let (inbox, commands) = EngineInbox::new(4, CollectWaker::default());
        let grammars = Grammars::new("nowhere".into(), 100, testing::metrics());
        let draining = CancellationToken::new();
        let secret = ClusterSecret::new("a secret of the cluster").unwrap();
        let service = NodeService::new(
            Role::Prefill,
            LIMITS,
            grammars,
            NodeAdapters::none(),
            inbox,
            secret.clone(),
            draining.clone(),
        );
        let meet = || {
            let peer = |epoch: u128| {
                let mut peer = v1::Peer {
                    node_id: format!("decode-{epoch}"),
                    epoch: epoch.to_be_bytes().to_vec().into(),
                    control_endpoint: "tcp://127.0.0.1:5555".into(),
                    ..v1::Peer::default()
                };
                peer.tag = secret.peer_tag(&peer).to_vec().into();
                peer
            };
            let node_epoch = LIMITS.epoch.to_bytes().to_vec().into();
            let request =
                v1::MeetRequest { node_epoch, peers: vec![peer(1), peer(2)], sends: false };
            node_server::Node::meet(&service, Request::new(request))
        };
        let guards = || match commands.try_recv() {
            Ok(EngineCommand::Connect { commands, .. }) if commands.len() == 2 => {
                commands.into_iter().map(|command| match command {
                    transfer::Command::Connect { sends: true, guard, .. } => guard,
                    other => panic!("{other:?}"),
                })
            }
            other => panic!("{other:?}"),
        };
        let mut context = Context::from_waker(Waker::noop());

        let mut call = pin!(meet());
        assert!(call.as_mut().poll(&mut context).is_pending());
        let mut both = guards();
        drop(both.next());
        assert!(call.as_mut().poll(&mut context).is_pending(), "the second is not over");
        drop(both);
        assert!(matches!(call.as_mut().poll(&mut context), Poll::Ready(Ok(_))));

        let (start, call) = (tokio::time::Instant::now(), meet());
        call.await.unwrap();
        assert_eq!(start.elapsed().as_secs(), CONNECT_TIMEOUT.as_secs());
        let _never_over = guards();

        let mut call = pin!(meet());
        assert!(call.as_mut().poll(&mut context).is_pending());
        let _never_over = guards();
        draining.cancel();
        assert!(matches!(call.as_mut().poll(&mut context), Poll::Ready(Ok(_))));
    }
}
