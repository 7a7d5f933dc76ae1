//! Staging folder `.fetch-PID` of a download, beside the model's final folder.
//!
//! The downloading process locks the file `.fetch-PID.lock` and deletes folder and lock file at its end. When the
//! process is killed the kernel releases the lock, and the next download deletes unlocked folders. The process id
//! alone does not suffice, because the system reuses ids.

use std::{
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

const PREFIX: &str = ".fetch-";
const LOCK: &str = ".lock";

/// Time-out for the lock. Another process holds the lock only while it deletes a folder.
const LOCK_WITHIN: Duration = Duration::from_secs(5);
/// Polling interval of the lock.
const PAUSE: Duration = Duration::from_millis(10);

/// A staging folder; deleted when dropped.
pub struct Staging {
    pub folder: PathBuf,
    lock_path: PathBuf,
    _lock: File,
}

impl Staging {
    /// Creates an empty folder of this process in `parent`. Deletes folders of dead processes.
    pub fn create(parent: &Path) -> Result<Self> {
        Self::create_within(parent, LOCK_WITHIN)
    }

    fn create_within(parent: &Path, timeout: Duration) -> Result<Self> {
        fs::create_dir_all(parent)
            .with_context(|| format!("cannot create {}", parent.display()))?;
        remove_abandoned(parent);
        let folder = parent.join(format!("{PREFIX}{}", std::process::id()));
        let lock_path = lock_of(&folder);
        // Lock before creating the folder: other processes delete a folder without a lock.
        let deadline = Instant::now() + timeout;
        let lock = loop {
            let tried = take(&lock_path);
            match tried.with_context(|| format!("cannot create {}", lock_path.display()))? {
                // Some network file systems have no locks. Then no process deletes folders.
                Taken::Held(lock) | Taken::Unlockable(lock) => break lock,
                // Another process may have locked the file to delete it.
                Taken::Busy if Instant::now() < deadline => thread::sleep(PAUSE),
                Taken::Busy => {
                    bail!("cannot lock {}: another download uses it", folder.display())
                }
            }
        };
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        Ok(Self { folder, lock_path, _lock: lock })
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
        let _ = fs::remove_file(&self.lock_path);
    }
}

enum Taken {
    /// This process holds the lock.
    Held(File),
    /// The file system has no locks.
    Unlockable(File),
    /// Another process holds the lock, or has just deleted the file.
    Busy,
}

/// Creates a lock file if necessary and tries to lock it.
fn take(path: &Path) -> io::Result<Taken> {
    let lock = File::create(path)?;
    Ok(match lock.try_lock() {
        Ok(()) if is_at(&lock, path)? => Taken::Held(lock),
        Ok(()) | Err(TryLockError::WouldBlock) => Taken::Busy,
        Err(TryLockError::Error(_)) => Taken::Unlockable(lock),
    })
}

/// Returns whether `path` still names this open file.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let ours = file.metadata()?;
    match fs::metadata(path) {
        Ok(there) => Ok((there.dev(), there.ino()) == (ours.dev(), ours.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Deletes the folders of dead processes. Ignores errors: a remaining folder only takes space.
fn remove_abandoned(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
        let process = rest.strip_suffix(LOCK).unwrap_or(rest);
        if process.is_empty() || !process.bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        let folder = parent.join(format!("{PREFIX}{process}"));
        let lock_path = lock_of(&folder);
        // Hold the lock until folder and lock file are deleted.
        let Ok(Taken::Held(_lock)) = take(&lock_path) else { continue };
        let _ = fs::remove_dir_all(&folder);
        let _ = fs::remove_file(&lock_path);
    }
}

fn lock_of(folder: &Path) -> PathBuf {
    let mut path = folder.as_os_str().to_owned();
    path.push(LOCK);
    path.into()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn left(parent: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(parent)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn only_unlocked_folders_are_deleted() {
        let parent = tempfile::tempdir().unwrap();
        let place = |name: &str| parent.path().join(name);
        // Invalid process ids: the numbers are too large.
        for (process, has_lock) in [("4194305", true), ("4194306", false), ("4194307", true)] {
            fs::create_dir(place(&format!(".fetch-{process}"))).unwrap();
            fs::write(place(&format!(".fetch-{process}")).join("half.whl"), b"half").unwrap();
            if has_lock {
                fs::write(place(&format!(".fetch-{process}.lock")), b"").unwrap();
            }
        }
        fs::write(place("model.gguf"), b"whole").unwrap();
        fs::create_dir(place(".fetch-me-not")).unwrap();
        // Another download uses the last folder.
        let held = File::open(place(".fetch-4194307.lock")).unwrap();
        held.try_lock().unwrap();

        let staging = Staging::create(parent.path()).unwrap();
        let own = staging.folder.file_name().unwrap().to_str().unwrap().to_owned();
        let mut expected = vec![
            ".fetch-4194307".to_owned(),
            ".fetch-4194307.lock".to_owned(),
            own.clone(),
            format!("{own}.lock"),
            ".fetch-me-not".to_owned(),
            "model.gguf".to_owned(),
        ];
        expected.sort();
        assert_eq!(left(parent.path()), expected);
        assert!(staging.folder.read_dir().unwrap().next().is_none(), "it is empty");
        drop(staging);
        drop(held);

        drop(Staging::create(parent.path()).unwrap());
        assert_eq!(left(parent.path()), [".fetch-me-not", "model.gguf"]);
    }

    #[test]
    fn folder_of_a_dead_process_with_the_same_id_is_reused() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join(format!(".fetch-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("half.whl"), b"half").unwrap();
        let staging = Staging::create(parent.path()).unwrap();
        assert_eq!(staging.folder, folder);
        assert!(folder.read_dir().unwrap().next().is_none(), "it is empty");
        let another = Staging::create_within(parent.path(), Duration::ZERO);
        assert!(another.is_err(), "one at a time");
        drop(staging);
        assert!(left(parent.path()).is_empty());
    }

    #[test]
    fn lock_on_a_deleted_file_does_not_count() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join(".fetch-4194305.lock");
        let file = File::create(&path).unwrap();
        assert!(is_at(&file, &path).unwrap());
        fs::remove_file(&path).unwrap();
        assert!(!is_at(&file, &path).unwrap());
        let _another = File::create(&path).unwrap();
        assert!(!is_at(&file, &path).unwrap(), "the name alone is the same");
    }

    /// Other threads delete abandoned folders while downloads start.
    #[test]
    fn concurrent_cleanup_does_not_delete_new_folders() {
        let parent = tempfile::tempdir().unwrap();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        remove_abandoned(parent.path());
                    }
                });
            }
            let mut failed = None;
            for _ in 0..200 {
                match Staging::create_within(parent.path(), Duration::from_secs(60)) {
                    Ok(staging) if !staging.folder.exists() => failed = Some("no folder".into()),
                    Ok(staging) if !is_at(&staging._lock, &staging.lock_path).unwrap() => {
                        failed = Some("no lock".into());
                    }
                    Ok(_) => {}
                    Err(error) => failed = Some(format!("{error:#}")),
                }
            }
            // End the other threads before the assertion.
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(failed, None);
        });
    }
}
