//! Values read from files, which are read again when the files change.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Duration,
};

use tokio::task::{JoinError, JoinHandle};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Interval at which the files are read. Kubernetes updates mounted Secrets within a minute.
const INTERVAL: Duration = Duration::from_secs(2);
/// Maximum size of a file in bytes: 10,000 API keys with all fields fit.
const FILE_BYTES_MAX: u64 = 8 << 20;

/// A file and the setting that names it.
#[derive(Clone, Debug)]
pub struct SettingFile {
    pub setting: &'static str,
    pub path: PathBuf,
}

impl SettingFile {
    pub fn new(setting: &'static str, path: &Path) -> Self {
        Self { setting, path: path.to_owned() }
    }

    /// Returns the error for a problem with the content.
    pub fn error(&self, problem: impl std::fmt::Display) -> String {
        format!("invalid {} {}: {problem}", self.setting, self.path.display())
    }

    /// Returns the content of a regular file that is not empty.
    pub fn read(&self) -> Result<Vec<u8>, String> {
        // Reading a pipe would block.
        if std::fs::metadata(&self.path).is_ok_and(|metadata| !metadata.is_file()) {
            return Err(self.error("expected a regular file"));
        }
        let mut bytes = Vec::new();
        let read = File::open(&self.path)
            .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
        match read {
            Err(error) => {
                Err(format!("cannot read {} {}: {error}", self.setting, self.path.display()))
            }
            Ok(_) if bytes.is_empty() => Err(self.error("the file is empty")),
            Ok(_) if bytes.len() as u64 > FILE_BYTES_MAX => {
                Err(self.error(format_args!("expected at most {FILE_BYTES_MAX} bytes")))
            }
            Ok(_) => Ok(bytes),
        }
    }
}

/// Contents of the files, in their order.
type Contents = Result<Vec<Vec<u8>>, String>;
/// Makes a value from the files and their contents, and the previous value.
type Parse<T> =
    Box<dyn Fn(&[SettingFile], &[Vec<u8>], Option<&T>) -> Result<T, String> + Send + Sync>;

/// The result of the last read.
struct LastRead {
    contents: Contents,
    /// The files are invalid.
    error: Option<String>,
}

/// A value that is replaced when its files change. Invalid files leave the value as it is.
pub struct Reloaded<T> {
    current: RwLock<Arc<T>>,
    files: Vec<SettingFile>,
    parse: Parse<T>,
    last: Mutex<LastRead>,
}

impl<T> Reloaded<T> {
    /// Reads the value. The error names file and setting.
    pub fn read(
        files: Vec<SettingFile>,
        parse: impl Fn(&[SettingFile], &[Vec<u8>], Option<&T>) -> Result<T, String>
        + Send
        + Sync
        + 'static,
    ) -> Result<Self, String> {
        let contents = read_all(&files)?;
        let current = RwLock::new(Arc::new(parse(&files, &contents, None)?));
        let last = LastRead { contents: Ok(contents), error: None };
        Ok(Self { current, files, parse: Box::new(parse), last: Mutex::new(last) })
    }

    pub fn current(&self) -> Arc<T> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn read_all(files: &[SettingFile]) -> Contents {
    files.iter().map(SettingFile::read).collect()
}

/// Outcome of [`Reload::reload`].
#[derive(Debug, PartialEq, Eq)]
pub enum ReloadOutcome {
    Unchanged,
    Replaced,
    /// The files are invalid: the previous value stays. Returned once for each error.
    Invalid(String),
}

pub trait Reload: Send + Sync {
    /// Reads the files and replaces the value if their contents have changed.
    fn reload(&self) -> ReloadOutcome;

    fn settings(&self) -> String;
}

impl<T: Send + Sync> Reload for Reloaded<T> {
    fn reload(&self) -> ReloadOutcome {
        let contents = read_all(&self.files);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        // Invalid files are parsed again: a certificate becomes valid without a change.
        if last.error.is_none() && last.contents == contents {
            return ReloadOutcome::Unchanged;
        }
        let parsed = match &contents {
            Ok(contents) => (self.parse)(&self.files, contents, Some(&self.current())),
            Err(error) => Err(error.clone()),
        };
        let error = parsed.as_ref().err().cloned();
        let is_new = error != last.error;
        *last = LastRead { contents, error };
        match parsed {
            Ok(value) => {
                let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
                *current = Arc::new(value);
                ReloadOutcome::Replaced
            }
            Err(error) if is_new => ReloadOutcome::Invalid(error),
            Err(_) => ReloadOutcome::Unchanged,
        }
    }

    fn settings(&self) -> String {
        self.files.iter().map(|file| file.setting).collect::<Vec<_>>().join(", ")
    }
}

/// The task that reads the files of values again at an interval. Dropping it stops the task without
/// waiting.
#[derive(Debug)]
pub struct ReloadTask {
    stop: DropGuard,
    task: JoinHandle<()>,
}

impl ReloadTask {
    /// Must run inside a tokio runtime.
    pub fn start(values: Vec<Arc<dyn Reload>>) -> Self {
        let stop = CancellationToken::new();
        let task = tokio::spawn(watch(values, stop.clone()));
        Self { stop: stop.drop_guard(), task }
    }

    /// Stops the task and waits until it has ended.
    pub async fn shutdown(self) -> Result<(), JoinError> {
        drop(self.stop);
        self.task.await
    }
}

/// Reads the files of all values again at an interval, until stopped.
async fn watch(values: Vec<Arc<dyn Reload>>, stop: CancellationToken) {
    while tokio::time::timeout(INTERVAL, stop.cancelled()).await.is_err() {
        for value in &values {
            let value = value.clone();
            let read = tokio::task::spawn_blocking(move || (value.settings(), value.reload()));
            // Fails only if the runtime stops or the parser panics.
            let read = tokio::select! {
                () = stop.cancelled() => return,
                read = read => read,
            };
            let Ok((settings, outcome)) = read else { continue };
            match outcome {
                ReloadOutcome::Unchanged => {}
                ReloadOutcome::Replaced => tracing::info!(settings, "reloaded files"),
                ReloadOutcome::Invalid(error) => {
                    tracing::warn!(settings, "{error}; the previous content stays in use");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn number(
        _: &[SettingFile],
        contents: &[Vec<u8>],
        before: Option<&u32>,
    ) -> Result<u32, String> {
        let text = String::from_utf8_lossy(&contents[0]).into_owned();
        let number = text.parse::<u32>().map_err(|_| format!("{text} is no number"))?;
        Ok(number + before.map_or(0, |before| before * 1000))
    }

    #[test]
    fn changed_file_replaces_the_value_and_invalid_file_keeps_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("number");
        let file = || vec![SettingFile::new("router.number", &path)];
        let shown = path.display();
        let missing = format!("cannot read router.number {shown}: ");
        let error = Reloaded::read(file(), number).err().unwrap();
        assert!(error.starts_with(&missing), "{error}");
        std::fs::write(&path, "").unwrap();
        let error = Reloaded::read(file(), number).err().unwrap();
        assert_eq!(error, format!("invalid router.number {shown}: the file is empty"));
        std::fs::write(&path, "1").unwrap();

        let value = Reloaded::read(file(), number).unwrap();
        assert_eq!((value.reload(), *value.current()), (ReloadOutcome::Unchanged, 1));
        std::fs::write(&path, "2").unwrap();
        assert_eq!((value.reload(), *value.current()), (ReloadOutcome::Replaced, 1002));
        std::fs::write(&path, "x").unwrap();
        assert_eq!(value.reload(), ReloadOutcome::Invalid("x is no number".into()));
        assert_eq!((value.reload(), *value.current()), (ReloadOutcome::Unchanged, 1002));
        std::fs::remove_file(&path).unwrap();
        assert!(
            matches!(value.reload(), ReloadOutcome::Invalid(error) if error.starts_with(&missing))
        );
        assert_eq!((value.reload(), *value.current()), (ReloadOutcome::Unchanged, 1002));
        std::fs::write(&path, "3").unwrap();
        assert_eq!(value.reload(), ReloadOutcome::Replaced);
        let error = Reloaded::read(vec![SettingFile::new("router.number", folder.path())], number);
        assert!(error.err().unwrap().ends_with("expected a regular file"));
    }

    #[test]
    fn file_that_becomes_valid_without_a_change_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("number");
        std::fs::write(&path, "1").unwrap();
        let is_valid = Arc::new(AtomicBool::new(true));
        let when_valid = is_valid.clone();
        let parse = move |files: &[SettingFile], contents: &[Vec<u8>], before: Option<&u32>| {
            match when_valid.load(Ordering::Relaxed) {
                true => number(files, contents, before),
                false => Err("not valid yet".to_owned()),
            }
        };
        let value = Reloaded::read(vec![SettingFile::new("router.number", &path)], parse).unwrap();
        is_valid.store(false, Ordering::Relaxed);
        std::fs::write(&path, "2").unwrap();
        assert_eq!(value.reload(), ReloadOutcome::Invalid("not valid yet".into()));
        assert_eq!((value.reload(), *value.current()), (ReloadOutcome::Unchanged, 1));
        is_valid.store(true, Ordering::Relaxed);
        assert_eq!((value.reload(), *value.current()), (ReloadOutcome::Replaced, 1002));
    }
}
