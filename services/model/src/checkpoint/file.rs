//! Model files, which are read piece by piece.

use std::{
    fs::{File, Metadata},
    io,
    ops::Range,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::OnceLock,
};

use rustix::fs::{Advice, fadvise};
use serde::{Deserialize, Serialize};

use crate::error::ModelError;

/// Open model file.
///
/// The file is read and never mapped: if another process truncates a mapped file, an access beyond
/// the new end raises `SIGBUS`, which ends this process. A read beyond the end only fails.
#[derive(Debug)]
pub(crate) struct CheckpointFile {
    path: PathBuf,
    file: File,
    identity: FileIdentity,
    /// Cause of the first read that failed.
    failure: OnceLock<io::Error>,
}

/// Identity of a file and of its last write: two processes that find equal ones have opened the
/// same bytes.
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

impl CheckpointFile {
    /// Opens the file at `path`. Anything but a regular file is an error.
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let open = || {
            // Checked before the file is opened: opening a FIFO blocks.
            if !std::fs::metadata(path)?.is_file() {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
            }
            let file = File::open(path)?;
            // Weights are read front to back. A refused hint only costs speed.
            let _ = fadvise(&file, 0, None, Advice::Sequential);
            let identity = FileIdentity::of(&file.metadata()?);
            Ok(Self { path: path.into(), file, identity, failure: OnceLock::new() })
        };
        open().map_err(io_error(path, "open"))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the file, to read it from its start.
    pub(crate) fn reader(&self) -> &File {
        &self.file
    }

    /// Returns the file's size when it was opened, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.identity.bytes
    }

    /// Returns the file's identity when it was opened.
    pub(crate) fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// Fills `out` with the bytes from `offset` on. If the read fails, fills `out` with zeros, and
    /// [`check_reads`](Self::check_reads) fails from then on.
    fn read(&self, offset: u64, out: &mut [u8]) {
        if let Err(error) = self.file.read_exact_at(out, offset) {
            out.fill(0);
            // The first cause is the one to report.
            let _ = self.failure.set(error);
        }
    }

    /// Fails if a read failed.
    pub(crate) fn check_reads(&self) -> Result<(), ModelError> {
        match self.failure.get() {
            None => Ok(()),
            // The file was long enough when it was opened.
            Some(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(self.changed()),
            Some(error) => {
                let cause = io::Error::new(error.kind(), error.to_string());
                Err(io_error(&self.path, "read")(cause))
            }
        }
    }

    /// Fails if a read failed, or if the file was written since it was opened. A new file under its
    /// name does not count.
    pub(crate) fn check_unchanged(&self) -> Result<(), ModelError> {
        let is_unchanged =
            self.file.metadata().is_ok_and(|file| FileIdentity::of(&file) == self.identity);
        if is_unchanged { self.check_reads() } else { Err(self.changed()) }
    }

    fn changed(&self) -> ModelError {
        ModelError::Changed { path: self.path.clone() }
    }
}

/// Bytes of a tensor in a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorBytes<'a> {
    file: &'a CheckpointFile,
    /// Offset from the start of the file, in bytes.
    offset: u64,
    len: usize,
}

impl<'a> TensorBytes<'a> {
    pub(crate) fn new(file: &'a CheckpointFile, range: Range<u64>) -> Self {
        Self { file, offset: range.start, len: (range.end - range.start) as usize }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the bytes of a range of the tensor.
    ///
    /// # Panics
    /// When the range exceeds the tensor.
    pub(crate) fn part(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        Self { offset: self.offset + range.start as u64, len: range.len(), ..self }
    }

    /// Fills `out` with the tensor's bytes from `begin` on, or with zeros if the read fails: see
    /// [`CheckpointFile::check_reads`].
    ///
    /// # Panics
    /// When `out` exceeds the tensor.
    pub(crate) fn read(&self, begin: usize, out: &mut [u8]) {
        assert!(begin + out.len() <= self.len, "{} bytes at {begin} of {}", out.len(), self.len);
        self.file.read(self.offset + begin as u64, out);
    }

    /// Returns whether both tensors have the same bytes. Reads them piece by piece.
    pub(crate) fn equals(&self, other: TensorBytes<'_>) -> bool {
        const PIECE_BYTES: usize = 256 << 10;
        let (mut own, mut others) = (vec![0; PIECE_BYTES], vec![0; PIECE_BYTES]);
        self.len == other.len
            && (0..self.len).step_by(PIECE_BYTES).all(|begin| {
                let bytes = PIECE_BYTES.min(self.len - begin);
                self.read(begin, &mut own[..bytes]);
                other.read(begin, &mut others[..bytes]);
                own[..bytes] == others[..bytes]
            })
    }
}

/// Returns the conversion of an error of `action`, a verb, on the file `path`.
pub(crate) fn io_error(
    path: &Path,
    action: &'static str,
) -> impl FnOnce(std::io::Error) -> ModelError {
    move |cause| ModelError::Io { path: path.into(), action, cause }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, time::SystemTime};

    use super::*;

    #[test]
    fn missing_file_and_folder_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let error = CheckpointFile::open(&folder.path().join("nothing")).unwrap_err().to_string();
        assert!(error.starts_with("cannot open "), "{error}");
        let error = CheckpointFile::open(folder.path()).unwrap_err().to_string();
        assert!(error.ends_with(": not a regular file"), "{error}");
    }

    #[test]
    fn truncated_file_reads_as_zeros_and_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        std::fs::write(&path, [7; 8]).unwrap();
        let file = CheckpointFile::open(&path).unwrap();
        let tensor = TensorBytes::new(&file, 2..8);
        let mut out = [0; 4];
        tensor.read(2, &mut out);
        assert_eq!(out, [7; 4]);
        file.check_reads().unwrap();
        File::options().write(true).open(&path).unwrap().set_len(5).unwrap();
        tensor.read(2, &mut out);
        assert_eq!(out, [0; 4]);
        for outcome in [file.check_reads(), file.check_unchanged()] {
            let error = outcome.unwrap_err().to_string();
            assert!(error.ends_with("expected a file that does not change"), "{error}");
        }
    }

    #[test]
    fn file_replaced_by_renaming_stays_readable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        std::fs::write(&path, b"old").unwrap();
        let file = CheckpointFile::open(&path).unwrap();
        std::fs::write(folder.path().join("new"), b"n").unwrap();
        std::fs::rename(folder.path().join("new"), &path).unwrap();
        let mut out = [0; 3];
        TensorBytes::new(&file, 0..3).read(0, &mut out);
        assert_eq!(&out, b"old");
        file.check_unchanged().unwrap();
    }

    #[test]
    fn write_into_an_open_file_is_detected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        std::fs::write(&path, b"old").unwrap();
        let mut writer = File::options().write(true).open(&path).unwrap();
        // Clocks of file systems are coarse.
        writer.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        let file = CheckpointFile::open(&path).unwrap();
        file.check_unchanged().unwrap();
        writer.write_all(b"new").unwrap();
        assert!(file.check_unchanged().is_err());
    }
}
