//! Clients that do not read their streams.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use integration_tests::{
    client::{DEADLINE, greedy_body},
    cluster::{Cluster, ClusterSpec},
    golden::run_named,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::timeout,
};

const SLOTS: usize = 4;
/// Environment variable: number of clients that do not read.
const CLIENTS: &str = "BATON_TEST_UNREAD";
/// Its default, several times the slots of the node.
const CLIENTS_DEFAULT: usize = 24;
const TOKENS: usize = 400;

/// Sends a streamed request and reads nothing. The many log-probabilities fill the client's buffers
/// after a few dozen tokens.
async fn unread_stream(address: &str, salt: usize) -> Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(4096)?;
    let mut stream = socket.connect(address.parse()?).await?;
    let run = run_named("code");
    let mut body = greedy_body(&run.prompt_ids, TOKENS);
    (body["logprobs"], body["cache_salt"]) = (json!(20), json!(salt.to_string()));
    let body = body.to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    Ok(stream)
}

/// Reads the stream to its end. Returns the token ids.
async fn read_out(mut stream: TcpStream) -> Result<Vec<u32>> {
    let mut answer = Vec::new();
    timeout(DEADLINE, stream.read_to_end(&mut answer)).await??;
    let answer = String::from_utf8(answer)?;
    ensure!(answer.contains("data: [DONE]"), "the stream ends early: {answer:.300}");
    let events = answer.lines().filter_map(|line| line.strip_prefix("data: {"));
    let mut ids = Vec::new();
    for event in events {
        let event: Value = serde_json::from_str(&format!("{{{event}"))?;
        let tokens = event["choices"][0]["token_ids"].as_array();
        ids.extend(tokens.into_iter().flatten().filter_map(Value::as_u64).map(|id| id as u32));
    }
    Ok(ids)
}

#[tokio::test]
async fn clients_that_never_read_hold_no_slot_and_continue_when_they_read() -> Result<()> {
    let clients = std::env::var(CLIENTS).map_or(CLIENTS_DEFAULT, |count| {
        count.parse().unwrap_or_else(|_| panic!("invalid {CLIENTS}: {count}; expected a number"))
    });
    let deadline = DEADLINE * clients.div_ceil(CLIENTS_DEFAULT) as u32;
    let spec = ClusterSpec::smollm2()
        .nodes(0, 1)
        .set_decode("BATON_NODE_SLOTS", SLOTS)
        .set("BATON_ROUTER_SLOW_CLIENT_EVENTS", 4)
        .set("BATON_ROUTER_SLOW_CLIENT_TIMEOUT", "1h")
        .set("BATON_ROUTER_TIMEOUT", "1h")
        .set("BATON_ROUTER_WAITING_TIMEOUT", "1h");
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let run = run_named("code");
    let expected = client.greedy(&run.prompt_ids, TOKENS).await?;

    let address = cluster.http().trim_start_matches("http://").to_owned();
    let mut unread = Vec::new();
    for salt in 0..clients {
        unread.push(unread_stream(&address, salt).await?);
    }
    // Each request starts, fills its client's buffers and then holds nothing.
    let started = Instant::now();
    loop {
        let paused = client.metric("baton_attempts_total", "outcome=\"paused\"").await?;
        if paused >= clients as f64 && !cluster.decode[0].is_busy().await? {
            break;
        }
        ensure!(started.elapsed() < deadline, "{paused} of {clients} streams are paused");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!("{clients} unread streams paused after {:?}", started.elapsed());
    let asked = Instant::now();
    let found = client.complete(&greedy_body(&run.prompt_ids, 16)).await?;
    println!("a client that reads got 16 tokens after {:?}", asked.elapsed());
    assert_eq!(found.token_ids, expected[..16]);
    // No unread answer was ended.
    assert_eq!(client.metric("baton_requests", "").await?, clients as f64);

    // A client that reads again gets every token once.
    let read = unread.pop().context("there are unread streams")?;
    let found = read_out(read).await?;
    assert_eq!(found, expected);
    drop(unread);
    cluster.stop()
}
