//! `baton-bench router`: CPU time of the router per request and per streamed token; no model
//! computes.
//!
//! A stand-in for the decode node sends each running stream a token in every step. Clients on
//! loopback read the streams. Both run in this process, so the CPU time of the router's process is
//! that of the router alone.

mod node;
mod parsers;

use std::{
    ffi::OsString,
    fs,
    net::SocketAddr,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Error, Result, ensure};
use clap::Args;
use credentials::{SettingFile, client_config};
use proto::auth::ClusterSecret;
use ring::digest::{SHA256, digest};
use rustls::pki_types::ServerName;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
    runtime::{Builder, Runtime},
    task::JoinSet,
};
use tokio_rustls::TlsConnector;

use crate::certificates::{NAMES, files};
use node::StandIn;

const SECRET: &str = "of one benchmark run";
/// Time-out of the router's start, and of each answer.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Requests before the measurements.
const WARM_UP: u32 = 500;
/// Clients of requests with one output token.
const CLIENTS: u32 = 8;
/// Step of the stand-in while requests have one output token.
const SHORT_STEP: Duration = Duration::from_millis(1);
/// Linux counts the CPU time of a process in hundredths of a second.
const TICK_US: f64 = 1e4;
/// Ten tokens, or about as many with the chat template.
const PROMPT: [u32; 10] = [1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007, 1008, 1009];
const CONTENT: &str = "Which city is the capital of France, and why?";

#[derive(Args)]
pub(crate) struct RouterArgs {
    /// Program of the router.
    #[arg(long, value_name = "PATH")]
    router: PathBuf,
    /// Model whose tokenizer and chat template the router uses.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Requests with one output token.
    #[arg(long, default_value_t = 8000)]
    requests: u32,
    /// Concurrent streams.
    #[arg(long, default_value_t = 64)]
    streams: u32,
    /// Requests of each stream, one after the other.
    #[arg(long, default_value_t = 4)]
    rounds: u32,
    /// Output tokens of each request of a stream. [default with --parsers: 1024]
    #[arg(long, default_value_t = 64, default_value_if("parsers", "true", "1024"))]
    tokens: u32,
    /// Time of a decode step, in ms.
    #[arg(long, default_value_t = 20)]
    step_ms: u64,
    /// Folder of `baton-bench certificates`: clients, router and node speak TLS, and clients have
    /// an API key.
    #[arg(long, value_name = "FOLDER")]
    certificates: Option<PathBuf>,
    /// Instead measure the CPU time of a token with a reasoning and a tool parser, and without
    /// both, alternately in each round. --requests has no effect.
    #[arg(long)]
    parsers: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// API key of the clients.
const API_KEY: &str = "baton-of-one-benchmark-run";

/// CPU time of the router, in µs.
#[derive(Debug, Serialize)]
struct RouterReport {
    /// A streamed chat request with one output token.
    chat_request_us: f64,
    /// The same request with token ids instead of messages: without chat template and tokenizer.
    ids_request_us: f64,
    /// A token of concurrent streams, with its share of the chat request.
    token_us: f64,
}

pub(crate) fn run(args: RouterArgs) -> Result<()> {
    if args.parsers {
        return parsers::run(&args);
    }
    let router = MeasuredRouter::start(&args, &[])?;
    let short = |request: &HttpRequest| -> Result<f64> {
        let rounds = (args.requests / CLIENTS).max(1);
        Ok(router.measure(CLIENTS, rounds, request)?.cpu_us / f64::from(CLIENTS * rounds))
    };
    router.node.step(SHORT_STEP);
    let (chat, ids) = (HttpRequest::chat(1), HttpRequest::ids(1));
    for request in [&chat, &ids] {
        router.measure(CLIENTS, WARM_UP / CLIENTS, request)?;
    }
    let chat_request_us = short(&chat)?;
    let ids_request_us = short(&ids)?;
    router.node.step(Duration::from_millis(args.step_ms));
    let streams = router.measure(args.streams, args.rounds, &HttpRequest::chat(args.tokens))?;
    let token_count = f64::from(args.streams * args.rounds) * f64::from(args.tokens);
    let token_us = streams.cpu_us / token_count;
    let report = RouterReport { chat_request_us, ids_request_us, token_us };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(());
    }
    let RouterArgs { streams, tokens, step_ms, .. } = args;
    println!("CPU time of the router (µs)");
    println!("  {chat_request_us:6.1}  a chat request with one output token");
    println!("  {ids_request_us:6.1}  the same request with token ids");
    let text_us = chat_request_us - ids_request_us;
    println!("  {text_us:6.1}  chat template and tokenizer: the difference");
    println!(
        "  {token_us:6.1}  a token of {streams} streams with {tokens} tokens at {step_ms} ms a step, with its share of the \
         request"
    );
    Ok(())
}

/// A router, the stand-in for its decode node, and its clients.
struct MeasuredRouter {
    node: StandIn,
    process: RouterProcess,
    tls: Option<TlsConnector>,
    runtime: Runtime,
}

/// Result of [`MeasuredRouter::measure`].
struct MeasuredStreams {
    /// CPU time of the router.
    cpu_us: f64,
    /// One of the last streams.
    stream: String,
}

impl MeasuredRouter {
    /// Starts a router with these settings besides those that every router has here.
    fn start(args: &RouterArgs, settings: &[(&str, OsString)]) -> Result<Self> {
        let node = StandIn::start(ClusterSecret::new(SECRET)?, args.certificates.as_deref())?;
        let process = RouterProcess::start(args, &node, settings)?;
        let tls = args.certificates.as_ref().map(|folder| {
            let ca = SettingFile::new("--certificates", &files(folder)[0]);
            let tls = client_config(Some(&ca));
            tls.map(|tls| TlsConnector::from(Arc::new(tls))).map_err(Error::msg)
        });
        let runtime = Builder::new_current_thread().enable_all().build()?;
        Ok(Self { node, process, tls: tls.transpose()?, runtime })
    }

    /// Runs `count` clients, each of which sends the request `rounds` times.
    fn measure(&self, count: u32, rounds: u32, request: &HttpRequest) -> Result<MeasuredStreams> {
        let before = self.process.cpu_us()?;
        let clients = run_clients(self.process.http, self.tls.as_ref(), count, rounds, request);
        let stream = self.runtime.block_on(clients)?;
        Ok(MeasuredStreams { cpu_us: self.process.cpu_us()? - before, stream })
    }
}

/// A router process.
struct RouterProcess {
    child: Child,
    http: SocketAddr,
    _folder: tempfile::TempDir,
}

/// The line in the file that the router writes once its ports are open.
#[derive(Deserialize)]
struct RouterReady {
    http: SocketAddr,
}

impl RouterProcess {
    fn start(args: &RouterArgs, node: &StandIn, settings: &[(&str, OsString)]) -> Result<Self> {
        let RouterArgs { router: program, model, certificates, .. } = args;
        let folder = tempfile::tempdir()?;
        let ready_file = folder.path().join("ready");
        let mut tls_settings = Vec::new();
        if let Some(certificates) = certificates {
            let [ca, cert, key] = files(certificates);
            let keys = folder.path().join("keys.toml");
            let hash = digest(&SHA256, API_KEY.as_bytes());
            let hash: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
            fs::write(&keys, format!("[[key]]\nname = \"bench\"\nsha256 = \"{hash}\"\n"))?;
            tls_settings = vec![
                ("BATON_ROUTER_TLS_CERT", cert.clone()),
                ("BATON_ROUTER_TLS_KEY", key.clone()),
                ("BATON_ROUTER_KEYS", keys),
                ("BATON_CLUSTER_TLS_CERT", cert),
                ("BATON_CLUSTER_TLS_KEY", key),
                ("BATON_CLUSTER_TLS_CA", ca),
            ];
        }
        let mut child = Command::new(program)
            .arg("--ready-file")
            .arg(&ready_file)
            .env("BATON_MODEL_PATH", model)
            .env("BATON_MODEL_NAME", node::MODEL)
            .env("BATON_CLUSTER_DECODE", format!("http://{}", node.address))
            // The stand-in checks no token.
            .env("BATON_CLUSTER_SECRET", SECRET)
            .env("BATON_ROUTER_HTTP", "127.0.0.1:0")
            .env("BATON_ROUTER_GRPC", "127.0.0.1:0")
            .env("BATON_ROUTER_ADMIN", "127.0.0.1:0")
            .env("BATON_TELEMETRY_LOG", "warn")
            .envs(tls_settings)
            .envs(settings.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let deadline = Instant::now() + TIMEOUT;
        while !ready_file.exists() || !node.is_observed() {
            ensure!(child.try_wait()?.is_none(), "the router exited at its start");
            ensure!(Instant::now() < deadline, "the router is not ready within {TIMEOUT:?}");
            thread::sleep(Duration::from_millis(10));
        }
        let RouterReady { http } = serde_json::from_slice(&fs::read(&ready_file)?)?;
        Ok(Self { child, http, _folder: folder })
    }

    /// Returns the CPU time of all threads, in µs.
    fn cpu_us(&self) -> Result<f64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        // The name of the program may contain spaces. User and system time are fields 14 and 15.
        let (_, fields) = stat.rsplit_once(") ").context("cannot read the router's CPU time")?;
        let ticks: Vec<u64> =
            fields.split(' ').skip(11).take(2).map(str::parse).collect::<Result<_, _>>()?;
        Ok(ticks.iter().sum::<u64>() as f64 * TICK_US)
    }
}

impl Drop for RouterProcess {
    fn drop(&mut self) {
        // Fails only if the router has exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A streamed request, as bytes of HTTP/1.1.
struct HttpRequest(Vec<u8>);

impl HttpRequest {
    fn chat(tokens: u32) -> Self {
        Self::chat_with(tokens, json!({}))
    }

    /// Creates a chat request with these fields besides its messages.
    fn chat_with(tokens: u32, fields: Value) -> Self {
        let mut body = fields;
        body["messages"] = json!([{"role": "user", "content": CONTENT}]);
        body["max_tokens"] = tokens.into();
        Self::new("chat/completions", body)
    }

    fn ids(tokens: u32) -> Self {
        Self::new("completions", json!({"prompt": PROMPT, "max_tokens": tokens}))
    }

    fn new(path: &str, mut body: Value) -> Self {
        body["stream"] = true.into();
        let body = body.to_string();
        let length = body.len();
        Self(
            format!(
                "POST /v1/{path} HTTP/1.1\r\nhost: router\r\nauthorization: Bearer {API_KEY}\r\n\
                 content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
            )
            .into(),
        )
    }
}

/// Runs clients with a connection each. Each client sends the request `rounds` times and reads the
/// whole streams. Returns one of the last streams.
async fn run_clients(
    http: SocketAddr,
    tls: Option<&TlsConnector>,
    count: u32,
    rounds: u32,
    request: &HttpRequest,
) -> Result<String> {
    let mut clients = JoinSet::new();
    for _ in 0..count {
        let (request, tls) = (request.0.clone(), tls.cloned());
        clients.spawn(async move {
            let stream = TcpStream::connect(http).await?;
            stream.set_nodelay(true)?;
            let mut stream: Box<dyn HttpStream> = match tls {
                Some(tls) => {
                    let name = ServerName::try_from(NAMES[0])?;
                    Box::new(tls.connect(name, stream).await?)
                }
                None => Box::new(stream),
            };
            let mut last = Vec::new();
            for _ in 0..rounds {
                stream.write_all(&request).await?;
                last = tokio::time::timeout(TIMEOUT, read_stream(&mut stream)).await??;
            }
            anyhow::Ok(last)
        });
    }
    let mut last = Vec::new();
    while let Some(ended) = clients.join_next().await {
        last = ended??;
    }
    Ok(String::from_utf8(last)?)
}

trait HttpStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> HttpStream for T {}

/// Reads a response up to its last chunk.
async fn read_stream(stream: &mut (impl AsyncRead + Unpin)) -> Result<Vec<u8>> {
    let mut response = Vec::with_capacity(64 << 10);
    while !response.ends_with(b"data: [DONE]\n\n\r\n0\r\n\r\n") {
        let count = stream.read_buf(&mut response).await?;
        let text = || String::from_utf8_lossy(&response);
        ensure!(count > 0 && !response.ends_with(b"}"), "the router answered {}", text());
    }
    Ok(response)
}
