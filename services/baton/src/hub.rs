//! Models of the hub: fetched into the cache that its own tools use.
//!
//! 1. The hub is asked for the model's files and the commit that the revision stands for.
//! 2. What is needed of it is fetched at exactly this commit, broken downloads going on where they
//!    broke; a file that is stored under its SHA-256 is checked against it.
//! 3. The revision is pointed to the commit: half a model is never found.
//!
//! Services read the cache by [`config::hub`]; of the four programs this one alone links a client.

mod download;
mod select;

use std::{
    env,
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
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

/// A fetch is given up when nothing arrived for this long.
const STALL_MAX: Duration = Duration::from_secs(120);
/// How long another process may fetch the same model first.
const OTHER_MAX: Duration = Duration::from_secs(3600);
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// In the model's folder of the cache; held by the process that fetches it.
const LOCK_FILE: &str = ".baton-fetch.lock";

/// What the environment says, in the words of the hub's own tools.
pub struct HubSettings {
    hub: Hub,
    endpoint: Option<String>,
    token: Option<String>,
    offline: bool,
}

impl HubSettings {
    pub fn from_process() -> Result<Self> {
        let hub = Hub::new(&config::environment_of(env::vars_os())?);
        let set = |name: &str| {
            let value = env::var(name).ok().map(|value| value.trim().to_owned());
            value.filter(|value| !value.is_empty())
        };
        let token = set("HF_TOKEN");
        ensure!(
            token.iter().all(|token| token.bytes().all(|byte| byte.is_ascii_graphic())),
            "HF_TOKEN holds characters that no token has; allowed: printable ASCII without spaces"
        );
        let yes = ["1", "on", "yes", "true"];
        let offline = set("HF_HUB_OFFLINE")
            .is_some_and(|value| yes.contains(&value.to_ascii_lowercase().as_str()));
        let endpoint = set("HF_ENDPOINT").map(|url| url.trim_end_matches('/').to_owned());
        Ok(Self { hub, endpoint, token, offline })
    }
}

/// The model's path in the cache; fetches what is not there.
pub fn obtain(model: &HubModel, parts: Parts) -> Result<PathBuf> {
    let settings = HubSettings::from_process()?;
    match settings.hub.find(model, parts) {
        Some(path) => Ok(path),
        None => fetch_by(settings, model, parts),
    }
}

/// Asks the hub what the revision stands for now and fetches what is missing of it. Offline the
/// cache is enough.
pub fn fetch(model: &HubModel, parts: Parts) -> Result<PathBuf> {
    let settings = HubSettings::from_process()?;
    match settings.hub.find(model, parts) {
        Some(path) if settings.offline => Ok(path),
        _ => fetch_by(settings, model, parts),
    }
}

fn fetch_by(settings: HubSettings, model: &HubModel, parts: Parts) -> Result<PathBuf> {
    let cache = settings
        .hub
        .cache()
        .ok_or_else(|| anyhow!("there is no cache for {model}: set HF_HOME to a folder"))?;
    ensure!(
        !settings.offline,
        "{model} is not in {} and HF_HUB_OFFLINE is set: fetch it where there is a network, or \
         unset the variable",
        cache.display()
    );
    let folder = cache.join(cache_folder(model));
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let _lock = lock(&folder.join(LOCK_FILE), model)?;
    download(&settings, cache, model, parts).with_context(|| format!("cannot fetch {model}"))?;
    let found = settings.hub.find(model, parts);
    found.ok_or_else(|| anyhow!("{model} was fetched and is not whole in {}", cache.display()))
}

/// Several services may want the same model at once; one fetches it. A process that dies lets go.
fn lock(path: &Path, model: &HubModel) -> Result<File> {
    let file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    let began = Instant::now();
    let mut told = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
            Err(TryLockError::WouldBlock) => {}
        }
        ensure!(
            began.elapsed() < OTHER_MAX,
            "another process has been fetching {model} for {} minutes",
            OTHER_MAX.as_secs() / 60
        );
        if !told {
            eprintln!("baton: another process fetches {model}; waiting for it");
            told = true;
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// Downloads on a thread of its own, because its reads have no deadline: this one has.
fn download(settings: &HubSettings, cache: &Path, model: &HubModel, parts: Parts) -> Result<()> {
    let arrived = Arc::new(AtomicU64::new(0));
    let bar = model_store::bar(0, &model.name);
    let download = Download::new(
        cache,
        model.clone(),
        settings.endpoint.clone(),
        settings.token.clone(),
        (bar.clone(), arrived.clone()),
    )?;
    let (done, outcome) = mpsc::channel();
    thread::spawn(move || {
        // Fails only when it was given up.
        let _ = done.send(download.run(parts));
    });
    let outcome = watch(&outcome, &arrived);
    bar.finish_and_clear();
    outcome
}

fn watch(outcome: &mpsc::Receiver<Result<()>>, arrived: &AtomicU64) -> Result<()> {
    let mut seen = 0;
    let mut grown = Instant::now();
    loop {
        match outcome.recv_timeout(LOOK_EVERY) {
            Ok(outcome) => return outcome,
            Err(mpsc::RecvTimeoutError::Disconnected) => bail!("the download broke off"),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        let now = arrived.load(Ordering::Relaxed);
        if now != seen {
            (seen, grown) = (now, Instant::now());
        }
        ensure!(grown.elapsed() < STALL_MAX, "nothing arrived for {} s", STALL_MAX.as_secs());
    }
}

/// What a download tells while it runs.
type Watched = (ProgressBar, Arc<AtomicU64>);
