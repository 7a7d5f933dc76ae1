//! Hostile and invalid input to a whole cluster. Each input is rejected with its own clear error,
//! and concurrent requests are not disturbed.

#[path = "bad_input/data_port.rs"]
mod data_port;

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use integration_tests::{
    client::{Client, greedy_body, salted_body},
    cluster::{Cluster, ClusterSpec, Service, smollm2},
    golden::{GoldenRun, golden, longest},
};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};

use crate::data_port::Target;

/// Allowed growth of a node's memory during an attack on its data port: the rest of its arena (94
/// MB), thread stacks and buffers. The announced and sent bytes are far more.
const GROWTH_BYTES_MAX: u64 = 180 << 20;
/// Connections to each port.
const ROUNDS: u64 = 40;
const GARBAGE_KINDS: u64 = 5;
/// Number of connections that one attacker leaves open. A node accepts 128 unauthenticated
/// connections.
const HELD_MAX: usize = 60;

/// Checks that a long uncached prompt is prefilled on one node and decoded on another, with the
/// golden tokens.
async fn hand_over_is_golden(client: &Client, run: &GoldenRun, salt: &str) -> Result<()> {
    let body = salted_body(&run.prompt_ids, run.output_ids.len(), salt);
    let answer = client.complete(&body).await?;
    assert_eq!(answer.token_ids, run.output_ids, "{salt}");
    assert_eq!((answer.cached_tokens, answer.attempts), (0, 1), "{salt}: {answer:?}");
    assert!(answer.kv_bytes > 0, "{salt}: no KV was transferred: {answer:?}");
    Ok(())
}

/// Streams the golden answer. Returns the times between its tokens.
async fn token_gaps(client: &Client, run: &GoldenRun, salt: &str) -> Result<Vec<Duration>> {
    let body = salted_body(&run.prompt_ids, run.output_ids.len(), salt);
    let mut stream = client.stream("/v1/completions", &body).await?;
    let (mut tokens, mut gaps) = (Vec::<u32>::new(), Vec::new());
    let mut last: Option<Duration> = None;
    while let Some(event) = stream.next().await? {
        let ids = event.token_ids();
        if ids.is_empty() {
            continue;
        }
        let before = last.replace(event.after);
        gaps.extend(before.map(|before| event.after.saturating_sub(before)));
        tokens.extend(ids);
    }
    assert_eq!(tokens, run.output_ids, "{salt}");
    Ok(gaps)
}

/// Returns the 99th percentile and the maximum.
fn p99_and_max(mut gaps: Vec<Duration>) -> [Duration; 2] {
    gaps.sort();
    [99, 100].map(|percent| gaps[(gaps.len() * percent).div_ceil(100) - 1])
}

/// Posts a request and expects this status and an error message with every word.
async fn refused(client: &Client, body: Value, status: u16, words: &[&str]) -> Result<()> {
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let mut body = body.clone();
        if path.ends_with("chat/completions") {
            // Send a chat request with the same errors. Errors in the prompt apply to completions
            // only.
            if let Some(prompt) = body.as_object_mut().and_then(|body| body.remove("prompt")) {
                if prompt != json!("hi") {
                    continue;
                }
                body["messages"] = json!([{"role": "user", "content": "hi"}]);
            }
        }
        let answer = client.post(path, &body).await?;
        let error = answer.json()["error"].clone();
        assert_eq!(answer.status.as_u16(), status, "{path} {body}: {error}");
        let message = error["message"].as_str().context("no message")?;
        for word in words {
            assert!(message.contains(word), "{path} {body}: {message:?} lacks {word:?}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn every_invalid_request_is_rejected_with_its_field() -> Result<()> {
    let (mut cluster, client) = Cluster::start_with_client(ClusterSpec::smollm2()).await?;
    // This request runs during the whole test and must complete.
    let run = golden().runs.remove(0);
    let undisturbed = tokio::spawn({
        let client = client.clone();
        let prompt = run.prompt_ids.clone();
        async move {
            client.stream("/v1/completions", &greedy_body(&prompt, 48)).await?.token_ids().await
        }
    });

    let long: Vec<u32> = vec![5; 9000];
    refused(&client, json!({"prompt": "hi", "model": "nobody"}), 404, &["nobody"]).await?;
    refused(&client, json!({"prompt": ""}), 400, &["prompt"]).await?;
    refused(&client, json!({"prompt": []}), 400, &["prompt"]).await?;
    refused(&client, json!({"prompt": long}), 400, &["9000", "819"]).await?;
    refused(&client, json!({"prompt": [1, 49152]}), 400, &["49152"]).await?;
    refused(&client, json!({"prompt": [-1]}), 400, &["-1"]).await?;
    refused(&client, json!({"prompt": {"a": 1}}), 400, &["prompt"]).await?;
    for (field, value) in [
        ("max_tokens", json!(-2)),
        ("max_tokens", json!(0)),
        ("max_tokens", json!("many")),
        ("max_tokens", json!(1e30)),
        ("temperature", json!(-0.5)),
        ("temperature", json!("hot")),
        ("top_p", json!(1.5)),
        ("top_p", json!(0)),
        ("min_p", json!(2)),
        ("top_k", json!(-7)),
        ("presence_penalty", json!(99)),
        ("frequency_penalty", json!(-99)),
        ("repetition_penalty", json!(0)),
        ("n", json!(0)),
        ("n", json!(100_000)),
        ("seed", json!("x")),
        ("stop", json!([1, 2])),
        ("stop", json!(vec!["x"; 10_000])),
        ("stop", json!("y".repeat(100_000))),
        ("stop", json!([""])),
        ("logprobs", json!("all")),
        ("stream", json!("yes")),
    ] {
        let mut body = json!({"prompt": "hi"});
        body[field] = value;
        refused(&client, body, 400, &[field]).await?;
    }

    let bytes = |text: &'static [u8]| bytes::Bytes::from_static(text);
    for (body, words) in [
        (bytes(b"{\"prompt\": \"hi\""), "JSON"),
        (bytes(b"[]"), ""),
        (bytes(b"{\"prompt\": \"\xff\xfe\"}"), "UTF-8"),
        (bytes(b""), ""),
    ] {
        let answer = client.post_bytes("/v1/completions", body, &[]).await?;
        assert_eq!(answer.status, 400, "{:?}", answer.json());
        let message = answer.json()["error"]["message"].as_str().unwrap_or("").to_owned();
        assert!(message.contains(words), "{message:?} lacks {words:?}");
    }
    let big = bytes::Bytes::from(vec![b' '; 5 << 20]);
    let answer = client.post_bytes("/v1/completions", big, &[]).await?;
    assert_eq!(answer.status, 413);
    assert_eq!(client.get("/v1/nothing").await?.status, 404);
    assert_eq!(client.get("/v1/completions").await?.status, 405);

    assert_eq!(undisturbed.await??, run.output_ids);
    for service in cluster.all() {
        assert!(service.is_running(), "{} has ended", service.name);
    }
    cluster.stop()
}

/// Breaks the file of API keys while a request of a key streams.
#[tokio::test]
async fn broken_key_file_is_named_and_disturbs_no_request() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let keys = folder.path().join("keys.toml");
    let hash = digest(&SHA256, b"old");
    let hash: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let valid = format!("[[key]]\nname = \"a\"\nsha256 = \"{hash}\"\n");
    std::fs::write(&keys, &valid)?;
    let spec = ClusterSpec::smollm2().set("BATON_ROUTER_KEYS", keys.display());
    let cluster = Cluster::start(spec).await?;
    let client = Client::new(cluster.http());
    let run = longest();
    let body = greedy_body(&run.prompt_ids, run.output_ids.len());
    let stream = async || {
        client.stream_with("/v1/completions", &body, &[("authorization", "Bearer old")]).await
    };
    for (broken, reason) in [
        ("", "the file is empty"),
        ("[[key]", "invalid"),
        ("[[key]]\nname = \"b\"\nsha256 = \"planted\"\n", "sha256"),
    ] {
        let mut answer = stream().await?;
        answer.next().await?;
        std::fs::write(&keys, broken)?;
        let setting = format!("router.keys {}", keys.display());
        let words = [&setting, reason, "the previous content stays in use"];
        cluster.router.wait_logged(&words).await?;
        answer.all().await?;
        assert_eq!(stream().await?.token_ids().await?, run.output_ids, "{broken:?}");
        std::fs::write(&keys, &valid)?;
    }
    let log = cluster.router.log();
    assert!(!log.contains("planted"), "{log}");
    cluster.stop()
}

#[tokio::test]
async fn garbage_on_every_port_disturbs_no_request() -> Result<()> {
    let (mut cluster, client) = Cluster::start_with_client(ClusterSpec::smollm2()).await?;
    let run = longest();
    let addresses: Vec<String> = cluster
        .all()
        .flat_map(|service| {
            let ready = service.ready.clone();
            [ready.http, ready.grpc, ready.admin, ready.metrics, ready.control, ready.data]
        })
        .filter(|address| !address.is_empty())
        .map(|address| address.trim_start_matches("tcp://").to_owned())
        .collect();
    // Four of the router and four of each node.
    assert_eq!(addresses.len(), 12, "{addresses:?}");
    let flood = std::thread::spawn(move || -> Result<()> {
        for address in &addresses {
            let mut sent_bytes = 0;
            for round in 0..ROUNDS {
                let outcome = throw_garbage(address, round)
                    .with_context(|| format!("{address} in round {round}"))?;
                sent_bytes += outcome.sent_bytes;
                // Bytes of no known protocol get an error response or a closed connection.
                ensure!(
                    outcome.answered_or_closed || !round.is_multiple_of(GARBAGE_KINDS),
                    "{address} waits for more in round {round}"
                );
            }
            // Short payloads must be sent completely, long ones up to the point where the service
            // closes the connection.
            ensure!(sent_bytes > ROUNDS as usize * 64, "{sent_bytes} bytes went to {address}");
        }
        Ok(())
    });
    let mut round = 0;
    while round < 3 || !flood.is_finished() {
        hand_over_is_golden(&client, &run, &format!("round {round}")).await?;
        round += 1;
    }
    flood.join().expect("a flood thread panicked")?;
    hand_over_is_golden(&client, &run, "after").await?;
    for service in cluster.all() {
        assert!(service.is_running(), "{} has ended", service.name);
    }
    cluster.stop()
}

#[tokio::test]
async fn garbage_on_data_ports_delays_no_hand_over_and_fills_no_memory() -> Result<()> {
    let spec = ClusterSpec::smollm2().set("BATON_NODE_BLOCKS", 128);
    let (mut cluster, client) = Cluster::start_with_client(spec).await?;
    let run = longest();
    hand_over_is_golden(&client, &run, "before").await?;
    let mut usual = Vec::new();
    for stream in 0..3 {
        usual.extend(token_gaps(&client, &run, &format!("usual {stream}")).await?);
    }
    let mut targets = Vec::new();
    for node in cluster.prefill.iter().chain(&cluster.decode) {
        targets.push(Target::of(node).await?);
    }
    let targets = Arc::new(targets);
    let mut allowed = Vec::new();
    for target in targets.iter() {
        allowed.push(target.resident_bytes()? + GROWTH_BYTES_MAX);
    }
    let look = {
        let targets = targets.clone();
        move || {
            for (target, allowed) in targets.iter().zip(&allowed) {
                let bytes = target.resident_bytes()?;
                ensure!(bytes <= *allowed, "{} has {bytes} bytes in use", target.name);
            }
            Ok(())
        }
    };
    let over = Arc::new(AtomicBool::new(false));
    let strangers = std::thread::spawn({
        let (targets, over, look) = (targets.clone(), over.clone(), look.clone());
        move || -> Result<u64> {
            let (mut held, mut rounds) = (Vec::new(), 0);
            while !over.load(Ordering::Relaxed) {
                for target in targets.iter() {
                    match target.throw_garbage(rounds) {
                        Ok(stream) => held.push(stream),
                        // The node may close the connection during the write. The port must stay
                        // open.
                        Err(error) => ensure!(
                            error.kind() != std::io::ErrorKind::ConnectionRefused,
                            "{}: {error}",
                            target.name
                        ),
                    }
                }
                if held.len() > HELD_MAX {
                    held.drain(..HELD_MAX / 2);
                }
                look()?;
                rounds += 1;
            }
            Ok(rounds)
        }
    });
    let traitor = std::thread::spawn({
        let targets = targets.clone();
        move || targets.iter().try_for_each(|target| target.attack_authenticated(&look))
    });
    let (mut answers, mut flooded) = (0, Vec::new());
    while answers < 3 || !traitor.is_finished() {
        hand_over_is_golden(&client, &run, &format!("round {answers}")).await?;
        flooded.extend(token_gaps(&client, &run, &format!("flooded {answers}")).await?);
        answers += 1;
    }
    over.store(true, Ordering::Relaxed);
    traitor.join().expect("the authenticated attacker panicked")?;
    let rounds = strangers.join().expect("an unauthenticated attacker panicked")?;
    assert!(rounds >= 10, "{rounds}");
    let ([usual_p99, usual_max], [p99, max]) = (p99_and_max(usual), p99_and_max(flooded));
    println!(
        "time between two tokens: p99 {usual_p99:?}, longest {usual_max:?}; flooded p99 {p99:?}, longest {max:?}"
    );
    // The flood takes CPU time from the nodes, but no stream waits for a time-out of a connection,
    // of which the shortest is the lease.
    assert!(max <= 3 * usual_max + Duration::from_secs(1), "{usual_max:?} {max:?}");
    targets.iter().try_for_each(Target::assert_rejects_unauthenticated)?;
    hand_over_is_golden(&client, &run, "after").await?;
    for service in cluster.all() {
        assert!(service.is_running(), "{} has ended", service.name);
    }
    cluster.stop()
}

/// Outcome of one connection.
struct GarbageOutcome {
    sent_bytes: usize,
    /// Whether the service answered or closed the connection.
    answered_or_closed: bool,
}

/// Sends invalid data on a connection and reads a little. Waits longer where the service must
/// detect the error at once.
fn throw_garbage(address: &str, round: u64) -> std::io::Result<GarbageOutcome> {
    let mut stream = TcpStream::connect(address)?;
    let timeout = match round % GARBAGE_KINDS {
        0 => Duration::from_secs(20),
        _ => Duration::from_millis(5),
    };
    stream.set_write_timeout(Some(Duration::from_millis(200)))?;
    stream.set_read_timeout(Some(timeout))?;
    let mut state = round.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut noise = |count: usize| -> Vec<u8> {
        (0..count)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state as u8
            })
            .collect()
    };
    let message: Vec<u8> = match round % GARBAGE_KINDS {
        0 => noise(64),
        1 => noise(100_000),
        // The signature of a ZMTP peer, then a frame that announces 2^60 bytes.
        2 => {
            let mut handshake = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0];
            handshake.extend_from_slice(b"NULL");
            handshake.resize(64, 0);
            handshake.extend_from_slice(&[2, 0x10, 0, 0, 0, 0, 0, 0, 0]);
            handshake
        }
        // The HTTP/2 preface, then noise instead of frames.
        3 => [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), noise(500)].concat(),
        _ => b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999999\r\n\r\n{".to_vec(),
    };
    let mut sent_bytes = 0;
    while sent_bytes < message.len() {
        match stream.write(&message[sent_bytes..]) {
            Ok(count) => sent_bytes += count,
            // The service has closed the connection or stopped reading.
            Err(_) => break,
        }
    }
    let answered_or_closed = match stream.read(&mut [0; 256]) {
        Ok(_) => true,
        Err(error) => {
            ![std::io::ErrorKind::WouldBlock, std::io::ErrorKind::TimedOut].contains(&error.kind())
        }
    };
    Ok(GarbageOutcome { sent_bytes, answered_or_closed })
}

/// Asserts that a service with these settings exits with code 1 or 2 and prints these words.
fn start_fails(program: &str, settings: &[(&str, &str)], words: &[&str]) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let settings = settings.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    let message = match Service::start(folder.path(), "service", program, &settings) {
        Ok(_) => panic!("{program} started with {settings:?}"),
        Err(error) => format!("{error:#}"),
    };
    for word in words {
        assert!(message.contains(word), "{message:?} lacks {word:?}");
    }
    assert!(!message.contains("panicked"), "{message}");
    Ok(())
}

#[test]
fn failed_service_start_reports_its_cause() -> Result<()> {
    let model = smollm2().display().to_string();
    let secret = integration_tests::cluster::SECRET;
    let folder = tempfile::tempdir()?;
    let typo = folder.path().join("typo.toml");
    std::fs::write(&typo, "[node]\nstep_tokns = 5\n")?;
    let typo = typo.display().to_string();
    let truncated = folder.path().join("truncated.gguf");
    let whole = std::fs::read(smollm2())?;
    std::fs::write(&truncated, &whole[..whole.len() / 2])?;
    let truncated = truncated.display().to_string();
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let taken = taken.local_addr()?.to_string();
    for program in ["baton-decode-node", "baton-prefill-node"] {
        let good = [
            ("BATON_MODEL_PATH", model.as_str()),
            ("BATON_CLUSTER_SECRET", secret),
            ("BATON_NODE_GRPC", "127.0.0.1:0"),
        ];
        let with = |name, value| [&good[..], &[(name, value)]].concat();
        start_fails(program, &with("BATON_MODEL_PATH", "/nowhere/x.gguf"), &["/nowhere/x.gguf"])?;
        start_fails(
            program,
            &with("BATON_MODEL_PATH", &truncated),
            &["truncated", "tensor", "offset"],
        )?;
        start_fails(program, &with("BATON_NODE_STEP_TOKENS", "many"), &["step_tokens", "many"])?;
        start_fails(program, &with("BATON_CONFIG", &typo), &["step_tokns", "step_tokens"])?;
        start_fails(program, &with("BATON_NODE_GRPC", &taken), &[taken.as_str()])?;
    }
    start_fails("baton-router", &[("BATON_MODEL_PATH", "/nowhere/x.gguf")], &["/nowhere/x.gguf"])?;
    let router = [("BATON_MODEL_PATH", model.as_str()), ("BATON_ROUTER_HTTP", taken.as_str())];
    start_fails("baton-router", &router, &[taken.as_str()])?;
    Ok(())
}
