//! Checkpoints whose experts are stored in MXFP4, and attention sinks: shards, fingerprint and
//! errors. `architectures.rs` compares the logits with those of transformers.

mod common;

use std::{collections::BTreeMap, fs, path::Path};

use kernels::{RowSource, Shard};
use model::{Checkpoint, ExpertWeight, LayerWeight, LoadFormat, Weight, WeightPart, WeightShape};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

const EXPERTS: &str = "model.layers.1.mlp.experts";

/// Tensors of a file.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn fixture() -> Tensors {
    let path = common::fixture("architectures/gpt_oss/model.safetensors");
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter();
    tensors
        .map(|(name, it)| (name, (it.dtype(), it.shape().to_vec(), it.data().to_vec())))
        .collect()
}

/// Writes the tensors to a folder and opens it.
fn open(folder: &Path, tensors: &Tensors) -> Result<Checkpoint, String> {
    let config = common::fixture("architectures/gpt_oss/config.json");
    fs::copy(config, folder.join("config.json")).unwrap();
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    Checkpoint::open(folder, LoadFormat::Auto).map_err(|error| error.to_string())
}

#[test]
fn matrices_have_the_values_of_the_format() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = fixture();
    let checkpoint = open(folder.path(), &tensors).unwrap();
    let (blocks, scales) = (
        &tensors[&format!("{EXPERTS}.gate_up_proj_blocks")].2,
        &tensors[&format!("{EXPERTS}.gate_up_proj_scales")].2,
    );
    const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    // Expert 4, row 17: row 35 of the file's 192 for up.
    let row = 4 * 192 + 35;
    let weight = Weight::Layer(1, LayerWeight::Expert(4, ExpertWeight::Up));
    let mut found = [0.0; 32];
    checkpoint.matrix(weight).unwrap().read_row(17, &mut found);
    for (col, found) in found.into_iter().enumerate() {
        let bits = blocks[row * 16 + col / 2] >> (col % 2 * 4) & 15;
        let sign = if bits < 8 { 1.0 } else { -1.0 };
        let scale = 2_f32.powi(i32::from(scales[row]) - 127);
        assert_eq!(found, sign * VALUES[usize::from(bits & 7)] * scale);
    }
}

/// Checks that stored numbers and scales give the values of the rows of a matrix.
fn check_stored(checkpoint: &Checkpoint, weight: Weight) {
    const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let matrix = checkpoint.matrix(weight).unwrap();
    assert_eq!(matrix.mxfp4_parts(), Some(1), "{weight:?}");
    let (cols, first, rows) = (matrix.cols(), 3, 5);
    let (mut numbers, mut scales) = (vec![0; rows * cols / 2], vec![0; rows * cols / 32]);
    matrix.read_mxfp4(first, &mut numbers, &mut scales);
    let mut wanted = vec![0.0; cols];
    for row in 0..rows {
        matrix.read_row(first + row, &mut wanted);
        for (col, wanted) in wanted.iter().enumerate() {
            let at = row * cols + col;
            let bits = numbers[at / 2] >> (at % 2 * 4) & 15;
            let sign = if bits < 8 { 1.0 } else { -1.0 };
            let scale = 2_f32.powi(i32::from(scales[at / 32]) - 127);
            assert_eq!(sign * VALUES[usize::from(bits & 7)] * scale, *wanted, "{weight:?}");
        }
    }
}

#[test]
fn stored_numbers_and_scales_give_the_values_of_rows() {
    let folder = tempfile::tempdir().unwrap();
    let stored = open(folder.path(), &fixture()).unwrap();
    let config = common::fixture("architectures/gpt_oss/config.json");
    let dummy = Checkpoint::open(config, LoadFormat::Dummy { seed: 1 }).unwrap();
    for checkpoint in [&stored, &dummy] {
        for part in [ExpertWeight::Gate, ExpertWeight::Up, ExpertWeight::Down] {
            check_stored(checkpoint, Weight::Layer(1, LayerWeight::Expert(4, part)));
        }
        let down = Weight::Layer(0, LayerWeight::Expert(1, ExpertWeight::Down));
        let down = checkpoint.matrix(down).unwrap();
        assert_eq!(down.part(0..8, 32..96).mxfp4_parts(), Some(1));
        assert_eq!(down.part(0..8, 0..48).mxfp4_parts(), None, "a group is cut");
        let query = checkpoint.matrix(Weight::Layer(0, LayerWeight::Query)).unwrap();
        assert_eq!(query.mxfp4_parts(), None);
    }
}

/// Half of an expert's width of 96 cuts a group of 32 columns of down.
#[test]
fn shards_that_cut_groups_have_the_values_of_the_whole() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = open(folder.path(), &fixture()).unwrap();
    let config = checkpoint.config();
    let weights = Weight::all(config).filter(|weight| {
        matches!(weight, Weight::Layer(_, LayerWeight::Expert(..) | LayerWeight::Sinks))
    });
    for weight in weights {
        let all = common::elements(&checkpoint, weight);
        let (rows, cols) = match weight.shape(config) {
            WeightShape::Vector { len } => (1, len),
            WeightShape::Matrix { rows, cols } => (rows, cols),
        };
        let mut covered = 0;
        for shard in Shard::new(0, 2).unwrap().all() {
            let WeightPart { rows: own_rows, cols: own_cols } = weight.part(config, shard);
            covered += own_rows.len() * own_cols.len();
            if rows == 1 {
                continue;
            }
            let part = checkpoint.matrix(weight).unwrap().part(own_rows.clone(), own_cols.clone());
            let mut found = vec![0.0; own_cols.len()];
            for row in 0..own_rows.len() {
                part.read_row(row, &mut found);
                let begin = (own_rows.start + row) * cols + own_cols.start;
                assert_eq!(found, all[begin..begin + own_cols.len()], "{weight:?}, {shard}");
            }
        }
        assert_eq!(covered, rows * cols, "{weight:?}");
    }
}

#[test]
fn fingerprint_and_stored_weights_cover_every_tensor_once() {
    let folder = || tempfile::tempdir().unwrap();
    let tensors = fixture();
    let (first, second) = (folder(), folder());
    let checkpoint = open(first.path(), &tensors).unwrap();
    let fingerprint = checkpoint.model_fingerprint().unwrap();
    let mut names: Vec<String> =
        checkpoint.stored_weights().unwrap().into_iter().map(|it| it.name).collect();
    names.sort();
    assert!(names.iter().eq(tensors.keys()), "{names:?}");
    for name in ["gate_up_proj_blocks", "down_proj_scales", "gate_up_proj_bias"] {
        let mut changed = tensors.clone();
        changed.get_mut(&format!("{EXPERTS}.{name}")).unwrap().2[5] ^= 1;
        let other = open(second.path(), &changed).unwrap();
        assert_ne!(other.model_fingerprint().unwrap(), fingerprint, "{name}");
    }
    let formats = checkpoint.matrix_formats();
    let mxfp4 = formats.iter().find(|it| it.name == "MXFP4 with a scale for each 32 of a row");
    assert_eq!(mxfp4.unwrap().matrices, 2 * 6 * 3);
}

#[test]
fn invalid_experts_and_sinks_are_refused_before_weights_are_read() {
    let (scales, blocks) =
        (format!("{EXPERTS}.down_proj_scales"), format!("{EXPERTS}.gate_up_proj_blocks"));
    let (sinks, bias) = ("model.layers.0.self_attn.sinks", format!("{EXPERTS}.down_proj_bias"));
    type Change = fn(&mut (Dtype, Vec<usize>, Vec<u8>));
    let cases: [(&str, Change, &str); 6] = [
        (&scales, |it| it.2[7] = 255, "has scale NaN at element 7; expected a finite number"),
        (&scales, |it| it.1 = vec![6, 3, 32], "has shape [6, 3, 32]; expected [6, 32, 3]"),
        (&blocks, |it| it.1 = vec![6, 192, 16], "has shape [6, 192, 16]; expected [6, 192, 1, 16]"),
        (
            &blocks,
            |it| it.0 = Dtype::I8,
            "has unsupported type I8; expected U8 with numbers in MXFP4",
        ),
        (&bias, |it| it.1 = vec![32, 6], "has shape [32, 6]; expected [6, 32]"),
        (sinks, |it| (it.1, it.2) = (vec![3], it.2[..6].to_vec()), "has shape [3]; expected [4]"),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (name, change, expected) in cases {
        let mut tensors = fixture();
        change(tensors.get_mut(name).unwrap());
        let error = open(folder.path(), &tensors).unwrap_err();
        assert!(error.contains(&format!("tensor {name:?}")), "{error}");
        assert!(error.contains(expected), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    for name in [&*scales, &blocks, &bias, sinks] {
        let mut tensors = fixture();
        tensors.remove(name);
        let error = open(folder.path(), &tensors).unwrap_err();
        assert!(error.contains(&format!("tensor {name:?} is missing; expected shape")), "{error}");
    }
    let mut tensors = fixture();
    let stray = tensors[&scales].clone();
    tensors.insert(format!("{EXPERTS}.router_scales"), stray);
    let error = open(folder.path(), &tensors).unwrap_err();
    assert!(error.contains("router_scales\" at file offset"), "{error}");
}
