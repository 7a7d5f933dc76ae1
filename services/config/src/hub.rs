//! Models of the Hugging Face hub in the cache that all programs of a machine share.
//!
//! The layout is the hub's own: `models--ORG--NAME` with `refs/REVISION` (a commit) and
//! `snapshots/COMMIT/FILE`. Services only read the cache. The program `baton` in the same folder
//! downloads missing models, so the services contain no code for downloads.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
};

use crate::{
    input::Environment,
    types::{HubModel, ModelPath, is_word, parts_of},
};

/// Maximum size of a reference file in bytes; a commit has 40 digits.
const REF_BYTES_MAX: u64 = 256;
/// Variables that locate the cache, highest precedence first.
pub(crate) const VARIABLES: [&str; 3] = ["HF_HUB_CACHE", "HF_HOME", "HOME"];

/// Extension of the empty file beside a blob that is not verified yet.
pub const UNVERIFIED_EXTENSION: &str = "unverified";

/// Required files of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parts {
    /// Tokenizer, chat template and sampling defaults, for the router; the whole file of a GGUF
    /// model.
    Text,
    /// The files of `Text`, and the weights.
    All,
}

/// Local cache of the hub, and the program that downloads missing models.
#[derive(Clone, Debug, Default)]
pub struct Hub {
    cache: Option<PathBuf>,
    fetcher: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error("cannot fetch {model}: no cache folder is known; expected HF_HOME to name a folder")]
    NoCache { model: HubModel },
    #[error(
        "cannot load {model}: it is not in the cache {cache}; run `baton model fetch {model}` on this machine",
        cache = cache.display()
    )]
    NotCached { model: HubModel, cache: PathBuf },
    #[error("cannot fetch {model} with {program}: {cause}", program = program.display())]
    NotRun { model: HubModel, program: PathBuf, cause: io::Error },
    #[error(
        "cannot fetch {model}: `baton model fetch` failed with {status}; its log line above has the cause"
    )]
    NotFetched { model: HubModel, status: ExitStatus },
}

impl Hub {
    /// Uses `HF_HUB_CACHE`, otherwise `hub` in `HF_HOME`, otherwise the default folder of the hub's
    /// own tools.
    pub fn new(environment: &Environment) -> Self {
        let folder =
            |name: &str| environment.get(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        let [cache, home, user] = VARIABLES.map(folder);
        let cache = cache
            .or_else(|| home.map(|home| home.join("hub")))
            .or_else(|| user.map(|user| user.join(".cache").join("huggingface").join("hub")));
        Self { cache, fetcher: None }
    }

    /// Sets the program that downloads missing models with `PROGRAM model fetch NAME`.
    pub fn fetched_by(self, program: Option<PathBuf>) -> Self {
        Self { fetcher: program.filter(|program| program.is_file()), ..self }
    }

    /// Returns the folder of all cached models.
    pub fn cache(&self) -> Option<&Path> {
        self.cache.as_deref()
    }

    /// Returns the path of a complete cached model: a folder, or a GGUF file (the first part).
    pub fn find(&self, model: &HubModel, parts: Parts) -> Option<PathBuf> {
        let folder = self.cache.as_ref()?.join(cache_folder(model));
        let snapshots = folder.join("snapshots");
        let by_commit = snapshots.join(&model.revision);
        let snapshot = if by_commit.is_dir() {
            by_commit
        } else {
            snapshots.join(commit_of(&folder.join("refs").join(&model.revision))?)
        };
        let here = |name: &str| is_cached(&snapshot.join(name));
        if let Some(file) = &model.file {
            let all = parts_of(file);
            return all.iter().all(|part| here(part)).then(|| snapshot.join(&all[0]));
        }
        let text = here("config.json") && here("tokenizer.json");
        (text && (parts == Parts::Text || has_weights(&snapshot))).then_some(snapshot)
    }

    /// Returns the local path of a model. Downloads a hub model that the cache lacks.
    ///
    /// # Errors
    /// [`HubError`]. The function does not check that a local path exists.
    pub async fn obtain(&self, path: &ModelPath, parts: Parts) -> Result<PathBuf, HubError> {
        let model = match path {
            ModelPath::Local(path) => return Ok(path.clone()),
            ModelPath::Hub(model) => model,
        };
        if let Some(found) = self.find(model, parts) {
            return Ok(found);
        }
        let model = model.clone();
        let Some(cache) = self.cache.clone() else { return Err(HubError::NoCache { model }) };
        let Some(program) = self.fetcher.clone() else {
            return Err(HubError::NotCached { model, cache });
        };
        let mut fetch = tokio::process::Command::new(&program);
        fetch.args(["model", "fetch", &model.to_string()]);
        if parts == Parts::Text {
            fetch.arg("--text-only");
        }
        // The program has a time-out of its own. It is killed when the service stops.
        let status = fetch.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true).status();
        match status.await {
            Err(cause) => Err(HubError::NotRun { model, program, cause }),
            Ok(status) if !status.success() => Err(HubError::NotFetched { model, status }),
            Ok(_) => self.find(&model, parts).ok_or(HubError::NotCached { model, cache }),
        }
    }
}

/// Returns the name of a model's folder in the cache.
pub fn cache_folder(model: &HubModel) -> String {
    format!("models--{}", model.name.replace('/', "--"))
}

/// Returns whether a snapshot has a file that is not marked as unverified.
pub fn is_cached(file: &Path) -> bool {
    fs::canonicalize(file)
        .is_ok_and(|blob| blob.is_file() && !blob.with_extension(UNVERIFIED_EXTENSION).exists())
}

fn commit_of(reference: &Path) -> Option<String> {
    let mut commit = String::new();
    File::open(reference).ok()?.take(REF_BYTES_MAX).read_to_string(&mut commit).ok()?;
    Some(commit.trim().to_owned()).filter(|commit| is_word(commit))
}

/// Returns whether the folder has weights and all parts of each split file.
fn has_weights(snapshot: &Path) -> bool {
    let Ok(entries) = fs::read_dir(snapshot) else { return false };
    let names: Vec<String> = entries
        .flatten()
        // Skip links to missing and unverified blobs.
        .filter(|entry| is_cached(&entry.path()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.ends_with(".safetensors"))
        .collect();
    !names.is_empty()
        && names.iter().flat_map(|name| parts_of(name)).all(|part| names.contains(&part))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(text: &str) -> HubModel {
        match ModelPath::parse(text) {
            Some(ModelPath::Hub(model)) => model,
            other => panic!("{text}: {other:?}"),
        }
    }

    fn environment(variables: &[(&str, &Path)]) -> Environment {
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        variables.iter().map(|(name, path)| ((*name).to_owned(), text(path))).collect()
    }

    #[test]
    fn hub_cache_follows_the_hub_tools_variables() {
        let [cache, home, user] = ["/c", "/h", "/u"].map(Path::new);
        let of = |variables: &[_]| Hub::new(&environment(variables)).cache;
        let all = [("HF_HUB_CACHE", cache), ("HF_HOME", home), ("HOME", user)];
        assert_eq!(of(&all), Some("/c".into()));
        assert_eq!(of(&all[1..]), Some("/h/hub".into()));
        assert_eq!(of(&all[2..]), Some("/u/.cache/huggingface/hub".into()));
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn model_is_found_once_all_required_files_are_cached() {
        let home = tempfile::tempdir().unwrap();
        let hub_of_home = Hub::new(&environment(&[("HF_HUB_CACHE", home.path())]));
        let folder = home.path().join("models--acme--tiny");
        let snapshot = folder.join("snapshots").join("0a1b");
        fs::create_dir_all(folder.join("refs")).unwrap();
        fs::create_dir_all(&snapshot).unwrap();
        fs::write(folder.join("refs").join("main"), "0a1b\n").unwrap();
        let add = |name: &str| fs::write(snapshot.join(name), "x").unwrap();
        let model = hub("hf:acme/tiny");
        let found = |parts| hub_of_home.find(&model, parts);

        add("config.json");
        assert_eq!(found(Parts::Text), None);
        add("tokenizer.json");
        assert_eq!(found(Parts::Text), Some(snapshot.clone()));
        add("model-00001-of-00002.safetensors");
        assert_eq!(found(Parts::All), None);
        add("model-00002-of-00002.safetensors");
        assert_eq!(found(Parts::All), Some(snapshot.clone()));
        assert_eq!(hub_of_home.find(&hub("hf:acme/tiny@0a1b"), Parts::All), Some(snapshot.clone()));
        assert_eq!(hub_of_home.find(&hub("hf:acme/tiny@v2"), Parts::Text), None);

        let file = hub("hf:acme/tiny/m-00001-of-00002.gguf");
        add("m-00001-of-00002.gguf");
        assert_eq!(hub_of_home.find(&file, Parts::Text), None);
        add("m-00002-of-00002.gguf");
        let first = snapshot.join("m-00001-of-00002.gguf");
        assert_eq!(hub_of_home.find(&file, Parts::Text), Some(first));
    }

    #[test]
    fn unverified_file_is_missing() {
        let home = tempfile::tempdir().unwrap();
        let hub_of_home = Hub::new(&environment(&[("HF_HUB_CACHE", home.path())]));
        let folder = home.path().join("models--acme--tiny");
        let (blobs, snapshot) = (folder.join("blobs"), folder.join("snapshots").join("0a1b"));
        fs::create_dir_all(&blobs).unwrap();
        fs::create_dir_all(&snapshot).unwrap();
        for name in ["config.json", "tokenizer.json"] {
            fs::write(snapshot.join(name), "x").unwrap();
        }
        for name in ["model.safetensors", "q8.gguf"] {
            fs::write(blobs.join("0f0f"), "x").unwrap();
            std::os::unix::fs::symlink("../../blobs/0f0f", snapshot.join(name)).unwrap();
        }
        let found = |name: &str| hub_of_home.find(&hub(name), Parts::All);
        let (folder_model, file_model) = ("hf:acme/tiny@0a1b", "hf:acme/tiny@0a1b/q8.gguf");
        assert_eq!(found(folder_model), Some(snapshot.clone()));
        assert_eq!(found(file_model), Some(snapshot.join("q8.gguf")));
        let mark = blobs.join("0f0f").with_extension(UNVERIFIED_EXTENSION);
        fs::write(&mark, "").unwrap();
        assert_eq!((found(folder_model), found(file_model)), (None, None));
        fs::remove_file(&mark).unwrap();
        assert_eq!(found(folder_model), Some(snapshot));
    }

    #[test]
    fn reference_that_escapes_the_cache_is_ignored() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("models--acme--tiny");
        fs::create_dir_all(folder.join("refs")).unwrap();
        fs::create_dir_all(folder.join("snapshots")).unwrap();
        fs::write(folder.join("refs").join("main"), "..").unwrap();
        fs::write(folder.join("config.json"), "x").unwrap();
        fs::write(folder.join("tokenizer.json"), "x").unwrap();
        let found = Hub::new(&environment(&[("HF_HUB_CACHE", home.path())]));
        assert_eq!(found.find(&hub("hf:acme/tiny"), Parts::Text), None);
    }

    #[tokio::test]
    async fn missing_model_error_names_the_fetch_command() {
        let home = tempfile::tempdir().unwrap();
        let hub = Hub::new(&environment(&[("HF_HOME", home.path())]));
        let path = ModelPath::parse("hf:acme/tiny").unwrap();
        let error = hub.obtain(&path, Parts::All).await.unwrap_err().to_string();
        assert!(error.contains("baton model fetch hf:acme/tiny"), "{error}");
        let error = Hub::default().obtain(&path, Parts::All).await.unwrap_err().to_string();
        assert!(error.contains("HF_HOME"), "{error}");
    }
}
