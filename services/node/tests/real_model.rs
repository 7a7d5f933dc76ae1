//! SmolLM2 in f32 generates the golden tokens, whichever node prefills.

mod common;

use std::path::Path;

use common::*;
use node::Role;
use proto::v1;

struct GoldenRun {
    name: String,
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
}

fn golden() -> Vec<GoldenRun> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../integration-tests/golden/smollm2_greedy.json");
    let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    golden["runs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|run| GoldenRun {
            name: run["name"].as_str().unwrap().to_owned(),
            prompt_ids: ids(&run["prompt_ids"]),
            output_ids: ids(&run["output_ids"]),
        })
        .collect()
}

#[tokio::test]
async fn golden_tokens_match_with_and_without_hand_over() {
    let settings =
        settings(&smollm2(), "auto", &[("node.threads", "2"), ("node.kv_memory", "256MiB")]);
    let p = TestNode::start(Role::Prefill, settings.clone()).await;
    let d = TestNode::start(Role::Decode, settings).await;
    for run in golden() {
        let count = run.output_ids.len() as u32;
        let alone = v1::Attempt { cache_salt: "alone".into(), ..attempt(&run.prompt_ids, count) };
        assert_eq!(d.side().local_prefill(&alone).await.ids, run.output_ids, "{}", run.name);
        let handed = attempt(&run.prompt_ids, count);
        let (_, decoded) = hand_over(&p.side(), &d.side(), &handed).await;
        assert_eq!(decoded.ids, run.output_ids, "{} handed over", run.name);
        assert_eq!(
            decoded.finished.unwrap().received_bytes > 0,
            !decoded.reserved.unwrap().local_prefill
        );
    }
    tokio::join!(p.stop(), d.stop());
}
