//! Strangers who hold connections to the gRPC port of a node: a node with and without certificates
//! serves its callers.

mod common;

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use common::*;
use node::Role;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
};

/// More connections than a node keeps.
const STRANGERS: usize = 300;
/// Connections of strangers that a node keeps of one address.
const STRANGERS_KEPT: usize = 128;
/// HTTP/2 connection preface and empty SETTINGS.
const OPENING: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
const PING: u8 = 6;
const ACK: u8 = 1;

/// Sends these bytes and answers each PING until the node closes the connection. `heard` counts
/// connections from which the node was heard.
async fn hold(address: SocketAddr, bytes: &[u8], heard: &AtomicUsize) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(bytes).await?;
    let mut head = [0; 9];
    stream.read_exact(&mut head).await?;
    heard.fetch_add(1, Ordering::Relaxed);
    loop {
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        stream.read_exact(&mut payload).await?;
        if head[3..5] == [PING, 0] {
            head[4] = ACK;
            stream.write_all(&[&head[..], &payload].concat()).await?;
        }
        stream.read_exact(&mut head).await?;
    }
}

/// Starts strangers that connect again whenever the node closes their connection.
fn strangers(address: SocketAddr, bytes: &'static [u8], heard: &Arc<AtomicUsize>) -> JoinSet<()> {
    let mut strangers = JoinSet::new();
    for _ in 0..STRANGERS {
        let heard = heard.clone();
        strangers.spawn(async move {
            loop {
                let _ = hold(address, bytes, &heard).await;
            }
        });
    }
    strangers
}

/// Waits until the condition holds.
async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let since = Instant::now();
    while !holds().await {
        assert!(since.elapsed() < TIMEOUT, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_are_closed_with_and_without_certificates() {
    let (model, folder) = (dummy_model(), tempfile::tempdir().unwrap());
    let plain = dummy_settings(model.path(), &[]);
    for flags in [with_tls(plain.clone(), folder.path()), plain] {
        let node = TestNode::start(Role::Decode, flags).await;
        let address = node.node.addresses().grpc;
        let mut silent = JoinSet::new();
        for sent in [&[][..], &[22], &[22, 3, 1, 2, 0], &OPENING[..3]] {
            silent.spawn(async move {
                let mut stream = TcpStream::connect(address).await.unwrap();
                stream.write_all(sent).await.unwrap();
                let closed =
                    async { while stream.read(&mut [0; 64]).await.is_ok_and(|count| count > 0) {} };
                let closed = tokio::time::timeout(TIMEOUT, closed).await;
                assert!(closed.is_ok(), "a connection that sent {sent:?} stays open");
            });
        }
        silent.join_all().await;
        assert_eq!(node.side().local_prefill(&attempt(&dummy_prompt(20, 1), 5)).await.ids.len(), 5);
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_are_served_while_strangers_take_every_connection() {
    let (model, folder) = (dummy_model(), tempfile::tempdir().unwrap());
    let plain = dummy_settings(model.path(), &[]);
    // A node with certificates sends nothing to a stranger.
    for (flags, bytes, heard_min) in
        [(plain.clone(), OPENING, STRANGERS_KEPT), (with_tls(plain, folder.path()), &[][..], 0)]
    {
        let tls = client_tls(&flags);
        let node = TestNode::start(Role::Decode, flags).await;
        let (address, epoch) = (node.node.addresses().grpc, node.node.record().epoch);
        let earlier = node.side().observe().await;
        let heard = Arc::new(AtomicUsize::new(0));
        let strangers = strangers(address, bytes, &heard);
        eventually("strangers hold connections", async || {
            heard.load(Ordering::Relaxed) >= heard_min
        })
        .await;
        for seed in 0..3 {
            // A caller whose connection is closed before its first call connects again, as a router
            // does.
            eventually("a new caller is served", async || {
                let address = address.to_string();
                let Ok(client) = connect_with(&address, epoch, tls.clone()).await else {
                    return false;
                };
                let side = Side { client, ..node.side() };
                let Ok(stream) = side.try_decode(&attempt(&dummy_prompt(20, seed), 5), None).await
                else {
                    return false;
                };
                Decoded::of(stream).await.ids.len() == 5
            })
            .await;
        }
        // The connection of an earlier caller was not closed.
        drop(earlier);
        let side = node.side();
        assert_eq!(side.local_prefill(&attempt(&dummy_prompt(20, 9), 5)).await.ids.len(), 5);
        drop(strangers);
        node.stop().await;
    }
}
