//! NCCL: a loader of the few functions we call, and what they take.

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

pub use self::communicator::{Communicator, CommunicatorOptions, Move, Piece};
use super::{error::CudaError, library::text};

/// What NCCL is installed under.
const SONAME: &str = "libnccl.so.2";
/// Folders that a loader's cache may lack.
const FOLDERS: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
    "/usr/local/nvidia/lib64",
];
/// The first whose communicators take all of [`Config`].
const OLDEST: NcclVersion = NcclVersion(21800);
/// The next one may have other functions.
const NEWEST_MAJOR: i32 = 2;
/// What a process that uses NCCL has in its environment: NVLink multicast is off, because a program
/// that ends badly while using it can take a host's GPUs out of service.
pub const NCCL_ENVIRONMENT: (&str, &str) = ("NCCL_NVLS_ENABLE", "0");
/// What one has there that moves KV by NCCL: more queues to its GPU than the driver's 8. Streams that share a queue
/// wait for each other, so what is stuck of one pair holds up another. Each queue costs a process's start and end
/// about 50 ms a GPU, so they are not 32, which the driver would have.
const QUEUES: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "16");

fn environment_is_ours(found: Option<&OsStr>) -> Result<(), NcclError> {
    if found == Some(OsStr::new(NCCL_ENVIRONMENT.1)) {
        return Ok(());
    }
    let found = found.map(|value| value.to_string_lossy().into_owned());
    Err(NcclError::Environment { found: found.unwrap_or_default() })
}

/// Puts [`NCCL_ENVIRONMENT`] into the environment of this process, which has no threads yet beside the
/// one that calls: they might read it meanwhile. And with `has_queues` more queues, unless whoever started it has
/// chosen, or there are threads.
pub fn set_nccl_environment(has_queues: bool) -> Result<(), NcclError> {
    let (name, value) = NCCL_ENVIRONMENT;
    let checked = environment_is_ours(env::var_os(name).as_deref());
    let wants_queues = has_queues && env::var_os(QUEUES.0).is_none();
    let threads = fs::read_dir("/proc/self/task").map_or(usize::MAX, Iterator::count);
    if threads != 1 {
        return checked;
    }
    // SAFETY: there is no other thread that could read the environment, and none starts meanwhile.
    unsafe { env::set_var(name, value) };
    if wants_queues {
        // SAFETY: as above.
        unsafe { env::set_var(QUEUES.0, QUEUES.1) };
    }
    Ok(())
}

/// 21809 is 2.18.9.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NcclVersion(pub i32);

impl NcclVersion {
    fn major(self) -> i32 {
        // Before 2.9 there were two digits less.
        if self.0 < 10_000 { self.0 / 1000 } else { self.0 / 10_000 }
    }
}

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, unit) = (self.major(), if self.0 < 10_000 { 1000 } else { 10_000 });
        write!(f, "{major}.{}.{}", self.0 % unit / 100, self.0 % 100)
    }
}

/// Why GPUs cannot talk through NCCL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NcclError {
    #[error(
        "NCCL is not found: tried {}; install it, or name its folder in LD_LIBRARY_PATH",
        tried.join("; ")
    )]
    NotFound { tried: Vec<String> },
    #[error(
        "{} is NCCL {found}; allowed are {OLDEST} and what follows of {NEWEST_MAJOR}",
        path.display()
    )]
    Version { path: PathBuf, found: NcclVersion },
    #[error("{} is no NCCL of ours: {reason}", path.display())]
    Functions { path: PathBuf, reason: String },
    #[error(
        "{} = {found:?} in the environment of this process; allowed is {:?}, set before it starts",
        NCCL_ENVIRONMENT.0,
        NCCL_ENVIRONMENT.1
    )]
    Environment { found: String },
    #[error("rank is {rank} of {ranks}; allowed are ranks below the count, of 2 at least")]
    Rank { rank: u32, ranks: u32 },
    #[error("a communicator's blocks are {least} to {most}; allowed are 1 to 64 in order")]
    Blocks { least: u32, most: u32 },
    #[error("peer is {peer} for rank {rank} of {ranks}; allowed are the other ranks")]
    Peer { peer: u32, rank: u32, ranks: u32 },
    #[error("{call} is not done after {waited:?}: a peer is missing or does not answer")]
    TimedOut { call: &'static str, waited: Duration },
    #[error("{call} is not done after {waited:?}, and nobody waits for it any more")]
    GivenUp { call: &'static str, waited: Duration },
    /// The thread that aborts waits on. What the communicator's operations use stays in use.
    #[error("aborting a communicator is not done after {waited:?}")]
    AbortStuck { waited: Duration },
    #[error("the communicator was ended")]
    Ended,
    #[error("operation {sequence} failed on this communicator before; make another")]
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

/// Every rank of a communicator is made with the same one, which one of them has made.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // It holds an address and a secret.
        f.write_str("UniqueId")
    }
}

/// `ncclConfig_t` as [`OLDEST`] has it: newer ones have more at its end, and tell by version and size
/// what is not there.
#[repr(C)]
struct Config {
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

/// Declares the table of functions and how it is read from an opened library.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),* $(,)?) -> $result:ty;)*) => {
        #[allow(non_snake_case)]
        #[derive(Debug)]
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// # Safety
            /// The library is NCCL 2, and stays open as long as they are called.
            unsafe fn load(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the caller's promise.
                    $($name: unsafe {
                        *library.get(concat!(stringify!($name), "\0").as_bytes())?
                    },)*
                })
            }
        }
    };
}

functions! {
    ncclGetUniqueId: fn(*mut UniqueId) -> c_int;
    ncclCommInitRankConfig:
        fn(*mut RawCommunicator, c_int, UniqueId, c_int, *mut Config) -> c_int;
    ncclCommGetAsyncError: fn(RawCommunicator, *mut c_int) -> c_int;
    ncclCommAbort: fn(RawCommunicator) -> c_int;
    ncclGetErrorString: fn(c_int) -> *const c_char;
    ncclGetLastError: fn(RawCommunicator) -> *const c_char;
    ncclGroupStart: fn() -> c_int;
    ncclGroupEnd: fn() -> c_int;
    ncclSend: fn(u64, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
    ncclRecv: fn(u64, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
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
    /// Opens the file, or with none named what the system's loader finds. Needs no GPU, and
    /// [`NCCL_ENVIRONMENT`] in the environment, for NCCL takes it from nowhere else.
    pub fn open(file: Option<&Path>) -> Result<Arc<Self>, NcclError> {
        let library = open_first(file)?;
        // SAFETY: a library that has this function has it with this signature in every version.
        let asked = unsafe {
            library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion\0").map(
                |function| {
                    let mut version = 0;
                    // Which of two functions was asked tells which file was opened.
                    (function(&mut version), version, file_of(*function as *const c_void))
                },
            )
        };
        let no_nccl = |path: Option<PathBuf>, reason: String| NcclError::Functions {
            path: path.or(file.map(Path::to_owned)).unwrap_or_else(|| SONAME.into()),
            reason,
        };
        let (code, version, path) = asked.map_err(|error| no_nccl(None, words(&error)))?;
        if code != SUCCESS {
            return Err(no_nccl(path, format!("it tells no version ({code})")));
        }
        let version = NcclVersion(version);
        let path = path.or(file.map(Path::to_owned)).unwrap_or_else(|| SONAME.into());
        if version < OLDEST || version.major() != NEWEST_MAJOR {
            return Err(NcclError::Version { path, found: version });
        }
        // SAFETY: of this version the signatures are those above; the library is kept open below.
        let functions = unsafe { Functions::load(&library) }
            .map_err(|error| no_nccl(Some(path.clone()), words(&error)))?;
        // Before its first call that reads it.
        environment_is_ours(env::var_os(NCCL_ENVIRONMENT.0).as_deref())?;
        Ok(Arc::new(Self { path, version, functions, _library: library }))
    }

    /// The file that was opened, links followed.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn version(&self) -> NcclVersion {
        self.version
    }

    /// Other files of that name in these folders and where systems keep them: another process may be
    /// given one of those. Both ends of a communicator want the same version.
    pub fn others<'a>(&self, folders: impl IntoIterator<Item = &'a Path>) -> Vec<PathBuf> {
        others_than(&self.path, folders.into_iter().chain(FOLDERS.iter().map(Path::new)))
    }

    /// For a new communicator, from whichever rank tells it to the others.
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: it writes 128 bytes.
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
        // SAFETY: both give strings of their own, which end with a zero; of the communicator, which
        // lives, or of none.
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

fn open_first(file: Option<&Path>) -> Result<Library, NcclError> {
    let usual = FOLDERS.iter().map(|folder| Path::new(folder).join(SONAME));
    let candidates: Vec<PathBuf> = match file {
        Some(file) => vec![file.to_owned()],
        // By its bare name the system's loader looks where it is told to.
        None => [SONAME.into()].into_iter().chain(usual.filter(|path| path.exists())).collect(),
    };
    let mut tried = Vec::new();
    for candidate in candidates {
        // SAFETY: NCCL's initialisers only read its own settings.
        match unsafe { Library::new(&candidate) } {
            Ok(library) => return Ok(library),
            Err(error) => tried.push(format!("{} ({})", candidate.display(), words(&error))),
        }
    }
    Err(NcclError::NotFound { tried })
}

/// The file that holds a function.
fn file_of(function: *const c_void) -> Option<PathBuf> {
    // SAFETY: four addresses, which may be null.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: it looks the address up and writes four of its own.
    if unsafe { libc::dladdr(function, &mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's own string, which lasts as long as the library is open.
    let name = unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned();
    Path::new(&name).canonicalize().ok()
}

fn others_than<'a>(file: &Path, folders: impl IntoIterator<Item = &'a Path>) -> Vec<PathBuf> {
    let files = folders.into_iter().filter_map(|folder| folder.join(SONAME).canonicalize().ok());
    let mut others: Vec<PathBuf> = files.filter(|other| !is_same(other, file)).collect();
    others.sort();
    others.dedup();
    others
}

/// The same bytes under two names, as packages of both kinds may have them.
fn is_same(one: &Path, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (fs::metadata(one), fs::metadata(other)) {
        (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        _ => false,
    }
}

/// The loader's own words lie behind the error's.
fn words(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use std::{io::Write, thread};

    use super::*;

    #[test]
    fn versions_read_as_nvidia_writes_them() {
        for (number, words) in [(22809, "2.28.9"), (21800, "2.18.0"), (2804, "2.8.4")] {
            assert_eq!(NcclVersion(number).to_string(), words);
        }
        assert!(NcclVersion(2804) < OLDEST && NcclVersion(30100).major() != NEWEST_MAJOR);
    }

    #[test]
    fn what_cannot_be_opened_is_named() {
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
        let words = "/opt/libnccl.so.2 is NCCL 2.8.4; allowed are 2.18.0 and what follows of 2";
        assert_eq!(unlike.to_string(), words);
    }

    /// Some library that every system has, and that is no NCCL.
    #[test]
    fn another_library_is_not_taken_for_nccl() {
        let error = Nccl::open(Some(Path::new("libc.so.6"))).unwrap_err();
        assert!(
            matches!(&error, NcclError::Functions { path, .. } if path == Path::new("libc.so.6"))
        );
        assert!(error.to_string().contains("ncclGetVersion"), "{error}");
    }

    #[test]
    fn another_environment_is_refused_by_name_and_value() {
        assert_eq!(environment_is_ours(Some(OsStr::new("0"))), Ok(()));
        for (found, named) in [(None, "NCCL_NVLS_ENABLE = \"\""), (Some("2"), "= \"2\"")] {
            let error = environment_is_ours(found.map(OsStr::new)).unwrap_err().to_string();
            assert!(error.contains(named) && error.contains("allowed is \"0\""), "{error}");
        }
    }

    #[test]
    fn nothing_is_set_beside_other_threads() {
        let found = || [NCCL_ENVIRONMENT, QUEUES].map(|(name, _)| env::var_os(name));
        let before = found();
        let set = || set_nccl_environment(true);
        let set = thread::scope(|scope| scope.spawn(set).join().unwrap());
        assert_eq!(set, environment_is_ours(before[0].as_deref()));
        assert_eq!(found(), before);
    }

    /// Compiled here, where there is a compiler: a library that says what it is told to.
    fn stand_in(folder: &Path, version: i32) -> Option<PathBuf> {
        let (source, library) = (folder.join("nccl.c"), folder.join(SONAME));
        let code = format!("int ncclGetVersion(int *to) {{ *to = {version}; return 0; }}\n");
        fs::write(&source, code).unwrap();
        let mut compiler = std::process::Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source);
        compiler.status().ok().filter(|status| status.success()).map(|_| library)
    }

    #[test]
    fn versions_out_of_range_and_files_without_functions_are_refused_by_path() {
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

    #[test]
    fn a_second_file_of_the_name_is_noticed_and_a_link_to_the_first_is_not() {
        let [first, second, link] = [(); 3].map(|()| tempfile::tempdir().unwrap());
        for folder in [&first, &second] {
            fs::write(folder.path().join(SONAME), "").unwrap();
        }
        std::os::unix::fs::symlink(first.path().join(SONAME), link.path().join(SONAME)).unwrap();
        let found = others_than(
            &first.path().join(SONAME).canonicalize().unwrap(),
            [first.path(), second.path(), link.path()],
        );
        assert_eq!(found, [second.path().join(SONAME).canonicalize().unwrap()]);
    }
}
