//! Weight loading, KV cache sizing and GEMM tuning on the GPU.

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use engine::executor::{
    ExecutorLimits,
    cuda::{CudaExecutor, CudaExecutorError, CudaModel, KvShare},
};
use kernels::{
    Backend, Dtype, KvArena, KvFormat, RowSource, WeightFormat,
    cuda::{
        AttentionKind, CudaBackend, CudaOptions, DeviceKv, GemmShape, TuningSettings, row_steps,
    },
};

use super::{
    bench::{Bench, DTYPES, Gpu, Random, assert_near, gpu, numbers, tolerance},
    model::checkpoint,
};

const COLS: usize = 72;

/// Matrix of small integers. Counts how many rows were read.
struct Numbered {
    rows: usize,
    read: AtomicUsize,
}

impl Numbered {
    fn element(row: usize, col: usize) -> f32 {
        ((row * 31 + col * 7) % 251) as f32
    }
}

impl RowSource for Numbered {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        COLS
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        self.read.fetch_add(1, Ordering::Relaxed);
        out.iter_mut().enumerate().for_each(|(col, out)| *out = Self::element(row, col));
    }
}

/// Loads 8 rows, and enough rows that uploads reuse their pinned buffers.
pub(crate) fn weight_rows_of_any_matrix_size_load_correctly() {
    let gpu = gpu();
    for dtype in DTYPES {
        for rows in [8, 800_008] {
            let source = Numbered { rows, read: AtomicUsize::new(0) };
            let (mut backend, (matrix, mut x, mut out)) =
                gpu.backend(dtype, AttentionKind::Plain, |backend| {
                    (backend.matrix(&source), backend.buffer(1, COLS), backend.wide_buffer(1, rows))
                });
            assert_eq!(source.read.into_inner(), rows, "every row is read once");
            // The GEMM of a unit vector returns one column.
            for col in [0, 41, COLS - 1] {
                let mut one = [0.0; COLS];
                one[col] = 1.0;
                backend.put(&mut x, &one);
                backend.matmul(1, &x, &matrix, &mut out);
                let found = backend.get(&out, 1);
                let is_right = |(row, value): (usize, &f32)| *value == Numbered::element(row, col);
                let wrong = found.iter().enumerate().find(|&(row, value)| !is_right((row, value)));
                assert_eq!((found.len(), wrong), (rows, None), "{dtype} column {col}");
            }
        }
    }
}

pub(crate) fn kv_cache_fits_the_memory_share() {
    let gpu = gpu();
    let checkpoint = checkpoint("LlamaForCausalLM", "llama");
    let layout = checkpoint.config().block_layout(KvFormat::Bf16);
    let limits = |blocks| ExecutorLimits {
        slots: 8,
        step_tokens: 256,
        sequence_tokens: 512,
        blocks,
        depth: 2,
        vocabulary: checkpoint.config().vocab_size as u32,
        speculation: None,
    };
    let options = CudaOptions::new(WeightFormat::Bf16);
    let backend = CudaBackend::new(&gpu.context, gpu.library.clone(), options).unwrap();
    let model = CudaModel::load(&checkpoint, backend, &limits(2), &mut |_| ()).unwrap();
    // The share allows at least 4 GiB beyond the loaded model; the batch and the reserve take
    // little of it.
    let total = gpu.context.device().memory_bytes;
    let taken = gpu.context.taken_bytes();
    let percent = (100 * (taken + (4 << 30))).div_ceil(total) as u32;
    let reserve = 256 << 20;
    let share = KvShare { percent, reserve };
    let blocks = model.kv_blocks(&limits(2), layout, share, 512).unwrap();
    let bytes = u64::from(blocks) * layout.block_bytes() as u64;
    assert!(bytes > 3 << 30 && taken + bytes <= total * u64::from(percent) / 100, "{bytes}");

    // The error names the requested and the available memory.
    let nothing = KvShare { percent: 1, reserve: total };
    let error = model.kv_blocks(&limits(2), layout, nothing, 512).unwrap_err();
    let CudaExecutorError::KvTooSmall { left, free, tokens, wanted } = error else {
        panic!("{error}")
    };
    assert_eq!((left, tokens), (0, 512));
    assert!(free > 0 && wanted == 34 * layout.block_bytes() as u64, "{free} {wanted}");

    let kv = DeviceKv::new(&gpu.context, layout, blocks).unwrap();
    let arena = KvArena::remote(kv.clone()).unwrap();
    let free = gpu.context.free_bytes().unwrap();
    let executor = CudaExecutor::start(model, kv, &arena, limits(blocks)).unwrap();
    let executor_bytes = free - gpu.context.free_bytes().unwrap();
    assert!(executor_bytes < reserve, "an executor took {executor_bytes} bytes");
    drop(executor);
}

const INPUTS: usize = 520;
const OUTPUTS: usize = 1032;
const ROWS: usize = 300;

/// Returns the GEMM outputs for several numbers of rows. If `folder` is given, tunes the backend
/// with the tuning file there. Also returns how many shapes were found in this file and how many
/// were timed.
fn gemm_results(gpu: &Gpu, dtype: Dtype, folder: Option<&Path>) -> (Vec<Vec<f32>>, (usize, usize)) {
    let source = Random { rows: OUTPUTS, cols: INPUTS, seed: 3 };
    let (mut backend, (matrix, mut x, mut out)) =
        gpu.backend(dtype, AttentionKind::Plain, |backend| {
            let (x, out) = (backend.buffer(ROWS, INPUTS), backend.wide_buffer(ROWS, OUTPUTS));
            (backend.matrix(&source), x, out)
        });
    let mut counts = (0, 0);
    if let Some(folder) = folder {
        let shape = |rows| GemmShape::packed(rows, INPUTS, OUTPUTS, dtype, Dtype::F32);
        let tuning =
            TuningSettings { folder: Some(folder.to_owned()), within: Duration::from_secs(3600) };
        let tuned = backend.tune(row_steps(ROWS).into_iter().map(shape), &tuning).unwrap();
        assert_eq!((tuned.left, tuned.faults.len()), (0, 0), "{tuned:?}");
        counts = (tuned.known, tuned.times.len());
    }
    backend.put(&mut x, &numbers(9, ROWS * INPUTS));
    let results = [1, 3, 8, 33, 100, 129, ROWS].map(|rows| {
        Bench::poison(&backend, &mut out);
        backend.matmul(rows, &x, &matrix, &mut out);
        backend.get(&out, rows)
    });
    (results.into(), counts)
}

pub(crate) fn tuned_gemm_matches_untuned_and_is_timed_once() {
    let gpu = gpu();
    for dtype in DTYPES {
        let folder = tempfile::tempdir().unwrap();
        let (wanted, _) = gemm_results(&gpu, dtype, None);
        let (found, (known, timed)) = gemm_results(&gpu, dtype, Some(folder.path()));
        assert_eq!((known, timed), (0, row_steps(ROWS).len()));
        let (again, counts) = gemm_results(&gpu, dtype, Some(folder.path()));
        assert_eq!(counts, (timed, 0), "the second start tunes again");
        for ((found, again), wanted) in found.iter().zip(&again).zip(&wanted) {
            assert_near(found, wanted, tolerance(dtype), "tuned");
            assert!(found == again, "equal algorithms give different results");
        }
    }
}

/// The backend checks the algorithms in a tuning file before use.
pub(crate) fn invalid_gemm_algorithm_is_not_used() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let (wanted, _) = gemm_results(&gpu, Dtype::Bf16, Some(folder.path()));
    let file = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let text = fs::read_to_string(&file).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines.pop();
    for line in &mut lines[2..] {
        let words: Vec<&str> = line.split(' ').collect();
        *line = format!("{}{}", words[..7].join(" "), " ffffffffffffffff".repeat(8));
    }
    let body = lines.join("\n") + "\n";
    // FNV-1a, the checksum of a tuning file.
    let sum = body.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    fs::write(&file, format!("{body}{sum:016x}\n")).unwrap();
    let (found, (known, timed)) = gemm_results(&gpu, Dtype::Bf16, Some(folder.path()));
    assert_eq!((known, timed), (row_steps(ROWS).len(), 0), "a shape is missing in the tuning file");
    for (found, wanted) in found.iter().zip(&wanted) {
        assert_near(found, wanted, tolerance(Dtype::Bf16), "without the algorithms of the file");
    }
}
