//! Scripted node: a real gRPC server whose answers the test defines.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, LazyLock, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::Stream;
use proto::{
    auth::{CallVerifier, ClusterSecret, PROOF_KEY, TOKEN_KEY},
    ids::Epoch,
    v1::{
        Adapter, Attempt, DecodeEvent, DecodeFinished, DecodeRequest, DecodeTokens, Delivered,
        Failure, FailureKind, FinishReason, LoadAdapterReply, LoadAdapterRequest, MeetReply,
        MeetRequest, ModelIdentity, NodeDelta, NodeLoad, NodeRecord, NodeSnapshot, ObserveEvent,
        ObserveRequest, Pooling, PrefillEvent, PrefillRequest, PrefillToken, PromptLogprobs,
        Reserved, ResetPrefixCacheReply, ResetPrefixCacheRequest, Role, SetDrainingReply,
        SetDrainingRequest, Token, TokenLogprobs, TopLogprob, TraceReply, TraceRequest,
        UnloadAdapterReply, UnloadAdapterRequest, decode_event, node_server, observe_event,
        prefill_event,
    },
};
use tokio::{
    runtime::Runtime,
    sync::{mpsc, watch},
};
use tonic::{
    Request, Response, Status,
    metadata::{Binary, MetadataMap, MetadataValue},
    transport::server::TcpIncoming,
};

use super::SECRET;

pub(crate) const MODEL: &str = "scripted";
pub(crate) const VOCABULARY: u32 = 49152;
pub(crate) const SEQUENCE_MAX: u32 = 2048;
pub(crate) const BLOCK_SIZE: u32 = 16;

/// Behaviour of a node in a call.
#[derive(Clone, Debug)]
pub(crate) enum Behaviour {
    /// Sends the whole answer.
    Serve,
    /// Rejects the call with this status code and message.
    Refuse(tonic::Code, &'static str),
    /// Fails with this failure after this many tokens of its own.
    FailAfter(usize, FailureKind),
    /// Closes the stream without a final event after this many tokens.
    CutAfter(usize),
    /// Stops sending after this many tokens.
    HangAfter(usize),
    /// Never receives KV from this prefill node. Serves with any other prefill node, or without
    /// one.
    NoKvFrom(&'static str),
    /// Reports that it needs no prefill node.
    LocalPrefill,
    /// Sends exactly these events, then hangs.
    DecodeEvents(Vec<decode_event::Event>),
    PrefillEvents(Vec<prefill_event::Event>),
    /// Sends tokens without end, as fast as the caller reads.
    Flood,
}

/// Ids of the transfers whose prefill node has sent token 0.
static PREFILLED: LazyLock<watch::Sender<BTreeSet<Bytes>>> = LazyLock::new(watch::Sender::default);

/// A call to the node, and the time when the caller disconnected.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub attempt: Attempt,
    /// Whether the call names the other node of a transfer.
    pub with_peer: bool,
    pub traceparent: Option<String>,
    pub left: Arc<Mutex<Option<Instant>>>,
}

/// State shared by the node's tasks and the test.
pub(crate) struct State {
    role: Role,
    identity: ModelIdentity,
    epoch: [u8; 16],
    node_id: String,
    model: String,
    /// Behaviour of the next calls, one each. The last one is kept.
    behaviours: Mutex<Vec<Behaviour>>,
    /// Tokens of the answer, without the final token.
    answer: Mutex<Vec<u32>>,
    /// Pause between two tokens.
    token_time: Mutex<Duration>,
    pub calls: Mutex<Vec<Call>>,
    open: AtomicUsize,
    load: watch::Sender<NodeLoad>,
    /// Number of events that the next delta skips.
    skip: AtomicU64,
    grammar_version: AtomicU32,
    pooling: AtomicBool,
    sampling_version: AtomicU32,
    adapters: Mutex<Vec<Adapter>>,
    cpu_fallback: Mutex<String>,
    secret: Mutex<ClusterSecret>,
    /// Number of observers so far.
    observed: AtomicUsize,
    /// Ids of the peers that the router told this node to connect to.
    met: Mutex<BTreeSet<String>>,
    /// Value true delays the answers to `Meet`.
    meeting: watch::Sender<bool>,
}

/// End-of-sequence token of the tests' tokenizer.
pub(crate) const END: u32 = 2;

/// Returns values that depend on the length of the prompt: a vector, or a greater first logit for a
/// longer prompt.
fn pooled(attempt: &Attempt, pooling: &Pooling) -> Vec<f32> {
    let length = attempt.tokens.len() as f32;
    match pooling.logits.is_empty() {
        true => vec![3.0, 4.0, length],
        false => vec![length / 100.0, 0.0],
    }
}

impl State {
    /// Returns token `index` of the answer, and the finish reason if the token is the last. The
    /// token depends only on the index, so that all nodes and attempts agree.
    fn token(&self, index: u32, attempt: &Attempt) -> (Token, Option<FinishReason>) {
        let answer = self.answer.lock().unwrap();
        let sampling = attempt.sampling.as_ref().unwrap();
        let mut id = answer.get(index as usize).copied().unwrap_or(END);
        if id == END && (sampling.ignore_stop_tokens || index < sampling.min_tokens) {
            id = 198;
        }
        let stops = !sampling.ignore_stop_tokens
            && index >= sampling.min_tokens
            && sampling.stop_token_ids.contains(&id);
        let finish = match (stops, index + 1 >= sampling.max_tokens) {
            (true, _) => Some(FinishReason::Stop),
            (false, true) => Some(FinishReason::Length),
            (false, false) => None,
        };
        let logprobs = sampling.logprobs.map(|count| TokenLogprobs {
            rank: None,
            chosen: -0.25,
            top: (0..count)
                .map(|rank| TopLogprob { id: id + rank, logprob: -0.25 - rank as f32 })
                .collect(),
        });
        let pooled = sampling.pooling.as_ref().map(|pooling| pooled(attempt, pooling));
        let pooled = pooled.unwrap_or_default();
        let prompt = sampling.prompt_logprobs.filter(|_| index == 0).map(|count| PromptLogprobs {
            tokens: (1..attempt.prompt_len)
                .map(|at| TokenLogprobs {
                    rank: Some(3),
                    chosen: -(at as f32),
                    top: (0..count).map(|rank| TopLogprob { id: rank, logprob: -0.5 }).collect(),
                })
                .collect(),
        });
        (Token { id, logprobs, weight_version: None, pooled, prompt }, finish)
    }

    fn next_behaviour(&self) -> Behaviour {
        let mut behaviours = self.behaviours.lock().unwrap();
        if behaviours.len() > 1 { behaviours.remove(0) } else { behaviours[0].clone() }
    }

    fn called<M>(&self, request: &Request<M>, attempt: &Attempt, with_peer: bool) -> CallGuard {
        let traceparent = request.metadata().get("traceparent");
        let call = Call {
            attempt: attempt.clone(),
            with_peer,
            traceparent: traceparent.map(|value| value.to_str().unwrap().to_owned()),
            left: Arc::default(),
        };
        self.calls.lock().unwrap().push(call.clone());
        CallGuard(call.left)
    }
}

/// Guard that records when the caller dropped the stream.
struct CallGuard(Arc<Mutex<Option<Instant>>>);

impl Drop for CallGuard {
    fn drop(&mut self) {
        *self.0.lock().unwrap() = Some(Instant::now());
    }
}

struct Events<E> {
    events: mpsc::Receiver<Result<E, Status>>,
    state: Arc<State>,
    _guard: CallGuard,
}

impl<E> Stream for Events<E> {
    type Item = Result<E, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.events.poll_recv(cx)
    }
}

impl<E> Drop for Events<E> {
    fn drop(&mut self) {
        self.state.open.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Service(Arc<State>);

type Boxed<E> = Pin<Box<dyn Stream<Item = Result<E, Status>> + Send>>;

fn stream<E, F>(
    state: &Arc<State>,
    guard: CallGuard,
    script: impl FnOnce(Arc<State>, mpsc::Sender<Result<E, Status>>) -> F,
) -> Response<Boxed<E>>
where
    E: Send + 'static,
    F: Future<Output = Option<()>> + Send + 'static,
{
    let (sender, events) = mpsc::channel(4);
    state.open.fetch_add(1, Ordering::SeqCst);
    // `None` means that the caller disconnected. The script then ends.
    tokio::spawn(script(state.clone(), sender));
    Response::new(Box::pin(Events { events, state: state.clone(), _guard: guard }))
}

fn decode(event: decode_event::Event) -> Result<DecodeEvent, Status> {
    Ok(DecodeEvent { event: Some(event), stages: None })
}

fn prefill(event: prefill_event::Event) -> Result<PrefillEvent, Status> {
    Ok(PrefillEvent { event: Some(event), stages: None })
}

fn failure(kind: FailureKind) -> Failure {
    Failure { kind: kind.into(), message: format!("scripted {}", kind.as_str_name()) }
}

#[tonic::async_trait]
impl node_server::Node for Service {
    type PrefillStream = Boxed<PrefillEvent>;
    type DecodeStream = Boxed<DecodeEvent>;
    type ObserveStream = Boxed<ObserveEvent>;

    async fn prefill(
        &self,
        request: Request<PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let attempt = request.get_ref().attempt.clone().unwrap();
        let guard = self.0.called(&request, &attempt, request.get_ref().decode.is_some());
        let behaviour = self.0.next_behaviour();
        if let Behaviour::Refuse(code, message) = behaviour {
            return Err(Status::new(code, message));
        }
        Ok(stream(&self.0, guard, async move |state, events| {
            let send = async |event| events.send(prefill(event)).await.ok();
            let first_index = attempt.tokens.len() as u32 - attempt.prompt_len;
            let token_time = *state.token_time.lock().unwrap();
            let (before, after) = match &behaviour {
                Behaviour::FailAfter(count, kind) => (*count, Some(*kind)),
                Behaviour::CutAfter(count) => (*count, None),
                Behaviour::HangAfter(count) => (*count, None),
                Behaviour::PrefillEvents(scripted) => {
                    for event in scripted.clone() {
                        send(event).await?;
                    }
                    events.closed().await;
                    return Some(());
                }
                _ => (usize::MAX, None),
            };
            if before > 0 {
                tokio::time::sleep(token_time).await;
                let (token, finish) = state.token(first_index, &attempt);
                send(prefill_event::Event::Token(PrefillToken {
                    first_index,
                    token: Some(token),
                    finish: finish.map(Into::into),
                    cached_tokens: 0,
                }))
                .await?;
                PREFILLED.send_modify(|known| {
                    known.insert(attempt.transfer_id.clone());
                });
                if finish.is_some() {
                    return Some(());
                }
            }
            match behaviour {
                Behaviour::FailAfter(..) => {
                    send(prefill_event::Event::Failure(failure(after.unwrap()))).await
                }
                Behaviour::CutAfter(_) => Some(()),
                Behaviour::HangAfter(_) => {
                    events.closed().await;
                    Some(())
                }
                _ => {
                    let delivered = Delivered { bytes: 4096, chunks: 1, transfer_us: 77 };
                    send(prefill_event::Event::Delivered(delivered)).await
                }
            }
        }))
    }

    async fn decode(
        &self,
        request: Request<DecodeRequest>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        let attempt = request.get_ref().attempt.clone().unwrap();
        let peer = request.get_ref().prefill.clone();
        let with_peer = peer.is_some();
        let guard = self.0.called(&request, &attempt, with_peer);
        let behaviour = match self.0.next_behaviour() {
            Behaviour::NoKvFrom(node_id) if peer.is_some_and(|peer| peer.node_id == node_id) => {
                Behaviour::HangAfter(0)
            }
            other => other,
        };
        if let Behaviour::Refuse(code, message) = behaviour {
            return Err(Status::new(code, message));
        }
        Ok(stream(&self.0, guard, async move |state, events| {
            let send = async |event| events.send(decode(event)).await.ok();
            let mut index = attempt.tokens.len() as u32 - attempt.prompt_len;
            let token_time = *state.token_time.lock().unwrap();
            if let Behaviour::DecodeEvents(scripted) = &behaviour {
                for event in scripted.clone() {
                    send(event).await?;
                }
                events.closed().await;
                return Some(());
            }
            let local_prefill = matches!(behaviour, Behaviour::LocalPrefill) || !with_peer;
            let reserved = Reserved { cached_tokens: 16, local_prefill };
            send(decode_event::Event::Reserved(reserved)).await?;
            let count = match behaviour {
                Behaviour::FailAfter(count, _)
                | Behaviour::CutAfter(count)
                | Behaviour::HangAfter(count) => count,
                _ => usize::MAX,
            };
            if matches!(behaviour, Behaviour::Serve) && !local_prefill {
                // Token 0 follows the transfer.
                let mut prefilled = PREFILLED.subscribe();
                let is_known = |known: &BTreeSet<Bytes>| known.contains(&attempt.transfer_id);
                tokio::select! {
                    known = prefilled.wait_for(is_known) => known.map(drop).ok()?,
                    () = events.closed() => return None,
                }
            }
            for _ in 0..count {
                if !matches!(behaviour, Behaviour::Flood) {
                    tokio::time::sleep(token_time).await;
                }
                let (token, finish) = state.token(index, &attempt);
                let tokens = DecodeTokens { first_index: index, tokens: vec![token] };
                send(decode_event::Event::Tokens(tokens)).await?;
                index += 1;
                if let Some(reason) = finish {
                    let received_bytes = if local_prefill { 0 } else { 4096 };
                    return send(decode_event::Event::Finished(DecodeFinished {
                        reason: reason.into(),
                        received_bytes,
                        transfer_us: received_bytes / 50,
                    }))
                    .await;
                }
            }
            match behaviour {
                Behaviour::FailAfter(_, kind) => {
                    send(decode_event::Event::Failure(failure(kind))).await
                }
                Behaviour::HangAfter(_) => {
                    events.closed().await;
                    Some(())
                }
                _ => Some(()),
            }
        }))
    }

    async fn meet(&self, request: Request<MeetRequest>) -> Result<Response<MeetReply>, Status> {
        let peers = request.into_inner().peers.into_iter().map(|peer| peer.node_id);
        self.0.met.lock().unwrap().extend(peers);
        let mut meeting = self.0.meeting.subscribe();
        // Fails only when the node stops.
        let _ = meeting.wait_for(|meeting| !meeting).await;
        Ok(Response::new(MeetReply {}))
    }

    async fn set_draining(
        &self,
        request: Request<SetDrainingRequest>,
    ) -> Result<Response<SetDrainingReply>, Status> {
        let SetDrainingRequest { node_epoch, draining } = request.into_inner();
        if node_epoch[..] != self.0.epoch {
            return Err(Status::failed_precondition("scripted: another epoch"));
        }
        self.0.load.send_modify(|load| load.draining = draining);
        Ok(Response::new(SetDrainingReply { attempts: 3 }))
    }

    async fn reset_prefix_cache(
        &self,
        _: Request<ResetPrefixCacheRequest>,
    ) -> Result<Response<ResetPrefixCacheReply>, Status> {
        Err(Status::unimplemented("scripted: a node of an older release"))
    }

    async fn load_adapter(
        &self,
        _: Request<LoadAdapterRequest>,
    ) -> Result<Response<LoadAdapterReply>, Status> {
        Err(Status::unimplemented("scripted: a node of an older release"))
    }

    async fn unload_adapter(
        &self,
        _: Request<UnloadAdapterRequest>,
    ) -> Result<Response<UnloadAdapterReply>, Status> {
        Err(Status::unimplemented("scripted: a node of an older release"))
    }

    async fn trace(&self, request: Request<TraceRequest>) -> Result<Response<TraceReply>, Status> {
        match request.into_inner().seconds {
            1 => Ok(Response::new(TraceReply { json: r#"{"traceEvents": []}"#.into() })),
            2 => Err(Status::resource_exhausted("scripted: the node records a trace already")),
            seconds => Err(Status::invalid_argument(format!("invalid seconds: {seconds}"))),
        }
    }

    async fn observe(
        &self,
        request: Request<ObserveRequest>,
    ) -> Result<Response<Self::ObserveStream>, Status> {
        let state = self.0.clone();
        let proof = state.proof(request.metadata());
        state.observed.fetch_add(1, Ordering::SeqCst);
        let guard = CallGuard(Arc::default());
        let mut load = state.load.subscribe();
        let first = *load.borrow_and_update();
        let mut response = stream(&self.0, guard, async move |state, events| {
            let snapshot = NodeSnapshot {
                record: Some(state.record()),
                load: Some(first),
                cached_blocks: vec![],
                tiers: vec![],
            };
            let event = Some(observe_event::Event::Snapshot(snapshot));
            events.send(Ok(ObserveEvent { sequence: 0, event })).await.ok()?;
            let mut sequence = 0;
            loop {
                tokio::select! {
                    changed = load.changed() => changed.ok()?,
                    () = events.closed() => return None,
                }
                sequence += 1 + state.skip.swap(0, Ordering::SeqCst);
                let load = Some(*load.borrow_and_update());
                let delta = NodeDelta { load, ..Default::default() };
                let event = Some(observe_event::Event::Delta(delta));
                events.send(Ok(ObserveEvent { sequence, event })).await.ok()?;
            }
        });
        response.metadata_mut().insert_bin(PROOF_KEY, proof);
        Ok(response)
    }
}

impl State {
    fn proof(&self, call: &MetadataMap) -> MetadataValue<Binary> {
        let token = call.get_bin(TOKEN_KEY).unwrap().to_bytes().unwrap();
        let secret = self.secret.lock().unwrap().clone();
        let epoch = Epoch::from_bytes(&self.epoch).unwrap();
        CallVerifier::new(&secret, epoch).proof(&token)
    }

    fn record(&self) -> NodeRecord {
        NodeRecord {
            node_id: self.node_id.clone(),
            epoch: self.epoch.to_vec().into(),
            role: self.role.into(),
            control_endpoint: "tcp://127.0.0.1:9".into(),
            model: self.model.clone(),
            identity: Some(self.identity.clone()),
            prompt_tokens_max: SEQUENCE_MAX - 1,
            sequence_tokens_max: SEQUENCE_MAX,
            block_count: 1000,
            vocabulary_size: VOCABULARY,
            grammar_version: self.grammar_version.load(Ordering::SeqCst),
            cpu_fallback: self.cpu_fallback.lock().unwrap().clone(),
            peer_tag: vec![1; 32].into(),
            pooling: self.pooling.load(Ordering::SeqCst),
            sampling_version: self.sampling_version.load(Ordering::SeqCst),
            adapters: self.adapters.lock().unwrap().clone(),
            both_roles: false,
            kv_windows: vec![0],
            state_blocks: 0,
        }
    }
}

/// A running scripted node.
pub(crate) struct ScriptedNode {
    pub state: Arc<State>,
    pub address: SocketAddr,
    /// Dropped by `kill`, together with all sockets.
    runtime: Option<Runtime>,
}

impl ScriptedNode {
    pub(crate) fn start(role: Role, node_id: &str) -> Self {
        Self::start_at(role, node_id, "127.0.0.1:0".parse().unwrap(), 7)
    }

    pub(crate) fn start_at(
        role: Role,
        node_id: &str,
        address: SocketAddr,
        fingerprint: u8,
    ) -> Self {
        Self::start_with(role, node_id, MODEL, address, fingerprint)
    }

    /// Starts a node that serves this model.
    pub(crate) fn start_for(model: &str, role: Role, node_id: &str) -> Self {
        Self::start_with(role, node_id, model, "127.0.0.1:0".parse().unwrap(), 7)
    }

    fn start_with(
        role: Role,
        node_id: &str,
        model: &str,
        address: SocketAddr,
        fingerprint: u8,
    ) -> Self {
        let mut epoch = [0; 16];
        getrandom::fill(&mut epoch).unwrap();
        let state = Arc::new(State {
            role,
            identity: ModelIdentity {
                model_fingerprint: vec![fingerprint; 16].into(),
                weight_version: 3,
                kv_layout: "scripted".into(),
                block_size: BLOCK_SIZE,
                dtype: "f32".into(),
                tp: 1,
                protocol_min: 1,
                protocol_max: 1,
            },
            epoch,
            node_id: node_id.into(),
            model: model.into(),
            behaviours: Mutex::new(vec![Behaviour::Serve]),
            answer: Mutex::new(vec![]),
            token_time: Mutex::new(Duration::from_millis(1)),
            calls: Mutex::new(vec![]),
            open: AtomicUsize::new(0),
            grammar_version: AtomicU32::new(5),
            pooling: AtomicBool::new(true),
            sampling_version: AtomicU32::new(1),
            adapters: Mutex::default(),
            cpu_fallback: Mutex::default(),
            secret: Mutex::new(ClusterSecret::new(SECRET).unwrap()),
            load: watch::Sender::new(NodeLoad::default()),
            skip: AtomicU64::new(0),
            observed: AtomicUsize::new(0),
            met: Mutex::default(),
            meeting: watch::Sender::new(false),
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let incoming = {
            let _inside = runtime.enter();
            let deadline = Instant::now() + Duration::from_secs(10);
            loop {
                // Old connections of a restarted node are in TIME_WAIT.
                let socket = tokio::net::TcpSocket::new_v4().unwrap();
                socket.set_reuseaddr(true).unwrap();
                match socket.bind(address).and_then(|()| socket.listen(64)) {
                    Ok(listener) => break TcpIncoming::from(listener),
                    // The runtime of a killed node closes its listener in the background.
                    Err(error) => assert!(Instant::now() < deadline, "{address}: {error}"),
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let address = incoming.local_addr().unwrap();
        let service = node_server::NodeServer::new(Service(state.clone()));
        runtime.spawn(
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(incoming.with_nodelay(Some(true))),
        );
        Self { state, address, runtime: Some(runtime) }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Sets the behavior of all later calls.
    pub(crate) fn behave(&self, behaviour: Behaviour) {
        *self.state.behaviours.lock().unwrap() = vec![behaviour];
    }

    /// Sets the behavior of the next calls, one each. The last one is kept.
    pub(crate) fn behave_in_turn(&self, behaviours: Vec<Behaviour>) {
        *self.state.behaviours.lock().unwrap() = behaviours;
    }

    /// Sets the grammar version in the node's record, for later observers.
    pub(crate) fn announce_grammars(&self, version: u32) {
        self.state.grammar_version.store(version, Ordering::SeqCst);
    }

    /// Announces in the node's record, for later observers, that the node returns no pooled values.
    /// Announces adapters by name and content hash. Takes effect with the next stream of records.
    pub(crate) fn announce_adapters(&self, adapters: &[(&str, u128)]) {
        let adapter = |&(name, hash): &(&str, u128)| {
            let content_hash = hash.to_be_bytes().to_vec().into();
            Adapter { name: name.to_owned(), content_hash }
        };
        *self.state.adapters.lock().unwrap() = adapters.iter().map(adapter).collect();
    }

    pub(crate) fn announce_no_pooling(&self) {
        self.state.pooling.store(false, Ordering::SeqCst);
    }

    /// Announces the sampling version in the node's record, for later observers.
    pub(crate) fn announce_sampling(&self, version: u32) {
        self.state.sampling_version.store(version, Ordering::SeqCst);
    }

    /// Sets the reason for the CPU in the node's record, for later observers.
    pub(crate) fn announce_cpu_fallback(&self, reason: &str) {
        *self.state.cpu_fallback.lock().unwrap() = reason.to_owned();
    }

    /// Makes the node prove the knowledge of this secret, to later observers.
    pub(crate) fn know(&self, secret: &str) {
        *self.state.secret.lock().unwrap() = ClusterSecret::new(secret).unwrap();
    }

    pub(crate) fn answer_with(&self, tokens: &[u32]) {
        *self.state.answer.lock().unwrap() = tokens.to_vec();
    }

    pub(crate) fn set_token_time(&self, token_time: Duration) {
        *self.state.token_time.lock().unwrap() = token_time;
    }

    pub(crate) fn report(&self, load: NodeLoad) {
        self.state.load.send_replace(load);
    }

    /// Reports a load with a gap in the event numbers.
    pub(crate) fn report_with_a_gap(&self, load: NodeLoad) {
        self.state.skip.store(1, Ordering::SeqCst);
        self.report(load);
    }

    /// Returns the peers that the router told this node to connect to.
    pub(crate) fn met(&self) -> BTreeSet<String> {
        self.state.met.lock().unwrap().clone()
    }

    /// Sets whether answers to `Meet` are delayed.
    pub(crate) fn keep_connecting(&self, meeting: bool) {
        self.state.meeting.send_replace(meeting);
    }

    pub(crate) fn observed(&self) -> usize {
        self.state.observed.load(Ordering::SeqCst)
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.state.calls.lock().unwrap().clone()
    }

    /// Returns the number of open streams of attempts and observers.
    pub(crate) fn open_streams(&self) -> usize {
        self.state.open.load(Ordering::SeqCst)
    }

    /// Stops the node for this time, as SIGSTOP does: connections stay open.
    pub(crate) fn freeze(&self, time: Duration) {
        let runtime = self.runtime.as_ref().expect("a killed node cannot freeze");
        // Blocks the runtime's only thread.
        runtime.spawn(async move { std::thread::sleep(time) });
    }

    /// Stops the node as SIGKILL does: every connection closes without a message.
    pub(crate) fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for ScriptedNode {
    fn drop(&mut self) {
        self.kill();
    }
}
