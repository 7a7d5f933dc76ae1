//! Tests that checkpoints of every format give the same weights, and that damaged files give typed
//! errors.

mod common;

use std::{fs, os::unix::fs::FileExt, path::Path, process::Command, time::Duration};

use common::{Element, Tensor};
use kernels::{
    WeightFormat,
    cpu::{CpuBackend, CpuOptions, Isa},
};
use model::{Checkpoint, Limits, LoadFormat, ModelError, Transformer, Weight};
use proptest::prelude::*;
use serde_json::json;

fn open(path: &Path) -> Result<Checkpoint, ModelError> {
    Checkpoint::open(path, LoadFormat::Auto)
}

fn assert_same_weights(found: &Checkpoint, expected: &Checkpoint, element: Element) {
    for weight in Weight::all(expected.config()) {
        let found = common::elements(found, weight);
        let rounded: Vec<f32> =
            common::elements(expected, weight).into_iter().map(|v| element.round(v)).collect();
        assert_eq!(found, rounded, "{weight:?} as {element:?}");
    }
}

#[test]
fn folders_of_every_element_type_single_or_sharded_give_the_weights_written() {
    let dummy = common::tiny_llama3();
    for element in [Element::F32, Element::F16, Element::Bf16] {
        for shards in [1, 3] {
            let folder = tempfile::tempdir().unwrap();
            let tensors = common::hugging_face_tensors(&dummy, element);
            common::write_folder(folder.path(), &tensors, shards);
            let checkpoint = open(folder.path()).unwrap();
            assert_eq!(checkpoint.config(), dummy.config());
            assert_same_weights(&checkpoint, &dummy, element);
        }
    }
}

#[test]
fn a_gguf_file_gives_the_weights_in_hugging_faces_order() {
    let dummy = common::tiny_llama3();
    let folder = tempfile::tempdir().unwrap();
    // The extension may be in upper case, by path as in a folder.
    let path = folder.path().join("tiny.GGUF");
    let tensors = common::gguf_tensors(&dummy, Element::F32);
    fs::write(&path, common::gguf(dummy.config(), &tensors)).unwrap();
    let checkpoint = open(&path).unwrap();
    assert_same_weights(&checkpoint, &dummy, Element::F32);
    assert_eq!(checkpoint.description(), "GGUF, F32");
    for (found, expected) in
        checkpoint.config().rope_frequencies().iter().zip(dummy.config().rope_frequencies())
    {
        assert!((found - expected).abs() <= expected * 1e-6);
    }
}

#[test]
fn opening_the_real_model_does_not_read_its_weights() {
    let checkpoint = open(&common::smollm2_path()).unwrap();
    let config = checkpoint.config();
    assert_eq!((config.hidden_size, config.layer_count, config.ffn_size), (576, 30, 1536));
    assert_eq!((config.query_head_count, config.kv_head_count, config.head_dim), (9, 3, 64));
    assert_eq!((config.vocab_size, config.context_tokens), (49152, 8192));
    assert_eq!((config.rms_eps, config.rope_theta), (1e-5, 100_000.0));
    assert!(config.tied_output);
    assert_eq!((config.bos_token_id, config.eos_token_ids.as_slice()), (Some(1), &[2][..]));
    assert_eq!(config.parameter_count(), 134_515_008);
    assert_eq!(checkpoint.description(), "GGUF, F32 + Q4_1 + Q8_0");
    let again = open(&common::smollm2_path()).unwrap();
    assert_eq!(checkpoint.model_fingerprint().unwrap(), again.model_fingerprint().unwrap());
    // A model with equal shapes and other weights has another fingerprint.
    let dummy = Checkpoint::open(common::smollm2_path(), LoadFormat::Dummy { seed: 1 }).unwrap();
    assert_eq!(dummy.config(), config);
    assert_ne!(dummy.model_fingerprint().unwrap(), checkpoint.model_fingerprint().unwrap());
}

#[test]
fn tied_model_with_an_output_of_its_own_uses_this_output() {
    let dummy = common::tiny_llama3();
    let folder = tempfile::tempdir().unwrap();
    let config = fs::read_to_string(common::fixture("tiny_llama3/config.json")).unwrap();
    let tied = config.replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    assert_ne!(tied, config);
    let open_with = |tensors: &[Tensor], shards| {
        common::write_folder(folder.path(), tensors, shards);
        fs::write(folder.path().join("config.json"), &tied).unwrap();
        open(folder.path()).unwrap()
    };
    let mut tensors = common::hugging_face_tensors(&dummy, Element::F32);
    let separate = open_with(&tensors, 1);
    assert!(!separate.config().tied_output);
    assert_same_weights(&separate, &dummy, Element::F32);
    assert_ne!(
        common::elements(&separate, Weight::Output),
        common::elements(&separate, Weight::Embedding)
    );

    // An output that repeats the embedding, or none, is tied.
    let embedding = tensors.iter().position(|it| it.name == "model.embed_tokens.weight").unwrap();
    let output = tensors.iter().position(|it| it.name == "lm_head.weight").unwrap();
    tensors[output].bytes = tensors[embedding].bytes.clone();
    assert!(open_with(&tensors, 1).config().tied_output);
    // The last byte of the last row differs.
    *tensors[output].bytes.last_mut().unwrap() ^= 0x40;
    assert!(!open_with(&tensors, 1).config().tied_output);
    tensors.remove(output);
    assert!(open_with(&tensors, 1).config().tied_output);
}

/// Turns the configuration into a Mistral configuration.
fn make_mistral(config: &mut String, window: &str) {
    let class = format!("\"MistralForCausalLM\"], \"sliding_window\": {window}");
    *config = config.replace("\"LlamaForCausalLM\"]", &class);
}

#[test]
fn fingerprints_differ_between_different_models() {
    let dummy = common::tiny_llama3();
    let fingerprint = |shards, element, change: &dyn Fn(&mut Vec<Tensor>, &mut String)| {
        let folder = tempfile::tempdir().unwrap();
        let mut tensors = common::hugging_face_tensors(&dummy, element);
        let mut config = fs::read_to_string(common::fixture("tiny_llama3/config.json")).unwrap();
        change(&mut tensors, &mut config);
        common::write_folder(folder.path(), &tensors, shards);
        fs::write(folder.path().join("config.json"), config).unwrap();
        open(folder.path()).unwrap().model_fingerprint().unwrap()
    };
    let plain = fingerprint(1, Element::F32, &|_, _| {});
    let variants = [
        fingerprint(1, Element::Bf16, &|_, _| {}),
        fingerprint(1, Element::F32, &|tensors, _| tensors[5].bytes[0] ^= 1),
        fingerprint(1, Element::F32, &|tensors, _| *tensors[5].bytes.last_mut().unwrap() ^= 1),
        fingerprint(1, Element::F32, &|tensors, _| {
            let largest = tensors.iter_mut().max_by_key(|tensor| tensor.bytes.len()).unwrap();
            let middle = largest.bytes.len() / 2 + 1;
            largest.bytes[middle] ^= 1;
        }),
        fingerprint(1, Element::F32, &|_, config| *config = config.replace("1e-05", "1e-06")),
        fingerprint(1, Element::F32, &|_, config| make_mistral(config, "null")),
        fingerprint(1, Element::F32, &|_, config| make_mistral(config, "9")),
        fingerprint(1, Element::F32, &|_, config| make_mistral(config, "10")),
        fingerprint(1, Element::F32, &|_, config| {
            *config = config.replace("\"rope_theta\": 10000.0", "\"rope_theta\": 10001.0");
        }),
        dummy.model_fingerprint().unwrap(),
    ];
    let mut distinct: Vec<u128> = variants.iter().copied().chain([plain]).collect();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), variants.len() + 1);
    // The split into files is not part of the fingerprint.
    assert_eq!(fingerprint(3, Element::F32, &|_, _| {}), plain);
    let seed = |seed| {
        Checkpoint::open(common::fixture("tiny_llama3"), LoadFormat::Dummy { seed })
            .unwrap()
            .model_fingerprint()
            .unwrap()
    };
    assert_eq!(seed(1), seed(1));
    assert_ne!(seed(1), seed(2));
}

/// Covers rows in the file's order and permuted rows, and weights that are not packed in the file's
/// type.
#[test]
fn fingerprint_uses_the_hashes_of_packed_weights() {
    let dummy = common::tiny_llama3();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    for element in [Element::F32, Element::F16, Element::Bf16] {
        let tensors = common::gguf_tensors(&dummy, element);
        fs::write(&path, common::gguf(dummy.config(), &tensors)).unwrap();
        let expected = open(&path).unwrap().model_fingerprint().unwrap();
        for weights in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Q8] {
            let (packed, plain) = (open(&path).unwrap().hashing_packed(), open(&path).unwrap());
            load(&packed, weights).unwrap();
            load(&plain, weights).unwrap();
            // The bytes of both checkpoints change.
            let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
            let at = stored_at(&path, &tensors);
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1], at).unwrap();
            assert_eq!(packed.model_fingerprint().unwrap(), expected, "{element:?} {weights}");
            assert_ne!(plain.model_fingerprint().unwrap(), expected, "{element:?} {weights}");
            file.write_all_at(&byte, at).unwrap();
            assert_eq!(plain.model_fingerprint().unwrap(), expected, "{element:?} {weights}");
        }
    }
}

/// Returns the offset of a matrix's first byte in the file.
fn stored_at(path: &Path, tensors: &[Tensor]) -> u64 {
    let matrix = tensors.iter().find(|tensor| tensor.name == "blk.0.attn_q.weight").unwrap();
    let file = fs::read(path).unwrap();
    let mut at = file.windows(matrix.bytes.len()).enumerate();
    at.find(|(_, bytes)| *bytes == matrix.bytes).unwrap().0 as u64
}

#[test]
fn paths_without_a_model_are_rejected_with_what_is_expected() {
    let folder = tempfile::tempdir().unwrap();
    let message = |path: &Path| open(path).unwrap_err().to_string();
    let empty = message(folder.path());
    assert!(
        empty.ends_with("the folder has neither a config.json nor exactly one GGUF file"),
        "{empty}"
    );
    assert!(message(&folder.path().join("absent.gguf")).contains("cannot open"));
    let text = folder.path().join("notes.txt");
    fs::write(&text, "hello").unwrap();
    assert!(message(&text).contains("neither a .gguf file nor a folder"));
    let gguf = folder.path().join("empty.gguf");
    fs::write(&gguf, "").unwrap();
    assert!(
        message(&gguf).contains("truncated or corrupt: the magic number"),
        "{}",
        message(&gguf)
    );

    fs::remove_file(&gguf).unwrap();
    fs::copy(common::fixture("tiny_llama3/config.json"), folder.path().join("config.json"))
        .unwrap();
    let alone = message(&folder.path().join("config.json"));
    assert!(alone.contains("load format dummy only"), "{alone}");
    let no_weights = message(folder.path());
    assert!(
        no_weights
            .ends_with("the folder has neither model.safetensors nor model.safetensors.index.json"),
        "{no_weights}"
    );
}

/// Creates a FIFO. Opening it for reading blocks until a writer opens it.
fn fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn fifos_and_devices_are_rejected_without_reading() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    fifo(&model);
    let config = folder.path().join("config.json");
    fifo(&config);
    let zeros = folder.path().join("zeros.gguf");
    std::os::unix::fs::symlink("/dev/zero", &zeros).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let paths = [model, config, zeros];
    let opened = paths.clone();
    std::thread::spawn(move || {
        for path in opened {
            let error = Checkpoint::open(path, LoadFormat::Dummy { seed: 0 }).unwrap_err();
            tell.send(error.to_string()).unwrap();
        }
    });
    for path in paths {
        let error = told.recv_timeout(Duration::from_secs(60)).expect("opening blocks");
        let path = path.to_str().unwrap();
        assert!(error.contains(path) && error.ends_with("not a regular file"), "{error}");
    }
}

#[test]
fn a_folder_with_one_gguf_file_is_opened_as_that_file() {
    let folder = tempfile::tempdir().unwrap();
    let dummy = common::tiny_llama3();
    let bytes = common::gguf(dummy.config(), &common::gguf_tensors(&dummy, Element::F32));
    let file = folder.path().join("tiny.gguf");
    fs::write(&file, &bytes).unwrap();
    let by_folder = open(folder.path()).unwrap();
    assert_eq!(
        by_folder.model_fingerprint().unwrap(),
        open(&file).unwrap().model_fingerprint().unwrap()
    );
    fs::write(folder.path().join("other.gguf"), &bytes).unwrap();
    let error = open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("exactly one GGUF file"), "{error}");
}

/// Returns the error of opening the tiny model's folder after `change`.
fn open_changed(change: impl Fn(&mut Vec<Tensor>)) -> ModelError {
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = common::hugging_face_tensors(&common::tiny_llama3(), Element::F32);
    change(&mut tensors);
    common::write_folder(folder.path(), &tensors, 1);
    open(folder.path()).unwrap_err()
}

#[test]
fn missing_misshapen_and_unknown_tensors_are_named() {
    let error = open_changed(|tensors| drop(tensors.remove(2)));
    assert!(
        error.to_string().ends_with(
            "tensor \"model.layers.0.self_attn.q_proj.weight\" is missing; expected shape [64, 32]"
        ),
        "{error}"
    );
    let error = open_changed(|tensors| tensors[2].dims = vec![32, 64]);
    assert!(error.to_string().ends_with("has shape [32, 64]; expected [64, 32]"), "{error}");
    let error = open_changed(|tensors| {
        tensors.push(Tensor {
            name: "model.layers.0.self_attn.q_proj.bias".into(),
            dims: vec![64],
            element: Element::F32,
            bytes: vec![0; 256],
        });
    });
    assert!(
        matches!(&error, ModelError::UnknownTensor { tensor, .. }
            if tensor == "model.layers.0.self_attn.q_proj.bias"),
        "{error}"
    );
}

#[test]
fn non_finite_norms_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = common::hugging_face_tensors(&common::tiny_llama3(), Element::F32);
    tensors[1].bytes[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    common::write_folder(folder.path(), &tensors, 1);
    let checkpoint = open(folder.path()).unwrap();
    let weight = Weight::Layer(0, model::LayerWeight::AttentionNorm);
    let error = checkpoint.vector(weight).unwrap_err();
    assert!(matches!(error, ModelError::NotFinite { element: 2, .. }), "{error}");
}

fn load(checkpoint: &Checkpoint, weights: WeightFormat) -> Result<(), ModelError> {
    let options = CpuOptions { weights, threads: 2, isa: Isa::Auto };
    let backend = CpuBackend::new(options).unwrap();
    let limits = Limits { rows_max: 1, sampled_max: 1, adapter_slots: 0 };
    Transformer::load(checkpoint, &backend, limits, &mut |_| ()).map(drop)
}

#[test]
fn non_finite_matrices_are_rejected_during_packing() {
    let dummy = common::tiny_llama3();
    let folder = tempfile::tempdir().unwrap();
    let refused = |path: &Path, name: &str, element: usize| {
        let checkpoint = open(path).unwrap();
        for weights in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Q8] {
            match load(&checkpoint, weights) {
                Err(ModelError::NotFinite { tensor, element: found, .. }) => {
                    assert_eq!((tensor.as_str(), found), (name, element), "{weights}");
                }
                other => panic!("{name} {element} {weights}: {other:?}"),
            }
        }
    };
    let good = common::hugging_face_tensors(&dummy, Element::F32);
    common::write_folder(folder.path(), &good, 1);
    load(&open(folder.path()).unwrap(), WeightFormat::Bf16).unwrap();
    let matrices = good.iter().enumerate().filter(|(_, tensor)| tensor.dims.len() == 2);
    for (index, tensor) in matrices {
        let last = tensor.bytes.len() / 4 - 1;
        for (element, bad) in [(0, f32::NAN), (37, f32::INFINITY), (last, f32::NEG_INFINITY)] {
            let mut tensors = good.clone();
            tensors[index].bytes[element * 4..][..4].copy_from_slice(&bad.to_le_bytes());
            common::write_folder(folder.path(), &tensors, 1);
            refused(folder.path(), &tensor.name, element);
        }
    }
    // Elements of permuted rows are reported by their index in the file.
    let path = folder.path().join("tiny.gguf");
    let mut tensors = common::gguf_tensors(&dummy, Element::F32);
    let query = tensors.iter_mut().find(|tensor| tensor.name == "blk.0.attn_q.weight").unwrap();
    query.bytes[100 * 4..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&path, common::gguf(dummy.config(), &tensors)).unwrap();
    refused(&path, "blk.0.attn_q.weight", 100);
}

/// A file that is mapped instead of read would end this process by SIGBUS.
#[test]
fn file_truncated_while_it_is_open_fails_the_load() {
    let dummy = common::tiny_llama3();
    let folder = tempfile::tempdir().unwrap();
    let gguf = folder.path().join("tiny.gguf");
    let cut = |path: &Path, read: &dyn Fn(&Checkpoint) -> Result<(), ModelError>| {
        let tensors = common::hugging_face_tensors(&dummy, Element::Bf16);
        common::write_folder(folder.path(), &tensors, 1);
        let tensors = common::gguf_tensors(&dummy, Element::F32);
        fs::write(&gguf, common::gguf(dummy.config(), &tensors)).unwrap();
        let checkpoint = open(path).unwrap();
        let file = match path.is_dir() {
            true => path.join("model.safetensors"),
            false => path.to_owned(),
        };
        let file = fs::OpenOptions::new().write(true).open(file).unwrap();
        file.set_len(1).unwrap();
        let error = read(&checkpoint).unwrap_err();
        assert!(matches!(error, ModelError::Changed { .. }), "{error}");
    };
    for path in [folder.path(), &gguf] {
        for weights in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Q8] {
            cut(path, &|checkpoint| load(checkpoint, weights));
        }
        cut(path, &|checkpoint| checkpoint.model_fingerprint().map(drop));
        cut(path, &|checkpoint| checkpoint.vector(Weight::OutputNorm).map(drop));
        cut(path, &|checkpoint| {
            let weights = checkpoint.stored_weights()?;
            weights[0].read(0, &mut vec![0; weights[0].bytes() as usize]);
            checkpoint.check_unchanged()
        });
    }
}

#[test]
fn a_truncated_safetensors_file_names_tensor_and_offset() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = common::hugging_face_tensors(&common::tiny_llama3(), Element::F32);
    common::write_folder(folder.path(), &tensors, 1);
    let path = folder.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let last = tensors.last().unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let error = open(folder.path()).unwrap_err();
    let (found, at) = match &error {
        ModelError::TensorTruncated { tensor, offset, .. } => (tensor, *offset as usize),
        other => panic!("{other}"),
    };
    assert_eq!((found, at), (&last.name, bytes.len() - last.bytes.len()));
}

#[test]
fn an_invalid_shard_index_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = common::hugging_face_tensors(&common::tiny_llama3(), Element::F32);
    common::write_folder(folder.path(), &tensors, 2);
    let index = folder.path().join("model.safetensors.index.json");
    let message = |weight_map: serde_json::Value| {
        fs::write(&index, json!({ "weight_map": weight_map }).to_string()).unwrap();
        open(folder.path()).unwrap_err().to_string()
    };
    for file in ["../model.safetensors", "/etc/passwd", "a/b", "..", ""] {
        let message = message(json!({ "t": file }));
        assert!(message.contains("expected a file name without folders"), "{file:?}: {message}");
    }
    assert!(message(json!({"t": 3})).ends_with("tensor \"t\" has file 3; expected a string"));
    assert!(message(json!([])).ends_with("has no object weight_map"));
    assert!(message(json!({"t": "absent.safetensors"})).contains("cannot open"));
    let shard = "model-00001-of-00002.safetensors";
    assert!(message(json!({ "t": shard })).contains("tensor \"t\" is not in"));
    let missing = message(json!({}));
    assert!(missing.contains("tensor \"model.embed_tokens.weight\" is missing"), "{missing}");
}

#[test]
fn gguf_files_of_unsupported_kind_or_architecture_are_rejected() {
    let dummy = common::tiny_llama3();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    let tensors = common::gguf_tensors(&dummy, Element::F32);
    let good = common::gguf(dummy.config(), &tensors);
    let message = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        open(&path).unwrap_err().to_string()
    };
    let position = |needle: &[u8]| good.windows(needle.len()).position(|w| w == needle).unwrap();

    let mut other = good.clone();
    // The value follows its key, its type and its length.
    let value = position(b"general.architecture") + 20 + 4 + 8;
    other[value..value + 5].copy_from_slice(b"bloom");
    assert!(message(&other).ends_with(
        "unsupported architecture \"bloom\"; expected one of \"llama\", \"qwen2\", \"qwen2moe\", \
         \"qwen3\", \"qwen3moe\""
    ));

    let mut other = good.clone();
    let name = b"blk.1.ffn_up.weight";
    // The kind follows the name, the number of dimensions and two dimensions.
    let kind = position(name) + name.len() + 4 + 16;
    other[kind..kind + 4].copy_from_slice(&10u32.to_le_bytes());
    let found = message(&other);
    assert!(found.contains("tensor \"blk.1.ffn_up.weight\" at file offset"), "{found}");
    assert!(
        found.ends_with(
            "has unsupported type Q2_K (number 10); expected one of F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, \
             Q8_0, Q4_K, Q5_K, Q6_K"
        ),
        "{found}"
    );

    let found = message(&good[..good.len() - 1]);
    assert!(found.contains("tensor \"rope_freqs.weight\" needs 32 bytes at offset"), "{found}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn damaged_gguf_files_never_panic(
        damage in prop::collection::vec((0usize..4000, any::<u8>()), 0..4),
        cut in 0usize..400_000,
    ) {
        let dummy = common::tiny_llama3();
        let mut bytes = common::gguf(dummy.config(), &common::gguf_tensors(&dummy, Element::Bf16));
        for (index, byte) in damage {
            bytes[index] = byte;
        }
        bytes.truncate(cut);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        fs::write(&path, bytes).unwrap();
        read_everything(&path);
    }

    #[test]
    fn damaged_safetensors_never_panic(
        damage in prop::collection::vec((0usize..4000, any::<u8>()), 0..4),
        cut in 0usize..400_000,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let tensors = common::hugging_face_tensors(&common::tiny_llama3(), Element::Bf16);
        common::write_folder(folder.path(), &tensors, 1);
        let path = folder.path().join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        for (index, byte) in damage {
            bytes[index] = byte;
        }
        bytes.truncate(cut);
        fs::write(&path, bytes).unwrap();
        read_everything(folder.path());
    }
}

/// Reads all weights if the checkpoint opens.
fn read_everything(path: &Path) {
    let Ok(checkpoint) = open(path) else { return };
    for weight in Weight::all(checkpoint.config()) {
        match weight.shape(checkpoint.config()) {
            model::WeightShape::Vector { .. } => drop(checkpoint.vector(weight)),
            model::WeightShape::Matrix { .. } => drop(common::elements(&checkpoint, weight)),
        }
    }
}
