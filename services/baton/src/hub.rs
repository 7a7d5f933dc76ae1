//! Download of Hugging Face hub models into the cache of the hub's own tools.
//!
//! 1. Query the hub for the model's files and the commit of the revision.
//! 2. Download the required files of this commit. An interrupted download resumes. A file whose
//!    ETag is a SHA-256 is verified. Lookups ignore the file until then. The next call repeats an
//!    interrupted verification.
//! 3. Point the revision to the commit. Lookups by revision find the model only after this step.
//!
//! Services read the cache with [`config::hub`]; only this program links an HTTP client for the
//! hub.

mod download;
mod select;

use std::{
    env,
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use config::{
    HubModel,
    hub::{Hub, Parts, cache_folder},
};
use indicatif::ProgressBar;

use self::download::Download;
use crate::model_store;

/// Time-out of a download without progress.
const STALL_MAX: Duration = Duration::from_secs(120);
/// Maximum time to wait for another process that downloads the same model.
const LOCK_WITHIN: Duration = Duration::from_secs(3600);
/// Polling interval of the lock.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Lock file in the model's folder of the cache; the downloading process holds the lock.
const LOCK_FILE: &str = ".baton-fetch.lock";

/// Settings from the environment variables of the hub's own tools.
pub(crate) struct HubSettings {
    hub: Hub,
    endpoint: Option<String>,
    token: Option<String>,
    offline: bool,
}

impl HubSettings {
    pub(crate) fn from_process() -> Result<Self> {
        let hub = Hub::new(&config::environment_of(env::vars_os())?);
        let set = |name: &str| {
            let value = env::var(name).ok().map(|value| value.trim().to_owned());
            value.filter(|value| !value.is_empty())
        };
        let token = set("HF_TOKEN");
        ensure!(
            token.iter().all(|token| token.bytes().all(|byte| byte.is_ascii_graphic())),
            "invalid HF_TOKEN; expected printable ASCII characters without spaces"
        );
        let yes = ["1", "on", "yes", "true"];
        let offline = set("HF_HUB_OFFLINE")
            .is_some_and(|value| yes.contains(&value.to_ascii_lowercase().as_str()));
        let endpoint = set("HF_ENDPOINT").map(|url| url.trim_end_matches('/').to_owned());
        Ok(Self { hub, endpoint, token, offline })
    }
}

/// Returns the model's path in the cache. Downloads the model if the cache lacks it. With `update`,
/// queries the hub for the revision's current commit and downloads missing files, except offline if
/// the model is cached.
pub(crate) fn obtain(model: &HubModel, parts: Parts, update: bool) -> Result<PathBuf> {
    let settings = HubSettings::from_process()?;
    if let Some(path) = settings.hub.find(model, parts)
        && (!update || settings.offline)
    {
        return Ok(path);
    }
    let cache = settings.hub.cache().ok_or_else(|| {
        anyhow!("cannot fetch {model}: no cache folder is known; expected HF_HOME to name a folder")
    })?;
    ensure!(
        !settings.offline,
        "cannot fetch {model}: it is not in {} and HF_HUB_OFFLINE is set; fetch it on a machine with a \
         network, or unset the variable",
        cache.display()
    );
    let folder = cache.join(cache_folder(model));
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let _lock = lock(&folder.join(LOCK_FILE), model)?;
    download(&settings, cache, model, parts).with_context(|| format!("cannot fetch {model}"))?;
    let found = settings.hub.find(model, parts);
    found.ok_or_else(|| {
        anyhow!("cannot find all files of {model} in {} after the download", cache.display())
    })
}

/// Locks the model's folder, so that only one process downloads a model. The kernel releases the
/// lock of a dead process.
fn lock(path: &Path, model: &HubModel) -> Result<File> {
    let file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    let began = Instant::now();
    let mut is_announced = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
            Err(TryLockError::WouldBlock) => {}
        }
        ensure!(
            began.elapsed() < LOCK_WITHIN,
            "cannot lock {model}: another process has been fetching it for {} minutes",
            LOCK_WITHIN.as_secs() / 60
        );
        if !is_announced {
            eprintln!("baton: waiting for another process that fetches {model}");
            is_announced = true;
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Downloads on a separate thread and fails after [`STALL_MAX`] without progress: the HTTP client's
/// reads have no deadline.
fn download(settings: &HubSettings, cache: &Path, model: &HubModel, parts: Parts) -> Result<()> {
    let arrived = Arc::new(AtomicU64::new(0));
    let bar = model_store::bar(0, &model.name);
    let download = Download::new(cache, model.clone(), settings, (bar.clone(), arrived.clone()))?;
    let mut thread = Some(thread::spawn(move || download.run(parts)));
    let joined = || match thread.take_if(|thread| thread.is_finished()).map(JoinHandle::join) {
        Some(outcome) => {
            outcome.unwrap_or_else(|_| bail!("the download thread panicked")).map(Some)
        }
        None => Ok(None),
    };
    let arrived = || arrived.load(Ordering::Relaxed);
    let outcome = model_store::wait_unless_stalled(STALL_MAX, arrived, joined);
    bar.finish_and_clear();
    outcome
}

/// Progress of a download: the bar, and a counter that grows with every file and every downloaded
/// or verified byte.
type WatchedDownload = (ProgressBar, Arc<AtomicU64>);
