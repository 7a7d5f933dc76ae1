//! Where a fetch puts what is not whole yet: a folder `.fetch-PID` beside the final place.
//!
//! Its owner holds a lock on the file `.fetch-PID.lock` as long as it lives, and removes both at its
//! end. A fetch that was killed cannot; the system drops its lock, and the next fetch removes what
//! nobody holds. A process id alone would not do: another process may have it by then.

use std::{
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

const PREFIX: &str = ".fetch-";
const LOCK: &str = ".lock";

/// Removed when dropped.
pub struct Staging {
    pub folder: PathBuf,
    lock_path: PathBuf,
    _lock: File,
}

impl Staging {
    /// An empty folder of this process in `parent`. What processes that are gone have left there is
    /// removed.
    pub fn create(parent: &Path) -> Result<Self> {
        fs::create_dir_all(parent)
            .with_context(|| format!("cannot create {}", parent.display()))?;
        remove_abandoned(parent);
        let folder = parent.join(format!("{PREFIX}{}", std::process::id()));
        let lock_path = lock_of(&folder);
        // The lock comes first: a folder without one belongs to nobody.
        let lock = File::create(&lock_path)
            .with_context(|| format!("cannot create {}", lock_path.display()))?;
        match lock.try_lock() {
            // Some network file systems have no locks; then nobody can tell, and nobody removes.
            Ok(()) | Err(TryLockError::Error(_)) => {}
            Err(TryLockError::WouldBlock) => {
                bail!("{} is in use: is another fetch running?", folder.display())
            }
        }
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

/// What cannot be removed does no harm but takes room.
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
        if let Ok(lock) = File::open(&lock_path)
            && lock.try_lock().is_err()
        {
            continue;
        }
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
    fn what_nobody_holds_is_removed_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let place = |name: &str| parent.path().join(name);
        // Process ids that none has: the numbers are too large.
        for (process, has_lock) in [("4194305", true), ("4194306", false), ("4194307", true)] {
            fs::create_dir(place(&format!(".fetch-{process}"))).unwrap();
            fs::write(place(&format!(".fetch-{process}")).join("half.whl"), b"half").unwrap();
            if has_lock {
                fs::write(place(&format!(".fetch-{process}.lock")), b"").unwrap();
            }
        }
        fs::write(place("model.gguf"), b"whole").unwrap();
        fs::create_dir(place(".fetch-me-not")).unwrap();
        // Somebody works in the last one.
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
    fn what_the_same_process_id_has_left_is_no_ones() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join(format!(".fetch-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("half.whl"), b"half").unwrap();
        let staging = Staging::create(parent.path()).unwrap();
        assert_eq!(staging.folder, folder);
        assert!(folder.read_dir().unwrap().next().is_none(), "it is empty");
        assert!(Staging::create(parent.path()).is_err(), "one at a time");
        drop(staging);
        assert!(left(parent.path()).is_empty());
    }
}
