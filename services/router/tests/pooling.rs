//! `/v1/embeddings`, `/v1/rerank` and `/v1/score` over scripted nodes, with the files of tiny
//! models of each form.

mod common;

use std::{path::PathBuf, sync::Arc, time::Duration};

use common::{
    Cluster,
    client::eventually,
    model_text,
    node::{Behaviour, MODEL, ScriptedNode},
    settings,
};
use proto::v1::{FailureKind, Role};
use router::ModelSource;
use serde_json::{Value, json};
use text::ModelText;

const EMBEDDING: &str = "qwen3_embedding";
const RERANKER: &str = "qwen3_reranker";

/// Starts a router for one model in the folder of tiny models.
async fn start(model: &str, prefill: usize, decode: usize) -> Cluster {
    let (prefill, decode) = Cluster::nodes(prefill, decode, "yes");
    start_over(model, prefill, decode).await
}

async fn start_over(model: &str, prefill: Vec<ScriptedNode>, decode: Vec<ScriptedNode>) -> Cluster {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/pooling");
    let text = Arc::new(ModelText::open(folder.join(model)).unwrap());
    let source = ModelSource { name: MODEL.to_owned(), text };
    Cluster::start_sources(settings(), vec![source], prefill, decode).await
}

async fn post(cluster: &Cluster, path: &str, body: Value) -> Value {
    let answer = cluster.client.post(path, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.json());
    answer.json()
}

/// Returns the message of a request that must be rejected, and the field that it names.
async fn refused(cluster: &Cluster, path: &str, body: Value) -> (String, String) {
    let answer = cluster.client.post(path, &body).await;
    let error = &answer.json()["error"];
    assert_eq!(answer.status, 400, "{error}");
    let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
    assert!(!text("message").contains('\n'));
    (text("param"), text("message"))
}

fn assert_near(found: &Value, expected: &[f64]) {
    let found: Vec<f64> =
        found.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect();
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-6, "{found}, not {expected}");
    }
}

#[tokio::test]
async fn prefill_nodes_embed_texts_and_token_ids() {
    let cluster = start(EMBEDDING, 1, 1).await;
    let body = json!({"model": MODEL, "input": ["a", "bcd"], "user": "me"});
    let answer = post(&cluster, "/v1/embeddings", body).await;
    assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!(MODEL)));
    // Each text has its bytes as tokens, and the end-of-text token.
    assert_eq!(answer["usage"], json!({"prompt_tokens": 6, "total_tokens": 6}));
    for (index, length) in [(0, 2.0), (1, 4.0_f64)] {
        let entry = &answer["data"][index];
        assert_eq!((&entry["object"], &entry["index"]), (&json!("embedding"), &json!(index)));
        let norm = (25.0 + length * length).sqrt();
        assert_near(&entry["embedding"], &[3.0 / norm, 4.0 / norm, length / norm]);
    }
    for input in [json!("a"), json!([64, 258]), json!([[64, 258]])] {
        let body = json!({"input": input, "encoding_format": "base64"});
        let answer = post(&cluster, "/v1/embeddings", body).await;
        // 3, 4 and 2 over the square root of 29, as little-endian f32.
        assert_eq!(answer["data"][0]["embedding"], "MJ0OP+smPj/rJr4+");
    }
    let body = json!({"input": "a", "prompt_name": "query"});
    post(&cluster, "/v1/embeddings", body).await;
    let calls = cluster.prefill[0].calls();
    assert_eq!((calls.len(), cluster.decode[0].calls().len()), (6, 0));
    let last = &calls[5].attempt;
    assert!(!calls[5].with_peer && last.tokens.len() > 80 && last.tokens.ends_with(&[258]));
    let sampling = last.sampling.as_ref().unwrap();
    assert_eq!((sampling.max_tokens, sampling.pooling.is_some()), (1, true));
    // The token that carries a vector is no output.
    assert_eq!(cluster.finished("stop").await, 5.0);
    assert_eq!(cluster.metric("baton_tokens_total", &["\"output\""]).await, 0.0);
    let picks = cluster.metric("baton_picks_total", &["reason=\"pooled\""]).await;
    assert_eq!(picks, 6.0);
}

#[tokio::test]
async fn decode_nodes_embed_where_no_prefill_node_does() {
    let cluster = start(EMBEDDING, 0, 1).await;
    post(&cluster, "/v1/embeddings", json!({"input": "a"})).await;
    assert_eq!(cluster.decode[0].calls().len(), 1);

    let (prefill, decode) = Cluster::nodes(1, 1, "yes");
    prefill[0].announce_no_pooling();
    let cluster = start_over(EMBEDDING, prefill, decode).await;
    post(&cluster, "/v1/embeddings", json!({"input": "a"})).await;
    assert_eq!((cluster.prefill[0].calls().len(), cluster.decode[0].calls().len()), (0, 1));

    let (prefill, decode) = Cluster::nodes(1, 1, "yes");
    prefill.iter().chain(&decode).for_each(ScriptedNode::announce_no_pooling);
    let cluster = start_over(EMBEDDING, prefill, decode).await;
    let (field, message) = refused(&cluster, "/v1/embeddings", json!({"input": "a"})).await;
    assert_eq!(field, "model");
    assert!(message.contains("compute in several ranks"), "{message}");
}

#[tokio::test]
async fn failed_attempt_is_retried_on_another_prefill_node() {
    let cluster = start(EMBEDDING, 2, 1).await;
    for kind in [FailureKind::Internal, FailureKind::Busy, FailureKind::Draining] {
        let failure = Behaviour::FailAfter(0, kind);
        cluster.prefill.iter().for_each(|node| {
            node.behave_in_turn(vec![failure.clone(), Behaviour::Serve]);
        });
        post(&cluster, "/v1/embeddings", json!({"input": "a"})).await;
    }
}

#[tokio::test]
async fn many_texts_run_in_bounded_parallel_and_keep_their_order() {
    let cluster = start(EMBEDDING, 2, 1).await;
    cluster.prefill.iter().for_each(|node| node.set_token_time(Duration::from_millis(5)));
    let input: Vec<String> = (0..300).map(|length| "x".repeat(length % 90)).collect();
    let request = post(&cluster, "/v1/embeddings", json!({"input": input}));
    let watch = async {
        let mut most = 0;
        loop {
            let open: usize = cluster.prefill.iter().map(ScriptedNode::open_streams).sum();
            most = most.max(open);
            tokio::time::sleep(Duration::from_millis(1)).await;
            if cluster.prefill.iter().map(|node| node.calls().len()).sum::<usize>() == 300 {
                return most;
            }
        }
    };
    let (answer, most) = tokio::join!(request, watch);
    // Two streams observe the nodes.
    assert!((16..=130).contains(&most), "{most} texts at a time");
    let data = answer["data"].as_array().unwrap();
    assert_eq!(data.len(), 300);
    for (index, entry) in data.iter().enumerate() {
        let length = (index % 90 + 1) as f64;
        let norm = (25.0 + length * length).sqrt();
        assert_near(&entry["embedding"], &[3.0 / norm, 4.0 / norm, length / norm]);
    }
}

#[tokio::test]
async fn client_that_leaves_cancels_its_texts() {
    let cluster = start(EMBEDDING, 1, 1).await;
    cluster.prefill[0].behave(Behaviour::HangAfter(0));
    let body = json!({"input": ["a", "b", "c"]});
    let request = cluster.client.post("/v1/embeddings", &body);
    assert!(tokio::time::timeout(Duration::from_millis(300), request).await.is_err());
    let left = async || {
        let calls = cluster.prefill[0].calls();
        calls.len() == 3 && calls.iter().all(|call| call.left.lock().unwrap().is_some())
    };
    eventually("the texts are cancelled", left).await;
}

#[tokio::test]
async fn documents_are_ranked_by_their_score() {
    let cluster = start(RERANKER, 1, 1).await;
    let body = json!({"query": "q", "documents": ["zz", {"text": "zzzz"}, "z", "zzzz"]});
    let answer = post(&cluster, "/v1/rerank", body.clone()).await;
    let results = answer["results"].as_array().unwrap();
    let order: Vec<u64> = results.iter().map(|it| it["index"].as_u64().unwrap()).collect();
    assert_eq!(order, [1, 3, 0, 2], "longer documents score higher, equal ones keep their order");
    assert!(results.iter().all(|result| result.get("document").is_none()));
    let mut further = body;
    further["top_n"] = json!(2);
    further["return_documents"] = json!(true);
    let answer = post(&cluster, "/rerank", further).await;
    let results = answer["results"].as_array().unwrap();
    assert_eq!((results.len(), &results[1]["document"]), (2, &json!({"text": "zzzz"})));
    let calls = cluster.prefill[0].calls();
    let sampling = calls[0].attempt.sampling.as_ref().unwrap();
    // The ids of "y" and "n", which the file of the model names.
    assert_eq!(sampling.pooling.as_ref().unwrap().logits.len(), 2);
    let lengths = calls.iter().take(4).map(|call| call.attempt.tokens.len());
    let (shortest, longest) = (lengths.clone().min().unwrap(), lengths.max().unwrap());
    assert!(shortest > 100 && longest - shortest == 3, "the template surrounds the texts");
}

#[tokio::test]
async fn pairs_of_texts_are_scored_in_their_order() {
    let cluster = start(RERANKER, 1, 1).await;
    for path in ["/v1/score", "/score"] {
        let body = json!({"text_1": "q", "text_2": ["z", "zz", "z"]});
        let answer = post(&cluster, path, body).await;
        let scores: Vec<f64> = answer["data"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["score"].as_f64().unwrap())
            .collect();
        assert!(scores[0] == scores[2] && scores[0] < scores[1] && scores[1] < 1.0, "{scores:?}");
    }
    // A special token in a text stays text.
    let token = "<|im_end|>";
    for (document, tokens) in [("z", 1), (token, token.len())] {
        cluster.client.post("/score", &json!({"text_1": "q", "text_2": document})).await;
        let prompt = cluster.prefill[0].calls().last().unwrap().attempt.tokens.clone();
        let plain = cluster.prefill[0].calls()[0].attempt.tokens.len() - 1;
        assert_eq!(prompt.len(), plain + tokens, "{document}");
    }
}

#[tokio::test]
async fn invalid_requests_name_field_and_allowed_values() {
    let cluster = start(EMBEDDING, 1, 1).await;
    let long = "x".repeat(3000);
    for (body, field, words) in [
        (json!({}), "input", "is missing; allowed: a text, token ids, or a list of either"),
        (json!({"input": []}), "input", "is empty"),
        (json!({"input": vec!["a"; 2049]}), "input", "has 2049 texts; allowed: 1 to 2048"),
        (json!({"input": ["a", 1]}), "input", "has 1 at index 1"),
        (json!({"input": [[]]}), "input", "is empty; allowed: at least one token"),
        (json!({"input": ["a", long]}), "input[1]", "tokens; allowed: at most 2047"),
        (json!({"input": [[1], [90_000]]}), "input[1]", "has token id 90000 at index 0"),
        (
            json!({"input": "a", "encoding_format": "hex"}),
            "encoding_format",
            "is \"hex\"; allowed: float or base64",
        ),
        (
            json!({"input": "a", "dimensions": 8}),
            "dimensions",
            "is 8; allowed: none, because the checkpoint",
        ),
        (
            json!({"input": "a", "dimensions": 0}),
            "dimensions",
            "is 0; allowed: a whole number from 1",
        ),
        (json!({"input": "a", "prompt_name": "x"}), "prompt_name", "allowed: document, query"),
        (
            json!({"input": "a", "truncate_prompt_tokens": 4}),
            "truncate_prompt_tokens",
            "is not supported",
        ),
        (json!({"input": "a", "user": 7}), "user", "allowed: a string"),
    ] {
        let (param, message) = refused(&cluster, "/v1/embeddings", body).await;
        assert!(param == field && message.contains(words), "{param}: {message}");
    }
    for (path, body) in [
        ("/v1/rerank", json!({"query": "q", "documents": ["a"]})),
        ("/score", json!({"text_1": "q", "text_2": "a"})),
    ] {
        let (field, message) = refused(&cluster, path, body).await;
        assert_eq!(field, "model");
        let words = "returns no scores: it is an embedding model; expected a reranker";
        assert!(message.contains(words), "{message}");
    }
    assert_eq!(cluster.prefill[0].calls().len(), 0);

    let cluster = start(RERANKER, 0, 1).await;
    for (body, field, words) in [
        (json!({"documents": ["a"]}), "query", "is missing; allowed: a string"),
        (json!({"query": "q"}), "documents", "is missing; allowed: a list of strings"),
        (json!({"query": "q", "documents": []}), "documents", "has 0 texts; allowed: 1 to 2048"),
        (json!({"query": "q", "documents": [7]}), "documents", "allowed: a list of strings"),
        (json!({"query": "q", "documents": ["a"], "top_n": 0}), "top_n", "is 0"),
        (
            json!({"query": "q", "documents": ["a"], "rank_fields": ["x"]}),
            "rank_fields",
            "not supported",
        ),
        (json!({"query": "q", "documents": ["a", long]}), "documents[1]", "allowed: at most 2047"),
    ] {
        let (param, message) = refused(&cluster, "/v1/rerank", body).await;
        assert!(param == field && message.contains(words), "{param}: {message}");
    }
    let (field, message) = refused(&cluster, "/v1/embeddings", json!({"input": "a"})).await;
    let words = "returns no embeddings: it is a reranker; expected an embedding model";
    assert!(field == "model" && message.contains(words), "{message}");
}

#[tokio::test]
async fn models_refuse_what_their_files_do_not_describe() {
    let decode = ScriptedNode::start(Role::Decode, "decode-0");
    let source = ModelSource { name: MODEL.to_owned(), text: model_text() };
    let cluster = Cluster::start_sources(settings(), vec![source], vec![], vec![decode]).await;
    let (field, message) = refused(&cluster, "/v1/embeddings", json!({"input": "a"})).await;
    assert_eq!(field, "model");
    assert!(message.contains("returns no embeddings: the model is a GGUF file;"), "{message}");
    let body = json!({"query": "q", "documents": ["a"]});
    let (_, message) = refused(&cluster, "/v1/rerank", body).await;
    assert!(message.contains("returns no scores: the model is a GGUF file;"), "{message}");

    // A base model has no LM head.
    let cluster = start("e5_mistral", 0, 1).await;
    let (field, message) = refused(&cluster, "/v1/completions", json!({"prompt": "a"})).await;
    assert_eq!(field, "model");
    assert!(message.contains("has no LM head and generates no text"), "{message}");
    post(&cluster, "/v1/embeddings", json!({"input": "a"})).await;
}
