//! Copies the files of weights from a node that has them.

use std::{
    fs, io,
    io::Read,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use proto::v1::{self, weights_part::Part};
use tempfile::TempDir;
use tokio::{io::AsyncWriteExt, runtime, sync::mpsc};
use tonic::Status;
use weight_transfer::WeightVersion;

use super::peers::{PeerCredentials, UpdatePeer};

/// Bytes of one message.
const PART_BYTES: usize = 1 << 20;
/// Maximum number of messages that wait for the network.
pub(super) const PARTS_MAX: usize = 4;
const FILES_MAX: usize = 1024;
/// Names of the folders of copies, and of the lock in each.
const PREFIX: &str = "baton-weights-";
const LOCK: &str = ".lock";
/// Time-out of the connection and of each message.
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(10);
const CONFIGURATIONS: [&str; 3] =
    ["config.json", "generation_config.json", "model.safetensors.index.json"];

/// Files that a model was opened from.
#[derive(Debug)]
pub(super) struct WeightFiles {
    pub path: PathBuf,
    /// Copied files, which are removed with this value.
    pub _copy: Option<CopiedFiles>,
}

/// A folder of copied files.
#[derive(Debug)]
pub(super) struct CopiedFiles {
    folder: TempDir,
    /// Locked as long as the process lives, so that other processes can tell the folder from a
    /// leftover.
    _lock: fs::File,
}

impl CopiedFiles {
    pub(super) fn new(folder: &Path) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(folder)?;
        let lock = fs::File::create_new(folder.path().join(LOCK))?;
        lock.lock()?;
        Ok(Self { folder, _lock: lock })
    }
}

/// Removes copies in `folder` whose processes have ended without removing them.
pub(super) fn remove_leftovers(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let is_copy = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        // A folder without a lock is about to be locked by its process.
        let lock = fs::File::open(entry.path().join(LOCK)).ok().filter(|_| is_copy);
        if lock.is_none_or(|lock| lock.try_lock().is_err()) {
            continue;
        }
        let path = entry.path();
        match fs::remove_dir_all(&path) {
            Ok(()) => {
                tracing::info!(path = %path.display(), "removed copied weights of a process that ended")
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot remove copied weights of a process that ended");
            }
        }
    }
}

pub(super) type Parts = mpsc::Sender<Result<v1::WeightsPart, Status>>;

/// Reads the files of the weights into the stream. Blocks. Stops when the receiver is dropped or
/// takes no message for `silence`.
pub(super) fn send(
    source: &Arc<WeightFiles>,
    parts: &Parts,
    runtime: &runtime::Handle,
    silence: Duration,
) {
    let send = |part| {
        let part = Ok(v1::WeightsPart { part: Some(part) });
        let sent = runtime.block_on(async { parts.send_timeout(part, silence).await });
        sent.map_err(|_| io::Error::new(io::ErrorKind::BrokenPipe, "the receiver reads no more"))
    };
    let sent = files(&source.path).and_then(|files| {
        files.into_iter().try_for_each(|(name, path)| send_file(name, &path, send))
    });
    if let Err(error) = sent {
        // The receiver may be gone.
        let _ = parts.try_send(Err(Status::internal(format!(
            "cannot read {}: {error}",
            source.path.display()
        ))));
    }
}

fn send_file(name: String, path: &Path, send: impl Fn(Part) -> io::Result<()>) -> io::Result<()> {
    let mut file = fs::File::open(path)?;
    let mut left = file.metadata()?.len();
    send(Part::File(v1::WeightsFile { name, bytes: left }))?;
    while left > 0 {
        let mut bytes = vec![0; left.min(PART_BYTES as u64) as usize];
        file.read_exact(&mut bytes)?;
        left -= bytes.len() as u64;
        send(Part::Bytes(bytes.into()))?;
    }
    Ok(())
}

/// Returns name and path of each file that opening a model at `path` reads.
fn files(path: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let entry = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.to_owned();
        is_wanted(&name).then_some((name, path))
    };
    if path.is_file() {
        return Ok(parts(path).into_iter().filter_map(entry).collect());
    }
    let mut files = Vec::new();
    for item in fs::read_dir(path)? {
        let path = item?.path();
        files.extend(Some(path).filter(|path| path.is_file()).and_then(entry));
    }
    files.sort();
    Ok(files)
}

/// Returns the files of a model whose first file is at `path`: a GGUF model may be split into
/// `NAME-00001-of-00003.gguf` and so on.
fn parts(path: &Path) -> Vec<PathBuf> {
    let mut parts = vec![path.to_owned()];
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let split = name.strip_suffix(".gguf").and_then(|name| name.rsplit_once("-00001-of-"));
    if let Some((stem, count)) = split {
        let part = |number: u16| path.with_file_name(format!("{stem}-{number:05}-of-{count}.gguf"));
        let count: u16 = count.parse().unwrap_or(1);
        parts.extend((2..=count).map(part).filter(|part| part.is_file()));
    }
    parts
}

/// Returns whether a model has files of this name. The name has no folders.
fn is_wanted(name: &str) -> bool {
    let is_plain = !name.starts_with('.') && !name.contains(['/', '\\']) && name.len() <= 255;
    let is_weights = name.ends_with(".safetensors") || name.to_ascii_lowercase().ends_with(".gguf");
    is_plain && (is_weights || CONFIGURATIONS.contains(&name))
}

/// Copies weights of this version from the peer into a new folder in `folder`. Rejects more than
/// `bytes_max` bytes.
pub(super) async fn pull(
    peer: &UpdatePeer,
    version: WeightVersion,
    credentials: &PeerCredentials,
    folder: &Path,
    bytes_max: u64,
) -> Result<WeightFiles, String> {
    let failed = |cause: String| format!("cannot copy the weights from {}: {cause}", peer.grpc);
    let copied = async {
        let copy = CopiedFiles::new(folder);
        let copy = copy.map_err(|error| format!("{}: {error}", folder.display()))?;
        let parts = tokio::time::timeout(SILENCE_MAX, credentials.pull(peer, version)).await;
        let parts = parts.map_err(|_| format!("no answer within {SILENCE_MAX:?}"))??;
        write(parts, copy.folder.path(), bytes_max).await?;
        Ok(copy)
    };
    let copy: CopiedFiles = copied.await.map_err(failed)?;
    // A GGUF file is a model without its folder.
    let files = files(copy.folder.path()).map_err(|error| failed(error.to_string()))?;
    let path = match &files[..] {
        [(_, file)] => file.clone(),
        _ => copy.folder.path().to_owned(),
    };
    Ok(WeightFiles { path, _copy: Some(copy) })
}

async fn write(
    mut parts: tonic::Streaming<v1::WeightsPart>,
    folder: &Path,
    bytes_max: u64,
) -> Result<(), String> {
    let (mut count, mut total) = (0, 0u64);
    let mut open: Option<CopiedFile> = None;
    while let Some(part) = timed(parts.message()).await? {
        match part.part {
            Some(Part::File(v1::WeightsFile { name, bytes })) => {
                finish(open.take()).await?;
                count += 1;
                total = total.saturating_add(bytes);
                if !is_wanted(&name) {
                    let name: String = name.chars().take(80).collect();
                    return Err(format!("invalid name {name:?}; expected a file of a model"));
                }
                if count > FILES_MAX || total > bytes_max {
                    return Err(format!(
                        "{count} files of {total} bytes; expected at most {FILES_MAX} files of {bytes_max} bytes"
                    ));
                }
                open = Some(CopiedFile::create(folder.join(&name), bytes).await?);
            }
            Some(Part::Bytes(bytes)) => {
                let Some(file) = &mut open else {
                    return Err("bytes without a file".to_owned());
                };
                file.add(&bytes).await?;
            }
            None => return Err("an empty message".to_owned()),
        }
    }
    finish(open).await
}

async fn finish(open: Option<CopiedFile>) -> Result<(), String> {
    match open {
        None => Ok(()),
        Some(file) => file.finish().await,
    }
}

/// A file while it is copied.
struct CopiedFile {
    file: tokio::fs::File,
    path: PathBuf,
    bytes: u64,
    /// Bytes that have not arrived.
    left: u64,
}

impl CopiedFile {
    async fn create(path: PathBuf, bytes: u64) -> Result<Self, String> {
        match tokio::fs::File::create_new(&path).await {
            Ok(file) => Ok(Self { file, path, bytes, left: bytes }),
            Err(error) => Err(cannot_write(&path, bytes, &error)),
        }
    }

    async fn add(&mut self, part: &[u8]) -> Result<(), String> {
        self.left = self.left.checked_sub(part.len() as u64).ok_or("more bytes than announced")?;
        let written = self.file.write_all(part).await;
        written.map_err(|error| cannot_write(&self.path, self.bytes, &error))
    }

    async fn finish(mut self) -> Result<(), String> {
        if self.left > 0 {
            return Err(format!("{} bytes of a file are missing", self.left));
        }
        let written = self.file.flush().await;
        written.map_err(|error| cannot_write(&self.path, self.bytes, &error))
    }
}

/// Names the place on this host, because the rest of the message names the peer.
fn cannot_write(path: &Path, bytes: u64, error: &io::Error) -> String {
    format!("this node cannot write {}, a file of {bytes} bytes: {error}", path.display())
}

async fn timed<T>(call: impl Future<Output = Result<T, Status>>) -> Result<T, String> {
    let answer = tokio::time::timeout(SILENCE_MAX, call).await;
    let answer = answer.map_err(|_| format!("no answer within {SILENCE_MAX:?}"))?;
    answer.map_err(|status| status.message().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime() -> runtime::Runtime {
        let mut runtime = runtime::Builder::new_multi_thread();
        runtime.worker_threads(1).enable_time().build().unwrap()
    }

    #[test]
    fn only_files_of_a_model_are_copied() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["config.json", "model.safetensors", "notes.txt", ".hidden.safetensors"] {
            fs::write(folder.path().join(name), name).unwrap();
        }
        fs::create_dir(folder.path().join("nested.safetensors")).unwrap();
        let names = |path: &Path| -> Vec<String> {
            files(path).unwrap().into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(names(folder.path()), ["config.json", "model.safetensors"]);
        assert_eq!(names(&folder.path().join("config.json")), ["config.json"]);
        let split = ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"];
        for name in [split[0], split[1], "b-00001-of-00002.gguf", "c.GGUF"] {
            fs::write(folder.path().join(name), name).unwrap();
        }
        assert_eq!(names(&folder.path().join(split[0])), split);
        for name in ["b-00001-of-00002.gguf", "c.GGUF"] {
            assert_eq!(names(&folder.path().join(name)), [name]);
        }
        for name in ["../a.gguf", "a/b.gguf", "..", ".gguf", "passwd", "a\\b.gguf", ""] {
            assert!(!is_wanted(name), "{name}");
        }
    }

    #[test]
    fn copies_of_dead_processes_are_removed_and_those_in_use_stay() {
        let folder = tempfile::tempdir().unwrap();
        let used = CopiedFiles::new(folder.path()).unwrap();
        let leftover = folder.path().join("baton-weights-left");
        for path in
            [&leftover, &folder.path().join("other"), &folder.path().join("baton-weights-x")]
        {
            fs::create_dir(path).unwrap();
            fs::write(path.join("model.gguf"), "weights").unwrap();
        }
        for name in ["baton-weights-left", "other"] {
            fs::write(folder.path().join(name).join(LOCK), "").unwrap();
        }
        remove_leftovers(folder.path());
        remove_leftovers(&folder.path().join("nothing"));
        assert!(used.folder.path().exists());
        assert!(!leftover.exists());
        assert!(folder.path().join("other").exists());
        assert!(folder.path().join("baton-weights-x").exists(), "its process locks it in a moment");
    }

    #[test]
    fn full_disk_is_reported_with_the_file_that_does_not_fit() {
        let error = runtime().block_on(async {
            let full = tokio::fs::OpenOptions::new().write(true).open("/dev/full").await.unwrap();
            let path = PathBuf::from("/cache/a.gguf");
            let mut file = CopiedFile { file: full, path, bytes: 3, left: 3 };
            // The write may report its error only when the file ends.
            match file.add(b"abc").await {
                Ok(()) => file.finish().await.unwrap_err(),
                Err(error) => error,
            }
        });
        let expected = "this node cannot write /cache/a.gguf, a file of 3 bytes: No space left";
        assert!(error.starts_with(expected), "{error}");
    }

    #[test]
    fn sender_does_not_wait_forever_for_a_receiver_that_reads_nothing() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.gguf"), vec![1; 4 * PART_BYTES]).unwrap();
        let source = Arc::new(WeightFiles { path: folder.path().to_owned(), _copy: None });
        let (parts, received) = mpsc::channel(1);
        send(&source, &parts, runtime().handle(), Duration::from_millis(10));
        assert_eq!(received.len(), 1);
    }

    #[test]
    fn files_are_sent_whole_and_in_bounded_parts() {
        let folder = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..PART_BYTES + 5).map(|index| index as u8).collect();
        fs::write(folder.path().join("a.gguf"), &bytes).unwrap();
        let source = Arc::new(WeightFiles { path: folder.path().to_owned(), _copy: None });
        let (parts, mut received) = mpsc::channel(8);
        send(&source, &parts, runtime().handle(), SILENCE_MAX);
        drop(parts);
        let mut copied = Vec::new();
        while let Some(part) = received.blocking_recv() {
            match part.unwrap().part.unwrap() {
                Part::File(file) => {
                    assert_eq!((file.name.as_str(), file.bytes), ("a.gguf", bytes.len() as u64))
                }
                Part::Bytes(part) => {
                    assert!(part.len() <= PART_BYTES);
                    copied.extend_from_slice(&part);
                }
            }
        }
        assert_eq!(copied, bytes);
    }
}
