//! Peers that are stopped or killed during a transfer.

use std::time::{Duration, Instant};

use kv_transfer::api::{Event, TransferId};

use crate::{
    node::{Node, blocks, fresh},
    process::{ChildNode, start_large},
};

/// Maximum time until a transfer to an unreachable peer fails: a lease of 2 s, and slack for a busy
/// machine. Less than the deadline of the transfers.
pub(crate) const FAIL_WITHIN: Duration = Duration::from_secs(7);

/// Starts a transfer of 64 MiB to the child and writes the first blocks.
fn begin(prefill: &Node, child: &mut ChildNode) -> TransferId {
    let transfer = TransferId(fresh());
    prefill.expect_from(transfer, child.address.clone());
    child.receive(transfer, prefill, 256);
    assert!(matches!(prefill.event(), Event::Ready { .. }));
    prefill.written(transfer, 0, &blocks(0..4));
    transfer
}

/// Runs transfers of 4 blocks from `prefill` to `decode` until the transfer `stuck` fails. Returns
/// the time of the failure and the number of completed transfers.
pub(crate) fn until_failed(prefill: &Node, decode: &Node, stuck: TransferId) -> (Instant, usize) {
    let (mut failed_at, mut count) = (None, 0);
    let next = |failed_at: &mut Option<Instant>| loop {
        match prefill.event() {
            Event::SendFailed { transfer, .. } if transfer == stuck => {
                *failed_at = Some(Instant::now());
            }
            other => return other,
        }
    };
    loop {
        let transfer = TransferId(fresh());
        prefill.expect(transfer, decode);
        decode.receive(transfer, prefill, 0, &blocks(0..4));
        assert!(matches!(next(&mut failed_at), Event::Ready { .. }));
        prefill.written(transfer, 0, &blocks(0..4));
        prefill.finish(transfer);
        assert!(matches!(decode.event(), Event::Arrived { .. }));
        assert!(matches!(next(&mut failed_at), Event::Delivered { .. }));
        match failed_at {
            Some(at) => return (at, count),
            None => count += 1,
        }
    }
}

pub(crate) fn stopped_peer_delays_no_other_pair_and_times_out_after_a_lease() {
    let (prefill, decode) = (start_large("prefill"), start_large("decode"));
    let mut child = ChildNode::start("stopped");
    let transfer = begin(&prefill, &mut child);
    child.signal("-STOP");
    let stopped = Instant::now();
    // More than the socket buffers hold, so the writer of that pair blocks.
    prefill.written(transfer, 4, &blocks(4..256));
    let (failed_at, count) = until_failed(&prefill, &decode, transfer);
    println!("{count} transfers of 4 blocks of 256 KiB beside a stopped peer");
    // A pair that waits for the stuck pair completes no transfer in this time.
    assert!(count >= 3, "{count}");
    let elapsed = failed_at - stopped;
    assert!(elapsed < FAIL_WITHIN, "{elapsed:?}");
    prefill.assert_free();
    // The child recovers after it continues.
    child.signal("-CONT");
    assert_eq!(child.line(), format!("failed {transfer}"));
    // Until the child has detected that the pair failed, an attempt may fail at once. A later
    // attempt succeeds.
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
}

pub(crate) fn killed_peer_is_detected_at_once() {
    let prefill = start_large("prefill");
    let mut child = ChildNode::start("killed");
    let transfer = begin(&prefill, &mut child);
    child.signal("-KILL");
    let Event::SendFailed { transfer: failed, failure } = prefill.event() else {
        panic!("the transfer did not fail")
    };
    assert_eq!(failed, transfer);
    // The closed connection ends the transfer, not an expired lease.
    assert!(failure.to_string().contains("connection"), "{failure}");
    prefill.assert_free();
}
