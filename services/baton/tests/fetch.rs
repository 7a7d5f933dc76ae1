//! `baton model fetch` is killed during its download.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

/// Time-out of every wait.
const DEADLINE: Duration = Duration::from_secs(60);

/// A `python3` whose pip writes half of a file and then hangs, or fails at once.
const PYTHON: &str = r#"#!/bin/sh
case "$*" in
*--version*) exit 0 ;;
esac
if [ -e "$(dirname "$0")/fails" ]; then
    echo "no such package" >&2
    exit 1
fi
echo half > "$TMPDIR/half"
echo $$ > "$(dirname "$0")/pid"
exec sleep 600
"#;

struct FetchFolder {
    folder: tempfile::TempDir,
}

impl FetchFolder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let python = folder.path().join("python3");
        fs::write(&python, PYTHON).unwrap();
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
        Self { folder }
    }

    fn fetch(&self) -> Command {
        let path = std::env::var("PATH").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command
            .args(["model", "fetch", "smollm2-135m", "--models-dir"])
            .arg(self.models())
            .env("PATH", format!("{}:{path}", self.folder.path().display()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn models(&self) -> PathBuf {
        self.folder.path().join("models")
    }

    /// Returns the names in the model's final folder.
    fn left(&self) -> Vec<String> {
        let entries = fs::read_dir(self.models().join("smollm2-135m"));
        let name = |entry: fs::DirEntry| entry.file_name().into_string().unwrap();
        let mut names: Vec<String> =
            entries.into_iter().flatten().map(|entry| name(entry.unwrap())).collect();
        names.sort();
        names
    }

    /// Returns whether exactly one staging folder is left, with half of the download.
    fn has_half(&self) -> bool {
        let left = self.left();
        let half = |name: &String| self.models().join("smollm2-135m").join(name).join("half");
        left.len() == 1 && half(&left[0]).exists()
    }

    /// Returns a fetch during its download, and the process that downloads.
    fn begun(&self) -> (Child, Downloader) {
        let pid = self.folder.path().join("pid");
        let _ = fs::remove_file(&pid);
        let mut fetch = self.fetch().spawn().unwrap();
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Ok(text) = fs::read_to_string(&pid)
                && let Ok(id) = text.trim().parse()
            {
                return (fetch, Downloader(id));
            }
            assert_eq!(fetch.try_wait().unwrap(), None, "the fetch ended before it was killed");
            assert!(Instant::now() < deadline, "the fetch does not start the download");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Runs another fetch, whose package does not exist.
    fn fails(&self) {
        let fails = self.folder.path().join("fails");
        fs::write(&fails, b"").unwrap();
        let output = ended(self.fetch().spawn().unwrap());
        fs::remove_file(&fails).unwrap();
        assert!(!output.status.success());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("no such package"), "{said}");
    }
}

/// Returns the output of a fetch. Kills a fetch that does not exit by itself.
fn ended(mut fetch: Child) -> Output {
    let deadline = Instant::now() + DEADLINE;
    while fetch.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            fetch.kill().unwrap();
            fetch.wait().unwrap();
            panic!("the fetch does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    fetch.wait_with_output().unwrap()
}

/// The downloading process. It outlives the fetch that started it; dropping this handle kills it.
struct Downloader(u32);

impl Drop for Downloader {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-KILL", &self.0.to_string()]).status();
    }
}

#[test]
fn next_download_removes_the_partial_files_of_a_killed_one() {
    let place = FetchFolder::new();
    let (mut fetch, downloader) = place.begun();
    fetch.kill().unwrap();
    fetch.wait().unwrap();
    drop(downloader);
    assert!(place.has_half(), "{:?}", place.left());
    place.fails();
    assert_eq!(place.left(), Vec::<String>::new());
}

#[test]
fn running_download_keeps_its_partial_files() {
    let place = FetchFolder::new();
    let (mut fetch, downloader) = place.begun();
    place.fails();
    assert!(place.has_half(), "{:?}", place.left());
    assert_eq!(fetch.try_wait().unwrap(), None);
    fetch.kill().unwrap();
    fetch.wait().unwrap();
    drop(downloader);
}
