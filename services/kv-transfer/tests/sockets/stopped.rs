//! Peers that stop or die in the middle of a transfer.

use std::time::{Duration, Instant};

use kv_transfer::api::{Event, TransferId};

use crate::{
    node::{Node, blocks, fresh},
    process::{ChildNode, start_large},
};

const BACK: Duration = Duration::from_millis(2500);

/// Starts a transfer of all blocks to the child, 64 MiB, and hands over the first few.
fn begin(prefill: &Node, child: &mut ChildNode) -> TransferId {
    let transfer = TransferId(fresh());
    prefill.expect_from(transfer, child.address.clone());
    child.receive(transfer, prefill, 256);
    assert!(matches!(prefill.event(), Event::Ready { .. }));
    prefill.written(transfer, 0, &blocks(0..4));
    transfer
}

/// How long small transfers between the two took, sorted.
fn times(prefill: &Node, decode: &Node, count: usize) -> Vec<Duration> {
    let mut times: Vec<Duration> = (0..count)
        .map(|_| {
            let transfer = TransferId(fresh());
            let start = Instant::now();
            prefill.expect(transfer, decode);
            decode.receive(transfer, prefill, 0, &blocks(0..4));
            assert!(matches!(prefill.event(), Event::Ready { .. }));
            prefill.written(transfer, 0, &blocks(0..4));
            prefill.finish(transfer);
            assert!(matches!(decode.event(), Event::Arrived { .. }));
            let time = start.elapsed();
            assert!(matches!(prefill.event(), Event::Delivered { .. }));
            time
        })
        .collect();
    times.sort();
    times
}

#[test]
fn a_stopped_peer_delays_no_other_pair_and_costs_a_lease() {
    let (prefill, decode) = (start_large("prefill"), start_large("decode"));
    let mut child = ChildNode::start("stopped");
    let warm = times(&prefill, &decode, 20);
    let transfer = begin(&prefill, &mut child);
    child.signal("-STOP");
    let stopped = Instant::now();
    // More than the buffers of both sides hold: the writer of that pair is stuck.
    prefill.written(transfer, 4, &blocks(4..256));
    let during = times(&prefill, &decode, 100);
    // Or an end of the stuck transfer could have been taken for one of these.
    assert!(stopped.elapsed() < Duration::from_millis(1500), "{:?}", stopped.elapsed());
    let (before, p99) = (warm[warm.len() / 2], during[98]);
    println!("4 blocks of 256 KiB: p50 {before:?} before, p99 {p99:?} beside a stopped peer");
    // A pair that waited for the stuck one would wait for its lease.
    assert!(p99 < Duration::from_millis(400) + before, "p50 {before:?} before, p99 {p99:?} now");
    let Event::SendFailed { transfer: failed, .. } = prefill.event() else { panic!("it fails") };
    assert_eq!(failed, transfer);
    assert!(stopped.elapsed() < BACK, "{:?}", stopped.elapsed());
    prefill.assert_free();
    // The child finds its way when it wakes.
    child.signal("-CONT");
    assert_eq!(child.line(), format!("failed {transfer}"));
    // Until it has noticed that the pair is lost an attempt may still fail, at once; a later one
    // does not.
    let woken = Instant::now();
    let arrived = (0..5).any(|_| {
        let again = TransferId(fresh());
        prefill.expect_from(again, child.address.clone());
        child.receive(again, &prefill, 8);
        if matches!(prefill.event(), Event::Ready { .. }) {
            prefill.written(again, 0, &blocks(0..8));
            prefill.finish(again);
            prefill.event();
        }
        child.line() == format!("arrived {again}")
    });
    assert!(arrived);
    assert!(woken.elapsed() < Duration::from_secs(1), "{:?}", woken.elapsed());
}

#[test]
fn a_killed_peer_is_noticed_at_once() {
    let prefill = start_large("prefill");
    let mut child = ChildNode::start("killed");
    let transfer = begin(&prefill, &mut child);
    child.signal("-KILL");
    let killed = Instant::now();
    let Event::SendFailed { transfer: failed, .. } = prefill.event() else { panic!("it fails") };
    assert_eq!(failed, transfer);
    assert!(killed.elapsed() < Duration::from_millis(500), "{:?}", killed.elapsed());
    prefill.assert_free();
}
