//! Read-only file mappings for the model loaders.

use std::{
    fs::{File, Metadata},
    io,
    ops::Deref,
    os::unix::fs::MetadataExt,
    path::Path,
};

use memmap2::{Advice, Mmap, UncheckedAdvice};
use serde::{Deserialize, Serialize};

/// Bytes whose pages are dropped at a time.
const DROPPED_BYTES: usize = 64 << 20;

/// Read-only mapping of a whole file.
///
/// The bytes are the file's pages themselves: nothing is copied, and processes that map one model share its
/// memory.
///
/// **Hazard.** The mapping is only as stable as the file. When another process truncates the mapped file,
/// an access beyond the new end raises `SIGBUS` and ends this process. When another process writes into the
/// file, the bytes change under the reader. So model files must be replaced by renaming a complete new file
/// over the old name, which leaves existing mappings intact; they must never be rewritten in place. Loaders
/// check every offset against the length of [`MappedFile::bytes`], so a file that was short when opened is
/// an error and not a fault.
#[derive(Debug)]
pub struct MappedFile {
    file: File,
    /// `None` for an empty file, which cannot be mapped.
    map: Option<Mmap>,
    identity: FileIdentity,
}

/// Identity of a file and of its last write: two processes that find equal ones have mapped the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
    bytes: u64,
    /// Time of the last write: seconds, and nanoseconds of the second.
    written: (i64, i64),
}

impl FileIdentity {
    fn of(file: &Metadata) -> Self {
        Self {
            device: file.dev(),
            inode: file.ino(),
            bytes: file.len(),
            written: (file.mtime(), file.mtime_nsec()),
        }
    }
}

impl MappedFile {
    /// Maps the file at `path`. Anything but a regular file is an error.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        // Checked before the file is opened: opening a FIFO blocks.
        if !std::fs::metadata(&path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        let identity = FileIdentity::of(&metadata);
        if metadata.len() == 0 {
            return Ok(Self { file, map: None, identity });
        }
        // SAFETY: the mapping is read-only and private to this value. The operator must not
        // truncate or rewrite the file meanwhile, as the type's documentation says.
        let map = unsafe { Mmap::map(&file)? };
        // Weights are read front to back, once. A refused hint only costs speed.
        let _ = map.advise(Advice::Sequential);
        Ok(Self { file, map: Some(map), identity })
    }

    /// Returns the file's identity when it was mapped.
    pub fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// Returns whether the mapped file was not written since it was mapped. A new file under its name does not count.
    pub fn is_unchanged(&self) -> bool {
        self.file.metadata().is_ok_and(|file| FileIdentity::of(&file) == self.identity)
    }

    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }

    /// Drops the mapped pages from this process's resident memory. The next read loads them from the
    /// page cache or the file.
    pub fn forget_pages(&self) {
        if let Some(map) = &self.map {
            // SAFETY: this read-only file mapping never has changed pages, so dropping a page
            // loses nothing: the next read maps the file's bytes again.
            let refused = unsafe { map.unchecked_advise(UncheckedAdvice::DontNeed) };
            // A refused hint costs memory only.
            let _ = refused;
        }
    }
}

impl Drop for MappedFile {
    /// Drops the pages piece by piece before the mapping is removed. Removing gigabytes at once blocks every other
    /// thread of the process that maps memory, for 0.1 s per 3 GB.
    fn drop(&mut self) {
        let Some(map) = &self.map else { return };
        for begin in (0..map.len()).step_by(DROPPED_BYTES) {
            let bytes = DROPPED_BYTES.min(map.len() - begin);
            // SAFETY: as in `forget_pages`.
            let refused =
                unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, begin, bytes) };
            // A refused hint costs time only.
            let _ = refused;
        }
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes()
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, time::SystemTime};

    use super::*;

    #[test]
    fn a_mapped_file_shows_its_bytes() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"baton").unwrap();
        let mapped = MappedFile::open(file.path()).unwrap();
        assert_eq!(mapped.bytes(), b"baton");
        assert_eq!(mapped.len(), 5);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn forgotten_pages_leave_resident_memory_and_reload_when_read() {
        const LENGTH: usize = 64 << 20;
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let mut here = false;
            status.lines().find_map(|line| {
                here |= line.contains("baton-forgotten");
                let kib = line.strip_prefix("Rss:").filter(|_| here)?;
                kib.trim().strip_suffix(" kB")?.parse::<usize>().ok()
            })
        };
        let mut file = tempfile::Builder::new().prefix("baton-forgotten").tempfile().unwrap();
        file.write_all(&vec![7; LENGTH]).unwrap();
        let mapped = MappedFile::open(file.path()).unwrap();
        let sum = || mapped.iter().map(|&byte| u64::from(byte)).sum::<u64>();
        for _ in 0..2 {
            assert_eq!(sum(), 7 * LENGTH as u64);
            assert_eq!(resident(), Some(LENGTH >> 10));
            mapped.forget_pages();
            assert_eq!(resident(), Some(0));
        }
    }

    #[test]
    fn an_empty_file_has_no_bytes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(MappedFile::open(file.path()).unwrap().bytes(), b"");
    }

    #[test]
    fn a_missing_file_and_a_folder_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(
            MappedFile::open(folder.path().join("nothing")).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        assert!(MappedFile::open(folder.path()).is_err());
    }

    #[test]
    fn a_file_replaced_by_renaming_leaves_the_mapping_intact() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        std::fs::write(&path, b"old").unwrap();
        let mapped = MappedFile::open(&path).unwrap();
        std::fs::write(folder.path().join("new"), b"n").unwrap();
        std::fs::rename(folder.path().join("new"), &path).unwrap();
        assert_eq!(mapped.bytes(), b"old");
        assert!(mapped.is_unchanged());
    }

    #[test]
    fn write_into_a_mapped_file_is_detected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        std::fs::write(&path, b"old").unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        // Clocks of file systems are coarse.
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        let mapped = MappedFile::open(&path).unwrap();
        assert!(mapped.is_unchanged());
        (&file).write_all(b"new").unwrap();
        assert!(!mapped.is_unchanged());
    }
}
