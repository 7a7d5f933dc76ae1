//! A node in a helper process that tests stop and kill.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use config::Flags;
use node::Role;
use proto::{ids::Epoch, v1};
use test_harness::KilledOnDrop;

use super::{Side, TIMEOUT, TestNode, connect, tagged};

/// Name of the helper that runs [`run_node`].
pub(crate) const NODE_HELPER: &str = "node";
/// Environment variable with the folder through which the test and the helper exchange files.
const FOLDER_VARIABLE: &str = "BATON_TEST_FOLDER";
const SETTINGS: &str = "settings";
const READY: &str = "ready";

/// Helper process of a node. Drop kills the process.
pub(crate) struct NodeProcess {
    child: KilledOnDrop,
    pub side: Side,
    _folder: tempfile::TempDir,
}

impl NodeProcess {
    pub(crate) async fn start(role: Role, flags: &Flags) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut settings = format!("{role}\n");
        for (key, value) in flags {
            settings.push_str(&format!("{key}={value}\n"));
        }
        fs::write(folder.path().join(SETTINGS), settings).unwrap();
        let child = test_harness::helper(NODE_HELPER)
            .env(FOLDER_VARIABLE, folder.path())
            .stdout(Stdio::null())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let child = KilledOnDrop(child);
        let side = wait_ready(folder.path()).await;
        Self { child, side, _folder: folder }
    }

    /// Sends SIGKILL and waits until the process has exited.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGSTOP: all threads stop, and the sockets stay open.
    pub(crate) fn freeze(&self) {
        self.signal("-STOP");
    }

    pub(crate) fn thaw(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.child.id().to_string()]).status();
        assert!(status.unwrap().success());
    }
}

async fn wait_ready(folder: &Path) -> Side {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Ok(text) = fs::read_to_string(folder.join(READY)) {
            let mut lines = text.lines();
            let mut line = || lines.next().unwrap().to_owned();
            let (grpc, node_id, epoch, control_endpoint) = (line(), line(), line(), line());
            let epoch = Epoch::parse(&epoch).unwrap();
            let client = connect(&grpc, epoch).await;
            let epoch = epoch.to_bytes().to_vec().into();
            let peer = tagged(v1::Peer { node_id, epoch, control_endpoint, ..v1::Peer::default() });
            return Side { peer, client };
        }
        assert!(Instant::now() < deadline, "the node process was not ready in time");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Main function of the helper process: serves until the process is killed.
pub(crate) fn run_node() {
    test_harness::block_on(serve());
}

async fn serve() {
    let folder = std::env::var_os(FOLDER_VARIABLE).unwrap();
    let folder = Path::new(&folder);
    let settings = fs::read_to_string(folder.join(SETTINGS)).unwrap();
    let mut lines = settings.lines();
    let role = match lines.next() {
        Some("prefill") => Role::Prefill,
        _ => Role::Decode,
    };
    let flags: Flags = lines
        .map(|line| line.split_once('=').unwrap())
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect();
    let node = TestNode::start(role, flags).await;
    let (record, addresses) = (node.node.record(), node.node.addresses());
    let ready = format!(
        "{}\n{}\n{}\n{}\n",
        addresses.grpc, record.node_id, record.epoch, record.control_endpoint
    );
    fs::write(folder.join("unfinished"), ready).unwrap();
    fs::rename(folder.join("unfinished"), folder.join(READY)).unwrap();
    // Bounds the life of a process that its test does not kill.
    tokio::time::sleep(2 * TIMEOUT).await;
}
