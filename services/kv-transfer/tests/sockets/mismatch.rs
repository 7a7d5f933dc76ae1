//! Nodes with different identities: each rejects the other in the handshake, names both values in
//! one line, and still serves matching nodes.

use kernels::{KvFormat, KvLayout};
use kv_transfer::api::{Event, Identity, TransferFailure, TransferId};

use crate::node::{Node, SECRET, blocks, fresh, identity, layout, run_transfer};

/// Returns identities that differ, and the texts that both errors must contain.
fn misfits() -> Vec<(Identity, KvLayout, Vec<String>)> {
    let ours = identity();
    let bf16 = KvLayout { format: KvFormat::Bf16, ..layout() };
    let deeper = KvLayout { layer_count: 5, ..layout() };
    vec![
        (
            Identity { model_fingerprint: 0xbeef, ..ours.clone() },
            layout(),
            vec!["model_fingerprint".to_owned()],
        ),
        (
            Identity { dtype: "bf16".to_owned(), kv_layout: bf16.to_string(), ..ours.clone() },
            bf16,
            vec!["dtype".to_owned(), "\"f32\"".to_owned(), "\"bf16\"".to_owned()],
        ),
        (
            Identity { kv_layout: deeper.to_string(), ..ours.clone() },
            deeper,
            vec![format!("{:?}", layout().to_string()), format!("{:?}", deeper.to_string())],
        ),
        (
            Identity { block_size: 32, ..ours.clone() },
            layout(),
            vec!["block_size".to_owned(), "16".to_owned(), "32".to_owned()],
        ),
        (
            Identity { weight_version: 8, ..ours.clone() },
            layout(),
            vec!["weight_version".to_owned(), "1 against 8".to_owned()],
        ),
    ]
}

fn refusal(event: Event, transfer: TransferId) -> String {
    match event {
        Event::ReceiveFailed { transfer: id, failure: TransferFailure::Refused { reason, .. } }
        | Event::SendFailed { transfer: id, failure: TransferFailure::Refused { reason, .. } } => {
            assert_eq!(id, transfer);
            reason
        }
        other => panic!("{other:?}"),
    }
}

pub(crate) fn mismatched_nodes_reject_each_other_and_still_serve_matching_nodes() {
    let (prefill, decode) = (Node::start("prefill"), Node::start("decode"));
    for (theirs, layout, words) in misfits() {
        let fingerprints = [identity().model_fingerprint, theirs.model_fingerprint]
            .map(|fingerprint| format!("{fingerprint:032x}"));
        for odd_receives in [true, false] {
            let odd = Node::start_in("odd", SECRET, theirs.clone(), layout);
            let (sender, receiver) = if odd_receives { (&prefill, &odd) } else { (&odd, &decode) };
            let ours = if odd_receives { &prefill } else { &decode };
            let transfer = TransferId(fresh());
            receiver.receive(transfer, sender, 0, &blocks(0..8));
            sender.expect(transfer, receiver);
            let lines = [refusal(ours.event(), transfer), refusal(odd.event(), transfer)];
            for line in &lines {
                assert_eq!(line.lines().count(), 1, "{line}");
                for fingerprint in &fingerprints {
                    assert!(line.contains(fingerprint), "{line} lacks {fingerprint}");
                }
            }
            // Local value first.
            for word in &words {
                assert!(lines[0].contains(word), "{} lacks {word}", lines[0]);
            }
            for word in words.iter().filter(|word| !word.contains("against")) {
                assert!(lines[1].contains(word), "{} lacks {word}", lines[1]);
            }
            // Matching nodes are not affected.
            run_transfer(&prefill, &decode, &blocks(10..30), &blocks(40..60));
            odd.assert_free();
            odd.transfers.shutdown().unwrap();
        }
    }
    for node in [prefill, decode] {
        node.assert_free();
        node.transfers.shutdown().unwrap();
    }
}
