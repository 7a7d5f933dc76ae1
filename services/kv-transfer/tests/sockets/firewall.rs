//! A firewall that drops packets to a node's data port, in a network namespace.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use kv_transfer::api::{Event, TransferId};
use test_harness::{output_within, skip};

use crate::{
    node::{Node, blocks, fresh, run_transfer},
    stopped::{FAIL_WITHIN, until_failed},
};

/// Name of the helper that runs [`run_behind_firewall`].
pub(crate) const FIREWALL_HELPER: &str = "firewall";
/// Name of the helper that runs [`run_with_lost_connection`].
pub(crate) const LOST_CONNECTION_HELPER: &str = "lost_connection";

pub(crate) fn dropped_data_port_fails_only_its_pair_after_a_lease() {
    run_in_namespace(FIREWALL_HELPER);
}

/// The kernel has accepted all bytes, and `DONE` has arrived: only the kernel knows that the peer
/// lacks a chunk.
pub(crate) fn lost_connection_fails_a_transfer_after_done() {
    run_in_namespace(LOST_CONNECTION_HELPER);
}

fn run_in_namespace(helper: &str) {
    let can = "ip link set lo up && nft list ruleset";
    let probe = Command::new("unshare").args(["-n", "sh", "-c", can]).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        skip("network namespaces need root, unshare, ip and nft");
    }
    let inner = test_harness::helper(helper);
    let mut command = Command::new("unshare");
    let up = "ip link set lo up && exec \"$0\"";
    command.args(["-n", "sh", "-c", up]).arg(inner.get_program());
    command.envs(inner.get_envs().filter_map(|(key, value)| Some((key, value?))));
    let output = output_within(&mut command, Duration::from_secs(60));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn nft(rules: &str) {
    let status = Command::new("nft").arg(rules).status().unwrap();
    assert!(status.success(), "nft {rules}");
}

fn drop_packets_to_data_port(node: &Node) {
    let port = node.transfers.data_endpoint().rsplit(':').next().unwrap();
    nft("add table inet test");
    nft("add chain inet test input { type filter hook input priority 0; }");
    nft(&format!("add rule inet test input tcp dport {port} drop"));
}

/// Begins a transfer of one chunk that `prefill` has computed.
fn begin(prefill: &Node, decode: &Node) -> TransferId {
    let transfer = TransferId(fresh());
    prefill.expect(transfer, decode);
    decode.receive(transfer, prefill, 0, &blocks(0..8));
    let ready = prefill.event();
    assert!(matches!(ready, Event::Ready { .. }), "control messages pass: {ready:?}");
    prefill.written(transfer, 0, &blocks(0..8));
    transfer
}

pub(crate) fn run_with_lost_connection() {
    let [prefill, decode] = ["prefill", "decode"].map(Node::start);
    run_transfer(&prefill, &decode, &blocks(0..8), &blocks(100..108));
    drop_packets_to_data_port(&decode);
    let (begun, transfer) = (Instant::now(), begin(&prefill, &decode));
    prefill.finish(transfer);
    for event in [prefill.event(), decode.event()] {
        let (Event::SendFailed { failure, .. } | Event::ReceiveFailed { failure, .. }) = event
        else {
            panic!("{event:?}")
        };
        let (elapsed, reason) = (begun.elapsed(), failure.to_string());
        assert!(elapsed < FAIL_WITHIN, "{elapsed:?}: {reason}");
        assert!(reason.contains("data connection") && reason.contains("timed out"), "{reason}");
    }
    nft("flush ruleset");
    prefill.assert_free();
    decode.assert_free();
    run_transfer(&prefill, &decode, &blocks(0..8), &blocks(100..108));
}

pub(crate) fn run_behind_firewall() {
    let [prefill, decode, other] = ["prefill", "decode", "other"].map(Node::start);
    let endpoint = decode.transfers.data_endpoint().to_owned();
    drop_packets_to_data_port(&decode);
    let (begun, transfer) = (Instant::now(), begin(&prefill, &decode));
    let Event::SendFailed { transfer: failed, failure } = prefill.event() else {
        panic!("the transfer did not fail")
    };
    let (elapsed, reason) = (begun.elapsed(), failure.to_string());
    assert!(failed == transfer && elapsed < FAIL_WITHIN, "{elapsed:?}");
    assert!(reason.contains(&endpoint) && reason.contains("cannot connect"), "{reason}");
    assert!(!reason.contains('\n'), "{reason}");
    assert!(matches!(decode.event(), Event::ReceiveFailed { .. }));
    let (_, count) = until_failed(&prefill, &other, begin(&prefill, &decode));
    assert!(count >= 3, "{count} transfers of the other pair");
    assert!(matches!(decode.event(), Event::ReceiveFailed { .. }));
    nft("flush ruleset");
    prefill.assert_free();
    decode.assert_free();
    run_transfer(&prefill, &decode, &blocks(0..8), &blocks(100..108));
}
