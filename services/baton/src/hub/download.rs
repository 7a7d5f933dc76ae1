//! Downloads one model; the only file that sends requests to the hub.

use std::{
    collections::BTreeMap,
    fs,
    io::ErrorKind,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, ensure};
use config::{
    HubModel,
    hub::{Parts, UNVERIFIED_EXTENSION, is_cached},
};
use hf_hub::{
    Cache, CacheRepo, Repo, RepoType,
    api::{
        Progress,
        sync::{Api, ApiBuilder, ApiError, ApiRepo, Metadata},
    },
};
use indicatif::ProgressBar;

use super::{HubSettings, WatchedDownload, select};
use crate::model_store;

/// Number of attempts of a request. A further attempt resumes an interrupted download.
const TRIES: u32 = 4;
/// Delay before the second attempt. Each later delay is four times the previous delay.
const WAIT_FIRST: Duration = Duration::from_millis(250);
/// Extension of hf-hub's incomplete files.
const PART_EXTENSION: &str = "part";
const SHA256_DIGITS: usize = 64;

pub(super) struct Download {
    model: HubModel,
    api: Api,
    cache: Cache,
    endpoint: Option<String>,
    has_token: bool,
    watched: WatchedDownload,
}

impl Download {
    pub(super) fn new(
        cache: &Path,
        model: HubModel,
        settings: &HubSettings,
        watched: WatchedDownload,
    ) -> Result<Self> {
        let cache = Cache::new(cache.to_owned());
        let endpoint = settings.endpoint.clone();
        let token = settings.token.clone().or_else(|| cache.token());
        let has_token = token.is_some();
        // hf-hub's own retries append at the wrong offset; `retried` retries instead.
        let mut builder =
            ApiBuilder::from_cache(cache.clone()).with_progress(false).with_token(token);
        if let Some(endpoint) = &endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        let api = builder.build()?;
        Ok(Self { model, api, cache, endpoint, has_token, watched })
    }

    pub(super) fn run(&self, parts: Parts) -> Result<()> {
        let requested = self.repo(&self.model.revision);
        let info = self.retried(|| self.api.repo(requested.clone()).info())?;
        ensure!(
            is_digits(&info.sha),
            "invalid commit {:?} from the hub; expected hex digits",
            info.sha
        );
        let all: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
        let files = select::needed(&self.model, parts, &all)?;

        // Request files by commit: a push during the download could mix two versions.
        let commit = self.repo(&info.sha);
        let (api, cached) = (self.api.repo(commit.clone()), self.cache.repo(commit));
        let snapshot = cached.pointer_path(&info.sha);
        let mut missing = BTreeMap::new();
        for (order, file) in files.into_iter().enumerate() {
            if !is_cached(&snapshot.join(&file)) {
                let metadata = self.metadata(&api, &file).context(file.clone())?;
                missing.insert((order, file), metadata);
            }
        }
        let (bar, _) = &self.watched;
        bar.set_length(missing.values().map(|metadata| metadata.size() as u64).sum());
        for ((_, file), metadata) in &missing {
            self.fetch(&api, &cached, file, metadata).context(file.clone())?;
        }
        let point = || self.cache.repo(requested.clone()).create_ref(&info.sha);
        if self.model.revision != info.sha {
            point().with_context(|| format!("cannot write revision {}", self.model.revision))?;
        }
        Ok(())
    }

    fn repo(&self, revision: &str) -> Repo {
        Repo::with_revision(self.model.name.clone(), RepoType::Model, revision.to_owned())
    }

    /// Requests the size and the ETag of a file. The ETag becomes a file name, so only safe
    /// characters are allowed.
    fn metadata(&self, api: &ApiRepo, file: &str) -> Result<Metadata> {
        let metadata = self.retried(|| self.api.metadata(&api.url(file)))?;
        let tag = metadata.etag();
        let plain = tag.strip_prefix("W/").unwrap_or(tag);
        let fits = plain.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
        ensure!(
            fits && !plain.is_empty(),
            "invalid ETag {tag:?} from the hub; expected letters, digits, \"_\" and \"-\""
        );
        let commit = metadata.commit_hash();
        ensure!(is_digits(commit), "invalid commit {commit:?} from the hub; expected hex digits");
        Ok(metadata)
    }

    fn fetch(
        &self,
        api: &ApiRepo,
        cached: &CacheRepo,
        file: &str,
        metadata: &Metadata,
    ) -> Result<()> {
        let blob = cached.blob_path(metadata.etag());
        let unverified = blob.with_extension(UNVERIFIED_EXTENSION);
        let pointer = cached.pointer_path(metadata.commit_hash()).join(file);
        let (bar, arrived) = &self.watched;
        let base = bar.position();
        let path = if pointer.is_file() {
            // An earlier process was stopped during the verification.
            bar.inc(metadata.size() as u64);
            pointer
        } else {
            // Another commit uses an existing blob without a mark: do not hide its verified file.
            if is_sha256(metadata.etag()) && !blob.exists() {
                // Mark the file before the download, which puts the file into its place unverified.
                let folder = blob.parent().map_or(Ok(()), fs::create_dir_all);
                folder
                    .and_then(|()| fs::write(&unverified, ""))
                    .with_context(|| format!("cannot create {}", unverified.display()))?;
            }
            let downloaded = self.retried(|| {
                // Delete a partial file that is complete or too long: a download cannot resume it.
                let part = blob.with_extension(PART_EXTENSION);
                if fs::metadata(&part).is_ok_and(|part| part.len() >= metadata.size() as u64) {
                    fs::remove_file(&part)?;
                }
                let (bar, arrived) = self.watched.clone();
                api.download_with_progress(file, FileProgress { bar, arrived, base, bytes: 0 })
            });
            if downloaded.is_err() && !blob.exists() {
                // The mark would hide the file if another program completes the download.
                let _ = fs::remove_file(&unverified);
            }
            downloaded?
        };
        let outcome = check(&path, metadata.etag(), arrived);
        if outcome.is_err() {
            // Delete the file, so that the next attempt downloads it again.
            let _ = fs::remove_file(&path);
            let _ = fs::remove_file(&blob);
        }
        match fs::remove_file(&unverified) {
            Err(error) if outcome.is_ok() && error.kind() != ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot delete {}", unverified.display()))
            }
            _ => outcome,
        }
    }

    /// Retries `act` after transient errors.
    fn retried<T>(&self, act: impl Fn() -> Result<T, ApiError>) -> Result<T> {
        let mut wait = WAIT_FIRST;
        for _ in 1..TRIES {
            match act() {
                Err(error) if is_transient(&error) => {
                    thread::sleep(wait);
                    wait *= 4;
                }
                outcome => return outcome.map_err(|error| self.explain(error)),
            }
        }
        act().map_err(|error| self.explain(error))
    }

    /// Adds the remedy to an error.
    fn explain(&self, error: ApiError) -> anyhow::Error {
        let HubModel { name, revision, .. } = &self.model;
        let hub = self.endpoint.as_deref().unwrap_or("the hub");
        match status_of(&error) {
            Some(status @ (401 | 403)) if self.has_token => anyhow!(
                "{hub} answers {status}: the token in HF_TOKEN may not read {name}, or the model \
                 does not exist; accept the terms of a gated model on its page"
            ),
            Some(status @ (401 | 403)) => anyhow!(
                "{hub} answers {status}: {name} is private or gated, or does not exist; \
                 set HF_TOKEN to a token that may read it"
            ),
            Some(404) => anyhow!(
                "{hub} answers 404: model {name} with revision {revision} does not exist"
            ),
            Some(status) if is_transient(&error) => {
                anyhow!("{hub} answers {status}, after {TRIES} attempts")
            }
            Some(status) => anyhow!("{hub} answers {status}"),
            None if is_transient(&error) => anyhow::Error::new(error).context(format!(
                "cannot reach {hub}; HF_ENDPOINT sets another hub, HF_HUB_OFFLINE=1 uses only the cache"
            )),
            None => anyhow::Error::new(error).context(format!("cannot fetch {name}")),
        }
    }
}

/// Verifies a file whose ETag is a SHA-256. Adds each read byte to `arrived`: the verification of a
/// large file takes longer than a stalled download may.
fn check(path: &Path, tag: &str, arrived: &AtomicU64) -> Result<()> {
    if !is_sha256(tag) {
        return Ok(());
    }
    let found = model_store::sha256(path, |bytes| {
        arrived.fetch_add(bytes, Ordering::Relaxed);
    })?;
    ensure!(
        found.eq_ignore_ascii_case(tag),
        "the file is damaged: its SHA-256 is {found}; expected {tag}; the file was deleted, fetch it again"
    );
    Ok(())
}

fn is_sha256(tag: &str) -> bool {
    tag.len() == SHA256_DIGITS && is_digits(tag)
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn status_of(error: &ApiError) -> Option<u16> {
    match error {
        ApiError::RequestError(error) => match **error {
            ureq::Error::StatusCode(status) => Some(status),
            _ => None,
        },
        _ => None,
    }
}

/// Returns whether an error is transient: a broken connection, an overloaded server, or a local I/O
/// error other than a full disk, a read-only disk or a missing permission.
fn is_transient(error: &ApiError) -> bool {
    if let Some(status) = status_of(error) {
        return status == 429 || status >= 500;
    }
    match error {
        ApiError::RequestError(_) => true,
        ApiError::IoError(error) => !matches!(
            error.kind(),
            ErrorKind::StorageFull | ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem
        ),
        _ => false,
    }
}

/// Progress of one file, shown on the progress bar of the whole model.
struct FileProgress {
    bar: ProgressBar,
    arrived: Arc<AtomicU64>,
    /// Bytes of the files before this one.
    base: u64,
    bytes: u64,
}

impl Progress for FileProgress {
    fn init(&mut self, _size: usize, _file: &str) {
        // hf-hub calls `init` for every attempt and then reports the bytes that exist already.
        self.bytes = 0;
        self.arrived.fetch_add(1, Ordering::Relaxed);
    }

    fn update(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        self.bar.set_position(self.base + self.bytes);
        self.arrived.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn finish(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verification_counts_as_progress() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        fs::write(&path, vec![7_u8; 3_000_000]).unwrap();
        let arrived = AtomicU64::new(5);
        let error = check(&path, &"f".repeat(SHA256_DIGITS), &arrived).unwrap_err().to_string();
        assert!(error.contains("damaged"), "{error}");
        assert_eq!(arrived.load(Ordering::Relaxed), 3_000_005);
        check(&path, "an-etag", &arrived).unwrap();
        assert_eq!(arrived.load(Ordering::Relaxed), 3_000_005);
    }
}
