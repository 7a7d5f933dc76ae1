//! A node in a process of its own, to be stopped and killed. The process is this test binary again.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, unbounded};
use kernels::{Dtype, KvLayout};
use kv_transfer::api::{Epoch, Event, PeerAddress, TransferId};

use crate::node::{Node, PATIENCE, SECRET, blocks, identity};

const PARENT: &str = "BATON_KV_TRANSFER_TEST_PARENT";

/// 256 KiB a block, so that one transfer does not fit the socket buffers.
pub fn large_layout() -> KvLayout {
    KvLayout { layer_count: 16, kv_head_count: 4, head_dim: 32, dtype: Dtype::F32 }
}

pub fn start_large(name: &str) -> Node {
    Node::start_in(name, SECRET, identity(), large_layout())
}

/// A decode node in another process.
pub struct ChildNode {
    child: Child,
    stdin: ChildStdin,
    /// What the child says of its transfers: `arrived ID` or `failed ID`.
    pub lines: Receiver<String>,
    pub address: PeerAddress,
}

impl ChildNode {
    pub fn start(name: &str) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "process::child_node", "--nocapture"])
            .env(PARENT, name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = unbounded();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        // Ends with the child.
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The harness prints its own words before ours, on the same line at times.
                if let Some((_, said)) = line.split_once("KV ") {
                    let _ = sender.send(said.to_owned());
                }
            }
        });
        let first = lines.recv_timeout(PATIENCE).expect("the child starts");
        let words: Vec<&str> = first.split(' ').collect();
        let address = PeerAddress {
            node_id: name.to_owned(),
            epoch: Epoch(u128::from_str_radix(words[1], 16).unwrap()),
            control_endpoint: words[2].to_owned(),
        };
        let stdin = child.stdin.take().unwrap();
        Self { child, stdin, lines, address }
    }

    /// Lets it reserve this many blocks.
    pub fn receive(&mut self, transfer: TransferId, peer: &Node, block_count: u32) {
        let PeerAddress { node_id, epoch, control_endpoint } = &peer.address;
        writeln!(
            self.stdin,
            "receive {transfer} {node_id} {epoch} {control_endpoint} {block_count}"
        )
        .unwrap();
    }

    pub fn signal(&self, signal: &str) {
        let status =
            Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    pub fn line(&self) -> String {
        self.lines.recv_timeout(PATIENCE).expect("the child says something")
    }
}

impl Drop for ChildNode {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The child's main function, as [`ChildNode::start`] runs it; without its variable it has nothing to do.
#[test]
fn child_node() {
    let Ok(name) = env::var(PARENT) else { return };
    let node = start_large(&name);
    println!("KV node {} {}", node.address.epoch, node.address.control_endpoint);
    let (sender, commands) = unbounded();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    let start = Instant::now();
    // Never left behind, whatever becomes of the parent.
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
                Event::Arrived { transfer, .. } => println!("KV arrived {transfer}"),
                Event::ReceiveFailed { transfer, .. } => {
                    node.assert_free();
                    println!("KV failed {transfer}");
                }
                other => println!("KV unexpected {other:?}"),
            },
            default(Duration::from_secs(1)) => {}
        }
    }
}
