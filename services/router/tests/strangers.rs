//! Clients without a valid key who hold connections, and a key that sends bodies slowly: other keys
//! are served.

mod common;

use std::{
    net::SocketAddr,
    path::Path,
    time::{Duration, Instant},
};

use common::{
    Cluster,
    client::{DEADLINE, eventually},
    long_prompt, settings,
};
use ring::digest::{SHA256, digest};
use router::RouterSettings;
use serde_json::json;
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
    time::timeout,
};

const ANSWER: &str = " one two three";
/// More connections than a port keeps under this limit on open files.
const STRANGERS: usize = 80;
const OPEN_FILES_MAX: u64 = 256;

/// Writes a file with keys of these names, whose text is the name, and these fields.
fn write_keys(path: &Path, keys: &[(&str, &str)]) {
    let entry = |(name, fields): &(&str, &str)| {
        let hash = digest(&SHA256, name.as_bytes());
        let hash: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[[key]]\nname = \"{name}\"\nsha256 = \"{hash}\"\n{fields}\n")
    };
    std::fs::write(path, keys.iter().map(entry).collect::<String>()).unwrap();
}

fn with_keys(keys: &[(&str, &str)]) -> (TempDir, RouterSettings) {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = settings();
    let [clients, operators] = ["keys", "operators"].map(|name| folder.path().join(name));
    write_keys(&clients, keys);
    write_keys(&operators, &[("operator", "")]);
    settings.router.keys = Some(clients);
    settings.router.admin_keys = Some(operators);
    settings.open_files_max = OPEN_FILES_MAX;
    (folder, settings)
}

fn head(method: &str, path: &str, key: &str, length: usize) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
}

/// Reads the head and the body of a response; `None` if the connection ends first.
async fn response(stream: &mut TcpStream) -> Option<(u16, String)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).unwrap().to_lowercase();
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let length = head.split("content-length: ").nth(1)?.lines().next()?.parse().ok()?;
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.ok()?;
    Some((status, String::from_utf8(body).unwrap()))
}

/// Returns the status of a request with this key on a new connection.
async fn status_on(address: SocketAddr, path: &str, key: &str) -> Option<u16> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    stream.write_all(head("GET", path, key, 0).as_bytes()).await.ok()?;
    Some(timeout(DEADLINE, response(&mut stream)).await.ok()??.0)
}

/// The behaviour of a stranger on its connection.
#[derive(Clone, Copy, Debug)]
enum Attack {
    Silence,
    /// A request without a valid key whose body never ends.
    Body,
    /// A request over HTTP/2 whose response is not read.
    Unread,
}

/// Holds a connection until the router closes it.
async fn hold(address: SocketAddr, attack: Attack) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    match attack {
        Attack::Silence => {}
        Attack::Body => {
            stream.write_all(head("POST", "/v1/completions", "no", 1 << 30).as_bytes()).await?;
        }
        Attack::Unread => {
            // SETTINGS with INITIAL_WINDOW_SIZE 0, then HEADERS of `GET /none` on stream 1.
            let settings = [0_u8, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0];
            let headers = [0_u8, 0, 12, 1, 5, 0, 0, 0, 1, 0x82, 0x86, 4, 5];
            let preface = &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..];
            let authority = [1_u8, 1, b'x'];
            let sent = [preface, &settings, &headers, b"/none", &authority].concat();
            stream.write_all(&sent).await?;
        }
    }
    let mut buffer = [0; 4096];
    loop {
        let read = timeout(Duration::from_millis(100), stream.read(&mut buffer)).await;
        match (read, attack) {
            (Ok(Ok(0)), _) => return Ok(()),
            (Ok(read), _) => _ = read?,
            (Err(_), Attack::Body) => stream.write_all(b"1").await?,
            (Err(_), _) => {}
        }
    }
}

/// Starts strangers that connect again whenever the router closes their connection.
fn strangers(address: SocketAddr) -> JoinSet<()> {
    let mut strangers = JoinSet::new();
    let attacks = [Attack::Silence, Attack::Body, Attack::Unread];
    for attack in attacks.into_iter().cycle().take(STRANGERS) {
        strangers.spawn(async move {
            loop {
                let _ = hold(address, attack).await;
            }
        });
    }
    strangers
}

/// Waits until the strangers hold the connections that a port keeps of them: a further silent one
/// has to wait.
async fn are_there(address: SocketAddr) {
    eventually("the port is full of strangers", async || {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = head("GET", "/none", "no", 0);
        stream.write_all(request.as_bytes()).await.unwrap();
        timeout(Duration::from_millis(300), stream.read_u8()).await.is_err()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_on_every_connection_keep_out_no_key_and_no_operator() {
    let (_folder, settings) = with_keys(&[("key", "")]);
    let cluster = Cluster::start_with(settings, 0, 1, ANSWER).await;
    for (address, path, key) in [
        (cluster.router.http, "/v1/models", "key"),
        (cluster.router.admin, "/v1/nodes", "operator"),
    ] {
        let mut earlier = TcpStream::connect(address).await.unwrap();
        let request = head("GET", path, key, 0);
        earlier.write_all(request.as_bytes()).await.unwrap();
        assert_eq!(response(&mut earlier).await.unwrap().0, 200);
        let strangers = strangers(address);
        are_there(address).await;
        for _ in 0..3 {
            eventually("a new client is served", async || {
                status_on(address, path, key).await == Some(200)
            })
            .await;
        }
        earlier.write_all(request.as_bytes()).await.unwrap();
        let answer = timeout(DEADLINE, response(&mut earlier)).await.unwrap();
        assert_eq!(answer.expect("a client with a key keeps its connection").0, 200);
        drop(strangers);
    }
}

#[tokio::test]
async fn request_without_a_key_is_rejected_before_its_body_and_its_connection_goes_on() {
    let (_folder, settings) = with_keys(&[("key", "")]);
    let cluster = Cluster::start_with(settings, 0, 1, ANSWER).await;
    const LENGTH: usize = 3 << 20;
    let mut stream = TcpStream::connect(cluster.router.http).await.unwrap();
    stream.write_all(head("POST", "/v1/completions", "no", LENGTH).as_bytes()).await.unwrap();
    let sent = Instant::now();
    let (status, _) = timeout(DEADLINE, response(&mut stream)).await.unwrap().unwrap();
    // Before, the response waited 5 s for the body.
    assert!(status == 401 && sent.elapsed() < Duration::from_secs(4), "{:?}", sent.elapsed());
    // The client sends the body, and its next request.
    stream.write_all(&vec![b' '; LENGTH]).await.unwrap();
    stream.write_all(head("GET", "/v1/models", "key", 0).as_bytes()).await.unwrap();
    assert_eq!(timeout(DEADLINE, response(&mut stream)).await.unwrap().unwrap().0, 200);
}

#[tokio::test]
async fn request_head_that_is_too_large_is_rejected() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let mut stream = TcpStream::connect(cluster.router.http).await.unwrap();
    let name = "x".repeat(70 << 10);
    let request = format!("GET /live HTTP/1.1\r\nhost: x\r\nx: {name}\r\n\r\n");
    // The router may close the connection before the last byte.
    let _ = stream.write_all(request.as_bytes()).await;
    let mut status = [0; 12];
    timeout(DEADLINE, stream.read_exact(&mut status)).await.unwrap().unwrap();
    assert_eq!(&status, b"HTTP/1.1 431");
    assert_eq!(cluster.client.get("/live").await.status, 200);
}

#[tokio::test]
async fn unfinished_bodies_of_a_key_leave_room_to_another_key() {
    const BODY: usize = 1 << 20;
    const BODIES: usize = 12;
    let (_folder, mut settings) = with_keys(&[("slow", "streams_max = 2"), ("other", "")]);
    settings.bodies_bytes_max = 8 * BODY as u64;
    let cluster = Cluster::start_with(settings, 0, 1, ANSWER).await;
    let mut slow = JoinSet::new();
    for _ in 0..BODIES {
        let mut stream = TcpStream::connect(cluster.router.http).await.unwrap();
        slow.spawn(async move {
            let head = head("POST", "/v1/completions", "slow", 2 * BODY);
            stream.write_all(head.as_bytes()).await.unwrap();
            // The router may reject the request before the last byte.
            let _ = stream.write_all(&vec![b' '; BODY]).await;
            let (status, body) = response(&mut stream).await.expect("the body has a time-out");
            assert_eq!(status, 429, "{body}");
            body
        });
    }
    let mut rejected = Vec::new();
    for _ in 0..BODIES - 2 {
        let next = timeout(DEADLINE, slow.join_next()).await.expect("the body counts as a stream");
        rejected.push(next.unwrap().unwrap());
        let prompt = json!({"prompt": long_prompt(), "max_tokens": 3}).to_string();
        let headers = [("authorization", "Bearer other")];
        let answer = cluster.client.send(http::Method::POST, "/v1/completions", &headers, prompt);
        assert_eq!(answer.await.status(), 200, "another key is served");
    }
    let of_share = rejected.iter().filter(|body| body.contains("share")).count();
    let of_streams = rejected.iter().filter(|body| body.contains("2 streams at a time")).count();
    // The share of the key is seven bodies of twelve, and only two of them may go on.
    assert!(of_share > 0 && of_streams > 0, "{rejected:?}");
    assert_eq!(of_share + of_streams, BODIES - 2, "{rejected:?}");
    let unfinished = timeout(Duration::from_millis(200), slow.join_next()).await;
    assert!(unfinished.is_err(), "{unfinished:?}");
}
