//! Our own kernels: one shared library, opened at run time and checked before it is used.

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

/// The opened library, whose interface is this program's.
#[derive(Debug)]
pub struct KernelLibrary {
    path: PathBuf,
    build: String,
    functions: Functions,
    /// Keeps `functions` in place.
    library: Library,
}

impl KernelLibrary {
    const FILE: &str = "libbaton_kernels.so";

    /// Where it lies beside this program, if it does.
    pub fn beside(program: &Path) -> Option<PathBuf> {
        let path = program.with_file_name(Self::FILE);
        path.exists().then_some(path)
    }

    /// Opens it. Needs no GPU: nothing is asked of one.
    ///
    /// # Errors
    /// When there is none at `path`, or it has another interface than this program.
    pub fn open(path: Option<&Path>) -> Result<Self, CudaError> {
        let path = path.ok_or(CudaError::KernelsNotNamed)?;
        let not_opened = |reason: &dyn std::fmt::Display| CudaError::KernelsNotOpened {
            path: path.to_owned(),
            reason: reason.to_string(),
        };
        // A bare file name would be searched for in the system's folders.
        let full = path.canonicalize().map_err(|error| not_opened(&error))?;
        // SAFETY: the library's initialisers are those of the C++ and CUDA runtimes.
        let library = unsafe { Library::new(&full) }.map_err(|error| not_opened(&error))?;
        // SAFETY: a library that has this function has it with this signature in every version.
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
        // SAFETY: of this version the signatures are those of `ffi`; the library is kept open below.
        let functions = unsafe { Functions::load(&library) }.map_err(|error| not_opened(&error))?;
        check_structs(&functions).map_err(|reason| not_opened(&reason))?;
        // SAFETY: it gives a string of its own, which never changes and ends with a zero.
        let build = unsafe { text((functions.baton_build_info)()) };
        Ok(Self { path: path.to_owned(), build, functions, library })
    }

    /// What it was built of and for.
    pub fn build(&self) -> &str {
        &self.build
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Loads every kernel onto the GPU, so that no later call does.
    ///
    /// # Errors
    /// When it holds no code for this GPU.
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

    /// A range of this thread's time, which profilers show with its number; it lasts until it is dropped.
    pub fn range(self: &Arc<Self>, name: &'static CStr, number: u64) -> TimeRange {
        // SAFETY: the name ends with a zero, and is copied.
        unsafe { (self.functions.baton_range_push)(name.as_ptr(), number) };
        TimeRange { library: Arc::clone(self), _thread: PhantomData }
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    /// What digests blocks; not to be called once this is gone.
    pub(super) fn digest_blocks(&self) -> Result<ffi::DigestBlocks, CudaError> {
        // SAFETY: of this version the function has this signature.
        let found = unsafe { self.library.get::<ffi::DigestBlocks>(b"baton_digest_blocks\0") };
        found.map(|function| *function).map_err(|error| CudaError::KernelsNotOpened {
            path: self.path.clone(),
            reason: error.to_string(),
        })
    }

    /// What a function answered, with the library's own words where it is a fault.
    pub(super) fn check(&self, call: &'static str, code: i32) -> Result<(), CudaError> {
        match code {
            0 => Ok(()),
            ffi::CUDA.. => Err(self.failed(call, code - ffi::CUDA)),
            code => Err(self.failed(call, code)),
        }
    }

    /// The fault of a function that answers with something else than a code.
    pub(super) fn failure(&self, call: &'static str) -> CudaError {
        self.failed(call, ffi::INVALID)
    }

    fn failed(&self, call: &'static str, code: i32) -> CudaError {
        // SAFETY: it gives this thread's own string, which ends with a zero and lasts until the next
        // failed call.
        let reason = unsafe { text((self.functions.baton_last_error)()) };
        CudaError::Call { call, code, reason }
    }
}

/// What [`KernelLibrary::range`] began. Ranges end in the order opposite to that in which they began,
/// on their thread.
#[derive(Debug)]
#[must_use = "it ends when it is dropped"]
pub struct TimeRange {
    library: Arc<KernelLibrary>,
    _thread: PhantomData<*const ()>,
}

impl Drop for TimeRange {
    fn drop(&mut self) {
        // SAFETY: one was begun on this thread.
        unsafe { (self.library.functions.baton_range_pop)() };
    }
}

/// Compares every struct's size: a field that was added on one side only is found here.
fn check_structs(functions: &Functions) -> Result<(), String> {
    let ours = ffi::STRUCT_BYTES.map(|bytes| bytes as u32);
    let mut theirs = [0; ffi::STRUCT_BYTES.len()];
    // SAFETY: it writes at most as many numbers as there is room for.
    let count = unsafe { (functions.baton_struct_sizes)(theirs.as_mut_ptr(), theirs.len() as i32) };
    if count == ours.len() as i32 && theirs == ours {
        Ok(())
    } else {
        Err(format!("its structs have {theirs:?} bytes, this program's {ours:?}"))
    }
}

/// What a library says; nothing where it gives no string.
///
/// # Safety
/// The string, if there is one, ends with a zero, and lasts and stays as it is during the call.
pub(super) unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn it_is_found_beside_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("baton-node");
        assert_eq!(KernelLibrary::beside(&program), None);
        let library = folder.path().join("libbaton_kernels.so");
        std::fs::write(&library, "").unwrap();
        assert_eq!(KernelLibrary::beside(&program), Some(library));
    }

    #[test]
    fn what_is_no_kernel_library_is_said_with_its_path() {
        assert_eq!(KernelLibrary::open(None).unwrap_err(), CudaError::KernelsNotNamed);
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"not a library").unwrap();
        for path in [Path::new("/no/such/libbaton_kernels.so"), file.path()] {
            let error = KernelLibrary::open(Some(path)).unwrap_err().to_string();
            assert!(error.contains(&path.display().to_string()), "{error}");
            assert!(error.contains("make kernels"), "{error}");
        }
    }

    /// What the header says of them.
    #[test]
    fn structs_have_the_sizes_that_the_header_states() {
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
