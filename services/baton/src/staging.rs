//! Staging folder `.baton-fetch-*` of a download, next to the model's final folder.
//!
//! The downloading process locks the folder and deletes it at its end. When the process is killed
//! the kernel releases the lock, and the next download deletes unlocked folders.

use std::{
    fs::{self, File, TryLockError},
    path::Path,
};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

const PREFIX: &str = ".baton-fetch-";
/// Number of attempts: other downloads may delete a folder before it is locked.
const TRIES: u32 = 1000;

/// An empty folder that is locked until it is deleted; dropping deletes it.
pub(crate) struct Staging {
    pub folder: TempDir,
    _lock: File,
}

impl Staging {
    /// Creates a folder in `parent`. Deletes folders of dead processes.
    pub(crate) fn create(parent: &Path) -> Result<Self> {
        let cannot = || format!("cannot create a folder in {}", parent.display());
        fs::create_dir_all(parent).with_context(cannot)?;
        remove_abandoned(parent);
        for _ in 0..TRIES {
            let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent);
            let folder = folder.with_context(cannot)?;
            let Ok(lock) = File::open(folder.path()) else { continue };
            // Some network file systems have no locks. Then no process deletes folders.
            let is_locked_by_another = matches!(lock.try_lock(), Err(TryLockError::WouldBlock));
            if !is_locked_by_another && folder.path().exists() {
                return Ok(Self { folder, _lock: lock });
            }
        }
        bail!("{}: other downloads delete the folder", cannot())
    }
}

/// Deletes the folders of dead processes. Ignores errors: a remaining folder only takes space.
fn remove_abandoned(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let is_staging = entry.file_name().to_string_lossy().starts_with(PREFIX);
        // The lock is held until the folder is deleted.
        if is_staging
            && let Ok(folder) = File::open(entry.path())
            && folder.try_lock().is_ok()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

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
        for name in ["dead", "alive"] {
            fs::create_dir(place(&format!(".baton-fetch-{name}"))).unwrap();
            fs::write(place(&format!(".baton-fetch-{name}/half.whl")), b"half").unwrap();
        }
        fs::write(place("model.gguf"), b"whole").unwrap();
        fs::create_dir(place(".fetch-me-not")).unwrap();
        // Another download uses this folder.
        let held = File::open(place(".baton-fetch-alive")).unwrap();
        held.try_lock().unwrap();

        let staging = Staging::create(parent.path()).unwrap();
        let own = staging.folder.path().file_name().unwrap().to_str().unwrap().to_owned();
        let mut expected = vec![
            ".baton-fetch-alive".to_owned(),
            own,
            ".fetch-me-not".to_owned(),
            "model.gguf".to_owned(),
        ];
        expected.sort();
        assert_eq!(left(parent.path()), expected);
        assert!(
            staging.folder.path().read_dir().unwrap().next().is_none(),
            "the staging folder is empty"
        );
        drop(staging);
        // A child of another test may still hold the file itself.
        held.unlock().unwrap();

        drop(Staging::create(parent.path()).unwrap());
        assert_eq!(left(parent.path()), [".fetch-me-not", "model.gguf"]);
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
                match Staging::create(parent.path()) {
                    Ok(staging) if !staging.folder.path().exists() => {
                        failed = Some("no folder".into());
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
