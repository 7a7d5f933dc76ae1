//! Errors of the GPU, the driver and the libraries. Each message says what to do.

use std::{fmt, path::PathBuf, time::Duration};

use cudarc::{
    cublaslt::result::CublasError,
    driver::{DriverError, sys},
};

/// A CUDA version in the driver's encoding: 13000 is 13.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion(pub i32);

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// An error of the CUDA backend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    #[error(
        "cannot load the CUDA driver: libcuda.so.1 is missing; install NVIDIA's driver, or serve on the CPU"
    )]
    NoDriver,
    #[error(
        "cannot use NVIDIA's driver: it supports CUDA {found}; expected {needed} or newer: install a newer driver"
    )]
    DriverTooOld { found: CudaVersion, needed: CudaVersion },
    #[error(
        "cannot start NVIDIA's driver ({code}): {reason}; check that its kernel module is loaded and \
         that this process may open /dev/nvidia*"
    )]
    DriverUnusable { code: i32, reason: String },
    #[error(
        "cannot find a GPU: the driver lists none; check the container's devices and CUDA_VISIBLE_DEVICES"
    )]
    NoDevice,
    #[error("cannot find GPU {wanted:?}; expected {found}")]
    NoSuchDevice { wanted: String, found: String },
    #[error(
        "cannot create a context on GPU {uuid} ({code}): {reason}; the GPU may be in exclusive mode or \
         out of memory: see nvidia-smi"
    )]
    DeviceBusy { uuid: String, code: i32, reason: String },
    #[error(
        "cannot allocate GPU memory for {what}: {wanted} bytes needed, {free} bytes free; use a smaller \
         model or KV cache, or stop other processes on the GPU"
    )]
    OutOfMemory { what: &'static str, wanted: u64, free: u64 },
    #[error("cannot allocate pinned host memory for {what}: the driver refused {wanted} bytes")]
    OutOfPinnedMemory { what: &'static str, wanted: u64 },
    #[error("cannot start the threads that load weights: {reason}")]
    NoThreads { reason: String },
    /// The memory that was counted at start does not suffice, which is a bug.
    #[error(
        "cannot reserve memory for {what}: {wanted} bytes needed, {left} bytes left in its range"
    )]
    RangeFull { what: &'static str, wanted: u64, left: u64 },
    #[error(
        "cannot load {name}: library missing; install CUDA's runtime libraries (in a Python environment: the \
         extra `cuda` of Baton's wheel), or add their folder to LD_LIBRARY_PATH"
    )]
    LibraryMissing { name: &'static str },
    #[error(
        "cannot load the kernel library: no path is configured; build it with `make kernels`, and set \
         node.kernels to its path or place it in the program's folder"
    )]
    KernelsNotNamed,
    #[error("cannot open the kernel library {}: {reason}; build it with `make kernels`", path.display())]
    KernelsNotOpened { path: PathBuf, reason: String },
    #[error(
        "cannot use the kernel library {}: its ABI version is {found}; expected {needed}: build it with \
         `make kernels` from the same source",
        path.display()
    )]
    KernelsVersion { path: PathBuf, found: i32, needed: i32 },
    #[error(
        "cannot use the kernel library {}: it is built for {built}; expected sm_{compute} for GPU \
         {device}: build it with `make kernels` for that architecture",
        path.display()
    )]
    KernelsArch { path: PathBuf, built: String, device: String, compute: u32 },
    /// A value that the kernels do not support.
    #[error("cannot run the kernels: {what} is {value}; expected {allowed}")]
    Unsupported { what: &'static str, value: String, allowed: &'static str },
    #[error("cannot use the arena of rank {rank}: it {reason}")]
    GroupArena { rank: usize, reason: String },
    /// All-reduce results are undefined until all ranks have reset their group.
    #[error(
        "cannot run the all-reduce: rank {rank} waited for the other ranks for longer than {timeout:?}, \
         or was stopped"
    )]
    GroupStopped { rank: usize, timeout: Duration },
    #[error(
        "cannot complete a copy between GPUs: still in flight after {waited:?}; see dmesg for errors of \
         the GPUs or their links"
    )]
    CopyStuck { waited: Duration },
    #[error(
        "cannot update the weights: copies of an earlier update did not end and may still write its memory; \
         expected a restart of the node"
    )]
    WeightsStuck,
    /// The call before this one failed and has lost the buffers.
    #[error("cannot use the GPU: an earlier call failed")]
    EarlierCallFailed,
    /// A failed call. After most of these errors the context is unusable.
    #[error("{call} failed ({code}): {reason}")]
    Call { call: &'static str, code: i32, reason: String },
}

impl CudaError {
    pub(super) fn driver(call: &'static str, error: DriverError) -> Self {
        Self::Call { call, code: error.0 as i32, reason: reason(error) }
    }

    pub(super) fn cublas(call: &'static str, error: CublasError) -> Self {
        Self::Call { call, code: error.0 as i32, reason: format!("{:?}", error.0) }
    }
}

/// Returns the driver's name and text of an error.
pub(super) fn reason(error: DriverError) -> String {
    let name = error.error_name().map(|name| name.to_string_lossy().into_owned());
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    match (name, text) {
        (Ok(name), Ok(text)) => format!("{name}, {text}"),
        _ => format!("{:?}", error.0),
    }
}

/// Extension of results that adds the name of the failed call to an error.
pub(super) trait Named<T> {
    fn named(self, call: &'static str) -> Result<T, CudaError>;
}

impl<T> Named<T> for Result<T, DriverError> {
    fn named(self, call: &'static str) -> Result<T, CudaError> {
        self.map_err(|error| CudaError::driver(call, error))
    }
}

impl<T> Named<T> for Result<T, CublasError> {
    fn named(self, call: &'static str) -> Result<T, CudaError> {
        self.map_err(|error| CudaError::cublas(call, error))
    }
}

impl Named<()> for sys::CUresult {
    fn named(self, call: &'static str) -> Result<(), CudaError> {
        self.result().named(call)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuda_version_is_shown_as_major_minor() {
        assert_eq!(CudaVersion(13000).to_string(), "13.0");
        assert_eq!(CudaVersion(12080).to_string(), "12.8");
    }

    #[test]
    fn out_of_memory_names_needed_and_free_bytes() {
        let error = CudaError::OutOfMemory { what: "the weights", wanted: 300, free: 200 };
        let text = error.to_string();
        assert!(
            text.contains("the weights: 300 bytes needed") && text.contains("200 bytes free"),
            "{text}"
        );
    }
}
