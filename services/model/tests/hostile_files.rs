//! Files of every format that end early or contain false sizes, opened in a process with a memory
//! limit. Each gives a result or an error, never a panic, and never an allocation of a falsely
//! claimed size.

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use common::{Element, Entry};
use kernels::RowSource;
use model::{Checkpoint, LoadFormat, Weight, WeightShape};
use proptest::{prelude::*, sample::Index};
use serde_json::{Value, json};

/// Name of the helper that runs [`damaged_files_open_or_fail_within_the_memory_limit`].
const LIMITED_HELPER: &str = "limited";

/// Address space of the child process in KiB. Program, threads, allocator and the largest fixture
/// need a quarter of it; the smallest false size below claims 16 times as much.
const LIMIT_KIB: u64 = 1 << 20;

/// Time-out, far above the time on a loaded machine.
const WITHIN: Duration = Duration::from_secs(600);

/// False sizes that no file here has; multiplied by an element size each is absurd or overflows.
const LIES: [u64; 8] = [
    u64::MAX,
    u64::MAX / 2,
    1 << 62,
    (1 << 61) + 1,
    1 << 40,
    1 << 34,
    (1 << 32) | 1,
    u32::MAX as u64,
];

fn damaged_files_give_errors_within_a_memory_limit() {
    let helper = test_harness::helper(LIMITED_HELPER);
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "ulimit -v \"$1\" && exec \"$0\""])
        .arg(helper.get_program())
        .arg(LIMIT_KIB.to_string())
        .envs(helper.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = test_harness::output_within(&mut shell, WITHIN);
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
}

/// Damage to a file.
#[derive(Clone, Debug)]
enum Damage {
    Cut(Index),
    /// Eight bytes in the first part of the file, where sizes are, become a false size.
    Lie {
        at: Index,
        lie: u64,
    },
    /// Four bytes become a false size.
    ShortLie {
        at: Index,
        lie: u32,
    },
    Byte {
        at: Index,
        value: u8,
    },
}

fn damage() -> impl Strategy<Value = Vec<Damage>> {
    let at = any::<Index>;
    let lie = prop_oneof![prop::sample::select(LIES.to_vec()), any::<u64>()];
    let one = prop_oneof![
        at().prop_map(Damage::Cut),
        (at(), lie).prop_map(|(at, lie)| Damage::Lie { at, lie }),
        (at(), prop_oneof![Just(u32::MAX), Just(1 << 31), any::<u32>()])
            .prop_map(|(at, lie)| Damage::ShortLie { at, lie }),
        (at(), any::<u8>()).prop_map(|(at, value)| Damage::Byte { at, value }),
    ];
    prop::collection::vec(one, 1..4)
}

impl Damage {
    fn apply(&self, bytes: &mut Vec<u8>) {
        // The models' headers are shorter than this.
        let front = bytes.len().min(3000);
        match self {
            _ if bytes.len() < 16 => {}
            Damage::Cut(at) => bytes.truncate(at.index(bytes.len())),
            Damage::Lie { at, lie } => {
                let at = at.index(front - 8);
                bytes[at..at + 8].copy_from_slice(&lie.to_le_bytes());
            }
            Damage::ShortLie { at, lie } => {
                let at = at.index(front - 4);
                bytes[at..at + 4].copy_from_slice(&lie.to_le_bytes());
            }
            Damage::Byte { at, value } => bytes[at.index(front)] = *value,
        }
    }
}

/// Copies of small models: one path to open for each, and the files to damage.
struct Models {
    _folder: tempfile::TempDir,
    models: Vec<(PathBuf, Vec<PathBuf>)>,
}

impl Models {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut models = Vec::new();
        for name in ["llama3", "qwen2", "qwen3"] {
            let to = folder.path().join(name);
            fs::create_dir(&to).unwrap();
            for file in ["model.gguf", "model.safetensors", "config.json"] {
                let from = common::fixture("architectures").join(name).join(file);
                fs::copy(from, to.join(file)).unwrap();
            }
            models.push((to.join("model.gguf"), vec![to.join("model.gguf")]));
            let files = ["model.safetensors", "config.json"].map(|file| to.join(file));
            models.push((to, files.into()));
        }
        let dummy = common::tiny_llama3();
        let sharded = folder.path().join("sharded");
        fs::create_dir(&sharded).unwrap();
        let tensors = common::hugging_face_tensors(&dummy, Element::Bf16);
        common::write_folder(&sharded, &tensors, 2);
        let index = sharded.join("model.safetensors.index.json");
        models
            .push((sharded.clone(), vec![index, sharded.join("model-00002-of-00002.safetensors")]));

        let tensors = common::gguf_tensors(&dummy, Element::Bf16);
        let parts: Vec<PathBuf> =
            (1..3).map(|part| folder.path().join(format!("t-{part:05}-of-00002.gguf"))).collect();
        for (number, tensors) in (0..).zip([&tensors[..9], &tensors[9..]]) {
            let split =
                [("split.no", Some(Entry::U32(number))), ("split.count", Some(Entry::U32(2)))];
            let bytes = common::gguf_with(dummy.config(), tensors, &split);
            fs::write(&parts[number as usize], bytes).unwrap();
        }
        models.push((parts[0].clone(), parts));
        for (path, _) in &models {
            read_everything(path).unwrap();
        }
        Self { _folder: folder, models }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(3000) })]

    /// Runs in a helper process that has a memory limit.
    fn damaged_files_open_or_fail_within_the_memory_limit(
        which in any::<Index>(),
        file in any::<Index>(),
        damage in damage(),
        key in any::<Index>(),
        lie in prop_oneof![prop::sample::select(LIES.to_vec()), 0_u64..100_000],
    ) {
        thread_local! {
            static MODELS: Models = Models::new();
        }
        MODELS.with(|models| {
            let (path, files) = which.get(&models.models);
            let file = file.get(files);
            let good = fs::read(file).unwrap();
            let bad = match file.ends_with("config.json") {
                true => lie_in_json(&good, key, lie),
                false => {
                    let mut bad = good.clone();
                    damage.iter().for_each(|damage| damage.apply(&mut bad));
                    bad
                }
            };
            fs::write(file, bad).unwrap();
            drop(read_everything(path));
            fs::write(file, good).unwrap();
        });
    }
}

/// Replaces one number of the configuration by a false one.
fn lie_in_json(file: &[u8], key: Index, lie: u64) -> Vec<u8> {
    let mut config: Value = serde_json::from_slice(file).unwrap();
    let numbers: Vec<String> = config
        .as_object()
        .unwrap()
        .iter()
        .filter(|(_, value)| value.is_number())
        .map(|(key, _)| key.clone())
        .collect();
    config[key.get(&numbers)] = json!(lie);
    config.to_string().into_bytes()
}

/// Opens a model and reads all of it, with its own weights and, row by row, with random ones.
fn read_everything(path: &Path) -> Result<(), model::ModelError> {
    if let Ok(dummy) = Checkpoint::open(path, LoadFormat::Dummy { seed: 1 }) {
        let first = Weight::all(dummy.config()).next().unwrap();
        let matrix = dummy.matrix(first).unwrap();
        matrix.read_row(matrix.rows() - 1, &mut vec![0.0; matrix.cols()]);
        assert!(dummy.config().rope_frequencies().iter().all(|frequency| frequency.is_finite()));
    }
    let checkpoint = Checkpoint::open(path, LoadFormat::Auto)?;
    for weight in Weight::all(checkpoint.config()) {
        match weight.shape(checkpoint.config()) {
            WeightShape::Vector { .. } => drop(checkpoint.vector(weight)),
            WeightShape::Matrix { .. } => drop(common::elements(&checkpoint, weight)),
        }
    }
    Ok(())
}

fn main() -> std::process::ExitCode {
    let tests = test_harness::tests![damaged_files_give_errors_within_a_memory_limit,];
    test_harness::main(
        &[(LIMITED_HELPER, damaged_files_open_or_fail_within_the_memory_limit)],
        tests,
    )
}
