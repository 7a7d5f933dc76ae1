//! Transfers between nodes with certificates.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use credentials::{ClusterTls, Reload, ReloadOutcome, Reloaded};
use kernels::KvArena;
use kv_transfer::{
    TransferConfig, TransportConfig,
    api::{Event, TransferId},
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tempfile::TempDir;

use crate::node::{
    BLOCK_COUNT, Node, Reach, SECRET, blocks, config, elsewhere, fresh, identity, layout,
    run_transfer,
};

const NAME: &str = "baton";

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Authority {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// A certificate of one node, in files.
struct Certificate {
    folder: TempDir,
    tls: Arc<Reloaded<ClusterTls>>,
}

impl Certificate {
    fn of(authority: &Authority) -> Self {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), authority);
        let [cert, key, ca] = files(folder.path());
        let tls = Arc::new(ClusterTls::read(&cert, &key, &ca, NAME).unwrap());
        Self { folder, tls }
    }

    fn renew(&self, authority: &Authority) {
        write(self.folder.path(), authority);
        assert_eq!(self.tls.reload(), ReloadOutcome::Replaced);
    }

    fn node(&self, name: &str) -> Node {
        let config =
            TransferConfig { tls: Some(self.tls.clone()), ..config(name, SECRET, identity()) };
        Node::start_of(config, KvArena::host(layout(), BLOCK_COUNT).unwrap())
    }
}

fn files(folder: &Path) -> [PathBuf; 3] {
    ["tls.crt", "tls.key", "ca.crt"].map(|name| folder.join(name))
}

fn write(folder: &Path, authority: &Authority) {
    let key = KeyPair::generate().unwrap();
    let cert = CertificateParams::new([NAME.to_owned()]).unwrap().signed_by(&key, authority);
    let contents = [cert.unwrap().pem(), key.serialize_pem(), authority.pem()];
    for (file, content) in files(folder).iter().zip(contents) {
        fs::write(file, content).unwrap();
    }
}

/// Asserts that a transfer fails, and that the sender was rejected for this reason.
fn assert_rejected(prefill: &Node, decode: &Node, reason: &str) {
    let transfer = TransferId(fresh());
    prefill.expect(transfer, decode);
    decode.receive(transfer, prefill, 0, &blocks(0..4));
    loop {
        match prefill.event() {
            Event::Ready { .. } => prefill.written(transfer, 0, &blocks(0..4)),
            Event::SendFailed { failure, .. } => {
                assert!(failure.to_string().contains(reason), "{failure} lacks {reason}");
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(decode.event(), Event::ReceiveFailed { .. }));
    assert!(decode.transfers.metrics().data_refused["handshake_tls"] > 0);
    decode.assert_free();
}

pub(crate) fn tcp_speaks_tls_and_preserves_contiguous_and_scattered_blocks() {
    let authority = authority();
    let (prefill, decode) =
        (Certificate::of(&authority).node("prefill"), Certificate::of(&authority).node("decode"));
    let reversed: Vec<_> = blocks(0..128).into_iter().rev().collect();
    for (from, to) in [(blocks(0..128), blocks(0..128)), (blocks(64..192), reversed)] {
        run_transfer(&prefill, &decode, &from, &to);
        run_transfer(&decode, &prefill, &from, &to);
    }
    // The end of a sender is detected at once.
    let transfer = TransferId(fresh());
    prefill.expect(transfer, &decode);
    decode.receive(transfer, &prefill, 0, &blocks(0..4));
    assert!(matches!(prefill.event(), Event::Ready { .. }));
    prefill.transfers.shutdown().unwrap();
    assert!(matches!(decode.event(), Event::ReceiveFailed { .. }));
    decode.assert_free();
}

/// NCCL does not encrypt.
pub(crate) fn auto_uses_tcp_between_hosts_with_certificates_and_rdma_adapters() {
    let authority = authority();
    let on = |host: &str| {
        let config = TransferConfig {
            tls: Some(Certificate::of(&authority).tls),
            transport: TransportConfig { has_rdma: true, ..TransportConfig::default() },
            host: Some(host.to_owned()),
            ..config("a node", SECRET, identity())
        };
        Node::start_of(config, elsewhere(Some(Reach::default())))
    };
    let (prefill, decode) = (on("here"), on("there"));
    run_transfer(&prefill, &decode, &blocks(0..20), &blocks(100..120));
    for node in [&prefill, &decode] {
        let metrics = node.transfers.metrics();
        assert_eq!((metrics.peers[0].path.as_str(), metrics.fallbacks.len()), ("tcp", 0));
    }
}

pub(crate) fn only_nodes_with_certificates_of_one_cluster_exchange_kv() {
    let (ours, theirs) = (authority(), authority());
    let (member, other) = (Certificate::of(&ours), Certificate::of(&ours));
    let (decode, prefill) = (member.node("decode"), other.node("prefill"));
    assert_rejected(&Certificate::of(&theirs).node("stranger"), &decode, "TLS");
    assert_rejected(&Node::start("plain"), &decode, "handshake");
    assert_rejected(&prefill, &Node::start("plain"), "handshake");
    run_transfer(&prefill, &decode, &blocks(0..16), &blocks(0..16));

    // A renewed certificate of another authority is used without a restart.
    member.renew(&theirs);
    assert_rejected(&other.node("old"), &decode, "TLS");
    let renewed = Certificate::of(&theirs).node("renewed");
    run_transfer(&renewed, &decode, &blocks(0..16), &blocks(0..16));
}
