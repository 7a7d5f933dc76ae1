//! The hash of the plan before the first byte, and the digests after the last.

use super::*;

#[tokio::test]
async fn plan_of_other_chunks_is_rejected_before_the_first_request() {
    for is_nccl in [false, true] {
        let mut declaration = match is_nccl {
            true => broadcast(2, 100),
            false => declaration(100, 2),
        };
        declaration["plan"] = json!(plan_hash(200));
        let (shared, result) = match is_nccl {
            true => run_broadcast(declaration, Shared::default()).await,
            false => {
                let outcome = run(declaration, 0, End::Closes, true).await;
                assert!(!outcome.released, "the node keeps its weights");
                (outcome.shared, outcome.result)
            }
        };
        let error = result.unwrap_err().to_string();
        assert!(error.contains("trainer and node cut the tensors differently"), "{error}");
        assert!(error.contains(&plan_hash(200)) && error.contains(&plan_hash(100)), "{error}");
        let received = shared.received.lock().unwrap();
        assert!(received.is_empty(), "the node has begun to receive");
    }
}

#[tokio::test]
async fn byte_that_differs_from_the_trainers_aborts_the_update() {
    // The first bytes of 3 of 40 chunks.
    for (chunk, tensor) in [(0, "t0"), (14, "t2"), (39, "t3")] {
        let outcome = run(declaration(100, 2), chunk, End::Corrupts, false).await;
        let shared = Shared { damaged_at: Some(chunk), ..Shared::default() };
        let (_, broadcast) = run_broadcast(broadcast(2, CHUNK_BYTES), shared).await;
        for result in [outcome.result, broadcast] {
            let error = result.unwrap_err().to_string();
            let expected = format!("tensor {tensor:?} arrived with digest ");
            assert!(error.contains(&expected), "{error:?} lacks {expected:?}");
            let index = tensor[1..].parse::<usize>().unwrap();
            let digest = digest_of(&weights()[index]);
            let expected = format!("expected {digest:016x}, the trainer's digest");
            assert!(error.ends_with(&expected), "{error:?} lacks {expected:?}");
        }
    }
}
