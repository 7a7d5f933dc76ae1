//! A node in a helper process, to be stopped and killed.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    process::{ChildStdin, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, unbounded};
use kernels::{KvFormat, KvLayout};
use kv_transfer::api::{Epoch, Event, PeerAddress, TransferId};
use test_harness::KilledOnDrop;

use crate::node::{Node, SECRET, WAIT_TIMEOUT, blocks, identity};

/// Name of the helper that runs [`run_child`].
pub(crate) const CHILD_HELPER: &str = "node";
/// Names the node id of the child.
const NODE_ID: &str = "BATON_TEST_NODE_ID";

/// 256 KiB per block, so that one transfer exceeds the socket buffers.
pub(crate) fn large_layout() -> KvLayout {
    KvLayout { layer_count: 16, kv_head_count: 4, head_dim: 32, format: KvFormat::F32 }
}

pub(crate) fn start_large(name: &str) -> Node {
    Node::start_in(name, SECRET, identity(), large_layout())
}

/// A decode node in another process.
pub(crate) struct ChildNode {
    child: KilledOnDrop,
    stdin: ChildStdin,
    /// Output of the child about its transfers: `arrived ID` or `failed ID`.
    pub lines: Receiver<String>,
    pub address: PeerAddress,
}

impl ChildNode {
    pub(crate) fn start(name: &str) -> Self {
        let child = test_harness::helper(CHILD_HELPER)
            .env(NODE_ID, name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut child = KilledOnDrop(child);
        let (sender, lines) = unbounded();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        // The thread ends with the child.
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let first = lines.recv_timeout(WAIT_TIMEOUT).expect("the child starts");
        let words: Vec<&str> = first.split(' ').collect();
        let address = PeerAddress {
            node_id: name.to_owned(),
            epoch: Epoch(u128::from_str_radix(words[1], 16).unwrap()),
            control_endpoint: words[2].to_owned(),
        };
        let stdin = child.stdin.take().unwrap();
        Self { child, stdin, lines, address }
    }

    /// Makes the child reserve this many blocks.
    pub(crate) fn receive(&mut self, transfer: TransferId, peer: &Node, block_count: u32) {
        let PeerAddress { node_id, epoch, control_endpoint } = &peer.address;
        writeln!(
            self.stdin,
            "receive {transfer} {node_id} {epoch} {control_endpoint} {block_count}"
        )
        .unwrap();
    }

    pub(crate) fn signal(&self, signal: &str) {
        let status =
            Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    pub(crate) fn line(&self) -> String {
        self.lines.recv_timeout(WAIT_TIMEOUT).expect("the child says something")
    }
}

/// Main function of the child, started by [`ChildNode::start`].
pub(crate) fn run_child() {
    let name = env::var(NODE_ID).unwrap();
    let node = start_large(&name);
    println!("node {} {}", node.address.epoch, node.address.control_endpoint);
    let (sender, commands) = unbounded();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    let start = Instant::now();
    // Exits even if the parent dies.
    while start.elapsed() < Duration::from_secs(60) {
        crossbeam_channel::select! {
            recv(commands) -> line => {
                let Ok(line) = line else { return };
                let words: Vec<&str> = line.split(' ').collect();
                let peer = PeerAddress {
                    node_id: words[2].to_owned(),
                    epoch: Epoch(u128::from_str_radix(words[3], 16).unwrap()),
                    control_endpoint: words[4].to_owned(),
                };
                let transfer = TransferId(u128::from_str_radix(words[1], 16).unwrap());
                node.receive_from(transfer, peer, 0, &blocks(0..words[5].parse().unwrap()));
            }
            recv(node.events) -> event => match event.unwrap() {
                Event::Arrived { transfer, .. } => println!("arrived {transfer}"),
                Event::ReceiveFailed { transfer, .. } => {
                    node.assert_free();
                    println!("failed {transfer}");
                }
                other => println!("unexpected {other:?}"),
            },
            default(Duration::from_secs(1)) => {}
        }
    }
}
