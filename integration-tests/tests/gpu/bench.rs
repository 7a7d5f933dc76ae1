//! Shared helpers of the GPU tests: access to the GPU, and one interface to the buffers of both
//! backends.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::available_parallelism,
};

use half::bf16;
use kernels::{
    Backend, BlockId, Dtype, KvArena, KvLayout, RowSource, WeightFormat,
    cpu::{CpuBackend, CpuBuffer, CpuOptions, Isa},
    cuda::{
        AttentionKind, Context, CudaBackend, CudaBuffer, CudaOptions, DeviceKv, Driver,
        KernelLibrary,
    },
};
use test_harness::skip;

/// Exclusive access to the GPU for one test at a time.
pub(crate) struct Gpu {
    pub context: Arc<Context>,
    pub library: Arc<KernelLibrary>,
    _alone: MutexGuard<'static, ()>,
}

/// Skips the running test because this machine lacks hardware or software that the test needs. With
/// `BATON_TEST_GPU=N` a test that needs at most N GPUs fails instead.
pub(crate) fn lacks(needed_gpus: usize, reason: &str) -> ! {
    let promised = std::env::var("BATON_TEST_GPU").map_or(0, |gpus| {
        gpus.parse::<usize>().unwrap_or_else(|_| {
            panic!("invalid BATON_TEST_GPU: {gpus}; expected the number of GPUs to test")
        })
    });
    assert!(
        needed_gpus > promised,
        "BATON_TEST_GPU={promised} forbids to skip this test: {reason}"
    );
    skip(reason)
}

/// Returns the number of GPUs. Skips the running test if there are fewer than `needed`.
pub(crate) fn require_gpus(needed: usize) -> usize {
    let wanted = if needed == 1 { "a GPU".to_owned() } else { format!("{needed} GPUs") };
    match Driver::open().and_then(|driver| driver.devices()) {
        Ok(devices) if devices.len() >= needed => devices.len(),
        Ok(devices) => lacks(needed, &format!("needs {wanted}, found {}", devices.len())),
        Err(error) => lacks(needed, &format!("needs {wanted}: {error}")),
    }
}

/// Opens the first GPU for one test at a time. Skips the running test if there is none.
pub(crate) fn gpu() -> Gpu {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    require_gpus(1);
    let opened = Driver::open().and_then(|driver| {
        let device = driver.device(None)?;
        let path = std::env::var_os("BATON_TEST_KERNELS").map(PathBuf::from);
        let library = Arc::new(KernelLibrary::open(path.as_deref())?);
        Ok(Gpu { context: Context::new(driver, device)?, library, _alone: alone })
    });
    opened.unwrap_or_else(|error| lacks(1, &error.to_string()))
}

/// Returns whether `BATON_TEST_SHORT` asks for few rounds.
pub(crate) fn short() -> bool {
    std::env::var_os("BATON_TEST_SHORT").is_some_and(|value| value == "1")
}

impl Gpu {
    /// Returns a backend and the buffers that `make` creates.
    pub(crate) fn backend<T>(
        &self,
        weights: impl Into<WeightFormat>,
        attention: AttentionKind,
        make: impl Fn(&CudaBackend) -> T,
    ) -> (CudaBackend, T) {
        self.backend_with(CudaOptions { attention, ..CudaOptions::new(weights.into()) }, make)
    }

    pub(crate) fn backend_with<T>(
        &self,
        options: CudaOptions,
        make: impl Fn(&CudaBackend) -> T,
    ) -> (CudaBackend, T) {
        let mut backend = CudaBackend::new(&self.context, self.library.clone(), options).unwrap();
        drop(make(&backend));
        backend.place().unwrap();
        let made = make(&backend);
        backend.finish_loading().unwrap();
        (backend, made)
    }

    pub(crate) fn kv(&self, layout: KvLayout, blocks: u32) -> (Arc<DeviceKv>, Arc<KvArena>) {
        let kv = DeviceKv::new(&self.context, layout, blocks).unwrap();
        let arena = KvArena::remote(kv.clone()).unwrap();
        (kv, arena)
    }
}

pub(crate) fn cpu(weights: impl Into<WeightFormat>) -> CpuBackend {
    // The CPU reference is unfused. The number of threads changes no bit.
    let threads = available_parallelism().unwrap().get();
    let options = CpuOptions { weights: weights.into(), threads, isa: Isa::Auto };
    CpuBackend::new(options).unwrap()
}

/// Buffer access that only tests need.
pub(crate) trait Bench: Backend {
    fn put(&self, buffer: &mut Self::Buffer, values: &[f32]);
    fn get(&self, buffer: &Self::Buffer, rows: usize) -> Vec<f32>;
    fn poison(&self, buffer: &mut Self::Buffer);
}

impl Bench for CpuBackend {
    fn put(&self, buffer: &mut CpuBuffer, values: &[f32]) {
        let rows = values.len() / buffer.width();
        buffer.rows_mut(rows).copy_from_slice(values);
    }

    fn get(&self, buffer: &CpuBuffer, rows: usize) -> Vec<f32> {
        buffer.rows(rows).to_vec()
    }

    fn poison(&self, buffer: &mut CpuBuffer) {
        let rows = buffer.rows_max();
        buffer.rows_mut(rows).fill(f32::NAN);
    }
}

impl Bench for CudaBackend {
    fn put(&self, buffer: &mut CudaBuffer, values: &[f32]) {
        self.write(buffer, values).unwrap();
    }

    fn get(&self, buffer: &CudaBuffer, rows: usize) -> Vec<f32> {
        self.read(buffer, rows).unwrap()
    }

    fn poison(&self, buffer: &mut CudaBuffer) {
        CudaBackend::poison(self, buffer).unwrap();
    }
}

/// Matrix of reproducible random values.
pub(crate) struct Random {
    pub rows: usize,
    pub cols: usize,
    pub seed: u32,
}

impl RowSource for Random {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        out.copy_from_slice(&numbers(
            self.seed.wrapping_mul(7919).wrapping_add(row as u32),
            self.cols,
        ));
    }
}

/// Returns reproducible values between -1 and 1 that bf16 represents exactly.
pub(crate) fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_add(1).wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32((state >> 8) as f32 / 8_388_608.0 - 1.0).to_f32()
    };
    (0..count).map(|_| next()).collect()
}

/// Returns the largest allowed difference, relative to 1 + the magnitude.
pub(crate) fn tolerance(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => 2e-5,
        Dtype::Bf16 => 2e-2,
    }
}

#[track_caller]
pub(crate) fn assert_near(found: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs() / (1.0 + expected.abs());
        // A comparison with NaN is false.
        let is_near = error <= tolerance;
        assert!(is_near, "{what}: element {index} is {found}, not {expected}");
    }
}

/// Returns distinct blocks in an order that depends on `first`.
pub(crate) fn blocks(first: u32, count: usize, all: u32) -> Vec<BlockId> {
    (0..count as u32).map(|i| BlockId((first + i * 7) % all)).collect()
}

pub(crate) const DTYPES: [Dtype; 2] = [Dtype::F32, Dtype::Bf16];
