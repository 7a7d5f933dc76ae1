//! What can be wrong with a GPU and what lies around it. Each fault says what to do.

use std::{fmt, path::PathBuf, time::Duration};

use cudarc::{
    cublaslt::result::CublasError,
    driver::{DriverError, sys},
};

/// A version of CUDA, as the driver counts: 13000 is 13.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion(pub i32);

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// Why the GPU cannot be used, or no longer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    #[error(
        "no CUDA driver: libcuda.so.1 is not found; install NVIDIA's driver, or serve on the CPU"
    )]
    NoDriver,
    #[error(
        "NVIDIA's driver is for CUDA {found}, at least {needed} is needed; install a newer driver"
    )]
    DriverTooOld { found: CudaVersion, needed: CudaVersion },
    #[error(
        "NVIDIA's driver does not start ({code}): {reason}; check that its kernel module is loaded and \
         that this process may open /dev/nvidia*"
    )]
    DriverUnusable { code: i32, reason: String },
    #[error("the driver finds no GPU; check that the container or CUDA_VISIBLE_DEVICES shows one")]
    NoDevice,
    #[error("there is no GPU {wanted:?}; allowed are {found}")]
    NoSuchDevice { wanted: String, found: String },
    #[error(
        "GPU {uuid} gives this process no context ({code}): {reason}; it may be in exclusive use or \
         out of memory: see nvidia-smi"
    )]
    DeviceBusy { uuid: String, code: i32, reason: String },
    #[error(
        "{what} wants {wanted} bytes of the GPU's memory, {free} are free; take a smaller model or \
         less KV, or end what else runs there"
    )]
    OutOfMemory { what: &'static str, wanted: u64, free: u64 },
    #[error("{what} wants {wanted} bytes of pinned host memory, and the driver refused them")]
    OutOfPinnedMemory { what: &'static str, wanted: u64 },
    #[error("cannot start the threads that read weights: {reason}")]
    NoThreads { reason: String },
    /// What was planned before the start was less than what is used: a defect.
    #[error("{what} wants {wanted} bytes more, {left} of its range are left")]
    RangeFull { what: &'static str, wanted: u64, left: u64 },
    #[error(
        "{name} is not found; install CUDA's runtime libraries, or name their folder in \
         LD_LIBRARY_PATH"
    )]
    LibraryMissing { name: &'static str },
    #[error("no kernel library is configured; build it with `make kernels` and name it")]
    KernelsNotNamed,
    #[error("the kernel library {} cannot be opened: {reason}; build it with `make kernels`", path.display())]
    KernelsNotOpened { path: PathBuf, reason: String },
    #[error(
        "the kernel library {} has interface {found}, this program needs {needed}; build it with \
         `make kernels` from the same source",
        path.display()
    )]
    KernelsVersion { path: PathBuf, found: i32, needed: i32 },
    #[error(
        "the kernel library {} is built for {built}, the GPU {device} is sm_{compute}; build it with \
         `make kernels` for that",
        path.display()
    )]
    KernelsArch { path: PathBuf, built: String, device: String, compute: u32 },
    /// What the kernels cannot do for this model.
    #[error("{what} is {value}; the kernels have {allowed}")]
    Unsupported { what: &'static str, value: String, allowed: &'static str },
    #[error("the arena of rank {rank} {reason}")]
    GroupArena { rank: usize, reason: String },
    /// Until all ranks have reset their group, its sums are worthless.
    #[error(
        "the group of ranks has stopped: rank {rank} waited for the others for longer than \
         {timeout:?}, or was told to stop"
    )]
    GroupStopped { rank: usize, timeout: Duration },
    #[error(
        "a copy between GPUs has not ended after {waited:?}; see dmesg for faults of theirs or of \
         their links"
    )]
    CopyStuck { waited: Duration },
    /// A call failed. After most of these the context is of no more use.
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

/// The driver's own words.
pub(super) fn reason(error: DriverError) -> String {
    let name = error.error_name().map(|name| name.to_string_lossy().into_owned());
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    match (name, text) {
        (Ok(name), Ok(text)) => format!("{name}, {text}"),
        _ => format!("{:?}", error.0),
    }
}

/// Names the call that failed.
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
    fn versions_read_as_nvidia_writes_them() {
        assert_eq!(CudaVersion(13000).to_string(), "13.0");
        assert_eq!(CudaVersion(12080).to_string(), "12.8");
    }

    #[test]
    fn what_was_wanted_and_what_is_free_are_named() {
        let error = CudaError::OutOfMemory { what: "the weights", wanted: 300, free: 200 };
        let text = error.to_string();
        assert!(
            text.contains("the weights wants 300 bytes") && text.contains("200 are free"),
            "{text}"
        );
    }
}
