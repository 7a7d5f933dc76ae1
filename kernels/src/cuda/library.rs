//! Baton's kernel library: one shared library, opened at run time and checked before use.

use std::{
    ffi::{CStr, c_char},
    marker::PhantomData,
    path::{Path, PathBuf},
    sync::Arc,
};

use libloading::Library;

use super::{
    context::Context,
    error::CudaError,
    ffi::{self, Functions},
};

/// The opened kernel library, whose ABI version and struct sizes match this program.
#[derive(Debug)]
pub struct KernelLibrary {
    path: PathBuf,
    build: String,
    functions: Functions,
    /// Keeps the code of `functions` loaded.
    library: Library,
}

impl KernelLibrary {
    const FILE: &str = "libbaton_kernels.so";

    /// Returns the path of the library in this program's folder, if the file exists.
    pub fn in_folder_of(program: &Path) -> Option<PathBuf> {
        let path = program.with_file_name(Self::FILE);
        path.exists().then_some(path)
    }

    /// Opens the library. Needs no GPU.
    ///
    /// # Errors
    /// When `path` has no library, or its interface differs from this program's.
    pub fn open(path: Option<&Path>) -> Result<Self, CudaError> {
        let path = path.ok_or(CudaError::KernelsNotNamed)?;
        let not_opened = |reason: &dyn std::fmt::Display| CudaError::KernelsNotOpened {
            path: path.to_owned(),
            reason: reason.to_string(),
        };
        // `dlopen` searches the system's folders for a bare file name, so the path is made
        // absolute.
        let full = path.canonicalize().map_err(|error| not_opened(&error))?;
        // SAFETY: the library's initializers are those of the C++ and CUDA runtimes.
        let library = unsafe { Library::new(&full) }.map_err(|error| not_opened(&error))?;
        // SAFETY: this function has this signature in every version of the library.
        let version = unsafe {
            library
                .get::<unsafe extern "C" fn() -> i32>(b"baton_abi_version\0")
                .map(|version| version())
        };
        let found = version.map_err(|error| not_opened(&error))?;
        let needed = ffi::ABI_VERSION;
        if found != needed {
            return Err(CudaError::KernelsVersion { path: path.to_owned(), found, needed });
        }
        // SAFETY: `ffi` has the signatures of this version, and `library` stays open below.
        let functions = unsafe { Functions::load(&library) }.map_err(|error| not_opened(&error))?;
        check_structs(&functions).map_err(|reason| not_opened(&reason))?;
        // SAFETY: the function returns a static string that ends with a zero.
        let build = unsafe { text((functions.baton_build_info)()) };
        Ok(Self { path: path.to_owned(), build, functions, library })
    }

    /// Returns the library's build information: source and GPU architectures.
    pub fn build(&self) -> &str {
        &self.build
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Loads every kernel onto the GPU, so that no later launch does. FlashInfer's kernels are
    /// loaded by their first launch.
    ///
    /// # Errors
    /// When the library has no code for this GPU.
    pub fn initialise(&self, context: &Context) -> Result<(), CudaError> {
        context.bind()?;
        // SAFETY: a context is current.
        match unsafe { (self.functions.baton_initialise)() } {
            ffi::UNSUPPORTED => Err(CudaError::KernelsArch {
                path: self.path.clone(),
                built: self.build.clone(),
                device: context.device().name.clone(),
                compute: context.device().compute,
            }),
            code => self.check("baton_initialise", code),
        }
    }

    /// Begins a profiler range of this thread, with a number. The range ends when the returned
    /// value is dropped.
    pub fn range(self: &Arc<Self>, name: &'static CStr, number: u64) -> TimeRange {
        // SAFETY: the name ends with a zero and is copied.
        unsafe { (self.functions.baton_range_push)(name.as_ptr(), number) };
        TimeRange { library: Arc::clone(self), _thread: PhantomData }
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    /// Returns the digest function of blocks, which must not be called after this library is
    /// dropped.
    pub(super) fn digest_lists(&self) -> Result<ffi::DigestLists, CudaError> {
        // SAFETY: the function has this signature in this version.
        unsafe { self.optional(b"baton_digest_lists\0") }
    }

    /// Returns the digest function of weights, which must not be called after this library is
    /// dropped.
    pub(super) fn digest_weight(&self) -> Result<ffi::DigestWeight, CudaError> {
        // SAFETY: the function has this signature in this version.
        unsafe { self.optional(b"baton_digest_weight\0") }
    }

    /// Returns a function that a library may lack.
    ///
    /// # Safety
    /// `F` is the signature of the function with this name.
    unsafe fn optional<F: Copy>(&self, name: &'static [u8]) -> Result<F, CudaError> {
        // SAFETY: `F` is the signature of the function with this name (`# Safety`).
        let found = unsafe { self.library.get::<F>(name) };
        found.map(|function| *function).map_err(|error| CudaError::KernelsNotOpened {
            path: self.path.clone(),
            reason: error.to_string(),
        })
    }

    /// Converts a function's return code to a result, with the library's own error text.
    pub(super) fn check(&self, call: &'static str, code: i32) -> Result<(), CudaError> {
        match code {
            0 => Ok(()),
            ffi::CUDA.. => Err(self.failed(call, code - ffi::CUDA)),
            code => Err(self.failed(call, code)),
        }
    }

    /// Returns the error of a function that does not return a code.
    pub(super) fn failure(&self, call: &'static str) -> CudaError {
        self.failed(call, ffi::INVALID)
    }

    fn failed(&self, call: &'static str, code: i32) -> CudaError {
        // SAFETY: the function returns this thread's own string, which ends with a zero and is
        // valid until the next failed call.
        let reason = unsafe { text((self.functions.baton_last_error)()) };
        CudaError::Call { call, code, reason }
    }
}

/// A profiler range begun by [`KernelLibrary::range`]. Ranges of a thread nest.
#[derive(Debug)]
#[must_use = "the range ends when it is dropped"]
pub struct TimeRange {
    library: Arc<KernelLibrary>,
    _thread: PhantomData<*const ()>,
}

impl Drop for TimeRange {
    fn drop(&mut self) {
        // SAFETY: this thread has begun a range.
        unsafe { (self.library.functions.baton_range_pop)() };
    }
}

/// Compares every struct's size, which detects a field that one side lacks.
fn check_structs(functions: &Functions) -> Result<(), String> {
    let ours = ffi::STRUCT_BYTES.map(|bytes| bytes as u32);
    let mut theirs = [0; ffi::STRUCT_BYTES.len()];
    // SAFETY: the function writes at most `theirs.len()` numbers.
    let count = unsafe { (functions.baton_struct_sizes)(theirs.as_mut_ptr(), theirs.len() as i32) };
    if count == ours.len() as i32 && theirs == ours {
        Ok(())
    } else {
        Err(format!("its structs have {theirs:?} bytes; expected {ours:?}"))
    }
}

/// Returns a library's string; empty for null.
///
/// # Safety
/// A non-null string ends with a zero and does not change during the call.
pub(super) unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: the string is not null, ends with a zero and does not change during the call (`#
    // Safety`).
    unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn library_is_found_in_the_programs_folder() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("baton-node");
        assert_eq!(KernelLibrary::in_folder_of(&program), None);
        let library = folder.path().join("libbaton_kernels.so");
        std::fs::write(&library, "").unwrap();
        assert_eq!(KernelLibrary::in_folder_of(&program), Some(library));
    }

    #[test]
    fn file_that_is_no_kernel_library_is_reported_with_its_path() {
        assert_eq!(KernelLibrary::open(None).unwrap_err(), CudaError::KernelsNotNamed);
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"not a library").unwrap();
        for path in [Path::new("/no/such/libbaton_kernels.so"), file.path()] {
            let error = KernelLibrary::open(Some(path)).unwrap_err().to_string();
            assert!(error.contains(&path.display().to_string()), "{error}");
            assert!(error.contains("make kernels"), "{error}");
        }
    }

    /// The sizes that the header states.
    #[test]
    fn struct_sizes_match_the_header() {
        assert_eq!(size_of::<ffi::SlotSampling>(), 64);
        assert_eq!(size_of::<ffi::SlotState>(), 16);
        assert_eq!(size_of::<ffi::PlanHeader>(), 64);
        assert_eq!(size_of::<ffi::PlanSequence>(), 16);
        assert_eq!(size_of::<ffi::PlanAdmission>(), 96);
        assert_eq!(size_of::<ffi::PlanRun>(), 20);
        assert_eq!(size_of::<ffi::SampleResult>(), 32);
        assert_eq!(size_of::<ffi::AttentionPlan>(), 184);
    }
}
