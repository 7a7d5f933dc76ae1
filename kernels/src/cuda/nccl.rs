//! Loader of NCCL's functions and their parameter types.

mod communicator;

use std::{
    env,
    error::Error,
    ffi::{CStr, OsStr, c_char, c_int, c_void},
    fmt, fs,
    path::{Path, PathBuf},
    ptr,
    sync::Arc,
    time::Duration,
};

use libloading::Library;

pub use self::communicator::{Communicator, CommunicatorOptions, Piece, SendOrReceive};
use super::{error::CudaError, library::text, packages};

/// NCCL's file name.
const SONAME: &str = "libnccl.so.2";
/// Folders that the system loader's cache may lack.
const FOLDERS: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
    "/usr/local/nvidia/lib64",
];
/// The oldest version that accepts all of [`NcclConfig`].
const OLDEST: NcclVersion = NcclVersion(21800);
/// Newest supported major version. Later versions may have other functions.
const NEWEST_MAJOR: i32 = 2;
/// Environment variable of every process that uses NCCL. It turns NVLink multicast off, because a
/// program that crashes while using multicast can take a host's GPUs out of service.
pub const NCCL_ENVIRONMENT: (&str, &str) = ("NCCL_NVLS_ENABLE", "0");
/// Environment variable of a process that transfers KV by NCCL: more hardware queues than the
/// driver's default of 8. Streams that share a queue wait for each other, so a stuck operation of
/// one pair would block another pair. Each queue costs about 50 ms per GPU at process start and
/// end, so this is not the maximum of 32.
const QUEUES: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "16");

fn environment_is_ours(found: Option<&OsStr>) -> Result<(), NcclError> {
    if found == Some(OsStr::new(NCCL_ENVIRONMENT.1)) {
        return Ok(());
    }
    let found = found.map(|value| value.to_string_lossy().into_owned());
    Err(NcclError::Environment { found: found.unwrap_or_default() })
}

/// Sets [`NCCL_ENVIRONMENT`] in this process, and with `has_queues` the number of hardware queues
/// unless it is set already. Call it before other threads start, because they might read the
/// environment. If other threads run, the function only checks the environment.
pub fn set_nccl_environment(has_queues: bool) -> Result<(), NcclError> {
    let (name, value) = NCCL_ENVIRONMENT;
    let checked = environment_is_ours(env::var_os(name).as_deref());
    let wants_queues = has_queues && env::var_os(QUEUES.0).is_none();
    let threads = fs::read_dir("/proc/self/task").map_or(usize::MAX, Iterator::count);
    if threads != 1 {
        return checked;
    }
    // SAFETY: no other thread exists that could read the environment.
    unsafe { env::set_var(name, value) };
    if wants_queues {
        // SAFETY: no other thread exists that could read the environment; `set_var` above has
        // started none.
        unsafe { env::set_var(QUEUES.0, QUEUES.1) };
    }
    Ok(())
}

/// Version in NCCL's encoding: 21809 is 2.18.9.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NcclVersion(pub i32);

impl NcclVersion {
    fn major(self) -> i32 {
        // Versions before 2.9 have two digits less.
        if self.0 < 10_000 { self.0 / 1000 } else { self.0 / 10_000 }
    }
}

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, unit) = (self.major(), if self.0 < 10_000 { 1000 } else { 10_000 });
        write!(f, "{major}.{}.{}", self.0 % unit / 100, self.0 % 100)
    }
}

/// Errors of NCCL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NcclError {
    #[error(
        "cannot find NCCL: tried {}; install it, or name its folder in LD_LIBRARY_PATH",
        tried.join("; ")
    )]
    NotFound { tried: Vec<String> },
    #[error(
        "cannot use {}: it is NCCL {found}; expected {OLDEST} or a later version {NEWEST_MAJOR}",
        path.display()
    )]
    Version { path: PathBuf, found: NcclVersion },
    #[error("cannot use {} as NCCL: {reason}", path.display())]
    Functions { path: PathBuf, reason: String },
    #[error(
        "invalid environment variable {}: {found:?}; expected {:?}, set before the process starts",
        NCCL_ENVIRONMENT.0,
        NCCL_ENVIRONMENT.1
    )]
    Environment { found: String },
    #[error("invalid rank: {rank} of {ranks}; expected a rank below a count of at least 2")]
    Rank { rank: u32, ranks: u32 },
    #[error(
        "invalid CTAs of a communicator: {least} to {most}; expected an ascending range within 1 to 64"
    )]
    Ctas { least: u32, most: u32 },
    #[error("invalid peer: {peer} for rank {rank} of {ranks}; expected one of the other ranks")]
    Peer { peer: u32, rank: u32, ranks: u32 },
    #[error("{call} timed out after {waited:?}: a peer is missing or does not answer")]
    TimedOut { call: &'static str, waited: Duration },
    #[error("{call} was cancelled after {waited:?}")]
    Cancelled { call: &'static str, waited: Duration },
    /// The aborting thread keeps waiting. The memory of the communicator's operations stays in use.
    #[error("the abort of a communicator timed out after {waited:?}")]
    AbortStuck { waited: Duration },
    #[error("the communicator was aborted")]
    Ended,
    #[error("operation {sequence} failed on this communicator; create a new one")]
    Broken { sequence: u64 },
    #[error("{call} failed ({code}): {reason}")]
    Call { call: &'static str, code: i32, reason: String },
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

type RawCommunicator = *mut c_void;
type RawStream = *mut c_void;

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
const UINT8: c_int = 1;
const FLOAT32: c_int = 7;
const BFLOAT16: c_int = 9;
const SUM: c_int = 0;

/// Id of a communicator: one rank creates the id, and all ranks use it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // It contains an address and a secret.
        f.write_str("UniqueId")
    }
}

/// `ncclConfig_t` of [`OLDEST`]. Newer versions have more fields at the end and detect by version
/// and size that they are missing.
#[repr(C)]
pub(super) struct NcclConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;

functions! {
    ncclGetUniqueId: fn(*mut UniqueId) -> c_int;
    ncclCommInitRankConfig:
        fn(*mut RawCommunicator, c_int, UniqueId, c_int, *mut NcclConfig) -> c_int;
    ncclCommGetAsyncError: fn(RawCommunicator, *mut c_int) -> c_int;
    ncclCommAbort: fn(RawCommunicator) -> c_int;
    ncclGetErrorString: fn(c_int) -> *const c_char;
    ncclGetLastError: fn(RawCommunicator) -> *const c_char;
    ncclGroupStart: fn() -> c_int;
    ncclGroupEnd: fn() -> c_int;
    ncclSend: fn(u64, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
    ncclRecv: fn(u64, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
    ncclBroadcast: fn(u64, u64, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
    ncclAllReduce: fn(u64, u64, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
}

/// The opened library.
#[derive(Debug)]
pub struct Nccl {
    path: PathBuf,
    version: NcclVersion,
    functions: Functions,
    /// Keeps `functions` in place.
    _library: Library,
}

impl Nccl {
    /// Opens the file, or without a path the library that [`open_first`] finds. Needs no GPU.
    /// Needs [`NCCL_ENVIRONMENT`], because NCCL reads that setting from the environment only.
    pub fn open(file: Option<&Path>) -> Result<Arc<Self>, NcclError> {
        let library = open_first(file)?;
        // SAFETY: the function has this signature in every version of NCCL.
        let asked = unsafe {
            library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion\0").map(
                |function| {
                    let mut version = 0;
                    // The function's address tells which file was opened.
                    (function(&mut version), version, file_of(*function as *const c_void))
                },
            )
        };
        let no_nccl = |path: Option<PathBuf>, reason: String| NcclError::Functions {
            path: path.or(file.map(Path::to_owned)).unwrap_or_else(|| SONAME.into()),
            reason,
        };
        let (code, version, path) = asked.map_err(|error| no_nccl(None, loader_message(&error)))?;
        if code != SUCCESS {
            return Err(no_nccl(path, format!("ncclGetVersion failed ({code})")));
        }
        let version = NcclVersion(version);
        let path = path.or(file.map(Path::to_owned)).unwrap_or_else(|| SONAME.into());
        if version < OLDEST || version.major() != NEWEST_MAJOR {
            return Err(NcclError::Version { path, found: version });
        }
        // SAFETY: the version was checked, so the signatures are those above; the library is kept
        // open below.
        let functions = unsafe { Functions::load(&library) }
            .map_err(|error| no_nccl(Some(path.clone()), loader_message(&error)))?;
        // Checked before the first call that reads the environment.
        environment_is_ours(env::var_os(NCCL_ENVIRONMENT.0).as_deref())?;
        Ok(Arc::new(Self { path, version, functions, _library: library }))
    }

    /// Returns the opened file, with links resolved.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn version(&self) -> NcclVersion {
        self.version
    }

    /// Creates the id of a new communicator. One rank creates it and sends it to the others.
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the call writes 128 bytes.
        let code = unsafe { (self.functions.ncclGetUniqueId)(&mut id) };
        self.check("ncclGetUniqueId", code, ptr::null_mut()).map(|()| id)
    }

    fn check(
        &self,
        call: &'static str,
        code: c_int,
        communicator: RawCommunicator,
    ) -> Result<(), NcclError> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: both return static zero-terminated strings. The communicator is alive or null.
        let words = unsafe {
            [
                (self.functions.ncclGetErrorString)(code),
                (self.functions.ncclGetLastError)(communicator),
            ]
            .map(|string| text(string))
        };
        let [kind, detail] = words;
        let reason = if detail.is_empty() { kind } else { format!("{kind}: {detail}") };
        Err(NcclError::Call { call, code, reason })
    }
}

/// Returns whether NCCL can be loaded.
pub fn has_nccl() -> bool {
    open_first(None).is_ok()
}

/// Opens the file, or without a path the first NCCL of the system's loader, of usual folders and of
/// Python packages.
fn open_first(file: Option<&Path>) -> Result<Library, NcclError> {
    let usual = FOLDERS.iter().map(|folder| Path::new(folder).join(SONAME));
    let usual = usual.chain(packages::of_this_environment("nccl/lib/libnccl.so.2"));
    let candidates: Vec<PathBuf> = match file {
        Some(file) => vec![file.to_owned()],
        // For a bare name the system's loader searches its own folders.
        None => [SONAME.into()].into_iter().chain(usual.filter(|path| path.exists())).collect(),
    };
    let mut tried = Vec::new();
    for candidate in candidates {
        // SAFETY: NCCL's initializers only read NCCL's settings.
        match unsafe { Library::new(&candidate) } {
            Ok(library) => return Ok(library),
            Err(error) => {
                tried.push(format!("{} ({})", candidate.display(), loader_message(&error)))
            }
        }
    }
    Err(NcclError::NotFound { tried })
}

/// Returns the file that contains a function.
fn file_of(function: *const c_void) -> Option<PathBuf> {
    // SAFETY: the type is four addresses, which may be null.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the call looks the address up and writes the four fields.
    if unsafe { libc::dladdr(function, &mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader owns the string, which is valid while the library is open.
    let name = unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned();
    Path::new(&name).canonicalize().ok()
}

/// Returns the loader's message, which is the error's source.
fn loader_message(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use std::{io::Write, thread};

    use super::*;

    #[test]
    fn nccl_versions_are_formatted_as_by_nvidia() {
        for (number, words) in [(22809, "2.28.9"), (21800, "2.18.0"), (2804, "2.8.4")] {
            assert_eq!(NcclVersion(number).to_string(), words);
        }
        assert!(NcclVersion(2804) < OLDEST && NcclVersion(30100).major() != NEWEST_MAJOR);
    }

    #[test]
    fn library_that_cannot_be_opened_is_named() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"not a library").unwrap();
        for path in [Path::new("/no/such/libnccl.so.2"), file.path()] {
            let error = Nccl::open(Some(path)).unwrap_err();
            assert!(matches!(error, NcclError::NotFound { .. }), "{error:?}");
            assert!(error.to_string().contains(&path.display().to_string()), "{error}");
            assert!(error.to_string().contains("LD_LIBRARY_PATH"), "{error}");
        }
        let unlike =
            NcclError::Version { path: "/opt/libnccl.so.2".into(), found: NcclVersion(2804) };
        let words =
            "cannot use /opt/libnccl.so.2: it is NCCL 2.8.4; expected 2.18.0 or a later version 2";
        assert_eq!(unlike.to_string(), words);
    }

    /// Opens a library that is not NCCL.
    #[test]
    fn library_without_nccl_symbols_is_rejected() {
        let error = Nccl::open(Some(Path::new("libc.so.6"))).unwrap_err();
        assert!(
            matches!(&error, NcclError::Functions { path, .. } if path == Path::new("libc.so.6"))
        );
        assert!(error.to_string().contains("ncclGetVersion"), "{error}");
    }

    #[test]
    fn conflicting_nccl_environment_is_rejected_by_name_and_value() {
        assert_eq!(environment_is_ours(Some(OsStr::new("0"))), Ok(()));
        for (found, named) in [(None, "NCCL_NVLS_ENABLE: \"\""), (Some("2"), ": \"2\"")] {
            let error = environment_is_ours(found.map(OsStr::new)).unwrap_err().to_string();
            assert!(error.contains(named) && error.contains("expected \"0\""), "{error}");
        }
    }

    #[test]
    fn nccl_environment_is_not_set_while_other_threads_run() {
        let found = || [NCCL_ENVIRONMENT, QUEUES].map(|(name, _)| env::var_os(name));
        let before = found();
        let set = || set_nccl_environment(true);
        let set = thread::scope(|scope| scope.spawn(set).join().unwrap());
        assert_eq!(set, environment_is_ours(before[0].as_deref()));
        assert_eq!(found(), before);
    }

    /// Compiles a library that reports the given version.
    fn stand_in(folder: &Path, version: i32) -> Option<PathBuf> {
        let (source, library) = (folder.join("nccl.c"), folder.join(SONAME));
        let code = format!("int ncclGetVersion(int *to) {{ *to = {version}; return 0; }}\n");
        fs::write(&source, code).unwrap();
        let mut compiler = std::process::Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source);
        compiler.status().ok().filter(|status| status.success()).map(|_| library)
    }

    #[test]
    fn nccl_of_an_unsupported_version_is_rejected_by_path() {
        let folders =
            [2804, 21709, 30000, 22809].map(|version| (tempfile::tempdir().unwrap(), version));
        for (folder, version) in &folders {
            let Some(library) = stand_in(folder.path(), *version) else { return };
            let library = library.canonicalize().unwrap();
            let error = Nccl::open(Some(&library)).unwrap_err();
            match *version {
                22809 => assert!(
                    matches!(&error, NcclError::Functions { path, reason }
                    if *path == library && reason.contains("ncclGetUniqueId")),
                    "{error:?}"
                ),
                found => {
                    let found = NcclVersion(found);
                    assert_eq!(error, NcclError::Version { path: library, found });
                }
            }
        }
    }
}
