//! Weights lie on the GPU as their source has them, and KV takes what they leave.

use std::sync::atomic::{AtomicUsize, Ordering};

use engine::executor::{
    ExecutorLimits,
    cuda::{CudaExecutor, CudaExecutorError, CudaModel, KvShare},
};
use kernels::{
    Backend, Dtype, KvArena, RowSource, WeightFormat,
    cuda::{AttentionKind, CudaBackend, CudaOptions, DeviceKv},
};

use super::{
    bench::{Bench, DTYPES, gpu},
    model::checkpoint,
};

const COLS: usize = 72;

/// Small whole numbers, and a count of rows that were read.
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

/// One row, and as many as go through all buffers several times with a rest.
#[test]
fn every_row_arrives_whatever_the_size_of_the_matrix() {
    let Some(gpu) = gpu() else { return };
    for dtype in DTYPES {
        for rows in [8, 800_008] {
            let source = Numbered { rows, read: AtomicUsize::new(0) };
            let (mut backend, (matrix, mut x, mut out)) =
                gpu.backend(dtype, AttentionKind::Plain, |backend| {
                    (backend.matrix(&source), backend.buffer(1, COLS), backend.wide_buffer(1, rows))
                });
            assert_eq!(source.read.into_inner(), rows, "each is read once");
            // A column at a time.
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

#[test]
fn kv_takes_what_is_left_and_no_more() {
    let Some(gpu) = gpu() else { return };
    let checkpoint = checkpoint("LlamaForCausalLM", "llama");
    let layout = checkpoint.config().kv_layout(Dtype::Bf16);
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
    // Blocks of a small model are many: a share for which their number is no bound.
    let total = gpu.context.device().memory_bytes;
    let taken = gpu.context.free_bytes_at_first() - gpu.context.free_bytes().unwrap();
    let percent = (100 * (taken + (4 << 30))).div_ceil(total) as u32;
    let reserve = 256 << 20;
    let share = KvShare { percent, reserve };
    let blocks = model.kv_blocks(&limits(2), layout, share, 512).unwrap();
    let bytes = u64::from(blocks) * layout.block_bytes() as u64;
    assert!(bytes > 3 << 30 && taken + bytes <= total * u64::from(percent) / 100, "{bytes}");

    // What does not fit is said with what there is.
    let nothing = KvShare { percent: 1, reserve: total };
    let error = model.kv_blocks(&limits(2), layout, nothing, 512).unwrap_err();
    let CudaExecutorError::KvTooSmall { left, free, tokens, wanted } = error else {
        panic!("{error}")
    };
    assert_eq!((left, tokens), (0, 512));
    assert!(free > 0 && wanted == 33 * layout.block_bytes() as u64, "{free} {wanted}");

    let kv = DeviceKv::new(&gpu.context, layout, blocks).unwrap();
    let arena = KvArena::remote(kv.clone()).unwrap();
    let free = gpu.context.free_bytes().unwrap();
    let executor = CudaExecutor::start(model, kv, &arena, limits(blocks)).unwrap();
    let executor_bytes = free - gpu.context.free_bytes().unwrap();
    assert!(executor_bytes < reserve, "an executor took {executor_bytes} bytes");
    drop(executor);
}
