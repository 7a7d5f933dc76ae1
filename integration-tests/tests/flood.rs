//! Ten thousand concurrent requests, each on its own connection, to a router whose port keeps at
//! most 4,096 connections.

use std::{
    io::ErrorKind,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use integration_tests::{
    client::Client,
    cluster::{Cluster, ClusterSpec},
};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::Barrier,
    task::JoinSet,
};

const REQUESTS: usize = 10_000;
/// Open files of the router: 4,096 connections to clients, and up to 256 other files.
const ROUTER_FILES_MAX: usize = 4096 + 256;
const TIMEOUT: Duration = Duration::from_secs(100);

/// Sets the soft limit on open files of this process.
fn set_files_max(count: usize) -> Result<()> {
    let id = std::process::id().to_string();
    let limit = format!("--nofile={count}:");
    let status = Command::new("prlimit").args(["--pid", &id, &limit]).status()?;
    ensure!(status.success(), "cannot set the limit on open files to {count}");
    Ok(())
}

fn files_of(process: u32) -> Result<usize> {
    Ok(std::fs::read_dir(format!("/proc/{process}/fd"))?.count())
}

/// Returns head and body of the only response on a connection.
async fn ask(address: &str, request: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(request).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(answer)
}

/// Repeats `ask` with a new connection after a reset. With thousands of pending connections the
/// kernel resets some before the router accepts them.
async fn ask_until_taken(address: &str, request: &[u8]) -> Result<(String, Value)> {
    let answer = loop {
        match ask(address, request).await {
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            answered => break answered?,
        }
    };
    let answer = String::from_utf8(answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no head")?;
    Ok((head.to_lowercase(), serde_json::from_str(body).with_context(|| answer.clone())?))
}

/// Outcome of one request.
enum Outcome {
    Served,
    Rejected,
}

async fn one_of_many(
    address: Arc<str>,
    request: Arc<[u8]>,
    start: Arc<Barrier>,
) -> Result<Outcome> {
    start.wait().await;
    let (head, body) = tokio::time::timeout(TIMEOUT, ask_until_taken(&address, &request)).await??;
    if head.starts_with("http/1.1 200") {
        ensure!(body["usage"]["completion_tokens"] == 1, "{body}");
        return Ok(Outcome::Served);
    }
    ensure!(head.starts_with("http/1.1 503"), "{head}\n{body}");
    ensure!(body["error"]["code"] == "overloaded", "{body}");
    let after = head.lines().find_map(|line| line.strip_prefix("retry-after: "));
    let seconds: u32 = after.context("no Retry-After")?.trim().parse()?;
    ensure!((1..=60).contains(&seconds), "{head}");
    Ok(Outcome::Rejected)
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_concurrent_requests_are_each_served_or_rejected() -> Result<()> {
    let spec = ClusterSpec::smollm2()
        .nodes(0, 1)
        .set("BATON_ROUTER_REQUESTS_MAX", 64)
        .set("BATON_ROUTER_WAITING_MAX", 32);
    let cluster = Cluster::start(spec).await?;
    set_files_max(REQUESTS + 1024)?;
    let client = Client::new(cluster.http());
    let before = files_of(cluster.router.id())?;

    let body = r#"{"prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0}"#;
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: baton\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let request: Arc<[u8]> = request.into_bytes().into();
    let address: Arc<str> = cluster.router.ready.http.as_str().into();
    let start = Arc::new(Barrier::new(REQUESTS));
    let began = Instant::now();
    let mut all = JoinSet::new();
    for _ in 0..REQUESTS {
        all.spawn(one_of_many(address.clone(), request.clone(), start.clone()));
    }
    let (mut served, mut rejected, mut files_max) = (0, 0, 0);
    while let Some(ended) = all.join_next().await {
        match ended?? {
            Outcome::Served => served += 1,
            Outcome::Rejected => rejected += 1,
        }
        if (served + rejected) % 100 == 0 {
            files_max = files_max.max(files_of(cluster.router.id())?);
        }
    }
    println!(
        "{served} served, {rejected} rejected in {:?}; up to {files_max} open files",
        began.elapsed()
    );
    assert_eq!(served + rejected, REQUESTS);
    // How many are served depends on the machine's load.
    assert!(served > 0 && rejected >= 1000, "{served} served, {rejected} rejected");
    assert!(files_max < ROUTER_FILES_MAX, "{files_max} open files");
    // The router answered each accepted request exactly once. It counts a request after its answer.
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let ended = client.metric("baton_requests_finished_total", "").await? as usize;
        if ended < REQUESTS && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        }
        assert_eq!(ended, REQUESTS);
        break;
    }
    let log = cluster.router.log();
    assert!(!log.contains("cannot accept a connection"), "{log}");

    // Afterwards no request is running, no additional file is open, and the next request is served.
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let (status, health) = client.get_json("/health").await?;
        let files = files_of(cluster.router.id())?;
        if status == 200 && health["requests_running"] == 0 && files <= before + 8 {
            break;
        }
        if Instant::now() > deadline {
            bail!(
                "the router is not idle: {files} open files ({before} before the requests), {health}"
            );
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(client.greedy(&[1, 2, 3], 4).await?.len(), 4);
    cluster.stop()
}
