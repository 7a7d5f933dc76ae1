use std::sync::Mutex;

use kernels::{Packer, RowSource, digest::of_weight};
use model::{Checkpoint, LoadFormat, TransformerWeights};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn checkpoint(architecture: &str, name: &str, tied: bool) -> Checkpoint {
    dummy(&json!({
        "architectures": [architecture], "model_type": name, "tie_word_embeddings": tied,
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 2100, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "hidden_act": "silu"
    }))
}

fn dummy(config: &Value) -> Checkpoint {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    Checkpoint::open(folder.path(), LoadFormat::Dummy { seed: 7 }).unwrap()
}

/// Packs into host memory, in the order of [`TransformerWeights::pack`].
struct HostPacker {
    shard: Shard,
    dtype: Dtype,
    bytes: Mutex<Vec<u8>>,
}

impl Packer for HostPacker {
    type Matrix = ();
    type Vector = ();

    fn pack_matrix(&self, source: &dyn RowSource) {
        let mut out = vec![0; source.rows() * source.cols() * self.dtype.bytes()];
        source.read_rows(0, self.dtype, &mut out);
        self.bytes.lock().unwrap().extend(out);
    }

    fn pack_vector(&self, values: &[f32]) {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes());
        self.bytes.lock().unwrap().extend(bytes);
    }

    fn pack_shard(&self) -> Shard {
        self.shard
    }
}

fn packed(checkpoint: &Checkpoint, shard: Shard, dtype: Dtype) -> Vec<u8> {
    let packer = HostPacker { shard, dtype, bytes: Mutex::default() };
    TransformerWeights::pack(checkpoint, &packer, &mut |_| ()).unwrap();
    packer.bytes.into_inner().unwrap()
}

/// Returns the tensors that a trainer declares, in reverse packing order, and the bytes of each.
fn trainer_tensors(checkpoint: &Checkpoint, dtype: Dtype) -> (Vec<DeclaredTensor>, Vec<Vec<u8>>) {
    let config = checkpoint.config();
    let mut weights: Vec<_> = Weight::all(config).collect();
    weights.reverse();
    let tensor = |weight: &Weight| {
        let shape = weight.shape(config).dims();
        let (dtype, bytes) = match shape.len() {
            1 => {
                let offset = config.vector_offset(*weight);
                let values = checkpoint.vector(*weight).unwrap().into_iter();
                let stored = values.flat_map(|value| (value - offset).to_le_bytes());
                (Dtype::F32, stored.collect())
            }
            _ => {
                let matrix = checkpoint.matrix(*weight).unwrap();
                let mut bytes = vec![0; matrix.rows() * matrix.cols() * dtype.bytes()];
                matrix.read_rows(0, dtype, &mut bytes);
                (dtype, bytes)
            }
        };
        let name = weight.hugging_face_name(config);
        (DeclaredTensor { name, dtype: name_of(dtype).into(), shape }, bytes)
    };
    weights.iter().map(tensor).unzip()
}

/// Cuts the tensors into chunks of `chunk_bytes`, makes the GPU's copies on the host, and returns
/// the packed weights and the tensors' digests.
fn received(
    config: &ModelConfig,
    shard: Shard,
    dtype: Dtype,
    (declared, bytes): &(Vec<DeclaredTensor>, Vec<Vec<u8>>),
    chunk_bytes: usize,
) -> Result<(Vec<u8>, Vec<Option<TensorDigest>>), DeclaredError> {
    let mut end = 0;
    let place = |bytes| {
        end += bytes;
        Ok::<_, DeclaredError>(end - bytes)
    };
    let scatter = Scatter::new(config, shard, dtype, declared, place)?;
    let (mut out, mut host) = (vec![0xee; end], vec![0xee; scatter.host_bytes()]);
    let mut digests = vec![(0, 0); scatter.digest_count()];
    let (mut chunk, mut pieces) = (Vec::new(), Vec::new());
    let mut flush = |chunk: &mut Vec<u8>, pieces: &mut Vec<TensorPiece>| {
        let work = scatter.work(pieces);
        for (copies, to) in [(&work.to_device, &mut out), (&work.to_host, &mut host)] {
            for copy in copies {
                for row in 0..copy.height {
                    let (from, at) =
                        (copy.from + row * copy.from_pitch, copy.to + row * copy.to_pitch);
                    to[at..at + copy.width].copy_from_slice(&chunk[from..from + copy.width]);
                }
            }
        }
        for (index, at, runs) in &work.complete {
            let bytes = &out[*at..*at + runs.bytes()];
            let is_non_finite = |bits: u16| bits & 0x7f80 == 0x7f80;
            let non_finite = match dtype {
                Dtype::Bf16 => {
                    let bits = bytes.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes));
                    bits.filter(|bits| is_non_finite(*bits)).count()
                }
                Dtype::F32 => widened(bytes, dtype).iter().filter(|it| !it.is_finite()).count(),
            };
            digests[*index] = (of_weight(runs, bytes), non_finite as u64);
        }
        chunk.clear();
        pieces.clear();
    };
    for (tensor, bytes) in bytes.iter().enumerate() {
        let mut start = 0;
        while start < bytes.len() {
            let end = bytes.len().min(start + chunk_bytes - chunk.len());
            pieces.push(TensorPiece { tensor, range: start..end, at: chunk.len() });
            chunk.extend(&bytes[start..end]);
            start = end;
            if chunk.len() == chunk_bytes {
                flush(&mut chunk, &mut pieces);
            }
        }
    }
    flush(&mut chunk, &mut pieces);
    let copied = CopiedWeights { host, digests };
    let upload = |values: &[f32], at: usize| {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        out[at..at + bytes.len()].copy_from_slice(&bytes);
        Ok::<_, DeclaredError>(())
    };
    let digests = scatter.finish(&copied, upload)?;
    // `bytes` counts vectors in the trainer's type, but `out` has them in f32, which may be larger.
    assert!(scatter.bytes() <= out.len() as u64);
    Ok((out, digests))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// With chunks of any size, each rank packs the same bytes as from a checkpoint, and the
    /// digests of the ranks' parts add up to the digest of the tensor.
    #[test]
    fn chunks_pack_as_from_a_checkpoint(chunk_bytes in 1usize..3000, is_large in any::<bool>()) {
        let chunk_bytes = if is_large { chunk_bytes * 20 } else { chunk_bytes };
        for (architecture, name, tied) in [
            ("LlamaForCausalLM", "llama", false),
            ("Qwen2ForCausalLM", "qwen2", true),
            ("Qwen3ForCausalLM", "qwen3", true),
            ("Gemma3ForCausalLM", "gemma3_text", true),
        ] {
            let checkpoint = checkpoint(architecture, name, tied);
            let config = checkpoint.config();
            for dtype in [Dtype::Bf16, Dtype::F32] {
                let tensors = trainer_tensors(&checkpoint, dtype);
                let whole = received(config, Shard::WHOLE, dtype, &tensors, chunk_bytes).unwrap();
                prop_assert!(whole.0 == packed(&checkpoint, Shard::WHOLE, dtype));
                for ((tensor, bytes), digest) in tensors.0.iter().zip(&tensors.1).zip(&whole.1) {
                    let run = bytes.len();
                    let runs = WeightRuns { runs: 1, run_bytes: run, run_stride: run, first: 0 };
                    let value = of_weight(&runs, bytes);
                    let expected = Some(TensorDigest { value, is_whole: true });
                    prop_assert_eq!(*digest, expected, "{}", tensor.name);
                }
                let ranks = [0, 1].map(|rank| {
                    let shard = Shard::new(rank, 2).unwrap();
                    let (bytes, digests) =
                        received(config, shard, dtype, &tensors, chunk_bytes).unwrap();
                    assert!(bytes == packed(&checkpoint, shard, dtype));
                    digests
                });
                for (tensor, whole) in whole.1.iter().enumerate() {
                    let [one, two] = [&ranks[0], &ranks[1]].map(|rank| rank[tensor].unwrap());
                    let whole = whole.unwrap();
                    // Norms are not sharded: each rank has all bytes of the tensor.
                    match one.is_whole {
                        true => prop_assert_eq!((one, two), (whole, whole)),
                        false => {
                            prop_assert!(!two.is_whole);
                            prop_assert_eq!(one.value.wrapping_add(two.value), whole.value);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_rank_of_two_copies_half_of_the_bytes_of_an_8b_model() {
    let checkpoint = dummy(&json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": false,
        "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128_256, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "hidden_act": "silu"
    }));
    let config = checkpoint.config();
    let declared = |weight: Weight| DeclaredTensor {
        name: weight.hugging_face_name(config),
        dtype: "BF16".into(),
        shape: weight.shape(config).dims(),
    };
    let declared: Vec<DeclaredTensor> = Weight::all(config).map(declared).collect();
    let all: u64 = declared.iter().map(|tensor| tensor.bytes().unwrap()).sum();
    for rank in 0..2 {
        let shard = Shard::new(rank, 2).unwrap();
        let place = |_: usize| Ok::<_, DeclaredError>(0);
        let scatter = Scatter::new(config, shard, Dtype::Bf16, &declared, place).unwrap();
        let share = scatter.bytes() as f64 / all as f64;
        assert!((0.49..0.51).contains(&share), "{shard}: {share}");
    }
}

#[test]
fn invalid_tensors_are_named() {
    let checkpoint = checkpoint("LlamaForCausalLM", "llama", true);
    let valid = trainer_tensors(&checkpoint, Dtype::Bf16);
    let receive = |tensors: &(Vec<DeclaredTensor>, Vec<Vec<u8>>)| {
        received(checkpoint.config(), Shard::WHOLE, Dtype::Bf16, tensors, 999)
    };
    let norm = valid.0.iter().position(|it| it.name == "model.norm.weight").unwrap();
    let up = valid.0.iter().position(|it| it.name.ends_with("0.mlp.up_proj.weight")).unwrap();
    type Change = fn(&mut (Vec<DeclaredTensor>, Vec<Vec<u8>>), usize);
    let changes: [(usize, Change, &str); 7] = [
        (up, |it, at| it.0[at].shape.reverse(), "has shape [32, 48]; expected [48, 32]"),
        (up, |it, at| it.0[at].dtype = "F32".into(), "has dtype F32; expected BF16"),
        (norm, |it, at| it.0[at].dtype = "F16".into(), "has dtype F16; expected BF16 or F32"),
        (up, |it, at| it.0[at].name = "other".into(), "up_proj.weight\" is missing"),
        (up, |it, at| it.0[at].name = it.0[0].name.clone(), "occurs twice"),
        (up, |it, at| it.1[at][6..8].copy_from_slice(&[0x80, 0x7f]), "1 elements of tensor"),
        (norm, |it, at| it.1[at][..4].copy_from_slice(&[0xff; 4]), "1 elements of tensor"),
    ];
    for (at, change, words) in changes {
        let mut tensors = valid.clone();
        change(&mut tensors, at);
        let error = receive(&tensors).unwrap_err().to_string();
        assert!(error.contains(words), "{error:?} lacks {words:?}");
    }
    let mut more = valid.clone();
    let extra = DeclaredTensor { name: "extra".into(), dtype: "BF16".into(), shape: vec![4] };
    more.0.push(extra);
    more.1.push(vec![0; 8]);
    let error = receive(&more).unwrap_err().to_string();
    assert!(error.contains("\"extra\" is not part of the llama architecture"), "{error}");
    // With tied embeddings `lm_head.weight` repeats the embedding. It is accepted and not used.
    let embedding = valid.0.iter().position(|it| it.name.contains("embed_tokens")).unwrap();
    let mut repeated = valid.clone();
    let output = DeclaredTensor { name: "lm_head.weight".into(), ..valid.0[embedding].clone() };
    repeated.0.push(output);
    repeated.1.push(valid.1[embedding].clone());
    let (bytes, digests) = receive(&repeated).unwrap();
    assert!(bytes == receive(&valid).unwrap().0);
    assert_eq!(digests.last(), Some(&None));
}
