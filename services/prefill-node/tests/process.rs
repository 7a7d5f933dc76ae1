//! The prefill node's binary: it becomes ready under its own role and shuts down in order.

use std::{
    fs,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use proto::{
    auth::{CallSigner, ClusterSecret},
    ids::Epoch,
    v1::{self, node_client::NodeClient, observe_event::Event},
};
use test_harness::KilledOnDrop;

const TIMEOUT: Duration = Duration::from_secs(30);
const SECRET: &str = "0123456789abcdef0123456789abcdef";

fn wait_until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "nothing came in time");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[tokio::test]
async fn prefill_node_reports_its_role_and_shuts_down_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu",
        "max_position_embeddings": 256, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "vocab_size": 96, "tie_word_embeddings": false, "torch_dtype": "float32"
    }"#;
    fs::write(folder.path().join("config.json"), config).unwrap();
    let ready_file = folder.path().join("ready.json");
    let child = Command::new(env!("CARGO_BIN_EXE_baton-prefill-node"))
        .arg("--ready-file")
        .arg(&ready_file)
        .args(["--model-name", "small", "--node-grpc", "127.0.0.1:0", "--node-blocks", "16"])
        .env_clear()
        .env("BATON_MODEL_PATH", folder.path())
        .env("BATON_MODEL_LOAD_FORMAT", "dummy")
        .env("BATON_CLUSTER_SECRET", SECRET)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let mut node = KilledOnDrop(child);
    let ready = wait_until(|| fs::read_to_string(&ready_file).ok());
    let ready: serde_json::Value = serde_json::from_str(&ready).unwrap();
    let grpc = format!("http://{}", ready["grpc"].as_str().unwrap());
    let channel = tonic::transport::Channel::from_shared(grpc).unwrap().connect_lazy();
    let signer = CallSigner::new(&ClusterSecret::new(SECRET).unwrap()).unwrap();

    let mut observer = NodeClient::with_interceptor(channel.clone(), signer.clone());
    let mut observe = observer.observe(v1::ObserveRequest {}).await.unwrap().into_inner();
    let Some(Event::Snapshot(snapshot)) = observe.message().await.unwrap().unwrap().event else {
        panic!("no snapshot");
    };
    let record = snapshot.record.unwrap();
    assert_eq!(record.role(), v1::Role::Prefill);
    assert_eq!((record.model.as_str(), record.block_count), ("small", 16));
    assert_eq!(record.control_endpoint, ready["control"].as_str().unwrap());
    let signer = signer.to(Epoch::from_bytes(&record.epoch).unwrap());
    let mut client = NodeClient::with_interceptor(channel, signer);
    assert!(record.both_roles);
    let status = client.decode(v1::DecodeRequest::default()).await.unwrap_err();
    assert!(status.message().contains("attempt: absent"), "{status}");

    let signal = Command::new("kill").args(["-TERM", &node.id().to_string()]).status();
    assert!(signal.unwrap().success());
    // Observers see the drain and then the end of the stream.
    let mut drained = false;
    let end = loop {
        match observe.message().await {
            Ok(event) => {
                let Some(Event::Delta(delta)) = event.unwrap().event else { continue };
                drained |= delta.load.is_some_and(|load| load.draining);
            }
            Err(status) => break status,
        }
    };
    assert!(drained, "{end}");
    let status = wait_until(|| node.try_wait().unwrap());
    assert_eq!(status.code(), Some(0));
}
