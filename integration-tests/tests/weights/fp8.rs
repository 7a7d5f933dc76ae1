//! Updates of a mixture of experts in FP8: from a path, a peer and a trainer, to FP8 and to bf16.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Result, ensure};
use integration_tests::{
    client::Client,
    cluster::{Cluster, ClusterSpec, smollm2},
    command::output,
};
use kernels::{RowSource, fp8};
use model::{Checkpoint, LayerWeight, LoadFormat, Weight, WeightShape};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};

use crate::{
    committed, folder, name_model, report, update, update_by,
    updates::{all_tokens, expected},
    wait_version,
};

/// Changes the scales of a layer's output projection.
type ChangeScales = fn(&mut Vec<f32>);

/// A model to write.
struct Model {
    name: &'static str,
    seed: u64,
    is_fp8: bool,
    change: ChangeScales,
}

impl Model {
    /// Writes the model with SmolLM2's tokenizer, and returns its folder.
    fn write(&self, folder: &Path) -> Result<PathBuf> {
        let path = folder.join(self.name);
        fs::create_dir(&path)?;
        folder::write_tokenizer(&smollm2(), &path)?;
        let mut config = json!({
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "vocab_size": 49_152, "max_position_embeddings": 2048, "tie_word_embeddings": true,
            "eos_token_id": 2
        });
        if self.is_fp8 {
            let number = json!({"num_bits": 8, "type": "float", "strategy": "channel"});
            config["quantization_config"] = json!({"quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": number}}});
        }
        fs::write(path.join("config.json"), config.to_string())?;
        let checkpoint = Checkpoint::open(&path, LoadFormat::Dummy { seed: self.seed })?;
        let mut tensors: HashMap<String, (Dtype, Vec<usize>, Vec<u8>)> = HashMap::new();
        for weight in Weight::all(checkpoint.config()) {
            let name = weight.hugging_face_name(checkpoint.config());
            let is_router = matches!(weight, Weight::Layer(_, LayerWeight::Router));
            let (rows, cols) = match weight.shape(checkpoint.config()) {
                WeightShape::Vector { len } => {
                    let values = checkpoint.vector(weight)?;
                    tensors.insert(name, (Dtype::F32, vec![len], bytes_of(&values)));
                    continue;
                }
                WeightShape::Matrix { rows, cols } => (rows, cols),
            };
            let mut values = vec![0.0; rows * cols];
            checkpoint.matrix(weight)?.read_values(0, &mut values);
            if !(self.is_fp8 && matches!(weight, Weight::Layer(..))) || is_router {
                let bf16 = values.iter().map(|value| half::bf16::from_f32(*value).to_le_bytes());
                let bytes = bf16.flatten().collect();
                tensors.insert(name, (Dtype::BF16, vec![rows, cols], bytes));
                continue;
            }
            let greatest = |row: &[f32]| row.iter().fold(1e-6_f32, |most, it| most.max(it.abs()));
            let mut scales: Vec<f32> =
                values.chunks(cols).map(|row| greatest(row) / fp8::E4M3_MAX).collect();
            let numbers = values.chunks(cols).zip(&scales);
            let numbers = numbers.flat_map(|(row, scale)| row.iter().map(move |it| it / scale));
            let numbers = numbers.map(fp8::encode).collect();
            if name == "model.layers.1.self_attn.o_proj.weight" {
                (self.change)(&mut scales);
            }
            let of_scales = (Dtype::F32, vec![scales.len(), 1], bytes_of(&scales));
            tensors.insert(format!("{name}_scale"), of_scales);
            tensors.insert(name, (Dtype::F8_E4M3, vec![rows, cols], numbers));
        }
        let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
            let view = TensorView::new(*dtype, shape.clone(), bytes);
            (name.as_str(), view.expect("the bytes have this shape"))
        });
        safetensors::serialize_to_file(views, None, &path.join("model.safetensors"))?;
        Ok(path)
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Pushes the tensors of a model as a trainer does, with the `config` of a folder.
async fn push(cluster: &Cluster, model: &Path, config: &Path, folder: &Path) -> Result<()> {
    const TRAINER: &str = r#"
import json, struct, sys
sys.path.insert(0, sys.argv[1])
import baton_weights
# The layers take several files.
baton_weights.SHARD_BYTES = 4096
admin, model, config, folder = sys.argv[2:]
data = open(f"{model}/model.safetensors", "rb").read()
size = struct.unpack("<Q", data[:8])[0]
tensors = {name: (it["dtype"], it["shape"], data[8 + size:][slice(*it["data_offsets"])])
           for name, it in json.loads(data[8:8 + size]).items()}
baton_weights.WeightUpdater(admin, folder=folder, config=config).push(tensors)
"#;
    let client = concat!(env!("CARGO_MANIFEST_DIR"), "/../services/weight-transfer/client");
    let mut python = Command::new("python3");
    python.args(["-c", TRAINER, client, &format!("http://{}", cluster.router.ready.admin)]);
    python.args([model, config, folder]);
    let output = tokio::task::spawn_blocking(move || output(&mut python)).await??;
    ensure!(output.status.success(), "{output:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn fp8_experts_are_updated_by_disk_by_tcp_and_by_a_trainer() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let fp8 = |name, seed, change| Model { name, seed, is_fp8: true, change };
    let old = fp8("old", 1, |_| ()).write(dir.path())?;
    let new = fp8("new", 2, |_| ()).write(dir.path())?;
    let plain = Model { is_fp8: false, ..fp8("plain", 3, |_| ()) }.write(dir.path())?;
    let spec = |model: &Path| {
        // On CPUs nodes compute in bf16.
        let spec = ClusterSpec { model: model.to_owned(), dtype: "fp8", ..ClusterSpec::of(1, 1) };
        name_model(spec).set("BATON_WEIGHTS_PLACE", "shadow")
    };
    let tokens_of = async |model: &Path| expected(model, spec(model).nodes(0, 1)).await;
    let (old_tokens, new_tokens) = (tokens_of(&old).await?, tokens_of(&new).await?);
    let plain_tokens = tokens_of(&plain).await?;
    assert!(old_tokens != new_tokens && new_tokens != plain_tokens && plain_tokens != old_tokens);

    let cluster = Cluster::start(spec(&old).set_decode("BATON_NODE_TP", 2)).await?;
    let client = Client::new(cluster.http());
    assert_eq!(all_tokens(&client).await?, old_tokens);
    let version = async |report: Value| -> Result<Value> {
        let version = report["update"]["weight_version"].clone();
        wait_version(&cluster, &version).await?;
        Ok(version)
    };
    version(committed(&cluster, &new).await?).await?;
    assert_eq!(all_tokens(&client).await?, new_tokens, "by disk");
    let by_tcp = json!({"transport": "tcp", "node": "decode-0"});
    let by_tcp = update_by(&cluster, &plain, by_tcp).await?;
    assert_eq!(by_tcp["update"]["phase"], "committed", "{by_tcp}");
    version(by_tcp).await?;
    assert_eq!(all_tokens(&client).await?, plain_tokens, "bf16 by tcp");
    let first = version(committed(&cluster, &old).await?).await?;
    assert_eq!(all_tokens(&client).await?, old_tokens);
    // A trainer sends FP8 as it is stored, and bf16.
    let updates = dir.path().join("updates");
    push(&cluster, &plain, &old, &updates).await?;
    assert_eq!(all_tokens(&client).await?, plain_tokens, "bf16 by a trainer");
    push(&cluster, &old, &old, &updates).await?;
    let pushed = version(report(&cluster).await?).await?;
    assert_eq!(all_tokens(&client).await?, old_tokens, "FP8 by a trainer");
    assert_eq!(pushed, first, "equal stored bytes have one version");

    // The version covers the scales.
    let scaled = fp8("scaled", 1, |scales| scales[3] = scales[3].next_up()).write(dir.path())?;
    assert_ne!(version(committed(&cluster, &scaled).await?).await?, first);
    let negative = fp8("negative", 1, |scales| scales[3] = -1.0).write(dir.path())?;
    let refused = update(&cluster, &negative).await?;
    assert_eq!(refused["update"]["phase"], "aborted", "{refused}");
    let reason = refused["update"]["reason"].as_str().unwrap_or_default();
    let words = ["1.self_attn.o_proj.weight_scale", "has scale -1 at element 3"];
    assert!(words.iter().all(|words| reason.contains(words)), "{reason}");
    cluster.stop()
}
