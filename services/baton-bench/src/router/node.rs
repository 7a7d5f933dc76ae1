//! A stand-in for a decode node: every running stream gets a token in each step, and all tokens of
//! a step are sent together.

use std::{
    fs,
    net::{SocketAddr, TcpListener},
    ops::Range,
    path::Path,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    thread,
    time::Duration,
};

use anyhow::Result;
use futures_util::{Stream, StreamExt as _, stream};
use proto::{
    auth::{CallVerifier, ClusterSecret, PROOF_KEY, TOKEN_KEY},
    ids::Epoch,
    v1::{
        DecodeEvent, DecodeFinished, DecodeRequest, DecodeTokens, FinishReason, LoadAdapterReply,
        LoadAdapterRequest, MeetReply, MeetRequest, ModelIdentity, NodeLoad, NodeRecord,
        NodeSnapshot, ObserveEvent, ObserveRequest, PrefillEvent, PrefillRequest, Reserved,
        ResetPrefixCacheReply, ResetPrefixCacheRequest, Role, SetDrainingReply, SetDrainingRequest,
        Token, TraceReply, TraceRequest, UnloadAdapterReply, UnloadAdapterRequest, decode_event,
        node_server, observe_event,
    },
};
use tokio::{
    runtime::Builder,
    sync::{mpsc, watch},
};
use tonic::{
    Request, Response, Status,
    transport::{Certificate, Identity, ServerTlsConfig, server::TcpIncoming},
};

use crate::certificates::files;

pub(super) const MODEL: &str = "bench";
/// A vocabulary larger than that of any tokenizer.
const VOCABULARY: u32 = 1 << 20;
const SEQUENCE_TOKENS: u32 = 8192;
/// Tokens of the answers unless [`StandIn::answer_with`] sets others.
const TOKENS: Range<u32> = 1000..1500;

/// A running stand-in; its thread ends with the process.
pub(super) struct StandIn {
    pub address: SocketAddr,
    step: watch::Sender<Duration>,
    is_observed: Arc<AtomicBool>,
    answer: Arc<Mutex<Arc<[u32]>>>,
}

impl StandIn {
    /// With certificates the stand-in and its callers present one.
    pub(super) fn start(secret: ClusterSecret, certificates: Option<&Path>) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let is_observed = Arc::new(AtomicBool::new(false));
        let answer = Arc::new(Mutex::new(TOKENS.collect()));
        let service = Service {
            running: Arc::default(),
            is_observed: is_observed.clone(),
            answer: answer.clone(),
            secret,
        };
        let mut server = tonic::transport::Server::builder();
        if let Some(folder) = certificates {
            let [ca, cert, key] = files(folder).map(fs::read);
            let tls = ServerTlsConfig::new()
                .identity(Identity::from_pem(cert?, key?))
                .client_ca_root(Certificate::from_pem(ca?));
            server = server.tls_config(tls)?;
        }
        let (step, steps) = watch::channel(Duration::from_millis(1));
        // One thread: a connection writes once the streams of a step have run.
        let runtime = Builder::new_current_thread().enable_all().build()?;
        thread::Builder::new().name("stand-in".into()).spawn(move || {
            runtime.block_on(async {
                tokio::spawn(run_steps(service.running.clone(), steps));
                let incoming = TcpIncoming::from(tokio::net::TcpListener::from_std(listener)?);
                let server = server
                    .add_service(node_server::NodeServer::new(service))
                    .serve_with_incoming(incoming.with_nodelay(Some(true)));
                anyhow::Ok(server.await?)
            })
        })?;
        Ok(Self { address, step, is_observed, answer })
    }

    /// Sets the tokens of the following answers. An answer with more tokens repeats them.
    pub(super) fn answer_with(&self, tokens: Arc<[u32]>) {
        *self.answer.lock().expect("no holder panics") = tokens;
    }

    /// Sets the time of a step.
    pub(super) fn step(&self, time: Duration) {
        self.step.send_replace(time);
    }

    /// Returns whether a router has the record of this node.
    pub(super) fn is_observed(&self) -> bool {
        self.is_observed.load(Ordering::Acquire)
    }
}

/// An attempt that decodes.
struct DecodingAttempt {
    next_index: u32,
    count: u32,
    answer: Arc<[u32]>,
    events: mpsc::UnboundedSender<decode_event::Event>,
}

impl DecodingAttempt {
    /// Sends the next token. Returns whether the attempt goes on.
    fn advance(&mut self) -> bool {
        let index = self.next_index;
        self.next_index += 1;
        let id = self.answer[index as usize % self.answer.len()];
        let token = Token { id, ..Default::default() };
        let tokens = DecodeTokens { first_index: index, tokens: vec![token] };
        let is_sent = self.events.send(decode_event::Event::Tokens(tokens)).is_ok();
        if is_sent && self.next_index < self.count {
            return true;
        }
        let finished =
            DecodeFinished { reason: FinishReason::Length.into(), ..DecodeFinished::default() };
        // Fails if the router has cancelled the attempt.
        let _ = self.events.send(decode_event::Event::Finished(finished));
        false
    }
}

async fn run_steps(
    running: Arc<Mutex<Vec<DecodingAttempt>>>,
    mut steps: watch::Receiver<Duration>,
) {
    loop {
        let step = *steps.borrow_and_update();
        let mut interval = tokio::time::interval(step);
        while !steps.has_changed().unwrap_or(false) {
            interval.tick().await;
            running.lock().expect("no step panics").retain_mut(DecodingAttempt::advance);
        }
    }
}

struct Service {
    running: Arc<Mutex<Vec<DecodingAttempt>>>,
    is_observed: Arc<AtomicBool>,
    answer: Arc<Mutex<Arc<[u32]>>>,
    secret: ClusterSecret,
}

type Events<E> = Pin<Box<dyn Stream<Item = Result<E, Status>> + Send>>;

#[tonic::async_trait]
impl node_server::Node for Service {
    type PrefillStream = Events<PrefillEvent>;
    type DecodeStream = Events<DecodeEvent>;
    type ObserveStream = Events<ObserveEvent>;

    async fn prefill(
        &self,
        _: Request<PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        Err(Status::unimplemented("the stand-in is a decode node"))
    }

    async fn decode(
        &self,
        request: Request<DecodeRequest>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        let attempt = request.into_inner().attempt.unwrap_or_default();
        let count = attempt.sampling.map_or(1, |sampling| sampling.max_tokens);
        let (events, mut received) = mpsc::unbounded_channel();
        let reserved = Reserved { cached_tokens: 0, local_prefill: true };
        // The receiver is open.
        let _ = events.send(decode_event::Event::Reserved(reserved));
        self.running.lock().expect("no step panics").push(DecodingAttempt {
            next_index: 0,
            count,
            answer: self.answer.lock().expect("no holder panics").clone(),
            events,
        });
        let received = stream::poll_fn(move |cx: &mut Context<'_>| -> Poll<Option<_>> {
            received.poll_recv(cx).map(|event| {
                event.map(|event| Ok(DecodeEvent { event: Some(event), stages: None }))
            })
        });
        Ok(Response::new(Box::pin(received)))
    }

    async fn meet(&self, _: Request<MeetRequest>) -> Result<Response<MeetReply>, Status> {
        Ok(Response::new(MeetReply {}))
    }

    async fn set_draining(
        &self,
        _: Request<SetDrainingRequest>,
    ) -> Result<Response<SetDrainingReply>, Status> {
        Err(Status::unimplemented("the stand-in does not drain"))
    }

    async fn reset_prefix_cache(
        &self,
        _: Request<ResetPrefixCacheRequest>,
    ) -> Result<Response<ResetPrefixCacheReply>, Status> {
        Err(Status::unimplemented("the stand-in has no prefix cache"))
    }

    async fn load_adapter(
        &self,
        _: Request<LoadAdapterRequest>,
    ) -> Result<Response<LoadAdapterReply>, Status> {
        Err(Status::unimplemented("the stand-in has no adapters"))
    }

    async fn unload_adapter(
        &self,
        _: Request<UnloadAdapterRequest>,
    ) -> Result<Response<UnloadAdapterReply>, Status> {
        Err(Status::unimplemented("the stand-in has no adapters"))
    }

    async fn trace(&self, _: Request<TraceRequest>) -> Result<Response<TraceReply>, Status> {
        Err(Status::unimplemented("the stand-in has no steps"))
    }

    async fn observe(
        &self,
        request: Request<ObserveRequest>,
    ) -> Result<Response<Self::ObserveStream>, Status> {
        let token = request.metadata().get_bin(TOKEN_KEY).and_then(|token| token.to_bytes().ok());
        let epoch = Epoch(1);
        let proof = CallVerifier::new(&self.secret, epoch).proof(&token.unwrap_or_default());
        let record = NodeRecord {
            node_id: "stand-in".into(),
            epoch: epoch.to_bytes().to_vec().into(),
            peer_tag: vec![1; 32].into(),
            pooling: false,
            sampling_version: 0,
            adapters: Vec::new(),
            both_roles: false,
            kv_windows: vec![0],
            state_blocks: 0,
            role: Role::Decode.into(),
            control_endpoint: "tcp://127.0.0.1:9".into(),
            model: MODEL.into(),
            identity: Some(ModelIdentity {
                model_fingerprint: vec![1; 16].into(),
                weight_version: 1,
                kv_layout: "none".into(),
                block_size: 16,
                dtype: "f32".into(),
                tp: 1,
                protocol_min: 1,
                protocol_max: 1,
            }),
            prompt_tokens_max: SEQUENCE_TOKENS - 1,
            sequence_tokens_max: SEQUENCE_TOKENS,
            block_count: 1 << 20,
            vocabulary_size: VOCABULARY,
            ..NodeRecord::default()
        };
        let load = Some(NodeLoad { blocks_free: 1 << 20, ..NodeLoad::default() });
        let snapshot =
            NodeSnapshot { record: Some(record), load, cached_blocks: vec![], tiers: vec![] };
        let event = Some(observe_event::Event::Snapshot(snapshot));
        self.is_observed.store(true, Ordering::Release);
        let first = stream::iter([Ok(ObserveEvent { sequence: 0, event })]);
        // The load never changes.
        let events: Self::ObserveStream = Box::pin(first.chain(stream::pending()));
        let mut response = Response::new(events);
        response.metadata_mut().insert_bin(PROOF_KEY, proof);
        Ok(response)
    }
}
