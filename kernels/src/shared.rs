//! Memory that several processes of one node share.
//!
//! A [`SharedRegion`] is a named file in `/dev/shm`, mapped whole. Its memory is reserved at
//! creation: when memory is short, creation returns an error, and no process ends with `SIGBUS` at
//! a later write. The file name carries the epoch and the process id of the owner. The owner holds
//! a lock on the file as long as it lives, and the system drops the lock however the owner ends. So
//! a file without a lock has no owner, and [`sweep`] removes it. (A process id alone is not enough:
//! containers that share `/dev/shm` do not see each other's processes.) The owner unlinks the file
//! once all processes have opened it, at the latest when it ends; mappings outlive the unlink.
//!
//! Code accesses a region through [`Atomics`], which are safe for any writes of other processes, or
//! through a pointer whose user coordinates with the other processes. [`futex`] lets processes wait
//! for one of the words.

pub mod futex;

use std::{
    fs::{self, File, OpenOptions},
    io, mem,
    ops::{Deref, Range},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    ptr::NonNull,
    slice,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
};

use memmap2::MmapRaw;

/// Folder of the regions.
pub const FOLDER: &str = "/dev/shm";

const PREFIX: &str = "baton";

/// Error of creating or opening a region.
#[derive(Debug, thiserror::Error)]
pub enum SharedError {
    #[error(
        "cannot create {}: {needed} bytes are needed in {} and {free} are free", path.display(), folder_of(path).display()
    )]
    NoRoom { path: PathBuf, needed: u64, free: u64 },
    #[error("cannot open {}: it has {found} bytes; expected {wanted}", path.display())]
    Length { path: PathBuf, found: u64, wanted: u64 },
    #[error("cannot {doing} {}: {source}", path.display())]
    System { path: PathBuf, doing: &'static str, source: io::Error },
    #[error("invalid region purpose {purpose:?}; expected 1 to 32 of a-z, 0-9 and _")]
    Purpose { purpose: String },
    #[error("cannot create {}: invalid size of {bytes} bytes", path.display())]
    Size { path: PathBuf, bytes: usize },
}

/// File name of a region: `baton-<epoch>-<owner's process id>-<purpose>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionName {
    pub epoch: u128,
    /// Process id of the owner, for operators who list the folder.
    pub owner: u32,
    /// Distinguishes the regions of one owner.
    pub purpose: String,
}

impl RegionName {
    /// Returns the name of a region that this process creates.
    pub fn own(epoch: u128, purpose: impl Into<String>) -> Self {
        Self { epoch, owner: std::process::id(), purpose: purpose.into() }
    }

    pub fn file_name(&self) -> String {
        format!("{PREFIX}-{:032x}-{}-{}", self.epoch, self.owner, self.purpose)
    }

    /// Parses a file name; returns `None` for a file that is not a region.
    pub fn parse(file_name: &str) -> Option<Self> {
        let mut parts = file_name.splitn(4, '-');
        let (prefix, epoch) = (parts.next()?, parts.next()?);
        let (owner, purpose) = (parts.next()?, parts.next()?);
        let name = Self {
            epoch: u128::from_str_radix(epoch, 16).ok()?,
            owner: owner.parse().ok()?,
            purpose: purpose.to_owned(),
        };
        // Only the canonical spelling is accepted.
        (prefix == PREFIX && is_purpose(purpose) && name.file_name() == file_name).then_some(name)
    }

    fn path_in(&self, folder: &Path) -> Result<PathBuf, SharedError> {
        if !is_purpose(&self.purpose) {
            return Err(SharedError::Purpose { purpose: self.purpose.clone() });
        }
        Ok(folder.join(self.file_name()))
    }
}

fn is_purpose(purpose: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    (1..=32).contains(&purpose.len()) && purpose.bytes().all(is_allowed)
}

fn folder_of(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

/// Memory that other processes map as well. Zeroed when new.
///
/// **Hazard.** A process that may write the file may also truncate it, and an access beyond its end
/// raises `SIGBUS`, which ends this process. Only the owning user may read or write the file, and
/// the file has no name once all processes have opened it.
#[derive(Debug)]
pub struct SharedRegion {
    map: MmapRaw,
    path: PathBuf,
    /// File with the owner's lock; `None` in processes that opened the region.
    _lock: Option<File>,
    /// This process created the file and has not unlinked it.
    is_named: AtomicBool,
    /// Claimed ranges. No byte of this mapping is claimed as two kinds.
    claims: Mutex<Vec<(Range<usize>, ClaimKind)>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClaimKind {
    Words,
    Longs,
    Bytes,
}

impl SharedRegion {
    /// Creates a region in [`FOLDER`] and reserves its memory.
    pub fn create(name: &RegionName, bytes: usize) -> Result<Arc<Self>, SharedError> {
        Self::create_in(Path::new(FOLDER), name, bytes)
    }

    /// Creates a region as [`create`](Self::create) does, in another folder.
    pub fn create_in(
        folder: &Path,
        name: &RegionName,
        bytes: usize,
    ) -> Result<Arc<Self>, SharedError> {
        let path = name.path_in(folder)?;
        if bytes == 0 || isize::try_from(bytes).is_err() {
            return Err(SharedError::Size { path, bytes });
        }
        let file = create_locked(&path)?;
        reserve(&file, &path, bytes as u64)?;
        let map = map(&file, &path)?;
        link(&file, &path).map_err(|source| system(&path, "name", source))?;
        named().push(path.clone());
        Ok(Arc::new(Self {
            map,
            path,
            _lock: Some(file),
            is_named: true.into(),
            claims: Mutex::default(),
        }))
    }

    /// Opens a region that another process created, of exactly `bytes` bytes.
    pub fn open(name: &RegionName, bytes: usize) -> Result<Arc<Self>, SharedError> {
        Self::open_in(Path::new(FOLDER), name, bytes)
    }

    /// Opens a region as [`open`](Self::open) does, in another folder.
    pub fn open_in(
        folder: &Path,
        name: &RegionName,
        bytes: usize,
    ) -> Result<Arc<Self>, SharedError> {
        let path = name.path_in(folder)?;
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(&path);
        let file = file.map_err(|source| system(&path, "open", source))?;
        let metadata =
            file.metadata().map_err(|source| system(&path, "read the metadata of", source))?;
        let (found, wanted) = (metadata.len(), bytes as u64);
        if found != wanted || !metadata.is_file() || bytes == 0 {
            return Err(SharedError::Length { path, found, wanted });
        }
        let map = map(&file, &path)?;
        Ok(Arc::new(Self {
            map,
            path,
            _lock: None,
            is_named: false.into(),
            claims: Mutex::default(),
        }))
    }

    /// Returns the region's size in bytes.
    pub fn byte_count(&self) -> usize {
        self.map.len()
    }

    /// Returns the path of the region's file, which may be unlinked already.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Unlinks the file. Only the owner does this, and later calls do nothing. No process can open
    /// the region afterwards; its memory is freed with the last mapping.
    pub fn unlink(&self) {
        if self.is_named.swap(false, Ordering::Relaxed) {
            // Another process may have removed the file.
            let _ = fs::remove_file(&self.path);
            named().retain(|path| *path != self.path);
        }
    }

    /// Returns `count` 32-bit words from byte `offset` on. [`futex`] can wait for each word.
    ///
    /// # Panics
    /// When the words are outside the region, misaligned, or claimed as another kind.
    pub fn words(self: &Arc<Self>, offset: usize, count: usize) -> Atomics<AtomicU32> {
        self.atomics(offset, count, ClaimKind::Words)
    }

    /// Returns `count` 64-bit words from byte `offset` on.
    ///
    /// # Panics
    /// As [`words`](Self::words).
    pub fn longs(self: &Arc<Self>, offset: usize, count: usize) -> Atomics<AtomicU64> {
        self.atomics(offset, count, ClaimKind::Longs)
    }

    /// Returns the address of `count` bytes from `offset` on, valid as long as the region lives.
    /// The caller coordinates with other processes that access the bytes.
    ///
    /// # Panics
    /// When the bytes are outside the region, or were claimed as atomics.
    pub fn bytes(&self, offset: usize, count: usize) -> NonNull<u8> {
        self.claim(offset, count, ClaimKind::Bytes)
    }

    fn atomics<T>(self: &Arc<Self>, offset: usize, count: usize, kind: ClaimKind) -> Atomics<T> {
        assert!(offset.is_multiple_of(align_of::<T>()), "offset {offset} is aligned");
        let bytes = count.checked_mul(size_of::<T>()).expect("a region's bytes fit an isize");
        let first = self.claim(offset, bytes, kind).cast();
        Atomics { region: Arc::clone(self), first, count }
    }

    fn claim(&self, offset: usize, count: usize, kind: ClaimKind) -> NonNull<u8> {
        let end = offset.checked_add(count).filter(|end| *end <= self.byte_count());
        let end = end.unwrap_or_else(|| {
            panic!("cannot claim {count} bytes at {offset}: the region has {}", self.byte_count())
        });
        let mut claims = self.claims.lock().unwrap_or_else(PoisonError::into_inner);
        let disturbs = |(held, other): &&(Range<usize>, ClaimKind)| {
            *other != kind && held.start < end && offset < held.end
        };
        if let Some((held, other)) = claims.iter().find(disturbs) {
            panic!(
                "cannot claim bytes {offset}..{end} as {kind:?}: {held:?} are claimed as {other:?}"
            );
        }
        if !claims.contains(&(offset..end, kind)) {
            claims.push((offset..end, kind));
        }
        let base = NonNull::new(self.map.as_mut_ptr()).expect("a mapping is not at address 0");
        // SAFETY: offset is within the mapping, whose length fits an isize.
        unsafe { base.add(offset) }
    }
}

impl Drop for SharedRegion {
    fn drop(&mut self) {
        self.unlink();
    }
}

/// Integers in a region, which other processes change too. Clones refer to the same integers.
#[derive(Debug)]
pub struct Atomics<T> {
    /// Keeps the mapping alive.
    region: Arc<SharedRegion>,
    first: NonNull<T>,
    count: usize,
}

// SAFETY: the value is a shared reference to atomics, and it keeps their memory alive.
unsafe impl<T: Sync> Send for Atomics<T> {}
// SAFETY: `&Atomics` gives out only `&[T]`, and `T` is Sync.
unsafe impl<T: Sync> Sync for Atomics<T> {}

impl<T> Deref for Atomics<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `atomics` checked the alignment, and `claim` that the range is inside the
        // mapping, which `region` keeps alive. Any bits are a valid atomic integer, and references
        // to atomics may be shared. No byte of the range is claimed as another kind through this
        // mapping.
        unsafe { slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}

impl<T> Clone for Atomics<T> {
    fn clone(&self) -> Self {
        Self { region: Arc::clone(&self.region), first: self.first, count: self.count }
    }
}

/// Paths of the regions that this process created and has not unlinked yet.
static NAMED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn named() -> MutexGuard<'static, Vec<PathBuf>> {
    NAMED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Unlinks all regions that this process created. Called when the process exits without waiting for
/// threads that hold regions.
pub fn unlink_all() {
    for path in mem::take(&mut *named()) {
        let _ = fs::remove_file(path);
    }
}

/// Removes the regions in [`FOLDER`] whose owners have ended, and returns their names. Files of
/// other users and files that are not regions stay.
pub fn sweep() -> Vec<RegionName> {
    sweep_in(Path::new(FOLDER))
}

/// Removes regions as [`sweep`] does, in another folder.
pub fn sweep_in(folder: &Path) -> Vec<RegionName> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| RegionName::parse(entry.file_name().to_str()?));
    names.filter(|name| remove_if_ownerless(&folder.join(name.file_name()))).collect()
}

fn remove_if_ownerless(path: &Path) -> bool {
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    // The file was removed, or belongs to another user.
    let Ok(file) = file else { return false };
    let Ok(opened) = file.metadata() else { return false };
    if !opened.is_file() || file.try_lock().is_err() {
        return false;
    }
    // Another file may have taken the name meanwhile.
    let is_same = fs::symlink_metadata(path)
        .is_ok_and(|named| (named.dev(), named.ino()) == (opened.dev(), opened.ino()));
    is_same && fs::remove_file(path).is_ok()
}

/// Creates a file that is locked before it gets a name, so that no sweep removes it.
#[cfg(target_os = "linux")]
fn create_locked(path: &Path) -> Result<File, SharedError> {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE);
    let file = options.open(folder_of(path));
    let file = file.map_err(|source| system(path, "create", source))?;
    file.try_lock().map_err(|error| system(path, "lock", error.into()))?;
    Ok(file)
}

#[cfg(not(target_os = "linux"))]
fn create_locked(path: &Path) -> Result<File, SharedError> {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).mode(0o600).open(path);
    let file = file.map_err(|source| system(path, "create", source))?;
    file.try_lock().map_err(|error| system(path, "lock", error.into()))?;
    Ok(file)
}

/// Gives the file its name.
#[cfg(target_os = "linux")]
fn link(file: &File, path: &Path) -> io::Result<()> {
    use std::{
        ffi::CString,
        os::{fd::AsRawFd, unix::ffi::OsStrExt},
    };

    let open = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let name = CString::new(path.as_os_str().as_bytes())?;
    let (at, follow) = (libc::AT_FDCWD, libc::AT_SYMLINK_FOLLOW);
    // SAFETY: both are strings that end with a zero and outlive the call.
    let done = unsafe { libc::linkat(at, open.as_ptr(), at, name.as_ptr(), follow) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(not(target_os = "linux"))]
fn link(_: &File, _: &Path) -> io::Result<()> {
    Ok(())
}

/// Sets the file's length and reserves its memory.
fn reserve(file: &File, path: &Path, bytes: u64) -> Result<(), SharedError> {
    // Checked first, so that a reservation far too large does not take memory from other processes
    // even briefly.
    if let Some(free) = free_bytes(file)
        && free < bytes
    {
        return Err(SharedError::NoRoom { path: path.to_owned(), needed: bytes, free });
    }
    match allocate(file, bytes) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::StorageFull => {
            // The memory taken before the failure is released first.
            let _ = file.set_len(0);
            let free = free_bytes(file).unwrap_or(0);
            Err(SharedError::NoRoom { path: path.to_owned(), needed: bytes, free })
        }
        Err(source) => Err(system(path, "reserve the memory of", source)),
    }
}

#[cfg(target_os = "linux")]
fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    use std::os::fd::AsRawFd;

    let too_long = |_| io::Error::from(io::ErrorKind::FileTooLarge);
    let length = libc::off_t::try_from(bytes).map_err(too_long)?;
    loop {
        // SAFETY: all arguments are integers, one of them the descriptor of an open file.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, length) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    file.set_len(bytes)
}

/// Returns the free bytes of the file's file system for this user; `None` where it does not report
/// them.
#[cfg(target_os = "linux")]
fn free_bytes(file: &File) -> Option<u64> {
    use std::{mem::MaybeUninit, os::fd::AsRawFd};

    let mut stat = MaybeUninit::<libc::statvfs64>::uninit();
    // SAFETY: the descriptor is open, and `stat` has room for the result.
    let done = unsafe { libc::fstatvfs64(file.as_raw_fd(), stat.as_mut_ptr()) } == 0;
    // SAFETY: the successful call has filled `stat`.
    let stat = done.then(|| unsafe { stat.assume_init() })?;
    // A mount without a limit reports zero blocks.
    (stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(not(target_os = "linux"))]
fn free_bytes(_: &File) -> Option<u64> {
    None
}

fn map(file: &File, path: &Path) -> Result<MmapRaw, SharedError> {
    MmapRaw::map_raw(file).map_err(|source| system(path, "map", source))
}

fn system(path: &Path, doing: &'static str, source: io::Error) -> SharedError {
    SharedError::System { path: path.to_owned(), doing, source }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::Ordering,
        thread,
        time::{Duration, Instant},
    };

    use super::*;

    /// Time-out of waits that a test wakes; the tests fail when it elapses.
    const LONG: Duration = Duration::from_secs(60);

    /// Returns a folder in `/dev/shm`: not every file system supports `O_TMPFILE`.
    fn folder() -> tempfile::TempDir {
        tempfile::tempdir_in(FOLDER).unwrap()
    }

    fn name(purpose: &str) -> RegionName {
        RegionName::own(0x1234, purpose)
    }

    #[test]
    fn two_mappings_share_bytes_and_outlive_the_unlink() {
        let folder = folder();
        let made = SharedRegion::create_in(folder.path(), &name("ring"), 8192).unwrap();
        let opened = SharedRegion::open_in(folder.path(), &name("ring"), 8192).unwrap();
        let (here, there) = (made.longs(64, 8), opened.longs(64, 8));
        assert!(here.iter().all(|long| long.load(Ordering::Relaxed) == 0), "new memory is zero");
        here[7].store(42, Ordering::Release);
        assert_eq!(there[7].load(Ordering::Acquire), 42);
        made.unlink();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        drop((made, here));
        assert_eq!(there[7].load(Ordering::Acquire), 42);
    }

    #[test]
    fn a_region_is_unlinked_by_its_owner_only() {
        let folder = folder();
        let made = SharedRegion::create_in(folder.path(), &name("a"), 64).unwrap();
        drop(SharedRegion::open_in(folder.path(), &name("a"), 64).unwrap());
        assert!(made.path().exists());
        // A region that is unlinked already does not unlink a newer one of the same name.
        made.unlink();
        let newer = SharedRegion::create_in(folder.path(), &name("a"), 64).unwrap();
        drop(made);
        assert!(newer.path().exists());
        drop(newer);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn sweep_removes_only_regions_without_an_owner() {
        let folder = folder();
        let alive = SharedRegion::create_in(folder.path(), &name("alive"), 64).unwrap();
        // A killed process leaves this state: the file exists, the lock does not.
        let dead = RegionName { epoch: 7, owner: std::process::id(), purpose: "dead".into() };
        fs::write(folder.path().join(dead.file_name()), [0; 64]).unwrap();
        for other in ["baton-7-1-dead", "something", "baton-model"] {
            fs::write(folder.path().join(other), [0; 64]).unwrap();
        }
        assert_eq!(sweep_in(folder.path()), [dead]);
        assert_eq!(sweep_in(folder.path()), []);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
        assert!(alive.path().exists());
    }

    #[test]
    fn sweep_keeps_regions_that_are_being_created() {
        let folder = folder();
        thread::scope(|scope| {
            let sweeper = scope.spawn(|| {
                for _ in 0..500 {
                    sweep_in(folder.path());
                }
            });
            for round in 0.. {
                if sweeper.is_finished() {
                    break;
                }
                let name = name(&format!("a{round}"));
                let region = SharedRegion::create_in(folder.path(), &name, 64).unwrap();
                assert!(region.path().exists());
            }
        });
    }

    #[test]
    fn region_names_round_trip() {
        let name = RegionName { epoch: u128::MAX - 5, owner: 17, purpose: "kv_0".into() };
        assert_eq!(RegionName::parse(&name.file_name()), Some(name.clone()));
        let text = name.file_name();
        for other in [
            text.replace("baton", "bacon"),
            text.replace("-17-", "-017-"),
            text.replace("kv_0", ""),
            text.replace("kv_0", "kv.0"),
            text.replace("ff", "FF"),
            text.replace("fff", "f"),
            "baton".into(),
        ] {
            assert_eq!(RegionName::parse(&other), None, "{other}");
        }
        let error = SharedRegion::create(&RegionName::own(1, "../x"), 64).unwrap_err();
        assert!(error.to_string().contains("\"../x\"; expected 1 to 32 of a-z"), "{error}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn too_little_memory_is_reported_in_one_line_and_leaves_no_file() {
        let name = name("too_large");
        let bytes = 1 << 55;
        let error = SharedRegion::create(&name, bytes).unwrap_err();
        let SharedError::NoRoom { needed, free, .. } = &error else { panic!("{error}") };
        assert!(*needed == bytes as u64 && free < needed);
        let line = error.to_string();
        assert!(
            line.contains(&format!("{bytes} bytes are needed in /dev/shm and {free} are free"))
        );
        assert!(!line.contains('\n'));
        assert!(!Path::new(FOLDER).join(name.file_name()).exists());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_region_reserves_its_memory_at_creation() {
        let region = SharedRegion::create(&name("taken"), 1 << 20).unwrap();
        let blocks = fs::metadata(region.path()).unwrap().blocks();
        assert!(blocks * 512 >= 1 << 20);
    }

    #[test]
    fn regions_with_another_or_no_length_are_rejected() {
        let folder = folder();
        let _made = SharedRegion::create_in(folder.path(), &name("a"), 64).unwrap();
        let error = SharedRegion::open_in(folder.path(), &name("a"), 128).unwrap_err();
        assert!(error.to_string().ends_with("it has 64 bytes; expected 128"), "{error}");
        let error = SharedRegion::open_in(folder.path(), &name("b"), 64).unwrap_err();
        assert!(error.to_string().contains("cannot open "), "{error}");
        let error = SharedRegion::create_in(folder.path(), &name("a"), 64).unwrap_err();
        assert!(error.to_string().contains("cannot name "), "{error}");
        let error = SharedRegion::create_in(folder.path(), &name("b"), 0).unwrap_err();
        assert!(error.to_string().contains("invalid size of 0 bytes"), "{error}");
    }

    #[test]
    fn a_range_of_a_region_has_one_element_type() {
        let folder = folder();
        let region = SharedRegion::create_in(folder.path(), &name("a"), 256).unwrap();
        let _words = region.words(0, 4);
        let _again = region.words(8, 4);
        region.bytes(128, 128);
        for bad in [
            |region: &Arc<SharedRegion>| drop(region.longs(16, 1)),
            |region: &Arc<SharedRegion>| drop(region.longs(120, 2)),
            |region: &Arc<SharedRegion>| drop(region.words(2, 1)),
            |region: &Arc<SharedRegion>| drop(region.words(64, 1 << 40)),
            |region: &Arc<SharedRegion>| drop(region.words(64, usize::MAX)),
        ] {
            let region = region.clone();
            assert!(thread::spawn(move || bad(&region)).join().is_err());
        }
    }

    #[test]
    fn a_wait_ends_on_a_wake_from_another_mapping_or_on_time_out() {
        let folder = folder();
        let made = SharedRegion::create_in(folder.path(), &name("a"), 64).unwrap();
        let opened = SharedRegion::open_in(folder.path(), &name("a"), 64).unwrap();
        let (here, there) = (made.words(0, 1), opened.words(0, 1));
        futex::wait(&here[0], 0, Duration::from_millis(1));
        let begun = Instant::now();
        futex::wait(&here[0], 1, LONG);
        thread::scope(|scope| {
            scope.spawn(|| {
                there[0].store(1, Ordering::Release);
                futex::wake_all(&there[0]);
            });
            while here[0].load(Ordering::Acquire) == 0 {
                futex::wait(&here[0], 0, LONG);
            }
        });
        assert!(begun.elapsed() < LONG, "a wait timed out");
    }
}
